// eval.h: what a model knows: multiple choice, last words and text, scored as lm-evaluation-harness scores them (Gao et al. 2021), without examples in the prompt.
//
// A task is a file (data/README.md draws it, data/get.py writes it): llm.c's evaluation format for examples, each a context with completions, or a shard for text.
// With log p(completion | context) = sum over its tokens of log softmax(logits)[token], natural logarithms:
//
//   choice  (several completions)  acc: the completion of the largest log p is the right one; acc_norm: of the largest log p / its length in characters
//   word    (one completion)       acc: each of its tokens is the likeliest where it stands; perplexity: e^-mean over examples of log p
//   text    (a shard)              word_perplexity, byte_perplexity: e^-(sum of log p) / words, bytes of the text; bits_per_byte; token_perplexity
//
// stderr: of a mean, sample deviation / sqrt(n); of e^-mean that times e^-mean (lm-evaluation-harness draws samples for the latter, and differs a little).
// A context that --seq has no room for is cut on the left. A text is read in windows of --seq tokens, each of them predicted once; the last
// window reaches back as far as it can. Before a text's first token stands the token that begins documents.
#pragma once
#include <dirent.h>
#include <sys/stat.h>
#include "data.h"
#include "../exp.h"
#include "trainer.h"
#include "log.h"
#include "tokenizer.h"

enum { EVAL_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_START = 65535 };
enum { TASK_CHOICE, TASK_WORD, TASK_TEXT };
enum { TASK_METRICS = 4, TASK_STEP = 32 };                 // TASK_STEP: sequences of a batch are padded to a multiple of it, so that few lengths occur

// A sequence: tokens context .. context+before-1 of the file, and completion .. completion+after-1 behind them, of which the last `scored` count.
// label: the completion of its example that is right.
typedef struct { int64_t context, completion; int32_t before, after, scored, example, label; double length; } TaskRow;

typedef struct Task {
    char name[64];
    int kind, width;                   // bytes of a token in the file
    char *file;
    int64_t tokens;                    // of the file behind its header; of examples everything is counted in them
    int64_t examples, rows, cut;       // examples, or documents; sequences; and how many of them are cut
    TaskRow *row;
    int64_t *order;                    // rows, the longest first
    double *scores;                    // of each row: log p, and whether each of its tokens is the likeliest
    double words, bytes;               // of a text
} Task;

typedef struct Tasks { Task *task; int count; } Tasks;
typedef struct TaskMetric { const char *name; double value, deviation; } TaskMetric;       // deviation: the standard error, NAN: none is known

// What reads a file of tasks: the model's vocabulary and longest sequence, and its tokenizer (count 0: none).
typedef struct TaskReader { int V, T; const Tokenizer *tokenizer; } TaskReader;

// ------------------------------------------------------------------------------------------------------------------ files

static inline int64_t task_token(const Task *t, int64_t i) {
    const void *tokens = t->file + SHARD_HEADER_BYTES;
    return t->width == 2 ? ((const uint16_t *)tokens)[i] : ((const uint32_t *)tokens)[i];
}

static inline void task_check_tokens(const Task *t, const char *path, int64_t at, int64_t count, int V) {
    for (int64_t i = at; i < at + count; i++)
        CHECK(task_token(t, i) < V, "%s: token %lld at position %lld, expected tokens below %d, the model's vocabulary\n  -> a file of the model's own tokenizer", path, (long long)task_token(t, i), (long long)i, V);
}

static inline TaskRow *task_add_row(Task *t) {
    int64_t n = t->rows++;
    if ((n & (n - 1)) == 0) t->row = (TaskRow *)realloc(t->row, (size_t)(n ? 2 * n : 1) * sizeof *t->row);
    CHECK(t->row, "no memory for %lld completions\n  -> a smaller file", (long long)n);
    return &t->row[n];
}

