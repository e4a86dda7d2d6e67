#!/bin/sh
# Faults one by one, with the real trainer and a tiny model: disks that are full, short or broken,
# and kills at their calls (dev/test/shim.c), damaged checkpoints, signals that ask a run to stop.
# (Kills by the hundred: dev/torture.py.) After each the run goes on, and ends with the weights of
# the run that had none. Called by make test, from the root of the repository.
set -u
root=$(pwd)
train=$root/build/cpu-span-fp32/train_gpt
# many small runs, each synced to the disk: in memory they take seconds
dir=$(mktemp -d /dev/shm/norm-faults.XXXXXX 2> /dev/null) ||
    { dir=$root/build/test/faults; rm -rf "$dir"; }
passed=0 failed=0 background=
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OMPI_MCA_rmaps_base_oversubscribe=1
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
trap '[ -z "$background" ] || kill -9 "$background" 2> /dev/null; rm -rf "$dir"' EXIT
trap 'exit 1' INT TERM PIPE
mkdir -p "$dir"; cd "$dir" || exit 1

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAILED $*"; tail -n 8 "$dir/message"; }
holds() { name=$1; shift; if "$@"; then pass; else fail "$name: $*, found:"; fi; }
# ends NAME STATUS WORDS COMMAND...: within a minute, with that status, saying WORDS.
ends() {
    name=$1 expected=$2 words=$3; shift 3
    timeout 60 "$@" < /dev/null > message 2>&1; status=$?
    if [ $status = "$expected" ] && grep -q -e "$words" message; then
        pass
    else
        fail "$name: status $status, expected $expected and \"$words\", found:"
    fi
}
cat > shim << END
#!/bin/sh
# shim FAULT COMMAND...
export LD_PRELOAD="$root/build/shim.so" SHIM_DIR="$dir/run" SHIM="\$1"; shift; exec "\$@"
END
chmod +x shim
head -c 6000 "$root/README.md" | iconv -c -f UTF-8 -t ASCII > text &&
    "$root/build/shard" --out data --shard-tokens 1500 text > message
model="--data data --layers 1 --width 16 --heads 2 --ffn 16 --seq 16 --batch 4 --warmup 1"
model="$model --sample 0 --val-tokens 64"
fours="$model --val-every 4 --save-every 4 --keep-last 2" twelve="$fours --steps 12"
# arrives NAME: the run goes on and ends as the one without faults: weights, the last checkpoint bit
# for bit, each line of the log once.
plain() { grep -v norm_mode "$1/log.jsonl" | sed 's/, "ms": [^,}]*//'; }
arrives() {
    ends "$1: goes on" 0 "^weights $weights after 12" "$train" $twelve --out "$dir/run" \
        --resume auto
    holds "$1: the last checkpoint" cmp whole/step_00000012/manifest.json \
        run/step_00000012/manifest.json
    plain run > log.run
    holds "$1: the log" cmp log.whole log.run
}
fresh() { rm -rf run; [ -z "${1:-}" ] || cp -R "$1" run; }

ends "a run without faults" 0 "^weights" "$train" $twelve --out "$dir/whole"
weights=$(sed -n 's/^weights \([0-9a-f]*\) after.*/\1/p' message)
plain whole > log.whole
ends "the same, up to step 8" 0 "^weights" "$train" $fours --steps 8 --schedule-steps 12 \
    --out "$dir/eight"

# ---- disks

bytes=$(cat eight/step_00000004/* | wc -c)  # room for one checkpoint and half of a second one
fresh
ends "full in a save" 2 \
    "cannot write $dir/run/.tmp-step/.*\.safetensors.tmp.*No space left" \
    ./shim "full $((bytes * 3 / 2))" "$train" $twelve --out "$dir/run"
holds "it says what to do" grep -q "  -> free space on that disk" message
ends "the checkpoint before is whole" 0 "validation loss" "$train" --from "$dir/run/step_00000004" \
    --eval
arrives "with space again"
fresh
ends "full in the log" 2 "cannot write $dir/run/log.jsonl: No space left" ./shim "full 9000" \
    "$train" $model --steps 400 --norms-every 1 --save-every 0 --out "$dir/run"
fresh
ends "every other write is short" 0 "^weights $weights after 12" ./shim "short 7" "$train" $twelve \
    --out "$dir/run"
arrives "every other write is short"
# Whatever has the name of a checkpoint has all its files.
are_whole() {
    for step in run/step_*; do
        [ ! -d "$step" ] || { [ -f "$step/manifest.json" ] &&
            (cd "$step" && ls $(sed -n 's/^"\([^"]*\)": {.*/\1/p' manifest.json) > /dev/null); } ||
            return 1
    done
}
for n in $(seq 15); do  # each one, to the end of the first checkpoint
    fresh
    ends "fsync $n fails" 2 "Input/output error" ./shim "sync $n" "$train" $twelve --out "$dir/run"
    holds "fsync $n failed: checkpoints are whole" are_whole
    arrives "fsync $n failed"
