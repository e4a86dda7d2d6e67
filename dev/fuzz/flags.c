// flags.c: any bytes as a command line (a word a line), through presets, refusals and the model's
// tables, to where files would be touched. The first byte: whether the words come as a command
// line, or on top of a run that is resumed (1); for the CPU, or for a GPU (2). Accepted flags
// survive config.json.
#include "fuzz.h"
#include "rows.h"

// layers of a model that is laid out, and whose tables are printed: more take long
enum { WORDS = 64, LAYERS = 512, TABLES = 8 };

static int split_words(char *text, char **words) {
    int count = 0;
    for (char *word = strtok(text, "\n"); word && count < WORDS; word = strtok(NULL, "\n"))
        words[count++] = word;
    return count;
}

static void run_line(const uint8_t *data, size_t size) {
    static Run run;
    Run *r = memset(&run, 0, sizeof run);
    const Trainer trainer = data[0] & 2 ? (Trainer){.device = "cuda", .precision = "bf16",
                                                    .mode = &MODES[NORM_MODE], .commit = "",
                                                    .element = 4, .storage = 2}
                                        : (Trainer){.device = "cpu", .precision = "fp32",
                                                    .mode = &MODES[NORM_MODE], .commit = "",
                                                    .element = 4, .storage = 4};
    char *text = check_alloc(size, "a command line"), *words[WORDS];
    memcpy(text, data + 1, size - 1);
    FlagSet given;
    flags_default(&given);
    flags_parse(&given, split_words(text, words), words, BY_USER);
    expect_ranges(&given.f);
    flags_default(&r->set);
    flags_preset(&r->set, given.f.model);
    flags_override(&r->set, &given, data[0] & 1);
    r->t = &trainer;
    r->f = &r->set.f;
    expect_ranges(r->f);
    comm_open(&r->comm, trainer.device);
    run_refuse(&r->set, &trainer);
    r->m = model_from_flags(r->f, &MODES[NORM_MODE]);
    r->init = init_from_flags(r->f, r->m.mode);
    r->micro = (int)(r->f->micro_batch ? r->f->micro_batch : r->f->batch);
    r->training = true;
    r->setup = run_setup(r);
    for (int64_t step = 1; step <= 3; step++) {
        Optimizer o = schedule_optimizer(r->f, schedule_lr(r->f, step * r->f->steps / 3), step);
        must(o.clip >= 0 && isfinite(o.lr[LR_HIDDEN]) && o.lr[LR_HIDDEN] >= 0);
    }
    expect_config(r);
    if (r->m.L > LAYERS) return;
    r->layout = layout_make(&r->m);
    layout_share(&r->layout, &r->m, r->f->optimizer == OPTIMIZER_MUON, 0, 1);
    show_model(r, r->m.L <= TABLES);
    layout_free(&r->layout);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size) fuzz_once(run_line, data, size, true);
    return 0;
}
