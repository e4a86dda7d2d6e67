// checkpoint.h: tensors in files, and directories of such files that survive a kill at any instant.
//
//   <run>/step_00000200/model.safetensors, optimizer.safetensors, config.json, state.json, ...
//                       manifest.json        {"model.safetensors": {"size": 512, "xxh64": "d24ec4f1a98c6e5b"}, ...}
//
// A file is written under a temporary name, brought to the disk (fsync), then renamed. A checkpoint is written as the directory
// .tmp-step_00000200, the manifest last, then renamed. When that step exists already it first steps aside as .old-step_00000200,
// which readers take while the plain name is missing. So there is always the old state or the new one, whole; what a kill leaves
// behind is ignored by readers and cleared by the next checkpoint_begin. One process writes to a run directory.
//
// Tensor files are safetensors: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
// Errors end the program with what to do; functions with `try` and checkpoint_verify return false and say why instead.
#pragma once
#include "util.h"
#include "json.h"
#include "../rand.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_CAP 1024
#define TENSOR_RANK 4
#define CHECKPOINT_NAME 64                    // bytes of the name of a checkpoint's file, with its zero

// ------------------------------------------------------------------------------------------------------------------ files

static inline bool file_exists(const char *path) { struct stat info; return stat(path, &info) == 0; }
static inline bool is_folder(const char *path) { struct stat info; return stat(path, &info) == 0 && S_ISDIR(info.st_mode); }

