// decode.cuh: attention with a KV cache, for sampling: the n newest tokens of one text attend to
// the keys and values of all tokens so far (Trainer.decode; a batch of one).
//
//   kv_cache_fill       appends k and v of the new tokens to the KV cache
//   attention_decode    c = softmax(scale q K^T) V, each query over the keys up to its own position
//
//   cache.k  [T, KV, QK], cache.v  [T, KV, HS]    one layer; k and v after norms and RoPE
//   cache.cached                                  tokens in the cache before the new ones
//   q  [n, NH, QK]    c  [n, NH, HS]
//
// A query reads the cache once: position * KV (QK + HS) values (the query heads of a group share
// the reads in the L2 cache). Computed floor (gpu.cuh) for GPT-2 124M in bf16 (12 heads of 64) at
// position 1024: 3.1 MB a layer, 0.7 us; the weights of the layer are 14.2 MB, 3.3 us. Launches and
// the latency of loads dominate, so one kernel is better than keys split over blocks with a second
// kernel to join them.
//
// A block handles one head of one query. Its warps take 32 keys each in turn, with an online
// softmax per warp. At the end their results are joined in the order of the warps: no atomics, the
// same bits in every run. In one step of a warp, a lane holds a key (for the scores), then channels
// (for the sums over the 32 values).
#pragma once
#include "attention.cuh"
#include "memory.h"

enum { FILL_THREADS = 128, DECODE_WARPS = 8 };
enum { DECODE_QK = 192, DECODE_HS = 128 };  // the largest of attention_launch

// 16 bytes a thread; blockIdx.y is 0 for k, 1 for v.
static __global__ void __launch_bounds__(FILL_THREADS)
kv_cache_fill_kernel(KvCache cache, Heads k, Heads v, AttentionShape s) {
    Heads from = blockIdx.y ? v : k;
    int size = blockIdx.y ? s.HS : s.QK, width = s.KV * size;
    int64_t i = grid_thread() * PACK, row = i / width, column = i % width;
    if (row >= s.T) return;
    real *to = (blockIdx.y ? cache.v : cache.k) + (int64_t)cache.cached * width;
    pack_store(to + i, pack_load(from.at + row * from.ld + column / size * from.head +
                                 column % size));
}

static inline void kv_cache_fill(KvCache cache, const Heads qkv[3], AttentionShape s, Gpu *gpu) {
    dim3 grid(CEIL_DIV((int64_t)s.T * s.KV * s.QK / PACK, FILL_THREADS), 2);
    LAUNCH(kv_cache_fill_kernel, grid, FILL_THREADS, 0, gpu->stream, cache, qkv[1], qkv[2], s);
}

// A warp's online softmax over its keys: the largest score, in base 2, and relative to it the sum
// of the weights and of the weighted values.
struct DecodeSums { float max, sum, c[DECODE_HS]; };

// The grid is (query, head): its second dimension is too small for the queries of a long prompt.
static __global__ void __launch_bounds__(DECODE_WARPS * WARP, 2)
attention_decode_kernel(real *c, Heads q, KvCache cache, AttentionShape s) {
    SHARED(float, query, DECODE_QK);
    SHARED(DecodeSums, found, DECODE_WARPS);
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int h = blockIdx.y, t = blockIdx.x;
    int g = h / (s.NH / s.KV);
    int keys = cache.cached + t + 1;
    if (thread < s.QK) {
        query[thread] = s.log2_scale * to_float(q.at[(int64_t)t * q.ld + h * q.head + thread]);
    }
    __syncthreads();
    constexpr int OWN = DECODE_HS / WARP;  // channels of a lane
    float max = -INFINITY, sum = 0, sums[OWN] = {};
    for (int first = warp * WARP; first < keys; first += DECODE_WARPS * WARP) {
        const real *k = cache.k + ((int64_t)min(first + lane, keys - 1) * s.KV + g) * s.QK;
        float score = 0;
        for (int x = 0; x < s.QK; x += PACK) {
            Floats k_x = floats_load(k + x);
            for (int i = 0; i < PACK; i++) score += query[x + i] * k_x.v[i];
        }
        if (first + lane >= keys) score = -INFINITY;
        float now = fmaxf(max, warp_max(score));
        float shrink = exp2_fast(max - now), weight = exp2_fast(score - now);
        max = now;
        sum = sum * shrink + warp_sum(weight);
        UNROLL for (int i = 0; i < OWN; i++) sums[i] *= shrink;
        for (int j = 0; j < WARP && first + j < keys; j++) {
            const real *v = cache.v + ((int64_t)(first + j) * s.KV + g) * s.HS;
            float weight_j = __shfl_sync(0xffffffffu, weight, j);
            UNROLL for (int i = 0; i < OWN; i++)
                if (i * WARP + lane < s.HS) sums[i] += weight_j * to_float(v[i * WARP + lane]);
        }
    }
    if (lane == 0) found[warp].max = max, found[warp].sum = sum;
    UNROLL for (int i = 0; i < OWN; i++) found[warp].c[i * WARP + lane] = sums[i];
    __syncthreads();
    if (thread >= s.HS) return;
    float largest = -INFINITY, total = 0, value = 0;
    for (int w = 0; w < DECODE_WARPS; w++) largest = fmaxf(largest, found[w].max);
    for (int w = 0; w < DECODE_WARPS; w++) {
        float shrink = exp2_fast(found[w].max - largest);  // 0 for a warp without keys
        total += shrink * found[w].sum;
        value += shrink * found[w].c[thread];
    }
    c[((int64_t)t * s.NH + h) * s.HS + thread] = to_real(value / total);
}

// c for the T queries at positions cache.cached, cache.cached + 1, ..., whose keys and values are
// already in the cache.
static inline void attention_decode(real *c, Heads q, KvCache cache, AttentionShape s, Gpu *gpu) {
    dim3 grid(s.T, s.NH);
    LAUNCH(attention_decode_kernel, grid, DECODE_WARPS * WARP, 0, gpu->stream, c, q, cache, s);
}
