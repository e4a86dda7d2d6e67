// test_kinds.cu: which kernels attention and experts take (llmc/kinds.cuh, attend.cuh,
// experts.cuh), and that a wrong one is refused. The kernels by wgmma are compared with the truth
// by dev/kernels/attention_sm90.cu and test_moe.cu, and here, by the choice itself, with those by
// mma.sync.
#include "gpu_test.cuh"
#include "../../llmc/attend.cuh"
#include "../../llmc/experts.cuh"

// Plans and memory of a run, on the emulated GPU if there is no other.
struct Chooser {
    Emulated compute;
    Gpu gpu;
    real *arena;
    enum { ARENA = 1 << 20 };
    Chooser(const char *emulated = "90") : compute(emulated), gpu(*test_gpu()) {
        gpu.capability = gpu_capability();
        gpu.plans = plans_create(false);
        arena = device_empty<real>(ARENA);
    }
    ~Chooser(void) {
        cudaCheck(cudaStreamSynchronize(gpu.stream));
        plans_destroy(gpu.plans);
        cudaCheck(cudaFree(arena));
    }
    // Whether the kernels by wgmma can run here.
    bool can(void) const { return sizeof(real) == 2 && gpu.capability == 90; }
    void choose(int T, int NH, int KV, int QK, int HS, int wanted, bool documents = false) {
        AttentionShape s = attention_shape(2, T, NH, KV, QK, HS, 1 / sqrt((double)QK));
        int32_t *borders = nullptr;
        cudaCheck(cudaMalloc((void **)&borders, 4 * T * sizeof *borders));
        if (documents) s.begins = borders, s.ends = borders + 2 * T;
        attend_choose(s, wanted, arena, ARENA, &gpu);
        cudaCheck(cudaStreamSynchronize(gpu.stream));
        cudaCheck(cudaFree(borders));
    }
    void expect(int forward, int backward, const char *what) const {
        int found[2] = {gpu.plans->kinds[ATTENTION_FORWARD], gpu.plans->kinds[ATTENTION_BACKWARD]};
        EXPECT(found[0] == forward && found[1] == backward, "%s: %s and %s, expected %s and %s",
               what, KIND_NAMES[found[0]], KIND_NAMES[found[1]], KIND_NAMES[forward],
               KIND_NAMES[backward]);
    }
};

static void expect_mma(const char *emulated, const char *what) {
    Chooser c(emulated);
    c.gpu.plans->tuning = true;
    if (!c.can()) c.choose(70, 2, 2, 64, 64, KERNELS_AUTO);
    if (!c.can()) c.expect(BY_MMA, BY_MMA, what);
}

GPU_TEST(cuda_attend) {
    expect_mma("120", "another GPU");
    expect_mma("90", "fp32");
    Chooser c;
    if (!c.can()) return;
    c.choose(150, 4, 2, 64, 64, KERNELS_WGMMA);
    c.expect(BY_WGMMA, BY_WGMMA, "heads of 64");
    c.choose(70, 2, 2, 96, 96, KERNELS_WGMMA);
    c.expect(BY_WGMMA, BY_WGMMA, "heads of 96");
    c.choose(131, 2, 1, 128, 128, KERNELS_WGMMA);
    c.expect(BY_WGMMA, BY_WGMMA, "heads of 128");
    for (int HS : {64, 96, 128}) {
        c.choose(300, 2, 1, HS, HS, KERNELS_WGMMA, true);
        c.expect(BY_WGMMA, BY_WGMMA, "documents");
    }
    c.choose(70, 1, 1, 192, 128, KERNELS_WGMMA);
    c.expect(BY_WGMMA, BY_MMA, "latent heads of 192 and 128");
    c.choose(70, 2, 2, 64, 64, KERNELS_MMA);
    c.expect(BY_MMA, BY_MMA, "--kernels mma");
    for (int HS : {32, 48}) {
        c.choose(70, 2, 2, HS, HS, KERNELS_AUTO);
        c.expect(BY_MMA, BY_MMA, "heads that have no kernels by wgmma");
    }
    c.choose(1 << 15, 2, 2, 64, 64, KERNELS_WGMMA);
    c.expect(BY_MMA, BY_MMA, "no memory to compare in");
}

// The choice is kept with the plans, and stays; without timing it is mma.sync.
GPU_TEST(cuda_attend_kept) {
    Chooser c, d;
    if (!c.can()) return;
    c.choose(70, 2, 2, 64, 64, KERNELS_AUTO);
    c.expect(BY_MMA, BY_MMA, "--tune off");
    c.gpu.plans->kinds[ATTENTION_FORWARD] = BY_WGMMA;
    char *text = plans_text(c.gpu.plans);
    plans_read(d.gpu.plans, text, "a test");
    d.expect(BY_WGMMA, BY_MMA, "plans that were read");
    d.choose(70, 2, 2, 64, 64, KERNELS_AUTO);
    d.expect(BY_WGMMA, BY_MMA, "a run that goes on");
    std::string old = text;
    size_t from = old.find(", \"kernels\""), to = old.find("}", from) + 1;
    plans_read(d.gpu.plans, old.erase(from, to - from).c_str(), "a test");
    d.expect(BY_MMA, BY_MMA, "plans from before the choice");
    free(text);
    // Timing takes one or the other.
    Chooser timed;
    timed.gpu.plans->tuning = true;
    timed.choose(70, 2, 2, 64, 64, KERNELS_AUTO);
    for (int layer : {ATTENTION_FORWARD, ATTENTION_BACKWARD}) {
        int kind = timed.gpu.plans->kinds[layer];
        EXPECT(kind == BY_MMA || kind == BY_WGMMA, "timing chose %s", KIND_NAMES[kind]);
    }
}

