// moe.cuh: mixture of experts without a word from the host: router, rows of an expert side by side, products of all experts in one launch, and back to tokens.
// The mathematics is the judge's (train_gpt.c, "the router"):
//
//   router     s = softmax(z) or sigmoid(z), z = W_r u in float;  S = the K experts with the largest s + bias, among equals the first;  gate = scale s / (1 or sum_S s)
//   rows       n K of them, one for each expert of each token: those of an expert are neighbours, in the order of the tokens, without padding; no token is dropped
//   products   with W_e [out, in] of expert e:   y = c x W_e^T     dx = c dy W_e     dW_e += c dy^T x;   forward and dW read x from the tokens themselves, where it is u
//   combine    y_t = sum_k gate_tk row_tk + beta add_t;   backward  drow_tk = gate_tk dy_t,  dgate_tk = dy_t . row_tk;   the gradient of u is combine without gates
//
// How many rows an expert has only the device knows. So grids are as large as they can need to be: a product has a block for each of n K / ROW_TILE + E tiles
// of rows, and those that no expert needs end at once. Nothing is added up by atomics: counts are sums over chunks of tokens in their order, a token
// gathers its K rows, and the rows of an expert are in one order, so the same command gives the same bits.
//
// Computed floors in bf16 at 790 TFLOP/s and 4.3 TB/s, n = 32768 tokens of C = 1024, 64 experts of F = 512, 8 a token (bench: dev/bench/gpu/kernels.cu):
//   logits                  4.3 GFLOP               n (2 C + 4 E) bytes             0.018 ms
//   router forward          K passes over E scores  n (4 E + 8 K + 4)               0.003           backward   n (6 E + 12 K + 4)    0.004 ms
//   gate and up             550 GFLOP   0.696 ms    n K 4 F + n 2 C + 4 E C F       0.172           down       275 GFLOP             0.348 ms
//     each again for dx and for dW
//   combine                                         n (K + 2) 2 C                   0.156           backward   n (2 K + 1) 2 C       0.265 ms
//   gradient of u                                   as combine                      0.156
// The products are made with mma.sync, which reaches some 62 % of the tensor cores' rate on compute capability 9.0: their floors there are 1.6 times as high.
#pragma once
#include "attention.cuh"
#include "loss.cuh"
#include "modes.h"
#include "tensors.h"

// balance, sequence, z: coefficients of one layer.
typedef struct RouterShape { int B, T, E, K, kind; float scale, balance, sequence, z; } RouterShape;

enum { ROUTER_WARPS = 4, ROUTER_THREADS = ROUTER_WARPS * WARP, ROUTER_CHUNK = 64, ROUTER_MOST = 1024, PLAN_THREADS = 1024 };

// Sums of a chunk, up to ROUTER_CHUNK tokens of one sequence: how often each expert was chosen, and its p, [B * chunks, E].
typedef struct RouterParts { int *count; float *share; } RouterParts;

static __host__ __device__ inline int router_chunks(RouterShape r) { return CEIL_DIV(r.T, ROUTER_CHUNK); }
static inline size_t router_scratch(RouterShape r) { return 2 * (size_t)r.B * router_chunks(r) * r.E; }        // floats
static inline RouterParts router_parts(RouterShape r, Gpu *gpu) { return RouterParts{(int *)gpu->scratch, gpu->scratch + router_scratch(r) / 2}; }

static __device__ inline float router_score(float z, float lse, int kind) { return kind == ROUTER_SIGMOID ? 1 / (1 + expf(-z)) : expf(z - lse); }

// Over a warp's row of E values, every lane gets it.
static __device__ inline float router_lse(const wide *z, int E) {
    float most = -INFINITY, sum = 0;
    for (int j = threadIdx.x % WARP; j < E; j += WARP) most = fmaxf(most, z[j]);
    most = warp_max(most);
    for (int j = threadIdx.x % WARP; j < E; j += WARP) sum += expf(z[j] - most);
    return most + logf(warp_sum(sum));
}

// ------------------------------------------------------------------------------------------------------------------ router, forward

// A larger score has the larger key; among equals the first expert; NaN comes last. Never 0.
static __device__ inline uint64_t router_key(float score, int j) {
    uint32_t bits = __float_as_uint(score), order = score != score ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)order << 32 | (0xffffffffu - (uint32_t)j);
}

static __device__ inline uint64_t warp_max_key(uint64_t x) {
    for (int lane = WARP / 2; lane > 0; lane /= 2) {
        uint64_t other = __shfl_xor_sync(0xffffffffu, x, lane);
        x = other > x ? other : x;
    }
    return x;
}

