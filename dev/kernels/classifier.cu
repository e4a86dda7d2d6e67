// classifier.cu: how the classifier came to be, in three steps. Each is checked against a loop in
// double and timed.
//
//   1 naive     three kernels: logsum, a thread a row; loss, a thread a row; gradient, a thread an
//               element. Neighbouring threads read addresses a row apart
//   2 block     one kernel, a block a row, its columns side by side: reads the row for the maximum,
//               for the sum and for the gradient, and writes it
//   3 mainline  llmc/loss.cuh: 16-byte loads, maximum and sum in one reading, the row kept in
//               shared memory: read once, written once
//
// The floor is one reading and one writing of the logits. To run: sh dev/kernels/run.sh; in the
// emulator sizes are small and there are no times.
#include "ladder.cuh"
#include "../../llmc/loss.cuh"

// The last CHECKED rows are compared with the truth; the logits of the rows before are the same,
// again and again.
enum {
    ROWS = TIMED ? 16384 : 12,
    V = TIMED ? 50257 : 1003,
    VP = TIMED ? 50304 : 1024,
    CHECKED = TIMED ? 32 : 6
};
static const float Z_LOSS = 0.01f;

// The arrays that a step works on; the logits become their gradient.
typedef struct Work {
    wide *losses, *logsum;
    real *logits;
    const int32_t *targets;
    int64_t n;
    Gpu *gpu;
} Work;

// ----------------------------------------------------------------------------------------- 1 naive

static __global__ void naive_logsum_kernel(wide *logsum, const real *logits, int64_t n) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    const real *z = logits + row * VP;
    float max = to_float(z[0]), sum = 0;
    for (int j = 1; j < V; j++) max = fmaxf(max, to_float(z[j]));
    for (int j = 0; j < V; j++) sum += expf(to_float(z[j]) - max);
    logsum[row] = max + logf(sum);
}

static __global__ void naive_loss_kernel(wide *losses, const wide *logsum, const real *logits,
                                         const int32_t *targets, int64_t n) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < n) losses[row] = logsum[row] - to_float(logits[row * VP + targets[row]]);
}

static __global__ void naive_gradient_kernel(real *logits, const wide *logsum,
                                             const int32_t *targets, int64_t n) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / VP, j = i % VP;
    if (row >= n) return;
    float p = (1 + 2 * Z_LOSS * logsum[row]) * expf(to_float(logits[i]) - logsum[row]) -
              (j == targets[row]);
    logits[i] = to_real(j < V ? p : 0);
}

static void naive(Work w) {
    unsigned rows = (unsigned)CEIL_DIV(w.n, 128), elements = (unsigned)CEIL_DIV(w.n * VP, 128);
    LAUNCH(naive_logsum_kernel, rows, 128, 0, w.gpu->stream, w.logsum, w.logits, w.n);
    LAUNCH(naive_loss_kernel, rows, 128, 0, w.gpu->stream, w.losses, w.logsum, w.logits, w.targets,
           w.n);
    LAUNCH(naive_gradient_kernel, elements, 128, 0, w.gpu->stream, w.logits, w.logsum, w.targets,
           w.n);
}

// ----------------------------------------------------------------------------------------- 2 block

static __global__ void block_kernel(wide *losses, wide *logsum, real *logits,
                                    const int32_t *targets) {
    int64_t row = blockIdx.x;
    real *z = logits + row * VP;
    float max = -FLT_MAX, sum = 0;
    for (int j = threadIdx.x; j < V; j += blockDim.x) max = fmaxf(max, to_float(z[j]));
    max = block_max(max);
    for (int j = threadIdx.x; j < V; j += blockDim.x) sum += expf(to_float(z[j]) - max);
    float z_target = to_float(z[targets[row]]);
    float log_row = max + logf(block_sum(sum));
    float both = 1 + 2 * Z_LOSS * log_row;
    if (threadIdx.x == 0) {
        losses[row] = log_row - z_target;
        logsum[row] = log_row;
    }
    for (int j = threadIdx.x; j < VP; j += blockDim.x)
        z[j] = to_real(j < V ? both * expf(to_float(z[j]) - log_row) - (j == targets[row]) : 0);
}

static void block(Work w) {
    LAUNCH(block_kernel, (unsigned)w.n, 256, 0, w.gpu->stream, w.losses, w.logsum, w.logits,
           w.targets);
}

// --------------------------------------------------------------------------------------- the truth

typedef struct Solution { Values losses, dz; } Solution;

static Solution solve(const Values &z, const std::vector<int32_t> &targets) {
    Solution s = {Values(CHECKED), Values(z.size())};
    for (int64_t row = 0; row < CHECKED; row++) {
        const double *z_row = &z[row * VP];
        double sum = 0;
        for (int j = 0; j < V; j++) sum += exp(z_row[j]);
        s.losses[row] = log(sum) - z_row[targets[row]];
        for (int j = 0; j < V; j++)
            s.dz[row * VP + j] =
                (1 + 2 * (double)Z_LOSS * log(sum)) * exp(z_row[j]) / sum - (j == targets[row]);
    }
    return s;
}

int main(void) {
    // a spread that gives some columns beside the target a part of the probability
    Values z = random_values((size_t)CHECKED * VP, 1, 4);
    // who takes in the padding, or leaves out the last column, is seen
    for (size_t i = 0; i < z.size(); i++) if (i % VP >= V - 1) z[i] = 16;
    std::vector<int32_t> targets(ROWS);
    int32_t *device_targets;
    for (int row = 0; row < ROWS; row++)
        targets[row] = (int32_t)(rand_uniform(2, row % CHECKED) * V);
    cudaCheck(cudaMalloc((void **)&device_targets, ROWS * sizeof(int32_t)));
    cudaCheck(cudaMemcpy(device_targets, targets.data(), ROWS * sizeof(int32_t),
                         cudaMemcpyHostToDevice));
    Gpu *gpu = test_gpu();
    real *before = device_repeat(&z, 1), *logits = device_repeat(&z, ROWS / CHECKED);
    Work w = {
        device_empty<wide>(ROWS), device_empty<wide>(ROWS), logits, device_targets, ROWS, gpu};
    Solution t = solve(z, targets);
    int64_t first = ROWS - CHECKED;
    double floor = 2.0 * ROWS * VP * sizeof(real) / BYTES_PER_MS;

    ladder_header("loss and gradient: reads logits, writes their gradient in their place", floor);
    std::vector<LadderResult> results = {{"loss", nullptr, w.losses + first, &t.losses},
                                         {"dlogits", logits + first * VP, nullptr, &t.dz, before}};
    ladder_step("1 naive", floor, results, gpu, [&] { naive(w); });
    ladder_step("2 block", floor, results, gpu, [&] { block(w); });
    ladder_step("3 llmc/loss.cuh", floor, results, gpu, [&] {
        classifier({w.logits, w.losses, w.logsum, w.targets, w.n, V, VP, Z_LOSS, {}}, true, gpu);
    });
    return ladder_end();
}
