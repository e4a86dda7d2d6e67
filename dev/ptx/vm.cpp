// vm.cpp: executes kernels in PTX on the CPU, one block at a time, its warps interleaved at random.
//
// It promises: each instruction does what NVIDIA's "PTX ISA" says (instructions.h); what that text
// leaves undefined ends the launch with a message (memory.h, sm90.h), and so do lanes that are
// missing from mma, ldmatrix, shfl or a barrier, and a thread that ends with copies under way.
// Registers and shared memory begin as NaN.
//
// A warp is 32 lanes with a program counter each. The lanes with the lowest one run first, and wait
// for each other where an instruction says .sync.
//
// It cannot see ptxas, the GPU's real order of memory accesses, sums inside a real mma, or time.
#include "instructions.h"
#include "sm90.h"
#include <algorithm>

static std::map<std::string, Kernel> kernels;
static std::string error;                 // of the first launch that failed
static u64 random_state = 1, executed, launches;
static int shared_limit;

static u64 next_random() {                // xorshift64* (Vigna 2016)
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1Dull;
}

// ------------------------------------------------------------------------------------------- warps

// Lanes that run together, at the lowest program counter of the warp. next: the lowest of the
// others. Lanes that leave the group have their own program counter in Warp.pc.
struct Group { u32 pc, lanes, next; };

static Group lowest_group(const Warp &w) {
    u32 ready = w.live & ~w.wait;
    Group g = {~0u, 0, ~0u};
    for (int l = 0; l < LANES; l++) if (ready >> l & 1) g.pc = std::min(g.pc, w.pc[l]);
    for (int l = 0; l < LANES; l++) {
        if (!(ready >> l & 1)) continue;
        if (w.pc[l] == g.pc) g.lanes |= 1u << l;
        else g.next = std::min(g.next, w.pc[l]);
    }
    return g;
}

// The lanes `taken` of the group jump.
static bool branch(Warp &w, const Instruction &i, u32 taken, Group &g) {
    if (taken == g.lanes) g.pc = i.target;
    else if (!taken) g.pc++;
    else {
        for (int l = 0; l < LANES; l++)
            if (g.lanes >> l & 1) w.pc[l] = taken >> l & 1 ? i.target : g.pc + 1;
        g.lanes = 0;
    }
    return g.lanes && g.pc < g.next;
}

// An instruction that lanes execute together: those that come wait until all are there.
static bool meet(Warp &w, const Instruction &i, const Operation &op, u32 come, Group &g) {
    u32 lanes = g.lanes, need = w.live;
    if (op.together == WHOLE_WARP) need = ~0u;
    if (op.together == MASKED) need = get<u32>(w, i.s[i.inputs - 1], __builtin_ctz(come));
    for (int l = 0; l < LANES; l++) {
        if (lanes >> l & 1) w.pc[l] = come >> l & 1 ? g.pc : g.pc + 1;
        if (w.wait >> l & 1 && w.pc[l] == g.pc) come |= 1u << l;
    }
    const char *name = op.name.c_str();
    if (need & ~w.live)
        fail("%s needs lanes %08x, of which %08x have ended", name, need, need & ~w.live);
    if (come & ~need)
        fail("%s by lanes %08x, which its mask %08x lacks", name, come & ~need, need);
    g.lanes = 0;
    w.wait = come == need ? w.wait & ~come : w.wait | come;
    if (come != need) return false;
    if (i.op == BAR) {
        w.at_barrier = 1 + (int)get<u32>(w, i.s[0], 0);
        if (i.inputs > 1) named_arrive(w, i, come);
        else if (w.at_barrier > 1) fail("a barrier other than 0 for all threads");
        return false;
    }
    op.execute(w, i, come, op);
    if (block.again) {
        w.wait &= ~come;
        return false;
    }
    for (int l = 0; l < LANES; l++) if (come >> l & 1) w.pc[l]++;
    if (lanes != w.live || come != lanes) return false;
    g.lanes = lanes;                      // the whole warp goes on
    g.pc++;
    return true;
}

