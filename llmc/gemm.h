// gemm.h: the CPU's matrix product, C = alpha A B, or C += alpha A B, for all three forms training needs: a View carries its own row and column
// stride, so a transpose is a swap of strides.
//
//   forward   Y[n,out]  = X[n,in]       W[out,in]^T
//   input     dX[n,in]  = dY[n,out]     W[out,in]
//   weight    dW[out,in]= dY[n,out]^T   X[n,in]
//
// gemm_naive is three loops: the judge in double, and the truth gemm_packed is tested against.
// gemm_packed cuts C into tiles, which threads take (threads.h), and K into slices. Of A it packs a slice of its tile, which stays in the L2 cache; of B one
// panel after another, which stays in the L1 while the kernel runs down the tile. Floats that lie close together and are read few times are not packed (gemm_in_place).
// The kernel holds an MR x NR block of C in vector registers, at the lower edge of C one or two thirds of it:
//
//                    B: NR columns                Bytes at VECTOR_BYTES = 32 (AVX2):
//                      | k |                      packed A    rows of the tile x KC   at most 198 KiB, L2
//                      | v |                      tile of C   MC x NC at most                 768 KiB, L2, L3
//                                                 panel of B  KC x NR                          16 KiB, L1
//   A: MR rows |k ->|  [MR x NR]  one rank-1      block of C  MR x NR                  12 of the 16 registers
//      MR rows |k ->|  [       ]  update a k
//
// Percent of the peak of both cores of a Zen 5, all three forms, fp32 and bf16: GPT-2 124M's layers 88 to 97 and 85 to 88 with 256 tokens, 81 to 94 and 74 to 87 with 1024;
// 6 x 384 with 2048, 88 to 98 and 75 to 91; the default model's, 86 to 95 and 59 to 84. The kernel alone 98 to 99. Other machines, whole steps, and what PyTorch takes:
// dev/bench/cpu/RESULTS.md.
//
// An element of C is summed in an order that depends on K and alpha alone: the same bits for any number of rows, of threads, and any tiling.
//
// BF16_PRODUCTS (PREC=bf16): A and B are rounded to bfloat16 while they are packed, nearest even; sums are in fp32. Where the CPU has the instruction
// that multiplies two pairs of bfloat16 and adds both products (AVX-512 BF16, Arm BF16), a lane takes a pair of neighbours in k; elsewhere the
// rounded numbers stay floats, at the speed of fp32. Where it has a unit for matrices (AMX), a block of C is 2 x 2 of its tiles of 16 x 16, and an instruction
// multiplies 16 rows by 16 columns, 16 pairs deep: 16 times the work of multiply-adds of floats, so that memory and packing take most of the time.
// AMX and AVX-512 BF16 take denormals for zero.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include "threads.h"

// Element (i, j) is p[i * rs + j * cs]. A band, of A or C: where j - i is less than `first` or more than `last`, A is 0 and C is not wanted; blocks that lie there are passed over.
typedef struct { real *p; int64_t rs, cs, first, last; } View;
#define FAR ((int64_t)1 << 40)
static inline View band(const real *p, int64_t rs, int64_t cs, int64_t first, int64_t last) { View v = {(real *)p, rs, cs, first, last}; return v; }
static inline View view(const real *p, int64_t rs, int64_t cs) { return band(p, rs, cs, -FAR, FAR); }
static inline View part(View v, int64_t i, int64_t j) { return band(v.p + i * v.rs + j * v.cs, v.rs, v.cs, v.first + i - j, v.last + i - j); }
static inline View transpose(View v) { return band(v.p, v.cs, v.rs, -v.last, -v.first); }

static inline void gemm_naive(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, bool add) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            real sum = 0;
            for (int64_t k = 0; k < K; k++) sum += A.p[i * A.rs + k * A.cs] * B.p[k * B.rs + j * B.cs];
            real *c = &C.p[i * C.rs + j * C.cs];
            *c = (add ? *c : 0) + alpha * sum;
        }
}

#if defined(BF16_PRODUCTS) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define AMX 1
#else
#define AMX 0
#endif
#if AMX
enum { VECTOR_BYTES = 64, MR = 32, MC = 384, FEW = 0 };
#elif defined(__AVX512F__)
enum { VECTOR_BYTES = 64, MR = 12, MC = 384, EVERY = 4, FEW = 32 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, MR = 6, MC = 192, EVERY = 16, FEW = 12 };
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, MR = 12, MC = 192, EVERY = 8, FEW = 12 };
#else
enum { VECTOR_BYTES = 16, MR = 6, MC = 192, EVERY = 8, FEW = 12 };
#endif
typedef real Vec __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef real VecAnywhere __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

