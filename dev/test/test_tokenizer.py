#!/usr/bin/env python3
"""test_tokenizer.py: llmc/run/tokenizer.c equals tiktoken, token for token, over megabytes of code,
every script, and random text.

    make build/tokenize && python3 dev/test/test_tokenizer.py [VOCAB_DIR]

VOCAB_DIR holds GPT-2's vocab.bpe and encoder.json. Without it a vocabulary of 2000 merges is
learned from the text. The text is made from the source files of Python's standard library and from
unicodedata, the same each time for one version of Python. Needs tiktoken and numpy.
"""
import collections, glob, json, os, pathlib, random, re, subprocess, sys, sysconfig, time
import unicodedata
import numpy as np, tiktoken, tiktoken.load

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FOLDER = "build/test/tokenizer_py"
SPACES = [
    *" \t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2000\u2007\u200a\u200b"
     "\u2028\u2029\u202f\u205f\u2060\u3000\ufeff",
    "\r\n", "  ", "   "]
EMOJI = "👩\u200d💻 👍🏽 🇪🇺 1\ufe0f\u20e3 ❤\ufe0f 👨\u200d👩\u200d👧 \u200d 😀".split(" ")
WORDS = ("don't we'll I've they're she'd I'm it's IT'S 's 'S ' '' 'l 'v 'tis x The naïve Straße "
         "мир κόσμος 日本語 中文 한국어 हिन्दी العربية עברית ไทย 12 2023 ٣٤ ½ Ⅷ ² . , ... _ <|endoftext|> "
         "e\u0301 \u0301").split(" ")


def source_text(most):
    """Python's own sources and the UTF-8 texts of its tests, a piece of each."""
    root, parts, size = sysconfig.get_paths()["stdlib"], [], 0
    names = sorted(glob.glob(root + "/**/*utf*8*.txt",
                             recursive=True)) + sorted(glob.glob(root + "/**/*.py", recursive=True))
    for name in names:
        if size < most and "site-packages" not in name:
            parts.append(pathlib.Path(name).read_bytes().decode("utf-8", "ignore")[:100000]
                         .replace("\0", ""))
            size += len(parts[-1])
    return "".join(parts)


def unicode_text(rng):
    every = [c for c in map(chr, range(1, 0x110000)) if not "\ud800" <= c <= "\udfff"]
    assigned = [c for c in every if unicodedata.category(c) not in ("Cn", "Co")]
    classes = collections.defaultdict(list)
    for c in assigned:
        classes[unicodedata.category(c)].append(c)
    kinds, parts = sorted(classes), ["".join(every[:0x30000])]
    parts += [glue.join(rng.sample(assigned, len(assigned) // share))
              for glue, share in (("", 1), (" ", 4), ("'", 4), ("\n ", 4))]
    parts += [rng.choice(["", "", " ", "  "])
              + "".join(rng.choices(classes[rng.choice(kinds)], k=rng.randint(1, 6)))
              for _ in range(60000)]
    parts += [rng.choice(rng.choice([SPACES, SPACES, EMOJI, WORDS, WORDS])) for _ in range(100000)]
    repeated = [*"a 'Z0._\n\t", "\xa0", "\u3000", "é", "中", "\U0001f600", "ab", " a", "'s", "\r\n",
                "the "]
    parts += [c * n + rng.choice("x \n") for c in repeated
              for n in (1, 2, 3, 7, 15, 16, 17, 31, 64, 85, 128, 255, 256, 257, 1000, 4099)]
    parts += ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=n)) + " "
              for n in (300, 5000, 70000)]
    return "".join(parts)


def short_texts(rng, count):
    pools = ["'sdmtlvreSDx ", " \n\t\r\xa0\u3000ab1.", "aeiou the", "é中\u0301\U0001f600\u200d ٣ab'",
             "".join(map(chr, range(1, 0x300)))]
    mixed = lambda pool: "".join(rng.choice(rng.choice([SPACES, WORDS, EMOJI, pool]))
                                 for _ in range(rng.randint(0, 6)))
    return ["".join(rng.choices(pool, k=rng.randint(0, 12))) if i % 3 else mixed(pool)
            for i, pool in enumerate(rng.choices(pools, k=count))]


