#!/bin/sh
# The CUDA trainer without a GPU, in the emulator (dev/emu): every layer and the five headline modes
# against the judge, in both precisions; the trainer as a user runs it, alone and as several
# processes. Called by dev/test/run.sh. Skips, and says so, where CUDA's headers are missing.
. dev/cuda_headers.sh
if ! missing=$(cuda_headers_found); then
    tests=$(cat test_gpt.cu dev/test/test_*.cu | grep -c '^GPU_TEST')
    echo "skipped: $((tests * 2)) tests of CUDA code: $missing"
    echo "0 passed, 0 failed"
    exit 0
fi
emu=build/emu
make -s -j "$(nproc 2> /dev/null || echo 2)" DEVICE=cpu $emu/test_gpt-fp32 $emu/test_gpt-bf16 \
    $emu/train_gpt-fp32 $emu/train_gpt-bf16 $emu/ngpt-fp32 $emu/ngpt-bf16 \
    $emu/libnccl.so.2 $emu/test_nccl build/shim.so || exit 1
$emu/test_gpt-fp32 cuda_ > $emu/fp32.out &
# Compute capability 12.0 has the least shared memory of all GPUs built for: 99 KiB a block.
EMU_COMPUTE=120 $emu/test_gpt-bf16 cuda_ > $emu/bf16.out &
wait
for precision in fp32 bf16; do
    sed "s/^/$precision /; s/^$precision \([0-9]* passed\)/\1/" $emu/$precision.out
done | tee $emu/layers.out
sh dev/test/cuda.sh | tee $emu/cuda.out
sh dev/test/gpus.sh | tee $emu/gpus.out
sh dev/test/lost.sh | tee $emu/lost.out
# Five counts: two of the layers, one each of the scripts. A missing one is a failure.
cat $emu/layers.out $emu/cuda.out $emu/gpus.out $emu/lost.out |
    awk '/^[0-9]+ passed, [0-9]+ failed$/ { passed += $1; failed += $3; parts++ }
         END { print passed " passed, " failed + (parts != 5) " failed" }'
