// hf.c: the C code's own answers for dev/hf.py, which compiles this file and reads what it prints.
//
//   hf tables               JSON: the version of config.json; the tables of modes, SDD and flags
//   hf model MODE FLAGS...  JSON: a model's flags, and the names and shapes of its tensors
//   hf find PATH            the checkpoint at PATH: that folder, or the newest whole one of a run
//   hf xxh64 FILE...        the checksum of each file, as manifest.json and config.json state it
#include <errno.h>
#include "llmc/run/checkpoint.h"
#include "llmc/run/config.h"
#include "llmc/run/files.h"
#include "llmc/run/util.h"

#define WORD(name) [name] = #name
static const char *const SKIP_WORDS[] = {WORD(OWN), WORD(NORMED), WORD(BLOCK)};
static const char *const FACTOR_WORDS[] = {WORD(ONE), WORD(LNS), WORD(DEEP), WORD(SUBLAYERS),
                                           WORD(LEARNED)};
static const char *const PER_WORDS[] = {WORD(HEAD), WORD(FULL)};
static const char *const KIND_WORDS[] = {WORD(INT), WORD(NUMBER), WORD(TEXT), WORD(CHOICE),
                                    WORD(SWITCH)};

static void print_sublayer(const char *name, const SubMode *s) {
    const char *c = FACTOR_WORDS[s->c], *a = FACTOR_WORDS[s->a];
    printf("\"%s\": {\"in\": %d, \"c\": \"%s\", \"out\": %d, \"skip\": \"%s\", \"a\": \"%s\", "
           "\"post\": %d}, ",
           name, s->in, c, s->out, SKIP_WORDS[s->skip], a, s->post);
}

// The row that a mode names for some of its layers, or null.
static void print_named(const char *column, int id) {
    const char *quote = id ? "\"" : "";
    printf(", \"%s\": %s%s%s", column, quote, id ? MODES[id].name : "null", quote);
}

static void print_mode(const Mode *r) {
    printf("\"%s\": {", r->name);
    print_sublayer("attn", &r->attn);
    print_sublayer("ffn", &r->ffn);
    printf("\"q\": %d, \"k\": %d, \"v\": %d, \"ctx\": %d, \"per\": \"%s\", \"emb\": %d, "
           "\"fin\": %d, \"sdd\": %d, \"unit\": %d",
           r->q, r->k, r->v, r->ctx, PER_WORDS[r->per], r->emb, r->fin, r->sdd, r->unit);
    print_named("first", r->first);
    print_named("early", r->early);
    printf("}");
}

static void print_tables(void) {
    printf("{\"config_version\": %d, \"modes\": {", CONFIG_VERSION);
    for (int i = MODE_NONE + 1; i < MODE_COUNT; i++) {
        printf("%s", i > MODE_NONE + 1 ? ",\n" : "");
        print_mode(&MODES[i]);
    }
    printf("},\n\"selectable\": [");                                // the others are for layers
    for (int i = 0, n = 0; i < MODE_COUNT; i++)
        if (MODES[i].selectable) printf("%s\"%s\"", n++ ? ", " : "", MODES[i].name);
    printf("],\n\"sdd\": {");
    for (int i = 0; i < SDD_COUNT; i++)
        printf("%s\"%s\": {\"v\": %d, \"fused\": %d, \"per\": \"%s\", \"share\": %d}",
               i ? ", " : "", SDDS[i].name, SDDS[i].v, SDDS[i].fused, PER_WORDS[SDDS[i].per],
               SDDS[i].share);
    printf("},\n\"flags\": {");
    for (int i = FLAG_model + 1; i < FLAG_init; i++) {              // those that shape the model
        const FlagRow *row = &FLAGS[i];
        printf("%s\n\"%s\": {\"kind\": \"%s\", \"default\": \"%s\", \"choices\": \"%s\"}",
               i > FLAG_model + 1 ? "," : "", row->field, KIND_WORDS[row->kind], row->def,
               row->choices);
    }
    printf("}}\n");
}

static const Mode *find_mode(const char *name) {
    for (int i = 0; i < MODE_COUNT; i++)
        if (MODES[i].selectable && !strcmp(MODES[i].name, name)) return &MODES[i];
    CHECK(false, "no placement %.80s\n  -> ./train_gpt --show modes lists them", name);
    return NULL;
}

static void print_model(const char *mode_name, int count, char **words) {
    FlagSet set;
    char buf[FLAG_CAP];
    const Mode *mode = find_mode(mode_name);
    flags_default(&set);
    flags_parse(&set, count, words, BY_CHECKPOINT);
    run_refuse(&set, &(Trainer){.mode = mode, .device = "cpu", .precision = "fp32"});
    Model m = model_from_flags(&set.f, mode);
    Layout t = layout_make(&m);
    printf("{\"flags\": {");
    for (int i = FLAG_model + 1; i < FLAG_init; i++)
        printf("%s\"%s\": \"%s\"", i > FLAG_model + 1 ? ", " : "", FLAGS[i].field,
               flag_text(buf, &set.f, &FLAGS[i]));
    printf("},\n\"tensors\": {");
    for (const Entry *e = t.entries; e < t.end; e++) {
        printf("%s\"%s\": [", e > t.entries ? ",\n" : "", e->name);
        if (e->row.rows != 1) printf("%lld, ", (long long)entry_rows(&m, e));     // else a vector
        printf("%lld]", (long long)e->row.cols);
    }
    printf("}}\n");
    layout_free(&t);
}

static void print_checksum(const char *path) {
    Hash hash;
    CHECK(file_hash(path, &hash, NULL), "cannot read %s: %s\n  -> check the path", path,
          strerror(errno));
    printf("%016llx\n", (unsigned long long)hash_end(&hash));
}

int main(int argc, char **argv) {
    char dir[PATH_CAP];
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "tables")) print_tables();
    else if (!strcmp(what, "model") && argc > 2) print_model(argv[2], argc - 3, argv + 3);
    else if (!strcmp(what, "find") && argc > 2) puts(checkpoint_find(argv[2], dir));
    else if (!strcmp(what, "xxh64"))
        for (int i = 2; i < argc; i++) print_checksum(argv[i]);
    return 0;
}
