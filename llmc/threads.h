// threads.h: how the CPU's threads share the products and heads of a layer.
//
// A thread takes its own share of the pieces, in order, and then what others have left of theirs. So the same tokens stay with the same core, from layer to layer, whose L2 cache
// has what it wrote last; and threads, which are never equally fast, end together.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static inline int max_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static inline int thread_id(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static inline bool in_parallel(void) {
#ifdef _OPENMP
    return omp_in_parallel();
#else
    return false;
#endif
}

enum { MOST_SHARES = 128 };                                                 // more threads than that have a share between them

// Made before a parallel region, in which each thread takes until nothing is left.
typedef struct { int64_t pieces; int count; int64_t taken[MOST_SHARES]; } Shares;
static inline Shares shares_make(int64_t pieces) {
    Shares s = {pieces, max_threads() < MOST_SHARES ? max_threads() : MOST_SHARES, {0}};
    return s;
}

// A piece that nobody else gets, or -1.
static inline int64_t shares_take(Shares *s) {
    for (int i = 0; i < s->count; i++) {
        int whose = (thread_id() + i) % s->count;
        int64_t from = s->pieces * whose / s->count, size = s->pieces * (whose + 1) / s->count - from, at;
#pragma omp atomic read
        at = s->taken[whose];
        if (at >= size) continue;                                           // most often known without a write that others wait for
#pragma omp atomic capture
        at = s->taken[whose]++;
        if (at < size) return from + at;
    }
    return -1;
}
