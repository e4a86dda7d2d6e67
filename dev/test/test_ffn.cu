// test_ffn.cu: the activation of the ffn (llmc/ffn.cuh) against its equation in double; GELU in the
// form with tanh, and slopes by central differences.
#include "gpu_test.cuh"
#include "../../llmc/ffn.cuh"

// h of one element, from SPEC's formulas; up is not read by GELU.
static double activation(double gate, double up, int swiglu) {
    if (swiglu) return gate / (1 + exp(-gate)) * up;
    return gate / 2 * (1 + tanh(sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
}

// Error of a central difference with this step: about 1e-10 of a value near 1.
static double activation_slope(double gate, double up, int swiglu) {
    double step = 1e-4;
    return (8 * (activation(gate + step, up, swiglu) - activation(gate - step, up, swiglu)) -
            (activation(gate + 2 * step, up, swiglu) - activation(gate - 2 * step, up, swiglu))) /
           (12 * step);
}

static void check_activation(int64_t n, int F, int swiglu, double deviation) {
    int width = swiglu ? 2 * F : F;
    Values gu = random_values(n * width, 11, deviation);
    Values dh = random_values(n * F, 12);
    Values h(n * F), dgu(n * width);
    real *d_gu = device_copy<real>(&gu);
    real *d_dh = device_copy<real>(&dh);
    real *d_h = device_empty<real>(n * F);
    real *d_dgu = device_empty<real>(n * width);
    for (int64_t row = 0; row < n; row++)
        for (int i = 0; i < F; i++) {
            double gate = gu[row * width + i];
            double up = swiglu ? gu[row * width + F + i] : 0;
            double d = dh[row * F + i];
            h[row * F + i] = activation(gate, up, swiglu);
            dgu[row * width + i] = d * activation_slope(gate, up, swiglu);
            if (swiglu) dgu[row * width + F + i] = d * activation(gate, 1, swiglu);
        }
    activation_forward(d_h, d_gu, n, F, swiglu, test_gpu());
    activation_backward(d_dgu, d_dh, d_gu, n, F, swiglu, test_gpu());
    expect_close(d_h, h, swiglu ? "SwiGLU" : "GELU");
    expect_close(d_dgu, dgu, swiglu ? "SwiGLU's gradient" : "GELU's gradient");
    activation_backward(d_gu, d_dh, d_gu, n, F, swiglu, test_gpu());  // in place, the same bits
    EXPECT(host_values(d_gu, n * width) == host_values(d_dgu, n * width),
           "n %d, F %d, swiglu %d: another gradient in place", (int)n, F, swiglu);
    cudaFree(d_gu), cudaFree(d_dh), cudaFree(d_h), cudaFree(d_dgu);
}

GPU_TEST(cuda_activation) {
    for (int swiglu = 0; swiglu < 2; swiglu++) {
        check_activation(1, 8, swiglu, 1);
        check_activation(7, 40, swiglu, 1);
        check_activation(3, 1024, swiglu, 1);        // in float two blocks for a row
        check_activation(2, 2056, swiglu, 2);        // in both types the last block is nearly empty
        check_activation(5, 64, swiglu, 6);          // the tails
    }
}

// Far out: sigmoid is 0 or 1, and nothing overflows into NaN.
GPU_TEST(cuda_activation_far) {
    for (int swiglu = 0; swiglu < 2; swiglu++) {
        Values gu = {-1e4, -300, -100, -90, 90, 100, 300, 1e4}, ones(8, 1), got;
        if (swiglu) gu.insert(gu.end(), ones.begin(), ones.end());
        real *d_gu = device_copy<real>(&gu);
        real *d_dh = device_copy<real>(&ones);
        real *d_h = device_empty<real>(8);
        real *d_dgu = device_empty<real>(gu.size());
        activation_forward(d_h, d_gu, 1, 8, swiglu, test_gpu());
        activation_backward(d_dgu, d_dh, d_gu, 1, 8, swiglu, test_gpu());
        Values h = host_values(d_h, 8), dgu = host_values(d_dgu, gu.size());
        for (int i = 0; i < 8; i++) {
            EXPECT(fabs(h[i] - (gu[i] > 0 ? gu[i] : 0)) < 1e-30,
                   "swiglu %d: activation of %g is %g", swiglu, gu[i], h[i]);
            EXPECT(fabs(dgu[i] - (gu[i] > 0 ? 1 : 0)) < 1e-30, "swiglu %d: slope at %g is %g",
                   swiglu, gu[i], dgu[i]);
        }
        cudaFree(d_gu), cudaFree(d_dh), cudaFree(d_h), cudaFree(d_dgu);
    }
}
