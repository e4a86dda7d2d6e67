// train_gpt.c: the judge. GPT-2 and Llama-like models on the CPU, forward and backward of every layer by hand, under any
// normalization placement; also a CPU trainer for real use.
//
// 1. What is here can be read from top to bottom: layers, then the two branches of a block, the sublayer, the model, the optimizer, main.
// 2. Every layer is a pair, <layer>_forward and <layer>_backward. Arguments: outputs | saved | inputs | parameters | sizes.
// 3. SET or ADD: a gradient is ADDed exactly where the forward value was read more than once (the stream, the block's input, the tied
//    embedding, parameters over micro-steps); everything else is SET, and so are the matrices' gradients by a step's first micro-step.
// 4. The mode is data (llmc/modes.h): which slots are filled, and with what. Branches, sublayers and gpt_normalize look at that; layers never do.
// 5. Built once per precision (REAL = float or double). Work is split by fixed pieces and every sum has one order: the same bits for any
//    number of threads.
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef REAL Real;
#define real Real
#include "llmc/exp.h"
#include "llmc/gemm.h"
#include "llmc/run/trainer.h"
#include "llmc/peak.h"
#include "llmc/run/free_memory.h"
#include "llmc/run/train.h"

static inline real exp_real(real x) { return sizeof(real) == 8 ? (real)exp((double)x) : (real)exp_float((float)x); }

enum { SET, ADD };
enum { STRIP = 32 };                                    // columns that a thread owns where it sums over rows, so that each sum has one order

// x = 0
static void zero(real *x, int64_t size) {
#pragma omp parallel for schedule(static) if (size > 1 << 16)
    for (int64_t i = 0; i < size; i++) x[i] = 0;
}

// ------------------------------------------------------------------------------------------------------------------ linear
// y = c W x + b over n rows. x: [n, in], W: [out, in], b: [out] or NULL, y: [n, ldy] of which `out` columns are written.

typedef struct { int64_t n; int out, in, ldy, dw; real c; } LinearShape;           // dw: SET or ADD

static void linear_forward(real *y, const real *x, const real *w, const real *b, LinearShape s) {
    gemm(view(y, s.ldy, 1), view(x, s.in, 1), view(w, 1, s.in), s.n, s.out, s.in, s.c, 0);
    if (!b) return;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s.n; i++)
        for (int j = 0; j < s.out; j++) y[i * s.ldy + j] += b[j];
}

// dx = c W^T dy and dW = c dy x^T (each SET or ADD);  db += dy
static void linear_backward(real *dx, real *dw, real *db, const real *dy, const real *x, const real *w, LinearShape s, int add) {
    gemm(view(dx, s.in, 1), view(dy, s.ldy, 1), view(w, s.in, 1), s.n, s.in, s.out, s.c, add == ADD);
    gemm(view(dw, s.in, 1), view(dy, 1, s.ldy), view(x, s.in, 1), s.out, s.in, s.n, s.c, s.dw == ADD);
    if (!db) return;
#pragma omp parallel for schedule(static)
    for (int j0 = 0; j0 < s.out; j0 += STRIP) {
        int strip = s.out - j0 < STRIP ? s.out - j0 : STRIP;
        real sum[STRIP] = {0};
        for (int64_t i = 0; i < s.n; i++)
            for (int j = 0; j < strip; j++) sum[j] += dy[i * s.ldy + j0 + j];
        for (int j = 0; j < strip; j++) db[j0 + j] += sum[j];
    }
}

// ------------------------------------------------------------------------------------------------------------------ norm
// RMSNorm (Zhang, Sennrich 2019): y = g * x r,       r = (mean(x^2) + eps)^(-1/2)
// LayerNorm (Ba et al. 2016):     y = g * (x - m) r + b,   m = mean(x), r = (mean((x - m)^2) + eps)^(-1/2)
// Each of n rows holds `groups` groups of `width` values with statistics of their own; the gain is one vector of length `gains`, shared by
// the groups when gains == width. b == NULL is RMSNorm. Saved: mean (LayerNorm) and rstd, [n, groups].
// g = site.scale * w, or site.scale where w is NULL. nGPT (Loshchilov et al. 2024): L2 is RMSNorm with g = 1/sqrt(width), x / |x|; SCALE is y = g * x.

typedef struct Norm {
    Site site;
    const real *w, *b;
    real *dw, *db, *mean, *rstd;
    int64_t n;
    real eps;
} Norm;

static void norm_forward(real *y, const real *x, const Norm *s) {
    int W = s->site.width, G = s->site.groups, shared = s->site.gains == W;
    real scale = (real)s->site.scale;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < s->n * G; row++) {
        const real *x_r = x + row * W, *w = s->w ? s->w + (shared ? 0 : row % G * W) : NULL, *b = s->b ? s->b + (shared ? 0 : row % G * W) : NULL;
        real *y_r = y + row * W, mean = 0, square = 0, rstd = 1;
        if (b) {
#pragma omp simd reduction(+ : mean)
            for (int i = 0; i < W; i++) mean += x_r[i];
            mean /= W;
            s->mean[row] = mean;
        }
        if (s->site.on != SCALE) {
#pragma omp simd reduction(+ : square)
            for (int i = 0; i < W; i++) square += (x_r[i] - mean) * (x_r[i] - mean);
            s->rstd[row] = rstd = 1 / (real)sqrt(square / W + s->eps);
        }
        for (int i = 0; i < W; i++) y_r[i] = scale * (w ? w[i] : 1) * ((x_r[i] - mean) * rstd) + (b ? b[i] : 0);
    }
}

// With xhat = (x - m) r and u = g * dy:  dx = r (u - [mean(u)] - xhat mean(u * xhat)), the bracket for LayerNorm only, SCALE u alone;  dg += dy * xhat;  db += dy
static void norm_backward(real *dx, const real *dy, const real *x, const Norm *s, int add) {
    int W = s->site.width, G = s->site.groups, shared = s->site.gains == W, scaled = s->site.on == SCALE;
    real scale = (real)s->site.scale;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < s->n * G; row++) {
        const real *x_r = x + row * W, *dy_r = dy + row * W, *w = s->w ? s->w + (shared ? 0 : row % G * W) : NULL;
        real *dx_r = dx + row * W, mean = s->b ? s->mean[row] : 0, rstd = scaled ? 1 : s->rstd[row], sum_u = 0, sum_ux = 0;
#pragma omp simd reduction(+ : sum_u, sum_ux)
        for (int i = 0; i < W; i++) {
            real u = scale * (w ? w[i] : 1) * dy_r[i];
            sum_u += u;
            sum_ux += u * (x_r[i] - mean) * rstd;
        }
        real mean_u = s->b ? sum_u / W : 0, mean_ux = scaled ? 0 : sum_ux / W;
        for (int i = 0; i < W; i++) {
            real d = rstd * (scale * (w ? w[i] : 1) * dy_r[i] - mean_u - (x_r[i] - mean) * rstd * mean_ux);
            dx_r[i] = add == ADD ? dx_r[i] + d : d;
        }
    }
    // Gains and biases: all rows where they are shared, otherwise those of their group.
#pragma omp parallel for collapse(2) schedule(static)
    for (int g = 0; g < s->site.gains / W; g++)
        for (int i0 = 0; i0 < W; i0 += STRIP) {
            int strip = W - i0 < STRIP ? W - i0 : STRIP;
            real dw[STRIP] = {0}, db[STRIP] = {0};
            for (int64_t row = g; row < s->n * G; row += shared ? 1 : G) {
                const real *dy_r = dy + row * W + i0, *x_r = x + row * W + i0;
                real mean = s->b ? s->mean[row] : 0, rstd = scaled ? 1 : s->rstd[row];
                for (int i = 0; i < strip; i++) {
                    dw[i] += dy_r[i] * ((x_r[i] - mean) * rstd);
                    db[i] += dy_r[i];
                }
            }
            for (int i = 0; i < strip; i++) {
                s->dw[g * W + i0 + i] += scale * dw[i];
                if (s->b) s->db[g * W + i0 + i] += db[i];
            }
        }
}

// ------------------------------------------------------------------------------------------------------------------ RoPE
// Rotary positions (Su et al. 2021), half-split: of the last R of a head's `size` channels, the pair (i, i + R/2) turns by t * theta^(-2i/R). In place.
// direction +1 forward, -1 backward (the transpose of a rotation). table: [positions, 2, R/2], cosines and sines, from the position of the first row on.

typedef struct { int B, T, heads, size, R; } RopeShape;

static void rope_table(real *table, int64_t positions, int R, double theta) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < positions; t++)
        for (int i = 0; i < R / 2; i++) {
            double angle = (double)t * pow(theta, -2.0 * i / R);
            table[t * R + i] = (real)cos(angle);
            table[t * R + R / 2 + i] = (real)sin(angle);
        }
}

static void rope(real *x, const real *table, RopeShape s, int direction) {
    int half = s.R / 2;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < (int64_t)s.B * s.T; row++)
        for (int h = 0; h < s.heads; h++) {
            const real *cosine = table + row % s.T * s.R, *sine = cosine + half;
            real *x_h = x + (row * s.heads + h + 1) * s.size - s.R;
            for (int i = 0; i < half; i++) {
                real first = x_h[i], second = x_h[half + i], turn = (real)direction * sine[i];
                x_h[i] = first * cosine[i] - second * turn;
                x_h[half + i] = second * cosine[i] + first * turn;
            }
        }
}

// ------------------------------------------------------------------------------------------------------------------ attention
// Causal attention with grouped queries (Ainslie et al. 2023): S = scale Q K^T, P = softmax over keys <= query, C = P V.
// q: [n, NH, QK], k: [n, KV, QK], v: [n, KV, HS], c: [n, NH, HS]; head h reads kv head h / (NH / KV). Saved: lse, the log-sum-exp of each row of S. peak: its largest value.
// S is never stored whole: ATTN_BLOCK x ATTN_BLOCK of it at a time in a thread's own scratch, of which the products pass over what no query sees. Forward, c and the sums so far fade by exp(old - new maximum)
// from block to block (online softmax: Milakov, Gimelshein 2018; Dao et al. 2022); backward computes S again.
// Forward with a past (B is 1 then): k and v begin `past` rows before q. Blocks end at multiples of ATTN_BLOCK of the whole text: reading it in pieces gives the same bits.

typedef struct { int B, T, NH, KV, QK, HS, cached; real scale; } AttnShape;

// A row of S in vectors. Its largest: the last vector may overlap the one before. `seen` is never 0.
static real row_max(const real *x, int64_t seen) {
    real max[VL];
    for (int l = 0; l < VL; l++) max[l] = x[0];
    if (seen < VL)
        for (int64_t j = 1; j < seen; j++) max[0] = x[j] > max[0] ? x[j] : max[0];
    else {
        Vec most = *(const VecAnywhere *)(x + seen - VL);
        for (int64_t j = 0; j + VL <= seen; j += VL) {
            Vec v = *(const VecAnywhere *)(x + j);
            __typeof__(v > most) more = v > most;
            most = (Vec)((more & (__typeof__(more))v) | (~more & (__typeof__(more))most));
        }
        memcpy(max, &most, sizeof max);
    }
#pragma GCC unroll 4
    for (int half = VL / 2; half; half /= 2)
        for (int l = 0; l < half; l++) max[l] = max[l] > max[l + half] ? max[l] : max[l + half];
    return max[0];
}

