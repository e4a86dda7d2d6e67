// ladder.cuh: what the ladders of dev/kernels share. A ladder climbs from the plainest kernel to the one the trainer uses; each step is checked against plain
// loops in double and timed against the floor, the time its bytes take at 4.3 TB/s. Timed on a GPU only: the emulator knows no time.
#pragma once
#include "../test/gpu_test.cuh"
#include <algorithm>

static int ladder_failed;

// What a step writes: an activation, or a gradient of parameters to which it adds.
typedef struct LadderResult { const char *what; real *got; wide *got_wide; const Values *want; } LadderResult;

static inline void ladder_header(const char *title) {
    printf("\n%s\n%-34s %12s %10s %8s %14s\n", title, "step", "error", "ms", "TB/s", "of the floor");
}

// Milliseconds of one launch: the median of 21, after a few that do not count.
template <typename F> static float ladder_time(F launch, cudaStream_t stream) {
    std::vector<float> ms(25);
    cudaEvent_t begin, end;
    cudaCheck(cudaEventCreate(&begin));
    cudaCheck(cudaEventCreate(&end));
    for (float &m : ms) {
        cudaCheck(cudaEventRecord(begin, stream));
        launch();
        cudaCheck(cudaEventRecord(end, stream));
        cudaCheck(cudaEventSynchronize(end));
        cudaCheck(cudaEventElapsedTime(&m, begin, end));
    }
    std::sort(ms.begin() + 4, ms.end());
    return ms[14];
}

// One line of the table. launch() runs the step, and may run again; bytes: what it has to move.
template <typename F> static void ladder_step(const char *name, double bytes, const std::vector<LadderResult> &results, Gpu *gpu, F launch) {
    double error = 0;
    for (const LadderResult &r : results) {                    // what the step before has left is not this one's
        if (r.got) cudaCheck(cudaMemset(r.got, 0, r.want->size() * sizeof(real)));
        else cudaCheck(cudaMemset(r.got_wide, 0, r.want->size() * sizeof(wide)));
    }
    launch();
    for (const LadderResult &r : results) {
        double e = nmse(r.got ? host_values(r.got, r.want->size()) : host_values(r.got_wide, r.want->size()), *r.want);
        if (!(e <= TOLERANCE)) printf("FAILED %s: %s has a normalized mean squared error of %.3g, allowed %.3g\n", name, r.what, e, TOLERANCE), ladder_failed++;
        error = std::max(error, e);
    }
#if defined(__CUDACC__)
    double ms = ladder_time(launch, gpu->stream), tb = bytes / ms / 1e9;
    printf("%-34s %12.2e %10.4f %8.2f %13.0f%%\n", name, error, ms, tb, 100 * tb / 4.3);
#else
    (void)ladder_time<F>, (void)gpu, (void)bytes;
    printf("%-34s %12.2e   not timed: this is the emulator\n", name, error);
#endif
}
