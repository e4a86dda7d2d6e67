// test_trainer.c: flags, schedule, sampler, log, and whole runs of the built trainer: repeatable,
// resumable, and loud when refused.
#include "test.h"
#include "../../llmc/run/checkpoint.h"
#include "../../llmc/run/spikes.h"
#include "../../llmc/run/log.h"
#include "../../llmc/run/presets.h"
#include "../../llmc/run/free_memory.h"
#include "../../llmc/run/run.h"
#include "../../llmc/run/schedule.h"
#include "../../llmc/run/tokenizer.h"
#include "files.h"
#include <sys/wait.h>

// ------------------------------------------------------------------------------------------- flags

static FlagSet parse(const char *text) {
    FlagSet s;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < FLAG_COUNT; i++) flag_set(&s, &FLAGS[i], FLAGS[i].def, BY_DEFAULT);
    flags_parse_text(&s, text, BY_USER);
    return s;
}
static void parse_refused(void *text) { parse(text); }
static void refused_with_ngpt(void *text) {
    FlagSet s = parse(text);
    Trainer t = {.device = "cpu", .precision = "fp32", .mode = &MODES[MODE_NGPT]};
    run_refuse(&s, &t);
}

void test_flags(void) {
    char word[FLAG_CAP];
    FlagSet s =
        parse("--lr=3e-4 --steps 12 --recompute --schedule wsd --bias on --prompt=a=b --show");
    EXPECT(s.f.lr == 3e-4 && s.f.steps == 12 && s.f.recompute == 1 &&
               !strcmp(flag_word(word, FLAGS[FLAG_schedule].choices, s.f.schedule), "wsd") &&
               s.f.bias == 1,
           "values of all kinds");
    EXPECT(!strcmp(s.f.prompt, "a=b") && s.f.show == SHOW_MODEL,
           "text keeps its '=', --show alone shows the model");
    EXPECT(s.by[FLAG_lr] == BY_USER && s.by[FLAG_width] == BY_DEFAULT, "who set it");
    static const char *const refused[][2] = {
        {"--learning-rate 1", "command line: unknown flag learning-rate"},
        {"--stepz 1", "did you mean --steps"},
        {"--lr", "needs a value"},
        {"--lr --steps 3", "needs a value"},
        {"--lr fast", "expected a number"},
        {"--lr nan", "expected a number"},
        {"--steps 1.5", "whole number"},
        {"--steps -1", "--steps=-1: expected a whole number from 0 to 1e+12"},
        {"--lr 1e3", "number from 0 to 10"},
        {"--steps 99999999999999999999", "whole number from 0 to 1e+12"},
        {"--schedule cosin", "expected cosine|wsd|linear|constant\n  -> did you mean cosine? "},
        {"--bias maybe", "expected off|on"},
        {"--lr 1 --lr=2", "given twice"},
        {"steps", "expected a flag"},
        {"--steps 0x", "expected a whole number"},
        {"--layers 0", "whole number from 1 to 4096"},
        {"--width 1048577", "whole number from 1 to 1048576"},
        {"--learning-rate 1", "-rate\n  -> ./train_gpt --help lists all"},
        {"--warm-up 1", "did you mean --warmup? "},
        {"--router sigmoit", "did you mean sigmoid? "},
        {"--decay 1", "mean --decay-part or --decay-gains or"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        EXPECT_REFUSAL(parse_refused, (void *)refused[i][0], refused[i][1]);
    EXPECT_REFUSAL(refused_with_ngpt, "--norm dyt",
                   "--norm dyt does not go with NORM_MODE=NGPT\n  -> --norm rms: nGPT scales");
    for (int i = 0; i < FLAG_COUNT; i++) {  // what is printed can be typed
        char buf[FLAG_CAP];
        FlagSet again = s;
        flag_set(&again, &FLAGS[i], flag_text(buf, &s.f, &FLAGS[i]), BY_USER);
        if (FLAGS[i].kind != TEXT)
            EXPECT(!memcmp(&again.f, &s.f, sizeof s.f), "flag %s does not read back what it prints",
                   FLAGS[i].field);
    }
    for (int i = 0; PRESETS[i].name; i++) {
        FlagSet preset = parse("");
        flags_parse_text(&preset, PRESETS[i].flags, BY_PRESET);
        EXPECT(preset.f.width % preset.f.heads == 0, "%s: heads divide the width", PRESETS[i].name);
        EXPECT(preset.f.save_every > 0, "%s: a long run is saved on its way", PRESETS[i].name);
    }
}

// ---------------------------------------------------------------------------------------- schedule

static void expect_lr(const char *flags, int64_t step, double expected) {
    FlagSet s = parse(flags);
    double lr = schedule_lr(&s.f, step);
    EXPECT(fabs(lr - expected) < 1e-12, "%s: rate %.15g at step %lld, expected %.15g", flags, lr,
           (long long)step, expected);
}

static double group_rate(const Flags *f, int group) {
    return schedule_optimizer(f, 1, 1).lr[group];
}

void test_schedule(void) {
    const char *cosine = "--lr 1 --steps 110 --warmup 10 --min-lr 0.1 --schedule cosine";
    expect_lr(cosine, 1, 0.1);
    expect_lr(cosine, 10, 1);
    expect_lr(cosine, 60, 0.55);
    expect_lr(cosine, 110, 0.1);
    expect_lr(cosine, 500, 0.1);
    expect_lr("--lr 1 --steps 110 --warmup 10 --min-lr 0.1 --schedule linear", 35, 0.775);
    expect_lr("--lr 1 --steps 110 --warmup 10 --min-lr 0 --schedule wsd --decay-part 0.2", 90, 1);
    expect_lr("--lr 1 --steps 110 --warmup 10 --min-lr 0 --schedule wsd --decay-part 0.2", 100,
              0.5);
    expect_lr("--lr 1 --steps 110 --warmup 10 --min-lr 0 --schedule wsd --decay-part 0.2", 110, 0);
    expect_lr("--lr 1 --steps 110 --warmup 10 --schedule wsd --decay-part 0", 110, 1);
    FlagSet end =
        parse("--lr 1 --steps 110 --warmup 10 --min-lr 0 --schedule wsd --decay-part 0.3");
    EXPECT(schedule_lr(&end.f, 110) >= 0, "rounding ends the schedule below zero, at %g",
           schedule_lr(&end.f, 110));
    expect_lr("--lr 0.5 --steps 110 --warmup 0 --schedule constant", 1, 0.5);
    expect_lr("--lr 1 --steps 50 --schedule-steps 110 --warmup 10 --min-lr 0.1", 60, 0.55);
    expect_lr("--lr 1 --steps 10 --warmup 10", 10, 1);
    FlagSet s = parse("--width 1024 --width-base 256");
    EXPECT(group_rate(&s.f, LR_HIDDEN) == 0.25 && group_rate(&s.f, LR_HEAD) == 0.25 &&
               group_rate(&s.f, LR_EMBEDDING) == 1 && group_rate(&s.f, LR_VECTOR) == 1,
           "width scaling, power 1");
    s = parse("--width 1024 --width-base 256 --width-power 0.5");
    EXPECT(group_rate(&s.f, LR_HIDDEN) == 0.5, "width scaling, power 1/2");
    s = parse("--weight-decay 0.3 --clip 2 --width 512 --width-base 256 --decay-gains one "
              "--decay-embeddings off --beta2 0.97");
    Optimizer o = schedule_optimizer(&s.f, 0.1, 5);
    EXPECT(o.clip == 2 && o.decay[DECAY_MATRIX] == 0.3 && o.decay[DECAY_EMBEDDING] == 0 &&
               o.decay[DECAY_GAIN] == 0.3 && o.gain_target == 1,
           "clipping and decay");
    EXPECT(o.lr[LR_HIDDEN] == 0.05 && o.lr[LR_HEAD] == 0.05 && o.lr[LR_EMBEDDING] == 0.1 &&
               o.lr[LR_VECTOR] == 0.1 && o.beta2 == 0.97 && o.step == 5,
           "rates");
    s = parse("--clip 0");
    o = schedule_optimizer(&s.f, 0.1, 1);
    EXPECT(o.clip == 0 && o.decay[DECAY_GAIN] == 0 && o.decay[DECAY_EMBEDDING] == 0.1,
           "--clip 0 is off; gains do not decay by default");
    EXPECT(o.muon_lr == 0.1 && o.momentum == 0.95 && o.muon_scale == MUON_MATCH_RMS_ADAMW,
           "Muon's rate is AdamW's by default");
    s = parse("--lr 0.4 --muon-lr 0.02 --muon-scale original --width 1024 --width-base 256");
    o = schedule_optimizer(&s.f, 0.1, 1);
    EXPECT(fabs(o.muon_lr - 0.005) < 1e-15 && o.muon_scale == MUON_ORIGINAL,
           "Muon's own rate follows the schedule, and not the width");
    s = parse("--lr 0 --muon-lr 0.02");
    EXPECT(schedule_optimizer(&s.f, 0, 1).muon_lr == 0, "a rate of 0 is 0");
    s = parse("--width 1024");
    EXPECT(group_rate(&s.f, LR_HIDDEN) == 1, "width scaling is off by default");
}

// ----------------------------------------------------------------------------------------- sampler

void test_sampler(void) {
    enum { V = 7, DRAWS = 40000 };
    double logits[V] = {1, 3, -2, 3, 0.5, 2, -50}, scratch[2 * V], sum = 0, at_limit;
    EXPECT(sample_token(logits, V, 0, 0, 0.99, scratch) == 1,
           "temperature 0 takes the first of the largest");
    for (int k = 0; k <= V; k++) {
        int count[V] = {0}, allowed = 0;
        for (int i = 0; i < DRAWS; i++)
            count[sample_token(logits, V, 0.7, k, (i + 0.5) / DRAWS, scratch)]++;
        double sorted[V] = {3, 3, 2, 1, 0.5, -2, -50};
        at_limit = k ? sorted[k - 1] : -INFINITY;
        sum = 0;
        for (int i = 0; i < V; i++)
            if (logits[i] >= at_limit) {
                sum += exp(logits[i] / 0.7);
                allowed++;
            }
        for (int i = 0; i < V; i++) {
            double expected = logits[i] >= at_limit ? exp(logits[i] / 0.7) / sum : 0;
            EXPECT(fabs((double)count[i] / DRAWS - expected) < 2.0 / DRAWS,
                   "top %d: token %d drawn %d times, expected %.1f", k, i, count[i],
                   expected * DRAWS);
        }
    }
}

// --------------------------------------------------------------------------------------------- log

// Number of lines of a log; every one must parse. The sum of the steps goes to *steps.
static int log_lines(const char *path, int64_t *steps) {
    size_t n;
    int lines = 0;
    char *text = file_read(path, INT64_MAX, &n), error[256];
    *steps = 0;
    EXPECT(text && n && text[n - 1] == '\n', "%s is there and whole", path);
    for (size_t at = 0; text && at < n; lines++) {
        size_t length = (size_t)((char *)memchr(text + at, '\n', n - at) - (text + at));
        Json *root = json_try_parse(text + at, length, error);
        EXPECT(root, "%s line %d: %s", path, lines + 1, error);
        if (root) { *steps += json_get_int(root, "step", path); json_free(root); }
        at += length + 1;
    }
    free(text);
    return lines;
}

void test_logger(void) {
    char path[256];
    int64_t steps;
    Log log;
    check_format(path, sizeof path, "%s/log.jsonl", test_dir("logger"));
    int folder = folder_open("build/test/logger");
    log_open(&log, folder, path, 0);
    for (int step = 1; step <= 4; step++) {
        log_begin(&log);
        log_int(&log, "step", step);
        double loss = step == 4 ? INFINITY : 0.1 * step;
        log_real(&log, step == 2 ? "val_loss" : "loss", step == 3 ? NAN : loss);
        log_text(&log, "text", "a \"quote\", a \\ and a \n line");
        log_end(&log);
    }
    dprintf(log.fd, "{\"step\": 5, \"lo");  // killed in the middle of a line
    log_close(&log);
    log_open(&log, folder, path, 4);
    EXPECT(log_lines(path, &steps) == 4 && steps == 10, "resume at 4 keeps the four whole lines");
    EXPECT(!log.validated && !log.tasked, "step 4 has no validation yet");
    dprintf(log.fd,
            "{\"step\": 4, \"tasks\": \"data/tasks\"}\n{\"step\": 3, \"task_results\": {}}\n");
    log_close(&log);
    log_open(&log, folder, path, 4);
    EXPECT(log_lines(path, &steps) == 6 && !log.tasked,
           "a flag and an earlier step's results are not step 4's");
    dprintf(log.fd, "{\"step\": 4, \"task_results\": {}}\n");
    log_close(&log);
    log_open(&log, folder, path, 4);
    EXPECT(log_lines(path, &steps) == 7 && !log.validated && log.tasked,
           "resume at 4 finds its tasks");
    log_close(&log);
    log_open(&log, folder, path, 3);
    EXPECT(log_lines(path, &steps) == 4 && log.tasked, "and at 3 the earlier ones");
    log_close(&log);
    log_open(&log, folder, path, 2);
    EXPECT(log_lines(path, &steps) == 2 && steps == 3 && log.validated,
           "resume at 2 keeps step 1 and the validation of step 2");
    log_close(&log);
    log_open(&log, folder, path, 0);
    dprintf(log.fd, "{\"step\": 1}\n");
    log_close(&log);
    EXPECT(log_lines(path, &steps) == 1, "a run that begins has an empty log");
    char text[32];
    EXPECT(!strcmp(log_duration(text, 3725.4), "1:02:05") &&
               !strcmp(log_duration(text, 61), "1:01"),
           "durations");
}

// The median of 1 .. 100 is 50.5 and the median distance from it 25, so one robust deviation is
// 1.4826 * 25.
void test_spikes(void) {
    SpikeWindow w = {.count = 0};
    for (int i = 0; i < SPIKE_ENOUGH - 1; i++) spike_add(&w, 1 + i % 100, false);
    EXPECT(spike_z(&w, 1e9) == 0 && spike_limit(&w, 10) == 0,
           "with %d values nothing is a spike yet", w.count);
    for (int i = SPIKE_ENOUGH - 1; i < 100; i++) spike_add(&w, 1 + i, false);
    double spread = 1.4826 * 25;
    EXPECT(fabs(spike_z(&w, 50.5 + 7 * spread) - 7) < 1e-12 &&
               fabs(spike_limit(&w, 7) - (50.5 + 7 * spread)) < 1e-9,
           "z of seven deviations is %.15g", spike_z(&w, 50.5 + 7 * spread));
    EXPECT(spike_z(&w, 0) < 0, "what is low is no spike");
    double before = spike_limit(&w, 10);
    spike_add(&w, 1e6, true);
    spike_add(&w, NAN, false);
    spike_add(&w, INFINITY, true);
    EXPECT(w.count == 100 && spike_limit(&w, 10) == before,
           "neither spikes nor what is not finite enter the window");
    spike_add(&w, 50, false);
    for (int i = 0; i < SPIKES_IN_A_ROW - 1; i++) spike_add(&w, 1e6, true);
    EXPECT(w.count == 101, "one short of a new level");
    spike_add(&w, 1e6, true);
    EXPECT(w.count == 1 && w.values[0] == 1e6 && spike_limit(&w, 10) == 0,
           "many spikes in a row are a new level, found %d values", w.count);
    for (int i = 0; i < 2 * SPIKE_WINDOW; i++) spike_add(&w, 3, false);
    EXPECT(w.count == SPIKE_WINDOW && fabs(spike_z(&w, 3.03) - 10) < 1e-9,
           "a constant window: the spread is a thousandth of the median, z %.15g",
           spike_z(&w, 3.03));
    for (int i = 0; i < SPIKE_WINDOW; i++) spike_add(&w, 5, false);
    EXPECT(w.count == SPIKE_WINDOW && fabs(spike_z(&w, 5.05) - 10) < 1e-9,
           "the oldest leave the window, z %.15g", spike_z(&w, 5.05));
}

// -------------------------------------------------------------------------------------- whole runs

#define PROGRAM "build/cpu-span-fp32/train_gpt"
#define MODEL " --layers 2 --width 32 --heads 2 --ffn 48 --seq 32 --batch 4 --sample 0 "
#define SHAPE MODEL "--warmup 4 --val-tokens 256 --val-every 5 "
#define TINY SHAPE "--steps 12 "
#define EXPERTS SHAPE "--experts 4 --experts-per-token 2 --shared-experts 1 --dense-layers 1 " \
    "--router sigmoid --balance-rate 0.01 --kv-rank 8 --rope-size 4 "
// The trainer with a fault on purpose; gradient norms of its small model vary little from step 60
// on.
#define FAULTY "build/faulty "
#define SPIKY MODEL "--warmup 4 --val-tokens 256 --val-every 0 --steps 100 --save-every 80 "
// A run of many steps in DIR/NAME that gets a signal once its log has three lines; the arguments
// are DIR, NAME, DIR, NAME.
#define LONG_RUN(signal) \
    PROGRAM SHAPE "--steps 100000 --schedule-steps 12 --save-every 0 --out %s/%s & p=$!; " \
    "for i in $(seq 400); do sleep 0.1; " \
    "[ $(cat %s/%s/log.jsonl 2> /dev/null | wc -l) -lt 3 ] || break; done; " \
    "kill -" signal " $p; wait $p"

// Runs a command, keeps what it printed on both streams; returns its exit status, 128 + n for
// signal n.
static char output[1 << 16];
static int run(const char *command, const char *arguments) {
    char line[1024];
    size_t have = 0;
    check_format(line, sizeof line, "%s%s 2>&1", command, arguments);
    FILE *f = popen(line, "r");
    CHECK(f, "cannot run %s", line);
    for (size_t got; have < sizeof output - 1 &&
                     (got = fread(output + have, 1, sizeof output - 1 - have, f)) > 0;)
        have += got;
    output[have] = 0;
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// The weight hash in the run's last line of output.
static const char *run_hash_of(char *hash) {
    const char *at = strstr(output, "\nweights ");
    EXPECT(at, "the run ends with its weight hash; it printed:\n%s", output);
    snprintf(hash, 17, "%s", at ? at + 9 : "");
    return hash;
}

static void expect_refused(const char *arguments, const char *words) {
    int status = run(PROGRAM, arguments);
    EXPECT(status == 1 && strstr(output, words) && strstr(output, "->"),
           "%s: status %d, expected a refusal with \"%s\", found:\n%s", arguments, status, words,
           output);
}

// Writes a run's checkpoint again with one value of one tensor a NaN: its checksums are right, its
// values are not.
static void hurt_tensor(const char *run_dir, int64_t step, const char *file, const char *name) {
    static const char *const FILES[] = {"model.safetensors", "optimizer.safetensors", "config.json",
                                        "state.json"};
    char dir[PATH_CAP], path[PATH_CAP];
    SafetensorsFile tensors[2];
    Checkpoint c;
    begin_checkpoint(&c, run_dir, step);
    checkpoint_path(dir, run_dir, step);
    for (int i = 0; i < 4; i++) {
        size_t n;
        check_format(path, sizeof path, "%s/%s", dir, FILES[i]);
        char *text = i < 2 ? NULL : file_read(path, INT64_MAX, &n);
        if (text) checkpoint_add_text(&c, FILES[i], text);
        free(text);
        if (i >= 2) continue;
        open_tensors(path, &tensors[i]);
        for (int k = 0; k < tensors[i].count; k++) {
            Tensor *t = &tensors[i].tensors[k];
            if (strcmp(FILES[i], file) || strcmp(t->name, name)) continue;
            float *values = (float *)check_alloc((size_t)tensor_bytes(t), "a test");
            memcpy(values, t->data, (size_t)tensor_bytes(t));
            values[3] = NAN;
            t->data = values;
        }
        checkpoint_add_tensors(&c, FILES[i], tensors[i].tensors, tensors[i].count);
    }
    checkpoint_commit(&c);
    close(c.run);
    for (int i = 0; i < 2; i++) safetensors_close(&tensors[i]);
}

// In a checkpoint's text file `from` becomes `to`; the manifest agrees.
static void forge(const char *checkpoint, const char *file, const char *from, const char *to) {
    char path[512], forged[1 << 14], sums[2][80];
    size_t n;
    check_format(path, sizeof path, "%s/%s", checkpoint, file);
    char *text = file_read(path, sizeof forged, &n), *at = text ? strstr(text, from) : NULL;
    CHECK(at, "no %s in %s", from, path);
    check_format(forged, sizeof forged, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    const char *both[] = {text, forged};
    for (int i = 0; i < 2; i++) {
        size_t bytes = strlen(both[i]);
        unsigned long long hash = hash_bytes(both[i], bytes);
        check_format(sums[i], sizeof sums[i], "{\"size\": %zu, \"xxh64\": \"%016llx\"}", bytes,
                     hash);
    }
    write_text(path, forged);
    free(text);
    if (strcmp(file, "manifest.json")) forge(checkpoint, "manifest.json", sums[0], sums[1]);
}

// Numbers of state.json that no run can have are refused, before anything is computed from them.
static void test_forged_states(void) {
    static const char *const numbers[][3] = {
        {"\"updates\": 12,", "\"updates\": 13,", "expected \"updates\" from 0 to 12, found 13"},
        {"\"tokens\": 1536,", "\"tokens\": 9223372036854775807,",
         "expected \"tokens\" from 0 to 1536"},
        {"\"bad\": 0,", "\"bad\": -1,", "expected \"bad\" from 0 to"},
        {"\"epoch\": 0,", "\"epoch\": 9223372036854775807,",
         "the data position, epoch 9223372036854775807"},
        {"\"row\": 0,", "\"row\": 4294967296,", "expected \"row\" from 0 to"},
        {"\"step\": 12,", "\"step\": 9000000000000000000,", "expected \"step\" from 0 to"}};
    char path[512], line[1024];
    const char *dir = test_dir("forged");
    check_format(line, sizeof line, TINY "--out %s/a", dir);
    EXPECT(run(PROGRAM, line) == 0, "a run: %s", output);
    for (int i = 0; i < 6; i++) {
        check_format(line, sizeof line, "rm -rf %s/b; cp -r %s/a %s/b", dir, dir, dir);
        EXPECT(run(line, "") == 0, "cp: %s", output);
        forge(check_format(path, sizeof path, "%s/b/step_00000012", dir), "state.json",
              numbers[i][0], numbers[i][1]);
        if (i == 5) {                                      // its folder agrees
            check_format(line, sizeof line, "%s/b/step_9000000000000000000", dir);
            EXPECT(rename(path, line) == 0, "cannot rename %s", path);
        }
        check_format(line, sizeof line, " --out %s/b --resume required --steps 13", dir);
        expect_refused(line, numbers[i][2]);
    }
}

// Steps that are left out count as steps and not as updates, in a run that is resumed too.
static void test_skipped_steps(void) {
    char path[512], line[1024], whole[17], resumed[17];
    const char *dir = test_dir("skipped");
    check_format(line, sizeof line, "FAULT='nan 5 0' " FAULTY TINY "--out %s/a", dir);
    EXPECT(run(line, "") == 0 && strstr(output, "step 5: not finite"), "NaN in step 5: %s", output);
    run_hash_of(whole);
    check_format(line, sizeof line, "FAULT='nan 5 0' " FAULTY SHAPE "--steps 7 --schedule-steps 12 "
                 "--out %s/b", dir);
    EXPECT(run(line, "") == 0, "the same up to step 7: %s", output);
    check_format(line, sizeof line, " --out %s/b --resume required --steps 12", dir);
    EXPECT(run(PROGRAM, line) == 0, "and resumed: %s", output);
    run_hash_of(resumed);
    EXPECT(!strcmp(whole, resumed), "resumed it has the weights %s, not %s", resumed, whole);

    check_format(path, sizeof path, "%s/b/step_00000012", dir);
    forge(path, "state.json", "\"sample\": 48", "\"sample\": 47");
    check_format(line, sizeof line, " --out %s/b --resume required --steps 13", dir);
    expect_refused(line, "the data position, epoch 0 and sample 47, is not that of step 12");

    check_format(line, sizeof line, "FAULT='nans 9 0' " FAULTY TINY "--save-every 3 --out %s/c",
                 dir);
    EXPECT(run(line, "") == 3 && strstr(output, "4 steps in a row"), "NaN to the end: %s", output);
    check_format(line, sizeof line, "FAULT='nans 1 0' " FAULTY "--out %s/c --resume required "
                 "--steps 40", dir);
    EXPECT(run(line, "") == 3, "NaN from the resumed step 9 on: %s", output);
    EXPECT(strstr(output, "10 steps in a row were not finite: the run diverged at step 18"),
           "the bad step before the checkpoint counts: %s", output);

    // A GPU begins the next step before it is known whether this one was applied.
    check_format(line, sizeof line, "LATE=1 FAULT='nan 5 0' " FAULTY TINY "--out %s/late", dir);
    EXPECT(run(line, "") == 0 && strstr(output, "step 5: not finite"), "late: %s", output);
    EXPECT(strstr(output, "8 outcomes were read late"), "not due in 8 of 12 steps: %s", output);
    run_hash_of(resumed);
    EXPECT(!strcmp(whole, resumed), "read late, the weights are %s, not %s", resumed, whole);
    check_format(line, sizeof line, "LATE=1 FAULT='nans 1 0' " FAULTY MODEL "--steps 40 "
                 "--warmup 4 --save-every 0 --val-every 0 --out %s/ends", dir);
    EXPECT(run(line, "") == 3 && strstr(output, "10 steps in a row were not finite: the run "
                                                "diverged at step 10"), "late: %s", output);

    check_format(line, sizeof line, "FAULT='router 5 0' " FAULTY TINY "--out %s/d", dir);
    EXPECT(run(line, "") == 0 && strstr(output, "step 5: not finite"), "the router: %s", output);

    // The data is one sample, so all batches are alike, and so is the first update in step 1 or 2.
    check_format(line, sizeof line, "head -c 40 README.md > %s/text && build/shard --out %s/data "
                 "--val-fraction 0 %s/text", dir, dir, dir);
    EXPECT(run(line, "") == 0, "a shard: %s", output);
    for (int i = 0; i < 2; i++) {
        check_format(line, sizeof line, "FAULT='nan %d 0' " FAULTY MODEL "--warmup 0 --steps %d "
                     "--schedule constant --data %s/data/*.bin --out %s/e%d",
                     1 + i, 2 - i, dir, dir, i);
        EXPECT(run(line, "") == 0, "one update in %d steps: %s", 2 - i, output);
        run_hash_of(i ? resumed : whole);
    }
    EXPECT(!strcmp(whole, resumed), "the first update in step 2: %s, in 1: %s", whole, resumed);
}

// A run with DyT: repeated with one thread, stopped and resumed, it ends with the same weights; it
// cannot go on with another norm.
static void test_dyt_run(void) {
    char line[1024], whole[17], other[17];
    const char *dir = test_dir("dyt");
    check_format(line, sizeof line, TINY "--norm dyt --out %s/a", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "DyT, no biases"), "a run: %s", output);
    run_hash_of(whole);
    check_format(line, sizeof line, TINY "--norm dyt --recompute --out %s/b", dir);
    EXPECT(run("OMP_NUM_THREADS=1 " PROGRAM, line) == 0, "one thread: %s", output);
    EXPECT(!strcmp(whole, run_hash_of(other)), "one thread, recomputing: %s, not %s", other, whole);
    check_format(line, sizeof line, SHAPE "--norm dyt --steps 7 --schedule-steps 12 --out %s/c",
                 dir);
    EXPECT(run(PROGRAM, line) == 0, "the same up to step 7: %s", output);
    check_format(line, sizeof line, " --out %s/c --resume required --steps 12 --norm layer", dir);
    expect_refused(line, "--norm dyt in this run and --norm layer on the command line; it may not");
    check_format(line, sizeof line, " --out %s/c --resume required --steps 12", dir);
    EXPECT(run(PROGRAM, line) == 0, "and resumed: %s", output);
    EXPECT(!strcmp(whole, run_hash_of(other)), "resumed: %s, not %s", other, whole);
    check_format(line, sizeof line, TINY "--norm dyt --dyt-alpha 0.8 --out %s/d", dir);
    EXPECT(run(PROGRAM, line) == 0, "alpha from 0.8 on: %s", output);
    EXPECT(strcmp(whole, run_hash_of(other)), "another alpha at the start, and the same weights");
}

void test_run(void) {
    test_skipped_steps();
    test_dyt_run();
    test_forged_states();
    char whole[17], again[17], resumed[17], other[17], line[1024], path[512];
    const char *dir = test_dir("run");
    int64_t steps;
    check_format(line, sizeof line, TINY "--out %s/a", dir);
    EXPECT(run(PROGRAM, line) == 0, "a small run: %s", output);
    run_hash_of(whole);
    check_format(path, sizeof path, "%s/a/log.jsonl", dir);
    EXPECT(log_lines(path, &steps) == 1 + 12 + 3 + 1,
           "the flags, 12 steps, validations at 5, 10, 12 and gradient norms at 1");
    check_format(line, sizeof line, TINY "--out %s/b", dir);
    run("OMP_NUM_THREADS=1 " PROGRAM, line);
    EXPECT(!strcmp(whole, run_hash_of(again)),
           "the same command gives the same weights, with one thread too");
    check_format(line, sizeof line, TINY "--seed 2 --out %s/c", dir);
    run(PROGRAM, line);
    EXPECT(strcmp(whole, run_hash_of(other)), "another seed gives other weights");
    check_format(line, sizeof line, TINY "--recompute --out %s/c2", dir);
    run(PROGRAM, line);
    EXPECT(!strcmp(whole, run_hash_of(other)), "--recompute changes no bit of the weights");

    char masked[17];
    check_format(line, sizeof line, TINY "--mask-documents --out %s/masked", dir);
    EXPECT(run(PROGRAM, line) == 0, "a run within documents: %s", output);
    EXPECT(strcmp(whole, run_hash_of(masked)), "--mask-documents changes the weights");
    check_format(line, sizeof line,
                 SHAPE "--mask-documents --steps 7 --schedule-steps 12 --out %s/masked2", dir);
    run(PROGRAM, line);
    check_format(line, sizeof line, " --out %s/masked2 --resume required --steps 12", dir);
    run(PROGRAM, line);
    EXPECT(!strcmp(masked, run_hash_of(resumed)), "it is resumed within documents: %s", output);

    // Stopped at 7 and resumed: first by --steps with the schedule's end kept, then by SIGKILL at
    // odd moments.
    check_format(line, sizeof line, SHAPE "--steps 7 --schedule-steps 12 --out %s/d --save-every 3",
                 dir);
    EXPECT(run(PROGRAM, line) == 0, "stop at 7: %s", output);
    check_format(line, sizeof line, " --out %s/d --resume required --steps 12", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "at step 7") &&
               !strstr(output, "the schedule now ends"),
           "resume at 7: %s", output);
    EXPECT(!strcmp(whole, run_hash_of(resumed)),
           "a run stopped and resumed ends with the same weights");
    check_format(path, sizeof path, "%s/d/log.jsonl", dir);
    EXPECT(log_lines(path, &steps) == 2 + 12 + 4 + 1,
           "its log has the flags twice, every step once, and the validation at 7 too");
    for (int i = 0; i < 6; i++) {
        check_format(line, sizeof line,
                     "timeout -s KILL 0.%d%d " PROGRAM TINY
                     "--out %s/e --resume auto --save-every 1",
                     1 + i / 2, i % 2 * 5, dir);
        run(line, "");
    }
    check_format(line, sizeof line, TINY "--out %s/e --resume auto --save-every 1", dir);
    EXPECT(run(PROGRAM, line) == 0, "the run killed six times ends: %s", output);
    EXPECT(!strcmp(whole, run_hash_of(resumed)),
           "a run killed at any moment and resumed ends with the same weights");
    check_format(path, sizeof path, "%s/e/log.jsonl", dir);
    log_lines(path, &steps);

    // Told to stop, by Ctrl-C or SIGTERM: the current step is saved, and the run goes on from
    // there.
    check_format(line, sizeof line, LONG_RUN("TERM"), dir, "i", dir, "i");
    EXPECT(run(line, "") == 143 && strstr(output, "stopped at step"), "interrupted: %s", output);
    check_format(line, sizeof line, "ls -d %s/i/step_*", dir);
    EXPECT(run(line, "") == 0, "an interrupted run has a checkpoint: %s", output);
    check_format(line, sizeof line, " --out %s/i --resume required --steps 1", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "nothing to train"),
           "a run beyond its --steps says so: %s", output);

    // Killed before its first checkpoint: --resume auto begins again with the run's own flags, and
    // refuses others.
    check_format(line, sizeof line, LONG_RUN("KILL"), dir, "k", dir, "k");
    run(line, "");
    check_format(line, sizeof line, " --out %s/k --resume auto --width 64", dir);
    expect_refused(line, "--width 32 in this run and --width 64 on the command line");
    check_format(line, sizeof line, " --out %s/k --resume required", dir);
    expect_refused(line, "holds no checkpoint to resume from");
    check_format(line, sizeof line, " --out %s/k --resume auto --steps 12", dir);
    EXPECT(run(PROGRAM, line) == 0 && !strcmp(whole, run_hash_of(resumed)),
           "a run killed before its first checkpoint begins again as it was: %s", output);
    check_format(line, sizeof line, "rm %s/k/config.json", dir);
    run(line, "");
    check_format(line, sizeof line, " --out %s/k", dir);
    expect_refused(line, "nothing was overwritten");

    // A finished run allows some commands and refuses others.
    check_format(line, sizeof line, " --out %s/a", dir);
    expect_refused(line, "already holds a run; nothing was overwritten");
    check_format(line, sizeof line, " --out %s/a/step_00000012 --resume auto", dir);
    expect_refused(line, "is a checkpoint of the run");
    check_format(line, sizeof line, " --out %s/a --resume required --lr 5", dir);
    expect_refused(line, "--lr 0.0025 in this run and --lr 5 on the command line");
    check_format(line, sizeof line, " --out %s/none --resume required", dir);
    expect_refused(line, "holds no checkpoint to resume from");
    check_format(line, sizeof line, " --from %s/a --eval --heads 1", dir);
    expect_refused(line, "--heads 2 in this run and --heads 1 on the command line");
    check_format(line, sizeof line, " --from %s/e --eval", dir);
    EXPECT(run(PROGRAM, line) == 0, "a run that was resumed can be read: %s", output);
    check_format(line, sizeof line, "sed -i '/xxh64/d; s/^  },/  }/; s/version\": 2/version\": 1/; "
        "s/\"layers\"/\"layerz\"/' %s/c/config.json", dir);
    run(line, "");
    check_format(line, sizeof line, " --out %s/c --resume auto", dir);
    expect_refused(line, "config.json: unknown flag layerz\n  -> did you mean --layers? "
                   "./train_gpt --help lists all flags; a run needs the version of norm.c that "
                   "wrote it");
    check_format(line, sizeof line,
                 "build/shard --out %s/one Makefile && build/shard --out %s/two README.md", dir,
                 dir);
    run(line, "");
    check_format(line, sizeof line, SHAPE "--steps 3 --data %s/one --out %s/m", dir, dir);
    run(PROGRAM, line);
    check_format(line, sizeof line, "cp %s/two/* %s/one/", dir, dir);
    run(line, "");
    check_format(line, sizeof line, " --out %s/m --resume required --steps 6", dir);
    expect_refused(line, "the training data is not what this run was trained on");
    check_format(line, sizeof line, " --from %s/a --eval --val-tokens 0", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "validation loss") && strstr(output, whole),
           "--eval: %s", output);
    check_format(line, sizeof line, " --from %s/a --sample 40 --prompt 'Once upon'", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "Once upon"), "--sample: %s", output);
    check_format(line, sizeof line, MODEL "--steps 0 --init-from %s/a --out %s/f", dir, dir);
    EXPECT(run(PROGRAM, line) == 0 && !strcmp(whole, run_hash_of(other)),
           "--init-from starts from the weights: %s", output);
    check_format(line, sizeof line,
                 " --layers 3 --width 32 --heads 2 --ffn 48 --seq 32 --batch 4 --steps 0 "
                 "--init-from %s/a --out %s/g",
                 dir, dir);
    expect_refused(line, "/a and --layers 3 on the command line; it may not change");

    check_format(line, sizeof line, " --out %s/a --resume auto --steps 14", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "ends at step 14, not at 12"),
           "another end of the schedule is said: %s", output);

    // Checkpoints that stay of six: the newest two, and those of every fourth step.
    check_format(line, sizeof line,
                 TINY "--save-every 2 --keep-last 2 --keep-every 4 --out %s/kept", dir);
    EXPECT(run(PROGRAM, line) == 0 && !strcmp(whole, run_hash_of(again)),
           "a run that keeps few checkpoints: %s", output);
    check_format(line, sizeof line, "ls -A %s/kept | tr '\\n' ' '", dir);
    EXPECT(run(line, "") == 0 &&
               !strcmp(output, "config.json log.jsonl step_00000004 step_00000008 "
                               "step_00000010 step_00000012 "),
           "found %s", output);

    // A spike: said, logged with its samples, skipped only on demand. The windows are part of a
    // checkpoint.
    check_format(line, sizeof line, "FAULT='spike 90 0' " FAULTY SPIKY "--out %s/s1", dir);
    EXPECT(run(line, "") == 0 && strstr(output, "step 90: a spike of the gradient norm") &&
               strstr(output, "samples 356 to 359; the update was applied"),
           "a spike: %s", output);
    check_format(line, sizeof line,
                 "grep -q '\"step\": 90, .*\"event\": \"a spike.*\"first_sample\": 356, "
                 "\"samples\": 4, \"loss_z\": .*\"grad_norm_z\"' %s/s1/log.jsonl "
                 "&& ! grep -q skipped %s/s1/log.jsonl",
                 dir, dir);
    EXPECT(run(line, "") == 0, "the log says so");
    check_format(line, sizeof line, "FAULT='spike 90 0' " FAULTY SPIKY "--skip-spikes --out %s/s2",
                 dir);
    EXPECT(run(line, "") == 0 && strstr(output, "the weights stay as they are"),
           "a spike left out: %s", output);
    run_hash_of(other);
    check_format(line, sizeof line,
                 "grep -q '\"step\": 90, .*\"skipped\": \"a spike' %s/s2/log.jsonl", dir);
    EXPECT(run(line, "") == 0, "the log says that it was skipped");
    check_format(line, sizeof line,
                 "rm -r %s/s2/step_00000100; FAULT='spike 10 0' " FAULTY
                 "--out %s/s2 --resume required",
                 dir, dir);
    EXPECT(run(line, "") == 0 && strstr(output, "resumed from") &&
               strstr(output, "step 90: a spike") && !strcmp(other, run_hash_of(again)),
           "and resumed before it, with the windows: %s", output);

    // Divergence: the weights stay finite and are saved, the run ends with its own status and says
    // what to do. Checkpoints before it stay, and the same weights are not saved again.
    static const char *const diverging[][2] = {
        {"--save-every 0", "step_00000015 "},
        {"--save-every 5 --keep-last 1", "step_00000005 step_00000010 "}};
    for (int i = 0; i < 2; i++) {
        check_format(line, sizeof line,
                     "FAULT='nans 6 0' " FAULTY MODEL
                     "--warmup 4 --val-every 0 --val-tokens 256 --steps 100 %s --out %s/n%d",
                     diverging[i][0], dir, i);
        EXPECT(run(line, "") == 3 && strstr(output, "its last finite weights are in"),
               "never finite from step 6 on: %s", output);
        check_format(line, sizeof line, "ls %s/n%d | grep step | tr '\\n' ' '", dir, i);
        EXPECT(run(line, "") == 0 && !strcmp(output, diverging[i][1]),
               "what is saved of it, expected %s: %s", diverging[i][1], output);
    }
    // Moments that are not finite are never saved, and refused when they are read; weights that
    // predict nothing take no checkpoint's place.
    check_format(line, sizeof line,
                 "FAULT='moment 8 0' " FAULTY MODEL
                 "--warmup 4 --val-every 0 --val-tokens 256 --steps 20 --save-every 5 --out %s/nm",
                 dir);
    EXPECT(run(line, "") == 3 &&
               strstr(output, "were not saved: the run diverged at step 10; "
                              "its last finite weights are in") &&
               strstr(output, "nm/step_00000005\n"),
           "an infinite moment: %s", output);
    check_format(line, sizeof line, "ls -A %s/nm | grep step | tr '\\n' ' '", dir);
    EXPECT(run(line, "") == 0 && !strcmp(output, "step_00000005 "), "found %s", output);
    check_format(line, sizeof line,
                 "FAULT='dead 10 0' " FAULTY MODEL
                 "--warmup 4 --val-every 0 --val-tokens 256 --steps 100 --save-every 5 --keep-last "
                 "1 --out %s/nd",
                 dir);
    EXPECT(run(line, "") == 3 && strstr(output, "its last finite weights are in"),
           "dead weights: %s", output);
    check_format(line, sizeof line, "ls -A %s/nd | grep step | tr '\\n' ' '", dir);
    EXPECT(run(line, "") == 0 && !strcmp(output, "step_00000005 step_00000010 step_00000015 "),
           "found %s", output);
    static const char *const hurt[][2] = {
        {"model.safetensors", "model.embed_tokens.weight"},
        {"optimizer.safetensors", "exp_avg_sq.model.embed_tokens.weight"}};
    for (int i = 0; i < 2; i++) {
        check_format(line, sizeof line, "rm -rf %s/bad; cp -r %s/n0 %s/bad", dir, dir, dir);
        EXPECT(run(line, "") == 0, "cp: %s", output);
        hurt_tensor(check_format(path, sizeof path, "%s/bad", dir), 15, hurt[i][0], hurt[i][1]);
        check_format(line, sizeof line, " --out %s/bad --resume required --steps 20", dir);
        expect_refused(line, check_format(path, sizeof path, "1 values of %s are infinite or NaN",
                                          hurt[i][1]));
        if (i) continue;
        check_format(line, sizeof line,
                     " --layers 2 --width 32 --heads 2 --ffn 48 --seq 32 --batch 4 --steps 0 "
                     "--init-from %s/bad --out %s/g2",
                     dir, dir);
        expect_refused(line, "1 values of model.embed_tokens.weight are infinite or NaN");
    }
    check_format(line, sizeof line, " --out %s/n0 --resume required --steps 20", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "at step 15"),
           "where later steps are finite it goes on: %s", output);
    check_format(line, sizeof line,
                 MODEL "--steps 400 --warmup 0 --val-every 0 --lr 10 --weight-decay 10 --clip 0 "
                       "--beta2 0 --beta1 0 --save-every 1 --out %s/h",
                 dir);
    int status = run(PROGRAM, line);
    EXPECT(status == 3 && strstr(output, "diverged"), "a diverging run: status %d, %s", status,
           output + (strlen(output) > 600 ? strlen(output) - 600 : 0));
    check_format(path, sizeof path, "%s/h/log.jsonl", dir);
    log_lines(path, &steps);
    SafetensorsFile file;
    check_format(path, sizeof path, "%s/h", dir);
    int64_t last = checkpoint_step_below(path, INT64_MAX);
    open_tensors(check_format(path, sizeof path, "%s/h/step_%08lld/model.safetensors", dir,
                                  (long long)last),
                     &file);
    float sum = 0;  // of a few that are not finite it is not either
    for (int64_t i = 0; i < 32 * 256; i++)
        sum += 0 * ((const float *)safetensors_find(&file, "model.embed_tokens.weight")->data)[i];
    EXPECT(sum == 0, "after steps that were not finite the weights are not finite at step %d",
           (int)last);
    safetensors_close(&file);

    // Experts, whose selection bias is part of the model: the same bits with one thread, with
    // recompute, and in a run stopped and resumed.
    check_format(line, sizeof line, EXPERTS "--steps 9 --out %s/x", dir);
    EXPECT(run(PROGRAM, line) == 0, "a run with experts: %s", output);
    run_hash_of(other);
    check_format(path, sizeof path,
                 "grep -q '\"router_loss\": 0.0' %s/x/log.jsonl && "
                 "grep -q '\"router_max_load\": .null, [1-9].*\"router_load\": {\"1\": "
                 ".[0-9.]*, [0-9.]*, [0-9.]*, [0-9.]*.' %s/x/log.jsonl",
                 dir, dir);
    EXPECT(run(path, "") == 0, "the log has the router's losses and loads");
    check_format(line, sizeof line, EXPERTS "--steps 9 --recompute --out %s/x1", dir);
    EXPECT(run("OMP_NUM_THREADS=1 " PROGRAM, line) == 0 && !strcmp(other, run_hash_of(again)),
           "experts, with one thread and --recompute: %s", output);
    check_format(line, sizeof line,
                 EXPERTS "--steps 4 --schedule-steps 9 --recompute cheap --out %s/x2", dir);
    run(PROGRAM, line);
    check_format(line, sizeof line, " --out %s/x2 --resume required --steps 9", dir);
    EXPECT(run(PROGRAM, line) == 0 && !strcmp(other, run_hash_of(again)),
           "experts, stopped at 4 and resumed: %s", output);
    check_format(line, sizeof line, " --from %s/x --sample 20", dir);
    EXPECT(run(PROGRAM, line) == 0, "experts, a sample: %s", output);

    // Killed between a checkpoint and its validation: the resumed run makes up for it.
    check_format(line, sizeof line,
                 SHAPE "--steps 10 --schedule-steps 12 --save-every 5 --out %s/v", dir);
    run(PROGRAM, line);
    check_format(line, sizeof line, "sed -i '$d' %s/v/log.jsonl", dir);
    run(line, "");
    check_format(line, sizeof line, " --out %s/v --resume auto --steps 12", dir);
    EXPECT(run(PROGRAM, line) == 0 && !strcmp(whole, run_hash_of(resumed)), "resume at 10: %s",
           output);
    check_format(line, sizeof line,
                 "test $(grep -c '^{\"step\": 10, \"val_loss\"' %s/v/log.jsonl) = 1", dir);
    EXPECT(run(line, "") == 0, "the validation at 10 is there once");
}

