# Sourced by dev/gpu_check.sh: the stages that say whether results are right.

# Names of the small tests, and of those among them that run the library's kernels beside ours.
LAYERS="activation|adamw|attend|attention|combine|classifier|decode|embedding|experts|gradient"
LAYERS="$LAYERS|graph|linear|loss_sums|norm(_|$)|qkv|rounding|router(_|$)"
LIBRARY="linear|experts$"

# one_test FILE PRECISION PROGRAM NAME: the output of a test and how it ended. The test runs in a
# process of its own, so that a fault or a hang ends no other.
one_test() {
    log=build/gpu_test-$2-$4.txt verdict="not run"
    : > "$log"
    if [ "$(seconds_left)" -gt 1 ]; then
        within -k 5 "$(at_most "$TEST_SECONDS")" "$3" "=$4" > "$log" 2>&1
        status=$?
        case $status in
            0) verdict=passed ;;
            124 | 137) verdict="timed out" ;;
            *)  verdict="crashed with status $status"
                ! grep -q '^[0-9]* passed, [0-9]* failed$' "$log" || verdict=failed ;;
        esac
    fi
    { sed "s/^/$2: /" "$log"; echo "$2: $4: $verdict"; } >> "$OUT/$1"
    rm "$log"
}

# run_tests FILE PRECISION:PROGRAM...: all tests of the programs, a few at a time: the judge in
# double takes longer than the GPU. In one of its modes a GPU takes one process at a time.
run_tests() {
    file=$1 bad=0 at_once=4; shift
    mode=$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader 2> /dev/null | head -n 1)
    [ "$mode" != Exclusive_Process ] || at_once=1
    export deadline OMP_NUM_THREADS=$((($(jobs) + at_once - 1) / at_once))
    : > "$OUT/$file"
    for test; do
        built "${test#*:}" >&2 && "$(at "${test#*:}")" --list |
            sed "s|^|$file ${test%%:*} $(at "${test#*:}") |"
    done > build/gpu_tests.txt
    [ ! -s build/gpu_tests.txt ] ||
        xargs -n 4 -P $at_once sh "$0" --test < build/gpu_tests.txt
    for test; do
        prec=${test%%:*}
        all=$(grep -c " $prec " build/gpu_tests.txt)
        good=$(grep -c "^$prec: [a-z0-9_]*: passed$" "$OUT/$file")
        say "$prec: $good of $all tests passed"
        { [ "$all" -gt 0 ] && [ "$good" = "$all" ]; } || bad=1
    done
    ends='failed|crashed with status [0-9]+|timed out|not run'
    grep -E ": FAILED |: error: |: [a-z0-9_]+: ($ends)\$" "$OUT/$file"
    return $bad
}

stage_first() { run_tests first.txt bf16:cuda-test/layers-bf16; }

stage_tests() {
    run_tests tests.txt fp32:cuda-test/test_gpt-fp32 bf16:cuda-test/test_gpt-bf16
}

stage_runs() {
    for name in cuda-span-fp32 cuda-span-bf16 cpu-span-fp32; do
        built $name/train_gpt || return 1
    done
    # Where dev/test/cuda.sh looks for the CPU's.
    [ -z "$BINARIES" ] || { mkdir -p build/cpu-span-fp32 &&
        cp "$(at cpu-span-fp32/train_gpt)" build/cpu-span-fp32/; }
    links=$(pwd)/build/gpu_runs
    mkdir -p "$links"
    for prec in fp32 bf16; do
        ln -sf "$(readlink -f "$(at cuda-span-$prec/train_gpt)")" "$links/train_gpt-$prec"
    done
    within "$(seconds_left)" env GPU="$links/train_gpt" sh dev/test/cuda.sh > "$OUT/runs.txt" 2>&1
    status=$?
    rm -r "$links"
    echo "status $status" >> "$OUT/runs.txt"
    grep -E 'FAILED|passed,|^status' "$OUT/runs.txt"
    return $status
}

# Each tool gets a share of the stage, our kernels first: the library's would take all of the time.
# Status 9: the tool found something; 124 or 137: time was up. A failed API call is no finding: the
# library tries some and falls back; we check all of ours. How the library's kernels meet at
# barriers is not for us to judge.
stage_sanitize() {
    : > "$OUT/sanitize.txt"
    have compute-sanitizer || return 0
    bad=0 runs=5
    for run in memcheck:bf16:ours racecheck:bf16:ours synccheck:bf16:ours memcheck:fp32:ours \
               memcheck:bf16:library; do
        tool=${run%%:*} whose=${run##*:} prec=${run#*:} prec=${prec%:*} log=build/gpu_sanitize.txt
        share=$(($(seconds_left) / runs)) runs=$((runs - 1)) invert=v
        [ $whose = ours ] || invert=""
        built cuda-test/test_gpt-"$prec" || continue
        test=$(at cuda-test/test_gpt-"$prec")
        tests=$("$test" --list | grep -E "$LAYERS" | grep -${invert}E "$LIBRARY" | sed 's/^/=/')
        # shellcheck disable=SC2086
        within -k 5 "$share" compute-sanitizer --tool "$tool" --report-api-errors no \
            --print-limit 10 --error-exitcode 9 "$test" $tests > $log 2>&1
        status=$?
        case $status in
            0) ended="" ;;
            124 | 137) ended=", time was up" ;;
            *) ended="" bad=1 ;;
        esac
        {
            sed "s/^/$tool $prec $whose: /" $log | tail -n 200
            echo "$tool $prec $whose: status $status"
        } >> "$OUT/sanitize.txt"
        say "$tool $prec $whose: status $status$ended," \
            "$(grep -c ' ok ' $log) tests ok," \
            "$(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' $log | tail -n 1)"
    done
    return $bad
}
