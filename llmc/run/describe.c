// describe.c: reads the tables of modes.h, tensors.h and presets.h, and prints them. The numbers
// come from the functions that allocate and initialize (memory.h, init.h), so they cannot differ.
#include "describe.h"
#include "config.h"

double show_size(const Model *m, const Entry *e, bool active) {
    // These hold the matrices and gains of all E experts, one below the other.
    bool expert = e->id == PARAM_xg || e->id == PARAM_xu || e->id == PARAM_xd ||
                  e->id == PARAM_expert_hidden_w || e->id == PARAM_expert_out_w;
    double size = entry_rows(m, e) * e->row.cols;
    return active && expert ? size * ((double)m->moe.K / m->moe.E) : size;
}

int64_t show_parameters(const Model *m, const Layout *layout, bool active) {
    double sum = 0;                                        // exact up to 2^53
    for (int k = 0; k < layout->count; k++) sum += show_size(m, &layout->entries[k], active);
    return sum;
}

double show_flops(const Model *m, const Layout *layout) {
    // A tied head is the embedding, which counts as a product here alone.
    double matrices = m->tied ? (double)m->V * m->C : 0;
    for (int k = 0; k < layout->count; k++) {
        const Entry *e = &layout->entries[k];
        if (e->row.lr == LR_HIDDEN || e->row.lr == LR_HEAD) matrices += show_size(m, e, true);
    }
    return 6 * matrices + 3.0 * m->L * m->NH * (qk_size(m) + m->HS) * m->T;
}

// ---------------------------------------------------------------------------- memory

// Bytes of a model in this process, by the tables of tensors.h.
typedef struct Memory {
    double weights;                           // with the copies that products read
    double gradients;                         // of parameters, summed over micro-batches
    double moments;                           // AdamW's, of this process's shard (ZeRO-1)
    double acts, grads;                       // activations of a micro-batch and their gradients
    double sum;                               // of the above
    double kv_cache;                          // apart: only a run that samples has one
} Memory;

static bool is_gpu(const Trainer *t) { return strcmp(t->device, "cpu") != 0; }

// The sizes of the largest micro-batch, as the device computes it.
static Sizes setup_sizes(const Trainer *t, const Model *m, const Setup *setup) {
    int threads = is_gpu(t) ? 0 : omp_get_max_threads();
    int ratio = is_gpu(t) ? sizeof(float) / t->storage : 1;
    return sizes_make(m, setup->B, setup->T, setup->recompute, threads, ratio);
}

// In bf16 the products read their own copies of the weights (storage); the fp32 weights (element)
// are then sharded over processes like the moments of AdamW.
static Memory memory_make(const Trainer *t, const Model *m, const Setup *setup) {
    bool copies = t->storage != t->element;
    Sizes s = setup_sizes(t, m, setup);
    Layout layout = layout_make(m);
    layout_share(&layout, comm_rank(setup->comm), comm_size(setup->comm));
    ActLayout acts = act_layout_make(m, &s);
    double all = layout.total * t->element, shard = layout.state * t->element;
    Memory y = {
        .weights = copies && setup->training ? shard : all,
        // A model that is only read has neither gradients nor moments.
        .gradients = setup_kinds(setup) > GRADS ? all : 0,
        .moments = setup_kinds(setup) > ADAM_V ? 2 * shard : 0,
        .acts = acts.acts * t->storage,
        .grads = setup->training ? acts.grads * t->storage : 0,
        // All layers, one text of the longest length.
        .kv_cache = (double)m->L * m->T * kv_cache_width(m) * t->storage,
    };
    if (copies) y.weights += layout.total * t->storage;
    y.sum = y.weights + y.gradients + y.moments + y.acts + y.grads;
    layout_free(&layout);
    act_layout_free(&acts);
    return y;
}

double memory_needed(const Trainer *t, const Model *m, const Setup *setup) {
    Memory y = memory_make(t, m, setup);
    return t->bytes(m, setup, y.sum + (setup->decodes ? y.kv_cache : 0));
}

