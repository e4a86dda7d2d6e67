#!/bin/sh
# test.sh: builds dev/emu and its test with every compiler found, plain and under sanitizers, and
# runs all of it. No GPU.
#
#   sh dev/emu/test.sh [SEEDS]      correct cases run under EMU_SEED=0..SEEDS (default 20); every
#                                   planted bug must be reported, and by whom is part of the test
#   CUDA=/usr/local/cuda            where the toolkit's headers (and nvcc, for the last check) are
#
# Missing barriers: the random order finds those where a thread reads what another has yet to write;
# the race of a reduction used in a loop, and of two blocks, only ThreadSanitizer finds (clang:
# gcc's takes ten times as long).
cd "$(dirname "$0")/../.." || exit 1
SEEDS=${1:-20} OUT=${OUT:-build/test_emu} SOURCE=dev/emu/test_emu.cu SERVICES=build/services.a
. dev/cuda_headers.sh
passed=0 failed=0
rm -rf $OUT      # a stale binary must not answer for one that no longer compiles
mkdir -p $OUT
[ -f "$CUDA/include/cuda_runtime.h" ] || {
    echo "0 passed, 0 failed, all skipped: no CUDA headers in $CUDA/include"
    echo "  -> sh dev/setup.sh --all, or CUDA=<toolkit> sh dev/emu/test.sh"
    exit 0
}
make -s DEVICE=cpu OMP=0 $SERVICES || exit 1

WARN="-std=c++17 -g -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -isystem $CUDA/include"
AS_CU="-DREAL=float -x c++ -include dev/emu/emu.h"

ok()  { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); echo "FAILED $1"; tail -n 12 $OUT/log; }

# The line of the only place in the test that matches.
line() { grep -n "$1" $SOURCE | head -1 | cut -d: -f1; }

# succeeds WHAT command...
succeeds() {
    what=$1
    shift
    if "$@" > $OUT/log 2>&1; then ok; else bad "$what: expected success"; fi
}

# reports WHAT STATUS PATTERN command...: the status (any but 0 for "-") and the message
reports() {
    what=$1 status=$2 pattern=$3; shift 3
    "$@" > $OUT/log 2>&1; got=$?
    if { [ $got = "$status" ] || { [ "$status" = - ] && [ $got != 0 ]; }; } &&
        grep -q -- "$pattern" $OUT/log
    then ok
    else bad "$what: expected status $status and '$pattern', found status $got"; fi
}

# How many of the seeds give status 1 (a wrong result).
wrong() {
    n=0
    for s in $(seq 0 "$SEEDS"); do
        EMU_SEED=$s "$@" > $OUT/log 2>&1
        [ $? = 1 ] && n=$((n + 1))
    done
    echo $n
}

seen() {
    n=$(wrong "$2" "$3")
    if [ "$n" -ge "$4" ]; then ok; else bad "$1: wrong under $n seeds, expected at least $4"; fi
}

# Without a seed the last is the last; with seeds it differs.
orders() {
    for who in block before after; do
        last=31; [ $who = block ] && last=7
        reports "$1 $who in order" 0 "^$who $last\$" env EMU_SEED=0 $1 order
        for s in $(seq 1 10); do EMU_SEED=$s $1 order | grep $who; done > $OUT/log
        if [ "$(sort -u $OUT/log | wc -l)" -ge 4 ]; then
            ok
        else
            bad "$1: the last $who hardly differs under 10 seeds"
        fi
    done
}

# The runtime's answers about the machine, and its refusals.
machines() {
    t=$1
    reports "$t device" 0 "devices 1: no error" $t device
    reports "$t device's architecture" 0 "compute 9.0: no error" $t device
    reports "$t EMU_DEVICES" 0 "devices 0: no CUDA-capable device" env EMU_DEVICES=0 $t device
    reports "$t no driver" 0 "driver 0" env EMU_DRIVER=0 $t device
    reports "$t EMU_DRIVER" 0 "devices 0: CUDA driver version is insufficient" \
        env EMU_DRIVER=12040 $t device
    reports "$t EMU_COMPUTE" 0 "compute 7.0: no error" env EMU_COMPUTE=70 $t device
    for gpu in 80:163 86:99 90:227 100:227 120:99; do
        reports "$t shared memory of $gpu" 0 "shared $((${gpu#*:} * 1024))" \
            env EMU_COMPUTE="${gpu%:*}" $t device
    done
    reports "$t EMU_MEMORY" 0 "memory 1048576" env EMU_MEMORY=1048576 $t device
    reports "$t EMU_BUILT" 1 "compute 9.0: no kernel image" env EMU_BUILT=80 $t device
    reports "$t EMU_BUILT, launch" 1 "a launch was refused: no kernel image" \
        env EMU_BUILT=80 $t device
}

