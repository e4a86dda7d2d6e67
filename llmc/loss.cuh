// loss.cuh: the classifier (softmax, cross-entropy and their gradient in one pass over the logits)
// and the sums of the losses.
//
//   logsum = log sum_j e^z_j                  over the V columns of the vocabulary, without padding
//   loss   = logsum - z_target                cross-entropy
//   dz     = (1 + 2 z_loss logsum) softmax(z) - onehot(target),  0 in the padding
//
// The term in z_loss is the gradient of OLMo 2's z-loss, z_loss * logsum^2.
//
// Shapes: logits z [n, Vp], padded from V to Vp columns; targets [n]; losses, logsum [n].
// Saved: logsum, for the z-loss. The gradient overwrites the logits. It is not scaled: the loss's
// scale goes into the matrix products that read it.
//
// A block takes a row. While the row arrives from memory, each thread keeps the maximum and the sum
// of exponentials relative to it for the columns it has seen (online softmax: Milakov, Gimelshein
// 2018), and stores them in shared memory, from which it computes the gradient. So the row is read
// and written once. A row that does not fit in shared memory (on Hopper more than 116,000 columns
// in bf16, 58,000 in float) is read again. Without a gradient the row is read once and not kept.
// Elements moved per row: Vp forward, 2 Vp with the gradient. Computed floor at 4.3 TB/s for GPT-2
// in bf16, n = 65536, Vp = 50304: 1.53 and 3.07 ms.
//
// nGPT has a gain on logits: logit = g z with g = scale w. The gradient of w is
// scale * sum over rows of dlogit z, a sum down columns. So a second kernel, whose threads walk
// down columns, computes softmax again, and with it dz = g dlogit. Elements moved per row: Vp
// forward, 2 Vp backward.
#pragma once
#include "ngpt.cuh"

enum { CLASSIFIER_THREADS = 512, CLASSIFIER_LOADS = 4, SUMS_THREADS = 512 };

// ------------------------------------------------------------------------------------- classifier

// e^(x - shift): one multiply-add and exp2_fast.
static __device__ inline float classifier_exp(float x, float shift) {
    return exp2_fast(x * 1.44269504f - shift * 1.44269504f);
}

// max starts at -1e30, below any logit but finite: a masked column (-inf) then gives e^-inf = 0
// and not NaN.
typedef struct Softmax {
    float max;                 // of the logits seen
    float sum;                 // of e^(z - max) over them
} Softmax;

// The logits at columns j..j+PACK-1.
template <bool GAINED>
static __device__ inline Floats logits_of(const Pack &z, const Norm &gain, int j) {
    Floats x = pack_floats(z);
    if constexpr (GAINED) {
        Floats g = gain_load(gain, j);
        for (int k = 0; k < PACK; k++) x.v[k] *= g.v[k];
    }
    return x;
}

