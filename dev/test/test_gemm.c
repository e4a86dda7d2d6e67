// test_gemm.c: the packed product of llmc/gemm.h against its naive twin, with fp32 products and
// with bf16 products (test_gemm_bf16.c: the same header built the other way), all forms, at sizes
// around every block boundary.
#include "test.h"
#include "../../llmc/rand.h"
#include <stdlib.h>
#define real float
#include "../../llmc/gemm.h"

typedef void (*Product)(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha,
                        bool add);
void gemm_packed_bf16(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha,
                      bool add);
void bf16_round4(float *out, const float *x);

enum { MOST = 400 * 600 };
static float given_a[MOST], given_b[MOST], a[MOST], b[MOST], c[MOST], d[MOST];

// The packed product of what is given, and the naive one of a, b: the same numbers, for bf16
// products rounded. They differ by the order of sums alone.
static void against_naive(Product packed, const char *name) {
    static const int sizes[][3] = {
        {1, 1, 1},     {5, 17, 3},     {6, 16, 256},  {7, 15, 257},  {12, 32, 512},
        {13, 33, 300}, {48, 64, 8},    {49, 65, 511}, {97, 130, 70}, {200, 3, 513},
        {2, 150, 1},   {400, 40, 30},  {193, 50, 20}, {24, 590, 33}, {192, 192, 9},
        // one dimension about 1024, the most columns of a tile (NC)
        {1, 100, 1030}, {13, 20, 1024}, {13, 16, 1027}, {40, 1030, 25}, {1030, 40, 25}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int form = 0; form < 4; form++)
            for (int scale = 0; scale < 4; scale++) {
                int add = scale % 2;
                float alpha = scale / 2 ? 1 : 0.3f;  // not a power of two: its product is rounded
                int M = sizes[s][0], N = sizes[s][1], K = sizes[s][2], ldc = N + 2;
                View A = form & 1 ? transpose(view(a, M)) : view(a, K);
                View B = form & 2 ? transpose(view(b, K)) : view(b, N);
                View given_A = band(given_a, A.rs, A.cs, -FAR, FAR);
                View given_B = band(given_b, B.rs, B.cs, -FAR, FAR);
                // without add C is not read
                for (int i = 0; i < M * ldc; i++) c[i] = d[i] = add ? a[i + 1] : NAN;
                packed(view(c, ldc), given_A, given_B, M, N, K, alpha, add);
                gemm_naive(view(d, ldc), A, B, M, N, K, alpha, add);
                double worst = 0, edge = 0;
                for (int i = 0; i < M; i++)
                    for (int j = 0; j < ldc; j++) {
                        double difference = fabs((double)c[i * ldc + j] - d[i * ldc + j]);
                        if (j < N) worst = isnan(difference) ? INFINITY : fmax(worst, difference);
                        // nothing written beside C
                        else edge += memcmp(&c[i * ldc + j], &d[i * ldc + j], 4) != 0;
                    }
                EXPECT(worst <= (4e-6 * sqrt(K) + 2e-6) * alpha && edge == 0,
                       "%s %dx%dx%d, form %d, alpha %g, add %d: off by %g", name, M, N, K, form,
                       alpha, add, worst);
                int some = (M + 1) / 2;
                for (int i = 0; i < some * ldc; i++) d[i] = add ? a[i + 1] : NAN;
                packed(view(d, ldc), given_A, given_B, some, N, K, alpha, add);
                EXPECT(!memcmp(c, d, (size_t)(some * ldc) * sizeof *c),
                       "%s %dx%dx%d, form %d, alpha %g, add %d: "
                       "other bits in the first %d rows alone",
                       name, M, N, K, form, alpha, add, some);
#ifdef _OPENMP
                int threads = omp_get_max_threads();
                memcpy(d, c, sizeof c);
                for (int i = 0; i < M * ldc; i++) c[i] = add ? a[i + 1] : NAN;
                omp_set_num_threads(7);
                packed(view(c, ldc), given_A, given_B, M, N, K, alpha, add);
                omp_set_num_threads(threads);
                EXPECT(!memcmp(c, d, sizeof c),
                       "%s %dx%dx%d, form %d, alpha %g, add %d: other bits with 7 threads", name, M,
                       N, K, form, alpha, add);
#endif
            }
    // No depth: C, or nothing.
    for (int i = 0; i < 6; i++) c[i] = (float)i;
    packed(view(c, 3), view(a, 1), view(b, 1), 2, 3, 0, 1, 1);
    EXPECT(c[5] == 5, "%s of depth 0 gives %g, expected C as it was", name, c[5]);
    packed(view(c, 3), view(a, 1), view(b, 1), 2, 3, 0, 1, 0);
    EXPECT(c[0] == 0 && c[5] == 0, "%s of depth 0, add 0 gives %g, expected 0", name, c[5]);
    // No rows, as of an expert without tokens, or no columns: nothing.
    for (int i = 0; i < 2; i++)
        packed(view(c, 3), view(a, 8), view(b, 3), i ? 2 : 0, i ? 0 : 3, 8, 1, 1);
    EXPECT(c[0] == 0 && c[5] == 0, "%s without rows or columns writes %g", name, c[0]);
}

