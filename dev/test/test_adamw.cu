// test_adamw.cu: the optimizer, the norm of gradients and rounding (llmc/adamw.cuh). Truth is AdamW
// in double, tensor by tensor.
#include "gpu_test.cuh"
#include "../../llmc/adamw.cuh"

typedef std::vector<float> HostFloats;

template <typename T> static T *device_raw(const std::vector<T> &host) {
    T *device;
    cudaCheck(cudaMalloc((void **)&device, host.size() * sizeof(T)));
    cudaCheck(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

template <typename T> static std::vector<T> host_raw(const T *device, size_t n) {
    std::vector<T> host(n);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(host.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

template <typename T> static bool same_bits(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

// ------------------------------------------------------------------------ a model of a few tensors

// Short tensors share a block's piece, long ones take several; sizes that leave gaps before the
// next multiple of 32; a gap at either end.
static const int64_t SIZES[] = {40, 1, 8, 5000, 32, 3, 4096, 9001, 64, 127};
enum { TENSORS = sizeof SIZES / sizeof *SIZES };

struct Toy {
    std::vector<UpdateEntry> host;
    UpdateEntry *entries;
    UpdateState *state;
    Arenas t;
    float *d;
};

// zeros in the gaps
static HostFloats toy_values(const Toy &toy, uint64_t seed, double deviation) {
    HostFloats x(toy.t.total, 0.0f);
    for (const UpdateEntry &e : toy.host)
        for (int64_t i = e.offset; i < e.offset + e.size; i++)
            x[i] = (float)(deviation * rand_normal(seed, i));
    return x;
}

static Toy toy_make(bool master_only) {
    Toy toy = {};
    toy.t.total = 32;
    for (int k = 0; k < TENSORS; k++) {
        UpdateEntry e = {toy.t.total,          toy.t.total,      SIZES[k], 0.01f * (k + 1),
                         k % 3 ? 0.1f * k : 0, k % 2 ? 1.0f : 0, 0,        0};
        toy.host.push_back(e);
        toy.t.total += CEIL_DIV(e.size, (int64_t)32) * 32;
    }
    toy.t.total += 64;
    toy.entries = device_raw(toy.host);
    toy.state = device_raw(std::vector<UpdateState>(1));
    toy.t.master = device_raw(toy_values(toy, 61, 1));
    toy.t.m = device_raw(HostFloats(toy.t.total, 0.0f));
    toy.t.v = device_raw(HostFloats(toy.t.total, 0.0f));
    toy.t.d = toy.d = device_raw(HostFloats(toy.t.total, 0.0f));
    toy.t.w = master_only ? (real *)(void *)toy.t.master : device_empty<real>(toy.t.total);
    return toy;
}

static void toy_free(Toy *toy) {
    if ((void *)toy->t.w != (void *)toy->t.master) cudaFree(toy->t.w);
    cudaFree(toy->entries), cudaFree(toy->state), cudaFree(toy->t.master), cudaFree(toy->t.m),
        cudaFree(toy->t.v), cudaFree(toy->d);
}

static UpdateState toy_state(const Toy &toy) { return host_raw(toy.state, 1)[0]; }
static void toy_sums(const Toy &toy, double ce, double z, double router = 0) {
    UpdateState state = {{ce, z, router, NAN, 0}, NAN, NAN, -1};
    cudaCheck(cudaMemcpy(toy.state, &state, sizeof state, cudaMemcpyHostToDevice));
}
static void toy_gradients(const Toy &toy, const HostFloats &d) {
    cudaCheck(cudaMemcpy(toy.d, d.data(), d.size() * sizeof(float), cudaMemcpyHostToDevice));
}

static AdamWStep toy_step(int step, float clip, int stochastic) {
    AdamWStep s = {0.9f, 0.95f, 1e-3f, (float)(1 / (1 - pow(0.9, step))),
                   (float)(1 / (1 - pow(0.95, step))), clip, stochastic, rand_at(5, step), 0, 0};
    return s;
}

// ------------------------------------------------------------------------------------------- steps

struct Truth { Values w, m, v; };

static double truth_norm(const HostFloats &d) {
    double sum = 0;
    for (float x : d) sum += (double)x * x;
    return sqrt(sum);
}

static void truth_step(Truth *t, const Toy &toy, const HostFloats &d, AdamWStep s) {
    double norm = truth_norm(d), scale = s.clip > 0 && norm > s.clip ? s.clip / norm : 1;
    for (const UpdateEntry &e : toy.host)
        for (int64_t i = e.offset; i < e.offset + e.size; i++) {
            double g = scale * d[i], b1 = s.beta1, b2 = s.beta2;
            t->m[i] = b1 * t->m[i] + (1 - b1) * g;
            t->v[i] = b2 * t->v[i] + (1 - b2) * g * g;
            t->w[i] -= e.lr * (t->m[i] * s.correct1 / (sqrt(t->v[i] * s.correct2) + s.eps) +
                               e.decay * (t->w[i] - e.target));
        }
}

static int gaps_touched(const Toy &toy, const HostFloats &x) {
    std::vector<bool> gap(toy.t.total, true);
    int touched = 0;
    for (const UpdateEntry &e : toy.host)
        for (int64_t i = e.offset; i < e.offset + e.size; i++) gap[i] = false;
    for (int64_t i = 0; i < toy.t.total; i++) touched += gap[i] && x[i] != 0;
    return touched;
}

// A whole step of one process.
static void adamw_step(Arenas t, const UpdateEntry *entries, int count, UpdateState *state,
                       AdamWStep step, Gpu *gpu) {
    gradient_square(&state->sums[SUM_SQUARE], t, entries, count, gpu);
    adamw_apply(t, entries, count, state, step, gpu);
}

// Every tensor by itself: a wrong rate of a short one shows. The first step moves each weight by
// nearly lr, whatever the gradient's size.
static void expect_truth(const Toy &toy, const Truth &truth, const char *what) {
    Values w = host_values(toy.t.master, toy.t.total);
    Values m = host_values(toy.t.m, toy.t.total);
    Values v = host_values(toy.t.v, toy.t.total);
    for (const UpdateEntry &e : toy.host) {
        auto part = [&](const Values &x) {
            return Values(x.begin() + e.offset, x.begin() + e.offset + e.size);
        };
        EXPECT(nmse(part(w), part(truth.w)) < 1e-12, "%s: weights at %d of %d: %g", what,
               (int)e.offset, (int)e.size, nmse(part(w), part(truth.w)));
        EXPECT(nmse(part(m), part(truth.m)) < 1e-12, "%s: first moments at %d of %d: %g", what,
               (int)e.offset, (int)e.size, nmse(part(m), part(truth.m)));
        EXPECT(nmse(part(v), part(truth.v)) < 1e-12, "%s: second moments at %d of %d: %g", what,
               (int)e.offset, (int)e.size, nmse(part(v), part(truth.v)));
    }
    const float *arenas[] = {toy.t.master, toy.t.m, toy.t.v};
    for (const float *arena : arenas)
        EXPECT(gaps_touched(toy, host_raw(arena, toy.t.total)) == 0, "%s: something in a gap",
               what);
}

static void check_adamw(bool master_only, int stochastic) {
    Toy toy = toy_make(master_only);
    // None; below the norm; above it, though below its square; below it.
    const float clips[] = {0, 1e-3f, 1e3f, 0.5f};
    const char *names[] = {"no clip", "a small clip", "a large clip", "clip"};
    Truth truth = {host_values(toy.t.master, toy.t.total), Values(toy.t.total),
                   Values(toy.t.total)};
    for (int step = 1; step <= 4; step++) {
        HostFloats d = toy_values(toy, 62 + step, step == 4 ? 1e-2 : 1);
        AdamWStep s = toy_step(step, clips[step - 1], stochastic);
        toy_gradients(toy, d);
        toy_sums(toy, 123.5, 0.25);
        adamw_step(toy.t, toy.entries, TENSORS, toy.state, s, test_gpu());
        truth_step(&truth, toy, d, s);
        expect_truth(toy, truth, names[step - 1]);
        UpdateState state = toy_state(toy);
        double norm = truth_norm(d), scale = s.clip > 0 && norm > s.clip ? s.clip / norm : 1;
        EXPECT(fabs(state.norm - norm) <= 1e-13 * norm, "%s: norm %.17g, expected %.17g",
               names[step - 1], state.norm, norm);
        EXPECT(fabs(state.clip_factor - scale) <= 1e-7 * scale && state.applied == 1,
               "%s: scale %g, expected %g; applied %d", names[step - 1], state.clip_factor, scale,
               state.applied);
        EXPECT(state.sums[SUM_CE] == 123.5 && state.sums[SUM_Z] == 0.25,
               "%s: the sums became %g, %g", names[step - 1], state.sums[SUM_CE],
               state.sums[SUM_Z]);
        real *rounded = device_empty<real>(toy.t.total);
        weights_round(rounded, toy.t.master, toy.t.total, stochastic, s.key, test_gpu());
        std::vector<real> w = host_raw(toy.t.w, toy.t.total);
        std::vector<real> again = host_raw(rounded, toy.t.total);
        for (const UpdateEntry &e : toy.host)
            EXPECT(!memcmp(&w[e.offset], &again[e.offset], e.size * sizeof(real)),
                   "weights_round gives other bits than the update, at %d", (int)e.offset);
        cudaFree(rounded);
    }
    toy_free(&toy);
}

GPU_TEST(cuda_adamw) {
    check_adamw(false, 0);
    check_adamw(false, 1);
    if (sizeof(real) == sizeof(float)) check_adamw(true, 0);
}

// ----------------------------------------------------------------------------------- steps refused

// Gradients or losses that are not finite, or above a limit, reach no weight and no moment.
static void check_refused(Toy *toy, const HostFloats &d, double ce, double z, double router,
                          const char *what, double max_ce = 0, double max_norm = 0) {
    const float *arenas[] = {toy->t.master, toy->t.m, toy->t.v};
    std::vector<HostFloats> before;
    for (const float *arena : arenas) before.push_back(host_raw(arena, toy->t.total));
    std::vector<real> w = host_raw(toy->t.w, toy->t.total);
    toy_gradients(*toy, d);
    toy_sums(*toy, ce, z, router);
    AdamWStep step = toy_step(2, 1, 1);
    step.max_ce = max_ce;
    step.max_norm = max_norm;
    adamw_step(toy->t, toy->entries, TENSORS, toy->state, step, test_gpu());
    for (int i = 0; i < 3; i++)
        EXPECT(same_bits(before[i], host_raw(arenas[i], toy->t.total)), "%s: arena %d changed",
               what, i);
    EXPECT(same_bits(w, host_raw(toy->t.w, toy->t.total)), "%s: weights changed", what);
    EXPECT(toy_state(*toy).applied == 0, "%s: counts as applied", what);
}

GPU_TEST(cuda_adamw_refused) {
    Toy toy = toy_make(false);
    HostFloats d = toy_values(toy, 71, 1);
    toy_gradients(toy, d);
    toy_sums(toy, 0, 0);
    adamw_step(toy.t, toy.entries, TENSORS, toy.state, toy_step(1, 1, 1), test_gpu());
    const int64_t places[] = {toy.host[0].offset, toy.host[1].offset,
                              toy.host[7].offset + toy.host[7].size - 1,
                              toy.host[9].offset + 126};
    for (int64_t at : places) {
        HostFloats spoiled = d;
        spoiled[at] = NAN;
        check_refused(&toy, spoiled, 1, 1, 1, "a NaN in the gradients");
        spoiled[at] = -INFINITY;
        check_refused(&toy, spoiled, 1, 1, 1, "an infinity in the gradients");
    }
    check_refused(&toy, d, NAN, 1, 1, "a NaN among the losses");
    check_refused(&toy, d, 1, INFINITY, 1, "an infinite z-loss");
    check_refused(&toy, d, 1, 1, NAN, "a NaN from a router");
    double norm = truth_norm(d);
    check_refused(&toy, d, 3, 1, 1, "a loss above its limit", 2.999);
    check_refused(&toy, d, 3, 1, 1, "a norm above its limit", 0, 0.999 * norm);
    AdamWStep within = toy_step(2, 1, 1);
    within.max_ce = 3;
    within.max_norm = 1.001 * norm;
    toy_sums(toy, 3, 1);
    adamw_step(toy.t, toy.entries, TENSORS, toy.state, within, test_gpu());
    EXPECT(toy_state(toy).applied == 1, "a loss at its limit and a norm below");
    for (float &x : d) x *= 1e25f;  // squares beyond float: large, yet a number
    toy_gradients(toy, d);
    toy_sums(toy, 1, 1);
    adamw_step(toy.t, toy.entries, TENSORS, toy.state, toy_step(2, 1, 1), test_gpu());
    EXPECT(toy_state(toy).applied == 1 && isfinite(host_values(toy.t.v, 1)[0]),
           "a large gradient: norm %g, applied %d", toy_state(toy).norm, toy_state(toy).applied);
    toy_free(&toy);
}

// ------------------------------------------------------------------------------- lines of length 1

// Rows, long and short and one of zeros; columns, more and fewer than a strip, of one matrix and of
// three one below the other; and what has no lines.
static const struct {
    int64_t size;
    int line, stride;
} LINES[] = {{37 * 40, 40, 1}, {5 * 1032, 1032, 1},   {48 * 72, 48, 72},
             {77, 0, 0},       {3 * 40 * 24, 40, 24}, {700 * 8, 8, 1}};

static Toy lines_make(bool master_only) {
    Toy toy = {};
    toy.t.total = 32;
    for (const auto &lines : LINES) {
        toy.host.push_back(
            {toy.t.total, toy.t.total, lines.size, 0, 0, 0, lines.line, lines.stride});
        toy.t.total += CEIL_DIV(lines.size, (int64_t)32) * 32;
    }
    HostFloats w = toy_values(toy, 81, 3);
    for (int i = 0; i < 40; i++) w[toy.host[0].offset + 11 * 40 + i] = 0;
    toy.entries = device_raw(toy.host);
    toy.state = device_raw(std::vector<UpdateState>(1));
    toy.t.master = device_raw(w);
    toy.t.w = master_only ? (real *)(void *)toy.t.master : device_empty<real>(toy.t.total);
    return toy;
}

static void check_lines(bool master_only, int stochastic) {
    Toy toy = lines_make(master_only);
    AdamWStep step = toy_step(1, 0, stochastic);
    HostFloats was = host_raw(toy.t.master, toy.t.total);
    Values want(was.begin(), was.end());
    // the update was not applied: its state is zeros
    ngpt_normalize(toy.t, toy.entries, (int)toy.host.size(), toy.state, step, test_gpu());
    EXPECT(same_bits(was, host_raw(toy.t.master, toy.t.total)),
           "lines are divided after a step that was refused");
    ngpt_normalize(toy.t, toy.entries, (int)toy.host.size(), nullptr, step, test_gpu());
    for (const UpdateEntry &e : toy.host)
        for (int64_t first = 0; e.line && first < e.size; first += (int64_t)e.line * e.stride)
            for (int i = 0; i < e.stride; i++) {
                double square = 0;
                for (int j = 0; j < e.line; j++)
                    square += pow(was[e.offset + first + i + (int64_t)j * e.stride], 2);
                for (int j = 0; j < e.line && square > 0; j++)
                    want[e.offset + first + i + (int64_t)j * e.stride] /= sqrt(square);
            }
    HostFloats now = host_raw(toy.t.master, toy.t.total);
    real *rounded = device_empty<real>(toy.t.total);
    weights_round(rounded, toy.t.master, toy.t.total, stochastic, step.key, test_gpu());
    std::vector<real> w = host_raw(toy.t.w, toy.t.total), again = host_raw(rounded, toy.t.total);
    for (const UpdateEntry &e : toy.host) {
        double error = nmse(Values(now.begin() + e.offset, now.begin() + e.offset + e.size),
                            Values(want.begin() + e.offset, want.begin() + e.offset + e.size));
        EXPECT(error < 1e-12, "lines of %d, %d apart: %g", e.line, e.stride, error);
        if (e.line)
            EXPECT(!memcmp(&w[e.offset], &again[e.offset], e.size * sizeof(real)),
                   "lines of %d: weights_round gives other bits", e.line);
    }
    for (int64_t i = toy.host[3].offset; i < toy.host[4].offset; i++)
        EXPECT(now[i] == was[i], "element %d of what has no lines is %g, was %g", (int)i, now[i],
               was[i]);
    EXPECT(gaps_touched(toy, now) == 0, "something in a gap");
    cudaFree(rounded);
    toy_free(&toy);
}

GPU_TEST(cuda_ngpt_lines) {
    check_lines(false, 0);
    check_lines(false, 1);
    if (sizeof(real) == sizeof(float)) check_lines(true, 0);
}

// ---------------------------------------------------------------------------------------- the norm

GPU_TEST(cuda_gradient_square) {
    const int64_t sizes[] = {1, 3, 4, 1021, 4096, 4099, 30000};
    double *square, got;
    cudaCheck(cudaMalloc((void **)&square, sizeof got));
    for (int64_t size : sizes) {
        Values d = random_values(size, 81, 3);
        double sum = 0;
        d.resize((size_t)CEIL_DIV(size, FOUR) * FOUR, 1e3);  // a gap that must not count
        wide *device = device_copy<wide>(&d);
        for (int64_t i = 0; i < size; i++) sum += d[i] * d[i];
        UpdateEntry entry = {};
        entry.size = size;
        UpdateEntry *entries = device_raw(std::vector<UpdateEntry>{entry});
        gradient_square(square, Arenas{nullptr, nullptr, nullptr, nullptr, device, size}, entries,
                        1, test_gpu());
        cudaCheck(cudaDeviceSynchronize());
        cudaCheck(cudaMemcpy(&got, square, sizeof got, cudaMemcpyDeviceToHost));
        EXPECT(fabs(got - sum) <= 2e-13 * sum, "squares of %d: %.17g, expected %.17g", (int)size,
               got, sum);
        cudaFree(device), cudaFree(entries);
    }
    cudaFree(square);
}

// ---------------------------------------------------------------------------------------- rounding

static std::vector<real> rounded(const HostFloats &x, int stochastic, uint64_t key) {
    float *master = device_raw(x);
    real *w = device_empty<real>(x.size());
    weights_round(w, master, (int64_t)x.size(), stochastic, key, test_gpu());
    std::vector<real> result = host_raw(w, x.size());
    cudaFree(master), cudaFree(w);
    return result;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// In float nothing is rounded. In bfloat16 a value goes to one of its two neighbours, up as often
// as the fraction says, in each of the four places of a hash, and independently of the value beside
// it.
static void check_chances(uint32_t bits) {
    enum { N = 40000 };
    float x = float_of(bits);
    float low = float_of(bits & 0xffff0000u);
    float high = float_of((bits & 0xffff0000u) + 0x10000u);
    double chance = (bits & 0xffff) / 65536.0;
    double up[4] = {0};
    double pairs = 0;
    double bound = 5 * sqrt(chance * (1 - chance) / (N / 4)) + 1e-9;
    std::vector<real> w = rounded(HostFloats(N, x), 1, rand_at(91, bits));
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        float got = to_float(w[i]);
        if (sizeof(real) == 4) wrong += got != x;
        else wrong += got != low && got != high;
        up[i % 4] += got == high;
        pairs += i && got == high && to_float(w[i - 1]) == high;
    }
    EXPECT(wrong == 0, "%d of %d times %g (0x%08x) went elsewhere", wrong, N, x, bits);
    for (int k = 0; k < 4; k++) {
        double rate = up[k] / (N / 4);
        EXPECT(sizeof(real) == 4 || fabs(rate - chance) <= bound,
               "0x%08x, place %d: up %g of the time, expected %g +- %g", bits, k, rate, chance,
               bound);
    }
    double both = pairs / (N - 1);
    EXPECT(sizeof(real) == 4 || fabs(both - chance * chance) <= bound,
           "0x%08x: two neighbours up %g of the time, expected %g", bits, both, chance * chance);
}

GPU_TEST(cuda_rounding) {
    const uint32_t values[] = {0x3f800000, 0x3f804000, 0x3f80c001, 0xbf812345, 0x40ff8000,
                               0x3dffffff, 0x00012000, 0x80000001, 0x7f7f0000, 0};
    for (uint32_t bits : values) check_chances(bits);
}

GPU_TEST(cuda_rounding_repeats) {
    HostFloats x(5000);
    for (size_t i = 0; i < x.size(); i++) x[i] = (float)rand_normal(92, i);
    std::vector<real> first = rounded(x, 1, 7);
    std::vector<real> again = rounded(x, 1, 7);
    std::vector<real> other = rounded(x, 1, 8);
    std::vector<real> nearest = rounded(x, 0, 7);
    EXPECT(same_bits(first, again), "the same key gives other bits");
    int wrong = 0, moved = 0;
    for (size_t i = 0; i < x.size(); i++) {
        wrong += to_float(nearest[i]) != to_float(to_real(x[i]));
        moved += to_float(first[i]) != to_float(other[i]);
    }
    EXPECT(wrong == 0, "%d of %d values not rounded to nearest", wrong, (int)x.size());
    EXPECT(sizeof(real) == 4 ? moved == 0 : moved > 1000 && moved < 2500,
           "another key moves %d of %d values", moved, (int)x.size());
    // A constant: neighbours, and values any power of two apart, are rounded independently.
    std::vector<real> w = rounded(HostFloats(x.size(), 1.003f), 1, 7);
    double up = (1.003f - 1) * 128, expected = up * up + (1 - up) * (1 - up);
    for (size_t apart = 1; apart <= 2048 && sizeof(real) == 2; apart *= 2) {
        size_t equal = 0, n = x.size() - apart;
        for (size_t i = 0; i < n; i++) equal += to_float(w[i]) == to_float(w[i + apart]);
        double rate = (double)equal / (double)n;
        EXPECT(fabs(rate - expected) < 0.05, "%g of values round as those %zu further on, not %g",
               rate, apart, expected);
    }
}

GPU_TEST(cuda_rounding_special) {
    const uint32_t max = 0x7f7fffff, infinity = 0x7f800000, nan = 0x7f800001;
    HostFloats x(4096);
    for (size_t i = 0; i < x.size(); i++) {
        const uint32_t values[4] = {max, infinity, nan, max - 0x100};
        // each in every place of a hash
        x[i] = float_of(values[i / 4 % 4] | (i / 16 % 2 ? 0x80000000u : 0));
    }
    std::vector<real> w = rounded(x, 1, 9);
    int finite = 0, infinite = 0, nans = 0;
    for (size_t i = 0; i < x.size(); i++) {
        float got = to_float(w[i]);
        if (isnan(x[i])) nans += !isnan(got);
        else if (isinf(x[i])) infinite += got != x[i];
        else finite += !isfinite(got) || signbit(got) != signbit(x[i]) || fabsf(got) < 3e38f;
    }
    EXPECT(finite == 0, "%d large numbers became infinite, or others", finite);
    EXPECT(infinite == 0, "%d infinities changed", infinite);
    EXPECT(nans == 0, "%d NaN became numbers", nans);
}
