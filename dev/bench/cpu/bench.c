// bench.c: what a training step costs on this CPU, product by product and layer by layer, beside
// what the machine can do at most (llmc/peak.h). Built once per precision, with train_gpt.c inside,
// whose layers are static.
//
//   build/bench-fp32
//       tables on stdout: products of three models, layers of --model gpt2-124M --batch 4 --seq 64
//   build/bench-fp32 [--mode NAME] [flags of ./train_gpt]
//       the layers of another model alone, under PRE or another placement
//   build/bench-fp32 --serve [the same]
//       a JSON line about the model, and for every line of stdin one about a training step, or
//       about the peak
//
// Tokens are random, and the same in every step. The time of a product or layer is the best of as
// many runs as fit into SECONDS, three at least after one that does not count. A run of a layer is
// the call that train_gpt.c makes, in another block of the model each time, as in a step.
#define main train_gpt_main
#include "../../../train_gpt.c"
#include "../../../llmc/run/run.h"
#undef main

_Static_assert(sizeof(real) == sizeof(float),
               "expected PREC=fp32 or bf16: there is no peak of another to compare with");
static const double SECONDS = 0.25;
typedef struct Peaks { double flops, bandwidth; } Peaks;  // FLOP/s in this precision, bytes/s

// ------------------------------------------------------------------------------------------ memory

// bytes/s of a[i] = b[i] + s c[i], 12 bytes an element, as STREAM counts (McCalpin 1995); that a is
// read before it is written comes on top.
static void peak_bandwidth_run(float *block) {
    float *restrict a = block, *restrict b = a + PEAK_BLOCK, *restrict c = b + PEAK_BLOCK;
    for (int64_t i = 0; i < PEAK_BLOCK; i++) a[i] = b[i] + 0.5f * c[i];
}

// The arrays are together four times the last-level cache, 192 MiB, and 48 MiB a thread, whichever
// is most: some systems do not say how large the cache is.
static double peak_bandwidth(double seconds) {
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    threads++;
    double cache = 4.0 * (double)sysconf(_SC_LEVEL3_CACHE_SIZE) / 1048576;
    double MiB = fmax(fmax(cache, 192), 48.0 * threads);
    return peak_rate(seconds, 3.0 * sizeof(float) * PEAK_BLOCK, (int64_t)(MiB / threads / 0.75) + 1,
                     peak_bandwidth_run);
}

// ------------------------------------------------------------------------------------------ timing

// for (Timer t = {.what = what, .best = &best}; timer_next(&t);) run; and best is in seconds
typedef struct Timer { const char *what; double *best, begun, end; int runs; } Timer;

static bool timer_next(Timer *t) {
    double now = clock_seconds();
    if (t->runs == 0) fprintf(stderr, "timing %s\n", t->what);
    if (t->runs == 1) t->end = now + SECONDS;
    if (t->runs == 2 || (t->runs > 2 && now - t->begun < *t->best)) *t->best = now - t->begun;
    bool more = t->runs++ < 4 || now < t->end;
    t->begun = clock_seconds();
    return more;
}

// The rate, beside that peak which the work takes longer at: of products or of memory.
static const char *rate(char text[64], const Peaks *p, double seconds, double flops, double bytes) {
    if (flops / p->flops > bytes / p->bandwidth)
        return check_format(text, 64, "%6.1f GFLOP/s %5.1f %%", 1e-9 * flops / seconds,
                            100 * flops / seconds / p->flops);
    return check_format(text, 64, "%6.1f GB/s    %5.1f %%", 1e-9 * bytes / seconds,
                        100 * bytes / seconds / p->bandwidth);
}

// ---------------------------------------------------------------------------------------- products

static real *random_matrix(int64_t size) {
    real *x = check_alloc((size_t)size * sizeof *x, "a matrix");
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < size; i++) x[i] = (real)(rand_uniform(1, (uint64_t)i) - 0.5);
    return x;
}

