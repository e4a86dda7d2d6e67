// nccl.cpp: the calls of NCCL that llmc/nccl.cuh makes, between emulated GPUs of processes on one
// machine. Built as a library of NCCL's name, libnccl.so.2, which the trainer finds by
// LD_LIBRARY_PATH as it finds the real one.
//
// A call runs when its stream gets there, like all work here (emu.cpp), and is done when the other
// processes have come too; until then other streams go on. They meet in shared memory, the board:
// each says there which call it stands in, and data goes through it in pieces. Sums are added in
// the order of ranks. Arguments that NCCL forbids are refused with its result; NCCL_DEBUG=WARN
// prints the reason. A mistake that makes the real library hang or worse ends the process with
// status 3 and says who stands where: processes in different calls, or in the same with other
// counts, types or roots; a group that is another group elsewhere; a process that does not come for
// EMU_NCCL_SECONDS (60; 0: the call waits for ever, as the real one does). Not modelled: other
// types and operations, several communicators in a group, calls that do not block, graphs.
//
// EMU_NCCL_FAULT="KIND RANK CALL N": a fault of process RANK in the middle of its N-th group of
// CALL (ncclReduce, ncclBroadcast).
//   dies     it gets SIGKILL
//   leaves   the same at the end of the group, when nobody waits for it
//   hangs    its GPU stands still
//   fails    the same, because of the network: ncclCommGetAsyncError says so
//   stuck    the same, and ncclCommAbort does not return
// As the real one (github.com/NVIDIA/nccl, issue 279), it has no error for processes of one machine
// that wait for one that died. A process that exits while its calls wait says so on stderr: it
// should abort them first. NCCL_DEBUG=INFO prints each abort.
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

cudaError_t emu_enqueue_until(cudaStream_t stream, std::function<bool()> run);
extern "C" bool emu_on_device(const void *p, size_t bytes);

enum {
    SUCCESS, UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE,
    REMOTE_ERROR
};
enum { FLOAT = 7, DOUBLE = 8, BFLOAT16 = 9 };
enum { RANKS = 16, PIECE = 1 << 18 };

struct Id { char path[128]; };

// The call that a process stands in. group, place, all: the group's number, and which of its calls
// this is.
struct Call {
    char name[16];
    int64_t count;
    int32_t type, root;
    int64_t group;
    int32_t place, all;
};

struct Board {
    std::atomic<int> here[RANKS];
    std::atomic<int64_t> met[RANKS];  // how many times a process has come to a meeting
    Call call[RANKS];
    char piece[RANKS][PIECE];
};

// met: when this process came to its last meeting. waiting: groups that are not done.
struct World {
    Board *board;
    int rank, size;
    int64_t groups, meetings;
    Call now;
    double met;
    int waiting, error;
    bool still, stuck, aborted;
};
struct Queued { World *world; cudaStream_t stream; Call call; const char *from; char *to; };
// A group under way: the call that it has come to, what that does next, and its first element.
enum { BEGIN, SEND, RECEIVE };
struct Group { std::vector<Queued> calls; const char *fault; size_t call; int next; int64_t at; };

static std::set<World *> &live = *new std::set<World *>;   // `end` still reads it
static std::vector<Queued> queued;                           // of the open group
static int depth;

__attribute__((format(printf, 1, 2))) static int refuse(const char *format, ...) {
    const char *debug = getenv("NCCL_DEBUG");
    if (debug && !strcmp(debug, "WARN")) {
        va_list args;
        va_start(args, format);
        fprintf(stderr, "emulated NCCL: ");
        vfprintf(stderr, format, args);
        fprintf(stderr, "\n");
        va_end(args);
    }
    return INVALID_ARGUMENT;
}

static void describe(char *text, size_t cap, int rank, const Call &c) {
    if (!*c.name) snprintf(text, cap, "rank %d has not begun", rank);
    else
        snprintf(text, cap,
                 "rank %d: %s of %lld elements of type %d, root %d, call %d of %d in group %lld",
                 rank, c.name, (long long)c.count, c.type, c.root, c.place + 1, c.all,
                 (long long)c.group);
}

__attribute__((noreturn)) static void fail(const World *w, const char *what, int other) {
    char mine[200], theirs[200];
    describe(mine, sizeof mine, w->rank, w->now);
    describe(theirs, sizeof theirs, other, w->board->call[other]);
    fprintf(stderr,
            "emulated NCCL: %s\n  %s\n  %s\n"
            "  -> all processes make the same calls in the same order\n",
            what, mine, theirs);
    _exit(3);
}

// ------------------------------------------------------------------ meetings
static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void come(World *w) {
    w->board->met[w->rank].store(++w->meetings);
    w->met = seconds();
}