// What one lane takes of A or B in a step of k: a number, or a pair of bfloat16, the lower k in the lower half.
#if defined(BF16_PRODUCTS) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
typedef uint32_t Unit;
enum { PER_UNIT = 2 };
#else
typedef real Unit;
enum { PER_UNIT = 1 };
#endif
typedef Unit Units __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef Unit UnitsAnywhere __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(Unit)), may_alias));
enum { VL = VECTOR_BYTES / sizeof(real), NR = 2 * VL, KC = 256 * PER_UNIT, NC = 1024, LINE = 64 / sizeof(real), STEP = AMX ? 16 : 1 };       // STEP: units of k that an instruction takes
enum { THIRD = AMX ? MR : MR / 3 };                                         // rows: the kernel makes one, two or three such parts of a block

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// c + a b, lane by lane.
#if defined(BF16_PRODUCTS) && defined(__AVX512BF16__)
static inline Vec gemm_dot(Vec c, Unit a, Units b) { return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b); }
#elif defined(BF16_PRODUCTS) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
static inline Vec gemm_dot(Vec c, Unit a, Units b) { return (Vec)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)vdupq_n_u32(a), (bfloat16x8_t)b); }
#else
static inline Vec gemm_dot(Vec c, Unit a, Units b) { return c + a * b; }
#endif

// c + alpha sum, rounded once, in the CPU's own words: compilers contract a product and a sum in one kernel, and not in the next.
#if defined(__AVX512F__)
static inline Vec gemm_scaled(Vec c, real alpha, Vec sum) { return (Vec)_mm512_fmadd_ps(_mm512_set1_ps((float)alpha), (__m512)sum, (__m512)c); }
#elif defined(__FMA__)
static inline Vec gemm_scaled(Vec c, real alpha, Vec sum) { return (Vec)_mm256_fmadd_ps(_mm256_set1_ps((float)alpha), (__m256)sum, (__m256)c); }
#elif defined(__aarch64__)
static inline Vec gemm_scaled(Vec c, real alpha, Vec sum) { return (Vec)vfmaq_n_f32((float32x4_t)c, (float32x4_t)sum, (float)alpha); }
#else
static inline Vec gemm_scaled(Vec c, real alpha, Vec sum) { return c + alpha * sum; }
#endif

// From `from` up to `to`, within 0 .. size.
typedef struct { int64_t from, to; } Span;
static inline Span gemm_within(int64_t from, int64_t to, int64_t size) {
    from = from < 0 ? 0 : from > size ? size : from;
    return (Span){from, to < from ? from : to > size ? size : to};
}

// What the kernel reads: row r (of B: column r) at unit k is p[r * row + k * unit]. A packed panel, or of floats the matrix itself, IN_PLACE.
typedef struct { const Unit *p; int64_t row, unit; } Panel;
#ifdef BF16_PRODUCTS
enum { IN_PLACE = 0 };
#else
enum { IN_PLACE = 1 };
#endif

// What the kernel fetches into the L2 while it works: so many pieces, `stride` apart, of `length` numbers side by side.
typedef struct { const real *piece; int64_t pieces, stride, length, at; } Ahead;
static inline Ahead gemm_ahead(View v, int64_t rows, int64_t cols) { return v.cs == 1 ? (Ahead){v.p, rows, v.rs, cols, 0} : (Ahead){v.p, cols, v.cs, rows, 0}; }

static inline void gemm_fetch(Ahead *f) {
    if (f->pieces <= 0) return;
    __builtin_prefetch(f->piece + f->at, 0, 2);
    f->at += LINE;
    if (f->at >= f->length) f->at = 0, f->piece += f->stride, f->pieces--;
}

#include "gemm_pack.h"                                                     // gemm_pack_a, gemm_pack_b: a panel
#include "gemm_amx.h"                                                      // where AMX is, another kernel

#if !AMX
static inline void gemm_begin(void) {}
static inline void gemm_end(void) {}

