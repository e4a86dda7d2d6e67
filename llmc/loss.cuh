// loss.cuh: the classifier (softmax, cross-entropy and their gradient in one pass over the logits;
// in train_gpt.c crossentropy_forward and crossentropy_backward) and the sums of the losses.
//
//   logsum = ln sum_j e^z_j                   over the V columns of the vocabulary, without padding
//   loss   = logsum - z_target                cross-entropy
//   dz     = (1 + 2 z_loss logsum) softmax(z) - onehot(target),  0 in the padding
//
// The term in z_loss is the gradient of OLMo 2's z-loss, z_loss * logsum^2.
//
// Shapes: logits z [n, Vp], padded from V to Vp columns; targets [n]; losses, logsum [n].
// Saved: logsum, for the z-loss and nGPT's backward. The gradient overwrites the logits. It lacks
// the factor of the loss (gpt_backward's scale), which the matrix products that read it apply.
//
// A block takes a row. While the row arrives from memory, each thread keeps the maximum of its
// columns so far and the sum of exponentials relative to it (online softmax: Milakov, Gimelshein
// 2018), and copies the columns to shared memory, for the gradient. So the row is read and written
// once. A row that does not fit in shared memory (on Hopper more than 116,000 columns in bf16,
// 58,000 in float) is read again. Without a gradient the row is read once and not kept.
// Elements moved per row: Vp forward, 2 Vp with the gradient. Computed floor (gpu.cuh) for GPT-2 in
// bf16, n = 65536, Vp = 50304: 1.53 and 3.07 ms.
//
// nGPT has a gain on logits: logit = g z with g = scale w. The gradient of w is
// scale * sum over rows of dlogit z, a sum down columns. So a second kernel, whose threads walk
// down columns, computes softmax again, and with it dz = g dlogit. Elements moved per row: Vp
// forward, 2 Vp backward.
#pragma once
#include "ngpt.cuh"

enum { CLASSIFIER_THREADS = 512, CLASSIFIER_LOADS = 4 };

// ------------------------------------------------------------------------------------- classifier

// e^(x - shift), by exp2_fast.
__device__ inline float classifier_exp(float x, float shift) {
    return exp2_fast(x * 1.44269504f - shift * 1.44269504f);
}

// max starts at -1e30, below any logit but finite: a masked column (-inf) then gives e^-inf = 0
// and not NaN.
struct Softmax {
    float max;                 // of the logits seen
    float sum;                 // of e^(z - max) over them
};

// What the classifier reads and writes.
struct Logits {
    real *z;                   // [n, Vp]
    wide *losses, *logsum;     // [n]
    const int32_t *targets;    // [n]
    int64_t n;
    int V, Vp;
    float z_loss;
    Norm gain;                 // nGPT: SCALE over n rows of Vp (modes.h)
};

// Adds the columns j..j+PACK-1; those from V on are padding.
__device__ inline Softmax softmax_add(Softmax s, Floats z, int j, int V) {
    float max = s.max;
    if (j + PACK > V)
        for (int k = 0; k < PACK; k++)
            if (j + k >= V) z.v[k] = -INFINITY;
    for (int k = 0; k < PACK; k++) max = fmaxf(max, z.v[k]);
    if (max > s.max) s.sum *= classifier_exp(s.max, max);
    s.max = max;
    for (int k = 0; k < PACK; k++) s.sum += classifier_exp(z.v[k], max);
    return s;
}

// No gradient; a gradient from the row kept in shared memory; or from the row read again.
enum { GRADIENT_NONE, GRADIENT_KEPT, GRADIENT_AGAIN };

// This thread's share of a row, with a few loads in flight at a time. GRADIENT_KEPT also copies the
// row to `kept`, in shared memory.
template <int GRADIENT, bool GAINED>
__device__ Softmax softmax_row(real *kept, const real *z, const Logits &f) {
    Softmax s = {-1e30f, 0};
    int step = blockDim.x * PACK;
    z += threadIdx.x * PACK;
    for (int j = threadIdx.x * PACK; j < f.Vp;) {
        Pack x[CLASSIFIER_LOADS];
        UNROLL for (int l = 0; l < CLASSIFIER_LOADS; l++)
            if (j + l * step < f.Vp) x[l] = pack_load(z + l * step);
        UNROLL for (int l = 0; l < CLASSIFIER_LOADS && j < f.Vp; l++, j += step, z += step) {
            Floats logits = pack_floats(x[l]);
            if constexpr (GAINED) logits = gain_load(f.gain, j) * logits;
            s = softmax_add(s, logits, j, f.V);
            if (GRADIENT == GRADIENT_KEPT) *reinterpret_cast<Pack *>(kept + j) = x[l];
        }
    }
    return s;
}

