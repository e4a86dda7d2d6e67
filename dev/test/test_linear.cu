// test_linear.cu: matrix products (llmc/linear.cuh) against their equations in double, with and
// without epilogues of the library; the plans; and, in the emulator, what the emulated cuBLASLt
// (dev/emu/cublaslt.cpp) computes and refuses.
#include "gpu_test.cuh"
#include "../../llmc/linear.cuh"
#include <functional>
#include <string>

// The shared context with plans of its own, and a setting of the emulated library while it lives
// (on a GPU it has no effect).
struct TestPlans {
    Gpu gpu;
    const char *setting;
    TestPlans(bool tf32 = false, const char *name = "EMU_CUBLASLT_PLAIN", const char *value = "0")
        : gpu(*test_gpu()), setting(name) {
        setenv(name, value, 1);
        gpu.plans = plans_create(tf32);
    }
    ~TestPlans() {
        cudaCheck(cudaStreamSynchronize(gpu.stream));
        plans_destroy(gpu.plans);
        unsetenv(setting);
    }
};

static double gelu_tanh(double x) {
    return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
static double gelu_tanh_slope(double x) {                    // a central difference
    double e = 1e-4;
    return (8 * (gelu_tanh(x + e) - gelu_tanh(x - e)) -
            (gelu_tanh(x + 2 * e) - gelu_tanh(x - 2 * e))) /
           (12 * e);
}

static Values map(Values v, double (*f)(double)) {
    for (double &x : v) x = f(x);
    return v;
}

// factor * v + other_factor * other
static Values mixed(const Values &v, double factor, const Values &other, double other_factor) {
    Values sum(v.size());
    for (size_t i = 0; i < v.size(); i++) sum[i] = factor * v[i] + other_factor * other[i];
    return sum;
}

// A layer's numbers on the host and the device, and the three products as sums: xw[n, out] = x W^T,
// dyw[n, in] = dy W, dyx[out, in] = dy^T x, sums[out].
struct Layer {
    Linear s;
    Values x, w, b, dy, y0, dx0, dw0, db0, xw, dyw, dyx, sums;
    real *d_x, *d_w, *d_b, *d_dy;
    Layer(int64_t n, int out, int in, float c)
        : s{nullptr, nullptr, nullptr, nullptr, n, out, in, c}, xw(n * out), dyw(n * in),
          dyx((size_t)out * in), sums(out) {
        x = random_values(n * in, 1), w = random_values((size_t)out * in, 2, 0.5),
        b = random_values(out, 3, 1, 1), dy = random_values(n * out, 4, 1, 0.2);
        y0 = random_values(n * out, 5, 3), dx0 = random_values(n * in, 6, 3),
        dw0 = random_values((size_t)out * in, 7, 10), db0 = random_values(out, 8, 10);
        d_x = device_copy<real>(&x), d_w = device_copy<real>(&w), d_b = device_copy<real>(&b),
        d_dy = device_copy<real>(&dy);
        for (int64_t r = 0; r < n; r++)
            for (int j = 0; j < out; j++) {
                sums[j] += dy[r * out + j];
                for (int i = 0; i < in; i++) {
                    xw[r * out + j] += x[r * in + i] * w[(size_t)j * in + i];
                    dyw[r * in + i] += dy[r * out + j] * w[(size_t)j * in + i];
                    dyx[(size_t)j * in + i] += dy[r * out + j] * x[r * in + i];
                }
            }
    }
    // The layer with arrays of the device, and with c times `scale`.
    Linear of(bool bias, wide *dw = nullptr, wide *db = nullptr, float scale = 1) const {
        return {d_w, bias ? d_b : nullptr, dw, db, s.n, s.out, s.in, scale * s.c};
    }
    ~Layer() { cudaFree(d_x), cudaFree(d_w), cudaFree(d_b), cudaFree(d_dy); }

    // c x W^T, + b
    Values y(bool bias) const {
        Values want = mixed(xw, s.c, xw, 0);
        for (size_t i = 0; bias && i < want.size(); i++) want[i] += b[i % s.out];
        return want;
    }
};

// Without an addend, with one in another array, and in place.
static void check_forward(Layer *t, bool bias, Gpu *gpu) {
    Linear l = t->of(bias);
    real *d_y = device_empty<real>(t->y0.size()), *d_add = device_copy<real>(&t->y0);
    linear_forward(d_y, t->d_x, l, {}, gpu);
    expect_close(d_y, t->y(bias), "y");
    linear_forward(d_y, t->d_x, l, {d_add, 0.75f}, gpu);
    expect_close(d_y, mixed(t->y(bias), 1, t->y0, 0.75), "y with an addend");
    expect_close(d_add, t->y0, "the addend, which is only read");
    linear_forward(d_add, t->d_x, l, {d_add, -0.5f}, gpu);
    expect_close(d_add, mixed(t->y(bias), 1, t->y0, -0.5), "y in place");
    linear_forward(d_add, t->d_x, l, {d_add, 0}, gpu);
    expect_close(d_add, t->y(bias), "y with beta 0");
    cudaFree(d_y), cudaFree(d_add);
}

// The library's GELU may stand on tanh.approx, which is right to 2^-11. (In float the trainer does
// without it.)
static const double GELU_TOLERANCE = ON_GPU ? fmax(TOLERANCE, 1e-6) : TOLERANCE;

static void check_gelu(Layer *t, Gpu *gpu) {
    for (bool bias : {false, true}) {
        real *d_h = device_empty<real>(t->y0.size()), *d_pre = device_empty<real>(t->y0.size());
        linear_gelu_forward(d_h, d_pre, t->d_x, t->of(bias), gpu);
        expect_close(d_pre, t->y(bias), bias ? "pre with a bias" : "pre");
        expect_close(d_h, map(t->y(bias), gelu_tanh), bias ? "h with a bias" : "h", GELU_TOLERANCE);
        cudaFree(d_h), cudaFree(d_pre);
    }
    Values pre = random_values(t->dx0.size(), 9), want = mixed(t->dyw, t->s.c, pre, 0);
    real *d_pre = device_copy<real>(&pre), *d_dpre = device_empty<real>(pre.size());
    for (size_t i = 0; i < pre.size(); i++) want[i] *= gelu_tanh_slope(pre[i]);
    linear_gelu_backward_input(d_dpre, d_pre, t->d_dy, t->of(false), gpu);
    expect_close(d_dpre, want, "dpre", GELU_TOLERANCE);
    expect_close(d_pre, pre, "pre, which is only read");
    cudaFree(d_pre), cudaFree(d_dpre);
}

static void check_backward_input(Layer *t, Gpu *gpu) {
    real *d_dx = device_empty<real>(t->dx0.size()), *d_add = device_copy<real>(&t->dx0);
    linear_backward_input(d_dx, t->d_dy, t->of(false), {}, gpu);
    expect_close(d_dx, mixed(t->dyw, t->s.c, t->dx0, 0), "dx");
    linear_backward_input(d_dx, t->d_dy, t->of(false), {d_add, 1.5f}, gpu);
    expect_close(d_dx, mixed(t->dyw, t->s.c, t->dx0, 1.5), "dx with an addend");
    linear_backward_input(d_add, t->d_dy, t->of(false), {d_add, 1}, gpu);
    expect_close(d_add, mixed(t->dyw, t->s.c, t->dx0, 1), "dx in place");
    cudaFree(d_dx), cudaFree(d_add);
}

// Calls add up: of several factors, one of which makes alpha 1 where c is 1/2, and without a bias.
// SET writes dW over what is there, NaN too, and adds to db as ever.
static void check_backward_weight(Layer *t, Gpu *gpu) {
    wide *d_dw = device_copy<wide>(&t->dw0), *d_db = device_copy<wide>(&t->db0);
    for (float scale : {1.0f, 0.25f, 2.0f})
        linear_backward_weight(t->d_dy, t->d_x, t->of(true, d_dw, d_db, scale), gpu);
    linear_backward_weight(t->d_dy, t->d_x, t->of(false, d_dw, nullptr, 4), gpu);
    expect_close(d_dw, mixed(t->dyx, 7.25 * t->s.c, t->dw0, 1), "dW");
    wide *d_set = device_empty<wide>(t->dw0.size());
    for (float scale : {3.0f, 0.5f}) {
        Linear l = t->of(true, d_set, d_db, scale);
        l.to_dw = SET;
        linear_backward_weight(t->d_dy, t->d_x, l, gpu);
        expect_close(d_set, mixed(t->dyx, scale * t->s.c, t->dw0, 0), "dW that is SET");
    }
    expect_close(d_db, mixed(t->sums, 5, t->db0, 1), "db");
    cudaFree(d_dw), cudaFree(d_db), cudaFree(d_set);
}

static void check_layer(Layer *t, Gpu *gpu) {
    check_forward(t, false, gpu);
    check_forward(t, true, gpu);
    check_gelu(t, gpu);
    check_backward_input(t, gpu);
    check_backward_weight(t, gpu);
}

GPU_TEST(cuda_linear) {
    Layer layers[] = {{25, 40, 72, 0.75f},
                      {24, 72, 40, 1},
                      {1, 8, 16, -1.5f},
                      {515, 24, 8, 0.5f},
                      {3, 1048, 8, 1}};
    for (auto [setting, value] :
         {std::pair("EMU_CUBLASLT_PLAIN", "0"), std::pair("EMU_CUBLASLT_PLAIN", "1"),
          std::pair("EMU_CUBLASLT_REFUSE", "1")}) {
        TestPlans plans(false, setting, value);
        for (Layer &t : layers) check_layer(&t, &plans.gpu);
    }
}

GPU_TEST(cuda_linear_wide) {
    TestPlans plans;
    Layer layers[] = {{25, 40, 72, 0.75f}, {1, 8, 16, -1.5f}};
    for (Layer &t : layers) {
        wide *d_y = device_empty<wide>(t.y0.size());
        linear_forward_wide(d_y, t.d_x, t.of(false), &plans.gpu);
        double e = nmse(host_values(d_y, t.y0.size()), t.y(false));
        EXPECT(e < 1e-12, "y in float: normalized mean squared error %.3g", e);
        cudaFree(d_y);
    }
}

// ------------------------------------------------------------------------------------------- plans

// TF32 is leave to round, not an order: a GPU's library may take a product that does not. The
// emulated one always rounds.
GPU_TEST(cuda_linear_tf32) {
    Layer t(192, 256, 320, 1);
    TestPlans plans(true);
    real *d_y = device_empty<real>(t.y0.size());
    linear_forward(d_y, t.d_x, t.of(false), {}, &plans.gpu);
    double e = nmse(host_values(d_y, t.y0.size()), t.y(false));
    if (sizeof(real) == sizeof(float))
        EXPECT((e > 1e-9 || ON_GPU) && e < 1e-5,
               "TF32: normalized mean squared error %.3g, expected about 1e-7", e);
    else EXPECT(e < TOLERANCE && !plans.gpu.plans->tf32, "bfloat16 has no TF32: error %.3g", e);
    cudaFree(d_y);
}

static size_t count_of(const std::string &text, const char *word) {
    size_t count = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
        count++;
    return count;
}

static std::string text_of(const Plans *plans) {
    char *text = plans_text(plans);
    std::string copy = text;
    free(text);
    return copy;
}

// Chooses every plan of the layer by timing; what it computes meanwhile does not matter.
static void tune(Layer *t, Gpu *gpu) {
    real *d_y = device_copy<real>(&t->y0);
    real *d_pre = device_copy<real>(&t->y0);
    real *d_dx = device_copy<real>(&t->dx0);
    real *d_dpre = device_copy<real>(&t->dx0);
    wide *d_dw = device_copy<wide>(&t->dw0), *d_db = device_copy<wide>(&t->db0);
    gpu->plans->tuning = true;
    for (bool bias : {false, true}) {
        Linear l = t->of(bias);
        linear_forward(d_y, t->d_x, l, {}, gpu);
        linear_gelu_forward(d_y, d_pre, t->d_x, l, gpu);
        linear_forward(d_y, t->d_x, l, {d_pre, 1}, gpu);
        linear_forward(d_y, t->d_x, l, {d_y, 1}, gpu);
    }
    Linear l = t->of(true, d_dw, d_db);
    linear_backward_input(d_dx, t->d_dy, l, {}, gpu);
    linear_backward_input(d_dx, t->d_dy, l, {d_dpre, 1}, gpu);
    linear_backward_input(d_dx, t->d_dy, l, {d_dx, 1}, gpu);
    linear_gelu_backward_input(d_dpre, d_dx, t->d_dy, l, gpu);
    for (int to_dw : {SET, ADD}) {
        l.to_dw = to_dw;
        linear_backward_weight(t->d_dy, t->d_x, l, gpu);
    }
    gpu->plans->tuning = false;
    cudaCheck(cudaStreamSynchronize(gpu->stream));
    cudaFree(d_y), cudaFree(d_pre), cudaFree(d_dx), cudaFree(d_dpre), cudaFree(d_dw),
        cudaFree(d_db);
}

// Each of the 14 products has one plan, and plans chosen by timing compute the same.
GPU_TEST(cuda_linear_plans) {
    Layer t(24, 40, 72, 1), other(17, 40, 72, 1);
    TestPlans first, tuned(false, "EMU_CUBLASLT_FAST", "1");
    check_layer(&t, &first.gpu);
    check_layer(&t, &first.gpu);
    EXPECT(first.gpu.plans->count == 14, "%d plans, expected 14", first.gpu.plans->count);
    EXPECT(count_of(text_of(first.gpu.plans), "\"algo\"") == 0,
           "the text holds plans that were not timed: %s", text_of(first.gpu.plans).c_str());
    TestPlans zero;
    real *d_y = device_copy<real>(&t.y0);
    linear_forward(d_y, t.d_x, t.of(false), {d_y, 0}, &zero.gpu);
    linear_forward(d_y, t.d_x, t.of(false), {}, &zero.gpu);
    EXPECT(zero.gpu.plans->count == 1, "%d plans, expected one: an addend times 0 is none",
           zero.gpu.plans->count);
    cudaFree(d_y);
    tune(&t, &tuned.gpu);
    EXPECT(tuned.gpu.plans->count == 14, "%d plans after tuning, expected 14",
           tuned.gpu.plans->count);
    check_layer(&t, &tuned.gpu);
    EXPECT(tuned.gpu.plans->count == 14, "%d plans after use, expected 14", tuned.gpu.plans->count);
    check_layer(&other, &tuned.gpu);
    EXPECT(tuned.gpu.plans->count == 28, "%d plans of two shapes, expected 28",
           tuned.gpu.plans->count);
#if !defined(__CUDACC__)
    for (int i = 0; i < 14; i++) {
        const Plan *p = &first.gpu.plans->plans[i], *q = &tuned.gpu.plans->plans[i];
        EXPECT(p->algo.data[1] == 0 && q->algo.data[1] == 1,
               "plan %d: algorithms %d and %d, expected the first guess and the fastest", i,
               (int)p->algo.data[1], (int)q->algo.data[1]);
    }
#endif
}

#if !defined(__CUDACC__)
// A product with GELU takes 3 ms more, or it does not: the faster way is kept, saved, and right.
// Read again, the choice is that of the text, however fast the products are now.
GPU_TEST(cuda_linear_gelu) {
    for (bool slow : {false, true}) {
        Layer t(24, 40, 72, 1);
        TestPlans plans(false, "EMU_CUBLASLT_GELU", slow ? "30" : "0");
        tune(&t, &plans.gpu);
        std::string text = text_of(plans.gpu.plans);
        setenv(plans.setting, slow ? "0" : "30", 1);
        TestPlans read;
        plans_read(read.gpu.plans, text.c_str(), "plans.json");
        for (TestPlans *p : {&plans, &read}) {
            int fused = 0, kept = 0;
            for (int i = 0; i < p->gpu.plans->count; i++) {
                const Plan *plan = &p->gpu.plans->plans[i];
                if (plan->key.epilogue < GELU) continue;
                fused += plan->found, kept += plan->keep;
            }
            EXPECT(fused == (slow ? 0 : 3) && kept == 3,
                   "%d of 3 products with GELU where they are %s, %d choices kept", fused,
                   slow ? "slow" : "fast", kept);
            check_layer(&t, &p->gpu);
        }
        EXPECT(text_of(read.gpu.plans) == text, "another text after reading: %s",
               text_of(read.gpu.plans).c_str());
    }
}

// Split-K is allowed, and tuning takes it where it is fastest: its halves meet in the workspace, as
// floats and in one order, so the same bits come again.
GPU_TEST(cuda_linear_split) {
    Layer t(130, 40, 72, 1);
    TestPlans plans(false, "EMU_CUBLASLT_FAST", "0");
    tune(&t, &plans.gpu);
    int split = 0;
    for (int i = 0; i < plans.gpu.plans->count; i++) {
        const Plan *p = &plans.gpu.plans->plans[i];
        split += p->key.wide_out && p->found && p->algo.data[1] == 0 && p->algo.data[2] > 0;
    }
    EXPECT(split == 2, "%d plans of dW split its depth, expected 2: SET and ADD", split);
    wide *d_dw[2];
    for (wide *&dw : d_dw) {
        Linear l = t.of(false, dw = device_empty<wide>(t.dw0.size()));
        l.to_dw = SET;
        linear_backward_weight(t.d_dy, t.d_x, l, &plans.gpu);
    }
    expect_close(d_dw[0], mixed(t.dyx, 1, t.dw0, 0), "dW in two halves");
    EXPECT(host_values(d_dw[0], t.dw0.size()) == host_values(d_dw[1], t.dw0.size()),
           "dW twice: other bits");
    cudaFree(d_dw[0]), cudaFree(d_dw[1]);
}
#endif

// 16 bytes into an allocation, where more alignment would be luck.
static real *device_shifted(Values v) {
    v.insert(v.begin(), PACK, 0);
    return device_copy<real>(&v) + PACK;
}

// Plans made with arrays at multiples of 256 bytes serve arrays at multiples of 16.
GPU_TEST(cuda_linear_alignment) {
    Layer t(24, 40, 72, 1);
    TestPlans plans;
    check_layer(&t, &plans.gpu);
    real *d_x = device_shifted(t.x);
    real *d_w = device_shifted(t.w);
    real *d_b = device_shifted(t.b);
    real *d_add = device_shifted(t.y0);
    real *d_dy = device_shifted(t.dy);
    real *d_h = device_shifted(t.y0);
    real *d_pre = device_shifted(t.y0);
    real *d_dpre = device_shifted(t.dx0);
    Linear l = {d_w, d_b, nullptr, nullptr, t.s.n, t.s.out, t.s.in, t.s.c};
    linear_forward(d_h, d_x, l, {d_add, 1}, &plans.gpu);
    expect_close(d_h, mixed(t.y(true), 1, t.y0, 1), "y at 16 bytes");
    linear_gelu_forward(d_h, d_pre, d_x, l, &plans.gpu);
    expect_close(d_h, map(t.y(true), gelu_tanh), "h at 16 bytes", GELU_TOLERANCE);
    linear_gelu_backward_input(d_dpre, d_x, d_dy, l, &plans.gpu);
    Values want = mixed(t.dyw, 1, t.dx0, 0);
    for (size_t i = 0; i < want.size(); i++) want[i] *= gelu_tanh_slope(t.x[i]);
    expect_close(d_dpre, want, "dpre at 16 bytes", GELU_TOLERANCE);
    EXPECT(plans.gpu.plans->count == 14, "%d plans, expected 14", plans.gpu.plans->count);
    for (real *p : {d_x, d_w, d_b, d_add, d_dy, d_h, d_pre, d_dpre}) cudaFree(p - PACK);
}

// Products record into a graph. Their plans are there before: the library is asked for none while a
// stream records, which some versions refuse.
GPU_TEST(cuda_linear_graph) {
    Layer t(24, 40, 72, 0.5f);
    TestPlans plans;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check_backward_weight(&t, &plans.gpu);
    wide *d_dw = device_copy<wide>(&t.dw0), *d_db = device_copy<wide>(&t.db0);
    cudaCheck(cudaStreamBeginCapture(plans.gpu.stream, cudaStreamCaptureModeThreadLocal));
    for (float scale : {2.0f, 1.0f})
        linear_backward_weight(t.d_dy, t.d_x, t.of(true, d_dw, d_db, scale), &plans.gpu);
    cudaCheck(cudaStreamEndCapture(plans.gpu.stream, &graph));
    cudaCheck(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 2; i++) cudaCheck(cudaGraphLaunch(executable, plans.gpu.stream));
    expect_close(d_dw, mixed(t.dyx, 3, t.dw0, 1), "dW of a graph");
    expect_close(d_db, mixed(t.sums, 4, t.db0, 1), "db of a graph");
    cudaCheck(cudaGraphExecDestroy(executable));
    cudaCheck(cudaGraphDestroy(graph));
    cudaFree(d_dw), cudaFree(d_db);
}

GPU_TEST(cuda_linear_plans_text) {
    for (const char *plain : {"0", "1"}) {
        Layer t(24, 40, 72, 1), other(17, 40, 72, 1);
        TestPlans written(false, "EMU_CUBLASLT_PLAIN", plain),
            read(false, "EMU_CUBLASLT_PLAIN", plain);
        tune(&t, &written.gpu);
        check_layer(&other, &written.gpu);
        std::string text = text_of(written.gpu.plans);
        int count = (int)count_of(text, "\"algo\"");
        check_layer(&other, &read.gpu);                      // plans of before are forgotten
        plans_read(read.gpu.plans, text.c_str(), "plans.json");
        EXPECT(count >= 14 && read.gpu.plans->count == count, "%d plans read, the text has %d",
               read.gpu.plans->count, count);
        EXPECT(text_of(read.gpu.plans) == text, "another text after reading: %s",
               text_of(read.gpu.plans).c_str());
        check_layer(&t, &read.gpu);
        EXPECT(read.gpu.plans->count == count, "%d plans after use, %d were read",
               read.gpu.plans->count, count);
    }
}

// More shapes than the table holds, as when sampling: what was timed or prepared stays, and every
// product is right.
GPU_TEST(cuda_linear_plans_full) {
    Layer t(PLANS_MAX + 20, 8, 16, 1), timed(9, 16, 8, 1);
    TestPlans plans;
    Layer untimed(7, 16, 8, 1);
    check_layer(&untimed, &plans.gpu);
    int prepared = plans.gpu.plans->prepared = plans.gpu.plans->count;
    PlanKey last = plans.gpu.plans->plans[prepared - 1].key;
    tune(&timed, &plans.gpu);
    int kept = plans.gpu.plans->count - prepared;
    for (int64_t n = 1; n <= t.s.n; n++) {
        real *d_y = device_empty<real>(n * t.s.out);
        Values want = t.y(true);
        Linear l = t.of(true);
        l.n = n;
        want.resize(n * t.s.out);
        linear_forward(d_y, t.d_x, l, {}, &plans.gpu);
        expect_close(d_y, want, "y of a growing text");
        cudaFree(d_y);
    }
    EXPECT(plans.gpu.plans->count < PLANS_MAX, "%d plans", plans.gpu.plans->count);
    EXPECT((int)count_of(text_of(plans.gpu.plans), "\"algo\"") == kept,
           "%d plans were timed, the text has %d", kept,
           (int)count_of(text_of(plans.gpu.plans), "\"algo\""));
    const PlanKey &there = plans.gpu.plans->plans[prepared - 1].key;
    EXPECT(prepared > 0 && !memcmp(&there, &last, sizeof last), "a prepared plan is gone");
    check_layer(&timed, &plans.gpu);
}

#if !defined(__CUDACC__)
static std::string reading(const std::string &text, bool tf32) {
    return said([&] { plans_read(plans_create(tf32), text.c_str(), "saved.json"); return 0; });
}
static std::string replaced(std::string text, const char *old, const std::string &by) {
    size_t at = text.find(old);
    CHECK(at != std::string::npos, "the text has no %s", old);
    return text.replace(at, strlen(old), by);
}

GPU_TEST(cuda_linear_plans_refused) {
    Layer t(24, 40, 72, 1);
    TestPlans plans;
    plans.gpu.plans->tuning = true;
    real *d_y = device_empty<real>(t.y0.size());
    linear_forward(d_y, t.d_x, t.of(true), {}, &plans.gpu);
    std::string text = text_of(plans.gpu.plans);
    size_t first = text.find("{\"m\""), hex = text.find("\"algo\": \"") + 9;
    std::string entry = text.substr(first, text.find('}', first) + 1 - first);
    std::string code = text.substr(hex, 2 * sizeof(cublasLtMatmulAlgo_t));
    const char *real_name = sizeof(real) == sizeof(float) ? "fp32" : "bf16";
    const struct { const char *what; std::string text; const char *words;
    } ROWS[] = {
        {"the text itself", text, "0 "},
        {"another GPU", replaced(text, "emulator", "NVIDIA H200"),
         "0 note: saved.json holds matrix plans of cuBLASLt"},
        {"another version", replaced(text, "cuBLASLt 1", "cuBLASLt 9"),
         "0 note: saved.json holds matrix plans of cuBLASLt"},
        {"another precision", replaced(text, real_name, "fp64"), "0 note: "},
        {"no JSON", text.substr(0, text.size() / 2), "1 error: saved.json"},
        {"no origin", replaced(text, "origin", "from"),
         "1 error: saved.json: expected \"origin\" to be a string"},
        {"no plans", replaced(text, "plans", "plan"),
         "1 error: saved.json: expected \"plans\" to be an array"},
        {"no m", replaced(text, "\"m\"", "\"M\""),
         "1 error: saved.json: expected \"m\" to be an integer"},
        {"an m of 0", replaced(text, "\"m\": 40", "\"m\": 0"),
         "0 note: saved.json: the library refuses a saved algorithm (CUBLAS_STATUS_INVALID_VALUE)"},
        {"an m that is text", replaced(text, "\"m\": 40", "\"m\": \"40\""),
         "1 error: saved.json: expected \"m\" to be an integer"},
        {"another epilogue", replaced(text, "\"epilogue\": 1", "\"epilogue\": 5"),
         "1 error: saved.json: \"epilogue\": 5 is not known"},
        {"a negative epilogue", replaced(text, "\"epilogue\": 1", "\"epilogue\": -1"),
         "1 error: saved.json: \"epilogue\": -1 is not known"},
        {"a short algorithm", replaced(text, code.c_str(), code.substr(2)),
         "1 error: saved.json: expected \"algo\" to be 128 digits"},
        {"a letter in an algorithm", replaced(text, code.c_str(), "x" + code.substr(1)),
         "1 error: saved.json: expected \"algo\" to be 128 digits"},
        {"an algorithm of zeros", replaced(text, code.c_str(), std::string(128, '0')),
         "0 note: saved.json: the library refuses a saved algorithm (CUBLAS_STATUS_INVALID_VALUE)"},
        {"an algorithm of another product", replaced(text, "\"k\": 72", "\"k\": 80"),
         "0 note: saved.json: the library refuses a saved algorithm"},
        {"no algorithm and no epilogue",
         replaced(replaced(text, "\"epilogue\": 1", "\"epilogue\": 0"), code.c_str(), ""),
         "1 error: saved.json: expected \"algo\" to be 128 digits"},
        {"a product twice", replaced(text, entry.c_str(), entry + ", " + entry),
         "1 error: saved.json: the same product twice"},
    };
    for (const auto &row : ROWS) expect_words(reading(row.text, false), row.words, row.what);
    if (sizeof(real) == sizeof(float))
        expect_words(reading(text, true), "0 note: ", "plans of fp32 for TF32");
    cudaFree(d_y);
}

GPU_TEST(cuda_linear_refused) {
    Layer t(24, 40, 72, 1);
    TestPlans plans;
    Gpu *gpu = &plans.gpu;
    wide *d_dw = device_copy<wide>(&t.dw0), *d_db = device_copy<wide>(&t.db0);
    expect_words(said([&] {
                     linear_forward((real *)t.d_x + 1, t.d_x, t.of(false), {}, gpu);
                     return 0;
                 }),
                 "1 error: cublasLtMatmul: CUBLAS_STATUS_INVALID_VALUE, for D[40, 24] = op(A) "
                 "op(B) with k 72, transposed 1 0, epilogue none",
                 "y not at 16 bytes");
    gpu->scratch_size = 24 * 40 - 1;
    expect_words(said([&] {
                     linear_backward_weight(t.d_dy, t.d_x, t.of(true, d_dw, d_db), gpu);
                     return 0;
                 }),
                 "1 error: expected 3840 bytes of scratch, found 3836", "scratch");
    gpu->scratch_size++;
    check_backward_weight(&t, gpu);
    cudaFree(d_dw), cudaFree(d_db);
}

// ---------------------------------------------------------------------------- the emulated library

// One product by direct calls, column-major: D[m, n] = alpha A^T[m, k] B[k, n] + beta C with padded
// leading dimensions. Fields may be broken before run().
struct Direct {
    int64_t m = 24, n = 16, k = 40, lda = 48, ldb = 40, ldc = 32, ldd = 40, aux_ld = 32;
    cudaDataType type_a = sizeof(real) == 4 ? CUDA_R_32F : CUDA_R_16BF;
    cudaDataType type_b = type_a;
    cudaDataType type_c = type_a;
    cudaDataType type_d = type_a;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    int32_t ta = CUBLAS_OP_T, tb = CUBLAS_OP_N, bias_type = type_d;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT, alignment = 16;
    size_t attribute_size = sizeof(int32_t), workspace_bytes = 1 << 16, allowed = 1 << 16;
    float alpha = 0.5f, beta = -2;
    int guess = 0, wanted = 16, count = 0;
    int64_t k_chosen = 40;                                   // the algorithm is chosen for this k
    Values a = random_values(48 * 24, 21);
    Values b = random_values(40 * 16, 22);
    Values c = random_values(32 * 16, 23);
    Values v = random_values(24, 24);
    real *d_a = device_copy<real>(&a);
    real *d_b = device_copy<real>(&b);
    real *d_c = device_copy<real>(&c);
    real *d_d = device_empty<real>(40 * 16);
    real *d_bias = device_copy<real>(&v), *d_aux = device_empty<real>(32 * 15 + 24);
    void *workspace = device_empty<char>(1 << 16);
    cublasLtMatmulHeuristicResult_t guesses[16] = {};

    ~Direct() {  // what a row below has changed may not be free to free
        for (void *p :
             {(void *)d_a, (void *)d_b, (void *)d_c, (void *)d_d, (void *)d_bias, (void *)d_aux})
            cudaFree(p);
        cudaFree(workspace);
        cudaGetLastError();
    }
    cublasStatus_t set_up(cublasLtMatmulDesc_t desc, cublasLtMatmulPreference_t preference) {
        cublasStatus_t s =
            cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, attribute_size);
        if (!s)
            s = cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb);
        if (!s)
            s = cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                               sizeof epilogue);
        if (!s)
            s = cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &d_bias,
                                               sizeof d_bias);
        if (!s)
            s = cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                               &bias_type, sizeof bias_type);
        if (!s)
            s = cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                               &d_aux, sizeof d_aux);
        if (!s && aux_ld)
            s = cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld,
                                               sizeof aux_ld);
        if (!s)
            s = cublasLtMatmulPreferenceSetAttribute(preference,
                                                     CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &allowed, sizeof allowed);
        for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
             i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; i++) {
            if (!s)
                s = cublasLtMatmulPreferenceSetAttribute(preference,
                                                         (cublasLtMatmulPreferenceAttributes_t)i,
                                                         &alignment, sizeof alignment);
        }
        return s;
    }
    cublasStatus_t run(void) {
        cublasLtHandle_t handle;
        cublasLtMatmulDesc_t desc;
        cublasLtMatmulPreference_t preference;
        cublasLtMatrixLayout_t la, lb, lc, ld, chosen_a, chosen_b;
        cublasLtCreate(&handle), cublasLtMatmulDescCreate(&desc, compute, CUDA_R_32F),
            cublasLtMatmulPreferenceCreate(&preference);
        cublasLtMatrixLayoutCreate(&la, type_a, (uint64_t)k, (uint64_t)m, lda),
            cublasLtMatrixLayoutCreate(&lb, type_b, (uint64_t)k, (uint64_t)n, ldb);
        cublasLtMatrixLayoutCreate(&lc, type_c, (uint64_t)m, (uint64_t)n, ldc),
            cublasLtMatrixLayoutCreate(&ld, type_d, (uint64_t)m, (uint64_t)n, ldd);
        cublasLtMatrixLayoutCreate(&chosen_a, type_a, (uint64_t)k_chosen, (uint64_t)m, lda),
            cublasLtMatrixLayoutCreate(&chosen_b, type_b, (uint64_t)k_chosen, (uint64_t)n, ldb);
        cublasStatus_t s = set_up(desc, preference);
        bool other = k_chosen != k;
        if (!s)
            s = cublasLtMatmulAlgoGetHeuristic(handle, desc, other ? chosen_a : la,
                                               other ? chosen_b : lb, lc, ld, preference, wanted,
                                               guesses, &count);
        if (!s && guess < count) s = guesses[guess].state;
        if (!s)
            s = cublasLtMatmul(handle, desc, &alpha, d_a, la, d_b, lb, &beta, d_c, lc, d_d, ld,
                               &guesses[guess].algo, workspace, workspace_bytes,
                               test_gpu()->stream);
        cudaCheck(cudaStreamSynchronize(test_gpu()->stream));
        for (cublasLtMatrixLayout_t layout : {la, lb, lc, ld, chosen_a, chosen_b})
            cublasLtMatrixLayoutDestroy(layout);
        cublasLtMatmulPreferenceDestroy(preference), cublasLtMatmulDescDestroy(desc),
            cublasLtDestroy(handle);
        return s;
    }
    // D before the epilogue
    double sum(int64_t i, int64_t j) const {
        double s = 0;
        for (int64_t l = 0; l < k; l++) s += a[i * lda + l] * b[j * ldb + l];
        return alpha * s + beta * c[j * ldc + i];
    }
};

