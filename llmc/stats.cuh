// stats.cuh: the statistics of --norms-every (run/trainer.h, LayerStats and TensorStats): sums over
// the activations of one layer after its forward, and over each parameter tensor after its update.
//
//   layer    with s = a skip + yn (modes.h): sums of x^2, the residual stream out of the block, and
//            for each sublayer of yn^2 = (s - a skip)^2 and of (a skip)^2; the largest of
//            attention's peaks. nGPT: sums of (alpha yn)^2 and ((1 - alpha) skip)^2, yn = y / |y|.
//   tensor   sums of d^2, before^2 and step^2: the gradient, the weights before the step, and what
//            the step subtracted from them. The step is recomputed from the moments:
//              A      = c1 m / (sqrt(c2 v) + eps)
//              before = (w + lr (A - decay target)) / (1 - lr decay)
//              step   = lr (A + decay (before - target))
//            Muon: A = scale x, which muon.cuh recomputes.
//            nGPT has normalized its matrices since: w, of equal length, stands in for before.
//
// Values are float; squares and sums are double, which no square of a float overflows. A result
// takes two kernels: a fixed grid leaves partial sums in scratch, and one block adds them in order.
// Bytes, 16 a thread and load, and the computed floor (gpu.cuh):
//   layer_sums    n C of each tensor that takes part (a second read comes from the cache): 3 for
//                 PRE (x0, mid, x), 4 for SPAN, 5 for POST, and n NH floats
//                 GPT-2 in bf16, n = 65536: 0.071, 0.094, 0.118 ms a layer
//   tensor_sums   16 a parameter (w, d, m, v)         124 M parameters: 0.46 ms; launches, two a
//                 tensor, cost about as much again
#pragma once
#include "adamw.cuh"
#include "run/trainer.h"

// The results of a layer's forward. In a pair, attention's comes first and the ffn's second.
struct LayerTensors {
    const real *s[2];          // two of [n, C]: the sum s; nGPT: the branch y
    const real *skip[2];       // two of [n, C]: what the skip carries, without its factor
    const real *x;             // [n, C] the stream out of the block
    const wide *peak;          // [n, NH] attention's largest scores
    float a[2];                // factors of the skips
    int64_t size;              // n C, a multiple of 8
    int64_t peaks;             // n NH
    const wide *rstd[2];       // nGPT, two of [n]: of y, saved by forward
    const real *p[2];          // nGPT, two of [C]: alpha = 0.05 sqrt(C) |p|; otherwise nullptr
    int C;
};

enum { LAYER_PIECES = 1024, TENSOR_PIECES = 128 };

// ------------------------------------------------------------------------------------------- sums

// The larger of two values, and the largest of a block, or NaN if there is one. fmaxf and block_max
// ignore NaN, a sum does not.
__device__ inline float max_or_nan(float x, float y) { return x > y || x != x ? x : y; }
__device__ inline float block_max_or_nan(float x) {
    return block_max(x) + block_sum(x == x ? 0.0f : x);
}

// ---------------------------------------------------------------------------------------- a layer

// *to = the sums over the threads of a block.
__device__ inline void layer_store(LayerSums *to, LayerSums seen) {
    UNROLL for (int k = 0; k < LAYER_SQUARES; k++) seen.squares[k] = block_sum(seen.squares[k]);
    seen.logit = block_max_or_nan(seen.logit);
    if (threadIdx.x == 0) *to = seen;
}

// The two parts of value i of a sublayer's sum: x is the skip's, y is the branch's.
template <bool INTERPOLATED>
__device__ inline float2 sum_parts(const LayerTensors &t, int sub, int64_t i, float s,
                                   float skip) {
    if constexpr (INTERPOLATED) {
        float alpha = alpha_slope(t.C) * fabsf(to_float(t.p[sub][i % t.C]));
        return {(1 - alpha) * skip, alpha * s * t.rstd[sub][i / t.C] * rsqrtf((float)t.C)};
    }
    float skipped = t.a[sub] * skip;
    return {skipped, s - skipped};
}

template <bool INTERPOLATED>
static __global__ void __launch_bounds__(SQUARES_THREADS, 2)
layer_sums_kernel(LayerSums *partial, LayerTensors t) {
    LayerSums seen = {{}, -INFINITY};
    int64_t first = grid_thread(), step = grid_threads();
    for (int64_t i = first * PACK; i < t.size; i += step * PACK) {
        Floats x = floats_load(t.x + i), s[2], skip[2];
        UNROLL for (int sub = 0; sub < 2; sub++) {
            s[sub] = floats_load(t.s[sub] + i);
            skip[sub] = floats_load(t.skip[sub] + i);
        }
        for (int k = 0; k < PACK; k++) seen.squares[STREAM] += square(x.v[k]);
        UNROLL for (int sub = 0; sub < 2; sub++)
            for (int k = 0; k < PACK; k++) {
                float s_k = s[sub].v[k], skip_k = skip[sub].v[k];
                float2 parts = sum_parts<INTERPOLATED>(t, sub, i + k, s_k, skip_k);
                seen.squares[ATTN_BRANCH + 2 * sub] += square(parts.y);
                seen.squares[ATTN_SKIP + 2 * sub] += square(parts.x);
            }
    }
    for (int64_t i = first; i < t.peaks; i += step) seen.logit = max_or_nan(seen.logit, t.peak[i]);
    layer_store(partial + blockIdx.x, seen);
}

