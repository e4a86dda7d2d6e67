// presets.h: named models, each with the flags it stands for. Flags on the command line win.
#pragma once
#include "flags.h"

typedef struct {
    const char *name;                         // of --model
    const char *flags;                        // as on a command line
    const char *note;                         // what it is, or what a paper leaves open
} Preset;
extern const Preset PRESETS[];                // the last one has no name

// Sets the flags of the model `name`, and --model itself; an unknown name is refused.
void flags_preset(FlagSet *set, const char *name);
