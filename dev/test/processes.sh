#!/bin/sh
# Several processes on the CPU, by Open MPI's mpirun: what they compute is what one computes, for
# any number of them; what they decide, they decide alike. Called by dev/test/run.sh. Agreement is
# relative, of every number of the logs but times.
set -u
root=$(pwd) dir=$root/build/test/processes
passed=0 failed=0
export OMP_NUM_THREADS=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
command -v mpirun > /dev/null ||
    { echo "skipped: several processes: no mpirun (apt install openmpi-bin)"
      echo "0 passed, 0 failed"; exit 0; }
rm -rf "$dir" && mkdir -p "$dir" && cd "$dir" || exit 1
span=$root/build/cpu-span-fp32/train_gpt faulty=$root/build/faulty
small="--layers 3 --width 32 --heads 2 --seq 32 --val-every 25 --val-tokens 1000 --sample 0"
small="$small --save-every 25 --norms-every 10"

check() {
    name=$1; shift
    if "$@" > log 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $name: $*"
        tail -n 20 log
    fi
}
# trains N RUN PROGRAM FLAGS...
trains() {
    n=$1 run=$2; shift 2
    if [ "$n" = 1 ]; then
        "$@" --out "$run"
    else
        mpirun -np "$n" "$@" --out "$run"
    fi > "$run.out" 2>&1 || { cat "$run.out"; return 1; }
}
# Every number of a log, in order, but for times, and for the line that begins each part of it.
numbers() {
    grep -v '"norm_mode"' "$1/log.jsonl" |
        sed 's/"ms": [^,}]*//; s/"weights": "[^"]*"//; s/"[^"]*"//g; s/null/0/g' |
        tr -c '0-9.eE+\n-' ' ' | tr -s ' \n' '\n\n' | grep '[0-9]'
}
# alike BOUND RUN RUN
alike() {
    numbers "$2" > a.numbers; numbers "$3" > b.numbers
    paste a.numbers b.numbers | awk -v bound="$1" '
        NF != 2 { bad = 1 }
        { a = $1 + 0; b = $2 + 0
          d = a - b; if (d < 0) d = -d
          s = a < 0 ? -a : a
          e = d / (s > 1e-3 ? s : 1e-3)
          if (e > worst) worst = e }
        END { print NR " numbers, the worst differs by " worst
              exit !(NR > 300 && !bad && worst <= bound) }'
}

# Micro-batches of one sequence: the router's losses, defined per micro-batch, are then those of a
# sequence, whoever has it.
for model in "SPAN --model stories --batch 8" \
    "SPAN --model olmoe-char --ffn 32 --batch 8 --micro-batch 1" \
    "SPAN --model deepseek-char --kv-rank 16 --ffn 32 --balance-rate 0.01 --batch 8 \
--micro-batch 1" "NGPT --model stories --batch 7" \
    "POST --model olmoe-char --ffn 32 --batch 8 --micro-batch 1 --optimizer muon"; do
    set -- $model
    mode=$1; shift
    program=$(cd "$root" && DEVICE=cpu make -s binary NORM_MODE=$mode)
    for n in 1 2 4; do
        check "$model on $n" trains $n "$mode-$2-$n" "$root/$program" "$@" $small --steps 50
    done
    check "$model, 2 as 1" alike 1e-5 "$mode-$2-1" "$mode-$2-2"
    check "$model, 4 as 1" alike 1e-5 "$mode-$2-1" "$mode-$2-4"
done

# The same tokens in the same order: 1 x 8, 2 x 4, 4 x 2, 8 x 1 (processes x micro-batches), in fp32
# to its rounding.
for n in 1 2 4 8; do
    check "8 sequences on $n" trains $n "order-$n" "$span" $small --batch 8 --micro-batch 1 \
        --steps 20
done
for n in 2 4 8; do check "8 sequences, $n as 1" alike 1e-5 order-1 "order-$n"; done

# A checkpoint knows nothing of processes: from 4, on 1 and on 3, and from 1 on 4.
for n in 1 3; do
    cp -R SPAN-stories-4 "from4-$n" && rm -r "from4-$n/step_00000050"
    check "from 4 on $n" trains $n "from4-$n" "$span" --resume required
    check "from 4 on $n as unbroken" alike 1e-5 SPAN-stories-1 "from4-$n"
