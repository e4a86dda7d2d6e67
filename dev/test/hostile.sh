#!/bin/sh
# Hostile inputs and surroundings, with the real programs and a tiny model: damaged files of every
# kind, full disks, strange paths and flags, files that change underneath, two processes at once.
# A refusal says what was expected and what to do, is never a signal, and changes no file; an
# accepted input computes the same as without the damage. Called by make test, from the root of the
# repository.
set -u
root=$(pwd)
train=$root/build/cpu-span-fp32/train_gpt shard=$root/build/shard
dir=$root/build/test/hostile
passed=0 failed=0 mounted= background=
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

# for many files and many runs: on a disk they take minutes
memory=$(mktemp -d /dev/shm/norm-hostile.XXXXXX 2> /dev/null)
clean() {
    [ -z "$background" ] || kill "$background" 2> /dev/null
    [ -z "$mounted" ] || umount "$mounted"
    [ -z "$memory" ] || rm -rf "$memory"
}
trap clean EXIT
trap 'exit 1' INT TERM

# ---- one check each

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAILED $*"; tail -n 6 "$dir/message"; }

# Runs a command into message and sets status; 124 is no end within two minutes, and 128 and more
# a signal.
run() { timeout 120 "$@" < /dev/null > "$dir/message" 2>&1; status=$?; }

# refused NAME WORDS COMMAND...: ends with status 1, says WORDS, and what to do; unwritten: the same
# of a write that failed, with status 2.
ends() {
    expected_status=$1 name=$2 words=$3; shift 3
    run "$@"
    if [ $status = "$expected_status" ] && grep -q -e "$words" "$dir/message" &&
        grep -q '^  -> ' "$dir/message"; then
        pass
    else fail "$name: status $status, expected $expected_status and \"$words\", found:"; fi
}
refused() { ends 1 "$@"; }
unwritten() { ends 2 "$@"; }

works() {
    name=$1; shift
    run "$@"
    if [ $status = 0 ]; then pass; else fail "$name: status $status, found:"; fi
}

# harmless NAME COMMAND...: refused, or the losses and weights in $expected.
harmless() {
    name=$1; shift
    run "$@"
    if [ $status = 0 ] && [ "$(result)" = "$expected" ]; then pass
    elif [ $status = 1 ] && grep -q '^  -> ' "$dir/message"; then pass
    else fail "$name: status $status, expected a refusal or $expected, found:"; fi
}
# note_result: what harmless compares with from here on.
note_result() { expected=$(result); holds "there is a result to compare with" test -n "$expected"; }
result() {
    sed -n 's/^\(validation loss .*\)/\1/p; s/^\(weights [0-9a-f]*\) after.*/\1/p' "$dir/message"
}

holds() { name=$1; shift; if "$@"; then pass; else fail "$name: $*"; fi; }

# unchanged FOLDER, since remember FOLDER: every file's name, size and checksum.
sums() { (cd "$1" && find . -type f -exec cksum {} + | sort); }
remember() { sums "$1" > "$dir/sums"; }
unchanged() { sums "$1" | cmp -s - "$dir/sums"; }

# ---- ways to make and damage files

size() { wc -c < "$1" | tr -d ' '; }
copy() { rm -rf "$2" && cp -R "$1" "$2"; }
flip() {  # FILE BYTE BIT; a second time mends it
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "\\$(printf %03o $((byte ^ (1 << $3))))" | dd of="$1" bs=1 seek="$2" conv=notrunc \
        2> /dev/null
}
cut_to() { head -c "$2" "$1" > "$1.cut" && mv "$1.cut" "$1"; }
edit() { sed "$2" "$1" > "$1.new" && mv "$1.new" "$1"; }
word() {
    printf '\\%03o\\%03o\\%03o\\%03o' $(($1 & 255)) $(($1 >> 8 & 255)) $(($1 >> 16 & 255)) \
        $(($1 >> 24 & 255))
}
shard_file() {  # FILE MAGIC VERSION COUNT VOCABULARY TOKEN...: tokens of two bytes
    file=$1
    { printf "$(word "$2")$(word "$3")$(word "$4")$(word "$5")"; head -c 1008 /dev/zero; } > "$file"
    shift 5
    for token; do
        printf "\\$(printf %03o $((token & 255)))\\$(printf %03o $((token >> 8)))"
    done >> "$file"
}
# logs FOLDER N: waits until the log there has more than N lines.
lines() { if [ -e "$1/log.jsonl" ]; then wc -l < "$1/log.jsonl"; else echo 0; fi; }
logs() { for i in $(seq 200); do [ "$(lines "$1")" -gt "$2" ] && return; sleep 0.05; done; }

