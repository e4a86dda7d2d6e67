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
headers=$CUBLAS PYTHON=$(command -v python3)
unset MAKEFLAGS MFLAGS MAKELEVEL DEVICE ARCH PREC NVCC OUT LIMIT ROUNDS STARTUP GPU
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
rm -rf "$tree" && mkdir -p "$tree/bin" "$tree/cublas"
for file in Makefile llmc data train_gpt.c train_gpt.cu test_gpt.cu dev; do
    cp -R "$file" "$tree/" || exit 1
done
rm -f "$tree"/dev/test/test_*.cu && touch "$tree/cublas/cublasLt.h" "$tree/dev/test/test_norm.cu"
cd "$tree" || exit 1
cat > bin/nvcc <<'END'
#!/bin/sh
while [ "$1" != -o ]; do shift; done
case $2 in
    */train_gpt) cp bin/made_train_gpt "$2" ;;
    */test_gpt-????) cp bin/made_test_gpt "$2" ;;
    */kernels) cp bin/made_kernels "$2" ;;
    *) touch "$2" ;;
esac
END
cat > bin/made_train_gpt <<'END'
#!/bin/sh
[ -e no_steps ] && { echo "error: no memory"; exit 1; }
case $0 in *-pre-*) ms=100 ;; *-span-*) ms=102 ;; *) ms=110 ;; esac
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2 ;;
        --model) model=$2 ;;
        --batch) batch=$2 ;;
        --micro-batch) micro=$2 ;;
    esac
    shift
done
mkdir "$out"
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
cat > bin/made_kernels <<'END'
#!/bin/sh
[ -e slow ] && [ $1 = norms ] && sleep 20
[ -e fault ] && [ $1 = attention ] && exit 1
echo '{"gpu": "stand-in", "sms": 1}'
[ $1 = linears ] || exit 0
printf '{"model": "gpt2-124M", "layer": "q k v forward", "ms": 0.5, "tokens": 65536, '
echo '"ms_min": 0.4, "ms_max": 0.6, "flops": 2.32e+11, "bytes": 4e8}'
printf '{"model": "gpt2-124M", "layer": "norm forward", "tokens": 65536, "ms": 0.1, '
echo '"ms_min": 0.1, "ms_max": 0.1, "flops": 0, "bytes": 2e8}'
END
cat > bin/nvidia-smi <<'END'
#!/bin/sh
case $* in
    *compute_cap*) echo "9.0, NVIDIA H200" ;;
    *driver_version*) echo "NVIDIA H200, 580.95.05, 143771 MiB, 1980 MHz, 700.00 W" ;;
    *memory.total*) [ -e small ] && echo 81559 || echo 143771 ;;
esac
END
cat > bin/compute-sanitizer <<'END'
#!/bin/sh
echo "========= COMPUTE-SANITIZER $*"
[ -e found ] && { echo "========= ERROR SUMMARY: 2 errors"; exit 9; }
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
    *"import glob, nvidia"*) echo $tree/cublas/cublasLt.h ;;
    *torch_gpt.py*)
        printf '{"what": "torch", "model": "gpt2-124M", "round": '\$3', '
        printf '"ms": [9000, 900, 130, 130, 130, 125, 125], '
        echo '"torch": "2.11", "compiled": true, "batch": 64, "seq": 1024}' ;;
    *torch_experts.py*)
        printf '{"model": "experts of 512", "layer": "down of experts forward, torch._grouped_mm", '
        echo '"tokens": 32768, "ms": 0.5, "flops": 2.75e+11, "bytes": 1e9}' ;;
    *) exec '$PYTHON' "\$@" ;;
esac
END
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
export CFLAGS=-O0 CUBLAS="$tree/cublas" PATH="$tree/bin:$PATH" ROUNDS=2 SECONDS_124M=0.3 \
    SECONDS_740M=0.3 SECONDS_MOE=0.3
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
    says "error: no stage kernel; expected some of: build tests runs sanitize kernels train124 \
train740 trainmoe torch report"
check "training before building" refused gpu_check train124
check "says what is missing" \
    says "skipped: no build/cuda-pre-bf16/train_gpt (sh dev/gpu_check.sh build)"
check "runs before building"     refused gpu_check runs
check "says what is missing, too" \
    says "skipped: no build/cuda-span-fp32/train_gpt (sh dev/gpu_check.sh build)"
