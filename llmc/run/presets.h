// presets.h: named models, each with the flags it stands for. Flags on the command line win.
#pragma once
#include "flags.h"

typedef struct Preset {
    const char *name, *flags, *note;          // note: what a paper leaves open; NULL: nothing
} Preset;
extern const Preset PRESETS[];
extern const int PRESET_COUNT;

// Sets the flags of the model `name`, and --model itself; an unknown name is refused.
void flags_preset(FlagSet *set, const char *name);
