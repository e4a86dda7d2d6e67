// block.cuh: the two branches and the block in CUDA. `if constexpr` on the mode's row of modes.h decides which launches a block is made of; kernels never
// know it. (Outside of this file only nGPT's lengths of 1 are asked for: train_gpt.cu.)
//
// What the judge writes as separate steps is fused here, inside a block and never across blocks:
//   - q, k, v are one product, and gate and up are one: their weights are neighbours in memory;
//   - norms of q, k, v and RoPE are one kernel (qkv.cuh);
//   - `out` norm, skip and the norm that follows are one kernel (norm.cuh); where no norm stands next to it, the skip rides in the product as
//     beta * C, and so does its gradient.
// Elements moved per token around norms and skips, d = C: PRE forward 2d + 4d + (in the product), backward 4d + 4d; SPAN forward 4d + 4d, backward 3d + 5d.
//
// SET or ADD: every gradient of an activation is SET by the first that writes it; what comes from a second reader is its `add`.
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

// What the functions of one block share: its place in the mode, its parameters and activations, and their gradients.
typedef struct Block {
    const Model *m;
    const Sizes *s;
    Place p;
    Params w;
    Grads dw;
    Acts a, d;
    KvCache cache;
    const float2 *rotary;                               // from the position of the first row on
    wide *router_bias;                                  // the master weights: the steps of the bias are too small for bfloat16
    float loss_scale;                                   // backward: the gradient of the micro-batch's mean loss, for the router's
    Gpu *gpu;
} Block;

static inline Norm block_norm(const Block *b, Site site, const real *w, const real *bias, wide *dw, wide *db, wide *mean, wide *rstd) {
    return Norm{site, w, bias, dw, db, mean, rstd, b->s->n, site.on == L2 ? 1e-12f : (float)b->m->eps};          // of L2 only against 0/0
}
#define NORM(b, slot) block_norm(b, (b)->p.slot, (b)->w.slot##_w, (b)->w.slot##_b, (b)->dw.slot##_w, (b)->dw.slot##_b, (b)->a.slot##_mean, (b)->a.slot##_rstd)

// y = N(x) where the slot is filled; otherwise x itself: no call, no copy.
static inline real *slot_forward(const Norm *norm, real *y, real *x, Gpu *gpu) {
    if (!norm->site.on) return x;
    AddNorm f = {};
    f.y = x;
    f.z = y;
    f.next = norm;
    if (norm->site.on == SCALE) gain_forward(y, x, norm, gpu);
    else add_norm_forward(f, gpu);
    return y;
}

// Gradient of the slot's input: dx = N'(dy; x) + a * add where the slot is filled, otherwise dy itself.
static inline real *slot_backward(const Norm *norm, real *dx, real *dy, const real *x, Gpu *gpu, const real *add = nullptr, float a = 0) {
    if (!norm->site.on) return dy;
    NormBackward f = {};
    f.dx = dx;
    f.dy = dy;
    f.x = x;
    f.add = add;
    f.a = a;
    if (norm->site.on == SCALE) gain_backward(dx, dy, x, norm, gpu);
    else norm_backward(norm, f, gpu);
    return dx;
}

// s = a * skip + out(y), z = next(s), as one kernel; norms that are off are absent.
static inline void add_norm(const Block *b, real *s, real *z, const real *y, const real *skip, float a, const Norm *out, const Norm *next) {
    AddNorm f = {s, z, y, skip, a, out, next};
    add_norm_forward(f, b->gpu);
}

static inline LinearShape linear_shape(const Block *b, int out, int in, double c) { return LinearShape{b->s->n, out, in, (float)c}; }

// ------------------------------------------------------------------------------------------------------------------ attention
// y = W_o N_c(attention(rope(N_q(W_q c u)), rope(N_k(W_k c u)), N_v(W_v c u))) + beta * add; for L2, N(rope(.))

