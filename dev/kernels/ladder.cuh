// ladder.cuh: what the ladders of dev/kernels share. A ladder climbs from the plainest kernel to
// the one the trainer uses; each step is checked against plain loops in double and timed against
// its computed floor (llmc/gpu.cuh). Timed on a GPU only: the emulator knows no time.
#pragma once
#include "../test/gpu_test.cuh"
#include <algorithm>

#if defined(__CUDACC__) && !defined(UNTIMED)    // dev/ptx defines it
enum { TIMED = 1 };
#else
enum { TIMED = 0 };
#endif
static const double BYTES_PER_MS = 4.3e9, FLOP_PER_MS = 7.9e11;

static int ladder_failed;

// The result of a step: an activation, or floats. before: what is there when the step begins;
// nullptr: zeros.
typedef struct LadderResult {
    const char *what;
    real *got;
    wide *got_wide;
    const Values *want;
    const real *before = nullptr;
} LadderResult;

// A device array of these values `times` times over: so the truth is a small part of a problem as
// large as the trainer's.
static inline real *device_repeat(Values *values, int times) {
    real *once = device_copy<real>(values), *all = device_empty<real>(values->size() * times);
    for (int i = 0; i < times; i++)
        cudaCheck(cudaMemcpy(all + i * values->size(), once, values->size() * sizeof(real),
                             cudaMemcpyDeviceToDevice));
    cudaCheck(cudaFree(once));
    return all;
}

static inline void ladder_header(const char *title, double floor) {
    printf("\n%s\n", title);
    if (TIMED)
        printf("floor %.3f ms\n%-34s %12s %10s %14s\n", floor, "step", "error", "ms",
               "of the floor");
    else printf("%-34s %12s\n", "step", "error");
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

// One line of the table. launch() runs the step, and may run again, on what it has left; floor: in
// milliseconds.
template <typename F> static void ladder_step(const char *name, double floor,
                                              const std::vector<LadderResult> &results, Gpu *gpu,
                                              F launch) {
    double error = 0;
    for (const LadderResult &r : results) {  // what the step before has left is not this one's
        size_t n = r.want->size();
        if (r.before)
            cudaCheck(cudaMemcpy(r.got, r.before, n * sizeof(real), cudaMemcpyDeviceToDevice));
        else if (r.got) cudaCheck(cudaMemset(r.got, 0, n * sizeof(real)));
        else cudaCheck(cudaMemset(r.got_wide, 0, n * sizeof(wide)));
    }
    launch();
    for (const LadderResult &r : results) {
        double e = nmse(r.got ? host_values(r.got, r.want->size())
                              : host_values(r.got_wide, r.want->size()),
                        *r.want);
        if (!(e <= TOLERANCE)) {
            printf("FAILED %s: %s has a normalized mean squared error of %.3g, allowed %.3g\n",
                   name, r.what, e, TOLERANCE);
            ladder_failed++;
        }
        error = std::max(error, e);
    }
    double ms = TIMED ? ladder_time(launch, gpu->stream) : 0;
    if (TIMED) printf("%-34s %12.2e %10.4f %13.0f%%\n", name, error, ms, 100 * floor / ms);
    else printf("%-34s %12.2e   not timed: this is the emulator\n", name, error);
}

// The last line, and the exit status. main may be called again.
static inline int ladder_end(void) {
    int failed = ladder_failed;
    ladder_failed = 0;
    printf("\n%s\n", failed ? "FAILED" : "all steps agree with double");
    return failed > 0;
}
