// gemm.h: the CPU's matrix product, C = alpha A B or C += alpha A B.
//
// A View is a pointer with a row and a column stride, so a transpose swaps strides. All three
// products of training are one function:
//   forward           Y [n, out]   = X [n, in]     W [out, in]^T
//   input gradient    dX [n, in]   = dY [n, out]   W [out, in]
//   weight gradient   dW [out, in] = dY [n, out]^T X [n, in]
//
// gemm_naive is three loops: the judge's product in double, and the reference for gemm_packed.
// gemm_packed is blocked as in GotoBLAS (Goto, van de Geijn 2008):
//   C is cut into tiles, which threads share (threads.h), and K into slices.
//   A slice of the tile's rows of A is packed and stays in the L2 cache.
//   Panels of B are packed one after another; each stays in the L1 while the kernel runs down the
//   tile. Floats whose rows lie close together are not packed but read in place (gemm_in_place).
//   The kernel holds an MR x NR block of C in vector registers. At the lower edge of C the block
//   has one or two thirds of its rows; other parts of a block are computed in a copy.
//
//                    B: NR columns                bytes at VECTOR_BYTES = 32 (AVX2):
//                      | k |                      packed A    rows of the tile x KC   198 KiB, L2
//                      | v |                      tile of C   MC x NC     at most 768 KiB, L2, L3
//                                                 panel of B  KC x NR                  16 KiB, L1
//   A: MR rows |k ->|  [MR x NR]  rank-1 update   block of C  MR x NR      12 of the 16 registers
//      MR rows |k ->|  [       ]  for each k
//
// Percent of the peak of both cores of a Zen 5, all three products:
//                              fp32        bf16
//   GPT-2 124M, 256 tokens     87 to 97    74 to 88
//   GPT-2 124M, 1024 tokens    81 to 94    74 to 87
//   6 x 384, 2048 tokens       88 to 98    75 to 91
//   the default model          86 to 95    59 to 84
//   the kernel alone           98 to 99    98 to 99
// Other machines, whole steps and PyTorch: dev/bench/cpu/RESULTS.md.
//
// The order in which an element of C is summed depends on K and alpha alone: the bits are the same
// for any number of rows and threads and for any tiling.
//
// BF16_PRODUCTS (PREC=bf16): packing rounds A and B to bfloat16, to nearest even; sums are fp32.
//   AVX-512 BF16, Arm BF16: one instruction multiplies two pairs of bfloat16 and adds both
//       products, so a vector lane holds a pair of neighbours in k.
//   AMX (gemm_amx.h): a block of C is 2 x 2 tiles of 16 x 16. Its peak is 16 times that of
//       floats, so memory and packing take most of the time.
//   Elsewhere the rounded numbers stay floats, at the speed of fp32.
// AMX and AVX-512 BF16 treat denormals as zero.
#pragma once
#include "run/util.h"
#include "threads.h"

// A matrix in memory: element (i, j) is p[i * rs + j * cs]. One of rs and cs is 1. A band holds the
// elements with first <= j - i <= last. Outside the band A must hold zeros, and C may hold anything
// afterwards: gemm_packed skips blocks that lie wholly outside.
typedef struct { real *p; int64_t rs, cs, first, last; } View;
#define FAR ((int64_t)1 << 40)

static inline View band(const real *p, int64_t rs, int64_t cs, int64_t first, int64_t last) {
    return (View){(real *)p, rs, cs, first, last};
}

static inline View view(const real *p, int64_t rs) { return band(p, rs, 1, -FAR, FAR); }

// The part that begins at row i and column j.
static inline View part(View v, int64_t i, int64_t j) {
    return band(v.p + i * v.rs + j * v.cs, v.rs, v.cs, v.first + i - j, v.last + i - j);
}

static inline View transpose(View v) { return band(v.p, v.cs, v.rs, -v.last, -v.first); }

static inline void gemm_naive(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha,
                              bool add) {
#pragma omp parallel for
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            real sum = 0;
            for (int64_t k = 0; k < K; k++)
                sum += A.p[i * A.rs + k * A.cs] * B.p[k * B.rs + j * B.cs];
            real *c = &C.p[i * C.rs + j * C.cs];
            *c = (add ? *c : 0) + alpha * sum;
        }
}

// AMX needs AVX-512 BF16 for packing, and Linux for permission.
#if defined(BF16_PRODUCTS) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && \
    defined(__linux__)
