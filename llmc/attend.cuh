// attend.cuh: attention by the kernels that the run has chosen: those of attention.cuh (mma.sync),
// or on compute capability 9.0 those of attention_sm90.cuh (wgmma), forward and backward apart.
//
//   attend_forward, attend_backward    the layer, with the kernels of gpu->plans
//   attend_choose                      compares both kinds on this GPU when training begins, and
//                                      chooses
//
// The kernels by wgmma have been checked in an emulator and as PTX, and not by every user's GPU,
// driver and toolkit. So each start compares all of their results with those of mma.sync, at the
// run's own sizes, on random numbers. Kernels that differ are not used, and a line says so.
#pragma once
#include "attention_sm90.cuh"
#include "linear.cuh"
#include "run/trainer.h"

static inline bool attend_by_wgmma(const Gpu *gpu, int layer) {
    return gpu->plans && gpu->plans->kinds[layer] == BY_WGMMA;
}

static inline void attend_forward(real *c, wide *peak, wide *lse, const Heads qkv[3],
                                  AttentionShape s, Gpu *gpu) {
    if constexpr (sizeof(real) == 2)
        if (attend_by_wgmma(gpu, ATTENTION_FORWARD) &&
            attention_forward_sm90(c, peak, lse, qkv, s, gpu))
            return;
    attention_forward(c, peak, lse, qkv, s, gpu);
}

static inline void attend_backward(const Heads d[3], wide *D, real *dc, const real *c,
                                   const wide *lse, const Heads qkv[3], AttentionShape s,
                                   Gpu *gpu) {
    if constexpr (sizeof(real) == 2)
        if (attend_by_wgmma(gpu, ATTENTION_BACKWARD) &&
            attention_backward_sm90<real>(d, D, dc, c, lse, qkv, s, gpu))
            return;
    attention_backward(d, D, dc, c, lse, qkv, s, gpu);
}

// ------------------------------------------------------------------------------------- the choice

enum { COMPARE_BLOCKS = 256, COMPARE_THREADS = 256 };
// Two kernels round the same sums at different places: their results may be so far apart, as a
// normalized mean squared error, and in one value, relative to it plus the root mean square.
#define SAME_ERROR 1e-4
#define SAME_VALUE 0.1f

// Numbers from -2 to 2, by a hash of their place (Steele, Lea, Flood 2014).
static __global__ void fill_kernel(real *x, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = (uint64_t)(i + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        x[i] = to_real((float)(z >> 40) * 0x1p-22f - 2);
    }
}

// Documents of more than a third of T tokens, whose borders lie inside tiles.
static __global__ void fill_documents_kernel(int32_t *begins, int32_t *ends, int n, int T) {
    int bt = blockIdx.x * blockDim.x + threadIdx.x, size = T * 3 / 8 + 1;
    if (bt >= n) return;
    begins[bt] = bt % T / size * size;
    ends[bt] = min(begins[bt] + size, T);
}

// Of each block: sum (x - y)^2, sum y^2, and how many values are too far apart.
template <typename T>
__global__ void compare_kernel(Four *sums, const T *x, const T *y, int64_t n, float size) {
    float apart = 0, square = 0, far = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        float a = to_float(x[i]), b = to_float(y[i]);
        apart += (a - b) * (a - b);
        square += b * b;
        far += !(fabsf(a - b) <= SAME_VALUE * (fabsf(b) + size));  // NaN is far from anything
    }
    Four sum = {{block_sum(apart), block_sum(square), block_sum(far), 0}};
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <typename T>
static Four compare_sums(const T *x, const T *y, int64_t n, float size, Gpu *gpu) {
    Four *sums = scratch_for<Four>(COMPARE_BLOCKS, gpu), host[COMPARE_BLOCKS], all = {};
    LAUNCH(compare_kernel<T>, COMPARE_BLOCKS, COMPARE_THREADS, 0, gpu->stream, sums, x, y, n, size);
    cudaCheck(cudaStreamSynchronize(gpu->stream));
    cudaCheck(cudaMemcpy(host, sums, sizeof host, cudaMemcpyDeviceToHost));
    for (const Four &block : host) for (int i = 0; i < 3; i++) all.v[i] += block.v[i];
    return all;
}