// Latent attention: k and v are made of W_kvb N([the latent's rows of] W_kva c u), and W_q above W_kva is one product: [q | latent | what turns of k].

static inline QkvShape qkv_shape(const Block *b) { return QkvShape{b->s->B, b->s->T, b->m->NH, b->m->KV, qk_size(b->m), rotary_size(b->m), b->m->HS, b->rotary}; }

// nGPT: q and k have length 1 when they meet, so scores are scaled up, and both read the one gain s_qk.
static inline AttentionShape attn_shape(const Block *b) {
    double root = sqrt((double)qk_size(b->m));
    return attention_shape(b->s->B, b->s->T, b->m->NH, b->m->KV, qk_size(b->m), b->m->HS, b->p.q.on == L2 ? root : 1 / root);
}

typedef struct QkvNorms { Norm of[3]; } QkvNorms;
static inline QkvNorms qkv_norms(const Block *b) {
    QkvNorms norms = {{NORM(b, q), NORM(b, k), NORM(b, v)}};
    if (norms.of[1].site.on != L2) return norms;
    norms.of[1].site.gains = norms.of[0].site.gains;
    norms.of[1].w = norms.of[0].w;
    norms.of[1].dw = norms.of[0].dw;
    return norms;
}

// Where q, k and v lie as products make them; t: activations or their gradients.
static inline QkvPlaces qkv_made(const Block *b, const Acts *t) {
    const Model *m = b->m;
    int QK = qk_size(m), ld = qkv_width(m), ld_b = 2 * m->NH * m->HS;
    if (!m->kv_rank) return qkv_row(t->qkv, m->NH, m->KV, m->HS);
    return {{{t->qkv, ld, QK}, {t->kvb, ld_b, 2 * m->HS}, {t->kvb + m->HS, ld_b, 2 * m->HS}}, {{t->qkv + m->HS, ld, QK}, {t->qkv + ld - m->rope_size, ld, 0}, {}}};
}

// Where they lie as attention reads them: those with a norm elsewhere, and k where it was put together. There a row has those parts alone.
static inline QkvPlaces qkv_read(const Block *b, const Acts *t) {
    const Model *m = b->m;
    QkvPlaces places = qkv_made(b, t), normed = qkv_row(t->qkvn, m->NH, m->KV, m->HS);
    const int on[3] = {b->p.q.on, b->p.k.on || m->kv_rank, b->p.v.on}, heads[3] = {m->NH, m->KV, m->KV};
    for (int part = 0, at = 0; part < 3; part++) {
        int size = part < 2 ? qk_size(m) : m->HS;
        if (!on[part]) continue;
        places.of[part] = normed.of[part];
        if (!m->kv_rank) continue;
        places.of[part] = {t->qkvn + at, qkvn_width(m, &b->p), size};
        places.turned[part] = {t->qkvn + at + m->HS, qkvn_width(m, &b->p), size};
        at += heads[part] * size;
    }
    return places;
}

// The latent in rows of qkv.
static inline Heads latent_of(const Model *m, const Acts *t) { return Heads{t->qkv + m->NH * qk_size(m), qkv_width(m), m->kv_rank}; }

