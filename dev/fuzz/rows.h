// rows.h: what holds of every set of flags that was accepted, from a command line or from
// config.json. Included after fuzz.h.
#pragma once
#include "../../llmc/run/run.h"

// Each value is in the range of its row.
static void expect_ranges(const Flags *f) {
    for (int i = 0; i < FLAG_COUNT; i++) {
        const FlagRow *row = &FLAGS[i];
        const char *at = (const char *)f + row->offset;
        double number = row->kind == INT      ? (double)*(const long long *)at
                        : row->kind == NUMBER ? *(const double *)at
                                              : row->low;
        must(number >= row->low && number <= row->high);
        if (row->kind == CHOICE || row->kind == SWITCH) must(*(const int *)at >= 0);
        if (row->kind == TEXT) must(*(const char *const *)at);
    }
}

// The text for config.json reads as the same flags.
static void expect_config(const Run *r) {
    char path[FUZZ_PATH], a[FLAG_CAP], b[FLAG_CAP], *text = run_config(r);
    FlagSet again;
    flags_default(&again);
    config_read(&again, fuzz_file(path, "config.json", text, strlen(text)), r->t);
    for (int i = 0; i < FLAG_COUNT; i++)
        must(FLAGS[i].resume == ONCE || strcmp(flag_text(a, r->f, &FLAGS[i]),
                                               flag_text(b, &again.f, &FLAGS[i])) == 0);
}
