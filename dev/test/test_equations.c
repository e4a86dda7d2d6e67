// test_equations.c: link 1 of the chain of trust. Every normalization placement as the papers write
// it, computed the slow and plain way, must give the judge's logits, losses and diagnostics; and
// weights start as the papers say, and after an update have the lengths and selection biases they
// say.
//
// Nothing here reads the columns of modes.h. A mode is its equations (`block` below) and asks for
// the weights these equations need, by checkpoint name: a name the table of parameters lacks is a
// failure, and so is a tensor that no equation asks for.
//
//   E, X, Y     the embedding, the stream into the block, the stream between attention and ffn
//   l           layer, from 0
//   N(slot, .)  the norm with the weights called slot
//   MHA_#       attention with norms on # of Q, K, V and C (the context)
//
// GPT-2's family: learned positions, tanh-GELU, LayerNorm with bias, biases, tied head. Llama's:
// RoPE, SwiGLU, RMSNorm, groups of queries. OLMoE's: Llama's with experts in every layer, softmax
// router, losses over the micro-batch. DeepSeek's: latent attention, a dense layer and then experts
// beside shared ones, sigmoid router with a selection bias, a loss over each sequence.
#include "model.h"
#include "test.h"

enum { B = 2, SEQUENCES = 3, LONGEST = ATTN_BLOCK + 3, WIDEST = 40, DEEPEST = 5, MOST_EXPERTS = 6 };
enum { GPT2, LLAMA, OLMOE, DEEPSEEK, FAMILIES };
static const char *const FAMILY[] = {"GPT-2", "Llama", "OLMoE", "DeepSeek"};

// One sequence: T rows of `cols` numbers. A value, so that equations can be written as equations.
typedef struct { int T, cols; double v[LONGEST][WIDEST]; } Seq;

// The parts of LayerStats (run/trainer.h). Sums over all tokens: squares, entropies, squared
// log-sum-exps, tokens of each expert, and the losses of the sequence and of the micro-batch that a
// token is in; and the largest attention logit. n, p: tokens and probabilities of each expert,
// summed over this micro-batch alone.
typedef struct {
    double y[2], skip[2], stream, logit, entropy, lse2, sequence, balance, load[MOST_EXPERTS],
        n[MOST_EXPERTS], p[MOST_EXPERTS];
    int sums;
} Seen;

typedef struct {
    const Model *m;
    Gpt *gpt;
    Layout list;
    bool *asked;
    char missing[128];
    const char *mode;
    int l;
    Seen seen[DEEPEST];
} Ref;

// ------------------------------------------------------------------------------------------ layers

// The weights of `name` in layer l, or of the model.
static const double *tensor(Ref *r, const char *name, const char *part, int64_t size) {
    static const double nothing[4096] = {0};
    bool of_model = strncmp(name, "model.", 6) == 0 || strcmp(name, "lm_head") == 0;
    char full[128];
    if (of_model) check_format(full, sizeof full, "%s.%s", name, part);
    else check_format(full, sizeof full, "model.layers.%d.%s.%s", r->l, name, part);
    for (int i = 0; i < r->list.count; i++) {
        const Entry *e = &r->list.entries[i];
        if (strcmp(e->name, full) != 0 || e->size != size) continue;
        r->asked[i] = true;
        return (const double *)judge_fp64.tensor(r->gpt, WEIGHTS, e);
    }
    check_format(r->missing, sizeof r->missing, "%s of %d values", full, (int)size);
    return nothing;
}

static double square(const Seq *a) {
    double sum = 0;
    for (int t = 0; t < a->T; t++)
        for (int i = 0; i < a->cols; i++) sum += a->v[t][i] * a->v[t][i];
    return sum;
}

// The output of a sublayer, and its skip: every sum of a block is of these two, attention's first.
static Seq add(Ref *r, Seq y, Seq skip) {
    Seen *seen = &r->seen[r->l];
    seen->y[seen->sums % 2] += square(&y);
    seen->skip[seen->sums++ % 2] += square(&skip);
    for (int t = 0; t < y.T; t++)
        for (int i = 0; i < y.cols; i++) y.v[t][i] += skip.v[t][i];
    return y;
}

static Seq times(double c, Seq a) {
    for (int t = 0; t < a.T; t++)
        for (int i = 0; i < a.cols; i++) a.v[t][i] *= c;
    return a;
}

static Seq columns(Seq a, int from, int n) {
    for (int t = 0; t < a.T; t++) memmove(a.v[t], a.v[t] + from, (size_t)n * sizeof(double));
    a.cols = n;
    return a;
}

// [a | b]
static Seq beside(Seq a, Seq b) {
    for (int t = 0; t < a.T; t++) memcpy(a.v[t] + a.cols, b.v[t], (size_t)b.cols * sizeof(double));
    a.cols += b.cols;
    return a;
}

// gain * (x - mean) / sqrt(variance + eps) + bias, or without bias RMSNorm: gain * x /
// sqrt(mean(x^2) + eps). Statistics over each of `parts` equal parts of a row; a gain of fewer
// values than a row repeats.
static Seq affine(const Ref *r, const double *gain, const double *bias, int parts, int gains,
                  Seq x) {
    int n = x.cols / parts;
    for (int t = 0; t < x.T; t++)
        for (int p = 0; p < x.cols; p += n) {
            double mean = 0, variance = 0;
            for (int i = p; i < p + n && bias; i++) mean += x.v[t][i] / n;
            for (int i = p; i < p + n; i++) variance += (x.v[t][i] - mean) * (x.v[t][i] - mean) / n;
            for (int i = p; i < p + n; i++)
                x.v[t][i] = gain[i % gains] * (x.v[t][i] - mean) / sqrt(variance + r->m->eps) +
                            (bias ? bias[i % gains] : 0);
        }
    return x;
}

// DyT: gain * tanh(alpha * x) + bias
static Seq dyt(const double *gain, const double *bias, double alpha, int gains, Seq x) {
    for (int t = 0; t < x.T; t++)
        for (int i = 0; i < x.cols; i++)
            x.v[t][i] = gain[i % gains] * tanh(alpha * x.v[t][i]) + bias[i % gains];
    return x;
}

static Seq normalize(Ref *r, const char *slot, int norm, int parts, int gains, Seq x) {
    const double *gain = tensor(r, slot, "weight", gains);
    const double *bias = norm == NORM_RMS ? NULL : tensor(r, slot, "bias", gains);
    if (norm == NORM_DYT) return dyt(gain, bias, *tensor(r, slot, "alpha", 1), gains, x);
    return affine(r, gain, bias, parts, gains, x);
}

// The model's norm, of a row or of each head of it, heads sharing the gain.
static Seq norm_heads(Ref *r, const char *slot, int heads, Seq x) {
    return normalize(r, slot, r->m->norm, heads, x.cols / heads, x);
}
static Seq N(Ref *r, const char *slot, Seq x) { return norm_heads(r, slot, 1, x); }

// SDD eq 2: y = alpha * rmsnorm(V x), over the outputs of the linear or parts of them. RMS in both
// families.
static Seq scaled(Ref *r, const char *alpha, int parts, int gains, Seq Vx) {
    return normalize(r, alpha, NORM_RMS, parts, gains, Vx);
}

// The gains of expert e lie e-th in a tensor of all experts'.
static Seq expert_scaled(Ref *r, const char *alpha, int e, int parts, Seq Vx) {
    return affine(r, tensor(r, alpha, "weight", r->m->moe.E * Vx.cols) + e * Vx.cols, NULL, parts,
                  Vx.cols, Vx);
}

// nGPT: x / |x|, of each of `parts` equal parts of a row; 1e-12 is added to the mean square.
static Seq L2_parts(int parts, Seq x) {
    int n = x.cols / parts;
    for (int t = 0; t < x.T; t++)
        for (int p = 0; p < x.cols; p += n) {
            double sum = 0;
            for (int i = p; i < p + n; i++) sum += x.v[t][i] * x.v[t][i];
            for (int i = p; i < p + n; i++) x.v[t][i] /= sqrt(sum + n * 1e-12);
        }
    return x;
}

static Seq L2_of(Seq x) { return L2_parts(1, x); }

// sqrt(C) s x: nGPT's s_qk and s_z start at 1/sqrt(C), its s_uv at 1.
static Seq gained(const Ref *r, const double *s, Seq x) {
    for (int t = 0; t < x.T; t++)
        for (int i = 0; i < x.cols; i++) x.v[t][i] *= sqrt(r->m->C) * s[i];
    return x;
}

