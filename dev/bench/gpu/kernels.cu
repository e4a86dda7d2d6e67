// kernels.cu: times every layer of a training step, forward and backward, at the shapes of GPT-2
// 124M and of SpanNorm's 740M; and a layer of experts like OLMoE's, half as wide (64 experts of
// 512, 8 a token), its products beside their plain twin, one product of the library for each
// expert.
//
//   make build/cuda-bench/kernels && build/cuda-bench/kernels [tiny] [SECTION]
//
// It prints one JSON line a layer; report.py makes the table. `tiny` takes shapes for the emulator.
//
// A SECTION (SECTIONS below) is timed by itself, so that a fault in one does not cost the others.
//
// Beside the time stand the FLOP and the bytes that the shape takes, with every input read once and
// every output written once. report.py makes a floor of them and of the two ceilings that the
// section `ceilings` measures: a product of 8192 x 8192 matrices, and a copy inside the memory.
//
// A time is the median of samples, each over RUNS launches in a row between two events; there are
// at least SAMPLES of them, for at least LEAST_SECONDS, so that nvidia-smi sees the clock and the
// power of each. Inputs are random: products of zeros run faster than real ones. Inputs are far
// larger than the caches, except for norms' gains and RoPE's angles. Fills and copies go to the
// stream of the launches: it waits for no other.
#include "../../../llmc/adamw.cuh"
#include "../../../llmc/attend.cuh"
#include "../../../llmc/embed.cuh"
#include "../../../llmc/experts.cuh"
#include "../../../llmc/ffn.cuh"
#include "../../../llmc/linear.cuh"
#include "../../../llmc/loss.cuh"
#include "../../../llmc/moe.cuh"
#include "../../../llmc/norm.cuh"
#include "../../../llmc/qkv.cuh"
#include "../../../llmc/rand.h"
#include "../../test/experts_plain.cuh"
#include <algorithm>
#include <string>
#include <time.h>
#include <vector>

enum { SAMPLES = 11, RUNS = 5 };
static const double LEAST_SECONDS = 0.3;

struct Shapes { const char *model; int L, B, T, C, NH, KV, HS, F, swiglu, V, Vp; };
static const Shapes LARGE[] = {
    {"gpt2-124M", 12, 64, 1024, 768, 12, 12, 64, 3072, 0, 50257, 50304},
    {"span-740M", 24, 16, 2048, 1536, 24, 24, 64, 4224, 1, 32000, 32000}};
// A vocabulary as large beside the ffn as GPT-2's: scratch is made for the ffn.
static const Shapes TINY[] = {{"gpt2-tiny", 1, 2, 32, 64, 2, 2, 32, 128, 0, 2257, 2304},
                              {"span-tiny", 1, 1, 40, 64, 2, 1, 32, 96, 1, 64, 64}};

// Experts are the only thing timed at these.
struct ExpertShapes { Shapes s; int E, K; };
static const ExpertShapes EXPERTS_LARGE = {
    {"experts of 512", 16, 16, 2048, 1024, 16, 16, 64, 512, 1, 50280, 50304}, 64, 8};
static const ExpertShapes EXPERTS_TINY = {
    {"experts of 24", 1, 2, 32, 64, 2, 2, 32, 24, 1, 64, 64}, 8, 2};

struct Bench {
    Gpu gpu;
    Shapes s;
    int64_t n;                                                 // tokens
    bool tiny;
    std::vector<void *> rooms;                                 // device memory of the case at hand
};

// Normal-looking numbers of this size from a hash of the index.
template <typename T>
static __global__ void fill_kernel(T *x, int64_t count, float size, uint64_t key) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += stride) {
        uint64_t z = ((uint64_t)i + key) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z ^= z >> 27;
        float sum = 0;
        // variance 4 * 65536^2 / 12
        for (int k = 0; k < 4; k++) sum += (float)(z >> 16 * k & 0xffff) - 32767.5f;
        x[i] = T(size * sum * (1 / 37837.0f));
    }
}

template <typename T = real> static T *room(Bench *b, int64_t count, float size = 1) {
    T *x;
    cudaCheck(cudaMalloc((void **)&x, (size_t)count * sizeof(T)));
    LAUNCH(fill_kernel<T>, b->tiny ? 2 : 1024, b->tiny ? 64 : 256, 0, b->gpu.stream, x, count, size,
           (uint64_t)(b->rooms.size() + 1) << 40);
    b->rooms.push_back(x);
    return x;
}

