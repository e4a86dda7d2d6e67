// test_moe.cu: mixture of experts (llmc/moe.cuh) against its equations in double: router, rows,
// products, combination; and norms inside experts (llmc/norm.cuh).
#include "gpu_test.cuh"
#include "experts_plain.cuh"
#include "../../llmc/experts.cuh"
#include "../../llmc/norm.cuh"
#include <tuple>

typedef std::vector<int> Ints;

static int32_t *device_ints(const Ints &values) {
    int32_t *device;
    cudaCheck(cudaMalloc((void **)&device, values.size() * sizeof(int32_t)));
    cudaCheck(cudaMemcpy(device, values.data(), values.size() * sizeof(int32_t),
                         cudaMemcpyHostToDevice));
    return device;
}

static Ints host_ints(const int32_t *device, size_t n) {
    Ints values(n);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(values.data(), device, n * sizeof(int32_t), cudaMemcpyDeviceToHost));
    return values;
}

// -------------------------------------------------------------------------------------- the router

static const char *const KINDS[] = {"softmax", "softmax, renormalized", "sigmoid"};

// Logits that collide: random; all the same; or every token prefers expert 1 and none comes to
// expert 0 before all others are taken.
enum { RANDOM, EQUAL, CROWDED, LOGITS };

// A router's logits on both sides, and what plain loops make of them.
struct TestRouter {
    Router r;
    int64_t n;
    Values z, bias, gate, lse, load, share;
    Ints choice, place, start, source, tiles;
    wide *d_z, *d_bias;

    TestRouter(Router sizes, int logits, bool biased)
        : r(sizes), n((int64_t)r.B * r.T), z(random_values(n * r.E, 21, 2)) {
        for (int64_t i = 0; i < n * r.E; i++) {
            if (logits == EQUAL) z[i] = 0.5;
            if (logits == CROWDED)
                z[i] = i % r.E == 0 ? -1e4 : i % r.E == 1 ? 9 + 0.1 * z[i] : z[i];
        }
        if (biased) bias = random_values(r.E, 22, 0.3);
        d_z = device_copy<wide>(&z);
        d_bias = biased ? device_copy<wide>(&bias) : nullptr;
        r.gate = device_empty<wide>(n * r.K);
        r.lse = device_empty<wide>(n);
        r.entropy = device_empty<wide>(n);
        r.load = device_empty<wide>((r.B + 1) * r.E);
        r.share = device_empty<wide>(r.B * r.E);
        r.choice = device_empty<int32_t>(n * r.K);
        r.place = device_empty<int32_t>(n * r.K);
        r.start = device_empty<int32_t>(r.E + 1);
        r.source = device_empty<int32_t>(n * r.K);
        r.tiles = device_empty<int32_t>(2 * row_tiles(n * r.K, r.E));
        choose();
        sort();
    }
    ~TestRouter() {
        void *arrays[] = {d_z,     d_bias,   r.gate,  r.lse,   r.entropy, r.load,
                          r.share, r.choice, r.place, r.start, r.source,  r.tiles};
        for (void *p : arrays) cudaFree(p);
    }

    double log_sum(const double *z_t) const {
        double sum = 0;
        for (int j = 0; j < r.E; j++) sum += exp(z_t[j] - z_t[r.E - 1]);
        return z_t[r.E - 1] + log(sum);
    }
    double score(const double *z_t, int j) const {
        return r.kind == ROUTER_SIGMOID ? 1 / (1 + exp(-z_t[j])) : exp(z_t[j] - log_sum(z_t));
    }

    void choose() {
        gate.resize(n * r.K), choice.resize(n * r.K), lse.resize(n),
            load.assign((r.B + 1) * r.E, 0), share.assign(r.B * r.E, 0);
        for (int64_t t = 0; t < n; t++) {
            const double *z_t = &z[t * r.E];
            std::vector<bool> taken(r.E);
            double all = 0, chosen = 0;
            for (int j = 0; j < r.E; j++) all += score(z_t, j);
            for (int j = 0; j < r.E; j++) share[t / r.T * r.E + j] += score(z_t, j) / all / r.T;
            for (int k = 0; k < r.K; k++) {
                int best = -1;
                for (int j = 0; j < r.E; j++) {
                    double mine = score(z_t, j) + (bias.empty() ? 0 : bias[j]);
                    if (!taken[j] &&
                        (best < 0 || mine > score(z_t, best) + (bias.empty() ? 0 : bias[best])))
                        best = j;
                }
                taken[best] = true;
                choice[t * r.K + k] = best;
                chosen += score(z_t, best);
                load[t / r.T * r.E + best]++;
                load[r.B * r.E + best]++;
            }
            for (int k = 0; k < r.K; k++)
                gate[t * r.K + k] = r.scale * score(z_t, choice[t * r.K + k]) /
                                    (r.kind == ROUTER_SOFTMAX ? 1 : chosen);
            lse[t] = log_sum(z_t);
        }
    }