// How far (i, j) is outside of a band; 0 within.
static int64_t outside(int64_t i, int64_t j, int64_t first, int64_t last) {
    if (j - i < first) return first - (j - i);
    return j - i > last ? j - i - last : 0;
}

// A band of A, whose zeros are passed over, gives the bits of the whole A; a band of C the bits of
// the whole C. Far outside, A is NaN, which no sum may meet, and C stays as it is.
static void against_band(Product packed, const char *name) {
    // REACH: no block is larger, with the units that one instruction takes
    enum { M = 130, K = 600, N = 100, REACH = 64 };
    static float zeros[M * K], nans[M * K], whole[M * N], some[M * N];
    static const int64_t bands[][2] = {{-FAR, 0}, {-FAR, 45}, {-FAR, -20}, {0, FAR},    {-45, FAR},
                                       {77, FAR}, {530, FAR}, {-9, 400},   {-FAR, -FAR}};
    for (size_t t = 0; t < sizeof bands / sizeof *bands; t++)
        for (int transposed = 0; transposed < 2; transposed++) {
            int64_t first = bands[t][0];
            int64_t last = bands[t][1];
            int64_t rs = transposed ? 1 : K;
            int64_t cs = transposed ? M : 1;
            int wrong = 0, wrong_c = 0;
            for (int64_t i = 0; i < M; i++)
                for (int64_t j = 0; j < K; j++) {
                    int64_t out = outside(i, j, first, last);
                    zeros[i * rs + j * cs] = out ? 0 : given_a[i * K + j];
                    nans[i * rs + j * cs] = out > REACH ? NAN : zeros[i * rs + j * cs];
                }
            for (int i = 0; i < M * N; i++) whole[i] = some[i] = given_b[i];
            View full = band(zeros, rs, cs, -FAR, FAR);
            packed(view(whole, N), full, view(given_b, N), M, N, K, 0.3f, 1);
            packed(view(some, N), band(nans, rs, cs, first, last), view(given_b, N), M, N, K,
                   0.3f, 1);
            for (int i = 0; i < M * N; i++) wrong += whole[i] != some[i];
            for (int i = 0; i < M * N; i++) some[i] = NAN;
            full = band(given_a, rs, cs, -FAR, FAR);
            packed(view(whole, N), full, view(given_b, N), M, N, K, 1, 0);
            packed(band(some, N, 1, first, last), full, view(given_b, N), M, N, K, 1, 0);
            for (int64_t i = 0; i < M; i++)
                for (int64_t j = 0; j < N; j++) {
                    int64_t out = outside(i, j, first, last);
                    wrong_c += (!out && whole[i * N + j] != some[i * N + j]) ||
                               (out > REACH && !isnan(some[i * N + j]));
                }
            EXPECT(wrong == 0 && wrong_c == 0,
                   "%s, band %zu, transposed %d: %d of A C and %d of a band of C are wrong", name,
                   t, transposed, wrong, wrong_c);
        }
}

// However many threads: the one with the most of a product's tiles has little more than an even
// share.
static void cut_evenly(void) {
    static const int64_t sizes[][2] = {{256, 768},  {1024, 768}, {1024, 3072}, {768, 768},
                                       {3072, 768}, {2048, 384}, {192, 2304}, {384, 384}};
    static const int64_t threads_of[] = {2, 3, 4, 6, 8, 12, 16, 24, 32};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t t = 0; t < sizeof threads_of / sizeof *threads_of; t++) {
            int64_t threads = threads_of[t];
            Tiles p = {.M = sizes[s][0], .N = sizes[s][1]};
            gemm_divide(&p, threads);
            double share =
                (double)((p.mp * p.np + threads - 1) / threads * gemm_cut(p.M, p.mp, MR, 0).to *
                         gemm_cut(p.N, p.np, NR, 0).to * threads) /
                (double)(p.M * p.N);
            EXPECT(share < 1.2,
                   "%d x %d for %d threads: %d x %d tiles, of which one thread has %.2f of an even "
                   "share",
                   (int)p.M, (int)p.N, (int)threads, (int)p.mp, (int)p.np, share);
        }
}

