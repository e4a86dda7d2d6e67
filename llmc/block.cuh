// block.cuh: one transformer block on the GPU: attention, feed-forward (MLP or experts), and the
// norms and residual connections around them. This is the only file that branches on the placement
// of norms: `if constexpr` on a row of modes.h selects the launches; kernels never know the mode.
// (train_gpt.cu asks only whether nGPT scales matrices to length 1.)
//
//   sublayer      u = in(x)    y = out(F(c u))    s = a skip + y    x' = post(s)
//   attention     x is the block's input, x' is mid
//   feed-forward  x is mid, x' is the block's output
//
// The judge (train_gpt.c) writes separate steps. Here they are fused, inside a block and never
// across blocks:
//   - q, k and v are one product, and so are gate and up: their weights are neighbors in memory;
//   - QK norm and RoPE are one kernel (qkv.cuh);
//   - residual + norm: the `out` norm, the residual add and the norm after it are one kernel
//     (norm.cuh). Without a norm next to it, the residual rides in a product as beta * C, and so
//     does its gradient.
// Values moved per token around norms and residuals, with d = C:
//   PRE    forward 2d + 4d + (in the product)    backward 4d + 4d
//   SPAN   forward 4d + 4d                       backward 3d + 5d
//
// SET or ADD: the first writer of an activation's gradient SETs it. A second reader of the forward
// value passes it on as `add`, to be added in the same kernel.
#pragma once
#include "attention.cuh"
#include "decode.cuh"
#include "embed.cuh"
#include "ffn.cuh"
#include "linear.cuh"
#include "loss.cuh"
#include "memory.h"
#include "moe.cuh"
#include "norm.cuh"
#include "qkv.cuh"
#include "stats.cuh"
#include "ngpt.cuh"

struct Block {
    const Model *m;
    const Sizes *s;
    Place p;               // the mode's row for this layer
    Params w;
    Grads dw;
    Acts a, d;             // activations and their gradients
    KvCache cache;         // sampling; k is NULL in a forward pass over whole sequences
    const float2 *rotary;  // angles [T, R/2] from the position of the first token on
    wide *router_bias;     // in float: its steps are too small for bf16
    float loss_scale;      // backward: d (loss) / d (mean loss of the micro-batch), for the router
    Gpu *gpu;
};

static inline Norm block_norm(const Block *b, Site site, const real *w, const real *bias, wide *dw,
                              wide *db, wide *mean, wide *rstd) {
    float eps = site.on == L2 ? 1e-12f : (float)b->m->eps;  // L2 only guards against 0/0
    return Norm{site, w, bias, dw, db, mean, rstd, b->s->n, eps};
}

