// experts_plain.cuh: the plain twin of the products of experts (llmc/moe.cuh): one product of the
// library for each expert, one after the other. The host must know how many rows each has: for
// tests and for timing.
#pragma once
#include "../../llmc/linear.cuh"
#include "../../llmc/moe.cuh"

// Calls product(rows of the expert, first row, offset of its weights) for each that has rows. W has
// one part.
template <typename F>
static inline void experts_plain(const int32_t *start, ExpertShape s, F product) {
    for (int e = 0; e < s.E; e++)
        if (start[e + 1] > start[e])
            product(LinearShape{start[e + 1] - start[e], s.width, s.in, s.c}, (int64_t)start[e],
                    (int64_t)e * s.width * s.in);
}

static inline void experts_plain_forward(real *y, const real *x, const real *w,
                                         const int32_t *start, ExpertShape s, Gpu *gpu) {
    experts_plain(start, s, [=](LinearShape f, int64_t row, int64_t at) {
        linear_forward(y + row * f.out, x + row * f.in, w + at, nullptr, nullptr, 0, f, gpu);
    });
}

static inline void experts_plain_backward_input(real *dx, const real *dy, const real *w,
                                                const int32_t *start, ExpertShape s, Gpu *gpu) {
    experts_plain(start, s, [=](LinearShape f, int64_t row, int64_t at) {
        linear_backward_input(dx + row * f.in, dy + row * f.out, w + at, nullptr, 0, 1, f, gpu);
    });
}

static inline void experts_plain_backward_weight(wide *dw, const real *dy, const real *x,
                                                 const int32_t *start, ExpertShape s, Gpu *gpu) {
    experts_plain(start, s, [=](LinearShape f, int64_t row, int64_t at) {
        linear_backward_weight(dw + at, nullptr, dy + row * f.out, x + row * f.in, 1, f, gpu);
    });
}
