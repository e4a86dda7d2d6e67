// test_gpt.cu: the CUDA trainer against the judge in double (link 5 of the chain of proof), on a
// GPU or in the emulator. Built once per precision.
//
// Each CUDA file has its own test in dev/test/test_*.cu; here are whole models: every mode, every
// family. dev/test/gpu_main.cu runs them all.
#include "dev/test/gpu_test.cuh"
#include "dev/test/model.h"
#include "llmc/nccl.cuh"
#include <malloc.h>

static const Trainer *const CUDA = &NAMED(cuda_, PREC), *const JUDGE = &judge_fp64;

// ------------------------------------------------------------------------------------------ models

enum { FAMILY_GPT2, FAMILY_LLAMA, FAMILY_LATENT, FAMILY_OLMOE, FAMILY_DEEPSEEK, FAMILIES };
static const char *const FAMILY_NAMES[] = {"gpt2", "llama", "latent", "olmoe", "deepseek"};
// two micro-steps of two sequences; T is odd
enum { BATCH = 2, TIME = 19, TOKENS = BATCH * TIME, MICRO = 2 };
static const int HEADLINE[] = {MODE_SPAN, MODE_PRE, MODE_POST, MODE_HYBRID, MODE_SDD};

// A small model with the GPU's head size 32, V padded, grouped queries in the Llama-like ones but
// those with latent attention. L = 2: MIX_LN gets one POST layer, DeepSeek's family one dense
// layer. In bfloat16 a token goes through all experts: what is rounded before the router would
// choose others than the judge does. (Routing by itself: test_moe.cu.)
static Model make_model(int mode, int family, int sdd) {
    Model m;
    bool gpt2 = family == FAMILY_GPT2;
    memset(&m, 0, sizeof m);
    m.mode = &MODES[mode];
    m.sdd = &SDDS[sdd];
    m.L = 2, m.C = 64, m.NH = 2, m.KV = gpt2 ? 2 : 1, m.HS = 32, m.F = 96, m.V = 50, m.Vp = 56,
    m.T = TIME;
    if (family == FAMILY_LATENT || family == FAMILY_DEEPSEEK) m.kv_rank = 48, m.rope_size = 16;
    if (m.kv_rank || MODES[mode].unit) m.KV = m.NH;
    m.norm = gpt2, m.bias = gpt2 && !MODES[mode].sdd && !MODES[mode].unit, m.rope = !gpt2,
    m.swiglu = !gpt2, m.tied = gpt2, m.fin = MODES[mode].fin;
    m.theta = 10000, m.eps = 1e-5, m.emb_scale = gpt2 ? 1 : 3, m.mix_ratio = 0.5, m.dyt_alpha = 0.5;
    if (family == FAMILY_OLMOE)
        m.F = 40, m.moe = Moe{8, 2, 0, 0, 0, ROUTER_SOFTMAX, LOSSES_MEAN, 1, 0.2, 0, 0.1, 0};
    if (family == FAMILY_DEEPSEEK)
        m.F = 24, m.moe = Moe{16, 3, 1, 56, 48, ROUTER_SIGMOID, LOSSES_SUM, 1.5, 0, 0.2, 0, 0.05};
    if (sizeof(real) == 2) m.moe.K = m.moe.E;
    return m;
}

// Two trainers with the same weights and tokens, side by side.
typedef struct Pair { Model m; Setup setup; Layout layout; Gpt *cuda, *judge; char name[64]; } Pair;

static Pair pair_of(const Model *m, const char *family, int recompute,
                    int optimizer = OPTIMIZER_ADAMW, Documents documents = {}) {
    Pair p;
    memset(&p, 0, sizeof p);
    p.m = *m;
    p.setup.B = BATCH, p.setup.T = TIME, p.setup.recompute = recompute, p.setup.training = 1,
    p.setup.optimizer = optimizer, p.setup.z_loss = 0.01, p.setup.batch = MICRO * BATCH,
    p.setup.tune = 1, p.setup.documents = documents;
    p.layout = layout_make(&p.m);
    layout_share(&p.layout, &p.m, optimizer == OPTIMIZER_MUON, 0, 1);
    p.cuda = CUDA->create(&p.m, &p.setup);
    p.judge = JUDGE->create(&p.m, &p.setup);
    fill_weights(CUDA, p.cuda, &p.layout, 5, CUDA->storage);
    CUDA->prepare(p.cuda, NULL, NULL);
    fill_weights(JUDGE, p.judge, &p.layout, 5, CUDA->storage);
    snprintf(p.name, sizeof p.name, "%s %s%s%s", p.m.mode->name, family,
             p.m.mode->sdd && p.m.sdd == &SDDS[1] ? " code" : "", optimizer ? " Muon" : "");
    return p;
}

