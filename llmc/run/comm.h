// comm.h: several processes that train one model, each with some samples of every batch (data parallelism) and a part of the optimizer's state
// (ZeRO-1; Rajbhandari et al. 2020): who they are, and how they talk.
//
// A step: every process computes the gradients of its samples. The sum over processes of each part of the gradients travels to the part's owner (memory.h) while
// backward still works on the layers below; the owner updates its part of the weights, and from there it travels to all. What the step decides on (losses, norm,
// signals) is added in one place and one order, so that all processes decide alike.
//
// On the CPU processes are started by Open MPI's mpirun, or by srun, and speak MPI. Its library is loaded only then: one process needs none, and so does the build.
// With GPUs torchrun may start them too, one for each; small things travel over sockets (socket.h), tensors by NCCL (comm.cuh), and MPI is not needed.
#pragma once
#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include "util.h"
#include "socket.h"

// What is called of MPI. Handles are pointers and constants as in Open MPI's mpi.h.
#define MPI_TABLE(CALL) \
CALL(Init_thread, int *argc, char ***argv, int level, int *provided) \
CALL(Finalize,    void) \
CALL(Comm_rank,   void *world, int *rank) \
CALL(Comm_size,   void *world, int *size) \
CALL(Send,        const void *data, int count, void *type, int to, int tag, void *world) \
CALL(Recv,        void *data, int count, void *type, int from, int tag, void *world, void *status) \
CALL(Ireduce,     const void *from, void *to, int count, void *type, void *sum, int root, void *world, void **request) \
CALL(Ibcast,      void *data, int count, void *type, int root, void *world, void **request) \
CALL(Testall,     int count, void **requests, int *done, void *statuses) \
CALL(Waitall,     int count, void **requests, void *statuses)
typedef struct Mpi {
#define MPI_FIELD(name, ...) int (*name)(__VA_ARGS__);
    MPI_TABLE(MPI_FIELD)
#undef MPI_FIELD
    void *world, *byte, *float_type, *double_type, *sum;
} Mpi;
#define MPI_IN_PLACE ((void *)1)
enum { MPI_THREAD_FUNNELED = 1 };

enum { COMM_PENDING = 256 };                                  // transfers in flight at most
static const int64_t COMM_PIECE = 1 << 24;                    // elements, or bytes, of one

// Processes are numbered by rank, from 0, and the `here` ones of this machine by local. NULL, or
// size 1: there is one.
typedef struct Comm {
    int rank, size, local, here;
    bool by_sockets;                                          // not by MPI
    Sockets sockets;
    Mpi mpi;
    void *pending[COMM_PENDING];
    int count;
} Comm;

static inline int comm_rank(const Comm *c) { return c ? c->rank : 0; }
static inline int comm_local(const Comm *c) { return c ? c->local : 0; }
static inline int comm_here(const Comm *c) { return c && c->here > 1 ? c->here : 1; }
static inline int comm_size(const Comm *c) { return c && c->size > 1 ? c->size : 1; }

// ------------------------------------------------------------------------------------------------------------------ beginning and end