// Whether `name` in `folder` still leads to the file or folder that `fd` has open. follow: through
// a link, too.
static inline bool file_is(int fd, int folder, const char *name, bool follow) {
    struct stat held, named;
    return fstat(fd, &held) == 0
           && fstatat(folder, name, &named, follow ? 0 : AT_SYMLINK_NOFOLLOW) == 0
           && held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

// The folder that a name is in.
static inline char *file_parent(char *dir, const char *path) {
    size_t n = strlen(path);
    while (n > 0 && path[n - 1] == '/') n--;
    while (n > 0 && path[n - 1] != '/') n--;
    while (n > 1 && path[n - 1] == '/') n--;
    return check_format(dir, PATH_CAP, "%.*s", n ? (int)n : 1, n ? path : ".");
}

// The name of a file without its folder.
static inline const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// A new name is on the disk only when its folder is. Some file systems cannot sync folders and
// return EINVAL.
static inline void folder_sync(int folder, const char *path) {
    CHECK_WRITE(fsync(folder) == 0 || errno == EINVAL,
                "cannot bring the directory %s to the disk: %s\n  -> check that it exists and its "
                "disk is sound",
                path, strerror(errno));
}

// A folder, held open. Files written into it reach it even if the folder is renamed or
// replaced meanwhile.
static inline int folder_open(const char *path) {
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK_WRITE(folder >= 0,
                "cannot open the directory %s: %s\n  -> check that it exists and may be written to",
                path, strerror(errno));
    return folder;
}

// The folder `name` inside a run, made when it is missing. A link is refused: it would lead out of
// the run.
static inline int folder_open_in(int folder, const char *name, const char *path) {
    bool made = mkdirat(folder, name, 0777) == 0;
    int fd = made || errno == EEXIST
                 ? openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                 : -1;
    CHECK_WRITE(fd >= 0, "cannot make the directory %s: %s\n"
                "  -> free space on that disk; move a file or link of that name away",
                path, strerror(errno));
    if (made) folder_sync(folder, path);
    return fd;
}

// Makes a folder and those above it, and brings the new names to the disk. Returns false with errno
// set when the folder is there already (EEXIST) or cannot be made.
static inline bool folder_make(const char *path) {
    char above[PATH_CAP];
    if (mkdir(path, 0777) != 0) {
        bool has_parent = strlen(file_parent(above, path)) < strlen(path);       // not "." or "/"
        if (errno != ENOENT || !has_parent) return false;
        if (!folder_make(above) && errno != EEXIST) return false;
        if (mkdir(path, 0777) != 0) return false;
    }
    int folder = folder_open(file_parent(above, path));
    folder_sync(folder, above);
    close(folder);
    return true;
}

// Removes the file, link or folder of plain files called `name`. Links are removed, never followed.
static inline bool folder_remove(int folder, const char *name) {
    if (unlinkat(folder, name, 0) == 0 || errno == ENOENT) return true;
    if (errno != EISDIR && errno != EPERM) return false;
    int fd = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) return false;
    for (struct dirent *e; (e = readdir(d)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) unlinkat(fd, e->d_name, 0);
    closedir(d);
    return unlinkat(folder, name, AT_REMOVEDIR) == 0;
}

// A file on its way: written as <name>.tmp in its folder, then renamed.
typedef struct {
    int folder, fd;
    char path[PATH_CAP], temp[PATH_CAP];      // with the folder's name, for messages
    Hash hash;                                // of what was added, and its length
} FileWriter;

// folder: the open folder that the file goes in. A .tmp that a kill left, or a link of that name,
// is removed, never written through.
static inline void file_begin_in(FileWriter *w, int folder, const char *path) {
    check_format(w->path, sizeof w->path, "%s", path);
    check_format(w->temp, sizeof w->temp, "%s.tmp", path);
    const char *temp = file_name(w->temp);
    w->hash = hash_begin();
    w->folder = fcntl(folder, F_DUPFD_CLOEXEC, 0);
    unlinkat(w->folder, temp, 0);
    w->fd = openat(w->folder, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    CHECK_WRITE(w->fd >= 0,
                "cannot create %s: %s\n  -> check that the directory exists and may be written to",
                w->temp, strerror(errno));
}

static inline void file_begin(FileWriter *w, const char *path) {
    char dir[PATH_CAP];
    int folder = folder_open(file_parent(dir, path));
    file_begin_in(w, folder, path);
    close(folder);
}

// Pieces of one MiB are hashed while they are still in the cache.
static inline void file_add(FileWriter *w, const void *data, size_t n) {
    const char *p = (const char *)data;
    while (n) {
        ssize_t written = write(w->fd, p, n < 1 << 20 ? n : 1 << 20);
        if (written < 0 && errno == EINTR) continue;
        CHECK_WRITE(written > 0,
                    "cannot write %s after %" PRIu64 " bytes: %s\n"
                    "  -> free space on that disk, or write to another one",
                    w->temp, w->hash.length, strerror(errno));
        hash_add(&w->hash, p, (size_t)written);
        p += written;
        n -= (size_t)written;
    }
}

// Bytes at a place of their own, for files whose parts come in another order. The checksum leaves
// them out.
static inline void file_put(FileWriter *w, const void *data, size_t n, int64_t at) {
    const char *p = (const char *)data;
    while (n) {
        ssize_t written = pwrite(w->fd, p, n, (off_t)at);
        if (written < 0 && errno == EINTR) continue;
        CHECK_WRITE(written > 0,
                    "cannot write %s: %s\n  -> free space on that disk, or write to another one",
                    w->temp, strerror(errno));
        p += written, at += written, n -= (size_t)written;
    }
}

static inline Hash file_commit(FileWriter *w) {
    bool ok = fsync(w->fd) == 0 && close(w->fd) == 0
           && renameat(w->folder, file_name(w->temp), w->folder, file_name(w->path)) == 0;
    CHECK_WRITE(ok, "cannot finish %s: %s\n  -> free space on that disk, or write to another one",
                w->path, strerror(errno));
    char dir[PATH_CAP];
    folder_sync(w->folder, file_parent(dir, w->path));
    close(w->folder);
    return w->hash;
}

// The file holds either what it held before or all of data, whatever happens.
static inline Hash file_write_in(int folder, const char *path, const void *data, size_t n) {
    FileWriter w;
    file_begin_in(&w, folder, path);
    file_add(&w, data, n);
    return file_commit(&w);
}

static inline Hash file_write_text(int folder, const char *path, const char *text) {
    return file_write_in(folder, path, text, strlen(text));
}

static inline bool file_try_hash(const char *path, Hash *hash, char *error, size_t cap) {
    const size_t piece = 1 << 20;
    *hash = hash_begin();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return error_set(error, cap, "%s", strerror(errno));
    char *buffer = (char *)check_alloc(piece, "a checksum");
    ssize_t got;
    while ((got = read(fd, buffer, piece)) > 0 || (got < 0 && errno == EINTR)) if (got > 0) hash_add(hash, buffer, (size_t)got);
    if (got < 0) error_set(error, cap, "%s", strerror(errno));
    free(buffer);
    close(fd);
    return got == 0;
}

// ---------------------------------------------------------------------------------------------------------------- tensors

// A name, a type and a shape for memory that belongs to somebody else. In a mapped file data may be unaligned. To be written: bring(source), where there is one, gives
// the data when its turn comes, good until the next one's.
typedef struct {
    const char *name, *dtype;         // dtype: F32 and F64 are what this program writes; BF16 and F16 are read too, integers and BOOL known
    int rank;                         // 0 is a scalar
    int64_t shape[TENSOR_RANK];
    const void *data;
    const void *(*bring)(void *source);
    void *source;
} Tensor;

typedef struct {
    Tensor *tensors;                  // in the order of their data
    int count;
    Json *header;                     // owns the names
    void *map;
    size_t bytes;
} SafetensorsFile;

static inline int tensor_dtype_bytes(const char *dtype) {
    static const char *const NAMES[] = {"F64", "I64", "F32", "I32", "BF16", "F16", "U8", "BOOL"};
    static const int BYTES[] = {8, 8, 4, 4, 2, 2, 1, 1};
    for (int i = 0; i < 8; i++) if (strcmp(dtype, NAMES[i]) == 0) return BYTES[i];
    return 0;
}

// Bytes of data, or -1 when the type is unknown, a size negative, or the product beyond 63 bits.
static inline int64_t tensor_bytes(const Tensor *t) {
    int64_t bytes = tensor_dtype_bytes(t->dtype);
    if (bytes == 0 || t->rank < 0 || t->rank > TENSOR_RANK) return -1;
    for (int i = 0; i < t->rank; i++) {
        if (t->shape[i] < 0 || (t->shape[i] > 0 && bytes > INT64_MAX / t->shape[i])) return -1;
        bytes *= t->shape[i];
    }
    return bytes;
}

static inline int64_t tensor_count(const Tensor *t) { return tensor_bytes(t) / tensor_dtype_bytes(t->dtype); }

static inline double tensor_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double v = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits & 0x8000 ? -v : v;
}

// Element i of a floating-point tensor. memcpy, because a mapped file promises no alignment.
static inline double tensor_real(const Tensor *t, int bytes, bool bfloat, int64_t i) {
    const char *p = (const char *)t->data + i * bytes;
    double full;
    float single;
    uint16_t half;
    if (bytes == 8) { memcpy(&full, p, 8); return full; }
    if (bytes == 4) { memcpy(&single, p, 4); return single; }
    memcpy(&half, p, 2);
    if (!bfloat) return tensor_half(half);
    uint32_t word = (uint32_t)half << 16;
    memcpy(&single, &word, 4);
    return single;
}

// Value i of floats or doubles, by the size of one.
static inline double real_get(const void *x, size_t element, int64_t i) { return element == sizeof(float) ? ((const float *)x)[i] : ((const double *)x)[i]; }
static inline void real_put(void *x, size_t element, int64_t i, double value) {
    if (element == sizeof(float)) ((float *)x)[i] = (float)value;
    else ((double *)x)[i] = value;
}

// How many of n floats or doubles are infinite or NaN. They may be unaligned.
static inline int64_t real_count_bad(const void *x, size_t element, int64_t n) {
    const char *p = (const char *)x;
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++, p += element) {
        float single;
        double full;
        if (element == sizeof single) {
            memcpy(&single, p, sizeof single);
            bad += !isfinite(single);
        } else {
            memcpy(&full, p, sizeof full);
            bad += !isfinite(full);
        }
    }
    return bad;
}

