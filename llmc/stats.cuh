// stats.cuh: what --norms-every shows (judge.h): sums over the activations of one layer, after its forward, and over every parameter tensor, after its update.
//
//   layer     s = a skip + y (modes.h):   sums of x^2, the stream out of the block, and for each sublayer of y^2 = (s - a skip)^2 and of (a skip)^2;
//             the largest of attention's peaks.  nGPT (unit.cuh): of (alpha t)^2 and of ((1 - alpha) skip)^2
//   tensor    sums of d^2, before^2 and step^2: the gradient, the weights before the step, and what it subtracted. The step is computed again from the moments:
//             A = c1 m / (sqrt(c2 v) + eps)     before = (w + lr (A - decay target)) / (1 - lr decay)     step = lr (A + decay (before - target))
//             of nGPT's matrices, which were normalized since, w stands for before: it had the same length
//
// Values are float; squares and sums are double, as no float overflows them. Two kernels each: a fixed grid leaves partial sums in gpu->scratch, and one block a
// result adds them in order. Bytes, 16 a thread and load, and the computed floor at 4.3 TB/s:
//   layer_sums     n C of each tensor that takes part (one that is read in two places comes from the cache the second time): 3 for PRE (x0, mid, x),
//                  4 for SPAN, 5 for POST, and n NH floats        GPT-2 in bf16, n = 65536: 0.071, 0.094, 0.118 ms a layer
//   tensor_sums    16 a parameter (w, d, m, v)                    124 M parameters: 0.46 ms
#pragma once
#include "adamw.cuh"

// What a forward has left of a layer, of size values each: of attention (0) and ffn (1) the sum s and its skip, and x; rows peaks. size: a multiple of 8.
// nGPT: y in the place of s, C values a row, of which forward kept rstd, and p of C values.
typedef struct LayerTensors { const real *s[2], *skip[2], *x; const wide *peak; float a[2]; int64_t size, rows; const wide *rstd[2]; const real *p[2]; int C; } LayerTensors;

enum { STREAM, ATTN_BRANCH, ATTN_SKIP, FFN_BRANCH, FFN_SKIP, LAYER_SQUARES };
enum { TENSOR_GRAD, TENSOR_WEIGHT, TENSOR_STEP, TENSOR_SQUARES };
typedef struct LayerSums { double squares[LAYER_SQUARES]; float logit; } LayerSums;            // begin at 0 and -INFINITY
typedef struct TensorSums { double squares[TENSOR_SQUARES]; } TensorSums;

enum { STATS_THREADS = 256, LAYER_PIECES = 1024, TENSOR_PIECES = 128 };

// ------------------------------------------------------------------------------------------------------------------ sums

static __device__ inline double square(float x) { return (double)x * x; }

template <int N> static __device__ inline void block_sums(double (&x)[N]) { UNROLL for (int k = 0; k < N; k++) x[k] = block_sum(x[k]); }

// The larger of two, and of a block. NaN stays: fmaxf and block_max pass over it, a sum does not.
static __device__ inline float larger(float x, float y) { return x > y || x != x ? x : y; }
static __device__ inline float block_larger(float x) { return block_max(x) + block_sum(x == x ? 0.0f : x); }

// ------------------------------------------------------------------------------------------------------------------ a layer

// All that the threads of a block have seen, to *to.
static __device__ inline void layer_store(LayerSums *to, LayerSums seen) {
    block_sums(seen.squares);
    seen.logit = block_larger(seen.logit);
    if (threadIdx.x == 0) *to = seen;
}

// Of value i of a sublayer: the skip's part of the sum, and the branch's.
template <bool INTERPOLATED> static __device__ inline float2 sum_parts(const LayerTensors &t, int sub, int64_t i, float s, float skip) {
    if constexpr (INTERPOLATED) {
        float alpha = alpha_slope(t.C) * fabsf(to_float(t.p[sub][i % t.C]));
        return {(1 - alpha) * skip, alpha * s * t.rstd[sub][i / t.C] * rsqrtf((float)t.C)};
    }
    float skipped = t.a[sub] * skip;
    return {skipped, s - skipped};
}

template <bool INTERPOLATED> static __global__ void __launch_bounds__(STATS_THREADS, 2) layer_sums_kernel(LayerSums *partial, LayerTensors t) {
    LayerSums seen = {{}, -INFINITY};
    int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first * PACK; i < t.size; i += step * PACK) {
        Pack x = pack_load(t.x + i), s[2], skip[2];
        UNROLL for (int sub = 0; sub < 2; sub++) s[sub] = pack_load(t.s[sub] + i), skip[sub] = pack_load(t.skip[sub] + i);
        for (int k = 0; k < PACK; k++) seen.squares[STREAM] += square(to_float(x.v[k]));
        UNROLL for (int sub = 0; sub < 2; sub++)
            for (int k = 0; k < PACK; k++) {
                float2 parts = sum_parts<INTERPOLATED>(t, sub, i + k, to_float(s[sub].v[k]), to_float(skip[sub].v[k]));
                seen.squares[ATTN_BRANCH + 2 * sub] += square(parts.y);
                seen.squares[ATTN_SKIP + 2 * sub] += square(parts.x);
            }
    }
    for (int64_t i = first; i < t.rows; i += step) seen.logit = larger(seen.logit, t.peak[i]);
    layer_store(partial + blockIdx.x, seen);
}

