// test_comm.c: processes that find one another over sockets (llmc/run/socket.h), what they tell
// each other, and how they end when one of them is gone. All are forked here; the launchers'
// variables are set by hand. Calls of MPI are only noted; MPI itself is tested with mpirun.
#include <signal.h>
#include <sys/wait.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../../llmc/run/comm.h"
#include "../../llmc/run/mpi.h"
#include "../../llmc/run/socket.h"
#include "../../llmc/run/util.h"
#include "test.h"

enum { PROCESSES = 3, BIG = 3 << 20 };

// A port that was free a moment ago.
static int free_port(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(fd, (struct sockaddr *)&at, size) == 0 &&
              getsockname(fd, (struct sockaddr *)&at, &size) == 0,
          "no free port");
    close(fd);
    return ntohs(at.sin_port);
}

static void set(const char *name, int value) {
    char text[32];
    setenv(name, check_format(text, sizeof text, "%d", value), 1);
}

static void forget(void) {
    unsetenv("MASTER_ADDR");
    for (size_t i = 0; i < LAUNCHER_COUNT; i++) {
        const char *names[] = {LAUNCHERS[i].size, LAUNCHERS[i].rank, LAUNCHERS[i].local_rank,
                               LAUNCHERS[i].local_size};
        for (int k = 0; k < 4; k++) unsetenv(names[k]);
    }
}

static int late;  // milliseconds that all but process 0 begin later

// As process `rank` of PROCESSES begins, from comm_open to comm_close.
static void take_part(const Launcher *by, int rank, int port, void (*body)(Comm *)) {
    Comm c;
    forget();
    set(by->size, PROCESSES);
    set(by->rank, rank);
    set(by->local_rank, rank);
    set(by->local_size, PROCESSES);
    set("MASTER_PORT", port - 1);
    alarm(30);
    if (rank) usleep((useconds_t)late * 1000);
    comm_open(&c, "cuda");
    body(&c);
    comm_close(&c);
    exit(0);
}

// A run of all processes; statuses: what they end with, 128 + n for signal n. All that they say on
// stderr comes back, till the next call.
static const char *run_all(const char *what, const Launcher *by, int port, void (*body)(Comm *),
                           const int statuses[PROCESSES]) {
    static char text[4096];
    char path[256];
    pid_t children[PROCESSES];
    check_format(path, sizeof path, "%s/stderr", test_dir("comm"));
    double begin = clock_seconds();
    for (int rank = 0; rank < PROCESSES; rank++) {
        fflush(stdout);
        if ((children[rank] = fork())) continue;
        CHECK(freopen(path, "a", stderr), "no %s", path);
        take_part(by, rank, port, body);
    }
    for (int rank = 0; rank < PROCESSES; rank++) {
        int got;
        waitpid(children[rank], &got, 0);
        got = WIFSIGNALED(got) ? 128 + WTERMSIG(got) : WEXITSTATUS(got);
        EXPECT(got == statuses[rank], "%s: process %d ends with status %d, expected %d", what, rank,
               got, statuses[rank]);
    }
    EXPECT(clock_seconds() - begin < 20, "%s takes %.0f seconds", what, clock_seconds() - begin);
    memset(text, 0, sizeof text);
    FILE *said = fopen(path, "r");
    size_t n = said ? fread(text, 1, sizeof text - 1, said) : 0;
    if (said) fclose(said);
    text[n] = 0;
    return text;
}

// ---------------------------------------------------------------------------------------- messages

#define NEED(condition) CHECK(condition, "process %d: expected %s", c->rank, #condition)