// Refuses weights or moments, just read from a file, that are infinite or NaN.
static inline void real_check_finite(const void *x, size_t element, int64_t n, const char *path,
                                     const char *name) {
    int64_t bad = real_count_bad(x, element, n);
    CHECK(!bad,
          "%s: %lld values of %s are infinite or NaN\n  -> use an earlier checkpoint, or a sound "
          "copy of the weights",
          path, (long long)bad, name);
}

// Whether a tensor has this shape; longer: or is a matrix of more rows, of which the first are wanted.
static inline bool tensor_fits(const Tensor *t, int rank, const int64_t shape[2], bool longer) {
    return t->rank == rank && (t->shape[0] == shape[0] || (longer && rank == 2 && t->shape[0] > shape[0])) && (rank == 1 || t->shape[1] == shape[1]);
}

// Copies values of a tensor, from number `first` on and at most so many, into floats or doubles, bit for bit where the type is the same already.
static inline void safetensors_read_real(const Tensor *t, int64_t first, int64_t most, void *out, size_t element) {
    int bytes = tensor_dtype_bytes(t->dtype);
    bool bfloat = strcmp(t->dtype, "BF16") == 0;
    CHECK(bfloat || t->dtype[0] == 'F', "tensor %s: expected F64, F32, BF16 or F16, found %s\n  -> convert the file", t->name, t->dtype);
    int64_t rest = tensor_count(t) - first, count = rest < most ? rest : most;
    if ((size_t)bytes == element) {
        if (count > 0) memcpy(out, (const char *)t->data + first * bytes, (size_t)count * element);
    } else
        for (int64_t i = 0; i < count; i++) real_put(out, element, i, tensor_real(t, bytes, bfloat, first + i));
}

