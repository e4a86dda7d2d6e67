// tokenizer.h: byte-pair encoding (BPE): UTF-8 text to tokens and back, as GPT-2, Llama 3, Qwen,
// OLMo 2, SmolLM2 (bytes) and Llama 2, Mistral (characters, as SentencePiece has them) do it.
//
// Version 2 of the file is llm.c's gpt2_tokenizer.bin, followed by the classes of characters that
// encoding needs; llm.c's readers stop before them. Version 3 also states how text is cut, in
// words of the header that are 0 in version 2. data/tokenizer.py writes both. Little-endian, as
// x86-64 and AArch64 are.
//
//   header, 256 x uint32    magic 20240328, version, number of tokens, end-of-text token, ranges of
//                           each of the 5 classes, the words `how` of Tokenizer, then zeros
//   tokens, in id order     length (1 byte), bytes
//   ranges, uint32 pairs    first and last code point of each range of each class, in their order
//   order, uint32           ids of the tokens that merging makes, in the order of their ranks; no
//                           list (version 2): all, in the order of ids
//   names, uint32           ids of special tokens, which a text contains by their names
//   attached                bytes for other programs: the tokenizer's own files
//
// Three classes are what \p{L}, \p{N} and \s match, so the file determines the version of Unicode.
// Two are characters that the tokenizer's normalizer (NFC) may replace or sort: text that it may
// change is refused. A file without ranges, such as llm.c's, decodes but does not encode.
//
// Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2,
// and their code's pattern; Kudo and Richardson 2018, "SentencePiece"; tiktoken and Hugging Face's
// tokenizers, whose ids these are; llm.c's train_gpt2.py (write_tokenizer).
// dev/test/test_tokenizer.py compares with both libraries.
#pragma once
#include "util.h"

enum { TOKENIZER_MAGIC = 20240328, TOKENIZER_HEADER_BYTES = 1024 };
// Classes of characters. A tokenizer's normalizer, such as NFC, may replace one of CLASS_REPLACED,
// and swap two of CLASS_SORTED.
enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE, CLASS_REPLACED, CLASS_SORTED };
enum { TOKENIZER_COUNT = 2, TOKENIZER_END, TOKENIZER_RANGES, TOKENIZER_HOW = 9 };  // of the header
enum { CUT_GPT2, CUT_LLAMA3, CUT_NOT };
enum { PREFIX_NONE, PREFIX_FIRST, PREFIX_EACH };

typedef struct {
    int32_t count, end;   // tokens; the end-of-text token
    uint8_t *file;  // [size] the whole file
    size_t size;
    uint32_t *where;  // [count] offset of each token's bytes in the file; the byte before: how many
    int32_t *order;   // [rank] the tokens that merging makes
    int32_t *names;   // [how.names] special tokens, after those
    int32_t *slots;   // [mask + 1] hash table from bytes to rank; -1: empty
    uint64_t mask;
    uint8_t *classes;  // [code points] CLASS_*; NULL: a file without ranges, which decodes only
    struct {
        uint32_t cut;       // CUT_*: the pattern that cuts text into pieces
        uint32_t digits;    // most digits of a piece; 0: any number
        uint32_t prefix;    // PREFIX_*: a space before a text, or each text between special tokens
        uint32_t bytes;     // SentencePiece's token <0x00>, the first of 256; 0: none
        uint32_t order;     // tokens in the list
        uint32_t names;     // special tokens
        uint32_t attached;  // bytes attached
    } how;
} Tokenizer;

// False, with nothing to close: the file is damaged, and error (ERROR_CAP bytes) says how.
bool tokenizer_open(const char *path, Tokenizer *t, char *error);
void tokenizer_close(Tokenizer *t);

// The token that merging makes from exactly these bytes, or -1. The end-of-text token is not one.
int32_t tokenizer_find(const Tokenizer *t, const char *bytes, size_t n);

// The bytes of a token. A character may be split over several tokens.
const char *tokenizer_decode(const Tokenizer *t, int32_t token, size_t *n);

// Writes the tokens of n bytes of UTF-8 and returns their number; `tokens` has room for
// 2 n + 1: a space may come before words between special tokens. Several threads may share a
// tokenizer.
int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *tokens);

// Pre-tokenization: encoding first splits text into pieces by a pattern. Returns the end of the
// piece that begins at `at`. With D for \p{N}+, \p{N} or \p{N}{1,3}, the word `digits`:
//   GPT-2    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//            if digits is not 0, the text is first cut around every run of D
//   Llama 3  '(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|D| ?[^\s\p{L}\p{N}]+[\r\n]*|
//            \s*[\r\n]+|\s+(?!\S)|\s+
size_t tokenizer_piece(const Tokenizer *t, const char *text, size_t n, size_t at);
