// test_stories.c: the built-in corpus against an independent reader of its grammar.
//
// The generator draws; this parser reads. It shares the tables with stories.c and nothing else: it
// finds all derivations of a text by backtracking, so that exactly one derivation and an equal -log
// p are facts about the corpus and not about the generator.
#include "test.h"
#include "../../data/stories.h"
#include "../../llmc/run/util.h"
#include "../../llmc/rand.h"
#include <ctype.h>

#define RULES_MAX 256
#define OPTIONS_MAX 64
#define TRAIL_MAX 512

// bytes: with the braces
typedef struct { char name[32], form[32]; char type; bool capital; size_t bytes; } Slot;
typedef struct Role {
    const char *name;
    int rule;
    size_t begin, end;
    const struct Role *older;
} Role;
typedef struct Frame {
    const char *rest;
    const struct Frame *parent;
    const char *role;
    int rule;
    size_t begin;
} Frame;
typedef struct { int rule, option; } Choice;
typedef struct {
    const char *text;
    size_t length;
    int derivations, depth, found;               // found: how many choices the first derivation has
    double nats;
    Choice trail[TRAIL_MAX], derivation[TRAIL_MAX];
    double p[RULES_MAX][OPTIONS_MAX];
} Parser;

static int rule_index(const char *name) {
    for (int r = 0; r < STORY_GRAMMAR.count; r++)
        if (!strcmp(STORY_GRAMMAR.rule[r].name, name)) return r;
    return -1;
}

// "{Hero.he}" -> name "hero", type '.', form "he", capital.
static Slot read_slot(const char *p) {
    Slot s = {.type = ' '};
    size_t n = 0, m = 0;
    const char *begin = p++;
    for (; *p && *p != '}'; p++) {
        if (*p == '.' || *p == '=') s.type = *p;
        else if (s.type == ' ') s.name[n++] = *p;
        else s.form[m++] = *p;
    }
    s.capital = isupper((unsigned char)s.name[0]);
    s.name[0] = (char)tolower((unsigned char)s.name[0]);
    s.bytes = (size_t)(p - begin) + 1;
    return s;
}

// The stated law, spelled out: option i is in octave floor(log2(i/4 + 1)), the incomplete last
// octave joins the one before, octaves are equally likely, and so are the options of one octave.
static void probabilities(int count, double *p) {
    int octave[OPTIONS_MAX], size[8] = {0}, octaves = 1;
    for (int i = 0; i < count; i++) octave[i] = (int)floor(log2(i / 4 + 1));
    while (4 * ((1 << (octaves + 1)) - 1) <= count) octaves++;
    for (int i = 0; i < count; i++)
        size[octave[i] = octave[i] < octaves ? octave[i] : octaves - 1]++;
    for (int i = 0; i < count; i++) p[i] = 1.0 / octaves / size[octave[i]];
}

static bool vowel(char c) { return c && strchr("aeiouAEIOU", c); }
static bool same(char text, char pattern, bool capital) {
    return text == (capital ? (char)toupper((unsigned char)pattern) : pattern);
}

static void parse(Parser *ps, const Frame *f, const Role *roles, size_t pos, bool capital,
                  double nats);

static void parse_options(Parser *ps, int rule, const char *role, const Frame *after,
                          const Role *roles, size_t pos, bool capital, double nats) {
    const StoryRule *r = &STORY_GRAMMAR.rule[rule];
    for (int i = 0; i < r->count; i++) {
        Frame f = {r->option[i], after, role, rule, pos};
        CHECK(ps->depth < TRAIL_MAX, "a derivation of more than %d choices\n  -> raise TRAIL_MAX",
              TRAIL_MAX);
        ps->trail[ps->depth++] = (Choice){rule, i};
        parse(ps, &f, roles, pos, capital, nats - log(ps->p[rule][i]));
        ps->depth--;
    }
}

