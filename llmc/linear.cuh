// linear.cuh: linear layers (matrix multiplication, GEMM) by NVIDIA's library cuBLASLt.
//
//   linear_forward               y = c x W^T + b + scale add
//   linear_forward_wide          y = c x W^T, stored as float
//   linear_gelu_forward          pre = c x W^T + b,  h = gelu(pre)
//   linear_backward_input        dx = c dy W + scale add
//   linear_gelu_backward_input   dpre = gelu'(pre) * (c dy W)
//   linear_backward_weight       dW = c dy^T x (SET or ADD),  db += sum of the rows of dy
//   linear_backward              linear_backward_weight, then linear_backward_input
//
// Shapes, as in train_gpt.c, with contiguous rows:
//   x, dx [n, in]      W [out, in], dW [out, in] wide      y, dy, pre, h [n, out]
//   b [out], db [out] wide; nullptr: no bias               add: as the result, may be nullptr
// Saved for backward: x, and pre where GELU follows.
//
// The library is column-major: it walks down a column where C walks along a row. So it sees each of
// our arrays transposed:
//
//   ours, [2, 3]    0 1 2        in memory          the library's, [3, 2]            0 3
//                   3 4 5        0 1 2 3 4 5        with leading dimension 3         1 4
//                                                                                    2 5
// It computes D = alpha op(A) op(B) + beta C. D [m, n] is the result, op(A) [m, k] and op(B) [k, n]
// are the operands, op is the identity or a transpose, and C [m, n] is added: alpha is c, C is
// add^T and beta its scale. For dW, C is D itself and beta 0 (SET: D is not read) or 1 (ADD). The
// products above, transposed (* if op transposes once more):
//
//   ours                its D               A       B       m      n      k
//   y  = x W^T          y^T  = W x^T        W *     x       out    n      in
//   dx = dy W           dx^T = W^T dy^T     W       dy      in     n      out
//   dW = dy^T x         dW^T = x^T dy       x       dy *    in     out    n
//
// The epilogue is the library's name for what follows a product in the same kernel: the bias, GELU
// (which also writes pre, the "auxiliary" matrix), and the derivative of GELU. If the library has
// no such kernel, or a slower one with GELU (matmul_or), the plain product runs, then a small
// kernel of ours. db always has kernels of ours: BGRADB, the library's epilogue for it, would read
// dy once more, too.
//
// A plan holds the descriptors of one product and the algorithm chosen for it. It is made at the
// product's first use and kept. The algorithm is the library's first guess, or, while `tuning`, the
// fastest of its guesses, timed at that use. The choice is saved with the run (plans_text,
// plans_read) because another algorithm sums in another order: the same plans give the same bits.
//
// Computed floors (gpu.cuh) in bf16 for n = 65536, C = 768, from FLOP; in parentheses from bytes,
// which the FLOP hide:
//   qkv .294 ms (.094)                attention's output .098 (.047)
//   ffn up with GELU .391 (.212)      ffn down .391 (.118)
//   LM head 6.41 (1.58)               each three times: forward, dx, dW
#pragma once
#include <cublasLt.h>
#include "ffn.cuh"
#include "norm.cuh"
#include "run/json.h"

// A linear layer with its gradients.
struct Linear {
    const real *w, *b;         // [out, in], [out]; b and db are nullptr without a bias
    wide *dw, *db;             // their gradients
    int64_t n;                 // rows of x and y
    int out, in;
    float c;                   // factor of the product
    int to_dw = ADD;           // SET or ADD: dw
};

// scale * x joins a result: a residual, or the gradient of one. {}: nothing does.
struct Residual {
    const real *x;
    float scale;
};

// ------------------------------------------------------------------------------------------ plans

enum { PLANS_MAX = 128, GUESSES = 16, TIMED_RUNS = 5, PLANS_WORKSPACE = 32 << 20, ALIGNMENT = 16 };
enum { NOTHING_ADDED, ADDED_ELSEWHERE, ADDED_IN_PLACE };  // C: absent, another array, D itself

