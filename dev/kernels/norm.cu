// norm.cu: the ladder of the norm, forward s = x + y, z = LayerNorm(s) and backward dx = add +
// LayerNorm'(dz; s) with the gradients of gain and bias.
//
//   1  a thread a row   every value is its own load; a warp's loads lie a row apart, and each pass
//                       reads the row again
//   2  a block a row    neighbours read neighbours; sums over the block in shared memory; each pass
//                       still reads the row again, from the caches
//   3  llmc/norm.cuh    the row stays in registers, 16 bytes a load; a warp a row; gradients of
//                       gains in the same pass over the rows
//
// To run: sh dev/kernels/run.sh; in the emulator sizes are small and there are no times.
#include "ladder.cuh"
#include "../../llmc/norm.cuh"

enum { ROWS = TIMED ? 65536 : 40, C = TIMED ? 768 : 776 };
static const float EPS = 1e-5f;

// ------------------------------------------------------------------------------------------ step 1

static __global__ void thread_forward_kernel(real *s, real *z, const real *x, const real *y,
                                             Norm norm) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= norm.n) return;
    s += row * C, z += row * C, x += row * C, y += row * C;
    float mean = 0, square = 0;
    for (int i = 0; i < C; i++) s[i] = to_real(to_float(x[i]) + to_float(y[i]));
    for (int i = 0; i < C; i++) mean += to_float(s[i]) / C;
    for (int i = 0; i < C; i++) square += (to_float(s[i]) - mean) * (to_float(s[i]) - mean) / C;
    float rstd = rsqrtf(square + norm.eps);
    for (int i = 0; i < C; i++)
        z[i] =
            to_real(to_float(norm.w[i]) * ((to_float(s[i]) - mean) * rstd) + to_float(norm.b[i]));
    norm.mean[row] = mean;
    norm.rstd[row] = rstd;
}

static __global__ void thread_backward_kernel(real *dx, const real *dz, const real *s,
                                              const real *add, Norm norm) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= norm.n) return;
    dx += row * C, dz += row * C, s += row * C, add += row * C;
    float mean = norm.mean[row], rstd = norm.rstd[row], u = 0, ux = 0;
    for (int i = 0; i < C; i++) {
        float u_i = to_float(norm.w[i]) * to_float(dz[i]);
        u += u_i / C;
        ux += u_i * (to_float(s[i]) - mean) * rstd / C;
    }
    for (int i = 0; i < C; i++)
        dx[i] = to_real(to_float(add[i]) + rstd * (to_float(norm.w[i]) * to_float(dz[i]) - u -
                                                   (to_float(s[i]) - mean) * rstd * ux));
}

// A thread a gain; of steps 1 and 2.
static __global__ void gains_kernel(const real *dz, const real *s, Norm norm) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= C) return;
    float dw = 0, db = 0;
    for (int64_t row = 0; row < norm.n; row++) {
        float d = to_float(dz[row * C + i]);
        dw += d * (to_float(s[row * C + i]) - norm.mean[row]) * norm.rstd[row];
        db += d;
    }
    norm.dw[i] += dw;
    norm.db[i] += db;
}

// ------------------------------------------------------------------------------------------ step 2

// Sum over the block of 256 threads: half of them add the other half's, then a quarter, and so on.
static __device__ float shared_sum(float x) {
    SHARED(float, part, 256);
    __syncthreads();
    part[threadIdx.x] = x;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    return part[0];
}

static __global__ void block_forward_kernel(real *s, real *z, const real *x, const real *y,
                                            Norm norm) {
    int64_t row = blockIdx.x;
    s += row * C, z += row * C, x += row * C, y += row * C;
    float mean = 0, square = 0;
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        s[i] = to_real(to_float(x[i]) + to_float(y[i]));
    for (int i = threadIdx.x; i < C; i += blockDim.x) mean += to_float(s[i]);
    mean = shared_sum(mean) / C;
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        square += (to_float(s[i]) - mean) * (to_float(s[i]) - mean);
    float rstd = rsqrtf(shared_sum(square) / C + norm.eps);
    for (int i = threadIdx.x; i < C; i += blockDim.x)
        z[i] =
            to_real(to_float(norm.w[i]) * ((to_float(s[i]) - mean) * rstd) + to_float(norm.b[i]));
    if (threadIdx.x == 0) norm.mean[row] = mean, norm.rstd[row] = rstd;
}

static __global__ void block_backward_kernel(real *dx, const real *dz, const real *s,
                                             const real *add, Norm norm) {
    int64_t row = blockIdx.x;
    dx += row * C, dz += row * C, s += row * C, add += row * C;
    float mean = norm.mean[row], rstd = norm.rstd[row], u = 0, ux = 0;
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        float u_i = to_float(norm.w[i]) * to_float(dz[i]);
        u += u_i;
        ux += u_i * (to_float(s[i]) - mean) * rstd;
    }
    u = shared_sum(u) / C;
    ux = shared_sum(ux) / C;
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        dx[i] = to_real(to_float(add[i]) + rstd * (to_float(norm.w[i]) * to_float(dz[i]) - u -
                                                   (to_float(s[i]) - mean) * rstd * ux));
    }
}

