#!/usr/bin/env python3
"""get.py: real datasets, tokenized, as shards for training (data/README.md draws the format).

    python3 data/get.py tinyshakespeare                    1 MB of text: 302 thousand tokens
    python3 data/get.py tinystories [--tokens N]           2.2 GB of text, tokenized on arrival
    python3 data/get.py fineweb | fineweb-edu [--shards N] ready-made shards of 100 million tokens
                                                           and 200 MB each, by default 10
    python3 data/get.py --out DIR PATH...                  your own text: UTF-8 files, Parquet
                                                           with a column text (needs pyarrow
                                                           too), or folders with such files
    python3 data/get.py tasks | hellaswag piqa ...         files for ./train_gpt --tasks: all, or
                                                           some of hellaswag, piqa, arc_easy,
                                                           arc_challenge, winogrande, sciq,
                                                           lambada_openai, wikitext; 15 MB
                                                           (needs pyarrow too)
    python3 data/get.py tokenizer [--out FILE]             tokenizer.bin alone; --vocab FOLDER:
                                                           of a Hugging Face folder

The tokens are GPT-2's. Every folder also gets tokenizer.bin, so that the trained model can be
prompted and its samples read. Whatever stops a run (a kill, a full disk, no network), the same
command continues it: DIR/get.json lists the finished parts. Needs numpy and tiktoken. HF_ENDPOINT,
HF_TOKEN and the usual proxy variables are honoured. A folder of your own called tinystories is
./tinystories here.
"""
import argparse
import codecs
import collections
import concurrent.futures
import difflib
import email.utils
import errno
import fcntl
import functools
import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

try:
    import numpy as np
    import tiktoken
    import tiktoken.load
    tiktoken.Encoding.encode_to_numpy                      # is not in the oldest ones
except (ImportError, AttributeError) as missing:
    sys.exit(f"error: expected numpy and tiktoken, found: {missing}\n"
             "  -> python3 -m pip install --upgrade tiktoken numpy")

# ---- the sources
# Each file's address, size and checksum. Files without a checksum here get it from the hub's list.

Pinned = collections.namedtuple("Pinned", "url bytes sha256")
# ready: shards already, numbered from 1 for training
Hub = collections.namedtuple("Hub", "repository train val ready")

