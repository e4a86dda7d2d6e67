// attention_sm90.cu: causal attention by wgmma and TMA (llmc/attention_sm90.cuh), the step after
// attention.cu's last, for each size of heads that it has. Both are compared with plain loops in
// double and, on a GPU, timed.
//
// To run: sh dev/kernels/run.sh attention_sm90; in the emulator sizes are small and there are no
// times.
#include "ladder.cuh"
#include "../../llmc/attention_sm90.cuh"

struct Sizes { int B, T, NH, KV, QK, HS, document; };
// document: tokens of each one; 0: a sequence is one. The last of B sequences is compared with the
// truth; those before are the same. Rows of K and V are as long as those of Q, and hold KV heads
// and nothing.
static const Sizes SIZES[] = {
    {TIMED ? 64 : 2, TIMED ? 1024 : 300, TIMED ? 12 : 2, TIMED ? 12 : 1, 64, 64, 0},
    {TIMED ? 16 : 1, TIMED ? 2048 : 140, TIMED ? 16 : 2, TIMED ? 16 : 2, 96, 96, 0},
    {TIMED ? 4 : 1, TIMED ? 4096 : 190, TIMED ? 16 : 4, TIMED ? 4 : 2, 128, 128, 0},
    {TIMED ? 4 : 1, TIMED ? 4096 : 257, TIMED ? 16 : 1, TIMED ? 16 : 1, 192, 128, 0},
    {2, 1, 2, 2, 64, 64, 0},
    {TIMED ? 64 : 2, TIMED ? 1024 : 420, TIMED ? 12 : 2, TIMED ? 12 : 1, 64, 64, TIMED ? 400 : 130},
    {1, 200, 1, 1, 96, 96, 7},
    {TIMED ? 4 : 1, TIMED ? 4096 : 290, TIMED ? 16 : 2, TIMED ? 4 : 2, 128, 128, TIMED ? 500 : 97},
    {1, 260, 1, 1, 192, 128, 140},
};

static const int32_t *device_ints(const std::vector<int32_t> &host) {
    int32_t *device;
    size_t bytes = host.size() * sizeof *device;
    cudaCheck(cudaMalloc((void **)&device, bytes));
    cudaCheck(cudaMemcpy(device, host.data(), bytes, cudaMemcpyHostToDevice));
    return device;
}

static std::vector<int32_t> begins_of(const Sizes &z) {
    std::vector<int32_t> begins(z.B * z.T);
    if (!z.document) return begins;
    for (int i = 0; i < z.B * z.T; i++) begins[i] = i % z.T / z.document * z.document;
    return begins;
}

struct Solution { Values c, lse, dq, dk, dv; };

// One sequence.
static Solution solve(const Sizes &z, const Values &q, const Values &k, const Values &v,
                      const Values &dc) {
    Solution out = {Values(z.T * z.NH * z.HS), Values(z.NH * z.T), Values(q.size()),
                    Values(k.size()), Values(v.size())};
    std::vector<int32_t> begins = begins_of(z);
    for (int h = 0; h < z.NH; h++)
        for (int t = 0; t < z.T; t++) {
            int g = h / (z.NH / z.KV), at = t * z.NH + h, first = begins[t];
            Values p(t + 1), dp(t + 1);
            double sum = 0, mean = 0;
            for (int u = first; u <= t; u++) {
                for (int e = 0; e < z.QK; e++)
                    p[u] += q[at * z.QK + e] * k[(u * z.NH + g) * z.QK + e];
                for (int e = 0; e < z.HS; e++)
                    dp[u] += dc[at * z.HS + e] * v[(u * z.NH + g) * z.HS + e];
                sum += p[u] = exp(p[u] / sqrt(z.QK));
            }
            out.lse[h * z.T + t] = log2(sum);
            for (int u = first; u <= t; u++) p[u] /= sum, mean += p[u] * dp[u];
            for (int u = first; u <= t; u++) {
                double ds = p[u] * (dp[u] - mean) / sqrt(z.QK);
                for (int e = 0; e < z.HS; e++) {
                    out.c[at * z.HS + e] += p[u] * v[(u * z.NH + g) * z.HS + e];
                    out.dv[(u * z.NH + g) * z.HS + e] += p[u] * dc[at * z.HS + e];
                }
                for (int e = 0; e < z.QK; e++) {
                    out.dq[at * z.QK + e] += ds * k[(u * z.NH + g) * z.QK + e];
                    out.dk[(u * z.NH + g) * z.QK + e] += ds * q[at * z.QK + e];
                }
            }
        }
    return out;
}

// The device arrays of a climb.
struct Arrays { real *q, *k, *v, *dc, *c, *dq, *dk, *dv; wide *lse, *peak, *D; };