    void sort() {
        place.resize(n * r.K), source.resize(n * r.K), start.resize(r.E + 1);
        int row = 0;
        for (int e = 0; e < r.E; e++) {
            start[e] = row;
            for (int64_t i = 0; i < n * r.K; i++)
                if (choice[i] == e) source[row] = (int)(i / r.K), place[i] = row++;
            for (int first = start[e]; first < row; first += ROW_TILE)
                tiles.insert(tiles.end(), {e, first});
        }
        start[r.E] = row;
    }

    void run() {
        r.z = d_z;
        r.bias = d_bias;
        router_forward(r, test_gpu());
    }

    void expect(const char *what) const {
        Ints got_tiles = host_ints(r.tiles, 2 * row_tiles(n * r.K, r.E));
        EXPECT(host_ints(r.choice, choice.size()) == choice, "%s: another choice", what);
        EXPECT(host_values(r.load, load.size()) == load, "%s: another load", what);
        EXPECT(host_ints(r.start, start.size()) == start &&
                   host_ints(r.place, place.size()) == place &&
                   host_ints(r.source, source.size()) == source,
               "%s: rows lie elsewhere", what);
        bool rest = true;
        for (size_t i = tiles.size(); i < got_tiles.size(); i += 2)
            rest = rest && got_tiles[i] == -1;
        got_tiles.resize(tiles.size());
        EXPECT(got_tiles == tiles && rest, "%s: other tiles", what);
        for (auto [device, want, name] :
             {std::tuple(r.gate, &gate, "gates"), std::tuple(r.lse, &lse, "lse"),
              std::tuple(r.share, &share, "shares")}) {
            double e = nmse(host_values(device, want->size()), *want);
            EXPECT(e <= 1e-10, "%s: %s off by nmse %.2g", what, name, e);
        }
    }
};

static Router router(int B, int T, int E, int K, float scale, float balance, float sequence,
                     float z_loss) {
    Router r = {};
    r.B = B, r.T = T, r.E = E, r.K = K;
    r.scale = scale, r.balance = balance, r.sequence = sequence, r.z_loss = z_loss;
    return r;
}

static const Router ROUTERS[] = {
    router(2, 70, 5, 2, 1, 0.3f, 0.2f, 0.1f),            // two chunks a sequence, the second short
    router(3, 19, 33, 4, 1.5f, 0, 0.2f, 0),              // more experts than lanes
    router(1, 1, 8, 1, 1, 0.1f, 0, 0.1f),                // one token
    router(1, 150, 6, 6, 2, 0.2f, 0.1f, 0.3f),           // K = E, and experts of more than one tile
    router(1, 9, 70, 35, 1, 0, 0, 0.2f),                 // more experts a token than lanes
};

template <typename F> static void with_routers(F body) {
    for (Router r : ROUTERS)
        for (r.kind = 0; r.kind < 3; r.kind++)
            for (int logits = 0; logits < LOGITS; logits++) {
                bool biased = r.kind == ROUTER_SIGMOID && logits != EQUAL;
                char what[128];
                TestRouter t(r, logits, biased);
                snprintf(what, sizeof what, "%d x %d tokens, %d of %d experts, %s, logits %d", r.B,
                         r.T, r.K, r.E, KINDS[r.kind], logits);
                t.run();
                body(&t, what);
            }
}

GPU_TEST(cuda_router) {
    with_routers([](TestRouter *t, const char *what) { t->expect(what); });
}

