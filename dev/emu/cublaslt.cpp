// cublaslt.cpp: the calls of cuBLASLt that linear.cuh makes, on the CPU, against the real
// cublasLt.h.
//
//   D = alpha op(A) op(B) + beta C, then the epilogue; column-major, float inside, D rounded to its
//   type.
//
// Stricter than the library on purpose, where it would be slow, wrong or lucky: leading dimensions
// and pointers of 16 bytes; every array whole inside an allocation of the device; D apart from A
// and B, and from C unless it is C; an algorithm only for the problem and the alignment it was
// chosen for; no heuristic while a stream records a graph, which some versions (13.3) refuse. A
// refusal is the library's status; CUBLASLT_LOG_LEVEL=1 prints the reason. Settings that linear.cuh
// does not use are refused, rather than doing something else. A heuristic has three algorithms,
// which add in different orders; the first, split in two halves of K, works in the workspace.
//   EMU_CUBLASLT_PLAIN=1     no algorithm has an epilogue
//   EMU_CUBLASLT_REFUSE=1    algorithms with an epilogue are offered, and refused when they are to
//                            run
//   EMU_CUBLASLT_FAST=i      the algorithms other than the i-th take 2 ms more
//   EMU_CUBLASLT_GELU=ms     products with GELU or its derivative take so many ms more
// Not modelled: device-side scalars, row-major layouts, other types. TF32 rounds the
// inputs to its 10 bits, as tensor cores see them.
#if __has_include(<cublasLt.h>)
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <vector>
#include <unistd.h>
#include <cublasLt.h>
#include <cuda_bf16.h>

cudaError_t emu_enqueue(cudaStream_t stream, std::function<void()> run);
bool emu_recording(void);
extern "C" bool emu_on_device(const void *p, size_t bytes);

struct Desc {
    int compute, scale;
    int ta = CUBLAS_OP_N;
    int tb = CUBLAS_OP_N;
    int epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int bias_type = -1;
    int aux_type = -1;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_ld = 0;
};
struct Layout { int type; int64_t rows, cols, ld; int32_t batch = 1; int64_t stride = 0; };
// reductions: parts of K meet as floats in the workspace, or K is not split
struct Preference {
    uint64_t workspace = 0;
    uint32_t alignment[4] = {256, 256, 256, 256}, reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
};
struct Handle { int unused; };

// The 64 bytes of an algorithm hold here which of the three it is, what it needs, and the problem
// it was chosen for.
enum { SPLIT, ASCENDING, DESCENDING, ALGORITHMS };
struct Algorithm { uint64_t magic, which, workspace, alignment[2], problem, version, unused; };
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t), "an algorithm fills its 64 bytes");
static const uint64_t MAGIC = 0x6f67616c40756d65;

static std::set<const void *> live;  // handles, descriptors, layouts and preferences that exist

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

__attribute__((format(printf, 2, 3))) static cublasStatus_t refuse(cublasStatus_t status,
                                                                   const char *format, ...) {
    if (setting("CUBLASLT_LOG_LEVEL", 0) > 0) {
        va_list args;
        va_start(args, format);
        fprintf(stderr, "emulated cuBLASLt: ");
        vfprintf(stderr, format, args);
        fprintf(stderr, "\n");
        va_end(args);
    }
    return status;
}
#define REFUSE_IF(condition, ...)                                               \
    do {                                                                        \
        if (condition) return refuse(CUBLAS_STATUS_INVALID_VALUE, __VA_ARGS__); \
    } while (0)
#define UNSUPPORTED_IF(condition, ...)                                          \
    do {                                                                        \
        if (condition) return refuse(CUBLAS_STATUS_NOT_SUPPORTED, __VA_ARGS__); \
    } while (0)

template <typename T, typename Opaque> static cublasStatus_t create(Opaque *out, T *object) {
    live.insert(object);
    *out = reinterpret_cast<Opaque>(object);
    return CUBLAS_STATUS_SUCCESS;
}
template <typename T> static cublasStatus_t destroy(T *object) {
    REFUSE_IF(!live.erase(object), "destroyed what does not exist");
    delete object;
    return CUBLAS_STATUS_SUCCESS;
}
static Desc *desc_of(cublasLtMatmulDesc_t d) { return reinterpret_cast<Desc *>(d); }
static Layout *layout_of(cublasLtMatrixLayout_t l) { return reinterpret_cast<Layout *>(l); }
static Preference *preference_of(cublasLtMatmulPreference_t p) {
    return reinterpret_cast<Preference *>(p);
}