static int32_t *room_of_integers(Bench *b, const std::vector<int32_t> &values) {
    int32_t *x;
    cudaCheck(cudaMalloc((void **)&x, values.size() * sizeof(int32_t)));
    cudaCheck(cudaMemcpyAsync(x, values.data(), values.size() * sizeof(int32_t),
                              cudaMemcpyHostToDevice, b->gpu.stream));
    cudaCheck(cudaStreamSynchronize(b->gpu.stream));  // `values` may end with this call
    b->rooms.push_back(x);
    return x;
}

static void leave_rooms(Bench *b) {
    cudaCheck(cudaDeviceSynchronize());
    for (void *x : b->rooms) cudaCheck(cudaFree(x));
    b->rooms.clear();
}

// Seconds since 1970, as nvidia-smi stamps clocks and power.
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Times `launch`; work as it must be: floating-point operations and bytes.
template <typename F>
static void measure(Bench *b, const std::string &layer, double flops, double bytes, F launch) {
    cudaStream_t stream = b->gpu.stream;
    cudaEvent_t from, to;
    std::vector<float> times;
    size_t samples = b->tiny ? 1 : SAMPLES;
    double seconds = b->tiny ? 0 : LEAST_SECONDS;
    cudaCheck(cudaEventCreate(&from));
    cudaCheck(cudaEventCreate(&to));
    // the first chooses the plans of products
    for (int i = 0; i < (b->tiny ? 1 : 3); i++) launch();
    double began = now();
    while (times.size() < samples || now() - began < seconds) {
        float ms;
        cudaCheck(cudaEventRecord(from, stream));
        for (int i = 0; i < RUNS; i++) launch();
        cudaCheck(cudaEventRecord(to, stream));
        cudaCheck(cudaEventSynchronize(to));
        cudaCheck(cudaEventElapsedTime(&ms, from, to));
        times.push_back(ms / RUNS);
    }
    cudaCheck(cudaEventDestroy(from));
    cudaCheck(cudaEventDestroy(to));
    std::sort(times.begin(), times.end());
    printf("{\"model\": \"%s\", \"layer\": \"%s\", \"tokens\": %lld, \"ms\": %.5f, \"ms_min\": "
           "%.5f, \"ms_max\": %.5f, \"flops\": %.6g, \"bytes\": %.6g, \"from\": %.3f, \"to\": "
           "%.3f}\n",
           b->s.model, layer.c_str(), (long long)b->n, times[times.size() / 2], times[0],
           times.back(), flops, bytes, began, now());
    fflush(stdout);
}

// ------------------------------------------------------------------------------------------ layers

// How fast this GPU multiplies and copies at best.
static void time_ceilings(Bench *b) {
    int side = b->tiny ? 64 : 8192;
    int64_t area = (int64_t)side * side, count = b->tiny ? area : (int64_t)1 << 30;
    double size = sizeof(real);
    b->s = {"ceilings", 1, 1, side, side, 0, 0, 0, 0, 0, 0, 0};
    b->n = side;
    real *y = room(b, area), *x = room(b, area), *w = room(b, area);
    real *from = room(b, count), *to = room(b, count);
    Linear l = {w, nullptr, nullptr, nullptr, side, side, side, 1};
    measure(b, "product", 2 * (double)area * side, 3 * (double)area * size,
            [=] { linear_forward(y, x, l, {}, &b->gpu); });
    measure(b, "copy", 0, 2 * (double)count * size, [=] {
        cudaCheck(cudaMemcpyAsync(to, from, (size_t)count * sizeof(real), cudaMemcpyDeviceToDevice,
                                  b->gpu.stream));
    });
    leave_rooms(b);
}

