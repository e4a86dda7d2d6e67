// socket.c: see socket.h.
#include "socket.h"
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

enum { DEFAULT_PORT = 29500 };
enum { MEET_SECONDS = 60 };               // to find one another
enum { GREETING_SECONDS = 5 };            // for the first message on a connection
enum { GOODBYE = -1 };                    // no rank: ranks are 0 or more
enum { TALK, WATCH };                     // the two connections of socket.h
static const char APART[] = "start all of them with one command; give each of two runs on one "
                            "machine its own MASTER_PORT";

struct Sockets {
    int rank, size;
    int *peers[2];                        // TALK, WATCH: [size] to each process; -1: not connected
    pthread_t watchdog;
};

// Sends or receives all of the bytes, in as many pieces as it takes.
static bool transfer(int fd, void *data, size_t bytes, bool sends) {
    for (char *at = data, *end = at + bytes; at < end;) {
        ssize_t n = sends ? send(fd, at, end - at, MSG_NOSIGNAL) : recv(fd, at, end - at, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
    }
    return true;
}

static bool send_all(int fd, void *data, size_t bytes) { return transfer(fd, data, bytes, true); }
static bool receive_all(int fd, void *data, size_t n) { return transfer(fd, data, n, false); }

// A receive gives up after so many seconds; 0: never.
static void set_timeout(int fd, int seconds) {
    struct timeval limit = {seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

// Options are improvements: a system that lacks one works without it.
static void set_option(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
}

// ------------------------------------------------------------------------------------- connecting

// Both ends know each other. Messages go out at once. A watch connection that is silent for 20
// seconds is probed, and given up after three probes; a talk connection may be silent for as long
// as its peer computes.
static void keep_connection(Sockets *s, int peer, int fd, int watch) {
    set_timeout(fd, 0);
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    if (watch) {
        set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
        set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 20);
        set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
        set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
    }
    s->peers[watch][peer] = fd;
}

// The name by which others know this machine need not be one of its own, so it listens on all.
static int start_listening(struct sockaddr_in at, bool here) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    // With all processes on this machine, other machines are not let in.
    at.sin_addr.s_addr = htonl(here ? INADDR_LOOPBACK : INADDR_ANY);
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    CHECK(!bind(fd, (struct sockaddr *)&at, sizeof at) && !listen(fd, SOMAXCONN),
          "process 0 cannot listen at port %d: %s\n"
          "  -> is another run here? MASTER_PORT=%d, or any that is free, for all processes",
          ntohs(at.sin_port), strerror(errno), DEFAULT_PORT + 100);
    return fd;
}

// The first message, in both directions at once. False: the other end is none of norm.c, or it said
// nothing before the timeout.
static bool greet(const Sockets *s, int fd, int watch, Greeting *g) {
    Greeting own = {SOCKET_MAGIC, s->rank, s->size, watch, 0};
    return send_all(fd, &own, sizeof own) && receive_all(fd, g, sizeof *g) &&
           g->magic == SOCKET_MAGIC;
}

// One connection to process 0: a stranger is turned away, a peer is kept. Returns whether it is a
// peer.
static bool accept_peer(Sockets *s, int fd) {
    Greeting g;
    set_timeout(fd, GREETING_SECONDS);
    if (!greet(s, fd, TALK, &g)) {
        close(fd);
        return false;
    }
    // A process of norm.c: from here on a fault is a wrong start, not a stranger.
    CHECK(g.size == s->size && g.rank > 0 && g.rank < g.size,
          "process 0 of %d met a process %d of %d\n  -> %s", s->size, g.rank, g.size, APART);
    int watch = g.watch ? WATCH : TALK;
    CHECK(s->peers[watch][g.rank] < 0, "two processes have the number %d\n  -> %s", g.rank, APART);
    keep_connection(s, g.rank, fd, watch);
    return true;
}

// Process 0 waits for all the others.
static void gather_peers(Sockets *s, int listener) {
    double deadline = clock_seconds() + MEET_SECONDS;
    // The deadline holds for all of them together.
    for (int connections = 0; connections < 2 * (s->size - 1);) {
        struct pollfd wait = {listener, POLLIN, 0};
        double left = deadline - clock_seconds();
        int missing = 1;
        while (missing < s->size && s->peers[WATCH][missing] >= 0) missing++;
        CHECK(left > 0,
              "process 0 waits for %d others, and process %d has not come in %d seconds\n"
              "  -> did it print an error? can its machine reach this one at MASTER_PORT + 1?",
              s->size - 1, missing, MEET_SECONDS);
        // A signal or a stranger that went away: look at the deadline again.
        if (poll(&wait, 1, 1000 * left) <= 0) continue;
        int fd = accept(listener, NULL, NULL);
        if (fd >= 0) connections += accept_peer(s, fd);
    }
    close(listener);
}

// The others connect to process 0, which may start later than they do.
static void reach_process_0(Sockets *s, struct sockaddr_in at, const char *host, int watch) {
    double deadline = clock_seconds() + MEET_SECONDS;
    Greeting g;
    for (;;) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        set_timeout(fd, MEET_SECONDS);            // process 0 may be waiting for a stranger
        if (!connect(fd, (struct sockaddr *)&at, sizeof at) && greet(s, fd, watch, &g)) {
            keep_connection(s, 0, fd, watch);
            return;
        }
        close(fd);
        CHECK(clock_seconds() < deadline,
              "process %d of %d has not found process 0 at %s, port %d, in %d seconds\n"
              "  -> did it print an error? is MASTER_ADDR its machine, MASTER_PORT not blocked?",
              s->rank, s->size, host, ntohs(at.sin_port), MEET_SECONDS);
        usleep(200 * 1000);
    }
}

