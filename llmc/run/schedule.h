// schedule.h: the learning rate of a step (counted from 1) and its share for each group of tensors.
#pragma once
#include "flags.h"
#include "trainer.h"

enum { SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_LINEAR, SCHEDULE_CONSTANT };        // in the order of --schedule's choices

// The step at which the schedule ends.
static inline int64_t schedule_end(const Flags *f) { return f->schedule_steps ? f->schedule_steps : f->steps; }

// Linear warmup from lr / warmup to lr at step `warmup`; then, with p from 0 to 1 at the schedule's end and floor = min_lr:
//   cosine    floor + (1 - floor) (1 + cos(pi p)) / 2
//   linear    1 - (1 - floor) p
//   wsd       1 until the last decay_part of what follows the warmup, then linear to floor     (warmup, stable, decay: Hu et al. 2024)
//   constant  1
static inline double schedule_lr(const Flags *f, int64_t step) {
    if (step <= f->warmup) return f->lr * (double)step / (double)f->warmup;
    int64_t end = schedule_end(f);
    double p = end > f->warmup ? (double)(step - f->warmup) / (double)(end - f->warmup) : 1, factor = 1;
    if (p > 1) p = 1;
    if (f->schedule == SCHEDULE_COSINE) factor = f->min_lr + (1 - f->min_lr) * 0.5 * (1 + cos(3.14159265358979323846 * p));
    if (f->schedule == SCHEDULE_LINEAR) factor = 1 - (1 - f->min_lr) * p;
    if (f->schedule == SCHEDULE_WSD && p > 1 - f->decay_part) factor = 1 - (1 - f->min_lr) * (p - (1 - f->decay_part)) / f->decay_part;
    return f->lr * (factor < f->min_lr ? f->min_lr : factor);                          // rounding must not end below the floor
}

// Width scaling (Everett et al. 2024, standard parameterization with Adam): matrices (head included) learn at (base / width)^power,
// embeddings and vectors at 1.
static inline double schedule_group(const Flags *f, int group) {
    if (!f->width_base || group == LR_EMBEDDING || group == LR_VECTOR) return 1;
    return pow((double)f->width_base / (double)f->width, f->width_power == WIDTH_POWER_1 ? 1 : 0.5);
}

// The optimizer's numbers for one update: rates and decays per group.
static inline AdamW schedule_adamw(const Flags *f, double lr, int64_t update) {
    AdamW o;
    for (int group = 0; group < LR_BALANCE; group++) o.lr[group] = lr * schedule_group(f, group);
    o.lr[LR_BALANCE] = f->balance_rate;
    o.decay[DECAY_MATRIX] = f->weight_decay;
    o.decay[DECAY_EMBEDDING] = f->decay_embeddings ? f->weight_decay : 0;
    o.decay[DECAY_GAIN] = f->decay_gains == GAINS_KEPT ? 0 : f->weight_decay;
    o.gain_target = f->decay_gains == GAINS_TO_ONE;
    o.beta1 = f->beta1;
    o.beta2 = f->beta2;
    o.eps = f->adam_eps;
    o.clip = f->clip;
    o.step = update;
    o.max_ce = o.max_norm = 0;
    return o;
}
