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
// Values moved per row, and the computed floor (gpu.cuh) in bf16:
//
//   SwiGLU   n = 32768, F = 4224   forward  3F (gate, up; h)               0.193 ms
//                                  backward 5F (gate, up, dh; dgate, dup)  0.322 ms
//   GELU     n = 65536, F = 3072   forward  2F (gu; h)                     0.187 ms
//                                  backward 3F (gu, dh; dgu)               0.281 ms
#pragma once
#include "gpu.cuh"

// For very negative x, e^-x overflows to infinity and the quotient is 0, the right limit.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// silu(x) or gelu(x) is x times this sigmoid.
template <bool SWIGLU> __device__ inline float activation_sigmoid(float x) {
    return sigmoid(SWIGLU ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x));
}

template <bool SWIGLU> __device__ inline float activation(float x) {
    return x * activation_sigmoid<SWIGLU>(x);
}

template <bool SWIGLU> __device__ inline float activation_slope(float x) {
    float s = activation_sigmoid<SWIGLU>(x);
    if (SWIGLU) return s * (1 + x * (1 - s));
    return s * (1 + x * (1 - s) * 1.5957691216057308f * (1 + 3 * 0.044715f * x * x));
}

// ---------------------------------------------------------------------------------------- forward

template <bool SWIGLU>
static __global__ void __launch_bounds__(ROW_THREADS)
activation_forward_kernel(real *h, const real *gu, int F) {
    int i = row_column();
    if (i >= F) return;
    gu += (int64_t)blockIdx.x * (SWIGLU ? 2 : 1) * F + i;
    Floats x = floats_load(gu), up = {};  // x: gate, or up for GELU
    if (SWIGLU) up = floats_load(gu + F);
    for (int k = 0; k < PACK; k++) x.v[k] = activation<SWIGLU>(x.v[k]) * (SWIGLU ? up.v[k] : 1);
    floats_store(h + (int64_t)blockIdx.x * F + i, x);
}

static inline void activation_forward(real *h, const real *gu, int64_t n, int F, int swiglu,
                                      Gpu *gpu) {
    auto kernel = swiglu ? activation_forward_kernel<true> : activation_forward_kernel<false>;
    LAUNCH(kernel, row_grid(n, F), ROW_THREADS, 0, gpu->stream, h, gu, F);
}

// --------------------------------------------------------------------------------------- backward

template <bool SWIGLU>
static __global__ void __launch_bounds__(ROW_THREADS)
activation_backward_kernel(real *dgu, const real *dh, const real *gu, int F) {
    int64_t at = (int64_t)blockIdx.x * (SWIGLU ? 2 : 1) * F;
    int i = row_column();
    if (i >= F) return;
    Floats d = floats_load(dh + (int64_t)blockIdx.x * F + i), x = floats_load(gu + at + i), up = {};
    if (SWIGLU) up = floats_load(gu + at + F + i);
    for (int k = 0; k < PACK; k++) {
        float d_k = d.v[k], x_k = x.v[k], up_k = SWIGLU ? up.v[k] : 1;
        x.v[k] = d_k * up_k * activation_slope<SWIGLU>(x_k);
        up.v[k] = d_k * activation<SWIGLU>(x_k);
    }
    floats_store(dgu + at + i, x);
    if (SWIGLU) floats_store(dgu + at + F + i, up);
}

// SETs dgu, which has the shape of gu and may be gu itself or, for GELU, dh.
static inline void activation_backward(real *dgu, const real *dh, const real *gu, int64_t n, int F,
                                       int swiglu, Gpu *gpu) {
    auto kernel = swiglu ? activation_backward_kernel<true> : activation_backward_kernel<false>;
    LAUNCH(kernel, row_grid(n, F), ROW_THREADS, 0, gpu->stream, dgu, dh, gu, F);
}
