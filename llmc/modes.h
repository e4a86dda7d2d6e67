// modes.h: TABLE 1, one row per normalization placement, and the meaning of a row for layer l.
//
// A block is two sublayers, attention and ffn. With x the residual stream that enters the sublayer,
// x0 the block's input and N the norm of the slot:
//
//   u  = in ? N(x) : x               skip = OWN: x | NORMED: u | BLOCK: x0
//   y  = F(c * u)                    c = ONE: 1 | LNS: 1/sqrt(l+1)
//   yn = out ? N(y) : y              q, k, v and the context have slots of their own inside F
//   s  = a * skip + b * yn           b = 1; a = ONE: 1 | DEEP: (2L)^(1/4) | SUBLAYERS: 2L
//   x' = post ? N(s) : s
//
// nGPT (a = LEARNED): a = 1 - alpha and b = alpha = 0.05 sqrt(C) |p|. The vector p [C] is a
// parameter.
//
// An empty slot is the identity: no call, no copy, no parameter. A new placement is a new row. One
// that the columns cannot express gets a new, named column. Valid as C17 and, for gcc,
// clang and nvcc, as C++17.
#pragma once
#include <math.h>
#include <stddef.h>

// 0 is the default of a column that a row does not name.
enum { OWN, NORMED, BLOCK };                  // skip
enum { ONE, LNS, DEEP, SUBLAYERS, LEARNED };  // c: ONE or LNS; a: all but LNS
enum { HEAD, FULL };                          // per
enum { L2 = 2, SCALE, DYT };                  // a slot's norm: 0 none; 1 the model's; L2: x / |x|.
                                              // Site alone has also SCALE, a gain without a norm,
                                              // and DYT, which is 1 in a model with DyT

// One sublayer's columns, as in the equations above.
typedef struct {
    int in, c, out, skip, a, post;
} SubMode;

typedef struct {
    const char *name;
    int selectable;                           // NORM_MODE may name it (0: only `first` and `early`
                                              // may)
    SubMode attn, ffn;
    int q, k, v, ctx;                         // slots inside attention; ctx: the heads' outputs,
                                              // before the output projection
    int per;                                  // norm statistics of these slots: HEAD: over each
                                              // head, with one gain for all heads | FULL: over the
                                              // full width
    int emb, fin;                             // a norm on the embedding, and before the LM head
    int sdd;                                  // every linear of a block is alpha * rmsnorm(V x)
    int unit;                                 // nGPT: after every step each row of a matrix (column
                                              // of an output projection) is scaled to length 1;
                                              // gate, up, logits, q and k have gains; q and k are
                                              // normed after RoPE
    int first;                                // the row of layer 0; 0: this one
    int early;                                // that of the first --mix-ratio * L layers; 0: this
    const char *init;                         // row of init.h for --init auto; NULL: the method
                                              // names none, and --init-baseline decides
    const char *source;
} Mode;

// MODE(name, columns that are not 0, in the order of the struct). LAYER rows are not selectable.
// Papers: SPAN = SpanNorm, HYB = HybridNorm, SDD = Scale-Distribution Decoupling; the others go by
// their usual names.
#define MODE_TABLE(MODE, LAYER) \
MODE(SPAN,           .attn = {.post = 1}, .ffn = {.skip = BLOCK, .post = 1}, \
                     .first = MODE_SPAN_FIRST, .init = "scale", .source = "SPAN eq 5-8") \
MODE(PRE,            .attn = {.in = 1}, .ffn = {.in = 1}, .fin = 1, \
                     .source = "SPAN eq 3-4, HYB eq 5-6") \
MODE(POST,           .attn = {.post = 1}, .ffn = {.post = 1}, .source = "SPAN eq 1-2, HYB eq 3-4") \
MODE(HYBRID,         .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .v = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB eq 8-9") \
MODE(SDD,            .attn = {.in = 1, .skip = NORMED}, .ffn = {.in = 1, .skip = NORMED}, \
                     .fin = 1, .sdd = 1, .init = "normal", \
                     .source = "SDD eq 2, on POST_SHIFTED") \
MODE(HYBRID_STAR,    .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .v = 1, .fin = 1, \
                     .first = MODE_PRE_QKV_PRE, .init = "megatron", .source = "HYB eq 10-11") \
MODE(EMBED_NORM,     .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .v = 1, .emb = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB section 4.4, fig 4") \
MODE(FIRST_QKV_PRE,  .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .v = 1, .fin = 1, \
                     .first = MODE_QKV_PRE, .init = "megatron", \
                     .source = "HYB section 4.4, fig 4") \