// y = W x + b
static Seq product(const double *w, const double *b, int out, Seq x) {
    Seq y = {.T = x.T, .cols = out};
    for (int t = 0; t < y.T; t++)
        for (int o = 0; o < out; o++) {
            y.v[t][o] = b ? b[o] : 0;
            for (int i = 0; i < x.cols; i++) y.v[t][o] += w[o * x.cols + i] * x.v[t][i];
        }
    return y;
}

static Seq linear(Ref *r, const char *name, int out, Seq x) {
    const double *w = tensor(r, name, "weight", (int64_t)out * x.cols);
    bool qkv = strstr(name, "q_proj") || strstr(name, "k_proj") || strstr(name, "v_proj");
    bool biased = r->m->bias == BIAS_ON || (r->m->bias == BIAS_QKV && qkv);
    const double *b = biased ? tensor(r, name, "bias", out) : NULL;
    return product(w, b, out, x);
}

// The matrix of expert e lies e-th, one below the other, and has no bias in any family.
static Seq expert_linear(Ref *r, const char *name, int e, int out, Seq x) {
    return product(tensor(r, name, "weight", (int64_t)r->m->moe.E * out * x.cols) +
                       e * out * x.cols,
                   NULL, out, x);
}

// Turns the pair (i, i + R/2) of the last R channels of every head by the angle t * theta^(-2i/R):
// all of a head, or in latent attention what it has for positions; nothing where positions are
// learned.
// Llama 3's RoPE, as its code has it: wavelengths, in tokens, above the original context are
// `factor` times longer, those below a quarter of it are kept, and those between are smoothed.
static double frequency(const Model *m, int i, int R) {
    double f = pow(m->theta, -2.0 * i / R), wavelength = 2 * acos(-1.0) / f;
    double smooth = (m->rope_original / wavelength - 1) / (4 - 1);
    if (m->rope_factor <= 1 || wavelength < m->rope_original / 4) return f;
    if (wavelength > m->rope_original) return f / m->rope_factor;
    return (1 - smooth) * f / m->rope_factor + smooth * f;
}

static Seq rope(const Ref *r, int heads, Seq x) {
    int width = x.cols / heads, R = r->m->kv_rank ? r->m->rope_size : width;
    for (int t = 0; t < x.T && r->m->rope; t++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < R / 2; i++) {
                double angle = t * frequency(r->m, i, R);
                double *x_i = &x.v[t][h * width + width - R + i];
                double a = x_i[0];
                double b = x_i[R / 2];
                x_i[0] = a * cos(angle) - b * sin(angle);
                x_i[R / 2] = b * cos(angle) + a * sin(angle);
            }
    return x;
}

static bool is(const Ref *r, const char *mode) { return strcmp(r->mode, mode) == 0; }
static bool is_sdd(const char *mode) {
    return strcmp(mode, "SDD") == 0 || strcmp(mode, "SDD_PRE") == 0;
}

// softmax(Q K^T / sqrt(width of a head of Q)) V over the past, each head; NH / KV heads of queries
// in a row share one head of keys and values. nGPT multiplies by the root: its q and k have length
// 1.
static Seq attention(Ref *r, Seq q, Seq k, Seq v) {
    const Model *m = r->m;
    int QK = q.cols / m->NH;
    double scale = is(r, "NGPT") ? sqrt(QK) : 1 / sqrt(QK);
    Seq c = {.T = q.T, .cols = m->NH * m->HS};
    for (int h = 0; h < m->NH; h++)
        for (int t = 0; t < c.T; t++) {
            int of_kv = h / (m->NH / m->KV);
            double p[LONGEST], sum = 0;
            for (int s = 0; s <= t; s++) {
                double dot = 0;
                for (int i = 0; i < QK; i++) dot += q.v[t][h * QK + i] * k.v[s][of_kv * QK + i];
                sum += p[s] = exp(dot * scale);
                r->seen[r->l].logit = fmax(r->seen[r->l].logit, dot * scale);
            }
            for (int s = 0; s <= t; s++)
                for (int i = 0; i < m->HS; i++)
                    c.v[t][h * m->HS + i] += p[s] / sum * v.v[s][of_kv * m->HS + i];
        }
    return c;
}

// silu(gate) * up of [gate | up], or GELU(up).
static Seq activation(const Ref *r, Seq x) {
    Seq h = {.T = x.T, .cols = r->m->swiglu ? x.cols / 2 : x.cols};
    for (int t = 0; t < h.T; t++)
        for (int i = 0; i < h.cols; i++) {
            double u = x.v[t][i];
            h.v[t][i] =
                r->m->swiglu
                    ? u / (1 + exp(-u)) * x.v[t][i + h.cols]
                    : 0.5 * u * (1 + tanh(sqrt(2 / acos(-1.0)) * (u + 0.044715 * u * u * u)));
        }
    return h;
}

// -------------------------------------------------------------------------------- the two branches

// The parts of attention, before any norm of heads.
// Latent attention, DeepSeek-V2 eq 9-19: [c | kr] = W_kva x; the [k | v] of every head = W_kvb
// N(c); to each k the heads' common kr is appended.
typedef struct { Seq q, k, v; } Heads;

static Heads heads(Ref *r, Seq x) {
    const Model *m = r->m;
    int Q = m->NH * m->HS, K = m->KV * m->HS;
    if (!m->kv_rank)
        return (Heads){linear(r, "self_attn.q_proj", Q, x), linear(r, "self_attn.k_proj", K, x),
                       linear(r, "self_attn.v_proj", K, x)};
    Heads a = {.q = linear(r, "self_attn.q_proj", m->NH * (m->HS + m->rope_size), x), .k.T = x.T,
               .v.T = x.T};
    Seq ckr = linear(r, "self_attn.kv_a_proj_with_mqa", m->kv_rank + m->rope_size, x);
    Seq kr = columns(ckr, m->kv_rank, m->rope_size);
    Seq kv = linear(r, "self_attn.kv_b_proj", m->NH * 2 * m->HS,
                    N(r, "self_attn.kv_a_layernorm", columns(ckr, 0, m->kv_rank)));
    for (int h = 0; h < m->NH; h++) {
        a.k = beside(beside(a.k, columns(kv, 2 * h * m->HS, m->HS)), kr);
        a.v = beside(a.v, columns(kv, (2 * h + 1) * m->HS, m->HS));
    }
    return a;
}

// MHA_#(x), HYB eq 7, 35-40: norms on # before RoPE, on C before W_o; statistics over each of
// q_parts and kv_parts parts of a row.
static Seq mha(Ref *r, const char *normed, int q_parts, int kv_parts, Seq x) {
    const Model *m = r->m;
    Heads a = heads(r, x);
    if (strchr(normed, 'Q')) a.q = norm_heads(r, "self_attn.q_norm", q_parts, a.q);
    if (strchr(normed, 'K')) a.k = norm_heads(r, "self_attn.k_norm", kv_parts, a.k);
    if (strchr(normed, 'V')) a.v = norm_heads(r, "self_attn.v_norm", kv_parts, a.v);
    Seq c = attention(r, rope(r, m->NH, a.q), rope(r, m->KV, a.k), a.v);
    if (strchr(normed, 'C')) c = norm_heads(r, "self_attn.context_norm", q_parts, c);
    return linear(r, "self_attn.o_proj", m->C, c);
}

static Seq MHA(Ref *r, const char *normed, Seq x) { return mha(r, normed, r->m->NH, r->m->KV, x); }

static bool is_paper(const Ref *r) { return strcmp(r->m->sdd->name, "paper") == 0; }

// paper: q, k, v each with one statistic over the whole output.
// code, as released: q, k with one for each head and a common alpha; v plain; the context over its
// width instead.
static Seq SDD_MHA(Ref *r, Seq x) {
    const Model *m = r->m;
    Heads a = heads(r, x);
    int q_heads = is_paper(r) ? 1 : m->NH, k_heads = is_paper(r) ? 1 : m->KV;
    a.q = scaled(r, "self_attn.q_norm", q_heads, a.q.cols / q_heads, a.q);
    a.k = scaled(r, "self_attn.k_norm", k_heads, a.k.cols / k_heads, a.k);
    if (is_paper(r)) a.v = scaled(r, "self_attn.v_norm", 1, a.v.cols, a.v);
    Seq c = attention(r, rope(r, m->NH, a.q), rope(r, m->KV, a.k), a.v);
    if (!is_paper(r)) c = scaled(r, "self_attn.context_norm", 1, c.cols, c);
    return scaled(r, "post_attention_layernorm", 1, m->C, linear(r, "self_attn.o_proj", m->C, c));
}

