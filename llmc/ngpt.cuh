// ngpt.cuh: the layers of nGPT (Loshchilov et al. 2024) whose stream is a vector of length 1: the
// interpolation in place of a residual, and gains without a norm. Norms of q and k: qkv.cuh; rows
// of weight matrices scaled to length 1: adamw.cuh.
//
//   interpolation (eq 10-11), L2(x) = x / |x|; y is the branch's output, z the sublayer's
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
//   rstd of y, s    [n] float, saved for backward, which also reads y, skip and z; s is not saved:
//                   its xhat is sqrt(C) z
//   w               [gains], or [experts, gains]
//
// With r = (mean(x^2) + eps)^(-1/2), xhat = x r and u = dy / sqrt(C):  L2(x) = xhat / sqrt(C) and
// L2'(dy; x) = r (u - xhat mean(u * xhat)). Teams, lines and partial sums are norm.cuh's.
//
// Values moved per value of a line, and the computed floor (gpu.cuh) in bf16, n = 65536, C = 768:
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
__device__ inline float alpha_slope(int C) { return 0.05f * sqrtf((float)C); }

template <typename TEAM>
__global__ void __launch_bounds__(TEAM::BLOCK, 1)
interpolate_forward_kernel(real *z, const real *y, const real *skip, Interpolation f) {
    constexpr int N = TEAM::PACKS;
    int column[N], C = f.out.site.width;
    int64_t row = (int64_t)blockIdx.x * TEAM::TEAMS + threadIdx.x / TEAM::THREADS, at = row * C;
    float slope = alpha_slope(C), unit = (float)f.out.site.scale;
    Floats x[N];
    Pack other[N];
    line_columns<TEAM>(column, row < f.out.n ? C : 0);
    line_load(x, y + at, column);
    pack_line(other, skip + at, column);
    Moments m = line_moments<TEAM>(x, column, C, false, f.out.eps);
    UNROLL for (int i = 0; i < N; i++) {
        Floats p = floats_load(f.p, column[i]), skip_i = pack_floats(other[i]);
        for (int k = 0; k < PACK; k++) {
            float alpha = slope * fabsf(p.v[k]);
            x[i].v[k] = skip_i.v[k] + alpha * (unit * m.rstd * x[i].v[k] - skip_i.v[k]);
        }
    }
    if (column[0] == 0) f.out.rstd[row] = m.rstd;
    m = line_moments<TEAM>(x, column, C, false, f.post.eps);
    UNROLL for (int i = 0; i < N; i++) x[i] = unit * m.rstd * x[i];
    line_store(z + at, x, column);
    if (column[0] == 0) f.post.rstd[row] = m.rstd;
}

// z may be y or skip.
static inline void interpolate_forward(real *z, const real *y, const real *skip,
                                       const Interpolation *f, Gpu *gpu) {
    norm_launch(f->out.site.width, [&](auto team) {
        typedef decltype(team) TEAM;
        LAUNCH(interpolate_forward_kernel<TEAM>, CEIL_DIV(f->out.n, TEAM::TEAMS), TEAM::BLOCK, 0,
               gpu->stream, z, y, skip, *f);
    });
}

struct InterpolationArrays {
    real *dy, *dskip;
    const real *dz, *z, *y, *skip;
};

// ds = L2'(dz; s), in the registers of dz. xhat of s is z / unit.
template <typename TEAM, int N>
__device__ void interpolate_ds(Pack (&ds)[N], Pack (&z)[N], float rstd, float unit, int C) {
    float dot = 0;  // of u and xhat
    UNROLL for (int i = 0; i < N; i++) {
        Floats dz_i = pack_floats(ds[i]), z_i = pack_floats(z[i]);
        for (int k = 0; k < PACK; k++) dot += dz_i.v[k] * z_i.v[k];
    }
    float mean = team_sum<TEAM>(dot) / C;
    unpack_again(ds);
    unpack_again(z);
    UNROLL for (int i = 0; i < N; i++) {
        Floats d = pack_floats(ds[i]), z_i = pack_floats(z[i]);
        for (int k = 0; k < PACK; k++) {
            d.v[k] = rstd * (unit * d.v[k] - z_i.v[k] / unit * mean);
        }
        ds[i] = pack_round(d);
    }
}