// What lm-evaluation-harness divides by where the file does not say: characters, without the space that a completion begins with; without a tokenizer tokens, as llm.c does.
static inline double task_length(const Task *t, const TaskRow *row, const Tokenizer *tokenizer) {
    double length = 0;
    for (int64_t i = row->completion + row->after - row->scored; i < row->completion + row->after; i++) {
        size_t n = 1;
        const char *bytes = task_token(t, i) < tokenizer->count ? tokenizer_decode(tokenizer, (int32_t)task_token(t, i), &n) : "x";
        bool space = n && length == 0 && *bytes == ' ' && i == row->completion + row->after - row->scored;
        for (size_t k = space; k < n; k++) length += ((unsigned char)bytes[k] & 0xC0) != 0x80;
    }
    return length;
}

// Adds the completions of an example; returns where it ends. Behind the last one the file may say each one's length in characters, and how many tokens
// at its beginning are context of its own.
static inline int64_t task_read_example(Task *t, const char *path, int64_t at, const TaskReader *r) {
    int64_t first = t->rows, example = t->examples++;
    CHECK(t->tokens - at >= 6 && task_token(t, at) == EVAL_START, "%s: expected example %lld to begin with %d, found %s\n  -> write or download this file again", path, (long long)example, EVAL_START,
          t->tokens - at >= 6 ? "something else" : "the end of the file");
    int64_t bytes = task_token(t, at + 1), index = task_token(t, at + 2), label = task_token(t, at + 3), choices = task_token(t, at + 4), end = at + bytes / 2, before = task_token(t, at + 5);
    if (!example) t->kind = choices == 1 ? TASK_WORD : TASK_CHOICE;
    CHECK((choices == 1) == (t->kind == TASK_WORD), "%s: example %lld has %lld completions, and the ones before it %s\n  -> a file for each kind", path, (long long)example, (long long)choices, t->kind ? "one" : "several");
    CHECK(bytes >= 12 && bytes % 2 == 0 && end <= t->tokens && index == (example & 0xFFFF) && label < choices,
          "%s: example %lld says that it has number %lld, %lld bytes, %lld completions and that number %lld is right, which cannot be\n  -> write or download this file again",
          path, (long long)example, (long long)index, (long long)bytes, (long long)choices, (long long)label);
    at += 6;
    int64_t context = at;
    at += before;
    for (int64_t i = 0; i < choices; i++) {
        int64_t after = at < end ? task_token(t, at) : 0;
        CHECK(after > 0 && at + 1 + after <= end, "%s: example %lld ends within its completion %lld, or that one is empty\n  -> write or download this file again", path, (long long)example, (long long)i);
        TaskRow row = {context, at + 1, (int32_t)before, (int32_t)after, (int32_t)after, (int32_t)example, (int32_t)label, 0};
        *task_add_row(t) = row;
        task_check_tokens(t, path, at + 1, after, r->V);
        at += 1 + after;
    }
    CHECK(at == end || at + 2 * choices == end, "%s: example %lld has %lld bytes, expected %lld for its completions, or %lld more\n  -> write or download this file again", path, (long long)example,
          (long long)bytes, (long long)(bytes - 2 * (end - at)), (long long)(4 * choices));
    task_check_tokens(t, path, context, before, r->V);
    for (int64_t i = 0; i < choices; i++) {
        TaskRow *row = &t->row[first + i];
        if (at < end) row->scored -= (int32_t)task_token(t, at + choices + i);
        CHECK(row->scored > 0 && row->before + row->after > row->scored, "%s: completion %lld of example %lld has %d tokens to score and %d before them, expected at least one of each\n  -> write or download this file again",
              path, (long long)i, (long long)example, row->scored, row->before + row->after - row->scored);
        CHECK(row->scored <= r->T, "%s: a completion of %d tokens is longer than --seq %d\n  -> a larger --seq, or without this file", path, row->scored, r->T);
        row->length = at < end ? (double)task_token(t, at + i) : task_length(t, row, r->tokenizer);
    }
    if (at == end && !r->tokenizer->count && !example) printf("note: %s does not say the lengths of completions, and there is no tokenizer.bin: acc_norm divides by tokens, as llm.c does\n  -> --tokenizer FILE\n", t->name);
    return end;
}