// Copies an attribute of exactly this size.
template <typename T> static cublasStatus_t assign(T *to, const void *from, size_t size) {
    REFUSE_IF(!from || size != sizeof(T), "an attribute of %zu bytes, expected %zu", size,
              sizeof(T));
    memcpy(to, from, size);
    return CUBLAS_STATUS_SUCCESS;
}

// -------------------------------------------------------- what a product is, and whether it can be
static int64_t size_of(int type) { return type == CUDA_R_16BF ? 2 : 4; }
static int64_t bytes_of(const Layout &l) {
    return (l.stride * (l.batch - 1) + l.ld * (l.cols - 1) + l.rows) * size_of(l.type);
}
static bool has_bias(int epilogue) { return epilogue & CUBLASLT_EPILOGUE_BIAS; }
static bool has_aux(int epilogue) { return epilogue & 128; }

struct Problem {
    Desc d;
    Layout a, b, c, out;
    int64_t m, n, k;
    int64_t aux_bytes() const { return (d.aux_ld * (n - 1) + m) * size_of(out.type); }
};

static uint64_t alignment_of(const void *p) {
    uint64_t address = reinterpret_cast<uintptr_t>(p), lowest = address & -address;
    return lowest > 256 || !lowest ? 256 : lowest;
}

static uint64_t hash(const Problem &p) {
    int64_t fields[] = {p.m, p.n, p.k, p.d.compute, p.d.ta, p.d.tb, p.d.epilogue, p.a.type,
                        p.out.type, p.a.ld, p.b.ld, p.out.ld, p.out.batch,
                        has_aux(p.d.epilogue) ? p.d.aux_ld : 0};
    uint64_t h = 0xcbf29ce484222325;
    for (int64_t f : fields) h = (h ^ (uint64_t)f) * 0x100000001b3, h ^= h >> 29;
    return h;
}

