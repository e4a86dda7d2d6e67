// norm.cuh: RMSNorm, LayerNorm and DyT, fused with the residual connection beside them (residual +
// norm). One forward and one backward kernel serve every normalization placement (modes.h).
//
//   RMSNorm      N(x) = g * x r              r = (mean(x^2) + eps)^(-1/2)
//   LayerNorm    N(x) = g * (x - m) r + b    m = mean(x), r = (mean((x - m)^2) + eps)^(-1/2)
//                RMSNorm: Zhang and Sennrich 2019; LayerNorm: Ba et al. 2016
//   DyT          N(x) = g * tanh(alpha x) + b    a learned number alpha (Zhu et al. 2025)
//   forward    t = N_out(y)    s = a skip + t    z = N_next(s)
//   backward   with xhat = (x - m) r and u = g * dy:
//              N'(dy; x) = r (u - [mean(u)] - xhat mean(u * xhat))    [..] for LayerNorm only
//              DyT: xhat = tanh(alpha x), v = u * (1 - xhat^2), N'(dy; x) = alpha v and
//              dalpha += the sum of v * x
//              dx = a add + N'(dy; x)    sum = b dx + c other    dg += dy * xhat    db += dy
//              (a, b, c, add and other are fields of NormBackward, not those of forward)
//
//   x, y, skip, s, z   [n, groups, width]    each group of a row has statistics of its own
//   g, b               [gains]               gains = width: the groups share one gain; or
//                                            gains = groups * width: each group has its own
//   mean, rstd         [n, groups] float     saved for backward; mean for LayerNorm only, none for
//                                            DyT
//
// A *line* is one group of one row. A *team* of threads reads a line once, 16 bytes per thread and
// load, and keeps it in registers for everything that follows. So the variance is the mean of
// squared distances from the mean just computed. A team is a part of a warp for lines as short as a
// head, a warp for up to 256 loads (2048 values in bf16), and a whole block beyond that, up to
// 16384 values (refuse_wide_norms).
//
// Values moved per value of a line, and the computed floor (gpu.cuh) in bf16, n = 65536, C = 768:
//   forward    norm                  2  (y; z)                   0.047 ms
//              residual + norm       3  (y, skip; z)             0.070 ms
//              and s stored          4  (y, skip; s, z)          0.094 ms
//   backward   norm                  3  (dy, x; dx)              0.070 ms
//              with an add           4  (dy, x, add; dx)         0.094 ms
//              and sum               5  (dy, x, add; dx, sum)    0.117 ms
//              and other             6                           0.141 ms
// Gains come from the caches. Their gradients accumulate in shared memory and then go through
// scratch: at most 256 rows of partial sums, 1024 for gains as short as a head (under 1 % of the
// bytes above).
#pragma once
#include "gpu.cuh"
#include "modes.h"

// One norm over n rows; site gives width, groups and gains. With experts (moe.cuh) the rows are
// sorted by expert, and each expert has its own gain.
struct Norm {
    Site site;
    const real *w, *b;               // gain and bias; b == nullptr: RMSNorm
    wide *dw, *db;                   // their gradients
    wide *mean, *rstd;               // saved by forward
    int64_t n;
    float eps;
    int experts = 1;
    const int32_t *start = nullptr;  // [experts + 1] first row of each expert, and the end
    const real *alpha = nullptr;     // DyT's number
    wide *dalpha = nullptr;          // its gradient
};
// nvcc keeps copies of larger structs, which takes registers from the kernels.
static_assert(sizeof(Norm) <= 128, "a Norm of at most 128 bytes");

// -------------------------------------------------------------------------------- lines and teams

// Lines as the kernels walk them. Groups that share one gain are just more rows. Groups with gains
// of their own form `sets`, and blockIdx.y is the set. Line (row, set) has number row * sets + set;
// its values begin at number * width, its statistics at number. Each expert has sets of its own.
// The rows of an expert vary, so `rows` is the average: it sizes the grid, and the blocks of an
// expert with more rows loop.
struct Lines {
    int64_t rows;
    int sets, width;
    const int32_t *start;
};

static inline Lines norm_lines(const Norm *norm) {
    Site s = norm->site;
    if (s.gains == s.width && !norm->start) return {norm->n * s.groups, 1, s.width, nullptr};
    return {CEIL_DIV(norm->n, norm->experts), s.groups, s.width, norm->start};
}

static inline int norm_gains(const Norm *norm) { return norm->site.gains * norm->experts; }