#define AMX 1
#else
#define AMX 0
#endif
// VECTOR_BYTES: a register; MR, MC: rows of a block and of a tile; EVERY: units of k from one
// prefetch to the next, some 100 cycles; FEW: how often a panel may be read where it lies.
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
#define VECTOR(type, alignment) \
    type __attribute__((vector_size(VECTOR_BYTES), aligned(alignment), may_alias))
typedef VECTOR(real, VECTOR_BYTES) Vec;
typedef VECTOR(real, sizeof(real)) VecAnywhere;  // loads and stores at any address of a number

// A unit: one lane of A or B in one step of k. A number, or a pair of bfloat16 neighbours in k,
// the lower k in the lower half.
#if defined(BF16_PRODUCTS) && \
    (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
typedef uint32_t Unit;
enum { PER_UNIT = 2 };
#else
typedef real Unit;
enum { PER_UNIT = 1 };
#endif
typedef VECTOR(Unit, VECTOR_BYTES) Units;
typedef VECTOR(Unit, sizeof(Unit)) UnitsAnywhere;
enum {
    VL = VECTOR_BYTES / sizeof(real),  // lanes of a vector
    NR = 2 * VL,                       // columns of a block
    KC = 256 * PER_UNIT,               // depth of a slice of K
    NC = 1024,                         // columns of a tile at most
    THIRD = AMX ? MR : MR / 3,         // the kernel makes blocks of one, two or three thirds
    LINE = 64 / sizeof(real),          // numbers in a cache line
    STEP = AMX ? 16 : 1,               // units of k that one instruction takes
};

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// c + a b, lane by lane.
static inline Vec gemm_dot(Vec c, Unit a, Units b) {
#if defined(BF16_PRODUCTS) && defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#elif defined(BF16_PRODUCTS) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Vec)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)vdupq_n_u32(a), (bfloat16x8_t)b);
#else
    return c + a * b;
#endif
}

// c + alpha sum, rounded once. Intrinsics, because a compiler contracts a product and a sum in one
// kernel and not in the next, which would change bits.
static inline Vec gemm_scaled(Vec c, real alpha, Vec sum) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps(_mm512_set1_ps((float)alpha), (__m512)sum, (__m512)c);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps(_mm256_set1_ps((float)alpha), (__m256)sum, (__m256)c);
#elif defined(__aarch64__)
    return (Vec)vfmaq_n_f32((float32x4_t)c, (float32x4_t)sum, (float)alpha);
#else
    return c + alpha * sum;
#endif
}

// A range [from, to).
typedef struct { int64_t from, to; } Span;

// The range, cut to 0 .. size.
static inline Span gemm_within(int64_t from, int64_t to, int64_t size) {
    from = clamp(from, 0, size);
    return (Span){from, clamp(to, from, size)};
}

// A panel as the kernel reads it: row r (for B: column r) at unit k is p[r * row + k * unit].
// It is packed, or floats in the matrix itself (IN_PLACE).
typedef struct { const Unit *p; int64_t row, unit; } Panel;
#ifdef BF16_PRODUCTS
enum { IN_PLACE = 0 };
#else
enum { IN_PLACE = 1 };
#endif

// Numbers that the kernel brings into the L2 cache while it works: `pieces` pieces, `stride` apart,
// of `length` neighbours; `at` counts within a piece.
typedef struct { const real *piece; int64_t pieces, stride, length, at; } Ahead;

static inline Ahead gemm_ahead(View v, int64_t rows, int64_t cols) {
    if (cols <= 0) return (Ahead){0};
    if (v.cs == 1) return (Ahead){v.p, rows, v.rs, cols, 0};
    return (Ahead){v.p, cols, v.cs, rows, 0};
}

// Prefetches the next cache line.
static inline void gemm_fetch(Ahead *f) {
    if (f->pieces <= 0) return;
    __builtin_prefetch(f->piece + f->at, 0, 2);
    f->at += LINE;
    if (f->at >= f->length) f->at = 0, f->piece += f->stride, f->pieces--;
}

// One call of the kernel: out (+)= alpha (panel of A) (panel of B), summed over the units s of K.
typedef struct {
    real *out;       // a block of C
    int64_t stride;  // from row to row of out
    int64_t rows;    // at most MR
    const Panel *a, *b;
    Span s;
    real alpha;
    bool add;  // += rather than =
    Ahead *ahead;
} KernelArgs;

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#include "gemm_pack.h"  // gemm_pack_a, gemm_pack_b: a panel
#include "gemm_amx.h"   // the kernel for AMX

