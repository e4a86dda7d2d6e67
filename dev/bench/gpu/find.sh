# Sourced by dev/gpu_check.sh: finds what a machine has, builds what a stage needs.

say() { echo "$(date +%H:%M:%S) $*"; }
have() { command -v "$1" > /dev/null || { say "skipped: no $1"; false; }; }
built() { [ -x "$(at "$1")" ] || { say "skipped: no $(at "$1")"; false; }; }
jobs() { nproc 2> /dev/null || echo 4; }
# Seconds left to the stage, less the five that it takes to end; at least 1.
seconds_left() { left=$((deadline - 5 - $(date +%s))); echo $((left > 1 ? left : 1)); }
at_most() { left=$(seconds_left); echo $((left < $1 ? left : $1)); }

# within [-k SECONDS] SECONDS COMMAND...: as timeout; the command also ends with this shell. A group
# of its own shields it from signals to the shell's.
within() {
    timeout "$@" &
    running=$!
    trap 'kill $running; wait $running; exit 143' INT TERM HUP
    wait $running
    result=$?
    trap 'exit 143' INT TERM HUP
    return $result
}

# nvcc, ncu and compute-sanitizer where toolkits put them, behind what PATH has already.
for folder in "${CUDA:+$CUDA/bin}" "${CUDA:+$CUDA/compute-sanitizer}" /usr/local/cuda/bin \
    /usr/local/cuda*/bin /usr/local/cuda*/compute-sanitizer /usr/local/cuda*/nsight-compute* \
    /opt/nvidia/nsight-compute/*; do
    case ":$PATH:" in *":$folder:"*) continue ;; esac
    [ -d "$folder" ] && PATH=$PATH:$folder
done
export PATH

# python_files PATTERN: files of NVIDIA's Python packages, as PyTorch brings them.
python_files() {
    "$PYTHON" -c '
import glob, nvidia, sys
for root in nvidia.__path__: print(*glob.glob(root + "/*/" + sys.argv[1]), sep="\n")
' "$1" 2> /dev/null | grep .
}

# find_library NAME: the file, NAME with any version, of the toolkit or of Python.
find_library() {
    for folder in "${CUDA:-/usr/local/cuda}" /usr/local/cuda-*; do
        ls "$folder/lib64/$1"* "$folder/extras/CUPTI/lib64/$1"* 2> /dev/null
    done | grep -m 1 . || python_files "lib/$1*" | grep -m 1 .
}

# at NAME: where a program is, by its name below build/.
at() { echo "${BINARIES:-build}/$1"; }

# What a stage runs, by names below build/.
trainers() { for mode in $MODES; do echo "cuda-$mode-bf16/train_gpt"; done; }
programs_of() {
    case $1 in
        first) echo cuda-test/layers-bf16 ;;
        train*) trainers; echo cuda-pre-bf16/train_gpt ;;
        kernels | ncu) echo cuda-bench/kernels ;;
        timeline) echo cuda-timeline-pre-bf16/train_gpt cuda-pre-bf16/train_gpt \
            cuda-bench/libtimeline.so ;;
        graph | torch) echo cuda-pre-bf16/train_gpt ;;
        tests | sanitize) echo cuda-test/test_gpt-fp32 cuda-test/test_gpt-bf16 ;;
        runs) echo cuda-span-fp32/train_gpt cuda-span-bf16/train_gpt cpu-span-fp32/train_gpt ;;
    esac
}

# If neither the toolkit nor that of nvcc has cuBLASLt or CUPTI, PyTorch's folder may have it.
find_headers() {
    root=${CUDA:-/usr/local/cuda}
    kit=$(dirname "$(command -v nvcc || echo "$root/bin/nvcc")")/..
    for header in cublasLt.h cupti.h; do
        [ $header = cublasLt.h ] && given=${CUBLAS:-} || given=${CUPTI:-}
        [ -z "$given" ] || continue
        for folder in "$root" "$kit"; do
            ls "$folder/include/$header" "$folder/extras/CUPTI/include/$header" 2> /dev/null
        done | grep -q . && continue
        found=$(python_files "include/$header" | grep -m 1 .) || continue
        say "$header of $(dirname "$found")"
        if [ $header = cublasLt.h ]; then export CUBLAS="$(dirname "$found")"
        else export CUPTI="$(dirname "$found")"; fi
    done
}

