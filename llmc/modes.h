// modes.h: TABLE 1, one row per normalization placement, and what a row means for layer l of a model.
//
// A block is two sublayers, attention and ffn. With x the stream entering the sublayer, x0 the block's input, N the norm of the slot:
//
//   u  = in ? N(x) : x                   skip = OWN: x | NORMED: u | BLOCK: x0
//   y  = F(c * u)                        c = ONE: 1 | LNS: 1/sqrt(l+1)
//   y  = out ? N(y) : y                  q, k, v and the context (the heads' outputs, before the output projection) have slots of their own
//   s  = a * skip + b * y                a = ONE: 1 | DEEP: (2L)^(1/4), and b = 1;  LEARNED: b = alpha, a vector of parameters, and a = 1 - alpha
//   x' = post ? N(s) : s
//
// An absent slot is the identity: no call, no copy, no parameter. Adding a placement is adding a row; a placement the columns cannot
// express gets a new, named column. Valid as C17 and as C++17.
#pragma once
#include <math.h>
#include <stddef.h>

enum { OWN, NORMED, BLOCK };                    // column skip
enum { ONE, LNS, DEEP, LEARNED };               // columns c and a
enum { L2 = 2, SCALE };                         // slots: 0 nothing, 1 the model's norm, L2 x / |x|;  SCALE, of sites alone: a gain without a norm
enum { HEAD, FULL };                            // column per: q, k, v, context statistics over each head (gain shared by heads) or the full width
enum { INIT_BASELINE = -1, INIT_NORMAL, INIT_DEPTH, INIT_MEGATRON, INIT_SCALE, INIT_SCALE_RECIPE, INIT_GLOBAL, INIT_OLMO, INIT_DEEPNORM, INIT_COUNT };   // init.h

