// init.h: the initial values of parameters. A scheme is one row; the standard deviation of a tensor
// follows from the scheme, the tensor's role (tensors.h) and its layer.
//
// The normal number behind element i of a tensor is a function of (seed, tensor name, i) alone:
// under one scheme two placements, two precisions and two devices share every common weight. (NGPT
// then normalizes them, and SDD's released setting multiplies sigma.) Gains start at 1, or as
// modes.h says; biases at 0.
#pragma once
#include "memory.h"
#include "rand.h"

// INIT(id, word, sigma, out, head, beta, cut, source). Expressions may use the model's C and L, the
// layer l and sigma.
//   sigma   standard deviation of all matrices but the two kinds below; 0.784 / sqrt(C) is 0.02 at
//           C = 1536, 1 / sqrt(2.5 C) is sqrt(2 / (5 C)) of Nguyen and Salazar 2019
//   out     standard deviation of output projections, which write to the residual stream
//   head    standard deviation of an untied LM head
//   beta    multiplies the deviation of v, gate, up and output projections (DeepNorm)
//   cut     normals beyond this many deviations are drawn again; 0: never
#define INIT_TABLE(INIT) \
INIT(NORMAL,   "normal",   1 / sqrt(2.5 * C), sigma,                       sigma, 1, 3, \
     "HybridNorm appendix; SDD") \
INIT(DEPTH,    "depth",    1 / sqrt(2.5 * C), sigma / sqrt(2.0 * (l + 1)), sigma, 1, 3, \
     "HybridNorm: Depth-Scaled") \
INIT(MEGATRON, "megatron", 1 / sqrt(2.5 * C), sigma / sqrt(2.0 * L), 1 / sqrt(C), 1, 3, \
     "HybridNorm: full_megatron") \
INIT(SCALE,    "scale",    0.784 / sqrt(C),   sigma / sqrt(2.0 * L),       sigma, 1, 0, \
     "SpanNorm: Scale Init (Megatron-LM)") \
INIT(SCALE_RECIPE, "scale-recipe", 0.784 / sqrt(C), sigma / sqrt(L),       sigma, 1, 0, \
     "SpanNorm: the recipe's sigma / sqrt(L)") \
INIT(GLOBAL,   "global",   0.784 / sqrt(C),   sigma,                       sigma, 1, 0, \
     "SpanNorm: Global Init") \
INIT(OLMO,     "olmo",     0.02,              sigma,                       sigma, 1, 3, \
     "OLMo 2") \
INIT(DEEPNORM, "deepnorm", 1 / sqrt(2.5 * C), sigma,       sigma, pow(8.0 * L, -0.25), 3, \
     "DeepNorm: beta = (8 L)^(-1/4)")

// INIT_NORMAL, INIT_DEPTH, ...: indices into INITS.
#define INIT_ENUM(id, ...) INIT_##id,
enum { INIT_TABLE(INIT_ENUM) INIT_COUNT };

typedef struct {
    const char *name, *source;                // the word of --init; the paper
    double cut;                               // of the normal distribution, in deviations; 0: none
} InitScheme;
#define INIT_ROW(id, word, sigma, out, head, beta, cut, source) {word, source, cut},
static const InitScheme INITS[] = {INIT_TABLE(INIT_ROW)};

typedef struct {
    int scheme;                               // INIT_*
    double sigma;                             // --init-std; 0: the scheme's own
    uint64_t seed;
} Init;

// The scheme of this name; INIT_COUNT: none.
static inline int init_find(const char *name) {
    int i = 0;
    while (i < INIT_COUNT && strcmp(INITS[i].name, name)) i++;
    return i;
}

// The base sigma. SDD's released setting multiplies it by 0.1.
static inline double init_sigma(const Init *init, const Model *m) {
    double C = m->C, factor = m->mode->sdd ? m->sdd->std : 1.0;
#define INIT_SIGMA(id, word, sigma, ...) sigma,
    const double own[] = {INIT_TABLE(INIT_SIGMA)};
    return (init->sigma > 0 ? init->sigma : own[init->scheme]) * factor;
}

// The standard deviation of a matrix.
static inline double init_std(const Init *init, const Model *m, const Entry *e) {
    const double C = m->C, L = m->L, l = e->layer, sigma = init_sigma(init, m);
#define INIT_EVAL(id, word, own, out, head, beta, ...) {out, head, beta},
    const struct { double out, head, beta; } all[] = {INIT_TABLE(INIT_EVAL)}, s = all[init->scheme];
    switch (e->row.role) {
        case ROLE_HEAD:   return m->mode->sdd && m->sdd->head ? 1 / sqrt(C) : s.head;
        case ROLE_VALUE:
        case ROLE_FFN_IN: return sigma * s.beta;
        case ROLE_OUT:    return s.out * s.beta;
        default:          return sigma;
    }
}

// A tensor's stream of random numbers depends on its name and the seed, and on nothing else.
static inline uint64_t init_key(const Init *init, const Entry *e) {
    return rand_key(init->seed, e->name, 0);
}

// The initial value of element i of a tensor. Rows of the padded vocabulary beyond V are zero.
static inline double init_value(const Init *init, const Model *m, const Entry *e, double std,
                                uint64_t key, int64_t i) {
    double cut = INITS[init->scheme].cut;
    if (i >= entry_rows(m, e) * e->row.cols) return 0;
    if (e->row.role >= ROLE_ZERO) return e->row.gain;  // 0 for biases
    return std * (cut ? rand_truncated(key, (uint64_t)i, cut) : rand_normal(key, (uint64_t)i));
}
