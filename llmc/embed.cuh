// embed.cuh: tokens to vectors, and the gradient back to the table.
//
//   e_t = scale * wte[token_t] (+ wpe[t])        dwte[token] += scale * sum of de over its positions        dwpe[t] += sum of de over the sequences
//
// Many positions hold the same token, so the gradient is a sum of rows of de chosen by token. Instead of atomics, whose order changes from run to run, the
// host sorts the positions of the batch by token (token_groups) while the GPU goes forward, and a block owns the sum of a whole group.
// Elements moved, and the computed floor at 4.3 TB/s for GPT-2 in bf16 (n = 65536, C = 768):
//   forward    2C per position: a row of wte, a row of e (wpe stays in the L2 cache)                                       0.047 ms
//   backward   C per position of de; per token that occurs a row of dwte, float, read and written (here 15,000 tokens)     0.045 ms
//              with wpe de once more, at most from memory, and T rows of dwpe                                              0.025 ms
#pragma once
#include "gpu.cuh"

enum { EMBEDDING_THREADS = 128, GROUP_WARPS = 4, GROUP_STRIP = WARP * PACK, GROUP_BLOCKS = 512, GROUP_LOADS = 8 };

// ------------------------------------------------------------------------------------------------------------------ forward

// Block (position, part of the row).
static __global__ void __launch_bounds__(EMBEDDING_THREADS)
embedding_forward_kernel(real *e, const int32_t *tokens, const real *wte, const real *wpe, int T, int C, float scale) {
    int64_t bt = blockIdx.x, token = tokens[bt];
    int i = (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
    if (i >= C) return;
    Pack w = pack_load(wte + token * C + i), p = {}, out;
    if (wpe) p = pack_load(wpe + bt % T * C + i);
    for (int k = 0; k < PACK; k++) out.v[k] = to_real(scale * to_float(w.v[k]) + to_float(p.v[k]));
    pack_store(e + bt * C + i, out);
}

// e[B*T, C]; wpe is nullptr where positions are told otherwise (RoPE).
static inline void embedding_forward(real *e, const int32_t *tokens, const real *wte, const real *wpe, int B, int T, int C, float scale, Gpu *gpu) {
    dim3 grid(B * T, CEIL_DIV(C / PACK, EMBEDDING_THREADS));
    LAUNCH(embedding_forward_kernel, grid, EMBEDDING_THREADS, 0, gpu->stream, e, tokens, wte, wpe, T, C, scale);
}

// ------------------------------------------------------------------------------------------------------------------ groups

// The positions of a batch sorted by token, on the host: [count, start[0..n], order[0..n)], 2n + 2 integers, so that one copy carries all of it. order:
// positions, grouped by token, ascending inside a group; group u is order[start[u]..start[u + 1]), u < count, and start[count] = n. A radix
// sort, stable, three digits of 8 bits: tokens are below 2^24, as --vocab is at most. The place of start is free until the end, so the passes go back and forth between the two.
static inline void token_groups(int32_t *groups, const int32_t *tokens, int64_t n) {
    int32_t *start = groups + 1, *order = groups + n + 2, count = 0;
    for (int pass = 0; pass < 3; pass++) {
        const int32_t *from = pass == 1 ? order : start;
        int32_t *to = pass == 1 ? start : order;
        int64_t place[257] = {0};                              // where the next position with this digit goes
        for (int64_t i = 0; i < n; i++) place[(tokens[i] >> 8 * pass & 255) + 1]++;
        for (int digit = 0; digit < 256; digit++) place[digit + 1] += place[digit];
        for (int64_t i = 0; i < n; i++) {
            int32_t position = pass == 0 ? (int32_t)i : from[i];
            to[place[tokens[position] >> 8 * pass & 255]++] = position;
        }
    }
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || tokens[order[i]] != tokens[order[i - 1]]) start[count++] = (int32_t)i;
    start[count] = (int32_t)n;
    groups[0] = count;
}

// ------------------------------------------------------------------------------------------------------------------ backward

