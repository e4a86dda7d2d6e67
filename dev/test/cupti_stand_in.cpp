// cupti_stand_in.cpp: a driver and CUPTI for dev/bench/gpu/cupti.cpp, without a GPU. It loads the
// library as the driver does, and gives it a few records of launches in buffers, as CUPTI does.
//
//   cupti_stand_in libtimeline.so
#include <cupti.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc complete;
static int enabled;

extern "C" {
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc a,
                                           CUpti_BuffersCallbackCompleteFunc b) {
    request = a, complete = b;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind) { enabled++; return CUPTI_SUCCESS; }
CUptiResult cuptiActivityFlushPeriod(uint32_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiGetResultString(CUptiResult, const char **) { return CUPTI_SUCCESS; }

// Records follow each other without gaps.
CUptiResult cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, CUpti_Activity **record) {
    uint8_t *next = buffer;
    if (*record) {
        size_t size = sizeof(CUpti_ActivityKernel9);
        if ((*record)->kind == CUPTI_ACTIVITY_KIND_MEMCPY) size = sizeof(CUpti_ActivityMemcpy5);
        if ((*record)->kind == CUPTI_ACTIVITY_KIND_MEMSET) size = sizeof(CUpti_ActivityMemset4);
        next = (uint8_t *)*record + size;
    }
    if (next >= buffer + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = (CUpti_Activity *)next;
    return CUPTI_SUCCESS;
}
}

template <typename T>
static uint8_t *record(uint8_t *at, CUpti_ActivityKind kind, uint64_t start, uint64_t end,
                       T value) {
    value.kind = kind;
    value.start = start;
    value.end = end;
    memcpy(at, &value, sizeof value);
    return at + sizeof value;
}

// A step of 100 microseconds: a fill, a copy, a norm and AdamW, which ends with it.
static void one_buffer(uint64_t end) {
    uint8_t *buffer;
    size_t size, records;
    CUpti_ActivityKernel9 norm = {}, update = {};
    norm.name = "_Z11norm_kernelPf";
    update.name = "_Z12adamw_kernelPf";
    request(&buffer, &size, &records);
    uint8_t *at = buffer;
    at = record(at, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, end - 20000, end, update);
    at = record(at, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, end - 60000, end - 20000, norm);
    at = record(at, CUPTI_ACTIVITY_KIND_MEMCPY, end - 80000, end - 60000, CUpti_ActivityMemcpy5{});
    at = record(at, CUPTI_ACTIVITY_KIND_MEMSET, end - 90000, end - 80000, CUpti_ActivityMemset4{});
    complete(nullptr, 0, buffer, size, (size_t)(at - buffer));
}

int main(int, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    if (((int (*)())dlsym(library, "InitializeInjection"))() != 1 || enabled != 3) return 3;
    for (uint64_t step = 1; step < 100; step++) one_buffer(1000000 + 100000 * step);
    return 4;                                  // the library ends the program before
}
