// flags.c: parsing and printing of the flags of flags.h. A flag's row is its only description: no
// function here knows a flag by name. Errors name the flag and the value as typed, the range or the
// choices, and end in the flag's help or in a suggestion.
#include "flags.h"
#include <math.h>
#include <strings.h>

// The columns kind, default, low, high and choices of each type. A row without FREE or ONCE after
// its help ends there, and resume is 0, FIXED.
#define ROW_INT(def, low, high) INT, #def, low, high, ""
#define ROW_NUMBER(def, low, high) NUMBER, #def, low, high, ""
#define ROW_TEXT(def) TEXT, #def, 0, 0, ""
#define ROW_CHOICE(def, choices) CHOICE, #def, 0, 0, choices
#define ROW_SWITCH(def) SWITCH, #def, 0, 0, "off|on"
#define FLAG_ROW(field, type, ...) \
    {#field, ROW_##type, offsetof(Flags, field), .help = __VA_ARGS__},
const FlagRow FLAGS[FLAG_COUNT] = {FLAG_TABLE(FLAG_ROW)};

char *flag_name(char name[FLAG_CAP], const FlagRow *row) {
    check_format(name, FLAG_CAP, "--%s", row->field);
    for (char *c = name; *c; c++)
        if (*c == '_') *c = '-';
    return name;
}

// ---------------------------------------------------------------------------- suggestions

// About one edit for three letters: with more, a short word would resemble every short name.
Nearest nearest_begin(const char *word) {
    return (Nearest){word, ((int)strlen(word) + 1) / 3, ""};
}

// Levenshtein distance: insertions, deletions and replacements that turn a into b. One row of the
// table of distances is kept: row i follows from row i - 1 in place.
static int nearest_edits(const char *a, const char *b) {
    int row[64], n = strlen(b);               // row[j]: from a's first i letters to b's first j
    if (n > 63) return n;                     // longer than any name
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int diagonal = i;                     // row[j - 1] before letter i
        row[0] = i + 1;
        for (int j = 1; j <= n; j++) {
            int replaced = diagonal + (strncasecmp(&a[i], &b[j - 1], 1) != 0);
            int inserted = 1 + least(row[j], row[j - 1]);  // or deleted
            diagonal = row[j];
            row[j] = least(replaced, inserted);
        }
    }
    return row[n];
}

// A nearer name replaces those found so far; an equally near one is added to the text.
void nearest_add(Nearest *n, const char *name, const char *shown) {
    size_t length = strlen(n->word);
    bool begins = length > 1 && !strncasecmp(name, n->word, length);
    int edits = begins ? 0 : nearest_edits(n->word, name);
    if (!length || edits > n->best) return;
    if (edits < n->best) *n->text = 0;
    n->best = edits;
    size_t have = strlen(n->text);
    if (have) have -= 2;                                   // without its "? "
    if (have + strlen(shown) + 24 > sizeof n->text) return;
    // "did you mean a? " becomes "did you mean a or b? ".
    check_format(n->text + have, sizeof n->text - have, have ? " or %s? " : "did you mean %s? ",
                 shown);
}

static const char ALL[] = "./train_gpt --help lists all";  // the hint for an unknown flag

// Linear search: once for each word of a command line.
const FlagRow *flag_find(const char *name, const char *where, const char *hint) {
    char full[FLAG_CAP];
    Nearest near = nearest_begin(name);
    for (const FlagRow *row = FLAGS; row < FLAGS + FLAG_COUNT; row++) {
        flag_name(full, row);
        if (!strcmp(name, full + 2) || !strcmp(name, row->field)) return row;
        nearest_add(&near, full + 2, full);
    }
    CHECK(false, "%s: unknown flag %s\n  -> %s%s", where, name, near.text, hint);
}

// ---------------------------------------------------------------------------- values

// Steps over `index` words of "a|b|c".
const char *flag_word(char buf[FLAG_CAP], const char *choices, int index) {
    for (; index > 0; index--) {
        choices += strcspn(choices, "|");
        if (!*choices++) return NULL;
    }
    return check_format(buf, FLAG_CAP, "%.*s", (int)strcspn(choices, "|"), choices);
}

// config.json is UTF-8: text in other bytes would come back from it changed. The copy is never
// freed: flags are read until the program ends.
static const char *read_text(const char *name, const FlagRow *row, const char *value) {
    CHECK(row->resume == ONCE || !*utf8_end(value),
          "%s: expected UTF-8, found other bytes, which config.json cannot hold\n"
          "  -> rename the file, or convert the text", name);
    return strcpy(check_alloc(strlen(value) + 1, name), value);
}

// The index of a choice, which is the value in Flags. The hint is a similar choice, and the help.
static int read_choice(const char *name, const FlagRow *row, const char *value) {
    char word[FLAG_CAP];
    Nearest near = nearest_begin(value);
    for (int i = 0; flag_word(word, row->choices, i); i++) {
        if (!strcmp(word, value)) return i;
        nearest_add(&near, word, word);
    }
    CHECK(false, "%s=%s: expected %s\n  -> %s%s", name, value, row->choices, near.text, row->help);
}

