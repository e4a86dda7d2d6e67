// train_gpt.c: the judge. GPT-2 and Llama-like models on the CPU under any normalization
// placement, with the forward and backward pass of every layer written by hand. The CUDA trainer
// is tested against it. It is also a CPU trainer for real use.
//
// 1. The file reads from top to bottom: layers, the two branches of a block, the sublayer, the
//    block, statistics, the model, AdamW, Muon, main.
// 2. Every layer is a pair, <layer>_forward and <layer>_backward.
//    Arguments: outputs | saved | inputs | parameters | sizes.
// 3. SET or ADD. The gradient of a value that is read once is SET. For a value that is read several
//    times, the first writer SETs (or memory is zeroed before), and the others ADD:
//      parameters          over rows and micro-batches (gradient accumulation); the tied embedding
//                          by both of its uses. The first micro-step SETs matrices of linears;
//                          gpt_zero_grads zeroes the others.
//      residual stream     by skip and branch of each sublayer. block_backward zeroes it.
//      u, a branch's input by q, k, v; by gate and up; by router and experts; by the skip
//      k and v             by the query heads of a group
// 4. The mode is data (llmc/modes.h): it says which norm slots are filled. Branches, sublayers and
//    the model look at it; a layer sees at most the Site of its own norm.
// 5. The file is compiled once per precision: REAL is float or double, PREC its name, and bf16 is
//    float with BF16_PRODUCTS (llmc/gemm.h). Every sum has one order, so the results are
//    bit-identical for any number of threads.
//
// Sizes: B sequences of T tokens, n = B T rows, C channels, NH heads, KV key-value heads, HS head
// size, QK head size of q and k (HS except in latent attention), R rotary channels of a head, F ffn
// width, V vocabulary, Vp V with padding, L layers, E experts, K experts per token.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef REAL Real;
#define real Real              // a macro, because llmc/memory.h tests #ifdef real
#include "llmc/exp.h"
#include "llmc/gemm.h"
#include "llmc/run/trainer.h"
#include "llmc/peak.h"
#include "llmc/run/free_memory.h"
#include "llmc/run/train.h"

// Double calls libm; float takes the vectorized exp_float and tanh_float, whose relative errors are
// below 2e-7.
static real exp_real(real x) {
    return sizeof(real) == 8 ? (real)exp((double)x) : (real)exp_float((float)x);
}
static real tanh_real(real x) {
    return sizeof(real) == 8 ? (real)tanh((double)x) : (real)tanh_float((float)x);
}

enum { SET, ADD };
enum { STRIP = 32 };   // columns that one thread sums over all rows, in the order of the rows
enum { PIECES = 64 };  // of a sum, added in order, so that the number of threads changes no bit

// x = 0. Zeroing a small x costs less than waking the threads.
static void zero(real *x, int64_t size) {
#pragma omp parallel for if (size > 1 << 16)
    for (int64_t i = 0; i < size; i++) x[i] = 0;
}

// x + offset, or NULL where a tensor does not exist
static real *at(real *x, int64_t offset) { return x ? x + offset : NULL; }

// ------------------------------------------------------------------------------ linear
// y = c W x + b, for each of n rows.
//   x [n, in]   w [out, in]   b [out] or NULL
//   y [n, ldy]: the first `out` columns of each row are written

typedef struct {
    const real *w, *b;
    real *dw, *db;
    int64_t n;
    int out, in;
    int ldy;    // from one row of y to the next: `out`, or more where two linears share a buffer
    real c;     // 1, or LayerNorm Scaling's 1/sqrt(l+1)
    int to_dw;  // SET or ADD: dW
} Linear;

static void linear_forward(real *y, const real *x, Linear s) {
    View y_out = view(y, s.ldy), x_in = view(x, s.in), w_in = view(s.w, s.in);
    gemm(y_out, x_in, transpose(w_in), s.n, s.out, s.in, s.c, 0);
    if (!s.b) return;
#pragma omp parallel for
    for (int64_t i = 0; i < s.n; i++)
        for (int j = 0; j < s.out; j++) y[i * s.ldy + j] += s.b[j];
}

// dx = c W^T dy    dW = c dy x^T    db += dy
//   dx [n, in]: SET or ADD, as `add` says   dw [out, in]: as s.to_dw says   db [out] or NULL
static void linear_backward(real *dx, const real *dy, const real *x, Linear s, int add) {
    View dy_out = view(dy, s.ldy), x_in = view(x, s.in), w_in = view(s.w, s.in);
    gemm(view(dx, s.in), dy_out, w_in, s.n, s.in, s.out, s.c, add == ADD);
    gemm(view(s.dw, s.in), transpose(dy_out), x_in, s.out, s.in, s.n, s.c, s.to_dw == ADD);
    if (!s.db) return;
    // A thread owns a strip of columns, and sums it over the rows in order.
#pragma omp parallel for
    for (int j0 = 0; j0 < s.out; j0 += STRIP) {
        int64_t strip = least(s.out - j0, STRIP);
        real sum[STRIP] = {0};
        for (int64_t i = 0; i < s.n; i++)
            for (int j = 0; j < strip; j++) sum[j] += dy[i * s.ldy + j0 + j];
        for (int j = 0; j < strip; j++) s.db[j0 + j] += sum[j];
    }
}

// ------------------------------------------------------------------------------ norm
// RMSNorm (Zhang, Sennrich 2019):  y = g * x r             r = (mean(x^2) + eps)^(-1/2)
// LayerNorm (Ba et al. 2016):      y = g * (x - m) r + b   r = (mean((x - m)^2) + eps)^(-1/2)
//                                                          m = mean(x)
// nGPT (Loshchilov et al. 2024):   L2 is RMSNorm with g = 1/sqrt(width), so y = x / |x|;
//                                  SCALE has no norm: y = g * x
// DyT (Zhu et al. 2025):           y = g * tanh(alpha x) + b, with a learned scalar alpha (DYT);
//                                  its site.scale is 1, and its groups share their gain
// The gain is g = site.scale * w, or site.scale alone where w is NULL.
//   x, y [n, groups, width]: each group has statistics of its own
//   w, b [gains]: shared by all groups if gains == width; one each if gains == groups * width
//   mean, rstd [n, groups] saved for backward: m and r; RMSNorm has no mean, SCALE and DyT have
//   neither

typedef struct {
    Site site;                  // llmc/modes.h: on, groups, width, gains, scale
    real *w, *b, *alpha;        // [gains]; b is NULL for RMSNorm; alpha is DyT's number, or NULL
    real *dw, *db, *dalpha;
    real *mean, *rstd;          // [n, groups], or NULL
    int64_t n;                  // rows
    real eps;                   // keeps r finite
} Norm;

static void norm_forward(real *y, const real *x, Norm s) {
    int W = s.site.width, G = s.site.groups;
    int shared = s.site.gains == W;
    real scale = s.site.scale, alpha = s.alpha ? *s.alpha : 0;
#pragma omp parallel for
    for (int64_t row = 0; row < s.n * G; row++) {  // one group of one of the n rows
        int64_t gain = shared ? 0 : row % G * W;     // where the group's gains begin
        const real *x_r = x + row * W, *w = at(s.w, gain), *b = at(s.b, gain);
        real *y_r = y + row * W;
        real mean = 0, square = 0, rstd = 1;
        if (s.alpha) {  // DyT
            for (int i = 0; i < W; i++) y_r[i] = w[i] * tanh_real(alpha * x_r[i]) + b[i];
            continue;
        }
        if (b) {  // LayerNorm
#pragma omp simd reduction(+ : mean)
            for (int i = 0; i < W; i++) mean += x_r[i];
            mean /= W;
            s.mean[row] = mean;
        }
        if (s.site.on != SCALE) {
#pragma omp simd reduction(+ : square)
            for (int i = 0; i < W; i++) square += (x_r[i] - mean) * (x_r[i] - mean);
            s.rstd[row] = rstd = 1 / (real)sqrt(square / W + s.eps);  // for backward
        }
        // y = gain * xhat + bias
        for (int i = 0; i < W; i++)
            y_r[i] = scale * (w ? w[i] : 1) * ((x_r[i] - mean) * rstd) + (b ? b[i] : 0);
    }
}

// With xhat = (x - m) r, or DyT's tanh(alpha x):   dg += dy * xhat    db += dy
// summed over all rows, or over those of one group where groups have gains of their own.
static void norm_backward_gains(const real *dy, const real *x, Norm s) {
    int W = s.site.width, sets = s.site.gains / W;  // of gains: 0 (L2), 1, or one for each group
    real scale = s.site.scale;
#pragma omp parallel for collapse(2)
    for (int g = 0; g < sets; g++)
        for (int i0 = 0; i0 < W; i0 += STRIP) {
            int64_t strip = least(W - i0, STRIP);
            real dw[STRIP] = {0}, db[STRIP] = {0}, xhat[STRIP];
            for (int64_t row = g; row < s.n * s.site.groups; row += sets) {
                const real *dy_r = dy + row * W + i0, *x_r = x + row * W + i0;
                real mean = s.mean ? s.mean[row] : 0, rstd = s.rstd ? s.rstd[row] : 1;
                if (s.alpha)
                    for (int i = 0; i < strip; i++) xhat[i] = tanh_real(*s.alpha * x_r[i]);
                else
                    for (int i = 0; i < strip; i++) xhat[i] = (x_r[i] - mean) * rstd;
                for (int i = 0; i < strip; i++) {
                    dw[i] += dy_r[i] * xhat[i];
                    db[i] += dy_r[i];
                }
            }
            for (int i = 0; i < strip; i++) {
                s.dw[g * W + i0 + i] += scale * dw[i];
                if (s.b) s.db[g * W + i0 + i] += db[i];
            }
        }
}

// With u = g * dy, t = tanh(alpha x) and v = u (1 - t^2):   dx = alpha v    dalpha += sum v x
static void dyt_backward(real *dx, const real *dy, const real *x, Norm s, int add) {
    int64_t W = s.site.width, rows = s.n * s.site.groups;
    real alpha = *s.alpha;
    double piece[PIECES] = {0};
#pragma omp parallel for
    for (int64_t k = 0; k < PIECES; k++)
        for (int64_t row = rows * k / PIECES; row < rows * (k + 1) / PIECES; row++) {
            const real *x_r = x + row * W, *dy_r = dy + row * W;
            real *dx_r = dx + row * W;
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < W; i++) {
                real t = tanh_real(alpha * x_r[i]), v = s.w[i] * dy_r[i] * (1 - t * t);
                dx_r[i] = add == ADD ? dx_r[i] + alpha * v : alpha * v;
                sum += v * x_r[i];
            }
            piece[k] += sum;
        }
    double total = 0;
    for (int k = 0; k < PIECES; k++) total += piece[k];
    *s.dalpha += total;
}

// With xhat = (x - m) r and u = g * dy:
//   LayerNorm   dx = r (u - mean(u) - xhat mean(u * xhat))
//   RMSNorm     dx = r (u - xhat mean(u * xhat))
//   SCALE       dx = u
static void norm_backward(real *dx, const real *dy, const real *x, Norm s, int add) {
    norm_backward_gains(dy, x, s);
    if (s.alpha) {
        dyt_backward(dx, dy, x, s, add);
        return;
    }
    int W = s.site.width, G = s.site.groups, shared = s.site.gains == W;
    real scale = s.site.scale;
#pragma omp parallel for
    for (int64_t row = 0; row < s.n * G; row++) {
        const real *x_r = x + row * W, *dy_r = dy + row * W;
        const real *w = at(s.w, shared ? 0 : row % G * W);
        real *dx_r = dx + row * W;
        real mean = s.mean ? s.mean[row] : 0, rstd = s.rstd ? s.rstd[row] : 1;
        real sum_u = 0, sum_ux = 0;  // of u and of u * xhat
#pragma omp simd reduction(+ : sum_u, sum_ux)
        for (int i = 0; i < W; i++) {
            real u = scale * (w ? w[i] : 1) * dy_r[i];
            sum_u += u;
            sum_ux += u * (x_r[i] - mean) * rstd;
        }
        // LayerNorm alone subtracts the mean of u; SCALE subtracts nothing.
        real mean_u = s.b ? sum_u / W : 0, mean_ux = s.rstd ? sum_ux / W : 0;
        for (int i = 0; i < W; i++) {
            real xhat = (x_r[i] - mean) * rstd;
            real d = rstd * (scale * (w ? w[i] : 1) * dy_r[i] - mean_u - xhat * mean_ux);
            dx_r[i] = add == ADD ? dx_r[i] + d : d;
        }
    }
}

