// attention.cu: the ladder of causal attention, forward C = softmax(Q K^T / sqrt(HS)) V over keys
// <= query, and backward dQ, dK, dV.
//
//   1 naive     the T x T scores lie in memory: a kernel writes them, a thread each; one makes them
//               probabilities, a thread a row; one sums V by them, a thread an element. Backward
//               likewise, on the stored probabilities: dP, then dS in its place, then three sums
//   2 flash     nothing of size T x T is stored: a thread keeps a query row and meets the keys tile
//               by tile in shared memory, with a softmax that grows as they come. Backward computes
//               P again from its rows' log-sum-exp, once a thread a query row (dQ), once a thread a
//               key row (dK, dV)
//   3 mainline  llmc/attention.cuh: the same plan with tiles of scores on tensor cores and copies
//               under way meanwhile
//
// Half of T x T counts. Step 1 moves its scores through memory some five times forward, 4 bytes
// each. The floor in float is bfloat16's: tensor cores have no product of float's accuracy. To run:
// sh dev/kernels/run.sh; in the emulator sizes are small and there are no times.
#include "ladder.cuh"
#include "../../llmc/attention.cuh"

// Q, K, V and C are [B, T, NH, HS]. The last of B sequences is compared with the truth; those
// before are the same. Scores are float, [B * NH, T, T].
static const int B = TIMED ? 16 : 2;
static const int T = TIMED ? 1024 : 140;
static const int NH = TIMED ? 12 : 2;
static const int HS = 64;
static const int C = NH * HS;
static const int ROWS = 64;
static const int COLUMNS = 16;
static const float INV_SQRT_HS = 0.125f;                             // 1 / sqrt(HS)

// blockIdx.y is the head of a sequence, in every kernel here.
template <typename X> static __device__ inline X *head_row(X *x, int t) {
    return x + ((int64_t)(blockIdx.y / NH) * T + t) * C + blockIdx.y % NH * HS;
}

// ----------------------------------------------------------------------------------------- 1 naive

// s[t][u] = factor * x_t y_u
static __global__ void naive_dot_kernel(float *s, const real *x, const real *y, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = i / T, u = i % T;
    if (t >= T || u > t) return;
    float sum = 0;
    for (int e = 0; e < HS; e++) sum += to_float(head_row(x, t)[e]) * to_float(head_row(y, u)[e]);
    s[(int64_t)blockIdx.y * T * T + i] = factor * sum;
}

static __global__ void naive_softmax_kernel(float *s) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= T) return;
    float max = -INFINITY, sum = 0;
    s += ((int64_t)blockIdx.y * T + t) * T;
    for (int u = 0; u <= t; u++) max = fmaxf(max, s[u]);
    for (int u = 0; u <= t; u++) sum += s[u] = expf(s[u] - max);
    for (int u = 0; u <= t; u++) s[u] /= sum;
}

// dP becomes dS, by the softmax and by the scale of the scores.
static __global__ void naive_softmax_backward_kernel(float *ds, const float *p) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= T) return;
    float mean = 0;
    ds += ((int64_t)blockIdx.y * T + t) * T, p += ((int64_t)blockIdx.y * T + t) * T;
    for (int u = 0; u <= t; u++) mean += p[u] * ds[u];
    for (int u = 0; u <= t; u++) ds[u] = INV_SQRT_HS * p[u] * (ds[u] - mean);
}

// BY_KEYS: out_u = sum over queries t >= u of s[t][u] x_t; otherwise out_t = sum over keys u <= t
// of s[t][u] x_u.
template <bool BY_KEYS>
static __global__ void naive_sum_kernel(real *out, const float *s, const real *x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / HS, e = i % HS;
    if (row >= T) return;
    float sum = 0;
    s += (int64_t)blockIdx.y * T * T;
    for (int other = BY_KEYS ? row : 0; other < (BY_KEYS ? T : row + 1); other++) {
        sum += s[BY_KEYS ? other * T + row : row * T + other] * to_float(head_row(x, other)[e]);
    }
    head_row(out, row)[e] = to_real(sum);
}

// ----------------------------------------------------------------------------------------- 2 flash

