// norm.cuh: RMSNorm and LayerNorm with the residual add beside them: one forward and one backward kernel for every placement (modes.h).
//
//   RMSNorm (Zhang, Sennrich 2019)      N(x) = g * x r,            r = (mean(x^2) + eps)^(-1/2)
//   LayerNorm (Ba et al. 2016)          N(x) = g * (x - m) r + b,  m = mean(x), r = (mean((x - m)^2) + eps)^(-1/2)
//   forward                             t = N_out(y);   s = a skip + t;   z = N_next(s)
//   backward, xhat = (x - m) r, u = g * dy          N'(dy; x) = r (u - [mean(u)] - xhat mean(u * xhat)), the bracket for LayerNorm only
//                                       dx = a add + N'(dy; x);   sum = b dx + c other;   dg += dy * xhat;   db += dy
//
// Each of n rows holds `groups` groups of `width` values with statistics of their own, here called lines. A team of threads reads a line once, 16 bytes a
// thread and load, and keeps it in registers for all that follows: the variance is the mean of squared distances from the mean just found. A team is a
// part of a warp for lines as short as a head, a warp up to 256 loads (2048 values in bf16), the whole block beyond that, up to 16384 values.
//
// Values moved per value of the line, and the computed floor at 4.3 TB/s in bf16 for n = 65536, C = 768:
//   forward   norm alone            2 (y; z)                  0.047 ms      norm after an add  3 (y, skip; z)            0.070      s kept  4   0.094 ms
//   backward  norm alone            3 (dy, x; dx)             0.070 ms      with an add        4 (dy, x, add; dx)        0.094 ms
//             with sum              5 (dy, x, add; dx, sum)   0.117 ms      and other          6                         0.141 ms
// Gains are read from the caches. Their gradients add up in shared memory, then go through gpu->scratch: at most 256 rows of partial sums, 1024 for gains as
// short as a head's (under 1 % of the bytes above).
#pragma once
#include "gpu.cuh"
#include "modes.h"

// One norm of n rows. The gain is one vector of length site.gains, shared by the groups when gains == width. b == nullptr is RMSNorm.
// Saved by forward: mean (LayerNorm) and rstd, [n, groups].
typedef struct Norm {
    Site site;
    const real *w, *b;
    wide *dw, *db, *mean, *rstd;
    int64_t n;
    float eps;
    const int32_t *start = nullptr;                            // of `experts`, each with a gain of its own, the first row of each and the end (moe.cuh)
    int experts = 1;
} Norm;

// ------------------------------------------------------------------------------------------------------------------ lines and teams

// The lines of a norm as kernels walk them. Groups that share a gain are lines alike; groups with gains of their own are sets, and blockIdx.y is the set.
// Line (row, set) is number row * sets + set, of the statistics too, and begins at that number times width.
// Experts have sets of their own, of as many lines as an expert has rows; rows says what is even among them, for a grid whose blocks walk on where it is more.
typedef struct Lines { int64_t rows; int sets, width; const int32_t *start; } Lines;

static inline Lines norm_lines(const Norm *norm) {
    Site s = norm->site;
    if (norm->start) return {CEIL_DIV(norm->n, norm->experts), s.groups, s.width, norm->start};
    if (s.gains == s.width) return {norm->n * s.groups, 1, s.width, nullptr};
    return {norm->n, s.groups, s.width, nullptr};
}
static inline dim3 lines_grid(int64_t blocks, const Lines &lines, const Norm *norm) { return dim3((unsigned)blocks, lines.sets * norm->experts); }
static inline int norm_gains(const Norm *norm) { return norm->site.gains * norm->experts; }

// The rows of this block's set, and its place among the sets of a row.
typedef struct SetRows { int64_t first, end; int set; } SetRows;
static __device__ inline SetRows set_rows(const Lines &lines) {
    int set = blockIdx.y, expert = set / lines.sets;
    if (!lines.start) return {0, lines.rows, set};
    return {lines.start[expert], lines.start[expert + 1], set % lines.sets};
}

// A team: THREADS neighbours of a block share a line, each holding up to PACKS packs of it. A block is TEAMS teams; smaller where a thread holds much, so that the gains'
// gradients fit into the shared memory of smaller GPUs too.
template <int T, int P, int B = (T > 256 ? T : T <= 32 && P >= 8 ? 128 : 256)> struct Team {
    static constexpr int THREADS = T, PACKS = P, BLOCK = B, TEAMS = BLOCK / T;
};

