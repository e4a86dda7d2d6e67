// emu.cpp: the runtime under emu.h and gpu.cuh. It runs kernels on one host thread: one fiber per
// CUDA thread, one block at a time.
//
// Compiled once, without sanitizers, and linked to test objects built plain, with
// -fsanitize=address or with -fsanitize=thread: what a sanitizer must be told (which stack runs,
// what orders memory) goes through its public functions, weak here.
//   EMU_SEED=n         n > 0: random order of blocks, of threads between two meetings, and of
//                      streams (every legal order is possible); 0: ascending, in issue order
//   EMU_MEMORY=bytes   device memory
//   EMU_DEVICES=n      how many GPUs there are
//   EMU_DRIVER=13000   the CUDA version of the driver (0: no driver)
//   EMU_COMPUTE=90     the GPU's compute capability
//   EMU_BUILT=90       the compute capability that the program was built for
//   EMU_WRONG_WGMMA=1  every lane's first value of a product by wgmma is off by one
//   EMU_FAULT=700      the first kernel that runs ends with this error, which every call for a
//                      stream returns from then on
// Memory of cudaMalloc and shared memory start as 0xFF bytes: NaN as float and as bfloat16, -1 as
// int. A kernel that breaks a rule of emu.h ends the program with status 3 and a message that names
// kernel, block and thread.
#include <functional>
#include <map>
#include <utility>
#include <vector>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include "async.h"
#if !defined(__x86_64__) || defined(EMU_UCONTEXT)
#include <ucontext.h>
#endif

// ------------------------------------------------------------------ what the sanitizers are told
extern "C" {
#define WEAK __attribute__((weak))
void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t size) WEAK;
void __sanitizer_finish_switch_fiber(void *fake_stack, const void **bottom, size_t *size) WEAK;
void *__tsan_get_current_fiber(void) WEAK;
void *__tsan_create_fiber(unsigned flags) WEAK;
void __tsan_destroy_fiber(void *fiber) WEAK;
void __tsan_switch_to_fiber(void *fiber, unsigned flags) WEAK;
void __tsan_acquire(void *address) WEAK;
void __tsan_release(void *address) WEAK;
void AnnotateIgnoreWritesBegin(const char *file, int line) WEAK;
void AnnotateIgnoreWritesEnd(const char *file, int line) WEAK;
void AnnotateIgnoreReadsBegin(const char *file, int line) WEAK;
void AnnotateIgnoreReadsEnd(const char *file, int line) WEAK;
}

