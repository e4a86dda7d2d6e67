// adamw.cuh: AdamW (Loshchilov, Hutter 2019, algorithm 2), the norm of the gradients, and rounding of the weights to the storage type.
//
//   g = scale d,  scale = min(1, clip / |d|)         m = b1 m + (1 - b1) g         v = b2 v + (1 - b2) g^2
//   w -= lr (c1 m / (sqrt(c2 v) + eps) + decay (w - target)),  c = 1 / (1 - b^step): decay is towards target, 1 for gains that start there
//
// The master weights are float; the products read a copy in the storage type, rounded to nearest or stochastically. What decides about a step, the norm and
// whether all is finite, stays on the device: the update reads it there, and the host never waits. One launch serves all tensors: a block
// finds the entry of its first element by binary search. Bytes per parameter, and the computed floor at 4.3 TB/s for 124 M parameters:
//   gradient_square  4   (d)                                                                     0.12 ms
//   adamw_update    30   in bf16 (m, v, master read and written: 24; d: 4; w: 2)                 0.87 ms
//                   28   in float, where w is the master itself                                  0.81 ms
//   unit_lines      10   in bf16 (master read, and once more from the caches, and written; w)    0.29 ms         nGPT alone: w = w / |w| along lines of matrices
//
// Of several processes each updates the parts of tensors that it owns (memory.h): it keeps moments, and in bf16 master weights, of these alone. Gradients and the
// weights of the products are whole on all. What decides about the step is then added up over processes between part_square and adamw_apply.
#pragma once
#include "loss.cuh"

// The part of one tensor that this process owns, of one process all of it: where it lies in arenas of everything and in those of what is owned, and its rates. Of a
// matrix whose lines have length 1, how many elements a line has, and from one to the next: 1 in rows, in columns the width of the matrix, of which several may lie
// one below the other; otherwise 0, 0.
typedef struct UpdateEntry { int64_t offset, state, size; float lr, decay, target; int line, step; } UpdateEntry;
// On the device. sums: of the losses since the last update (loss_sums; router_count); square: of all gradients together, before clipping, and norm its root; seen: tokens,
// where they are of several processes; finite: sums and norm are, and within the step's limits. The first SHARED_SUMS doubles are what processes add up.
typedef struct UpdateState { double sums[3], square, seen, norm; float scale; int finite; } UpdateState;
// correct1 = 1 / (1 - beta1^step), correct2 as well; clip: the largest norm, 0 or less: none; stochastic, key: of the rounding, another key each step.
// most: the largest sums[0] and norm with which anything changes; 0: any.
typedef struct AdamWStep { float beta1, beta2, eps, correct1, correct2; float clip; int stochastic; uint64_t key; double max_ce, max_norm; } AdamWStep;
// Weights as the products read them and gradients, of everything; moments and master weights, of what is owned: `total` elements. Of one process that is the same, with the
// same offsets. Gaps between tensors hold zeros. w may be master itself, and then that is of everything too.
typedef struct Arenas { real *w; float *master, *m, *v; const float *d; int64_t total; } Arenas;

enum { SHARED_SUMS = 5 };
enum { FOUR = 4, NORM_THREADS = 256, NORM_PIECES = 1024, UPDATE_THREADS = 256, UPDATE_ROUNDS = 4, UPDATE_PIECE = UPDATE_THREADS * UPDATE_ROUNDS * FOUR };

// Four neighbours: 16 bytes of an arena of floats, and their copies in the storage type.
struct alignas(16) Four { float v[FOUR]; };
struct alignas(FOUR * sizeof(real)) RealFour { real v[FOUR]; };
static __device__ inline Four four_load(const float *p) { return *reinterpret_cast<const Four *>(p); }
static __device__ inline void four_store(float *p, const Four &x) { *reinterpret_cast<Four *>(p) = x; }

// ------------------------------------------------------------------------------------------------------------------ rounding

// SplitMix64's finalizer, and a hash of (key, n): rand.h's rand_at on the device.
static __device__ inline uint64_t round_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static __device__ inline uint64_t round_bits(uint64_t key, uint64_t n) {
    return round_mix(round_mix(key + 0x9E3779B97F4A7C15ull) ^ round_mix(n + 0xD1B54A32D192ED03ull));
}

