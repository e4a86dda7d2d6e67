// classifier.cu: how the classifier came to be, in three steps. Each is checked against a loop in double and timed.
//
//   1 naive     three kernels: logsum, a thread a row; loss, a thread a row; gradient, a thread an element. Neighbouring threads read addresses a row apart
//   2 block     one kernel, a block a row, its columns side by side: reads the row for the maximum, for the sum and for the gradient, and writes it
//   3 mainline  llmc/loss.cuh: 16-byte loads, maximum and sum in one reading, the row kept in shared memory: read once, written once
//
// The floor is one reading and one writing of the logits at 4.3 TB/s. On a machine with a GPU, and without:
//   nvcc -std=c++17 -O3 -DREAL=__nv_bfloat16 -arch=native dev/kernels/classifier.cu -o build/classifier && build/classifier
//   make build/emu/emu.o
//   g++ -std=c++17 -DREAL=__nv_bfloat16 -isystem /usr/local/cuda/include -include dev/emu/emu.h -x c++ dev/kernels/classifier.cu -x none build/emu/emu.o -o build/classifier
//   build/classifier
#include <math.h>
#include <vector>
#include "../../llmc/loss.cuh"
#include "../../llmc/rand.h"

#if defined(__CUDACC__)
enum { ROWS = 16384, V = 50257, VP = 50304, CHECKED = 32, RUNS = 20, TIMED = 1 };
#else
enum { ROWS = 12, V = 1003, VP = 1024, CHECKED = 6, RUNS = 1, TIMED = 0 };
#endif
static const float Z_LOSS = 0.01f;

// What a step works on; the logits become their gradient.
typedef struct Work { wide *losses, *logsum; real *logits; const int32_t *targets; int64_t n; Gpu *gpu; } Work;

// ------------------------------------------------------------------------------------------------------------------ 1 naive

static __global__ void naive_logsum_kernel(wide *logsum, const real *logits, int64_t n) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    const real *z = logits + row * VP;
    float max = to_float(z[0]), sum = 0;
    for (int j = 1; j < V; j++) max = fmaxf(max, to_float(z[j]));
    for (int j = 0; j < V; j++) sum += expf(to_float(z[j]) - max);
    logsum[row] = max + logf(sum);
}

static __global__ void naive_loss_kernel(wide *losses, const wide *logsum, const real *logits, const int32_t *targets, int64_t n) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) losses[row] = logsum[row] - to_float(logits[row * VP + targets[row]]);
}

static __global__ void naive_gradient_kernel(real *logits, const wide *logsum, const int32_t *targets, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / VP, j = i % VP;
    if (row >= n) return;
    float p = (1 + 2 * Z_LOSS * logsum[row]) * expf(to_float(logits[i]) - logsum[row]) - (j == targets[row]);
    logits[i] = to_real(j < V ? p : 0);
}

static void naive(Work w) {
    unsigned rows = (unsigned)CEIL_DIV(w.n, 128), elements = (unsigned)CEIL_DIV(w.n * VP, 128);
    LAUNCH(naive_logsum_kernel, rows, 128, 0, w.gpu->stream, w.logsum, w.logits, w.n);
    LAUNCH(naive_loss_kernel, rows, 128, 0, w.gpu->stream, w.losses, w.logsum, w.logits, w.targets, w.n);
    LAUNCH(naive_gradient_kernel, elements, 128, 0, w.gpu->stream, w.logits, w.logsum, w.targets, w.n);
}

// ------------------------------------------------------------------------------------------------------------------ 2 block

static __global__ void block_kernel(wide *losses, wide *logsum, real *logits, const int32_t *targets) {
    int64_t row = blockIdx.x;
    real *z = logits + row * VP;
    float max = -FLT_MAX, sum = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) max = fmaxf(max, to_float(z[j]));
    max = block_max(max);
    for (int j = threadIdx.x; j < V; j += blockDim.x) sum += expf(to_float(z[j]) - max);
    float z_target = to_float(z[targets[row]]), log_row = max + logf(block_sum(sum)), both = 1 + 2 * Z_LOSS * log_row;
    if (threadIdx.x == 0) {
        losses[row] = log_row - z_target;
        logsum[row] = log_row;
    }
    for (int j = threadIdx.x; j < VP; j += blockDim.x) z[j] = to_real(j < V ? both * expf(to_float(z[j]) - log_row) - (j == targets[row]) : 0);
}

static void block(Work w) { LAUNCH(block_kernel, (unsigned)w.n, 256, 0, w.gpu->stream, w.losses, w.logsum, w.logits, w.targets); }

// ------------------------------------------------------------------------------------------------------------------ 3 mainline

static void mainline(Work w) { classifier(w.losses, w.logsum, w.logits, w.targets, w.n, V, VP, Z_LOSS, true, w.gpu); }

