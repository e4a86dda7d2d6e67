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
// Values are float; squares and sums are double, which no square of a float overflows. A sum takes
// two kernels: a fixed grid leaves partial sums in scratch, and one block adds them in order.
// Bytes, 16 a thread and load, and the computed floor (gpu.cuh):
//   a layer       seven times n C (x; s, skip and skip again for each sublayer), and n NH floats,
//                 which one block reads
//                 GPT-2 in bf16, n = 65536: 0.165 ms a layer, and that of the one block; eleven
//                 launches
//   tensor_sums   16 a parameter (w, d, m, v)         124 M parameters: 0.46 ms; launches, two a
//                 tensor, cost about as much again
#pragma once
#include "adamw.cuh"
#include "run/trainer.h"

enum { LAYER_PIECES = 1024, TENSOR_PIECES = 128, PEAK_THREADS = 1024 };

// ---------------------------------------------------------------------------------------- a layer

// A term whose squares add up: scale (x - a skip). nGPT: alpha y / |y| with x = y, and
// (1 - alpha) skip with x = skip.
struct Term {
    const real *x, *skip;        // [n, C]; skip may be nullptr
    float a, scale;
    const real *p = nullptr;     // nGPT, [C]: alpha = 0.05 sqrt(C) |p| decides the scale
    const wide *rstd = nullptr;  // nGPT, [n]: of y, saved by forward; nullptr: x is the skip
};

static __global__ void __launch_bounds__(SQUARES_THREADS)
term_kernel(double *partial, Term f, int64_t size, int C) {
    double sum = 0;
    for (int64_t i = grid_thread() * PACK; i < size; i += grid_threads() * PACK) {
        Floats x = floats_load(f.x + i), skip = f.skip ? floats_load(f.skip + i) : Floats{};
        Floats p = f.p ? floats_load(f.p + i % C) : Floats{};
        for (int k = 0; k < PACK; k++) {
            float scale = f.scale;
            if (f.p) {
                float alpha = alpha_slope(C) * fabsf(p.v[k]);
                scale = f.rstd ? alpha * f.rstd[i / C] * rsqrtf((float)C) : 1 - alpha;
            }
            sum += square(scale * (x.v[k] - f.a * skip.v[k]));
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// *sum, on the device, += the squares of a term [n, C]. The grid, and with it the order, depends on
// the size alone.
static inline void squares_add(double *sum, const Term &f, int64_t n, int C, Gpu *gpu) {
    int pieces = square_pieces(n * C, PACK, LAYER_PIECES);
    double *partial = scratch_for<double>(pieces, gpu);
    LAUNCH(term_kernel, pieces, SQUARES_THREADS, 0, gpu->stream, partial, f, n * C, C);
    LAUNCH(sums_add_kernel, 1, SQUARES_THREADS, 0, gpu->stream, sum, partial, pieces, ADD);
}

// Adds the squares of a sublayer's branch to sums[0], those of its skip to sums[1]. With p (nGPT)
// the branch is alpha y / |y|; otherwise it is s - a skip.
static inline void sublayer_stats(double sums[2], const real *s, const real *y, const real *skip,
                                  double a, const real *p, const wide *rstd, int64_t n, int C,
                                  Gpu *gpu) {
    Term branch = {s, skip, (float)a, 1}, skipped = {skip, nullptr, 0, (float)a, p};
    if (p) branch = {y, nullptr, 0, 1, p, rstd};
    squares_add(&sums[0], branch, n, C, gpu);
    squares_add(&sums[1], skipped, n, C, gpu);
}

// One block. NaN stays: block_max ignores it, a sum does not.
static __global__ void __launch_bounds__(PEAK_THREADS)
peak_kernel(double *largest, const wide *peak, int64_t count) {
    float seen = (float)*largest;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
        if (peak[i] > seen || isnan(peak[i])) seen = peak[i];
    seen = block_max(seen) + block_sum(isnan(seen) ? seen : 0.0f);
    if (threadIdx.x == 0) *largest = seen;
}

// *largest, on the device, becomes the largest of itself and of attention's peaks [count], or NaN
// if there is one.
static inline void peak_add(double *largest, const wide *peak, int64_t count, Gpu *gpu) {
    LAUNCH(peak_kernel, 1, PEAK_THREADS, 0, gpu->stream, largest, peak, count);
}

// ---------------------------------------------------------------------------------------- tensors

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
    if (first < e.size)
        seen = {block_sum(seen.grad), block_sum(seen.weight), block_sum(seen.update)};
    if (threadIdx.x == 0) partial[blockIdx.x] = seen;
}

// SETs *sums, on the device, for an entry of arenas that adamw_apply has just updated with `step`;
// an entry whose lr is 0 did not move. x: the direction of an entry that Muon has updated, else
// nullptr. All entries have the same number of pieces.
static inline void tensor_sums(TensorStats *sums, Arenas t, const UpdateEntry *entry,
                               AdamWStep step, Gpu *gpu, const real *x) {
    int pieces = square_pieces(t.total, FOUR, TENSOR_PIECES);
    TensorStats *partial = scratch_for<TensorStats>(pieces, gpu);
    LAUNCH(tensor_sums_kernel, pieces, SQUARES_THREADS, 0, gpu->stream, partial, t, entry, step, x);
    LAUNCH(sums_add_kernel, 3, SQUARES_THREADS, 0, gpu->stream, (double *)sums, (double *)partial,
           pieces, SET);
}