// ------------------------------------------------------------------------------------------------------ safetensors: read

static const char ANOTHER_TYPE[] = "\n  -> convert the file";         // it is whole: another copy would be refused too

static inline int safetensors_order(const void *a, const void *b) {
    const Tensor *x = (const Tensor *)a, *y = (const Tensor *)b;
    if (x->data != y->data) return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return (tensor_bytes(x) > tensor_bytes(y)) - (tensor_bytes(x) < tensor_bytes(y));        // an empty tensor before the one that begins at the same place
}

static inline bool safetensors_is_ints(const Json *v, size_t least, size_t most) {
    if (!v || v->kind != JSON_ARRAY || v->count < least || v->count > most) return false;
    for (const Json *i = v->first; i; i = i->next) if (i->kind != JSON_INT || i->integer < 0) return false;
    return true;
}

// One entry of the header: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, offsets within `bytes` bytes of data.
static inline bool safetensors_read_entry(const Json *entry, const char *data, int64_t bytes, Tensor *t, char *error, size_t cap) {
    const Json *dtype = json_get(entry, "dtype"), *shape = json_get(entry, "shape"), *offsets = json_get(entry, "data_offsets");
    if (!dtype || dtype->kind != JSON_STRING) return error_set(error, cap, "tensor %s: expected \"dtype\" to be F64, F32, BF16, F16, I64, I32, U8 or BOOL", entry->key);
    if (!tensor_dtype_bytes(dtype->text))
        return error_set(error, cap, "tensor %.80s: expected F64, F32, BF16, F16, I64, I32, U8 or BOOL, found \"%.16s\"%s", entry->key, dtype->text, ANOTHER_TYPE);
    if (!safetensors_is_ints(shape, 0, TENSOR_RANK))
        return error_set(error, cap, "tensor %s: expected \"shape\" to be at most %d sizes", entry->key, TENSOR_RANK);
    if (!safetensors_is_ints(offsets, 2, 2)) return error_set(error, cap, "tensor %s: expected \"data_offsets\" to be [begin, end]", entry->key);
    t->name = entry->key;
    t->dtype = dtype->text;
    t->rank = 0;
    for (const Json *size = shape->first; size; size = size->next) t->shape[t->rank++] = size->integer;
    int64_t begin = offsets->first->integer, end = offsets->first->next->integer;
    if (begin > end || end > bytes)
        return error_set(error, cap, "tensor %s: offsets [%" PRId64 ", %" PRId64 "] outside of the %" PRId64 " bytes of data", t->name, begin, end, bytes);
    t->data = data + begin;
    return tensor_bytes(t) == end - begin || error_set(error, cap, "tensor %s: its shape does not take the %" PRId64 " bytes it has", t->name, end - begin);
}

// The data must be covered from end to end, each byte by one tensor.
static inline bool safetensors_check_cover(SafetensorsFile *file, const char *data, int64_t bytes, char *error, size_t cap) {
    const char *at = data;
    qsort(file->tensors, (size_t)file->count, sizeof *file->tensors, safetensors_order);
    for (const Tensor *t = file->tensors; t < file->tensors + file->count; at += tensor_bytes(t++))
        if (t->data != at) return error_set(error, cap, "tensors %s at byte %" PRId64 " of the data", (const char *)t->data < at ? "overlap" : "leave a hole", (int64_t)(at - data));
    return at == data + bytes || error_set(error, cap, "%" PRId64 " bytes of data belong to no tensor", (int64_t)(data + bytes - at));
}

// Fills file->header, tensors and count from the JSON header; the data are the `bytes` bytes behind it.
static inline bool safetensors_read_header(const char *text, size_t n, int64_t bytes, SafetensorsFile *file, char *error, size_t cap) {
    if (n == 0 || text[0] != '{') return error_set(error, cap, "expected the header to begin with '{'");
    if (!json_try_parse(text, n, &file->header, error, cap)) return false;
    file->tensors = (Tensor *)check_alloc(file->header->count * sizeof(Tensor), "a list of tensors");
    for (const Json *entry = file->header->first; entry; entry = entry->next) {
        if (strcmp(entry->key, "__metadata__") == 0) {
            bool strings = entry->kind == JSON_OBJECT;
            for (const Json *m = entry->first; m; m = m->next) strings = strings && m->kind == JSON_STRING;
            if (!strings) return error_set(error, cap, "expected \"__metadata__\" to be an object of strings");
        } else if (!safetensors_read_entry(entry, text + n, bytes, &file->tensors[file->count++], error, cap)) return false;
    }
    return safetensors_check_cover(file, text + n, bytes, error, cap);
}