// Floats of partial sums for each chunk of the rows: gains, biases, and alpha. Alpha needs one and
// has four, so that what follows is aligned to 16 bytes.
static inline size_t norm_sums(const Norm *norm) {
    return norm_gains(norm) * (norm->b ? 2 : 1) + (norm->dalpha ? FOUR : 0);
}

// T adjacent threads share a line; each holds up to P packs of 16 bytes of it. A block has TEAMS
// teams. Blocks are smaller where a thread holds many packs, so that the sums of the gains'
// gradients fit into the shared memory of smaller GPUs too.
template <int T, int P, int B = (T <= 32 && P >= 8 ? 128 : 256)> struct Team {
    static constexpr int THREADS = T, PACKS = P, BLOCK = T > B ? T : B, TEAMS = BLOCK / T;
};

// Calls launch with the first team, from narrow to wide, that holds this many packs.
template <typename First, typename... Wider, typename F>
static inline void team_launch(int packs, F launch) {
    constexpr int HELD = First::THREADS * First::PACKS;
    if (packs <= HELD) return launch(First());
    if constexpr (sizeof...(Wider) > 0) return team_launch<Wider...>(packs, launch);
    CHECK(false, "a norm too wide for a block: refuse_wide_norms should refuse it");
}

// Calls body(line, width) for each line of this team. Teams of a block stay together: one that has
// no line left in a round gets width 0.
template <typename TEAM, typename F> __device__ void each_line(const Lines &lines, F body) {
    int set = blockIdx.y, expert = set / lines.sets;
    int64_t begin = lines.start ? lines.start[expert] : 0;
    int64_t end = lines.start ? lines.start[expert + 1] : lines.rows;
    for (int64_t first = begin + (int64_t)blockIdx.x * TEAM::TEAMS; first < end;
         first += (int64_t)gridDim.x * TEAM::TEAMS) {
        int64_t row = first + threadIdx.x / TEAM::THREADS;
        body(row * lines.sets + set % lines.sets, row < end ? lines.width : 0);
    }
}

typedef Team<PACK == 4 ? 512 : 256, 8> Widest;

template <typename F> static inline void norm_launch(int width, F launch) {
    team_launch<Team<8, 1>, Team<16, 1>, Team<32, 1>, Team<32, 2>, Team<32, 3>, Team<32, 4>,
                Team<32, 6>, Team<32, 8>, Team<256, 2>, Team<256, 4>, Team<256, 8>, Widest>(
        width / PACK, launch);
}

// Calls launch(team, tanh) for a kernel that has two forms. tanh: one of its norms is DyT, which
// needs no sums over a line: a few sizes of teams suffice.
template <typename F> static inline void norm_launch(int width, bool tanh, F launch) {
    std::false_type no;
    std::true_type yes;
    if (!tanh) return norm_launch(width, [&](auto team) { launch(team, no); });
    team_launch<Team<8, 1>, Team<32, 1>, Team<32, 4>, Team<256, 2>, Team<256, 4>, Team<256, 8>,
                Widest>(width / PACK, [&](auto team) { launch(team, yes); });
}

// Sum over the team in a fixed order. Every thread of the block calls it and gets the result.
template <typename TEAM> __device__ float team_sum(float x) {
    if constexpr (TEAM::THREADS <= WARP) return warp_sum(x, TEAM::THREADS);
    else return block_sum(x);
}

// ----------------------------------------------------------------------------- a line in registers
// A thread holds packs 0, 1, ... of its line; column[i] is the place of pack i in the line, -1 for
// none. Packs without a place hold zeros. A team without a line (width 0) has no columns: it takes
// part in the sums, and reads and writes nothing.

template <typename TEAM> __device__ void line_columns(int (&column)[TEAM::PACKS], int width) {
    UNROLL for (int i = 0; i < TEAM::PACKS; i++) {
        int c = (i * TEAM::THREADS + threadIdx.x % TEAM::THREADS) * PACK;
        column[i] = c < width ? c : -1;
    }
}

// The pack at this column; zeros for column -1, or if from is nullptr.
__device__ inline Pack pack_load(const real *from, int column) {
    return from && column >= 0 ? pack_load(from + column) : Pack{};
}

template <int N> __device__ void pack_line(Pack (&x)[N], const real *from, const int (&column)[N]) {
    UNROLL for (int i = 0; i < N; i++) x[i] = pack_load(from, column[i]);
}

__device__ inline Floats floats_load(const real *from, int column) {
    return pack_floats(pack_load(from, column));
}