// A matrix product y = x W^T and its two backward products: 2 n out in operations each. dW is float
// and SET, as in the first micro-step of a step: only written.
static void time_linear(Bench *b, const std::string &name, int out, int in, bool biased, bool gelu,
                        bool add) {
    double n = (double)b->n;
    double flops = 2 * n * out * in;
    double size = sizeof(real);
    double weights = (double)out * in;
    real *y = room(b, b->n * out);
    real *x = room(b, b->n * in);
    real *w = room(b, (int64_t)out * in, 0.02f);
    real *bias = biased ? room(b, out) : nullptr;
    real *h = gelu ? room(b, b->n * out) : nullptr;
    wide *dw = room<wide>(b, (int64_t)out * in), *db = bias ? room<wide>(b, out) : nullptr;
    Linear l = {w, bias, dw, db, b->n, out, in, 1, SET};
    Residual skip = {add ? y : nullptr, 1};
    double forward = (n * in + weights + n * out * (gelu || add ? 2 : 1)) * size;
    if (gelu)
        measure(b, name + " + GELU forward", flops, forward,
                [=] { linear_gelu_forward(h, y, x, l, &b->gpu); });
    else
        measure(b, name + (add ? " + skip forward" : " forward"), flops, forward,
                [=] { linear_forward(y, x, l, skip, &b->gpu); });
    measure(b, name + " backward, input", flops, (n * in + weights + n * out) * size,
            [=] { linear_backward_input(x, y, l, {}, &b->gpu); });
    measure(b, name + " backward, weight", flops,
            (n * in + n * out) * size + weights * sizeof(wide),
            [=] { linear_backward_weight(y, x, l, &b->gpu); });
    leave_rooms(b);
}

static void time_linears(Bench *b) {
    const Shapes &s = b->s;
    bool biased = !s.swiglu;
    time_linear(b, "q k v", (s.NH + 2 * s.KV) * s.HS, s.C, biased, false, false);
    time_linear(b, "attention output", s.C, s.NH * s.HS, biased, false, true);
    time_linear(b, s.swiglu ? "gate, up" : "up", s.swiglu ? 2 * s.F : s.F, s.C, biased, !s.swiglu,
                false);
    time_linear(b, "down", s.C, s.F, biased, false, true);
    time_linear(b, "head", s.Vp, s.C, false, false, false);
    if (s.swiglu) return;
    real *dpre = room(b, b->n * s.F);
    real *pre = room(b, b->n * s.F);
    real *dy = room(b, b->n * s.C);
    real *w = room(b, (int64_t)s.C * s.F, 0.02f);
    Linear down = {w, nullptr, nullptr, nullptr, b->n, s.C, s.F, 1};
    measure(b, "down + GELU backward, input", 2.0 * (double)b->n * s.C * s.F,
            ((double)b->n * (2 * s.F + s.C) + (double)s.C * s.F) * sizeof(real),
            [=] { linear_gelu_backward_input(dpre, pre, dy, down, &b->gpu); });
    leave_rooms(b);
}

// Causal: half of the 4 T^2 HS operations of a head forward; backward counts 2.5 times that (5
// products for 2), as is usual, whatever is computed again. By wgmma too, on GPUs that have it.
static void time_heads(Bench *b, const std::string &name, int NH, int KV, int HS) {
    const Shapes &s = b->s;
    int64_t ld = (NH + 2 * KV) * HS, out = NH * HS;
    AttentionShape shape = attention_shape(s.B, s.T, NH, KV, HS, HS, 1 / sqrt((double)HS));
    double flops = 2.0 * s.B * NH * s.T * (double)s.T * HS;
    double n = (double)b->n;
    double size = sizeof(real);
    double saved = n * NH * sizeof(wide);
    double forward = n * (double)(ld + out) * size + 2 * saved;
    double backward = n * 2 * (double)(ld + out) * size + saved;
    real *qkv = room(b, b->n * ld);
    real *c = room(b, b->n * out);
    real *d = room(b, b->n * ld);
    real *dc = room(b, b->n * out);
    wide *peak = room<wide>(b, b->n * NH);
    wide *lse = room<wide>(b, b->n * NH);
    wide *D = room<wide>(b, b->n * NH);
    QkvPlaces places = qkv_row(qkv, NH, KV, HS, HS), dplaces = qkv_row(d, NH, KV, HS, HS);
    for (bool wgmma : {false, true}) {
        if (wgmma && !attend_possible(shape, ATTENTION_BACKWARD, &b->gpu)) break;
        for (int layer : {ATTENTION_FORWARD, ATTENTION_BACKWARD})
            b->gpu.plans->kinds[layer] = wgmma ? BY_WGMMA : BY_MMA;
        std::string how = name + (wgmma ? ", wgmma" : "");
        measure(b, "attention forward" + how, flops, forward,
                [=] { attend_forward(c, peak, lse, places.of, shape, &b->gpu); });
        measure(b, "attention backward" + how, 2.5 * flops, backward,
                [=] { attend_backward(dplaces.of, D, dc, c, lse, places.of, shape, &b->gpu); });
    }
    leave_rooms(b);
}