// nGPT: each head of q and k has length 1 after RoPE, and then both have the same gains.
static Seq NGPT_MHA(Ref *r, Seq x) {
    const Model *m = r->m;
    Heads a = heads(r, x);
    const double *s_qk = tensor(r, "self_attn.q_norm", "weight", a.q.cols);
    a.q = gained(r, s_qk, L2_parts(m->NH, rope(r, m->NH, a.q)));
    a.k = gained(r, s_qk, L2_parts(m->NH, rope(r, m->NH, a.k)));
    return linear(r, "self_attn.o_proj", m->C, attention(r, a.q, a.k, a.v));
}

static bool has_experts(const Ref *r) { return r->m->moe.E && r->l >= r->m->moe.dense; }

static Seq mlp_linear(Ref *r, const char *part, int out, Seq x) {
    char name[64];
    check_format(name, sizeof name, "mlp.%s%s", has_experts(r) ? "shared_experts." : "", part);
    return linear(r, name, out, x);
}

// down(activation([gate | up])), of width F: of a dense layer or of shared experts. SDD: alpha *
// rmsnorm on what down returns and on gate and up, each with a statistic; code: in dense layers one
// over [gate | up]. nGPT: sqrt(C) s_uv [gate | up].
static Seq mlp(Ref *r, int F, Seq x) {
    const Model *m = r->m;
    bool sdd = is_sdd(r->mode);
    Seq up = mlp_linear(r, "up_proj", F, x);
    Seq gu = m->swiglu ? beside(mlp_linear(r, "gate_proj", F, x), up) : up;
    if (sdd)
        gu = scaled(r, "mlp.hidden_norm", m->swiglu && (is_paper(r) || has_experts(r)) ? 2 : 1,
                    gu.cols, gu);
    if (is(r, "NGPT")) gu = gained(r, tensor(r, "mlp.hidden_norm", "weight", gu.cols), gu);
    Seq h = activation(r, gu);
    Seq y = mlp_linear(r, "down_proj", m->C, h);
    return sdd ? scaled(r,
                        has_experts(r) ? "mlp.shared_experts.out_norm"
                                       : "post_feedforward_layernorm",
                        1, m->C, y)
               : y;
}

// The same in expert e, SDD in both settings with a statistic on each of gate and up.
static Seq expert(Ref *r, int e, Seq x) {
    const Model *m = r->m;
    bool sdd = is_sdd(r->mode);
    Seq up = expert_linear(r, "mlp.experts.up_proj", e, m->F, x);
    Seq gu = m->swiglu ? beside(expert_linear(r, "mlp.experts.gate_proj", e, m->F, x), up) : up;
    if (sdd) gu = expert_scaled(r, "mlp.experts.hidden_norm", e, m->swiglu ? 2 : 1, gu);
    if (is(r, "NGPT"))
        gu =
            gained(r,
                   tensor(r, "mlp.experts.hidden_norm", "weight", m->moe.E * gu.cols) + e * gu.cols,
                   gu);
    Seq y = expert_linear(r, "mlp.experts.down_proj", e, m->C, activation(r, gu));
    return sdd ? expert_scaled(r, "mlp.experts.out_norm", e, 1, y) : y;
}

// g_te for every expert e, zero where token t does not go: of the K with the largest s + b, the
// lower index before the higher where they are equal. Softmax (OLMoE, DeepSeek-V2): g = scale s;
// renormalized, or sigmoid (DeepSeek-V3 eq 12-16): g = scale s / sum of the chosen s.
static Seq gates(Ref *r, Seq x) {
    const Moe *moe = &r->m->moe;
    Seen *seen = &r->seen[r->l];
    const int E = moe->E;
    const double *b =
        moe->bias_rate > 0 ? tensor(r, "mlp.gate", "e_score_correction_bias", E) : NULL;
    Seq z = product(tensor(r, "mlp.gate", "weight", E * x.cols), NULL, E, x);
    Seq g = {.T = x.T, .cols = E};
    // tokens, and probabilities, of each expert in this sequence
    double n[MOST_EXPERTS] = {0}, p[MOST_EXPERTS] = {0};
    for (int t = 0; t < g.T; t++) {
        double s[MOST_EXPERTS], rank[MOST_EXPERTS], exps = 0, all = 0, chosen = 0;
        for (int e = 0; e < E; e++) exps += exp(z.v[t][e]);
        for (int e = 0; e < E; e++) {
            s[e] =
                moe->router == ROUTER_SIGMOID ? 1 / (1 + exp(-z.v[t][e])) : exp(z.v[t][e]) / exps;
            rank[e] = s[e] + (b ? b[e] : 0);
            all += s[e];
        }
        for (int e = 0; e < E; e++) {
            int before = 0;
            for (int i = 0; i < E; i++)
                before += rank[i] > rank[e] || (rank[i] == rank[e] && i < e);
            if (before < moe->K) { g.v[t][e] = moe->scale * s[e]; chosen += s[e]; n[e]++; }
        }
        for (int e = 0; e < E && moe->router != ROUTER_SOFTMAX; e++) g.v[t][e] /= chosen;
        for (int e = 0; e < E; e++) {
            p[e] += s[e] / all;
            seen->entropy -= s[e] / all * log(s[e] / all);
        }
        seen->lse2 += log(exps) * log(exps);
    }
    for (int e = 0; e < E; e++) {
        // V2 eq 23-25, V3 eq 17-20
        seen->sequence += g.T * (E / (double)(moe->K * g.T) * n[e] * p[e] / g.T);
        seen->n[e] += n[e];
        seen->p[e] += p[e];
    }
    return g;
}

// E / (K n) sum_e n_e mean(p_e) over the n tokens of a micro-batch (OLMoE): where one ends.
static void end_batch(Ref *r, int tokens) {
    const Moe *moe = &r->m->moe;
    for (int l = 0; l < r->m->L; l++)
        for (int e = 0; e < moe->E; e++) {
            Seen *seen = &r->seen[l];
            seen->balance +=
                tokens * (moe->E / (double)(moe->K * tokens) * seen->n[e] * seen->p[e] / tokens);
            seen->load[e] += seen->n[e];
            seen->n[e] = seen->p[e] = 0;
        }
}

// y = sum_e g_e E_e(x), and the shared experts' y, without a gate.
static Seq FFN(Ref *r, Seq x) {
    const Model *m = r->m;
    if (!m->moe.E) return mlp(r, m->F, x);
    if (!has_experts(r)) return mlp(r, m->moe.dense_F, x);
    Seq y = {.T = x.T, .cols = m->C}, g = gates(r, x);
    if (m->moe.shared_F) y = mlp(r, m->moe.shared_F, x);
    // SPEC 5.3, of SDD's release
    double share = is_sdd(r->mode) && !is_paper(r) ? m->F / (double)m->moe.E : 1;
    for (int e = 0; e < m->moe.E; e++) {
        Seq y_e = expert(r, e, x);
        for (int t = 0; t < x.T; t++)
            for (int i = 0; i < m->C; i++) y.v[t][i] += share * g.v[t][e] * y_e.v[t][i];
    }
    return y;
}

// -------------------------------------------------------------------------------------- the blocks

// Places of a norm: before a branch, on its output, on the sum of output and skip.
static const char A_IN[] = "input_layernorm";
static const char A_OUT[] = "post_attention_layernorm";
static const char A_SUM[] = "attention_sum_layernorm";
static const char F_IN[] = "pre_feedforward_layernorm";
static const char F_OUT[] = "post_feedforward_layernorm";
static const char F_SUM[] = "feedforward_sum_layernorm";

static Seq post(Ref *r, Seq X) {                         // SPAN eq 1-2, HYB eq 3-4
    Seq Y = N(r, A_SUM, add(r, MHA(r, "", X), X));
    return N(r, F_SUM, add(r, FFN(r, Y), Y));
}

// SPAN eq 3-4, HYB eq 5-6; with x: "Pre-#-Pre", HYB eq 47-48
static Seq pre(Ref *r, const char *x, Seq X) {
    Seq Y = add(r, MHA(r, x, N(r, A_IN, X)), X);
    return add(r, FFN(r, N(r, F_IN, Y)), Y);
}

// HYB eq 49-50; with x: "Pre-#-Post", HYB eq 45-46
static Seq pre_post(Ref *r, const char *x, Seq X) {
    Seq Y = add(r, MHA(r, x, N(r, A_IN, X)), X), n = N(r, F_IN, Y);
    return add(r, FFN(r, n), n);
}

