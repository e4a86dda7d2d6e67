// test_embed.cu: tokens to vectors and back (llmc/embed.cuh).
#include "gpu_test.cuh"
#include "../../llmc/embed.cuh"

typedef std::vector<int32_t> Tokens;

static int32_t *device_ints(const Tokens &host) {
    int32_t *device;
    cudaCheck(cudaMalloc((void **)&device, host.size() * sizeof(int32_t)));
    cudaCheck(cudaMemcpy(device, host.data(), host.size() * sizeof(int32_t),
                         cudaMemcpyHostToDevice));
    return device;
}

// begins: --restart-positions; empty: positions are those in the sequence.
static Tokens groups_of(const Tokens &tokens, int B, const Tokens &begins = {}) {
    Tokens groups(4 * tokens.size(), -7);
    token_groups(groups.data(), tokens.data(), tokens.size());
    position_groups(groups.data(), begins.empty() ? nullptr : begins.data(), tokens.size(),
                    (int)tokens.size() / B);
    return groups;
}

static int position_of(int64_t bt, int T, const Tokens &begins) {
    return (int)(bt % T) - (begins.empty() ? 0 : begins[bt]);
}

// Documents of random sizes, about 5 tokens each.
static Tokens random_begins(int B, int T, uint64_t seed) {
    Tokens begins(B * T);
    for (int bt = 0; bt < B * T; bt++) {
        bool same = bt % T && rand_uniform(seed, bt) > 0.2;
        begins[bt] = same ? begins[bt - 1] : bt % T;
    }
    return begins;
}

// Tokens below V; low ones are frequent, as in text: the square of a uniform number.
static Tokens random_tokens(int64_t n, int V, uint64_t seed) {
    Tokens tokens(n);
    for (int64_t i = 0; i < n; i++) {
        double u = rand_uniform(seed, i);
        tokens[i] = (int32_t)(u * u * V);
    }
    return tokens;
}

// ------------------------------------------------------------------------------------------ groups

static void check_groups(const Tokens &tokens, int B, const char *what, const Tokens &begins = {}) {
    int32_t n = (int32_t)tokens.size(), T = n / B, wrong = 0;
    Tokens groups = groups_of(tokens, B, begins);
    for (int table = 0; table < 2; table++) {
        const int32_t *order = &groups[2 * table * n], *sorted = order + n;
        Tokens seen(n, 0);
        for (int r = 0; r < n; r++) {
            wrong += order[r] < 0 || order[r] >= n || seen[order[r]]++;
            wrong += sorted[r] != (table ? position_of(order[r], T, begins) : tokens[order[r]]);
            wrong += r > 0 && sorted[r] < sorted[r - 1];
            wrong += r > 0 && sorted[r] == sorted[r - 1] && order[r] < order[r - 1];
        }
    }
    EXPECT(wrong == 0, "%s: %d mistakes in the groups", what, wrong);
}

GPU_TEST(cuda_token_groups) {
    check_groups({5}, 1, "one position");
    check_groups({3, 1, 3, 3, 0, 1, 3}, 7, "repeats");
    check_groups(Tokens(100, 70000), 4, "one token everywhere");
    check_groups({(1 << 24) - 1, 0, 1 << 16, 1 << 8, (1 << 24) - 1, 255, 256, 65535, 1 << 16, 0}, 2,
                 "all digits");
    check_groups(random_tokens(5000, 50257, 1), 50, "text");
    check_groups(random_tokens(3000, 1 << 24, 2), 1, "a large vocabulary");
    check_groups(random_tokens(900, 50, 3), 3, "documents", random_begins(3, 300, 4));
}

// ---------------------------------------------------------------------------- forward and backward

struct EmbeddingCase { int B, T, C, V, positions; float scale; };