// x = exp(x - most) for those seen and 0 for the other keys; returns the sum. The last vector is computed whole, and what lies beyond `seen` in it ignored.
enum { LANES = 16 };
_Static_assert(ATTN_BLOCK % LANES == 0, "a row of a block of scores ends with a vector");

static real row_exp(real *x, int64_t seen, int64_t keys, real most) {
    real sum[LANES] = {0};
    int64_t j = 0;
    for (; j < seen; j += LANES) {
        int left = (int)(seen - j);
        for (int l = 0; l < LANES; l++) sum[l] += x[j + l] = l < left ? exp_real(x[j + l] - most) : 0;
    }
    for (; j < keys; j++) x[j] = 0;
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sum[l] += sum[l + half];
    return sum[0];
}

static void attention_forward(real *c, real *peak, real *lse, real *scores, const real *q, const real *k, const real *v, AttnShape s) {
    int64_t qs = (int64_t)s.NH * s.QK, ks = (int64_t)s.KV * s.QK, cs = (int64_t)s.NH * s.HS, vs = (int64_t)s.KV * s.HS, T = s.T, end = s.cached + T;
    Shares heads = shares_make((int64_t)s.B * s.NH);
#pragma omp parallel
    for (int64_t head; (head = shares_take(&heads)) >= 0;) {
        int64_t b = head / s.NH, h = head % s.NH;
        real *S = scores + (int64_t)omp_get_thread_num() * 2 * ATTN_BLOCK * ATTN_BLOCK;
        int64_t kv = h / (s.NH / s.KV);
        View q_h = view(q + b * T * qs + h * s.QK, qs, 1), k_h = view(k + b * T * ks + kv * s.QK, ks, 1), c_h = view(c + b * T * cs + h * s.HS, cs, 1), v_h = view(v + b * T * vs + kv * s.HS, vs, 1);
        for (int64_t t0 = s.cached, rows; t0 < end; t0 += rows) {             // positions; q and c begin at the first
            rows = ATTN_BLOCK - t0 % ATTN_BLOCK < end - t0 ? ATTN_BLOCK - t0 % ATTN_BLOCK : end - t0;
            int64_t row0 = t0 - s.cached;
            View q_t = part(q_h, row0, 0), c_t = part(c_h, row0, 0);
            real max[ATTN_BLOCK], sum[ATTN_BLOCK];
            for (int64_t j0 = 0; j0 < t0 + rows; j0 += ATTN_BLOCK) {
                int64_t keys = t0 + rows - j0 < ATTN_BLOCK ? t0 + rows - j0 : ATTN_BLOCK;
                View seen_S = band(S, ATTN_BLOCK, 1, -FAR, t0 - j0);
                gemm(seen_S, q_t, transpose(part(k_h, j0, 0)), rows, keys, s.QK, s.scale, 0);
                for (int64_t i = 0; i < rows; i++) {
                    real *S_i = S + i * ATTN_BLOCK, *c_i = c_t.p + i * cs;
                    int64_t seen = t0 + i + 1 - j0 < keys ? t0 + i + 1 - j0 : keys;
                    real most = row_max(S_i, seen);
                    if (j0 > 0 && max[i] > most) most = max[i];
                    real total = row_exp(S_i, seen, keys, most);
                    if (j0 > 0) {                                           // what there is so far was relative to the old maximum
                        real fade = exp_real(max[i] - most);
                        total += fade * sum[i];
                        for (int j = 0; j < s.HS; j++) c_i[j] *= fade;
                    }
                    max[i] = most;
                    sum[i] = total;
                }
                gemm(c_t, seen_S, part(v_h, j0, 0), rows, s.HS, keys, 1, j0 > 0);
            }
            for (int64_t i = 0; i < rows; i++) {
                for (int j = 0; j < s.HS; j++) c_t.p[i * cs + j] /= sum[i];
                peak[(b * T + row0 + i) * s.NH + h] = isnan(sum[i]) ? sum[i] : max[i];  // max passes over NaN, the sum does not
                lse[(b * T + row0 + i) * s.NH + h] = max[i] + (real)log(sum[i]);
            }
        }
    }
}

// With P = exp(S - lse):  dV = P^T dC;  dP = dC V^T;  dS = P * (dP - D), D = rowsum(dC * C);  dQ = scale dS K;  dK = scale dS^T Q
static void attention_backward(real *dq, real *dk, real *dv, real *scores, const real *dc, const real *c, const real *lse,
                               const real *const qkv[3], AttnShape s) {
    const real *q = qkv[0], *k = qkv[1], *v = qkv[2];
    int64_t qs = (int64_t)s.NH * s.QK, ks = (int64_t)s.KV * s.QK, cs = (int64_t)s.NH * s.HS, vs = (int64_t)s.KV * s.HS, T = s.T;
    int group = s.NH / s.KV;
    Shares heads = shares_make((int64_t)s.B * s.KV);
#pragma omp parallel
    for (int64_t head; (head = shares_take(&heads)) >= 0;) {                // one thread owns a kv head: its dk, dv have one order
        int64_t b = head / s.KV, kv = head % s.KV;
        real *P = scores + (int64_t)omp_get_thread_num() * 2 * ATTN_BLOCK * ATTN_BLOCK, *dS = P + ATTN_BLOCK * ATTN_BLOCK;
        for (int h = kv * group; h < (kv + 1) * group; h++)
            for (int64_t t0 = 0; t0 < T; t0 += ATTN_BLOCK) {
                int64_t rows = T - t0 < ATTN_BLOCK ? T - t0 : ATTN_BLOCK, at_q = (b * T + t0) * qs + h * s.QK, at_c = (b * T + t0) * cs + h * s.HS;
                View q_t = view(q + at_q, qs, 1), dq_t = view(dq + at_q, qs, 1), dc_t = view(dc + at_c, cs, 1);
                real D[ATTN_BLOCK];
                for (int64_t i = 0; i < rows; i++) {
                    real sum = 0;
#pragma omp simd reduction(+ : sum)
                    for (int j = 0; j < s.HS; j++) sum += dc[at_c + i * cs + j] * c[at_c + i * cs + j];
                    D[i] = sum;
                }
                for (int64_t j0 = 0; j0 < t0 + rows; j0 += ATTN_BLOCK) {
                    int64_t keys = t0 + rows - j0 < ATTN_BLOCK ? t0 + rows - j0 : ATTN_BLOCK, at_k = (b * T + j0) * ks + kv * s.QK, at_v = (b * T + j0) * vs + kv * s.HS;
                    View k_j = view(k + at_k, ks, 1), dk_j = view(dk + at_k, ks, 1), v_j = view(v + at_v, vs, 1), dv_j = view(dv + at_v, vs, 1);
                    View seen_P = band(P, ATTN_BLOCK, 1, -FAR, t0 - j0), seen_dS = band(dS, ATTN_BLOCK, 1, -FAR, t0 - j0);
                    gemm(seen_P, q_t, transpose(k_j), rows, keys, s.QK, s.scale, 0);
                    gemm(seen_dS, dc_t, transpose(v_j), rows, keys, s.HS, 1, 0);
                    for (int64_t i = 0; i < rows; i++) {
                        real *P_i = P + i * ATTN_BLOCK, *dS_i = dS + i * ATTN_BLOCK, lse_i = lse[(b * T + t0 + i) * s.NH + h];
                        int64_t seen = t0 + i + 1 - j0 < keys ? t0 + i + 1 - j0 : keys;
                        row_exp(P_i, seen, keys, lse_i);
                        for (int64_t j = 0; j < seen; j++) dS_i[j] = P_i[j] * (dS_i[j] - D[i]);
                        for (int64_t j = seen; j < keys; j++) dS_i[j] = 0;
                    }
                    int add = h > kv * group || t0 > j0;                    // the first to write dk and dv: the group's first head, in the block on its diagonal
                    gemm(dv_j, transpose(seen_P), dc_t, keys, s.HS, rows, 1, add);
                    gemm(dq_t, seen_dS, k_j, rows, s.QK, keys, s.scale, j0 > 0);
                    gemm(dk_j, transpose(seen_dS), q_t, keys, s.QK, rows, s.scale, add);
                }
            }
    }
}

// ------------------------------------------------------------------------------------------------------------------ latent heads
// Latent attention (DeepSeek-V2 2024, eq 9-19, without compression of q) makes keys and values from a narrow latent: kvb = W_kvb norm(c), [n, NH, HS + HS].
// Head h gets k = [first half of kvb | kr], kr being one for all heads and turned by RoPE later, and v = second half. k: [n, NH, HS + R], v: [n, NH, HS].

static void latent_heads_forward(real *k, real *v, const real *kvb, const real *kr, int64_t n, int NH, int HS, int R) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n * NH; i++) {
        memcpy(k + i * (HS + R), kvb + i * 2 * HS, (size_t)HS * sizeof(real));
        memcpy(k + i * (HS + R) + HS, kr + i / NH * R, (size_t)R * sizeof(real));
        memcpy(v + i * HS, kvb + (i * 2 + 1) * HS, (size_t)HS * sizeof(real));
    }
}

// dkvb = [dk's first HS | dv];  dkr = sum over heads of dk's last R
static void latent_heads_backward(real *dkvb, real *dkr, const real *dk, const real *dv, int64_t n, int NH, int HS, int R) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < n; t++) {
        memset(dkr + t * R, 0, (size_t)R * sizeof(real));
        for (int64_t i = t * NH; i < (t + 1) * NH; i++) {
            memcpy(dkvb + i * 2 * HS, dk + i * (HS + R), (size_t)HS * sizeof(real));
            memcpy(dkvb + (i * 2 + 1) * HS, dv + i * HS, (size_t)HS * sizeof(real));
            for (int j = 0; j < R; j++) dkr[t * R + j] += dk[i * (HS + R) + HS + j];
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ activation
// SwiGLU (Shazeer 2020): h = silu(gate) * up, gu = [gate | up].
// GELU, tanh form (GPT-2): h = gu/2 (1 + tanh(z)) = gu sigmoid(2z), 2z = sqrt(8/pi) (gu + 0.044715 gu^3)

static const real GELU_SLOPE = (real)1.5957691216057308, GELU_CUBE = (real)0.044715;

static inline real sigmoid(real x) { return 1 / (1 + exp_real(-x)); }

static void activation_forward(real *h, const real *gu, int64_t n, int F, int swiglu) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n; row++) {
        const real *g = gu + row * F * (swiglu ? 2 : 1);
        real *h_r = h + row * F;
        if (swiglu)
            for (int i = 0; i < F; i++) h_r[i] = g[i] * sigmoid(g[i]) * g[F + i];
        else
            for (int i = 0; i < F; i++) h_r[i] = g[i] * sigmoid(GELU_SLOPE * (g[i] + GELU_CUBE * g[i] * g[i] * g[i]));
    }
}