static inline void attn_branch_forward(const Block *b, real *y, const real *u, const real *add, float beta) {
    const Model *m = b->m;
    QkvNorms norms = qkv_norms(b);
    QkvPlaces made = qkv_made(b, &b->a), read = qkv_read(b, &b->a);
    Norm nc = NORM(b, ctx), latent = NORM(b, latent);
    linear_forward(b->a.qkv, u, b->w.wq, b->w.wq_b, nullptr, 0, linear_shape(b, qkv_width(m), m->C, b->p.attn_c), b->gpu);
    if (m->kv_rank) {
        latent_norm_forward(Heads{b->a.kvcn, m->kv_rank, m->kv_rank}, latent_of(m, &b->a), &latent, b->gpu);
        linear_forward(b->a.kvb, b->a.kvcn, b->w.wkvb, nullptr, nullptr, 0, linear_shape(b, 2 * m->NH * m->HS, m->kv_rank, 1), b->gpu);
    }
    qkv_forward(&read, &made, norms.of, qkv_shape(b), b->gpu);
    if (b->cache.k) kv_cache_fill(b->cache, read.of, attn_shape(b), b->gpu);
    if (b->cache.cached) attention_decode(b->a.c, read.of[0], b->cache, attn_shape(b), b->gpu);
    else attention_forward(b->a.c, b->a.peak, b->a.lse, read.of, attn_shape(b), b->gpu);
    real *c = slot_forward(&nc, b->a.cn, b->a.c, b->gpu);
    linear_forward(y, c, b->w.wo, b->w.wo_b, add, beta, linear_shape(b, m->C, m->NH * m->HS, 1), b->gpu);
}

// From d.kvb and the heads' gradients of what turns to the rest of d.qkv.
static inline void latent_backward(const Block *b, Heads turned) {
    const Model *m = b->m;
    Norm latent = NORM(b, latent);
    LinearShape shape = linear_shape(b, 2 * m->NH * m->HS, m->kv_rank, 1);
    latent_sum(qkv_made(b, &b->d).turned[1], turned, b->s->n, m->NH, m->rope_size, b->gpu);
    linear_backward_weight(b->dw.wkvb, nullptr, b->d.kvb, b->a.kvcn, 1, shape, b->gpu);
    linear_backward_input(b->d.kvcn, b->d.kvb, b->w.wkvb, nullptr, 0, 1, shape, b->gpu);
    latent_norm_backward(latent_of(m, &b->d), Heads{b->d.kvcn, m->kv_rank, m->kv_rank}, latent_of(m, &b->a), &latent, b->gpu);
}

// du = (gradient through the branch) + beta * add
static inline void attn_branch_backward(const Block *b, real *du, const real *dy, const real *u, const real *add, float beta) {
    const Model *m = b->m;
    QkvNorms norms = qkv_norms(b);
    QkvPlaces made = qkv_made(b, &b->a), read = qkv_read(b, &b->a), dmade = qkv_made(b, &b->d), dread = qkv_read(b, &b->d);
    Norm nc = NORM(b, ctx);
    LinearShape in = linear_shape(b, qkv_width(m), m->C, b->p.attn_c), out = linear_shape(b, m->C, m->NH * m->HS, 1);
    real *dc = nc.site.on ? b->d.cn : b->d.c;
    linear_backward_weight(b->dw.wo, b->dw.wo_b, dy, nc.site.on ? b->a.cn : b->a.c, 1, out, b->gpu);
    linear_backward_input(dc, dy, b->w.wo, nullptr, 0, 1, out, b->gpu);
    dc = slot_backward(&nc, b->d.c, dc, b->a.c, b->gpu);
    attention_backward(dread.of, b->a.dots, dc, b->a.c, b->a.lse, read.of, attn_shape(b), b->gpu);
    if (m->kv_rank) dmade.turned[1] = dread.turned[1];          // of each head; they are yet to be added up
    qkv_backward(&dmade, &dread, &made, norms.of, qkv_shape(b), b->gpu);
    if (m->kv_rank) latent_backward(b, dread.turned[1]);
    linear_backward_weight(b->dw.wq, b->dw.wq_b, b->d.qkv, u, 1, in, b->gpu);
    linear_backward_input(du, b->d.qkv, b->w.wq, add, beta, 1, in, b->gpu);
}

// ------------------------------------------------------------------------------------------------------------------ ffn
// y = N_o(W_down act(N_h([W_gate | W_up] c u))) + beta * add, of width p.F: dense, or what all tokens go through beside experts. N_h is SDD's or nGPT's, N_o SDD's.
// GELU without N_h rides in the products of bf16, forward and backward; in float the library's tanh need not be ours to the last bits.

