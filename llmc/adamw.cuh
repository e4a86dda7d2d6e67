// adamw.cuh: AdamW (Loshchilov, Hutter 2019, algorithm 2), gradient clipping by the global norm,
// and rounding of the weights to the storage type, to nearest or stochastically.
//
//   g = clip_factor d,  clip_factor = min(1, clip / |d|)   gradient clipping
//   m = b1 m + (1 - b1) g                                  first moment
//   v = b2 v + (1 - b2) g^2                                second moment
//   w -= lr (c1 m / (sqrt(c2 v) + eps) + decay (w - target)),  c = 1 / (1 - b^step)
//
// Weight decay is towards `target`: 0, or 1 for gains that start there.
//
// The master weights are float; the matrix products read a copy in the storage type. The gradient
// norm and the decision to take the step stay on the device: the update reads them there, and the
// host never waits. One launch serves all tensors: a block finds the entry of its
// first element by binary search. Bytes per parameter, and the computed floor (gpu.cuh) for 124 M
// parameters:
//   gradient_square  4   (d)                                                         0.12 ms
//   adamw_apply     30   in bf16 (m, v, master read and written: 24; d: 4; w: 2)     0.87 ms
//                   28   in float, where w is the master itself                      0.81 ms
//   ngpt_normalize  10   in bf16 (master read, then read again from the caches and
//                        written; w)                                                 0.29 ms
//
// With several processes, each updates the shards of tensors that it owns (ZeRO-1, memory.h). It
// keeps moments, and in bf16 master weights, of these alone; gradients and the weights of the
// products are whole on all. An all-reduce between gradient_square and adamw_apply adds up the sums
// that decide whether the step is taken.
#pragma once
#include "loss.cuh"
#include "rand.h"

// The shard of one tensor that this process owns; with one process it is the whole tensor.
struct UpdateEntry {
    int64_t offset;            // in the arenas of whole tensors
    int64_t state;             // in the arenas of shards
    int64_t size;              // elements
    float lr, decay, target;
    // nGPT keeps the lines (rows or columns) of a matrix at length 1. line: elements in a line;
    // stride: distance from one element to the next, 1 in a row, the matrix's width in a column.
    // Several matrices may lie one below the other. 0, 0: the tensor is not normalized.
    int line, stride;
    int64_t skipped = 0;       // elements before it in the shards that have no second moment
    float scale = 0;           // of Muon's update (muon.cuh); 0: AdamW updates the tensor
};

// Processes add these up before they decide on the step: the losses (loss_sums, router_count);
// the squares of all gradients, before clipping (gradient_square); and the tokens, which the host
// counts.
enum { SUM_SQUARE = LOSS_SUMS, SUM_TOKENS, REDUCED_SUMS };

// The state of an update, on the device.
struct UpdateState {
    double sums[REDUCED_SUMS];
    double norm;               // of the gradient, before clipping
    float clip_factor;         // multiplies every gradient
    int applied;               // 1: losses and norm are finite and within the step's limits
};

struct AdamWStep {
    float beta1, beta2, eps;
    float correct1, correct2;  // 1 / (1 - beta^step)
    float clip;                // largest global norm; 0 or less: no gradient clipping
    int stochastic;            // rounding
    uint64_t key;              // of the rounding: another one each step
    double max_ce, max_norm;   // limits of sums[SUM_CE] and of norm; 0: none
};

// Gaps between tensors hold zeros. With one process shards and whole tensors are the same.
struct Arenas {
    real *w;                   // weights of the products, whole; may be master itself
    float *master;             // master weights, shards; whole where w is master itself
    float *m, *v;              // moments, shards
    const float *d;            // gradients, whole
    int64_t total;             // elements of the shards
};

enum { SQUARES_THREADS = 256, NORM_PIECES = 1024 };
enum { UPDATE_THREADS = 256, UPDATE_ROUNDS = 4 };
enum { UPDATE_PIECE = UPDATE_THREADS * UPDATE_ROUNDS * FOUR };

// Four neighbours of an arena in the storage type.
struct alignas(FOUR * sizeof(real)) RealFour {
    real v[FOUR];
};
__device__ inline Four four_load(const float *p) { return *reinterpret_cast<const Four *>(p); }
__device__ inline Four reals_load(const real *p) {
    RealFour x = *reinterpret_cast<const RealFour *>(p);
    return {{to_float(x.v[0]), to_float(x.v[1]), to_float(x.v[2]), to_float(x.v[3])}};
}
__device__ inline void four_store(float *p, const Four &x) { *reinterpret_cast<Four *>(p) = x; }
__device__ inline void reals_store(real *p, const Four &x) {
    words_store(p, RealFour{to_real(x.v[0]), to_real(x.v[1]), to_real(x.v[2]), to_real(x.v[3])});
}