// NaN among the logits, or nothing but that: still K different experts, and every row has its
// token.
GPU_TEST(cuda_router_nan) {
    for (int nans : {1, 5}) {
        Router sizes = router(1, 3, 5, 3, 1, 0, 0, 0);
        sizes.kind = ROUTER_SIGMOID;
        TestRouter t(sizes, RANDOM, false);
        // its sigmoid is a positive NaN on every CPU and GPU
        for (int j = 0; j < nans; j++) t.z[j] = -NAN;
        cudaFree(t.d_z);
        t.d_z = device_copy<wide>(&t.z);
        t.run();
        Ints choice = host_ints(t.r.choice, 9), place = host_ints(t.r.place, 9), seen(9);
        for (int i = 0; i < 9; i++) {
            for (int k = i / 3 * 3; k < i; k++)
                EXPECT(choice[k] != choice[i], "%d NaN: token %d goes through expert %d twice",
                       nans, i / 3, choice[i]);
            if (place[i] >= 0 && place[i] < 9) seen[place[i]]++;
        }
        EXPECT(seen == Ints(9, 1), "%d NaN: rows are not one for each choice", nans);
        if (nans == 1)
            EXPECT(choice[0] != 0 && choice[1] != 0 && choice[2] != 0,
                   "a score that is NaN was chosen before a number");
    }
}

// Token t's part of sum dgate gate + dloss (losses), with the choice and the loads as they
// are.
static double token_loss(const TestRouter &t, const Values &dgate, const Values &z_t, int64_t token,
                         double dloss) {
    const Router &r = t.r;
    double n = (double)t.n, chosen = 0, all = 0, loss = 0, lse = t.log_sum(z_t.data());
    const double *load_b = &t.load[token / r.T * r.E], *load = &t.load[r.B * r.E];
    for (int j = 0; j < r.E; j++) all += t.score(z_t.data(), j);
    for (int k = 0; k < r.K; k++) chosen += t.score(z_t.data(), t.choice[token * r.K + k]);
    for (int k = 0; k < r.K; k++)
        loss += dgate[token * r.K + k] * r.scale * t.score(z_t.data(), t.choice[token * r.K + k]) /
                (r.kind == ROUTER_SOFTMAX ? 1 : chosen);
    for (int j = 0; j < r.E; j++) {
        double p = t.score(z_t.data(), j) / all;
        loss += dloss * r.E / r.K / n *
                (r.balance * load[j] / n + r.sequence * load_b[j] / r.T) * p;
    }
    return loss + dloss * r.z_loss * lse * lse / n;
}

// Central differences of that. Logits that prefer one expert make gradients that are too small to
// be measured so.
GPU_TEST(cuda_router_backward) {
    with_routers([](TestRouter *t, const char *what) {
        const Router &r = t->r;
        Values dgate = random_values(t->n * r.K, 31), want(t->n * r.E);
        if (fabs(t->z[0]) > 100) return;
        double dloss = 0.7 * (double)t->n, step = 1e-4;
        wide *d_dgate = device_copy<wide>(&dgate);
        real *d_dz = device_empty<real>(t->n * r.E);
        for (int64_t i = 0; i < t->n * r.E; i++) {
            int64_t token = i / r.E;
            double slope = 0;
            for (int k : {-2, -1, 1, 2}) {
                Values z_t(&t->z[token * r.E], &t->z[token * r.E] + r.E);
                z_t[i % r.E] += k * step;
                slope +=
                    (k * k == 1 ? 8 * k : -k / 2) * token_loss(*t, dgate, z_t, token, dloss);
            }
            want[i] = slope / (12 * step);
        }
        router_backward(d_dz, d_dgate, r, (float)dloss, test_gpu());
        expect_close(d_dz, want, what);
        cudaFree(d_dgate), cudaFree(d_dz);
    });
}