// With heads as the model has them, and half as many of twice the size.
static void time_attention(Bench *b) {
    const Shapes &s = b->s;
    time_heads(b, "", s.NH, s.KV, s.HS);
    time_heads(b, ", heads of " + std::to_string(2 * s.HS), (s.NH + 1) / 2, (s.KV + 1) / 2,
               2 * s.HS);
}

// In units of d = n C values: each array read or written is one.
static void time_norms(Bench *b) {
    const Shapes &s = b->s;
    int64_t count = b->n * s.C;
    double d = (double)count * sizeof(real);
    bool layer = !s.swiglu;
    real *y = room(b, count);
    real *skip = room(b, count);
    real *sum = room(b, count);
    real *z = room(b, count);
    real *dy = room(b, count);
    real *w = room(b, s.C);
    real *bias = layer ? room(b, s.C) : nullptr;
    wide *dw = room<wide>(b, s.C);
    wide *db = layer ? room<wide>(b, s.C) : nullptr;
    wide *mean = room<wide>(b, b->n);
    wide *rstd = room<wide>(b, b->n);
    Norm norm = {site_make(1, 1, s.C, 1, layer, 1.0), w, bias, dw, db, mean, rstd, b->n, 1e-5f};
    const Norm *at = &norm;
    measure(b, "norm forward", 0, 2 * d,
            [=] { add_norm_forward(AddNorm{nullptr, z, y, nullptr, 1, nullptr, at}, &b->gpu); });
    measure(b, "add, norm forward", 0, 4 * d,
            [=] { add_norm_forward(AddNorm{sum, z, y, skip, 1, nullptr, at}, &b->gpu); });
    measure(b, "norm backward", 0, 3 * d, [=] {
        norm_backward(at, NormBackward{z, nullptr, dy, y, nullptr, nullptr, 0, 0, 0}, &b->gpu);
    });
    measure(b, "norm, add backward", 0, 4 * d, [=] {
        norm_backward(at, NormBackward{z, nullptr, dy, y, skip, nullptr, 1, 0, 0}, &b->gpu);
    });
    measure(b, "norm, add, sum backward", 0, 6 * d,
            [=] { norm_backward(at, NormBackward{z, sum, dy, y, skip, sum, 1, 1, 1}, &b->gpu); });
    leave_rooms(b);
}

// RoPE alone turns q and k in place; with norms (HYBRID) q, k and v are read and written elsewhere,
// and backward reads both gradient and value.
static void time_qkv(Bench *b) {
    const Shapes &s = b->s;
    int64_t width = (s.NH + 2 * s.KV) * s.HS, count = b->n * width;
    real *raw = room(b, count);
    real *normed = room(b, count);
    real *draw = room(b, count);
    real *dnormed = room(b, count);
    std::vector<float2> table((size_t)s.T * (size_t)s.HS / 2);
    float2 *rotary;
    Model m = {};
    m.HS = s.HS, m.theta = 10000;
    rotary_table(table.data(), s.T, &m);
    cudaCheck(cudaMalloc((void **)&rotary, table.size() * sizeof(float2)));
    cudaCheck(cudaMemcpyAsync(rotary, table.data(), table.size() * sizeof(float2),
                              cudaMemcpyHostToDevice, b->gpu.stream));
    b->rooms.push_back(rotary);
    Norm norms[3] = {}, *parts = norms;
    QkvShape shape = {s.B, s.T, s.NH, s.KV, s.HS, s.HS, s.HS, rotary};
    QkvPlaces rows[4];
    int place = 0;
    for (real *row : {raw, normed, draw, dnormed})
        rows[place++] = qkv_row(row, s.NH, s.KV, s.HS, s.HS);
    double turned = (double)b->n * (s.NH + s.KV) * s.HS * sizeof(real);
    double all = (double)count * sizeof(real);
    if (s.swiglu) {
        measure(b, "RoPE forward", 0, 2 * turned,
                [&] { qkv_forward(qkv_parts(rows[0], {}, rows[0], parts, shape), &b->gpu); });
        measure(b, "RoPE backward", 0, 2 * turned,
                [&] {
                    qkv_backward(qkv_parts(rows[2], rows[2], rows[0], parts, shape), &b->gpu);
                });
    } else shape.rotary = nullptr;
    for (int part = 0; part < 3; part++) {
        int heads = part == 0 ? s.NH : s.KV;
        norms[part] = Norm{site_heads(1, HEAD, heads, s.HS, 0), room(b, s.HS), nullptr,
                           room<wide>(b, s.HS), nullptr, nullptr, room<wide>(b, b->n * heads), b->n,
                           1e-5f};
    }
    std::string name = s.swiglu ? "norms of q k v, RoPE" : "norms of q k v";
    measure(b, name + " forward", 0, 2 * all,
            [&] { qkv_forward(qkv_parts(rows[1], {}, rows[0], parts, shape), &b->gpu); });
    measure(b, name + " backward", 0, 3 * all,
            [&] { qkv_backward(qkv_parts(rows[2], rows[3], rows[0], parts, shape), &b->gpu); });
    leave_rooms(b);
}