// Calls launch with the first of the teams, from narrow to wide, that holds this many packs.
template <typename First, typename... Wider, typename F> static inline void team_launch(int packs, F launch) {
    if (packs <= First::THREADS * First::PACKS) launch(First());
    else if constexpr (sizeof...(Wider) > 0) team_launch<Wider...>(packs, launch);
    else CHECK(false, "a norm over %d times 16 bytes; the widest team holds %d\n  -> a smaller --width or --ffn", packs, First::THREADS * First::PACKS);
}

template <typename F> static inline void norm_launch(int width, F launch) {
    typedef Team<PACK == 4 ? 512 : 256, 8> Widest;
    team_launch<Team<8, 1>, Team<16, 1>, Team<32, 1>, Team<32, 2>, Team<32, 3>, Team<32, 4>, Team<32, 6>, Team<32, 8>,
                Team<256, 2>, Team<256, 4>, Team<256, 8>, Widest>(width / PACK, launch);
}

// Over the team, in a fixed order; every thread gets the result. All threads of the block come.
template <typename TEAM> static __device__ inline float team_sum(float x) {
    if constexpr (TEAM::THREADS <= WARP) {
        for (int lane = TEAM::THREADS / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
        return x;
    } else return block_sum(x);
}

// ------------------------------------------------------------------------------------------------------------------ a line in registers
// column[i]: where the thread's pack i lies in the line, -1 for none. A team without a line (width 0) has no columns: it takes part in sums, and reads
// and writes nothing. Packs that lie nowhere hold zeros.

struct Floats { float v[PACK]; };                              // a pack unpacked
struct alignas(16) Bits { uint32_t v[4]; };                    // a pack that waits: in four registers, where a Pack in bf16 would take one a value

template <typename TEAM> static __device__ inline void line_columns(int (&column)[TEAM::PACKS], int width) {
    UNROLL for (int i = 0; i < TEAM::PACKS; i++) {
        int c = (i * TEAM::THREADS + threadIdx.x % TEAM::THREADS) * PACK;
        column[i] = c < width ? c : -1;
    }
}

static __device__ inline Floats pack_floats(const Pack &x) {
    Floats y;
    for (int k = 0; k < PACK; k++) y.v[k] = to_float(x.v[k]);
    return y;
}

// Two at a time, for which there is an instruction.
static __device__ inline Pack pack_round(const Floats &x) {
    Pack y;
    for (int k = 0; k < PACK; k += 2) {
        if constexpr (sizeof(real) == sizeof(float)) y.v[k] = x.v[k], y.v[k + 1] = x.v[k + 1];
        else {
            __nv_bfloat162 two = __floats2bfloat162_rn(x.v[k], x.v[k + 1]);
            y.v[k] = two.x, y.v[k + 1] = two.y;
        }
    }
    return y;
}

template <int N> static __device__ inline void line_load(Floats (&x)[N], const real *from, const int (&column)[N]) {
    UNROLL for (int i = 0; i < N; i++) x[i] = column[i] >= 0 ? pack_floats(pack_load(from + column[i])) : Floats{};
}

template <int N> static __device__ inline void line_store(real *to, const Floats (&x)[N], const int (&column)[N]) {
    UNROLL for (int i = 0; i < N; i++)
        if (column[i] >= 0) pack_store(to + column[i], pack_round(x[i]));
}

// The pack at this column; zeros where there is none, or nothing to load from.
static __device__ inline Bits bits_load(const real *from, int column) {
    return from && column >= 0 ? words_load<Bits>(from + column) : Bits{};
}

static __device__ inline Bits bits_round(const Floats &x) {
    Bits y;
    Pack pack = pack_round(x);
    memcpy(&y, &pack, sizeof pack);
    return y;
}

static __device__ inline Floats bits_floats(const Bits &x) {
    Pack pack;
    memcpy(&pack, &x, sizeof pack);
    return pack_floats(pack);
}

// x += a y
template <int N> static __device__ inline void line_add(Floats (&x)[N], float a, const real *y, const int (&column)[N]) {
    Floats more[N];
    line_load(more, y, column);
    UNROLL for (int i = 0; i < N; i++)
        for (int k = 0; k < PACK; k++) x[i].v[k] += a * more[i].v[k];
}

typedef struct Moments { float mean, rstd; } Moments;

template <typename TEAM, int N>
static __device__ inline Moments line_moments(const Floats (&x)[N], const int (&column)[N], int width, bool centered, float eps) {
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

// What forward kept of a line.
template <int N> static __device__ inline Moments line_kept(const Norm &norm, int64_t line, const int (&column)[N]) {
    return {norm.b && column[0] >= 0 ? norm.mean[line] : 0, column[0] >= 0 ? norm.rstd[line] : 0};
}

// x = N(x) with the gain scale * w; line and set as in Lines. One thread keeps the statistics.
template <typename TEAM, int N>
static __device__ inline void line_normalize(Floats (&x)[N], const int (&column)[N], const Norm &norm, int64_t line, int set, float scale = 1) {
    int width = norm.site.width;
    const real *w = norm.w + set * width, *b = norm.b ? norm.b + set * width : nullptr;
    Moments m = line_moments<TEAM>(x, column, width, b != nullptr, norm.eps);
    UNROLL for (int i = 0; i < N; i++) {
        if (column[i] < 0) continue;
        Floats gain = pack_floats(pack_load(w + column[i])), bias = b ? pack_floats(pack_load(b + column[i])) : Floats{};
        for (int k = 0; k < PACK; k++) x[i].v[k] = scale * gain.v[k] * ((x[i].v[k] - m.mean) * m.rstd) + bias.v[k];
    }
    if (column[0] != 0) return;
    norm.rstd[line] = m.rstd;
    if (b) norm.mean[line] = m.mean;
}

// ------------------------------------------------------------------------------------------------------------------ forward

// t = out ? N_out(y) : y;   s = skip ? a skip + t : t;   z = next ? N_next(s) : none. A norm that is off counts as absent; at least one is given and says n and
// the width. s is kept where s != nullptr. z and the gradient know s as it is stored, so z normalizes s rounded to `real`, kept or not. Outputs may be inputs.
typedef struct AddNorm {
    real *s, *z;
    const real *y, *skip;
    float a;
    const Norm *out, *next;
} AddNorm;

template <typename TEAM>
static __global__ void __launch_bounds__(TEAM::BLOCK, 1) add_norm_forward_kernel(AddNorm f, Norm out, Norm next, Lines lines) {
    int column[TEAM::PACKS], set = blockIdx.y;
    SetRows rows = set_rows(lines);
    for (int64_t first = rows.first + (int64_t)blockIdx.x * TEAM::TEAMS; first < rows.end; first += (int64_t)gridDim.x * TEAM::TEAMS) {
        int64_t row = first + threadIdx.x / TEAM::THREADS, line = row * lines.sets + rows.set, at = line * lines.width;
        Floats x[TEAM::PACKS];
        line_columns<TEAM>(column, row < rows.end ? lines.width : 0);
        line_load(x, f.y + at, column);
        if (out.site.on) line_normalize<TEAM>(x, column, out, line, set);
        if (f.skip) line_add(x, f.a, f.skip + at, column);
        if (f.s) line_store(f.s + at, x, column);
        if (!next.site.on) continue;
        UNROLL for (int i = 0; i < TEAM::PACKS; i++) x[i] = pack_floats(pack_round(x[i]));
        line_normalize<TEAM>(x, column, next, line, set);
        line_store(f.z + at, x, column);
    }
}

// out[i] = a x[i] + b y[i]; y == nullptr leaves it out.
static __global__ void __launch_bounds__(256) scale_add_kernel(real *out, const real *x, float a, const real *y, float b, int64_t packs) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= packs) return;
    Floats v = pack_floats(pack_load(x + at * PACK)), other = y ? pack_floats(pack_load(y + at * PACK)) : Floats{};
    for (int k = 0; k < PACK; k++) v.v[k] = a * v.v[k] + b * other.v[k];
    pack_store(out + at * PACK, pack_round(v));
}