int memory_fitting(const Trainer *t, const Model *m, const Setup *setup, double room) {
    Setup s = *setup;
    // At most 2^31 rows of a micro-batch, a row for each expert of a token (run_refuse).
    int64_t most = INT32_MAX / s.T / (m->moe.E ? m->moe.K : 1);
    int64_t share = CEIL_DIV(s.batch, comm_size(s.comm));
    // Memory grows with B, so the first that fits is the largest.
    for (s.B = share < most ? share : most; s.B > 0; s.B--)
        if (s.batch % s.B == 0 && memory_needed(t, m, &s) <= room) break;
    return s.B;
}

char *memory_advice(char *text, size_t cap, const Trainer *t, const Model *m, const Setup *setup,
                    double room) {
    static const struct { int level; const char *flag; } LEVELS[] = {{RECOMPUTE_OFF, ""},
        {RECOMPUTE_CHEAP, " --recompute cheap"}, {RECOMPUTE_ON, " --recompute on"}};
    int best = 0;
    for (int i = 0; i < (setup->training ? 3 : 1); i++) {  // without backward there is one level
        Setup s = *setup;
        if (setup->training) s.recompute = LEVELS[i].level;
        int B = memory_fitting(t, m, &s, room);
        if (B <= best) continue;                           // recompute costs time: not for nothing
        size_t n = best ? strlen(text) : 0;
        check_format(text + n, cap - n, "%s--micro-batch %d%s", n ? ", or " : "", B,
                     LEVELS[i].flag);
        best = B;
    }
    return best ? text : check_format(text, cap, "a smaller --model or --seq, or more memory");
}

void show_memory(const Trainer *t, const Model *m, const Setup *setup) {
    char fitting[256];
    // room first refuses a model that the device cannot compute.
    double room = t->room(m, setup), gib = 1 << 30;
    printf("  %s: %.2f GiB needed; ", is_gpu(t) ? "GPU" : "CPU", memory_needed(t, m, setup) / gib);
    if (isnan(room)) printf(is_gpu(t) ? "none found here\n" : "how much is free is not known\n");
    else printf("%.2f free; what fits: %s\n", room / gib,
                memory_advice(fitting, sizeof fitting, t, m, setup, room));
}

// ---------------------------------------------------------------------------- tables

// Filled slots, skips and constants of a layer, in one line.
static void describe_layer(const Model *m, int l, char *line, size_t cap) {
    static const char *const SKIPS[] = {"own", "normed", "block"};
    Place p = place_at(m, l);
    check_format(line, cap,
                 "%-14s %d%d %-6s a=%-7.4g c=%-7.4g %d | %d%d %-6s a=%-7.4g c=%-7.4g %d | "
                 "%d%d%d%d %dx%d/%dx%d   gains out %.4g, %.4g", p.row->name,
                 p.attn_in.on, p.attn_out.on, SKIPS[p.row->attn.skip], p.attn_a, p.attn_c,
                 p.attn_post.on, p.ffn_in.on, p.ffn_out.on, SKIPS[p.row->ffn.skip], p.ffn_a,
                 p.ffn_c, p.ffn_post.on, p.q.on, p.k.on, p.v.on, p.ctx.on, p.q.groups, p.q.width,
                 p.k.groups, p.k.width, p.attn_out.gain, p.ffn_out.gain);
}

// One line for each stretch of equal layers, as in "1..23  SPAN  ...".
static void show_layers(const Model *m) {
    char line[256], next[256] = "";
    printf("\nlayers           row            attention: in out, skip, a, c, post | ffn: the same "
           "| q k v context norms, groups of q / k\n");
    describe_layer(m, 0, line, sizeof line);
    for (int l = 1, first = 0; l <= m->L; l++) {
        if (l < m->L) describe_layer(m, l, next, sizeof next);
        if (l < m->L && !strcmp(line, next)) continue;
        printf("  %4d..%-4d     %s\n", first, l - 1, line);
        first = l;
        memcpy(line, next, sizeof line);
    }
}

