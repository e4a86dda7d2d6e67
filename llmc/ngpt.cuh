// ngpt.cuh: the layers of nGPT (Loshchilov et al. 2024) whose stream is a vector of length 1: the
// interpolation in place of a residual, and gains without a norm. Norms of q and k: qkv.cuh; rows
// of weight matrices scaled to length 1: adamw.cuh.
//
//   interpolation (eq 10-11), L2(x) = x / |x|
//     forward    t = L2(y)    s = skip + alpha (t - skip)    z = L2(s)
//     backward   ds = L2'(dz; s)    dskip = (1 - alpha) ds    dy = L2'(alpha ds; y)
//                dp += 0.05 sqrt(C) sign(p) * sum over rows of ds (t - skip)
//     alpha_i = 0.05 sqrt(C) |p_i| for the learned p, which starts at 1/sqrt(C)
//
//   gain (SCALE in modes.h), g = scale w
//     forward    y = g x
//     backward   dx = g dy    dw += scale * sum over rows of dy x
//
//   y, skip, z      [n, C]
//   p               [C], dp in float
//   rstd of y, s    [n] float, saved for backward; s is not saved: its xhat is sqrt(C) z
//   w               [gains], or [experts, gains]
//
// With r = (mean(x^2) + eps)^(-1/2), xhat = x r and u = dy / sqrt(C):  L2(x) = xhat / sqrt(C) and
// L2'(dy; x) = r (u - xhat mean(u * xhat)). Teams, lines and partial sums are norm.cuh's.
//
// Values moved per value of a line, and the computed floor at 4.3 TB/s in bf16, n = 65536, C = 768:
//   interpolation   forward  3 (y, skip; z)                  0.070 ms
//                   backward 6 (dz, z, y, skip; dy, dskip)   0.141 ms
//   gain            forward  2 (x; y)                        0.047 ms
//                   backward 3 (dy, x; dx)                   0.070 ms
#pragma once
#include "norm.cuh"

// ---------------------------------------------------------------------------------- interpolation

// The norms of y (out) and of s (post) are L2 with one group and no gain. They save rstd.
struct Interpolation {
    const real *p;
    wide *dp;
    Norm out, post;
};

// d alpha / d |p|
static __device__ inline float alpha_slope(int C) { return 0.05f * sqrtf((float)C); }

template <typename TEAM>
static __global__ void __launch_bounds__(TEAM::BLOCK, 1)
interpolate_forward_kernel(real *z, const real *y, const real *skip, Interpolation f) {
    constexpr int N = TEAM::PACKS;
    int column[N], C = f.out.site.width;
    int64_t row = (int64_t)blockIdx.x * TEAM::TEAMS + threadIdx.x / TEAM::THREADS, at = row * C;
    float slope = alpha_slope(C), unit = (float)f.out.site.scale;
    Floats x[N];
    Bits other[N];
    line_columns<TEAM>(column, row < f.out.n ? C : 0);
    line_load(x, y + at, column);
    bits_line(other, skip + at, column);
    Moments m = line_moments<TEAM>(x, column, C, false, f.out.eps);
    UNROLL for (int i = 0; i < N; i++) {
        Floats p = bits_floats(bits_load(f.p, column[i])), skip_i = bits_floats(other[i]);
        for (int k = 0; k < PACK; k++) {
            float alpha = slope * fabsf(p.v[k]);
            x[i].v[k] = skip_i.v[k] + alpha * (unit * m.rstd * x[i].v[k] - skip_i.v[k]);
        }
    }
    if (column[0] == 0) f.out.rstd[row] = m.rstd;
    m = line_moments<TEAM>(x, column, C, false, f.post.eps);
    UNROLL for (int i = 0; i < N; i++)
        for (int k = 0; k < PACK; k++) x[i].v[k] *= unit * m.rstd;
    line_store(z + at, x, column);
    if (column[0] == 0) f.post.rstd[row] = m.rstd;
}

// z may be y or skip.
static inline void interpolate_forward(real *z, const real *y, const real *skip,
                                       const Interpolation *f, Gpu *gpu) {
    norm_launch(f->out.site.width, [&](auto team) {
        typedef decltype(team) TEAM;
        unsigned blocks = (unsigned)CEIL_DIV(f->out.n, TEAM::TEAMS);
        LAUNCH(interpolate_forward_kernel<TEAM>, blocks, TEAM::BLOCK, 0, gpu->stream, z, y, skip,
               *f);
    });
}

struct InterpolationArrays {
    real *dy, *dskip;
    const real *dz, *z, *y, *skip;
};

