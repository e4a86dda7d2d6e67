// comm.h: several processes that train one model: data parallelism, with the optimizer's state
// sharded over the processes (ZeRO-1; Rajbhandari et al. 2020).
//
// A step: every process computes the gradients of its samples. While backward goes on to earlier
// layers, each layer's gradients are reduced to their owners (memory.h, entry_part). An owner
// updates its shard of the weights and broadcasts it. Losses, the gradient norm and signals are
// all-reduced through process 0 (on the CPU in the order of ranks), so all processes make the same
// decision and repeated runs have the same bits. If one process dies, the others end.
//
// On the CPU, mpirun (Open MPI) or srun starts the processes, which communicate by MPI. Its library
// is loaded only then; building needs no MPI. On GPUs torchrun may start them as well: small
// messages go over sockets (socket.h), tensors through NCCL (nccl.cuh).
#pragma once
#include "util.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { COMM_PENDING = 256 };                  // transfers in flight at most

// NULL, or size 1: there is one process.
typedef struct {
    int rank, size;                           // this process, from 0, and how many there are
    int local_rank, local_size;               // the same among the processes of this machine
    struct Sockets *sockets;                  // on GPUs; else NULL
    struct Mpi *mpi;                          // on the CPU; else NULL
    void *pending[COMM_PENDING];              // MPI requests in flight,
    int count;                                // and how many
} Comm;

static inline int comm_rank(const Comm *c) { return c ? c->rank : 0; }
static inline int comm_size(const Comm *c) { return c && c->size > 1 ? c->size : 1; }
static inline int comm_local_rank(const Comm *c) { return c ? c->local_rank : 0; }
static inline int comm_local_size(const Comm *c) {
    return c && c->local_size > 1 ? c->local_size : 1;
}

// The names of a launcher's environment variables: number of processes, rank, and both among the
// processes of this machine. srun writes local_size for all machines, as "2(x3)" or "2,1"; its
// first number is right if there is one machine.
typedef struct {
    const char *name, *size, *rank, *local_rank, *local_size;
} Launcher;
enum { LAUNCHER_COUNT = 3 };
extern const Launcher LAUNCHERS[LAUNCHER_COUNT];
const Launcher *comm_launcher(void);          // the one that started this process; NULL: none

// comm_open must come before anything is printed: from then on only process 0 prints to standard
// output; every process prints its errors. comm_close waits until all processes have called it. A
// process that ends without it counts as dead.
void comm_open(Comm *c, const char *device);
void comm_close(Comm *c);

// Small messages; each call returns when its message is done. comm_move: process `from` sends to
// process `to`, and one of them is 0. data: the source in one, the destination in the other.
void comm_move(Comm *c, void *data, size_t bytes, int from, int to);
void comm_broadcast(Comm *c, void *data, size_t bytes);       // from process 0
// All-reduce: x[i] becomes the sum or maximum of x[i] over all processes, with the same bits in
// each. A NaN in any process gives NaN.
enum { COMM_SUM, COMM_MAX };
void comm_all_reduce(Comm *c, double *x, int64_t n, int how);
bool comm_agree(Comm *c, uint64_t own);       // whether all processes have the same number
void comm_check_weights(Comm *c, uint64_t hash);              // refuses to go on if they differ

// After Ctrl-C or a scheduler's SIGTERM the current step finishes; a second signal ends the program
// at once. release restores the handlers; raise_late: raises a signal that comm_signal never saw.
void comm_catch_signals(void);
void comm_release_signals(bool raise_late);
int comm_signal(Comm *c);                     // the signal that any process has received, or 0

// Moves tensors of the CPU in the background; x must not change until comm_wait returns.
// COMM_REDUCE: the sum of every process's x goes to x of process `root`. COMM_BROADCAST: x of root
// goes to all. element: sizeof(float) or sizeof(double).
enum { COMM_REDUCE, COMM_BROADCAST };
void comm_start(Comm *c, int how, void *x, int64_t n, size_t element, int root);
void comm_poke(Comm *c);                      // lets MPI make progress, which needs calls to it
void comm_wait(Comm *c);

// On GPUs: whether a process has died; the watchdog (socket.h) then ends this one a second later.
bool comm_lost(const Comm *c);
// Seconds that a failed transfer waits, so that the watchdog reports first that a process died.
enum { WATCHDOG_SECONDS = 5 };

// A function of a library that dlopen has found; `where` ends the error if it is missing.
void *comm_symbol(void *library, const char *name, const char *where);
#ifdef __cplusplus
}
#endif