// Executes one instruction. Returns whether the group goes on as it is.
static bool step(Warp &w, Kernel &k, Group &g) {
    if (g.pc >= k.code.size()) fail("ran off the end");
    const Instruction &i = k.code[g.pc];
    const Operation &op = operations[i.op];
    u32 lanes = g.lanes;
    block.now = &i;
    k.hit[g.pc] = 1;
    executed++;
    if (i.predicate >= 0) lanes &= predicate(w, i.predicate) ^ (i.negated ? ~0u : 0);
    if (i.op == BRA) return branch(w, i, lanes, g);
    if (i.op == BAR || (op.together && lanes)) return meet(w, i, op, lanes, g);
    if (i.op == RET) {
        w.live &= ~lanes;
        g.lanes &= ~lanes;
    } else if (lanes) op.execute(w, i, lanes, op);
    if (block.again) return false;
    g.pc++;
    return g.lanes && g.pc < g.next;
}

// Runs a warp for so many instructions, or until it waits for the block or has ended.
static void run_warp(Warp &w, Kernel &k, int instructions) {
    while (instructions > 0 && w.live && !w.at_barrier) {
        if (!(w.live & ~w.wait)) {
            block.now = &k.code[w.pc[__builtin_ctz(w.wait)]];
            fail("lanes %08x wait for lanes that have gone another way", w.wait);
        }
        Group g = lowest_group(w);
        while (instructions-- > 0 && step(w, k, g)) {}
        for (int l = 0; l < LANES; l++) if (g.lanes >> l & 1) w.pc[l] = g.pc;
        if (block.again) instructions = 0;
    }
    note_slice(block.again);
    block.again = false;
}

// ------------------------------------------------------------------------------------------ blocks

// Special registers, in the order of SPECIAL in ptx.py: tid, ntid, ctaid and nctaid, each x, y, z;
// then the address of dynamic shared memory (8 bytes), the lane, and that address in 4 bytes.
static void special_registers(Warp &w, const Kernel &k, Dim grid, Dim size, u64 dynamic_at) {
    u32 sizes[3] = {size.x, size.y, size.z}, grids[3] = {grid.x, grid.y, grid.z};
    u32 n = block.number;
    u32 ctaid[3] = {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y};
    for (int l = 0; l < LANES; l++) {
        u32 t = w.id * LANES + l;
        u32 tid[3] = {t % size.x, t / size.x % size.y, t / size.x / size.y};
        for (int d = 0; d < 3; d++) {
            u32 values[4] = {tid[d], sizes[d], ctaid[d], grids[d]};
            for (int v = 0; v < 4; v++)
                if (k.special[v * 3 + d] >= 0) set<u32>(w, k.special[v * 3 + d], l, values[v]);
        }
        if (k.special[12] >= 0) set<u64>(w, k.special[12], l, dynamic_at);
        if (k.special[13] >= 0) set<u32>(w, k.special[13], l, l);
        if (k.special[14] >= 0) set<u32>(w, k.special[14], l, (u32)dynamic_at);
    }
}

// Registers are NaN at the start of a launch. Later blocks find what earlier ones have left.
static void begin_warps(Kernel &k, Dim grid, Dim size, u64 dynamic_at) {
    static std::vector<u8> files;         // the registers of all warps
    static u32 files_launch;
    bool first = files_launch != block.launch;
    u32 warps = (block.threads + LANES - 1) / LANES;
    if (first) files.assign((size_t)warps * k.file, 0xff);
    files_launch = block.launch;
    block.warps.resize(warps);
    for (u32 n = 0; n < warps; n++) {
        Warp &w = block.warps[n];
        u32 threads = std::min<u32>(block.threads - n * LANES, LANES);
        w.id = n;
        w.registers = files.data() + (size_t)n * k.file;
        w.phase = 1;
        w.wait = 0;
        w.at_barrier = 0;
        w.clock = {};
        w.clock.of[n] = 1;
        w.group90.reset();
        w.live = threads == LANES ? ~0u : (1u << threads) - 1;
        for (int l = 0; l < LANES; l++) w.pc[l] = 0, w.groups[l] = 0, w.copies[l].clear();
        for (const Constant &c : k.constants)
            for (int l = 0; l < LANES && first; l++) {
                if (c.size == 8) set<u64>(w, c.place, l, c.value);
                else set<u32>(w, c.place, l, (u32)c.value);
            }
        special_registers(w, k, grid, size, dynamic_at);
    }
}

