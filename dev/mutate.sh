#!/bin/sh
# Mutation testing: breaks the code on purpose, one mistake of dev/mutants and dev/mutants_cuda at a
# time, and expects the test named beside it to fail.
#
#   sh dev/mutate.sh [WORDS]            the mutants whose header line contains one of the words
#   sh dev/mutate.sh --stale [WORDS]    only whether the text of each is still in the code
#
# It works in a copy of the tree (build/mutate); a mutant takes about 20 seconds of one core. Tests
# named cuda_*, gpus and lost run in the emulator, in both precisions, ladder_* (of dev/kernels) as
# run.sh there says; ptx needs nvcc (dev/ptx). A mutant whose test still passes has SURVIVED: the
# test does not see this mistake, or the mutant changes no behavior.
set -eu
root=$(pwd)
tree=$root/build/mutate
killed=0 failed=0 stale="" test="" file="" about=""
if [ "${1:-}" = --stale ]; then stale=1; shift; fi
export OMP_WAIT_POLICY=passive ASAN_OPTIONS=detect_leaks=0
make="make -s DEVICE=cpu CFLAGS=-O1"
trainer=build/cpu-span-fp32/train_gpt
programs="build/shard build/faulty build/shim.so $trainer"   # for tests that drive whole programs
emu=build/emu

