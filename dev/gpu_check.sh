#!/bin/sh
# The checks that need a GPU, in stages of at most six minutes each:
#
#   sh dev/gpu_check.sh [STAGE...]      without STAGE: all of them, in this order
#   sh dev/gpu_check.sh help            this text
#
#   build       the trainer for the five headline modes, the tests in both precisions, the timer of
#               kernels; the trainer in float32 and for the CPU, for the stage runs
#   tests       every layer and every mode against the judge, on the GPU, in both precisions, each
#               test in a process of its own
#   runs        the trainer as a user runs it (dev/test/cuda.sh): runs repeated, stopped, resumed,
#               moved to the CPU and back
#   sanitize    compute-sanitizer over the tests of layers: memory, races and barriers where all
#               kernels are ours; then memory where the library's are among them
#   kernels     the time of every layer beside its floor, at the shapes of GPT-2 124M, of the 740M
#               model, and of experts; their products in PyTorch
#   train124    GPT-2 124M under the five modes, in turns: ms a step, tokens a second, percent of
#               the peak, SPAN's time over PRE's
#   train740    the 740M model likewise
#   trainmoe    OLMoE with 588M active parameters of 3.4B likewise: 64 experts, 8 a token
#   torch       GPT-2 124M in PyTorch (dev/bench/gpu/torch_gpt.py), in turns with ours
#   report      report.json and report.md from all results, of one call or of several;
#               results.tar.gz: all files of OUT in one
#
# Each stage writes one file in OUT, and needs no other stage but build. A stage, or a part of one,
# whose tool is missing says so and continues. In the environment:
#   OUT             the folder of results (build/gpu_check)
#   LIMIT           seconds of a stage (360)
#   TEST_SECONDS    seconds of one test (120)
#   ROUNDS          of the stages that take turns, as far as time allows (6; with PyTorch 3)
#   SECONDS_124M    seconds of one run from its first step on (8); SECONDS_740M, SECONDS_MOE (10)
#   STARTUP         seconds until the first step, at most (150)
#   PYTHON          the interpreter (python3)
set -u
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-build/gpu_check} LIMIT=${LIMIT:-360} TEST_SECONDS=${TEST_SECONDS:-120}
STARTUP=${STARTUP:-150} PYTHON=${PYTHON:-python3}
STAGES="build tests runs sanitize kernels train124 train740 trainmoe torch report"
MODES="pre span post hybrid sdd"
SECTIONS="linears attention norms qkv activation ends update experts"   # of kernels.cu
# Names of the small tests, and of those among them that run the library's kernels beside ours.
LAYERS="activation|adamw|attention|combine|classifier|decode|embedding|experts|gradient|graph"
LAYERS="$LAYERS|linear|loss_sums|norm(_|$)|qkv|rounding|router(_|$)"
LIBRARY="linear|experts$"
export OMP_WAIT_POLICY=passive

say() { echo "$(date +%H:%M:%S) $*"; }
have() { command -v "$1" > /dev/null || { say "skipped: no $1"; false; }; }
built() { [ -x "$1" ] || { say "skipped: no $1 (sh dev/gpu_check.sh build)"; false; }; }
jobs() { nproc 2> /dev/null || echo 4; }
# Seconds left to the stage, less the five that it takes to end; at least 1.
seconds_left() { left=$((deadline - 5 - $(date +%s))); echo $((left > 1 ? left : 1)); }
at_most() { left=$(seconds_left); echo $((left < $1 ? left : $1)); }

