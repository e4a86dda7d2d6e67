# Sourced by dev/gpu_check.sh: the stages that say how fast it is.

SECTIONS="ceilings attention linears norms ends qkv activation update experts"   # of kernels.cu
# For ncu: the section of kernels.cu that launches a kernel, and the kernel.
NCU_KERNELS=${NCU_KERNELS:-"attention:attention_forward_kernel attention:attention_dq_kernel \
    attention:attention_dkv_kernel attention:attention_forward_sm90_kernel \
    attention:attention_dq_sm90_kernel attention:attention_dkv_sm90_kernel \
    norms:add_norm_forward_kernel norms:norm_backward_kernel ends:classifier_kernel \
    experts:grouped_kernel experts:grouped_sm90_kernel"}
# Of trainers that are timed: no pause in their steps.
SPEED_FLAGS="--steps 100000 --val-every 0 --save-every 0 --norms-every 0 --sample 0"
KERNELS=${KERNELS:-auto}

# watch_clocks STAGE: clock and power of the GPU five times a second, until the stage ends.
# report.py puts those of its time beside each figure.
watch_clocks() {
    command -v nvidia-smi > /dev/null || return 0
    TZ=UTC nvidia-smi -i "$(echo "${CUDA_VISIBLE_DEVICES:-0}" | cut -d , -f 1)" \
        --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu \
        --format=csv,noheader,nounits -lms 200 > "$OUT/clocks-$1.csv" 2> /dev/null &
    watcher=$!
    trap 'kill $watcher 2> /dev/null' EXIT
    trap 'exit 143' INT TERM HUP
}

torch_sees_gpu() {
    have "$PYTHON" || return 1
    "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2> /dev/null ||
        { say "skipped: no PyTorch that sees the GPU"; return 1; }
}

stage_kernels() {
    built cuda-bench/kernels || return 1
    status=0
    : > "$OUT/kernels.jsonl"
    for section in $SECTIONS; do           # a fault or a hang in one costs no other
        within -k 5 "$(at_most $((LIMIT / 3)))" \
            "$(at cuda-bench/kernels)" "$section" >> "$OUT/kernels.jsonl" ||
            { say "$section ended with status $?"; status=1; }
    done
    if torch_sees_gpu; then
        within "$(seconds_left)" \
            "$PYTHON" dev/bench/gpu/torch_layers.py >> "$OUT/kernels.jsonl" || status=1
    fi
    say "$(wc -l < "$OUT/kernels.jsonl") lines"
    return $status
}

# The third launch of each kernel. The clock stays as it is (ncu would fix it otherwise), so its
# percentages compare with those of other launches, its milliseconds with the stage kernels.
stage_ncu() {
    : > "$OUT/ncu.csv"
    have ncu || return 0
    built cuda-bench/kernels || return 1
    bad=0 capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null)
    for what in $NCU_KERNELS; do
        case $what in *_sm90_*) case $capability in 9.0*) ;; *) continue ;; esac ;; esac
        rm -f build/ncu.csv
        within -k 5 "$(at_most 75)" ncu --clock-control none --csv --print-units base \
            --log-file build/ncu.csv --section SpeedOfLight --metrics \
l1tex__data_pipe_lsu_wavefronts_mem_shared.sum,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum \
            --kernel-name "regex:${what#*:}" --launch-skip 2 --launch-count 1 --kill yes \
            "$(at cuda-bench/kernels)" "${what%%:*}" > build/ncu.txt 2>&1
        if grep -q "${what#*:}.*wavefronts" build/ncu.csv 2> /dev/null; then
            cat build/ncu.csv >> "$OUT/ncu.csv"
        else
            why=$(cat build/ncu.csv build/ncu.txt 2> /dev/null | grep -m 1 '==ERROR==' ||
                tail -n 2 build/ncu.txt | tr '\n' ' ')
            bad=1
            case $why in
                *ERR_NVGPUCTRPERM*)
                    say "skipped: no permission for counters" \
                        "(run as root, or NVreg_RestrictProfilingToAdminUsers=0)"
                    break ;;
            esac
            say "ncu: nothing about ${what#*:}: $why"
        fi
    done
    rm -f build/ncu.csv build/ncu.txt
    return $bad
}