static Pair pair_open(int mode, int family, int sdd, int recompute,
                      int optimizer = OPTIMIZER_ADAMW) {
    Model m = make_model(mode, family, sdd);
    return pair_of(&m, FAMILY_NAMES[family], recompute, optimizer);
}

static void pair_close(Pair *p) {
    CUDA->destroy(p->cuda);
    JUDGE->destroy(p->judge);
    layout_free(&p->layout);
}

// Gradients of some micro-steps; in one step the second is a sequence shorter, as the last of a
// validation may be.
static void gradients(const Trainer *t, Gpt *g, const Model *m, int step, int micros) {
    int32_t inputs[TOKENS], targets[TOKENS];
    t->zero_grads(g);
    for (int micro = 0; micro < micros; micro++) {
        int B = micro == 1 && step == 1 ? BATCH - 1 : BATCH;
        fill_tokens(inputs, targets, B * TIME, m->V, (uint64_t)(10 * step + micro));
        t->forward(g, inputs, targets, B, TIME);
        t->backward(g, 1.0 / (MICRO * TOKENS), 0);
    }
}

static void compare(Pair *p, int kind, double floor, const char *what) {
    CUDA->fetch(p->cuda, kind);
    for (int k = 0; k < p->layout.count; k++) {
        double error =
            entry_nmse(CUDA, p->cuda, JUDGE, p->judge, kind, &p->layout.entries[k], floor);
        EXPECT(error <= TOLERANCE, "%s, %s of %s: off by nmse %.2g, allowed %.2g", p->name, what,
               p->layout.entries[k].name, error, TOLERANCE);
    }
}

// The figures of --norms-every. Norms of two tensors that are TOLERANCE apart differ by
// sqrt(TOLERANCE) of them, to either side; what two such tensors make, a quotient of two norms or a
// logit, by twice that, and so do norms after the first step, when weights are apart as well. A
// part that is a thousandth of all (in bf16 a hundredth) is measured against that part, as the
// gradients themselves are; twice that for DyT's alpha, a single number in which rounding does not
// average out.
static void compare_router_stats(Pair *p, int l, const LayerStats *got, const LayerStats *want) {
    static const char *const NAMES[] = {"entropy", "balance loss", "sequence loss", "z-loss"};
    const double *a = got->router, *b = want->router;    // sums over the same tokens
    for (int i = 0; i < 4; i++)
        EXPECT(fabs(a[i] - b[i]) <= 2 * sqrt(TOLERANCE) * fabs(b[i]),
               "%s, layer %d: the router's %s %.9g, the judge has %.9g", p->name, l, NAMES[i], a[i],
               b[i]);
    for (int e = 0; e < p->m.moe.E; e++)
        EXPECT(a[ROUTER_SUMS + e] == b[ROUTER_SUMS + e],
               "%s, layer %d: %g tokens of expert %d, the judge has %g", p->name, l,
               a[ROUTER_SUMS + e], e, b[ROUTER_SUMS + e]);
}

static void compare_layer_stats(Pair *p) {
    static const char *const NAMES[] = {"residual RMS", "attention's ratio", "the ffn's ratio",
                                        "largest logit"};
    const LayerStats *got = CUDA->layer_stats(p->cuda), *want = JUDGE->layer_stats(p->judge);
    for (int l = 0; l < p->m.L; l++) {
        double a[4], b[4];
        layer_figures(a, &got[l], p->m.C);
        layer_figures(b, &want[l], p->m.C);
        EXPECT(got[l].tokens == want[l].tokens, "%s, layer %d: %g tokens, the judge has %g",
               p->name, l, got[l].tokens, want[l].tokens);
        for (int i = 0; i < 4; i++)
            EXPECT(fabs(a[i] - b[i]) <= (i ? 2 : 1) * sqrt(TOLERANCE) * fabs(b[i]),
                   "%s, layer %d: %s %.9g, the judge has %.9g", p->name, l, NAMES[i], a[i], b[i]);
        if (l >= p->m.moe.dense && p->m.moe.E) compare_router_stats(p, l, &got[l], &want[l]);
    }
}

