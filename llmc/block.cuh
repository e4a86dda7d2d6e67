// block.cuh: one transformer block on the GPU: attention, feed-forward (MLP or experts), and the
// norms and residual connections around them. This is the only file that branches on the placement
// of norms inside a block: the layer's row of modes.h and Site.on say which kernels the host
// launches. Kernels never know the mode. train_gpt.cu asks about the slots outside the blocks, and
// whether nGPT scales matrices to length 1. Here "block" is a transformer block; in the files of
// layers it is a CUDA thread block.
//
//   sublayer      u = in(x)    y = F(c u)    s = a skip + out(y)    x' = post(s)
//   attention     x is the block's input, x' is mid
//   feed-forward  x is mid, x' is the block's output
//
// The judge (train_gpt.c) writes separate steps. Here steps of one block are fused, never those of
// two blocks:
//   - q, k and v are one product, and so are gate and up: their weights are neighbours in memory;
//   - QK norm and RoPE are one kernel (qkv.cuh);
//   - residual + norm: the `out` norm, the residual add and the norm after it are one kernel
//     (norm.cuh). Without a norm next to it, the product before it adds the residual: cuBLAS
//     computes D = alpha A B + beta C (linear.cuh), where beta C is a skip. After experts combine
//     adds it. The gradient of the residual is added in the same way.
// Values moved per token around norms and residuals, with d channels:
//   PRE    forward 2d + 4d + (in the product)    backward 4d + 4d
//   SPAN   forward 4d + 4d                       backward 3d + 5d
//
// SET or ADD: every activation's gradient is SET. If a value is read twice, its gradient has two
// terms: the kernel that computes the second one gets the first as the argument `add`. Gradients of
// parameters are ADDed to, but the first micro-step SETs those of linears (dw_of_linears).
#pragma once
#include "attend.cuh"
#include "decode.cuh"
#include "experts.cuh"
#include "ffn.cuh"
#include "linear.cuh"
#include "memory.h"
#include "moe.cuh"
#include "ngpt.cuh"
#include "norm.cuh"
#include "qkv.cuh"
#include "stats.cuh"

struct Block {
    const Model *m;
    const Sizes *s;
    LayerMode p;           // what the mode decides about this layer (modes.h)
    Params w;              // parameters (tensors.h)
    Grads dw;
    Acts a, d;             // activations and their gradients (tensors.h)
    KvCache cache;         // sampling; k is NULL in a forward pass over whole sequences
    const float2 *rotary;  // RoPE's table [T, R/2] from the position of the first token on
    wide *router_bias;     // a master weight: its steps are too small for bf16
    float dloss;           // backward: gradient of the micro-batch's mean loss, for the router
    int dw_of_linears;     // backward: SET in the first micro-step of a step, then ADD
    const int32_t *begins, *ends;  // [n] of each token's document (attention.cuh), or nullptr
    Gpu *gpu;
};