MODE(QKVC_POST,      .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .v = 1, .ctx = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB appendix E") \
MODE(QKC_POST,       .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .ctx = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB appendix E") \
MODE(QK_POST,        .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB appendix E") \
MODE(KV_POST,        .ffn = {.in = 1, .skip = NORMED}, .k = 1, .v = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB appendix E") \
MODE(KC_POST,        .ffn = {.in = 1, .skip = NORMED}, .k = 1, .ctx = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB eq 39") \
MODE(PRE_QKV_POST,   .attn = {.in = 1}, .ffn = {.in = 1, .skip = NORMED}, .q = 1, .k = 1, .v = 1, \
                     .fin = 1, .init = "megatron", .source = "HYB appendix E") \
MODE(PRE_QKV_PRE,    .attn = {.in = 1}, .ffn = {.in = 1}, .q = 1, .k = 1, .v = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB eq 47-48") \
MODE(PRE_QK_PRE,     .attn = {.in = 1}, .ffn = {.in = 1}, .q = 1, .k = 1, .fin = 1, \
                     .init = "megatron", .source = "HYB appendix E") \
MODE(QKV_PRE,        .ffn = {.in = 1}, .q = 1, .k = 1, .v = 1, .fin = 1, .init = "megatron", \
                     .source = "HYB appendix E") \
MODE(PRE_POST,       .attn = {.in = 1}, .ffn = {.in = 1, .skip = NORMED}, .fin = 1, \
                     .init = "megatron", .source = "HYB appendix E") \
MODE(POST_PRE,       .attn = {.in = 1, .skip = NORMED}, .ffn = {.in = 1}, .fin = 1, \
                     .init = "megatron", .source = "HYB appendix E") \
MODE(POST_SHIFTED,   .attn = {.in = 1, .skip = NORMED}, .ffn = {.in = 1, .skip = NORMED}, \
                     .fin = 1, .init = "megatron", \
                     .source = "HYB and SDD code: POST whose first norm is of the embedding") \
MODE(MIX_LN,         .attn = {.in = 1}, .ffn = {.in = 1}, .fin = 1, .early = MODE_POST, \
                     .source = "Mix-LN; SPAN appendix B") \
MODE(LNS,            .attn = {.in = 1, .c = LNS}, .ffn = {.in = 1, .c = LNS}, .fin = 1, \
                     .init = "normal", .source = "LayerNorm Scaling") \
MODE(PERI,           .attn = {.in = 1, .out = 1}, .ffn = {.in = 1, .out = 1}, .emb = 1, .fin = 1, \
                     .source = "Peri-LN") \
MODE(SANDWICH,       .attn = {.in = 1, .out = 1}, .ffn = {.in = 1, .out = 1}, .fin = 1, \
                     .source = "Sandwich-LN; Gemma 2") \
MODE(OLMO2,          .attn = {.out = 1}, .ffn = {.out = 1}, .q = 1, .k = 1, .per = FULL, .fin = 1, \
                     .init = "olmo", .source = "OLMo 2 (reordered norm)") \
MODE(OLMOE,          .attn = {.in = 1}, .ffn = {.in = 1}, .q = 1, .k = 1, .per = FULL, .fin = 1, \
                     .init = "olmo", .source = "OLMoE") \
MODE(DEEPNORM,       .attn = {.a = DEEP, .post = 1}, .ffn = {.a = DEEP, .post = 1}, \
                     .init = "deepnorm", .source = "DeepNorm") \
MODE(KEEL,           .attn = {.in = 1, .a = SUBLAYERS, .post = 1}, \
                     .ffn = {.in = 1, .a = SUBLAYERS, .post = 1}, .first = MODE_KEEL_FIRST, \
                     .source = "Keel eq 8, section 3.1 (2601.19895v2)") \
MODE(SDD_PRE,        .attn = {.in = 1}, .ffn = {.in = 1}, .fin = 1, .sdd = 1, .init = "normal", \
                     .source = "SDD fig 8, on PRE") \
MODE(NGPT,           .attn = {.out = L2, .a = LEARNED, .post = L2}, \
                     .ffn = {.out = L2, .a = LEARNED, .post = L2}, .q = L2, .k = L2, .unit = 1, \
                     .init = "scale", .source = "nGPT") \
LAYER(SPAN_FIRST,    .attn = {.in = 1, .post = 1}, .ffn = {.skip = BLOCK, .post = 1}, \
                     .source = "SPAN eq 7-8: layer 0 norms what q, k, v read") \
