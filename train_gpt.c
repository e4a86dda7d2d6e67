// train_gpt.c: the judge. GPT-2 and Llama-like models on the CPU, forward and backward of every layer by hand, under any
// normalization placement; also a CPU trainer for real use.
//
// 1. What is here can be read from top to bottom: layers, then the two branches of a block, the sublayer, the model, the optimizer, main.
// 2. Every layer is a pair, <layer>_forward and <layer>_backward. Arguments: outputs | saved | inputs | parameters | sizes.
// 3. SET or ADD: a gradient is ADDed exactly where the forward value was read more than once (the stream, the block's input, the tied
//    embedding, parameters over micro-steps); everything else is SET.
// 4. The mode is data (llmc/modes.h). The only function that looks at it is the sublayer; layers never do.
// 5. Built once per precision (REAL = float or double). Work is split by fixed pieces and every sum has one order: the same bits for any
//    number of threads.
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
typedef REAL Real;
#define real Real
#include "llmc/exp.h"
#include "llmc/gemm.h"
#include "llmc/judge.h"
#include "llmc/peak.h"
#include "llmc/trainer.h"

enum { SET, ADD };
enum { STRIP = 32 };                                    // columns that a thread owns where it sums over rows, so that each sum has one order

// ------------------------------------------------------------------------------------------------------------------ linear
// y = c W x + b over n rows. x: [n, in], W: [out, in], b: [out] or NULL, y: [n, ldy] of which `out` columns are written.

typedef struct { int64_t n; int out, in, ldy; real c; } LinearShape;

static void linear_forward(real *y, const real *x, const real *w, const real *b, LinearShape s) {
    gemm(view(y, s.ldy, 1), view(x, s.in, 1), view(w, 1, s.in), s.n, s.out, s.in, s.c, 0);
    if (!b) return;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < s.n; i++)
        for (int j = 0; j < s.out; j++) y[i * s.ldy + j] += b[j];
}

// dx = c W^T dy (SET or ADD);  dW += c dy x^T;  db += dy
static void linear_backward(real *dx, real *dw, real *db, const real *dy, const real *x, const real *w, LinearShape s, int add) {
    gemm(view(dx, s.in, 1), view(dy, s.ldy, 1), view(w, s.in, 1), s.n, s.in, s.out, s.c, add == ADD);
    gemm(view(dw, s.in, 1), view(dy, 1, s.ldy), view(x, s.in, 1), s.out, s.in, s.n, s.c, 1);
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

typedef struct Norm {
    Site site;
    const real *w, *b;
    real *dw, *db, *mean, *rstd;
    int64_t n;
    real eps;
} Norm;

static void norm_forward(real *y, const real *x, const Norm *s) {
    int W = s->site.width, G = s->site.groups, shared = s->site.gains == W;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < s->n * G; row++) {
        const real *x_r = x + row * W, *w = s->w + (shared ? 0 : row % G * W), *b = s->b ? s->b + (shared ? 0 : row % G * W) : NULL;
        real *y_r = y + row * W, mean = 0, square = 0;
        if (b) {
#pragma omp simd reduction(+ : mean)
            for (int i = 0; i < W; i++) mean += x_r[i];
            mean /= W;
            s->mean[row] = mean;
        }
#pragma omp simd reduction(+ : square)
        for (int i = 0; i < W; i++) square += (x_r[i] - mean) * (x_r[i] - mean);
        real rstd = 1 / (real)sqrt(square / W + s->eps);
        s->rstd[row] = rstd;
        for (int i = 0; i < W; i++) y_r[i] = w[i] * ((x_r[i] - mean) * rstd) + (b ? b[i] : 0);
    }
}

// With xhat = (x - m) r and u = g * dy:  dx = r (u - [mean(u)] - xhat mean(u * xhat)), the bracket for LayerNorm only;  dg += dy * xhat;  db += dy
static void norm_backward(real *dx, const real *dy, const real *x, const Norm *s, int add) {
    int W = s->site.width, G = s->site.groups, shared = s->site.gains == W;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < s->n * G; row++) {
        const real *x_r = x + row * W, *dy_r = dy + row * W, *w = s->w + (shared ? 0 : row % G * W);
        real *dx_r = dx + row * W, mean = s->b ? s->mean[row] : 0, rstd = s->rstd[row], sum_u = 0, sum_ux = 0;
#pragma omp simd reduction(+ : sum_u, sum_ux)
        for (int i = 0; i < W; i++) {
            sum_u += w[i] * dy_r[i];
            sum_ux += w[i] * dy_r[i] * (x_r[i] - mean) * rstd;
        }
        real mean_u = s->b ? sum_u / W : 0, mean_ux = sum_ux / W;
        for (int i = 0; i < W; i++) {
            real d = rstd * (w[i] * dy_r[i] - mean_u - (x_r[i] - mean) * rstd * mean_ux);
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
                real mean = s->b ? s->mean[row] : 0, rstd = s->rstd[row];
                for (int i = 0; i < strip; i++) {
                    dw[i] += dy_r[i] * ((x_r[i] - mean) * rstd);
                    db[i] += dy_r[i];
                }
            }
            for (int i = 0; i < strip; i++) {
                s->dw[g * W + i0 + i] += dw[i];
                if (s->b) s->db[g * W + i0 + i] += db[i];
            }
        }
}

