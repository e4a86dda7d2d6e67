// safetensors.c: see safetensors.h.
//
// A file is not trusted. Opening checks that the header's length fits the file, the header is
// strict JSON, every type is known, every shape takes exactly the bytes of its offsets, and the
// tensors cover the data without holes or overlaps. After that tensors are read without further
// checks.
#include "safetensors.h"
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

// ------------------------------------------------------------------------------------------ values

// element: bytes of a weight. A trainer in fp32 or bf16 has float weights, one in fp64 doubles. A
// double is rounded to the nearest float.
void real_put(void *x, size_t element, int64_t i, double value) {
    if (element == sizeof(float)) ((float *)x)[i] = (float)value;
    else ((double *)x)[i] = value;
}

// IEEE half precision: 5 bits of exponent, 10 of fraction.
static double half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double v = ldexp(fraction, -24);  // subnormal
    if (exponent == 31) v = fraction ? NAN : INFINITY;
    else if (exponent) v = ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -v : v;
}

// One value of 8, 4 or 2 bytes; bfloat: the 2 bytes are the upper half of a float. memcpy, because
// a mapped file promises no alignment.
static double real_value(const char *p, int bytes, bool bfloat) {
    double full;
    float single;
    uint16_t half;
    if (bytes == 8) return memcpy(&full, p, 8), full;
    if (bytes == 4) return memcpy(&single, p, 4), single;
    memcpy(&half, p, 2);
    if (!bfloat) return half_value(half);
    uint32_t word = (uint32_t)half << 16;
    return memcpy(&single, &word, 4), single;
}

double real_get(const void *x, size_t element, int64_t i) {
    return real_value((const char *)x + i * element, element, false);
}

int64_t real_count_bad(const void *x, size_t element, int64_t n) {
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++) bad += !isfinite(real_get(x, element, i));
    return bad;
}

// ----------------------------------------------------------------------------------------- tensors

// Two types of each size: 8, 4, 2 and 1 bytes.
int tensor_dtype_bytes(const char *dtype) {
    static const char *const NAMES[] = {"F64", "I64", "F32", "I32", "BF16", "F16", "U8", "BOOL"};
    for (int i = 0; i < 8; i++)
        if (!strcmp(dtype, NAMES[i])) return 8 >> i / 2;
    return 0;
}

// The product of the sizes in a hostile file may overflow.
int64_t tensor_bytes(const Tensor *t) {
    int64_t bytes = tensor_dtype_bytes(t->dtype);
    for (int i = 0; i < t->rank; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes)) return -1;
    return bytes;
}

// first and most select a part, such as a shard of the moments or the first learned positions; the
// rest of the file is not read.
void safetensors_read_real(const Tensor *t, int64_t first, int64_t most, void *out,
                           size_t element) {
    int bytes = tensor_dtype_bytes(t->dtype);
    bool bfloat = !strcmp(t->dtype, "BF16");
    CHECK(bfloat || t->dtype[0] == 'F',
          "tensor %s: expected F64, F32, BF16 or F16, found %s\n  -> convert the file", t->name,
          t->dtype);
    const char *data = (const char *)t->data + first * bytes;
    int64_t rest = tensor_bytes(t) / bytes - first, count = least(rest, most);
    // Usually a plain copy: the file was written by a trainer of the same precision.
    if ((size_t)bytes != element)
        for (int64_t i = 0; i < count; i++)
            real_put(out, element, i, real_value(data + i * bytes, bytes, bfloat));
    else if (count > 0) memcpy(out, data, count * element);
}

// ----------------------------------------------------------------------------------------- reading

// Orders tensors by their data. An empty one comes before the tensor that begins at its place.
static int compare_places(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    if (x->data != y->data) return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return (tensor_bytes(x) > tensor_bytes(y)) - (tensor_bytes(x) < tensor_bytes(y));
}

// Reads an array of at most `most` sizes; returns how many; -1: it is not such an array.
static int read_sizes(const Json *v, int most, long long *sizes) {
    if (!v || v->kind != JSON_ARRAY || v->count > (size_t)most) return -1;
    for (const Json *i = v->first; i; i = i->next) {
        if (i->kind != JSON_INT || i->integer < 0) return -1;
        *sizes++ = i->integer;
    }
    return v->count;
}

// One entry of the header. Its offsets must be within `bytes` bytes of data.
static bool read_entry(const Json *entry, const char *data, long long bytes, Tensor *t,
                       char *error) {
    const Json *dtype = json_get(entry, "dtype");
    long long offsets[2];
    t->name = entry->key;
    t->dtype = dtype && dtype->kind == JSON_STRING ? dtype->text : "";
    t->rank = read_sizes(json_get(entry, "shape"), TENSOR_RANK, t->shape);
    if (!tensor_dtype_bytes(t->dtype) || t->rank < 0 ||
        read_sizes(json_get(entry, "data_offsets"), 2, offsets) != 2)
        return error_set(error,
                         "tensor %.40s: expected a \"dtype\" (F64, F32, BF16, F16, I64, I32, U8 or "
                         "BOOL), a \"shape\" of at most %d sizes and two \"data_offsets\", found "
                         "the dtype \"%.16s\"",
                         t->name, TENSOR_RANK, t->dtype);
    // The bytes of the shape are computed with checks for overflow.
    long long begin = offsets[0], end = offsets[1];
    bool fits = begin <= end && end <= bytes && tensor_bytes(t) == end - begin;
    if (fits) t->data = data + begin;
    return fits || error_set(error,
                             "tensor %s: its shape does not take the bytes from %lld to %lld of "
                             "the %lld bytes of data",
                             t->name, begin, end, bytes);
}

