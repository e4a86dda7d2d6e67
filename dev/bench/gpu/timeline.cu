// timeline.cu: the CUDA trainer with an event before and after everything that it gives to the GPU:
// kernels, products of the library, copies and fills. Its flags are train_gpt's.
//
//   make build/cuda-timeline-pre-bf16/train_gpt
//   TIMELINE=timeline.jsonl build/cuda-timeline-pre-bf16/train_gpt --model gpt2-124M ...
//
// It leaves out the first step, records the TIMELINE_STEPS (10) after it, writes one JSON line for
// each launch and ends. timeline.py makes the table: by kernel, with the gaps between launches, it
// adds up to the step.
//
// A launch is named by the text of LAUNCH, a product by m, n and k as the library counts them
// (linear.cuh). An event takes time of the GPU too, which the gaps show. CUPTI (cupti.cpp) needs no
// events, but does not know the shapes of products. --graph must be off.
#include "../../../llmc/gpu.cuh"
#include <cublasLt.h>
#include <map>
#include <string>
#include <tuple>
#include <unistd.h>
#include <vector>

struct Timeline {
    struct Launch { std::string name; cudaEvent_t from, to; };
    std::vector<Launch> launches;
    std::map<cublasLtMatrixLayout_t, std::pair<int64_t, int64_t>> sizes;   // rows, columns
    int updates = 0;                       // launches of AdamW so far: each ends a step
};
static Timeline timeline;

static int timeline_steps(void) {
    const char *steps = getenv("TIMELINE_STEPS");
    return steps ? atoi(steps) : 10;
}

static cudaEvent_t timeline_event(cudaStream_t stream) {
    cudaEvent_t event;
    cudaCheck(cudaEventCreate(&event));
    cudaCheck(cudaEventRecord(event, stream));
    return event;
}

// Milliseconds since the first launch.
static float timeline_at(cudaEvent_t event) {
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, timeline.launches[0].from, event));
    return ms;
}

static void timeline_write(void) {
    const char *path = getenv("TIMELINE");
    FILE *f = fopen(path ? path : "timeline.jsonl", "w");
    CHECK(f, "%s cannot be written\n  -> TIMELINE=FILE", path ? path : "timeline.jsonl");
    cudaCheck(cudaDeviceSynchronize());
    for (const Timeline::Launch &x : timeline.launches) {
        float from = timeline_at(x.from), to = timeline_at(x.to);
        fprintf(f, "{\"name\": \"%s\", \"start\": %.4f, \"ms\": %.4f}\n", x.name.c_str(), from,
                to - from);
    }
    CHECK(fclose(f) == 0, "the timeline cannot be written\n  -> TIMELINE=FILE elsewhere");
    fflush(stdout);
    _exit(0);
}

// Runs `launch`. From the first update on, which is the first that is recorded, between two events.
template <typename F> static auto timeline_record(std::string name, cudaStream_t stream, F launch) {
    bool update = name.find("adamw_kernel") != std::string::npos;
    if (!update && !timeline.updates) return launch();
    cudaEvent_t from = timeline_event(stream);
    auto finish = [&] {
        timeline.launches.push_back({name, from, timeline_event(stream)});
        timeline.updates += update;
        if (timeline.updates > timeline_steps()) timeline_write();
    };
    struct AtEnd { decltype(finish) &run; ~AtEnd() { run(); } } at_end{finish};
    return launch();
}

// The text of LAUNCH up to template or other arguments; a kernel that was chosen before, and is
// called `kernel` there, has the name of the function that launches it.
static std::string timeline_name(const char *text, const char *function) {
    std::string name(text, strcspn(text, "<,"));
    return name == "kernel" ? function : name;
}

template <typename... P, typename... A>
static void timeline_launch(const char *function, const char *file, int line, const char *text,
                            void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic,
                            cudaStream_t stream, A... arguments) {
    timeline_record(timeline_name(text, function), stream, [&] {
        launch_kernel(file, line, text, kernel, grid, block, dynamic, stream, arguments...);
    });
}

static cublasStatus_t timeline_layout(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                      int64_t rows, int64_t cols, int64_t ld) {
    cublasStatus_t status = cublasLtMatrixLayoutCreate(layout, type, rows, cols, ld);
    timeline.sizes[*layout] = {rows, cols};
    return status;
}

// The arguments of cublasLtMatmul: A's layout is number 4, D's 11, the stream the last.
template <typename... A> static cublasStatus_t timeline_matmul(A... arguments) {
    auto all = std::make_tuple(arguments...);
    auto a = timeline.sizes[std::get<4>(all)], d = timeline.sizes[std::get<11>(all)];
    std::string name = "product " + std::to_string(d.first) + " " + std::to_string(d.second) + " "
                       + std::to_string(a.first * a.second / d.first);
    return timeline_record(name, std::get<15>(all), [&] { return cublasLtMatmul(arguments...); });
}

static cudaError_t timeline_fill(void *p, int value, size_t bytes, cudaStream_t stream) {
    return timeline_record("fill", stream,
                           [&] { return cudaMemsetAsync(p, value, bytes, stream); });
}

static cudaError_t timeline_copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                 cudaStream_t stream) {
    return timeline_record("copy", stream,
                           [&] { return cudaMemcpyAsync(to, from, bytes, kind, stream); });
}

#undef LAUNCH
#define LAUNCH(...) timeline_launch(__func__, __FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)
#define cublasLtMatmul(...) timeline_matmul(__VA_ARGS__)
#define cublasLtMatrixLayoutCreate(...) timeline_layout(__VA_ARGS__)
#define cudaMemsetAsync(...) timeline_fill(__VA_ARGS__)
#define cudaMemcpyAsync(...) timeline_copy(__VA_ARGS__)
#include "../../../train_gpt.cu"