// Twice: sums and loads add up. Watched or not, the loss is the same.
GPU_TEST(cuda_router_count) {
    with_routers([](TestRouter *t, const char *what) {
        const Router &r = t->r;
        double n = (double)t->n, want[ROUTER_SUMS] = {}, loss = 0;
        Values loads(r.E, 3), watched(ROUTER_SUMS + r.E);
        for (int64_t i = 0; i < t->n; i++) {
            double all = 0;
            for (int j = 0; j < r.E; j++) all += t->score(&t->z[i * r.E], j);
            for (int j = 0; j < r.E; j++) {
                double p = t->score(&t->z[i * r.E], j) / all;
                want[ROUTER_ENTROPY] -= p > 0 ? p * log(p) : 0;
            }
            want[ROUTER_Z] += t->lse[i] * t->lse[i];
        }
        for (int j = 0; j < r.E; j++)
            for (int b = 0; b < r.B; b++) {
                want[ROUTER_BALANCE] +=
                    r.E / (double)r.K * t->load[r.B * r.E + j] * t->share[b * r.E + j] / r.B;
                want[ROUTER_SEQUENCE] += r.E / (double)r.K * n / r.T / r.B * t->load[b * r.E + j] *
                                         t->share[b * r.E + j];
            }
        wide *d_loads = device_copy<wide>(&loads);
        double *d_sums, sums[1 + ROUTER_SUMS + 100];
        cudaCheck(cudaMalloc((void **)&d_sums, sizeof sums));
        cudaCheck(cudaMemset(d_sums, 0, sizeof sums));
        router_count(d_sums, d_loads, d_sums + 1, r, test_gpu());
        router_count(d_sums, d_loads, nullptr, r, test_gpu());
        cudaCheck(cudaDeviceSynchronize());
        cudaCheck(cudaMemcpy(sums, d_sums, sizeof sums, cudaMemcpyDeviceToHost));
        for (int i = 0; i < ROUTER_SUMS; i++)
            EXPECT(fabs(sums[1 + i] - want[i]) <= 1e-5 * fabs(want[i]),
                   "%s: sum %d is %.9g, expected %.9g", what, i, sums[1 + i], want[i]);
        loss = 2 * (r.balance * want[ROUTER_BALANCE] + r.sequence * want[ROUTER_SEQUENCE] +
                    r.z_loss * want[ROUTER_Z]);
        EXPECT(fabs(sums[0] - loss) <= 1e-5 * loss, "%s: loss %.9g, expected %.9g", what, sums[0],
               loss);
        bool same = true;
        for (int j = 0; j < r.E; j++) {
            loads[j] += 2 * t->load[r.B * r.E + j];
            same = same && sums[1 + ROUTER_SUMS + j] == t->load[r.B * r.E + j];
        }
        EXPECT(host_values(d_loads, r.E) == loads && same, "%s: other loads", what);
        cudaFree(d_loads), cudaFree(d_sums);
    });
}

// Above the mean, below it, and on it; and nothing where the update was not applied.
GPU_TEST(cuda_router_balance) {
    for (int E : {4, 200}) {
        Values bias = random_values(E, 41), loads(E, 5), want = bias;
        loads[0] = 9, loads[2] = 1;
        wide *d_bias = device_copy<wide>(&bias), *d_loads = device_copy<wide>(&loads);
        want = bias;
        for (int applied : {0, 1}) {
            int32_t *d_applied = device_ints({applied});
            if (applied) want[0] -= 0.25, want[2] += 0.25;
            router_balance(d_bias, d_loads, E, 0.25f, d_applied, test_gpu());
            EXPECT(nmse(host_values(d_bias, E), want) < 1e-14,
                   "%d experts, applied %d: another bias", E, applied);
            cudaFree(d_applied);
        }
        cudaFree(d_bias), cudaFree(d_loads);
    }
}

// --------------------------------------------------------------------------------- tokens and rows

// Rows of a token lie anywhere: place is a random order of all rows.
static Ints shuffled(int64_t count, uint64_t seed) {
    Ints order(count);
    for (int64_t i = 0; i < count; i++) order[i] = (int)i;
    for (int64_t i = count - 1; i > 0; i--)
        std::swap(order[i], order[rand_at(seed, (uint64_t)i) % (uint64_t)(i + 1)]);
    return order;
}

