// sm90.h: the instructions of compute capability 9.0: mbarrier, TMA (cp.async.bulk.tensor), wgmma,
// setmaxnreg and barriers with numbers. Semantics are those of NVIDIA's "PTX ISA", version 9.0:
// 9.7.13.15 mbarrier, 5.5 tensors, 9.7.9.27 cp.async.bulk.tensor, 9.7.15 wgmma. No line comes from
// the emulator's dev/emu/sm90.h, which reads the same formats.
//
// Copies and products run in the background: a load by TMA lands at any time after it begins, and
// a product reads its operands when it is waited for. Shared memory that they read must have been
// written by TMA, or by threads that executed fence.proxy.async since. Whoever reads what TMA has
// loaded, or overwrites what it or wgmma has read, must know of that by barriers (Clock, memory.h).
//
// wgmma's registers D hold NaN until the wait. D and A must be as they were at the last
// wgmma.fence, and A as it was at the product's beginning.
#pragma once
#include "instructions.h"

enum : u32 { UNDER_WAY = 0xffffffff };    // in place of a step: a read that has not ended

struct Mbarrier90 {
    u32 expected, pending, phase;
    s64 bytes;                            // still to come in this phase
    u32 owner;                            // the thread that initialized it
    bool known;                           // to TMA
    Clock arriving, done;
};

struct Load90 {
    u64 map, barrier;                     // addresses; map: of the host
    u32 to, thread;
    s32 x[5];
    Clock clock;
    u32 step;
    std::vector<u8> data;                 // empty: read when it lands
};

struct Store90 {
    u64 map;
    u32 from;
    s32 x[5];
    int lane, group;
};

struct Product90 {
    const Instruction *now;
    int N, group;
    bool add, in_registers, a_across, b_across;     // across: M or N runs along rows in memory
    u64 a, b;                             // descriptors
    u32 registers[4][LANES];              // A
    const s32 *d;                         // places of D
    std::shared_ptr<std::vector<f32>> sums;         // [N / 2][LANES]
};

struct Group90 {
    std::vector<u8> fenced;               // the warp's registers at the last wgmma.fence
    std::vector<Product90> products;
    std::vector<Store90> stores;
    int product_groups, store_groups[LANES];
    u32 registers;                        // of a thread: setmaxnreg
    u64 together;                         // what the four warps must do alike, as a number
};

static struct Block90 {
    std::map<u64, Mbarrier90> barriers;
    std::vector<Load90> loads;
    std::vector<u32> fenced;              // of each thread: its warp's step at its last proxy fence
    std::vector<u32> reads;               // [16 bytes][WARPS]: step of the last read, 0 for none
    struct { u32 threads, arrived; Clock clock; } named[16];
    u32 registers_free;
    u64 stalled;                          // slices in a row in which a warp only waited
} block90;

static void release_warps(int number);

static Group90 &group90(Warp &w) {
    if (!w.group90) {
        w.group90 = std::make_shared<Group90>();
        w.group90->registers = std::min<u32>(65536 / ((block.threads + 31) / 32 * 32) / 8 * 8, 256);
    }
    return *w.group90;
}
static void step_done(Warp &w) { w.clock.of[w.id]++; }
static void together(Warp &w, u64 what) {
    u64 &t = group90(w).together;
    t = (t + what) * 0x9E3779B97F4A7C15ull + 1;
}

static void begin_sm90() {
    block90.barriers.clear();
    block.mbarriers = false;
    block90.loads.clear();
    block90.fenced.assign(block.threads, 0);
    block90.reads.clear();
    for (auto &n : block90.named) n = {};
    block90.registers_free = 0;
    block90.stalled = 0;
}

// ------------------------------------------------------------------------------------------ reads

static std::vector<u32> &reads_of_block() {
    if (block90.reads.empty()) block90.reads.assign((block.shared.size / 16 + 1) * WARPS, 0);
    return block90.reads;
}

static void write_over(u64 at, u32 size, const Warp &w, const char *what) {
    if (block90.reads.empty()) return;
    for (u64 g = at / 16; g <= (at + size - 1) / 16; g++)
        for (u32 n = 0; n < block.warps.size(); n++) {
            u32 step = block90.reads[g * WARPS + n];
            if (step == 0) continue;
            if ((int)n == w.id ? step == UNDER_WAY : step > w.clock.of[n])
                fail("%s of byte %llu, which warp %u reads%s", what,
                     (unsigned long long)(g * 16), n,
                     step == UNDER_WAY ? "" : " with no barrier between");
        }
}

