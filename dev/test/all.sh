#!/bin/sh
# make test-all: what make test leaves out. The C tests under sanitizers, with another compiler and
# without OpenMP, every mode, a minute of fuzzing, whatever needs Python, and the rest of the
# emulated tests. A step fails on a warning too. dev/test/README.md says what each step proves.
#
#   sh dev/test/all.sh                   all steps
#   sh dev/test/all.sh ID...             these
#   sh dev/test/all.sh --skip ID,ID,...  all but these
#   sh dev/test/all.sh --list            their ids, minutes on two cores, and descriptions
set -eu
root=$(pwd) number=0 list="" skip="" chosen=""
case ${1:-} in
    --list) list=1; [ $# = 1 ] || { echo "error: expected nothing after --list" >&2; exit 2; } ;;
    --skip) [ $# = 2 ] || { echo "error: expected --skip ID,ID,..." >&2; exit 2; }
            skip=$(echo "$2" | tr , ' ') ;;
    *) chosen=$* ;;
esac
if [ -z "$list" ]; then
    known=$(sh "$0" --list | awk '{ print $1 }')
    for id in $skip $chosen; do
        echo "$known" | grep -qx -- "$id" ||
            { echo "error: no step $id; expected some of:" $known >&2; exit 2; }
    done
    rm -rf build/all; mkdir -p build/all
    touch build/all/passed                                # a line for each step that passed
    trap 'kill 0' INT                                     # background jobs ignore Ctrl-C
    # At most two steps at a time, most of which keep one core busy: each holds a line of this pipe.
    mkfifo build/all/room; exec 9<> build/all/room; rm build/all/room
    printf '\n\n' >&9
fi
. dev/cuda_headers.sh
unset MAKEFLAGS MFLAGS MAKELEVEL                          # each step has a make of its own
export OMP_WAIT_POLICY=passive                            # spinning threads would starve each other
export DEVICE=cpu                                         # nothing here needs a GPU
export ASAN_OPTIONS=detect_leaks=0                        # programs leave their memory to exit

# begins ID MINUTES NEEDS DESCRIPTION: whether the step runs now. NEEDS are programs, or "-".
begins() {
    if [ "$list" ]; then printf '%-16s %5s  %s\n' "$1" "$2" "$4"; return 1; fi
    case " ${chosen:-$1} " in *" $1 "*) ;; *) return 1 ;; esac
    case " $skip " in *" $1 "*) echo "$1: left out"; return 1 ;; esac
    number=$((number + 1))
    [ "$3" != - ] || return 0
    for program in $3; do
        command -v "$program" > /dev/null || { echo "$1: FAILED, no $program"; return 1; }
    done
}

# ended OK ID SECONDS LOG SUMMARY: the line of a step, after the end of its log where it failed.
ended() {
    if [ "$1" = 1 ]; then echo "$2" >> build/all/passed; echo "$2: ok${5:+, $5} ($3 s)"
    else printf '%s\n' "$2: FAILED ($3 s)
$(tail -n 30 "$4")"; fi
}

# step ID MINUTES NEEDS DESCRIPTION COMMAND...: runs the command in a copy of the tree.
step() {
    id=$1
    begins "$1" "$2" "$3" "$4" || return 0
    shift 4
    read -r _ <&9
    (
        begun=$(date +%s) tree=$root/build/all/$number log=$root/build/all/$id.log ok=0
        if (copy_tree "$tree" && cd "$tree" && "$@") > "$log" 2>&1 &&
            ! grep -qE 'warning:|^0 passed, 0 failed' "$log"; then ok=1; fi
        counted=$(grep -E '^[0-9]+ passed' "$log" | tail -n 1)
        ended $ok "$id" $(($(date +%s) - begun)) "$log" "$counted"
        [ $ok = 0 ] || rm -rf "$tree"                     # a finding of a fuzzer stays, say
        echo >&9
    ) &
}
copy_tree() {
    mkdir "$1" && git ls-files -co --exclude-standard -z | xargs -0 tar cf - | tar xf - -C "$1"
}