// ------------------------------------------------------------------------------ RoPE
// Rotary position embedding (Su et al. 2021), half-split, in place. It rotates the last R channels
// of a head: the pair (i, i + R/2) at position t by the angle t * theta^(-2i/R) (rope_rate).
//   x [n, heads, size], n = B T rows
//   table [positions, 2, R/2]: cosines, then sines; it begins at the position of row 0
//   direction +1: forward, -1: backward, because a rotation's transpose is its inverse

// Angles in double: at large positions float would lose their fraction.
static void rope_table(real *table, int64_t positions, const Model *m) {
    int R = rotary_size(m);
#pragma omp parallel for
    for (int64_t t = 0; t < positions; t++)
        for (int i = 0; i < R / 2; i++) {
            double angle = (double)t * rope_rate(m, i, R);
            table[t * R + i] = (real)cos(angle);
            table[t * R + R / 2 + i] = (real)sin(angle);
        }
}

// (first, second) becomes (first cos - second sin, second cos + first sin).
static void rope(real *x, const real *table, int64_t n, int T, int heads, int size, int R,
                 int direction) {
    int half = R / 2;
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++)
        for (int h = 0; h < heads; h++) {
            const real *cosine = table + row % T * R, *sine = cosine + half;
            // the last R channels of head h
            real *x_h = x + (row * heads + h + 1) * size - R;
            for (int i = 0; i < half; i++) {
                real first = x_h[i], second = x_h[half + i];
                real turn = direction * sine[i];
                x_h[i] = first * cosine[i] - second * turn;
                x_h[half + i] = second * cosine[i] + first * turn;
            }
        }
}

// ------------------------------------------------------------------------------ attention
// Causal attention with grouped queries (Ainslie et al. 2023):
//   S = scale Q K^T    P = softmax(S) over the keys up to the query's position    C = P V
//   q [B, T, NH, QK]   k [B, T, KV, QK]   v [B, T, KV, HS]; head h reads kv head h / (NH / KV)
//   c [B, T, NH, HS]
//   lse [B, T, NH] saved for backward: log-sum-exp of each row of S (natural logarithm)
//   peak [B, T, NH] largest score of each row of S, for statistics
// S is never stored whole. Forward goes through blocks of ATTN_BLOCK keys with online softmax:
// whenever a row's maximum grows, its sums so far are rescaled by exp(old - new maximum)
// (Milakov, Gimelshein 2018; FlashAttention, Dao et al. 2022). Backward computes S again.
// With a KV cache (B is 1 then) k and v begin `cached` rows before q. Blocks begin at multiples of
// ATTN_BLOCK of the whole text, so that decoding it in pieces gives the same bits.
// --mask-documents: a query sees only its own document. Blocks of other documents are skipped.

typedef struct {
    int B, T, NH, KV;
    int QK, HS;    // head size of q and k; of v and c
    int cached;    // positions in the KV cache before row 0 of q
    real scale;
    real *scores;  // scratch [threads, 2, ATTN_BLOCK, ATTN_BLOCK]
    const int32_t *begins;  // [B, T] where each query's document begins; NULL: no mask
} AttnShape;

// The rows of one sequence and one head, or of their gradients.
typedef struct {
    View q, k, v, c;
    const int32_t *begins;  // of the sequence's queries; NULL: no mask
} Head;

// Head h of sequence b. x [B, T, heads, size]
static View head_rows(const real *x, int64_t b, int T, int64_t heads, int size, int64_t h) {
    return view(x + (b * T * heads + h) * size, heads * size);
}

static Head head_at(const real *q, const real *k, const real *v, const real *c, AttnShape s,
                    int64_t b, int64_t h) {
    int64_t kv = h / (s.NH / s.KV);
    return (Head){
        .q = head_rows(q, b, s.T, s.NH, s.QK, h), .k = head_rows(k, b, s.T, s.KV, s.QK, kv),
        .v = head_rows(v, b, s.T, s.KV, s.HS, kv), .c = head_rows(c, b, s.T, s.NH, s.HS, h),
        .begins = s.begins ? s.begins + b * s.T : NULL,
    };
}

// The first key of the document of query `row`; it never decreases. With begins (not in decode)
// rows are positions.
static int64_t first_key(Head x, int64_t row) { return x.begins ? x.begins[row] : 0; }

// Each thread's own two blocks of scores.
static real *thread_scores(AttnShape s) {
    return s.scores + (int64_t)omp_get_thread_num() * 2 * ATTN_BLOCK * ATTN_BLOCK;
}

// The largest of x[0 .. size), size > 0. It may miss a NaN; the caller's sum of e^x keeps it.
static real row_max(const real *x, int64_t size) {
    real max = x[0];
#pragma omp simd reduction(max : max)
    for (int64_t j = 1; j < size; j++) max = x[j] > max ? x[j] : max;
    return max;
}

// The scores of keys are read in vectors of LANES; the lanes beyond `seen` are ignored.
enum { LANES = 16 };
_Static_assert(ATTN_BLOCK % LANES == 0, "a row of a block of scores ends with a vector");

// x[j] = exp(x[j] - max) for hidden <= j < seen, and 0 for the other keys. Returns the sum.
// max: the largest score; in backward the log-sum-exp, which makes x the probabilities.
static real row_exp(real *x, int64_t hidden, int64_t seen, int64_t keys, real max) {
    real sum[LANES] = {0};
    int64_t j = 0;
    for (; j + LANES <= hidden; j += LANES) memset(x + j, 0, LANES * sizeof(real));
    for (; j < seen; j += LANES) {
        int skip = (int)(hidden - j), left = (int)(seen - j);
        for (int l = 0; l < LANES; l++)
            sum[l] += x[j + l] = l >= skip && l < left ? exp_real(x[j + l] - max) : 0;
    }
    for (; j < keys; j++) x[j] = 0;
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sum[l] += sum[l + half];
    return sum[0];
}

// peak and lse begin at the head's row 0; their rows are NH apart. S: scratch for one block.
static void head_forward(Head x, real *peak, real *lse, real *S, AttnShape s) {
    int64_t end = s.cached + s.T;
    for (int64_t t0 = s.cached, rows; t0 < end; t0 += rows) {  // positions in the text
        rows = least(ATTN_BLOCK - t0 % ATTN_BLOCK, end - t0);
        int64_t row0 = t0 - s.cached;  // q and c begin at position `cached`
        View q_t = part(x.q, row0, 0), c_t = part(x.c, row0, 0);
        real max[ATTN_BLOCK], sum[ATTN_BLOCK];  // of each row, over the keys so far
        int64_t first = first_key(x, row0) / ATTN_BLOCK * ATTN_BLOCK;
        for (int64_t j0 = first; j0 < t0 + rows; j0 += ATTN_BLOCK) {
            int64_t keys = least(t0 + rows - j0, ATTN_BLOCK);
            View seen_S = band(S, ATTN_BLOCK, 1, -FAR, t0 - j0);  // the causal mask
            // S = scale Q K^T, of one block
            gemm(seen_S, q_t, transpose(part(x.k, j0, 0)), rows, keys, s.QK, s.scale, 0);
            for (int64_t i = 0; i < rows; i++) {
                real *S_i = S + i * ATTN_BLOCK, *c_i = c_t.p + i * c_t.rs;
                // query t0 + i sees the keys up to its own position
                int64_t seen = least(t0 + i + 1 - j0, keys);
                int64_t hidden = clamp(first_key(x, row0 + i) - j0, 0, seen);
                // a row that sees no key yet has a finite maximum, and sums of 0
                real new_max = hidden < seen ? row_max(S_i + hidden, seen - hidden) : -FLT_MAX;
                if (j0 > first && max[i] > new_max) new_max = max[i];
                real new_sum = row_exp(S_i, hidden, seen, keys, new_max);
                if (j0 > first) {  // c and sum so far are relative to the old maximum
                    real rescale = exp_real(max[i] - new_max);
                    new_sum += rescale * sum[i];
                    for (int j = 0; j < s.HS; j++) c_i[j] *= rescale;
                }
                max[i] = new_max;
                sum[i] = new_sum;
            }
            // C += P V, where P still lacks its denominator
            gemm(c_t, seen_S, part(x.v, j0, 0), rows, s.HS, keys, 1, j0 > first);
        }
        for (int64_t i = 0; i < rows; i++) {
            // the softmax's denominator, once for all keys
            for (int j = 0; j < s.HS; j++) c_t.p[i * c_t.rs + j] /= sum[i];
            peak[(row0 + i) * s.NH] = isnan(sum[i]) ? sum[i] : max[i];
            lse[(row0 + i) * s.NH] = max[i] + (real)log(sum[i]);
        }
    }
}

// Threads share the heads (llmc/threads.h).
static void attention_forward(real *c, real *peak, real *lse, const real *q, const real *k,
                              const real *v, AttnShape s) {
    Shares heads = shares_make((int64_t)s.B * s.NH);
#pragma omp parallel
    for (int64_t head; (head = shares_take(&heads)) >= 0;) {
        int64_t b = head / s.NH, h = head % s.NH;
        int64_t row = b * s.T * s.NH + h;  // where the head begins in peak and lse
        head_forward(head_at(q, k, v, c, s, b, h), peak + row, lse + row, thread_scores(s), s);
    }
}

// With P = exp(S - lse) and D = rowsum(dC * C):
//   dV = P^T dC    dP = dC V^T    dS = P * (dP - D)    dQ = scale dS K    dK = scale dS^T Q
// first_head: this one is the first of its group to write dk and dv.
static void head_backward(Head d, Head x, const real *lse, real *P, AttnShape s, bool first_head) {
    real *dS = P + ATTN_BLOCK * ATTN_BLOCK, D[ATTN_BLOCK];
    for (int64_t t0 = 0; t0 < s.T; t0 += ATTN_BLOCK) {
        int64_t rows = least(s.T - t0, ATTN_BLOCK);
        View q_t = part(x.q, t0, 0), c_t = part(x.c, t0, 0);
        View dq_t = part(d.q, t0, 0), dc_t = part(d.c, t0, 0);
        for (int64_t i = 0; i < rows; i++) {  // D = rowsum(dC * C)
            real sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < s.HS; j++) sum += dc_t.p[i * dc_t.rs + j] * c_t.p[i * c_t.rs + j];
            D[i] = sum;
        }
        int64_t first = first_key(x, t0) / ATTN_BLOCK * ATTN_BLOCK;
        for (int64_t j0 = first; j0 < t0 + rows; j0 += ATTN_BLOCK) {
            int64_t keys = least(t0 + rows - j0, ATTN_BLOCK);
            View k_j = part(x.k, j0, 0), dk_j = part(d.k, j0, 0);
            View v_j = part(x.v, j0, 0), dv_j = part(d.v, j0, 0);
            View seen_P = band(P, ATTN_BLOCK, 1, -FAR, t0 - j0);
            View seen_dS = band(dS, ATTN_BLOCK, 1, -FAR, t0 - j0);
            gemm(seen_P, q_t, transpose(k_j), rows, keys, s.QK, s.scale, 0);  // S
            gemm(seen_dS, dc_t, transpose(v_j), rows, keys, s.HS, 1, 0);      // dP
            for (int64_t i = 0; i < rows; i++) {
                real *P_i = P + i * ATTN_BLOCK, *dS_i = dS + i * ATTN_BLOCK;
                int64_t seen = least(t0 + i + 1 - j0, keys);
                int64_t hidden = clamp(first_key(x, t0 + i) - j0, 0, seen);
                row_exp(P_i, hidden, seen, keys, lse[(t0 + i) * s.NH]);  // P = exp(S - lse)
                for (int64_t j = 0; j < seen; j++) dS_i[j] = P_i[j] * (dS_i[j] - D[i]);
                for (int64_t j = seen; j < keys; j++) dS_i[j] = 0;
            }
            // The block on the diagonal is the first to reach these keys: it SETs their gradients.
            int add = !first_head || t0 > j0;
            gemm(dv_j, transpose(seen_P), dc_t, keys, s.HS, rows, 1, add);
            gemm(dq_t, seen_dS, k_j, rows, s.QK, keys, s.scale, j0 > first);
            gemm(dk_j, transpose(seen_dS), q_t, keys, s.QK, rows, s.scale, add);
        }
    }
}

static void attention_backward(real *dq, real *dk, real *dv, const real *dc, const real *c,
                               const real *lse, const real *q, const real *k, const real *v,
                               AttnShape s) {
    int group = s.NH / s.KV;  // query heads that share a kv head
    Shares heads = shares_make((int64_t)s.B * s.KV);
#pragma omp parallel
    for (int64_t head; (head = shares_take(&heads)) >= 0;) {
        int64_t b = head / s.KV, kv = head % s.KV;  // one thread owns a kv head: one order of sums
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            Head x = head_at(q, k, v, c, s, b, h), d = head_at(dq, dk, dv, dc, s, b, h);
            const real *lse_h = lse + b * s.T * s.NH + h;
            head_backward(d, x, lse_h, thread_scores(s), s, h == kv * group);
        }
    }
}

