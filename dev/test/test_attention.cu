// test_attention.cu: causal attention with grouped queries, forward and backward
// (llmc/attention.cuh).
#include "gpu_test.cuh"
#include "../../llmc/attention.cuh"
#include "../../llmc/run/trainer.h"

// One row per position: [gap | q | k | v | gap], as wide as `ld`. QK > HS: v's heads lie so far
// apart as if k's channels without position stood beside each, as latent attention makes them.
struct Rows {
    AttentionShape s;
    // of q, k, v: where in the row, how many, channels of a head, from head to head
    int64_t n, ld, at[3], width[3], size[3], head[3], c_width;
    std::vector<int32_t> begins, ends;  // [n] of documents, or empty
    Rows(int B, int T, int NH, int KV, int QK, int HS, double scale = 0) {
        s = attention_shape(B, T, NH, KV, QK, HS, scale ? scale : 1 / sqrt((double)QK));
        n = (int64_t)B * T, c_width = (int64_t)NH * HS;
        size[0] = head[0] = size[1] = head[1] = QK, size[2] = HS, head[2] = QK > HS ? 2 * HS : HS;
        width[0] = NH * head[0], width[1] = KV * head[1], width[2] = (KV - 1) * head[2] + HS;
        at[0] = 8, at[1] = at[0] + width[0], at[2] = at[1] + width[1], ld = at[2] + width[2] + 16;
    }
    // Documents begin where `separators` has a 1.
    Rows &cut(const std::vector<int32_t> &separators) {
        begins.resize(n), ends.resize(n);
        documents_find(begins.data(), ends.data(), separators.data(), s.B, s.T, 1);
        return *this;
    }
    Rows &cut_at_random(int mean) {
        std::vector<int32_t> separators(n);
        for (int64_t i = 0; i < n; i++) separators[i] = rand_uniform(300 + mean, i) * mean < 1;
        return cut(separators);
    }
    Rows &cut_at(int position) {
        std::vector<int32_t> separators(n);
        for (int b = 0; b < s.B; b++) separators[b * s.T + position] = 1;
        return cut(separators);
    }
    // The first key that query t of sequence b sees.
    int first_key(int b, int t) const { return begins.empty() ? 0 : begins[b * s.T + t]; }
    // Whether the column belongs to q, k or v.
    bool inside(int part, int64_t column) const {
        return column >= at[part] && column < at[part] + width[part] &&
               (column - at[part]) % head[part] < size[part];
    }
    bool inside(int64_t column) const {
        return inside(0, column) || inside(1, column) || inside(2, column);
    }
    void heads(Heads to[3], real *x) const {
        for (int part = 0; part < 3; part++) to[part] = {x + at[part], (int)ld, (int)head[part]};
    }
};

// ----------------------------------------------------------------------------------- the equations

struct Truth { Values c, d, peak; };  // d: rows of dq, dk, dv; NaN in the gaps

// dot product of the head's rows
static double dot(const Values &x, int64_t i, const Values &y, int64_t j, int HS) {
    double sum = 0;
    for (int e = 0; e < HS; e++) sum += x[i + e] * y[j + e];
    return sum;
}

