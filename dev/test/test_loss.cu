// test_loss.cu: the classifier and the sums of losses (llmc/loss.cuh) against their equations in
// double.
#include "gpu_test.cuh"
#include "../../llmc/loss.cuh"

struct LossCase { int64_t n; int V, Vp; double deviation; float z_loss; };
// dz without the targets' columns (0 there), and those alone: they outweigh the rest
struct LossTruth { Values losses, logsum, dz, dz_target; };

static LossTruth loss_truth(LossCase s, const Values &z, const std::vector<int32_t> &targets) {
    LossTruth t = {Values(s.n), Values(s.n), Values(s.n * s.Vp), Values(s.n)};
    for (int64_t row = 0; row < s.n; row++) {
        const double *z_r = &z[row * s.Vp];
        double max = z_r[0], sum = 0;
        for (int j = 0; j < s.V; j++) max = fmax(max, z_r[j]);
        for (int j = 0; j < s.V; j++) sum += exp(z_r[j] - max);
        t.logsum[row] = max + log(sum);
        t.losses[row] = t.logsum[row] - z_r[targets[row]];
        for (int j = 0; j < s.V; j++)
            t.dz[row * s.Vp + j] =
                (1 + 2 * (double)s.z_loss * t.logsum[row]) * exp(z_r[j] - max) / sum;
        t.dz_target[row] = t.dz[row * s.Vp + targets[row]] - 1;
        t.dz[row * s.Vp + targets[row]] = 0;
    }
    return t;
}

// Losses are computed in float from logits as stored: the same in both precisions, and stricter
// than expect_close in bfloat16.
static void check_losses(LossCase s, const LossTruth &t, const wide *losses, const wide *logsum) {
    double loss_error = nmse(host_values(losses, s.n), t.losses);
    double logsum_error = nmse(host_values(logsum, s.n), t.logsum);
    EXPECT(loss_error < 1e-11, "n %d, V %d: the losses' error is %g", (int)s.n, s.V, loss_error);
    EXPECT(logsum_error < 1e-11, "n %d, V %d: logsum's error is %g", (int)s.n, s.V, logsum_error);
}

static void check_classifier(LossCase s) {
    Values z = random_values(s.n * s.Vp, 51, s.deviation, 3);
    std::vector<int32_t> targets(s.n);
    for (int64_t row = 0; row < s.n; row++) {
        targets[row] = row == 0 ? s.V - 1 : row == 1 ? 0 : (int32_t)(rand_uniform(52, row) * s.V);
        for (int j = s.V; j < s.Vp; j++) z[row * s.Vp + j] = 300;  // it must not matter
    }
    real *d_z = device_copy<real>(&z);
    int32_t *d_targets;
    cudaCheck(cudaMalloc((void **)&d_targets, s.n * sizeof(int32_t)));
    cudaCheck(cudaMemcpy(d_targets, targets.data(), s.n * sizeof(int32_t), cudaMemcpyHostToDevice));
    wide *losses = device_empty<wide>(s.n), *logsum = device_empty<wide>(s.n);
    LossTruth t = loss_truth(s, z, targets);
    Logits logits = {d_z, losses, logsum, d_targets, s.n, s.V, s.Vp, s.z_loss, {}};
    classifier(logits, false, test_gpu());
    check_losses(s, t, losses, logsum);
    EXPECT(host_values(d_z, z.size()) == z, "n %d, V %d: logits changed without a gradient",
           (int)s.n, s.V);
    cudaCheck(cudaMemset(losses, 0xff, s.n * sizeof(wide)));
    cudaCheck(cudaMemset(logsum, 0xff, s.n * sizeof(wide)));
    classifier(logits, true, test_gpu());
    check_losses(s, t, losses, logsum);
    Values dz = host_values(d_z, z.size()), dz_target(s.n);
    int padding = 0;
    for (int64_t row = 0; row < s.n; row++) {
        dz_target[row] = dz[row * s.Vp + targets[row]];
        dz[row * s.Vp + targets[row]] = 0;
        for (int j = s.V; j < s.Vp; j++) padding += dz[row * s.Vp + j] != 0;
    }
    EXPECT(padding == 0, "n %d, V %d: %d columns of the padding are not 0", (int)s.n, s.V, padding);
    EXPECT(nmse(dz, t.dz) <= TOLERANCE, "n %d, V %d: the gradient's error is %g, allowed %g",
           (int)s.n, s.V, nmse(dz, t.dz), TOLERANCE);
    EXPECT(nmse(dz_target, t.dz_target) <= TOLERANCE,
           "n %d, V %d: the targets' error is %g, allowed %g", (int)s.n, s.V,
           nmse(dz_target, t.dz_target), TOLERANCE);
    cudaFree(d_z), cudaFree(d_targets), cudaFree(losses), cudaFree(logsum);
}