# A machine that only builds may lack cuBLASLt's library. Programs are then linked with one of its
# name whose functions fail; they run where the real one is.
stand_in_library() {
    find_library libcublasLt.so > /dev/null && return
    ldconfig -p 2> /dev/null | grep -q libcublasLt.so && return
    . dev/cuda_headers.sh
    folder=build/stand_in
    version=$(sed -n 's/^#define CUBLAS_VER_MAJOR //p' "$CUBLAS/cublas_api.h" 2> /dev/null)
    [ -n "$version" ] || return
    say "no libcublasLt.so.$version: linked with a stand-in"
    mkdir -p $folder/lib $folder/include
    ln -sf "$(readlink -f "$CUBLAS")"/*.h $folder/include/
    grep -o 'cublasLt[A-Za-z0-9]*(' "$CUBLAS/cublasLt.h" | sort -u |
        sed 's/.*/int &void) { return 15; }/' |
        ${CC:-cc} -x c - -shared -fPIC -o $folder/lib/libcublasLt.so."$version" \
            -Wl,-soname,libcublasLt.so."$version"
    export CUBLAS=$folder/include
}

# build NAME...: with make, for the GPU here or GPU_ARCH. The CPU's trainers need no nvcc. What
# cannot be built stops no other; the stage says what it lacks.
build() {
    have make || return 1
    cpu="" gpu=""
    for name; do
        case $name in cpu-*) cpu="$cpu build/$name" ;; *) gpu="$gpu build/$name" ;; esac
    done
    find_headers
    # A fifth of the size: the folder may have to travel.
    [ -n "$BINARIES" ] && nvcc --help 2> /dev/null | grep -q -e --compress-mode &&
        export NVCC_APPEND_FLAGS="--compress-mode=size ${NVCC_APPEND_FLAGS:-}"
    for targets in "$gpu" "$cpu"; do
        [ -n "$targets" ] || continue
        # shellcheck disable=SC2086
        within "$(seconds_left)" make -k -j "$(jobs)" ${GPU_ARCH:+ARCH="$GPU_ARCH"} \
            ${BINARIES:+CFLAGS="-O3 -march=x86-64-v3"} $targets >> "$OUT/build.txt" 2>&1 ||
            { say "make ended with status $?: $OUT/build.txt"
              grep -E 'error|\*\*\*|undefined|No rule' "$OUT/build.txt" | tail -n 10; }
    done
}

# need NAME...: builds them, or takes those of BINARIES. Programs that were built elsewhere may not
# know where the library is.
need() {
    [ $# -gt 0 ] || return 0
    [ -n "$BINARIES" ] || build "$@"
    for name; do
        built "$name" || continue
        missing=$(ldd "$(at "$name")" 2> /dev/null | sed -n 's/ => not found//p')
        for library in $missing; do
            found=$(find_library "$library") || { say "$name: no $library"; continue; }
            export LD_LIBRARY_PATH="$(dirname "$found")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        done
    done
}

# The programs of STAGES, without a GPU too; with BINARIES into that folder, for any x86-64 since
# 2015.
stage_build() {
    # shellcheck disable=SC2046
    set -- $(for stage in $STAGES; do programs_of "$stage"; done | tr ' ' '\n' | sort -u)
    : > "$OUT/build.txt"
    [ -z "$BINARIES" ] || stand_in_library
    build "$@"
    bad=0
    for name; do
        [ -x "build/$name" ] || { say "not built: $name"; bad=1; continue; }
        [ -n "$BINARIES" ] || continue
        mkdir -p "$BINARIES/$(dirname "$name")" && strip -o "$BINARIES/$name" "build/$name" || bad=1
    done
    say "$# programs, $(grep -c -i warning "$OUT/build.txt") lines with warnings"
    [ -z "$BINARIES" ] || say "$BINARIES: $(du -sm "$BINARIES" | cut -f 1) MiB"
    return $bad
}
