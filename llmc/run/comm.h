// comm.h: several processes that train one model: data parallelism, with the optimizer's state
// sharded over the processes (ZeRO-1; Rajbhandari et al. 2020).
//
// A step. Every process computes the gradients of its samples. While backward works on the layers
// below, each layer's gradients are reduced to their owners (memory.h, entry_part). An owner
// updates its shard of the weights and broadcasts it. Losses, the gradient norm and signals are
// all-reduced by process 0 in the order of ranks, so that all processes decide alike.
//
// On the CPU Open MPI's mpirun, or srun, starts the processes, and they speak MPI. The library is
// loaded only then; building needs none. On GPUs torchrun starts them too. Small messages travel
// over sockets (socket.h), tensors by NCCL (nccl.cuh).
#pragma once
#include "util.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { COMM_PENDING = 256 };                  // transfers in flight at most

// NULL, or size 1: there is one process.
typedef struct Comm {
    int rank, size;                           // of all processes, rank from 0
    int local, here;                          // the same among those of this machine
    struct Sockets *sockets;                  // on GPUs,
    struct Mpi *mpi;                          // or on the CPU
    void *pending[COMM_PENDING];              // MPI requests in flight,
    int count;                                // and how many
} Comm;

static inline int comm_rank(const Comm *c) { return c ? c->rank : 0; }
static inline int comm_size(const Comm *c) { return c && c->size > 1 ? c->size : 1; }
static inline int comm_local(const Comm *c) { return c ? c->local : 0; }
static inline int comm_here(const Comm *c) { return c && c->here > 1 ? c->here : 1; }

// The environment variables of one launcher: the number of processes, the rank, and both among the
// processes of this machine. srun writes "2(x3)" or "2,1" for `here`: its first number is right
// where there is one machine.
typedef struct {
    const char *name, *size, *rank, *local, *here;
} Launcher;
enum { LAUNCHER_COUNT = 3 };
extern const Launcher LAUNCHERS[LAUNCHER_COUNT];
const Launcher *comm_launcher(void);          // the one that started this process; NULL: none

// comm_open comes before anything is printed: only process 0 prints, errors are everyone's.
// comm_close waits until every process has come to its end; without it an end is a failure.
void comm_open(Comm *c, const char *device);
void comm_close(Comm *c);

// Small messages, at once. comm_move: one of from, to is process 0; the buffer is the same on both.
void comm_move(Comm *c, void *data, size_t bytes, int from, int to);
void comm_broadcast(Comm *c, void *data, size_t bytes);       // from process 0
// All-reduce: x[i] becomes the sum, or the maximum, of every process's x[i], the same bits
// everywhere. A NaN stays.
enum { COMM_SUM, COMM_MAX };
void comm_all_reduce(Comm *c, double *x, int64_t n, int how);
bool comm_agree(Comm *c, uint64_t own);       // whether all processes have the same number
void comm_check_weights(Comm *c, uint64_t hash);              // refuses to go on if they differ

// Ctrl-C or a scheduler's SIGTERM lets the step in work finish; a second signal ends at once.
void comm_catch_signals(void);
void comm_release_signals(bool raise_late);   // a signal that came too late to be asked for
int comm_signal(Comm *c);                     // the signal that any of the processes got, or 0

// Tensors of the CPU, in the background until comm_wait; nobody may change x meanwhile.
// COMM_REDUCE: the sum of every process's x goes to x of process `root`. COMM_BROADCAST: x of root
// goes to all. element: sizeof(float) or sizeof(double).
enum { COMM_REDUCE, COMM_BROADCAST };
void comm_start(Comm *c, int how, void *x, int64_t n, size_t element, int root);
void comm_poke(Comm *c);                      // MPI makes progress only inside its own calls
void comm_wait(Comm *c);

// After a transfer failed: gives the watchdog time to report the process that died.
void comm_await_watchdog(void);

// A function of a library that dlopen has found; `where` ends the error if it is missing.
void *comm_symbol(void *library, const char *name, const char *where);
#ifdef __cplusplus
}
#endif
