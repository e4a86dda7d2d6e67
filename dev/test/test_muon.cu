// test_muon.cu: Muon's kernels and products (llmc/muon.cuh) against the equations in double.
#include "gpu_test.cuh"
#include "muon.h"
#include "../../llmc/muon.cuh"

// Tensors of one and of several matrices, wide and tall, among others that AdamW updates.
static const struct { int count, rows, cols; } SHAPES[] = {
    {0, 1, 40}, {1, 64, 96}, {0, 8, 24}, {3, 40, 24}, {2, 24, 40}, {1, 96, 64}, {0, 1, 9}};
enum { TENSORS = sizeof SHAPES / sizeof *SHAPES };

struct Toy {
    Gpu gpu;                   // the shared context with plans of its own
    UpdateEntry host[TENSORS], *entries;
    UpdateState *state;
    Arenas t;
    real *scratch;
    int64_t second;            // elements of the second moments
};

static float *device_floats(const std::vector<float> &x) {
    float *p;
    cudaCheck(cudaMalloc((void **)&p, x.size() * sizeof(float)));
    cudaCheck(cudaMemcpy(p, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice));
    return p;
}

static std::vector<float> random_floats(int64_t n, uint64_t seed) {
    std::vector<float> x(n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)rand_normal(seed, (uint64_t)i);
    return x;
}

static Toy toy_make(void) {
    Toy toy = {};
    toy.gpu = *test_gpu();
    toy.gpu.plans = plans_create(false);
    int64_t scratch = 0;
    for (int k = 0; k < TENSORS; k++) {
        auto s = SHAPES[k];
        int64_t size = (int64_t)s.rows * s.cols * max(s.count, 1), least = min(s.rows, s.cols);
        toy.host[k] = {toy.t.total, toy.t.total, size, 0.03f, 0.1f, 0, 0, 0,
                       toy.t.total - toy.second, s.count ? 0.5f : 0};
        int64_t room = CEIL_DIV(size, (int64_t)32) * 32;
        toy.t.total += room;
        if (!s.count) toy.second += room;
        scratch = max(scratch, 2 * size + 2 * s.count * least * least);
    }
    cudaCheck(cudaMalloc((void **)&toy.entries, sizeof toy.host));
    cudaCheck(cudaMemcpy(toy.entries, toy.host, sizeof toy.host, cudaMemcpyHostToDevice));
    cudaCheck(cudaMalloc((void **)&toy.state, sizeof *toy.state));
    toy.t.master = device_floats(random_floats(toy.t.total, 1));
    toy.t.m = device_floats(random_floats(toy.t.total, 2));
    toy.t.v = device_floats(std::vector<float>(toy.second, 1));
    toy.t.d = device_floats(random_floats(toy.t.total, 3));
    toy.t.w = sizeof(real) == 4 ? (real *)(void *)toy.t.master : device_empty<real>(toy.t.total);
    toy.scratch = device_empty<real>(scratch);
    return toy;
}

static void toy_free(Toy *toy) {
    cudaCheck(cudaDeviceSynchronize());
    plans_destroy(toy->gpu.plans);
    if ((void *)toy->t.w != (void *)toy->t.master) cudaFree(toy->t.w);
    for (const void *p : {(void *)toy->entries, (void *)toy->state, (void *)toy->t.master,
                          (void *)toy->t.m, (void *)toy->t.v, (void *)toy->t.d,
                          (void *)toy->scratch})
        cudaFree((void *)p);
}

static AdamWStep toy_step(void) { return {0.9f, 0.95f, 1e-3f, 10, 20, 0, 0, 1, 0, 0}; }

static MuonTensor toy_tensor(const Toy &toy, int k) {
    return {toy.host[k], SHAPES[k].count, SHAPES[k].rows, SHAPES[k].cols, toy.scratch};
}

// One step of all tensors. clip_factor, applied: what decide_kernel would leave in the state.
static void toy_update(Toy &toy, float clip_factor, int applied) {
    UpdateState state = {{}, 0, clip_factor, applied};
    cudaCheck(cudaMemcpy(toy.state, &state, sizeof state, cudaMemcpyHostToDevice));
    LAUNCH(adamw_kernel, CEIL_DIV(toy.t.total, UPDATE_PIECE), UPDATE_THREADS, 0, toy.gpu.stream,
           toy.t, toy.entries, TENSORS, toy.state, toy_step());
    for (int k = 0; k < TENSORS; k++) {
        MuonTensor m = toy_tensor(toy, k);
        if (!m.count) continue;
        muon_apply(m, toy.t, toy.state, toy_step(), 0.9f, &toy.gpu);
    }
}

// Errors of x: of float sums; of matrices that are rounded to bfloat16 fifteen times.
static const double WITHIN = sizeof(real) == 4 ? 1e-10 : 3e-3;

