// test_eval.c: files of tasks and what they are refused for; scores against softmax written out;
// windows; metrics by hand.
#include "test.h"
#include <unistd.h>
#include "../../llmc/run/run.h"
#include "model.h"

enum { V = 40, T = 16, WORDS = 512 };

static const Run RUN = {.m.V = V, .m.T = T};  // without a tokenizer

typedef struct { int32_t head[256]; uint16_t words[WORDS]; int count; char path[256]; } File;

static void file_write(const File *f) {
    FILE *out = fopen(f->path, "wb");
    fwrite(f->head, 1, sizeof f->head, out);
    fwrite(f->words, 2, (size_t)f->count, out);
    fclose(out);
}

// An example of `choices` completions: context tokens first, first+1, ... and completion i of 1 + i
// tokens. own: tokens of each completion that are context; -1: without the extension.
static void add_example(File *f, int label, int choices, int context, int own) {
    int begin = f->count, token = f->head[2];
    uint16_t *w = f->words;
    w[f->count++] = EVAL_START;
    f->count++;
    w[f->count++] = (uint16_t)f->head[2]++;
    w[f->count++] = (uint16_t)label;
    w[f->count++] = (uint16_t)choices;
    w[f->count++] = (uint16_t)context;
    for (int i = 0; i < context; i++) w[f->count++] = (uint16_t)(token++ * 7 % V);
    for (int i = 0; i < choices; i++) {
        int after = 1 + i + (own > 0 ? own : 0);
        w[f->count++] = (uint16_t)after;
        for (int k = 0; k < after; k++) w[f->count++] = (uint16_t)(token++ * 11 % V);
    }
    for (int i = 0; i < choices && own >= 0; i++) w[f->count++] = (uint16_t)(10 * (choices - i));
    for (int i = 0; i < choices && own >= 0; i++) w[f->count++] = (uint16_t)own;
    w[begin + 1] = (uint16_t)(2 * (f->count - begin));
    if (w[begin + 1] > f->head[3]) f->head[3] = w[begin + 1];
}

static File file_make(const char *name) {
    File f = {.head = {EVAL_MAGIC, EVAL_VERSION_16}};
    check_format(f.path, sizeof f.path, "%s/%s", test_dir("eval"), name);
    return f;
}

static void open_file(void *path) {
    Task t;
    task_open(&t, path, &RUN);
}

static void open_list(void *list) {
    Tasks tasks;
    tasks_open(&tasks, list, &RUN);
}

// ---------------------------------------------------------------------------------------- refusals

// Files that are wrong in one word. at: of the header where negative, -1 - at; else of the tokens.
static void test_hostile_files(void) {
    static const struct {
        int at, value;
        const char *words;
    } wrong[] = {
        {-1, 20240521, "magic 20240521"}, {-2, 3, "found version 3"}, {-3, 0, "0 examples"},
        {-2, 2, "found version 2, 2 examples, 1094 bytes"}, {-5, 3, "score 3"},
        {-5, -1, "score -1"},
        {-3, -1, "-1 examples"}, {-3, 3, "example 2 to begin with 65535, found -1"},
        {-3, 1, "expected 35 numbers in examples, the longest of 36 bytes, found 17"},
        {-4, 1000, "the longest of 1000 bytes"}, {0, 7, "example 0 to begin with 65535, found 7"},
        {1, 9, "9 bytes"}, {1, 0, "0 bytes"}, {1, 65534, "65534 bytes"}, {2, 5, "number 5"},
        {3, 2, "completion 2 of 2"}, {4, 0, "completion 1 of 0"}, {4, 1, "completion 1 of 1"},
        {4, 60000, "ends within its completion 2"}, {5, 60000, "ends within its completion 0"},
        {5, 3, "ends within its completion 0"}, {6, V, "found 40 at position 6"},
        {8, 0, "that one is empty"}, {8, 500, "ends within its completion 0"},
        {9, V + 9, "found 49"}, {15, 2, "has -1 tokens to score and 4"},
        {16, 65535, "has -65533 tokens to score"},
    };

    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        File f = file_make("wrong.bin");
        add_example(&f, 1, 2, 2, 0);
        add_example(&f, 0, 2, 3, 0);
        if (wrong[i].at < 0) f.head[-1 - wrong[i].at] = wrong[i].value;
        else f.words[wrong[i].at] = (uint16_t)wrong[i].value;
        file_write(&f);
        EXPECT_REFUSAL(open_file, f.path, wrong[i].words);
    }
    File f = file_make("wrong.bin");
    add_example(&f, 0, 2, 0, 0);
    file_write(&f);
    EXPECT_REFUSAL(open_file, f.path, "1 tokens to score and 0 before them");
    f = file_make("wrong.bin");
    add_example(&f, 0, T + 1, 2, 0);
    file_write(&f);
    EXPECT_REFUSAL(open_file, f.path, "at most --seq 16 tokens");
    f = file_make("wrong.bin");
    add_example(&f, 0, 1, 2, 0);
    add_example(&f, 0, 2, 2, 0);
    file_write(&f);
    EXPECT_REFUSAL(open_file, f.path, "has 2 completions, and the ones before it one");
    f.count = 0;
    for (int bytes = 0; bytes < 1024; bytes += 511) {
        file_write(&f);
        EXPECT(truncate(f.path, bytes) == 0, "a shorter file");
        EXPECT_REFUSAL(open_file, f.path, "is not a shard");
    }
    EXPECT_REFUSAL(open_file, "build/test/eval/nothing.bin", "cannot read");
    EXPECT_REFUSAL(open_list, "build/test/eval/nothing.bin,", "cannot read");
    f = file_make("text.bin");
    f.head[0] = SHARD_MAGIC_16;
    f.head[2] = f.count = 4;
    f.head[3] = V;
    file_write(&f);
    EXPECT_REFUSAL(open_file, f.path, "found only separators of documents");
    f.words[2] = V;
    file_write(&f);
    EXPECT_REFUSAL(open_file, f.path, "found 40 at position 2");
}