// The bit that epilogues with the auxiliary matrix pre have in common.
enum { EPILOGUE_AUX = CUBLASLT_EPILOGUE_GELU_AUX & ~CUBLASLT_EPILOGUE_GELU };

// Everything that a plan depends on, in the library's terms. All are int64_t, because plan_find
// compares bytes. Rows are contiguous, so sizes and transposes give the leading dimensions.
struct PlanKey {
    int64_t m, n, k;
    int64_t ta, tb;            // A, B are transposed
    int64_t wide_out = 0;      // C and D are float, whatever `real` is
    int64_t add = 0;           // NOTHING_ADDED..
    int64_t epilogue = 0;      // PLAIN..
    int64_t batch = 1;         // products of neighbours in memory
};

struct Plan {
    PlanKey key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    bool found;                // false: two kernels, as the library has none or a slower one
    bool keep;                 // it was timed, or read from a file
};

// Layers that have kernels of two kinds, and what a run chose (kinds.cuh). Plans keep that choice
// too. The experts' three are in the order of moe.cuh's forms.
enum { ATTENTION_FORWARD, ATTENTION_BACKWARD, EXPERTS_FORWARD, EXPERTS_INPUT, EXPERTS_WEIGHT,
       LAYERS_OF_TWO_KINDS };
enum { UNCHOSEN, BY_MMA, BY_WGMMA, KIND_COUNT };
static const char *const LAYER_NAMES[LAYERS_OF_TWO_KINDS] = {
    "attention_forward", "attention_backward", "experts_forward", "experts_input",
    "experts_weight"};
static const char *const KIND_NAMES[KIND_COUNT] = {"unchosen", "mma.sync", "wgmma"};

struct Plans {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    void *workspace;           // of PLANS_WORKSPACE bytes
    bool tf32, tuning;
    uint8_t kinds[LAYERS_OF_TWO_KINDS];
    char origin[512];          // the library, the GPU and the precision that plans are for
    int count, prepared;       // prepared: the first ones, of training: graphs need them
    Plan plans[PLANS_MAX];
};

// A product with its arrays.
struct Matmul {
    PlanKey key;
    const void *a, *b, *c;
    void *d;
    float alpha, beta;
    const void *bias = nullptr, *aux = nullptr;    // aux: pre
};

// The numbers of a key in a plan's text.
#define KEY_FIELDS(FIELD) \
FIELD(m) FIELD(n) FIELD(k) FIELD(ta) FIELD(tb) FIELD(wide_out) FIELD(add) FIELD(epilogue) \
FIELD(batch)

// What follows a product in the same kernel.
enum Epilogue { PLAIN, BIAS, GELU, GELU_BIAS, GELU_BACKWARD, EPILOGUE_COUNT };
static const struct {
    uint32_t bits;
    const char *name;
} EPILOGUES[EPILOGUE_COUNT] = {
    {CUBLASLT_EPILOGUE_DEFAULT, "none"},
    {CUBLASLT_EPILOGUE_BIAS, "bias"},
    {CUBLASLT_EPILOGUE_GELU_AUX, "gelu"},
    {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, "bias, gelu"},
    {CUBLASLT_EPILOGUE_DGELU, "gelu backward"},
};

// k: the product; all 0 where the call is about none.
static inline void lt_check(cublasStatus_t status, const char *call, PlanKey k = {}) {
    CHECK(status == CUBLAS_STATUS_SUCCESS,
          "%s: %s, for D[%lld, %lld] = op(A) op(B) with k %lld, transposed %d %d, epilogue %s\n"
          "  -> CUBLASLT_LOG_LEVEL=1 prints the library's reason; "
          "the library must be of the toolkit this was built with",
          call, cublasLtGetStatusName(status), (long long)k.m, (long long)k.n, (long long)k.k,
          (int)k.ta, (int)k.tb, EPILOGUES[k.epilogue].name);
}
#define ltCheck(call) lt_check(call, #call)

template <typename T>
static void preference_set(Plans *p, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    ltCheck(cublasLtMatmulPreferenceSetAttribute(p->preference, attribute, &value, sizeof value));
}