// ------------------------------------------------------------------------------ latent heads
// Multi-head latent attention (DeepSeek-V2 2024, eq 9-19, q uncompressed) makes keys and values
// from a narrow latent, kvb = W_kvb norm(latent).
//   kvb [n, NH, HS + HS]: for each head the first HS of k, then v
//   kr [n, R]: the rotary part of k, shared by all heads; RoPE rotates it later
//   k [n, NH, HS + R] = [first half of kvb | kr]    v [n, NH, HS] = second half of kvb

static void latent_heads_forward(real *k, real *v, const real *kvb, const real *kr, int64_t n,
                                 int NH, int HS, int R) {
#pragma omp parallel for
    for (int64_t i = 0; i < n * NH; i++) {
        memcpy(k + i * (HS + R), kvb + i * 2 * HS, HS * sizeof(real));
        memcpy(k + i * (HS + R) + HS, kr + i / NH * R, R * sizeof(real));
        memcpy(v + i * HS, kvb + (i * 2 + 1) * HS, HS * sizeof(real));
    }
}

// dkvb = [first HS of dk | dv]    dkr = sum over heads of the last R of dk
static void latent_heads_backward(real *dkvb, real *dkr, const real *dk, const real *dv, int64_t n,
                                  int NH, int HS, int R) {
#pragma omp parallel for
    for (int64_t t = 0; t < n; t++) {
        memset(dkr + t * R, 0, R * sizeof(real));
        for (int64_t i = t * NH; i < (t + 1) * NH; i++) {
            memcpy(dkvb + i * 2 * HS, dk + i * (HS + R), HS * sizeof(real));
            memcpy(dkvb + (i * 2 + 1) * HS, dv + i * HS, HS * sizeof(real));
            for (int j = 0; j < R; j++) dkr[t * R + j] += dk[i * (HS + R) + HS + j];
        }
    }
}

// ------------------------------------------------------------------------------ activation
// SwiGLU (Shazeer 2020):     h = silu(gate) * up
// GELU, tanh form (GPT-2):   h = up/2 (1 + tanh(z)) = up sigmoid(2z)
//                            2z = sqrt(8/pi) (up + 0.044715 up^3)
//   gu [n, 2 F] = [gate | up], or [n, F] = up    h [n, F]

static const real GELU_SLOPE = 1.5957691216057308;  // sqrt(8/pi)
static const real GELU_CUBE = 0.044715;

static real sigmoid(real x) { return 1 / (1 + exp_real(-x)); }

// sigmoid(2z)
static real gelu_sigmoid(real x) { return sigmoid(GELU_SLOPE * (x + GELU_CUBE * x * x * x)); }

static void activation_forward(real *h, const real *gu, int64_t n, int F, int swiglu) {
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++) {
        const real *g = gu + row * F * (swiglu ? 2 : 1);  // gate, and up at g + F
        real *h_r = h + row * F;
        if (swiglu)
            for (int i = 0; i < F; i++) h_r[i] = g[i] * sigmoid(g[i]) * g[F + i];
        else
            for (int i = 0; i < F; i++) h_r[i] = g[i] * gelu_sigmoid(g[i]);
    }
}

// SwiGLU, s = sigmoid(gate):   dgate = dh up s (1 + gate (1 - s))    dup = dh gate s
// GELU, s = sigmoid(2z):       dup = dh s (1 + up (1 - s) (2z)'), the derivative by up
static void activation_backward(real *dgu, const real *dh, const real *gu, int64_t n, int F,
                                int swiglu) {
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++) {
        const real *g = gu + row * F * (swiglu ? 2 : 1), *dh_r = dh + row * F;
        real *dg = dgu + row * F * (swiglu ? 2 : 1);
        if (swiglu)
            for (int i = 0; i < F; i++) {
                real s = sigmoid(g[i]);
                dg[i] = dh_r[i] * g[F + i] * s * (1 + g[i] * (1 - s));
                dg[F + i] = dh_r[i] * g[i] * s;
            }
        else
            for (int i = 0; i < F; i++) {
                real s = gelu_sigmoid(g[i]), cube = 1 + 3 * GELU_CUBE * g[i] * g[i];
                dg[i] = dh_r[i] * s * (1 + g[i] * (1 - s) * GELU_SLOPE * cube);
            }
    }
}

// ------------------------------------------------------------------------------ router
// The router of a mixture of experts sends each token to its top-k experts, K of E (Shazeer et
// al. 2017; OLMoE 2024; DeepSeek-V3 2024, eq 12-16). From logits z = W x:
//   s = softmax(z) or sigmoid(z)
//   S = top-k of s + bias; ties go to the lower index
//   gate_e = scale s_e, or scale s_e / sum_S s
//   z, s [n, E]   lse [n] log-sum-exp of z   bias [E] only for selection, or NULL
//   gate [n, K]   choice [n, K] the chosen experts
//   load [B + 1, E] tokens of each expert in sequence b; the last row is the sum of the others
//   share [B, E] mean over sequence b of p = s / sum s
//
// Losses of one layer, each without its coefficient:
//   balance    E/(K n) sum_e (sum_b load_be) (mean_b share_be)   over the micro-batch; 1 if all
//              experts get the same number of tokens (Switch, Fedus et al. 2021; OLMoE)
//   sequence   E/(K T B) sum_b sum_e load_be share_be            over each sequence (DeepSeek-V2,
//              eq 23-25)
//   z          mean_t logsumexp(z_t)^2                           (ST-MoE, Zoph et al. 2022)
// --router-losses mean (OLMoE) averages the layers' losses and also divides z by K; sum (DeepSeek,
// OLMo-core) adds them up.

typedef struct {
    int64_t n;
    int B, T, E, K;
    int kind;                   // ROUTER_SOFTMAX, ROUTER_SOFTMAX_RENORM, ROUTER_SIGMOID
    real scale;                 // of the gates
    real balance, sequence, z;  // coefficients of the losses of one layer
} RouterShape;

static void router_forward(real *gate, int32_t *choice, real *load, real *share, real *s, real *lse,
                           const real *z, const real *bias, RouterShape r) {
#pragma omp parallel for
    for (int64_t t = 0; t < r.n; t++) {
        const real *z_t = z + t * r.E;
        real *s_t = s + t * r.E;
        real max = row_max(z_t, r.E), sum = 0;  // with max subtracted, no exponential overflows
        for (int j = 0; j < r.E; j++) sum += exp_real(z_t[j] - max);
        lse[t] = max + (real)log(sum);
        for (int j = 0; j < r.E; j++)
            s_t[j] = r.kind == ROUTER_SIGMOID ? sigmoid(z_t[j]) : exp_real(z_t[j] - lse[t]);
        int32_t *choice_t = choice + t * r.K;
        real chosen = 0;
        // Top-k by insertion: choice_t holds the best experts so far, in order. It fills up even
        // where all scores are NaN.
        for (int j = 0; j < r.E; j++) {
            real score = s_t[j] + (bias ? bias[j] : 0);
            int i = least(j, r.K);  // experts found so far
            for (; i > 0; i--) {
                int before = choice_t[i - 1];
                if (!(score > s_t[before] + (bias ? bias[before] : 0))) break;
                if (i < r.K) choice_t[i] = before;
            }
            if (i < r.K) choice_t[i] = j;  // otherwise K experts are better
        }
        // Gates come from the scores without the bias.
        for (int k = 0; k < r.K; k++) chosen += s_t[choice_t[k]];
        for (int k = 0; k < r.K; k++)
            gate[t * r.K + k] =
                r.scale * s_t[choice_t[k]] / (r.kind == ROUTER_SOFTMAX ? 1 : chosen);
    }
    // Load and share of each sequence, then the load of all.
#pragma omp parallel for
    for (int b = 0; b < r.B; b++) {
        real *load_b = load + b * r.E, *share_b = share + b * r.E;
        for (int j = 0; j < r.E; j++) load_b[j] = share_b[j] = 0;
        for (int64_t t = (int64_t)b * r.T; t < (int64_t)(b + 1) * r.T; t++) {
            const real *s_t = s + t * r.E;
            real sum = 0;
            for (int k = 0; k < r.K; k++) load_b[choice[t * r.K + k]]++;
            for (int j = 0; j < r.E; j++) sum += s_t[j];
            for (int j = 0; j < r.E; j++)
                share_b[j] += s_t[j] / (r.kind == ROUTER_SIGMOID ? sum * r.T : r.T);
        }
    }
    zero(load + r.B * r.E, r.E);
    for (int i = 0; i < r.B * r.E; i++) load[r.B * r.E + i % r.E] += load[i];
}

// Backward of top-k and of the losses. The choice itself is a constant; gradients flow through the
// gates of the chosen experts. dz is SET.
//   pull_e = d(balance + sequence) / d(p_e), for one token
//   ds_e = scale dgate_e, or (scale dgate_e - sum_S dgate gate) / sum_S s, for e in S
//   softmax:  u = ds + pull    dz = s (u - sum s u)
//   sigmoid:  dz = s (1 - s) (ds + (pull - sum p pull) / sum s)
//   z-loss:   dz += 2 coefficient lse softmax(z) / n
// dloss: the gradient of the micro-batch's mean loss, to which the router's losses are added.
static void router_backward(real *dz, const real *dgate, const real *gate, const int32_t *choice,
                            const real *load, const real *s, const real *z, const real *lse,
                            RouterShape r, real dloss) {
#pragma omp parallel for
    for (int64_t t = 0; t < r.n; t++) {
        const real *s_t = s + t * r.E, *z_t = z + t * r.E;
        const real *load_b = load + t / r.T * r.E, *load_all = load + r.B * r.E;
        real *dz_t = dz + t * r.E;
        real chosen = 0;  // sum_S s
        real inner = 0;   // sum_S dgate gate
        real sum = 0;     // sum s
        real pulled = 0;  // sum s pull
        for (int k = 0; k < r.K; k++) {
            chosen += s_t[choice[t * r.K + k]];
            inner += dgate[t * r.K + k] * gate[t * r.K + k];
        }
        for (int j = 0; j < r.E; j++) {
            real pull = r.balance * load_all[j] / r.n + r.sequence * load_b[j] / r.T;
            dz_t[j] = dloss * r.E / r.K / r.n * pull;
            sum += s_t[j];
            pulled += s_t[j] * dz_t[j];
        }
        // p = s / sum s: from the gradient of p to that of s
        if (r.kind == ROUTER_SIGMOID)
            for (int j = 0; j < r.E; j++) dz_t[j] = (dz_t[j] - pulled / sum) / sum;
        // the gates' gradient, only for the chosen experts
        for (int k = 0; k < r.K; k++) {
            real dg = dgate[t * r.K + k];
            dz_t[choice[t * r.K + k]] +=
                r.kind == ROUTER_SOFTMAX ? r.scale * dg : (r.scale * dg - inner) / chosen;
        }
        // from the gradient of s, which is in dz, to that of z
        real along = 0;  // sum s u
        for (int j = 0; j < r.E; j++) along += s_t[j] * dz_t[j];
        for (int j = 0; j < r.E; j++) {
            dz_t[j] =
                s_t[j] * (r.kind == ROUTER_SIGMOID ? (1 - s_t[j]) * dz_t[j] : dz_t[j] - along);
            dz_t[j] += dloss * 2 * r.z * lse[t] / r.n * exp_real(z_t[j] - lse[t]);
        }
    }
}

// ------------------------------------------------------------------------------ gather, combine
// The K n assignments of tokens to experts are sorted by expert, in the order of the tokens, so
// that each expert multiplies neighbouring rows.
//   start [E + 1] first row of each expert   place [n, K] row of each token's k-th choice

static void router_sort(int32_t *place, int32_t *start, const int32_t *choice, RouterShape r) {
    // Counting sort: start holds counts, then their sums, then where the next row goes.
    memset(start, 0, (r.E + 1) * sizeof *start);
    for (int64_t i = 0; i < r.n * r.K; i++) start[choice[i] + 1]++;
    for (int j = 0; j < r.E; j++) start[j + 1] += start[j];
    for (int64_t i = 0; i < r.n * r.K; i++) place[i] = start[choice[i]]++;
    memmove(start + 1, start, r.E * sizeof *start);  // each start has become the next expert's
    start[0] = 0;
}

// rows[place[t, k]] = x[t]. Its backward is combine_forward without gates.
//   x [n, C]   rows [K n, C] sorted by expert
static void gather_forward(real *rows, const real *x, const int32_t *place, int64_t n, int K,
                           int C) {
#pragma omp parallel for
    for (int64_t i = 0; i < n * K; i++)
        memcpy(rows + (int64_t)place[i] * C, x + i / K * C, C * sizeof(real));
}

