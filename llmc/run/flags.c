// flags.c: parsing and printing of the flags of flags.h. A flag's row is its only description; no
// function here knows a flag by name, except that --show may stand alone.
#include "flags.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <strings.h>
#include "json.h"

// The columns kind, default, low, high and choices of each type.
#define ROW_INT(def, low, high) INT, def, (double)(low), (double)(high), ""
#define ROW_NUMBER(def, low, high) NUMBER, def, low, high, ""
#define ROW_TEXT(def) TEXT, def, 0, 0, ""
#define ROW_CHOICE(def, choices) CHOICE, def, 0, 0, choices
#define ROW_SWITCH(def) SWITCH, def, 0, 0, "off|on"
#define FLAG_ROW(field, type, resume, help) \
    {#field, ROW_##type, resume, help, offsetof(Flags, field)},
const FlagRow FLAGS[FLAG_COUNT] = {FLAG_TABLE(FLAG_ROW)};

// kv_heads -> --kv-heads
void flag_name(char *name, size_t cap, const FlagRow *row) {
    check_format(name, cap, "--%s", row->field);
    for (char *c = name; *c; c++)
        if (*c == '_') *c = '-';
}

// The row of "--name"; NULL: there is none.
static const FlagRow *flag_find(const char *name) {
    char full[64];
    for (int i = 0; i < FLAG_COUNT; i++) {
        flag_name(full, sizeof full, &FLAGS[i]);
        if (!strcmp(full, name)) return &FLAGS[i];
    }
    return NULL;
}

// ---------------------------------------------------------------------------- suggestions

Nearest nearest_begin(const char *word) {
    Nearest n = {word, ((int)strlen(word) + 1) / 3, ""};
    return n;
}

static int least(int a, int b) { return a < b ? a : b; }

// Levenshtein distance: insertions, deletions and replacements that turn a into b.
static int nearest_edits(const char *a, const char *b) {
    int row[64], n = (int)strlen(b);          // row[j]: from a's first i letters to b's first j
    if (n > 63) return n;                     // longer than any name
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int diagonal = row[0];
        row[0] = i + 1;
        for (int j = 1; j <= n; j++) {
            bool differ = tolower((unsigned char)a[i]) != tolower((unsigned char)b[j - 1]);
            int best = least(diagonal + differ, least(row[j], row[j - 1]) + 1);
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}

// A nearer name replaces the ones found so far, an equally near one is added to the text.
void nearest_add(Nearest *n, const char *name, const char *shown) {
    size_t length = strlen(n->word), have;
    bool begins = length > 1 && !strncasecmp(name, n->word, length);
    int edits = begins ? 0 : nearest_edits(n->word, name);
    if (!length || edits > n->best) return;
    if (edits < n->best) *n->text = 0;
    n->best = edits;
    have = strlen(n->text);
    if (have + strlen(shown) + 24 > sizeof n->text) return;
    // "did you mean a? " becomes "did you mean a or b? ".
    if (have) check_format(n->text + have - 2, sizeof n->text - have, " or %s? ", shown);
    else check_format(n->text, sizeof n->text, "did you mean %s? ", shown);
}

// The known flags that an unknown one may be meant for.
static Nearest flag_nearest(const char *word) {
    char name[64];
    Nearest near = nearest_begin(word + strspn(word, "-"));
    for (int i = 0; i < FLAG_COUNT; i++) {
        flag_name(name, sizeof name, &FLAGS[i]);
        nearest_add(&near, name + 2, name);
    }
    return near;
}

// ---------------------------------------------------------------------------- values

// Choices are few and short: a walk along "a|b|c" needs no table.
int flag_choice(const char *choices, const char *value) {
    int index = 0;
    for (const char *c = choices;; index++) {
        size_t n = strcspn(c, "|");
        if (strlen(value) == n && !memcmp(c, value, n)) return index;
        if (!c[n]) return -1;
        c += n + 1;
    }
}

const char *flag_word(char *buf, size_t cap, const char *choices, int index) {
    for (; index > 0; index--) {
        choices += strcspn(choices, "|");
        if (!*choices++) return NULL;
    }
    return check_format(buf, cap, "%.*s", (int)strcspn(choices, "|"), choices);
}

// config.json is UTF-8: text in other bytes would come back from it changed.
static bool is_utf8(const char *text) {
    for (size_t left = strlen(text), length; left; text += length, left -= length) {
        length = utf8_length(text, left);
        if (!length) return false;
    }
    return true;
}

// The copy lives as long as the program: flags are read until its end.
static const char *read_text(const char *name, const FlagRow *row, const char *value) {
    CHECK(row->resume == ONCE || is_utf8(value),
          "%s: expected UTF-8, found other bytes, which config.json cannot hold\n"
          "  -> rename the file, or convert the text", name);
    const char *copy = strdup(value);
    CHECK(copy, "no memory for %s\n  -> a shorter text", name);
    return copy;
}

// The index of a choice; what is near to an unknown one is suggested.
static int read_choice(const char *name, const FlagRow *row, const char *value) {
    char word[64];
    int index = flag_choice(row->choices, value);
    Nearest near = nearest_begin(value);
    for (int i = 0; flag_word(word, sizeof word, row->choices, i); i++)
        nearest_add(&near, word, word);
    CHECK(index >= 0, "%s=%s: expected %s\n  -> %s%s", name, value, row->choices, near.text,
          row->help);
    return index;
}

// A finite number in the row's range, the whole text of it, and a whole number if the row is INT.
static double read_number(const char *name, const FlagRow *row, const char *value) {
    char *end;
    errno = 0;
    double number = strtod(value, &end);
    CHECK(*value && !*end && errno == 0 && isfinite(number),
          "%s=%s: expected a number from %g to %g\n  -> %s", name, value, row->low, row->high,
          row->help);
    CHECK(number >= row->low && number <= row->high,
          "%s=%s is out of range: expected %g to %g\n  -> %s", name, value, row->low, row->high,
          row->help);
    CHECK(row->kind == NUMBER || number == floor(number),
          "%s=%s: expected a whole number\n  -> %s", name, value, row->help);
    return number;
}

void flag_set(FlagSet *s, const FlagRow *row, const char *value, int by) {
    char name[64];
    void *at = (char *)&s->f + row->offset;
    flag_name(name, sizeof name, row);
    s->by[row - FLAGS] = (unsigned char)by;
    switch (row->kind) {                                   // the types of FIELD_* in flags.h
        case TEXT:   *(const char **)at = read_text(name, row, value); break;
        case INT:    *(int64_t *)at = (int64_t)read_number(name, row, value); break;
        case NUMBER: *(double *)at = read_number(name, row, value); break;
        default:     *(int *)at = read_choice(name, row, value);
    }
}

const char *flag_text(char *buf, size_t cap, const Flags *f, const FlagRow *row) {
    const void *at = (const char *)f + row->offset;
    switch (row->kind) {
        case TEXT:   return *(const char *const *)at;
        case INT:    return check_format(buf, cap, "%lld", (long long)*(const int64_t *)at);
        // 15 digits: 1e-3 prints as 0.001, and decimals of up to 15 digits read back the same.
        case NUMBER: return check_format(buf, cap, "%.15g", *(const double *)at);
        default:     return flag_word(buf, cap, row->choices, *(const int *)at);
    }
}

// ---------------------------------------------------------------------------- all flags

void flags_default(FlagSet *s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < FLAG_COUNT; i++) flag_set(s, &FLAGS[i], FLAGS[i].def, BY_DEFAULT);
}

// [value] is what the flag has without being given: the default, or that of --model.
void flags_help(const Flags *f, const char *only) {
    char name[64], value[64];
    int shown = 0;
    if (!only) printf("usage: ./train_gpt [--flag value | --flag=value]...      --model sets many "
                      "of them; --show prints the result\n"
                      "       ./train_gpt --help [FLAG] | --version\n"
                      "       mpirun -np 2 ./train_gpt ...      as root, or without slots: "
                      "README.md, \"Several processes\"\n\n");
    for (int i = 0; i < FLAG_COUNT; i++) {
        const FlagRow *row = &FLAGS[i];
        flag_name(name, sizeof name, row);
        if (only && strcmp(only, name) && strcmp(only, name + 2)) continue;
        printf("  %-20s %s%s%s%s [%s]\n", name, row->choices, *row->choices ? ": " : "", row->help,
               row->resume == FREE ? "; may change on resume" : "",
               flag_text(value, sizeof value, f, row));
        shown++;
    }
    CHECK(shown, "--help %s: expected a flag, found none of that name\n"
          "  -> %s./train_gpt --help lists all", only, flag_nearest(only).text);
}

// The value of a flag that stands alone, or NULL if it needs one.
static const char *flag_alone(const FlagRow *row) {
    if (row == &FLAGS[FLAG_show]) return "model";          // what most want to see
    return strncmp(row->choices, "off|on", 6) ? NULL : "on";
}

void flags_parse(FlagSet *s, int count, char *const *words, int by) {
    for (int i = 0; i < count; i++) {
        const char *word = words[i], *equals = strchr(word, '='), *value;
        char given[64];                                    // --flag of --flag=value
        snprintf(given, sizeof given, "%.*s", (int)strcspn(word, "="), word);
        const FlagRow *row = flag_find(given);
        CHECK(word[0] == '-', "expected a flag, found \"%s\"\n"
              "  -> a value with a space needs quotes; ./train_gpt --help lists the flags", word);
        CHECK(row, "unknown flag %s\n  -> %s./train_gpt --help lists all", word,
              flag_nearest(given).text);
        // A preset may set again what the macros in front of it have set; a user may not.
        CHECK(by != BY_USER || s->by[row - FLAGS] != BY_USER,
              "%s is given twice\n  -> give it once", word);
        if (equals) value = equals + 1;
        else if (i + 1 == count || !strncmp(words[i + 1], "--", 2)) value = flag_alone(row);
        else value = words[++i];
        CHECK(value, "%s needs a value\n  -> %s %s: %s", word, word,
              *row->choices ? row->choices : "VALUE", row->help);
        flag_set(s, row, value, by);
    }
}

// For presets and tests: words hold no spaces and need no quotes.
void flags_parse_text(FlagSet *s, const char *text, int by) {
    char copy[1024], *words[128], *save = NULL;
    int count = 0;
    check_format(copy, sizeof copy, "%s", text);
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save))
        words[count++] = w;
    flags_parse(s, count, words, by);
}
