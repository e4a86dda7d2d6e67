// model.h: weights, tokens and comparisons of whole models, for the tests of the judge and of the
// CUDA trainer.
#pragma once
#include "../../llmc/init.h"
#include "../../llmc/run/trainer.h"

// The value as a weight of `storage` bytes holds it: 2 is bfloat16, rounded to nearest even.
static inline double stored(double value, size_t storage) {
    float f = (float)value;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (storage == 2) bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// Weights far from the initial ones: gains and DyT's alphas around theirs, biases around 0, or a
// missing one would not show. All precisions get the same numbers, those that a weight of `storage`
// bytes can hold.
static inline void fill_weights(const Trainer *t, Gpt *g, const Layout *layout, uint64_t seed,
                                size_t storage) {
    for (int k = 0; k < layout->count; k++) {
        const Entry *e = &layout->entries[k];
        uint64_t key = rand_key(seed, e->name, 0);
        double std = e->row.rows == 1                ? 0.3
                     : e->row.role == ROLE_EMBEDDING ? 0.5
                                                     : 1.2 / sqrt((double)e->row.cols);
        for (int64_t i = 0; i < e->size; i++) {
            double w = stored(e->row.gain != 0
                                  ? e->row.gain * (1 + 0.3 * rand_normal(key, (uint64_t)i))
                                  : std * rand_normal(key, (uint64_t)i),
                              storage);
            if (t->element == sizeof(float)) ((float *)t->tensor(g, WEIGHTS, e))[i] = (float)w;
            else ((double *)t->tensor(g, WEIGHTS, e))[i] = w;
        }
    }
    t->store(g, WEIGHTS, 0);
}

// What train.c logs of a layer: the stream's RMS, ratios of attention and ffn, the largest logit.
static inline void layer_figures(double figures[4], const LayerStats *s, int C) {
    const double *x = s->sums.squares;
    figures[0] = sqrt(x[STREAM] / (s->tokens * C));
    figures[1] = sqrt(x[ATTN_BRANCH] / x[ATTN_SKIP]);
    figures[2] = sqrt(x[FFN_BRANCH] / x[FFN_SKIP]);
    figures[3] = s->sums.logit;
}

// Tokens that repeat, as real ones do.
static inline void fill_tokens(int32_t *inputs, int32_t *targets, int n, int V, uint64_t seed) {
    for (int i = 0; i < n; i++) {
        inputs[i] = (int32_t)(rand_at(seed, (uint64_t)i) % (uint64_t)(V - 3));
        targets[i] = (int32_t)(rand_at(seed + 1, (uint64_t)i) % (uint64_t)V);
    }
}

static inline double entry_value(const Trainer *t, Gpt *g, int kind, const Entry *e, int64_t i) {
    void *p = t->tensor(g, kind, e);
    return t->element == sizeof(float) ? ((float *)p)[i] : ((double *)p)[i];
}

// L2 norm of all gradients together.
static inline double grads_norm(const Trainer *t, Gpt *g, const Layout *layout) {
    double square = 0;
    for (int k = 0; k < layout->count; k++)
        for (int64_t i = 0; i < layout->entries[k].size; i++)
            square += pow(entry_value(t, g, GRADS, &layout->entries[k], i), 2);
    return sqrt(square);
}

// Normalized error of one tensor: |a - b|^2 / max(|b|^2, floor).
static inline double entry_nmse(const Trainer *ta, Gpt *a, const Trainer *tb, Gpt *b, int kind,
                                const Entry *e, double floor) {
    double error = 0, scale = 0;
    for (int64_t i = 0; i < e->size; i++) {
        double x = entry_value(ta, a, kind, e, i), y = entry_value(tb, b, kind, e, i);
        error += (x - y) * (x - y);
        scale += y * y;
    }
    return error / fmax(scale, floor);
}
