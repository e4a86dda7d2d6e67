#!/bin/sh
# Decides for the Makefile what train_gpt is built for. In the environment: DEVICE, ARCH, PREC and
# NVCC as given to make, or empty, and CUDA, the toolkit's folder. It prints one line:
#   cuda NVCC ARCHS PREC why   nvcc is there, and so are GPUs of compute capability 8.0 or later, or
#                              DEVICE and ARCH ask for them; ARCHS as in sm_ARCH, with commas
#   cpu - - PREC why           otherwise
#   stop EXPECTED              the options contradict each other, or what they ask for is missing
chips="80 86 87 88 89 90a 100 103 110 120 121"
by_hand=$DEVICE$ARCH archs=

stop() { echo "stop $*"; exit; }
cpu() { echo "cpu - - ${PREC:-fp32} $1"; exit; }

case $PREC in
    "" | fp32 | fp64 | bf16) ;;
    *) stop "PREC=$PREC: expected fp32, bf16 or fp64 on the CPU, bf16 or fp32 on a GPU" ;;
esac
case $DEVICE in "" | cpu | cuda) ;; *) stop "DEVICE=$DEVICE: expected cpu or cuda" ;; esac
for arch in $(echo "$ARCH" | tr , ' '); do
    [ "$arch" = 90 ] && arch=90a
    case " $chips " in
        *" $arch "*) archs=$archs${archs:+,}$arch ;;
        *) stop "ARCH=$ARCH: expected one or more of $chips (compute capability without the dot;" \
                "nvidia-smi --query-gpu=compute_cap --format=csv)" ;;
    esac
done
if [ "$DEVICE" = cpu ]; then
    [ -z "$ARCH" ] || stop "ARCH=$ARCH is for GPUs: expected DEVICE=cuda, or none"
    cpu DEVICE=cpu
fi
if [ "$PREC" = fp64 ]; then
    [ -z "$by_hand" ] || stop "PREC=fp64 is for the CPU: expected bf16 or fp32, or DEVICE=cpu"
    cpu PREC=fp64
fi

if [ -n "$NVCC" ]; then nvcc=$(command -v "$NVCC") none="no $NVCC"
else nvcc=$(command -v nvcc || ls "$CUDA/bin/nvcc" 2> /dev/null) none=none; fi
if [ -z "$nvcc" ]; then
    [ -z "$by_hand$NVCC" ] ||
        stop "expected nvcc in PATH, in $CUDA/bin or as NVCC=..., found $none:" \
             "install the CUDA toolkit, or DEVICE=cpu"
    cpu "no nvcc found"
fi
[ -n "$archs" ] && { echo "cuda $nvcc $archs ${PREC:-bf16} ARCH=$ARCH"; exit; }

# "archs|names" of the GPUs that nvidia-smi lists, or why there are none.
list_gpus() {
    command -v nvidia-smi > /dev/null || { echo "nvcc found, but no nvidia-smi"; return; }
    nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2> /dev/null | awk -F ', *' '
    $1 !~ /^[0-9]+\.[0-9]$/ { next }
    { cap = $1; sub(/\./, "", cap); name = $2; gsub(/[^A-Za-z0-9 .-]/, "", name) }
    cap + 0 < 80 { old = old (old ? ", " : "") name " (" $1 ")"; next }
    !(cap in seen) { seen[cap]; archs = archs (archs ? "," : "") (cap == 90 ? "90a" : cap) }
    !count[name]++ { order[++kinds] = name }
    END {
        for (i = 1; i <= kinds; i++) {
            times = count[order[i]] > 1 ? count[order[i]] " " : ""
            names = names (i > 1 ? " and " : "") times order[i]
        }
        if (archs) print archs "|" names
        else if (old) print "expected a GPU of compute capability 8.0 or later, found " old
        else print "nvcc found, but nvidia-smi lists no GPU"
    }'
}
gpus=$(list_gpus)
case $gpus in
    *"|"*) echo "cuda $nvcc ${gpus%%|*} ${PREC:-bf16} ${gpus#*|}" ;;
    *)  [ -z "$by_hand" ] || stop "no GPU to build for ($gpus):" \
                                  "expected ARCH=one or more of $chips, or DEVICE=cpu"
        cpu "$gpus" ;;
esac