# the files that tiktoken takes
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
VOCABULARY = {
    "vocab.bpe": Pinned(GPT2 + "vocab.bpe", 456318,
                        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    "encoder.json": Pinned(GPT2 + "encoder.json", 1042301,
                           "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
}
DATASETS = {
    "tinyshakespeare": Pinned(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "tinystories": Hub("roneneldan/TinyStories", "TinyStoriesV2-GPT4-train.txt",
                       "TinyStoriesV2-GPT4-valid.txt", False),
    "fineweb": Hub("kjj0/fineweb10B-gpt2", "fineweb_train_{:06d}.bin", "fineweb_val_000000.bin",
                   True),
    "fineweb-edu": Hub("karpathy/fineweb-edu-100B-gpt2-token-shards",
                       "edu_fineweb_train_{:06d}.bin", "edu_fineweb_val_000000.bin", True),
}
# Evaluation tasks by the names and from the datasets that lm-evaluation-harness has for them;
# config None: the only one.
Task = collections.namedtuple("Task", "repository config split")
TASKS = {
    "hellaswag": Task("Rowan/hellaswag", None, "validation"),
    "piqa": Task("baber/piqa", None, "validation"),
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy", "test"),
    "arc_challenge": Task("allenai/ai2_arc", "ARC-Challenge", "test"),
    "winogrande": Task("allenai/winogrande", "winogrande_xl", "validation"),
    "sciq": Task("allenai/sciq", None, "test"),
    "lambada_openai": Task("EleutherAI/lambada_openai", "default", "test"),
    "wikitext": Task("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"),
}
HERE = os.path.dirname(os.path.abspath(__file__))
# GPT-2's, Radford et al. 2019
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EOT = "<|endoftext|>"
SHARD_HEADER_BYTES, SHARD_MAGIC, SHARD_VERSION = 1024, 20240520, 1          # llmc/run/data.h
EVAL_MAGIC, EVAL_VERSION, EVAL_START = 20240522, 1, 65535                   # llmc/run/eval.h
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2                            # llmc/run/tokenizer.h
# seconds of silence, failures in a row, seconds between them
TIMEOUT, RETRIES, LONGEST_WAIT = 30, 6, 300
BLOCK, PIECE = 1 << 18, 1 << 20  # bytes read at once, bytes tokenized at once


class Refusal(Exception):
    """A message for the user: what was expected, what was found, and "  -> what to do"."""


class Changed(Exception):
    """The server has another file now than the one whose beginning is here."""


def readable(size):
    return next(f"{size / unit:.1f} {name}"
                for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
                if size >= unit or unit == 1)


def say(message):
    """On a line of its own, below a progress line."""
    print(("\n" if sys.stderr.isatty() else "") + message, file=sys.stderr, flush=True)


class Progress:
    """Bytes, tokens and time to go on stderr: one line that overwrites itself on a terminal, one
    every ten seconds in a log."""

    def __init__(self, label, total, done=0):
        self.label, self.total, self.done, self.first, self.tokens = label, total, done, done, 0
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def add(self, size, tokens=0):
        self.done, self.tokens, now = self.done + size, self.tokens + tokens, time.monotonic()
        if now - self.last < (1 if self.terminal else 10):
            return
        self.last, rate = now, max(1.0, (self.done - self.first) / (now - self.start))
        line = (f"{self.label}: {readable(self.done)} of {readable(self.total)}, "
                f"{rate / 1e6:.1f} MB/s, ")
        line += f"{self.tokens / 1e6:.1f}M tokens, " if self.tokens else ""
        line += f"{max(0, self.total - self.done) / rate:.0f} s to go"
        print(f"\r{line}\x1b[K" if self.terminal else line, end="" if self.terminal else "\n",
              file=sys.stderr, flush=True)


# ---- files that are whole or not there

def publish(file, part, path):
    """Gives a finished file its name: at every instant the name is a whole file or absent."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(part, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def write_whole(path, data):
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        publish(file, path + ".tmp", path)


def sha256_file(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest


# ---- the network

def offline(error):
    """Whether no connection came about: no name, no route, no answer."""
    reason = getattr(error, "reason", None)
    code = getattr(reason, "errno", None)
    unreachable = code in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
    return unreachable or isinstance(reason, (socket.gaierror, TimeoutError))


class Remote:
    """A file on a server, read through broken connections. bytes and etag are learned from the
    answers where they are not known."""

    reached = False                                        # whether any server has answered yet

    def __init__(self, url, size=None):
        self.url, self.bytes, self.etag, self.link = url, size, None, ""

    def open(self, start):
        """The server's answer, positioned at byte `start`."""
        request = urllib.request.Request(self.url, headers={"User-Agent": "norm.c"})
        token = os.environ.get("HF_TOKEN")
        if token and self.url.startswith(hub() + "/"):
            # not for the storage that the hub sends us to
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        if start:
            request.add_header("Range", f"bytes={start}-")
            if self.etag and not self.etag.startswith("W/"):
                request.add_header("If-Range", self.etag)
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
        Remote.reached = True
        etag, total = response.headers.get("ETag"), response.headers.get("Content-Length")
        if response.status == 206:
            served = re.fullmatch(r"bytes (\d+)-\d+/(\d+)",
                                  response.headers.get("Content-Range", ""))
            if not served or int(served[1]) != start:
                raise ConnectionError(f"asked for the bytes from {start} on, got Content-Range "
                                      f"{response.headers.get('Content-Range')}")
            total = served[2]
        if ((self.etag and etag and etag != self.etag)
            or (self.bytes is not None and total is not None and int(total) != self.bytes)):
            raise Changed(f"expected {self.bytes} bytes with ETag {self.etag}, found {total} "
                          f"with {etag}")
        self.etag, self.bytes = etag or self.etag, int(total) if total is not None else self.bytes
        self.link = response.headers.get("Link", "")
        behind = start if response.status != 206 else 0
        # a server without ranges sends what is here already
        while behind and (block := response.read(min(behind, BLOCK))):
            behind -= len(block)
        return response

    def read(self, at=0):
        """Yields the bytes from `at` to the end. A failure is retried; RETRIES of them without a
        byte between are too many. Nothing is retried before the first answer of any server
        if there is no network."""
        failures = 0
        while self.bytes is None or at < self.bytes:
            before, wait = at, None
            try:
                with self.open(at) as response:
                    while block := response.read1(BLOCK):
                        at += len(block)
                        yield block
                if self.bytes is None or at >= self.bytes:
                    return
                problem = f"the connection ended at byte {at} of {self.bytes}"
            except urllib.error.HTTPError as error:
                if error.code not in (408, 425, 429) and error.code < 500:
                    self.refuse(f"the answer {error.code} {error.reason}")
                problem, wait = (f"the answer {error.code} {error.reason}",
                                 retry_after(error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                if isinstance(reason, ssl.SSLCertVerificationError):
                    raise Refusal(f"{self.url}: expected a certificate that this system trusts, "
                                  f"found: {reason}\n  -> install or update the system's "
                                  "certificates (ca-certificates), and check its clock")
                problem = str(reason) or type(reason).__name__
                if offline(error) and not Remote.reached:
                    raise Refusal(
                        f"{self.url}: expected a network, found: {problem}\n"
                        "  -> the same command continues with one (proxy: https_proxy). Without:\n"
                        "     make shard && ./shard --out DIR FILE...  your own text as bytes\n"
                        "     python3 data/get.py --out DIR FILE...    as GPT-2's tokens: its\n"
                        f"     vocab.bpe and encoder.json belong into {os.path.relpath(HERE)}/gpt2")
            failures = 1 if at > before else failures + 1
            if failures > RETRIES:
                self.refuse(problem)
            wait = min(2.0 ** (failures - 1), 60) if wait is None else wait
            if wait > LONGEST_WAIT:
                self.refuse(f"{problem}, and the request to wait {wait:.0f} s")
            say(f"{self.url}: {problem}; retry {failures} of {RETRIES} in {wait:.0f} s")
            time.sleep(wait)

    def refuse(self, problem):
        raise Refusal(f"{self.url}: expected a file, found {problem}\n"
                      "  -> the same command continues later; behind a proxy set https_proxy, for "
                      f"a mirror of the hub HF_ENDPOINT (now {hub()}), for permission HF_TOKEN")


def hub():
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def retry_after(value):
    """Retry-After is seconds or a date."""
    if value is None or value.strip().isdigit():
        return value and float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def hub_files(repository, branch="main"):
    """The files of a dataset on the hub as {path: (url, bytes, sha256)}; the list comes in
    pages."""
    branch = urllib.parse.quote(branch, safe="")
    files, page = {}, f"/api/datasets/{repository}/tree/{branch}?recursive=true"
    while page:
        remote = Remote(hub() + page)
        body = b"".join(remote.read())
        try:
            for entry in json.loads(body):
                name = entry["path"]
                if "lfs" in entry:
                    url = (f"{hub()}/datasets/{repository}/resolve/{branch}/"
                           f"{urllib.parse.quote(name)}")
                    files[name] = Pinned(url, int(entry["lfs"]["size"]), entry["lfs"]["oid"])
        except (ValueError, TypeError, KeyError):
            remote.refuse(f"no list of files but {body[:80]!r}")
        link = re.search(r'<([^>]*)>;\s*rel="next"', remote.link)
        # on the same host, mirror or not
        page = link and "{0.path}?{0.query}".format(urllib.parse.urlsplit(link[1]))
    return files


def download(pinned, path, label):
    """Brings a file to `path` through path.part, which a later run continues, and checks size and
    sha256 before it gets its name."""
    part = path + ".part"
    for attempt in range(3):
        with open(part, "ab") as file:
            begun = file.tell()
            digest, remote, progress = (sha256_file(part), Remote(pinned.url, pinned.bytes),
                                        Progress(label, pinned.bytes, begun))
            try:
                for block in remote.read(begun):
                    file.write(block)
                    digest.update(block)
                    progress.add(len(block))
                problem, final = f"sha256 {digest.hexdigest()}", not begun
            except Changed as change:
                problem, final = str(change), attempt == 2
            if digest.hexdigest() == pinned.sha256:
                publish(file, part, path)
                return
        os.remove(part)
        if final:
            break
        say(f"{label}: what was begun is no part of the file that is there ({problem}): from "
            "the start")
    raise Refusal(f"{pinned.url}: expected {pinned.bytes} bytes with sha256 {pinned.sha256}, found "
                  f"{problem}: the part is deleted\n  -> run the same command again; if this "
                  "stays, the file has changed or something between here and there rewrites it")


# ---- the tokenizer

class Tokenizer:
    """GPT-2's, or whatever vocabulary of its kind is in `folder` (None: GPT-2's, downloaded beside
    this program)."""

    def __init__(self, folder):
        own = folder is None
        folder = os.path.join(HERE, "gpt2") if own else folder
        if (not own and not os.path.exists(os.path.join(folder, "vocab.bpe"))
            and os.path.isfile(os.path.join(folder, "tokenizer.json"))):
            unpacked = tempfile.TemporaryDirectory()
            unpack_tokenizer(os.path.join(folder, "tokenizer.json"), unpacked.name)
            folder = unpacked.name
        paths = {name: os.path.join(folder, name) for name in VOCABULARY}
        for name, pinned in VOCABULARY.items():
            if own and not os.path.exists(paths[name]):
                os.makedirs(folder, exist_ok=True)
                download(pinned, paths[name], name)
            if not os.path.isfile(paths[name]):
                raise Refusal(f"{folder}: expected vocab.bpe and encoder.json, found no {name}\n"
                              "  -> --vocab DIR with both, or without --vocab to download GPT-2's")
        self.is_gpt2 = all(sha256_file(paths[name]).hexdigest() == pinned.sha256
                           for name, pinned in VOCABULARY.items())
        if own and not self.is_gpt2:
            raise Refusal(f"{folder}: expected GPT-2's vocab.bpe "
                          "and encoder.json, found other content\n"
                          f"  -> remove that folder, or --vocab {folder} to take it as it is")
        # tiktoken's cache goes by the name alone and would outlive these files
        os.environ["TIKTOKEN_CACHE_DIR"] = ""
        try:
            ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(paths["vocab.bpe"],
                                                                  paths["encoder.json"])
            self.tokens = sorted(ranks, key=ranks.get) + [EOT.encode()]
            self.eot = len(ranks)
            if (sorted(ranks.values()) != list(range(self.eot)) or self.eot >= 1 << 16
                or max(map(len, self.tokens)) > 255):
                raise ValueError(f"{self.eot} tokens; ids must count from 0, be below {1 << 16}, "
                                 "and stand for 255 bytes at most")
        except (AssertionError, ValueError, KeyError, AttributeError) as error:
            raise Refusal(f"{folder}: expected the merges of vocab.bpe and the tokens of "
                          f"encoder.json to agree, found: {error or 'they do not'}\n  -> take both "
                          "files from one model; without --vocab GPT-2's are downloaded") from None
        self.encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                                          special_tokens={EOT: self.eot})
        if not self.is_gpt2:
            print(f"{folder}: a vocabulary of {len(self.tokens)} tokens that is not GPT-2's")

    def file(self):
        """tokenizer.bin: a header of 256 uint32, each token's length and bytes, and the ranges of
        the pattern's character classes."""
        classes = [character_ranges(name) for name in (r"\p{L}", r"\p{N}", r"\s")]
        header = np.zeros(256, "<u4")
        header[:7] = [TOKENIZER_MAGIC, TOKENIZER_VERSION, len(self.tokens), self.eot,
                      *map(len, classes)]
        return (header.tobytes() + b"".join(bytes([len(t)]) + t for t in self.tokens)
                + b"".join(ranges.tobytes() for ranges in classes))

    def write(self, path):
        data = self.file()
        if not os.path.exists(path) or sha256_file(path).digest() != hashlib.sha256(data).digest():
            write_whole(path, data)


def unpack_tokenizer(path, folder):
    """Hugging Face's tokenizer.json as GPT-2's two files, where it is a byte-level BPE that cuts
    text as GPT-2 does."""
    with open(path, encoding="utf-8") as file:
        tokenizer = json.load(file)
    model, cut = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    if (model.get("type") != "BPE" or cut.get("type") != "ByteLevel" or cut.get("add_prefix_space")
        or not cut.get("use_regex", True) or tokenizer.get("normalizer")):
        raise Refusal(f"{path}: expected byte-level BPE that cuts text as GPT-2 "
                      f"does, found {model.get('type')} after {cut.get('type')}\n"
                      "  -> another model; without its tokenizer its samples are numbers of "
                      "tokens, and text for it must be tokenized elsewhere")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    vocabulary = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    for name, text in (("vocab.bpe", "\n".join(["#version: 0.2", *merges, ""])),
                       ("encoder.json", json.dumps(vocabulary))):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)


def vocabulary_hash(tokenizer):
    return hashlib.sha256(b"\n".join(tokenizer.tokens)).hexdigest()[:16]


def character_ranges(pattern):
    """First and last code points of the runs that a class of the pattern matches, asked of
    tiktoken's own Unicode tables."""
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    matcher = tiktoken.Encoding("class", pat_str=pattern,
                                mergeable_ranks={bytes([b]): b for b in range(256)},
                                special_tokens={})
    points = np.array([ord(c) for c in matcher.decode(matcher.encode_ordinary(every))])
    ends = np.flatnonzero(np.diff(points) != 1)
    return np.stack([points[np.r_[0, ends + 1]], points[np.r_[ends, len(points) - 1]]],
                    axis=1).astype("<u4")


# ---- shards, and the state of a folder of them

class Folder:
    """A folder of shards and its get.json: the settings it was made with, the text it is made of,
    and the shards that are done."""

    def __init__(self, path, settings):
        self.path, self.file = path, os.path.join(path, "get.json")
        os.makedirs(path, exist_ok=True)
        self.lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(f"{path}: expected to be alone, found another get.py at work there\n"
                          "  -> wait for it, or another --out") from None
        there = sorted(name for name in os.listdir(path) if name.endswith(".bin")
                       and name != "tokenizer.bin")
        if not os.path.exists(self.file):
            if there:
                raise Refusal(f"{path}: expected a folder without shards, found {there[0]}\n"
                              "  -> remove the old *.bin files, or another --out")
            self.begin(settings)
        else:
            try:
                with open(self.file, encoding="utf-8") as file:
                    self.state = json.load(file)
                before, _ = self.state["settings"], self.state["shards"]
            except (ValueError, TypeError, KeyError):
                raise Refusal(f"{self.file}: expected the state of an earlier run, found something "
                              f"else\n  -> remove {path}, or another --out") from None
            differ = [f"{key} {before.get(key)}, now {settings.get(key)}"
                      for key in {**before, **settings} if before.get(key) != settings.get(key)]
            if differ and not there:
                self.begin(settings)                       # nothing was done under the earlier ones
            elif differ:
                raise Refusal(f"{path}: expected the settings this folder "
                              f"was begun with, found {'; '.join(differ)}\n"
                              "  -> the earlier settings to continue it, or another --out")

    def begin(self, settings):
        self.state = {"settings": settings, "text": None, "shards": {}, "complete": False}
        self.save()

    def save(self):
        write_whole(self.file, (json.dumps(self.state, indent=1) + "\n").encode())

    def same_text(self, text):
        """Remembers what the text is; a later run must find the same."""
        if self.state["text"] not in (None, text) and self.state["shards"]:
            raise Refusal(f"{self.path}: expected the text that its shards began with, "
                          f"found another since: {self.state['text']}, now {text}\n"
                          f"  -> remove {self.path} and begin again, or another --out")
        self.state["text"] = text

    def intact(self, name):
        shard = self.state["shards"].get(name)
        return shard is not None and shard_tokens(os.path.join(self.path, name)) == shard["tokens"]

    def complete(self):
        return self.state["complete"] and all(map(self.intact, self.state["shards"]))

    def need(self, size):
        free = shutil.disk_usage(self.path).free
        if size > free:
            raise Refusal(f"{self.path}: expected {readable(size)} of "
                          f"free disk space, found {readable(free)}\n"
                          "  -> free some, or another --out, or less: --tokens, --shards")

    def report(self, model):
        self.state["complete"] = True
        self.save()
        say(f"{self.path}: complete, {len(self.state['shards'])} shards")
        for split in ("train", "val"):
            tokens = sum(shard["tokens"] for name, shard in self.state["shards"].items()
                         if f"_{split}_" in name)
            print(f"{split:5}  {tokens} tokens")
        print(f"next: ./train_gpt --data {shlex.quote(self.path)} --model {model}")


def shard_tokens(path):
    """The number of tokens that a whole shard's header gives; None where the file is not one."""
    if not os.path.isfile(path) or os.path.getsize(path) <= SHARD_HEADER_BYTES:
        return None
    magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
    size = SHARD_HEADER_BYTES + 2 * tokens
    whole = (magic, version, size) == (SHARD_MAGIC, SHARD_VERSION, os.path.getsize(path))
    return tokens if whole else None


def get_ready(source, folder, count):
    """Ready-made shards: the first `count` for training, and the one for validation."""
    names = [source.val, *(source.train.format(i) for i in range(1, count + 1))]
    missing = [name for name in names if not folder.intact(name)]
    files = hub_files(source.repository) if missing else {}
    absent = [name for name in missing if name not in files]
    if absent:
        there = sum(source.train.format(i) in files for i in range(1, len(files) + 1))
        raise Refusal(f"{source.repository}: expected {absent[0]} on "
                      f"{hub()}, found {there} training shards without it\n"
                      + (f"  -> --shards {there} or fewer" if source.val in files and there
                         else "  -> another HF_ENDPOINT, or another dataset"))
    parts = [os.path.join(folder.path, name + ".part") for name in missing]
    folder.need(sum(files[name].bytes for name in missing)
                - sum(os.path.getsize(part) for part in parts if os.path.exists(part)))
    for number, name in enumerate(missing, 1):
        path = os.path.join(folder.path, name)
        # whole, but a kill came before it was noted
        if not os.path.exists(path) or sha256_file(path).hexdigest() != files[name].sha256:
            download(files[name], path, f"{name} ({number} of {len(missing)})")
        tokens = shard_tokens(path)
        if tokens is None:
            os.remove(path)
            raise Refusal(f"{files[name].url}: expected a shard with magic {SHARD_MAGIC}, version "
                          f"{SHARD_VERSION} and as many tokens as it says, found another file\n"
                          "  -> the dataset's authors have changed its format: take another "
                          "dataset")
        folder.state["shards"][name] = {"tokens": tokens}
        folder.save()


# ---- text: pieces of documents that are tokenized one by one

# A cut that changes no token: before a space or newline that a visible character follows. The
# pattern begins a new match there (a longer run of white space gives its last character back), and
# no match looks further ahead than that character. The bytes are the first of characters that are
# no white space in Unicode; those of E1 and E2, some of which are, are left out.
BOUNDARY = re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4]|\xe3[\x81-\xbf])")
SEPARATOR = re.compile(re.escape(EOT.encode()))


def cut(blocks, boundary, at):
    """Yields (offset, bytes): the text in pieces of PIECE bytes and whatever it takes to a
    boundary."""
    rest, searched = bytearray(), PIECE
    for block in blocks:
        rest += block
        while match := boundary.search(rest, searched):
            yield at, bytes(rest[:match.start()])
            at, searched = at + match.start(), PIECE
            del rest[:match.start()]
        searched = max(PIECE, len(rest) - len(EOT))
    if rest:
        yield at, bytes(rest)


class LocalText:
    """Documents one after the other, files or rows of Parquet: their bytes first..last."""

    special, pinned = frozenset(), None                    # "<|endoftext|>" in a file is just text

    def __init__(self, documents, first, last):
        self.documents, self.first, self.bytes = documents, first, last - first

    def pieces(self, at):
        """Yields (offset, bytes, whether a document begins) from offset `at` on; offsets count from
        `first`."""
        begin = -self.first
        for path, size in self.documents:
            low, high = max(begin, at), min(begin + size, self.bytes)
            if low < high:
                for offset, data in cut(read_range(path, low - begin, high - begin, size), BOUNDARY,
                                        low):
                    yield offset, data, offset in (0, begin)
            begin += size


def is_parquet(path):
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1" and file.seek(-4, os.SEEK_END) and file.read() == b"PAR1"


def import_parquet(what):
    try:
        import pyarrow.parquet
        return pyarrow.parquet
    except ImportError as missing:
        raise Refusal(f"{what}: expected pyarrow, found: {missing}\n"
                      "  -> python3 -m pip install pyarrow") from None


@functools.lru_cache(1)
def parquet_rows(path, group):
    """The texts of a row group, as bytes."""
    table = import_parquet(path).ParquetFile(path).read_row_group(group, ["text"])
    return [(text or "").encode() for text in table["text"].to_pylist()]


def parquet_documents(path):
    """The rows that are not empty, as documents: ((path, row group, row), bytes)."""
    try:
        file = import_parquet(path).ParquetFile(path)
        types = {field.name: str(field.type) for field in file.schema_arrow}
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: expected Parquet, found: {error}\n"
                      "  -> download it again, or leave it out") from None
    if types.get("text") not in ("string", "large_string", "string_view"):
        found = ", ".join(f"{name} of {kind}" for name, kind in types.items())
        raise Refusal(f"{path}: expected a column text of strings, found {found}\n"
                      "  -> rename the column, or write its rows to a text file")
    groups = ((group, parquet_rows(path, group)) for group in range(file.num_row_groups))
    return [((path, group, row), len(text)) for group, rows in groups
            for row, text in enumerate(rows) if text]