static void products(const Peaks *p) {
    static const struct {
        const char *name;
        int n, C, F, V;
    } models[] = {{"gpt2-124M, 256 tokens", 256, 768, 3072, 50304},
                  {"gpt2-124M, 1024 tokens", 1024, 768, 3072, 50304},
                  {"6 x 384, 2048 tokens", 2048, 384, 1536, 256},
                  {"stories, 1024 tokens", 1024, 128, 352, 256}};
    printf("\n%-37s %5s   %-5s   %-22s  %-22s  %s\n", "products", "out", "in", "forward",
           "input gradient", "weight gradient");
    for (size_t k = 0; k < sizeof models / sizeof *models; k++) {
        int64_t n = models[k].n, C = models[k].C, F = models[k].F;
        const struct {
            const char *name;
            int64_t out, in;
        } linears[] = {
            {"q, k, v, o", C, C}, {"up", F, C}, {"down", C, F}, {"head", models[k].V, C}};
        for (int i = 0; i < 4; i++) {
            int64_t out = linears[i].out, in = linears[i].in;
            real *y = random_matrix(n * out);
            real *x = random_matrix(n * in);
            real *w = random_matrix(out * in);
            double flops = 2.0 * (double)(n * out * in);
            double bytes = (double)sizeof(real) * (double)(n * out + n * in + out * in);
            double best[3];
            char what[64], text[3][64];
            check_format(what, sizeof what, "%-24s %-12s", models[k].name, linears[i].name);
            for (Timer t = {.what = what, .best = &best[0]}; timer_next(&t);)
                gemm(view(y, out), view(x, in), transpose(view(w, in)), n, out, in, 1, 0);
            for (Timer t = {.what = what, .best = &best[1]}; timer_next(&t);)
                gemm(view(x, in), view(y, out), view(w, in), n, in, out, 1, 0);
            for (Timer t = {.what = what, .best = &best[2]}; timer_next(&t);)
                gemm(view(w, in), transpose(view(y, out)), view(x, in), out, in, n, 1, 0);
            for (int form = 0; form < 3; form++) rate(text[form], p, best[form], flops, bytes);
            printf("%s %5lld x %-5lld   %s  %s  %s\n", what, (long long)out, (long long)in, text[0],
                   text[1], text[2]);
            free(y), free(x), free(w);
        }
    }
}

// ----------------------------------------------------------------------------------------- a model

// A trainer's run without data, folder and log: first weights of the model that the flags describe,
// and one batch of tokens.
static void run_make(Run *r, const char *mode, int count, char **flags) {
    const Mode *row = NULL;
    for (int i = 0; i < MODE_COUNT; i++)
        if (MODES[i].selectable && !strcmp(MODES[i].name, mode)) row = &MODES[i];
    CHECK(row, "no placement named %s\n  -> ./train_gpt --show modes lists them", mode);
    static Trainer t;
    t = NAMED(judge_, PREC);
    t.mode = row;
    r->t = &t;
    comm_open(&r->comm, r->t->device);
    flags_resolve(&r->set, r->t, count, flags);
    r->f = &r->set.f;
    run_refuse(&r->set, r->t);
    r->m = model_from_flags(r->f, row);
    r->init = init_from_flags(r->f, row);
    r->layout = layout_make(&r->m);
    r->micro = (int)(r->f->micro_batch ? r->f->micro_batch : r->f->batch);
    r->training = true;
    Setup setup = run_setup(r);
    r->gpt = r->t->create(&r->m, &setup);
    run_init_weights(r);
    size_t n = (size_t)r->micro * (size_t)r->m.T;
    r->inputs = check_alloc((n + 1) * sizeof *r->inputs, "a batch");
    r->targets = r->inputs + 1;
    for (size_t i = 0; i <= n; i++)
        r->inputs[i] = (int32_t)(rand_at((uint64_t)r->f->seed, i) % (uint64_t)r->m.V);
}

// One step of the loop in llmc/run/train.c, without its log and statistics.
static Update step(Run *r) {
    r->t->zero_grads(r->gpt);
    for (int64_t done = 0; done < r->f->batch; done += r->micro) {
        r->t->forward(r->gpt, r->inputs, r->targets, r->micro, r->m.T);
        r->t->backward(r->gpt, 1.0 / (double)(r->f->batch * r->m.T), true);
    }
    r->step++;
    Optimizer o = schedule_optimizer(r->f, schedule_lr(r->f, r->step), r->step);
    r->t->update(r->gpt, &o);
    Update u = r->t->outcome(r->gpt);
    CHECK(u.applied, "step %lld: loss %g, gradient norm %g: not finite\n  -> a smaller --lr",
          (long long)r->step, u.loss.ce, u.norm);
    return u;
}