umount "$dir/small" 2> /dev/null; chmod -R u+w "$dir" 2> /dev/null
rm -rf "$dir"; mkdir -p "$dir"; cd "$dir" || exit 1
fast=${memory:-$dir}
printf '#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"\n' > as_nobody
printf '#!/bin/sh\nulimit -f 40; trap "" XFSZ; exec "$@"\n' > limited
printf '#!/bin/sh\nexec "$@" >&-\n' > no_stdout
printf '#!/bin/sh\nexec "$@" > /dev/full\n' > full_stdout
printf '#!/bin/sh\nulimit -n 16; exec "$@"\n' > few_files
chmod +x as_nobody limited no_stdout full_stdout few_files
model="--layers 1 --width 16 --heads 2 --ffn 16 --vocab 256 --seq 16 --batch 2 --warmup 1"
model="$model --sample 0 --val-tokens 32"
two="$model --steps 2"
yes 'To be, or not to be: that is the question.' | head -n 300 > text.txt
works "shards to work with" "$shard" --out data text.txt
works "a run to work with"  "$train" $two --data data --out run
works "and its end at step 4" "$train" $model --steps 4 --schedule-steps 2 --data data --out four
note_result
step=step_00000002
# all flags that may change and would change the weights
more="--resume auto --steps 4 --schedule-steps 2 --micro-batch 0"

# ---- shards

M=20240520
twenty="1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"
while IFS='|' read -r name words values; do
    shard_file bad.bin $values
    refused "shard: $name" "$words" "$train" $two --data bad.bin --out bad
done << END
wrong magic|found 1024 bytes with magic 123456|123456 1 20 256 $twenty
wrong version|expected version 1, .* found version 2|$M 2 20 256 $twenty
count too large|expected 1066 bytes for its 21 tokens .* found 1064|$M 1 21 256 $twenty
count too small|expected 1062 bytes for its 19 tokens .* found 1064|$M 1 19 256 $twenty
count of zero|at least one token, .* found version 1, 0 tokens,|$M 1 0 256
negative count|at least one token, .* found version 1, -5 tokens,|$M 1 4294967291 256 $twenty
largest count|expected 4294968318 bytes|$M 1 2147483647 256 $twenty
negative vocabulary|(unknown) or more, found .* vocabulary -1|$M 1 20 4294967295 $twenty
vocabulary above the model's|vocabulary of 300, the model one of 256|$M 1 20 300 $twenty
fewer tokens than a sample|expected at least seq + 1 = 17 tokens|$M 1 3 256 1 2 3
END
shard_file huge.bin $M 1 20 16777216 $twenty
refused "shard: a vocabulary too large for this machine's memory" "no memory: this takes" \
        "$train" --layers 1 --width 4096 --heads 2 --ffn 16 --seq 16 --batch 2 --steps 1 \
            --data huge.bin --out bad
shard_file small.bin $M 1 20 100 $twenty
works "shard: a vocabulary below the model's" "$train" $two --data small.bin --out small_vocabulary
holds "shard: and that is said" grep -q 'the rest goes unused' message
for bytes in 0 1 1023 1024 1063; do
    shard_file bad.bin $M 1 20 256 $twenty; cut_to bad.bin $bytes
    refused "shard: cut to $bytes bytes" "expected" "$train" $two --data bad.bin --out bad
done
shard_file good.bin $M 1 40 256 $twenty $twenty
run "$train" --from run --eval --val-data good.bin; keep=$expected; note_result
for bit in $(seq 0 127) $(seq 128 397 8191); do
    flip good.bin $((bit / 8)) $((bit % 8))
    harmless "shard: bit $bit of the header" "$train" --from run --eval --val-data good.bin
    flip good.bin $((bit / 8)) $((bit % 8))
done
expected=$keep
holds "no refused shard left a folder" test ! -e bad
shard_file bad.bin $M 1 24 0 1 2 256 $twenty 1
refused "shard: a token beyond the model's vocabulary" \
    "expected tokens below 256, found 256 at position 2" "$train" $two --data bad.bin --out beyond1
shard_file bad.bin $M 1 24 30 1 2 30 $twenty 1
refused "shard: a token beyond the shard's own" "expected tokens below 30, found 30 at position 2" \
    "$train" $two --data bad.bin --out beyond2
rm bad.bin

{ printf "$(word 20240801)$(word 7)$(word 1342177024)$(word 256)"; head -c 1008 /dev/zero; } \
    > big.bin
truncate -s 5368709120 big.bin
works "5 GiB of tokens" "$train" $two --data big.bin --out big
holds "5 GiB of tokens: hashed, and said" grep -q "hashing 5.4 GB of shards" message
truncate -s 5368709121 big.bin
refused "5 GiB and a byte" "expected 5368709120 bytes" "$train" $two --data big.bin --out bad
rm big.bin