// Experts of two parts up and one down, 2 of E for each of so many tokens.
static void choose_experts(Chooser *c, int64_t tokens, int wanted, int E = 5) {
    int32_t source;
    Experts up = {nullptr, nullptr, E, 2, 40, 72, 0.5f, 2 * tokens, nullptr, nullptr, &source};
    Experts down = {nullptr, nullptr, E, 1, 72, 40, 1, 2 * tokens, nullptr, nullptr, nullptr};
    const Experts products[2] = {up, down};
    experts_choose(products, tokens, wanted, c->arena, Chooser::ARENA / 4, &c->gpu);
}
static void expect_experts(const Chooser &c, int kind, const char *what) {
    for (int layer : {EXPERTS_FORWARD, EXPERTS_INPUT, EXPERTS_WEIGHT}) {
        int found = c.gpu.plans->kinds[layer];
        EXPECT(found == kind, "%s: %s by %s, expected %s", what, LAYER_NAMES[layer],
               KIND_NAMES[found], KIND_NAMES[kind]);
    }
}

GPU_TEST(cuda_experts_choose) {
    for (const char *emulated : {"120", "90"}) {
        Chooser c(emulated);
        c.gpu.plans->tuning = true;
        if (!c.can()) choose_experts(&c, 50, KERNELS_AUTO);
        if (!c.can()) expect_experts(c, BY_MMA, "another GPU, or fp32");
    }
    Chooser c;
    if (!c.can()) return;
    choose_experts(&c, 200, KERNELS_WGMMA);
    expect_experts(c, BY_WGMMA, "--kernels wgmma");
    choose_experts(&c, 1, KERNELS_WGMMA);
    expect_experts(c, BY_WGMMA, "one token");
    choose_experts(&c, 1 << 14, KERNELS_WGMMA);
    expect_experts(c, BY_WGMMA, "memory for a part of the tokens");
    choose_experts(&c, 50, KERNELS_WGMMA, 100);
    expect_experts(c, BY_WGMMA, "memory for a part of the experts");
    choose_experts(&c, 50, KERNELS_AUTO);
    expect_experts(c, BY_WGMMA, "a run that goes on");
    choose_experts(&c, 50, KERNELS_MMA);
    expect_experts(c, BY_MMA, "--kernels mma");
    choose_experts(&c, 50, KERNELS_AUTO);
    expect_experts(c, BY_MMA, "--tune off");
}

#if !defined(__CUDACC__)
// Before the kernels begin, a line says what to do if they do not end; then they are refused.
static void expect_refusal(const std::string &words, const std::string &layer) {
    size_t begun = words.find("kernels: comparing " + layer + " by wgmma");
    size_t refused = words.find("note: " + layer + " by wgmma is wrong on this GPU");
    EXPECT(begun < refused && refused != std::string::npos, "a wrong %s: %s", layer.c_str(),
           words.c_str());
}

// A wrong kernel of each form.
GPU_TEST(cuda_experts_refused) {
    if (sizeof(real) != 2) return;
    setenv("EMU_WRONG_WGMMA", "1", 1);
    std::string words = said([] {
        Chooser c;
        choose_experts(&c, 50, KERNELS_WGMMA);
        for (int layer : {EXPERTS_FORWARD, EXPERTS_INPUT, EXPERTS_WEIGHT})
            if (c.gpu.plans->kinds[layer] != BY_MMA) return 8;
        return 7;
    });
    unsetenv("EMU_WRONG_WGMMA");
    expect_words(words, "7 ", "mma.sync is used");
    for (const char *name : {"experts_forward", "experts_input", "experts_weight"})
        expect_refusal(words, name);
}

GPU_TEST(cuda_attend_refused) {
    if (sizeof(real) != 2) return;
    setenv("EMU_WRONG_WGMMA", "1", 1);
    for (int before : {UNCHOSEN, BY_WGMMA})
        for (int wanted : {KERNELS_AUTO, KERNELS_WGMMA}) {
            std::string words = said([=] {
                Chooser c;
                c.gpu.plans->tuning = true;
                for (uint8_t &kind : c.gpu.plans->kinds) kind = (uint8_t)before;
                c.choose(70, 2, 2, 64, 64, wanted);
                return c.gpu.plans->kinds[0] == BY_MMA && c.gpu.plans->kinds[1] == BY_MMA ? 7 : 8;
            });
            expect_words(words, "7 ", "mma.sync is used");
            expect_refusal(words, "attention_forward");
            expect_refusal(words, "attention_backward");
        }
    unsetenv("EMU_WRONG_WGMMA");
}
#endif