// All entries of one row of PARAM_TABLE. Under `shared` only those of shared experts: a row has two
// names if some layers are dense and others have shared experts.
static void show_parameter(const Model *m, const Init *init, const Layout *t, int id, bool shared) {
    static const char *const DECAYS[] = {"matrix", "embedding", "gain"};
    static const char *const GROUPS[] = {"embedding", "hidden", "head", "vector", "balance"};
    const Entry *first = NULL, *last = NULL;
    int copies = 0;
    int64_t size = 0;
    char start[64] = "0";
    for (const Entry *e = t->entries; e < t->entries + t->count; e++) {
        if (e->id != id || (strstr(e->name, "shared") != NULL) != shared) continue;
        if (!copies++) first = e;
        last = e;
        size += entry_rows(m, e) * e->row.cols;
    }
    if (!first) return;
    const ParamRow *r = &first->row;
    double one = init_std(init, m, first), other = init_std(init, m, last);
    // Gains start at a value, biases at 0, matrices at random with a deviation that may change from
    // the first layer to the last.
    if (r->init == ROLE_GAIN) check_format(start, sizeof start, "%.4g", r->gain);
    else if (r->init != ROLE_ZERO)
        check_format(start, sizeof start, one == other ? "sigma %.4g" : "sigma %.4g..%.4g", one,
                     other);
    printf("  %-53s %4d  %8lld x %-6lld %12lld   %-20s  %-9s  %s\n", r->name, copies,
           (long long)entry_rows(m, first), (long long)r->cols, (long long)size, start,
           DECAYS[r->decay], GROUPS[r->lr]);
}

// One row of ACT_TABLE with its size in MiB, and its gradients.
static void show_activation(const Trainer *t, const Model *m, const Sizes *s, int id) {
    ActRow rows[ACT_COUNT], *r = &rows[id];
    int exists = 0;
    // A row may exist in some layers only, for instance in those with experts.
    for (int l = 0; l < m->L; l++) {
        act_rows(rows, m, s, l);
        exists += r->exists != 0;
    }
    if (!exists) return;
    int copies = exists < r->copies ? exists : r->copies;  // a slot that only some layers fill
    double mib = r->size * t->storage / 1048576.0;
    printf("  %-15s %6d  %9lld x %-7lld %9.2f   ", r->field, copies, (long long)r->rows,
           (long long)r->cols, copies * mib);
    if (r->grads == ALIASED) printf("in place\n");
    else printf("%9d %9.2f\n", r->grads, r->grads * mib);
}

// Every layer, every parameter and every activation.
static void show_tables(const Model *m, const Init *init, const Layout *layout, const Trainer *t,
                        const Setup *setup) {
    Sizes s = setup_sizes(t, m, setup);
    show_layers(m);
    printf("\nparameter                                             copies       shape          "
           "in all   starts                decay      rate\n");
    for (int i = 0; i < 2 * PARAM_COUNT; i++) show_parameter(m, init, layout, i / 2, i % 2);
    printf("\nactivation        copies         shape          MiB   gradients      MiB     "
           "(micro-batch of %d x %d)\n", s.B, s.T);
    for (int id = 0; id < ACT_COUNT; id++) show_activation(t, m, &s, id);
}

// ---------------------------------------------------------------------------- a model

