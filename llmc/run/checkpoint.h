// checkpoint.h: checkpoints of a run, which survive a kill at any instant.
//
//   <run>/step_00000200/model.safetensors, optimizer.safetensors, config.json, state.json, ...
//                       manifest.json    {"model.safetensors": {"size": 512, "xxh64": "d24e..."},
//                                         ...}
//
// A checkpoint is written as the folder .tmp-step: every file is synced to the disk, the manifest
// last, and then the folder is renamed. So a step_ folder is whole as soon as it exists. A kill
// leaves .tmp-step, which readers ignore and the next checkpoint_begin removes. If a step_ folder
// of the same step exists, a resume has passed over it as damaged; it is removed just before the
// rename. Only one process may write to a run: start.c holds its lock.
#pragma once
#include "safetensors.h"

// A checkpoint that is being written.
typedef struct {
    int run, folder;                      // open: the run's (the caller's), .tmp-step in it
    char path[PATH_CAP], temp[PATH_CAP];  // of the checkpoint, and of .tmp-step
    int64_t bad;                          // values written so far that are infinite or NaN
    char manifest[2048];                  // its text, a line for each file so far
} Checkpoint;

// A checkpoint is begun, filled, and then committed or abandoned. A write that fails ends the
// program with EXIT_WRITE.
void checkpoint_begin(Checkpoint *c, int run, const char *run_dir, int64_t step);
void checkpoint_add_tensors(Checkpoint *c, const char *name, const Tensor *tensors, int count);
void checkpoint_add_text(Checkpoint *c, const char *name, const char *text);
void checkpoint_commit(Checkpoint *c);
void checkpoint_abandon(Checkpoint *c);

char *checkpoint_path(char *buf, const char *run_dir, int64_t step);  // <run>/step_00000200

// Finds the newest whole checkpoint and writes its path into dir (PATH_CAP bytes). False: the run
// has no checkpoint. Warns of damaged ones and passes over them. If all are damaged it ends the
// program: a run must not silently begin again at step 0.
bool checkpoint_latest(const char *run_dir, char *dir);

// The highest step below `below` that has a checkpoint, whole or not; -1: there is none.
int64_t checkpoint_step_below(const char *run_dir, int64_t below);

// Whether every file of the manifest is there with its size and checksum. Reads every byte.
bool checkpoint_verify(const char *dir, char *error);

// Removes old checkpoints after the one of step `newest` was written. Keeps the `last` newest up to
// it (0: all), and every one whose step is a multiple of `every` (0: none). Checkpoints of later
// steps are damaged ones that a resume passed over: they are neither counted nor removed. A
// symbolic link is removed, not what it points to.
void checkpoint_prune(int run, const char *run_dir, int64_t newest, int64_t last, int64_t every);