// ------------------------------------------------------------------------------------------------------------------ RoPE
// Rotary positions (Su et al. 2021), half-split: the pair (i, i + HS/2) of every head turns by t * theta^(-2i/HS). In place.
// direction +1 forward, -1 backward (the transpose of a rotation).

static void rope(real *x, int B, int T, int heads, int HS, double theta, int direction) {
    int half = HS / 2;
#pragma omp parallel for collapse(2) schedule(static)
    for (int t = 0; t < T; t++)
        for (int i = 0; i < half; i++) {
            double angle = t * pow(theta, -2.0 * i / HS);
            real c = (real)cos(angle), s = (real)(direction * sin(angle));
            for (int64_t b = 0; b < B; b++)
                for (int h = 0; h < heads; h++) {
                    real *x_i = x + ((b * T + t) * heads + h) * HS + i, first = x_i[0], second = x_i[half];
                    x_i[0] = first * c - second * s;
                    x_i[half] = second * c + first * s;
                }
        }
}

// ------------------------------------------------------------------------------------------------------------------ attention
// Causal attention with grouped queries (Ainslie et al. 2023): S = Q K^T / sqrt(HS), P = softmax over keys <= query, C = P V.
// q: [n, NH, HS], k, v: [n, KV, HS], c: [n, NH, HS]; head h reads kv head h / (NH / KV). Saved: lse, the log-sum-exp of each row of S. peak: its largest value.
// S is never stored whole: QUERY_BLOCK x KEY_BLOCK of it at a time in a thread's own scratch. Forward, c and the sums so far fade by exp(old - new maximum)
// from block to block (online softmax: Milakov, Gimelshein 2018; Dao et al. 2022); backward computes S again.

typedef struct { int B, T, NH, KV, HS; } AttnShape;

static inline int thread_id(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static void attention_forward(real *c, real *peak, real *lse, real *scores, const real *q, const real *k, const real *v, AttnShape s) {
    int64_t qs = (int64_t)s.NH * s.HS, ks = (int64_t)s.KV * s.HS, T = s.T;
    real scale = 1 / (real)sqrt(s.HS);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < s.NH; h++) {
            real *S = scores + (int64_t)thread_id() * 2 * QUERY_BLOCK * KEY_BLOCK;
            int64_t q_bh = b * T * qs + h * s.HS, k_bh = b * T * ks + h / (s.NH / s.KV) * s.HS;
            for (int64_t t0 = 0; t0 < T; t0 += QUERY_BLOCK) {
                int64_t rows = T - t0 < QUERY_BLOCK ? T - t0 : QUERY_BLOCK, q_t = q_bh + t0 * qs;
                real max[QUERY_BLOCK], sum[QUERY_BLOCK];
                for (int64_t j0 = 0; j0 < t0 + rows; j0 += KEY_BLOCK) {
                    int64_t keys = t0 + rows - j0 < KEY_BLOCK ? t0 + rows - j0 : KEY_BLOCK;
                    gemm(view(S, KEY_BLOCK, 1), view(q + q_t, qs, 1), view(k + k_bh + j0 * ks, 1, ks), rows, keys, s.HS, scale, 0);
                    for (int64_t i = 0; i < rows; i++) {
                        real *S_i = S + i * KEY_BLOCK, *c_i = c + q_t + i * qs, most = S_i[0], total = 0;
                        int64_t seen = t0 + i + 1 - j0 < keys ? t0 + i + 1 - j0 : keys;
#pragma omp simd reduction(max : most)
                        for (int64_t j = 1; j < seen; j++) most = S_i[j] > most ? S_i[j] : most;
                        if (j0 > 0 && max[i] > most) most = max[i];
#pragma omp simd reduction(+ : total)
                        for (int64_t j = 0; j < seen; j++) total += S_i[j] = exp_real(S_i[j] - most);
                        for (int64_t j = seen; j < keys; j++) S_i[j] = 0;
                        if (j0 > 0) {                                        // what there is so far was relative to the old maximum
                            real fade = exp_real(max[i] - most);
                            total += fade * sum[i];
                            for (int j = 0; j < s.HS; j++) c_i[j] *= fade;
                        }
                        max[i] = most;
                        sum[i] = total;
                    }
                    gemm(view(c + q_t, qs, 1), view(S, KEY_BLOCK, 1), view(v + k_bh + j0 * ks, ks, 1), rows, s.HS, keys, 1, j0 > 0);
                }
                for (int64_t i = 0; i < rows; i++) {
                    for (int j = 0; j < s.HS; j++) c[q_t + i * qs + j] /= sum[i];
                    peak[(b * T + t0 + i) * s.NH + h] = isnan(sum[i]) ? sum[i] : max[i];        // max passes over NaN, the sum does not
                    lse[(b * T + t0 + i) * s.NH + h] = max[i] + (real)log(sum[i]);
                }
            }
        }
}