static double step_flops(const Run *r) {
    return flops_per_token(&r->m, &r->layout) * (double)(r->f->batch * r->m.T);
}

static void serve(Run *r) {
    char line[256];
    printf("{\"flops_per_step\": %.0f, \"peak\": %.0f, \"parameters\": %.0f}\n", step_flops(r),
           r->t->peak(), parameter_count(&r->m, &r->layout, false));
    while (fflush(stdout) == 0 && fgets(line, sizeof line, stdin)) {
        if (!strcmp(line, "peak\n")) { printf("{\"peak\": %.0f}\n", r->t->peak()); continue; }
        double begun = clock_seconds();
        Update u = step(r);
        printf("{\"ms\": %.4f, \"loss\": %.6f}\n", 1e3 * (clock_seconds() - begun), u.loss.ce);
    }
}

// ------------------------------------------------------------------------------------------ layers

// A block, and what its layers read and write under this placement.
typedef struct Layer { Block b; real *u, *du; } Layer;

static Layer layer_at(const Gpt *g, int l) {
    Block b = gpt_block(g, l);
    b.dw_of_linears = SET;
    return (Layer){b, b.p.attn_in.on ? b.a.ai : b.a.x, b.p.attn_in.on ? b.d.ai : b.d.x};
}

// All norms inside a block, forward or backward; returns the values in a row of each together.
static double norms(const Block *b, bool backward) {
    double width = 0;
#define SLOT(slot, from, to, dto) { \
        Norm norm = NORM(b, slot); \
        if (backward) slot_backward(norm, b->d.from, b->d.dto, b->a.from); \
        else slot_forward(norm, b->a.to, b->a.from); \
        if (norm.site.on) width += norm.site.groups * norm.site.width; }
    SLOT(attn_in, x, ai, ai)
    SLOT(q, q, qn, qn)
    SLOT(k, k, kn, kn)
    SLOT(v, v, vn, vn)
    SLOT(ctx, c, cn, cn)
    SLOT(attn_out, ay, ao, mid)
    SLOT(attn_post, as, mid, mid)
    SLOT(ffn_in, mid, fi, fi)
    SLOT(hidden, gu, gun, gun)
    SLOT(ffn_out, fy, fo, mid)
    SLOT(ffn_post, fs, x, x)
    return width;
}

// FLOP, and values that are read or written once; gradients of weights as a first micro-step's,
// which are written alone.
typedef struct Work { double flops, values; } Work;
static Work moved(double values) { return (Work){0, values}; }
static Work forward_work(double n, double out, double in) {
    return (Work){2 * n * out * in, n * (out + in) + out * in};
}
static Work backward_work(double n, double out, double in) {
    return (Work){4 * n * out * in, 2 * n * (out + in) + 2 * out * in};
}

// while (timed(t, &l, name, calls, work)) run; one row of the table; l is another block's layers in
// each run
typedef struct Table {
    const Peaks *peaks;
    const Layer *blocks;
    int count;
    double whole, sum, best;
    Timer timer;
} Table;

static bool timed(Table *t, const Layer **l, const char *name, int calls, Work w) {
    char text[64];
    if (!calls) return false;
    if (!t->timer.runs) t->timer = (Timer){.what = name, .best = &t->best};
    *l = &t->blocks[t->timer.runs % t->count];
    if (timer_next(&t->timer)) return true;
    t->timer.runs = 0;
    t->sum += t->best * calls;
    printf("%-38s %10.3f x %6d = %10.2f %5.1f %%  %s\n", name, 1e3 * t->best, calls,
           1e3 * t->best * calls, 100 * t->best * calls / t->whole,
           rate(text, t->peaks, t->best, w.flops, (double)sizeof(real) * w.values));
    return false;
}

