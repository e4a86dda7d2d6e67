#!/bin/sh
# dev/gpu_check.sh without a GPU: its stages, with stand-ins for nvcc, nvidia-smi,
# compute-sanitizer, PyTorch and what nvcc builds; report.py on numbers whose outcome is known.
# With CUDA's headers it also runs the kernels' timer itself, in the emulator; with PyTorch the
# model beside ours, on the CPU.
#
#   sh dev/test/gpu_check_test.sh     CUDA=, CUBLAS= as for make
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$(pwd)
tree=$root/build/test/gpu_check
log=$root/build/gpu_check_test.log
passed=0 failed=0
. dev/cuda_headers.sh
toolkit=$CUDA headers=$CUBLAS PYTHON=$(command -v python3)
unset MAKEFLAGS MFLAGS MAKELEVEL DEVICE ARCH PREC NVCC OUT LIMIT ROUNDS STARTUP GPU BINARIES STAGES
unset GPU_ARCH MODES MINUTES NCU_KERNELS CUPTI KERNELS
check() {
    name=$1; shift
    if "$@" > "$log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $name: $*"
        tail -n 20 "$log"
    fi
}

# ---- the stand-ins. bin/made_*: what nvcc makes, by the name it is asked for.
rm -rf "$tree" && mkdir -p "$tree/bin" "$tree/cublas" "$tree/cuda/lib64"
for file in Makefile llmc data train_gpt.c train_gpt.cu test_gpt.cu dev; do
    cp -R "$file" "$tree/" || exit 1
done
rm -f "$tree"/dev/test/test_*.cu && touch "$tree/cublas/cublasLt.h"
for layer in attention linear norm moe kinds; do touch "$tree/dev/test/test_$layer.cu"; done
cd "$tree" || exit 1
cat > bin/nvcc <<'END'
#!/bin/sh
echo "$@" >> build/build_line
while [ "$1" != -o ]; do shift; done
case $2 in
    */train_gpt) cp bin/made_train_gpt "$2" ;;
    */test_gpt-???? | */layers-????) cp bin/made_test_gpt "$2" ;;
    */kernels) cp bin/made_kernels "$2" ;;
    *) touch "$2" ;;
esac
END
printf '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; touch "$2"; chmod +x "$2"\n' > bin/made_cxx
printf '#!/bin/sh\ncp "$3" "$2"\n' > bin/strip
touch cuda/lib64/libcupti.so.13
cat > bin/made_train_gpt <<'END'
#!/bin/sh
# Two steps of 100 ms: a product of the LM head and one of a block, attention, AdamW, gaps of 3 ms.
[ -n "${TIMELINE:-}" ] && [ ! -e no_timeline ] && {
    head="product 50304 65536 768" small="product 2304 65536 768" update=adamw_kernel
    case $0:${CUDA_INJECTION64_PATH:-} in
        *timeline*:) ;;
        */cuda-pre-bf16/train_gpt:*/libtimeline.so)
            head="nvjet_hsh_128" small=$head update="void adamw_kernel(Arenas, float)" ;;
        *) exit 1 ;;
    esac
    launch() { echo "{\"name\": \"$1\", \"start\": $2, \"ms\": $3}"; }
    launch "$update" 98 2
    for begin in 100 200; do
        launch "$head" $((begin + 2)) 60
        launch "$small" $((begin + 62)) 20
        launch attention_forward_kernel $((begin + 82)) 10
        launch "$update" $((begin + 98)) 2
    done
    exit 0
} > "$TIMELINE"
[ -e no_steps ] && { echo "error: no memory"; exit 1; }
case $0 in *-pre-*) ms=100 ;; *-span-*) ms=102 ;; *) ms=110 ;; esac
given=" "
while [ $# -gt 0 ]; do
    case $1 in --*)
        case $given in *" $1 "*) echo "error: $1 is given twice"; exit 1 ;; esac
        given="$given$1 " ;;
    esac
    case $1 in
        --graph) [ $2 = on ] && ms=95 ;;
        --kernels) [ $2 = mma ] && ms=104 ;;
        --optimizer) ms=106 ;;
        --mask-documents) ms=90 ;;
        --out) out=$2 ;;
        --model) model=$2 ;;
        --batch) batch=$2 ;;
        --micro-batch) micro=$2 ;;
    esac
    shift
done
mkdir "$out"
echo "kernels: attention_forward by wgmma: wgmma takes 0.123 ms, mma.sync 0.456"
[ $ms = 90 ] && echo "note: attention_forward by wgmma is wrong on this GPU, an error of 1"
[ -e never ] && exec sleep 20
[ -e late ] && sleep 1
case $model in
    gpt2-124M)
        flags='"layers": "12", "width": "768", "heads": "12", "kv_heads": "0", "ffn": "0",
               "vocab": "50257", "seq": "1024", "activation": "gelu"' ;;
    olmoe-588M-3B)
        flags='"layers": "32", "width": "1024", "heads": "16", "kv_heads": "0", "ffn": "512",
               "experts": "64", "experts_per_token": "8",
               "vocab": "50280", "seq": "4096", "activation": "swiglu"' ;;
    *)
        flags='"layers": "24", "width": "1536", "heads": "24", "kv_heads": "0", "ffn": "4224",
               "vocab": "32000", "seq": "2048", "activation": "swiglu"' ;;
esac
printf '{\n  "flags": {\n%s, "batch": "%s", "micro_batch": "%s"\n}}\n' \
    "$flags" "$batch" "$micro" > "$out/config.json"
