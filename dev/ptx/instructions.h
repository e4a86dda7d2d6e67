// instructions.h: what each instruction does, by its name in PTX. Semantics are those of NVIDIA's
// "PTX ISA", version 9.0, chapter 9.7. An instruction that is not in the table is an error that
// names it (ptx.py): nothing is guessed.
//
// Approximate instructions (ex2, rsqrt, lg2, div.approx) are off by as much as the ISA allows, so
// that no result may lean on their last bits.
#pragma once
#include <cfenv>
#include <cmath>
#include <type_traits>
#include "memory.h"

// --------------------------------------------------------------------------------------- registers
// A warp's register has its 32 lanes side by side: 8 bytes a lane, or 4 for anything shorter. A
// predicate is one 32-bit mask.

template <typename T> static inline T get(const Warp &w, int place, int lane) {
    const u8 *p = w.registers + place;
    if constexpr (sizeof(T) >= 4) return ((const T *)p)[lane];
    else return (T)((const u32 *)p)[lane];
}
template <typename T> static inline void set(Warp &w, int place, int lane, T x) {
    u8 *p = w.registers + place;
    if constexpr (sizeof(T) >= 4) ((T *)p)[lane] = x;
    else ((u32 *)p)[lane] = (u32)x;
}
static inline u32 predicate(const Warp &w, int p) { return *(const u32 *)(w.registers + p); }

// d[0] = f(lane) for these lanes.
template <typename T, typename F>
static inline void each(Warp &w, const Instruction &i, u32 lanes, F f) {
    int place = i.d[0];
    if (lanes == ~0u) for (int l = 0; l < LANES; l++) set<T>(w, place, l, f(l));
    else for (int l = 0; l < LANES; l++) if (lanes >> l & 1) set<T>(w, place, l, f(l));
}
// The same for a predicate.
template <typename F> static inline void each_bit(Warp &w, int place, u32 lanes, F f) {
    u32 *p = (u32 *)(w.registers + place), bits = 0;
    for (int l = 0; l < LANES; l++) bits |= (u32)(f(l) ? 1 : 0) << l;
    *p = (*p & ~lanes) | (bits & lanes);
}

// ---------------------------------------------------------------------------------- the operations

// Which lanes have to be at an instruction together: none, all 32, or those of its last operand.
enum { ALONE, WHOLE_WARP, MASKED };

struct Operation;
typedef void (*Execute)(Warp &, const Instruction &, u32 lanes, const Operation &);
struct Operation {
    std::string name;
    Execute execute;
    int a, b, c;         // arguments of `execute`
    int together;
};
static std::vector<Operation> operations;
static std::map<std::string, int> operation_of;
enum { BRA, RET, BAR };  // the first three; vm.cpp executes them

static void add(const std::string &name, Execute execute, int a = 0, int b = 0, int c = 0,
                int together = ALONE) {
    if (operation_of.count(name)) abort();
    operation_of[name] = (int)operations.size();
    operations.push_back({name, execute, a, b, c, together});
}

// OPERATION(name, body): body sees w, i, lanes and op. SCALAR: d = expr for each lane, where a, b
// and c are its sources of type T; D is the type of the result.
#define OPERATION(name, ...) \
    add(name, [](Warp &w, const Instruction &i, u32 lanes, const Operation &op) { \
        (void)w, (void)i, (void)lanes, (void)op; __VA_ARGS__ })
#define SCALAR1(name, D, T, expr) \
    OPERATION(name, each<D>(w, i, lanes, [&](int l) { \
        T a = get<T>(w, i.s[0], l); return (D)(expr); });)
#define SCALAR2(name, D, T, expr) \
    OPERATION(name, each<D>(w, i, lanes, [&](int l) { \
        T a = get<T>(w, i.s[0], l), b = get<T>(w, i.s[1], l); return (D)(expr); });)
