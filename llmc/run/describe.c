// describe.c: reads the tables of modes.h, tensors.h and presets.h, prints them, and chooses the
// micro-batch that fits. The numbers come from the functions that allocate and initialize
// (memory.h, init.h), so they cannot differ.
#include "describe.h"
#include "../threads.h"
#include "run.h"

// active: of E experts a token uses K. It uses all other tensors whole.
double tensor_size(const Model *m, const Entry *e, bool active) {
    bool experts = strstr(e->name, "mlp.experts.") != NULL;  // all E, one below the other
    double size = entry_rows(m, e) * e->row.cols;
    return active && experts ? size * ((double)m->moe.K / m->moe.E) : size;
}

double parameter_count(const Model *m, const Layout *layout, bool active) {
    double sum = 0;                                        // exact up to 2^53
    for (const Entry *e = layout->entries; e < layout->end; e++) sum += tensor_size(m, e, active);
    return sum;
}

double flops_per_token(const Model *m, const Layout *layout) {
    // A tied LM head is the embedding's matrix: it counts once, as the head's product.
    double matrices = m->tied ? (double)m->V * m->C : 0;
    for (const Entry *e = layout->entries; e < layout->end; e++)
        if (e->row.lr == LR_HIDDEN || e->row.lr == LR_HEAD) matrices += tensor_size(m, e, true);
    return 6 * matrices + 3.0 * m->L * m->NH * (qk_size(m) + m->HS) * m->T;
}

// ---------------------------------------------------------------------------- memory

// Bytes of a model in this process, by the tables of tensors.h.
typedef struct {
    double weights;                           // with the copies that products read
    double gradients;                         // of parameters, summed over micro-batches
    double moments;                           // of this process's shard (ZeRO-1)
    double muon;                              // Muon's scratch
    double acts, grads;                       // activations of a micro-batch and their gradients
    double sum;                               // of the above
    double kv_cache;                          // not in the sum: only a run that samples has one
} Memory;

// The sizes of the largest micro-batch, as the device computes it.
static Sizes setup_sizes(const Run *r, const Setup *setup) {
    bool gpu = on_gpu(r->t);
    return sizes_make(&r->m, setup, gpu ? 0 : omp_get_max_threads(),
                      gpu ? sizeof(float) / r->t->storage : 1);
}

// In bf16 the products read their own copies of the weights (storage); the fp32 weights (element)
// are then sharded over processes like the moments of AdamW.
static Memory memory_make(const Run *r, const Setup *setup) {
    const size_t element = r->t->element, storage = r->t->storage;
    const Model *m = &r->m;
    bool copies = storage != element;
    Sizes s = setup_sizes(r, setup);
    ActLayout acts = act_layout_make(m, &s);
    double all = r->layout.total * element, shard = r->layout.state * element;
    Memory y = {
        .weights = copies && setup->training ? shard : all,
        .acts = acts.acts * storage,
        // All layers, one text of the longest length.
        .kv_cache = (double)m->L * m->T * kv_cache_width(m) * storage,
    };
    if (copies) y.weights += r->layout.total * storage;
    if (setup->training) {  // a model that is only read has neither gradients nor moments
        y.gradients = all;
        y.moments = shard + r->layout.second * element;
        y.muon = layout_muon_scratch(&r->layout, on_gpu(r->t)) * storage;
        y.grads = acts.grads * storage;
    }
    y.sum = y.weights + y.gradients + y.moments + y.muon + y.acts + y.grads;
    free(acts.act);
    return y;
}

// Bytes that the device needs in this process.
static double memory_needed(const Run *r, const Setup *setup) {
    Memory y = memory_make(r, setup);
    return r->t->bytes(&r->m, setup, y.sum + (r->f->sample ? y.kv_cache : 0));
}

// The largest micro-batch that fits into `limit` bytes, among the divisors of the batch up to a
// process's share of it; 0: none. s: with any B.
static int memory_fitting(const Run *r, Setup s, double limit) {
    // At most 2^31 rows of a micro-batch, a row for each expert of a token (run_refuse).
    int64_t most = INT32_MAX / s.T / (r->m.moe.E ? r->m.moe.K : 1);
    int64_t share = CEIL_DIV(s.batch, comm_size(s.comm));
    // Memory grows with B, so the first that fits is the largest.
    for (s.B = least(share, most); s.B > 0; s.B--)
        if (s.batch % s.B == 0 && memory_needed(r, &s) <= limit) break;
    return s.B;
}