static inline void task_read_examples(Task *t, const char *path, size_t size, const TaskReader *r) {
    int32_t head[SHARD_HEADER_BYTES / 4];
    memcpy(head, t->file, sizeof head);
    int64_t at = 0, longest = 0;
    t->width = 2;
    t->tokens = (int64_t)(size - SHARD_HEADER_BYTES) / 2;
    CHECK(head[1] == EVAL_VERSION && head[2] > 0 && size % 2 == 0, "%s: version %d, %d examples, %zu bytes: expected version %d, at least one example and an even number of bytes\n  -> write or download this file again",
          path, head[1], head[2], size, EVAL_VERSION);
    for (int32_t i = 0; i < head[2]; i++) {
        int64_t begin = at;
        at = task_read_example(t, path, at, r);
        longest = at - begin > longest ? at - begin : longest;
    }
    CHECK(at == t->tokens && 2 * longest == head[3], "%s: %lld bytes follow its %d examples, and the longest has %lld bytes where the header says %d\n  -> write or download this file again", path,
          (long long)(2 * (t->tokens - at)), head[2], (long long)(2 * longest), head[3]);
}

// The windows of a document that begins at `at` and has n tokens behind the one that begins it.
static inline void task_read_document(Task *t, int64_t at, int64_t n, int T) {
    for (int64_t done = 0; done < n;) {
        int64_t most = n - done < T ? n - done : T, inputs = done ? T : most;
        TaskRow row = {0, at + done + most - inputs, 0, (int32_t)inputs + 1, (int32_t)most, (int32_t)t->examples, 0, 0};
        *task_add_row(t) = row;
        done += most;
    }
    t->examples += n > 0;
}

static inline void task_read_text(Task *t, const char *path, const TaskReader *r) {
    DataLoader shard;
    int32_t head[SHARD_HEADER_BYTES / 4];
    loader_open(&shard, path, "val", 1, 0, 0);             // its header holds
    t->kind = TASK_TEXT;
    t->width = shard.width;
    t->tokens = shard.tokens;
    loader_close(&shard);
    memcpy(head, t->file, sizeof head);
    CHECK(head[SHARD_BYTES] >= 0 && head[SHARD_WORDS] >= 0, "%s: a text of %d bytes and %d words\n  -> write this shard again", path, head[SHARD_BYTES], head[SHARD_WORDS]);
    t->bytes = head[SHARD_BYTES];
    t->words = head[SHARD_WORDS];
    task_check_tokens(t, path, 0, t->tokens, r->V);
    for (int64_t begin = 0, i = 1; i <= t->tokens; i++)
        if (i == t->tokens || task_token(t, i) == task_token(t, 0)) {
            task_read_document(t, begin, i - begin - 1, r->T);
            begin = i;
        }
    CHECK(t->rows, "%s: expected a text, found tokens that begin documents and nothing else\n  -> another shard", path);
}

// ------------------------------------------------------------------------------------------------------------------ tasks

static inline int task_inputs(const TaskRow *row, int T) { return row->before + row->after > T ? T : row->before + row->after - 1; }

static inline int task_order(const void *a, const void *b) { return (*(const int64_t *)a < *(const int64_t *)b) - (*(const int64_t *)a > *(const int64_t *)b); }