// y[t] = sum_k gate[t, k] rows[place[t, k]], SET or ADD (to the shared experts' output). gate NULL:
// all gates are 1.
//   y [n, C]   rows [K n, C] outputs of the experts
static void combine_forward(real *y, const real *rows, const real *gate, const int32_t *place,
                            int64_t n, int K, int C, int add) {
#pragma omp parallel for
    for (int64_t t = 0; t < n; t++) {
        if (add == SET) memset(y + t * C, 0, C * sizeof(real));
        for (int k = 0; k < K; k++) {
            const real *row = rows + (int64_t)place[t * K + k] * C;
            real g = gate ? gate[t * K + k] : 1;
            for (int i = 0; i < C; i++) y[t * C + i] += g * row[i];
        }
    }
}

// drows[place[t, k]] = gate[t, k] dy[t]    dgate[t, k] = dy[t] . rows[place[t, k]]
static void combine_backward(real *drows, real *dgate, const real *dy, const real *rows,
                             const real *gate, const int32_t *place, int64_t n, int K, int C) {
#pragma omp parallel for
    for (int64_t i = 0; i < n * K; i++) {
        const real *row = rows + (int64_t)place[i] * C, *dy_t = dy + i / K * C;
        real *drow = drows + (int64_t)place[i] * C;
        real dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int j = 0; j < C; j++) dot += dy_t[j] * row[j];
        for (int j = 0; j < C; j++) drow[j] = gate[i] * dy_t[j];
        dgate[i] = dot;
    }
}

// ------------------------------------------------------------------------------ embedding
// e[b, t] = scale * wte[token] + wpe[position]
//   tokens [B, T]   wte [Vp, C]   wpe [positions, C], NULL with RoPE   e [B, T, C]
//   begins [B, T]: position = t - begins (--restart-positions); NULL: position = t

static int64_t position_of(int64_t bt, int T, const int32_t *begins) {
    return bt % T - (begins ? begins[bt] : 0);
}

static void embedding_forward(real *e, const int32_t *tokens, const real *wte, const real *wpe,
                              const int32_t *begins, int64_t n, int T, int C, real scale) {
#pragma omp parallel for
    for (int64_t bt = 0; bt < n; bt++) {
        const real *wte_ix = wte + (int64_t)tokens[bt] * C;  // the token's row
        int64_t position = position_of(bt, T, begins);
        for (int i = 0; i < C; i++)
            e[bt * C + i] = scale * wte_ix[i] + (wpe ? wpe[position * C + i] : 0);
    }
}

// dwte[token] += scale * de[b, t]    dwpe[position] += de[b, t]
// A thread owns a strip of columns: gradients of repeated tokens add up in one order.
static void embedding_backward(real *dwte, real *dwpe, const real *de, const int32_t *tokens,
                               const int32_t *begins, int64_t n, int T, int C, real scale) {
#pragma omp parallel for
    for (int i0 = 0; i0 < C; i0 += STRIP) {
        int64_t strip = least(C - i0, STRIP);
        for (int64_t bt = 0; bt < n; bt++) {
            const real *restrict d = de + bt * C + i0;
            real *restrict token = dwte + (int64_t)tokens[bt] * C + i0;
            real *restrict position = at(dwpe, position_of(bt, T, begins) * C + i0);
            for (int i = 0; i < strip; i++) token[i] += scale * d[i];
            for (int i = 0; position && i < strip; i++) position[i] += d[i];
        }
    }
}

// ------------------------------------------------------------------------------ cross-entropy
// loss = logsum - z[target] with logsum = ln sum_j e^z[j], over the V columns of the vocabulary;
// padding takes no part.
//   logits z [n, Vp]   targets [n]   losses [n]   logsum [n] saved for backward

static void crossentropy_forward(real *losses, real *logsum, const real *logits,
                                 const int32_t *targets, int64_t n, int V, int Vp) {
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++) {
        const real *z = logits + row * Vp;
        real max = row_max(z, V);
        double sum = 0;  // in float many small terms would be lost beside a large sum
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < V; j++) sum += exp_real(z[j] - max);
        logsum[row] = max + (real)log(sum);
        losses[row] = logsum[row] - z[targets[row]];
    }
}

// dz = scale * (softmax(z) - onehot(target) + 2 z_loss logsum softmax(z)), in place of z.
// The last term is the gradient of the z-loss, z_loss * logsum^2 (OLMo 2 2025).
// scale: the gradient of one token's loss.
static void crossentropy_backward(real *logits, const real *logsum, const int32_t *targets,
                                  int64_t n, int V, int Vp, real scale, real z_loss) {
#pragma omp parallel for
    for (int64_t row = 0; row < n; row++) {
        real *z = logits + row * Vp, log_row = logsum[row];
        // cross-entropy and z-loss share softmax(z) = exp(z - logsum)
        real both = scale * (1 + 2 * z_loss * log_row);
        for (int j = 0; j < V; j++) z[j] = both * exp_real(z[j] - log_row);
        for (int j = V; j < Vp; j++) z[j] = 0;
        z[targets[row]] -= scale;
    }
}

// ------------------------------------------------------------------------------ the block
// A block is two sublayers, attention and ffn, around a residual stream x [n, C].

typedef struct {
    const Model *m;
    const Sizes *s;      // B, T of the micro-batch
    int64_t n;           // rows: B T, or those of one expert
    LayerMode p;         // what the mode decides about this layer (llmc/modes.h)
    Params w;            // parameters (llmc/tensors.h)
    Grads dw;
    Acts a, d;           // activations and their gradients
    KvCache cache;       // decode: keys and values of earlier tokens; otherwise all NULL
    const real *rotary;  // rope_table from row 0's position; NULL with learned positions
    real dloss;          // backward: the gradient of the micro-batch's mean loss, for the router
    int dw_of_linears;   // backward: SET in the first micro-step of a step, then ADD
    const int32_t *begins;  // [n] where each token's document begins; NULL: no mask
} Block;

// The norm of a slot, whose tensors are all named after it. L2: eps only prevents 0/0 for x = 0.
#define NORM(b, slot) \
    (Norm){(b)->p.slot, (b)->w.slot##_w, (b)->w.slot##_b, (b)->w.slot##_alpha, \
           (b)->dw.slot##_w, (b)->dw.slot##_b, (b)->dw.slot##_alpha, \
           (b)->a.slot##_mean, (b)->a.slot##_rstd, (b)->n, \
           (b)->p.slot.on == L2 ? 1e-12 : (b)->m->eps}

// nGPT's s_z: the logits have a gain and no norm.
static Norm logits_gain(const Block *b) {
    return (Norm){.site = b->p.logits, .w = b->w.logits_w, .dw = b->dw.logits_w, .n = b->n};
}

// y = N(x) where the slot is filled; otherwise x itself: no call, no copy. Callers that
// read y afterwards rely on acts_view, which then makes y another name of x.
static real *slot_forward(Norm norm, real *y, real *x) {
    if (!norm.site.on) return x;
    norm_forward(y, x, norm);
    return y;
}

// The gradient of the slot's input: dx where the slot is filled, otherwise dy. acts_view then
// makes an activation's dx another name of dy.
static real *slot_backward(Norm norm, real *dx, real *dy, const real *x) {
    if (!norm.site.on) return dy;
    norm_backward(dx, dy, x, norm, SET);
    return dx;
}

// A linear of the block's rows, without a bias and with one. weight: a field of Params, in LINEAR
// also one plus an offset.
#define LINEAR(b, weight, out, in, c) \
    (Linear){(b)->w.weight, NULL, (b)->dw.weight, NULL, (b)->n, out, in, out, c, \
             (b)->dw_of_linears}
#define BIASED(b, weight, out, in, c) \
    (Linear){(b)->w.weight, (b)->w.weight##_b, (b)->dw.weight, (b)->dw.weight##_b, (b)->n, \
             out, in, out, c, (b)->dw_of_linears}

// ------------------------------------------------------------------------------ attention branch
// y = W_o N_ctx(attention(rope(N_q(W_q c u)), rope(N_k(k)), N_v(v)))
// N_q, N_k, N_v and N_ctx are the norms in the slots of these names. nGPT (L2) norms q and k after
// RoPE.

static AttnShape attn_shape(const Block *b) {
    const Model *m = b->m;
    int QK = qk_size(m);
    // nGPT: q and k have length 1 when they meet, so their scores are scaled up.
    real scale = b->p.q.on == L2 ? sqrt(QK) : 1 / sqrt(QK);
    return (AttnShape){
        .B = b->s->B, .T = b->s->T, .NH = m->NH, .KV = m->KV, .QK = QK, .HS = m->HS,
        .cached = b->cache.cached, .scale = scale, .scores = b->a.scores, .begins = b->begins,
    };
}

// Rotates q [n, NH, QK] and k [n, KV, QK], or their gradients.
static void qk_rope(const Block *b, real *q, real *k, int direction) {
    const Model *m = b->m;
    int T = b->s->T, QK = qk_size(m), R = rotary_size(m);
    rope(q, b->rotary, b->n, T, m->NH, QK, R, direction);
    rope(k, b->rotary, b->n, T, m->KV, QK, R, direction);
}

// The norm of k. nGPT: it shares the gain s_qk of q.
static Norm k_norm(const Block *b) {
    Norm k = NORM(b, k);
    if (k.site.on == L2) {
        k.site.gains = b->p.q.gains;
        k.w = b->w.q_w;
        k.dw = b->dw.q_w;
    }
    return k;
}

// k, v = W_k c u, W_v c u
// With latent attention (DeepSeek-V2):
//   kvc = W_kva c u [n, kv_rank]    kr = W_kr c u [n, rope_size]; W_kr are the rows below W_kva
//   k, v = latent_heads(W_kvb N(kvc), kr)
static void kv_forward(const Block *b, const real *u) {
    const Model *m = b->m;
    const Acts *a = &b->a;
    int width = m->KV * m->HS, rank = m->kv_rank, R = m->rope_size, C = m->C;
    real c = b->p.attn_c;
    if (!rank) {
        linear_forward(a->k, u, BIASED(b, wk, width, C, c));
        linear_forward(a->v, u, BIASED(b, wv, width, C, c));
        return;
    }
    linear_forward(a->kvc, u, LINEAR(b, wkva, rank, C, c));
    linear_forward(a->kr, u, LINEAR(b, wkva + (int64_t)rank * C, R, C, c));  // of all heads
    norm_forward(a->kvcn, a->kvc, NORM(b, latent));
    linear_forward(a->kvb, a->kvcn, LINEAR(b, wkvb, 2 * width, rank, 1));
    latent_heads_forward(a->k, a->v, a->kvb, a->kr, b->n, m->NH, m->HS, R);
}

// du is ADDed to: q has already written it.
// d.k, d.v: gradients before their norms.
static void kv_backward(const Block *b, real *du, const real *u) {
    const Model *m = b->m;
    const Acts *a = &b->a, *d = &b->d;
    int width = m->KV * m->HS, rank = m->kv_rank, R = m->rope_size, C = m->C;
    real c = b->p.attn_c;
    if (!rank) {
        linear_backward(du, d->k, u, BIASED(b, wk, width, C, c), ADD);
        linear_backward(du, d->v, u, BIASED(b, wv, width, C, c), ADD);
        return;
    }
    latent_heads_backward(d->kvb, d->kr, d->k, d->v, b->n, m->NH, m->HS, R);
    linear_backward(d->kvcn, d->kvb, a->kvcn, LINEAR(b, wkvb, 2 * width, rank, 1), SET);
    norm_backward(d->kvc, d->kvcn, a->kvc, NORM(b, latent), SET);
    linear_backward(du, d->kvc, u, LINEAR(b, wkva, rank, C, c), ADD);
    linear_backward(du, d->kr, u, LINEAR(b, wkva + (int64_t)rank * C, R, C, c), ADD);
}

// The KV cache is filled here: the keys (or values) of the new rows join those of earlier tokens.
// Returns what attention reads: all rows so far, or x itself without a cache.
//   x [n, width]   cache [T, width]
static const real *kv_cache_fill(const Block *b, real *cache, const real *x, int width) {
    if (!cache) return x;
    memcpy(cache + (int64_t)b->cache.cached * width, x, b->n * width * sizeof(real));
    return cache;
}