static inline bool gelu_in_product(const Block *b) { return sizeof(real) == 2 && !b->m->swiglu && !b->p.hidden.on; }
static inline LinearShape hidden_shape(const Block *b) { return linear_shape(b, b->m->swiglu ? 2 * b->p.F : b->p.F, b->m->C, b->p.ffn_c); }

static inline void mlp_forward(const Block *b, real *y, const real *u, const real *add, float beta) {
    const Model *m = b->m;
    Norm nh = NORM(b, hidden), no = NORM(b, shared_out);
    LinearShape down = linear_shape(b, m->C, b->p.F, 1);
    if (gelu_in_product(b)) linear_gelu_forward(b->a.h, b->a.gu, u, b->w.wu, b->w.wu_b, hidden_shape(b), b->gpu);
    else {
        linear_forward(b->a.gu, u, m->swiglu ? b->w.wg : b->w.wu, m->swiglu ? b->w.wg_b : b->w.wu_b, nullptr, 0, hidden_shape(b), b->gpu);
        real *gu = slot_forward(&nh, b->a.gun, b->a.gu, b->gpu);
        activation_forward(b->a.h, gu, b->s->n, b->p.F, m->swiglu, b->gpu);
    }
    if (no.site.on) {
        linear_forward(b->a.sy, b->a.h, b->w.wd, b->w.wd_b, nullptr, 0, down, b->gpu);
        add_norm(b, y, nullptr, b->a.sy, add, beta, &no, nullptr);
    } else linear_forward(y, b->a.h, b->w.wd, b->w.wd_b, add, beta, down, b->gpu);
}

static inline void mlp_backward(const Block *b, real *du, real *dy, const real *u, const real *add, float beta) {
    const Model *m = b->m;
    Norm nh = NORM(b, hidden), no = NORM(b, shared_out);
    LinearShape down = linear_shape(b, m->C, b->p.F, 1);
    dy = slot_backward(&no, b->d.sy, dy, b->a.sy, b->gpu);
    linear_backward_weight(b->dw.wd, b->dw.wd_b, dy, b->a.h, 1, down, b->gpu);
    if (gelu_in_product(b)) linear_gelu_backward_input(b->d.gu, b->a.gu, dy, b->w.wd, down, b->gpu);
    else {
        real *dgu = nh.site.on ? b->d.gun : b->d.gu;
        linear_backward_input(b->d.h, dy, b->w.wd, nullptr, 0, 1, down, b->gpu);
        activation_backward(dgu, b->d.h, nh.site.on ? b->a.gun : b->a.gu, b->s->n, b->p.F, m->swiglu, b->gpu);
        slot_backward(&nh, b->d.gu, dgu, b->a.gu, b->gpu);
    }
    linear_backward_weight(m->swiglu ? b->dw.wg : b->dw.wu, m->swiglu ? b->dw.wg_b : b->dw.wu_b, b->d.gu, u, 1, hidden_shape(b), b->gpu);
    linear_backward_input(du, b->d.gu, m->swiglu ? b->w.wg : b->w.wu, add, beta, 1, hidden_shape(b), b->gpu);
}

// ------------------------------------------------------------------------------------------------------------------ experts
// y = sum of gate_e expert_e(u) over a token's experts + mlp(u) + beta * add; an expert is N_o(W_down act(N_h([W_gate | W_up] c u))) too (moe.cuh).

static inline RouterShape router_shape(const Block *b) {
    const Moe *o = &b->m->moe;
    double layer = o->losses == LOSSES_MEAN ? 1.0 / moe_layers(b->m) : 1, z = o->losses == LOSSES_MEAN ? layer / o->K : layer;
    return RouterShape{b->s->B, b->s->T, o->E, o->K, o->router, (float)b->p.gate_scale, (float)(layer * o->balance), (float)(layer * o->sequence), (float)(z * o->z)};
}