// MODE(name, attention: in c out skip a post, ffn: the same, q k v context per, emb fin sdd unit, first early, init, source)
//   emb: norm on the embedding;  fin: norm before the head;  sdd: every linear of a block becomes alpha * rmsnorm(V x);  unit (nGPT): after every
//   step the rows of every matrix (of output projections the columns) are scaled to length 1; gate, up and logits get gains, q and k theirs after RoPE;
//   first: the row of layer 0;  early: the row of the first mix-ratio * L layers;  init: used where --init is auto;  INIT_BASELINE: the method
//   names none, and --init-baseline decides.
// LAYER rows can only be named in `first` and `early`.
// Papers: SPAN = SpanNorm, HYB = HybridNorm, SDD = Scale-Distribution Decoupling; others by their usual names.
#define MODE_TABLE(MODE, LAYER) \
/*    name            |in c  out skip   a  post|in c  out skip   a  post|q k v c per |emb fin sdd unit|first         early init          source                      */ \
MODE( SPAN,            0, ONE, 0, OWN,    ONE, 1, 0, ONE, 0, BLOCK,  ONE, 1, 0,0,0,0, HEAD, 0, 0, 0, 0, SPAN_FIRST,    NO_ROW, INIT_SCALE,    "SPAN eq 5-8") \
MODE( PRE,             1, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, OWN,    ONE, 0, 0,0,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_BASELINE, "SPAN eq 3-4, HYB eq 5-6") \
MODE( POST,            0, ONE, 0, OWN,    ONE, 1, 0, ONE, 0, OWN,    ONE, 1, 0,0,0,0, HEAD, 0, 0, 0, 0, NO_ROW,        NO_ROW, INIT_BASELINE, "SPAN eq 1-2, HYB eq 3-4") \
MODE( HYBRID,          0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,1,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB eq 8-9") \
MODE( SDD,             1, ONE, 0, NORMED, ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 0,0,0,0, HEAD, 0, 1, 1, 0, NO_ROW,        NO_ROW, INIT_NORMAL,   "SDD eq 2, on POST_SHIFTED") \
MODE( HYBRID_STAR,     0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,1,0, HEAD, 0, 1, 0, 0, PRE_QKV_PRE,   NO_ROW, INIT_MEGATRON, "HYB eq 10-11") \
MODE( EMBED_NORM,      0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,1,0, HEAD, 1, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB section 4.4, fig 4") \
MODE( FIRST_QKV_PRE,   0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,1,0, HEAD, 0, 1, 0, 0, QKV_PRE,       NO_ROW, INIT_MEGATRON, "HYB section 4.4, fig 4") \
MODE( QKVC_POST,       0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,1,1, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( QKC_POST,        0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,0,1, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( QK_POST,         0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( KV_POST,         0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 0,1,1,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( KC_POST,         0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 0,1,0,1, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB eq 39") \
MODE( PRE_QKV_POST,    1, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 1,1,1,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( PRE_QKV_PRE,     1, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, OWN,    ONE, 0, 1,1,1,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB eq 47-48") \
MODE( PRE_QK_PRE,      1, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, OWN,    ONE, 0, 1,1,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( QKV_PRE,         0, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, OWN,    ONE, 0, 1,1,1,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( PRE_POST,        1, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 0,0,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( POST_PRE,        1, ONE, 0, NORMED, ONE, 0, 1, ONE, 0, OWN,    ONE, 0, 0,0,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB appendix E") \
MODE( POST_SHIFTED,    1, ONE, 0, NORMED, ONE, 0, 1, ONE, 0, NORMED, ONE, 0, 0,0,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_MEGATRON, "HYB and SDD code: POST whose first norm is of the embedding") \
MODE( MIX_LN,          1, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, OWN,    ONE, 0, 0,0,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        POST,   INIT_BASELINE, "Mix-LN; SPAN appendix B") \
MODE( LNS,             1, LNS, 0, OWN,    ONE, 0, 1, LNS, 0, OWN,    ONE, 0, 0,0,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_NORMAL,   "LayerNorm Scaling") \
MODE( PERI,            1, ONE, 1, OWN,    ONE, 0, 1, ONE, 1, OWN,    ONE, 0, 0,0,0,0, HEAD, 1, 1, 0, 0, NO_ROW,        NO_ROW, INIT_BASELINE, "Peri-LN") \
MODE( SANDWICH,        1, ONE, 1, OWN,    ONE, 0, 1, ONE, 1, OWN,    ONE, 0, 0,0,0,0, HEAD, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_BASELINE, "Sandwich-LN; Gemma 2") \
MODE( OLMO2,           0, ONE, 1, OWN,    ONE, 0, 0, ONE, 1, OWN,    ONE, 0, 1,1,0,0, FULL, 0, 1, 0, 0, NO_ROW,        NO_ROW, INIT_OLMO,     "OLMo 2 (reordered norm)") \
MODE( DEEPNORM,        0, ONE, 0, OWN,   DEEP, 1, 0, ONE, 0, OWN,   DEEP, 1, 0,0,0,0, HEAD, 0, 0, 0, 0, NO_ROW,        NO_ROW, INIT_DEEPNORM, "DeepNorm") \
MODE( SDD_PRE,         1, ONE, 0, OWN,    ONE, 0, 1, ONE, 0, OWN,    ONE, 0, 0,0,0,0, HEAD, 0, 1, 1, 0, NO_ROW,        NO_ROW, INIT_NORMAL,   "SDD fig 8, on PRE") \
MODE( NGPT,            0, ONE,L2, OWN,LEARNED,L2, 0, ONE,L2, OWN,LEARNED,L2,L2,L2,0,0,HEAD, 0, 0, 0, 1, NO_ROW,        NO_ROW, INIT_SCALE,    "nGPT") \
LAYER(SPAN_FIRST,      1, ONE, 0, OWN,    ONE, 1, 0, ONE, 0, BLOCK,  ONE, 1, 0,0,0,0, HEAD, 0, 0, 0, 0, NO_ROW,        NO_ROW, INIT_SCALE,    "SPAN eq 7-8: layer 0 norms what q, k, v read")

typedef struct { int in, c, out, skip, a, post; } SubMode;

typedef struct Mode {
    const char *name;
    int id, selectable;                         // id: its place in MODES
    SubMode attn, ffn;
    int q, k, v, ctx, per;
    int emb, fin, sdd, unit;
    int first, early, init;
    const char *source;
} Mode;

#define MODE_ENUM(name, ...) MODE_##name,
enum { MODE_NO_ROW = -1, MODE_TABLE(MODE_ENUM, MODE_ENUM) MODE_COUNT };
#undef MODE_ENUM

#define ROW(sel, name, i1, c1, o1, s1, a1, p1, i2, c2, o2, s2, a2, p2, q, k, v, ctx, per, emb, fin, sdd, unit, first, early, init, source) \
    {#name, MODE_##name, sel, {i1, c1, o1, s1, a1, p1}, {i2, c2, o2, s2, a2, p2}, q, k, v, ctx, per, emb, fin, sdd, unit, MODE_##first, MODE_##early, init, source},
#define MODE_ROW(...)  ROW(1, __VA_ARGS__)
#define LAYER_ROW(...) ROW(0, __VA_ARGS__)
#ifdef __cplusplus
static constexpr Mode MODES[] = { MODE_TABLE(MODE_ROW, LAYER_ROW) };          // CUDA's wiring decides by it at compile time (block.cuh)
#else
static const Mode MODES[] = { MODE_TABLE(MODE_ROW, LAYER_ROW) };
#endif
#undef ROW
#undef MODE_ROW
#undef LAYER_ROW

// SDD's paper and its released code differ in seven places; each setting is a row of switches (--sdd).
//   out_layers: alpha of the two output projections starts at 1/sqrt(out_layers * L);   std: multiplies the base sigma of every matrix;
//   v: v is a normalized linear (1), or plain with a norm on the context instead (0);   fused: one RMS over gate and up together, in a dense ffn;
//   per: statistics of q and k over each head or the full width;   share: what experts return counts F/E times;   head: an untied head starts with 1/sqrt(d), not with sigma.
#define SDD_TABLE(SDD) \
/*   name    out_layers std   v  fused per   share head source */ \
SDD( paper,  1,         1.0,  1, 0,    FULL, 0,    0,   "SDD eq 2, section 4.1") \
SDD( code,   2,         0.1,  0, 1,    HEAD, 1,    1,   "SDD released code")

typedef struct { const char *name; int out_layers; double std; int v, fused, per, share, head; const char *source; } Sdd;
#define SDD_ROW(name, ...) {#name, __VA_ARGS__},
static const Sdd SDDS[] = { SDD_TABLE(SDD_ROW) };
#undef SDD_ROW
enum { SDD_COUNT = sizeof SDDS / sizeof *SDDS };

enum { ROUTER_SOFTMAX, ROUTER_SOFTMAX_RENORM, ROUTER_SIGMOID };     // in the order of --router's choices
enum { LOSSES_MEAN, LOSSES_SUM };                                   // in the order of --router-losses' choices

// Mixture of experts (judge: "the router"). E: routed experts of a layer, 0: every ffn is dense; K: experts of a token; dense: leading layers that stay
// dense, of width dense_F; shared_F: width of what every token of the other layers goes through besides, 0: nothing.
// scale: of the gates; balance, sequence, z: coefficients of the losses, over a micro-batch, over each sequence, and of logsumexp^2; losses: how they
// add up over layers; bias_rate: a step of the selection bias that balances without a loss, 0: no such bias.
typedef struct Moe { int E, K, dense, dense_F, shared_F, router, losses; double scale, balance, sequence, z, bias_rate; } Moe;

// A model: a mode and the flags that are orthogonal to it. Letters are the field's: layers, channels, heads, kv heads, head size,
// ffn width (of each expert, where there are experts), vocabulary, padded vocabulary, longest sequence.
typedef struct Model {
    const Mode *mode;
    const Sdd *sdd;                             // read only where mode->sdd
    int L, C, NH, KV, HS, F, V, Vp, T;
    int kv_rank, rope_size;                     // latent attention: width of what keys and values are made from (0: none), rotary channels of a head besides HS
    Moe moe;
    int layernorm, bias, rope, swiglu, tied;    // LayerNorm with bias or RMSNorm; linear biases; RoPE or learned positions; SwiGLU or GELU; head = embedding
    int fin;                                    // the norm before the head: the mode's, or as --final-norm says
    double theta, eps, emb_scale, mix_ratio;
} Model;

// Channels of a head of q and k, and how many of them, the last ones, turn with the position. Those of v and of the context are HS.
static inline int qk_size(const Model *m) { return m->HS + (m->kv_rank ? m->rope_size : 0); }
static inline int rotary_size(const Model *m) { return m->kv_rank ? m->rope_size : m->HS; }
static inline int moe_layers(const Model *m) { return m->moe.E ? m->L - m->moe.dense : 0; }

// One norm site of one layer. on: 0, 1 (the model's norm), L2 or SCALE; rows of groups * width values, statistics over each group; gains: length of
// the gain vector (width: shared by the groups; groups * width: one each; 0: none); bias: LayerNorm; gain: its initial value; scale: constant factor.
typedef struct { int on, groups, width, gains, bias; double gain, scale; } Site;

// Everything the mode decides about layer l, as numbers: what the tables of tensors.h, the judge and --show read.
typedef struct Place {
    const Mode *row;
    Site emb, attn_in, q, k, v, latent, ctx, attn_out, attn_post, ffn_in, hidden, ffn_out, ffn_post, fin, logits;
    Site expert_hidden, expert_out, shared_out; // inside each expert, and of the shared experts
    double attn_c, attn_a, ffn_c, ffn_a;        // what multiplies u and the skip
    double gate_scale;                          // and the experts' gates: --router-scale, and SDD's share
    int moe, F;                                 // whether this layer has experts; width of the ffn that all tokens go through, 0: none
    int out_anywhere;                           // some layer of the model has an out slot
} Place;

static inline double mode_scale(int kind, int l, int L) {
    return kind == LNS ? 1.0 / sqrt(l + 1.0) : kind == DEEP ? pow(2.0 * L, 0.25) : 1.0;
}

// L2 has no gain: x / |x| is the RMS norm over sqrt(width).
static inline Site site_make(int on, int groups, int width, int shared, int bias, double gain) {
    Site s = {on, groups, width, on == L2 ? 0 : shared ? width : groups * width, on == 1 ? bias : 0, gain, on == L2 ? 1 / sqrt((double)width) : 1.0};
    return s;
}

// The norm of q, k, v or the context: `heads` groups with one shared gain, or one group over the full width.
static inline Site site_heads(int on, int per, int heads, int HS, int bias) {
    return site_make(on, per == HEAD ? heads : 1, per == HEAD ? HS : heads * HS, 1, bias, 1.0);
}

// nGPT keeps a gain of effective size `start` as a parameter that starts at `stored`: AdamW, whose steps have the size of the rate, then moves it by rate / stored.
static inline void site_stored(Site *s, int gains, double start, double stored) {
    s->gains = gains;
    s->gain = stored;
    s->scale *= start / stored;
}

// The SDD or nGPT gain between gate, up and the activation, where there is such an ffn.
static inline Site site_hidden(int there, const Model *m, int F, int fused) {
    int halves = m->swiglu && !fused ? 2 : 1, hidden = m->swiglu ? 2 * F : F;   // [gate | up], or one
    Site s = site_make(!there ? 0 : m->mode->sdd ? 1 : m->mode->unit ? SCALE : 0, halves, hidden / halves, 0, 0, 1.0);
    if (m->mode->unit) s.scale = sqrt((double)m->C);
    return s;
}

static inline Place place_at(const Model *m, int l) {
    const Mode *base = m->mode, *r = base;
    if (base->first >= 0 && l == 0) r = &MODES[base->first];
    if (base->early >= 0 && l < (int)floor(m->mix_ratio * m->L + 1e-9)) r = &MODES[base->early];
    // alpha * rmsnorm(V x) is a linear followed by an affine RMSNorm, so SDD fills the q, k, v, out slots and those inside the ffn.
    const Sdd *sdd = base->sdd ? m->sdd : NULL;
    int ln = m->layernorm, ln_or_sdd = m->layernorm && !sdd, per = sdd ? sdd->per : r->per, QK = qk_size(m);
    double out_gain = sdd ? 1.0 / sqrt((double)sdd->out_layers * m->L) : 1.0, root = sqrt((double)m->C);
    Place p;
    p.row = r;
    p.moe = m->moe.E && l >= m->moe.dense;
    p.F = p.moe ? m->moe.shared_F : m->moe.E ? m->moe.dense_F : m->F;
    p.emb       = site_make(base->emb,      1, m->C, 1, ln, 1.0);
    p.attn_in   = site_make(r->attn.in,     1, m->C, 1, ln, 1.0);
    p.attn_out  = site_make(sdd ? 1 : r->attn.out, 1, m->C, 1, ln_or_sdd, out_gain);
    p.attn_post = site_make(r->attn.post,   1, m->C, 1, ln, 1.0);
    p.ffn_in    = site_make(r->ffn.in,      1, m->C, 1, ln, 1.0);
    p.ffn_out   = site_make(sdd ? !p.moe : r->ffn.out, 1, m->C, 1, ln_or_sdd, out_gain);
    p.ffn_post  = site_make(r->ffn.post,    1, m->C, 1, ln, 1.0);
    p.fin       = site_make(m->fin,         1, m->C, 1, ln, 1.0);
    p.latent    = site_make(m->kv_rank > 0, 1, m->kv_rank, 1, ln, 1.0);
    p.logits    = site_make(base->unit ? SCALE : 0, 1, m->Vp, 1, 0, 1.0);
    p.q   = site_heads(sdd ? 1 : r->q,         per, m->NH, QK, ln_or_sdd);
    p.k   = site_heads(sdd ? 1 : r->k,         per, m->KV, QK, ln_or_sdd);
    p.v   = site_heads(sdd ? sdd->v : r->v,    sdd ? FULL : per, m->KV, m->HS, ln_or_sdd);
    p.ctx = site_heads(sdd ? !sdd->v : r->ctx, sdd ? FULL : per, m->NH, m->HS, ln_or_sdd);
    if (r->q == L2) site_stored(&p.q, m->NH * QK, 1, 1 / root);                // s_qk; k, of as many heads, reads q's
    if (r->k == L2) site_stored(&p.k, 0, 1, 1 / root);
    if (base->unit) site_stored(&p.logits, m->Vp, 1, 1 / root);                // s_z
    p.hidden        = site_hidden(p.F > 0, m, p.F, sdd && sdd->fused && !p.moe);       // nGPT: s_uv
    p.expert_hidden = site_hidden(p.moe, m, m->F, 0);
    p.expert_out    = site_make(sdd && p.moe, 1, m->C, 1, 0, out_gain);
    p.shared_out    = site_make(sdd && p.moe && p.F, 1, m->C, 1, 0, out_gain);
    p.gate_scale = m->moe.scale;
    if (sdd && sdd->share && p.moe) p.gate_scale *= (double)m->F / m->moe.E;
    p.out_anywhere = sdd != NULL || base->attn.out || base->ffn.out;
    if (base->first >= 0) p.out_anywhere |= MODES[base->first].attn.out | MODES[base->first].ffn.out;
    if (base->early >= 0) p.out_anywhere |= MODES[base->early].attn.out | MODES[base->early].ffn.out;
    p.attn_c = mode_scale(r->attn.c, l, m->L);
    p.attn_a = mode_scale(r->attn.a, l, m->L);
    p.ffn_c  = mode_scale(r->ffn.c, l, m->L);
    p.ffn_a  = mode_scale(r->ffn.a, l, m->L);
    return p;
}
