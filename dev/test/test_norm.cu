// test_norm.cu: norms and the adds beside them (llmc/norm.cuh) against their equations in double.
#include "gpu_test.cuh"
#include "../../llmc/norm.cuh"

static double stored(double x) { return to_float(to_real((float)x)); }

// A norm with random gains and biases away from 1 and 0, and gradients that hold something already.
// bias: NORM_RMS, which has none, NORM_LAYER or NORM_DYT.
struct TestNorm {
    Norm norm;
    Values w, b, dw, db;                                       // db, b empty: RMSNorm
    Values alpha, dalpha;                                      // DyT's
    int64_t stats;

    TestNorm(int64_t n, int groups, int width, int own, int bias, float eps, uint64_t seed) {
        int gains = own ? groups * width : width;
        stats = n * groups;
        w = random_values(gains, seed, 0.3, 1.2);
        dw = random_values(gains, seed + 1);
        if (bias) b = random_values(gains, seed + 2, 0.5), db = random_values(gains, seed + 3);
        norm = {site_make(1, groups, width, !own, bias, 1), device_copy<real>(&w),
                bias ? device_copy<real>(&b) : nullptr, device_copy<wide>(&dw),
                bias ? device_copy<wide>(&db) : nullptr, bias ? device_empty<wide>(stats) : nullptr,
                device_empty<wide>(stats), n, eps};
        if (bias != NORM_DYT) return;
        alpha = {stored(0.7)}, dalpha = random_values(1, seed + 4);
        norm.alpha = device_copy<real>(&alpha), norm.dalpha = device_copy<wide>(&dalpha);
    }
    bool dyt() const { return !alpha.empty(); }
    ~TestNorm() {
        cudaFree((void *)norm.w), cudaFree((void *)norm.b), cudaFree(norm.dw), cudaFree(norm.db),
            cudaFree(norm.mean), cudaFree(norm.rstd), cudaFree((void *)norm.alpha),
            cudaFree(norm.dalpha);
    }

    // of element i of the rows: gains are shared by groups or span the row
    int gain(int64_t i) const { return (int)(i % norm.site.gains); }

    // xhat, mean and rstd of all lines. DyT: tanh(alpha x).
    void normalize(const Values &x, Values *xhat, Values *mean, Values *rstd) const {
        int W = norm.site.width;
        *xhat = x, mean->assign(stats, 0), rstd->assign(stats, 0);
        for (double &value : *xhat) value = dyt() ? tanh(alpha[0] * value) : value;
        if (dyt()) return;
        for (int64_t line = 0; line < stats; line++) {
            double m = 0, square = 0;
            for (int i = 0; i < W; i++) m += b.empty() ? 0 : x[line * W + i] / W;
            for (int i = 0; i < W; i++) square += pow(x[line * W + i] - m, 2) / W;
            (*mean)[line] = m, (*rstd)[line] = 1 / sqrt(square + norm.eps);
            for (int i = 0; i < W; i++)
                (*xhat)[line * W + i] = (x[line * W + i] - m) * (*rstd)[line];
        }
    }
    Values forward(const Values &x) const {
        Values z, mean, rstd;
        normalize(x, &z, &mean, &rstd);
        for (size_t i = 0; i < z.size(); i++)
            z[i] = w[gain(i)] * z[i] + (b.empty() ? 0 : b[gain(i)]);
        return z;
    }
    // N'(dy; x) and, added, the gradients of gains, biases and alpha.
    Values backward(const Values &dy, const Values &x, Values *gradient_w, Values *gradient_b,
                    double *gradient_alpha) const {
        Values xhat, mean, rstd, dx(x.size());
        int W = norm.site.width;
        normalize(x, &xhat, &mean, &rstd);
        for (int64_t line = 0; line < stats; line++) {
            double u = 0, ux = 0;
            for (int64_t i = line * W; i < (line + 1) * W; i++)
                u += w[gain(i)] * dy[i] / W, ux += w[gain(i)] * dy[i] * xhat[i] / W;
            for (int64_t i = line * W; i < (line + 1) * W; i++) {
                dx[i] = rstd[line] * (w[gain(i)] * dy[i] - (b.empty() ? 0 : u) - xhat[i] * ux);
                if (dyt()) {
                    double v = w[gain(i)] * dy[i] * (1 - xhat[i] * xhat[i]);
                    dx[i] = alpha[0] * v;
                    *gradient_alpha += v * x[i];
                }
                (*gradient_w)[gain(i)] += dy[i] * xhat[i];
                if (!b.empty()) (*gradient_b)[gain(i)] += dy[i];
            }
        }
        return dx;
    }
    void expect_statistics(const Values &x, const char *what) const {
        if (dyt()) return;
        Values xhat, mean, rstd;
        normalize(x, &xhat, &mean, &rstd);
        expect_close(norm.rstd, rstd, what);
        if (!b.empty()) expect_close(norm.mean, mean, what);
    }
};