// With P = exp(S - lse):  dV = P^T dC;  dP = dC V^T;  dS = P * (dP - D), D = rowsum(dC * C);  dQ = dS K / sqrt(HS);  dK = dS^T Q / sqrt(HS)
static void attention_backward(real *dq, real *dk, real *dv, real *scores, const real *dc, const real *c, const real *lse,
                               const real *const qkv[3], AttnShape s) {
    const real *q = qkv[0], *k = qkv[1], *v = qkv[2];
    int64_t qs = (int64_t)s.NH * s.HS, ks = (int64_t)s.KV * s.HS, T = s.T;
    int group = s.NH / s.KV;
    real scale = 1 / (real)sqrt(s.HS);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int b = 0; b < s.B; b++)
        for (int kv = 0; kv < s.KV; kv++) {                                  // one thread owns a kv head: its dk, dv have one order
            real *P = scores + (int64_t)thread_id() * 2 * QUERY_BLOCK * KEY_BLOCK, *dS = P + QUERY_BLOCK * KEY_BLOCK;
            int64_t k_bh = b * T * ks + kv * s.HS;
            for (int64_t t = 0; t < T; t++) {
                memset(dk + k_bh + t * ks, 0, (size_t)s.HS * sizeof(real));
                memset(dv + k_bh + t * ks, 0, (size_t)s.HS * sizeof(real));
            }
            for (int h = kv * group; h < (kv + 1) * group; h++)
                for (int64_t t0 = 0; t0 < T; t0 += QUERY_BLOCK) {
                    int64_t rows = T - t0 < QUERY_BLOCK ? T - t0 : QUERY_BLOCK, q_t = (b * T + t0) * qs + h * s.HS;
                    real D[QUERY_BLOCK];
                    for (int64_t i = 0; i < rows; i++) {
                        D[i] = 0;
                        for (int j = 0; j < s.HS; j++) D[i] += dc[q_t + i * qs + j] * c[q_t + i * qs + j];
                    }
                    for (int64_t j0 = 0; j0 < t0 + rows; j0 += KEY_BLOCK) {
                        int64_t keys = t0 + rows - j0 < KEY_BLOCK ? t0 + rows - j0 : KEY_BLOCK, k_j = k_bh + j0 * ks;
                        gemm(view(P, KEY_BLOCK, 1), view(q + q_t, qs, 1), view(k + k_j, 1, ks), rows, keys, s.HS, scale, 0);
                        gemm(view(dS, KEY_BLOCK, 1), view(dc + q_t, qs, 1), view(v + k_j, 1, ks), rows, keys, s.HS, 1, 0);
                        for (int64_t i = 0; i < rows; i++) {
                            real *P_i = P + i * KEY_BLOCK, *dS_i = dS + i * KEY_BLOCK, lse_i = lse[(b * T + t0 + i) * s.NH + h];
                            int64_t seen = t0 + i + 1 - j0 < keys ? t0 + i + 1 - j0 : keys;
                            for (int64_t j = 0; j < seen; j++) {
                                P_i[j] = exp_real(P_i[j] - lse_i);
                                dS_i[j] = P_i[j] * (dS_i[j] - D[i]);
                            }
                            for (int64_t j = seen; j < keys; j++) P_i[j] = dS_i[j] = 0;
                        }
                        gemm(view(dv + k_j, ks, 1), view(P, 1, KEY_BLOCK), view(dc + q_t, qs, 1), keys, s.HS, rows, 1, 1);
                        gemm(view(dq + q_t, qs, 1), view(dS, KEY_BLOCK, 1), view(k + k_j, ks, 1), rows, s.HS, keys, scale, j0 > 0);
                        gemm(view(dk + k_j, ks, 1), view(dS, 1, KEY_BLOCK), view(q + q_t, qs, 1), keys, s.HS, rows, scale, 1);
                    }
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
        int i1 = C - i0 < STRIP ? C : i0 + STRIP;
        for (int64_t bt = 0; bt < (int64_t)B * T; bt++)
            for (int i = i0; i < i1; i++) {
                dwte[(int64_t)tokens[bt] * C + i] += scale * de[bt * C + i];
                if (dwpe) dwpe[bt % T * C + i] += de[bt * C + i];
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
} Block;

static Norm block_norm(const Block *b, Site site, const real *w, const real *bias, real *dw, real *db, real *mean, real *rstd) {
    return (Norm){site, w, bias, dw, db, mean, rstd, b->s->n, (real)b->m->eps};
}
#define NORM(b, slot) block_norm(b, (b)->p.slot, (b)->w.slot##_w, (b)->w.slot##_b, (b)->dw.slot##_w, (b)->dw.slot##_b, (b)->a.slot##_mean, (b)->a.slot##_rstd)

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

static AttnShape attn_shape(const Block *b) { return (AttnShape){b->s->B, b->s->T, b->m->NH, b->m->KV, b->m->HS}; }

static LinearShape linear_shape(const Block *b, int out, int in, double c) { return (LinearShape){b->s->n, out, in, out, (real)c}; }

// y = W_o N_c(attention(rope(N_q(W_q c u)), rope(N_k(W_k c u)), N_v(W_v c u)))
static void attn_branch_forward(const Block *b, real *y, const real *u) {
    const Model *m = b->m;
    const Sizes *s = b->s;
    int Q = m->NH * m->HS, K = m->KV * m->HS;
    linear_forward(b->a.q, u, b->w.wq, b->w.wq_b, linear_shape(b, Q, m->C, b->p.attn_c));
    linear_forward(b->a.k, u, b->w.wk, b->w.wk_b, linear_shape(b, K, m->C, b->p.attn_c));
    linear_forward(b->a.v, u, b->w.wv, b->w.wv_b, linear_shape(b, K, m->C, b->p.attn_c));
    Norm nq = NORM(b, q), nk = NORM(b, k), nv = NORM(b, v), nc = NORM(b, ctx);
    real *q = slot_forward(&nq, b->a.qn, b->a.q), *k = slot_forward(&nk, b->a.kn, b->a.k), *v = slot_forward(&nv, b->a.vn, b->a.v);
    if (m->rope) {
        rope(q, s->B, s->T, m->NH, m->HS, m->theta, +1);
        rope(k, s->B, s->T, m->KV, m->HS, m->theta, +1);
    }
    attention_forward(b->a.c, b->a.peak, b->a.lse, b->a.scores, q, k, v, attn_shape(b));
    real *c = slot_forward(&nc, b->a.cn, b->a.c);
    linear_forward(y, c, b->w.wo, b->w.wo_b, linear_shape(b, m->C, Q, 1));
}

static void attn_branch_backward(const Block *b, real *du, const real *dy, const real *u, int add) {
    const Model *m = b->m;
    const Sizes *s = b->s;
    int Q = m->NH * m->HS, K = m->KV * m->HS;
    Norm nq = NORM(b, q), nk = NORM(b, k), nv = NORM(b, v), nc = NORM(b, ctx);
    const real *c = nc.site.on ? b->a.cn : b->a.c;
    const real *qkv[3] = {nq.site.on ? b->a.qn : b->a.q, nk.site.on ? b->a.kn : b->a.k, nv.site.on ? b->a.vn : b->a.v};
    real *dc = nc.site.on ? b->d.cn : b->d.c;
    real *dq = nq.site.on ? b->d.qn : b->d.q, *dk = nk.site.on ? b->d.kn : b->d.k, *dv = nv.site.on ? b->d.vn : b->d.v;
    linear_backward(dc, b->dw.wo, b->dw.wo_b, dy, c, b->w.wo, linear_shape(b, m->C, Q, 1), SET);
    dc = slot_backward(&nc, b->d.c, dc, b->a.c);
    attention_backward(dq, dk, dv, b->a.scores, dc, b->a.c, b->a.lse, qkv, attn_shape(b));
    if (m->rope) {
        rope(dq, s->B, s->T, m->NH, m->HS, m->theta, -1);
        rope(dk, s->B, s->T, m->KV, m->HS, m->theta, -1);
    }
    dq = slot_backward(&nq, b->d.q, dq, b->a.q);
    dk = slot_backward(&nk, b->d.k, dk, b->a.k);
    dv = slot_backward(&nv, b->d.v, dv, b->a.v);
    linear_backward(du, b->dw.wq, b->dw.wq_b, dq, u, b->w.wq, linear_shape(b, Q, m->C, b->p.attn_c), add);
    linear_backward(du, b->dw.wk, b->dw.wk_b, dk, u, b->w.wk, linear_shape(b, K, m->C, b->p.attn_c), ADD);
    linear_backward(du, b->dw.wv, b->dw.wv_b, dv, u, b->w.wv, linear_shape(b, K, m->C, b->p.attn_c), ADD);
}

// y = W_down act(N_h([W_gate | W_up] c u)); N_h is SDD's.
static LinearShape hidden_shape(const Block *b) {
    return (LinearShape){b->s->n, b->m->F, b->m->C, b->m->swiglu ? 2 * b->m->F : b->m->F, (real)b->p.ffn_c};
}

static void ffn_branch_forward(const Block *b, real *y, const real *u) {
    const Model *m = b->m;
    real *up = b->a.gu + (m->swiglu ? m->F : 0);
    if (m->swiglu) linear_forward(b->a.gu, u, b->w.wg, b->w.wg_b, hidden_shape(b));
    linear_forward(up, u, b->w.wu, b->w.wu_b, hidden_shape(b));
    Norm nh = NORM(b, hidden);
    real *gu = slot_forward(&nh, b->a.gun, b->a.gu);
    activation_forward(b->a.h, gu, b->s->n, m->F, m->swiglu);
    linear_forward(y, b->a.h, b->w.wd, b->w.wd_b, linear_shape(b, m->C, m->F, 1));
}

static void ffn_branch_backward(const Block *b, real *du, const real *dy, const real *u, int add) {
    const Model *m = b->m;
    Norm nh = NORM(b, hidden);
    linear_backward(b->d.h, b->dw.wd, b->dw.wd_b, dy, b->a.h, b->w.wd, linear_shape(b, m->C, m->F, 1), SET);
    real *dgu = nh.site.on ? b->d.gun : b->d.gu;
    activation_backward(dgu, b->d.h, nh.site.on ? b->a.gun : b->a.gu, b->s->n, m->F, m->swiglu);
    dgu = slot_backward(&nh, b->d.gu, dgu, b->a.gu);
    linear_backward(du, b->dw.wu, b->dw.wu_b, dgu + (m->swiglu ? m->F : 0), u, b->w.wu, hidden_shape(b), add);
    if (m->swiglu) linear_backward(du, b->dw.wg, b->dw.wg_b, dgu, u, b->w.wg, hidden_shape(b), ADD);
}

// ------------------------------------------------------------------------------------------------------------------ the sublayer
// u = in(x);  y = out(F(c u));  s = a skip + y;  next = post(s)        (llmc/modes.h)

typedef struct Sublayer {
    Norm in, out, post;
    int skip;
    real a;
    real *u, *du, *y, *dy, *yn, *s, *ds;                                    // buffers of the filled slots, and of y
    void (*forward)(const Block *b, real *y, const real *u);
    void (*backward)(const Block *b, real *du, const real *dy, const real *u, int add);
} Sublayer;

static Sublayer attn_sublayer(const Block *b) {
    return (Sublayer){NORM(b, attn_in), NORM(b, attn_out), NORM(b, attn_post), b->p.row->attn.skip, (real)b->p.attn_a, b->a.ai, b->d.ai,
                      b->a.ay, b->d.ay, b->a.ao, b->a.as, b->d.as, attn_branch_forward, attn_branch_backward};
}

static Sublayer ffn_sublayer(const Block *b) {
    return (Sublayer){NORM(b, ffn_in), NORM(b, ffn_out), NORM(b, ffn_post), b->p.row->ffn.skip, (real)b->p.ffn_a, b->a.fi, b->d.fi,
                      b->a.fy, b->d.fy, b->a.fo, b->a.fs, b->d.fs, ffn_branch_forward, ffn_branch_backward};
}

// Of the sublayer's input x, u = in(x) and the block's input x0, or of their gradients: the one that its skip taps.
static real *sublayer_skip(const Sublayer *f, real *x, real *u, real *x0) { return f->skip == OWN ? x : f->skip == NORMED ? u : x0; }

static void sublayer_forward(const Block *b, const Sublayer *f, real *next, real *x, real *x0) {
    real *u = slot_forward(&f->in, f->u, x);
    f->forward(b, f->y, u);
    const real *y = slot_forward(&f->out, f->yn, f->y);
    const real *skip = sublayer_skip(f, x, u, x0);
    real *s = f->post.site.on ? f->s : next;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < b->s->n * (int64_t)b->m->C; i++) s[i] = f->a * skip[i] + y[i];
    slot_forward(&f->post, next, s);
}

// dx and dx0 are gradients of the stream: ADD. dnext is complete when this begins.
static void sublayer_backward(const Block *b, const Sublayer *f, real *dx, real *dx0, real *dnext, real *x) {
    real *ds = slot_backward(&f->post, f->ds, dnext, f->s);
    real *dy = slot_backward(&f->out, f->dy, ds, f->y);
    real *u = f->in.site.on ? f->u : x, *du = f->in.site.on ? f->du : dx;
    f->backward(b, du, dy, u, f->in.site.on ? SET : ADD);
    real *dskip = sublayer_skip(f, dx, du, dx0);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < b->s->n * (int64_t)b->m->C; i++) dskip[i] += f->a * ds[i];
    if (f->in.site.on) norm_backward(dx, du, x, &f->in, ADD);
}