done
n=0
for folder in run run/new; do  # made on the way, and with a slash behind it
    n=$((n + 1)); fresh; mkdir run
    ends "fsync of $folder fails" 2 "cannot sync the folder $dir/$folder" \
        ./shim "sync $n" "$train" $twelve --out "$dir/run/new/deep/"
done
# At every call of a run in turn (CALLS=29: at each 29th): it fails, which is said with what to do
# or does no harm; the process is killed; the power is cut.
fresh; ./shim "count 0" "$train" $twelve --out "$dir/run" > message 2>&1
calls=$(sed -n 's/^shim: \([0-9]*\) calls/\1/p' message)
holds "there are calls" test "${calls:-0}" -gt 100
first=0
for fault in error kill power; do
    first=$(((first + 9) % ${CALLS:-29} + 1))  # so that each kind is at calls of its own
    for n in $(seq $first "${CALLS:-29}" "$calls"); do
        fresh
        timeout 60 ./shim "$fault $n" "$train" $twelve --out "$dir/run" > message 2>&1; status=$?
        case "$fault $status" in
        "error 0" | "kill 137" | "power 137") pass ;;
        "error 1" | "error 2") holds "$fault at call $n says what to do" \
            sh -c "grep -q '^error: ' message && grep -q '^  -> ' message" ;;
        *) fail "$fault at call $n: status $status, found:" ;;
        esac
        holds "$fault at call $n: checkpoints are whole" are_whole
        arrives "$fault at call $n"
        holds "$fault at call $n: nothing is damaged" sh -c '! grep -q "^warning:" message'
    done
done

# ---- damaged checkpoints

flip() {                                                                 # FILE BYTE: its lowest bit
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "\\$(printf %03o $((byte ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2> /dev/null
}
for path in eight/step_00000008/*; do
    file=${path##*/}
    for damage in flipped cut empty gone; do
        fresh eight; hurt=run/step_00000008/$file half=$(($(wc -c < "$path") / 2))
        case $damage in
        flipped) flip $hurt $half ;;
        cut)     head -c $half $hurt > piece && mv piece $hurt ;;
        empty)   : > $hurt ;;
        gone)    rm $hurt ;;
        esac
        ends "$file $damage" 0 \
            "warning: passing over the damaged checkpoint $dir/run/step_00000008: .*" \
            "$train" $twelve --out "$dir/run" --resume auto
        holds "$file $damage: goes on from the one before" \
            grep -q "resumed from $dir/run/step_00000004 at step 4" message
        holds "$file $damage: the same end" grep -q "^weights $weights after 12" message
    done
done

# A run that went back behind a damaged checkpoint keeps the ones it then writes, though the damaged
# one has a later step.
fresh eight; flip run/step_00000008/model.safetensors 300
ends "behind a damaged one, and stopped there" 0 "^weights" "$train" $model --val-every 4 \
    --save-every 1 --steps 6 --schedule-steps 12 --out "$dir/run" --resume auto --keep-last 1
ends "goes on from the newest whole one" 0 "^weights $weights after 12" "$train" $fours --steps 12 \
    --out "$dir/run" --resume auto
holds "which is step 6" grep -q "resumed from .* at step 6" message

fresh eight
for file in run/step_*/model.safetensors; do flip "$file" 300; done
find run -type f -exec cksum {} + | sort > sums
ends "every checkpoint damaged" 1 "every checkpoint in $dir/run is damaged" "$train" $twelve \
    --out "$dir/run" --resume auto
find run -type f -exec cksum {} + | sort > sums.after
holds "nothing was overwritten" cmp sums sums.after

# ---- signals