static void note_shared_read(u64 at, u32 size, const Warp &w) {
    for (u64 g = at / 16; g <= (at + size - 1) / 16; g++) {
        u32 &step = reads_of_block()[g * WARPS + w.id];
        if (step != UNDER_WAY) step = w.clock.of[w.id];
    }
}

// Checks that the asynchronous proxy may read these two bytes on behalf of a warp.
static void read_async(const Warp &w, u64 at, const char *what) {
    unsigned long long byte = at;
    if (at % 2 || at < SHARED_FIRST || at + 2 > block.shared.size)
        fail("%s at shared address %llu of %llu", what, byte,
             (unsigned long long)block.shared.size);
    const Cell &c = block.shared.cells[at / 2];
    if (c.pending) fail("%s of byte %llu, where a copy is under way", what, byte);
    if (c.write.thread == NOBODY) fail("%s of byte %llu, which nobody wrote", what, byte);
    int writer = warp_of(c.write.thread);
    if (c.write.block_phase == block.phase && (c.async || writer != w.id) && !knows(w, c.write))
        fail("%s of byte %llu, which %s wrote with no barrier between", what, byte,
             name_of(c.write.thread).c_str());
    u32 fence = block90.fenced[(c.write.thread - 1) % block.threads];
    if (!c.async && fence < c.write.clock)
        fail("%s of byte %llu, which %s wrote without fence.proxy.async", what, byte,
             name_of(c.write.thread).c_str());
}

// ------------------------------------------------------------------------------------ tensor maps

static const Map90 &map_at(u64 address) {
    const u8 *p = nullptr;
    if (address >> 56 == 2) {
        u64 at = address - PARAM_WINDOW;
        if (at % 64 || at + 128 > (u64)block.kernel->parameter_bytes)
            fail("a tensor map at byte %llu of the arguments", (unsigned long long)at);
        p = block.parameters + at;
    } else fail("a tensor map that is no __grid_constant__ argument");
    const Map90 *map = (const Map90 *)p;
    if (map->magic != Map90::MAGIC) fail("128 bytes that are no tensor map");
    return *map;
}
static u32 box_bytes(const Map90 &m) {
    u32 bytes = 2;
    for (u32 d = 0; d < m.rank; d++) bytes *= m.box[d];
    return bytes;
}
// Pieces of 16 bytes change places within a pattern of 8, 4 or 2 rows of 128 bytes.
static u32 swizzle(u32 address, u32 width) {
    u32 piece = address / 16, rows = width / 16;
    return (piece ^ (piece / 8 % rows)) * 16 + address % 16;
}

// Calls row(offset in the box, address, first element of the row inside, one past the last) for
// each row of the box, along dimension 0. An empty row has first == last.
template <typename F> static void each_row(const Map90 &m, const s32 *x, F row) {
    u32 rows = box_bytes(m) / m.box[0] / 2;
    for (u32 r = 0; r < rows; r++) {
        u64 address = m.at;
        bool inside = true;
        u32 rest = r;
        for (u32 d = 1; d < m.rank; d++) {
            s64 at = (s64)x[d] + rest % m.box[d];
            rest /= m.box[d];
            if (at < 0 || at >= (s64)m.size[d]) inside = false;
            else address += (u64)at * m.stride[d - 1];
        }
        s64 first = std::max<s64>(0, -(s64)x[0]);
        s64 last = std::min<s64>(m.box[0], (s64)m.size[0] - x[0]);
        if (!inside || last < first) first = last = 0;
        row(r * m.box[0] * 2, address + 2 * (s64)x[0], (int)first, (int)last);
    }
}

static void gather(Load90 &load) {
    const Map90 &m = *(const Map90 *)load.map;
    load.data.assign(box_bytes(m), 0);    // elements outside of the tensor are zeros
    each_row(m, load.x, [&](u32 offset, u64 address, int first, int last) {
        for (int e = first; e < last; e++) {
            u32 at = swizzle(load.to + offset + 2 * e, m.swizzle) - load.to;
            memcpy(load.data.data() + at, (const u8 *)address + 2 * e, 2);
        }
    });
}