static void time_activation(Bench *b) {
    const Shapes &s = b->s;
    int64_t width = s.swiglu ? 2 * s.F : s.F;
    double row = (double)b->n * s.F * sizeof(real);
    real *h = room(b, b->n * s.F);
    real *gu = room(b, b->n * width);
    real *dgu = room(b, b->n * width);
    real *dh = room(b, b->n * s.F);
    std::string name = s.swiglu ? "SwiGLU" : "GELU by itself";
    measure(b, name + " forward", 0, row * (s.swiglu ? 3 : 2),
            [=] { activation_forward(h, gu, b->n, b->s.F, b->s.swiglu, &b->gpu); });
    measure(b, name + " backward", 0, row * (s.swiglu ? 5 : 3),
            [=] { activation_backward(dgu, dh, gu, b->n, b->s.F, b->s.swiglu, &b->gpu); });
    leave_rooms(b);
}

// Tokens as in text: a few are frequent (1/rank). Backward reads the gradient once, and reads and
// writes the rows of the tokens there are.
static void time_ends(Bench *b) {
    const Shapes &s = b->s;
    std::vector<int32_t> tokens((size_t)b->n), groups((size_t)(4 * b->n));
    for (size_t i = 0; i < tokens.size(); i++)
        tokens[i] = (int32_t)fmin(s.V - 1.0, exp(log((double)s.V) * rand_uniform(1, i)) - 1);
    token_groups(groups.data(), tokens.data(), tokens.size());
    position_groups(groups.data(), nullptr, tokens.size(), s.T);
    int32_t *t = room_of_integers(b, tokens), *g = room_of_integers(b, groups);
    bool learned = !s.swiglu;
    double row = (double)s.C * sizeof(real);
    double n = (double)b->n;
    double distinct = 1 + (learned ? s.T : 0);
    for (int64_t i = b->n + 1; i < 2 * b->n; i++) distinct += groups[i] != groups[i - 1];
    real *e = room(b, b->n * s.C);
    real *wte = room(b, (int64_t)s.V * s.C);
    real *wpe = learned ? room(b, (int64_t)s.T * s.C) : nullptr;
    wide *dwte = room<wide>(b, (int64_t)s.V * s.C);
    wide *dwpe = learned ? room<wide>(b, (int64_t)s.T * s.C) : nullptr;
    measure(b, "embedding forward", 0, (n + distinct) * row,
            [=] {
                embedding_forward(e, t, wte, wpe, nullptr, b->s.B, b->s.T, b->s.C, 1, &b->gpu);
            });
    measure(b, "embedding backward", 0, n * row + 2 * distinct * s.C * sizeof(wide),
            [=] { embedding_backward(dwte, dwpe, e, g, b->s.B, b->s.T, b->s.C, 1, &b->gpu); });
    leave_rooms(b);
    real *logits = room(b, b->n * s.Vp);
    wide *losses = room<wide>(b, b->n), *logsum = room<wide>(b, b->n);
    t = room_of_integers(b, tokens);
    measure(b, "classifier, forward and backward", 0, 2 * n * s.Vp * sizeof(real), [=] {
        classifier({logits, losses, logsum, t, b->n, b->s.V, b->s.Vp, 0, {}}, true, &b->gpu);
    });
    leave_rooms(b);
}

