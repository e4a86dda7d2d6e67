#!/bin/sh
# The command line as a user types it, in copies of the tree: make with modes and precisions, the
# README's recipes for adding a mode, a tensor and a flag, dev/setup.sh, and every command of
# README.md and doc/*.md. Called by dev/test/run.sh.
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
# refused WORDS COMMAND...: the command fails, and its message says WORDS.
refused() {
    words=$1; shift
    ! "$@" 2> message && cat message && grep -q -- "$words" message
}

fresh_tree() {
    cd "$root" && rm -rf "$tree" && mkdir -p "$tree/build"
    { git ls-files -co --exclude-standard -z 2> /dev/null ||
        find . -path ./build -prune -o -path ./runs -prune -o -type f -print0; } |
        xargs -0 tar cf - | tar xf - -C "$tree"
    cd "$tree" || exit 1
}
quick="make -s CFLAGS=-O1"                   # the checks are about what is built, not its speed
short="--layers 2 --width 32 --heads 2 --seq 32 --batch 2 --steps 2"
short="$short --val-every 0 --val-tokens 64 --sample 0"

# ---- modes and precisions
fresh_tree
mode_is() {
    expected=$1; shift
    $quick train_gpt "$@" && ./train_gpt --show | head -n 1 | grep -q " under $expected "
}
# trainer [OPTIONS OF MAKE]: builds ./train_gpt
trainer() { $quick train_gpt "$@"; }
check "make PRE"                  mode_is PRE NORM_MODE=PRE
check "make SPAN"                 mode_is SPAN NORM_MODE=SPAN
check "and PRE again"             mode_is PRE NORM_MODE=PRE
check "FUSE is SPAN"              mode_is SPAN NORM_MODE=FUSE
check "fp64"                      trainer PREC=fp64
check "fp64 trains"               ./train_gpt $short --out r64
check "config.json says fp64"     grep -q fp64 r64/config.json
check "fp32"                      trainer
check "another precision resumes" refused PREC=fp64 ./train_gpt --out r64 --resume auto
check "bf16"                      trainer PREC=bf16
check "bf16 trains"               ./train_gpt $short --out r16
check "fp32 again"                trainer
check "from bf16 on in fp32"      sh -c "./train_gpt --out r16 --resume auto --steps 3 > message"
check "says so once"              [ "$(grep -c 'a run in bf16 are used in fp32' message)" = 1 ]
check "fp32 trains"               ./train_gpt $short --out r32
check "make POST"                 trainer NORM_MODE=POST
check "another mode resumes"      refused NORM_MODE=SPAN ./train_gpt --out r32 --resume auto
for way in "--from r32 --eval" "--from r32/step_00000002 --eval" "--init-from r32 --out r33" \
           "--init-from r32/step_00000002 --out r33" "--config r32/config.json --out r33"; do
    check "another mode: $way"    refused "-> make train_gpt NORM_MODE=SPAN" ./train_gpt $way
    check "leaves nothing behind" [ ! -e r33 ]
done
check "an unknown mode"           refused 'SPAN PRE POST HYBRID SDD' \
                                  make train_gpt NORM_MODE=NONSENSE
check "an unknown precision"      refused 'expected fp32, bf16 or fp64' make train_gpt PREC=fp12

# ---- paths with spaces, a full disk
mkdir 'my text'
yes 'to be or not to be' | head -n 400 > 'my text/a b.txt'
check "make shard"                make -s shard
check "shards with spaces"        ./shard --out 'my shards' 'my text'
check "make SPAN"                 trainer
check "a run with spaces"         ./train_gpt $short --data 'my shards' --out 'my run'
check "a full disk is refused"    refused '->' \
    sh -c "ulimit -f 200; trap '' XFSZ; ./train_gpt --steps 1 --sample 0 --out full"

# ---- adding things: one row each, all three at once
row='MODE(MINE, .attn = {.in = 1, .out = 1}, .ffn = {.in = 1, .post = 1}, '
row=$row'.q = 1, .k = 1, .fin = 1) \\'
sed -i "/^MODE(PRE, /i $row" llmc/modes.h
row='PARAM(head_b, "lm_head.bias", 1, Vp, ROLE_ZERO, 0, 1) \\'
sed -i "/^PARAM(wlm, /i $row" llmc/tensors.h
used='s.b = b->w.head_b, s.db = b->dw.head_b; return s; }'
sed -i "/^static Linear lm_head_linear/,/^}/s/return \(LINEAR.*\);/{ Linear s = \1; $used/" \
    train_gpt.c