static void compare_tensor_stats(Pair *p, const Optimizer *applied) {
    static const char *const NAMES[] = {"gradient", "weights", "update"};
    double all[3] = {0}, bound = (applied->step == 1 ? 1 : 2) * sqrt(TOLERANCE);
    const TensorStats *got = CUDA->tensor_stats(p->cuda, applied);
    const TensorStats *want = JUDGE->tensor_stats(p->judge, applied);
    for (const TensorStats *s = want; s < want + p->layout.count; s++)
        all[0] += s->grad, all[1] += s->weight, all[2] += s->update;
    for (int k = 0; k < p->layout.count; k++) {
        const double a[] = {sqrt(got[k].grad), sqrt(got[k].weight), sqrt(got[k].update)};
        const double b[] = {sqrt(want[k].grad), sqrt(want[k].weight), sqrt(want[k].update)};
        for (int i = 0; i < 3; i++) {
            double floor = (CUDA->storage == 2 ? 1e-2 : 1e-3) * sqrt(all[i]);
            if (p->layout.entries[k].size == 1) floor *= 2;
            EXPECT(fabs(a[i] - b[i]) <= bound * fmax(b[i], floor),
                   "%s, %s: norm of its %s %.9g, the judge has %.9g, within %.3g", p->name,
                   p->layout.entries[k].name, NAMES[i], a[i], b[i], bound * fmax(b[i], floor));
        }
    }
}

// Logits, gradients of two micro-steps, then three optimizer steps: losses, norms, weights,
// moments, and what was measured meanwhile. An entry whose gradient is a thousandth of all (in bf16
// a hundredth; a key bias has none but for rounding) is measured against that part.
static void compare_pair(Pair p) {
    Optimizer o;
    memset(&o, 0, sizeof o);
    for (int i = 0; i < LR_GROUPS; i++)
        o.lr[i] = i == LR_BALANCE ? p.m.moe.bias_rate : 0.01 * (i + 1);
    for (int i = 0; i < 3; i++) o.decay[i] = 0.1 * (i + 1);
    o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1e-2, o.gain_target = 1;
    o.muon_lr = 0.02, o.momentum = 0.9;
    for (o.step = 1; o.step <= 3; o.step++) {
        // once more than there are buffers for batches
        int micros = o.step == 2 ? MICRO + 1 : MICRO;
        CUDA->stats_begin(p.cuda);
        JUDGE->stats_begin(p.judge);
        gradients(CUDA, p.cuda, &p.m, (int)o.step - 1, micros);
        gradients(JUDGE, p.judge, &p.m, (int)o.step - 1, micros);
        compare_layer_stats(&p);
        double all = grads_norm(JUDGE, p.judge, &p.layout);
        if (o.step == 1)
            compare(&p, GRADS, (CUDA->storage == 2 ? 1e-4 : 1e-6) * all * all, "gradient");
        o.clip = 0.5 * all;
        CUDA->update(p.cuda, &o);
        JUDGE->update(p.judge, &o);
        Update a = CUDA->outcome(p.cuda), b = JUDGE->outcome(p.judge);
        double bound = sqrt(TOLERANCE);
        EXPECT(fabs(a.loss.ce - b.loss.ce) <= bound * b.loss.ce &&
                   fabs(a.loss.z - b.loss.z) <= 2 * bound * b.loss.z,
               "%s: loss %.9g + %.9g, the judge has %.9g + %.9g", p.name, a.loss.ce, a.loss.z,
               b.loss.ce, b.loss.z);
        EXPECT(fabs(a.loss.router - b.loss.router) <= 2 * bound * b.loss.router,
               "%s: loss of routers %.9g, the judge has %.9g", p.name, a.loss.router,
               b.loss.router);
        EXPECT(fabs(a.norm - b.norm) <= bound * b.norm && a.applied,
               "%s: norm %.9g, the judge has %.9g", p.name, a.norm, b.norm);
        compare_tensor_stats(&p, &o);
    }
    Optimizer none = {};
    none.eps = 1, none.step = 3;
    compare_tensor_stats(&p, &none);
    compare(&p, WEIGHTS, 0, "weights after three steps");
    pair_close(&p);
}

static void compare_family(int mode, int family, int optimizer = OPTIMIZER_ADAMW) {
    for (int sdd = 0; sdd < (MODES[mode].sdd ? SDD_COUNT : 1); sdd++)
        compare_pair(pair_open(mode, family, sdd, RECOMPUTE_OFF, optimizer));
}

static bool is_headline(int mode) {
    for (int m : HEADLINE) if (m == mode) return true;
    return false;
}

// The five headline modes; with latent attention and with experts only together, as DeepSeek has
// them: each by itself is among the others.
GPU_TEST(cuda_modes) {
    for (int mode : HEADLINE)
        for (int family : {FAMILY_GPT2, FAMILY_LLAMA, FAMILY_DEEPSEEK})
            compare_family(mode, family);
}