// The rows of a padded column-major array, without the padding, which must be as it was: NaN.
static Values unpadded(const real *device, int64_t m, int64_t n, int64_t ld) {
    Values all = host_values(device, (size_t)(ld * (n - 1) + m)), v;
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < (j < n - 1 ? ld : m); i++) {
            if (i < m) v.push_back(all[(size_t)(j * ld + i)]);
            else
                EXPECT(isnan(all[(size_t)(j * ld + i)]), "padding (%d, %d) was written", (int)i,
                       (int)j);
        }
    return v;
}

static void check_direct(uint32_t epilogue, int guess) {
    Direct t;
    Values d, aux;
    t.epilogue = epilogue;
    t.guess = guess;
    if (epilogue == CUBLASLT_EPILOGUE_DGELU) {
        aux = random_values(32 * 15 + 24, 25);
        cudaFree(t.d_aux);
        t.d_aux = device_copy<real>(&aux);
    }
    EXPECT(t.run() == CUBLAS_STATUS_SUCCESS, "epilogue %u with algorithm %d was refused", epilogue,
           guess);
    Values pre;
    for (int64_t j = 0; j < t.n; j++)
        for (int64_t i = 0; i < t.m; i++) {
            double v = t.sum(i, j) + (epilogue & CUBLASLT_EPILOGUE_BIAS ? t.v[i] : 0);
            pre.push_back(v);
            if (epilogue == CUBLASLT_EPILOGUE_DGELU)
                v *= gelu_tanh_slope(aux[j * t.aux_ld + i]);
            else if (epilogue & CUBLASLT_EPILOGUE_GELU)
                v = gelu_tanh(v);
            d.push_back(v);
        }
    double e = nmse(unpadded(t.d_d, t.m, t.n, t.ldd), d);
    EXPECT(e <= TOLERANCE, "epilogue %u with algorithm %d: error %.3g", epilogue, guess, e);
    if (!(epilogue & CUBLASLT_EPILOGUE_GELU)) return;
    e = nmse(unpadded(t.d_aux, t.m, t.n, t.aux_ld), pre);
    EXPECT(e <= TOLERANCE, "pre of epilogue %u: error %.3g", epilogue, e);
}