static void parse_slot(Parser *ps, const Frame *f, const Role *roles, size_t pos, bool capital,
                       double nats) {
    Slot s = read_slot(f->rest);
    Frame after = *f;
    after.rest += s.bytes;
    capital |= s.capital;
    const Role *role = roles;
    while (role && strcmp(role->name, s.name)) role = role->older;
    if (s.type == '=') {
        parse_options(ps, rule_index(s.form), s.name, &after, roles, pos, capital, nats);
    } else if (s.type == '.') {
        char form[80];
        int rule = role ? rule_index(check_format(form, sizeof form, "%s.%s",
                                                  STORY_GRAMMAR.rule[role->rule].name, s.form))
                        : -1;
        if (rule >= 0) parse_options(ps, rule, NULL, &after, roles, pos, capital, nats);
    } else if (role) {
        for (size_t i = role->begin; i < role->end; i++, pos++, capital = false)
            if (pos >= ps->length || !same(ps->text[pos], ps->text[i], capital)) return;
        parse(ps, &after, roles, pos, capital, nats);
    } else if (rule_index(s.name) >= 0) {
        parse_options(ps, rule_index(s.name), NULL, &after, roles, pos, capital, nats);
    }
}

// Counts the derivations of text[pos..] from what is left of the frame and of its parents.
static void parse(Parser *ps, const Frame *f, const Role *roles, size_t pos, bool capital,
                  double nats) {
    const char *t = ps->text;
    Frame g = *f;
    for (; *g.rest && *g.rest != '{'; g.rest++, pos++, capital = false) {
        if (pos >= ps->length || !same(t[pos], *g.rest, capital)) return;
        bool article = (t[pos] == 'a' || t[pos] == 'A') && g.rest[1] == ' ' &&
                       (pos == 0 || !isalpha((unsigned char)t[pos - 1]));
        if (!article || pos + 3 >= ps->length) continue;
        bool an = t[pos + 1] == 'n';
        if (vowel(t[pos + (an ? 3 : 2)]) != an) return;
        pos += an;
    }
    if (*g.rest) { parse_slot(ps, &g, roles, pos, capital, nats); return; }
    Role filled = {g.role, g.rule, g.begin, pos, roles};
    if (g.parent) { parse(ps, g.parent, g.role ? &filled : roles, pos, capital, nats); return; }
    if (pos != ps->length) return;
    if (ps->derivations++ == 0) {
        ps->nats = nats;
        ps->found = ps->depth;
        memcpy(ps->derivation, ps->trail, sizeof ps->trail);
    }
}

static Parser *parser_new(void) {
    Parser *ps = (Parser *)check_alloc(sizeof(Parser), "the parser of stories");
    for (int r = 0; r < STORY_GRAMMAR.count; r++)
        probabilities(STORY_GRAMMAR.rule[r].count, ps->p[r]);
    return ps;
}

static void parse_story(Parser *ps, const char *text, size_t length) {
    ps->text = text;
    ps->length = length;
    ps->derivations = 0;
    parse_options(ps, 0, NULL, NULL, NULL, 0, false, 0.0);
}

// One derivation, its -log p is the generator's, and choices have the stated probabilities
// (chi-square for every rule, 5 deviations).
static void test_derivations(void) {
    Parser *ps = parser_new();
    int seen[RULES_MAX][OPTIONS_MAX] = {{0}};
    char text[STORIES_MAX_BYTES];
    int not_one = 0, stories = 3000;
    double worst = 0.0;
    for (int i = 0; i < stories; i++) {
        size_t length;
        double nats = stories_write(stories_seed(7, 0), (uint64_t)i, text, sizeof text, &length);
        parse_story(ps, text, length);
        if (ps->derivations != 1) {
            if (not_one++ == 0)
                printf("  %d derivations: %.*s\n", ps->derivations, (int)length, text);
            continue;
        }
        if (!(fabs(nats - ps->nats) <= worst)) worst = fabs(nats - ps->nats);
        for (int c = 0; c < ps->found; c++)
            seen[ps->derivation[c].rule][ps->derivation[c].option]++;
    }
    EXPECT(not_one == 0, "%d of %d stories have no or several derivations", not_one, stories);
    EXPECT(worst <= 1e-9, "-log p is off by %g", worst);
    for (int r = 0; r < STORY_GRAMMAR.count; r++) {
        const StoryRule *rule = &STORY_GRAMMAR.rule[r];
        double n = 0, chi = 0, freedom = -1;
        for (int i = 0; i < rule->count; i++) n += seen[r][i];
        for (int i = 0; i < rule->count; i++) {
            double expected = n * ps->p[r][i], d = seen[r][i] - expected;
            chi += expected > 0 ? d * d / expected : 0;
            freedom++;
        }
        EXPECT(n > 0 && chi <= freedom + 5 * sqrt(2 * freedom) + 1,
               "rule %s, drawn %.0f times: chi-square %.1f, %.0f degrees of freedom", rule->name, n,
               chi, freedom);
    }
    free(ps);
}

