// files.h: files and checkpoints that tests write, by name. Included after checkpoint.h.
#pragma once

static inline void write_text(const char *path, const char *text) {
    FileWriter w;
    file_begin(&w, path);
    file_add(&w, text, strlen(text));
    file_commit(&w);
}

static inline Hash write_tensors(const char *path, const Tensor *tensors, int count) {
    FileWriter w;
    int64_t bad = 0;
    file_begin(&w, path);
    return safetensors_write(&w, tensors, count, &bad);
}

// In a folder that is made when it is missing. Close c->run after the checkpoint is committed.
static inline void begin_checkpoint(Checkpoint *c, const char *run, int64_t step) {
    folder_make(run);
    checkpoint_begin(c, folder_open(run), run, step);
}