static void activation_backward(real *dgu, const real *dh, const real *gu, int64_t n, int F, int swiglu) {
#pragma omp parallel for schedule(static)
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
                real s = sigmoid(GELU_SLOPE * (g[i] + GELU_CUBE * g[i] * g[i] * g[i]));
                dg[i] = dh_r[i] * s * (1 + g[i] * (1 - s) * GELU_SLOPE * (1 + 3 * GELU_CUBE * g[i] * g[i]));
            }
    }
}

// ------------------------------------------------------------------------------------------------------------------ the router
// Which K of E experts a token goes through, and with what weight, from logits z = W x [n, E] (Shazeer et al. 2017; OLMoE 2024; DeepSeek-V3 2024 eq 12-16):
//   s = softmax(z) or sigmoid(z);  S = the K experts with the largest s + bias, among equals the first;  gate_e = scale s_e, or scale s_e / sum_S s
// Losses, with load_be the tokens of expert e in sequence b, p = s / sum s (softmax: s itself), share_be the mean of p_e over sequence b:
//   balance   E/(K n)   sum_e (sum_b load_be) (mean_b share_be)       over the micro-batch (Switch, Fedus et al. 2021; OLMoE): 1 where all is even
//   sequence  E/(K T B) sum_b sum_e load_be share_be                  over each sequence (DeepSeek-V2 eq 23-25)
//   z         mean_t logsumexp(z_t)^2                                 (ST-MoE, Zoph et al. 2022)
// Layers add up as their mean, and z is divided by K too (--router-losses mean: OLMoE's), or plainly (sum: DeepSeek, OLMo-core).
// balance, sequence, z: the coefficients of one layer. load has a last row, [B + 1, E]: the sum of the others.

typedef struct { int64_t n; int B, T, E, K, kind; real scale, balance, sequence, z; } RouterShape;

static void router_scores(real *s, real *lse, const real *z, RouterShape r) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < r.n; t++) {
        const real *z_t = z + t * r.E;
        real max = z_t[0], sum = 0;
        for (int j = 1; j < r.E; j++) max = z_t[j] > max ? z_t[j] : max;
        for (int j = 0; j < r.E; j++) sum += exp_real(z_t[j] - max);
        lse[t] = max + (real)log(sum);
        for (int j = 0; j < r.E; j++) s[t * r.E + j] = r.kind == ROUTER_SIGMOID ? sigmoid(z_t[j]) : exp_real(z_t[j] - lse[t]);
    }
}

static void router_forward(real *gate, int32_t *choice, real *load, real *share, const real *s, const real *bias, RouterShape r) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < r.n; t++) {
        const real *s_t = s + t * r.E;
        int32_t *choice_t = choice + t * r.K;
        real sum = 0;
        for (int j = 0, found = 0; j < r.E; j++) {                           // the best so far, in order; K of them also where scores are NaN
            real score = s_t[j] + (bias ? bias[j] : 0);
            int i = found < r.K ? found++ : r.K;
            for (; i > 0 && score > s_t[choice_t[i - 1]] + (bias ? bias[choice_t[i - 1]] : 0); i--)
                if (i < r.K) choice_t[i] = choice_t[i - 1];
            if (i < r.K) choice_t[i] = j;
        }
        for (int k = 0; k < r.K; k++) sum += s_t[choice_t[k]];
        for (int k = 0; k < r.K; k++) gate[t * r.K + k] = r.scale * s_t[choice_t[k]] / (r.kind == ROUTER_SOFTMAX ? 1 : sum);
    }
#pragma omp parallel for schedule(static)
    for (int b = 0; b < r.B; b++) {
        real *load_b = load + b * r.E, *share_b = share + b * r.E;
        for (int j = 0; j < r.E; j++) load_b[j] = share_b[j] = 0;
        for (int64_t t = (int64_t)b * r.T; t < (int64_t)(b + 1) * r.T; t++) {
            real sum = 0;
            for (int k = 0; k < r.K; k++) load_b[choice[t * r.K + k]]++;
            for (int j = 0; j < r.E; j++) sum += s[t * r.E + j];
            for (int j = 0; j < r.E; j++) share_b[j] += s[t * r.E + j] / (r.kind == ROUTER_SIGMOID ? sum * r.T : r.T);
        }
    }
    for (int j = 0; j < r.E; j++) load[r.B * r.E + j] = 0;
    for (int i = 0; i < r.B * r.E; i++) load[r.B * r.E + i % r.E] += load[i];
}

// dz (SET) from the gradient of the gates and from the losses. pull_e = d(loss) / d(p_e) of a token; loss_scale: the gradient of the micro-batch's mean loss.
// With ds_e = scale dgate_e, or scale / sum_S s (dgate_e - sum_S dgate gate / scale), for e in S:
//   softmax: u = ds + pull, dz = s (u - sum s u);   sigmoid: dz = s (1 - s) (ds + (pull - sum p pull) / sum s);   z: + 2 z lse softmax(z) / n
static void router_backward(real *dz, const real *dgate, const real *gate, const int32_t *choice, const real *load, const real *s, const real *const z_lse[2],
                            RouterShape r, real loss_scale) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < r.n; t++) {
        const real *s_t = s + t * r.E, *z_t = z_lse[0] + t * r.E, lse = z_lse[1][t];
        real *dz_t = dz + t * r.E, chosen = 0, inner = 0, sum = 0, pulled = 0;
        for (int k = 0; k < r.K; k++) {
            chosen += s_t[choice[t * r.K + k]];
            inner += dgate[t * r.K + k] * gate[t * r.K + k];
        }
        for (int j = 0; j < r.E; j++) {
            dz_t[j] = loss_scale * r.E / r.K / r.n * (r.balance * load[r.B * r.E + j] / r.n + r.sequence * load[t / r.T * r.E + j] / r.T);
            sum += s_t[j];
            pulled += s_t[j] * dz_t[j];
        }
        if (r.kind == ROUTER_SIGMOID)
            for (int j = 0; j < r.E; j++) dz_t[j] = (dz_t[j] - pulled / sum) / sum;
        for (int k = 0; k < r.K; k++) {
            real dg = dgate[t * r.K + k];
            dz_t[choice[t * r.K + k]] += r.kind == ROUTER_SOFTMAX ? r.scale * dg : (r.scale * dg - inner) / chosen;
        }
        real along = 0;
        for (int j = 0; j < r.E; j++) along += s_t[j] * dz_t[j];
        for (int j = 0; j < r.E; j++) {
            dz_t[j] = s_t[j] * (r.kind == ROUTER_SIGMOID ? (1 - s_t[j]) * dz_t[j] : dz_t[j] - along);
            dz_t[j] += loss_scale * 2 * r.z * lse / r.n * exp_real(z_t[j] - lse);
        }
    }
}

// Rows of an expert become neighbours, in the order of the tokens: start[e] is the first of expert e, place[t, k] that of a token's k-th choice.
static void router_sort(int32_t *place, int32_t *start, const int32_t *choice, RouterShape r) {
    int32_t first = 0;
    memset(start, 0, (size_t)(r.E + 1) * sizeof *start);
    for (int64_t i = 0; i < r.n * r.K; i++) start[choice[i] + 1]++;
    for (int j = 0; j < r.E; j++) start[j + 1] += start[j];
    for (int64_t i = 0; i < r.n * r.K; i++) place[i] = start[choice[i]]++;
    for (int j = 0; j <= r.E; j++) {                                         // each start has moved to the next one's
        int32_t next = start[j];
        start[j] = first;
        first = next;
    }
}

// rows[place[t, k]] = x[t]
static void gather_forward(real *rows, const real *x, const int32_t *place, int64_t n, int K, int C) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n * K; i++) memcpy(rows + (int64_t)place[i] * C, x + i / K * C, (size_t)C * sizeof(real));
}

// dx[t] += sum_k drows[place[t, k]]
static void gather_backward(real *dx, const real *drows, const int32_t *place, int64_t n, int K, int C) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < n; t++)
        for (int k = 0; k < K; k++) {
            const real *row = drows + (int64_t)place[t * K + k] * C;
            for (int i = 0; i < C; i++) dx[t * C + i] += row[i];
        }
}

// y[t] = sum_k gate[t, k] rows[place[t, k]], added to what y holds where add is ADD
static void combine_forward(real *y, const real *rows, const real *gate, const int32_t *place, int64_t n, int K, int C, int add) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < n; t++) {
        if (add == SET) memset(y + t * C, 0, (size_t)C * sizeof(real));
        for (int k = 0; k < K; k++) {
            const real *row = rows + (int64_t)place[t * K + k] * C, g = gate[t * K + k];
            for (int i = 0; i < C; i++) y[t * C + i] += g * row[i];
        }
    }
}

// drows[place[t, k]] = gate[t, k] dy[t];  dgate[t, k] = dy[t] . rows[place[t, k]]
static void combine_backward(real *drows, real *dgate, const real *dy, const real *rows, const real *gate, const int32_t *place, int64_t n, int K, int C) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n * K; i++) {
        const real *row = rows + (int64_t)place[i] * C, *dy_t = dy + i / K * C;
        real *drow = drows + (int64_t)place[i] * C, dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int j = 0; j < C; j++) dot += dy_t[j] * row[j];
        for (int j = 0; j < C; j++) drow[j] = gate[i] * dy_t[j];
        dgate[i] = dot;
    }
}

// ------------------------------------------------------------------------------------------------------------------ embedding
// e_t = scale * wte[token] (+ wpe[t])

static void embedding_forward(real *e, const int32_t *tokens, const real *wte, const real *wpe, int B, int T, int C, real scale) {
#pragma omp parallel for schedule(static)
    for (int64_t bt = 0; bt < (int64_t)B * T; bt++)
        for (int i = 0; i < C; i++) e[bt * C + i] = scale * wte[(int64_t)tokens[bt] * C + i] + (wpe ? wpe[bt % T * C + i] : 0);
}

// Repeated tokens add up in one order too.
static void embedding_backward(real *dwte, real *dwpe, const real *de, const int32_t *tokens, int B, int T, int C, real scale) {
#pragma omp parallel for schedule(static)
    for (int i0 = 0; i0 < C; i0 += STRIP) {
        int strip = C - i0 < STRIP ? C - i0 : STRIP;
        for (int64_t bt = 0; bt < (int64_t)B * T; bt++) {
            const real *restrict d = de + bt * C + i0;
            real *restrict token = dwte + (int64_t)tokens[bt] * C + i0, *restrict position = dwpe ? dwpe + bt % T * C + i0 : NULL;
            for (int i = 0; i < strip; i++) token[i] += scale * d[i];
            for (int i = 0; i < strip && position; i++) position[i] += d[i];
        }
    }
}

// ------------------------------------------------------------------------------------------------------------------ cross-entropy
// loss = logsumexp(z) - z[target] over the V real columns of [n, Vp]; the padding takes no part.

