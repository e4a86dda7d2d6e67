#!/usr/bin/env python3
"""tokenizer.py: a Hugging Face tokenizer as tokenizer.bin (data/README.md draws the format).

    python3 data/tokenizer.py FOLDER|tokenizer.json [--out FILE] [--separator NAME]

FOLDER holds tokenizer.json, or vocab.json and merges.txt, or vocab.bpe and encoder.json. The file
decodes tokens of any kind of tokenizer. The trainer also encodes prompts with it if it is byte-pair
encoding (BPE): of bytes, as GPT-2, Llama 3, Qwen, OLMo 2 and SmolLM2 cut text, or of characters, as
Llama 2 and Mistral. Otherwise this program says what the trainer cannot do. --separator names the
token that begins every text; without it this is the one that the tokenizer itself puts there, else
<|endoftext|>, else the tokenizer's end of text. Needs tokenizers.
"""
import argparse
import functools
import json
import os
import re
import struct
import sys
import unicodedata
import zlib

try:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
except ImportError as missing:
    if __name__ == "__main__":
        sys.exit(f"error: expected tokenizers, found: {missing}\n"
                 "  -> python3 -m pip install tokenizers")
    raise

MAGIC, HEADER_BYTES = 20240328, 1024                                  # llmc/run/tokenizer.h
CUT_GPT2, CUT_LLAMA3, CUT_NOT = range(3)
PREFIX_NONE, PREFIX_FIRST, PREFIX_EACH = range(3)
MOST_TOKENS, LONGEST, MOST_ATTACHED = 1 << 20, 255, 1 << 26
HOLE = "\ufffd".encode()  # what an id without a token, or a token without text, decodes to
SPACE = "\u2581"  # SentencePiece's sign of a space
END = "<|endoftext|>"
# The tokenizer's own files, which are attached: dev/export_hf.py gives them back.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "generation_config.json", "chat_template.jinja")
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
DIGITS = {r"\p{N}": 1, r"\p{N}{1,3}": 3, r"\p{N}+": 0}


class Refusal(Exception):
    """A message for the user: what was expected, what was found, and "  -> what to do"."""


class Cannot(Exception):
    """What the C encoder does not do."""


# ---- how text is cut

