// peak.h: what this machine can do at most, measured: products in registers, and memory far beyond the caches. Each function takes the seconds to spend.
//
//   peak_fp32        FLOP/s of c = c a + b on vectors of floats, 2 FLOP an element: one instruction where the CPU has it and -ffp-contract=fast allows it
//   peak_bf16        FLOP/s of c += a0 b0 + a1 b1, pairs of bfloat16 into floats, by the instruction that the build may use: AVX512_BF16's or AArch64's dot
//                    product. Where there is none, peak_fp32: bfloat16 has to be widened first. Matrix units (AMX, SME, bfmmla) do not count.
//   peak_bandwidth   bytes/s of a[i] = b[i] + s c[i], 12 bytes an element, as STREAM counts (McCalpin 1995); that a is read before it is written comes on top
//
// All OpenMP threads work at once and time their own short runs; the result is the sum of their rates, each from the median of its times. So other programs, which
// take a core for some milliseconds, do not show, and neither does a moment in which a thread has a core or the memory for itself.
#pragma once
#include "logger.h"
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#include <immintrin.h>
typedef __m512 PeakSum;
typedef __m512bh PeakPairs;
#define peak_dot _mm512_dpbf16_ps
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
typedef float32x4_t PeakSum;
typedef bfloat16x8_t PeakPairs;
#define peak_dot vbfdotq_f32
#endif

// Chains of products side by side: enough to cover an instruction's latency on all of a core's units, few enough for its registers.
#if defined(__AVX512F__)
enum { PEAK_VECTOR = 64, PEAK_CHAINS = 24 };
#elif defined(__AVX__)
enum { PEAK_VECTOR = 32, PEAK_CHAINS = 12 };
#elif defined(__aarch64__)
enum { PEAK_VECTOR = 16, PEAK_CHAINS = 24 };
#else
enum { PEAK_VECTOR = 16, PEAK_CHAINS = 12 };
#endif
enum { PEAK_STEPS = 1 << 15, PEAK_BLOCK = 1 << 16, PEAK_RUNS = 4096 };    // of a run: steps of a chain, or elements of each array; runs at most
typedef float PeakVec __attribute__((vector_size(PEAK_VECTOR)));

static inline int peak_order(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

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
        qsort(times, (size_t)runs, sizeof *times, peak_order);
        sum += work / times[runs / 2];
        free(memory);
    }
    return sum;
}

// A chain's value is its next factor, and no two begin alike: the compiler can neither move a product out of the loop nor make one chain of two.
static inline void peak_fp32_run(float *block) {
    PeakVec c[PEAK_CHAINS], sum = {0}, a = sum + 0.999f, b = sum + 0.001f;
#pragma GCC unroll 24
    for (int i = 0; i < PEAK_CHAINS; i++) c[i] = a + (float)i;
    for (int k = 0; k < PEAK_STEPS; k++) {
#pragma GCC unroll 24
        for (int i = 0; i < PEAK_CHAINS; i++) c[i] = c[i] * a + b;
    }
#pragma GCC unroll 24
    for (int i = 0; i < PEAK_CHAINS; i++) sum += c[i];
    memcpy(block, &sum, sizeof sum);
}

static inline double peak_fp32(double seconds) { return peak_rate(seconds, 2.0 * PEAK_VECTOR / 4 * PEAK_CHAINS * PEAK_STEPS, 1, peak_fp32_run); }

#ifdef peak_dot
static inline void peak_bf16_run(float *block) {
    PeakSum c[PEAK_CHAINS], sum = {0};
    PeakPairs pairs;
    memcpy(&pairs, block, sizeof pairs);
#pragma GCC unroll 24
    for (int i = 0; i < PEAK_CHAINS; i++) c[i] = sum + (float)i;
    for (int k = 0; k < PEAK_STEPS; k++) {
#pragma GCC unroll 24
        for (int i = 0; i < PEAK_CHAINS; i++) c[i] = peak_dot(c[i], pairs, pairs);
    }
#pragma GCC unroll 24
    for (int i = 0; i < PEAK_CHAINS; i++) sum += c[i];
    memcpy(block + sizeof pairs, &sum, sizeof sum);
}

static inline double peak_bf16(double seconds) { return peak_rate(seconds, 4.0 * sizeof(PeakSum) / 4 * PEAK_CHAINS * PEAK_STEPS, 1, peak_bf16_run); }
#else
static inline double peak_bf16(double seconds) { return peak_fp32(seconds); }
#endif

static inline void peak_bandwidth_run(float *block) {
    float *restrict a = block, *restrict b = a + PEAK_BLOCK, *restrict c = b + PEAK_BLOCK;
    for (int64_t i = 0; i < PEAK_BLOCK; i++) a[i] = b[i] + 0.5f * c[i];
}

// Together four times the last-level cache, 192 MiB, and 48 MiB a thread, whichever is most: some systems do not say how large the cache is.
static inline double peak_bandwidth(double seconds) {
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    threads++;
    double cache = 4.0 * (double)sysconf(_SC_LEVEL3_CACHE_SIZE) / 1048576, MiB = fmax(fmax(cache, 192), 48.0 * threads);
    return peak_rate(seconds, 3.0 * sizeof(float) * PEAK_BLOCK, (int64_t)(MiB / threads / 0.75) + 1, peak_bandwidth_run);
}
