// cupti.cpp: the timeline of a program's GPU by CUPTI, NVIDIA's interface for tracing. The program
// stays as it is: the driver loads this library into it.
//
//   CUDA_INJECTION64_PATH=build/cuda-bench/libtimeline.so TIMELINE=timeline.jsonl ./train_gpt ...
//
// After the launch of AdamW that ends the last of TIMELINE_STEPS (10) steps it writes one JSON line
// for each kernel, copy and fill that ran, and ends the program. The first step is left
// out. Lines are timeline.cu's; timeline.py reads both.
#include <cupti.h>
#include <cxxabi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <unistd.h>
#include <vector>

enum { BUFFER_SIZE = 256 << 10, ALIGNMENT = 8 };     // about a step

struct Activity { uint64_t start, end; std::string name; };

// Lives as long as the program: CUPTI calls from threads of its own, also while the program ends.
static struct Trace {
    std::vector<Activity> activities;
    int updates, steps;
    const char *path;
} *trace;

static void check(CUptiResult result, const char *call) {
    const char *why = "";
    if (result == CUPTI_SUCCESS) return;
    cuptiGetResultString(result, &why);
    fprintf(stderr, "error: %s: %s\n  -> the timeline by events needs no CUPTI\n", call, why);
    _exit(1);
}
#define CHECK(call) check(call, #call)

static std::string demangled(const char *name) {
    int status;
    char *text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string plain = text ? text : name;
    free(text);
    return plain;
}

static void add(uint64_t start, uint64_t end, const std::string &name) {
    bool update = name.find("adamw_kernel") != std::string::npos;
    if (update || trace->updates) trace->activities.push_back({start, end, name});
    trace->updates += update;
}

static void write_and_exit(void) {
    FILE *f = fopen(trace->path, "w");
    if (!f) _exit(1);
    uint64_t first = trace->activities[0].start;
    for (const Activity &a : trace->activities)
        fprintf(f, "{\"name\": \"%s\", \"start\": %.4f, \"ms\": %.4f}\n", a.name.c_str(),
                1e-6 * (double)(int64_t)(a.start - first), 1e-6 * (double)(a.end - a.start));
    _exit(fclose(f) != 0);
}

static void CUPTIAPI buffer_requested(uint8_t **buffer, size_t *size, size_t *records) {
    *size = BUFFER_SIZE;
    *records = 0;
    *buffer = (uint8_t *)aligned_alloc(ALIGNMENT, BUFFER_SIZE);
    if (!*buffer) _exit(1);
}

// The records' types are CUDA 12's: those of CUDA 13 begin the same way.
static void CUPTIAPI buffer_completed(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t valid) {
    CUpti_Activity *record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            auto *kernel = (CUpti_ActivityKernel9 *)record;
            add(kernel->start, kernel->end, demangled(kernel->name));
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            auto *copy = (CUpti_ActivityMemcpy5 *)record;
            add(copy->start, copy->end, "copy");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            auto *fill = (CUpti_ActivityMemset4 *)record;
            add(fill->start, fill->end, "fill");
        }
    }
    free(buffer);
    if (trace->updates > trace->steps) write_and_exit();
}

// The driver calls it when it starts. Buffers are handed over once a second.
extern "C" int InitializeInjection(void) {
    const char *steps = getenv("TIMELINE_STEPS"), *path = getenv("TIMELINE");
    trace = new Trace{{}, 0, steps ? atoi(steps) : 10, path ? path : "timeline.jsonl"};
    CHECK(cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed));
    for (CUpti_ActivityKind kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                    CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET})
        CHECK(cuptiActivityEnable(kind));
    CHECK(cuptiActivityFlushPeriod(1000));
    return 1;
}
