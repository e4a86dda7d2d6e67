// schedule.c: evaluates the rows of schedule.h.
#include "schedule.h"
#include <math.h>
#include "flags.h"

long long schedule_end(const Flags *f) { return f->schedule_steps ? f->schedule_steps : f->steps; }

double schedule_lr(const Flags *f, int64_t step) {
    // Step 1 has rate lr / warmup, not 0: no step is wasted.
    if (step <= f->warmup) return f->lr * step / f->warmup;
    // A schedule that is over, or that the warmup fills, stays at its end.
    int64_t falling = schedule_end(f) - f->warmup;
    double p = falling > 0 ? fmin((double)(step - f->warmup) / falling, 1) : 1;
    double floor = f->min_lr, decay = f->decay_part;
#define SCHEDULE_FACTOR(id, word, factor) factor,
    const double factors[] = {SCHEDULE_TABLE(SCHEDULE_FACTOR)};
    return f->lr * fmax(factors[f->schedule], floor);   // rounding may end below the floor
}

// The factor of a group's rate (--width-base). Everett et al. 2024, standard parameterization with
// Adam: matrices (the head included) learn at (base / width)^power, embeddings and vectors at 1.
static double group_factor(const Flags *f, int group) {
    if (!f->width_base || group == LR_EMBEDDING || group == LR_VECTOR) return 1;
    double power = f->width_power == WIDTH_POWER_1 ? 1 : 0.5;
    return pow((double)f->width_base / f->width, power);
}

// Each group of tensors.h has its own rate and weight decay; all share the rest.
Optimizer schedule_optimizer(const Flags *f, double lr, int64_t update) {
    double decay = f->weight_decay;
    Optimizer o = {
        // The selection bias moves by its own step, whatever the schedule.
        .lr[LR_BALANCE] = f->balance_rate,
        .decay[DECAY_MATRIX] = decay,
        .decay[DECAY_EMBEDDING] = f->decay_embeddings ? decay : 0,
        .decay[DECAY_GAIN] = f->decay_gains == GAINS_KEPT ? 0 : decay,
        .gain_target = f->decay_gains == GAINS_TO_ONE,
        .beta1 = f->beta1,
        .beta2 = f->beta2,
        .eps = f->adam_eps,
        .clip = f->clip,
        .step = update,
        .muon_lr = f->muon_lr > 0 && f->lr > 0 ? lr / f->lr * f->muon_lr : lr,
        .momentum = f->muon_momentum,
        .muon_scale = f->muon_scale,
    };
    for (int group = 0; group < LR_BALANCE; group++) o.lr[group] = lr * group_factor(f, group);
    return o;
}