//   u, y [n, C]
static void attn_branch_forward(const Block *b, real *y, const real *u) {
    const Model *m = b->m;
    const Acts *a = &b->a;
    int l2 = b->p.q.on == L2;    // nGPT
    linear_forward(a->q, u, BIASED(b, wq, m->NH * qk_size(m), m->C, b->p.attn_c));
    kv_forward(b, u);
    // norms of q, k, v, with RoPE after them, or for nGPT before
    if (m->rope && l2) qk_rope(b, a->q, a->k, +1);
    slot_forward(NORM(b, q), a->qn, a->q);
    slot_forward(k_norm(b), a->kn, a->k);
    slot_forward(NORM(b, v), a->vn, a->v);
    if (m->rope && !l2) qk_rope(b, a->qn, a->kn, +1);
    const real *keys = kv_cache_fill(b, b->cache.k, a->kn, m->KV * qk_size(m));
    const real *values = kv_cache_fill(b, b->cache.v, a->vn, m->KV * m->HS);
    attention_forward(a->c, a->peak, a->lse, a->qn, keys, values, attn_shape(b));
    slot_forward(NORM(b, ctx), a->cn, a->c);  // [n, NH * HS]
    linear_forward(y, a->cn, BIASED(b, wo, m->C, m->NH * m->HS, 1));
}

// d.qn, d.kn, d.vn and d.cn are the gradients of what the norms return, d.q and so on of what they
// read.
// add: ADD if the slot `in` is empty; du is then the stream's dx.
static void attn_branch_backward(const Block *b, real *du, real *dy, const real *u, int add) {
    const Model *m = b->m;
    const Acts *a = &b->a, *d = &b->d;
    int l2 = b->p.q.on == L2;    // nGPT
    linear_backward(d->cn, dy, a->cn, BIASED(b, wo, m->C, m->NH * m->HS, 1), SET);
    slot_backward(NORM(b, ctx), d->c, d->cn, a->c);
    attention_backward(d->qn, d->kn, d->vn, d->c, a->c, a->lse, a->qn, a->kn, a->vn,
                       attn_shape(b));
    if (m->rope && !l2) qk_rope(b, d->qn, d->kn, -1);
    slot_backward(NORM(b, q), d->q, d->qn, a->q);
    slot_backward(k_norm(b), d->k, d->kn, a->k);
    slot_backward(NORM(b, v), d->v, d->vn, a->v);
    if (m->rope && l2) qk_rope(b, d->q, d->k, -1);
    linear_backward(du, d->q, u, BIASED(b, wq, m->NH * qk_size(m), m->C, b->p.attn_c), add);
    kv_backward(b, du, u);
}

// ------------------------------------------------------------------------------ ffn branch
// y = N_down(W_down act(N_hidden([W_gate | W_up] c u)))
// for all tokens (dense, or the experts that all tokens share), or for one routed expert on the
// rows of its tokens.
//   N_hidden   slot `hidden`, of an expert `expert_hidden`: SDD and nGPT
//   N_down     slot `shared_out`, of an expert `expert_out`: SDD in a mixture of experts. In a
//              dense ffn SDD fills the sublayer's slot `out` instead.
//   gu, gun [n, 2 F] or [n, F] before and after N_hidden    h [n, F]    sy [n, C] before N_down

// With SwiGLU gate and up each fill one half of gu.
static Linear gate_linear(const Block *b) {
    Linear s = BIASED(b, wg, b->p.F, b->m->C, b->p.ffn_c);
    s.ldy *= 2;
    return s;
}
static Linear up_linear(const Block *b) {
    Linear s = BIASED(b, wu, b->p.F, b->m->C, b->p.ffn_c);
    if (b->m->swiglu) s.ldy *= 2;
    return s;
}

//   u, y [n, C]
static void mlp_forward(const Block *b, real *y, const real *u) {
    const Acts *a = &b->a;
    int C = b->m->C, F = b->p.F, swiglu = b->m->swiglu;
    if (swiglu) linear_forward(a->gu, u, gate_linear(b));
    linear_forward(a->gu + (swiglu ? F : 0), u, up_linear(b));
    slot_forward(NORM(b, hidden), a->gun, a->gu);
    activation_forward(a->h, a->gun, b->n, F, swiglu);
    real *down = b->p.shared_out.on ? a->sy : y;  // W_down's output
    linear_forward(down, a->h, BIASED(b, wd, C, F, 1));
    slot_forward(NORM(b, shared_out), y, down);
}

static void mlp_backward(const Block *b, real *du, real *dy, const real *u, int add) {
    const Acts *a = &b->a, *d = &b->d;
    int C = b->m->C, F = b->p.F, swiglu = b->m->swiglu;
    real *ddown = slot_backward(NORM(b, shared_out), d->sy, dy, a->sy);
    linear_backward(d->h, ddown, a->h, BIASED(b, wd, C, F, 1), SET);
    activation_backward(d->gun, d->h, a->gun, b->n, F, swiglu);
    slot_backward(NORM(b, hidden), d->gu, d->gun, a->gu);
    linear_backward(du, d->gu + (swiglu ? F : 0), u, up_linear(b), add);
    if (swiglu) linear_backward(du, d->gu, u, gate_linear(b), ADD);
}

// The block as mlp_forward sees it for routed expert e. Its matrices and gains follow those of the
// experts before it; its rows begin at start[e]. Here the fields of the dense and shared ffn (wg,
// hidden, shared_out, gu, h, sy) stand for the expert's own, and xx and xyn begin at its first row.
// Experts have no biases. EXPERT: x's field and its gradient are b's `of` from `offset` on.
#define EXPERT(value, grad, field, of, offset) \
    x.value.field = at(b->value.of, offset), x.grad.field = at(b->grad.of, offset)
static Block expert_block(const Block *b, int e) {
    Block x = *b;
    const Site *hidden = &b->p.expert_hidden, *out = &b->p.expert_out;
    int64_t row = b->a.start[e], C = b->m->C, F = b->m->F, GU = b->m->swiglu ? 2 * F : F;
    int64_t matrix = e * F * C, inner = (int64_t)e * hidden->gains, outer = (int64_t)e * out->gains;
    x.n = b->a.start[e + 1] - row;  // may be 0
    x.p.F = F;
    x.p.hidden = *hidden;
    x.p.shared_out = *out;
    EXPERT(w, dw, wg, xg, matrix);
    EXPERT(w, dw, wu, xu, matrix);
    EXPERT(w, dw, wd, xd, matrix);
    EXPERT(w, dw, hidden_w, expert_hidden_w, inner);
    EXPERT(w, dw, shared_out_w, expert_out_w, outer);
    EXPERT(a, d, gu, xgu, row * GU);
    EXPERT(a, d, gun, xgun, row * GU);
    EXPERT(a, d, h, xh, row * F);
    EXPERT(a, d, sy, xy, row * C);
    EXPERT(a, d, xx, xx, row * C);
    EXPERT(a, d, xyn, xyn, row * C);
    x.a.hidden_rstd = at(b->a.expert_hidden_rstd, row * hidden->groups);
    x.a.shared_out_rstd = at(b->a.expert_out_rstd, row);
    return x;
}

static RouterShape router_shape(const Block *b) {
    const Moe *o = &b->m->moe;
    bool mean = o->losses == LOSSES_MEAN;
    double layer = mean ? 1.0 / moe_layers(b->m) : 1;
    double z = mean ? layer / o->K : layer;
    return (RouterShape){
        .n = b->n, .B = b->s->B, .T = b->s->T, .E = o->E, .K = o->K, .kind = o->router,
        .scale = b->p.gate_scale,
        .balance = layer * o->balance, .sequence = layer * o->sequence, .z = z * o->z,
    };
}

// Mixture of experts: y = sum of gate_e expert_e(u) over a token's top-k, + shared(u).
// Experts run in parallel, each on one thread.
static void moe_forward(const Block *b, real *y, const real *u) {
    const Acts *a = &b->a;
    RouterShape r = router_shape(b);
    int C = b->m->C;
    linear_forward(a->rz, u, LINEAR(b, router, r.E, C, b->p.ffn_c));  // [n, E]
    router_forward(a->gate, a->choice, a->load, a->share, a->rs, a->rlse, a->rz,
                   b->w.router_bias, r);
    router_sort(a->place, a->start, a->choice, r);
    gather_forward(a->xx, u, a->place, r.n, r.K, C);  // [K n, C]
#pragma omp parallel for schedule(dynamic)
    for (int e = 0; e < r.E; e++) {
        Block x = expert_block(b, e);
        if (x.n) mlp_forward(&x, x.a.xyn, x.a.xx);
    }
    if (b->p.F) mlp_forward(b, y, u);  // shared experts
    combine_forward(y, a->xyn, a->gate, a->place, r.n, r.K, C, b->p.F ? ADD : SET);
}

// u is read by the router, the experts and the shared experts: the router SETs or ADDs du, the
// others ADD.
static void moe_backward(const Block *b, real *du, real *dy, const real *u, int add) {
    const Acts *a = &b->a, *d = &b->d;
    RouterShape r = router_shape(b);
    int C = b->m->C;
    combine_backward(d->xyn, d->gate, dy, a->xyn, a->gate, a->place, r.n, r.K, C);
    router_backward(d->rz, d->gate, a->gate, a->choice, a->load, a->rs, a->rz, a->rlse, r,
                    b->dloss);
    linear_backward(du, d->rz, u, LINEAR(b, router, r.E, C, b->p.ffn_c), add);
#pragma omp parallel for schedule(dynamic)
    for (int e = 0; e < r.E; e++) {
        Block x = expert_block(b, e);
        // an expert without tokens still SETs its gradients, to 0
        if (x.n || x.dw_of_linears == SET)
            mlp_backward(&x, x.d.xx, x.d.xyn, x.a.xx, SET);
    }
    combine_forward(du, d->xx, NULL, a->place, r.n, r.K, C, ADD);
    if (b->p.F) mlp_backward(b, du, dy, u, ADD);
}

// ------------------------------------------------------------------------------ sublayer
// One of a block's two residual connections (llmc/modes.h). For attention and ffn alike:
//   u    = in(x)
//   y    = F(c u)                           F: the branch, attention or ffn
//   yn   = out(y)
//   s    = a skip + yn                      nGPT: s = (1 - alpha) skip + alpha yn
//   next = post(s)
// A slot (in, out, post) that the mode leaves empty is the identity.

typedef struct {
    Norm in, out, post;
    int skip;            // OWN: x, NORMED: u, BLOCK: the block's input x0
    real a;
    const real *p;       // [C] nGPT: alpha = 0.05 sqrt(C) |p|; NULL: the skip's factor is a
    real *dp;
    real *u, *du;        // [n, C], as all that follow; read only if `in` is filled
    real *y, *dy;
    real *yn, *dyn;      // only if `out` is filled
    real *s, *ds;        // without post: the output and its gradient
    void (*forward)(const Block *b, real *y, const real *u);
    void (*backward)(const Block *b, real *du, real *dy, const real *u, int add);
} Sublayer;

