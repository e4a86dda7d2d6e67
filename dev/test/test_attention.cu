// test_attention.cu: causal attention with grouped queries, forward and backward (llmc/attention.cuh).
#include "gpu_test.cuh"
#include "../../llmc/attention.cuh"

// One row per position: [gap | q | k | v | gap], as wide as `ld`.
struct Rows {
    AttentionShape s;
    int64_t n, at[3], width[3], c_width;                       // of q, k, v: where in the row, how many
    Rows(int B, int T, int NH, int KV, int HS) {
        s = {B, T, NH, KV, HS, (int64_t)(NH + 2 * KV) * HS + 24};
        n = (int64_t)B * T;
        c_width = width[0] = (int64_t)NH * HS;
        width[1] = width[2] = (int64_t)KV * HS;
        at[0] = 8, at[1] = at[0] + width[0], at[2] = at[1] + width[1];
    }
};

// ------------------------------------------------------------------------------------------------------------------ the equations

struct Truth { Values c, d, peak; };                           // d: rows of dq, dk, dv; NaN in the gaps

// dot product of the head's rows
static double dot(const Values &x, int64_t i, const Values &y, int64_t j, int HS) {
    double sum = 0;
    for (int e = 0; e < HS; e++) sum += x[i + e] * y[j + e];
    return sum;
}

// Head h of sequence b: rows of P, then everything from P's definition: dS = P * (dP - sum over keys of P dP).
static void head_truth(Truth *truth, const Values &x, const Values &dc, const Rows &r, int b, int h) {
    const AttentionShape &s = r.s;
    int g = h / (s.NH / s.KV);
    double scale = 1 / sqrt((double)s.HS);
    auto row = [&](int part, int t) { return (int64_t)(b * s.T + t) * s.ld + r.at[part] + (part == 0 ? h : g) * s.HS; };
    for (int t = 0; t < s.T; t++) {
        Values p(t + 1), dp(t + 1);
        int64_t c_t = (int64_t)(b * s.T + t) * r.c_width + h * s.HS;
        double max = -INFINITY, sum = 0, mean = 0;
        for (int u = 0; u <= t; u++) max = fmax(max, p[u] = scale * dot(x, row(0, t), x, row(1, u), s.HS));
        truth->peak[((int64_t)b * s.NH + h) * s.T + t] = max;
        for (int u = 0; u <= t; u++) sum += p[u] = exp(p[u] - max);
        for (int u = 0; u <= t; u++) {
            p[u] /= sum;
            dp[u] = dot(dc, c_t, x, row(2, u), s.HS);
            mean += p[u] * dp[u];
        }
        for (int u = 0; u <= t; u++)
            for (int e = 0; e < s.HS; e++) {
                double ds = p[u] * (dp[u] - mean) * scale;
                truth->c[c_t + e] += p[u] * x[row(2, u) + e];
                truth->d[row(0, t) + e] += ds * x[row(1, u) + e];
                truth->d[row(1, u) + e] += ds * x[row(0, t) + e];
                truth->d[row(2, u) + e] += p[u] * dc[c_t + e];
            }
    }
}

static Truth attention_truth(const Values &x, const Values &dc, const Rows &r) {
    Truth truth = {Values(r.n * r.c_width), Values(r.n * r.s.ld, NAN), Values(r.n * r.s.NH)};
    for (int64_t bt = 0; bt < r.n; bt++)
        for (int part = 0; part < 3; part++)
            for (int64_t i = 0; i < r.width[part]; i++) truth.d[bt * r.s.ld + r.at[part] + i] = 0;
    for (int b = 0; b < r.s.B; b++)
        for (int h = 0; h < r.s.NH; h++) head_truth(&truth, x, dc, r, b, h);
    return truth;
}

// ------------------------------------------------------------------------------------------------------------------ the device

struct Device { real *x, *dc, *c, *d; wide *peak, *lse, *D; };

static Device device_make(Values *x, Values *dc, const Rows &r) {
    int64_t rows = r.n * r.s.NH;
    return {device_copy<real>(x), device_copy<real>(dc), device_empty<real>(r.n * r.c_width), device_empty<real>(r.n * r.s.ld),
            device_empty<wide>(rows), device_empty<wide>(rows), device_empty<wide>(rows)};
}
static void device_free(Device d) { cudaFree(d.x), cudaFree(d.dc), cudaFree(d.c), cudaFree(d.d), cudaFree(d.peak), cudaFree(d.lse), cudaFree(d.D); }

