// kinds.cuh: layers that have kernels of two kinds (LAYER_NAMES of linear.cuh): by mma.sync, and on
// compute capability 9.0 by wgmma. Both are compared when training begins (--kernels).
//
// The kernels by wgmma have run in an emulator, and as PTX on a CPU, and on no GPU yet. So a run
// that may use them first compares all of their results with those of mma.sync, at its own sizes,
// on random numbers. Kernels that differ are not used, and a line says so.
//
// A layer declares a trial, its arrays for a comparison, with
//   trial_run(trial, layer, wgmma, gpu)             runs one kind: 0 by mma.sync, 1 by wgmma, which
//                                                   is also the index of its results
//   trial_agrees(trial, layer, &error, gpu)         runs both and compares their results
#pragma once
#include "linear.cuh"
#include "rand.h"
#include "run/trainer.h"

static inline bool by_wgmma(const Gpu *gpu, int layer) {
    return gpu->plans && gpu->plans->kinds[layer] == BY_WGMMA;
}

// Calls run() with one kind of kernels for a layer.
template <typename F> static void by_kind(int layer, int wgmma, Gpu *gpu, F run) {
    uint8_t *used = &gpu->plans->kinds[layer], before = *used;
    *used = wgmma ? BY_WGMMA : BY_MMA;
    run();
    *used = before;
}

// ------------------------------------------------------------------------------------------ trials

// Memory that nobody uses yet, from which a trial takes its arrays. They fit if `at` is at most
// `end` then.
struct Arena {
    real *at, *end;
    template <typename T> T *take(int64_t count) {
        T *array = (T *)at;
        at += CEIL_DIV(count * (int64_t)sizeof(T), 16) * PACK;
        return array;
    }
};

// -------------------------------------------------------------------------------------- comparison

enum { COMPARE_BLOCKS = 256, COMPARE_THREADS = 256 };
// Two kernels round the same sums at different places. Their results agree within SAME_ERROR, a
// normalized mean squared error, and each value within SAME_VALUE of its size plus the root mean
// square.
static constexpr double SAME_ERROR = 1e-4;
static constexpr float SAME_VALUE = 0.1f;

// Numbers from -2 to 2, by a hash of their place.
static __global__ void fill_kernel(real *x, int64_t n) {
    for (int64_t i = grid_thread(); i < n; i += grid_threads())
        x[i] = to_real((float)(rand_at(0, i) >> 40) * 0x1p-22f - 2);
}

static inline void fill_random(real *x, int64_t n, Gpu *gpu) {
    LAUNCH(fill_kernel, COMPARE_BLOCKS, COMPARE_THREADS, 0, gpu->stream, x, n);
}

// Each block's sum (x - y)^2, sum y^2, and how many values are too far apart.
template <typename T>
__global__ void compare_kernel(Four *sums, const T *x, const T *y, int64_t n, float size) {
    float apart = 0, square = 0, far = 0;
    for (int64_t i = grid_thread(); i < n; i += grid_threads()) {
        float a = to_float(x[i]), b = to_float(y[i]);
        apart += (a - b) * (a - b);
        square += b * b;
        far += !(fabsf(a - b) <= SAME_VALUE * (fabsf(b) + size));  // NaN is far from anything
    }
    Four sum = {{block_sum(apart), block_sum(square), block_sum(far), 0}};
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <typename T>
static Four compare_sums(const T *x, const T *y, int64_t n, float size, Gpu *gpu) {
    Four *sums = scratch_for<Four>(COMPARE_BLOCKS, gpu), host[COMPARE_BLOCKS], all = {};
    LAUNCH(compare_kernel<T>, COMPARE_BLOCKS, COMPARE_THREADS, 0, gpu->stream, sums, x, y, n, size);
    cudaCheck(cudaStreamSynchronize(gpu->stream));
    cudaCheck(cudaMemcpy(host, sums, sizeof host, cudaMemcpyDeviceToHost));
    for (const Four &block : host) for (int i = 0; i < 3; i++) all.v[i] += block.v[i];
    return all;
}

// Whether x equals y up to rounding. *error: raised to their normalized mean squared error, if that
// is larger.
template <typename T>
static bool compare(const T *x, const T *y, int64_t n, double *error, Gpu *gpu) {
    Four sums = compare_sums(x, y, n, 0, gpu);
    double apart = sums.v[0] / sums.v[1], size = sqrt((double)sums.v[1] / n);
    if (!(apart <= *error)) *error = apart;
    return apart <= SAME_ERROR && compare_sums(x, y, n, (float)size, gpu).v[2] == 0;
}

// -------------------------------------------------------------------------------------- the choice

// The kind of a layer, by --kernels. With `auto` an earlier choice stays; if there is none,
// tuning takes the faster kind.
template <typename Trial>
static uint8_t kind_choose(const Trial &t, int layer, int wanted, Gpu *gpu) {
    int before = gpu->plans->kinds[layer];
    const char *name = LAYER_NAMES[layer];
    double error = 0;
    bool asked = wanted == KERNELS_WGMMA || before == BY_WGMMA;
    bool open = before == UNCHOSEN && gpu->plans->tuning;  // the times decide
    if (wanted == KERNELS_MMA || !(asked || open)) return BY_MMA;
    // A kernel that hangs or faults would end the run here.
    printf("kernels: comparing %s by wgmma with mma.sync; if it hangs: --kernels mma\n", name);
    fflush(stdout);
    if (!trial_agrees(t, layer, &error, gpu)) {
        printf("note: %s by wgmma is wrong on this GPU, a normalized mean squared error of %.2g "
               "from mma.sync, which is used\n  -> please report it with the GPU's name and driver "
               "(nvidia-smi)\n", name, error);
        return BY_MMA;
    }
    if (asked) return BY_WGMMA;
    auto time_by = [&](int wgmma) {
        return fastest(gpu, [&] { return trial_run(t, layer, wgmma, gpu), true; });
    };
    float mma = time_by(0), wgmma = time_by(1);
    printf("kernels: %s by %s: wgmma takes %.3f ms, mma.sync %.3f\n", name,
           wgmma < mma ? "wgmma" : "mma.sync", wgmma, mma);
    return wgmma < mma ? BY_WGMMA : BY_MMA;
}