#define SCALAR3(name, D, T, expr) \
    OPERATION(name, each<D>(w, i, lanes, [&](int l) { \
        T a = get<T>(w, i.s[0], l), b = get<T>(w, i.s[1], l), c = get<T>(w, i.s[2], l); \
        return (D)(expr); });)

// ----------------------------------------------------------------------- integers, logic, compares

template <typename T> static T divided(T a, T b, bool rest) {
    if (!b) fail("division by zero");
    return rest ? a % b : a / b;
}
template <typename T> static T shifted_right(T a, u32 n) {
    if (n >= 8 * sizeof(T)) return a < 0 ? (T)-1 : (T)0;
    return (T)(a >> n);
}
template <typename T> static T shifted_left(T a, u32 n) {
    return n >= 8 * sizeof(T) ? (T)0 : (T)(a << n);
}

template <typename T> static void add_integers(const std::string &type) {
    SCALAR2("add." + type, T, T, a + b);
    SCALAR2("sub." + type, T, T, a - b);
    SCALAR2("mul.lo." + type, T, T, (u64)a * (u64)b);
    SCALAR2("mul.hi." + type, T, T, (__int128)a * (__int128)b >> 8 * sizeof(T));
    SCALAR3("mad.lo." + type, T, T, (u64)a * (u64)b + (u64)c);
    SCALAR2("min." + type, T, T, a < b ? a : b);
    SCALAR2("max." + type, T, T, a > b ? a : b);
    SCALAR2("div." + type, T, T, divided<T>(a, b, false));
    SCALAR2("rem." + type, T, T, divided<T>(a, b, true));
    SCALAR1("neg." + type, T, T, 0 - (u64)a);
    SCALAR1("shr." + type, T, T, shifted_right<T>(a, get<u32>(w, i.s[1], l)));
}

// Products of twice the width.
template <typename T, typename W> static void add_wide(const std::string &type) {
    SCALAR2("mul.wide." + type, W, T, (W)a * (W)b);
    SCALAR2("mad.wide." + type, W, T, (W)a * (W)b + get<W>(w, i.s[2], l));
}

template <typename T> static void add_logic(const std::string &type) {
    SCALAR2("and." + type, T, T, a & b);
    SCALAR2("or." + type, T, T, a | b);
    SCALAR2("xor." + type, T, T, a ^ b);
    SCALAR1("not." + type, T, T, ~a);
    SCALAR1("shl." + type, T, T, shifted_left<T>(a, get<u32>(w, i.s[1], l)));
}

template <typename T> static void add_moves(const std::string &type) {
    SCALAR1("mov." + type, T, T, a);
    SCALAR2("selp." + type, T, T, predicate(w, i.s[2]) >> l & 1 ? a : b);
}

#define COMPARE(name, expr) \
    OPERATION("setp." name "." + type, each_bit(w, i.d[0], lanes, [&](int l) { \
        T a = get<T>(w, i.s[0], l), b = get<T>(w, i.s[1], l); return expr; });)

template <typename T> static void add_compares(const std::string &type) {
    COMPARE("eq", a == b);
    COMPARE("lt", a < b);
    COMPARE("le", a <= b);
    COMPARE("gt", a > b);
    COMPARE("ge", a >= b);
    if constexpr (!std::is_floating_point<T>::value) COMPARE("ne", a != b);
    else {
        COMPARE("ne", a < b || a > b);    // false with NaN; the forms with u are true with NaN
        COMPARE("equ", !(a < b || a > b));
        COMPARE("neu", !(a == b));
        COMPARE("ltu", !(a >= b));
        COMPARE("leu", !(a > b));
        COMPARE("gtu", !(a <= b));
        COMPARE("geu", !(a < b));
        COMPARE("num", a == a && b == b);
        COMPARE("nan", a != a || b != b);
    }
}

static u32 bits_inserted(u32 a, u32 b, u32 position, u32 length) {
    for (u32 k = 0; k < length && position + k < 32; k++)
        b = (b & ~(1u << (position + k))) | (a >> k & 1) << (position + k);
    return b;
}