static inline Routed routed(const Block *b) {
    const Acts *a = &b->a;
    return Routed{a->gate, a->rlse, a->load, a->share, a->choice, a->place, a->start, a->source, a->tiles};
}

static inline int64_t assigned(const Block *b) { return (int64_t)b->s->n * b->m->moe.K; }
static inline ExpertRows expert_rows(const Block *b, bool tokens) { return ExpertRows{b->a.start, b->a.tiles, tokens ? b->a.source : nullptr, assigned(b)}; }
static inline ExpertShape expert_up(const Block *b) { return ExpertShape{b->m->moe.E, b->m->swiglu ? 2 : 1, b->m->F, b->m->C, (float)b->p.ffn_c}; }
static inline ExpertShape expert_down(const Block *b) { return ExpertShape{b->m->moe.E, 1, b->m->C, b->m->F, 1}; }

static inline Norm expert_norm(const Block *b, Site site, const real *w, wide *dw, wide *rstd) {
    return Norm{site, w, nullptr, dw, nullptr, nullptr, rstd, assigned(b), (float)b->m->eps, b->a.start, b->m->moe.E};
}
#define EXPERT_NORM(b, slot) expert_norm(b, (b)->p.slot, (b)->w.slot##_w, (b)->dw.slot##_w, (b)->a.slot##_rstd)

static inline void moe_forward(const Block *b, real *y, const real *u, const real *add, float beta) {
    const Model *m = b->m;
    const Acts *a = &b->a;
    Norm nh = EXPERT_NORM(b, expert_hidden), no = EXPERT_NORM(b, expert_out);
    Routed o = routed(b);
    linear_forward_wide(a->rz, u, b->w.router, linear_shape(b, m->moe.E, m->C, b->p.ffn_c), b->gpu);
    router_forward(&o, a->rz, b->router_bias, router_shape(b), b->gpu);
    experts_forward(a->xgu, u, m->swiglu ? b->w.xg : b->w.xu, expert_rows(b, true), expert_up(b), b->gpu);
    activation_forward(a->xh, slot_forward(&nh, a->xgun, a->xgu, b->gpu), assigned(b), m->F, m->swiglu, b->gpu);
    experts_forward(a->xy, a->xh, b->w.xd, expert_rows(b, false), expert_down(b), b->gpu);
    const real *rows = slot_forward(&no, a->xyn, a->xy, b->gpu);
    if (b->p.F) {
        mlp_forward(b, y, u, add, beta);
        add = y, beta = 1;
    }
    combine(y, rows, a->gate, a->place, add, beta, b->s->n, m->moe.K, m->C, b->gpu);
}

// du = (gradient through the experts, the router and the mlp) + beta * add
static inline void moe_backward(const Block *b, real *du, real *dy, const real *u, const real *add, float beta) {
    const Model *m = b->m;
    const Acts *a = &b->a, *d = &b->d;
    Norm nh = EXPERT_NORM(b, expert_hidden), no = EXPERT_NORM(b, expert_out);
    Routed o = routed(b);
    LinearShape logits = linear_shape(b, m->moe.E, m->C, b->p.ffn_c);
    real *drows = no.site.on ? d->xyn : d->xy, *dgu = nh.site.on ? d->xgun : d->xgu;
    combine_backward(drows, d->gate, dy, no.site.on ? a->xyn : a->xy, a->gate, a->place, b->s->n, m->moe.K, m->C, b->gpu);
    drows = slot_backward(&no, d->xy, drows, a->xy, b->gpu);
    experts_backward_weight(b->dw.xd, drows, a->xh, expert_rows(b, false), expert_down(b), b->gpu);
    experts_backward_input(d->xh, drows, b->w.xd, expert_rows(b, false), expert_down(b), b->gpu);
    activation_backward(dgu, d->xh, nh.site.on ? a->xgun : a->xgu, assigned(b), m->F, m->swiglu, b->gpu);
    dgu = slot_backward(&nh, d->xgu, dgu, a->xgu, b->gpu);
    experts_backward_weight(m->swiglu ? b->dw.xg : b->dw.xu, dgu, u, expert_rows(b, true), expert_up(b), b->gpu);
    experts_backward_input(a->xdx, dgu, m->swiglu ? b->w.xg : b->w.xu, expert_rows(b, false), expert_up(b), b->gpu);
    combine(du, a->xdx, nullptr, a->place, add, beta, b->s->n, m->moe.K, m->C, b->gpu);
    router_backward(a->rdz, d->gate, &o, a->rz, router_shape(b), b->loss_scale, b->gpu);
    linear_backward_weight(b->dw.router, nullptr, a->rdz, u, 1, logits, b->gpu);
    linear_backward_input(du, a->rdz, b->w.router, du, 1, 1, logits, b->gpu);
    if (b->p.F) mlp_backward(b, du, dy, u, du, 1);
}

