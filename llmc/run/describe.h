// describe.h: --show prints what the tables say about the chosen model, before anything is allocated.
#pragma once
#include "flags.h"
#include "../init.h"
#include "trainer.h"
#include "presets.h"

// Parameters of a tensor, or those of them that a token meets: of E experts K.
static inline double show_size(const Model *m, const Entry *e, bool active) {
    bool expert = e->id == PARAM_xg || e->id == PARAM_xu || e->id == PARAM_xd || e->id == PARAM_expert_hidden_w || e->id == PARAM_expert_out_w;
    return (double)(entry_rows(m, e) * e->row.cols) * (active && expert ? (double)m->moe.K / m->moe.E : 1);
}

// Floating-point operations of training on one token: 6 per matrix weight that it meets in a product (head included, embedding not) and
// 3 L NH (QK + HS) T for the causal half of attention (llm.c's convention; others count the full square).
static inline double show_flops(const Model *m, const Layout *layout) {
    double matrices = m->tied ? (double)m->V * m->C : 0;
    for (int k = 0; k < layout->count; k++) {
        const Entry *e = &layout->entries[k];
        if (e->row.lr == LR_HIDDEN || e->row.lr == LR_HEAD) matrices += show_size(m, e, true);
    }
    return 6 * matrices + 3.0 * m->L * m->NH * (qk_size(m) + m->HS) * m->T;
}

static inline int64_t show_parameters(const Model *m, const Layout *layout, bool active) {
    double sum = 0;
    for (int k = 0; k < layout->count; k++) sum += show_size(m, &layout->entries[k], active);
    return (int64_t)sum;
}

static const char *const SKIPS[] = {"own", "normed", "block"};       // of a sublayer, as modes.h has them

// One layer in one line: filled slots, skips and constants.
static inline void show_layer(const Model *m, int l, char *line, size_t cap) {
    Place p = place_at(m, l);
    check_format(line, cap, "%-14s %d%d %-6s a=%-7.4g c=%-7.4g %d | %d%d %-6s a=%-7.4g c=%-7.4g %d | %d%d%d%d %dx%d/%dx%d   gains out %.4g, %.4g",
                 p.row->name, p.attn_in.on, p.attn_out.on, SKIPS[p.row->attn.skip], p.attn_a, p.attn_c, p.attn_post.on,
                 p.ffn_in.on, p.ffn_out.on, SKIPS[p.row->ffn.skip], p.ffn_a, p.ffn_c, p.ffn_post.on,
                 p.q.on, p.k.on, p.v.on, p.ctx.on, p.q.groups, p.q.width, p.k.groups, p.k.width, p.attn_out.gain, p.ffn_out.gain);
}

static inline void show_layers(const Model *m) {
    char line[256], next[256];
    printf("\nlayers           row            attention: in out, skip, a, c, post | ffn: the same | q k v context norms, groups of q / k\n");
    for (int l = 0, first = 0; l < m->L; l++) {
        show_layer(m, l, line, sizeof line);
        if (l + 1 < m->L) show_layer(m, l + 1, next, sizeof next);
        if (l + 1 < m->L && !strcmp(line, next)) continue;
        printf("  %4d..%-4d     %s\n", first, l, line);
        first = l + 1;
    }
}

static inline void show_parameters_table(const Model *m, const Init *init, const Layout *layout) {
    static const char *const DECAYS[] = {"matrix", "embedding", "gain"}, *const GROUPS[LR_GROUPS] = {"embedding", "hidden", "head", "vector", "balance"};
    printf("\nparameter                                             copies       shape          in all   starts                decay      rate\n");
    for (int i = 0; i < 2 * PARAM_COUNT; i++) {              // a row of the table has two names where some layers are dense and others have shared experts
        const Entry *first = NULL, *last = NULL;
        int copies = 0;
        int64_t size = 0;
        for (int k = 0; k < layout->count; k++) {
            if (layout->entries[k].id != i / 2 || (strstr(layout->entries[k].name, "shared") != NULL) != i % 2) continue;
            last = &layout->entries[k];
            first = first ? first : last;
            size += entry_rows(m, last) * last->row.cols;
            copies++;
        }
        if (!first) continue;
        char start[64];
        double one = init_std(init, m, first), other = init_std(init, m, last);
        if (first->row.init == ROLE_GAIN) check_format(start, sizeof start, "%.4g", first->row.gain);
        else if (first->row.init == ROLE_ZERO) check_format(start, sizeof start, "0");
        else if (one == other) check_format(start, sizeof start, "sigma %.4g", one);
        else check_format(start, sizeof start, "sigma %.4g..%.4g", one, other);
        printf("  %-53s %4d  %8lld x %-6lld %12lld   %-20s  %-9s  %s\n", first->row.name, copies, (long long)entry_rows(m, first), (long long)first->row.cols,
               (long long)size, start, DECAYS[first->row.decay], GROUPS[first->row.lr]);
    }
}

