#!/bin/sh
# make arch-check: every kernel of the trainer as nvcc compiles it, in both precisions, for four
# generations of GPUs. Needs the CUDA toolkit, but no GPU.
#
#   sh dev/arch_check.sh [FILE.cu...]     default: train_gpt.cu;   NVCC=, CUDA=, CUBLAS= as for make
#   sh dev/arch_check.sh --write          renews dev/sass/table.txt, the table of machine code
#
# It fails on
#   a warning of nvcc, ptxas or the host compiler;
#   a spilled register, which is a round trip through memory inside the hottest loops;
#   an access of one or two bfloat16 where eight lie side by side (gpu.cuh's words_store), which
#   takes as many times the instructions;
#   what dev/sass_check.py finds in the machine code: lanes apart, accesses in pieces, products out
#   of order, or another table of machine code than the committed one (for train_gpt.cu alone).
# The table holds registers for each architecture, behind a + the bytes spilled (stores + loads),
# behind a * the bytes of arrays that do not fit in registers.
set -u
cd "$(dirname "$0")/.." || exit 1
. dev/cuda_headers.sh
NVCC=${NVCC:-$(command -v nvcc || ls "$CUDA/bin/nvcc" 2> /dev/null)}
out=build/arch passed=0 failed=0 archs="" gencode="" tab=$(printf '\t')
if [ -z "$NVCC" ]; then
    echo "skipped: no nvcc in PATH or $CUDA/bin"
    echo "0 passed, 0 failed"
    exit 0
fi
table=--gates
case $* in
    "" | train_gpt.cu) table=""; set -- train_gpt.cu ;;
    --write) table=--write; set -- train_gpt.cu ;;