// The norms and tensors of a sublayer are named after it; x: the first letter of its activations.
#define SUBLAYER(b, sub, x) \
    .in = NORM(b, sub##_in), .out = NORM(b, sub##_out), .post = NORM(b, sub##_post), \
    .skip = (b)->p.row->sub.skip, .a = (b)->p.sub##_a, \
    .p = (b)->w.sub##_p, .dp = (b)->dw.sub##_p, \
    .u = (b)->a.x##i, .du = (b)->d.x##i, .y = (b)->a.x##y, .dy = (b)->d.x##y, \
    .yn = (b)->a.x##o, .dyn = (b)->d.x##o, .s = (b)->a.x##s, .ds = (b)->d.x##s

static Sublayer attn_sublayer(const Block *b) {
    return (Sublayer){
        SUBLAYER(b, attn, a), .forward = attn_branch_forward, .backward = attn_branch_backward};
}

static Sublayer ffn_sublayer(const Block *b) {
    return (Sublayer){
        SUBLAYER(b, ffn, f),
        .forward = b->p.moe ? moe_forward : mlp_forward,
        .backward = b->p.moe ? moe_backward : mlp_backward,
    };
}

// The skip connection's tap: the sublayer's input x, u = in(x), or the block's input x0.
// The same for their gradients.
static real *sublayer_skip(Sublayer f, real *x, real *u, real *x0) {
    if (f.skip == OWN) return x;
    return f.skip == NORMED ? u : x0;
}

// nGPT's residual (eq 10-11): s = skip + alpha (y - skip), alpha_i = 0.05 sqrt(C) |p_i|.
// The parameter p starts at 1/sqrt(C), so alpha starts at 0.05. Below, y stands for the yn of
// Sublayer.
static real alpha_of(real p, int C) { return (real)(0.05 * sqrt(C)) * (p < 0 ? -p : p); }

//   s, skip, y [n, C]   p [C]
static void interpolate_forward(real *s, const real *skip, const real *y, const real *p, int64_t n,
                                int C) {
#pragma omp parallel for
    for (int64_t t = 0; t < n; t++)
        for (int64_t i = 0; i < C; i++)
            s[t * C + i] =
                skip[t * C + i] + alpha_of(p[i], C) * (y[t * C + i] - skip[t * C + i]);
}

// dskip += (1 - alpha) ds    dy = alpha ds    dp += 0.05 sqrt(C) sign(p) sum_t ds (y - skip)
static void interpolate_backward(real *dskip, real *dy, real *dp, const real *ds, const real *skip,
                                 const real *y, const real *p, int64_t n, int C) {
#pragma omp parallel for
    for (int i0 = 0; i0 < C; i0 += STRIP) {
        int64_t i1 = least(C, i0 + STRIP);
        real sum[STRIP] = {0};
        for (int64_t t = 0; t < n; t++)
            for (int64_t i = i0; i < i1; i++) {
                real alpha = alpha_of(p[i], C), d = ds[t * C + i];
                dskip[t * C + i] += (1 - alpha) * d;
                dy[t * C + i] = alpha * d;
                sum[i - i0] += d * (y[t * C + i] - skip[t * C + i]);
            }
        for (int i = i0; i < i1; i++)
            dp[i] += (real)(0.05 * sqrt(C)) * (p[i] < 0 ? -sum[i - i0] : sum[i - i0]);
    }
}

//   x, x0, next [n, C]: the sublayer's input, the block's input, the output
static void sublayer_forward(const Block *b, Sublayer f, real *next, real *x, real *x0) {
    real *u = slot_forward(f.in, f.u, x);
    f.forward(b, f.y, u);
    const real *yn = slot_forward(f.out, f.yn, f.y);
    const real *skip = sublayer_skip(f, x, u, x0);
    real *s = f.s;  // without post it is next
    if (f.p) interpolate_forward(s, skip, yn, f.p, b->n, b->m->C);
    else {
#pragma omp parallel for simd
        for (int64_t i = 0; i < b->n * b->m->C; i++) s[i] = f.a * skip[i] + yn[i];
    }
    slot_forward(f.post, next, s);
}

// dx and dx0 are gradients of the residual stream: ADD. dnext is already complete.
static void sublayer_backward(const Block *b, Sublayer f, real *dx, real *dx0, real *dnext,
                              real *x) {
    real *ds = slot_backward(f.post, f.ds, dnext, f.s), *dyn = ds;
    real *u = f.in.site.on ? f.u : x;       // what F read
    real *du = f.in.site.on ? f.du : dx;
    if (f.p) {  // nGPT fills out and post, and its skip is x; yn was not kept
        slot_forward(f.out, f.yn, f.y);
        dyn = f.dyn;
        interpolate_backward(dx, dyn, f.dp, ds, x, f.yn, f.p, b->n, b->m->C);
    }
    real *dy = slot_backward(f.out, f.dy, dyn, f.y);
    f.backward(b, du, dy, u, f.in.site.on ? SET : ADD);
    real *dskip = sublayer_skip(f, dx, du, dx0);  // the skip's gradient, ADDed where it was tapped
    if (!f.p) {
#pragma omp parallel for simd
        for (int64_t i = 0; i < b->n * b->m->C; i++) dskip[i] += f.a * ds[i];
    }
    if (f.in.site.on) norm_backward(dx, du, x, f.in, ADD);  // otherwise du is dx
}

// The residual stream: x, then a.mid between the sublayers, then a.x.
static void block_forward(const Block *b, real *x) {
    sublayer_forward(b, attn_sublayer(b), b->a.mid, x, x);
    sublayer_forward(b, ffn_sublayer(b), b->a.x, b->a.mid, x);
}

// dx: gradient of the block's input. d.x, that of its output, is already complete.
static void block_backward(const Block *b, real *dx, real *x) {
    // both sublayers ADD to these
    zero(dx, b->n * b->m->C);
    zero(b->d.mid, b->n * b->m->C);
    sublayer_backward(b, ffn_sublayer(b), b->d.mid, dx, b->d.x, b->a.mid);
    sublayer_backward(b, attn_sublayer(b), dx, dx, b->d.mid, x);
}

// --recompute cheap: recomputes the activations that have a `cheap` buffer (tensors.h): outputs of
// the `in` norms and of activation functions, and the inputs of experts.
static void block_recompute(const Block *b, real *x) {
    const Acts *a = &b->a;
    const Model *m = b->m;
    slot_forward(NORM(b, attn_in), a->ai, x);
    slot_forward(NORM(b, ffn_in), a->fi, a->mid);
    if (b->p.F) activation_forward(a->h, a->gun, b->n, b->p.F, m->swiglu);
    if (!b->p.moe) return;
    gather_forward(a->xx, a->fi, a->place, b->n, m->moe.K, m->C);
    activation_forward(a->xh, a->xgun, b->n * m->moe.K, m->F, m->swiglu);
}

// ------------------------------------------------------------------------------ statistics
// Statistics of layers (LayerStats in llmc/run/trainer.h) are sums over tokens, in double. Sums
// over whole tensors are made of fixed pieces, added in order.

// sum of x^2
static double squares(const real *x, int64_t size) {
    double piece[PIECES], total = 0;
#pragma omp parallel for
    for (int64_t k = 0; k < PIECES; k++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = size * k / PIECES; i < size * (k + 1) / PIECES; i++)
            sum += (double)x[i] * x[i];
        piece[k] = sum;
    }
    for (int k = 0; k < PIECES; k++) total += piece[k];
    return total;
}

// Adds a router's losses to *loss, and the tokens of its experts to loads [E], which gpt_zero_grads
// zeroes. stats [router_size] gets losses without coefficients, entropy and tokens; NULL: nothing.
static void router_count(const Block *b, double *loss, double *stats) {
    RouterShape r = router_shape(b);
    const Acts *a = &b->a;
    const real *load_all = a->load + r.B * r.E;  // of all sequences
    double sums[ROUTER_SUMS] = {0};           // losses without coefficients (see "router")
    for (int j = 0; j < r.E; j++) {
        double share = 0;  // mean over the sequences
        for (int i = 0; i < r.B; i++) {
            real load = a->load[i * r.E + j], share_b = a->share[i * r.E + j];
            share += (double)share_b / r.B;
            sums[ROUTER_SEQUENCE] += (double)r.E / r.K / r.T / r.B * load * share_b;
        }
        sums[ROUTER_BALANCE] += (double)r.E / r.K / r.n * load_all[j] * share;
        a->loads[j] += load_all[j];
    }
    for (int64_t t = 0; t < r.n; t++) sums[ROUTER_Z] += (double)a->rlse[t] * a->rlse[t] / r.n;
    *loss += r.n * (r.balance * sums[ROUTER_BALANCE] + r.sequence * sums[ROUTER_SEQUENCE] +
                    r.z * sums[ROUTER_Z]);
    if (!stats) return;
    for (int i = 0; i < ROUTER_SUMS; i++) stats[i] += sums[i] * r.n;
    for (int j = 0; j < r.E; j++) stats[ROUTER_SUMS + j] += load_all[j];
    for (int64_t t = 0; t < r.n; t++) {
        const real *s_t = a->rs + t * r.E;
        double sum = 0;
        for (int j = 0; j < r.E; j++) sum += s_t[j];
        for (int j = 0; j < r.E; j++) {  // entropy = - sum p log p
            double p = s_t[j] / sum;
            stats[ROUTER_ENTROPY] -= p > 0 ? p * log(p) : 0;
        }
    }
}

// Adds the squares of a sublayer's branch to sums[0], those of its skip to sums[1].
//   x, x0 as in sublayer_forward
static void sublayer_stats(const Block *b, Sublayer f, double sums[2], real *x, real *x0) {
    int C = b->m->C;
    int64_t values = b->n * C;
    const real *skip = sublayer_skip(f, x, f.in.site.on ? f.u : x, x0);
    const real *yn = f.out.site.on ? f.yn : f.y;
    if (!f.p) {
        sums[0] += squares(yn, values);
        sums[1] += (double)f.a * f.a * squares(skip, values);
        return;
    }
    for (int64_t k = 0; k < values; k++) {  // nGPT: alpha yn and (1 - alpha) skip
        double alpha = alpha_of(f.p[k % C], C);
        sums[0] += alpha * yn[k] * alpha * yn[k];
        sums[1] += (1 - alpha) * skip[k] * (1 - alpha) * skip[k];
    }
}

// Runs after block_forward, while the buffers still hold this layer.
static void block_stats(const Block *b, LayerStats *stats, real *x0) {
    LayerSums *sums = &stats->sums;
    int64_t rows = b->n * b->m->NH;
    sublayer_stats(b, attn_sublayer(b), &sums->squares[ATTN_BRANCH], x0, x0);
    sublayer_stats(b, ffn_sublayer(b), &sums->squares[FFN_BRANCH], b->a.mid, x0);
    sums->squares[STREAM] += squares(b->a.x, b->n * b->m->C);
    stats->tokens += b->n;
    for (int64_t i = 0; i < rows; i++)  // NaN stays
        if (b->a.peak[i] > sums->logit || isnan(b->a.peak[i])) sums->logit = b->a.peak[i];
}

// ------------------------------------------------------------------------------ the model

struct Gpt {
    Model m;
    Sizes max;                    // the micro-batch that memory was allocated for
    Sizes now;                    // the current micro-batch
    Layout layout;                // llmc/memory.h: where each parameter lies in its arena
    ActLayout act_layout;
    real *tensors[TENSOR_KINDS];  // arenas of weights, gradients and moments
    real *muon;                   // Muon's scratch (layout_muon_scratch)
    real *acts, *grads;           // arenas of activations and of their gradients
    real *rotary;                 // rope_table of all positions; NULL with learned positions
    int32_t *inputs, *targets;    // [n]
    Documents documents;          // --mask-documents
    int32_t *begins;              // [n] where each token's document begins; NULL: no mask
    int recompute;
    int dw_of_linears;            // SET until the first backward of a step has ended, then ADD
    real z_loss;                  // coefficient
    double ce, z, router;         // sums of losses over the tokens since the last gpt_means
    int64_t seen;                 // number of these tokens
    real *kv_cache;               // k and v of one text, layer by layer; allocated by decode
    int cached;                   // positions in the KV cache, computed with the present weights
    bool decoding;                // the current forward reads and fills the KV cache
    int cached_before;            // positions in the KV cache before this forward (decoding)
    bool measuring;               // since stats_begin
    LayerStats *layer_stats;      // [L]
    double *router_sums;          // [L, router_size] the sums that layer_stats point to
    double *bias_steps;           // [E] scratch of router_steps
    TensorStats *tensor_stats;    // [entries]
    Update last;                  // the result of the last update
    Comm *comm;
    int rank, processes;
};

// Layer l: pointers into the arenas, for the current micro-batch.
static Block gpt_block(const Gpt *g, int l) {
    const Model *m = &g->m;
    KvCache cache = kv_cache_view(m, g->decoding ? g->kv_cache : NULL, g->max.T, l,
                                  g->cached_before);
    return (Block){
        .m = m, .s = &g->now, .n = g->now.n, .p = layer_mode(m, l),
        .w = params_view(&g->layout, g->tensors[WEIGHTS], l),
        .dw = grads_view(&g->layout, g->tensors[GRADS], l),
        .a = acts_view(g->act_layout.act, g->acts, l),
        .d = acts_view(g->act_layout.grad, g->grads, l),
        .cache = cache, .rotary = at(g->rotary, (int64_t)cache.cached * rotary_size(m)),
        .dw_of_linears = g->dw_of_linears,
        .begins = g->decoding ? NULL : g->begins,
    };
}

// Positions of the embedding count from the document's start (--restart-positions), or from 0.
static const int32_t *restarts(const Gpt *g, const Block *b) {
    return g->documents.restart ? b->begins : NULL;
}

// Allocates everything that training needs; only decode allocates later.
static Gpt *gpt_create(const Model *m, const Setup *setup) {
    Gpt *g = check_alloc(sizeof *g, "the model");
    g->m = *m;
    g->recompute = setup->recompute;
    g->z_loss = setup->z_loss;
    g->now = g->max = sizes_make(m, setup, omp_get_max_threads(), 1);
    g->comm = setup->comm;
    g->rank = comm_rank(g->comm);
    g->processes = comm_size(g->comm);
    g->layout = setup_layout(m, setup);
    g->act_layout = act_layout_make(m, &g->max);
    for (int kind = 0; kind < setup_kinds(setup); kind++)
        g->tensors[kind] = check_alloc(arena_size(&g->layout, kind) * sizeof(real),
                                       "parameters, gradients and moments");
    int64_t scratch = setup->training ? layout_muon_scratch(&g->layout, false) : 0;
    g->muon = check_alloc(scratch * sizeof(real), "Muon's scratch");
    g->acts = check_alloc(g->act_layout.acts * sizeof(real), "the activations");
    if (setup->training)
        g->grads = check_alloc(g->act_layout.grads * sizeof(real), "the gradients of activations");
    if (m->rope) {
        g->rotary = check_alloc(sizeof(real) * g->max.T * rotary_size(m), "the rotary angles");
        rope_table(g->rotary, g->max.T, m);
    }
    g->documents = setup->documents;
    int arrays = g->documents.mask ? 3 : 2;
    g->inputs = check_alloc(sizeof *g->inputs * arrays * g->max.n, "inputs and targets");
    g->targets = g->inputs + g->max.n;
    if (g->documents.mask) g->begins = g->targets + g->max.n;
    const char *what = "statistics";
    g->layer_stats = check_alloc(m->L * sizeof *g->layer_stats, what);
    g->router_sums = check_alloc((m->L + 1) * router_size(m) * sizeof(double), what);
    g->bias_steps = g->router_sums + m->L * router_size(m);
    g->tensor_stats = check_alloc(g->layout.count * sizeof *g->tensor_stats, what);
    return g;
}