// Moves between a register and the two halves of it; -1 is the destination that nobody reads.
template <typename Whole, typename Half> static void add_halves(const std::string &type) {
    const int bits = 8 * sizeof(Half);
    OPERATION("mov." + type + ".unpack",
        for (int l = 0; l < LANES; l++) {
            if (!(lanes >> l & 1)) continue;
            Whole x = get<Whole>(w, i.s[0], l);
            if (i.d[0] >= 0) set<Half>(w, i.d[0], l, (Half)x);
            if (i.d[1] >= 0) set<Half>(w, i.d[1], l, (Half)(x >> bits));
        });
    OPERATION("mov." + type + ".pack", each<Whole>(w, i, lanes, [&](int l) {
        return (Whole)get<Half>(w, i.s[0], l) | (Whole)get<Half>(w, i.s[1], l) << bits; }););
}

#define BITS(name, expr) \
    OPERATION(name, u32 a = predicate(w, i.s[0]); \
        u32 b = i.inputs > 1 ? predicate(w, i.s[1]) : 0; u32 r = expr; (void)b; \
        each_bit(w, i.d[0], lanes, [&](int l) { return r >> l & 1; });)

static void add_all_integers() {
    add_integers<s32>("s32"), add_integers<u32>("u32"), add_integers<s64>("s64");
    add_integers<u64>("u64"), add_integers<s16>("s16"), add_integers<u16>("u16");
    add_wide<s32, s64>("s32"), add_wide<u32, u64>("u32");
    add_wide<s16, s32>("s16"), add_wide<u16, u32>("u16");
    add_logic<u32>("b32"), add_logic<u64>("b64"), add_logic<u16>("b16");
    for (const char *type : {"b32", "u32", "s32", "f32"}) add_moves<u32>(type);
    for (const char *type : {"b64", "u64", "s64", "f64"}) add_moves<u64>(type);
    for (const char *type : {"b16", "u16", "s16"}) add_moves<u16>(type);
    add_compares<s32>("s32"), add_compares<u32>("u32"), add_compares<s64>("s64");
    add_compares<u64>("u64"), add_compares<s16>("s16"), add_compares<u16>("u16");
    add_compares<u32>("b32"), add_compares<u64>("b64"), add_compares<u16>("b16");
    add_halves<u32, u16>("b32"), add_halves<u64, u32>("b64");
    BITS("mov.pred", a);
    BITS("not.pred", ~a);
    BITS("and.pred", a & b);
    BITS("or.pred", a | b);
    BITS("xor.pred", a ^ b);
    SCALAR2("bfi.b32", u32, u32, bits_inserted(a, b, get<u32>(w, i.s[2], l) & 255,
                                               get<u32>(w, i.s[3], l) & 255));
}

// ------------------------------------------------------------------------------------------ floats

static int noise = 1;                     // approximate instructions are off
static u64 noise_key = 1;

// A result that may be off by this much, relatively: it goes up or down by chance, but always the
// same way for one result. Exact results stay exact, as those of ex2(3) do.
static inline f32 approximate(f64 exact, f64 relative) {
    if (!noise || exact - exact != 0 || (f32)exact == exact) return (f32)exact;
    u64 h;
    memcpy(&h, &exact, 8);
    h = (h ^ noise_key ^ h >> 29) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ h >> 32) * 0x94D049BB133111EBull;
    f64 u = (f64)(h >> 11) / 4503599627370496.0 - 1;
    return (f32)(exact * (1 + u * relative));
}

static inline f32 flushed(f32 x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x; }
static inline f32 saturated(f32 x) { return x > 0 ? fminf(x, 1) : 0; }    // NaN becomes 0

// div.approx is 0 for divisors above 2^126.
static f32 divided_roughly(f32 a, f32 b) {
    const f32 largest = 3.4028235e38f;
    if (fabsf(b) > 0x1p126f && fabsf(b) <= largest) return fabsf(a) <= largest ? 0.0f : NAN;
    return approximate((f64)a / b, 1.9 * 0x1p-23);
}