// A shard of " theing theing...", as its header names the vocabulary (0: it does not).
static void write_shard(const Tokenizer *t, const char *dir, const char *name, int vocab) {
    enum { REPEATS = 600 };
    int32_t head[256] = {20240520, 1, 2 * REPEATS, vocab}, pair[15];
    char path[512];
    uint16_t tokens[2 * REPEATS];
    EXPECT(tokenizer_encode(t, " theing", 7, pair) == 2, "two tokens");
    for (int i = 0; i < 2 * REPEATS; i++) tokens[i] = (uint16_t)pair[i % 2];
    FILE *f = fopen(check_format(path, sizeof path, "%s/%s", dir, name), "wb");
    CHECK(f && fwrite(head, 1, sizeof head, f) == sizeof head &&
              fwrite(tokens, 1, sizeof tokens, f) == sizeof tokens && fclose(f) == 0,
          "cannot write %s", path);
}

// Data with a tokenizer beside it: the model takes its vocabulary, and prompts and samples are
// text. A prompt fed as bytes, which this model has never seen, would not be continued.
// A sample is what whole forwards give, for every token, and of a text longer than the window: 10
// tokens of the prompt and 22 more, then 16 again and 16 more, ...
void test_run_sample(void) {
    char line[1024], whole[sizeof output];
    const char *dir = test_dir("sample");
    check_format(line, sizeof line,
                 MODEL "--warmup 4 --val-every 0 --val-tokens 32 --steps 12 --out %s/a", dir);
    EXPECT(run(PROGRAM, line) == 0, "a small run: %s", output);
    check_format(line, sizeof line, " --from %s/a --sample 100 --prompt 'Once upon'", dir);
    EXPECT(run("FAULT='full 0 0' " FAULTY, line) == 0, "whole forwards: %s", output);
    char *end = strstr(output, "\nprefill ");
    check_format(whole, sizeof whole, "%.*s", end ? (int)(end - output) : 0, output);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "\nprefill 90 tokens at ") &&
               strstr(output, " tok/s, decode 94 at "),
           "tokens that were read: %s", output);
    EXPECT(*whole && !strncmp(output, whole, strlen(whole)) && strstr(whole, "Once upon"),
           "the sample\n%s\nis not that of whole forwards,\n%s", output, whole);
    check_format(line, sizeof line,
                 MODEL "--positions learned --warmup 4 --val-every 0 --val-tokens 32 --steps 3 "
                       "--out %s/p && " PROGRAM " --from %s/p --sample 20 --seq 8",
                 dir, dir);
    EXPECT(run(PROGRAM, line) == 0, "the first of learned positions: %s", output);
    check_format(line, sizeof line, " --from %s/p --sample 20 --seq 64", dir);
    EXPECT(run(PROGRAM, line) == 1 && strstr(output, "or a smaller --seq"),
           "more of them than there are: %s", output);
    check_format(line, sizeof line, " --from %s/a --sample 1 --seq 1", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "\nprefill 1 tokens at ") &&
               !strstr(output, "decode"),
           "a single token: %s", output);
    check_format(line, sizeof line, " --from %s/a --sample 5 --seq 1", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "\nprefill 5 tokens at ") &&
               !strstr(output, "decode"),
           "a window of one token: %s", output);
    EXPECT(run(PROGRAM, " --model gpt2-124M --vocab 50257 --show") == 0 &&
               strstr(output, "sampling: 72.0 MiB more, the KV cache of 1024 tokens"),
           "--show says what a sample takes: %s", output);
}

