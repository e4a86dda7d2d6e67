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
#define LINEAR_PARAMS(PARAM, field, name, out, in, init, exists) \
PARAM(field,      name ".weight", PER_LAYER, out, in, init,      DECAY_MATRIX, LR_HIDDEN, 0, exists) \
PARAM(field##_b,  name ".bias",   PER_LAYER, 1,  out, ROLE_ZERO, DECAY_GAIN,   LR_VECTOR, 0, (exists) && m->bias)
#define LAYER_NAME "model.layers.%d."

#define PARAM_TABLE(PARAM) \
PARAM(wte, "model.embed_tokens.weight",    PER_MODEL, m->Vp, m->C, ROLE_EMBEDDING, DECAY_EMBEDDING, LR_EMBEDDING, 0, 1) \
PARAM(wpe, "model.embed_positions.weight", PER_MODEL, m->T,  m->C, ROLE_EMBEDDING, DECAY_EMBEDDING, LR_EMBEDDING, 0, !m->rope) \
NORM_PARAMS(PARAM, emb, "model.embed_norm", PER_MODEL) \
NORM_PARAMS(PARAM, attn_in,   LAYER_NAME "input_layernorm", PER_LAYER) \
LINEAR_PARAMS(PARAM, wq, LAYER_NAME "self_attn.q_proj", m->NH * m->HS, m->C, ROLE_IN, 1) \
LINEAR_PARAMS(PARAM, wk, LAYER_NAME "self_attn.k_proj", m->KV * m->HS, m->C, ROLE_IN, 1) \
LINEAR_PARAMS(PARAM, wv, LAYER_NAME "self_attn.v_proj", m->KV * m->HS, m->C, ROLE_VALUE, 1) \
NORM_PARAMS(PARAM, q,         LAYER_NAME "self_attn.q_norm", PER_LAYER) \
NORM_PARAMS(PARAM, k,         LAYER_NAME "self_attn.k_norm", PER_LAYER) \
NORM_PARAMS(PARAM, v,         LAYER_NAME "self_attn.v_norm", PER_LAYER) \
NORM_PARAMS(PARAM, ctx,       LAYER_NAME "self_attn.context_norm", PER_LAYER) \
LINEAR_PARAMS(PARAM, wo, LAYER_NAME "self_attn.o_proj", m->C, m->NH * m->HS, ROLE_OUT, 1) \
NORM_PARAMS(PARAM, attn_out,  LAYER_NAME "post_attention_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, attn_post, LAYER_NAME "attention_sum_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, ffn_in,    LAYER_NAME "pre_feedforward_layernorm", PER_LAYER) \
LINEAR_PARAMS(PARAM, wg, LAYER_NAME "mlp.gate_proj", m->F, m->C, ROLE_FFN_IN, m->swiglu) \
LINEAR_PARAMS(PARAM, wu, LAYER_NAME "mlp.up_proj",   m->F, m->C, ROLE_FFN_IN, 1) \
NORM_PARAMS(PARAM, hidden,    LAYER_NAME "mlp.hidden_norm", PER_LAYER) \
LINEAR_PARAMS(PARAM, wd, LAYER_NAME "mlp.down_proj", m->C, m->F, ROLE_OUT, 1) \
NORM_PARAMS(PARAM, ffn_out,   LAYER_NAME "post_feedforward_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, ffn_post,  LAYER_NAME "feedforward_sum_layernorm", PER_LAYER) \
NORM_PARAMS(PARAM, fin, "model.norm", PER_MODEL) \
PARAM(wlm, "lm_head.weight", PER_MODEL, m->Vp, m->C, ROLE_HEAD, DECAY_MATRIX, LR_HEAD, 0, !m->tied)

// The sizes of a micro-batch and what is kept of it.
typedef struct Sizes { int B, T, n, keep, threads; } Sizes;   // sequences, their length, n = B T tokens, layers whose activations are kept, OpenMP threads
enum { QUERY_BLOCK = 64 };                                    // rows of attention scores in work at a time, per thread

// ACT(field, copies, rows, cols, gradients, exists-if). Layer l uses copy l % copies, and copy l % gradients of the gradient:
//   copies     the same for every layer: s->keep = L, or 1 with --recompute: the block's forward is called again before its backward
//   gradients  0: none is stored; 1: one buffer for all blocks; 2: two in turn (the stream into a block and out of it);
//   SHARED: the gradient takes over the row's own storage after its last read
enum { SHARED = -1 };
#define NORM_ACTS(ACT, site, copies) \
ACT(site##_mean, copies, s->n, p->site.groups, 0, p->site.on && p->site.bias) \
ACT(site##_rstd, copies, s->n, p->site.groups, 0, p->site.on)

#define ACT_TABLE(ACT) \
/*  field    copies    rows   cols           gradients  exists-if        what it holds */ \
ACT(raw,     1,        s->n,  m->C,          1,         p->emb.on)       /* embedding before its norm */ \
ACT(e,       1,        s->n,  m->C,          1,         1)               /* stream into block 0 */ \
ACT(ai,      s->keep,  s->n,  m->C,          1,         p->attn_in.on)   /* u of attention: normed input */ \
ACT(q,       s->keep,  s->n,  m->NH * m->HS, 1,         1) \
ACT(k,       s->keep,  s->n,  m->KV * m->HS, 1,         1) \
ACT(v,       s->keep,  s->n,  m->KV * m->HS, 1,         1) \
ACT(qn,      s->keep,  s->n,  m->NH * m->HS, 1,         p->q.on)         /* after their norms */ \
ACT(kn,      s->keep,  s->n,  m->KV * m->HS, 1,         p->k.on) \
ACT(vn,      s->keep,  s->n,  m->KV * m->HS, 1,         p->v.on) \
ACT(scores,  1, s->threads, 2 * QUERY_BLOCK * s->T, 0,  1)               /* a block of rows of QK^T, and of its gradient */ \
ACT(lse,     s->keep,  s->n,  m->NH,         0,         1)               /* log-sum-exp of each row of scores */ \
ACT(c,       s->keep,  s->n,  m->NH * m->HS, 1,         1)               /* context: the heads' outputs */ \
ACT(cn,      s->keep,  s->n,  m->NH * m->HS, 1,         p->ctx.on) \
ACT(ay,      p->out_anywhere ? s->keep : 1, s->n, m->C, 1, 1)            /* y of attention */ \
ACT(ao,      1,        s->n,  m->C,          0,         p->attn_out.on)  /* y after its norm */ \
ACT(as,      s->keep,  s->n,  m->C,          1,         p->attn_post.on) /* a * skip + y */ \
ACT(mid,     s->keep,  s->n,  m->C,          1,         1)               /* stream between the sublayers */ \
ACT(fi,      s->keep,  s->n,  m->C,          1,         p->ffn_in.on)    /* u of the ffn */ \
ACT(gu,      s->keep,  s->n,  m->swiglu ? 2 * m->F : m->F, 1, 1)         /* [gate | up], or up alone */ \
ACT(gun,     s->keep,  s->n,  m->swiglu ? 2 * m->F : m->F, 1, p->hidden.on) \
ACT(h,       s->keep,  s->n,  m->F,          1,         1)               /* after the activation */ \
ACT(fy,      p->out_anywhere ? s->keep : 1, s->n, m->C, 1, 1)            /* y of the ffn */ \
ACT(fo,      1,        s->n,  m->C,          0,         p->ffn_out.on) \
ACT(fs,      s->keep,  s->n,  m->C,          1,         p->ffn_post.on) \
ACT(x,       m->L,     s->n,  m->C,          2,         1)               /* stream out of the block */ \
ACT(fx,      1,        s->n,  m->C,          1,         p->fin.on)       /* stream after the final norm */ \
ACT(logits,  1,        s->n,  m->Vp,         SHARED,    1) \
ACT(logsum,  1,        s->n,  1,             0,         1)               /* log-sum-exp of the logits */ \
ACT(losses,  1,        s->n,  1,             0,         1)               /* cross-entropy of each token */ \
NORM_ACTS(ACT, emb, 1)             NORM_ACTS(ACT, fin, 1) \
NORM_ACTS(ACT, attn_in, s->keep)   NORM_ACTS(ACT, q, s->keep)         NORM_ACTS(ACT, k, s->keep) \
NORM_ACTS(ACT, v, s->keep)         NORM_ACTS(ACT, ctx, s->keep)       NORM_ACTS(ACT, attn_out, s->keep) \
NORM_ACTS(ACT, attn_post, s->keep) NORM_ACTS(ACT, ffn_in, s->keep)    NORM_ACTS(ACT, hidden, s->keep) \
NORM_ACTS(ACT, ffn_out, s->keep)   NORM_ACTS(ACT, ffn_post, s->keep)