def read_range(path, at, end, size):
    if isinstance(path, tuple):
        yield parquet_rows(*path[:2])[path[2]][at:end]
        return
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != size:
            raise Refusal(f"{path}: expected {size} bytes as at the start, found that it has "
                          "changed\n  -> run again, with another --out, when nothing writes to it")
        file.seek(at)
        while at < end and (block := file.read(min(PIECE, end - at))):
            at += len(block)
            yield block


class HubText:
    """A text on the hub that is never on disk: documents with "<|endoftext|>" between them. Its
    shards decode to it byte for byte, which is how its sha256 can be checked at the end although
    earlier runs have read a part of it."""

    special = frozenset([EOT])

    def __init__(self, pinned):
        self.pinned, self.bytes, self.digest = pinned, pinned.bytes, hashlib.sha256()

    def pieces(self, at):
        try:
            for offset, data in cut(Remote(self.pinned.url, self.bytes).read(at), SEPARATOR, at):
                self.digest.update(data)
                yield offset, data, offset == 0
        except Changed as change:
            raise Refusal(f"{self.pinned.url}: expected the file that was begun, found another "
                          f"one: {change}\n  -> run the same command again: it continues if the "
                          "hub still lists the file it began with") from None


def tokenized(text, tokenizer, at):
    """Yields (offset, bytes, tokens) of the text's pieces in order; as many threads as cores work
    ahead."""
    def encode(at, data, begins):
        try:
            tokens = tokenizer.encoding.encode_to_numpy(data.decode("utf-8"),
                                                        allowed_special=text.special,
                                                        disallowed_special=())
        except UnicodeDecodeError as error:
            raise Refusal(f"{text.pinned.url if text.pinned else 'the text'}: expected UTF-8, "
                          f"found {error}\n  -> another text") from None
        except ValueError as error:                        # white space by the megabyte
            raise Refusal(f"the text near byte {at}: expected what tiktoken can cut into words, "
                          f"found: {error}\n  -> break up or leave out the file with so long a run "
                          "of white space") from None
        return np.r_[tokenizer.eot, tokens].astype("<u2") if begins else tokens.astype("<u2")

    threads, ahead = os.cpu_count() or 1, collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for offset, data, begins in text.pieces(at):
            ahead.append((offset, len(data), pool.submit(encode, offset, data, begins)))
            if len(ahead) > 2 * threads:
                offset, size, future = ahead.popleft()
                yield offset, size, future.result()
        for offset, size, future in ahead:
            yield offset, size, future.result()


