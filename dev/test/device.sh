#!/bin/sh
# Which commands make runs: for a CPU, for GPUs, by hand, and after a change. nvcc and nvidia-smi
# are stand-ins here, so the test needs neither a GPU nor CUDA's headers. Called by
# dev/test/run.sh.
set -u
root=$(pwd -P)
tree=$root/build/test/device
log=$root/build/device.log
passed=0 failed=0
unset MAKEFLAGS MFLAGS MAKELEVEL DEVICE ARCH PREC NVCC NVCC_FLAGS CUDA CUBLAS GPU_TESTS
unset $(env | sed -n 's/^\(EMU[A-Z_]*\)=.*/\1/p')

# Every command there is, but for nvcc and nvidia-smi.
rm -rf "$tree"
mkdir -p "$tree/bin" "$tree/toolkit/bin" "$tree/cublas" "$tree/src/dev"
(IFS=:; for folder in $PATH; do ln -s "$folder"/* "$tree/bin/" 2> /dev/null; done)
rm -f "$tree/bin/nvcc" "$tree/bin/nvidia-smi"
for file in Makefile llmc data train_gpt.c train_gpt.cu test_gpt.c test_gpt.cu dev/device.sh \
            dev/cuda_headers.sh dev/nvcc.mk dev/emu dev/kernels dev/test; do
    cp -R "$file" "$tree/src/$file" 2> /dev/null
done
touch "$tree/src/train_gpt.cu" "$tree/src/test_gpt.cu"
cd "$tree/src" || exit 1
PATH=$tree/bin

# nvcc FOLDER: an nvcc there; each program it makes is a script.
nvcc() {
    cat > "$1/nvcc" <<'END'
#!/bin/sh
echo "nvcc $*" >> calls
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then printf '#!/bin/sh\necho made\n' > "$2"; chmod +x "$2"; fi
    shift
done
END
    chmod +x "$1/nvcc"
}
# smi STATUS LINES: what nvidia-smi prints, and its exit status.
smi() {
    cat > "$tree/bin/nvidia-smi" <<END
#!/bin/sh
echo nvidia-smi >> calls
case \$* in *compute_cap,name*noheader*) ;; *) exit 1 ;; esac
printf "$2"
exit $1
END
    chmod +x "$tree/bin/nvidia-smi"
}
make() { command make --no-print-directory CUDA="$tree/toolkit" "$@"; }

check() {
    name=$1; shift
    if "$@" > "$log" 2>&1; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAILED $name: $*"; tail -n 20 "$log"; fi
}
# says TEXT ARGUMENTS...: whether make train_gpt would say that it builds TEXT
says() {
    text=$1; shift
    make -n train_gpt CUBLAS="$tree/cublas" "$@" > said 2>&1
    cat said
    grep -qF -- "./train_gpt is build/$text" said
}
# stops TEXT ARGUMENTS...: whether make train_gpt stops with TEXT and builds nothing
stops() {
    text=$1; shift
    ! make -n train_gpt CUBLAS="$tree/cublas" "$@" > said 2>&1 && cat said &&
        grep -qF -- "*** $text" said
}
# called TIMES PROGRAM
called() { [ "$(grep -c "^$2" calls)" = "$1" ] || { cat calls; false; }; }
touch "$tree/cublas/cublasLt.h"
kit="CUDA='$tree/toolkit' CUBLAS='$tree/cublas'"

# ---- with and without nvcc
expected="expected nvcc in PATH, in $tree/toolkit/bin or as NVCC=..., found none"
check "no nvcc"               says "cpu-span-fp32/train_gpt (CPU: no nvcc found)"
smi 0 '9.0, NVIDIA H200\n'
check "a GPU, no nvcc"        says "cpu-span-fp32/train_gpt (CPU: no nvcc found)"
check "DEVICE=cuda, no nvcc"  stops "$expected" DEVICE=cuda
check "bf16, no nvcc"         says "cpu-span-bf16/train_gpt (CPU: no nvcc found)" PREC=bf16
nvcc "$tree/toolkit/bin"
h200="(CUDA, sm_90a: NVIDIA H200)" by_name=NVCC=$tree/toolkit/bin/nvcc
check "nvcc in the toolkit"   says "cuda-span-bf16/train_gpt $h200"
check "nvcc by name"          says "cuda-span-bf16/train_gpt $h200" "$by_name"
check "a wrong name"          stops "expected nvcc in PATH" NVCC=/nowhere/nvcc
nvcc "$tree/bin"
rm "$tree/toolkit/bin/nvcc"
check "nvcc in PATH"          sh -c "make -n train_gpt $kit | grep '^$tree/bin/nvcc '"

# ---- with and without GPUs
none="nvcc found, but nvidia-smi lists no GPU" no_smi="nvcc found, but no nvidia-smi"
rm "$tree/bin/nvidia-smi"
check "no nvidia-smi"         says "cpu-span-fp32/train_gpt (CPU: $no_smi)"
check "DEVICE=cuda, no GPU"   stops "no GPU to build for ($no_smi): expected ARCH=" DEVICE=cuda
check "no GPU, ARCH"          says "cuda-span-bf16/train_gpt (CUDA, sm_120: ARCH=120)" ARCH=120
check "no GPU, two ARCHs"     says "cuda-pre-fp32/train_gpt (CUDA, sm_80 sm_90a: ARCH=80,90)" \
                                   DEVICE=cuda ARCH=80,90 PREC=fp32 NORM_MODE=PRE
smi 9 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.\n'
check "a driver that fails"   says "cpu-span-fp32/train_gpt (CPU: $none)"
smi 0 'No devices were found\n'
check "no devices"            says "cpu-span-fp32/train_gpt (CPU: $none)"
check "bf16, no devices"      says "cpu-span-bf16/train_gpt (CPU: $none)" PREC=bf16
for gpu in "8.0 80 NVIDIA A100-SXM4-80GB" "8.6 86 NVIDIA RTX A6000" \
           "8.9 89 NVIDIA GeForce RTX 4090" "9.0 90a NVIDIA H100 80GB HBM3" \
           "10.0 100 NVIDIA B200" "12.0 120 NVIDIA GeForce RTX 5090"; do
    rest=${gpu#* } name=${gpu#* * }
    smi 0 "${gpu%% *}, $name\n"
    check "$name"             says "cuda-span-bf16/train_gpt (CUDA, sm_${rest%% *}: $name)"
done
smi 0 '7.0, Tesla V100-SXM2-16GB\n'
old="expected a GPU of compute capability 8.0 or later, found Tesla V100-SXM2-16GB (7.0)"
check "too old a GPU"         says "cpu-span-fp32/train_gpt (CPU: $old)"
smi 0 '7.5, Tesla T4\n8.6, NVIDIA RTX A6000\n'
check "one of two is too old" says "cuda-span-bf16/train_gpt (CUDA, sm_86: NVIDIA RTX A6000)"
smi 0 '9.0, NVIDIA H200\n9.0, NVIDIA H200\n8.0, NVIDIA A100\n'
several="CUDA, sm_90a sm_80: 2 NVIDIA H200 and NVIDIA A100"
check "several GPUs"          says "cuda-span-bf16/train_gpt ($several)"

# ---- by hand
smi 0 '9.0, NVIDIA H200\n'
by_hand="cpu-span-fp32/train_gpt (CPU: DEVICE=cpu)"
precisions="expected fp32, bf16 or fp64 on the CPU, bf16 or fp32 on a GPU"
check "the CPU by hand"       says "$by_hand" DEVICE=cpu
check "by the environment"    env DEVICE=cpu sh -c "make -n train_gpt | grep -F '$by_hand'"
check "ARCH in environment"   env ARCH=x86_64 sh -c "make -n train_gpt $kit | grep -F '$h200'"
check "fp64 is the CPU's"     says "cpu-span-fp64/train_gpt (CPU: PREC=fp64)" PREC=fp64
check "fp32 on the GPU"       says "cuda-span-fp32/train_gpt $h200" PREC=fp32
check "fp64 on the GPU"       stops "PREC=fp64 is for the CPU: expected bf16 or fp32, or" \
                                    DEVICE=cuda PREC=fp64
check "bf16 on the CPU"       says "cpu-span-bf16/train_gpt (CPU: DEVICE=cpu)" DEVICE=cpu PREC=bf16
check "another precision"     stops "PREC=fp16: $precisions" PREC=fp16
check "another device"        stops "DEVICE=gpu: expected cpu or cuda" DEVICE=gpu
check "an old ARCH"           stops "ARCH=75: expected one or more of 80 86" ARCH=75
check "an unknown ARCH"       stops "ARCH=90a sm_80: expected one or more of 80" ARCH="90a sm_80"
check "an ARCH of the CPU"    stops "ARCH=90a is for GPUs" DEVICE=cpu ARCH=90a
rm "$tree/cublas/cublasLt.h"
[ -e /usr/include/cublasLt.h ] ||
    check "no cublasLt.h"     stops "cublasLt.h is neither in $tree/cublas nor in"
touch "$tree/cublas/cublasLt.h"

# ---- CUDA's headers without CUDA= and CUBLAS=: those that dev/setup.sh --all downloads
cache=$tree/cache/cuda-headers-13.0
mkdir -p "$cache/include" "$cache-cublas/include"
touch "$cache/include/cuda_runtime.h" "$cache-cublas/include/cublasLt.h"
# finds WORDS ARGUMENTS...: whether the emulator's compiler gets WORDS
finds() {
    words=$1; shift
    XDG_CACHE_HOME=$tree/cache command make -n build/emu/emu.o "$@" > said 2>&1
    grep -F -- "$words" said || { cat said; false; }
}
[ -e /usr/local/cuda/include/cuda_runtime.h ] ||
    check "headers of setup.sh" finds "-isystem $cache/include -isystem $cache-cublas/include "
check "cublasLt.h of setup.sh"  finds "-isystem $cache-cublas/include " CUDA="$tree/toolkit"

# ---- the library of cuBLASLt: in a toolkit, in a Python package, or wherever the linker finds it
links() {
    make -n train_gpt ARCH=90a "$@" > said 2>&1
    grep -E -- "$words" said || { cat said; false; }
}
wheel=$tree/wheel toolkit=$tree/kit
mkdir -p "$wheel/include" "$wheel/lib" "$toolkit/include" "$toolkit/lib64" "$toolkit/lib"
touch "$wheel/include/cublasLt.h" "$wheel/lib/libcublasLt.so.13" "$toolkit/include/cublasLt.h"
for file in lib64/libcublasLt.so.13 lib64/libcublasLt.so lib/libcublasLt.so; do
    touch "$toolkit/$file"
done
words="train_gpt *-lcublasLt\$"
check "a library elsewhere"   links CUBLAS="$tree/cublas"
words="-L$wheel/lib -Xlinker -rpath=$wheel/lib *-l:libcublasLt.so.13\$"
check "a Python package's"    links CUBLAS="$wheel/include"
words="-L$toolkit/lib64 -Xlinker -rpath=$toolkit/lib64 *-lcublasLt\$"
check "a toolkit's"           links CUBLAS="$toolkit/include"
target=$tree/linked/targets/x86_64-linux
mkdir -p "$target/include" "$target/lib"
ln -s targets/x86_64-linux/include "$tree/linked/include"
touch "$target/include/cublasLt.h" "$target/lib/libcublasLt.so"
words="-L$target/lib -Xlinker -rpath=$target/lib *-lcublasLt\$"
check "a toolkit of links"    links CUBLAS="$tree/linked/include"

# ---- what nvcc is told, when it is called again, and who asks for the GPU
build() { : > calls; make train_gpt CUBLAS="$tree/cublas" CFLAGS=-O0 "$@"; }
is_pre() { [ "$(readlink train_gpt)" = build/cuda-pre-bf16/train_gpt ]; }
once() { [ "$(grep -c -- "$1" calls)" = 1 ]; }
check "a build"               build NORM_MODE=PRE
check "nvcc compiles, links"  called 2 nvcc
check "nvidia-smi is asked"   called 1 nvidia-smi
check "it is ./train_gpt"     is_pre
check "it runs"               sh -c "./train_gpt | grep made"
check "for sm_90a"            grep -F -- '-gencode arch=compute_90a,code=sm_90a' calls
check "alone, no PTX"         sh -c "! grep -q 'gencode.*gencode' calls"
for flag in "-std=c++17 -O3 -lineinfo" "-I$tree/cublas" "-fopenmp"; do
    check "nvcc gets $flag"   called 2 "nvcc .*$flag"
done
check "the mode, precision"   once "-DREAL=__nv_bfloat16 -DPREC=bf16 -DNORM_MODE=MODE_PRE"
check "the commit"            once '-DGIT_HASH="'
check "the services"          once "build/services.a"
check "the library"           once "-lcublasLt"
check "no fast-math"          sh -c "! grep -q 'fast.math' calls"
check "nothing to do"         build NORM_MODE=PRE
check "nvcc is not called"    called 0 nvcc
check "another mode"          build NORM_MODE=SPAN
check "is compiled, linked"   called 2 nvcc
: > calls
check "and back"              sh -c "make -s $kit CFLAGS=-O0 train_gpt NORM_MODE=PRE"
check "is PRE again"          is_pre
check "nvcc is not called"    called 0 nvcc
check "another ARCH"          build NORM_MODE=PRE ARCH=80
check "nvcc is called for it" called 2 nvcc
check "the GPU is not asked"  called 0 nvidia-smi
: > calls
check "who needs no GPU"      make -n shard clean build/test_gpt build/cpu-span-fp32/train_gpt
check "does not ask for it"   called 0 nvidia-smi

# ---- the tests of CUDA code
: > calls
object=build/cuda-test
check "the tests for a GPU"   make test_gpt_cuda CUBLAS="$tree/cublas" CFLAGS=-O0
for prec in fp32:float bf16:__nv_bfloat16; do
    is=${prec%:*} flags="-DREAL=${prec#*:} -DPREC=${prec%:*}"
    parts="$object/gpu_main-$is.o $object/test_gpt-$is.o $object/model-$is.o .*build/judge_fp64.o"
    check "$is is linked"     once "^nvcc .* $parts build/services.a .*-lcublasLt"
    check "$is's main"        once "$flags -Dmain=main_$is -c train_gpt.cu -o $object/model-$is.o"
    check "$is's layers"      once "$flags -c dev/test/test_gpu.cu -o $object/test_gpu-$is.o"
done
rm "$tree/bin/nvidia-smi"
no_gpu="no GPU to build for ($no_smi): expected ARCH="
check "no GPU to test on"     sh -c "! make test_gpt_cuda $kit > said 2>&1"
check "says so"               grep -F "$no_gpu" said
check "but to build for"      make -n test_gpt_cuda ARCH=80 CUBLAS="$tree/cublas"

# ---- the ladders of dev/kernels, beside a GPU. Without CUDA's headers the emulator skips them.
printf '#!/bin/sh\necho "GPU 0: NVIDIA H200"\n' > "$tree/bin/nvidia-smi"
chmod +x "$tree/bin/nvidia-smi"
ladders() {
    env CUDA="$tree/toolkit" "$@" sh dev/kernels/run.sh norm | grep "^skipped: the ladders"
}
check "ladders on the CPU"    ladders DEVICE=cpu
rm "$tree/bin/nvcc"
check "ladders without nvcc"  ladders
rm "$tree/bin/nvidia-smi"

# ---- services are compiled once: another mode or precision compiles train_gpt.c alone
cpu() { command make DEVICE=cpu CC=cc CFLAGS=-O0 "$@"; }
# only FILE ARGUMENTS...: whether FILE is the one file that make would compile
only() {
    file=$1; shift
    cpu -n "$@" > said 2>&1
    [ "$(grep -oE -- ' -c [a-z0-9_/]+\.cu?' said)" = " -c $file" ] || { cat said; false; }
}
members() { ar t build/services.a; }
cat > llmc/run/added.c <<'END'
#if defined NORM_MODE || defined PREC || defined REAL || defined GIT_HASH
#error "expected services without mode, precision and commit"
#endif
int added(void);
int added(void) { return 0; }
END
check "services compile"      cpu -s build/services.a
check "all are there"         [ "$(members | wc -l)" = "$(ls llmc/run/*.c data/stories.c | wc -l)" ]
check "one mode"              only train_gpt.c train_gpt NORM_MODE=SPAN
check "another mode"          only train_gpt.c train_gpt NORM_MODE=PRE
check "another precision"     only train_gpt.c train_gpt PREC=bf16
touch llmc/run/added.c
check "a service changes"     only llmc/run/added.c build/services.a
check "a program"             cpu -s build/shard
touch llmc/run/util.h
check "a header changes"      sh -c "! make DEVICE=cpu CC=cc CFLAGS=-O0 build/shard 2>&1 |
                                     grep 'warning: #pragma'"
rm llmc/run/added.c
check "a service is gone"     cpu -s build/services.a
check "from the archive too"  sh -c "! ar t build/services.a | grep added"
cpu -n -B train_gpt build/test_gpt build/bench-fp32 build/shard > said 2>&1
check "the commit"            sh -c "[ \$(grep -c GIT_HASH said) = 1 ] &&
                                     grep -q 'GIT_HASH.* -c train_gpt.c' said"
cd "$root" || exit 1
rm -rf "$tree"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
