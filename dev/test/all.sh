#!/bin/sh
# make test-all: what make test leaves out. The C tests under AddressSanitizer and UndefinedBehaviorSanitizer, the numerical ones built by the other
# compiler and without OpenMP, every mode, a minute of fuzzing, and what needs Python. Each in a copy of the tree, without warnings.
set -eu
root=$(pwd) number=0
rm -rf build/all; mkdir -p build/all
touch build/all/passed                                    # a line for each step
export OMP_WAIT_POLICY=passive                            # threads that spin would starve each other
trap 'kill 0' INT                                         # in the background nothing hears Ctrl-C

# Two steps at a time, most of which keep one core busy: a line in this pipe is room for one.
mkfifo build/all/room; exec 9<> build/all/room; rm build/all/room
printf '\n\n' >&9

# SKIP in the environment: a regular expression; steps whose name it matches are left out, and said to be.
left_out() { [ -n "${SKIP:-}" ] && echo "$1" | grep -qE "$SKIP" && echo "$1: left out"; }

# said OK NAME BEGUN LOG CHECKS: the line of a step that ended, with the end of its log where it failed.
said() {
    if [ "$1" = 1 ]; then echo "$2" >> build/all/passed; echo "$2: ok, $5 ($(($(date +%s) - $3)) s)"
    else printf '%s\n' "$2: FAILED
$(tail -n 30 "$4")"; fi
}

# step NAME COMMAND: one line each, the log shown on failure.
step() {
    name=$1; shift
    if left_out "$name"; then return; fi
    read -r _ <&9
    number=$((number + 1))
    (
        begun=$(date +%s) tree=$root/build/all/$number log=$root/build/all/$number.log ok=0
        if (mkdir "$tree" && git ls-files -z | xargs -0 tar cf - | tar xf - -C "$tree" && cd "$tree" && "$@") > "$log" 2>&1 && ! grep -q 'warning:' "$log"; then ok=1; fi
        said $ok "$name" "$begun" "$log" "$(grep -E '^[0-9]+ passed' "$log" | tail -n 1)"
        rm -rf "$tree"
        echo >&9
    ) &
}

# cuda NAME FOLDER TESTS [MAKE'S ARGUMENTS]: tests of CUDA code in the emulator, in both precisions side by side, built in FOLDER of the tree itself.
cuda() {
    name=$1 emu=$2 tests=$3; shift 3
    if left_out "$name"; then return; fi
    wait
    number=$((number + 1))
    begun=$(date +%s) log=build/all/cuda.log ok=0
    { make -s -j2 EMU="$emu" "$@" "$emu/test_gpt-fp32" "$emu/test_gpt-bf16" && { "$emu/test_gpt-fp32" "$tests" & "$emu/test_gpt-bf16" "$tests"; wait; }; } > $log 2>&1
    if [ "$(grep -c '^[0-9]* passed, 0 failed' $log)" = 2 ] && ! grep -qE 'warning:|WARNING:|ERROR:' $log; then ok=1; fi
    said $ok "$name" "$begun" $log "$(awk '/^[0-9]+ passed/ { p += $1 } END { print p }' $log) passed"
}

export DEVICE=cpu                                         # what is tested here needs no GPU
export ASAN_OPTIONS=detect_leaks=0                        # memory that lives as long as the program is not freed at its end
sanitize='-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined'
build='-j2 build/test_gpt build/shard build/faulty build/cpu-span-fp32/train_gpt'
step "gcc, address and undefined behaviour" sh -c "make CC=gcc CFLAGS='$sanitize' $build && build/test_gpt mode gemm equations oracle distinct invariance causality extend json stories dataloader shard tokenizer flags sampler logger refusals eval hf probe"
step "gcc, no OpenMP, -O1" sh -c "make CC=gcc OMP=0 CFLAGS=-O1 $build && build/test_gpt mode gemm equations single distinct causality stories run"
if command -v clang > /dev/null; then
    step "clang" sh -c "make CC=clang $build && build/test_gpt mode gemm equations oracle finite single distinct invariance causality extend stories run"
    step "clang, no OpenMP, -O1" sh -c "make CC=clang OMP=0 CFLAGS=-O1 $build && build/test_gpt mode gemm equations single run"
    step "fuzzers, a minute (libFuzzer, address and undefined behaviour)" sh dev/fuzz/run.sh
else
    number=$((number + 1)); echo "clang: not installed, 3 checks not run"
fi
# With the instruction that multiplies pairs of bfloat16, which few x86 machines have.
if command -v aarch64-linux-gnu-gcc > /dev/null && command -v qemu-aarch64 > /dev/null; then
    step "AArch64 with bfloat16 instructions (cross compiler, qemu-user)" sh -c "
        make -j2 CC=aarch64-linux-gnu-gcc CFLAGS='-O2 -march=armv8.2-a+bf16' build/test_gpt && aarch64-linux-gnu-objdump -d build/test_gemm_bf16.o | grep -q bfdot &&
        QEMU_LD_PREFIX=/usr/aarch64-linux-gnu qemu-aarch64 -cpu max build/test_gpt mode gemm bf16 exp equations single distinct"
else
    left_out "AArch64" || { number=$((number + 1)); echo "AArch64: gcc-aarch64-linux-gnu or qemu-user not installed, 1 check not run"; }