// Block: a chunk; warp: a token at a time. Lane j % 32 keeps expert j's key, count and share in shared memory: no lane reads another's.
static __global__ void __launch_bounds__(ROUTER_THREADS)
router_forward_kernel(wide *gate, int32_t *choice, wide *lse, RouterParts parts, const wide *z, const wide *bias, RouterShape r) {
    SHARED_DYNAMIC(uint64_t, shared);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, chunks = router_chunks(r), all = ROUTER_WARPS * r.E;
    int first = blockIdx.x % chunks * ROUTER_CHUNK, end = min(first + ROUTER_CHUNK, r.T);
    uint64_t *key = shared + warp * r.E;
    int *count = (int *)(shared + all), *mine = count + warp * r.E;
    float *share = (float *)(count + all), *p = share + warp * r.E;
    for (int j = lane; j < r.E; j += WARP) mine[j] = 0, p[j] = 0;
    for (int t = first + warp; t < end; t += ROUTER_WARPS) {
        int64_t token = (int64_t)(blockIdx.x / chunks) * r.T + t, at = token * r.K;
        const wide *z_t = z + token * r.E;
        float log_sum = router_lse(z_t, r.E), sum = 0, chosen = 0;
        for (int j = lane; j < r.E; j += WARP) {
            float s = router_score(z_t[j], log_sum, r.kind);
            key[j] = router_key(s + (bias ? bias[j] : 0), j);
            sum += s;
        }
        sum = r.kind == ROUTER_SIGMOID ? warp_sum(sum) : 1;
        for (int j = lane; j < r.E; j += WARP) p[j] += router_score(z_t[j], log_sum, r.kind) / sum;
        for (int k = 0; k < r.K; k++) {
            uint64_t best = 0;
            for (int j = lane; j < r.E; j += WARP) best = key[j] > best ? key[j] : best;
            int j = (int)(0xffffffffu - (uint32_t)warp_max_key(best));
            if (j % WARP != lane) continue;
            float s = router_score(z_t[j], log_sum, r.kind);
            key[j] = 0;
            mine[j]++;
            chosen += s;
            choice[at + k] = j;
            gate[at + k] = r.scale * s;
        }
        chosen = warp_sum(chosen);
        __syncwarp();                                          // gates were written by the lanes of their experts
        for (int k = lane; k < r.K && r.kind != ROUTER_SOFTMAX; k += WARP) gate[at + k] /= chosen;
        if (lane == 0) lse[token] = log_sum;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < r.E; j += ROUTER_THREADS) {
        int chosen = 0;
        float sum = 0;
        for (int w = 0; w < ROUTER_WARPS; w++) chosen += count[w * r.E + j], sum += share[w * r.E + j];
        parts.count[(int64_t)blockIdx.x * r.E + j] = chosen;
        parts.share[(int64_t)blockIdx.x * r.E + j] = sum;
    }
}