// For the few places where nothing else is near. count: a multiple of 8; out may be x or y.
static inline void scale_add(real *out, const real *x, float a, const real *y, float b, int64_t count, Gpu *gpu) {
    int64_t packs = count / PACK;
    LAUNCH(scale_add_kernel, (unsigned)CEIL_DIV(packs, 256), 256, 0, gpu->stream, out, x, a, y, b, packs);
}

static inline void add_norm_forward(AddNorm f, Gpu *gpu) {
    const Norm *shape = f.next && f.next->site.on ? f.next : f.out && f.out->site.on ? f.out : nullptr;
    if (!shape) {                                              // an add and no norm
        const Norm *given = f.next ? f.next : f.out;
        return scale_add(f.s, f.y, 1, f.skip, f.a, given->n * given->site.groups * given->site.width, gpu);
    }
    Norm none = {}, out = f.out ? *f.out : none, next = f.next ? *f.next : none;
    CHECK(!(out.site.on && next.site.on) || (out.n == next.n && out.site.gains == next.site.gains && out.site.groups * next.site.groups == 1),
          "two norms of one kernel differ: [%ld, %d] and [%ld, %d]", (long)out.n, out.site.gains, (long)next.n, next.site.gains);
    Lines lines = norm_lines(shape);
    norm_launch(lines.width, [&](auto team) {
        typedef decltype(team) TEAM;
        LAUNCH(add_norm_forward_kernel<TEAM>, lines_grid(CEIL_DIV(lines.rows, TEAM::TEAMS), lines, shape), TEAM::BLOCK, 0, gpu->stream, f, out, next, lines);
    });
}