static void crossentropy_forward(real *losses, real *logsum, const real *logits, const int32_t *targets, int64_t n, int V, int Vp) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n; row++) {
        const real *z = logits + row * Vp;
        real max = z[0], sum = 0;
#pragma omp simd reduction(max : max)
        for (int j = 1; j < V; j++) max = z[j] > max ? z[j] : max;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < V; j++) sum += exp_real(z[j] - max);
        logsum[row] = max + (real)log(sum);
        losses[row] = logsum[row] - z[targets[row]];
    }
}

// dz = scale * (softmax(z) - onehot(target) + 2 z_loss logsum softmax(z)), in place of z. z_loss * logsum^2 is OLMo 2's z-loss.
static void crossentropy_backward(real *logits, const real *logsum, const int32_t *targets, int64_t n, int V, int Vp, real scale, real z_loss) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n; row++) {
        real *z = logits + row * Vp, both = scale * (1 + 2 * z_loss * logsum[row]), log_row = logsum[row];
        for (int j = 0; j < V; j++) z[j] = both * exp_real(z[j] - log_row);
        for (int j = V; j < Vp; j++) z[j] = 0;
        z[targets[row]] -= scale;
    }
}

// ------------------------------------------------------------------------------------------------------------------ the block
// What the functions of one block share: its place in the mode, its parameters and activations, and their gradients.

typedef struct Block {
    const Model *m;
    const Sizes *s;
    Place p;
    Params w;
    Grads dw;
    Acts a, d;
    KvCache cache;
    const real *rotary;                                 // rope_table from the position of the first row on; NULL with learned positions
    int dweights;                                       // backward: SET or ADD, of linears' weights
    real loss_scale;                                    // backward: the gradient of the micro-batch's mean loss, for the router's
} Block;

static Norm block_norm(const Block *b, Site site, const real *w, const real *bias, real *dw, real *db, real *mean, real *rstd) {
    return (Norm){site, w, bias, dw, db, mean, rstd, b->s->n, site.on == L2 ? (real)1e-12 : (real)b->m->eps};      // of L2 only against 0/0
}
#define NORM(b, slot) block_norm(b, (b)->p.slot, (b)->w.slot##_w, (b)->w.slot##_b, (b)->dw.slot##_w, (b)->dw.slot##_b, (b)->a.slot##_mean, (b)->a.slot##_rstd)

// nGPT's s_z: logits have a gain, and no norm.
static Norm logits_gain(const Block *b) { return block_norm(b, b->p.logits, b->w.logits_w, NULL, b->dw.logits_w, NULL, NULL, NULL); }

// y = N(x) where the slot is filled; otherwise x itself: no call, no copy.
static real *slot_forward(const Norm *norm, real *y, real *x) {
    if (!norm->site.on) return x;
    norm_forward(y, x, norm);
    return y;
}

// Gradient of the slot's input: in dx where the slot is filled, otherwise dy itself.
static real *slot_backward(const Norm *norm, real *dx, real *dy, const real *x) {
    if (!norm->site.on) return dy;
    norm_backward(dx, dy, x, norm, SET);
    return dx;
}

// nGPT: q and k have length 1 when they meet, so scores are scaled up, and both read the one gain s_qk, after RoPE.
static AttnShape attn_shape(const Block *b) {
    int QK = qk_size(b->m);
    return (AttnShape){b->s->B, b->s->T, b->m->NH, b->m->KV, QK, b->m->HS, b->cache.cached, (real)(b->p.q.on == L2 ? sqrt(QK) : 1 / sqrt(QK))};
}

static LinearShape linear_shape(const Block *b, int out, int in, double c) { return (LinearShape){b->s->n, out, in, out, b->dweights, (real)c}; }

static void qk_rope(const Block *b, real *q, real *k, int direction) {
    const Model *m = b->m;
    rope(q, b->rotary, (RopeShape){b->s->B, b->s->T, m->NH, qk_size(m), rotary_size(m)}, direction);
    rope(k, b->rotary, (RopeShape){b->s->B, b->s->T, m->KV, qk_size(m), rotary_size(m)}, direction);
}

static Norm k_norm(const Block *b) {
    Norm k = NORM(b, k);
    if (k.site.on == L2) {
        k.site.gains = b->p.q.gains;
        k.w = b->w.q_w;
        k.dw = b->dw.q_w;
    }
    return k;
}

// k, v = latent_heads(W_kvb N(W_kva c u), W_kr c u), W_kva above W_kr in one matrix; or k, v = W c u
static void kv_forward(const Block *b, const real *u) {
    const Model *m = b->m;
    int K = m->KV * m->HS, R = m->rope_size;
    if (!m->kv_rank) {
        linear_forward(b->a.k, u, b->w.wk, b->w.wk_b, linear_shape(b, K, m->C, b->p.attn_c));
        linear_forward(b->a.v, u, b->w.wv, b->w.wv_b, linear_shape(b, K, m->C, b->p.attn_c));
        return;
    }
    Norm latent = NORM(b, latent);
    linear_forward(b->a.kvc, u, b->w.wkva, NULL, linear_shape(b, m->kv_rank, m->C, b->p.attn_c));
    linear_forward(b->a.kr, u, b->w.wkva + (int64_t)m->kv_rank * m->C, NULL, linear_shape(b, R, m->C, b->p.attn_c));
    norm_forward(b->a.kvcn, b->a.kvc, &latent);
    linear_forward(b->a.kvb, b->a.kvcn, b->w.wkvb, NULL, linear_shape(b, 2 * K, m->kv_rank, 1));
    latent_heads_forward(b->a.k, b->a.v, b->a.kvb, b->a.kr, b->s->n, m->NH, m->HS, R);
}

static void kv_backward(const Block *b, real *du, const real *dk, const real *dv, const real *u) {
    const Model *m = b->m;
    int K = m->KV * m->HS, R = m->rope_size;
    if (!m->kv_rank) {
        linear_backward(du, b->dw.wk, b->dw.wk_b, dk, u, b->w.wk, linear_shape(b, K, m->C, b->p.attn_c), ADD);
        linear_backward(du, b->dw.wv, b->dw.wv_b, dv, u, b->w.wv, linear_shape(b, K, m->C, b->p.attn_c), ADD);
        return;
    }
    Norm latent = NORM(b, latent);
    int64_t rotary = (int64_t)m->kv_rank * m->C;
    latent_heads_backward(b->d.kvb, b->d.kr, dk, dv, b->s->n, m->NH, m->HS, R);
    linear_backward(b->d.kvcn, b->dw.wkvb, NULL, b->d.kvb, b->a.kvcn, b->w.wkvb, linear_shape(b, 2 * K, m->kv_rank, 1), SET);
    norm_backward(b->d.kvc, b->d.kvcn, b->a.kvc, &latent, SET);
    linear_backward(du, b->dw.wkva, NULL, b->d.kvc, u, b->w.wkva, linear_shape(b, m->kv_rank, m->C, b->p.attn_c), ADD);
    linear_backward(du, b->dw.wkva + rotary, NULL, b->d.kr, u, b->w.wkva + rotary, linear_shape(b, R, m->C, b->p.attn_c), ADD);
}

// Keys or values as attention reads them, `width` a row: x itself, or with a past all rows of the text so far, which x now joins.
static const real *kv_cache_fill(const Block *b, real *cache, const real *x, int width) {
    if (!cache) return x;
    memcpy(cache + (int64_t)b->cache.cached * width, x, (size_t)b->s->n * (size_t)width * sizeof(real));
    return cache;
}

// y = W_o N_c(attention(rope(N_q(W_q c u)), rope(N_k(k)), N_v(v))); for L2, N(rope(.))
static void attn_branch_forward(const Block *b, real *y, const real *u) {
    const Model *m = b->m;
    int Q = m->NH * qk_size(m), l2 = b->p.q.on == L2;
    linear_forward(b->a.q, u, b->w.wq, b->w.wq_b, linear_shape(b, Q, m->C, b->p.attn_c));
    kv_forward(b, u);
    Norm nq = NORM(b, q), nk = k_norm(b), nv = NORM(b, v), nc = NORM(b, ctx);
    if (m->rope && l2) qk_rope(b, b->a.q, b->a.k, +1);
    real *q = slot_forward(&nq, b->a.qn, b->a.q), *k = slot_forward(&nk, b->a.kn, b->a.k), *v = slot_forward(&nv, b->a.vn, b->a.v);
    if (m->rope && !l2) qk_rope(b, q, k, +1);
    const real *keys = kv_cache_fill(b, b->cache.k, k, m->KV * qk_size(m)), *values = kv_cache_fill(b, b->cache.v, v, m->KV * m->HS);
    attention_forward(b->a.c, b->a.peak, b->a.lse, b->a.scores, q, keys, values, attn_shape(b));
    real *c = slot_forward(&nc, b->a.cn, b->a.c);
    linear_forward(y, c, b->w.wo, b->w.wo_b, linear_shape(b, m->C, m->NH * m->HS, 1));
}

static void attn_branch_backward(const Block *b, real *du, real *dy, const real *u, int add) {
    const Model *m = b->m;
    int Q = m->NH * qk_size(m), l2 = b->p.q.on == L2;
    Norm nq = NORM(b, q), nk = k_norm(b), nv = NORM(b, v), nc = NORM(b, ctx);
    const real *c = nc.site.on ? b->a.cn : b->a.c;
    const real *qkv[3] = {nq.site.on ? b->a.qn : b->a.q, nk.site.on ? b->a.kn : b->a.k, nv.site.on ? b->a.vn : b->a.v};
    real *dc = nc.site.on ? b->d.cn : b->d.c;
    real *dq = nq.site.on ? b->d.qn : b->d.q, *dk = nk.site.on ? b->d.kn : b->d.k, *dv = nv.site.on ? b->d.vn : b->d.v;
    linear_backward(dc, b->dw.wo, b->dw.wo_b, dy, c, b->w.wo, linear_shape(b, m->C, m->NH * m->HS, 1), SET);
    dc = slot_backward(&nc, b->d.c, dc, b->a.c);
    attention_backward(dq, dk, dv, b->a.scores, dc, b->a.c, b->a.lse, qkv, attn_shape(b));
    if (m->rope && !l2) qk_rope(b, dq, dk, -1);
    dq = slot_backward(&nq, b->d.q, dq, b->a.q);
    dk = slot_backward(&nk, b->d.k, dk, b->a.k);
    dv = slot_backward(&nv, b->d.v, dv, b->a.v);
    if (m->rope && l2) qk_rope(b, dq, dk, -1);
    linear_backward(du, b->dw.wq, b->dw.wq_b, dq, u, b->w.wq, linear_shape(b, Q, m->C, b->p.attn_c), add);
    kv_backward(b, du, dk, dv, u);
}

// One ffn over n rows, y = N_o(W_down act(N_h([W_gate | W_up] c u))): all tokens', or an expert's on the rows of its own. N_h is SDD's or nGPT's, N_o SDD's.
typedef struct Mlp {
    int64_t n;
    int C, F, swiglu, dweights;
    real c;
    const real *wg, *wu, *wd, *bg, *bu, *bd;
    real *dwg, *dwu, *dwd, *dbg, *dbu, *dbd;
    real *gu, *gun, *h, *y, *dgu, *dgun, *dh, *dy;      // y, dy: before N_o, where that is
    Norm hidden, out;
} Mlp;