GPU_TEST(cuda_classifier) {
    check_classifier({1, 8, 8, 1, 0});
    check_classifier({9, 64, 64, 2, 0.02f});
    check_classifier({5, 250, 256, 1, 0});
    check_classifier({5, 249, 384, 4, 0.01f});              // whole packs of padding
    check_classifier({7, 100, 104, 60, 0});                 // logits to +-200
    check_classifier({3, 5003, 5120, 3, 0.001f});           // more than one round of loads
}

// Logits with a gain: the truth is that of g z, whose gradient goes on to z and to the gain.
static void check_gained(LossCase s, size_t scratch) {
    Values z = random_values(s.n * s.Vp, 56, s.deviation, 1);
    Values w = random_values(s.Vp, 57, 0.3, 1);
    Values dw = random_values(s.Vp, 58);
    Values want_dw, logits(s.n * s.Vp);
    std::vector<int32_t> targets(s.n);
    const double factor = 1.5, scale = 0.25;
    for (int64_t row = 0; row < s.n; row++) {
        targets[row] = row == 0 ? s.V - 1 : (int32_t)(rand_uniform(59, row) * s.V);
        for (int j = s.V; j < s.Vp; j++) z[row * s.Vp + j] = 0;  // as the padding's weights make it
    }
    real *d_z = device_copy<real>(&z), *d_w = device_copy<real>(&w);
    wide *d_dw = device_copy<wide>(&dw);
    wide *losses = device_empty<wide>(s.n);
    wide *logsum = device_empty<wide>(s.n);
    int32_t *d_targets;
    cudaCheck(cudaMalloc((void **)&d_targets, s.n * sizeof(int32_t)));
    cudaCheck(cudaMemcpy(d_targets, targets.data(), s.n * sizeof(int32_t), cudaMemcpyHostToDevice));
    Norm gain = {site_make(SCALE, 1, s.Vp, 1, 0, 1), d_w, nullptr, d_dw, nullptr, nullptr, nullptr,
                 s.n, 1e-5f};
    gain.site.scale = factor;
    Gpu gpu = *test_gpu();
    if (scratch) gpu.scratch_size = scratch, gpu.scratch = device_empty<float>(scratch);
    for (size_t i = 0; i < z.size(); i++) logits[i] = factor * w[i % s.Vp] * z[i];
    LossTruth t = loss_truth(s, logits, targets);
    Logits f = {d_z, losses, logsum, d_targets, s.n, s.V, s.Vp, s.z_loss, gain};
    classifier(f, true, &gpu);
    check_losses(s, t, losses, logsum);
    EXPECT(host_values(d_z, z.size()) == z, "n %d, V %d: what gives logits changed before backward",
           (int)s.n, s.V);
    gained_classifier_backward(f, (float)scale, &gpu);
    want_dw = dw;
    Values want_dz(z.size());
    for (int64_t row = 0; row < s.n; row++) {
        t.dz[row * s.Vp + targets[row]] = t.dz_target[row];
        for (int j = 0; j < s.Vp; j++) {
            want_dw[j] += scale * factor * t.dz[row * s.Vp + j] * z[row * s.Vp + j];
            want_dz[row * s.Vp + j] = factor * w[j] * t.dz[row * s.Vp + j];
        }
    }
    expect_close(d_z, want_dz, "the gradient through a gain");
    expect_close(d_dw, want_dw, "a gain's gradient");
    Values dz = host_values(d_z, z.size());
    int padding = 0;
    for (size_t i = 0; i < dz.size(); i++) padding += (int)(i % s.Vp) >= s.V && dz[i] != 0;
    EXPECT(padding == 0, "n %d, V %d: %d columns of the padding are not 0", (int)s.n, s.V, padding);
    if (scratch) cudaFree(gpu.scratch);
    cudaFree(d_z), cudaFree(d_w), cudaFree(d_dw), cudaFree(losses), cudaFree(logsum),
        cudaFree(d_targets);
}