// The warps at barrier `number` go on.
static void release_warps(int number) {
    Clock all = {};
    for (Warp &w : block.warps) all.join(w.clock);
    if (number == 0) block.phase++;
    for (Warp &w : block.warps) {
        if (w.at_barrier != 1 + number) continue;
        for (int l = 0; l < LANES; l++) w.pc[l] += w.live >> l & 1;
        if (number == 0) {
            w.clock.join(all);
            w.clock.of[w.id]++;
        }
        w.at_barrier = 0;
    }
}

static void run_block(Kernel &k, Dim grid, Dim size, u32 number, u32 dynamic) {
    static std::vector<u8> shared;
    u64 dynamic_at = ((u64)k.shared + k.align - 1) / k.align * k.align;
    u64 bytes = dynamic_at + dynamic;
    std::vector<int> ready;
    block.number = number;
    block.phase = 1;
    shared.assign(bytes, 0xff);
    block.shared.base = 0;
    block.shared.size = bytes;
    block.shared.bytes = shared.data();
    block.shared.cells.assign(bytes / 2 + 8, Cell{});
    begin_warps(k, grid, size, dynamic_at);
    begin_sm90();
    for (;;) {
        bool waiting = false, named = false;
        ready.clear();
        for (Warp &w : block.warps) {
            if (w.live && !w.at_barrier) ready.push_back(w.id);
            waiting |= w.at_barrier == 1;
            named |= w.at_barrier > 1;
        }
        if (ready.empty() && !waiting && !named) break;
        if (ready.empty() && named) fail("deadlock: warps wait at a barrier of another number");
        land_some();
        if (ready.empty()) release_warps(0);
        else {
            Warp &w = block.warps[ready[next_random() % ready.size()]];
            run_warp(w, k, 1 + (int)(next_random() % 400));
        }
    }
    for (Warp &w : block.warps)
        for (auto &copies : w.copies)
            if (!copies.empty()) fail("a thread ends with copies (cp.async) under way");
    end_sm90();
}

static void launch(Kernel &k, Dim grid, Dim size, void **arguments, u32 dynamic) {
    static std::vector<u8> parameters;
    block.kernel = &k;
    block.launch = (u32)++launches;
    block.threads = size.x * size.y * size.z;
    parameters.assign(k.parameter_bytes + 16, 0);
    for (size_t p = 0; p * 2 < k.parameters.size(); p++)
        memcpy(parameters.data() + k.parameters[2 * p], arguments[p], k.parameters[2 * p + 1]);
    block.parameters = parameters.data();
    std::vector<u32> order(grid.x * grid.y * grid.z);
    for (u32 i = 0; i < order.size(); i++) order[i] = i;
    for (u32 i = (u32)order.size(); i > 1; i--) std::swap(order[i - 1], order[next_random() % i]);
    for (u32 n : order) run_block(k, grid, size, n, dynamic);
}

// ----------------------------------------------------------------------------- the interface: vm.h

// The columns of a row: op, predicate, negated, target, line, wide, outputs, inputs, offset, then
// d, s and size.
enum { ROW = 9 + 8 + 12 + 12 };

static Instruction load_row(const s64 *row) {
    Instruction i = {};
    i.op = (int)row[0], i.predicate = (int)row[1], i.negated = (int)row[2];
    i.target = (int)row[3], i.line = (int)row[4], i.wide = (int)row[5];
    i.outputs = (int)row[6], i.inputs = (int)row[7], i.offset = row[8];
    for (int k = 0; k < 8; k++) i.d[k] = (int)row[9 + k];
    for (int k = 0; k < 12; k++) i.s[k] = (int)row[17 + k], i.size[k] = (int)row[29 + k];
    return i;
}

