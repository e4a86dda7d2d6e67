"""vocabulary.py: the tokenizers of get.py, and tokenizer.bin for the trainer (data/README.md).

GPT-2's comes from tiktoken (Radford et al. 2019), every other from the package tokenizers: a
tokenizer.json, or vocab.json with merges.txt (encoder.json with vocab.bpe are the same two files).
Bytes need no file. A document begins with one token, the separator.
"""
import concurrent.futures
import functools
import hashlib
import json
import os

import numpy as np

# GPT-2's, Radford et al. 2019
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EOT = "<|endoftext|>"
LARGEST = 1 << 24                                          # --vocab in llmc/run/flags.h
# The two files of a byte-level BPE, under either of their names.
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
# Neighbours of a newline between which a text may be cut, if the tokenizer cuts there anyway.
NEIGHBOURS = "aZ09.,!\"')-_{}#é日本ж٣"


class Refusal(Exception):
    """A message for the user: what was expected, what was found, and "  -> what to do"."""


class Vocabulary:
    """size; separator; tokens: the bytes of each, None where they are not known; cuttable: a text
    may be cut between a newline and a visible character and no token changes."""

    tokens = None

    def fingerprint(self):
        return hashlib.sha256(self.identity()).hexdigest()[:16]

    def dtype(self):
        return np.dtype("<u2" if self.size <= 1 << 16 else "<u4")

    def lengths(self):
        """Bytes of each token's text, 0 for the separator; None where they are not known."""
        if self.tokens is None:
            return None
        lengths = np.array([len(token) for token in self.tokens])
        lengths[self.separator] = 0
        return lengths

    def packed(self):
        """(the bytes of tokenizer.bin, what the trainer cannot do with it or None)."""
        import tokenizer
        classes = [tokenizer.runs(tokenizer.matched(name)) for name in (r"\p{L}", r"\p{N}", r"\s")]
        return tokenizer.pack(self.tokens, self.separator, classes), None


class Bytes(Vocabulary):
    """A token is a byte of UTF-8, and token 0 begins documents, as in data/shard.c."""

    size, separator, cuttable = 256, 0, True
    tokens = [bytes([byte]) for byte in range(256)]

    def identity(self):
        return b"bytes"

    def encode(self, texts):
        for text in texts:
            if "\0" in text:
                raise Refusal("a text: expected no NUL character, as token 0 begins documents, "
                              "found one\n  -> leave it out of the text")
        return [list(text.encode()) for text in texts]

    def packed(self):
        return None, None                                  # the trainer knows bytes without a file


class Gpt2(Vocabulary):
    """GPT-2's, from tiktoken's two files."""

    cuttable = True

    def __init__(self, encoder, merges):
        import tiktoken.load
        os.environ["TIKTOKEN_CACHE_DIR"] = ""              # it goes by the names of files alone
        ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(merges, encoder)
        self.tokens = sorted(ranks, key=ranks.get) + [EOT.encode()]
        self.size, self.separator = len(self.tokens), len(ranks)
        self.encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                                          special_tokens={EOT: len(ranks)})

    def identity(self):
        return b"\n".join(self.tokens)

    def encode(self, texts):
        """The tokens of each text; no text is a special token."""
        def encode(text):                                  # encode_ordinary panics at such a text
            return self.encoding.encode_to_numpy(text, allowed_special=set(),
                                                 disallowed_special=()).tolist()
        try:
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(pool.map(encode, texts))
        except ValueError as error:                        # white space by the megabyte
            raise Refusal(f"a text: expected what tiktoken can cut into words, found: {error}\n"
                          "  -> break up or leave out the file with so long a run of white space"
                          ) from None