enum { ADVICE_CAP = 256 };
// The flags that fit into `limit` bytes: each level of recompute that allows a larger micro-batch
// than the cheaper levels before it.
static char *memory_advice(char text[ADVICE_CAP], const Run *r, double limit) {
    static const struct { int level; const char *flag; } LEVELS[] = {{RECOMPUTE_OFF, ""},
        {RECOMPUTE_CHEAP, " --recompute cheap"}, {RECOMPUTE_ON, " --recompute on"}};
    int best = 0;
    Setup s = r->setup;
    for (int i = 0; i < (s.training ? 3 : 1); i++) {       // without backward there is one level
        if (s.training) s.recompute = LEVELS[i].level;
        int B = memory_fitting(r, s, limit);
        if (B <= best) continue;                           // not worth the time of recompute
        size_t n = best ? strlen(text) : 0;
        check_format(text + n, ADVICE_CAP - n, "%s--micro-batch %d%s", n ? ", or " : "", B,
                     LEVELS[i].flag);
        best = B;
    }
    return best ? text
                : check_format(text, ADVICE_CAP, "a smaller --model or --seq, or more memory");
}

// Chooses the micro-batch: as many sequences of a process's share of the batch as fit into memory.
// The run's flags keep the number, so that a run that is resumed elsewhere computes the same bits.
// A --micro-batch is never changed. Training with a --balance-loss chooses nothing: that loss is
// defined over a micro-batch.
void memory_choose(Run *r) {
    const Flags *f = r->f;
    Setup *setup = &r->setup;
    char advice[ADVICE_CAP];
    const double gib = 1 << 30;
    double free_bytes = r->t->free_bytes(&r->m, setup), needed = memory_needed(r, setup);
    bool given = f->micro_batch && (r->training || r->set.by[FLAG_micro_batch] == BY_USER);
    // NAN, unknown, compares as false: then all fits.
    bool chooses = !given && !(r->training && f->experts && f->balance_loss > 0);
    int B = chooses && needed > free_bytes ? memory_fitting(r, *setup, free_bytes) : setup->B;
    double negated = -B;                                     // the maximum of -B is the least B
    comm_all_reduce(&r->comm, &negated, 1, COMM_MAX);
    B = -negated;
    if (B && B < setup->B) {
        printf("micro-batches of %d sequences, as many as fit into %.2f GiB\n", B,
               free_bytes / gib);
        setup->B = r->micro = B;
        needed = memory_needed(r, setup);
    }
    CHECK(!(needed > free_bytes), "no memory: this takes %.2f GiB, and %.2f GiB are free\n  -> %s",
          needed / gib, free_bytes / gib, memory_advice(advice, r, free_bytes));
    if (chooses && r->training) r->set.f.micro_batch = B;     // config.json keeps it
}

// Needed and free memory, and the flags that fit.
static void show_memory(const Run *r) {
    char fitting[ADVICE_CAP];
    bool gpu = on_gpu(r->t);
    // The call also refuses a model that the device cannot compute.
    double free_bytes = r->t->free_bytes(&r->m, &r->setup), gib = 1 << 30;
    printf("  %s: %.2f GiB needed; ", gpu ? "GPU" : "CPU", memory_needed(r, &r->setup) / gib);
    if (isnan(free_bytes)) printf(gpu ? "none found here\n" : "how much is free is not known\n");
    else
        printf("%.2f free; what fits: %s\n", free_bytes / gib,
               memory_advice(fitting, r, free_bytes));
}

// ---------------------------------------------------------------------------- tables

// One line on a layer: which norms are on, its skips, constants and norm groups.
static void describe_layer(const Model *m, int l, char line[256]) {
    static const char *const SKIPS[] = {"own", "normed", "block"};
    LayerMode p = layer_mode(m, l);
    check_format(line, 256,
                 "%-14s %d%d %-6s a=%-7.4g c=%-7.4g %d | %d%d %-6s a=%-7.4g c=%-7.4g %d | "
                 "%d%d%d%d %dx%d/%dx%d   gains out %.4g, %.4g", p.row->name,
                 p.attn_in.on, p.attn_out.on, SKIPS[p.row->attn.skip], p.attn_a, p.attn_c,
                 p.attn_post.on, p.ffn_in.on, p.ffn_out.on, SKIPS[p.row->ffn.skip], p.ffn_a,
                 p.ffn_c, p.ffn_post.on, p.q.on, p.k.on, p.v.on, p.ctx.on, p.q.groups, p.q.width,
                 p.k.groups, p.k.width, p.attn_out.gain, p.ffn_out.gain);
}

