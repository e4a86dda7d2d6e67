// fuzz.h: what the fuzz targets (libFuzzer) share: a refusal that comes back instead of ending the
// process, memory and files that are accounted for, inputs as files, and must(), which ends the
// process as a crash does.
//
// A target includes this after the system's headers and before the code under test: from here on
// exit, fopen, fclose and vsnprintf mean the ones below (calls.h). A refusal jumps back to
// fuzz_once, which frees what the refused code could not. The text of a refusal is held to the rule
// that it says what to do ("->"); code that was not refused is held to have freed all its memory.
// dev/fuzz/run.sh builds and runs the targets.
#pragma once
#include <dirent.h>
#include <sanitizer/allocator_interface.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define must(cond)                     \
    do {                               \
        if (!(cond)) __builtin_trap(); \
    } while (0)

enum { FUZZ_EVENTS = 1 << 20, FUZZ_FILES = 8, FUZZ_PATH = 1024 };

typedef struct {
    uintptr_t at;
    uint32_t order;
    bool freed;
} FuzzEvent;

static struct {
    jmp_buf back;
    uint32_t events;
    FuzzEvent event[FUZZ_EVENTS];  // memory taken and freed, in order; a million of these for a few
                                   // kilobytes of input is a finding
    FILE *files[FUZZ_FILES];       // opened and not closed
} fuzz;

static _Thread_local bool
    fuzz_watching;  // between the two ends of fuzz_once; libFuzzer's own thread never is

// ---- what stands in for the library's

static char *fuzz_message = "";  // the text formatted last: of a refusal, what it says

int fuzz_vsnprintf(char *out, size_t cap, const char *fmt, va_list args);
int fuzz_vsnprintf(char *out, size_t cap, const char *fmt, va_list args) {
    fuzz_message = out;
    return vsnprintf(out, cap, fmt, args);
}

__attribute__((noreturn)) void fuzz_exit(int status);
void fuzz_exit(int status) {
    must(fuzz_watching && strstr(fuzz_message, "\n  -> "));
    longjmp(fuzz.back, status ? 1 : 2);
}

FILE *fuzz_fopen(const char *path, const char *mode);
FILE *fuzz_fopen(const char *path, const char *mode) {
    FILE *f = fopen(path, mode);
    int i = 0;
    while (i < FUZZ_FILES && fuzz.files[i]) i++;
    must(i < FUZZ_FILES);
    return fuzz.files[i] = f;
}

int fuzz_fclose(FILE *f);
int fuzz_fclose(FILE *f) {
    for (int i = 0; i < FUZZ_FILES; i++)
        if (fuzz.files[i] == f) fuzz.files[i] = NULL;
    return fclose(f);
}

// ---- memory

static void fuzz_event(const volatile void *at, bool freed) {
    if (!fuzz_watching || !at) return;
    must(fuzz.events < FUZZ_EVENTS);
    fuzz.event[fuzz.events] = (FuzzEvent){(uintptr_t)at, fuzz.events, freed};
    fuzz.events++;
}

static void fuzz_taken(const volatile void *at, size_t n) {
    (void)n;
    fuzz_event(at, false);
}
static void fuzz_freed(const volatile void *at) { fuzz_event(at, true); }

static int fuzz_order(const void *a, const void *b) {
    const FuzzEvent *x = a, *y = b;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->order < y->order ? -1 : 1;
}

// Frees every block whose last event is that it was taken; says how many.
static int fuzz_release(void) {
    int live = 0;
    qsort(fuzz.event, fuzz.events, sizeof fuzz.event[0], fuzz_order);
    for (uint32_t i = 0; i < fuzz.events; i++) {
        bool last = i + 1 == fuzz.events || fuzz.event[i + 1].at != fuzz.event[i].at;
        if (!last || fuzz.event[i].freed) continue;
        free((void *)fuzz.event[i].at);
        live++;
    }
    return live;
}

// Runs body on one input; false if it was refused. keeps: body may end with memory that lives as
// long as the program.
static bool fuzz_once(void (*body)(const uint8_t *, size_t), const uint8_t *data, size_t size,
                      bool keeps) {
    fuzz.events = 0;
    fuzz_watching = true;
    int back = setjmp(fuzz.back);
    if (back == 0) body(data, size);
    for (int i = 0; i < FUZZ_FILES; i++)
        if (fuzz.files[i]) fuzz_fclose(fuzz.files[i]);
    fuzz_watching = false;
    int live = fuzz_release();
    must(back != 0 || keeps || live == 0);
    return back != 1;
}

// ---- files

// A name in the folder that run.sh made for this process, in memory where the system has such a
// place.
static inline const char *fuzz_path(char *path, const char *name) {
    snprintf(path, FUZZ_PATH, "%s/%s", getenv("FUZZ_DIR"), name);
    return path;
}

static inline const char *fuzz_file(char *path, const char *name, const void *data, size_t size) {
    FILE *f = fopen(fuzz_path(path, name), "wb");
    must(f && fwrite(data, 1, size, f) == size && fclose(f) == 0);
    return path;
}

// The first call takes what the library takes once: the buffer of stdout, say.
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    static char buffer[BUFSIZ];
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    must(getenv("FUZZ_DIR") && __sanitizer_install_malloc_and_free_hooks(fuzz_taken, fuzz_freed));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#include "calls.h"