// Have all come as often?
static bool all_came(World *w) {
    const char *setting = getenv("EMU_NCCL_SECONDS");
    double most = setting ? atof(setting) : 60;
    for (int other = 0; other < w->size; other++) {
        if (w->board->met[other].load() >= w->meetings) continue;
        if (most > 0 && seconds() > w->met + most) fail(w, "a process did not come", other);
        return false;
    }
    return true;
}

static void add(char *to, const char *piece, int type, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (type == DOUBLE)
            reinterpret_cast<double *>(to)[i] += reinterpret_cast<const double *>(piece)[i];
        else reinterpret_cast<float *>(to)[i] += reinterpret_cast<const float *>(piece)[i];
    }
}

static int64_t size_of(int type) { return type == DOUBLE ? 8 : type == FLOAT ? 4 : 2; }

// What EMU_NCCL_FAULT has for this group; "": nothing.
static const char *fault_of(const World *w, const char *name) {
    static char kind[16], call[16];
    static int rank = -1, left;
    const char *text = getenv("EMU_NCCL_FAULT");
    if (rank < 0 && (!text || sscanf(text, "%15s %d %15s %d", kind, &rank, call, &left) != 4))
        return "";
    return rank == w->rank && !strcmp(call, name) && --left == 0 ? kind : "";
}

static void suffer(World *w, const char *kind) {
    if (*kind && strcmp(kind, "leaves"))
        fprintf(stderr, "emulated NCCL: rank %d %s\n", w->rank, kind);
    if (!strcmp(kind, "dies")) raise(SIGKILL);
    w->still = *kind && strcmp(kind, "leaves");
    w->stuck = !strcmp(kind, "stuck");
    if (w->stuck || !strcmp(kind, "fails")) w->error = REMOTE_ERROR;
}

// The part of a call between two meetings. Nobody says his next call before all have compared this
// one: there is a meeting in between.
static void step(Group *g) {
    const Queued &q = g->calls[g->call];
    World *w = q.world;
    Board *board = w->board;
    bool reduce = !strcmp(q.call.name, "ncclReduce"), root = w->rank == q.call.root;
    int64_t element = size_of(q.call.type), most = PIECE / element, left = q.call.count - g->at;
    int64_t n = left < most ? left : most, at = g->at * element;
    size_t bytes = (size_t)(n * element);
    switch (g->next++) {
    case BEGIN:
        w->now = board->call[w->rank] = q.call;
        break;
    case SEND:
        for (int other = 0; other < w->size; other++)
            if (memcmp(&board->call[other], &q.call, sizeof q.call))
                fail(w, "processes stand in different calls", other);
        if (g->call == g->calls.size() / 2) suffer(w, g->fault);
        if (w->still) return;
        if (reduce || root) memcpy(board->piece[w->rank], q.from + at, bytes);
        break;
    case RECEIVE:
        if (!reduce) memmove(q.to + at, board->piece[q.call.root], bytes);
        if (reduce && root) memcpy(q.to + at, board->piece[0], bytes);
        for (int other = 1; reduce && root && other < w->size; other++)
            add(q.to + at, board->piece[other], q.call.type, n);
        g->at += n;
        g->next = SEND;
        if (left == n) g->call++, g->at = 0, g->next = BEGIN;
    }
    come(w);
}

// Goes on till another process is missed. Returns whether the group is done.
static bool run(Group *g) {
    World *w = g->calls[0].world;
    while (!w->aborted && g->call < g->calls.size()) {
        if (w->still || !all_came(w)) return false;
        step(g);
    }
    if (!w->aborted && !strcmp(g->fault, "leaves")) raise(SIGKILL);
    w->waiting--;
    return true;
}

// ------------------------------------------------------------------ the library
static int flush(void) {
    std::vector<Queued> group;
    std::swap(group, queued);
    if (group.empty()) return SUCCESS;
    int64_t number = group[0].world->groups++;
    for (size_t i = 0; i < group.size(); i++) {
        if (group[i].world != group[0].world || group[i].stream != group[0].stream)
            return refuse("a group of several communicators or streams is not emulated");
        group[i].call.group = number;
        group[i].call.place = (int32_t)i;
        group[i].call.all = (int32_t)group.size();
    }
    World *w = group[0].world;
    auto g = std::make_shared<Group>(Group{group, fault_of(w, group[0].call.name), 0, BEGIN, 0});
    if (emu_enqueue_until(group[0].stream, [g] { return run(g.get()); }) != cudaSuccess)
        return UNHANDLED_CUDA_ERROR;
    w->waiting++;
    return SUCCESS;
}