// One line for each run of equal layers, as in "1..23  SPAN  ...".
static void show_layers(const Model *m) {
    char line[256], next[256] = "";
    printf("\nlayers           row            attention: in out, skip, a, c, post | ffn: the same "
           "| q k v context norms, groups of q / k\n");
    describe_layer(m, 0, line);
    // Prints layers first..l-1 if layer l differs from them, or if l is past the last layer.
    for (int l = 1, first = 0; l <= m->L; l++) {
        if (l < m->L) describe_layer(m, l, next);
        if (l < m->L && !strcmp(line, next)) continue;
        printf("  %4d..%-4d     %s\n", first, l - 1, line);
        first = l;
        memcpy(line, next, sizeof line);
    }
}

// Prints the entries of one row of PARAM_TABLE as one line. shared: those of shared experts, or the
// others; a row has both if some layers are dense and others have shared experts.
static void show_parameter(const Run *r, int id, bool shared) {
    static const char *const DECAYS[] = {"matrix", "embedding", "gain", "none"};
    static const char *const GROUPS[] = {"embedding", "hidden", "head", "vector", "balance"};
    const Entry *first = NULL, *last = NULL;
    int copies = 0;
    double size = 0;
    char start[64];
    for (const Entry *e = r->layout.entries; e < r->layout.end; e++) {
        if (e->id != id || (strstr(e->name, "shared") != NULL) != shared) continue;
        if (!copies++) first = e;
        last = e;
        size += tensor_size(&r->m, e, false);
    }
    if (!first) return;
    const ParamRow *row = &first->row;
    double one = init_std(&r->init, &r->m, first), other = init_std(&r->init, &r->m, last);
    // Vectors start at a constant (biases at 0), matrices at random with a standard deviation that
    // may differ between the first and the last layer.
    if (row->role >= ROLE_ZERO) check_format(start, sizeof start, "%.4g", row->gain);
    else
        check_format(start, sizeof start, one == other ? "sigma %.4g" : "sigma %.4g..%.4g", one,
                     other);
    printf("  %-53s %4d  %8lld x %-6lld %12.0f   %-20s  %-9s  %s\n", row->name, copies,
           (long long)entry_rows(&r->m, first), (long long)row->cols, size, start,
           DECAYS[row->decay], first->muon ? "muon" : GROUPS[row->lr]);
}

// Prints one row of ACT_TABLE: copies, shape, MiB, and the same of its gradients.
static void show_activation(const Run *r, const Sizes *s, int id) {
    ActRow rows[ACT_COUNT], *row = &rows[id];
    int exists = 0;
    // A row may exist in only some layers, for instance in those with experts.
    for (int l = 0; l < r->m.L; l++) {
        act_rows(rows, &r->m, s, l);
        exists += row->exists != 0;
    }
    if (!exists) return;
    int copies = least(exists, row->copies);  // layers without the row have none
    double mib = row->size * r->t->storage / 1048576.0;
    printf("  %-15s %6d  %9lld x %-7lld %9.2f   ", row->field, copies, (long long)row->rows,
           (long long)row->cols, copies * mib);
    if (row->grads == ALIASED) printf("in place\n");
    else printf("%9d %9.2f\n", row->grads, row->grads * mib);
}

// ---------------------------------------------------------------------------- a model

static void show_shape(const Model *m) {
    char router[FLAG_CAP];
    printf("  %d layers, width %d, %d heads of %d, %d kv heads, ffn %d, vocabulary %d (padded %d), "
           "sequences of %d\n", m->L, m->C, m->NH, m->HS, m->KV, m->F, m->V, m->Vp, m->T);
    if (m->kv_rank)
        printf("  latent attention: keys and values from %d channels, heads of q and k %d + %d "
               "rotary\n", m->kv_rank, m->HS, m->rope_size);
    if (m->moe.E)
        printf("  %d experts, %d a token, router %s; shared ffn %d; dense layers %d, of ffn %d\n",
               m->moe.E, m->moe.K, flag_word(router, FLAGS[FLAG_router].choices, m->moe.router),
               m->moe.shared_F, m->moe.dense, m->moe.dense ? m->moe.dense_F : 0);
    static const char *const BIASES[] = {"no biases", "biases", "biases of q, k and v"};
    static const char *const NORMS[] = {"RMSNorm", "LayerNorm", "DyT"};
    printf("  %s, %s, %s, %s, %s head%s%s\n", NORMS[m->norm],
           BIASES[m->bias], m->rope ? "RoPE" : "learned positions",
           m->swiglu ? "SwiGLU" : "GELU", m->tied ? "tied" : "untied",
           m->mode->sdd ? ", SDD setting " : "", m->mode->sdd ? m->sdd->name : "");
}

