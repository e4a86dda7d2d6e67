#!/bin/sh
# Builds and runs the ladders: on the GPU, with times; without nvcc or a GPU, or with DEVICE=cpu, in
# the emulator (dev/emu). norm, classifier and attention have both precisions. product and
# attention_sm90 are bf16 for compute capability 9.0 alone; the emulator runs them in three orders
# of threads.
#
#   sh dev/kernels/run.sh [LADDERS]     NVCC=, CUDA=, CUBLAS= as for make
cd "$(dirname "$0")/../.." || exit 1
. dev/cuda_headers.sh
NVCC=${NVCC:-$(command -v nvcc || echo "$CUDA/bin/nvcc")}
out=build/kernels on=emulator passed=0 failed=0
warnings='-Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-psabi'
mkdir -p $out
capability=9.0 arch=native
if [ "${DEVICE:-}" != cpu ] && command -v "$NVCC" > /dev/null &&
    nvidia-smi -L 2> /dev/null | grep -q '^GPU'; then
    on=gpu capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
    [ "$capability" = 9.0 ] && arch=sm_90a
elif [ ! -f "$CUDA/include/cuda_runtime.h" ]; then
    echo "skipped: the ladders of dev/kernels: no cuda_runtime.h in $CUDA/include"
    echo "0 passed, 0 failed"
    exit 0
else make -s DEVICE=cpu EMU=$out $out/emu.o || exit 1
fi
make -s DEVICE=cpu OMP=0 build/services.a || exit 1

# build FILE REAL PROGRAM
build_gpu() {
    "$NVCC" -std=c++17 -O3 -arch=$arch -Werror all-warnings -Xcompiler "$warnings -fopenmp" \
        "-DREAL=$2" "$1" build/services.a -o "$3"
}
build_emulator() {
    g++ -std=c++17 -O1 -g $warnings -isystem "$CUDA/include" "-DREAL=$2" \
        -include dev/emu/emu.h -x c++ "$1" -x none $out/emu.o build/services.a -o "$3"
}

# run PROGRAM ONLY_SM90
run_gpu() { "$1"; }
run_emulator() {
    "$1" || return 1
    [ "$2" = no ] || { EMU_SEED=1 "$1" && EMU_SEED=2 "$1"; }
}

[ $# -gt 0 ] || set -- norm classifier attention product attention_sm90
for ladder in "$@"; do
    case $ladder in
        product | *_sm90) reals=__nv_bfloat16 sm90=yes ;;
        *) reals='float __nv_bfloat16' sm90=no ;;
    esac
    if [ $sm90 = yes ] && [ "$capability" != 9.0 ]; then
        echo "skipped: $ladder: for compute capability 9.0, found $capability"
        continue
    fi
    for real in $reals; do
        program=$out/$ladder-$real verdict=ok
        { build_$on dev/kernels/$ladder.cu $real $program && run_$on $program $sm90; } \
            > $program.out 2>&1 || verdict=FAILED
        if [ $verdict = ok ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
        echo "$ladder, $real, $on: $verdict"
        [ $verdict-$on = ok-emulator ] || cat $program.out
    done
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
