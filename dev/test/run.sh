#!/bin/sh
# make test: the C tests, the command-line tests, the hostile inputs, what make builds for, several processes, faults and kills
# of runs, and the CUDA code in the emulator; closes with one line that counts all.
export OMP_WAIT_POLICY=passive                        # threads that spin would starve each other on a busy machine
export DEVICE=cpu                                     # what the tests build is the CPU trainer, also where there is a GPU
trap 'kill 0' INT                                     # in the background nothing hears Ctrl-C
sh dev/test/emu.sh > build/emu.out &                  # beside the others, which keep one core busy; what it says comes last
build/test_gpt "$@" | tee build/test.out
sh dev/test/cli.sh | tee build/cli.out
sh dev/test/hostile.sh | tee build/hostile.out
sh dev/test/device.sh | tee build/device.out
sh dev/test/processes.sh | tee build/processes.out
sh dev/test/faults.sh | tee build/faults.out
if command -v python3 > /dev/null; then python3 dev/torture.py 8 | tee build/torture.out
else echo "skipped: kills of runs: no python3"; echo "0 passed, 0 failed" > build/torture.out; fi
wait
cat build/emu.out
cd build && tail -q -n 1 test.out cli.out hostile.out device.out processes.out faults.out torture.out emu.out | awk '/^[0-9]+ passed, [0-9]+ failed$/ { p += $1; f += $3; n++ } END { print p " passed, " f " failed"; exit (f > 0 || n != 8) }'