// About two documents a sequence, with positions that restart.
GPU_TEST(cuda_documents) {
    for (int family : {FAMILY_GPT2, FAMILY_DEEPSEEK}) {
        Model m = make_model(MODE_SPAN, family, 0);
        m.V = 11;
        compare_pair(pair_of(&m, "documents", RECOMPUTE_OFF, OPTIMIZER_ADAMW, {1, 1, 4}));
    }
}

GPU_TEST(cuda_ngpt_mode) { compare_family(MODE_NGPT, FAMILY_LLAMA); }

// A post norm and then an in norm, which no other placement has, beside a strong skip.
GPU_TEST(cuda_keel_mode) { compare_family(MODE_KEEL, FAMILY_LLAMA); }

// No placement has this: the ffn's skip carries the block's input, and no norm follows attention.
GPU_TEST(cuda_block_skip) {
    Mode row = MODES[MODE_PRE];
    row.name = "PRE with two skips from x";
    row.ffn.skip = BLOCK, row.ffn.a = DEEP;
    Model m = make_model(MODE_PRE, FAMILY_LLAMA, 0);
    m.mode = &row;
    compare_pair(pair_of(&m, FAMILY_NAMES[FAMILY_LLAMA], RECOMPUTE_OFF));
}

static void compare_dyt(int mode, int family) {
    Model m = make_model(mode, family, 0);
    m.norm = NORM_DYT;
    compare_pair(pair_of(&m, FAMILY_NAMES[family], RECOMPUTE_OFF));
}

// DyT in every slot of a norm; beside SDD's RMS in one kernel.
GPU_TEST(cuda_dyt_modes) {
    compare_dyt(MODE_SPAN, FAMILY_LLAMA);
    compare_dyt(MODE_PERI, FAMILY_GPT2);
    compare_dyt(MODE_SDD, FAMILY_LLAMA);
    compare_dyt(MODE_QKVC_POST, FAMILY_DEEPSEEK);
}

GPU_TEST(other_modes_dyt) {
    for (int mode = 0; mode < MODE_COUNT; mode++)
        if (MODES[mode].selectable) compare_dyt(mode, mode % FAMILIES);
}

// Experts one by one, latents, matrices with more rows than columns and with fewer.
GPU_TEST(cuda_muon_modes) {
    compare_family(MODE_SPAN, FAMILY_GPT2, OPTIMIZER_MUON);
    compare_family(MODE_HYBRID, FAMILY_DEEPSEEK, OPTIMIZER_MUON);
}

GPU_TEST(other_modes_muon) {
    for (int mode = 0; mode < MODE_COUNT; mode++)
        for (int family = 0; family < FAMILIES; family++)
            if (MODES[mode].selectable) compare_family(mode, family, OPTIMIZER_MUON);
}

GPU_TEST(other_modes) {
    for (int mode = 0; mode < MODE_COUNT; mode++)
        for (int family = 0; family < FAMILIES; family++)
            if (MODES[mode].selectable &&
                (!is_headline(mode) || family == FAMILY_LATENT || family == FAMILY_OLMOE))
                compare_family(mode, family);
}

// Settings that no family turns: gates renormalized after a softmax; GELU in experts and beside
// them; one expert a token; both losses over layers that are part dense.
GPU_TEST(cuda_routers) {
    Model m = make_model(MODE_PRE, FAMILY_OLMOE, 0);
    m.moe.router = ROUTER_SOFTMAX_RENORM, m.swiglu = 0;
    compare_pair(pair_of(&m, "renormalized, GELU", RECOMPUTE_OFF));
    m = make_model(MODE_SPAN, FAMILY_DEEPSEEK, 0);
    m.moe.balance = 0.1, m.moe.z = 0.05, m.moe.losses = LOSSES_MEAN, m.swiglu = 0;
    if (sizeof(real) == 4) m.moe.K = 1;
    compare_pair(pair_of(&m, "one expert a token, GELU", RECOMPUTE_OFF));
}

// Heads whose width times their number is not the model's (once so large that the bias of q, k and
// v needs the most scratch), biases of q, k and v alone (with experts too), and Llama 3's RoPE,
// whose pairs here are slow, kept and between.
GPU_TEST(cuda_heads) {
    for (int mode : {(int)MODE_SPAN, (int)MODE_OLMOE, (int)MODE_SDD, (int)MODE_NGPT})
        for (int family : {FAMILY_LLAMA, FAMILY_OLMOE, FAMILY_DEEPSEEK}) {
            Model m = make_model(mode, family, 0);
            m.NH = 3, m.KV = m.KV == 1 ? 1 : 3;
            m.rope_factor = 8, m.rope_original = 25, m.theta = 500;
            if (mode == MODE_SPAN && family == FAMILY_LLAMA)
                m.C = m.F = 32, m.NH = m.KV = 5, m.HS = 128;
            if (!m.kv_rank && !m.mode->sdd && !m.mode->unit) m.bias = BIAS_QKV;
            compare_pair(pair_of(&m, "heads", RECOMPUTE_OFF));
        }
}

