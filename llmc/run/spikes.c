// spikes.c: see spikes.h.
#include "spikes.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// The middle value, or the mean of the two in the middle.
double spike_median(double *x, int n) {
    qsort(x, n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

double spike_level(const SpikeWindow *w) {
    double x[SPIKE_WINDOW];
    memcpy(x, w->values, sizeof x);
    return spike_median(x, w->count);
}

// The distance from the median that has z-score 1. For a normal distribution 1.4826 MAD is its
// standard deviation.
static double window_spread(const SpikeWindow *w, double median) {
    double x[SPIKE_WINDOW];
    for (int i = 0; i < w->count; i++) x[i] = fabs(w->values[i] - median);
    return fmax(1.4826 * spike_median(x, w->count), 1e-3 * fabs(median));
}

double spike_z(const SpikeWindow *w, double x) {
    if (w->count < SPIKE_ENOUGH) return 0;
    double median = spike_level(w);
    return (x - median) / window_spread(w, median);
}

// The inverse of spike_z. An update above it is skipped (--skip-spikes).
double spike_limit(const SpikeWindow *w, double z) {
    if (w->count < SPIKE_ENOUGH) return 0;
    double median = spike_level(w);
    return median + z * window_spread(w, median);
}

void spike_add(SpikeWindow *w, double x, bool spike) {
    if (!isfinite(x)) return;
    // A spike stays out of the window, but the last of many in a row begins a new one.
    w->in_a_row = spike ? w->in_a_row + 1 : 0;
    if (w->in_a_row >= SPIKES_IN_A_ROW) w->count = w->in_a_row = 0;  // a new level
    if (spike && w->in_a_row) return;
    // A full window drops its oldest value. Moving 1 KB once a step costs nothing.
    if (w->count == SPIKE_WINDOW) {
        w->count--;
        memmove(w->values, w->values + 1, w->count * sizeof *w->values);
    }
    w->values[w->count++] = x;
}
