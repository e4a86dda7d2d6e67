// socket.h: how processes with a GPU each find, tell and watch one another. Two TCP connections
// (IPv4) lead from every process to process 0:
//
//   talk     small messages, sent by the main thread
//   watch    a thread waits here for GOODBYE, or for the rank of a process that has died.
//            A connection that ends without either means that its process has died.
//
// Process 0 listens at MASTER_ADDR, port MASTER_PORT + 1: torchrun sets both and listens at
// MASTER_PORT itself. If they are not set: this machine, when it has all processes, and port 29501.
//
// Process 0 sees each of the others end; they see it end, and it tells them of each
// other. A machine that vanishes is given up after 50 seconds without an answer. A process that
// learns of a death says so and exits with EXIT_LOST, whatever its main thread waits for.
#pragma once
#include "util.h"

typedef struct Sockets Sockets;

// The first message on a connection; process 0 answers with its own. The magic number keeps
// strangers out.
typedef struct {
    uint64_t magic;
    int32_t rank, size;
    int32_t watch;                            // 0: talk
    int32_t unused;
} Greeting;
#define SOCKET_MAGIC 0x316b6c6174206e63ull

enum { WATCHDOG_SECONDS = 5 };                // within which the watchdog reports a dead process

// here: all processes are on this machine.
Sockets *sockets_open(int rank, int size, bool here);
// One of from, to is process 0, and one is this process.
void sockets_move(Sockets *s, void *data, size_t bytes, int from, int to);
// Says goodbye and waits until every connected peer has said it too.
void sockets_close(Sockets *s);