// --recompute cheap: what costs memory traffic but no product, again.
static void block_recompute(const Block *b, real *x) {
    Norm attn_in = NORM(b, attn_in), ffn_in = NORM(b, ffn_in);
    slot_forward(&attn_in, b->a.ai, x);
    slot_forward(&ffn_in, b->a.fi, b->a.mid);
    activation_forward(b->a.h, b->p.hidden.on ? b->a.gun : b->a.gu, b->s->n, b->m->F, b->m->swiglu);
}

static void block_forward(const Block *b, real *x) {
    Sublayer attn = attn_sublayer(b), ffn = ffn_sublayer(b);
    sublayer_forward(b, &attn, b->a.mid, x, x);
    sublayer_forward(b, &ffn, b->a.x, b->a.mid, x);
}

// dx: gradient of the block's input; d.x, the gradient of its output, is complete.
static void block_backward(const Block *b, real *dx, real *x) {
    Sublayer attn = attn_sublayer(b), ffn = ffn_sublayer(b);
    size_t bytes = (size_t)b->s->n * (size_t)b->m->C * sizeof(real);
    memset(dx, 0, bytes);
    memset(b->d.mid, 0, bytes);
    sublayer_backward(b, &ffn, b->d.mid, dx, b->d.x, b->a.mid);
    sublayer_backward(b, &attn, dx, dx, b->d.mid, x);
}