static void check_tile(u64 at, const Map90 &m) {
    if (at % (m.swizzle > 16 ? 8 * m.swizzle : 128))
        fail("a tile at shared address %llu, which is no multiple of its swizzle's pattern",
             (unsigned long long)at);
    if (at < SHARED_FIRST || at + box_bytes(m) > block.shared.size)
        fail("a tile of %u bytes at shared address %llu of %llu", box_bytes(m),
             (unsigned long long)at, (unsigned long long)block.shared.size);
}

// --------------------------------------------------------------------------------------- mbarrier

static Mbarrier90 &barrier_of(Warp &w, int place, int lane) {
    u64 at = get<u32>(w, place, lane);
    access(SHARED, at, 8, w, lane, false, "mbarrier");
    auto found = block90.barriers.find(at);
    if (found == block90.barriers.end()) fail("no mbarrier at %llx", (unsigned long long)at);
    return found->second;
}
static void phase_ends(Mbarrier90 &b) {
    if (b.pending || b.bytes) return;
    b.phase++;
    b.pending = b.expected;
    b.done.join(b.arriving);
}
static void arrive(Warp &w, Mbarrier90 &b, s64 bytes) {
    if (!b.pending) fail("an mbarrier with an arrival too many");
    b.bytes += bytes;
    b.pending--;
    b.arriving.join(w.clock);
    step_done(w);
    phase_ends(b);
}
static void know_barriers(const Warp &w, u32 lanes) {
    for (auto &b : block90.barriers)
        for (int l = 0; l < LANES; l++)
            if (lanes >> l & 1 && b.second.owner == thread_number(w, l)) b.second.known = true;
}

#define EACH_LANE(...) for (int l = 0; l < LANES; l++) if (lanes >> l & 1) { __VA_ARGS__ }

static void add_mbarrier() {
    OPERATION("mbarrier.init.shared::cta.b64", EACH_LANE(
        u64 at = get<u32>(w, i.s[0], l);
        u32 count = get<u32>(w, i.s[1], l);
        if (count < 1 || count >= 1 << 20) fail("an mbarrier of %u arrivals", count);
        memset(access(SHARED, at, 8, w, l, true, "mbarrier.init"), 0, 8);
        block.mbarriers = true;
        block90.barriers[at] = {count, count, 0, 0, thread_number(w, l), false, {}, {}};));
    OPERATION("fence.mbarrier_init.release.cluster", know_barriers(w, lanes););
    OPERATION("mbarrier.arrive.shared::cta.b64", EACH_LANE(
        arrive(w, barrier_of(w, i.s[0], l), 0);));
    OPERATION("mbarrier.arrive.expect_tx.shared::cta.b64", EACH_LANE(
        arrive(w, barrier_of(w, i.s[0], l), get<u32>(w, i.s[1], l));));
    // It blocks until the phase is complete. A GPU gives up after a while, and the program tries
    // again.
    OPERATION("mbarrier.try_wait.parity.shared::cta.b64", EACH_LANE(
        u32 parity = get<u32>(w, i.s[1], l);
        if (parity > 1) fail("a parity of %u", parity);
        Mbarrier90 &b = barrier_of(w, i.s[0], l);
        if ((b.phase & 1) == parity) block.again = true;
        else w.clock.join(b.done););
        if (!block.again) each_bit(w, i.d[0], lanes, [](int) { return true; }););
    auto proxy = [](Warp &w, const Instruction &, u32 lanes, const Operation &) {
        EACH_LANE(block90.fenced[(thread_number(w, l) - 1) % block.threads] = w.clock.of[w.id];);
        know_barriers(w, lanes);
        step_done(w);
    };
    add("fence.proxy.async", proxy);
    add("fence.proxy.async.shared::cta", proxy);
}

// -------------------------------------------------------------------------------------------- TMA

// The rank's x, from place s[k] on.
static void read_x(s32 *x, const Warp &w, const Instruction &i, int k, int rank, int lane) {
    for (int d = 0; d < 5; d++) x[d] = d < rank ? get<s32>(w, i.s[k + d], lane) : 0;
}