__attribute__((noinline)) static f32 fma_down(f32 a, f32 b, f32 c) {
    volatile f32 x = a, y = b, z = c;
    fesetround(FE_DOWNWARD);
    volatile f32 r = fmaf(x, y, z);
    fesetround(FE_TONEAREST);
    return r;
}

static inline f32 from_bf16(u16 x) {
    u32 bits = (u32)x << 16;
    f32 y;
    memcpy(&y, &bits, 4);
    return y;
}
static inline u16 to_bf16(f32 x) {        // nearest, ties to even
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename T> static void add_floats(const std::string &type) {
    for (const char *round : {".", ".rn."}) {
        SCALAR2("add" + (round + type), T, T, a + b);
        SCALAR2("sub" + (round + type), T, T, a - b);
        SCALAR2("mul" + (round + type), T, T, a * b);
    }
    SCALAR2("max." + type, T, T, std::fmax(a, b));
    SCALAR2("min." + type, T, T, std::fmin(a, b));
    SCALAR2("div.rn." + type, T, T, a / b);
    SCALAR1("rcp.rn." + type, T, T, 1 / a);
    SCALAR1("sqrt.rn." + type, T, T, std::sqrt(a));
    SCALAR1("abs." + type, T, T, std::fabs(a));
    SCALAR1("neg." + type, T, T, -a);
    SCALAR3("fma.rn." + type, T, T, std::fma(a, b, c));
    add_compares<T>(type);
}

static s32 to_int(f32 a) {                // towards zero, saturating; NaN becomes 0
    if (a != a) return 0;
    if (a >= 2147483648.0f) return 2147483647;
    return a <= -2147483648.0f ? (s32)0x80000000 : (s32)a;
}

static void add_all_floats() {
    add_floats<f32>("f32"), add_floats<f64>("f64");
    SCALAR3("fma.rm.f32", f32, f32, fma_down(a, b, c));
    SCALAR1("ex2.approx.ftz.f32", f32, f32,
            flushed(approximate(exp2((f64)flushed(a)), 1.9 * 0x1p-23)));
    SCALAR1("ex2.approx.f32", f32, f32, approximate(exp2((f64)a), 1.9 * 0x1p-23));
    SCALAR1("rcp.approx.ftz.f32", f32, f32,
            flushed(approximate(1 / (f64)flushed(a), 1.9 * 0x1p-24)));
    SCALAR2("copysign.f32", f32, f32, copysignf(b, a));  // the sign of a, the rest of b
    SCALAR1("rsqrt.approx.f32", f32, f32, approximate(1 / sqrt((f64)a), 0x1p-22));
    SCALAR1("lg2.approx.f32", f32, f32, log2((f64)a) + (noise ? 0x1p-23 : 0));
    SCALAR2("div.approx.f32", f32, f32, divided_roughly(a, b));
    SCALAR1("cvt.sat.f32.f32", f32, f32, saturated(a));
}

template <typename D, typename T> static void add_convert(const char *types) {
    SCALAR1(std::string("cvt.") + types, D, T, a);
}

static void add_conversions() {
    add_convert<s64, s32>("s64.s32"), add_convert<u32, u64>("u32.u64");
    add_convert<u64, u32>("u64.u32"), add_convert<f32, s32>("rn.f32.s32");
    add_convert<f64, f32>("f64.f32"), add_convert<f32, f64>("rn.f32.f64");
    add_convert<u16, u32>("u16.u32"), add_convert<u32, u16>("u32.u16");
    add_convert<u64, u16>("u64.u16"), add_convert<f64, s32>("rn.f64.s32");
    add_convert<f32, s64>("rn.f32.s64"), add_convert<f32, u32>("rn.f32.u32");
    add_convert<s32, s64>("s32.s64"), add_convert<s32, s16>("s32.s16");
    add_convert<f32, u64>("rn.f32.u64"), add_convert<f64, u64>("rn.f64.u64");
    add_convert<f64, s64>("rn.f64.s64"), add_convert<f64, u32>("rn.f64.u32");
    SCALAR1("cvt.rzi.s32.f32", s32, f32, to_int(a));
    SCALAR1("cvt.f32.bf16", f32, u16, from_bf16(a));
    SCALAR1("cvt.rn.bf16.f32", u16, f32, to_bf16(a));
    // The first source becomes the upper half.
    SCALAR2("cvt.rn.bf16x2.f32", u32, f32, (u32)to_bf16(a) << 16 | to_bf16(b));
    OPERATION("cvta.to.global.u64", each<u64>(w, i, lanes, [&](int l) {
        u64 a = get<u64>(w, i.s[0], l);
        if (a >> 56 == 1) fail("cvta.to.global of a shared address");
        return a; }););
    SCALAR1("cvta.shared.u64", u64, u64, a + SHARED_WINDOW);
    SCALAR1("cvta.param.u64", u64, u64, a + PARAM_WINDOW);
    // nullptr, too, may be converted, as long as nobody uses the address: no block has it.
    SCALAR1("cvta.to.shared.u64", u64, u64, a - SHARED_WINDOW);
}

// -------------------------------------------------------------------------------- loads and stores

static u64 address(const Warp &w, const Instruction &i, int lane) {
    u64 base = 0;
    if (i.s[0] >= 0)
        base = i.size[0] == 8 ? get<u64>(w, i.s[0], lane) : get<u32>(w, i.s[0], lane);
    return base + i.offset;
}

static u64 extended(u64 x, int size) {
    if (size == 1) return (u64)(s64)(int8_t)x;
    if (size == 2) return (u64)(s64)(s16)x;
    return size == 4 ? (u64)(s64)(s32)x : x;
}

// a: space, b: values side by side, c: bytes of one, negative if it is signed. A destination may be
// wider than the value.
static void load(Warp &w, const Instruction &i, u32 lanes, const Operation &op) {
    int size = abs(op.c);
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        const u8 *p = access(op.a, address(w, i, l), size * op.b, w, l, false, "read");
        for (int v = 0; v < op.b; v++, p += size) {
            if (i.d[v] < 0) continue;
            u64 x = 0;
            memcpy(&x, p, size);
            if (op.c < 0) x = extended(x, size);
            if (i.wide >> v & 1) set<u64>(w, i.d[v], l, x);
            else set<u32>(w, i.d[v], l, (u32)x);
        }
    }
}

