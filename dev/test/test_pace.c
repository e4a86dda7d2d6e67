// test_pace.c: a run says once that its machine has become slow.
#include "test.h"
#include "../../llmc/run/run.h"

void test_pace(void) {
    Run r;
    double busy = 0;
    memset(&r, 0, sizeof r);
    for (int i = 0; i < 40; i++, busy += 2) {
        r.tokens += i % 3 ? 1000 : 900;
        run_note_pace(&r, busy + 2);
    }
    EXPECT(!r.pace.noted, "a steady pace is not worth a word");
    for (int i = 0; i < 2; i++, busy += 2) {
        r.tokens += 510;
        run_note_pace(&r, busy + 2);
    }
    EXPECT(!r.pace.noted, "nor is a little more than half of the median");
    r.tokens += 490;
    run_note_pace(&r, busy + 2);
    EXPECT(r.pace.noted, "a little less than half is");
}