// x as bfloat16, away from zero with the probability of the fraction that goes: the 16 bits cut off carry over when random (below 2^16) is added to them.
// Infinities and NaN stay what they are, and a number never becomes infinite.
static __device__ inline float round_up_or_down(float x, unsigned random) {
    const unsigned KEPT = 0xffff0000u, EXPONENT = 0x7f800000u;
    unsigned bits = __float_as_uint(x), rounded = (bits + random) & KEPT;
    if ((bits & EXPONENT) == EXPONENT) return x;
    return __uint_as_float((rounded & EXPONENT) == EXPONENT ? bits & KEPT : rounded);
}

// Elements i..i+3 of the arena in the storage type; their 16 random bits each come from one hash of (key, i / 4).
static __device__ inline void weights_store(real *w, int64_t i, const Four &master, int stochastic, uint64_t key) {
    RealFour out;
    uint64_t random = stochastic && sizeof(real) < sizeof(float) ? round_bits(key, (uint64_t)i / FOUR) : 0;
    for (int k = 0; k < FOUR; k++) {
        bool exact = !stochastic || sizeof(real) == sizeof(float);                             // to_real rounds to nearest, or not at all
        out.v[k] = to_real(exact ? master.v[k] : round_up_or_down(master.v[k], (unsigned)(random >> 16 * k & 0xffff)));
    }
    words_store(w + i, out);
}

static __global__ void __launch_bounds__(UPDATE_THREADS) weights_round_kernel(real *w, const float *master, int64_t total, int stochastic, uint64_t key) {
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * FOUR;
    if (i < total) weights_store(w, i, four_load(master + i), stochastic, key);
}

// w = round(master) for a whole arena, total a multiple of 4: after weights were set or read. With the key of an update the same bits as that update wrote.
static inline void weights_round(real *w, const float *master, int64_t total, int stochastic, uint64_t key, Gpu *gpu) {
    unsigned blocks = (unsigned)CEIL_DIV(total, (int64_t)UPDATE_THREADS * FOUR);
    LAUNCH(weights_round_kernel, blocks, UPDATE_THREADS, 0, gpu->stream, w, master, total, stochastic, key);
}

// ------------------------------------------------------------------------------------------------------------------ norm

// partial[block] = sum of squares of the block's share, in double, as no float gradient overflows it. The grid, and with it the order, depends on size alone.
static __global__ void __launch_bounds__(NORM_THREADS) square_sum_kernel(double *partial, const wide *d, int64_t size) {
    double sum = 0;
    int64_t step = (int64_t)gridDim.x * blockDim.x * FOUR, i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * FOUR;
    for (; i + FOUR <= size; i += step) {
        Four x = four_load(d + i);
        for (int k = 0; k < FOUR; k++) sum += (double)x.v[k] * x.v[k];
    }
    for (; i < size; i++) sum += (double)d[i] * d[i];          // fewer than four are left, for one thread
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The same over the parts that a process owns: every block takes a share of each.
static __global__ void __launch_bounds__(NORM_THREADS) part_square_kernel(double *partial, const wide *d, const UpdateEntry *entries, int count) {
    double sum = 0;
    int64_t step = (int64_t)gridDim.x * blockDim.x * FOUR, first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * FOUR;
    for (int k = 0; k < count; k++)
        for (int64_t i = first; i < entries[k].size; i += step) {
            Four x = four_load(d + entries[k].offset + i);
            for (int j = 0; j < FOUR && i + j < entries[k].size; j++) sum += (double)x.v[j] * x.v[j];
        }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(NORM_THREADS) square_add_kernel(double *square, const double *partial, int pieces) {
    double sum = 0;
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *square = sum;
}

// How many blocks add up `size` squares, and that scratch has room for their sums.
static inline int square_pieces(int64_t size, const Gpu *gpu) {
    int64_t rounds = CEIL_DIV(size, (int64_t)NORM_THREADS * FOUR * 4);                         // at least four loads for a thread
    int pieces = rounds < NORM_PIECES ? (int)rounds : NORM_PIECES;
    CHECK(gpu->scratch_size >= 2 * (size_t)pieces, "expected room for %d partial sums of double, found %zu floats\n  -> a bug: report it with the command line",
          pieces, gpu->scratch_size);
    return pieces;
}

// *square = sum of d[i]^2, on the device.
static inline void gradient_square(double *square, const wide *d, int64_t size, Gpu *gpu) {
    int pieces = square_pieces(size, gpu);
    LAUNCH(square_sum_kernel, pieces, NORM_THREADS, 0, gpu->stream, (double *)gpu->scratch, d, size);
    LAUNCH(square_add_kernel, 1, NORM_THREADS, 0, gpu->stream, square, (double *)gpu->scratch, pieces);
}

// The same of the gradients t.d of the parts that a process owns.
static inline void part_square(double *square, Arenas t, const UpdateEntry *entries, int count, Gpu *gpu) {
    int pieces = square_pieces(t.total, gpu);
    LAUNCH(part_square_kernel, pieces, NORM_THREADS, 0, gpu->stream, (double *)gpu->scratch, t.d, entries, count);
    LAUNCH(square_add_kernel, 1, NORM_THREADS, 0, gpu->stream, square, (double *)gpu->scratch, pieces);
}

// ------------------------------------------------------------------------------------------------------------------ update

static __device__ inline bool is_finite(double x) { return x - x == 0; }

static __global__ void decide_kernel(UpdateState *state, AdamWStep step) {
    state->norm = sqrt(state->square);
    state->finite = is_finite(state->sums[0]) && is_finite(state->sums[1]) && is_finite(state->sums[2]) && is_finite(state->norm) &&
                    (!step.max_ce || state->sums[0] <= step.max_ce) && (!step.max_norm || state->norm <= step.max_norm);
    state->scale = step.clip > 0 && state->norm > step.clip ? (float)(step.clip / state->norm) : 1.0f;
}

// The last entry that begins at or before element i of what is owned; the first where none does.
static __device__ inline int entry_find(const UpdateEntry *entries, int count, int64_t i) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (entries[middle].state <= i) low = middle;
        else high = middle - 1;
    }
    return low;
}

