// test_qkv.cu: the norms of q, k and v and rotary positions between the products and attention
// (llmc/qkv.cuh), against their equations in double.
#include "gpu_test.cuh"
#include "../../llmc/qkv.cuh"

// on: which of q, k, v have a norm (bits 0, 1, 2); full: statistics over the full part (the same
// bits); scratch: 0, or this many floats. unit: L2 after RoPE, and gains of their own for each
// head. R: 0, or latent attention: so many channels that turn besides the HS of a head of q and k.
// bias: NORM_RMS, which has none, NORM_LAYER or NORM_DYT.
struct QkvCase { int B, T, NH, KV, HS, rope, on, full, bias; size_t scratch; int unit, R; };

static QkvCase qkv_case;                                       // the one that runs, for messages

static const char *describe(const char *what) {
    static char text[200];
    const QkvCase &k = qkv_case;
    snprintf(text, sizeof text,
             "%s: B %d, T %d, heads %d and %d of %d, rope %d, norms %d, full %d, bias %d, scratch "
             "%zu, unit %d, R %d",
             what, k.B, k.T, k.NH, k.KV, k.HS, k.rope, k.on, k.full, k.bias, k.scratch, k.unit,
             k.R);
    return text;
}

// One of q, k, v: heads of `size` values, of which the last `turns` turn, with what a norm of it
// needs.
struct Part {
    Norm norm;
    Values w, b, dw, db, alpha, dalpha;
    int heads, size, width, on, turns;
};

static void make_part(Part *part, const QkvCase &k, int p) {
    int heads = p ? k.KV : k.NH;
    int full = k.full >> p & 1;
    int size = p < 2 ? k.HS + k.R : k.HS;
    int n = k.B * k.T;
    int stats = n * (full ? 1 : heads);
    int width = full ? heads * size : size, gains = k.unit ? heads * size : width;
    part->heads = heads, part->size = size, part->width = width, part->on = k.on >> p & 1,
    part->turns = k.R ? k.R : k.HS;
    if (!k.rope || p == 2) part->turns = 0;
    part->w = random_values(gains, 70 + p, 0.3, 1.2), part->dw = random_values(gains, 73 + p),
    part->b.clear(), part->db.clear();
    if (k.bias)
        part->b = random_values(gains, 76 + p, 0.5), part->db = random_values(gains, 79 + p);
    part->norm = {}, part->alpha.clear();
    if (!part->on) return;
    part->norm = {site_heads(k.unit ? L2 : 1, full ? FULL : HEAD, heads, size, k.bias),
                  device_copy<real>(&part->w), k.bias ? device_copy<real>(&part->b) : nullptr,
                  device_copy<wide>(&part->dw), k.bias ? device_copy<wide>(&part->db) : nullptr,
                  k.bias ? device_empty<wide>(stats) : nullptr, device_empty<wide>(stats), n,
                  k.unit ? 1e-12f : 1e-5f};
    if (k.unit) site_stored(&part->norm.site, gains, 0.3);
    if (k.bias != NORM_DYT) return;
    part->alpha = {0.5 + 0.25 * p}, part->dalpha = random_values(1, 82 + p);
    part->norm.alpha = device_copy<real>(&part->alpha);
    part->norm.dalpha = device_copy<wide>(&part->dalpha);
}

static void free_part(Part *part) {
    cudaFree((void *)part->norm.w), cudaFree((void *)part->norm.b), cudaFree(part->norm.dw),
        cudaFree(part->norm.db), cudaFree(part->norm.mean), cudaFree(part->norm.rstd),
        cudaFree((void *)part->norm.alpha), cudaFree(part->norm.dalpha);
}

// ----------------------------------------------------------------------------------- the equations

// A head's last channels turn as complex numbers do: (x_i + j x_(i + R/2)) e^(j angle).
static void turn(double *x, const Part &part, int t, double direction) {
    for (int h = 1; h <= part.heads; h++)
        for (int i = 0; i < part.turns / 2; i++) {
            double angle = direction * t * pow(10000, -2.0 * i / part.turns);
            double *even = x + h * part.size - part.turns + i;
            double *odd = even + part.turns / 2;
            double first = *even * cos(angle) - *odd * sin(angle);
            *odd = *even * sin(angle) + *odd * cos(angle);
            *even = first;
        }
}