static Seq x_pre(Ref *r, const char *x, Seq X) {         // "#-Pre", HYB eq 43-44
    Seq Y = add(r, MHA(r, x, X), X);
    return add(r, FFN(r, N(r, F_IN, Y)), Y);
}

static Seq x_post(Ref *r, const char *x, Seq X) {  // "#-Post", HYB eq 41-42; with QKV: HYB eq 8-9
    Seq Y = add(r, MHA(r, x, X), X), n = N(r, F_IN, Y);
    return add(r, FFN(r, n), n);
}

// nGPT: alpha y + (1 - alpha) skip, alpha a vector that starts at 0.05.
static Seq toward(Ref *r, const char *branch, Seq y, Seq skip) {
    const double *p = tensor(r, branch, "alpha", y.cols);
    for (int t = 0; t < y.T; t++)
        for (int i = 0; i < y.cols; i++) {
            double alpha = 0.05 * sqrt(r->m->C) * fabs(p[i]);
            y.v[t][i] *= alpha;
            skip.v[t][i] *= 1 - alpha;
        }
    return add(r, y, skip);
}

// The block of every mode. X is E in layer 0.
static Seq block(Ref *r, Seq X) {
    int l = r->l, L = r->m->L;
    Seq Y, n;
    if (is(r, "PRE"))  return pre(r, "", X);
    if (is(r, "POST")) return post(r, X);
    if (is(r, "SPAN")) {  // SPAN eq 5-8: ffn's skip starts where attention's does
        Y = N(r, A_SUM, add(r, MHA(r, "", l == 0 ? N(r, A_IN, X) : X), X));
        return N(r, F_SUM, add(r, FFN(r, Y), X));
    }
    if (is(r, "HYBRID") || is(r, "EMBED_NORM")) return x_post(r, "QKV", X);
    if (is(r, "HYBRID_STAR"))   return l == 0 ? pre(r, "QKV", X) : x_post(r, "QKV", X);
    if (is(r, "FIRST_QKV_PRE")) return l == 0 ? x_pre(r, "QKV", X) : x_post(r, "QKV", X);
    if (is(r, "QKVC_POST"))     return x_post(r, "QKVC", X);
    if (is(r, "QKC_POST"))      return x_post(r, "QKC", X);
    if (is(r, "QK_POST"))       return x_post(r, "QK", X);
    if (is(r, "KV_POST"))       return x_post(r, "KV", X);
    if (is(r, "KC_POST"))       return x_post(r, "KC", X);
    if (is(r, "PRE_QKV_POST"))  return pre_post(r, "QKV", X);
    if (is(r, "PRE_POST"))      return pre_post(r, "", X);
    if (is(r, "PRE_QKV_PRE"))   return pre(r, "QKV", X);
    if (is(r, "PRE_QK_PRE"))    return pre(r, "QK", X);
    if (is(r, "QKV_PRE"))       return x_pre(r, "QKV", X);
    if (is(r, "POST_PRE") || is(r, "POST_SHIFTED")) {  // HYB eq 51-52; and the released code's POST
        n = N(r, A_IN, X);
        Y = add(r, MHA(r, "", n), n);
        n = N(r, F_IN, Y);
        return add(r, FFN(r, n), is(r, "POST_PRE") ? Y : n);
    }
    if (is(r, "MIX_LN")) return l < (int)floor(r->m->mix_ratio * L) ? post(r, X) : pre(r, "", X);
    if (is(r, "LNS")) {                                 // the branch reads N(x) / sqrt(l+1)
        Y = add(r, MHA(r, "", times(1 / sqrt(l + 1), N(r, A_IN, X))), X);
        return add(r, FFN(r, times(1 / sqrt(l + 1), N(r, F_IN, Y))), Y);
    }
    if (is(r, "PERI") || is(r, "SANDWICH")) {
        Y = add(r, N(r, A_OUT, MHA(r, "", N(r, A_IN, X))), X);
        return add(r, N(r, F_OUT, FFN(r, N(r, F_IN, Y))), Y);
    }
    if (is(r, "OLMO2")) {
        Y = add(r, N(r, A_OUT, mha(r, "QK", 1, 1, X)), X);  // over the full width
        return add(r, N(r, F_OUT, FFN(r, Y)), Y);
    }
    if (is(r, "OLMOE")) {                               // PRE, and so
        Y = add(r, mha(r, "QK", 1, 1, N(r, A_IN, X)), X);
        return add(r, FFN(r, N(r, F_IN, Y)), Y);
    }
    if (is(r, "DEEPNORM")) {                            // N(a x + F(x)), a = (2L)^(1/4)
        Y = N(r, A_SUM, add(r, MHA(r, "", X), times(pow(2.0 * L, 0.25), X)));
        return N(r, F_SUM, add(r, FFN(r, Y), times(pow(2.0 * L, 0.25), Y)));
    }
    if (is(r, "KEEL")) {  // Keel eq 8, a = the number of sublayers; section 3.1: the first two
        Y = add(r, MHA(r, "", N(r, A_IN, X)), times(l ? 2 * L : 1, X));
        if (l > 0) Y = N(r, A_SUM, Y);
        return N(r, F_SUM, add(r, FFN(r, N(r, F_IN, Y)), times(l ? 2 * L : 1, Y)));
    }
    if (is(r, "SDD")) {                                 // on POST_SHIFTED
        n = N(r, A_IN, X);
        Y = add(r, SDD_MHA(r, n), n);
        n = N(r, F_IN, Y);
        return add(r, FFN(r, n), n);
    }
    if (is(r, "SDD_PRE")) {                             // on PRE
        Y = add(r, SDD_MHA(r, N(r, A_IN, X)), X);
        return add(r, FFN(r, N(r, F_IN, Y)), Y);
    }
    if (is(r, "NGPT")) {
        Y = L2_of(toward(r, "self_attn", L2_of(NGPT_MHA(r, X)), X));
        return L2_of(toward(r, "mlp", L2_of(FFN(r, Y)), Y));
    }
    EXPECT(false, "%s has no equations here: write its block", r->mode);
    return X;
}

// The norm before the head: none where the block ends in a norm of the stream.
static bool norm_before_head(const char *mode) {
    return strcmp(mode, "SPAN") != 0 && strcmp(mode, "POST") != 0 &&
           strcmp(mode, "DEEPNORM") != 0 && strcmp(mode, "KEEL") != 0 &&
           strcmp(mode, "NGPT") != 0;
}

static Seq logits_of(Ref *r, const int32_t *tokens, int T, bool final_norm) {
    const Model *m = r->m;
    const double *wte = tensor(r, "model.embed_tokens", "weight", (int64_t)m->Vp * m->C);
    const double *wpe =
        m->rope ? NULL : tensor(r, "model.embed_positions", "weight", (int64_t)m->T * m->C);
    const double *head = m->tied ? wte : tensor(r, "lm_head", "weight", (int64_t)m->Vp * m->C);
    Seq X = {.T = T, .cols = m->C}, logits = {.T = T, .cols = m->V};
    for (int t = 0; t < T; t++)
        for (int i = 0; i < m->C; i++)
            X.v[t][i] = m->emb_scale * wte[tokens[t] * m->C + i] + (wpe ? wpe[t * m->C + i] : 0);
    if (is(r, "EMBED_NORM") || is(r, "PERI")) X = N(r, "model.embed_norm", X);
    for (r->l = 0; r->l < m->L; r->l++) {
        X = block(r, X);
        r->seen[r->l].stream += square(&X);
    }
    if (final_norm) X = N(r, "model.norm", X);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < m->V; v++)
            for (int i = 0; i < m->C; i++) logits.v[t][v] += head[v * m->C + i] * X.v[t][i];
    return is(r, "NGPT") ? gained(r, tensor(r, "lm_head", "s_z", m->Vp), logits) : logits;
}

// ------------------------------------------------------------------------------- equations = judge