void test_run_tokens(void) {
    const char *dir = test_dir("tokens");
    char line[1024], path[512], error[ERROR_CAP];
    Tokenizer t;
    check_format(line, sizeof line, "mkdir %s/data %s/silent", dir, dir);
    run(line, "");
    test_write_tokenizer(check_format(path, sizeof path, "%s/data/tokenizer.bin", dir));
    EXPECT(tokenizer_open(path, &t, error), "%s: %s", path, error);
    int vocab = t.count;
    check_format(path, sizeof path, "%s/data", dir);
    write_shard(&t, path, "a_train.bin", vocab);
    write_shard(&t, path, "a_val.bin", vocab);
    check_format(path, sizeof path, "%s/silent", dir);
    write_shard(&t, path, "a_train.bin", 0);
    write_shard(&t, path, "a_val.bin", 0);
    tokenizer_close(&t);

    check_format(line, sizeof line,
                 MODEL "--steps 30 --warmup 0 --lr 1e-2 --temperature 0 --sample 4 --prompt 'ing "
                       "the' --data %s/data --out %s/a",
                 dir, dir);
    char shape[64], *at = strstr(line, "--sample 0 ");
    memset(at, ' ', strlen("--sample 0"));
    check_format(shape, sizeof shape, "vocabulary %d (padded %d)", vocab,
                 CEIL_DIV(vocab, 128) * 128);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, shape), "the vocabulary is the data's: %s",
           output);
    EXPECT(strstr(output, "\n\ning theing theing the\n"), "the prompt is continued: %s", output);
    check_format(line, sizeof line,
                 MODEL "--steps 3 --warmup 0 --data %s/data --tokenizer %s/data/tokenizer.bin "
                       "--out %s/told",
                 dir, dir, dir);
    EXPECT(run(PROGRAM, line) == 0, "a tokenizer by name: %s", output);
    check_format(line, sizeof line, "mv %s/data %s/elsewhere", dir, dir);
    run(line, "");
    check_format(line, sizeof line,
                 " --from %s/a --temperature 0 --sample 3 --prompt ' theing the'", dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "\n\n theing theing theing\n"),
           "the run has the tokenizer, when its data is gone: %s", output);
    check_format(line, sizeof line, " --from %s/told --sample 1 --prompt ' the'", dir);
    EXPECT(run(PROGRAM, line) == 0, "also one that was told where it is: %s", output);
    check_format(line, sizeof line,
                 " --from %s/a/step_00000030 --temperature 0 --sample 1 --prompt ' theing the'",
                 dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "\n\n theing theing\n"),
           "and so does its checkpoint: %s", output);
    check_format(line, sizeof line,
                 MODEL "--steps 1 --init-from %s/a/step_00000030 --data %s/silent --vocab %d "
                       "--out %s/f", dir, dir, vocab, dir);
    EXPECT(run(PROGRAM, line) == 0, "a run from a checkpoint: %s", output);
    check_format(line, sizeof line, "test -f %s/f/tokenizer.bin", dir);
    EXPECT(run(line, "") == 0, "has no tokenizer");
    check_format(line, sizeof line,
                 " --from %s/a --sample 2 --prompt ' the' --tokenizer %s/a/config.json", dir, dir);
    expect_refused(line, "expected a tokenizer");
    check_format(line, sizeof line, MODEL "--steps 1 --data %s/silent --out %s/b", dir, dir);
    expect_refused(line, "does not say its vocabulary");
    check_format(line, sizeof line,
                 MODEL "--steps 3 --warmup 0 --sample 1 --prompt 'a\xCD\x80' --data %s/elsewhere "
                       "--out %s/d", dir, dir);
    memset(strstr(line, "--sample 0 "), ' ', strlen("--sample 0"));
    expect_refused(line, "replace the character at offset 1");
    EXPECT(!strstr(output, "step "), "a prompt is refused after training: %s", output);
    check_format(line, sizeof line, MODEL "--steps 1 --data %s/silent --vocab %d --out %s/b", dir,
                 vocab, dir);
    EXPECT(run(PROGRAM, line) == 0 && strstr(output, "does not say its vocabulary: tokens of"),
           "and it can be named: %s", output);
    check_format(line, sizeof line,
                 MODEL "--steps 1 --data %s/elsewhere --val-data %s/bytes --out %s/c", dir, dir,
                 dir);
    char masked[1200];
    check_format(masked, sizeof masked,
                 MODEL "--steps 1 --mask-documents --data %s/silent --vocab %d --out %s/e", dir,
                 vocab, dir);
    expect_refused(masked, "expected the tokenizer of this data, which names the token that");
    check_format(masked, sizeof masked,
                 MODEL "--steps 3 --mask-documents --positions learned --restart-positions "
                       "--data %s/elsewhere --out %s/e", dir, dir);
    EXPECT(run(PROGRAM, masked) == 0, "documents of a tokenizer: %s", output);
    char shards[600];
    check_format(shards, sizeof shards, "build/shard --out %s/bytes README.md", dir);
    run(shards, "");
    expect_refused(line, "validation data one of 256");
    check_format(line, sizeof line, MODEL "--steps 1 --vocab %d --out %s/c", vocab - 1, dir);
    run(PROGRAM, line);
    check_format(line, sizeof line, " --from %s/c --sample 1 --tokenizer %s/a/tokenizer.bin", dir,
                 dir);
    expect_refused(line, "tokens, the model a vocabulary of");
}

