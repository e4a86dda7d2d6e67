// gemm_pack.h: packs the operands of gemm.h into panels. A first reading may skip it.
//
//   dst[unit * width + row]: all rows of a unit of k, then of the next.
//
// A panel of A has width MR (its rows), a panel of B width NR (its columns), both from one slice
// of K. With BF16_PRODUCTS numbers are rounded. AMX reads A in another order (gemm_pack_a).
//
// Any CPU packs four rows at a time. AVX-512 packs squares of 16 rows by 16 units in whole
// registers: a bf16 step is 1.08 times as fast for GPT-2 124M and 1.16 times for small models.
// The file is complete without that part.
//
// Included by gemm.h, whose names it uses.
#pragma once

// Picks lanes from the list of all lanes of a, then of b; as many as a has. gcc has had clang's
// builtin since version 12.
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) \
    __builtin_shuffle(a, b, (__typeof__(a) __attribute__((vector_size(sizeof(a))))){__VA_ARGS__})
#endif

typedef Unit Unit4 __attribute__((vector_size(4 * sizeof(Unit)), aligned(sizeof(Unit)), may_alias));

#ifdef BF16_PRODUCTS
typedef uint32_t U32x4 __attribute__((vector_size(16)));
typedef real Real4 __attribute__((vector_size(16), aligned(sizeof(real)), may_alias));

// The bits of four neighbours rounded to bfloat16, to nearest, ties to even. The lower halves are
// 0. A NaN stays a NaN.
static inline U32x4 bf16_bits(const real *x) {
    Real4 four = *(const Real4 *)x;
    U32x4 bits = (U32x4)four, number = (U32x4)(four == four);
    return (((bits + 0x7FFF + (bits >> 16 & 1)) & number) | (0x7FC00000 & ~number)) & 0xFFFF0000;
}
#endif

#if defined(__AVX512F__) && (!defined(BF16_PRODUCTS) || defined(__AVX512BF16__))
// With 16 lanes a panel is packed in squares of 16 rows by 16 units of k, in whole registers. A
// register holds one row, side by side in k (along), or 16 rows at one unit (across). It is made
// from 16 numbers, or for pairs from two times 16.
typedef uint32_t U32x16 __attribute__((vector_size(64), aligned(4), may_alias));

// along: neighbours of one row; across: the rows of two neighbouring k
#ifdef BF16_PRODUCTS
static inline U32x16 gemm_along(U32x16 low, U32x16 high) {
    return (U32x16)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
static inline U32x16 gemm_across(U32x16 low, U32x16 high) {
    const U32x16 pairs = {
        0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
        0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
    return (U32x16)_mm512_permutexvar_epi16((__m512i)pairs, (__m512i)gemm_along(low, high));
}
#else
static inline U32x16 gemm_along(U32x16 low, U32x16 high) { (void)high; return low; }
static inline U32x16 gemm_across(U32x16 low, U32x16 high) { (void)high; return low; }
#endif

// The first `there` of 16 neighbours. The others are 0 and are not read.
static inline U32x16 gemm_some(const real *x, int64_t there) {
    unsigned bits = there > 0 ? (1u << (there & 15)) - 1 : 0;
    return (U32x16)_mm512_maskz_loadu_ps((__mmask16)(there >= 16 ? 0xFFFF : bits), x);
}

// Transposes a square: for s = 1, 2, 4, 8 every register i without bit s and register i + s
// exchange what lies off the diagonal of their blocks of 2 s.
#define LOW_LANE(j, s) ((j) & (s) ? (j) - (s) + 16 : (j))
#define HIGH_LANE(j, s) ((j) & (s) ? (j) + 16 : (j) + (s))
#define LANES4(of, j, s) of(j, s), of(j + 1, s), of(j + 2, s), of(j + 3, s)
#define LANES16(of, s) LANES4(of, 0, s), LANES4(of, 4, s), LANES4(of, 8, s), LANES4(of, 12, s)
#define EXCHANGE(s) \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) \
        if (!(i & s)) { \
            U32x16 a = x[i], b = x[i + s]; \
            x[i] = PICK(a, b, LANES16(LOW_LANE, s)); \
            x[i + s] = PICK(a, b, LANES16(HIGH_LANE, s)); \
        }
INLINE void gemm_transpose(U32x16 x[16]) { EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(8) }

// Packs a square, of which `rows` and `depth` exist; the others become 0 and are not read. It
// writes one register for each row (by_row) or for each unit, `apart` units apart. The panel takes
// the first `wide` rows. If `apart` is less than 16, each register overwrites the end of the one
// before. Prefetches the next square.
INLINE void gemm_square(Unit *dst, int64_t apart, const real *src, int64_t rs, int64_t cs,
                        int64_t rows, int64_t depth, const int wide, const bool by_row) {
    enum { DEPTH = 16 * PER_UNIT };
    U32x16 x[16] = {0};
    bool along = cs == 1;
    if (along)
#pragma GCC unroll 16
        for (int i = 0; i < wide; i++) {
            const real *row = src + i * rs;
            for (int j = 0; j < DEPTH; j += LINE) __builtin_prefetch(row + DEPTH + j);
            if (i < rows) x[i] = gemm_along(gemm_some(row, depth), gemm_some(row + 16, depth - 16));
        }
    else
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const real *unit = src + i * PER_UNIT * cs;
            for (int j = 0; j < PER_UNIT; j++) __builtin_prefetch(unit + (DEPTH + j) * cs);
            int64_t high = depth > i * PER_UNIT + 1 ? rows : 0;
            if (i * PER_UNIT < depth)
                x[i] = gemm_across(gemm_some(unit, rows), gemm_some(unit + cs, high));
        }
    if (along != by_row) gemm_transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) *(U32x16 *)(dst + i * apart) = x[i];
}

