#!/bin/sh
# The pages of the repository: every file that a link of a Markdown page names exists, and every
# word of doc/where_is.md stands in its file, in capitals or not. Called by dev/test/cli.sh.
set -u
cd "$(dirname "$0")/../.." || exit 1
passed=0 failed=0
fail() { failed=$((failed + 1)); echo "FAILED $1"; }
pass() { passed=$((passed + 1)); }

# ---- links, without their #heading
for page in *.md doc/*.md data/*.md dev/*.md dev/*/*.md dev/*/*/*.md; do
    [ -f "$page" ] || continue
    for link in $(grep -o ']([^) ]*)' "$page" | sed 's/^](//; s/)$//; s/#.*//' |
                  grep -v '^[a-z]*:' | sort -u); do
        if [ -e "$(dirname "$page")/$link" ]; then pass; else fail "$page: no file $link"; fi
    done
done

# ---- doc/where_is.md: | subject | file, file | `word`, `word` |
tab=$(printf '\t')
awk -F'|' '/^\|.*`/ {
    gsub(/`/, "", $4)
    files = split($3, file, ",")
    words = split($4, word, ",")
    for (i = 1; i <= files; i++) for (k = 1; k <= words; k++) print file[i] "\t" word[k]
}' doc/where_is.md | sed "s/^ *//; s/ *$//; s/ *$tab */$tab/" > build/where_is
while IFS=$tab read -r file word; do
    if grep -qiF -- "$word" "$file"; then pass; else fail "doc/where_is.md: no $word in $file"; fi
done < build/where_is
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