// The norm in a slot, with its parameters, gradients and saved statistics (fields slot_w, ...).
#define NORM(b, slot) \
    block_norm(b, (b)->p.slot, (b)->w.slot##_w, (b)->w.slot##_b, (b)->dw.slot##_w, \
               (b)->dw.slot##_b, (b)->a.slot##_mean, (b)->a.slot##_rstd)

// y = N(x) if the slot holds a norm; otherwise x itself: no call, no copy.
static inline real *slot_forward(const Norm *norm, real *y, real *x, Gpu *gpu) {
    if (!norm->site.on) return x;
    if (norm->site.on == SCALE) gain_forward(y, x, norm, gpu);
    else add_norm_forward({nullptr, y, x, nullptr, 0, nullptr, norm}, gpu);
    return y;
}

// scale * x joins a result: a residual, or the gradient of one. {}: nothing does.
struct Residual {
    const real *x;
    float scale;
};

// Gradient of the slot's input: dx = N'(dy; x) + add if it holds a norm; otherwise dy itself.
static inline real *slot_backward(const Norm *norm, real *dx, real *dy, const real *x, Gpu *gpu,
                                  Residual add = {}) {
    if (!norm->site.on) return dy;
    NormBackward f = {dx, nullptr, dy, x, add.x, nullptr, add.scale, 0, 0};
    if (norm->site.on == SCALE) gain_backward(dx, dy, x, norm, gpu);
    else norm_backward(norm, f, gpu);
    return dx;
}

// y [n, out] = c W x for x [n, in].
static inline LinearShape linear_shape(const Block *b, int out, int in, double c) {
    return LinearShape{b->s->n, out, in, (float)c};
}

// A linear layer; b and db are nullptr without a bias.
struct Linear {
    const real *w, *b;
    wide *dw, *db;
    LinearShape shape;
};

#define LINEAR(b, weight, out, in, c) \
    Linear{(b)->w.weight, (b)->w.weight##_b, (b)->dw.weight, (b)->dw.weight##_b, \
           linear_shape(b, out, in, c)}

// y = c W x + bias + add
static inline void linear_forward(real *y, const real *x, const Linear *l, Residual add, Gpu *gpu) {
    linear_forward(y, x, l->w, l->b, add.x, add.scale, l->shape, gpu);
}

// dx = c W^T dy + add. ADDs to the gradients of weight and bias.
static inline void linear_backward(real *dx, const real *dy, const real *x, const Linear *l,
                                   Residual add, Gpu *gpu) {
    linear_backward_weight(l->dw, l->db, dy, x, 1, l->shape, gpu);
    linear_backward_input(dx, dy, l->w, add.x, add.scale, 1, l->shape, gpu);
}

// -------------------------------------------------------------------------------------- attention
// y = W_o N_c(attention(rope(N_q(W_q c u)), rope(N_k(W_k c u)), N_v(W_v c u))) + add
//
// nGPT's order is N(rope(.)). Latent attention (MLA) makes k and v from a latent of kv_rank
// channels: W_kvb N(W_kva c u). W_q above W_kva is one product, whose rows are [q | latent |
// k_rope]; k_rope is the part of k that rotates, one for all heads.

static inline QkvShape qkv_shape(const Block *b) {
    const Model *m = b->m;
    return {b->s->B, b->s->T, m->NH, m->KV, qk_size(m), rotary_size(m), m->HS, b->rotary};
}

static inline AttentionShape attn_shape(const Block *b) {
    const Model *m = b->m;
    int QK = qk_size(m);
    // In nGPT q and k have length 1 when they meet, so scores are scaled up.
    double scale = b->p.q.on == L2 ? sqrt((double)QK) : 1 / sqrt((double)QK);
    return attention_shape(b->s->B, b->s->T, m->NH, m->KV, QK, m->HS, scale);
}

struct QkvNorms { Norm of[3]; };

static inline QkvNorms qkv_norms(const Block *b) {
    QkvNorms norms = {{NORM(b, q), NORM(b, k), NORM(b, v)}};
    Norm *q = &norms.of[0], *k = &norms.of[1];
    if (k->site.on != L2) return norms;
    k->site.gains = q->site.gains;  // nGPT: q and k share the gain s_qk
    k->w = q->w;
    k->dw = q->dw;
    return norms;
}

// q, k and v as the products write them. t: activations or their gradients.
static inline QkvPlaces qkv_raw(const Block *b, const Acts *t) {
    const Model *m = b->m;
    if (!m->kv_rank) return qkv_row(t->qkv, m->NH, m->KV, m->HS);
    // Rows of qkv are [q | latent | k_rope], rows of kvb [k without k_rope | v] for each head.
    int QK = qk_size(m), ld = qkv_width(m), ld_b = 2 * m->NH * m->HS;
    Heads q = {t->qkv, ld, QK}, q_rope = {t->qkv + m->HS, ld, QK};
    Heads k = {t->kvb, ld_b, 2 * m->HS}, k_rope = {t->qkv + ld - m->rope_size, ld, 0};
    Heads v = {t->kvb + m->HS, ld_b, 2 * m->HS};
    return {{q, k, v}, {q_rope, k_rope, {}}};
}

// q, k and v as attention reads them. A part with a norm moves to qkvn, and so does the k that
// latent attention assembles. Rows of qkvn are [q | k | v]; with latent attention they hold the
// parts that move alone.
static inline QkvPlaces qkv_read(const Block *b, const Acts *t) {
    const Model *m = b->m;
    QkvPlaces places = qkv_raw(b, t);
    const int moved[3] = {b->p.q.on, b->p.k.on || m->kv_rank, b->p.v.on};
    const int heads[3] = {m->NH, m->KV, m->KV};
    int ld = qkvn_width(m, &b->p);
    for (int part = 0, at = 0; part < 3; part++) {
        int size = part < 2 ? qk_size(m) : m->HS;
        if (moved[part]) {
            places.of[part] = {t->qkvn + at, ld, size};
            places.turned[part] = {t->qkvn + at + m->HS, ld, size};
        }
        if (moved[part] || !m->kv_rank) at += heads[part] * size;
    }
    return places;
}

// The latent before its norm (in rows of qkv) and after it.
static inline Heads latent_raw(const Model *m, const Acts *t) {
    return Heads{t->qkv + m->NH * qk_size(m), qkv_width(m), m->kv_rank};
}

static inline Heads latent_normed(const Model *m, const Acts *t) {
    return Heads{t->kvcn, m->kv_rank, m->kv_rank};
}

static inline Linear latent_linear(const Block *b) {
    LinearShape shape = linear_shape(b, 2 * b->m->NH * b->m->HS, b->m->kv_rank, 1);
    return Linear{b->w.wkvb, nullptr, b->dw.wkvb, nullptr, shape};
}

static inline void attn_branch_forward(const Block *b, real *y, const real *u, Residual add) {
    const Model *m = b->m;
    const Acts *a = &b->a;
    Gpu *gpu = b->gpu;
    QkvNorms norms = qkv_norms(b);
    QkvPlaces raw = qkv_raw(b, a), read = qkv_read(b, a);
    Norm nc = NORM(b, ctx), latent = NORM(b, latent);
    Linear in = LINEAR(b, wq, qkv_width(m), m->C, b->p.attn_c), kvb = latent_linear(b);
    Linear out = LINEAR(b, wo, m->C, m->NH * m->HS, 1);
    linear_forward(a->qkv, u, &in, {}, gpu);  // [q | k | v]
    if (m->kv_rank) {  // k and v of each head from the latent
        qkv_forward(latent_parts(latent_normed(m, a), {}, latent_raw(m, a), &latent), gpu);
        linear_forward(a->kvb, a->kvcn, &kvb, {}, gpu);
    }
    qkv_forward(qkv_parts(read, {}, raw, norms.of, qkv_shape(b)), gpu);  // QK norm, RoPE
    // Sampling: new tokens enter the KV cache. A prompt (nothing cached yet) attends to itself.
    if (b->cache.k) kv_cache_fill(b->cache, read.of, attn_shape(b), gpu);
    if (b->cache.cached) attention_decode(a->c, read.of[0], b->cache, attn_shape(b), gpu);
    else attention_forward(a->c, a->peak, a->lse, read.of, attn_shape(b), gpu);
    real *c = slot_forward(&nc, a->cn, a->c, gpu);
    linear_forward(y, c, &out, add, gpu);
}

// From d.kvb, and the gradient of k_rope for each head, to the rest of d.qkv.
static inline void latent_backward(const Block *b, Heads dk_rope) {
    const Model *m = b->m;
    const Acts *a = &b->a, *d = &b->d;
    Gpu *gpu = b->gpu;
    Norm latent = NORM(b, latent);
    Linear kvb = latent_linear(b);
    latent_sum(qkv_raw(b, d).turned[1], dk_rope, b->s->n, m->NH, m->rope_size, gpu);
    linear_backward(d->kvcn, d->kvb, a->kvcn, &kvb, {}, gpu);
    qkv_backward(latent_parts(latent_raw(m, d), latent_normed(m, d), latent_raw(m, a), &latent),
                 gpu);
}

// du = (gradient through the branch) + add
static inline void attn_branch_backward(const Block *b, real *du, const real *dy, const real *u,
                                        Residual add) {
    const Model *m = b->m;
    const Acts *a = &b->a, *d = &b->d;
    Gpu *gpu = b->gpu;
    QkvNorms norms = qkv_norms(b);
    QkvPlaces raw = qkv_raw(b, a), read = qkv_read(b, a);
    QkvPlaces draw = qkv_raw(b, d), dread = qkv_read(b, d);
    Norm nc = NORM(b, ctx);
    Linear in = LINEAR(b, wq, qkv_width(m), m->C, b->p.attn_c);
    Linear out = LINEAR(b, wo, m->C, m->NH * m->HS, 1);
    real *dc = nc.site.on ? d->cn : d->c;
    linear_backward(dc, dy, nc.site.on ? a->cn : a->c, &out, {}, gpu);
    dc = slot_backward(&nc, d->c, dc, a->c, gpu);
    attention_backward(dread.of, a->dots, dc, a->c, a->lse, read.of, attn_shape(b), gpu);
    // The gradient of k_rope stays per head until latent_backward adds it up.
    if (m->kv_rank) draw.turned[1] = dread.turned[1];
    qkv_backward(qkv_parts(draw, dread, raw, norms.of, qkv_shape(b)), gpu);
    if (m->kv_rank) latent_backward(b, dread.turned[1]);
    linear_backward(du, d->qkv, u, &in, add, gpu);
}

// ------------------------------------------------------------------------------------ feed-forward
// y = N_o(W_down act(N_h([W_gate | W_up] c u))) + add, of width p.F: a dense MLP, or the
// shared experts. SDD and nGPT have N_h, SDD has N_o. GELU without N_h rides in the products in
// bf16, forward and backward; in float the library's tanh may differ from ours in the last bits.

static inline bool gelu_in_product(const Block *b) {
    return sizeof(real) == 2 && !b->m->swiglu && !b->p.hidden.on;
}

// [W_gate | W_up], or W_up alone.
static inline Linear up_linear(const Block *b) {
    if (b->m->swiglu) return LINEAR(b, wg, 2 * b->p.F, b->m->C, b->p.ffn_c);
    return LINEAR(b, wu, b->p.F, b->m->C, b->p.ffn_c);
}

static inline void mlp_forward(const Block *b, real *y, const real *u, Residual add) {
    const Acts *a = &b->a;
    Gpu *gpu = b->gpu;
    Norm nh = NORM(b, hidden), no = NORM(b, shared_out);  // N_h, N_o
    Linear up = up_linear(b), down = LINEAR(b, wd, b->m->C, b->p.F, 1);
    if (gelu_in_product(b)) linear_gelu_forward(a->h, a->gu, u, up.w, up.b, up.shape, gpu);
    else {
        linear_forward(a->gu, u, &up, {}, gpu);
        real *gu = slot_forward(&nh, a->gun, a->gu, gpu);
        activation_forward(a->h, gu, b->s->n, b->p.F, b->m->swiglu, gpu);
    }
    if (no.site.on) {
        linear_forward(a->sy, a->h, &down, {}, gpu);
        add_norm_forward({y, nullptr, a->sy, add.x, add.scale, &no, nullptr}, gpu);
    } else linear_forward(y, a->h, &down, add, gpu);
}

// du = (gradient through the MLP) + add
static inline void mlp_backward(const Block *b, real *du, real *dy, const real *u, Residual add) {
    const Acts *a = &b->a, *d = &b->d;
    Gpu *gpu = b->gpu;
    Norm nh = NORM(b, hidden), no = NORM(b, shared_out);  // N_h, N_o
    Linear up = up_linear(b), down = LINEAR(b, wd, b->m->C, b->p.F, 1);
    dy = slot_backward(&no, d->sy, dy, a->sy, gpu);
    linear_backward_weight(down.dw, down.db, dy, a->h, 1, down.shape, gpu);
    if (gelu_in_product(b)) linear_gelu_backward_input(d->gu, a->gu, dy, down.w, down.shape, gpu);
    else {
        real *dgu = nh.site.on ? d->gun : d->gu;
        const real *gu = nh.site.on ? a->gun : a->gu;
        linear_backward_input(d->h, dy, down.w, nullptr, 0, 1, down.shape, gpu);
        activation_backward(dgu, d->h, gu, b->s->n, b->p.F, b->m->swiglu, gpu);
        slot_backward(&nh, d->gu, dgu, a->gu, gpu);
    }
    linear_backward(du, d->gu, u, &up, add, gpu);
}

// ------------------------------------------------------------------------------ mixture of experts
// y = sum of gate_e expert_e(u) over the top-k experts of a token + mlp(u) + add. An expert,
// too, is N_o(W_down act(N_h([W_gate | W_up] c u))) (moe.cuh). mlp is the shared experts, if any.

// --router-losses mean: auxiliary losses are means over the layers, and the z-loss over the top-k
// too.
static inline RouterShape router_shape(const Block *b) {
    const Moe *o = &b->m->moe;
    const bool mean = o->losses == LOSSES_MEAN;
    double layer = mean ? 1.0 / moe_layers(b->m) : 1;
    double z = mean ? layer / o->K : layer;
    return RouterShape{b->s->B, b->s->T, o->E, o->K, o->router, (float)b->p.gate_scale,
                       (float)(layer * o->balance), (float)(layer * o->sequence),
                       (float)(z * o->z)};
}

// The router's results, for the kernels of moe.cuh.
static inline Routed routed(const Block *b) {
    const Acts *a = &b->a;
    return Routed{a->gate, a->rlse, a->load, a->share, a->choice, a->place, a->start, a->source,
                  a->tiles};
}

// Rows of all experts together: each token has one in each of its K experts.
static inline int64_t assigned(const Block *b) { return (int64_t)b->s->n * b->m->moe.K; }

// tokens: the operand has a row per token, which experts gather through `source`.
static inline ExpertRows expert_rows(const Block *b, bool tokens) {
    return {b->a.start, b->a.tiles, tokens ? b->a.source : nullptr, assigned(b)};
}

// Weights of all experts: [E, 2F, C] or [E, F, C] up, [E, C, F] down.
static inline ExpertShape expert_up(const Block *b) {
    const Model *m = b->m;
    return {m->moe.E, m->swiglu ? 2 : 1, m->F, m->C, (float)b->p.ffn_c};
}

static inline ExpertShape expert_down(const Block *b) {
    return {b->m->moe.E, 1, b->m->C, b->m->F, 1};
}

// A norm over rows sorted by expert, with a gain [width] for each expert.
#define EXPERT_NORM(b, slot) \
    Norm{(b)->p.slot, (b)->w.slot##_w, nullptr, (b)->dw.slot##_w, nullptr, nullptr, \
         (b)->a.slot##_rstd, assigned(b), (float)(b)->m->eps, (b)->a.start, (b)->m->moe.E}

static inline void moe_forward(const Block *b, real *y, const real *u, Residual add) {
    const Model *m = b->m;
    const Acts *a = &b->a;
    Gpu *gpu = b->gpu;
    Norm nh = EXPERT_NORM(b, expert_hidden), no = EXPERT_NORM(b, expert_out);
    Routed o = routed(b);
    LinearShape logits = linear_shape(b, m->moe.E, m->C, b->p.ffn_c);
    const real *up = m->swiglu ? b->w.xg : b->w.xu;
    linear_forward_wide(a->rz, u, b->w.router, logits, gpu);  // router logits [n, E], in float
    router_forward(&o, a->rz, b->router_bias, router_shape(b), gpu);  // top-k and its gates
    // Each expert reads its tokens through `source`, and writes rows sorted by expert.
    experts_forward(a->xgu, u, up, expert_rows(b, true), expert_up(b), gpu);
    const real *gu = slot_forward(&nh, a->xgun, a->xgu, gpu);
    activation_forward(a->xh, gu, assigned(b), m->F, m->swiglu, gpu);
    experts_forward(a->xy, a->xh, b->w.xd, expert_rows(b, false), expert_down(b), gpu);
    const real *rows = slot_forward(&no, a->xyn, a->xy, gpu);
    if (b->p.F) {  // shared experts: y = mlp(u) + add comes first
        mlp_forward(b, y, u, add);
        add = {y, 1};
    }
    combine(y, rows, a->gate, a->place, add.x, add.scale, b->s->n, m->moe.K, m->C, gpu);
}

// du = (gradient through the experts, the router and the MLP) + add
static inline void moe_backward(const Block *b, real *du, real *dy, const real *u, Residual add) {
    const Model *m = b->m;
    const Acts *a = &b->a, *d = &b->d;
    Gpu *gpu = b->gpu;
    const int n = b->s->n, K = m->moe.K, C = m->C;
    Norm nh = EXPERT_NORM(b, expert_hidden), no = EXPERT_NORM(b, expert_out);
    Routed o = routed(b);
    LinearShape shape = linear_shape(b, m->moe.E, C, b->p.ffn_c);
    Linear logits = {b->w.router, nullptr, b->dw.router, nullptr, shape};
    ExpertRows from_tokens = expert_rows(b, true), rows = expert_rows(b, false);
    const real *y_rows = no.site.on ? a->xyn : a->xy, *gu = nh.site.on ? a->xgun : a->xgu;
    real *drows = no.site.on ? d->xyn : d->xy, *dgu = nh.site.on ? d->xgun : d->xgu;
    // Through the gates, to the rows of the experts and to the gates themselves.
    combine_backward(drows, d->gate, dy, y_rows, a->gate, a->place, n, K, C, gpu);
    drows = slot_backward(&no, d->xy, drows, a->xy, gpu);
    experts_backward_weight(b->dw.xd, drows, a->xh, rows, expert_down(b), gpu);
    experts_backward_input(d->xh, drows, b->w.xd, rows, expert_down(b), gpu);
    activation_backward(dgu, d->xh, gu, assigned(b), m->F, m->swiglu, gpu);
    dgu = slot_backward(&nh, d->xgu, dgu, a->xgu, gpu);
    // Up: xdx has a row for each assignment; combine adds up those of a token.
    wide *dup = m->swiglu ? b->dw.xg : b->dw.xu;
    experts_backward_weight(dup, dgu, u, from_tokens, expert_up(b), gpu);
    const real *up = m->swiglu ? b->w.xg : b->w.xu;
    experts_backward_input(a->xdx, dgu, up, rows, expert_up(b), gpu);
    combine(du, a->xdx, nullptr, a->place, add.x, add.scale, n, K, C, gpu);
    // The router and the shared experts read u too, so they ADD to du.
    router_backward(a->rdz, d->gate, &o, a->rz, router_shape(b), b->loss_scale, gpu);
    linear_backward(du, a->rdz, u, &logits, {du, 1}, gpu);
    if (b->p.F) mlp_backward(b, du, dy, u, {du, 1});
}

// A layer is dense, or has experts (Place.moe).
static inline void ffn_branch_forward(const Block *b, real *y, const real *u, Residual add) {
    if (b->p.moe) moe_forward(b, y, u, add);
    else mlp_forward(b, y, u, add);
}

static inline void ffn_branch_backward(const Block *b, real *du, real *dy, const real *u,
                                       Residual add) {
    if (b->p.moe) moe_backward(b, du, dy, u, add);
    else mlp_backward(b, du, dy, u, add);
}

// --------------------------------------------------------------------------------- the nGPT block
// mid = L2(x + alpha_1 (L2(attention(x)) - x))    x' = L2(mid + alpha_2 (L2(ffn(mid)) - mid))

#define INTERPOLATION(b, sub) \
    Interpolation{(b)->w.sub##_alpha, (b)->dw.sub##_alpha, NORM(b, sub##_out), NORM(b, sub##_post)}

static inline void interpolated_forward(const Block *b, real *x) {
    const Acts *a = &b->a;
    Interpolation attn = INTERPOLATION(b, attn), ffn = INTERPOLATION(b, ffn);
    attn_branch_forward(b, a->ay, x, {});
    interpolate_forward(a->mid, a->ay, x, &attn, b->gpu);
    ffn_branch_forward(b, a->fy, a->mid, {});
    interpolate_forward(a->x, a->fy, a->mid, &ffn, b->gpu);
}

// The gradient of the skip is SET first; the branch then adds its own to it (d.mid, dx).
static inline void interpolated_backward(const Block *b, real *dx, real *x) {
    const Acts *a = &b->a, *d = &b->d;
    Interpolation attn = INTERPOLATION(b, attn), ffn = INTERPOLATION(b, ffn);
    interpolate_backward({d->fy, d->mid, d->x, a->x, a->fy, a->mid}, &ffn, b->gpu);
    ffn_branch_backward(b, d->mid, d->fy, a->mid, {d->mid, 1});
    interpolate_backward({d->ay, dx, d->mid, a->mid, a->ay, x}, &attn, b->gpu);
    attn_branch_backward(b, dx, d->ay, x, {dx, 1});
}

// -------------------------------------------------------------------------- the block, every mode

// The residual (skip) of a sublayer: its own input, its normed input, or the block's input.
static inline const real *skip_of(int skip, const real *own, const real *normed,
                                  const real *block) {
    if (skip == OWN) return own;
    return skip == NORMED ? normed : block;
}

template <int ROW> static void block_forward(const Block *b, real *x) {
    constexpr Mode r = MODES[ROW];
    constexpr bool attn_out = r.attn.out || r.sdd, ffn_out = r.ffn.out || r.sdd;
    const Acts *a = &b->a;
    float attn_a = (float)b->p.attn_a, ffn_a = (float)b->p.ffn_a;
    // Constructing a Norm is free: only those in a slot of this row are used.
    Norm in1 = NORM(b, attn_in), out1 = NORM(b, attn_out), post1 = NORM(b, attn_post);
    Norm in2 = NORM(b, ffn_in), out2 = NORM(b, ffn_out), post2 = NORM(b, ffn_post);

    // Attention: from x to mid, and to a->fi = in2(mid) if the MLP has an input norm.
    real *u = slot_forward(&in1, a->ai, x, b->gpu);
    const real *skip = skip_of(r.attn.skip, x, u, x);
    if constexpr (attn_out || r.attn.post || r.ffn.in) {
        attn_branch_forward(b, a->ay, u, {});
        // Residual + norm: one kernel norms y, adds the residual, and applies the next norm.
        AddNorm f = {a->mid, a->fi, a->ay, skip, attn_a, &out1, &in2};
        if constexpr (r.attn.post) f.s = a->as, f.z = a->mid, f.next = &post1;
        add_norm_forward(f, b->gpu);
        if constexpr (r.attn.post && r.ffn.in) slot_forward(&in2, a->fi, a->mid, b->gpu);
    } else attn_branch_forward(b, a->mid, u, {skip, attn_a});  // the product adds the residual

    // Feed-forward: from mid to a->x.
    u = r.ffn.in ? a->fi : a->mid;
    skip = skip_of(r.ffn.skip, a->mid, u, x);
    if constexpr (ffn_out || r.ffn.post) {
        ffn_branch_forward(b, a->fy, u, {});
        real *s = r.ffn.post ? a->fs : a->x;
        add_norm_forward({s, a->x, a->fy, skip, ffn_a, &out2, &post2}, b->gpu);
    } else ffn_branch_forward(b, a->x, u, {skip, ffn_a});  // the product adds the residual
}

// The feed-forward half: from d.x to d.mid. Returns the gradient of its sum s, which the skip
// needs.
template <int ROW> static const real *ffn_backward(const Block *b) {
    constexpr Mode r = MODES[ROW];
    const Acts *a = &b->a, *d = &b->d;
    float ffn_a = (float)b->p.ffn_a;
    Norm in = NORM(b, ffn_in), out = NORM(b, ffn_out), post = NORM(b, ffn_post);
    real *ds = slot_backward(&post, d->fs, d->x, a->fs, b->gpu);  // of s
    real *dy = slot_backward(&out, d->fy, ds, a->fy, b->gpu);     // of the branch
    if constexpr (r.ffn.in) {
        const real *normed = r.ffn.skip == NORMED ? ds : nullptr;
        const real *own = r.ffn.skip == OWN ? ds : nullptr;
        ffn_branch_backward(b, d->fi, dy, a->fi, {normed, ffn_a});
        slot_backward(&in, d->mid, d->fi, a->mid, b->gpu, {own, ffn_a});
    } else {
        const real *own = r.ffn.skip != BLOCK ? ds : nullptr;
        ffn_branch_backward(b, d->mid, dy, a->mid, {own, ffn_a});
    }
    return ds;
}

// From d.x, the complete gradient of the block's output, to dx, the gradient of its input.
template <int ROW> static void block_backward(const Block *b, real *dx, real *x) {
    constexpr Mode r = MODES[ROW];
    constexpr bool block = r.ffn.skip == BLOCK, normed = r.attn.in && r.attn.skip == NORMED;
    const Acts *a = &b->a, *d = &b->d;
    float attn_a = (float)b->p.attn_a, ffn_a = (float)b->p.ffn_a;
    Norm in = NORM(b, attn_in), out = NORM(b, attn_out), post = NORM(b, attn_post);
    const real *ds_ffn = ffn_backward<ROW>(b);
    real *ds = d->mid;  // complete but for the post norm

    // Attention's post norm. If both skips are the block's input, dx starts as the sum of their
    // gradients.
    constexpr bool both = block && !normed;
    if constexpr (r.attn.post) {
        NormBackward f = {d->as, both ? dx : nullptr, d->mid, a->as, nullptr,
                          both ? ds_ffn : nullptr, 0, attn_a, ffn_a};
        norm_backward(&post, f, b->gpu);
        ds = d->as;
    } else if constexpr (both) {
        scale_add(dx, ds, attn_a, ds_ffn, ffn_a, (int64_t)b->s->n * b->m->C, b->gpu);
    }
    real *dy = slot_backward(&out, d->ay, ds, a->ay, b->gpu);

    // The branch, then its input norm; whichever is last adds the gradient of the residual.
    Residual skip = both ? Residual{dx, 1} : Residual{ds, attn_a};
    if constexpr (normed) {
        attn_branch_backward(b, d->ai, dy, a->ai, {ds, attn_a});
        slot_backward(&in, dx, d->ai, x, b->gpu, {block ? ds_ffn : nullptr, ffn_a});
    } else if constexpr (r.attn.in) {
        attn_branch_backward(b, d->ai, dy, a->ai, {});
        slot_backward(&in, dx, d->ai, x, b->gpu, skip);
    } else attn_branch_backward(b, dx, dy, x, skip);
}

// --recompute cheap: recomputes the activations that cost memory traffic but no product.
static inline void block_recompute(const Block *b, real *x) {
    const Acts *a = &b->a;
    Norm attn_in = NORM(b, attn_in), ffn_in = NORM(b, ffn_in);
    slot_forward(&attn_in, a->ai, x, b->gpu);
    slot_forward(&ffn_in, a->fi, a->mid, b->gpu);
    if (b->p.F) {
        const real *gu = b->p.hidden.on ? a->gun : a->gu;
        activation_forward(a->h, gu, b->s->n, b->p.F, b->m->swiglu, b->gpu);
    }
    if (b->p.moe) {
        const real *gu = b->p.expert_hidden.on ? a->xgun : a->xgu;
        activation_forward(a->xh, gu, assigned(b), b->m->F, b->m->swiglu, b->gpu);
    }
}

// Adds this layer's statistics to sums (--norms-every), right after its forward pass, while the
// buffers still hold this layer. x: the block's input. The kernel takes y as s minus the skip.
static inline void block_stats(const Block *b, LayerSums *sums, const real *x) {
    const Mode *r = b->p.row;
    const Acts *a = &b->a;
    const real *attn_u = r->attn.in ? a->ai : x, *ffn_u = r->ffn.in ? a->fi : a->mid;
    LayerTensors t = {
        .s = {r->attn.post ? a->as : a->mid, r->ffn.post ? a->fs : a->x},
        .skip = {skip_of(r->attn.skip, x, attn_u, x), skip_of(r->ffn.skip, a->mid, ffn_u, x)},
        .x = a->x,
        .peak = a->peak,
        .a = {(float)b->p.attn_a, (float)b->p.ffn_a},
        .size = (int64_t)b->s->n * b->m->C,
        .rows = (int64_t)b->s->n * b->m->NH,
        .rstd = {a->attn_out_rstd, a->ffn_out_rstd},
        .p = {b->w.attn_alpha, b->w.ffn_alpha},
        .C = b->m->C,
    };
    if (r->attn.a == LEARNED) t.s[0] = a->ay, t.s[1] = a->fy;  // nGPT: y itself, not a sum
    layer_sums(sums, t, b->gpu);
}

// ------------------------------------------------------------------------------------- dispatch
// Every row of modes.h as a pair of functions. Place.row selects the pair of a layer.

struct BlockRow {
    void (*forward)(const Block *b, real *x);
    void (*backward)(const Block *b, real *dx, real *x);
};

template <int ROW> static constexpr BlockRow block_row_of(void) {
    // A learned a comes with nGPT's slots in both sublayers.
    if (MODES[ROW].attn.a == LEARNED) return {interpolated_forward, interpolated_backward};
    return {block_forward<ROW>, block_backward<ROW>};
}

#define BLOCK_ROW(name, ...) block_row_of<MODE_##name>(),
static const BlockRow BLOCK_ROWS[] = {{NULL, NULL}, MODE_TABLE(BLOCK_ROW, BLOCK_ROW)};
#undef BLOCK_ROW

static inline const BlockRow *block_row(const Block *b) { return &BLOCK_ROWS[b->p.row->id]; }