static inline Plans *plans_create(bool tf32) {
    Plans *p = (Plans *)check_alloc(sizeof *p, "the plans of matrix products");
    const char *precision = sizeof(real) == sizeof(float) ? "fp32" : "bf16";
    cudaDeviceProp device;
    int id;
    p->tf32 = tf32 && sizeof(real) == sizeof(float);
    // The 64 bytes of an algorithm have a meaning for one library and one GPU only; the precision
    // decides which algorithms fit.
    cudaCheck(cudaGetDevice(&id));
    cudaCheck(cudaGetDeviceProperties(&device, id));
    check_format(p->origin, sizeof p->origin, "cuBLASLt %zu on %s, %s", cublasLtGetVersion(),
                 device.name, p->tf32 ? "tf32" : precision);
    ltCheck(cublasLtCreate(&p->handle));
    cudaCheck(cudaMalloc(&p->workspace, PLANS_WORKSPACE));
    ltCheck(cublasLtMatmulPreferenceCreate(&p->preference));
    preference_set<uint64_t>(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, PLANS_WORKSPACE);
    // Allows split-K: several blocks share the depth of one tile, as dW with its few tiles and deep
    // sums needs. Their partial products meet in the workspace as floats, in a fixed order, so bits
    // repeat. Not allowed: sums in place, whose order varies, and sums in bf16.
    preference_set<uint32_t>(p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                             CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    for (cublasLtMatmulPreferenceAttributes_t matrix :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        preference_set<uint32_t>(p, matrix, ALIGNMENT);
    return p;
}

// Removes all plans, or those that were neither timed nor prepared: the next use makes them again.
// Work that is already in the stream does not need them.
static inline void plans_forget(Plans *plans, bool all) {
    int kept = 0;
    for (int i = 0; i < plans->count; i++) {
        Plan *p = &plans->plans[i];
        if ((p->keep || i < plans->prepared) && !all) {
            plans->plans[kept++] = *p;
            continue;
        }
        ltCheck(cublasLtMatmulDescDestroy(p->desc));
        for (cublasLtMatrixLayout_t layout : {p->a, p->b, p->d})
            ltCheck(cublasLtMatrixLayoutDestroy(layout));
    }
    plans->count = kept;
}

static inline void plans_destroy(Plans *plans) {
    plans_forget(plans, true);
    ltCheck(cublasLtMatmulPreferenceDestroy(plans->preference));
    ltCheck(cublasLtDestroy(plans->handle));
    cudaCheck(cudaFree(plans->workspace));
    free(plans);
}

template <typename T>
static void plan_set(Plan *p, cublasLtMatmulDescAttributes_t attribute, T value) {
    ltCheck(cublasLtMatmulDescSetAttribute(p->desc, attribute, &value, sizeof value));
}

static inline void plan_set_arrays(Plan *p, const void *bias, const void *aux) {
    uint32_t epilogue = EPILOGUES[p->key.epilogue].bits;
    if (epilogue & CUBLASLT_EPILOGUE_BIAS) plan_set(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (epilogue & EPILOGUE_AUX) plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
}

static inline cublasLtMatrixLayout_t matrix_layout(cudaDataType type, int64_t rows, int64_t cols,
                                                   int64_t batch) {
    cublasLtMatrixLayout_t layout;
    int32_t count = batch;
    int64_t stride = rows * cols;
    ltCheck(cublasLtMatrixLayoutCreate(&layout, type, rows, cols, rows));
    if (batch == 1) return layout;
    ltCheck(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                             sizeof count));
    ltCheck(cublasLtMatrixLayoutSetAttribute(
        layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
    return layout;
}

static inline Plan *plan_find(Plans *plans, const PlanKey *key) {
    for (int i = 0; i < plans->count; i++)
        if (!memcmp(&plans->plans[i].key, key, sizeof *key)) return &plans->plans[i];
    return nullptr;
}

// A new plan that has no algorithm yet. A full table first forgets what it may: each
// length of a prompt or a text is a product of its own.
static inline Plan *plan_make(Plans *plans, PlanKey key) {
    cudaDataType type = sizeof(real) == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
    cublasComputeType_t sums = plans->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    if (plans->count == PLANS_MAX) plans_forget(plans, false);
    CHECK(plans->count < PLANS_MAX,
          "more than %d different matrix products\n  -> a larger PLANS_MAX in llmc/linear.cuh",
          PLANS_MAX);
    Plan *p = &plans->plans[plans->count++];
    *p = {};
    p->key = key;
    ltCheck(cublasLtMatmulDescCreate(&p->desc, sums, CUDA_R_32F));
    plan_set<int32_t>(p, CUBLASLT_MATMUL_DESC_TRANSA, key.ta ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan_set<int32_t>(p, CUBLASLT_MATMUL_DESC_TRANSB, key.tb ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE, EPILOGUES[key.epilogue].bits);
    if (EPILOGUES[key.epilogue].bits & EPILOGUE_AUX)
        plan_set<int64_t>(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.m);
    // For its guesses the library reads from these pointers how aligned all later ones will be.
    plan_set_arrays(p, (void *)ALIGNMENT, (void *)ALIGNMENT);
    p->a = matrix_layout(type, key.ta ? key.k : key.m, key.ta ? key.m : key.k, key.batch);
    p->b = matrix_layout(type, key.tb ? key.n : key.k, key.tb ? key.k : key.n, key.batch);
    p->d = matrix_layout(key.wide_out ? CUDA_R_32F : type, key.m, key.n, key.batch);
    return p;
}

static inline cublasStatus_t plan_run(const Plan *p, const cublasLtMatmulAlgo_t *algo,
                                      const Matmul *f, Gpu *gpu) {
    return cublasLtMatmul(gpu->plans->handle, p->desc, &f->alpha, f->a, p->a, f->b, p->b, &f->beta,
                          f->c, p->d, f->d, p->d, algo, gpu->plans->workspace, PLANS_WORKSPACE,
                          gpu->stream);
}

// Milliseconds of the fastest of a few runs after one that warms up; infinite if `start` returns
// false, which says that it cannot run.
template <typename F> static float fastest(Gpu *gpu, F start) {
    cudaEvent_t from, to;
    float best = INFINITY, ms;
    cudaCheck(cudaEventCreate(&from));
    cudaCheck(cudaEventCreate(&to));
    for (int run = 0; run <= TIMED_RUNS; run++) {
        cudaCheck(cudaEventRecord(from, gpu->stream));
        if (!start()) break;
        cudaCheck(cudaEventRecord(to, gpu->stream));
        cudaCheck(cudaEventSynchronize(to));
        cudaCheck(cudaEventElapsedTime(&ms, from, to));
        if (run > 0 && ms < best) best = ms;
    }
    cudaCheck(cudaEventDestroy(from));
    cudaCheck(cudaEventDestroy(to));
    return best;
}

// Chooses the algorithm; for an epilogue there may be none, or none below `limit` milliseconds.
// Tuning runs every guess on the product's own arrays, so it spoils a result that is added to.
static inline void plan_choose(Plan *p, const Matmul *f, float limit, Gpu *gpu) {
    Plans *plans = gpu->plans;
    cublasLtMatmulHeuristicResult_t guesses[GUESSES];
    int count = 0;
    float best = limit;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(plans->handle, p->desc, p->a, p->b, p->d, p->d,
                                       plans->preference, GUESSES, guesses, &count);
    if (status != CUBLAS_STATUS_SUCCESS) count = 0;
    else status = CUBLAS_STATUS_NOT_SUPPORTED;  // the reason if no guess runs
    plan_set_arrays(p, f->bias, f->aux);
    for (int i = 0; i < count && (plans->tuning || !p->found); i++) {
        if (guesses[i].state != CUBLAS_STATUS_SUCCESS) continue;
        auto start = [&] { return plan_run(p, &guesses[i].algo, f, gpu) == CUBLAS_STATUS_SUCCESS; };
        float ms = plans->tuning ? fastest(gpu, start) : 0;
        if (ms >= best) continue;
        best = ms;
        p->algo = guesses[i].algo;
        p->found = true;
    }
    if (!p->found && p->key.epilogue == PLAIN)
        lt_check(status, "cublasLtMatmulAlgoGetHeuristic", p->key);
    p->keep = plans->tuning;
}

// Starts the product with this epilogue. Returns false, and starts nothing, if the library has no
// algorithm for the two together, or, while tuning, none that takes less than `limit` milliseconds.
// The library may refuse its own guess; without timing, that shows only here.
static inline bool matmul(Matmul f, Epilogue epilogue, Gpu *gpu, float limit = INFINITY) {
    f.key.epilogue = epilogue;
    f.key.add = f.c == f.d ? ADDED_IN_PLACE : ADDED_ELSEWHERE;
    if (!f.c || f.beta == 0) {
        f.key.add = NOTHING_ADDED;
        f.c = f.d;
        f.beta = 0;
    }
    Plan *p = plan_find(gpu->plans, &f.key);
    if (!p) plan_choose(p = plan_make(gpu->plans, f.key), &f, limit, gpu);
    if (!p->found) return false;
    plan_set_arrays(p, f.bias, f.aux);
    cublasStatus_t status = plan_run(p, &p->algo, &f, gpu);
    bool refused = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (refused && epilogue != PLAIN) return p->found = false;
    lt_check(status, "cublasLtMatmul", p->key);
    return true;
}

// The product with its epilogue in one kernel; or `apart`, the plain product and kernels of ours,
// if the library has no such kernel or tuning finds it slower. A plan that is not `found` keeps
// this choice.
template <typename F> static void matmul_or(Matmul f, Epilogue epilogue, Gpu *gpu, F apart) {
    f.key.epilogue = epilogue;
    bool timed = gpu->plans->tuning && !plan_find(gpu->plans, &f.key);
    float limit = timed ? fastest(gpu, [&] { apart(); return true; }) : INFINITY;
    if (!matmul(f, epilogue, gpu, limit)) apart();
}

// ---------------------------------------------------------------------------------- plans as text

// The timed plans as JSON; the library's first guess restores the others. The caller frees it.
static inline char *plans_text(const Plans *plans) {
    char *text = nullptr;
    const char *separator = "\n";
    size_t size;
    FILE *f = text_begin(&text, &size);
    fprintf(f, "{\"origin\": ");
    json_write_string(f, plans->origin);
    fprintf(f, ", \"kernels\": {");
    for (int i = 0; i < LAYERS_OF_TWO_KINDS; i++)
        fprintf(f, "%s\"%s\": \"%s\"", i ? ", " : "", LAYER_NAMES[i], KIND_NAMES[plans->kinds[i]]);
    fprintf(f, "}, \"plans\": [");
    for (int i = 0; i < plans->count; i++) {
        const Plan *p = &plans->plans[i];
        const unsigned char *algo = (const unsigned char *)&p->algo;
        if (!p->keep) continue;
        fprintf(f, "%s{", separator);
#define WRITE_FIELD(name) fprintf(f, "\"" #name "\": %lld, ", (long long)p->key.name);
        KEY_FIELDS(WRITE_FIELD)
#undef WRITE_FIELD
        fprintf(f, "\"algo\": \"");
        for (size_t byte = 0; p->found && byte < sizeof p->algo; byte++)
            fprintf(f, "%02x", algo[byte]);
        fprintf(f, "\"}");
        separator = ",\n";
    }
    text_end(f, "\n]}\n");
    return text;
}

// Sizes are not checked: a plan with sizes that no product has is never found, and does no harm.
static inline void plan_read(Plans *plans, const Json *entry, const char *path) {
    const char *hex = json_get_string(entry, "algo", path);
    cublasLtMatmulHeuristicResult_t result = {};
    PlanKey key = {};
#define READ_FIELD(name) key.name = json_get_int(entry, #name, path);
    KEY_FIELDS(READ_FIELD)
#undef READ_FIELD
    CHECK(key.epilogue >= 0 && key.epilogue < EPILOGUE_COUNT,
          "%s: \"epilogue\": %lld is not known\n  -> use another checkpoint", path,
          (long long)key.epilogue);
    CHECK(!plan_find(plans, &key),
          "%s: the same product twice\n  -> use another checkpoint", path);
    Plan *p = plan_make(plans, key);
    const size_t DIGITS = 2 * sizeof p->algo;
    p->keep = true;
    p->found = *hex || key.epilogue == PLAIN;  // no digits: the product runs without this epilogue
    bool right = strspn(hex, "0123456789abcdef") == DIGITS && !hex[DIGITS];
    CHECK(!p->found || right,
          "%s: expected \"algo\" to be %zu digits of 0-9 and a-f, found \"%s\"\n"
          "  -> use another checkpoint", path, DIGITS, hex);
    if (!p->found) return;
    for (size_t byte = 0; byte < sizeof p->algo; byte++)
        sscanf(hex + 2 * byte, "%2hhx", (unsigned char *)&p->algo + byte);
    cublasStatus_t status = cublasLtMatmulAlgoCheck(plans->handle, p->desc, p->a, p->b, p->d, p->d,
                                                    &p->algo, &result);
    p->keep = status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= PLANS_WORKSPACE;
    if (p->keep) return;
    printf("note: %s: the library refuses a saved algorithm (%s): it is chosen anew\n", path,
           cublasLtGetStatusName(status));
    plans_forget(plans, false);
}

// The kernels that an earlier run chose. A layer that `kernels` does not name had only mma.sync
// then; nullptr names none.
static inline void kinds_read(Plans *plans, const Json *kernels, const char *path) {
    for (int i = 0; i < LAYERS_OF_TWO_KINDS; i++) {
        const char *kind = KIND_NAMES[BY_MMA], *layer = LAYER_NAMES[i];
        if (json_get(kernels, layer)) kind = json_get_string(kernels, layer, path);
        int k = 0;
        while (k < KIND_COUNT && strcmp(KIND_NAMES[k], kind)) k++;
        CHECK(k < KIND_COUNT, "%s: \"%s\": \"%s\" is not known\n  -> use another checkpoint", path,
              layer, kind);
        plans->kinds[i] = (uint8_t)k;
    }
}

// Replaces all plans by those that an earlier run wrote. If those are for another library, GPU or
// precision, it prints a note instead.
static inline void plans_read(Plans *plans, const char *text, const char *path) {
    Json *root = json_parse(text, strlen(text), path);
    const char *origin = json_get_string(root, "origin", path);
    const Json *entry = json_need(root, "plans", JSON_ARRAY, path)->first;
    if (strcmp(origin, plans->origin)) {
        printf("note: %s holds matrix plans of %s, this is %s: they are chosen anew, "
               "and sums may round differently\n", path, origin, plans->origin);
        entry = nullptr;
    } else {
        plans_forget(plans, true);
        kinds_read(plans, json_get(root, "kernels"), path);
    }
    for (; entry; entry = entry->next) plan_read(plans, entry, path);
    json_free(root);
}

// ---------------------------------------------------------------------------------------- forward

// y = c x W^T + add, or backward c x W + add, where x is dy.
static inline Matmul linear_matmul(bool forward, void *y, const real *x, const Linear &l,
                                   Residual add, const real *pre = nullptr) {
    int64_t m = forward ? l.out : l.in, k = forward ? l.in : l.out;
    return {{m, l.n, k, forward, 0}, l.w, x, add.x, y, l.c, add.scale, l.b, pre};
}

// y += b. Elements moved per row: 2 out.
static __global__ void __launch_bounds__(ROW_THREADS)
bias_kernel(real *y, const real *b, int out) {
    int j = row_column();
    if (j >= out) return;
    real *at = y + (int64_t)blockIdx.x * out + j;
    floats_store(at, floats_load(at) + floats_load(b + j));
}

// y = c x W^T + b + add, which may be y itself.
static inline void linear_forward(real *y, const real *x, const Linear &l, Residual add, Gpu *gpu) {
    Matmul f = linear_matmul(true, y, x, l, add);
    if (l.b && matmul(f, BIAS, gpu)) return;
    matmul(f, PLAIN, gpu);
    if (l.b) LAUNCH(bias_kernel, row_grid(l.n, l.out), ROW_THREADS, 0, gpu->stream, y, l.b, l.out);
}

// y = c x W^T without rounding to `real`: a router's logits.
static inline void linear_forward_wide(wide *y, const real *x, const Linear &l, Gpu *gpu) {
    Matmul f = linear_matmul(true, y, x, l, {});
    f.key.wide_out = 1;
    matmul(f, PLAIN, gpu);
}

// pre = c x W^T + b, h = gelu(pre)
static inline void linear_gelu_forward(real *h, real *pre, const real *x, const Linear &l,
                                       Gpu *gpu) {
    Matmul f = linear_matmul(true, h, x, l, {}, pre);
    matmul_or(f, l.b ? GELU_BIAS : GELU, gpu, [=] {
        linear_forward(pre, x, l, {}, gpu);
        activation_forward(h, pre, l.n, l.out, 0, gpu);
    });
}

// --------------------------------------------------------------------------------------- backward

// dx = c dy W + add, which may be dx itself.
static inline void linear_backward_input(real *dx, const real *dy, const Linear &l, Residual add,
                                         Gpu *gpu) {
    matmul(linear_matmul(false, dx, dy, l, add), PLAIN, gpu);
}

// dpre = gelu'(pre) * (c dy W)
static inline void linear_gelu_backward_input(real *dpre, const real *pre, const real *dy,
                                              const Linear &l, Gpu *gpu) {
    matmul_or(linear_matmul(false, dpre, dy, l, {}, pre), GELU_BACKWARD, gpu, [=] {
        linear_backward_input(dpre, dy, l, {}, gpu);
        // In place: one thread reads each element and then writes it.
        activation_backward(dpre, dpre, pre, l.n, l.in, 0, gpu);
    });
}

// partial[split] = sum of `rows` rows of dy from row split * rows on; blockIdx.x is the split.
// Elements moved per row: out. 8 blocks at a time leave a thread the registers for several loads in
// flight.
static __global__ void __launch_bounds__(ROW_THREADS, 8)
column_sums_kernel(float *partial, const real *dy, int64_t n, int out, int64_t rows) {
    int j = row_column();
    if (j >= out) return;
    int64_t first = blockIdx.x * rows, end = min(first + rows, n);
    Floats sum = {};
    for (int64_t i = first; i < end; i++) sum = sum + floats_load(dy + i * out + j);
    *sums_at(partial, blockIdx.x, out, j) = sum;
}

enum { COLUMN_SPLITS = 256 };  // the most splits of the rows for a bias's gradient

// dW = c dy^T x, SET or ADD;  db += sum of the rows of dy
static inline void linear_backward_weight(const real *dy, const real *x, const Linear &l,
                                          Gpu *gpu) {
    PlanKey key = {l.in, l.out, l.n, 0, 1, 1};
    matmul({key, x, dy, l.dw, l.dw, l.c, (float)l.to_dw}, PLAIN, gpu);
    if (!l.db) return;
    int64_t rows = CEIL_DIV(l.n, COLUMN_SPLITS);
    int splits = CEIL_DIV(l.n, rows);
    float *partial = scratch_for<float>((size_t)splits * l.out, gpu);
    LAUNCH(column_sums_kernel, row_grid(splits, l.out), ROW_THREADS, 0, gpu->stream, partial, dy,
           l.n, l.out, rows);
    partials_add({{{l.db, partial, l.out, splits}}, 1}, gpu);
}

static inline void linear_backward(real *dx, const real *dy, const real *x, const Linear &l,
                                   Residual add, Gpu *gpu) {
    linear_backward_weight(dy, x, l, gpu);
    linear_backward_input(dx, dy, l, add, gpu);
}