static inline void ffn_branch_forward(const Block *b, real *y, const real *u, const real *add, float beta) {
    if (b->p.moe) moe_forward(b, y, u, add, beta);
    else mlp_forward(b, y, u, add, beta);
}

static inline void ffn_branch_backward(const Block *b, real *du, real *dy, const real *u, const real *add, float beta) {
    if (b->p.moe) moe_backward(b, du, dy, u, add, beta);
    else mlp_backward(b, du, dy, u, add, beta);
}

// ------------------------------------------------------------------------------------------------------------------ the block
// u = in(x);  y = out(F(c u));  s = a skip + y, or skip + alpha (y - skip);  next = post(s)        (modes.h; x -> mid is attention's sublayer, mid -> x' the ffn's)

// nGPT's sublayers: next = post(skip + alpha (out(y) - skip)).
static inline Interpolation attn_interpolation(const Block *b) { return Interpolation{b->w.attn_alpha, b->dw.attn_alpha, NORM(b, attn_out), NORM(b, attn_post)}; }
static inline Interpolation ffn_interpolation(const Block *b) { return Interpolation{b->w.ffn_alpha, b->dw.ffn_alpha, NORM(b, ffn_out), NORM(b, ffn_post)}; }

static inline void interpolated_forward(const Block *b, real *x) {
    Interpolation attn = attn_interpolation(b), ffn = ffn_interpolation(b);
    attn_branch_forward(b, b->a.ay, x, nullptr, 0);
    interpolate_forward(b->a.mid, b->a.ay, x, &attn, b->gpu);
    ffn_branch_forward(b, b->a.fy, b->a.mid, nullptr, 0);
    interpolate_forward(b->a.x, b->a.fy, b->a.mid, &ffn, b->gpu);
}

// The skip's gradient waits where the branch's is added to it.
static inline void interpolated_backward(const Block *b, real *dx, real *x) {
    const Acts *a = &b->a, *d = &b->d;
    Interpolation attn = attn_interpolation(b), ffn = ffn_interpolation(b);
    interpolate_backward({d->fy, d->mid, d->x, a->x, a->fy, a->mid}, &ffn, b->gpu);
    ffn_branch_backward(b, d->mid, d->fy, a->mid, d->mid, 1);
    interpolate_backward({d->ay, dx, d->mid, a->mid, a->ay, x}, &attn, b->gpu);
    attn_branch_backward(b, dx, d->ay, x, dx, 1);
}