for step in 1 2 3 4 5 6 7 8 9; do
    [ $step -gt 5 ] || { echo "{\"step\": $step, \"loss\": 9, \"ms\": 900.5}"; continue; }
    echo "{\"step\": $step, \"loss\": 9, \"ms\": $ms}"
done > "$out/log.jsonl"
echo '{"step": 9, "val_loss": 9}' >> "$out/log.jsonl"
[ -e dies ] && [ $ms = 104 ] && { echo "error: CUDA: an illegal memory access"; exit 1; }
exec sleep 20
END
cat > bin/made_test_gpt <<'END'
#!/bin/sh
[ "$1" = --list ] && { printf 'cuda_norm\ncuda_linear\ncuda_normalize\n'; exit; }
for name; do
    case $name in
        =cuda_norm | =cuda_linear | =cuda_normalize) ;;
        *) echo "$name is no test"; exit 3 ;;
    esac
    if [ -e exclusive ]; then
        mkdir on_the_gpu || { echo "error: CUDA: the GPU is busy"; exit 1; }
        sleep 0.3; rmdir on_the_gpu
    fi
    if [ -e fault ] && [ $name = =cuda_linear ]; then
        echo "error: CUDA: a kernel launched before failed"; exit 1
    fi
    if [ -e slow_test ] && [ $name = =cuda_linear ]; then
        echo "FAILED cuda_linear: 1 is not 2"; exec sleep 20
    fi
    if [ -e red ] && [ $name = =cuda_norm ]; then
        echo "FAILED cuda_norm: 1 is not 2"; echo "9 passed, 1 failed"; exit 1
    fi
    echo "${name#=}                    ok  (9 checks)"
done
echo "9 passed, 0 failed"
END
# A product of 8192^3 at 750 TFLOP/s, a copy at 4 TB/s; q k v at 464 TFLOP/s, a norm at 2 TB/s.
cat > bin/made_kernels <<'END'
#!/bin/sh
[ -e slow ] && [ $1 = norms ] && sleep 20
[ -e fault ] && [ $1 = attention ] && exit 1
echo '{"gpu": "stand-in", "sms": 1}'
now=$(date +%s)
line() {
    printf '{"model": "%s", "layer": "%s", "tokens": 65536, "ms": %s, "ms_min": 0.1, ' "$1" "$2" $3
    echo "\"ms_max\": 0.6, \"flops\": $4, \"bytes\": $5, \"from\": $now, \"to\": $now.5}"
}
[ $1 != ceilings ] || [ -e no_ceilings ] || line ceilings product 2 1.5e+12 4e8
[ $1 != ceilings ] || [ -e no_ceilings ] || line ceilings copy 1 0 4e9
[ $1 = linears ] || exit 0
line gpt2-124M "q k v forward" 0.5 2.32e+11 4e8
line gpt2-124M "norm forward" 0.1 0 2e8
line gpt2-124M "attention backward" 2.403 2.58e+11 8e8
END
cat > bin/nvidia-smi <<'END'
#!/bin/sh
case $* in
    *-lms*)
        [ "$TZ" = UTC ] || exit 1
        while :; do
            echo "$(date -u "+%Y/%m/%d %H:%M:%S.%3N"), 1755, 3201, 612.30, 55"; sleep 0.2
        done ;;
    *compute_cap*) echo "9.0, NVIDIA H200" ;;
    *compute_mode*) [ -e exclusive ] && echo Exclusive_Process || echo Default ;;
    *memory.used*) [ -e busy ] && echo 30000 || echo 3 ;;
    *driver_version*)
        [ -e other ] && set -- "NVIDIA H100 80GB HBM3" || set -- "NVIDIA H200"
        echo "$1, 580.95.05, 143771 MiB, 1980 MHz, 700.00 W" ;;
    *memory.total*) [ -e small ] && echo 81559 || echo 143771 ;;
esac
END
# Nsight Compute's lines of one launch; with --kill the program ends before it prints.
cat > bin/ncu <<'END'
#!/bin/sh
while case $1 in */kernels) false ;; esac; do
    case $1 in --log-file) to=$2 ;; --kernel-name) kernel=${2#regex:} ;; esac
    shift
done
[ "$2" != attention ] || case $kernel in attention_*) ;; *) exit 1 ;; esac
[ -e forbidden ] && denied="ERR_NVGPUCTRPERM - The user does not have permission"
[ -e no_counters ] && denied="no permission"
if [ "${denied:-}" ]; then
    "$@"
    printf '%s\n' "==ERROR== $denied" "==PROF== Disconnected from process 7" > "$to"
    exit 1