// The gradient of the pack of logits z at column j. log_row: the row's logsum.
__device__ inline Floats logits_gradient(Floats z, const Logits &f, int j, int target,
                                         float log_row) {
    float factor = 1 + 2 * f.z_loss * log_row;  // of softmax
    for (int k = 0; k < PACK; k++) z.v[k] = factor * classifier_exp(z.v[k], log_row);
    if (j <= target && target < j + PACK)
        for (int k = 0; k < PACK; k++) z.v[k] -= j + k == target;
    if (j + PACK > f.V)
        for (int k = 0; k < PACK; k++)
            if (j + k >= f.V) z.v[k] = 0;
    return z;
}

template <int GRADIENT, bool GAINED>
__global__ void __launch_bounds__(CLASSIFIER_THREADS, 2) classifier_kernel(Logits f) {
    SHARED_DYNAMIC(real, kept);
    int64_t row = blockIdx.x;
    int target = f.targets[row];
    real *z = f.z + row * f.Vp;
    Softmax s = softmax_row<GRADIENT, GAINED>(kept, z, f);
    // Every thread reads this before the barriers of block_max; the gradient is written after.
    float z_target = to_float(z[target]);
    if constexpr (GAINED) z_target *= (float)f.gain.site.scale * to_float(f.gain.w[target]);
    float max = block_max(s.max);
    float log_row = max + logf(block_sum(s.sum * classifier_exp(s.max, max)));
    if (threadIdx.x == 0) {
        f.losses[row] = log_row - z_target;
        f.logsum[row] = log_row;
    }
    if (GRADIENT == GRADIENT_NONE) return;
    // Each thread reads what it stored itself, so there is no barrier between.
    const real *from = GRADIENT == GRADIENT_KEPT ? kept : z;
    for (int j = threadIdx.x * PACK; j < f.Vp; j += blockDim.x * PACK)
        floats_store(z + j, logits_gradient(floats_load(from + j), f, j, target, log_row));
}

// SETs losses and logsum. With `gradient` the logits become their own gradient, unless they have a
// gain: gained_classifier_backward follows.
static inline void classifier(const Logits &f, bool gradient, Gpu *gpu) {
    size_t bytes = f.Vp * sizeof(real);
    size_t reserved = 2 * WARP * sizeof(float);  // the arrays of block_max and block_sum
    gradient = gradient && !f.gain.site.on;
    bool kept = gradient && bytes + reserved <= gpu->shared_bytes;
    auto kernel = classifier_kernel<GRADIENT_NONE, false>;
    if (f.gain.site.on) kernel = classifier_kernel<GRADIENT_NONE, true>;
    if (gradient) kernel = classifier_kernel<GRADIENT_AGAIN, false>;
    if (kept) kernel = classifier_kernel<GRADIENT_KEPT, false>;
    int threads = threads_for(f.Vp / PACK, CLASSIFIER_THREADS);  // one for each 16 bytes of the row
    LAUNCH(kernel, f.n, threads, kept ? bytes : 0, gpu->stream, f);
}

static __global__ void __launch_bounds__(GAIN_THREADS)
gained_classifier_backward_kernel(Logits f, float scale, float *partial) {
    auto use = [&](int64_t i, int j, Floats &x, const Floats &, const Floats &g, Floats &sum) {
        Floats d = logits_gradient(g * x, f, j, f.targets[i], f.logsum[i]);
        sum = sum + d * x;
        x = g * d;
    };
    gain_columns(f.z, f.z, nullptr, f.gain, partial, scale, use);
}

// z becomes its gradient, not scaled; ADDs to gain.dw, scaled.
static inline void gained_classifier_backward(const Logits &f, float scale, Gpu *gpu) {
    dim3 grid = gain_grid(&f.gain, gpu);
    float *partial = scratch_for<float>((size_t)grid.y * f.Vp, gpu);
    LAUNCH(gained_classifier_backward_kernel, grid, GAIN_THREADS, 0, gpu->stream, f, scale,
           partial);
    partials_add({{{f.gain.dw, partial, f.Vp, (int)grid.y}}, 1}, gpu);
}

// ------------------------------------------------------------------------------------------- sums

// Sums over the tokens since the last update, on the device. UpdateState (adamw.cuh) has two more.
enum { SUM_CE, SUM_Z, SUM_ROUTER, LOSS_SUMS };

// One block, so one order of summation: each thread sums every blockDim.x-th row, block_sum adds
// the threads. 8 bytes per row: nothing beside the logits' 2 Vp.
static __global__ void __launch_bounds__(SUMS_THREADS)
loss_sums_kernel(double *sums, Logits f) {
    double ce = 0, z = 0;
    for (int64_t i = threadIdx.x; i < f.n; i += blockDim.x) {
        ce += f.losses[i];
        z += square(f.logsum[i]);
    }
    ce = block_sum(ce);
    z = block_sum(z);
    if (threadIdx.x == 0) {
        sums[SUM_CE] += ce;
        sums[SUM_Z] += f.z_loss * z;
    }
}

// sums[SUM_CE] += sum of losses, sums[SUM_Z] += z_loss * sum of logsum^2.
static inline void loss_sums(double *sums, const Logits &f, Gpu *gpu) {
    LAUNCH(loss_sums_kernel, 1, threads_for(f.n, SUMS_THREADS), 0, gpu->stream, sums, f);
}