static void acquire(void *address) { if (__tsan_acquire) __tsan_acquire(address); }
static void release(void *address) { if (__tsan_release) __tsan_release(address); }
// Memory that is allocated between the two calls counts as fresh, written by nobody.
static void ignore_begin(void) {
    if (AnnotateIgnoreWritesBegin) AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
static void ignore_end(void) {
    if (AnnotateIgnoreWritesEnd) AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
}

// The queues of the runtime are nobody's accesses.
struct Unseen {
    Unseen() {
        ignore_begin();
        if (AnnotateIgnoreReadsBegin) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    }
    ~Unseen() {
        if (AnnotateIgnoreReadsEnd) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        ignore_end();
    }
};

// ------------------------------------------------------------------ contexts
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
struct Context { void *sp; };
// saves what the System V ABI makes the callee save
extern "C" void emu_swap(Context *from, Context *to);
asm(".text\n.p2align 4\nemu_swap:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq (%rsi), %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
static void context_make(Context *c, char *stack, size_t bytes, void (*entry)(void)) {
    void **top = reinterpret_cast<void **>(stack + bytes);
    memset(top - 8, 0, 8 * sizeof *top);  // a zero return address ends every backtrace
    top[-2] = reinterpret_cast<void *>(entry);
    c->sp = top - 8;
}
static void context_swap(Context *from, Context *to) { emu_swap(from, to); }
#else
struct Context { ucontext_t u; };
static void context_make(Context *c, char *stack, size_t bytes, void (*entry)(void)) {
    getcontext(&c->u);
    c->u.uc_stack.ss_sp = stack;
    c->u.uc_stack.ss_size = bytes;
    c->u.uc_link = NULL;
    makecontext(&c->u, entry, 0);
}
static void context_swap(Context *from, Context *to) { swapcontext(&from->u, &to->u); }
#endif

// ------------------------------------------------------------------ state
static const size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 64 << 10, STATIC_SHARED_MAX = 48 << 10;
static const int MAX_THREADS = 1024, MAX_MASKS = 48, MAX_COPIES = 256;

// A setting of the machine, from the environment.
static size_t setting(const char *name, size_t otherwise) {
    const char *value = getenv(name);
    return value ? (size_t)strtoull(value, NULL, 10) : otherwise;
}
static size_t device_bytes(void) { return setting("EMU_MEMORY", (size_t)1 << 30); }
static int compute(void) { return (int)setting("EMU_COMPUTE", 90); }
// Shared memory a block may have: of A100 and Orin, of Hopper and the Blackwell of data centers, of
// all others (CUDA C++ Programming Guide, table of compute capabilities).
static size_t shared_max(void) {
    if (compute() == 80 || compute() == 87) return 163 << 10;
    return compute() >= 90 && compute() < 120 ? 227 << 10 : 99 << 10;
}

// A 16-byte copy to shared memory that has begun: the value read, and the thread's group it belongs
// to.
struct Copy { void *to; uint64_t value[2]; int group; const char *file; int line; };

// A lane is what a thread runs on: a stack, and who ThreadSanitizer takes it for. A lane serves
// many blocks: to make one costs more than most blocks do. ThreadSanitizer takes everything on one
// lane for ordered, so a block has its threads on other lanes than the block before.
struct Lane { char *stack; void *tsan; int blocks; };
// A lane is made anew after so many blocks: calls that a thread's end left open stay on
// ThreadSanitizer's list of the lane.
static const int LANE_STEP = 37, LANE_BLOCKS = 256;

struct Fiber {
    Context context;
    char *stack;
    size_t stack_bytes;
    void *fake_stack, *tsan;          // the sanitizers' handles
    uint3 thread;
    int index;                        // in the block; -1: the host
    bool live;
    const char *waits, *file;         // the operation it waits in, NULL: it can run
    int line;
    unsigned mask;
    const void *event;                // an mbarrier, say, that it waits for
    // what it brings to emu_exchange: one is read by other lanes while the other is written
    char exchange[2][48];
    int exchanges;
    // a ring: begun and not waited for are those from copy_done to copy_begun - 1
    Copy copy[MAX_COPIES];
    int copy_begun, copy_done, copy_group;      // copy_group: the open one
    // of compute capability 9.0: under way, in the order of their beginnings
    std::vector<EmuProduct> products;
    std::vector<EmuStore> stores;
    int product_group, store_group, registers;
    bool product_fenced;              // wgmma_fence since the last wait
};

// Lanes that name the same mask meet here. Two buffers: a lane may bring its next value while
// slower ones still read the last.
struct Slot {
    const char *operation;
    unsigned mask, arrived, generation, present[2];
    uint64_t value[2][32];
    char order[2];                    // addresses for acquire and release
};

struct Warp {
    unsigned live;
    int slots;
    Slot slot[MAX_MASKS];
    uint64_t together;                // of what the warps of a warpgroup must do alike
};

// A barrier with a number, for `threads` threads.
struct Named { int threads, arrived; unsigned generation; char order[2]; };

struct Shared { const void *key; size_t bytes; void *data; };

// run: whether the operation is done. One that is not waits for other processes, and runs again.
struct Operation { std::vector<int> after; std::function<bool()> run; };

// Threads ask for their index and the API has no context argument, so the machine is one object of
// the process.
struct Machine {
    Fiber host, fiber[MAX_THREADS];
    Lane lane[MAX_THREADS];
    unsigned blocks;                  // begun so far
    Fiber *now = &host;
    Warp warp[MAX_THREADS / 32];
    Fiber *ready[MAX_THREADS];        // a ring: ready_count fibers from ready_head on
    unsigned ready_head;
    int ready_count, live, barrier_count;
    Fiber *barrier_first;             // of the barrier_count that wait
    unsigned barrier_generation;
    char barrier_order[2], fence_order, begin_order, launch_order;
    std::vector<Shared> shared;
    unsigned char *dynamic, *view;    // view: what TMA and wgmma see of it
    size_t dynamic_bytes;
    std::vector<EmuLoad> loads;       // by TMA, under way
    std::vector<uint64_t *> unknown;  // mbarriers without their fence
    Named named[16];
    int registers_free;               // of the block, given back by setmaxnreg
    const std::function<void()> *body;
    const char *text = NULL, *file;
    int line;
    uint3 block;
    dim3 grid, size;
    uint64_t random = 0;
    bool seeded = false;
    std::map<int, Operation> pending;
    std::map<char *, size_t> device, pinned;
    std::vector<cudaStream_t> streams;
    size_t device_bytes = 0;
    int issued = 0;
    cudaError_t error = cudaSuccess, fault = cudaSuccess;    // fault: what a kernel left
};
static Machine emu;

typedef std::vector<std::function<void()>> Work;
struct CUgraph_st { Work work; };
struct CUgraphExec_st { Work work; };
// graph: not NULL while it records
struct CUstream_st {
    int last;
    bool nonblocking;
    CUgraph_st *graph = NULL;
    bool relaxed = false, broken = false;
};
struct CUevent_st { int operation; double seconds; };
static CUstream_st default_stream = {0, false};

// A number below n: 0 without EMU_SEED. The generator is SplitMix64 (Steele, Lea, Flood 2014).
static int pick(int n) {
    if (!emu.seeded) {
        const char *seed = getenv("EMU_SEED");
        emu.random = seed ? strtoull(seed, NULL, 10) * 0x632be59bd9b4e019ull : 0;
        emu.seeded = true;
    }
    if (!emu.random || n <= 1) return 0;
    uint64_t z = emu.random += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (int)((z ^ (z >> 31)) % (uint64_t)n);
}

__attribute__((format(printf, 2, 3), noreturn)) static void fail(const char *help,
                                                                 const char *format, ...) {
    va_list args;
    fflush(stdout);
    fprintf(stderr, "emulator: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    const uint3 b = emu.block, t = emu.now->thread;
    if (emu.text)
        fprintf(stderr, "\n  in LAUNCH(%s) of %s:%d, block (%u, %u, %u)", emu.text, emu.file,
                emu.line, b.x, b.y, b.z);
    if (emu.now != &emu.host) fprintf(stderr, ", thread (%u, %u, %u)", t.x, t.y, t.z);
    const char *seed = getenv("EMU_SEED");
    fprintf(stderr, "\n  -> %s (EMU_SEED=%s repeats this order)\n", help, seed ? seed : "0");
    _exit(3);
}

// ------------------------------------------------------------------ fibers
static void switch_to(Fiber *to) {
    Fiber *from = emu.now;
    emu.now = to;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(from->live ? &from->fake_stack : NULL, to->stack,
                                       to->stack_bytes);
    // 1: the switch itself orders nothing
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->tsan, 1);
    context_swap(&from->context, &to->context);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(from->fake_stack, NULL, NULL);
}

// Who stands where, one line per place.
static void deadlock(void) {
    int threads = (int)(emu.size.x * emu.size.y * emu.size.z);
    fprintf(stderr, "emulator: threads that wait for each other:\n");
    for (int i = 0; i < threads; i++) {
        Fiber *f = &emu.fiber[i];
        int same = 0, earlier = 0;
        for (int j = 0; j < threads; j++) {
            Fiber *g = &emu.fiber[j];
            bool alike = g->live && f->live && g->line == f->line && g->mask == f->mask &&
                         !strcmp(g->waits, f->waits) && !strcmp(g->file, f->file);
            same += alike;
            earlier += alike && j < i;
        }
        if (!same || earlier) continue;
        fprintf(stderr, "  %d in %s of %s:%d", same, f->waits, f->file, f->line);
        if (f->mask) fprintf(stderr, " with mask 0x%08x", f->mask);
        fprintf(stderr, ", the first is thread (%u, %u, %u)\n", f->thread.x, f->thread.y,
                f->thread.z);
    }
    emu.now = &emu.host;
    fail("every live thread of the block (for a warp operation: of the mask) must come to the same "
         "call",
         "deadlock, %d threads live", emu.live);
}

static void run_next(void) {
    if (!emu.ready_count) {
        if (emu.live) deadlock();
        switch_to(&emu.host);
        return;
    }
    Fiber **first = &emu.ready[emu.ready_head % MAX_THREADS], *next;
    std::swap(*first, emu.ready[(emu.ready_head + (unsigned)pick(emu.ready_count)) % MAX_THREADS]);
    next = *first;
    emu.ready_head++;
    emu.ready_count--;
    if (next != emu.now) switch_to(next);
}

static void make_ready(Fiber *f) {
    f->waits = NULL;
    emu.ready[(emu.ready_head + (unsigned)emu.ready_count++) % MAX_THREADS] = f;
}

static void wait_in(const char *operation, unsigned mask, const char *file, int line) {
    emu.now->waits = operation;
    emu.now->mask = mask;
    emu.now->file = file;
    emu.now->line = line;
}

static void barrier_release(void) {
    emu.barrier_count = 0;
    emu.barrier_generation++;
    for (int i = 0; i < (int)(emu.size.x * emu.size.y * emu.size.z); i++) {
        Fiber *f = &emu.fiber[i];
        if (f->live && f->waits && !f->mask && !f->event) make_ready(f);
    }
}

static void slot_release(int warp, Slot *s) {
    s->present[s->generation & 1] = s->arrived;
    s->arrived = 0;
    s->generation++;
    for (int lane = 0; lane < 32; lane++) {
        Fiber *f = &emu.fiber[warp * 32 + lane];
        if ((s->mask >> lane & 1) && f->live && f->waits && f->mask == s->mask) make_ready(f);
    }
}

static void copies_end(const Fiber *f) {
    if (!f->products.empty() || !f->stores.empty())
        fail("wgmma_commit and wgmma_wait<0>, or tma_commit and tma_wait_read",
             "a thread ends with %zu products (wgmma) and %zu stores (TMA) it has not waited for",
             f->products.size(), f->stores.size());
    if (f->copy_done == f->copy_begun) return;
    const Copy *c = &f->copy[f->copy_done % MAX_COPIES];
    fail("commit the copies and wait for them",
         "a thread ends with %d asynchronous copies it has not waited for, the first from %s:%d",
         f->copy_begun - f->copy_done, c->file, c->line);
}

// An exited thread counts as arrived, so its going may complete what others wait in.
static void fiber_exit(Fiber *f) {
    Warp *w = &emu.warp[f->index / 32];
    copies_end(f);
    release(&emu.launch_order);
    f->live = false;
    emu.live--;
    w->live &= ~(1u << f->index % 32);
    if (emu.barrier_count && emu.barrier_count == emu.live) barrier_release();
    for (int i = 0; i < w->slots; i++) {
        Slot *s = &w->slot[i];
        if (s->arrived && s->arrived == (s->mask & w->live)) slot_release(f->index / 32, s);
    }
}

static void fiber_entry(void) {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
    acquire(&emu.begin_order);
    (*emu.body)();
    fiber_exit(emu.now);
    run_next();
    abort();  // nobody switches to a fiber that has ended
}

static void lane_make(Lane *lane) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    ignore_begin();
    if (lane->tsan) __tsan_destroy_fiber(lane->tsan);
    // ThreadSanitizer must forget what was written on it
    if (lane->stack) munmap(lane->stack - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
    char *p = static_cast<char *>(mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                       flags, -1, 0));
    if (p == MAP_FAILED || mprotect(p, GUARD_BYTES, PROT_NONE))
        fail("free memory, or smaller blocks", "no memory for the stack of a thread");
    *lane = {p + GUARD_BYTES, __tsan_create_fiber ? __tsan_create_fiber(0) : NULL, 0};
    ignore_end();
}

// ThreadSanitizer ignores what the child of a process with threads does, but not on lanes that were
// there before: the child makes its own.
static void lanes_end(void) {
    for (Lane &lane : emu.lane) lane.blocks = LANE_BLOCKS;
}
static const int at_fork = pthread_atfork(NULL, NULL, lanes_end);

// Registers of a thread, of the 65,536 that a block may have: at most 256, a multiple of 8. So many
// has a kernel with __launch_bounds__(threads, 1) and setmaxnreg.
static int registers_at_launch(void) {
    int threads = (int)(emu.size.x * emu.size.y * emu.size.z);
    return threads < 256 ? 256 : 65536 / threads / 8 * 8;
}

static void fiber_begin(int i) {
    Fiber *f = &emu.fiber[i];
    Lane *lane = &emu.lane[__tsan_create_fiber ? (i + emu.blocks * LANE_STEP) % MAX_THREADS : i];
    if (!lane->stack || lane->blocks == LANE_BLOCKS) lane_make(lane);
    if (__tsan_create_fiber) lane->blocks++;
    f->stack = lane->stack;
    f->stack_bytes = STACK_BYTES;
    f->tsan = lane->tsan;
    context_make(&f->context, f->stack, STACK_BYTES, fiber_entry);
    f->fake_stack = NULL;
    f->thread = {i % emu.size.x, i / emu.size.x % emu.size.y, i / (emu.size.x * emu.size.y)};
    f->index = i;
    f->live = true;
    f->mask = 0;
    f->event = NULL;
    f->exchanges = f->copy_begun = f->copy_done = f->copy_group = 0;
    f->product_group = f->store_group = f->product_fenced = 0;
    f->registers = registers_at_launch();
    emu.warp[i / 32].live |= 1u << i % 32;
    make_ready(f);
}

static void *shared_make(const void *key, size_t bytes, size_t align = 16) {
    size_t total = emu.dynamic_bytes + (key ? bytes : 0), fixed = key ? bytes : 0;
    for (const Shared &s : emu.shared) total += s.key ? s.bytes : 0, fixed += s.key ? s.bytes : 0;
    if (fixed > STATIC_SHARED_MAX || total > shared_max()) {
        fail("smaller tiles, or SHARED_DYNAMIC",
             "%zu bytes of static shared memory (at most %zu), %zu in all (at most %zu)", fixed,
             STATIC_SHARED_MAX, total, shared_max());
    }
    ignore_begin();
    void *p = NULL;
    if (posix_memalign(&p, align, bytes ? bytes : 1)) abort();
    memset(p, 0xff, bytes);
    emu.shared.push_back({key, bytes, p});
    ignore_end();
    return p;
}

// What a block must not leave behind.
static void block_end(int threads) {
    if (!emu.loads.empty()) {
        const EmuLoad &load = emu.loads[0];
        fail("mbarrier_wait for each load", "a block ends with %zu loads by TMA that nobody has "
             "waited for, the first from %s:%d", emu.loads.size(), load.file, load.line);
    }
    for (int w = 0; w < threads / 32; w++)
        if (emu.warp[w].together != emu.warp[w / 4 * 4].together)
            fail("all four warps of a warpgroup execute the same wgmma and setmaxnreg",
                 "warps %d and %d have executed others", w / 4 * 4, w);
    emu.unknown.clear();
}

static void run_block(void) {
    int threads = (int)(emu.size.x * emu.size.y * emu.size.z);
    emu.ready_count = emu.barrier_count = 0;
    emu.live = threads;
    emu.dynamic = emu.view = NULL;
    emu.registers_free = 0;
    memset(emu.named, 0, sizeof emu.named);
    for (int w = 0; w <= (threads - 1) / 32; w++)
        emu.warp[w].live = 0, emu.warp[w].slots = 0, emu.warp[w].together = 0;
    emu.blocks++;
    for (int i = 0; i < threads; i++) fiber_begin(i);
    release(&emu.begin_order);
    run_next();
    Unseen unseen;
    block_end(threads);
    for (const Shared &s : emu.shared) free(s.data);
    free(emu.view);
    emu.shared.clear();
}

// A thread that runs into the guard page below its stack. AddressSanitizer has a handler of its
// own.
static void on_fault(int, siginfo_t *info, void *) {
    const char *p = static_cast<const char *>(info->si_addr), *stack = emu.now->stack;
    if (emu.now != &emu.host && p < stack && p >= stack - GUARD_BYTES)
        fail("smaller local arrays, no recursion",
             "stack overflow: more than %zu KiB of local variables", STACK_BYTES >> 10);
    signal(SIGSEGV, SIG_DFL);
}

static void catch_faults(void) {
    static char stack[64 << 10];
    stack_t alternate = {};
    struct sigaction action = {};
    if (__sanitizer_start_switch_fiber || __tsan_create_fiber) return;
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, NULL);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, NULL);
}

