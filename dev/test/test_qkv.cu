// test_qkv.cu: the norms of q, k and v and rotary positions between the fused product and attention (llmc/qkv.cuh), against their equations in double.
#include "gpu_test.cuh"
#include "../../llmc/qkv.cuh"

// on: which of q, k, v have a norm (bits 0, 1, 2); full: statistics over the full part (the same bits); scratch: 0, or this many floats.
struct QkvCase { int B, T, NH, KV, HS, rope, on, full, bias; size_t scratch; };

static QkvCase qkv_case;                                       // the one that runs, for messages

static const char *describe(const char *what) {
    static char text[200];
    const QkvCase &k = qkv_case;
    snprintf(text, sizeof text, "%s: B %d, T %d, heads %d and %d of %d, rope %d, norms %d, full %d, bias %d, scratch %zu", what, k.B, k.T, k.NH, k.KV, k.HS, k.rope, k.on,
             k.full, k.bias, k.scratch);
    return text;
}

// One of q, k, v: n rows of heads * HS values out of rows of ld, with what a norm of it needs.
struct Part {
    Norm norm;
    Values w, b, dw, db;
    int offset, width, on, rotates;
};

static double *at(Values &x, const Part &part, int ld, int64_t row) { return &x[row * ld + part.offset]; }

static void make_part(Part *part, const QkvCase &k, int p, int offset) {
    int heads = p ? k.KV : k.NH, full = k.full >> p & 1, gains = full ? heads * k.HS : k.HS, stats = k.B * k.T * (full ? 1 : heads);
    part->offset = offset, part->width = heads * k.HS, part->on = k.on >> p & 1, part->rotates = k.rope && p < 2;
    part->w = random_values(gains, 70 + p, 0.3, 1.2), part->dw = random_values(gains, 73 + p), part->b.clear(), part->db.clear();
    if (k.bias) part->b = random_values(gains, 76 + p, 0.5), part->db = random_values(gains, 79 + p);
    part->norm = {};
    if (!part->on) return;
    part->norm = {site_heads(1, full ? FULL : HEAD, heads, k.HS, k.bias), device_copy<real>(&part->w), k.bias ? device_copy<real>(&part->b) : nullptr,
                  device_copy<wide>(&part->dw), k.bias ? device_copy<wide>(&part->db) : nullptr, k.bias ? device_empty<wide>(stats) : nullptr,
                  device_empty<wide>(stats), (int64_t)k.B * k.T, 1e-5f};
}

static void free_part(Part *part) {
    cudaFree((void *)part->norm.w), cudaFree((void *)part->norm.b), cudaFree(part->norm.dw), cudaFree(part->norm.db), cudaFree(part->norm.mean), cudaFree(part->norm.rstd);
}

// A row's part turns as complex numbers do: (x_i + j x_(i + HS/2)) e^(j angle).
static void turn(double *x, const QkvCase &k, int heads, int t, double direction) {
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < k.HS / 2; i++) {
            double angle = direction * t * pow(10000, -2.0 * i / k.HS), *even = x + h * k.HS + i, *odd = even + k.HS / 2;
            double first = *even * cos(angle) - *odd * sin(angle);
            *odd = *even * sin(angle) + *odd * cos(angle);
            *even = first;
        }
}

// xhat of a group and its rstd.
static double normalize(Values *xhat, const double *x, int width, int bias) {
    double mean = 0, square = 0;
    for (int i = 0; i < width && bias; i++) mean += x[i] / width;
    for (int i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean) / width;
    xhat->resize(width);
    for (int i = 0; i < width; i++) (*xhat)[i] = (x[i] - mean) / sqrt(square + 1e-5);
    return 1 / sqrt(square + 1e-5);
}

// x of one part of one row: N(x), then turned.
static void part_forward(double *x, const Part &part, const QkvCase &k, int t) {
    int group = part.on ? part.norm.site.width : part.width;
    Values xhat;
    for (int g = 0; part.on && g < part.width; g += group) {
        normalize(&xhat, x + g, group, k.bias);
        for (int i = 0; i < group; i++) x[g + i] = part.w[i] * xhat[i] + (k.bias ? part.b[i] : 0);
    }
    if (part.rotates) turn(x, k, part.width / k.HS, t, 1);
}

