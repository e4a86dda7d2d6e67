// safetensors.h: named tensors in one file, as PyTorch and Hugging Face read and write them.
//
// The file: the length of the header (8 bytes, little-endian); the header, JSON: {name: {"dtype":
// "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}; the data. Each byte of the data belongs
// to exactly one tensor. A damaged file is refused when it is opened.
#pragma once
#include "files.h"
#include "json.h"

enum { TENSOR_RANK = 4 };

// A name, a type and a shape for memory that the caller or a mapped file owns.
typedef struct {
    const char *name;
    const char *dtype;  // written: F32, F64; also read: BF16, F16; others only by size
    int rank;           // 0 is a scalar
    long long shape[TENSOR_RANK];
    const void *data;                    // in a mapped file it may be unaligned
    const void *(*bring)(void *source);  // for writing: returns the data, valid until the next
    void *source;                        // tensor's turn; NULL: data is written
} Tensor;

typedef struct {
    Tensor *tensors;  // in the order of their data
    int count;
    Json *header;  // owns the names
    void *map;
    size_t bytes;
} SafetensorsFile;

int tensor_dtype_bytes(const char *dtype);  // of one value; 0: an unknown type
int64_t tensor_bytes(const Tensor *t);      // of data; -1: more than an int64_t counts

// Maps a regular file: its pages are read on first access, so the file must not be truncated while
// it is open. False: it is damaged, and error says how.
bool safetensors_open(const char *path, SafetensorsFile *file, char *error);
void safetensors_close(SafetensorsFile *file);
const Tensor *safetensors_find(const SafetensorsFile *file, const char *name);  // NULL: not there

// Copies at most `most` values, from index `first` on, and converts them to floats or doubles
// (element bytes each); bit for bit if that is the tensor's type. Refuses integers.
void safetensors_read_real(const Tensor *t, int64_t first, int64_t most, void *out, size_t element);

// Writes a file and returns its hash. *bad grows by the number of infinite or NaN values.
Hash safetensors_write(int folder, const char *path, const Tensor *tensors, int count,
                       int64_t *bad);

// Floats or doubles, by the size of one.
double real_get(const void *x, size_t element, int64_t i);
void real_put(void *x, size_t element, int64_t i, double value);

// How many of n floats or doubles are infinite or NaN.
int64_t real_count_bad(const void *x, size_t element, int64_t n);