done
cp -R SPAN-stories-1 from1-4 && rm -r from1-4/step_00000050
check "from 1 on 4" trains 4 from1-4 "$span" --resume required
check "from 1 on 4 as unbroken" alike 1e-5 SPAN-stories-1 from1-4
# Shares of 3, 3 and 2: micro-batches of 3, which the run keeps, though 3 is no divisor of 8.
check "8 sequences on 3" trains 3 on3 "$span" $small --batch 8 --steps 20
check "8 sequences from 3 on 1" trains 1 on3 "$span" --resume required --steps 50
check "8 sequences from 3 on 1, in its micro-batches" grep '"micro_batch": "3"' on3/config.json
uneven() {
    ! mpirun -np 2 "$span" $small --model olmoe-char --ffn 32 --batch 12 --micro-batch 4 \
        --out uneven && grep -q "expected a divisor of every process's share" log
}
check "a balance loss over unequal micro-batches" uneven
# A share of 4 would cut micro-batches of 8 to 4.
smaller() {
    ! mpirun -np 4 "$span" $small --model olmoe-char --ffn 32 --batch 16 --micro-batch 8 \
        --out smaller && grep -q "expected a divisor of every process's share" log
}
check "a balance loss over micro-batches larger than a share" smaller
# Two machines have different runs of one name.
mkdir machine0 machine1
for n in 0 1; do "$span" $small --steps 1 --batch 2 --seed $n --out machine$n/first; done > log 2>&1
unlike() {
    ! mpirun -np 2 sh -c 'cd machine$OMPI_COMM_WORLD_RANK && exec "$@" --out ../unlike' sh \
        "$span" $small --batch 2 --init-from first &&
        grep -q "each has read another file" log
}
check "processes begin from different weights" unlike
# Two share the memory that one has.
memory() { "$@" --show | sed -n 's/.* needed; \([0-9.]*\) free.*/\1/p'; }
halves() {
    one=$(memory "$span")
    two=$(memory mpirun -np 2 "$span")
    echo "$one $two"
    awk "BEGIN { r = $two / $one; exit !(r > 0.4 && r < 0.6) }"
}
check "two share the machine's memory" halves
check "the same twice" sh -c "cp -R from1-4 again && rm -r again/step_00000050 &&
    mpirun -np 4 '$span' --out again --resume required > again.out &&
    [ \"\$(tail -n 1 again.out | cut -d' ' -f2)\" = \"\$(tail -n 1 from1-4.out | cut -d' ' -f2)\" ]"
check "evaluated by 3 as by 1" sh -c "'$span' --from from1-4 --eval --sample 0 > 1.out;
    mpirun -np 3 '$span' --from from1-4 --eval --sample 0 > 3.out; cut -c1-20 1.out | tail -n 1;
    [ \"\$(tail -n 1 1.out)\" = \"\$(tail -n 1 3.out)\" ]"

check "texts as tasks" "$root/build/shard" --out texts "$root/README.md" "$root/llmc/run/eval.h"
check "tasks evaluated by 3 as by 1" \
    sh -c "'$span' --from from1-4 --eval --sample 0 --tasks texts > 1.out &&
    mpirun -np 3 '$span' --from from1-4 --eval --sample 0 --tasks texts > 3.out;
    tail -n 3 1.out 3.out; tail -n 2 1.out | grep -c token_perplexity &&
    [ \"\$(tail -n 3 1.out)\" = \"\$(tail -n 3 3.out)\" ]"

# One of four has a NaN: all leave the step out, and go on alike. (run_hash compares the weights of
# all at every validation.)
FAULT="nan 13 2" check "a NaN on one of 4" trains 4 nan-4 "$faulty" --batch 8 $small --steps 50
FAULT="nan 13 0" check "a NaN on one" trains 1 nan-1 "$faulty" --batch 8 $small --steps 50
check "is left out by all" alike 1e-5 nan-1 nan-4
check "and said" grep -q '"step": 13,.*"skipped": "not finite"' nan-4/log.jsonl
check "and kept" grep -q '"event": "not finite"' nan-4/log.jsonl

# A process that dies takes the others with it, and mpirun says so.
dies() {
    begun=$(date +%s)
    ! FAULT="killed 13 2" timeout 120 mpirun -np 4 "$faulty" --batch 8 $small --steps 50 \
        --out dead > dead.out 2>&1
    cat dead.out
    [ $(($(date +%s) - begun)) -lt 60 ] && grep -q 'signal 9' dead.out
}
check "one of 4 is killed" dies

# refused WORDS COMMAND...
refused() {
    words=$1
    shift
    ! timeout 60 "$@" > refused.out 2>&1
    cat refused.out
    grep -q -- "$words" refused.out && grep -q -- '->' refused.out
}
check "fewer sequences than processes" refused "expected at least one sequence for each" \
    mpirun -np 4 "$span" --batch 3
check "different flags" refused "different flags" \
    mpirun -np 1 "$span" --lr 1e-3 : -np 1 "$span" --lr 2e-3
check "torchrun on the CPU" refused "mpirun -np 2 ./train_gpt" env WORLD_SIZE=2 RANK=0 "$span"
check "another MPI" refused "belongs to another MPI" \
    env OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 "$span"
check "a folder in use" \
    sh -c "'$span' --steps 100000 --sample 0 --save-every 1 --out busy > busy.out 2>&1 & p=\$!;
    while ! ls busy 2> /dev/null | grep -q step; do sleep 0.1; done;
    ! mpirun -np 2 '$span' --out busy --resume auto > refused.out 2>&1; kill -9 \$p;
    cat refused.out;
    grep -q 'in use by another process' refused.out &&
    ! grep -q 'resumed from' refused.out"
mkdir here there && cp -R from1-4 here/run && mkdir there/run && cp from1-4/config.json there/run
check "different folders" refused "see different checkpoints" \
    mpirun -np 1 sh -c "cd here && '$span' --out run --resume auto" \
         : -np 1 sh -c "cd there && '$span' --out run --resume auto"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