if [ -n "$memory" ]; then
    shard_file one $M 1 4 256 1 2 3 4
    for i in 1 2 3 4 5 6 7 8 9 10; do
        cat one one one one one one one one one one > ten
        mv ten one
        [ "$(size one)" -ge 103200000 ] && break
    done
    mkdir "$memory/many" && split -b 1032 -a 5 -d --additional-suffix=.bin one \
        "$memory/many/train_" && rm one
    works "a hundred thousand shards, and sixteen file descriptors" ./few_files "$train" $two \
        --data "$memory/many" --val-data good.bin --out many
    rm -rf "$memory/many"
else echo "not run: a hundred thousand shards, they need /dev/shm"; fi

# ---- checkpoints: a bit or a cut anywhere is found

copy run "$fast/hurt"; copy data "$fast/data"; cd "$fast" || exit 1
for file in hurt/$step/*; do
    bytes=$(size "$file")
    for i in $(seq 0 39); do
        flip "$file" $((i * bytes / 40)) $((i % 8))
        refused "${file##*/}: bit $((i % 8)) of byte $((i * bytes / 40))" "damaged" \
            "$train" --from hurt --eval
        flip "$file" $((i * bytes / 40)) $((i % 8))
    done
    cp "$file" whole
    for to in 0 1 $((bytes / 2)) $((bytes - 2)); do                  # a last newline is no loss
        cut_to "$file" "$to"; remember hurt
        refused "${file##*/}: cut to $to bytes" "every checkpoint in hurt is damaged" \
            "$train" --out hurt $more
        holds "${file##*/}: nothing else changed" unchanged hurt
        cp whole "$file"
    done
    printf x >> "$file"
    refused "${file##*/}: a byte more" "damaged" "$train" --from hurt/$step --eval
    rm "$file"
    refused "${file##*/}: missing" "damaged\|holds no checkpoint" "$train" --from hurt/$step --eval
    cp whole "$file"
done
works "mended, it resumes" "$train" --out hurt $more --save-every 1
holds "with the same weights" test "$(result)" = "$expected"
flip hurt/step_00000004/model.safetensors 3000 0
rm -rf hurt/step_00000003
works "the newest damaged, the one before is taken" "$train" --out hurt $more
holds "and arrives at the same weights" test "$(result)" = "$expected"

# A tensor file alone has no checksum: what the reader can see is its header and its size.
cp "$dir/run/$step/model.safetensors" m.safetensors
run "$train" $model --steps 0 --init-from m.safetensors --data "$dir/data" --out scratch
keep=$expected
note_result
bytes=$(size m.safetensors)
for to in 0 7 8 9 300 $((bytes / 2)) $((bytes - 1)); do
    head -c "$to" m.safetensors > cut.safetensors
    refused "tensors: cut to $to bytes" "expected a whole safetensors file" "$train" $two \
        --init-from cut.safetensors --data "$dir/data" --out scratch2
done
for at in $(seq 0 17 $((7 + $(od -An -tu4 -N 4 m.safetensors)))); do
    flip m.safetensors "$at" $((at % 8)); rm -rf scratch
    harmless "tensors: bit $((at % 8)) of byte $at" "$train" $model --steps 0 \
        --init-from m.safetensors --data "$dir/data" --out scratch
    flip m.safetensors "$at" $((at % 8))
done
expected=$keep

# ---- the run's own files: config.json, log.jsonl

bytes=$(size "$dir/run/config.json")
for at in $(seq 0 11 $((bytes - 1))) $(seq $((bytes - 40)) $((bytes - 1))); do
    copy "$dir/run" hurt; flip hurt/config.json "$at" $((at % 8))
    refused "the run's config.json: bit $((at % 8)) of byte $at" "config.json" "$train" --out hurt \
        --resume auto --steps 4
done
for at in $(seq 5 211 $(size "$dir/run/log.jsonl")); do
    copy "$dir/run" hurt; flip hurt/log.jsonl "$at" $((at % 8))
    works "log.jsonl: bit $((at % 8)) of byte $at" "$train" --out hurt $more
    holds "log.jsonl: the same weights" test "$(result)" = "$expected"
