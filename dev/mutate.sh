#!/bin/sh
# dev/mutate.sh [--stale] [WORDS]: breaks the code on purpose, one mistake of dev/mutants and dev/mutants_cuda at a time, and expects the test named beside it to turn red.
# With words only the mutants whose header line contains one of them; --stale only looks whether the text of each is still there. In a copy of the tree (build/mutate); about 20 seconds a mutant on one core.
# Tests named cuda_* and gpus run in the emulator, in both precisions (CUDA=, CUBLAS=: where the toolkit's headers are).
# A test that stays green is a survivor: either the test is blind there, or the mutant changes nothing; both are worth knowing.
set -eu
root=$(pwd)
tree=$root/build/mutate
killed=0 failed=0 stale="" test="" file="" what=""
if [ "${1:-}" = --stale ]; then stale=1; shift; fi
export OMP_WAIT_POLICY=passive ASAN_OPTIONS=detect_leaks=0
make="make -s DEVICE=cpu CFLAGS=-O1"
programs="build/shard build/faulty build/shim.so build/cpu-span-fp32/train_gpt"        # what the tests run, run_tokens, refusals, shard and processes drive

# What a test needs, as arguments of make, and how it is run. A CUDA layer's test is linked alone, those of whole models with everything.
arrange() {
    case $test in
        cuda_*)
            source=$(grep -l "GPU_TEST($test)" test_gpt.cu dev/test/*.cu | head -n 1) emu=build/emu only=""
            case $source in dev/test/*) one=${source#dev/test/test_} emu=build/emu-${one%.cu} only="EMU=$emu GPU_TESTS=${one%.cu}" ;; esac
            built="$only $emu/test_gpt-fp32 $emu/test_gpt-bf16" run="$emu/test_gpt-fp32 $test && EMU_COMPUTE=120 $emu/test_gpt-bf16 $test" ;;         # as in dev/test/emu.sh
        gpus)
            built="$programs build/emu/train_gpt-fp32 build/emu/train_gpt-bf16 build/emu/ngpt-fp32 build/emu/ngpt-bf16 build/emu/libnccl.so.2 build/emu/test_nccl"
            run="sh dev/test/gpus.sh" ;;
        processes) built=$programs run="sh dev/test/processes.sh" ;;
        faults) built="build/shard build/shim.so build/cpu-span-fp32/train_gpt" run="sh dev/test/faults.sh" ;;
        formulas) built=build/stories.o run="python3 dev/test/test_probe.py" ;;
        import_hf) built=build/stories.o run="python3 dev/test/test_import_hf.py" ;;
        probe_runs)
            built="build/shard build/cpu-span-fp32/train_gpt"
            run="python3 dev/test/test_probe.py SPAN=build/cpu-span-fp32/train_gpt \
                 PRE=\$($make binary NORM_MODE=PRE) SDD=\$($make binary NORM_MODE=SDD)" ;;
        torture) built="build/shard build/shim.so build/cpu-span-fp32/train_gpt" run="python3 dev/torture.py 24" ;;
        repro) built=build/shard run="python3 dev/test/test_repro.py table sides verdicts statistics kept" ;;
        run | run_sample | run_tokens | micro_batch | command | refusals | shard) built="build/test_gpt $programs" run="build/test_gpt $test" ;;
        *) built=build/test_gpt run="build/test_gpt $test" ;;
    esac
}

# A name that no test has would let everything live.
is_test() {
    case $test in
        cuda_*) grep -qs "GPU_TEST($test)" test_gpt.cu dev/test/*.cu ;;
        gpus | processes | faults | torture | formulas | import_hf | probe_runs | repro) ;;
        *) grep -q "{\"$test\"," test_gpt.c ;;
    esac
}

# Replaces the one occurrence of the text in file `old` by that in file `new`. White space does not
# count: a line that is wrapped elsewhere is still the same code.
replace='
import sys
old, new, text = (open(path, encoding="utf-8").read() for path in sys.argv[1:4])
places = [i for i, c in enumerate(text) if not c.isspace()]
dense = "".join(text[i] for i in places)
wanted = "".join(old.split())
at = dense.find(wanted)
if at < 0 or dense.find(wanted, at + 1) >= 0: sys.exit(1)
print(text[:places[at]] + new.strip() + text[places[at + len(wanted) - 1] + 1:], end="")
'

fail() { failed=$((failed + 1)); echo "$1: $test $file: $what"; }

# The mutant in $test, $file, $what and the files old and new.
try() {
    if ! is_test; then fail "THERE IS NO SUCH TEST"; return; fi
    cp "$file" original
    if ! python3 -c "$replace" old new original > "$file"; then cp original "$file"; fail "STALE, the text is not there once"; return; fi
    if [ -n "$stale" ]; then cp original "$file"; killed=$((killed + 1)); return; fi
    arrange
    if $make $built > log 2>&1; then
        # grep ends at the first failure, and the test with it.
        if { timeout 600 sh -c "$run" < /dev/null 2>&1 || echo "FAILED with status $?"; } | grep -m 1 -q FAILED; then
            killed=$((killed + 1)); echo "killed: $test $file: $what"
        else fail SURVIVED; fi
    else fail "DOES NOT COMPILE"; tail -n 3 log; fi
    cp original "$file"
}

rm -rf "$tree" && mkdir -p "$tree"
{ if [ -e .git ]; then git ls-files -co --exclude-standard -z; else find . -path ./build -prune -o -path ./runs -prune -o -type f -print0; fi; } | xargs -0 tar cf - | tar xf - -C "$tree"
cd "$tree"
cat dev/mutants dev/mutants_cuda > mutants
echo >> mutants
wanted=$(IFS='|'; echo "$*")
[ -n "$stale" ] || for test in $(grep -E '^[a-z_]+ [a-z_./]+ ' mutants | grep -E "$wanted" | cut -d ' ' -f 1 | sort -u); do
    arrange
    { $make $built && sh -c "$run"; } > log 2>&1 || { tail -n 3 log; echo "the test $test is not green without a mutant"; exit 1; }
done
test=""
while IFS= read -r line; do
    case $line in
        "#"*) ;;
        "- "* | "-") printf '%s\n' "${line#-}" | sed 's/^ //' >> old ;;
        "+ "* | "+") printf '%s\n' "${line#+}" | sed 's/^ //' >> new ;;
        "") if [ -n "$test" ] && echo "$test $file $what" | grep -qE "$wanted"; then try; fi; test="" ;;
        " "*) fail "NEITHER - NOR + BEFORE THE LINE '$line'" ;;
        *) test=${line%% *} line=${line#* } file=${line%% *} what=${line#* }; rm -f old new ;;
    esac
done < mutants
echo "$killed passed, $failed failed"
[ "$failed" = 0 ]