row=$(sed -n 's/^ *\(FLAG(note, .*\)\\$/\1\\\\/p' doc/adding.md)
sed -i "/^FLAG(data, /i $row" llmc/run/flags.h
file=mine/step_00000002/model.safetensors
check "recipe: it builds"             trainer NORM_MODE=MINE
check "recipe: it trains"             ./train_gpt $short --out mine --note 'a trial'
check "recipe: a mode is one row"     grep -q '"norm_mode": "MINE"' mine/config.json
check "recipe: a flag is one row"     sh -c "./train_gpt --help | grep -q -- --note"
check "recipe: the flag is kept"      grep -q 'a trial' mine/config.json
check "recipe: a tensor is one row"   sh -c "./train_gpt --show | grep -q lm_head.bias"
check "recipe: the tensor is kept"    grep -q lm_head.bias $file
check "recipe: the tensor is used"    [ "$(grep -cF "$used" train_gpt.c)" = 2 ]
modes="./train_gpt --show modes | cut -c15- | sed 's/, .source.*//; s/, .init[^,]*//'"
check "--show modes has many rows"    sh -c "[ \$(./train_gpt --show modes | wc -l) -gt 20 ]"
check "--show modes tells rows apart" sh -c "test -z \"\$($modes | sort | uniq -d)\""
check "recipe: the tests build"       $quick -j2 build/test_gpt
check "recipe: gradients are tested"  \
    sh -c "VERBOSE=1 build/test_gpt finite > message && grep -q 'MINE llama' message"

# ---- dev/setup.sh: nothing to do, and a machine without a compiler
fresh_tree
mkdir bare
for tool in sh dirname id echo ls cat env; do ln -s "$(command -v $tool)" bare/; done
check "setup: all is there"           sh -c "sh dev/setup.sh | grep -x 'setup: everything is there'"
check "setup: no apt-get"             refused 'missing: gcc libc6-dev make' \
                                      env PATH="$tree/bare" sh dev/setup.sh
check "setup: an unknown option"      refused 'expected nothing or --all' sh dev/setup.sh --most
printf '#!/bin/sh\necho "apt-get $*" >> calls\n' > bare/apt-get
printf '#!/bin/sh\nexec "$@"\n' > bare/sudo
chmod +x bare/apt-get bare/sudo
check "setup: a bare machine"         env PATH="$tree/bare" sh dev/setup.sh
check "setup: installs three"         \
    grep -q 'apt-get install .* gcc libc6-dev make$' calls

# ---- every command of the sh blocks of README.md and of the pages under doc/, in order, in one
# tree. apt-get and the tests themselves stand aside. A block with .venv needs a network and Python:
# it is a step of dev/test/all.sh.
mkdir bin
printf '#!/bin/sh\nexit 0\n' > bin/apt-get
printf '#!/bin/sh\nexec "$@"\n' > bin/sudo
chmod +x bin/apt-get bin/sudo
PATH=$tree/bin:$PATH
export OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for page in README.md doc/*.md; do
    [ -f "$page" ] || continue
    awk '/^```sh/ { on = 1; block = ""; next }
         /^```/ { if (on && block !~ /\.venv/) printf "%s", block; on = 0 }
         on && !/^#/ && NF { block = block $0 "\n" }' "$page" |
        sed -e ':join' -e '/\\$/N; s/ *\\\n */ /; tjoin' > commands
    while IFS= read -r command; do
        case $command in
            "make test"* | *"setup.sh --all"*) continue ;;
            mpirun*) command -v mpirun > /dev/null ||
                         { echo "skipped: $command: no mpirun"; continue; } ;;
            python3*) python3 -c 'import torch, transformers, scipy, matplotlib' 2> /dev/null ||
                          { echo "skipped: $command: no PyTorch and its like"; continue; } ;;
        esac
        check "$page: $command" sh -c "$command" < /dev/null
        [ -f sample ] || sed '1,/^weights/d; $d' "$root/build/cli.log" > sample
    done < commands
done
check "links and doc/where_is.md"     sh dev/test/pages.sh
check "the first command's sample"    sh -c "cat sample && '$root/build/words' 95 < sample"
cd "$root" || exit 1
rm -rf "$tree"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
