// peak.h: the most that this machine can do, measured: matrix products in registers, in FLOP/s.
// (Memory bandwidth: dev/bench/cpu/bench.c.)
//
// peak_products runs the innermost step of gemm.h, gemm_dot, on as many vectors as its kernel
// holds: multiply-adds of floats, one instruction where the CPU has it and
// -ffp-contract=fast allows it. With BF16_PRODUCTS it is the dot product of pairs, or AMX's product
// of tiles, where the build may use them; elsewhere bfloat16 runs at the speed of floats. Units
// that gemm.h does not use (SME, bfmmla) do not count.
//
// All OpenMP threads work at once, and each times its own short runs. The result is the sum of
// their rates, each from the median of the times. The median is not affected by other programs,
// which take a core for some milliseconds, or by moments in which a thread has a core or the memory
// to itself.
#pragma once
#include "run/spikes.h"
#include "gemm.h"

enum {
    PEAK_STEPS = 1 << 15,  // of a chain of dependent products, in one run
    PEAK_BLOCK = 1 << 16,  // elements of each of a block's three arrays
    PEAK_RUNS = 4096,      // at most
};

// The rates of all threads added up; one run of `kernel` does `work`. The runs of a thread go
// through its own `blocks` blocks in turn.
static inline double peak_rate(double seconds, double work, int64_t blocks,
                               void (*kernel)(float *block)) {
    double sum = 0;
#pragma omp parallel reduction(+ : sum)
    {
        double times[PEAK_RUNS];
        size_t bytes = (size_t)blocks * 3 * PEAK_BLOCK * sizeof(float);
        float *memory = check_alloc(bytes, "measuring this machine's peak");
        for (int64_t i = 0; i < blocks * 3 * PEAK_BLOCK; i++) memory[i] = 1;
        int runs = 0;
#pragma omp barrier
        double end = clock_seconds() + seconds;
        for (double now = 0; runs < PEAK_RUNS && now < end; runs++) {
            double begun = clock_seconds();
            kernel(memory + runs % blocks * 3 * PEAK_BLOCK);
            __asm__ volatile("" : : "r"(memory) : "memory");  // the compiler must keep the result
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
// 2 MR chains of dependent products. Each product of floats has the chain's last value as a factor,
// and chains begin with different values: the compiler can neither move a product out of the loop
// nor merge two chains.
static inline void peak_products_run(float *block) {
    Vec c[2 * MR], sum = {0}, b = sum + (real)0.001;
    Unit a = PER_UNIT == 1 ? (Unit)0.999 : 1;
#pragma GCC unroll 24
    for (int i = 0; i < 2 * MR; i++) c[i] = b + (real)i;
    for (int k = 0; k < PEAK_STEPS; k++) {
#pragma GCC unroll 24
        for (int i = 0; i < 2 * MR; i++)
            c[i] = PER_UNIT == 1 ? gemm_dot(b, a, (Units)c[i]) : gemm_dot(c[i], a, (Units)b);
    }
#pragma GCC unroll 24
    for (int i = 0; i < 2 * MR; i++) sum += c[i];
    memcpy(block, &sum, sizeof sum);
}
#endif

static inline double peak_products(double seconds) {
    double flops = 2.0 * MR * NR * STEP * PER_UNIT * PEAK_STEPS;
    return peak_rate(seconds, flops, 1, peak_products_run);
}