// Which launcher began this process, by the variables it sets: how many processes, which is this, which on its machine, and how many are there (srun: of each machine,
// "2(x3)" or "2,1": the first number is that of all only where there is one machine). Each may run under those that follow it.
typedef struct Launcher { const char *name, *size, *rank, *local, *here; } Launcher;
static const Launcher LAUNCHERS[] = {
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"}};

static inline int comm_setting(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

static inline const Launcher *comm_launcher(void) {
    for (size_t i = 0; i < sizeof LAUNCHERS / sizeof LAUNCHERS[0]; i++)
        if (comm_setting(LAUNCHERS[i].size) > 1 && getenv(LAUNCHERS[i].rank)) return &LAUNCHERS[i];
    return NULL;
}

static inline void *comm_symbol(void *library, const char *name, const char *where) {
    void *symbol = dlsym(library, name);
    CHECK(symbol, "there is no %s in %s", name, where);
    return symbol;
}

static inline void mpi_open(Comm *c, const Launcher *by) {
    const char *const NAMES[] = {"libmpi.so.40", "libmpi.so"}, *const WHERE = "the MPI library: expected Open MPI's\n  -> apt install openmpi-bin, and start with its mpirun";
    void *library = NULL;
    int provided;
    for (int i = 0; i < 2 && !library; i++) library = dlopen(NAMES[i], RTLD_NOW | RTLD_GLOBAL);
    CHECK(library, "%s began %s processes, which speak MPI, and Open MPI's library is not found: %s\n  -> apt install openmpi-bin", by->name, getenv(by->size), dlerror());
#define MPI_LOAD(name, ...) *(void **)&c->mpi.name = comm_symbol(library, "MPI_" #name, WHERE);
    MPI_TABLE(MPI_LOAD)
#undef MPI_LOAD
    c->mpi.world = comm_symbol(library, "ompi_mpi_comm_world", WHERE);
    c->mpi.byte = comm_symbol(library, "ompi_mpi_byte", WHERE);
    c->mpi.float_type = comm_symbol(library, "ompi_mpi_float", WHERE);
    c->mpi.double_type = comm_symbol(library, "ompi_mpi_double", WHERE);
    c->mpi.sum = comm_symbol(library, "ompi_mpi_op_sum", WHERE);
    c->mpi.Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    c->mpi.Comm_rank(c->mpi.world, &c->rank);
    c->mpi.Comm_size(c->mpi.world, &c->size);
    CHECK(c->size == atoi(getenv(by->size)), "%s began %s processes, and MPI knows of %d: is it another MPI?\n  -> start with Open MPI's mpirun", by->name, getenv(by->size), c->size);
}

// Before anything is printed: of several processes only the first one has the word. Errors are everyone's.
static inline void comm_open(Comm *c, const char *device) {
    memset(c, 0, sizeof *c);
    c->size = 1;
    const Launcher *by = comm_launcher();
    if (!by) return;
    c->by_sockets = !strcmp(device, "cuda");
    CHECK(c->by_sockets || strcmp(by->name, "torchrun"),
          "torchrun began %s processes; on the CPU they are started by mpirun\n"
          "  -> mpirun -np %s ./train_gpt (as root: OMPI_ALLOW_RUN_AS_ROOT=1 and "
          "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; more processes than cores: --oversubscribe)",
          getenv(by->size), getenv(by->size));
    c->local = comm_setting(by->local);
    c->here = comm_setting(by->here);
    if (c->by_sockets) {
        c->rank = c->sockets.rank = comm_setting(by->rank);
        c->size = c->sockets.size = comm_setting(by->size);
        CHECK(c->rank >= 0 && c->rank < c->size && c->local >= 0, "%s=%d and %s=%d: expected numbers below %s=%d\n  -> start with torchrun, mpirun or srun", by->rank, c->rank, by->local, c->local, by->size, c->size);
        socket_open(&c->sockets, comm_setting(by->here) == c->size);
    } else mpi_open(c, by);
    if (c->rank) CHECK(freopen("/dev/null", "w", stdout), "cannot open /dev/null: %s", strerror(errno));
}

// All processes have come here: without it an end is a failure.
static inline void comm_close(Comm *c) {
    if (comm_size(c) == 1) return;
    if (c->by_sockets) socket_close(&c->sockets);
    else c->mpi.Finalize();
}

// ------------------------------------------------------------------------------------------------------------------ small things, at once

static inline void mpi_move(Comm *c, void *data, size_t bytes, int from, int to) {
    for (int64_t at = 0; at < (int64_t)bytes; at += COMM_PIECE) {
        int n = (int)((int64_t)bytes - at < COMM_PIECE ? (int64_t)bytes - at : COMM_PIECE);
        if (c->rank == from) c->mpi.Send((char *)data + at, n, c->mpi.byte, to, 0, c->mpi.world);
        if (c->rank == to) c->mpi.Recv((char *)data + at, n, c->mpi.byte, from, 0, c->mpi.world, NULL);
    }
}

// From process `from` to process `to`, of which one is process 0: the same buffer on both.
static inline void comm_move(Comm *c, void *data, size_t bytes, int from, int to) {
    if (c->rank != from && c->rank != to) return;
    if (c->by_sockets) socket_move(&c->sockets, data, bytes, from, to);
    else mpi_move(c, data, bytes, from, to);
}

static inline void comm_broadcast(Comm *c, void *data, size_t bytes) {
    for (int to = 1; to < comm_size(c); to++) comm_move(c, data, bytes, 0, to);
}

enum { COMM_SUM, COMM_MAX };
// x[i] = the sum, or the largest, of all processes' x[i]: combined by process 0 in the order of ranks, the same bits everywhere. A NaN stays.
static inline void comm_combine(Comm *c, double *x, int64_t n, int how) {
    double other[512];
    for (int64_t at = 0; at < n && comm_size(c) > 1; at += 512) {
        int64_t piece = n - at < 512 ? n - at : 512;
        for (int from = 1; from < c->size; from++) {
            if (c->rank == from) memcpy(other, x + at, (size_t)piece * sizeof *x);
            comm_move(c, other, (size_t)piece * sizeof *x, from, 0);
            for (int64_t i = 0; i < piece && !c->rank; i++)
                x[at + i] = how == COMM_SUM ? x[at + i] + other[i] : other[i] > x[at + i] || isnan(other[i]) ? other[i] : x[at + i];
        }
        comm_broadcast(c, x + at, (size_t)piece * sizeof *x);
    }
}

// Whether all processes have the same number, a hash of what they compare.
static inline bool comm_agree(Comm *c, uint64_t own) {
    uint64_t first = own;
    comm_broadcast(c, &first, sizeof first);
    double differ = first != own;
    comm_combine(c, &differ, 1, COMM_SUM);
    return differ == 0;
}

// Ctrl-C or a scheduler's SIGTERM: the step in work is finished and saved. A second one, of either, ends at once. The one mutable global: a signal has no argument.
static volatile sig_atomic_t comm_stopped;
static inline void comm_stop(int number) {
    comm_stopped = number;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

// The signal that any of the processes got, or 0.
static inline int comm_signal(Comm *c) {
    double signal = comm_stopped;
    comm_combine(c, &signal, 1, COMM_MAX);
    return (int)signal;
}

static inline void comm_check_weights(Comm *c, uint64_t hash) {
    CHECK(comm_agree(c, hash), "the processes no longer hold the same weights: memory or a transfer failed\n  -> --resume required goes on from the last checkpoint");
}

// ------------------------------------------------------------------------------------------------------------------ tensors of a CPU, in the background

static inline void comm_wait(Comm *c) {
    if (comm_size(c) > 1 && c->count) c->mpi.Waitall(c->count, c->pending, NULL);
    if (c) c->count = 0;
}

// MPI moves on only inside of its calls: now and then, from a computation that takes longer.
static inline void comm_poke(Comm *c) {
    int done;
    if (comm_size(c) > 1 && c->count) c->mpi.Testall(c->count, c->pending, &done, NULL);
}

static inline void **comm_request(Comm *c) {
    if (c->count == COMM_PENDING) comm_wait(c);
    return &c->pending[c->count++];
}

// Begins: the sum of all processes' x, to x of process `root`; elsewhere x stays, until comm_wait nobody may change it. element: sizeof(float), sizeof(double).
static inline void comm_reduce(Comm *c, void *x, int64_t n, size_t element, int root) {
    for (int64_t at = 0; at < n; at += COMM_PIECE) {
        void *piece = (char *)x + (size_t)at * element, *type = element == sizeof(float) ? c->mpi.float_type : c->mpi.double_type;
        int count = (int)(n - at < COMM_PIECE ? n - at : COMM_PIECE);
        bool here = c->rank == root;
        c->mpi.Ireduce(here ? MPI_IN_PLACE : piece, here ? piece : NULL, count, type, c->mpi.sum, root, c->mpi.world, comm_request(c));
    }
}

// Begins: x of process `root` to all.
static inline void comm_spread(Comm *c, void *x, int64_t n, size_t element, int root) {
    for (int64_t at = 0; at < n; at += COMM_PIECE) {
        int count = (int)(n - at < COMM_PIECE ? n - at : COMM_PIECE);
        c->mpi.Ibcast((char *)x + (size_t)at * element, count, element == sizeof(float) ? c->mpi.float_type : c->mpi.double_type, root, c->mpi.world, comm_request(c));
    }
}
