// experts_plain.cuh: the plain twin of the products of experts (llmc/moe.cuh): one product of the
// library for each expert, one after the other. The host must know how many rows each has: for
// tests and for timing.
#pragma once
#include "../../llmc/linear.cuh"
#include "../../llmc/moe.cuh"

// Calls product(matrix of the expert, its first row) for each that has rows. W has one part.
template <typename F>
static inline void experts_plain(const int32_t *start, const Experts &e, F product) {
    for (int expert = 0; expert < e.E; expert++) {
        int64_t row = start[expert], at = (int64_t)expert * e.width * e.in;
        if (start[expert + 1] > row)
            product(Linear{e.w + at, nullptr, e.dw + at, nullptr, start[expert + 1] - row, e.width,
                           e.in, e.c, e.to_dw}, row);
    }
}

static inline void experts_plain_forward(real *y, const real *x, const int32_t *start,
                                         const Experts &e, Gpu *gpu) {
    experts_plain(start, e, [=](const Linear &l, int64_t row) {
        linear_forward(y + row * l.out, x + row * l.in, l, {}, gpu);
    });
}

static inline void experts_plain_backward_input(real *dx, const real *dy, const int32_t *start,
                                                const Experts &e, Gpu *gpu) {
    experts_plain(start, e, [=](const Linear &l, int64_t row) {
        linear_backward_input(dx + row * l.in, dy + row * l.out, l, {}, gpu);
    });
}

static inline void experts_plain_backward_weight(const real *dy, const real *x,
                                                 const int32_t *start, const Experts &e, Gpu *gpu) {
    experts_plain(start, e, [=](const Linear &l, int64_t row) {
        linear_backward_weight(dy + row * l.out, x + row * l.in, l, gpu);
    });
}