// ---------------------------------------------------------------------------- the command line

static int shell(const char *fmt, const char *a, const char *b) {
    char line[1024];
    return run(check_format(line, sizeof line, fmt, a, b), "");
}

// Free memory on machines made of files: /proc/meminfo, and a control group with one above it.
void test_room(void) {
    const char *dir = test_dir("room");
    shell("mkdir -p %s/proc/self && echo 'MemAvailable:  4000 kB' > %s/proc/meminfo", dir, dir);
    EXPECT(free_memory(dir, 1) == 4000 * 1024.0, "what is available: %g", free_memory(dir, 1));
    shell("cd %s && mkdir -p sys/fs/cgroup/a/b && printf '3:cpu:/\\n0::/a/b\\n' > proc/self/cgroup "
        "&& cd sys/fs/cgroup/a && "
          "echo max > b/memory.max && echo 1000 > b/memory.current && echo 9000 > memory.max && "
              "echo 4000 > memory.current && "
          "printf 'anon 3000\\ninactive_file 500\\n' > memory.stat%s", dir, "");
    EXPECT(free_memory(dir, 1) == 5500, "limits of the groups above: %g", free_memory(dir, 1));
    shell("cd %s && mkdir -p sys/fs/cgroup/memory/c && printf '4:memory:/c\\n0::/\\n' > "
        "proc/self/cgroup && cd sys/fs/cgroup/memory/c && "
          "echo 8000 > memory.limit_in_bytes && echo 7000 > memory.usage_in_bytes%s", dir, "");
    EXPECT(free_memory(dir, 1) == 1000, "cgroups v1: %g", free_memory(dir, 1));
    EXPECT(free_memory(dir, 4) == 250, "shared by four processes: %g", free_memory(dir, 4));
    shell("echo 7800 > %s/sys/fs/cgroup/memory/c/memory.usage_in_bytes && echo 9000 > "
        "%s/sys/fs/cgroup/memory/c/memory.usage_in_bytes", dir, dir);
    EXPECT(free_memory(dir, 2) == 0, "more in use than the limit: %g", free_memory(dir, 1));
    shell("rm %s/proc/meminfo %s/proc/self/cgroup", dir, dir);
    EXPECT(isnan(free_memory(dir, 1)), "nothing is known: %g", free_memory(dir, 1));
}