// Notes that the tile is being written. Nobody else may touch it from now on.
static void cover_tile(u32 to, u32 bytes, const Warp &w, u32 thread) {
    const char *what = "a load by TMA";
    write_over(to, bytes, w, what);
    for (u32 g = to / 2; g < (to + bytes) / 2; g++) {
        Cell &c = block.shared.cells[g];
        if (c.pending) fail("%s to byte %u, where a copy is under way", what, g * 2);
        if (write_races(c.write, w, thread) || reads_race(c, w, thread))
            fail("%s to byte %u, which another thread has used with no barrier between", what,
                 g * 2);
        c.pending = 1;
    }
    memset(block.shared.bytes + to, 0xff, bytes);
}

// [tile], [map, {x}], [mbarrier]
static void load_begins(Warp &w, const Instruction &i, int rank, int lane) {
    Load90 load = {};
    const Map90 &m = map_at(get<u64>(w, i.s[1], lane));
    if (m.rank != rank) fail("a tensor map of rank %u", m.rank);
    load.map = (u64)&m;
    load.to = get<u32>(w, i.s[0], lane);
    load.thread = thread_number(w, lane);
    load.barrier = get<u32>(w, i.s[2 + rank], lane);
    if (!barrier_of(w, i.s[2 + rank], lane).known) fail("TMA with an mbarrier without its fence");
    read_x(load.x, w, i, 2, rank, lane);
    check_tile(load.to, m);
    each_row(m, load.x, [&](u32, u64 address, int first, int last) {
        if (first == last) return;
        u32 size = 2 * (last - first);
        Area &a = area_of(address + 2 * first, size, "TMA");
        touch(a, address + 2 * first - a.base, size, w, lane, false, "a load by TMA");
    });
    if (next_random() & 1) gather(load);
    cover_tile(load.to, box_bytes(m), w, load.thread);
    load.clock = w.clock;
    load.step = w.clock.of[w.id];
    step_done(w);
    block90.loads.push_back(load);
}

static void land(Load90 &load) {
    if (load.data.empty()) gather(load);
    u32 bytes = (u32)load.data.size();
    memcpy(block.shared.bytes + load.to, load.data.data(), bytes);
    for (u32 g = load.to / 2; g < (load.to + bytes) / 2; g++) {
        Cell &c = block.shared.cells[g];
        c.write = {load.thread, block.launch, block.phase, 0, load.step};
        c.read = {};
        c.readers = 0, c.pending = 0, c.async = 1;
    }
    Mbarrier90 &b = block90.barriers.at(load.barrier);
    b.bytes -= bytes;
    b.arriving.join(load.clock);
    phase_ends(b);
}
// Some loads come to their end, by chance.
static void land_some() {
    while (!block90.loads.empty() && next_random() % 3 == 0) {
        size_t n = next_random() % block90.loads.size();
        land(block90.loads[n]);
        block90.loads.erase(block90.loads.begin() + n);
        block90.stalled = 0;
    }
}
static void note_slice(bool waited) {
    block90.stalled = waited ? block90.stalled + 1 : 0;
    if (block90.stalled > 200 * block.warps.size() && block90.loads.empty())
        fail("deadlock: every warp waits for an mbarrier, for registers or at a barrier");
}

// [map, {x}], [tile]
static void store_begins(Warp &w, const Instruction &i, int rank, int lane) {
    const Map90 &m = map_at(get<u64>(w, i.s[0], lane));
    Group90 &g = group90(w);
    if (m.rank != rank) fail("a tensor map of rank %u", m.rank);
    Store90 store = {(u64)&m, get<u32>(w, i.s[1 + rank], lane), {}, lane, g.store_groups[lane]};
    read_x(store.x, w, i, 1, rank, lane);
    check_tile(store.from, m);
    for (u32 at = store.from; at < store.from + box_bytes(m); at += 2) {
        read_async(w, at, "a store by TMA");
        reads_of_block()[at / 16 * WARPS + w.id] = UNDER_WAY;
    }
    g.stores.push_back(store);
}
static void store_ends(Warp &w, const Store90 &store) {
    const Map90 &m = *(const Map90 *)store.map;
    each_row(m, store.x, [&](u32 offset, u64 address, int first, int last) {
        if (first == last) return;
        u32 size = 2 * (last - first);
        Area &a = area_of(address + 2 * first, size, "TMA");
        touch(a, address + 2 * first - a.base, size, w, store.lane, true, "a store by TMA");
        for (int e = first; e < last; e++)
            memcpy((u8 *)address + 2 * e,
                   block.shared.bytes + swizzle(store.from + offset + 2 * e, m.swizzle), 2);
    });
    for (u32 at = store.from; at < store.from + box_bytes(m); at += 16)
        reads_of_block()[at / 16 * WARPS + w.id] = w.clock.of[w.id];
}