static void gpt_destroy(Gpt *g) {
    for (int kind = 0; kind < TENSOR_KINDS; kind++) free(g->tensors[kind]);
    free(g->muon);
    free(g->acts);
    free(g->grads);
    free(g->rotary);
    free(g->inputs);
    free(g->kv_cache);
    free(g->layer_stats);
    free(g->router_sums);
    free(g->tensor_stats);
    layout_free(&g->layout);
    free(g->act_layout.act);
    free(g);
}

// Runs the tokens through all blocks. Returns the residual stream out of the last one, [B, T, C].
// counted: the routers' losses count (a forward with targets, not a decode).
static real *blocks_forward(Gpt *g, const int32_t *inputs, int B, int T, bool counted) {
    const Model *m = &g->m;
    sizes_set(&g->now, &g->max, B, T);
    memcpy(g->inputs, inputs, g->now.n * sizeof *inputs);  // backward needs them
    if (g->begins) documents_find(g->begins, NULL, inputs, B, T, g->documents.separator);
    Block b = gpt_block(g, 0);
    const real *wpe = at(b.w.wpe, (int64_t)b.cache.cached * m->C);
    embedding_forward(b.a.raw, g->inputs, b.w.wte, wpe, restarts(g, &b), B * T, T, m->C,
                      m->emb_scale);
    real *x = slot_forward(NORM(&b, emb), b.a.e, b.a.raw);
    for (int l = 0; l < m->L; l++) {
        b = gpt_block(g, l);
        block_forward(&b, x);
        LayerStats *stats = g->measuring ? &g->layer_stats[l] : NULL;
        if (b.p.moe && counted) router_count(&b, &g->router, stats ? stats->router : NULL);
        if (stats && !g->decoding) block_stats(&b, stats, x);
        x = b.a.x;
    }
    return x;
}

// The LM head's matrix is the embedding's (tied), or its own.
static Linear lm_head_linear(const Block *b) {
    if (b->m->tied) return LINEAR(b, wte, b->m->Vp, b->m->C, 1);
    return LINEAR(b, wlm, b->m->Vp, b->m->C, 1);
}

// logits [n, Vp] = s_z * W_head N_fin(x), for the current rows. s_z: only nGPT. Returns the last
// layer's activations, which hold the logits.
static Acts lm_head_forward(Gpt *g, real *x) {
    Block b = gpt_block(g, g->m.L - 1);
    x = slot_forward(NORM(&b, fin), b.a.fx, x);
    linear_forward(b.a.z, x, lm_head_linear(&b));
    slot_forward(logits_gain(&b), b.a.logits, b.a.z);
    return b.a;
}

// Logits, and with targets the losses of B T tokens, added to the sums.
static void gpt_forward(Gpt *g, const int32_t *inputs, const int32_t *targets, int B, int T) {
    const Model *m = &g->m;
    Acts a = lm_head_forward(g, blocks_forward(g, inputs, B, T, targets != NULL));
    if (!targets) return;
    int n = g->now.n;
    memcpy(g->targets, targets, n * sizeof *targets);
    crossentropy_forward(a.losses, a.logsum, a.logits, g->targets, n, m->V, m->Vp);
    for (int i = 0; i < n; i++) {
        g->ce += (double)a.losses[i];
        g->z += (double)g->z_loss * a.logsum[i] * a.logsum[i];
    }
    g->seen += n;
}

// The new tokens go through the same blocks as in gpt_forward; only attention and positions see
// the tokens before, through the KV cache (kv_cache_fill).
static void gpt_decode(Gpt *g, const int32_t *inputs, int n, int position) {
    const Model *m = &g->m;
    int T = g->max.T;
    decode_check(n, position, g->cached, T);
    if (!g->kv_cache)
        g->kv_cache = check_alloc(sizeof(real) * m->L * T * kv_cache_width(m), "the KV cache");
    g->decoding = true;  // gpt_block hands out the KV cache
    g->cached_before = position;
    real *x = blocks_forward(g, inputs, 1, n, false);
    sizes_set(&g->now, &g->max, 1, 1);  // logits of only the last token
    lm_head_forward(g, x + (int64_t)(n - 1) * m->C);
    g->cached = position + n;
    g->decoding = false;
}

// All-reduces the sums of losses, and with them this process's sum of squared gradients. Returns
// means over the tokens of all processes and the norm, and begins new sums.
static Update gpt_means(Gpt *g, double square) {
    double sums[] = {g->ce, g->z, g->router, (double)g->seen, square};
    comm_all_reduce(g->comm, sums, 5, COMM_SUM);
    double n = sums[3] > 0 ? sums[3] : 1;
    g->ce = g->z = g->router = 0;
    g->seen = 0;
    return (Update){{sums[0] / n, sums[1] / n, sums[2] / n}, sqrt(sums[4]), 0};
}

static Loss gpt_loss(Gpt *g) { return gpt_means(g, 0).loss; }

// ZeRO-1: reduces each shard of a tensor to the process that owns it, or broadcasts it from there.
static void shards_start(Gpt *g, int how, int kind, const Entry *e) {
    for (int rank = 0; rank < g->processes; rank++) {
        Part own = entry_part(e, rank, g->processes);
        real *shard = g->tensors[kind] + e->offset + own.first;
        comm_start(g->comm, how, shard, own.size, sizeof(real), rank);
    }
}

// Called when the gradients of layer l (-1: of the model) are complete.
static void reduce_gradients(Gpt *g, int l) {
    for (const Entry *e = g->layout.entries; e < g->layout.end; e++)
        if (e->layer == l && !entry_is_common(e)) shards_start(g, COMM_REDUCE, GRADS, e);
    comm_poke(g->comm);  // MPI makes progress only inside its calls
}

// Mirrors gpt_forward: head, blocks from the last to the first, embedding.
// last: the step's last micro-batch, whose gradients are reduced over processes on the way.
static void gpt_backward(Gpt *g, double scale, int last) {
    const Model *m = &g->m;
    int n = g->now.n;
    bool reducing = last && g->processes > 1;
    Block b = gpt_block(g, m->L - 1);
    // LM head backward: cross-entropy, s_z, W_head, final norm
    crossentropy_backward(b.a.logits, b.a.logsum, g->targets, n, m->V, m->Vp, scale, g->z_loss);
    real *dlogits = slot_backward(logits_gain(&b), b.d.z, b.a.logits, b.a.z);
    linear_backward(b.d.fx, dlogits, b.a.fx, lm_head_linear(&b), SET);
    slot_backward(NORM(&b, fin), b.d.x, b.d.fx, b.a.x);
    for (int l = m->L - 1; l >= 0; l--) {
        Block below = gpt_block(g, l > 0 ? l - 1 : 0);
        real *in = l > 0 ? below.a.x : b.a.e, *din = l > 0 ? below.d.x : b.d.e;
        b.dloss = scale * n;  // the router's losses are means over the micro-batch
        // --recompute: recomputes the activations that were not kept
        if (g->recompute == RECOMPUTE_ON) block_forward(&b, in);
        if (g->recompute == RECOMPUTE_CHEAP) block_recompute(&b, in);
        block_backward(&b, din, in);
        if (reducing) reduce_gradients(g, l);
        b = below;
    }
    slot_backward(NORM(&b, emb), b.d.raw, b.d.e, b.a.raw);
    embedding_backward(b.dw.wte, b.dw.wpe, b.d.raw, g->inputs, restarts(g, &b), n, g->now.T, m->C,
                       m->emb_scale);
    if (reducing) reduce_gradients(g, -1);
    g->dw_of_linears = ADD;
}

static void *gpt_tensor(Gpt *g, int kind, const Entry *e) {
    return at(g->tensors[kind], entry_place(e, kind));
}

// Begins a step.
static void gpt_zero_grads(Gpt *g) {
    for (const Entry *e = g->layout.entries; e < g->layout.end; e++)
        if (!entry_is_linear(&g->m, e)) zero(gpt_tensor(g, GRADS, e), e->size);
    g->dw_of_linears = SET;
    for (int l = 0; l < g->m.L; l++) {
        Block b = gpt_block(g, l);
        if (b.p.moe) zero(b.a.loads, g->m.moe.E);
    }
}

// The tensors are in the host's memory: there is nothing to copy.
static void gpt_fetch(Gpt *g, int kind) { (void)g, (void)kind; }

// New weights make the KV cache stale.
static void gpt_store(Gpt *g, int kind, int64_t step) {
    (void)kind, (void)step;
    g->cached = 0;
}

// [V], where the last lm_head_forward left them
static const void *gpt_logits(Gpt *g, int64_t row) {
    return gpt_block(g, 0).a.logits + row * g->m.Vp;
}

static void gpt_stats_begin(Gpt *g) {
    int64_t L = g->m.L, size = router_size(&g->m);
    g->measuring = true;
    memset(g->router_sums, 0, L * size * sizeof(double));
    for (int l = 0; l < L; l++)
        g->layer_stats[l] =
            (LayerStats){.sums.logit = -INFINITY, .router = g->router_sums + l * size};
}

static LayerStats *gpt_layer_stats(Gpt *g) {
    g->measuring = false;
    return g->layer_stats;
}

// ------------------------------------------------------------------------------ update
// Shared by AdamW and Muon: nGPT's rows, the router's bias, the gradient's norm, shards.

// nGPT: after every step each row (or column) of a matrix is divided by its length.
static void gpt_normalize(Gpt *g) {
    for (const Entry *e = g->layout.entries; e < g->layout.end; e++) {
        real *w = gpt_tensor(g, WEIGHTS, e);
        EntryLines s = entry_lines(&g->m, e);
        if (!s.length) continue;
#pragma omp parallel for
        for (int64_t i = 0; i < e->size / s.length; i++) {
            // row i, or column i % stride of matrix i / stride
            real *line = w + i / s.stride * s.length * s.stride + i % s.stride;
            real square = 0;
            for (int64_t j = 0; j < s.length; j++)
                square += line[j * s.stride] * line[j * s.stride];
            if (square == 0) continue;  // padding of the vocabulary
            real length = sqrt(square);
            for (int64_t j = 0; j < s.length; j++) line[j * s.stride] /= length;
        }
    }
}

// The router's selection bias moves by a fixed step towards an even load (Wang et al. 2024;
// DeepSeek-V3 section 2.1.2): b_e += rate sign(mean load - load_e), with the loads of layer l in
// this step, over all processes. Returns the steps [E].
static const double *router_steps(Gpt *g, int l, real rate) {
    int E = g->m.moe.E;
    const real *loads = gpt_block(g, l).a.loads;
    double *step = g->bias_steps, sum = 0;
    for (int j = 0; j < E; j++) step[j] = loads[j];
    comm_all_reduce(g->comm, step, E, COMM_SUM);
    for (int j = 0; j < E; j++) sum += step[j];
    for (int j = 0; j < E; j++) step[j] = rate * ((step[j] * E < sum) - (step[j] * E > sum));
    return step;
}

// The sum of squares of the gradients that this process owns, tensor by tensor. A single process
// owns the whole arena: one parallel sum.
static double gpt_square(const Gpt *g) {
    const real *grads = g->tensors[GRADS];
    if (g->processes == 1) return squares(grads, g->layout.total);
    double sum = 0;
    for (const Entry *e = g->layout.entries; e < g->layout.end; e++) {
        Part own = entry_part(e, g->rank, g->processes);
        sum += squares(grads + e->offset + own.first, own.size);
    }
    return sum;
}

// The shard of one tensor that this process owns and updates (ZeRO-1), and how an update treats it.
// With a single process it is the whole tensor.
typedef struct {
    int64_t size;
    real *w, *d;                // weights, gradient
    real *m, *v;                // AdamW's moments; m is Muon's momentum
    double lr, decay;
    int matrices, rows, cols;   // Muon's, and their shape; 0: AdamW updates the tensor
    double target;              // gains decay towards it
    double correct1, correct2;  // 1 / (1 - beta^step), because the moments start at 0
} TensorShard;

