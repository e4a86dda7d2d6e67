// peak.h: what this machine can do at most, measured: products in registers. (Memory far beyond the caches: dev/bench/cpu/bench.c.)
//
//   peak_products    FLOP/s of gemm.h's innermost step, in registers: gemm_dot on as many vectors as its kernel holds, multiply-adds of floats, one instruction where
//                    the CPU has it and -ffp-contract=fast allows it; with BF16_PRODUCTS the dot product of pairs, or AMX's of tiles, where the build may use
//                    it. Where it may not, bfloat16 is widened first, at the speed of floats. Units that gemm.h does not use (SME, bfmmla) do not count.
//
// All OpenMP threads work at once and time their own short runs; the result is the sum of their rates, each from the median of its times. So other programs, which
// take a core for some milliseconds, do not show, and neither does a moment in which a thread has a core or the memory for itself.
#pragma once
#include "run/spikes.h"
#include "gemm.h"

enum { PEAK_STEPS = 1 << 15, PEAK_BLOCK = 1 << 16, PEAK_RUNS = 4096 };    // of a run: steps of a chain, or elements of each array; runs at most

// The rates of all threads together, where a run of `kernel` does `work`. Each run has another of the thread's own blocks of three arrays.
static inline double peak_rate(double seconds, double work, int64_t blocks, void (*kernel)(float *block)) {
    double sum = 0;
#pragma omp parallel reduction(+ : sum)
    {
        double times[PEAK_RUNS];
        float *memory = (float *)malloc((size_t)blocks * 3 * PEAK_BLOCK * sizeof *memory);
        CHECK(memory, "no memory to measure its bandwidth (%.0f MiB a thread)\n  -> a smaller OMP_NUM_THREADS", (double)blocks * 0.75);
        for (int64_t i = 0; i < blocks * 3 * PEAK_BLOCK; i++) memory[i] = 1;
        int runs = 0;
#pragma omp barrier
        for (double end = clock_seconds() + seconds, now = 0; runs < PEAK_RUNS && now < end; runs++) {
            double begun = clock_seconds();
            kernel(memory + runs % blocks * 3 * PEAK_BLOCK);
            __asm__ volatile("" : : "r"(memory) : "memory");         // for all the compiler knows, somebody reads the result
            now = clock_seconds();
            times[runs] = now - begun;
        }
        sum += work / spike_median(times, runs);
        free(memory);
    }
    return sum;
}

#if AMX
static inline void peak_products_run(float *block) {
    gemm_begin();
    _tile_loadd(4, block, 64);
    _tile_loadd(5, block, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < PEAK_STEPS; k++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, block, 64);
    gemm_end();
}
#else
// Of numbers, a chain's value is its next factor, and no two begin alike: the compiler can neither move a product out of the loop nor make one chain of two.
static inline void peak_products_run(float *block) {
    Vec c[2 * MR], sum = {0}, b = sum + (real)0.001;
    Unit a = PER_UNIT == 1 ? (Unit)0.999 : 1;
#pragma GCC unroll 24
    for (int i = 0; i < 2 * MR; i++) c[i] = b + (real)i;
    for (int k = 0; k < PEAK_STEPS; k++) {
#pragma GCC unroll 24
        for (int i = 0; i < 2 * MR; i++) c[i] = PER_UNIT == 1 ? gemm_dot(b, a, (Units)c[i]) : gemm_dot(c[i], a, (Units)b);
    }
#pragma GCC unroll 24
    for (int i = 0; i < 2 * MR; i++) sum += c[i];
    memcpy(block, &sum, sizeof sum);
}
#endif

static inline double peak_products(double seconds) { return peak_rate(seconds, 2.0 * MR * NR * STEP * PER_UNIT * PEAK_STEPS, 1, peak_products_run); }