static void add_tma() {
    for (int rank = 1; rank <= 5; rank++) {
        std::string tensor = "cp.async.bulk.tensor." + std::to_string(rank) + "d.";
        add(tensor + "shared::cluster.global.tile.mbarrier::complete_tx::bytes",
            [](Warp &w, const Instruction &i, u32 lanes, const Operation &op) {
                EACH_LANE(load_begins(w, i, op.a, l););
            }, rank);
        add(tensor + "global.shared::cta.tile.bulk_group",
            [](Warp &w, const Instruction &i, u32 lanes, const Operation &op) {
                EACH_LANE(store_begins(w, i, op.a, l););
            }, rank);
    }
    OPERATION("cp.async.bulk.commit_group", EACH_LANE(group90(w).store_groups[l]++;));
    OPERATION("cp.async.bulk.wait_group.read", EACH_LANE(
        Group90 &g = group90(w);
        int before = g.store_groups[l] - (int)get<u32>(w, i.s[0], l);
        std::vector<Store90> rest;
        for (Store90 &store : g.stores) {
            if (store.lane == l && store.group < before) store_ends(w, store);
            else rest.push_back(store);
        }
        g.stores.swap(rest);));
}

// ------------------------------------------------------------------------------------------ wgmma

// The shared address of element (r, k) of an operand: r counts rows of A or columns of B. The
// matrix consists of blocks. Without `across`, k runs along rows: a block is 8 rows of as many
// bytes as the swizzle has. With it, r runs along rows: a block is so many bytes of r by 8 of k.
static u32 operand_at(u64 descriptor, bool across, u32 r, u32 k) {
    static const u32 widths[4] = {16, 128, 64, 32};
    u32 width = widths[descriptor >> 62], each = width / 2;
    u32 start = (u32)(descriptor & 0x3fff) * 16;
    u32 leading = (u32)(descriptor >> 16 & 0x3fff) * 16;
    u32 stride = (u32)(descriptor >> 32 & 0x3fff) * 16;
    if (descriptor >> 49 & 7) fail("a matrix descriptor with a base offset");
    if (descriptor >> 46 & 7 || descriptor >> 52 & 0x3ff || descriptor >> 14 & 3 ||
        descriptor >> 30 & 3)
        fail("a matrix descriptor with bits that mean nothing: %llx",
             (unsigned long long)descriptor);
    u32 in_row, row, blocks;
    if (across) {
        in_row = r % each, row = k % 8;
        blocks = width == 16 ? r / each * stride + k / 8 * leading
                             : r / each * leading + k / 8 * stride;
    } else {
        in_row = k % each, row = r % 8;
        blocks = r / 8 * stride + k / each * leading;      // wider rows hold all 16 of k
    }
    return swizzle(start + blocks + row * width + in_row * 2, width);
}

template <typename F> static void each_operand(const Product90 &p, const Warp &w, F use) {
    for (u32 k = 0; k < 16; k++) {
        for (u32 r = 0; r < 16 && !p.in_registers; r++)
            use(true, r, k, operand_at(p.a, p.a_across, w.id % 4 * 16 + r, k));
        for (u32 c = 0; c < (u32)p.N; c++) use(false, c, k, operand_at(p.b, p.b_across, c, k));
    }
}

template <typename T> static T of_all_lanes(const Warp &w, int place, const char *what) {
    T x = get<T>(w, place, 0);
    for (int l = 1; l < LANES; l++) if (get<T>(w, place, l) != x) fail("%s differs by lane", what);
    return x;
}

static void same_as_fenced(const Warp &w, int place, const char *what) {
    const Group90 &g = *w.group90;
    if (g.fenced.empty()) fail("wgmma without wgmma.fence");
    if (memcmp(w.registers + place, g.fenced.data() + place, 4 * LANES))
        fail("wgmma.fence does not stand between a write of %s and wgmma", what);
}