plain() {
    t=$1
    orders $t
    for s in $(seq 0 "$SEEDS"); do succeeds "$t seed $s" env EMU_SEED="$s" $t correct; done
    succeeds "$t api" $t api
    succeeds "$t graph_refusals" $t graph_refusals
    seen "$t graph_reuse" $t graph_reuse $((SEEDS + 1))
    machines $t
    reports "$t divergent" 3 "divergent __syncthreads: .*test_emu.cu:$(line 'else __syncthreads')" \
        $t divergent
    reports "$t divergent names" 3 \
        "LAUNCH(reverse_kernel<BUG>.*block (0, 0, 0), thread (83, 0, 0)" $t divergent
    reports "$t deadlock" 3 "deadlock, 96 threads live" $t deadlock
    reports "$t deadlock place" 3 \
        "13 in __syncwarp of .*test_emu.cu:$(line 'else __syncwarp') with mask 0xffffffff, \
the first is thread (83, 0, 0)" $t deadlock
    reports "$t half_warp" 3 \
        "__shfl_xor_sync at .* reads lane 16, which is not there (mask 0xffffffff, \
lanes that came 0x0000ffff)" $t half_warp
    reports "$t wrong_mask" 3 "where other lanes of mask 0xffffffff wait in __shfl_sync" \
        $t wrong_mask
    reports "$t mixed_warp" 3 \
        "__any_sync at .*, where other lanes of mask 0xffff0000 wait in __ballot_sync" $t mixed_warp
    reports "$t not_in_mask" 3 "__syncwarp at .* with mask 0xffff0000, in which lane 0 is not" \
        $t not_in_mask
    reports "$t active_mask" 3 "__shfl_down_sync at .* reads lane 1, which is not there" \
        $t active_mask
    reports "$t too_many_threads" 1 \
        "invalid configuration argument: LAUNCH(add_kernel.*block (1025, 1, 1)" $t too_many_threads
    reports "$t half_mma" 3 "mma at .*test_emu.cu:[0-9]* with lanes 0xffff0000 alone" $t half_mma
    reports "$t half_ldmatrix" 3 "ldmatrix.* at .*test_emu.cu:[0-9]* with lanes 0x0000ffff alone" \
        $t half_ldmatrix
    for bug in no_copy_wait no_commit; do
        reports "$t $bug" 3 "a thread ends with [12] asynchronous copies it has not waited for" \
            $t $bug
    done
    reports "$t misaligned" 3 "cp.async at .* with address" $t misaligned
    seen "$t late_copy_wait" $t late_copy_wait $((SEEDS + 1))
    seen "$t no_copy_barrier" $t no_copy_barrier 1
    seen "$t unset_shared" $t unset_shared $((SEEDS + 1))
    seen "$t no_barrier" $t no_barrier $((SEEDS + 1))
    seen "$t no_sum_barrier" $t no_sum_barrier 1
    seen "$t no_syncwarp" $t no_syncwarp 1
    seen "$t no_event" $t no_event 1
    seen "$t pinned_reuse" $t pinned_reuse 1
}

