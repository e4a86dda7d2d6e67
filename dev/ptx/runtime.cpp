// runtime.cpp: the CUDA runtime for host code that nvcc compiled, with the interpreter (vm.h) as
// GPU. Every call is done at once, in the order of the calls; a stream that records a graph keeps
// its work for cudaGraphLaunch. So this shows nothing about streams and events: that is the task of
// the emulator (dev/emu).
//
// A kernel that is not loaded yet is asked for by name (runtime_need): Python then reads its PTX.
// An error of a kernel stays in vm_error; with runtime_exit(1) it ends the program with status 86.
#include "vm.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <driver_types.h>
#include <functional>
#include <map>
#include <string>
#include <vector>

enum { INVALID_CONFIGURATION = 9, CAPABILITY_MAJOR = 9, STATUS = 86 };

typedef std::vector<std::function<void()>> Graph;
static Graph *recording;
static int exits, last_error;
static void (*need)(const char *name);

extern "C" void runtime_need(void (*load)(const char *name)) { need = load; }
extern "C" void runtime_exit(int on) { exits = on; }

// Now, or when the graph that is recorded runs.
static int perform(std::function<void()> work) {
    if (recording) recording->push_back(work);
    else work();
    return 0;
}

// ---------------------------------------------------------------------------------------- launches
// nvcc's host code registers each kernel: the address of a host function, and the kernel's name.
// Registration runs before this file's variables exist, so they are made at their first use.

static std::map<const void *, std::string> &kernel_names() {
    static std::map<const void *, std::string> all;
    return all;
}
static std::map<const void *, int> &dynamic_limits() {
    static std::map<const void *, int> all;
    return all;
}
static struct { Dim grid, block; size_t shared; void *stream; } pushed;

static void stop(const char *text) {
    fflush(stdout);
    fprintf(stderr, "PTX: %s\n", text);
    fflush(stderr);
    _Exit(STATUS);
}

// Whether a GPU would refuse the launch.
static bool refused(const void *f, const char *name, Dim grid, Dim block, size_t shared) {
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || !grid.x || !grid.y || !grid.z) return true;
    if (grid.y > 65535 || grid.z > 65535) return true;
    if (shared + vm_shared(name) > (size_t)vm_shared_limit()) return true;
    return shared > 48 << 10 && dynamic_limits()[f] < (int)shared;
}

extern "C" {
void **__cudaRegisterFatBinary(void *) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *host, char *, const char *device, int, void *,
                            void *, void *, void *, int *) {
    kernel_names()[host] = device;
}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void *stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
int __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared, void **stream) {
    *grid = pushed.grid, *block = pushed.block;
    *shared = pushed.shared, *stream = pushed.stream;
    return 0;
}
int __cudaGetKernel(void **kernel, const void *host) { *kernel = (void *)host; return 0; }