static inline void task_open(Task *t, const char *path, const TaskReader *r) {
    const char *base = strrchr(path, '/') ? strrchr(path, '/') + 1 : path, *end = strstr(base, "_val.bin") ? strstr(base, "_val.bin") : strstr(base, ".bin");
    int32_t magic = 0;
    size_t size;
    memset(t, 0, sizeof *t);
    check_format(t->name, sizeof t->name, "%.*s", end ? (int)(end - base) : (int)strlen(base), base);
    t->file = file_read(path, INT64_MAX, &size);
    CHECK(t->file, "cannot read %s: %s\n  -> --tasks FILE,... or the folder of such files; python3 data/get.py tasks writes them", path, strerror(errno));
    if (size >= SHARD_HEADER_BYTES) memcpy(&magic, t->file, sizeof magic);
    CHECK(magic == EVAL_MAGIC || magic == SHARD_MAGIC_16 || magic == SHARD_MAGIC_32, "%s is no file of tasks: expected a header of %d bytes with magic %d, or a shard, found %zu bytes with magic %d\n  -> python3 data/get.py tasks writes them",
          path, SHARD_HEADER_BYTES, EVAL_MAGIC, size, magic);
    if (magic == EVAL_MAGIC) task_read_examples(t, path, size, r);
    else task_read_text(t, path, r);
    t->order = (int64_t *)check_alloc((size_t)t->rows * sizeof *t->order, "the order of a task");
    t->scores = (double *)check_alloc(2 * (size_t)t->rows * sizeof *t->scores, "the scores of a task");
    for (int64_t i = 0; i < t->rows; i++) {
        t->cut += t->kind != TASK_TEXT && t->row[i].before + t->row[i].after > r->T + 1;
        t->order[i] = (int64_t)task_inputs(&t->row[i], r->T) << 32 | i;
    }
    qsort(t->order, (size_t)t->rows, sizeof *t->order, task_order);
    if (t->cut) printf("note: %lld of the %lld sequences of %s are longer than --seq %d: what they begin with is cut\n", (long long)t->cut, (long long)t->rows, t->name, r->T);
}

static inline void tasks_add(Tasks *tasks, const char *path, const TaskReader *r) {
    tasks->task = (Task *)realloc(tasks->task, (size_t)(tasks->count + 1) * sizeof *tasks->task);
    CHECK(tasks->task, "no memory for %d tasks\n  -> fewer --tasks", tasks->count + 1);
    Task *t = &tasks->task[tasks->count++];
    task_open(t, path, r);
    for (Task *other = tasks->task; other < t; other++) CHECK(strcmp(other->name, t->name), "%s: another task is named %s too\n  -> rename the file", path, t->name);
}

// FILE[,FILE...]; a folder stands for the *.bin in it, but for its tokenizer.bin, in the order of their names.
static inline void tasks_open(Tasks *tasks, const char *list, const TaskReader *r) {
    char item[PATH_CAP], path[PATH_CAP];
    memset(tasks, 0, sizeof *tasks);
    for (size_t n; *list; list += n + (list[n] == ',')) {
        struct dirent **entries;
        n = strcspn(list, ",");
        check_format(item, sizeof item, "%.*s", (int)n, list);
        int found = scandir(item, &entries, NULL, shard_order), before = tasks->count;
        if (found < 0) tasks_add(tasks, item, r);
        for (int i = 0; i < found; i++) {
            const char *name = entries[i]->d_name;
            if (name[0] != '.' && shard_named(name) && strcmp(name, "tokenizer.bin")) tasks_add(tasks, check_format(path, sizeof path, "%s/%s", item, name), r);
            free(entries[i]);
        }
        if (found >= 0) free(entries);
        CHECK(tasks->count > before, "%s: expected files of tasks in that folder, found none\n  -> python3 data/get.py tasks writes them", item);
    }
}

static inline void tasks_close(Tasks *tasks) {
    for (Task *t = tasks->task; t < tasks->task + tasks->count; t++) {
        free(t->file);
        free(t->row);
        free(t->order);
        free(t->scores);
    }
    free(tasks->task);
}

// ------------------------------------------------------------------------------------------------------------------ scores