// ------------------------------------------------------------------------------------------------------------------ gradients of gains and biases
// Blocks of a backward kernel are chunks: each takes a fixed set of lines, and each thread sums the gradients of the columns it holds, in shared memory of its
// own. At the end the teams of a block add up in order, each block leaves one row of partial sums, and a second kernel adds these in order.

// Most chunks for a gain: few where it is long and partial sums cost bytes; more for a head's, whose short lines want many blocks. As many as scratch has room
// for, `each` floats for one chunk. The number depends on shapes and scratch, never on the device.
static inline int gain_chunks(int gains, size_t each, const Gpu *gpu) {
    size_t chunks = gains <= 256 ? 1024 : 256;
    while (chunks * each > gpu->scratch_size) chunks /= 2;
    CHECK(chunks > 0, "scratch of %zu floats is too small for gradients of %zu gains and biases\n  -> a larger Gpu.scratch_size", gpu->scratch_size, each);
    return (int)chunks;
}

// A thread's sums of its values in N packs, in quads of 16 bytes; quads of neighbours are neighbours, so that all banks serve. b == nullptr: RMSNorm.
struct alignas(16) Quad { float v[4]; };
typedef struct GainSums { Quad *w, *b; } GainSums;
enum { QUADS = PACK / 4 };                                     // quads for a pack

template <typename TEAM, int N> static inline size_t gains_bytes(bool bias) { return (bias ? 2 : 1) * N * QUADS * TEAM::BLOCK * sizeof(Quad); }

template <typename TEAM, int N> static __device__ inline GainSums gains_begin(bool bias) {
    SHARED_DYNAMIC(Quad, shared);
    GainSums sums = {shared + threadIdx.x, bias ? shared + threadIdx.x + N * QUADS * TEAM::BLOCK : nullptr};
    for (int q = 0; q < N * QUADS * (bias ? 2 : 1); q++) sums.w[q * TEAM::BLOCK] = Quad{};
    return sums;
}

// The block's sums to to[column]: the first team adds up what all teams hold. All threads of the block come.
template <typename TEAM, int N> static __device__ inline void gains_store(float *to, const Quad *sums, const int (&column)[N]) {
    __syncthreads();
    if (threadIdx.x >= TEAM::THREADS) return;
    UNROLL for (int i = 0; i < N; i++)
        for (int q = 0; q < QUADS && column[i] >= 0; q++) {
            Quad total = {};
            for (int team = 0; team < TEAM::TEAMS; team++)
                for (int k = 0; k < 4; k++) total.v[k] += sums[(i * QUADS + q) * TEAM::BLOCK + team * TEAM::THREADS].v[k];
            *reinterpret_cast<Quad *>(to + column[i] + q * 4) = total;
        }
}

// gradient[j] += sum of partial[chunk][j] over chunks, for the gradients of one launch; blockIdx.y says which.
typedef struct Partials { wide *gradient; const float *partial; int gains, chunks; } Partials;
typedef struct PartialList { Partials of[6]; int count; } PartialList;