static void store(Warp &w, const Instruction &i, u32 lanes, const Operation &op) {
    int size = abs(op.c);
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        u8 *p = access(op.a, address(w, i, l), size * op.b, w, l, true, "write");
        for (int v = 0; v < op.b; v++, p += size) {
            u64 x = size == 8 ? get<u64>(w, i.s[1 + v], l) : get<u32>(w, i.s[1 + v], l);
            memcpy(p, &x, size);
        }
    }
}

static void add_memory() {
    struct { const char *name; int space; } spaces[] = {
        {"", GENERIC}, {".global", GLOBAL}, {".shared", SHARED}, {".param", PARAM}};
    struct { const char *name; int size; } types[] = {
        {"u8", 1}, {"s8", -1}, {"b8", 1}, {"u16", 2}, {"s16", -2}, {"b16", 2}, {"u32", 4},
        {"s32", -4}, {"b32", 4}, {"f32", 4}, {"u64", 8}, {"s64", 8}, {"b64", 8}, {"f64", 8}};
    for (auto &s : spaces)
        for (auto &t : types)
            for (int count : {1, 2, 4})
                for (const char *cache : {"", ".nc", ".wb", ".cs"}) {
                    std::string rest = std::string(s.name) + cache;
                    if (count > 1) rest += ".v" + std::to_string(count);
                    rest += std::string(".") + t.name;
                    add("ld" + rest, load, s.space, count, t.size);
                    if (s.space != PARAM) add("st" + rest, store, s.space, count, t.size);
                }
}

