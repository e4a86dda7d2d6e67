// gemm_x86.h: two things that gemm.h does otherwise on x86-64, for speed alone; without this file it is complete. The first reading may skip it.
//
//   SQUARES   AVX-512: a panel is packed 16 x 16 at a time, in registers. Of a step of GPT-2 124M in bf16, 1.08 times as fast; of small models, 1.16.
//   AMX       Intel's unit for matrices: a kernel of 2 x 2 of its tiles. GPT-2 124M in bf16, with squares, 2.7 times as fast (dev/bench/cpu/RESULTS.md).
//
// Included by gemm.h, whose names it uses, where they are known.
#pragma once

#if defined(__AVX512F__) && (!defined(BF16_PRODUCTS) || defined(__AVX512BF16__))
#define SQUARES
#include <immintrin.h>
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

// As in gemm.h, but that what AMX reads of A has 16 units of a row side by side. Panels of A are packed in order: one may end in the next.
static __attribute__((noinline)) void gemm_pack_a(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 16 * PER_UNIT)
        for (int64_t r = 0; r < MR; r += 16, dst += 16 * WIDE) gemm_square_a(dst, src + r * rs + k * cs, rs, cs, rows - r, depth - k);
}

static __attribute__((noinline)) void gemm_pack_b(Unit *dst, const real *src, int64_t rs, int64_t cs, int64_t cols, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 16 * PER_UNIT, dst += 16 * NR)
        for (int64_t j = 0; j < NR; j += 16) gemm_square_b(dst + j, src + j * cs + k * rs, cs, rs, cols - j, depth - k);
}
#endif

#if AMX
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
// Linux gives the registers of AMX, 8 KiB a thread, to programs that ask (Documentation/arch/x86/xstate.rst).
static __attribute__((constructor)) void gemm_ask(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0) return;
    fprintf(stderr, "this system does not let programs use AMX, which this build's bf16 products need\n  -> build with CFLAGS='-O3 -march=native -mno-amx-bf16'\n");
    exit(1);
}

// All eight registers: 16 lines of 64 bytes.
static inline void gemm_begin(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t lines[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.lines[i] = 16;
    _tile_loadconfig(&shape);
}
static inline void gemm_end(void) { _tile_release(); }

// out, MR rows `stride` apart, = keep out + alpha (panel of A) (panel of B) over the units s of K. The unit itself can only write a product, or add it to what is there.
// It fetches nothing: slower with than without.
static __attribute__((noinline)) void gemm_kernel(real *out, int64_t stride, const Panel *a, const Panel *b, Span s, real alpha, real keep, Ahead *ahead, int64_t rows) {
    (void)ahead, (void)rows;
    real block[MR * NR], *c = out;
    bool itself = alpha == 1 && (keep == 0 || keep == 1);
    int64_t line = itself ? stride : NR, bytes = line * (int64_t)sizeof(real);
    if (!itself) c = block;
    if (itself && keep == 1) {
        _tile_loadd(0, c, bytes);
        _tile_loadd(1, c + 16, bytes);
        _tile_loadd(2, c + 16 * line, bytes);
        _tile_loadd(3, c + 16 * line + 16, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const Unit *at_a = a->p + s.from * MR, *at_b = b->p + s.from * NR;
    for (int64_t k = s.from; k < s.to; k += 16, at_a += 16 * MR, at_b += 16 * NR) {
        _tile_loadd(4, at_a, 64);
        _tile_loadd(6, at_b, 4 * NR);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, at_b + 16, 4 * NR);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, at_a + 256, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + 16, bytes);
    _tile_stored(2, c + 16 * line, bytes);
    _tile_stored(3, c + 16 * line + 16, bytes);
    for (int64_t r = 0; r < MR && !itself; r++)
        for (int64_t j = 0; j < NR; j++) out[r * stride + j] = (keep == 0 ? 0 : keep * out[r * stride + j]) + alpha * block[r * NR + j];
}
#endif