def pattern_cut(pattern):
    """CUT_* and the most digits of a piece. Patterns that match the same are written differently:
    with possessive quantifiers, and contractions after one apostrophe."""
    plain = re.sub(r"([?+*])\+", r"\1", pattern).replace(r"\s*[\r\n]|", r"\s*[\r\n]+|")
    for head, same in ((r"'(?i:[sdmt]|ll|ve|re)", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
                       (r"'(?:[sdmt]|ll|ve|re)", CONTRACTIONS)):
        plain = same + plain[len(head):] if plain.startswith(head) else plain
    if plain == GPT2:
        return CUT_GPT2, 0
    for digits, most in DIGITS.items():
        if plain == LLAMA3.replace("DIGITS", digits):
            return CUT_LLAMA3, most
    raise Cannot(f"the pattern {pattern}")


def flat(part, members):
    """The parts of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if not part:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [each for inner in part[members] for each in flat(inner, members)]


def split_cut(part):
    pattern = part["pattern"].get("Regex")
    if part.get("invert") or part.get("behavior") != "Isolated" or pattern is None:
        raise Cannot(f"Split of {part['pattern']}, {part.get('behavior')}")
    return pattern


def metaspace_prefix(part):
    if part.get("split", True) or part.get("replacement") != SPACE:
        raise Cannot("Metaspace that splits")
    scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True)
                      else "never")
    if scheme == "always":
        raise Cannot('Metaspace with "prepend_scheme": "always"')
    return PREFIX_FIRST if scheme == "first" else PREFIX_NONE


def byte_cut(parts):
    """CUT_* and digits of byte-level BPE: parts that cut, and ByteLevel, which cuts too if it is
    told so."""
    *before, level = parts
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space", True):
        raise Cannot(f"the pre-tokenizer {level.get('type')}"
                     f"{' with a prefix' if level.get('add_prefix_space') else ''}")
    cut, most = (CUT_GPT2, 0) if level.get("use_regex", True) else (CUT_NOT, 0)
    for part in before:
        if part["type"] == "Digits":
            most = 1 if part.get("individual_digits") else None
        elif split_cut(part) in DIGITS:
            most = DIGITS[split_cut(part)] or None
        elif cut == CUT_NOT and len(before) == 1:
            return pattern_cut(split_cut(part))
        else:
            most = None
    if most is None or len(before) > 1 or (before and cut != CUT_GPT2):
        raise Cannot(f"the pre-tokenizers {', '.join(part['type'] for part in parts)}")
    return cut, most


def way_of(config):
    """(CUT_*, digits, PREFIX_*, whether NFC, whether a space is SPACE) of a tokenizer.json."""
    prefix, nfc, spaces = PREFIX_NONE, False, False
    for part in flat(config.get("normalizer"), "normalizers"):
        if part["type"] == "NFC":
            nfc = True
        elif part["type"] == "Prepend" and part["prepend"] == SPACE:
            prefix = PREFIX_EACH
        elif (part["type"] == "Replace" and part["pattern"] == {"String": " "}
              and part["content"] == SPACE):
            spaces = True
        else:
            raise Cannot(f"the normalizer {part['type']}")
    parts = flat(config.get("pre_tokenizer"), "pretokenizers")
    if prefix and not spaces:
        raise Cannot("the normalizer Prepend without Replace")
    if len(parts) == 1 and parts[0]["type"] == "Metaspace" and not spaces:
        return CUT_NOT, 0, metaspace_prefix(parts[0]), nfc, True
    if not parts and spaces:
        return CUT_NOT, 0, prefix, nfc, True
    if spaces or not parts:
        raise Cannot("another normalizer than its pre-tokenizer needs")
    return *byte_cut(parts), PREFIX_NONE, nfc, False


# ---- classes of characters

def runs(points):
    """First and last of each run of consecutive numbers."""
    ranges = []
    for point in sorted(points):
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return ranges


@functools.cache
def matched(pattern):
    """The code points that a class of a regular expression matches, asked of tokenizers' tables.
    Planes 4 to 13 have no characters, 15 and 16 private ones."""
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]))
    if pattern == "Digits":  # the pre-tokenizer has tables of its own
        split = pre_tokenizers.Digits(individual_digits=False)
        pieces = [piece for piece, _ in split.pre_tokenize_str(every)]
        numbers = [piece for piece in pieces if len(split.pre_tokenize_str(f"a{piece[0]}")) > 1]
        return frozenset(map(ord, "".join(numbers)))
    split = pre_tokenizers.Split(Regex(pattern + "+"), "removed")
    left = {c for piece, _ in split.pre_tokenize_str(every) for c in piece}
    return frozenset(map(ord, set(every) - left))


@functools.cache
def changed_by_nfc():
    """Characters that NFC may replace: on their own, or as the second of a pair; and those that it
    may sort: with a combining class. As Python's unicodedata has them."""
    every = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    replaced = {ord(c) for c in every if not unicodedata.is_normalized("NFC", c)}
    for c in every:
        parts = unicodedata.normalize("NFD", c)
        if len(parts) > 1 and unicodedata.is_normalized("NFC", c):
            replaced.add(ord(parts[-1]))
    return replaced, {ord(c) for c in every if unicodedata.combining(c)} - replaced


def classes_of(config, way):
    """The ranges of the five classes."""
    cut, nfc = way[0], way[3]
    if cut == CUT_NOT:
        letters = numbers = frozenset()
        spaces = frozenset([32])
    else:
        parts = flat(config.get("pre_tokenizer"), "pretokenizers")
        is_digits = any(part["type"] == "Digits" for part in parts)
        numbers = matched("Digits" if is_digits else r"\p{N}")
        letters, spaces = matched(r"\p{L}") - numbers, matched(r"\s") - numbers
    replaced, sorted_ = changed_by_nfc() if nfc else (set(), set())
    # A text with SentencePiece's sign of a space is the same as one with a space.
    replaced |= {ord(SPACE)} if way[4] else set()
    return [runs(points - replaced) for points in (letters, numbers, spaces)] + [
        runs(replaced), runs(sorted_ - letters - numbers - spaces)]


# ---- tokens

@functools.cache
def byte_of():
    """GPT-2's characters for bytes (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def is_byte_level(config):
    parts = flat(config.get("pre_tokenizer"), "pretokenizers")
    return any(part.get("type") == "ByteLevel"
               for part in [*parts, *flat(config.get("decoder"), "decoders")])


def decoder_of(config):
    """A function from a token of the vocabulary to its bytes."""
    if is_byte_level(config):
        table = byte_of()
        return lambda token: (bytes(table[c] for c in token) if all(c in table for c in token)
                              else token.encode())
    mark = (config["model"].get("continuing_subword_prefix")
            if config["model"].get("type") == "WordPiece" else None)
    if mark:
        return lambda token: (token.removeprefix(mark) if token.startswith(mark)
                              else " " + token).encode()

    def spaces(token):
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()

    return spaces


def vocabulary(config):
    """The vocabulary {token: id}, without the tokens that are added by name."""
    vocab = config["model"]["vocab"]
    vocab = vocab if isinstance(vocab, dict) else {row[0]: i for i, row in enumerate(vocab)}
    added = {token["id"] for token in config.get("added_tokens") or []}
    if any(type(i) is not int for i in (*vocab.values(), *added)):
        raise TypeError("an id that is no integer")
    return {token: i for token, i in vocab.items() if i not in added}


def token_bytes(config):
    """All tokens in id order as bytes; None: an id without a token."""
    decode = decoder_of(config)
    tokens = {i: decode(token) for token, i in vocabulary(config).items()}
    tokens |= {t["id"]: t["content"].encode() for t in config.get("added_tokens") or []}
    if not tokens or not 0 <= min(tokens) <= max(tokens) < MOST_TOKENS:
        raise Refusal(f"expected ids from 0 to {MOST_TOKENS - 1}, found "
                      f"{f'{min(tokens)} to {max(tokens)}' if tokens else 'none'}\n"
                      "  -> a whole copy of tokenizer.json")
    long = [i for i, token in tokens.items() if len(token) > LONGEST]
    if long:
        raise Refusal(f"expected tokens of at most {LONGEST} bytes, found {len(long)} longer "
                      f"ones, as {long[0]}\n  -> another tokenizer")
    return [tokens.get(i) for i in range(max(tokens) + 1)]


# ---- merges

def pair(merge):
    first, second = merge if isinstance(merge, list) else merge.split(" ")
    return first, second


def ranked(merges, vocab, units):
    """The tokens that merging makes, in the order in which it does: units, then the results."""
    order = dict.fromkeys(sorted(units & vocab.keys(), key=vocab.get))
    last = None
    for first, second in merges:
        token = first + second
        if token not in vocab or (token in order and token != last):
            raise Cannot(f"merges to {token!r} in several places")
        order[token] = None
        last = token
    return list(order)


def mergeable(config, units):
    """The ids of the tokens that merging makes of units (characters of the vocabulary), in the
    order of ranks. C merges the pair whose token has the lowest rank; each such pair must be a
    merge of the tokenizer. Pieces that are tokens as a whole then agree, and so do pieces of
    several tokens: within the bounds of a token its merges depend on nothing outside of it."""
    model, vocab = config["model"], vocabulary(config)
    merges, whole = dict.fromkeys(map(pair, model["merges"])), model.get("ignore_merges")
    if len(merges) < len(model["merges"]):
        raise Cannot("merges that stand twice")
    order = ranked(merges, vocab, units)
    if whole and len(order) < len(vocab):
        raise Cannot(f"tokens without merges, as {min(vocab.keys() - set(order))!r}")
    rank = {token: i for i, token in enumerate(order)}
    for token in order:
        parts = list(token)
        while len(parts) > 1:
            ranks = [rank.get(a + b, MOST_TOKENS) for a, b in zip(parts, parts[1:])]
            at = ranks.index(min(ranks))
            if ranks[at] == MOST_TOKENS:
                break
            if (parts[at], parts[at + 1]) not in merges:
                raise Cannot(f"the tokens {parts[at]!r} and {parts[at + 1]!r} together are one, "
                             "but do not merge")
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if parts != [token] and not whole:
            del rank[token]  # no merges lead there
    return [vocab[token] for token in order if token in rank]


def bpe_tokens(config, spaces):
    """(the token <0x00> or 0, the tokens that merging makes), or Cannot. spaces: SentencePiece."""
    model, vocab = config["model"], vocabulary(config)
    for member in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(member):
            raise Cannot(f"BPE with {member}")
    if not spaces:
        return 0, mergeable(config, set(byte_of()))
    ids = [vocab.get(f"<0x{byte:02X}>") for byte in range(256)]
    if not model.get("byte_fallback") or not ids[0] or ids != [*range(ids[0], ids[0] + 256)]:
        raise Cannot("a vocabulary without the tokens <0x00> to <0xFF> in order")
    return ids[0], mergeable(config, {c for c in vocab if len(c) == 1})


def names_of(config, spaces):
    """Ids of the special tokens that a text contains by name."""
    try:
        loaded = Tokenizer.from_str(json.dumps(config))
    except Exception as error:  # tokenizers raises nothing narrower
        raise Cannot(f"a reader of what tokenizers refuses: {error}") from None
    named = set()
    for token in config.get("added_tokens") or []:
        if loaded.token_to_id(token["content"]) != token["id"]:
            raise Cannot(f"{token['content']}, which has several ids")
        if token.get("single_word") or token.get("lstrip") or token.get("rstrip"):
            raise Cannot(f"{token['content']}, which takes spaces beside it or stands alone")
        # SentencePiece's normalizer turns such a name into something else.
        odd = token.get("normalized") and spaces and config.get("normalizer")
        if token["content"] and not odd:
            named.add(token["id"])
    return sorted(named)


# ---- the token that begins a text

def contents(value):
    return value.get("content") if isinstance(value, dict) else value


def separator_of(config, files):
    """The name of the token that begins every text."""
    names = [token["content"] for token in config.get("added_tokens") or []]
    theirs = (json.loads(files.get("special_tokens_map.json", "{}"))
              | json.loads(files.get("tokenizer_config.json", "{}")))
    for part in flat(config.get("post_processor"), "processors"):
        first = (part.get("single") or [{}])[0].get("SpecialToken", {}).get("id")
        if part.get("type") == "TemplateProcessing" and first in names:
            return first
    begin, end = (contents(theirs.get(name)) for name in ("bos_token", "eos_token"))
    places = [begin if theirs.get("add_bos_token") else None, END, end, begin, "<s>", "</s>",
              "<|end_of_text|>", "<|im_end|>"]
    for name in places:
        if name in names:
            return name
    raise Refusal("expected a token that begins or ends texts, found "
                  f"{', '.join(names[:5]) or 'no special tokens'}\n  -> --separator NAME")


# ---- the file

def pack(tokens, end, classes, how=(), order=(), names=(), attached=b""):
    """The bytes of tokenizer.bin. tokens: bytes in id order; end: the id of the end-of-text token;
    classes: ranges of up to 5 classes; how: cut, digits, prefix, the token <0x00>; order: ids of
    the tokens that merging makes, none: all; names: ids of special tokens."""
    counts = [*map(len, classes)] + [0] * (5 - len(classes))
    words = [*counts[3:], *how, *[0] * (4 - len(how)), len(order), len(names), len(attached)]
    header = struct.pack("<16I", MAGIC, 3 if any(words) else 2, len(tokens), end, *counts[:3],
                         *words)
    numbers = [point for ranges in classes for both in ranges for point in both]
    numbers += [*order, *names]
    return b"".join([header.ljust(HEADER_BYTES, b"\0"),
                     *(bytes([len(token)]) + token for token in tokens),
                     struct.pack(f"<{len(numbers)}I", *numbers), attached])


def tokenizer_bin(files, separator=None):
    """(the bytes of tokenizer.bin, what C cannot do or None). files: names and texts of the
    tokenizer's files, tokenizer.json among them. separator: the name of the token that begins every
    text."""
    try:
        config = json.loads(files["tokenizer.json"])
        tokens = token_bytes(config)
        name = separator or separator_of(config, files)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        raise Refusal(f"expected a tokenizer.json, found {type(error).__name__}: {error}\n"
                      "  -> a whole copy of it") from None
    ids = {token["content"]: token["id"] for token in config.get("added_tokens") or []}
    ids = config["model"]["vocab"] | ids if isinstance(config["model"]["vocab"], dict) else ids
    if name not in ids:
        raise Refusal(f"expected the separator {name} among the tokens, found none\n"
                      "  -> --separator NAME")
    tokens = [token or HOLE for token in tokens]
    attached = zlib.compress(json.dumps({each: files[each] for each in FILES if each in files},
                                        ensure_ascii=False).encode(), 9)
    if len(attached) > MOST_ATTACHED:
        attached = b""
    try:
        if config["model"].get("type") != "BPE":
            raise Cannot(f"{config['model'].get('type')}")
        way = way_of(config)
        first, order = bpe_tokens(config, way[4])
        return pack(tokens, ids[name], classes_of(config, way), (*way[:3], first), order,
                    names_of(config, way[4]), attached), None
    except (Cannot, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, Cannot) else f"{type(error).__name__}: {error}"
    # Without ranges the trainer only decodes. One token in the order: others may be the same.
    return pack(tokens, ids[name], [], (), [0], (), attached), reason


def read_files(path):
    """The files of a tokenizer in a folder, or one tokenizer.json, as {name: text}."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    places = {name: os.path.join(folder, name) for name in FILES}
    if not os.path.isdir(path):
        places["tokenizer.json"] = path
    files = {}
    for name, place in places.items():
        if os.path.isfile(place):
            with open(place, encoding="utf-8") as file:
                files[name] = file.read()
    for vocab, merges in PAIRS:
        pair_ = [os.path.join(folder, name) for name in (vocab, merges)]
        if "tokenizer.json" not in files and all(map(os.path.isfile, pair_)):
            try:
                made = Tokenizer(models.BPE.from_file(*pair_))
            except Exception as error:                     # the package has no narrower one
                raise Refusal(f"{folder}: expected {vocab} and {merges} of one tokenizer, found: "
                              f"{error}\n  -> whole copies of them") from None
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            made.add_special_tokens([END] if made.token_to_id(END) is not None else [])
            files["tokenizer.json"] = made.to_str()
    if "tokenizer.json" not in files:
        raise Refusal(f"{path}: expected tokenizer.json, or vocab.json and merges.txt, found "
                      "neither\n  -> AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) "
                      "of transformers makes tokenizer.json of other files")
    return files


def attached_files(data):
    """The files that are attached to the bytes of a tokenizer.bin, as {name: text}."""
    size = struct.unpack_from("<I", data, 4 * 15)[0] if len(data) >= HEADER_BYTES else 0
    if not size or struct.unpack_from("<2I", data)[:2] != (MAGIC, 3) or size > len(data):
        return {}
    unpack = zlib.decompressobj()
    try:
        files = json.loads(unpack.decompress(data[-size:], 1 << 28))
        return {name: text for name, text in files.items()
                if name in FILES and isinstance(text, str)}
    except (zlib.error, ValueError, AttributeError, RecursionError) as error:
        raise Refusal(f"expected the files of a tokenizer behind its tokens, found {error}\n"
                      "  -> python3 data/tokenizer.py FOLDER writes tokenizer.bin again") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a folder, or a tokenizer.json")
    parser.add_argument("--out", default="tokenizer.bin", help="tokenizer.bin")
    parser.add_argument("--separator", help="the token that begins every text, by name")
    args = parser.parse_args()
    try:
        data, cannot = tokenizer_bin(read_files(args.path), args.separator)
        with open(args.out + ".tmp", "wb") as file:
            file.write(data)
        os.replace(args.out + ".tmp", args.out)
    except (Refusal, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")
    count, end = struct.unpack_from("<2I", data, 8)
    print(f"{args.out}: {count} tokens, token {end} begins a text")
    if cannot:
        print(f"note: samples decode, prompts are refused: the trainer does not have {cannot}\n"
              "  -> dev/export_hf.py exports the model; prompt it in transformers")


if __name__ == "__main__":
    main()
