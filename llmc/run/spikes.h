// spikes.h: what a run notices about itself: spikes of the loss and of the gradient norm, and the steps before them.
//
// A spike is a value far above the ones before it, by the robust z-score (Iglewicz, Hoaglin 1993): z = (x - median) / (1.4826 MAD), MAD the median of
// |x - median|, over the last values that were no spikes themselves, so that a spike does not raise the bar for the next one. Where the window is nearly constant its
// spread counts as a thousandth of the median. Many spikes in a row are a new level: the window begins anew.
#pragma once
#include <math.h>
#include "trainer.h"

enum { SPIKE_WINDOW = 128, SPIKE_ENOUGH = 64, SPIKES_IN_A_ROW = 10 };           // values kept; needed before one is judged; spikes that are a new level

typedef struct SpikeWindow { double values[SPIKE_WINDOW]; int count, row; } SpikeWindow;    // the oldest first; row: spikes since the last other value

static inline int spike_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double spike_median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, spike_compare);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

// Median and spread of the window; false where it holds too little to judge by.
static inline bool spike_level(const SpikeWindow *w, double *median, double *spread) {
    double x[SPIKE_WINDOW];
    *median = *spread = 0;
    if (w->count < SPIKE_ENOUGH) return false;
    memcpy(x, w->values, (size_t)w->count * sizeof *x);
    *median = spike_median(x, w->count);
    for (int i = 0; i < w->count; i++) x[i] = fabs(w->values[i] - *median);
    *spread = fmax(1.4826 * spike_median(x, w->count), 1e-3 * fabs(*median));
    return true;
}

// The z-score of x, 0 where there is too little to judge by.
static inline double spike_z(const SpikeWindow *w, double x) {
    double median, spread;
    return spike_level(w, &median, &spread) ? (x - median) / spread : 0;
}

// The largest value that is no spike at this z; 0, no limit, where there is too little to judge by.
static inline double spike_limit(const SpikeWindow *w, double most) {
    double median, spread;
    return spike_level(w, &median, &spread) ? median + most * spread : 0;
}

// After a step: x enters the window unless it is a spike. Values that are not finite never do.
static inline void spike_add(SpikeWindow *w, double x, bool spike) {
    if (!isfinite(x)) return;
    w->row = spike ? w->row + 1 : 0;
    if (w->row >= SPIKES_IN_A_ROW) w->count = w->row = 0;
    if (spike && w->row) return;
    if (w->count == SPIKE_WINDOW) memmove(w->values, w->values + 1, (size_t)--w->count * sizeof *w->values);
    w->values[w->count++] = x;
}
