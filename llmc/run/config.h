// config.h: from the command line to the flags of a run, the combinations of flags that are
// refused, the model, and config.json. Nothing is written here, and a run is never overwritten.
#pragma once
#include "describe.h"
#include "presets.h"

enum { CONFIG_VERSION = 2 };                  // of config.json; 2 has a checksum

// Merges the sources of flags, later over earlier: defaults, the preset (--model), --config, the
// run that is resumed or read, the command line. Returns whether there is a checkpoint to resume
// from; a run killed before its first one begins again, with its own flags.
bool flags_resolve(FlagSet *set, const Trainer *t, int argc, char **argv);
// Overrides the flags in `set` by those in `given`, and refuses those that may not change.
// found: set has the flags of the run in --out, which goes on or begins again.
void flags_override(FlagSet *set, const FlagSet *given, bool found);
// --init-from FOLDER: takes the model's flags from the run or checkpoint in that folder.
void config_init_from(FlagSet *set, const FlagSet *given, const Trainer *t);
// Refuses flags that contradict each other or t's placement, device or precision.
void run_refuse(const FlagSet *set, const Trainer *t);

Model model_from_flags(const Flags *f, const Mode *mode);
Init init_from_flags(const Flags *f, const Mode *mode);

// Sets the flags of a config.json. Refuses a file that is damaged, of a newer version, or of
// another placement or precision. fp32 and bf16 may read each other's runs, since both save weights
// in fp32; returns whether the file is in the other precision.
bool config_read(FlagSet *set, const char *path, const Trainer *t);

// The folder of a checkpoint: the path itself, or the newest whole checkpoint of the run at the
// path, written into dir (PATH_CAP bytes).
const char *checkpoint_find(const char *path, char *dir);
// Whether --out holds a run. Refuses an existing run without --resume.
bool run_found(const char *out, int resume);
