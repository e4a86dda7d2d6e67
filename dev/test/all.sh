#!/bin/sh
# make test-all: what make test leaves out. The C tests under AddressSanitizer and UndefinedBehaviorSanitizer, and the numerical ones built by
# the other compiler and without OpenMP. Each in a copy of the tree, without warnings.
set -eu
passed=0 failed=0
root=$(pwd)

# step NAME COMMAND: one line each, the log shown on failure.
step() {
    name=$1; shift
    rm -rf build/all; mkdir -p build/all/tree
    git ls-files -z 2>/dev/null | xargs -0 tar cf - | tar xf - -C build/all/tree
    if (cd build/all/tree && "$@") > build/all.log 2>&1 && ! grep -q 'warning:' build/all.log; then
        passed=$((passed + 1)); echo "$name: ok, $(grep -E '^[0-9]+ passed' build/all.log | tail -n 1)"
    else
        failed=$((failed + 1)); echo "$name: FAILED"; tail -n 30 build/all.log
    fi
}

sanitize='-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined'
build='-j2 build/test_gpt build/shard build/cpu-span-fp32/train_gpt'
export ASAN_OPTIONS=detect_leaks=0                        # memory that lives as long as the program is not freed at its end
step "gcc, address and undefined behaviour" sh -c "make CC=gcc CFLAGS='$sanitize' $build && build/test_gpt mode gemm equations distinct invariance causality json stories dataloader shard flags sampler logger refusals"
step "gcc, no OpenMP" sh -c "make CC=gcc OMP=0 $build && build/test_gpt mode gemm equations single distinct causality stories run"
if command -v clang > /dev/null; then
    step "clang" sh -c "make CC=clang $build && build/test_gpt mode gemm equations finite single distinct invariance causality stories run"
    step "clang, no OpenMP" sh -c "make CC=clang OMP=0 $build && build/test_gpt mode gemm equations single run"
else
    failed=$((failed + 1)); echo "clang: not installed, 2 checks not run"
fi
rm -rf build/all
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