// Adds the columns j..j+PACK-1; those from V on are padding.
static __device__ inline Softmax softmax_add(Softmax s, Floats z, int j, int V) {
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

// This thread's share of a row, with a few loads in flight at a time. Also copies the row to
// `kept`, in shared memory, unless that is nullptr.
template <bool GAINED>
static __device__ inline Softmax softmax_row(real *kept, const real *z, const Norm &gain, int V,
                                             int Vp) {
    Softmax s = {-1e30f, 0};
    int step = blockDim.x * PACK;
    for (int first = threadIdx.x * PACK; first < Vp; first += CLASSIFIER_LOADS * step) {
        Pack x[CLASSIFIER_LOADS];
        for (int l = 0; l < CLASSIFIER_LOADS; l++)
            if (first + l * step < Vp) x[l] = pack_load(z + first + l * step);
        for (int l = 0; l < CLASSIFIER_LOADS; l++) {
            int j = first + l * step;
            if (j >= Vp) break;
            s = softmax_add(s, logits_of<GAINED>(x[l], gain, j), j, V);
            if (kept) *reinterpret_cast<Pack *>(kept + j) = x[l];
        }
    }
    return s;
}

typedef struct ClassifierRow {
    int target, V, Vp;
    float logsum;
    float factor;              // of softmax in the gradient: 1 + 2 z_loss logsum
} ClassifierRow;

// dz from z, which is its copy or dz itself. Each thread reads what it stored itself, so there is
// no barrier between.
static __device__ inline void classifier_gradient(real *dz, const real *z, ClassifierRow r) {
    for (int j = threadIdx.x * PACK; j < r.Vp; j += blockDim.x * PACK) {
        Floats d = pack_floats(pack_load(z + j));
        for (int k = 0; k < PACK; k++) d.v[k] = r.factor * classifier_exp(d.v[k], r.logsum);
        if (j <= r.target && r.target < j + PACK)
            for (int k = 0; k < PACK; k++) d.v[k] -= j + k == r.target;
        if (j + PACK > r.V)
            for (int k = 0; k < PACK; k++)
                if (j + k >= r.V) d.v[k] = 0;
        pack_store(dz + j, pack_round(d));
    }
}

// No gradient; a gradient from the row kept in shared memory; or from the row read again.
enum { GRADIENT_NONE, GRADIENT_KEPT, GRADIENT_AGAIN };

template <int GRADIENT, bool GAINED>
static __global__ void __launch_bounds__(CLASSIFIER_THREADS, 2)
classifier_kernel(wide *losses, wide *logsum, real *logits, const int32_t *targets, Norm gain,
                  int V, int Vp, float z_loss) {
    SHARED_DYNAMIC(real, kept);
    int64_t row = blockIdx.x;
    real *z = logits + row * Vp;
    int target = targets[row];
    Softmax s = softmax_row<GAINED>(GRADIENT == GRADIENT_KEPT ? kept : nullptr, z, gain, V, Vp);
    // Every thread reads this before the barriers of block_max; the gradient is written after.
    float z_target = to_float(z[target]);
    if constexpr (GAINED) z_target *= (float)gain.site.scale * to_float(gain.w[target]);
    float max = block_max(s.max);
    float log_row = max + logf(block_sum(s.sum * classifier_exp(s.max, max)));
    if (threadIdx.x == 0) {
        losses[row] = log_row - z_target;
        logsum[row] = log_row;
    }
    ClassifierRow r = {target, V, Vp, log_row, 1 + 2 * z_loss * log_row};
    if (GRADIENT != GRADIENT_NONE)
        classifier_gradient(z, GRADIENT == GRADIENT_KEPT ? kept : z, r);
}

// `count` threads rounded up to whole warps, at most `limit`.
static inline int threads_for(int64_t count, int limit) {
    return count < limit ? (int)CEIL_DIV(count, WARP) * WARP : limit;
}

// A thread for each 16 bytes of the row.
static inline int classifier_threads(int Vp) { return threads_for(Vp / PACK, CLASSIFIER_THREADS); }

// SETs losses and logsum [n]; with `gradient`, logits [n, Vp] become their own gradient.
static inline void classifier(wide *losses, wide *logsum, real *logits, const int32_t *targets,
                              int64_t n, int V, int Vp, float z_loss, bool gradient, Gpu *gpu) {
    int device, limit;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    size_t bytes = Vp * sizeof(real);
    size_t reserved = 2 * WARP * sizeof(float);  // the arrays of block_max and block_sum
    bool kept = gradient && bytes + reserved <= (size_t)limit;
    auto kernel = classifier_kernel<GRADIENT_NONE, false>;
    if (gradient) kernel = classifier_kernel<GRADIENT_AGAIN, false>;
    if (kept) kernel = classifier_kernel<GRADIENT_KEPT, false>;
    LAUNCH(kernel, (unsigned)n, classifier_threads(Vp), kept ? bytes : 0, gpu->stream, losses,
           logsum, logits, targets, Norm(), V, Vp, z_loss);
}

// ------------------------------------------------------------------------------------ with a gain

// SETs losses and logsum of the logits g z, without overwriting z [n, Vp].
// gain: SCALE over n rows of Vp (modes.h).
static inline void gained_classifier_forward(wide *losses, wide *logsum, real *z,
                                             const int32_t *targets, const Norm *gain, int V,
                                             Gpu *gpu) {
    int Vp = gain->site.gains;
    auto kernel = classifier_kernel<GRADIENT_NONE, true>;
    LAUNCH(kernel, (unsigned)gain->n, classifier_threads(Vp), 0, gpu->stream, losses, logsum, z,
           targets, *gain, V, Vp, 0.0f);
}

// As gain_kernel (ngpt.cuh): partial has a row of gains for each chunk of rows.
static __global__ void __launch_bounds__(GAIN_THREADS)
gained_classifier_backward_kernel(real *z, const wide *logsum, const int32_t *targets, Norm gain,
                                  int V, float z_loss, float scale, float *partial) {
    int j = gain_column(), Vp = gain.site.gains;
    if (j >= Vp) return;
    auto [first, end] = gain_span(gain);
    Floats g = gain_load(gain, j), sum = {};
    for (int64_t i = first; i < end; i += GAIN_LOADS) {
        Bits load[GAIN_LOADS];
        UNROLL for (int l = 0; l < GAIN_LOADS; l++)
            load[l] = bits_load(i + l < end ? z + (i + l) * Vp : nullptr, j);
        UNROLL for (int l = 0; l < GAIN_LOADS; l++) {
            if (i + l >= end) break;
            Floats x = bits_floats(load[l]);
            float log_row = logsum[i + l], factor = 1 + 2 * z_loss * log_row;
            int target = targets[i + l];
            for (int k = 0; k < PACK; k++) {
                float d = 0;
                if (j + k < V)
                    d = factor * classifier_exp(g.v[k] * x.v[k], log_row) - (j + k == target);
                sum.v[k] += d * x.v[k];
                x.v[k] = g.v[k] * d;
            }
            pack_store(z + (i + l) * Vp + j, pack_round(x));
        }
    }
    partial += (int64_t)blockIdx.y * Vp + j;
    for (int k = 0; k < PACK; k++) partial[k] = scale * (float)gain.site.scale * sum.v[k];
}

// z becomes its gradient, not scaled; ADDs to gain->dw, scaled.
static inline void gained_classifier_backward(real *z, const wide *logsum, const int32_t *targets,
                                              const Norm *gain, int V, float z_loss, float scale,
                                              Gpu *gpu) {
    dim3 grid = gain_grid(gain, gpu);
    PartialList list = {{{gain->dw, gpu->scratch, gain->site.gains, (int)grid.y}}, 1};
    LAUNCH(gained_classifier_backward_kernel, grid, GAIN_THREADS, 0, gpu->stream, z, logsum,
           targets, *gain, V, z_loss, scale, gpu->scratch);
    partials_add(&list, gpu);
}

// ------------------------------------------------------------------------------------------- sums

// One block, so one order of summation: each thread sums every blockDim.x-th row, block_sum adds
// the threads. 8 bytes per row: nothing beside the logits' 2 Vp.
static __global__ void __launch_bounds__(SUMS_THREADS)
loss_sums_kernel(double *sums, const wide *losses, const wide *logsum, int64_t n, float z_loss) {
    double ce = 0, z = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        ce += losses[i];
        z += (double)logsum[i] * logsum[i];
    }
    ce = block_sum(ce);
    z = block_sum(z);
    if (threadIdx.x == 0) {
        sums[0] += ce;
        sums[1] += z_loss * z;
    }
}

// On the device: sums[0] += sum of losses, sums[1] += z_loss * sum of logsum^2.
static inline void loss_sums(double *sums, const wide *losses, const wide *logsum, int64_t n,
                             float z_loss, Gpu *gpu) {
    LAUNCH(loss_sums_kernel, 1, threads_for(n, SUMS_THREADS), 0, gpu->stream, sums, losses, logsum,
           n, z_loss);
}