fi
metric() { echo "\"0\",\"7\",\"void $kernel<Tiles<64, 64>>(float *)\",\"$1\",\"$2\",\"$3\","; }
{
    echo "==PROF== Connected to process 7"
    echo '"ID","Process","Kernel Name","Metric Name","Metric Unit","Metric Value","Rule","Advice"'
    metric Duration ns 1,250,000
    metric "SM Frequency" hz 1,500,000,000
    metric "Compute (SM) Throughput" % 61.5
    metric "Memory Throughput" % 40.2
    metric "Memory Throughput" byte/second 1,234
    metric "DRAM Throughput" % 20
    metric l1tex__data_pipe_lsu_wavefronts_mem_shared.sum "" 2,000,000
    metric l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum "" 100,000
} > "$to"
exit 9
END
cat > bin/compute-sanitizer <<'END'
#!/bin/sh
echo "========= COMPUTE-SANITIZER $*"
[ -e found ] && { echo "========= ERROR SUMMARY: 2 errors"; exit 9; }
[ -e killed ] && exit 137
while case $1 in build/*) false ;; esac; do [ "$1" = --tool ] && tool=$2; shift; done
case "$tool $*" in
    *" =cuda_norm" | memcheck*test_gpt-bf16" =cuda_linear") ;;
    *) echo "$tool of $*"; exit 9 ;;
esac
"$@" && echo "========= ERROR SUMMARY: 0 errors"
END
cat > bin/python3 <<END
#!/bin/sh
case \$* in
    *"import torch"*) exit 0 ;;
    *"import glob, nvidia"*cublasLt.h) echo $tree/cublas/cublasLt.h ;;
    *"import glob, nvidia"*) exit 1 ;;
    *torch_gpt.py*)
        printf '{"what": "torch", "model": "gpt2-124M", "round": '\$3', '
        printf '"ms": [9000, 900, 130, 130, 130, 125, 125], '
        echo '"torch": "2.11", "compiled": true, "batch": 64, "seq": 1024}' ;;
    *torch_layers.py*)
        printf '{"model": "experts of 512", "layer": "down of experts forward, torch._grouped_mm", '
        echo '"tokens": 32768, "ms": 0.5, "flops": 2.75e+11, "bytes": 1e9}' ;;
    *) exec '$PYTHON' "\$@" ;;
esac
END
cp dev/test/cuda.sh dev/test/as_a_user.sh
cat > dev/test/cuda.sh <<'END'
[ -e slow_run ] && { echo "FAILED fp32 trains: no"; exec sleep 20; }
root=$(pwd)
cd build/test && for program in "$GPU-fp32" "$GPU-bf16" "$root/build/cpu-span-fp32/train_gpt"; do
    [ -x "$program" ] || { echo "no $program"; exit 1; }
done
case $(readlink -f "$GPU-fp32")$(readlink -f "$GPU-bf16") in
    */cuda-span-fp32/train_gpt*/cuda-span-bf16/train_gpt) ;;
    *) exit 1 ;;