stage_build() {
    # If the toolkit has no cuBLASLt, PyTorch's folder may have it.
    if [ -z "${CUBLAS:-}" ] && [ ! -f "${CUDA:-/usr/local/cuda}/include/cublasLt.h" ]; then
        found=$("$PYTHON" -c '
import glob, nvidia
for root in nvidia.__path__: print(*glob.glob(root + "/*/include/cublasLt.h"), sep="\n")
' 2> /dev/null | grep -m 1 .)
        if [ -n "$found" ]; then
            CUBLAS=$(dirname "$found")
            export CUBLAS
            say "cuBLASLt of $CUBLAS"
        fi
    fi
    targets="test_gpt_cuda build/cuda-bench/kernels build/cuda-span-fp32/train_gpt"
    for mode in $MODES; do targets="$targets build/cuda-$mode-bf16/train_gpt"; done
    # shellcheck disable=SC2086
    make -k -j "$(jobs)" $targets > "$OUT/build.txt" 2>&1
    status=$?
    make build/cpu-span-fp32/train_gpt >> "$OUT/build.txt" 2>&1 || status=$?
    warnings=$(grep -c -i 'warning' "$OUT/build.txt")
    say "make ended with status $status, $warnings lines with warnings"
    [ $status = 0 ] || tail -n 30 "$OUT/build.txt"
    return $status
}

# one_test PRECISION NAME: the output of a test and how it ended. The test runs in a process of its
# own, so that a fault or a hang ends no other.
one_test() {
    log=build/gpu_test-$1-$2.txt verdict="not run"
    : > "$log"
    if [ "$(seconds_left)" -gt 1 ]; then
        timeout -k 5 "$(at_most "$TEST_SECONDS")" \
            build/cuda-test/test_gpt-"$1" "=$2" > "$log" 2>&1
        status=$?
        case $status in
            0) verdict=passed ;;
            124 | 137) verdict="timed out" ;;
            *)  verdict="crashed with status $status"
                ! grep -q '^[0-9]* passed, [0-9]* failed$' "$log" || verdict=failed ;;
        esac
    fi
    { sed "s/^/$1: /" "$log"; echo "$1: $2: $verdict"; } >> "$OUT/tests.txt"
    rm "$log"
}

# A few at a time: the judge in double takes longer than the GPU.
stage_tests() {
    bad=0 at_once=4
    export deadline OMP_NUM_THREADS=$((($(jobs) + at_once - 1) / at_once))
    : > "$OUT/tests.txt"
    for prec in fp32 bf16; do
        test=build/cuda-test/test_gpt-$prec
        built $test >&2 && $test --list | sed "s/^/$prec /"
    done > build/gpu_tests.txt
    xargs -n 2 -P $at_once sh "$0" --test < build/gpu_tests.txt
    for prec in fp32 bf16; do
        all=$(grep -c "^$prec " build/gpu_tests.txt)
        good=$(grep -c "^$prec: [a-z0-9_]*: passed$" "$OUT/tests.txt")
        say "$prec: $good of $all tests passed"
        { [ "$all" -gt 0 ] && [ "$good" = "$all" ]; } || bad=1
    done
    ends='failed|crashed with status [0-9]+|timed out|not run'
    grep -E ": FAILED |: error: |: [a-z0-9_]+: ($ends)\$" "$OUT/tests.txt"
    return $bad
}

stage_runs() {
    for name in cuda-span-fp32 cuda-span-bf16 cpu-span-fp32; do
        built build/$name/train_gpt || return 1
    done
    mkdir -p build/gpu_check
    for prec in fp32 bf16; do
        ln -sf ../cuda-span-$prec/train_gpt build/gpu_check/train_gpt-$prec
    done
    GPU=$(pwd)/build/gpu_check/train_gpt timeout "$(seconds_left)" \
        sh dev/test/cuda.sh > "$OUT/runs.txt" 2>&1
    status=$?
    rm build/gpu_check/train_gpt-fp32 build/gpu_check/train_gpt-bf16
    echo "status $status" >> "$OUT/runs.txt"
    grep -E 'FAILED|passed,|^status' "$OUT/runs.txt"
    return $status
}

