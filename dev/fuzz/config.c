// config.c: any bytes as config.json of a run and as manifest.json of a checkpoint.
#include "fuzz.h"
#include "rows.h"

static void read_manifest(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH], why[256] = "";
    fuzz_file(path, "state.json", "{}\n", 3);
    fuzz_file(path, "manifest.json", data, size);
    if (!checkpoint_verify(getenv("FUZZ_DIR"), why)) must(*why);
}

static void read_config(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH];
    const Trainer trainer = {.device = "cpu", .precision = "fp32", .mode = &MODES[NORM_MODE],
                             .commit = "", .element = 4};
    Run run;
    memset(&run, 0, sizeof run);
    flags_default(&run.set);
    config_read(&run.set, fuzz_file(path, "config.json", data, size), &trainer);
    run.t = &trainer;
    run.f = &run.set.f;
    run.m.mode = trainer.mode;
    expect_ranges(run.f);
    expect_config(&run);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    must(fuzz_once(read_manifest, data, size, false));
    fuzz_once(read_config, data, size, true);
    return 0;
}