LAYER(KEEL_FIRST,    .attn = {.in = 1}, .ffn = {.in = 1, .post = 1}, \
                     .source = "Keel section 3.1: a = 1, and attention has no post norm")

#define MODE_ENUM(name, ...) MODE_##name,
enum { MODE_NONE, MODE_TABLE(MODE_ENUM, MODE_ENUM) MODE_COUNT };

#ifdef __cplusplus
#pragma GCC diagnostic push                   // a row leaves columns out on purpose
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif
#define MODE_ROW(mode, ...) {.name = #mode, .selectable = 1, __VA_ARGS__},
#define LAYER_ROW(mode, ...) {.name = #mode, __VA_ARGS__},
static const Mode MODES[] = {{.name = "NONE"}, MODE_TABLE(MODE_ROW, LAYER_ROW)};

// SDD's paper (eq 2, section 4.1) and its released code differ in seven places; --sdd chooses.
typedef struct {
    const char *name;
    int out_layers;                           // alpha of both output projections starts at
                                              // 1/sqrt(out_layers * L)
    double std;                               // multiplies the base sigma of every matrix
    int v;                                    // 1: v is a normalized linear; 0: it is plain, and
                                              // the context has a norm
    int fused;                                // dense ffn: one RMS over gate and up together
    int per;                                  // statistics of q and k: HEAD or FULL
    int share;                                // gates of experts are multiplied by F/E, the ffn
                                              // width of an expert over the number of experts
    int head;                                 // sigma of an untied LM head is 1/sqrt(C)
} Sdd;

#define SDD_TABLE(SDD) \
SDD(PAPER, "paper", .out_layers = 1, .std = 1, .v = 1, .per = FULL) \
SDD(CODE,  "code",  .out_layers = 2, .std = 0.1, .fused = 1, .share = 1, .head = 1)

#define SDD_ROW(id, word, ...) {.name = word, __VA_ARGS__},
static const Sdd SDDS[] = {SDD_TABLE(SDD_ROW)};
enum { SDD_COUNT = sizeof SDDS / sizeof *SDDS };
#ifdef __cplusplus
#pragma GCC diagnostic pop
#endif

// In the order of the choices of --norm, --router, --router-losses and --bias.
enum { NORM_RMS, NORM_LAYER, NORM_DYT };
enum { ROUTER_SOFTMAX, ROUTER_SOFTMAX_RENORM, ROUTER_SIGMOID };
enum { LOSSES_MEAN, LOSSES_SUM };
enum { BIAS_OFF, BIAS_ON, BIAS_QKV };

// Mixture of experts.
typedef struct {
    int E;                                    // routed experts of a layer; 0: every ffn is dense
    int K;                                    // experts of a token (top-k)
    int dense, dense_F;                       // leading layers that stay dense, and their width
    int shared_F;                             // width of the shared experts, which every token of
                                              // the other layers goes through; 0: none
    int router, losses;
    double scale;                             // --router-scale: a factor of the gates
    double balance, sequence, z;              // coefficients of the losses: load balance over a
                                              // micro-batch, over each sequence, and logsumexp^2
    double bias_rate;                         // step of the selection bias that balances the load
                                              // without a loss; 0: no such bias
} Moe;

// A model: a mode and the flags that are independent of it.
typedef struct {
    const Mode *mode;
    const Sdd *sdd;                           // read only if mode->sdd
    int L, C, NH, KV, HS;                     // layers, channels, heads, kv heads, head size
    int F;                                    // ffn width; of each expert if there are experts
    int V, Vp, T;                             // vocabulary, padded vocabulary, longest sequence
    int kv_rank, rope_size;                   // latent attention: width of the latent (0: none),
                                              // and rotary channels of a head besides HS
    Moe moe;
    int norm;                                 // NORM_*; all but RMSNorm have a bias
    double dyt_alpha;                         // DyT's alpha at the start
    int bias;                                 // biases of linears: BIAS_OFF, BIAS_ON or BIAS_QKV
    int rope;                                 // 1: RoPE, 0: learned positions
    int swiglu;                               // 1: SwiGLU, 0: GELU
    int tied;                                 // the LM head's matrix is the embedding's
    int fin;                                  // norm before the LM head: the mode's or --final-norm
    double theta, eps;                        // of RoPE; of norms
    double rope_factor, rope_original;        // Llama 3's RoPE (rope_rate)
    double emb_scale, mix_ratio;              // factor of the embedding; MIX_LN's share of POST
} Model;

