// tokenizer.h: GPT-2's tokenizer: UTF-8 text to tokens and back.
//
// The file is llm.c's gpt2_tokenizer.bin (version 2), followed by the classes of characters that
// encoding needs; llm.c's readers stop before them. Little-endian, as x86-64 and AArch64 are.
//
//   header, 256 x uint32    magic 20240328, version 2, number of tokens, end-of-text token,
//                           numbers of ranges of letters, of numbers and of spaces, then zeros
//   tokens, in id order     length (1 byte), bytes
//   ranges, uint32 pairs    first and last code point of each range of letters, numbers, spaces
//
// The ranges are those that \p{L}, \p{N} and \s match, so the file determines the version of
// Unicode. A file of llm.c has no ranges: it decodes and does not encode.
//
// Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2,
// and their code's pattern; tiktoken, whose ids these are; llm.c's train_gpt2.py (write_tokenizer).
// dev/test/test_tokenizer.py compares with tiktoken.
#pragma once
#include "util.h"

enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_VERSION = 2, TOKENIZER_HEADER_BYTES = 1024 };
enum { TOKENIZER_COUNT = 2, TOKENIZER_END, TOKENIZER_RANGES };  // words of the header
enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE };  // of characters

typedef struct {
    int32_t count, end;   // tokens; the end-of-text token
    bool encodes;         // the file has ranges
    uint8_t *file;  // [size] the whole file
    size_t size;
    uint32_t *where;  // [count] offset of each token's bytes in the file; the byte before: how many
    int32_t *slots;   // [mask + 1] hash table from bytes to token; -1: empty
    uint64_t mask;
    uint8_t *classes;  // [code points] CLASS_*
} Tokenizer;

// If the file is damaged, open ends the program; try_open writes the reason into error (ERROR_CAP
// bytes) and returns false, with nothing to close.
void tokenizer_open(const char *path, Tokenizer *t);
bool tokenizer_try_open(const char *path, Tokenizer *t, char *error);
void tokenizer_close(Tokenizer *t);

// The token of exactly these bytes, or -1. The end-of-text token is not text: it is never found.
int32_t tokenizer_find(const Tokenizer *t, const char *bytes, size_t n);

// The bytes of a token. A character may be split over several tokens.
const char *tokenizer_decode(const Tokenizer *t, int32_t token, size_t *n);

// Writes the tokens of n bytes of UTF-8 and returns their number; `tokens` has room for n. Several
// threads may share a tokenizer.
int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *tokens);

// Pre-tokenization: encoding first splits text into pieces by GPT-2's pattern. Returns the end of
// the piece that begins at `at`.
//   '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t tokenizer_piece(const Tokenizer *t, const char *text, size_t n, size_t at);