// Moments and master weights are read and written (24 bytes a parameter), the gradient is read
// twice, for the norm and for the update (8), and the weights of the products are written
// (sizeof(real), in bfloat16).
static void time_update(Bench *b) {
    const Shapes &s = b->s;
    int64_t block =
        (int64_t)s.C * ((s.NH + 2 * s.KV) * s.HS + s.NH * s.HS + (s.swiglu ? 3 : 2) * s.F);
    int64_t total = s.L * block + (int64_t)s.Vp * s.C;
    real *w = room(b, total);
    float *master = sizeof(real) == sizeof(float) ? (float *)w : room<float>(b, total);
    float *m = room<float>(b, total, 1e-3f);
    float *v = room<float>(b, total, 0);
    float *d = room<float>(b, total, 1e-3f);
    UpdateEntry *entries, entry = {0, 0, total, 1e-6f, 0.1f, 0, 0, 0};
    UpdateState *state;
    cudaCheck(cudaMalloc((void **)&entries, sizeof entry));
    cudaCheck(cudaMemcpyAsync(entries, &entry, sizeof entry, cudaMemcpyHostToDevice,
                              b->gpu.stream));
    cudaCheck(cudaMalloc((void **)&state, sizeof *state));
    cudaCheck(cudaMemsetAsync(state, 0, sizeof *state, b->gpu.stream));
    b->rooms.push_back(entries);
    b->rooms.push_back(state);
    Arenas arenas = {w, master, m, v, d, total};
    AdamWStep step = {0.9f, 0.95f, 1e-8f, 1, 1, 1, 0, 1, 0, 0};
    measure(b, "gradient norm, AdamW", 0,
            (double)total * (32 + (sizeof(real) == sizeof(float) ? 0 : sizeof(real))), [=] {
                gradient_square(&state->sums[SUM_SQUARE], arenas, entries, 1, &b->gpu);
                adamw_apply(arenas, entries, 1, state, step, &b->gpu);
            });
    leave_rooms(b);
}

// Logits under which every expert gets as many tokens as any other: plans of the plain twin are one
// for all, and no expert's weights are read more often.
static wide *room_of_logits(Bench *b, int E, int K) {
    std::vector<float> z((size_t)(b->n * E));
    wide *device = room<wide>(b, b->n * E);
    for (int64_t i = 0; i < b->n * E; i++) z[(size_t)i] = (float)rand_normal(7, (uint64_t)i);
    for (int64_t i = 0; i < b->n * K; i++)
        z[(size_t)(i / K * E + (i / K + i % K * (E / K)) % E)] += 20;
    cudaCheck(cudaMemcpyAsync(device, z.data(), z.size() * sizeof(float), cudaMemcpyHostToDevice,
                              b->gpu.stream));
    cudaCheck(cudaStreamSynchronize(b->gpu.stream));
    return device;
}

// The three products by wgmma, where they are.
static void time_experts_sm90(Bench *b, const std::string &name, Experts s, real *x, real *y,
                              double flops, double forward, double input, double weight) {
    if constexpr (sizeof(real) == 2) {
        if (b->gpu.capability != 90) return;
        measure(b, name + " forward, wgmma", flops, forward,
                [=] { grouped_launch_sm90<FORWARD>({s, x, s.w, y}, &b->gpu); });
        measure(b, name + " backward, input, wgmma", flops, input,
                [=] { grouped_launch_sm90<INPUT>({s, y, s.w, x}, &b->gpu); });
        measure(b, name + " backward, weight, wgmma", flops, weight,
                [=] { grouped_launch_sm90<WEIGHT>({s, y, x, nullptr}, &b->gpu); });
    }
}

