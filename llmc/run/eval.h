// eval.h: benchmarks of a language model: multiple choice, last words and running text,
// scored as lm-evaluation-harness scores them (Gao et al. 2021).
//
// A task is one file (data/README.md draws it, data/get.py writes it): llm.c's evaluation format
// for examples, each a context with completions, or a shard for text. Let
//
//   log p(completion | context) = sum over its tokens of log softmax(logits)[token]
//
// in natural logarithms. The metrics:
//
//   choice  (several completions)  acc: the completion with the largest log p is the right one
//                                  acc_norm: the same by log p / length in characters
//   word    (one completion)       acc: greedy decoding gives it, token for token
//                                  perplexity: exp(-mean of log p over examples)
//   text    (a shard)              word_perplexity, byte_perplexity: exp(-sum of log p / words),
//                                  and / bytes of the text; bits_per_byte; token_perplexity
//
// Standard errors: of a mean, sample deviation / sqrt(n); of exp(-mean), that times the value.
// (lm-evaluation-harness bootstraps the latter and differs a little.)
//
// A context that does not fit into --seq loses its beginning. A text is read in windows of --seq
// tokens that predict each token once; the last window begins earlier, so that it too is full.
// The first token of a text follows the token that begins documents.
#pragma once
#include "log.h"
#include "train.h"

enum { EVAL_MAGIC = 20240522 };           // of llm.c's evaluation format
enum { EVAL_VERSION_16 = 1, EVAL_VERSION_32 = 2 };         // by the width of its numbers
enum { EVAL_START = 65535 };              // the token that begins an example
enum { TASK_CHOICE, TASK_WORD, TASK_TEXT };
enum { TASK_METRICS = 4 };                // at most, of one task

// One sequence to score: `tokens` tokens, of which the first `before` are context, the others the
// completion. Its last `scored` tokens count.
typedef struct {
    int64_t context, completion;          // index of the first token of each in the file
    int32_t before, tokens, scored;
    int32_t inputs;                       // tokens that the model reads: all but the last, or T
    int32_t example;                      // the example it belongs to,
    int32_t label;                        // and which completion of that example is right
    double length;                        // of the completion, for acc_norm
} TaskRow;

typedef struct {
    char name[256];
    int kind, width;                      // width: bytes of a token in the file
    int score;                            // 1 + the metric in the average of a suite; 0: none
    char *file;
    long long tokens;                     // in the file, after its header
    long long examples, rows;             // examples (or documents), and sequences
    long long cut;                        // sequences that are longer than --seq
    TaskRow *row;                         // [rows]
    TaskRow **order;                      // [rows] the longest first
    double *scores;                       // [rows, 2] log p, and whether greedy decoding gives it
    double words, bytes;                  // of a text
} Task;

typedef struct {
    Task *task;
    int count;
} Tasks;

typedef struct {
    const char *name;
    double value, deviation;              // deviation: the standard error; NAN: unknown
} TaskMetric;

// list: FILE[,FILE...]. A folder stands for its *.bin files in the order of their names, without
// tokenizer.bin. Only m.V, m.T and the tokenizer of the run are read.
void tasks_open(Tasks *tasks, const char *list, const Run *r);
void task_open(Task *t, const char *path, const Run *r);
void tasks_close(Tasks *tasks);
int64_t task_token(const Task *t, int64_t i);

// Fills t->scores; each process scores its share, in batches of r->micro sequences, which are
// gathered in r->inputs. False: a signal stopped it.
bool task_score(Task *t, Run *r);
int task_metrics(const Task *t, TaskMetric metrics[TASK_METRICS]);      // returns how many
// Prints the metrics as a table and logs them as the member "task_results"; then, as
// "task_average", the mean of the metrics that task files name (data/get.py spannorm and the like).
void tasks_report(const Tasks *tasks, Log *log);
// The completion with the largest log p, divided by its length if `norm`, of the example that
// starts at row `first`; ties go to the first. *next: the row where the next example starts.
int task_choice(const Task *t, int64_t first, bool norm, int64_t *next);