# emulated ID MINUTES DESCRIPTION FOLDER TESTS [ARGUMENTS OF MAKE]: tests of CUDA code in the
# emulator, both precisions side by side and nothing else, built in FOLDER of this very tree.
emulated() {
    id=$1 emu=$4 tests=$5
    begins "$1" "$2" - "$3" || return 0
    shift 5
    missing=$(cuda_headers_found) || { echo "$id: FAILED, $missing"; return 0; }
    wait
    begun=$(date +%s) log=build/all/$id.log ok=0
    if make -s -j2 EMU="$emu" "$@" "$emu/test_gpt-fp32" "$emu/test_gpt-bf16" > "$log" 2>&1; then
        { "$emu/test_gpt-fp32" "$tests" & "$emu/test_gpt-bf16" "$tests"; wait; } >> "$log" 2>&1 || :
    fi
    if [ "$(grep -c '^[1-9][0-9]* passed, 0 failed' "$log")" = 2 ] &&
        ! grep -qE 'warning:|WARNING:|ERROR:' "$log"; then ok=1; fi
    counted=$(awk '/^[0-9]+ passed/ { p += $1 } END { print p + 0 " passed" }' "$log")
    ended $ok "$id" $(($(date +%s) - begun)) "$log" "$counted"
}

# unit TESTS [ARGUMENTS OF MAKE]: the command that builds the C tests and runs those of these names;
# a name that no test has is an error.
unit='set -e
    tests=$1; shift
    for test in $tests; do
        grep -q "{\"[a-z_]*$test" test_gpt.c || { echo "no test is called $test"; exit 1; }
    done
    make -j2 build/test_gpt build/shard build/faulty build/cpu-span-fp32/train_gpt "$@"
    build/test_gpt $tests'

sanitize='-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined'
numbers="mode gemm equations single distinct causality run"
files="json stories dataloader shard tokenizer flags sampler logger refusals eval"

# ---------------------------------------------------------------------------- the C code

step size 0.1 python3 "core's KB of code, share of comments, lines over 100 columns" \
    python3 dev/test/size.py --check
step asan 3.8 gcc "C tests under gcc's AddressSanitizer and UndefinedBehaviorSanitizer" \
    sh -c "$unit" unit "mode gemm equations oracle distinct invariance causality decode $files" \
    CC=gcc CFLAGS="$sanitize"
step gcc-plain 1.1 gcc "numerical C tests with gcc -O1, without OpenMP" \
    sh -c "$unit" unit "$numbers stories" CC=gcc OMP=0 CFLAGS=-O1
step clang 2.3 clang "numerical C tests with clang" \
    sh -c "$unit" unit "$numbers oracle finite invariance decode stories" CC=clang
step clang-plain 0.7 clang "numerical C tests with clang -O1, without OpenMP" \
    sh -c "$unit" unit "mode gemm equations single run" CC=clang OMP=0 CFLAGS=-O1
step fuzz 1 clang "libFuzzer on every reader of files, a minute in all" \
    sh dev/fuzz/run.sh
# With the instruction that multiplies pairs of bfloat16, which few x86 machines have.
step arm 4 "aarch64-linux-gnu-gcc qemu-aarch64" "AArch64 with bfloat16 instructions, in qemu" \
    sh -ec '
    make -j2 CC=aarch64-linux-gnu-gcc AR=aarch64-linux-gnu-ar \
        CFLAGS="-O2 -march=armv8.2-a+bf16" build/test_gpt
    aarch64-linux-gnu-objdump -d build/test_gemm_bf16.o | grep -q bfdot
    export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
    qemu-aarch64 -cpu max build/test_gpt mode gemm bf16 exp equations single distinct'