// Sizes and switches of the architecture.
static void show_shape(const Model *m) {
    char router[32];
    flag_word(router, sizeof router, FLAGS[FLAG_router].choices, m->moe.router);
    printf("  %d layers, width %d, %d heads of %d, %d kv heads, ffn %d, vocabulary %d (padded %d), "
           "sequences of %d\n", m->L, m->C, m->NH, m->HS, m->KV, m->F, m->V, m->Vp, m->T);
    if (m->kv_rank)
        printf("  latent attention: keys and values from %d channels, heads of q and k %d + %d "
               "rotary\n", m->kv_rank, m->HS, m->rope_size);
    if (m->moe.E)
        printf("  %d experts, %d a token, router %s; shared ffn %d; dense layers %d, of ffn %d\n",
               m->moe.E, m->moe.K, router, m->moe.shared_F, m->moe.dense,
               m->moe.dense ? m->moe.dense_F : 0);
    printf("  %s, %s, %s, %s, %s head%s%s\n", m->layernorm ? "LayerNorm" : "RMSNorm",
           m->bias ? "biases" : "no biases", m->rope ? "RoPE" : "learned positions",
           m->swiglu ? "SwiGLU" : "GELU", m->tied ? "tied" : "untied",
           m->mode->sdd ? ", SDD setting " : "", m->mode->sdd ? m->sdd->name : "");
}

// Every run prints this summary before it begins.
void show_model(const Model *m, const Init *init, const char *name, const Trainer *t,
                const Setup *setup, bool tables) {
    char shown[256];
    Layout layout = layout_make(m);
    Memory y = memory_make(t, m, setup);
    double mib = 1.0 / (1 << 20), sigma = init_sigma(init, m);
    // The mode DEEPNORM under another initialization is a different method.
    const char *own = m->mode->init;
    bool no_beta = own && !strcmp(own, "deepnorm") && init->scheme != INIT_DEEPNORM;
    printf("%s under %s (%s)\n", text_escape(shown, sizeof shown, name, strlen(name)),
           m->mode->name, m->mode->source);
    show_shape(m);
    printf("  init %s (%s), sigma %.4g (sigma sqrt(width) = %.3f)%s\n", INITS[init->scheme].name,
           INITS[init->scheme].source, sigma, sigma * sqrt(m->C),
           no_beta ? ", without DeepNorm's beta (--init deepnorm has it)" : "");
    printf("  %.2fM parameters, ", (double)show_parameters(m, &layout, false) / 1e6);
    if (m->moe.E) printf("%.2fM active, ", (double)show_parameters(m, &layout, true) / 1e6);
    printf("%.1f MFLOP per token\n", show_flops(m, &layout) / 1e6);
    printf("  memory: weights %.1f MiB, gradients %.1f, AdamW %.1f, activations %.1f, "
           "their gradients %.1f: %.1f MiB in all%s\n", y.weights * mib, y.gradients * mib,
           y.moments * mib, y.acts * mib, y.grads * mib, y.sum * mib,
           comm_size(setup->comm) > 1 ? ", in the first process" : "");
    if (y.kv_cache * mib >= 1)
        printf("  sampling: %.1f MiB more, the KV cache of %d tokens\n", y.kv_cache * mib, m->T);
    if (tables) show_tables(m, init, &layout, t, setup);
    layout_free(&layout);
}

// Sizes depend on the placement a little, as gains do.
void show_models(const Mode *mode) {
    for (const Preset *p = PRESETS; p < PRESETS + PRESET_COUNT; p++) {
        FlagSet set;
        flags_default(&set);
        flags_preset(&set, p->name);
        Model m = model_from_flags(&set.f, mode);
        Layout layout = layout_make(&m);
        printf("%-14s %3d layers, width %4d, heads %2d/%2d, ffn %5d, vocabulary %6d, T %4d: "
               "%8.1fM  %s\n", p->name, m.L, m.C, m.NH, m.KV, m.F, m.V, m.T,
               (double)show_parameters(&m, &layout, false) / 1e6,
               p->note);
        layout_free(&layout);
    }
}

// The rows are printed as they stand in modes.h.
void show_modes(void) {
    printf("Columns that are not 0, as llmc/modes.h explains them. LAYER rows are the first layers "
           "of others.\n\n");
#define PRINT_MODE(name, ...) printf("%-14s %s\n", #name, #__VA_ARGS__);
#define PRINT_LAYER(name, ...) printf("%-14s LAYER %s\n", #name, #__VA_ARGS__);
    MODE_TABLE(PRINT_MODE, PRINT_LAYER)
}