static void climb_backward(const Sizes &z, const Arrays &a, const Solution &truth,
                           const Heads qkv[3], AttentionShape shape, Gpu *gpu) {
    size_t last = (size_t)(z.B - 1) * z.T;
    const Heads d[3] = {{a.dq, z.NH * z.QK, z.QK}, {a.dk, z.NH * z.QK, z.QK},
                        {a.dv, z.NH * z.HS, z.HS}};
    double floor = (double)z.B * z.NH * z.T * z.T * (3 * z.QK + 2 * z.HS) / FLOP_PER_MS;
    std::vector<LadderResult> backward = {{"dQ", a.dq + last * z.NH * z.QK, nullptr, &truth.dq},
                                          {"dK", a.dk + last * z.NH * z.QK, nullptr, &truth.dk},
                                          {"dV", a.dv + last * z.NH * z.HS, nullptr, &truth.dv}};
    ladder_header("backward, the same", floor);
    ladder_step("llmc/attention.cuh", floor, backward, gpu,
                [&] { attention_backward(d, a.D, a.dc, a.c, a.lse, qkv, shape, gpu); });
    if (z.QK == 192) return;
    ladder_step("llmc/attention_sm90.cuh", floor, backward, gpu, [&] {
        CHECK(attention_backward_sm90(d, a.D, a.dc, a.c, a.lse, qkv, shape, gpu),
              "no kernel\n  -> SIZES");
    });
}

static void climb(const Sizes &z, Gpu *gpu) {
    size_t rows = (size_t)z.B * z.T, last = (size_t)(z.B - 1) * z.T;
    Values host[4] = {random_values(z.T * z.NH * z.QK, 1), random_values(z.T * z.NH * z.QK, 2),
                      random_values(z.T * z.NH * z.HS, 3), random_values(z.T * z.NH * z.HS, 4)};
    Arrays a = {device_repeat(&host[0], z.B), device_repeat(&host[1], z.B),
                device_repeat(&host[2], z.B), device_repeat(&host[3], z.B),
                device_empty<real>(rows * z.NH * z.HS), device_empty<real>(rows * z.NH * z.QK),
                device_empty<real>(rows * z.NH * z.QK), device_empty<real>(rows * z.NH * z.HS),
                device_empty<wide>(rows * z.NH), device_empty<wide>(rows * z.NH),
                device_empty<wide>(rows * z.NH)};
    const Heads qkv[3] = {{a.q, z.NH * z.QK, z.QK}, {a.k, z.NH * z.QK, z.QK},
                          {a.v, z.NH * z.HS, z.HS}};
    AttentionShape shape = attention_shape(z.B, z.T, z.NH, z.KV, z.QK, z.HS, 1 / sqrt(z.QK));
    std::vector<int32_t> begins = begins_of(z), ends = begins;
    for (int32_t &end : ends) end = std::min(end + z.document, z.T);
    if (z.document) shape.begins = device_ints(begins), shape.ends = device_ints(ends);
    Solution truth = solve(z, host[0], host[1], host[2], host[3]);
    double floor = (double)z.B * z.NH * z.T * z.T * (z.QK + z.HS) / FLOP_PER_MS;
    std::vector<LadderResult> forward = {
        {"C", a.c + last * z.NH * z.HS, nullptr, &truth.c},
        {"lse", nullptr, a.lse + last * z.NH, &truth.lse}};
    char title[96];
    snprintf(title, sizeof title, "forward, B %d T %d, %d:%d heads of %d and %d, documents of %d",
             z.B, z.T, z.NH, z.KV, z.QK, z.HS, z.document ? z.document : z.T);
    ladder_header(title, floor);
    ladder_step("llmc/attention.cuh", floor, forward, gpu,
                [&] { attention_forward(a.c, a.peak, a.lse, qkv, shape, gpu); });
    ladder_step("llmc/attention_sm90.cuh", floor, forward, gpu, [&] {
        CHECK(attention_forward_sm90(a.c, a.peak, a.lse, qkv, shape, gpu), "no kernel\n  -> SIZES");
    });
    climb_backward(z, a, truth, qkv, shape, gpu);
    for (real *p : {a.q, a.k, a.v, a.dc, a.c, a.dq, a.dk, a.dv}) cudaCheck(cudaFree(p));
    for (wide *p : {a.lse, a.peak, a.D}) cudaCheck(cudaFree(p));
    cudaCheck(cudaFree((void *)shape.begins)), cudaCheck(cudaFree((void *)shape.ends));
}

int main(void) {
    Gpu *gpu = test_gpu();
    for (const Sizes &z : SIZES) climb(z, gpu);
    return ladder_end();
}