step modes 1.4 - "every mode builds and trains, as GPT-2 and as Llama" \
    sh -c '
    for mode in $(sed -n "s/^MODE. *\([A-Z0-9_]*\),.*/\1/p" llmc/modes.h); do
        make -s CFLAGS=-O1 train_gpt NORM_MODE=$mode || exit 1
        for model in stories nanogpt-char; do
            positions=""
            [ "$mode" != NGPT ] || positions="--positions rope"    # as nGPT needs
            # shellcheck disable=SC2086
            ./train_gpt --model $model $positions --width 32 --seq 32 --batch 4 --steps 30 \
                --warmup 5 --val-every 0 --val-tokens 64 --sample 5 \
                --out runs/$mode-$model || exit 1
        done
    done'
step kills 4.5 "python3 mpirun" "an error at every system call, a hundred kills of runs" \
    sh -ec '
    make -s build/shim.so build/shard build/cpu-span-fp32/train_gpt
    CALLS=1 sh dev/test/faults.sh
    python3 dev/torture.py 100'
step mutants 0.1 python3 "the text of every mutant is in the code" \
    python3 dev/mutate.py --stale

# ---------------------------------------------------------------------------- CUDA code

# The tests of layers, named one by one: without whole models.
layers=$(ls dev/test/test_*.cu | sed 's/.*test_//; s/\.cu$//' | tr '\n' ' ')
# libomp's own locks are not instrumented; with ignore_noninstrumented_modules=1 ThreadSanitizer
# would say nothing of asynchronous copies either.
# OMP_TOOL: libomp's help for ThreadSanitizer, libarcher, crashes in a process that was forked.
mkdir -p build; echo called_from_lib:libomp > build/tsan.supp
export TSAN_OPTIONS=suppressions=$root/build/tsan.supp OMP_TOOL=disabled
emulated emu-modes 10 "emulated CUDA: the modes that make test leaves out" \
    build/emu other_modes
emulated emu-asan 2.3 "emulated CUDA: layers under Address- and UndefinedBehaviorSanitizer" \
    build/emu-asan cuda_ EMU_FLAGS="$sanitize" GPU_TESTS="$layers"
emulated emu-asan-models 18 "emulated CUDA: whole models under AddressSanitizer" \
    build/emu-asan-models cuda_ EMU_FLAGS='-O1 -g -fsanitize=address'
emulated emu-tsan 3.7 "emulated CUDA: layers under ThreadSanitizer" \
    build/emu-tsan cuda_ EMU_CXX=clang++ EMU_FLAGS='-O1 -g -fsanitize=thread' GPU_TESTS="$layers"
step emu-self 1.6 - "the emulator finds what is planted" \
    sh dev/emu/test.sh 3
step ptx 11 python3 "every kernel as nvcc's PTX, three architectures, both precisions" \
    python3 dev/ptx/check.py --all
step ptx-mutants 2.3 python3 "nvcc's PTX, broken: the checks of dev/ptx see it" \
    python3 dev/ptx/mutate.py
step ptx-suite 150 python3 "the tests of CUDA code with their kernels as nvcc's PTX" \
    sh -ec 'python3 dev/ptx/suite.py --prec bf16; python3 dev/ptx/suite.py --prec fp32'
step ladders 0.5 - "the ladders of dev/kernels reach their last step" \
    sh dev/kernels/run.sh
step gpu-check 2 - "dev/gpu_check.sh, on stand-ins for a GPU and its tools" \
    sh dev/test/gpu_check_test.sh

# ---------------------------------------------------------------------------- with Python

# What each needs besides python3 stands in the first comment of its file.
step scale 0.1 python3 "dev/SCALE.md says what dev/scale.py computes" \
    sh -c 'python3 dev/scale.py | grep "^|" > tables && grep "^|" dev/SCALE.md | diff - tables'
