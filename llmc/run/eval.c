// eval.c: see eval.h. A task of any kind becomes a list of sequences (TaskRow). One loop scores
// them; the metrics then depend on the kind. A damaged file is refused before anything is scored.
#include "run.h"
#include <math.h>
#include "../exp.h"

// Batches are padded to a multiple of this length, so that few different lengths occur.
enum { LENGTH_STEP = 32 };

#define REWRITE "\n  -> python3 data/get.py writes it again; or download it again"

// ------------------------------------------------------------------------------------ task files

// t->file is the whole file: a header, then tokens of 2 or 4 bytes.
int64_t task_token(const Task *t, int64_t i) {
    const void *tokens = t->file + SHARD_HEADER_BYTES;
    return t->width == 2 ? ((const uint16_t *)tokens)[i] : ((const uint32_t *)tokens)[i];
}

// Appends a sequence. The model reads all of its tokens except the last, which is only predicted;
// if these are more than T, it reads the last T of them.
static void add_row(Task *t, TaskRow row, int T) {
    row.inputs = least(row.tokens - 1, T);
    row.example = t->examples;
    t->row = check_grow(t->row, t->rows, sizeof row, "a list of completions");
    t->row[t->rows++] = row;
}

// The index in the file of token i of a sequence.
static int64_t row_place(const TaskRow *row, int i) {
    return i < row->before ? row->context + i : row->completion + i - row->before;
}

// The length that acc_norm divides by, if the file does not give it: characters without the leading
// space, as lm-evaluation-harness counts; tokens if there is no tokenizer, as llm.c counts.
static double completion_length(const Task *t, const TaskRow *row, const Tokenizer *tokenizer) {
    int begin = row->tokens - row->scored;
    double length = 0;
    for (int i = begin; i < row->tokens; i++) {
        size_t n = 1;
        int64_t token = task_token(t, row_place(row, i));
        const char *bytes = "x";                  // a token without text counts as one character
        if (token < tokenizer->count) bytes = tokenizer_decode(tokenizer, token, &n);
        bool leading_space = i == begin && n && *bytes == ' ';
        for (size_t k = leading_space; k < n; k++)
            length += ((uint8_t)bytes[k] & 0xC0) != 0x80;       // first byte of a character
    }
    return length;
}

// Reads example number t->examples, which begins at `at`; returns where it ends. An example of
// llm.c's format is a list of uint16, in version 2 of uint32:
//
//   65535, bytes of the example, its number mod 65536, index of the right completion, completions,
//   n, n tokens of context
//   for each completion:  n > 0, n tokens
//
// data/get.py appends the length in characters of each completion, then for each completion how
// many of its first tokens belong to the context and are not scored.
static int64_t read_example(Task *t, const char *path, int64_t at, const Run *r) {
    // An example begins with six words; start is -1 if the file ends before them.
    long long start = t->tokens - at < 6 ? -1 : task_token(t, at);
    CHECK(start == EVAL_START,
          "%s: expected example %lld to begin with %d, found %lld (-1: the end of the file)"
          REWRITE, path, t->examples, EVAL_START, start);
    long long bytes = task_token(t, at + 1), number = task_token(t, at + 2);
    long long label = task_token(t, at + 3), choices = task_token(t, at + 4);
    int64_t context = at + 6, before = task_token(t, at + 5), end = at + bytes / t->width;
    if (!t->examples) t->kind = choices == 1 ? TASK_WORD : TASK_CHOICE;
    CHECK((choices == 1) == (t->kind == TASK_WORD),
          "%s: example %lld has %lld completions, and the ones before it %s\n"
          "  -> one file for each kind",
          path, t->examples, choices, t->kind == TASK_WORD ? "one" : "several");
    // After this check `end` lies within the file and bounds all reads of this example.
    CHECK(end >= context && bytes % t->width == 0 && end <= t->tokens && label < choices &&
              number == (t->examples & 0xFFFF),
          "%s: example %lld: expected its number, whole numbers within the file, and a right "
          "completion that it has, found number %lld, %lld bytes, and completion %lld of "
          "%lld" REWRITE,
          path, t->examples, number, bytes, label, choices);
    // Each completion is a sequence of its own, with the same context.
    at = context + before;
    for (long long i = 0; i < choices; i++) {
        int64_t after = at < end ? task_token(t, at) : 0;
        CHECK(after > 0 && at + 1 + after <= end,
              "%s: example %lld ends within its completion %lld, or that one is empty" REWRITE,
              path, t->examples, i);
        add_row(t, (TaskRow){
            .context = context, .completion = at + 1,
            .before = before, .tokens = before + after, .scored = after, .label = label,
        }, r->m.T);
        at += 1 + after;
    }
    // Two words for each completion follow (data/get.py), or none (llm.c).
    bool has_lengths = at + 2 * choices == end;
    CHECK(at == end || has_lengths,
          "%s: example %lld has %lld bytes, expected %lld for its completions, or %lld more"
          REWRITE, path, t->examples, bytes, bytes - t->width * (end - at),
          2 * t->width * choices);
    // A completion needs tokens to score, a token before them, and space in the model's window.
    for (long long i = 0; i < choices; i++) {
        TaskRow *row = &t->row[t->rows - choices + i];
        if (has_lengths) row->scored -= task_token(t, at + choices + i);
        int unscored = row->tokens - row->scored;
        CHECK(row->scored > 0 && unscored >= row->before && unscored > 0,
              "%s: completion %lld of example %lld has %d tokens to score and %d before them, "
              "expected at least one of each" REWRITE, path, i, t->examples, row->scored, unscored);
        CHECK(row->scored <= r->m.T,
              "%s: expected completions of at most --seq %d tokens, found one of %d\n"
              "  -> a larger --seq, or --tasks without this file", path, r->m.T, row->scored);
        row->length = has_lengths ? task_token(t, at + i)
                                  : completion_length(t, row, &r->tokenizer);
    }
    if (t->kind == TASK_CHOICE && !has_lengths && !r->tokenizer.count && !t->examples)
        printf("note: %s does not have the lengths of completions, and no tokenizer.bin was found: "
               "acc_norm divides by tokens, as llm.c does\n  -> --tokenizer FILE\n", t->name);
    t->examples++;
    return end;
}