// xhat of a group and its rstd; DyT: tanh(alpha x) and alpha.
static double normalize(Values *xhat, const double *x, const Part &part) {
    double mean = 0, square = 0;
    int width = part.width;
    for (int i = 0; i < width && !part.b.empty(); i++) mean += x[i] / width;
    for (int i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean) / width;
    xhat->resize(width);
    for (int i = 0; i < width && !part.alpha.empty(); i++) (*xhat)[i] = tanh(part.alpha[0] * x[i]);
    if (!part.alpha.empty()) return part.alpha[0];
    for (int i = 0; i < width; i++) (*xhat)[i] = (x[i] - mean) / sqrt(square + part.norm.eps);
    return 1 / sqrt(square + part.norm.eps);
}

// of value i of the group that begins at `at`
static int gain(const QkvCase &k, int at, int i) { return k.unit ? at + i : i; }

// x of one part of one row: N(x), then turned; unit, turned, then N(x).
static void part_forward(double *x, const Part &part, const QkvCase &k, int t) {
    Values xhat;
    if (k.unit) turn(x, part, t, 1);
    for (int g = 0; part.on && g < part.heads * part.size; g += part.width) {
        normalize(&xhat, x + g, part);
        for (int i = 0; i < part.width; i++)
            x[g + i] =
                part.norm.site.scale * part.w[gain(k, g, i)] * xhat[i] + (k.bias ? part.b[i] : 0);
    }
    if (!k.unit) turn(x, part, t, 1);
}

// d: the gradient of what part_forward made of x; becomes the gradient of x. Adds to the gradients
// of gain, bias and alpha.
static void part_backward(double *d, Values x, const Part &part, const QkvCase &k, int t,
                          Values *dw, Values *db, double *dalpha) {
    Values xhat;
    if (k.unit) turn(x.data(), part, t, 1);
    else turn(d, part, t, -1);
    for (int g = 0; part.on && g < part.heads * part.size; g += part.width) {
        double rstd = normalize(&xhat, &x[g], part), u = 0, ux = 0, scale = part.norm.site.scale;
        for (int i = 0; i < part.width; i++) {
            double du = scale * part.w[gain(k, g, i)] * d[g + i] / part.width;
            (*dw)[gain(k, g, i)] += scale * d[g + i] * xhat[i];
            if (k.bias) (*db)[i] += d[g + i], u += du;
            ux += du * xhat[i];
        }
        for (int i = 0; i < part.width; i++) {
            double v = scale * part.w[gain(k, g, i)] * d[g + i];
            d[g + i] = rstd * (v - u - xhat[i] * ux);
            if (part.alpha.empty()) continue;
            v *= 1 - xhat[i] * xhat[i];
            d[g + i] = part.alpha[0] * v, *dalpha += v * x[g + i];
        }
    }
    if (k.unit) turn(d, part, t, -1);
}

// -------------------------------------------------------------------------------- where things lie
// Three arrays: what q, k and v are made in, two in latent attention ([q | gap | what turns of k]
// and [k | v] of each head), and what attention reads.

enum { MADE, MADE_B, READ, ARRAYS, GAP = 16 };

struct Room {
    QkvCase k;
    int n, QK, ld[ARRAYS];
    Values host[ARRAYS];
    real *device[ARRAYS];

    Room(const QkvCase &c) : k(c), n(c.B * c.T), QK(c.HS + c.R) {
        ld[MADE] = k.R ? k.NH * QK + GAP + k.R : (k.NH + 2 * k.KV) * k.HS,
        ld[MADE_B] = 2 * k.NH * k.HS, ld[READ] = (k.NH + k.KV) * QK + k.KV * k.HS;
        for (int a = 0; a < ARRAYS; a++)
            host[a].assign((size_t)n * ld[a], NAN), device[a] = nullptr;
    }
    void send() { for (int a = 0; a < ARRAYS; a++) device[a] = device_copy<real>(&host[a]); }
    Values now(int a) const { return host_values(device[a], host[a].size()); }
    ~Room() { for (real *p : device) cudaFree(p); }

