// sample.c: generated text. The model reads the prompt in one pass (prefill), then one token at a
// time (decode) with a KV cache.
#include "run.h"
#include <unistd.h>

// Inverse transform sampling: adds up probabilities until the sum passes u. The largest logit is
// subtracted first, so exp cannot overflow.
int sample_token(const double *logits, int V, double temperature, int64_t k, double u,
                 double *weights) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    if (temperature == 0) return best;
    double smallest = -INFINITY, sum = 0;
    // Top-k: logits below the k-th largest get no weight. The largest are kept in order; the last
    // place is for one that falls out.
    if (k > 0 && k < V) {
        double *sorted = weights + V;             // [k + 1]
        for (int i = 0; i < k; i++) sorted[i] = -INFINITY;
        for (int i = 0; i < V; i++) {
            int at = k;
            for (; at > 0 && sorted[at - 1] < logits[i]; at--) sorted[at] = sorted[at - 1];
            sorted[at] = logits[i];
        }
        smallest = sorted[k - 1];
    }
    for (int i = 0; i < V; i++) {
        weights[i] = logits[i] < smallest ? 0 : exp((logits[i] - logits[best]) / temperature);
        sum += weights[i];
    }
    for (int i = 0; i < V; i++) {
        u -= weights[i] / sum;
        if (u < 0) return i;
    }
    return best;                                  // rounding left u just above the last weight
}

// Prints text with its control characters escaped (text_escape).
static void print_text(const char *text, size_t n) {
    char shown[5];                                // an escaped byte takes four
    for (size_t i = 0; i < n; i++) fputs(text_escape(shown, sizeof shown, text + i, 1), stdout);
}

// Prints a token: a separator as an empty line, a token without text as its number.
static void print_token(const Run *r, int32_t token) {
    size_t n;
    if (token == r->tokenizer.end) printf("\n\n");
    else if (token < r->tokenizer.count) {
        const char *bytes = tokenizer_decode(&r->tokenizer, token, &n);
        print_text(bytes, n);
    } else if (r->m.V == CORPUS_VOCAB) {
        char byte = token;
        print_text(&byte, 1);
    } else printf("%d ", token);
    fflush(stdout);
}

// The separator and the prompt as tokens; returns how many.
static int64_t encode_prompt(const Run *r, const char *prompt, size_t bytes, int32_t *tokens) {
    tokens[0] = r->tokenizer.end;
    if (r->tokenizer.count && bytes)
        return 1 + tokenizer_encode(&r->tokenizer, prompt, bytes, tokens + 1);
    for (size_t i = 0; i < bytes; i++) tokens[1 + i] = (uint8_t)prompt[i];
    return 1 + bytes;
}

// Prints a prompt and f->sample tokens after it. If the text outgrows T tokens, the KV cache is
// cleared and filled again with its last T/2 tokens. number: of the prompt; each has its own random
// numbers.
//
// The KV cache holds tokens [from, read) of the text [0, n). A round reads [read, n), which is the
// prompt (prefill) or a single token (decode), and draws token n from the logits.
static void sample_text(Run *r, const char *prompt, size_t bytes, int64_t number) {
    const Flags *f = r->f;
    long long V = r->m.V, T = r->m.T, from = 0, read = 0, counts[2] = {0};
    double seconds[2] = {0};                      // of prefill, of decode
    int32_t *tokens = check_alloc((2 + 2 * bytes + f->sample) * sizeof *tokens, "a sample");
    double *logits = check_alloc(3 * V * sizeof *logits, "logits");
    uint64_t key = rand_key(f->seed, "sample", r->step + number);
    long long begin = encode_prompt(r, prompt, bytes, tokens);
    if (begin > T)
        printf("note: a prompt of %lld tokens, the model reads %lld at once: it sees the last "
               "%lld\n", begin - 1, T, CEIL_DIV(T, 2));
    print_text(prompt, bytes);
    for (long long n = begin; n < begin + f->sample; n++) {
        double start = clock_seconds(), sum = 0;
        if (n - from > T) from = read = n - CEIL_DIV(T, 2);
        int decode = read > from;
        r->t->decode(r->gpt, tokens + read, n - read, read - from);
        const void *row = r->t->logits(r->gpt, 0);
        for (int i = 0; i < V; i++) sum += logits[i] = real_get(row, r->t->element, i);
        CHECK(isfinite(sum),              // a NaN or an infinity stays in a sum
              "the model's logits are not finite\n  -> sample from an earlier checkpoint");
        tokens[n] = sample_token(logits, V, f->temperature, f->top_k, rand_uniform(key, n),
                                 logits + V);
        counts[decode] += n - read;
        seconds[decode] += clock_seconds() - start;
        read = n;
        print_token(r, tokens[n]);
    }
    printf("\nprefill %lld tokens at %.0f tok/s", counts[0], counts[0] / seconds[0]);
    if (counts[1]) printf(", decode %lld at %.0f tok/s", counts[1], counts[1] / seconds[1]);
    printf("\n");
    free(tokens);
    free(logits);
}

// --prompt -: one prompt per line of standard input, a pipe or a terminal.
static void sample_lines(Run *r) {
    char *line = NULL;
    size_t cap = 0;
    for (int64_t number = 0;; number++) {
        if (isatty(STDIN_FILENO)) printf("> ");
        fflush(stdout);
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0) break;
        sample_text(r, line, n - (line[n - 1] == '\n'), number);
    }
    CHECK(!ferror(stdin), "cannot read prompts from standard input: %m\n  -> --prompt TEXT");
    free(line);
}

// After training, unless --sample 0; with --eval only if the user asks. Process 0 alone prints.
void sample(Run *r) {
    bool wanted = r->f->sample && (!r->f->eval || r->set.by[FLAG_sample] == BY_USER);
    if (!wanted || r->comm.rank) return;
    printf("\n");
    if (!strcmp(r->f->prompt, "-")) sample_lines(r);
    else sample_text(r, r->f->prompt, strlen(r->f->prompt), 0);
}
