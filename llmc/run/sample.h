// sample.h: the next token from its logits.
#pragma once
#include "../rand.h"

// Softmax with temperature over the V logits, or over the k largest (k = 0: all; ties with the k-th stay in). temperature 0 takes the largest.
// weights is scratch of 2 V; u is uniform in [0, 1).
static inline int sample_token(const double *logits, int V, double temperature, int64_t k, double u, double *weights) {
    int best = 0;
    for (int i = 1; i < V; i++) if (logits[i] > logits[best]) best = i;
    if (temperature == 0) return best;
    double least = -INFINITY, sum = 0, *sorted = weights + V;
    if (k > 0 && k < V) {                                  // the k-th largest, by keeping the k largest in order
        int have = 0;
        for (int i = 0; i < V; i++) {
            int at = have < k ? have++ : (int)k - 1;
            if (at == k - 1 && have == k && i >= k && logits[i] <= sorted[at]) continue;
            for (; at > 0 && sorted[at - 1] < logits[i]; at--) sorted[at] = sorted[at - 1];
            sorted[at] = logits[i];
        }
        least = sorted[k - 1];
    }
    for (int i = 0; i < V; i++) sum += weights[i] = logits[i] < least ? 0 : exp((logits[i] - logits[best]) / temperature);
    for (int i = 0; i < V; i++) {
        u -= weights[i] / sum;
        if (u < 0) return i;
    }
    return best;                                           // rounding left u just above the last weight
}