// wgmma.mma_async. Sources: A's descriptor or four registers, B's descriptor, the predicate to add,
// two signs, and which of the operands in shared memory lie across.
static void wgmma(Warp &w, const Instruction &i, u32, const Operation &op) {
    Group90 &g = group90(w);
    Product90 p = {};
    int n = i.inputs == 9 ? 4 : 1;        // sources of A
    p.now = &i, p.N = op.a, p.group = g.product_groups, p.in_registers = n == 4;
    p.b = of_all_lanes<u64>(w, i.s[n], "a descriptor");
    u32 add = predicate(w, i.s[n + 1]);
    if (add && ~add) fail("wgmma's predicate differs by lane");
    p.add = add;
    for (int k = 2; k < 4; k++)
        if (get<u32>(w, i.s[n + k], 0) != 1) fail("wgmma of the negative, which is not here");
    p.b_across = get<u32>(w, i.s[i.inputs - 1], 0);
    if (p.in_registers) {
        for (int r = 0; r < 4; r++) {
            same_as_fenced(w, i.s[r], "A");
            memcpy(p.registers[r], w.registers + i.s[r], 4 * LANES);
        }
    } else {
        p.a = of_all_lanes<u64>(w, i.s[0], "a descriptor");
        p.a_across = get<u32>(w, i.s[5], 0);
    }
    p.d = block.kernel->many.data() + i.d[0];
    for (Product90 &before : g.products)
        if (before.d[0] == p.d[0]) p.sums = before.sums;
    if (!p.sums) {
        p.sums = std::make_shared<std::vector<f32>>(p.N / 2 * LANES);
        for (int e = 0; e < p.N / 2; e++) {
            if (p.add) same_as_fenced(w, p.d[e], "D");
            memcpy(p.sums->data() + e * LANES, w.registers + p.d[e], 4 * LANES);
            memset(w.registers + p.d[e], 0xff, 4 * LANES);
        }
    }
    each_operand(p, w, [&](bool, u32, u32, u32 at) {
        reads_of_block()[at / 16 * WARPS + w.id] = UNDER_WAY;
    });
    together(w, p.a ^ p.b * 3);
    together(w, op.a * 8 + p.add * 4 + p.a_across * 2 + p.b_across);
    g.products.push_back(p);
}

// D (16 rows of this warp by N) = A B, added to D or not. Sums are exact and rounded once.
static void product_ends(Warp &w, Product90 &p) {
    std::vector<f32> A(16 * 16), B(16 * p.N);
    block.now = p.now;
    each_operand(p, w, [&](bool left, u32 r, u32 k, u32 at) {
        u16 bits;
        read_async(w, at, "wgmma");
        reads_of_block()[at / 16 * WARPS + w.id] = w.clock.of[w.id];
        memcpy(&bits, block.shared.bytes + at, 2);
        (left ? A[r * 16 + k] : B[r * 16 + k]) = from_bf16(bits);
    });
    for (int r = 0; r < 4 && p.in_registers; r++) {
        if (memcmp(p.registers[r], w.registers + p.now->s[r], 4 * LANES))
            fail("A has been written before the wait");
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++)
                A[(l / 4 + r % 2 * 8) * 16 + r / 2 * 8 + l % 4 * 2 + h] =
                    from_bf16((u16)(p.registers[r][l] >> 16 * h));
    }
    for (int e = 0; e < p.N / 2; e++)
        for (int l = 0; l < LANES; l++) {
            int row = l / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + l % 4 * 2 + e % 2;
            f32 &sum = (*p.sums)[e * LANES + l];
            f64 exact = p.add ? sum : 0;
            for (int k = 0; k < 16; k++) exact += (f64)A[row * 16 + k] * B[column * 16 + k];
            sum = (f32)exact;
        }
}

