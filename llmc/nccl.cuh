// nccl.cuh: sums and copies of tensors between GPUs, by NVIDIA's library NCCL. It is loaded at run
// time, and only if there is more than one process.
//
//   nccl_begin       the transfers that follow wait for the work given to the GPU so far
//   nccl_start       COMM_REDUCE: the sum of all processes' x goes to x of one; COMM_BROADCAST: x
//                    of one goes to all
//   nccl_end         launches the transfers since nccl_begin, at most NCCL_GROUP together
//   nccl_join        work that is given to the GPU after this call waits for the transfers
//   nccl_wait        the host waits for the GPU, and ends the process if a transfer never ends
//
// Transfers have a stream of their own and run beside the computation. All processes make the same
// calls in the same order. From reduce and broadcast train_gpt.cu builds what ZeRO-1 needs:
//   reduce-scatter   a reduce of each shard to its owner (gradients)
//   all-gather       a broadcast of each shard from its owner (weights)
//   all-reduce       a reduce to process 0, then a broadcast (losses, the gradient norm)
// NCCL chooses the order of a sum, but one process computes it, so all get the same bits.
//
// Names and values are those of nccl.h (NVIDIA's user guide, "Types" and "Collective Communication
// Functions").
#pragma once
#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>
#include "run/comm.h"
#include "gpu.cuh"

struct NcclId {
    char bytes[128];
};
enum { NCCL_SUM = 0 };

#define NCCL_TABLE(CALL) \
CALL(GetUniqueId,  NcclId *id) \
CALL(CommInitRank, void **world, int size, NcclId id, int rank) \
CALL(CommGetAsyncError, void *world, int *error) \
CALL(CommAbort,    void *world) \
CALL(CommDestroy,  void *world) \
CALL(GroupStart,   void) \
CALL(GroupEnd,     void) \
CALL(Reduce,       const void *from, void *to, size_t count, int type, int sum, int root, \
                   void *world, cudaStream_t stream) \
CALL(Broadcast,    const void *from, void *to, size_t count, int type, int root, \
                   void *world, cudaStream_t stream)

// With one process (size 1) nothing is loaded, and transfers may not be called.
struct Nccl {
#define NCCL_FIELD(name, ...) int (*name)(__VA_ARGS__);
    NCCL_TABLE(NCCL_FIELD)
#undef NCCL_FIELD
    const char *(*GetErrorString)(int result);
    void *world;                   // NCCL's communicator
    Comm *comm;                    // the same processes, connected by sockets
    int rank, size, started;       // started: calls since nccl_begin
    cudaStream_t stream;
    cudaEvent_t sofar;             // the work that another stream is to wait for
};

enum {
    NCCL_SECONDS = 600,            // limit of a wait for the GPU, which usually takes seconds
    NCCL_GROUP = 1024,             // calls of a group; NCCL 2.11 allows 2048
};

// Ends the process. why NULL: the watchdog prints the reason. A transfer that has lost a process
// never ends by itself, so it is aborted; an abort that hangs is ended by the alarm.
static void nccl_fail(const Nccl *n, const char *what, const char *why) {
    if (why)
        fprintf(stderr,
                "error: NCCL, process %d of %d: %s: %s\n"
                "  -> NCCL_DEBUG=WARN NCCL_DEBUG_FILE=nccl.%%h.%%p writes more to files; %s\n",
                n->rank, n->size, what, why,
                n->world ? GO_ON : "every process needs a GPU of its own");
    fflush(stdout);
    alarm(3 * WATCHDOG_SECONDS);
    if (n->world) n->CommAbort(n->world);
    sleep(WATCHDOG_SECONDS);
    _exit(n->world ? EXIT_LOST : EXIT_REFUSED);
}

#define ncclCheck(nccl, call) nccl_check(nccl, (nccl)->call, #call)
static void nccl_check(const Nccl *n, int error, const char *what) {
    if (error) nccl_fail(n, what, n->GetErrorString(error));
}