static Mlp mlp_of_tokens(const Block *b) {
    const Params *w = &b->w;
    const Grads *dw = &b->dw;
    const Acts *a = &b->a, *d = &b->d;
    return (Mlp){.n = b->s->n, .C = b->m->C, .F = b->p.F, .swiglu = b->m->swiglu, .dweights = b->dweights, .c = (real)b->p.ffn_c,
                 .wg = w->wg, .wu = w->wu, .wd = w->wd, .bg = w->wg_b, .bu = w->wu_b, .bd = w->wd_b,
                 .dwg = dw->wg, .dwu = dw->wu, .dwd = dw->wd, .dbg = dw->wg_b, .dbu = dw->wu_b, .dbd = dw->wd_b,
                 .gu = a->gu, .gun = a->gun, .h = a->h, .y = a->sy, .dgu = d->gu, .dgun = d->gun, .dh = d->h, .dy = d->sy, .hidden = NORM(b, hidden), .out = NORM(b, shared_out)};
}

// x + offset, where x is
static real *at(real *x, int64_t offset) { return x ? x + offset : NULL; }

static Mlp mlp_of_expert(const Block *b, int e) {
    const Params *w = &b->w;
    const Grads *dw = &b->dw;
    const Acts *a = &b->a, *d = &b->d;
    const Site *hidden = &b->p.expert_hidden, *out = &b->p.expert_out;
    int64_t row = a->start[e], n = a->start[e + 1] - row, C = b->m->C, F = b->m->F, GU = b->m->swiglu ? 2 * F : F, in = e * F * C, h = (int64_t)e * hidden->gains, o = (int64_t)e * out->gains;
    Norm nh = {.site = *hidden, .w = at(w->expert_hidden_w, h), .dw = at(dw->expert_hidden_w, h), .rstd = at(a->expert_hidden_rstd, row * hidden->groups), .n = n, .eps = (real)b->m->eps};
    Norm no = {.site = *out, .w = at(w->expert_out_w, o), .dw = at(dw->expert_out_w, o), .rstd = at(a->expert_out_rstd, row), .n = n, .eps = (real)b->m->eps};
    return (Mlp){.n = n, .C = (int)C, .F = (int)F, .swiglu = b->m->swiglu, .dweights = b->dweights, .c = (real)b->p.ffn_c,
                 .wg = at(w->xg, in), .wu = w->xu + in, .wd = w->xd + in, .dwg = at(dw->xg, in), .dwu = at(dw->xu, in), .dwd = at(dw->xd, in),
                 .gu = a->xgu + row * GU, .gun = at(a->xgun, row * GU), .h = a->xh + row * F, .y = a->xy + row * C,
                 .dgu = at(d->xgu, row * GU), .dgun = at(d->xgun, row * GU), .dh = at(d->xh, row * F), .dy = at(d->xy, row * C), .hidden = nh, .out = no};
}

static void mlp_forward(const Mlp *f, real *y, const real *u) {
    LinearShape in = {f->n, f->F, f->C, f->swiglu ? 2 * f->F : f->F, f->dweights, f->c}, down = {f->n, f->C, f->F, f->C, f->dweights, 1};
    if (f->swiglu) linear_forward(f->gu, u, f->wg, f->bg, in);
    linear_forward(f->gu + (f->swiglu ? f->F : 0), u, f->wu, f->bu, in);
    activation_forward(f->h, slot_forward(&f->hidden, f->gun, f->gu), f->n, f->F, f->swiglu);
    real *out = f->out.site.on ? f->y : y;
    linear_forward(out, f->h, f->wd, f->bd, down);
    slot_forward(&f->out, y, out);
}

static void mlp_backward(const Mlp *f, real *du, real *dy, const real *u, int add) {
    LinearShape in = {f->n, f->F, f->C, f->swiglu ? 2 * f->F : f->F, f->dweights, f->c}, down = {f->n, f->C, f->F, f->C, f->dweights, 1};
    real *dout = slot_backward(&f->out, f->dy, dy, f->y), *dgu = f->hidden.site.on ? f->dgun : f->dgu;
    linear_backward(f->dh, f->dwd, f->dbd, dout, f->h, f->wd, down, SET);
    activation_backward(dgu, f->dh, f->hidden.site.on ? f->gun : f->gu, f->n, f->F, f->swiglu);
    dgu = slot_backward(&f->hidden, f->dgu, dgu, f->gu);
    linear_backward(du, f->dwu, f->dbu, dgu + (f->swiglu ? f->F : 0), u, f->wu, in, add);
    if (f->swiglu) linear_backward(du, f->dwg, f->dbg, dgu, u, f->wg, in, ADD);
}

static RouterShape router_shape(const Block *b) {
    const Moe *o = &b->m->moe;
    double layer = o->losses == LOSSES_MEAN ? 1.0 / moe_layers(b->m) : 1, z = o->losses == LOSSES_MEAN ? layer / o->K : layer;
    return (RouterShape){b->s->n, b->s->B, b->s->T, o->E, o->K, o->router, (real)b->p.gate_scale, (real)(layer * o->balance), (real)(layer * o->sequence), (real)(z * o->z)};
}

// y = sum of gate_e expert_e(u) over a token's experts, + shared(u). Experts run side by side, each on one thread: the same bits for any number of them.
static void moe_forward(const Block *b, real *y, const real *u) {
    const Acts *a = &b->a;
    RouterShape r = router_shape(b);
    real *rows = b->p.expert_out.on ? a->xyn : a->xy;
    linear_forward(a->rz, u, b->w.router, NULL, linear_shape(b, r.E, b->m->C, b->p.ffn_c));
    router_scores(a->rs, a->rlse, a->rz, r);
    router_forward(a->gate, a->choice, a->load, a->share, a->rs, b->w.router_bias, r);
    router_sort(a->place, a->start, a->choice, r);
    gather_forward(a->xx, u, a->place, r.n, r.K, b->m->C);
#pragma omp parallel for schedule(dynamic)
    for (int e = 0; e < r.E; e++) {
        Mlp f = mlp_of_expert(b, e);
        if (f.n) mlp_forward(&f, rows + a->start[e] * (int64_t)f.C, a->xx + a->start[e] * (int64_t)f.C);
    }
    Mlp shared = mlp_of_tokens(b);
    if (shared.F) mlp_forward(&shared, y, u);
    combine_forward(y, rows, a->gate, a->place, r.n, r.K, b->m->C, shared.F ? ADD : SET);
}

static void moe_backward(const Block *b, real *du, real *dy, const real *u, int add) {
    const Acts *a = &b->a, *d = &b->d;
    RouterShape r = router_shape(b);
    real *drows = b->p.expert_out.on ? d->xyn : d->xy;
    const real *z_lse[2] = {a->rz, a->rlse};
    combine_backward(drows, d->gate, dy, b->p.expert_out.on ? a->xyn : a->xy, a->gate, a->place, r.n, r.K, b->m->C);
    router_backward(d->rz, d->gate, a->gate, a->choice, a->load, a->rs, z_lse, r, b->loss_scale);
    linear_backward(du, b->dw.router, NULL, d->rz, u, b->w.router, linear_shape(b, r.E, b->m->C, b->p.ffn_c), add);
#pragma omp parallel for schedule(dynamic)
    for (int e = 0; e < r.E; e++) {
        Mlp f = mlp_of_expert(b, e);
        int64_t row = a->start[e] * (int64_t)f.C;
        if (f.n || f.dweights == SET) mlp_backward(&f, d->xx + row, drows + row, a->xx + row, SET);
    }
    gather_backward(du, d->xx, a->place, r.n, r.K, b->m->C);
    Mlp shared = mlp_of_tokens(b);
    if (shared.F) mlp_backward(&shared, du, dy, u, ADD);
}

static void ffn_branch_forward(const Block *b, real *y, const real *u) {
    if (b->p.moe) moe_forward(b, y, u);
    else {
        Mlp dense = mlp_of_tokens(b);
        mlp_forward(&dense, y, u);
    }
}

static void ffn_branch_backward(const Block *b, real *du, real *dy, const real *u, int add) {
    if (b->p.moe) moe_backward(b, du, dy, u, add);
    else {
        Mlp dense = mlp_of_tokens(b);
        mlp_backward(&dense, du, dy, u, add);
    }
}

// ------------------------------------------------------------------------------------------------------------------ the sublayer
// u = in(x);  y = out(F(c u));  s = a skip + y, or s = (1 - alpha) skip + alpha y;  next = post(s)        (llmc/modes.h)

typedef struct Sublayer {
    Norm in, out, post;
    int skip;
    real a;
    const real *alpha;                                                      // NULL: a
    real *dalpha;
    real *u, *du, *y, *dy, *yn, *dyn, *s, *ds;                              // buffers of the filled slots, and of y
    void (*forward)(const Block *b, real *y, const real *u);
    void (*backward)(const Block *b, real *du, real *dy, const real *u, int add);
} Sublayer;

static Sublayer attn_sublayer(const Block *b) {
    return (Sublayer){NORM(b, attn_in), NORM(b, attn_out), NORM(b, attn_post), b->p.row->attn.skip, (real)b->p.attn_a, b->w.attn_alpha, b->dw.attn_alpha,
                      b->a.ai, b->d.ai, b->a.ay, b->d.ay, b->a.ao, b->d.ao, b->a.as, b->d.as, attn_branch_forward, attn_branch_backward};
}

static Sublayer ffn_sublayer(const Block *b) {
    return (Sublayer){NORM(b, ffn_in), NORM(b, ffn_out), NORM(b, ffn_post), b->p.row->ffn.skip, (real)b->p.ffn_a, b->w.ffn_alpha, b->dw.ffn_alpha,
                      b->a.fi, b->d.fi, b->a.fy, b->d.fy, b->a.fo, b->d.fo, b->a.fs, b->d.fs, ffn_branch_forward, ffn_branch_backward};
}

// Of the sublayer's input x, u = in(x) and the block's input x0, or of their gradients: the one that its skip taps.
static real *sublayer_skip(const Sublayer *f, real *x, real *u, real *x0) { return f->skip == OWN ? x : f->skip == NORMED ? u : x0; }

// nGPT's residual (eq 10-11): s = skip + alpha (y - skip), alpha_i = 0.05 sqrt(C) |p_i|, so that p, which starts at 1/sqrt(C), gives 0.05.
static real alpha_of(real p, int C) { return (real)(0.05 * sqrt(C)) * (p < 0 ? -p : p); }

static void interpolate_forward(real *s, const real *skip, const real *y, const real *p, int64_t n, int C) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < n; t++)
        for (int64_t i = 0; i < C; i++) s[t * C + i] = skip[t * C + i] + alpha_of(p[i], C) * (y[t * C + i] - skip[t * C + i]);
}

