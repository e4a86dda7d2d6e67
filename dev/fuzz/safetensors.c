// safetensors.c: any bytes as a tensor file. A file that opens is read as floats and doubles, and
// written again as a file that holds the same.
#include "fuzz.h"
#include <sys/mman.h>

// A mapped file ends with its page, out of the sanitizer's sight: here it is a block of its exact
// size.
static void *fuzz_map(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    (void)protection, (void)flags;
    char *block = malloc(bytes);
    must(!at && block && pread(fd, block, bytes, offset) == (ssize_t)bytes);
    return block;
}

static int fuzz_unmap(void *at, size_t bytes) {
    (void)bytes;
    free(at);
    return 0;
}

#define mmap fuzz_map
#define munmap fuzz_unmap
#include "../../llmc/run/safetensors.c"
#include "../test/files.h"

static void read_tensor(const Tensor *t) {
    if (t->dtype[0] != 'F' && t->dtype[0] != 'B') return;  // integers are refused, by name
    size_t count = (size_t)tensor_count(t);
    float *single = check_alloc(count * sizeof *single, "floats");
    double *wide = check_alloc(count * sizeof *wide, "doubles");
    safetensors_read_real(t, 0, INT64_MAX, single, sizeof(float));
    safetensors_read_real(t, 0, INT64_MAX, wide, sizeof(double));
    for (size_t i = 0; i < count; i++) must(single[i] == (float)wide[i] || isnan(wide[i]));
    free(single);
    free(wide);
}

static void expect_same(const Tensor *a, const Tensor *b) {
    must(b && strcmp(a->dtype, b->dtype) == 0 && a->rank == b->rank &&
         memcmp(a->shape, b->shape, (size_t)a->rank * sizeof a->shape[0]) == 0);
    must(memcmp(a->data, b->data, (size_t)tensor_bytes(a)) == 0);
}

static void open_file(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH], copy[FUZZ_PATH], error[256] = "";
    SafetensorsFile file, again;
    if (!safetensors_open(fuzz_file(path, "model.safetensors", data, size), &file, error)) {
        must(*error);
        return;
    }
    int64_t bytes = 0;
    for (int i = 0; i < file.count; i++) {
        read_tensor(&file.tensors[i]);
        bytes += tensor_bytes(&file.tensors[i]);
        must(safetensors_find(&file, file.tensors[i].name) == &file.tensors[i]);
    }
    uint64_t header;
    memcpy(&header, data, sizeof header);
    must(sizeof header + header + (uint64_t)bytes ==
         size);  // no byte of data has two owners, or none
    write_tensors(fuzz_path(copy, "copy.safetensors"), file.tensors, file.count);
    open_tensors(copy, &again);
    must(again.count == file.count);
    for (int i = 0; i < file.count; i++)
        expect_same(&file.tensors[i], safetensors_find(&again, file.tensors[i].name));
    safetensors_close(&again);
    safetensors_close(&file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    must(fuzz_once(open_file, data, size, false));
    return 0;
}