extern "C" {
void vm_open(u64 seed, int with_noise, int limit) {
    add_operations();
    random_state = seed * 0x9E3779B97F4A7C15ull + 88172645463325252ull;
    noise = with_noise;
    noise_key = random_state;
    shared_limit = limit;
}
int vm_shared_limit(void) { return shared_limit; }

// Bytes of no allocation on both sides of each: an access that goes a few rows too far never finds
// another array there by luck. Nobody touches them, so they cost addresses alone.
enum { GAP = 1 << 20 };

void *vm_alloc(u64 size, int written) {
    u64 room = (size + 1023) / 256 * 256;
    u8 *p = (u8 *)aligned_alloc(256, GAP + room + GAP) + GAP;
    memset(p, 0xff, room);                // NaN
    areas[(u64)p] = {(u64)p, size, p, std::vector<Cell>(size / 2 + 8)};
    last_area = nullptr;
    if (written) vm_written(p);
    return p;
}
void vm_free(void *p) {
    areas.erase((u64)p);
    if (p) free((u8 *)p - GAP);
    last_area = nullptr;
}
int vm_owns(const void *p, u64 bytes) {
    auto next = areas.upper_bound((u64)p);
    if (next == areas.begin()) return 0;
    const Area &a = (--next)->second;
    return (u64)p + bytes <= a.base + a.size;
}
void vm_written_part(const void *p, u64 bytes) {
    if (!bytes || !vm_owns(p, bytes)) return;
    Area &a = (--areas.upper_bound((u64)p))->second;
    u64 at = (u64)p - a.base;
    for (u64 g = at / 2; g < (at + bytes + 1) / 2; g++) a.cells[g].write = {HOST, 0, 0, 0, 0};
}
void vm_written(void *p) { vm_written_part(p, areas.at((u64)p).size); }
u64 vm_allocated(void) {
    u64 bytes = 0;
    for (auto &a : areas) bytes += a.second.size;
    return bytes;
}

const char *vm_operation(int number) {
    add_operations();
    return number < (int)operations.size() ? operations[number].name.c_str() : nullptr;
}

// sizes: bytes of a warp's registers, of static shared arrays and of parameters; the alignment of
// dynamic shared memory.
void vm_kernel(const char *name, const s64 *rows, int count, const s64 *constants,
               int constant_count, const s32 *special, const s32 *sizes, const s32 *parameters,
               int parameter_count, const s32 *many, int many_count) {
    Kernel k;
    k.name = name;
    for (int i = 0; i < count; i++) k.code.push_back(load_row(rows + (size_t)i * ROW));
    k.hit.assign(count, 0);
    for (int c = 0; c < constant_count; c++, constants += 3)
        k.constants.push_back({(int)constants[0], (int)constants[1], (u64)constants[2]});
    k.parameters.assign(parameters, parameters + 2 * parameter_count);
    memcpy(k.special, special, sizeof k.special);
    k.many.assign(many, many + many_count);
    k.file = sizes[0], k.shared = sizes[1], k.parameter_bytes = sizes[2], k.align = sizes[3];
    kernels[name] = k;
}
int vm_loaded(const char *name) { return kernels.count(name) > 0; }
int vm_parameters(const char *name, const s32 **places) {
    const Kernel &k = kernels.at(name);
    *places = k.parameters.data();
    return (int)k.parameters.size() / 2;
}
int vm_shared(const char *name) { return kernels.at(name).shared - (int)SHARED_FIRST; }

void vm_launch(const char *name, Dim grid, Dim size, void **arguments, u32 dynamic) {
    if (!error.empty()) return;
    block.now = nullptr;
    try {
        launch(kernels.at(name), grid, size, arguments, dynamic);
    } catch (Fail &f) {
        const Instruction *i = block.now;
        error = std::string(name) + ", block " + std::to_string(block.number);
        if (i) error += ", line " + std::to_string(i->line) + ", " + operations[i->op].name;
        error += ": " + f.text;
    }
}
const char *vm_error(void) { return error.c_str(); }
void vm_clear(void) { error.clear(); }

int vm_hits(const char *name, u8 *hit) {
    const Kernel &k = kernels.at(name);
    if (hit) memcpy(hit, k.hit.data(), k.hit.size());
    return (int)k.hit.size();
}
u64 vm_executed(void) { return executed; }
}