// One block. Loads and shares from those of the chunks; the rows of each expert from the loads; and which tile is whose. Loads are whole numbers below 2^24.
static __global__ void __launch_bounds__(PLAN_THREADS) router_plan_kernel(wide *load, wide *share, int32_t *start, int32_t *tiles, RouterParts parts, RouterShape r, int bound) {
    SHARED_DYNAMIC(int, row);
    int *tile = row + r.E + 1, chunks = router_chunks(r);
    for (int i = threadIdx.x; i < r.B * r.E; i += blockDim.x) {
        int64_t at = (int64_t)(i / r.E) * chunks * r.E + i % r.E;
        int count = 0;
        float sum = 0;
        for (int c = 0; c < chunks; c++) count += parts.count[at + (int64_t)c * r.E], sum += parts.share[at + (int64_t)c * r.E];
        load[i] = (float)count;
        share[i] = sum / r.T;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < r.E; j += blockDim.x) {
        float sum = 0;
        for (int b = 0; b < r.B; b++) sum += load[b * r.E + j];
        load[r.B * r.E + j] = sum;
        row[j + 1] = (int)sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        row[0] = tile[0] = 0;
        for (int j = 1; j <= r.E; j++) {
            tile[j] = tile[j - 1] + CEIL_DIV(row[j], ROW_TILE);
            row[j] += row[j - 1];
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j <= r.E; j += blockDim.x) {
        start[j] = row[j];
        for (int i = tile[j], end = j < r.E ? tile[j + 1] : bound; i < end; i++) {
            tiles[2 * i] = j < r.E ? j : -1;
            tiles[2 * i + 1] = row[j] + (i - tile[j]) * ROW_TILE;
        }
    }
}

// Block: a chunk; thread: an expert, whose rows it deals out in the order of the tokens, after those that sequences and chunks before it take.
static __global__ void __launch_bounds__(ROUTER_THREADS)
router_place_kernel(int32_t *place, int32_t *source, const int32_t *start, const wide *load, RouterParts parts, const int32_t *choice, RouterShape r) {
    int chunks = router_chunks(r), b = blockIdx.x / chunks, chunk = blockIdx.x % chunks, first = b * r.T + chunk * ROUTER_CHUNK;
    int assigned = min((int)ROUTER_CHUNK, r.T - chunk * ROUTER_CHUNK) * r.K;
    const int32_t *from = choice + (int64_t)first * r.K;
    int32_t *to = place + (int64_t)first * r.K;
    for (int j = threadIdx.x; j < r.E; j += ROUTER_THREADS) {
        int row = start[j];
        for (int before = 0; before < b; before++) row += (int)load[before * r.E + j];
        for (int before = 0; before < chunk; before++) row += parts.count[((int64_t)b * chunks + before) * r.E + j];
        for (int i = 0; i < assigned; i++) {
            if (from[i] != j) continue;
            to[i] = row;
            source[row++] = first + i / r.K;
        }
    }
}

// What a router leaves. gate, choice, place [n, K]; lse [n]; load [B + 1, E], the last row the sum of the others; share [B, E]; start [E + 1]; source [n K]: the token
// of each row; tiles [row_tiles, 2]: expert and first row, expert -1 after the last.
typedef struct Routed { wide *gate, *lse, *load, *share; int32_t *choice, *place, *start, *source, *tiles; } Routed;

// From logits z [n, E]; bias [E] takes part in the choice alone, nullptr: none.
static inline void router_forward(const Routed *o, const wide *z, const wide *bias, RouterShape r, Gpu *gpu) {
    unsigned blocks = (unsigned)(r.B * router_chunks(r));
    size_t shared = ROUTER_WARPS * r.E * (sizeof(uint64_t) + sizeof(int) + sizeof(float));
    RouterParts parts = router_parts(r, gpu);
    CHECK(router_scratch(r) <= gpu->scratch_size && r.E <= ROUTER_MOST, "%d x %d tokens and %d experts need %zu floats of scratch, there are %zu\n  -> a larger scratch_size", r.B, r.T, r.E,
          router_scratch(r), gpu->scratch_size);
    LAUNCH(router_forward_kernel, blocks, ROUTER_THREADS, shared, gpu->stream, o->gate, o->choice, o->lse, parts, z, bias, r);
    LAUNCH(router_plan_kernel, 1, threads_for(r.B * r.E, PLAN_THREADS), 2 * (r.E + 1) * sizeof(int), gpu->stream, o->load, o->share, o->start, o->tiles, parts, r,
           (int)row_tiles((int64_t)r.B * r.T * r.K, r.E));
    LAUNCH(router_place_kernel, blocks, ROUTER_THREADS, 0, gpu->stream, o->place, o->source, o->start, o->load, parts, o->choice, r);
}

// ------------------------------------------------------------------------------------------------------------------ router, backward
// pull_e = d(losses) / d(p_e). With ds_e = scale dgate_e, or (scale dgate_e - sum_S dgate gate) / sum_S s, for e in S:
//   softmax: u = ds + pull, dz = s (u - sum s u);   sigmoid: dz = s (1 - s) (ds + (pull - sum p pull) / sum s);   z: + 2 z lse softmax(z) / n

// Warp: a token. u is shared among its lanes, because a choice is any lane's.
static __global__ void __launch_bounds__(ROUTER_THREADS)
router_backward_kernel(real *dz, const wide *dgate, Routed o, const wide *z, RouterShape r, float loss_scale) {
    SHARED_DYNAMIC(float, shared);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t n = (int64_t)r.B * r.T, t = (int64_t)blockIdx.x * ROUTER_WARPS + warp, at = t * r.K;
    if (t >= n) return;
    const wide *z_t = z + t * r.E, *load_b = o.load + t / r.T * r.E, *load_all = o.load + (int64_t)r.B * r.E;
    float *u = shared + warp * r.E, lse = o.lse[t], each = loss_scale * r.E / r.K / n, sum = 0, pulled = 0, chosen = 0, inner = 0, along = 0;
    for (int j = lane; j < r.E; j += WARP) {
        float s = router_score(z_t[j], lse, r.kind);
        u[j] = each * (r.balance * load_all[j] / n + r.sequence * load_b[j] / r.T);
        sum += s;
        pulled += s * u[j];
    }
    sum = warp_sum(sum), pulled = warp_sum(pulled);
    if (r.kind == ROUTER_SIGMOID)
        for (int j = lane; j < r.E; j += WARP) u[j] = (u[j] - pulled / sum) / sum;
    for (int k = lane; k < r.K; k += WARP) {
        chosen += router_score(z_t[o.choice[at + k]], lse, r.kind);
        inner += dgate[at + k] * o.gate[at + k];
    }
    chosen = warp_sum(chosen), inner = warp_sum(inner);
    __syncwarp();
    for (int k = lane; k < r.K; k += WARP) u[o.choice[at + k]] += r.kind == ROUTER_SOFTMAX ? r.scale * dgate[at + k] : (r.scale * dgate[at + k] - inner) / chosen;
    __syncwarp();
    for (int j = lane; j < r.E; j += WARP) along += router_score(z_t[j], lse, r.kind) * u[j];
    along = warp_sum(along);
    for (int j = lane; j < r.E; j += WARP) {
        float s = router_score(z_t[j], lse, r.kind), d = s * (r.kind == ROUTER_SIGMOID ? (1 - s) * u[j] : u[j] - along);
        dz[t * r.E + j] = to_real(d + loss_scale * 2 * r.z * lse / n * expf(z_t[j] - lse));
    }
}

// SETs dz [n, E] from the gradient of the gates [n, K] and from the losses; loss_scale: the gradient of the micro-batch's mean loss.
static inline void router_backward(real *dz, const wide *dgate, const Routed *o, const wide *z, RouterShape r, float loss_scale, Gpu *gpu) {
    unsigned blocks = (unsigned)CEIL_DIV((int64_t)r.B * r.T, ROUTER_WARPS);
    LAUNCH(router_backward_kernel, blocks, ROUTER_THREADS, ROUTER_WARPS * r.E * sizeof(float), gpu->stream, dz, dgate, *o, z, r, loss_scale);
}

// ------------------------------------------------------------------------------------------------------------------ losses, loads, bias

// Sums over tokens, as the judge's LayerStats has means: entropy of p, and the losses without their coefficients. load[E]: tokens of each expert.
typedef struct RouterWatch { double *sums, *load; } RouterWatch;
enum { ROUTER_ENTROPY, ROUTER_BALANCE, ROUTER_SEQUENCE, ROUTER_Z, ROUTER_SUMS };

// Block: ROUTER_CHUNK tokens; warp: a token at a time. partial[block] = the sum of the entropies of their p. Reads 4 (E + 1) bytes a token.
static __global__ void __launch_bounds__(ROUTER_THREADS) router_entropy_kernel(float *partial, const wide *lse, const wide *z, RouterShape r) {
    int lane = threadIdx.x % WARP;
    int64_t n = (int64_t)r.B * r.T, first = (int64_t)blockIdx.x * ROUTER_CHUNK, end = min(first + ROUTER_CHUNK, n);
    float entropy = 0;
    for (int64_t t = first + threadIdx.x / WARP; t < end; t += ROUTER_WARPS) {
        float sum = 0;
        for (int j = lane; j < r.E; j += WARP) sum += router_score(z[t * r.E + j], lse[t], r.kind);
        sum = warp_sum(sum);
        for (int j = lane; j < r.E; j += WARP) {
            float p = router_score(z[t * r.E + j], lse[t], r.kind) / sum;
            entropy -= p > 0 ? p * logf(p) : 0;
        }
    }
    entropy = block_sum(entropy);
    if (threadIdx.x == 0) partial[blockIdx.x] = entropy;
}

// One block, one order. Reads 4 bytes a token. entropy: `parts` sums, where it is watched.
static __global__ void __launch_bounds__(SUMS_THREADS) router_count_kernel(double *loss, wide *loads, RouterWatch watch, Routed o, const float *entropy, int parts, RouterShape r) {
    double n = (double)r.B * r.T, each = r.E / (n * r.K), sums[ROUTER_SUMS] = {};
    for (int64_t t = threadIdx.x; t < (int64_t)r.B * r.T; t += blockDim.x) sums[ROUTER_Z] += (double)o.lse[t] * o.lse[t];
    for (int i = threadIdx.x; i < parts && watch.sums; i += blockDim.x) sums[ROUTER_ENTROPY] += entropy[i];
    for (int j = threadIdx.x; j < r.E; j += blockDim.x) {
        double load = o.load[(int64_t)r.B * r.E + j], share = 0;
        for (int b = 0; b < r.B; b++) {
            share += (double)o.share[b * r.E + j] / r.B;
            sums[ROUTER_SEQUENCE] += n * each * r.B * o.load[b * r.E + j] * o.share[b * r.E + j] / r.B;
        }
        sums[ROUTER_BALANCE] += n * each * load * share;
        loads[j] += (float)load;
        if (watch.load) watch.load[j] += load;
    }
    for (int i = 0; i < ROUTER_SUMS; i++) sums[i] = block_sum(sums[i]);
    if (threadIdx.x > 0) return;
    *loss += r.balance * sums[ROUTER_BALANCE] + r.sequence * sums[ROUTER_SEQUENCE] + r.z * sums[ROUTER_Z];
    for (int i = 0; i < ROUTER_SUMS && watch.sums; i++) watch.sums[i] += sums[i];
}

// After a forward that counts: n times the router's losses are added to *loss, the tokens of each expert to loads [E]; watch: nullptrs, where nobody looks.
static inline void router_count(double *loss, wide *loads, RouterWatch watch, const Routed *o, const wide *z, RouterShape r, Gpu *gpu) {
    int parts = CEIL_DIV((int64_t)r.B * r.T, ROUTER_CHUNK);        // no more than the forward's chunks, which there is scratch for
    if (watch.sums) LAUNCH(router_entropy_kernel, parts, ROUTER_THREADS, 0, gpu->stream, gpu->scratch, o->lse, z, r);
    LAUNCH(router_count_kernel, 1, threads_for((int64_t)r.B * r.T, SUMS_THREADS), 0, gpu->stream, loss, loads, watch, *o, gpu->scratch, parts, r);
}

// A fixed step towards an even load (Wang et al. 2024; DeepSeek-V3 section 2.1.2): b += rate sign(mean load - load), in the master weights, which the router reads.
static __host__ __device__ inline float router_step(float load, float sum, int E, float rate) { return load * E < sum ? rate : load * E > sum ? -rate : 0; }

static __global__ void __launch_bounds__(ROUTER_THREADS) router_balance_kernel(wide *bias, const wide *loads, int E, float rate, const int *applied) {
    float sum = 0;
    for (int j = threadIdx.x; j < E; j += blockDim.x) sum += loads[j];
    sum = block_sum(sum);
    for (int j = threadIdx.x; j < E && *applied; j += blockDim.x) bias[j] += router_step(loads[j], sum, E, rate);
}

static inline void router_balance(wide *bias, const wide *loads, int E, float rate, const int *applied, Gpu *gpu) {
    LAUNCH(router_balance_kernel, 1, ROUTER_THREADS, 0, gpu->stream, bias, loads, E, rate, applied);
}

// ------------------------------------------------------------------------------------------------------------------ tokens and rows

enum { COMBINE_THREADS = 128 };                                // 8 blocks at a time leave a thread registers for several loads in flight

// Block (token, part of the row): 16 bytes a thread. gate nullptr: all 1; add may be absent (nullptr), and may be y.
static __global__ void __launch_bounds__(COMBINE_THREADS, 8)
combine_kernel(real *y, const real *rows, const wide *gate, const int32_t *place, const real *add, float beta, int K, int C) {
    int64_t t = blockIdx.x, at = t * K;
    int i = (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
    if (i >= C) return;
    Pack out;
    float sum[PACK] = {};
    for (int k = 0; k < K; k++) {
        Pack row = pack_load(rows + (int64_t)place[at + k] * C + i);
        float g = gate ? gate[at + k] : 1;
        for (int x = 0; x < PACK; x++) sum[x] += g * to_float(row.v[x]);
    }
    if (add) {
        Pack more = pack_load(add + t * C + i);
        for (int x = 0; x < PACK; x++) sum[x] += beta * to_float(more.v[x]);
    }
    for (int x = 0; x < PACK; x++) out.v[x] = to_real(sum[x]);
    pack_store(y + t * C + i, out);
}

// y[t] = sum_k gate[t, k] rows[place[t, k]] + beta add[t]
static inline void combine(real *y, const real *rows, const wide *gate, const int32_t *place, const real *add, float beta, int64_t n, int K, int C, Gpu *gpu) {
    LAUNCH(combine_kernel, dim3((unsigned)n, CEIL_DIV(C / PACK, COMBINE_THREADS)), COMBINE_THREADS, 0, gpu->stream, y, rows, gate, place, add, beta, K, C);
}

// Block: a token; warp: every so many-th of its rows.
static __global__ void __launch_bounds__(COMBINE_THREADS, 8)
combine_backward_kernel(real *drows, wide *dgate, const real *dy, const real *rows, const wide *gate, const int32_t *place, int K, int C) {
    int64_t t = blockIdx.x;
    int lane = threadIdx.x % WARP;
    dy += t * C;
    for (int k = threadIdx.x / WARP; k < K; k += COMBINE_THREADS / WARP) {
        int64_t row = (int64_t)place[t * K + k] * C;
        float g = gate[t * K + k], dot = 0;
        for (int i = lane * PACK; i < C; i += WARP * PACK) {
            Pack d = pack_load(dy + i), x = pack_load(rows + row + i);
            for (int j = 0; j < PACK; j++) {
                dot += to_float(d.v[j]) * to_float(x.v[j]);
                d.v[j] = to_real(g * to_float(d.v[j]));
            }
            pack_store(drows + row + i, d);
        }
        dot = warp_sum(dot);
        if (lane == 0) dgate[t * K + k] = dot;
    }
}

// drows[place[t, k]] = gate[t, k] dy[t];  dgate[t, k] = dy[t] . rows[place[t, k]]
static inline void combine_backward(real *drows, wide *dgate, const real *dy, const real *rows, const wide *gate, const int32_t *place, int64_t n, int K, int C, Gpu *gpu) {
    LAUNCH(combine_backward_kernel, (unsigned)n, COMBINE_THREADS, 0, gpu->stream, drows, dgate, dy, rows, gate, place, K, C);
}

// ------------------------------------------------------------------------------------------------------------------ products of experts
// A block owns a tile of ROW_TILE x TILE_COLUMNS sums and walks along the depth, TILE_DEPTH at a time; several steps are on their way to shared memory (cp.async)
// while one is multiplied. What a block owns it writes once.
//
//              rows               columns    depth              left operand, rows x depth    right operand, depth x columns
//   FORWARD    of an expert       of W_e     in                 x, by rows                    W_e, by columns
//   INPUT      of an expert       in         rows of W_e        dy, by rows                   W_e, by rows
//   WEIGHT     rows of W_e        in         the expert's rows  dy, by columns                x, by rows
//
// An operand lies in shared memory in lines as in memory; the other two forms turn it on its way to registers (ldmatrix). What is beyond an edge is zero.

// W: of each of E experts `parts` matrices [width, in], one matrix of all experts below the other, then those of the next part: gate and up. out = parts * width.
typedef struct ExpertShape { int E, parts, width, in; float c; } ExpertShape;

// What a router says of the rows (Routed). source: where x has a row for each token; nullptr: it has one for each row. rows: n K.
typedef struct ExpertRows { const int32_t *start, *tiles, *source; int64_t rows; } ExpertRows;

enum { FORWARD, INPUT, WEIGHT };
enum { TILE_COLUMNS = 128, TILE_DEPTH = 32, WARP_COLUMNS = 64 };
enum { WARP_STRIPS = sizeof(real) == 2 ? 4 : 2, WARP_ROWS = 16 * WARP_STRIPS, EXPERT_WARPS = ROW_TILE / WARP_ROWS * (TILE_COLUMNS / WARP_COLUMNS), EXPERT_THREADS = EXPERT_WARPS * WARP };
enum { STAGES = sizeof(real) == 2 ? 4 : 2 };                   // steps in shared memory: what fits in the 99 KiB of compute capability 8.6

typedef struct Grouped { real *y; wide *dw; const real *left, *right; ExpertRows rows; ExpertShape s; } Grouped;

// Where row j of expert e's W begins.
static __device__ inline int64_t weight_at(ExpertShape s, int e, int j) {
    int part = j >= s.width;
    return ((int64_t)(part * s.E + e) * s.width + j - part * s.width) * s.in;
}

// Lines of WIDTH elements in shared memory, 16 bytes further apart than that, so that the 8 rows of a piece lie in different banks.
template <int LINES, int WIDTH> struct Panel { static constexpr int PITCH = WIDTH + PACK, SIZE = LINES * PITCH, COPIES = LINES * WIDTH / PACK / EXPERT_THREADS; };

// Calls each(copy, line, column) for the packs of a panel that are this thread's.
template <int LINES, int WIDTH, typename Each> static __device__ inline void panel_packs(Each each) {
    constexpr int PACKS = WIDTH / PACK, STEP = EXPERT_THREADS / PACKS;
    static_assert(EXPERT_THREADS % PACKS == 0, "a thread's packs have one column");
    UNROLL for (int copy = 0; copy < Panel<LINES, WIDTH>::COPIES; copy++) each(copy, threadIdx.x / PACKS + copy * STEP, threadIdx.x % PACKS * PACK);
}

// Begins the copy of elements first.. of lines; at(copy, line) says where one begins, nullptr: it is zeros, as elements from `end` on are.
template <int LINES, int WIDTH, typename At> static __device__ inline void panel_copy(real *panel, const real *somewhere, At at, int first, int end) {
    panel_packs<LINES, WIDTH>([&](int copy, int line, int column) {
        const real *from = at(copy, line);
        bool present = from && first + column < end;
        copy_async(panel + line * Panel<LINES, WIDTH>::PITCH + column, present ? from + first + column : somewhere, present);
    });
}

// 16 rows and columns of a left operand whose columns are the lines; its element (0, 0) is at `panel`.
template <int PITCH> static __device__ inline void left_turn(Left<__nv_bfloat16> &a, const __nv_bfloat16 *panel) {
    int lane = threadIdx.x % WARP;
    ldmatrix<true>(a.r, panel + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
}
template <int PITCH> static __device__ inline void left_turn(Left<float> &a, const float *panel) {
    int row = threadIdx.x % WARP / 4, quad = threadIdx.x % 4;
    UNROLL for (int i = 0; i < 8; i++) a.r[i] = panel[(i / 4 * 8 + 2 * quad + i % 2) * PITCH + row + i / 2 % 2 * 8];
}

template <int FORM> struct Panels {
    static constexpr bool LEFT_TURNED = FORM == WEIGHT, RIGHT_BY_ROWS = FORM != FORWARD;
    typedef Panel<TILE_DEPTH, ROW_TILE> Deep;                  // lines across the depth
    typedef Panel<ROW_TILE, TILE_DEPTH> Flat;                  // lines along it
    static_assert((int)ROW_TILE == (int)TILE_COLUMNS, "both operands have panels of the same two shapes");
    static constexpr int LEFT = LEFT_TURNED ? Deep::SIZE : Flat::SIZE, STAGE = LEFT + (RIGHT_BY_ROWS ? Deep::SIZE : Flat::SIZE);
    static constexpr size_t PIPE = STAGES * STAGE * sizeof(real), STORE = EXPERT_WARPS * WARP_ROWS * TILE_PITCH<WARP_COLUMNS> * sizeof(real);
    static constexpr size_t BYTES = FORM != WEIGHT && STORE > PIPE ? STORE : PIPE;
    static_assert(BYTES <= 99 << 10, "fewer stages");
};

// The block's tile: its expert and where it begins; ends of what there is; the depth and where it begins.
typedef struct Tile { int expert, row, column, row_end, column_end, depth, first; } Tile;

template <int FORM> static __device__ inline Tile tile_of(const Grouped &f) {
    int out = f.s.parts * f.s.width, columns = FORM == FORWARD ? out : f.s.in, across = CEIL_DIV(columns, TILE_COLUMNS);
    Tile t = {0, 0, (int)(blockIdx.x % across) * TILE_COLUMNS, 0, columns, FORM == FORWARD ? f.s.in : out, 0};
    if (FORM == WEIGHT) {
        t.expert = blockIdx.y;
        t.row = blockIdx.x / across * ROW_TILE;
        t.row_end = out;
        t.first = f.rows.start[t.expert];
        t.depth = f.rows.start[t.expert + 1] - t.first;
        return t;
    }
    t.expert = f.rows.tiles[blockIdx.x / across * 2];
    t.row = f.rows.tiles[blockIdx.x / across * 2 + 1];
    if (t.expert >= 0) t.row_end = f.rows.start[t.expert + 1];
    return t;
}

// Lines along the depth are the same in every step: where those begin that a thread copies of, nullptr for zeros. It is asked once.
template <int FORM> struct LinesAlong { static constexpr int COPIES = Panels<FORM>::Flat::COPIES; const real *left[COPIES], *right[COPIES]; };

static __device__ inline const real *x_row(const Grouped &f, const real *x, int row) { return x + (int64_t)(f.rows.source ? f.rows.source[row] : row) * f.s.in; }

template <int FORM> static __device__ inline LinesAlong<FORM> lines_along(const Grouped &f, const Tile &t) {
    int out = f.s.parts * f.s.width;
    LinesAlong<FORM> lines = {};
    if constexpr (FORM != WEIGHT) panel_packs<ROW_TILE, TILE_DEPTH>([&](int copy, int i, int) {
        lines.left[copy] = t.row + i >= t.row_end ? nullptr : FORM == FORWARD ? x_row(f, f.left, t.row + i) : f.left + (int64_t)(t.row + i) * out;
    });
    if constexpr (FORM == FORWARD) panel_packs<TILE_COLUMNS, TILE_DEPTH>([&](int copy, int j, int) {
        lines.right[copy] = t.column + j < out ? f.right + weight_at(f.s, t.expert, t.column + j) : nullptr;
    });
    return lines;
}

// Begins the copy of both operands, from `k` of the depth on.
template <int FORM> static __device__ inline void stage_copy(real *left, const Grouped &f, const Tile &t, const LinesAlong<FORM> &lines, int k) {
    real *right = left + Panels<FORM>::LEFT;
    int out = f.s.parts * f.s.width, in = f.s.in;
    auto left_line = [&](int copy, int) { return lines.left[copy]; };
    auto right_line = [&](int copy, int) { return lines.right[copy]; };
    if constexpr (FORM == FORWARD) {
        panel_copy<ROW_TILE, TILE_DEPTH>(left, f.left, left_line, k, in);
        panel_copy<TILE_COLUMNS, TILE_DEPTH>(right, f.right, right_line, k, in);
    } else if constexpr (FORM == INPUT) {
        panel_copy<ROW_TILE, TILE_DEPTH>(left, f.left, left_line, k, out);
        panel_copy<TILE_DEPTH, TILE_COLUMNS>(right, f.right, [&](int, int j) { return k + j < out ? f.right + weight_at(f.s, t.expert, k + j) : nullptr; }, t.column, in);
    } else {
        panel_copy<TILE_DEPTH, ROW_TILE>(left, f.left, [&](int, int i) { return k + i < t.depth ? f.left + (int64_t)(t.first + k + i) * out : nullptr; }, t.row, out);
        panel_copy<TILE_DEPTH, TILE_COLUMNS>(right, f.right, [&](int, int i) { return k + i < t.depth ? x_row(f, f.right, t.first + k + i) : nullptr; }, t.column, in);
    }
}

// sums += the warp's rows by its columns (from row, column of the tile on), over the depth of a stage.
template <int FORM> static __device__ inline void stage_multiply(Strips<WARP_STRIPS, WARP_COLUMNS> &sums, const real *left, int row, int column) {
    typedef Panels<FORM> P;
    constexpr int LEFT = P::LEFT_TURNED ? P::Deep::PITCH : P::Flat::PITCH, RIGHT = P::RIGHT_BY_ROWS ? P::Deep::PITCH : P::Flat::PITCH;
    const real *right = left + P::LEFT;
    UNROLL for (int k = 0; k < TILE_DEPTH; k += 16) {
        Left<real> a[WARP_STRIPS];
        UNROLL for (int s = 0; s < WARP_STRIPS; s++) {
            if constexpr (P::LEFT_TURNED) left_turn<LEFT>(a[s], left + k * LEFT + row + 16 * s);
            else left_load<LEFT>(a[s], left + (row + 16 * s) * LEFT + k);
        }
        product<P::RIGHT_BY_ROWS, RIGHT>(sums, a, P::RIGHT_BY_ROWS ? right + k * RIGHT + column : right + column * RIGHT + k);
    }
}

// dW += c sums: two neighbours a lane, four lanes 32 bytes. row, column: of the warp's first.
static __device__ inline void sums_add(const Grouped &f, const Tile &t, const Strips<WARP_STRIPS, WARP_COLUMNS> &sums, int row, int column) {
    int lane = threadIdx.x % WARP;
    UNROLL for (int s = 0; s < WARP_STRIPS; s++)
        UNROLL for (int i = 0; i < 2; i++) {
            int j = row + 16 * s + 8 * i + lane / 4;
            if (j >= t.row_end) continue;
            wide *to = f.dw + weight_at(f.s, t.expert, j);
            UNROLL for (int n = 0; n < WARP_COLUMNS / 8; n++) {
                int x = column + 8 * n + 2 * (lane % 4);
                if (x >= t.column_end) continue;
                float2 *at = reinterpret_cast<float2 *>(to + x), was = *at;
                *at = float2{was.x + f.s.c * sums.v[s][n][2 * i], was.y + f.s.c * sums.v[s][n][2 * i + 1]};
            }
        }
}

template <int FORM> static __global__ void __launch_bounds__(EXPERT_THREADS, sizeof(real) == 2 ? 2 : 1) grouped_kernel(Grouped f) {
    SHARED_DYNAMIC(real, shared);
    constexpr int STAGE = Panels<FORM>::STAGE, ACROSS = TILE_COLUMNS / WARP_COLUMNS;
    int warp = threadIdx.x / WARP, row = warp / ACROSS * WARP_ROWS, column = warp % ACROSS * WARP_COLUMNS;
    Tile t = tile_of<FORM>(f);
    int steps = t.expert < 0 ? 0 : CEIL_DIV(t.depth, TILE_DEPTH);
    bool busy = t.row + row < t.row_end && t.column + column < t.column_end;
    Strips<WARP_STRIPS, WARP_COLUMNS> sums = {};
    if (steps == 0) return;                                    // a tile that no expert needs; no rows: dW stays
    LinesAlong<FORM> lines = lines_along<FORM>(f, t);
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) stage_copy<FORM>(shared + step * STAGE, f, t, lines, step * TILE_DEPTH);
        copy_commit();
    }
    for (int step = 0; step < steps; step++) {
        int next = step + STAGES - 1;
        copy_wait<STAGES - 2>();
        __syncthreads();                                       // this step is there for all, and all are done with the one whose place the next takes
        if (next < steps) stage_copy<FORM>(shared + next % STAGES * STAGE, f, t, lines, next * TILE_DEPTH);
        copy_commit();
        if (busy) stage_multiply<FORM>(sums, shared + step % STAGES * STAGE, row, column);
    }
    if constexpr (FORM == WEIGHT) {
        if (busy) sums_add(f, t, sums, t.row + row, t.column + column);
    } else {
        __syncthreads();                                       // from here on a warp's sums lie where panels lay
        scale_by(sums, f.s.c);
        real *to = f.y + (int64_t)(t.row + row) * t.column_end + t.column + column;
        if (busy) rows_store<WARP_COLUMNS>(to, t.column_end, t.row_end - t.row - row, shared + warp * WARP_ROWS * TILE_PITCH<WARP_COLUMNS>, sums, t.column_end - t.column - column);
    }
}

template <int FORM> static inline void grouped_launch(const Grouped &f, int rows, int columns, dim3 grid, Gpu *gpu) {
    grid.x = (unsigned)(rows * CEIL_DIV(columns, TILE_COLUMNS));
    LAUNCH(grouped_kernel<FORM>, grid, EXPERT_THREADS, Panels<FORM>::BYTES, gpu->stream, f);
}

// y[row] = c x[row] W_e^T, SET.
static inline void experts_forward(real *y, const real *x, const real *w, ExpertRows rows, ExpertShape s, Gpu *gpu) {
    grouped_launch<FORWARD>(Grouped{y, nullptr, x, w, rows, s}, (int)row_tiles(rows.rows, s.E), s.parts * s.width, dim3(), gpu);
}

// dx[row] = c dy[row] W_e, SET.
static inline void experts_backward_input(real *dx, const real *dy, const real *w, ExpertRows rows, ExpertShape s, Gpu *gpu) {
    grouped_launch<INPUT>(Grouped{dx, nullptr, dy, w, rows, s}, (int)row_tiles(rows.rows, s.E), s.in, dim3(), gpu);
}

// dW_e += c dy^T x over the rows of e.
static inline void experts_backward_weight(wide *dw, const real *dy, const real *x, ExpertRows rows, ExpertShape s, Gpu *gpu) {
    grouped_launch<WEIGHT>(Grouped{nullptr, dw, dy, x, rows, s}, CEIL_DIV(s.parts * s.width, ROW_TILE), s.in, dim3(1, s.E), gpu);
}