// Every run prints this summary before it begins.
void show_model(const Run *r, bool tables) {
    char name[256];
    const Model *m = &r->m;
    const char *own = m->mode->init, *model = r->f->model;
    Memory y = memory_make(r, &r->setup);
    // These are the sizes of process 0; shards of other processes differ a little.
    double mib = 1 << 20, sigma = init_sigma(&r->init, m);
    // The mode DEEPNORM under another initialization is a different method.
    bool no_beta = own && !strcmp(own, "deepnorm") && r->init.scheme != INIT_DEEPNORM;
    printf("%s under %s (%s)\n", text_escape(name, sizeof name, model, strlen(model)),
           m->mode->name, m->mode->source);
    show_shape(m);
    printf("  init %s (%s), sigma %.4g (sigma sqrt(width) = %.3f)%s\n",
           INITS[r->init.scheme].name, INITS[r->init.scheme].source, sigma, sigma * sqrt(m->C),
           no_beta ? ", without DeepNorm's beta (--init deepnorm has it)" : "");
    printf("  %.2fM parameters, ", parameter_count(m, &r->layout, false) / 1e6);
    if (m->moe.E) printf("%.2fM active, ", parameter_count(m, &r->layout, true) / 1e6);
    printf("%.1f MFLOP per token\n", flops_per_token(m, &r->layout) / 1e6);
    printf("  memory: weights %.1f MiB, gradients %.1f, %s %.1f, activations %.1f, "
           "their gradients %.1f: %.1f MiB in all%s\n", y.weights / mib, y.gradients / mib,
           r->f->optimizer == OPTIMIZER_MUON ? "Muon and AdamW" : "AdamW",
           (y.moments + y.muon) / mib, y.acts / mib, y.grads / mib, y.sum / mib,
           comm_size(r->setup.comm) > 1 ? ", in the first process" : "");
    if (y.kv_cache >= mib)
        printf("  sampling: %.1f MiB more, the KV cache of %d tokens\n", y.kv_cache / mib, m->T);
    if (!tables) return;
    show_layers(m);
    printf("\n%-53s %s %11s %15s   %-20s  %-9s  rate\n", "parameter", "copies", "shape", "in all",
           "starts", "decay");
    for (int i = 0; i < 2 * PARAM_COUNT; i++) show_parameter(r, i / 2, i % 2);
    Sizes s = setup_sizes(r, &r->setup);
    printf("\n%-17s copies %13s %12s   gradients %8s     (micro-batch of %d x %d)\n", "activation",
           "shape", "MiB", "MiB", s.B, s.T);
    for (int id = 0; id < ACT_COUNT; id++) show_activation(r, &s, id);
}

// Named models. Sizes depend slightly on the placement, which decides how many gains there are.
static void show_models(const Mode *mode) {
    for (const Preset *p = PRESETS; p->name; p++) {
        FlagSet set;
        flags_default(&set);
        flags_preset(&set, p->name);
        Model m = model_from_flags(&set.f, mode);
        Layout layout = layout_make(&m);
        printf("%-14s %3d layers, width %4d, heads %2d/%2d, ffn %5d, vocabulary %6d, T %4d: "
               "%8.1fM  %s\n", p->name, m.L, m.C, m.NH, m.KV, m.F, m.V, m.T,
               parameter_count(&m, &layout, false) / 1e6, p->note);
        layout_free(&layout);
    }
}

// The rows are printed as they stand in modes.h.
static void show_modes(void) {
    printf("Columns that are not 0, as llmc/modes.h explains them. LAYER rows are the first layers "
           "of others.\n\n");
#define PRINT_MODE(name, ...) printf("%-14s %s\n", #name, #__VA_ARGS__);
#define PRINT_LAYER(name, ...) printf("%-14s LAYER %s\n", #name, #__VA_ARGS__);
    MODE_TABLE(PRINT_MODE, PRINT_LAYER)
}

// Before any memory is taken: a model too large for this machine can be looked at.
void show(const Run *r) {
    int what = r->f->show;
    if (what == SHOW_MODELS) show_models(r->m.mode);
    if (what == SHOW_MODES) show_modes();
    if (what == SHOW_MODEL) {
        show_model(r, true);
        show_memory(r);
    }
    if (what == SHOW_CONFIG) {
        char *config = run_config(r);
        fputs(config, stdout);
        free(config);
    }
}