check "tests of one precision"   sh -c "mkdir -p build/cuda-test &&
    cp bin/made_test_gpt build/cuda-test/test_gpt-bf16 && ! sh dev/gpu_check.sh tests > said 2>&1;
    rm build/cuda-test/test_gpt-bf16"
check "say what is missing"      says "skipped: no build/cuda-test/test_gpt-fp32"
check "and run"                  says "bf16: 3 of 3 tests passed"
check "cuBLASLt of PyTorch"      env -u CUBLAS CUDA="$tree/none" \
    sh -c "sh dev/gpu_check.sh build > said 2>&1" && check "is said" says "cuBLASLt of $tree/cublas"
rm -r build/cuda-*
check "everything"               gpu_check
check "is counted"               says "10 passed, 0 failed"
for file in build.txt tests.txt runs.txt sanitize.txt kernels.jsonl train124.jsonl train740.jsonl \
    trainmoe.jsonl torch.jsonl report.json report.md machine.txt results.tar.gz; do
    check "$file" test -s build/gpu_check/$file
done
check "five trainers"            sh -c '[ "$(ls -d build/cuda-*-bf16/train_gpt | wc -l)" = 5 ]'
check "two rounds of five"       sh -c '[ "$(wc -l < build/gpu_check/train124.jsonl)" = 10 ] &&
    [ "$(wc -l < build/gpu_check/train740.jsonl)" = 10 ] &&
    [ "$(wc -l < build/gpu_check/trainmoe.jsonl)" = 10 ]'
check "each begins with another" sh -c "sed -n '1p;6p' build/gpu_check/train124.jsonl | cut -c1-20 |
    uniq | wc -l | grep -qx 2"
check "no run is left"           sh -c '[ ! -e build/gpu_run ] &&
    [ ! -e build/gpu_check/train_gpt-fp32 ] && [ ! -e build/gpu_check/train_gpt-bf16 ]'
check "one file has all"         sh -c 'mkdir unpacked &&
    tar -xzf build/gpu_check/results.tar.gz -C unpacked && [ "$(ls unpacked | wc -l)" = 12 ] &&
    cp build/gpu_check/results.tar.gz unpacked && diff -r build/gpu_check unpacked'

# ---- the report
# 64 * 1024 tokens in 100 ms are 655360 a second. F1 is 797.8 MFLOP a token, 4.910 GFLOP for the
# 740M model, 4.348 GFLOP for OLMoE's.
check "which machine"            reports "driver 580.95.05, 143771 MiB, power limit 700.00 W"
check "tests"                    reports "tests, bf16: 3 passed, 0 did not"
check "runs of the trainer"      reports "- runs of the trainer: 70 passed, 0 failed"
check "sanitizers"               reports "compute-sanitizer, racecheck bf16 ours: clean"
check "the library's come last" \
    sh -c '[ "$(grep -c ": status 0$" build/gpu_check/sanitize.txt)" = 5 ] &&
    tail -n 1 build/gpu_check/sanitize.txt | grep -qx "memcheck bf16 library: status 0"'
check "PRE, the first steps out" reports "| PRE | 100.00 | 655360 | 523 | 52.8 | - | 8 in 2 |"
check "SPAN over PRE"            reports \
    "| SPAN | 102.00 | 642510 | 513 | 51.8 | 1.0200 ± 0.0000 | 8 in 2 |"
check "740M"                     reports "| PRE | 100.00 | 327680 | 1609 | 162.6 | - | 8 in 2 |"
check "experts"                  reports "| PRE | 100.00 | 163840 | 712 | 72.0 | - | 8 in 2 |"
check "PyTorch"                  reports \
    "| PyTorch 2.11 | 125.00 | 524288 | 418 | 42.3 | 1.2500 ± 0.0000 | 4 in 2 |"
check "a product"                reports \
    "| q k v forward | 0.5000 | 0.2931 | 59 | 464 TFLOP/s | 131.1 |"
check "a layer of memory"        reports \
    "| norm forward | 0.1000 | 0.0463 | 46 | 2.00 TB/s | 655.4 |"
check "experts in PyTorch"       reports \
    "| down of experts forward, torch._grouped_mm | 0.5000 | 0.3474 | 69 | 550 TFLOP/s | 65.5 |"