// The tensors must cover the data from end to end, each byte once.
static bool check_cover(SafetensorsFile *file, const char *data, int64_t bytes, char *error) {
    const char *at = data;
    const Tensor *t = file->tensors, *end = t + file->count;
    // In the order of the data each tensor begins where the one before it ends.
    qsort(file->tensors, file->count, sizeof *file->tensors, compare_places);
    while (t < end && t->data == at) at += tensor_bytes(t++);
    return (t == end && at == data + bytes) ||
           error_set(error, "byte %td of the data belongs to no tensor or to several", at - data);
}

// Fills the file's tensors from the header, n bytes; the data are the `bytes` bytes after it.
// "__metadata__" has strings about the file, by the format; they are ignored.
static bool read_header(const char *text, size_t n, int64_t bytes, SafetensorsFile *file,
                        char *error) {
    if (n == 0 || text[0] != '{') return error_set(error, "expected the header to begin with '{'");
    file->header = json_try_parse(text, n, error);
    if (!file->header) return false;
    file->tensors = check_alloc(file->header->count * sizeof(Tensor), "a list of tensors");
    for (const Json *entry = file->header->first; entry; entry = entry->next) {
        if (!strcmp(entry->key, "__metadata__")) continue;
        Tensor *t = &file->tensors[file->count++];
        if (!read_entry(entry, text + n, bytes, t, error)) return false;
    }
    return check_cover(file, text + n, bytes, error);
}

// Also closes a file that was opened in part.
void safetensors_close(SafetensorsFile *file) {
    if (file->map) munmap(file->map, file->bytes);
    json_free(file->header);
    free(file->tensors);
    memset(file, 0, sizeof *file);
}

// The header is read only after its length was checked. The map outlives the open file.
bool safetensors_open(const char *path, SafetensorsFile *file, char *error) {
    int64_t size;
    unsigned long long n = 0;
    memset(file, 0, sizeof *file);
    int fd = file_open(path, &size);
    if (fd < 0) return error_set(error, "expected a regular file, found: %s", file_error());
    void *map = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return error_set(error, "cannot map its %lld bytes: %m", (long long)size);
    file->map = map;
    file->bytes = size;
    if (size >= 8) memcpy(&n, map, 8);
    bool fits = size >= 8 && n <= file->bytes - 8 && n <= JSON_MOST;
    bool ok = fits ? read_header((const char *)map + 8, n, file->bytes - 8 - n, file, error)
                   : error_set(error, "expected 8 bytes and a header, found a header of %llu bytes "
                               "in a file of %zu", n, file->bytes);
    if (!ok) safetensors_close(file);
    return ok;
}

// Linear search: a model reads each of a few hundred tensors once.
const Tensor *safetensors_find(const SafetensorsFile *file, const char *name) {
    for (int i = 0; i < file->count; i++)
        if (!strcmp(file->tensors[i].name, name)) return &file->tensors[i];
    return NULL;
}

// ----------------------------------------------------------------------------------------- writing

// Spaces at the end of the header align the data to 64 bytes, enough for every type and for SIMD.
static char *make_header(const Tensor *tensors, int count, size_t *n) {
    char *text = NULL, end[65];
    long long at = 0;
    FILE *f = text_begin(&text, n);
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", f);
    for (const Tensor *t = tensors; t < tensors + count; t++) {
        long long bytes = tensor_bytes(t);
        fputc(',', f);
        json_write_string(f, t->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype);
        for (int i = 0; i < t->rank; i++)
            fprintf(f, "%s%lld", i ? "," : "", t->shape[i]);
        fprintf(f, "],\"data_offsets\":[%lld,%lld]}", at, at + bytes);
        at += bytes;
    }
    int left = 64 - (ftell(f) + 8) % 64;
    text_end(f, check_format(end, sizeof end, "%-*s", left, "}"));
    return text;
}

// Tensors are written in the given order; their data follow each other without gaps.
Hash safetensors_write(int folder, const char *path, const Tensor *tensors, int count,
                       int64_t *bad) {
    const int64_t piece = 1 << 20;  // counted, hashed and written while it is in the cache
    size_t n;
    char *header = make_header(tensors, count, &n);
    FileWriter w;
    uint64_t length = n;
    file_begin(&w, folder, path);
    file_add(&w, &length, 8);
    file_add(&w, header, n);
    free(header);
    for (const Tensor *t = tensors; t < tensors + count; t++) {
        const char *data = t->bring ? t->bring(t->source) : t->data;
        int64_t bytes = tensor_bytes(t);
        int element = t->dtype[0] == 'F' ? tensor_dtype_bytes(t->dtype) : 0;
        for (int64_t at = 0; at < bytes; at += piece) {
            int64_t left = least(bytes - at, piece);
            if (element >= 4) *bad += real_count_bad(data + at, element, left / element);
            file_add(&w, data + at, left);
        }
    }
    return file_commit(&w);
}
