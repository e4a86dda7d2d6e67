#!/bin/sh
# What make builds for: with nvcc and GPUs, without, and by hand. nvcc and nvidia-smi are stand-ins here, so it needs neither a GPU nor CUDA's headers, and
# knows which commands make would run. Called by dev/test/run.sh.
set -u
root=$(pwd)
tree=$root/build/test/device
log=$root/build/device.log
passed=0 failed=0
unset MAKEFLAGS MFLAGS MAKELEVEL DEVICE ARCH PREC NVCC NVCC_FLAGS CUDA CUBLAS GPU_TESTS
unset $(env | sed -n 's/^\(EMU[A-Z_]*\)=.*/\1/p')

# Every command there is, but for nvcc and nvidia-smi.
rm -rf "$tree" && mkdir -p "$tree/bin" "$tree/toolkit/bin" "$tree/cublas" "$tree/src/dev"
(IFS=:; for folder in $PATH; do ln -s "$folder"/* "$tree/bin/" 2> /dev/null; done)
rm -f "$tree/bin/nvcc" "$tree/bin/nvidia-smi"
for file in Makefile llmc data train_gpt.c train_gpt.cu test_gpt.c test_gpt.cu dev/device.sh dev/emu dev/test; do cp -R "$file" "$tree/src/$file" 2> /dev/null; done
touch "$tree/src/train_gpt.cu" "$tree/src/test_gpt.cu"
cd "$tree/src" || exit 1
PATH=$tree/bin

nvcc() {                                                   # nvcc FOLDER: an nvcc there that makes a script of what it was asked for
    cat > "$1/nvcc" <<'END'
#!/bin/sh
echo "nvcc $*" >> calls
while [ $# -gt 1 ]; do [ "$1" = -o ] && { printf '#!/bin/sh\necho made\n' > "$2"; chmod +x "$2"; }; shift; done
END
    chmod +x "$1/nvcc"
}
smi() {                                                    # smi STATUS LINES: what nvidia-smi prints
    printf '#!/bin/sh\necho nvidia-smi >> calls\ncase $* in *compute_cap,name*noheader*) ;; *) exit 1 ;; esac\nprintf "%s"\nexit %s\n' "$2" "$1" > "$tree/bin/nvidia-smi"
    chmod +x "$tree/bin/nvidia-smi"
}
make() { command make --no-print-directory CUDA="$tree/toolkit" "$@"; }

check() {
    name=$1; shift
    if "$@" > "$log" 2>&1; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED $name: $*"; tail -n 20 "$log"; fi
}
# says TEXT ARGUMENTS...: what make train_gpt would say it built; stops: what it says instead of building anything
says() { text=$1; shift; make -n train_gpt CUBLAS="$tree/cublas" "$@" > said 2>&1; cat said; grep -qF -- "./train_gpt is build/$text" said; }
stops() { text=$1; shift; ! make -n train_gpt CUBLAS="$tree/cublas" "$@" > said 2>&1 && cat said && grep -qF -- "*** $text" said; }
called() { [ "$(grep -c "^$2" calls)" = "$1" ] || { cat calls; false; }; }
touch "$tree/cublas/cublasLt.h"

check "no nvcc"                  says "cpu-span-fp32/train_gpt (CPU: no nvcc found)"
smi 0 '9.0, NVIDIA H200\n'
check "a GPU, no nvcc"           says "cpu-span-fp32/train_gpt (CPU: no nvcc found)"
check "DEVICE=cuda, no nvcc"     stops "expected nvcc in PATH, in $tree/toolkit/bin or as NVCC=..., found none" DEVICE=cuda
check "bf16, no nvcc"            says "cpu-span-bf16/train_gpt (CPU: no nvcc found)" PREC=bf16
nvcc "$tree/toolkit/bin"
check "nvcc in the toolkit"      says "cuda-span-bf16/train_gpt (CUDA, sm_90a: NVIDIA H200)"
check "nvcc by name"             says "cuda-span-bf16/train_gpt (CUDA, sm_90a: NVIDIA H200)" NVCC="$tree/toolkit/bin/nvcc"
check "a wrong name"             stops "expected nvcc in PATH" NVCC=/nowhere/nvcc
nvcc "$tree/bin"
check "nvcc in PATH"             sh -c "rm '$tree/toolkit/bin/nvcc'; make -n train_gpt CUDA='$tree/toolkit' CUBLAS='$tree/cublas' | grep '^$tree/bin/nvcc '"
rm "$tree/bin/nvidia-smi"
check "no nvidia-smi"            says "cpu-span-fp32/train_gpt (CPU: nvcc found, but no nvidia-smi)"
check "DEVICE=cuda, no GPU"      stops "no GPU to build for (nvcc found, but no nvidia-smi): expected ARCH=" DEVICE=cuda
check "no GPU, ARCH"             says "cuda-span-bf16/train_gpt (CUDA, sm_120: ARCH=120)" ARCH=120
check "no GPU, DEVICE and ARCH"  says "cuda-pre-fp32/train_gpt (CUDA, sm_80 sm_90a: ARCH=80,90)" DEVICE=cuda ARCH=80,90 PREC=fp32 NORM_MODE=PRE
smi 9 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver. Make sure that one is installed.\n'
check "a driver that fails"      says "cpu-span-fp32/train_gpt (CPU: nvcc found, but nvidia-smi lists no GPU)"
smi 0 'No devices were found\n'
check "no devices"               says "cpu-span-fp32/train_gpt (CPU: nvcc found, but nvidia-smi lists no GPU)"
check "bf16, no devices"         says "cpu-span-bf16/train_gpt (CPU: nvcc found, but nvidia-smi lists no GPU)" PREC=bf16
for gpu in "8.0 80 NVIDIA A100-SXM4-80GB" "8.6 86 NVIDIA RTX A6000" "8.9 89 NVIDIA GeForce RTX 4090" "9.0 90a NVIDIA H100 80GB HBM3" "10.0 100 NVIDIA B200" "12.0 120 NVIDIA GeForce RTX 5090"; do
    rest=${gpu#* } name=${gpu#* * }
    smi 0 "${gpu%% *}, $name\n"
    check "$name"                says "cuda-span-bf16/train_gpt (CUDA, sm_${rest%% *}: $name)"
done
smi 0 '7.0, Tesla V100-SXM2-16GB\n'
check "too old a GPU"            says "cpu-span-fp32/train_gpt (CPU: expected a GPU of compute capability 8.0 or later, found Tesla V100-SXM2-16GB (7.0))"
smi 0 '7.5, Tesla T4\n8.6, NVIDIA RTX A6000\n'
check "one of two is too old"    says "cuda-span-bf16/train_gpt (CUDA, sm_86: NVIDIA RTX A6000)"
smi 0 '9.0, NVIDIA H200\n9.0, NVIDIA H200\n8.0, NVIDIA A100\n'
check "several GPUs"             says "cuda-span-bf16/train_gpt (CUDA, sm_90a sm_80: 2 NVIDIA H200 and NVIDIA A100)"
smi 0 '9.0, NVIDIA H200\n'
check "the CPU by hand"          says "cpu-span-fp32/train_gpt (CPU: DEVICE=cpu)" DEVICE=cpu
check "the CPU by environment"   env DEVICE=cpu sh -c "make -n train_gpt | grep -F 'cpu-span-fp32/train_gpt (CPU: DEVICE=cpu)'"
check "an ARCH of other meaning" env ARCH=x86_64 sh -c "make -n train_gpt CUDA='$tree/toolkit' CUBLAS='$tree/cublas' | grep -F 'CUDA, sm_90a: NVIDIA H200'"
check "fp64 is the CPU's"        says "cpu-span-fp64/train_gpt (CPU: PREC=fp64)" PREC=fp64
check "fp32 on the GPU"          says "cuda-span-fp32/train_gpt (CUDA, sm_90a: NVIDIA H200)" PREC=fp32
check "fp64 on the GPU"          stops "PREC=fp64 is for the CPU: expected bf16 or fp32, or DEVICE=cpu" DEVICE=cuda PREC=fp64
check "bf16 on the CPU"          says "cpu-span-bf16/train_gpt (CPU: DEVICE=cpu)" DEVICE=cpu PREC=bf16
check "another precision"        stops "PREC=fp16: expected fp32, bf16 or fp64 on the CPU, bf16 or fp32 on a GPU" PREC=fp16
check "another device"           stops "DEVICE=gpu: expected cpu or cuda" DEVICE=gpu
check "an old ARCH"              stops "ARCH=75: expected one or more of 80 86" ARCH=75
check "an ARCH not there"        stops "ARCH=90a sm_80: expected one or more of 80 86" ARCH="90a sm_80"
check "an ARCH of the CPU"       stops "ARCH=90a is for GPUs" DEVICE=cpu ARCH=90a
rm "$tree/cublas/cublasLt.h"
[ -e /usr/include/cublasLt.h ] || check "no cublasLt.h" stops "cublasLt.h is neither in $tree/cublas nor in"
touch "$tree/cublas/cublasLt.h"

# Where the library is linked from: beside its header, as a toolkit has it, or as a Python package has it; where it is in neither place, by its name.
links() { make -n train_gpt ARCH=90a "$@" > said 2>&1; grep -E -- "$words" said || { cat said; false; }; }
mkdir -p "$tree/wheel/include" "$tree/wheel/lib" "$tree/kit/include" "$tree/kit/lib64" "$tree/kit/lib"
touch "$tree/wheel/include/cublasLt.h" "$tree/wheel/lib/libcublasLt.so.13" "$tree/kit/include/cublasLt.h"
for file in lib64/libcublasLt.so.13 lib64/libcublasLt.so lib/libcublasLt.so; do touch "$tree/kit/$file"; done
words="train_gpt *-lcublasLt\$"
check "a library somewhere else" links CUBLAS="$tree/cublas"
words="-L$tree/wheel/lib -Xlinker -rpath=$tree/wheel/lib -l:libcublasLt.so.13\$"
check "a Python package's"       links CUBLAS="$tree/wheel/include"
words="-L$tree/kit/lib64 -Xlinker -rpath=$tree/kit/lib64 -lcublasLt\$"
check "a toolkit's"              links CUBLAS="$tree/kit/include"

# What nvcc is told, when it is called again, and who asks for the GPU.
build() { : > calls; make train_gpt CUBLAS="$tree/cublas" CFLAGS=-O0 "$@"; }
check "a build"                  build NORM_MODE=PRE
check "nvcc is called once"      called 1 nvcc
check "nvidia-smi too"           called 1 nvidia-smi
check "it runs"                  sh -c "[ \"\$(readlink train_gpt)\" = build/cuda-pre-bf16/train_gpt ] && ./train_gpt | grep made"
check "sm_90a alone, no PTX"     sh -c "grep -F -- '-gencode arch=compute_90a,code=sm_90a' calls && ! grep -q 'gencode.*gencode' calls"
for flag in "-std=c++17 -O3 -lineinfo" "-DREAL=__nv_bfloat16 -DPREC=bf16 -DNORM_MODE=MODE_PRE" "-I$tree/cublas" "-lcublasLt" "build/stories.o" "-fopenmp" '-DGIT_HASH="'; do
    check "nvcc gets $flag"      grep -qF -- "$flag" calls
done
check "no fast-math"             sh -c "! grep -q 'fast.math' calls"
check "nothing to do"            build NORM_MODE=PRE
check "nvcc is not called"       called 0 nvcc
check "another mode"             build NORM_MODE=SPAN
check "and back"                 sh -c "make -s CUDA='$tree/toolkit' CUBLAS='$tree/cublas' CFLAGS=-O0 train_gpt NORM_MODE=PRE && [ \"\$(readlink train_gpt)\" = build/cuda-pre-bf16/train_gpt ]"
check "nvcc was called once"     called 1 nvcc
check "another ARCH"             build NORM_MODE=PRE ARCH=80
check "nvcc is called for it"    called 1 nvcc
check "the GPU is not asked"     called 0 nvidia-smi
: > calls
check "who needs no GPU"         make -n shard clean build/test_gpt build/cpu-span-fp32/train_gpt
check "does not ask for it"      called 0 nvidia-smi
: > calls
check "the tests for a GPU"      make test_gpt_cuda CUBLAS="$tree/cublas" CFLAGS=-O0
for prec in fp32:float bf16:__nv_bfloat16; do
    check "${prec%:*} is linked" grep -q "^nvcc .* build/cuda-test/gpu_main-${prec%:*}.o build/cuda-test/test_gpt-${prec%:*}.o build/cuda-test/model-${prec%:*}.o .*build/judge_fp64.o build/stories.o .*-lcublasLt" calls
    check "${prec%:*}'s main"    grep -q "^nvcc .*-DREAL=${prec#*:} -DPREC=${prec%:*} -Dmain=main_${prec%:*} -c train_gpt.cu -o build/cuda-test/model-${prec%:*}.o" calls
    check "${prec%:*}'s layers"  grep -q "^nvcc .*-DREAL=${prec#*:} -DPREC=${prec%:*} -c dev/test/test_gpu.cu -o build/cuda-test/test_gpu-${prec%:*}.o" calls
done
rm "$tree/bin/nvidia-smi"
check "no GPU to test on"        sh -c "! make test_gpt_cuda CUDA='$tree/toolkit' > said 2>&1 && grep -F 'no GPU to build for (nvcc found, but no nvidia-smi): expected ARCH=' said"
check "but to build for"         make -n test_gpt_cuda ARCH=80 CUBLAS="$tree/cublas"
cd "$root" || exit 1
rm -rf "$tree"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
