// nccl.cpp: the calls of NCCL that llmc/nccl.cuh makes, between emulated GPUs of processes on one
// machine. Built as a library of NCCL's name, libnccl.so.2, which the trainer finds by
// LD_LIBRARY_PATH as it finds the real one.
//
// A call runs when its stream gets there, like all work here (emu.cpp), and then waits for the
// other processes. They meet in shared memory, the board: each says there which call it stands in,
// and data goes through it in pieces. Sums are added in the order of ranks. Arguments that NCCL
// forbids are refused with its result; NCCL_DEBUG=WARN prints the reason. A mistake that makes the
// real library hang or worse ends the process with status 3 and says who stands where: processes in
// different calls, or in the same with other counts, types or roots; a group that is another group
// elsewhere; a process that does not come for EMU_NCCL_SECONDS (60). Not modelled: other types and
// operations, several communicators in a group, calls that do not block.
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <utility>
#include <vector>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

cudaError_t emu_enqueue(cudaStream_t stream, std::function<void()> run);
extern "C" bool emu_on_device(const void *p, size_t bytes);

enum {
    SUCCESS, UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE
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

struct World { Board *board; int rank, size; int64_t groups, meetings; Call now; };
struct Queued { World *world; cudaStream_t stream; Call call; const char *from; char *to; };

static std::set<World *> live;
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

// Until all have come as often.
static void meet(World *w) {
    const char *setting = getenv("EMU_NCCL_SECONDS");
    double deadline = seconds() + (setting ? atof(setting) : 60);
    int64_t number = ++w->meetings;
    w->board->met[w->rank].store(number);
    for (int other = 0; other < w->size; other++)
        while (w->board->met[other].load() < number) {
            if (seconds() > deadline) fail(w, "a process did not come", other);
            usleep(20);
        }
}

static void add(char *to, const char *piece, int type, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (type == DOUBLE)
            reinterpret_cast<double *>(to)[i] += reinterpret_cast<const double *>(piece)[i];
        else reinterpret_cast<float *>(to)[i] += reinterpret_cast<const float *>(piece)[i];
    }
}

static int64_t size_of(int type) { return type == DOUBLE ? 8 : type == FLOAT ? 4 : 2; }

// A call, when its stream has come to it. Nobody says his next call before all have compared this
// one: there is a meeting in between.
static void run(const Queued &q) {
    World *w = q.world;
    Board *board = w->board;
    bool reduce = !strcmp(q.call.name, "ncclReduce"), root = w->rank == q.call.root;
    w->now = board->call[w->rank] = q.call;
    meet(w);
    for (int other = 0; other < w->size; other++)
        if (memcmp(&board->call[other], &q.call, sizeof q.call))
            fail(w, "processes stand in different calls", other);
    int64_t element = size_of(q.call.type), most = PIECE / element;
    for (int64_t at = 0; at < q.call.count; at += most) {
        int64_t n = q.call.count - at < most ? q.call.count - at : most;
        size_t bytes = (size_t)(n * element);
        if (reduce || root) memcpy(board->piece[w->rank], q.from + at * element, bytes);
        meet(w);
        if (!reduce) memmove(q.to + at * element, board->piece[q.call.root], bytes);
        if (reduce && root) memcpy(q.to + at * element, board->piece[0], bytes);
        for (int other = 1; reduce && root && other < w->size; other++)
            add(q.to + at * element, board->piece[other], q.call.type, n);
        meet(w);
    }
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
    auto calls = [=] {
        for (const Queued &q : group) run(q);
    };
    return emu_enqueue(group[0].stream, calls) == cudaSuccess ? SUCCESS : UNHANDLED_CUDA_ERROR;
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
    Queued q = {w, stream, {}, source, static_cast<char *>(to)};
    snprintf(q.call.name, sizeof q.call.name, "%s", name);
    q.call.count = (int64_t)count;
    q.call.type = type;
    q.call.root = root;
    queued.push_back(q);
    return depth ? SUCCESS : flush();
}

extern "C" {
const char *ncclGetErrorString(int result) {
    static const char *const TEXTS[] = {
        "no error",       "unhandled cuda error", "unhandled system error",
        "internal error", "invalid argument",     "invalid usage"};
    return result >= 0 && result <= INVALID_USAGE ? TEXTS[result]
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
    World *w = new World{static_cast<Board *>(board), rank, size, 0, 0, {}};
    if (w->board->here[rank].exchange(1)) return refuse("ncclCommInitRank: rank %d twice", rank);
    snprintf(w->now.name, sizeof w->now.name, "CommInitRank");
    meet(w);
    live.insert(*out = w);
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
