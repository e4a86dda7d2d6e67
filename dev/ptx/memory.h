// memory.h: memory as the interpreter (vm.cpp) sees it. Every access is checked.
//
//   global   allocations by address
//   shared   of the running block, from address SHARED_FIRST on; address 0 is nobody's
//   param    the arguments of the launch, from address 0 on
//
// Each two bytes of global and shared memory know their last writer and reader. An access ends the
// launch with a message if
//   - its address is not a multiple of its size, or lies outside of every allocation;
//   - it reads bytes that nobody has written;
//   - another thread has accessed the same two bytes, one of the two writes, and no barrier stands
//     between: bar.sync or mbarriers for threads of a block, bar.warp.sync for lanes of a warp,
//     nothing for threads of different blocks;
//   - a copy to these bytes (cp.async, TMA) is under way.
// sm90.h adds what TMA and wgmma read and write.
// The model is stricter than a GPU in one point: a byte and its neighbour count as one.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "vm.h"

// PTX's own names of types.
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

struct Fail { std::string text; };

[[noreturn]] static void fail(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw Fail{text};
}

// -------------------------------------------------------------------------------- a running kernel

// An instruction as ptx.py has read it. Operands are places in the register file of a warp, in
// bytes; -1: none.
struct Instruction {
    int op;              // its number in the table of operations
    int predicate, negated;
    int target;          // bra: number of the next instruction
    int line;            // of the PTX
    int wide;            // bit v: destination v has 8 bytes
    int outputs, inputs;
    int d[8], s[12];     // places of destinations and sources
    int size[12];        // bytes of each source
    s64 offset;          // of an address
};

struct Constant { int place, size; u64 value; };

struct Kernel {
    std::string name;
    std::vector<Instruction> code;
    std::vector<u8> hit;                  // which instructions have run
    std::vector<Constant> constants;      // immediates, in the register file
    std::vector<s32> parameters;          // (offset, bytes) of each
    std::vector<s32> many;                // places of wgmma's registers D, see ptx.py
    int special[15];                      // places of %tid.x and so on, see block_registers
    int file, shared, parameter_bytes;    // bytes of a warp's registers, of static shared arrays
    int align;                            // of dynamic shared memory
};

// A copy under way: 16 bytes to shared memory. from: read when it is waited for; 0: already read.
struct Copy { u32 to, size; u64 from; u8 data[16]; int group; };

enum { LANES = 32, WARPS = 32 };

// Of each warp of the block, how many of its steps are known here. A warp makes a step when it
// releases what it has done: at a barrier, an arrival, or a copy that it begins.
struct Clock {
    u32 of[WARPS];
    void join(const Clock &c) {
        for (int n = 0; n < WARPS; n++) if (c.of[n] > of[n]) of[n] = c.of[n];
    }
};
struct Group90;                           // a warp's part in wgmma and TMA: sm90.h

struct Warp {
    int id;
    u8 *registers;
    u32 pc[LANES];
    u32 live;                             // lanes that have not ended
    u32 wait;                             // lanes that wait for others of this warp
    u32 phase;                            // barriers of the warp so far
    int at_barrier;                       // 0: it runs; otherwise 1 + the barrier's number
    Clock clock;
    std::shared_ptr<Group90> group90;
    std::vector<Copy> copies[LANES];
    int groups[LANES];                    // copy groups that the lane has closed
};

// ------------------------------------------------------------------------------------- allocations

// Who touched two bytes, and when: how many barriers its block and its warp had passed.
struct Touch { u32 thread, launch, block_phase, warp_phase, clock; };
enum : u32 { NOBODY = 0, HOST = 0xffffffff };     // threads are numbered from 1 in a launch

// The threads that have read since the last barrier.
enum : u8 { ONE_THREAD, ONE_WARP, ONE_BLOCK, MORE_BLOCKS };
struct Cell { Touch write, read; u8 readers, pending, async; };   // async: written by TMA

struct Area { u64 base, size; u8 *bytes; std::vector<Cell> cells; };

static std::map<u64, Area> areas;                 // global memory by address
static Area *last_area;                           // of the last access

// The running block.
struct Block {
    Kernel *kernel;
    u32 launch, number, threads, phase;
    Area shared;
    u8 *parameters;
    std::vector<Warp> warps;
    const Instruction *now;
    bool again;                           // the instruction waits: it is to be executed again
    bool mbarriers;                       // it has some: sm90.h then knows the last read of a warp
};
static Block block;

// Where generic addresses have shared memory and parameters.
enum : u64 { SHARED_FIRST = 1024, SHARED_WINDOW = 1ull << 56, PARAM_WINDOW = 2ull << 56 };

static Area &area_of(u64 at, u32 size, const char *what) {
    if (last_area && at >= last_area->base && at + size <= last_area->base + last_area->size)
        return *last_area;
    auto next = areas.upper_bound(at);
    if (next == areas.begin()) fail("%s at %llx: no memory there", what, (unsigned long long)at);
    Area &area = (--next)->second;
    if (at + size > area.base + area.size)
        fail("%s of %u bytes, %lld bytes past the end of an allocation of %llu", what, size,
             (long long)(at + size - area.base - area.size), (unsigned long long)area.size);
    return *(last_area = &area);
}

// ------------------------------------------------------------------------------------------- races

