#!/bin/sh
# The CUDA trainer as a user runs it, in the emulator: runs that are repeated, stopped, resumed,
# moved to the CPU and back; what does not fit or is not there.
#   sh dev/test/cuda.sh            after: make build/emu/train_gpt-fp32 build/emu/train_gpt-bf16
#                                  and the CPU's build/cpu-span-fp32/train_gpt
#   GPU=... sh dev/test/cuda.sh    with GPU-fp32 and GPU-bf16, trainers built for a real GPU
set -u
root=$(pwd)
gpu=${GPU:-$root/build/emu/train_gpt} cpu=$root/build/cpu-span-fp32/train_gpt
passed=0 failed=0
export OMP_WAIT_POLICY=passive

check() {
    name=$1; shift
    if "$@" > "$root/build/cuda.log" 2>&1; then passed=$((passed + 1)); else
        failed=$((failed + 1)); echo "FAILED $name: $*"; tail -n 20 "$root/build/cuda.log"
    fi
}
refused() { words=$1; shift; ! "$@" > message 2>&1 && grep -q -- "$words" message; }

rm -rf build/test/cuda && mkdir -p build/test/cuda && cd build/test/cuda || exit 1
model="--layers 2 --width 64 --heads 2 --kv-heads 1 --ffn 96 --seq 32 --sample 0 --val-tokens 64"
on_cpu="$model --batch 4 --micro-batch 2 --warmup 2 --schedule-steps 4 --val-every 0"
short="$on_cpu --tune off"                    # timing may choose another plan each time
experts="--experts 8 --experts-per-token 3 --shared-experts 1 --dense-layers 1 --router sigmoid"
experts="$experts --balance-rate 0.01 --sequence-loss 0.01"
hash() { sed -n 's/.*"weights": "\([0-9a-f]*\)".*/\1/p' "$1/log.jsonl" | tail -n 1; }
losses() { sed -n 's/.*"loss": \([0-9.e+-]*\),.*/\1/p' "$1/log.jsonl" | tail -n "$2"; }
same() { [ -n "$(hash "$1")" ] && [ "$(hash "$1")" = "$(hash "$2")" ]; }
differ() { [ -n "$(hash "$1")" ] && [ "$(hash "$1")" != "$(hash "$2")" ]; }
# The last N losses of two runs agree to a relative error.
agree() {
    losses "$1" "$3" > a
    losses "$2" "$3" > b
    [ "$(wc -l < a)" = "$3" ] && paste a b | awk -v e="$4" '
        { d = $1 - $2; if (d < 0) d = -d; if (!($1 > 0) || d > e * $1) bad = 1 }
        END { exit bad }'
}

# A shard of 60 bytes behind the one that begins documents: longer than --seq, so that --tasks reads
# it in windows.
{
    printf '\210\330\064\001\001\0\0\0\075\0\0\0\0\001\0\0'; head -c 1008 /dev/zero; printf '\0\0'
    printf 'The old man and the little dog went to the sea, and sat down.' | head -c 60 |
        sed 's/./&\n/g' | tr '\n' '\0'
} > text.bin