// log softmax(z)[target] of V floats or doubles; *likeliest becomes 0 where a value is above the target's.
static inline double task_log_softmax(const void *logits, size_t element, int V, int64_t target, double *likeliest) {
    const float *z = (const float *)logits;
    const double *exact = (const double *)logits;
    bool single = element == sizeof(float);
    double max = -INFINITY, total = 0, chosen = single ? z[target] : exact[target];
    for (int i = 0; i < V && !single; i++) max = exact[i] > max ? exact[i] : max;
    for (int i = 0; i < V && !single; i++) total += exp(exact[i] - max);
    if (single) {
        float most = z[0], sum = 0;
#pragma omp simd reduction(max : most)
        for (int i = 0; i < V; i++) most = z[i] > most ? z[i] : most;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < V; i++) sum += exp_float(z[i] - most);
        max = most, total = sum;
    }
    if (!(chosen >= max)) *likeliest = 0;
    return chosen - max - log(total);
}

// How a task is scored: by batches of at most B sequences of T tokens, which lie in inputs.
typedef struct TaskScorer { const Trainer *t; Gpt *gpt; Comm *comm; int B, T, V; int32_t *inputs; } TaskScorer;

// The sequences order[first .. first+n-1], side by side; the padding behind the shorter ones changes nothing before it.
static inline void task_score_batch(Task *t, const TaskScorer *s, int64_t first, int n) {
    int longest = (int)(t->order[first] >> 32), T = CEIL_DIV(longest, TASK_STEP) * TASK_STEP;
    if (T > s->T) T = s->T;
    memset(s->inputs, 0, (size_t)n * (size_t)T * sizeof *s->inputs);
    for (int b = 0; b < n; b++) {
        const TaskRow *row = &t->row[(uint32_t)t->order[first + b]];
        int inputs = task_inputs(row, s->T), skip = row->before + row->after - 1 - inputs;
        for (int i = 0; i < inputs; i++) s->inputs[b * T + i] = (int32_t)task_token(t, i + skip < row->before ? row->context + i + skip : row->completion + i + skip - row->before);
    }
    s->t->forward(s->gpt, s->inputs, NULL, n, T);
    for (int b = 0; b < n; b++) {
        int64_t index = (uint32_t)t->order[first + b];
        const TaskRow *row = &t->row[index];
        double *score = t->scores + 2 * index;
        score[1] = 1;
        for (int k = row->scored; k > 0; k--)
            score[0] += task_log_softmax(s->t->logits(s->gpt, (int64_t)b * T + task_inputs(row, s->T) - k), s->t->element, s->V, task_token(t, row->completion + row->after - k), &score[1]);
    }
}

// Fills t->scores. Each process takes its share of the batches. False: a signal stopped it.
static inline bool task_score(Task *t, const TaskScorer *s) {
    int64_t step = (int64_t)s->B * comm_size(s->comm);
    double begin = clock_seconds(), said = begin, all = 0, done = 0;
    for (int64_t i = 0; i < t->rows; i++) all += (double)(t->order[i] >> 32);
    memset(t->scores, 0, 2 * (size_t)t->rows * sizeof *t->scores);
    for (int64_t group = 0; group < t->rows; group += step) {
        int64_t first = group + (int64_t)s->B * comm_rank(s->comm), left = t->rows - first;
        if (comm_signal(s->comm)) return false;
        if (left > 0) task_score_batch(t, s, first, left < s->B ? (int)left : s->B);
        for (int64_t i = group; i < group + step && i < t->rows; i++) done += (double)(t->order[i] >> 32);
        double now = clock_seconds();
        char eta[32];
        if (now - said < 5) continue;
        printf("%s: %.0f %%, ETA %s\n", t->name, 100 * done / all, log_duration(eta, sizeof eta, (now - begin) * (all - done) / done));
        fflush(stdout);
        said = now;
    }
    comm_combine(s->comm, t->scores, 2 * t->rows, COMM_SUM);
    return true;
}

