#!/bin/sh
# dev/mutate.sh [WORDS]: breaks the code on purpose, one mistake of dev/mutants at a time, and expects the test named beside it to turn red.
# With words only the mutants whose header line contains one of them. In a copy of the tree (build/mutate); about 20 seconds a mutant on one core.
# A test that stays green is a survivor: either the test is blind there, or the mutant changes nothing; both are worth knowing.
set -eu
root=$(pwd)
tree=$root/build/mutate
killed=0 failed=0
export OMP_WAIT_POLICY=passive ASAN_OPTIONS=detect_leaks=0
make="make -s CFLAGS=-O1 build/test_gpt"
programs="build/shard build/cpu-span-fp32/train_gpt"              # what the tests run, run_tokens, refusals and shard drive

# Replaces the one occurrence of the text in file `old` by that in file `new`.
replace='
function slurp(path,   text, line, sep) { while ((getline line < path) > 0) { text = text sep line; sep = "\n" } return text }
BEGIN {
    old = slurp(ARGV[1]); new = slurp(ARGV[2]); text = slurp(ARGV[3]) "\n"
    at = index(text, old)
    if (!at || index(substr(text, at + 1), old)) exit 1
    printf "%s%s%s", substr(text, 1, at - 1), new, substr(text, at + length(old))
}'

fail() { failed=$((failed + 1)); echo "$1: $test $file: $what"; }

# The mutant in $test, $file, $what and the files old and new.
try() {
    cp "$file" original
    if ! awk "$replace" old new original > "$file"; then cp original "$file"; fail "STALE, the text is not there once"; return; fi
    case $test in run | run_tokens | refusals | shard) built=$programs ;; *) built="" ;; esac
    if $make $built > log 2>&1; then
        # grep ends at the first failure, and the test with it.
        if { timeout 600 build/test_gpt "$test" 2>&1 || echo "FAILED with status $?"; } | grep -m 1 -q FAILED; then
            killed=$((killed + 1)); echo "killed: $test $file: $what"
        else fail SURVIVED; fi
    else fail "DOES NOT COMPILE"; tail -n 3 log; fi
    cp original "$file"
}

rm -rf "$tree" && mkdir -p "$tree"
{ git ls-files -co --exclude-standard -z 2>/dev/null || find . -path ./build -prune -o -path ./runs -prune -o -type f -print0; } | xargs -0 tar cf - | tar xf - -C "$tree"
cd "$tree"
cp dev/mutants mutants
echo >> mutants
$make $programs
wanted=$(IFS='|'; echo "$*")
for test in $(grep -E '^[a-z_]+ [a-z_./]+ ' mutants | grep -E "$wanted" | cut -d ' ' -f 1 | sort -u); do
    build/test_gpt "$test" > log 2>&1 || { tail -n 3 log; echo "the test $test is not green without a mutant"; exit 1; }
done
test=""
while IFS= read -r line; do
    case $line in
        "#"*) ;;
        "- "* | "-") printf '%s\n' "${line#-}" | sed 's/^ //' >> old ;;
        "+ "* | "+") printf '%s\n' "${line#+}" | sed 's/^ //' >> new ;;
        "") if [ -n "$test" ] && echo "$test $file $what" | grep -qE "$wanted"; then try; fi; test="" ;;
        *) test=${line%% *} line=${line#* } file=${line%% *} what=${line#* }; rm -f old new ;;
    esac
done < mutants
echo "$killed passed, $failed failed"
[ "$failed" = 0 ]