// ds = L2'(dz; s), in the registers of dz. xhat of s is z / unit.
template <typename TEAM, int N>
static __device__ inline void interpolate_ds(Bits (&ds)[N], Bits (&z)[N], float rstd, float unit,
                                             int C) {
    float dot = 0;  // of u and xhat
    UNROLL for (int i = 0; i < N; i++) {
        Floats dz_i = bits_floats(ds[i]), z_i = bits_floats(z[i]);
        for (int k = 0; k < PACK; k++) dot += dz_i.v[k] * z_i.v[k];
    }
    float mean = team_sum<TEAM>(dot) / C;
    unpack_again(ds);
    unpack_again(z);
    UNROLL for (int i = 0; i < N; i++) {
        Floats d = bits_floats(ds[i]), z_i = bits_floats(z[i]);
        for (int k = 0; k < PACK; k++) {
            d.v[k] = rstd * (unit * d.v[k] - z_i.v[k] / unit * mean);
        }
        ds[i] = bits_round(d);
    }
}

// Blocks are chunks as in norm_backward_kernel; partial: [chunks, C].
template <typename TEAM>
static __global__ void __launch_bounds__(TEAM::BLOCK, TEAM::PACKS <= 4 ? 2 : 1)
interpolate_backward_kernel(InterpolationArrays a, Interpolation f, float *partial) {
    constexpr int N = TEAM::PACKS;
    int column[N], C = f.out.site.width;
    float slope = alpha_slope(C), unit = (float)f.out.site.scale;
    GainSums sums = gains_begin<TEAM, N>(false);
    each_line<TEAM>({f.out.n, 1, C, nullptr}, [&](int64_t row, int width) {
        int64_t at = row * C;
        Bits ds[N], z[N], y[N];
        line_columns<TEAM>(column, width);
        bits_line(ds, a.dz + at, column);
        bits_line(z, a.z + at, column);
        bits_line(y, a.y + at, column);
        float rstd_s = column[0] >= 0 ? f.post.rstd[row] : 0;
        float rstd_y = column[0] >= 0 ? f.out.rstd[row] : 0;
        interpolate_ds<TEAM>(ds, z, rstd_s, unit, C);  // from here on ds, not dz
        float dot = 0;  // of u = alpha ds / sqrt(C) and xhat of y
        UNROLL for (int i = 0; i < N; i++) {
            Floats d = bits_floats(ds[i]), y_i = bits_floats(y[i]);
            Floats p = bits_floats(bits_load(f.p, column[i]));
            for (int k = 0; k < PACK; k++) {
                dot += unit * slope * fabsf(p.v[k]) * d.v[k] * (y_i.v[k] * rstd_y);
            }
        }
        float mean = team_sum<TEAM>(dot) / C;
        unpack_again(ds);
        unpack_again(y);
        UNROLL for (int i = 0; i < N; i++) {
            if (column[i] < 0) continue;
            Floats d = bits_floats(ds[i]), y_i = bits_floats(y[i]);
            Floats p = bits_floats(bits_load(f.p, column[i]));
            Floats skip = bits_floats(bits_load(a.skip + at, column[i])), dy, dskip;
            for (int q = 0; q < SUMS; q++) {
                Sum4 sum = sums.w[(i * SUMS + q) * TEAM::BLOCK];
                for (int j = 0; j < 4; j++) {
                    int k = q * 4 + j;
                    float alpha = slope * fabsf(p.v[k]), yhat = y_i.v[k] * rstd_y;
                    dy.v[k] = rstd_y * (unit * alpha * d.v[k] - yhat * mean);
                    dskip.v[k] = (1 - alpha) * d.v[k];
                    float signed_slope = p.v[k] < 0 ? -slope : slope;
                    sum.v[j] += signed_slope * d.v[k] * (unit * yhat - skip.v[k]);
                }
                sums.w[(i * SUMS + q) * TEAM::BLOCK] = sum;
            }
            pack_store(a.dy + at + column[i], pack_round(dy));
            pack_store(a.dskip + at + column[i], pack_round(dskip));
        }
    });
    line_columns<TEAM>(column, C);
    gains_store<TEAM>(partial + (int64_t)blockIdx.x * C, sums.w, column);
}

// SETs dy and dskip, ADDs to dp. Outputs may be inputs.
static inline void interpolate_backward(InterpolationArrays a, const Interpolation *f, Gpu *gpu) {
    int C = f->out.site.width, max_chunks = gain_chunks(C, C, gpu);
    norm_launch(C, [&](auto team) {
        typedef decltype(team) TEAM;
        int64_t blocks = CEIL_DIV(f->out.n, TEAM::TEAMS);
        int chunks = blocks < max_chunks ? (int)blocks : max_chunks;
        size_t shared = gains_bytes<TEAM, TEAM::PACKS>(false);
        PartialList list = {{{f->dp, gpu->scratch, C, chunks}}, 1};
        LAUNCH(interpolate_backward_kernel<TEAM>, chunks, TEAM::BLOCK, shared, gpu->stream, a, *f,
               gpu->scratch);
        partials_add(&list, gpu);
    });
}