// Whether x is y, but for rounding; *error grows to their normalized mean squared error.
template <typename T>
static bool compare(const T *x, const T *y, int64_t n, double *error, Gpu *gpu) {
    Four sums = compare_sums(x, y, n, 0, gpu);
    double apart = sums.v[0] / sums.v[1], size = sqrt((double)sums.v[1] / n);
    if (!(apart <= *error)) *error = apart;
    return apart <= SAME_ERROR && compare_sums(x, y, n, (float)size, gpu).v[2] == 0;
}

// The arrays of a comparison. x: rows of q, k and v. c, d, lse and peak: what each kind computes.
struct Trial {
    AttentionShape s;
    int64_t n, width;
    real *x, *dc, *c[2], *d[2];
    wide *lse[2], *peak[2], *D;
};

// In an arena that nobody uses yet; as many sequences as fit. s.B is 0 if not even one does.
static inline Trial trial_make(AttentionShape s, real *arena, int64_t count) {
    Trial t = {};
    t.s = s;
    int64_t per_float = sizeof(wide) / sizeof(real);
    t.width = (int64_t)(s.NH + s.KV) * s.QK + (int64_t)s.KV * s.HS;
    int64_t row = 3 * t.width + 3 * s.NH * s.HS + 5 * s.NH * per_float;
    t.s.B = (int)min((int64_t)s.B, count / (s.T * row + 32 * PACK));
    t.n = (int64_t)t.s.B * s.T;
    auto take = [&](int64_t elements) {
        real *at = arena;
        arena += CEIL_DIV(elements, PACK) * PACK;
        return at;
    };
    t.x = take(t.n * t.width), t.dc = take(t.n * s.NH * s.HS);
    for (int kind = 0; kind < 2; kind++) {
        t.c[kind] = take(t.n * s.NH * s.HS), t.d[kind] = take(t.n * t.width);
        t.lse[kind] = (wide *)take(t.n * s.NH * per_float);
        t.peak[kind] = (wide *)take(t.n * s.NH * per_float);
    }
    t.D = (wide *)take(t.n * s.NH * per_float);
    return t;
}

// Runs a layer by one kind of kernels. Backward reads what forward by mma.sync has saved.
static inline void trial_run(const Trial &t, int layer, int kind, Gpu *gpu) {
    Heads qkv[3], d[3];
    int64_t at = 0;
    for (int part = 0; part < 3; part++) {
        int size = part < 2 ? t.s.QK : t.s.HS, heads = part ? t.s.KV : t.s.NH;
        qkv[part] = {t.x + at, (int)t.width, size}, d[part] = {t.d[kind] + at, (int)t.width, size};
        at += heads * size;
    }
    uint8_t *used = &gpu->plans->kinds[layer], before = *used;
    *used = kind ? BY_WGMMA : BY_MMA;
    if (layer == ATTENTION_BACKWARD)
        attend_backward(d, t.D, t.dc, t.c[0], t.lse[0], qkv, t.s, gpu);
    else attend_forward(t.c[kind], t.peak[kind], t.lse[kind], qkv, t.s, gpu);
    *used = before;
}

// Whether both kinds compute the same. All results begin as NaN, so that none may be left out.
static inline bool trial_agrees(const Trial &t, int layer, double *error, Gpu *gpu) {
    int64_t rows = t.n * t.s.NH, results = (real *)t.D - t.c[0];
    cudaCheck(cudaMemsetAsync(t.c[0], 0xff, results * sizeof(real), gpu->stream));
    if (layer == ATTENTION_BACKWARD) trial_run(t, ATTENTION_FORWARD, 0, gpu);
    for (int kind = 0; kind < 2; kind++) trial_run(t, layer, kind, gpu);
    if (layer == ATTENTION_BACKWARD) return compare(t.d[1], t.d[0], t.n * t.width, error, gpu);
    return compare(t.c[1], t.c[0], rows * t.s.HS, error, gpu) &&
           compare(t.lse[1], t.lse[0], rows, error, gpu) &&
           compare(t.peak[1], t.peak[0], rows, error, gpu);
}