static void test_lists(void) {
    File f = file_make("b_val.bin");
    add_example(&f, 0, 1, 2, 0);
    file_write(&f);
    char folder[256], list[600], other[300];
    check_format(folder, sizeof folder, "%.*s", (int)(strrchr(f.path, '/') - f.path), f.path);
    EXPECT_REFUSAL(open_list, "build/test", "found none");
    const char *names[] = {"a.bin", "tokenizer.bin", "note.txt"};
    for (int i = 0; i < 3; i++) {
        check_format(f.path, sizeof f.path, "%s/%s", folder, names[i]);
        if (i) f.head[0] = 0;
        file_write(&f);
    }
    Tasks tasks;
    tasks_open(&tasks, folder, &RUN);
    EXPECT(tasks.count == 2 && !strcmp(tasks.task[0].name, "a") &&
               !strcmp(tasks.task[1].name, "b") && tasks.task[1].kind == TASK_WORD,
           "a folder's tasks by name, without tokenizer.bin and text");
    tasks_close(&tasks);
    check_format(other, sizeof other, "%s/a.bin", folder);
    tasks_open(&tasks, check_format(list, sizeof list, "%s,%s/b_val.bin", other, folder), &RUN);
    EXPECT(tasks.count == 2, "files with a comma between them");
    tasks_close(&tasks);
    tasks_open(&tasks, "", &RUN);
    EXPECT(!tasks.count, "no tasks");
    EXPECT_REFUSAL(open_list, check_format(list, sizeof list, "%s,%s", other, other),
                   "another task is named a too");
}

// ------------------------------------------------------------------------------------------ scores

static Model small_model(void) {
    FlagSet set;
    char vocab[32];
    flags_default(&set);
    flags_preset(&set, set.f.model);
    flags_parse_text(&set, "--layers 2 --width 32 --heads 2 --seq 16", BY_USER);
    flag_set(&set, &FLAGS[FLAG_vocab], check_format(vocab, sizeof vocab, "%d", V), BY_USER);
    return model_from_flags(&set.f, &MODES[MODE_SPAN]);
}

// log p of the last `scored` of n tokens after those before them, one sequence by itself, softmax
// as it is written.
static double log_p(const Trainer *t, Gpt *gpt, const int32_t *tokens, int n, int scored,
                    bool *greedy) {
    double sum = 0;
    t->forward(gpt, tokens, NULL, 1, n - 1);
    *greedy = true;
    for (int i = n - scored; i < n; i++) {
        const double *z = t->logits(gpt, i - 1);
        double total = 0;
        for (int v = 0; v < V; v++) total += exp(z[v]);
        for (int v = 0; v < V; v++) *greedy = *greedy && z[v] <= z[tokens[i]];
        sum += z[tokens[i]] - log(total);
    }
    return sum;
}