static void check_embedding_forward(EmbeddingCase s, const Tokens &tokens,
                                    const Tokens &begins = {}) {
    int64_t n = s.B * s.T;
    Values wte = random_values(s.V * s.C, 21), wpe = random_values(s.T * s.C, 22), want(n * s.C);
    real *d_wte = device_copy<real>(&wte);
    real *d_wpe = s.positions ? device_copy<real>(&wpe) : nullptr;
    real *d_e = device_empty<real>(n * s.C);
    int32_t *d_tokens = device_ints(tokens);
    int32_t *d_begins = begins.empty() ? nullptr : device_ints(begins);
    for (int64_t bt = 0; bt < n; bt++) {
        int position = position_of(bt, s.T, begins);
        for (int i = 0; i < s.C; i++)
            want[bt * s.C + i] =
                s.scale * wte[tokens[bt] * s.C + i] + (s.positions ? wpe[position * s.C + i] : 0);
    }
    embedding_forward(d_e, d_tokens, d_wte, d_wpe, d_begins, s.B, s.T, s.C, s.scale, test_gpu());
    expect_close(d_e, want, "embedding");
    cudaFree(d_wte), cudaFree(d_wpe), cudaFree(d_e), cudaFree(d_tokens), cudaFree(d_begins);
}

// Two batches in a row: gradients add up, on top of what was there. scratch: 0, or this many
// floats.
static void check_embedding_backward(EmbeddingCase s, const Tokens batches[2], size_t scratch = 0,
                                     const Tokens &begins = {}) {
    int64_t n = s.B * s.T;
    Gpu gpu = *test_gpu();
    if (scratch) gpu.scratch_size = scratch, gpu.scratch = device_empty<float>(scratch);
    Values dwte = random_values(s.V * s.C, 31), dwpe = random_values(s.T * s.C, 32);
    wide *d_dwte = device_copy<wide>(&dwte);
    wide *d_dwpe = s.positions ? device_copy<wide>(&dwpe) : nullptr;
    for (int batch = 0; batch < 2; batch++) {
        const Tokens &tokens = batches[batch];
        Values de = random_values(n * s.C, 33 + batch);
        real *d_de = device_copy<real>(&de);
        int32_t *d_groups = device_ints(groups_of(tokens, s.B, begins));
        embedding_backward(d_dwte, d_dwpe, d_de, d_groups, s.B, s.T, s.C, s.scale, &gpu);
        for (int64_t bt = 0; bt < n; bt++)
            for (int i = 0; i < s.C; i++) {
                dwte[tokens[bt] * s.C + i] += s.scale * de[bt * s.C + i];
                dwpe[position_of(bt, s.T, begins) * s.C + i] += de[bt * s.C + i];
            }
        cudaCheck(cudaDeviceSynchronize());
        cudaFree(d_de), cudaFree(d_groups);
    }
    // Sums of float values in float, whatever the storage type: stricter than expect_close in bf16.
    double error = nmse(host_values(d_dwte, dwte.size()), dwte);
    double position_error = s.positions ? nmse(host_values(d_dwpe, dwpe.size()), dwpe) : 0;
    EXPECT(error < 1e-12, "B %d, T %d, C %d: dwte's error is %g", s.B, s.T, s.C, error);
    EXPECT(position_error < 1e-12, "B %d, T %d, C %d: dwpe's error is %g", s.B, s.T, s.C,
           position_error);
    if (scratch) cudaFree(gpu.scratch);
    cudaFree(d_dwte), cudaFree(d_dwpe);
}

GPU_TEST(cuda_embedding) {
    const EmbeddingCase cases[] = {{1, 1, 8, 5, 1, 1},
                                   {2, 7, 40, 11, 1, 1},
                                   {3, 5, 136, 300, 0, 11.5f},
                                   {2, 3, 1032, 4, 1, 2},
                                   {7, 13, 264, 9, 1, 0.5f},
                                   {200, 3, 24, 300, 1, 1}};  // long groups of positions
    for (const EmbeddingCase &s : cases) {
        Tokens batches[2] = {random_tokens(s.B * s.T, s.V, 41), random_tokens(s.B * s.T, s.V, 42)};
        batches[0].back() = s.V - 1;
        check_embedding_forward(s, batches[0]);
        check_embedding_backward(s, batches);
        Tokens begins = random_begins(s.B, s.T, 45);
        check_embedding_forward(s, batches[0], begins);
        check_embedding_backward(s, batches, 0, begins);
    }
}

// One token everywhere, and none repeated.
GPU_TEST(cuda_embedding_extremes) {
    EmbeddingCase s = {2, 51, 24, 102, 1, 3};
    EmbeddingCase many = {1, 552, 8, 552, 0, 1};
    Tokens same[2] = {Tokens(102, 2), Tokens(102, 101)};
    Tokens different[2] = {Tokens(many.T), Tokens(many.T)};
    for (int i = 0; i < many.T; i++) different[0][i] = i, different[1][i] = many.T - 1 - i;
    check_embedding_backward(s, same);
    check_embedding_backward(many, different);
}