done
# resumes_not NAME WORDS: the run hurt is refused, and stays as it is
resumes_not() {
    remember hurt
    refused "$1" "$2" "$train" --out hurt $more
    holds "$1: nothing changed" unchanged hurt
    copy "$dir/run" hurt
}
copy "$dir/run" hurt
edit hurt/config.json 's/"norm_c_version": [0-9]*/"norm_c_version": 1000/'
resumes_not "a config from the future" "version of the format up to 2, found 1000"
# without a checksum
older() {
    edit hurt/config.json 's/"norm_c_version": 2/"norm_c_version": 1/; /"xxh64"/d; s/^  },/  }/'
}
edit hurt/config.json 's/"schedule_steps": "0"/"schedule_steps": "9"/'
resumes_not "a value that may change, edited in config.json" 'edited or damaged'
older
edit hurt/config.json 's/"layers"/"layerz"/'
resumes_not "an unknown flag in config.json" 'unknown flag layerz'
older
edit hurt/config.json 's/"lr": "[^"]*"/"lr": "0.5"/'
resumes_not "another rate in config.json" 'expected "lr"'
older
edit hurt/config.json 's/"lr": "[^"]*"/"lr": 0.5/'
resumes_not "a number for a string" 'expected "lr" to be a string'
edit hurt/config.json "s/stories/$(printf 'caf\351')/"
resumes_not "Latin-1 in config.json" "valid UTF-8"
for to in 0 1 500; do
    cut_to hurt/config.json $to
    resumes_not "config.json cut to $to bytes" "is not valid JSON"
done
rm hurt/config.json
resumes_not "config.json missing" "without its config.json"
rm hurt/config.json
mkdir hurt/config.json
resumes_not "config.json a folder" "Is a directory"
rm hurt/config.json
mkfifo hurt/config.json
resumes_not "config.json a pipe" "cannot read hurt/config.json"
rm hurt/$step/manifest.json
mkfifo hurt/$step/manifest.json
resumes_not "a manifest that is a pipe" "damaged"
rm hurt/log.jsonl
mkdir hurt/log.jsonl
refused "log.jsonl a folder" "log.jsonl: Is a directory" "$train" --out hurt $more
rmdir hurt/log.jsonl
mkfifo hurt/log.jsonl
refused "log.jsonl a pipe" "log.jsonl" "$train" --out hurt $more
cd "$dir" || exit 1

# ---- links: nothing outside the run is touched

elsewhere() {
    rm -rf elsewhere
    mkdir elsewhere
    echo precious > elsewhere/a
    echo precious > elsewhere/model.safetensors
    remember elsewhere
}
outside() { holds "$1: nothing outside the run changed" unchanged elsewhere; }
elsewhere
copy run linked
ln -s "$dir/elsewhere" linked/.tmp-step
works ".tmp-step a link" "$train" --out linked $more
outside ".tmp-step a link"
holds ".tmp-step a link: the same weights" test "$(result)" = "$expected"
holds ".tmp-step a link: the link is gone" test ! -L linked/.tmp-step
elsewhere
copy run linked
mv linked/$step elsewhere/moved
ln -s "$dir/elsewhere/moved" linked/$step
remember elsewhere
works "a moved checkpoint behind a link is read" "$train" --from linked --eval
works "a moved checkpoint behind a link: resumed" "$train" --out linked $more --save-every 1 \
    --keep-last 1
outside "a moved checkpoint behind a link"
holds "a moved checkpoint behind a link: it counts, and only the link goes" \
    test "$(ls linked | grep -c step_)" = 1
for link in config.json log.jsonl; do
    elsewhere; copy run linked; ln -s "$dir/elsewhere/a" "linked/$link.tmp"
    works "$link.tmp a link" "$train" --out linked $more
    outside "$link.tmp a link"
done
elsewhere; rm -rf linked; mkdir linked; ln -s "$dir/elsewhere/log" linked/log.jsonl
refused "log.jsonl a link" "found a link" "$train" $two --data data \
    --out linked
outside "log.jsonl a link"
elsewhere
copy run linked
mv linked/log.jsonl elsewhere/log
ln -s "$dir/elsewhere/log" linked/log.jsonl
remember elsewhere
refused "log.jsonl a link to a log" "found a link" \
    "$train" --out linked $more
outside "log.jsonl a link to a log"

# ---- data is known by its content, wherever it lies

copy run moved; copy data moved_data
works "data that moved" "$train" --out moved $more --data ./moved_data
holds "data that moved: the same weights" test "$(result)" = "$expected"
copy run moved; mv data data_away
refused "data that is gone" "cannot be opened: No such file" "$train" --out moved $more
mv data_away data
for split in train val; do
    copy run moved; copy data other_data; flip other_data/${split}_000000.bin 1500 0
    remember moved
    if [ $split = train ]; then
        refused "a token of the data is another" \
            "the training data is not what this run was trained on" "$train" --out moved $more \
            --data other_data
        holds "a token of the data is another: nothing changed" unchanged moved
    else
        works "a token of the validation data is another" "$train" --out moved $more \
            --data other_data
        holds "a token of the validation data is another: said" \
            grep -q '^warning: the validation data is not' message
    fi