// A head of q or k has qk_size channels, and RoPE rotates the last rotary_size of them. A head of v
// or of the context has HS channels.
static inline int qk_size(const Model *m) { return m->HS + (m->kv_rank ? m->rope_size : 0); }
static inline int rotary_size(const Model *m) { return m->kv_rank ? m->rope_size : m->HS; }

// The angle of RoPE's pair i at position 1: theta^(-2i/R), with R = rotary_size(m). Llama 3's RoPE
// (2024) extends a model trained on sequences of rope_original tokens, in which the pair makes r
// turns. Below one turn its rate is divided by rope_factor, above four it stays, and between them
// it is interpolated.
static inline double rope_rate(const Model *m, int i, int R) {
    double rate = pow(m->theta, -2.0 * i / R), r = m->rope_original * rate / (2 * acos(-1.0));
    double keep = fmin(fmax((r - 1) / (4 - 1), 0), 1);
    return m->rope_factor > 1 ? rate * (keep + (1 - keep) / m->rope_factor) : rate;
}

static inline int moe_layers(const Model *m) { return m->moe.E ? m->L - m->moe.dense : 0; }

// A norm slot of one layer. N(x) = gain * xhat + bias, where the gain is scale * (parameter w).
typedef struct {
    int on;                                   // 0, 1 (the model's norm), L2, SCALE or DYT
    int groups, width;                        // a row is groups * width values; statistics are over
                                              // each group
    int gains;                                // length of the gain vector: width (shared by the
                                              // groups), groups * width (one each) or 0 (none)
    int bias;                                 // it has a bias (LayerNorm, DyT)
    double gain, scale;                       // initial value of w; constant factor
} Site;

// Everything the mode decides about layer l, as numbers: read by the tables of tensors.h, the
// trainers and --show.
typedef struct {
    const Mode *row;                          // of this layer
    // All sites stand together: refuse_wide_norms (train_gpt.cu) loops from emb to shared_out.
    Site emb, attn_in, q, k, v, latent, ctx, attn_out, attn_post;
    Site ffn_in, hidden, ffn_out, ffn_post, fin, logits;
    Site expert_hidden, expert_out;           // of an expert: before the activation; after W_down
    Site shared_out;                          // after W_down of the shared experts
    double attn_c, attn_a, ffn_c, ffn_a;      // what multiplies u and the skip
    double gate_scale;                        // factor of the gates: --router-scale, SDD's share
    int moe;                                  // this layer has experts
    int F;                                    // width of the dense ffn or shared experts; 0: none
    int out_anywhere;                         // some layer of the model has an out slot
} LayerMode;

// The factor c or a of a sublayer of layer l.
static inline double mode_scale(int kind, int l, int L) {
    if (kind == LNS) return 1.0 / sqrt(l + 1.0);
    if (kind == SUBLAYERS) return 2.0 * L;    // Keel: its L counts attention and ffn layers
    return kind == DEEP ? pow(2.0 * L, 0.25) : 1.0;
}

// shared: the groups share one gain vector. norm: the model's, NORM_*. L2 has no gain; x / |x| is
// the RMS norm / sqrt(width).
static inline Site site_make(int on, int groups, int width, int shared, int norm, double gain) {
    int bias = on == 1 && norm != NORM_RMS, kind = on == 1 && norm == NORM_DYT ? DYT : on;
    Site s = {kind, groups, width, shared ? width : groups * width, bias, gain, 1.0};
    if (on == L2) {
        s.gains = 0;
        s.scale = 1 / sqrt((double)width);
    }
    return s;
}

// A site over the C channels of the stream. sdd: the site is the norm of one of SDD's linears, RMS
// in any model; NULL: it is not.
static inline Site site_wide(const Model *m, int on, const Sdd *sdd) {
    double gain = sdd ? 1.0 / sqrt((double)sdd->out_layers * m->L) : 1.0;
    return site_make(on, 1, m->C, 1, sdd ? NORM_RMS : m->norm, gain);
}

// The norm of q, k, v or the context: one group per head, or one over the full width.
static inline Site site_heads(int on, int per, int heads, int HS, int norm) {
    int groups = per == FULL ? 1 : heads;
    return site_make(on, groups, heads / groups * HS, 1, norm, 1.0);
}