GPU_TEST(cuda_classifier_gain) {
    check_gained({1, 8, 8, 1, 0}, 0);
    check_gained({9, 249, 384, 2, 0.02f}, 0);
    check_gained({37, 100, 104, 3, 0.01f}, 104 * 5 + 3);
    check_gained({3, 5003, 5120, 2, 0.001f}, 0);
}

// A row that takes most of the shared memory, and one that does not fit.
GPU_TEST(cuda_classifier_wide) {
    check_classifier({2, 50257, 50304, 2, 0.01f});
    check_classifier({2, 120001, 120064, 2, 0.01f});
}

// A logit that is not a number spoils the loss of its row alone, so that the step sees it.
GPU_TEST(cuda_classifier_not_finite) {
    const double bad[] = {NAN, INFINITY};
    for (double value : bad) {
        LossCase s = {3, 40, 40, 1, 0};
        Values z = random_values(s.n * s.Vp, 53);
        z[1 * s.Vp + 17] = value;
        real *d_z = device_copy<real>(&z);
        int32_t *d_targets;
        cudaCheck(cudaMalloc((void **)&d_targets, s.n * sizeof(int32_t)));
        cudaCheck(cudaMemset(d_targets, 0, s.n * sizeof(int32_t)));
        wide *losses = device_empty<wide>(s.n), *logsum = device_empty<wide>(s.n);
        classifier({d_z, losses, logsum, d_targets, s.n, s.V, s.Vp, 0, {}}, true, test_gpu());
        Values got = host_values(losses, s.n);
        EXPECT(isfinite(got[0]) && !isfinite(got[1]) && isfinite(got[2]),
               "a logit of %g: losses %g %g %g", value, got[0], got[1], got[2]);
        cudaFree(d_z), cudaFree(d_targets), cudaFree(losses), cudaFree(logsum);
    }
}

// -------------------------------------------------------------------------------------------- sums

static void check_loss_sums(int64_t n, float z_loss) {
    Values losses = random_values(n, 54, 1, 4);
    Values logsum = random_values(n, 55, 3, 10);
    Values want = {100, 7};
    wide *d_losses = device_copy<wide>(&losses), *d_logsum = device_copy<wide>(&logsum);
    double *sums, got[2];
    cudaCheck(cudaMalloc((void **)&sums, sizeof got));
    cudaCheck(cudaMemcpy(sums, want.data(), sizeof got, cudaMemcpyHostToDevice));
    for (int call = 0; call < 2; call++) {
        Logits f = {nullptr, d_losses, d_logsum, nullptr, n, 0, 0, z_loss, {}};
        loss_sums(sums, f, test_gpu());
        for (int64_t i = 0; i < n; i++) {
            want[0] += losses[i];
            want[1] += (double)z_loss * logsum[i] * logsum[i];
        }
    }
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(got, sums, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 2; i++)
        EXPECT(fabs(got[i] - want[i]) <= 1e-13 * want[i], "n %d: sum %d is %.17g, expected %.17g",
               (int)n, i, got[i], want[i]);
    cudaFree(d_losses), cudaFree(d_logsum), cudaFree(sums);
}

GPU_TEST(cuda_loss_sums) {
    check_loss_sums(1, 0.5f);
    check_loss_sums(33, 0.001f);
    check_loss_sums(1500, 0.01f);
}