// Reads a file of examples. Its header: magic, version, number of examples, bytes of the longest
// one, score. All but the last are checked against the examples.
static void read_examples(Task *t, const char *path, size_t size, const Run *r) {
    const int32_t *head = (const int32_t *)t->file;
    int32_t version = head[1], examples = head[2];
    long long at = 0, longest = 0;
    t->width = version == EVAL_VERSION_32 ? 4 : 2;
    t->tokens = (size - SHARD_HEADER_BYTES) / t->width;
    t->score = head[4];
    CHECK((version == EVAL_VERSION_16 || version == EVAL_VERSION_32) && examples > 0 &&
              size % t->width == 0 && t->score >= 0 && t->score <= 2,
          "%s: expected version %d or %d, an example or more, whole numbers, and a score of 0 to "
          "2, found version %d, %d examples, %zu bytes, score %d" REWRITE,
          path, EVAL_VERSION_16, EVAL_VERSION_32, version, examples, size, t->score);
    while (t->examples < examples) {
        int64_t begin = at;
        at = read_example(t, path, at, r);
        longest = at - begin > longest ? at - begin : longest;
    }
    CHECK(at == t->tokens && t->width * longest == head[3],
          "%s: expected %lld numbers in examples, the longest of %d bytes, found %lld and %lld"
          REWRITE, path, t->tokens, head[3], at, t->width * longest);
}

// Adds the windows of a document: n tokens after its separator, which is at `at`.
static void read_document(Task *t, int64_t at, int64_t n, int T) {
    for (int64_t done = 0; done < n;) {
        int64_t scored = least(n - done, T);
        int64_t inputs = done ? T : scored;
        add_row(t, (TaskRow){
            .completion = at + done + scored - inputs, .tokens = inputs + 1, .scored = scored,
        }, T);
        done += scored;
    }
    t->examples += n > 0;
}

