// comm.c: see comm.h. comm_move sends a small message over sockets (GPUs) or MPI (CPU). Broadcast
// and all-reduce are built on it: each message goes from or to process 0, in the order of ranks.
#include "comm.h"
#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include "mpi.h"
#include "socket.h"

// ---------------------------------------------------------------------------------- begin and end

// torchrun may run under mpirun or srun, and mpirun under srun: the innermost launcher counts.
const Launcher LAUNCHERS[LAUNCHER_COUNT] = {
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID",
     "SLURM_STEP_TASKS_PER_NODE"},
};

// An environment variable that holds a number; 0: it is not set.
static int setting(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

const Launcher *comm_launcher(void) {
    for (int i = 0; i < LAUNCHER_COUNT; i++)
        if (setting(LAUNCHERS[i].size) > 1 && getenv(LAUNCHERS[i].rank)) return &LAUNCHERS[i];
    return NULL;
}

void *comm_symbol(void *library, const char *name, const char *where) {
    void *symbol = dlsym(library, name);
    CHECK(symbol, "expected the symbol %s in %s", name, where);
    return symbol;
}

// Loads Open MPI's library and joins its processes. Version 40 is the interface of Open MPI 4 and
// 5; libmpi.so comes with the development package.
static void open_mpi(Comm *c, const Launcher *by) {
    static const char WHERE[] = "Open MPI's library, found none: this is another MPI\n"
                                "  -> apt install openmpi-bin, and start with its mpirun";
    int provided;
    Mpi *mpi = check_alloc(sizeof *mpi, "MPI");
    void *library = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    if (!library) library = dlopen("libmpi.so", RTLD_NOW | RTLD_GLOBAL);
    CHECK(library,
          "%s started %d processes, which need Open MPI's library: %s\n"
          "  -> apt install openmpi-bin", by->name, c->size, dlerror());
#define MPI_LOAD(name, ...) *(void **)&mpi->name = comm_symbol(library, "MPI_" #name, WHERE);
    MPI_TABLE(MPI_LOAD)
#define MPI_FIND(name, symbol) mpi->name = comm_symbol(library, "ompi_mpi_" #symbol, WHERE);
    MPI_CONSTANTS(MPI_FIND)
    // FUNNELED: only the main thread calls MPI.
    mpi->Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    int began = c->size;                          // by the launcher's variables
    mpi->Comm_rank(mpi->world, &c->rank);
    mpi->Comm_size(mpi->world, &c->size);
    c->mpi = mpi;
    // Under a launcher of another MPI, every process would be alone.
    CHECK(c->size == began,
          "%s started %d processes, but Open MPI finds %d: the launcher belongs to another MPI\n"
          "  -> start with Open MPI's mpirun", by->name, began, c->size);
}

// Ranks come from the launcher's variables. Standard output of all processes but 0 goes to
// /dev/null, so callers print without checking the rank.
void comm_open(Comm *c, const char *device) {
    *c = (Comm){.size = 1};
    const Launcher *by = comm_launcher();
    if (!by) return;
    bool gpus = !strcmp(device, "cuda");
    CHECK(gpus || strcmp(by->name, "torchrun"),
          "expected mpirun to start processes on the CPU, found torchrun (%s processes)\n"
          "  -> mpirun -np %s ./train_gpt (more processes than cores: --oversubscribe)",
          getenv(by->size), getenv(by->size));
    c->local_rank = setting(by->local_rank);
    c->local_size = setting(by->local_size);
    c->rank = setting(by->rank);
    c->size = setting(by->size);
    CHECK(c->rank >= 0 && c->rank < c->size && c->local_rank >= 0,
          "%s=%d and %s=%d: expected numbers below %s=%d\n"
          "  -> start with torchrun, mpirun or srun",
          by->rank, c->rank, by->local_rank, c->local_rank, by->size, c->size);
    if (gpus) c->sockets = sockets_open(c->rank, c->size, c->local_size == c->size);
    else open_mpi(c, by);
    CHECK(!c->rank || freopen("/dev/null", "w", stdout),
          "cannot open /dev/null: %m\n  -> make it writable");
}

// sockets_close waits for every goodbye, MPI_Finalize for every process.
void comm_close(Comm *c) {
    if (c->sockets) sockets_close(c->sockets);
    if (c->mpi) c->mpi->Finalize();
    free(c->mpi);
}

bool comm_lost(const Comm *c) { return sockets_lost(c->sockets); }

// --------------------------------------------------------------------------------- small messages

// In pieces, because MPI counts bytes with an int.
static void mpi_move(Comm *c, void *data, size_t bytes, int from, int to) {
    Mpi *mpi = c->mpi;
    for (size_t at = 0; at < bytes; at += MPI_PIECE) {
        int n = least(bytes - at, MPI_PIECE);
        char *piece = (char *)data + at;
        if (c->rank == from) mpi->Send(piece, n, mpi->byte, to, 0, mpi->world);
        if (c->rank == to) mpi->Recv(piece, n, mpi->byte, from, 0, mpi->world, NULL);
    }
}

// Processes other than these two do nothing.
void comm_move(Comm *c, void *data, size_t bytes, int from, int to) {
    if (c->rank != from && c->rank != to) return;
    if (c->sockets) sockets_move(c->sockets, data, bytes, from, to);
    else mpi_move(c, data, bytes, from, to);
}

// A message to each process in turn: messages are small and processes few.
void comm_broadcast(Comm *c, void *data, size_t bytes) {
    for (int to = 1; to < comm_size(c); to++) comm_move(c, data, bytes, 0, to);
}

// Process 0 adds the values of process 1, then of process 2, and so on, and broadcasts the result.
void comm_all_reduce(Comm *c, double *x, int64_t n, int how) {
    if (comm_size(c) == 1) return;
    size_t bytes = n * sizeof *x;
    double *other = check_alloc(bytes, "a sum over processes");
    for (int from = 1; from < c->size; from++) {
        comm_move(c, c->rank ? x : other, bytes, from, 0);
        for (int64_t i = 0; i < n && !c->rank; i++) {
            if (how == COMM_SUM) x[i] += other[i];
            else if (other[i] > x[i] || isnan(other[i])) x[i] = other[i];
        }
    }
    free(other);
    comm_broadcast(c, x, bytes);
}

// Every process compares its number with that of process 0; the all-reduce counts those that
// differ. A double would not hold 64 bits of a hash, so the hashes themselves are not reduced.
bool comm_agree(Comm *c, uint64_t own) {
    uint64_t first = own;
    comm_broadcast(c, &first, sizeof first);
    double differ = first != own;
    comm_all_reduce(c, &differ, 1, COMM_SUM);
    return differ == 0;
}

void comm_check_weights(Comm *c, uint64_t hash) {
    CHECK(comm_agree(c, hash),
          "the processes hold different weights: each has read another file, or a memory or "
          "network fault\n  -> one file for all to begin with; " GO_ON);
}

// ---------------------------------------------------------------------------------------- signals

// The program's only mutable globals: the signal, since a handler gets no other data, and the
// handlers that were there before.
static volatile sig_atomic_t signal_received;
static struct sigaction interrupt_before, terminate_before;

// Only stores the signal: the training loop reads it between steps (comm_signal). A second SIGINT
// or SIGTERM has its default effect and ends the process.
static void on_signal(int number) {
    signal_received = number;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

// SA_RESTART: a signal does not interrupt reads and writes.
void comm_catch_signals(void) {
    struct sigaction stop = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &stop, &interrupt_before);
    sigaction(SIGTERM, &stop, &terminate_before);
}

// The old handlers may ignore SIGINT (a script's background job).
void comm_release_signals(bool raise_late) {
    sigaction(SIGINT, &interrupt_before, NULL);
    sigaction(SIGTERM, &terminate_before, NULL);
    if (raise_late && signal_received) raise(signal_received);
}

// A signal may reach only one process, or each at a different step. After the all-reduce all stop
// at the same step.
int comm_signal(Comm *c) {
    double received = signal_received;
    comm_all_reduce(c, &received, 1, COMM_MAX);
    return received;
}

// ---------------------------------------------------------------- tensors, in the background (MPI)

// MPI writes into x until Waitall returns.
void comm_wait(Comm *c) {
    if (!c || !c->count) return;
    c->mpi->Waitall(c->count, c->pending, NULL);
    c->count = 0;
}

void comm_poke(Comm *c) {
    int done;
    if (c && c->count) c->mpi->Testall(c->count, c->pending, &done, NULL);
}

// One request for each piece, because MPI counts elements with an int. On root the sum replaces x
// (MPI_IN_PLACE); on other processes x does not change.
void comm_start(Comm *c, int how, void *x, int64_t n, size_t element, int root) {
    Mpi *mpi = c->mpi;
    void *type = element == sizeof(float) ? mpi->float_type : mpi->double_type;
    for (int64_t at = 0; at < n; at += MPI_PIECE) {
        int count = least(n - at, MPI_PIECE);
        if (c->count == COMM_PENDING) comm_wait(c);       // the list of requests is full
        void *piece = (char *)x + at * element, **request = &c->pending[c->count++];
        const void *from = c->rank == root ? MPI_IN_PLACE : piece;
        void *to = c->rank == root ? piece : NULL;
        if (how == COMM_BROADCAST) mpi->Ibcast(piece, count, type, root, mpi->world, request);
        else mpi->Ireduce(from, to, count, type, mpi->sum, root, mpi->world, request);
    }
}