// A large batch in 400 MB of addresses, on a machine with much more memory.
#define LARGE " --layers 1 --width 32 --heads 2 --seq 64 --batch 2048 --warmup 0 " \
    "--schedule-steps 2 --sample 0 " \
    "--val-tokens 64 --val-every 0 "
#define LIMITED "ulimit -v 400000 && OMP_NUM_THREADS=1 " PROGRAM LARGE

void test_micro_batch(void) {
    char hash[17], again[17];
    const char *dir = test_dir("micro");
    EXPECT(shell(LIMITED "--steps 1 --out %s/a%s", dir, "") == 0 && strstr(output,
           "micro-batches of 512 sequences, as many as fit into 0.3"),
           "a batch larger than memory is taken in parts: %s", output);
    EXPECT(shell("grep '\"micro_batch\": \"512\"' %s/a/config.json && "
           PROGRAM " --out %s/a --resume required --steps 2", dir, dir) == 0 && !strstr(output,
           "micro-batches of"), "the number is the run's: %s", output);
    run_hash_of(hash);
    EXPECT(shell("grep '\"micro_batch\": \"512\"' %s/a/config.json%s", dir, "") == 0,
           "where there is more memory it stays: %s", output);
    EXPECT(shell(LIMITED "--steps 2 --out %s/b%s", dir, "") == 0 && !strcmp(hash,
           run_hash_of(again)), "unbroken, the same bits: %s", output);
    EXPECT(shell(PROGRAM " --out %s/a --resume required --steps 3 --micro-batch 0 && grep "
           "'\"micro_batch\": \"2048\"' %s/a/config.json", dir, dir) == 0,
           "--micro-batch 0 chooses again: %s", output);
    EXPECT(shell("ulimit -v 400000 && OMP_NUM_THREADS=1 " PROGRAM " --from %s/a --eval%s", dir,
           "") == 0 && strstr(output, "micro-batches of 1024 sequences"),
           "what is only read needs not keep it: %s", output);
    // A number that was given, and a batch that a loss is defined over, are not changed.
    EXPECT(shell(LIMITED "--steps 1 --micro-batch 2048 --out %s/c%s", dir, "") == 1
           && strstr(output, "no memory: this takes 0.") && strstr(output,
           "-> --micro-batch 512\n"), "too many by hand: %s", output);
    EXPECT(shell(LIMITED "--steps 1 --experts 4 --out %s/c%s", dir, "") == 1 && strstr(output,
           "no memory: this takes ") && strstr(output, "-> --micro-batch "), "a balance loss: %s",
           output);
    EXPECT(shell(LIMITED "--steps 0 --experts 4 --balance-loss 0 --out %s/d%s", dir, "") == 0
           && strstr(output, "micro-batches of "), "none: %s", output);
    EXPECT(shell(LIMITED "--show | tail -n 1%s%s", "", "") == 0 && strstr(output, "  CPU: 0.")
           && strstr(output, "what fits: --micro-batch 512\n"), "--show: %s", output);
    // It is the batch if everything fits.
    EXPECT(shell(PROGRAM TINY "--out %s/e && grep '\"micro_batch\": \"4\"' %s/e/config.json", dir,
           dir) == 0 && !strstr(output, "micro-batches of"), "a small run: %s", output);
}