// Head h of sequence b: rows of P, then everything from P's definition: dS = P * (dP - sum over
// keys of P dP).
static void head_truth(Truth *truth, const Values &x, const Values &dc, const Rows &r, int b,
                       int h) {
    const AttentionShape &s = r.s;
    int g = h / (s.NH / s.KV);
    double scale = s.scale;
    auto row = [&](int part, int t) {
        return (int64_t)(b * s.T + t) * r.ld + r.at[part] + (part == 0 ? h : g) * r.head[part];
    };
    for (int t = 0; t < s.T; t++) {
        Values p(t + 1), dp(t + 1);
        int64_t c_t = (int64_t)(b * s.T + t) * r.c_width + h * s.HS;
        double max = -INFINITY, sum = 0, mean = 0;
        int first = r.first_key(b, t);
        for (int u = first; u <= t; u++)
            max = fmax(max, p[u] = scale * dot(x, row(0, t), x, row(1, u), s.QK));
        truth->peak[((int64_t)b * s.NH + h) * s.T + t] = max;
        for (int u = first; u <= t; u++) sum += p[u] = exp(p[u] - max);
        for (int u = first; u <= t; u++) {
            p[u] /= sum;
            dp[u] = dot(dc, c_t, x, row(2, u), s.HS);
            mean += p[u] * dp[u];
        }
        for (int u = first; u <= t; u++) {
            double ds = p[u] * (dp[u] - mean) * scale;
            for (int e = 0; e < s.QK; e++) {
                truth->d[row(0, t) + e] += ds * x[row(1, u) + e];
                truth->d[row(1, u) + e] += ds * x[row(0, t) + e];
            }
            for (int e = 0; e < s.HS; e++) {
                truth->c[c_t + e] += p[u] * x[row(2, u) + e];
                truth->d[row(2, u) + e] += p[u] * dc[c_t + e];
            }
        }
    }
}

static Truth attention_truth(const Values &x, const Values &dc, const Rows &r) {
    Truth truth = {Values(r.n * r.c_width), Values(r.n * r.ld, NAN), Values(r.n * r.s.NH)};
    for (int64_t i = 0; i < r.n * r.ld; i++) if (r.inside(i % r.ld)) truth.d[i] = 0;
    for (int b = 0; b < r.s.B; b++)
        for (int h = 0; h < r.s.NH; h++) head_truth(&truth, x, dc, r, b, h);
    return truth;
}

// -------------------------------------------------------------------------------------- the device

struct Device { real *x, *dc, *c, *d; wide *peak, *lse, *D; int32_t *begins, *ends; };

static int32_t *device_borders(const std::vector<int32_t> &host) {
    int32_t *device = nullptr;
    if (host.empty()) return device;
    cudaCheck(cudaMalloc((void **)&device, host.size() * sizeof(int32_t)));
    cudaCheck(cudaMemcpy(device, host.data(), host.size() * sizeof(int32_t),
                         cudaMemcpyHostToDevice));
    return device;
}

static Device device_make(Values *x, Values *dc, const Rows &r) {
    int64_t rows = r.n * r.s.NH;
    return {device_copy<real>(x), device_copy<real>(dc), device_empty<real>(r.n * r.c_width),
            device_empty<real>(r.n * r.ld), device_empty<wide>(rows), device_empty<wide>(rows),
            device_empty<wide>(rows), device_borders(r.begins), device_borders(r.ends)};
}
static void device_free(Device d) {
    cudaFree(d.x), cudaFree(d.dc), cudaFree(d.c), cudaFree(d.d), cudaFree(d.peak), cudaFree(d.lse),
        cudaFree(d.D), cudaFree(d.begins), cudaFree(d.ends);
}

static void device_run(Device d, const Rows &r) {
    Heads qkv[3], dqkv[3];
    r.heads(qkv, d.x), r.heads(dqkv, d.d);
    AttentionShape s = r.s;
    s.begins = d.begins, s.ends = d.ends;
    attention_forward(d.c, d.peak, d.lse, qkv, s, test_gpu());
    attention_backward(dqkv, d.D, d.dc, d.c, d.lse, qkv, s, test_gpu());
}

// x: gaps are NaN, so whoever reads there shows it.
static Values random_rows(const Rows &r, uint64_t seed, double q_std) {
    Values x = random_values(r.n * r.ld, seed);
    for (int64_t i = 0; i < r.n * r.ld; i++) {
        if (!r.inside(i % r.ld)) x[i] = NAN;
        if (r.inside(0, i % r.ld)) x[i] *= q_std;
    }
    return x;
}

