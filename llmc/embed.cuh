// embed.cuh: token and position embedding, and the gradient back to the tables.
//
//   forward    e[b, t] = scale * wte[token[b, t]] (+ wpe[t'])    t' = t - begins[b, t]
//   backward   dwte[v] += scale * sum of de over the places (b, t) that hold token v
//              dwpe[t'] += sum of de over the places whose position is t'
//
//   e, de    [B, T, C]
//   wte      [Vp, C], dwte in float
//   wpe      [T, C], dwpe in float; nullptr with RoPE
//   tokens   [B, T] int32, on the device
//   begins   [B, T] int32: where a token's document begins (--restart-positions); nullptr: t' = t
//   groups   [4, B T] int32: the places sorted by token (token_groups) and, for wpe, by position
//            (position_groups)
//
// Many places hold the same token, so dwte is a sum of rows of de for each token. Atomics would
// change the order of that sum from run to run. Instead the host sorts the places of the batch
// by token while the GPU runs the forward pass. Blocks take equal pieces of the sorted places,
// since one token can be a tenth of a text (bytes). dwpe is the same sum, sorted by position.
//
// Values moved, and the computed floor (gpu.cuh) for GPT-2 in bf16 (n = B T = 65536, C = 768):
//   forward    2C per place: a row of wte, a row of e (wpe stays in the L2 cache)        0.047 ms
//   backward   C per place (de), and for each of the 15,000 distinct tokens of this
//              batch a row of dwte, float, read and written                              0.045 ms
//              pieces inside a group: a row of float each, written and read (334 rows)   0.001 ms
//              dwpe: de once more, at most from memory, and T rows of dwpe               0.025 ms
#pragma once
#include "gpu.cuh"

enum { GROUP_PIECE = 64, GROUP_LOADS = 8 };

// ---------------------------------------------------------------------------------------- forward

// Rows are places (row_grid).
static __global__ void __launch_bounds__(ROW_THREADS)
embedding_forward_kernel(real *e, const int32_t *tokens, const real *wte, const real *wpe,
                         const int32_t *begins, int T, int C, float scale) {
    int64_t bt = blockIdx.x, token = tokens[bt], position = blockIdx.x % T;
    int i = row_column();
    if (i >= C) return;
    if (begins) position -= begins[bt];
    Floats w = floats_load(wte + token * C + i), p = {};
    if (wpe) p = floats_load(wpe + position * C + i);
    floats_store(e + bt * C + i, scale * w + p);
}

static inline void embedding_forward(real *e, const int32_t *tokens, const real *wte,
                                     const real *wpe, const int32_t *begins, int B, int T, int C,
                                     float scale, Gpu *gpu) {
    LAUNCH(embedding_forward_kernel, row_grid(B * T, C), ROW_THREADS, 0, gpu->stream, e, tokens,
           wte, wpe, begins, T, C, scale);
}

// ----------------------------------------------------------------------------------------- groups

// order [n]: the places 0 .. n-1 by key; those of one key, a group, in ascending order
// sorted [n]: their keys, from 0 to 2^24 - 1
// A stable radix sort of three 8-bit digits. The passes alternate between order and sorted.
template <typename Key>
static inline void sort_places(int32_t *order, int32_t *sorted, int64_t n, Key key) {
    for (int pass = 0; pass < 3; pass++) {
        const int32_t *from = pass == 1 ? order : sorted;
        int32_t *to = pass == 1 ? sorted : order;
        int64_t next[257] = {0};  // the next free entry for each digit
        for (int64_t i = 0; i < n; i++) next[(key(i) >> 8 * pass & 255) + 1]++;
        for (int digit = 0; digit < 256; digit++) next[digit + 1] += next[digit];
        for (int64_t i = 0; i < n; i++) {
            int32_t place = pass == 0 ? (int32_t)i : from[i];
            to[next[key(place) >> 8 * pass & 255]++] = place;
        }
    }
    for (int64_t i = 0; i < n; i++) sorted[i] = key(order[i]);
}

// Sorts the n = B T places of a batch on the host, by token (--vocab is at most 2^24) or by
// position (--seq is at most 2^22). groups has order and sorted by token, then order and sorted by
// position, so that one copy takes them to the device.
static inline void token_groups(int32_t *groups, const int32_t *tokens, int64_t n) {
    sort_places(groups, groups + n, n, [&](int64_t i) { return tokens[i]; });
}
static inline void position_groups(int32_t *groups, const int32_t *begins, int64_t n, int T) {
    sort_places(groups + 2 * n, groups + 3 * n, n, [&](int64_t i) {
        return (int32_t)(i % T) - (begins ? begins[i] : 0);
    });
}