static inline float trial_time(const Trial &t, int layer, int kind, Gpu *gpu) {
    return fastest(gpu, [&] { return trial_run(t, layer, kind, gpu), true; });
}

// The kind of one layer, by --kernels. With `auto` the run's earlier choice stays, or, while
// tuning, the faster kind is taken.
static inline int kind_choose(const Trial &t, int layer, int wanted, Gpu *gpu) {
    int before = gpu->plans->kinds[layer];
    const char *name = TWO_KINDS[layer];
    double error = 0;
    if (wanted == KERNELS_AUTO && before != BY_WGMMA && !(before == UNCHOSEN && gpu->plans->tuning))
        return BY_MMA;
    if (!trial_agrees(t, layer, &error, gpu)) {
        printf("note: %s by wgmma is wrong on this GPU, a normalized mean squared error of %.2g "
               "from mma.sync, which is used\n  -> please report it with the GPU's name and driver "
               "(nvidia-smi)\n", name, error);
        return BY_MMA;
    }
    if (wanted == KERNELS_WGMMA || before == BY_WGMMA) return BY_WGMMA;
    float mma = trial_time(t, layer, 0, gpu), wgmma = trial_time(t, layer, 1, gpu);
    printf("kernels: %s by %s: wgmma takes %.3f ms, mma.sync %.3f\n", name,
           wgmma < mma ? "wgmma" : "mma.sync", wgmma, mma);
    return wgmma < mma ? BY_WGMMA : BY_MMA;
}

// Whether a layer has kernels by wgmma on this GPU.
static inline bool kind_possible(AttentionShape s, int layer, const Gpu *gpu) {
    auto nothing = [](auto) {};
    if (sizeof(real) != 2 || gpu->capability != 90) return false;
    if (layer == ATTENTION_FORWARD) return forward_launch_sm90(s.QK, s.HS, nothing);
    return backward_launch_sm90(s.QK, s.HS, nothing);
}

// Chooses the kernels of attention. s: the run's sizes. arena, and s.begins and s.ends: memory that
// nobody uses yet.
static inline void attend_choose(AttentionShape s, int wanted, real *arena, int64_t count,
                                 Gpu *gpu) {
    Trial t = trial_make(s, arena, count);
    CHECK(wanted != KERNELS_WGMMA || kind_possible(s, ATTENTION_FORWARD, gpu),
          "--kernels wgmma needs PREC=bf16, compute capability 9.0 and heads of 64, 96 or 128, "
          "found %s, %d.%d and %d\n  -> --kernels auto", sizeof(real) == 2 ? "bf16" : "fp32",
          gpu->capability / 10, gpu->capability % 10, s.HS);
    if (t.s.B) {
        int64_t rows = t.n * s.NH * s.HS;
        LAUNCH(fill_kernel, COMPARE_BLOCKS, COMPARE_THREADS, 0, gpu->stream, t.x, t.n * t.width);
        LAUNCH(fill_kernel, COMPARE_BLOCKS, COMPARE_THREADS, 0, gpu->stream, t.dc, rows);
        if (s.begins)
            LAUNCH(fill_documents_kernel, CEIL_DIV(t.n, COMPARE_THREADS), COMPARE_THREADS, 0,
                   gpu->stream, const_cast<int32_t *>(s.begins), const_cast<int32_t *>(s.ends),
                   (int)t.n, s.T);
    }
    for (int layer = 0; layer < LAYERS_OF_TWO_KINDS; layer++) {
        bool possible = t.s.B && wanted != KERNELS_MMA && kind_possible(s, layer, gpu);
        int kind = possible ? kind_choose(t, layer, wanted, gpu) : BY_MMA;
        gpu->plans->kinds[layer] = (uint8_t)kind;
    }
}