static TensorShard tensor_shard(Gpt *g, const Entry *e, const Optimizer *o) {
    Part own = entry_part(e, g->rank, g->processes);
    return (TensorShard){
        .size = own.size, .matrices = own.size ? e->muon : 0,
        .rows = e->muon ? e->row.rows / e->muon : 0, .cols = e->row.cols,
        .w = at(gpt_tensor(g, WEIGHTS, e), own.first),
        .d = at(gpt_tensor(g, GRADS, e), own.first),
        .m = gpt_tensor(g, ADAM_M, e), .v = gpt_tensor(g, ADAM_V, e),
        .lr = e->muon ? o->muon_lr : o->lr[e->row.lr], .decay = o->decay[e->row.decay],
        .target = e->row.role == ROLE_GAIN ? o->gain_target : 0,
        .correct1 = 1 / (1 - pow(o->beta1, o->step)), .correct2 = 1 / (1 - pow(o->beta2, o->step)),
    };
}

// ------------------------------------------------------------------------------ AdamW

// AdamW (Loshchilov, Hutter 2019), with g the clipped gradient:
//   m = b1 m + (1 - b1) g      mhat = m / (1 - b1^step)
//   v = b2 v + (1 - b2) g^2    vhat = v / (1 - b2^step)
//   w -= lr (mhat / (sqrt(vhat) + eps) + decay (w - target))
// clip_factor: gradient clipping's factor for every gradient, at most 1
static void adamw_update(TensorShard s, const Optimizer *o, real clip_factor) {
    real lr = s.lr, decay = s.decay, target = s.target, b1 = o->beta1, b2 = o->beta2, eps = o->eps;
    real correct1 = s.correct1, correct2 = s.correct2;
#pragma omp parallel for simd
    for (int64_t i = 0; i < s.size; i++) {
        real grad = clip_factor * s.d[i];
        s.m[i] = b1 * s.m[i] + (1 - b1) * grad;
        s.v[i] = b2 * s.v[i] + (1 - b2) * grad * grad;
        real adam = s.m[i] * correct1 / ((real)sqrt(s.v[i] * correct2) + eps);
        s.w[i] -= lr * (adam + decay * (s.w[i] - target));
    }
}

// ------------------------------------------------------------------------------ Muon
// Muon (Jordan et al. 2024) for a matrix of a block, with g the clipped gradient:
//   m = mu m + (1 - mu) g     u = (1 - mu) g + mu m         Nesterov momentum
//   x = u / |u|                                             |u|: Frobenius norm
//   5 times:  s = x x^T       x = a x + (b s + c s s) x     Newton-Schulz iteration
//   w -= lr (scale x + decay w)                             scale: muon_scale (run/trainer.h)
// The iteration brings singular values of x above 0.0015 to between 0.68 and 1.2, so x is close to
// the nearest matrix with orthonormal rows; smaller ones grow 485 times. A matrix with more rows
// than columns has s = x^T x and x = a x + x (b s + c s s), which is the same for its transpose.
//   w, m, g, u, x [rows, cols]     s [k, k], k the smaller of rows and cols

static const real MUON_A = 3.4445, MUON_B = -4.7750, MUON_C = 2.0315;  // Jordan's coefficients
enum { MUON_ITERATIONS = 5 };

// y = factor x
static void scale_to(real *y, const real *x, real factor, int64_t size) {
#pragma omp parallel for simd if (size > 1 << 16)
    for (int64_t i = 0; i < size; i++) y[i] = factor * x[i];
}

// The iteration. Scratch: y as large as x, s and p [k, k]. Returns the last x, in x or y.
static real *newton_schulz(real *x, real *y, real *s, real *p, int64_t rows, int64_t cols) {
    bool tall = rows > cols;
    int64_t k = tall ? cols : rows;
    View S = view(s, k), P = view(p, k);
    for (int i = 0; i < MUON_ITERATIONS; i++) {
        View X = view(x, cols), Y = view(y, cols);
        if (tall) gemm(S, transpose(X), X, k, k, rows, 1, false);
        else gemm(S, X, transpose(X), k, k, cols, 1, false);
        scale_to(p, s, MUON_B, k * k);
        gemm(P, S, S, k, k, k, MUON_C, true);
        scale_to(y, x, MUON_A, rows * cols);
        if (tall) gemm(Y, X, P, rows, cols, k, 1, true);
        else gemm(Y, P, X, rows, cols, k, 1, true);
        real *last = x;
        x = y;
        y = last;
    }
    return x;
}

// Computes x of matrix i of a shard, in scratch. advance: adds the gradient to m first; false: m
// has it already.
static const real *muon_direction(TensorShard s, int i, real *scratch, real mu, real clip_factor,
                                  bool advance) {
    int64_t size = (int64_t)s.rows * s.cols, k = least(s.rows, s.cols);
    real *m = s.m + i * size, *d = s.d + i * size, *x = scratch, *y = x + size;
#pragma omp parallel for simd
    for (int64_t j = 0; j < size; j++) {
        real grad = clip_factor * d[j];
        if (advance) m[j] = mu * m[j] + (1 - mu) * grad;
        x[j] = (1 - mu) * grad + mu * m[j];
    }
    scale_to(x, x, 1 / fmax(sqrt(squares(x, size)), 1e-7), size);
    return newton_schulz(x, y, y + size, y + size + k * k, s.rows, s.cols);
}

static void muon_update(TensorShard s, const Optimizer *o, real clip_factor, real *scratch) {
    real decay = s.decay, lr = s.lr, scale = muon_scale(o, s.rows, s.cols);
    int64_t size = (int64_t)s.rows * s.cols;
    for (int i = 0; i < s.matrices; i++) {
        const real *x = muon_direction(s, i, scratch, o->momentum, clip_factor, true);
        real *w = s.w + i * size;
#pragma omp parallel for simd
        for (int64_t j = 0; j < size; j++) w[j] -= lr * (scale * x[j] + decay * w[j]);
    }
}

// ------------------------------------------------------------------------------ a step

// The factor of gradient clipping by the global norm.
static real clip_factor_of(const Optimizer *o, double norm) {
    return o->clip > 0 && norm > o->clip ? o->clip / norm : 1;
}

// One step: gradient clipping by the global norm, then AdamW or Muon on the shards of this process.
// Nothing changes if the loss or the gradient is not finite or exceeds a limit of --skip-spikes.
static void gpt_update(Gpt *g, const Optimizer *o) {
    comm_wait(g->comm);  // for the gradients that are being reduced
    Update u = gpt_means(g, gpt_square(g));
    u.applied = loss_is_finite(u.loss) && isfinite(u.norm) &&
                (!o->max_ce || u.loss.ce <= o->max_ce) &&
                (!o->max_norm || u.norm <= o->max_norm);
    g->last = u;
    if (!u.applied) return;
    g->cached = 0;  // the KV cache is stale
    real clip_factor = clip_factor_of(o, u.norm);
    for (const Entry *e = g->layout.entries; e < g->layout.end; e++) {
        real *w = gpt_tensor(g, WEIGHTS, e);
        if (entry_is_common(e)) {  // the selection bias
            const double *step = router_steps(g, e->layer, o->lr[LR_BALANCE]);
            for (int i = 0; i < e->size; i++) w[i] += (real)step[i];
            continue;
        }
        TensorShard shard = tensor_shard(g, e, o);
        if (e->muon) muon_update(shard, o, clip_factor, g->muon);
        else adamw_update(shard, o, clip_factor);
        // all-gather: each shard goes from its owner to all others
        if (g->processes > 1) shards_start(g, COMM_BROADCAST, WEIGHTS, e);
    }
    comm_wait(g->comm);  // for the weights of all shards
    gpt_normalize(g);
}

static Update gpt_outcome(Gpt *g) { return g->last; }

// Sums of squares of one shard, after the step. The step is recomputed: AdamW's from the moments,
// Muon's from the momentum and the gradient.
//   move = mhat / (sqrt(vhat) + eps)                   Muon: scale times the orthogonal matrix
//   before = (w + lr (move - decay target)) / (1 - lr decay)
//   step = lr (move + decay (before - target))
// nGPT's matrices have been normalized since: their w stands in for before, of the same length.
static TensorStats shard_stats(Gpt *g, const Entry *e, const Optimizer *o) {
    TensorShard s = tensor_shard(g, e, o);
    bool normalized = entry_lines(&g->m, e).length > 0;
    double scale = e->muon ? muon_scale(o, s.rows, s.cols) : 0;
    int64_t size = e->muon ? (int64_t)s.rows * s.cols : s.size;  // Muon: matrix by matrix
    TensorStats sums = {0, 0, 0};
    for (int64_t first = 0; first < s.size; first += size) {
        const real *x = s.w + first;
        // A step that was not applied has the rate 0, and its gradient may not be finite.
        if (e->muon && s.lr > 0)
            x = muon_direction(s, first / size, g->muon, o->momentum,
                               clip_factor_of(o, g->last.norm), false);
        for (int64_t j = 0, i = first; j < size; j++, i++) {
            double move = e->muon ? scale * x[j]
                                  : s.m[i] * s.correct1 / (sqrt(s.v[i] * s.correct2) + o->eps);
            double before = (s.w[i] + s.lr * (move - s.decay * s.target)) / (1 - s.lr * s.decay);
            if (normalized) before = s.w[i];
            double step = s.lr * (move + s.decay * (before - s.target));
            sums.grad += (double)s.d[i] * s.d[i];
            sums.weight += before * before;
            sums.update += step * step;
        }
    }
    return sums;
}

// The same sums for a selection bias, which has no gradient: process 0 alone returns them.
static TensorStats balance_stats(Gpt *g, const Optimizer *o, const Entry *e) {
    const double *step = router_steps(g, e->layer, o->lr[LR_BALANCE]);
    const real *w = gpt_tensor(g, WEIGHTS, e);
    TensorStats sums = {0, 0, 0};
    if (g->rank) return sums;
    for (int i = 0; i < e->size; i++) {
        double before = w[i] - step[i];
        sums.weight += before * before;
        sums.update += step[i] * step[i];
    }
    return sums;
}

// o: the settings of the last update.
static TensorStats *gpt_tensor_stats(Gpt *g, const Optimizer *o) {
    TensorStats *stats = g->tensor_stats;
#pragma omp parallel for schedule(dynamic)
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        if (!e->muon) stats[k] = shard_stats(g, e, o);
    }
    for (int k = 0; k < g->layout.count; k++) {  // products and all-reduces: not in threads
        const Entry *e = &g->layout.entries[k];
        if (entry_is_common(e)) stats[k] = balance_stats(g, o, e);
        if (e->muon) stats[k] = shard_stats(g, e, o);
    }
    return stats;
}

// An eighth more than the tables: batches, texts, a tensor on its way to a file, pages of the data.
static double gpt_bytes(const Model *m, const Setup *setup, double tables) {
    (void)m, (void)setup;
    return tables * 9 / 8;
}

// Free memory, divided among the processes of this machine.
static double gpt_free_bytes(const Model *m, const Setup *setup) {
    (void)m;
    return free_memory("", comm_local_size(setup->comm));
}

// Unknown in double, whose products are three loops.
static double gpt_peak(void) {
    return sizeof(real) == 4 ? peak_products(0.05) : 0;  // seconds
}

// ------------------------------------------------------------------------------ main

const Trainer NAMED(judge_, PREC) = {
    .device = "cpu", .precision = QUOTED(PREC), .mode = &MODES[NORM_MODE], .commit = GIT_HASH,
    .element = sizeof(real), .storage = sizeof(real),
    .create = gpt_create, .destroy = gpt_destroy,
    .tensor = gpt_tensor, .fetch = gpt_fetch, .store = gpt_store, .normalize = gpt_normalize,
    .zero_grads = gpt_zero_grads, .forward = gpt_forward, .backward = gpt_backward,
    .update = gpt_update, .outcome = gpt_outcome, .loss = gpt_loss,
    .decode = gpt_decode, .logits = gpt_logits,
    .stats_begin = gpt_stats_begin, .layer_stats = gpt_layer_stats,
    .tensor_stats = gpt_tensor_stats,
    .bytes = gpt_bytes, .free_bytes = gpt_free_bytes, .peak = gpt_peak,
};

int main(int argc, char **argv) {
    Run *run = run_open(&NAMED(judge_, PREC), argc, argv);      // flags, data, model, weights
    if (!run) return 0;                                       // --help, --version, --show
    int status = train(run);                                  // the loop: llmc/run/train.c
    if (status == 0) evaluate(run);
    if (status == 0) sample(run);
    return run_close(run, status);
}