// --------------------------------------------------------------------------------------- backward
// The sorted places are cut into pieces of fixed size, a block each. A cut inside a group moves
// to the group's end, if that lies in the piece. Otherwise the piece lies inside the group: its
// sum is a row of `inside`, in scratch, and a second kernel adds the rows of a group in order. So a
// group of up to GROUP_PIECE places is one sum in ascending order, and the same bits come out in
// every run.

struct Pieces {
    const int32_t *order, *sorted;  // [n] (token_groups)
    int n, size;
};

// The first place of piece p.
__device__ inline int piece_begin(const Pieces &f, int p) {
    int cut = p * f.size, end = min(cut + f.size, f.n), at = cut;
    while (0 < at && at < end && f.sorted[at] == f.sorted[cut - 1]) at++;
    return at < cut + f.size ? min(at, f.n) : cut;
}

// Whether piece p lies inside a group that begins before it.
__device__ inline bool piece_inside(const Pieces &f, int p) {
    int cut = p * f.size, end = cut + f.size;
    return p > 0 && end <= f.n && f.sorted[cut - 1] == f.sorted[end - 1];
}

// Rows of the grid are pieces (row_grid). A thread adds its 16 bytes of the piece's rows in order,
// and at the end of a group writes the sum. GROUP_LOADS loads are in flight at a time. All of them
// are unconditional, since branches would serialize them: past the end, the last row is loaded
// again and not added.
static __global__ void __launch_bounds__(ROW_THREADS)
embedding_backward_kernel(wide *dw, float *inside, const real *de, Pieces f, int C, float scale) {
    int p = blockIdx.x, i = row_column(), first = piece_begin(f, p), end = piece_begin(f, p + 1);
    if (i >= C || first == end) return;
    int token = f.sorted[first];
    bool in = piece_inside(f, p);
    Floats *to = in ? sums_at(inside, p, C, i) : sums_at(dw, token, C, i), sum = {}, before = {};
    if (!in) before = *to;
    for (int r = first; r < end; r += GROUP_LOADS) {
        Pack x[GROUP_LOADS];
        int next[GROUP_LOADS];
        for (int j = 0; j < GROUP_LOADS; j++) {
            int at = min(r + j, end - 1);
            next[j] = f.sorted[at];
            x[j] = pack_load(de + (int64_t)f.order[at] * C + i);
        }
        for (int j = 0; j < GROUP_LOADS && r + j < end; j++) {
            if (next[j] != token) {
                *to = before + scale * sum;
                token = next[j], to = sums_at(dw, token, C, i);
                before = *to, sum = {};
            }
            sum = sum + pack_floats(x[j]);
        }
    }
    *to = before + scale * sum;
}

// Rows of the grid are pieces. The blocks of the first piece inside a group add the rows of all its
// pieces.
static __global__ void __launch_bounds__(ROW_THREADS)
inside_add_kernel(wide *dw, float *inside, Pieces f, int C) {
    int p = blockIdx.x, i = row_column(), end = f.n / f.size, token = f.sorted[p * f.size];
    if (i >= C || !piece_inside(f, p) || piece_inside(f, p - 1)) return;
    for (int low = p + 1; low < end;) {
        int middle = (low + end) / 2;
        if (f.sorted[(middle + 1) * f.size - 1] == token) low = middle + 1;
        else end = middle;
    }
    Floats sum = {};
    for (; p < end; p++) {
        Floats x = *sums_at(inside, p, C, i);
        sum = sum + x;
    }
    Floats *to = sums_at(dw, token, C, i), before = *to;
    *to = before + sum;
}

// ADDs to dwte and, unless it is nullptr, to dwpe. The launches depend on sizes alone, not on the
// tokens, so a CUDA graph can replay them.
static inline void embedding_backward(wide *dwte, wide *dwpe, const real *de, const int32_t *groups,
                                      int B, int T, int C, float scale, Gpu *gpu) {
    auto add = [&](wide *dw, const int32_t *order, float by) {
        Pieces f = {order, order + B * T, B * T, GROUP_PIECE};
        while ((size_t)(f.n / f.size) * C > gpu->scratch_size) f.size *= 2;
        float *inside = scratch_for<float>((size_t)(f.n / f.size) * C, gpu);
        dim3 grid = row_grid(CEIL_DIV(f.n, f.size), C);
        LAUNCH(embedding_backward_kernel, grid, ROW_THREADS, 0, gpu->stream, dw, inside, de, f, C,
               by);
        LAUNCH(inside_add_kernel, grid, ROW_THREADS, 0, gpu->stream, dw, inside, f, C);
    };
    add(dwte, groups, scale);
    if (dwpe) add(dwpe, groups + 2 * (int64_t)B * T, 1);
}
