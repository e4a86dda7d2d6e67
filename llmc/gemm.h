// gemm.h: the CPU's matrix product, C = beta C + alpha A B, for all three forms training needs: a View carries its own row and column
// stride, so a transpose is a swap of strides.
//
//   forward   Y[n,out]  = X[n,in]       W[out,in]^T
//   input     dX[n,in]  = dY[n,out]     W[out,in]
//   weight    dW[out,in]= dY[n,out]^T   X[n,in]
//
// gemm_naive is three loops: the judge in double, and the truth gemm_packed is tested against.
// gemm_packed cuts C into tiles, one thread a tile. For each KC-deep slice, panels of A (MR rows) and B (NR columns) are packed so that the
// innermost kernel reads both straight through, holding an MR x NR block of C in vector registers:
//
//        k ->            NR columns
//   A: MR rows |====|   B: | k |     C: MR x NR in registers, k advances one rank-1 update at a time
//
// An element of C is summed in an order that depends on K alone: the same bits for any number of threads and any tiling.
#pragma once
#include <stdint.h>
#include <string.h>

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
#else
enum { VECTOR_BYTES = 16, MR = 6 };
#endif
typedef real Vec __attribute__((vector_size(VECTOR_BYTES), aligned(VECTOR_BYTES)));
enum { VL = VECTOR_BYTES / sizeof(real), NR = 2 * VL, KC = 256, MC = 16 * MR, NC = 8 * NR };

// Packs the panel of rows i0.. of A: dst[k * MR + r]. Rows beyond the matrix are zero.
static inline void gemm_pack(real *dst, const real *src, int64_t rs, int64_t cs, int64_t rows, int64_t width, int64_t depth) {
    if (rows == width && rs == 1) {
        for (int64_t k = 0; k < depth; k++) memcpy(dst + k * width, src + k * cs, (size_t)width * sizeof(real));
        return;
    }
    for (int64_t r = 0; r < width; r++)
        for (int64_t k = 0; k < depth; k++) dst[k * width + r] = r < rows ? src[r * rs + k * cs] : 0;
}

// Adds alpha times an MR x NR block to `keep` times C, as far as C reaches.
static inline void gemm_store(View C, const real *acc, int64_t rows, int64_t cols, real alpha, real keep) {
    for (int64_t r = 0; r < rows; r++) {
        real *out = C.p + r * C.rs;
        const real *a = acc + r * NR;
        if (keep == 0) for (int64_t j = 0; j < cols; j++) out[j] = alpha * a[j];
        else for (int64_t j = 0; j < cols; j++) out[j] = keep * out[j] + alpha * a[j];
    }
}

// One MR x NR block of C: A panel times B panel over `depth` steps, in registers.
static inline void gemm_kernel(View C, const real *restrict a, const real *restrict b, int64_t depth, int64_t rows, int64_t cols, real alpha, real keep) {
    Vec c[MR][2];
    memset(c, 0, sizeof c);
    for (int64_t k = 0; k < depth; k++, a += MR, b += NR) {
        Vec b0 = *(const Vec *)b, b1 = *(const Vec *)(b + VL);
#pragma GCC unroll 12
        for (int r = 0; r < MR; r++) {
            c[r][0] += a[r] * b0;
            c[r][1] += a[r] * b1;
        }
    }
    real acc[MR * NR] __attribute__((aligned(64)));
    memcpy(acc, c, sizeof c);
    if (cols == NR) gemm_store(C, acc, rows, NR, alpha, keep);             // a constant length vectorizes
    else gemm_store(C, acc, rows, cols, alpha, keep);
}

// One tile of C, by one thread. The columns of C are contiguous.
static inline void gemm_tile(View C, View A, View B, int64_t rows, int64_t cols, int64_t K, real alpha, real beta) {
    real pa[MC * KC] __attribute__((aligned(64))), pb[NC * KC] __attribute__((aligned(64)));
    for (int64_t k0 = 0; k0 < K; k0 += KC) {
        int64_t depth = K - k0 < KC ? K - k0 : KC;
        for (int64_t i = 0; i < rows; i += MR)
            gemm_pack(pa + i * depth, A.p + i * A.rs + k0 * A.cs, A.rs, A.cs, rows - i < MR ? rows - i : MR, MR, depth);
        for (int64_t j = 0; j < cols; j += NR)
            gemm_pack(pb + j * depth, B.p + k0 * B.rs + j * B.cs, B.cs, B.rs, cols - j < NR ? cols - j : NR, NR, depth);
        real keep = k0 == 0 ? beta : 1;
        for (int64_t j = 0; j < cols; j += NR)
            for (int64_t i = 0; i < rows; i += MR)
                gemm_kernel(view(C.p + i * C.rs + j, C.rs, 1), pa + i * depth, pb + j * depth, depth, rows - i < MR ? rows - i : MR,
                            cols - j < NR ? cols - j : NR, alpha, keep);
    }
}

static inline void gemm_packed(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, real beta) {
    int64_t ti = (M + MC - 1) / MC, tj = (N + NC - 1) / NC;
#pragma omp parallel for schedule(dynamic) if (M * N * K > 1 << 15)
    for (int64_t t = 0; t < ti * tj; t++) {
        int64_t i = t % ti * MC, j = t / ti * NC;
        gemm_tile(view(C.p + i * C.rs + j * C.cs, C.rs, C.cs), view(A.p + i * A.rs, A.rs, A.cs), view(B.p + j * B.cs, B.rs, B.cs),
                  M - i < MC ? M - i : MC, N - j < NC ? N - j : NC, K, alpha, beta);
    }
}

// The product the judge uses: packed in float, naive in double.
static inline void gemm(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha, real beta) {
    if (sizeof(real) == 4) gemm_packed(C, A, B, M, N, K, alpha, beta);
    else gemm_naive(C, A, B, M, N, K, alpha, beta);
}