// Squares of A and of B have functions of their own: inlined into the loop over k they would keep
// the address of every register on the stack.
enum { WIDE = AMX ? 16 : MR };
NOINLINE void gemm_square_a(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows,
                            int64_t depth) {
    gemm_square(dst, WIDE, src, rs, cs, rows, depth, WIDE, AMX);
}

NOINLINE void gemm_square_b(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows,
                            int64_t depth) {
    gemm_square(dst, NR, src, rs, cs, rows, depth, 16, false);
}

// A panel of A. AMX reads 16 units of a row side by side. Panels of A are packed in order, because
// one may end in the next.
NOINLINE void gemm_pack_a(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows,
                          int64_t depth) {
    for (int64_t k = 0; k < depth; k += 16 * PER_UNIT)
        for (int64_t r = 0; r < MR; r += 16, dst += 16 * WIDE)
            gemm_square_a(dst, src + r * rs + k * cs, rs, cs, rows - r, depth - k);
}

NOINLINE void gemm_pack_b(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t cols,
                          int64_t depth) {
    for (int64_t k = 0; k < depth; k += 16 * PER_UNIT, dst += 16 * NR)
        for (int64_t j = 0; j < NR; j += 16)
            gemm_square_b(dst + j, src + j * cs + k * rs, cs, rs, cols - j, depth - k);
}

#else
// Four units. next == 1: neighbours in k, from x[0 .. 3] (pairs: x[0 .. 7]). Otherwise four rows
// at one unit, from x[0 .. 3], and for pairs from the next k at x[next].
static inline Unit4 gemm_unit4(const real *x, int64_t next) {
#ifndef BF16_PRODUCTS
    (void)next;
    return *(const Unit4 *)x;
#else
    if (PER_UNIT == 1) return (Unit4)bf16_bits(x);
    U32x4 a = bf16_bits(x), b = bf16_bits(x + (next == 1 ? 4 : next));
    if (next != 1) return (Unit4)(a >> 16 | b);
    return (Unit4)(PICK(a, b, 0, 2, 4, 6) >> 16 | PICK(a, b, 1, 3, 5, 7));
#endif
}

// One unit: x[0], and x[next] where there is one left.
static inline Unit gemm_unit(const real *x, int64_t next, int64_t left) {
    real one[8] = {x[0], left > 1 ? x[next] : 0};
    return gemm_unit4(one, 1)[0];
}

// Packs a panel, one unit after another. The first `rows` of its `width` rows exist; the others
// become 0. rs: from row to row, cs: from k to k. Columns of B: strides change places.
NOINLINE void gemm_pack_any(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows,
                            int64_t width, int64_t depth) {
    for (int64_t k = 0; k < depth; k += PER_UNIT, dst += width)
        for (int64_t r = 0; r < width; r++)
            dst[r] = r < rows ? gemm_unit(src + r * rs + k * cs, cs, depth - k) : 0;
}

// Four rows at a time where the panel is whole and contiguous one way; gemm_pack_any does the rest.
INLINE void gemm_pack(Unit *restrict dst, const real *restrict src, int64_t rs, int64_t cs,
                      int64_t rows, const int64_t width, int64_t depth) {
    int64_t k = 0;
    if (rs == 1 && rows == width)
        for (; k + PER_UNIT <= depth; k += PER_UNIT)
#pragma GCC unroll 8
            for (int64_t r = 0; r < width; r += 4) {
                int64_t r0 = r + 4 <= width ? r : width - 4;  // the last may overlap the one before
                *(Unit4 *)(dst + k / PER_UNIT * width + r0) = gemm_unit4(src + k * cs + r0, cs);
            }
    if (cs == 1 && rows == width)
        for (; k + 4 * PER_UNIT <= depth; k += 4 * PER_UNIT)
#pragma GCC unroll 8
            for (int64_t r = 0; r < width; r += 4) {  // a 4 x 4 transpose in registers
                int64_t r0 = r + 4 <= width ? r : width - 4;
                const real *x = src + r0 * rs + k;
                Unit4 x0 = gemm_unit4(x, 1), x1 = gemm_unit4(x + rs, 1);
                Unit4 x2 = gemm_unit4(x + 2 * rs, 1), x3 = gemm_unit4(x + 3 * rs, 1);
                Unit4 even0 = PICK(x0, x2, 0, 4, 1, 5), even1 = PICK(x0, x2, 2, 6, 3, 7);
                Unit4 odd0 = PICK(x1, x3, 0, 4, 1, 5), odd1 = PICK(x1, x3, 2, 6, 3, 7);
                Unit *to = dst + k / PER_UNIT * width + r0;
                *(Unit4 *)to = PICK(even0, odd0, 0, 4, 1, 5);
                *(Unit4 *)(to + width) = PICK(even0, odd0, 2, 6, 3, 7);
                *(Unit4 *)(to + 2 * width) = PICK(even1, odd1, 0, 4, 1, 5);
                *(Unit4 *)(to + 3 * width) = PICK(even1, odd1, 2, 6, 3, 7);
            }
    if (k < depth)
        gemm_pack_any(dst + k / PER_UNIT * width, src + k * cs, rs, cs, rows, width, depth - k);
}

// A panel of A: the first MR of `rows` rows.
NOINLINE void gemm_pack_a(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows,
                          int64_t depth) {
    gemm_pack(dst, src, rs, cs, least(rows, MR), MR, depth);
}

// A panel of B: the first NR of `cols` columns.
NOINLINE void gemm_pack_b(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t cols,
                          int64_t depth) {
    gemm_pack(dst, src, cs, rs, least(cols, NR), NR, depth);
}
#endif