// The promises of the grammar: options differ, and none of plain words is the beginning of another.
static void test_options(void) {
    EXPECT(STORY_GRAMMAR.count <= RULES_MAX, "%d rules, raise RULES_MAX", STORY_GRAMMAR.count);
    for (int r = 0; r < STORY_GRAMMAR.count; r++) {
        const StoryRule *rule = &STORY_GRAMMAR.rule[r];
        EXPECT(rule->count <= OPTIONS_MAX && rule_index(rule->name) == r,
               "rule %s: %d options, or there twice", rule->name, rule->count);
        for (int i = 0; i < rule->count; i++)
            for (int j = 0; j < rule->count; j++) {
                size_t n = strlen(rule->option[i]);
                bool begins = i != j && !strncmp(rule->option[i], rule->option[j], n) &&
                              !isalpha((unsigned char)rule->option[j][n]);
                if (begins)
                    EXPECT(false, "rule %s: '%s' begins '%s'", rule->name, rule->option[i],
                           rule->option[j]);
            }
    }
}

// The longest text a rule can write, from the tables; memo holds 0 where it is not yet known.
static size_t longest(int rule, size_t *memo);

// The longest text of a slot: for a role, over all the rules that can fill it.
static size_t longest_slot(const Slot *s, size_t *memo) {
    size_t most = 0;
    char form[80];
    if (s->type == '=') {
        if (rule_index(s->name) >= 0) EXPECT(false, "%s is a role and a rule", s->name);
        return longest(rule_index(s->form), memo);
    }
    if (s->type == ' ' && rule_index(s->name) >= 0) return longest(rule_index(s->name), memo);
    for (int r = 0; r < STORY_GRAMMAR.count; r++)
        for (int i = 0; i < STORY_GRAMMAR.rule[r].count; i++)
            for (const char *p = strchr(STORY_GRAMMAR.rule[r].option[i], '{'); p;
                 p = strchr(p + 1, '{')) {
                Slot fill = read_slot(p);
                if (fill.type != '=' || strcmp(fill.name, s->name)) continue;
                int from = rule_index(s->type == '.' ? check_format(form, sizeof form, "%s.%s",
                                                                    fill.form, s->form)
                                                     : fill.form);
                if (from < 0)
                    EXPECT(false, "{%s.%s} has no rule when filled from %s", s->name, s->form,
                           fill.form);
                if (from >= 0 && longest(from, memo) > most) most = longest(from, memo);
            }
    if (most == 0) EXPECT(false, "no rule and no role is called %s", s->name);
    return most;
}

static size_t longest(int rule, size_t *memo) {
    if (rule < 0) { EXPECT(false, "a slot asks for a rule that is not there"); return 0; }
    for (int i = 0; i < STORY_GRAMMAR.rule[rule].count && !memo[rule + RULES_MAX]; i++) {
        size_t n = 0;
        for (const char *p = STORY_GRAMMAR.rule[rule].option[i]; *p; p++) {
            if (*p == '{') {
                Slot s = read_slot(p);
                n += longest_slot(&s, memo);
                p += s.bytes - 1;
            } else {  // "a " may become "an "
                n += tolower((unsigned char)*p) == 'a' && p[1] == ' ' ? 2 : 1;
            }
        }
        if (n > memo[rule]) memo[rule] = n;
    }
    memo[rule + RULES_MAX] = 1;
    return memo[rule];
}

// A small set of words: which of the grammar's words occur.
typedef struct { const char *begin[8192]; size_t n[8192]; bool seen[8192]; int count; } WordSet;

static size_t word_place(const WordSet *set, const char *word, size_t n) {
    char lower[64];
    for (size_t i = 0; i < n; i++) lower[i] = (char)tolower((unsigned char)word[i]);
    size_t at = hash_bytes(lower, n) % 8192;
    for (; set->begin[at]; at = (at + 1) % 8192) {
        size_t i = 0;
        while (i < n && set->n[at] == n && tolower((unsigned char)set->begin[at][i]) == lower[i])
            i++;
        if (i == n && set->n[at] == n) break;
    }
    return at;
}