static inline Sizes show_sizes(const Model *m, const Setup *setup, const Trainer *t) {
    bool gpu = strcmp(t->device, "cpu");
    int threads = gpu ? 0 : omp_get_max_threads();
    int ratio = gpu ? (int)(sizeof(float) / t->storage) : 1;
    return sizes_make(m, setup->B, setup->T, setup->recompute, threads, ratio);
}

static inline void show_activations(const Model *m, const Setup *setup, const Trainer *t) {
    Sizes sizes = show_sizes(m, setup, t), *s = &sizes;
    printf("\nactivation        copies         shape          MiB   gradients      MiB     (micro-batch of %d x %d)\n", s->B, s->T);
    for (int id = 0; id < ACT_COUNT; id++) {
        ActRow rows[ACT_COUNT], *r = &rows[id];
        int exists = 0, copies = 0;
        for (int l = 0; l < m->L; l++) {
            act_rows(rows, m, s, l);
            exists += r->exists != 0;
            copies = r->copies;
        }
        if (!exists) continue;
        if (exists < copies) copies = exists;                // a slot that only some layers fill
        double mib = (double)r->size * (double)t->storage / 1048576;
        printf("  %-15s %6d  %9lld x %-7lld %9.2f   ", r->field, copies, (long long)r->rows, (long long)r->cols, copies * mib);
        if (r->grads == SHARED) printf("in place\n");
        else printf("%9d %9.2f\n", r->grads, r->grads * mib);
    }
}

// ---------------------------------------------------------------------------------------- memory

// Bytes of a model on its device, by the tables of tensors.h: weights, the products' own copies
// included; sums of gradients; AdamW's moments; activations and their gradients, of a micro-batch;
// and keys and values of a text that is sampled. Of several processes: in this one.
typedef struct { double weights, gradients, moments, acts, grads, past; } Memory;

static inline Memory memory_make(const Trainer *t, const Model *m, const Setup *setup) {
    bool copies = t->storage != t->element;
    Sizes s = show_sizes(m, setup, t);
    Layout layout = layout_make(m);
    layout_share(&layout, comm_rank(setup->comm), comm_size(setup->comm));
    ActLayout acts = act_layout_make(m, &s);
    double all = (double)layout.total * (double)t->element, storage = (double)t->storage;
    double own = (double)layout.state * (double)t->element;
    Memory y;
    y.weights = copies && setup->training ? own : all;     // shared out like moments
    if (copies) y.weights += (double)layout.total * storage;
    y.gradients = setup_kinds(setup) > GRADS ? all : 0;
    y.moments = setup_kinds(setup) > ADAM_V ? 2 * own : 0;
    y.acts = (double)acts.acts * storage;
    y.grads = setup->training ? (double)acts.grads * storage : 0;
    y.past = (double)m->L * m->T * kv_cache_width(m) * storage;
    layout_free(&layout);
    act_layout_free(&acts);
    return y;
}

static inline double memory_sum(const Memory *y) {
    return y->weights + y->gradients + y->moments + y->acts + y->grads;
}

// Bytes that the device needs for it.
static inline double memory_needed(const Trainer *t, const Model *m, const Setup *setup) {
    Memory y = memory_make(t, m, setup);
    return t->bytes(m, setup, memory_sum(&y) + (setup->decodes ? y.past : 0));
}

// The largest micro-batch that fits into `room` bytes: of the divisors of the batch up to a
// process's share of it. 0: none.
static inline int memory_fitting(const Trainer *t, const Model *m, const Setup *setup,
                                 double room) {
    Setup s = *setup;
    int64_t most = INT32_MAX / ((int64_t)s.T * (m->moe.E ? m->moe.K : 1));
    int64_t share = CEIL_DIV(s.batch, comm_size(s.comm));
    for (s.B = (int)(share < most ? share : most); s.B > 0; s.B--)
        if (s.batch % s.B == 0 && memory_needed(t, m, &s) <= room) break;
    return s.B;
}

// The flags that fit into `room` bytes: the largest micro-batch at each level of recompute. Without
// a backward there is one level, and no flag for it.
static inline char *memory_advice(char *text, size_t cap, const Trainer *t, const Model *m,
                                  const Setup *setup, double room) {
    static const struct { int level; const char *flag; } LEVELS[] = {{RECOMPUTE_OFF, ""},
        {RECOMPUTE_CHEAP, " --recompute cheap"}, {RECOMPUTE_ON, " --recompute on"}};
    size_t n = 0;
    int best = 0;
    for (int i = 0; i < (setup->training ? 3 : 1); i++) {
        Setup s = *setup;
        if (setup->training) s.recompute = LEVELS[i].level;
        int B = memory_fitting(t, m, &s, room);
        if (B <= best) continue;
        check_format(text + n, cap - n, "%s--micro-batch %d%s", n ? ", or " : "", B,
                     LEVELS[i].flag);
        n += strlen(text + n);
        best = B;
    }
    return best ? text : check_format(text, cap, "a smaller --model or --seq, or more memory");
}

