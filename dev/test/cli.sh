#!/bin/sh
# What a user types: make with modes and precisions, the README's recipes for adding a mode, a tensor and a flag, and the README's own
# commands, all in a copy of the tree. Called by dev/test/run.sh.
set -u
root=$(pwd)
tree=$root/build/test/tree
passed=0 failed=0

# check NAME COMMAND...: counts one check.
check() {
    name=$1; shift
    if "$@" > "$root/build/cli.log" 2>&1; then passed=$((passed + 1)); else
        failed=$((failed + 1)); echo "FAILED $name: $*"; tail -n 20 "$root/build/cli.log"
    fi
}
refused() { ! "$@"; }

fresh_tree() {
    cd "$root" && rm -rf "$tree" && mkdir -p "$tree/build"
    { git ls-files -co --exclude-standard -z 2>/dev/null || find . -path ./build -prune -o -path ./runs -prune -o -type f -print0; } | xargs -0 tar cf - | tar xf - -C "$tree"
}
quick="make -s CFLAGS=-O1"                                 # the recipes are about what is built, not how fast it runs
short="--layers 2 --width 32 --heads 2 --seq 32 --batch 2 --steps 2 --val-every 0 --val-tokens 64 --sample 0"

fresh_tree
cd "$tree" || exit 1
mode_is() { $quick train_gpt "$@" && ./train_gpt --show | head -n 1 | grep -q " under ${expected} "; }
expected=PRE  check "make PRE"            mode_is NORM_MODE=PRE
expected=SPAN check "make SPAN"           mode_is NORM_MODE=SPAN
expected=PRE  check "and PRE again"       mode_is NORM_MODE=PRE
expected=SPAN check "FUSE is SPAN"        mode_is NORM_MODE=FUSE
check "fp64"                              sh -c "$quick train_gpt PREC=fp64 && ./train_gpt $short --out r64 && grep -q fp64 r64/config.json"
check "resume in another precision"       sh -c "$quick train_gpt && ! ./train_gpt --out r64 --resume auto 2> message && grep -q 'PREC=fp64' message"
check "bf16, and on in fp32"              sh -c "$quick train_gpt PREC=bf16 && ./train_gpt $short --out r16 && $quick train_gpt && ./train_gpt --out r16 --resume auto --steps 3 > message && [ \$(grep -c 'a run in bf16 goes on in fp32' message) = 1 ]"
check "resume under another mode"         sh -c "$quick train_gpt && ./train_gpt $short --out r32 && $quick train_gpt NORM_MODE=POST && ! ./train_gpt --out r32 --resume auto 2> message && grep -q 'NORM_MODE=SPAN' message"
for way in "--from r32 --eval" "--from r32/step_00000002 --eval" "--init-from r32 --out r33" "--init-from r32/step_00000002 --out r33" "--config r32/config.json --out r33"; do
    check "another placement: $way"       sh -c "! ./train_gpt $way 2> message && grep -q -- '-> make train_gpt NORM_MODE=SPAN' message && ! [ -e r33 ]"
done
check "an unknown mode stops make"        sh -c "! make train_gpt NORM_MODE=NONSENSE 2> message && grep -q 'SPAN PRE POST HYBRID SDD' message"
check "an unknown precision stops make"   sh -c "! make train_gpt PREC=fp12 2> message && grep -q 'expected fp32, bf16 or fp64' message"
check "paths with spaces"                 sh -c "mkdir 'my text' && yes 'to be or not to be' | head -n 400 > 'my text/a b.txt' && make -s shard && ./shard --out 'my shards' 'my text' && $quick train_gpt && ./train_gpt $short --data 'my shards' --out 'my run'"
check "a full disk is refused"            sh -c "ulimit -f 200; trap '' XFSZ; ! ./train_gpt --steps 1 --sample 0 --out full 2> message && grep -q -- '->' message"

# README, adding things: one row each, all three at once.
row='MODE(MINE, .attn = {.in = 1, .out = 1}, .ffn = {.in = 1, .post = 1}, .q = 1, .k = 1, .fin = 1) \\'
sed -i "/^MODE(PRE, /i $row" llmc/modes.h
sed -i '/^PARAM(wlm, /i PARAM(head_b, "lm_head.bias", 1, Vp, ROLE_ZERO, 0, 1) \\' llmc/tensors.h
sed -i 's/m->tied ? b.w.wte : b.w.wlm, NULL,/m->tied ? b.w.wte : b.w.wlm, b.w.head_b,/; s/m->tied ? b.dw.wte : b.dw.wlm, NULL,/m->tied ? b.dw.wte : b.dw.wlm, b.dw.head_b,/' train_gpt.c
sed -i '/^FLAG(data, /i FLAG(note, TEXT(""), FREE, "a remark for config.json") \\' llmc/run/flags.h
check "recipe: it builds and trains"      sh -c "$quick train_gpt NORM_MODE=MINE && ./train_gpt $short --out mine --note 'a trial'"
check "recipe: a mode is one row"         grep -q '"norm_mode": "MINE"' mine/config.json
check "recipe: a flag is one row"         sh -c "./train_gpt --help | grep -q -- --note && grep -q 'a trial' mine/config.json"
check "recipe: a tensor is one row"       sh -c "./train_gpt --show | grep -q lm_head.bias && grep -q lm_head.bias mine/step_00000002/model.safetensors"
check "--show modes tells rows apart"     sh -c "test -z \"\$(./train_gpt --show modes | cut -c15- | sed 's/, .source.*//; s/, .init[^,]*//' | sort | uniq -d)\""
check "recipe: gradients are tested"      sh -c "$quick -j2 build/test_gpt && VERBOSE=1 build/test_gpt finite > message && grep -q 'MINE llama' message"

# README: every command of its sh blocks, in order, in a fresh copy; apt-get and the tests themselves stand aside, and the block that needs
# a network and Python is dev/test/test_get.py's.
fresh_tree
cd "$tree" || exit 1
mkdir bin
printf '#!/bin/sh\nexit 0\n' > bin/apt-get
printf '#!/bin/sh\nexec "$@"\n' > bin/sudo
chmod +x bin/apt-get bin/sudo
PATH=$tree/bin:$PATH
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
awk '/^```sh/ { on = 1; block = ""; next } /^```/ { if (on && block !~ /\.venv/) printf "%s", block; on = 0 } on && !/^#/ && NF { block = block $0 "\n" }' README.md > commands
while IFS= read -r command; do
    case $command in "make test"*) continue ;; mpirun*) command -v mpirun > /dev/null || { echo "skipped: $command: no mpirun"; continue; } ;; esac
    check "README: $command" sh -c "$command" < /dev/null
    [ -f sample ] || sed '1,/^weights/d; $d' "$root/build/cli.log" > sample
done < commands
check "the first command's sample"        sh -c "cat sample && '$root/build/words' 95 < sample"
cd "$root" || exit 1
rm -rf "$tree"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
