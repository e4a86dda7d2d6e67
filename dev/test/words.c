// words.c: how many words of a text are words of the built-in corpus?   build/words PERCENT < text      fails below PERCENT
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include "../../data/stories.h"

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
            known += stories_is_word(word, n);
            n = 0;
        }
    } while (c != EOF);
    double percent = all ? 100.0 * known / all : 0;
    printf("%d of %d words are the corpus's: %.1f %%\n", known, all, percent);
    return percent < least;
}