// d: the gradient of what part_forward made of x; becomes the gradient of x. Adds to the gradients of gain and bias.
static void part_backward(double *d, const double *x, const Part &part, const QkvCase &k, int t, Values *dw, Values *db) {
    int group = part.on ? part.norm.site.width : part.width;
    Values xhat;
    if (part.rotates) turn(d, k, part.width / k.HS, t, -1);
    for (int g = 0; part.on && g < part.width; g += group) {
        double rstd = normalize(&xhat, x + g, group, k.bias), u = 0, ux = 0;
        for (int i = 0; i < group; i++) {
            (*dw)[i] += d[g + i] * xhat[i];
            if (k.bias) (*db)[i] += d[g + i], u += part.w[i] * d[g + i] / group;
            ux += part.w[i] * d[g + i] * xhat[i] / group;
        }
        for (int i = 0; i < group; i++) d[g + i] = rstd * (part.w[i] * d[g + i] - u - xhat[i] * ux);
    }
}

// Forward: normed holds the parts with a norm and nothing else, raw turns where there is none.
static void check_forward(const QkvCase &k, Part part[3], const Norm norms[3], QkvShape s, const Values &raw, int ld) {
    Values want = raw, empty(raw.size(), NAN), copy = raw;
    int n = k.B * k.T;
    real *d_raw = device_copy<real>(&copy), *d_normed = k.on ? device_empty<real>(raw.size()) : nullptr;
    qkv_forward(d_normed, d_raw, norms, s, test_gpu());
    Values got_raw = host_values(d_raw, raw.size()), got_normed = k.on ? host_values(d_normed, raw.size()) : empty;
    for (int p = 0; p < 3; p++) {
        double error = 0, norm = 0, other = 0;
        for (int row = 0; row < n; row++) {
            part_forward(at(want, part[p], ld, row), part[p], k, row % k.T);
            for (int64_t i = (int64_t)row * ld + part[p].offset; i < (int64_t)row * ld + part[p].offset + part[p].width; i++) {
                error += pow((part[p].on ? got_normed : got_raw)[i] - want[i], 2), norm += want[i] * want[i];
                if (part[p].on || !part[p].rotates) other += got_raw[i] != raw[i];
                if (!part[p].on) other += !isnan(got_normed[i]);
            }
        }
        EXPECT(error <= TOLERANCE * norm, "%s, part %d: normalized mean squared error %.3g", describe("forward"), p, error / norm);
        EXPECT(other == 0, "%s, part %d: %g values changed that should not", describe("forward"), p, other);
    }
    cudaFree(d_raw), cudaFree(d_normed);
}

// Backward twice, as gains and biases accumulate; the second time with draw = dnormed where every part has a norm.
static void check_backward(const QkvCase &k, Part part[3], const Norm norms[3], QkvShape s, const Values &raw, int ld) {
    Values d = random_values(raw.size(), 91), want = d, copy = raw, start(raw.size(), NAN);
    int n = k.B * k.T;
    real *d_raw = device_copy<real>(&copy), *d_dnormed = device_copy<real>(&d);
    want = d;
    for (int row = 0; row < n; row++)                          // draw begins as NaN where a norm sets it, as the gradient where it turns in place
        for (int p = 0; p < 3; p++)
            if (!part[p].on)
                for (int64_t i = (int64_t)row * ld + part[p].offset; i < (int64_t)row * ld + part[p].offset + part[p].width; i++) start[i] = d[i];
    real *d_draw = device_copy<real>(&start);
    Gpu gpu = *test_gpu();
    if (k.scratch) gpu.scratch_size = k.scratch, gpu.scratch = device_empty<float>(k.scratch);
    qkv_backward(d_draw, d_dnormed, d_raw, norms, s, &gpu);
    Values dw[3], db[3];
    for (int p = 0; p < 3; p++) {
        dw[p].resize(part[p].w.size()), db[p].resize(part[p].b.size());
        for (int row = 0; row < n; row++) part_backward(at(want, part[p], ld, row), &copy[row * ld + part[p].offset], part[p], k, row % k.T, &dw[p], &db[p]);
    }
    expect_close(d_draw, want, describe("gradient"));
    bool in_place = k.on == 7;
    Values once = host_values(d_draw, raw.size());
    if (!in_place) cudaFree(d_draw), d_draw = device_copy<real>(&start);
    qkv_backward(in_place ? d_dnormed : d_draw, d_dnormed, d_raw, norms, s, &gpu);
    EXPECT(host_values(in_place ? d_dnormed : d_draw, raw.size()) == once, "%s", describe("another gradient the second time"));
    for (int p = 0; p < 3; p++) {
        if (!part[p].on) continue;
        for (size_t j = 0; j < dw[p].size(); j++) part[p].dw[j] += 2 * dw[p][j];
        for (size_t j = 0; j < db[p].size(); j++) part[p].db[j] += 2 * db[p][j];
        expect_close(part[p].norm.dw, part[p].dw, describe("gradient of a gain"));
        if (k.bias) expect_close(part[p].norm.db, part[p].db, describe("gradient of a bias"));
    }
    if (k.scratch) cudaFree(gpu.scratch);
    cudaFree(d_raw), cudaFree(d_dnormed), cudaFree(d_draw);
}

