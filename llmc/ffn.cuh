// ffn.cuh: the activation between the two matrix products of the feed-forward layer (MLP).
//
//   SwiGLU (Shazeer 2020)      h = silu(gate) * up     silu(x) = x sigmoid(x)
//   GELU, tanh form (GPT-2)    h = gelu(gu)            gelu(x) = x/2 (1 + tanh z) = x sigmoid(2z),
//                                                      2z = sqrt(8/pi) (x + 0.044715 x^3)
//
//   gu  [n, 2F] for SwiGLU, rows [gate | up]; [n, F] for GELU; saved for backward
//   h   [n, F]
//   n = B * T rows, or one row per assigned expert of each token (moe.cuh)
//
// Backward recomputes the activation from gu. Each thread handles 16 bytes of one row; threads
// share nothing. Memory is the limit: one exponential and one division per value hide behind it.
// Values moved per row, and the computed floor at 4.3 TB/s in bf16:
//
//   SwiGLU   n = 32768, F = 4224   forward  3F (gate, up; h)               0.193 ms
//                                  backward 5F (gate, up, dh; dgate, dup)  0.322 ms
//   GELU     n = 65536, F = 3072   forward  2F (gu; h)                     0.187 ms
//                                  backward 3F (gu, dh; dgu)               0.281 ms
#pragma once
#include "gpu.cuh"

enum { ACTIVATION_THREADS = 128 };

// For very negative x, e^-x overflows to infinity and the quotient is 0, the right limit.
static __device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

static __device__ inline float silu(float x) { return x * sigmoid(x); }

static __device__ inline float silu_slope(float x) {
    float s = sigmoid(x);
    return s * (1 + x * (1 - s));
}

static __device__ inline float gelu_sigmoid(float x) {
    return sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

static __device__ inline float gelu(float x) { return x * gelu_sigmoid(x); }

static __device__ inline float gelu_slope(float x) {
    float s = gelu_sigmoid(x);
    return s * (1 + x * (1 - s) * 1.5957691216057308f * (1 + 3 * 0.044715f * x * x));
}

// A grid is (row, part of the row). The column of this thread's 16 bytes; F or more past the end.
static __device__ inline int activation_column(void) {
    return (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
}

static inline dim3 activation_grid(int64_t n, int F) {
    return dim3((unsigned)n, CEIL_DIV(F / PACK, ACTIVATION_THREADS));
}

// ---------------------------------------------------------------------------------------- forward

static __global__ void __launch_bounds__(ACTIVATION_THREADS)
swiglu_forward_kernel(real *h, const real *gu, int F) {
    int64_t row = blockIdx.x;
    int i = activation_column();
    if (i >= F) return;
    Pack gate = pack_load(gu + row * 2 * F + i);
    Pack up = pack_load(gu + row * 2 * F + F + i), out;
    for (int k = 0; k < PACK; k++) {
        out.v[k] = to_real(silu(to_float(gate.v[k])) * to_float(up.v[k]));
    }
    pack_store(h + row * F + i, out);
}

static __global__ void __launch_bounds__(ACTIVATION_THREADS)
gelu_forward_kernel(real *h, const real *gu, int F) {
    int64_t row = blockIdx.x;
    int i = activation_column();
    if (i >= F) return;
    Pack x = pack_load(gu + row * F + i), out;
    for (int k = 0; k < PACK; k++) out.v[k] = to_real(gelu(to_float(x.v[k])));
    pack_store(h + row * F + i, out);
}

static inline void activation_forward(real *h, const real *gu, int64_t n, int F, int swiglu,
                                      Gpu *gpu) {
    dim3 grid = activation_grid(n, F);
    const int block = ACTIVATION_THREADS;
    if (swiglu) LAUNCH(swiglu_forward_kernel, grid, block, 0, gpu->stream, h, gu, F);
    else LAUNCH(gelu_forward_kernel, grid, block, 0, gpu->stream, h, gu, F);
}

// --------------------------------------------------------------------------------------- backward

static __global__ void __launch_bounds__(ACTIVATION_THREADS)
swiglu_backward_kernel(real *dgu, const real *dh, const real *gu, int F) {
    int64_t row = blockIdx.x;
    int i = activation_column();
    if (i >= F) return;
    Pack gate = pack_load(gu + row * 2 * F + i);
    Pack up = pack_load(gu + row * 2 * F + F + i);
    Pack d = pack_load(dh + row * F + i), dgate, dup;
    for (int k = 0; k < PACK; k++) {
        float g = to_float(gate.v[k]), dh_i = to_float(d.v[k]);
        dgate.v[k] = to_real(dh_i * to_float(up.v[k]) * silu_slope(g));
        dup.v[k] = to_real(dh_i * silu(g));
    }
    pack_store(dgu + row * 2 * F + i, dgate);
    pack_store(dgu + row * 2 * F + F + i, dup);
}

static __global__ void __launch_bounds__(ACTIVATION_THREADS)
gelu_backward_kernel(real *dgu, const real *dh, const real *gu, int F) {
    int64_t row = blockIdx.x;
    int i = activation_column();
    if (i >= F) return;
    Pack x = pack_load(gu + row * F + i), d = pack_load(dh + row * F + i), dx;
    for (int k = 0; k < PACK; k++) {
        dx.v[k] = to_real(to_float(d.v[k]) * gelu_slope(to_float(x.v[k])));
    }
    pack_store(dgu + row * F + i, dx);
}

// SETs dgu, which has the shape of gu and may be gu itself.
static inline void activation_backward(real *dgu, const real *dh, const real *gu, int64_t n, int F,
                                       int swiglu, Gpu *gpu) {
    dim3 grid = activation_grid(n, F);
    const int block = ACTIVATION_THREADS;
    if (swiglu) LAUNCH(swiglu_backward_kernel, grid, block, 0, gpu->stream, dgu, dh, gu, F);
    else LAUNCH(gelu_backward_kernel, grid, block, 0, gpu->stream, dgu, dh, gu, F);
}