// Mean of n values with its standard error; or e^-mean.
static inline TaskMetric task_mean(const char *name, const double *x, int64_t n, bool power) {
    double mean = 0, square = 0;
    for (int64_t i = 0; i < n; i++) mean += x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
    double value = power ? exp(-mean) : mean, deviation = sqrt(square / (double)(n - 1) / (double)n);
    TaskMetric m = {name, value, power ? value * deviation : deviation};
    return m;
}

// The completion of an example, whose rows begin at `first`, that has the largest log p, or with `norm` the largest by length: the first of equals. *next: where the next example begins.
static inline int task_choice(const Task *t, int64_t first, bool norm, int64_t *next) {
    double most = -INFINITY;
    int best = 0;
    for (*next = first; *next < t->rows && t->row[*next].example == t->row[first].example; ++*next) {
        double score = t->scores[2 * *next] / (norm ? t->row[*next].length : 1);
        if (score > most) most = score, best = (int)(*next - first);
    }
    return best;
}

// The metrics of a task that has been scored; returns how many.
static inline int task_metrics(const Task *t, TaskMetric metrics[TASK_METRICS]) {
    double *x = (double *)check_alloc((size_t)t->rows * sizeof *x, "the results of a task"), sum = 0, tokens = 0;
    int count = 0;
    for (int second = 0; second < 2 && t->kind != TASK_TEXT; second++) {
        for (int64_t at = 0, next; at < t->rows; at = next)
            if (t->kind == TASK_CHOICE) x[t->row[at].example] = task_choice(t, at, second, &next) == t->row[at].label;
            else x[at] = t->scores[2 * at + !second], next = at + 1;
        metrics[count++] = task_mean(!second ? "acc" : t->kind == TASK_CHOICE ? "acc_norm" : "perplexity", x, t->examples, second && t->kind == TASK_WORD);
    }
    for (int64_t i = 0; i < t->rows; i++) {
        sum += t->scores[2 * i];
        tokens += t->row[i].scored;
    }
    const TaskMetric text[TASK_METRICS] = {{"word_perplexity", exp(-sum / t->words), NAN}, {"byte_perplexity", exp(-sum / t->bytes), NAN}, {"bits_per_byte", -sum / t->bytes / log(2), NAN},
                                           {"token_perplexity", exp(-sum / tokens), NAN}};
    for (int i = 0; i < TASK_METRICS && t->kind == TASK_TEXT; i++)
        if (i == 3 || (i ? t->bytes : t->words) > 0) metrics[count++] = text[i];
    free(x);
    return count;
}

// The scored tasks as a table, and as the member "task_results" of a line of the log.
static inline void tasks_report(const Tasks *tasks, Log *log) {
    printf("%-20s %9s  %-16s %10s %10s\n", "task", "examples", "metric", "value", "stderr");
    log_nest(log, "task_results", '{');
    for (const Task *t = tasks->task; t < tasks->task + tasks->count; t++) {
        TaskMetric metrics[TASK_METRICS];
        int count = task_metrics(t, metrics);
        log_nest(log, t->name, '{');
        log_int(log, "examples", t->examples);
        for (const TaskMetric *m = metrics; m < metrics + count; m++) {
            char name[32];
            log_real(log, m->name, m->value);
            if (!isnan(m->deviation)) log_real(log, check_format(name, sizeof name, "%s_stderr", m->name), m->deviation);
            if (m == metrics) printf("%-20s %9lld", t->name, (long long)t->examples);
            else printf("%-20s %9s", "", "");
            printf("  %-16s %10.4f", m->name, m->value);
            if (!isnan(m->deviation)) printf(" %10.4f", m->deviation);
            printf("\n");
        }
        log_unnest(log, '}');
    }
    log_unnest(log, '}');
    fflush(stdout);
}