static void products_wait(Warp &w, int left) {
    Group90 &g = group90(w);
    std::vector<Product90> done, rest;
    for (Product90 &p : g.products)
        (p.group < g.product_groups - left ? done : rest).push_back(p);
    g.products.swap(rest);
    for (Product90 &p : done) product_ends(w, p);
    for (Product90 &p : done) {
        bool last = true;
        for (Product90 &later : g.products) last = last && later.sums != p.sums;
        for (int e = 0; e < p.N / 2 && last; e++) {
            u32 *d = (u32 *)(w.registers + p.d[e]);
            for (int l = 0; l < LANES; l++)
                if (d[l] != 0xffffffff && d[l] != ((u32 *)p.sums->data())[e * LANES + l])
                    fail("D has been written before the wait");
            memcpy(d, p.sums->data() + e * LANES, 4 * LANES);
        }
    }
}

static void add_wgmma() {
    for (int N = 8; N <= 256; N += 8)
        add("wgmma.mma_async.sync.aligned.m64n" + std::to_string(N) + "k16.f32.bf16.bf16", wgmma, N,
            0, 0, WHOLE_WARP);
    add("wgmma.fence.sync.aligned", [](Warp &w, const Instruction &, u32, const Operation &) {
        group90(w).fenced.assign(w.registers, w.registers + block.kernel->file);
    }, 0, 0, 0, WHOLE_WARP);
    add("wgmma.commit_group.sync.aligned", [](Warp &w, const Instruction &, u32,
                                              const Operation &) {
        group90(w).product_groups++;
    }, 0, 0, 0, WHOLE_WARP);
    add("wgmma.wait_group.sync.aligned", [](Warp &w, const Instruction &i, u32,
                                            const Operation &) {
        products_wait(w, get<u32>(w, i.s[0], 0));
    }, 0, 0, 0, WHOLE_WARP);
}

// ---------------------------------------------------------------- registers, barriers with numbers

// op.a: 1 takes, 0 gives.
static void setmaxnreg(Warp &w, const Instruction &i, u32, const Operation &op) {
    Group90 &g = group90(w);
    u32 count = get<u32>(w, i.s[0], 0);
    if (count % 8 || count < 24 || count > 256) fail("setmaxnreg of %u registers", count);
    if (op.a ? count < g.registers : count > g.registers)
        fail("setmaxnreg from %u to %u registers", g.registers, count);
    if (op.a && block90.registers_free < (count - g.registers) * LANES) {
        block.again = true;
        return;
    }
    block90.registers_free += (g.registers - count) * LANES;
    g.registers = count;
    together(w, count);
}

// bar.sync and bar.arrive with a number of threads. The last arrival lets those go who wait.
static void named_arrive(Warp &w, const Instruction &i, u32 lanes) {
    u32 number = of_all_lanes<u32>(w, i.s[0], "a barrier"), threads = get<u32>(w, i.s[1], 0);
    if (number < 1 || number > 15 || threads % LANES || ~lanes)
        fail("barrier %u of %u threads, with lanes %08x", number, threads, lanes);
    auto &n = block90.named[number];
    if (n.arrived && n.threads != threads) fail("barrier %u of two sizes", number);
    n.threads = threads;
    n.clock.join(w.clock);
    step_done(w);
    if ((n.arrived += LANES) < threads) return;
    for (Warp &other : block.warps)
        if (other.at_barrier == 1 + (int)number) other.clock.join(n.clock);
    n.arrived = 0;
    n.clock = {};
    release_warps((int)number);
}

static void add_sm90() {
    add_mbarrier();
    add_tma();
    add_wgmma();
    add("setmaxnreg.dec.sync.aligned.u32", setmaxnreg, 0, 0, 0, WHOLE_WARP);
    add("setmaxnreg.inc.sync.aligned.u32", setmaxnreg, 1, 0, 0, WHOLE_WARP);
    add("bar.arrive", [](Warp &w, const Instruction &i, u32 lanes, const Operation &) {
        named_arrive(w, i, lanes);
    }, 0, 0, 0, WHOLE_WARP);
}

static void end_sm90() {
    if (!block90.loads.empty()) fail("a block ends with loads by TMA under way");
    for (Warp &w : block.warps) {
        if (!w.group90) continue;
        if (!w.group90->products.empty()) fail("a warp ends with products (wgmma) under way");
        if (!w.group90->stores.empty()) fail("a thread ends with stores by TMA under way");
        const Warp &first = block.warps[w.id / 4 * 4];
        if (!first.group90 || first.group90->together != w.group90->together)
            fail("warps %d and %d of a warpgroup have not executed the same wgmma and setmaxnreg",
                 first.id, w.id);
    }
}