// The stack of the calling thread. glibc finds the main thread's in /proc/self/maps, which takes
// longer than most kernels do.
struct HostStack {
    void *at;
    size_t bytes;
    HostStack() {
        pthread_attr_t attributes;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstack(&attributes, &at, &bytes);
        pthread_attr_destroy(&attributes);
    }
};

static void host_begin(void) {
    static thread_local HostStack stack;    // found at the thread's first launch
    Fiber *h = &emu.host;
    h->stack = static_cast<char *>(stack.at);
    h->stack_bytes = stack.bytes;
    h->index = -1;
    h->live = true;
    if (__tsan_get_current_fiber) h->tsan = __tsan_get_current_fiber();
    catch_faults();
}

static void run_kernel(const char *file, int line, const char *text, dim3 grid, dim3 size,
                       size_t dynamic, const std::function<void()> &body) {
    size_t blocks = (size_t)grid.x * grid.y * grid.z;
    std::vector<size_t> order(blocks);
    for (size_t i = 0; i < blocks; i++) order[i] = i;
    host_begin();
    emu.text = text, emu.file = file, emu.line = line;
    emu.grid = grid, emu.size = size, emu.dynamic_bytes = dynamic, emu.body = &body;
    for (size_t i = 0; i < blocks; i++) {
        std::swap(order[i], order[i + (size_t)pick((int)(blocks - i))]);
        size_t b = order[i];
        emu.block = {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y),
                     (unsigned)(b / grid.x / grid.y)};
        run_block();
    }
    acquire(&emu.launch_order);
    emu.text = NULL;
}