    // of a part in a row of READ, and in the one row of heads that are alike
    int start(int p) const { return p == 0 ? 0 : p == 1 ? k.NH * QK : (k.NH + k.KV) * QK; }
    bool apart(int p) const { return (k.on >> p & 1) || (k.R && p == 1); }

    // Array and index of channel c of a head, as made and as read. each: what turns of k, of each
    // head.
    void made(int p, int row, int h, int c, int *a, int64_t *at, bool each) const {
        *a = MADE, *at = (int64_t)row * ld[MADE] + start(p) + h * k.HS + c;
        if (!k.R) return;
        if (p == 1 && c >= k.HS && each) return read(p, row, h, c, a, at);
        if (p == 1 && c >= k.HS) *at = (int64_t)row * ld[MADE] + ld[MADE] - k.R + c - k.HS;
        else if (p == 0) *at = (int64_t)row * ld[MADE] + h * QK + c;
        else *a = MADE_B, *at = (int64_t)row * ld[MADE_B] + (2 * h + p - 1) * k.HS + c;
    }
    void read(int p, int row, int h, int c, int *a, int64_t *at) const {
        if (!apart(p)) return made(p, row, h, c, a, at, false);
        *a = READ, *at = (int64_t)row * ld[READ] + start(p) + h * (p < 2 ? QK : k.HS) + c;
    }

    QkvPlaces made_places(bool each) const {
        if (!k.R) return qkv_row(device[MADE], k.NH, k.KV, k.HS, k.HS);
        real *turned = device[MADE] + ld[MADE] - k.R, *b = device[MADE_B];
        QkvPlaces places = {{{device[MADE], ld[MADE], QK},
                             {b, ld[MADE_B], 2 * k.HS},
                             {b + k.HS, ld[MADE_B], 2 * k.HS}},
                            {{device[MADE] + k.HS, ld[MADE], QK}, {turned, ld[MADE], 0}, {}}};
        if (each) places.turned[1] = read_places().turned[1];
        return places;
    }
    QkvPlaces read_places() const {
        QkvPlaces places = made_places(false);
        for (int p = 0; p < 3; p++) {
            real *at = device[READ] + start(p);
            int size = p < 2 ? QK : k.HS;
            if (apart(p))
                places.of[p] = {at, ld[READ], size}, places.turned[p] = {at + k.HS, ld[READ], size};
        }
        return places;
    }
};

// One part of one row, from where it is made or read.
static Values gather(const Room &r, const Part &part, int p, int row, bool read) {
    Values x;
    for (int h = 0; h < part.heads; h++)
        for (int c = 0; c < part.size; c++) {
            int a;
            int64_t at;
            if (read) r.read(p, row, h, c, &a, &at);
            else r.made(p, row, h, c, &a, &at, false);
            x.push_back(r.host[a][at]);
        }
    return x;
}

// Expects what is computed to lie in the room's arrays, part for part, and everything else to be as
// it was. to_read: at the places attention reads.
static void expect_room(const Room &r, const Part part[3], const std::vector<Values> want[3],
                        bool to_read, const char *what) {
    Values got[ARRAYS] = {r.now(MADE), r.now(MADE_B), r.now(READ)};
    int64_t other = 0;
    std::vector<bool> seen[ARRAYS];
    for (int a = 0; a < ARRAYS; a++) seen[a].assign(got[a].size(), false);
    for (int p = 0; p < 3; p++) {
        double error = 0, norm = 0;
        for (int row = 0; row < r.n; row++)
            for (int h = 0; h < part[p].heads; h++)
                for (int c = 0; c < part[p].size; c++) {
                    int a;
                    int64_t at;
                    double value = want[p][row][h * part[p].size + c];
                    if (to_read) r.read(p, row, h, c, &a, &at);
                    else r.made(p, row, h, c, &a, &at, true);
                    seen[a][at] = true;
                    error += pow(got[a][at] - value, 2), norm += value * value;
                }
        EXPECT(error <= TOLERANCE * norm, "%s, part %d: normalized mean squared error %.3g",
               describe(what), p, error / norm);
    }
    for (int a = 0; a < ARRAYS; a++)
        for (size_t i = 0; i < got[a].size(); i++)
            other += !seen[a][i] && got[a][i] != r.host[a][i] &&
                     !(isnan(got[a][i]) && isnan(r.host[a][i]));
    EXPECT(other == 0, "%s: %d values changed that should not", describe(what), (int)other);
}