static __global__ void __launch_bounds__(STATS_THREADS) layer_add_kernel(LayerSums *sums, const LayerSums *partial, int pieces) {
    LayerSums seen = {{}, -INFINITY};
    if (threadIdx.x == 0) seen = *sums;
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
        UNROLL for (int k = 0; k < LAYER_SQUARES; k++) seen.squares[k] += partial[i].squares[k];
        seen.logit = larger(seen.logit, partial[i].logit);
    }
    layer_store(sums, seen);
}

// *sums, on the device, takes in what one forward has left of a layer. The grid, and with it the order, depends on the size alone.
static inline void layer_sums(LayerSums *sums, const LayerTensors &t, Gpu *gpu) {
    int64_t rounds = CEIL_DIV(t.size, (int64_t)STATS_THREADS * PACK * 4);                      // at least four loads of each tensor for a thread
    int pieces = rounds < LAYER_PIECES ? (int)rounds : LAYER_PIECES;
    LayerSums *partial = (LayerSums *)gpu->scratch;
    CHECK(gpu->scratch_size * sizeof(float) >= pieces * sizeof *partial, "expected room for the partial sums of %d blocks, found %zu floats\n"
          "  -> a bug: report it with the command line", pieces, gpu->scratch_size);
    LAUNCH(t.p[0] ? layer_sums_kernel<true> : layer_sums_kernel<false>, pieces, STATS_THREADS, 0, gpu->stream, partial, t);
    LAUNCH(layer_add_kernel, 1, STATS_THREADS, 0, gpu->stream, sums, partial, pieces);
}

// ------------------------------------------------------------------------------------------------------------------ tensors

// Block (piece, entry). A short tensor leaves most of its pieces nothing to add up.
static __global__ void __launch_bounds__(STATS_THREADS) tensor_sums_kernel(TensorSums *partial, Arenas t, const UpdateEntry *entries, AdamWStep s) {
    UpdateEntry e = entries[blockIdx.y];
    TensorSums seen = {};
    const float *master = master_of(t, e), *m_own = t.m + e.state, *v_own = t.v + e.state, *d_own = t.d + e.offset;
    int64_t first = (int64_t)blockIdx.x * blockDim.x * FOUR, step = (int64_t)gridDim.x * blockDim.x * FOUR;
    for (int64_t i = first + threadIdx.x * FOUR; i < e.size; i += step) {
        Four w = four_load(master + i), m = four_load(m_own + i), v = four_load(v_own + i), d = four_load(d_own + i);
        for (int k = 0; k < FOUR; k++) {
            if (i + k >= e.size) break;
            float adam = m.v[k] * s.correct1 / (sqrtf(v.v[k] * s.correct2) + s.eps), before = (w.v[k] + e.lr * (adam - e.decay * e.target)) / (1 - e.lr * e.decay);
            if (e.line) before = w.v[k];
            seen.squares[TENSOR_GRAD] += square(d.v[k]);
            seen.squares[TENSOR_WEIGHT] += square(before);
            seen.squares[TENSOR_STEP] += square(e.lr * (adam + e.decay * (before - e.target)));
        }
    }
    if (first < e.size) block_sums(seen.squares);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = seen;
}

// Block: an entry. A thread for each piece.
static __global__ void __launch_bounds__(TENSOR_PIECES) tensor_add_kernel(TensorSums *sums, const TensorSums *partial, int pieces) {
    TensorSums seen = {};
    if ((int)threadIdx.x < pieces) seen = partial[blockIdx.x * pieces + threadIdx.x];
    block_sums(seen.squares);
    if (threadIdx.x == 0) sums[blockIdx.x] = seen;
}

// sums[count], on the device, of the entries and arenas that adamw_update has just worked on with `step`; entries whose lr is 0 were not moved. All of them
// in one launch where scratch has room for their partial sums.
static inline void tensor_sums(TensorSums *sums, Arenas t, const UpdateEntry *entries, int count, AdamWStep step, Gpu *gpu) {
    int64_t rounds = CEIL_DIV(t.total, (int64_t)STATS_THREADS * FOUR * 4);                     // what would be four loads for a thread, were all one tensor
    int pieces = rounds < TENSOR_PIECES ? (int)rounds : TENSOR_PIECES;
    TensorSums *partial = (TensorSums *)gpu->scratch;
    int room = (int)(gpu->scratch_size * sizeof(float) / (pieces * sizeof *partial));
    CHECK(room > 0, "expected room for the partial sums of %d blocks, found %zu floats\n  -> a bug: report it with the command line", pieces, gpu->scratch_size);
    for (int first = 0; first < count; first += room) {
        int some = count - first < room ? count - first : room;
        LAUNCH(tensor_sums_kernel, dim3(pieces, some), STATS_THREADS, 0, gpu->stream, partial, t, entries + first, step);
        LAUNCH(tensor_add_kernel, some, TENSOR_PIECES, 0, gpu->stream, sums + first, partial, pieces);
    }
}
