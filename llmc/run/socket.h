// socket.h: how processes of which each has a GPU find, tell and watch one another. Two TCP connections (IPv4) lead from each of them to process 0:
//
//   talk     small messages, of the main thread
//   watch    a thread listens here for a last word: GOODBYE, or the number of a process that is gone. An end without a word means that its process died.
//
// Process 0 waits at MASTER_ADDR, port MASTER_PORT + 1, as torchrun, which sets both, listens at MASTER_PORT itself. Where they are not set: this machine, if it has all
// processes, and 29501.
//
// Process 0 sees each of the others end, they see it end, and it tells them of each other. A machine that vanishes says nothing: it is given up when it has not
// answered for 50 seconds. Who learns that a process is gone says so and ends at once (EXIT_LOST), whatever its main thread waits for.
#pragma once
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>
#include "util.h"

enum { SOCKET_PORT = 29500, SOCKET_SECONDS = 60, GREETING_SECONDS = 5, GOODBYE = -1 };

// rank, size: of the processes. talk, watch: to each of them, -1 where none leads.
typedef struct Sockets { int rank, size, *talk, *watch; pthread_t watchdog; } Sockets;

// The first that is sent on a connection; process 0 answers with its own. The magic number keeps strangers out.
typedef struct Greeting { uint64_t magic; int32_t rank, size, watch, unused; } Greeting;
static const uint64_t SOCKET_MAGIC = 0x316b6c6174206e63;

// ------------------------------------------------------------------------------------------------------------------ bytes

static inline bool socket_send(int fd, const void *data, size_t bytes) {
    for (const char *at = (const char *)data, *end = at + bytes; at < end;) {
        ssize_t n = send(fd, at, (size_t)(end - at), MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
    }
    return true;
}

static inline bool socket_receive(int fd, void *data, size_t bytes) {
    for (char *at = (char *)data, *end = at + bytes; at < end;) {
        ssize_t n = recv(fd, at, (size_t)(end - at), 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
    }
    return true;
}

// A greeting that does not come is not waited for; later a process may compute for as long as it likes.
static inline void socket_limit(int fd, int seconds) {
    struct timeval limit = {seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

static inline void socket_set(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

// ------------------------------------------------------------------------------------------------------------------ finding one another

// A connection is there, and both know whose it is. Messages go out at once; a watch that is silent for 20 seconds is asked, and given up after three questions.
static inline void socket_keep(Sockets *s, int peer, int fd, int watch) {
    socket_limit(fd, 0);
    socket_set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    if (watch) {
        socket_set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
        socket_set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 20);
        socket_set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
        socket_set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    }
    (watch ? s->watch : s->talk)[peer] = fd;
}

static inline int socket_listen(struct sockaddr_in at, bool here) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    at.sin_addr.s_addr = htonl(here ? INADDR_LOOPBACK : INADDR_ANY);       // the name others know this machine by need not be one of its own
    socket_set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, SOMAXCONN) == 0,
          "process 0 cannot listen at port %d: %s\n  -> is another run here? MASTER_PORT=%d, or any that is free, for all processes", ntohs(at.sin_port), strerror(errno), SOCKET_PORT + 100);
    return fd;
}

// Process 0: all the others come, or are missed.
static inline void socket_gather(Sockets *s, int listener) {
    double deadline = clock_seconds() + SOCKET_SECONDS;
    Greeting own = {SOCKET_MAGIC, 0, s->size, 0, 0};
    for (int come = 0; come < 2 * (s->size - 1);) {
        struct pollfd wait = {listener, POLLIN, 0};
        double left = deadline - clock_seconds();
        int missing = 1;
        while (missing < s->size && s->watch[missing] >= 0) missing++;
        CHECK(left > 0, "process 0 waits for %d others, and process %d has not come in %d seconds\n  -> did it say why? can its machine reach this one, MASTER_ADDR, at port MASTER_PORT + 1?",
              s->size - 1, missing, SOCKET_SECONDS);
        if (poll(&wait, 1, (int)(1000 * left)) <= 0) continue;
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) continue;
        Greeting g;
        socket_limit(fd, GREETING_SECONDS);
        if (!socket_receive(fd, &g, sizeof g) || g.magic != SOCKET_MAGIC || !socket_send(fd, &own, sizeof own)) {
            close(fd);
            continue;
        }
        CHECK(g.size == s->size && g.rank > 0 && g.rank < g.size, "process 0 of %d met a process %d of %d\n  -> begin all of them with one command; of two runs on one machine, each with its MASTER_PORT", s->size, g.rank, g.size);
        CHECK((g.watch ? s->watch : s->talk)[g.rank] < 0, "two processes have the number %d\n  -> begin all of them with one command; of two runs on one machine, each with its MASTER_PORT", g.rank);
        socket_keep(s, g.rank, fd, g.watch);
        come++;
    }
    close(listener);
}

