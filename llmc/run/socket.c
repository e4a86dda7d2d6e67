// socket.c: see socket.h.
#include "socket.h"
#include "comm.h"
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

enum { DEFAULT_PORT = 29500 };
enum { MEET_SECONDS = 60 };               // for all processes to connect
enum { GREETING_SECONDS = 5 };            // for the first message on a connection
enum { GOODBYE = -1 };                    // no rank: ranks are 0 or more
enum { TALK, WATCH };                     // the two connections of socket.h
static const char APART[] = "start all processes with one command; two runs on one machine need "
                            "different MASTER_PORTs";

struct Sockets {
    int rank, size;
    atomic_bool lost;                     // a process has died
    int *peers[2];                        // TALK, WATCH: [size] to each process; 0: not connected
    pthread_t watchdog;
};

// Sends or receives all bytes, in as many pieces as it takes. False: the connection failed.
static bool transfer(int fd, void *data, size_t bytes, bool sends) {
    for (char *at = data, *end = at + bytes; at < end;) {
        ssize_t n = sends ? send(fd, at, end - at, MSG_NOSIGNAL) : recv(fd, at, end - at, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
    }
    return true;
}

// Connecting, accepting, sending and receiving fail after this many seconds; 0: never.
static void set_timeout(int fd, int seconds) {
    struct timeval limit = {seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

// Errors are ignored: each option is an improvement that the program works without.
static void set_option(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
}

// ------------------------------------------------------------------------------------- connecting

// Keeps a connection after the greeting. Messages are sent at once (TCP_NODELAY). A watch
// connection that is silent for 20 seconds is probed, and given up after three probes; a talk
// connection may be silent while its peer computes.
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

// MASTER_ADDR need not be an address of this machine's own interfaces, so process 0 listens on all.
static int start_listening(struct sockaddr_in at, bool here) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    // If all processes are on this machine, no other machine can connect.
    at.sin_addr.s_addr = htonl(here ? INADDR_LOOPBACK : INADDR_ANY);
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    CHECK(!bind(fd, (struct sockaddr *)&at, sizeof at) && !listen(fd, SOMAXCONN),
          "process 0 cannot listen on port %d: %m\n"
          "  -> another run may use it: set MASTER_PORT=%d, or any free port, for all processes",
          ntohs(at.sin_port), DEFAULT_PORT + 100);
    return fd;
}

// Exchanges the first message. False: the other end is not norm.c, or was silent until the timeout.
static bool greet(const Sockets *s, int fd, int watch, Greeting *g) {
    Greeting own = {SOCKET_MAGIC, s->rank, s->size, watch};
    return transfer(fd, &own, sizeof own, true) && transfer(fd, g, sizeof *g, false) &&
           g->magic == SOCKET_MAGIC;
}

// Keeps a new connection to process 0 if it comes from a process of norm.c; closes it otherwise.
static void accept_peer(Sockets *s, int fd) {
    Greeting g;
    set_timeout(fd, GREETING_SECONDS);
    if (!greet(s, fd, TALK, &g)) {
        close(fd);
        return;
    }
    // It is norm.c: from here on a mismatch means that the processes were started wrongly.
    CHECK(g.size == s->size && g.rank > 0 && g.rank < g.size,
          "process 0 of %d met a process %d of %d\n  -> %s", s->size, g.rank, g.size, APART);
    int watch = g.watch ? WATCH : TALK;
    CHECK(!s->peers[watch][g.rank], "two processes have the rank %d\n  -> %s", g.rank, APART);
    keep_connection(s, g.rank, fd, watch);
}

// Process 0 waits for all others; each connects talk first, then watch. One deadline holds for all
// of them together.
static void gather_peers(Sockets *s, int listener) {
    double deadline = clock_seconds() + MEET_SECONDS;
    set_timeout(listener, 1);             // accept waits a second, then the deadline is checked
    for (int missing = 1; missing < s->size; missing++)
        while (!s->peers[WATCH][missing]) {
            CHECK(clock_seconds() < deadline,
                  "process 0 expected %d others within %d seconds; process %d has not connected\n"
                  "  -> read its own error; its machine must reach this one at MASTER_PORT + 1",
                  s->size - 1, MEET_SECONDS, missing);
            int fd = accept(listener, NULL, NULL);
            if (fd >= 0) accept_peer(s, fd);
        }
    close(listener);
}

// The other processes connect to process 0, which may start later than they do.
static void reach_process_0(Sockets *s, struct sockaddr_in at, const char *host, int watch) {
    double deadline = clock_seconds() + MEET_SECONDS;
    Greeting g;
    for (;;) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        set_timeout(fd, MEET_SECONDS);            // process 0 may be greeting another connection
        if (!connect(fd, (struct sockaddr *)&at, sizeof at) && greet(s, fd, watch, &g)) {
            keep_connection(s, 0, fd, watch);
            return;
        }
        close(fd);
        CHECK(clock_seconds() < deadline,
              "process %d of %d has not found process 0 at %s, port %d, in %d seconds\n"
              "  -> read process 0's own error; MASTER_ADDR must be its machine, the port open",
              s->rank, s->size, host, ntohs(at.sin_port), MEET_SECONDS);
        usleep(200 * 1000);
    }
}

// --------------------------------------------------------------------------------------- watching

// Tells the others that a process has died, and exits a second later. Until then the main thread
// may abort transfers, or end the program with a better message if all processes refuse something.
static void report_death(Sockets *s, int dead) {
    s->lost = true;
    for (int i = 0; i < s->size; i++)
        if (s->peers[WATCH][i])
            send(s->peers[WATCH][i], &dead, sizeof dead, MSG_NOSIGNAL | MSG_DONTWAIT);
    sleep(1);
    dprintf(STDERR_FILENO,
            "error: process %d of %d is gone, and process %d ends with it\n"
            "  -> see its last message; " GO_ON "\n",
            dead, s->size, s->rank);
    _exit(EXIT_LOST);
}

// The watchdog's thread: runs until every peer has said goodbye.
static void *watch_peers(void *sockets) {
    Sockets *s = sockets;
    struct pollfd *peers = check_alloc(s->size * sizeof *peers, "a list of processes");
    int left = s->rank ? 1 : s->size - 1;
    for (int i = 0; i < s->size; i++) {
        peers[i].fd = s->peers[WATCH][i] ? s->peers[WATCH][i] : -1;       // poll ignores -1
        peers[i].events = POLLIN;
    }
    while (left) {
        if (poll(peers, s->size, -1) < 0) continue;
        for (int i = 0; i < s->size; i++) {
            int32_t word;
            if (!peers[i].revents) continue;
            bool whole = transfer(peers[i].fd, &word, sizeof word, false);
            // A rank: process 0 passes on which process died. No message: this peer has died.
            if (!whole || word != GOODBYE) report_death(s, whole ? word : i);
            peers[i].fd = -1;
            left--;
        }
    }
    free(peers);
    return NULL;
}

// ----------------------------------------------------------------------------- open, move, close

// IPv4 only. MASTER_ADDR is a name or an address; the port is torchrun's plus 1.
static struct sockaddr_in find_process_0(const char *host) {
    const char *port = getenv("MASTER_PORT");
    struct addrinfo ipv4 = {.ai_family = AF_INET}, *found = NULL;
    struct sockaddr_in at;
    int failed = getaddrinfo(host, NULL, &ipv4, &found);
    CHECK(!failed,
          "MASTER_ADDR=%s: expected the name or address of the machine of process 0: %s\n"
          "  -> set it for all processes", host, gai_strerror(failed));
    memcpy(&at, found->ai_addr, sizeof at);
    freeaddrinfo(found);
    at.sin_port = htons((port ? atoi(port) : DEFAULT_PORT) + 1);
    return at;
}

Sockets *sockets_open(int rank, int size, bool here) {
    const char *host = here ? "127.0.0.1" : getenv("MASTER_ADDR");
    CHECK(host,
          "process %d of %d: expected MASTER_ADDR, the machine of process 0, found none\n"
          "  -> mpirun -x MASTER_ADDR=its machine, or export it before srun",
          rank, size);
    Sockets *s = check_alloc(sizeof *s, "the connections of processes");
    s->rank = rank;
    s->size = size;
    s->peers[TALK] = check_alloc(2 * size * sizeof(int), "a list of processes");
    s->peers[WATCH] = s->peers[TALK] + size;
    struct sockaddr_in at = find_process_0(host);
    // A star: all others connect to process 0 alone.
    if (rank == 0) gather_peers(s, start_listening(at, here));
    else for (int watch = TALK; watch <= WATCH; watch++) reach_process_0(s, at, host, watch);
    errno = pthread_create(&s->watchdog, NULL, watch_peers, s);
    CHECK(!errno,
          "cannot start a thread: %m\n"
          "  -> close other programs, or raise the limit on threads (ulimit -u)");
    return s;
}

// Blocks until all bytes are sent or received. The kernel buffers small messages, so senders rarely
// wait.
void sockets_move(Sockets *s, void *data, size_t bytes, int from, int to) {
    bool sends = s->rank == from;
    bool whole = transfer(s->peers[TALK][sends ? to : from], data, bytes, sends);
    if (!whole) sleep(WATCHDOG_SECONDS);      // the watchdog exits first if a process has died
    CHECK(whole,
          "the connection between processes %d and %d broke\n  -> " GO_ON, from, to);
}

bool sockets_lost(const Sockets *s) { return s->lost; }

// The watchdog ends after the last goodbye, so joining it waits for the slowest process. The
// connections close when the process ends.
void sockets_close(Sockets *s) {
    int32_t goodbye = GOODBYE;
    for (int i = 0; i < s->size; i++)
        if (s->peers[WATCH][i]) transfer(s->peers[WATCH][i], &goodbye, sizeof goodbye, true);
    pthread_join(s->watchdog, NULL);
    free(s->peers[TALK]);
    free(s);
}