step plots 0.3 python3 "dev/plot.py draws losses and norms" \
    sh -ec '
    make -s build/cpu-span-fp32/train_gpt
    build/cpu-span-fp32/train_gpt --width 32 --seq 32 --batch 4 --steps 6 --norms-every 2 \
        --sample 0 --val-tokens 64 --out a
    python3 dev/plot.py a
    python3 dev/plot.py a --norms -o norms.png
    test -s a/loss.png && test -s norms.png
    ! python3 dev/plot.py nowhere 2> message
    grep -q "expected the folder of a run" message'
step diagnostics 0.4 python3 "norms and gradients in the log, against numpy" \
    sh -c '
    for mode in PRE POST SPAN HYBRID DEEPNORM KEEL PERI; do
        made="$made $mode=$(make -s CFLAGS=-O1 binary NORM_MODE=$mode)" || exit 1
    done
    python3 dev/test/test_diagnostics.py $made'
step probe 6.0 python3 "dev/probe.py against plain numpy" \
    sh -c '
    for mode in SPAN PRE SDD; do
        made="$made $mode=$(make -s CFLAGS=-O1 binary NORM_MODE=$mode)" || exit 1
    done
    python3 dev/test/test_probe.py $made'
step stats 0.1 python3 "the statistics of ablations" \
    python3 dev/test/test_stats.py
step page 0.5 python3 "the page of an ablation, in a browser" \
    python3 dev/test/test_page.py
step ablate 6.7 python3 "ablations, killed and continued" \
    python3 dev/test/test_ablate.py
step repro 6.1 python3 "dev/repro: the papers' claims, their table and statistics" \
    python3 dev/test/test_repro.py
step paper-scale 7 python3 "commands at the papers' scale, each as a miniature" \
    python3 dev/test/test_paper_scale.py
step peers 1.7 python3 "benchmarks of the CPU, and training steps beside PyTorch's" \
    python3 dev/test/test_peers.py
step oracle 0.2 python3 "PyTorch still gives the goldens" \
    python3 dev/oracle/oracle.py --check
step hf 1.8 python3 "Hugging Face models, imported and exported" \
    sh -ec '
    make -s -j2 build/logits
    make -s binary NORM_MODE=PRE
    make -s binary NORM_MODE=OLMO2
    python3 dev/test/test_hf.py'
step smollm2 4 python3 "SmolLM2-135M, imported, tuned and exported" \
    sh -c 'make -s binary NORM_MODE=PRE && python3 dev/test/test_smollm2.py'
step tiktoken 1.5 python3 "the tokenizer against tiktoken and tokenizers" \
    sh -c 'make -s build/tokenize && python3 dev/test/test_tokenizer.py'
step lm-eval 5.4 python3 "scores of tasks against lm-evaluation-harness" \
    sh -ec '
    python3 dev/test/test_lm_eval.py
    python3 dev/test/test_lm_eval.py --mode SPAN --export "python3 dev/export_hf.py {run} {folder}"'
step logs 1.1 python3 "dev/logs.py: logs as a table and as TensorBoard's files" \
    sh -c '
    make -s build/cpu-span-fp32/train_gpt &&
    python3 dev/test/test_logs.py build/cpu-span-fp32/train_gpt'
step sass 0.1 python3 "gates on machine code fail where they must" \
    python3 dev/test/test_sass.py
step get 0.5 python3 "data/get.py, from a server that misbehaves" \
    python3 dev/test/test_get.py

# The README says how long its ablation takes: nothing else runs beside it.
[ "$list" ] || wait
step readme 1.3 python3 "the README's first ablation, in at most five minutes" \
    sh -ec '
    awk "BEGIN { RS = \"\`\`\`\" } /^sh/ && /ablate.py/" README.md | sed 1d > commands
    test -s commands
    timeout 300 sh -e commands
    page=$(ls ablations/*/index.html)
    grep -F "$page" README.md'

[ -z "$list" ] || exit 0
wait
passed=$(grep -c . build/all/passed) || true
echo "$passed passed, $((number - passed)) failed"
[ "$passed" = "$number" ]