// Threads begin with a share each; those that are done take what one that stands still has left;
// nobody gets a piece again.
static void every_piece_once(int threads, int pieces) {
#ifdef _OPENMP
    int before = omp_get_max_threads(), times[300] = {0}, wrong = 0;
    omp_set_num_threads(threads);
    Shares s = shares_make(pieces);
#pragma omp parallel reduction(+ : wrong)
    {
        int64_t first = shares_take(&s), left = 0;
#pragma omp barrier
        if (threads <= pieces && threads <= MAX_SHARES)
            wrong += first != (int64_t)pieces * omp_get_thread_num() / threads;
        for (int64_t at = first; at >= 0; at = omp_get_thread_num() ? shares_take(&s) : -1) {
#pragma omp atomic
            times[at]++;
        }
#pragma omp barrier
        for (int64_t at; (at = shares_take(&s)) >= 0; left++) times[at]++;
        wrong += threads > 1 && left > 0;
    }
    omp_set_num_threads(before);
    for (int i = 0; i < pieces; i++) wrong += times[i] != 1;
    EXPECT(wrong == 0, "%d pieces for %d threads: %d of them, or of the threads' first ones, wrong",
           pieces, threads, wrong);
#else
    (void)threads, (void)pieces;
#endif
}

void test_gemm(void) {
    for (int threads = 1; threads <= 4; threads++)
        for (int pieces = 0; pieces < 10; pieces++) every_piece_once(threads, pieces);
    every_piece_once(MAX_SHARES + 2, 300);
    cut_evenly();
    for (int i = 0; i < MOST; i++) {
        given_a[i] = a[i] = (float)rand_normal(6, (uint64_t)i);
        given_b[i] = b[i] = (float)rand_normal(7, (uint64_t)i);
    }
    against_naive(gemm_packed, "fp32");
    against_band(gemm_packed, "fp32");
    for (int i = 0; i < MOST; i += 4) { bf16_round4(a + i, a + i); bf16_round4(b + i, b + i); }
    against_naive(gemm_packed_bf16, "bf16");
    against_band(gemm_packed_bf16, "bf16");
    // The product itself rounds: 1 + 2^-9 is 1 in bfloat16, 1 + 3 2^-9 is 1 + 2^-7.
    float x[8] = {1 + 0x1p-9f, 1 + 0x3p-9f, 1, 1, 1 + 0x1p-9f, 1, 1, 1};
    float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    for (int K = 1; K <= 8; K++) {
        float sum = 0;
        gemm_packed_bf16(view(&sum, 1), view(x, 8), transpose(view(ones, 8)), 1, 1, K, 1, 0);
        EXPECT(sum == (float)K + (K > 1) * 0x1p-7f, "bf16, depth %d: %.9g", K, sum);
    }
}

// Against the definition: of the two bfloat16 about x the nearer, and of two as near the one whose
// last bit is 0.
void test_bf16(void) {
    int wrong = 0;
    uint32_t first = 0;
    for (int i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)rand_at(8, (uint64_t)i), low, high;
        if (i % 4 == 0) bits = (bits & 0xFFFF0000) | 0x8000;                    // ties
        if (i % 64 == 1) bits &= 0x807FFFFF;                                    // denormal
        if (i % 256 == 2) bits |= 0x7F800000;                                   // infinite or NaN
        float x[4] = {0}, out[4], below, above;
        memcpy(x, &bits, 4);
        bf16_round4(out, x);
        low = bits & 0xFFFF0000, high = low + 0x10000;
        memcpy(&below, &low, 4);
        memcpy(&above, &high, 4);
        double to_below = fabs((double)x[0] - below);
        double to_above = fabs((isinf(above) ? copysign(0x1p128, x[0]) : (double)above) - x[0]);
        float nearest = low >> 16 & 1 ? above : below;
        if (to_below != to_above) nearest = to_below < to_above ? below : above;
        if (isinf(x[0])) nearest = x[0];
        bool right = isnan(x[0]) ? isnan(out[0]) : out[0] == nearest;
        if (!right && !wrong++) first = bits;
    }
    EXPECT(wrong == 0, "%d of 200000 rounded wrongly, the first %08x", wrong, first);
}