// The norm in a slot, with its parameters, gradients and saved statistics (fields slot_w, ...). The
// eps of L2 only prevents 0/0 for x = 0.
#define NORM(b, slot) \
    Norm{b.p.slot, b.w.slot##_w, b.w.slot##_b, b.dw.slot##_w, b.dw.slot##_b, \
         b.a.slot##_mean, b.a.slot##_rstd, b.s->n, b.p.slot.on == L2 ? 1e-12f : (float)b.m->eps, \
         1, nullptr, b.w.slot##_alpha, b.dw.slot##_alpha}

// y = N(x) if the slot holds a norm; otherwise x itself: no call, no copy. Callers that
// read y afterwards rely on acts_view, which then makes y another name of x.
static real *slot_forward(const Norm &norm, real *y, real *x, Gpu *gpu) {
    if (!norm.site.on) return x;
    if (norm.site.on == SCALE) gain_forward(y, x, &norm, gpu);
    else add_norm_forward({nullptr, y, x, nullptr, 0, nullptr, &norm}, gpu);
    return y;
}

// Gradient of the slot's input: dx = N'(dy; x) + add if it holds a norm; otherwise dy. acts_view
// then makes an activation's dx another name of dy.
static real *slot_backward(const Norm &norm, real *dx, real *dy, const real *x, Gpu *gpu,
                           Residual add = {}) {
    if (!norm.site.on) return dy;
    NormBackward f = {dx, nullptr, dy, x, add.x, nullptr, add.scale, 0, 0};
    if (norm.site.on == SCALE) gain_backward(dx, dy, x, &norm, gpu);
    else norm_backward(&norm, f, gpu);
    return dx;
}

// y [n, out] = c W x for x [n, in], without a bias and with one.
#define LINEAR(b, weight, out, in, c) \
    Linear{b.w.weight, nullptr, b.dw.weight, nullptr, b.s->n, out, in, (float)(c), \
           b.dw_of_linears}
#define BIASED(b, weight, out, in, c) \
    Linear{b.w.weight, b.w.weight##_b, b.dw.weight, b.dw.weight##_b, \
           b.s->n, out, in, (float)(c), b.dw_of_linears}

// -------------------------------------------------------------------------------------- attention
// y = W_o N_ctx(attention(rope(N_q(W_q c u)), rope(N_k(W_k c u)), N_v(W_v c u))) + add
//
// N_q, N_k, N_v and N_ctx are the norms in the slots of these names. nGPT's order is N(rope(.)).
// Latent attention (MLA) makes k and v from a latent of kv_rank channels: W_kvb N(W_kva c u). W_q
// and W_kva, neighbours in memory, are one product, whose rows are [q | latent | k_rope]. k_rope is
// the part of k that rotates, one for all heads; the judge and tensors.h call it kr.

static QkvShape qkv_shape(const Block &b) {
    const Model *m = b.m;
    return {b.s->B, b.s->T, m->NH, m->KV, qk_size(m), rotary_size(m), m->HS, b.rotary};
}

static AttentionShape attn_shape(const Block &b) {
    const Model *m = b.m;
    int QK = qk_size(m);
    // In nGPT q and k have length 1 when they meet, so scores are scaled up.
    double scale = b.p.q.on == L2 ? sqrt((double)QK) : 1 / sqrt((double)QK);
    AttentionShape s = attention_shape(b.s->B, b.s->T, m->NH, m->KV, QK, m->HS, scale);
    s.begins = b.begins;
    s.ends = b.ends;
    return s;
}

struct QkvNorms { Norm of[3]; };

static QkvNorms qkv_norms(const Block &b) {
    QkvNorms norms = {{NORM(b, q), NORM(b, k), NORM(b, v)}};
    Norm *q = &norms.of[0], *k = &norms.of[1];
    if (k->site.on != L2) return norms;
    k->site.gains = q->site.gains;  // nGPT: q and k share the gain s_qk
    k->w = q->w;
    k->dw = q->dw;
    return norms;
}

// The memory that the products write q, k and v to. t: activations or their gradients.
static QkvPlaces qkv_raw(const Block &b, const Acts &t) {
    const Model *m = b.m;
    if (!m->kv_rank) return qkv_row(t.qkv, m->NH, m->KV, m->HS, m->HS);
    // Rows of qkv are [q | latent | k_rope], rows of kvb [k without k_rope | v] for each head.
    int QK = qk_size(m), ld = qkv_width(m), ld_b = 2 * m->NH * m->HS;
    Heads q = {t.qkv, ld, QK}, q_rope = {t.qkv + m->HS, ld, QK};
    Heads k = {t.kvb, ld_b, 2 * m->HS}, k_rope = {t.qkv + ld - m->rope_size, ld, 0};
    Heads v = {t.kvb + m->HS, ld_b, 2 * m->HS};
    return {{q, k, v}, {q_rope, k_rope, {}}};
}

// The memory that attention reads q, k and v from. A part (q, k or v) with a norm moves to qkvn,
// and so does the k that latent attention assembles. Rows of qkvn are [q | k | v]; with latent
// attention they hold only the parts that move.
static QkvPlaces qkv_read(const Block &b, const Acts &t) {
    const Model *m = b.m;
    QkvPlaces places = qkv_raw(b, t);
    const int moved[3] = {b.p.q.on, b.p.k.on || m->kv_rank, b.p.v.on};
    const int heads[3] = {m->NH, m->KV, m->KV};
    int ld = qkvn_width(m, &b.p);
    for (int part = 0, at = 0; part < 3; part++) {
        int size = part < 2 ? qk_size(m) : m->HS;
        if (moved[part]) {
            places.of[part] = {t.qkvn + at, ld, size};
            places.turned[part] = {t.qkvn + at + m->HS, ld, size};
        }
        if (moved[part] || !m->kv_rank) at += heads[part] * size;
    }
    return places;
}

// The latent before its norm (in rows of qkv) and after it.
static Heads latent_raw(const Model *m, const Acts &t) {
    return {t.qkv + m->NH * qk_size(m), qkv_width(m), m->kv_rank};
}

static Heads latent_normed(const Model *m, const Acts &t) {
    return {t.kvcn, m->kv_rank, m->kv_rank};
}

// The products: [q | k | v] from u; with latent attention [k | v] of each head from the latent; y.
static Linear qkv_linear(const Block &b) {
    return BIASED(b, wq, qkv_width(b.m), b.m->C, b.p.attn_c);
}

static Linear latent_linear(const Block &b) {
    return LINEAR(b, wkvb, 2 * b.m->NH * b.m->HS, b.m->kv_rank, 1);
}

static Linear out_linear(const Block &b) {
    return BIASED(b, wo, b.m->C, b.m->NH * b.m->HS, 1);
}

static void attn_branch_forward(const Block &b, real *y, const real *u, Residual add) {
    const Model *m = b.m;
    QkvNorms norms = qkv_norms(b);
    QkvPlaces raw = qkv_raw(b, b.a), read = qkv_read(b, b.a);
    Norm latent = NORM(b, latent);
    linear_forward(b.a.qkv, u, qkv_linear(b), {}, b.gpu);
    if (m->kv_rank) {
        qkv_forward(latent_parts(latent_normed(m, b.a), {}, latent_raw(m, b.a), &latent), b.gpu);
        linear_forward(b.a.kvb, b.a.kvcn, latent_linear(b), {}, b.gpu);
    }
    qkv_forward(qkv_parts(read, {}, raw, norms.of, qkv_shape(b)), b.gpu);  // QK norm, RoPE
    // Sampling: new tokens enter the KV cache. A prompt (nothing cached yet) attends to itself.
    if (b.cache.k) kv_cache_fill(b.cache, read.of, attn_shape(b), b.gpu);
    if (b.cache.cached) attention_decode(b.a.c, read.of[0], b.cache, attn_shape(b), b.gpu);
    else attend_forward(b.a.c, b.a.peak, b.a.lse, read.of, attn_shape(b), b.gpu);
    slot_forward(NORM(b, ctx), b.a.cn, b.a.c, b.gpu);
    linear_forward(y, b.a.cn, out_linear(b), add, b.gpu);
}

// SETs the latent and k_rope in d.qkv, from d.kvb and the gradient of k_rope of each head.
static void latent_backward(const Block &b, Heads dk_rope) {
    const Model *m = b.m;
    Norm latent = NORM(b, latent);
    latent_sum(qkv_raw(b, b.d).turned[1], dk_rope, b.s->n, m->NH, m->rope_size, b.gpu);
    linear_backward(b.d.kvcn, b.d.kvb, b.a.kvcn, latent_linear(b), {}, b.gpu);
    qkv_backward(latent_parts(latent_raw(m, b.d), latent_normed(m, b.d), latent_raw(m, b.a),
                              &latent),
                 b.gpu);
}

// du = (gradient through the branch) + add
static void attn_branch_backward(const Block &b, real *du, const real *dy, const real *u,
                                 Residual add) {
    QkvNorms norms = qkv_norms(b);
    QkvPlaces raw = qkv_raw(b, b.a), read = qkv_read(b, b.a);
    QkvPlaces draw = qkv_raw(b, b.d), dread = qkv_read(b, b.d);
    linear_backward(b.d.cn, dy, b.a.cn, out_linear(b), {}, b.gpu);
    slot_backward(NORM(b, ctx), b.d.c, b.d.cn, b.a.c, b.gpu);
    attend_backward(dread.of, b.a.dots, b.d.c, b.a.c, b.a.lse, read.of, attn_shape(b), b.gpu);
    // The gradient of k_rope stays per head until latent_backward adds it up.
    if (b.m->kv_rank) draw.turned[1] = dread.turned[1];
    qkv_backward(qkv_parts(draw, dread, raw, norms.of, qkv_shape(b)), b.gpu);
    if (b.m->kv_rank) latent_backward(b, dread.turned[1]);
    linear_backward(du, b.d.qkv, u, qkv_linear(b), add, b.gpu);
}

// ------------------------------------------------------------------------------------ feed-forward
// y = N_down(W_down act(N_hidden([W_gate | W_up] c u))) + add, of width p.F: a dense MLP, or the
// shared experts. N_hidden is the slot `hidden` (SDD and nGPT), N_down the slot `shared_out` (SDD
// with experts). Without N_hidden, bf16 products apply GELU and its derivative in their epilogue;
// in float the library's tanh may differ from ours in the last bits.

static bool gelu_in_product(const Block &b) {
    return sizeof(real) == 2 && !b.m->swiglu && !b.p.hidden.on;
}

// [W_gate | W_up], or W_up alone.
static Linear up_linear(const Block &b) {
    if (b.m->swiglu) return BIASED(b, wg, 2 * b.p.F, b.m->C, b.p.ffn_c);
    return BIASED(b, wu, b.p.F, b.m->C, b.p.ffn_c);
}

static Linear down_linear(const Block &b) { return BIASED(b, wd, b.m->C, b.p.F, 1); }

static void mlp_forward(const Block &b, real *y, const real *u, Residual add) {
    Norm norm = NORM(b, shared_out);  // N_down
    if (gelu_in_product(b)) linear_gelu_forward(b.a.h, b.a.gu, u, up_linear(b), b.gpu);
    else {
        linear_forward(b.a.gu, u, up_linear(b), {}, b.gpu);
        slot_forward(NORM(b, hidden), b.a.gun, b.a.gu, b.gpu);
        activation_forward(b.a.h, b.a.gun, b.s->n, b.p.F, b.m->swiglu, b.gpu);
    }
    if (norm.site.on) {
        linear_forward(b.a.sy, b.a.h, down_linear(b), {}, b.gpu);
        add_norm_forward({y, nullptr, b.a.sy, add.x, add.scale, &norm, nullptr}, b.gpu);
    } else linear_forward(y, b.a.h, down_linear(b), add, b.gpu);
}

// du = (gradient through the MLP) + add
static void mlp_backward(const Block &b, real *du, real *dy, const real *u, Residual add) {
    Linear down = down_linear(b);
    dy = slot_backward(NORM(b, shared_out), b.d.sy, dy, b.a.sy, b.gpu);
    linear_backward_weight(dy, b.a.h, down, b.gpu);
    if (gelu_in_product(b)) linear_gelu_backward_input(b.d.gu, b.a.gu, dy, down, b.gpu);
    else {
        linear_backward_input(b.d.h, dy, down, {}, b.gpu);
        activation_backward(b.d.gun, b.d.h, b.a.gun, b.s->n, b.p.F, b.m->swiglu, b.gpu);
        slot_backward(NORM(b, hidden), b.d.gu, b.d.gun, b.a.gu, b.gpu);
    }
    linear_backward(du, b.d.gu, u, up_linear(b), add, b.gpu);
}

// ------------------------------------------------------------------------------ mixture of experts
// y = sum of gate_e expert_e(u) over the top-k experts of a token + mlp(u) + add. An expert is a
// feed-forward layer as above (moe.cuh); its slots are `expert_hidden` and `expert_out`. mlp is the
// shared experts, if any.

// --router-losses mean: a loss is the mean over the layers with experts, and the z-loss is divided
// by K too.
static Router block_router(const Block &b) {
    const Moe *o = &b.m->moe;
    const bool mean = o->losses == LOSSES_MEAN;
    double layer = mean ? 1.0 / moe_layers(b.m) : 1;
    double z = mean ? layer / o->K : layer;
    return {b.s->B, b.s->T, o->E, o->K, o->router, (float)b.p.gate_scale,
            (float)(layer * o->balance), (float)(layer * o->sequence), (float)(z * o->z),
            b.a.rz, b.router_bias, b.a.gate, b.a.rlse, b.a.entropy, b.a.load, b.a.share,
            b.a.choice, b.a.place, b.a.start, b.a.source, b.a.tiles, nullptr, nullptr};
}

static Linear router_linear(const Block &b) {
    return LINEAR(b, router, b.m->moe.E, b.m->C, b.p.ffn_c);
}

// Rows of all experts together: each token has one in each of its K experts.
static int64_t assigned(const Block &b) { return (int64_t)b.s->n * b.m->moe.K; }

// Weights of all experts: [2, E, F, C] or [E, F, C] up, which gathers the rows of u from the
// tokens, and [E, C, F] down.
static Experts experts_up(const Block &b) {
    const Model *m = b.m;
    Experts up = {b.w.xu, b.dw.xu, m->moe.E, 1, m->F, m->C, (float)b.p.ffn_c, assigned(b),
                  b.a.start, b.a.tiles, b.a.source, b.dw_of_linears};
    if (m->swiglu) up.w = b.w.xg, up.dw = b.dw.xg, up.parts = 2;
    return up;
}

static Experts experts_down(const Block &b) {
    return {b.w.xd, b.dw.xd, b.m->moe.E, 1, b.m->C, b.m->F, 1, assigned(b), b.a.start,
            b.a.tiles, nullptr, b.dw_of_linears};
}

// A norm over rows sorted by expert, with gains of each expert.
#define EXPERT_NORM(b, slot) \
    Norm{b.p.slot, b.w.slot##_w, nullptr, b.dw.slot##_w, nullptr, nullptr, \
         b.a.slot##_rstd, assigned(b), (float)b.m->eps, b.m->moe.E, b.a.start}

// A layer has experts (LayerMode.moe), or is dense: mlp alone.
static void ffn_branch_forward(const Block &b, real *y, const real *u, Residual add) {
    const Model *m = b.m;
    if (!b.p.moe) return mlp_forward(b, y, u, add);
    Router r = block_router(b);
    linear_forward_wide(b.a.rz, u, router_linear(b), b.gpu);  // router logits [n, E], in float
    router_forward(r, b.gpu);  // top-k and its gates
    // Each expert reads its tokens through `source`, and writes rows sorted by expert.
    experts_forward(b.a.xgu, u, experts_up(b), b.gpu);
    slot_forward(EXPERT_NORM(b, expert_hidden), b.a.xgun, b.a.xgu, b.gpu);
    activation_forward(b.a.xh, b.a.xgun, assigned(b), m->F, m->swiglu, b.gpu);
    experts_forward(b.a.xy, b.a.xh, experts_down(b), b.gpu);
    slot_forward(EXPERT_NORM(b, expert_out), b.a.xyn, b.a.xy, b.gpu);
    if (b.p.F) {  // shared experts: y = mlp(u) + add comes first
        mlp_forward(b, y, u, add);
        add = {y, 1};
    }
    combine(y, b.a.xyn, r, add, m->C, b.gpu);
}

// du = (gradient through the experts, the router and the MLP) + add
static void ffn_branch_backward(const Block &b, real *du, real *dy, const real *u, Residual add) {
    const Model *m = b.m;
    if (!b.p.moe) return mlp_backward(b, du, dy, u, add);
    Router r = block_router(b), ungated = r;
    ungated.gate = nullptr;
    // Through the gates, to the rows of the experts and to the gates themselves.
    combine_backward(b.d.xyn, b.d.gate, dy, b.a.xyn, r, m->C, b.gpu);
    slot_backward(EXPERT_NORM(b, expert_out), b.d.xy, b.d.xyn, b.a.xy, b.gpu);
    experts_backward(b.d.xh, b.d.xy, b.a.xh, experts_down(b), b.gpu);
    activation_backward(b.d.xgun, b.d.xh, b.a.xgun, assigned(b), m->F, m->swiglu, b.gpu);
    slot_backward(EXPERT_NORM(b, expert_hidden), b.d.xgu, b.d.xgun, b.a.xgu, b.gpu);
    // Up: xdx has a row for each assignment; combine adds up those of a token.
    experts_backward(b.a.xdx, b.d.xgu, u, experts_up(b), b.gpu);
    combine(du, b.a.xdx, ungated, add, m->C, b.gpu);
    // The router and the shared experts read u too, so they ADD to du.
    router_backward(b.a.rdz, b.d.gate, r, b.dloss, b.gpu);
    linear_backward(du, b.a.rdz, u, router_linear(b), {du, 1}, b.gpu);
    if (b.p.F) mlp_backward(b, du, dy, u, {du, 1});
}

// --------------------------------------------------------------------------------- the nGPT block
// mid = L2(x + alpha_1 (L2(attention(x)) - x))    x' = L2(mid + alpha_2 (L2(ffn(mid)) - mid))

#define INTERPOLATION(b, sub) \
    Interpolation{b.w.sub##_p, b.dw.sub##_p, NORM(b, sub##_out), NORM(b, sub##_post)}

static void interpolated_forward(const Block &b, real *x) {
    Interpolation attn = INTERPOLATION(b, attn), ffn = INTERPOLATION(b, ffn);
    attn_branch_forward(b, b.a.ay, x, {});
    interpolate_forward(b.a.mid, b.a.ay, x, &attn, b.gpu);
    ffn_branch_forward(b, b.a.fy, b.a.mid, {});
    interpolate_forward(b.a.x, b.a.fy, b.a.mid, &ffn, b.gpu);
}

// The gradient of the skip is SET first; the branch then adds its own to it (d.mid, dx).
static void interpolated_backward(const Block &b, real *dx, real *x) {
    Interpolation attn = INTERPOLATION(b, attn), ffn = INTERPOLATION(b, ffn);
    interpolate_backward({b.d.fy, b.d.mid, b.d.x, b.a.x, b.a.fy, b.a.mid}, &ffn, b.gpu);
    ffn_branch_backward(b, b.d.mid, b.d.fy, b.a.mid, {b.d.mid, 1});
    interpolate_backward({b.d.ay, dx, b.d.mid, b.a.mid, b.a.ay, x}, &attn, b.gpu);
    attn_branch_backward(b, dx, b.d.ay, x, {dx, 1});
}

// -------------------------------------------------------------------------- the block, every mode

// The skip of a sublayer: its own input x, its normed input u, or the block's input.
static const real *skip_of(int skip, const real *own, const real *normed, const real *block) {
    if (skip == OWN) return own;
    return skip == NORMED ? normed : block;
}

typedef void (*Branch)(const Block &b, real *y, const real *u, Residual add);

// y = F(u), then residual + norm: s = a skip + out(y) and z = next(s), in one kernel. If both slots
// are empty, the last kernel of the branch adds the skip.
static void sublayer_forward(const Block &b, Branch branch, real *s, real *z, real *y,
                             const real *u, Residual skip, Norm out, Norm next) {
    if (!out.site.on && !next.site.on) return branch(b, s, u, skip);
    branch(b, y, u, {});
    add_norm_forward({s, z, y, skip.x, skip.scale, &out, &next}, b.gpu);
}

// Without a post norm a.as is a.mid, and a.fs is a.x; a.fi is a.mid if the ffn has no input norm.
static void block_forward(const Block &b, real *x) {
    const SubMode *attn = &b.p.row->attn, *ffn = &b.p.row->ffn;
    if (attn->a == LEARNED) return interpolated_forward(b, x);
    Norm post = NORM(b, attn_post), in = NORM(b, ffn_in);
    real *u = slot_forward(NORM(b, attn_in), b.a.ai, x, b.gpu);
    Residual skip = {skip_of(attn->skip, x, u, x), (float)b.p.attn_a};
    sublayer_forward(b, attn_branch_forward, b.a.as, attn->post ? b.a.mid : b.a.fi, b.a.ay, u,
                     skip, NORM(b, attn_out), attn->post ? post : in);
    if (attn->post) slot_forward(in, b.a.fi, b.a.mid, b.gpu);
    skip = {skip_of(ffn->skip, b.a.mid, b.a.fi, x), (float)b.p.ffn_a};
    sublayer_forward(b, ffn_branch_forward, b.a.fs, b.a.x, b.a.fy, b.a.fi, skip,
                     NORM(b, ffn_out), NORM(b, ffn_post));
}

// The feed-forward half: from d.x to d.mid. Returns the gradient of its sum s, which the skip
// needs.
static const real *ffn_backward(const Block &b) {
    const SubMode *ffn = &b.p.row->ffn;
    float ffn_a = b.p.ffn_a;
    real *ds = slot_backward(NORM(b, ffn_post), b.d.fs, b.d.x, b.a.fs, b.gpu);  // of s
    real *dy = slot_backward(NORM(b, ffn_out), b.d.fy, ds, b.a.fy, b.gpu);      // of the branch
    if (ffn->in) {
        const real *normed = ffn->skip == NORMED ? ds : nullptr;
        const real *own = ffn->skip == OWN ? ds : nullptr;
        ffn_branch_backward(b, b.d.fi, dy, b.a.fi, {normed, ffn_a});
        slot_backward(NORM(b, ffn_in), b.d.mid, b.d.fi, b.a.mid, b.gpu, {own, ffn_a});
    } else {
        const real *own = ffn->skip != BLOCK ? ds : nullptr;
        ffn_branch_backward(b, b.d.mid, dy, b.a.mid, {own, ffn_a});
    }
    return ds;
}

// From d.x, the complete gradient of the block's output, to dx, the gradient of its input.
static void block_backward(const Block &b, real *dx, real *x) {
    const SubMode *attn = &b.p.row->attn;
    if (attn->a == LEARNED) return interpolated_backward(b, dx, x);
    bool block = b.p.row->ffn.skip == BLOCK, normed = attn->in && attn->skip == NORMED;
    float attn_a = b.p.attn_a, ffn_a = b.p.ffn_a;
    Norm in = NORM(b, attn_in), post = NORM(b, attn_post);
    const real *ds_ffn = ffn_backward(b);
    real *ds = b.d.as;  // the gradient of s; without a post norm d.as is d.mid

    // Attention's post norm. Attention's skip carries x, the block's input. If the ffn's carries it
    // too, dx begins as the sum of both gradients; without a post norm, which no row has, as that
    // sum divided by ffn_a, the skip's factor.
    bool both = block && !normed;
    Residual skip = {ds, attn_a};
    if (attn->post) {
        NormBackward f = {ds, both ? dx : nullptr, b.d.mid, b.a.as, nullptr,
                          both ? ds_ffn : nullptr, 0, attn_a, ffn_a};
        norm_backward(&post, f, b.gpu);
        if (both) skip = {dx, 1};
    } else if (both) {
        add_norm_forward({dx, nullptr, ds_ffn, ds, attn_a / ffn_a, &post, nullptr}, b.gpu);
        skip = {dx, ffn_a};
    }
    real *dy = slot_backward(NORM(b, attn_out), b.d.ay, ds, b.a.ay, b.gpu);

    // The branch, then its input norm; whichever is last adds the gradient of the residual.
    if (normed) {
        attn_branch_backward(b, b.d.ai, dy, b.a.ai, {ds, attn_a});
        slot_backward(in, dx, b.d.ai, x, b.gpu, {block ? ds_ffn : nullptr, ffn_a});
    } else if (attn->in) {
        attn_branch_backward(b, b.d.ai, dy, b.a.ai, {});
        slot_backward(in, dx, b.d.ai, x, b.gpu, skip);
    } else attn_branch_backward(b, dx, dy, x, skip);
}

// --recompute cheap: recomputes the activations that cost memory traffic but no product.
static void block_recompute(const Block &b, real *x) {
    slot_forward(NORM(b, attn_in), b.a.ai, x, b.gpu);
    slot_forward(NORM(b, ffn_in), b.a.fi, b.a.mid, b.gpu);
    if (b.p.F)
        activation_forward(b.a.h, b.a.gun, b.s->n, b.p.F, b.m->swiglu, b.gpu);
    if (b.p.moe)
        activation_forward(b.a.xh, b.a.xgun, assigned(b), b.m->F, b.m->swiglu, b.gpu);
}

// Adds this layer's statistics to sums (--norms-every), right after its forward pass, while the
// buffers still hold this layer. x: the block's input.
static void block_stats(const Block &b, LayerSums *sums, const real *x) {
    const SubMode *attn = &b.p.row->attn, *ffn = &b.p.row->ffn;
    const real *attn_skip = skip_of(attn->skip, x, attn->in ? b.a.ai : x, x);
    const real *ffn_skip = skip_of(ffn->skip, b.a.mid, b.a.fi, x);
    const int64_t n = b.s->n;
    sublayer_stats(&sums->squares[ATTN_BRANCH], b.a.as, b.a.ay, attn_skip, b.p.attn_a, b.w.attn_p,
                   b.a.attn_out_rstd, n, b.m->C, b.gpu);
    sublayer_stats(&sums->squares[FFN_BRANCH], b.a.fs, b.a.fy, ffn_skip, b.p.ffn_a, b.w.ffn_p,
                   b.a.ffn_out_rstd, n, b.m->C, b.gpu);
    squares_add(&sums->squares[STREAM], {b.a.x, nullptr, 0, 1}, n, b.m->C, b.gpu);
    peak_add(&sums->logit, b.a.peak, n * b.m->NH, b.gpu);
}