static int row_tokens(const Task *t, const TaskRow *row, int32_t *tokens) {
    int all = row->tokens, first = all > T + 1 ? all - T - 1 : 0;
    for (int i = first; i < all; i++)
        tokens[i - first] =
            (int32_t)task_token(t, i < row->before ? row->context + i
                                                   : row->completion + i - row->before);
    return all - first;
}

// Every sequence of a task, in batches of B, as log_p has it alone.
static void expect_scores(const Trainer *t, Task *task, const Model *m, int B, double bound) {
    Setup setup = {.B = B, .T = T, .batch = B}, judge = {.B = 1, .T = T, .batch = 1};
    Layout layout = layout_make(m);
    Gpt *g = t->create(m, &setup), *h = judge_fp64.create(m, &judge);
    int32_t inputs[8 * T], tokens[T + 1];
    Run run = {.t = t, .gpt = g, .m = *m, .micro = B, .inputs = inputs};
    fill_weights(t, g, &layout, 3, sizeof(float));
    fill_weights(&judge_fp64, h, &layout, 3, sizeof(float));
    task_score(task, &run);
    for (int64_t i = 0; i < task->rows; i++) {
        bool greedy;
        double p = log_p(&judge_fp64, h, tokens, row_tokens(task, &task->row[i], tokens),
                         task->row[i].scored, &greedy);
        EXPECT(fabs(task->scores[2 * i] - p) < bound * (1 + fabs(p)) &&
                   (task->scores[2 * i + 1] == 1) == greedy,
               "%s, batches of %d, sequence %lld: %.12g, expected %.12g", t->precision, B,
               (long long)i, task->scores[2 * i], p);
    }
    t->destroy(g);
    judge_fp64.destroy(h);
    layout_free(&layout);
}

static void test_scores(void) {
    Model m = small_model();
    File f = file_make("choice.bin");
    for (int i = 0; i < 6; i++) add_example(&f, i % 3, 3, 1 + 4 * i, i % 2 ? 0 : 2);
    file_write(&f);
    Task t;
    task_open(&t, f.path, &RUN);
    EXPECT(t.kind == TASK_CHOICE && t.rows == 18 && t.examples == 6 && t.cut == 6,
           "%lld sequences, %lld cut", (long long)t.rows, (long long)t.cut);
    EXPECT(t.row[2].scored == 3 && t.row[2].tokens - t.row[2].before == 5 &&
               t.row[2].length == 10 && t.row[0].length == 30,
           "a completion's own context and its length in characters");
    expect_scores(&judge_fp64, &t, &m, 1, 1e-12);
    expect_scores(&judge_fp64, &t, &m, 5, 1e-12);
    expect_scores(&judge_fp32, &t, &m, 8, 1e-5);

    // In every other example the last word is what the judge itself would say.
    Setup setup = {.B = 1, .T = T, .batch = 1};
    Layout layout = layout_make(&m);
    Gpt *g = judge_fp64.create(&m, &setup);
    fill_weights(&judge_fp64, g, &layout, 3, sizeof(float));
    f = file_make("word.bin");
    for (int i = 0; i < 4; i++) {
        int32_t tokens[T + 1];
        add_example(&f, 0, 1, 5, 0);
        uint16_t *last = &f.words[f.count - 3];
        for (int k = 0; k < 5; k++) tokens[k] = last[k - 6];
        for (int v = 0; v < V && i % 2; v++) {
            bool greedy;
            tokens[5] = v;
            log_p(&judge_fp64, g, tokens, 6, 1, &greedy);
            if (greedy) *last = (uint16_t)v;
        }
    }
    judge_fp64.destroy(g);
    layout_free(&layout);
    file_write(&f);
    task_open(&t, f.path, &RUN);
    expect_scores(&judge_fp64, &t, &m, 3, 1e-12);
    TaskMetric metrics[TASK_METRICS];
    int count = task_metrics(&t, metrics);
    EXPECT(count == 2 && metrics[0].value >= 0.5 && metrics[0].value < 1,
           "two of four last words are the likeliest: %g", metrics[0].value);
}