// dskip += (1 - alpha) ds;  dy = alpha ds;  dp += 0.05 sqrt(C) sign(p) sum over t of ds (y - skip)
static void interpolate_backward(real *dskip, real *dy, real *dp, const real *ds, const real *skip, const real *y, const real *p, int64_t n, int C) {
#pragma omp parallel for schedule(static)
    for (int i0 = 0; i0 < C; i0 += STRIP) {
        int i1 = C - i0 < STRIP ? C : i0 + STRIP;
        real sum[STRIP] = {0};
        for (int64_t t = 0; t < n; t++)
            for (int64_t i = i0; i < i1; i++) {
                real alpha = alpha_of(p[i], C), d = ds[t * C + i];
                dskip[t * C + i] += (1 - alpha) * d;
                dy[t * C + i] = alpha * d;
                sum[i - i0] += d * (y[t * C + i] - skip[t * C + i]);
            }
        for (int i = i0; i < i1; i++) dp[i] += (real)(0.05 * sqrt(C)) * (p[i] < 0 ? -sum[i - i0] : sum[i - i0]);
    }
}

static void sublayer_forward(const Block *b, const Sublayer *f, real *next, real *x, real *x0) {
    real *u = slot_forward(&f->in, f->u, x);
    f->forward(b, f->y, u);
    const real *y = slot_forward(&f->out, f->yn, f->y);
    const real *skip = sublayer_skip(f, x, u, x0);
    real *s = f->post.site.on ? f->s : next;
    if (f->alpha) interpolate_forward(s, skip, y, f->alpha, b->s->n, b->m->C);
    else {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < b->s->n * (int64_t)b->m->C; i++) s[i] = f->a * skip[i] + y[i];
    }
    slot_forward(&f->post, next, s);
}

// dx and dx0 are gradients of the stream: ADD. dnext is complete when this begins.
static void sublayer_backward(const Block *b, const Sublayer *f, real *dx, real *dx0, real *dnext, real *x) {
    real *ds = slot_backward(&f->post, f->ds, dnext, f->s), *dyn = ds;
    real *u = f->in.site.on ? f->u : x, *du = f->in.site.on ? f->du : dx;
    if (f->alpha) {                                                         // nGPT: out and post are filled, the skip is x; y after its norm was not kept
        slot_forward(&f->out, f->yn, f->y);
        interpolate_backward(dx, dyn = f->dyn, f->dalpha, ds, x, f->yn, f->alpha, b->s->n, b->m->C);
    }
    real *dy = slot_backward(&f->out, f->dy, dyn, f->y);
    f->backward(b, du, dy, u, f->in.site.on ? SET : ADD);
    real *dskip = sublayer_skip(f, dx, du, dx0);
    if (!f->alpha) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < b->s->n * (int64_t)b->m->C; i++) dskip[i] += f->a * ds[i];
    }
    if (f->in.site.on) norm_backward(dx, du, x, &f->in, ADD);
}

// --recompute cheap: what costs memory traffic but no product, again.
static void block_recompute(const Block *b, real *x) {
    Norm attn_in = NORM(b, attn_in), ffn_in = NORM(b, ffn_in);
    slot_forward(&attn_in, b->a.ai, x);
    real *u = slot_forward(&ffn_in, b->a.fi, b->a.mid);
    if (b->p.F) activation_forward(b->a.h, b->p.hidden.on ? b->a.gun : b->a.gu, b->s->n, b->p.F, b->m->swiglu);
    if (!b->p.moe) return;
    RouterShape r = router_shape(b);
    router_scores(b->a.rs, b->a.rlse, b->a.rz, r);
    gather_forward(b->a.xx, u, b->a.place, r.n, r.K, b->m->C);
    activation_forward(b->a.xh, b->p.expert_hidden.on ? b->a.xgun : b->a.xgu, r.n * r.K, b->m->F, b->m->swiglu);
}

static void block_forward(const Block *b, real *x) {
    Sublayer attn = attn_sublayer(b), ffn = ffn_sublayer(b);
    sublayer_forward(b, &attn, b->a.mid, x, x);
    sublayer_forward(b, &ffn, b->a.x, b->a.mid, x);
}

// dx: gradient of the block's input; d.x, the gradient of its output, is complete.
static void block_backward(const Block *b, real *dx, real *x) {
    Sublayer attn = attn_sublayer(b), ffn = ffn_sublayer(b);
    zero(dx, b->s->n * (int64_t)b->m->C);
    zero(b->d.mid, b->s->n * (int64_t)b->m->C);
    sublayer_backward(b, &ffn, b->d.mid, dx, b->d.x, b->a.mid);
    sublayer_backward(b, &attn, dx, dx, b->d.mid, x);
}

// ------------------------------------------------------------------------------------------------------------------ diagnostics
// What is measured of layers (judge.h). Sums are of fixed pieces, in double, added in order.

// sum of (x - a y)^2; y may be NULL where a is 0
static double square_sum(const real *x, const real *y, double a, int64_t size) {
    enum { PIECES = 64 };
    double part[PIECES], sum = 0;
#pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < PIECES; k++) {
        int64_t begin = size * k / PIECES, end = size * (k + 1) / PIECES;
        double piece = 0;
        if (!y)                                                             // a loop of its own: with the choice inside, it takes four times as long
#pragma omp simd reduction(+ : piece)
            for (int64_t i = begin; i < end; i++) piece += (double)x[i] * x[i];
        else
#pragma omp simd reduction(+ : piece)
            for (int64_t i = begin; i < end; i++) piece += (x[i] - a * y[i]) * (x[i] - a * y[i]);
        part[k] = piece;
    }
    for (int k = 0; k < PIECES; k++) sum += part[k];
    return sum;
}

// Of one layer: sums of squares of the stream out of it, and for attention and ffn of b y and of a skip; the values of each. Of its router: sums over tokens of
// entropy and losses, and their number. Beside these sums the largest logit, and the tokens of each expert.
enum { STREAM, ATTN_BRANCH, ATTN_SKIP, FFN_BRANCH, FFN_SKIP, VALUES, ENTROPY, BALANCE, SEQUENCE, ROUTER_Z, TOKENS, WATCHED_SUMS };

// The losses of one router, as they are defined (see "the router"): balance, sequence, z.
static void router_losses(double losses[3], const Block *b) {
    RouterShape r = router_shape(b);
    losses[0] = losses[1] = losses[2] = 0;
    for (int j = 0; j < r.E; j++) {
        double share = 0;
        for (int i = 0; i < r.B; i++) {
            share += (double)b->a.share[i * r.E + j] / r.B;
            losses[1] += (double)r.E / r.K / r.T / r.B * b->a.load[i * r.E + j] * b->a.share[i * r.E + j];
        }
        losses[0] += (double)r.E / r.K / (double)r.n * b->a.load[r.B * r.E + j] * share;
    }
    for (int64_t t = 0; t < r.n; t++) losses[2] += (double)b->a.rlse[t] * b->a.rlse[t] / (double)r.n;
}

static void router_watch(const Block *b, double *sums, double *load) {
    RouterShape r = router_shape(b);
    double losses[3];
    router_losses(losses, b);
    sums[BALANCE] += losses[0] * (double)r.n;
    sums[SEQUENCE] += losses[1] * (double)r.n;
    sums[ROUTER_Z] += losses[2] * (double)r.n;
    sums[TOKENS] += (double)r.n;
    for (int j = 0; j < r.E; j++) load[j] += b->a.load[r.B * r.E + j];
    for (int64_t t = 0; t < r.n; t++) {
        double sum = 0;
        for (int j = 0; j < r.E; j++) sum += b->a.rs[t * r.E + j];
        for (int j = 0; j < r.E; j++) {
            double p = b->a.rs[t * r.E + j] / sum;
            sums[ENTROPY] -= p > 0 ? p * log(p) : 0;
        }
    }
}

// After block_forward, whose buffers still hold this layer: y is what the sum has beyond a skip.
static void block_stats(const Block *b, double *sums, double *logit, double *load, real *x0) {
    const Sublayer subs[2] = {attn_sublayer(b), ffn_sublayer(b)};
    real *in[2] = {x0, b->a.mid}, *next[2] = {b->a.mid, b->a.x};
    int64_t values = b->s->n * (int64_t)b->m->C, rows = b->s->n * (int64_t)b->m->NH;
    for (int i = 0; i < 2; i++) {
        const Sublayer *f = &subs[i];
        const real *skip = sublayer_skip(f, in[i], f->in.site.on ? f->u : in[i], x0);
        if (f->alpha) {
            for (int64_t k = 0; k < values; k++) {
                double alpha = alpha_of(f->alpha[k % b->m->C], b->m->C);
                sums[ATTN_BRANCH + 2 * i] += alpha * f->yn[k] * alpha * f->yn[k];
                sums[ATTN_SKIP + 2 * i] += (1 - alpha) * skip[k] * (1 - alpha) * skip[k];
            }
            continue;
        }
        sums[ATTN_BRANCH + 2 * i] += square_sum(f->post.site.on ? f->s : next[i], skip, f->a, values);
        sums[ATTN_SKIP + 2 * i] += (double)f->a * f->a * square_sum(skip, NULL, 0, values);
    }
    sums[STREAM] += square_sum(b->a.x, NULL, 0, values);
    sums[VALUES] += (double)values;
    if (b->p.moe) router_watch(b, sums, load);
    for (int64_t i = 0; i < rows; i++) if (b->a.peak[i] > *logit || isnan(b->a.peak[i])) *logit = b->a.peak[i];     // NaN stays
}

// ------------------------------------------------------------------------------------------------------------------ the model

struct Gpt {
    Model m;
    Sizes max, now;                                     // the micro-batch memory was made for, and the one in work
    Layout layout;
    ActLayout act_layout;
    real *tensors[TENSOR_KINDS], *acts, *grads;         // parameters, their gradients and moments; activations and their gradients
    real *kv_cache;                                         // keys and values of a text, layer by layer; made when extend first asks for it
    real *rotary;                                       // rope_table of all positions, or NULL
    int cached, cached_before;                              // how many of its rows are there, under these weights; extending: those before the rows in work
    bool decoding, fresh;                              // fresh: gradients were zeroed, but those of linears' weights, which the first micro-step SETs, are still the last step's
    int recompute;
    real z_loss;
    double ce, z, router;                               // sums of losses over the tokens seen since they were last asked
    int64_t seen;
    Comm *comm;
    double *load_sums;                                  // of one router, over processes
    bool watching;
    double *watched_sums, *watched_loads;               // of each layer WATCHED_SUMS sums, then of each its logit; of each the tokens of its experts
    int32_t *inputs, *targets;
};

static double *watched_logits(const Gpt *g) { return g->watched_sums + (int64_t)g->m.L * WATCHED_SUMS; }

static Block gpt_block(const Gpt *g, int l) {
    KvCache cache = kv_cache_view(&g->m, g->decoding ? g->kv_cache : NULL, g->max.T, l, g->cached_before);
    return (Block){&g->m, &g->now, place_at(&g->m, l), params_view(&g->layout, g->tensors[WEIGHTS], l), grads_view(&g->layout, g->tensors[GRADS], l),
                   acts_view(&g->act_layout, &g->m, &g->max, g->acts, l, 0), acts_view(&g->act_layout, &g->m, &g->max, g->grads, l, 1),
                   cache, g->rotary ? g->rotary + (int64_t)cache.cached * rotary_size(&g->m) : NULL, g->fresh ? SET : ADD, 0};
}

