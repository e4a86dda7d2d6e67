// tensors.h: TABLES 2 and 3, one row per parameter and one per activation. Everything that needs to know which tensors exist reads
// these rows: allocation, the struct fields, initialization, decay and learning-rate groups, checkpoint names, tests, logs.
// Expressions may use m (the Model), p (the Place of the layer, modes.h) and, for activations, s (the Sizes of a step).
#pragma once
#include "modes.h"

enum { PER_MODEL, PER_LAYER };
// How a parameter starts (init.h turns a class and a scheme into a deviation).
enum { ROLE_EMBEDDING, ROLE_HEAD, ROLE_IN, ROLE_VALUE, ROLE_FFN_IN, ROLE_OUT, ROLE_ZERO, ROLE_GAIN };
enum { DECAY_MATRIX, DECAY_EMBEDDING, DECAY_GAIN };          // matrices always decay; --decay-embeddings, --decay-gains decide the others
enum { LR_EMBEDDING, LR_HIDDEN, LR_HEAD, LR_VECTOR, LR_BALANCE, LR_GROUPS };     // groups of the width-scaled learning rate (Everett et al. 2024); BALANCE: no gradient, see below

// PARAM(field, checkpoint name (%d: layer), per, rows, cols, init, decay, lr group, gain, exists-if). Matrices are [out, in], row-major.
// A norm site brings its gain and, for LayerNorm, its bias. Names are those of Llama and Gemma 2 in Hugging Face where these have the tensor.
#define NORM_PARAMS(PARAM, site, name, per) \
PARAM(site##_w, name ".weight", per, 1, p->site.gains, ROLE_GAIN, DECAY_GAIN, LR_VECTOR, p->site.gain, p->site.on && p->site.gains) \
PARAM(site##_b, name ".bias",   per, 1, p->site.gains, ROLE_ZERO, DECAY_GAIN, LR_VECTOR, 0,            p->site.on && p->site.bias)
// Linears that read the same input have their weights side by side, and their biases: on the GPU they are one product.
#define LINEAR_WEIGHT(PARAM, field, name, out, in, init, exists) PARAM(field,     name ".weight", PER_LAYER, out, in, init,      DECAY_MATRIX, LR_HIDDEN, 0, exists)
#define LINEAR_BIAS(PARAM, field, name, out, exists)             PARAM(field##_b, name ".bias",   PER_LAYER, 1,  out, ROLE_ZERO, DECAY_GAIN,   LR_VECTOR, 0, (exists) && m->bias)
#define LAYER_NAME "model.layers.%d."
// The ffn that all tokens of a layer go through: dense, or beside experts.
#define MLP_NAME(part) (p->moe ? LAYER_NAME "mlp.shared_experts." part : LAYER_NAME "mlp." part)
#define MLP_WEIGHT(PARAM, field, part, out, in, init, exists) PARAM(field, MLP_NAME(part ".weight"), PER_LAYER, out, in, init, DECAY_MATRIX, LR_HIDDEN, 0, exists)
#define MLP_BIAS(PARAM, field, part, out, exists)             PARAM(field##_b, MLP_NAME(part ".bias"), PER_LAYER, 1, out, ROLE_ZERO, DECAY_GAIN, LR_VECTOR, 0, (exists) && m->bias)
// All experts of a layer: their matrices, and their gains, one below the other. The selection bias has no gradient: its rate is the step that balances the
// load (train_gpt.c, "the router").
#define EXPERT_WEIGHT(PARAM, field, part, out, in, init, exists) PARAM(field, LAYER_NAME "mlp.experts." part ".weight", PER_LAYER, (int64_t)m->moe.E * (out), in, init, \
      DECAY_MATRIX, LR_HIDDEN, 0, exists)
#define EXPERT_GAIN(PARAM, site, part) PARAM(site##_w, LAYER_NAME "mlp.experts." part ".weight", PER_LAYER, m->moe.E, p->site.gains, ROLE_GAIN, DECAY_GAIN, LR_VECTOR, \
      p->site.gain, p->site.on)

