#!/bin/sh
# The checks that need a GPU, in stages of at most nine minutes each. Each builds what it needs.
#
#   sh dev/gpu_check.sh [STAGE...]      without STAGE: those of STAGES, by default all in this order
#   sh dev/gpu_check.sh help            this text
#
#   first       is it right? the bf16 tests of attention, linear, norm and moe; kernels by wgmma
#               against those by mma.sync
#   train124    how fast? GPT-2 124M in turns: ms a step, tokens a second, percent of the peak;
#               SPAN's time over PRE's; PRE by mma.sync, under Muon, and with documents apart
#   kernels     which layer is slow? every layer beside its floor and its estimate, at the shapes of
#               GPT-2 124M, of the 740M model, and of experts; first a product and a copy as large
#               as the GPU likes them: what it reaches; attention and experts in PyTorch
#   ncu         why? Nsight Compute on eleven kernels: speed of light, shared memory
#   timeline    where is the rest? a step launch by launch: it adds up to the step
#   graph       GPT-2 124M with --graph on and off, 64 and 4 sequences a step
#   train740    the 740M model, with and without gradient accumulation, by mma.sync, under Muon
#   trainmoe    OLMoE with 588M active parameters of 3.4B: 64 experts, 8 a token; the same options
#   tests       every layer and every placement against the judge, in both precisions
#   sanitize    compute-sanitizer over the tests of layers: memory, races and barriers where all
#               kernels are ours; then memory where the library's are among them
#   runs        the trainer as a user runs it (dev/test/cuda.sh): runs repeated, stopped, resumed,
#               moved to the CPU and back
#   torch       GPT-2 124M in PyTorch (dev/bench/gpu/torch_gpt.py), in turns with ours
#   report      report.md and report.json from all results, of one call or of several
#   build       only by its name: the programs of STAGES, without a GPU too
#
# Each stage writes a file of its own to OUT; results.tar.gz there holds all, after each;
# before-*.tar.gz are those of earlier calls. A stage, or a part of one, whose tool is missing says
# so and continues. Each test runs in a process of its own. In the environment:
#   OUT             the folder of results (build/gpu_check)
#   STAGES          the stages
#   MODES           placements that train (pre span)
#   KERNELS         --kernels of the trainers (auto): mma, where a kernel by wgmma hangs
#   ROUNDS          of stages that take turns, if there is time (3)
#   MINUTES         for the whole call; no stage begins with less than 30 seconds left
#   LIMIT           seconds of a stage (540)
#   BINARIES        a folder: `build` puts its programs there, for any x86-64 since 2015; other
#                   stages take them from there and build nothing
#   GPU_ARCH        the GPU to build for, as ARCH of make (default: the one here): 90a, 80, 100, ...
#   TEST_SECONDS    seconds of one test (120)
#   SECONDS_124M    seconds of one run from its first step on (8); SECONDS_740M (12),
#                   SECONDS_MOE (10)
#   STARTUP         seconds until the first step, at most (150)
#   NCU_KERNELS     what ncu looks at (dev/bench/gpu/times.sh)
#   PYTHON          the interpreter (python3)
#   CUDA, CUBLAS, CUPTI    the toolkit's folder, the folders of cublasLt.h and cupti.h
set -u
cd "$(dirname "$0")/.." || exit 1
ALL="first train124 kernels ncu timeline graph train740 trainmoe tests sanitize runs torch report"
OUT=${OUT:-build/gpu_check} LIMIT=${LIMIT:-540} TEST_SECONDS=${TEST_SECONDS:-120}
STARTUP=${STARTUP:-150} PYTHON=${PYTHON:-python3} BINARIES=${BINARIES:-} GPU_ARCH=${GPU_ARCH:-}
MODES=${MODES:-pre span} STAGES=${STAGES:-$ALL} MINUTES=${MINUTES:-}
TIMED=" train124 kernels timeline graph train740 trainmoe torch "   # with clocks and power
export OMP_WAIT_POLICY=passive OUT LIMIT TEST_SECONDS STARTUP PYTHON BINARIES GPU_ARCH MODES STAGES
. dev/bench/gpu/find.sh
. dev/bench/gpu/tests.sh
. dev/bench/gpu/times.sh

stage_report() { ! have "$PYTHON" || "$PYTHON" dev/bench/gpu/report.py "$OUT"; }

# The machine, for the report. At every stage anew: each may run on another machine. 2000 MiB are
# more than an idle GPU takes.
machine() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit \
        --format=csv,noheader 2> /dev/null | head -n 1 || true
    used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2> /dev/null |
        head -n 1)
    [ "${used:-0}" -gt 2000 ] 2> /dev/null &&
        echo "The GPU was not idle: $used MiB of its memory were taken."
    git describe --always --dirty --exclude '*' 2> /dev/null || echo unknown
    date -u +%Y-%m-%dT%H:%M:%SZ
}

# Runs in a process of its own, which ends with the stage's time.
inside() {
    deadline=$(($(date +%s) + LIMIT))
    case $TIMED in *" $1 "*) watch_clocks "$1" ;; esac
    [ "$1" = build ] || need $(programs_of "$1")
    "stage_$1"
}

# one_stage NAME
one_stage() {
    limit=$LIMIT
    if [ -n "$MINUTES" ] && [ "$1" != report ]; then
        left=$((MINUTES * 60 - ($(date +%s) - started)))
        [ $left -ge 30 ] || { say "$1: not begun, $left s are left"; return 1; }
        [ $left -ge "$LIMIT" ] || limit=$left
    fi
    say "$1"
    case $1 in
        build | report) ;;
        *)  machine > "$OUT/machine.txt"
            ! busy=$(grep '^The GPU was' "$OUT/machine.txt") || say "$busy" ;;
    esac
    within -k 10 "$limit" env LIMIT="$limit" sh dev/gpu_check.sh --inside "$1"
    status=$?
    (cd "$OUT" && find . -type f ! -name '*.tar.gz' | sort | tar -czf results.tar.gz -T -)
    [ $status = 0 ] && return
    say "$1: FAILED with status $status$([ $status = 124 ] && echo " after $limit seconds")"
    return 1
}

case ${1:-} in
    help | -h | --help) sed -n '2,/^set -u/s/^# \{0,1\}//p' dev/gpu_check.sh; exit 0 ;;
    --inside) inside "$2"; exit ;;
    --test) one_test "$2" "$3" "$4" "$5"; exit ;;
esac
# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $STAGES
for stage in "$@" $STAGES; do
    case " build $ALL " in
        *" $stage "*) ;;
        *) echo "error: no stage $stage; expected some of: build $ALL"; exit 2 ;;
    esac
done
mkdir -p "$OUT" build
# Whatever a call starts holds its lock. One that is being ended has ten seconds.
exec 9> build/gpu_check.lock
if command -v flock > /dev/null && ! flock -w 10 9; then
    printf '%s\n' "error: expected no other call of dev/gpu_check.sh, found one that runs" \
        "  -> wait for it, or end it; if there is none: rm build/gpu_check.lock"
    exit 2
fi
passed=0 failed=0 started=$(date +%s)
[ ! -e "$OUT/results.tar.gz" ] || mv "$OUT/results.tar.gz" "$OUT/before-$started.tar.gz"
for stage; do
    if one_stage "$stage"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