static void body_talk(Comm *c) {
    double x[] = {c->rank + 1, c->rank == 1 ? NAN : 0, -c->rank};
    double most[] = {c->rank == 2 ? 7 : 1, -5, c->rank == 1 ? NAN : c->rank};
    char *big = (char *)check_alloc(BIG, "a message");
    NEED(c->size == PROCESSES && c->local_rank == c->rank);
    comm_all_reduce(c, x, 3, COMM_SUM);
    comm_all_reduce(c, most, 3, COMM_MAX);
    NEED(x[0] == 6 && isnan(x[1]) && x[2] == -3 && most[0] == 7 && most[1] == -5 && isnan(most[2]));
    for (int i = 0; i < BIG; i++) big[i] = (char)(c->rank == 2 ? i % 101 : 0);
    comm_move(c, big, BIG, 2, 0);
    comm_broadcast(c, big, BIG);
    for (int i = 0; i < BIG; i++) if (big[i] != i % 101) NEED(!"the message that was sent");
    NEED(comm_agree(c, UINT64_MAX) && !comm_agree(c, (uint64_t)c->rank) &&
         !comm_agree(c, (uint64_t)c->rank << 56));
    free(big);
}

// Each comes to the end at another time, and none is missed.
static void body_late_first(Comm *c) { usleep((useconds_t)(c->rank ? 0 : 1500) * 1000); }
static void body_late_last(Comm *c) { usleep((useconds_t)(c->rank == 2 ? 1500 : 0) * 1000); }

// -------------------------------------------------------------------------- tensors, by MPI
// MPI's functions are replaced by ones that note how they are called. The tensor is larger than
// three pieces; it is never touched and so takes no memory.

static struct {
    Comm c;
    Mpi mpi;
    char *x;
    int64_t bytes, done;
    int begun, waited, most;
    bool wrong;
} noted;

static int64_t noted_size(void *type) {
    if (type == noted.mpi.double_type) return sizeof(double);
    return type == noted.mpi.float_type ? sizeof(float) : 1;
}

// A piece begins where the one before ended. The request is its number, for the wait.
static int note(const void *piece, int64_t bytes, void **request) {
    Comm *c = &noted.c;
    noted.wrong |= (const char *)piece != noted.x + noted.done;
    noted.done += bytes;
    if (!request) return 0;
    noted.begun++;
    if (noted.begun - noted.waited > noted.most) noted.most = noted.begun - noted.waited;
    noted.wrong |= request < c->pending || request >= c->pending + COMM_PENDING;
    if (!noted.wrong) *request = noted.x + noted.begun;
    return 0;
}

static int note_reduce(const void *from, void *to, int count, void *type, void *sum, int root,
                       void *world, void **request) {
    bool here = noted.c.rank == root;
    noted.wrong |= here ? from != MPI_IN_PLACE : to != NULL;
    noted.wrong |= sum != noted.mpi.sum || root != 1 || world != noted.mpi.world;
    return note(here ? to : from, count * noted_size(type), request);
}

static int note_broadcast(void *x, int count, void *type, int root, void *world, void **request) {
    noted.wrong |= root != 1 || world != noted.mpi.world;
    return note(x, count * noted_size(type), request);
}

static int note_send(const void *x, int count, void *type, int to, int tag, void *world) {
    noted.wrong |= to != 1 || tag != 0 || world != noted.mpi.world;
    return note(x, count * noted_size(type), NULL);
}

static int note_receive(void *x, int count, void *type, int from, int tag, void *world,
                        void *status) {
    noted.wrong |= status != NULL;
    return note_send(x, count, type, from, tag, world);
}

static int note_wait(int count, void **requests, void *statuses) {
    noted.wrong |= requests != noted.c.pending || count > COMM_PENDING || statuses != NULL;
    for (int i = 0; i < count && !noted.wrong; i++)
        noted.wrong |= requests[i] != noted.x + ++noted.waited;
    return 0;
}

static void note_begin(int rank, int64_t bytes) {
    static char names[5];
    free(noted.x);
    memset(&noted, 0, sizeof noted);
    noted.x = (char *)check_alloc((size_t)bytes, "a tensor");
    noted.bytes = bytes;
    noted.c.rank = rank;
    noted.c.size = 2;
    Mpi *mpi = noted.c.mpi = &noted.mpi;
    mpi->Ireduce = note_reduce, mpi->Ibcast = note_broadcast, mpi->Waitall = note_wait;
    mpi->Send = note_send, mpi->Recv = note_receive;
    mpi->world = names, mpi->byte = names + 1, mpi->sum = names + 2;
    mpi->float_type = names + 3, mpi->double_type = names + 4;
}