// ----------------------------------------------------------------------------- asynchronous copies

static u64 next_random();

// cp.async.cg of 16 bytes, of which `size` come from memory and the others are zeros. It reads now
// or when it is waited for, by chance.
static void copy_begin(Warp &w, const Instruction &i, u32 lanes, const Operation &) {
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        u64 to = i.size[0] == 8 ? get<u64>(w, i.s[0], l) : get<u32>(w, i.s[0], l);
        u64 from = get<u64>(w, i.s[1], l);
        u32 bytes = get<u32>(w, i.s[2], l);
        u32 size = i.inputs > 3 ? get<u32>(w, i.s[3], l) : bytes;
        if (bytes != 16 || size > 16) fail("cp.async of %u bytes, %u from memory", bytes, size);
        if (i.offset) fail("cp.async with an offset, which this interpreter lacks");
        if (from % 16) fail("cp.async from %llx, not a multiple of 16", (unsigned long long)from);
        access(SHARED, to, 16, w, l, true, "cp.async to shared memory");
        Copy c = {(u32)to, size, size ? from : 0, {}, w.groups[l]};
        if (size) {
            const u8 *p = access(GLOBAL, from, size, w, l, false, "cp.async from global memory");
            bool now = next_random() & 1 || size < 16;
            if (now) memcpy(c.data, p, size), c.from = 0;
        }
        for (u64 g = to / 2; g < to / 2 + 8; g++) block.shared.cells[g].pending = 1;
        memset(block.shared.bytes + to, 0xff, 16);
        w.copies[l].push_back(c);
    }
}

// Completes the lane's copies of all groups before this one.
static void copy_finish(Warp &w, int lane, int before) {
    std::vector<Copy> rest;
    for (Copy &c : w.copies[lane]) {
        if (c.group >= before) { rest.push_back(c); continue; }
        if (c.from) memcpy(c.data, (const void *)c.from, 16);
        memcpy(block.shared.bytes + c.to, c.data, 16);
        for (u64 g = c.to / 2; g < c.to / 2 + 8; g++) {
            Cell &cell = block.shared.cells[g];
            cell.pending = 0;
            cell.write = {thread_number(w, lane), block.launch, block.phase, w.phase,
                          w.clock.of[w.id]};
        }
    }
    w.copies[lane].swap(rest);
}

static void add_copies() {
    add("cp.async.cg.shared.global", copy_begin);
    OPERATION("cp.async.commit_group",
        for (int l = 0; l < LANES; l++) if (lanes >> l & 1) w.groups[l]++;);
    OPERATION("cp.async.wait_group",
        for (int l = 0; l < LANES; l++)
            if (lanes >> l & 1) copy_finish(w, l, w.groups[l] - (int)get<u32>(w, i.s[0], l)););
}

// -------------------------------------------------------------------- instructions of a whole warp

// mma.m16n8k16 with bf16: D = A B + C. Lane 4 r + q holds, of
//   A   rows r (registers 0, 2) and r + 8 (1, 3), columns 2 q and the next (0, 1), and 8 on (2, 3)
//   B   rows 2 q and the next (register 0), and 8 on (1), of column r
//   C   rows r (values 0, 1) and r + 8 (2, 3), columns 2 q and the next
// Here products and their sum are exact, and one rounding to float follows. Tensor cores cut off
// bits of their own.
static void mma(Warp &w, const Instruction &i, u32, const Operation &) {
    f32 A[16][16], B[16][8], C[16][8];
    auto half = [&](int place, int lane, int k) {
        return from_bf16((u16)(get<u32>(w, place, lane) >> 16 * k));
    };
    for (int l = 0; l < LANES; l++) {
        int r = l / 4, q = l % 4 * 2;
        for (int reg = 0; reg < 4; reg++)
            for (int k = 0; k < 2; k++)
                A[r + reg % 2 * 8][q + k + reg / 2 * 8] = half(i.s[reg], l, k);
        for (int reg = 0; reg < 2; reg++)
            for (int k = 0; k < 2; k++) B[q + k + reg * 8][r] = half(i.s[4 + reg], l, k);
        for (int e = 0; e < 4; e++) C[r + e / 2 * 8][q + e % 2] = get<f32>(w, i.s[6 + e], l);
    }
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            f64 sum = C[r][c];
            for (int k = 0; k < 16; k++) sum += (f64)A[r][k] * B[k][c];
            C[r][c] = (f32)sum;
        }
    for (int l = 0; l < LANES; l++)
        for (int e = 0; e < 4; e++)
            set<f32>(w, i.d[e], l, C[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2]);
}