def learn_vocabulary(text, merges, folder):
    """Byte-pair encoding learned from the commonest pieces, in the form of GPT-2's two files."""
    pieces = collections.Counter(re.findall(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| "
                                            r"?[^\s\w]+|\s+(?!\S)|\s+", text))
    common = sorted(pieces.items(), key=lambda item: (-item[1], item[0]))[:15000]
    words, counts = [[bytes([b]) for b in piece.encode()]
                     for piece, _ in common], [count for _, count in common]
    pairs, places = collections.Counter(), collections.defaultdict(set)
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += counts[i]
            places[pair].add(i)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [b for b in range(256) if b not in printable]
    letter = {b: chr(b) if b in printable else chr(256 + order.index(b) - len(printable))
              for b in range(256)}
    known, lines = {bytes([b]): i for i, b in enumerate(order)}, ["#version: 0.2"]
    while len(lines) <= merges:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        joined = best[0] + best[1]
        if joined not in known:
            known[joined] = len(known)
            lines.append(" ".join("".join(letter[b] for b in part) for part in best))
        for i in places.pop(best):
            word, merged = words[i], []
            pairs.subtract({pair: counts[i] * n
                            for pair, n in collections.Counter(zip(word, word[1:])).items()})
            for part in word:
                merged[-1:] = [joined] if merged and (merged[-1],
                                                      part) == best else [*merged[-1:], part]
            words[i] = merged
            for pair in zip(merged, merged[1:]):
                pairs[pair] += counts[i]
                places[pair].add(i)
        del pairs[best]
    ids = {"".join(letter[b] for b in token): i
           for token, i in known.items()} | {"<|endoftext|>": len(known)}
    pathlib.Path(folder, "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pathlib.Path(folder, "encoder.json").write_text(json.dumps(ids), encoding="utf-8")
    return folder


def main():
    rng, failed = random.Random(20240328), 0
    os.makedirs(FOLDER, exist_ok=True)
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # its cache goes by the file's name alone
    text, short = source_text(8_000_000) + unicode_text(rng), short_texts(rng, 200_000)
    vocabulary = sys.argv[1] if len(sys.argv) > 1 else learn_vocabulary(text, 2000, FOLDER)
    subprocess.run([sys.executable, "data/get.py", "tokenizer", "--vocab", vocabulary, "--out",
                    FOLDER + "/tokenizer.bin"], check=True)
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(vocabulary + "/vocab.bpe",
                                                          vocabulary + "/encoder.json")
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": len(ranks)})
    for name, texts in (("one long text", [text]), (f"{len(short)} short texts", short)):
        start = time.perf_counter()
        theirs = [encoding.encode_ordinary(t) for t in texts]
        theirs_s = time.perf_counter() - start
        run = subprocess.run(["build/tokenize", FOLDER + "/tokenizer.bin"],
                             input="\0".join(texts).encode(), capture_output=True)
        ours = np.frombuffer(run.stdout, np.int32)
        expected = np.concatenate([np.array(tokens + [-1], np.int32) for tokens in theirs])[:-1]
        if not np.array_equal(ours, expected):
            n, failed = min(len(ours), len(expected)), failed + 1
            at = next(iter(np.flatnonzero(ours[:n] != expected[:n])), n)
            near = [[b"" if t < 0 else encoding.decode_single_token_bytes(t)
                     for t in tokens[max(0, at - 5):at + 5].tolist()]
                    for tokens in (expected, ours)]
            print(f"FAILED {name}: token {at} of {len(expected)}: expected {near[0]}, found "
                  f"{near[1]} {run.stderr.decode()}")
            continue
        size, ours_s = sum(len(t.encode())
                           for t in texts), float(re.search(r"([\d.]+) s,", run.stderr.decode())[1])
        print(f"{name}: {size} bytes, {len(expected)} equal tokens; tiktoken "
              f"{size / theirs_s / 1e6:.1f} MB/s, build/tokenize {size / ours_s / 1e6:.1f} MB/s: "
              f"{theirs_s / ours_s:.1f} times as fast")
    print(f"{2 - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
