// tensors.h: TABLES 2 and 3, one row per parameter and one per activation. Everything that needs a
// list of tensors reads these rows: memory, struct fields, initialization, weight decay, learning
// rates, checkpoints, tests, logs. A row's sizes and its condition are expressions in
//   m                     the Model
//   p                     the LayerMode of the layer: what the placement decides (modes.h)
//   C, T, F, NH, KV, ..   sizes (train_gpt.c's head; layout_make in memory.h defines them)
//   s, B, n, keep, ..     activations only: the micro-batch, Sizes below (act_rows in memory.h)
#pragma once
#include "modes.h"

// A parameter's role decides its initial values (init.h), its weight decay and its learning rate.
enum {
    ROLE_EMBEDDING,                           // wte, wpe
    ROLE_HEAD,                                // an untied LM head
    ROLE_ROUTER,                              // of experts
    ROLE_IN,                                  // matrices that read u or a latent
    ROLE_VALUE,                               // W_v; DeepNorm scales it and the next two
    ROLE_FFN_IN,                              // gate and up
    ROLE_OUT,                                 // output projections, which write to the stream
    ROLE_ZERO,                                // biases; from here on vectors
    ROLE_GAIN,                                // gains of norms, nGPT's p
    ROLE_DYT,                                 // DyT's alphas
    ROLE_BALANCE                              // the selection bias, which has no gradient
};
enum { DECAY_MATRIX, DECAY_EMBEDDING, DECAY_GAIN, DECAY_NONE, DECAY_GROUPS };  // --decay-*
// Groups of tensors with a learning rate of their own, which may depend on the width (Everett et
// al. 2024). LR_BALANCE is the step of the selection bias.
enum { LR_EMBEDDING, LR_HIDDEN, LR_HEAD, LR_VECTOR, LR_BALANCE, LR_GROUPS };
// muon: 1: --optimizer muon updates these tensors with Muon, 0: with AdamW. Jordan et al. 2024 take
// the matrices of blocks. Routers are left to AdamW, as the head is: both choose among classes.
static const struct { int decay, lr, muon; } ROLES[] = {
    {DECAY_EMBEDDING, LR_EMBEDDING, 0},       // ROLE_EMBEDDING, and so on in their order
    {DECAY_MATRIX,    LR_HEAD,      0},
    {DECAY_MATRIX,    LR_HIDDEN,    0},
    {DECAY_MATRIX,    LR_HIDDEN,    1},
    {DECAY_MATRIX,    LR_HIDDEN,    1},
    {DECAY_MATRIX,    LR_HIDDEN,    1},
    {DECAY_MATRIX,    LR_HIDDEN,    1},
    {DECAY_GAIN,      LR_VECTOR,    0},
    {DECAY_GAIN,      LR_VECTOR,    0},
    {DECAY_NONE,      LR_VECTOR,    0},       // ROLE_DYT
    {DECAY_GAIN,      LR_BALANCE,   0},       // ROLE_BALANCE
};

// PARAM(field, name, rows, cols, role, initial gain, exists-if). Matrices are [out, in], row-major.
//   field   in the structs Params and Grads
//   name    in checkpoints. %d is the layer; a name without it is one tensor of the model. Llama's
//           and Gemma 2's names in Hugging Face where these have the tensor.
#define LAYER_NAME "model.layers.%d."
#define ATTN_NAME(part) LAYER_NAME "self_attn." part
#define EXPERT_NAME(part) LAYER_NAME "mlp.experts." part  // of all experts, stacked
// The ffn that all tokens of a layer go through: a dense one, or shared experts.
#define MLP_NAME(part) (p->moe ? LAYER_NAME "mlp.shared_experts." part : LAYER_NAME "mlp." part)
// A norm site brings its gain; for LayerNorm and DyT its bias; for DyT its alpha.
#define NORM_PARAMS(PARAM, site, name) \
PARAM(site##_w, name ".weight", 1, p->site.gains, ROLE_GAIN, p->site.gain, \
      p->site.on && p->site.gains) \