// Every byte was moved once, by `begun` transfers that were waited for.
static void expect_noted(const char *what, int begun) {
    comm_wait(&noted.c);
    EXPECT(!noted.wrong, "%s: process %d calls MPI in a wrong way", what, noted.c.rank);
    EXPECT(noted.done == noted.bytes, "%s: process %d moves %lld of %lld bytes", what, noted.c.rank,
           (long long)noted.done, (long long)noted.bytes);
    EXPECT(noted.begun == begun && noted.waited == begun,
           "%s: %d transfers begun, %d waited for, expected %d", what, noted.begun, noted.waited,
           begun);
    EXPECT(noted.most <= COMM_PENDING, "%s: %d transfers in flight", what, noted.most);
}

static void test_tensors(void) {
    enum { MANY = 3 * COMM_PENDING + 5 };
    const int64_t n = 3 * (int64_t)MPI_PIECE + 5;
    for (int rank = 0; rank < 2; rank++) {
        for (int element = sizeof(float); element <= (int)sizeof(double); element *= 2) {
            note_begin(rank, n * element);
            comm_start(&noted.c, COMM_REDUCE, noted.x, n, (size_t)element, 1);
            expect_noted("a large sum", 4);
            note_begin(rank, n * element);
            comm_start(&noted.c, COMM_BROADCAST, noted.x, n, (size_t)element, 1);
            expect_noted("a large tensor", 4);
        }
        note_begin(0, n);
        comm_move(&noted.c, noted.x, (size_t)n, rank, 1 - rank);
        expect_noted("a large message", 0);
    }
    note_begin(0, MANY * (int64_t)sizeof(float));
    for (int i = 0; i < MANY; i++)
        comm_start(&noted.c, COMM_BROADCAST, noted.x + i * sizeof(float), 1, sizeof(float), 1);
    expect_noted("many tensors", MANY);
}

// ------------------------------------------------------------------------------------------ an end

static void die(Comm *c, int rank) {
    if (c->rank == rank) {
        usleep(300 * 1000);
        kill(getpid(), SIGKILL);
    }
}
static void body_wait(Comm *c) { die(c, 1); double x = 1; comm_all_reduce(c, &x, 1, COMM_SUM); }
static void body_hang(Comm *c) { die(c, 1); for (;;) pause(); }
static void body_hang_first(Comm *c) { die(c, 0); for (;;) pause(); }
static void body_end(Comm *c) { die(c, 2); }
static void body_refuse(Comm *c) {
    usleep((useconds_t)c->rank * 200 * 1000);
    CHECK(false, "all refuse this");
}

// --------------------------------------------------------------------------------------- strangers

// A connection to process 0, as soon as it listens.
static int call(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int i = 0; i < 2000; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (!connect(fd, (struct sockaddr *)&at, sizeof at)) return fd;
        close(fd);
        usleep(2000);
    }
    CHECK(false, "nobody listens at %d", port);
    return -1;
}

// Others come first to where process 0 listens: one says something else, one says nothing and goes.
static void test_strangers(void) {
    const int fine[] = {0, 0, 0};
    int port = free_port(), status;
    pid_t child = fork();
    if (!child) {
        const char words[64] = "GET / HTTP/1.1";
        int first = call(port), second = call(port);
        CHECK(write(first, words, sizeof words) > 0, "nobody listens");
        usleep(100 * 1000);
        close(second);
        _exit(0);
    }
    late = 200;
    EXPECT(!*run_all("with strangers", &LAUNCHERS[0], port, body_talk, fine),
           "with strangers something is said");
    late = 0;
    waitpid(child, &status, 0);
    EXPECT(status == 0, "the strangers were not heard");
}