// Reads a text, which is a shard. Its first token is the separator that begins every document.
static void read_text(Task *t, const char *path, const Run *r) {
    DataLoader shard;
    loader_open(&shard, path, "val", 1, 0, 0);    // reads and checks the header
    t->kind = TASK_TEXT;
    t->width = shard.width;
    t->tokens = shard.tokens;
    t->bytes = shard.bytes;
    t->words = shard.words;
    int64_t begin = 0, separator = task_token(t, 0);
    // The tokenizer names the separator; without one, end is 0, the separator of bytes.
    bool known = r->tokenizer.count || shard.vocab == CORPUS_VOCAB;
    loader_close(&shard);
    CHECK(!known || separator == r->tokenizer.end,
          "%s: expected a text that begins with token %d, as documents do, found %lld\n"
          "  -> the first shard of a split", path, r->tokenizer.end, (long long)separator);
    for (int64_t i = 1; i <= t->tokens; i++) {
        if (i < t->tokens && task_token(t, i) != separator) continue;
        read_document(t, begin, i - begin - 1, r->m.T);
        begin = i;
    }
    CHECK(t->rows,
          "%s: expected a text, found only separators of documents\n"
          "  -> another shard", path);
}

// ----------------------------------------------------------------------------------------- tasks

// Equal lengths are ordered by place, so that every process has the same order.
static int longest_first(const void *a, const void *b) {
    const TaskRow *x = *(TaskRow *const *)a, *y = *(TaskRow *const *)b;
    return x->inputs == y->inputs ? (x < y) - (x > y) : y->inputs - x->inputs;
}

void task_open(Task *t, const char *path, const Run *r) {
    size_t size;
    memset(t, 0, sizeof *t);
    // "data/hellaswag_val.bin" holds the task hellaswag.
    check_format(t->name, sizeof t->name, "%s", file_name(path));
    char *end = strstr(t->name, "_val.bin");
    if (!end) end = strstr(t->name, ".bin");
    if (end) *end = 0;

    // The magic number tells examples from a text.
    t->file = file_read(path, INT64_MAX, &size);
    CHECK(t->file,
          "cannot read %s: %s\n  -> --tasks FILE,... or a folder with task files; python3 "
          "data/get.py tasks writes them", path, file_error());
    bool examples = size >= SHARD_HEADER_BYTES && *(const int32_t *)t->file == EVAL_MAGIC;
    if (examples) read_examples(t, path, size, r);
    else read_text(t, path, r);                   // refuses what is not a shard

    // Sequences of similar length share a batch, so that little of it is padding.
    t->order = check_alloc(t->rows * sizeof *t->order, "the order of a task");
    t->scores = check_alloc(2 * t->rows * sizeof *t->scores, "the scores of a task");
    for (int64_t i = 0; i < t->rows; i++) {
        TaskRow *row = t->order[i] = &t->row[i];
        t->cut += row->tokens > row->inputs + 1;
        for (int k = 0; k < row->tokens; k++) {
            long long at = row_place(row, k), token = task_token(t, at);
            CHECK(token < r->m.V,
                  "%s: expected tokens below %d, the model's vocabulary, found %lld at position "
                  "%lld\n  -> a file made with the model's tokenizer", path, r->m.V, token, at);
        }
    }
    qsort(t->order, t->rows, sizeof *t->order, longest_first);
    if (t->cut)
        printf("note: %lld of the %lld sequences of %s are longer than --seq %d: their beginning "
               "is cut\n", t->cut, t->rows, t->name, r->m.T);
}

// Results are logged by name, so two tasks of one name are refused.
static void add_task(Tasks *tasks, const char *path, const Run *r) {
    tasks->task = check_grow(tasks->task, tasks->count, sizeof(Task), "a list of tasks");
    Task *t = &tasks->task[tasks->count++];
    task_open(t, path, r);
    for (Task *other = tasks->task; other < t; other++)
        CHECK(strcmp(other->name, t->name),
              "%s: another task is named %s too\n  -> rename the file", path, t->name);
}

void tasks_open(Tasks *tasks, const char *list, const Run *r) {
    char item[PATH_CAP], path[PATH_CAP];
    memset(tasks, 0, sizeof *tasks);
    for (size_t n; *list; list += n + (list[n] == ',')) {
        struct dirent **entries = NULL;
        n = strcspn(list, ",");
        check_format(item, sizeof item, "%.*s", (int)n, list);
        int found = shard_scan(item, &entries), before = tasks->count;
        if (found < 0) add_task(tasks, item, r);  // no folder: a file, or an error that says why
        for (int i = 0; i < found; i++) {
            const char *name = entries[i]->d_name;
            if (strcmp(name, "tokenizer.bin")) add_task(tasks, path_join(path, item, name), r);
            free(entries[i]);
        }
        free(entries);
        CHECK(tasks->count > before,
              "%s: expected task files in this folder, found none\n"
              "  -> python3 data/get.py tasks writes them", item);
    }
}