// Windows of a text: every token is scored once, by as many tokens before it as there are and fit.
static void test_windows(void) {
    Model m = small_model();
    File f = file_make("text_val.bin");
    f.head[0] = SHARD_MAGIC_16;
    f.head[3] = V;
    static const int documents[] = {1, T, T + 1, 0, 3 * T - 2};
    for (int d = 0; d < 5; f.count += documents[d++] + 1)
        for (int i = 0; i <= documents[d]; i++)
            f.words[f.count + i] = (uint16_t)(i ? 1 + (f.count + i) * 5 % (V - 1) : 0);
    f.head[2] = f.count;
    f.head[SHARD_BYTES] = 300;
    f.head[SHARD_WORDS] = 60;
    file_write(&f);
    Task t;
    task_open(&t, f.path, &RUN);
    int seen[WORDS] = {0}, wrong = 0;
    for (int64_t i = 0; i < t.rows; i++) {
        const TaskRow *row = &t.row[i];
        // reaches back to the document's start, or T tokens
        wrong += row->tokens - 1 > T ||
                 (row->scored < T && row->tokens - 1 < T && task_token(&t, row->completion));
        for (int k = 0; k < row->scored; k++) seen[row->completion + row->tokens - 1 - k]++;
    }
    for (int i = 0; i < f.count; i++) wrong += seen[i] != (f.words[i] != 0);
    EXPECT(!wrong && t.rows == 1 + 1 + 2 + 3 && t.examples == 4 && t.words == 60,
           "%d wrong, %lld windows of %lld documents", wrong, (long long)t.rows,
           (long long)t.examples);
    expect_scores(&judge_fp64, &t, &m, 2, 1e-12);
    TaskMetric metrics[TASK_METRICS];
    double sum = 0;
    for (int64_t i = 0; i < t.rows; i++) sum += t.scores[2 * i];
    int count = task_metrics(&t, metrics);
    EXPECT(count == 4 && fabs(metrics[0].value / exp(-sum / 60) - 1) < 1e-12 &&
               fabs(metrics[2].value + sum / 300 / log(2)) < 1e-12 &&
               fabs(metrics[3].value / exp(-sum / 80) - 1) < 1e-12,
           "perplexities of a text: %g %g %g", metrics[0].value, metrics[2].value,
           metrics[3].value);
}

// Version 2 has the same numbers in twice the bytes; some are too large for uint16.
static void test_wide(void) {
    File f = file_make("narrow.bin");
    for (int i = 0; i < 3; i++) add_example(&f, i == 2, 2, 2 + i, i);
    file_write(&f);
    Task narrow, wide;
    task_open(&narrow, f.path, &RUN);
    uint32_t words[WORDS];
    for (int i = 0; i < f.count; i++) words[i] = f.words[i];
    for (int64_t at = 0; at < f.count; at += words[at + 1] / 4) words[at + 1] *= 2;
    f.head[1] = EVAL_VERSION_32;
    f.head[3] *= 2;
    check_format(f.path, sizeof f.path, "%s/wide.bin", "build/test/eval");
    for (int fault = 0; fault < 3; fault++) {
        uint32_t *word = &words[fault == 1 ? 6 : f.count - 1], good = *word;
        if (fault) *word = fault == 1 ? 70000 : UINT32_MAX;      // a token; context of its own
        FILE *out = fopen(f.path, "wb");
        fwrite(f.head, 1, sizeof f.head, out);
        fwrite(words, 4, (size_t)f.count, out);
        fclose(out);
        *word = good;
        if (fault) EXPECT_REFUSAL(open_file, f.path, fault == 1 ? "found 70000 at position 6"
                                                                : "tokens to score and");
    }
    file_write(&f);
    EXPECT_REFUSAL(open_file, f.path, "example 0");
    FILE *out = fopen(f.path, "wb");
    fwrite(f.head, 1, sizeof f.head, out);
    fwrite(words, 4, (size_t)f.count, out);
    fclose(out);
    task_open(&wide, f.path, &RUN);
    bool same = wide.rows == narrow.rows && wide.tokens == narrow.tokens && wide.width == 4;
    for (int64_t i = 0; same && i < wide.rows; i++)
        same = !memcmp(&wide.row[i], &narrow.row[i], sizeof(TaskRow));
    for (int64_t i = 0; same && i < 6; i++)
        same = task_token(&wide, 4 + 2 * i) == task_token(&narrow, 4 + 2 * i);
    EXPECT(same, "a file of uint32 has %lld rows of width %d", wide.rows, wide.width);
}