// Fewer rows the wider they are.
static int rows_for(int width) {
    if (width <= 128) return 35;
    return width <= 2048 ? 9 : 2;
}

// ----------------------------------------------------------------------------------------- forward

// The flags say which parts of t = out(y), s = a skip + t, z = next(s), s kept are there.
static void check_forward(int64_t n, int width, int skip, int out, int next, int keep, int bias,
                          double mean = 3) {
    char what[100];
    snprintf(what, sizeof what,
             "n %d, width %d, skip %d, out %d, next %d, s kept %d, bias %d, mean %g", (int)n, width,
             skip, out, next, keep, bias, mean);
    size_t count = n * width;
    float a = 1.75f;
    TestNorm first(n, 1, width, 0, bias, 1e-5f, 11), second(n, 1, width, 0, bias, 1e-5f, 21);
    Values y = random_values(count, 31, 1, mean), x = random_values(count, 32);
    real *d_y = device_copy<real>(&y);
    real *d_x = device_copy<real>(&x);
    real *d_s = device_empty<real>(count);
    real *d_z = device_empty<real>(count);
    Values s = out ? first.forward(y) : y;
    for (size_t i = 0; i < count; i++) s[i] = stored(s[i] + (skip ? a * x[i] : 0));
    if (!next) second.norm.site.on = 0;
    AddNorm f = {keep ? d_s : nullptr, next ? d_z : nullptr, d_y, skip ? d_x : nullptr, a,
                 out ? &first.norm : nullptr, next || !out ? &second.norm : nullptr};
    add_norm_forward(f, test_gpu());
    if (keep) expect_close(d_s, s, what), s = host_values(d_s, count);
    if (next) expect_close(d_z, second.forward(s), what), second.expect_statistics(s, what);
    if (out) first.expect_statistics(y, what);
    if (keep || next) {                                        // in place: the same bits
        Values want = host_values(next ? d_z : d_s, count);
        AddNorm g = f;
        (next ? g.z : g.s) = d_y;
        if (keep && next && skip) g.s = d_x;
        add_norm_forward(g, test_gpu());
        EXPECT(host_values(d_y, count) == want, "%s: other values in place", what);
    }
    cudaFree(d_y), cudaFree(d_x), cudaFree(d_s), cudaFree(d_z);
}

GPU_TEST(cuda_add_norm) {
    for (int bits = 0; bits < 48; bits++) {
        int skip = bits & 1;
        int out = bits >> 1 & 1;
        int next = bits >> 2 & 1;
        int keep = bits >> 3 & 1;
        int bias = bits >> 4;
        if (!(next || keep) || !(skip || out || next)) continue;
        check_forward(37, 40, skip, out, next, keep, bias);
        check_forward(3, 776, skip, out, next, keep, bias);
    }
    check_forward(2, 2056, 1, 1, 1, 1, 1);                     // the block's sums, four in a row
    check_forward(2, 2056, 1, 1, 1, 1, NORM_DYT);
    // s is coarse in bfloat16, beside its deviation from the mean: z is of s as stored
    check_forward(5, 768, 1, 0, 1, 1, 1, 300);
}

// Every size of team: parts of a warp, warps, blocks; columns beyond the end; rows beyond the last.
GPU_TEST(cuda_norm_widths) {
    const int widths[] = {32, 64, 128, 256, 448, 768, 1024, 1536, 2048, 4096, 8192, 8448, 16384};
    for (int i = 0; i < 13; i++)
        for (int bias : {i % 2, (int)NORM_DYT})
            check_forward(rows_for(widths[i]), widths[i], 0, 0, 1, 0, bias);
}