esac
[ -e "$root/red" ] && { echo "FAILED bf16 stops: no"; echo "69 passed, 1 failed"; exit 1; }
echo "70 passed, 0 failed"
END
mkdir -p build/test
chmod +x bin/*
export CFLAGS=-O0 CUDA="$tree/cuda" CUBLAS="$tree/cublas" CUPTI="$tree/cublas" \
    PATH="$tree/bin:$PATH" CXX="$tree/bin/made_cxx" ROUNDS=2 SECONDS_124M=0.3 SECONDS_740M=0.3 \
    SECONDS_MOE=0.3
gpu_check() { sh dev/gpu_check.sh "$@" > said 2>&1; status=$?; cat said; return $status; }
refused() { ! "$@"; }
says() { grep -qF -- "$1" said || { cat said; false; }; }
reports() {
    grep -qF -- "$1" build/gpu_check/report.md || { cat build/gpu_check/report.md; false; }
}

# ---- the stages
check "help"                     sh -c "sh dev/gpu_check.sh help | grep -q 'train124 '"
check "a stage not known"        refused gpu_check kernel
check "is named" \
    says "error: no stage kernel; expected some of: build first train124 kernels ncu timeline \
graph train740 trainmoe tests sanitize runs torch report"
check "one in STAGES, too"       sh -c "! STAGES='first firts' sh dev/gpu_check.sh > said 2>&1" &&
    check "is named" says "error: no stage firts"
check "the first stage"          gpu_check first
check "builds what it needs"     sh -c '[ "$(ls build/cuda-test/*-bf16)" ] &&
    [ ! -e build/cuda-pre-bf16 ] && [ ! -e build/cuda-test/test_gpt-bf16 ]'
check "and runs it"              says "bf16: 3 of 3 tests passed"
check "kernels by wgmma, too"    grep -q "test_kinds.cu" build/build_line
check "tests without nvcc"       sh -c "mkdir hidden && mv bin/nvcc hidden &&
    cp bin/made_test_gpt build/cuda-test/test_gpt-bf16;
    PATH=$tree/bin:/usr/bin:/bin sh dev/gpu_check.sh tests > said 2>&1; status=\$?;
    mv hidden/nvcc bin; rm build/cuda-test/test_gpt-bf16; [ \$status != 0 ]"
check "say what is missing"      says "skipped: no build/cuda-test/test_gpt-fp32"
command -v nvcc | grep -q "^/usr/bin" || {
    check "and say why"          says "make ended with status 2"
    check "and run what is there" says "bf16: 3 of 3 tests passed"
}
check "cuBLASLt of PyTorch"      env -u CUBLAS CUDA="$tree/none" \
    sh -c "STAGES=kernels sh dev/gpu_check.sh build > said 2>&1" &&
    check "is said" says "cublasLt.h of $tree/cublas"
mkdir include && touch include/cublasLt.h include/cupti.h
check "beside that of nvcc"      env -u CUBLAS CUDA="$tree/none" \
    sh -c "STAGES=kernels sh dev/gpu_check.sh build > said 2>&1" &&
    check "is not needed" sh -c '! grep "cublasLt.h of" said'
rm -r include

# ---- programs built elsewhere
rm -rf build
check "build elsewhere" \
    sh -c "STAGES='first kernels' BINARIES=carried GPU_ARCH=80 sh dev/gpu_check.sh build \
    > said 2>&1"
check "what these stages run"    sh -c '[ "$(cd carried && find . -type f | sort | tr "\n" " ")" = \
    "./cuda-bench/kernels ./cuda-test/layers-bf16 " ]'
check "and its size"             says "carried: "
check "for that GPU"             grep -q "arch=compute_80,code=sm_80" build/build_line
check "and any CPU"              grep -q -e "-march=x86-64-v3" build/gpu_check/build.txt
rm -rf build
check "take them" \
    sh -c "BINARIES=carried sh dev/gpu_check.sh first kernels > said 2>&1"
check "and build nothing"        sh -c '[ ! -e build/cuda-test ] && [ ! -e build/services.a ]'
check "what is not among them"   sh -c "! BINARIES=carried sh dev/gpu_check.sh train124 > said 2>&1"
check "is named"                 says "skipped: no carried/cuda-pre-bf16/train_gpt"
rm -rf build carried

check "everything"               gpu_check
check "is counted"               says "13 passed, 0 failed"
for file in build.txt first.txt tests.txt runs.txt sanitize.txt kernels.jsonl train124.jsonl \
    train740.jsonl trainmoe.jsonl graph.jsonl torch.jsonl ncu.csv report.json report.md \
    clocks-train124.csv clocks-kernels.csv clocks-timeline.csv clocks-graph.csv \
    clocks-train740.csv clocks-trainmoe.csv clocks-torch.csv \
    timeline-events-gpt2-124M.jsonl timeline-events-span-740M.jsonl \
    timeline-cupti-gpt2-124M.jsonl machine.txt results.tar.gz; do
    check "$file" test -s build/gpu_check/$file
done
check "two trainers"             sh -c '[ "$(ls -d build/cuda-[ps]*-bf16/train_gpt | wc -l)" = 2 ]'
check "two rounds of each"       sh -c '[ "$(wc -l < build/gpu_check/train124.jsonl)" = 10 ] &&
    [ "$(wc -l < build/gpu_check/train740.jsonl)" = 12 ] &&
    [ "$(wc -l < build/gpu_check/trainmoe.jsonl)" = 8 ]'
check "each begins with another" sh -c "sed -n '1p;3p' build/gpu_check/train124.jsonl | cut -c1-20 |
    uniq | wc -l | grep -qx 2"
check "no run is left"           sh -c '[ ! -e build/gpu_run ] && [ ! -e build/gpu_runs ]'
check "nor what reads the clock" sh -c "! pgrep -f 'clocks.sm,clocks.me[m].*lms 200'"
check "one file has all"         sh -c 'mkdir unpacked &&
    tar -xzf build/gpu_check/results.tar.gz -C unpacked &&
    cp build/gpu_check/results.tar.gz unpacked && diff -r build/gpu_check unpacked'

# ---- the report
# 64 * 1024 tokens in 100 ms are 655360 a second. F1 is 797.8 MFLOP a token, 4.910 GFLOP for the
# 740M model, 4.348 GFLOP for OLMoE's.
check "which machine"            reports "driver 580.95.05, 143771 MiB, power limit 700.00 W"
check "the first tests"          reports "the first tests, bf16: 3 passed, 0 did not"
check "tests"                    reports "- tests, bf16: 3 passed, 0 did not"
check "runs of the trainer"      reports "- runs of the trainer: 70 passed, 0 failed"
check "sanitizers"               reports "compute-sanitizer, racecheck bf16 ours: clean"
check "the library's come last" \
    sh -c '[ "$(grep -c ": status 0$" build/gpu_check/sanitize.txt)" = 5 ] &&
    tail -n 1 build/gpu_check/sanitize.txt | grep -qx "memcheck bf16 library: status 0"'
check "PRE, the first steps out" reports \
    "| PRE | 100.00 | 655360 | 523 | 52.8 | - | 8 in 2 | 1755 | 612 |"
check "SPAN over PRE"            reports \
    "| SPAN | 102.00 | 642510 | 513 | 51.8 | 1.0200 ± 0.0000 | 8 in 2 | 1755 | 612 |"
check "by the older kernels"     reports "| PRE, mma.sync | 104.00 | 630154 |"
check "under Muon"               reports "| PRE, muon | 106.00 | 618264 |"
check "documents apart"          reports "| PRE, documents | 90.00 | 728178 |"
check "the kinds of kernels"     reports \
    "- pre: attention_forward by wgmma: wgmma takes 0.123 ms, mma.sync 0.456"
check "one that is wrong"        reports \
    "- pre,documents: attention_forward by wgmma is wrong on this GPU, an error of 1"
check "740M"                     reports "| PRE | 100.00 | 327680 | 1609 | 162.6 | - | 8 in 2 |"
check "accumulated"              reports "## 740M, 64 sequences a step in micro-batches of 16"
check "experts"                  reports "| PRE | 100.00 | 163840 | 712 | 72.0 | - | 8 in 2 |"
check "in a graph" \
    reports "| PRE, graph | 95.00 | 689853 | 550 | 55.6 | 0.9500 ± 0.0000 | 8 in 2 |"
check "at both sizes"            reports "## GPT-2 124M in graphs, 4 sequences a step"
check "PyTorch"                  reports \
    "| PyTorch 2.11 | 125.00 | 524288 | 418 | 42.3 | 1.2500 ± 0.0000 | 4 in 2 |"
check "ceilings"                 reports "Ceilings, measured: 750 TFLOP/s, 4.00 TB/s."
check "a product"                reports \
    "| q k v forward | 0.5000 | 0.3093 | 62 | 464 TFLOP/s | 131.1 | 1755 | 612 |"
check "a layer of memory"        reports \
    "| norm forward | 0.1000 | 0.0500 | 50 | 2.00 TB/s | 655.4 | 1755 | 612 |"
check "experts in PyTorch"       reports \
    "| down of experts forward, torch._grouped_mm | 0.5000 | 0.3667 | 73 | 550 TFLOP/s | 65.5 |"
# attention backward: 2.403 - 1.262 ms, twelve times; q k v: 0.5 - 0.357.
check "the largest surprise" sh -c 'sed -n 3p build/gpu_check/report.md | grep -qF \
    "attention backward of gpt2-124M takes 2.403 ms, estimated were 1.262: 13.7 ms a step more"'
check "comes first"              sh -c 'grep -A 4 "^## Layers by" build/gpu_check/report.md |
    tail -n 1 | grep -qF "| gpt2-124M: attention backward | 2.4030 | 1.2624 | 0.3440 | 12 |"'
check "then the next" reports "| gpt2-124M: q k v forward | 0.5000 | 0.3568 | 0.3093 | 12"
check "experts of both kinds"    "$PYTHON" -c '
import sys; sys.path.insert(0, "dev/bench/gpu"); import timeline
for kernel in ("grouped_kernel", "grouped_sm90_kernel"):
    assert timeline.part_of(kernel, 1, 9) == "experts", kernel'
check "with what others publish" reports "FlashAttention-2 about 180 / 222 causal"
check "a step's parts"           reports "| LM head | 60.00 | 21.7 | 19.2 |"
check "with their gaps"          reports "| gaps | 8.00 | 1.5 | 0.0 |"
check "which add up" \
    sh -c '[ "$(grep -c "^| the step | 100.00 |" build/gpu_check/report.md)" = 3 ]'
check "beside a plain step"      reports "2 steps of 100.00 ms, the slowest 100.00; without \
recording 100.00; 1755 MHz, 612 W."
check "a product's rate"         reports "| product 50304 65536 768 | 1 | 60.000 | 84 |"
check "by CUPTI, too"            reports "| nvjet_hsh_128 | 2 | 80.000 |  |"
check "and its parts"            sh -c 'sed -n "/by cupti/,/^| launch/p" build/gpu_check/report.md |
    grep -qF "| products of blocks | 20.00 |"'
check "ncu"                      reports \
    "| attention_dq_kernel | 1.2500 | 62 | 40 | 20 | 2.00 | 5.0 | 1500 |"
check "of eleven kernels"        sh -c '[ "$(grep -c "| 1.2500 | 62 | 40 |" \
    build/gpu_check/report.md)" = 11 ]'
check "JSON"                     "$PYTHON" -c '
import json
r = json.load(open("build/gpu_check/report.json"))
assert r["training"]["GPT-2 124M, 64 sequences a step"][1]["over_pre"]["rounds"] == 2
assert len(r["kernels"]) == 4 and r["runs"]["passed"] == 70 and r["ceilings"]["measured"]
assert [row["layer"] for row in r["surprises"]][0] == "attention backward"'
touch no_ceilings other && check "another GPU" gpu_check kernels report && rm no_ceilings other
check "has assumed ceilings"     reports "Ceilings, assumed, not measured: 792 TFLOP/s, 3.02 TB/s."
check "and no estimates"         sh -c '! grep -q "surprise\|estimated" build/gpu_check/report.md'
check "an interval"              "$PYTHON" -c '
import sys; sys.path.insert(0, "dev/bench/gpu"); import layers, report
times = {"pre": (100, 100, 100), "span": (101, 102, 103)}
runs = [{"what": w, "round": r, "ms": ms} for w in times for r, ms in enumerate(times[w])]
found = report.ratio_to(runs, "span", "pre")
assert abs(found["mean"] - 1.02) < 1e-9, found
assert abs(found["half"] - 4.30 * 0.01 / 3 ** 0.5) < 1e-9, found
flags = dict(layers=24, width=1536, heads=24, kv_heads=0, ffn=4224, vocab=32000, seq=2048,
             activation="swiglu")
assert abs(report.flops_per_token(flags) / 4910e6 - 1) < 1e-3
peaks = {"H200": 4.8, "GH200 480GB": 4.0, "GH200 144G HBM3e": 4.9, "H100 80GB HBM3": 3.35,
         "A100-SXM4-80GB": 2.04, "A100 80GB PCIe": 1.94, "A100-SXM4-40GB": 1.56}
assert all(layers.peaks_of("NVIDIA " + name)[1] == peak for name, peak in peaks.items())
assert layers.peaks_of("emulator") is None
import estimates
rates = [estimates.step_of(m) for m in estimates.MODELS]
flags.update(layers=12, width=768, heads=12, ffn=0, vocab=50257, seq=1024, activation="gelu")
assert abs(report.flops_per_token(flags) * rates[0][1] / 989.4e10 - rates[0][2]) < 1e-6'
check "the tables of estimates"  sh -c \
    "'$PYTHON' dev/bench/gpu/estimates.py | diff dev/bench/gpu/ESTIMATES.md -"
check "and the step in README.md" "$PYTHON" -c '
import sys; sys.path.insert(0, "dev/bench/gpu"); import estimates
text = open("dev/bench/gpu/README.md").read()
for part, floor, ms in estimates.parts_of(estimates.MODELS[0]):
    assert f"| {part} | {floor:.1f} | {ms:.1f} |" in text, part
assert f"**{estimates.step_of(estimates.MODELS[0])[0]:.1f}**" in text'

# ---- results of two calls, put together from what each left in one file
check "one call"                 sh -c "OUT=build/one sh dev/gpu_check.sh tests report > said 2>&1"
check "another" \
    sh -c "OUT=build/two LIMIT=60 sh dev/gpu_check.sh kernels report > said 2>&1"
check "together"                 sh -c "mkdir build/both && for part in one two;
    do tar -xzf build/\$part/results.tar.gz -C build/both || exit 1; done;
    OUT=build/both sh dev/gpu_check.sh report > said 2>&1"
check "have all"                 sh -c "grep -q 'tests, bf16: 3 passed' build/both/report.md &&
    grep -q 'q k v forward' build/both/report.md && tar -tzf build/both/results.tar.gz |
    grep -q kernels.jsonl"

# ---- what goes wrong
touch red && check "a red test"  refused gpu_check tests runs report &&
    check "is named" says "bf16: cuda_norm: failed" && rm red
check "and counted"              says "fp32: 2 of 3 tests passed"
check "and reported"             reports "tests, fp32: 2 passed, 1 did not; cuda_norm failed"
check "the green one is kept" \
    sh -c 'for call in build/gpu_check/before-*.tar.gz; do tar -xzOf "$call" ./tests.txt; done |
    grep -q "cuda_norm: passed"'
check "a red run"                says "FAILED bf16 stops"
check "is reported, too"         reports "runs of the trainer: 69 passed, 1 failed"
check "both are counted"         says "1 passed, 2 failed"
check "the real script's status" refused env GPU="$tree/none" sh dev/test/as_a_user.sh
touch fault && check "a fault"   refused gpu_check tests kernels report &&
    check "is named" says "bf16: cuda_linear: crashed with status 1" && rm fault
check "and what it said"         says "fp32: error: CUDA: a kernel launched before failed"
check "and ends no other test"   reports \
    "tests, fp32: 2 passed, 1 did not; cuda_linear crashed with status 1"
check "nor section of kernels"   sh -c 'grep -q "attention ended with status 1" said &&
    [ "$(grep -c stand-in build/gpu_check/kernels.jsonl)" = 8 ]'
touch slow_test && check "a hang" \
    sh -c "! TEST_SECONDS=2 sh dev/gpu_check.sh tests report > said 2>&1" && rm slow_test
check "ends after its time"      reports "tests, bf16: 2 passed, 1 did not; cuda_linear timed out"
touch slow_test slow_run && check "no time for tests" \
    sh -c "! LIMIT=9 sh dev/gpu_check.sh tests runs report > said 2>&1" && rm slow_test slow_run
for prec in fp32 bf16; do
    check "what ran is kept, $prec" \
        grep -q "^$prec: FAILED cuda_linear" build/gpu_check/tests.txt &&
    check "and reported, $prec" \
        reports "tests, $prec: 2 passed, 1 did not; cuda_linear timed out"
done
check "runs, too"                reports "runs of the trainer: not finished, 1 failed so far"
check "and say why"              grep -q "^status 124" build/gpu_check/runs.txt
touch found && check "a race"    refused gpu_check sanitize report &&
    check "is reported" reports "memcheck bf16 ours: FOUND SOMETHING" && rm found
touch killed && check "a killed one" gpu_check sanitize report &&
    check "found nothing" reports "memcheck bf16 ours: clean until time was up" && rm killed
check "every choice of kernels"  sh -c ". dev/bench/gpu/tests.sh
    sed -n 's/^GPU_TEST(\(.*\)) {/\1/p' '$root/dev/test/test_kinds.cu' > kinds
    [ -s kinds ] && ! grep -vE \"\$LAYERS\" kinds"
touch exclusive && check "one at a time" gpu_check first && rm exclusive
touch busy && check "a busy GPU" gpu_check first report && rm busy
check "is said"                  says "The GPU was not idle: 30000 MiB of its memory were taken."
check "and reported"             reports "**The GPU was not idle: 30000 MiB"
touch slow && check "too slow"   sh -c "! LIMIT=8 sh dev/gpu_check.sh kernels report > said 2>&1" &&
    check "is said" says "norms ended with status 124" && rm slow
check "the others went on"       says "1 passed, 1 failed"
check "the sections after it too" \
    sh -c '[ "$(grep -c stand-in build/gpu_check/kernels.jsonl)" = 8 ]'
touch no_steps && check "no run" refused gpu_check train740 &&
    check "and why" says "no steps: pre span-740M: error: no memory" && rm no_steps
check "is not tried again"       sh -c '[ "$(grep -c "no steps" said)" = 6 ] &&
    grep -q "none of them runs" said'
touch dies && check "one that dies" refused gpu_check train124 && rm dies
check "is named" \
    says "ended early: pre,mma.sync gpt2-124M: kernels: attention_forward by wgmma"
check "with its error"           says "error: CUDA: an illegal memory access"
check "runs once, the others twice" sh -c '[ "$(wc -l < build/gpu_check/train124.jsonl)" = 9 ] &&
    [ "$(grep -c "pre,mma.sync" build/gpu_check/train124.jsonl)" = 1 ]'
check "all by mma.sync" \
    sh -c "KERNELS=mma ROUNDS=1 sh dev/gpu_check.sh graph > said 2>&1 &&
    [ \"\$(grep -c 900.5,104, build/gpu_check/graph.jsonl)\" = 4 ]"
touch small && check "a GPU of 80 GB" gpu_check train124 trainmoe report &&
    check "takes a sequence at a time" \
        reports "## OLMoE 588M-3B, 4 sequences a step in micro-batches of 1" && rm small
check "of models that are large" \
    sh -c 'grep -qx "## GPT-2 124M, 64 sequences a step" build/gpu_check/report.md'
touch late && check "a late first step" sh -c "ROUNDS=1 sh dev/gpu_check.sh train124 > said 2>&1" &&
    rm late
check "has its seconds after it" \
    sh -c '[ "$(grep -c 900.5,100, build/gpu_check/train124.jsonl)" = 1 ] &&
    [ "$(wc -l < build/gpu_check/train124.jsonl)" = 5 ]'
touch never && check "no first step" \
    sh -c "! ROUNDS=1 STARTUP=0 sh dev/gpu_check.sh train124 > said 2>&1" &&
    check "is not waited for" says "no steps within 0 s: pre gpt2-124M" && rm never
check "more rounds than time"    sh -c "ROUNDS=99 LIMIT=10 sh dev/gpu_check.sh train124 > said 2>&1"
check "those there is time for"  says "time is up before "
check "are kept"                 sh -c 'n=$(wc -l < build/gpu_check/train124.jsonl);
    [ "$n" -ge 2 ] && [ "$n" -lt 100 ]'
check "not one round" \
    sh -c "! SECONDS_124M=2 LIMIT=8 sh dev/gpu_check.sh train124 > said 2>&1"
check "is a failure"             says "in round 1: "
check "what ran is kept"         test -s build/gpu_check/train124.jsonl
check "a round with PyTorch"     sh -c "ROUNDS=99 LIMIT=9 sh dev/gpu_check.sh torch > said 2>&1"
check "and no more than fit"     says "time is up before round "
touch no_counters && check "no counters" refused gpu_check ncu &&
    check "is said" says "ncu: nothing about grouped_kernel: ==ERROR== no permission" &&
    rm no_counters
touch forbidden && check "no permission" refused gpu_check ncu && rm forbidden
check "is said once"             sh -c '[ "$(grep -c "skipped: no permission" said)" = 1 ] &&
    ! grep "ncu: nothing" said'
touch no_timeline no_steps && check "no timeline" refused gpu_check timeline report &&
    check "and why" says "no timeline: events-gpt2-124M: error: no memory" &&
    rm no_timeline no_steps
check "nor one of another call"  sh -c '! grep -q "by events" build/gpu_check/report.md'
rm build/cuda-bench/libtimeline.so
check "CUPTI's is not built"     sh -c "! CXX=false sh dev/gpu_check.sh timeline > said 2>&1"
check "is said"                  says "skipped: no build/cuda-bench/libtimeline.so"
rm cuda/lib64/libcupti.so.13
check "no CUPTI"                 gpu_check timeline
ls /usr/local/cuda*/lib64/libcupti.so* > /dev/null 2>&1 ||
    check "is skipped" says "skipped: no libcupti"
