// test_attend.cu: which kernels attention takes (llmc/attend.cuh), and that a wrong one is refused.
// The kernels by wgmma are compared with the truth by dev/kernels/attention_sm90.cu, and here, by
// attend_choose itself, with those by mma.sync.
#include "gpu_test.cuh"
#include "../../llmc/attend.cuh"

// Plans and memory of a run. The emulator's GPU has this compute capability meanwhile.
struct Chooser {
    Gpu gpu;
    real *arena;
    std::string compute;
    enum { ARENA = 1 << 20 };
    Chooser(const char *emulated = "90") : gpu(*test_gpu()) {
        cudaDeviceProp device;
        compute = getenv("EMU_COMPUTE") ? getenv("EMU_COMPUTE") : "90";
        setenv("EMU_COMPUTE", emulated, 1);
        cudaCheck(cudaGetDeviceProperties(&device, 0));
        gpu.capability = 10 * device.major + device.minor;
        gpu.plans = plans_create(false);
        arena = device_empty<real>(ARENA);
    }
    ~Chooser(void) {
        cudaCheck(cudaStreamSynchronize(gpu.stream));
        plans_destroy(gpu.plans);
        cudaCheck(cudaFree(arena));
        setenv("EMU_COMPUTE", compute.c_str(), 1);
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
    for (int kind : timed.gpu.plans->kinds)
        EXPECT(kind == BY_MMA || kind == BY_WGMMA, "timing chose %s", KIND_NAMES[kind]);
}

#if !defined(__CUDACC__)
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
            expect_words(words, "7 note: attention_forward by wgmma is wrong on this GPU",
                         "a wrong kernel");
            EXPECT(words.find("attention_backward by wgmma is wrong") != std::string::npos,
                   "a wrong backward: %s", words.c_str());
        }
    unsetenv("EMU_WRONG_WGMMA");
}
#endif