template <int ROW> static void block_forward(const Block *b, real *x) {
    constexpr Mode r = MODES[ROW];
    constexpr bool attn_out = r.attn.out || r.sdd, ffn_out = r.ffn.out || r.sdd;
    const Acts *a = &b->a;
    float attn_a = (float)b->p.attn_a, ffn_a = (float)b->p.ffn_a;
    Norm attn_in = NORM(b, attn_in), out1 = NORM(b, attn_out), post1 = NORM(b, attn_post), ffn_in = NORM(b, ffn_in), out2 = NORM(b, ffn_out), post2 = NORM(b, ffn_post);

    real *u = slot_forward(&attn_in, a->ai, x, b->gpu), *skip = r.attn.skip == NORMED ? u : x;
    if constexpr (attn_out || r.attn.post || r.ffn.in) {
        attn_branch_forward(b, a->ay, u, nullptr, 0);
        if constexpr (r.attn.post) add_norm(b, a->as, a->mid, a->ay, skip, attn_a, &out1, &post1);
        else add_norm(b, a->mid, a->fi, a->ay, skip, attn_a, &out1, &ffn_in);
        if constexpr (r.attn.post && r.ffn.in) slot_forward(&ffn_in, a->fi, a->mid, b->gpu);
    } else attn_branch_forward(b, a->mid, u, skip, attn_a);

    u = r.ffn.in ? a->fi : a->mid;
    skip = r.ffn.skip == OWN ? a->mid : r.ffn.skip == NORMED ? u : x;
    if constexpr (ffn_out || r.ffn.post) {
        ffn_branch_forward(b, a->fy, u, nullptr, 0);
        add_norm(b, r.ffn.post ? a->fs : a->x, a->x, a->fy, skip, ffn_a, &out2, &post2);
    } else ffn_branch_forward(b, a->x, u, skip, ffn_a);
}

// The ffn's half: from d.x to d.mid. Returns the gradient of its sum s, which the skip needs.
template <int ROW> static const real *ffn_backward(const Block *b) {
    constexpr Mode r = MODES[ROW];
    const Acts *a = &b->a, *d = &b->d;
    float ffn_a = (float)b->p.ffn_a;
    Norm in = NORM(b, ffn_in), out = NORM(b, ffn_out), post = NORM(b, ffn_post);
    real *ds = slot_backward(&post, d->fs, d->x, a->fs, b->gpu), *dy = slot_backward(&out, d->fy, ds, a->fy, b->gpu);
    if constexpr (r.ffn.in) {
        constexpr bool normed = r.ffn.skip == NORMED, own = r.ffn.skip == OWN;
        ffn_branch_backward(b, d->fi, dy, a->fi, normed ? ds : nullptr, normed ? ffn_a : 0);
        slot_backward(&in, d->mid, d->fi, a->mid, b->gpu, own ? ds : nullptr, own ? ffn_a : 0);
    } else {
        constexpr bool own = r.ffn.skip != BLOCK;
        ffn_branch_backward(b, d->mid, dy, a->mid, own ? ds : nullptr, own ? ffn_a : 0);
    }
    return ds;
}

// dx: gradient of the block's input; d.x, the gradient of its output, is complete.
template <int ROW> static void block_backward(const Block *b, real *dx, real *x) {
    constexpr Mode r = MODES[ROW];
    constexpr bool block = r.ffn.skip == BLOCK, normed = r.attn.in && r.attn.skip == NORMED;
    const Acts *a = &b->a, *d = &b->d;
    float attn_a = (float)b->p.attn_a, ffn_a = (float)b->p.ffn_a;
    Norm in = NORM(b, attn_in), out = NORM(b, attn_out), post = NORM(b, attn_post);
    const real *ds_ffn = ffn_backward<ROW>(b);
    real *ds = d->mid;
    // Where the ffn's skip is the block's input too, dx begins as the sum of both skips' gradients.
    constexpr bool both = block && !normed;
    if constexpr (r.attn.post) {
        NormBackward f = {d->as, both ? dx : nullptr, d->mid, a->as, nullptr, both ? ds_ffn : nullptr, 0, attn_a, ffn_a};
        norm_backward(&post, f, b->gpu);
        ds = d->as;
    } else if constexpr (both) scale_add(dx, ds, attn_a, ds_ffn, ffn_a, (int64_t)b->s->n * b->m->C, b->gpu);
    real *dy = slot_backward(&out, d->ay, ds, a->ay, b->gpu);

    const real *skip = both ? dx : ds;
    float scale = both ? 1 : attn_a;
    if constexpr (normed) {
        attn_branch_backward(b, d->ai, dy, a->ai, ds, attn_a);
        slot_backward(&in, dx, d->ai, x, b->gpu, block ? ds_ffn : nullptr, block ? ffn_a : 0);
    } else if constexpr (r.attn.in) {
        attn_branch_backward(b, d->ai, dy, a->ai, nullptr, 0);
        slot_backward(&in, dx, d->ai, x, b->gpu, skip, scale);
    } else attn_branch_backward(b, dx, dy, x, skip, scale);
}