# one_timeline NAME MODEL BATCH [VARIABLE=VALUE...] PROGRAM
one_timeline() {
    file=$OUT/timeline-$1.jsonl label=$1 model=$2 batch=$3; shift 3
    rm -rf build/gpu_run "$file"
    # shellcheck disable=SC2086
    within -k 5 "$(at_most "$STARTUP")" env TIMELINE="$file" "$@" --model "$model" \
        --batch "$batch" $SPEED_FLAGS --kernels "$KERNELS" --out build/gpu_run \
        > build/gpu_run.txt 2>&1
    [ -s "$file" ] || say "no timeline: $label: $(tail -n 3 build/gpu_run.txt | tr '\n' ' ')"
    rm -rf build/gpu_run build/gpu_run.txt
    [ -s "$file" ]
}

# By events around each launch; by CUPTI, if there, in the trainer as it is.
stage_timeline() {
    bad=0 recorder=cuda-timeline-pre-bf16/train_gpt
    if built $recorder; then
        one_timeline events-gpt2-124M gpt2-124M 64 "$(at $recorder)" || bad=1
        one_timeline events-span-740M span-740M 16 "$(at $recorder)" || bad=1
    else bad=1; fi
    cupti=$(find_library libcupti.so.) || { say "skipped: no libcupti"; return $bad; }
    built cuda-bench/libtimeline.so && built cuda-pre-bf16/train_gpt || return 1
    one_timeline cupti-gpt2-124M gpt2-124M 64 LD_PRELOAD="$cupti" \
        CUDA_INJECTION64_PATH="$(readlink -f "$(at cuda-bench/libtimeline.so)")" \
        "$(at cuda-pre-bf16/train_gpt)" || bad=1
    return $bad
}

# time_for NAME, before a turn: is there time for one as long as the longest so far? If not, a stage
# ends with the results it has.
began="" longest=0
time_for() {
    now=$(date +%s)
    [ -n "$began" ] && [ $((now - began)) -gt $longest ] && longest=$((now - began))
    began=$now
    [ "$(seconds_left)" -gt $longest ] && return
    say "time is up before $1: $(seconds_left) s are left, the longest so far took $longest"
    return 1
}

# one_run WHAT MODEL ROUND SECONDS COMMAND...: a line with what ran and the milliseconds of its
# steps. The run is killed SECONDS after its first step: neither its start nor the checkpoint at its
# end is to be timed. One that ends by itself before is a failure; its line counts.
first_step() { grep -q '"ms"' build/gpu_run/log.jsonl 2> /dev/null; }
one_run() {
    what=$1 model=$2 round=$3 seconds=$4 late="" fault=""; shift 4
    patience=$(($(seconds_left) - ${seconds%.*}))
    [ $patience -lt "$STARTUP" ] || patience=$STARTUP
    end=$(($(date +%s) + patience))
    rm -rf build/gpu_run
    "$@" > build/gpu_run.txt 2>&1 &
    pid=$!
    trap 'kill -KILL $pid; exit 143' INT TERM HUP
    until first_step; do
        kill -0 $pid 2> /dev/null || break
        [ "$(date +%s)" -lt $end ] || { late=" within $patience s"; break; }
        sleep 0.1
    done
    from=$(date +%s)
    first_step && sleep "$seconds"
    kill -0 $pid 2> /dev/null || fault="ended early"
    { kill -KILL $pid; wait $pid; } 2> /dev/null
    trap 'exit 143' INT TERM HUP
    if first_step; then
        ms=$(sed -n 's/.*"ms": \([0-9.e+]*\).*/\1/p' build/gpu_run/log.jsonl | tr '\n' ',')
        config=$(tr -d '\n' < build/gpu_run/config.json)
        kinds=$(sed -n 's/^kernels: \(.*: wgmma takes.*\)/"\1",/p
            s/^note: \(.* is wrong.*\)/"\1",/p' build/gpu_run.txt | tr -d '\n')
        printf '{"what": "%s", "model": "%s", "round": %s, "from": %s, "to": %s, "ms": [%s], ' \
            "$what" "$model" "$round" "$from" "$(date +%s)" "${ms%,}"
        printf '"kinds": [%s], "config": %s}\n' "${kinds%,}" "$config"
    else
        fault="no steps$late"
    fi
    [ -z "$fault" ] ||
        say "$fault: $what $model: $(tail -n 3 build/gpu_run.txt | tr '\n' ' ')" >&2
    rm -rf build/gpu_run build/gpu_run.txt
    [ -z "$fault" ]
}

# ours LABEL MODE MODEL ROUND SECONDS BATCH MICRO [FLAGS...]
ours() {
    label=$1 program=cuda-$2-bf16/train_gpt of=$3 turn=$4 for_seconds=$5 batch=$6 part=$7; shift 7
    built "$program" >&2 || return 1
    case " $* " in *" --kernels "*) ;; *) set -- "$@" --kernels "$KERNELS" ;; esac
    # shellcheck disable=SC2086
    one_run "$label" "$of" "$turn" "$for_seconds" "$(at "$program")" --model "$of" \
        --batch "$batch" --micro-batch "$part" $SPEED_FLAGS "$@" --out build/gpu_run
}