// ------------------------------------------------------------------------------------------------------------------ diagnostics
// What --norms-every shows (judge.h). Sums are of fixed pieces, in double, added in order.

// sum of (x - a y)^2; where there is no y, a is 0 and x stands for it
static double square_sum(const real *x, const real *y, double a, int64_t size) {
    enum { PIECES = 64 };
    double part[PIECES], sum = 0;
#pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < PIECES; k++) {
        double piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int64_t i = size * k / PIECES; i < size * (k + 1) / PIECES; i++) {
            double d = x[i] - a * y[i];
            piece += d * d;
        }
        part[k] = piece;
    }
    for (int k = 0; k < PIECES; k++) sum += part[k];
    return sum;
}

// Of one layer: sums of squares of the stream out of it, and for attention and ffn of a skip and of y; the values of each; the largest logit.
typedef struct Watched { double stream, skip[2], branch[2], logit; int64_t values; } Watched;

// After block_forward, whose buffers still hold this layer: y is what the sum has beyond a skip.
static void block_watch(const Block *b, Watched *w, real *x0) {
    const Sublayer subs[2] = {attn_sublayer(b), ffn_sublayer(b)};
    real *in[2] = {x0, b->a.mid}, *next[2] = {b->a.mid, b->a.x};
    int64_t values = b->s->n * (int64_t)b->m->C, rows = b->s->n * (int64_t)b->m->NH;
    for (int i = 0; i < 2; i++) {
        const Sublayer *f = &subs[i];
        const real *skip = sublayer_skip(f, in[i], f->in.site.on ? f->u : in[i], x0);
        w->branch[i] += square_sum(f->post.site.on ? f->s : next[i], skip, f->a, values);
        w->skip[i] += (double)f->a * f->a * square_sum(skip, skip, 0, values);
    }
    w->stream += square_sum(b->a.x, b->a.x, 0, values);
    w->values += values;
    for (int64_t i = 0; i < rows; i++) if (b->a.peak[i] > w->logit || isnan(b->a.peak[i])) w->logit = b->a.peak[i];     // NaN stays
}