// Sizes as in tensors.h; Q, K: widths of q and k; H: of gu. Attention counts its causal half. k
// stands for v too, up for gate.
static void layers(Run *r, const Peaks *p) {
    Gpt *g = r->gpt;
    const Model *m = &g->m;
    const Sizes *s = &g->now;
    int C = m->C;
    int Q = m->NH * m->HS;
    int K = m->KV * m->HS;
    int F = m->F;
    int Vp = m->Vp;
    int up = m->swiglu ? F : 0;
    int micros = (int)(r->f->batch / r->micro);
    int all = micros * m->L;
    double n = r->micro * m->T, squares = n * m->T * Q, weights = (double)g->layout.total;
    Optimizer optimizer = schedule_optimizer(r->f, schedule_lr(r->f, 1), 1);
    Layer *blocks = check_alloc((size_t)m->L * sizeof *blocks, "the blocks");
    const Layer *l = blocks;
    Table table = {.peaks = p, .blocks = blocks, .count = m->L}, *t = &table;
    char text[64];
    for (Timer one = {.what = "a step", .best = &t->whole}; timer_next(&one);) step(r);
    for (int i = 0; i < m->L; i++) blocks[i] = layer_at(g, i);
    double width = norms(&blocks[m->L - 1].b, false);
    Norm fin = NORM(&l->b, fin);
    printf("\n%-38s %10s    calls    ms a step  of it   rate\n",
           check_format(text, sizeof text, "%s under %s, %d x %d tokens", r->f->model,
                        m->mode->name, s->B, s->T),
           "ms");
    while (timed(t, &l, "embedding forward", micros, moved(n * C * (m->rope ? 2 : 3))))
        embedding_forward(l->b.a.e, g->inputs, l->b.w.wte, l->b.w.wpe, NULL, n, s->T, C, 1);
    while (timed(t, &l, "norms forward", all, moved(2 * n * width))) norms(&l->b, false);
    while (timed(t, &l, "q forward", all, forward_work(n, Q, C)))
        linear_forward(l->b.a.q, l->u, BIASED(&l->b, wq, Q, C, 1));
    while (timed(t, &l, "k, v forward", 2 * all, forward_work(n, K, C)))
        linear_forward(l->b.a.k, l->u, BIASED(&l->b, wk, K, C, 1));
    while (timed(t, &l, "rope forward", m->rope ? all : 0, moved(2 * n * (Q + K))))
        qk_rope(&l->b, l->b.a.qn, l->b.a.kn, +1);
    while (timed(t, &l, "attention forward", all, (Work){2 * squares, 2 * n * (Q + K)}))
        attention_forward(l->b.a.c, l->b.a.peak, l->b.a.lse, l->b.a.qn, l->b.a.kn, l->b.a.vn,
                          attn_shape(&l->b));
    while (timed(t, &l, "o forward", all, forward_work(n, C, Q)))
        linear_forward(l->b.a.ay, l->b.a.c, BIASED(&l->b, wo, C, Q, 1));
    while (timed(t, &l, "up, gate forward", m->swiglu ? 2 * all : all, forward_work(n, F, C)))
        linear_forward(l->b.a.gu + up, l->u, up_linear(&l->b));
    while (timed(t, &l, "activation forward", all, moved(n * (up + 2 * F))))
        activation_forward(l->b.a.h, l->b.a.gun, s->n, F, m->swiglu);
    while (timed(t, &l, "down forward", all, forward_work(n, C, F)))
        linear_forward(l->b.a.fy, l->b.a.h, BIASED(&l->b, wd, C, F, 1));
    while (timed(t, &l, "final norm forward", m->fin ? micros : 0, moved(2 * n * C)))
        slot_forward(fin, l->b.a.fx, l->b.a.x);
    while (timed(t, &l, "head forward", micros, forward_work(n, Vp, C)))
        linear_forward(l->b.a.logits, l->b.a.x, lm_head_linear(&l->b));
    while (timed(t, &l, "cross-entropy forward", micros, moved(n * m->V)))
        crossentropy_forward(l->b.a.losses, l->b.a.logsum, l->b.a.logits, g->targets, s->n, m->V,
                             Vp);
    while (timed(t, &l, "cross-entropy backward", micros, moved(2 * n * m->V)))
        crossentropy_backward(l->b.a.logits, l->b.a.logsum, g->targets, s->n, m->V, Vp, (real)1e-3,
                              0);
    while (timed(t, &l, "head backward", micros, backward_work(n, Vp, C)))
        linear_backward(l->b.d.x, l->b.a.logits, l->b.a.x, lm_head_linear(&l->b), SET);
    while (timed(t, &l, "final norm backward", m->fin ? micros : 0, moved(3 * n * C)))
        slot_backward(fin, l->b.d.x, l->b.d.fx, l->b.a.x);
    while (timed(t, &l, "down backward", all, backward_work(n, C, F)))
        linear_backward(l->b.d.h, l->b.d.fy, l->b.a.h, BIASED(&l->b, wd, C, F, 1), SET);
    while (timed(t, &l, "activation backward", all, moved(n * (2 * up + 3 * F))))
        activation_backward(l->b.d.gun, l->b.d.h, l->b.a.gun, s->n, F, m->swiglu);
    while (timed(t, &l, "up, gate backward", m->swiglu ? 2 * all : all, backward_work(n, F, C)))
        linear_backward(l->du, l->b.d.gun + up, l->u, up_linear(&l->b), SET);
    while (timed(t, &l, "o backward", all, backward_work(n, C, Q)))
        linear_backward(l->b.d.c, l->b.d.ay, l->b.a.c, BIASED(&l->b, wo, C, Q, 1), SET);
    while (timed(t, &l, "attention backward", all, (Work){5 * squares, 4 * n * (Q + K)}))
        attention_backward(l->b.d.qn, l->b.d.kn, l->b.d.vn, l->b.d.c, l->b.a.c, l->b.a.lse,
                           l->b.a.qn, l->b.a.kn, l->b.a.vn, attn_shape(&l->b));
    while (timed(t, &l, "rope backward", m->rope ? all : 0, moved(2 * n * (Q + K))))
        qk_rope(&l->b, l->b.d.qn, l->b.d.kn, -1);
    while (timed(t, &l, "q backward", all, backward_work(n, Q, C)))
        linear_backward(l->du, l->b.d.qn, l->u, BIASED(&l->b, wq, Q, C, 1), SET);
    while (timed(t, &l, "k, v backward", 2 * all, backward_work(n, K, C)))
        linear_backward(l->du, l->b.d.kn, l->u, BIASED(&l->b, wk, K, C, 1), ADD);
    while (timed(t, &l, "norms backward", all, moved(3 * n * width))) norms(&l->b, true);
    while (timed(t, &l, "embedding backward", micros, moved(n * C * (m->rope ? 3 : 5))))
        embedding_backward(l->b.dw.wte, l->b.dw.wpe, l->b.d.e, g->inputs, NULL, n, s->T, C, 1);
    while (timed(t, &l, "optimizer", 1, moved(8 * weights))) gpt_update(g, &optimizer);
    printf("%-61s %10.2f %5.1f %%\n", "the sum", 1e3 * t->sum, 100 * t->sum / t->whole);
    printf("%-61s %10.2f %5.1f %%  %s\n", "a whole step, measured", 1e3 * t->whole, 100.0,
           rate(text, p, t->whole, step_flops(r), 0));
}