// ------------------------------------------------------------------------------------- invariances

// The weights after two steps as the host sees them, made in a given way. stats: what the second
// step shows where it is measured; nullptr: it is not.
static Values trained(const Setup *setup, int mode, int family, Values *stats = nullptr,
                      bool dyt = false) {
    Model m = make_model(mode, family, 0);
    if (dyt) m.norm = NORM_DYT;
    Layout layout = layout_make(&m);
    Gpt *g = CUDA->create(&m, setup);
    Optimizer o;
    memset(&o, 0, sizeof o);
    for (int i = 0; i < LR_GROUPS; i++) o.lr[i] = 0.01;
    o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1e-8, o.clip = 1;
    fill_weights(CUDA, g, &layout, 5, 4);
    CUDA->prepare(g, NULL, NULL);
    for (o.step = 1; o.step <= 2; o.step++) {
        bool watched = stats && o.step == 2;
        if (watched) CUDA->stats_begin(g);
        gradients(CUDA, g, &m, 0, MICRO);
        CUDA->update(g, &o);
        if (!watched) continue;
        const LayerStats *layers = CUDA->layer_stats(g);
        const TensorStats *tensors = CUDA->tensor_stats(g, &o);
        for (const LayerStats *s = layers; s < layers + m.L; s++) {
            stats->insert(stats->end(), s->sums.squares, s->sums.squares + LAYER_SQUARES);
            stats->insert(stats->end(), {s->sums.logit, s->tokens});
            stats->insert(stats->end(), s->router, s->router + router_size(&m));
        }
        for (const TensorStats *s = tensors; s < tensors + layout.count; s++)
            stats->insert(stats->end(), {s->grad, s->weight, s->update});
    }
    CUDA->fetch(g, WEIGHTS);
    Values v;
    for (int k = 0; k < layout.count; k++)
        for (int64_t i = 0; i < layout.entries[k].size; i++)
            v.push_back(entry_value(CUDA, g, WEIGHTS, &layout.entries[k], i));
    CUDA->destroy(g);
    layout_free(&layout);
    return v;
}

// Recompute, graphs and measuring change no bit, nor do graphs change what is measured, and the
// same command gives the same bits. With GELU inside the product (bf16), `cheap` computes it once
// more from the rounded value: the same to rounding.
GPU_TEST(cuda_invariance) {
    for (int family = 0; family < FAMILIES; family++) {
        Setup plain;
        memset(&plain, 0, sizeof plain);
        plain.B = BATCH, plain.T = TIME, plain.training = 1, plain.batch = MICRO * BATCH,
        plain.z_loss = 0.01;
        Setup on = plain, cheap = plain, graph = plain, stochastic = plain;
        on.recompute = RECOMPUTE_ON;
        cheap.recompute = RECOMPUTE_CHEAP;
        graph.graph = 1;
        stochastic.stochastic = 1;
        for (int mode : {(int)MODE_SPAN, (int)MODE_HYBRID, (int)MODE_NGPT}) {
            Values want = trained(&plain, mode, family), seen, seen_in_graphs;
            const char *name = MODES[mode].name;
            EXPECT(trained(&plain, mode, family) == want, "%s: twice the same and another result",
                   name);
            EXPECT(trained(&on, mode, family) == want, "%s: --recompute on changes the weights",
                   name);
            EXPECT(trained(&graph, mode, family) == want, "%s: --graph on changes the weights",
                   name);
            EXPECT(trained(&plain, mode, family, &seen) == want &&
                       trained(&graph, mode, family, &seen_in_graphs) == want,
                   "%s: measuring changes the weights", name);
            EXPECT(seen == seen_in_graphs, "%s: --graph on changes what is measured", name);
            Values close = trained(&cheap, mode, family);
            EXPECT(family == FAMILY_GPT2 && CUDA->storage == 2 ? nmse(close, want) < TOLERANCE
                                                               : close == want,
                   "%s: --recompute cheap changes the weights", name);
            Values rounded = trained(&stochastic, mode, family);
            EXPECT((rounded == want) == (CUDA->storage == 4),
                   "%s: stochastic rounding where there is something to round", name);
            EXPECT(trained(&stochastic, mode, family) == rounded,
                   "%s: stochastic rounding by the seed", name);
        }
    }
}