static __global__ void __launch_bounds__(256) partials_add_kernel(PartialList list) {
    SHARED(float, sum, 256);
    Partials p = list.of[blockIdx.y];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, j = blockIdx.x * WARP + lane;
    float total = 0;
    if (j < p.gains)
        for (int chunk = warp; chunk < p.chunks; chunk += warps) total += p.partial[(int64_t)chunk * p.gains + j];
    sum[threadIdx.x] = total;
    __syncthreads();
    if (warp > 0 || j >= p.gains) return;
    for (int i = 1; i < warps; i++) total += sum[i * WARP + lane];
    p.gradient[j] += total;
}

// Appends the gain of a norm, and its bias if it has one, whose partial sums begin at `partial`: chunks rows of gains, then chunks rows of biases.
static inline void partials_of(PartialList *list, const Norm *norm, const float *partial, int chunks) {
    int gains = norm_gains(norm);
    list->of[list->count++] = {norm->dw, partial, gains, chunks};
    if (norm->b) list->of[list->count++] = {norm->db, partial + (size_t)chunks * gains, gains, chunks};
}

static inline void partials_add(const PartialList *list, Gpu *gpu) {
    int gains = 0, warps = 1;                                  // the longest gain; a warp for each chunk, as far as a block goes
    for (int i = 0; i < list->count; i++) {
        gains = list->of[i].gains > gains ? list->of[i].gains : gains;
        while (warps < 8 && warps < list->of[i].chunks) warps *= 2;
    }
    if (gains) LAUNCH(partials_add_kernel, dim3(CEIL_DIV(gains, WARP), list->count), warps * WARP, 0, gpu->stream, *list);
}

// ------------------------------------------------------------------------------------------------------------------ backward

// dx = a add + N'(dy; x), add may be nullptr; where sum != nullptr also sum = b dx + c other, other may be nullptr. SETs dx and sum, ADDs gains and biases.
// Each thread reads all it needs of a line's column before it writes there, so outputs may be inputs.
typedef struct NormBackward {
    real *dx, *sum;
    const real *dy, *x, *add, *other;
    float a, b, c;
} NormBackward;

typedef struct Slopes { float u, ux; } Slopes;                 // means of u and of u * xhat over the line

// The two means; w: the line's gains, times scale.
template <typename TEAM, int N>
static __device__ inline Slopes line_slopes(const Bits (&dy)[N], const Bits (&x)[N], const int (&column)[N], const real *w, Moments m, int width, bool centered, float scale = 1) {
    float u = 0, ux = 0;
    UNROLL for (int i = 0; i < N; i++) {
        Floats dy_i = bits_floats(dy[i]), x_i = bits_floats(x[i]), gain_i = bits_floats(bits_load(w, column[i]));
        for (int k = 0; k < PACK; k++) {
            float u_k = scale * gain_i.v[k] * dy_i.v[k];
            u += u_k;
            ux += u_k * ((x_i.v[k] - m.mean) * m.rstd);
        }
    }
    return {centered ? team_sum<TEAM>(u) / width : 0, team_sum<TEAM>(ux) / width};
}

// Hides from the compiler that it has unpacked these before: it unpacks once more rather than keeping floats, twice the registers, while the team sums.
template <int N> static __device__ inline void unpack_again(Bits (&x)[N]) {
    UNROLL for (int i = 0; i < N; i++)
        for (int k = 0; k < 4; k++) asm volatile("" : "+r"(x[i].v[k]));
}

// N'(dy; x) of pack i, and its part in the sums for gain and bias.
template <typename TEAM>
static __device__ inline Floats pack_slope(GainSums sums, int i, const Bits &dy_i, const Bits &x_i, const Bits &gain_i, Moments m, Slopes s, float scale = 1) {
    Floats dy = bits_floats(dy_i), x = bits_floats(x_i), gain = bits_floats(gain_i), dx;
    for (int q = 0; q < QUADS; q++) {
        int at = (i * QUADS + q) * TEAM::BLOCK;
        Quad dw = sums.w[at], db = sums.b ? sums.b[at] : Quad{};
        for (int j = 0; j < 4; j++) {
            int k = q * 4 + j;
            float xhat = (x.v[k] - m.mean) * m.rstd;
            dx.v[k] = m.rstd * (scale * gain.v[k] * dy.v[k] - s.u - xhat * s.ux);
            dw.v[j] += scale * dy.v[k] * xhat;
            db.v[j] += dy.v[k];
        }
        sums.w[at] = dw;
        if (sums.b) sums.b[at] = db;
    }
    return dx;
}