// The average of a suite takes of each task the metric that its file names, and leaves out those
// without one.
static void test_average(void) {
    Task tasks[3];
    static const int scores[] = {1, 2, 0};
    for (int k = 0; k < 3; k++) {
        char name[16];
        File f = file_make(check_format(name, sizeof name, "suite%d.bin", k));
        for (int i = 0; i < 4; i++) add_example(&f, i % 2, 2, 2, 0);
        f.head[4] = scores[k];
        file_write(&f);
        task_open(&tasks[k], f.path, &RUN);
        // The last example has the larger sum in its second completion, which is right, the others
        // in their first, which is right in two: acc 3/4. By length, 20 and 10, the first is always
        // chosen: acc_norm 1/2.
        for (int i = 0; i < 8; i++) tasks[k].scores[2 * i] = i == 6 ? -3 : -1 - i % 2;
    }
    Log log = {0};
    for (int n = 3; n > 0; n -= 2) {
        log_begin(&log);
        tasks_report(&(Tasks){tasks + (n == 1 ? 2 : 0), n}, &log);
        char *text = log_take(&log), *found = strstr(text, "\"task_average\": ");
        TaskMetric metrics[TASK_METRICS];
        task_metrics(&tasks[0], metrics);
        double expected = (metrics[0].value + metrics[1].value) / 2;
        EXPECT(metrics[0].value != metrics[1].value, "two metrics that differ");
        EXPECT(n == 1 ? !found : found && atof(found + 16) == expected,
               "%d tasks: expected an average of %g in %s", n, expected, text);
        free(text);
    }
}

// Three examples of two completions, scores by hand: acc takes the larger sum, the first of equals,
// acc_norm the larger quotient.
static void test_metrics(void) {
    File f = file_make("hand.bin");
    for (int i = 0; i < 3; i++) add_example(&f, i == 2, 2, 2, 0);
    file_write(&f);
    Task t;
    task_open(&t, f.path, &RUN);  // lengths are 20 and 10
    static const double scores[] = {-3, -2, -5, -5, -4, -1};
    for (int i = 0; i < 6; i++) t.scores[2 * i] = scores[i];
    TaskMetric metrics[TASK_METRICS];
    int count = task_metrics(&t, metrics);
    EXPECT(count == 2 && !strcmp(metrics[1].name, "acc_norm"), "two metrics");
    EXPECT(fabs(metrics[0].value - 2.0 / 3) < 1e-15 && fabs(metrics[0].deviation - 1.0 / 3) < 1e-15,
           "acc %g +- %g", metrics[0].value, metrics[0].deviation);
    EXPECT(metrics[1].value == 1, "acc_norm %g", metrics[1].value);
    f = file_make("hand.bin");
    for (int i = 0; i < 2; i++) add_example(&f, 0, 1, 2, 0);
    file_write(&f);
    task_open(&t, f.path, &RUN);
    t.scores[0] = -1;
    t.scores[2] = -3;
    t.scores[1] = 1;
    task_metrics(&t, metrics);
    EXPECT(metrics[0].value == 0.5 && fabs(metrics[1].value - exp(2)) < 1e-12 &&
               fabs(metrics[1].deviation - exp(2)) < 1e-12,
           "perplexity %g +- %g", metrics[1].value, metrics[1].deviation);
    t.scores[0] = -300;  // a number of 66 digits goes into the table, and into the log
    Log log = {0};
    log_begin(&log);
    tasks_report(&(Tasks){&t, 1}, &log);
    char *text = log_take(&log);
    EXPECT(strstr(text, "\"perplexity_stderr\": ") && strstr(text, "e+65"),
           "a large perplexity is logged as %s", text);
    free(text);

    // A file that does not say lengths: characters by the tokenizer, tokens without one.
    char path[256];
    char error[ERROR_CAP];
    Run run = {.m.T = T};
    Tokenizer *tokenizer = &run.tokenizer;
    test_write_tokenizer(check_format(path, sizeof path, "%s/tokenizer.bin",
                                      test_dir("eval_tokenizer")));
    EXPECT(tokenizer_open(path, tokenizer, error), "%s: %s", path, error);
    f = file_make("plain.bin");
    int32_t words[13];
    int n = (int)tokenizer_encode(tokenizer, " the\xC3\xA9", 6, words);
    add_example(&f, 0, n, 2, -1);
    for (int i = 0; i < n; i++) f.words[f.count - n + i] = (uint16_t)words[i];
    file_write(&f);
    run.m.V = tokenizer->count;
    const Run without = {.m = run.m};
    task_open(&t, f.path, &run);
    EXPECT(n > 1 && t.row[n - 1].length == 4, "the\xC3\xA9 has four characters, found %g",
           t.row[n - 1].length);
    task_open(&t, f.path, &without);
    EXPECT(t.row[n - 1].length == n, "and %d tokens, found %g", n, t.row[n - 1].length);
    tokenizer_close(tokenizer);
}

void test_eval(void) {
    test_hostile_files();
    test_lists();
    test_scores();
    test_windows();
    test_wide();
    test_average();
    test_metrics();
}
