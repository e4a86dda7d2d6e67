// loss.cuh: the classifier (softmax, cross-entropy and their gradient in one pass over the logits), and the sums of the losses.
//
//   logsum = log sum_j e^z_j        loss = logsum - z_target        over the V real columns of a row of Vp; the padding takes no part
//   dz     = (1 + 2 z_loss logsum) softmax(z) - onehot(target)      0 in the padding; z_loss * logsum^2 is OLMo 2's z-loss
//
// The gradient replaces the logits. It is unscaled: the scale of the loss goes into the products that read it.
// A block takes a row. While it comes from memory, each thread keeps the maximum and the sum of exponentials relative to it (Milakov, Gimelshein 2018) of
// what it has seen, and puts it aside in shared memory, from where the gradient is made: one read and one write of the row. A row that does not fit
// there (bf16: 116,000 columns on Hopper, float: 58,000) is read again. Without gradient it is read once and not kept.
// Elements moved per row: Vp forward, 2 Vp with gradient. The computed floor at 4.3 TB/s for GPT-2 in bf16, n = 65536, Vp = 50304: 1.53 and 3.07 ms.
//
// Logits may have a gain (nGPT): logit = g z, g = scale w. Then the gradient of w, scale * sum over rows of dlogit z, sums down columns, and a second kernel
// computes softmax anew where it does so, and dz = g dlogit with it. Elements moved per row: Vp forward, 2 Vp backward.
#pragma once
#include "ngpt.cuh"

enum { CLASSIFIER_THREADS = 512, CLASSIFIER_LOADS = 4, SUMS_THREADS = 512 };

// ------------------------------------------------------------------------------------------------------------------ classifier

// e^(x - shift): one multiply-add and exp2_fast.
static __device__ inline float classifier_exp(float x, float shift) { return exp2_fast(x * 1.44269504f - shift * 1.44269504f); }

// sum = sum of e^(z - max) over what was seen; max starts at -1e30, below any logit and finite, so that masked columns (-inf) give e^-inf = 0 and not NaN.
typedef struct Softmax { float max, sum; } Softmax;

// The logits at columns j..j+PACK-1.
template <bool GAINED> static __device__ inline Floats logits_of(const Pack &z, const Norm &gain, int j) {
    Floats x = pack_floats(z);
    if constexpr (GAINED) {
        Floats g = gain_load(gain, j);
        for (int k = 0; k < PACK; k++) x.v[k] *= g.v[k];
    }
    return x;
}

// Takes in the columns j..j+PACK-1, of which those from V on are padding.
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

// This thread's part of a row; the row is also copied to kept unless that is nullptr. A few loads are in flight at a time.
template <bool GAINED> static __device__ inline Softmax softmax_row(real *kept, const real *z, const Norm &gain, int V, int Vp) {
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
            if (kept) *reinterpret_cast<Pack *>(kept + j) = x[l];                                       // in shared memory
        }
    }
    return s;
}

typedef struct ClassifierRow { int target, V, Vp; float logsum, both; } ClassifierRow;         // both: 1 + 2 z_loss logsum

// dz from z, which is its copy or dz itself. Each thread reads what it kept, so no barrier stands between.
static __device__ inline void classifier_gradient(real *dz, const real *z, ClassifierRow r) {
    for (int j = threadIdx.x * PACK; j < r.Vp; j += blockDim.x * PACK) {
        Pack x = pack_load(z + j);
        float d[PACK];
        for (int k = 0; k < PACK; k++) d[k] = r.both * classifier_exp(to_float(x.v[k]), r.logsum);
        if (j <= r.target && r.target < j + PACK)
            for (int k = 0; k < PACK; k++) d[k] -= j + k == r.target;
        if (j + PACK > r.V)
            for (int k = 0; k < PACK; k++)
                if (j + k >= r.V) d[k] = 0;
        for (int k = 0; k < PACK; k++) x.v[k] = to_real(d[k]);
        pack_store(dz + j, x);
    }
}

// Whether there is a gradient, and where it finds the row: in shared memory, or read again.
enum { GRADIENT_NONE, GRADIENT_KEPT, GRADIENT_AGAIN };

template <int GRADIENT, bool GAINED>
static __global__ void __launch_bounds__(CLASSIFIER_THREADS, 2)
classifier_kernel(wide *losses, wide *logsum, real *logits, const int32_t *targets, Norm gain, int V, int Vp, float z_loss) {
    SHARED_DYNAMIC(real, kept);
    int64_t row = blockIdx.x;
    real *z = logits + row * Vp;
    int target = targets[row];
    Softmax s = softmax_row<GAINED>(GRADIENT == GRADIENT_KEPT ? kept : nullptr, z, gain, V, Vp);
    float z_target = to_float(z[target]);                      // every thread has it before the barriers of block_max let one write the row
    if constexpr (GAINED) z_target *= (float)gain.site.scale * to_float(gain.w[target]);
    float max = block_max(s.max);
    float log_row = max + logf(block_sum(s.sum * classifier_exp(s.max, max)));
    if (threadIdx.x == 0) {
        losses[row] = log_row - z_target;
        logsum[row] = log_row;
    }
    ClassifierRow r = {target, V, Vp, log_row, 1 + 2 * z_loss * log_row};
    if (GRADIENT != GRADIENT_NONE) classifier_gradient(z, GRADIENT == GRADIENT_KEPT ? kept : z, r);
}