// ------------------------------------------------------------------------------------------ checks

static void check_forward(Room *r, const Part part[3], const Norm norms[3], QkvShape s) {
    std::vector<Values> want[3];
    r->send();
    QkvPlaces made = r->made_places(false), read = r->read_places();
    qkv_forward(qkv_parts(read, {}, made, norms, s), test_gpu());
    for (int p = 0; p < 3; p++)
        for (int row = 0; row < r->n; row++) {
            want[p].push_back(gather(*r, part[p], p, row, false));
            part_forward(want[p][row].data(), part[p], r->k, row % r->k.T);
        }
    expect_room(*r, part, want, true, "forward");
}

// Backward twice, as gains and biases accumulate; the second time in the place of d where every
// part lies alike.
static void check_backward(const Room &r, Part part[3], const Norm norms[3], QkvShape s) {
    const QkvCase &k = r.k;
    Values dw[3], db[3];
    double dalpha[3] = {0, 0, 0};
    std::vector<Values> want[3];
    Room d(k), again(k);
    for (int p = 0; p < 3; p++)
        for (int row = 0; row < r.n; row++)
            for (int h = 0; h < part[p].heads; h++)
                for (int c = 0; c < part[p].size; c++) {
                    int a;
                    int64_t at;
                    d.read(p, row, h, c, &a, &at);
                    d.host[a][at] = rand_normal(91 + p, ((uint64_t)row * 64 + h) * 512 + c);
                }
    d.send();
    for (int a = 0; a < ARRAYS; a++) again.host[a] = d.host[a];
    again.send();
    Gpu gpu = *test_gpu();
    if (k.scratch) gpu.scratch_size = k.scratch, gpu.scratch = device_empty<float>(k.scratch);
    bool in_place = k.on == 7 && !k.R;
    QkvPlaces made = r.made_places(false);
    QkvPlaces dmade = d.made_places(true);
    QkvPlaces dread = d.read_places();
    QkvPlaces made2 = again.made_places(true);
    QkvPlaces read2 = again.read_places();
    qkv_backward(qkv_parts(dmade, dread, made, norms, s), &gpu);
    qkv_backward(qkv_parts(in_place ? read2 : made2, read2, made, norms, s), &gpu);
    for (int p = 0; p < 3; p++) {
        dw[p].resize(part[p].w.size()), db[p].resize(part[p].b.size());
        for (int row = 0; row < r.n; row++) {
            want[p].push_back(gather(d, part[p], p, row, true));
            part_backward(want[p][row].data(), gather(r, part[p], p, row, false), part[p], k,
                          row % k.T, &dw[p], &db[p], &dalpha[p]);
        }
    }
    expect_room(d, part, want, false, "gradient");
    Values first = d.now(MADE), second = again.now(in_place ? READ : MADE);
    int64_t different = 0;
    for (size_t i = 0; i < first.size(); i++)
        different += first[i] != second[i] && !(isnan(first[i]) && isnan(second[i]));
    EXPECT(different == 0, "%s", describe("another gradient the second time"));
    if (k.unit)
        for (size_t j = 0; j < dw[1].size(); j++) dw[0][j] += dw[1][j];  // one gain for both
    for (int p = 0; p < 3; p++) {
        if (!part[p].on || (k.unit && p)) continue;
        for (size_t j = 0; j < dw[p].size(); j++) part[p].dw[j] += 2 * dw[p][j];
        for (size_t j = 0; j < db[p].size(); j++) part[p].db[j] += 2 * db[p][j];
        expect_close(part[p].norm.dw, part[p].dw, describe("gradient of a gain"));
        if (k.bias) expect_close(part[p].norm.db, part[p].db, describe("gradient of a bias"));
        if (!part[p].alpha.empty())
            expect_close(part[p].norm.dalpha, {part[p].dalpha[0] + 2 * dalpha[p]},
                         describe("gradient of an alpha"));
    }
    if (k.scratch) cudaFree(gpu.scratch);
}

