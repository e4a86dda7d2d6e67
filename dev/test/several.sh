# several.sh: for gpus.sh and lost.sh, which run it from the root: several processes of the CUDA
# trainer in the emulator, each with a GPU, in the folder build/test/NAME of the script NAME.sh.
set -u
root=$(pwd) script=$(basename "$0" .sh)
emu=$root/build/emu log=$root/build/$script.log
passed=0 failed=0
trap 'trap - TERM; kill 0' INT TERM        # background jobs ignore Ctrl-C
export OMP_WAIT_POLICY=passive EMU_MEMORY=$((3 << 30)) EMU_DEVICES=4 MASTER_ADDR=127.0.0.1

check() {
    name=$1; shift
    if "$@" > "$log" 2>&1; then passed=$((passed + 1)); else
        failed=$((failed + 1)); echo "FAILED $name: $*"; tail -n 20 "$log"
    fi
}

# start N command...: as torchrun does; leaves process r's number in process_r, and what it says in
# said.r. Every run has a port of its own: the last run's may not be free yet.
port=$((20000 + $$ % 20000))
start() {
    count=$1; shift
    port=$((port + 2))
    for r in $(seq 0 $((count - 1))); do
        RANK=$r LOCAL_RANK=$r WORLD_SIZE=$count MASTER_PORT=$port LD_LIBRARY_PATH=$emu "$@" \
            > "said.$r" 2>&1 &
        eval "process_$r=$!"
    done
}
statuses() {
    all=
    for r in $(seq 0 $((count - 1))); do eval "wait \$process_$r"; all="$all $?"; done 2> /dev/null
    echo "statuses:$all; said:"; for r in $(seq 0 $((count - 1))); do cat "said.$r"; done
}
# Whether all processes end well.
several() { start "$@"; statuses; for s in $all; do [ "$s" = 0 ] || return 1; done; }

hash() { sed -n 's/.*"weights": "\([0-9a-f]*\)".*/\1/p' "$1/log.jsonl" | tail -n 1; }
same() { [ -n "$(hash "$1")" ] && [ "$(hash "$1")" = "$(hash "$2")" ]; }

# 3 processes share 5 sequences as 1, 2 and 2, each in micro-batches of 1.
model="--layers 2 --width 64 --heads 1 --ffn 32 --seq 16 --sample 0 --micro-batch 1 --warmup 1"
model="$model --tune off"

rm -rf "build/test/$script" && mkdir -p "build/test/$script" && cd "build/test/$script" || exit 1
finish() { cd "$root" && rm -rf "build/test/$script"; echo "$passed passed, $failed failed"; }
