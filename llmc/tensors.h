// tensors.h: TABLES 2 and 3, one row per parameter and one per activation. Everything that needs to know which tensors exist reads
// these rows: allocation, the struct fields, initialization, decay and learning-rate groups, checkpoint names, tests, logs.
// Expressions may use m (the Model), p (the Place of the layer, modes.h) and, for activations, s (the Sizes of a step).
#pragma once
#include "modes.h"

enum { PER_MODEL, PER_LAYER };
// How a parameter starts (init.h turns a class and a scheme into a deviation).
enum { ROLE_EMBEDDING, ROLE_HEAD, ROLE_IN, ROLE_VALUE, ROLE_FFN_IN, ROLE_OUT, ROLE_ZERO, ROLE_GAIN };
enum { DECAY_MATRIX, DECAY_EMBEDDING, DECAY_GAIN };          // matrices always decay; --decay-embeddings, --decay-gains decide the others
enum { LR_EMBEDDING, LR_HIDDEN, LR_HEAD, LR_VECTOR };        // groups of the width-scaled learning rate (SPEC: Everett et al. 2024)

// PARAM(field, checkpoint name (%d: layer), per, rows, cols, init, decay, lr group, gain, exists-if). Matrices are [out, in], row-major.
// A norm site brings its gain and, for LayerNorm, its bias. Names are those of Llama and Gemma 2 in Hugging Face where these have the tensor.
#define NORM_PARAMS(PARAM, site, name, per) \
PARAM(site##_w, name ".weight", per, 1, p->site.gains, ROLE_GAIN, DECAY_GAIN, LR_VECTOR, p->site.gain, p->site.on) \
PARAM(site##_b, name ".bias",   per, 1, p->site.gains, ROLE_ZERO, DECAY_GAIN, LR_VECTOR, 0,            p->site.on && p->site.bias)
// Linears that read the same input have their weights side by side, and their biases: on the GPU they are one product.
#define LINEAR_WEIGHT(PARAM, field, name, out, in, init, exists) PARAM(field,     name ".weight", PER_LAYER, out, in, init,      DECAY_MATRIX, LR_HIDDEN, 0, exists)
#define LINEAR_BIAS(PARAM, field, name, out, exists)             PARAM(field##_b, name ".bias",   PER_LAYER, 1,  out, ROLE_ZERO, DECAY_GAIN,   LR_VECTOR, 0, (exists) && m->bias)
#define LAYER_NAME "model.layers.%d."

#define PARAM_TABLE(PARAM) \
PARAM(wte, "model.embed_tokens.weight",    PER_MODEL, m->Vp, m->C, ROLE_EMBEDDING, DECAY_EMBEDDING, LR_EMBEDDING, 0, 1) \
PARAM(wpe, "model.embed_positions.weight", PER_MODEL, m->T,  m->C, ROLE_EMBEDDING, DECAY_EMBEDDING, LR_EMBEDDING, 0, !m->rope) \
NORM_PARAMS(PARAM, emb, "model.embed_norm", PER_MODEL) \
NORM_PARAMS(PARAM, attn_in,   LAYER_NAME "input_layernorm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, wq, LAYER_NAME "self_attn.q_proj", m->NH * m->HS, m->C, ROLE_IN, 1) \
LINEAR_WEIGHT(PARAM, wk, LAYER_NAME "self_attn.k_proj", m->KV * m->HS, m->C, ROLE_IN, 1) \
LINEAR_WEIGHT(PARAM, wv, LAYER_NAME "self_attn.v_proj", m->KV * m->HS, m->C, ROLE_VALUE, 1) \
LINEAR_BIAS(PARAM, wq, LAYER_NAME "self_attn.q_proj", m->NH * m->HS, 1) \
LINEAR_BIAS(PARAM, wk, LAYER_NAME "self_attn.k_proj", m->KV * m->HS, 1) \
LINEAR_BIAS(PARAM, wv, LAYER_NAME "self_attn.v_proj", m->KV * m->HS, 1) \
NORM_PARAMS(PARAM, q,         LAYER_NAME "self_attn.q_norm", PER_LAYER) \
NORM_PARAMS(PARAM, k,         LAYER_NAME "self_attn.k_norm", PER_LAYER) \
NORM_PARAMS(PARAM, v,         LAYER_NAME "self_attn.v_norm", PER_LAYER) \
NORM_PARAMS(PARAM, ctx,       LAYER_NAME "self_attn.context_norm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, wo, LAYER_NAME "self_attn.o_proj", m->C, m->NH * m->HS, ROLE_OUT, 1) \
LINEAR_BIAS(PARAM, wo, LAYER_NAME "self_attn.o_proj", m->C, 1) \
NORM_PARAMS(PARAM, attn_out,  LAYER_NAME "post_attention_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, attn_post, LAYER_NAME "attention_sum_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, ffn_in,    LAYER_NAME "pre_feedforward_layernorm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, wg, LAYER_NAME "mlp.gate_proj", m->F, m->C, ROLE_FFN_IN, m->swiglu) \
LINEAR_WEIGHT(PARAM, wu, LAYER_NAME "mlp.up_proj",   m->F, m->C, ROLE_FFN_IN, 1) \
LINEAR_BIAS(PARAM, wg, LAYER_NAME "mlp.gate_proj", m->F, m->swiglu) \
LINEAR_BIAS(PARAM, wu, LAYER_NAME "mlp.up_proj",   m->F, 1) \
NORM_PARAMS(PARAM, hidden,    LAYER_NAME "mlp.hidden_norm", PER_LAYER) \
LINEAR_WEIGHT(PARAM, wd, LAYER_NAME "mlp.down_proj", m->C, m->F, ROLE_OUT, 1) \
LINEAR_BIAS(PARAM, wd, LAYER_NAME "mlp.down_proj", m->C, 1) \
NORM_PARAMS(PARAM, ffn_out,   LAYER_NAME "post_feedforward_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, ffn_post,  LAYER_NAME "feedforward_sum_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, fin, "model.norm", PER_MODEL) \
PARAM(wlm, "lm_head.weight", PER_MODEL, m->Vp, m->C, ROLE_HEAD, DECAY_MATRIX, LR_HEAD, 0, !m->tied)

// The sizes of a micro-batch and what is kept of it.
//   keep, cheap: layers whose activations are kept, and of those that cost little to compute again (--recompute: off L, L | cheap L, 1 | on 1, 1)
//   threads: OpenMP threads on the CPU, 0 on a GPU;   ratio: how many elements of the storage type one of type `wide` takes (2 in bf16)
typedef struct Sizes { int B, T, n, keep, cheap, threads, ratio; } Sizes;
enum { RECOMPUTE_OFF, RECOMPUTE_ON, RECOMPUTE_CHEAP };        // in the order of --recompute's choices
enum { QUERY_BLOCK = 64, KEY_BLOCK = 128 };                   // rows and columns of attention scores in work at a time, per thread

static inline Sizes sizes_make(const Model *m, int B, int T, int recompute, int threads, int ratio) {
    Sizes s = {B, T, B * T, recompute == RECOMPUTE_ON ? 1 : m->L, recompute == RECOMPUTE_OFF ? m->L : 1, threads, ratio};
    return s;
}

// ACT(field, type, copies, rows, cols, gradients, exists-if). Layer l uses copy l % copies, and copy l % gradients of the gradient:
//   type       real: the storage type; wide: statistics, at least float
//   copies     the same for every layer: s->keep, s->cheap, or 1
//   gradients  0: none is stored; 1: one buffer for all blocks; 2: two in turn (the stream into a block and out of it);
//   SHARED: the gradient takes over the row's own storage after its last read
enum { SHARED = -1 };
#define NORM_ACTS(ACT, site, copies) \
ACT(site##_mean, wide, copies, s->n, p->site.groups, 0, p->site.on && p->site.bias) \
ACT(site##_rstd, wide, copies, s->n, p->site.groups, 0, p->site.on)

#define QKV_WIDTH ((m->NH + 2 * m->KV) * m->HS)
#define ACT_TABLE(ACT) \
/*  field    type  copies    rows   cols          gradients  exists-if        what it holds */ \
ACT(raw,     real, 1,        s->n,  m->C,          1,         p->emb.on)       /* embedding before its norm */ \
ACT(e,       real, 1,        s->n,  m->C,          1,         1)               /* stream into block 0 */ \
ACT(ai,      real, s->cheap, s->n,  m->C,          1,         p->attn_in.on)   /* u of attention: normed input */ \
ACT(qkv,     real, s->keep,  s->n,  QKV_WIDTH,     1,         !s->threads)     /* GPU: [q | k | v] */ \
ACT(qkvn,    real, s->keep,  s->n,  QKV_WIDTH,     1,         !s->threads && (p->q.on || p->k.on || p->v.on))   /* after their norms */ \
ACT(q,       real, s->keep,  s->n,  m->NH * m->HS, 1,         s->threads)      /* CPU: one by one */ \
ACT(k,       real, s->keep,  s->n,  m->KV * m->HS, 1,         s->threads) \
ACT(v,       real, s->keep,  s->n,  m->KV * m->HS, 1,         s->threads) \
ACT(qn,      real, s->keep,  s->n,  m->NH * m->HS, 1,         s->threads && p->q.on) \
ACT(kn,      real, s->keep,  s->n,  m->KV * m->HS, 1,         s->threads && p->k.on) \
ACT(vn,      real, s->keep,  s->n,  m->KV * m->HS, 1,         s->threads && p->v.on) \
ACT(scores,  real, 1, s->threads, 2 * QUERY_BLOCK * KEY_BLOCK, 0, s->threads)  /* a block of QK^T, and of its gradient */ \
ACT(lse,     wide, s->keep,  s->n,  m->NH,         0,         1)               /* log-sum-exp of each row of scores */ \
ACT(peak,    wide, 1,        s->n,  m->NH,         0,         1)               /* largest of each row of scores; nothing but --norms-every reads it */ \
ACT(dots,    wide, 1,        s->n,  m->NH,         0,         !s->threads)     /* context times its gradient, summed over a head */ \
ACT(c,       real, s->keep,  s->n,  m->NH * m->HS, 1,         1)               /* context: the heads' outputs */ \
ACT(cn,      real, s->keep,  s->n,  m->NH * m->HS, 1,         p->ctx.on) \
ACT(ay,      real, p->out_anywhere ? s->keep : 1, s->n, m->C, 1, 1)            /* y of attention */ \
ACT(ao,      real, 1,        s->n,  m->C,          0,         s->threads && p->attn_out.on)  /* y after its norm */ \
ACT(as,      real, s->keep,  s->n,  m->C,          1,         p->attn_post.on) /* a * skip + y */ \
ACT(mid,     real, s->keep,  s->n,  m->C,          1,         1)               /* stream between the sublayers */ \
ACT(fi,      real, s->cheap, s->n,  m->C,          1,         p->ffn_in.on)    /* u of the ffn */ \
ACT(gu,      real, s->keep,  s->n,  m->swiglu ? 2 * m->F : m->F, 1, 1)         /* [gate | up], or up alone */ \
ACT(gun,     real, s->keep,  s->n,  m->swiglu ? 2 * m->F : m->F, 1, p->hidden.on) \
ACT(h,       real, s->cheap, s->n,  m->F,          1,         1)               /* after the activation */ \
ACT(fy,      real, p->out_anywhere ? s->keep : 1, s->n, m->C, 1, 1)            /* y of the ffn */ \
ACT(fo,      real, 1,        s->n,  m->C,          0,         s->threads && p->ffn_out.on) \
ACT(fs,      real, s->keep,  s->n,  m->C,          1,         p->ffn_post.on) \
ACT(x,       real, m->L,     s->n,  m->C,          2,         1)               /* stream out of the block */ \
ACT(fx,      real, 1,        s->n,  m->C,          1,         p->fin.on)       /* stream after the final norm */ \
ACT(logits,  real, 1,        s->n,  m->Vp,         SHARED,    1) \
ACT(logsum,  wide, 1,        s->n,  1,             0,         1)               /* log-sum-exp of the logits */ \
ACT(losses,  wide, 1,        s->n,  1,             0,         1)               /* cross-entropy of each token */ \
NORM_ACTS(ACT, emb, 1)             NORM_ACTS(ACT, fin, 1) \
NORM_ACTS(ACT, attn_in, s->keep)   NORM_ACTS(ACT, q, s->keep)         NORM_ACTS(ACT, k, s->keep) \
NORM_ACTS(ACT, v, s->keep)         NORM_ACTS(ACT, ctx, s->keep)       NORM_ACTS(ACT, attn_out, s->keep) \
NORM_ACTS(ACT, attn_post, s->keep) NORM_ACTS(ACT, ffn_in, s->keep)    NORM_ACTS(ACT, hidden, s->keep) \
NORM_ACTS(ACT, ffn_out, s->keep)   NORM_ACTS(ACT, ffn_post, s->keep)