// ------------------------------------------------------------------ what the kernels call
const uint3 &emu_thread(void) { return emu.now->thread; }
const uint3 &emu_block(void) { return emu.block; }
const dim3 &emu_block_size(void) { return emu.size; }
const dim3 &emu_grid_size(void) { return emu.grid; }
int emu_lane(void) { return emu.now->index & 31; }

static void in_kernel(const char *operation) {
    if (emu.now == &emu.host || !emu.text)
        fail("start it with LAUNCH", "%s outside of a kernel", operation);
}

void emu_fence(void) {
    acquire(&emu.fence_order);
    release(&emu.fence_order);
}

void *emu_shared(const void *key, size_t bytes) {
    in_kernel("SHARED");
    for (const Shared &s : emu.shared) if (s.key == key) return s.data;
    return shared_make(key, bytes);
}

static void *shared_dynamic(size_t align) {
    if (!emu.dynamic)
        emu.dynamic = static_cast<unsigned char *>(shared_make(NULL, emu.dynamic_bytes, align));
    return emu.dynamic;
}
void *emu_shared_dynamic(void) {
    in_kernel("SHARED_DYNAMIC");
    return shared_dynamic(16);
}
void *emu_shared_tiles(void) {
    in_kernel("SHARED_TILES");
    return shared_dynamic(1024);
}

void emu_barrier(const char *file, int line) {
    in_kernel("__syncthreads");
    if (!emu.barrier_count) emu.barrier_first = emu.now;
    const Fiber *f = emu.barrier_first;
    if (emu.barrier_count && (f->line != line || strcmp(f->file, file))) {
        fail("move __syncthreads out of the branch",
             "divergent __syncthreads: this thread comes to %s:%d while thread (%u, %u, %u) waits "
             "in %s:%d",
             file, line, f->thread.x, f->thread.y, f->thread.z, f->file, f->line);
    }
    char *order = &emu.barrier_order[emu.barrier_generation & 1];
    release(order);
    wait_in("__syncthreads", 0, file, line);
    if (++emu.barrier_count == emu.live) barrier_release();
    run_next();
    acquire(order);
}

// Brings a value to the slot of (warp, mask) and waits for the other lanes; returns the slot and
// which of its buffers to read.
static Slot *meet(const char *operation, unsigned mask, uint64_t value, const char *file, int line,
                  int *buffer) {
    in_kernel(operation);
    int lane = emu.now->index % 32, warp = emu.now->index / 32, i = 0;
    Warp *w = &emu.warp[warp];
    if (!(mask >> lane & 1))
        fail("every caller is in its own mask",
             "%s at %s:%d with mask 0x%08x, in which lane %d is not", operation, file, line, mask,
             lane);
    while (i < w->slots && w->slot[i].mask != mask) i++;
    if (i == MAX_MASKS)
        fail("fewer masks, or a larger MAX_MASKS in dev/emu/emu.cpp",
             "more than %d different masks in one warp", MAX_MASKS);
    Slot *s = &w->slot[i];
    if (i == w->slots) {
        w->slots++;
        s->mask = mask;
        s->arrived = s->generation = 0;
    }
    if (s->arrived && strcmp(s->operation, operation)) {
        fail("all lanes of the mask call the same operation",
             "%s at %s:%d, where other lanes of mask 0x%08x wait in %s", operation, file, line,
             mask, s->operation);
    }
    int b = *buffer = (int)(s->generation & 1);
    s->operation = operation;
    s->value[b][lane] = value;
    s->arrived |= 1u << lane;
    wait_in(operation, mask, file, line);
    bool orders = !strcmp(operation, "__syncwarp");
    if (orders) release(&s->order[b]);
    if (s->arrived == (mask & w->live)) slot_release(warp, s);
    run_next();
    if (orders) acquire(&s->order[b]);
    return s;
}

uint64_t emu_shuffle(const char *operation, unsigned mask, uint64_t value, int source,
                     const char *file, int line) {
    int b;
    Slot *s = meet(operation, mask, value, file, line, &b);
    if (source < 0 || source > 31 || !(s->present[b] >> source & 1)) {
        fail("all lanes that are read take part: no early return, and a mask and width that fit "
             "the live lanes",
             "%s at %s:%d reads lane %d, which is not there (mask 0x%08x, lanes that came 0x%08x)",
             operation, file, line, source, mask, s->present[b]);
    }
    return s->value[b][source];
}

unsigned emu_vote(const char *operation, unsigned mask, bool value, const char *file, int line) {
    int b;
    Slot *s = meet(operation, mask, value, file, line, &b);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++)
        if (s->present[b] >> lane & 1) votes |= (unsigned)s->value[b][lane] << lane;
    return votes;
}

// ------------------------------------------------------- matrix operations and asynchronous copies
// A lane's bytes lie with its fiber, in turn in one of two places: it writes the first again in its
// next but one exchange, and by then all lanes have come to the next, so that they have read this
// one.
void emu_exchange_bytes(const char *operation, const void *mine, size_t bytes, const void *all[32],
                        const char *file, int line) {
    in_kernel(operation);
    Fiber *f = emu.now;
    char *place = f->exchange[f->exchanges++ & 1];
    int b;
    if (bytes > sizeof f->exchange[0])
        fail("a larger Fiber.exchange in dev/emu/emu.cpp", "%s exchanges %zu bytes", operation,
             bytes);
    ignore_begin();
    memcpy(place, mine, bytes);
    ignore_end();
    const Slot *s =
        meet(operation, 0xffffffffu, reinterpret_cast<uintptr_t>(place), file, line, &b);
    if (s->present[b] != 0xffffffffu)
        fail("all 32 lanes of a warp call it together", "%s at %s:%d with lanes 0x%08x alone",
             operation, file, line, s->present[b]);
    for (int lane = 0; lane < 32; lane++)
        all[lane] = reinterpret_cast<const void *>(s->value[b][lane]);
}