static inline void safetensors_close(SafetensorsFile *file) {
    if (file->map) munmap(file->map, file->bytes);
    json_free(file->header);
    free(file->tensors);
    memset(file, 0, sizeof *file);
}

// Maps a regular file read-only. Its pages are read when they are touched; the file must not be cut short while it is open.
static inline bool safetensors_map(const char *path, SafetensorsFile *file, char *error, size_t cap) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);        // not waiting for the other end, should it be a pipe
    if (fd < 0) return error_set(error, cap, "%s", strerror(errno));
    bool ok = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size >= 8;
    if (!ok) error_set(error, cap, "expected a regular file of at least 8 bytes");
    if (ok) {
        file->bytes = (size_t)info.st_size;
        void *map = mmap(NULL, file->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        ok = map != MAP_FAILED;
        if (ok) file->map = map; else error_set(error, cap, "cannot map it into memory: %s", strerror(errno));
    }
    close(fd);
    return ok;
}

static inline bool safetensors_try_open(const char *path, SafetensorsFile *file, char *error, size_t cap) {
    uint64_t n;
    memset(file, 0, sizeof *file);
    if (!safetensors_map(path, file, error, cap)) return false;
    memcpy(&n, file->map, 8);
    bool fits = n <= file->bytes - 8 && n <= JSON_MOST;
    if (!fits) error_set(error, cap, "a header of %" PRIu64 " bytes in a file of %zu", n, file->bytes);
    bool ok = fits && safetensors_read_header((const char *)file->map + 8, n, (int64_t)(file->bytes - 8 - n), file, error, cap);
    if (!ok) safetensors_close(file);
    return ok;
}

static inline void safetensors_open(const char *path, SafetensorsFile *file) {
    char error[256];
    bool ok = safetensors_try_open(path, file, error, sizeof error);
    CHECK(ok, "%s: expected a whole safetensors file, found: %s%s", path, error, strstr(error, ANOTHER_TYPE) ? "" : "\n  -> check the path, or copy or download the file again");
}

static inline const Tensor *safetensors_find(const SafetensorsFile *file, const char *name) {
    for (int i = 0; i < file->count; i++) if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
    return NULL;
}

// ----------------------------------------------------------------------------------------------------- safetensors: write