// The three products of all experts, x from the tokens where it is u; and expert by expert, where x
// has a row for each row. dW is float and SET.
static void time_expert_products(Bench *b, const std::string &name, Experts s) {
    int64_t rows = s.rows;
    double out = (double)s.parts * s.width;
    double flops = 2.0 * (double)rows * out * s.in;
    double size = sizeof(real);
    double weights = s.E * out * s.in;
    double x_bytes = (double)(s.source ? b->n : rows) * s.in * size;
    double y_bytes = (double)rows * out * size;
    double dx_bytes = (double)rows * s.in * size;
    std::vector<int32_t> start((size_t)s.E + 1);
    int width = s.parts * s.width;
    real *x = room(b, rows * s.in);
    real *y = room(b, rows * width);
    s.w = room(b, (int64_t)s.E * width * s.in, 0.02f);
    s.dw = room<wide>(b, (int64_t)s.E * width * s.in);
    s.to_dw = SET;
    Experts one = s;
    one.parts = 1;
    one.width = width;
    cudaCheck(cudaMemcpyAsync(start.data(), s.start, start.size() * sizeof(int32_t),
                              cudaMemcpyDeviceToHost, b->gpu.stream));
    cudaCheck(cudaStreamSynchronize(b->gpu.stream));
    const int32_t *at = start.data();
    measure(b, name + " forward", flops, x_bytes + weights * size + y_bytes,
            [=] { grouped_launch<FORWARD>({s, x, s.w, y}, &b->gpu); });
    measure(b, name + " forward, expert by expert", flops, dx_bytes + weights * size + y_bytes,
            [=] { experts_plain_forward(y, x, at, one, &b->gpu); });
    measure(b, name + " backward, input", flops, dx_bytes + weights * size + y_bytes,
            [=] { grouped_launch<INPUT>({s, y, s.w, x}, &b->gpu); });
    measure(b, name + " backward, input, expert by expert", flops,
            dx_bytes + weights * size + y_bytes,
            [=] { experts_plain_backward_input(x, y, at, one, &b->gpu); });
    measure(b, name + " backward, weight", flops, x_bytes + y_bytes + weights * sizeof(wide),
            [=] { grouped_launch<WEIGHT>({s, y, x, nullptr}, &b->gpu); });
    measure(b, name + " backward, weight, expert by expert", flops,
            dx_bytes + y_bytes + weights * sizeof(wide),
            [=] { experts_plain_backward_weight(y, x, at, one, &b->gpu); });
    time_experts_sm90(b, name, s, x, y, flops, x_bytes + weights * size + y_bytes,
                      dx_bytes + weights * size + y_bytes,
                      x_bytes + y_bytes + weights * sizeof(wide));
}

static void time_experts(Bench *b) {
    const ExpertShapes &shapes = b->tiny ? EXPERTS_TINY : EXPERTS_LARGE;
    const Shapes &s = b->s = shapes.s;
    int E = shapes.E, K = shapes.K;
    int64_t n = b->n = (int64_t)s.B * s.T, rows = n * K;
    double row = (double)s.C * sizeof(real), tokens = (double)n;
    Router r = {};
    r.B = s.B, r.T = s.T, r.E = E, r.K = K;
    r.scale = 1, r.balance = 0.01f, r.z_loss = 0.001f;
    b->gpu.scratch_size = router_scratch(s.B, s.T, E);
    cudaCheck(cudaMalloc((void **)&b->gpu.scratch, b->gpu.scratch_size * sizeof(float)));
    wide *dgate = room<wide>(b, rows);
    auto integers = [=](int64_t count) {
        return room_of_integers(b, std::vector<int32_t>((size_t)count));
    };
    r.z = room_of_logits(b, E, K);
    r.gate = room<wide>(b, rows);
    r.lse = room<wide>(b, n);
    r.entropy = room<wide>(b, n);
    r.load = room<wide>(b, (int64_t)(s.B + 1) * E);
    r.share = room<wide>(b, (int64_t)s.B * E);
    r.choice = integers(rows);
    r.place = integers(rows);
    r.start = integers(E + 1);
    r.source = integers(rows);
    r.tiles = integers(2 * row_tiles(rows, E));
    real *u = room(b, n * s.C), *w = room(b, (int64_t)E * s.C, 0.02f), *dz = room(b, n * E);
    wide *logits = room<wide>(b, n * E);
    Linear from_u = {w, nullptr, nullptr, nullptr, n, E, s.C, 1};
    size_t common = b->rooms.size();
    measure(b, "router's logits", 2 * tokens * s.C * E, tokens * (row + E * sizeof(wide)) + E * row,
            [=] { linear_forward_wide(logits, u, from_u, &b->gpu); });
    measure(b, "router, rows forward", 0, tokens * (E * 4 + K * 20 + 8),
            [=] { router_forward(r, &b->gpu); });
    double *sums = (double *)room<float>(b, 2 * (1 + ROUTER_SUMS + E));
    wide *loads = room<wide>(b, E);
    measure(b, "router's losses", 0, tokens * 8,
            [=] { router_count(sums, loads, nullptr, r, &b->gpu); });
    measure(b, "router backward", 0, tokens * (E * (4 + sizeof(real)) + K * 12 + 4),
            [=] { router_backward(dz, dgate, r, 1, &b->gpu); });
    {
        real *y = room(b, n * s.C), *x = room(b, rows * s.C), *dx = room(b, rows * s.C);
        measure(b, "combine + skip forward", 0, tokens * (K + 2) * row,
                [=] { combine(y, x, r, {u, 1}, b->s.C, &b->gpu); });
        measure(b, "combine backward", 0, tokens * (2 * K + 1) * row,
                [=] { combine_backward(dx, dgate, y, x, r, b->s.C, &b->gpu); });
        Router ungated = r;
        ungated.gate = nullptr;
        measure(b, "gradient of what experts read", 0, tokens * (K + 1) * row,
                [=] { combine(y, x, ungated, {}, b->s.C, &b->gpu); });
    }
    for (bool up : {true, false}) {
        cudaCheck(cudaDeviceSynchronize());
        for (; b->rooms.size() > common; b->rooms.pop_back()) cudaCheck(cudaFree(b->rooms.back()));
        Experts experts = {nullptr, nullptr, E, 1, s.C, s.F, 1, rows, r.start, r.tiles, nullptr};
        if (up) experts.parts = 2, experts.width = s.F, experts.in = s.C, experts.source = r.source;
        time_expert_products(b, up ? "gate, up of experts" : "down of experts", experts);
    }
    leave_rooms(b);
    cudaCheck(cudaFree(b->gpu.scratch));
}