static inline void show_memory(const Trainer *t, const Model *m, const Setup *setup) {
    char fitting[256];
    bool gpu = strcmp(t->device, "cpu") != 0;
    double room = t->room(m, setup), gib = 1 << 30;
    printf("  %s: %.2f GiB needed; ", gpu ? "GPU" : "CPU", memory_needed(t, m, setup) / gib);
    if (isnan(room)) printf(gpu ? "none found here\n" : "how much is free is not known\n");
    else printf("%.2f free; what fits: %s\n", room / gib,
                memory_advice(fitting, sizeof fitting, t, m, setup, room));
}

static inline void show_model(const Model *m, const Init *init, const char *name, const Trainer *t,
                              const Setup *setup, bool tables) {
    char router[32], shown[256];
    Layout layout = layout_make(m);
    Memory y = memory_make(t, m, setup);
    double mib = 1.0 / (1 << 20);
    printf("%s under %s (%s)\n", text_escape(shown, sizeof shown, name, strlen(name)),
           m->mode->name, m->mode->source);
    printf("  %d layers, width %d, %d heads of %d, %d kv heads, ffn %d, vocabulary %d (padded %d), sequences of %d\n", m->L, m->C, m->NH, m->HS, m->KV, m->F, m->V, m->Vp, m->T);
    if (m->kv_rank) printf("  latent attention: keys and values from %d channels, heads of q and k %d + %d rotary\n", m->kv_rank, m->HS, m->rope_size);
    if (m->moe.E) printf("  %d experts, %d a token, router %s; shared ffn %d; dense layers %d, of ffn %d\n", m->moe.E, m->moe.K, flag_word(router, sizeof router, FLAGS[FLAG_router].choices, m->moe.router), m->moe.shared_F, m->moe.dense,
                         m->moe.dense ? m->moe.dense_F : 0);
    printf("  %s, %s, %s, %s, %s head%s%s\n", m->layernorm ? "LayerNorm" : "RMSNorm", m->bias ? "biases" : "no biases", m->rope ? "RoPE" : "learned positions",
           m->swiglu ? "SwiGLU" : "GELU", m->tied ? "tied" : "untied", m->mode->sdd ? ", SDD setting " : "", m->mode->sdd ? m->sdd->name : "");
    printf("  init %s, sigma %.4g (sigma sqrt(width) = %.3f)%s\n", INITS[init->scheme].name, init_sigma(init, m), init_sigma(init, m) * sqrt(m->C),
           m->mode->init && !strcmp(m->mode->init, "deepnorm") && init->scheme != INIT_DEEPNORM ? ", without the beta of DeepNorm's own, --init deepnorm" : "");
    printf("  %.2fM parameters, ", (double)show_parameters(m, &layout, false) / 1e6);
    if (m->moe.E) printf("%.2fM active, ", (double)show_parameters(m, &layout, true) / 1e6);
    printf("%.1f MFLOP per token\n", show_flops(m, &layout) / 1e6);
    printf("  memory: weights %.1f MiB, gradients %.1f, AdamW %.1f, activations %.1f, "
           "their gradients %.1f: %.1f MiB in all%s\n", y.weights * mib, y.gradients * mib,
           y.moments * mib, y.acts * mib, y.grads * mib, memory_sum(&y) * mib,
           comm_size(setup->comm) > 1 ? ", in the first process" : "");
    if (y.past * mib >= 1)
        printf("  sampling: %.1f MiB more, the keys and values of %d tokens\n", y.past * mib, m->T);
    if (tables) {
        show_layers(m);
        show_parameters_table(m, init, &layout);
        show_activations(m, setup, t);
    }
    layout_free(&layout);
}

static inline void show_sub(const SubMode *s) {
    static const char *const FACTORS[] = {"1", "lns", "deep", "learn"};
    printf(" %d %-3s %d  %-6s %-5s  %d |", s->in, FACTORS[s->c], s->out, SKIPS[s->skip], FACTORS[s->a], s->post);
}

// The table of modes.h, column by column. Slots: 0 nothing, 1 the model's norm, 2 length 1.
static inline void show_modes(void) {
    printf("               attention                  | ffn                       |\nmode           in c out skip   a    post |in c out skip   a    post |q k v c per  |emb fin sdd unit|layer 0      early init      source\n");
    for (int i = MODE_NONE + 1; i < MODE_COUNT; i++) {
        const Mode *r = &MODES[i];
        printf("%-14s", r->name);
        show_sub(&r->attn);
        show_sub(&r->ffn);
        printf("%d %d %d %d %-5s| %d   %d   %d   %d  |%-12s %-5s %-9s %s%s\n", r->q, r->k, r->v, r->ctx, r->per == FULL ? "full" : "head", r->emb, r->fin, r->sdd, r->unit, r->first ? MODES[r->first].name : "",
               r->early ? MODES[r->early].name : "", r->init ? r->init : "baseline", r->selectable ? "" : "(only for layer 0) ", r->source);
    }
}