check "no time" sh -c "! MINUTES=0 sh dev/gpu_check.sh first kernels > said 2>&1" &&
    check "is said" says "kernels: not begun, 0 s are left"

# A call that is ended, in the middle of a section of kernels.
touch slow && rm build/gpu_check/kernels.jsonl
sh dev/gpu_check.sh kernels > ended 2>&1 &
call=$!
check "a call begins"            timeout 20 sh -c \
    'until [ "$(grep -c stand-in build/gpu_check/kernels.jsonl)" = 3 ]; do sleep 0.1; done'
check "another beside it"        refused gpu_check first
check "is refused"               says "error: expected no other call of dev/gpu_check.sh"
kill $call
wait $call
check "it is ended"              [ $? = 143 ]
check "and all that it began"    flock -n build/gpu_check.lock true
rm slow

# found NAME: whether the stages find the tool.
found() { (. dev/bench/gpu/find.sh && command -v "$1" > /dev/null); }
rm bin/compute-sanitizer bin/ncu
found compute-sanitizer || {
    check "no compute-sanitizer" gpu_check sanitize
    check "is skipped"           says "skipped: no compute-sanitizer"
}
found ncu || {
    check "no ncu"               gpu_check ncu
    check "is skipped, too"      says "skipped: no ncu"
}
printf '#!/bin/sh\nexit 1\n' > bin/python3
check "no PyTorch"               gpu_check torch
check "is skipped"               says "skipped: no PyTorch that sees the GPU"
check "no Python"                sh -c "PYTHON=no-python sh dev/gpu_check.sh report > said 2>&1"
check "is skipped, too"          says "skipped: no no-python"
rm bin/python3