static void check_combine(int64_t n, int K, int C) {
    Ints place = shuffled(n * K, 51);
    Values rows = random_values(n * K * C, 52);
    Values gate = random_values(n * K, 53);
    Values add = random_values(n * C, 54, 2);
    Values dy = random_values(n * C, 55);
    real *d_rows = device_copy<real>(&rows);
    real *d_add = device_copy<real>(&add);
    real *d_dy = device_copy<real>(&dy);
    real *d_y = device_empty<real>(n * C);
    real *d_drows = device_empty<real>(n * K * C);
    wide *d_gate = device_copy<wide>(&gate), *d_dgate = device_empty<wide>(n * K);
    int32_t *d_place = device_ints(place);
    Values gated(n * C), plain(n * C), drows(n * K * C), dgate(n * K);
    for (int64_t i = 0; i < n * K; i++)
        for (int x = 0; x < C; x++) {
            double row = rows[place[i] * C + x];
            gated[i / K * C + x] += gate[i] * row;
            plain[i / K * C + x] += row;
            drows[place[i] * C + x] = gate[i] * dy[i / K * C + x];
            dgate[i] += dy[i / K * C + x] * row;
        }
    Router r = router(1, (int)n, 1, K, 0, 0, 0, 0);
    r.place = d_place;
    r.gate = d_gate;
    combine(d_y, d_rows, r, {}, C, test_gpu());
    expect_close(d_y, gated, "rows by their gates");
    r.gate = nullptr;
    combine(d_add, d_rows, r, {d_add, -0.5f}, C, test_gpu());
    for (size_t i = 0; i < plain.size(); i++) plain[i] -= 0.5 * add[i];
    expect_close(d_add, plain, "rows added to what is there");
    r.gate = d_gate;
    combine_backward(d_drows, d_dgate, d_dy, d_rows, r, C, test_gpu());
    expect_close(d_drows, drows, "gradient of rows");
    expect_close(d_dgate, dgate, "gradient of gates");
    cudaFree(d_rows), cudaFree(d_add), cudaFree(d_dy), cudaFree(d_y), cudaFree(d_drows),
        cudaFree(d_gate), cudaFree(d_dgate), cudaFree(d_place);
}

GPU_TEST(cuda_combine) {
    check_combine(1, 1, 8);
    check_combine(7, 3, 40);
    check_combine(5, 9, 520);  // in float two blocks a token, and more rows than warps
    check_combine(2, 2, 2056);
}

// ---------------------------------------------------------------------------------------- products

// Rows of experts as a router would leave them, for so many rows each; tokens: how many there are
// to come from.
struct TestRows {
    Ints start, source, tiles;
    int64_t count;
    int E;
    int32_t *d_start, *d_source, *d_tiles;
    TestRows(const Ints &rows, int tokens) : start(1), E((int)rows.size()) {
        for (int e = 0; e < E; e++) {
            for (int first = 0; first < rows[e]; first += ROW_TILE)
                tiles.insert(tiles.end(), {e, start[e] + first});
            start.push_back(start[e] + rows[e]);
        }
        count = start[E];
        tiles.resize(2 * row_tiles(count, E), -1);
        for (int64_t i = 0; i < count; i++)
            source.push_back((int)(rand_at(61, (uint64_t)i) % (uint64_t)tokens));
        d_start = device_ints(start), d_source = device_ints(source), d_tiles = device_ints(tiles);
    }
    ~TestRows() { cudaFree(d_start), cudaFree(d_source), cudaFree(d_tiles); }
};

// The index of expert e's weight [j, i]: parts one below the other, experts within a part.
static int64_t weight_index(const Experts &s, int e, int j, int i) {
    return (((int64_t)(j / s.width) * s.E + e) * s.width + j % s.width) * s.in + i;
}

// What one of the two calls below adds to dW.
static Values mixed_half(const Values &after, const Values &before) {
    Values half(after.size());
    for (size_t i = 0; i < half.size(); i++) half[i] = (after[i] - before[i]) / 2;
    return half;
}