// q, k or v of all rows, side by side.
static Values part_of(const Values &rows, const Rows &r, int part) {
    Values out;
    for (int64_t i = 0; i < r.n * r.ld; i++) if (r.inside(part, i % r.ld)) out.push_back(rows[i]);
    return out;
}

static void check_rows(const Rows &r, double q_std) {
    int B = r.s.B, T = r.s.T, NH = r.s.NH, KV = r.s.KV, QK = r.s.QK, HS = r.s.HS;
    Values x = random_rows(r, 100 + T, q_std), dc = random_values(r.n * r.c_width, 200 + T);
    Device d = device_make(&x, &dc, r);
    Truth truth = attention_truth(x, dc, r);
    device_run(d, r);
    Values c = host_values(d.c, truth.c.size()), got = host_values(d.d, truth.d.size());
    double e = nmse(c, truth.c);
    EXPECT(e <= TOLERANCE, "B %d, T %d, NH %d, KV %d, heads of %d and %d: c's error is %.3g", B, T,
           NH, KV, QK, HS, e);
    for (int part = 0; part < 3; part++) {
        e = nmse(part_of(got, r, part), part_of(truth.d, r, part));
        EXPECT(e <= TOLERANCE, "B %d, T %d, NH %d, KV %d, heads of %d and %d: d%c's error is %.3g",
               B, T, NH, KV, QK, HS, "qkv"[part], e);
    }
    // sums in float of products of what is stored, in both precisions
    e = nmse(host_values(d.peak, truth.peak.size()), truth.peak);
    EXPECT(e <= 1e-10, "B %d, T %d, NH %d, KV %d, heads of %d and %d: the peaks' error is %.3g", B,
           T, NH, KV, QK, HS, e);
    int64_t strangers = 0;
    for (size_t i = 0; i < got.size(); i++) strangers += isnan(truth.d[i]) && !isnan(got[i]);
    EXPECT(strangers == 0,
           "T %d, heads of %d and %d: %lld elements beside dq, dk and dv are written", T, QK, HS,
           (long long)strangers);
    device_free(d);
}

static void check(int B, int T, int NH, int KV, int HS, double q_std) {
    check_rows(Rows(B, T, NH, KV, HS, HS), q_std);
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
    check(3, 20, 3, 3, 32, 1);  // in groups of three heads
}

// Latent attention's sizes: wider keys than values, which lie in rows and at distances of their
// own; and nGPT's scale, for q and k of length 1.
GPU_TEST(cuda_attention_latent) {
    check_rows(Rows(2, 17, 2, 2, 48, 32), 1);
    check_rows(Rows(1, 130, 3, 3, 48, 32), 1);
    check_rows(Rows(2, 67, 2, 2, 96, 64), 1);
    check_rows(Rows(1, 130, 2, 1, 192, 128), 1);
    check_rows(Rows(2, 33, 2, 2, 192, 128), 1);
    check_rows(Rows(2, 70, 2, 2, 32, 32, sqrt(32)), 0.05);
}

// Scores up to +-60 and beyond: the largest score of a row comes in any of its tiles.
GPU_TEST(cuda_attention_large) {
    check(2, 130, 2, 1, 32, 20);
    check(1, 65, 2, 2, 64, 20);
}

// A group of heads fits into the L2 cache, and a grid has at most 65,535 groups: all heads are one
// group if no divisor of their number fits.
GPU_TEST(cuda_attention_grid) {
    Gpu gpu = {};
    gpu.l2_bytes = 48 << 20;
    const struct { int B, NH; unsigned group; } ROWS[] = {
        {2, 12, 24}, {4096, 12, 8192}, {65537, 1, 65537}, {2, 65537, 2 * 65537}};
    for (const auto &row : ROWS) {
        AttentionShape s = {};
        s.B = row.B, s.NH = s.KV = row.NH, s.QK = s.HS = 32;
        s.T = 32 / (int)sizeof(real);
        dim3 grid = query_grid(3, s, &gpu);
        EXPECT(grid.x * grid.z == (unsigned)(row.B * row.NH) && grid.y == 3 && grid.z <= 65535,
               "%d heads: a grid of %u, %u, %u", row.B * row.NH, grid.x, grid.y, grid.z);
        EXPECT(grid.x == row.group, "%d heads: groups of %u", row.B * row.NH, grid.x);
    }
}

