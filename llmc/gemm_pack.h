// gemm_pack.h: how gemm.h's operands get into panels. The first reading may skip it.
//
//   dst[unit * width + row]    `width` rows of a slice of A, MR of them, or columns of B, NR: all rows of a unit of k, then of the next; with BF16_PRODUCTS rounded
//
// On any CPU four rows at a time. With AVX-512 in squares of 16 rows by 16 units, whole registers: of a step of GPT-2 124M in bf16 1.08 times as fast, of small models 1.16; without that
// part the file is complete. What AMX reads of A has another order (gemm_pack_a).
//
// Included by gemm.h, whose names it uses, where they are known.
#pragma once

// The lanes of vectors a and b as one list, of which as many are taken as a has. Both compilers' word for it; gcc has clang's since version 12.
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a) __attribute__((vector_size(sizeof(a))))){__VA_ARGS__})
#endif

typedef Unit Quad __attribute__((vector_size(4 * sizeof(Unit)), aligned(sizeof(Unit)), may_alias));

#ifdef BF16_PRODUCTS
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef real Reals __attribute__((vector_size(16), aligned(sizeof(real)), may_alias));

// The bits of four neighbours rounded to bfloat16, to the nearest, ties to even; their lower halves are 0. A NaN stays one.
static inline Bits bf16_bits(const real *x) {
    Reals four = *(const Reals *)x;
    Bits bits = (Bits)four, number = (Bits)(four == four);
    return (((bits + 0x7FFF + (bits >> 16 & 1)) & number) | (0x7FC00000 & ~number)) & 0xFFFF0000;
}
#endif

// Four units, from x[0..3] at one k, where `next` is how far it is to the next k; with next = 1 four neighbours in k (pairs: eight).
static inline Quad gemm_quad(const real *x, int64_t next) {
#ifndef BF16_PRODUCTS
    (void)next;
    return *(const Quad *)x;
#else
    if (PER_UNIT == 1) return (Quad)bf16_bits(x);
    Bits a = bf16_bits(x), b = bf16_bits(x + (next == 1 ? 4 : next));
    return (Quad)(next == 1 ? PICK(a, b, 0, 2, 4, 6) >> 16 | PICK(a, b, 1, 3, 5, 7) : a >> 16 | b);
#endif
}

// One unit of x[0], and x[next] if there is one left.
static inline Unit gemm_unit(const real *x, int64_t next, int64_t left) {
    real one[8] = {x[0], left > 1 ? x[next] : 0};
    return gemm_quad(one, 1)[0];
}

// Packs `width` rows of A from a slice of K (or columns of B: the strides change places), of which `rows` are there, the others zero:
// dst[unit * width + row]. rs: from row to row, cs: from k to k.
static __attribute__((noinline)) void gemm_pack_any(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t width, int64_t depth) {
    for (int64_t k = 0; k < depth; k += PER_UNIT, dst += width)
        for (int64_t r = 0; r < width; r++) dst[r] = r < rows ? gemm_unit(src + r * rs + k * cs, cs, depth - k) : 0;
}

static inline __attribute__((always_inline)) void gemm_pack(Unit *restrict dst, const real *restrict src, int64_t rs, int64_t cs, int64_t rows, const int64_t width, int64_t depth) {
    int64_t k = 0;
    if (rs == 1 && rows == width)
        for (; k + PER_UNIT <= depth; k += PER_UNIT)
#pragma GCC unroll 8
            for (int64_t r = 0; r < width; r += 4) {
                int64_t r0 = r + 4 <= width ? r : width - 4;                // the last may overlap the one before
                *(Quad *)(dst + k / PER_UNIT * width + r0) = gemm_quad(src + k * cs + r0, cs);
            }
    if (cs == 1 && rows == width)
        for (; k + 4 * PER_UNIT <= depth; k += 4 * PER_UNIT)
#pragma GCC unroll 8
            for (int64_t r = 0; r < width; r += 4) {                        // a 4 x 4 transpose in registers
                int64_t r0 = r + 4 <= width ? r : width - 4;
                const real *x = src + r0 * rs + k;
                Quad x0 = gemm_quad(x, 1), x1 = gemm_quad(x + rs, 1), x2 = gemm_quad(x + 2 * rs, 1), x3 = gemm_quad(x + 3 * rs, 1);
                Quad even0 = PICK(x0, x2, 0, 4, 1, 5), even1 = PICK(x0, x2, 2, 6, 3, 7), odd0 = PICK(x1, x3, 0, 4, 1, 5), odd1 = PICK(x1, x3, 2, 6, 3, 7);
                Unit *to = dst + k / PER_UNIT * width + r0;
                *(Quad *)to = PICK(even0, odd0, 0, 4, 1, 5);
                *(Quad *)(to + width) = PICK(even0, odd0, 2, 6, 3, 7);
                *(Quad *)(to + 2 * width) = PICK(even1, odd1, 0, 4, 1, 5);
                *(Quad *)(to + 3 * width) = PICK(even1, odd1, 2, 6, 3, 7);
            }
    if (k < depth) gemm_pack_any(dst + k / PER_UNIT * width, src + k * cs, rs, cs, rows, width, depth - k);
}

#if defined(__AVX512F__) && (!defined(BF16_PRODUCTS) || defined(__AVX512BF16__))
// With 16 lanes a panel is packed in squares of 16 rows by 16 units of k, whole registers at a time. A line of a square is of one row, side by side in k
// (along), or of 16 rows at one unit (across); from one line of numbers, or of pairs from two.
typedef uint32_t Line __attribute__((vector_size(64), aligned(4), may_alias));