// A copy has no effect before its group is waited for. Its queue is the runtime's, but what it
// reads and writes is read and written in emu.h, for the sanitizers.
void emu_copy_begin(void *to, const uint64_t value[2], const char *file, int line) {
    in_kernel("cp.async");
    Fiber *f = emu.now;
    if (f->copy_begun - f->copy_done == MAX_COPIES)
        fail("wait earlier, or a larger MAX_COPIES in dev/emu/emu.cpp",
             "more than %d copies of a thread under way", MAX_COPIES);
    f->copy[f->copy_begun++ % MAX_COPIES] = {to, {value[0], value[1]}, f->copy_group, file, line};
}
void emu_copy_commit(void) { emu.now->copy_group++; }
void *emu_copy_next(int groups, uint64_t value[2]) {
    Fiber *f = emu.now;
    const Copy *c = &f->copy[f->copy_done % MAX_COPIES];
    if (f->copy_done == f->copy_begun || c->group >= f->copy_group - groups) return NULL;
    value[0] = c->value[0], value[1] = c->value[1];
    f->copy_done++;
    return c->to;
}

void emu_misaligned(const char *operation, const void *p, const char *file, int line) {
    fail("16-byte aligned addresses, in shared memory and in global", "%s at %s:%d with address %p",
         operation, file, line, p);
}

// ------------------------------------------------------------------ compute capability 9.0: sm90.h
void emu_refuse(const char *help, const char *text, const char *file, int line) {
    fail(help, "%s, at %s:%d", text, file, line);
}

// A shared address: dynamic shared memory begins behind the first KiB, which is the system's.
static const uint32_t SHARED_FIRST = 1024;
uint32_t emu_shared_address(const void *p, const char *file, int line) {
    const unsigned char *c = static_cast<const unsigned char *>(p);
    if (!emu.dynamic || c < emu.dynamic || c >= emu.dynamic + emu.dynamic_bytes)
        emu_refuse("use SHARED_TILES", "an address outside of dynamic shared memory", file, line);
    return SHARED_FIRST + (uint32_t)(c - emu.dynamic);
}
unsigned char *emu_shared_at(uint32_t address, size_t bytes, const char *operation,
                             const char *file, int line) {
    if (address < SHARED_FIRST || address - SHARED_FIRST + bytes > emu.dynamic_bytes)
        fail("more shared memory, or another descriptor",
             "%s at %s:%d accesses %zu bytes at shared address %u, of %zu", operation, file, line,
             bytes, address, SHARED_FIRST + emu.dynamic_bytes);
    return emu.dynamic + (address - SHARED_FIRST);
}

static unsigned char *async_view(void) {
    if (emu.view) return emu.view;
    Unseen unseen;
    emu.view = static_cast<unsigned char *>(malloc(emu.dynamic_bytes + 8));
    memset(emu.view, 0xff, emu.dynamic_bytes);
    return emu.view;
}
unsigned char *emu_async_view(const void *p) {
    return async_view() + (static_cast<const unsigned char *>(p) - emu.dynamic);
}
// It copies all that the block has written: a fence of one thread serves others, which on a GPU it
// does not (dev/ptx sees that). volatile: no memcpy, whose reads ThreadSanitizer would see.
void emu_async_fence(void) {
    volatile unsigned char *to = async_view();
    const volatile unsigned char *from = emu.dynamic;
    size_t words = emu.dynamic_bytes / 8;
    for (size_t i = 0; i < words; i++)
        ((volatile uint64_t *)to)[i] = ((const volatile uint64_t *)from)[i];
    for (size_t i = 8 * words; i < emu.dynamic_bytes; i++) to[i] = from[i];
    emu_mbarrier_fence();
}

// Waits until somebody calls wake with this event.
static void sleep_on(const void *event, const char *operation, const char *file, int line) {
    wait_in(operation, 0, file, line);
    emu.now->event = event;
    run_next();
}
static void wake(const void *event) {
    for (int i = 0; i < (int)(emu.size.x * emu.size.y * emu.size.z); i++) {
        Fiber *f = &emu.fiber[i];
        if (!f->live || f->event != event) continue;
        f->event = NULL;
        make_ready(f);
    }
}

// An mbarrier's word; the hardware's is opaque. Memory that nobody initialized has `none` set.
struct Mbarrier {
    uint64_t expected : 20, pending : 20;
    int64_t bytes : 21;               // still to come
    uint64_t phase : 1, unused : 1, none : 1;
};
static Mbarrier mbarrier_at(const uint64_t *barrier, const char *file, int line) {
    Mbarrier b;
    uint64_t word = *barrier;
    emu_shared_address(barrier, file, line);
    static_assert(sizeof b == 8, "a word");
    __builtin_memcpy(&b, &word, 8);
    if (b.none || !b.expected || (uintptr_t)barrier % 8)
        emu_refuse("mbarrier_init, and a __syncthreads behind it", "no mbarrier", file, line);
    return b;
}
// The phase ends with its last arrival and byte.
static void mbarrier_put(uint64_t *barrier, Mbarrier b) {
    bool ends = !b.pending && !b.bytes;
    uint64_t word;
    if (ends) b.pending = b.expected, b.phase ^= 1;
    __builtin_memcpy(&word, &b, 8);
    *barrier = word;
    if (ends) wake(barrier);
}
static char *mbarrier_order(uint64_t *barrier, int parity) {
    return reinterpret_cast<char *>(barrier) + parity;
}

void emu_mbarrier_init(uint64_t *barrier, int arrivals, const char *file, int line) {
    in_kernel("mbarrier_init");
    if (arrivals < 1 || arrivals >= 1 << 20)
        emu_refuse("1 to 1,048,575 arrivals", "mbarrier_init", file, line);
    Mbarrier b = {};
    b.expected = b.pending = (uint64_t)arrivals & 0xfffff;
    mbarrier_put(barrier, b);
    mbarrier_at(barrier, file, line);
    Unseen unseen;
    emu.unknown.push_back(barrier);
}
void emu_mbarrier_fence(void) {
    Unseen unseen;
    emu.unknown.clear();
}
void emu_mbarrier_arrive(uint64_t *barrier, int bytes, const char *file, int line) {
    Mbarrier b = mbarrier_at(barrier, file, line);
    if (!b.pending)
        emu_refuse("as many arrivals as mbarrier_init says", "an arrival too many at an mbarrier",
                   file, line);
    b.pending--;
    b.bytes += bytes;
    release(mbarrier_order(barrier, b.phase));
    mbarrier_put(barrier, b);
}
bool emu_mbarrier_done(uint64_t *barrier, int parity, const char *file, int line) {
    in_kernel("mbarrier_wait");
    if (parity != 0 && parity != 1)
        emu_refuse("a parity is 0 or 1", "mbarrier_wait", file, line);
    if (mbarrier_at(barrier, file, line).phase == (uint64_t)parity) return false;
    acquire(mbarrier_order(barrier, parity));
    return true;
}
void emu_mbarrier_sleep(uint64_t *barrier, const char *file, int line) {
    sleep_on(barrier, "mbarrier_wait", file, line);
}