// A key that is not a number shows in the peaks of the queries that see it, and of no other.
GPU_TEST(cuda_attention_not_finite) {
    Rows r(2, 70, 4, 2, 32, 32);
    const int sequence = 1, group = 1, bad = 37;
    Values x = random_rows(r, 13, 1), dc = random_values(r.n * r.c_width, 14);
    x[(sequence * r.s.T + bad) * r.ld + r.at[1] + group * r.s.HS + 5] = NAN;
    Device d = device_make(&x, &dc, r);
    device_run(d, r);
    Values peak = host_values(d.peak, r.n * r.s.NH);
    int wrong = 0;
    for (size_t i = 0; i < peak.size(); i++) {
        int t = (int)i % r.s.T, head = (int)i / r.s.T % r.s.NH, b = (int)i / r.s.T / r.s.NH;
        wrong += isnan(peak[i]) != (b == sequence && head / 2 == group && t >= bad);
    }
    EXPECT(wrong == 0, "%d of %d peaks are NaN and should not be, or the other way round", wrong,
           (int)peak.size());
    device_free(d);
}

// The elements of two runs that differ in any bit, of those whose position in the sequence is below
// `before`.
template <typename T> static int64_t differences(const std::vector<T> &x, const std::vector<T> &y,
                                                 const Rows &r, int64_t width, int before) {
    int64_t count = 0;
    for (size_t i = 0; i < x.size(); i++)
        count += (int64_t)i / width % r.s.T < before && memcmp(&x[i], &y[i], sizeof(T)) != 0;
    return count;
}
static std::vector<real> raw(const real *device, size_t n) {
    std::vector<real> host(n);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(host.data(), device, n * sizeof(real), cudaMemcpyDeviceToHost));
    return host;
}

// Positions from `from` on are others, and nobody there asks for a gradient: before it nothing
// changes, in no bit, and from it on keys and values get none.
static void check_causal(const Rows &r, int from) {
    Values x = random_rows(r, 7, 1);
    Values dc = random_values(r.n * r.c_width, 8);
    Values other = random_rows(r, 9, 3);
    for (size_t i = 0; i < dc.size(); i++) if ((int64_t)i / r.c_width % r.s.T >= from) dc[i] = 0;
    Device d = device_make(&x, &dc, r);
    device_run(d, r);
    std::vector<real> c = raw(d.c, dc.size()), grads = raw(d.d, x.size());
    for (size_t i = 0; i < x.size(); i++) if ((int64_t)i / r.ld % r.s.T >= from) x[i] = other[i];
    Device e = device_make(&x, &dc, r);
    device_run(e, r);
    int64_t in_c = differences(c, raw(e.c, dc.size()), r, r.c_width, from);
    int64_t in_d = differences(grads, raw(e.d, x.size()), r, r.ld, from);
    EXPECT(in_c == 0, "T %d: %lld elements of c before position %d know what comes from there on",
           r.s.T, (long long)in_c, from);
    EXPECT(in_d == 0, "T %d: %lld gradients before position %d know what comes from there on",
           r.s.T, (long long)in_d, from);
    Values late = host_values(e.d, x.size());
    double sum = 0;
    for (int64_t i = 0; i < r.n * r.ld; i++)
        if (i / r.ld % r.s.T >= from && r.inside(i % r.ld)) sum += fabs(late[i]);
    EXPECT(sum == 0, "T %d: gradients from position %d on sum to %g", r.s.T, from, sum);
    device_free(d), device_free(e);
}