fi
if [ -x build/emu/test_gpt-fp32 ]; then
    cuda "CUDA, every other mode" build/emu other_modes
    layers=$(for file in dev/test/test_*.cu; do name=${file#dev/test/test_}; printf '%s ' "${name%.cu}"; done)       # named one by one: without whole models
    cuda "CUDA, addresses in layers" build/emu-asan cuda_ EMU_FLAGS="$sanitize" GPU_TESTS="$layers"
    cuda "CUDA, addresses in whole models" build/emu-asan-models cuda_ EMU_FLAGS='-O1 -g -fsanitize=address'
    # libomp's own locks are not instrumented. Named alone: with ignore_noninstrumented_modules=1 ThreadSanitizer says nothing of asynchronous copies either.
    mkdir -p build; echo called_from_lib:libomp > build/tsan.supp
    export TSAN_OPTIONS=suppressions=$root/build/tsan.supp
    cuda "CUDA, data races in layers" build/emu-tsan cuda_ EMU_CXX=clang++ EMU_FLAGS='-O1 -g -fsanitize=thread' GPU_TESTS="$layers"
fi
step "the ladders of dev/kernels reach their last step" sh dev/kernels/run.sh
step "gpu_check.sh, on stand-ins for what it needs" sh dev/test/gpu_check_test.sh
step "the CUDA emulator finds what is planted (CUDA toolkit headers, no GPU)" sh dev/emu/test.sh 3
step "every mode builds and trains" sh -c '
    for mode in $(sed -n "s/^MODE. *\([A-Z0-9_]*\),.*/\1/p" llmc/modes.h); do
        make -s CFLAGS=-O1 train_gpt NORM_MODE=$mode || exit 1
        for model in stories nanogpt-char; do
            ./train_gpt --model $model --width 32 --seq 32 --batch 4 --steps 30 --warmup 5 --val-every 0 --val-tokens 64 --sample 5 --out runs/$mode-$model || exit 1
        done
    done'
step "a hundred kills of runs, an error at every call (python3, mpirun)" sh -c '
    make -s build/shim.so build/shard build/cpu-span-fp32/train_gpt && command -v mpirun && CALLS=1 sh dev/test/faults.sh && python3 dev/torture.py 100'
step "the text of every mutant is in the code" sh dev/mutate.sh --stale
step "dev/SCALE.md says what dev/scale.py computes (python3)" sh -c 'python3 dev/scale.py | grep "^|" > tables && grep "^|" dev/SCALE.md | diff - tables'
step "pictures (python3 with matplotlib)" sh -c '
    make -s build/cpu-span-fp32/train_gpt
    build/cpu-span-fp32/train_gpt --width 32 --seq 32 --batch 4 --steps 6 --norms-every 2 --sample 0 --val-tokens 64 --out a
    python3 dev/plot.py a && python3 dev/plot.py a --norms -o norms.png && test -s a/loss.png && test -s norms.png
    ! python3 dev/plot.py nowhere 2> message && grep -q "expected the folder of a run" message'
step "diagnostics against numpy (python3 with numpy)" sh -c '
    for mode in PRE POST SPAN HYBRID DEEPNORM PERI; do made="$made $mode=$(make -s CFLAGS=-O1 binary NORM_MODE=$mode)" || exit 1; done
    python3 dev/test/test_diagnostics.py $made'
step "probes against plain numpy, of a run, in a study (python3 with torch, transformers, scipy)" sh -c '
    for mode in SPAN PRE SDD; do made="$made $mode=$(make -s CFLAGS=-O1 binary NORM_MODE=$mode)" || exit 1; done
    python3 dev/test/test_probe.py $made'
step "statistics of ablations (python3 with scipy)" python3 dev/test/test_stats.py
step "the page of an ablation in a browser (python3 with matplotlib, chromium)" python3 dev/test/test_page.py
step "ablations, killed and gone on with (python3 with scipy and matplotlib)" python3 dev/test/test_ablate.py
step "the papers' claims (python3 with scipy and matplotlib)" python3 dev/test/test_repro.py
step "benchmarks of the CPU, and steps beside PyTorch's (python3 with torch)" python3 dev/test/test_peers.py
awk 'BEGIN { RS = "```" } /^sh/ && /ablate.py/' README.md | sed 1d > build/readme.sh
wait                                                      # it says how long it takes: alone
step "README: the first ablation, in five minutes" sh -c "
    test -s '$root/build/readme.sh' && timeout 300 sh -e '$root/build/readme.sh' &&
    test -s \"\$(sed -n 's/^It ends in .\(ablations.*html\).: .*/\1/p' README.md)\""
wait
step "the oracle gives the goldens (python3 with torch)" python3 dev/oracle/oracle.py --check
step "Hugging Face: models there and back (python3 with torch, transformers, lm_eval)" sh -c '
    make -s -j2 build/logits && make -s binary NORM_MODE=PRE && make -s binary NORM_MODE=OLMO2 && python3 dev/test/test_hf.py'
step "tokenizer against tiktoken (python3 with tiktoken)" sh -c 'make -s build/tokenize && python3 dev/test/test_tokenizer.py'
step "tasks as lm-evaluation-harness scores them, of a stock folder and of SPAN's (python3 with lm_eval, torch, transformers)" sh -c '
    python3 dev/test/test_lm_eval.py && python3 dev/test/test_lm_eval.py --mode SPAN --export "python3 dev/export_hf.py {run} {folder}"'
step "logs as a table and event files (python3 with tensorboard)" sh -c 'make -s build/cpu-span-fp32/train_gpt && python3 dev/test/test_logs.py build/cpu-span-fp32/train_gpt'
step "datasets, from a server that misbehaves (python3 with tiktoken and pyarrow)" python3 dev/test/test_get.py
wait
passed=$(grep -c . build/all/passed) || true
echo "$passed passed, $((number - passed)) failed"
[ "$passed" = "$number" ]
