// embed.cuh: token and position embedding, and the gradient back to the tables.
//
//   forward    e[b, t] = scale * wte[token[b, t]] (+ wpe[t])
//   backward   dwte[v] += scale * sum of de over the positions that hold token v
//              dwpe[t] += sum of de over the sequences b
//
//   e, de    [B, T, C]
//   wte      [V, C], dwte in float
//   wpe      [T, C], dwpe in float; nullptr with RoPE
//   tokens   [B, T] int32, on the device
//   groups   [2 B T + 2] int32: the positions sorted by token (token_groups), for backward
//
// Many positions hold the same token, so dwte is a sum of rows of de for each token. Atomics would
// change the order of that sum from run to run. Instead the host sorts the positions of the batch
// by token while the GPU runs the forward pass, and one block owns the sum of a whole group.
//
// Values moved, and the computed floor (gpu.cuh) for GPT-2 in bf16 (n = B T = 65536, C = 768):
//   forward    2C per position: a row of wte, a row of e (wpe stays in the L2 cache)     0.047 ms
//   backward   C per position (de), and for each of the 15,000 distinct tokens of this
//              batch a row of dwte, float, read and written                              0.045 ms
//              dwpe: de once more, at most from memory, and T rows of dwpe               0.025 ms
#pragma once
#include "gpu.cuh"

enum { GROUP_WARPS = 4, GROUP_STRIP = WARP * PACK, GROUP_BLOCKS = 512, GROUP_LOADS = 8 };

// ---------------------------------------------------------------------------------------- forward

// Rows are positions (row_grid).
static __global__ void __launch_bounds__(ROW_THREADS)
embedding_forward_kernel(real *e, const int32_t *tokens, const real *wte, const real *wpe, int T,
                         int C, float scale) {
    int64_t bt = blockIdx.x, token = tokens[bt];
    int i = row_column();
    if (i >= C) return;
    Floats w = floats_load(wte + token * C + i), p = {};
    if (wpe) p = floats_load(wpe + bt % T * C + i);
    floats_store(e + bt * C + i, scale * w + p);
}

static inline void embedding_forward(real *e, const int32_t *tokens, const real *wte,
                                     const real *wpe, int B, int T, int C, float scale, Gpu *gpu) {
    LAUNCH(embedding_forward_kernel, row_grid(B * T, C), ROW_THREADS, 0, gpu->stream, e, tokens,
           wte, wpe, T, C, scale);
}

// ----------------------------------------------------------------------------------------- groups

// Sorts the n positions of a batch by token, on the host. One array holds the result, so one copy
// takes it to the device:
//
//   groups = [count, start[0..n], order[0..n)]     2n + 2 integers
//   order    positions grouped by token, ascending inside a group
//   start    group u is order[start[u]..start[u + 1]), for u < count; start[count] = n
//
// A stable radix sort of three 8-bit digits: --vocab is at most 2^24. The passes alternate between
// the places of order and of start, which is not needed before the end.
static inline void token_groups(int32_t *groups, const int32_t *tokens, int64_t n) {
    int32_t *start = groups + 1, *order = groups + n + 2, count = 0;
    for (int pass = 0; pass < 3; pass++) {
        const int32_t *from = pass == 1 ? order : start;
        int32_t *to = pass == 1 ? start : order;
        int64_t place[257] = {0};  // the next free place for each digit
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

// --------------------------------------------------------------------------------------- backward

// sum += rows first, first + step, ... before end, in this order. row(r) points at this thread's 16
// bytes of row r. GROUP_LOADS loads are in flight at a time. All of them are unconditional, since
// branches would serialize them: past the end, the first row of the round is loaded again and added
// 0 times.
template <typename Row>
__device__ void rows_sum(Floats &sum, int64_t first, int64_t end, int64_t step, Row row) {
    for (int64_t r = first; r < end; r += GROUP_LOADS * step) {
        Pack x[GROUP_LOADS];
        for (int j = 0; j < GROUP_LOADS; j++) {
            x[j] = pack_load(row(r + j * step < end ? r + j * step : r));
        }
        for (int j = 0; j < GROUP_LOADS; j++) {
            sum = sum + (r + j * step < end ? 1.0f : 0.0f) * pack_floats(x[j]);
        }
    }
}

// The grid is (strip of columns, first group); a lane holds 16 bytes of the strip. Warp w adds
// positions w, w + GROUP_WARPS, ... of its group in ascending order. The sums of the warps are then
// added in the order of the warps, so the grid size does not change a bit.
static __global__ void __launch_bounds__(GROUP_WARPS * WARP)
embedding_backward_kernel(wide *dwte, const real *de, const int32_t *tokens, const int32_t *groups,
                          int64_t n, int C, float scale) {
    typedef float Strip[GROUP_STRIP];
    SHARED(Strip, partial, GROUP_WARPS);
    const int32_t *start = groups + 1, *order = groups + n + 2;
    int strip = blockIdx.x * GROUP_STRIP;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, i = strip + lane * PACK;
    auto row = [=](int64_t r) { return de + (int64_t)order[r] * C + i; };
    for (int u = blockIdx.y; u < groups[0]; u += gridDim.y) {
        Floats sum = {};
        if (i < C) rows_sum(sum, start[u] + warp, start[u + 1], GROUP_WARPS, row);
        for (int k = 0; k < PACK; k++) partial[warp][lane * PACK + k] = sum.v[k];
        __syncthreads();
        int64_t token = tokens[order[start[u]]];
        for (int c = threadIdx.x; c < GROUP_STRIP && strip + c < C; c += blockDim.x) {
            float total = 0;
            for (int w = 0; w < GROUP_WARPS; w++) total += partial[w][c];
            dwte[token * C + strip + c] += scale * total;
        }
        __syncthreads();  // all threads have read partial before the next group overwrites it
    }
}

// Rows are positions in the sequence (row_grid). Sequences are added in ascending order.
static __global__ void __launch_bounds__(ROW_THREADS)
position_backward_kernel(wide *dwpe, const real *de, int B, int T, int C) {
    int64_t t = blockIdx.x;
    int i = row_column();
    if (i >= C) return;
    Floats sum = {};
    rows_sum(sum, 0, B, 1, [=](int64_t b) { return de + (b * T + t) * C + i; });
    for (int k = 0; k < PACK; k++) dwpe[t * C + i + k] += sum.v[k];
}

// ADDs to dwte and, unless it is nullptr, to dwpe. tokens and groups belong to the same batch. The
// launch depends on sizes alone, not on the tokens, so a CUDA graph can replay it.
static inline void embedding_backward(wide *dwte, wide *dwpe, const real *de, const int32_t *tokens,
                                      const int32_t *groups, int B, int T, int C, float scale,
                                      Gpu *gpu) {
    int64_t n = (int64_t)B * T;
    dim3 grid(CEIL_DIV(C, GROUP_STRIP), min(n, (int64_t)GROUP_BLOCKS));
    LAUNCH(embedding_backward_kernel, grid, GROUP_WARPS * WARP, 0, gpu->stream, dwte, de, tokens,
           groups, n, C, scale);
    if (dwpe) {
        LAUNCH(position_backward_kernel, row_grid(T, C), ROW_THREADS, 0, gpu->stream, dwpe, de, B,
               T, C);
    }
}