// sum += rows first, first + step, ... before end, in this order. row(r): where this thread's 16 bytes of row r are. Several loads are in flight at a time;
// none is conditional, as branches would put them one behind the other: beyond the end the first row of the round is loaded again and added 0 times.
template <typename Row> static __device__ inline void rows_sum(float sum[PACK], int64_t first, int64_t end, int64_t step, Row row) {
    for (int64_t r = first; r < end; r += GROUP_LOADS * step) {
        Pack x[GROUP_LOADS];
        for (int j = 0; j < GROUP_LOADS; j++) x[j] = pack_load(row(r + j * step < end ? r + j * step : r));
        for (int j = 0; j < GROUP_LOADS; j++) {
            float count = r + j * step < end ? 1 : 0;
            for (int k = 0; k < PACK; k++) sum[k] += count * to_float(x[j].v[k]);
        }
    }
}

// Block (strip of columns, first group). Of a group's positions warp w adds those with number w, w + GROUP_WARPS, ..., ascending; then the warps' sums are
// added in the order of the warps: the same bits whatever the grid. A lane holds 16 bytes of the strip.
static __global__ void __launch_bounds__(GROUP_WARPS * WARP)
embedding_backward_kernel(wide *dwte, const real *de, const int32_t *tokens, const int32_t *groups, int64_t n, int C, float scale) {
    typedef float Strip[GROUP_STRIP];
    SHARED(Strip, partial, GROUP_WARPS);
    const int32_t *start = groups + 1, *order = groups + n + 2;
    int strip = blockIdx.x * GROUP_STRIP, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, i = strip + lane * PACK;
    for (int u = blockIdx.y; u < groups[0]; u += gridDim.y) {
        float sum[PACK] = {};
        if (i < C) rows_sum(sum, start[u] + warp, start[u + 1], GROUP_WARPS, [=](int64_t r) { return de + (int64_t)order[r] * C + i; });
        for (int k = 0; k < PACK; k++) partial[warp][lane * PACK + k] = sum[k];
        __syncthreads();
        int64_t token = tokens[order[start[u]]];
        for (int c = threadIdx.x; c < GROUP_STRIP && strip + c < C; c += blockDim.x) {
            float total = 0;
            for (int w = 0; w < GROUP_WARPS; w++) total += partial[w][c];
            dwte[token * C + strip + c] += scale * total;
        }
        __syncthreads();                                       // read by all before the next group is written
    }
}

// Block (position in the sequence, part of the row): the sequences in ascending order.
static __global__ void __launch_bounds__(EMBEDDING_THREADS) position_backward_kernel(wide *dwpe, const real *de, int B, int T, int C) {
    int64_t t = blockIdx.x;
    int i = (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
    if (i >= C) return;
    float sum[PACK] = {};
    rows_sum(sum, 0, B, 1, [=](int64_t b) { return de + (b * T + t) * C + i; });
    for (int k = 0; k < PACK; k++) dwpe[t * C + i + k] += sum[k];
}

// ADDs to dwte[V, C] and, unless nullptr, dwpe[T, C]. tokens and groups: of the same batch, on the device. The launch depends on sizes alone, not on the
// tokens.
static inline void embedding_backward(wide *dwte, wide *dwpe, const real *de, const int32_t *tokens, const int32_t *groups, int B, int T, int C, float scale,
                                      Gpu *gpu) {
    int64_t n = (int64_t)B * T;
    dim3 grid(CEIL_DIV(C, GROUP_STRIP), n < GROUP_BLOCKS ? (unsigned)n : (unsigned)GROUP_BLOCKS);
    LAUNCH(embedding_backward_kernel, grid, GROUP_WARPS * WARP, 0, gpu->stream, dwte, de, tokens, groups, n, C, scale);
    if (dwpe) LAUNCH(position_backward_kernel, dim3(T, CEIL_DIV(C / PACK, EMBEDDING_THREADS)), EMBEDDING_THREADS, 0, gpu->stream, dwpe, de, B, T, C);
}
