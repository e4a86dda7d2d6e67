// checkpoint.h: checkpoints of a run, which survive a kill at any instant.
//
//   <run>/step_00000200/model.safetensors, optimizer.safetensors, config.json, state.json, ...
//                       manifest.json    {"model.safetensors": {"size": 512, "xxh64": "d24e..."},
//                                         ...}
//
// A checkpoint is written as the folder .tmp-step_00000200, its manifest last, every file brought
// to the disk; then the folder is renamed. So a step_ folder is whole as soon as it exists. A kill
// leaves a .tmp- folder, which readers ignore and the next checkpoint_begin removes. A folder can
// have the name of the new one only if a resume passed over it as damaged: it is removed just
// before the rename. One process writes to a run.
#pragma once
#include "safetensors.h"

// A checkpoint that is being written.
typedef struct {
    int run, folder;      // open: the run's (the caller's) and the .tmp- one in it
    char temp[PATH_CAP];  // the path of the .tmp- folder
    int64_t bad;          // values written so far that are infinite or NaN
    char manifest[2048];  // its text, a line for each file so far
} Checkpoint;

// A checkpoint is begun, filled, and then committed or abandoned. Faults end the program.
void checkpoint_begin(Checkpoint *c, int run, const char *run_dir, int64_t step);
void checkpoint_add_tensors(Checkpoint *c, const char *name, const Tensor *tensors, int count);
void checkpoint_add_text(Checkpoint *c, const char *name, const char *text);
void checkpoint_commit(Checkpoint *c);
void checkpoint_abandon(Checkpoint *c);

char *checkpoint_path(char *buf, const char *run_dir, int64_t step);  // <run>/step_00000200

// The newest whole checkpoint of a step below `below`, into dir (of PATH_CAP bytes); false when the
// run has none. It names damaged ones on stderr and passes over them. When all are damaged it ends
// the program: a run must not silently start again from nothing.
bool checkpoint_latest(const char *run_dir, int64_t below, char *dir);

// The highest step below `below` that has a checkpoint, whole or not; -1: there is none.
int64_t checkpoint_step_below(const char *run_dir, int64_t below);

// Whether all that the manifest promises is there, bit for bit. Reads every byte.
bool checkpoint_verify(const char *dir, char *error);

// Removes old checkpoints after the one of step `newest` was written: keeps the `last` newest up to
// it, and those whose step is a multiple of `every` (0: none). last 0 keeps all. Checkpoints of
// later steps are damaged ones that a resume passed over: they neither count nor go. A link goes
// without what it leads to.
void checkpoint_prune(int run, const char *run_dir, int64_t newest, int64_t last, int64_t every);