// Spaces at the end of the header bring the data to a multiple of 64 bytes: any type is aligned, also for vectors.
static inline char *safetensors_header(const Tensor *tensors, int count, size_t *n) {
    char *text = NULL, end[65];
    int64_t at = 0;
    FILE *f = text_begin(&text, n, "the header of a safetensors file");
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", f);
    for (const Tensor *t = tensors; t < tensors + count; t++) {
        int64_t bytes = tensor_bytes(t);
        CHECK(bytes >= 0, "tensor %s: expected a known type and shape, found %s of rank %d\n  -> correct its row", t->name, t->dtype, t->rank);
        fputc(',', f);
        json_write_string(f, t->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype);
        for (int i = 0; i < t->rank; i++) fprintf(f, "%s%" PRId64, i ? "," : "", t->shape[i]);
        fprintf(f, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", at, at + bytes);
        at += bytes;
    }
    text_end(f, check_format(end, sizeof end, "%-*s", 64 - (int)((ftell(f) + 8) % 64), "}"), "the header of a safetensors file");
    return text;
}

// Writes the header of a file just begun. The data of the tensors follow in the order given;
// returns where they begin.
static inline int64_t safetensors_begin(FileWriter *w, const Tensor *tensors, int count) {
    size_t n;
    char *header = safetensors_header(tensors, count, &n), error[256];
    // The reader judges the header first: a name used twice, say, would make a file that nobody can
    // open.
    Json *parsed;
    bool ok = json_try_parse(header, n, &parsed, error, sizeof error);
    CHECK(ok, "%s: these tensors make no valid file: %s\n  -> give each a name of its own", w->path,
          error);
    json_free(parsed);
    uint64_t length = n;
    file_add(w, &length, 8);
    file_add(w, header, n);
    free(header);
    return (int64_t)n + 8;
}

// Writes a whole file without copying the data; the hash is that of the whole file. Counts in *bad
// the values that are infinite or NaN, piece by piece while the piece is in the cache.
static inline Hash safetensors_write(FileWriter *w, const Tensor *tensors, int count,
                                     int64_t *bad) {
    const int64_t piece = 1 << 20;
    safetensors_begin(w, tensors, count);
    for (const Tensor *t = tensors; t < tensors + count; t++) {
        const char *data = (const char *)(t->bring ? t->bring(t->source) : t->data);
        int64_t bytes = tensor_bytes(t);
        int element = t->dtype[0] == 'F' ? tensor_dtype_bytes(t->dtype) : 0;
        for (int64_t at = 0; at < bytes; at += piece) {
            int64_t n = bytes - at < piece ? bytes - at : piece;
            if (element >= 4) *bad += real_count_bad(data + at, (size_t)element, n / element);
            file_add(w, data + at, (size_t)n);
        }
    }
    return file_commit(w);
}

// ------------------------------------------------------------------------------------------------------------ checkpoints

// A checkpoint that is being written.
typedef struct {
    int run, folder;                  // the caller's handle of the run; .tmp-step_N in it
    char run_dir[PATH_CAP];           // the run's folder by name, for messages
    int64_t step;
    int64_t bad;                      // values written so far that are infinite or NaN
    FILE *manifest;                   // its text, a line for each file so far
    char *text;
    size_t size;
} Checkpoint;

// <run>/step_00000200, with ".tmp-" or ".old-" before the name.
static inline char *checkpoint_path(char *buf, const char *run_dir, const char *prefix, int64_t step) {
    return check_format(buf, PATH_CAP, "%s/%sstep_%08" PRId64, run_dir, prefix, step);
}

// The step in a directory's name, or -1 when it is not exactly prefix and step.
static inline int64_t checkpoint_step(const char *name, const char *prefix) {
    size_t n = strlen(prefix);
    if (strncmp(name, prefix, n) != 0 || strncmp(name + n, "step_", 5) != 0) return -1;
    char again[64];
    long long step = strtoll(name + n + 5, NULL, 10);
    snprintf(again, sizeof again, "step_%08lld", step);
    return strcmp(again, name + n) == 0 ? step : -1;
}

// A second handle of a folder, to list it: closing the list closes the handle.
static inline DIR *folder_list(int folder, const char *path) {
    int fd = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    CHECK_WRITE(d, "cannot list %s: %s\n  -> choose a directory that can be read and written", path,
                strerror(errno));
    return d;
}

// Clears what a kill left behind: unfinished checkpoints, and old ones that had stepped aside for a new one of the same step.
static inline void checkpoint_tidy(int run, const char *run_dir) {
    struct stat info;
    DIR *d = folder_list(run, run_dir);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        const char *name = e->d_name;
        bool unfinished = checkpoint_step(name, ".tmp-") >= 0;
        bool aside = checkpoint_step(name, ".old-") >= 0;
        if (!unfinished && !aside) continue;
        bool restore = aside && fstatat(run, name + 5, &info, AT_SYMLINK_NOFOLLOW) != 0;
        bool ok = restore ? renameat(run, name, run, name + 5) == 0 : folder_remove(run, name);
        CHECK_WRITE(ok, "cannot clear the leftover %s/%s: %s\n  -> remove it by hand", run_dir,
                    name, strerror(errno));
    }
    closedir(d);
}

// A checkpoint is begun, filled and committed. run: the run's folder, open; run_dir: its name.
static inline void checkpoint_begin(Checkpoint *c, int run, const char *run_dir, int64_t step) {
    char path[PATH_CAP];
    CHECK(step >= 0, "a checkpoint of step %" PRId64 "\n  -> count steps from zero", step);
    memset(c, 0, sizeof *c);
    check_format(c->run_dir, sizeof c->run_dir, "%s", run_dir);
    c->run = run;
    c->step = step;
    checkpoint_tidy(run, run_dir);
    checkpoint_path(path, run_dir, ".tmp-", step);
    c->folder = folder_open_in(run, file_name(path), path);
    c->manifest = text_begin(&c->text, &c->size, "a manifest");
}

static inline bool checkpoint_is_name(const char *name) {
    return *name && *name != '.' && !strchr(name, '/') && strlen(name) < CHECKPOINT_NAME && strcmp(name, "manifest.json") != 0;
}

// The path for one more file.
static inline char *checkpoint_new_file(const Checkpoint *c, const char *name, char *path) {
    char dir[PATH_CAP];
    struct stat info;
    check_format(path, PATH_CAP, "%s/%s", checkpoint_path(dir, c->run_dir, ".tmp-", c->step), name);
    bool is_new =
        checkpoint_is_name(name) && fstatat(c->folder, name, &info, AT_SYMLINK_NOFOLLOW) != 0;
    CHECK(is_new, "a checkpoint cannot take a file named \"%s\"\n  -> plain names, each once",
          name);
    return path;
}