// The three products, x from tokens or from rows; dW in two calls, then SET; with one part also by
// the plain twin.
static void check_experts(const Ints &counts, int parts, int width, int in, float c,
                          bool from_tokens, Gpu *gpu) {
    int tokens = 11, out = parts * width;
    TestRows rows(counts, tokens);
    int64_t lines = from_tokens ? tokens : rows.count, weights = (int64_t)rows.E * out * in;
    Values x = random_values(lines * in, 62);
    Values w = random_values(weights, 63, 0.5);
    Values dy = random_values(rows.count * out, 64);
    Values dw = random_values(weights, 65, 5);
    real *d_x = device_copy<real>(&x);
    real *d_w = device_copy<real>(&w);
    real *d_dy = device_copy<real>(&dy);
    real *d_y = device_empty<real>(rows.count * out);
    real *d_dx = device_empty<real>(rows.count * in);
    wide *d_dw = device_copy<wide>(&dw), *d_plain = device_copy<wide>(&dw);
    Experts s = {d_w, d_dw, rows.E, parts, width, in, c, rows.count, rows.d_start, rows.d_tiles,
                 from_tokens ? rows.d_source : nullptr};
    Values y(rows.count * out), dx(rows.count * in), before = dw;
    for (int e = 0; e < rows.E; e++)
        for (int64_t row = rows.start[e]; row < rows.start[e + 1]; row++)
            for (int j = 0; j < out; j++)
                for (int i = 0; i < in; i++) {
                    double x_i = x[(from_tokens ? rows.source[row] : row) * in + i];
                    double w_ji = w[weight_index(s, e, j, i)];
                    y[row * out + j] += c * x_i * w_ji;
                    dx[row * in + i] += c * dy[row * out + j] * w_ji;
                    dw[weight_index(s, e, j, i)] += 2 * c * dy[row * out + j] * x_i;
                }
    experts_forward(d_y, d_x, s, gpu);
    for (int k = 0; k < 2; k++) experts_backward(d_dx, d_dy, d_x, s, gpu);
    expect_close(d_y, y, "y of experts");
    expect_close(d_dx, dx, "dx of experts");
    expect_close(d_dw, dw, "dW of experts");
    Values after = host_values(d_dw, weights);
    for (int e = 0; e < rows.E; e++)
        for (int j = 0; j < out && !counts[e]; j++)
            for (int i = 0; i < in; i++) {
                int64_t at = weight_index(s, e, j, i);
                if (after[at] != before[at]) {
                    EXPECT(false, "expert %d has no rows, and its dW[%d, %d] changed", e, j, i);
                    j = out;
                    break;
                }
            }
    if (parts == 1 && !from_tokens) {
        Values ours = host_values(d_y, rows.count * out);
        Values ours_dx = host_values(d_dx, rows.count * in);
        s.dw = d_plain;
        experts_plain_forward(d_y, d_x, rows.start.data(), s, gpu);
        experts_plain_backward_input(d_dx, d_dy, rows.start.data(), s, gpu);
        for (int k = 0; k < 2; k++)
            experts_plain_backward_weight(d_dy, d_x, rows.start.data(), s, gpu);
        expect_close(d_y, ours, "y, expert by expert");
        expect_close(d_dx, ours_dx, "dx, expert by expert");
        expect_close(d_plain, after, "dW, expert by expert");
    }
    // SET over NaN, then over what that was: of experts without rows too, which become 0.
    wide *d_set = device_empty<wide>(weights);
    s.dw = d_set, s.to_dw = SET;
    for (int k = 0; k < 2; k++) {
        experts_backward(d_dx, d_dy, d_x, s, gpu);
        expect_close(d_set, mixed_half(dw, before), "dW of experts that is SET");
    }
    Values set = host_values(d_set, weights);
    for (int e = 0; e < rows.E; e++) {
        double first = set[weight_index(s, e, 0, 0)];
        double last = set[weight_index(s, e, out - 1, in - 1)];
        EXPECT(counts[e] || (first == 0 && last == 0),
               "expert %d has no rows, and its dW is SET to %g .. %g, not 0", e, first, last);
    }
    cudaFree(d_x), cudaFree(d_w), cudaFree(d_dy), cudaFree(d_y), cudaFree(d_dx), cudaFree(d_dw),
        cudaFree(d_plain), cudaFree(d_set);
}

GPU_TEST(cuda_experts) {
    Gpu gpu = *test_gpu();
    gpu.plans = plans_create(false);
    check_experts({1}, 1, 8, 8, 1, false, &gpu);  // one row in all
    // experts without rows, of a tile and a little, of more than two
    check_experts({0, 130, 1, 0, 257, 64, 0}, 1, 40, 72, 0.5f, false, &gpu);
    // gate and up meet inside a tile of columns, then between two tiles; x from tokens
    check_experts({0, 130, 1, 0, 31, 33, 32}, 2, 72, 40, 1, true, &gpu);
    check_experts({5, 0, 300}, 2, 128, 136, -1.5f, true, &gpu);
    check_experts({0, 0, 17}, 1, 264, 200, 1, false, &gpu);  // all rows in the last expert
    check_experts({3, 2}, 1, 16, 520, 1, true, &gpu);        // many steps of the depth
    plans_destroy(gpu.plans);
}