void test_command(void) {
    const char *dir = test_dir("command");
    char hash[17], again[17];
    EXPECT(run(PROGRAM, " --help lr") == 0 && !strncmp(output, "  --lr  ", 8) && strchr(output,
           '\n')[1] == 0, "--help lr: %s", output);
    EXPECT(run(PROGRAM, " --lr 1 --help --lr") == 0 && !strncmp(output, "  --lr  ", 8),
           "--help --lr: %s", output);
    EXPECT(run(PROGRAM, " --help") == 0 && strstr(output, "\n  --model ") && strstr(output,
           "\n  --show "), "--help: %s", output);
    expect_refused(" --help lrr", "did you mean --lr? ");
    EXPECT(run(PROGRAM, " --version") == 0 && !strncmp(output,
           "norm.c, SPAN, fp32 on the cpu, git ", 35) && strchr(output, '\n')[1] == 0,
           "--version: %s", output);
    expect_refused(" --model gpt2", "did you mean gpt2-124M or gpt2-350M or");
    expect_refused(" --model lama-char", "did you mean llama-char? ");
    expect_refused(" --model gpt5", "gpt5\n  -> ./train_gpt --show models lists them");

    // --config: a run's flags, and what stands beside it wins.
    EXPECT(shell(PROGRAM TINY "--lr 0.002 --out %s/a%s", dir, "") == 0, "a run: %s", output);
    run_hash_of(hash);
    EXPECT(shell(PROGRAM " --config %s/a/config.json --out %s/b", dir, dir) == 0
           && !strcmp(hash, run_hash_of(again)), "its flags again: %s", output);
    EXPECT(shell(PROGRAM " --lr 0.003 --config %s/a/config.json --out %s/c", dir, dir) == 0
           && strcmp(hash, run_hash_of(again)), "and another rate: %s", output);
    shell("diff %s/a/config.json %s/c/config.json", dir, dir);
    EXPECT(strstr(output, "< ") && strstr(output, "\"lr\": \"0.003\"") && strstr(output,
           "\"lr\": \"0.002\"") && !strstr(output, "seq"), "they differ in the rate: %s", output);
    EXPECT(shell(PROGRAM " --config %s/a/config.json --model nanogpt-char --show config%s", dir,
           "") == 0 && strstr(output, "\"width\": \"128\"") && strstr(output,
           "\"val_every\": \"5\""),
           "a --model beside it: %s", output);
    EXPECT(shell(PROGRAM " --config %s/a/config.json --out %s/a --resume auto --steps 14", dir,
           dir) == 0, "the same command, to go on: %s", output);
    EXPECT(shell(PROGRAM " --config %s/c/config.json --out %s/a --resume auto", dir, dir) == 1
           && strstr(output, "--lr 0.002 in this run and --lr 0.003 in --config"),
           "other flags, to go on: %s", output);
    static const char *const texts[][2] = {
        {"{\"flags\": {\"steps\": 1, \"lr\": 1e-3, \"layers\": \"1\", "
         "\"sample\": \"0\"}}",
         "after 1 steps"},
        {"{\"flags\": {\"layerz\": \"1\"}}", "unknown flag layerz\n  -> did you mean --layers? "},
        {"{\"flags\": {\"lr\": [0.5]}}", "expected \"lr\" to be a string"},
        {"{\"flags\": {\"lr\": \"fast\"}}", "expected a number"},
        {"{\"flags\": {\"out\": \"x\"}}", "give it on the command line instead"},
        {"{\"norm_mode\": \"POST\", \"flags\": {}}", "-> make train_gpt NORM_MODE=POST"},
        {"{\"lr\": \"1\"}", "expected \"flags\" to be an object"},
        {"{\"flags\": ", "not valid JSON"}};
    for (int i = 0; i < 8; i++) {
        char path[512], line[1024];
        write_text(check_format(path, sizeof path, "%s/own.json", dir), texts[i][0]);
        int status = run(PROGRAM, check_format(line, sizeof line,
            " --config %s --val-tokens 64 --out %s/own", path, dir));
        EXPECT(status == (i > 0) && strstr(output, texts[i][1]),
               "%s: status %d, expected \"%s\", found %s", texts[i][0], status, texts[i][1],
               output);
    }
    EXPECT(shell(PROGRAM " --config %s/a/config.json --from %s/a --eval", dir, dir) == 1
           && strstr(output, "leave out --config, which begins a run"),
           "--config and --from: %s", output);
    EXPECT(shell(PROGRAM " --init-from %s/a --from %s/a --eval", dir, dir) == 1
           && strstr(output, "leave out --init-from"),
           "--init-from and --from: %s", output);
    EXPECT(shell(PROGRAM " --out %s/a --resume auto --show%s", dir, "") == 0
           && !strstr(output, "no run in"), "a run is shown, not missed: %s", output);

    // The run's config.json holds what the run wrote, to the byte.
    static const char *const edits[][2] = {{"s/\"steps\": \"14\"/\"steps\": \"15\"/",
        "edited or damaged"}, {"s/\"save_every\": \"500\"/\"save_every\": \"501\"/",
        "give its flag on the command line"},
        {"/xxh64/d; s/^  },/  }/", "edited or damaged"}, {"s/xxh64/xxh65/", "edited or damaged"},
            {"s/^}$/} /", "edited or damaged"},
            {"s/\"micro_batch\": \"4\"/\"micro_batch\": \"2\"/", "edited or damaged"}};
    for (int i = 0; i < 6; i++) {
        char line[1024];
        check_format(line, sizeof line, "cp %s/a/config.json %s/kept && sed -i '%s' "
            "%s/a/config.json && ! cmp -s %s/kept %s/a/config.json && "
            PROGRAM " --out %s/a --resume auto --steps 16", dir, dir, edits[i][0], dir, dir, dir,
            dir);
        EXPECT(run(line, "") == 1 && strstr(output, edits[i][1]) &&
                   strstr(output, "-> restore it: cp "),
               "%s: expected \"%s\", found %s", edits[i][0], edits[i][1], output);
        shell("cp %s/kept %s/a/config.json", dir, dir);
    }
    EXPECT(shell("sed -i '/xxh64/d; s/^  },/  }/; s/version\": 2/version\": 1/' %s/a/config.json "
           "&& " PROGRAM " --out %s/a --resume auto --steps 16", dir, dir) == 0,
           "a run of version 1 goes on: %s", output);

    // A sample of each line of standard input, the first as of --prompt.
    EXPECT(shell(PROGRAM " --from %s/c --sample 8 --temperature 0 --prompt 'Once upon' | grep -a "
           "-A 9 Once > %s/one", dir, dir) == 0, "a prompt: %s", output);
    EXPECT(shell("printf 'Once upon\\na\\n\\nlast' | "
           PROGRAM " --from %s/c --sample 8 --temperature 0 --prompt - > %s/all", dir, dir) == 0,
           "prompts: %s", output);
    EXPECT(shell("test $(grep -ac ^prefill %s/all) = 4 && grep -a '^last' %s/all", dir, dir) == 0,
           "a sample for each of four: %s", output);
    EXPECT(shell("grep -aq '^prefill 5 tokens' %s/all && ! grep -aq '^> ' %s/all", dir, dir) == 0,
           "the last as it is, and no prompt sign in a pipe");
    EXPECT(shell("grep -v ^prefill %s/one | head -c 17 > %s/first", dir, dir) == 0
           && shell("grep -a -A 9 ^Once %s/all | head -c 17 | cmp - %s/first", dir, dir) == 0,
           "the first is that of --prompt: %s", output);
    EXPECT(shell("printf '%%0300d' 0 | " PROGRAM " --from %s/c --sample 3 --prompt -%s", dir,
           "") == 0 && strstr(output, "note: a prompt of 300 tokens, the model reads 32 at once: "
           "it sees the last 16"), "a long line: %s", output);
    EXPECT(shell(PROGRAM " --from %s/c --sample 3 --prompt - < /dev/null%s", dir, "") == 0
           && !strstr(output, "prefill"), "no line: %s", output);
    expect_refused(" --prompt -", "--prompt - needs --from RUN, found no --from");
}