// `once`: not a layer of the two models, so it has shapes of its own.
static const struct {
    const char *name;
    void (*time)(Bench *);
    bool once;
} SECTIONS[] = {{"ceilings", time_ceilings, true}, {"linears", time_linears, false},
                {"attention", time_attention, false}, {"norms", time_norms, false},
                {"qkv", time_qkv, false}, {"activation", time_activation, false},
                {"ends", time_ends, false}, {"update", time_update, false},
                {"experts", time_experts, true}};

int main(int argc, char **argv) {
    Bench bench = {}, *b = &bench;
    cudaDeviceProp device;
    b->tiny = argc > 1 && !strcmp(argv[1], "tiny");
    const char *only = argc > 1 + b->tiny ? argv[1 + b->tiny] : nullptr;
    bool known = !only;
    for (const auto &section : SECTIONS) known |= only && !strcmp(only, section.name);
    CHECK(known && argc <= 2 + b->tiny,
          "expected one section of ceilings, linears, attention, norms, qkv, activation, ends, "
          "update and experts, found %s\n  -> kernels [tiny] [SECTION]",
          argv[argc - 1]);
    gpu_open(&b->gpu, 0);
    cudaCheck(cudaGetDeviceProperties(&device, 0));
    b->gpu.plans = plans_create(false);
    b->gpu.plans->tuning = true;
    printf("{\"gpu\": \"%s\", \"sms\": %d, \"memory\": %zu, \"bytes_of_real\": %zu}\n", device.name,
           device.multiProcessorCount, device.totalGlobalMem, sizeof(real));
    for (const Shapes &s : b->tiny ? TINY : LARGE) {
        b->gpu.scratch_size = (size_t)512 * (size_t)std::max(2 * s.F, 4 * s.C);
        cudaCheck(cudaMalloc((void **)&b->gpu.scratch, b->gpu.scratch_size * sizeof(float)));
        for (const auto &section : SECTIONS) {
            if (section.once || (only && strcmp(only, section.name))) continue;
            b->s = s;
            b->n = (int64_t)s.B * s.T;
            section.time(b);
        }
        cudaCheck(cudaFree(b->gpu.scratch));
    }
    for (const auto &section : SECTIONS)
        if (section.once && (!only || !strcmp(only, section.name))) section.time(b);
    plans_destroy(b->gpu.plans);
    gpu_close(&b->gpu);
    return 0;
}