static void device_run(Device d, const Rows &r) {
    const real *qkv[3] = {d.x + r.at[0], d.x + r.at[1], d.x + r.at[2]};
    attention_forward(d.c, d.peak, d.lse, qkv[0], qkv[1], qkv[2], r.s, test_gpu());
    attention_backward(d.d + r.at[0], d.d + r.at[1], d.d + r.at[2], d.D, d.dc, d.c, d.lse, qkv, r.s, test_gpu());
}

// x: gaps are NaN, so whoever reads there shows it.
static Values random_rows(const Rows &r, uint64_t seed, double q_std) {
    Values x = random_values(r.n * r.s.ld, seed);
    for (int64_t i = 0; i < r.n * r.s.ld; i++) {
        int64_t column = i % r.s.ld;
        if (column < r.at[0] || column >= r.at[2] + r.width[2]) x[i] = NAN;
        else if (column < r.at[1]) x[i] *= q_std;
    }
    return x;
}

// q, k or v of all rows, side by side.
static Values part_of(const Values &rows, const Rows &r, int part) {
    Values out;
    for (int64_t bt = 0; bt < r.n; bt++)
        for (int64_t i = 0; i < r.width[part]; i++) out.push_back(rows[bt * r.s.ld + r.at[part] + i]);
    return out;
}

static void check(int B, int T, int NH, int KV, int HS, double q_std) {
    Rows r(B, T, NH, KV, HS);
    Values x = random_rows(r, 100 + T, q_std), dc = random_values(r.n * r.c_width, 200 + T);
    Device d = device_make(&x, &dc, r);
    Truth truth = attention_truth(x, dc, r);
    device_run(d, r);
    Values c = host_values(d.c, truth.c.size()), got = host_values(d.d, truth.d.size());
    double e = nmse(c, truth.c);
    EXPECT(e <= TOLERANCE, "B %d, T %d, NH %d, KV %d, HS %d: c's error is %.3g", B, T, NH, KV, HS, e);
    for (int part = 0; part < 3; part++) {
        e = nmse(part_of(got, r, part), part_of(truth.d, r, part));
        EXPECT(e <= TOLERANCE, "B %d, T %d, NH %d, KV %d, HS %d: d%c's error is %.3g", B, T, NH, KV, HS, "qkv"[part], e);
    }
    e = nmse(host_values(d.peak, truth.peak.size()), truth.peak);                             // sums in float of products of what is stored, in both precisions
    EXPECT(e <= 1e-10, "B %d, T %d, NH %d, KV %d, HS %d: the peaks' error is %.3g", B, T, NH, KV, HS, e);
    int64_t strangers = 0;
    for (size_t i = 0; i < got.size(); i++) strangers += isnan(truth.d[i]) && !isnan(got[i]);
    EXPECT(strangers == 0, "T %d, HS %d: %lld elements beside dq, dk and dv are written", T, HS, (long long)strangers);
    device_free(d);
}

GPU_TEST(cuda_attention) {
    check(2, 1, 2, 2, 32, 1);
    check(2, 17, 4, 2, 64, 1);
    check(2, 64, 2, 1, 32, 1);
    check(2, 65, 2, 2, 96, 1);
    check(2, 130, 3, 1, 64, 1);
    check(1, 130, 2, 1, 128, 1);
    check(2, 17, 2, 2, 128, 1);
    check(1, 70, 2, 1, 48, 1);
    check(1, 300, 2, 2, 32, 1);
}

// Scores up to +-60 and beyond: the largest score of a row comes in any of its tiles.
GPU_TEST(cuda_attention_large) {
    check(2, 130, 2, 1, 32, 20);
    check(1, 65, 2, 2, 64, 20);
}