#define PARAM_TABLE(PARAM) \
PARAM(wte, "model.embed_tokens.weight",    PER_MODEL, m->Vp, m->C, ROLE_EMBEDDING, DECAY_EMBEDDING, LR_EMBEDDING, 0, 1) \
PARAM(wpe, "model.embed_positions.weight", PER_MODEL, m->T,  m->C, ROLE_EMBEDDING, DECAY_EMBEDDING, LR_EMBEDDING, 0, !m->rope) \
NORM_PARAMS(PARAM, emb, "model.embed_norm", PER_MODEL) \
NORM_PARAMS(PARAM, attn_in,   LAYER_NAME "input_layernorm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, wq, LAYER_NAME "self_attn.q_proj", m->NH * qk_size(m), m->C, ROLE_IN, 1) \
LINEAR_WEIGHT(PARAM, wk, LAYER_NAME "self_attn.k_proj", m->KV * m->HS, m->C, ROLE_IN, !m->kv_rank) \
LINEAR_WEIGHT(PARAM, wv, LAYER_NAME "self_attn.v_proj", m->KV * m->HS, m->C, ROLE_VALUE, !m->kv_rank) \
LINEAR_WEIGHT(PARAM, wkva, LAYER_NAME "self_attn.kv_a_proj_with_mqa", m->kv_rank + m->rope_size, m->C, ROLE_IN, m->kv_rank) \
LINEAR_BIAS(PARAM, wq, LAYER_NAME "self_attn.q_proj", m->NH * m->HS, 1) \
LINEAR_BIAS(PARAM, wk, LAYER_NAME "self_attn.k_proj", m->KV * m->HS, 1) \
LINEAR_BIAS(PARAM, wv, LAYER_NAME "self_attn.v_proj", m->KV * m->HS, 1) \
NORM_PARAMS(PARAM, latent,    LAYER_NAME "self_attn.kv_a_layernorm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, wkvb, LAYER_NAME "self_attn.kv_b_proj", m->NH * 2 * m->HS, m->kv_rank, ROLE_IN, m->kv_rank) \
NORM_PARAMS(PARAM, q,         LAYER_NAME "self_attn.q_norm", PER_LAYER) \
NORM_PARAMS(PARAM, k,         LAYER_NAME "self_attn.k_norm", PER_LAYER) \
NORM_PARAMS(PARAM, v,         LAYER_NAME "self_attn.v_norm", PER_LAYER) \
NORM_PARAMS(PARAM, ctx,       LAYER_NAME "self_attn.context_norm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, wo, LAYER_NAME "self_attn.o_proj", m->C, m->NH * m->HS, ROLE_OUT, 1) \
LINEAR_BIAS(PARAM, wo, LAYER_NAME "self_attn.o_proj", m->C, 1) \
PARAM(attn_alpha, LAYER_NAME "self_attn.alpha", PER_LAYER, 1, m->C, ROLE_GAIN, DECAY_GAIN, LR_VECTOR, 1 / sqrt((double)m->C), p->row->attn.a == LEARNED) \
NORM_PARAMS(PARAM, attn_out,  LAYER_NAME "post_attention_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, attn_post, LAYER_NAME "attention_sum_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, ffn_in,    LAYER_NAME "pre_feedforward_layernorm", PER_LAYER) \
MLP_WEIGHT(PARAM, wg, "gate_proj", p->F, m->C, ROLE_FFN_IN, p->F && m->swiglu) \
MLP_WEIGHT(PARAM, wu, "up_proj",   p->F, m->C, ROLE_FFN_IN, p->F) \
MLP_BIAS(PARAM, wg, "gate_proj", p->F, p->F && m->swiglu) \
MLP_BIAS(PARAM, wu, "up_proj",   p->F, p->F) \
NORM_PARAMS(PARAM, hidden,    LAYER_NAME "mlp.hidden_norm", PER_LAYER) \
MLP_WEIGHT(PARAM, wd, "down_proj", m->C, p->F, ROLE_OUT, p->F) \
MLP_BIAS(PARAM, wd, "down_proj", m->C, p->F) \
NORM_PARAMS(PARAM, shared_out, LAYER_NAME "mlp.shared_experts.out_norm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, router, LAYER_NAME "mlp.gate", m->moe.E, m->C, ROLE_IN, p->moe) \
PARAM(router_bias, LAYER_NAME "mlp.gate.e_score_correction_bias", PER_LAYER, 1, m->moe.E, ROLE_ZERO, DECAY_GAIN, LR_BALANCE, 0, p->moe && m->moe.bias_rate > 0) \
EXPERT_WEIGHT(PARAM, xg, "gate_proj", m->F, m->C, ROLE_FFN_IN, p->moe && m->swiglu) \
EXPERT_WEIGHT(PARAM, xu, "up_proj",   m->F, m->C, ROLE_FFN_IN, p->moe) \
EXPERT_GAIN(PARAM, expert_hidden, "hidden_norm") \
EXPERT_WEIGHT(PARAM, xd, "down_proj", m->C, m->F, ROLE_OUT, p->moe) \
EXPERT_GAIN(PARAM, expert_out, "out_norm") \
PARAM(ffn_alpha, LAYER_NAME "mlp.alpha", PER_LAYER, 1, m->C, ROLE_GAIN, DECAY_GAIN, LR_VECTOR, 1 / sqrt((double)m->C), p->row->ffn.a == LEARNED) \
NORM_PARAMS(PARAM, ffn_out,   LAYER_NAME "post_feedforward_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, ffn_post,  LAYER_NAME "feedforward_sum_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, fin, "model.norm", PER_MODEL) \
PARAM(wlm, "lm_head.weight", PER_MODEL, m->Vp, m->C, ROLE_HEAD, DECAY_MATRIX, LR_HEAD, 0, !m->tied) \
PARAM(logits_w, "lm_head.s_z", PER_MODEL, m->Vp, 1, ROLE_GAIN, DECAY_GAIN, LR_VECTOR, p->logits.gain, p->logits.on)