// nGPT: a gain that starts at 1 is kept as a parameter w that starts at `stored`, times a constant.
// AdamW moves w by about the learning rate, so the gain moves by lr / stored.
static inline void site_stored(Site *s, int gains, double stored) {
    s->gains = gains;
    s->gain = stored;
    s->scale *= 1 / stored;
}

// SDD's norm or nGPT's gain of [gate | up], or of up alone, before the activation. F: the width of
// this layer's ffn of that kind; 0: it has none. fused: one statistic over gate and up together.
static inline Site site_hidden(const Model *m, int F, int fused) {
    int halves = m->swiglu && !fused ? 2 : 1, hidden = m->swiglu ? 2 * F : F;
    int on = m->mode->unit ? SCALE : m->mode->sdd;
    Site s = site_make(F ? on : 0, halves, hidden / halves, 0, 0, 1.0);
    if (m->mode->unit) s.scale = sqrt((double)m->C);
    return s;
}

static inline int mode_has_out(const Mode *r) { return r->attn.out || r->ffn.out; }

// alpha * rmsnorm(V x) is a linear followed by an RMSNorm with a gain, so SDD fills the slots of q,
// k, v and out, and those inside the ffn.
static inline LayerMode layer_mode(const Model *m, int l) {
    const Mode *base = m->mode, *r = base;    // the row of the model, and of layer l
    if (base->first && l == 0) r = &MODES[base->first];
    if (base->early && l < (int)floor(m->mix_ratio * m->L + 1e-9)) r = &MODES[base->early];
    const Sdd *sdd = base->sdd ? m->sdd : NULL;
    int inner = sdd ? NORM_RMS : m->norm;  // SDD's linears have RMS in any model
    int per = sdd ? sdd->per : r->per, v_per = sdd ? FULL : r->per, QK = qk_size(m);
    double root = sqrt((double)m->C);
    LayerMode p;
    p.row = r;
    p.moe = m->moe.E && l >= m->moe.dense;
    p.F = m->moe.E ? m->moe.dense_F : m->F;
    if (p.moe) p.F = m->moe.shared_F;
    p.emb       = site_wide(m, base->emb, NULL);
    p.attn_in   = site_wide(m, r->attn.in, NULL);
    p.attn_out  = site_wide(m, sdd ? 1 : r->attn.out, sdd);
    p.attn_post = site_wide(m, r->attn.post, NULL);
    p.ffn_in    = site_wide(m, r->ffn.in, NULL);
    p.ffn_out   = site_wide(m, sdd ? !p.moe : r->ffn.out, sdd);
    p.ffn_post  = site_wide(m, r->ffn.post, NULL);
    p.fin       = site_wide(m, m->fin, NULL);
    p.latent    = site_make(m->kv_rank > 0, 1, m->kv_rank, 1, m->norm, 1.0);
    p.logits    = site_make(base->unit ? SCALE : 0, 1, m->Vp, 1, 0, 1.0);
    p.q   = site_heads(sdd ? 1 : r->q, per, m->NH, QK, inner);
    p.k   = site_heads(sdd ? 1 : r->k, per, m->KV, QK, inner);
    p.v   = site_heads(sdd ? sdd->v : r->v, v_per, m->KV, m->HS, inner);
    p.ctx = site_heads(sdd ? !sdd->v : r->ctx, v_per, m->NH, m->HS, inner);
    if (r->q == L2) site_stored(&p.q, m->NH * QK, 1 / root);   // nGPT's s_qk, which k shares
    if (r->k == L2) site_stored(&p.k, 0, 1 / root);
    if (base->unit) site_stored(&p.logits, m->Vp, 1 / root);   // s_z
    p.hidden        = site_hidden(m, p.F, sdd && sdd->fused && !p.moe);  // nGPT's s_uv
    p.expert_hidden = site_hidden(m, p.moe ? m->F : 0, 0);
    p.expert_out    = site_wide(m, sdd && p.moe, sdd);
    p.shared_out    = site_wide(m, sdd && p.moe && p.F, sdd);
    p.gate_scale = m->moe.scale;
    if (sdd && sdd->share && p.moe) p.gate_scale *= (double)m->F / m->moe.E;
    p.out_anywhere = sdd || mode_has_out(base) || mode_has_out(&MODES[base->first]) ||
                     mode_has_out(&MODES[base->early]);
    p.attn_c = mode_scale(r->attn.c, l, m->L);
    p.attn_a = mode_scale(r->attn.a, l, m->L);
    p.ffn_c  = mode_scale(r->ffn.c, l, m->L);
    p.ffn_a  = mode_scale(r->ffn.a, l, m->L);
    return p;
}