def write_shards(folder, prefix, split, text, tokenizer, limit, largest):
    """Tokenizes one split from where its last whole shard ends. get.json knows of each shard which
    piece of the text its end lies in ("at") and how many tokens of that piece it has ("skip")."""
    shards = folder.state["shards"]
    names = [name for name in sorted(shards) if f"_{split}_" in name]
    kept = next((i for i, name in enumerate(names) if not folder.intact(name)), len(names))
    for name in names[kept:]:
        say(f"{folder.path}: expected {name} as it was written, found otherwise: it and those "
            "after it are written again")
        del shards[name]
    last = shards[names[kept - 1]] if kept else {"at": 0, "skip": 0}
    skip, number, count, file = last["skip"], kept, 0, None
    total = sum(shards[name]["tokens"] for name in names[:kept])
    if text.pinned and limit is None:
        hash_shards(folder, names[:kept], text.digest, last["at"], tokenizer)

    def end_shard():
        file.seek(0)
        file.write(np.array([SHARD_MAGIC, SHARD_VERSION, count, len(tokenizer.tokens)],
                            "<i4").tobytes())
        publish(file, path + ".tmp", path)
        shards[os.path.basename(path)] = {"tokens": count, "at": offset, "skip": used}
        folder.save()

    progress = Progress(f"{prefix} {split}", text.bytes, last["at"])
    for offset, size, tokens in tokenized(text, tokenizer, last["at"]):
        used = min(skip, len(tokens))
        skip -= used
        while used < len(tokens) and total != limit:
            if file is None:
                path, count = os.path.join(folder.path, f"{prefix}_{split}_{number:06d}.bin"), 0
                file = open(path + ".tmp", "wb")
                file.write(bytes(SHARD_HEADER_BYTES))
            n = min(len(tokens) - used, largest - count,
                    len(tokens) if limit is None else limit - total)
            file.write(tokens[used:used + n].tobytes())
            used, count, total = used + n, count + n, total + n
            if count == largest:
                end_shard()
                file, number = None, number + 1
        progress.add(size, len(tokens))
        if total == limit:
            break
    if file:
        end_shard()
    if text.pinned and limit is None and text.digest.hexdigest() != text.pinned.sha256:
        for name in [name for name in shards if f"_{split}_" in name]:
            os.remove(os.path.join(folder.path, name))
            del shards[name]
        folder.save()
        raise Refusal(f"{text.pinned.url}: expected sha256 {text.pinned.sha256}, "
                      f"found {text.digest.hexdigest()}: its shards are deleted\n"
                      "  -> run the same command again; if this stays, something between here and "
                      "there rewrites the file")