done
copy data changing
timeout 20 "$train" $model --steps 1000000 --norms-every 0 --val-every 0 --save-every 1000 \
    --data changing --out changing_run > message 2>&1 & background=$!
logs changing_run 10
flip changing/train_000000.bin 1500 0
wait $background
status=$?
background=
holds "data that changes while training: status 1, found $status" test $status = 1
holds "data that changes while training: said" \
    grep -q 'bin: expected the shard that this run began with, found other bytes' message

# ---- what a run finds changed at its next save

timeout 20 "$train" $model --steps 1000000 --norms-every 0 --val-every 0 --save-every 1000 \
    --data data --out away > message 2>&1 & background=$!
logs away 10; mv away away_now; wait $background; status=$?; background=
holds "the folder renamed: status 2, found $status" test $status = 2
holds "the folder renamed: said, with its name now" \
    grep -q "away is no longer this run's folder" message
holds "the folder renamed: how to go on" \
    grep -q -e "-> --out $dir/away_now --resume required" message
holds "the folder renamed: no other was made" test ! -e away
works "the folder renamed: it goes on" "$train" --out away_now --resume required --steps 1
timeout 20 "$train" $model --steps 1000000 --norms-every 0 --val-every 0 --save-every 1000 \
    --data data --out unlogged > message 2>&1 & background=$!
logs unlogged 10; rm unlogged/log.jsonl; wait $background; status=$?; background=
holds "the log removed: status 2, found $status" test $status = 2
holds "the log removed: said" grep -q 'log.jsonl was removed or replaced' message
works "the log removed: it goes on" "$train" --out unlogged --resume required --steps 1
timeout 20 "$train" $model --steps 1000000 --norms-every 0 --val-every 0 --save-every 1000 \
    --data data --out removed > message 2>&1 & background=$!
logs removed 10; mv removed removing; rm -r removing; wait $background; status=$?; background=
holds "the folder removed: status 2, found $status" test $status = 2
holds "the folder removed: said" grep -q 'removed was removed while the run trained: step' message
copy run renamed; copy renamed/$step renamed/step_00000009
works "a renamed checkpoint" "$train" --out renamed $more
holds "a renamed checkpoint is passed over" \
    grep -q 'warning: passing over .*its state.json is of step 2: the folder was renamed' message
holds "a renamed checkpoint: the same weights" test "$(result)" = "$expected"
printf '#!/bin/sh\nulimit -f 40; exec "$@"\n' > limited_loudly; chmod +x limited_loudly
unwritten "a limit on file sizes, with its signal" "File too large" ./limited_loudly \
    "$train" --layers 2 --steps 1 --sample 0 --out big_run
mkdir cwd
printf '#!/bin/sh\ncd cwd && rmdir ../cwd && exec "$@"\n' > nowhere_to_be
chmod +x nowhere_to_be
refused "a working directory that is gone" "cannot make the folder" ./nowhere_to_be "$train" $two
esc=$(printf '\033')
printf '{"norm_c_version": 1, "norm_mode": "SPAN\\u001b[2J", "precision": "fp32", "flags": {}}' \
    > escape.json
copy run escaped; cp escape.json escaped/config.json
run "$train" --out escaped $more
holds "an escape sequence in a file: shown" grep -q 'SPAN\\x1b\[2J' message
holds "an escape sequence in a file: none printed" test "$(grep -c "$esc" message)" = 0
truncate -s 200000000 huge.json; copy run huge; mv huge.json huge/config.json
refused "a config.json of 200 MB" "File too large" "$train" --out huge $more
rm -rf huge

# ---- full disks, and folders and files that may not be used

small=$dir/small; mkdir small; limit=
if [ "$(id -u)" = 0 ] && mount -t tmpfs -o size=400k none "$small" 2> /dev/null; then mounted=$small
else
    limit=./limited
    echo "note: no small disk could be mounted; a limit on file sizes stands in"
fi
works   "a run on a small disk" "$train" $two --data data --out small/run
unwritten "full while saving" "free space" $limit "$train" --out small/run --resume auto \
    --steps 99 --schedule-steps 2 --save-every 1 --norms-every 0 --val-every 0
[ -z "$mounted" ] || mount -o remount,size=20m "$small"
works   "the checkpoint before is whole" "$train" --from small/run --eval
rm -rf small/run
works   "another run" "$train" $two --data data --out small/run
[ -z "$mounted" ] || mount -o remount,size=400k "$small"
unwritten "full while writing the log" "cannot write small/run/log.jsonl" \
        $limit "$train" --out small/run --resume auto --steps 99999 --schedule-steps 2 \
            --save-every 0 --norms-every 1 --val-every 0
