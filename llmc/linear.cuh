// linear.cuh: matrix products, by NVIDIA's library cuBLASLt. With x [n, in], W [out, in], y [n, out], rows contiguous, as in train_gpt.c:
//
//   linear_forward              y = c x W^T + b + beta add               linear_backward_input        dx = scale c dy W + beta add
//   linear_gelu_forward         pre = c x W^T + b,  h = gelu(pre)        linear_gelu_backward_input   dpre = gelu'(pre) * (c dy W)
//   linear_backward_weight      dW += scale c dy^T x,  db += scale (sum of the rows of dy)        linear_forward_wide   y = c x W^T in float
//
// The library is column-major: it walks down a column where C walks along a row, so it sees every array of ours transposed:
//
//   ours, [2, 3]    0 1 2        in memory    0 1 2 3 4 5        the library's, [3, 2] with leading dimension 3    0 3
//                   3 4 5                                                                                          1 4
//                                                                                                                  2 5
// It computes D[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C, and the products above become, transposed (* where op transposes once more):
//
//   ours                its D               A       B       m      n      k
//   y  = x W^T          y^T  = W x^T        W *     x       out    n      in
//   dx = dy W           dx^T = W^T dy^T     W       dy      in     n      out
//   dW = dy^T x         dW^T = x^T dy       x       dy *    in     out    n
//
// What follows a product rides in its last step, the epilogue: bias, GELU (which also writes pre, the "auxiliary" matrix), its slope, and the sums of
// dy's rows. Where the library has no such kernel, the plain product comes first and a small kernel of ours after it.
//
// A plan is a product's descriptors and one of the library's algorithms for it, made at the product's first use and kept. Which algorithm: the library's
// first guess, or, while `tuning`, the fastest of its guesses, timed on the spot. The choice is written with the run (plans_text, plans_read), because
// another algorithm adds in another order: the same plans give the same bits.
//
// Computed floors, FLOP at 790 TFLOP/s in bf16 (memory at 4.3 TB/s in parentheses, hidden behind it), n = 65536, C = 768: qkv .294 ms (.094), attention's output
// .098 (.047), ffn up with GELU .391 (.212), ffn down .391 (.118), each as much again for dx and for dW; head 6.41 (1.58) three times.
#pragma once
#include <cublasLt.h>
#include <math.h>
#include "ffn.cuh"
#include "gpu.cuh"
#include "run/json.h"

typedef struct LinearShape { int64_t n; int out, in; float c; } LinearShape;

// ------------------------------------------------------------------------------------------------------------------ plans

enum { PLANS_MAX = 128, GUESSES = 16, TIMED_RUNS = 5, PLANS_WORKSPACE = 32 << 20, ALIGNMENT = 16 };
enum { NOTHING_ADDED, ADDED_ELSEWHERE, ADDED_IN_PLACE };     // beta C: absent, another array, D itself
enum { EPILOGUE_VECTOR = CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_BGRADB, EPILOGUE_AUX = CUBLASLT_EPILOGUE_GELU_AUX & ~CUBLASLT_EPILOGUE_GELU };     // bits: has a bias or its gradient; has pre

// All that decides a plan, in the library's terms. Rows are contiguous, so sizes and transposes give the leading dimensions.
typedef struct PlanKey { int64_t m, n, k, ta, tb, wide_out, epilogue, add; } PlanKey;       // wide_out: C and D are float, whatever `real` is

typedef struct Plan {
    PlanKey key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    bool found, keep;                                        // has the library an algorithm? was it timed, or read from a file?
} Plan;

typedef struct Plans {
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    void *workspace;
    bool tf32, tuning;
    int count;
    Plan plans[PLANS_MAX];
} Plans;

// A product with its arrays. vector: the bias, or where its gradient goes; aux: pre.
typedef struct Product {
    PlanKey key;
    const void *a, *b, *c;
    void *d;
    const void *vector, *aux;
    float alpha, beta;
} Product;

static const struct { int value; const char *name; } EPILOGUES[] = {
    {CUBLASLT_EPILOGUE_DEFAULT, "none"}, {CUBLASLT_EPILOGUE_BIAS, "bias"}, {CUBLASLT_EPILOGUE_GELU_AUX, "gelu"}, {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, "bias, gelu"},
    {CUBLASLT_EPILOGUE_DGELU, "gelu backward"}, {CUBLASLT_EPILOGUE_BGRADB, "bias gradient"}};