# Each tool gets a share of the stage, our kernels first: the library's would take all of the time.
# Status 9: the tool found something; 124: time was up. A call that fails is no finding: the library
# tries calls and falls back, and ours are all checked. How the library's kernels meet at barriers
# is not for us to judge.
stage_sanitize() {
    : > "$OUT/sanitize.txt"
    have compute-sanitizer || return 0
    bad=0 runs=5
    for run in memcheck:bf16:ours racecheck:bf16:ours synccheck:bf16:ours memcheck:fp32:ours \
               memcheck:bf16:library; do
        tool=${run%%:*} whose=${run##*:} prec=${run#*:} prec=${prec%:*} log=build/gpu_sanitize.txt
        share=$(($(seconds_left) / runs)) runs=$((runs - 1)) invert=v
        [ $whose = ours ] || invert=""
        test=build/cuda-test/test_gpt-$prec
        built "$test" || continue
        tests=$("$test" --list | grep -E "$LAYERS" | grep -${invert}E "$LIBRARY" | sed 's/^/=/')
        # shellcheck disable=SC2086
        timeout -k 5 "$share" compute-sanitizer --tool "$tool" --report-api-errors no \
            --print-limit 10 --error-exitcode 9 "$test" $tests > $log 2>&1
        status=$?
        [ $status = 0 ] || [ $status = 124 ] || bad=1
        {
            sed "s/^/$tool $prec $whose: /" $log | tail -n 200
            echo "$tool $prec $whose: status $status"
        } >> "$OUT/sanitize.txt"
        say "$tool $prec $whose: status $status$([ $status = 124 ] && echo ', time was up')," \
            "$(grep -c ' ok ' $log) tests ok," \
            "$(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' $log | tail -n 1)"
    done
    return $bad
}

torch_sees_gpu() {
    have "$PYTHON" || return 1
    "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null ||
        { say "skipped: no PyTorch that sees the GPU"; return 1; }
}

stage_kernels() {
    built build/cuda-bench/kernels || return 1
    status=0
    : > "$OUT/kernels.jsonl"
    for section in $SECTIONS; do           # one that ends in a fault, or never, costs no other
        timeout -k 5 "$(at_most $((LIMIT / 3)))" \
            build/cuda-bench/kernels "$section" >> "$OUT/kernels.jsonl" ||
            { say "$section ended with status $?"; status=1; }
    done
    if torch_sees_gpu; then
        timeout "$(seconds_left)" \
            "$PYTHON" dev/bench/gpu/torch_experts.py >> "$OUT/kernels.jsonl" || status=1
    fi
    say "$(wc -l < "$OUT/kernels.jsonl") lines"
    return $status
}

# another NAME, before each turn: whether there is time for one as long as the longest so far. If
# not, a stage ends with the results it has.
began="" longest=0
another() {
    now=$(date +%s)
    [ -n "$began" ] && [ $((now - began)) -gt $longest ] && longest=$((now - began))
    began=$now
    [ "$(seconds_left)" -gt $longest ] && return
    say "time is up before $1: $(seconds_left) s are left, the longest so far took $longest"
    return 1
}

# one_run WHAT MODEL ROUND SECONDS COMMAND...: a line with what ran and the milliseconds of its
# steps. The run is killed SECONDS after its first step: neither its start nor the checkpoint at its
# end is to be timed.
first_step() { grep -q '"ms"' build/gpu_run/log.jsonl 2> /dev/null; }
one_run() {
    what=$1 model=$2 round=$3 seconds=$4 late=""; shift 4
    patience=$(($(seconds_left) - ${seconds%.*}))
    [ $patience -lt "$STARTUP" ] || patience=$STARTUP
    end=$(($(date +%s) + patience))
    rm -rf build/gpu_run
    "$@" > build/gpu_run.txt 2>&1 &
    pid=$!
    trap 'kill -KILL $pid; exit 1' INT TERM
    until first_step; do
        kill -0 $pid 2> /dev/null || break
        [ "$(date +%s)" -lt $end ] || { late=" within $patience s"; break; }
        sleep 0.1
    done
    first_step && sleep "$seconds"
    { kill -KILL $pid; wait $pid; } 2> /dev/null
    trap - INT TERM
    if first_step; then
        ms=$(sed -n 's/.*"ms": \([0-9.e+]*\).*/\1/p' build/gpu_run/log.jsonl | tr '\n' ',')
        config=$(tr -d '\n' < build/gpu_run/config.json)
        printf '{"what": "%s", "model": "%s", "round": %s, "ms": [%s], "config": %s}\n' \
            "$what" "$model" "$round" "${ms%,}" "$config"
    else
        say "no steps$late: $what $model: $(tail -n 3 build/gpu_run.txt | tr '\n' ' ')" >&2
        false
    fi
    status=$?
    rm -rf build/gpu_run build/gpu_run.txt
    return $status
}

# ours MODE MODEL ROUND SECONDS BATCH MICRO
ours() {
    built build/cuda-"$1"-bf16/train_gpt >&2 || return 1
    one_run "$1" "$2" "$3" "$4" build/cuda-"$1"-bf16/train_gpt --model "$2" --batch "$5" \
        --micro-batch "$6" --steps 100000 --val-every 0 --save-every 0 --norms-every 0 --sample 0 \
        --out build/gpu_run
}

# train FILE MODEL SECONDS BATCH MICRO: all modes in turns, each round beginning with another, so
# that a GPU that warms up or slows down does so for all. MICRO: on a GPU of 80 GB.
train() {
    bad=0 turn=$MODES micro=$5
    memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null)
    [ "$(echo "$memory" | head -n 1)" -ge 120000 ] 2> /dev/null && micro=0
    : > "$OUT/$1"
    for round in $(seq 1 "${ROUNDS:-6}"); do
        for mode in $turn; do
            # One round of all modes is the least.
            another "$mode in round $round" || { [ "$round" -gt 1 ] && return $bad; return 1; }
            ours "$mode" "$2" "$round" "$3" "$4" "$micro" >> "$OUT/$1" || bad=1
        done
        [ -s "$OUT/$1" ] || { say "none of them runs"; return 1; }
        say "round $round: $(wc -l < "$OUT/$1") runs"
        turn="${turn#* } ${turn%% *}"
    done
    return $bad
}
stage_train124() { train train124.jsonl gpt2-124M "${SECONDS_124M:-8}" 64 0; }
stage_train740() { train train740.jsonl span-740M "${SECONDS_740M:-10}" 16 8; }
stage_trainmoe() { train trainmoe.jsonl olmoe-588M-3B "${SECONDS_MOE:-10}" 4 1; }