[ -z "$mounted" ] || mount -o remount,size=20m "$small"
works   "with space again it goes on" "$train" --out small/run $more
holds   "and arrives at the same weights" test "$(result)" = "$expected"
rm -rf small/run
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do cat text.txt; done > long.txt
[ -z "$mounted" ] || mount -o remount,size=400k "$small"
unwritten "full while ./shard writes" "free disk space" $limit "$shard" --out small/data long.txt
holds   "nothing is left of it" test -z "$(ls -A small/data)"
if [ -n "$mounted" ] &&
    mount -o remount,nr_inodes="$(df --output=iused small | tail -n 1 | tr -d ' ')" "$small" \
    2> /dev/null; then
    unwritten "no room for a folder" "cannot make the folder" "$train" $two --data data \
        --out small/none/run
fi

as=; [ "$(id -u)" != 0 ] || as=./as_nobody
mkdir sealed open
copy run sealed_run
cp text.txt secret.txt
cp good.bin secret.bin
chmod 555 sealed sealed_run
chmod 777 open
chmod 000 secret.txt secret.bin
if $as test -x "$train" && $as test -r data/train_000000.bin; then
    refused "--out in a read-only folder"         "cannot make the folder"          $as \
        "$train" $two --data data --out sealed/run
    refused "./shard --out in a read-only folder" "expected to make this folder"    $as \
        "$shard" --out sealed/data text.txt
    unwritten "./shard --out a read-only folder"   "expected to write"               $as \
        "$shard" --out sealed text.txt
    refused "a shard that may not be read"        "cannot be opened: Permission"    $as \
        "$train" $two --data secret.bin
    refused "a text that may not be read"         "cannot be opened: Permission"    $as \
        "$shard" --out open/data secret.txt
    unwritten "a run in a read-only folder"        "may be written to"               $as \
        "$train" --out sealed_run $more
else echo "not run: folders and files without permission (nobody cannot reach $dir)"; fi

# ---- what is not a file, and paths

mkfifo pipe pipe.safetensors
mkdir empty folder.safetensors texts
ln -s loop loop
ln -s . texts/again
cp text.txt texts/
T="$train $two"
refused "--data a pipe"                  "it is a pipe or device"          $T --data pipe
refused "--data a device"                "it is a pipe or device"          $T --data /dev/zero
refused "--data an empty folder"         "expected files named"            $T --data empty
refused "--data a text"                  "is not a shard"                  $T --data text.txt
refused "--data a loop of links"         "Too many levels"                 $T --data loop
refused "--data nothing"                 "cannot be opened: No such file"  $T --data nowhere
refused "--val-data a pipe"              "it is a pipe or device"          $T --data data \
    --val-data pipe
refused "--init-from a pipe"             "expected a regular file"         $T --data data \
    --init-from pipe.safetensors
refused "--init-from a folder"           "expected a regular file"         $T --data data \
    --init-from folder.safetensors
refused "--from a text"                  "expected the folder"             "$train" \
    --from text.txt --eval
refused "--from a pipe"                  "expected the folder"             "$train" --from pipe \
    --eval
refused "--out a text"                   "is a file"                       $T --data data \
    --out text.txt
refused "--out a loop of links"          "Too many levels"                 $T --data data --out loop
refused "--out below a text"             "Not a directory"                 $T --data data \
    --out text.txt/run
refused "--tokenizer a pipe"             "expected a tokenizer"            $T --data data \
    --tokenizer pipe
refused "--tokenizer a text"             "expected a tokenizer"            $T --data data \
    --tokenizer text.txt
refused "--tokenizer: what to do"        "data/get.py tokenizer"           $T --data data \
    --tokenizer text.txt
refused "./shard of a pipe"              "found a pipe or device"          "$shard" --out s pipe
refused "./shard of a device"            "found a pipe or device"          "$shard" \
    --out s /dev/zero
refused "./shard of nothing"             "expected a text file"            "$shard" --out s nowhere
refused "./shard of a loop of links"     "Too many levels"                 "$shard" --out s texts
refused "./shard --out a text"           "expected a folder"               "$shard" \
    --out text.txt text.txt
refused "./shard --out with shards"      "expected a folder without shards" \
    "$shard" --out data text.txt
refused "./shard of an empty name"       "expected a text file"            "$shard" --out s ''
refused "./shard --out an empty name"    "found no --out"                  "$shard" \
    --out '' text.txt
deep=$(printf '%01980d' 0 | sed 's/0/a\//g'); mkdir -p "deep/$deep"; cp text.txt "deep/$deep"
works   "./shard of two thousand folders in each other" "$shard" --out s_deep deep
long=$(printf '%0300d' 0)
refused "--data a long name"             "File name too long"              $T --data "$long"
refused "--out a long name"              "File name too long"              $T --data data \
    --out "$long"