// The rows of a head from `first` on to shared memory, PITCH apart, of two matrices; rows from T on
// are zeros. Nobody reads before all have written.
template <int PITCH> static __device__ inline void
tiles_load(float *x_tile, float *y_tile, const real *x, const real *y, int first, int rows) {
    __syncthreads();
    for (int i = threadIdx.x; i < rows * HS; i += ROWS) {
        int row = first + i / HS, e = i % HS;
        x_tile[i / HS * PITCH + e] = row < T ? to_float(head_row(x, row)[e]) : 0;
        y_tile[i / HS * PITCH + e] = row < T ? to_float(head_row(y, row)[e]) : 0;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(ROWS)
    flash_forward_kernel(real *c, wide *lse, const real *q, const real *k, const real *v) {
    SHARED(float, k_tile, COLUMNS * HS);
    SHARED(float, v_tile, COLUMNS * HS);
    // threads beyond T help to load
    int first = blockIdx.x * ROWS, t = min(first + (int)threadIdx.x, T - 1);
    float own[HS], sums[HS] = {}, max = -INFINITY, sum = 0;
    UNROLL for (int e = 0; e < HS; e++) own[e] = INV_SQRT_HS * to_float(head_row(q, t)[e]);
    for (int key0 = 0; key0 < min(first + ROWS, T); key0 += COLUMNS) {
        tiles_load<HS>(k_tile, v_tile, k, v, key0, COLUMNS);
        for (int u = 0; u < COLUMNS && key0 + u <= t; u++) {
            float s = 0;
            UNROLL for (int e = 0; e < HS; e++) s += own[e] * k_tile[u * HS + e];
            if (s > max) {  // what was summed under a smaller maximum shrinks
                float shrink = expf(max - s);
                UNROLL for (int e = 0; e < HS; e++) sums[e] *= shrink;
                sum *= shrink, max = s;
            }
            float p = expf(s - max);
            sum += p;
            UNROLL for (int e = 0; e < HS; e++) sums[e] += p * v_tile[u * HS + e];
        }
    }
    if (first + (int)threadIdx.x >= T) return;
    UNROLL for (int e = 0; e < HS; e++) head_row(c, t)[e] = to_real(sums[e] / sum);
    lse[(int64_t)blockIdx.y * T + t] = max + logf(sum);
}

// D = rowsum(dC * C), which is the mean of dP under P.
static __global__ void flash_dot_kernel(wide *D, const real *dc, const real *c) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int e = 0; e < HS && t < T; e++)
        sum += to_float(head_row(dc, t)[e]) * to_float(head_row(c, t)[e]);
    if (t < T) D[(int64_t)blockIdx.y * T + t] = sum;
}

// A thread has row i of one kind and meets rows j of the other. BY_KEYS: x, y are K, V, theirs Q,
// dC, and dx, dy are dK, dV. Otherwise x, y are Q, dC, theirs K, V, and dx is dQ. A row in shared
// memory is HS + 1 floats from the next, so that the threads' rows lie in different banks.
template <bool BY_KEYS> static __global__ void __launch_bounds__(ROWS)
    flash_backward_kernel(real *dx, real *dy, const real *x, const real *y, const real *their_x,
                          const real *their_y, const wide *lse, const wide *D) {
    SHARED(float, x_own, ROWS * (HS + 1));
    SHARED(float, y_own, ROWS * (HS + 1));
    SHARED(float, x_tile, COLUMNS * HS);
    SHARED(float, y_tile, COLUMNS * HS);
    int first = blockIdx.x * ROWS;
    int i = min(first + (int)threadIdx.x, T - 1);
    int own = threadIdx.x * (HS + 1);
    float dx_i[HS] = {}, dy_i[HS] = {};
    tiles_load<HS + 1>(x_own, y_own, x, y, first, ROWS);
    for (int j0 = BY_KEYS ? first : 0; j0 < (BY_KEYS ? T : min(first + ROWS, T)); j0 += COLUMNS) {
        tiles_load<HS>(x_tile, y_tile, their_x, their_y, j0, COLUMNS);
        for (int j = BY_KEYS ? max(j0, i) : j0; j < min(j0 + COLUMNS, BY_KEYS ? T : i + 1); j++) {
            const float *x_j = x_tile + (j - j0) * HS, *y_j = y_tile + (j - j0) * HS;
            int64_t query = (int64_t)blockIdx.y * T + (BY_KEYS ? j : i);
            float s = 0, dp = 0;
            for (int e = 0; e < HS; e++)
                s += x_own[own + e] * x_j[e], dp += y_own[own + e] * y_j[e];
            float p = expf(INV_SQRT_HS * s - lse[query]), ds = INV_SQRT_HS * p * (dp - D[query]);
            UNROLL for (int e = 0; e < HS; e++) dx_i[e] += ds * x_j[e], dy_i[e] += p * y_j[e];
        }
    }
    if (first + (int)threadIdx.x >= T) return;
    UNROLL for (int e = 0; e < HS; e++) head_row(dx, i)[e] = to_real(dx_i[e]);
    UNROLL for (int e = 0; e < HS && BY_KEYS; e++) head_row(dy, i)[e] = to_real(dy_i[e]);
}

// --------------------------------------------------------------------------------------- the truth

typedef struct Solution { Values c, dq, dk, dv; } Solution;

static Solution solve(const Values &q, const Values &k, const Values &v, const Values &dc) {
    Solution s = {Values(T * C), Values(T * C), Values(T * C), Values(T * C)};
    for (int h = 0; h < C; h += HS)
        for (int t = 0; t < T; t++) {
            Values p(t + 1), dp(t + 1);
            double sum = 0, mean = 0;
            for (int u = 0; u <= t; u++) {
                for (int e = h; e < h + HS; e++)
                    p[u] += q[t * C + e] * k[u * C + e] * INV_SQRT_HS,
                        dp[u] += dc[t * C + e] * v[u * C + e];
                sum += p[u] = exp(p[u]);
            }
            for (int u = 0; u <= t; u++) p[u] /= sum, mean += p[u] * dp[u];
            for (int u = 0; u <= t; u++)
                for (int e = h; e < h + HS; e++) {
                    double ds = p[u] * (dp[u] - mean) * INV_SQRT_HS;
                    s.c[t * C + e] += p[u] * v[u * C + e], s.dv[u * C + e] += p[u] * dc[t * C + e];
                    s.dq[t * C + e] += ds * k[u * C + e], s.dk[u * C + e] += ds * q[t * C + e];
                }
        }
    return s;
}

