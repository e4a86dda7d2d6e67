// nccl.cuh: tensors between GPUs, by NCCL, which is loaded where there is more than one process: sums of all processes' tensors to one of them, and from one to all.
//
// All calls go to a stream of their own, in the same order on all processes, so they run beside the computation:
//   nccl_begin       what the computation was given so far comes before what follows; the calls until nccl_end are one group, launched together
//   nccl_end
//   nccl_join        what the computation is given from here on comes after
// NCCL adds up in an order of its own, but a sum is made in one place: all that get it get the same bits.
//
// Names and values are those of nccl.h (NVIDIA's user guide, "Types" and "Collective Communication Functions").
#pragma once
#include <dlfcn.h>
#include "run/comm.h"
#include "gpu.cuh"

typedef struct NcclId { char bytes[128]; } NcclId;
enum { NCCL_SUM = 0 };

#define NCCL_TABLE(CALL) \
CALL(GetUniqueId,  NcclId *id) \
CALL(CommInitRank, void **world, int size, NcclId id, int rank) \
CALL(CommDestroy,  void *world) \
CALL(GroupStart,   void) \
CALL(GroupEnd,     void) \
CALL(Reduce,       const void *from, void *to, size_t count, int type, int sum, int root, void *world, cudaStream_t stream) \
CALL(Broadcast,    const void *from, void *to, size_t count, int type, int root, void *world, cudaStream_t stream)

// size 1: there is one process, and nothing of this is called.
typedef struct Nccl {
#define NCCL_FIELD(name, ...) int (*name)(__VA_ARGS__);
    NCCL_TABLE(NCCL_FIELD)
#undef NCCL_FIELD
    const char *(*GetErrorString)(int result);
    void *world;
    int rank, size;
    cudaStream_t stream;
    cudaEvent_t before, after;
} Nccl;

static inline int nccl_type(const float *) { return 7; }
static inline int nccl_type(const double *) { return 8; }
static inline int nccl_type(const __nv_bfloat16 *) { return 9; }

#define ncclCheck(nccl, call) nccl_check(nccl, (nccl)->call, #call, __FILE__, __LINE__)
static inline void nccl_check(const Nccl *n, int result, const char *call, const char *file, int line) {
    if (!result) return;
    comm_await_watchdog();
    check_failed(EXIT_REFUSED, file, line, "NCCL: %s: %s\n  -> NCCL_DEBUG=WARN says more; every process needs a GPU of its own", call, n->GetErrorString(result));
}

// After gpu_open, by all processes.
static inline void nccl_open(Nccl *n, Comm *c) {
    NcclId id;
    memset(n, 0, sizeof *n);
    n->rank = comm_rank(c);
    n->size = comm_size(c);
    if (n->size == 1) return;
    const char *const WHERE = "libnccl.so.2\n  -> a newer NCCL";
    void *library = dlopen("libnccl.so.2", RTLD_NOW);
    CHECK(library, "%d processes with a GPU each speak through NCCL, and it is not found: %s\n"
          "  -> apt install libnccl2, or pip install nvidia-nccl-cu%d and LD_LIBRARY_PATH=its folder nvidia/nccl/lib", n->size, dlerror(), CUDART_VERSION / 1000);
#define NCCL_LOAD(name, ...) *(void **)&n->name = comm_symbol(library, "nccl" #name, WHERE);
    NCCL_TABLE(NCCL_LOAD)
#undef NCCL_LOAD
    *(void **)&n->GetErrorString = comm_symbol(library, "ncclGetErrorString", WHERE);
    memset(&id, 0, sizeof id);
    if (!n->rank) ncclCheck(n, GetUniqueId(&id));
    comm_broadcast(c, &id, sizeof id);
    ncclCheck(n, CommInitRank(&n->world, n->size, id, n->rank));
    cudaCheck(cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreateWithFlags(&n->before, cudaEventDisableTiming));
    cudaCheck(cudaEventCreateWithFlags(&n->after, cudaEventDisableTiming));
}

static inline void nccl_close(Nccl *n) {
    if (n->size == 1) return;
    cudaCheck(cudaStreamSynchronize(n->stream));
    ncclCheck(n, CommDestroy(n->world));
    cudaCheck(cudaEventDestroy(n->before));
    cudaCheck(cudaEventDestroy(n->after));
    cudaCheck(cudaStreamDestroy(n->stream));
}

static inline void nccl_begin(Nccl *n, const Gpu *gpu) {
    cudaCheck(cudaEventRecord(n->before, gpu->stream));
    cudaCheck(cudaStreamWaitEvent(n->stream, n->before, 0));
    ncclCheck(n, GroupStart());
}

static inline void nccl_end(Nccl *n) { ncclCheck(n, GroupEnd()); }

static inline void nccl_join(Nccl *n, const Gpu *gpu) {
    cudaCheck(cudaEventRecord(n->after, n->stream));
    cudaCheck(cudaStreamWaitEvent(gpu->stream, n->after, 0));
}

// The sum of all processes' x, to x of process `root`; elsewhere x stays.
template <typename T> static void nccl_reduce(Nccl *n, T *x, int64_t count, int root) {
    if (count) ncclCheck(n, Reduce(x, x, (size_t)count, nccl_type(x), NCCL_SUM, root, n->world, n->stream));
}

// x of process `root` to all.
template <typename T> static void nccl_spread(Nccl *n, T *x, int64_t count, int root) {
    if (count) ncclCheck(n, Broadcast(x, x, (size_t)count, nccl_type(x), root, n->world, n->stream));
}