static Model small_model(const Mode *mode, const Sdd *sdd, int family, int L) {
    bool gpt2 = family == GPT2, ngpt = strcmp(mode->name, "NGPT") == 0;
    Model m = {.mode = mode, .sdd = sdd, .L = L, .C = 24, .NH = 4, .KV = gpt2 || ngpt ? 4 : 2,
               .HS = 6, .F = 20, .V = 11, .Vp = 16, .T = LONGEST + 2, .norm = gpt2,
               .bias = gpt2 && !is_sdd(mode->name) && !ngpt, .rope = !gpt2, .swiglu = !gpt2,
               .tied = gpt2, .fin = mode->fin, .dyt_alpha = 0.5, .theta = 10000, .eps = 1e-5,
               .emb_scale = 1,
               .mix_ratio = 0.25};
    if (family == OLMOE)
        m.moe = (Moe){.E = 5, .K = 2, .router = ROUTER_SOFTMAX, .losses = LOSSES_MEAN, .scale = 1,
                      .balance = 0.2, .z = 0.1};
    if (family == DEEPSEEK) {
        m.KV = m.NH, m.HS = 4, m.kv_rank = 10, m.rope_size = 6;
        m.moe = (Moe){.E = 6, .K = 3, .dense = 1, .dense_F = 18, .shared_F = 14,
                      .router = ROUTER_SIGMOID, .losses = LOSSES_SUM, .scale = 1.5, .sequence = 0.3,
                      .bias_rate = 0.01};
    }
    return m;
}

static const char *family_of(const Model *m) {
    if (m->kv_rank) return FAMILY[DEEPSEEK];
    if (m->moe.E) return FAMILY[OLMOE];
    return FAMILY[m->rope ? LLAMA : GPT2];
}

// A choice of experts that no router would make by itself: the same router weights times `router`,
// and the selection bias of every layer.
typedef struct { double router, bias[MOST_EXPERTS]; } Choice;

// Gains and DyT's alphas around where they start and biases around 0, or a missing one would not
// show; nGPT's alphas of either sign; the padded rows too, since nothing may read them.
static void fill(Ref *r, const Choice *choice) {
    for (int k = 0; k < r->list.count; k++) {
        const Entry *e = &r->list.entries[k];
        bool gain = e->row.gain != 0;
        bool bias = e->row.role == ROLE_ZERO || e->row.role == ROLE_BALANCE;
        bool alpha = strstr(e->name, ".alpha") != NULL;
        bool embedding = strstr(e->name, "model.embed_") != NULL;
        double *w = (double *)judge_fp64.tensor(r->gpt, WEIGHTS, e);
        double std = embedding ? 0.5 : 1.2 / sqrt((double)e->row.cols);
        if (gain || bias) std = 0.3;
        for (int64_t i = 0; i < e->size; i++) {
            double x = std * rand_normal(rand_key(1, e->name, 0), (uint64_t)i);
            w[i] = gain ? e->row.gain * (1 + x) * (alpha && i % 2 ? -1 : 1) : x;
            if (choice && strstr(e->name, "mlp.gate.weight")) w[i] *= choice->router;
            if (choice && strstr(e->name, "correction_bias")) w[i] = choice->bias[i];
        }
    }
}

static void draw(int32_t *tokens, int n, int V, uint64_t seed) {
    for (int i = 0; i < n; i++) tokens[i] = (int32_t)(rand_at(seed, (uint64_t)i) % (uint64_t)V);
}

static bool near(double found, double right) { return fabs(found - right) <= 1e-11 * fabs(right); }

// The routers' part of the loss, mean over the tokens seen. OLMoE: the mean over layers with
// experts, and z over K; or the sum.
static double router_loss(const Ref *r, double tokens) {
    const Moe *moe = &r->m->moe;
    bool mean = moe->losses == LOSSES_MEAN;
    double sum = 0;
    for (int l = moe->dense; l < r->m->L && moe->E; l++) {
        const Seen *seen = &r->seen[l];
        sum += (moe->balance * seen->balance + moe->sequence * seen->sequence +
                moe->z * seen->lse2 / (mean ? moe->K : 1)) /
               tokens;
    }
    return mean ? sum / (r->m->L - moe->dense) : sum;
}

static void check_routers(const Ref *r, const LayerStats *stats, double tokens, const char *name) {
    static const char *const what[] = {"entropy", "balance loss", "sequence loss", "z-loss"};
    for (int l = r->m->moe.dense; l < r->m->L && r->m->moe.E; l++) {
        const Seen *seen = &r->seen[l];
        const LayerStats *stat = &stats[l];
        const double *load = stat->router + ROUTER_SUMS;
        const double sums[] = {seen->entropy, seen->balance, seen->sequence, seen->lse2};
        for (int i = 0; i < 4; i++)
            EXPECT(near(stat->router[i], sums[i]),
                   "%s: %s of the router of layer %d adds up to %.15g, expected %.15g", name,
                   what[i], l, stat->router[i], sums[i]);
        EXPECT(stat->tokens == tokens, "%s: %g tokens in layer %d, expected %g", name,
               stat->tokens, l, tokens);
        for (int e = 0; e < r->m->moe.E; e++)
            EXPECT(load[e] == seen->load[e],
                   "%s: expert %d of layer %d has %g tokens, expected %g", name, e, l,
                   load[e], seen->load[e]);
    }
}

// Two micro-batches, of two sequences and of one.
static void compare(Model m, int T, bool final_norm, const char *what, const Choice *choice) {
    const double z_loss = 0.01, tokens = SEQUENCES * T;
    Ref r = {.m = &m, .mode = m.mode->name, .list = layout_make(&m),
             .gpt = judge_fp64.create(&m, &(Setup){.B = B, .T = T, .z_loss = z_loss})};
    char name[96];
    check_format(name, sizeof name, "%s %s %s L=%d", m.mode->name, family_of(&m), what, m.L);
    r.asked = (bool *)check_alloc((size_t)r.list.count, "the tensors asked for");
    fill(&r, choice);
    for (int l = 0; l < m.L; l++) r.seen[l].logit = -INFINITY;
    double ce = 0, z2 = 0, worst = 0, largest = 0;
    // logits alone add to no loss
    judge_fp64.forward(r.gpt, (const int32_t[B * LONGEST]){0}, NULL, 1, T);
    judge_fp64.stats_begin(r.gpt);
    for (int first = 0; first < SEQUENCES; first += B) {
        int32_t inputs[B * LONGEST], targets[B * LONGEST];
        int rows = SEQUENCES - first < B ? SEQUENCES - first : B;
        draw(inputs, rows * T, m.V, 2 + 2 * (uint64_t)first);
        draw(targets, rows * T, m.V, 3 + 2 * (uint64_t)first);
        judge_fp64.forward(r.gpt, inputs, targets, rows, T);
        for (int b = 0; b < rows; b++) {
            Seq logits = logits_of(&r, inputs + b * T, T, final_norm);
            for (int t = 0; t < T; t++) {
                const double *z = logits.v[t];
                const double *judged = (const double *)judge_fp64.logits(r.gpt, b * T + t);
                double sum = 0;
                for (int v = 0; v < m.V; v++) {
                    sum += exp(z[v]);
                    worst = isnan(judged[v]) ? INFINITY : fmax(worst, fabs(z[v] - judged[v]));
                    largest = fmax(largest, fabs(z[v]));
                }
                ce += (log(sum) - z[targets[b * T + t]]) / tokens;
                z2 += z_loss * log(sum) * log(sum) / tokens;
            }
        }
        end_batch(&r, rows * T);
    }
    Loss loss = judge_fp64.loss(r.gpt);
    const LayerStats *stats = judge_fp64.layer_stats(r.gpt);
    double router = router_loss(&r, tokens);
    check_routers(&r, stats, tokens, name);
    EXPECT(!r.missing[0], "%s: the equations need %s", name, r.missing);
    for (int k = 0; k < r.list.count; k++)
        EXPECT(r.asked[k], "%s: no equation reads %s", name, r.list.entries[k].name);
    EXPECT(worst <= 1e-11 * largest, "%s: logits differ by %.2g of %.2g", name, worst, largest);
    EXPECT(near(loss.ce, ce), "%s: loss %.15g, expected %.15g", name, loss.ce, ce);
    EXPECT(near(loss.z, z2), "%s: z-loss %.15g, expected %.15g", name, loss.z, z2);
    EXPECT(near(loss.router, router), "%s: losses of routers %.15g, expected %.15g", name,
           loss.router, router);
    for (int l = 0; l < m.L; l++) {
        const Seen *seen = &r.seen[l];
        double rms = sqrt(seen->stream / (tokens * m.C));
        double attn = sqrt(seen->y[0] / seen->skip[0]);
        double ffn = sqrt(seen->y[1] / seen->skip[1]);
        double found[4];
        layer_figures(found, &stats[l], m.C);
        const double right[] = {rms, attn, ffn, seen->logit};
        EXPECT(seen->sums == 2 * SEQUENCES, "%s: %d sums in layer %d", name, seen->sums, l);
        for (int i = 0; i < 4; i++)
            EXPECT(near(found[i], right[i]),
                   "%s: diagnostic %d of layer %d is %.15g, expected %.15g", name, i, l, found[i],
                   right[i]);
    }
    judge_fp64.destroy(r.gpt);
    layout_free(&r.list);
    free(r.asked);
}