// The same with DyT, whose alpha has a gradient that is one sum over all values.
GPU_TEST(cuda_dyt_invariance) {
    Setup plain;
    memset(&plain, 0, sizeof plain);
    plain.B = BATCH, plain.T = TIME, plain.training = 1, plain.batch = MICRO * BATCH;
    Setup cheap = plain;
    cheap.recompute = RECOMPUTE_CHEAP;
    Values want = trained(&plain, MODE_QKVC_POST, FAMILY_LLAMA, nullptr, true);
    EXPECT(trained(&plain, MODE_QKVC_POST, FAMILY_LLAMA, nullptr, true) == want,
           "DyT: twice the same and another result");
    EXPECT(trained(&cheap, MODE_QKVC_POST, FAMILY_LLAMA, nullptr, true) == want,
           "DyT: --recompute cheap changes the weights");
}

// AddressSanitizer's malloc is not in mallinfo2.
#if !defined(__CUDACC__) && !defined(__SANITIZE_ADDRESS__) && __GLIBC_PREREQ(2, 33)
// On the host a model takes no more than what it stages: copies of parameters and moments come when
// they are asked for.
GPU_TEST(cuda_host_memory) {
    size_t free_before, free_after, total;
    auto bytes = [] { struct mallinfo2 all = mallinfo2(); return all.uordblks + all.hblkhd; };
    Model m = make_model(MODE_SPAN, FAMILY_LLAMA, 0);
    Setup setup = {};
    setup.B = BATCH, setup.T = TIME, setup.training = 1, setup.batch = MICRO * BATCH;
    Layout layout = layout_make(&m);
    size_t one = (size_t)layout.total * sizeof(float), before = bytes();
    cudaCheck(cudaMemGetInfo(&free_before, &total));
    Gpt *g = CUDA->create(&m, &setup);
    cudaCheck(cudaMemGetInfo(&free_after, &total));
    // the emulated device's memory is the host's
    size_t taken = bytes() - before - (free_before - free_after);
    EXPECT(taken < one,
           "%zu bytes on the host before anything is asked for, where all parameters take %zu",
           taken, one);
    CUDA->destroy(g);
    layout_free(&layout);
}
#endif

// A group of NCCL may have 2048 calls (its user guide, ncclGroupEnd): more are several groups.
static int nccl_calls, nccl_most;
static int nccl_boundary(void) {
    nccl_most = max(nccl_most, nccl_calls);
    nccl_calls = 0;
    return 0;
}
GPU_TEST(cuda_nccl_group) {
    Nccl n = {};
    Gpu gpu = {};
    float x;
    n.size = 2;
    n.GroupStart = n.GroupEnd = nccl_boundary;
    n.Broadcast = [](const void *, void *, size_t, int, int, void *, cudaStream_t) {
        return nccl_calls++, 0;
    };
    cudaCheck(cudaEventCreateWithFlags(&n.sofar, cudaEventDisableTiming));
    for (int total : {1024, 2048, 5000}) {
        nccl_begin(&n, &gpu);
        for (int i = 0; i < total; i++) nccl_start(&n, COMM_BROADCAST, &x, 1, 0);
        nccl_end(&n);
        EXPECT(n.started == total, "%d of %d calls", n.started, total);
        EXPECT(nccl_most <= 2048, "%d calls in a group", nccl_most);
    }
    cudaCheck(cudaEventDestroy(n.sofar));
    (void)nccl_open, (void)nccl_close, (void)nccl_join, (void)nccl_wait;   // not called here
}

#if !defined(__CUDACC__)
// Refused before training begins: norms wider than a block holds, and LayerNorms wider than the
// shared memory of a GPU allows in backward. EMU_COMPUTE: 12.0 has 99 KiB for a block, 9.0 has 227.
GPU_TEST(cuda_wide_norms) {
    const char *const REFUSED =
        "1 error: a norm over 8224 values; on a GPU like this at most 8192\n"
        "  -> a smaller --width, --ffn or --kv-rank, fewer --heads, --norm rms";
    const char *const WIDER =
        "1 error: a norm over 16416 values; on a GPU like this at most 16384\n";
    const struct { const char *compute; int mode, heads, norm, training; const char *words;
    } ROWS[] = {
        {"120", MODE_PRE, 257, 1, 1, REFUSED}, {"120", MODE_PRE, 256, 1, 1, "0 "},
        {"120", MODE_PRE, 257, 0, 1, "0 "},    {"120", MODE_PRE, 257, 1, 0, "0 "},
        {"90", MODE_PRE, 257, 1, 1, "0 "},     {"90", MODE_PRE, 512, 1, 1, "0 "},
        {"90", MODE_PRE, 513, 1, 1, WIDER},    {"120", MODE_PRE, 513, 0, 0, WIDER},
        // the gain of nGPT's logits is no norm: its 20,480 values are not held
        {"90", MODE_NGPT, 1, 0, 1, "0 "},
        // q and k have norms over all heads
        {"90", MODE_OLMO2, 257, 0, 0, PACK == 4 ? REFUSED : "0 "},
    };
    for (const auto &row : ROWS) {
        Model m = make_model(row.mode, FAMILY_GPT2, 0);
        Setup setup = {};
        m.NH = m.KV = row.heads, m.C = m.NH * m.HS, m.norm = row.norm;
        m.V = m.Vp = 20480;
        setup.B = 1, setup.T = TIME, setup.training = row.training;
        expect_words(said([&] {
                         setenv("EMU_COMPUTE", row.compute, 1);
                         return CUDA->free_bytes(&m, &setup) > 0 ? 0 : 1;
                     }),
                     row.words, "a wide norm");
    }
}
#endif

