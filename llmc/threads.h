// threads.h: how the CPU's threads share the matrix products and attention heads of a layer.
//
// Work stealing: each thread takes the pieces of its own share in order, then what others have
// left of theirs. So a core keeps the same tokens from layer to layer, and its L2 cache holds what
// it wrote last; and threads, which are never equally fast, finish together.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_in_parallel(void) { return 0; }
#endif

// Called when a program begins. Makes an idle OpenMP thread spin for only some microseconds, then
// sleep and leave its core to other programs. With the default, milliseconds, four runs on two
// cores take thirty times as long as one. The runtimes read their settings before main, so the
// program restarts itself with them. The user's own setting wins.
static inline void threads_begin(char **argv) {
#ifdef _OPENMP
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME")) return;
    char program[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) return;
    // gcc's counts rounds of the waiting loop, clang's milliseconds.
    if (setenv("GOMP_SPINCOUNT", "1000", 1) || setenv("KMP_BLOCKTIME", "1", 1)) return;
    program[n] = 0;
    execv(program, argv);                                       // where it fails, threads spin
#else
    (void)argv;
#endif
}

enum { MAX_SHARES = 128 };  // threads beyond these have no share of their own, and only steal

// Made before a parallel region, in which each thread takes pieces until none is left.
typedef struct {
    int64_t pieces;             // numbered 0 .. pieces - 1
    int count;                  // shares, one for each thread
    int64_t taken[MAX_SHARES];  // pieces taken of each share
} Shares;

static inline Shares shares_make(int64_t pieces) {
    int threads = omp_get_max_threads();
    Shares s = {pieces, threads < MAX_SHARES ? threads : MAX_SHARES, {0}};
    return s;
}

// A piece that no other thread gets, or -1.
static inline int64_t shares_take(Shares *s) {
    for (int i = 0; i < s->count; i++) {
        int share = (omp_get_thread_num() + i) % s->count;
        int64_t from = s->pieces * share / s->count;
        int64_t size = s->pieces * (share + 1) / s->count - from, at;
#pragma omp atomic read
        at = s->taken[share];
        if (at >= size) continue;  // usually this read suffices: a write would make others wait
#pragma omp atomic capture
        at = s->taken[share]++;
        if (at < size) return from + at;
    }
    return -1;
}
