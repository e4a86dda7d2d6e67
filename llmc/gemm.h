// gemm.h: the CPU's matrix product, C = beta C + alpha A B, for all three forms training needs: a View carries its own row and column
// stride, so a transpose is a swap of strides.
//
//   forward   Y[n,out]  = X[n,in]       W[out,in]^T
//   input     dX[n,in]  = dY[n,out]     W[out,in]
//   weight    dW[out,in]= dY[n,out]^T   X[n,in]
//
// gemm_naive is three loops: the judge in double, and the truth gemm_packed is tested against.
// gemm_packed cuts C into tiles, one thread a tile, and K into slices. Of A it packs a slice of its tile, which stays in the L2 cache; of B one
// panel after another, which stays in the L1 while the kernel runs down the tile. The kernel holds an MR x NR block of C in vector registers:
//
//                    B: NR columns                Bytes at VECTOR_BYTES = 32 (AVX2):
//                      | k |                      packed A    rows of the tile x KC   at most 198 KiB, L2
//                      | v |                      tile of C   MC x NC                         768 KiB, L2, L3
//                                                 panel of B  KC x NR                          16 KiB, L1
//   A: MR rows |k ->|  [MR x NR]  one rank-1      block of C  MR x NR                  12 of the 16 registers
//      MR rows |k ->|  [       ]  update a k
//
// An element of C is summed in an order that depends on K alone: the same bits for any number of threads and any tiling.
//
// BF16_PRODUCTS (PREC=bf16): A and B are rounded to bfloat16 while they are packed, nearest even; sums are in fp32. Where the CPU has the instruction
// that multiplies two pairs of bfloat16 and adds both products (AVX-512 BF16, Arm BF16), a lane takes a pair of neighbours in k; elsewhere the
// rounded numbers stay floats, at the speed of fp32.
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct { real *p; int64_t rs, cs; } View;                  // element (i, j) is p[i * rs + j * cs]
static inline View view(const real *p, int64_t rs, int64_t cs) { View v = {(real *)p, rs, cs}; return v; }

static inline void gemm_naive(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, real beta) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            real sum = 0;
            for (int64_t k = 0; k < K; k++) sum += A.p[i * A.rs + k * A.cs] * B.p[k * B.rs + j * B.cs];
            real *c = &C.p[i * C.rs + j * C.cs];
            *c = (beta == 0 ? 0 : beta * *c) + alpha * sum;
        }
}

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, MR = 12 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, MR = 6 };
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, MR = 12 };
#else
enum { VECTOR_BYTES = 16, MR = 6 };
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
typedef Unit Quad __attribute__((vector_size(4 * sizeof(Unit)), aligned(sizeof(Unit)), may_alias));
enum { VL = VECTOR_BYTES / sizeof(real), NR = 2 * VL, KC = 256 * PER_UNIT, MC = 192, NC = 1024, LINE = 64 / sizeof(real) };

// c + a b, lane by lane.
#if defined(BF16_PRODUCTS) && defined(__AVX512BF16__)
#include <immintrin.h>
static inline Vec gemm_dot(Vec c, Unit a, Units b) { return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b); }
#elif defined(BF16_PRODUCTS) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
static inline Vec gemm_dot(Vec c, Unit a, Units b) { return (Vec)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)vdupq_n_u32(a), (bfloat16x8_t)b); }
#else
static inline Vec gemm_dot(Vec c, Unit a, Units b) { return c + a * b; }
#endif

// Vector lanes a and b as one list of 8, of which four are taken. Both compilers' word for it; gcc has clang's since version 12.
#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (__typeof__(a) __attribute__((vector_size(sizeof(a))))){i, j, k, l})
#endif

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

// block = (panel of A) (panel of B) over `units` of K. Alone in its function, so that nothing else claims a register. Unrolled, because a core that
// shares its decoders with another thread gets fewer instructions a cycle, and a multiply-add less then is one that is missing.
static __attribute__((noinline)) void gemm_kernel(Vec block[MR][2], const Unit *restrict a, const Unit *restrict b, int64_t units) {
    Vec c[MR][2] = {0};
#pragma GCC unroll 4
    for (int64_t k = 0; k < units; k++, a += MR, b += NR) {
        Units b0 = *(const Units *)b, b1 = *(const Units *)(b + VL);
#pragma GCC unroll 12
        for (int r = 0; r < MR; r++) {
            c[r][0] = gemm_dot(c[r][0], a[r], b0);
            c[r][1] = gemm_dot(c[r][1], a[r], b1);
        }
    }
    memcpy(block, c, sizeof c);
}