static void test_modes(void) {
    int count = 0;
    for (int i = 0; i < MODE_COUNT; i++) {
        const Mode *mode = &MODES[i];
        if (!mode->selectable) continue;
        count++;
        EXPECT(mode->fin == norm_before_head(mode->name), "%s: norm before the head", mode->name);
        for (int s = 0; s < (is_sdd(mode->name) ? SDD_COUNT : 1); s++)
            for (int family = 0; family < FAMILIES; family++)
                for (int L = 4; L <= (family < OLMOE ? 5 : 4); L++)
                    compare(small_model(mode, &SDDS[s], family, L), 7, norm_before_head(mode->name),
                            is_sdd(mode->name) ? SDDS[s].name : "", NULL);
    }
    EXPECT(count == 30, "%d modes, expected 30", count);
}

// Switches that are not the mode's: Gemma 2's embedding scale, a norm before the head where the
// mode has none, another ratio of Mix-LN, a sequence longer than the block of rows that attention
// works on.
static void test_switches(void) {
    for (int family = 0; family < FAMILIES; family++) {
        Model gemma = small_model(&MODES[MODE_SANDWICH], NULL, family, 4);
        Model span = small_model(&MODES[MODE_SPAN], NULL, family, 4);
        Model classic = small_model(&MODES[MODE_POST], NULL, family, 4);
        Model mix = small_model(&MODES[MODE_MIX_LN], NULL, family, 5);
        gemma.emb_scale = sqrt(gemma.C);
        span.fin = classic.fin = 1;
        mix.mix_ratio = 0.75;
        compare(gemma, 7, true, "emb_scale", NULL);
        compare(span, 7, true, "final norm", NULL);
        compare(classic, 7, true, "final norm", NULL);
        compare(mix, 7, true, "mix_ratio 0.75", NULL);
        compare(small_model(&MODES[MODE_HYBRID], NULL, family, 4), LONGEST, true, "long", NULL);
    }
    static const int dyt[] = {MODE_SPAN,  MODE_POST_SHIFTED, MODE_QKVC_POST, MODE_OLMO2,
                              MODE_PERI,  MODE_KEEL,         MODE_LNS,       MODE_SDD};
    for (size_t i = 0; i < sizeof dyt / sizeof *dyt; i++)
        for (int family = 0; family < FAMILIES; family++) {
            Model m = small_model(&MODES[dyt[i]], &SDDS[0], family, 3);
            m.norm = NORM_DYT;
            compare(m, 7, norm_before_head(m.mode->name), "DyT", NULL);
        }
    static const int modes[] = {MODE_SPAN, MODE_HYBRID, MODE_OLMOE, MODE_SDD, MODE_NGPT};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        for (int family = 0; family < FAMILIES; family++) {
            // heads whose width times their number is not the model's; pairs of RoPE that are slow,
            // kept and between
            const Mode *mode = &MODES[modes[i]];
            Model m = small_model(mode, &SDDS[0], family, 3);
            if (!m.kv_rank) m.HS = 10;
            m.rope_factor = 8, m.rope_original = 25, m.theta = 500;
            bool biased = !m.kv_rank && !is_sdd(mode->name) && strcmp(mode->name, "NGPT");
            if (biased) m.bias = BIAS_QKV;
            compare(m, 7, norm_before_head(mode->name), "heads", NULL);
        }
}

// Experts and latent attention beyond the two families: other routers and losses, and choices that
// no router makes by itself.
static void test_experts(void) {
    static const int modes[] = {MODE_PRE, MODE_SDD, MODE_NGPT};
    static const Choice flat = {0, {0}};
    static const Choice tied = {0, {0, 1, 0, 1, 0, 1}};
    static const Choice nobody = {1, {0, 0, -1e3}};
    static const Choice everybody = {1, {0, 1e3}};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        const Mode *mode = &MODES[modes[i]];
        bool fin = norm_before_head(mode->name);
        Model olmoe = small_model(mode, &SDDS[1], OLMOE, 3);
        Model deepseek = small_model(mode, &SDDS[1], DEEPSEEK, 3);
        Model gpt2 = small_model(mode, &SDDS[0], GPT2, 3);
        Model m;
        m = olmoe, m.moe.router = ROUTER_SOFTMAX_RENORM, m.moe.scale = 1.5;
        compare(m, 7, fin, "softmax-renorm", NULL);
        m = olmoe, m.moe.scale = 1.5;
        compare(m, 7, fin, "scale", NULL);
        m = olmoe, m.moe.losses = LOSSES_SUM, m.moe.sequence = 0.3;
        compare(m, 7, fin, "sums of losses", NULL);
        m = deepseek, m.moe.losses = LOSSES_MEAN, m.moe.balance = 0.2, m.moe.z = 0.1;
        compare(m, 7, fin, "means of losses", NULL);
        m = olmoe, m.moe.shared_F = 14;
        compare(m, 7, fin, "shared experts", NULL);
        m = deepseek, m.moe.shared_F = 0;
        compare(m, 7, fin, "no shared experts", NULL);
        m = olmoe, m.moe.K = m.moe.E;
        compare(m, 7, fin, "K = E", NULL);
        m = gpt2, m.moe = deepseek.moe, m.bias = 0;
        compare(m, 7, fin, "GELU", NULL);
        m = deepseek, m.moe = (Moe){0};
        compare(m, 7, fin, "without experts", NULL);
        m = deepseek, m.norm = NORM_LAYER;
        compare(m, 7, fin, "LayerNorm", NULL);
        compare(olmoe, 7, fin, "equal scores", &flat);
        m = deepseek, m.moe.K = 2;
        compare(m, 7, fin, "equal scores among the largest", &tied);
        m.moe.K = 4;
        compare(m, 7, fin, "equal scores among the smallest", &tied);
        compare(deepseek, 7, fin, "an expert nobody chooses", &nobody);
        compare(deepseek, 7, fin, "an expert everybody chooses", &everybody);
    }
}

// ---------------------------------------------------------------------------------- initial values

// SPEC section 7: the deviation of a matrix, by checkpoint name.
static double spec_std(int scheme, const Model *m, const char *name, int l) {
    bool out = strstr(name, "o_proj") || strstr(name, "down_proj");
    bool head = strstr(name, "lm_head") != NULL;
    bool beta =
        out || strstr(name, "v_proj") || strstr(name, "gate_proj") || strstr(name, "up_proj");
    double d = m->C, L = m->L, hyb = 1 / sqrt(2.5 * d), span = 0.02 * sqrt(1536 / d);
    switch (scheme) {
        case INIT_NORMAL:       return hyb;
        case INIT_DEPTH:        return out ? hyb / sqrt(2.0 * (l + 1)) : hyb;
        case INIT_MEGATRON:     return out ? hyb / sqrt(2 * L) : head ? 1 / sqrt(d) : hyb;
        case INIT_SCALE:        return out ? span / sqrt(2 * L) : span;
        case INIT_SCALE_RECIPE: return out ? span / sqrt(L) : span;
        case INIT_GLOBAL:       return span;
        case INIT_OLMO:         return 0.02;
        case INIT_DEEPNORM:     return beta ? hyb * pow(8 * L, -0.25) : hyb;
        default:                return NAN;
    }
}

static bool is_matrix(const Entry *e) {
    static const char *const parts[] = {"_proj.weight",        "_proj_with_mqa.weight",
                                        "embed_tokens.weight", "embed_positions.weight",
                                        "lm_head.weight",      "mlp.gate.weight"};
    bool found = false;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        found = found || strstr(e->name, parts[i]);
    return found;
}

// rows of the padded vocabulary beyond V are not
static int64_t in_use(const Model *m, const Entry *e) {
    return strstr(e->name, "embed_tokens") || strstr(e->name, "lm_head")
               ? (int64_t)m->V * e->row.cols
               : e->size;
}

static double *initial(const Init *init, const Model *m, const Entry *e) {
    double *x = (double *)check_alloc((size_t)e->size * sizeof *x, "initial values");
    double std = is_matrix(e) ? init_std(init, m, e) : 0;
    for (int64_t i = 0; i < e->size; i++) x[i] = init_value(init, m, e, std, init_key(init, e), i);
    return x;
}

