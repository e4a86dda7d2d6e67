// init.h: how parameters start. A scheme is a row; the deviation of a tensor follows from the scheme, the tensor's class and the layer.
//
// Element i of a tensor is a function of (scheme, seed, tensor name, i) alone: under one scheme two placements, two precisions and two devices share every
// common weight (but NGPT then normalizes them, and SDD's released setting multiplies sigma). Gains start at 1 (or as modes.h says), biases at 0.
#pragma once
#include "memory.h"
#include "rand.h"

// A new one is a word in flags.h (init, init_baseline), a constant in modes.h and a row here, in the same place of each.
enum { SIGMA_WIDTH_2_5, SIGMA_SPAN, SIGMA_002 };                     // default base: 1/sqrt(2.5 d) | 0.784/sqrt(d), that is 0.02 at d = 1536 | 0.02
enum { OUT_SAME, OUT_BY_LAYER, OUT_BY_DEPTH, OUT_RECIPE };           // output projections: sigma | /sqrt(2(l+1)) | /sqrt(2L) | /sqrt(L)
enum { HEAD_SAME, HEAD_WIDTH };                                      // untied head: sigma | 1/sqrt(d)

// INIT(scheme, name, base sigma, output projections, head, cut at 3 sigma, DeepNorm's beta on v o gate up down, source)
#define INIT_TABLE(INIT) \
INIT(INIT_NORMAL,       "normal",       SIGMA_WIDTH_2_5, OUT_SAME,     HEAD_SAME,  1, 0, "HybridNorm appendix; SDD") \
INIT(INIT_DEPTH,        "depth",        SIGMA_WIDTH_2_5, OUT_BY_LAYER, HEAD_SAME,  1, 0, "HybridNorm: Depth-Scaled") \
INIT(INIT_MEGATRON,     "megatron",     SIGMA_WIDTH_2_5, OUT_BY_DEPTH, HEAD_WIDTH, 1, 0, "HybridNorm: full_megatron") \
INIT(INIT_SCALE,        "scale",        SIGMA_SPAN,      OUT_BY_DEPTH, HEAD_SAME,  0, 0, "SpanNorm: Scale Init (Megatron-LM)") \
INIT(INIT_SCALE_RECIPE, "scale-recipe", SIGMA_SPAN,      OUT_RECIPE,   HEAD_SAME,  0, 0, "SpanNorm: the recipe's sigma/sqrt(L)") \
INIT(INIT_GLOBAL,       "global",       SIGMA_SPAN,      OUT_SAME,     HEAD_SAME,  0, 0, "SpanNorm: Global Init") \
INIT(INIT_OLMO,         "olmo",         SIGMA_002,       OUT_SAME,     HEAD_SAME,  1, 0, "OLMo 2") \
INIT(INIT_DEEPNORM,     "deepnorm",     SIGMA_WIDTH_2_5, OUT_SAME,     HEAD_SAME,  1, 1, "DeepNorm: beta = (8L)^(-1/4)")

typedef struct { const char *name; int sigma, out, head, cut, beta; const char *source; } InitScheme;
#define INIT_ROW(scheme, ...) {__VA_ARGS__},
static const InitScheme INITS[INIT_COUNT] = { INIT_TABLE(INIT_ROW) };
#undef INIT_ROW

typedef struct { int scheme; double sigma; uint64_t seed; } Init;    // sigma 0: the scheme's own

// The base sigma: --init-std or the scheme's own; SDD's released setting multiplies it.
static inline double init_sigma(const Init *init, const Model *m) {
    int kind = INITS[init->scheme].sigma;
    double own = kind == SIGMA_WIDTH_2_5 ? 1 / sqrt(2.5 * m->C) : kind == SIGMA_SPAN ? 0.784 / sqrt(m->C) : 0.02;
    return (init->sigma > 0 ? init->sigma : own) * (m->mode->sdd ? m->sdd->std : 1.0);
}

// The standard deviation of a matrix.
static inline double init_std(const Init *init, const Model *m, const Entry *e) {
    const InitScheme *s = &INITS[init->scheme];
    double sigma = init_sigma(init, m), beta = s->beta ? pow(8.0 * m->L, -0.25) : 1.0;
    switch (e->row.init) {
        case ROLE_HEAD:   return s->head == HEAD_WIDTH || (m->mode->sdd && m->sdd->head) ? 1 / sqrt(m->C) : sigma;
        case ROLE_VALUE:
        case ROLE_FFN_IN: return sigma * beta;
        case ROLE_OUT:    return sigma * beta / (s->out == OUT_BY_LAYER ? sqrt(2.0 * (e->layer + 1)) : s->out == OUT_BY_DEPTH ? sqrt(2.0 * m->L)
                                                 : s->out == OUT_RECIPE ? sqrt(m->L) : 1.0);
        default:          return sigma;
    }
}

// The stream of a tensor's random numbers: its name and the seed, nothing else.
static inline uint64_t init_key(const Init *init, const Entry *e) { return rand_key(init->seed, e->name, 0); }

// The initial value of element i of a tensor. Rows of the padded vocabulary beyond V are zero.
static inline double init_value(const Init *init, const Model *m, const Entry *e, double std, uint64_t key, int64_t i) {
    if (e->row.init == ROLE_ZERO) return 0;
    if (i >= entry_rows(m, e) * e->row.cols) return 0;
    if (e->row.init == ROLE_GAIN) return e->row.gain;
    return std * (INITS[init->scheme].cut ? rand_truncated(key, (uint64_t)i, 3.0) : rand_normal(key, (uint64_t)i));
}
