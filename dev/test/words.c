// words.c: how many words of a text are words of the built-in corpus?
//
//   build/words PERCENT < text    fails below PERCENT
#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "../../data/stories.h"

// Whether a word is one of the grammar's options, outside of slots.
static bool is_word(const char *word, size_t n) {
    for (const StoryRule *rule = STORY_GRAMMAR.rule;
         rule < STORY_GRAMMAR.rule + STORY_GRAMMAR.count; rule++)
        for (int i = 0; i < rule->count; i++)
            for (const char *p = rule->option[i]; *p;) {
                size_t length = 0;
                if (*p == '{') p += strcspn(p, "}");
                while (isalpha((unsigned char)p[length])) length++;
                if (length == n && !strncasecmp(p, word, n)) return true;
                p += length ? length : 1;
            }
    return false;
}

int main(int argc, char **argv) {
    char word[64];
    size_t n = 0;
    int all = 0, known = 0, c;
    double least = argc > 1 ? atof(argv[1]) : 0;
    do {
        c = getchar();
        if (c != EOF && isalpha(c) && n < sizeof word) word[n++] = (char)c;
        else if (n) {
            all++;
            known += is_word(word, n);
            n = 0;
        }
    } while (c != EOF);
    double percent = all ? 100.0 * known / all : 0;
    printf("%d of %d words are the corpus's: %.1f %%\n", known, all, percent);
    return percent < least;
}
