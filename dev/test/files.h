// files.h: files and checkpoints that tests write, by name.
#pragma once
#include <unistd.h>
#include "../../llmc/run/checkpoint.h"

// A whole file, in its folder, which is opened for it alone.
static inline void write_text(const char *path, const char *text) {
    char dir[PATH_CAP];
    int folder = folder_open(file_parent(dir, path));
    file_write_in(folder, path, text, strlen(text));
    close(folder);
}

static inline Hash write_tensors(const char *path, const Tensor *tensors, int count) {
    char dir[PATH_CAP];
    int64_t bad = 0;
    int folder = folder_open(file_parent(dir, path));
    Hash hash = safetensors_write(folder, path, tensors, count, &bad);
    close(folder);
    return hash;
}

static inline void open_tensors(const char *path, SafetensorsFile *file) {
    char error[ERROR_CAP];
    CHECK(safetensors_open(path, file, error), "%s: %s\n  -> run the test again", path, error);
}

// Values of a tensor of a known type, as all of an opened file are.
static inline int64_t tensor_count(const Tensor *t) {
    return tensor_bytes(t) / tensor_dtype_bytes(t->dtype);
}

// In a folder that is made when it is missing. Close c->run after the checkpoint is committed.
static inline void begin_checkpoint(Checkpoint *c, const char *run, int64_t step) {
    folder_make(run);
    checkpoint_begin(c, folder_open(run), run, step);
}