int cudaLaunchKernel(const void *f, Dim grid, Dim block, void **arguments, size_t shared, void *) {
    const std::string name = kernel_names()[f];
    const int32_t *places;
    if (!vm_loaded(name.c_str()) && need) need(name.c_str());
    if (!vm_loaded(name.c_str())) {
        if (exits) stop((name + " is not loaded").c_str());
        return last_error = INVALID_CONFIGURATION;
    }
    if (refused(f, name.c_str(), grid, block, shared)) return last_error = INVALID_CONFIGURATION;
    int count = vm_parameters(name.c_str(), &places);
    std::vector<std::vector<uint8_t>> held;          // the arguments, for a graph that runs later
    for (int p = 0; p < count; p++) {
        const uint8_t *value = (const uint8_t *)arguments[p];
        held.emplace_back(value, value + places[2 * p + 1]);
    }
    return perform([=] {
        std::vector<void *> values;
        for (auto &h : held) values.push_back((void *)h.data());
        vm_launch(name.c_str(), grid, block, values.data(), (uint32_t)shared);
        if (exits && *vm_error()) stop(vm_error());
    });
}
int __cudaLaunchKernel(const void *f, Dim grid, Dim block, void **arguments, size_t shared,
                       void *stream) {
    return cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
int __cudaLaunchKernel_ptsz(const void *f, Dim grid, Dim block, void **arguments, size_t shared,
                            void *stream) {
    return cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
int cudaFuncSetAttribute(const void *f, int attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return 0;
    if (value > vm_shared_limit()) return last_error = INVALID_CONFIGURATION;
    dynamic_limits()[f] = value;
    return 0;
}
int cudaGetLastError() {
    int e = last_error;
    last_error = 0;
    return e;
}
const char *cudaGetErrorString(int e) {
    return e == INVALID_CONFIGURATION ? "invalid configuration argument" : "an error";
}

// ------------------------------------------------------------------------------------------ memory
// New memory holds NaN, and a kernel that reads it before anything is written there fails.

int cudaMalloc(void **p, size_t bytes) {
    *p = bytes ? vm_alloc(bytes, UNWRITTEN) : nullptr;
    return 0;
}
int cudaFree(void *p) {
    if (p) vm_free(p);
    return 0;
}
int cudaMallocHost(void **p, size_t bytes) {
    *p = aligned_alloc(256, (bytes + 511) / 256 * 256);
    return 0;
}
int cudaHostAlloc(void **p, size_t bytes, unsigned) { return cudaMallocHost(p, bytes); }
int cudaFreeHost(void *p) {
    free(p);
    return 0;
}
static void copy_now(void *to, const void *from, size_t bytes) {
    memmove(to, from, bytes);
    vm_written_part(to, bytes);
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int) {
    copy_now(to, from, bytes);
    return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, void *) {
    return perform([=] { copy_now(to, from, bytes); });
}
static void set_now(void *to, int value, size_t bytes) {
    memset(to, value, bytes);
    vm_written_part(to, bytes);
}
int cudaMemset(void *to, int value, size_t bytes) {
    set_now(to, value, bytes);
    return 0;
}
int cudaMemsetAsync(void *to, int value, size_t bytes, void *) {
    return perform([=] { set_now(to, value, bytes); });
}
int cudaMemGetInfo(size_t *left, size_t *total) {
    *total = (size_t)8 << 30;
    *left = *total - vm_allocated();
    return 0;
}

// ----------------------------------------------------------------- device, streams, events, graphs

int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaSetDevice(int) { return 0; }
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaDriverGetVersion(int *n) { *n = 13000; return 0; }
int cudaRuntimeGetVersion(int *n) { *n = 13000; return 0; }
int cudaDeviceSynchronize() { return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int) {
    *value = 0;
    if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = vm_shared_limit();
    return 0;
}
int cudaFuncGetAttributes(void *a, const void *) {
    memset(a, 0, sizeof(cudaFuncAttributes));
    return 0;
}
int cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "PTX interpreter");
    p->major = CAPABILITY_MAJOR, p->warpSize = 32;
    p->multiProcessorCount = 3;  // so few that a block of grouped products has several tiles
    p->sharedMemPerBlockOptin = vm_shared_limit(), p->totalGlobalMem = (size_t)8 << 30;
    return 0;
}
int cudaGetDeviceProperties_v2(cudaDeviceProp *p, int d) { return cudaGetDeviceProperties(p, d); }