#if !AMX
static inline void gemm_begin(void) {}
static inline void gemm_end(void) {}

// The rank-1 update c += (column of A) (row of B). If rows of A lie apart, three of them share an
// address, because there are no more registers for addresses.
INLINE void gemm_update(Vec c[MR][2], const Unit *const a[MR / 3], int64_t row, const Unit *b,
                        const int rows, const bool apart) {
    Units b0 = *(const UnitsAnywhere *)b, b1 = *(const UnitsAnywhere *)(b + VL);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        Unit x = apart ? a[r / 3][r % 3 * row] : a[0][r];
        c[r][0] = gemm_dot(c[r][0], x, b0);
        c[r][1] = gemm_dot(c[r][1], x, b1);
    }
}

// The loop over k, unrolled: a core that shares its decoders with another thread decodes
// fewer instructions a cycle, and every other instruction takes the place of a multiply-add.
// Prefetches go one cache line at a time, because many at once would wait for each other. Every
// EVERY units: a line of p->ahead. In each of the last units, at least 2 MR: a row of `out`, then
// rows below it. Fetched earlier, B would push them out of the L1 cache.
INLINE void gemm_run(const KernelArgs *p, const int rows, const bool apart) {
    Vec c[MR][2] = {0};
    const Span s = p->s;
    const int64_t row = p->a->row, stride = p->stride;
    const int64_t unit = IN_PLACE ? p->a->unit : MR, next_a = apart ? 1 : unit;
    const int64_t next_b = IN_PLACE ? p->b->unit : NR;
    const Unit *of_a[MR / 3], *of_b = p->b->p + s.from * next_b;
    int64_t k = s.from;
    Ahead rest = *p->ahead;  // in registers
    for (int i = 0; i < MR / 3; i++) of_a[i] = p->a->p + s.from * next_a + 3 * i * row;
    for (; k <= s.to - 2 * MR - EVERY; k += EVERY) {
        gemm_fetch(&rest);
#pragma GCC unroll 4
        for (int u = 0; u < EVERY; u++, of_b += next_b) {
            gemm_update(c, of_a, row, of_b, rows, apart);
            for (int i = 0; i < MR / 3; i++) of_a[i] += next_a;
        }
    }
    *p->ahead = rest;
    real *out = p->out;
#pragma GCC unroll 4
    for (const real *line = out; k < s.to; k++, of_b += next_b, line += stride) {
        for (int j = 0; j < NR; j += LINE) __builtin_prefetch(line + j, 1);
        gemm_update(c, of_a, row, of_b, rows, apart);
        for (int i = 0; i < MR / 3; i++) of_a[i] += next_a;
    }
    const real alpha = p->alpha;
    const bool add = p->add;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++, out += stride)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            VecAnywhere *to = (VecAnywhere *)(out + v * VL);
            *to = gemm_scaled(add ? (Vec)*to : (Vec){0}, alpha, c[r][v]);
        }
}

INLINE void gemm_thirds(const KernelArgs *p, const bool apart) {
    if (p->rows > 2 * THIRD) gemm_run(p, MR, apart);
    else if (p->rows > THIRD) gemm_run(p, 2 * THIRD, apart);
    else gemm_run(p, THIRD, apart);
}

// Rows of A side by side, or apart and then side by side in k. They are functions of their own, so
// that nothing else claims a register.
NOINLINE void gemm_beside(const KernelArgs *p) { gemm_thirds(p, false); }
NOINLINE void gemm_apart(const KernelArgs *p) { gemm_thirds(p, true); }

static inline void gemm_kernel(const KernelArgs *p) {
    if (!IN_PLACE || p->a->row == 1) gemm_beside(p);
    else gemm_apart(p);
}
#endif

// Any block of C: p->rows x cols at p->out. If that is not a whole number of thirds, or not
// NR columns, it is computed in a copy, with the same sums.
static inline void gemm_block(KernelArgs *p, int64_t cols) {
    if (p->rows % THIRD == 0 && cols >= NR) {
        gemm_kernel(p);
        return;
    }
    real block[MR * NR] __attribute__((aligned(64))) = {0}, *out = p->out;
    int64_t stride = p->stride, bytes = least(cols, NR) * sizeof(real);
    for (int64_t r = 0; r < p->rows && p->add; r++) memcpy(block + r * NR, out + r * stride, bytes);
    p->out = block;
    p->stride = NR;
    gemm_kernel(p);
    for (int64_t r = 0; r < p->rows; r++) memcpy(out + r * stride, block + r * NR, bytes);
}

