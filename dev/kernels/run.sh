#!/bin/sh
# Builds and runs the three ladders in both precisions: on the GPU where nvidia-smi lists one, with
# times; otherwise in the emulator (dev/emu).
#
#   sh dev/kernels/run.sh     NVCC=, CUDA=, CUBLAS= as for make
cd "$(dirname "$0")/../.." || exit 1
. dev/cuda_headers.sh
NVCC=${NVCC:-$(command -v nvcc || echo "$CUDA/bin/nvcc")}
out=build/kernels on=emulator passed=0 failed=0
warnings='-Wall -Wextra -Werror -Wno-unknown-pragmas'
mkdir -p $out
if nvidia-smi -L 2> /dev/null | grep -q '^GPU'; then on=gpu
elif [ ! -f "$CUDA/include/cuda_runtime.h" ]; then
    echo "skipped: the ladders of dev/kernels: no cuda_runtime.h in $CUDA/include"
    echo "0 passed, 0 failed"
    exit 0
else make -s DEVICE=cpu EMU=$out $out/emu.o || exit 1
fi
make -s DEVICE=cpu OMP=0 build/services.a || exit 1

# build FILE REAL PROGRAM
build_gpu() {
    "$NVCC" -std=c++17 -O3 -arch=native -Werror all-warnings -Xcompiler "$warnings -fopenmp" \
        "-DREAL=$2" "$1" build/services.a -o "$3"
}
build_emulator() {
    g++ -std=c++17 -O1 -g $warnings -isystem "$CUDA/include" "-DREAL=$2" \
        -include dev/emu/emu.h -x c++ "$1" -x none $out/emu.o build/services.a -o "$3"
}

for ladder in norm classifier attention; do
    for real in float __nv_bfloat16; do
        program=$out/$ladder-$real verdict=ok
        { build_$on dev/kernels/$ladder.cu $real $program && $program; } > $program.out 2>&1 ||
            verdict=FAILED
        if [ $verdict = ok ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
        echo "$ladder, $real, $on: $verdict"
        [ $verdict-$on = ok-emulator ] || cat $program.out
    done
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
