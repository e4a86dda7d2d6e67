// test_ngpt.cu: nGPT's interpolated residual and its gains (llmc/ngpt.cuh) against their equations
// in double.
#include "gpu_test.cuh"
#include "../../llmc/ngpt.cuh"

// ----------------------------------------------------------------------------------- interpolation

static Values unit_vector(const Values &x, int64_t at, int C) {
    double square = 0;
    Values t(C);
    for (int i = 0; i < C; i++) square += x[at + i] * x[at + i];
    for (int i = 0; i < C; i++) t[i] = x[at + i] / sqrt(square);
    return t;
}

// Gradient of x where dt is that of x / |x|:  (dt - t (t . dt)) / |x|
static Values unit_gradient(const Values &x, int64_t at, const Values &dt) {
    int C = (int)dt.size();
    Values t = unit_vector(x, at, C), dx(C);
    double dot = 0, square = 0;
    for (int i = 0; i < C; i++) dot += t[i] * dt[i], square += x[at + i] * x[at + i];
    for (int i = 0; i < C; i++) dx[i] = (dt[i] - t[i] * dot) / sqrt(square);
    return dx;
}

static double alpha_of(double p, int C) { return 0.05 * sqrt((double)C) * fabs(p); }

// p of both signs, alpha up to 1 and beyond, so that none of its parts is lost beside another.
static void check_interpolation(int64_t n, int C, size_t scratch) {
    char what[60];
    snprintf(what, sizeof what, "n %d, C %d, scratch %zu", (int)n, C, scratch);
    size_t count = n * C;
    Values y = random_values(count, 41, 3, 1);
    Values skip = random_values(count, 42, 1 / sqrt(C));
    Values p = random_values(C, 43, 8 / sqrt(C));
    Values dz = random_values(count, 44);
    Values dp = random_values(C, 45);
    real *d_y = device_copy<real>(&y);
    real *d_skip = device_copy<real>(&skip);
    real *d_p = device_copy<real>(&p);
    real *d_dz = device_copy<real>(&dz);
    real *d_z = device_empty<real>(count);
    real *d_dy = device_empty<real>(count), *d_dskip = device_empty<real>(count);
    wide *d_dp = device_copy<wide>(&dp);
    Norm out = {site_make(L2, 1, C, 1, 0, 1), nullptr, nullptr, nullptr, nullptr, nullptr,
                device_empty<wide>(n),        n,       1e-12f};
    Norm post = out;
    post.rstd = device_empty<wide>(n);
    Interpolation f = {d_p, d_dp, out, post};
    Gpu gpu = *test_gpu();
    if (scratch) gpu.scratch_size = scratch, gpu.scratch = device_empty<float>(scratch);
    Values z, dy, dskip, s(count), sum(C);
    for (int64_t row = 0; row < n; row++) {
        Values t = unit_vector(y, row * C, C), ds, dt(C);
        for (int i = 0; i < C; i++)
            s[row * C + i] = skip[row * C + i] + alpha_of(p[i], C) * (t[i] - skip[row * C + i]);
        Values next = unit_vector(s, row * C, C);
        ds = unit_gradient(s, row * C, Values(dz.begin() + row * C, dz.begin() + (row + 1) * C));
        for (int i = 0; i < C; i++) {
            dt[i] = alpha_of(p[i], C) * ds[i];
            dskip.push_back((1 - alpha_of(p[i], C)) * ds[i]);
            sum[i] +=
                0.05 * sqrt((double)C) * (p[i] < 0 ? -1 : 1) * ds[i] * (t[i] - skip[row * C + i]);
        }
        dt = unit_gradient(y, row * C, dt);
        z.insert(z.end(), next.begin(), next.end()), dy.insert(dy.end(), dt.begin(), dt.end());
    }
    interpolate_forward(d_z, d_y, d_skip, &f, &gpu);
    expect_close(d_z, z, what);
    interpolate_backward({d_dy, d_dskip, d_dz, d_z, d_y, d_skip}, &f, &gpu);
    expect_close(d_dy, dy, what);
    expect_close(d_dskip, dskip, what);
    // in place: the same bits, and p's gradient twice
    Values once = host_values(d_dy, count), once_skip = host_values(d_dskip, count);
    interpolate_backward({d_y, d_dz, d_dz, d_z, d_y, d_skip}, &f, &gpu);
    EXPECT(host_values(d_y, count) == once && host_values(d_dz, count) == once_skip,
           "%s: other gradients in place", what);
    for (int i = 0; i < C; i++) dp[i] += 2 * sum[i];
    expect_close(d_dp, dp, what);
    if (scratch) cudaFree(gpu.scratch);
    for (void *room :
         {(void *)d_y, (void *)d_skip, (void *)d_p, (void *)d_dz, (void *)d_z, (void *)d_dy,
          (void *)d_dskip, (void *)d_dp, (void *)out.rstd, (void *)post.rstd})
        cudaFree(room);
}