# train FILE MODEL SECONDS, and on stdin a line for each run, "LABEL MODE BATCH MICRO [FLAGS]". Runs
# them in turns, each round starting with the next, so that a warming GPU slows all alike. One that
# fails gets no other turn.
train() {
    bad=0 file=$1 model_of=$2 seconds_of=$3
    set --
    while read -r run; do set -- "$@" "$run"; done
    : > "$OUT/$file"
    for round in $(seq 1 "${ROUNDS:-3}"); do
        for run; do
            # Less than one whole round is a failure.
            time_for "${run%% *} in round $round" ||
                { [ "$round" -gt 1 ] && return $bad; return 1; }
            shift
            # shellcheck disable=SC2086
            if one_of_these $run >> "$OUT/$file"; then
                set -- "$@" "$run"
            else
                bad=1 began=""              # a hang is no measure of how long others take
            fi
        done
        [ $# -gt 0 ] || { say "none of them runs"; return 1; }
        say "round $round: $(wc -l < "$OUT/$file") runs"
        first=$1; shift
        set -- "$@" "$first"
    done
    return $bad
}
one_of_these() {
    run_label=$1 run_mode=$2 run_batch=$3 run_micro=$4; shift 4
    ours "$run_label" "$run_mode" "$model_of" "$round" "$seconds_of" "$run_batch" "$run_micro" "$@"
}

# micro LARGE SMALL: sequences of a micro-batch on a GPU of 120 GB, and on a smaller one.
micro() {
    memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null)
    [ "$(echo "$memory" | head -n 1)" -ge 120000 ] 2> /dev/null && echo "$1" || echo "$2"
}

# modes BATCH MICRO: the lines of all modes. options BATCH MICRO: what else is compared with PRE.
modes() { for mode in $MODES; do echo "$mode $mode $1 $2"; done; }
options() {
    echo "pre,mma.sync pre $1 $2 --kernels mma"
    echo "pre,muon pre $1 $2 --optimizer muon"
}

stage_train124() {
    { modes 64 0; options 64 0; echo "pre,documents pre 64 0 --mask-documents on"; } |
        train train124.jsonl gpt2-124M "${SECONDS_124M:-8}"
}
# In one micro-batch, and with gradients accumulated over four.
stage_train740() {
    { modes 16 "$(micro 0 8)"; options 16 "$(micro 0 8)"; modes 64 "$(micro 16 8)"; } |
        train train740.jsonl span-740M "${SECONDS_740M:-12}"
}
stage_trainmoe() {
    { modes 4 "$(micro 0 1)"; options 4 "$(micro 0 1)"; } |
        train trainmoe.jsonl olmoe-588M-3B "${SECONDS_MOE:-10}"
}
# The larger batch as in train124; with the smaller one launches cost more of the step.
stage_graph() {
    printf '%s\n' "pre pre 64 0" "pre,graph pre 64 0 --graph on" \
        "pre pre 4 0" "pre,graph pre 4 0 --graph on" |
        train graph.jsonl gpt2-124M "${SECONDS_124M:-8}"
}

stage_torch() {
    : > "$OUT/torch.jsonl"
    torch_sees_gpu || return 0
    bad=0
    for round in $(seq 1 "${ROUNDS:-3}"); do
        time_for "round $round" || { [ "$round" -gt 1 ] && return $bad; return 1; }
        ours pre pre gpt2-124M "$round" "${SECONDS_124M:-8}" 64 0 >> "$OUT/torch.jsonl" || bad=1
        within "$(seconds_left)" \
            "$PYTHON" dev/bench/gpu/torch_gpt.py --round "$round" >> "$OUT/torch.jsonl" || bad=1
        say "round $round: $(wc -l < "$OUT/torch.jsonl") runs"
    done
    return $bad
}