address() {
    t=$1
    for s in 0 1 2; do succeeds "$t seed $s" env EMU_SEED=$s $t correct; done
    reports "$t shared_out" 1 "#0 .*transpose_kernel.*test_emu.cu:$(line 'BUG == SHARED_OUT')" \
        $t shared_out
    reports "$t dynamic_out" 1 "#0 .*reverse_kernel.*test_emu.cu:$(line 'BUG == DYNAMIC_OUT')" \
        $t dynamic_out
    reports "$t global_out" 1 "#1 .*rows_kernel.*test_emu.cu:$(line '__ldg(in')" $t global_out
    reports "$t matrix_out" 1 "#. .*matrix_kernel.*test_emu.cu:$(line 'ldmatrix<true>(right')" \
        $t matrix_out
    reports "$t copy_out" 1 "#. .*matrix_kernel.*test_emu.cu:$(line 'copy_async(&tile\[16')" \
        $t copy_out
    reports "$t deep_stack" 1 "stack-overflow" $t deep_stack
}

thread() {
    t=$1
    for s in 0 1 2; do succeeds "$t seed $s" env EMU_SEED=$s $t correct; done
    reports "$t no_barrier" 66 "data race.*transpose_kernel" $t no_barrier
    for bug in no_sum_barrier no_loop_barrier; do
        reports "$t $bug" 66 "SUMMARY.*data race .*test_emu.cu:$(line 'partial\[warp\] = x')" \
            $t $bug
    done
    reports "$t no_syncwarp" 66 "SUMMARY.*data race .*test_emu.cu:$(line 'cell\[lane\] = sum')" \
        $t no_syncwarp
    for bug in no_copy_barrier early_copy; do reports "$t $bug" 66 "data race" $t $bug; done
    reports "$t late" 66 "SUMMARY.*data race .*test_emu.cu:$(line "else out.0. = x.0.")" $t late
    reports "$t block_race" 66 "SUMMARY.*data race .*test_emu.cu:$(line 'BUG == BLOCK_RACE')" \
        $t block_race
}

for c in g++ clang++; do
    command -v $c > /dev/null || { echo "skipped: no $c"; continue; }
    for context in fast ucontext; do
        define=$([ $context = ucontext ] && echo -DEMU_UCONTEXT)
        runtime=$OUT/emu_${c}_$context.o
        succeeds "$c compiles emu.cpp" $c $WARN $define -c dev/emu/emu.cpp -o $runtime
        succeeds "$c $context" $c $WARN $AS_CU $SOURCE \
            -x none $runtime $SERVICES -o $OUT/plain_${c}_$context
        plain $OUT/plain_${c}_$context
        reports "$c $context deep_stack" 3 "stack overflow: .*" $OUT/plain_${c}_$context deep_stack
    done
    runtime=$OUT/emu_${c}_fast.o
    succeeds "$c address" $c $WARN $AS_CU -fsanitize=address,undefined \
        -fno-sanitize-recover=undefined $SOURCE -x none $runtime $SERVICES -o $OUT/address_$c
    address $OUT/address_$c
    cat > $OUT/no.cu << 'END'
#include "gpu.cuh"
__global__ void k(float *p) { __shared__ float s[4]; p[0] = s[0]; }
END
    reports "$c refuses __shared__" 1 "declare shared memory with SHARED" $c $WARN $AS_CU \
        -Illmc -c $OUT/no.cu -o $OUT/no.o
    cat > $OUT/no.cu << 'END'
#include "gpu.cuh"
__global__ void k(float *p) { p[0] = 0; }
void f(float *p) { LAUNCH(k, 1, 1, 0, 0, p, 1); }
END
    reports "$c counts arguments" 1 "another number of arguments" $c $WARN $AS_CU \
        -Illmc -c $OUT/no.cu -o $OUT/no.o
done
if command -v clang++ > /dev/null; then
    succeeds "clang++ thread" clang++ $WARN $AS_CU -fsanitize=thread $SOURCE \
        -x none $OUT/emu_clang++_fast.o $SERVICES -o $OUT/thread_clang++
    thread $OUT/thread_clang++
fi
if command -v "$CUDA/bin/nvcc" > /dev/null; then
    succeeds "nvcc" "$CUDA/bin/nvcc" -std=c++17 -DREAL=float -arch=sm_90 -Werror all-warnings \
        -c $SOURCE -o $OUT/nvcc.o
else echo "skipped: no nvcc"; fi
echo "$passed passed, $failed failed"
[ $failed = 0 ]