template <int N>
__device__ void line_load(Floats (&x)[N], const real *from, const int (&column)[N]) {
    UNROLL for (int i = 0; i < N; i++) x[i] = floats_load(from, column[i]);
}

template <int N>
__device__ void line_store(real *to, const Floats (&x)[N], const int (&column)[N]) {
    UNROLL for (int i = 0; i < N; i++)
        if (column[i] >= 0) floats_store(to + column[i], x[i]);
}

struct Moments { float mean, rstd; };

// Mean (0 unless centered) and reciprocal standard deviation of a line.
template <typename TEAM, int N>
__device__ Moments line_moments(const Floats (&x)[N], const int (&column)[N], int width,
                                bool centered, float eps) {
    float mean = 0, square = 0;
    if (centered) {
        UNROLL for (int i = 0; i < N; i++)
            for (int k = 0; k < PACK; k++) mean += x[i].v[k];
        mean = team_sum<TEAM>(mean) / width;
    }
    UNROLL for (int i = 0; i < N; i++)
        if (column[i] >= 0)
            for (int k = 0; k < PACK; k++) square += (x[i].v[k] - mean) * (x[i].v[k] - mean);
    return {mean, rsqrtf(team_sum<TEAM>(square) / width + eps)};
}

// DyT as a norm of mean 0 whose rstd is alpha: xhat = tanh((x - mean) rstd), dx = rstd v.
__device__ inline Moments dyt_moments(const Norm &norm) { return {0, to_float(*norm.alpha)}; }

// The moments that forward saved. RMSNorm has no mean: 0.
template <bool TANH, int N>
__device__ Moments line_kept(const Norm &norm, int64_t line, const int (&column)[N]) {
    if (TANH) return dyt_moments(norm);
    return {norm.b && column[0] >= 0 ? norm.mean[line] : 0, column[0] >= 0 ? norm.rstd[line] : 0};
}

// x = N(x) with gain scale * w; line and set as in Lines. One thread saves the statistics. TANH: it
// may be DyT.
template <typename TEAM, bool TANH, int N>
__device__ void line_normalize(Floats (&x)[N], const int (&column)[N], const Norm &norm,
                               int64_t line, int set, float scale = 1) {
    int width = norm.site.width;
    const real *w = norm.w + set * width, *b = norm.b ? norm.b + set * width : nullptr;
    const bool dyt = TANH && norm.site.on == DYT;
    Moments m = dyt ? dyt_moments(norm)
                    : line_moments<TEAM>(x, column, width, b != nullptr, norm.eps);
    UNROLL for (int i = 0; i < N; i++) {
        if (column[i] < 0) continue;
        Floats gain = floats_load(w, column[i]), bias = floats_load(b, column[i]);
        for (int k = 0; k < PACK; k++) {
            float xhat = (x[i].v[k] - m.mean) * m.rstd;
            x[i].v[k] = scale * gain.v[k] * (dyt ? tanhf(xhat) : xhat) + bias.v[k];
        }
    }
    if (dyt || column[0] != 0) return;
    norm.rstd[line] = m.rstd;
    if (b) norm.mean[line] = m.mean;
}

// ---------------------------------------------------------------------------------------- forward

// Residual + norm:  t = N_out(y)    s = a skip + t    z = N_next(s)
// A norm that is nullptr or off is skipped, and so is the residual if skip is nullptr. At least one
// norm is given, on or off: it says n and width. If both are on, each has one group. s is stored
// unless nullptr. Backward reads s as stored, so z normalizes s rounded to `real`, whether it is
// stored or not. Outputs may be inputs.
struct AddNorm {
    real *s, *z;
    const real *y, *skip;
    float a;
    const Norm *out, *next;
};

template <typename TEAM, bool TANH>
__global__ void __launch_bounds__(TEAM::BLOCK, 1)
add_norm_forward_kernel(AddNorm f, Norm out, Norm next, Lines lines) {
    constexpr int N = TEAM::PACKS;
    each_line<TEAM>(lines, [&](int64_t line, int width) {
        int column[N], set = blockIdx.y;
        int64_t at = line * lines.width;
        Floats x[N], skip[N];
        line_columns<TEAM>(column, width);
        line_load(x, f.y + at, column);
        if (out.site.on) line_normalize<TEAM, TANH>(x, column, out, line, set);
        if (f.skip) {
            line_load(skip, f.skip + at, column);
            UNROLL for (int i = 0; i < N; i++) x[i] = x[i] + f.a * skip[i];
        }
        if (f.s) line_store(f.s + at, x, column);
        if (!next.site.on) return;
        UNROLL for (int i = 0; i < N; i++) x[i] = pack_floats(pack_round(x[i]));
        line_normalize<TEAM, TANH>(x, column, next, line, set);
        line_store(f.z + at, x, column);
    });
}

