#!/bin/sh
# The CUDA trainer as several processes with a GPU each, in the emulator (dev/emu, nccl.cpp): as
# many as there are, they get the losses that one gets, and all of them the same weights, which the
# trainer itself compares at every validation and at the end; checkpoints that go from 3 to 2, to 1
# and to the CPU; a NaN that one of them alone has. lost.sh has those that die.
#   sh dev/test/gpus.sh        after: make build/emu/train_gpt-fp32 build/emu/train_gpt-bf16
#                              build/emu/ngpt-fp32 build/emu/ngpt-bf16 build/emu/libnccl.so.2
#                              build/emu/test_nccl build/shard and the CPU's
#                              build/cpu-span-fp32/train_gpt
. dev/test/several.sh
cpu=$root/build/cpu-span-fp32/train_gpt

numbers() { grep -o "\"$2\": [0-9.e+-]*" "$1/log.jsonl" | sed 's/.*: //'; }
# Every loss and gradient norm of two runs, and the last validation's, to a relative error of $3.
agree() {
    for key in loss router_loss grad_norm; do
        numbers "$1" $key > a
        numbers "$2" $key > b
        paste a b
    done > pairs
    numbers "$1" val_loss | tail -n 1 > a; numbers "$2" val_loss | tail -n 1 > b; paste a b |
        cat pairs - | awk -v e="$3" '
            { d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || !($1 > 0) || d > e * $1) bad = 1; n++ }
            END { print n " numbers"; exit bad || n < 4 }'
}
# All that --norms-every shows, the same way: a line a number, behind the key that it belongs to.
diagnostics() {
    grep grad_norms "$1/log.jsonl" | grep -oE '"[^"]*"|[-0-9.e+]*[0-9][],}]' | tr -d ',]}' |
        awk '/^"[a-z]/ { key = $0; next } !/^"/ { print key, $0 }'
}
# agree_everywhere ONE MORE ERROR ROUTED: those of routers within ROUTED, all others within ERROR.
agree_everywhere() {
    diagnostics "$1" > a; diagnostics "$2" > b
    paste -d ' ' a b | awk -v e="$3" -v routed="$4" '
        { d = $2 - $4; if (d < 0) d = -d; x = $2 < 0 ? -$2 : $2
          if (NF != 4 || d > ($1 ~ /^"router_/ ? routed : e) * x) { bad = 1; print } n++ }
        END { print n " numbers"; exit bad || n < 90 }'
}

short="$model --batch 5 --val-tokens 80 --val-every 0 --norms-every 3 --schedule-steps 3"
experts="--experts 8 --experts-per-token 3 --shared-experts 1 --dense-layers 1 --router sigmoid"
experts="$experts --balance-rate 0.01 --balance-loss 0.01 --tied off --optimizer muon"

check "NCCL in the emulator"                       "$emu/test_nccl"
for p in fp32 bf16; do
    # In bf16 gradients are float: they add up to nearly the same, but a weight between two
    # neighbours may be rounded to the other. Then a token may choose the other one of two nearly
    # equal experts: one choice in 240 is 3 % of an expert's load, and moves gradients by 1 or 2 %.
    gpu=$emu/train_gpt-$p error=1e-5 wide=1e-5 chosen=1e-5 routed=1e-5
    [ $p = bf16 ] && error=1e-3 wide=1e-2 chosen=2e-2 routed=2e-1
    check "$p, 1 process"                          "$gpu" $short --steps 3 --out $p-1
    check "$p, 1 process, experts"                 "$gpu" $short $experts --steps 3 \
        --out $p-experts-1
    check "$p, 1 process, nGPT"                    "$emu/ngpt-$p" $short --steps 3 --out $p-ngpt-1
    check "$p, 2 processes"                        several 2 "$gpu" $short --steps 3 --out $p-2
    check "$p, 3 processes"                        several 3 "$gpu" $short --steps 3 --out $p-3
    check "$p, 3 processes, experts"               several 3 "$gpu" $short $experts --steps 3 \
        --out $p-experts-3
    check "$p, 2 processes, nGPT"                  several 2 "$emu/ngpt-$p" $short --steps 3 \
        --out $p-ngpt-2
    for pair in 1:2 1:3 experts-1:experts-3 ngpt-1:ngpt-2; do
        one=$p-${pair%:*} more=$p-${pair#*:}
        check "$p: the losses of $more"            agree $one $more $error
        case $more in *experts*) most=$chosen ;; *) most=$wide ;; esac
        check "$p: the diagnostics of $more"       agree_everywhere $one $more $most $routed
    done
    check "$p, another order of streams"           several 2 env EMU_SEED=4 "$gpu" $short \
        --steps 3 --out $p-seed
    check "$p: changes no bit"                     same $p-2 $p-seed
    check "$p, graphs, recomputed"                 several 3 "$gpu" $short $experts --graph on \
        --recompute on --steps 3 --out $p-graph
    check "$p: change no bit"                      same $p-experts-3 $p-graph

    # Each process would find another algorithm the fastest, which adds in another order: the plans
    # of process 0 are everyone's, and the run's.
    tuned=$(echo "$short" | sed 's/--tune off/--tune on/')
    fast() {
        which=$1
        shift
        several 2 sh -c "export EMU_CUBLASLT_FAST=$which"'; exec "$@"' sh "$@"
    }
    check "$p, 2 processes, plans of one"          fast 2 "$gpu" $tuned --steps 3 --out $p-tuned
    check "$p, 2 processes, plans by timing"       fast '$((2 - RANK))' "$gpu" $tuned --steps 2 \
        --out $p-plans
    check "$p goes on by the plans"                fast 0 "$gpu" --out $p-plans --resume required \
        --steps 3
    check "$p: plans change no bit"                same $p-tuned $p-plans

    check "$p, 3 processes, stopped"               several 3 "$gpu" $short $experts --steps 2 \
        --out $p-stopped
    cp -R $p-stopped $p-on-1 && cp -R $p-stopped $p-on-2 && cp -R $p-stopped $p-on-cpu
    check "$p goes on with 3"                      several 3 "$gpu" --out $p-stopped \
        --resume required --steps 3
    check "$p: unbroken"                           same $p-experts-3 $p-stopped
    check "$p goes on with 2"                      several 2 "$gpu" --out $p-on-2 \
        --resume required --steps 3
    check "$p goes on with 1"                      "$gpu" --out $p-on-1 --resume required --steps 3
    check "$p goes on on the CPU"                  "$cpu" --out $p-on-cpu --resume required \
        --steps 3
    for on in 1 2; do check "$p: the losses on $on" agree $p-experts-3 $p-on-$on $error; done
    cpu_error=2e-5
    [ $p = bf16 ] && cpu_error=1e-2
    check "$p: the losses on the CPU"              agree $p-experts-3 $p-on-cpu $cpu_error
done
check "3 processes evaluate"                       several 3 "$emu/train_gpt-bf16" --from bf16-3 \
    --eval
check "to the loss of one"                         sh -c "$emu/train_gpt-bf16 --from bf16-3 --eval |
    grep '^validation loss' > one && grep '^validation loss' said.0 | diff - one"

# The row of Z in the embedding is zero, without eps its norm is NaN, and Z is one byte of a text of
# 24 sequences: of 4 steps that see each once, one process has it in one.
awk 'BEGIN { for (i = 0; i < 384; i++)
    printf "%s", i == 200 ? "Z" : substr("etaoin shrdlu.", i * i % 13 + 1, 1) }' > text
check "shards"                                     "$root/build/shard" --val-fraction 0 \
    --out text.d text
nan="$model --eps 0 --batch 6 --schedule-steps 4 --tied off --data text.d/train_000000.bin"
check "a model"                                    "$emu/train_gpt-fp32" $nan --steps 1 --out model
cp model/step_00000001/model.safetensors zero.safetensors
begin=$(($(od -An -tu8 -N8 zero.safetensors) + 8 + 90 * 64 * 4))
head -c 256 /dev/zero | dd of=zero.safetensors bs=1 seek=$begin conv=notrunc 2> /dev/null
skipped() { grep '"skipped": "not finite"' "$1/log.jsonl" | sed 's/,.*//'; }
finite() { grep -v skipped "$1/log.jsonl" | grep -o '"loss": [0-9.]*'; }
for p in fp32 bf16; do
    check "$p, 1 process with a NaN"               "$emu/train_gpt-$p" $nan --steps 4 \
        --init-from zero.safetensors --out $p-nan-1
    check "$p, 3 processes, a NaN on one"          several 3 "$emu/train_gpt-$p" $nan --steps 4 \
        --init-from zero.safetensors --out $p-nan-3
    check "$p: one step is skipped by all"         sh -c "[ -n '$(skipped $p-nan-3)' ] &&
        [ '$(skipped $p-nan-3)' = '$(skipped $p-nan-1)' ] && [ $(finite $p-nan-3 | wc -l) = 3 ]"
done

# All sequences have a Z: every step is skipped, and the tenth ends the run. Its checkpoint has the
# first weights, though a reduction of the eleventh step's gradients is under way.
awk 'BEGIN { for (i = 0; i < 384; i++) printf "%s", i % 8 ? "e" : "Z" }' > text
check "shards of Z"                                "$root/build/shard" --val-fraction 0 \
    --out z.d text
all_nan=$(echo "$nan" | sed 's/text\.d/z.d/; s/steps 4/steps 20/')
diverge() {
    start "$@"
    statuses
    for s in $all; do [ "$s" = 3 ] || return 1; done
}
for p in fp32 bf16; do
    for n in 1 3; do
        check "$p, $n processes diverge"           diverge $n "$emu/train_gpt-$p" $all_nan \
            --steps 20 --init-from zero.safetensors --out $p-all-nan-$n
    done
    check "$p: the last finite weights are saved"  cmp $p-all-nan-1/step_*/model.safetensors \
        $p-all-nan-3/step_*/model.safetensors
done

refused() {
    words=$1
    shift
    start "$@"
    statuses > all.said
    cat all.said
    [ "$all" != " 0 0" ] && grep -q -- "$words" all.said
}
check "more processes than GPUs"                   refused \
    "process 2 of this machine .* has no GPU of its own: there are 2" 2 \
    sh -c "[ \$RANK = 1 ] && export LOCAL_RANK=2;
    EMU_DEVICES=2 $emu/train_gpt-fp32 $short --steps 3 --out none"
mkdir -p broken && : > broken/libnccl.so.2
check "without NCCL"                               refused "apt install libnccl2" 2 \
    env LD_LIBRARY_PATH="$(pwd)/broken" "$emu/train_gpt-fp32" $short --steps 3 --out none
check "fewer sequences than processes"             refused "at least one sequence for each" 2 \
    "$emu/train_gpt-fp32" $model --batch 1 --steps 3 --out none
# Weights of the products and gradients are whole, 12.3 and 24.6 MiB; master weights and moments are
# those of what the first of two owns, 11.3 MiB each.
check "--show counts a part of the optimizer"      several 2 "$emu/train_gpt-bf16" --layers 2 \
    --width 512 --heads 8 --show
check "weights, gradients, moments" \
    grep -q 'memory: weights 23.6 MiB, gradients 24.6, AdamW 22.6' said.0
if command -v mpirun > /dev/null; then
    check "begun by mpirun"                        env -u MASTER_ADDR LD_LIBRARY_PATH="$emu" \
        mpirun --allow-run-as-root --oversubscribe -np 2 "$emu/train_gpt-bf16" $short --steps 3 \
        --out mpirun
    check "mpirun changes no bit"                  same bf16-2 mpirun
else echo "skipped: 2 checks of GPUs begun by mpirun: it is not installed"; fi
finish
