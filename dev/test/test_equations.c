// test_equations.c: link 1 of the chain of trust. Every normalization placement as the papers write it, computed the slow and plain way,
// must give the judge's logits and loss; and weights start as the papers say.
//
// Nothing here reads the columns of modes.h. A mode is its equations (`block` below) and asks for the weights these equations need, by
// checkpoint name: a name the table of parameters lacks is a failure, and so is a tensor that no equation asks for.
//
//   E, X, Y   the embedding, the stream into the block, the stream between attention and ffn       l   layer, from 0
//   N(slot, .)  the norm with the weights called slot        MHA_#  attention with norms on # of Q, K, V and C (the context)
// GPT-2's family: learned positions, tanh-GELU, LayerNorm with bias, biases, tied head. Llama's: RoPE, SwiGLU, RMSNorm, groups of queries.
#include "../../llmc/init.h"
#include "../../llmc/judge.h"
#include "test.h"

enum { B = 2, LONGEST = KEY_BLOCK + 3, WIDEST = 40, DEEPEST = 5 };

// One sequence: T rows of `cols` numbers. A value, so that equations can be written as equations.
typedef struct { int T, cols; double v[LONGEST][WIDEST]; } Seq;

// Sums of squares over all tokens, and the largest attention logit: what judge.h's LayerStats are made of.
typedef struct { double y[2], skip[2], stream, logit; int sums; } Seen;

typedef struct { const Model *m; Gpt *gpt; Layout list; bool *asked; char missing[128]; const char *mode; int l; Seen seen[DEEPEST]; } Ref;

// ------------------------------------------------------------------------------------------------------------------ layers