// The master weights of an entry.
static __device__ inline float *master_of(const Arenas &t, const UpdateEntry &e) { return t.master + ((const void *)t.w == t.master ? e.offset : e.state); }

// Elements i..i+3 of an entry, of which those from its size on are a gap and stay as they are.
static __device__ inline void adamw_four(const Arenas &t, const UpdateEntry &e, int64_t i, const AdamWStep &s, float scale) {
    float *master = master_of(t, e) + i;
    int64_t own = e.state + i, at = e.offset + i;
    Four w = four_load(master), m = four_load(t.m + own), v = four_load(t.v + own), d = four_load(t.d + at);
    for (int k = 0; k < FOUR; k++) {
        if (i + k >= e.size) break;
        float g = scale * d.v[k];
        m.v[k] = s.beta1 * m.v[k] + (1 - s.beta1) * g;
        v.v[k] = s.beta2 * v.v[k] + (1 - s.beta2) * g * g;
        w.v[k] -= e.lr * (m.v[k] * s.correct1 / (sqrtf(v.v[k] * s.correct2) + s.eps) + e.decay * (w.v[k] - e.target));
    }
    four_store(t.m + own, m);
    four_store(t.v + own, v);
    four_store(master, w);
    if ((const void *)t.w != t.master) weights_store(t.w, at, w, s.stochastic, s.key);
}

// Block: UPDATE_PIECE elements of what is owned, which belong to one tensor or, where tensors are short, to many.
static __global__ void __launch_bounds__(UPDATE_THREADS) adamw_kernel(Arenas t, const UpdateEntry *entries, int count, const UpdateState *state, AdamWStep step) {
    int64_t first = (int64_t)blockIdx.x * UPDATE_PIECE;
    int at = entry_find(entries, count, first);
    float scale = state->scale;
    if (!state->finite) return;
    for (int round = 0; round < UPDATE_ROUNDS; round++) {
        int64_t i = first + (round * UPDATE_THREADS + threadIdx.x) * FOUR;
        while (at + 1 < count && entries[at + 1].state <= i) at++;
        UpdateEntry e = entries[at];
        if (i >= e.state && i < e.state + e.size) adamw_four(t, e, i - e.state, step, scale);
    }
}

// Once state->square and sums are complete: state->norm, scale and finite; then, where state->finite, the moments and weights of all entries.
// entries: on the device, ascending; offsets and t.total are multiples of 32 elements. state->sums is left for the caller to read and to clear.
static inline void adamw_apply(Arenas t, const UpdateEntry *entries, int count, UpdateState *state, AdamWStep step, Gpu *gpu) {
    LAUNCH(decide_kernel, 1, 1, 0, gpu->stream, state, step);
    LAUNCH(adamw_kernel, (unsigned)CEIL_DIV(t.total, (int64_t)UPDATE_PIECE), UPDATE_THREADS, 0, gpu->stream, t, entries, count, state, step);
}