// --------------------------------------------------------------------------------------- the truth

typedef struct Problem { Values x, y, w, b, dz, add; } Problem;
typedef struct Solution { Values s, z, dx, dw, db; } Solution;

static Solution solve(const Problem &p) {
    Solution t = {p.x, p.x, p.x, Values(C, 0), Values(C, 0)};
    for (int64_t row = 0; row < ROWS; row++) {
        const double *x = &p.x[row * C];
        const double *y = &p.y[row * C];
        const double *dz = &p.dz[row * C];
        const double *add = &p.add[row * C];
        double *s = &t.s[row * C], mean = 0, square = 0, u = 0, ux = 0;
        for (int i = 0; i < C; i++)
            s[i] = to_float(to_real((float)(x[i] + y[i]))), mean += s[i] / C;
        for (int i = 0; i < C; i++) square += (s[i] - mean) * (s[i] - mean) / C;
        double rstd = 1 / sqrt(square + EPS);
        for (int i = 0; i < C; i++)
            u += p.w[i] * dz[i] / C, ux += p.w[i] * dz[i] * (s[i] - mean) * rstd / C;
        for (int i = 0; i < C; i++) {
            double xhat = (s[i] - mean) * rstd;
            t.z[row * C + i] = p.w[i] * xhat + p.b[i];
            t.dx[row * C + i] = add[i] + rstd * (p.w[i] * dz[i] - u - xhat * ux);
            t.dw[i] += dz[i] * xhat;
            t.db[i] += dz[i];
        }
    }
    return t;
}

int main(void) {
    size_t count = (size_t)ROWS * C;
    Problem p = {random_values(count, 1),  random_values(count, 2), random_values(C, 3, 0.3, 1),
                 random_values(C, 4, 0.3), random_values(count, 5), random_values(count, 6)};
    real *x = device_copy<real>(&p.x);
    real *y = device_copy<real>(&p.y);
    real *w = device_copy<real>(&p.w);
    real *b = device_copy<real>(&p.b);
    real *dz = device_copy<real>(&p.dz);
    real *add = device_copy<real>(&p.add);
    real *s = device_empty<real>(count);
    real *z = device_empty<real>(count);
    real *dx = device_empty<real>(count);
    wide *dw = device_empty<wide>(C), *db = device_empty<wide>(C);
    Norm norm = {site_make(1, 1, C, 1, 1, 1), w,    b,  dw, db, device_empty<wide>(ROWS),
                 device_empty<wide>(ROWS),    ROWS, EPS};
    Solution t = solve(p);
    Gpu *gpu = test_gpu();
    cudaStream_t stream = gpu->stream;
    double floor = 4.0 * count * sizeof(real) / BYTES_PER_MS;
    int threads = CEIL_DIV(ROWS, 64), columns = CEIL_DIV(C, 64);

    ladder_header("forward: reads x, y; writes s, z", floor);
    std::vector<LadderResult> forward = {{"s", s, nullptr, &t.s}, {"z", z, nullptr, &t.z}};
    ladder_step("1 a thread a row", floor, forward, gpu,
                [&] { LAUNCH(thread_forward_kernel, threads, 64, 0, stream, s, z, x, y, norm); });
    ladder_step("2 a block a row", floor, forward, gpu,
                [&] { LAUNCH(block_forward_kernel, ROWS, 256, 0, stream, s, z, x, y, norm); });
    ladder_step("3 llmc/norm.cuh", floor, forward, gpu,
                [&] { add_norm_forward({s, z, y, x, 1, nullptr, &norm}, gpu); });

    ladder_header("backward: reads dz, s, add; writes dx; gradients of gain and bias", floor);
    std::vector<LadderResult> backward = {
        {"dx", dx, nullptr, &t.dx}, {"dw", nullptr, dw, &t.dw}, {"db", nullptr, db, &t.db}};
    ladder_step("1 a thread a row, a thread a gain", floor, backward, gpu, [&] {
        LAUNCH(thread_backward_kernel, threads, 64, 0, stream, dx, dz, s, add, norm);
        LAUNCH(gains_kernel, columns, 64, 0, stream, dz, s, norm);
    });
    ladder_step("2 a block a row, a thread a gain", floor, backward, gpu, [&] {
        LAUNCH(block_backward_kernel, ROWS, 256, 0, stream, dx, dz, s, add, norm);
        LAUNCH(gains_kernel, columns, 64, 0, stream, dz, s, norm);
    });
    ladder_step("3 llmc/norm.cuh", floor, backward, gpu,
                [&] { norm_backward(&norm, {dx, nullptr, dz, s, add, nullptr, 1, 0, 0}, gpu); });
    return ladder_end();
}