// w and m [size] become those after a step.
static void truth_step(const MuonTensor &m, Values *w, Values *momentum, const Values &d,
                       float clip_factor) {
    int64_t size = (int64_t)m.rows * m.cols;
    Values u(size), x(size);
    for (int64_t at = 0; at < m.count * size; at += size) {
        for (int64_t i = 0; i < size; i++) {
            double g = clip_factor * d[at + i];
            (*momentum)[at + i] = 0.9f * (*momentum)[at + i] + (1 - 0.9f) * g;
            u[i] = (1 - 0.9f) * g + 0.9f * (*momentum)[at + i];
        }
        muon_equations(x.data(), u.data(), m.rows, m.cols);
        for (int64_t i = 0; i < size; i++)
            (*w)[at + i] -= m.e.lr * (m.e.scale * x[i] + m.e.decay * (*w)[at + i]);
    }
}

static Values part(const Values &x, const UpdateEntry &e) {
    return Values(x.begin() + e.offset, x.begin() + e.offset + e.size);
}

static Values change(const Values &before, const Values &after) {
    Values x(before.size());
    for (size_t i = 0; i < x.size(); i++) x[i] = before[i] - after[i];
    return x;
}

GPU_TEST(cuda_muon) {
    Toy toy = toy_make();
    int64_t total = toy.t.total;
    Values w = host_values(toy.t.master, total), m = host_values(toy.t.m, total);
    Values d = host_values(toy.t.d, total);
    toy_update(toy, 0.5f, 1);
    Values w_now = host_values(toy.t.master, total), m_now = host_values(toy.t.m, total);
    Values copy = host_values(toy.t.w, total), v_now = host_values(toy.t.v, toy.second);
    for (int k = 0; k < TENSORS; k++) {
        MuonTensor tensor = toy_tensor(toy, k);
        Values before = part(w, tensor.e), after = before, momentum = part(m, tensor.e);
        if (!tensor.count) {
            EXPECT(part(w_now, tensor.e) != before, "tensor %d: AdamW leaves it", k);
            continue;
        }
        truth_step(tensor, &after, &momentum, part(d, tensor.e), 0.5f);
        double error = nmse(change(before, part(w_now, tensor.e)), change(before, after));
        EXPECT(error < WITHIN, "tensor %d: the step is off by nmse %.2g", k, error);
        error = nmse(part(m_now, tensor.e), momentum);
        EXPECT(error < 1e-12, "tensor %d: the momentum is off by nmse %.2g", k, error);
        error = nmse(part(copy, tensor.e), part(w_now, tensor.e));
        EXPECT(error < (sizeof(real) == 4 ? 1e-30 : 1e-5), "tensor %d: the products' copy, %.2g", k,
               error);
    }
    // AdamW's second moments have no gaps where Muon's matrices would be.
    int64_t moved = 0, expected = 0;
    for (double v : v_now) moved += v != 1;
    for (int k = 0; k < TENSORS; k++) expected += SHAPES[k].count ? 0 : toy.host[k].size;
    EXPECT(moved == expected, "%d second moments changed, expected %d", (int)moved, (int)expected);
    toy_free(&toy);
}

// A step that is refused, with a gradient that is not finite, changes nothing.
GPU_TEST(cuda_muon_refused) {
    Toy toy = toy_make();
    int64_t total = toy.t.total;
    float bad = NAN;
    cudaCheck(cudaMemcpy((float *)toy.t.d + toy.host[1].offset + 5, &bad, sizeof bad,
                         cudaMemcpyHostToDevice));
    Values w = host_values(toy.t.master, total), m = host_values(toy.t.m, total);
    toy_update(toy, 1, 0);
    EXPECT(host_values(toy.t.master, total) == w && host_values(toy.t.m, total) == m,
           "a refused step changes weights or momenta");
    toy_free(&toy);
}

// The direction again, as statistics ask for it: the momentum stays.
GPU_TEST(cuda_muon_again) {
    Toy toy = toy_make();
    toy_update(toy, 0.5f, 1);
    Values m = host_values(toy.t.m, toy.t.total);
    for (int k = 0; k < TENSORS; k++) {
        MuonTensor tensor = toy_tensor(toy, k);
        if (!tensor.count) continue;
        const real *x = muon_direction(tensor, toy.t, toy.state, 0.9f, false, &toy.gpu);
        Values u(tensor.e.size), want(tensor.e.size), got = host_values(x, tensor.e.size);
        Values d = part(host_values(toy.t.d, toy.t.total), tensor.e), own = part(m, tensor.e);
        for (int64_t i = 0; i < tensor.e.size; i++)
            u[i] = (1 - 0.9f) * 0.5f * d[i] + 0.9f * own[i];
        int64_t size = (int64_t)tensor.rows * tensor.cols;
        for (int i = 0; i < tensor.count; i++)
            muon_equations(want.data() + i * size, u.data() + i * size, tensor.rows, tensor.cols);
        EXPECT(nmse(got, want) < WITHIN, "tensor %d: x is off by nmse %.2g", k, nmse(got, want));
    }
    EXPECT(host_values(toy.t.m, toy.t.total) == m, "the momentum moves again");
    toy_free(&toy);
}
