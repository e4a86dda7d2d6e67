// socket.h: how processes, each with a GPU, connect, exchange small messages and notice that one of
// them has died. Two TCP connections (IPv4) lead from every process to process 0:
//
//   talk     small messages, sent by the main thread
//   watch    a thread waits here for GOODBYE, or for the rank of a process that has died.
//            If a connection ends without either, its process has died.
//
// Process 0 listens on port MASTER_PORT + 1 of MASTER_ADDR: torchrun sets both and listens on
// MASTER_PORT itself. On one machine neither is needed; without MASTER_PORT the port is 29501.
//
// Process 0 notices every death and tells the others. A machine that vanishes counts as dead after
// 50 seconds without an answer. A process that learns of a death prints it and exits with
// EXIT_LOST a second later, even if its main thread is blocked.
#pragma once
#include "util.h"

typedef struct Sockets Sockets;

// The first message on a connection; process 0 answers with its own. The magic number tells norm.c
// from other programs.
typedef struct {
    uint64_t magic;
    int32_t rank, size;
    int64_t watch;                            // 0: talk
} Greeting;
#define SOCKET_MAGIC 0x316b6c6174206e63ull

// here: all processes are on this machine.
Sockets *sockets_open(int rank, int size, bool here);
// One of from and to is process 0, and one is this process.
void sockets_move(Sockets *s, void *data, size_t bytes, int from, int to);
// Whether a process has died, and this one is about to exit.
bool sockets_lost(const Sockets *s);
// Says goodbye and waits until every connected peer has said it too.
void sockets_close(Sockets *s);
