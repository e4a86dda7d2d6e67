// config.h: what a run is, from its command line: the flags with their preset and the run that they
// continue, the combinations that are refused, the model, and config.json.
#pragma once
#include "describe.h"
#include "presets.h"

enum { CONFIG_VERSION = 2 };                  // of config.json; 2 has a checksum

// Command line -> flags, in the order in which they win, later over earlier: defaults, the preset,
// the run that is continued or read, --config, the command line. Returns whether there is a
// checkpoint to resume from; a run killed before its first one begins again, with its own flags.
bool flags_resolve(FlagSet *set, const Trainer *t, int argc, char **argv);
// The flags `given` over those of a preset or a run; flags that may not change are refused.
// resuming: set holds the flags of a run that goes on.
void flags_override(FlagSet *set, const FlagSet *given, bool resuming);
// --init-from FOLDER: the flags of the model are those of the run or checkpoint in that folder.
void config_init_from(FlagSet *set, const FlagSet *given, const Trainer *t);
// Refuses combinations of flags that make no sense under t's mode, device and precision.
void run_refuse(const FlagSet *set, const Trainer *t);

Model model_from_flags(const Flags *f, const Mode *mode);
Init init_from_flags(const Flags *f, const Mode *mode);

// The flags of a config.json become the base. A file that is damaged, of a newer version, or of
// another mode or precision is refused. Returns whether its precision is the other one of fp32 and
// bf16, which both keep their weights in fp32.
bool config_read(FlagSet *set, const char *path, const Trainer *t);

// The folder of a checkpoint: the path itself, or the newest whole one of the run at the path, in
// dir (of PATH_CAP bytes).
const char *checkpoint_find(const char *path, char *dir);
// Whether --out holds a run. Refuses one without --resume: nothing is ever overwritten.
bool run_found(const char *out, int resume);