static u32 thread_number(const Warp &w, int lane) {
    return block.number * block.threads + w.id * LANES + lane + 1;
}
static u32 block_of(u32 thread) { return (thread - 1) / block.threads; }
static int warp_of(u32 thread) { return (thread - 1) % block.threads / LANES; }

static std::string name_of(u32 thread) {
    return "thread " + std::to_string((thread - 1) % block.threads) + " of block " +
           std::to_string(block_of(thread));
}

// Whether this warp knows of what another has done.
static bool knows(const Warp &w, const Touch &before) {
    return before.clock <= w.clock.of[warp_of(before.thread)];
}

// Whether nothing orders the earlier write and the present access of thread t.
static bool write_races(const Touch &before, const Warp &w, u32 t) {
    if (before.thread == NOBODY || before.thread == HOST || before.thread == t) return false;
    if (before.launch != block.launch) return false;
    if (block_of(before.thread) != block.number) return true;
    if (before.block_phase != block.phase) return false;
    if (warp_of(before.thread) != w.id) return !knows(w, before);
    return before.warp_phase == w.phase;
}

// Whether nothing orders the earlier reads and the present write.
static bool reads_race(const Cell &c, const Warp &w, u32 t) {
    if (c.read.launch != block.launch || c.read.thread == NOBODY) return false;
    if (c.readers == MORE_BLOCKS || block_of(c.read.thread) != block.number) return true;
    if (c.read.block_phase != block.phase) return false;
    if (c.readers == ONE_BLOCK) return !block.mbarriers;
    if (warp_of(c.read.thread) != w.id) return !knows(w, c.read);
    return c.read.warp_phase == w.phase && (c.readers == ONE_WARP || c.read.thread != t);
}

static void note_read(Cell &c, const Touch &me, const Warp &w) {
    if (c.read.launch != block.launch || c.read.thread == NOBODY) c.readers = ONE_THREAD;
    else if (block_of(c.read.thread) != block.number || c.readers == MORE_BLOCKS)
        c.readers = MORE_BLOCKS;
    else if (c.read.block_phase != block.phase) c.readers = ONE_THREAD;
    else if (warp_of(c.read.thread) != w.id && c.readers != ONE_BLOCK && knows(w, c.read))
        c.readers = ONE_THREAD;
    else if (warp_of(c.read.thread) != w.id || c.readers == ONE_BLOCK) c.readers = ONE_BLOCK;
    else if (c.read.warp_phase != w.phase) c.readers = ONE_THREAD;
    else if (c.read.thread != me.thread || c.readers == ONE_WARP) c.readers = ONE_WARP;
    c.read = me;
}

// Checks and notes an access to bytes at..at+size of an area.
static void touch(Area &a, u64 at, u32 size, const Warp &w, int lane, bool write,
                  const char *what) {
    Touch me = {thread_number(w, lane), block.launch, block.phase, w.phase, w.clock.of[w.id]};
    for (u64 g = at / 2; g <= (at + size - 1) / 2; g++) {
        Cell &c = a.cells[g];
        unsigned long long byte = g * 2;
        if (c.pending) fail("%s of byte %llu, where a copy is under way", what, byte);
        if (write_races(c.write, w, me.thread))
            fail("%s of byte %llu by %s, which %s wrote with no barrier between", what, byte,
                 name_of(me.thread).c_str(), name_of(c.write.thread).c_str());
        if (write && reads_race(c, w, me.thread))
            fail("%s of byte %llu by %s, which %s read with no barrier between", what, byte,
                 name_of(me.thread).c_str(), name_of(c.read.thread).c_str());
        if (!write && c.write.thread == NOBODY)
            fail("%s of byte %llu, which nobody wrote", what, byte);
        if (write) c.write = me, c.async = 0;
        else note_read(c, me, w);
    }
}

// ---------------------------------------------------------------------------------------- accesses

enum Space { GENERIC, GLOBAL, SHARED, PARAM };

// Accesses to shared memory in the eyes of sm90.h: a write of what others may still read; a read.
static void write_over(u64 at, u32 size, const Warp &w, const char *what);
static void note_shared_read(u64 at, u32 size, const Warp &w);

// Checks an access, and returns the bytes.
static u8 *access(int space, u64 at, u32 size, const Warp &w, int lane, bool write,
                  const char *what) {
    if (at % size)
        fail("%s of %u bytes at address %llx, which is not a multiple", what, size,
             (unsigned long long)at);
    if (space == GENERIC) {
        bool shared = at >> 56 == 1;
        space = shared ? SHARED : GLOBAL;
        if (shared) at -= SHARED_WINDOW;
    }
    if (space == PARAM) {
        if (at + size > (u64)block.kernel->parameter_bytes)
            fail("%s of byte %llu of the arguments", what, (unsigned long long)at);
        return block.parameters + at;
    }
    if (space == SHARED) {
        if (at < SHARED_FIRST || at + size > block.shared.size)
            fail("%s of %u bytes at shared address %llu of %llu", what, size,
                 (unsigned long long)at, (unsigned long long)block.shared.size);
        touch(block.shared, at, size, w, lane, write, what);
        if (write) write_over(at, size, w, what);
        else if (block.mbarriers) note_shared_read(at, size, w);
        return block.shared.bytes + at;
    }
    Area &a = area_of(at, size, what);
    touch(a, at - a.base, size, w, lane, write, what);
    return a.bytes + (at - a.base);
}
