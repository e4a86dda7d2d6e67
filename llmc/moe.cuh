// moe.cuh: mixture of experts. The router chooses the top-k experts of each token; the rows of each
// expert are gathered side by side; one grouped product multiplies all experts; and combine sums
// the experts' rows for each token. The host waits for nothing. The equations are train_gpt.c's:
//
//   router     z = W_r u in float,  s = softmax(z) or sigmoid(z)
//              S = top-k of s + bias: the K experts of largest value; ties go to the lower index
//              gate_e = scale s_e / (1 or sum_S s), for e in S
//   rows       n K rows, one for each expert of each token. Rows of one expert are neighbours, in
//              the order of the tokens, without padding. No token is dropped.
//   products   with W_e [out, in] of expert e; the rows x may be read from the tokens' rows u:
//              y = c x W_e^T     dx = c dy W_e     dW_e += c dy^T x
//   combine    y_t = sum_k gate_tk row_tk + scale add_t (Residual)
//              backward: drow_tk = gate_tk dy_t,  dgate_tk = dy_t . row_tk
//              The gradient of u is combine without gates.
//
// Only the device knows how many rows an expert has. So grids have their largest possible size: a
// product has a block for each of n K / ROW_TILE + E tiles of rows, and a block whose tile no
// expert needs ends at once. No sum uses atomics: counts are sums over chunks of tokens in their
// order, a token gathers its K rows, and the rows of an expert have one order. The same command
// gives the same bits.
//
// Computed floors (gpu.cuh) in bf16 for n = 32768 tokens of C = 1024 and 64 experts of F = 512, 8 a
// token (bench: dev/bench/gpu/kernels.cu):
//
//                       FLOP                    bytes                               ms
//   logits              4.3 G                   n (2 C + 4 E)                       0.018
//   router forward      K passes over E scores  n (4 E + 8 K + 8)                   0.003
//   router backward                             n (6 E + 12 K + 4)                  0.004
//   gate and up         550 G    0.696 ms       n K 4 F + n 2 C + 4 E C F           0.172
//   down                275 G    0.348 ms
//   combine                                     n (K + 2) 2 C                       0.156
//   combine backward                            n (2 K + 1) 2 C                     0.265
//   gradient of u                               as combine                          0.156
//
// gate and up, and down, cost the same again for dx and for dW. The products here use mma.sync,
// which reaches some 62 % of the tensor cores' rate on compute capability 9.0, so their floors are
// 1.6 times as high there. experts_sm90.cuh has those by wgmma; experts.cuh chooses.
#pragma once
#include "attention.cuh"
#include "linear.cuh"
#include "run/trainer.h"

// The router of a layer: its sizes, its inputs and its results. A row is one token at one of its
// experts.
struct Router {
    int B, T, E, K;
    int kind;                   // ROUTER_SOFTMAX, ROUTER_SIGMOID, ...
    float scale;                // factor of the gates
    float balance, sequence, z_loss;  // coefficients of the losses of one layer
    const wide *z;              // [n, E] logits
    const wide *bias;           // [E] affects the choice alone; may be nullptr
    wide *gate;                 // [n, K] weight of each chosen expert
    wide *lse;                  // [n] log-sum-exp of the logits (natural logarithm)
    wide *entropy;              // [n] of the probabilities, for statistics
    wide *load;                 // [B + 1, E] tokens of each expert; the last row sums all
    wide *share;                // [B, E] mean probability of each expert
    int32_t *choice;            // [n, K] the top-k experts
    int32_t *place;             // [n, K] the row of each choice
    int32_t *start;             // [E + 1] first row of each expert
    int32_t *source;            // [n K] token of each row
    int32_t *tiles;             // [row_tiles, 2] expert (-1: none) and first row
    // Scratch of router_forward: sums over a chunk, up to ROUTER_CHUNK tokens of one sequence.
    int *chosen;                // [B * chunks, E] how often each expert was chosen
    float *p;                   // [B * chunks, E] the sum of its probability
};

enum { ROUTER_WARPS = 4, ROUTER_THREADS = ROUTER_WARPS * WARP, PLAN_THREADS = 1024 };
enum { ROUTER_CHUNK = 64, ROUTER_MOST = 1024 };  // tokens of a chunk; largest number of experts

__host__ __device__ inline int router_chunks(const Router &r) {
    return CEIL_DIV(r.T, ROUTER_CHUNK);
}
// Floats of scratch that a router needs.
static inline size_t router_scratch(int B, int T, int E) {
    return 2 * (size_t)B * CEIL_DIV(T, ROUTER_CHUNK) * E;
}