static inline void add_norm_forward(AddNorm f, Gpu *gpu) {
    Norm none = {}, out = f.out ? *f.out : none, next = f.next ? *f.next : none;
    const Norm *shape = next.site.on || !f.out ? &next : &out;
    Lines lines = norm_lines(shape);
    bool dyt = out.site.on == DYT || next.site.on == DYT;
    norm_launch(lines.width, dyt, [&](auto team, auto tanh) {
        typedef decltype(team) TEAM;
        dim3 grid(CEIL_DIV(lines.rows, TEAM::TEAMS), lines.sets * shape->experts);
        LAUNCH(add_norm_forward_kernel<TEAM, tanh>, grid, TEAM::BLOCK, 0, gpu->stream, f, out, next,
               lines);
    });
}

// ------------------------------------------------------------------- gradients of gains and biases
// The blocks of a backward kernel are *chunks*: each takes a fixed set of lines. A thread sums the
// gradients of its columns in shared memory of its own. At the end the teams of a block add up in
// order, each block writes one row of partial sums, and a second kernel adds these rows in order.
// There are no atomics, so the same bits come out in every run.

// The largest number of chunks for a gain: few for long gains, whose partial sums cost bytes, more
// for a head's gain, whose short lines need many blocks. As many as scratch holds, `each` floats
// per chunk, and at least one: scratch_for refuses a scratch that is too small for it. The number
// depends on shapes and scratch alone, never on the device.
static inline int gain_chunks(int gains, size_t each, const Gpu *gpu) {
    int chunks = gains <= 256 ? 1024 : 256;
    while (chunks > 1 && chunks * each > gpu->scratch_size) chunks /= 2;
    return chunks;
}

// A thread's sums for N packs, in pieces of 16 bytes. Pieces of neighbouring threads are adjacent,
// so there are no bank conflicts. b == nullptr: no bias (RMSNorm). alpha: a register, for DyT.
struct GainSums { Four *w, *b; float alpha; };
enum { SUMS = PACK / FOUR };  // Fours per pack

template <typename TEAM, int N> static inline size_t gains_bytes(bool bias) {
    return (bias ? 2 : 1) * N * SUMS * TEAM::BLOCK * sizeof(Four);
}

template <typename TEAM, int N> __device__ GainSums gains_begin(bool bias) {
    SHARED_DYNAMIC(Four, shared);
    Four *own = shared + threadIdx.x;
    GainSums sums = {own, bias ? own + N * SUMS * TEAM::BLOCK : nullptr, 0};
    for (int q = 0; q < N * SUMS * (bias ? 2 : 1); q++) sums.w[q * TEAM::BLOCK] = Four{};
    return sums;
}

// Writes the block's sums to to[column]: the first team adds up the sums of all teams. Every thread
// of the block calls it.
template <typename TEAM, int N>
__device__ void gains_store(float *to, const Four *sums, const int (&column)[N]) {
    __syncthreads();
    if (threadIdx.x >= TEAM::THREADS) return;
    UNROLL for (int i = 0; i < N; i++)
        for (int q = 0; q < SUMS && column[i] >= 0; q++) {
            Four total = {};
            for (int team = 0; team < TEAM::TEAMS; team++) {
                const Four &part = sums[(i * SUMS + q) * TEAM::BLOCK + team * TEAM::THREADS];
                for (int k = 0; k < 4; k++) total.v[k] += part.v[k];
            }
            *reinterpret_cast<Four *>(to + column[i] + q * 4) = total;
        }
}

// Writes the sum over the block to *to. Every thread of the block calls it.
__device__ inline void alpha_store(float *to, float alpha) {
    alpha = block_sum(alpha);
    if (threadIdx.x == 0) *to = alpha;
}

// gradient[j] += sum over chunks of partial[chunk][j], for one gain, bias or alpha.
struct Partials {
    wide *gradient;
    const float *partial;  // [chunks, gains]
    int gains, chunks;
};

// All gains, biases and alphas of one backward launch; blockIdx.y selects one.
struct PartialList {
    Partials of[9];
    int count;
};

// A block always has 8 warps; those without a chunk add 0.
enum { PARTIALS_THREADS = 256 };

