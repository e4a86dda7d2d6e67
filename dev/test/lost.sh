#!/bin/sh
# Processes with a GPU each, of which one is lost: it dies, its network fails, or its GPU hangs. The
# others end soon and of themselves, with status 4, and the run continues to the same bits as one
# that lost nobody. In the emulator, like gpus.sh.
#   sh dev/test/lost.sh        after: make build/emu/train_gpt-fp32 build/emu/train_gpt-bf16
#                              build/emu/libnccl.so.2 build/shim.so
. dev/test/several.sh
steps="$model --batch 5 --val-every 0 --val-tokens 80 --save-every 1 --schedule-steps 4"

# killed RANK STATUSES OTHERS: at any moment of a run of three.
killed() {
    start 3 "$emu/train_gpt-fp32" $steps --steps 100000 --out "killed-$1"
    for i in $(seq 300); do grep -q '^step ' said.0 && break; sleep 0.1; done
    eval "kill -9 \$process_$1"
    begin=$(date +%s)
    statuses
    [ $(($(date +%s) - begin)) -lt 10 ] && [ "$all" = "$2" ] || return 1
    for r in $3; do
        grep -q "process $1 of 3 is gone, and process $r ends with it" "said.$r" || return 1
    done
}
check "process 1 is killed"                        killed 1 " 4 137 4" "0 2"
check "process 0 is killed"                        killed 0 " 137 4 4" "1 2"

# lost PRECISION N FAULT STATUSES WORDS: in step 3 of 4, at a moment that the emulated NCCL chooses
# (EMU_NCCL_FAULT). Transfers of the others then wait for ever; they are aborted.
whole() { several "$2" "$emu/train_gpt-$1" $steps --steps 4 --out "whole-$1-$2"; }
lost() {
    rm -rf lost late end.*
    start "$2" sh -c '"$@"; status=$?; date +%s > end.$RANK; exit $status' sh \
        timeout -s KILL 60 env EMU_NCCL_FAULT="$3" EMU_NCCL_SECONDS=0 NCCL_DEBUG=INFO \
        LD_PRELOAD="$root/build/shim.so" SHIM_LATE=late \
        "$emu/train_gpt-$1" $steps --steps 4 --out lost
    case $3 in hangs*)
        for i in $(seq 600); do cat said.* | grep -q ' hangs' && break; sleep 0.1; done
        sleep 2
        : > late ;;
    esac
    statuses
    [ "$all" = "$4" ] && cat said.* | grep -q -- "$5" || return 1
    seconds=$(($(sort -n end.* | tail -n 1) - $(sort -n end.* | head -n 1)))
    echo "$seconds seconds from the first end to the last"
    [ $seconds -le 10 ] && ! grep 'exits, and' said.* &&
        several "$2" "$emu/train_gpt-$1" --out lost --resume required --steps 4 &&
        grep "resumed from .*step_0000000[23]" said.0 && same lost "whole-$1-$2"
}
for n in 2 4; do check "fp32, $n processes, whole" whole fp32 $n; done
check "bf16, 2 processes, whole"                   whole bf16 2
# Groups of reductions: 1 of the dry step; then each step 3 of gradients and 1 of losses. Groups of
# broadcasts: 2 before the first step, then each step 1 of losses and 1 of weights.
check "1 of 2 dies in a reduction"                 lost fp32 2 "dies 1 ncclReduce 11" " 4 137" \
    "rank 0 aborts"
check "1 of 2 dies between steps"                  lost fp32 2 "leaves 1 ncclBroadcast 8" \
    " 4 137" "process 1 of 2 is gone, and process 0 ends with it"
check "3 of 4 dies in a broadcast"                 lost fp32 4 "dies 3 ncclBroadcast 8" \
    " 4 4 4 137" "rank 2 aborts"
check "0 of 4 dies in a reduction of losses"       lost fp32 4 "dies 0 ncclReduce 13" \
    " 137 4 4 4" "rank 1 aborts"
check "the network of 1 of 4 fails"                lost fp32 4 "fails 1 ncclReduce 11" " 4 4 4 4" \
    "NCCL, process 1 of 4: a transfer: remote process exited or there was a network error"
check "1 of 2 fails and cannot abort"              lost fp32 2 "stuck 1 ncclBroadcast 8" " 4 142" \
    "NCCL, process 1 of 2: a transfer: remote"
# In bf16 a save gathers the weights: 1 more group of broadcasts after each step.
check "a GPU hangs while weights are gathered"     lost bf16 2 "hangs 1 ncclBroadcast 11" " 4 4" \
    "a process or GPU hangs for ten minutes"

finish