static inline void checkpoint_note(const Checkpoint *c, const char *name, Hash hash) {
    fputs(ftell(c->manifest) ? ",\n" : "{\n", c->manifest);
    json_write_string(c->manifest, name);
    fprintf(c->manifest, ": {\"size\": %" PRIu64 ", \"xxh64\": \"%016" PRIx64 "\"}", hash.length, hash_end(&hash));
}

static inline void checkpoint_add_tensors(Checkpoint *c, const char *name, const Tensor *tensors, int count) {
    char path[PATH_CAP];
    FileWriter w;
    file_begin_in(&w, c->folder, checkpoint_new_file(c, name, path));
    checkpoint_note(c, name, safetensors_write(&w, tensors, count, &c->bad));
}

static inline void checkpoint_add_text(Checkpoint *c, const char *name, const char *text) {
    char path[PATH_CAP];
    checkpoint_note(c, name, file_write_text(c->folder, checkpoint_new_file(c, name, path), text));
}

// Gives up a checkpoint that must not be kept.
static inline void checkpoint_abandon(Checkpoint *c) {
    char temp[PATH_CAP];
    text_end(c->manifest, "", "a manifest");
    free(c->text);
    close(c->folder);
    folder_remove(c->run, file_name(checkpoint_path(temp, c->run_dir, ".tmp-", c->step)));
}

static inline void checkpoint_commit(Checkpoint *c) {
    char temp[PATH_CAP], plain[PATH_CAP], aside[PATH_CAP], manifest[PATH_CAP];
    checkpoint_path(temp, c->run_dir, ".tmp-", c->step);
    checkpoint_path(plain, c->run_dir, "", c->step);
    checkpoint_path(aside, c->run_dir, ".old-", c->step);
    text_end(c->manifest, "\n}\n", "a manifest");
    file_write_text(c->folder, check_format(manifest, sizeof manifest, "%s/manifest.json", temp),
                    c->text);
    free(c->text);
    close(c->folder);
    bool ok = renameat(c->run, file_name(plain), c->run, file_name(aside)) == 0 || errno == ENOENT;
    ok = ok && renameat(c->run, file_name(temp), c->run, file_name(plain)) == 0;
    CHECK_WRITE(ok, "cannot move %s to %s: %s\n  -> choose a directory that can be written", temp, plain, strerror(errno));
    folder_sync(c->run, c->run_dir);
    // The new one is safe. Should this fail, the next begin tries again.
    folder_remove(c->run, file_name(aside));
}

// One member of the manifest against its file.
static inline bool checkpoint_verify_file(const char *dir, const Json *entry, char *why, size_t cap) {
    const char *name = entry->key;
    const Json *size = json_get(entry, "size"), *xxh64 = json_get(entry, "xxh64");
    bool valid = checkpoint_is_name(name) && size && size->kind == JSON_INT && xxh64 && xxh64->kind == JSON_STRING;
    if (!valid) return error_set(why, cap, "manifest.json: expected a plain name, \"size\" and \"xxh64\" for \"%.80s\"", name);
    char path[PATH_CAP], found[17], error[128];
    struct stat info;
    check_format(path, sizeof path, "%s/%s", dir, name);
    if (stat(path, &info) != 0) return error_set(why, cap, "%s: %s", name, strerror(errno));
    if (!S_ISREG(info.st_mode) || info.st_size != size->integer)
        return error_set(why, cap, "%s: expected a file of %" PRId64 " bytes, found %" PRId64, name, size->integer, (int64_t)info.st_size);
    Hash hash;
    if (!file_try_hash(path, &hash, error, sizeof error)) return error_set(why, cap, "%s: %s", name, error);
    check_format(found, sizeof found, "%016" PRIx64, hash_end(&hash));
    return strcmp(found, xxh64->text) == 0 || error_set(why, cap, "%s: expected checksum %s, found %s", name, xxh64->text, found);
}

