// stories.h: the built-in corpus, an endless stream of small English stories whose entropy is known
// exactly.
//
// Story number `index` of corpus `seed` is a pure function of the two: no file, no download, no
// state. It is drawn from a grammar of weighted choices, and every text has exactly one derivation,
// so -log p(text) is the sum of -log of the choices made. The mean of that sum is the lowest loss
// any language model can reach on this corpus; a model below it has seen the text before.
//
// A story is 300 to 600 bytes of printable ASCII, without newlines. Whoever makes a stream of them
// puts one NUL byte, the document separator, after each story; it costs nothing to predict, for no
// story is the beginning of another. The mean story with its separator is 444 bytes and 106.4 nats:
// 0.24 nats, 0.35 bits, a byte. Writing runs at 25 to 35 MB/s.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STORIES_MAX_BYTES 1024

// Writes story `index` of corpus `seed` and its length; returns -log p in nats. capacity is at
// least STORIES_MAX_BYTES.
double stories_write(uint64_t seed, uint64_t index, char *text, size_t capacity, size_t *length);

// The corpus to train on (validation = 0) or to validate on (1), for a run's seed below 2^63. The
// map is one-to-one, so no two runs and no two splits ever share a corpus; that no story occurs in
// both is a matter of entropy: two stories are equal once in e^70 pairs or less.
uint64_t stories_seed(uint64_t seed, int validation);

// The grammar, for whoever wants to parse a story: rule 0 is the story. stories.c explains what an
// option says and what its weight is.
typedef struct { const char *name; int count; const char *const *option; } StoryRule;
typedef struct { int count; const StoryRule *rule; } StoryGrammar;
extern const StoryGrammar STORY_GRAMMAR;

#ifdef __cplusplus
}
#endif
