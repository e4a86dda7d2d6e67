#!/bin/sh
# libFuzzer under AddressSanitizer and UndefinedBehaviorSanitizer, from the root of the repository:
#
#   sh dev/fuzz/run.sh [SECONDS [TARGET...]]
#
# SECONDS: for each target (dev/fuzz/TARGET.c); without arguments a minute in all. Inputs
# are mutations of dev/fuzz/seeds/TARGET and of build/fuzz/corpus/TARGET, which earlier runs filled.
# A finding is a crash, a report of a sanitizer, a false must(), a hang of ten seconds, a block
# above 8 MiB for an input of at most 4 KiB, or a gigabyte in all. It is shown, and kept in
# build/fuzz/found/TARGET. The last line counts targets without and with findings.
set -u
all=$(cd dev/fuzz && ls -- *.c | sed 's/\.c$//')
seconds=${1:-$((60 / $(echo "$all" | wc -l)))}
case $seconds in
    *[!0-9]* | 0) echo "error: expected SECONDS above 0, found $seconds" >&2; exit 2 ;;
esac
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- $all
passed=0 failed=0
export ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16      # fuzz.h looks for leaks itself
FUZZ_DIR=$(mktemp -d /dev/shm/norm-fuzz.XXXXXX 2> /dev/null || mktemp -d) || exit 1
export FUZZ_DIR
trap 'rm -rf "$FUZZ_DIR"' EXIT
trap 'exit 1' INT TERM
mkdir -p build/fuzz

# Words for the fuzzer to insert: those of JSON, and for the command line the names of flags.
dictionary() {
    echo "# $1"
    case $1 in
    json | config | safetensors) cat dev/fuzz/json.dict ;;
    flags) sed -n 's/^FLAG(\([a-z0-9_]*\), .*/\1/p' llmc/run/flags.h | tr _ - |
               sed 's/.*/"--&="/' ;;
    esac
}

# Services and the built-in corpus are instrumented too: compiled here, once for all targets.
compile() {
    clang -std=c17 -D_DEFAULT_SOURCE -D_XOPEN_SOURCE=700 -O1 -g -fno-omit-frame-pointer \
        -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined \
        -Wall -Wextra -Wno-unknown-pragmas "$@"
}
services() {
    rm -rf build/fuzz/run && mkdir -p build/fuzz/run
    for source in data/stories.c llmc/run/*.c; do
        [ -f "$source" ] || continue
        object=${source##*/} object=build/fuzz/run/${object%.c}.o
        compile -include dev/fuzz/calls.h -c "$source" -o "$object" || return 1
    done
    ar rcs build/fuzz/run/services.a build/fuzz/run/*.o
}
build() {
    compile -fsanitize=fuzzer "dev/fuzz/$1.c" build/fuzz/run/services.a -o "build/fuzz/$1" -lm
}

# A log in one line: inputs, edges of the code that they reached, and inputs kept in the corpus.
summary() {
    awk '/inline 8-bit counters/ { sub(/.*\(/, ""); edges = $1 }
         $1 ~ /^#[0-9]/ {
             for (i = 2; i < NF; i++) {
                 if ($i == "cov:") cov = $(i + 1)
                 if ($i == "corp:") kept = $(i + 1)
             }
         }
         /number_of_executed_units/ { n = $2 }
         /average_exec_per_sec/ { rate = $2 }
         END {
             split(kept, k, "/")
             printf "%d inputs, %d a second, %d of %d edges, %d kept", n, rate, cov, edges, k[1]
         }' "$1"
}

fuzz() {
    corpus=build/fuzz/corpus/$1 found=build/fuzz/found/$1 log=build/fuzz/$1.log
    mkdir -p "$corpus" "$found" "dev/fuzz/seeds/$1"
    dictionary "$1" > "build/fuzz/$1.dict"
    limits="-timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=8"
    # shellcheck disable=SC2086
    if "build/fuzz/$1" -seed=1 -max_total_time="$seconds" -max_len=4096 $limits -close_fd_mask=3 \
        -print_final_stats=1 -dict="build/fuzz/$1.dict" -artifact_prefix="$found/" \
        "$corpus" "dev/fuzz/seeds/$1" > "$log" 2>&1; then
        passed=$((passed + 1)); echo "$1: $(summary "$log")"
    else
        failed=$((failed + 1)); echo "$1: FOUND, $(summary "$log")"
        input=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
        if [ -n "$input" ]; then
            echo "again: FUZZ_DIR=/tmp build/fuzz/$1 $input"
            "build/fuzz/$1" $limits "$input" 2>&1 | tail -n 40
        else tail -n 20 "$log"; fi
    fi
}

services || { echo "error: services do not build; clang with libFuzzer is needed" >&2; exit 1; }
for target; do
    if build "$target"; then fuzz "$target"
    else failed=$((failed + 1)); echo "$target: does not build"; fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