// cuTensorMapEncodeTiled for bfloat16 without interleaving; see vm.h. Refuses what the driver API's
// manual says that the driver refuses.
static int encode_map(Map90 *to, int type, uint32_t rank, void *at, const uint64_t *size,
                      const uint64_t *stride, const uint32_t *box, const uint32_t *steps,
                      int interleave, int swizzle, int, int fill) {
    enum { BFLOAT16 = 9, INVALID = 1 };
    Map90 m = {};
    bool good = type == BFLOAT16 && rank >= 1 && rank <= 5 && (uint64_t)at % 16 == 0 &&
                interleave == 0 && swizzle >= 0 && swizzle <= 3 && fill == 0 &&
                (uint64_t)to % 64 == 0;
    if (!good) return INVALID;
    m.magic = Map90::MAGIC, m.at = (uint64_t)at, m.rank = rank, m.swizzle = 16 << swizzle;
    for (uint32_t d = 0; d < rank; d++) {
        m.size[d] = size[d], m.box[d] = box[d];
        good = good && size[d] >= 1 && size[d] <= 1ull << 32 && box[d] >= 1 && box[d] <= 256 &&
               steps[d] == 1;
        if (d + 1 == rank) break;
        m.stride[d] = stride[d];
        good = good && stride[d] % 16 == 0 && stride[d] < 1ull << 40;
    }
    uint32_t row = box[0] * 2;
    if (!good || row % 16 || (swizzle && row > (uint32_t)m.swizzle)) return INVALID;
    memset((void *)to, 0, 128);
    memcpy((void *)to, &m, sizeof m);
    return 0;
}
int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, uint64_t,
                                     int *found) {
    bool known = !strcmp(symbol, "cuTensorMapEncodeTiled");
    *function = known ? (void *)encode_map : nullptr;
    if (found) *found = known ? 0 : 1;
    return 0;
}

static std::map<void *, unsigned> stream_flags;
int cudaStreamCreateWithFlags(void **s, unsigned flags) {
    *s = malloc(8);
    stream_flags[*s] = flags;
    return 0;
}
int cudaStreamCreate(void **s) { return cudaStreamCreateWithFlags(s, 0); }
int cudaStreamGetFlags(void *s, unsigned *flags) { *flags = stream_flags[s]; return 0; }
int cudaStreamDestroy(void *s) { free(s); return 0; }
int cudaStreamSynchronize(void *) { return 0; }
int cudaStreamWaitEvent(void *, void *, unsigned) { return 0; }
int cudaStreamQuery(void *) { return 0; }

// An event is the time of its record, in milliseconds.
int cudaEventCreate(void **e) { *e = calloc(1, sizeof(double)); return 0; }
int cudaEventCreateWithFlags(void **e, unsigned) { return cudaEventCreate(e); }
int cudaEventDestroy(void *e) { free(e); return 0; }
int cudaEventRecord(void *e, void *) {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *(double *)e = std::chrono::duration<double, std::milli>(now).count();
    return 0;
}
int cudaEventSynchronize(void *) { return 0; }
int cudaEventQuery(void *) { return 0; }
int cudaEventElapsedTime(float *ms, void *from, void *to) {
    *ms = (float)(*(double *)to - *(double *)from);
    return 0;
}

int cudaStreamBeginCapture(void *, int) { recording = new Graph; return 0; }
int cudaStreamEndCapture(void *, Graph **g) {
    *g = recording;
    recording = nullptr;
    return 0;
}
int cudaGraphInstantiate(Graph **to, Graph *g, uint64_t) { *to = new Graph(*g); return 0; }
int cudaGraphLaunch(Graph *g, void *) { for (auto &work : *g) work(); return 0; }
int cudaGraphDestroy(Graph *g) { delete g; return 0; }
int cudaGraphExecDestroy(Graph *g) { delete g; return 0; }
}

// ---------------------------------------------------------------------------------------- products
// The calls of dev/emu/cublaslt.cpp, which stands in for cuBLASLt. It asks about an array only
// before a product reads or writes it; so the array then counts as written.

cudaError_t emu_enqueue(cudaStream_t, std::function<void()> run) {
    perform(run);
    return cudaSuccess;
}
bool emu_recording(void) { return recording != nullptr; }
extern "C" bool emu_on_device(const void *p, size_t bytes) {
    if (!vm_owns(p, bytes)) return false;
    vm_written_part(p, bytes);
    return true;
}
