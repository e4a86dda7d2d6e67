// schedule.c: evaluates the rows of schedule.h.
#include "schedule.h"
#include <math.h>
#include "flags.h"

long long schedule_end(const Flags *f) { return f->schedule_steps ? f->schedule_steps : f->steps; }

// The rate as a part of its peak.
static double schedule_factor(int schedule, double p, double floor, double decay) {
    static const double PI = 3.14159265358979323846;
    switch (schedule) {
#define SCHEDULE_CASE(id, word, factor) case SCHEDULE_##id: return factor;
        SCHEDULE_TABLE(SCHEDULE_CASE)
#undef SCHEDULE_CASE
    }
    return 1;
}

double schedule_lr(const Flags *f, int64_t step) {
    // Step 1 has rate lr / warmup, not 0: no step is wasted.
    if (step <= f->warmup) return f->lr * (double)step / (double)f->warmup;
    int64_t end = schedule_end(f);
    double p = end > f->warmup ? (double)(step - f->warmup) / (double)(end - f->warmup) : 1;
    double factor = schedule_factor(f->schedule, p < 1 ? p : 1, f->min_lr, f->decay_part);
    return f->lr * (factor < f->min_lr ? f->min_lr : factor);   // rounding may end below the floor
}

// Everett et al. 2024, standard parameterization with Adam: matrices (the head included) learn at
// (base / width)^power, embeddings and vectors at 1.
double schedule_group(const Flags *f, int group) {
    if (!f->width_base || group == LR_EMBEDDING || group == LR_VECTOR) return 1;
    double power = f->width_power == WIDTH_POWER_1 ? 1 : 0.5;
    return pow((double)f->width_base / (double)f->width, power);
}

AdamW schedule_adamw(const Flags *f, double lr, int64_t update) {
    AdamW o;
    for (int group = 0; group < LR_BALANCE; group++) o.lr[group] = lr * schedule_group(f, group);
    // The selection bias moves by its own step, whatever the schedule.
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
    o.max_ce = o.max_norm = 0;                             // --skip-spikes sets them
    return o;
}