// Whole warps for so many, up to `most` threads.
static inline int threads_for(int64_t count, int most) { return count < most ? (int)CEIL_DIV(count, WARP) * WARP : most; }

// A thread for each 16 bytes of the row.
static inline int classifier_threads(int Vp) { return threads_for(Vp / PACK, CLASSIFIER_THREADS); }

// losses[n] and logsum[n]; with gradient logits[n, Vp] becomes its own gradient.
static inline void classifier(wide *losses, wide *logsum, real *logits, const int32_t *targets, int64_t n, int V, int Vp, float z_loss, bool gradient, Gpu *gpu) {
    int device, most;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    size_t bytes = Vp * sizeof(real), reserved = 2 * WARP * sizeof(float);                     // the arrays of block_max and block_sum
    bool kept = gradient && bytes + reserved <= (size_t)most;
    auto kernel = kept ? classifier_kernel<GRADIENT_KEPT, false> : gradient ? classifier_kernel<GRADIENT_AGAIN, false> : classifier_kernel<GRADIENT_NONE, false>;
    LAUNCH(kernel, (unsigned)n, classifier_threads(Vp), kept ? bytes : 0, gpu->stream, losses, logsum, logits, targets, Norm(), V, Vp, z_loss);
}

// ------------------------------------------------------------------------------------------------------------------ with a gain

// losses and logsum of the logits g z; z[n, Vp] stays for backward. gain: of n rows of Vp.
static inline void gained_classifier_forward(wide *losses, wide *logsum, real *z, const int32_t *targets, const Norm *gain, int V, Gpu *gpu) {
    int Vp = gain->site.gains;
    auto kernel = classifier_kernel<GRADIENT_NONE, true>;
    LAUNCH(kernel, (unsigned)gain->n, classifier_threads(Vp), 0, gpu->stream, losses, logsum, z, targets, *gain, V, Vp, 0.0f);
}

// As gain_backward_kernel: partial has a row of gains for each chunk.
static __global__ void __launch_bounds__(GAIN_THREADS)
gained_classifier_backward_kernel(real *z, const wide *logsum, const int32_t *targets, Norm gain, int V, float z_loss, float scale, float *partial) {
    int j = gain_column(), Vp = gain.site.gains;
    if (j >= Vp) return;
    auto [first, end] = gain_span(gain);
    Floats g = gain_load(gain, j), sum = {};
    for (int64_t i = first; i < end; i += GAIN_LOADS) {
        Bits load[GAIN_LOADS];
        UNROLL for (int l = 0; l < GAIN_LOADS; l++) load[l] = bits_load(i + l < end ? z + (i + l) * Vp : nullptr, j);
        UNROLL for (int l = 0; l < GAIN_LOADS; l++) {
            if (i + l >= end) break;
            Floats x = bits_floats(load[l]);
            float log_row = logsum[i + l], both = 1 + 2 * z_loss * log_row;
            int target = targets[i + l];
            for (int k = 0; k < PACK; k++) {
                float d = j + k < V ? both * classifier_exp(g.v[k] * x.v[k], log_row) - (j + k == target) : 0;
                sum.v[k] += d * x.v[k];
                x.v[k] = g.v[k] * d;
            }
            pack_store(z + (i + l) * Vp + j, pack_round(x));
        }
    }
    for (int k = 0; k < PACK; k++) partial[(int64_t)blockIdx.y * Vp + j + k] = scale * (float)gain.site.scale * sum.v[k];
}

// z becomes its gradient, unscaled; gain->dw is ADDed to, scaled.
static inline void gained_classifier_backward(real *z, const wide *logsum, const int32_t *targets, const Norm *gain, int V, float z_loss, float scale, Gpu *gpu) {
    GainRows r = gain_rows(gain, gpu);
    PartialList list = {{{gain->dw, gpu->scratch, gain->site.gains, r.chunks}}, 1};
    LAUNCH(gained_classifier_backward_kernel, r.grid, GAIN_THREADS, 0, gpu->stream, z, logsum, targets, *gain, V, z_loss, scale, gpu->scratch);
    partials_add(&list, gpu);
}

// ------------------------------------------------------------------------------------------------------------------ sums

// One block, so one order: each thread its strided part, then the tree of block_sum. 8 bytes per row: nothing beside the logits' 2 Vp.
static __global__ void __launch_bounds__(SUMS_THREADS) loss_sums_kernel(double *sums, const wide *losses, const wide *logsum, int64_t n, float z_loss) {
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

// sums[0] += sum of losses, sums[1] += z_loss * sum of logsum^2, on the device. Fewer rows than threads take fewer warps.
static inline void loss_sums(double *sums, const wide *losses, const wide *logsum, int64_t n, float z_loss, Gpu *gpu) {
    LAUNCH(loss_sums_kernel, 1, threads_for(n, SUMS_THREADS), 0, gpu->stream, sums, losses, logsum, n, z_loss);
}