# ---- the programs themselves
cd "$root" || exit 1
"$PYTHON" -c 'import torch' 2> /dev/null ||
    echo "skipped: no PyTorch for dev/bench/gpu/torch_gpt.py"
"$PYTHON" -c 'import torch' 2> /dev/null && check "torch_gpt.py on the CPU" \
    sh -c "'$PYTHON' dev/bench/gpu/torch_gpt.py --device cpu --tiny --batch 2 --seq 16 --steps 3 \
    --round 4 |
    grep -E '^\{.*\"round\": 4, \"from\": .* \"ms\": \[[0-9., ]+\], .*\"compiled\": false'"
"$PYTHON" -c 'import torch; torch._grouped_mm' 2> /dev/null && check "torch_layers.py on the CPU" \
    sh -c "'$PYTHON' dev/bench/gpu/torch_layers.py --device cpu --tiny |
    [ \$(grep -c -E '^\{.*(_grouped_mm|attention).*\"ms\": [0-9.e-]+, ') = 10 ]"
unset CXX CUPTI
if [ -f "$toolkit/include/cuda_runtime.h" ] && [ -f "$headers/cublasLt.h" ]; then
    export CUDA="$toolkit" CUBLAS="$headers"
    for prec in fp32 bf16; do
        check "the timer builds, $prec"  make build/emu/kernels-$prec EMU=build/emu \
            EMU_FLAGS="-O1"
        check "the timer runs, $prec" \
            sh -c "for section in $(sed -n 's/^SECTIONS="\([a-z ]*\)".*/\1/p' \
            dev/bench/gpu/times.sh);
            do build/emu/kernels-$prec tiny \$section || exit 1; done > build/kernels.jsonl"
        check "a section it has not" \
            sh -c "! build/emu/kernels-$prec tiny norm 2> build/kernels.err &&
            grep -q 'found norm' build/kernels.err"
        check "JSON of every layer"      "$PYTHON" -c "