lines() { if [ -e run/log.jsonl ]; then wc -l < run/log.jsonl; else echo 0; fi; }
children() { cat /proc/"$1"/task/*/children | tr ' ' '\n'; }
# begins LINES COMMAND...: in the background, a minute at most; goes on when the log has more than
# LINES lines.
begins() {
    least=$1; shift
    fresh
    timeout -k 5 60 "$@" --out "$dir/run" > message 2>&1 < /dev/null & timer=$!
    for i in $(seq 600); do [ "$(lines)" -gt "$least" ] && break; sleep 0.05; done
    background=$(children $timer | head -n 1)
}
ended() { wait $timer 2> /dev/null; status=$?; background=; }
long="$model --steps 1500 --save-every 0 --val-every 500 --norms-every 500"
# stopped NAME STATUS COMMAND: the run in the background stopped with that status, saved and said
# so; when COMMAND goes on with it, it ends with $weights.
stopped() {
    fault=$1 expected=$2; shift 2
    ended
    holds "$fault: status $status" test $status = "$expected"
    holds "$fault: it says so" \
        grep -q "^stopped at step [0-9]*; --out $dir/run --resume auto goes on" message
    stop=$(sed -n 's/^stopped at step \([0-9]*\);.*/\1/p' message)
    ends "$fault: goes on" 0 "^weights $weights after 1500" "$@" $long --out "$dir/run" \
        --resume required
    holds "$fault: from step $stop" grep -q "^resumed from .* at step $stop\$" message
}
ends "a longer run" 0 "^weights" "$train" $long --out "$dir/long"
weights=$(sed -n 's/^weights \([0-9a-f]*\) after.*/\1/p' message)
begins 50 "$train" $long; kill -TERM "$background"; stopped "SIGTERM" 143 "$train"
# sh lets what it runs in the background ignore Ctrl-C; env does not.
begins 50 env --default-signal=INT "$train" $long
kill -INT "$background"
stopped "Ctrl-C" 130 "$train"

# The second signal, of either kind, does not wait for the step, which here takes seconds.
begins 0 env --default-signal=INT "$train" --model stories --batch 300 --sample 0 --steps 3 \
    --val-every 0
sleep 1
kill -INT "$background"; sleep 0.2
holds "the first one waits for the step" kill -0 "$background"
kill -TERM "$background"; ended
holds "the second one ends it" test "$status" = 143
holds "at once" sh -c "! grep -q 'stopped at' message && ! ls run | grep -q step_"

# A validation and tasks, which here take seconds, do not wait for their end: the step before them
# is saved, and the run that goes on makes up for them.
brief="--model stories --seq 64 --batch 2 --warmup 1 --sample 0 --save-every 0 --val-every 5"
brief="$brief --norms-every 0 --steps 6"
interrupted() {                                                          # WHAT KEY COMMAND...
    what=$1 key=$2; shift 2
    begins 5 "$@"; sleep 0.3; kill -TERM "$background"; ended
    holds "SIGTERM in $what: status $status" test $status = 143
    holds "SIGTERM in $what: it is not in the log" \
        sh -c "! grep '\"step\": 5, \"$key' run/log.jsonl"
    ends "SIGTERM in $what: goes on" 0 "^weights $weights after 6" "$train" $brief --val-tokens 64 \
        --tasks texts/one --out "$dir/run" --resume required
    holds "SIGTERM in $what: the step was saved" grep -q "^resumed from .* at step 5\$" message
    holds "SIGTERM in $what: it is done once" \
        test "$(grep -c "\"step\": 5, \"$key" run/log.jsonl)" = 1
}
mkdir texts &&
    "$root/build/shard" --out texts/all "$root/train_gpt.c" "$root/llmc/run/train.c" > message &&
    "$root/build/shard" --out texts/one "$root/dev/test/model.h" > message
ends "a brief run" 0 "^weights" "$train" $brief --val-tokens 64 --out "$dir/brief"
weights=$(sed -n 's/^weights \([0-9a-f]*\) after.*/\1/p' message)
interrupted "a validation" val_loss "$train" $brief --val-tokens 0
interrupted "tasks" task_results "$train" $brief --val-tokens 64 --tasks texts/all

# After the last step a signal ends the program like any other.
begins 3 "$train" --layers 1 --width 16 --heads 2 --val-tokens 64 --steps 3 --warmup 1 \
    --sample 1000000
for i in $(seq 200); do grep -q '^weights' message && break; sleep 0.05; done
kill -TERM "$background"; ended
holds "SIGTERM in the sample: status $status" test "$status" = 143

if command -v mpirun > /dev/null; then
    ends "four processes" 0 "^weights" mpirun -np 4 "$train" $long --out "$dir/four"
    weights=$(sed -n 's/^weights \([0-9a-f]*\) after.*/\1/p' message)
    for rank in 1 4; do
        begins 50 mpirun -np 4 "$train" $long
        kill -TERM "$(children "$background" | sed -n ${rank}p)"
        stopped "SIGTERM to process $rank of 4" 143 mpirun -np 4 "$train"
    done
    begins 5 mpirun -np 2 "$train" $brief --val-tokens 0
    sleep 0.3
    kill -TERM "$(children "$background" | sed -n 2p)"
    ended
    holds "SIGTERM to process 2 of 2 in a validation: status $status" test $status = 143
    holds "SIGTERM to process 2 of 2 in a validation: it is not in the log" \
        sh -c '! grep -q val_loss run/log.jsonl'
else
    echo "skipped: stopping four processes: no mpirun (apt install openmpi-bin)"
fi

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