// c += (column of A) (row of B). Where rows of A lie apart, three share an address: that many registers there are.
static inline __attribute__((always_inline)) void gemm_update(Vec c[MR][2], const Unit *const a[MR / 3], int64_t row, const Unit *b, const int rows, const bool apart) {
    Units b0 = *(const UnitsAnywhere *)b, b1 = *(const UnitsAnywhere *)(b + VL);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        Unit x = apart ? a[r / 3][r % 3 * row] : a[0][r];
        c[r][0] = gemm_dot(c[r][0], x, b0);
        c[r][1] = gemm_dot(c[r][1], x, b1);
    }
}

// out, `rows` rows `stride` apart, (+)= alpha (panel of A) (panel of B) over the units s of K. Unrolled, because a core that shares its decoders with another thread gets fewer
// instructions a cycle, and a multiply-add less then is one that is missing. Memory is fetched a line at a time: many at once would wait for each other. Every EVERY units, some
// 100 cycles, a line of what is ahead; in the last 2 MR units the rows of `out`, one a unit, and some below: fetched earlier, B would push them out of the L1.
static inline __attribute__((always_inline)) void gemm_run(real *out, int64_t stride, const Panel *a, const Panel *b, Span s, real alpha, bool add, Ahead *ahead, const int rows, const bool apart) {
    Vec c[MR][2] = {0};
    const int64_t next_a = !IN_PLACE ? MR : apart ? 1 : a->unit, next_b = IN_PLACE ? b->unit : NR, row = a->row;
    const Unit *of_a[MR / 3], *of_b = b->p + s.from * next_b;
    int64_t k = s.from;
    Ahead rest = *ahead;                                                    // in registers
    for (int i = 0; i < MR / 3; i++) of_a[i] = a->p + s.from * next_a + 3 * i * row;
    for (; k <= s.to - 2 * MR - EVERY; k += EVERY) {
        gemm_fetch(&rest);
#pragma GCC unroll 4
        for (int u = 0; u < EVERY; u++, of_b += next_b) {
            gemm_update(c, of_a, row, of_b, rows, apart);
            for (int i = 0; i < MR / 3; i++) of_a[i] += next_a;
        }
    }
    *ahead = rest;
#pragma GCC unroll 4
    for (const real *line = out; k < s.to; k++, of_b += next_b, line += stride) {
        for (int j = 0; j < NR; j += LINE) __builtin_prefetch(line + j, 1);
        gemm_update(c, of_a, row, of_b, rows, apart);
        for (int i = 0; i < MR / 3; i++) of_a[i] += next_a;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++, out += stride)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            VecAnywhere *to = (VecAnywhere *)(out + v * VL);
            *to = gemm_scaled(add ? (Vec)*to : (Vec){0}, alpha, c[r][v]);
        }
}

static inline __attribute__((always_inline)) void gemm_thirds(real *out, int64_t stride, const Panel *a, const Panel *b, Span s, real alpha, bool add, Ahead *ahead, int64_t rows, const bool apart) {
    if (rows > 2 * THIRD) gemm_run(out, stride, a, b, s, alpha, add, ahead, MR, apart);
    else if (rows > THIRD) gemm_run(out, stride, a, b, s, alpha, add, ahead, 2 * THIRD, apart);
    else gemm_run(out, stride, a, b, s, alpha, add, ahead, THIRD, apart);
}

// In functions of their own, so that nothing else claims a register: rows of A side by side, or apart and then side by side in k.
static __attribute__((noinline)) void gemm_beside(real *out, int64_t stride, const Panel *a, const Panel *b, Span s, real alpha, bool add, Ahead *ahead, int64_t rows) {
    gemm_thirds(out, stride, a, b, s, alpha, add, ahead, rows, false);
}

static __attribute__((noinline)) void gemm_apart(real *out, int64_t stride, const Panel *a, const Panel *b, Span s, real alpha, bool add, Ahead *ahead, int64_t rows) {
    gemm_thirds(out, stride, a, b, s, alpha, add, ahead, rows, true);
}

static inline void gemm_kernel(real *out, int64_t stride, const Panel *a, const Panel *b, Span s, real alpha, bool add, Ahead *ahead, int64_t rows) {
    (!IN_PLACE || a->row == 1 ? gemm_beside : gemm_apart)(out, stride, a, b, s, alpha, add, ahead, rows);
}
#endif

