// attention_sm90.cu: causal attention by wgmma and TMA (attention_sm90.cuh), the step after
// attention.cu's last, for each size of heads that it has. Both are compared with plain loops in
// double and, on a GPU, timed.
//
// To run: sh dev/kernels/run.sh attention_sm90; in the emulator sizes are small and there are no
// times.
#include "ladder.cuh"
#include "attention_sm90.cuh"

struct Sizes { int B, T, NH, KV, QK, HS; };
// The last of B sequences is compared with the truth; those before are the same.
static const Sizes SIZES[] = {
    {TIMED ? 64 : 2, TIMED ? 1024 : 300, TIMED ? 12 : 2, TIMED ? 12 : 1, 64, 64},
    {TIMED ? 16 : 1, TIMED ? 2048 : 140, TIMED ? 16 : 2, TIMED ? 16 : 2, 96, 96},
    {TIMED ? 4 : 1, TIMED ? 4096 : 190, TIMED ? 16 : 4, TIMED ? 4 : 2, 128, 128},
    {TIMED ? 4 : 1, TIMED ? 4096 : 257, TIMED ? 16 : 1, TIMED ? 16 : 1, 192, 128},
    {1, 1, 2, 2, 64, 64},
};

struct Solution { Values c, lse; };

// One sequence.
static Solution solve(const Sizes &z, const Values &q, const Values &k, const Values &v) {
    Solution out = {Values(z.T * z.NH * z.HS), Values(z.NH * z.T)};
    for (int h = 0; h < z.NH; h++)
        for (int t = 0; t < z.T; t++) {
            int g = h / (z.NH / z.KV);
            Values p(t + 1);
            double sum = 0;
            for (int u = 0; u <= t; u++) {
                for (int e = 0; e < z.QK; e++)
                    p[u] += q[(t * z.NH + h) * z.QK + e] * k[(u * z.KV + g) * z.QK + e];
                sum += p[u] = exp(p[u] / sqrt(z.QK));
            }
            out.lse[h * z.T + t] = log2(sum);
            for (int u = 0; u <= t; u++)
                for (int e = 0; e < z.HS; e++)
                    out.c[(t * z.NH + h) * z.HS + e] +=
                        p[u] / sum * v[(u * z.KV + g) * z.HS + e];
        }
    return out;
}

static void climb(const Sizes &z, Gpu *gpu) {
    size_t rows = (size_t)z.B * z.T, last = (size_t)(z.B - 1) * z.T;
    Values host[3] = {random_values(z.T * z.NH * z.QK, 1), random_values(z.T * z.KV * z.QK, 2),
                      random_values(z.T * z.KV * z.HS, 3)};
    real *q = device_repeat(&host[0], z.B);
    real *k = device_repeat(&host[1], z.B);
    real *v = device_repeat(&host[2], z.B);
    real *c = device_empty<real>(rows * z.NH * z.HS);
    wide *lse = device_empty<wide>(rows * z.NH);
    wide *peak = device_empty<wide>(rows * z.NH);
    const Heads qkv[3] = {{q, z.NH * z.QK, z.QK}, {k, z.KV * z.QK, z.QK}, {v, z.KV * z.HS, z.HS}};
    AttentionShape shape = attention_shape(z.B, z.T, z.NH, z.KV, z.QK, z.HS, 1 / sqrt(z.QK));
    Solution truth = solve(z, host[0], host[1], host[2]);
    double floor = (double)z.B * z.NH * z.T * z.T * (z.QK + z.HS) / FLOP_PER_MS;
    std::vector<LadderResult> forward = {
        {"C", c + last * z.NH * z.HS, nullptr, &truth.c},
        {"lse", nullptr, lse + last * z.NH, &truth.lse}};
    char title[96];
    snprintf(title, sizeof title, "forward, B %d T %d, %d:%d heads of %d and %d", z.B, z.T, z.NH,
             z.KV, z.QK, z.HS);
    ladder_header(title, floor);
    ladder_step("llmc/attention.cuh", floor, forward, gpu,
                [&] { attention_forward(c, peak, lse, qkv, shape, gpu); });
    ladder_step("attention_sm90.cuh", floor, forward, gpu, [&] {
        CHECK(attention_forward_sm90(c, peak, lse, qkv, shape, gpu), "no kernel\n  -> SIZES");
    });
    for (void *p : {(void *)q, (void *)k, (void *)v, (void *)c, (void *)lse, (void *)peak})
        cudaCheck(cudaFree(p));
}

int main(void) {
    Gpu *gpu = test_gpu();
    for (const Sizes &z : SIZES) climb(z, gpu);
    return ladder_end();
}
