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
#pragma once
#include <float.h>
#include "gpu.cuh"

enum { CLASSIFIER_THREADS = 512, CLASSIFIER_LOADS = 4, SUMS_THREADS = 512 };

// As block_sum; every thread gets the largest value.
static __device__ inline float block_max(float x) {
    SHARED(float, partial, WARP);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? partial[lane] : -FLT_MAX);
}

// ------------------------------------------------------------------------------------------------------------------ classifier

// e^(x - shift): one multiply-add and exp2_fast.
static __device__ inline float classifier_exp(float x, float shift) { return exp2_fast(x * 1.44269504f - shift * 1.44269504f); }

// sum = sum of e^(z - max) over what was seen; max starts at -1e30, below any logit and finite, so that masked columns (-inf) give e^-inf = 0 and not NaN.
typedef struct Softmax { float max, sum; } Softmax;

// Takes in the columns j..j+PACK-1, of which those from V on are padding.
static __device__ inline Softmax softmax_add(Softmax s, const Pack &x, int j, int V) {
    float z[PACK], max = s.max;
    for (int k = 0; k < PACK; k++) z[k] = to_float(x.v[k]);
    if (j + PACK > V)
        for (int k = 0; k < PACK; k++)
            if (j + k >= V) z[k] = -INFINITY;
    for (int k = 0; k < PACK; k++) max = fmaxf(max, z[k]);
    if (max > s.max) s.sum *= classifier_exp(s.max, max);
    s.max = max;
    for (int k = 0; k < PACK; k++) s.sum += classifier_exp(z[k], max);
    return s;
}

// This thread's part of a row; the row is also copied to kept unless that is nullptr. A few loads are in flight at a time.
static __device__ inline Softmax softmax_row(real *kept, const real *z, int V, int Vp) {
    Softmax s = {-1e30f, 0};
    int step = blockDim.x * PACK;
    for (int first = threadIdx.x * PACK; first < Vp; first += CLASSIFIER_LOADS * step) {
        Pack x[CLASSIFIER_LOADS];
        for (int l = 0; l < CLASSIFIER_LOADS; l++)
            if (first + l * step < Vp) x[l] = pack_load(z + first + l * step);
        for (int l = 0; l < CLASSIFIER_LOADS; l++) {
            int j = first + l * step;
            if (j >= Vp) break;
            s = softmax_add(s, x[l], j, V);
            if (kept) pack_store(kept + j, x[l]);
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

template <int GRADIENT>
static __global__ void __launch_bounds__(CLASSIFIER_THREADS, 2)
classifier_kernel(wide *losses, wide *logsum, real *logits, const int32_t *targets, int V, int Vp, float z_loss) {
    SHARED_DYNAMIC(real, kept);
    int64_t row = blockIdx.x;
    real *z = logits + row * Vp;
    int target = targets[row];
    Softmax s = softmax_row(GRADIENT == GRADIENT_KEPT ? kept : nullptr, z, V, Vp);
    float z_target = to_float(z[target]);                      // every thread has it before the barriers of block_max let one write the row
    float max = block_max(s.max);
    float log_row = max + logf(block_sum(s.sum * classifier_exp(s.max, max)));
    if (threadIdx.x == 0) {
        losses[row] = log_row - z_target;
        logsum[row] = log_row;
    }
    ClassifierRow r = {target, V, Vp, log_row, 1 + 2 * z_loss * log_row};
    if (GRADIENT != GRADIENT_NONE) classifier_gradient(z, GRADIENT == GRADIENT_KEPT ? kept : z, r);
}

// losses[n] and logsum[n]; with gradient logits[n, Vp] becomes its own gradient. A thread for each 16 bytes of the row, up to CLASSIFIER_THREADS.
static inline void classifier(wide *losses, wide *logsum, real *logits, const int32_t *targets, int64_t n, int V, int Vp, float z_loss, bool gradient, Gpu *gpu) {
    int device, most, threads = CEIL_DIV(Vp / PACK, WARP) * WARP;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (threads > CLASSIFIER_THREADS) threads = CLASSIFIER_THREADS;
    size_t bytes = Vp * sizeof(real), reserved = 2 * WARP * sizeof(float);                     // the arrays of block_max and block_sum
    bool kept = gradient && bytes + reserved <= (size_t)most;
    auto kernel = kept ? classifier_kernel<GRADIENT_KEPT> : gradient ? classifier_kernel<GRADIENT_AGAIN> : classifier_kernel<GRADIENT_NONE>;
    LAUNCH(kernel, (unsigned)n, threads, kept ? bytes : 0, gpu->stream, losses, logsum, logits, targets, V, Vp, z_loss);
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
    int threads = n < SUMS_THREADS ? (int)CEIL_DIV(n, WARP) * WARP : SUMS_THREADS;
    LAUNCH(loss_sums_kernel, 1, threads, 0, gpu->stream, sums, losses, logsum, n, z_loss);
}