int main(int argc, char **argv) {
    static char *const DEFAULTS[] = {"--model", "gpt2-124M", "--batch", "4", "--seq", "64"};
    char **flags = check_alloc(((size_t)argc + 6) * sizeof *flags, "the flags"), *mode = "PRE";
    Run r = {0};
    bool serving = false;
    int count = 1;
    check_streams_begin();
    threads_begin(argv);
    for (int i = 1; i < argc; i++) {
        CHECK(strcmp(argv[i], "--mode") || i + 1 < argc,
              "--mode needs a placement\n  -> --mode PRE; ./train_gpt --show modes lists them");
        if (!strcmp(argv[i], "--serve")) serving = true;
        else if (!strcmp(argv[i], "--mode")) mode = argv[++i];
        else flags[count++] = argv[i];
    }
    bool all = argc == 1, given = count > 1;
    for (int k = 0; !given && k < 6; k++) flags[count++] = DEFAULTS[k];
    run_make(&r, mode, count, flags);
    if (serving) serve(&r);
    else {
        fprintf(stderr, "timing the machine\n");
        Peaks p = {r.t->peak(), peak_bandwidth(1)};
        printf("%s: products at most %.1f GFLOP/s, memory %.1f GB/s\n", QUOTED(PREC),
               1e-9 * p.flops, 1e-9 * p.bandwidth);
        if (all) products(&p);
        CHECK(!r.m.moe.E && !r.m.kv_rank && !r.m.mode->unit,
              "the table of layers is for dense models with ordinary attention\n  -> --serve times "
              "whole steps of any model");
        layers(&r, &p);
        printf("at the end: products at most %.1f GFLOP/s, memory %.1f GB/s\n", 1e-9 * r.t->peak(),
               1e-9 * peak_bandwidth(1));
    }
    check_streams_end();
    return 0;
}