// Token u appears lengths[u] times, at positions that are shuffled.
static Tokens shuffled(const std::vector<int> &lengths, uint64_t seed) {
    Tokens tokens;
    for (size_t u = 0; u < lengths.size(); u++) tokens.insert(tokens.end(), lengths[u], (int32_t)u);
    for (size_t i = tokens.size() - 1; i > 0; i--)
        std::swap(tokens[i], tokens[(size_t)(rand_uniform(seed, i) * (double)(i + 1))]);
    return tokens;
}

// Groups that end, begin or go on where the sorted positions are cut: one before, at, and one
// behind each cut, over one cut and over several, at the first and at the last position.
GPU_TEST(cuda_embedding_pieces) {
    const int P = GROUP_PIECE;
    const std::vector<int> all[] = {{P, P, P},
                                    {1, P - 1, 2, P - 2},
                                    {P - 1, P, P + 1, P, 3},
                                    {P / 2, P + P / 2, P / 2 + 1, 2 * P, 1, 2 * P - 1},
                                    {P - 1, 2 * P + 1, P - 1, 1, 4 * P + 2, 1},
                                    {5 * P, 1, 1, P - 2, 3 * P + 7},
                                    {7, 6 * P + 11},
                                    {4 * P + 1},
                                    {3 * P, 3 * P, 3 * P - 1, 5, 2 * P - 5}};
    uint64_t seed = 60;
    for (const std::vector<int> &lengths : all) {
        int n = 0, V = (int)lengths.size();
        for (int length : lengths) n += length;
        EmbeddingCase s = {1, n, 2 * PACK, V, 0, 0.5f};
        Tokens batches[2] = {shuffled(lengths, seed), shuffled(lengths, seed + 1)};
        check_embedding_backward(s, batches);
        seed += 2;
    }
}

// Bytes of text, in rows of more than one block; with little scratch, and so with longer pieces.
GPU_TEST(cuda_embedding_bytes) {
    const int T = 700, C = ROW_THREADS * PACK + 8;
    EmbeddingCase s = {2, T, C, 9, 1, 2};
    Tokens batches[2] = {random_tokens(2 * T, s.V, 43), random_tokens(2 * T, s.V, 44)};
    check_embedding_backward(s, batches);
    check_embedding_backward(s, batches, (size_t)5 * C + 3);
    check_embedding_backward(s, batches, 10);
}

// A group's sum does not depend on the order in which blocks run, nor a short group's on the groups
// around it: the same bits.
GPU_TEST(cuda_embedding_bits) {
    const int P = GROUP_PIECE, V = 4;
    Values got[3];
    for (int run = 0; run < 3; run++) {
        // Before tokens 2 and 3 stand 0 or P - 1 positions: another piece.
        Tokens tokens(run == 2 ? P - 1 : 0, 0);
        tokens.resize(tokens.size() + P, 2);
        tokens.resize(tokens.size() + 3 * P, 3);
        int n = (int)tokens.size(), others = n - 4 * P;
        Values de = random_values((size_t)n * PACK, 71), own = random_values(4 * P * PACK, 72);
        std::copy(own.begin(), own.end(), de.begin() + others * PACK);
        Values zeros(V * PACK);
        real *d_de = device_copy<real>(&de);
        wide *d_dwte = device_copy<wide>(&zeros);
        int32_t *d_groups = device_ints(groups_of(tokens, 1));
        embedding_backward(d_dwte, nullptr, d_de, d_groups, 1, n, PACK, 1, test_gpu());
        got[run] = host_values(d_dwte, V * PACK);
        cudaFree(d_de), cudaFree(d_dwte), cudaFree(d_groups);
    }
    int different = 0, moved = 0;
    for (int i = 0; i < V * PACK; i++) {
        different += got[0][i] != got[1][i];
        moved += i / PACK == 2 && got[0][i] != got[2][i];
    }
    EXPECT(different == 0, "%d sums differ between two runs", different);
    EXPECT(moved == 0, "%d sums of a short group depend on the groups around it", moved);
}