// A gradient or loss that is not finite changes nothing: not a weight, not a moment.
GPU_TEST(cuda_not_finite) {
    Pair p = pair_open(MODE_SPAN, FAMILY_LLAMA, 0, RECOMPUTE_OFF);
    Optimizer o;
    memset(&o, 0, sizeof o);
    for (int i = 0; i < 4; i++) o.lr[i] = 0.01;
    o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1e-8, o.clip = 1, o.step = 1;
    const Entry *last = &p.layout.entries[p.layout.count - 1];
    float *w = (float *)CUDA->tensor(p.cuda, WEIGHTS, last), was = w[last->size - 1];
    w[last->size - 1] = NAN;
    CUDA->store(p.cuda, WEIGHTS, 0);
    gradients(CUDA, p.cuda, &p.m, 0, MICRO);
    CUDA->update(p.cuda, &o);
    Update u = CUDA->outcome(p.cuda);
    EXPECT(!u.applied && !std::isfinite(u.norm), "a NaN gave norm %g, applied %d", u.norm,
           u.applied);
    CUDA->fetch(p.cuda, WEIGHTS);
    CUDA->fetch(p.cuda, ADAM_M);
    w[last->size - 1] = was;
    double error = 0, moment = 0;
    for (int k = 0; k < p.layout.count; k++) {
        error += entry_nmse(CUDA, p.cuda, JUDGE, p.judge, WEIGHTS, &p.layout.entries[k], 0);
        for (int64_t i = 0; i < p.layout.entries[k].size; i++)
            moment += fabs(entry_value(CUDA, p.cuda, ADAM_M, &p.layout.entries[k], i));
    }
    EXPECT(error == 0 && moment == 0,
           "a step that was not applied moved weights by %g, moments by %g", error, moment);
    pair_close(&p);
}

// A shorter sequence in memory made for a longer one, and logits of one row, as sampling asks for
// them.
GPU_TEST(cuda_logits) {
    for (int i = 0; i < 2 * FAMILIES; i++) {
        Pair p = pair_open(i % 2 ? MODE_NGPT : MODE_HYBRID_STAR, i / 2, 0, RECOMPUTE_OFF);
        int32_t inputs[TOKENS], targets[TOKENS];
        fill_tokens(inputs, targets, TOKENS, p.m.V, 3);
        for (int T : {(int)TIME, 7}) {
            CUDA->forward(p.cuda, inputs, NULL, 1, T);
            JUDGE->forward(p.judge, inputs, NULL, 1, T);
            Values got, want;
            for (int64_t row = 0; row < T; row += 3) {
                const float *a = (const float *)CUDA->logits(p.cuda, row);
                const double *b = (const double *)JUDGE->logits(p.judge, row);
                got.insert(got.end(), a, a + p.m.V);
                want.insert(want.end(), b, b + p.m.V);
            }
            EXPECT(nmse(got, want) <= TOLERANCE, "%s, %d tokens: logits off by nmse %.2g", p.name,
                   T, nmse(got, want));
        }
        pair_close(&p);
    }
}