// rows x cols of C, at most a block, (+)= alpha (panel of A) (panel of B). What is not a whole number of thirds of a block the kernel makes elsewhere: the same sums.
static inline void gemm_block(View C, const Panel *a, const Panel *b, Span s, int64_t rows, int64_t cols, real alpha, bool add, Ahead *ahead) {
    if (rows % THIRD == 0 && cols == NR) {
        gemm_kernel(C.p, C.rs, a, b, s, alpha, add, ahead, rows);
        return;
    }
    real block[MR * NR] __attribute__((aligned(64))) = {0};
    for (int64_t r = 0; r < rows && add; r++) memcpy(block + r * NR, C.p + r * C.rs, (size_t)cols * sizeof(real));
    gemm_kernel(block, NR, a, b, s, alpha, add, ahead, rows);
    for (int64_t r = 0; r < rows; r++) memcpy(C.p + r * C.rs, block + r * NR, (size_t)cols * sizeof(real));
}

// As many units of K as instructions take for `depth`.
static inline int64_t gemm_units(int64_t depth) { return (depth + STEP * PER_UNIT - 1) / (STEP * PER_UNIT) * STEP; }

// The units of a panel of A, MR rows of the band, that are not all 0.
static inline Span gemm_span(View a, int64_t units) { return gemm_within(a.first / (STEP * PER_UNIT) * STEP, gemm_units(a.last + MR), units); }

// Whether panels are read where they are: side by side one way, the other way at most a page apart, and few times in all. Rows of a page each want more of the TLB than there is;
// and lines of a matrix whose width is a multiple of 64 or more share few sets of the L1, which keeps them no longer than one pass. FEW: beyond that packing paid on AVX2; on AVX-512,
// whose kernel reads half as much for a multiply-add, it was not seen to, and FEW is as often as a tile reads one at most.
static inline bool gemm_in_place(int64_t beside, int64_t apart, int64_t times) { return IN_PLACE && beside == 1 && apart <= 4096 / (int64_t)sizeof(real) && times <= FEW; }

// The panels of a slice of a tile of A, each read so many times, and the units of each that count.
static void gemm_slice_a(Panel *panels, Span *spans, Unit *dst, View A, int64_t rows, int64_t depth, int64_t times) {
    int64_t units = gemm_units(depth);
    bool in_place = gemm_in_place(A.rs, A.cs, times) || gemm_in_place(A.cs, A.rs, times);
    for (int64_t i = 0; i < rows; i += MR, panels++, spans++, dst += MR * units) {
        View a = part(A, i, 0);
        *spans = gemm_span(a, units);
        if (in_place && (rows - i >= MR || (rows - i) % THIRD == 0)) {
            *panels = (Panel){(const Unit *)a.p, a.rs, a.cs};
            continue;
        }
        *panels = (Panel){dst, 1, MR};
        int64_t k = spans->from * PER_UNIT, end = spans->to * PER_UNIT;
        gemm_pack_a(dst + spans->from * MR, a.p + k * a.cs, a.rs, a.cs, rows - i, (end < depth ? end : depth) - k);
    }
}

// A panel of B, read so many times.
static inline Panel gemm_panel_b(Unit *dst, View B, int64_t cols, int64_t depth, int64_t times) {
    if (gemm_in_place(B.cs, B.rs, times) && cols >= NR) return (Panel){(const Unit *)B.p, 1, B.rs};
    gemm_pack_b(dst, B.p, B.rs, B.cs, cols, depth);
    return (Panel){dst, 1, NR};
}

// Piece `which` of pieces as even as can be, each of whole units but the last.
static inline Span gemm_cut(int64_t size, int64_t pieces, int64_t unit, int64_t which) {
    int64_t units = (size + unit - 1) / unit;
    return gemm_within((units * which + pieces - 1) / pieces * unit, (units * (which + 1) + pieces - 1) / pieces * unit, size);
}

// C is mp x np tiles, numbered so that a thread's share is of some rows where C is tall, tokens which its L2 still has, and of some columns where C is wide: B, the larger, is read once.
typedef struct { View C, A, B; int64_t M, N, K, mp, np; real alpha; bool add; } Tiles;
static inline Span gemm_rows(const Tiles *p, int64_t tile) { return gemm_cut(p->M, p->mp, MR, p->M < p->N ? tile % p->mp : tile / p->np); }
static inline Span gemm_cols(const Tiles *p, int64_t tile) { return gemm_cut(p->N, p->np, NR, p->M < p->N ? tile / p->mp : tile % p->np); }