def hash_shards(folder, names, digest, size, tokenizer):
    """Continues a hash over the first `size` bytes of a text from the shards that were made of it;
    the first token only begins a document."""
    for name in names:
        tokens = np.fromfile(os.path.join(folder.path, name), "<u2",
                             offset=SHARD_HEADER_BYTES)[name == names[0]:]
        for i in range(0, len(tokens), PIECE):
            data = tokenizer.encoding.decode_bytes(tokens[i:i + PIECE].tolist())[:size]
            digest.update(data)
            size -= len(data)


def list_files(paths, out):
    """The regular files at `paths` and within them, in a fixed order; what is hidden, a link within
    a folder, or the output stays out."""
    found, out = [], os.path.realpath(out)

    def unreadable(error):
        raise error
    for path in paths:
        if os.path.isfile(path):
            found.append(path)
        walk = os.walk(path, onerror=unreadable) if os.path.isdir(path) else ()
        for folder, inner, names in walk:
            inner[:] = sorted(name for name in inner if name[0] != "."
                              and os.path.realpath(os.path.join(folder, name)) != out)
            files = [os.path.join(folder, name) for name in sorted(names) if name[0] != "."]
            found += [file for file in files if stat.S_ISREG(os.lstat(file).st_mode)]
    return found


def text_problem(path):
    """Why a file is no text, or None."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        try:
            while block := file.read(PIECE):
                if b"\0" in block:
                    return "a NUL byte: no text, or UTF-16"
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return f"not UTF-8 ({error.reason})"
    return None if os.path.getsize(path) else "empty"


def local_texts(files, val_fraction):
    """Both splits of some files. Validation is the end of all the text: from the first character at
    or after 1 - val_fraction of its bytes."""
    documents, skipped = [], []
    for path in files:
        if is_parquet(path):
            documents += parquet_documents(path)
            continue
        problem = text_problem(path)
        skipped += [f"skipped {path}: {problem}"] if problem else []
        documents += [] if problem else [(path, os.path.getsize(path))]
    total = sum(size for _, size in documents)
    print("\n".join(skipped[:10] + [f"{len(documents)} documents, {readable(total)}; "
                                    f"{len(skipped)} files skipped"]))
    if not documents:
        raise Refusal("expected text, found none in these files\n"
                      "  -> UTF-8 files that are not empty")
    middle, begin = int(total * (1 - val_fraction)), 0
    for path, size in documents:
        if begin <= middle < begin + size:
            head = next(read_range(path, middle - begin, min(size, middle - begin + 4), size))
            middle += next((i for i, byte in enumerate(head) if byte & 0xC0 != 0x80), len(head))
        begin += size
    if middle == 0 or (middle == total and val_fraction):
        raise Refusal(f"expected text for both splits, found {total} bytes in all: too few for "
                      f"--val-fraction {val_fraction:g}\n  -> more text, or --val-fraction 0")
    texts = {"val": LocalText(documents, middle, total), "train": LocalText(documents, 0, middle)}
    return {split: text for split, text in texts.items() if text.bytes}


def hub_texts(source):
    files = hub_files(source.repository)
    if source.val not in files or source.train not in files:
        raise Refusal(f"{source.repository}: expected {source.train} and {source.val} on {hub()}, "
                      f"found {', '.join(files) or 'no such files'}\n  -> another HF_ENDPOINT")
    return {"val": HubText(files[source.val]), "train": HubText(files[source.train])}


def get_text(name, files, folder, tokenizer, args):
    """Tokenizes a dataset's text, or the user's files; validation first, because it is short."""
    source = DATASETS.get(name)
    if isinstance(source, Hub):
        texts = hub_texts(source)
        folder.same_text({split: text.pinned.sha256 for split, text in texts.items()})
    else:
        if source:
            files = [os.path.join(folder.path, name + ".txt")]
            if not os.path.exists(files[0]) or sha256_file(files[0]).hexdigest() != source.sha256:
                download(source, files[0], name)
        texts = local_texts(files, args.val_fraction)
    # about 4 bytes a token, 2 bytes in the shard
    sizes = {split: text.bytes // 2 for split, text in texts.items()}
    if args.tokens:
        sizes["train"] = min(sizes["train"], 2 * args.tokens)
    folder.need(sum(sizes.values()) - sum(2 * shard["tokens"]
                                          for shard in folder.state["shards"].values()))
    for split, text in texts.items():
        write_shards(folder, name or "text", split, text, tokenizer,
                     args.tokens if split == "train" else None, args.shard_tokens)


# ---- evaluation tasks
# The prompts are those of lm-evaluation-harness's tasks of the same names, without examples;
# dev/test/test_lm_eval.py compares.

def hellaswag_text(text):
    """Without the traces of WikiHow's markup."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def wikitext_text(text):
    """WikiText's tokens as text; the order matters."""
    text = re.sub(r"/' [0-9]/", "/'[0-9]/", text.replace("s '", "s'"))
    for sign in "-,.":
        text = text.replace(f" @{sign}@ ", sign)
    for sign in ":;.!?,":
        text = text.replace(f" {sign} ", f"{sign} ")
    for left, inside, right in ((r"\(", r"[^\)]", r"\)"), (r"\[", r"[^\]]", r"\]"),
                                ("{", "[^}]", "}"), ('"', '[^"]', '"'), ("'", "[^']", "'")):
        text = re.sub(rf"{left}\s*({inside}*?)\s*{right}",
                      lambda match: match[0][0] + match[1] + match[0][-1], text)
    for old, new in (("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"),
                     (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(old, new)
    return text


def task_example(name, row):
    """(number of the right completion, contexts, completions) of a dataset's row."""
    if name == "hellaswag":
        context = hellaswag_text(f"{row['activity_label']}: {row['ctx_a']} "
                                 f"{row['ctx_b'].capitalize()}")
        label, endings = int(row["label"]), [hellaswag_text(ending) for ending in row["endings"]]
    elif name == "piqa":
        context, label, endings = (f"Question: {row['goal']}\nAnswer:", row["label"],
                                   [row["sol1"], row["sol2"]])
    elif name in ("arc_easy", "arc_challenge"):
        context, label, endings = (f"Question: {row['question']}\nAnswer:",
                                   row["choices"]["label"].index(row["answerKey"]),
                                   row["choices"]["text"])
    elif name == "sciq":
        context, label = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:", 3
        endings = [row["distractor1"], row["distractor2"], row["distractor3"],
                   row["correct_answer"]]
    elif name == "winogrande":  # the completion is shared, the contexts differ (Trinh, Le 2018)
        before, after = row["sentence"].split("_", 1)
        contexts = [before + row["option1"], before + row["option2"]]
        return int(row["answer"]) - 1, contexts, [after.strip()] * 2
    else:
        context, _, last = row["text"].rpartition(" ")
        label, endings = 0, [last]
    return label, [context] * len(endings), endings


def encode_pair(tokenizer, context, ending):
    """Tokens of both as lm-evaluation-harness splits them: what the whole has behind as many tokens
    as the context alone has; spaces at the context's end go with the rest."""
    encode, text = tokenizer.encoding.encode_ordinary, context.rstrip()
    before = encode(text)
    after = encode(f"{context} {ending}")[len(before):]
    return (before, after) if context else ([tokenizer.eot], encode(f" {ending}"))


def eval_file(name, rows, tokenizer):
    """llm.c's evaluation format (data/README.md)."""
    stream, longest = [], 0
    for index, row in enumerate(rows):
        label, contexts, endings = task_example(name, row)
        if not 0 <= label < len(endings):
            raise ValueError(f"completion {label} of {len(endings)} is right")
        pairs = [encode_pair(tokenizer, context, ending)
                 for context, ending in zip(contexts, endings)]
        shared = pairs[0][0] if all(before == pairs[0][0] for before, _ in pairs) else []
        own = [before[len(shared):] for before, _ in pairs]
        example = [EVAL_START, 0, index, label, len(pairs), len(shared), *shared]
        for before, (_, after) in zip(own, pairs):
            example += [len(before) + len(after), *before, *after]
        example += [*map(len, endings), *map(len, own)]
        example[1] = 2 * len(example)
        if example[1] >= 1 << 16 or index >= 1 << 16:
            raise Refusal(f"{name}: expected up to {1 << 16} examples of less than {1 << 16} bytes "
                          f"each, found {example[1]} in example {index}\n  -> another dataset")
        longest = max(longest, example[1])
        stream += example
    header = np.zeros(256, "<i4")
    header[:4] = [EVAL_MAGIC, EVAL_VERSION, len(rows), longest]
    return header.tobytes() + np.array(stream, "<u2").tobytes()


def text_file(rows, tokenizer):
    """A shard of documents, and in its header the bytes and words of what they are as WikiText has
    them."""
    pages = [row["page"] for row in rows]
    encode = tokenizer.encoding.encode_ordinary
    tokens = [token for page in pages
              for token in (tokenizer.eot, *encode(wikitext_text(page)))]
    header = np.zeros(256, "<i4")
    header[:6] = [SHARD_MAGIC, SHARD_VERSION, len(tokens), len(tokenizer.tokens),
                  sum(len(page.encode()) for page in pages),
                  sum(len(re.split(r"\s+", page)) for page in pages)]
    return header.tobytes() + np.array(tokens, "<u2").tobytes()


def get_task(name, out, tokenizer):
    """The dataset's split as the hub keeps it in Parquet, and what is made of it."""
    task, rows, parquet = TASKS[name], [], import_parquet(name)
    files = hub_files(task.repository, "refs/convert/parquet")
    config = re.escape(task.config) if task.config else "[^/]+"
    wanted = re.compile(rf"{config}/{task.split}/[0-9]+\.parquet")
    names = sorted(filter(wanted.fullmatch, files))
    if len({path.split("/")[0] for path in names}) != 1:
        raise Refusal(f"{task.repository}: expected {task.config or 'one configuration'} with "
                      f"the split {task.split}, found {', '.join(names or files) or 'no files'}\n"
                      "  -> another HF_ENDPOINT")
    for number, source in enumerate(names):
        path = os.path.join(out, f"{name}_{number}.parquet")
        if not os.path.exists(path) or sha256_file(path).hexdigest() != files[source].sha256:
            download(files[source], path, name)
        rows += parquet.read_table(path).to_pylist()
    try:
        data = (text_file(rows, tokenizer) if name == "wikitext"
                else eval_file(name, rows, tokenizer))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Refusal(f"{task.repository}: expected rows of {name}, "
                      f"found others: {type(error).__name__}: {error}\n"
                      "  -> the dataset's authors have changed it: without this one") from None
    write_whole(os.path.join(out, f"{name}.bin"), data)
    print(f"{name}: {len(rows)} {'documents' if name == 'wikitext' else 'examples'}")


# ---- the command line

def at_least_one(text):
    if not text.isdigit() or int(text) < 1:
        raise Refusal(f"expected a whole number of 1 or more, found {text!r}\n"
                      "  -> digits alone, as in --tokens 1000000")
    return int(text)


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise Refusal(f"--val-fraction: expected a number from 0 to below 1, found {text!r}\n"
                      "  -> --val-fraction 0.1")
    return value


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        raise Refusal(f"{message}\n  -> python3 data/get.py --help")


def arguments():
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                       allow_abbrev=False)
    parser.add_argument("what", nargs="+", help="a dataset, `tokenizer`, or files and folders")
    parser.add_argument("--out", help="the folder for the shards (data/NAME for a dataset), or the "
                                      "file for `tokenizer` (tokenizer.bin)")
    parser.add_argument("--tokens", type=at_least_one, help="at most this many tokens for training")
    parser.add_argument("--shards", type=at_least_one,
                        help="this many ready-made shards for training (10)")
    parser.add_argument("--shard-tokens", type=at_least_one, default=100_000_000,
                        help="tokens per shard (100000000)")
    parser.add_argument("--val-fraction", type=fraction, default=0.1,
                        help="part of the text for validation (0.1)")
    parser.add_argument("--vocab", help="a folder with vocab.bpe and encoder.json, or a "
                                        "tokenizer.json of their kind, instead of GPT-2's "
                                        "(data/gpt2, downloaded when missing)")
    args = parser.parse_args()
    commands = [what for what in args.what if what in (*DATASETS, *TASKS, "tasks", "tokenizer")]
    name = (commands[0] if len(args.what) == 1 and commands
            else "tasks" if all(what in TASKS for what in args.what) else None)
    if (name == "tasks" or name in TASKS) and (args.tokens or args.shards):
        raise Refusal("expected a task alone, found a number of tokens or shards\n"
                      "  -> without --tokens and --shards: tasks are small")
    if commands and not name:
        raise Refusal(f"expected one dataset or your own files, found {' '.join(args.what)}\n"
                      "  -> one command each; a folder of that name is ./NAME")
    ready = isinstance(DATASETS.get(name), Hub) and DATASETS[name].ready
    if ready and args.tokens or not ready and args.shards:
        raise Refusal(f"expected {'--shards' if ready else '--tokens'} for "
                      f"{' '.join(args.what)}, found {'--tokens' if ready else '--shards'}\n"
                      "  -> ready-made shards have 100 million tokens each: --shards N; other text "
                      "is counted in tokens: --tokens N")
    for what in () if name else args.what:
        if not os.path.isfile(what) and not os.path.isdir(what):
            near = difflib.get_close_matches(what.lower(), [*DATASETS, *TASKS, "tokenizer"], 1)
            raise Refusal(f"{what}: expected a text file, a folder, or "
                          f"one of {', '.join((*DATASETS, *TASKS))}, "
                          "tokenizer; found nothing of the kind\n"
                          f"  -> {'did you mean ' + near[0] + '?' if near else 'check the path'}")
    if not name and not args.out:
        raise Refusal("expected a folder to write to, found no --out\n  -> --out DIR")
    return args, name, ready


def run():
    args, name, ready = arguments()
    tokenizer = Tokenizer(args.vocab)
    if name == "tokenizer":
        path = args.out or "tokenizer.bin"
        path = os.path.join(path, "tokenizer.bin") if os.path.isdir(path) else path
        tokenizer.write(path)
        print(f"{path}: {len(tokenizer.tokens)} tokens")
        return
    if name == "tasks" or name in TASKS:
        folder = Folder(args.out or os.path.relpath(os.path.join(HERE, "tasks")),
                        {"dataset": "tasks", "vocabulary": vocabulary_hash(tokenizer)})
        tokenizer.write(os.path.join(folder.path, "tokenizer.bin"))
        for task in TASKS if args.what == ["tasks"] else args.what:
            get_task(task, folder.path, tokenizer)
        print(f"next: ./train_gpt --from RUN --eval --tasks {shlex.quote(folder.path)}")
        return
    if ready and not tokenizer.is_gpt2:
        raise Refusal(f"{name}: expected GPT-2's vocabulary, which its shards are made with, found "
                      f"another one in {args.vocab}\n  -> leave --vocab out")
    settings = {"dataset": name or "text", "vocabulary": vocabulary_hash(tokenizer)}
    if not ready:
        settings.update({"--tokens": args.tokens, "--shard-tokens": args.shard_tokens,
                         "--val-fraction": args.val_fraction})
    out = args.out or os.path.relpath(os.path.join(HERE, name))
    # before the folder is made: a mistyped path leaves nothing behind
    files = [] if name else list_files(args.what, out)
    folder = Folder(out, settings)
    tokenizer.write(os.path.join(folder.path, "tokenizer.bin"))
    if files:
        marks = "".join(f"{os.fsencode(file)!r} {os.stat(file).st_size} "
                        f"{os.stat(file).st_mtime_ns}\n" for file in files)
        folder.same_text(f"{len(files)} files {hashlib.sha256(marks.encode()).hexdigest()[:16]}")
    if ready:
        get_ready(DATASETS[name], folder, args.shards or 10)
    elif not folder.complete():
        get_text(name, files, folder, tokenizer, args)
    folder.report("gpt2-124M" if ready else "llama-char")


def main():
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")      # file names may be no text
    try:
        run()
        return 0
    except Refusal as refusal:
        say(f"error: {refusal}")
    except KeyboardInterrupt:
        say("stopped; the same command continues")
    except OSError as error:
        say(f"error: expected to read and write, found: {error}\n  -> with disk space and "
            "permissions in order, the same command continues; or another --out")
    return 1


if __name__ == "__main__":
    sys.exit(main())