void emu_load_begin(const EmuLoad &load) {
    Mbarrier b = mbarrier_at(load.barrier, load.file, load.line);
    Unseen unseen;
    for (const uint64_t *u : emu.unknown)
        if (u == load.barrier)
            emu_refuse("mbarrier_init_fence after mbarrier_init", "TMA does not know the mbarrier",
                       load.file, load.line);
    emu.loads.push_back(load);
    release(mbarrier_order(load.barrier, b.phase));
    wake(load.barrier);               // whoever waits performs it
}
bool emu_load_next(const uint64_t *barrier, EmuLoad *load) {
    Unseen unseen;
    std::vector<size_t> own;
    for (size_t i = 0; i < emu.loads.size(); i++)
        if (emu.loads[i].barrier == barrier) own.push_back(i);
    if (own.empty()) return false;
    size_t i = own[(size_t)pick((int)own.size())];
    *load = emu.loads[i];
    emu.loads.erase(emu.loads.begin() + (long)i);
    for (int parity = 0; parity < 2; parity++) acquire(mbarrier_order(load->barrier, parity));
    return true;
}
void emu_mbarrier_landed(const EmuLoad &load) {
    Mbarrier b = mbarrier_at(load.barrier, load.file, load.line);
    free(load.data);
    b.bytes -= (int64_t)load.bytes;
    release(mbarrier_order(load.barrier, b.phase));
    mbarrier_put(load.barrier, b);
}

void emu_named_barrier(int number, int threads, bool wait, const char *file, int line) {
    in_kernel("named_sync");
    if (number < 1 || number > 15 || threads < 32 || threads % 32)
        emu_refuse("numbers 1 to 15, whole warps", "a named barrier", file, line);
    Named *n = &emu.named[number];
    if (n->arrived && n->threads != threads)
        emu_refuse("all name the same number of threads", "a named barrier", file, line);
    char *order = &n->order[n->generation & 1];
    n->threads = threads;
    release(order);
    if (++n->arrived == threads) {
        n->arrived = 0;
        n->generation++;
        wake(n);
    } else if (wait) sleep_on(n, "named_sync", file, line);
    if (wait) acquire(order);
}

void emu_store_begin(const EmuStore &store) {
    Unseen unseen;
    emu.now->stores.push_back(store);
    emu.now->stores.back().group = emu.now->store_group;
}
void emu_store_commit(void) { emu.now->store_group++; }
bool emu_store_next(EmuStore *store) {
    Unseen unseen;
    Fiber *f = emu.now;
    if (f->stores.empty() || f->stores[0].group == f->store_group) return false;
    *store = f->stores[0];
    f->stores.erase(f->stores.begin());
    return true;
}

// The warps of a warpgroup must do the same; this is what they are compared by (FNV-1a).
static void together(uint64_t what) {
    uint64_t *t = &emu.warp[emu.now->index / 32].together;
    if (emu.now->index % 32 == 0) *t = (*t ^ what) * 0x100000001b3ull + 1;
}

void emu_product_fence(void) { emu.now->product_fenced = true; }
bool emu_product_chained(const float *d, const char *file, int line) {
    Unseen unseen;
    if (!emu.now->product_fenced)
        emu_refuse("wgmma_fence after the last wgmma_wait", "wgmma without a fence", file, line);
    for (const EmuProduct &p : emu.now->products) if (p.d == d) return true;
    return false;
}
void emu_product_begin(const EmuProduct &product) {
    Unseen unseen;
    emu.now->products.push_back(product);
    emu.now->products.back().group = emu.now->product_group;
    together(product.a_tile);
    together(product.b_tile);
    together((uint64_t)product.width << 4 | product.add << 2 | product.a_across << 1 |
             product.b_across);
}
bool emu_product_wrong(void) { return setting("EMU_WRONG_WGMMA", 0); }
void emu_product_commit(void) { emu.now->product_group++; }
bool emu_product_next(int groups, EmuProduct *product) {
    Unseen unseen;
    Fiber *f = emu.now;
    f->product_fenced = false;
    if (f->products.empty() || f->products[0].group >= f->product_group - groups) return false;
    *product = f->products[0];
    f->products.erase(f->products.begin());
    return true;
}
bool emu_product_hand_on(const EmuProduct &product) {
    Unseen unseen;
    for (EmuProduct &p : emu.now->products) {
        if (p.d != product.d) continue;
        memcpy(p.sums, product.sums, sizeof p.sums);
        return true;
    }
    return false;
}

// setmaxnreg: what some threads give back, others take. A thread waits until there is enough.
void emu_registers(int count, bool take, const char *file, int line) {
    in_kernel("setmaxnreg");
    Fiber *f = emu.now;
    int more = count - f->registers;
    if (take ? more < 0 : more > 0)
        emu_refuse("give down to fewer, take up to more registers than a thread has at the launch",
                   take ? "registers_take" : "registers_give", file, line);
    while (take && emu.registers_free < more) {
        sleep_on(&emu.registers_free, "registers_take", file, line);
    }
    emu.registers_free -= more;
    f->registers = count;
    together((uint64_t)count);
    if (!take) wake(&emu.registers_free);
}

// ------------------------------------------------------------------ streams and events
// Work is recorded and runs at a synchronization, never earlier, so that a host that changes pinned
// memory too soon goes unseen. Then any operation whose predecessors are done may be the next.
// Predecessors are the operation before it in its stream, an awaited event, and the rules of the
// legacy default stream (CUDA programming guide, "Default Stream"). If all that may run wait for
// other processes, a synchronization waits too, and a query returns.
static CUstream_st *stream_of(cudaStream_t s) {
    return s && s != cudaStreamLegacy ? s : &default_stream;
}

static int enqueue_until(cudaStream_t handle, std::function<bool()> run, int also = 0) {
    CUstream_st *s = stream_of(handle);
    Operation o = {{s->last, also}, run};
    if (s == &default_stream) {
        for (cudaStream_t other : emu.streams)
            if (!other->nonblocking) o.after.push_back(other->last);
    } else if (!s->nonblocking) o.after.push_back(default_stream.last);
    emu.pending[++emu.issued] = o;
    return s->last = emu.issued;
}

static int enqueue(cudaStream_t handle, std::function<void()> run, int also = 0) {
    if (CUgraph_st *graph = stream_of(handle)->graph) {
        graph->work.push_back(run);
        return 0;
    }
    return enqueue_until(handle, [run] { return run(), true; }, also);
}

static void run_one(void) {
    std::vector<int> can;
    for (const auto &p : emu.pending) {
        bool free = true;
        for (int a : p.second.after) free = free && !emu.pending.count(a);
        if (free) can.push_back(p.first);
    }
    while (!can.empty()) {
        auto next = can.begin() + pick((int)can.size());
        int id = *next;
        can.erase(next);
        if (!emu.pending[id].run()) continue;
        emu.pending.erase(id);
        return;
    }
    usleep(20);
}
static void finish(int operation) { while (emu.pending.count(operation)) run_one(); }
static void finish_all(void) { while (!emu.pending.empty()) run_one(); }
static cudaError_t result(cudaError_t e) { return e == cudaSuccess ? e : (emu.error = e); }