// A text in pieces (Trainer.decode) against the full forward: of the judge, and of the same
// trainer, whose attention then comes from another kernel.
static void compare_decoded(int mode, int family, int sdd) {
    static const int PIECES[][6] = {{TIME}, {7, 1, 1, 3, 1, 6}, {1, 1, 1, 15, 1}, {18, 1}};
    Pair p = pair_open(mode, family, sdd, RECOMPUTE_OFF);
    for (int i = 0; i < 4; i++) {
        int32_t inputs[TIME], targets[TIME];
        Values got, own, want;
        // another text each time: nothing of the one before is left
        fill_tokens(inputs, targets, TIME, p.m.V, (uint64_t)(40 + i));
        for (int at = 0, k = 0; k < 6 && PIECES[i][k]; at += PIECES[i][k++]) {
            CUDA->decode(p.cuda, inputs + at, PIECES[i][k], at);
            const float *z = (const float *)CUDA->logits(p.cuda, 0);
            got.insert(got.end(), z, z + p.m.V);
        }
        CUDA->forward(p.cuda, inputs, NULL, 1, TIME);
        JUDGE->forward(p.judge, inputs, NULL, 1, TIME);
        for (int at = 0, k = 0; k < 6 && PIECES[i][k]; k++) {
            at += PIECES[i][k];
            const float *z = (const float *)CUDA->logits(p.cuda, at - 1);
            const double *y = (const double *)JUDGE->logits(p.judge, at - 1);
            own.insert(own.end(), z, z + p.m.V);
            want.insert(want.end(), y, y + p.m.V);
        }
        EXPECT(nmse(got, want) <= TOLERANCE,
               "%s, text %d in pieces: logits off by nmse %.2g from the judge's", p.name, i,
               nmse(got, want));
        EXPECT(nmse(got, own) <= TOLERANCE,
               "%s, text %d in pieces: logits off by nmse %.2g from the full forward's", p.name, i,
               nmse(got, own));
    }
    pair_close(&p);
}

GPU_TEST(cuda_model_decode) {
    for (int mode : HEADLINE)
        for (int family : {FAMILY_GPT2, FAMILY_LLAMA, FAMILY_OLMOE, FAMILY_DEEPSEEK})
            for (int sdd = 0; sdd < (MODES[mode].sdd ? SDD_COUNT : 1); sdd++)
                compare_decoded(mode, family, sdd);
    compare_decoded(MODE_QKVC_POST, FAMILY_LLAMA, 0);
    compare_decoded(MODE_OLMO2, FAMILY_GPT2, 0);
    compare_decoded(MODE_NGPT, FAMILY_LLAMA, 0);
    compare_decoded(MODE_HYBRID, FAMILY_LATENT, 0);
    compare_decoded(MODE_NGPT, FAMILY_LATENT, 0);
}

#if !defined(__CUDACC__)
// Keys and values of weights that have changed since are refused, and a forward of whole sequences
// leaves a text as it is.
GPU_TEST(cuda_decode_stale) {
    static const char *const WHAT[] = {"a forward", "weights that were set", "an update"};
    Pair p = pair_open(MODE_PRE, FAMILY_LLAMA, 0, RECOMPUTE_OFF);
    const int32_t tokens[] = {1, 2, 3, 4};
    CUDA->decode(p.cuda, tokens, 4, 0);
    for (int change = 0; change < 3; change++) {
        std::string words = said([&] {
            Optimizer o = {};
            o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1, o.step = 1;
            if (change == 1) CUDA->store(p.cuda, WEIGHTS, 0);
            else gradients(CUDA, p.cuda, &p.m, 0, MICRO);
            if (change == 2) CUDA->update(p.cuda, &o);
            CUDA->decode(p.cuda, tokens, 1, 4);
            return 0;
        });
        const char *expected = change ? "1 error: decode at position 4, but" : "0 ";
        expect_words(words, expected, WHAT[change]);
    }
    pair_close(&p);
}
#endif

// The lengths that nGPT's matrices have, given to weights of any length, which then stay what they
// are; elsewhere nothing changes.
GPU_TEST(cuda_normalize) {
    for (int mode : {(int)MODE_NGPT, (int)MODE_SPAN}) {
        Pair p = pair_open(mode, FAMILY_LATENT, 0, RECOMPUTE_OFF);
        CUDA->normalize(p.cuda);
        JUDGE->normalize(p.judge);
        compare(&p, WEIGHTS, 0, "normalized weights");
        Optimizer o;
        memset(&o, 0, sizeof o);
        o.beta1 = 0.9, o.beta2 = 0.95, o.eps = 1, o.step = 1;
        for (Gpt *g : {p.cuda, p.judge}) gradients(g == p.cuda ? CUDA : JUDGE, g, &p.m, 0, MICRO);
        CUDA->update(p.cuda, &o);
        JUDGE->update(p.judge, &o);
        Update a = CUDA->outcome(p.cuda), b = JUDGE->outcome(p.judge);
        EXPECT(fabs(a.loss.ce - b.loss.ce) <= sqrt(TOLERANCE) * b.loss.ce,
               "%s: loss %.9g with normalized weights, the judge has %.9g", p.name, a.loss.ce,
               b.loss.ce);
        compare(&p, WEIGHTS, 0, "weights normalized twice");
        pair_close(&p);
    }
}