void tasks_close(Tasks *tasks) {
    for (Task *t = tasks->task; t < tasks->task + tasks->count; t++) {
        free(t->file);
        free(t->row);
        free(t->order);
        free(t->scores);
    }
    free(tasks->task);
}

// ---------------------------------------------------------------------------------------- scores

// log softmax(z)[target] of V logits: doubles, or floats in vectorized loops. *likeliest becomes 0
// if a logit is larger than the target's.
static double log_softmax(const void *logits, size_t element, int V, int64_t target,
                          double *likeliest) {
    double max = -INFINITY, sum = 0, chosen;
    // The maximum is subtracted first: exp cannot overflow.
    if (element == sizeof(float)) {
        const float *z = logits;
        float largest = z[0], total = 0;
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < V; i++) largest = z[i] > largest ? z[i] : largest;
#pragma omp simd reduction(+ : total)
        for (int i = 0; i < V; i++) total += exp_float(z[i] - largest);
        max = largest;
        sum = total;
        chosen = z[target];
    } else {
        const double *z = logits;
        for (int i = 0; i < V; i++) max = z[i] > max ? z[i] : max;
        for (int i = 0; i < V; i++) sum += exp(z[i] - max);
        chosen = z[target];
    }
    if (!(chosen >= max)) *likeliest = 0;         // also if either is NaN
    return chosen - max - log(sum);
}

// Scores the n sequences from order[first] on as one batch. Padding after a shorter sequence does
// not change its logits: attention is causal.
static void score_batch(Task *t, Run *r, int64_t first, int n) {
    TaskRow **rows = t->order + first;
    int T = least(CEIL_DIV(rows[0]->inputs, LENGTH_STEP) * LENGTH_STEP, r->m.T);
    // Shorter sequences are padded with zeros.
    memset(r->inputs, 0, sizeof *r->inputs * n * T);
    for (int b = 0; b < n; b++) {
        const TaskRow *row = rows[b];
        int skip = row->tokens - 1 - row->inputs;                     // the beginning, if cut
        for (int i = 0; i < row->inputs; i++)
            r->inputs[b * T + i] = task_token(t, row_place(row, skip + i));
    }
    r->t->forward(r->gpt, r->inputs, NULL, n, T);
    for (int b = 0; b < n; b++) {
        const TaskRow *row = rows[b];
        double *score = t->scores + 2 * (row - t->row);
        score[1] = 1;
        // The logits at position i predict token i + 1.
        for (int k = row->scored; k > 0; k--) {
            int64_t target = task_token(t, row_place(row, row->tokens - k));
            const void *logits = r->t->logits(r->gpt, (int64_t)b * T + row->inputs - k);
            score[0] += log_softmax(logits, r->t->element, r->m.V, target, &score[1]);
        }
    }
}

// In each round every process scores one batch, the longest sequences that are left first.
bool task_score(Task *t, Run *r) {
    int64_t step = (int64_t)r->micro * comm_size(&r->comm);
    double begin = clock_seconds(), printed = begin, all = 0, done = 0;
    for (int64_t i = 0; i < t->rows; i++) all += t->row[i].inputs;
    memset(t->scores, 0, 2 * t->rows * sizeof *t->scores);
    // A group: the sequences that all processes score in one round.
    for (int64_t group = 0; group < t->rows; group += step) {
        int64_t first = group + (int64_t)r->micro * comm_rank(&r->comm), left = t->rows - first;
        if (comm_signal(&r->comm)) return false;
        if (left > 0) score_batch(t, r, first, least(left, r->micro));
        for (int64_t i = group; i < group + step && i < t->rows; i++)
            done += t->order[i]->inputs;
        // A line of progress every five seconds, counted in tokens.
        double now = clock_seconds();
        char eta[32];
        if (now - printed < 5) continue;
        printf("%s: %.0f %%, ETA %s\n", t->name, 100 * done / all,
               log_duration(eta, (now - begin) * (all - done) / done));
        fflush(stdout);
        printed = now;
    }
    comm_all_reduce(&r->comm, t->scores, 2 * t->rows, COMM_SUM);   // each row is scored once
    return true;
}

// --------------------------------------------------------------------------------------- metrics