static void check_groups(int64_t n, int groups, int width, int own, int bias, double deviation,
                         double mean, float eps) {
    char what[80];
    snprintf(what, sizeof what, "n %d, %d groups of %d, own gains %d, bias %d, mean %g", (int)n,
             groups, width, own, bias, mean);
    size_t count = n * groups * width;
    TestNorm test(n, groups, width, own, bias, eps, 41);
    Values x = random_values(count, 42, deviation, mean);
    real *d_x = device_copy<real>(&x), *d_y = device_empty<real>(count);
    AddNorm f = {};
    f.y = d_x, f.z = d_y, f.next = &test.norm;
    add_norm_forward(f, test_gpu());
    expect_close(d_y, test.forward(x), what);
    test.expect_statistics(x, what);
    cudaMemset(d_y, 0xff, count * sizeof(real));               // the same norm in the slot `out`
    f = {};
    f.y = d_x, f.s = d_y, f.out = &test.norm;
    add_norm_forward(f, test_gpu());
    expect_close(d_y, test.forward(x), what);
    cudaFree(d_x), cudaFree(d_y);
}

GPU_TEST(cuda_norm) {
    for (int bias = 0; bias < 3; bias++)
        for (int own = 0; own < (bias == NORM_DYT ? 1 : 2); own++)
            for (int groups = 1; groups <= 4; groups *= 2) {
                check_groups(11, groups, 40, own, bias, 1, 0, 1e-5f);
                check_groups(3, groups, 1032, own, bias, 1, 0, 1e-5f);
            }
    check_groups(2, 2, 2112, 1, 0, 1, 0, 1e-5f);     // SDD's gate and up
    check_groups(5, 1, 768, 0, 1, 1, 100, 1e-5f);    // a mean far from 0, which a LayerNorm removes
    check_groups(5, 1, 768, 0, 0, 1e-4, 0, 1e-5f);   // values so small that eps decides
}

// ---------------------------------------------------------------------------------------- backward

struct BackwardCase {
    int64_t n;
    int groups, width, own, bias, add, sum, other;
    size_t scratch;
    double mean;
};

static void check_backward(BackwardCase k) {
    char what[120];
    snprintf(what, sizeof what,
             "n %d, %d groups of %d, own gains %d, bias %d, add %d, sum %d, other %d, scratch %zu",
             (int)k.n, k.groups, k.width, k.own, k.bias, k.add, k.sum, k.other, k.scratch);
    size_t count = k.n * k.groups * k.width;
    TestNorm test(k.n, k.groups, k.width, k.own, k.bias, 1e-5f, 61);
    Values x = random_values(count, 62, 1, k.mean);
    Values dy = random_values(count, 63, 1, 0.5);
    Values add = random_values(count, 64);
    Values other = random_values(count, 65);
    real *d_x = device_copy<real>(&x);
    real *d_dy = device_copy<real>(&dy);
    real *d_add = device_copy<real>(&add);
    real *d_other = device_copy<real>(&other);
    real *d_dx = device_empty<real>(count), *d_sum = device_empty<real>(count);
    Values xhat, mean, rstd;
    test.normalize(x, &xhat, &mean, &rstd);                    // what forward would have kept
    std::vector<float> kept(mean.begin(), mean.end()), kept_rstd(rstd.begin(), rstd.end());
    if (k.bias == NORM_LAYER)
        cudaMemcpy(test.norm.mean, kept.data(), kept.size() * sizeof(float),
                   cudaMemcpyHostToDevice);
    cudaMemcpy(test.norm.rstd, kept_rstd.data(), kept_rstd.size() * sizeof(float),
               cudaMemcpyHostToDevice);
    Gpu gpu = *test_gpu();
    // as large as it says, for AddressSanitizer
    if (k.scratch) gpu.scratch_size = k.scratch, gpu.scratch = device_empty<float>(k.scratch);

    NormBackward f = {d_dx, k.sum ? d_sum : nullptr, d_dy, d_x, k.add ? d_add : nullptr,
                      k.other ? d_other : nullptr, 1.5f, -0.75f, 2.5f};
    norm_backward(&test.norm, f, &gpu);
    Values w_sum(test.dw.size()), b_sum(test.db.size());
    double alpha_sum = 0;
    Values dx = test.backward(dy, x, &w_sum, &b_sum, &alpha_sum);
    Values sum(count);
    for (size_t i = 0; i < count; i++) {
        dx[i] += k.add ? 1.5 * add[i] : 0;
        sum[i] = -0.75 * dx[i] + (k.other ? 2.5 * other[i] : 0);
    }
    expect_close(d_dx, dx, what);
    if (k.sum) expect_close(d_sum, sum, what);

    // in place: the same bits, and gains and biases twice
    Values once = host_values(d_dx, count), once_sum = host_values(d_sum, count);
    f.dx = k.add ? d_add : d_dy;
    if (k.sum) f.sum = k.other ? d_other : d_sum;
    norm_backward(&test.norm, f, &gpu);
    EXPECT(host_values(f.dx, count) == once, "%s: another gradient in place", what);
    if (k.sum) EXPECT(host_values(f.sum, count) == once_sum, "%s: another sum in place", what);
    for (size_t j = 0; j < w_sum.size(); j++) test.dw[j] += 2 * w_sum[j];
    for (size_t j = 0; j < b_sum.size(); j++) test.db[j] += 2 * b_sum[j];
    expect_close(test.norm.dw, test.dw, what);
    if (k.bias) expect_close(test.norm.db, test.db, what);
    if (test.dyt()) expect_close(test.norm.dalpha, {test.dalpha[0] + 2 * alpha_sum}, what);
    if (k.scratch) cudaFree(gpu.scratch);
    cudaFree(d_x), cudaFree(d_dy), cudaFree(d_add), cudaFree(d_other), cudaFree(d_dx),
        cudaFree(d_sum);
}