// The others: process 0 may begin later than they do.
static inline void socket_reach(Sockets *s, struct sockaddr_in at, const char *host, int watch) {
    double deadline = clock_seconds() + SOCKET_SECONDS;
    Greeting own = {SOCKET_MAGIC, s->rank, s->size, watch, 0}, g;
    for (;;) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        socket_limit(fd, SOCKET_SECONDS);                                   // process 0 may have strangers to wait for
        bool met = connect(fd, (struct sockaddr *)&at, sizeof at) == 0 && socket_send(fd, &own, sizeof own) && socket_receive(fd, &g, sizeof g) && g.magic == SOCKET_MAGIC;
        if (met) {
            socket_keep(s, 0, fd, watch);
            return;
        }
        close(fd);
        CHECK(clock_seconds() < deadline, "process %d of %d has not found process 0 at %s, port %d, in %d seconds\n  -> did process 0 say why? else: MASTER_ADDR=its machine, and a MASTER_PORT that no firewall bars, for all processes",
              s->rank, s->size, host, ntohs(at.sin_port), SOCKET_SECONDS);
        usleep(200 * 1000);
    }
}

// ------------------------------------------------------------------------------------------------------------------ the watch

// Everyone is told. A second for the main thread: what it refuses, all processes may be refusing, and each says it better than this does.
static inline void socket_gone(const Sockets *s, int gone) {
    for (int i = 0; i < s->size; i++)
        if (s->watch[i] >= 0) send(s->watch[i], &gone, sizeof gone, MSG_NOSIGNAL | MSG_DONTWAIT);
    sleep(1);
    dprintf(STDERR_FILENO, "error: process %d of %d is gone, and process %d ends with it\n  -> what did that one say last? --resume required goes on from the last checkpoint\n", gone, s->size, s->rank);
    _exit(EXIT_LOST);
}

// Until all peers have said goodbye.
static inline void *socket_watch(void *sockets) {
    Sockets *s = (Sockets *)sockets;
    struct pollfd *peers = (struct pollfd *)check_alloc((size_t)s->size * sizeof *peers, "a list of processes");
    int left = 0;
    for (int i = 0; i < s->size; i++) {
        peers[i].fd = s->watch[i];                                          // poll passes over -1
        peers[i].events = POLLIN;
        left += s->watch[i] >= 0;
    }
    while (left) {
        if (poll(peers, (nfds_t)s->size, -1) < 0) continue;
        for (int i = 0; i < s->size; i++) {
            int32_t word;
            if (!peers[i].revents) continue;
            bool said = socket_receive(peers[i].fd, &word, sizeof word);
            if (!said || word != GOODBYE) socket_gone(s, said ? word : i);
            peers[i].fd = -1;
            left--;
        }
    }
    free(peers);
    return NULL;
}

// ------------------------------------------------------------------------------------------------------------------ beginning, messages, end

// rank, size: set. here: all processes are on this machine.
static inline void socket_open(Sockets *s, bool here) {
    const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    struct addrinfo like, *found = NULL;
    memset(&like, 0, sizeof like);
    like.ai_family = AF_INET;
    CHECK(here || host, "process %d of %d: the others are on other machines, and MASTER_ADDR does not say where process 0 is\n  -> MASTER_ADDR=its machine for all processes: mpirun -x MASTER_ADDR=..., or export it before srun", s->rank, s->size);
    if (here) host = "127.0.0.1";
    int failed = getaddrinfo(host, NULL, &like, &found);
    CHECK(!failed, "MASTER_ADDR=%s: %s\n  -> the name or address of the machine of process 0", host, gai_strerror(failed));
    struct sockaddr_in at;
    memcpy(&at, found->ai_addr, sizeof at);
    freeaddrinfo(found);
    at.sin_port = htons((uint16_t)((port ? atoi(port) : SOCKET_PORT) + 1));
    s->talk = (int *)check_alloc(2 * (size_t)s->size * sizeof(int), "a list of processes");
    s->watch = s->talk + s->size;
    for (int i = 0; i < 2 * s->size; i++) s->talk[i] = -1;
    if (!s->rank) socket_gather(s, socket_listen(at, here));
    else for (int watch = 0; watch < 2; watch++) socket_reach(s, at, host, watch);
    CHECK(pthread_create(&s->watchdog, NULL, socket_watch, s) == 0, "cannot begin a thread: %s\n  -> ulimit -u says how many there may be", strerror(errno));
}

// Where a process is gone the watchdog knows, and says it: for that there is time before an error that follows from it.
static inline void socket_await_end(void) { sleep(GREETING_SECONDS); }

// One of from and to is process 0, and one is this.
static inline void socket_move(Sockets *s, void *data, size_t bytes, int from, int to) {
    bool whole = s->rank == from ? socket_send(s->talk[to], data, bytes) : socket_receive(s->talk[from], data, bytes);
    if (!whole) socket_await_end();
    CHECK(whole, "the connection of processes %d and %d broke\n  -> --resume required goes on from the last checkpoint", from, to);
}

// An end is no end before all that this process is connected with have come to it.
static inline void socket_close(Sockets *s) {
    int32_t goodbye = GOODBYE;
    for (int i = 0; i < s->size; i++) if (s->watch[i] >= 0) socket_send(s->watch[i], &goodbye, sizeof goodbye);
    pthread_join(s->watchdog, NULL);
    for (int i = 0; i < 2 * s->size; i++) if (s->talk[i] >= 0) close(s->talk[i]);
    free(s->talk);
}