static __global__ void __launch_bounds__(PARTIALS_THREADS)
partials_add_kernel(PartialList list) {
    SHARED(float, sum, PARTIALS_THREADS);
    Partials p = list.of[blockIdx.y];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int j = blockIdx.x * WARP + lane;
    float total = 0;
    for (int chunk = warp; j < p.gains && chunk < p.chunks; chunk += warps) {
        total += p.partial[(int64_t)chunk * p.gains + j];
    }
    sum[threadIdx.x] = total;
    __syncthreads();
    if (warp > 0 || j >= p.gains) return;
    for (int i = 1; i < warps; i++) total += sum[i * WARP + lane];
    p.gradient[j] += total;
}

// Appends a norm's gain, and its bias and alpha if it has them. Their partial sums begin at
// `partial`: chunks rows for the gain, chunks rows for the bias, chunks numbers for alpha.
static inline void partials_of(PartialList *list, const Norm *norm, const float *partial,
                               int chunks) {
    int gains = norm_gains(norm);
    list->of[list->count++] = {norm->dw, partial, gains, chunks};
    size_t sums = (size_t)chunks * gains;
    if (norm->b) {
        list->of[list->count++] = {norm->db, partial + sums, gains, chunks};
        sums *= 2;
    }
    if (norm->dalpha) list->of[list->count++] = {norm->dalpha, partial + sums, 1, chunks};
}

static inline void partials_add(const PartialList &list, Gpu *gpu) {
    int gains = 0;  // of the longest gain
    for (const Partials &p : list.of) gains = max(gains, p.gains);
    if (!gains) return;
    dim3 grid(CEIL_DIV(gains, WARP), list.count);
    LAUNCH(partials_add_kernel, grid, PARTIALS_THREADS, 0, gpu->stream, list);
}

// --------------------------------------------------------------------------------------- backward

// dx = a add + N'(dy; x); without the first term if add == nullptr. If sum != nullptr, also
// sum = b dx + c other, without the second term if other == nullptr. SETs dx and sum, ADDs to the
// gradients of gain and bias. A thread reads everything it needs at a column before it writes
// there, so outputs may be inputs.
struct NormBackward {
    real *dx, *sum;
    const real *dy, *x, *add, *other;
    float a, b, c;
};

struct Slopes { float u, ux; };  // means of u and of u * xhat over the line, u = g * dy

// The gain is multiplied by scale.
template <typename TEAM, int N>
__device__ Slopes line_slopes(const Pack (&dy)[N], const Pack (&x)[N], const Pack (&gain)[N],
                              Moments m, int width, bool centered, float scale = 1) {
    float u = 0, ux = 0;
    UNROLL for (int i = 0; i < N; i++) {
        Floats dy_i = pack_floats(dy[i]), x_i = pack_floats(x[i]), gain_i = pack_floats(gain[i]);
        for (int k = 0; k < PACK; k++) {
            float u_k = scale * gain_i.v[k] * dy_i.v[k];
            u += u_k;
            ux += u_k * ((x_i.v[k] - m.mean) * m.rstd);
        }
    }
    return {centered ? team_sum<TEAM>(u) / width : 0, team_sum<TEAM>(ux) / width};
}

// Makes the compiler unpack x again after the team's sum, instead of keeping its floats, which take
// twice the registers, during the sum.
template <int N> __device__ void unpack_again(Pack (&x)[N]) {
    UNROLL for (int i = 0; i < N; i++)
        for (int k = 0; k < 4; k++) asm volatile("" : "+r"(x[i].v[k]));
}

// N'(dy; x) of pack i. Adds the pack's terms to the sums for gain, bias and alpha.
template <typename TEAM, bool TANH>
__device__ Floats pack_slope(GainSums &sums, int i, const Pack &dy_i, const Pack &x_i,
                             const Pack &gain_i, Moments m, Slopes s, float scale = 1) {
    Floats dy = pack_floats(dy_i), x = pack_floats(x_i), gain = pack_floats(gain_i), dx;
    for (int q = 0; q < SUMS; q++) {
        int at = (i * SUMS + q) * TEAM::BLOCK;
        Four dw = sums.w[at], db = sums.b ? sums.b[at] : Four{};
        for (int j = 0; j < FOUR; j++) {
            int k = q * FOUR + j;
            float xhat = (x.v[k] - m.mean) * m.rstd;
            if (TANH) {
                xhat = tanhf(xhat);
                float v = gain.v[k] * dy.v[k] * (1 - xhat * xhat);
                sums.alpha += v * x.v[k];
                dx.v[k] = m.rstd * v;
            } else dx.v[k] = m.rstd * (scale * gain.v[k] * dy.v[k] - s.u - xhat * s.ux);
            dw.v[j] += scale * dy.v[k] * xhat;
            db.v[j] += dy.v[k];
        }
        sums.w[at] = dw;
        if (sums.b) sums.b[at] = db;
    }
    return dx;
}