// Mean of n values with its standard error: the sample deviation (n - 1, Bessel) over sqrt(n).
static TaskMetric mean_of(const char *name, const double *x, int64_t n) {
    double mean = 0, square = 0;
    for (int64_t i = 0; i < n; i++) mean += x[i] / n;
    for (int64_t i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
    return (TaskMetric){name, mean, sqrt(square / (n - 1) / n)};
}

// The rows of one example are adjacent.
int task_choice(const Task *t, int64_t first, bool norm, int64_t *next) {
    double best_score = -INFINITY;
    int64_t best = first, i = first;
    for (; i < t->rows && t->row[i].example == t->row[first].example; i++) {
        double score = t->scores[2 * i] / (norm ? t->row[i].length : 1);
        if (score > best_score) {
            best_score = score;
            best = i;
        }
    }
    *next = i;
    return best - first;
}

// Words or bytes that the file does not count (0) give no metric. Texts have no standard errors.
static int text_metrics(const Task *t, TaskMetric *metrics) {
    double sum = 0, tokens = 0;
    for (int64_t i = 0; i < t->rows; i++) {
        sum += t->scores[2 * i];
        tokens += t->row[i].scored;
    }
    const struct { const char *name; double per; } rows[TASK_METRICS] = {
        {"word_perplexity", t->words}, {"byte_perplexity", t->bytes},
        {"bits_per_byte", t->bytes}, {"token_perplexity", tokens}};
    int count = 0;
    for (int i = 0; i < TASK_METRICS; i++) {
        double nats = -sum / rows[i].per;
        double value = strstr(rows[i].name, "bits") ? nats / log(2) : exp(nats);
        if (rows[i].per > 0) metrics[count++] = (TaskMetric){rows[i].name, value, NAN};
    }
    return count;
}

// The mean of one value for each example: 0 or 1 for acc; log p for perplexity, whose mean is then
// turned into exp(-mean).
int task_metrics(const Task *t, TaskMetric metrics[TASK_METRICS]) {
    static const char *const NAMES[][2] = {{"acc", "acc_norm"}, {"acc", "perplexity"}};
    if (t->kind == TASK_TEXT) return text_metrics(t, metrics);
    double *x = check_alloc(t->rows * sizeof *x, "the results of a task");      // of each example
    for (int k = 0; k < 2; k++) {
        for (int64_t at = 0, next; at < t->rows; at = next) {
            bool right = task_choice(t, at, k, &next) == t->row[at].label;
            x[t->row[at].example] = t->kind == TASK_WORD ? t->scores[2 * at + !k] : right;
        }
        metrics[k] = mean_of(NAMES[t->kind][k], x, t->examples);
    }
    if (t->kind == TASK_WORD) {
        metrics[1].value = exp(-metrics[1].value);
        metrics[1].deviation *= metrics[1].value;
    }
    free(x);
    return 2;
}

// Prints each metric with its standard error as a line of the table, and logs both. Returns the
// metric in the average, or 0.
static double report_task(const Task *t, Log *log) {
    TaskMetric metrics[TASK_METRICS];
    int count = task_metrics(t, metrics);
    log_nest(log, t->name, '{');
    log_int(log, "examples", t->examples);
    printf("%-20s %9lld", t->name, t->examples);
    for (const TaskMetric *m = metrics; m < metrics + count; m++) {
        char name[32];
        log_real(log, m->name, m->value);
        printf("%*s  %-16s %10.4f", m == metrics ? 0 : 30, "", m->name, m->value);
        if (!isnan(m->deviation)) {
            log_real(log, check_format(name, sizeof name, "%s_stderr", m->name), m->deviation);
            printf(" %10.4f", m->deviation);
        }
        printf("\n");
    }
    log_unnest(log, '}');
    return t->score ? metrics[t->score - 1].value : 0;
}

void tasks_report(const Tasks *tasks, Log *log) {
    printf("%-20s %9s  %-16s %10s %10s\n", "task", "examples", "metric", "value", "stderr");
    log_nest(log, "task_results", '{');
    double sum = 0;
    int count = 0;
    for (const Task *t = tasks->task; t < tasks->task + tasks->count; t++) {
        sum += report_task(t, log);
        count += t->score > 0;
    }
    log_unnest(log, '}');
    if (count) {
        log_real(log, "task_average", sum / count);
        printf("average of %-10d %11s  %-16s %10.4f\n", count, "", "", sum / count);
    }
    fflush(stdout);
}
