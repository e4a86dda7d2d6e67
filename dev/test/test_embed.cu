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

static Tokens groups_of(const Tokens &tokens) {
    Tokens groups(2 * tokens.size() + 2, -7);
    token_groups(groups.data(), tokens.data(), (int64_t)tokens.size());
    return groups;
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

static void check_groups(const Tokens &tokens, const char *what) {
    int32_t n = (int32_t)tokens.size();
    Tokens groups = groups_of(tokens), seen(n, 0);
    int32_t count = groups[0], *start = &groups[1], *order = &groups[n + 2], wrong = 0;
    EXPECT(count > 0 && count <= n && start[0] == 0 && start[count] == n,
           "%s: %d groups of %d positions, from %d to %d", what, count, n, start[0], start[count]);
    for (int u = 0; u < count; u++) {
        wrong += start[u] >= start[u + 1];
        // each token has one group
        wrong += u > 0 && tokens[order[start[u]]] <= tokens[order[start[u - 1]]];
        for (int r = start[u]; r < start[u + 1]; r++) {
            wrong += order[r] < 0 || order[r] >= n || seen[order[r]]++;
            wrong += tokens[order[r]] != tokens[order[start[u]]];
            wrong += r > start[u] && order[r] <= order[r - 1];
        }
    }
    EXPECT(wrong == 0, "%s: %d mistakes in the groups", what, wrong);
}

GPU_TEST(cuda_token_groups) {
    check_groups({5}, "one position");
    check_groups({3, 1, 3, 3, 0, 1, 3}, "repeats");
    check_groups(Tokens(100, 70000), "one token everywhere");
    check_groups({(1 << 24) - 1, 0, 1 << 16, 1 << 8, (1 << 24) - 1, 255, 256, 65535, 1 << 16, 0},
                 "all digits");
    check_groups(random_tokens(5000, 50257, 1), "text");
    check_groups(random_tokens(3000, 1 << 24, 2), "a large vocabulary");
}

// ---------------------------------------------------------------------------- forward and backward

struct EmbeddingCase { int B, T, C, V, positions; float scale; };

static void check_embedding_forward(EmbeddingCase s, const Tokens &tokens) {
    int64_t n = s.B * s.T;
    Values wte = random_values(s.V * s.C, 21), wpe = random_values(s.T * s.C, 22), want(n * s.C);
    real *d_wte = device_copy<real>(&wte);
    real *d_wpe = s.positions ? device_copy<real>(&wpe) : nullptr;
    real *d_e = device_empty<real>(n * s.C);
    int32_t *d_tokens = device_ints(tokens);
    for (int64_t bt = 0; bt < n; bt++)
        for (int i = 0; i < s.C; i++)
            want[bt * s.C + i] =
                s.scale * wte[tokens[bt] * s.C + i] + (s.positions ? wpe[bt % s.T * s.C + i] : 0);
    embedding_forward(d_e, d_tokens, d_wte, d_wpe, s.B, s.T, s.C, s.scale, test_gpu());
    expect_close(d_e, want, "embedding");
    cudaFree(d_wte), cudaFree(d_wpe), cudaFree(d_e), cudaFree(d_tokens);
}

// Two batches in a row: gradients add up, on top of what was there.
static void check_embedding_backward(EmbeddingCase s, const Tokens batches[2]) {
    int64_t n = s.B * s.T;
    Values dwte = random_values(s.V * s.C, 31), dwpe = random_values(s.T * s.C, 32);
    wide *d_dwte = device_copy<wide>(&dwte);
    wide *d_dwpe = s.positions ? device_copy<wide>(&dwpe) : nullptr;
    for (int batch = 0; batch < 2; batch++) {
        const Tokens &tokens = batches[batch];
        Values de = random_values(n * s.C, 33 + batch);
        real *d_de = device_copy<real>(&de);
        int32_t *d_tokens = device_ints(tokens), *d_groups = device_ints(groups_of(tokens));
        embedding_backward(d_dwte, d_dwpe, d_de, d_tokens, d_groups, s.B, s.T, s.C, s.scale,
                           test_gpu());
        for (int64_t bt = 0; bt < n; bt++)
            for (int i = 0; i < s.C; i++) {
                dwte[tokens[bt] * s.C + i] += s.scale * de[bt * s.C + i];
                dwpe[bt % s.T * s.C + i] += de[bt * s.C + i];
            }
        cudaCheck(cudaDeviceSynchronize());
        cudaFree(d_de), cudaFree(d_tokens), cudaFree(d_groups);
    }
    // Sums of float values in float, whatever the storage type: stricter than expect_close in bf16.
    double error = nmse(host_values(d_dwte, dwte.size()), dwte);
    double position_error = s.positions ? nmse(host_values(d_dwpe, dwpe.size()), dwpe) : 0;
    EXPECT(error < 1e-12, "B %d, T %d, C %d: dwte's error is %g", s.B, s.T, s.C, error);
    EXPECT(position_error < 1e-12, "B %d, T %d, C %d: dwpe's error is %g", s.B, s.T, s.C,
           position_error);
    cudaFree(d_dwte), cudaFree(d_dwpe);
}

GPU_TEST(cuda_embedding) {
    const EmbeddingCase cases[] = {{1, 1, 8, 5, 1, 1},
                                   {2, 7, 40, 11, 1, 1},
                                   {3, 5, 136, 300, 0, 11.5f},
                                   {2, 3, 1032, 4, 1, 2},
                                   {7, 13, 264, 9, 1, 0.5f}};
    for (const EmbeddingCase &s : cases) {
        Tokens batches[2] = {random_tokens(s.B * s.T, s.V, 41), random_tokens(s.B * s.T, s.V, 42)};
        batches[0].back() = s.V - 1;
        check_embedding_forward(s, batches[0]);
        check_embedding_backward(s, batches);
    }
}

// One token everywhere, one nowhere repeated; more groups than blocks of the grid.
GPU_TEST(cuda_embedding_extremes) {
    EmbeddingCase s = {2, 51, 24, 102, 1, 3};
    EmbeddingCase many = {1, GROUP_BLOCKS + 40, 8, GROUP_BLOCKS + 40, 0, 1};
    Tokens same[2] = {Tokens(102, 2), Tokens(102, 101)};
    Tokens different[2] = {Tokens(many.T), Tokens(many.T)};
    for (int i = 0; i < many.T; i++) different[0][i] = i, different[1][i] = many.T - 1 - i;
    check_embedding_backward(s, same);
    check_embedding_backward(many, different);
}