// --------------------------------------------------------------------------------------- watching

// Tells everyone that a process has died, and exits. The main thread gets a second first: if all
// processes refuse something, each of them says it better than this does.
static void report_death(const Sockets *s, int dead) {
    for (int i = 0; i < s->size; i++)
        if (s->peers[WATCH][i] >= 0)
            send(s->peers[WATCH][i], &dead, sizeof dead, MSG_NOSIGNAL | MSG_DONTWAIT);
    sleep(1);
    dprintf(STDERR_FILENO,
            "error: process %d of %d is gone, and process %d ends with it\n"
            "  -> see its last message; --resume required goes on from the last checkpoint\n",
            dead, s->size, s->rank);
    _exit(EXIT_LOST);
}

// The watchdog's thread: runs until every peer has said goodbye.
static void *watch_peers(void *sockets) {
    Sockets *s = sockets;
    struct pollfd *peers = check_alloc(s->size * sizeof *peers, "a list of processes");
    int left = 0;
    for (int i = 0; i < s->size; i++) {
        peers[i].fd = s->peers[WATCH][i];                // poll ignores -1
        peers[i].events = POLLIN;
        left += s->peers[WATCH][i] >= 0;
    }
    while (left) {
        if (poll(peers, s->size, -1) < 0) continue;
        for (int i = 0; i < s->size; i++) {
            int32_t word;
            if (!peers[i].revents) continue;
            bool whole = receive_all(peers[i].fd, &word, sizeof word);
            // A rank: process 0 passes on which process died. Silence: this peer did.
            if (!whole || word != GOODBYE) report_death(s, whole ? word : i);
            peers[i].fd = -1;
            left--;
        }
    }
    free(peers);
    return NULL;
}

// ----------------------------------------------------------------------------- open, move, close

// IPv4 only: MASTER_ADDR is a name or an address; the port is the one behind torchrun's.
static struct sockaddr_in find_process_0(const char *host) {
    const char *port = getenv("MASTER_PORT");
    struct addrinfo ipv4 = {.ai_family = AF_INET}, *found = NULL;
    struct sockaddr_in at;
    int failed = getaddrinfo(host, NULL, &ipv4, &found);
    CHECK(!failed, "MASTER_ADDR=%s: %s\n  -> the name or address of the machine of process 0", host,
          gai_strerror(failed));
    memcpy(&at, found->ai_addr, sizeof at);
    freeaddrinfo(found);
    at.sin_port = htons((port ? atoi(port) : DEFAULT_PORT) + 1);
    return at;
}

Sockets *sockets_open(int rank, int size, bool here) {
    const char *host = here ? "127.0.0.1" : getenv("MASTER_ADDR");
    CHECK(host,
          "process %d of %d: MASTER_ADDR does not say where process 0 is, on another machine\n"
          "  -> mpirun -x MASTER_ADDR=its machine, or export it before srun, for all processes",
          rank, size);
    Sockets *s = check_alloc(sizeof *s, "the connections of processes");
    s->rank = rank;
    s->size = size;
    int *all = s->peers[TALK] = check_alloc(2 * size * sizeof *all, "a list of processes");
    s->peers[WATCH] = all + size;
    for (int i = 0; i < 2 * size; i++) all[i] = -1;
    struct sockaddr_in at = find_process_0(host);
    // A star: process 0 is connected with all, the others only with it.
    if (rank == 0) gather_peers(s, start_listening(at, here));
    else for (int watch = TALK; watch <= WATCH; watch++) reach_process_0(s, at, host, watch);
    int error = pthread_create(&s->watchdog, NULL, watch_peers, s);
    CHECK(!error, "cannot start a thread: %s\n  -> ulimit -u says how many there may be",
          strerror(error));
    return s;
}

// Blocks until all bytes are taken. The kernel buffers small messages, so senders rarely wait.
void sockets_move(Sockets *s, void *data, size_t bytes, int from, int to) {
    bool sends = s->rank == from;
    bool whole = transfer(s->peers[TALK][sends ? to : from], data, bytes, sends);
    if (!whole) sleep(WATCHDOG_SECONDS);      // if a process died, the watchdog says it
    CHECK(whole,
          "the connection of processes %d and %d broke\n  -> --resume required goes on from the "
          "last checkpoint", from, to);
}

// The watchdog ends when the last goodbye has come; joining it waits for the slowest process.
void sockets_close(Sockets *s) {
    int32_t goodbye = GOODBYE;
    for (int i = 0; i < s->size; i++)
        if (s->peers[WATCH][i] >= 0) send_all(s->peers[WATCH][i], &goodbye, sizeof goodbye);
    pthread_join(s->watchdog, NULL);
    for (int i = 0; i < 2 * s->size; i++)
        if (s->peers[TALK][i] >= 0) close(s->peers[TALK][i]);         // WATCH lies behind it
    free(s->peers[TALK]);
    free(s);
}