// rows x cols of C = keep C + alpha block.
static inline void gemm_store(View C, Vec block[MR][2], int64_t rows, int64_t cols, real alpha, real keep) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < 2; v++) {
            real *out = C.p + r * C.rs + v * VL;
            Vec sum = alpha * block[r][v];
            if (cols == NR) {
                if (keep != 0) sum += keep * *(VecAnywhere *)out;
                *(VecAnywhere *)out = sum;
            }
            else for (int64_t j = 0; j < VL && v * VL + j < cols; j++) out[j] = keep == 0 ? sum[j] : keep * out[j] + sum[j];
        }
}

// The next panel of B, of which a few cache lines are fetched with every block of C: so many pieces, `stride` apart, of `length` numbers side by side.
typedef struct { const real *piece; int64_t pieces, stride, length, at; } Ahead;

static inline void gemm_fetch(Ahead *f, int64_t lines) {
    for (; lines > 0 && f->pieces > 0; lines--) {
        __builtin_prefetch(f->piece + f->at);
        f->at += LINE;
        if (f->at >= f->length) f->at = 0, f->piece += f->stride, f->pieces--;
    }
}

// One tile of C, at most MC rows rounded up to MR, by one thread. The columns of C are contiguous.
static void gemm_tile(View C, View A, View B, int64_t rows, int64_t cols, int64_t K, real alpha, real beta) {
    enum { UNITS = KC / PER_UNIT };
    Unit pa[(MC + MR) * UNITS] __attribute__((aligned(64))), pb[NR * UNITS] __attribute__((aligned(64)));
    Vec block[MR][2];
    for (int64_t k0 = 0; k0 == 0 || k0 < K; k0 += KC) {                     // once where K is 0: beta C
        int64_t depth = K - k0 < KC ? K - k0 : KC, units = (depth + PER_UNIT - 1) / PER_UNIT, lines = NR * depth * MR / (LINE * rows) + 1;
        for (int64_t i = 0; i < rows; i += MR)
            gemm_pack(pa + i * units, A.p + i * A.rs + k0 * A.cs, A.rs, A.cs, rows - i < MR ? rows - i : MR, MR, depth);
        for (int64_t j = 0; j < cols; j += NR) {
            const real *panel = B.p + k0 * B.rs + j * B.cs;
            Ahead next = {panel + NR * B.cs, NR, B.cs, depth, 0};
            if (B.cs == 1) next = (Ahead){panel + NR, depth, B.rs, NR, 0};
            if (j + 2 * NR > cols) next.pieces = 0;
            gemm_pack(pb, panel, B.cs, B.rs, cols - j < NR ? cols - j : NR, NR, depth);
            for (int64_t i = 0; i < rows; i += MR) {
                gemm_fetch(&next, lines);
                for (int64_t r = i; r < i + MR && r < rows; r++) __builtin_prefetch(C.p + r * C.rs + j, 1);
                gemm_kernel(block, pa + i * units, pb, units);
                gemm_store(view(C.p + i * C.rs + j, C.rs, 1), block, rows - i < MR ? rows - i : MR, cols - j < NR ? cols - j : NR, alpha, k0 == 0 ? beta : 1);
            }
        }
    }
}

// The size of pieces as even as can be: at least `pieces` of them, each a multiple of `unit`.
static inline int64_t gemm_even(int64_t size, int64_t pieces, int64_t unit) { return (size + pieces * unit - 1) / (pieces * unit) * unit; }

static inline void gemm_packed(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, real beta) {
    int64_t threads = 1, mp = (M + MC - 1) / MC, np = (N + NC - 1) / NC, tm = gemm_even(M, mp, MR), tn = gemm_even(N, np, NR);
#ifdef _OPENMP
    if (!omp_in_parallel() && M * N * K > 1 << 15) threads = omp_get_max_threads();
#endif
    // Smaller tiles until there is one for every thread, and while they are large, four: threads are never equally fast.
    while (mp * np < threads || (mp * np < 4 * threads && tm * tn > 128 * 128)) {
        if (tm <= 4 * MR && tn <= 4 * NR) break;
        if (tn > tm) tn = gemm_even(N, np *= 2, NR);
        else tm = gemm_even(M, mp *= 2, MR);
    }
    mp = (M + tm - 1) / tm, np = (N + tn - 1) / tn;
#pragma omp parallel for schedule(dynamic) if (threads > 1)
    for (int64_t t = 0; t < mp * np; t++) {
        int64_t i = t % mp * tm, j = t / mp * tn;
        gemm_tile(view(C.p + i * C.rs + j * C.cs, C.rs, C.cs), view(A.p + i * A.rs, A.rs, A.cs), view(B.p + j * B.cs, B.rs, B.cs),
                  M - i < tm ? M - i : tm, N - j < tn ? N - j : tn, K, alpha, beta);
    }
}

// The product the judge uses: packed in float, naive in double.
static inline void gemm(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, real beta) {
    if (sizeof(real) == 4) gemm_packed(C, A, B, M, N, K, alpha, beta);
    else gemm_naive(C, A, B, M, N, K, alpha, beta);
}