// From two runs that began with one port, or from one whose processes know different sizes.
static void meet_another(void *greeting) {
    int port = free_port();
    if (!fork()) {                                                          // greets, and again
        for (int i = 0; i < 2; i++)
            CHECK(write(call(port), greeting, sizeof(Greeting)) > 0, "nobody listens");
        usleep(500 * 1000);
        _exit(0);
    }
    take_part(&LAUNCHERS[0], 0, port, body_talk);
}

static void open_elsewhere(void *unused) {
    Comm c;
    (void)unused;
    forget();
    set("WORLD_SIZE", 4), set("RANK", 1), set("LOCAL_RANK", 1), set("LOCAL_WORLD_SIZE", 2);
    comm_open(&c, "cuda");
}

static void open_misnumbered(void *unused) {
    Comm c;
    (void)unused;
    forget();
    set("WORLD_SIZE", 4), set("RANK", 4);
    comm_open(&c, "cuda");
}

void test_comm(void) {
    const int fine[] = {0, 0, 0};
    const int one[] = {EXIT_LOST, 128 + SIGKILL, EXIT_LOST};
    const int first[] = {128 + SIGKILL, EXIT_LOST, EXIT_LOST};
    const int refused[] = {1, 1, 1};
    const int last[] = {EXIT_LOST, 0, 128 + SIGKILL};
    test_tensors();
    for (size_t i = 0; i < LAUNCHER_COUNT; i++)
        EXPECT(!*run_all(LAUNCHERS[i].name, &LAUNCHERS[i], free_port(), body_talk, fine),
               "something is said");
    EXPECT(!*run_all("a late process 0", &LAUNCHERS[0], free_port(), body_late_first, fine),
           "a late process 0");
    EXPECT(!*run_all("a late process 2", &LAUNCHERS[0], free_port(), body_late_last, fine),
           "a late process 2");
    const char *said =
        run_all("one dies, others wait for it", &LAUNCHERS[0], free_port(), body_wait, one);
    EXPECT(strstr(said, "process 1 of 3 is gone, and process 0 ends") &&
               strstr(said, "process 1 of 3 is gone, and process 2 ends") &&
               strstr(said, "--resume required"),
           "what is said: %s", said);
    said = run_all("one dies, others hang", &LAUNCHERS[0], free_port(), body_hang, one);
    EXPECT(strstr(said, "process 1 of 3 is gone, and process 2 ends"), "what is said: %s", said);
    said = run_all("process 0 dies", &LAUNCHERS[0], free_port(), body_hang_first, first);
    EXPECT(strstr(said, "process 0 of 3 is gone, and process 1 ends") &&
               strstr(said, "process 0 of 3 is gone, and process 2 ends"),
           "what is said: %s", said);
    said = run_all("one dies where others have come to their end", &LAUNCHERS[0], free_port(),
                   body_end, last);
    EXPECT(strstr(said, "process 2 of 3 is gone, and process 0 ends"), "what is said: %s", said);
    said = run_all("all refuse", &LAUNCHERS[0], free_port(), body_refuse, refused);
    EXPECT(strstr(said, "all refuse this") && !strstr(said, "is gone"), "what is said: %s", said);
    test_strangers();
    Greeting other_size = {SOCKET_MAGIC, 1, PROCESSES + 1, 0};
    Greeting twice = {SOCKET_MAGIC, 1, PROCESSES, 0};
    EXPECT_REFUSAL(meet_another, &other_size, "process 0 of 3 met a process 1 of 4");
    EXPECT_REFUSAL(meet_another, &twice, "two processes have the rank 1");
    EXPECT_REFUSAL(open_elsewhere, NULL, "expected MASTER_ADDR, the machine of process 0");
    EXPECT_REFUSAL(open_misnumbered, NULL,
                   "RANK=4 and LOCAL_RANK=0: expected numbers below WORLD_SIZE=4");
}