#ifdef BF16_PRODUCTS
static inline Line gemm_round(Line low, Line high) { return (Line)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
static inline Line gemm_pairs(Line low, Line high) {
    const Line pairs = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008, 0x190009, 0x1A000A, 0x1B000B, 0x1C000C, 0x1D000D, 0x1E000E, 0x1F000F};
    return (Line)_mm512_permutexvar_epi16((__m512i)pairs, (__m512i)gemm_round(low, high));
}
#else
static inline Line gemm_round(Line low, Line high) { (void)high; return low; }
static inline Line gemm_pairs(Line low, Line high) { (void)high; return low; }
#endif

// Of 16 neighbours the first `there`, the others 0, and not read.
static inline Line gemm_some(const real *x, int64_t there) { return (Line)_mm512_maskz_loadu_ps((__mmask16)(there >= 16 ? 0xFFFF : there > 0 ? (1 << there) - 1 : 0), x); }

// The transpose of a square: for s = 1, 2, 4, 8 each line i without bit s and line i + s exchange what lies off the diagonal of their blocks of 2 s.
#define OWN(j, s) ((j) & (s) ? (j) - (s) + 16 : (j))
#define OTHER(j, s) ((j) & (s) ? (j) + 16 : (j) + (s))
#define LANES(of, s) of(0, s), of(1, s), of(2, s), of(3, s), of(4, s), of(5, s), of(6, s), of(7, s), of(8, s), of(9, s), of(10, s), of(11, s), of(12, s), of(13, s), of(14, s), of(15, s)
#define EXCHANGE(s) \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) \
        if (!(i & s)) { Line a = x[i], b = x[i + s]; x[i] = PICK(a, b, LANES(OWN, s)), x[i + s] = PICK(a, b, LANES(OTHER, s)); }
static inline __attribute__((always_inline)) void gemm_transpose(Line x[16]) { EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(8) }
#undef OWN
#undef OTHER
#undef LANES
#undef EXCHANGE

// Packs a square of which `rows` and `depth` are there, the others zero and not read: a line for each row (by_row) or for each unit, `apart` units apart. Of its rows the panel
// takes the first `wide`; where lines are no further apart than that, each overwrites what the one before has beyond. The next square is fetched on the way.
static inline __attribute__((always_inline)) void gemm_square(Unit *dst, int64_t apart, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t depth, const int wide, const bool by_row) {
    enum { DEPTH = 16 * PER_UNIT };
    Line x[16] = {0};
    bool along = cs == 1;
    if (along)
#pragma GCC unroll 16
        for (int i = 0; i < wide; i++) {
            for (int j = 0; j < DEPTH; j += LINE) __builtin_prefetch(src + i * rs + DEPTH + j);
            if (i < rows) x[i] = gemm_round(gemm_some(src + i * rs, depth), gemm_some(src + i * rs + 16, depth - 16));
        }
    else if (rs == 1)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const real *unit = src + i * PER_UNIT * cs;
            for (int j = 0; j < PER_UNIT; j++) __builtin_prefetch(unit + (DEPTH + j) * cs);
            if (i * PER_UNIT < depth) x[i] = gemm_pairs(gemm_some(unit, rows), gemm_some(unit + cs, depth > i * PER_UNIT + 1 ? rows : 0));
        }
    else {
        Line any[16] = {0};                                                 // x itself has no address, and stays in registers
        gemm_pack_any((Unit *)any, src, rs, cs, rows, 16, depth < DEPTH ? depth : DEPTH);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) x[i] = any[i];
    }
    if (along != by_row) gemm_transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) *(Line *)(dst + i * apart) = x[i];
}

// Those of A and of B, a whole one apart: nothing is asked there. Functions of their own: inlined into the loop over K, they would have the address of every line on the stack.
enum { WIDE = AMX ? 16 : MR };
static __attribute__((noinline)) void gemm_square_a(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t depth) {
    if (rows >= 16 && depth >= 16 * PER_UNIT) gemm_square(dst, WIDE, src, rs, cs, 16, 16 * PER_UNIT, WIDE, AMX);
    else gemm_square(dst, WIDE, src, rs, cs, rows, depth, WIDE, AMX);
}

static __attribute__((noinline)) void gemm_square_b(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t depth) {
    if (rows >= 16 && depth >= 16 * PER_UNIT) gemm_square(dst, NR, src, rs, cs, 16, 16 * PER_UNIT, 16, false);
    else gemm_square(dst, NR, src, rs, cs, rows, depth, 16, false);
}

// As below, but that what AMX reads of A has 16 units of a row side by side. Panels of A are packed in order: one may end in the next.
static __attribute__((noinline)) void gemm_pack_a(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 16 * PER_UNIT)
        for (int64_t r = 0; r < MR; r += 16, dst += 16 * WIDE) gemm_square_a(dst, src + r * rs + k * cs, rs, cs, rows - r, depth - k);
}

static __attribute__((noinline)) void gemm_pack_b(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t cols, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 16 * PER_UNIT, dst += 16 * NR)
        for (int64_t j = 0; j < NR; j += 16) gemm_square_b(dst + j, src + j * cs + k * rs, cs, rs, cols - j, depth - k);
}

#else
// A panel of A, the first MR of `rows`, and of B, NR of `cols`, each from a slice of K: all rows (columns) of a unit, then of the next.
static __attribute__((noinline)) void gemm_pack_a(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t depth) {
    gemm_pack(dst, src, rs, cs, rows < MR ? rows : MR, MR, depth);
}

static __attribute__((noinline)) void gemm_pack_b(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t cols, int64_t depth) {
    gemm_pack(dst, src, cs, rs, cols < NR ? cols : NR, NR, depth);
}
#endif