// Waits until the GPU has reached a recorded event. With several processes it may wait for a lost
// one. NCCL reports that only across a network (issue 279 of github.com/NVIDIA/nccl), the watchdog
// only if the process died; the limit catches all else.
static void nccl_wait(Nccl *n, cudaEvent_t event) {
    if (n->size == 1) return cudaCheck(cudaEventSynchronize(event));
    double limit = clock_seconds() + NCCL_SECONDS;
    cudaError_t done;
    while ((done = cudaEventQuery(event)) == cudaErrorNotReady) {
        int error = 0;
        ncclCheck(n, CommGetAsyncError(n->world, &error));
        nccl_check(n, error, "a transfer");
        bool late = clock_seconds() > limit;
        if (late || comm_lost(n->comm))
            nccl_fail(n, "a transfer", late ? "a process or GPU hangs for ten minutes" : NULL);
        sched_yield();
    }
    cudaGetLastError();            // otherwise "not ready" counts as an error of the next launch
    cudaCheck(done);
}

// Connects all processes. Each calls it after gpu_open.
static void nccl_open(Nccl *n, Comm *c) {
    NcclId id = {};
    *n = {};
    n->comm = c;
    n->rank = comm_rank(c);
    n->size = comm_size(c);
    if (n->size == 1) return;
    const char *const WHERE = "libnccl.so.2\n  -> install a newer NCCL";
    void *library = dlopen("libnccl.so.2", RTLD_NOW);
    CHECK(library,
          "%d processes with a GPU each need NCCL, and it was not found: %s\n"
          "  -> apt install libnccl2; or pip install nvidia-nccl-cu%d, and export LD_LIBRARY_PATH="
          "the folder of its libnccl.so.2",
          n->size, dlerror(), CUDART_VERSION / 1000);
#define NCCL_LOAD(name, ...) *(void **)&n->name = comm_symbol(library, "nccl" #name, WHERE);
    NCCL_TABLE(NCCL_LOAD)
#undef NCCL_LOAD
    *(void **)&n->GetErrorString = comm_symbol(library, "ncclGetErrorString", WHERE);
    if (!n->rank) ncclCheck(n, GetUniqueId(&id));
    comm_broadcast(c, &id, sizeof id);
    ncclCheck(n, CommInitRank(&n->world, n->size, id, n->rank));
    cudaCheck(cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreateWithFlags(&n->sofar, cudaEventDisableTiming));
}

// The caller has waited for all transfers.
static void nccl_close(Nccl *n) {
    if (n->size == 1) return;
    ncclCheck(n, CommDestroy(n->world));
    cudaCheck(cudaEventDestroy(n->sofar));
    cudaCheck(cudaStreamDestroy(n->stream));
}

// From now on, work given to stream `later` waits for all work already given to `first`.
static void nccl_order(const Nccl *n, cudaStream_t first, cudaStream_t later) {
    cudaCheck(cudaEventRecord(n->sofar, first));
    cudaCheck(cudaStreamWaitEvent(later, n->sofar, 0));
}

static void nccl_begin(Nccl *n, const Gpu *gpu) {
    nccl_order(n, gpu->stream, n->stream);
    ncclCheck(n, GroupStart());
    n->started = 0;
}

static void nccl_end(Nccl *n) { ncclCheck(n, GroupEnd()); }

static void nccl_join(Nccl *n, const Gpu *gpu) {
    if (n->size > 1) nccl_order(n, n->stream, gpu->stream);
}

// COMM_REDUCE: x of process `root` becomes the sum of all processes' x; the others keep theirs.
// COMM_BROADCAST: x of `root` replaces x of all others.
template <typename T> static void nccl_start(Nccl *n, int how, T *x, int64_t count, int root) {
    int type = sizeof(T) == 8 ? 8 : sizeof(T) == 4 ? 7 : 9;  // float64, float32, bfloat16
    if (!count) return;
    if (how == COMM_BROADCAST)
        ncclCheck(n, Broadcast(x, x, count, type, root, n->world, n->stream));
    else ncclCheck(n, Reduce(x, x, count, type, NCCL_SUM, root, n->world, n->stream));
    if (++n->started % NCCL_GROUP) return;
    nccl_end(n);
    ncclCheck(n, GroupStart());
}