// The first values of a vector: biases at 0; SDD's alphas of what attention, ffn, experts and
// shared experts return by the number of layers (SPEC 5.2); nGPT's parameters (SPEC 6); gains at 1.
static double spec_gain(const Model *m, const char *name) {
    bool sdd = is_sdd(m->mode->name);
    bool code = sdd && strcmp(m->sdd->name, "code") == 0;
    bool ngpt = strcmp(m->mode->name, "NGPT") == 0;
    if (strstr(name, ".bias") || strstr(name, "_bias")) return 0;
    if (sdd && (strstr(name, A_OUT) || strstr(name, F_OUT) || strstr(name, "experts.out_norm")))
        return 1 / sqrt((code ? 2.0 : 1.0) * m->L);
    if (ngpt && (strstr(name, "q_norm") || strstr(name, ".alpha") || strstr(name, "s_z")))
        return 1 / sqrt(m->C);
    return 1;
}

// Mean and root mean square of n values within four standard errors, and the cut at three
// deviations.
static void check_sample(const char *scheme, const char *name, const double *x, int64_t n,
                         double std, bool cut) {
    // sqrt(1 - 6 phi(3) / (2 Phi(3) - 1))
    double mean = 0;
    double square = 0;
    double largest = 0;
    double error = 4 / sqrt((double)n);
    double realised = cut ? 0.98658 * std : std;
    for (int64_t i = 0; i < n; i++) {
        mean += x[i] / (double)n;
        square += x[i] * x[i] / (double)n;
        largest = fmax(largest, fabs(x[i]));
    }
    EXPECT(fabs(mean) <= error * std, "%s %s: mean %g of deviation %g", scheme, name, mean, std);
    EXPECT(fabs(sqrt(square) - realised) <= error * realised / sqrt(2),
           "%s %s: deviation %g, expected %g", scheme, name, sqrt(square), realised);
    EXPECT(cut ? largest > 2.9 * std && largest <= 3 * std : largest > 3 * std,
           "%s %s: largest of %g deviations", scheme, name, largest / std);
}

static void test_init(const Mode *mode, const Sdd *sdd, int family, int scheme) {
    Model m = small_model(mode, sdd, family, 3);
    m.C = 96, m.NH = 8, m.KV = m.KV < 4 ? 4 : 8, m.HS = 12, m.F = m.moe.E ? 8 : 128, m.V = 150,
    m.T = m.Vp = 160;
    if (m.moe.E) m.moe.E = 48;
    if (family == DEEPSEEK)
        m.kv_rank = 44, m.rope_size = 6, m.moe.dense_F = 128, m.moe.shared_F = 64;
    Init init = {scheme, 0, 7};
    bool cut = scheme != INIT_SCALE && scheme != INIT_SCALE_RECIPE && scheme != INIT_GLOBAL;
    bool code = sdd && strcmp(sdd->name, "code") == 0;
    Layout list = layout_make(&m);
    for (int k = 0; k < list.count; k++) {
        const Entry *e = &list.entries[k];
        double *x = initial(&init, &m, e), rest = is_matrix(e) ? 0 : spec_gain(&m, e->name);
        int64_t wrong = 0, used = in_use(&m, e);
        for (int64_t i = is_matrix(e) ? used : 0; i < e->size; i++)
            wrong += fabs(x[i] - (i < used ? rest : 0)) > 1e-15 * fabs(rest);
        EXPECT(wrong == 0, "%s %s: %d values that are not %g, or 0 beyond the vocabulary",
               mode->name, e->name, (int)wrong, rest);
        // SPEC 5.2
        double std = code && strstr(e->name, "lm_head")
                         ? 1 / sqrt(m.C)
                         : spec_std(scheme, &m, e->name, e->layer) * (code ? 0.1 : 1);
        if (is_matrix(e)) check_sample(INITS[scheme].name, e->name, x, used, std, cut);
        free(x);
    }
    layout_free(&list);
}

// DyT's alphas, one a norm, start where the model says and do not decay.
static void test_dyt_init(void) {
    Model m = small_model(&MODES[MODE_QKVC_POST], NULL, DEEPSEEK, 3);
    m.norm = NORM_DYT, m.dyt_alpha = 0.7;
    Init init = {INIT_SCALE, 0, 7};
    Layout list = layout_make(&m);
    int count = 0;
    for (int k = 0; k < list.count; k++) {
        const Entry *e = &list.entries[k];
        if (!strstr(e->name, "norm.alpha")) continue;
        double *x = initial(&init, &m, e);
        EXPECT(e->size == 1 && *x == 0.7 && e->row.decay == DECAY_NONE && e->row.lr == LR_VECTOR,
               "%s: %d values from %g on, of decay %d and rate %d", e->name, (int)e->size, *x,
               e->row.decay, e->row.lr);
        count++;
        free(x);
    }
    EXPECT(count == 3 * (4 + 1 + 1) + 1, "%d alphas", count);
    layout_free(&list);
}

// A matrix that two modes both have starts with the same bits in both, and no two tensors of one
// model draw the same numbers.
static void test_common_weights(int family, int matrices) {
    Init init = {INIT_SCALE, 0, 7};
    Model span = small_model(&MODES[MODE_SPAN], &SDDS[0], family, 4);
    span.KV = span.NH;
    Layout a = layout_make(&span);
    int alike = 0;
    for (int i = 0; i < a.count; i++)
        for (int k = 0; k < i; k++)
            alike += init_key(&init, &a.entries[i]) == init_key(&init, &a.entries[k]);
    EXPECT(alike == 0, "%d pairs of tensors draw the same numbers", alike);
    for (int mode = 0; mode < MODE_COUNT; mode++) {
        Model other = small_model(&MODES[mode], &SDDS[0], family, 4);
        other.KV = other.NH;
        Layout b = layout_make(&other);
        int same = 0;
        for (int i = 0; i < a.count * b.count; i++) {
            const Entry *e = &a.entries[i % a.count], *f = &b.entries[i / a.count];
            if (!is_matrix(e) || strcmp(e->name, f->name) != 0) continue;
            double *x = initial(&init, &span, e), *y = initial(&init, &other, f);
            same += memcmp(x, y, (size_t)e->size * sizeof *x) == 0;
            free(x);
            free(y);
        }
        EXPECT(same == matrices, "%s and SPAN, %s: %d matrices start alike, expected %d",
               MODES[mode].name, FAMILY[family], same, matrices);
        layout_free(&b);
    }
    layout_free(&a);
}

// --------------------------------------------------------------------------------- after an update

// nGPT: rows of length 1, of output projections columns, those of each expert by themselves; the
// router and vectors as they are. Zeros have no direction.
static void unit(const Model *m, const Entry *e, double *w) {
    bool out = strstr(e->name, "o_proj") || strstr(e->name, "down_proj");
    int64_t cols = e->row.cols, n = out ? m->C : cols, stride = out ? cols : 1;
    if (!is_matrix(e) || strstr(e->name, "mlp.gate.weight")) return;
    for (int64_t i = 0; i < e->size / n; i++) {
        double *v = w + (out ? i / cols * m->C * cols + i % cols : i * cols), square = 0;
        for (int64_t k = 0; k < n; k++) square += v[k * stride] * v[k * stride];
        for (int64_t k = 0; k < n && square > 0; k++) v[k * stride] /= sqrt(square);
    }
}

// The weights of all tensors, as they were.
static double *copy_weights(const Ref *r) {
    double *w = (double *)check_alloc((size_t)r->list.total * sizeof *w, "weights");
    for (int k = 0; k < r->list.count; k++) {
        const Entry *e = &r->list.entries[k];
        memcpy(w + e->offset, judge_fp64.tensor(r->gpt, WEIGHTS, e), (size_t)e->size * sizeof *w);
    }
    return w;
}

static void expect_weights(const Ref *r, const double *right, double tolerance, const char *what) {
    for (int k = 0; k < r->list.count; k++) {
        const Entry *e = &r->list.entries[k];
        const double *w = (const double *)judge_fp64.tensor(r->gpt, WEIGHTS, e);
        double worst = 0;
        for (int64_t i = 0; i < e->size; i++)
            worst = isnan(w[i]) ? INFINITY : fmax(worst, fabs(w[i] - right[e->offset + i]));
        EXPECT(worst <= tolerance, "%s %s, %s %s: off by %.2g", r->mode, family_of(r->m), what,
               e->name, worst);
    }
}

