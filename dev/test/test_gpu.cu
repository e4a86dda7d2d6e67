// test_gpu.cu: gpu_open finds the GPU or says in one line why it cannot be used, and CUDA graphs,
// as the trainer uses them (--graph), replay what they recorded.
#include "gpu_test.cuh"
#include <string>
#include <unistd.h>

static __global__ void twice_plus_kernel(float *x, const float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 2 * x[i] + y[i];
}

// On its own also what cuda_gpu runs in another process, on a machine with something missing.
GPU_TEST(cuda_gpu_open) {
    const int n = 100;
    Gpu gpu;
    gpu_open(&gpu, 0);
    unsigned flags = 0;
    cudaCheck(cudaStreamGetFlags(gpu.stream, &flags));
    EXPECT(flags == cudaStreamNonBlocking, "flags %u: a stream that the default stream waits for",
           flags);
    EXPECT(!gpu.scratch && !gpu.scratch_size && !gpu.plans, "what others fill in starts empty");
    Values one(n, 1);
    float *x = device_copy<float>(&one), *y = device_copy<float>(&one);
    cudaCheck(cudaDeviceSynchronize());  // the copies of device_copy are the default stream's
    LAUNCH(twice_plus_kernel, CEIL_DIV(n, 64), 64, 0, gpu.stream, x, y, n);
    gpu_close(&gpu);
    EXPECT(!gpu.stream, "closed");
    expect_close(x, Values(n, 3), "a kernel on the stream");
    cudaCheck(cudaFree(x));
    cudaCheck(cudaFree(y));
}

// Runs cuda_gpu_open in this program again, with more in its environment; it must refuse, with
// these words and in these many lines.
static void expect_refused(const char *environment, const char *words) {
    char self[4096] = "", line[1024];
    std::string output;
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    EXPECT(length > 0, "where is this program?");
    std::string command = std::string("env ") + environment + " '" + self + "' cuda_gpu_open 2>&1";
    FILE *pipe = popen(command.c_str(), "r");
    EXPECT(pipe, "popen");
    while (pipe && fgets(line, sizeof line, pipe)) output += line;
    int status = pipe ? pclose(pipe) : -1, lines = 0;
    for (char c : output) lines += c == '\n';
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1, "%s: expected status 1, found %#x: %s",
           environment, status, output.c_str());
    EXPECT(output.find(words) != std::string::npos, "%s: expected '%s', found: %s", environment,
           words, output.c_str());
    EXPECT(output.compare(0, 7, "error: ") == 0 && output.find("\n  -> ") != std::string::npos &&
               lines == 3,
           "%s: what is wrong, what helps, where: %s", environment, output.c_str());
}

// Which devices a process sees is not the emulator's to say, so a GPU can be hidden everywhere; the
// rest takes a machine made for it (dev/emu).
GPU_TEST(cuda_gpu) {
    expect_refused("EMU_DEVICES=0 CUDA_VISIBLE_DEVICES=",
                   "expected an NVIDIA GPU, found none; CUDA_VISIBLE_DEVICES=\n");
#if !defined(__CUDACC__)
    expect_refused("-u CUDA_VISIBLE_DEVICES EMU_DEVICES=0", "expected an NVIDIA GPU, found none\n");
    expect_refused("EMU_DRIVER=12040", "or later, found one for CUDA 12.4\n");
    expect_refused("EMU_DRIVER=0", "expected an NVIDIA driver, found none");
    expect_refused("EMU_COMPUTE=75", "8.0 (A100, RTX 30) or later, found emulator with 7.5");
    expect_refused("EMU_COMPUTE=120 EMU_BUILT=90",
                   "not built for emulator, compute capability 12.0\n"
                   "  -> make train_gpt ARCH=120\n");
    expect_refused("EMU_COMPUTE=90 EMU_BUILT=80",
                   "not built for emulator, compute capability 9.0\n"
                   "  -> make train_gpt ARCH=90a\n");
#endif
}

#if !defined(__CUDACC__)
// A launch that is refused is the culprit itself; one that only finds that a kernel before it has
// failed is not. n = 0: ThreadSanitizer takes accesses of a process that was forked for races.
GPU_TEST(cuda_gpu_failed) {
    cudaStream_t stream = test_gpu()->stream;
    float *x = device_empty<float>(64);
    auto launch = [=](int threads) { LAUNCH(twice_plus_kernel, 1, threads, 0, stream, x, x, 0); };
    expect_words(said([=] {
                     launch(1025);
                     return 0;
                 }),
                 "1 error: a launch was refused: invalid configuration argument: "
                 "LAUNCH(twice_plus_kernel, 1, threads, 0, stream, x, x, 0) with grid",
                 "a block too large");
    setenv("EMU_FAULT", "700", 1);
    expect_words(said([=] {
                     launch(64);
                     cudaStreamSynchronize(stream);
                     launch(64);
                     return 0;
                 }),
                 "1 error: CUDA: a kernel launched before failed: an illegal memory access was "
                 "encountered; found by twice_plus_kernel, 1, threads",
                 "a launch after a kernel that failed");
    expect_words(said([=] {
                     launch(64);
                     cudaCheck(cudaStreamSynchronize(stream));
                     return 0;
                 }),
                 "1 error: CUDA: a kernel launched before failed: an illegal memory access was "
                 "encountered; found by cudaStreamSynchronize(stream)\n  -> CUDA_LAUNCH_BLOCKING=1",
                 "a call after it");
    unsetenv("EMU_FAULT");
    cudaFree(x);
}
#endif

// Three micro-steps: the inputs go through pinned memory, the state stays on the device.
GPU_TEST(cuda_graph) {
    const int n = 1000;
    Gpu gpu;
    cudaGraph_t graph;
    cudaGraphExec_t step;
    float *pinned;
    gpu_open(&gpu, 0);
    Values zero(n, 0), want(n, 0);
    float *x = device_copy<float>(&zero), *y = device_empty<float>(n);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMallocHost((void **)&pinned, n * sizeof(float)));
    cudaCheck(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    cudaCheck(cudaMemcpyAsync(y, pinned, n * sizeof(float), cudaMemcpyHostToDevice, gpu.stream));
    for (int half = 0; half < 2; half++)
        LAUNCH(twice_plus_kernel, CEIL_DIV(n, 128), 128, 0, gpu.stream, x, y, n);
    cudaCheck(cudaStreamEndCapture(gpu.stream, &graph));
    cudaCheck(cudaGraphInstantiate(&step, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    cudaCheck(cudaStreamSynchronize(gpu.stream));
    expect_close(x, zero, "a recording computes nothing");
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < n; i++) {
            pinned[i] = (float)(i % 7 + round);
            want[i] = 2 * (2 * want[i] + pinned[i]) + pinned[i];
        }
        cudaCheck(cudaGraphLaunch(step, gpu.stream));
        cudaCheck(cudaStreamSynchronize(gpu.stream));
        expect_close(x, want, "a replay");
    }
    cudaCheck(cudaGraphExecDestroy(step));
    gpu_close(&gpu);
    cudaCheck(cudaFreeHost(pinned));
    cudaCheck(cudaFree(x));
    cudaCheck(cudaFree(y));
}