// Blocks are chunks as in norm_backward_kernel; partial: [chunks, C].
template <typename TEAM>
__global__ void __launch_bounds__(TEAM::BLOCK, TEAM::PACKS <= 4 ? 2 : 1)
interpolate_backward_kernel(InterpolationArrays a, Interpolation f, float *partial) {
    constexpr int N = TEAM::PACKS;
    int column[N], C = f.out.site.width;
    float slope = alpha_slope(C), unit = (float)f.out.site.scale;
    GainSums sums = gains_begin<TEAM, N>(false);
    each_line<TEAM>({f.out.n, 1, C, nullptr}, [&](int64_t row, int width) {
        int64_t at = row * C;
        Pack ds[N], z[N], y[N];
        line_columns<TEAM>(column, width);
        pack_line(ds, a.dz + at, column);
        pack_line(z, a.z + at, column);
        constexpr bool LATE = TEAM::THREADS > 256;  // few registers: load y after ds
        if (!LATE) pack_line(y, a.y + at, column);
        float rstd_s = column[0] >= 0 ? f.post.rstd[row] : 0;
        float rstd_y = column[0] >= 0 ? f.out.rstd[row] : 0;
        interpolate_ds<TEAM>(ds, z, rstd_s, unit, C);  // from here on ds, not dz
        if (LATE) pack_line(y, a.y + at, column);
        float dot = 0;  // of u = alpha ds / sqrt(C) and xhat of y
        UNROLL for (int i = 0; i < N; i++) {
            Floats d = pack_floats(ds[i]), y_i = pack_floats(y[i]);
            Floats p = floats_load(f.p, column[i]);
            for (int k = 0; k < PACK; k++) {
                dot += unit * slope * fabsf(p.v[k]) * d.v[k] * (y_i.v[k] * rstd_y);
            }
        }
        float mean = team_sum<TEAM>(dot) / C;
        unpack_again(ds);
        unpack_again(y);
        UNROLL for (int i = 0; i < N; i++) {
            if (column[i] < 0) continue;
            Floats d = pack_floats(ds[i]), y_i = pack_floats(y[i]);
            Floats p = floats_load(f.p, column[i]), skip = floats_load(a.skip + at, column[i]);
            Floats dy, dskip;
            for (int q = 0; q < SUMS; q++) {
                Four sum = sums.w[(i * SUMS + q) * TEAM::BLOCK];
                for (int j = 0; j < FOUR; j++) {
                    int k = q * FOUR + j;
                    float alpha = slope * fabsf(p.v[k]), yhat = y_i.v[k] * rstd_y;
                    dy.v[k] = rstd_y * (unit * alpha * d.v[k] - yhat * mean);
                    dskip.v[k] = (1 - alpha) * d.v[k];
                    float signed_slope = p.v[k] < 0 ? -slope : slope;
                    sum.v[j] += signed_slope * d.v[k] * (unit * yhat - skip.v[k]);
                }
                sums.w[(i * SUMS + q) * TEAM::BLOCK] = sum;
            }
            floats_store(a.dy + at + column[i], dy);
            floats_store(a.dskip + at + column[i], dskip);
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
        int chunks = min(CEIL_DIV(f->out.n, TEAM::TEAMS), (int64_t)max_chunks);
        size_t shared = gains_bytes<TEAM, TEAM::PACKS>(false);
        float *partial = scratch_for<float>((size_t)chunks * C, gpu);
        LAUNCH(interpolate_backward_kernel<TEAM>, chunks, TEAM::BLOCK, shared, gpu->stream, a, *f,
               partial);
        partials_add({{{f->dp, partial, C, chunks}}, 1}, gpu);
    });
}

// ------------------------------------------------------------------------------------------ gains
// n rows of site.gains values; a gain for each column, and with experts its own for each expert.
// A thread handles 16 bytes of columns in one chunk of the rows, with GAIN_LOADS loads in flight.

enum { GAIN_THREADS = 128, GAIN_LOADS = 4 };

// The grid is (part of the row, chunk, expert). Chunks have equal numbers of rows; gain_chunks
// limits how many there are.
static inline dim3 gain_grid(const Norm *gain, Gpu *gpu) {
    int64_t gains = gain->site.gains, chunks = gain_chunks(gains, norm_gains(gain), gpu);
    int64_t rows = CEIL_DIV(gain->n, chunks);
    return dim3(CEIL_DIV(gains / PACK, GAIN_THREADS), CEIL_DIV(gain->n, rows), gain->experts);
}

// g = scale * w, the pack at column j.
__device__ inline Floats gain_load(const Norm &gain, int j) {
    const real *w = gain.w + (int64_t)blockIdx.z * gain.site.gains;
    return (float)gain.site.scale * floats_load(w + j);
}

// Each thread walks down one pack of columns, from j on, through the rows of its chunk (blockIdx.y)
// and expert (blockIdx.z). For each row it calls use(row, j, v, x, g, sum): v is a pack of `from`,
// x one of `x` (zeros if nullptr), g one of the gain. use changes v, which goes to `to`, and adds
// to sum. At the end factor * scale * sum goes to partial [chunks, experts, gains], unless nullptr.
template <typename Use>
__device__ void gain_columns(real *to, const real *from, const real *x, const Norm &gain,
                             float *partial, float factor, Use use) {
    int j = (int)grid_thread() * PACK, width = gain.site.gains;
    if (j >= width) return;
    int64_t begin = gain.start ? gain.start[blockIdx.z] : 0;
    int64_t end = gain.start ? gain.start[blockIdx.z + 1] : gain.n;
    int64_t rows = CEIL_DIV(end - begin, (int64_t)gridDim.y), first = begin + blockIdx.y * rows;
    end = min(first + rows, end);
    Floats g = gain_load(gain, j), sum = {};
    for (int64_t i = first; i < end; i += GAIN_LOADS) {
        Pack load[GAIN_LOADS], load_x[GAIN_LOADS];
        UNROLL for (int l = 0; l < GAIN_LOADS; l++) {
            load[l] = pack_load(i + l < end ? from + (i + l) * width : nullptr, j);
            load_x[l] = pack_load(x && i + l < end ? x + (i + l) * width : nullptr, j);
        }
        UNROLL for (int l = 0; l < GAIN_LOADS; l++) {
            if (i + l >= end) break;
            Floats v = pack_floats(load[l]);
            use(i + l, j, v, pack_floats(load_x[l]), g, sum);
            floats_store(to + (i + l) * width + j, v);
        }
    }
    if (!partial) return;
    int64_t row = blockIdx.y * (int64_t)gridDim.z + blockIdx.z;
    *sums_at(partial, row, width, j) = factor * (float)gain.site.scale * sum;
}

// to = g from, for y = g x as for dx = g dy. Backward also needs the sums of dy x; forward has
// neither x nor partial.
static __global__ void __launch_bounds__(GAIN_THREADS)
gain_kernel(real *to, const real *from, const real *x, Norm gain, float *partial) {
    auto use = [](int64_t, int, Floats &v, const Floats &x_i, const Floats &g, Floats &sum) {
        sum = sum + v * x_i;
        v = g * v;
    };
    gain_columns(to, from, x, gain, partial, 1, use);
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
    int gains = norm_gains(gain);
    float *partial = scratch_for<float>((size_t)grid.y * gains, gpu);
    LAUNCH(gain_kernel, grid, GAIN_THREADS, 0, gpu->stream, dx, dy, x, *gain, partial);
    partials_add({{{gain->dw, partial, gains, (int)grid.y}}, 1}, gpu);
}