static int queue(const char *name, const void *from, void *to, size_t count, int type, int root,
                 World *w, cudaStream_t stream) {
    bool reduce = !strcmp(name, "ncclReduce");
    if (!live.count(w)) return refuse("%s: a communicator that does not exist", name);
    bool sends = reduce || w->rank == root, gets = !reduce || w->rank == root;
    if (type != FLOAT && type != DOUBLE && (reduce || type != BFLOAT16))
        return refuse("%s: type %d is none, or not emulated", name, type);
    if (root < 0 || root >= w->size)
        return refuse("%s: root %d of %d processes", name, root, w->size);
    const char *source = static_cast<const char *>(from), *target = static_cast<char *>(to);
    size_t bytes = count * (size_t)size_of(type);
    if ((sends && !emu_on_device(source, bytes)) || (gets && !emu_on_device(target, bytes)))
        return refuse("%s: %zu bytes that are not whole in memory of the device", name, bytes);
    if (sends && gets && source != target && source < target + bytes && target < source + bytes)
        return refuse("%s: what is sent and what is received overlap", name);
    if (queued.size() == 2048) return refuse("%s: a group of more than 2048 calls", name);
    Queued q = {w, stream, {}, source, static_cast<char *>(to)};
    snprintf(q.call.name, sizeof q.call.name, "%s", name);
    q.call.count = (int64_t)count;
    q.call.type = type;
    q.call.root = root;
    queued.push_back(q);
    return depth ? SUCCESS : flush();
}

__attribute__((destructor)) static void end(void) {
    for (const World *w : live)
        if (w->waiting)
            fprintf(stderr, "emulated NCCL: rank %d exits, and %d groups wait for others\n",
                    w->rank, w->waiting);
}

extern "C" {
const char *ncclGetErrorString(int result) {
    static const char *const TEXTS[] = {
        "no error",       "unhandled cuda error", "unhandled system error",
        "internal error", "invalid argument",     "invalid usage",
        "remote process exited or there was a network error"};
    return result >= 0 && result <= REMOTE_ERROR ? TEXTS[result]
                                                 : "an error that the emulator has no text for";
}

int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    int fd = memfd_create("emulated NCCL", 0);  // it goes with the last process that has it
    snprintf(id->path, sizeof id->path, "/proc/%d/fd/%d", (int)getpid(), fd);
    return fd < 0 || ftruncate(fd, sizeof(Board)) ? SYSTEM_ERROR : SUCCESS;
}

int ncclCommInitRank(World **out, int size, Id id, int rank) {
    if (size < 1 || size > RANKS || rank < 0 || rank >= size)
        return refuse("ncclCommInitRank: rank %d of %d, at most %d here", rank, size, RANKS);
    int fd = open(id.path, O_RDWR);
    if (fd < 0) return SYSTEM_ERROR;
    void *board = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (board == MAP_FAILED) return SYSTEM_ERROR;
    World *w = new World{};
    w->board = static_cast<Board *>(board), w->rank = rank, w->size = size;
    if (w->board->here[rank].exchange(1)) return refuse("ncclCommInitRank: rank %d twice", rank);
    snprintf(w->now.name, sizeof w->now.name, "CommInitRank");
    come(w);
    while (!all_came(w)) usleep(20);
    live.insert(*out = w);
    return SUCCESS;
}

int ncclCommGetAsyncError(World *w, int *error) {
    if (!live.count(w)) return refuse("ncclCommGetAsyncError: there is no such communicator");
    *error = w->error;
    return SUCCESS;
}

// Calls that wait are then done, with whatever there is in their memory.
int ncclCommAbort(World *w) {
    const char *debug = getenv("NCCL_DEBUG");
    if (!live.erase(w)) return refuse("ncclCommAbort: there is no such communicator");
    if (debug && !strcmp(debug, "INFO"))
        fprintf(stderr, "emulated NCCL: rank %d aborts %d groups\n", w->rank, w->waiting);
    while (w->stuck) pause();
    w->aborted = true;
    return SUCCESS;
}

int ncclCommDestroy(World *w) {
    if (depth || !live.erase(w))
        return refuse("ncclCommDestroy: a group is open, or there is no such communicator");
    munmap(w->board, sizeof(Board));
    delete w;
    return SUCCESS;
}

int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
    if (!depth) return refuse("ncclGroupEnd: no group is open"), INVALID_USAGE;
    return --depth ? SUCCESS : flush();
}

int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
               World *w, cudaStream_t stream) {
    if (operation) return refuse("ncclReduce: operation %d is none, or not emulated", operation);
    return queue("ncclReduce", from, to, count, type, root, w, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, World *w,
                  cudaStream_t stream) {
    return queue("ncclBroadcast", from, to, count, type, root, w, stream);
}
}
