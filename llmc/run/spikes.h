// spikes.h: detects spikes of the loss and of the gradient norm.
//
// A spike is a value far above those before it, by the robust z-score (Iglewicz, Hoaglin 1993):
//
//   z = (x - median) / (1.4826 MAD),   MAD = median of |x - median|
//
// over a window of the last values. Spikes do not enter the window, so that one spike does not hide
// the next. The denominator is at least a thousandth of the median, so that a nearly constant
// window does not make a spike of every small step. Many spikes in a row are a new level: the
// window starts again.
#pragma once
#include <stdbool.h>

enum { SPIKE_WINDOW = 128 };              // values in a window
enum { SPIKE_ENOUGH = 64 };               // values before the first z-score
enum { SPIKES_IN_A_ROW = 10 };            // this many spikes in a row are a new level

typedef struct {
    double values[SPIKE_WINDOW];          // the oldest first
    int count;                            // values in use
    int in_a_row;                         // spikes since the last value that was not one
} SpikeWindow;

double spike_median(double *x, int n);                        // sorts x
double spike_level(const SpikeWindow *w);                     // the median of its values
double spike_z(const SpikeWindow *w, double x);               // 0 while the window is too short
double spike_limit(const SpikeWindow *w, double z);           // value of this z-score; 0: none
void spike_add(SpikeWindow *w, double x, bool spike);         // ignores values that are not finite