// While a stream records a graph (below) some calls are not allowed; they spoil the recording.
// always: also in the relaxed mode.
static cudaError_t while_recording(bool always) {
    cudaError_t e = cudaSuccess;
    for (cudaStream_t s : emu.streams)
        if (s->graph && (always || !s->relaxed))
            s->broken = true, e = cudaErrorStreamCaptureUnsupported;
    return result(e);
}

// May this stream be given work? Not once its recording is spoilt; and the default stream would
// wait for a blocking stream that records.
static cudaError_t accepts(cudaStream_t handle) {
    CUstream_st *s = stream_of(handle);
    cudaError_t e = s->broken ? cudaErrorStreamCaptureInvalidated : emu.fault;
    for (cudaStream_t other : emu.streams) {
        if (s == &default_stream && other->graph && !other->nonblocking)
            other->broken = true, e = cudaErrorStreamCaptureImplicit;
    }
    return result(e);
}

// Waiting for a stream that records, or for the default stream while a blocking one does.
static cudaError_t can_wait(cudaStream_t handle) {
    return stream_of(handle)->graph ? while_recording(true) : accepts(handle);
}

static cudaError_t image(void) {
    return result(setting("EMU_BUILT", (size_t)compute()) == (size_t)compute()
                      ? cudaSuccess
                      : cudaErrorNoKernelImageForDevice);
}

// For an emulated library: does any stream record a graph? And its work.
bool emu_recording(void) {
    for (cudaStream_t s : emu.streams) if (s->graph) return true;
    return false;
}
cudaError_t emu_enqueue(cudaStream_t stream, std::function<void()> run) {
    cudaError_t e = accepts(stream);
    if (e == cudaSuccess) enqueue(stream, run);
    return e;
}
// The same for work that waits for other processes, which is in no graph: see Operation.
cudaError_t emu_enqueue_until(cudaStream_t stream, std::function<bool()> run) {
    cudaError_t e = stream_of(stream)->graph ? while_recording(true) : accepts(stream);
    if (e == cudaSuccess) enqueue_until(stream, run);
    return e;
}

void emu_launch(const char *file, int line, const char *text, dim3 grid, dim3 size, size_t dynamic,
                cudaStream_t stream, std::function<void()> body) {
    size_t threads = (size_t)size.x * size.y * size.z;
    bool fits = threads && threads <= MAX_THREADS && size.z <= 64 && grid.x && grid.y && grid.z &&
                grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
    if (!fits) { result(cudaErrorInvalidConfiguration); return; }
    if (dynamic > shared_max()) { result(cudaErrorInvalidValue); return; }
    if (image() != cudaSuccess || accepts(stream) != cudaSuccess) return;
    enqueue(stream, [=] {
        run_kernel(file, line, text, grid, size, dynamic, body);
        emu.fault = (cudaError_t)setting("EMU_FAULT", cudaSuccess);
    });
}