refused "--out a long path"              "longer than"                     $T --data data \
    --out "$deep"
refused "./shard of a long path"         "File name too long"              "$shard" \
    --out s "$deep$deep$deep"
odd="a 'b' \"c\" \$d;e|f&g
h	i\\j é"
mkdir "$odd"
works   "./shard, a strange path"        "$shard" --out "$odd/data" text.txt
works   "a run, a strange path"          "$train" $two --data "$odd/data" --out "$odd/run"
works   "resumed, a strange path"        "$train" --out "$odd/run" $more
works   "read, a strange path"           "$train" --from "$odd/run" --eval
latin=$(printf 'caf\351')
cp -R data "$latin"; cp text.txt "$latin.txt"
refused "--data, a path not in UTF-8"    "data: expected UTF-8"            $T --data "$latin"
refused "--prompt not in UTF-8"          "prompt: expected UTF-8"          $T --data data \
    --prompt "$latin"
works   "--out, a path not in UTF-8"     "$train" $two --data data --out "$latin.run"
works   "resumed, a path not in UTF-8"   "$train" --out "$latin.run" $more
works   "./shard, a path not in UTF-8"   "$shard" --out "$latin.shards" "$latin.txt"
printf 'caf\351 au lait, a long enough text' > bad.txt
refused "./shard, Latin-1"       "invalid character at offset 3"  "$shard" --out s bad.txt
printf 'a long enough text, cut \303' > bad.txt
refused "./shard, half a character" "invalid character at offset 24" "$shard" --out s bad.txt
printf 'a\000b\000c\000' > bad.txt
refused "./shard, UTF-16"        "NUL byte at offset 1"           "$shard" --out s bad.txt
refused "./shard of two texts, one bad"  "NUL byte"                        "$shard" \
    --out s text.txt bad.txt
holds   "./shard left nothing"           test -z "$(ls -A s)"

# ---- flags

while IFS='|' read -r words flags; do
    refused "flags: $flags" "$words" "$train" --data data $flags
done << END
expected a whole number from 1 to 4096|--layers nan
expected a whole number from 1 to 4096|--layers inf
expected a whole number from 1 to 4096|--layers 1e999
expected a whole number from 1 to 4096|--layers 0x
expected a whole number from 1 to 4096|--layers=
expected a whole number from 1 to 4096|--layers 4x
expected a whole number from 1 to 4096|--layers -1
expected a whole number from 1 to 4096|--layers 0
expected a whole number from 1 to 4096|--layers 99999999999999999999
expected a whole number|--layers 1.5
--seed=1e16: expected a whole number from 0 to 1e+15|--seed 1e16
expected a whole number from 1 to 4194304|--seq 9223372036854775808
expected a number|--lr nan
expected a number|--lr 1e-999
expected a number from 0 to 10|--lr -1
--beta1=1: expected a number from 0 to 0.999999|--beta1 1
--tied=maybe: expected off.on|--tied maybe
no model named|--model nonsense
unknown flag learning-rate|--learning-rate 1
expected a flag|lr=1
unknown flag|--
expected a flag, found "-h"|-h
is given twice|--lr 1 --lr 1
is given twice|--lr=1 --lr 2
needs a value|--lr
needs a value|--lr --steps 3
--heads 3 does not go with --width 128|--heads 3
less than 2^31 tokens, each counted once per expert|--batch 16777216 --seq 4194304
expected at least seq + 1|--seq 4194304 --micro-batch 1
--show=nonsense: expected off.model.models.modes.config|--show nonsense
no memory|--layers 4096 --width 1048576 --heads 4096 --ffn 4194304 --seq 16 --batch 1
END
refused "flags: more than can be counted" "less than 2^59 elements" \
        "$train" --show --layers 4096 --width 1048576 --heads 4096 --ffn 4194304 --seq 4194304 \
            --batch 511
refused "flags: an empty word"           "expected a flag"                   "$train" ''
refused "flags: an empty model"          "no model named"                  "$train" --model ''
works   "flags: a hexadecimal number"    "$train" $model --steps 0x2 --data data --out hex
holds   "flags: is that number"          grep -q '"steps": "2"' hex/config.json
refused "./shard: twice --out"           "is given twice"                  "$shard" --out s \
    --out=s2 text.txt
refused "./shard: part above one"        "expected a number from 0"        "$shard" --out s \
    --val-fraction 1 text.txt
refused "./shard: no part"               "expected a number from 0"        "$shard" --out s \
    --val-fraction nan text.txt
refused "./shard: no tokens"             "expected a whole number"         "$shard" --out s \
    --shard-tokens 0 text.txt