// A key that is not a number shows in the peaks of the queries that see it, and of no other.
GPU_TEST(cuda_attention_not_finite) {
    Rows r(2, 70, 4, 2, 32);
    const int sequence = 1, group = 1, bad = 37;
    Values x = random_rows(r, 13, 1), dc = random_values(r.n * r.c_width, 14);
    x[(sequence * r.s.T + bad) * r.s.ld + r.at[1] + group * r.s.HS + 5] = NAN;
    Device d = device_make(&x, &dc, r);
    device_run(d, r);
    Values peak = host_values(d.peak, r.n * r.s.NH);
    int wrong = 0;
    for (size_t i = 0; i < peak.size(); i++) {
        int t = (int)i % r.s.T, head = (int)i / r.s.T % r.s.NH, b = (int)i / r.s.T / r.s.NH;
        wrong += isnan(peak[i]) != (b == sequence && head / 2 == group && t >= bad);
    }
    EXPECT(wrong == 0, "%d of %d peaks are NaN and should not be, or the other way round", wrong, (int)peak.size());
    device_free(d);
}

// The elements of two runs that differ in any bit, of those whose position in the sequence is below `before`.
template <typename T> static int64_t differences(const std::vector<T> &x, const std::vector<T> &y, const Rows &r, int64_t width, int before) {
    int64_t count = 0;
    for (size_t i = 0; i < x.size(); i++) count += (int64_t)i / width % r.s.T < before && memcmp(&x[i], &y[i], sizeof(T)) != 0;
    return count;
}
static std::vector<real> raw(const real *device, size_t n) {
    std::vector<real> host(n);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(host.data(), device, n * sizeof(real), cudaMemcpyDeviceToHost));
    return host;
}

// Positions from `from` on are others, and nobody there asks for a gradient: before it nothing changes, in no bit, and from it on keys and values get none.
static void check_causal(const Rows &r, int from) {
    Values x = random_rows(r, 7, 1), dc = random_values(r.n * r.c_width, 8), other = random_rows(r, 9, 3);
    for (size_t i = 0; i < dc.size(); i++) if ((int64_t)i / r.c_width % r.s.T >= from) dc[i] = 0;
    Device d = device_make(&x, &dc, r);
    device_run(d, r);
    std::vector<real> c = raw(d.c, dc.size()), grads = raw(d.d, x.size());
    for (size_t i = 0; i < x.size(); i++) if ((int64_t)i / r.s.ld % r.s.T >= from) x[i] = other[i];
    Device e = device_make(&x, &dc, r);
    device_run(e, r);
    int64_t in_c = differences(c, raw(e.c, dc.size()), r, r.c_width, from), in_d = differences(grads, raw(e.d, x.size()), r, r.s.ld, from);
    EXPECT(in_c == 0, "T %d: %lld elements of c before position %d know what comes from there on", r.s.T, (long long)in_c, from);
    EXPECT(in_d == 0, "T %d: %lld gradients before position %d know what comes from there on", r.s.T, (long long)in_d, from);
    Values late = host_values(e.d, x.size());
    double sum = 0;
    for (int64_t bt = 0; bt < r.n; bt++)
        for (int64_t i = r.at[0]; bt % r.s.T >= from && i < r.at[2] + r.width[2]; i++) sum += fabs(late[bt * r.s.ld + i]);
    EXPECT(sum == 0, "T %d: gradients from position %d on sum to %g", r.s.T, from, sum);
    device_free(d), device_free(e);
}

GPU_TEST(cuda_attention_causal) {
    for (int from : {1, 16, 33, 64, 100, 129}) check_causal(Rows(1, 130, 2, 1, 32), from);
    check_causal(Rows(2, 67, 1, 1, 128), 66);
}

// A second run, over the results of the first: the same bits.
GPU_TEST(cuda_attention_repeats) {
    for (int HS : {64, 128}) {
        Rows r(2, 131, 2, 1, HS);
        Values x = random_rows(r, 11, 2), dc = random_values(r.n * r.c_width, 12);
        Device d = device_make(&x, &dc, r);
        device_run(d, r);
        std::vector<real> c = raw(d.c, dc.size()), grads = raw(d.d, x.size());
        device_run(d, r);
        int64_t in_c = differences(c, raw(d.c, dc.size()), r, r.c_width, r.s.T), in_d = differences(grads, raw(d.d, x.size()), r, r.s.ld, r.s.T);
        EXPECT(in_c == 0 && in_d == 0, "HS %d: a second run changes %lld elements of c and %lld gradients", HS, (long long)in_c, (long long)in_d);
        device_free(d);
    }
}