GPU_TEST(cuda_attention_causal) {
    for (int from : {1, 16, 33, 64, 100, 129}) check_causal(Rows(1, 130, 2, 1, 32, 32), from);
    check_causal(Rows(2, 67, 1, 1, 128, 128), 66);
    check_causal(Rows(1, 67, 1, 1, 192, 128), 50);
}

// Documents of a token and of several tiles, in all sizes of heads; borders at, before and behind
// the edges of tiles.
GPU_TEST(cuda_attention_documents) {
    check_rows(Rows(2, 150, 2, 1, 64, 64).cut_at_random(30), 1);
    check_rows(Rows(1, 300, 2, 2, 32, 32).cut_at_random(100), 1);
    check_rows(Rows(1, 150, 1, 1, 96, 96).cut_at_random(5), 1);
    check_rows(Rows(1, 150, 2, 1, 128, 128).cut_at_random(40), 1);
    check_rows(Rows(1, 70, 1, 1, 48, 48).cut_at_random(20), 20);
    check_rows(Rows(1, 130, 2, 2, 96, 64).cut_at_random(50), 1);
    check_rows(Rows(1, 140, 1, 1, 192, 128).cut_at_random(50), 1);
    check_rows(Rows(2, 40, 2, 2, 64, 64).cut_at_random(1), 1);  // each token by itself
    for (int at : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129})
        check_rows(Rows(1, 130, 1, 1, 64, 64).cut_at(at), 1);
}

// The document before a border changes no bit of the one behind it, and gets no gradient from it.
GPU_TEST(cuda_attention_border) {
    const int T = 150;
    for (int at : {1, 40, 64, 100, 149}) {
        Rows r(1, T, 2, 1, 64, 64);
        r.cut_at(at);
        Values x = random_rows(r, 17, 1), dc = random_values(r.n * r.c_width, 18);
        for (int64_t i = 0; i < at * r.c_width; i++) dc[i] = 0;
        Device d = device_make(&x, &dc, r);
        device_run(d, r);
        Values c = host_values(d.c, dc.size()), grads = host_values(d.d, x.size());
        Values other = random_rows(r, 19, 3);
        for (int64_t i = 0; i < at * r.ld; i++) x[i] = other[i];
        Device e = device_make(&x, &dc, r);
        device_run(e, r);
        Values c_now = host_values(e.c, dc.size()), grads_now = host_values(e.d, x.size());
        int64_t changed = 0, crossed = 0;
        for (int64_t i = at * r.c_width; i < T * r.c_width; i++) changed += c[i] != c_now[i];
        for (int64_t i = 0; i < T * r.ld; i++) {
            if (!r.inside(i % r.ld)) continue;
            if (i < at * r.ld) crossed += grads_now[i] != 0;
            else changed += grads[i] != grads_now[i];
        }
        EXPECT(changed == 0, "border at %d: %lld values behind it know what stands before", at,
               (long long)changed);
        EXPECT(crossed == 0, "border at %d: %lld gradients cross it", at, (long long)crossed);
        device_free(d), device_free(e);
    }
}

// A second run, over the results of the first: the same bits.
GPU_TEST(cuda_attention_repeats) {
    for (int HS : {64, 128}) {
        Rows r(2, 131, 2, 1, HS == 64 ? 96 : HS, HS);
        Values x = random_rows(r, 11, 2), dc = random_values(r.n * r.c_width, 12);
        Device d = device_make(&x, &dc, r);
        device_run(d, r);
        std::vector<real> c = raw(d.c, dc.size()), grads = raw(d.d, x.size());
        device_run(d, r);
        int64_t in_c = differences(c, raw(d.c, dc.size()), r, r.c_width, r.s.T);
        int64_t in_d = differences(grads, raw(d.d, x.size()), r, r.ld, r.s.T);
        EXPECT(in_c == 0 && in_d == 0,
               "HS %d: a second run changes %lld elements of c and %lld gradients", HS,
               (long long)in_c, (long long)in_d);
        device_free(d);
    }
}