static __global__ void __launch_bounds__(SQUARES_THREADS)
layer_add_kernel(LayerSums *sums, const LayerSums *partial, int pieces) {
    LayerSums seen = {{}, -INFINITY};
    if (threadIdx.x == 0) seen = *sums;
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
        UNROLL for (int k = 0; k < LAYER_SQUARES; k++) seen.squares[k] += partial[i].squares[k];
        seen.logit = max_or_nan(seen.logit, partial[i].logit);
    }
    layer_store(sums, seen);
}

// Adds one forward of a layer to *sums, on the device. The grid, and with it the order, depends on
// the size alone.
static inline void layer_sums(LayerSums *sums, const LayerTensors &t, Gpu *gpu) {
    int pieces = square_pieces(t.size, PACK, LAYER_PIECES);
    LayerSums *partial = scratch_for<LayerSums>(pieces, gpu);
    LAUNCH(t.p[0] ? layer_sums_kernel<true> : layer_sums_kernel<false>, pieces, SQUARES_THREADS, 0,
           gpu->stream, partial, t);
    LAUNCH(layer_add_kernel, 1, SQUARES_THREADS, 0, gpu->stream, sums, partial, pieces);
}

// ---------------------------------------------------------------------------------------- tensors

// The sums over the threads of a block.
__device__ inline TensorStats tensor_block_sum(TensorStats x) {
    return {block_sum(x.grad), block_sum(x.weight), block_sum(x.update)};
}

// entry: on the device. A short tensor leaves most of its pieces nothing to add up.
static __global__ void __launch_bounds__(SQUARES_THREADS)
tensor_sums_kernel(TensorStats *partial, Arenas t, const UpdateEntry *entry, AdamWStep s,
                   const real *x) {
    UpdateEntry e = *entry;
    TensorStats seen = {};
    const float *master = master_of(t, e), *d_own = t.d + e.offset;
    const float *m_own = t.m + e.state, *v_own = t.v + e.state - e.skipped;
    int64_t first = (int64_t)blockIdx.x * blockDim.x * FOUR;
    for (int64_t i = grid_thread() * FOUR; i < e.size; i += grid_threads() * FOUR) {
        Four w = four_load(master + i), m = four_load(m_own + i);
        Four v = x ? Four{} : four_load(v_own + i), d = four_load(d_own + i);
        Four direction = x ? reals_load(x + i) : Four{};
        for (int k = 0; k < FOUR; k++) {
            if (i + k >= e.size) break;
            float A = m.v[k] * s.correct1 / (sqrtf(v.v[k] * s.correct2) + s.eps);
            // A step that was not taken has the rate 0, and its x may not be finite.
            if (x) A = e.lr > 0 ? e.scale * direction.v[k] : 0;
            float before = (w.v[k] + e.lr * (A - e.decay * e.target)) / (1 - e.lr * e.decay);
            if (e.line) before = w.v[k];
            seen.grad += square(d.v[k]);
            seen.weight += square(before);
            seen.update += square(e.lr * (A + e.decay * (before - e.target)));
        }
    }
    if (first < e.size) seen = tensor_block_sum(seen);
    if (threadIdx.x == 0) partial[blockIdx.x] = seen;
}

// A thread takes a piece.
static __global__ void __launch_bounds__(TENSOR_PIECES)
tensor_add_kernel(TensorStats *sums, const TensorStats *partial, int pieces) {
    TensorStats seen = {};
    if ((int)threadIdx.x < pieces) seen = partial[threadIdx.x];
    seen = tensor_block_sum(seen);
    if (threadIdx.x == 0) *sums = seen;
}

// SETs *sums, on the device, for an entry of arenas that adamw_apply has just updated with `step`;
// an entry whose lr is 0 did not move. x: the direction of an entry that Muon has updated, else
// nullptr. All entries have the same number of pieces.
static inline void tensor_sums(TensorStats *sums, Arenas t, const UpdateEntry *entry,
                               AdamWStep step, Gpu *gpu, const real *x) {
    int pieces = square_pieces(t.total, FOUR, TENSOR_PIECES);
    TensorStats *partial = scratch_for<TensorStats>(pieces, gpu);
    LAUNCH(tensor_sums_kernel, pieces, SQUARES_THREADS, 0, gpu->stream, partial, t, entry, step, x);
    LAUNCH(tensor_add_kernel, 1, TENSOR_PIECES, 0, gpu->stream, sums, partial, pieces);
}