// --------------------------------------------------------------------------------------- rounding

// Stochastic rounding of x to bfloat16: away from zero with the probability of the fraction that is
// cut off. random is below 2^16; added to the 16 bits that are cut off, it carries over into the
// rest. Infinities and NaN stay what they are, and no number becomes infinite.
__device__ inline float round_up_or_down(float x, unsigned random) {
    const unsigned KEPT = 0xffff0000u, EXPONENT = 0x7f800000u;
    unsigned bits = __float_as_uint(x), rounded = (bits + random) & KEPT;
    if ((bits & EXPONENT) == EXPONENT) return x;
    return __uint_as_float((rounded & EXPONENT) == EXPONENT ? bits & KEPT : rounded);
}

// Stores elements i..i+3 of the arena in the storage type. One hash of (key, i / 4) gives each of
// the four 16 random bits.
__device__ inline void weights_store(real *w, int64_t i, const Four &master, int stochastic,
                                     uint64_t key) {
    Four out;
    bool exact = !stochastic || sizeof(real) == sizeof(float);  // reals_store rounds, if at all
    uint64_t random = exact ? 0 : rand_at(key, (uint64_t)i / FOUR);
    for (int k = 0; k < FOUR; k++) {
        float x = master.v[k];
        out.v[k] = exact ? x : round_up_or_down(x, (unsigned)(random >> 16 * k & 0xffff));
    }
    reals_store(w + i, out);
}

static __global__ void __launch_bounds__(UPDATE_THREADS)
weights_round_kernel(real *w, const float *master, int64_t total, int stochastic, uint64_t key) {
    int64_t i = grid_thread() * FOUR;
    if (i < total) weights_store(w, i, four_load(master + i), stochastic, key);
}

// w = round(master) for a whole arena, after weights were set or read; total is a multiple of 4.
// With the key of an update it gives the bits that the update wrote.
static inline void weights_round(real *w, const float *master, int64_t total, int stochastic,
                                 uint64_t key, Gpu *gpu) {
    int64_t blocks = CEIL_DIV(total, UPDATE_THREADS * FOUR);
    LAUNCH(weights_round_kernel, blocks, UPDATE_THREADS, 0, gpu->stream, w, master, total,
           stochastic, key);
}

// ----------------------------------------------------------------------------- norm of gradients