for precision in fp32 bf16; do
    p=$precision error=2e-5
    [ $p = bf16 ] && error=1e-2
    check "$p trains"                          "$gpu-$p" $short --steps 4 --save-every 2 --out $p
    check "$p: the same command, the same bits" \
        sh -c "EMU_SEED=7 $gpu-$p $short --steps 4 --out $p-again"
    check "$p: the same weights"               same $p $p-again
    check "$p stops"                           "$gpu-$p" $short --steps 2 --out $p-resumed
    check "$p goes on"                         "$gpu-$p" --out $p-resumed --resume required \
        --steps 4
    check "$p: resumed is unbroken"            same $p $p-resumed
    check "$p with plans chosen by timing"     "$gpu-$p" $on_cpu --steps 4 --save-every 2 \
        --out $p-tuned
    check "$p: plans are kept"                 grep -q '"algo"' $p-tuned/step_00000002/plans.json
    rm -rf $p-tuned/step_00000004
    check "$p: its weights" \
        sh -c "sed -n 's/.*\"weights\": \"\([0-9a-f]*\)\".*/\1/p' $p-tuned/log.jsonl > tuned.hash"
    check "$p goes on with the same plans"     "$gpu-$p" --out $p-tuned --resume required
    check "$p: and gets the same weights" \
        sh -c "[ \"\$(cat tuned.hash)\" = \"$(hash $p-tuned)\" ]"
    check "$p recomputes"                      "$gpu-$p" $short --steps 4 --recompute on \
        --out $p-recompute
    check "$p: recompute changes no bit"       same $p $p-recompute
    check "$p in graphs"                       "$gpu-$p" $short --steps 4 --graph on --out $p-graph
    check "$p: graphs change no bit"           same $p $p-graph
    check "$p begins on the GPU"               "$gpu-$p" $short --steps 2 --out $p-to-cpu
    check "$p goes on on the CPU"              "$cpu" --out $p-to-cpu --resume required --steps 4
    check "$p: the CPU's losses are the GPU's" agree $p $p-to-cpu 2 $error
    check "begins on the CPU"                  "$cpu" $on_cpu --steps 2 --out $p-to-gpu
    check "goes on on the GPU in $p"           "$gpu-$p" --out $p-to-gpu --resume required --steps 4
    check "$p: the GPU's losses are the CPU's" agree $p $p-to-gpu 2 $error
    check "$p trains experts"                  "$gpu-$p" $short $experts --steps 4 --norms-every 2 \
        --out $p-experts
    check "$p: what routers do is logged"      grep -q '"router_load": {"1": \[0' \
        $p-experts/log.jsonl
    check "$p: experts in graphs, recomputed"  env EMU_SEED=3 "$gpu-$p" $short $experts --steps 4 \
        --graph on --recompute on --out $p-experts-graph
    check "$p: change no bit"                  same $p-experts $p-experts-graph
    check "$p begins with experts on the CPU"  "$cpu" $on_cpu $experts --steps 2 \
        --out $p-experts-to-gpu
    check "$p goes on on the GPU"              "$gpu-$p" --out $p-experts-to-gpu --resume required \
        --steps 3
    check "$p goes back to the CPU"            "$cpu" --out $p-experts-to-gpu --resume required \
        --steps 4
    check "$p: there and back, the same losses" agree $p-experts $p-experts-to-gpu 4 $error
    check "$p: evaluated on the GPU" \
        sh -c "$gpu-$p --from $p --eval --tasks text.bin > gpu.eval"
    check "$p: evaluated on the CPU" \
        sh -c "$cpu --from $p --eval --tasks text.bin > cpu.eval"
    check "$p: to the same loss"               sh -c "cat gpu.eval cpu.eval |
        awk -v e=$error '/^validation loss/ { v[n++] = \$3 + 0 }
        END { d = v[0] - v[1]; exit !(n == 2 && d * d <= e * e * v[0] * v[0]) }'"
    check "$p: and the same of a task"         sh -c "cat gpu.eval cpu.eval |
        awk -v e=$error '/ token_perplexity / { v[n++] = log(\$4) }
        END { d = v[0] - v[1]; exit !(n == 2 && v[0] > 1 && d * d <= e * e * v[0] * v[0]) }'"
    check "$p writes a sample" \
        sh -c "$gpu-$p --from $p --sample 20 --temperature 0 --prompt 'The ' > $p.sample &&
        grep -q '^The ' $p.sample &&
        grep -q '^prefill 5 tokens at [0-9]* tok/s, decode 19 at' $p.sample"
done

# Attention and experts by wgmma, and wrong ones: EMU_WRONG_WGMMA is the emulator's.
if [ -z "${GPU:-}" ]; then
    heads="$(echo "$short" | sed 's/--width 64/--width 128/') $experts"
    check "attention and experts by wgmma train" "$gpu-bf16" $heads --kernels wgmma --steps 2 \
        --out wgmma
    check "the log says so"                    grep -q '"attention_forward": "wgmma".*"experts_i' \
        wgmma/log.jsonl
    check "and the checkpoint"                 grep -q '"experts_weight": "wgmma"' \
        wgmma/step_00000002/plans.json
    check "by mma.sync they train"             "$gpu-bf16" $heads --kernels mma --steps 2 --out mma
    check "the losses agree"                   agree wgmma mma 2 1e-2
    check "wrong kernels are refused" \
        sh -c "EMU_WRONG_WGMMA=1 $gpu-bf16 $heads --kernels wgmma --steps 2 --out refused > said &&
               grep -q 'note: attention_forward by wgmma is wrong on this GPU' said &&
               grep -q 'note: experts_weight by wgmma is wrong on this GPU' said"
    check "and mma.sync goes on, the same bits" same mma refused
    check "wgmma needs bf16"                   refused "--kernels wgmma needs PREC=bf16" \
        "$gpu-fp32" $heads --kernels wgmma --steps 2 --out no