// partial: a row of gains for each chunk (blockIdx.x), then the same for the biases.
template <typename TEAM>
static __global__ void __launch_bounds__(TEAM::BLOCK, TEAM::PACKS <= 4 ? 2 : 1) norm_backward_kernel(NormBackward f, Norm norm, Lines lines, float *partial) {
    constexpr int N = TEAM::PACKS, BATCH = TEAM::THREADS > 256 ? 2 : N;         // a batch's loads go before its stores: the compiler must not move them so
    int column[N], width = lines.width, set = blockIdx.y;
    const real *w = norm.w + set * width;
    GainSums sums = gains_begin<TEAM, N>(norm.b != nullptr);
    SetRows rows = set_rows(lines);
    for (int64_t first = rows.first + (int64_t)blockIdx.x * TEAM::TEAMS; first < rows.end; first += (int64_t)gridDim.x * TEAM::TEAMS) {
        int64_t row = first + threadIdx.x / TEAM::THREADS, line = row * lines.sets + rows.set, at = line * width;
        Bits dy[N], x[N], gain[BATCH], add[BATCH], other[BATCH];
        line_columns<TEAM>(column, row < rows.end ? width : 0);
        UNROLL for (int i = 0; i < N; i++) dy[i] = bits_load(f.dy + at, column[i]), x[i] = bits_load(f.x + at, column[i]);
        Moments m = line_kept(norm, line, column);
        Slopes s = line_slopes<TEAM>(dy, x, column, w, m, width, norm.b != nullptr);
        unpack_again(dy), unpack_again(x);
        UNROLL for (int i = 0; i < N; i++) {
            UNROLL for (int j = i; j < N && j < i + BATCH && i % BATCH == 0; j++) {
                gain[j % BATCH] = bits_load(w, column[j]);
                add[j % BATCH] = bits_load(f.add ? f.add + at : nullptr, column[j]);
                other[j % BATCH] = bits_load(f.other ? f.other + at : nullptr, column[j]);
            }
            if (column[i] < 0) continue;
            Floats dx = pack_slope<TEAM>(sums, i, dy[i], x[i], gain[i % BATCH], m, s), add_i = bits_floats(add[i % BATCH]), other_i = bits_floats(other[i % BATCH]);
            for (int k = 0; k < PACK; k++) dx.v[k] += f.a * add_i.v[k];
            pack_store(f.dx + at + column[i], pack_round(dx));
            if (!f.sum) continue;
            for (int k = 0; k < PACK; k++) dx.v[k] = f.b * dx.v[k] + f.c * other_i.v[k];
            pack_store(f.sum + at + column[i], pack_round(dx));
        }
    }
    line_columns<TEAM>(column, width);
    int64_t gains = (int64_t)norm.site.gains * norm.experts;
    partial += blockIdx.x * gains + set * width;
    gains_store<TEAM>(partial, sums.w, column);
    if (sums.b) gains_store<TEAM>(partial + gridDim.x * gains, sums.b, column);
}

static inline void norm_backward(const Norm *norm, NormBackward f, Gpu *gpu) {
    Lines lines = norm_lines(norm);
    norm_launch(lines.width, [&](auto team) {
        typedef decltype(team) TEAM;
        int gains = norm_gains(norm), most = gain_chunks(gains, (size_t)gains * (norm->b ? 2 : 1), gpu);
        int64_t blocks = CEIL_DIV(lines.rows, TEAM::TEAMS);
        int chunks = blocks < most ? (int)blocks : most;
        size_t shared = gains_bytes<TEAM, TEAM::PACKS>(norm->b != nullptr);
        PartialList list = {};
        LAUNCH(norm_backward_kernel<TEAM>, lines_grid(chunks, lines, norm), TEAM::BLOCK, shared, gpu->stream, f, *norm, lines, gpu->scratch);
        partials_of(&list, norm, gpu->scratch, chunks);
        partials_add(&list, gpu);
    });
}