// ------------------------------------------------------------------------------------------ gains
// n rows of site.gains values; a gain for each column, and with experts its own for each expert.
// A thread handles 16 bytes of columns in one chunk of the rows, with GAIN_LOADS loads in flight.

enum { GAIN_THREADS = 128, GAIN_LOADS = 4 };

struct GainSpan { int64_t first, end; };

// The grid is (part of the row, chunk, expert). Chunks have equal numbers of rows, and are as many
// as the partial sums have room for.
static inline dim3 gain_grid(const Norm *gain, Gpu *gpu) {
    int64_t gains = gain->site.gains, chunks = gain_chunks(gains, norm_gains(gain), gpu);
    int64_t rows = CEIL_DIV(gain->n, chunks);
    return dim3(CEIL_DIV(gains / PACK, GAIN_THREADS), CEIL_DIV(gain->n, rows), gain->experts);
}

// The rows of chunk blockIdx.y of expert blockIdx.z.
static __device__ inline GainSpan gain_span(const Norm &gain) {
    int64_t begin = gain.start ? gain.start[blockIdx.z] : 0;
    int64_t end = gain.start ? gain.start[blockIdx.z + 1] : gain.n;
    int64_t rows = CEIL_DIV(end - begin, (int64_t)gridDim.y);
    int64_t first = begin + blockIdx.y * rows;
    return {first, first + rows < end ? first + rows : end};
}

static __device__ inline int gain_column(void) {
    return (blockIdx.x * blockDim.x + threadIdx.x) * PACK;
}

// g = scale * w, the pack at column j.
static __device__ inline Floats gain_load(const Norm &gain, int j) {
    Floats g = pack_floats(pack_load(gain.w + (int64_t)blockIdx.z * gain.site.gains + j));
    for (int k = 0; k < PACK; k++) g.v[k] *= (float)gain.site.scale;
    return g;
}

// to = g from, for y = g x as for dx = g dy. Backward also needs the sums of dy x, in
// partial [chunks, experts, gains]; forward has neither x nor partial.
static __global__ void __launch_bounds__(GAIN_THREADS)
gain_kernel(real *to, const real *from, const real *x, Norm gain, float *partial) {
    int j = gain_column(), width = gain.site.gains;
    if (j >= width) return;
    auto [first, end] = gain_span(gain);
    Floats g = gain_load(gain, j), sum = {};
    for (int64_t i = first; i < end; i += GAIN_LOADS) {
        Bits load[GAIN_LOADS], load_x[GAIN_LOADS];
        UNROLL for (int l = 0; l < GAIN_LOADS; l++) {
            load[l] = bits_load(i + l < end ? from + (i + l) * width : nullptr, j);
            load_x[l] = bits_load(x && i + l < end ? x + (i + l) * width : nullptr, j);
        }
        UNROLL for (int l = 0; l < GAIN_LOADS; l++) {
            Floats v = bits_floats(load[l]), x_l = bits_floats(load_x[l]);
            for (int k = 0; k < PACK; k++) {
                sum.v[k] += v.v[k] * x_l.v[k];
                v.v[k] *= g.v[k];
            }
            if (i + l < end) pack_store(to + (i + l) * width + j, pack_round(v));
        }
    }
    if (!partial) return;
    partial += (blockIdx.y * (int64_t)gridDim.z + blockIdx.z) * width;
    for (int k = 0; k < PACK; k++) partial[j + k] = (float)gain.site.scale * sum.v[k];
}

// y may be x.
static inline void gain_forward(real *y, const real *x, const Norm *gain, Gpu *gpu) {
    LAUNCH(gain_kernel, gain_grid(gain, gpu), GAIN_THREADS, 0, gpu->stream, y, x, nullptr, *gain,
           nullptr);
}

// SETs dx, which may be dy, and ADDs to gain->dw.
static inline void gain_backward(real *dx, const real *dy, const real *x, const Norm *gain,
                                 Gpu *gpu) {
    dim3 grid = gain_grid(gain, gpu);
    PartialList list = {{{gain->dw, gpu->scratch, norm_gains(gain), (int)grid.y}}, 1};
    LAUNCH(gain_kernel, grid, GAIN_THREADS, 0, gpu->stream, dx, dy, x, *gain, gpu->scratch);
    partials_add(&list, gpu);
}