refused "./shard: too many tokens"       "expected a whole number"         "$shard" --out s \
    --shard-tokens 99999999999999999999 text.txt
refused "./shard: unknown"               "unknown option"                  "$shard" --out s \
    --nonsense text.txt

# ---- others at work

endless="$model --steps 1000000 --norms-every 0 --val-every 0"
copy data changing
timeout 10 "$train" $endless --data changing --out changed > message 2>&1 & background=$!
logs changed 10; truncate -s 1100 changing/train_000000.bin; wait $background
holds   "a shard cut while it is read: status 1"   test $? = 1
holds   "a shard cut while it is read: said" \
    grep -q 'the file has changed since the start' message
holds   "a shard cut while it is read: what to do" grep -q '^  -> ' message

copy run both; before=$(lines both)
"$train" --out both --resume auto --steps 1000000 --schedule-steps 2 --save-every 0 --val-every 0 \
    --norms-every 0 > first 2>&1 & background=$!
logs both $((before + 10))
refused "a second process on the same run" "in use" "$train" --out both $more
before=$(lines both); logs both "$before"
holds   "the first one's log goes on" test "$(lines both)" -gt "$before"
kill -9 $background; wait 2> /dev/null; background=
works   "after a kill it resumes" "$train" --out both $more
holds   "and arrives at the same weights" test "$(result)" = "$expected"

works   "without an environment"         env -i "$train" $two --data data --out env
works   "with stdout closed"             ./no_stdout "$train" $two --data data --out closed \
    --norms-every 1
holds   "and only JSON in the log"       test "$(grep -vc '^{.*}$' closed/log.jsonl)" = 0
works   "the run is whole"               "$train" --from closed --eval
unwritten "stdout on a full disk"          "cannot write all of the output"  ./full_stdout \
    "$train" --from run --sample 20
unwritten "./shard, stdout on a full disk" "cannot write all of the output"  ./full_stdout \
    "$shard" --out full text.txt
works   "the shards are whole"           "$train" $two --data full --out full_run

# ---- tasks: change nothing, are done once, and are read with care

weights() { sed -n 's/.*"weights": "\([0-9a-f]*\)".*/\1/p' "$1/log.jsonl" | tail -n 1; }
shard_file task.bin 20240522 1 1 28  65535 28 0 1 2 2 72 73  1 74  3 75 76 77
works   "with tasks"                     "$train" $two --data data --tasks data,task.bin --out tasks
holds   "which change no weight"         test "$(weights tasks)" = "$(weights run)"
holds   "and are logged" \
    grep -q '"task_results": {.*"token_perplexity": .*"task": {"examples": 1, "acc": ' \
    tasks/log.jsonl
edit tasks/log.jsonl '$d'
for i in 1 2; do works "resumed where they lack, $i" "$train" --out tasks --resume required; done
holds   "they are done, and not twice"   test "$(grep -c task_results tasks/log.jsonl)" = 1
works   "evaluated"                      "$train" --from tasks --eval
holds   "and shown"                      grep -q '^task  *1  acc ' message
works   "sampled from, no task is read"  "$train" --from tasks --sample 2 --tasks nowhere
refused "--tasks, a text"                "is not a shard"        "$train" --from run \
    --eval --tasks text.txt
refused "--tasks, nothing"               "cannot read nowhere"        "$train" --from run \
    --eval --tasks data,nowhere
refused "--tasks, a folder of none"      "found none"                 "$train" --from run \
    --eval --tasks run
works   "a text in several shards"       "$shard" --out several --shard-tokens 999 "$root/README.md"
refused "--tasks, a later shard of a text" "begins with token 0"     "$train" --from run \
    --eval --tasks several/train_000001.bin
refused "--tasks twice"                  "is named task too"          "$train" --from run \
    --eval --tasks task.bin,task.bin
refused "a completion longer than --seq" "at most --seq 2 tokens"        "$train" --from run \
    --eval --tasks task.bin --seq 2
works   "a context longer than --seq"    "$train" --from run --eval --tasks task.bin --seq 3
holds   "is cut, and that is said" \
    grep -q '1 of the 2 sequences of task are longer than --seq 3' message
for i in $(seq 0 13); do
    shard_file bad.bin 20240522 1 1 28  65535 28 0 1 2 2 72 73  1 74  3 75 76 77
    flip bad.bin $((1024 + 2 * i + 1)) 0
    refused "word $i of an example is another" "bad.bin" "$train" --from run --eval --tasks bad.bin
    cut_to bad.bin $((1024 + 2 * i))
    refused "an example of $i words"           "bad.bin" "$train" --from run --eval --tasks bad.bin
done

chmod 755 sealed sealed_run; rm -rf deep
cd "$root" || exit 1
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