void test_run_refusals(void) {
    const char *dir = test_dir("refusals");
    char line[1024];
    static const char *const flags[][2] = {
        {" --nonsense", "unknown flag"},
        {" --model gpt5", "--show models lists them"},
        {" --heads 3",
         "--heads 3 does not go with --width 128\n  -> a divisor of the width, or --head-size"},
        {" --head-size 35",
         "--head-size 35 does not go with --positions rope\n  -> an even head size"},
        {" --rope-original 512",
         "--rope-original 512 needs --rope-factor N, found --rope-factor 1"},
        {" --dyt-alpha 0.8", "--dyt-alpha 0.8 needs --norm dyt, found --norm rms\n  -> leave it"},
        {" --kv-heads 3",
         "--kv-heads 3 does not go with --heads 4\n  -> a divisor of the heads"},
        {" --micro-batch 5",
         "--micro-batch 5 does not go with --batch 8\n  -> a divisor of the batch"},
        {" --layers -1", "--layers=-1: expected a whole number from 1 to 4096\n  -> number of"},
        {" --data /no/such/path", "/no/such/path"},
        {" --vocab 100", "vocabulary of 256, the model one of 100"},
        {" --sdd code", 
         "--sdd code needs NORM_MODE=SDD (or SDD_PRE), found SPAN\n  -> leave it out, or "
         "make train_gpt NORM_MODE=SDD"},
        {" --mix-ratio 0.5", 
         "--mix-ratio 0.5 needs NORM_MODE=MIX_LN, found SPAN"},
        {" --schedule linear --decay-part 0.1",
         "--decay-part 0.1 needs --schedule wsd, found --schedule linear\n  -> leave it out"},
        {" --width-power 0.5", "--width-power 0.5 needs --width-base N, found --width-base 0"},
        {" --muon-lr 0.02", "--muon-lr 0.02 needs --optimizer muon, found --optimizer adamw"},
        {" --muon-scale original", "--muon-scale original needs --optimizer muon"},
        {" --eval", "--eval on needs --from RUN, found no --from"},
        {" --mask-documents --restart-positions",
         "--restart-positions on needs --positions learned, found --positions rope"},
        {" --positions learned --restart-positions",
         "--restart-positions on needs --mask-documents on, found --mask-documents off"},
        {" --from /no/such/run --eval", "/no/such/run"},
        {" --show everything", "expected off|model|models|modes|config"},
        {" --resume required", "--out RUN"},
        {" --width 36 --heads 4",
         "--heads 4 does not go with --width 36\n  -> an even head size (width / heads), or "
         "--positions learned"},
        {" --experts 4 --experts-per-token 5",
         "--experts-per-token 5 does not go with --experts 4\n  -> at most as many as there are"},
        {" --experts 4 --dense-layers 4",
         "--dense-layers 4 does not go with --layers 4\n  -> fewer, so that a layer has experts"},
        {" --experts 4 --bias on", "-> --bias off: experts have no biases"},
        {" --router sigmoid",
         "--router sigmoid needs --experts N, found --experts 0\n  -> leave it out, or "
         "--experts N"},
        {" --experts 4 --dense-ffn 64", "needs --dense-layers N, found --dense-layers 0"},
        {" --rope-size 8", "--rope-size 8 needs --kv-rank N, found --kv-rank 0"},
        {" --tf32",
         "--tf32 on needs DEVICE=cuda, found cpu\n  -> leave it out, or "
         "make train_gpt DEVICE=cuda"},
        {" --kv-rank 16 --kv-heads 2", "--kv-heads 0: latent attention"},
        {" --kv-rank 16 --bias on", "-> --bias off: latent attention has no biases"},
        {" --kv-rank 16 --positions learned", "-> --positions rope: latent attention"},
        {" --kv-rank 16 --rope-size 7", "--rope-size 7\n  -> an even --rope-size"},
        {" --vocab 300 --prompt x", "--prompt needs the tokenizer"},
        {" --resume auto", "--resume auto needs --out RUN, found no --out"},
        {" --batch 1048576 --seq 4096",
         "--batch 1048576 does not go with --seq 4096\n  -> a --micro-batch of less than 2^31 "
         "tokens, each counted once per expert"},
        {" --batch 2097152 --seq 1 --experts 1024 --experts-per-token 1",
         "--batch 2097152 does not go with --experts 1024\n  -> a smaller --micro-batch"},
        {" --adam-eps 0", "--adam-eps=0: expected a number from 1e-30 to 1\n"},
        {" --out Makefile", "is a file"},
        {" --out /proc/nothing/here", "/proc/nothing/here"}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        int status = run(PROGRAM, flags[i][0]);
        EXPECT(status == 1 && strstr(output, flags[i][1]) && !strstr(output, "\nstep "),
               "%s: status %d, expected \"%s\" before any step, found:\n%s", flags[i][0], status,
               flags[i][1], output);
    }
    check_format(line, sizeof line, "printf 'hello' > %s/text.bin", dir);
    run(line, "");
    check_format(line, sizeof line, " --data %s/text.bin --out %s/r", dir, dir);
    expect_refused(line, "not a shard");
    check_format(line, sizeof line, " --data %s --out %s/r", dir, dir);
    expect_refused(line, dir);
    check_format(line, sizeof line,
                 "printf 'short' > %s/text && build/shard --out %s/small %s/text", dir, dir, dir);
    run(line, "");
    check_format(line, sizeof line, " --data %s/small --out %s/r", dir, dir);
    expect_refused(line, "--seq");
    check_format(line, sizeof line, "test ! -e %s/r", dir);
    EXPECT(run(line, "") == 0, "a refused run leaves no folder");
}