// The weights of `name` in layer l, or of the model.
static const double *tensor(Ref *r, const char *name, const char *part, int64_t size) {
    static const double nothing[2048] = {0};
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

// What a sublayer returns, and its skip: every sum of a block is of these two, attention's first.
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

// gain * (x - mean) / sqrt(variance + eps) + bias, or RMSNorm: gain * x / sqrt(mean(x^2) + eps). Statistics over each of `parts` equal parts
// of a row; a gain of fewer values than a row repeats.
static Seq normalize(Ref *r, const char *slot, bool layernorm, int parts, int gains, Seq x) {
    const double *gain = tensor(r, slot, "weight", gains), *bias = layernorm ? tensor(r, slot, "bias", gains) : NULL;
    int n = x.cols / parts;
    for (int t = 0; t < x.T; t++)
        for (int p = 0; p < x.cols; p += n) {
            double mean = 0, variance = 0;
            for (int i = p; i < p + n && layernorm; i++) mean += x.v[t][i] / n;
            for (int i = p; i < p + n; i++) variance += (x.v[t][i] - mean) * (x.v[t][i] - mean) / n;
            for (int i = p; i < p + n; i++) x.v[t][i] = gain[i % gains] * (x.v[t][i] - mean) / sqrt(variance + r->m->eps) + (bias ? bias[i % gains] : 0);
        }
    return x;
}

// The model's norm, of a row or of each head of it, heads sharing the gain.
static Seq norm_heads(Ref *r, const char *slot, int heads, Seq x) { return normalize(r, slot, r->m->layernorm, heads, x.cols / heads, x); }
static Seq N(Ref *r, const char *slot, Seq x) { return norm_heads(r, slot, 1, x); }

// SDD eq 2: y = alpha * rmsnorm(V x), over the outputs of the linear or parts of them. RMS in both families.
static Seq scaled(Ref *r, const char *alpha, int parts, int gains, Seq Vx) { return normalize(r, alpha, false, parts, gains, Vx); }

// y = W x + b
static Seq linear(Ref *r, const char *name, int out, Seq x) {
    const double *w = tensor(r, name, "weight", (int64_t)out * x.cols), *b = r->m->bias ? tensor(r, name, "bias", out) : NULL;
    Seq y = {.T = x.T, .cols = out};
    for (int t = 0; t < y.T; t++)
        for (int o = 0; o < out; o++) {
            y.v[t][o] = b ? b[o] : 0;
            for (int i = 0; i < x.cols; i++) y.v[t][o] += w[o * x.cols + i] * x.v[t][i];
        }
    return y;
}

// Turns the pair (i, i + HS/2) of every head by the angle t * theta^(-2i/HS); nothing where positions are learned.
static Seq rope(const Ref *r, Seq x) {
    int HS = r->m->HS, half = HS / 2;
    for (int t = 0; t < x.T && r->m->rope; t++)
        for (int j = 0; j < x.cols; j++) {
            if (j % HS >= half) continue;
            double angle = t * pow(r->m->theta, -2.0 * (j % HS) / HS), a = x.v[t][j], b = x.v[t][j + half];
            x.v[t][j] = a * cos(angle) - b * sin(angle);
            x.v[t][j + half] = b * cos(angle) + a * sin(angle);
        }
    return x;
}

// softmax(Q K^T / sqrt(HS)) V over the past, each head; NH / KV heads of queries in a row share one head of keys and values.
static Seq attention(Ref *r, Seq q, Seq k, Seq v) {
    const Model *m = r->m;
    Seq c = {.T = q.T, .cols = q.cols};
    for (int h = 0; h < m->NH; h++)
        for (int t = 0; t < c.T; t++) {
            int of_q = h * m->HS, of_kv = h / (m->NH / m->KV) * m->HS;
            double p[LONGEST], sum = 0;
            for (int s = 0; s <= t; s++) {
                double dot = 0;
                for (int i = 0; i < m->HS; i++) dot += q.v[t][of_q + i] * k.v[s][of_kv + i];
                sum += p[s] = exp(dot / sqrt(m->HS));
                r->seen[r->l].logit = fmax(r->seen[r->l].logit, dot / sqrt(m->HS));
            }
            for (int s = 0; s <= t; s++)
                for (int i = 0; i < m->HS; i++) c.v[t][of_q + i] += p[s] / sum * v.v[s][of_kv + i];
        }
    return c;
}

// The inputs of the activation: [gate | up], or up alone in GPT-2's family.
static Seq hidden(Ref *r, Seq x) {
    int F = r->m->F;
    Seq up = linear(r, "mlp.up_proj", F, x);
    if (!r->m->swiglu) return up;
    Seq both = linear(r, "mlp.gate_proj", F, x);
    both.cols = 2 * F;
    for (int t = 0; t < x.T; t++) memcpy(both.v[t] + F, up.v[t], (size_t)F * sizeof(double));
    return both;
}

// silu(gate) * up, or GELU(up).
static Seq activation(const Ref *r, Seq x) {
    Seq h = {.T = x.T, .cols = r->m->F};
    for (int t = 0; t < h.T; t++)
        for (int i = 0; i < h.cols; i++) {
            double u = x.v[t][i];
            h.v[t][i] = r->m->swiglu ? u / (1 + exp(-u)) * x.v[t][i + h.cols] : 0.5 * u * (1 + tanh(sqrt(2 / acos(-1.0)) * (u + 0.044715 * u * u * u)));
        }
    return h;
}

// ------------------------------------------------------------------------------------------------------------------ the two branches

// MHA_#(x), HYB eq 7, 35-40: norms on # before RoPE, on C before W_o; statistics over each of q_parts and kv_parts parts of a row.
static Seq mha(Ref *r, const char *normed, int q_parts, int kv_parts, Seq x) {
    const Model *m = r->m;
    Seq q = linear(r, "self_attn.q_proj", m->NH * m->HS, x);
    Seq k = linear(r, "self_attn.k_proj", m->KV * m->HS, x);
    Seq v = linear(r, "self_attn.v_proj", m->KV * m->HS, x);
    if (strchr(normed, 'Q')) q = norm_heads(r, "self_attn.q_norm", q_parts, q);
    if (strchr(normed, 'K')) k = norm_heads(r, "self_attn.k_norm", kv_parts, k);
    if (strchr(normed, 'V')) v = norm_heads(r, "self_attn.v_norm", kv_parts, v);
    Seq c = attention(r, rope(r, q), rope(r, k), v);
    if (strchr(normed, 'C')) c = norm_heads(r, "self_attn.context_norm", q_parts, c);
    return linear(r, "self_attn.o_proj", m->C, c);
}

static Seq MHA(Ref *r, const char *normed, Seq x) { return mha(r, normed, r->m->NH, r->m->KV, x); }

static Seq FFN(Ref *r, Seq x) { return linear(r, "mlp.down_proj", r->m->C, activation(r, hidden(r, x))); }

// paper: q, k, v each with one statistic over the whole output.
// code, as released: q, k with one for each head and a common alpha; v plain; the context over its width instead.
static Seq SDD_MHA(Ref *r, Seq x) {
    const Model *m = r->m;
    bool paper = strcmp(m->sdd->name, "paper") == 0;
    int q_width = m->NH * m->HS, kv_width = m->KV * m->HS;
    Seq q = linear(r, "self_attn.q_proj", q_width, x), k = linear(r, "self_attn.k_proj", kv_width, x), v = linear(r, "self_attn.v_proj", kv_width, x);
    q = scaled(r, "self_attn.q_norm", paper ? 1 : m->NH, paper ? q_width : m->HS, q);
    k = scaled(r, "self_attn.k_norm", paper ? 1 : m->KV, paper ? kv_width : m->HS, k);
    if (paper) v = scaled(r, "self_attn.v_norm", 1, kv_width, v);
    Seq c = attention(r, rope(r, q), rope(r, k), v);
    if (!paper) c = scaled(r, "self_attn.context_norm", 1, q_width, c);
    return scaled(r, "post_attention_layernorm", 1, m->C, linear(r, "self_attn.o_proj", m->C, c));
}

// paper: gate and up each with a statistic; code: one over [gate | up].
static Seq SDD_FFN(Ref *r, Seq x) {
    Seq gu = hidden(r, x);
    bool separate = r->m->swiglu && strcmp(r->m->sdd->name, "paper") == 0;
    gu = scaled(r, "mlp.hidden_norm", separate ? 2 : 1, gu.cols, gu);
    return scaled(r, "post_feedforward_layernorm", 1, r->m->C, linear(r, "mlp.down_proj", r->m->C, activation(r, gu)));
}

// ------------------------------------------------------------------------------------------------------------------ the blocks

// Where a norm can sit: before a branch, on what it returns, on the sum of it and the skip.
static const char A_IN[] = "input_layernorm", A_OUT[] = "post_attention_layernorm", A_SUM[] = "attention_sum_layernorm";
static const char F_IN[] = "pre_feedforward_layernorm", F_OUT[] = "post_feedforward_layernorm", F_SUM[] = "feedforward_sum_layernorm";

static Seq post(Ref *r, Seq X) {                         // SPAN eq 1-2, HYB eq 3-4
    Seq Y = N(r, A_SUM, add(r, MHA(r, "", X), X));
    return N(r, F_SUM, add(r, FFN(r, Y), Y));
}

static Seq pre(Ref *r, const char *x, Seq X) {           // SPAN eq 3-4, HYB eq 5-6; with x: "Pre-#-Pre", HYB eq 47-48
    Seq Y = add(r, MHA(r, x, N(r, A_IN, X)), X);
    return add(r, FFN(r, N(r, F_IN, Y)), Y);
}

static Seq pre_post(Ref *r, const char *x, Seq X) {      // HYB eq 49-50; with x: "Pre-#-Post", HYB eq 45-46
    Seq Y = add(r, MHA(r, x, N(r, A_IN, X)), X), n = N(r, F_IN, Y);
    return add(r, FFN(r, n), n);
}

static Seq x_pre(Ref *r, const char *x, Seq X) {         // "#-Pre", HYB eq 43-44
    Seq Y = add(r, MHA(r, x, X), X);
    return add(r, FFN(r, N(r, F_IN, Y)), Y);
}

static Seq x_post(Ref *r, const char *x, Seq X) {        // "#-Post", HYB eq 41-42; with QKV: HYB eq 8-9
    Seq Y = add(r, MHA(r, x, X), X), n = N(r, F_IN, Y);
    return add(r, FFN(r, n), n);
}

static bool is(const Ref *r, const char *mode) { return strcmp(r->mode, mode) == 0; }

// The block of every mode. X is E in layer 0.
static Seq block(Ref *r, Seq X) {
    int l = r->l, L = r->m->L;
    Seq Y, n;
    if (is(r, "PRE"))  return pre(r, "", X);
    if (is(r, "POST")) return post(r, X);
    if (is(r, "SPAN")) {                                // SPAN eq 5-8: ffn's skip starts where attention's does
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
    if (is(r, "POST_PRE") || is(r, "POST_SHIFTED")) {   // HYB eq 51-52; and the released code's POST
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
    if (is(r, "DEEPNORM")) {                            // N(a x + F(x)), a = (2L)^(1/4)
        Y = N(r, A_SUM, add(r, MHA(r, "", X), times(pow(2.0 * L, 0.25), X)));
        return N(r, F_SUM, add(r, FFN(r, Y), times(pow(2.0 * L, 0.25), Y)));
    }
    if (is(r, "SDD")) {                                 // on POST_SHIFTED
        n = N(r, A_IN, X);
        Y = add(r, SDD_MHA(r, n), n);
        n = N(r, F_IN, Y);
        return add(r, SDD_FFN(r, n), n);
    }
    if (is(r, "SDD_PRE")) {                             // on PRE
        Y = add(r, SDD_MHA(r, N(r, A_IN, X)), X);
        return add(r, SDD_FFN(r, N(r, F_IN, Y)), Y);
    }
    EXPECT(false, "%s has no equations here: write its block", r->mode);
    return X;
}

// The norm before the head: none where the block ends in a norm of the stream.
static bool norm_before_head(const char *mode) { return strcmp(mode, "SPAN") != 0 && strcmp(mode, "POST") != 0 && strcmp(mode, "DEEPNORM") != 0; }

static Seq logits_of(Ref *r, const int32_t *tokens, int T, bool final_norm) {
    const Model *m = r->m;
    const double *wte = tensor(r, "model.embed_tokens", "weight", (int64_t)m->Vp * m->C);
    const double *wpe = m->rope ? NULL : tensor(r, "model.embed_positions", "weight", (int64_t)m->T * m->C);
    const double *head = m->tied ? wte : tensor(r, "lm_head", "weight", (int64_t)m->Vp * m->C);
    Seq X = {.T = T, .cols = m->C}, logits = {.T = T, .cols = m->V};
    for (int t = 0; t < T; t++)
        for (int i = 0; i < m->C; i++) X.v[t][i] = m->emb_scale * wte[tokens[t] * m->C + i] + (wpe ? wpe[t * m->C + i] : 0);
    if (is(r, "EMBED_NORM") || is(r, "PERI")) X = N(r, "model.embed_norm", X);
    for (r->l = 0; r->l < m->L; r->l++) {
        X = block(r, X);
        r->seen[r->l].stream += square(&X);
    }
    if (final_norm) X = N(r, "model.norm", X);
    for (int t = 0; t < T; t++)
        for (int v = 0; v < m->V; v++)
            for (int i = 0; i < m->C; i++) logits.v[t][v] += head[v * m->C + i] * X.v[t][i];
    return logits;
}

// ------------------------------------------------------------------------------------------------------------------ equations = judge

static bool is_sdd(const char *mode) { return strcmp(mode, "SDD") == 0 || strcmp(mode, "SDD_PRE") == 0; }

static Model small_model(const Mode *mode, const Sdd *sdd, bool llama, int L) {
    return (Model){.mode = mode, .sdd = sdd, .L = L, .C = 24, .NH = 4, .KV = llama ? 2 : 4, .HS = 6, .F = 20, .V = 11, .Vp = 16, .T = LONGEST + 2,
                   .layernorm = !llama, .bias = !llama && !is_sdd(mode->name), .rope = llama, .swiglu = llama, .tied = !llama, .fin = mode->fin,
                   .theta = 10000, .eps = 1e-5, .emb_scale = 1, .mix_ratio = 0.25};
}

// Gains around 1 and biases around 0, or a missing one would not show; the padded rows too, since nothing may read them.
static void fill(Ref *r) {
    for (int k = 0; k < r->list.count; k++) {
        const Entry *e = &r->list.entries[k];
        bool vector = e->row.rows == 1, bias = strstr(e->name, ".bias") != NULL, embedding = strstr(e->name, "model.embed_") != NULL;
        double *w = (double *)judge_fp64.tensor(r->gpt, WEIGHTS, e), std = vector ? 0.3 : embedding ? 0.5 : 1.2 / sqrt((double)e->row.cols);
        for (int64_t i = 0; i < e->size; i++) w[i] = (vector && !bias ? 1 : 0) + std * rand_normal(rand_key(1, e->name, 0), (uint64_t)i);
    }
}

static void compare(Model m, int T, bool final_norm, const char *what) {
    int32_t tokens[B * LONGEST], targets[B * LONGEST];
    for (int i = 0; i < B * T; i++) {
        tokens[i] = (int32_t)(rand_at(2, (uint64_t)i) % 11);
        targets[i] = (int32_t)(rand_at(3, (uint64_t)i) % 11);
    }
    const double z_loss = 0.01;
    Ref r = {.m = &m, .mode = m.mode->name, .list = layout_make(&m), .gpt = judge_fp64.create(&m, &(Setup){.B = B, .T = T, .z_loss = z_loss})};
    r.asked = (bool *)check_alloc((size_t)r.list.count, "the tensors asked for");
    fill(&r);
    for (int l = 0; l < m.L; l++) r.seen[l].logit = -INFINITY;
    judge_fp64.watch(r.gpt);
    judge_fp64.forward(r.gpt, tokens, targets, B, T);
    Loss got = judge_fp64.loss(r.gpt), want = {0, 0};
    double worst = 0, largest = 0;
    for (int b = 0; b < B; b++) {
        Seq logits = logits_of(&r, tokens + b * T, T, final_norm);
        for (int t = 0; t < T; t++) {
            const double *z = logits.v[t], *judged = (const double *)judge_fp64.logits(r.gpt, b * T + t);
            double sum = 0;
            for (int v = 0; v < m.V; v++) {
                sum += exp(z[v]);
                worst = isnan(judged[v]) ? INFINITY : fmax(worst, fabs(z[v] - judged[v]));
                largest = fmax(largest, fabs(z[v]));
            }
            want.ce += (log(sum) - z[targets[b * T + t]]) / (B * T);
            want.z += z_loss * log(sum) * log(sum) / (B * T);
        }
    }
    const char *name = m.mode->name, *family = m.layernorm ? "GPT-2" : "Llama";
    EXPECT(!r.missing[0], "%s %s %s L=%d: the equations need %s", name, family, what, m.L, r.missing);
    for (int k = 0; k < r.list.count; k++) EXPECT(r.asked[k], "%s %s %s L=%d: no equation reads %s", name, family, what, m.L, r.list.entries[k].name);
    EXPECT(worst <= 1e-11 * largest, "%s %s %s L=%d: logits differ by %.2g of %.2g", name, family, what, m.L, worst, largest);
    EXPECT(fabs(got.ce - want.ce) <= 1e-11 * want.ce, "%s %s %s L=%d: loss %.15g, expected %.15g", name, family, what, m.L, got.ce, want.ce);
    EXPECT(fabs(got.z - want.z) <= 1e-11 * want.z, "%s %s %s L=%d: z-loss %.15g, expected %.15g", name, family, what, m.L, got.z, want.z);
    LayerStats stats[DEEPEST];
    judge_fp64.layer_stats(r.gpt, stats);
    for (int l = 0; l < m.L; l++) {
        const Seen *seen = &r.seen[l];
        double rms = sqrt(seen->stream / (B * T * m.C)), attn = sqrt(seen->y[0] / seen->skip[0]), ffn = sqrt(seen->y[1] / seen->skip[1]);
        const double found[] = {stats[l].residual_rms, stats[l].attn_ratio, stats[l].ffn_ratio, stats[l].attn_logit_max}, right[] = {rms, attn, ffn, seen->logit};
        EXPECT(seen->sums == 2 * B, "%s: %d sums in layer %d", name, seen->sums, l);
        for (int i = 0; i < 4; i++)
            EXPECT(fabs(found[i] - right[i]) <= 1e-11 * fabs(right[i]), "%s %s %s L=%d: diagnostic %d of layer %d is %.15g, expected %.15g", name, family, what, m.L, i, l, found[i], right[i]);
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
            for (int llama = 0; llama < 2; llama++)
                for (int L = 4; L <= 5; L++)
                    compare(small_model(mode, &SDDS[s], llama, L), 7, norm_before_head(mode->name), is_sdd(mode->name) ? SDDS[s].name : "");
    }
    EXPECT(count == 27, "%d modes, expected 27", count);
}

// Switches that are not the mode's: Gemma 2's embedding scale, a norm before the head where the mode has none, another ratio of Mix-LN,
// a sequence longer than the block of rows that attention works on.
static void test_switches(void) {
    for (int llama = 0; llama < 2; llama++) {
        Model gemma = small_model(&MODES[MODE_SANDWICH], NULL, llama, 4), span = small_model(&MODES[MODE_SPAN], NULL, llama, 4);
        Model classic = small_model(&MODES[MODE_POST], NULL, llama, 4), mix = small_model(&MODES[MODE_MIX_LN], NULL, llama, 5);
        gemma.emb_scale = sqrt(gemma.C);
        span.fin = classic.fin = 1;
        mix.mix_ratio = 0.75;
        compare(gemma, 7, true, "emb_scale");
        compare(span, 7, true, "final norm");
        compare(classic, 7, true, "final norm");
        compare(mix, 7, true, "mix_ratio 0.75");
        compare(small_model(&MODES[MODE_HYBRID], NULL, llama, 4), LONGEST, true, "long");
    }
}

// ------------------------------------------------------------------------------------------------------------------ initial values

// SPEC section 7: the deviation of a matrix, by checkpoint name.
static double spec_std(int scheme, const Model *m, const char *name, int l) {
    bool out = strstr(name, "o_proj") || strstr(name, "down_proj"), head = strstr(name, "lm_head") != NULL;
    bool beta = out || strstr(name, "v_proj") || strstr(name, "gate_proj") || strstr(name, "up_proj");
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

static int64_t in_use(const Model *m, const Entry *e) {         // rows of the padded vocabulary beyond V are not
    return strstr(e->name, "embed_tokens") || strstr(e->name, "lm_head") ? (int64_t)m->V * m->C : e->size;
}

static double *initial(const Init *init, const Model *m, const Entry *e) {
    double *x = (double *)check_alloc((size_t)e->size * sizeof *x, "initial values"), std = e->row.rows == 1 ? 0 : init_std(init, m, e);
    for (int64_t i = 0; i < e->size; i++) x[i] = init_value(init, m, e, std, init_key(init, e), i);
    return x;
}

// Mean and root mean square of n values within four standard errors, and the cut at three deviations.
static void check_sample(const char *scheme, const char *name, const double *x, int64_t n, double std, bool cut) {
    double mean = 0, square = 0, largest = 0, error = 4 / sqrt((double)n), realised = cut ? 0.98658 * std : std;   // sqrt(1 - 6 phi(3) / (2 Phi(3) - 1))
    for (int64_t i = 0; i < n; i++) { mean += x[i] / (double)n; square += x[i] * x[i] / (double)n; largest = fmax(largest, fabs(x[i])); }
    EXPECT(fabs(mean) <= error * std, "%s %s: mean %g of deviation %g", scheme, name, mean, std);
    EXPECT(fabs(sqrt(square) - realised) <= error * realised / sqrt(2), "%s %s: deviation %g, expected %g", scheme, name, sqrt(square), realised);
    EXPECT(cut ? largest > 2.9 * std && largest <= 3 * std : largest > 3 * std, "%s %s: largest of %g deviations", scheme, name, largest / std);
}

static void test_init(const Mode *mode, const Sdd *sdd, bool llama, int scheme) {
    Model m = small_model(mode, sdd, llama, 3);
    m.C = 96; m.NH = 8; m.KV = llama ? 4 : 8; m.HS = 12; m.F = 128; m.V = 150; m.T = m.Vp = 160;
    Init init = {scheme, 0, 7};
    bool cut = scheme != INIT_SCALE && scheme != INIT_SCALE_RECIPE && scheme != INIT_GLOBAL, code = sdd && strcmp(sdd->name, "code") == 0;
    Layout list = layout_make(&m);
    for (int k = 0; k < list.count; k++) {
        const Entry *e = &list.entries[k];
        double *x = initial(&init, &m, e);
        bool vector = e->row.rows == 1, out_alpha = sdd && (strstr(e->name, A_OUT) || strstr(e->name, F_OUT));
        double rest = !vector || strstr(e->name, ".bias") ? 0 : out_alpha ? 1 / sqrt((code ? 2.0 : 1.0) * m.L) : 1;
        int64_t wrong = 0, used = vector ? 0 : in_use(&m, e);
        for (int64_t i = used; i < e->size; i++) wrong += fabs(x[i] - rest) > 1e-15;
        EXPECT(wrong == 0, "%s %s: %d values that are not %g", mode->name, e->name, (int)wrong, rest);
        if (!vector) check_sample(INITS[scheme].name, e->name, x, used, spec_std(scheme, &m, e->name, e->layer) * (code ? 0.1 : 1), cut);
        free(x);
    }
    layout_free(&list);
}

// A matrix that two modes both have starts with the same bits in both, and no two tensors of one model draw the same numbers.
static void test_common_weights(void) {
    Init init = {INIT_SCALE, 0, 7};
    Model span = small_model(&MODES[MODE_SPAN], &SDDS[0], true, 4);
    Layout a = layout_make(&span);
    int alike = 0;
    for (int i = 0; i < a.count; i++)
        for (int k = 0; k < i; k++) alike += init_key(&init, &a.entries[i]) == init_key(&init, &a.entries[k]);
    EXPECT(alike == 0, "%d pairs of tensors draw the same numbers", alike);
    for (int mode = 0; mode < MODE_COUNT; mode++) {
        Model other = small_model(&MODES[mode], &SDDS[0], true, 4);
        Layout b = layout_make(&other);
        int same = 0;
        for (int i = 0; i < a.count * b.count; i++) {
            const Entry *e = &a.entries[i % a.count], *f = &b.entries[i / a.count];
            if (e->row.rows == 1 || strcmp(e->name, f->name) != 0) continue;
            double *x = initial(&init, &span, e), *y = initial(&init, &other, f);
            same += memcmp(x, y, (size_t)e->size * sizeof *x) == 0;
            free(x);
            free(y);
        }
        EXPECT(same == 2 + 7 * other.L, "%s and SPAN: %d matrices start alike, expected embedding, head and seven a layer", MODES[mode].name, same);
        layout_free(&b);
    }
    layout_free(&a);
}

void test_equations(void) {
    test_modes();
    test_switches();
    for (int scheme = 0; scheme < INIT_COUNT; scheme++)
        for (int llama = 0; llama < 2; llama++) test_init(&MODES[MODE_PRE], NULL, llama, scheme);
    for (int s = 0; s < SDD_COUNT; s++) {
        test_init(&MODES[MODE_SDD], &SDDS[s], true, INIT_NORMAL);
        test_init(&MODES[MODE_SDD_PRE], &SDDS[s], false, INIT_NORMAL);
    }
    test_common_weights();
}