// The same by wgmma: tiles of 128 x 256, steps of 64.
GPU_TEST(cuda_experts_sm90) {
    Emulated compute("90");
    if (sizeof(real) != 2 || gpu_capability() != 90) return;
    Gpu gpu = *test_gpu();
    gpu.plans = plans_create(false);
    for (int layer : {EXPERTS_FORWARD, EXPERTS_INPUT, EXPERTS_WEIGHT})
        gpu.plans->kinds[layer] = BY_WGMMA;
    check_experts({1}, 1, 8, 8, 1, false, &gpu);  // one row in all
    // experts without rows, of a tile and a little, of more steps than there are stages
    check_experts({0, 130, 1, 0, 257, 64, 0}, 1, 40, 72, 0.5f, false, &gpu);
    check_experts({0, 0, 70}, 1, 264, 200, 1, false, &gpu);  // all rows in the last expert
    // two parts; x from tokens; tiles side by side and one below the other
    check_experts({5, 0, 150, 31}, 2, 136, 264, -1.5f, true, &gpu);
    check_experts({3, 2}, 1, 16, 520, 1, true, &gpu);        // many steps of the depth
    plans_destroy(gpu.plans);
}

// ---------------------------------------------------------------------------- norms inside experts

// Two groups a row or one, each with a gain of each expert: forward, backward, and gains that hold
// something already.
static void check_expert_norm(const Ints &counts, int groups, int width) {
    TestRows rows(counts, 1);
    int gains = groups * width;
    int64_t size = rows.count * gains;
    Values x = random_values(size, 71, 2);
    Values w = random_values((int64_t)rows.E * gains, 72, 0.3, 1.2);
    Values dw = random_values((int64_t)rows.E * gains, 73);
    Values dy = random_values(size, 74);
    Values y(size), dx(size), before;
    real *d_x = device_copy<real>(&x);
    real *d_w = device_copy<real>(&w);
    real *d_dy = device_copy<real>(&dy);
    real *d_y = device_empty<real>(size);
    real *d_dx = device_empty<real>(size);
    wide *d_dw = device_copy<wide>(&dw), *d_rstd = device_empty<wide>(rows.count * groups);
    Norm norm = {site_make(1, groups, width, 0, 0, 1), d_w, nullptr, d_dw, nullptr, nullptr, d_rstd,
                 rows.count, 0.1f, rows.E, rows.d_start};
    before = dw;
    for (int e = 0; e < rows.E; e++)
        for (int64_t line = (int64_t)rows.start[e] * groups;
             line < (int64_t)rows.start[e + 1] * groups; line++) {
            const double *gain = &w[e * gains + line % groups * width];
            double square = 0, ux = 0, rstd;
            for (int i = 0; i < width; i++)
                square += x[line * width + i] * x[line * width + i] / width;
            rstd = 1 / sqrt(square + (double)0.1f);
            for (int i = 0; i < width; i++)
                ux += gain[i] * dy[line * width + i] * x[line * width + i] * rstd / width;
            for (int i = 0; i < width; i++) {
                int64_t at = line * width + i;
                y[at] = gain[i] * x[at] * rstd;
                dx[at] = rstd * (gain[i] * dy[at] - x[at] * rstd * ux);
                dw[e * gains + line % groups * width + i] += dy[at] * x[at] * rstd;
            }
        }
    add_norm_forward(AddNorm{nullptr, d_y, d_x, nullptr, 0, nullptr, &norm}, test_gpu());
    norm_backward(&norm, NormBackward{d_dx, nullptr, d_dy, d_x, nullptr, nullptr, 0, 0, 0},
                  test_gpu());
    expect_close(d_y, y, "norm inside experts");
    expect_close(d_dx, dx, "gradient of a norm inside experts");
    expect_close(d_dw, dw, "gains of experts");
    Values after = host_values(d_dw, dw.size());
    for (int e = 0; e < rows.E; e++)
        for (int i = 0; i < gains && !counts[e]; i++)
            EXPECT(after[e * gains + i] == before[e * gains + i],
                   "expert %d has no rows, and its gain's gradient changed", e);
    cudaFree(d_x), cudaFree(d_w), cudaFree(d_dy), cudaFree(d_y), cudaFree(d_dx), cudaFree(d_dw),
        cudaFree(d_rstd);
}

GPU_TEST(cuda_experts_norm) {
    check_expert_norm({1}, 1, 8);
    check_expert_norm({0, 3, 40, 0, 1}, 2, 24);  // one expert has more than an even share
    check_expert_norm({0, 9, 0}, 1, 520);
    check_expert_norm({2, 0, 11}, 2, 2056);                    // a team of a whole block
}