__device__ inline float router_score(float z, float lse, int kind) {
    return kind == ROUTER_SIGMOID ? 1 / (1 + expf(-z)) : expf(z - lse);
}

// log-sum-exp of a row of E values; the lanes of a warp share the row, and all get the result.
__device__ inline float router_lse(const wide *z, int E) {
    float max = -INFINITY, sum = 0;
    for (int j = threadIdx.x % WARP; j < E; j += WARP) max = fmaxf(max, z[j]);
    max = warp_max(max);
    for (int j = threadIdx.x % WARP; j < E; j += WARP) sum += expf(z[j] - max);
    return max + logf(warp_sum(sum));
}

// -------------------------------------------------------------------------------- router, forward

// A key for top-k: a larger score has a larger key, ties go to the lower index, and NaN comes last.
// Never 0.
__device__ inline uint64_t router_key(float score, int j) {
    uint32_t bits = __float_as_uint(score), order = bits >> 31 ? ~bits : bits | 0x80000000u;
    if (score != score) order = 0;
    return (uint64_t)order << 32 | ~(uint32_t)j;
}

// Scores, top-k and gates. A block takes a chunk, a warp one token at a time. Lane j % 32 keeps the
// key, count and share of expert j in shared memory; no other lane reads them.
static __global__ void __launch_bounds__(ROUTER_THREADS)
router_forward_kernel(Router r) {
    SHARED_DYNAMIC(uint64_t, shared);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int chunks = router_chunks(r), all = ROUTER_WARPS * r.E;
    int first = blockIdx.x % chunks * ROUTER_CHUNK, end = min(first + ROUTER_CHUNK, r.T);
    uint64_t *key = shared + warp * r.E;
    int *count = (int *)(shared + all), *mine = count + warp * r.E;
    float *share = (float *)(count + all), *p = share + warp * r.E;
    for (int j = lane; j < r.E; j += WARP) {
        mine[j] = 0;
        p[j] = 0;
    }
    for (int t = first + warp; t < end; t += ROUTER_WARPS) {
        int64_t token = (int64_t)(blockIdx.x / chunks) * r.T + t, at = token * r.K;
        const wide *z = r.z + token * r.E;
        float lse = router_lse(z, r.E), entropy = 0;
        float sum = 0, top_sum = 0;  // of scores: all, the top-k
        auto score = [&](int j) { return router_score(z[j], lse, r.kind); };
        for (int j = lane; j < r.E; j += WARP) {
            float s = score(j);
            key[j] = router_key(s + (r.bias ? r.bias[j] : 0), j);
            sum += s;
        }
        sum = warp_sum(sum);  // a softmax's is 1 but for rounding, which a small entropy would show
        for (int j = lane; j < r.E; j += WARP) {
            float share_j = score(j) / sum;
            p[j] += share_j;
            entropy -= share_j > 0 ? share_j * logf(share_j) : 0;
        }
        entropy = warp_sum(entropy);
        for (int k = 0; k < r.K; k++) {  // top-k: the largest key, K times
            uint64_t best = 0;
            for (int j = lane; j < r.E; j += WARP) best = key[j] > best ? key[j] : best;
            best = warp_all(best, [](uint64_t a, uint64_t b) { return b > a ? b : a; });
            int j = ~(uint32_t)best;
            if (j % WARP != lane) continue;
            float s = score(j);
            key[j] = 0;
            mine[j]++;
            top_sum += s;
            r.choice[at + k] = j;
            r.gate[at + k] = r.scale * s;
        }
        top_sum = warp_sum(top_sum);
        __syncwarp();  // the lanes of the chosen experts wrote the gates
        for (int k = lane; k < r.K && r.kind != ROUTER_SOFTMAX; k += WARP)
            r.gate[at + k] /= top_sum;
        if (lane == 0) {
            r.lse[token] = lse;
            r.entropy[token] = entropy;
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < r.E; j += ROUTER_THREADS) {
        int chosen = 0;
        float sum = 0;
        for (int w = 0; w < ROUTER_WARPS; w++) {
            chosen += count[w * r.E + j];
            sum += share[w * r.E + j];
        }
        r.chosen[(int64_t)blockIdx.x * r.E + j] = chosen;
        r.p[(int64_t)blockIdx.x * r.E + j] = sum;
    }
}

// One block. Sums the chunks into loads and shares, and from the loads computes the first row of
// each expert and the list of tiles of rows: `bound` entries, -1 where no expert needs one. Loads
// of a sequence are whole numbers below 2^24.
static __global__ void __launch_bounds__(PLAN_THREADS)
router_plan_kernel(Router r, int bound) {
    SHARED_DYNAMIC(int, row);
    int *tile = row + r.E + 1, chunks = router_chunks(r);
    for (int i = threadIdx.x; i < r.B * r.E; i += blockDim.x) {
        int64_t at = (int64_t)(i / r.E) * chunks * r.E + i % r.E;
        int count = 0;
        float sum = 0;
        for (int c = 0; c < chunks; c++) {
            count += r.chosen[at + (int64_t)c * r.E];
            sum += r.p[at + (int64_t)c * r.E];
        }
        r.load[i] = (float)count;
        r.share[i] = sum / r.T;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < r.E; j += blockDim.x) {
        int sum = 0;
        for (int b = 0; b < r.B; b++) sum += (int)r.load[b * r.E + j];
        r.load[r.B * r.E + j] = (float)sum;
        row[j + 1] = sum;
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
        r.start[j] = row[j];
        for (int i = tile[j], end = j < r.E ? tile[j + 1] : bound; i < end; i++) {
            r.tiles[2 * i] = j < r.E ? j : -1;
            r.tiles[2 * i + 1] = row[j] + (i - tile[j]) * ROW_TILE;
        }
    }
}

// Gives each choice its row. A block takes a chunk, a thread an expert: its rows are in the order
// of the tokens, after the rows of earlier sequences and chunks.
static __global__ void __launch_bounds__(ROUTER_THREADS)
router_place_kernel(Router r) {
    int chunks = router_chunks(r), b = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
    int first = b * r.T + chunk * ROUTER_CHUNK;
    int assigned = min((int)ROUTER_CHUNK, r.T - chunk * ROUTER_CHUNK) * r.K;
    const int32_t *from = r.choice + (int64_t)first * r.K;
    int32_t *to = r.place + (int64_t)first * r.K;
    for (int j = threadIdx.x; j < r.E; j += ROUTER_THREADS) {
        int row = r.start[j];
        for (int before = 0; before < b; before++) row += (int)r.load[before * r.E + j];
        for (int before = 0; before < chunk; before++)
            row += r.chosen[((int64_t)b * chunks + before) * r.E + j];
        for (int i = 0; i < assigned; i++) {
            if (from[i] != j) continue;
            to[i] = row;
            r.source[row++] = first + i / r.K;
        }
    }
}

// SETs gate, lse, entropy, load, share, choice, place, start, source and tiles from z and bias.
static inline void router_forward(Router r, Gpu *gpu) {
    int blocks = r.B * router_chunks(r);
    size_t shared = ROUTER_WARPS * r.E * (sizeof(uint64_t) + sizeof(int) + sizeof(float));
    int bound = row_tiles((int64_t)r.B * r.T * r.K, r.E);
    r.p = scratch_for<float>(router_scratch(r.B, r.T, r.E), gpu);
    r.chosen = (int *)(r.p + (int64_t)blocks * r.E);
    LAUNCH(router_forward_kernel, blocks, ROUTER_THREADS, shared, gpu->stream, r);
    LAUNCH(router_plan_kernel, 1, threads_for(r.B * r.E, PLAN_THREADS),
           2 * (r.E + 1) * sizeof(int), gpu->stream, r, bound);
    LAUNCH(router_place_kernel, blocks, ROUTER_THREADS, 0, gpu->stream, r);
}

// ------------------------------------------------------------------------------- router, backward
// The equations are in train_gpt.c. The choice has no gradient; a score's gradient ds comes through
// the gates of the chosen experts, and is 0 for the others. The gradients of the losses are
// multiplied by dloss, the gradient of the micro-batch's mean loss.

// A warp takes a token. u [E], in shared memory, is the gradient of its scores; the lane that adds
// a gate's part need not be the one that owns the expert.
static __global__ void __launch_bounds__(ROUTER_THREADS)
router_backward_kernel(real *dz, const wide *dgate, Router r, float dloss) {
    SHARED_DYNAMIC(float, shared);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t n = (int64_t)r.B * r.T, t = (int64_t)blockIdx.x * ROUTER_WARPS + warp, at = t * r.K;
    if (t >= n) return;
    const wide *z = r.z + t * r.E;
    const wide *load_b = r.load + t / r.T * r.E, *load_all = r.load + (int64_t)r.B * r.E;
    float *u = shared + warp * r.E, lse = r.lse[t], each = dloss * r.E / r.K / n;
    const int32_t *choice = r.choice + at;
    const wide *gate = r.gate + at;
    dgate += at;
    float sum = 0, pulled = 0, top_sum = 0, inner = 0, along = 0;
    auto score = [&](int j) { return router_score(z[j], lse, r.kind); };
    for (int j = lane; j < r.E; j += WARP) {
        float s = score(j);
        u[j] = each * (r.balance * load_all[j] / n + r.sequence * load_b[j] / r.T);
        sum += s;
        pulled += s * u[j];
    }
    sum = warp_sum(sum);
    pulled = warp_sum(pulled);
    if (r.kind == ROUTER_SIGMOID)
        for (int j = lane; j < r.E; j += WARP) u[j] = (u[j] - pulled / sum) / sum;
    for (int k = lane; k < r.K; k += WARP) {
        top_sum += score(choice[k]);
        inner += dgate[k] * gate[k];
    }
    top_sum = warp_sum(top_sum);
    inner = warp_sum(inner);
    __syncwarp();
    for (int k = lane; k < r.K; k += WARP) {
        float ds = r.scale * dgate[k];
        u[choice[k]] += r.kind == ROUTER_SOFTMAX ? ds : (ds - inner) / top_sum;
    }
    __syncwarp();
    for (int j = lane; j < r.E; j += WARP) along += score(j) * u[j];
    along = warp_sum(along);
    for (int j = lane; j < r.E; j += WARP) {
        float s = score(j), d = s * (r.kind == ROUTER_SIGMOID ? (1 - s) * u[j] : u[j] - along);
        dz[t * r.E + j] = to_real(d + dloss * 2 * r.z_loss * lse / n * expf(z[j] - lse));
    }
}

// SETs dz [n, E] from the gradient of the gates [n, K] and from the losses.
static inline void router_backward(real *dz, const wide *dgate, const Router &r, float dloss,
                                   Gpu *gpu) {
    int blocks = CEIL_DIV(r.B * r.T, ROUTER_WARPS);
    LAUNCH(router_backward_kernel, blocks, ROUTER_THREADS, ROUTER_WARPS * r.E * sizeof(float),
           gpu->stream, dz, dgate, r, dloss);
}

// ----------------------------------------------------------------------------- losses, loads, bias

// One block, so one order of summation. Reads 8 bytes a token. stats [ROUTER_SUMS + E]
static __global__ void __launch_bounds__(SUMS_THREADS)
router_count_kernel(double *loss, wide *loads, double *stats, Router r) {
    double n = (double)r.B * r.T, each = (double)r.E / r.K, sums[ROUTER_SUMS] = {};
    for (int64_t t = threadIdx.x; t < n; t += blockDim.x) {
        sums[ROUTER_Z] += square(r.lse[t]);
        sums[ROUTER_ENTROPY] += r.entropy[t];
    }
    for (int j = threadIdx.x; j < r.E; j += blockDim.x) {
        double load = r.load[(int64_t)r.B * r.E + j], share = 0;
        for (int b = 0; b < r.B; b++) {
            int at = b * r.E + j;
            share += (double)r.share[at] / r.B;
            sums[ROUTER_SEQUENCE] += each * r.load[at] * r.share[at];
        }
        sums[ROUTER_BALANCE] += each * load * share;
        loads[j] += (float)load;
        if (stats) stats[ROUTER_SUMS + j] += load;
    }
    for (int i = 0; i < ROUTER_SUMS; i++) sums[i] = block_sum(sums[i]);
    if (threadIdx.x > 0) return;
    *loss += r.balance * sums[ROUTER_BALANCE] + r.sequence * sums[ROUTER_SEQUENCE] +
             r.z_loss * sums[ROUTER_Z];
    for (int i = 0; i < ROUTER_SUMS && stats; i++) stats[i] += sums[i];
}

// After a forward whose losses count: adds n times the router's losses to *loss, and the tokens of
// each expert to loads [E]. stats may be nullptr.
static inline void router_count(double *loss, wide *loads, double *stats, const Router &r,
                                Gpu *gpu) {
    LAUNCH(router_count_kernel, 1, threads_for(r.B * r.T, SUMS_THREADS), 0, gpu->stream, loss,
           loads, stats, r);
}

// The selection bias moves a fixed step towards an even load, in the master weights, which the
// router reads (Wang et al. 2024; DeepSeek-V3, section 2.1.2): b += rate sign(mean load - load).
__host__ __device__ inline float router_balance_step(float load, float sum, int E, float rate) {
    if (load * E < sum) return rate;
    return load * E > sum ? -rate : 0;
}

static __global__ void __launch_bounds__(ROUTER_THREADS)
router_balance_kernel(wide *bias, const wide *loads, int E, float rate, const int *applied) {
    float sum = 0;
    for (int j = threadIdx.x; j < E; j += blockDim.x) sum += loads[j];
    sum = block_sum(sum);
    for (int j = threadIdx.x; j < E && *applied; j += blockDim.x)
        bias[j] += router_balance_step(loads[j], sum, E, rate);
}

// *applied, on the device: whether the update of this step was taken.
static inline void router_balance(wide *bias, const wide *loads, int E, float rate,
                                  const int *applied, Gpu *gpu) {
    LAUNCH(router_balance_kernel, 1, ROUTER_THREADS, 0, gpu->stream, bias, loads, E, rate, applied);
}

// -------------------------------------------------------------------------------- tokens and rows

// Rows are tokens (row_grid). 8 blocks at a time leave a thread the registers for several loads in
// flight.
static __global__ void __launch_bounds__(ROW_THREADS, 8)
combine_kernel(real *y, const real *rows, const wide *gate, const int32_t *place, Residual add,
               int K, int C) {
    int64_t t = blockIdx.x, at = t * K;
    int i = row_column();
    if (i >= C) return;
    Floats sum = {};
    for (int k = 0; k < K; k++) {
        float g = gate ? gate[at + k] : 1;
        sum = sum + g * floats_load(rows + (int64_t)place[at + k] * C + i);
    }
    if (add.x) sum = sum + add.scale * floats_load(add.x + t * C + i);
    floats_store(y + t * C + i, sum);
}

// y[t] = sum_k gate[t, k] rows[place[t, k]] + add, which may be y. A gate of nullptr is all 1.
static inline void combine(real *y, const real *rows, const Router &r, Residual add, int C,
                           Gpu *gpu) {
    LAUNCH(combine_kernel, row_grid(r.B * r.T, C), ROW_THREADS, 0, gpu->stream, y, rows,
           r.gate, r.place, add, r.K, C);
}

// A block takes a token; its warps take the token's rows in turn.
static __global__ void __launch_bounds__(ROW_THREADS, 8)
combine_backward_kernel(real *drows, wide *dgate, const real *dy, const real *rows, Router r,
                        int C) {
    int64_t t = blockIdx.x;
    int lane = threadIdx.x % WARP;
    dy += t * C;
    for (int k = threadIdx.x / WARP; k < r.K; k += ROW_THREADS / WARP) {
        int64_t row = (int64_t)r.place[t * r.K + k] * C;
        float g = r.gate[t * r.K + k], dot = 0;
        for (int i = lane * PACK; i < C; i += WARP * PACK) {
            Floats d = floats_load(dy + i), x = floats_load(rows + row + i);
            for (int j = 0; j < PACK; j++) {
                dot += d.v[j] * x.v[j];
                d.v[j] *= g;
            }
            floats_store(drows + row + i, d);
        }
        dot = warp_sum(dot);
        if (lane == 0) dgate[t * r.K + k] = dot;
    }
}

// drows[place[t, k]] = gate[t, k] dy[t];  dgate[t, k] = dy[t] . rows[place[t, k]]
static inline void combine_backward(real *drows, wide *dgate, const real *dy, const real *rows,
                                    const Router &r, int C, Gpu *gpu) {
    LAUNCH(combine_backward_kernel, r.B * r.T, ROW_THREADS, 0, gpu->stream, drows,
           dgate, dy, rows, r, C);
}

// ---------------------------------------------------------------------------- products of experts
// Grouped GEMM. A block computes a tile of ROW_TILE x TILE_COLUMNS results. It walks along the
// depth, the dimension of the sum, TILE_DEPTH at a time; asynchronous copies (cp.async) bring
// several steps to shared memory while one is multiplied. A block writes its tile once.
//
//                                                     left              right
//             rows           columns  depth              [rows, depth]     [depth, columns]
//   FORWARD   of an expert   of W_e   in                 x, by rows        W_e, by columns
//   INPUT     of an expert   in       rows of W_e        dy, by rows       W_e, by rows
//   WEIGHT    rows of W_e    in       the expert's rows  dy, by columns    x, by rows
//
// An operand is copied to shared memory line by line, as it lies in memory: by rows or by columns.
// ldmatrix transposes where the tensor cores need the other order. Elements beyond an edge are
// zero.

// One matrix [out, in] of each of E experts, in `parts` parts of `width` rows: 2 for gate and up, 1
// otherwise. In memory the first part of all experts, one below the other, comes before the second
// part of all experts.
struct Experts {
    const real *w;
    wide *dw;                  // its gradient
    int E, parts, width, in;
    float c;                   // factor of the products
    int64_t rows;              // n K, of all experts
    // From Router. source: the token of each row; nullptr: x is already in the experts' order.
    const int32_t *start, *tiles, *source;
    int to_dw = ADD;           // SET or ADD: dw
};

enum { FORWARD, INPUT, WEIGHT };
enum { TILE_COLUMNS = ROW_TILE, TILE_DEPTH = 32, WARP_COLUMNS = 64 };
enum { WARP_STRIPS = sizeof(real) == 2 ? 4 : 2, WARP_ROWS = 16 * WARP_STRIPS };
enum { EXPERT_WARPS = ROW_TILE / WARP_ROWS * (TILE_COLUMNS / WARP_COLUMNS) };
enum { EXPERT_THREADS = EXPERT_WARPS * WARP };
// Steps in shared memory: as many as fit in the 99 KiB of compute capability 8.6.
enum { EXPERT_STAGES = sizeof(real) == 2 ? 4 : 2 };

// A grouped product: FORWARD and INPUT SET y, WEIGHT writes dw.
struct Grouped {
    Experts e;
    const real *left, *right;
    real *y;
};

// The element of W where row j of an expert begins.
__device__ inline int64_t weight_at(const Experts &e, int expert, int j) {
    int part = j >= e.width;
    return ((int64_t)(part * e.E + expert) * e.width + j - part * e.width) * e.in;
}

// An operand's lines in shared memory, which run across the depth (ACROSS) or along it. Each begins
// 16 bytes behind the end of the one before, so the 8 rows of a piece (mma.cuh) lie in different
// banks.
template <bool ACROSS> struct Panel {
    static constexpr int LINES = ACROSS ? +TILE_DEPTH : +ROW_TILE;
    static constexpr int WIDTH = ACROSS ? +ROW_TILE : +TILE_DEPTH;
    static constexpr int PITCH = WIDTH + PACK;
    static constexpr int SIZE = LINES * PITCH;
};
enum { COPIES = ROW_TILE * TILE_DEPTH / PACK / EXPERT_THREADS };  // packs of a panel for a thread

// Calls each(copy, line, column) for the packs of a panel that this thread copies.
template <bool ACROSS, typename Each> __device__ void panel_packs(Each each) {
    constexpr int PACKS = Panel<ACROSS>::WIDTH / PACK, STEP = EXPERT_THREADS / PACKS;
    static_assert(EXPERT_THREADS % PACKS == 0, "a thread's packs have one column");
    UNROLL for (int copy = 0; copy < COPIES; copy++)
        each(copy, threadIdx.x / PACKS + copy * STEP, threadIdx.x % PACKS * PACK);
}

// Starts the copy of the elements from `first` on of each line. at(copy, line) is the beginning of
// a line in memory, or nullptr for a line of zeros; elements from `end` on are zeros too.
template <bool ACROSS, typename At>
__device__ void panel_copy(real *panel, const real *somewhere, At at, int first, int end) {
    panel_packs<ACROSS>([&](int copy, int line, int column) {
        const real *from = at(copy, line);
        bool present = from && first + column < end;
        copy_async(panel + line * Panel<ACROSS>::PITCH + column,
                   present ? from + first + column : somewhere, present);
    });
}

// The shared memory of a form of product: the stages of a pipe, each of a left and a right panel,
// and then in their place the results.
template <int FORM> struct Panels {
    static constexpr bool LEFT_ACROSS = FORM == WEIGHT, RIGHT_ACROSS = FORM != FORWARD;
    static constexpr int LEFT = Panel<LEFT_ACROSS>::SIZE;
    static constexpr int STAGE = LEFT + Panel<RIGHT_ACROSS>::SIZE;
    static constexpr size_t BYTES = EXPERT_STAGES * STAGE * sizeof(real);
    static_assert(BYTES <= 99 << 10, "fewer stages");
    static_assert(FORM == WEIGHT ||
                  EXPERT_WARPS * WARP_ROWS * TILE_PITCH<WARP_COLUMNS> * sizeof(real) <= BYTES,
                  "no room for the results that are stored");
};

// The tile of a block.
struct Tile {
    int expert;                // -1: no expert needs this tile
    int row, column;           // its first
    int row_end, column_end;   // of the expert's rows (WEIGHT: of dW_e), and of the whole result
    int depth, first;          // length of the sum; WEIGHT: its first row
};

template <int FORM> __device__ Tile tile_of(const Grouped &f) {
    int out = f.e.parts * f.e.width, columns = FORM == FORWARD ? out : f.e.in;
    int across = CEIL_DIV(columns, TILE_COLUMNS);
    int column = blockIdx.x % across * TILE_COLUMNS;
    Tile t = {0, 0, column, 0, columns, FORM == FORWARD ? f.e.in : out, 0};
    if (FORM == WEIGHT) {
        t.expert = blockIdx.y;
        t.row = blockIdx.x / across * ROW_TILE;
        t.row_end = out;
        t.first = f.e.start[t.expert];
        t.depth = f.e.start[t.expert + 1] - t.first;
        return t;
    }
    t.expert = f.e.tiles[blockIdx.x / across * 2];
    t.row = f.e.tiles[blockIdx.x / across * 2 + 1];
    if (t.expert >= 0) t.row_end = f.e.start[t.expert + 1];
    return t;
}

// The beginnings of the lines that a thread copies; nullptr: zeros. WEIGHT does not read `left`.
// Lines along the depth are the same in every step. WEIGHT copies other rows of x in each (from
// depth `k` on), and looks them up one step ahead, so no copy waits for an index.
struct PanelLines {
    const real *left[COPIES], *right[COPIES];
    int x_row[COPIES];
};

template <int FORM> __device__ PanelLines lines_at(const Grouped &f, const Tile &t, int k) {
    PanelLines lines = {};
    panel_packs<FORM == WEIGHT>([&](int copy, int i, int) {
        int row = FORM == WEIGHT ? t.first + min(k + i, t.depth - 1) : t.row + i;
        int w_row = t.column + i;
        if (FORM == WEIGHT || row < t.row_end) {
            lines.x_row[copy] = FORM != INPUT && f.e.source ? f.e.source[row] : row;
            lines.left[copy] = f.left + (int64_t)lines.x_row[copy] * t.depth;
        }
        if (FORM == FORWARD && w_row < t.column_end)
            lines.right[copy] = f.right + weight_at(f.e, t.expert, w_row);
    });
    return lines;
}

// Starts the copy of both operands, from `k` of the depth on. A line across the depth is a row of
// dy, of W_e or of x.
template <int FORM>
__device__ void stage_copy(real *left, const Grouped &f, const Tile &t, PanelLines &lines, int k) {
    typedef Panels<FORM> P;
    auto left_line = [&](int copy, int i) -> const real * {
        if (!P::LEFT_ACROSS) return lines.left[copy];
        return k + i < t.depth ? f.left + (int64_t)(t.first + k + i) * t.row_end : nullptr;
    };
    auto right_line = [&](int copy, int i) -> const real * {
        if (!P::RIGHT_ACROSS) return lines.right[copy];
        if (k + i >= t.depth) return nullptr;
        return FORM == INPUT ? f.right + weight_at(f.e, t.expert, k + i)
                             : f.right + (int64_t)lines.x_row[copy] * f.e.in;
    };
    panel_copy<P::LEFT_ACROSS>(left, f.left, left_line, P::LEFT_ACROSS ? t.row : k,
                               P::LEFT_ACROSS ? t.row_end : t.depth);
    panel_copy<P::RIGHT_ACROSS>(left + P::LEFT, f.right, right_line,
                                P::RIGHT_ACROSS ? t.column : k,
                                P::RIGHT_ACROSS ? t.column_end : t.depth);
    if (FORM == WEIGHT) lines = lines_at<FORM>(f, t, k + TILE_DEPTH);
}

typedef Strips<WARP_STRIPS, WARP_COLUMNS> Sums;

// sums += the warp's rows times its columns, over the depth of a stage. row, column: where they
// begin in the tile.
template <int FORM>
__device__ void stage_multiply(Sums &sums, const real *left, int row, int column) {
    typedef Panels<FORM> P;
    constexpr bool ACROSS = P::LEFT_ACROSS;
    constexpr int LEFT = Panel<ACROSS>::PITCH, RIGHT = Panel<P::RIGHT_ACROSS>::PITCH;
    const real *right = left + P::LEFT;
    UNROLL for (int k = 0; k < TILE_DEPTH; k += 16) {
        Left<real> a[WARP_STRIPS];
        UNROLL for (int s = 0; s < WARP_STRIPS; s++) {
            int first = row + 16 * s;
            left_load<ACROSS, LEFT>(a[s], left + (ACROSS ? k * LEFT + first : first * LEFT + k));
        }
        const real *b = right + (P::RIGHT_ACROSS ? k * RIGHT + column : column * RIGHT + k);
        product<P::RIGHT_ACROSS, RIGHT>(sums, a, b);
    }
}

// dW = c sums, SET or ADD, of a strip (Strips), from `column` on. This lane's rows are `row` and 8
// further; none from `end` on. A lane has two neighbours, four lanes 32 bytes. To ADD, many loads
// are in flight.
template <int COUNT>
__device__ void dw_store(const Experts &e, int expert, const float (&sums)[COUNT], int row, int end,
                         int column) {
    constexpr int PAIRS = COUNT / 4, FLIGHT = PAIRS < 16 ? PAIRS : 16;
    static_assert(PAIRS % FLIGHT == 0, "no flight goes beyond the sums");
    column += threadIdx.x % 4 * 2;
    UNROLL for (int i = 0; i < 2; i++) {
        if (row + 8 * i >= end) continue;
        wide *to = e.dw + weight_at(e, expert, row + 8 * i) + column;
        UNROLL for (int n0 = 0; n0 < PAIRS; n0 += FLIGHT) {
            float2 was[FLIGHT] = {};
            UNROLL for (int n = 0; n < FLIGHT; n++) {
                int x = 8 * (n0 + n);
                if (e.to_dw == ADD && column + x < e.in) was[n] = *(float2 *)(to + x);
            }
            UNROLL for (int n = 0; n < FLIGHT; n++) {
                int x = 8 * (n0 + n);
                const float *two = sums + 4 * (n0 + n) + 2 * i;
                if (column + x < e.in)
                    *(float2 *)(to + x) = float2{was[n].x + e.c * two[0], was[n].y + e.c * two[1]};
            }
        }
    }
}

template <int FORM>
__global__ void __launch_bounds__(EXPERT_THREADS, sizeof(real) == 2 ? 2 : 1)
grouped_kernel(Grouped f) {
    SHARED_DYNAMIC(real, shared);
    constexpr int STAGE = Panels<FORM>::STAGE, ABREAST = TILE_COLUMNS / WARP_COLUMNS;
    int warp = threadIdx.x / WARP;
    int row = warp / ABREAST * WARP_ROWS, column = warp % ABREAST * WARP_COLUMNS;
    Tile t = tile_of<FORM>(f);
    int steps = t.expert < 0 ? 0 : CEIL_DIV(t.depth, TILE_DEPTH);
    bool busy = t.row + row < t.row_end && t.column + column < t.column_end;
    Sums sums = {};
    // Without steps no expert needs the tile; or the expert has no rows, and dW becomes 0 or stays.
    if (steps == 0 && (FORM != WEIGHT || f.e.to_dw == ADD)) return;
    PanelLines lines = {};
    if (steps > 0) lines = lines_at<FORM>(f, t, 0);
    for (int step = 0; step < EXPERT_STAGES - 1; step++) {
        if (step < steps) stage_copy<FORM>(shared + step * STAGE, f, t, lines, step * TILE_DEPTH);
        copy_commit();
    }
    for (int step = 0; step < steps; step++) {
        int next = step + EXPERT_STAGES - 1;
        copy_wait<EXPERT_STAGES - 2>();
        // After this barrier every thread sees this step's copies, and none reads the stage that
        // the next copy overwrites.
        __syncthreads();
        if (next < steps) {
            real *stage = shared + next % EXPERT_STAGES * STAGE;
            stage_copy<FORM>(stage, f, t, lines, next * TILE_DEPTH);
        }
        copy_commit();
        if (busy) stage_multiply<FORM>(sums, shared + step % EXPERT_STAGES * STAGE, row, column);
    }
    row += t.row;
    column += t.column;
    if constexpr (FORM == WEIGHT) {
        if (!busy) return;
        row += threadIdx.x % WARP / 4;
        UNROLL for (int s = 0; s < WARP_STRIPS; s++)
            dw_store(f.e, t.expert, sums.v[s], row + 16 * s, t.row_end, column);
    } else {
        __syncthreads();  // the warps' results take the place of the panels
        scale_by(sums, f.e.c);
        real *to = f.y + (int64_t)row * t.column_end + column;
        real *room = shared + warp * WARP_ROWS * TILE_PITCH<WARP_COLUMNS>;
        if (busy)
            rows_store<WARP_COLUMNS>(to, t.column_end, t.row_end - row, room, sums,
                                     t.column_end - column);
    }
}

template <int FORM> static inline void grouped_launch(const Grouped &f, Gpu *gpu) {
    int out = f.e.parts * f.e.width;
    int down = FORM == WEIGHT ? CEIL_DIV(out, ROW_TILE) : row_tiles(f.e.rows, f.e.E);
    int across = CEIL_DIV(FORM == FORWARD ? out : f.e.in, TILE_COLUMNS);
    dim3 grid(down * across, FORM == WEIGHT ? f.e.E : 1);
    LAUNCH(grouped_kernel<FORM>, grid, EXPERT_THREADS, Panels<FORM>::BYTES, gpu->stream, f);
}