// ------------------------------------------------------------------------------------------------------------------ the model

struct Gpt {
    Model m;
    Sizes max, now;                                     // the micro-batch memory was made for, and the one in work
    Layout layout;
    ActLayout act_layout;
    real *tensors[TENSOR_KINDS], *acts, *grads;         // parameters, their gradients and moments; activations and their gradients
    int recompute;
    real z_loss;
    double ce, z;                                       // sums of losses over the tokens seen since they were last asked
    int64_t seen;
    bool watching;
    Watched *watched;                                   // one for each layer
    int32_t *inputs, *targets;
};

static Block gpt_block(const Gpt *g, int l) {
    return (Block){&g->m, &g->now, place_at(&g->m, l), params_view(&g->layout, g->tensors[WEIGHTS], l), grads_view(&g->layout, g->tensors[GRADS], l),
                   acts_view(&g->act_layout, &g->m, &g->max, g->acts, l, 0), acts_view(&g->act_layout, &g->m, &g->max, g->grads, l, 1)};
}

static Gpt *gpt_create(const Model *m, const Setup *setup) {
    Gpt *g = check_alloc(sizeof *g, "the model");
    int threads = 1;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    g->m = *m;
    g->recompute = setup->recompute;
    g->z_loss = (real)setup->z_loss;
    g->now = g->max = sizes_make(m, setup->B, setup->T, setup->recompute, threads, 1);
    g->layout = layout_make(m);
    g->act_layout = act_layout_make(m, &g->max);
    for (int kind = 0; kind < (setup->training ? TENSOR_KINDS : WEIGHTS + 1); kind++)
        g->tensors[kind] = check_alloc((size_t)g->layout.total * sizeof(real), "the parameters, their gradients and moments");
    g->acts = check_alloc((size_t)g->act_layout.acts * sizeof(real), "the activations");
    g->grads = setup->training ? check_alloc((size_t)g->act_layout.grads * sizeof(real), "the gradients of activations") : NULL;
    g->inputs = check_alloc((size_t)g->max.n * sizeof(int32_t), "the inputs");
    g->targets = check_alloc((size_t)g->max.n * sizeof(int32_t), "the targets");
    g->watched = check_alloc((size_t)m->L * sizeof *g->watched, "what is measured of layers");
    return g;
}

