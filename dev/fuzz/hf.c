// hf.c: any bytes as config.json of a Hugging Face folder, under each placement that its classes have, and as the index of the folder's shards.
#include "fuzz.h"
#include "rows.h"

static const Mode *mode;

static void read_config(const uint8_t *data, size_t size) {
    char path[FUZZ_PATH];
    const Trainer trainer = {.precision = "fp32", .element = 4};
    Run run;
    memset(&run, 0, sizeof run);
    fuzz_file(path, "config.json", data, size);
    flags_default(&run.set);
    hf_read_config(&run.set, getenv("FUZZ_DIR"), mode->name);
    expect_ranges(&run.set.f);
    run_refuse(&run.set, mode, "cpu", "fp32");
    run.t = &trainer;
    run.f = &run.set.f;
    run.m = model_from_flags(run.f, mode);
    must(run.m.L > 0 && run.m.C == run.m.NH * run.m.HS && run.m.NH % run.m.KV == 0);
    run.m.mode = &MODES[NORM_MODE];                                         // as config_read knows this program
    expect_config(&run);
}

static void read_index(const uint8_t *data, size_t size) {
    static const char shard[] = "\x40\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}          1234";
    char path[FUZZ_PATH];
    fuzz_file(path, "shard", shard, sizeof shard - 1);
    fuzz_file(path, "model.safetensors.index.json", data, size);
    HfTensors all = hf_open(getenv("FUZZ_DIR"));
    must(all.file_count == 1 && all.count == 1 && hf_find(&all, "a"));
    safetensors_close(all.files);
    free(all.files);
    free(all.tensors);
    free(all.used);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int MODES_OF[] = {MODE_PRE, MODE_PRE_QK_PRE, MODE_OLMO2};
    for (int i = 0; i < 3; i++) {
        mode = &MODES[MODES_OF[i]];
        fuzz_once(read_config, data, size, true);
    }
    fuzz_once(read_index, data, size, false);
    return 0;
}