check "JSON"                     "$PYTHON" -c '
import json
r = json.load(open("build/gpu_check/report.json"))
assert r["training"]["GPT-2 124M"][1]["over_pre"]["rounds"] == 2
assert len(r["kernels"]) == 3 and r["runs"]["passed"] == 70'
check "an interval"              "$PYTHON" -c '
import sys; sys.path.insert(0, "dev/bench/gpu"); import report
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
assert all(report.peaks_of("NVIDIA " + name)[1] == peak for name, peak in peaks.items())
assert report.peaks_of("emulator") is None'

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
check "a red run"                says "FAILED bf16 stops"
check "is reported, too"         reports "runs of the trainer: 69 passed, 1 failed"
check "both are counted"         says "1 passed, 2 failed"
touch fault && check "a fault"   refused gpu_check tests kernels report &&
    check "is named" says "bf16: cuda_linear: crashed with status 1" && rm fault
check "and what it said"         says "fp32: error: CUDA: a kernel launched before failed"
check "and ends no other test"   reports \
    "tests, fp32: 2 passed, 1 did not; cuda_linear crashed with status 1"
check "nor section of kernels"   sh -c 'grep -q "attention ended with status 1" said &&
    [ "$(grep -c stand-in build/gpu_check/kernels.jsonl)" = 7 ]'
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
touch slow && check "too slow"   sh -c "! LIMIT=8 sh dev/gpu_check.sh kernels report > said 2>&1" &&
    check "is said" says "norms ended with status 124" && rm slow
check "the others went on"       says "1 passed, 1 failed"
check "the sections after it too" \
    sh -c '[ "$(grep -c stand-in build/gpu_check/kernels.jsonl)" = 7 ]'
touch no_steps && check "no run" refused gpu_check train740 &&
    check "and why" says "no steps: pre span-740M: error: no memory" && rm no_steps
check "is not tried again"       sh -c '[ "$(grep -c "no steps" said)" = 5 ] &&
    grep -q "none of them runs" said'
touch small && check "a GPU of 80 GB" gpu_check train124 trainmoe report &&
    check "takes a sequence at a time" reports "## OLMoE 588M-3B, micro-batches of 1" && rm small
check "of models that are large" sh -c 'grep -qx "## GPT-2 124M" build/gpu_check/report.md'
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
    [ "$n" -ge 5 ] && [ "$n" -lt 100 ]'
check "not one round" \
    sh -c "! SECONDS_124M=2 LIMIT=10 sh dev/gpu_check.sh train124 > said 2>&1"
check "is a failure"             says "in round 1: "
check "what ran is kept"         test -s build/gpu_check/train124.jsonl
check "a round with PyTorch"     sh -c "ROUNDS=99 LIMIT=9 sh dev/gpu_check.sh torch > said 2>&1"
check "and no more than fit"     says "time is up before round "
rm bin/compute-sanitizer
check "no compute-sanitizer" \
    sh -c "PATH=$tree/bin:/usr/bin:/bin sh dev/gpu_check.sh sanitize > said 2>&1"
command -v compute-sanitizer > /dev/null || check "is skipped" says "skipped: no compute-sanitizer"
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
    --round 4 | grep -E '^\{.*\"round\": 4, \"ms\": \[[0-9., ]+\], .*\"compiled\": false'"
"$PYTHON" -c 'import torch; torch._grouped_mm' 2> /dev/null && check "torch_experts.py on the CPU" \
    sh -c "'$PYTHON' dev/bench/gpu/torch_experts.py --device cpu --tiny |
    [ \$(grep -c -E '^\{.*_grouped_mm.*\"ms\": [0-9.e-]+, ') = 6 ]"
if [ -f "$CUDA/include/cuda_runtime.h" ] && [ -f "$headers/cublasLt.h" ]; then
    for prec in fp32 bf16; do
        check "the timer builds, $prec"  make build/emu/kernels-$prec CUDA="$CUDA" \
            CUBLAS="$headers" EMU=build/emu EMU_FLAGS="-O1"
        check "the timer runs, $prec" \
            sh -c "for section in $(sed -n 's/^SECTIONS="\([a-z ]*\)".*/\1/p' dev/gpu_check.sh);
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
for layer in ('q k v', 'attention', 'norm', 'SwiGLU', 'RoPE', 'embedding', 'classifier', 'AdamW',
              'down', 'head', 'GELU', 'router', 'combine', 'of experts'):
    assert any(layer in name for name in layers), (layer, layers)"
    done
else echo "skipped: no CUDA and cuBLASLt headers for dev/bench/gpu/kernels.cu"; fi
rm -rf "$tree"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