// The combinations of types of the documentation's table that are of use here.
static cublasStatus_t check_types(const Problem &p) {
    const Desc &d = p.d;
    bool all_float = p.a.type == CUDA_R_32F && p.out.type == CUDA_R_32F;
    bool bf16 = p.a.type == CUDA_R_16BF;
    UNSUPPORTED_IF(p.a.type != p.b.type || p.c.type != p.out.type || d.scale != CUDA_R_32F,
                   "types: A and B, and C and D, are alike, scalars are float");
    bool known = d.compute == CUBLAS_COMPUTE_32F
                     ? all_float || bf16
                     : d.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && all_float;
    UNSUPPORTED_IF(!known, "no kernel computes in %d with A of type %d and D of type %d", d.compute,
                   p.a.type, p.out.type);
    REFUSE_IF(d.bias_type != -1 && d.bias_type != p.out.type,
              "a bias of type %d where D has type %d", d.bias_type, p.out.type);
    REFUSE_IF(d.aux_type != -1 && d.aux_type != p.out.type,
              "an auxiliary matrix of type %d where D has type %d", d.aux_type, p.out.type);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_epilogue(const Problem &p) {
    const Desc &d = p.d;
    static const int KNOWN[] = {CUBLASLT_EPILOGUE_DEFAULT,  CUBLASLT_EPILOGUE_BIAS,
                                CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                CUBLASLT_EPILOGUE_DGELU};
    bool known = false;
    for (int e : KNOWN) known |= d.epilogue == e;
    UNSUPPORTED_IF(!known, "epilogue %d is not emulated", d.epilogue);
    UNSUPPORTED_IF(d.epilogue != CUBLASLT_EPILOGUE_DEFAULT && setting("EMU_CUBLASLT_PLAIN", 0),
                   "EMU_CUBLASLT_PLAIN: no epilogues");
    UNSUPPORTED_IF(has_aux(d.epilogue) && p.out.type != p.a.type,
                   "GELU epilogues with D of another type than A");
    REFUSE_IF(has_bias(d.epilogue) && (!d.bias || alignment_of(d.bias) < 16),
              "no bias pointer, or not of 16 bytes");
    REFUSE_IF(has_aux(d.epilogue) && (!d.aux || alignment_of(d.aux) < 16),
              "no auxiliary pointer, or not of 16 bytes");
    REFUSE_IF(has_aux(d.epilogue) && (d.aux_ld < p.m || d.aux_ld % 8),
              "the auxiliary matrix has leading dimension %lld for %lld rows", (long long)d.aux_ld,
              (long long)p.m);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t problem_make(Problem *p, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                   cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                   cublasLtMatrixLayout_t d) {
    for (const void *object :
         {(const void *)desc, (const void *)a, (const void *)b, (const void *)c, (const void *)d})
        REFUSE_IF(!live.count(object), "a descriptor that does not exist");
    *p = {*desc_of(desc), *layout_of(a), *layout_of(b), *layout_of(c), *layout_of(d), 0, 0, 0};
    bool ta = p->d.ta == CUBLAS_OP_T, tb = p->d.tb == CUBLAS_OP_T;
    REFUSE_IF((!ta && p->d.ta != CUBLAS_OP_N) || (!tb && p->d.tb != CUBLAS_OP_N),
              "op(A) or op(B) is neither N nor T");
    p->m = p->out.rows;
    p->n = p->out.cols;
    p->k = ta ? p->a.rows : p->a.cols;
    REFUSE_IF((ta ? p->a.cols : p->a.rows) != p->m || (tb ? p->b.rows : p->b.cols) != p->n ||
                  (tb ? p->b.cols : p->b.rows) != p->k,
              "op(A), op(B) and D do not fit");
    REFUSE_IF(p->c.rows != p->m || p->c.cols != p->n, "C is not of D's shape");
    for (const Layout &l : {p->a, p->b, p->c, p->out}) {
        REFUSE_IF(l.rows < 1 || l.cols < 1 || l.ld < l.rows || l.ld * size_of(l.type) % 16,
                  "%lld x %lld with leading dimension %lld", (long long)l.rows, (long long)l.cols,
                  (long long)l.ld);
    }
    for (const Layout &l : {p->a, p->b, p->c}) {
        REFUSE_IF(l.batch != p->out.batch, "batches of %d and %d products", l.batch,
                  p->out.batch);
    }
    UNSUPPORTED_IF(p->out.batch > 1 && p->d.epilogue != CUBLASLT_EPILOGUE_DEFAULT,
                   "an epilogue in a batch");
    cublasStatus_t status = check_types(*p);
    return status ? status : check_epilogue(*p);
}

// ------------------------------------------------------------------ the product
struct Arrays { const void *a, *b, *c; void *d; float alpha, beta, *workspace; };

static float load(const void *p, int type, int64_t i) {
    return type == CUDA_R_16BF ? __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i])
                               : static_cast<const float *>(p)[i];
}
static void store(void *p, int type, int64_t i, float x) {
    if (type == CUDA_R_16BF) static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16_rn(x);
    else static_cast<float *>(p)[i] = x;
}

// To nearest in 10 bits of mantissa, ties away from zero.
static float tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits >> 23 & 255) != 255) bits = (bits + 0x1000) & ~0x1fffu;
    memcpy(&x, &bits, 4);
    return x;
}

// [k][rows] in float, so that the inner loop below runs along memory.
static std::vector<float> gather(const void *p, const Layout &l, bool along_k, int64_t rows,
                                 int64_t k, bool round) {
    std::vector<float> packed((size_t)(rows * k));
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < rows; i++) {
            float x = load(p, l.type, along_k ? i * l.ld + j : j * l.ld + i);
            packed[(size_t)(j * rows + i)] = round ? tf32(x) : x;
        }
    return packed;
}