PARAM(site##_b, name ".bias", 1, p->site.gains, ROLE_ZERO, 0, p->site.on && p->site.bias) \
PARAM(site##_alpha, name ".alpha", 1, 1, ROLE_DYT, m->dyt_alpha, p->site.on == DYT)
#define EXPERT_GAIN(PARAM, site, name) \
PARAM(site##_w, name, E, p->site.gains, ROLE_GAIN, p->site.gain, p->site.on)
// nGPT: the parameter p of alpha = 0.05 sqrt(C) |p|. Checkpoints name it alpha.
#define ALPHA(PARAM, sub, name) \
PARAM(sub##_p, name, 1, C, ROLE_GAIN, 1 / sqrt((double)C), p->row->sub.a == LEARNED)

// Weights of linears that read the same input are neighbours in memory, and so are their biases: on
// the GPU they are one product.
#define PARAM_TABLE(PARAM) \
PARAM(wte,    "model.embed_tokens.weight",    Vp, C, ROLE_EMBEDDING, 0, 1) \
PARAM(wpe,    "model.embed_positions.weight", T, C, ROLE_EMBEDDING, 0, !m->rope) \
NORM_PARAMS(PARAM, emb, "model.embed_norm") \
NORM_PARAMS(PARAM, attn_in, LAYER_NAME "input_layernorm") \
PARAM(wq,     ATTN_NAME("q_proj.weight"), NH * QK, C, ROLE_IN, 0, 1) \
PARAM(wk,     ATTN_NAME("k_proj.weight"), KV * HS, C, ROLE_IN, 0, !m->kv_rank) \
PARAM(wv,     ATTN_NAME("v_proj.weight"), KV * HS, C, ROLE_VALUE, 0, !m->kv_rank) \
PARAM(wkva,   ATTN_NAME("kv_a_proj_with_mqa.weight"), m->kv_rank + m->rope_size, C, ROLE_IN, 0, \
      m->kv_rank) \
PARAM(wq_b,   ATTN_NAME("q_proj.bias"), 1, NH * HS, ROLE_ZERO, 0, m->bias) \
PARAM(wk_b,   ATTN_NAME("k_proj.bias"), 1, KV * HS, ROLE_ZERO, 0, m->bias) \
PARAM(wv_b,   ATTN_NAME("v_proj.bias"), 1, KV * HS, ROLE_ZERO, 0, m->bias) \
NORM_PARAMS(PARAM, latent, ATTN_NAME("kv_a_layernorm")) \
PARAM(wkvb,   ATTN_NAME("kv_b_proj.weight"), NH * 2 * HS, m->kv_rank, ROLE_IN, 0, m->kv_rank) \
NORM_PARAMS(PARAM, q, ATTN_NAME("q_norm")) \
NORM_PARAMS(PARAM, k, ATTN_NAME("k_norm")) \
NORM_PARAMS(PARAM, v, ATTN_NAME("v_norm")) \
NORM_PARAMS(PARAM, ctx, ATTN_NAME("context_norm")) \
PARAM(wo,     ATTN_NAME("o_proj.weight"), C, NH * HS, ROLE_OUT, 0, 1) \
PARAM(wo_b,   ATTN_NAME("o_proj.bias"), 1, C, ROLE_ZERO, 0, m->bias == BIAS_ON) \
ALPHA(PARAM, attn, ATTN_NAME("alpha")) \
NORM_PARAMS(PARAM, attn_out, LAYER_NAME "post_attention_layernorm") \
NORM_PARAMS(PARAM, attn_post, LAYER_NAME "attention_sum_layernorm") \
NORM_PARAMS(PARAM, ffn_in, LAYER_NAME "pre_feedforward_layernorm") \
PARAM(wg,     MLP_NAME("gate_proj.weight"), p->F, C, ROLE_FFN_IN, 0, p->F && m->swiglu) \
PARAM(wu,     MLP_NAME("up_proj.weight"), p->F, C, ROLE_FFN_IN, 0, p->F) \
PARAM(wg_b,   MLP_NAME("gate_proj.bias"), 1, p->F, ROLE_ZERO, 0, \
      p->F && m->swiglu && m->bias == BIAS_ON) \
PARAM(wu_b,   MLP_NAME("up_proj.bias"), 1, p->F, ROLE_ZERO, 0, p->F && m->bias == BIAS_ON) \
NORM_PARAMS(PARAM, hidden, LAYER_NAME "mlp.hidden_norm") \
PARAM(wd,     MLP_NAME("down_proj.weight"), C, p->F, ROLE_OUT, 0, p->F) \
PARAM(wd_b,   MLP_NAME("down_proj.bias"), 1, C, ROLE_ZERO, 0, p->F && m->bias == BIAS_ON) \
NORM_PARAMS(PARAM, shared_out, LAYER_NAME "mlp.shared_experts.out_norm") \
PARAM(router, LAYER_NAME "mlp.gate.weight", E, C, ROLE_ROUTER, 0, p->moe) \
PARAM(router_bias, LAYER_NAME "mlp.gate.e_score_correction_bias", 1, E, ROLE_BALANCE, 0, \
      p->moe && m->moe.bias_rate > 0) \
PARAM(xg,     EXPERT_NAME("gate_proj.weight"), (int64_t)E * F, C, ROLE_FFN_IN, 0, \
      p->moe && m->swiglu) \
PARAM(xu,     EXPERT_NAME("up_proj.weight"), (int64_t)E * F, C, ROLE_FFN_IN, 0, p->moe) \
EXPERT_GAIN(PARAM, expert_hidden, EXPERT_NAME("hidden_norm.weight")) \
PARAM(xd,     EXPERT_NAME("down_proj.weight"), (int64_t)E * C, F, ROLE_OUT, 0, p->moe) \
EXPERT_GAIN(PARAM, expert_out, EXPERT_NAME("out_norm.weight")) \
ALPHA(PARAM, ffn, LAYER_NAME "mlp.alpha") \
NORM_PARAMS(PARAM, ffn_out, LAYER_NAME "post_feedforward_layernorm") \
NORM_PARAMS(PARAM, ffn_post, LAYER_NAME "feedforward_sum_layernorm") \
NORM_PARAMS(PARAM, fin, "model.norm") \
PARAM(wlm,    "lm_head.weight", Vp, C, ROLE_HEAD, 0, !m->tied) \
PARAM(logits_w, "lm_head.s_z",  Vp, 1, ROLE_GAIN, p->logits.gain, p->logits.on)

// The sizes of a micro-batch, and how much of it is kept for backward.
typedef struct {
    int B, T, n;                              // n = B * T tokens
    int keep, cheap;                          // copies of an activation, L or 1 for all layers:
                                              // `cheap` if it is cheap to recompute, else `keep`.
                                              // By --recompute keep, cheap are: off L, L | cheap
                                              // L, 1 | on 1, 1
    int threads;                              // OpenMP threads on the CPU, 0 on a GPU
    int ratio;                                // elements of the storage type in one `wide`; bf16: 2
} Sizes;
enum { RECOMPUTE_OFF, RECOMPUTE_ON, RECOMPUTE_CHEAP };    // in the order of --recompute's choices
enum { ATTN_BLOCK = 192 };                    // rows and columns of a block of attention scores
enum { ROW_TILE = 128 };                      // rows of an expert in one tile of a GPU's product

// The largest number of tiles for this many rows: the last tile of each expert may be partly empty.
static inline int64_t row_tiles(int64_t rows, int E) { return rows / ROW_TILE + E; }

// On a GPU one product computes a row [q | k | v] from a row of u, or with latent attention
// [q | latent | kr]. This is the width of that row.
static inline int qkv_width(const Model *m) {
    if (m->kv_rank) return m->NH * qk_size(m) + m->kv_rank + m->rope_size;
    return (m->NH + 2 * m->KV) * m->HS;
}

// The width of a row of qkvn, where attention reads the q, k and v that have a norm. Latent
// attention always has its k there, and leaves out a q or v without a norm.
static inline int qkvn_width(const Model *m, const LayerMode *p) {
    if (!m->kv_rank) return qkv_width(m);
    return (p->q.on ? 2 : 1) * m->NH * qk_size(m) + (p->v.on ? m->NH * m->HS : 0);
}

// Values of the KV cache for one token and layer: k and v of all kv heads, after norms and RoPE.
// Latent attention caches the same. Caching the latent and kr instead would take only kv_rank +
// rope_size values, but every new token would then compute k and v of all tokens again. (Absorbing
// W_kvb into W_q and W_o avoids that, but norms of k and v do not allow it.)
static inline int kv_cache_width(const Model *m) { return m->KV * (qk_size(m) + m->HS); }

// The largest width, over all layers, of the ffn that all tokens of a layer go through.
static inline int mlp_width(const Model *m) {
    if (!m->moe.E) return m->F;
    int dense = m->moe.dense && m->moe.dense_F > m->moe.shared_F;
    return dense ? m->moe.dense_F : m->moe.shared_F;
}

// ACT(field, type, copies, rows, cols, gradients, exists-if)
//   field      in the struct Acts, for the activation and for its gradient
//   type       real: the storage type; wide: statistics, at least float; int32_t
//   copies     L: one for each layer; 1: one that all layers share; or keep, cheap (Sizes), which
//              are either. Layer l uses copy l % copies.
//   gradients  0: none is stored; 1: one buffer for all layers; 2: two in turn, for the stream into
//              a block and out of it; ALIASED: the gradient overwrites the activation
// Expressions may also use cpu, gpu, and `up`: 2 for [gate | up], 1 for up alone.
enum { ALIASED = -1 };
#define NORM_ACTS(ACT, site, copies) \
ACT(site##_mean, wide, copies, n, p->site.groups, 0, p->site.on == 1 && p->site.bias) \
ACT(site##_rstd, wide, copies, n, p->site.groups, 0, p->site.on == 1 || p->site.on == L2)
#define ASSIGNED ((int64_t)n * K)             // a row for each expert of each token

// The rows, in the order of a forward pass. First letters: a attention, f ffn, x experts, r router;
// a name that ends in n is the value after its norm.
//   raw, e             embedding before its norm; residual stream into block 0
//   ai                 u of attention: its normed input
//   qkv, qkvn          GPU: q, k, v in one matrix, before and after their norms
//   kvc, kvcn          latent attention: the latent before (GPU: in qkv) and after its norm
//   kr, kvb            the rotary part of k, shared by heads (GPU: in qkv); [k without kr | v]
//   q, k, v, qn ..     CPU: one by one, before and after their norms
//   scores             CPU: a block of QK^T and of its gradient, per thread
//   lse, peak          log-sum-exp and maximum of each row of scores. lse is natural on the
//                      CPU, in base 2 on the GPU. Only statistics read peak.
//   dots               GPU: D = rowsum(dC * C), the context times its gradient, summed over a head
//   c, cn              context: the heads' outputs, before and after its norm
//   ay, ao, as         attention's y; yn, after the out norm; s = a skip + b yn
//   mid                stream between the sublayers
//   fi                 u of the ffn
//   gu, gun, h         [gate | up] or up alone, before and after its norm; after the activation
//   sy                 y of the shared experts before its norm
//   rz, rs, rlse       the router's logits, scores (CPU) and log-sum-exp (natural)
//   rdz                GPU: gradient of rz, in the type that products read
//   entropy            GPU: of the router's probabilities for each token
//   gate, choice       weights and numbers of each token's experts (top-k)
//   load, share        tokens and mean probability of each expert in each sequence; load's last row
//                      is of all sequences
//   loads              tokens of each expert since zero_grads
//   place, start       row of each (token, expert) in xx .. xyn, where an expert's rows are
//                      neighbours; first row of each expert
//   source, tiles      GPU: token of each such row; expert and first row of each tile of rows
//   xx, xdx            inputs of experts (CPU), and their gradient (GPU, where products read u)
//   xgu, xgun, xh      as gu, gun, h, of experts
//   xy, xyn            y of experts before and after its norm
//   fy, fo, fs         the ffn's y; yn, after the out norm; s = a skip + b yn
//   x                  stream out of the block
//   fx                 stream after the final norm
//   z, logits          logits before (CPU) and after their gain, which the GPU applies in place
//   logsum, losses     log-sum-exp of the logits (natural) and cross-entropy of each token
//   *_mean, *_rstd     statistics of each norm site. Layers that share a copy need equal room, and
//                      SDD's dense layers may have one group in `hidden` where the others have two.
#define ACT_TABLE(ACT) \
ACT(raw,    real, 1,     n, C,           1, p->emb.on) \
ACT(e,      real, 1,     n, C,           1, 1) \
ACT(ai,     real, cheap, n, C,           1, p->attn_in.on) \
ACT(qkv,    real, keep,  n, qkv_width(m), 1, gpu) \
ACT(qkvn,   real, keep,  n, qkvn_width(m, p), 1, \
            gpu && (m->kv_rank || p->q.on || p->k.on || p->v.on)) \
ACT(kvc,    real, keep,  n, m->kv_rank,  1, cpu && m->kv_rank) \
ACT(kvcn,   real, keep,  n, m->kv_rank,  1, m->kv_rank) \
ACT(kr,     real, 1,     n, m->rope_size, 1, cpu && m->kv_rank) \
ACT(kvb,    real, cpu ? 1 : keep, n, NH * 2 * HS, 1, m->kv_rank) \
ACT(q,      real, keep,  n, NH * QK,     1, cpu) \
ACT(k,      real, keep,  n, KV * QK,     1, cpu) \
ACT(v,      real, keep,  n, KV * HS,     1, cpu) \
ACT(qn,     real, keep,  n, NH * QK,     1, cpu && p->q.on) \
ACT(kn,     real, keep,  n, KV * QK,     1, cpu && p->k.on) \
ACT(vn,     real, keep,  n, KV * HS,     1, cpu && p->v.on) \
ACT(scores, real, 1, s->threads, 2 * ATTN_BLOCK * ATTN_BLOCK, 0, cpu) \
ACT(lse,    wide, keep,  n, NH,          0, 1) \
ACT(peak,   wide, 1,     n, NH,          0, 1) \
ACT(dots,   wide, 1,     n, NH,          0, gpu) \
ACT(c,      real, keep,  n, NH * HS,     1, 1) \
ACT(cn,     real, keep,  n, NH * HS,     1, p->ctx.on) \
ACT(ay,     real, p->out_anywhere ? keep : 1, n, C, 1, 1) \
ACT(ao,     real, 1,     n, C, m->mode->unit, cpu && p->attn_out.on) \
ACT(as,     real, keep,  n, C,           1, \
            p->attn_post.on && (cpu || p->attn_post.on != L2)) \
ACT(mid,    real, keep,  n, C,           1, 1) \
ACT(fi,     real, cheap, n, C,           1, p->ffn_in.on) \
ACT(gu,     real, keep,  n, up * mlp_width(m), 1, p->F) \
ACT(gun,    real, keep,  n, up * mlp_width(m), 1, p->hidden.on) \
ACT(h,      real, cheap, n, mlp_width(m), 1, p->F) \
ACT(sy,     real, keep,  n, C,           1, p->shared_out.on) \
ACT(rz,     wide, keep,  n, E,           cpu, p->moe) \
ACT(rs,     real, keep,  n, E,           0, cpu && p->moe) \
ACT(rdz,    real, 1,     n, E,           0, gpu && p->moe) \
ACT(rlse,   wide, keep,  n, 1,           0, p->moe) \
ACT(entropy, wide, 1,    n, 1,           0, gpu && p->moe) \
ACT(gate,   wide, keep,  n, K,           1, p->moe) \
ACT(load,   wide, keep,  B + 1, E,       0, p->moe) \
ACT(share,  wide, keep,  B, E,           0, p->moe) \
ACT(loads,  wide, L,     1, E,           0, p->moe) \
ACT(choice, int32_t, keep, n, K,         0, p->moe) \
ACT(place,  int32_t, keep, n, K,         0, p->moe) \
ACT(start,  int32_t, keep, 1, E + 1,     0, p->moe) \
ACT(source, int32_t, keep, ASSIGNED, 1,  0, gpu && p->moe) \
ACT(tiles,  int32_t, keep, row_tiles(ASSIGNED, E), 2, 0, gpu && p->moe) \
ACT(xx,     real, cheap, ASSIGNED, C,    1, cpu && p->moe) \
ACT(xdx,    real, 1,     ASSIGNED, C,    0, gpu && p->moe) \
ACT(xgu,    real, keep,  ASSIGNED, up * F, 1, p->moe) \
ACT(xgun,   real, keep,  ASSIGNED, up * F, 1, p->expert_hidden.on) \
ACT(xh,     real, cheap, ASSIGNED, F,    1, p->moe) \
ACT(xy,     real, keep,  ASSIGNED, C,    1, p->moe) \
ACT(xyn,    real, keep,  ASSIGNED, C,    1, p->expert_out.on) \
ACT(expert_hidden_rstd, wide, keep, ASSIGNED, p->expert_hidden.groups, 0, \
            p->expert_hidden.on == 1) \
ACT(expert_out_rstd, wide, keep, ASSIGNED, 1, 0, p->expert_out.on) \
ACT(fy,     real, p->out_anywhere ? keep : 1, n, C, 1, 1) \
ACT(fo,     real, 1,     n, C, m->mode->unit, cpu && p->ffn_out.on) \
ACT(fs,     real, keep,  n, C,           1, \
            p->ffn_post.on && (cpu || p->ffn_post.on != L2)) \
ACT(x,      real, L,     n, C,           2, 1) \
ACT(fx,     real, 1,     n, C,           1, p->fin.on) \
ACT(z,      real, 1,     n, Vp,          1, cpu && p->logits.on) \
ACT(logits, real, 1,     n, Vp,          ALIASED, 1) \
ACT(logsum, wide, 1,     n, 1,           0, 1) \
ACT(losses, wide, 1,     n, 1,           0, 1) \
NORM_ACTS(ACT, emb, 1) \
NORM_ACTS(ACT, fin, 1) \
NORM_ACTS(ACT, attn_in, keep) \
NORM_ACTS(ACT, q, keep) \
NORM_ACTS(ACT, k, keep) \
NORM_ACTS(ACT, v, keep) \
NORM_ACTS(ACT, ctx, keep) \
NORM_ACTS(ACT, attn_out, keep) \
NORM_ACTS(ACT, attn_post, keep) \
NORM_ACTS(ACT, ffn_in, keep) \
ACT(hidden_mean, wide, keep, n, up,      0, 0) \
ACT(hidden_rstd, wide, keep, n, up,      0, p->hidden.on == 1) \
NORM_ACTS(ACT, ffn_out, keep) \
NORM_ACTS(ACT, ffn_post, keep) \
NORM_ACTS(ACT, latent, keep) \
NORM_ACTS(ACT, shared_out, keep)