// Whether all that the manifest promises is there, bit for bit. Reads every byte.
static inline bool checkpoint_verify(const char *dir, char *why, size_t cap) {
    char path[PATH_CAP], error[256];
    size_t n;
    char *text = file_read(check_format(path, sizeof path, "%s/manifest.json", dir), JSON_MOST, &n);
    if (!text) return error_set(why, cap, "manifest.json: %s", strerror(errno));
    Json *manifest;
    bool ok = json_try_parse(text, n, &manifest, error, sizeof error);
    free(text);
    if (!ok) return error_set(why, cap, "manifest.json: %s", error);
    ok = (manifest->kind == JSON_OBJECT && manifest->count > 0) || error_set(why, cap, "manifest.json: expected an object of files");
    for (const Json *entry = manifest->first; ok && entry; entry = entry->next) ok = checkpoint_verify_file(dir, entry, why, cap);
    json_free(manifest);
    return ok;
}

// The highest step below `below` of which run_dir holds a checkpoint, whole or not; -1 when there is none.
static inline int64_t checkpoint_step_below(const char *run_dir, int64_t below) {
    int64_t best = -1;
    DIR *d = opendir(run_dir);
    CHECK(d || errno == ENOENT, "cannot list %s: %s\n  -> choose a directory that can be read", run_dir, strerror(errno));
    if (!d) return -1;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        int64_t plain = checkpoint_step(e->d_name, ""), aside = checkpoint_step(e->d_name, ".old-");
        int64_t step = plain > aside ? plain : aside;
        if (step < below && step > best) best = step;
    }
    closedir(d);
    return best;
}

// The step in a checkpoint's state.json, or -1.
static inline int64_t checkpoint_state_step(const char *dir) {
    char path[PATH_CAP], error[256];
    size_t n;
    Json *state = NULL;
    char *text = file_read(check_format(path, sizeof path, "%s/state.json", dir), JSON_MOST, &n);
    if (text) json_try_parse(text, n, &state, error, sizeof error);
    const Json *at = json_get(state, "step");
    int64_t step = at && at->kind == JSON_INT ? at->integer : -1;
    json_free(state);
    free(text);
    return step;
}

// Removes old checkpoints once the one of `newest` is written: those that are neither among the
// last `last` up to it nor of a step that `every` divides; last 0 keeps all. Later steps are
// damaged ones that a resume passed over: they neither count nor go. Each is renamed first, so that
// a kill leaves no half of one; of a link only the link goes.
static inline void checkpoint_prune(int run, const char *run_dir, int64_t newest, int64_t last,
                                    int64_t every) {
    char path[PATH_CAP], aside[PATH_CAP];
    int64_t step = newest + 1;
    for (int64_t kept = 0; last > 0 && (step = checkpoint_step_below(run_dir, step)) >= 0; kept++) {
        if (kept < last || (every && step % every == 0)) continue;
        const char *plain = file_name(checkpoint_path(path, run_dir, "", step));
        const char *temp = file_name(checkpoint_path(aside, run_dir, ".tmp-", step));
        bool ok = renameat(run, plain, run, temp) == 0 && folder_remove(run, temp);
        CHECK_WRITE(ok, "cannot remove %s: %s\n  -> remove it by hand, or --keep-last 0", path, strerror(errno));
    }
}

// The newest whole checkpoint of a step below `below`, into dir (of PATH_CAP bytes); false when the run has none. Damaged ones are named on stderr and passed over, but
// when nothing else is left the program ends: a run must not silently start again from nothing. One that goes while it is read made room for a newer one, of a process that trains
// (checkpoint_prune): the search begins again.
static inline bool checkpoint_latest(const char *run_dir, int64_t below, char *dir) {
    char why[256];
    struct stat info;
    bool damaged = false;
    for (int64_t step = checkpoint_step_below(run_dir, below); step >= 0; step = checkpoint_step_below(run_dir, step)) {
        bool gone = true;
        for (int aside = 0; aside < 2; aside++) {
            if (lstat(checkpoint_path(dir, run_dir, aside ? ".old-" : "", step), &info) != 0 && errno == ENOENT) continue;
            bool whole = checkpoint_verify(dir, why, sizeof why);
            int64_t stated = whole ? checkpoint_state_step(dir) : step;
            if (stated < 0) error_set(why, sizeof why, "its state.json names no step");
            else if (stated != step) error_set(why, sizeof why, "its state.json is of step "
                                               "%" PRId64 ", was it renamed?", stated);
            else if (whole) return true;
            if (lstat(dir, &info) != 0 && errno == ENOENT) continue;
            fprintf(stderr, "warning: passing over the damaged checkpoint %s: %s\n", dir, why);
            gone = false, damaged = true;
        }
        if (gone) step = below;
    }
    CHECK(!damaged, "every checkpoint in %s is damaged\n  -> restore one from a copy, or remove them to begin anew", run_dir);
    return false;
}