// Every size of team, and scratch for a few chunks only.
GPU_TEST(cuda_interpolation) {
    for (int C : {32, 40, 64, 128}) check_interpolation(35, C, 0);
    for (int C : {256, 448, 768, 1024, 1536, 2048}) check_interpolation(9, C, 0);
    for (int C : {4096, 8192, 8448}) check_interpolation(2, C, 0);
    check_interpolation(300, 32, 2 * 32 + 5);
    check_interpolation(21, 264, 2 * 264);
}

// ------------------------------------------------------------------------------------------- gains

static void check_gain(int64_t n, int groups, int width, size_t scratch) {
    char what[60];
    snprintf(what, sizeof what, "n %d, %d groups of %d, scratch %zu", (int)n, groups, width,
             scratch);
    int gains = groups * width;
    size_t count = n * gains;
    Values x = random_values(count, 51, 1, 0.5);
    Values dy = random_values(count, 52);
    Values w = random_values(gains, 53, 0.3, 1);
    Values dw = random_values(gains, 54);
    Values y(count), dx(count), sum(gains);
    real *d_x = device_copy<real>(&x);
    real *d_dy = device_copy<real>(&dy);
    real *d_w = device_copy<real>(&w);
    real *d_y = device_empty<real>(count);
    real *d_dx = device_empty<real>(count);
    wide *d_dw = device_copy<wide>(&dw);
    Norm norm = {site_make(SCALE, groups, width, 0, 0, 1), d_w, nullptr, d_dw, nullptr, nullptr,
                 nullptr, n, 1e-5f};
    norm.site.scale = 1.75;
    Gpu gpu = *test_gpu();
    if (scratch) gpu.scratch_size = scratch, gpu.scratch = device_empty<float>(scratch);
    for (size_t i = 0; i < count; i++) {
        y[i] = 1.75 * w[i % gains] * x[i], dx[i] = 1.75 * w[i % gains] * dy[i];
        sum[i % gains] += 1.75 * dy[i] * x[i];
    }
    gain_forward(d_y, d_x, &norm, &gpu);
    expect_close(d_y, y, what);
    gain_backward(d_dx, d_dy, d_x, &norm, &gpu);
    expect_close(d_dx, dx, what);
    gain_backward(d_dy, d_dy, d_x, &norm, &gpu);
    gain_forward(d_x, d_x, &norm, &gpu);
    EXPECT(host_values(d_dy, count) == host_values(d_dx, count) &&
               host_values(d_x, count) == host_values(d_y, count),
           "%s: other values in place", what);
    for (int j = 0; j < gains; j++) dw[j] += 2 * sum[j];
    expect_close(d_dw, dw, what);
    if (scratch) cudaFree(gpu.scratch);
    cudaFree(d_x), cudaFree(d_dy), cudaFree(d_w), cudaFree(d_y), cudaFree(d_dx), cudaFree(d_dw);
}

GPU_TEST(cuda_gain) {
    check_gain(1, 1, 8, 0);
    check_gain(37, 2, 40, 0);
    check_gain(300, 1, 1032, 0);  // more than one row a chunk, more than one block of columns
    check_gain(41, 2, 512, 3 * 1024 + 7);
}
