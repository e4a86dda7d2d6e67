// test_decode.cu: keys and values that join a text's, and attention over them (llmc/decode.cuh),
// against its equation in double.
#include "gpu_test.cuh"
#include "../../llmc/decode.cuh"

// n queries after `past` rows, in rows of [gap | q | k | v | gap] as products make them; the heads
// of v as far apart as latent attention has them. Gaps are NaN, and so is what the cache holds
// beyond the text.
struct DecodeCase { int past, n, NH, KV, QK, HS; double q_std; };

static double scale_of(const DecodeCase &s) { return 1 / sqrt((double)s.QK); }
static int v_head(const DecodeCase &s) { return s.QK > s.HS ? 2 * s.HS : s.HS; }
static int q_at(void) { return 8; }
static int k_at(const DecodeCase &s) { return q_at() + s.NH * s.QK; }
static int v_at(const DecodeCase &s) { return k_at(s) + s.KV * s.QK; }
static int row_of(const DecodeCase &s) { return v_at(s) + s.KV * v_head(s) + 8; }

static Values decode_truth(const Values &x, const DecodeCase &s) {
    Values c;
    int ld = row_of(s);
    for (int t = s.past; t < s.past + s.n; t++)
        for (int h = 0; h < s.NH; h++) {
            int g = h / (s.NH / s.KV);
            const double *q = &x[(size_t)t * ld + q_at() + h * s.QK];
            Values p(t + 1), sums(s.HS);
            double max = -INFINITY, total = 0;
            for (int j = 0; j <= t; j++) {
                const double *k = &x[(size_t)j * ld + k_at(s) + g * s.QK];
                for (int i = 0; i < s.QK; i++) p[j] += scale_of(s) * q[i] * k[i];
                max = fmax(max, p[j]);
            }
            for (int j = 0; j <= t; j++) {
                total += p[j] = exp(p[j] - max);
                for (int i = 0; i < s.HS; i++)
                    sums[i] += p[j] * x[(size_t)j * ld + v_at(s) + g * v_head(s) + i];
            }
            for (int i = 0; i < s.HS; i++) c.push_back(sums[i] / total);
        }
    return c;
}

static void check_decode(DecodeCase s) {
    int T = s.past + s.n, ld = row_of(s);
    char what[100];
    snprintf(what, sizeof what, "%d after %d, NH %d, KV %d, heads of %d and %d", s.n, s.past, s.NH,
             s.KV, s.QK, s.HS);
    Values x = random_values((size_t)T * ld, 300 + T);
    for (int64_t i = 0; i < (int64_t)x.size(); i++) {
        int column = (int)(i % ld);
        bool in_v = column >= v_at(s) && (column - v_at(s)) / v_head(s) < s.KV &&
                    (column - v_at(s)) % v_head(s) < s.HS;
        if (column < q_at() || (column >= v_at(s) && !in_v)) x[i] = NAN;
        if (column >= q_at() && column < k_at(s)) x[i] *= s.q_std;
    }
    real *rows = device_copy<real>(&x);
    real *keys = device_empty<real>((size_t)(T + 3) * s.KV * s.QK);
    real *values = device_empty<real>((size_t)(T + 3) * s.KV * s.HS);
    real *c = device_empty<real>((size_t)s.n * s.NH * s.HS);
    for (int part = s.past ? 0 : 1; part < 2; part++) {  // the rows before, then the new ones
        real *first = rows + (part ? (int64_t)s.past * ld : 0);
        Heads qkv[3] = {{first + q_at(), ld, s.QK},
                        {first + k_at(s), ld, s.QK},
                        {first + v_at(s), ld, v_head(s)}};
        AttentionShape shape =
            attention_shape(1, part ? s.n : s.past, s.NH, s.KV, s.QK, s.HS, scale_of(s));
        KvCache cache = {keys, values, part ? s.past : 0};
        kv_cache_fill(cache, qkv, shape, test_gpu());
        if (part) attention_decode(c, qkv[0], cache, shape, test_gpu());
    }
    Values k = host_values(keys, (size_t)(T + 3) * s.KV * s.QK);
    Values v = host_values(values, (size_t)(T + 3) * s.KV * s.HS);
    Values want = decode_truth(x, s);
    Values got = host_values(c, want.size());
    int wrong = 0;
    for (int64_t i = 0; i < (int64_t)k.size(); i++) {
        int64_t t = i / (s.KV * s.QK);
        wrong += t < T ? k[i] != x[t * ld + k_at(s) + i % (s.KV * s.QK)] : !std::isnan(k[i]);
    }
    for (int64_t i = 0; i < (int64_t)v.size(); i++) {
        int64_t t = i / (s.KV * s.HS), column = i % (s.KV * s.HS);
        wrong += t < T ? v[i] != x[t * ld + v_at(s) + column / s.HS * v_head(s) + column % s.HS]
                       : !std::isnan(v[i]);
    }
    EXPECT(wrong == 0, "%s: %d keys and values are not the rows' own, or lie beyond them", what,
           wrong);
    EXPECT(nmse(got, want) <= TOLERANCE, "%s: off by nmse %.3g", what, nmse(got, want));
    for (void *p : {rows, keys, values, c}) cudaFree(p);
}

GPU_TEST(cuda_decode) {
    check_decode({0, 1, 2, 2, 32, 32, 1});
    check_decode({1, 1, 4, 2, 48, 48, 1});
    check_decode({31, 1, 2, 1, 64, 64, 1});
    check_decode({32, 2, 2, 2, 96, 96, 1});
    check_decode({255, 2, 3, 1, 32, 32, 1});  // the last key of all warps' first 32, and one more
    check_decode({517, 1, 2, 2, 64, 64, 1});
    check_decode({70, 5, 2, 2, 48, 32, 1});
    check_decode({33, 1, 2, 2, 96, 64, 1});
    check_decode({130, 1, 2, 2, 192, 128, 1});
    // scores up to +-60: the largest comes in any warp's keys
    check_decode({300, 3, 4, 2, 128, 128, 20});
}

// A second run gives the same bits.
GPU_TEST(cuda_decode_repeats) {
    Values x = random_values(300 * 32, 5), q = random_values(32, 6);
    real *keys = device_copy<real>(&x), *query = device_copy<real>(&q), *c = device_empty<real>(64);
    for (int run = 0; run < 2; run++)
        attention_decode(c + 32 * run, {query, 32, 32}, {keys, keys, 299},
                         attention_shape(1, 1, 1, 1, 32, 32, 0.2), test_gpu());
    Values got = host_values(c, 64);
    int differ = 0;
    for (int i = 0; i < 32; i++) differ += got[i] != got[32 + i];
    EXPECT(differ == 0, "a second run changes %d values", differ);
    for (void *p : {keys, query, c}) cudaFree(p);
}