static void check_qkv(QkvCase k) {
    int ld = (k.NH + 2 * k.KV) * k.HS;
    qkv_case = k;
    Values raw = random_values((size_t)k.B * k.T * ld, 90, 1, 0.5);
    real *rounded = device_copy<real>(&raw);
    std::vector<float2> table((size_t)k.T * k.HS / 2);
    float2 *rotary = nullptr;
    if (k.rope) {
        rotary_table(table.data(), k.T, k.HS, 10000);
        cudaCheck(cudaMalloc((void **)&rotary, table.size() * sizeof(float2)));
        cudaCheck(cudaMemcpy(rotary, table.data(), table.size() * sizeof(float2), cudaMemcpyHostToDevice));
    }
    Part part[3];
    for (int p = 0; p < 3; p++) make_part(&part[p], k, p, (p > 0 ? k.NH : 0) * k.HS + (p > 1 ? k.KV : 0) * k.HS);
    Norm norms[3] = {part[0].norm, part[1].norm, part[2].norm};
    QkvShape s = {k.B, k.T, k.NH, k.KV, k.HS, rotary};
    check_forward(k, part, norms, s, raw, ld);
    check_backward(k, part, norms, s, raw, ld);
    for (int p = 0; p < 3; p++) free_part(&part[p]);
    cudaFree(rounded), cudaFree(rotary);
}

// Every choice of norms, with and without rope, over heads and over full parts.
GPU_TEST(cuda_qkv) {
    for (int on = 0; on < 8; on++)
        for (int rope = 0; rope < 2; rope++)
            for (int bias = 0; bias < 2; bias++) {
                check_qkv({2, 5, 3, 1, 32, rope, on, 0, bias, 0});
                check_qkv({1, 3, 4, 2, 64, rope, on, 7, bias, 0});
            }
    check_qkv({2, 3, 4, 2, 32, 1, 5, 4, 0, 0});                // a head's norm beside a full one
}

// Sizes of heads, full parts of every size of team.
GPU_TEST(cuda_qkv_sizes) {
    for (int HS : {32, 48, 64, 96, 128})
        for (int on = 0; on < 8; on += 7) check_qkv({2, 7, 2, 2, HS, 1, on, 0, 0, 0});
    const int widths[] = {256, 768, 1536, 3072, 6144};
    for (int i = 0; i < 5; i++) check_qkv({1, 3, widths[i] / 128, 1, 128, 1, 3, 7, i % 2, 0});
}

// Many lines for each team: little scratch, few chunks, and an odd number of heads, so that a team's lines change head and row at once.
GPU_TEST(cuda_qkv_chunks) {
    check_qkv({3, 31, 5, 3, 32, 1, 7, 0, 1, 2 * 2 * 3 * 32});
    check_qkv({2, 19, 3, 1, 64, 1, 3, 7, 0, 2 * (192 + 64)});
}