// partial: [chunks, gains] for the gain (blockIdx.x is the chunk), the same for the bias, and
// [chunks] for alpha.
template <typename TEAM, bool TANH>
__global__ void __launch_bounds__(TEAM::BLOCK, TEAM::PACKS <= 4 ? 2 : 1)
norm_backward_kernel(NormBackward f, Norm norm, Lines lines, float *partial) {
    constexpr int N = TEAM::PACKS;
    // All loads of a line come before the team's sum, which hides their latency, and before its
    // stores. The widest team has registers for two packs of add and other at a time.
    constexpr int BATCH = TEAM::THREADS > 256 ? 2 : N;
    int column[N], width = lines.width, set = blockIdx.y;
    const real *w = norm.w + set * width;
    GainSums sums = gains_begin<TEAM, N>(norm.b != nullptr);
    each_line<TEAM>(lines, [&](int64_t line, int own_width) {
        int64_t at = line * width;
        Pack dy[N], x[N], gain[N], add[N], other[N];
        auto load = [&](int first) {
            UNROLL for (int j = first; j < N && j < first + BATCH; j++) {
                if (BATCH < N) gain[j] = pack_load(w, column[j]);  // again, not kept
                add[j] = pack_load(f.add ? f.add + at : nullptr, column[j]);
                other[j] = pack_load(f.other ? f.other + at : nullptr, column[j]);
            }
        };
        line_columns<TEAM>(column, own_width);
        pack_line(dy, f.dy + at, column);
        pack_line(x, f.x + at, column);
        pack_line(gain, w, column);
        if (BATCH == N) load(0);
        Moments m = line_kept<TANH>(norm, line, column);
        Slopes s = {};
        if (!TANH) {
            s = line_slopes<TEAM>(dy, x, gain, m, width, norm.b != nullptr);
            unpack_again(dy);
            unpack_again(x);
            if (BATCH == N) unpack_again(gain);
        }
        UNROLL for (int i = 0; i < N; i++) {
            if (BATCH < N && i % BATCH == 0) load(i);
            if (column[i] < 0) continue;
            Floats dx = pack_slope<TEAM, TANH>(sums, i, dy[i], x[i], gain[i], m, s);
            dx = dx + f.a * pack_floats(add[i]);
            floats_store(f.dx + at + column[i], dx);
            if (!f.sum) continue;
            floats_store(f.sum + at + column[i], f.b * dx + f.c * pack_floats(other[i]));
        }
    });
    line_columns<TEAM>(column, width);
    int64_t gains = (int64_t)norm.site.gains * norm.experts;
    int64_t before = (norm.b ? 2 : 1) * gridDim.x * gains;  // sums of gains and biases
    if (TANH) alpha_store(partial + before + blockIdx.x, sums.alpha);
    partial += blockIdx.x * gains + set * width;
    gains_store<TEAM>(partial, sums.w, column);
    if (sums.b) gains_store<TEAM>(partial + gridDim.x * gains, sums.b, column);
}

static inline void norm_backward(const Norm *norm, NormBackward f, Gpu *gpu) {
    Lines lines = norm_lines(norm);
    norm_launch(lines.width, norm->site.on == DYT, [&](auto team, auto tanh) {
        typedef decltype(team) TEAM;
        int gains = norm_gains(norm);
        size_t each = norm_sums(norm);
        int chunks = min(CEIL_DIV(lines.rows, TEAM::TEAMS), (int64_t)gain_chunks(gains, each, gpu));
        float *partial = scratch_for<float>(chunks * each, gpu);
        size_t shared = gains_bytes<TEAM, TEAM::PACKS>(norm->b != nullptr);
        PartialList list = {};
        dim3 grid(chunks, lines.sets * norm->experts);
        LAUNCH(norm_backward_kernel<TEAM, tanh>, grid, TEAM::BLOCK, shared, gpu->stream, f, *norm,
               lines, partial);
        partials_of(&list, norm, partial, chunks);
        partials_add(list, gpu);
    });
}