// ldmatrix.x4: lanes 8 j..8 j + 7 have the addresses of the rows of piece j. Lane l gets of it row
// l / 4, elements 2 (l % 4) and the next; with .trans (a = 1) of its transpose.
static void ldmatrix(Warp &w, const Instruction &i, u32, const Operation &op) {
    u16 piece[4][8][8];
    for (int l = 0; l < LANES; l++)
        memcpy(piece[l / 8][l % 8], access(SHARED, address(w, i, l), 16, w, l, false, "ldmatrix"),
               16);
    for (int j = 0; j < 4; j++)
        for (int l = 0; l < LANES; l++) {
            int row = l / 4, col = l % 4 * 2;
            u32 low = op.a ? piece[j][col][row] : piece[j][row][col];
            u32 high = op.a ? piece[j][col + 1][row] : piece[j][row][col + 1];
            set<u32>(w, i.d[j], l, low | high << 16);
        }
}

enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };

static void shuffle(Warp &w, const Instruction &i, u32 lanes, const Operation &op) {
    u32 out[LANES], inside = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        int b = get<u32>(w, i.s[1], l) & 31, c = get<u32>(w, i.s[2], l);
        int clamp = c & 31, mask = c >> 8 & 31;          // mask: bits of the segment's number
        int least = l & mask, most = least | (clamp & ~mask), from = 0;
        if (op.a == SHFL_UP) from = l - b;
        if (op.a == SHFL_DOWN) from = l + b;
        if (op.a == SHFL_BFLY) from = l ^ b;
        if (op.a == SHFL_IDX) from = least | (b & ~mask);
        bool in = op.a == SHFL_UP ? from >= most : from <= most;
        if (!in) from = l;
        if (!(lanes >> from & 1)) fail("shfl from lane %d, which does not take part", from);
        out[l] = get<u32>(w, i.s[0], from);
        inside |= (u32)in << l;
    }
    for (int l = 0; l < LANES; l++) if (lanes >> l & 1) set<u32>(w, i.d[0], l, out[l]);
    if (i.outputs > 1 && i.d[1] >= 0)
        each_bit(w, i.d[1], lanes, [&](int l) { return inside >> l & 1; });
}

static void add_warp() {
    add("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", mma, 0, 0, 0, WHOLE_WARP);
    add("ldmatrix.sync.aligned.m8n8.x4.shared.b16", ldmatrix, 0, 0, 0, WHOLE_WARP);
    add("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", ldmatrix, 1, 0, 0, WHOLE_WARP);
    int kind = SHFL_UP;
    for (const char *name : {"up", "down", "bfly", "idx"})
        add(std::string("shfl.sync.") + name + ".b32", shuffle, kind++, 0, 0, MASKED);
    add("bar.warp.sync", [](Warp &w, const Instruction &, u32 lanes, const Operation &) {
        if (lanes == w.live) w.phase++;
    }, 0, 0, 0, MASKED);
}

static void add_sm90();

static void add_operations() {
    if (!operations.empty()) return;
    add("bra", nullptr);
    add("ret", nullptr);
    add("bar.sync", nullptr);
    add_all_integers();
    add_all_floats();
    add_conversions();
    add_memory();
    add_copies();
    add_warp();
    add_sm90();
}