// A tile of C, at most MC rows rounded up to MR, by one thread. The columns of C are contiguous. Meanwhile the kernel fetches the next panel of B and the next slice of A;
// with the last slice that of the next tile.
static void gemm_tile(const Tiles *p, int64_t tile) {
    enum { UNITS = KC / PER_UNIT };
    Unit pa[(MC + MR) * UNITS] __attribute__((aligned(64))), pb[NR * UNITS] __attribute__((aligned(64)));
    Panel panels[MC / MR + 1];
    Span spans[MC / MR + 1], down = gemm_rows(p, tile), across = gemm_cols(p, tile);
    int64_t rows = down.to - down.from, cols = across.to - across.from, K = p->K;
    View A = part(p->A, down.from, 0), B = part(p->B, 0, across.from), C = part(p->C, down.from, across.from);
    gemm_begin();
    for (int64_t k0 = 0; k0 == 0 || k0 < K; k0 += KC) {                     // once where K is 0
        int64_t depth = K - k0 < KC ? K - k0 : KC, left = K - k0 - KC;
        Ahead slice = {0};
        if (left > 0) slice = gemm_ahead(part(A, 0, k0 + KC), rows, left < KC ? left : KC);
        else if (tile + 1 < p->mp * p->np) {
            Span then = gemm_rows(p, tile + 1);
            slice = gemm_ahead(part(p->A, then.from, 0), then.to - then.from, K < KC ? K : KC);
        }
        gemm_slice_a(panels, spans, pa, part(A, 0, k0), rows, depth, cols / NR);
        for (int64_t j = 0; j < cols; j += NR) {
            Ahead panel = gemm_ahead(part(B, k0, j + NR), depth, NR);
            if (j + 2 * NR > cols) panel.pieces = 0;
            Panel b = gemm_panel_b(pb, part(B, k0, j), cols - j, depth, rows / MR);
            for (int64_t i = 0; i < rows; i += MR) {
                View c = part(C, i, j);
                if (c.first >= NR || c.last <= -MR) continue;
                gemm_block(c, &panels[i / MR], &b, spans[i / MR], rows - i < MR ? rows - i : MR, cols - j < NR ? cols - j : NR, p->alpha, k0 > 0 || p->add,
                           panel.pieces ? &panel : &slice);
            }
        }
    }
    gemm_end();
}

// Cuts C into tiles: for one thread as few as may be; for more, the cut with which the product ends first. It ends with the thread that has most tiles and, threads never being
// equally fast, a twentieth of a tile later. A tile takes its multiply-adds and its packing, in which a number takes as long as PACKING multiply-adds; both per column of K.
static inline void gemm_divide(Tiles *p, int64_t threads) {
    enum { PACKING = 8 * PER_UNIT };
    const int64_t fewest = (p->M + MC - 1) / MC, most = (p->M + MR - 1) / MR, columns = (p->N + NC - 1) / NC;
    int64_t least = INT64_MAX;
    p->mp = fewest, p->np = columns;
    for (int64_t np = columns; threads > 1 && np < columns + 2 * threads && (np == columns || np * NR <= p->N); np++)
        for (int64_t each = 1; each <= 2; each++) {                         // tiles a thread, where there need not be more
            int64_t mp = (each * threads + np - 1) / np;
            mp = mp < fewest ? fewest : mp > most ? most : mp;
            int64_t tm = gemm_cut(p->M, mp, MR, 0).to, tn = gemm_cut(p->N, np, NR, 0).to, rounds = (mp * np + threads - 1) / threads;
            int64_t time = (20 * rounds + 1) * (tm * tn + PACKING * (tm + tn));
            if (time < least) least = time, p->mp = mp, p->np = np;
        }
}

static inline void gemm_packed(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, bool add) {
    if (!M || !N) return;
    Tiles p = {C, A, B, M, N, K, 0, 0, alpha, add};
    int64_t threads = M * N * K > 1 << 15 && !omp_in_parallel() ? omp_get_max_threads() : 1;
    gemm_divide(&p, threads);
    if (threads == 1) {                                                     // no parallel region: a team of one, made anew, takes as long as a head's product
        for (int64_t t = 0; t < p.mp * p.np; t++) gemm_tile(&p, t);
        return;
    }
    Shares shares = shares_make(p.mp * p.np);
#pragma omp parallel
    for (int64_t t; (t = shares_take(&shares)) >= 0;) gemm_tile(&p, t);
}

// The product the judge uses: packed in float, naive in double.
static inline void gemm(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, bool add) {
    if (sizeof(real) == 4) gemm_packed(C, A, B, M, N, K, alpha, add);
    else gemm_naive(C, A, B, M, N, K, alpha, add);
}