GPU_TEST(cuda_cublaslt) {
    for (uint32_t e :
         {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
          CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU})
        check_direct(e, 0);
    check_direct(CUBLASLT_EPILOGUE_DEFAULT, 2);
    check_direct(CUBLASLT_EPILOGUE_DEFAULT, 3);
    Direct guesses;
    EXPECT(guesses.run() == CUBLAS_STATUS_SUCCESS && guesses.count == 4 &&
               guesses.guesses[1].state != CUBLAS_STATUS_SUCCESS,
           "%d guesses, expected 3 and one that is none", guesses.count);
    Direct few;
    few.allowed = 0;
    EXPECT(few.run() == CUBLAS_STATUS_SUCCESS && few.count == 3 &&
               few.guesses[0].workspaceSize == 0,
           "%d guesses without workspace", few.count);
}

// Each row breaks one thing in a product that is right.
GPU_TEST(cuda_cublaslt_refused) {
    const cublasStatus_t INVALID = CUBLAS_STATUS_INVALID_VALUE;
    const cublasStatus_t UNSUPPORTED = CUBLAS_STATUS_NOT_SUPPORTED;
    real host[8] = {};
    const struct {
        const char *what;
        cublasStatus_t status;
        std::function<void(Direct &)> change;
    } ROWS[] = {
        {"nothing", CUBLAS_STATUS_SUCCESS, [](Direct &) {}},
        {"an attribute of another size", INVALID, [](Direct &t) { t.attribute_size = 8; }},
        {"a transpose that is none", INVALID, [](Direct &t) { t.ta = 7; }},
        {"A not transposed", INVALID, [](Direct &t) { t.ta = CUBLAS_OP_N; }},
        {"a leading dimension below the rows", INVALID, [](Direct &t) { t.ldb = 32; }},
        {"a leading dimension that is no multiple of 16 bytes", INVALID,
         [](Direct &t) { t.lda = 42 + sizeof(real) % 4; }},
        {"A longer than its memory", INVALID, [](Direct &t) { t.lda = 56; }},
        {"D longer than its memory", INVALID, [](Direct &t) { t.ldd = 48; }},
        {"A in memory of the host", INVALID, [&](Direct &t) { cudaFree(t.d_a), t.d_a = host; }},
        {"A not at a multiple of 16 bytes", INVALID,
         [](Direct &t) {
             t.m = 16;
             t.d_a += 1;
         }},
        {"an algorithm for more alignment than there is", INVALID,
         [](Direct &t) {
             t.alignment = 256;
             t.m = 16;
             t.d_a += 32 / sizeof(real);
         }},
        {"no workspace", INVALID, [](Direct &t) { cudaFree(t.workspace), t.workspace = nullptr; }},
        {"a workspace that is too small", INVALID,
         [](Direct &t) { t.workspace_bytes = 2 * 24 * 4 - 4; }},
        {"a workspace longer than its memory", INVALID,
         [](Direct &t) { t.workspace_bytes = (1 << 16) + 1; }},
        {"the guess that is none", UNSUPPORTED, [](Direct &t) { t.guess = 1; }},
        {"no algorithm", INVALID, [](Direct &t) { t.guess = 9; }},
        {"an algorithm for another k", INVALID, [](Direct &t) { t.k_chosen = 32; }},
        {"B of another type", UNSUPPORTED,
         [](Direct &t) { t.type_b = t.type_a == CUDA_R_32F ? CUDA_R_16BF : CUDA_R_32F; }},
        {"C of another type", UNSUPPORTED,
         [](Direct &t) { t.type_c = t.type_a == CUDA_R_32F ? CUDA_R_16BF : CUDA_R_32F; }},
        {"TF32 for bfloat16, or half", UNSUPPORTED,
         [](Direct &t) {
             t.compute = t.type_a == CUDA_R_32F ? CUBLAS_COMPUTE_16F : CUBLAS_COMPUTE_32F_FAST_TF32;
         }},
        {"an epilogue that is not emulated", UNSUPPORTED,
         [](Direct &t) { t.epilogue = CUBLASLT_EPILOGUE_RELU; }},
        {"a bias that is not there", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_BIAS;
             cudaFree(t.d_bias), t.d_bias = nullptr;
         }},
        {"a bias along n instead of m", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_BIAS;
             cudaFree(t.d_bias), t.d_bias = device_empty<real>(16);
         }},
        {"a bias of another type", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_BIAS;
             t.bias_type = CUDA_R_64F;
         }},
        {"no leading dimension of pre", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_GELU_AUX;
             t.aux_ld = 0;
         }},
        {"a leading dimension of pre along n", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_GELU_AUX;
             t.aux_ld = 16;
         }},
        {"a leading dimension of pre of no multiple of 8", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_GELU_AUX;
             t.aux_ld = 28;
         }},
        {"pre longer than its memory", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_GELU_AUX;
             t.aux_ld = 40;
         }},
        {"D over C with another leading dimension", INVALID,
         [](Direct &t) { cudaFree(t.d_c), t.d_c = t.d_d; }},
        {"D over B", INVALID, [](Direct &t) { cudaFree(t.d_d), t.d_d = t.d_b, t.ldd = 24; }},
        {"D over pre", INVALID,
         [](Direct &t) {
             t.epilogue = CUBLASLT_EPILOGUE_GELU_AUX;
             cudaFree(t.d_aux), t.d_aux = t.d_d;
         }},
    };
    for (const auto &row : ROWS) {
        Direct t;
        row.change(t);
        cublasStatus_t status = t.run();
        EXPECT(status == row.status, "%s: %s, expected %s", row.what, cublasLtGetStatusName(status),
               cublasLtGetStatusName(row.status));
    }
}
#endif