class Learned(Vocabulary):
    """Any tokenizer that the package tokenizers reads. path: a file tokenizer.json, or a folder
    with it or with the two files of a byte-level BPE."""

    def __init__(self, path, separator=None):
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        self.path = path
        try:
            import tokenizers
            self.tokenizer = self.load(tokenizers, path)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            self.tokenizer.encode_special_tokens = True
            self.ids = self.tokenizer.get_vocab(with_added_tokens=True)
            self.size = max(self.ids.values(), default=-1) + 1
            if not 0 < self.size <= LARGEST:               # to_str would list all below it
                raise Refusal(f"{path}: expected ids of tokens from 0 to {LARGEST - 1}, found "
                              f"{self.size - 1} as the highest\n"
                              "  -> the tokenizer of another model")
            self.description = json.loads(self.tokenizer.to_str())
        except ImportError as error:
            raise Refusal(f"{path}: expected the package tokenizers, found: {error}\n"
                          "  -> python3 -m pip install tokenizers") from None
        except Refusal:
            raise
        except Exception as error:                         # tokenizers raises nothing narrower
            raise Refusal(f"{path}: expected a tokenizer, found: {error}\n"
                          "  -> all files of one model; without --vocab GPT-2's is taken") from None
        self.separator = self.find_separator(folder, separator)
        self.tokens = self.find_bytes()
        self.cuttable = self.find_cuttable()

    @staticmethod
    def load(tokenizers, path):
        whole = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        pairs = [[os.path.join(path, name) for name in pair] for pair in PAIRS]
        pair = next((pair for pair in pairs if all(map(os.path.isfile, pair))), None)
        if not pair or os.path.isfile(whole):
            if not os.path.isfile(whole):
                names = " or ".join(" with ".join(pair) for pair in PAIRS)
                raise Refusal(f"{path}: expected tokenizer.json, or {names}, found none of them\n"
                              "  -> --vocab with a folder that has them, or OWNER/NAME on the hub")
            return tokenizers.Tokenizer.from_file(whole)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*pair))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens([EOT])
        return tokenizer

    def find_separator(self, folder, name):
        """The token of that name; without a name, the one that begins texts in tokenizer.bin."""
        import tokenizer
        try:
            name = name or tokenizer.separator_of(self.description, tokenizer.read_files(self.path))
        except tokenizer.Refusal as refusal:
            raise Refusal(f"{folder or '.'}: {refusal}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise Refusal(f"{folder or '.'}: expected the tokenizer's JSON files, found: {error}\n"
                          "  -> a whole copy of them") from None
        if name not in self.ids:
            raise Refusal(f"{folder or '.'}: expected a token that separates documents, found none "
                          f"of {name}\n  -> --separator with the name of one of its tokens")
        return self.ids[name]

    def steps(self):
        cut = self.description.get("pre_tokenizer") or {}
        return cut.get("pretokenizers", [cut])

    def find_bytes(self):
        """The bytes of each token of a byte-level BPE; ids that no token has get a name."""
        if not any(step.get("type") == "ByteLevel" for step in self.steps()):
            return None
        from tokenizer import byte_of
        table = byte_of()
        added = {token["content"] for token in self.description.get("added_tokens", ())}
        tokens = [f"<|{number}|>".encode() for number in range(self.size)]
        for token, number in self.ids.items():
            plain = token not in added and all(letter in table for letter in token)
            tokens[number] = bytes(map(table.get, token)) if plain else token.encode()
        return tokens

    def find_cuttable(self):
        if (self.tokens is None or any(step.get("add_prefix_space") for step in self.steps())
            or self.description.get("normalizer") not in (None, {"type": "NFC"})):
            return False
        cut = self.tokenizer.pre_tokenizer.pre_tokenize_str
        return all(2 in [end for _, (_, end) in cut(f"{a}\n{b}")]
                   for a in NEIGHBOURS for b in NEIGHBOURS)

    @functools.cache
    def packed(self):
        """Version 2, which llm.c reads too, if it is of GPT-2's kind; otherwise tokenizer.py's
        file. None in place of bytes: there is no tokenizer.bin."""
        if self.is_gpt2_kind():
            return super().packed()
        import tokenizer
        try:
            return tokenizer.tokenizer_bin(tokenizer.read_files(self.path),
                                           self.tokenizer.id_to_token(self.separator))
        except tokenizer.Refusal as refusal:
            return None, str(refusal).partition("\n")[0]

    def is_gpt2_kind(self):
        """Whether version 2 of tokenizer.bin suffices: BPE on bytes whose tokens have the order of
        their merges, after GPT-2's pattern, without special tokens but the separator."""
        if (self.tokens is None or len(set(self.tokens)) < self.size
            or max(map(len, self.tokens)) > 255):
            return False
        model, steps = self.description["model"], self.steps()
        pairs = [pair.split(" ") if isinstance(pair, str) else pair
                 for pair in model.get("merges", ())]
        order = [self.ids["".join(pair)] for pair in pairs]
        plain = (model["type"] == "BPE" and not model.get("ignore_merges")
                 and not model.get("dropout") and not self.description.get("normalizer")
                 and all(token["special"] and token["id"] == self.separator
                         for token in self.description.get("added_tokens", ())))
        return (plain and len(steps) == 1 and not steps[0].get("add_prefix_space")
                and steps[0].get("use_regex", True)
                and all(a < b for a, b in zip(order, order[1:]))
                and {bytes([byte]) for byte in range(256)} <= set(self.tokens))

    def identity(self):
        """Of what it makes of a text."""
        return repr([self.description, sorted(self.ids.items()), self.separator]).encode()

    def encode(self, texts):
        """The tokens of each text; special tokens are text like any other."""
        return [encoding.ids for encoding in
                self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
