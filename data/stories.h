// stories.h: the built-in corpus, an endless stream of small English stories whose entropy is known
// exactly.
//
// Story number `index` of corpus `seed` is a pure function of the two: no file, no download, no
// state. It is drawn from a grammar of weighted choices (a probabilistic context-free grammar with
// memory). Every text has exactly one derivation, so -log p(text) is the sum of -log of the
// probabilities of its choices. The mean of that sum is the corpus's entropy, the lowest loss that
// any language model can reach; a model below it has seen the text before.
//
// A story is 300 to 600 bytes of printable ASCII, without newlines. In a stream of stories one NUL
// byte, the document separator, stands between two of them. It adds no entropy, because no story is
// the beginning of another. The mean story with its separator has 444 bytes and 106.4 nats: 0.24
// nats, or 0.35 bits, a byte. Writing runs at 25 to 35 MB/s.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STORIES_MAX_BYTES 1024

// Writes story `index` of corpus `seed` and its length; returns -log p in nats. capacity: bytes of
// text, at least STORIES_MAX_BYTES.
double stories_write(uint64_t seed, uint64_t index, char *text, size_t capacity, size_t *length);

// The seed of the corpus to train on (validation = 0) or to validate on (1), from a run's seed
// below 2^63. The map is one-to-one, so two runs or splits never share a corpus. Two random stories
// are equal with a probability of e^-70 or less.
uint64_t stories_seed(uint64_t seed, int validation);

// The grammar, for parsers of stories. Rule 0 is the whole story. stories.c explains the syntax of
// options and their weights.
typedef struct { const char *name; int count; const char *const *option; } StoryRule;
typedef struct { int count; const StoryRule *rule; } StoryGrammar;
extern const StoryGrammar STORY_GRAMMAR;

#ifdef __cplusplus
}
#endif