GPU_TEST(cuda_norm_backward) {
    for (int bias = 0; bias < 3; bias++) {
        for (int bits = 0; bits < 8; bits++) {                 // add, sum, other
            check_backward({37, 1, 40, 0, bias, bits & 1, bits >> 1 & 1, bits >> 2 & 1, 0, 0});
            check_backward({3, 1, 776, 0, bias, bits & 1, bits >> 1 & 1, bits >> 2 & 1, 0, 0});
        }
        for (int own = 0; own < (bias == NORM_DYT ? 1 : 2); own++)
            for (int groups = 2; groups <= 4; groups *= 2)
                check_backward({13, groups, 40, own, bias, 0, 0, 0, 0, 0});
    }
    check_backward({2, 2, 2112, 1, 0, 0, 0, 0, 0, 0});
    check_backward({5, 1, 768, 0, 1, 1, 0, 0, 0, 100});
}

// Scratch for a few chunks only, so that a team takes more than one line and the last round is not
// full.
GPU_TEST(cuda_norm_backward_chunks) {
    check_backward({300, 1, 32, 0, 1, 1, 0, 0, 2 * 2 * 32 + 5, 0});
    check_backward({41, 1, 512, 0, 0, 0, 1, 1, 2 * 512, 0});
    check_backward({21, 2, 264, 1, 1, 0, 0, 0, 2 * 2 * 528, 0});
    check_backward({5, 1, 2056, 0, 1, 0, 0, 0, 2 * 2 * 2056, 0});
    check_backward({300, 1, 32, 0, NORM_DYT, 1, 0, 0, 2 * (2 * 32 + FOUR) + 5, 0});
    check_backward({70, 3, 64, 0, NORM_DYT, 0, 1, 0, 3 * (2 * 64 + FOUR), 0});
    check_backward({5, 1, 2056, 0, NORM_DYT, 0, 0, 0, 2 * (2 * 2056 + FOUR), 0});
}

GPU_TEST(cuda_norm_backward_widths) {
    const int widths[] = {32, 64, 128, 256, 448, 768, 1024, 1536, 2048, 4096, 8192, 8448};
    for (int i = 0; i < 12; i++)
        for (int bias : {i % 2, (int)NORM_DYT})
            check_backward({rows_for(widths[i]), 1, widths[i], 0, widths[i] < 8000 ? bias : 0, 1, 0,
                            0, 0, 0});
}