// The sizes of a micro-batch and what is kept of it.
//   keep, cheap: layers whose activations are kept, and of those that cost little to compute again (--recompute: off L, L | cheap L, 1 | on 1, 1)
//   threads: OpenMP threads on the CPU, 0 on a GPU;   ratio: how many elements of the storage type one of type `wide` takes (2 in bf16)
typedef struct Sizes { int B, T, n, keep, cheap, threads, ratio; } Sizes;
enum { RECOMPUTE_OFF, RECOMPUTE_ON, RECOMPUTE_CHEAP };      // in the order of --recompute's choices
enum { ATTN_BLOCK = 192 };                                    // rows and columns of attention scores in work at a time, per thread
enum { ROW_TILE = 128 };                                      // rows of an expert that a block of the GPU multiplies at a time

// Tiles for so many rows, at most: each expert may leave its last one short.
static inline int64_t row_tiles(int64_t rows, int E) { return rows / ROW_TILE + E; }

static inline Sizes sizes_make(const Model *m, int B, int T, int recompute, int threads, int ratio) {
    Sizes s = {B, T, B * T, recompute == RECOMPUTE_ON ? 1 : m->L, recompute == RECOMPUTE_OFF ? m->L : 1, threads, ratio};
    return s;
}

// ACT(field, type, copies, rows, cols, gradients, exists-if). Layer l uses copy l % copies, and copy l % gradients of the gradient:
//   type       real: the storage type; wide: statistics, at least float; int32_t
//   copies     the same for every layer: s->keep, s->cheap, or 1
//   gradients  0: none is stored; 1: one buffer for all blocks; 2: two in turn (the stream into a block and out of it);
//   SHARED: the gradient takes over the row's own storage after its last read
enum { SHARED = -1 };
#define NORM_ACTS(ACT, site, copies) \
ACT(site##_mean, wide, copies, s->n, p->site.groups, 0, p->site.on && p->site.bias) \
ACT(site##_rstd, wide, copies, s->n, p->site.groups, 0, p->site.on && p->site.on != SCALE)

// On a GPU: a row of the product that q, k, v read u by, [q | k | v] or [q | latent | kr]; and of those of q, k, v that are kept apart from it.
static inline int qkv_width(const Model *m) { return m->kv_rank ? m->NH * qk_size(m) + m->kv_rank + m->rope_size : (m->NH + 2 * m->KV) * m->HS; }
static inline int qkvn_width(const Model *m, const Place *p) {
    return m->kv_rank ? ((p->q.on != 0) + 1) * m->NH * qk_size(m) + (p->v.on ? m->NH * m->HS : 0) : qkv_width(m);
}
// Sampling (Trainer.extend) keeps of each token of its text, in each layer, k and v of all kv heads as attention reads them: after norms and RoPE. So it is with latent
// attention too, although the latent and kr, kv_rank + rope_size values a token, would do: all heads of all tokens before would be made of them again for every new token,
// or W_kvb multiplied into W_q and W_o, which norms of k and v, that stand in between, do not allow.
static inline int kv_cache_width(const Model *m) { return m->KV * (qk_size(m) + m->HS); }
#define MLP_WIDTH (!m->moe.E ? m->F : m->moe.dense && m->moe.dense_F > m->moe.shared_F ? m->moe.dense_F : m->moe.shared_F)      // the widest of all layers
#define ASSIGNED ((int64_t)s->n * m->moe.K)                                                                                     // a row for each expert of each token
#define ACT_TABLE(ACT) \
/*  field    type  copies    rows   cols          gradients  exists-if        what it holds */ \
ACT(raw,     real, 1,        s->n,  m->C,          1,         p->emb.on)       /* embedding before its norm */ \
ACT(e,       real, 1,        s->n,  m->C,          1,         1)               /* stream into block 0 */ \
ACT(ai,      real, s->cheap, s->n,  m->C,          1,         p->attn_in.on)   /* u of attention: normed input */ \
ACT(qkv,     real, s->keep,  s->n,  qkv_width(m),  1,         !s->threads)     /* GPU: q, k, v */ \
ACT(qkvn,    real, s->keep,  s->n,  qkvn_width(m, p), 1,      !s->threads && (m->kv_rank || p->q.on || p->k.on || p->v.on))  /* after their norms; k put together */ \
ACT(kvc,     real, s->keep,  s->n,  m->kv_rank,    1,         s->threads && m->kv_rank)      /* latent attention: the latent (GPU: in qkv), */ \
ACT(kvcn,    real, s->keep,  s->n,  m->kv_rank,    1,         m->kv_rank)      /* after its norm, */ \
ACT(kr,      real, 1,        s->n,  m->rope_size,  1,         s->threads && m->kv_rank)      /* the rotary part of k that heads share (GPU: in qkv), */ \
ACT(kvb,     real, s->threads ? 1 : s->keep, s->n, m->NH * 2 * m->HS, 1, m->kv_rank)         /* and [k without it | v] of each head */ \
ACT(q,       real, s->keep,  s->n,  m->NH * qk_size(m), 1,    s->threads)      /* CPU: one by one */ \
ACT(k,       real, s->keep,  s->n,  m->KV * qk_size(m), 1,    s->threads) \
ACT(v,       real, s->keep,  s->n,  m->KV * m->HS, 1,         s->threads) \
ACT(qn,      real, s->keep,  s->n,  m->NH * qk_size(m), 1,    s->threads && p->q.on) \
ACT(kn,      real, s->keep,  s->n,  m->KV * qk_size(m), 1,    s->threads && p->k.on) \
ACT(vn,      real, s->keep,  s->n,  m->KV * m->HS, 1,         s->threads && p->v.on) \
ACT(scores,  real, 1, s->threads, 2 * ATTN_BLOCK * ATTN_BLOCK, 0, s->threads)  /* a block of QK^T, and of its gradient */ \
ACT(lse,     wide, s->keep,  s->n,  m->NH,         0,         1)               /* log-sum-exp of each row of scores */ \
ACT(peak,    wide, 1,        s->n,  m->NH,         0,         1)               /* largest of each row of scores; read by nothing but block_watch */ \
ACT(dots,    wide, 1,        s->n,  m->NH,         0,         !s->threads)     /* context times its gradient, summed over a head */ \
ACT(c,       real, s->keep,  s->n,  m->NH * m->HS, 1,         1)               /* context: the heads' outputs */ \
ACT(cn,      real, s->keep,  s->n,  m->NH * m->HS, 1,         p->ctx.on) \
ACT(ay,      real, p->out_anywhere ? s->keep : 1, s->n, m->C, 1, 1)            /* y of attention */ \
ACT(ao,      real, 1,        s->n,  m->C,          m->mode->unit, s->threads && p->attn_out.on)  /* y after its norm */ \
ACT(as,      real, s->keep,  s->n,  m->C,          1,         p->attn_post.on && (s->threads || p->attn_post.on != L2))  /* a * skip + y */ \
ACT(mid,     real, s->keep,  s->n,  m->C,          1,         1)               /* stream between the sublayers */ \
ACT(fi,      real, s->cheap, s->n,  m->C,          1,         p->ffn_in.on)    /* u of the ffn */ \
ACT(gu,      real, s->keep,  s->n,  MLP_WIDTH * (m->swiglu ? 2 : 1), 1, p->F)  /* [gate | up], or up alone */ \
ACT(gun,     real, s->keep,  s->n,  MLP_WIDTH * (m->swiglu ? 2 : 1), 1, p->hidden.on) \
ACT(h,       real, s->cheap, s->n,  MLP_WIDTH,     1,         p->F)            /* after the activation */ \
ACT(sy,      real, s->keep,  s->n,  m->C,          1,         p->shared_out.on) /* y of the shared experts before its norm */ \
ACT(rz,      wide, s->keep,  s->n,  m->moe.E,      s->threads != 0, p->moe)    /* the router's logits, */ \
ACT(rs,      real, s->cheap, s->n,  m->moe.E,      0,         s->threads && p->moe)   /* CPU: scores, */ \
ACT(rdz,     real, 1,        s->n,  m->moe.E,      0,         !s->threads && p->moe)  /* GPU: gradient of the logits, as products read it, */ \
ACT(rlse,    wide, s->keep,  s->n,  1,             0,         p->moe)          /* log-sum-exp, */ \
ACT(gate,    wide, s->keep,  s->n,  m->moe.K,      1,         p->moe)          /* weight of each expert of a token, */ \
ACT(load,    wide, s->keep,  s->B + 1, m->moe.E,   0,         p->moe)          /* tokens of each expert in each sequence, and in all */ \
ACT(share,   wide, s->keep,  s->B,  m->moe.E,      0,         p->moe)          /* mean probability of each expert in each sequence */ \
ACT(loads,   wide, m->L,     1,     m->moe.E,      0,         p->moe)          /* tokens of each expert since gradients were zeroed */ \
ACT(choice,  int32_t, s->keep, s->n, m->moe.K,     0,         p->moe)          /* experts of a token */ \
ACT(place,   int32_t, s->keep, s->n, m->moe.K,     0,         p->moe)          /* and its rows in xx .. xyn, where rows of an expert are neighbours */ \
ACT(start,   int32_t, s->keep, 1,   m->moe.E + 1,  0,         p->moe)          /* first row of each expert */ \
ACT(source,  int32_t, s->keep, ASSIGNED, 1,        0,         !s->threads && p->moe)  /* GPU: the token of each row, */ \
ACT(tiles,   int32_t, s->keep, row_tiles(ASSIGNED, m->moe.E), 2, 0,        !s->threads && p->moe)  /* and of each tile of rows the expert and the first row */ \
ACT(xx,      real, s->cheap, ASSIGNED, m->C,       1,         s->threads && p->moe)   /* CPU: inputs of experts, as u; */ \
ACT(xdx,     real, 1,        ASSIGNED, m->C,       0,         !s->threads && p->moe)  /* GPU: their gradient alone, as products read u itself; */ \
ACT(xgu,     real, s->keep,  ASSIGNED, m->F * (m->swiglu ? 2 : 1), 1, p->moe)  /* as gu, gun, h, y before and after its norm: of experts */ \
ACT(xgun,    real, s->keep,  ASSIGNED, m->F * (m->swiglu ? 2 : 1), 1, p->expert_hidden.on) \
ACT(xh,      real, s->cheap, ASSIGNED, m->F,       1,         p->moe) \
ACT(xy,      real, s->keep,  ASSIGNED, m->C,       1,         p->moe) \
ACT(xyn,     real, s->keep,  ASSIGNED, m->C,       1,         p->expert_out.on) \
ACT(expert_hidden_rstd, wide, s->keep, ASSIGNED, p->expert_hidden.groups, 0, p->expert_hidden.on == 1) \
ACT(expert_out_rstd, wide, s->keep, ASSIGNED, 1,   0,         p->expert_out.on) \
ACT(fy,      real, p->out_anywhere ? s->keep : 1, s->n, m->C, 1, 1)            /* y of the ffn */ \
ACT(fo,      real, 1,        s->n,  m->C,          m->mode->unit, s->threads && p->ffn_out.on) \
ACT(fs,      real, s->keep,  s->n,  m->C,          1,         p->ffn_post.on && (s->threads || p->ffn_post.on != L2)) \
ACT(x,       real, m->L,     s->n,  m->C,          2,         1)              /* stream out of the block */ \
ACT(fx,      real, 1,        s->n,  m->C,          1,         p->fin.on)       /* stream after the final norm */ \
ACT(z,       real, 1,        s->n,  m->Vp,         1,         s->threads && p->logits.on)  /* logits before their gain; GPU: in logits */ \
ACT(logits,  real, 1,        s->n,  m->Vp,         SHARED,    1) \
ACT(logsum,  wide, 1,        s->n,  1,             0,         1)               /* log-sum-exp of the logits */ \
ACT(losses,  wide, 1,        s->n,  1,             0,         1)               /* cross-entropy of each token */ \
NORM_ACTS(ACT, emb, 1)             NORM_ACTS(ACT, fin, 1) \
NORM_ACTS(ACT, attn_in, s->keep)   NORM_ACTS(ACT, q, s->keep)         NORM_ACTS(ACT, k, s->keep) \
NORM_ACTS(ACT, v, s->keep)         NORM_ACTS(ACT, ctx, s->keep)       NORM_ACTS(ACT, attn_out, s->keep) \
NORM_ACTS(ACT, attn_post, s->keep) NORM_ACTS(ACT, ffn_in, s->keep)    NORM_ACTS(ACT, hidden, s->keep) \
NORM_ACTS(ACT, ffn_out, s->keep)   NORM_ACTS(ACT, ffn_post, s->keep)     NORM_ACTS(ACT, latent, s->keep) \
NORM_ACTS(ACT, shared_out, s->keep)