# Sets `built`, the make goals that $test needs, and `run`, its command. The test of a CUDA layer is
# linked alone, a test of whole models with all layers.
arrange() {
    case $test in
        cuda_*)
            source=$(grep -l "GPU_TEST($test)" test_gpt.cu dev/test/*.cu | head -n 1)
            in=$emu only=""
            case $source in
                dev/test/*)
                    layer=${source#dev/test/test_} layer=${layer%.cu}
                    in=$emu-$layer only="EMU=$in GPU_TESTS=$layer" ;;
            esac
            built="$only $in/test_gpt-fp32 $in/test_gpt-bf16"
            run="$in/test_gpt-fp32 $test && EMU_COMPUTE=120 $in/test_gpt-bf16 $test" ;;
        gpus)
            built="$programs $emu/train_gpt-fp32 $emu/train_gpt-bf16 $emu/ngpt-fp32 $emu/ngpt-bf16"
            built="$built $emu/libnccl.so.2 $emu/test_nccl" run="sh dev/test/gpus.sh" ;;
        lost)
            built="build/shim.so $emu/train_gpt-fp32 $emu/train_gpt-bf16 $emu/libnccl.so.2"
            run="sh dev/test/lost.sh" ;;
        processes) built=$programs run="sh dev/test/processes.sh" ;;
        faults) built="build/shard build/shim.so $trainer" run="sh dev/test/faults.sh" ;;
        torture) built="build/shard build/shim.so $trainer" run="python3 dev/torture.py 24" ;;
        ptx) built=build/services.a run="python3 dev/ptx/check.py trainer" ;;
        ladder_*) built=build/services.a run="sh dev/kernels/run.sh ${test#ladder_}" ;;
        get_*) built=build/services.a run="python3 dev/test/test_get.py test_${test#get_}" ;;
        lm_eval) built=build/services.a run="python3 dev/test/test_lm_eval.py" ;;
        formulas) built=build/services.a run="python3 dev/test/test_probe.py" ;;
        tokenizers) built=build/tokenize run="python3 dev/test/test_tokenizer.py short" ;;
        hf_tokenizers) built=build/logits run="python3 dev/test/test_hf.py tokenizers" ;;
        import_hf) built=build/services.a run="python3 dev/test/test_import_hf.py" ;;
        probe_runs)
            built="build/shard $trainer"
            run="python3 dev/test/test_probe.py SPAN=$trainer \
                 PRE=\$($make binary NORM_MODE=PRE) SDD=\$($make binary NORM_MODE=SDD)" ;;
        repro)
            built=build/shard
            run="python3 dev/test/test_repro.py table sides verdicts two_scales edge proportions \
                 likeness family order missing other_study sizes fresh commit statistics kept" ;;
        paper_scale) built=build/services.a run="python3 dev/test/test_paper_scale.py" ;;
        # build/test_gpt comm runs command too, which has the word in its name
        run | run_sample | run_tokens | micro_batch | comm | command | refusals | shard)
            built="build/test_gpt $programs" run="build/test_gpt $test" ;;
        *) built=build/test_gpt run="build/test_gpt $test" ;;
    esac
}

# Whether a test of this name exists: a misspelled one would run nothing, and every mutant survive.
is_test() {
    case $test in
        cuda_*) grep -qs "GPU_TEST($test)" test_gpt.cu dev/test/*.cu ;;
        gpus | lost | processes | faults | torture | formulas | import_hf | probe_runs) ;;
        repro | ptx | tokenizers | hf_tokenizers | lm_eval | paper_scale) ;;
        ladder_*) [ -f "dev/kernels/${test#ladder_}.cu" ] ;;
        get_*) grep -q "^def test_${test#get_}" dev/test/test_get.py ;;
        *) grep -q "{\"$test\"," test_gpt.c ;;
    esac
}

# Replaces the only occurrence of the text in file `old` by that in file `new`; fails if it does not
# occur exactly once. White space does not count: the code may be wrapped differently.
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

fail() { failed=$((failed + 1)); echo "$1: $test $file: $about"; }

# Runs the mutant in $test, $file, $about and the files old and new.
try() {
    if ! is_test; then fail "THERE IS NO SUCH TEST"; return; fi
    cp "$file" original
    if ! python3 -c "$replace" old new original > "$file"; then
        cp original "$file"
        fail "STALE, the text is not there once"
        return
    fi
    if [ -n "$stale" ]; then cp original "$file"; killed=$((killed + 1)); return; fi
    arrange
    if $make $built > log 2>&1; then
        # grep ends at the first failure, and the test with it.
        if { timeout 600 sh -c "$run" < /dev/null 2>&1 || echo "FAILED with status $?"; } |
            grep -m 1 -q FAILED; then
            killed=$((killed + 1)); echo "killed: $test $file: $about"
        else fail SURVIVED; fi
    else fail "DOES NOT COMPILE"; tail -n 3 log; fi
    cp original "$file"
}

rm -rf "$tree" && mkdir -p "$tree"
if [ -e .git ]; then git ls-files -co --exclude-standard -z
else find . -path ./build -prune -o -path ./runs -prune -o -type f -print0; fi |
    xargs -0 tar cf - | tar xf - -C "$tree"
cd "$tree"
cat dev/mutants dev/mutants_cuda > mutants
echo >> mutants
wanted=$(IFS='|'; echo "$*")
headers() { grep -E '^[a-z0-9_]+ [a-z0-9_./]+ ' mutants | grep -E "$wanted"; }
[ -n "$stale" ] || for test in $(headers | cut -d ' ' -f 1 | sort -u); do
    arrange
    { $make $built && sh -c "$run"; } > log 2>&1 && continue
    tail -n 3 log
    echo "the test $test is not green without a mutant"
    exit 1
done
test=""
while IFS= read -r line; do
    case $line in
        "#"*) ;;
        "- "* | "-") printf '%s\n' "${line#-}" | sed 's/^ //' >> old ;;
        "+ "* | "+") printf '%s\n' "${line#+}" | sed 's/^ //' >> new ;;
        "")
            if [ -n "$test" ] && echo "$test $file $about" | grep -qE "$wanted"; then try; fi
            test="" ;;
        " "*) fail "NEITHER - NOR + BEFORE THE LINE '$line'" ;;
        *) test=${line%% *} line=${line#* } file=${line%% *} about=${line#* }; rm -f old new ;;
    esac
done < mutants
echo "$killed passed, $failed failed"
[ "$failed" = 0 ]