static size_t word_length(const char *p, const char *end) {
    size_t n = 0;
    while (p + n < end && isalpha((unsigned char)p[n])) n++;
    return n;
}

static WordSet *words_of_grammar(void) {
    WordSet *set = (WordSet *)check_alloc(sizeof(WordSet), "the words of the stories");
    for (int r = 0; r < STORY_GRAMMAR.count; r++)
        for (int i = 0; i < STORY_GRAMMAR.rule[r].count; i++) {
            const char *p = STORY_GRAMMAR.rule[r].option[i], *end = p + strlen(p);
            while (p < end) {
                size_t n = word_length(p, end);
                if (*p == '{') p = strchr(p, '}');
                if (n == 0) { p++; continue; }
                size_t at = word_place(set, p, n);
                if (!set->begin[at]) set->count++;
                set->begin[at] = p;
                set->n[at] = n;
                p += n;
            }
        }
    return set;
}

// Every word written is in the vocabulary and every word of the vocabulary is written.
static void test_words(void) {
    WordSet *set = words_of_grammar();
    char text[STORIES_MAX_BYTES];
    int missing = set->count, unknown = 0;
    for (uint64_t i = 0; i < 200000 && missing; i++) {
        size_t length;
        stories_write(stories_seed(3, 1), i, text, sizeof text, &length);
        for (size_t at = 0; at < length; at++) {
            size_t n = word_length(text + at, text + length);
            if (n == 0) continue;
            size_t place = word_place(set, text + at, n);
            if (!set->begin[place]) unknown++;
            else if (!set->seen[place]) {
                set->seen[place] = true;
                missing--;
            }
            at += n;
        }
    }
    for (int i = 0; i < 8192 && missing; i++)
        if (set->begin[i] && !set->seen[i]) {
            printf("  never written: %.*s\n", (int)set->n[i], set->begin[i]);
            break;
        }
    EXPECT(missing == 0 && unknown == 0, "%d words never occur, %d unknown", missing, unknown);
    EXPECT(set->count >= 800, "the grammar has %d words", set->count);
    free(set);
}

static bool has_word(const char *text, size_t length, const char *word) {
    size_t n = strlen(word);
    for (size_t at = 0; at + n <= length; at++) {
        if (at && isalpha((unsigned char)text[at - 1])) continue;
        bool first = tolower((unsigned char)text[at]) == tolower((unsigned char)word[0]);
        if (first && word_length(text + at, text + length) == n &&
            !strncmp(text + at + 1, word + 1, n - 1))
            return true;
    }
    return false;
}

static bool has_word_of(const char *text, size_t length, const char *rule) {
    const StoryRule *r = &STORY_GRAMMAR.rule[rule_index(rule)];
    for (int i = 0; i < r->count; i++)
        if (has_word(text, length, r->option[i])) return true;
    return false;
}

// Whether "an" goes before the word: by sound, where the generator goes by spelling.
static bool spoken_vowel(const char *word) {
    const char *silent[] = {"hour", "honest", "honor", "heir"};
    const char *you[] = {"uni", "use", "usu", "eu", "one", "once"};
    for (size_t i = 0; i < sizeof silent / sizeof silent[0]; i++)
        if (!strncmp(word, silent[i], strlen(silent[i]))) return true;
    for (size_t i = 0; i < sizeof you / sizeof you[0]; i++)
        if (!strncmp(word, you[i], strlen(you[i]))) return false;
    return vowel(*word);
}

