// gpu_test.cuh: what tests of CUDA layers share. A layer's test fills device arrays with random
// numbers of the storage type, computes the same layer in double with plain loops on those very
// numbers, and compares by normalized mean squared error.
#pragma once
#include "../../llmc/gpu.cuh"
#include "../../llmc/modes.h"
#include "../../llmc/rand.h"
#include "test.h"
#include <functional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

// The one bound per precision of the whole repository, for every tensor of every layer and mode:
// sum (x - y)^2 <= TOLERANCE * sum y^2. float: as the judge's own float build against double
// (test_gpt.c). bfloat16: a value keeps 8 bits, so one rounding has a mean square of 1.3e-6, and
// the few dozen between a weight and its gradient, with differences of nearly equal numbers among
// them, add up: the worst tensor of all modes is at 2.7e-3.
static const double TOLERANCE = sizeof(real) == 4 ? 1e-8 : 5e-3;

// On a real GPU the library's algorithms are its own; of the emulated ones every rounding is known.
#if defined(__CUDACC__)
static const bool ON_GPU = true;
#else
static const bool ON_GPU = false;
#endif

// GPU_TEST(name) { ... } is a test; main runs all that are linked, in the order of their names. Two
// of one name do not link.
struct GpuTest {
    const char *name;
    void (*run)(void);
    GpuTest *next;
    static GpuTest *&first() { static GpuTest *list; return list; }
    GpuTest(const char *n, void (*f)(void)) : name(n), run(f) {
        GpuTest **at = &first();
        while (*at && strcmp((*at)->name, n) < 0) at = &(*at)->next;
        next = *at;
        *at = this;
    }
};
#define GPU_TEST(name)                        \
    void name(void);                          \
    static GpuTest name##_entry(#name, name); \
    void name(void)

typedef std::vector<double> Values;

// The GPU context tests launch with.
static inline Gpu *test_gpu(void) {
    static Gpu gpu;
    if (!gpu.stream) {
        cudaCheck(cudaStreamCreate(&gpu.stream));
        gpu.processors = 2;       // so few that a block of grouped products has several tiles
        gpu.l2_bytes = 64 << 10;  // so little that attention has groups of heads
        int shared;
        cudaCheck(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        gpu.shared_bytes = shared;
        gpu.scratch_size = 1 << 20;
        cudaCheck(cudaMalloc((void **)&gpu.scratch, gpu.scratch_size * sizeof(float)));
    }
    return &gpu;
}

// A device array of exactly these values, rounded to T; the values become what was stored.
template <typename T> static T *device_copy(Values *values) {
    std::vector<T> rounded(values->size());
    T *device;
    for (size_t i = 0; i < values->size(); i++)
        (*values)[i] = to_float(rounded[i] = T((float)(*values)[i]));
    cudaCheck(cudaMalloc((void **)&device, values->size() * sizeof(T)));
    cudaCheck(cudaMemcpy(device, rounded.data(), values->size() * sizeof(T),
                         cudaMemcpyHostToDevice));
    return device;
}

// mean + std * normal, n of them.
static inline Values random_values(size_t n, uint64_t seed, double std = 1, double mean = 0) {
    Values v(n);
    for (size_t i = 0; i < n; i++) v[i] = mean + std * rand_normal(seed, i);
    return v;
}

// An array whose content is NaN until something writes it.
template <typename T> static T *device_empty(size_t n) {
    T *device;
    cudaCheck(cudaMalloc((void **)&device, n * sizeof(T)));
    cudaCheck(cudaMemset(device, 0xff, n * sizeof(T)));
    return device;
}

template <typename T> static Values host_values(const T *device, size_t n) {
    std::vector<T> raw(n);
    Values v(n);
    cudaCheck(cudaDeviceSynchronize());
    cudaCheck(cudaMemcpy(raw.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) v[i] = to_float(raw[i]);
    return v;
}

static inline double nmse(const Values &got, const Values &want) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return norm > 0 ? error / norm : error;
}

// The device array equals `want` within the bound.
template <typename T> static void expect_close(const T *device, const Values &want,
                                               const char *what, double allowed = TOLERANCE) {
    double e = nmse(host_values(device, want.size()), want);
    EXPECT(e <= allowed, "%s: normalized mean squared error %.3g, allowed %.3g", what, e, allowed);
}

// The emulator's GPU has this compute capability meanwhile.
struct Emulated {
    std::string before;
    Emulated(const char *compute) : before(getenv("EMU_COMPUTE") ? getenv("EMU_COMPUTE") : "90") {
        setenv("EMU_COMPUTE", compute, 1);
    }
    ~Emulated(void) { setenv("EMU_COMPUTE", before.c_str(), 1); }
};
static inline int gpu_capability(void) {
    cudaDeviceProp device;
    cudaCheck(cudaGetDeviceProperties(&device, 0));
    return 10 * device.major + device.minor;
}

#if !defined(__CUDACC__)
// Runs body in a process of its own, where a GPU could not be used. Returns its status, a space,
// and its output.
static inline std::string said(std::function<int()> body) {
    int fds[2];
    std::string words;
    char piece[512];
    CHECK(pipe(fds) == 0, "no pipe");
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0, "no process");
    if (child == 0) {
        dup2(fds[1], STDOUT_FILENO), dup2(fds[1], STDERR_FILENO);
        int status = body();
        fflush(stdout);
        _exit(status);
    }
    close(fds[1]);
    for (ssize_t got; (got = read(fds[0], piece, sizeof piece)) > 0;)
        words.append(piece, (size_t)got);
    close(fds[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return std::to_string(WIFEXITED(status) ? WEXITSTATUS(status) : -1) + " " + words;
}
static inline void expect_words(const std::string &got, const char *words, const char *what) {
    EXPECT(got.compare(0, strlen(words), words) == 0, "%s: \"%s\", expected \"%s\"", what,
           got.c_str(), words);
}
#endif