// sum[i] += op(A)[i, from..to) op(B)[from..to), j], upwards or downwards
static void add_products(float *sum, const std::vector<float> &a, const std::vector<float> &b,
                         const Problem &p, int64_t j, int64_t from, int64_t to, bool down) {
    for (int64_t step = from; step < to; step++) {
        int64_t kk = down ? to - 1 - (step - from) : step;
        const float *a_k = &a[(size_t)(kk * p.m)], b_kj = b[(size_t)(kk * p.n + j)];
        for (int64_t i = 0; i < p.m; i++) sum[i] += a_k[i] * b_kj;
    }
}

// tanh form
static double gelu(double x) {
    return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
static double gelu_slope(double x) {
    double t = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
    return (1 + t) / 2 + x / 2 * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

static void finish(const Problem &p, const Arrays &x, const float *sum, int64_t j) {
    const Desc &d = p.d;
    for (int64_t i = 0; i < p.m; i++) {
        float v = x.alpha * sum[i];
        if (x.beta != 0) v += x.beta * load(x.c, p.c.type, j * p.c.ld + i);
        if (d.epilogue & CUBLASLT_EPILOGUE_BIAS) v += load(d.bias, p.out.type, i);
        if (d.epilogue == CUBLASLT_EPILOGUE_DGELU)
            v *= (float)gelu_slope(load(d.aux, p.out.type, j * d.aux_ld + i));
        else if (has_aux(d.epilogue)) {
            store(d.aux, p.out.type, j * d.aux_ld + i, v);
            v = (float)gelu(v);
        }
        store(x.d, p.out.type, j * p.out.ld + i, v);
    }
}

static void multiply(const Problem &p, const Arrays &x, uint64_t which) {
    bool round = p.d.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    std::vector<float> a = gather(x.a, p.a, p.d.ta == CUBLAS_OP_T, p.m, p.k, round),
                       b = gather(x.b, p.b, p.d.tb == CUBLAS_OP_N, p.n, p.k, round),
                       sum((size_t)p.m);
    long fast = setting("EMU_CUBLASLT_FAST", -1);
    if (fast >= 0 && fast != (long)which) usleep(2000);
    if (has_aux(p.d.epilogue)) usleep(1000 * (useconds_t)setting("EMU_CUBLASLT_GELU", 0));
    for (int64_t j = 0; j < p.n; j++) {
        float *total = sum.data(), *second = x.workspace + p.m;
        if (which == SPLIT) memset(total = x.workspace, 0, (size_t)(2 * p.m) * sizeof(float));
        else memset(total, 0, (size_t)p.m * sizeof(float));
        add_products(total, a, b, p, j, 0, which == SPLIT ? p.k / 2 : p.k, which == DESCENDING);
        if (which == SPLIT) {
            add_products(second, a, b, p, j, p.k / 2, p.k, false);
            for (int64_t i = 0; i < p.m; i++) total[i] += second[i];
        }
        finish(p, x, total, j);
    }
}

// The products of a batch, one after the other.
static void multiply_batch(const Problem &p, const Arrays &all, uint64_t which) {
    for (int64_t i = 0; i < p.out.batch; i++) {
        Arrays x = all;
        x.a = static_cast<const char *>(all.a) + i * p.a.stride * size_of(p.a.type);
        x.b = static_cast<const char *>(all.b) + i * p.b.stride * size_of(p.b.type);
        x.c = static_cast<const char *>(all.c) + i * p.c.stride * size_of(p.c.type);
        x.d = static_cast<char *>(all.d) + i * p.out.stride * size_of(p.out.type);
        multiply(p, x, which);
    }
}

// ------------------------------------------------------------------ what a call hands over
static bool overlap(const void *p, int64_t p_bytes, const void *q, int64_t q_bytes) {
    const char *a = static_cast<const char *>(p), *b = static_cast<const char *>(q);
    return a < b + q_bytes && b < a + p_bytes;
}

static cublasStatus_t check_arrays(const Problem &p, const Arrays &x, const Algorithm &algorithm) {
    const Desc &d = p.d;
    const struct {
        const void *p;
        int64_t bytes;
        const char *name;
    } ARRAYS[] = {{x.a, bytes_of(p.a), "A"},
                  {x.b, bytes_of(p.b), "B"},
                  {x.c, bytes_of(p.c), "C"},
                  {x.d, bytes_of(p.out), "D"}};
    for (const auto &array : ARRAYS) {
        REFUSE_IF(alignment_of(array.p) < algorithm.alignment[0],
                  "%s is not aligned to the %llu bytes the algorithm was chosen for", array.name,
                  (unsigned long long)algorithm.alignment[0]);
        REFUSE_IF(!array.p || !emu_on_device(array.p, (size_t)array.bytes),
                  "%s, %lld bytes, is not whole in memory of the device", array.name,
                  (long long)array.bytes);
    }
    int64_t bias_bytes = p.m * size_of(p.out.type);
    REFUSE_IF(has_bias(d.epilogue) && !emu_on_device(d.bias, (size_t)bias_bytes),
              "the bias, %lld bytes, is not whole in memory of the device", (long long)bias_bytes);
    REFUSE_IF(has_aux(d.epilogue) && !emu_on_device(d.aux, (size_t)p.aux_bytes()),
              "the auxiliary matrix is not whole in memory of the device");
    for (const void *vector :
         {has_bias(d.epilogue) ? d.bias : nullptr, has_aux(d.epilogue) ? d.aux : nullptr}) {
        REFUSE_IF(alignment_of(vector) < algorithm.alignment[1],
                  "bias or auxiliary matrix: less aligned than when the algorithm was chosen");
    }
    REFUSE_IF(overlap(x.d, bytes_of(p.out), x.a, bytes_of(p.a)) ||
                  overlap(x.d, bytes_of(p.out), x.b, bytes_of(p.b)),
              "D lies over A or B");
    bool same = x.c == x.d && p.c.ld == p.out.ld;
    REFUSE_IF(!same && overlap(x.d, bytes_of(p.out), x.c, bytes_of(p.c)),
              "D lies over C, and is not C");
    REFUSE_IF(has_aux(d.epilogue) && overlap(x.d, bytes_of(p.out), d.aux, p.aux_bytes()),
              "D lies over the auxiliary matrix");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_algorithm(const Problem &p, const cublasLtMatmulAlgo_t *algo,
                                      Algorithm *out) {
    REFUSE_IF(!algo, "no algorithm: the emulator leaves the choice to the caller");
    memcpy(out, algo, sizeof *out);
    REFUSE_IF(out->magic != MAGIC || out->which >= ALGORITHMS ||
                  out->version != cublasLtGetVersion(),
              "not an algorithm of this library");
    REFUSE_IF(out->problem != hash(p), "the algorithm was chosen for another problem");
    REFUSE_IF(out->workspace != (out->which == SPLIT ? (uint64_t)(2 * p.m) * sizeof(float) : 0) ||
                  out->alignment[0] < 16 || out->alignment[1] < 16,
              "an algorithm with an impossible setting");
    return CUBLAS_STATUS_SUCCESS;
}

// ------------------------------------------------------------------ the library
extern "C" {
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "a status that the emulator has no name for";
    }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return create(handle, new Handle()); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    return destroy(reinterpret_cast<Handle *>(handle));
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    Desc *desc = new Desc();
    desc->compute = compute;
    desc->scale = scale;
    return create(d, desc);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return destroy(desc_of(d)); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t size) {
    REFUSE_IF(!live.count(handle), "a descriptor that does not exist");
    Desc *d = desc_of(handle);
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return assign(&d->ta, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB: return assign(&d->tb, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(&d->epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return assign(&d->bias, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return assign(&d->bias_type, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return assign(&d->aux, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return assign(&d->aux_ld, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return assign(&d->aux_type, value, size);
    default:
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %d of a product is not emulated",
                      (int)attribute);
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
    UNSUPPORTED_IF(type != CUDA_R_32F && type != CUDA_R_16BF, "type %d is not emulated", (int)type);
    return create(layout, new Layout{type, (int64_t)rows, (int64_t)cols, ld});
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t size) {
    REFUSE_IF(!live.count(handle), "a layout that does not exist");
    Layout *l = layout_of(handle);
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return assign(&l->batch, value, size);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return assign(&l->stride, value, size);
    default:
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %d of a layout is not emulated",
                      (int)attribute);
    }
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return destroy(layout_of(layout));
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    return create(preference, new Preference());
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return destroy(preference_of(preference));
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size) {
    REFUSE_IF(!live.count(handle), "a preference that does not exist");
    Preference *p = preference_of(handle);
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return assign(&p->workspace, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return assign(&p->alignment[0], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return assign(&p->alignment[1], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return assign(&p->alignment[2], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return assign(&p->alignment[3], value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return assign(&p->reductions, value, size);
    default:
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %d of a preference is not emulated",
                      (int)attribute);
    }
}

// The algorithms in their order, those whose workspace is allowed; second comes a result that says
// by its state that it is none.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t *results,
                                              int *count) {
    Problem p;
    *count = 0;
    if (!live.count(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
    REFUSE_IF(!live.count(preference) || requested < 1, "no preference, or no results asked for");
    if (emu_recording())
        return refuse(CUBLAS_STATUS_INTERNAL_ERROR, "no heuristic while a stream records a graph");
    cublasStatus_t status = problem_make(&p, desc, a, b, c, d);
    if (status) return status;
    const Preference *wish = preference_of(preference);
    uint64_t alignment[2] = {256, 256};
    for (uint32_t bytes : wish->alignment)
        alignment[0] = bytes < alignment[0] ? bytes : alignment[0];
    for (const void *vector :
         {has_bias(p.d.epilogue) ? p.d.bias : nullptr, has_aux(p.d.epilogue) ? p.d.aux : nullptr}) {
        alignment[1] = alignment_of(vector) < alignment[1] ? alignment_of(vector) : alignment[1];
    }
    for (uint64_t which = 0; which < ALGORITHMS; which++) {
        uint64_t workspace = which == SPLIT ? (uint64_t)(2 * p.m) * sizeof(float) : 0;
        if (workspace > wish->workspace) continue;
        bool may_split = wish->reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        if (which == SPLIT && !may_split) continue;
        Algorithm algorithm = {
            MAGIC, which, workspace, {alignment[0], alignment[1]}, hash(p), cublasLtGetVersion(),
            0};
        if (*count == 1 && requested > 1)
            memset(&results[1], 0xff, sizeof results[1]),
                results[(*count)++].state = CUBLAS_STATUS_NOT_SUPPORTED;
        if (*count >= requested) break;
        cublasLtMatmulHeuristicResult_t *r = &results[(*count)++];
        memset(r, 0, sizeof *r);
        memcpy(&r->algo, &algorithm, sizeof algorithm);
        r->workspaceSize = workspace;
        r->state = CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *result) {
    Problem p;
    Algorithm algorithm;
    if (!live.count(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
    cublasStatus_t status = problem_make(&p, desc, a, b, c, d);
    if (!status) status = check_algorithm(p, algo, &algorithm);
    if (status) return status;
    result->workspaceSize = algorithm.workspace;
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream) {
    Problem p;
    Algorithm algorithm;
    if (!live.count(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
    REFUSE_IF(!alpha || !beta, "no alpha or no beta");
    cublasStatus_t status = problem_make(&p, desc, a_layout, b_layout, c_layout, d_layout);
    if (!status) status = check_algorithm(p, algo, &algorithm);
    if (status) return status;
    UNSUPPORTED_IF(p.d.epilogue != CUBLASLT_EPILOGUE_DEFAULT && setting("EMU_CUBLASLT_REFUSE", 0),
                   "EMU_CUBLASLT_REFUSE: an epilogue");
    Arrays x = {a, b, c, d, *static_cast<const float *>(alpha), *static_cast<const float *>(beta),
                static_cast<float *>(workspace)};
    status = check_arrays(p, x, algorithm);
    if (status) return status;
    bool room = !algorithm.workspace ||
                (workspace && workspace_bytes >= algorithm.workspace &&
                 alignment_of(workspace) >= 16 && emu_on_device(workspace, workspace_bytes));
    REFUSE_IF(!room, "the algorithm needs %llu bytes of workspace on the device",
              (unsigned long long)algorithm.workspace);
    uint64_t which = algorithm.which;
    return emu_enqueue(stream, [=] { multiply_batch(p, x, which); }) == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}
}
#endif