static void check_qkv(QkvCase k) {
    qkv_case = k;
    int turns = k.R ? k.R : k.HS;
    std::vector<float2> table((size_t)k.T * turns / 2);
    float2 *rotary = nullptr;
    if (k.rope) {
        Model m = {};
        m.HS = turns, m.theta = 10000;
        rotary_table(table.data(), k.T, &m);
        cudaCheck(cudaMalloc((void **)&rotary, table.size() * sizeof(float2)));
        cudaCheck(cudaMemcpy(rotary, table.data(), table.size() * sizeof(float2),
                             cudaMemcpyHostToDevice));
    }
    Part part[3];
    for (int p = 0; p < 3; p++) make_part(&part[p], k, p);
    Norm norms[3] = {part[0].norm, part[1].norm, part[2].norm};
    if (k.unit) part[1].w = part[0].w, norms[1].w = norms[0].w, norms[1].dw = norms[0].dw;
    QkvShape s = {k.B, k.T, k.NH, k.KV, k.HS + k.R, turns, k.HS, rotary};
    Room room(k);
    room.host[MADE] = random_values(room.host[MADE].size(), 90, 1, 0.5),
    room.host[MADE_B] = random_values(room.host[MADE_B].size(), 89, 1, 0.5);
    check_forward(&room, part, norms, s);
    // backward of a part without a norm needs nothing of it, one with a norm what it was
    real *turned = room.device[MADE];
    room.device[MADE] = device_copy<real>(&room.host[MADE]);
    cudaFree(turned);
    check_backward(room, part, norms, s);
    for (int p = 0; p < 3; p++) free_part(&part[p]);
    cudaFree(rotary);
}

// Every choice of norms, with and without rope, over heads and over full parts.
GPU_TEST(cuda_qkv) {
    for (int on = 0; on < 8; on++)
        for (int rope = 0; rope < 2; rope++)
            for (int bias = 0; bias < 2; bias++) {
                check_qkv({2, 5, 3, 1, 32, rope, on, 0, bias, 0, 0, 0});
                check_qkv({1, 3, 4, 2, 64, rope, on, 7, bias, 0, 0, 0});
            }
    check_qkv({2, 3, 4, 2, 32, 1, 5, 4, 0, 0, 0, 0});          // a head's norm beside a full one
}

// Sizes of heads, full parts of every size of team.
GPU_TEST(cuda_qkv_sizes) {
    for (int HS : {32, 48, 64, 96, 128})
        for (int on = 0; on < 8; on += 7) check_qkv({2, 7, 2, 2, HS, 1, on, 0, 0, 0, 0, 0});
    const int widths[] = {256, 768, 1536, 3072, 6144};
    for (int width : widths)
        for (int bias = 0; bias < 2; bias++)
            check_qkv({1, 3, width / 128, 1, 128, 1, 3, 7, bias, 0, 0, 0});
}

// Many lines for each team: little scratch, few chunks, and an odd number of heads, so that a
// team's lines change head and row at once.
GPU_TEST(cuda_qkv_chunks) {
    check_qkv({3, 31, 5, 3, 32, 1, 7, 0, 1, 2 * 2 * 3 * 32, 0, 0});
    check_qkv({2, 19, 3, 1, 64, 1, 3, 7, 0, 2 * (192 + 64), 0, 0});
    check_qkv({2, 150, 3, 3, 32, 1, 3, 0, 0, 3 * 2 * 96, 1, 0});
    check_qkv({2, 31, 3, 3, 32, 1, 7, 0, 1, 2 * 2 * 3 * 48, 0, 16});
}