fi
check "bf16 rounds stochastically"             "$gpu-bf16" $short --steps 4 --rounding stochastic \
    --out stochastic
check "and stops"                              "$gpu-bf16" $short --steps 2 --rounding stochastic \
    --out stochastic-resumed
check "and goes on"                            "$gpu-bf16" --out stochastic-resumed \
    --resume required --steps 4
check "stochastic: resumed is unbroken"        same stochastic stochastic-resumed
check "stochastic is not nearest"              differ stochastic bf16
check "a run in another precision is noted"    grep -q 'a run in bf16 are used in fp32' cpu.eval

check "--show says what fits"                  sh -c "$gpu-bf16 $model --batch 4 --show |
    grep -q 'GPU: .* what fits: --micro-batch 4'"
if [ -z "${GPU:-}" ]; then
check "too little memory names the flag"       refused \
    "-> --micro-batch 8, or --micro-batch 32 --recompute on" \
    env EMU_MEMORY=$((1500 << 20)) "$gpu-bf16" --layers 8 --width 512 --heads 8 --seq 256 \
        --batch 64 --micro-batch 64 --steps 1 --out none
check "a batch larger than memory, in parts" \
    sh -c "EMU_MEMORY=$((560 << 20)) $gpu-bf16 $model --tune off --batch 256 --warmup 0 \
    --steps 1 --val-every 0 --out chosen > message && cat message &&
    grep 'micro-batches of 64 sequences' message &&
    grep '\"micro_batch\": \"64\"' chosen/config.json"
check "far too little memory"                  refused "a smaller --model" \
    env EMU_MEMORY=$((20 << 20)) "$gpu-bf16" $short --steps 1 --out none
check "no GPU"                                 refused "DEVICE=cpu" env EMU_DEVICES=0 \
    "$gpu-bf16" $short --steps 1 --out none
check "an old driver"                          refused "driver" env EMU_DRIVER=12040 \
    "$gpu-bf16" $short --steps 1 --out none
check "an old GPU"                             refused "DEVICE=cpu" env EMU_COMPUTE=70 \
    "$gpu-bf16" $short --steps 1 --out none
check "--show without a GPU"                   sh -c "EMU_DEVICES=0 $gpu-bf16 $model --show |
    grep -q 'GPU: .* none found here'"
small="--layers 1 --width 64 --heads 2 --ffn 96 --seq 32 --batch 2 --norm layer --bias on"
small="$small --activation gelu --positions learned --tune off --warmup 1 --steps 1 --sample 0"
small="$small --val-tokens 64"
for seed in 0 5 9; do
    check "any order of streams, $seed"        env EMU_SEED=$seed "$gpu-bf16" $small \
        --out order-$seed
done
check "0 and 5 agree"                          same order-0 order-5
check "0 and 9 agree"                          same order-0 order-9
fi
check "experts that make no 16-byte rows"      refused "a multiple of 8" \
    "$gpu-bf16" $short --experts 6 --steps 1 --out none
check "a head size the GPU has not"            refused "32, 48, 64, 96 or 128" \
    "$gpu-bf16" --width 64 --heads 4 --steps 1 --out none
check "a width the GPU has not"                refused "-> --width 104" "$gpu-bf16" --width 100 \
    --heads 3 --head-size 32 --ffn 64 --steps 1 --out none
check "an ffn width the GPU has not"           refused "-> --ffn 104" "$gpu-bf16" --width 64 \
    --heads 2 --ffn 100 --steps 1 --out none
check "a sequence of too many tiles"           refused "-> --seq 4194240, " "$gpu-fp32" --width 64 \
    --heads 2 --seq 4194304 --batch 1 --show
check "nothing was left behind"                test ! -e none
check "TF32 in bf16"                           refused "needs PREC=fp32, found bf16" \
    "$gpu-bf16" --tf32 on --steps 1 --out none
check "rounding in fp32"                       refused "needs PREC=bf16, found fp32" \
    "$gpu-fp32" --rounding stochastic --steps 1 --out none
check "a GPU's flag on the CPU"                refused "needs DEVICE=cuda, found cpu" \
    "$cpu" --graph on --steps 1 --out none
cd "$root" && rm -rf build/test/cuda
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