static Ref trained(const Model *m, int recompute) {
    Ref r = {
        .m = m,
        .mode = m->mode->name,
        .list = layout_make(m),
        .gpt =
            judge_fp64.create(m, &(Setup){.B = B, .T = 7, .training = 1, .recompute = recompute})};
    r.asked = (bool *)check_alloc((size_t)r.list.count, "the tensors asked for");
    fill(&r, NULL);
    return r;
}

static void discard(Ref *r) {
    judge_fp64.destroy(r->gpt);
    layout_free(&r->list);
    free(r->asked);
}

// Trainer.normalize, and AdamW's first step, w - lr (g / (|g| + eps) + decay w), gives lengths
// back; a row and a column of zeros stay zeros.
static void test_lengths(const Mode *mode, int family) {
    Model m = small_model(mode, NULL, family, 3);
    Ref r = trained(&m, RECOMPUTE_OFF);
    bool ngpt = strcmp(mode->name, "NGPT") == 0;
    for (int k = 0; k < r.list.count; k++) {
        const Entry *e = &r.list.entries[k];
        double *w = (double *)judge_fp64.tensor(r.gpt, WEIGHTS, e);
        double *grad = (double *)judge_fp64.tensor(r.gpt, GRADS, e);
        for (int64_t i = 0; i < e->size && e->row.lr != LR_BALANCE; i++) {
            bool zero = is_matrix(e) &&
                        (i / e->row.cols == 2 || i % e->row.cols == 3 || i >= in_use(&m, e));
            grad[i] = zero ? 0 : rand_normal(rand_key(5, e->name, 0), (uint64_t)i);
            if (zero) w[i] = 0;
        }
    }
    double *w = copy_weights(&r);
    for (int k = 0; k < r.list.count && ngpt; k++)
        unit(&m, &r.list.entries[k], w + r.list.entries[k].offset);
    judge_fp64.normalize(r.gpt);
    expect_weights(&r, w, ngpt ? 1e-12 : 0, "normalized");
    Optimizer o = {.lr = {0.01, 0.02, 0.03, 0.04}, .decay = {0.1, 0.2, 0.3}, .beta1 = 0.8,
                   .beta2 = 0.9, .eps = 1e-3, .step = 1};
    judge_fp64.update(r.gpt, &o);
    const TensorStats *stats = judge_fp64.tensor_stats(r.gpt, &o);
    for (int k = 0; k < r.list.count; k++) {
        const Entry *e = &r.list.entries[k];
        const double *grad = (const double *)judge_fp64.tensor(r.gpt, GRADS, e);
        double square = 0, norm = sqrt(stats[k].weight);
        for (int64_t i = e->offset; i < e->offset + e->size; i++) square += w[i] * w[i];
        EXPECT(fabs(norm - sqrt(square)) <= 1e-12 * sqrt(square),
               "%s %s: the norm before the step is %.15g, expected %.15g", r.mode, e->name, norm,
               sqrt(square));
        for (int64_t i = e->offset; i < e->offset + e->size && e->row.lr != LR_BALANCE; i++)
            w[i] -= o.lr[e->row.lr] * (grad[i - e->offset] / (fabs(grad[i - e->offset]) + o.eps) +
                                       o.decay[e->row.decay] * w[i]);
        if (ngpt) unit(&m, e, w + e->offset);
    }
    expect_weights(&r, w, 1e-12, "updated");
    free(w);
    discard(&r);
}

// DeepSeek-V3 2.1.2: an update adds rate * sign(mean load - load) to the selection bias, loads
// counted over all micro-batches since zero_grads. With rates of zero for all others nothing else
// changes; the bias has no gradient and no part in the norm; an update that is not applied leaves
// it as it is.
static void test_selection_bias(int mode, int family, int recompute) {
    enum { T = 7, STEPS = 4, REFUSED = 2 };
    Model m = small_model(&MODES[mode], NULL, family, 3);
    m.moe.bias_rate = 0.01;
    Ref r = trained(&m, recompute);
    Optimizer o = {.lr[LR_BALANCE] = 0.05, .decay = {0.1, 0.1, 0.1}, .beta1 = 0.9, .beta2 = 0.95,
                   .eps = 1e-8, .clip = 1e-3};
    for (o.step = 1; o.step <= STEPS; o.step++) {
        int batches = o.step % 2 ? 1 : 3;
        double square = 0;
        double mean = batches * B * T * m.moe.K / (double)m.moe.E;
        double *w = copy_weights(&r);
        judge_fp64.zero_grads(r.gpt);
        memset(r.seen, 0, sizeof r.seen);
        for (int micro = 0; micro < batches; micro++) {
            int32_t tokens[B * T], targets[B * T];
            draw(tokens, B * T, m.V, (uint64_t)(10 * o.step + micro));
            draw(targets, B * T, m.V, 1);
            for (int b = 0; b < B; b++) logits_of(&r, tokens + b * T, T, norm_before_head(r.mode));
            end_batch(&r, B * T);
            judge_fp64.forward(r.gpt, tokens, targets, B, T);
            judge_fp64.backward(r.gpt, 1.0 / (B * T), 0);
        }
        for (int k = 0; k < r.list.count; k++) {
            const Entry *e = &r.list.entries[k];
            double *grad = (double *)judge_fp64.tensor(r.gpt, GRADS, e);
            bool bias = strstr(e->name, "correction_bias") != NULL;
            for (int64_t i = 0; i < e->size; i++) square += bias ? 0 : grad[i] * grad[i];
            for (int x = 0; x < m.moe.E && bias; x++) {
                double load = r.seen[e->layer].load[x];
                EXPECT(grad[x] == 0, "%s %s: the selection bias has the gradient %g", r.mode,
                       FAMILY[family], grad[x]);
                if (o.step != REFUSED)
                    w[e->offset + x] += o.lr[LR_BALANCE] * ((mean > load) - (mean < load));
            }
            if (o.step == REFUSED && strstr(e->name, "o_proj")) grad[0] = NAN;
        }
        judge_fp64.update(r.gpt, &o);
        Update update = judge_fp64.outcome(r.gpt);
        EXPECT(update.applied == (o.step != REFUSED), "%s %s: step %d applied: %d", r.mode,
               FAMILY[family], (int)o.step, update.applied);
        EXPECT(!update.applied || near(update.norm, sqrt(square)),
               "%s %s: norm %.15g, expected %.15g", r.mode, FAMILY[family], update.norm,
               sqrt(square));
        double router = router_loss(&r, batches * B * T);
        EXPECT(near(update.loss.router, router), "%s %s: losses of routers %.15g, expected %.15g",
               r.mode, FAMILY[family], update.loss.router, router);
        expect_weights(&r, w, 1e-15, "selection bias");
        free(w);
    }
    EXPECT(!r.missing[0], "%s: the equations need %s", r.mode, r.missing);
    discard(&r);
}

static void test_update(void) {
    for (int family = 0; family < FAMILIES; family++) test_lengths(&MODES[MODE_NGPT], family);
    test_lengths(&MODES[MODE_PRE], DEEPSEEK);
    for (int recompute = RECOMPUTE_OFF; recompute <= RECOMPUTE_CHEAP; recompute++) {
        test_selection_bias(MODE_PRE, DEEPSEEK, recompute);
        test_selection_bias(MODE_SPAN, OLMOE, recompute);
    }
}

void test_equations(void) {
    static const int families[] = {GPT2, LLAMA, DEEPSEEK};
    test_modes();
    test_switches();
    test_experts();
    for (int scheme = 0; scheme < INIT_COUNT; scheme++)
        for (int i = 0; i < 3; i++) test_init(&MODES[MODE_PRE], NULL, families[i], scheme);
    for (int s = 0; s < SDD_COUNT; s++) {
        test_init(&MODES[MODE_SDD], &SDDS[s], LLAMA, INIT_NORMAL);
        test_init(&MODES[MODE_SDD], &SDDS[s], DEEPSEEK, INIT_NORMAL);
        test_init(&MODES[MODE_SDD_PRE], &SDDS[s], GPT2, INIT_NORMAL);
        test_init(&MODES[MODE_SDD_PRE], &SDDS[s], OLMOE, INIT_NORMAL);
    }
    test_dyt_init();
    test_init(&MODES[MODE_NGPT], NULL, LLAMA, INIT_SCALE);
    test_init(&MODES[MODE_NGPT], NULL, DEEPSEEK, INIT_SCALE);
    test_common_weights(LLAMA, 2 + 4 * 7);
    test_common_weights(OLMOE, 2 + 4 * (4 + 1 + 3));
    test_common_weights(DEEPSEEK, 2 + (4 + 3) + 3 * (4 + 1 + 3 + 3));
    test_update();
}