// DyT, over heads and over full parts; every team; parts without a norm; several lines a team;
// latent attention.
GPU_TEST(cuda_qkv_dyt) {
    for (int on = 1; on < 8; on++)
        check_qkv({2, 5, 4, 2, 32, on % 3 > 0, on, 0, NORM_DYT, 0, 0, 0});
    for (int HS : {48, 64, 96, 128}) check_qkv({2, 7, 2, 2, HS, 1, 7, 0, NORM_DYT, 0, 0, 0});
    for (int width : {256, 768, 1536, 3072, 6144})
        check_qkv({1, 3, width / 128, 1, 128, 1, 3, 7, NORM_DYT, 0, 0, 0});
    check_qkv({3, 31, 5, 3, 32, 1, 7, 0, NORM_DYT, 2 * 3 * (2 * 32 + FOUR), 0, 0});
    check_qkv({2, 5, 3, 3, 32, 1, 7, 0, NORM_DYT, 0, 0, 16});
    check_qkv({1, 3, 4, 4, 64, 1, 3, 7, NORM_DYT, 0, 0, 32});
    check_qkv({2, 3, 2, 2, 128, 1, 7, 0, NORM_DYT, 0, 0, 64});
}

// nGPT's order, with positions and without: q and k alike, v plain.
GPU_TEST(cuda_qkv_unit) {
    for (int rope = 0; rope < 2; rope++) {
        check_qkv({2, 5, 3, 3, 32, rope, 3, 0, 0, 0, 1, 0});
        check_qkv({1, 7, 2, 2, 128, rope, 3, 0, 0, 0, 1, 0});
    }
    check_qkv({2, 5, 3, 3, 32, 1, 3, 0, 0, 0, 1, 16});
    check_qkv({1, 5, 2, 2, 128, 1, 3, 0, 0, 0, 1, 64});
}

// Latent attention: every choice of norms, over heads and over full parts, and the head sizes of
// attention.
GPU_TEST(cuda_qkv_latent) {
    for (int on = 0; on < 8; on++) {
        check_qkv({2, 5, 3, 3, 32, 1, on, 0, on % 2, 0, 0, 16});
        check_qkv({1, 3, 4, 4, 64, 1, on, 7, 1 - on % 2, 0, 0, 32});
    }
    for (int on = 0; on < 8; on += 7) check_qkv({2, 3, 2, 2, 128, 1, on, 0, 0, 0, 0, 64});
    check_qkv({1, 2, 16, 16, 128, 1, 3, 3, 0, 0, 0, 64});
}