static void gpt_destroy(Gpt *g) {
    for (int kind = 0; kind < TENSOR_KINDS; kind++) free(g->tensors[kind]);
    free(g->acts);
    free(g->grads);
    free(g->inputs);
    free(g->targets);
    free(g->watched);
    layout_free(&g->layout);
    act_layout_free(&g->act_layout);
    free(g);
}

static void gpt_forward(Gpt *g, const int32_t *inputs, const int32_t *targets, int B, int T) {
    const Model *m = &g->m;
    CHECK(B * T <= g->max.n && T <= g->max.T, "a batch of %d x %d tokens where memory was made for %d x %d", B, T, g->max.B, g->max.T);
    g->now.B = B;
    g->now.T = T;
    g->now.n = B * T;
    memcpy(g->inputs, inputs, (size_t)g->now.n * sizeof *inputs);
    for (int i = 0; i < g->now.n; i++) CHECK(inputs[i] >= 0 && inputs[i] < m->V, "token %d, expected 0..%d\n  -> --vocab must cover the data", inputs[i], m->V - 1);
    Block b = gpt_block(g, 0);
    Norm emb = NORM(&b, emb);
    embedding_forward(emb.site.on ? b.a.raw : b.a.e, g->inputs, b.w.wte, b.w.wpe, B, T, m->C, (real)m->emb_scale);
    real *x = slot_forward(&emb, b.a.e, emb.site.on ? b.a.raw : b.a.e);
    for (int l = 0; l < m->L; l++) {
        b = gpt_block(g, l);
        block_forward(&b, x);
        if (g->watching) block_watch(&b, &g->watched[l], x);
        x = b.a.x;
    }
    Norm fin = NORM(&b, fin);
    x = slot_forward(&fin, b.a.fx, x);
    linear_forward(b.a.logits, x, m->tied ? b.w.wte : b.w.wlm, NULL, linear_shape(&b, m->Vp, m->C, 1));
    if (!targets) return;
    memcpy(g->targets, targets, (size_t)g->now.n * sizeof *targets);
    for (int i = 0; i < g->now.n; i++) CHECK(targets[i] >= 0 && targets[i] < m->V, "target %d, expected 0..%d\n  -> --vocab must cover the data", targets[i], m->V - 1);
    crossentropy_forward(b.a.losses, b.a.logsum, b.a.logits, g->targets, g->now.n, m->V, m->Vp);
    for (int i = 0; i < g->now.n; i++) {
        g->ce += (double)b.a.losses[i];
        g->z += (double)g->z_loss * b.a.logsum[i] * b.a.logsum[i];
    }
    g->seen += g->now.n;
}

static Loss gpt_loss(Gpt *g) {
    double n = g->seen ? (double)g->seen : 1;
    Loss loss = {g->ce / n, g->z / n};
    g->ce = g->z = 0;
    g->seen = 0;
    return loss;
}

static void gpt_backward(Gpt *g, double scale) {
    const Model *m = &g->m;
    Block b = gpt_block(g, m->L - 1);
    Norm fin = NORM(&b, fin);
    real *x = fin.site.on ? b.a.fx : b.a.x, *dx = fin.site.on ? b.d.fx : b.d.x;
    crossentropy_backward(b.a.logits, b.a.logsum, g->targets, g->now.n, m->V, m->Vp, (real)scale, g->z_loss);
    linear_backward(dx, m->tied ? b.dw.wte : b.dw.wlm, NULL, b.a.logits, x, m->tied ? b.w.wte : b.w.wlm, linear_shape(&b, m->Vp, m->C, 1), SET);
    slot_backward(&fin, b.d.x, dx, b.a.x);
    for (int l = m->L - 1; l >= 0; l--) {
        Block below = gpt_block(g, l > 0 ? l - 1 : 0);
        real *in = l > 0 ? below.a.x : b.a.e, *din = l > 0 ? below.d.x : b.d.e;
        if (g->recompute == RECOMPUTE_ON) block_forward(&b, in);
        if (g->recompute == RECOMPUTE_CHEAP) block_recompute(&b, in);
        block_backward(&b, din, in);
        b = below;
    }
    Norm emb = NORM(&b, emb);
    real *de = slot_backward(&emb, b.d.raw, b.d.e, b.a.raw);
    embedding_backward(b.dw.wte, b.dw.wpe, de, g->inputs, g->now.B, g->now.T, m->C, (real)m->emb_scale);
}

// The tensors are the host's own: nothing to bring and nothing to send.
static void gpt_fetch(Gpt *g, int kind) { (void)g, (void)kind; }
static void gpt_store(Gpt *g, int kind, int64_t step) { (void)g, (void)kind, (void)step; }

static void *gpt_tensor(Gpt *g, int kind, const Entry *e) { return g->tensors[kind] ? g->tensors[kind] + e->offset : NULL; }

static const void *gpt_logits(Gpt *g, int64_t row) { return gpt_block(g, 0).a.logits + row * g->m.Vp; }

static void gpt_zero_grads(Gpt *g) { memset(g->tensors[GRADS], 0, (size_t)g->layout.total * sizeof(real)); }