import json, math
lines = [row for row in map(json.loads, open('build/kernels.jsonl')) if 'gpu' not in row]
layers = {row['layer'] for row in lines}
for row in lines:
    assert row['ms'] > 0 and row['flops'] + row['bytes'] > 0 and math.isfinite(row['ms']), row
    assert row['from'] > 1.7e9 and row['to'] >= row['from'], row
for layer in ('q k v', 'attention', 'norm', 'SwiGLU', 'RoPE', 'embedding', 'classifier', 'AdamW',
              'down', 'head', 'GELU', 'router', 'combine', 'of experts'):
    assert any(layer in name for name in layers), (layer, layers)
import sys; sys.path.insert(0, 'dev/bench/gpu'); import estimates
models = {'gpt2-124M': 'gpt2-tiny', 'span-740M': 'span-tiny', 'experts of 512': 'experts of 24'}
timed = {(row['model'], row['layer']) for row in lines}
for model, layer in estimates.estimates():
    assert (models[model], layer) in timed, (model, layer)
assert {'product', 'copy'} == {layer for model, layer in timed if model == 'ceilings'}"
    done
    check "attention by wgmma, too" \
        sh -c '[ "$(EMU_COMPUTE=90 build/emu/kernels-bf16 tiny attention |
        grep -c "attention.*, wgmma\"")" = 4 ]'
    check "the timeline builds"  make build/emu/timeline-bf16 EMU=build/emu EMU_FLAGS="-O1"
    for model in "--norm layer --bias on --activation gelu --positions learned" "--experts 8"; do
        check "and records $model" sh -c "rm -rf build/gpu_run; TIMELINE=build/timeline-a-b.jsonl \
            TIMELINE_STEPS=3 build/emu/timeline-bf16 --layers 2 --width 64 --heads 2 --ffn 96 \
            --seq 32 --batch 4 --micro-batch 2 --steps 20 --warmup 1 --schedule-steps 4 $model \
            --val-every 0 --save-every 0 --sample 0 --norms-every 0 --out build/gpu_run"
        check "all of three steps, $model" "$PYTHON" -c "
