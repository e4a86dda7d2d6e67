#!/bin/sh
# make test: the C tests, the command line, hostile inputs, what make builds, several processes,
# faults and kills of runs, and the CUDA code in the emulator and as nvcc's PTX. The last line
# counts all of them.
#
#   sh dev/test/run.sh [WORDS]     of the C tests only those whose name contains one of the words
export OMP_WAIT_POLICY=passive             # spinning threads would starve each other
export DEVICE=cpu                          # the CPU trainer, also where there is a GPU
trap 'kill 0' INT                          # background jobs ignore Ctrl-C
for word; do
    grep -q "{\"[a-z_]*$word" test_gpt.c || { echo "error: no test is called $word" >&2; exit 2; }
done
sh dev/test/emu.sh > build/emu.out &       # beside the others, which keep one core busy
build/test_gpt "$@" | tee build/test.out
sh dev/test/cli.sh | tee build/cli.out
sh dev/test/hostile.sh | tee build/hostile.out
sh dev/test/device.sh | tee build/device.out
sh dev/test/processes.sh | tee build/processes.out
sh dev/test/faults.sh | tee build/faults.out
if command -v python3 > /dev/null; then
    python3 dev/torture.py 8 | tee build/torture.out
    python3 dev/ptx/check.py --short --quiet | tee build/ptx.out
else
    echo "skipped: kills of runs, kernels as PTX: no python3"
    echo "0 passed, 0 failed" | tee build/torture.out > build/ptx.out
fi
wait
cat build/emu.out
cd build || exit 1
# A part that ended without its last line counts as failed.
tail -q -n 1 test.out cli.out hostile.out device.out processes.out faults.out torture.out ptx.out \
        emu.out |
    awk '/^[0-9]+ passed, [0-9]+ failed$/ { passed += $1; failed += $3; parts++ }
         END { failed += 9 - parts; print passed " passed, " failed " failed"; exit failed > 0 }'