esac
mkdir -p $out
rm -rf $out/*-fp32 $out/*-bf16
"$NVCC" --version | sed -n 's/.*, V\([0-9.]*\)$/nvcc \1/p' > $out/nvcc

# Kernels that may spill: kernel, precision and architecture as the table has them | bytes | why.
allowed='
interpolate_forward_kernel<Team<512, 8, 256> > fp32 sm_120|16|rows of more than 8192 floats
interpolate_backward_kernel<Team<512, 8, 256> > fp32 sm_80|8|the same rows
interpolate_backward_kernel<Team<512, 8, 256> > fp32 sm_120|20|the same rows
attention_dq_kernel<AttentionTiles<192, 128, true> > bf16 sm_120|16|the mask of documents
'

for arch in 80 90a 100 120; do
    if "$NVCC" --list-gpu-arch | grep -qx "compute_${arch%a}"; then
        archs="$archs $arch" gencode="$gencode -gencode arch=compute_$arch,code=sm_$arch"
    else echo "skipped: this nvcc does not know sm_$arch"; fi
done

# compile FILE PREC REAL OPTIONS...: everything nvcc says goes to $out/log
compile() {
    source=$1 precision=$2 real=$3; shift 3
    host="-Wall -Wextra -Werror -Wno-unknown-pragmas -fno-math-errno -fno-trapping-math -fopenmp"
    "$NVCC" -std=c++17 -O3 "$@" "-DREAL=$real" "-DPREC=$precision" "-I$CUBLAS" \
        -Werror all-warnings -Xcompiler "$host" "$source" -o "$out/object.o" > $out/log 2>&1
}

demangle() { if command -v c++filt > /dev/null; then c++filt "$@"; else cat; fi; }

# The output of ptxas as lines: kernel, precision, arch, registers, spilled, in the
# stack; tabs between.
kernels() {
    awk -v prec="$1" -v OFS='\t' '
        function done() {
            if (name) print name, prec, arch, registers, spilled + 0, stack + 0
            spilled = stack = 0
        }
        /Compiling entry function/ {
            done(); split($0, part, "\047"); name = part[2]; arch = part[4]
        }
        /bytes stack frame/ { stack += $1; spilled += $5 + $9 }
        match($0, /Used [0-9]+ registers/) {
            split(substr($0, RSTART), part, " ")
            registers = part[2]
        }
        END { done() }
    ' $out/log | demangle -p | sed 's/^void //'
}

: > $out/kernels
for file; do
    for prec in fp32:float bf16:__nv_bfloat16; do
        # Of what nvcc makes on its way, the machine code (cubin) and PTX stay.
        kept=$out/$(basename "$file" .cu)-${prec%:*}
        mkdir -p "$kept"
        # shellcheck disable=SC2086
        if compile "$file" "${prec%:*}" "${prec#*:}" -c $gencode --threads 2 -Xptxas -v \
                   --keep --keep-dir "$kept" &&
            ! grep -qiE 'warning|performance loss' $out/log; then passed=$((passed + 1))
        else
            failed=$((failed + 1)); echo "FAILED: $file, ${prec%:*}"
            grep -iE -A 4 'error|warning|performance loss' $out/log | awk '!seen[$0]++' |
                head -n 40
        fi
        kernels "${prec%:*}" >> $out/kernels
        find "$kept" -type f ! -name '*.cubin' ! -name '*.ptx' -delete
    done
done

# Narrow accesses of global memory in PTX: 8 or 16 bits at a time, less than 8 bytes together, or 16
# bytes as four words. Except in kernels whose threads have no neighbours to load as well: a
# target's logit, a value a lane, DyT's alpha, integers; and in the comparison of kernels when a run
# begins.
apart="classifier_kernel attention_decode_kernel router_backward_kernel \
       router_plan_kernel router_place_kernel fill_kernel compare_kernel EELb1EEv7AddNorm \
       EELb1EEv12NormBackward EELi4ELb"
narrow() {
    awk -v apart="$apart" '
        BEGIN { count = split(apart, name, " ") }
        /\.entry/ {
            match($0, /entry [A-Za-z0-9_]+/)
            kernel = substr($0, RSTART + 6, RLENGTH - 6)
            for (i = 1; i <= count; i++) if (index(kernel, name[i])) kernel = ""
        }
        kernel && /(ld|st)\.global\.[a-z0-9.]*[usb](8|16)[ \t]/ && !/\.v4\./ { found[kernel]++ }
        kernel && /(ld|st)\.global\.[ub]32[ \t].*\+12\]/ { found[kernel]++ }
        END { for (kernel in found) print found[kernel] " accesses apart in " kernel }
    ' "$1" | demangle
}
for file; do
    ptx=$(find "$out/$(basename "$file" .cu)-bf16" -name '*.ptx' | sort | tail -n 1)
    found="no PTX"
    [ -z "$ptx" ] || found=$(narrow "$ptx")
    if [ -z "$found" ]; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAILED: $file, accesses"; echo "$found"; fi
done

# The tests and the benchmarks only have to compile: to PTX, for one architecture.
for file in test_gpt.cu dev/test/test_*.cu dev/test/gpu_main.cu dev/bench/gpu/*.cu; do
    [ "$table" != --gates ] || break
    if compile "$file" bf16 __nv_bfloat16 -ptx -arch=compute_90; then passed=$((passed + 1))
    else failed=$((failed + 1)); echo "FAILED: $file"; head -n 20 $out/log; fi
done

sort -u $out/kernels | awk -F '\t' -v archs="$archs" '
    {
        key = $1 "\t" $2
        if (!(key in seen)) order[++n] = key
        seen[key]
        cell[key, $3] = $4 ($5 > 0 ? "+" $5 : "") ($6 > 0 && $5 == 0 ? "*" $6 : "")
        if (length($1) > wide) wide = length($1)
    }
    END {
        if (!n) exit
        wide = wide > 90 ? 90 : wide
        columns = split(archs, arch, " ")
        printf "%-*s  prec", wide, "kernel"
        for (a = 1; a <= columns; a++) printf "  %8s", "sm_" arch[a]
        for (i = 1; i <= n; i++) {
            split(order[i], part, "\t")
            printf "\n%-*s  %s", wide, part[1], part[2]
            for (a = 1; a <= columns; a++) printf "  %8s", cell[order[i], "sm_" arch[a]]
        }
        printf "\n"
    }'

while IFS=$tab read -r kernel prec arch registers spilled stack; do
    [ "$spilled" -gt 0 ] || continue
    reason=$(echo "$allowed" | awk -F '|' -v name="$kernel $prec $arch" -v spilled="$spilled" \
                                   '$1 == name && spilled <= $2 { print $3 }')
    if [ -n "$reason" ]; then
        echo "allowed: $kernel, $prec, $arch spills $spilled bytes: $reason"
    else
        failed=$((failed + 1))
        echo "FAILED: $kernel, $prec, $arch: $registers registers, and $spilled bytes spilled" \
             "(fewer values at a time, or a line in 'allowed' above with the reason)"
    fi
done < $out/kernels

# The machine code itself.
if ! command -v python3 > /dev/null; then echo "skipped: gates on machine code: no python3"
elif python3 dev/sass_check.py $out $table; then passed=$((passed + 1))
else failed=$((failed + 1)); fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