static Gpt *gpt_create(const Model *m, const Setup *setup) {
    Gpt *g = check_alloc(sizeof *g, "the model");
    g->m = *m;
    g->recompute = setup->recompute;
    g->z_loss = (real)setup->z_loss;
    g->now = g->max = sizes_make(m, setup->B, setup->T, setup->recompute, omp_get_max_threads(), 1);
    g->comm = setup->comm;
    g->layout = layout_make(m);
    layout_share(&g->layout, comm_rank(g->comm), comm_size(g->comm));
    g->act_layout = act_layout_make(m, &g->max);
    for (int kind = 0; kind < setup_kinds(setup); kind++)
        g->tensors[kind] = check_alloc((size_t)(kind < ADAM_M ? g->layout.total : g->layout.state) * sizeof(real), "the parameters, their gradients and moments");
    g->acts = check_alloc((size_t)g->act_layout.acts * sizeof(real), "the activations");
    g->grads = setup->training ? check_alloc((size_t)g->act_layout.grads * sizeof(real), "the gradients of activations") : NULL;
    if (m->rope) {
        g->rotary = check_alloc((size_t)g->max.T * (size_t)rotary_size(m) * sizeof(real), "the rotary angles");
        rope_table(g->rotary, g->max.T, rotary_size(m), m->theta);
    }
    g->inputs = check_alloc((size_t)g->max.n * sizeof(int32_t), "the inputs");
    g->targets = check_alloc((size_t)g->max.n * sizeof(int32_t), "the targets");
    g->watched_loads = check_alloc((size_t)(m->L * m->moe.E + 1) * sizeof(double), "the loads of experts");
    g->watched_sums = check_alloc((size_t)m->L * (WATCHED_SUMS + 1) * sizeof(double), "what is measured of layers");
    g->load_sums = check_alloc((size_t)(m->moe.E + 1) * sizeof(double), "the loads of experts");
    return g;
}

static void gpt_destroy(Gpt *g) {
    for (int kind = 0; kind < TENSOR_KINDS; kind++) free(g->tensors[kind]);
    free(g->acts);
    free(g->grads);
    free(g->kv_cache);
    free(g->rotary);
    free(g->inputs);
    free(g->targets);
    free(g->watched_loads);
    free(g->watched_sums);
    free(g->load_sums);
    layout_free(&g->layout);
    act_layout_free(&g->act_layout);
    free(g);
}

// Adds up, besides the router's losses, how many tokens each expert got since gradients were zeroed.
static void gpt_count(Gpt *g, const Block *b) {
    RouterShape r = router_shape(b);
    double losses[3];
    router_losses(losses, b);
    g->router += (double)r.n * (r.balance * losses[0] + r.sequence * losses[1] + r.z * losses[2]);
    for (int j = 0; j < r.E; j++) b->a.loads[j] += b->a.load[r.B * r.E + j];
}

// From tokens to the stream out of the last block. counted: routers' losses are part of this forward's.
static real *gpt_stream(Gpt *g, const int32_t *inputs, int B, int T, bool counted) {
    const Model *m = &g->m;
    CHECK(B * T <= g->max.n && T <= g->max.T, "a batch of %d x %d tokens where memory was made for %d x %d", B, T, g->max.B, g->max.T);
    g->now.B = B;
    g->now.T = T;
    g->now.n = B * T;
    memcpy(g->inputs, inputs, (size_t)g->now.n * sizeof *inputs);
    tokens_check("token", inputs, g->now.n, m->V);
    Block b = gpt_block(g, 0);
    Norm emb = NORM(&b, emb);
    embedding_forward(emb.site.on ? b.a.raw : b.a.e, g->inputs, b.w.wte, at(b.w.wpe, (int64_t)b.cache.cached * m->C), B, T, m->C, (real)m->emb_scale);
    real *x = slot_forward(&emb, b.a.e, emb.site.on ? b.a.raw : b.a.e);
    for (int l = 0; l < m->L; l++) {
        b = gpt_block(g, l);
        block_forward(&b, x);
        if (b.p.moe && counted) gpt_count(g, &b);
        if (g->watching && !g->decoding) block_stats(&b, g->watched_sums + (int64_t)l * WATCHED_SUMS, watched_logits(g) + l, g->watched_loads + (int64_t)l * m->moe.E, x);
        x = b.a.x;
    }
    return x;
}

// The logits of the rows in work, of which x is the stream.
static void gpt_head(Gpt *g, real *x) {
    const Model *m = &g->m;
    Block b = gpt_block(g, m->L - 1);
    Norm fin = NORM(&b, fin), gain = logits_gain(&b);
    x = slot_forward(&fin, b.a.fx, x);
    linear_forward(gain.site.on ? b.a.z : b.a.logits, x, m->tied ? b.w.wte : b.w.wlm, NULL, linear_shape(&b, m->Vp, m->C, 1));
    slot_forward(&gain, b.a.logits, b.a.z);
}

static void gpt_forward(Gpt *g, const int32_t *inputs, const int32_t *targets, int B, int T) {
    const Model *m = &g->m;
    gpt_head(g, gpt_stream(g, inputs, B, T, targets != NULL));
    if (!targets) return;
    Block b = gpt_block(g, m->L - 1);
    memcpy(g->targets, targets, (size_t)g->now.n * sizeof *targets);
    tokens_check("target", targets, g->now.n, m->V);
    crossentropy_forward(b.a.losses, b.a.logsum, b.a.logits, g->targets, g->now.n, m->V, m->Vp);
    for (int i = 0; i < g->now.n; i++) {
        g->ce += (double)b.a.losses[i];
        g->z += (double)g->z_loss * b.a.logsum[i] * b.a.logsum[i];
    }
    g->seen += g->now.n;
}

// Everything but attention and positions is the business of one token: the new rows go through the same blocks, and read the keys and values of those before.
static void gpt_decode(Gpt *g, const int32_t *inputs, int n, int position) {
    int T = g->max.T;
    decode_check(n, position, g->cached, T);
    if (!g->kv_cache) g->kv_cache = check_alloc((size_t)g->m.L * (size_t)T * (size_t)kv_cache_width(&g->m) * sizeof(real), "the keys and values of a text");
    g->decoding = true;
    g->cached_before = position;
    real *x = gpt_stream(g, inputs, 1, n, false);
    g->now.T = g->now.n = 1;                                // of the last row alone
    gpt_head(g, x + (int64_t)(n - 1) * g->m.C);
    g->cached = position + n;
    g->decoding = false;
}

// Means over all tokens that all processes saw; *square, theirs too, becomes the sum of it.
static Loss gpt_means(Gpt *g, double *square) {
    double sums[] = {g->ce, g->z, g->router, (double)g->seen, *square};
    comm_combine(g->comm, sums, 5, COMM_SUM);
    double n = sums[3] > 0 ? sums[3] : 1;
    Loss loss = {sums[0] / n, sums[1] / n, sums[2] / n};
    *square = sums[4];
    g->ce = g->z = g->router = 0;
    g->seen = 0;
    return loss;
}

static Loss gpt_loss(Gpt *g) {
    double none = 0;
    return gpt_means(g, &none);
}

// The gradients of layer l (-1: of the model) are complete here: they travel to their owners.
static void gpt_reduce(Gpt *g, int l) {
    for (const Entry *e = g->layout.entries; e < g->layout.entries + g->layout.count; e++)
        for (int rank = 0; rank < comm_size(g->comm) && e->layer == l && !entry_is_common(e); rank++) {
            Part part = entry_part(e, rank, comm_size(g->comm));
            comm_reduce(g->comm, g->tensors[GRADS] + e->offset + part.first, part.size, sizeof(real), rank);
        }
    comm_poke(g->comm);
}

static void gpt_backward(Gpt *g, double scale, int last) {
    const Model *m = &g->m;
    bool traveling = last && comm_size(g->comm) > 1;
    Block b = gpt_block(g, m->L - 1);
    Norm fin = NORM(&b, fin);
    real *x = fin.site.on ? b.a.fx : b.a.x, *dx = fin.site.on ? b.d.fx : b.d.x;
    crossentropy_backward(b.a.logits, b.a.logsum, g->targets, g->now.n, m->V, m->Vp, (real)scale, g->z_loss);
    Norm gain = logits_gain(&b);
    real *dlogits = slot_backward(&gain, b.d.z, b.a.logits, b.a.z);
    linear_backward(dx, m->tied ? b.dw.wte : b.dw.wlm, NULL, dlogits, x, m->tied ? b.w.wte : b.w.wlm, linear_shape(&b, m->Vp, m->C, 1), SET);
    slot_backward(&fin, b.d.x, dx, b.a.x);
    for (int l = m->L - 1; l >= 0; l--) {
        Block below = gpt_block(g, l > 0 ? l - 1 : 0);
        real *in = l > 0 ? below.a.x : b.a.e, *din = l > 0 ? below.d.x : b.d.e;
        b.loss_scale = (real)(scale * (double)g->now.n);
        if (g->recompute == RECOMPUTE_ON) block_forward(&b, in);
        if (g->recompute == RECOMPUTE_CHEAP) block_recompute(&b, in);
        block_backward(&b, din, in);
        if (traveling) gpt_reduce(g, l);
        b = below;
    }
    Norm emb = NORM(&b, emb);
    real *de = slot_backward(&emb, b.d.raw, b.d.e, b.a.raw);
    embedding_backward(b.dw.wte, b.dw.wpe, de, g->inputs, g->now.B, g->now.T, m->C, (real)m->emb_scale);
    if (traveling) gpt_reduce(g, -1);
    g->fresh = false;
}

static void *gpt_tensor(Gpt *g, int kind, const Entry *e) { return g->tensors[kind] ? g->tensors[kind] + (kind < ADAM_M ? e->offset : e->state) : NULL; }

// The weights of linears, the head's among them: what linear_backward SETs in a step's first micro-step.
static bool is_set_first(const Gpt *g, const Entry *e) {
    int role = e->row.init;
    return role != ROLE_GAIN && role != ROLE_ZERO && (role != ROLE_EMBEDDING || (g->m.tied && e->id == PARAM_wte));
}

static void gpt_zero(Gpt *g, bool set_first) {
    for (const Entry *e = g->layout.entries; e < g->layout.entries + g->layout.count; e++)
        if (is_set_first(g, e) == set_first) zero(gpt_tensor(g, GRADS, e), e->size);
}

static void gpt_zero_grads(Gpt *g) {
    gpt_zero(g, false);
    g->fresh = true;
    for (int l = 0; l < g->m.L; l++) {
        Block b = gpt_block(g, l);
        if (b.p.moe) memset(b.a.loads, 0, (size_t)g->m.moe.E * sizeof(real));
    }
}

// Before gradients are read: without a micro-step all of them are 0.
static void gpt_settle(Gpt *g) {
    if (g->fresh) gpt_zero(g, true);
    g->fresh = false;
}