int main(void) {
    size_t one = (size_t)T * C, all = B * one, last = all - one;
    Values host[] = {random_values(one, 1, 3), random_values(one, 2), random_values(one, 3),
                     random_values(one, 4)};
    real *q = device_repeat(&host[0], B);
    real *k = device_repeat(&host[1], B);
    real *v = device_repeat(&host[2], B);
    real *dc = device_repeat(&host[3], B);
    real *c = device_empty<real>(all);
    real *dq = device_empty<real>(all);
    real *dk = device_empty<real>(all);
    real *dv = device_empty<real>(all);
    float *p = device_empty<float>((size_t)B * NH * T * T);
    float *ds = device_empty<float>((size_t)B * NH * T * T);
    wide *lse = device_empty<wide>(B * NH * T);
    wide *D = device_empty<wide>(B * NH * T);
    wide *lse2 = device_empty<wide>(B * NH * T);
    wide *peak = device_empty<wide>(B * NH * T);
    // lse2, to base 2, and peak: of step 3
    const Heads qkv[3] = {{q, C, HS}, {k, C, HS}, {v, C, HS}};
    const Heads dqkv[3] = {{dq, C, HS}, {dk, C, HS}, {dv, C, HS}};
    AttentionShape shape = attention_shape(B, T, NH, NH, HS, HS, INV_SQRT_HS);
    Solution t = solve(host[0], host[1], host[2], host[3]);
    Gpu *gpu = test_gpu();
    cudaStream_t stream = gpu->stream;
    dim3 pairs(CEIL_DIV(T * T, 128), B * NH), rows(CEIL_DIV(T, ROWS), B * NH),
        elements(CEIL_DIV(T * HS, 128), B * NH);
    double product = (double)B * NH * T * T * HS, tensor = all * sizeof(real);
    double floor = std::max(2 * product / FLOP_PER_MS, 4 * tensor / BYTES_PER_MS);
    double back = std::max(5 * product / FLOP_PER_MS, 7 * tensor / BYTES_PER_MS);

    ladder_header("forward: reads Q, K, V; writes C; 2 products", floor);
    std::vector<LadderResult> forward = {{"C", c + last, nullptr, &t.c}};
    ladder_step("1 naive", floor, forward, gpu, [&] {
        LAUNCH(naive_dot_kernel, pairs, 128, 0, stream, p, q, k, INV_SQRT_HS);
        LAUNCH(naive_softmax_kernel, rows, ROWS, 0, stream, p);
        LAUNCH(naive_sum_kernel<false>, elements, 128, 0, stream, c, p, v);
    });
    ladder_step("2 flash", floor, forward, gpu,
                [&] { LAUNCH(flash_forward_kernel, rows, ROWS, 0, stream, c, lse, q, k, v); });
    ladder_step("3 llmc/attention.cuh", floor, forward, gpu,
                [&] { attention_forward(c, peak, lse2, qkv, shape, gpu); });

    // c is what step 3 has left.
    ladder_header("backward: reads dC, C, Q, K, V; writes dQ, dK, dV; 5 products", back);
    std::vector<LadderResult> backward = {{"dQ", dq + last, nullptr, &t.dq},
                                          {"dK", dk + last, nullptr, &t.dk},
                                          {"dV", dv + last, nullptr, &t.dv}};
    ladder_step("1 naive", back, backward, gpu, [&] {
        LAUNCH(naive_dot_kernel, pairs, 128, 0, stream, ds, dc, v, 1.f);
        LAUNCH(naive_softmax_backward_kernel, rows, ROWS, 0, stream, ds, p);
        LAUNCH(naive_sum_kernel<false>, elements, 128, 0, stream, dq, ds, k);
        LAUNCH(naive_sum_kernel<true>, elements, 128, 0, stream, dk, ds, q);
        LAUNCH(naive_sum_kernel<true>, elements, 128, 0, stream, dv, p, dc);
    });
    ladder_step("2 flash", back, backward, gpu, [&] {
        LAUNCH(flash_dot_kernel, rows, ROWS, 0, stream, D, dc, c);
        LAUNCH(flash_backward_kernel<false>, rows, ROWS, 0, stream, dq, nullptr, q, dc, k, v, lse,
               D);
        LAUNCH(flash_backward_kernel<true>, rows, ROWS, 0, stream, dk, dv, k, v, q, dc, lse, D);
    });
    ladder_step("3 llmc/attention.cuh", back, backward, gpu,
                [&] { attention_backward(dqkv, D, dc, c, lse2, qkv, shape, gpu); });
    return ladder_end();
}