// The latent's norm from and to rows of something wider.
static void check_latent_norm(int n, int width, int bias) {
    const int ld = width + 48, offset = 32;
    QkvCase k = {1, n, 1, 1, width, 0, 1, 0, bias, 0, 0, 0};
    Part part;
    qkv_case = k;
    make_part(&part, k, 0);
    Values rows = random_values((size_t)n * ld, 95, 1, 0.5);
    Values d = random_values((size_t)n * width, 96);
    Values empty(rows.size(), NAN), want_y, want_dx(rows.size(), NAN), dw(width), db(part.b.size());
    double dalpha = 0;
    real *d_rows = device_copy<real>(&rows);
    real *d_d = device_copy<real>(&d);
    real *d_y = device_empty<real>(d.size());
    real *d_dx = device_copy<real>(&empty);
    Heads y = {d_y, width, width}, raw = {d_rows + offset, ld, width};
    Heads dx = {d_dx + offset, ld, width}, dy = {d_d, width, width};
    qkv_forward(latent_parts(y, {}, raw, &part.norm), test_gpu());
    qkv_backward(latent_parts(dx, dy, raw, &part.norm), test_gpu());
    for (int row = 0; row < n; row++) {
        Values x(rows.begin() + row * ld + offset, rows.begin() + row * ld + offset + width),
            dx_row(d.begin() + row * width, d.begin() + (row + 1) * width);
        part_backward(dx_row.data(), x, part, k, 0, &dw, &db, &dalpha);
        part_forward(x.data(), part, k, 0);
        want_y.insert(want_y.end(), x.begin(), x.end());
        std::copy(dx_row.begin(), dx_row.end(), want_dx.begin() + row * ld + offset);
    }
    expect_close(d_y, want_y, describe("the latent's norm"));
    Values got = host_values(d_dx, rows.size()), inside, want_inside;
    int other = 0;
    for (size_t i = 0; i < got.size(); i++) {
        if (isnan(want_dx[i])) other += !isnan(got[i]);
        else inside.push_back(got[i]), want_inside.push_back(want_dx[i]);
    }
    EXPECT(other == 0 && nmse(inside, want_inside) <= TOLERANCE,
           "%s: nmse %.3g, %d values beside the latent are written",
           describe("the latent's gradient"), nmse(inside, want_inside), other);
    for (size_t j = 0; j < dw.size(); j++) part.dw[j] += dw[j];
    for (size_t j = 0; j < db.size(); j++) part.db[j] += db[j];
    expect_close(part.norm.dw, part.dw, describe("the latent's gain"));
    if (bias) expect_close(part.norm.db, part.db, describe("the latent's bias"));
    if (bias == NORM_DYT)
        expect_close(part.norm.dalpha, {part.dalpha[0] + dalpha}, describe("the latent's alpha"));
    free_part(&part);
    cudaFree(d_rows), cudaFree(d_d), cudaFree(d_y), cudaFree(d_dx);
}

GPU_TEST(cuda_qkv_latent_norm) {
    for (int bias = 0; bias < 3; bias++) {
        check_latent_norm(11, 48, bias);
        check_latent_norm(5, 512, bias);
    }
}

GPU_TEST(cuda_qkv_latent_sum) {
    const int n = 7, heads = 3, R = 32, ld = 200, head = 48, to_ld = 72;
    Values x = random_values(n * ld, 97), to(n * to_ld, NAN), want = to;
    real *d_x = device_copy<real>(&x), *d_to = device_copy<real>(&to);
    latent_sum(Heads{d_to + 16, to_ld, 0}, Heads{d_x + 8, ld, head}, n, heads, R, test_gpu());
    Values got = host_values(d_to, to.size()), inside, want_inside;
    int other = 0;
    for (int row = 0; row < n; row++)
        for (int j = 0; j < to_ld; j++) {
            if (j < 16 || j >= 16 + R) { other += !isnan(got[row * to_ld + j]); continue; }
            double sum = 0;
            for (int h = 0; h < heads; h++) sum += x[row * ld + 8 + h * head + j - 16];
            inside.push_back(got[row * to_ld + j]), want_inside.push_back(sum);
        }
    EXPECT(other == 0 && nmse(inside, want_inside) <= TOLERANCE,
           "the sum over heads: nmse %.3g, %d values beside it are written",
           nmse(inside, want_inside), other);
    cudaFree(d_x), cudaFree(d_to);
}

// Angles are computed in double: those of float would be off by a thousandth at these positions.
GPU_TEST(cuda_rotary_table) {
    const int T = 100001, R = 6;
    std::vector<float2> table((size_t)T * R / 2);
    Model m = {};
    m.HS = R, m.theta = 10;
    rotary_table(table.data(), T, &m);
    double worst = 0;
    for (int t = T - 1000; t < T; t++)
        for (int i = 0; i < R / 2; i++) {
            float2 found = table[(size_t)t * (R / 2) + i];
            double angle = t * pow(10, -2.0 * i / R);
            worst = fmax(worst, fmax(fabs(found.x - cos(angle)), fabs(found.y - sin(angle))));
        }
    EXPECT(worst < 1e-7, "cosines and sines are off by %g", worst);
}