stage_torch() {
    : > "$OUT/torch.jsonl"
    torch_sees_gpu || return 0
    bad=0
    for round in $(seq 1 "${ROUNDS:-3}"); do
        another "round $round" || { [ "$round" -gt 1 ] && return $bad; return 1; }
        ours pre gpt2-124M "$round" "${SECONDS_124M:-8}" 64 0 >> "$OUT/torch.jsonl" || bad=1
        timeout "$(seconds_left)" \
            "$PYTHON" dev/bench/gpu/torch_gpt.py --round "$round" >> "$OUT/torch.jsonl" || bad=1
        say "round $round: $(wc -l < "$OUT/torch.jsonl") runs"
    done
    return $bad
}

stage_report() {
    status=0
    have "$PYTHON" && { "$PYTHON" dev/bench/gpu/report.py "$OUT" || status=1; }
    (cd "$OUT" && find . -type f ! -name results.tar.gz | sort | tar -czf results.tar.gz -T -) ||
        status=1
    return $status
}

# The machine, for the report. At every stage anew: each may run on another machine.
machine() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit \
        --format=csv,noheader 2> /dev/null | head -n 1 || true
    git describe --always --dirty --exclude '*' 2> /dev/null || echo unknown
    date -u +%Y-%m-%dT%H:%M:%SZ
}

case ${1:-} in
    help | -h | --help) sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --inside) deadline=$(($(date +%s) + LIMIT)); "stage_$2"; exit ;;
    --test) one_test "$2" "$3"; exit ;;
esac
[ $# -gt 0 ] || set -- $STAGES
for stage; do
    case " $STAGES " in
        *" $stage "*) ;;
        *) echo "error: no stage $stage; expected some of: $STAGES"; exit 2 ;;
    esac
done
mkdir -p "$OUT"
passed=0 failed=0
export OUT LIMIT TEST_SECONDS STARTUP PYTHON
for stage; do
    say "$stage"
    [ "$stage" = report ] || machine > "$OUT/machine.txt"
    timeout "$LIMIT" sh "$0" --inside "$stage"
    status=$?
    if [ $status = 0 ]; then passed=$((passed + 1))
    else
        failed=$((failed + 1))
        say "$stage: FAILED with status $status" \
            "$([ $status = 124 ] && echo "after $LIMIT seconds")"
    fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
