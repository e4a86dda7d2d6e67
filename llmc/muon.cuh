// muon.cuh: Muon (Jordan et al. 2024), the optimizer for matrices of blocks. g is the clipped
// gradient:
//
//   m = mu m + (1 - mu) g     u = (1 - mu) g + mu m         Nesterov momentum
//   x = u / |u|                                             |u|: Frobenius norm
//   5 times:  s = x x^T       x = a x + (b s + c s s) x     Newton-Schulz iteration
//   w -= lr (scale x + decay w)                             scale: muon_scale (run/trainer.h)
//
//   w, m, d [count, rows, cols] float     x, y [count, rows, cols]     s, p [count, k, k]
//   u is stored in x, rounded to the storage type; |u| is that of u before it is rounded
//
// The tensor holds `count` matrices one below the other, those of experts, or one. Their products
// are one batch. k is the smaller of rows and cols. If rows > cols, s = x^T x and the last product
// is x (b s + c s s): the same for the transpose, and nothing is transposed in memory.
//
// Products are the library's (linear.cuh), in the storage type with float sums: Jordan et al.
// iterate in bfloat16 too. m and w are float. A step that is refused changes neither m nor w;
// the host does not wait for that decision (adamw.cuh).
//
// Bytes per parameter in bf16, beside the products: momentum 14 (m, d; m and x written), start 4
// (x; x written), apply 12 (w, x; w and its copy written). FLOP of the products:
// 5 (4 k^2 l + 2 k^3) a matrix, l the larger side: 1.6e12 a step for GPT-2 124M.
#pragma once
#include <utility>
#include "adamw.cuh"
#include "linear.cuh"

enum { MUON_PIECES = 256, MUON_ITERATIONS = 5 };
static const float MUON_A = 3.4445f, MUON_B = -4.7750f, MUON_C = 2.0315f;  // Jordan's coefficients

// A tensor that Muon updates; e is its shard, which is all of it.
struct MuonTensor {
    UpdateEntry e;
    int count, rows, cols;
    real *x;                   // scratch of layout_muon_scratch elements: x, y, s and p
};

// x = u, and partial[matrix][block] = sum of u^2 over the block's share of a matrix. The grid is
// (pieces, matrix). advance: m takes in the gradient, and is stored if the step is taken. Otherwise
// the m in memory has it already.
static __global__ void __launch_bounds__(UPDATE_THREADS)
muon_momentum_kernel(real *x, double *partial, Arenas t, UpdateEntry e, int64_t size,
                     const UpdateState *state, float mu, bool advance) {
    double sum = 0;
    float clip_factor = state->clip_factor;
    int64_t base = blockIdx.y * size;
    for (int64_t i = grid_thread() * FOUR; i < size; i += grid_threads() * FOUR) {
        float *own = t.m + e.state + base + i;
        Four m = four_load(own), d = four_load(t.d + e.offset + base + i), u;
        for (int k = 0; k < FOUR; k++) {
            float g = (1 - mu) * clip_factor * d.v[k];
            if (advance) m.v[k] = mu * m.v[k] + g;
            u.v[k] = mu * m.v[k] + g;
            sum += square(u.v[k]);
        }
        if (advance && state->applied) four_store(own, m);
        reals_store(x + base + i, u);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// x = u / |u|, in place. Each thread sums one piece of |u|^2, so pieces must not outnumber threads.
static __global__ void __launch_bounds__(UPDATE_THREADS)
muon_start_kernel(real *x, const double *partial, int64_t size) {
    int pieces = gridDim.x;
    double piece = (int)threadIdx.x < pieces ? partial[blockIdx.y * pieces + threadIdx.x] : 0;
    float inverse = (float)(1 / fmax(sqrt(block_sum(piece)), 1e-7));
    x += blockIdx.y * size;
    for (int64_t i = grid_thread() * FOUR; i < size; i += grid_threads() * FOUR) {
        Four u = reals_load(x + i);
        for (int k = 0; k < FOUR; k++) u.v[k] *= inverse;
        reals_store(x + i, u);
    }
}

// w -= lr (scale x + decay w), over all matrices of the tensor.
static __global__ void __launch_bounds__(UPDATE_THREADS)
muon_apply_kernel(Arenas t, UpdateEntry e, const real *x, const UpdateState *state,
                  AdamWStep step) {
    int64_t i = grid_thread() * FOUR;
    if (i >= e.size || !state->applied) return;
    Four w = four_load(master_of(t, e) + i), direction = reals_load(x + i);
    for (int k = 0; k < FOUR; k++)
        w.v[k] -= e.lr * (e.scale * direction.v[k] + e.decay * w.v[k]);
    master_store(t, e, i, w, step);
}

// The iteration, from m.x. Returns the last x, in scratch.
static inline const real *muon_iterate(const MuonTensor &m, Gpu *gpu) {
    bool tall = m.rows > m.cols;
    int64_t k = min(m.rows, m.cols), across = max(m.rows, m.cols), size = m.count * k * across;
    real *x = m.x, *y = x + size, *s = y + size, *p = s + m.count * k * k;
    PlanKey square = {k, k, across, !tall, tall}, power = {k, k, k, 1, 0};
    PlanKey last = {m.cols, m.rows, k, 0, 0};
    square.batch = power.batch = last.batch = m.count;
    for (int i = 0; i < MUON_ITERATIONS; i++) {
        matmul({square, x, x, nullptr, s, 1, 0}, PLAIN, gpu);      // s = x x^T or x^T x
        matmul({power, s, s, s, p, MUON_C, MUON_B}, PLAIN, gpu);   // p = b s + c s s
        const real *left = tall ? p : x, *right = tall ? x : p;
        matmul({last, left, right, x, y, 1, MUON_A}, PLAIN, gpu);  // a x + p x or x p
        std::swap(x, y);
    }
    return x;
}

// The direction x of a tensor's matrices, in scratch. advance: as for the kernel.
static inline const real *muon_direction(const MuonTensor &m, Arenas t, const UpdateState *state,
                                         float mu, bool advance, Gpu *gpu) {
    int64_t size = (int64_t)m.rows * m.cols;
    dim3 grid(square_pieces(size, FOUR, MUON_PIECES), m.count);
    double *partial = scratch_for<double>((size_t)grid.x * grid.y, gpu);
    LAUNCH(muon_momentum_kernel, grid, UPDATE_THREADS, 0, gpu->stream, m.x, partial, t, m.e, size,
           state, mu, advance);
    LAUNCH(muon_start_kernel, grid, UPDATE_THREADS, 0, gpu->stream, m.x, partial, size);
    return muon_iterate(m, gpu);
}

// One step of the tensor, after adamw_apply has decided whether to take it.
static inline void muon_apply(const MuonTensor &m, Arenas t, const UpdateState *state,
                              AdamWStep step, float mu, Gpu *gpu) {
    const real *x = muon_direction(m, t, state, mu, true, gpu);
    LAUNCH(muon_apply_kernel, CEIL_DIV(m.e.size, UPDATE_THREADS * FOUR), UPDATE_THREADS, 0,
           gpu->stream, t, m.e, x, state, step);
}
