#!/bin/sh
# Decides for the Makefile what train_gpt is built for. In the environment: DEVICE, ARCH, PREC and NVCC as given to make, or empty, and CUDA, the toolkit's
# folder. Out, one line:
#   cuda NVCC ARCHS PREC why      nvcc is there, and GPUs of compute capability 8.0 or later (or DEVICE, ARCH say so); ARCHS as in sm_ARCH, commas between
#   cpu - - PREC why              otherwise
#   stop what was expected        where what was given makes no sense
chips="80 86 87 88 89 90a 100 103 110 120 121"
by_hand=$DEVICE$ARCH archs=

stop() { echo "stop $*"; exit; }
cpu() { echo "cpu - - ${PREC:-fp32} $1"; exit; }

case $PREC in "" | fp32 | fp64 | bf16) ;; *) stop "PREC=$PREC: expected fp32, bf16 or fp64 on the CPU, bf16 or fp32 on a GPU" ;; esac
case $DEVICE in "" | cpu | cuda) ;; *) stop "DEVICE=$DEVICE: expected cpu or cuda" ;; esac
for arch in $(echo "$ARCH" | tr , ' '); do
    [ "$arch" = 90 ] && arch=90a
    case " $chips " in *" $arch "*) ;; *) stop "ARCH=$ARCH: expected one or more of $chips (compute capability without the dot; nvidia-smi --query-gpu=compute_cap --format=csv)" ;; esac
    archs=$archs${archs:+,}$arch
done
[ "$DEVICE" = cpu ] && [ -n "$ARCH" ] && stop "ARCH=$ARCH is for GPUs: expected DEVICE=cuda, or none"
[ "$DEVICE" = cpu ] && cpu DEVICE=cpu
[ "$PREC" = fp64 ] && [ -n "$by_hand" ] && stop "PREC=fp64 is for the CPU: expected bf16 or fp32, or DEVICE=cpu"
[ "$PREC" = fp64 ] && cpu PREC=fp64

if [ -n "$NVCC" ]; then nvcc=$(command -v "$NVCC"); else nvcc=$(command -v nvcc || ls "$CUDA/bin/nvcc" 2> /dev/null); fi
[ -z "$nvcc" ] && [ -n "$by_hand$NVCC" ] && stop "expected nvcc in PATH, in $CUDA/bin or as NVCC=..., found ${NVCC:+no $NVCC}${NVCC:-none}: install the CUDA toolkit, or DEVICE=cpu"
[ -z "$nvcc" ] && cpu "no nvcc found"
[ -n "$archs" ] && { echo "cuda $nvcc $archs ${PREC:-bf16} ARCH=$ARCH"; exit; }

# What nvidia-smi lists: "archs|names", or why not.
gpus=$(command -v nvidia-smi > /dev/null || { echo "nvcc found, but no nvidia-smi"; exit; }
       nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2> /dev/null | awk -F ', *' '
    $1 !~ /^[0-9]+\.[0-9]$/ { next }
    { cap = $1; sub(/\./, "", cap); name = $2; gsub(/[^A-Za-z0-9 .-]/, "", name) }
    cap + 0 < 80 { old = old (old ? ", " : "") name " (" $1 ")"; next }
    !(cap in seen) { seen[cap]; archs = archs (archs ? "," : "") (cap == 90 ? "90a" : cap) }
    !count[name]++ { order[++kinds] = name }
    END {
        for (i = 1; i <= kinds; i++) names = names (i > 1 ? " and " : "") (count[order[i]] > 1 ? count[order[i]] " " : "") order[i]
        print archs ? archs "|" names : old ? "expected a GPU of compute capability 8.0 or later, found " old : "nvcc found, but nvidia-smi lists no GPU"
    }')
case $gpus in
    *"|"*) echo "cuda $nvcc ${gpus%%|*} ${PREC:-bf16} ${gpus#*|}" ;;
    *) [ -n "$by_hand" ] && stop "no GPU to build for ($gpus): expected ARCH=one or more of $chips, or DEVICE=cpu"
       cpu "$gpus" ;;
esac