// The units of K for `depth`, rounded up to whole instructions.
static inline int64_t gemm_units(int64_t depth) {
    return CEIL_DIV(depth, STEP * PER_UNIT) * STEP;
}

// Whether a panel is read in place: neighbours one way, at most a page apart the other way, and
// read few times. Rows with a page each need more TLB entries than there are. Lines of a matrix
// whose width is a multiple of 64 or more share few sets of the L1 cache, which keeps them for at
// most one pass. On AVX2 packing pays beyond FEW reads. On AVX-512, whose kernel reads half as much
// for each multiply-add, it never paid: there FEW is the most reads of a tile.
static inline bool gemm_in_place(int64_t beside, int64_t apart, int64_t times) {
    return IN_PLACE && beside == 1 && apart <= 4096 / (int64_t)sizeof(real) && times <= FEW;
}

// The panels of a slice of a tile of A, each read `times` times. spans: the units of each that the
// band does not make 0.
static void gemm_slice_a(Panel *panels, Span *spans, Unit *dst, View A, int64_t rows, int64_t depth,
                         int64_t times) {
    int64_t units = gemm_units(depth);
    bool in_place = gemm_in_place(A.rs, A.cs, times) || gemm_in_place(A.cs, A.rs, times);
    for (int64_t i = 0; i < rows; i += MR, panels++, spans++, dst += MR * units) {
        View a = part(A, i, 0);
        *spans = gemm_within(a.first / (STEP * PER_UNIT) * STEP, gemm_units(a.last + MR), units);
        if (in_place && (rows - i >= MR || (rows - i) % THIRD == 0)) {
            *panels = (Panel){(const Unit *)a.p, a.rs, a.cs};
            continue;
        }
        *panels = (Panel){dst, 1, MR};
        int64_t k = spans->from * PER_UNIT, end = spans->to * PER_UNIT;
        gemm_pack_a(dst + spans->from * MR, a.p + k * a.cs, a.rs, a.cs, rows - i,
                    least(end, depth) - k);
    }
}

// A panel of B, read `times` times.
static inline Panel gemm_panel_b(Unit *dst, View B, int64_t cols, int64_t depth, int64_t times) {
    if (gemm_in_place(B.cs, B.rs, times) && cols >= NR)
        return (Panel){(const Unit *)B.p, 1, B.rs};
    gemm_pack_b(dst, B.p, B.rs, B.cs, cols, depth);
    return (Panel){dst, 1, NR};
}

// Piece number `which` of pieces as even as possible. Each but the last is a multiple of `unit`.
static inline Span gemm_cut(int64_t size, int64_t pieces, int64_t unit, int64_t which) {
    int64_t units = CEIL_DIV(size, unit);
    return gemm_within(CEIL_DIV(units * which, pieces) * unit,
                       CEIL_DIV(units * (which + 1), pieces) * unit, size);
}

// C is mp x np tiles.
typedef struct { View C, A, B; int64_t M, N, K, mp, np; real alpha; bool add; } Tiles;

// The rows and the columns of a tile. A tall C is shared by rows: a thread keeps its tokens in its
// L2. A wide C is shared by columns: B, the larger matrix, is read once.
static inline Span gemm_rows(const Tiles *p, int64_t tile) {
    return gemm_cut(p->M, p->mp, MR, p->M >= p->N ? tile / p->np : tile % p->mp);
}

static inline Span gemm_columns(const Tiles *p, int64_t tile) {
    return gemm_cut(p->N, p->np, NR, p->M >= p->N ? tile % p->np : tile / p->mp);
}