// --recompute cheap: what costs memory traffic but no product, again.
static inline void block_recompute(const Block *b, real *x) {
    Norm attn_in = NORM(b, attn_in), ffn_in = NORM(b, ffn_in);
    slot_forward(&attn_in, b->a.ai, x, b->gpu);
    slot_forward(&ffn_in, b->a.fi, b->a.mid, b->gpu);
    if (b->p.F) activation_forward(b->a.h, b->p.hidden.on ? b->a.gun : b->a.gu, b->s->n, b->p.F, b->m->swiglu, b->gpu);
    if (b->p.moe) activation_forward(b->a.xh, b->p.expert_hidden.on ? b->a.xgun : b->a.xgu, assigned(b), b->m->F, b->m->swiglu, b->gpu);
}

// Right after a forward, whose buffers still hold this layer: y is what the sum has beyond a skip. x: the block's input.
static inline void block_watch(const Block *b, LayerSums *sums, const real *x) {
    const Mode *r = b->p.row;
    const Acts *a = &b->a;
    const real *attn_skip = r->attn.skip == NORMED && r->attn.in ? a->ai : x;
    const real *ffn_skip = r->ffn.skip == BLOCK ? x : r->ffn.skip == NORMED && r->ffn.in ? a->fi : a->mid;
    LayerTensors t = {{r->attn.post ? a->as : a->mid, r->ffn.post ? a->fs : a->x}, {attn_skip, ffn_skip}, a->x, a->peak, {(float)b->p.attn_a, (float)b->p.ffn_a},
                      (int64_t)b->s->n * b->m->C, (int64_t)b->s->n * b->m->NH, {a->attn_out_rstd, a->ffn_out_rstd}, {b->w.attn_alpha, b->w.ffn_alpha}, b->m->C};
    if (r->attn.a == LEARNED) t.s[0] = a->ay, t.s[1] = a->fy;
    layer_sums(sums, t, b->gpu);
}

// Every row of modes.h as a pair of functions; the row of layer l (Place.row) chooses.
typedef struct BlockRow { void (*forward)(const Block *b, real *x); void (*backward)(const Block *b, real *dx, real *x); } BlockRow;
static constexpr bool sub_interpolated(SubMode s) { return !s.in && s.c == ONE && s.out == L2 && s.skip == OWN && s.a == LEARNED && s.post == L2; }
template <int ROW> static constexpr BlockRow block_row_of(void) {
    constexpr Mode r = MODES[ROW];
    static_assert(sub_interpolated(r.attn) == sub_interpolated(r.ffn) && sub_interpolated(r.attn) == (r.attn.a == LEARNED || r.ffn.a == LEARNED), "an interpolation of another kind");
    if constexpr (sub_interpolated(r.attn)) return {interpolated_forward, interpolated_backward};
    else return {block_forward<ROW>, block_backward<ROW>};
}
#define BLOCK_ROW(name, ...) block_row_of<MODE_##name>(),
static const BlockRow BLOCK_ROWS[] = { {NULL, NULL}, MODE_TABLE(BLOCK_ROW, BLOCK_ROW) };
#undef BLOCK_ROW
static inline const BlockRow *block_row(const Block *b) { return &BLOCK_ROWS[b->p.row->id]; }