// The tensors are the host's own: nothing to bring and nothing to send. Keys and values are of the weights before.
static void gpt_fetch(Gpt *g, int kind) { if (kind == GRADS) gpt_settle(g); }
static void gpt_store(Gpt *g, int kind, int64_t step) { (void)kind, (void)step; g->cached = 0; }

static const void *gpt_logits(Gpt *g, int64_t row) { return gpt_block(g, 0).a.logits + row * g->m.Vp; }

static void gpt_stats_begin(Gpt *g) {
    g->watching = true;
    memset(g->watched_sums, 0, (size_t)g->m.L * WATCHED_SUMS * sizeof(double));
    memset(g->watched_loads, 0, (size_t)(g->m.L * g->m.moe.E) * sizeof(double));
    for (int l = 0; l < g->m.L; l++) watched_logits(g)[l] = -INFINITY;
}

static void layer_stats(Gpt *g, LayerStats *layers) {
    int L = g->m.L;
    g->watching = false;
    comm_combine(g->comm, g->watched_sums, (int64_t)L * WATCHED_SUMS, COMM_SUM);
    comm_combine(g->comm, watched_logits(g), L, COMM_MAX);
    comm_combine(g->comm, g->watched_loads, (int64_t)L * g->m.moe.E, COMM_SUM);
    for (int l = 0; l < L; l++) {
        const double *s = g->watched_sums + (int64_t)l * WATCHED_SUMS, n = s[TOKENS];
        layers[l] = (LayerStats){sqrt(s[STREAM] / s[VALUES]), sqrt(s[ATTN_BRANCH] / s[ATTN_SKIP]), sqrt(s[FFN_BRANCH] / s[FFN_SKIP]), watched_logits(g)[l],
                                 s[ENTROPY] / n, s[BALANCE] / n, s[SEQUENCE] / n, s[ROUTER_Z] / n, g->watched_loads + (int64_t)l * g->m.moe.E};
    }
}

// ------------------------------------------------------------------------------------------------------------------ the optimizer

static void gpt_normalize(Gpt *g) {
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        real *w = gpt_tensor(g, WEIGHTS, e);
        EntryLines s = entry_lines(&g->m, e);
        if (!s.length) continue;
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < e->size / s.length; i++) {
            real *line = w + i / s.step * s.length * s.step + i % s.step, square = 0;
            for (int64_t j = 0; j < s.length; j++) square += line[j * s.step] * line[j * s.step];
            for (int64_t j = 0; j < s.length && square > 0; j++) line[j * s.step] /= (real)sqrt(square);
        }
    }
}

// The selection bias of an expert moves by a fixed step towards an even load (Wang et al. 2024; DeepSeek-V3 section 2.1.2): b += rate sign(mean load - load)
static real balance_step(const double *load, int E, int e, real rate) {
    double sum = 0;
    for (int j = 0; j < E; j++) sum += load[j];
    return load[e] * E < sum ? rate : load[e] * E > sum ? -rate : 0;
}

// The tokens that each expert of layer l got in this step, from all processes.
static const double *gpt_loads(Gpt *g, int l) {
    const real *loads = gpt_block(g, l).a.loads;
    for (int j = 0; j < g->m.moe.E; j++) g->load_sums[j] = loads[j];
    comm_combine(g->comm, g->load_sums, g->m.moe.E, COMM_SUM);
    return g->load_sums;
}

// Of the gradients that this process owns, in pieces as long as possible: of one process, all at once.
static double gpt_square(const Gpt *g) {
    int64_t begin = 0, end = 0;
    double sum = 0;
    for (const Entry *e = g->layout.entries; e < g->layout.entries + g->layout.count; e++) {
        Part part = entry_part(e, comm_rank(g->comm), comm_size(g->comm));
        if (!part.size) continue;
        if (e->offset + part.first != end) {
            sum += square_sum(g->tensors[GRADS] + begin, NULL, 0, end - begin);
            begin = e->offset + part.first;
        }
        end = e->offset + (part.first + part.size < e->size ? part.first + part.size : memory_padded(e->size));
    }
    return sum + square_sum(g->tensors[GRADS] + begin, NULL, 0, end - begin);
}

// m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr (mhat / (sqrt(vhat) + eps) + decay (w - target)).  Each process updates its part, which then goes to all.
static Update gpt_update(Gpt *g, const AdamW *o) {
    gpt_settle(g);
    comm_wait(g->comm);
    double square = gpt_square(g);
    Loss loss = gpt_means(g, &square);
    Update u = {loss, sqrt(square), 0};
    u.applied = isfinite(u.loss.ce) && isfinite(u.loss.z) && isfinite(u.loss.router) && isfinite(u.norm) && (!o->max_ce || u.loss.ce <= o->max_ce) && (!o->max_norm || u.norm <= o->max_norm);
    if (!u.applied) return u;
    g->cached = 0;                                                       // of the weights before
    real correct1 = (real)(1 / (1 - pow(o->beta1, (double)o->step))), correct2 = (real)(1 / (1 - pow(o->beta2, (double)o->step)));
    real b1 = (real)o->beta1, b2 = (real)o->beta2, eps = (real)o->eps, scale = (real)(o->clip > 0 && u.norm > o->clip ? o->clip / u.norm : 1);
    int processes = comm_size(g->comm);
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        Part part = entry_part(e, comm_rank(g->comm), processes);
        real *w = (real *)gpt_tensor(g, WEIGHTS, e) + part.first, *d = (real *)gpt_tensor(g, GRADS, e) + part.first, *m = gpt_tensor(g, ADAM_M, e), *v = gpt_tensor(g, ADAM_V, e);
        real lr = (real)o->lr[e->row.lr], decay = (real)o->decay[e->row.decay], target = e->row.init == ROLE_GAIN ? (real)o->gain_target : 0;
        if (entry_is_common(e)) {                                           // every process, alike
            const double *load = gpt_loads(g, e->layer);
            w = gpt_tensor(g, WEIGHTS, e);
            for (int i = 0; i < e->size; i++) w[i] += balance_step(load, g->m.moe.E, i, lr);
            continue;
        }
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < part.size; i++) {
            real grad = scale * d[i];
            m[i] = b1 * m[i] + (1 - b1) * grad;
            v[i] = b2 * v[i] + (1 - b2) * grad * grad;
            w[i] -= lr * (m[i] * correct1 / ((real)sqrt(v[i] * correct2) + eps) + decay * (w[i] - target));
        }
        for (int rank = 0; rank < processes && processes > 1; rank++) {
            Part theirs = entry_part(e, rank, processes);
            comm_spread(g->comm, (real *)gpt_tensor(g, WEIGHTS, e) + theirs.first, theirs.size, sizeof(real), rank);
        }
    }
    comm_wait(g->comm);
    gpt_normalize(g);
    return u;
}

// After a step. Its update is computed again from the moments: with c m / (sqrt(c v) + eps) = A,  before = (w + lr (A - decay target)) / (1 - lr decay).
// nGPT's matrices, normalized since: w stands for before, which had the same length.
static void tensor_stats(Gpt *g, const AdamW *o, TensorStats *stats) {
    double correct1 = o ? 1 / (1 - pow(o->beta1, (double)o->step)) : 0, correct2 = o ? 1 / (1 - pow(o->beta2, (double)o->step)) : 0;
#pragma omp parallel for schedule(dynamic)
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        Part part = entry_part(e, comm_rank(g->comm), comm_size(g->comm));
        const real *w = (real *)gpt_tensor(g, WEIGHTS, e) + part.first, *d = (real *)gpt_tensor(g, GRADS, e) + part.first, *m = gpt_tensor(g, ADAM_M, e), *v = gpt_tensor(g, ADAM_V, e);
        double lr = o ? o->lr[e->row.lr] : 0, decay = o ? o->decay[e->row.decay] : 0, target = o && e->row.init == ROLE_GAIN ? o->gain_target : 0;
        double eps = o ? o->eps : 1, grad = 0, weight = 0, update = 0;
        bool normalized = entry_lines(&g->m, e).length > 0;
        for (int64_t i = 0; i < part.size && !entry_is_common(e); i++) {
            double adam = m[i] * correct1 / (sqrt(v[i] * correct2) + eps), before = (w[i] + lr * (adam - decay * target)) / (1 - lr * decay);
            if (normalized) before = w[i];
            double step = lr * (adam + decay * (before - target));
            grad += (double)d[i] * d[i];
            weight += before * before;
            update += step * step;
        }
        stats[k] = (TensorStats){grad, weight, update};
    }
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        double s[] = {stats[k].grad, stats[k].weight, stats[k].update};
        comm_combine(g->comm, s, 3, COMM_SUM);
        if (entry_is_common(e)) {                                           // moved alike by every process
            const double *load = gpt_loads(g, e->layer);
            const real *w = gpt_tensor(g, WEIGHTS, e);
            for (int i = 0; i < e->size; i++) {
                double step = balance_step(load, g->m.moe.E, i, (real)(o ? o->lr[LR_BALANCE] : 0)), before = w[i] - step;
                s[1] += before * before;
                s[2] += step * step;
            }
        }
        stats[k] = (TensorStats){sqrt(s[0]), sqrt(s[1]), sqrt(s[2])};
    }
}

static void gpt_stats(Gpt *g, const AdamW *applied, LayerStats *layers, TensorStats *tensors) {
    if (layers) layer_stats(g, layers);
    if (tensors) tensor_stats(g, applied, tensors);
}

// An eighth more than the tables: batches, texts, a tensor on its way to a file, the data's pages.
static double gpt_bytes(const Model *m, const Setup *setup, double tables) {
    (void)m, (void)setup;
    return tables * 9 / 8;
}

static double gpt_room(const Model *m, const Setup *setup) {
    (void)m;
    return free_memory("", comm_here(setup->comm));
}

static double gpt_peak(void) { return sizeof(real) == 4 ? peak_products(0.05) : 0; }       // products in double are three loops

// ------------------------------------------------------------------------------------------------------------------ main

const Trainer NAMED(judge_, PREC) = {
    .device = "cpu", .precision = QUOTED(PREC), .mode = &MODES[NORM_MODE], .commit = GIT_HASH,
    .element = sizeof(real), .storage = sizeof(real),
    .create = gpt_create, .destroy = gpt_destroy,
    .tensor = gpt_tensor, .fetch = gpt_fetch, .store = gpt_store, .normalize = gpt_normalize,
    .zero_grads = gpt_zero_grads, .forward = gpt_forward, .backward = gpt_backward,
    .update = gpt_update, .loss = gpt_loss, .decode = gpt_decode, .logits = gpt_logits,
    .stats_begin = gpt_stats_begin, .stats = gpt_stats,
    .bytes = gpt_bytes, .room = gpt_room, .peak = gpt_peak,
};

int main(int argc, char **argv) {
    Run *run = run_open(&NAMED(judge_, PREC), argc, argv);      // flags, data, model, weights
    if (!run) return 0;                                       // --help, --version, --show
    int status = train(run);                                  // the loop: llmc/run/train.c
    if (status == 0) evaluate(run);
    if (status == 0) sample(run);
    return run_close(run, status);
}