// ------------------------------------------------------------------------------------------------------------------ check and time

typedef struct Step { const char *name; void (*run)(Work w); } Step;
static const Step STEPS[] = {{"1 naive", naive}, {"2 block", block}, {"3 mainline", mainline}};

// CHECKED rows of logits and their targets repeat over all rows.
static void fill(Work w, const std::vector<real> &z) {
    for (int64_t row = 0; row < w.n; row += CHECKED) cudaCheck(cudaMemcpy(w.logits + row * VP, z.data(), z.size() * sizeof(real), cudaMemcpyHostToDevice));
}

// The largest difference from the truth over the last CHECKED rows: of losses, and of gradients relative to their size and to an even share, 1 / V.
static double worst(Work w, const std::vector<real> &z, const std::vector<int32_t> &targets) {
    std::vector<real> dz(z.size());
    std::vector<float> losses(CHECKED);
    int64_t first = w.n - CHECKED;
    double most = 0;
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(dz.data(), w.logits + first * VP, dz.size() * sizeof(real), cudaMemcpyDeviceToHost));
    cudaCheck(cudaMemcpy(losses.data(), w.losses + first, CHECKED * sizeof(float), cudaMemcpyDeviceToHost));
    for (int64_t row = 0; row < CHECKED; row++) {
        double sum = 0;
        for (int j = 0; j < V; j++) sum += exp((double)to_float(z[row * VP + j]));
        most = fmax(most, fabs(losses[row] - (log(sum) - to_float(z[row * VP + targets[row]]))));
        for (int j = 0; j < VP; j++) {
            double p = j < V ? (1 + 2 * (double)Z_LOSS * log(sum)) * exp((double)to_float(z[row * VP + j])) / sum - (j == targets[row]) : 0;
            most = fmax(most, fabs(to_float(dz[row * VP + j]) - p) / (fabs(p) + 1.0 / V));
        }
    }
    return most;
}

// Mean over RUNS, in milliseconds. The steps run on what the last one left: the same work.
static double milliseconds(Step step, Work w) {
    cudaEvent_t from, to;
    float ms = 0;
    cudaCheck(cudaEventCreate(&from));
    cudaCheck(cudaEventCreate(&to));
    cudaCheck(cudaEventRecord(from, w.gpu->stream));
    for (int run = 0; run < RUNS; run++) step.run(w);
    cudaCheck(cudaEventRecord(to, w.gpu->stream));
    cudaCheck(cudaEventSynchronize(to));
    cudaCheck(cudaEventElapsedTime(&ms, from, to));
    return ms / RUNS;
}

int main(void) {
    Gpu gpu = {};
    int32_t *device_targets;
    std::vector<real> z((size_t)CHECKED * VP);
    std::vector<int32_t> targets(ROWS);
    Work w = {nullptr, nullptr, nullptr, nullptr, ROWS, &gpu};
    double bytes = 2.0 * ROWS * VP * sizeof(real), allowed = sizeof(real) == 4 ? 1e-5 : 5e-3;
    bool wrong = false;
    gpu_open(&gpu);
    for (size_t i = 0; i < z.size(); i++) z[i] = to_real((float)(2 * rand_normal(1, i)));
    for (int row = 0; row < ROWS; row++) targets[row] = (int32_t)(rand_uniform(2, row % CHECKED) * V);
    cudaCheck(cudaMalloc((void **)&w.losses, ROWS * sizeof(wide)));
    cudaCheck(cudaMalloc((void **)&w.logsum, ROWS * sizeof(wide)));
    cudaCheck(cudaMalloc((void **)&w.logits, (size_t)ROWS * VP * sizeof(real)));
    cudaCheck(cudaMalloc((void **)&device_targets, ROWS * sizeof(int32_t)));
    cudaCheck(cudaMemcpy(device_targets, targets.data(), ROWS * sizeof(int32_t), cudaMemcpyHostToDevice));
    w.targets = device_targets;
    printf("%d rows of %d columns, %d of them real, %d bytes each; floor %.3f ms\n", ROWS, VP, V, (int)sizeof(real), bytes / 4.3e9);
    if (!TIMED) printf("no GPU: the emulator has no time to measure\n");
    for (const Step &step : STEPS) {
        fill(w, z);
        step.run(w);
        double error = worst(w, z, targets), ms = TIMED ? milliseconds(step, w) : 0;
        wrong |= !(error <= allowed);
        printf("%-12s largest error %.2g (allowed %.2g)", step.name, error, allowed);
        if (TIMED) printf("  %8.3f ms  %6.0f GB/s  %3.0f %% of the floor", ms, bytes / ms / 1e6, 100 * bytes / 4.3e9 / ms);
        printf("%s\n", error <= allowed ? "" : "  WRONG");
    }
    return wrong;
}