// Reads one story as an English teacher would; returns what is wrong, or NULL.
static const char *wrong_english(const char *text, size_t length) {
    if (!isupper((unsigned char)text[0]) && text[0] != '\'') return "no capital at the start";
    if (!strchr(".!?'", text[length - 1])) return "no full stop at the end";
    for (size_t i = 0; i < length; i++) {
        if (text[i] < 32 || text[i] > 126 || text[i] == '{' || text[i] == '}')
            return "a strange byte";
        if (i + 2 < length && text[i] == ' ' && strchr(" .,!?", text[i + 1]))
            return "a stray space";
        bool ends = i + 2 < length && strchr(".!?", text[i]) && text[i + 1] == ' ';
        if (ends && !isupper((unsigned char)text[i + 2]) && text[i + 2] != '\'')
            return "no capital";
        bool starts = i == 0 || !isalpha((unsigned char)text[i - 1]);
        size_t n = starts ? word_length(text + i, text + length) : 0;
        bool letter = tolower((unsigned char)text[i]) == 'a';
        bool a = letter && n == 1;
        bool an = letter && n == 2 && text[i + 1] == 'n';
        if ((a || an) && i + n + 1 < length && spoken_vowel(text + i + n + 1) != an)
            return "a or an";
    }
    // The name is told once with "named" and comes back; the pronouns are those of the people in
    // the story.
    const char *named = strstr(text, " named ");
    if (!named) return "a hero without a name";
    size_t n = word_length(named + 7, text + length);
    bool back = false;
    for (const char *p = named + 7 + n; p + n < text + length; p++)
        back |= !memcmp(p, named + 7, n) && !isalpha((unsigned char)p[n]);
    if (!back) return "the hero does not come back";
    bool she = has_word_of(text, length, "girl") || has_word_of(text, length, "lady") ||
               has_word_of(text, length, "woman");
    bool he = has_word_of(text, length, "boy") || has_word_of(text, length, "lad") ||
              has_word_of(text, length, "man");
    if (!she && (has_word(text, length, "she") || has_word(text, length, "her")))
        return "she without a woman";
    if (!he && (has_word(text, length, "he") || has_word(text, length, "him") ||
                has_word(text, length, "his")))
        return "he without a man";
    return NULL;
}

static void test_english(void) {
    char text[STORIES_MAX_BYTES + 1];
    int wrong = 0, stories = 2000;
    for (int i = 0; i < stories; i++) {
        size_t length;
        stories_write(stories_seed(11, 0), (uint64_t)i, text, STORIES_MAX_BYTES, &length);
        text[length] = 0;
        const char *what = wrong_english(text, length);
        if (what && wrong++ == 0) printf("  %s: %s\n", what, text);
    }
    EXPECT(wrong == 0, "%d of %d stories are bad English", wrong, stories);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

// Pure in (seed, index), different everywhere else, and the same corpus on every machine.
static void test_identity(void) {
    char text[STORIES_MAX_BYTES], again[STORIES_MAX_BYTES];
    uint64_t keys[24000];
    int n = 0, differ = 0;
    Hash corpus = hash_begin();
    for (int corpora = 0; corpora < 4; corpora++)
        for (uint64_t i = 0; i < 6000; i++) {
            size_t length, length2;
            uint64_t seed = stories_seed((uint64_t)(corpora / 2), corpora % 2);
            double nats = stories_write(seed, i, text, sizeof text, &length);
            if (i % 100 == 0)
                differ += stories_write(seed, i, again, sizeof again, &length2) != nats ||
                          length != length2 || memcmp(text, again, length);
            keys[n++] = hash_bytes(text, length);
            if (corpora == 0) { hash_add(&corpus, text, length); hash_add(&corpus, "", 1); }
        }
    qsort(keys, (size_t)n, sizeof keys[0], by_value);
    int equal = 0;
    for (int i = 1; i < n; i++) equal += keys[i] == keys[i - 1];
    EXPECT(differ == 0, "%d stories are different the second time", differ);
    EXPECT(equal == 0, "%d stories of four corpora are there twice", equal);
    EXPECT(stories_seed(5, 0) != stories_seed(5, 1) && stories_seed(5, 1) != stories_seed(6, 0),
           "seeds collide");
    uint64_t hash = hash_end(&corpus), golden = 0xab61330759fa044dull;
    EXPECT(hash == golden,
           "the corpus has changed (hash %#llx): losses measured before do not compare",
           (unsigned long long)hash);
}

static void small_room(void *arg) {
    char text[16];
    size_t length;
    (void)arg;
    stories_write(0, 0, text, sizeof text, &length);
}

void test_stories(void) {
    size_t memo[2 * RULES_MAX] = {0}, most;
    test_options();
    most = longest(0, memo);
    EXPECT(most + 2 <= STORIES_MAX_BYTES, "a story can take %zu bytes", most);
    test_derivations();
    test_words();
    test_english();
    test_identity();
    EXPECT_REFUSAL(small_room, NULL, "STORIES_MAX_BYTES");
}
