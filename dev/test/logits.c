// logits.c: what the judge makes of a model in any mode, for dev/test/test_hf.py. Reads lines
//     OUT MODE FLAGS...
// from standard input. For each it writes OUT/logits.safetensors with "tokens" [B, T] and the
// judge's "logits" [B, T, V]. The weights are random, far from the initial ones, and OUT is a run
// with a checkpoint of step 0 that holds them; with --init-from FOLDER among the flags they are
// those of a checkpoint.
#include "../../llmc/run/run.h"
#include "files.h"
#include "model.h"

enum { B = 2 };

static void write_checkpoint(Run *r, const char *out) {
    Checkpoint c;
    char *config = run_config(r);
    begin_checkpoint(&c, out, 0);
    run_save_tensors(r, &c, "model.safetensors", WEIGHTS, WEIGHTS);
    checkpoint_add_text(&c, "config.json", config);
    checkpoint_add_text(&c, "state.json", "{\"step\": 0}\n");
    checkpoint_commit(&c);
    close(c.run);
    free(config);
}

static void write_logits(Run *r, const char *out) {
    char path[PATH_CAP];
    int T = r->m.T, V = r->m.V;
    int32_t tokens[B * 256], targets[B * 256];
    CHECK(T <= 256, "--seq %d\n  -> at most 256", T);
    float *logits = (float *)check_alloc((size_t)(B * T * V) * sizeof *logits, "logits");
    fill_tokens(tokens, targets, B * T, V, 7);
    r->t->forward(r->gpt, tokens, NULL, B, T);
    for (int i = 0; i < B * T; i++)
        memcpy(logits + i * V, r->t->logits(r->gpt, i), (size_t)V * sizeof *logits);
    const Tensor tensors[] = {
        {.name = "tokens", .dtype = "I32", .rank = 2, .shape = {B, T}, .data = tokens},
        {.name = "logits", .dtype = "F32", .rank = 3, .shape = {B, T, V}, .data = logits}};
    write_tensors(check_format(path, sizeof path, "%s/logits.safetensors", out), tensors, 2);
    free(logits);
}

// nGPT's alpha depends on |p| alone.
static void turn_alphas(Run *r) {
    for (const Entry *e = r->layout.entries; e < r->layout.end; e++)
        for (int64_t i = 1; i < e->size && (e->id == PARAM_attn_p || e->id == PARAM_ffn_p); i += 2)
            ((float *)r->t->tensor(r->gpt, WEIGHTS, e))[i] *= -1;
}

static void one(const char *out, const char *mode_name, const char *flags) {
    const Mode *mode = NULL;
    FlagSet set, given;
    Run run, *r = &run;
    memset(r, 0, sizeof *r);
    flags_default(&given);
    flags_parse_text(&given, flags, BY_USER);
    flags_default(&set);
    for (int i = 0; i < MODE_COUNT; i++)
        if (MODES[i].selectable && !strcmp(MODES[i].name, mode_name)) mode = &MODES[i];
    CHECK(mode, "no mode %s\n  -> llmc/modes.h", mode_name);
    Trainer t = judge_fp32;
    t.mode = mode;
    if (*given.f.init_from) config_init_from(&set, &given, &t);
    flags_override(&set, &given, false);
    run_refuse(&set, &t);
    r->t = &t;
    r->f = &set.f;
    r->m = model_from_flags(&set.f, mode);
    r->init = init_from_flags(&set.f, mode);
    r->layout = layout_make(&r->m);
    r->unigram = NAN;
    r->gpt = r->t->create(&r->m, &(Setup){.B = B, .T = r->m.T, .batch = B});
    if (*given.f.init_from) run_read_weights(r, given.f.init_from);
    else {
        fill_weights(r->t, r->gpt, &r->layout, 11, sizeof(float));
        turn_alphas(r);
        write_checkpoint(r, out);
    }
    write_logits(r, out);
    r->t->destroy(r->gpt);
    layout_free(&r->layout);
}

int main(void) {
    char line[2048], out[1024], mode[64];
    int at;
    while (fgets(line, sizeof line, stdin)) {
        CHECK(sscanf(line, "%1023s %63s %n", out, mode, &at) == 2,
              "expected OUT MODE FLAGS, found %s", line);
        line[strcspn(line, "\n")] = 0;
        one(out, mode, line + at);
    }
    return 0;
}