// One step of one process.
static inline void adamw_update(Arenas t, const UpdateEntry *entries, int count, UpdateState *state, AdamWStep step, Gpu *gpu) {
    gradient_square(&state->square, t.d, t.total, gpu);
    adamw_apply(t, entries, count, state, step, gpu);
}

// ------------------------------------------------------------------------------------------------------------------ lines of length 1

enum { UNIT_PIECES = 256, UNIT_WARPS = UPDATE_THREADS / WARP, STRIP_QUADS = 8, STRIP = STRIP_QUADS * FOUR };        // a strip: columns whose rows are 128 bytes

static __device__ inline void unit_four(const Arenas &t, const UpdateEntry &e, int64_t i, const float (&scale)[FOUR], const AdamWStep &s) {
    float *master = master_of(t, e) + i;
    Four w = four_load(master);
    for (int k = 0; k < FOUR; k++) w.v[k] *= scale[k];
    four_store(master, w);
    if ((const void *)t.w != t.master) weights_store(t.w, e.offset + i, w, s.stochastic, s.key);
}

// What a line of this square is multiplied by; a line of zeros, as of the padded vocabulary, stays.
static __device__ inline float unit_scale(float square) { return square > 0 ? 1 / sqrtf(square) : 1; }

// A warp takes a row, and reads it again once it knows its length.
static __device__ inline void unit_rows(const Arenas &t, const UpdateEntry &e, const AdamWStep &s) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float *master = master_of(t, e);
    int64_t rows = e.size / e.line;
    for (int64_t row = (int64_t)blockIdx.x * UNIT_WARPS + warp; row < rows; row += (int64_t)gridDim.x * UNIT_WARPS) {
        int64_t at = row * e.line;
        float square = 0;
        for (int i = lane * FOUR; i < e.line; i += WARP * FOUR) {
            Four w = four_load(master + at + i);
            for (int k = 0; k < FOUR; k++) square += w.v[k] * w.v[k];
        }
        float scale = unit_scale(warp_sum(square)), all[FOUR] = {scale, scale, scale, scale};
        for (int i = lane * FOUR; i < e.line; i += WARP * FOUR) unit_four(t, e, at + i, all, s);
    }
}

// A block takes a strip of columns, each warp every so many rows of it.
static __device__ inline void unit_columns(const Arenas &t, const UpdateEntry &e, const AdamWStep &s) {
    SHARED(Four, squares, UPDATE_THREADS);
    int quad = threadIdx.x % STRIP_QUADS, first = threadIdx.x / STRIP_QUADS, rows = UPDATE_THREADS / STRIP_QUADS, strips = CEIL_DIV(e.step, STRIP);
    const float *master = master_of(t, e);
    int64_t matrix = (int64_t)e.line * e.step;
    for (int64_t strip = blockIdx.x; strip < e.size / matrix * strips; strip += gridDim.x) {
        int column = (int)(strip % strips) * STRIP + quad * FOUR, end = column < e.step ? e.line : 0;
        int64_t at = strip / strips * matrix + column;
        Four mine = {};
        for (int i = first; i < end; i += rows) {
            Four w = four_load(master + at + (int64_t)i * e.step);
            for (int k = 0; k < FOUR; k++) mine.v[k] += w.v[k] * w.v[k];
        }
        __syncthreads();                                       // all are done with the sums of the strip before
        squares[threadIdx.x] = mine;
        __syncthreads();
        float scale[FOUR] = {};
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < FOUR; k++) scale[k] += squares[row * STRIP_QUADS + quad].v[k];
        for (int k = 0; k < FOUR; k++) scale[k] = unit_scale(scale[k]);
        for (int i = first; i < end; i += rows) unit_four(t, e, at + (int64_t)i * e.step, scale, s);
    }
}

// Block (piece, entry).
static __global__ void __launch_bounds__(UPDATE_THREADS, 2) unit_lines_kernel(Arenas t, const UpdateEntry *entries, const UpdateState *state, AdamWStep step) {
    UpdateEntry e = entries[blockIdx.y];
    if (!e.line || (state && !state->finite)) return;
    if (e.step == 1) unit_rows(t, e, step);
    else unit_columns(t, e, step);
}

// After adamw_update with the same step: where state->finite, divides the lines of entries that have such by their lengths. state may be nullptr: at any rate.
static inline void unit_lines(Arenas t, const UpdateEntry *entries, int count, const UpdateState *state, AdamWStep step, Gpu *gpu) {
    LAUNCH(unit_lines_kernel, dim3(UNIT_PIECES, count), UPDATE_THREADS, 0, gpu->stream, t, entries, state, step);
}
