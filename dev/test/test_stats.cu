// test_stats.cu: what --norms-every shows of layers and tensors (llmc/stats.cuh). Truth is plain
// loops in double.
#include "gpu_test.cuh"
#include "../../llmc/stats.cuh"

// Values are float in both precisions, from what is stored; squares add up in double.
static const double BOUND = 1e-6;

template <typename T> static T *device_struct(const T *host, size_t count) {
    T *device;
    cudaCheck(cudaMalloc((void **)&device, count * sizeof(T)));
    cudaCheck(cudaMemcpy(device, host, count * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

template <typename T> static std::vector<T> host_struct(const T *device, size_t count) {
    std::vector<T> host(count);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy((void *)host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

static bool close_to(double got, double want) { return fabs(got - want) <= BOUND * want; }

// ----------------------------------------------------------------------------------------- a layer

// The arrays of one forward. In a pair, attention's comes first and the ffn's second.
struct LayerTensors {
    const real *s[2], *skip[2], *x;
    const wide *peak;
    float a[2];
    int64_t n, peaks;
    int C;
    const real *p[2];          // nGPT, where s is y
    const wide *rstd[2];
};

static void layer_sums(LayerSums *sums, const LayerTensors &t) {
    for (int sub = 0; sub < 2; sub++)
        sublayer_stats(&sums->squares[ATTN_BRANCH + 2 * sub], t.s[sub], t.s[sub], t.skip[sub],
                       t.a[sub], t.p[sub], t.rstd[sub], t.n, t.C, test_gpu());
    squares_add(&sums->squares[STREAM], {t.x, nullptr, 0, 1}, t.n, t.C, test_gpu());
    peak_add(&sums->logit, t.peak, t.peaks, test_gpu());
}

// A forward and its share of the sums.
struct Layer {
    LayerTensors t;
    std::vector<void *> device;
    double want[LAYER_SQUARES], logit;
};

static double squares(const Values &x, double a = 0, const Values &y = {}) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); i++) sum += pow(x[i] - (y.empty() ? 0 : a * y[i]), 2);
    return sum;
}

// Every tensor of its own size, so that none is taken for another. Peaks are below 0.
static Layer layer_make(int64_t n, int C, int NH, uint64_t seed) {
    Layer f = {};
    const int64_t size = n * C;
    f.t.n = n, f.t.C = C, f.t.peaks = n * NH, f.t.a[0] = 1.5f, f.t.a[1] = 0.75f;
    for (int sub = 0; sub < 2; sub++) {
        Values s = random_values(size, seed + sub, 2 + sub);
        Values skip = random_values(size, seed + 2 + sub, 0.5 + sub);
        f.device.push_back((void *)(f.t.s[sub] = device_copy<real>(&s)));
        f.device.push_back((void *)(f.t.skip[sub] = device_copy<real>(&skip)));
        f.want[sub ? FFN_BRANCH : ATTN_BRANCH] = squares(s, f.t.a[sub], skip);
        f.want[sub ? FFN_SKIP : ATTN_SKIP] = pow(f.t.a[sub], 2) * squares(skip);
    }
    Values x = random_values(size, seed + 4, 5);
    Values peak = random_values(f.t.peaks, seed + 5, 1, -20);
    f.device.push_back((void *)(f.t.x = device_copy<real>(&x)));
    f.device.push_back((void *)(f.t.peak = device_copy<wide>(&peak)));
    f.want[STREAM] = squares(x);
    f.logit = -INFINITY;
    for (double p : peak) f.logit = fmax(f.logit, p);
    return f;
}

static void layer_free(const Layer &f) {
    for (void *p : f.device) cudaFree(p);
}

// Two forwards, the second shorter, over sums that begin at something.
static void check_layer(int64_t n, int C, int NH) {
    static const char *const NAMES[] = {"stream", "attention's branch", "attention's skip",
                                        "the ffn's branch", "the ffn's skip"};
    LayerSums begin = {{1, 2, 3, 4, 5}, -1e30f}, *sums = device_struct(&begin, 1);
    double want[LAYER_SQUARES], logit = -1e30;
    for (int k = 0; k < LAYER_SQUARES; k++) want[k] = begin.squares[k];
    for (int64_t rows : {n, n / 2 + 1}) {
        Layer f = layer_make(rows, C, NH, 300 + (uint64_t)rows);
        layer_sums(sums, f.t);
        LayerSums got = host_struct(sums, 1)[0];
        logit = fmax(logit, f.logit);
        for (int k = 0; k < LAYER_SQUARES; k++) {
            want[k] += f.want[k];
            EXPECT(close_to(got.squares[k], want[k]),
                   "[%d, %d]: squares of %s are %.9g, expected %.9g", (int)rows, C, NAMES[k],
                   got.squares[k], want[k]);
        }
        EXPECT(got.logit == (float)logit, "[%d, %d]: the largest logit is %.9g, expected %.9g",
               (int)rows, C, got.logit, logit);
        layer_free(f);
    }
    cudaFree(sums);
}

GPU_TEST(cuda_layer_stats) {
    check_layer(1, 8, 1);
    check_layer(37, 40, 3);
    check_layer(301, 72, 5);
    check_layer(2, 16, 3000);                            // more peaks than values
    check_layer(331, 520, 1);                            // several blocks, none with the same share
}

// nGPT: of y forward kept 1 / RMS, and t = y / |y|; the parts of the sum are alpha t and (1 -
// alpha) skip.
GPU_TEST(cuda_layer_stats_unit) {
    const int64_t n = 301, size = n * 72;
    const int C = 72;
    Layer f = layer_make(n, C, 5, 330);
    LayerTensors plain = f.t;
    for (int sub = 0; sub < 2; sub++) {
        Values y = host_values(f.t.s[sub], size);
        Values skip = host_values(f.t.skip[sub], size);
        Values p = random_values(C, 331 + sub, 0.5);
        Values rstd(n);
        for (int64_t row = 0; row < n; row++) {
            double square = 0;
            for (int i = 0; i < C; i++) square += y[row * C + i] * y[row * C + i];
            rstd[row] = (float)sqrt(C / square);
        }
        f.device.push_back((void *)(f.t.rstd[sub] = device_copy<wide>(&rstd)));
        f.device.push_back((void *)(f.t.p[sub] = device_copy<real>(&p)));
        f.want[sub ? FFN_BRANCH : ATTN_BRANCH] = f.want[sub ? FFN_SKIP : ATTN_SKIP] = 0;
        for (int64_t i = 0; i < size; i++) {
            double alpha = 0.05 * sqrt(C) * fabs(p[i % C]);
            f.want[sub ? FFN_BRANCH : ATTN_BRANCH] += pow(alpha * y[i] * rstd[i / C] / sqrt(C), 2);
            f.want[sub ? FFN_SKIP : ATTN_SKIP] += pow((1 - alpha) * skip[i], 2);
        }
    }
    LayerSums begin = {{}, -INFINITY}, *sums = device_struct(&begin, 1);
    layer_sums(sums, f.t);
    LayerSums got = host_struct(sums, 1)[0];
    for (int k = 0; k < LAYER_SQUARES; k++)
        EXPECT(close_to(got.squares[k], f.want[k]), "sum %d of squares is %.9g, expected %.9g", k,
               got.squares[k], f.want[k]);
    EXPECT(got.logit == (float)f.logit && !plain.p[0], "the largest logit is %.9g, expected %.9g",
           got.logit, f.logit);
    layer_free(f), cudaFree(sums);
}

// Values whose squares are beyond float, and whose sum no float holds.
GPU_TEST(cuda_layer_stats_large) {
    Layer f = layer_make(9, 40, 1, 310);
    Values x = random_values(9 * 40, 311, 1e30);
    real *large = device_copy<real>(&x);
    f.t.x = large;
    LayerSums begin = {}, *sums = device_struct(&begin, 1);
    layer_sums(sums, f.t);
    double got = host_struct(sums, 1)[0].squares[STREAM];
    EXPECT(close_to(got, squares(x)), "a stream of 1e30: %g, expected %g", got, squares(x));
    layer_free(f), cudaFree(large), cudaFree(sums);
}

// One NaN among the peaks, wherever it is, is the largest, and stays so over the forwards that
// follow. Nothing else of them shows it.
GPU_TEST(cuda_layer_stats_not_finite) {
    Layer f = layer_make(301, 72, 5, 320);
    for (int64_t at : {(int64_t)0, (int64_t)31, (int64_t)700, f.t.peaks - 1}) {
        Values peak = host_values(f.t.peak, f.t.peaks);
        LayerSums begin = {{}, -INFINITY}, *sums = device_struct(&begin, 1);
        peak[at] = NAN;
        wide *spoiled = device_copy<wide>(&peak);
        LayerTensors t = f.t;
        t.peak = spoiled;
        layer_sums(sums, t);
        LayerSums once = host_struct(sums, 1)[0];
        layer_sums(sums, f.t);
        LayerSums twice = host_struct(sums, 1)[0];
        EXPECT(isnan(once.logit) && isnan(twice.logit),
               "a NaN at %d of %d peaks: %g, and %g after another forward", (int)at, (int)f.t.peaks,
               once.logit, twice.logit);
        EXPECT(close_to(once.squares[STREAM], f.want[STREAM]),
               "a NaN among the peaks changes the stream's squares");
        cudaFree(spoiled), cudaFree(sums);
    }
    layer_free(f);
}

// ----------------------------------------------------------------------------------------- tensors

// Long and short ones, most not a multiple of 4 or of a block's share; the third was not moved, the
// last has gradients whose squares are beyond float. UNIT has lines of length 1: its weights, as
// they are, stand for those before.
static const int64_t SIZES[] = {40, 26301, 9, 1, 5000, 4096, 3, 4099, 127};
enum { TENSORS = sizeof SIZES / sizeof *SIZES, STILL = 2, UNIT = 5 };

struct Toy {
    std::vector<UpdateEntry> host;
    UpdateEntry *entries;
    Arenas t;
    AdamWStep step;
    double want[TENSORS][3];
};

// Weights before a step, and moments as after it; what the step subtracts follows, and the weights
// after it. Gaps are NaN, so whoever counts them in shows it.
static Toy toy_make() {
    Toy toy = {};
    toy.step = {0.9f, 0.95f, 1e-3f, 2.5f, 4.0f, 0, 0, 0, 0, 0};
    toy.t.total = 32;
    for (int k = 0; k < TENSORS; k++) {
        toy.host.push_back({toy.t.total, toy.t.total, SIZES[k], k == STILL ? 0 : 0.01f * (k + 1),
                            k == STILL ? 0 : 0.1f * k, k % 2 ? 1.0f : 0, k == UNIT ? 64 : 0,
                            k == UNIT});
        toy.t.total += CEIL_DIV(SIZES[k], (int64_t)32) * 32;
    }
    Values w(toy.t.total, NAN), m = w, v = w, d = w;
    for (int k = 0; k < TENSORS; k++) {
        const UpdateEntry &e = toy.host[k];
        for (int64_t i = e.offset; i < e.offset + e.size; i++) {
            double before = rand_normal(401, i);
            d[i] = (float)((k + 1 == TENSORS ? 1e25 : k + 1) * rand_normal(402, i));
            m[i] = (float)(0.1 * rand_normal(403, i));
            v[i] = (float)(0.01 * pow(rand_normal(404, i), 2));
            double step =
                e.lr * (m[i] * toy.step.correct1 / (sqrt(v[i] * toy.step.correct2) + toy.step.eps) +
                        e.decay * (before - e.target));
            w[i] = k == UNIT ? before = (float)before : before - step;
            if (k == UNIT)
                step = e.lr *
                       (m[i] * toy.step.correct1 / (sqrt(v[i] * toy.step.correct2) + toy.step.eps) +
                        e.decay * (before - e.target));
            toy.want[k][0] += d[i] * d[i];
            toy.want[k][1] += before * before;
            toy.want[k][2] += step * step;
        }
    }
    toy.entries = device_struct(toy.host.data(), TENSORS);
    toy.t.master = device_copy<float>(&w), toy.t.m = device_copy<float>(&m),
    toy.t.v = device_copy<float>(&v), toy.t.d = device_copy<float>(&d);
    return toy;
}

// The sums, and behind the last of them what was there before.
static std::vector<TensorStats> toy_sums(const Toy &toy) {
    std::vector<TensorStats> nothing(TENSORS + 1, TensorStats{-1, -1, -1});
    TensorStats *sums = device_struct(nothing.data(), TENSORS + 1);
    for (int k = 0; k < TENSORS; k++)
        tensor_sums(sums + k, toy.t, toy.entries + k, toy.step, test_gpu(), nullptr);
    std::vector<TensorStats> got = host_struct(sums, TENSORS + 1);
    cudaFree(sums);
    return got;
}

GPU_TEST(cuda_tensor_stats) {
    static const char *const NAMES[] = {"gradient", "weights", "step"};
    Toy toy = toy_make();
    std::vector<TensorStats> all = toy_sums(toy);
    for (int k = 0; k < TENSORS; k++)
        for (int i = 0; i < 3; i++) {
            double sum = (&all[k].grad)[i];
            EXPECT(close_to(sum, toy.want[k][i]),
                   "tensor of %d: squares of its %s are %.9g, expected %.9g", (int)SIZES[k],
                   NAMES[i], sum, toy.want[k][i]);
        }
    EXPECT(all[STILL].update == 0, "a tensor that was not moved, by %g", all[STILL].update);
    EXPECT(all[TENSORS].grad == -1, "something is written behind the last tensor's sums");
    cudaFree(toy.entries), cudaFree(toy.t.master), cudaFree(toy.t.m), cudaFree(toy.t.v),
        cudaFree((void *)toy.t.d);
}
