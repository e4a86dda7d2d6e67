#!/bin/sh
# The CUDA trainer without a GPU: every layer and the five headline modes against the judge, in both precisions, and the trainer as a user runs it, alone and as
# several processes, in the emulator (dev/emu). Needs the headers of the CUDA toolkit: CUDA=its folder, CUBLAS=the folder of cublasLt.h; skips and says so where they are missing.
CUDA=${CUDA:-/usr/local/cuda} CUBLAS=${CUBLAS:-$CUDA/include}
if [ ! -f "$CUDA/include/cuda_runtime.h" ] || [ ! -f "$CUBLAS/cublasLt.h" ]; then
    echo "skipped: $(($(cat test_gpt.cu dev/test/test_*.cu | grep -c '^GPU_TEST') * 2)) tests of CUDA code: no cuda_runtime.h in $CUDA/include, or no cublasLt.h in $CUBLAS"
    echo "  -> install the CUDA toolkit (no GPU needed), or make test CUDA=... CUBLAS=..."
    echo "0 passed, 0 failed"
    exit 0
fi
make -s -j "$(nproc 2> /dev/null || echo 2)" DEVICE=cpu CUDA="$CUDA" CUBLAS="$CUBLAS" build/emu/test_gpt-fp32 build/emu/test_gpt-bf16 build/emu/train_gpt-fp32 build/emu/train_gpt-bf16 \
    build/emu/ngpt-fp32 build/emu/ngpt-bf16 build/emu/libnccl.so.2 build/emu/test_nccl || exit 1
build/emu/test_gpt-fp32 cuda_ > build/emu/fp32.out &
EMU_COMPUTE=120 build/emu/test_gpt-bf16 cuda_ > build/emu/bf16.out &             # of the GPUs built for, the least shared memory: 99 KiB a block
wait
for precision in fp32 bf16; do sed "s/^/$precision /; s/^$precision \([0-9]* passed\)/\1/" build/emu/$precision.out; done | tee build/emu/layers.out
sh dev/test/cuda.sh | tee build/emu/cuda.out
sh dev/test/gpus.sh | tee build/emu/gpus.out
cat build/emu/layers.out build/emu/cuda.out build/emu/gpus.out | awk '/^[0-9]+ passed, [0-9]+ failed$/ { p += $1; f += $3; n++ } END { print p " passed, " f + (n != 4) " failed" }'