enum { EPILOGUE_COUNT = sizeof EPILOGUES / sizeof EPILOGUES[0] };

static inline const char *epilogue_name(int64_t value) {
    int i = 0;
    while (i < EPILOGUE_COUNT - 1 && EPILOGUES[i].value != value) i++;
    return EPILOGUES[i].name;
}

static inline void lt_check(cublasStatus_t status, const char *call, PlanKey k = PlanKey()) {
    CHECK(status == CUBLAS_STATUS_SUCCESS, "%s: %s, for D[%lld, %lld] = op(A) op(B) with k %lld, transposed %d %d, epilogue %s\n"
          "  -> CUBLASLT_LOG_LEVEL=1 prints the library's reason; the library must be of the toolkit this was built with", call, cublasLtGetStatusName(status),
          (long long)k.m, (long long)k.n, (long long)k.k, (int)k.ta, (int)k.tb, epilogue_name(k.epilogue));
}

template <typename T> static void preference_set(Plans *plans, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    lt_check(cublasLtMatmulPreferenceSetAttribute(plans->preference, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
}

static inline Plans *plans_create(bool tf32) {
    Plans *plans = (Plans *)check_alloc(sizeof *plans, "the plans of matrix products");
    plans->tf32 = tf32 && sizeof(real) == sizeof(float);
    lt_check(cublasLtCreate(&plans->handle), "cublasLtCreate");
    cudaCheck(cudaMalloc(&plans->workspace, PLANS_WORKSPACE));
    lt_check(cublasLtMatmulPreferenceCreate(&plans->preference), "cublasLtMatmulPreferenceCreate");
    preference_set<uint64_t>(plans, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, PLANS_WORKSPACE);
    preference_set<uint32_t>(plans, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);     // parts of a split K meet in float
    for (cublasLtMatmulPreferenceAttributes_t matrix : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                                        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        preference_set<uint32_t>(plans, matrix, ALIGNMENT);
    }
    return plans;
}

// Forgets the plans, all or those that the library will give again. Work already given to the stream does not need them.
static inline void plans_forget(Plans *plans, bool all) {
    int kept = 0;
    for (int i = 0; i < plans->count; i++) {
        Plan *p = &plans->plans[i];
        if (p->keep && !all) { plans->plans[kept++] = *p; continue; }
        lt_check(cublasLtMatmulDescDestroy(p->desc), "cublasLtMatmulDescDestroy", p->key);
        for (cublasLtMatrixLayout_t layout : {p->a, p->b, p->d}) lt_check(cublasLtMatrixLayoutDestroy(layout), "cublasLtMatrixLayoutDestroy", p->key);
    }
    plans->count = kept;
}

static inline void plans_destroy(Plans *plans) {
    plans_forget(plans, true);
    lt_check(cublasLtMatmulPreferenceDestroy(plans->preference), "cublasLtMatmulPreferenceDestroy");
    lt_check(cublasLtDestroy(plans->handle), "cublasLtDestroy");
    cudaCheck(cudaFree(plans->workspace));
    free(plans);
}

template <typename T> static void plan_set(Plan *p, cublasLtMatmulDescAttributes_t attribute, T value) {
    lt_check(cublasLtMatmulDescSetAttribute(p->desc, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute", p->key);
}

static inline void plan_set_arrays(Plan *p, const void *vector, const void *aux) {
    if (p->key.epilogue & EPILOGUE_VECTOR) plan_set(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
    if (p->key.epilogue & EPILOGUE_AUX) plan_set(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
}

static inline cublasLtMatrixLayout_t matrix_layout(PlanKey key, cudaDataType type, int64_t rows, int64_t cols) {
    cublasLtMatrixLayout_t layout;
    lt_check(cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)rows, (uint64_t)cols, rows), "cublasLtMatrixLayoutCreate", key);
    return layout;
}

static inline Plan *plan_find(Plans *plans, const PlanKey *key) {
    for (int i = 0; i < plans->count; i++) if (!memcmp(&plans->plans[i].key, key, sizeof *key)) return &plans->plans[i];
    return nullptr;
}

// A new plan that has no algorithm yet. A full table forgets: each length of a prompt or a text is a product of its own.
static inline Plan *plan_make(Plans *plans, PlanKey key) {
    cudaDataType type = sizeof(real) == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
    if (plans->count == PLANS_MAX) plans_forget(plans, false);
    CHECK(plans->count < PLANS_MAX, "more than %d different matrix products\n  -> a larger PLANS_MAX in llmc/linear.cuh", PLANS_MAX);
    Plan *p = &plans->plans[plans->count++];
    memset(p, 0, sizeof *p);
    p->key = key;
    lt_check(cublasLtMatmulDescCreate(&p->desc, plans->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate", key);
    plan_set<int32_t>(p, CUBLASLT_MATMUL_DESC_TRANSA, key.ta ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan_set<int32_t>(p, CUBLASLT_MATMUL_DESC_TRANSB, key.tb ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan_set<uint32_t>(p, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)key.epilogue);
    if (key.epilogue & EPILOGUE_AUX) plan_set<int64_t>(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.m);
    plan_set_arrays(p, (void *)ALIGNMENT, (void *)ALIGNMENT);      // before a choice the library reads from these pointers how aligned all that come will be
    p->a = matrix_layout(key, type, key.ta ? key.k : key.m, key.ta ? key.m : key.k);
    p->b = matrix_layout(key, type, key.tb ? key.n : key.k, key.tb ? key.k : key.n);
    p->d = matrix_layout(key, key.wide_out ? CUDA_R_32F : type, key.m, key.n);
    return p;
}

static inline cublasStatus_t plan_run(const Plan *p, const cublasLtMatmulAlgo_t *algo, const Product *f, Gpu *gpu) {
    return cublasLtMatmul(gpu->plans->handle, p->desc, &f->alpha, f->a, p->a, f->b, p->b, &f->beta, f->c, p->d, f->d, p->d, algo, gpu->plans->workspace, PLANS_WORKSPACE, gpu->stream);
}

// Milliseconds of the fastest of a few runs after one that warms up; infinite where `start` says that it will not run.
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

// Chooses the algorithm; an epilogue may have none. Tuning runs every guess on the product's own arrays: what it adds to is spoilt.
static inline void plan_choose(Plan *p, const Product *f, Gpu *gpu) {
    Plans *plans = gpu->plans;
    cublasLtMatmulHeuristicResult_t guesses[GUESSES];
    int count = 0;
    float best = INFINITY;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(plans->handle, p->desc, p->a, p->b, p->d, p->d, plans->preference, GUESSES, guesses, &count);
    bool plain = p->key.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
    if (plain) lt_check(status, "cublasLtMatmulAlgoGetHeuristic", p->key);
    if (status != CUBLAS_STATUS_SUCCESS) count = 0;
    plan_set_arrays(p, f->vector, f->aux);
    for (int i = 0; i < count && (plans->tuning || !p->found); i++) {
        if (guesses[i].state != CUBLAS_STATUS_SUCCESS) continue;
        float ms = plans->tuning ? fastest(gpu, [&] { return plan_run(p, &guesses[i].algo, f, gpu) == CUBLAS_STATUS_SUCCESS; }) : 0;
        if (ms >= best) continue;
        best = ms;
        p->algo = guesses[i].algo;
        p->found = true;
    }
    if (!p->found && plain) lt_check(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic", p->key);
    p->keep = plans->tuning;
}

// Starts the product with this epilogue; or returns false where the library has no algorithm for the two together, and nothing is started. A guess that was not
// timed is first tried here: the library may offer what it then refuses.
static inline bool product(Product f, cublasLtEpilogue_t epilogue, Gpu *gpu) {
    f.key.epilogue = epilogue;
    f.key.add = !f.c || f.beta == 0 ? NOTHING_ADDED : f.c == f.d ? ADDED_IN_PLACE : ADDED_ELSEWHERE;
    if (f.key.add == NOTHING_ADDED) f.c = f.d, f.beta = 0;
    Plan *p = plan_find(gpu->plans, &f.key);
    if (!p) plan_choose(p = plan_make(gpu->plans, f.key), &f, gpu);
    if (!p->found) return false;
    plan_set_arrays(p, f.vector, f.aux);
    cublasStatus_t status = plan_run(p, &p->algo, &f, gpu);
    p->found = epilogue == CUBLASLT_EPILOGUE_DEFAULT || (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE);
    if (p->found) lt_check(status, "cublasLtMatmul", p->key);
    return p->found;
}

// ------------------------------------------------------------------------------------------------------------------ plans as text

// What an algorithm's 64 bytes mean changes with the library and the GPU; which of them fit, with the types.
static inline void plans_origin(const Plans *plans, char *text, size_t cap) {
    cudaDeviceProp device;
    int id;
    cudaCheck(cudaGetDevice(&id));
    cudaCheck(cudaGetDeviceProperties(&device, id));
    check_format(text, cap, "cuBLASLt %zu, %s, %s", cublasLtGetVersion(), device.name, plans->tf32 ? "tf32" : sizeof(real) == sizeof(float) ? "fp32" : "bf16");
}

// JSON with the plans that were chosen by timing; the others the library gives again. The caller frees it.
static inline char *plans_text(const Plans *plans) {
    char origin[512], *text = nullptr;
    const char *separator = "\n";
    size_t size;
    FILE *f = text_begin(&text, &size, "the text of the plans");
    plans_origin(plans, origin, sizeof origin);
    fprintf(f, "{\"origin\": ");
    json_write_string(f, origin);
    fprintf(f, ", \"plans\": [");
    for (int i = 0; i < plans->count; i++) {
        const PlanKey *k = &plans->plans[i].key;
        const unsigned char *algo = (const unsigned char *)&plans->plans[i].algo;
        if (!plans->plans[i].keep) continue;
        fprintf(f, "%s{\"m\": %lld, \"n\": %lld, \"k\": %lld, \"ta\": %d, \"tb\": %d, \"wide_out\": %d, \"add\": %d, \"epilogue\": \"%s\", \"algo\": \"", separator,
                (long long)k->m, (long long)k->n, (long long)k->k, (int)k->ta, (int)k->tb, (int)k->wide_out, (int)k->add, epilogue_name(k->epilogue));
        for (size_t byte = 0; plans->plans[i].found && byte < sizeof(cublasLtMatmulAlgo_t); byte++) fprintf(f, "%02x", algo[byte]);
        fprintf(f, "\"}");
        separator = ",\n";
    }
    text_end(f, "\n]}\n", "the text of the plans");
    return text;
}

// A size or a flag that no product has makes a plan that no product finds.
static inline void plan_read(Plans *plans, const Json *entry, const char *path) {
    const char *epilogue = json_get_string(entry, "epilogue", path), *hex = json_get_string(entry, "algo", path);
    cublasLtMatmulHeuristicResult_t result = {};
    int e = 0;
    while (e < EPILOGUE_COUNT && strcmp(EPILOGUES[e].name, epilogue)) e++;
    CHECK(e < EPILOGUE_COUNT, "%s: \"epilogue\": \"%s\" is not known\n  -> use another checkpoint", path, epilogue);
    PlanKey key = {json_get_int(entry, "m", path), json_get_int(entry, "n", path), json_get_int(entry, "k", path), json_get_int(entry, "ta", path),
                   json_get_int(entry, "tb", path), json_get_int(entry, "wide_out", path), EPILOGUES[e].value, json_get_int(entry, "add", path)};
    CHECK(!plan_find(plans, &key), "%s: the same product twice\n  -> use another checkpoint", path);
    Plan *p = plan_make(plans, key);
    p->keep = true;
    p->found = *hex || e == 0;                               // no algorithm: the library has none for this epilogue
    bool right = !p->found || (strlen(hex) == 2 * sizeof p->algo && strspn(hex, "0123456789abcdef") == 2 * sizeof p->algo);
    CHECK(right, "%s: expected \"algo\" to be %zu digits of 0-9 and a-f, found \"%s\"\n  -> use another checkpoint", path, 2 * sizeof p->algo, hex);
    if (!p->found) return;
    for (size_t byte = 0; byte < sizeof p->algo; byte++) sscanf(hex + 2 * byte, "%2hhx", (unsigned char *)&p->algo + byte);
    cublasStatus_t status = cublasLtMatmulAlgoCheck(plans->handle, p->desc, p->a, p->b, p->d, p->d, &p->algo, &result);
    p->keep = status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= PLANS_WORKSPACE;
    if (p->keep) return;
    printf("note: %s: the library refuses a saved algorithm (%s): it is chosen anew\n", path, cublasLtGetStatusName(status));
    plans_forget(plans, false);
}

// Takes the plans that an earlier run wrote, in place of all there are; false, after a note, where they are of another library, GPU or precision.
static inline bool plans_read(Plans *plans, const char *text, const char *path) {
    Json *root = json_parse(text, strlen(text), path);
    const char *origin = json_get_string(root, "origin", path);
    char here[512];
    plans_origin(plans, here, sizeof here);
    bool same = !strcmp(origin, here);
    if (!same) printf("note: %s holds matrix plans of %s, this is %s: they are chosen anew, and sums may round differently\n", path, origin, here);
    else plans_forget(plans, true);
    const Json *entry = json_need(root, "plans", JSON_ARRAY, path)->first;
    for (; same && entry; entry = entry->next) plan_read(plans, entry, path);
    json_free(root);
    return same;
}

// ------------------------------------------------------------------------------------------------------------------ forward

enum { LINEAR_THREADS = 128, COLUMN_SPLITS = 256 };

static inline Product forward_product(real *y, const real *x, const real *w, const real *b, real *pre, LinearShape s) {
    return Product{PlanKey{s.out, s.n, s.in, 1, 0, 0, 0, 0}, w, x, nullptr, y, b, pre, s.c, 0};
}

// y += b. Elements moved per row: 2 out.
static __global__ void __launch_bounds__(LINEAR_THREADS) bias_kernel(real *y, const real *b, int out) {
    int j = (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
    if (j >= out) return;
    real *at = y + (int64_t)blockIdx.x * out + j;
    Pack sum = pack_load(at), bias = pack_load(b + j);
    for (int k = 0; k < PACK; k++) sum.v[k] = to_real(to_float(sum.v[k]) + to_float(bias.v[k]));
    pack_store(at, sum);
}

// b and add may be absent (nullptr); add may be y itself.
static inline void linear_forward(real *y, const real *x, const real *w, const real *b, const real *add, float beta, LinearShape s, Gpu *gpu) {
    Product f = forward_product(y, x, w, b, nullptr, s);
    f.c = add;
    f.beta = beta;
    if (b && product(f, CUBLASLT_EPILOGUE_BIAS, gpu)) return;
    product(f, CUBLASLT_EPILOGUE_DEFAULT, gpu);
    if (b) LAUNCH(bias_kernel, dim3((unsigned)s.n, CEIL_DIV(s.out / PACK, LINEAR_THREADS)), LINEAR_THREADS, 0, gpu->stream, y, b, s.out);
}

// y = c x W^T, not rounded: a router's logits.
static inline void linear_forward_wide(wide *y, const real *x, const real *w, LinearShape s, Gpu *gpu) {
    Product f = {PlanKey{s.out, s.n, s.in, 1, 0, 1, 0, 0}, w, x, nullptr, y, nullptr, nullptr, s.c, 0};
    product(f, CUBLASLT_EPILOGUE_DEFAULT, gpu);
}

static inline void linear_gelu_forward(real *h, real *pre, const real *x, const real *w, const real *b, LinearShape s, Gpu *gpu) {
    if (product(forward_product(h, x, w, b, pre, s), b ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX, gpu)) return;
    linear_forward(pre, x, w, b, nullptr, 0, s, gpu);
    activation_forward(h, pre, s.n, s.out, 0, gpu);
}

// ------------------------------------------------------------------------------------------------------------------ backward

static inline Product input_product(real *dx, const real *dy, const real *w, const real *pre, float alpha, LinearShape s) {
    return Product{PlanKey{s.in, s.n, s.out, 0, 0, 0, 0, 0}, w, dy, nullptr, dx, nullptr, pre, alpha, 0};
}

// add may be absent (nullptr), and may be dx itself.
static inline void linear_backward_input(real *dx, const real *dy, const real *w, const real *add, float beta, float scale, LinearShape s, Gpu *gpu) {
    Product f = input_product(dx, dy, w, nullptr, scale * s.c, s);
    f.c = add;
    f.beta = beta;
    product(f, CUBLASLT_EPILOGUE_DEFAULT, gpu);
}

static inline void linear_gelu_backward_input(real *dpre, const real *pre, const real *dy, const real *w, LinearShape s, Gpu *gpu) {
    if (product(input_product(dpre, dy, w, pre, s.c, s), CUBLASLT_EPILOGUE_DGELU, gpu)) return;
    linear_backward_input(dpre, dy, w, nullptr, 0, 1, s, gpu);
    activation_backward(dpre, dpre, pre, s.n, s.in, 0, gpu);       // each element is read before it is written, by one thread
}

// partial[split] = sum of the rows of dy from split * rows on, 16 bytes of columns a thread. Elements moved per row: out.
static __global__ void __launch_bounds__(LINEAR_THREADS) column_sums_kernel(float *partial, const real *dy, int64_t n, int out, int64_t rows) {
    int j = (blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (j >= out) return;
    int64_t first = blockIdx.y * rows, end = first + rows < n ? first + rows : n;
    float sum[PACK] = {};
    for (int64_t i = first; i < end; i++) {
        Pack x = pack_load(dy + i * out + j);
        for (int k = 0; k < PACK; k++) sum[k] += to_float(x.v[k]);
    }
    for (int k = 0; k < PACK; k++) partial[(int64_t)blockIdx.y * out + j + k] = sum[k];
}

// db += scale * (the partial sums, in their order)
static __global__ void __launch_bounds__(LINEAR_THREADS) add_sums_kernel(wide *db, const float *partial, int splits, int out, float scale) {
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= out) return;
    float sum = 0;
    for (int split = 0; split < splits; split++) sum += partial[(int64_t)split * out + j];
    db[j] += scale * sum;
}

// db may be absent (nullptr). The epilogue has the sum of dy's rows only where alpha is 1: whether it would scale it is not documented.
static inline void linear_backward_weight(wide *dw, wide *db, const real *dy, const real *x, float scale, LinearShape s, Gpu *gpu) {
    Product f = {PlanKey{s.in, s.out, s.n, 0, 1, 1, 0, 0}, x, dy, dw, dw, gpu->scratch, nullptr, scale * s.c, 1};
    int64_t rows = CEIL_DIV(s.n, COLUMN_SPLITS), splits = CEIL_DIV(s.n, rows);
    CHECK(!db || (size_t)(splits * s.out) <= gpu->scratch_size, "the bias gradient of %d columns needs %lld floats of scratch, there are %zu\n  -> a larger scratch_size", s.out,
          (long long)(splits * s.out), gpu->scratch_size);
    auto apart = [&] {
        product(f, CUBLASLT_EPILOGUE_DEFAULT, gpu);
        if (db) LAUNCH(column_sums_kernel, dim3(CEIL_DIV(s.out / PACK, LINEAR_THREADS), (unsigned)splits), LINEAR_THREADS, 0, gpu->stream, gpu->scratch, dy, s.n, s.out, rows);
        return true;
    };
    f.key.epilogue = CUBLASLT_EPILOGUE_BGRADB, f.key.add = ADDED_IN_PLACE;
    bool first = gpu->plans->tuning && !plan_find(gpu->plans, &f.key), summed = db && f.alpha == 1 && product(f, CUBLASLT_EPILOGUE_BGRADB, gpu);
    if (summed && first) {                                   // an epilogue can cost more than reading dy once more: the plan then says that there is none
        float ms = fastest(gpu, [&] { return product(f, CUBLASLT_EPILOGUE_BGRADB, gpu); });
        bool faster = ms <= fastest(gpu, apart);
        plan_find(gpu->plans, &f.key)->found = summed = faster;
    }
    if (!summed) apart();
    if (!db) return;
    if (summed) splits = 1;
    LAUNCH(add_sums_kernel, CEIL_DIV(s.out, LINEAR_THREADS), LINEAR_THREADS, 0, gpu->stream, db, gpu->scratch, (int)splits, s.out, scale);
}