import json, pathlib, sys; sys.path.insert(0, 'dev/bench/gpu'); import timeline
step = timeline.summary(pathlib.Path('build/timeline-a-b.jsonl'))
parts, kernels = ({row[0]: row for row in step[table]} for table in ('parts', 'kernels'))
assert step['steps'] == 3 and 'other' not in parts, parts
for table in (parts, kernels):
    assert abs(sum(row[2] for row in table.values()) - step['ms']) < 1e-3, (step, table)
    assert all(row[2] >= 0 for row in table.values()), table
assert kernels['attention_forward_kernel'][1] == 4, kernels    # 2 layers, 2 micro-batches
assert kernels['adamw_kernel'][1] == 1 and kernels['classifier'][1] == 2, kernels
assert kernels['product 192 64 64'][1] == 4, kernels           # q k v forward
log = [json.loads(line) for line in open('build/gpu_run/log.jsonl')]
times = [row['ms'] for row in log if 'loss' in row]
assert len(times) == 3 and step['ms'] < 1.5 * max(times), (step['ms'], times)"
    done
    printf '#include <cupti.h>\n#pragma GCC poison %s %s\n' CUpti_ActivityKernel10 \
        CUpti_ActivityMemcpy6 > build/cupti_12.h
    for source in dev/bench/gpu/cupti.cpp dev/test/cupti_stand_in.cpp; do
        check "types of CUDA 12, $source" \
            g++ -std=c++17 -fsyntax-only -I"$toolkit/include" \
            -I"$toolkit/extras/CUPTI/include" -include build/cupti_12.h $source
    done
    check "CUPTI's builds"       sh -ec "
        make build/cuda-bench/libtimeline.so NVCC=$tree/bin/nvcc ARCH=90a
        g++ -std=c++17 -Wall -Wextra -rdynamic -I$toolkit/include -I$toolkit/extras/CUPTI/include \
            dev/test/cupti_stand_in.cpp -ldl -o build/cupti_stand_in"
    check "and records"          env TIMELINE=build/timeline-c-d.jsonl TIMELINE_STEPS=2 \
        build/cupti_stand_in build/cuda-bench/libtimeline.so
    check "two steps"            "$PYTHON" -c "
import pathlib, sys; sys.path.insert(0, 'dev/bench/gpu'); import timeline
path = pathlib.Path('build/timeline-c-d.jsonl')
step = timeline.summary(path)
kernels = {name: round(ms, 4) for name, _, ms in step['kernels']}
assert step['steps'] == 2 and round(step['ms'], 4) == 0.1, step
assert kernels == {'norm_kernel': 0.04, 'copy': 0.02, 'adamw_kernel': 0.02, 'fill': 0.01,
                   'gaps': 0.01}, kernels
assert all(-0.1 < start < 0.3 for start, _, _ in timeline.launches_of(path)), path.read_text()"
else echo "skipped: no CUDA and cuBLASLt headers for dev/bench/gpu/*.c*"; fi
rm -rf "$tree"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