// A finite number in the row's range; a whole number if the row is INT.
static double read_number(const char *name, const FlagRow *row, const char *value) {
    char *end;
    errno = 0;
    double number = strtod(value, &end);
    bool whole = row->kind == INT;
    CHECK(*value && !*end && errno == 0 && number >= row->low && number <= row->high &&
              (!whole || number == floor(number)),
          "%s=%s: expected a %snumber from %.10g to %.10g\n  -> %s", name, value,
          whole ? "whole " : "", row->low, row->high, row->help);
    return number;
}

// Writes the value into the field at the row's offset, in the field's type.
void flag_set(FlagSet *s, const FlagRow *row, const char *value, int by) {
    char name[FLAG_CAP];
    void *at = (char *)&s->f + row->offset;
    flag_name(name, row);
    s->by[row - FLAGS] = by;
    switch (row->kind) {                                   // the types of FIELD_* in flags.h
        case TEXT:   *(const char **)at = read_text(name, row, value); break;
        case INT:    *(long long *)at = read_number(name, row, value); break;
        case NUMBER: *(double *)at = read_number(name, row, value); break;
        default:     *(int *)at = read_choice(name, row, value);
    }
}

const char *flag_text(char buf[FLAG_CAP], const Flags *f, const FlagRow *row) {
    const void *at = (const char *)f + row->offset;
    switch (row->kind) {
        case TEXT:   return *(const char *const *)at;
        case INT:    return check_format(buf, FLAG_CAP, "%lld", *(const long long *)at);
        // 15 digits: 1e-3 prints as 0.001, and decimals of up to 15 digits read back the same.
        case NUMBER: return check_format(buf, FLAG_CAP, "%.15g", *(const double *)at);
        default:     return flag_word(buf, row->choices, *(const int *)at);
    }
}

// ---------------------------------------------------------------------------- all flags

// Defaults are parsed and checked like a command line.
void flags_default(FlagSet *s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < FLAG_COUNT; i++) flag_set(s, &FLAGS[i], FLAGS[i].def, BY_DEFAULT);
}

// Brackets show the default under the default --model.
void flags_help(const Flags *f, const char *only) {
    char name[FLAG_CAP], value[FLAG_CAP];
    const FlagRow *one = only ? flag_find(only + strspn(only, "-"), "--help", ALL) : NULL;
    if (!one) printf("usage: ./train_gpt [--flag value | --flag=value]...\n"
                     "       ./train_gpt --help [FLAG] | --version\n"
                     "       mpirun -np 2 ./train_gpt ...     (doc/processes.md)\n\n"
                     "Brackets: defaults; --model sets many flags, --show config prints them.\n\n");
    for (const FlagRow *row = FLAGS; row < FLAGS + FLAG_COUNT; row++) {
        if (one && row != one) continue;
        printf("  %-20s %s%s%s%s [%s]\n", flag_name(name, row), row->choices,
               *row->choices ? ": " : "", row->help,
               row->resume == FREE ? "; may change on resume" : "", flag_text(value, f, row));
    }
}

void flags_parse(FlagSet *s, int count, char *const *words, int by) {
    for (int i = 0; i < count; i++) {
        const char *word = words[i], *value = strchr(word, '=');
        char name[FLAG_CAP], alone[FLAG_CAP];
        CHECK(!strncmp(word, "--", 2), "expected a flag, found \"%s\"\n"
              "  -> a value with a space needs quotes; ./train_gpt --help lists the flags", word);
        // A longer name is cut, and is then unknown.
        snprintf(name, sizeof name, "%.*s", (int)strcspn(word + 2, "="), word + 2);
        const FlagRow *row = flag_find(name, "command line", ALL);
        // A preset may override flags of its family; a user may give each flag only once.
        CHECK(by != BY_USER || s->by[row - FLAGS] != BY_USER,
              "%s is given twice\n  -> give it once", word);
        // --flag=value, --flag value, or --flag alone.
        if (value) value++;
        else if (i + 1 < count && strncmp(words[i + 1], "--", 2)) value = words[++i];
        else if (!strncmp(row->choices, "off|", 4))
            value = flag_word(alone, row->choices, 1);
        CHECK(value, "%s needs a value\n  -> %s %s: %s", word, word,
              *row->choices ? row->choices : "VALUE", row->help);
        flag_set(s, row, value, by);
    }
}

// For presets and tests: values have no spaces, so there are no quotes.
void flags_parse_text(FlagSet *s, const char *text, int by) {
    char copy[1024], *words[128];                          // flag_set copies what it keeps
    int count = 0;
    check_format(copy, sizeof copy, "%s", text);
    for (char *w = strtok(copy, " "); w; w = strtok(NULL, " ")) words[count++] = w;
    flags_parse(s, count, words, by);
}
