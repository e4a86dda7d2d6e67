// schedule.h: the learning rate schedule, and the optimizer's numbers for one update.
#pragma once
#include "trainer.h"

typedef struct Flags Flags;                   // flags.h, whose choices are rows of this table

// Linear warmup raises the rate from lr / warmup at step 1 to lr at step `warmup`. From there to
// the schedule's end, p goes from 0 to 1 and the rate is lr * factor, at least lr * floor.
// floor: --min-lr; decay: --decay-part.
//   SCHEDULE(id, word, factor)
#define SCHEDULE_TABLE(SCHEDULE) \
SCHEDULE(COSINE,   "cosine",   floor + (1 - floor) * 0.5 * (1 + cos(M_PI * p))) \
SCHEDULE(WSD,      "wsd",      p > 1 - decay ? 1 - (1 - floor) * (p - (1 - decay)) / decay : 1) \
SCHEDULE(LINEAR,   "linear",   1 - (1 - floor) * p) \
SCHEDULE(CONSTANT, "constant", 1)
// wsd: warmup, stable, decay (Hu et al. 2024).
#define SCHEDULE_ENUM(id, ...) SCHEDULE_##id,
enum { SCHEDULE_TABLE(SCHEDULE_ENUM) };

// The step at which the schedule ends.
long long schedule_end(const Flags *f);
// The learning rate of a step, counted from 1.
double schedule_lr(const Flags *f, int64_t step);
// The settings of update number `update` at the learning rate lr; no limits of --skip-spikes.
Optimizer schedule_optimizer(const Flags *f, double lr, int64_t update);