// One tile of C by one thread: at most MC rows, rounded up to MR. Columns of C are contiguous.
// The kernel prefetches the next panel of B, then the next slice of A; during the last slice, the
// first slice of the next tile.
static void gemm_tile(const Tiles *p, int64_t tile) {
    enum { UNITS = KC / PER_UNIT };
    Unit pa[(MC + MR) * UNITS] __attribute__((aligned(64)));
    Unit pb[NR * UNITS] __attribute__((aligned(64)));
    Panel panels[MC / MR + 1];
    Span spans[MC / MR + 1];
    Span down = gemm_rows(p, tile), across = gemm_columns(p, tile);
    int64_t rows = down.to - down.from, cols = across.to - across.from, K = p->K;
    View A = part(p->A, down.from, 0), B = part(p->B, 0, across.from);
    View C = part(p->C, down.from, across.from);
    gemm_begin();
    for (int64_t k0 = 0; k0 == 0 || k0 < K; k0 += KC) {  // once where K is 0
        int64_t depth = least(K - k0, KC);
        Ahead slice = gemm_ahead(part(A, 0, k0 + KC), rows, least(K - k0 - KC, KC));
        if (k0 + KC >= K && tile + 1 < p->mp * p->np) {
            Span next = gemm_rows(p, tile + 1);
            slice = gemm_ahead(part(p->A, next.from, 0), next.to - next.from, least(K, KC));
        }
        gemm_slice_a(panels, spans, pa, part(A, 0, k0), rows, depth, cols / NR);
        for (int64_t j = 0; j < cols; j += NR) {
            Ahead panel = gemm_ahead(part(B, k0, j + NR), depth, NR);
            bool last = j + 2 * NR > cols;
            Panel b = gemm_panel_b(pb, part(B, k0, j), cols - j, depth, rows / MR);
            for (int64_t i = 0; i < rows; i += MR) {
                View c = part(C, i, j);
                if (c.first >= NR || c.last <= -MR) continue;  // outside the band
                KernelArgs call = {
                    .out = c.p, .stride = c.rs, .rows = least(rows - i, MR),
                    .a = &panels[i / MR], .b = &b,
                    .s = spans[i / MR], .alpha = p->alpha, .add = k0 > 0 || p->add,
                    .ahead = !last && panel.pieces > 0 ? &panel : &slice,
                };
                gemm_block(&call, cols - j);
            }
        }
    }
    gemm_end();
}

// Cuts C into tiles: for one thread as few as possible, for more the cut whose slowest thread ends
// first. The slowest thread has the most tiles and, because threads are never equally fast, a
// twentieth of a tile more. A tile costs its multiply-adds and its packing; packing a number
// costs as much as PACKING multiply-adds. Both are counted for one k.
static inline void gemm_divide(Tiles *p, int64_t threads) {
    enum { PACKING = 8 * PER_UNIT };
    const int64_t fewest = CEIL_DIV(p->M, MC), columns = CEIL_DIV(p->N, NC);
    const int64_t most = least(columns + 2 * threads - 1, CEIL_DIV(p->N, NR));
    int64_t best = INT64_MAX;
    p->mp = fewest, p->np = columns;
    for (int64_t np = columns; threads > 1 && np <= most; np++)
        for (int64_t each = 1; each <= 2; each++) {  // tiles a thread, where it need not be more
            int64_t mp = clamp(each * threads / np, fewest, CEIL_DIV(p->M, MR));
            int64_t tm = gemm_cut(p->M, mp, MR, 0).to, tn = gemm_cut(p->N, np, NR, 0).to;
            int64_t rounds = CEIL_DIV(mp * np, threads);
            int64_t time = (20 * rounds + 1) * (tm * tn + PACKING * (tm + tn));
            if (time < best) best = time, p->mp = mp, p->np = np;
        }
}

static inline void gemm_packed(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha,
                               bool add) {
    if (!M || !N) return;
    Tiles p = {C, A, B, M, N, K, 0, 0, alpha, add};
    int64_t threads = M * N * K > 1 << 15 && !omp_in_parallel() ? omp_get_max_threads() : 1;
    gemm_divide(&p, threads);
    // No parallel region for one thread: making a team of one takes as long as a head's product.
    if (threads == 1) {
        for (int64_t t = 0; t < p.mp * p.np; t++) gemm_tile(&p, t);
        return;
    }
    Shares shares = shares_make(p.mp * p.np);
#pragma omp parallel
    for (int64_t t; (t = shares_take(&shares)) >= 0;) gemm_tile(&p, t);
}

// The product the judge uses: packed in float, naive in double.
static inline void gemm(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha,
                        bool add) {
    if (sizeof(real) == 4) gemm_packed(C, A, B, M, N, K, alpha, add);
    else gemm_naive(C, A, B, M, N, K, alpha, add);
}
