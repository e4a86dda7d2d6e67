// spikes.c: see spikes.h.
#include "spikes.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double spike_median(double *x, int n) {
    qsort(x, n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

// Median and spread of the window; false while it is too short.
static bool window_level(const SpikeWindow *w, double *median, double *spread) {
    double x[SPIKE_WINDOW];
    *median = *spread = 0;
    if (w->count < SPIKE_ENOUGH) return false;
    memcpy(x, w->values, w->count * sizeof *x);
    *median = spike_median(x, w->count);
    for (int i = 0; i < w->count; i++) x[i] = fabs(w->values[i] - *median);
    *spread = fmax(1.4826 * spike_median(x, w->count), 1e-3 * fabs(*median));
    return true;
}

double spike_z(const SpikeWindow *w, double x) {
    double median, spread;
    return window_level(w, &median, &spread) ? (x - median) / spread : 0;
}

double spike_limit(const SpikeWindow *w, double z) {
    double median, spread;
    return window_level(w, &median, &spread) ? median + z * spread : 0;
}

void spike_add(SpikeWindow *w, double x, bool spike) {
    if (!isfinite(x)) return;
    w->row = spike ? w->row + 1 : 0;
    if (w->row >= SPIKES_IN_A_ROW) w->count = w->row = 0;     // a new level
    if (spike && w->row) return;
    if (w->count == SPIKE_WINDOW) {
        w->count--;
        memmove(w->values, w->values + 1, w->count * sizeof *w->values);
    }
    w->values[w->count++] = x;
}