extern "C" {
cudaError_t cudaGetLastError(void) { cudaError_t e = emu.error; emu.error = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(void) { return emu.error; }
const char *cudaGetErrorName(cudaError_t e) {
    return e == cudaSuccess ? "cudaSuccess" : "cudaError";
}
const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidMemcpyDirection: return "invalid copy direction for memcpy";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInsufficientDriver:
        return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
        return "no kernel image is available for execution on the device";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureImplicit:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    default: return "an error that the emulator has no text for";
    }
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    emu.streams.push_back(*s = new CUstream_st{0, flags == cudaStreamNonBlocking});
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) {
    return cudaStreamCreateWithFlags(s, cudaStreamDefault);
}
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *flags) {
    *flags = stream_of(s)->nonblocking ? cudaStreamNonBlocking : cudaStreamDefault;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    for (size_t i = 0; i < emu.streams.size(); i++) {
        if (emu.streams[i] != s) continue;
        finish(s->last);
        emu.streams.erase(emu.streams.begin() + (long)i);
        delete s->graph;
        delete s;
        return cudaSuccess;
    }
    return result(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    cudaError_t e = can_wait(s);
    if (e == cudaSuccess) finish(stream_of(s)->last);
    return e == cudaSuccess ? result(emu.fault) : e;
}
// A loop of queries makes progress. Each leaves "not ready" for cudaGetLastError, as CUDA does.
static cudaError_t query(int operation) {
    if (!emu.pending.count(operation)) return cudaSuccess;
    run_one();
    return result(cudaErrorNotReady);
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    cudaError_t e = can_wait(s);
    if (e == cudaSuccess) e = query(stream_of(s)->last);
    return e == cudaSuccess ? result(emu.fault) : e;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    cudaError_t error = can_wait(s);  // events are not part of the graphs here
    if (error == cudaSuccess) enqueue(s, [] {}, e->operation);
    return error;
}
cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t e = while_recording(true);
    if (e == cudaSuccess) finish_all();
    return e;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    *e = new CUevent_st{0, 0};
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) {
    return cudaEventCreateWithFlags(e, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t e) { finish(e->operation); delete e; return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { finish(e->operation); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    cudaError_t error = can_wait(s);
    if (error != cudaSuccess) return error;
    e->operation = enqueue(s, [e] {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        e->seconds = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    });
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) { return query(e->operation); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (emu.pending.count(from->operation) || emu.pending.count(to->operation))
        return result(cudaErrorNotReady);
    *ms = (float)(1e3 * (to->seconds - from->seconds));
    return cudaSuccess;
}

// ------------------------------------------------------------------ graphs
// Between begin and end the work given to a stream is recorded, not run; a launch gives the
// recorded operations to a stream, in their order. One stream a graph. Waiting for a stream that
// records, its events, memory management (but in the relaxed mode) and copies to or from pageable
// memory are refused.
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    CUstream_st *s = stream_of(handle);
    if (s == &default_stream) return result(cudaErrorStreamCaptureUnsupported);
    if (s->graph) return result(cudaErrorIllegalState);
    s->graph = new CUgraph_st;
    s->relaxed = mode == cudaStreamCaptureModeRelaxed;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    CUstream_st *s = stream_of(handle);
    *graph = NULL;
    if (!s->graph) return result(cudaErrorIllegalState);
    std::swap(*graph, s->graph);
    if (!s->broken) return cudaSuccess;
    s->broken = false;
    delete *graph;
    *graph = NULL;
    return result(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    CUstream_st *s = stream_of(handle);
    *status = s->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (s->broken) *status = cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long) {
    if (!graph) return result(cudaErrorInvalidValue);
    *executable = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t s) {
    // no graphs inside graphs
    cudaError_t e = !executable ? result(cudaErrorInvalidValue) : can_wait(s);
    for (size_t i = 0; e == cudaSuccess && i < executable->work.size(); i++)
        enqueue(s, executable->work[i]);
    return e;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return graph ? cudaSuccess : result(cudaErrorInvalidValue);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return executable ? cudaSuccess : result(cudaErrorInvalidValue);
}

// ------------------------------------------------------------------ memory
// Is p inside, or one past the end of, an allocation of the table?
static bool inside(const std::map<char *, size_t> &table, const void *p, size_t bytes) {
    char *c = static_cast<char *>(const_cast<void *>(p));
    auto it = table.upper_bound(c);
    return it != table.begin() && (--it, c + bytes <= it->first + it->second);
}
// for the emulated libraries
bool emu_on_device(const void *p, size_t bytes) { return inside(emu.device, p, bytes); }

cudaError_t cudaMalloc(void **p, size_t bytes) {
    *p = NULL;
    if (while_recording(false) != cudaSuccess) return cudaErrorStreamCaptureUnsupported;
    if (bytes > device_bytes() || emu.device_bytes > device_bytes() - bytes ||
        posix_memalign(p, 256, bytes ? bytes : 1))
        return result(cudaErrorMemoryAllocation);
    memset(*p, 0xff, bytes);
    emu.device[static_cast<char *>(*p)] = bytes;
    emu.device_bytes += bytes;
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    if (while_recording(false) != cudaSuccess) return cudaErrorStreamCaptureUnsupported;
    finish_all();
    if (!p) return cudaSuccess;
    auto it = emu.device.find(static_cast<char *>(p));
    if (it == emu.device.end()) return result(cudaErrorInvalidValue);
    emu.device_bytes -= it->second;
    emu.device.erase(it);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **p, size_t bytes) {
    if (while_recording(false) != cudaSuccess) return cudaErrorStreamCaptureUnsupported;
    if (posix_memalign(p, 256, bytes ? bytes : 1)) return result(cudaErrorMemoryAllocation);
    memset(*p, 0xff, bytes);
    emu.pinned[static_cast<char *>(*p)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) {
    if (while_recording(false) != cudaSuccess) return cudaErrorStreamCaptureUnsupported;
    finish_all();
    if (!p) return cudaSuccess;
    if (!emu.pinned.erase(static_cast<char *>(p))) return result(cudaErrorInvalidValue);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = device_bytes();
    *free_bytes = *total - emu.device_bytes;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s) {
    if (!inside(emu.device, p, bytes)) return result(cudaErrorInvalidValue);
    cudaError_t e = accepts(s);
    if (e == cudaSuccess) enqueue(s, [=] { memset(p, value, bytes); });
    return e;
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) {
    return cudaMemsetAsync(p, value, bytes, 0);
}

// Pinned memory is read and written when the stream gets there; pageable memory at once (CUDA
// runtime API, "API synchronization behavior").
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s) {
    bool to_device = inside(emu.device, to, 0) && kind != cudaMemcpyDeviceToHost;
    bool from_device = inside(emu.device, from, 0) && kind != cudaMemcpyHostToDevice;
    bool wrong =
        (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) != to_device &&
        kind != cudaMemcpyDefault;
    wrong |= (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) != from_device &&
             kind != cudaMemcpyDefault;
    if (wrong) return result(cudaErrorInvalidMemcpyDirection);
    if ((to_device && !inside(emu.device, to, bytes)) ||
        (from_device && !inside(emu.device, from, bytes)))
        return result(cudaErrorInvalidValue);
    bool pageable = (!from_device && !inside(emu.pinned, from, bytes)) ||
                    (!to_device && !inside(emu.pinned, to, bytes));
    cudaError_t e = pageable && stream_of(s)->graph ? while_recording(true) : accepts(s);
    if (e != cudaSuccess) return e;
    if (!from_device && !inside(emu.pinned, from, bytes)) {
        std::vector<char> staged(static_cast<const char *>(from),
                                 static_cast<const char *>(from) + bytes);
        enqueue(s, [=] { memcpy(to, staged.data(), bytes); });
        return cudaSuccess;
    }
    int id = enqueue(s, [=] { memmove(to, from, bytes); });
    if (!to_device && !inside(emu.pinned, to, bytes)) finish(id);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t e = while_recording(false);
    if (e == cudaSuccess) e = cudaMemcpyAsync(to, from, bytes, kind, 0);
    if (e == cudaSuccess && kind != cudaMemcpyDeviceToDevice) finish(default_stream.last);
    return e;
}

// ------------------------------------------------------------------ the device
cudaError_t cudaSetDevice(int device) {
    return device < 0 || device >= (int)setting("EMU_DEVICES", 1) ? result(cudaErrorInvalidDevice)
                                                                  : cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) {
    *version = (int)setting("EMU_DRIVER", CUDART_VERSION);
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) {
    int driver;
    cudaDriverGetVersion(&driver);
    // drivers serve all toolkits of their major version
    bool old = driver / 1000 < CUDART_VERSION / 1000;
    *count = old ? 0 : (int)setting("EMU_DEVICES", 1);
    if (old) return result(cudaErrorInsufficientDriver);
    return result(*count ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = compute() / 10; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = compute() % 10; return cudaSuccess;
    case cudaDevAttrWarpSize: *value = 32; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock: *value = MAX_THREADS; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)STATIC_SHARED_MAX; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)shared_max(); return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)shared_max() + 1024;
        return cudaSuccess;
    default: return result(cudaErrorInvalidValue);
    }
}
// The driver's encoder of tensor maps, with the conditions of the CUDA driver API.
static CUresult encode_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *at,
                           const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                           CUtensorMapFloatOOBfill fill) {
    const int widths[4] = {16, 32, 64, 128};
    EmuMap m = {};
    if ((uintptr_t)map % 64 || type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || rank < 1 || rank > 5 ||
        (uintptr_t)at % 16 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle > 3 ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        return CUDA_ERROR_INVALID_VALUE;
    m.mark = EMU_MAP_MARK, m.at = (uint64_t)at, m.rank = (uint8_t)rank, m.element = 2;
    m.swizzle = (uint8_t)widths[swizzle];
    for (cuuint32_t i = 0; i < rank; i++) {
        if (size[i] < 1 || size[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || steps[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        m.size[i] = (uint32_t)size[i], m.box[i] = (uint16_t)box[i];
        if (i + 1 == rank) break;
        if (stride[i] % 16 || stride[i] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
        m.stride[i] = stride[i];
    }
    int row = 2 * (int)box[0];
    if (row % 16 || (swizzle && row > widths[swizzle])) return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, sizeof *map);
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    bool known = !strcmp(symbol, "cuTensorMapEncodeTiled") && version >= 12000;
    *function = known ? reinterpret_cast<void *>(encode_map) : NULL;
    if (found) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = MAX_THREADS;
    attributes->binaryVersion = (int)setting("EMU_BUILT", (size_t)compute());
    return image();
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value >= 0 &&
        value <= (int)shared_max())
        return cudaSuccess;
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout && value >= -1 && value <= 100)
        return cudaSuccess;
    return result(cudaErrorInvalidValue);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulator");
    p->major = compute() / 10;
    p->minor = compute() % 10;
    p->multiProcessorCount = 2;
    p->warpSize = 32;
    p->maxThreadsPerBlock = MAX_THREADS;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = STATIC_SHARED_MAX;
    p->sharedMemPerBlockOptin = shared_max();
    p->sharedMemPerMultiprocessor = shared_max() + 1024;
    p->regsPerBlock = 65536;
    p->totalGlobalMem = device_bytes();
    return cudaSuccess;
}
}