static void gpt_watch(Gpt *g) {
    g->watching = true;
    for (int l = 0; l < g->m.L; l++) g->watched[l] = (Watched){.logit = -INFINITY};
}

static void gpt_layer_stats(Gpt *g, LayerStats *layers) {
    g->watching = false;
    for (int l = 0; l < g->m.L; l++) {
        const Watched *w = &g->watched[l];
        layers[l] = (LayerStats){sqrt(w->stream / (double)w->values), sqrt(w->branch[0] / w->skip[0]), sqrt(w->branch[1] / w->skip[1]), w->logit};
    }
}

// ------------------------------------------------------------------------------------------------------------------ the optimizer

// m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  w -= lr (mhat / (sqrt(vhat) + eps) + decay (w - target))
static Update gpt_update(Gpt *g, const AdamW *o) {
    Update u = {gpt_loss(g), sqrt(square_sum(g->tensors[GRADS], g->tensors[GRADS], 0, g->layout.total)), 0};
    u.applied = isfinite(u.loss.ce) && isfinite(u.loss.z) && isfinite(u.norm);
    if (!u.applied) return u;
    real correct1 = (real)(1 / (1 - pow(o->beta1, (double)o->step))), correct2 = (real)(1 / (1 - pow(o->beta2, (double)o->step)));
    real b1 = (real)o->beta1, b2 = (real)o->beta2, eps = (real)o->eps, scale = (real)(o->clip > 0 && u.norm > o->clip ? o->clip / u.norm : 1);
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        real *w = gpt_tensor(g, WEIGHTS, e), *d = gpt_tensor(g, GRADS, e), *m = gpt_tensor(g, ADAM_M, e), *v = gpt_tensor(g, ADAM_V, e);
        real lr = (real)o->lr[e->row.lr], decay = (real)o->decay[e->row.decay], target = e->row.init == ROLE_GAIN ? (real)o->gain_target : 0;
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < e->size; i++) {
            real grad = scale * d[i];
            m[i] = b1 * m[i] + (1 - b1) * grad;
            v[i] = b2 * v[i] + (1 - b2) * grad * grad;
            w[i] -= lr * (m[i] * correct1 / ((real)sqrt(v[i] * correct2) + eps) + decay * (w[i] - target));
        }
    }
    return u;
}

// After a step. Its update is computed again from the moments: with c m / (sqrt(c v) + eps) = A,  before = (w + lr (A - decay target)) / (1 - lr decay).
static void gpt_tensor_stats(Gpt *g, const AdamW *o, TensorStats *stats) {
    double correct1 = o ? 1 / (1 - pow(o->beta1, (double)o->step)) : 0, correct2 = o ? 1 / (1 - pow(o->beta2, (double)o->step)) : 0;
#pragma omp parallel for schedule(dynamic)
    for (int k = 0; k < g->layout.count; k++) {
        const Entry *e = &g->layout.entries[k];
        const real *w = gpt_tensor(g, WEIGHTS, e), *d = gpt_tensor(g, GRADS, e), *m = gpt_tensor(g, ADAM_M, e), *v = gpt_tensor(g, ADAM_V, e);
        double lr = o ? o->lr[e->row.lr] : 0, decay = o ? o->decay[e->row.decay] : 0, target = o && e->row.init == ROLE_GAIN ? o->gain_target : 0;
        double eps = o ? o->eps : 1, grad = 0, weight = 0, update = 0;
        for (int64_t i = 0; i < e->size; i++) {
            double adam = m[i] * correct1 / (sqrt(v[i] * correct2) + eps), before = (w[i] + lr * (adam - decay * target)) / (1 - lr * decay);
            double step = lr * (adam + decay * (before - target));
            grad += (double)d[i] * d[i];
            weight += before * before;
            update += step * step;
        }
        stats[k] = (TensorStats){sqrt(grad), sqrt(weight), sqrt(update)};
    }
}

// Nothing on the CPU is chosen by timing.
static void gpt_prepare(Gpt *g, const char *plans, const char *path) { (void)g, (void)plans, (void)path; }
static char *gpt_plans(Gpt *g) { (void)g; return NULL; }

static double gpt_peak(void) { return sizeof(real) == 4 ? peak_products(0.05) : 0; }       // products in double are three loops

// ------------------------------------------------------------------------------------------------------------------ main

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define TEXT(a) #a
#define QUOTED(a) TEXT(a)
const Trainer NAMED(judge_, PREC) = {"cpu", QUOTED(PREC), sizeof(real), sizeof(real), gpt_create, gpt_destroy, gpt_tensor, gpt_fetch, gpt_store, gpt_forward, gpt_backward,
                                     gpt_loss, gpt_logits, gpt_zero_grads, gpt_update, gpt_watch, gpt_layer_stats, gpt_tensor_stats, gpt_prepare, gpt_plans, NULL, gpt_peak};

int main(int argc, char **argv) {
    check_streams_begin();
    int status = trainer_main(&NAMED(judge_, PREC), argc, argv);
    check_streams_end();
    return status;
}