// partial[block] = sum of squares of the block's share of each entry. In double, which no square of
// a float overflows. The grid, and with it the order of the sum, depends on sizes alone.
static __global__ void __launch_bounds__(SQUARES_THREADS)
square_sum_kernel(double *partial, const wide *d, const UpdateEntry *entries, int count) {
    double sum = 0;
    for (int k = 0; k < count; k++) {
        int64_t offset = entries[k].offset, size = entries[k].size;
        for (int64_t i = grid_thread() * FOUR; i < size; i += grid_threads() * FOUR) {
            Four x = four_load(d + offset + i);
            for (int j = 0; j < FOUR && i + j < size; j++) sum += square(x.v[j]);
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// SETs or ADDs to[k] = the sum of partial[pieces][k]. A block takes a k.
static __global__ void __launch_bounds__(SQUARES_THREADS)
sums_add_kernel(double *to, const double *partial, int pieces, int how) {
    int k = blockIdx.x;
    double sum = 0;
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) sum += partial[i * gridDim.x + k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) to[k] = how == ADD ? to[k] + sum : sum;
}

// Blocks for a sum of `size` squares: so many that a thread has at most four loads, of `width`
// values each, but no more than `limit`.
static inline int square_pieces(int64_t size, int width, int limit) {
    int64_t pieces = CEIL_DIV(size, (int64_t)SQUARES_THREADS * width * 4);
    return pieces < limit ? (int)pieces : limit;
}

// *square = sum of d[i]^2, on the device, over the shards of `count` entries.
static inline void gradient_square(double *square, Arenas t, const UpdateEntry *entries, int count,
                                   Gpu *gpu) {
    int pieces = square_pieces(t.total, FOUR, NORM_PIECES);
    double *partial = scratch_for<double>(pieces, gpu);
    LAUNCH(square_sum_kernel, pieces, SQUARES_THREADS, 0, gpu->stream, partial, t.d, entries,
           count);
    LAUNCH(sums_add_kernel, 1, SQUARES_THREADS, 0, gpu->stream, square, partial, pieces, SET);
}

// ----------------------------------------------------------------------------------------- update

// Decides whether the step is taken, and the factor of gradient clipping.
static __global__ void decide_kernel(UpdateState *state, AdamWStep step) {
    UpdateState &s = *state;
    const double *sums = s.sums;
    s.norm = sqrt(sums[SUM_SQUARE]);
    s.applied = isfinite(sums[SUM_CE]) && isfinite(sums[SUM_Z]) && isfinite(sums[SUM_ROUTER]) &&
                isfinite(s.norm) && (!step.max_ce || sums[SUM_CE] <= step.max_ce) &&
                (!step.max_norm || s.norm <= step.max_norm);
    bool clipped = step.clip > 0 && s.norm > step.clip;
    s.clip_factor = clipped ? (float)(step.clip / s.norm) : 1.0f;
}

// The last entry that begins at or before element i of the shards; the first if none does.
__device__ inline int entry_find(const UpdateEntry *entries, int count, int64_t i) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (entries[middle].state <= i) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Whether the products read a rounded copy of the master weights.
__device__ inline bool is_copied(const Arenas &t) { return (const void *)t.w != t.master; }

// The master weights of an entry.
__device__ inline float *master_of(const Arenas &t, const UpdateEntry &e) {
    return t.master + (is_copied(t) ? e.state : e.offset);
}

// Stores elements i..i+3 of an entry's master weights, and their copy.
__device__ inline void master_store(const Arenas &t, const UpdateEntry &e, int64_t i, const Four &w,
                                    const AdamWStep &s) {
    four_store(master_of(t, e) + i, w);
    if (is_copied(t)) weights_store(t.w, e.offset + i, w, s.stochastic, s.key);
}

// Updates elements i..i+3 of an entry. Elements from its size on are a gap and stay as they are.
__device__ inline void adamw_four(const Arenas &t, const UpdateEntry &e, int64_t i,
                                  const AdamWStep &s, float clip_factor) {
    int64_t own = e.state + i;
    Four w = four_load(master_of(t, e) + i), m = four_load(t.m + own);
    float *second = t.v + own - e.skipped;
    Four v = four_load(second), d = four_load(t.d + e.offset + i);
    for (int k = 0; k < FOUR; k++) {
        if (i + k >= e.size) break;
        float g = clip_factor * d.v[k];
        m.v[k] = s.beta1 * m.v[k] + (1 - s.beta1) * g;
        v.v[k] = s.beta2 * v.v[k] + (1 - s.beta2) * g * g;
        w.v[k] -= e.lr * (m.v[k] * s.correct1 / (sqrtf(v.v[k] * s.correct2) + s.eps) +
                          e.decay * (w.v[k] - e.target));
    }
    four_store(t.m + own, m);
    four_store(second, v);
    master_store(t, e, i, w, s);
}

// A block updates UPDATE_PIECE elements of the shards: a part of one tensor, or many short tensors.
static __global__ void __launch_bounds__(UPDATE_THREADS)
adamw_kernel(Arenas t, const UpdateEntry *entries, int count, const UpdateState *state,
             AdamWStep step) {
    int64_t first = (int64_t)blockIdx.x * UPDATE_PIECE;
    int at = entry_find(entries, count, first);
    float clip_factor = state->clip_factor;
    if (!state->applied) return;
    for (int round = 0; round < UPDATE_ROUNDS; round++) {
        int64_t i = first + (round * UPDATE_THREADS + threadIdx.x) * FOUR;
        while (at + 1 < count && entries[at + 1].state <= i) at++;
        UpdateEntry e = entries[at];
        if (e.scale) continue;  // Muon's
        if (i >= e.state && i < e.state + e.size)
            adamw_four(t, e, i - e.state, step, clip_factor);
    }
}

// SETs state->norm, clip_factor and applied from its sums; then, if state->applied, updates moments
// and weights of all entries but Muon's. entries: on the device, by ascending offset; offsets and
// t.total are multiples of 4 elements. The caller reads and clears state->sums.
static inline void adamw_apply(Arenas t, const UpdateEntry *entries, int count, UpdateState *state,
                               AdamWStep step, Gpu *gpu) {
    LAUNCH(decide_kernel, 1, 1, 0, gpu->stream, state, step);
    LAUNCH(adamw_kernel, CEIL_DIV(t.total, UPDATE_PIECE), UPDATE_THREADS, 0, gpu->stream, t,
           entries, count, state, step);
}

// ------------------------------------------------------------------------ nGPT: lines of length 1
// w = w / |w| along the rows or columns of matrices (Loshchilov et al. 2024, section 2.3).

enum { NGPT_PIECES = 256, NGPT_WARPS = UPDATE_THREADS / WARP };
enum { STRIP_FOURS = 8, STRIP = STRIP_FOURS * FOUR };  // columns whose rows are 128 bytes

__device__ inline void ngpt_four(const Arenas &t, const UpdateEntry &e, int64_t i,
                                 const float (&scale)[FOUR], const AdamWStep &s) {
    Four w = four_load(master_of(t, e) + i);
    for (int k = 0; k < FOUR; k++) w.v[k] *= scale[k];
    master_store(t, e, i, w, s);
}

// The factor of a line with this sum of squares. A line of zeros stays (the padded vocabulary).
__device__ inline float ngpt_scale(float square) { return square > 0 ? 1 / sqrtf(square) : 1; }

// A warp takes a row, and reads it again once it knows its length.
__device__ inline void ngpt_rows(const Arenas &t, const UpdateEntry &e, const AdamWStep &s) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float *master = master_of(t, e);
    int64_t rows = e.size / e.line, step = (int64_t)gridDim.y * NGPT_WARPS;
    for (int64_t row = (int64_t)blockIdx.y * NGPT_WARPS + warp; row < rows; row += step) {
        int64_t at = row * e.line;
        float square = 0;
        for (int i = lane * FOUR; i < e.line; i += WARP * FOUR) {
            Four w = four_load(master + at + i);
            for (int k = 0; k < FOUR; k++) square += w.v[k] * w.v[k];
        }
        float scale = ngpt_scale(warp_sum(square)), all[FOUR] = {scale, scale, scale, scale};
        for (int i = lane * FOUR; i < e.line; i += WARP * FOUR) ngpt_four(t, e, at + i, all, s);
    }
}

// A block takes a strip of columns. A thread has four of them, in every `rows`-th row.
__device__ inline void ngpt_columns(const Arenas &t, const UpdateEntry &e, const AdamWStep &s) {
    SHARED(Four, squares, UPDATE_THREADS);
    int four = threadIdx.x % STRIP_FOURS, first = threadIdx.x / STRIP_FOURS;
    int rows = UPDATE_THREADS / STRIP_FOURS, strips = CEIL_DIV(e.stride, STRIP);
    const float *master = master_of(t, e);
    int64_t matrix = (int64_t)e.line * e.stride;
    for (int64_t strip = blockIdx.y; strip < e.size / matrix * strips; strip += gridDim.y) {
        int column = (int)(strip % strips) * STRIP + four * FOUR;
        int end = column < e.stride ? e.line : 0;
        int64_t at = strip / strips * matrix + column;
        Four mine = {};
        for (int i = first; i < end; i += rows) {
            Four w = four_load(master + at + (int64_t)i * e.stride);
            for (int k = 0; k < FOUR; k++) mine.v[k] += w.v[k] * w.v[k];
        }
        __syncthreads();  // all threads are done with the sums of the strip before
        squares[threadIdx.x] = mine;
        __syncthreads();
        float scale[FOUR] = {};
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < FOUR; k++) scale[k] += squares[row * STRIP_FOURS + four].v[k];
        for (int k = 0; k < FOUR; k++) scale[k] = ngpt_scale(scale[k]);
        for (int i = first; i < end; i += rows)
            ngpt_four(t, e, at + (int64_t)i * e.stride, scale, s);
    }
}

// The grid is (entry, piece): there may be more entries than a grid has blocks along y.
static __global__ void __launch_bounds__(UPDATE_THREADS, 2)
ngpt_normalize_kernel(Arenas t, const UpdateEntry *entries, const UpdateState *state,
                      AdamWStep step) {
    UpdateEntry e = entries[blockIdx.x];
    if (!e.line || (state && !state->applied)) return;
    if (e.stride == 1) ngpt_rows(t, e, step);
    else ngpt_columns(t, e, step);
}

// Divides the lines of entries by their lengths, after adamw_apply with the same step and only if
// state->applied. state may be nullptr: always.
static inline void ngpt_normalize(Arenas t, const UpdateEntry *entries, int count,
                                  const UpdateState *state, AdamWStep step, Gpu *gpu) {
    LAUNCH(ngpt_normalize_kernel, dim3(count, NGPT_PIECES), UPDATE_THREADS, 0, gpu->stream, t,
           entries, state, step);
}
