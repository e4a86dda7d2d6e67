#!/usr/bin/env python3
"""Tests of data/get.py: python3 dev/test/test_get.py [NAME...]

Everything runs against a server of this program on the local machine, which serves small stand-ins
for the datasets and misbehaves as told, with a small vocabulary that this program makes. No
network, no GPT-2 files. Needs numpy, tiktoken, tokenizers, huggingface_hub and pyarrow, and the
trainer, which it makes; takes a minute.
"""
import contextlib
import errno
import fcntl
import gzip
import hashlib
import http.server
import io
import json
import os
import pathlib
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import types

import numpy as np
import pyarrow.parquet
import tiktoken.load
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "data"))
import debian
import get
import hub
import shards as shards_file
import tasks
import texts
import vocabulary

EOT = "<|endoftext|>"
REAL = {name: getattr(get, name) for name in ("TEXT", "VOCABULARY", "HERE")}
PIECE, CHUNK, BATCH = texts.PIECE, hub.CHUNK, shards_file.BATCH
passed = failed = 0
scratch = pathlib.Path(tempfile.mkdtemp(prefix="test_get_"))
# get.py's calls: seconds to sleep, folders locked, files synced and renamed
waits, locks, synced = [], [], []


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


# ---- texts and a vocabulary

def words(seed, size):
    """Text of many kinds: words, contractions, numbers, several scripts, runs of white space of
    every sort, emoji, code."""
    r, out = random.Random(seed), []
    kinds = ["the", "cat's", "they'll", "don't", "42", "2024", "Ünïcödé", "привет", "日本語", "مرحبا",
             "हिन्दी", "👩‍👩‍👧", "x=1;", "/*-*/", "...", "'", "e\u0301", "１２", "ﬁ"]
    gaps = [" ", " ", " ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "   \n  ", "\u00a0",
            "\u3000", "\u2003 ", "\x85", " \u2028", "\x1c", "\ufeff", ""]
    while size > 0:
        out += [r.choice(kinds), r.choice(gaps)]
        size -= len(out[-1]) + len(out[-2])
    return "".join(out)


def make_judge(folder):
    """tiktoken's own reading of the two files."""
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"),
                                                          str(folder / "encoder.json"))
    return tiktoken.Encoding("gpt2", pat_str=vocabulary.PATTERN, mergeable_ranks=ranks,
                             special_tokens={EOT: len(ranks)})


def make_vocabulary(folder, merges=300):
    """A byte-level BPE in GPT-2's two files: the most frequent pair of neighbours in some text
    becomes a token, again and again."""
    visible = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    order = visible + [b for b in range(256) if b not in visible]
    names = {b: chr(b) if b in visible else chr(256 + order.index(b) - len(visible)) for b in order}
    text = words("vocabulary", 4000) + " and the cat said that the dog" * 20
    pieces = [[names[b] for b in word.encode()]
              for word in re.findall(r" ?\w+|\s+|[^\w\s]+", text)]
    tokens, pairs = [names[b] for b in order], []
    for _ in range(merges):
        counts = {}
        for piece in pieces:
            for pair in zip(piece, piece[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair), default=None)
        if best is None:
            break
        pairs.append(best)
        tokens.append("".join(best))
        for piece in pieces:
            i = 0
            while i + 1 < len(piece):
                if (piece[i], piece[i + 1]) == best:
                    piece[i:i + 2] = ["".join(best)]
                i += 1
    folder.mkdir()
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs),
                                      encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps({**{t: i for i, t in enumerate(tokens)},
                                                     EOT: len(tokens)}), encoding="utf-8")


def pinned(path, url):
    data = path.read_bytes()
    return hub.Pinned(url, len(data), hashlib.sha256(data).hexdigest())


# ---- the server

class Server(http.server.ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, request, client_address):
        pass  # clients that are killed are what it is for


class Handler(http.server.BaseHTTPRequestHandler):
    """files: {path: bytes}. behaviour: {path: [one word or tuple per request]}, then good
    manners."""
    files, etags, behaviour, log = {}, {}, {}, []
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.replace("&expand=false", "").replace("?expand=false&", "?")
        Handler.log.append((path, dict(self.headers)))
        script = self.behaviour.get(path, [])
        kind, *value = script.pop(0) if script else ("good",)
        if kind == "status":
            self.answer(value[0], b"no", value[1] if len(value) > 1 else {})
        elif kind == "garbage":
            self.wfile.write(b"\x00\x01 what is this\r\n\r\n")
            self.close_connection = True
        elif "/resolve/" in path:
            host = "localhost" if "127.0.0.1" in self.headers["Host"] else "127.0.0.1"
            self.answer(302, b"", {"Location": f"http://{host}:{self.server.server_port}/storage/"
                                   + path.rsplit("/", 1)[1]})
        elif path not in self.files:
            self.answer(404, b"not here", {})
        elif "/api/" in path:
            body, link = self.files[path]
            self.answer(200, body, {"Link": f'<{endpoint}{link}>; rel="next"'} if link else {})
        else:
            self.serve_file(path, kind, value)

    def serve_file(self, path, kind, value):
        data, etag, start = self.files[path], self.etags.get(path, '"first"'), 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if kind == "new etag":
            etag = self.etags[path] = value[0]
        if asked and kind != "no ranges" and self.headers.get("If-Range", etag) == etag:
            start = int(asked[1])
            if start >= len(data):
                return self.answer(416, b"", {})
        elif asked and kind == "any etag":
            start = int(asked[1])
        length = len(data) - start + (value[0] if kind == "wrong length" else 0)
        headers = {"ETag": etag, "Content-Length": str(length)}
        if start:
            first = start + (kind == "wrong range")
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if kind == "no etag":
            del headers["ETag"]
        body = data[start + (kind == "wrong range"):]
        if kind == "corrupt":
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(206 if start else 200)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if kind in ("cut", "reset", "hang"):
            self.wfile.write(body[:value[0]])
            self.wfile.flush()
            if kind == "hang":
                sleep(20 * TIMEOUT)
            if kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.close_connection = True
            if kind == "reset":
                self.connection.close()
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
        else:
            step = value[0] if kind == "slow" else len(body) or 1
            for i in range(0, len(body), step):
                self.wfile.write(body[i:i + step])
                if kind == "slow":
                    time.sleep(0.002)
            self.close_connection = kind == "wrong length"

    def answer(self, code, body, headers):
        self.send_response(code)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)


def publish_dataset(repository, files, page=1000, branch="main"):
    """Puts files on the server as the hub has them, with their list in pages."""
    entries = [{"type": "directory", "oid": "0", "size": 0, "path": "data"},
               {"type": "file", "oid": "0", "size": 3, "path": "README.md"}]
    for name, data in files.items():
        Handler.files["/storage/" + name.rsplit("/", 1)[-1]] = data
        entries.append({"type": "file", "oid": "0", "size": len(data), "path": name,
                        "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data),
                                "pointerSize": 134}})
    url = first = f"/api/datasets/{repository}/tree/{branch}?recursive=true"
    for i in range(0, len(entries), page):
        link = f"{first}&cursor={i + page}" if i + page < len(entries) else None
        Handler.files[url] = (json.dumps(entries[i:i + page]).encode(), link)
        url = link


# ---- running get.py

def count_calls(limit):
    """Counts the calls and returns of functions, Python's and C's, and kills this process at that
    number of them, as from outside."""
    count = [0]

    def profile(*event):
        count[0] += 1
        if count[0] == limit:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(profile)
    return count


def run_and_kill(moment, *args):
    """get.py's main in a child that is killed at its moment-th call; tells whether it was."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        sys.argv = ["get.py", *map(str, args)]
        with contextlib.suppress(BaseException):
            count_calls(moment)
            get.main()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def run(*args):
    """Runs get.py's main here; returns (exit status, what it said)."""
    said, status, before = io.TextIOWrapper(io.BytesIO(), "utf-8"), 0, sys.argv
    sys.argv = ["get.py", *map(str, args)]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = get.main()
        except SystemExit as end:
            status = end.code
    sys.argv = before
    while locks:
        os.close(locks.pop())                              # as the end of a process does
    said.flush()
    said = said.buffer.getvalue().decode()
    return status, said


def expect_refusal(result, *parts):
    global passed, failed
    status, said = result
    missing = [part for part in (*parts, "error: ", "\n  -> ") if part not in said]
    ok = status != 0 and not missing and "Traceback" not in said
    passed, failed = passed + ok, failed + (not ok)
    if not ok:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: expected a "
              f"refusal with {missing}, found {status}: {said}")


def fresh(name):
    path = scratch / name
    shutil.rmtree(path, ignore_errors=True)
    return path


def shards(folder, split, judge=None):
    """The tokens of all shards of a split, after their headers have been checked."""
    out = []
    judge = judge or tokenizer
    wide = judge.n_vocab > 1 << 16
    for number, path in enumerate(sorted(folder.glob(f"*{split}_*.bin"))):
        header = np.fromfile(path, "<i4", 256)
        tokens = np.fromfile(path, "<u4" if wide else "<u2", offset=1024)
        size = sum(len(judge.decode_single_token_bytes(token)) for token in tokens.tolist()
                   if token != judge.eot_token)
        good = (header[:5].tolist() == [20240801 if wide else 20240520, 7 if wide else 1,
                                        len(tokens), judge.n_vocab, size]
                and not header[5:].any() and path.name.endswith(f"_{number:06d}.bin"))
        expect(good, f"{path.name}: header {header[:6]} for {len(tokens)} tokens")
        out += tokens.tolist()
    return out


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def encode(*documents):
    return [token for text in documents
            for token in (tokenizer.eot_token, *tokenizer.encode_ordinary(text))]


# ---- the tests

def test_tokenizer():
    out = scratch / "t.bin"
    expect(run("tokenizer", "--vocab", vocab, "--out", out)[0] == 0, "it is written")
    data = out.read_bytes()
    magic, version, n, eot, letters, numbers, spaces = np.frombuffer(data, "<u4", 7).tolist()
    expect((magic, version, n, eot) == (20240328, 2, tokenizer.n_vocab, tokenizer.eot_token),
           "header")
    expect(not any(data[28:1024]), "the rest of the header is zero")
    at, tokens = 1024, []
    for _ in range(n):
        tokens.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    expect(tokens[:-1] == [tokenizer.decode_single_token_bytes(i) for i in range(n - 1)]
           and tokens[eot] == EOT.encode(), "tokens in order of their ids")
    ranges = np.frombuffer(data[at:], "<u4").reshape(-1, 2)
    expect(len(ranges) == letters + numbers + spaces, "nothing follows the last range")
    inside, bytes_only = {}, {bytes([b]): b for b in range(256)}
    for name, pattern, part in zip("LNS", (r"\p{L}", r"\p{N}", r"\s"),
                                   np.split(ranges, [letters, letters + numbers])):
        expect((part[:, 0] <= part[:, 1]).all() and (part[1:, 0] > part[:-1, 1] + 1).all(),
               f"{name}: ascending, disjoint and as few as can be")
        inside[name] = {c for first, last in part.tolist() for c in range(first, last + 1)}
        judge = tiktoken.Encoding("one class", pat_str=pattern, mergeable_ranks=bytes_only,
                                      special_tokens={})
        points = ({c for first, last in ranges.tolist() for c in (first - 1, first, last, last + 1)}
                  | set(random.Random(1).sample(range(0x110000), 3000)))
        wrong = [c for c in points if not 0xD800 <= c < 0xE000
                 and (c in inside[name]) != bool(judge.encode_ordinary(chr(c)))]
        expect(not wrong, f"{name}: {wrong[:5]} on the wrong side")
    expect(inside["S"] == {*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028,
                           0x2029, 0x202F, 0x205F, 0x3000}, "white space as Unicode has it")
    run("tokenizer", "--vocab", vocab, "--out", scratch)
    expect((scratch / "tokenizer.bin").read_bytes() == data, "into a folder")


def test_vocabulary():
    """Which files are a tokenizer; GPT-2's is downloaded beside the program."""
    bad = fresh("bad vocabulary")
    expect_refusal(run("tokenizer", "--vocab", bad), "found nothing there", "OWNER/NAME")
    bad.mkdir()
    expect_refusal(run("tokenizer", "--vocab", bad), "expected tokenizer.json", "found none")
    shutil.copy(vocab / "vocab.bpe", bad)
    (bad / "encoder.json").write_text('{"a": 0}')
    expect_refusal(run("tokenizer", "--vocab", bad), "expected a tokenizer, found", "one model")
    (bad / "encoder.json").write_text("[")
    expect_refusal(run("tokenizer", "--vocab", bad), "expected a tokenizer, found")
    shutil.copy(vocab / "encoder.json", bad)
    expect(run("tokenizer", "--vocab", bad, "--out", scratch / "t.bin")[0] == 0, "good files")
    other = fresh("other names")
    other.mkdir()
    shutil.copy(vocab / "encoder.json", other / "vocab.json")
    shutil.copy(vocab / "vocab.bpe", other / "merges.txt")
    expect(run("tokenizer", "--vocab", other, "--out", scratch / "u.bin")[0] == 0
           and (scratch / "u.bin").read_bytes() == (scratch / "t.bin").read_bytes(), "other names")
    expect_refusal(run("tokenizer", "--vocab", other, "--separator", "<s>"), "found none of <s>",
                   "--separator")
    expect_refusal(run("tokenizer", "--separator", "<s>"), "expected --vocab with --separator")
    huge = fresh("huge ids")
    huge.mkdir()
    for ids in ({"a": 1 << 24, "b": 0}, {}):
        (huge / "tokenizer.json").write_text(json.dumps(
            {"version": "1.0", "added_tokens": [],
             "model": {"type": "WordLevel", "vocab": ids, "unk_token": "b"}}))
        expect_refusal(run("--vocab", huge, "--out", fresh("x"), __file__),
                       "expected ids of tokens")
    (other / "tokenizer.json").write_text("{}")
    expect_refusal(run("tokenizer", "--vocab", other), "expected a tokenizer, found")
    # without --vocab: downloaded beside the program, and checked each time
    here, get.HERE = get.HERE, str(fresh("here"))
    Handler.behaviour["/vocab.bpe"] = [("cut", 100)]
    expect(run("tokenizer", "--out", scratch / "u.bin")[0] == 0 and (scratch / "u.bin").read_bytes()
           == (scratch / "t.bin").read_bytes(), "downloaded")
    asked = len(Handler.log)
    expect(run("tokenizer", "--out", scratch / "u.bin")[0] == 0 and len(Handler.log) == asked,
           "and not a second time")
    pathlib.Path(get.HERE, "gpt2", "vocab.bpe").write_text("#version: 0.2\n")
    expect(run("tokenizer", "--out", scratch / "u.bin")[0] == 0 and len(Handler.log) == asked + 1,
           "what is damaged comes again")
    shutil.rmtree(get.HERE)
    Handler.behaviour["/encoder.json"] = [("corrupt",)] * 3
    expect_refusal(run("tokenizer", "--out", scratch / "v.bin"), "checksum", "the part is deleted")
    expect(not (scratch / "v.bin").exists()
           and not list(pathlib.Path(get.HERE, "gpt2").glob("encoder*")), "nothing false stays")
    get.HERE = here


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
          r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
KINDS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "smollm2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "llama2": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
}


def learn(kind, folder, size=500):
    """A tokenizer.json of that kind, learned from words."""
    learned = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "llama2",
                                              unk_token="<unk>" if kind == "llama2" else None))
    learned.pre_tokenizer = KINDS[kind]
    learned.decoder = decoders.ByteLevel()
    learned.normalizer = normalizers.NFC() if kind == "llama3" else None
    special = ["<unk>", "<s>", "</s>"] if kind == "llama2" else ["<|begin|>", "<|end_of_text|>"]
    learned.train_from_iterator([words("learn", 20000)], trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special, show_progress=False))
    if kind in ("llama3", "llama2"):
        learned.post_processor = tokenizers.processors.TemplateProcessing(
            f"{special[-2]} $A", special_tokens=[(special[-2], learned.token_to_id(special[-2]))])
    folder.mkdir(parents=True, exist_ok=True)
    learned.save(str(folder / "tokenizer.json"))
    return learned


def test_kinds():
    """Every kind of tokenizer.json: the tokens of a long text cut into pieces are those of the
    whole; what its tokenizer.bin can do is said."""
    text, source = "".join(words(seed, 3000) + "\nend. " for seed in range(5)), fresh("text")
    source.write_bytes(text.encode())
    for kind in KINDS:
        folder, out = fresh(f"kind {kind}"), fresh("out")
        judge = learn(kind, folder)
        judge.encode_special_tokens = True
        before = {"llama3": "<|begin|>", "llama2": "<s>"}.get(kind, "<|end_of_text|>")
        status, said = run("--vocab", folder, "--val-fraction", 0, "--out", out, source)
        expect(status == 0, said)
        got = np.fromfile(next(out.glob("*train*")), "<u2", offset=1024).tolist()
        want = judge.encode(text, add_special_tokens=False).ids
        expect(got == [judge.token_to_id(before), *want],
               f"{kind}: {len(got)} tokens, expected {len(want) + 1}")
        cuttable = kind not in ("prefix", "llama2")
        learned = vocabulary.Learned(str(folder))
        expect(learned.cuttable == cuttable, f"{kind}: {learned.cuttable}")
        expect((out / "tokenizer.bin").exists(), f"{kind}: tokenizer.bin")
        version = int(np.fromfile(out / "tokenizer.bin", "<u4", 2)[1])
        expect(version == 3, f"{kind}: special tokens keep their names, found version {version}")
        refused = kind in ("prefix", "llama2")             # whose words have no tokens of bytes
        expect(("--prompt will be refused" in said) == refused, f"{kind}: {said}")
        header = np.fromfile(next(out.glob("*train*")), "<i4", 5)
        expect(header[4] == (0 if kind == "llama2" else len(text.encode()))
               or kind in ("llama3", "prefix"), f"{kind}: bytes {header[4]}")
        if not cuttable:
            texts.WHOLE, whole = 1000, texts.WHOLE
            expect_refusal(run("--vocab", folder, "--val-fraction", 0, "--out", fresh("x"), source),
                           "expected a document of at most 1000 bytes", "JSONL")
            texts.WHOLE = whole
    learned = vocabulary.Learned(str(scratch / "kind gpt2"), "<|begin|>")
    expect(learned.separator == 0 and len(learned.encode(["a <|begin|> b"])[0]) > 5,
           "--separator, and names of special tokens in a text are text")
    beside = scratch / "kind gpt2/tokenizer_config.json"
    beside.write_text('{"eos_token": {"content": "<|begin|>"}}')
    learned = vocabulary.Learned(str(scratch / "kind gpt2"))
    expect(learned.tokens[learned.separator] == b"<|begin|>", "eos of tokenizer_config.json")
    for damaged in ('{"eos_token"', "[]"):
        beside.write_text(damaged)
        expect_refusal(run("tokenizer", "--vocab", scratch / "kind gpt2"), "expected", "  -> ")
    beside.unlink()
    config = json.loads((scratch / "kind llama2/tokenizer.json").read_text())
    config["added_tokens"].append({"id": len(config["model"]["vocab"]), "content": "long" * 64,
                                   "single_word": False, "lstrip": False, "rstrip": False,
                                   "normalized": False, "special": True})
    (scratch / "kind llama2/tokenizer.json").write_text(json.dumps(config))
    expect_refusal(run("tokenizer", "--vocab", scratch / "kind llama2", "--out", scratch / "l.bin"),
                   "expected tokens of at most 255 bytes", "without it: --data works")
    expect(not (scratch / "l.bin").exists(), "and no file")


def test_wide():
    """A vocabulary of more than 65,536 tokens: shards and task files of uint32."""
    folder, out, many = fresh("wide vocabulary"), fresh("wide"), 70000
    folder.mkdir()
    table = json.loads((vocab / "encoder.json").read_text())
    table = {**table, **{f"{i:x}/": len(table) + i for i in range(many)}}
    (folder / "encoder.json").write_text(json.dumps(table))
    shutil.copy(vocab / "vocab.bpe", folder)
    text = fresh("text")
    text.write_text(words(6, 3000))
    status, said = run("--vocab", folder, "--out", out, "--val-fraction", 0, text)
    header = np.fromfile(out / "text_train_000000.bin", "<i4", 4).tolist()
    tokens = np.fromfile(out / "text_train_000000.bin", "<u4", offset=1024).tolist()
    expect(status == 0 and header == [20240801, 7, len(tokens), len(table)]
           and tokens == encode(text.read_bytes().decode()), f"{header} {said}")
    rows, shots = read_rows()
    learned = vocabulary.Learned(str(folder))
    narrow = vocabulary.Learned(str(vocab))
    for name in ("piqa", "mmlu"):
        wide, few = (np.frombuffer(tasks.eval_file(name, rows[name], v, shots)[0][1024:], kind)
                     for v, kind in ((learned, "<u4"), (narrow, "<u2")))
        size = np.flatnonzero(wide == 65535) + 1
        same = np.array(wide)
        same[size] //= 2
        expect((same == few).all(), f"{name}: the same numbers, twice as wide")
    data = tasks.eval_file("piqa", rows["piqa"], learned)[0]
    expect(np.frombuffer(data, "<i4", 2).tolist() == [20240522, 2], "version 2")
    data = np.frombuffer(tasks.text_file(rows["wikitext"], learned)[0], "<i4", 4).tolist()
    expect(data[:2] == [20240801, 7] and data[3] == len(table), "text")


def test_local_text():
    source, out = fresh("my text"), fresh("my shards")
    contents = {"a b.txt": words(1, 3000), "deep/er/z.txt": words(2, 500),
             "deep/one.md": f"before {EOT} after\r\nwith CRLF\r\n", "täxt": "x",
             "tabs.txt": "\n \n\t\n   " * 50, "long.txt": "a" * 3000 + "é" * 500}
    for name, text in contents.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(text.encode())
    (source / "empty").touch()
    (source / ".hidden").write_text("hidden")
    (source / "latin1").write_bytes(b"caf\xe9 au lait")
    (source / "cut off").write_bytes("é".encode()[:1])
    (source / "surrogate").write_bytes(b"\xed\xa0\x80")
    (source / "binary").write_bytes(b"text\0text")
    (source / os.fsdecode(b"bad\xffname")).write_bytes(b"\xff")
    (source / "loop").symlink_to(source)
    (source / "deep" / "up").symlink_to("..")
    (source / "dangling").symlink_to("nowhere")
    (source / "linked").symlink_to("a b.txt")
    os.mkfifo(source / "pipe")
    status, said = run("--vocab", vocab, "--out", out, "--val-fraction", 0, source)
    expect(status == 0, said)
    order = ["a b.txt", "long.txt", "tabs.txt", "täxt", "deep/one.md", "deep/er/z.txt"]
    expect(shards(out, "train") == encode(*(contents[name] for name in order)),
           "every document, with its separator before it")
    expect("6 files, " in said and "6 files skipped" in said, said)
    for word in ("latin1: not UTF-8", "cut off: not UTF-8", "surrogate: not UTF-8",
                 "binary: a NUL byte", "empty: empty", "bad\\udcffname: not UTF-8"):
        expect(word in said, f"it says {word}")
    expect(tokenizer.decode(shards(out, "train"))
           == "".join(EOT + contents[name] for name in order), "it decodes to the text")
    expect(not list(out.glob("*val*")) and sorted(p.name for p in out.iterdir())
           == ["get.json", "text_train_000000.bin", "tokenizer.bin"], "nothing else is there")
    expect(f"./train_gpt --data '{out}/*_train_*.bin'" in said
           and f"train  {len(shards(out, 'train'))} tokens" in said,
           "the end tells the next command and the tokens")
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("*.bin")}
    status, said = run("--vocab", vocab, "--out", out, "--val-fraction", 0, source)
    expect(status == 0 and "complete" in said and "skipped" not in said and before
           == {p.name: p.stat().st_mtime_ns for p in out.glob("*.bin")}, "again: complete")
    inner = source / "out"                                 # the output within the input is not read
    expect(run("--vocab", vocab, "--out", inner, "--val-fraction", 0, source)[0] == 0
           and run("--vocab", vocab, "--out", inner, "--val-fraction", 0, source)[0] == 0, "inside")
    expect(shards(inner, "train") == shards(out, "train"), "the same from within")
    shutil.rmtree(inner)
    expect(run("--vocab", vocab, "--out", out, "--val-fraction", 0, source)[0] == 0,
           "still the same text")
    (source / "täxt").write_text("y")  # the same size
    expect_refusal(run("--vocab", vocab, "--out", out, "--val-fraction", 0, source),
                   "found another", "begin again")
    expect(run("--vocab", vocab, "--out", fresh("link"), "--val-fraction", 0, source / "linked")[0]
           == 0 and shards(scratch / "link", "train") == encode(contents["a b.txt"]),
           "a named link")
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), source / "latin1"),
                   "expected text, found none")
    read, texts_read = texts.Range.read, (source / "a b.txt").read_bytes()
    texts.Range.read = lambda *rest: (
        (source / "a b.txt").write_text("shorter now"), read(*rest))[1]
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), source / "a b.txt"),
                   "found that it has changed")
    texts.Range.read = read
    (source / "a b.txt").write_bytes(texts_read)
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), source / "nothing"),
                   "found nothing of the kind", "tinystories")
    expect(not (scratch / "x").exists(), "a mistyped path leaves nothing behind")
    expect_refusal(run("--vocab", vocab, "--out", scratch / "x", source / "latin1"), "found none")
    expect(not (scratch / "x").exists(), "nor does a text that is refused")
    expect(run("--vocab", vocab, "--out", scratch / "x", source / "long.txt", "--shard-tokens",
               50)[0] == 0, "another later")


def test_jsonl():
    """Lines of JSON are documents like rows of Parquet and files; whole JSON is read as text, and
    that is said."""
    folder, column = fresh("jsonl"), ("--column", "body", "--val-fraction", 0.5, "--vocab", vocab)
    folder.mkdir()
    documents = [words(i, 30 * i + 1) for i in range(12)] + ["é\u2028\n", "\ud83d\ude00 \"q\""]
    documents[-1] = documents[-1].encode("utf-16", "surrogatepass").decode("utf-16")
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(documents)]
    lines[3:3] = ["", json.dumps({"body": None}), json.dumps({"body": ""})]
    data = "\n".join(lines).encode()                       # no newline at the end
    zipped = {"a.jsonl": data, "a.ndjson": data, "a.json": data, "a.jsonl.gz": gzip.compress(data),
              "a.jsonl.zst": pyarrow.compress(data, "zstd", asbytes=True)}
    for name, content_of in zipped.items():
        for path in folder.iterdir():
            path.unlink()
        (folder / name).write_bytes(content_of)
        status, said = run(*column, "--out", fresh("out"), folder)
        expect(status == 0 and "JSON" not in said, f"{name}: {said}")
        train, val = shards(scratch / "out", "train"), shards(scratch / "out", "val")
        expect(train + val == encode(*documents), f"{name}: every line is a document")
        expect(val[0] == tokenizer.eot_token and len(val) > 100, f"{name}: cut between documents")
    expect_refusal(run(*column[2:], "--out", fresh("x"), folder), "line 1", "column text",
                   "found the columns id, body", "--column")
    expect(not (scratch / "x").exists(), "nothing stays")
    for wrong, parts in ((b'{"body": 1}', ("line 2", "body: int")), (b'[1]', ("line 2", "list")),
                         (b'{"body": "a"', ("line 2",)), (b'{"body": "\xff"}', ("line 2",)),
                         (b'{"body": "\\ud800"}', ("line 2", "surrogates"))):
        (folder / "b.jsonl").write_bytes(b'{"body": "good"}\n' + wrong + b"\n")
        expect_refusal(run(*column, "--out", fresh("x"), folder / "b.jsonl"), "b.jsonl", *parts)
    (folder / "b.jsonl").unlink()
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(data)[:-200])
    expect_refusal(run(*column, "--out", fresh("x"), folder / "c.jsonl.gz"), "c.jsonl.gz: line")
    (folder / "c.jsonl.gz").unlink()
    for name, body, is_said in (("whole.json", '{\n "a": [1, 2]\n}\n', True),
                                ("list.json", "[1, 2]", True),
                                ("other.json", '{"name": "x", "version": 1}\n', True),
                                ("lines.txt", '{"body": "a"}\n{"body": "b"}\n', True),
                                ("brace.txt", "{ is a brace\n", False)):
        path = folder / name
        path.write_text(body)
        status, said = run("--vocab", vocab, "--val-fraction", 0, "--out", fresh("out"), path)
        expect(status == 0 and shards(scratch / "out", "train") == encode(body), f"{name}: {said}")
        expect(("JSON, read as plain text" in said) == is_said, f"{name}: {said}")


def test_val():
    """--val names the text for validation; what is named is not trained on."""
    folder = fresh("named")
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / name).write_text(words(name, 300))
    text = {path.name: path.read_bytes().decode() for path in folder.iterdir()}
    status, said = run("--vocab", vocab, "--out", fresh("out"), folder, "--val", folder / "b")
    expect(status == 0 and shards(scratch / "out", "train") == encode(text["a"], text["c"])
           and shards(scratch / "out", "val") == encode(text["b"]), said)
    expect(run("--vocab", vocab, "--out", fresh("out"), folder / "a", "--val", folder / "b",
               "--val", folder / "c")[0] == 0 and shards(scratch / "out", "val")
           == encode(text["b"], text["c"]), "repeated")
    expect(run("--vocab", vocab, "--out", fresh("out"), folder, "--val-fraction", 1)[0] == 0
           and shards(scratch / "out", "val") == encode(*map(text.get, "abc"))
           and not list((scratch / "out").glob("*train*")), "all of it")
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), folder / "a", "--val", folder / "b",
                       "--val-fraction", "0.1"), "either --val PATH or --val-fraction")
    expect_refusal(run("tinystories", "--val", folder / "b"), "with your own files")
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), folder / "a", "--val", folder / "d"),
                   "found nothing of the kind")
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), folder / "a", "--val", folder / "a"),
                   "expected files for training beside those of --val", "--val-fraction 0.1")
    (folder / "nothing.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), folder / "nothing.jsonl",
                       "--val-fraction", 0), "expected two tokens or more for train")
    expect(not (scratch / "x").exists(), "nothing stays")


def test_next():
    """The last line of every kind of folder is a command that works."""
    root, text = pathlib.Path(REAL["HERE"]).parent, fresh("some text")
    program = subprocess.run(["make", "-s", "binary", "NORM_MODE=PRE", "DEVICE=cpu"], cwd=root,
                             capture_output=True, text=True, check=True).stdout.strip()
    text.write_text(words(7, 20000))
    short = fresh("short text")
    short.write_text(words(8, 150))
    small = "--layers 1 --steps 1 --warmup 0 --batch 1 --sample 4 --out".split()
    learn("llama3", scratch / "next vocabulary", 600)
    for name, args in (("both", (text,)), ("no val", (text, "--val-fraction", 0)),
                       ("short", (short,)), ("few", (text, "--tokens", 2)),
                       ("val", (text, "--val-fraction", 1))):
        for k, kind in enumerate((vocab, scratch / "next vocabulary")):
            out = scratch / f"next {name} {k}"
            said = run("--vocab", kind, "--out", out, *args)[1]
            command = re.search(r"next: ./train_gpt (.*)", said)[1]
            command = command.replace("RUN", shlex.quote(str(scratch / f"run both {k}")))
            flags = [] if name == "val" else [*small, str(scratch / f"run {name} {k}")]
            done = subprocess.run([root / program, *shlex.split(command), *flags], cwd=root,
                                  capture_output=True, text=True, errors="replace")
            expect(done.returncode == 0 and ("no tokenizer.bin" not in done.stdout),
                   f"{name}: {command}: {done.stdout[-500:]}{done.stderr[-500:]}")


def test_white_space():
    """By the megabyte it is too much for tiktoken's GPT-2."""
    texts.PIECE = PIECE
    long = fresh("long")
    long.write_text("word" + " " * 2500000 + "end")
    expect_refusal(run(long, "--out", fresh("out")), "what tiktoken can cut", "white space")


def test_splits():
    source = fresh("split")
    source.mkdir()
    for seed in range(30):
        r = random.Random(seed)
        contents = [words(f"{seed} {i}", r.randrange(1, 200)) for i in range(r.randrange(1, 6))]
        for path in source.iterdir():
            path.unlink()
        for i, text in enumerate(contents):
            (source / f"{i}.txt").write_bytes(text.encode())
        fraction, largest = r.choice([0.1, 0.5, 0.77]), r.choice([7, 100, 10 ** 8])
        out = fresh("split out")
        status, said = run("--vocab", vocab, "--out", out, "--val-fraction", fraction,
                           "--shard-tokens", largest, source)
        data = "".join(contents).encode()
        cut = int(len(data) * (1 - fraction))
        while cut < len(data) and data[cut] & 0xC0 == 0x80:
            cut += 1
        if cut in (0, len(data)):
            expect_refusal((status, said), "expected text for both splits")
            continue
        want, begin = {"train": [], "val": []}, 0
        for text in contents:
            body = text.encode()
            head, tail = body[:max(0, cut - begin)], body[max(0, cut - begin):]
            want["train"] += [head.decode()] if head else []
            want["val"] += [tail.decode()] if tail else []
            begin += len(body)
        for split in want:
            expect(shards(out, split) == encode(*want[split]), f"seed {seed}: {split}")
            sizes = [(path.stat().st_size - 1024) // 2 for path in sorted(out.glob(f"*_{split}_*"))]
            expect(all(size == largest for size in sizes[:-1]) and 0 < sizes[-1] <= largest,
                   f"seed {seed}: full shards {sizes}")
    few = fresh("few")
    expect(run("--vocab", vocab, "--out", fresh("all"), "--val-fraction", 0.5, source)[0] == 0,
           "unlimited")
    train, val = shards(scratch / "all", "train"), shards(scratch / "all", "val")
    for limit in (2, 6, 7, 8, 50):
        expect(run("--vocab", vocab, "--out", fresh("few"), "--tokens", limit, "--shard-tokens", 7,
                   "--val-fraction", 0.5, source)[0] == 0, "limited")
        expect(shards(few, "train") == train[:limit] and shards(few, "val") == val and len(val) > 8,
               f"--tokens {limit}")


def test_boundaries():
    """A cut at a boundary changes no token: every boundary of hostile text, in both halves, for
    every kind that may be cut."""
    kinds = {"tiktoken": tokenizer.encode_ordinary}
    for kind in ("gpt2", "llama3", "smollm2"):
        learned = learn(kind, fresh("boundary"))
        kinds[kind] = lambda text, t=learned: t.encode(text, add_special_tokens=False).ids
    cuts = 0
    for seed in range(60):
        r = random.Random(seed)
        text = "".join(r.choice(["a", "B", "1", " ", " ", "\n", "\n", "\n", "\t", "\r", "'", "s",
                                 "!", "é", "日", "あ", "\u3000", "\u00a0", "\u2003", "\u1680",
                                 "\u180e", "ሀ", "€", "👍", "\x85", "\x1c", "\u0301", "。", "٣"])
                       for _ in range(400))
        data = text.encode()
        for name, judge in kinds.items():
            whole = judge(text)
            for match in texts.BOUNDARY.finditer(data):
                cuts += 1
                halves = data[:match.start()].decode(), data[match.start():].decode()
                if judge(halves[0]) + judge(halves[1]) != whole:
                    expect(False, f"{name} {seed}: a cut before {halves[1][:5]!r} changes tokens")
                    return
    expect(cuts > 1000, f"all {cuts} cuts are safe")
    # whatever the pieces, whatever arrives at once, the bytes are all there
    for size in (1, 2, 3, 10, 100, 4096):
        texts.PIECE = size
        data = words("cut", 3000).encode() + b"x" * 500 + EOT.encode() * 3
        for boundary in (texts.BOUNDARY, texts.SEPARATOR, None):
            for step in (1, 7, 5000):
                pieces = list(texts.cut((data[i:i + step] for i in range(0, len(data), step)),
                                        boundary, 10))
                expect(b"".join(piece for _, piece in pieces) == data
                       and all(at == 10 + sum(len(p) for _, p in pieces[:i])
                               for i, (at, _) in enumerate(pieces)), f"cut {size} {step}")
                expect(all(boundary is None or boundary.match(data, at - 10) or at == 10
                           for at, piece in pieces)
                       and (size == 4096 or len(pieces) > 1) == (boundary is not None
                                                                 or size == 4096),
                       f"pieces begin at boundaries {size} {step}")


BETWEEN = f"\n{EOT}\n"
STORIES = {
    "TinyStoriesV2-GPT4-train.txt":
        ("\n" + BETWEEN.join(words(f"story {i}", 20 + i) for i in range(60)) + BETWEEN).encode(),
    "TinyStoriesV2-GPT4-valid.txt":
        BETWEEN.join(words(f"valid {i}", 50) for i in range(8)).encode()}


def stories_reference(name):
    return [tokenizer.eot_token, *tokenizer.encode(STORIES[name].decode(), allowed_special={EOT})]


def expect_stories(out, why):
    expect(shards(out, "train") == stories_reference("TinyStoriesV2-GPT4-train.txt"),
           f"{why}: train")
    expect(shards(out, "val") == stories_reference("TinyStoriesV2-GPT4-valid.txt"), f"{why}: val")


def test_tinystories():
    publish_dataset("roneneldan/TinyStories", STORIES)
    out, file = fresh("stories"), "/storage/TinyStoriesV2-GPT4-train.txt"
    status, said = run("tinystories", "--vocab", vocab, "--out", out, "--shard-tokens", 300)
    expect(status == 0, said)
    expect_stories(out, "unbroken")
    expect(tokenizer.decode(shards(out, "train"))[len(EOT):].encode()
           == STORIES["TinyStoriesV2-GPT4-train.txt"], "it decodes to the file")
    unbroken, asked = content(out), len(Handler.log)
    expect(run("tinystories", "--vocab", vocab, "--out", out, "--shard-tokens", 300)[0] == 0
           and len(Handler.log) == asked, "complete without a request")
    size = len(STORIES["TinyStoriesV2-GPT4-train.txt"])
    for k in (0, 1, 13, 999, 1000, 1001, size // 2, size - 1):
        for kind in ("cut", "reset"):
            Handler.behaviour[file] = [(kind, k)]
            status, said = run("tinystories", "--vocab", vocab, "--out", fresh("stories"),
                               "--shard-tokens", 300)
            expect(status == 0 and content(out) == unbroken,
                   f"{kind} at byte {k}: {said}")
    Handler.behaviour[file] = [("cut", 110)] * 100
    expect(run("tinystories", "--vocab", vocab, "--out", fresh("stories"), "--shard-tokens",
               300)[0] == 0 and content(out) == unbroken, "cut again and again")
    Handler.behaviour[file] = [("corrupt",)] * 2
    expect_refusal(run("tinystories", "--vocab", vocab, "--out", fresh("stories"), "--shard-tokens",
                       300), "with checksum", "part is deleted")
    expect(not list(out.glob("*train*")) and list(out.glob("*val*")), "good shards stay")
    expect(run("tinystories", "--vocab", vocab, "--out", out, "--shard-tokens", 300)[0] == 0
           and content(out) == unbroken, "and the same command continues")
    expect(not (out / hub.PARTS).exists(), "the text does not stay")
    expect(run("tinystories", "--vocab", vocab, "--out", fresh("stories"), "--shard-tokens", 300,
               "--tokens", 700)[0] == 0, "--tokens")
    expect(shards(out, "train") == stories_reference("TinyStoriesV2-GPT4-train.txt")[:700]
           and len(list(out.glob("*train*"))) == 3, "no more than asked for")
    expect_refusal(run("tinystories", "--vocab", vocab, "--out", out, "--shard-tokens", 300),
                   "--tokens 700, now None", "earlier settings")
    expect_refusal(run("tinystories", "--vocab", vocab, "--out", out, "--shard-tokens", 301,
                       "--tokens", 700), "--shard-tokens 300, now 301")
    other = fresh("stories vocabulary")
    judge = learn("smollm2", other)
    judge.encode_special_tokens = True
    expect(run("tinystories", "--vocab", other, "--out", fresh("stories"))[0] == 0, "another")
    got = np.fromfile(next(out.glob("*train*")), "<u2", offset=1024).tolist()
    parts = STORIES["TinyStoriesV2-GPT4-train.txt"].decode().split(EOT)
    expect(got == [token for part in parts for token in
                   (1, *judge.encode(part, add_special_tokens=False).ids)],
           "the words <|endoftext|> are the separator of any vocabulary")
    Handler.files[file] = Handler.files[file].replace(b" ", b"\xff", 1)
    publish_dataset("roneneldan/TinyStories",
                    {**STORIES, "TinyStoriesV2-GPT4-train.txt": Handler.files[file]})
    expect_refusal(run("tinystories", "--vocab", vocab, "--out", fresh("stories")),
                   "expected UTF-8 text, found not UTF-8")
    publish_dataset("roneneldan/TinyStories", {"TinyStoriesV2-GPT4-train.txt": b"x"})
    expect_refusal(run("tinystories", "--vocab", vocab, "--out", fresh("stories")),
                   "TinyStoriesV2-GPT4-valid.txt", "HF_ENDPOINT")
    expect(not (scratch / "stories").exists(), "nothing empty stays")
    publish_dataset("roneneldan/TinyStories", STORIES)


def test_kept_shards():
    """Shards on disk that do not have the size of what was written are written again."""
    publish_dataset("roneneldan/TinyStories", STORIES)
    args = ("tinystories", "--vocab", vocab, "--out", fresh("kept"), "--shard-tokens", 300)
    out = args[4]
    run(*args)
    unbroken = content(out)
    for damage in (lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-2]),
                   lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"\0" * p.stat().st_size)):
        damage(sorted(out.glob("*train*"))[2])
        status, said = run(*args)
        expect(status == 0 and "written again" in said and content(out) == unbroken,
               f"a damaged shard: {said}")
    few = ("tinystories", "--vocab", vocab, "--out", fresh("kept few"), "--shard-tokens", 300,
           "--tokens", 1000)
    run(*few)
    before = content(few[4])
    sorted(few[4].glob("*train*"))[2].unlink()
    expect(run(*few)[0] == 0 and content(few[4]) == before, "--tokens counts what is there")
    # as if killed after the third shard
    state = json.loads((out / "get.json").read_text())
    state["complete"] = False
    names = [name for name in sorted(state["shards"]) if "train" in name]
    for name in names[3:]:
        del state["shards"][name]
        (out / name).unlink()
    (out / "get.json").write_text(json.dumps(state))
    expect(run(*args)[0] == 0 and content(out) == unbroken, "it goes on behind the third")
    changed = {**STORIES, "TinyStoriesV2-GPT4-train.txt": STORIES["TinyStoriesV2-GPT4-train.txt"]
               + b"more"}
    (out / names[-1]).unlink()
    publish_dataset("roneneldan/TinyStories", changed)
    expect_refusal(run(*args), "found another", "begin again")
    publish_dataset("roneneldan/TinyStories", STORIES)


def ready_shards(names, vocab=0):
    files = {}
    for i, name in enumerate(names):
        header = np.zeros(256, "<i4")
        header[:4] = [20240520, 1, 500 + i, vocab]
        tokens = np.random.default_rng(i).integers(0, 500, 500 + i).astype("<u2")
        files[name] = header.tobytes() + tokens.tobytes()
    return files


FINEWEB = ready_shards(["fineweb_val_000000.bin"]
                       + [f"fineweb_train_{i:06d}.bin" for i in range(1, 14)])


def test_ready_shards():
    publish_dataset("kjj0/fineweb10B-gpt2", FINEWEB, page=4)
    out, file = fresh("web"), "/storage/fineweb_train_000002.bin"
    args = ("fineweb", "--out", out, "--shards", 3)
    three = {name: data for name, data in FINEWEB.items() if name < "fineweb_train_000004.bin"
             or "val" in name}
    bins = lambda: {name: data for name, data in content(out).items()
                    if name not in ("tokenizer.bin", "get.json")}
    status, said = run(*args)
    expect(status == 0 and bins() == three, said)
    expect("train  1506 tokens" in said and "val    500 tokens" in said
           and "--model gpt2-124M" in said, said)
    asked = len(Handler.log)
    expect(run(*args)[0] == 0 and len(Handler.log) == asked, "complete without a request")
    expect(run(*args[:-1], 5)[0] == 0 and len(bins()) == 6, "more of them later")
    (out / "fineweb_train_000002.bin").write_bytes(b"damaged")
    expect(run(*args[:-1], 5)[0] == 0 and bins()["fineweb_train_000002.bin"]
           == FINEWEB["fineweb_train_000002.bin"], "a damaged one comes again")
    expect(run("fineweb", "--out", fresh("web"))[0] == 0 and len(bins()) == 11,
           "10 by default")
    expect_refusal(run(*args[:-1], 20), "expected fineweb_train_000014.bin", "found 13",
                   "--shards 13")
    size = len(FINEWEB["fineweb_train_000002.bin"])
    for behaviour in ([("cut", 0)], [("cut", 1)], [("cut", size // 2)], [("reset", 300)],
                      [("cut", size - 1)], [("cut", 50)] * 30, [("status", 503), ("status", 500)],
                      [("status", 429, {"Retry-After": "7"})], [("cut", 700), ("no ranges",)],
                      [("cut", 700), ("no etag",)], [("cut", 700), ("wrong range",)],
                      [("hang", 600)], [("garbage",)], [("wrong length", 5)], [("corrupt",)],
                      [("cut", 700), ("no ranges",), ("cut", 800), ("cut", 10)],
                      [("no etag",), ("cut", 100)], [("cut", 700), ("status", 408)]):
        Handler.behaviour[file] = list(behaviour)
        waits.clear()
        fresh("web")
        begin = time.monotonic()
        status, said = run(*args)
        expect(status == 0 and bins() == three, f"{behaviour}: {said}")
        expect(behaviour[0][0] != "hang" or time.monotonic() - begin < 10 * TIMEOUT,
               "a server that hangs is left")
        if behaviour[0][0] == "status":
            expect(waits == ([8.0] if behaviour[0][1] == 429 else [1.0, 2.0]), f"waits {waits}")
    Handler.behaviour[file] = [("cut", 700)]
    fresh("web")
    run(*args)
    asked = [headers for path, headers in Handler.log if path == file][-1]
    asked = {name.lower(): value for name, value in asked.items()}
    expect(asked.get("range") == "bytes=700-", f"it asks for the rest: {asked}")
    for behaviour, parts in (([("status", 404)], ("404", "same command")),
                             ([("status", 403)], ("403", "HF_TOKEN")),
                             ([("status", 503)] * 20, ("503",)),
                             ([("cut", 0)] * 60, ("same command",)),
                             ([("corrupt",)] * 2, ("checksum", "part is deleted"))):
        Handler.behaviour[file] = list(behaviour)
        fresh("web")
        waits.clear()
        expect_refusal(run(*args), *parts)
        expect(len(waits) <= 40 and not (out / "fineweb_train_000002.bin.part").exists()
               or behaviour[0][0] != "corrupt", "it gives up, and keeps nothing false")
        Handler.behaviour[file] = []
        expect(run(*args)[0] == 0 and bins() == three, "the same command continues")
    Handler.files[file] += b"x"
    expect_refusal(run("fineweb", "--out", fresh("web"), "--shards", 3), "checksum",
                   "part is deleted")
    Handler.files[file] = Handler.files[file][:300]
    (out / "fineweb_train_000002.bin.part").write_bytes(FINEWEB["fineweb_train_000002.bin"][:700])
    expect_refusal(run(*args), "same command")
    publish_dataset("kjj0/fineweb10B-gpt2", FINEWEB, page=4)


def read_rows():
    """The rows of tasks.jsonl: by task, and those that prompts quote. MMLU has three splits."""
    rows, shots = {name: [] for name in tasks.TASKS}, []
    for line in (pathlib.Path(__file__).parent / "tasks.jsonl").read_text().splitlines():
        row = json.loads(line)
        task, split = row.pop("task"), row.pop("split", "")
        if task != "mmlu":
            rows[task].append(row)
        elif split == "dev":
            shots.append(row)
        else:
            names = ("mmlu_var",) if split == "validation" else ("mmlu", "mmlu_continuation")
            for name in names:
                rows[name].append(row)
    return rows, shots


def publish_tasks():
    """The rows as the hub's conversion to Parquet has the datasets; a number for each file, since
    the server knows them by the last part of their path."""
    (rows, shots), published, number = read_rows(), {}, 0
    for name, task in tasks.TASKS.items():
        for split, part in ((task.split, rows[name]), (task.shots, shots)):
            files = published.setdefault(task.repository, {})
            folder = f"{task.config or 'default'}/{split}/"
            if split and not any(path.startswith(folder) for path in files):
                table = io.BytesIO()
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), table)
                files[f"{folder}{number:04d}.parquet"] = table.getvalue()
                files[f"{task.config or 'default'}/train/{100 + number:04d}.parquet"] = b"not this"
                number += 1
    for repository, files in published.items():
        publish_dataset(repository, files, branch="refs%2Fconvert%2Fparquet")
    return rows, shots


def read_examples(path):
    """The examples of a file in llm.c's format: (label, context's text, [(its own context's text,
    completion's text, characters)])."""
    words, header, at, examples = (np.fromfile(path, "<u2", offset=1024).tolist(),
                                   np.fromfile(path, "<i4", 256).tolist(), 0, [])
    longest = 0
    expect(header[:2] == [20240522, 1] and not any(header[5:]), f"{header[:8]}")
    while at < len(words):
        start, size, number, label, choices, n = words[at:at + 6]
        expect(start == 65535 and number == len(examples), f"{words[at:at + 6]}")
        end, at, parts = at + size // 2, at + 6 + n, []
        context = tokenizer.decode(words[at - n:at])
        for _ in range(choices):
            parts.append(words[at + 1:at + 1 + words[at]])
            at += 1 + words[at]
        lengths, own, at = (words[at:at + choices], words[at + choices:at + 2 * choices],
                            at + 2 * choices)
        expect(at == end, f"an example ends at {end}, not at {at}")
        examples.append((label, context,
                         [(tokenizer.decode(part[:k]), tokenizer.decode(part[k:]), length)
                          for part, k, length in zip(parts, own, lengths)]))
        longest = max(longest, size)
    expect(header[2:4] == [len(examples), longest],
           "examples are counted, and the longest measured")
    return examples


def test_tasks():
    (rows, shots), out = publish_tasks(), fresh("tasks")
    parquet = "/storage/0000.parquet"
    Handler.behaviour[parquet] = [("cut", 100), ("status", 503), ("slow", 200)]
    status, said = run("tasks", "--vocab", vocab, "--out", out)
    expect(status == 0 and "hellaswag: 5 examples" in said and "wikitext: 3 documents" in said
           and f"--eval --tasks {out}" in said, said)
    unbroken, own = content(out), vocabulary.Learned(str(vocab))
    expect(all(unbroken[f"{name}.bin"] == tasks.eval_file(name, rows[name], own, shots)[0]
               for name in rows if name != "wikitext") and unbroken["wikitext.bin"]
           == tasks.text_file(rows["wikitext"], own)[0], "files of the rows")
    expect("tokenizer.bin" in unbroken and len(unbroken) == 17 + 17 + 2, f"{sorted(unbroken)}")
    label, context, choices = read_examples(out / "piqa.bin")[1]
    expect(label == 1 and context == "Question: To dry a wet book, \nAnswer:" and choices[0]
           == ("", " put it into the bath overnight.", 31), f"{label} {context!r} {choices}")
    label, context, choices = read_examples(out / "hellaswag.bin")[1]
    expect(context == "Home and Garden: How to plant a tree. Choose a place. It needs light. "
                      "Dig a hole" and choices[2][1] == " Fill it with soup. and wait.",
           f"{context!r} {choices}")
    label, context, choices = read_examples(out / "winogrande.bin")[1]
    expect(label == 1 and context == ""
           and choices == [("Anna lent Maria her coat, since " + who, " was cold.", 9)
                           for who in ("Anna", "Maria")], f"{label} {context!r} {choices}")
    label, context, choices = read_examples(out / "lambada_openai.bin")[4]
    expect(label == 0 and context == "Once upon a time there was a"
           and choices == [("", " dog", 3)], f"{context!r} {choices}")
    header = np.fromfile(out / "wikitext.bin", "<i4", 8).tolist()
    pages = [row["page"] for row in rows["wikitext"]]
    expect(header[4:] == [sum(len(page.encode()) for page in pages),
                          sum(len(re.split(r"\s+", page)) for page in pages), 0, 0],
           f"bytes and words: {header}")
    tokens = np.fromfile(out / "wikitext.bin", "<u2", offset=1024).tolist()
    expect(tokens.count(tokenizer.eot_token) == 3 and tokens[0] == tokenizer.eot_token
           and "a water-mill in the valley of the river. It was built in "
               "1,742 words" in tokenizer.decode(tokens), "documents")
    questions = read_examples(out / "mmlu.bin")
    expect(len(questions) == 4 and questions[0][0] == 0 and questions[0][1].startswith(
        "The following are multiple choice questions (with answers) about anatomy.\n\nWhich bone "
        "is in the arm?\nA. femur\nB. humerus\nC. tibia\nD. sternum\nAnswer: B\n\n")
        and questions[0][1].endswith("a nerve\nD. hair\nAnswer: A\n\nThe tibia is a bone of the\n"
                                     "A. leg\nB. arm\nC. skull\nD. hand\nAnswer:")
        and questions[0][2][1] == ("", " B", 1), f"{questions[0]}")
    variants = read_examples(out / "mmlu_var.bin")
    expect(len(variants) == 7 * len(rows["mmlu_var"])
           and [text.count("Question:") for _, text, _ in variants[:7]] == [1, 1, 2, 3, 4, 5, 6],
           f"{variants[:7]}")
    Handler.log.clear()
    expect(run("tasks", "--vocab", vocab, "--out", out)[0] == 0 and content(out) == unbroken
           and not any("storage" in path for path, _ in Handler.log), "again, from what is there")
    next(out.glob("baber--piqa*")).write_bytes(b"damaged")
    (out / "piqa.bin").unlink()
    expect(run("piqa", "sciq", "--vocab", vocab, "--out", out)[0] == 0 and content(out) == unbroken,
           "some of them, and what is damaged comes again")
    whole = next(out.glob("Rowan--hellaswag*.parquet"))
    whole.unlink()
    pathlib.Path(f"{whole}.part").write_bytes(Handler.files[parquet][:300])
    Handler.log.clear()
    expect(run("hellaswag", "--vocab", vocab, "--out", out)[0] == 0 and content(out) == unbroken
           and any("bytes=300-" in headers.values() for _, headers in Handler.log),
           "goes on with a part")
    other = fresh("other vocabulary")
    make_vocabulary(other, 30)
    expect_refusal(run("piqa", "--vocab", other, "--out", out),
                   "expected the settings this folder was begun with")
    expect_refusal(run("piqa", "--tokens", 5), "a task alone")
    expect_refusal(run("piqa", "tinystories"), "one dataset")
    expect_refusal(run("hellaswg"), "did you mean hellaswag?")
    bad = {"a/validation/0050.parquet": b"", "b/validation/0051.parquet": b""}
    publish_dataset("baber/piqa", bad, branch="refs%2Fconvert%2Fparquet")
    expect_refusal(run("piqa", "--vocab", vocab, "--out", fresh("tasks")),
                   "expected one configuration with the split validation")
    for wrong in ({**rows["sciq"][0], "support": None}, {"question": "?"}):
        table = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([wrong]), table)
        publish_dataset("allenai/sciq", {"default/test/0052.parquet": table.getvalue()},
                        branch="refs%2Fconvert%2Fparquet")
        expect_refusal(run("sciq", "--vocab", vocab, "--out", fresh("tasks")),
                       "expected rows of sciq")
    for wrong in ({**rows["piqa"][0], "label": 2}, {**rows["piqa"][0], "label": -1}):
        try:
            tasks.eval_file("piqa", [wrong], own)
            expect(False, f"label {wrong['label']} is refused")
        except ValueError as error:
            expect("of 2 is right" in str(error), f"{error}")
    try:
        tasks.eval_file("piqa", [{**rows["piqa"][0], "goal": words(8, 300000)}], own)
        expect(False, "an example of more than 65535 bytes is refused")
    except get.Refusal as refusal:
        expect("less than 65536 bytes" in str(refusal), f"{refusal}")
    publish_tasks()
    out = fresh("suite")
    status, said = run("spannorm", "--vocab", vocab, "--out", out)
    marks = {path.stem: int(np.fromfile(path, "<i4", 5)[4]) for path in out.glob("*.bin")
             if path.stem not in ("tokenizer", "wikitext")}
    expect(status == 0 and marks == {"lambada_openai": 1, "piqa": 1, "hellaswag": 2, "sciq": 1,
                                     "arc_challenge": 2, "winogrande": 1}
           and (out / "wikitext.bin").exists() and f"--eval --tasks {out}" in said,
           f"{marks} {said}")
    expect(all(set(suite) <= set(tasks.TASKS) and set(suite.values()) <= set(tasks.METRICS)
               for suite in tasks.SUITES.values()), "suites are of tasks")
    expect_refusal(run("sdd", "--vocab", vocab, "--out", out), "dataset spannorm, now sdd")
    fake = fresh("fake")
    (fake / "pyarrow").mkdir(parents=True)
    (fake / "pyarrow/__init__.py").write_text("raise ModuleNotFoundError('no pyarrow')")
    done = subprocess.run([sys.executable, get.__file__, "piqa", "--vocab", vocab, "--out",
                           fresh("tasks")], env={**os.environ, "PYTHONPATH": str(fake)},
                          capture_output=True, text=True)
    expect_refusal((done.returncode, done.stderr), "expected pyarrow", "pip install pyarrow")


def test_parts():
    """A part of an earlier run is continued, whatever it is worth."""
    publish_dataset("kjj0/fineweb10B-gpt2", FINEWEB)
    out, name = fresh("parts"), "fineweb_train_000001.bin"
    args, file, whole = ("fineweb", "--out", out, "--shards", 1), "/storage/" + name, FINEWEB[name]
    for part, requests in ((whole[:700], ["bytes=700-"]), (whole, []), (b"", [None]),
                           (b"other" * 30, ["bytes=150-", None]), (whole + b"longer", [None])):
        fresh("parts").mkdir()
        (out / (name + ".part")).write_bytes(part)
        Handler.log.clear()
        status, said = run(*args)
        expect(status == 0 and (out / name).read_bytes() == whole and not list(out.glob("*.part")),
               f"a part of {len(part)} bytes: {said}")
        expect([headers.get("Range", headers.get("range")) for path, headers in Handler.log
                if path == file] == requests,
               f"a part of {len(part)} bytes: {Handler.log}")
    fresh("parts").mkdir()                                 # killed between the rename and the note
    run(*args)
    state = json.loads((out / "get.json").read_text())
    del state["shards"][name]
    (out / "get.json").write_text(json.dumps(state))
    Handler.log.clear()
    expect(run(*args)[0] == 0 and not [path for path, _ in Handler.log if path == file],
           "a whole file that was not noted is not downloaded again")
    wrong = ready_shards(["fineweb_val_000000.bin", name])
    wrong[name] = b"\1" + wrong[name][1:]
    publish_dataset("kjj0/fineweb10B-gpt2", wrong)
    expect_refusal(run("fineweb", "--out", fresh("wrong"), "--shards", 1),
                   "expected a shard with as many tokens")
    wrong[name] = ready_shards([name, name])[name][:-2]
    publish_dataset("kjj0/fineweb10B-gpt2", wrong)
    expect_refusal(run("fineweb", "--out", fresh("wrong"), "--shards", 1),
                   "as many tokens as it says")
    expect(not (scratch / "wrong" / name).exists(), "and it does not stay")


def test_hub():
    publish_dataset("kjj0/fineweb10B-gpt2", FINEWEB)
    listing = "/api/datasets/kjj0/fineweb10B-gpt2/tree/main?recursive=true"
    args = ("fineweb", "--shards", 1, "--out")
    os.environ["HF_TOKEN"] = "secret"
    Handler.log.clear()
    expect(run(*args, fresh("hub"))[0] == 0, "with a token")
    del os.environ["HF_TOKEN"]
    sent = {path.split("/")[1]: headers.get("authorization", headers.get("Authorization"))
            for path, headers in Handler.log}
    expect(sent == {"api": "Bearer secret", "datasets": "Bearer secret", "storage": None},
           f"the token goes to the hub alone: {sent}")
    Handler.log.clear()
    run(*args, fresh("hub"))
    expect(not any("authorization" in " ".join(headers).lower() for _, headers in Handler.log),
           "and only where there is one")
    Handler.behaviour[listing] = [("status", 502), ("status", 503)]
    expect(run(*args, fresh("hub"))[0] == 0, "the list is retried too")
    Handler.behaviour[listing] = [("status", 401)]
    expect_refusal(run(*args, fresh("hub")), "401", "HF_TOKEN", "HF_ENDPOINT")
    Handler.files[listing] = (b"<html>", None)
    expect_refusal(run(*args, fresh("hub")), "kjj0/fineweb10B-gpt2: expected a file, found")
    Handler.files[listing] = (b"[]", None)
    expect_refusal(run(*args, fresh("hub")), "expected fineweb_val_000000.bin",
                   "found 0 training shards", "another HF_ENDPOINT")
    Handler.files[listing] = (b'{"error": "x"}', None)
    expect_refusal(run(*args, fresh("hub")), "expected a file, found")
    expect(not (scratch / "hub").exists(), "nothing empty stays")
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"       # nothing listens there
    waits.clear()
    expect_refusal(run(*args, fresh("hub")), "refused", "http://127.0.0.1:9")
    expect(not waits, f"at once: {waits}")
    os.environ["HF_ENDPOINT"] = endpoint + "/"


def test_hub_dataset():
    """A data set of the hub by its address: its files come one by one and go again."""
    documents = [words(f"hub {i}", 200) for i in range(20)]
    files, seen = {}, []
    for k in range(4):
        rows = [{"body": text} for text in documents[5 * k:5 * k + 5]]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        files[f"en/train-{k}.jsonl.gz"] = gzip.compress(data)
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"body": documents[:3]}), table)
    files["en/validation-0.parquet"] = table.getvalue()
    publish_dataset("who/what", files)
    serve = Handler.serve_file
    out = fresh("data set")
    Handler.serve_file = lambda *a: (seen.append(sorted(os.listdir(out / hub.PARTS))), serve(*a))[1]
    args = ("--vocab", vocab, "--column", "body", "--out", out, "--shard-tokens", 500)
    status, said = run(*args, "hf://datasets/who/what", "--val",
                       "hf://datasets/who/what@main/en/val*")
    Handler.serve_file = serve
    expect(status == 0 and shards(out, "train") == encode(*documents)
           and shards(out, "val") == encode(*documents[:3]), said)
    expect(seen and max(map(len, seen)) <= 1 and not (out / hub.PARTS).exists(),
           f"one file at a time: {seen}")
    unbroken, asked = content(out), len(Handler.log)
    expect(run(*args, "hf://datasets/who/what", "--val", "hf://datasets/who/what@main/en/val*")[0]
           == 0 and len(Handler.log) == asked, "complete without a request")
    expect(run(*args[:5], fresh("half"), "hf://datasets/who/what/en/train*", "--val-fraction",
               0.4)[0] == 0 and shards(scratch / "half", "train") + shards(scratch / "half", "val")
           == encode(*documents), "a fraction by the sizes of the files")
    killed = 0
    for moment in range(3000, 40000, 3000):
        killed += run_and_kill(moment, *args[:5], fresh("killed"), *args[6:], "--val",
                               "hf://datasets/who/what/en/val*", "hf://datasets/who/what")
        status, said = run(*args[:5], scratch / "killed", *args[6:], "--val",
                           "hf://datasets/who/what/en/val*", "hf://datasets/who/what")
        same = {name: data for name, data in content(scratch / "killed").items() if "text" in name}
        expect(status == 0 and same == {name: data for name, data in unbroken.items()
                                        if "text" in name}, f"killed at {moment}: {said}")
    expect(killed > 3, f"{killed} kills hit")
    expect_refusal(run(*args[:5], fresh("x"), "hf://datasets/who/what/fr/*"),
                   "expected fr/*, found README.md, en/train-0.jsonl.gz")
    expect_refusal(run(*args[:5], fresh("x"), "hf://what"), "expected hf://datasets/OWNER/NAME")
    expect_refusal(run(*args[:2], "--out", fresh("x"), "hf://datasets/who/what"),
                   "line 1: expected JSON with a text in the column text", "--column")
    publish_dataset("allenai/c4", {f"en/c4-validation.0000{k}-of-00002.json.gz": gzip.compress(
        json.dumps({"text": documents[k], "url": "x"}).encode()) for k in range(2)})
    status, said = run("c4-val", "--vocab", vocab, "--out", fresh("c4"))
    expect(status == 0 and shards(scratch / "c4", "val") == encode(*documents[:2])
           and "--eval --val-data" in said, said)
    publish_dataset("monology/pile-uncopyrighted", {"val.jsonl.zst": pyarrow.compress(
        json.dumps({"text": documents[5]}).encode(), "zstd", asbytes=True)})
    expect(run("pile-val", "--vocab", vocab, "--out", fresh("pile"))[0] == 0
           and shards(scratch / "pile", "val") == encode(documents[5]), "the Pile")


def test_offline():
    """Without a server get.py stops at once and says how to go on without one."""
    publish_dataset("kjj0/fineweb10B-gpt2", FINEWEB)
    connect, fails = socket.create_connection, []

    def fail(*args, **kwargs):
        raise fails.pop()
    args = ("fineweb", "--shards", 1, "--out")
    for error in (socket.gaierror(-3, "Temporary failure in name resolution"),
                  OSError(101, "Network is unreachable"), OSError(113, "No route to host"),
                  TimeoutError("timed out")):
        fails[:], waits[:] = [error], []
        hub.socket.create_connection = fail
        result = run(*args, fresh("offline"))
        hub.socket.create_connection = connect
        expect_refusal(result, "expected a network", str(error), "same command continues",
                       "./shard --out DIR FILE...", "--vocab FOLDER --out DIR FILE...",
                       "https_proxy")
        expect(not waits and not (scratch / "offline").exists(), f"{error}: it waits {waits}")
    os.environ["HF_ENDPOINT"] = "http://no-such-host.invalid"
    begin = time.monotonic()
    for command in (args, ("tasks", "--vocab", vocab, "--out"),
                    ("--vocab", vocab, "hf://datasets/a/b", "--out"),
                    ("--vocab", "who/what", __file__, "--out")):
        expect_refusal(run(*command, fresh("offline")), "expected a network",
                       "no-such-host.invalid")
        expect(not (scratch / "offline").exists(), "nothing empty stays")
    expect(not waits and time.monotonic() - begin < 20, f"a name that is none: it waits {waits}")
    mine = fresh("offline")
    mine.mkdir()
    (mine / "notes.txt").write_bytes(b"mine")
    expect_refusal(run("--vocab", "bytes", "hf://datasets/a/b", "--out", mine),
                   "expected a network")
    expect(mine.exists() and content(mine) == {"notes.txt": b"mine"},
           "a folder that was there before stays as it was")
    text = fresh("text")
    text.write_text(words(3, 900))
    expect(run("--vocab", vocab, "--out", fresh("offline"), text)[0] == 0, "local files go on")
    os.environ["HF_ENDPOINT"] = endpoint + "/"
    fails[:] = []
    hub.socket.create_connection = fail
    for name in ("http_proxy", "ALL_PROXY"):               # a proxy is asked, not the host
        os.environ[name] = "http://127.0.0.1:9"
        hub.reach("http://no-such-host.invalid/")
        del os.environ[name]
    hub.socket.create_connection = connect


def write_parquet(path, texts, rows=3, **columns):
    """texts: None is a null."""
    table = pyarrow.table({
        "id": pyarrow.array(range(len(texts))),
        **(columns or {
            "text": pyarrow.array(texts, pyarrow.string())
        })
    })
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


def test_parquet():
    """The rows of a Parquet file are documents like files; what is killed in between goes on."""
    folder, contents = fresh("parquet"), [words(i, 20 * i * i)
                                       for i in range(9)] + [None, "", "last é" * 40]
    folder.mkdir()
    write_parquet(folder / "rows.parquet", contents)
    for fraction, rows in ((0, 12), (0.1, 11), (0.5, 6), (0.003, 12), (1, 0)):
        split = ("--vocab", vocab, "--val-fraction", fraction)
        result = run(*split, "--out", fresh("rows"), folder / "rows.parquet")
        if fraction == 0.003:                              # less than a row
            expect_refusal(result, "expected text for both splits")
            continue
        expect(result[0] == 0, result[1])
        want = [[text for text in part if text] for part in (contents[:rows], contents[rows:])]
        expect(shards(scratch / "rows", "train") == encode(*want[0])
               and shards(scratch / "rows", "val") == encode(*want[1]), f"cut at {fraction}")
    split = ("--vocab", vocab, "--val-fraction", 0.5)
    expect(run(*split, "--out", fresh("rows"), folder / "rows.parquet")[0] == 0, "again")
    whole, killed = content(scratch / "rows"), False
    for moment in range(2000, 60000, 4000):
        fresh("broken")
        killed |= run_and_kill(moment, *split, "--out", scratch / "broken", folder / "rows.parquet")
        status, said = run(*split, "--out", scratch / "broken", folder / "rows.parquet")
        same = {
            name: data
            for name, data in content(scratch / "broken").items() if name.endswith(".bin")
        }
        expect(
            status == 0 and same == {
                name: data
                for name, data in whole.items() if name.endswith(".bin")
            }, f"killed at {moment}: {said}")
    expect(killed, "the kills hit")
    write_parquet(folder / "other.parquet", [1, 2], context=["a", "b"])
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), folder / "other.parquet"),
                   "expected a column text of strings", "--column", "context of string")
    write_parquet(folder / "other.parquet", [1, 2], text=[1, 2])
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), folder / "other.parquet"),
                   "text of int64")
    write_parquet(folder / "other.parquet", [1, 2], context=["a", "b"])
    expect(run("--vocab", vocab, "--val-fraction", 0, "--column", "context", "--out", fresh("x"),
               folder / "other.parquet")[0] == 0
           and shards(scratch / "x", "train") == encode("a", "b"), "--column")
    (folder / "other.parquet").write_bytes(b"PAR1 and nothing of the kind PAR1")
    expect_refusal(run("--vocab", vocab, "--out", fresh("x"), folder / "other.parquet"),
                   "expected Parquet")


def test_shakespeare():
    text = words("shakespeare", 5000).encode()
    path = scratch / "input.txt"
    path.write_bytes(text)
    Handler.files["/input.txt"] = text
    get.TEXT = {**REAL["TEXT"],
                "tinyshakespeare": {"train": pinned(path, elsewhere + "/input.txt")}}
    os.environ["HF_TOKEN"] = "secret"
    Handler.log.clear()
    Handler.behaviour["/input.txt"] = [("cut", 1000), ("status", 503)]
    out = fresh("bard")
    status, said = run("tinyshakespeare", "--vocab", vocab, "--out", out)
    cut = int(0.9 * len(text))
    while text[cut] & 0xC0 == 0x80:
        cut += 1
    expect(status == 0 and shards(out, "train") == encode(text[:cut].decode())
           and shards(out, "val") == encode(text[cut:].decode()), said)
    expect(len(Handler.log) == 3 and not any("authorization" in " ".join(headers).lower()
                                             for _, headers in Handler.log),
           "the hub's token goes nowhere else")
    del os.environ["HF_TOKEN"]
    expect(run("tinyshakespeare", "--vocab", vocab, "--out", out)[0] == 0 and len(Handler.log) == 3,
           "again")
    (out / "tinyshakespeare_val_000000.bin").unlink()
    expect(run("tinyshakespeare", "--vocab", vocab, "--out", out)[0] == 0 and len(Handler.log) == 4
           and shards(out, "val") == encode(text[cut:].decode()), "its text comes again")
    Handler.files["/input.txt"] = text[:-1] + b"?"
    expect_refusal(run("tinyshakespeare", "--vocab", vocab, "--out", fresh("bard")), "checksum",
                   "the part is deleted")
    expect(not (scratch / "bard").exists(), "nothing empty stays")
    get.TEXT = REAL["TEXT"]


def test_kills():
    """Killed at random moments and started again, until it is through: every file is what an
    unbroken run writes."""
    publish_dataset("roneneldan/TinyStories", STORIES)
    publish_dataset("kjj0/fineweb10B-gpt2", FINEWEB)
    local = fresh("kill text")
    local.mkdir()
    for i in range(20):
        (local / f"{i:02d}").write_text(words(f"kill {i}", 2000))
    # so that the ranges are known and do not count
    run("tokenizer", "--vocab", vocab, "--out", scratch / "t.bin")
    r, unbroken, out = random.Random(0), scratch / "unbroken", scratch / "killed"
    for name, args in (("stories", ("tinystories", "--vocab", vocab, "--shard-tokens", 200)),
                       ("local", (local, "--vocab", vocab, "--shard-tokens", 500)),
                       ("web", ("fineweb", "--shards", 8))):
        fresh("unbroken"), fresh("killed")
        calls = count_calls(None)
        expect(run(*args, "--out", unbroken)[0] == 0, name)
        sys.setprofile(None)
        kills, states, whole = 0, set(), 0
        tries = 0
        while tries < 15 or kills < 11 and tries < 60:
            tries += 1
            kills += run_and_kill(r.randrange(calls[0]), *args, "--out", out)
            state = (json.loads((out / "get.json").read_text())
                     if (out / "get.json").exists() else {})
            states.add(len(state.get("shards", ())))
            if state.get("complete"):
                expect(content(out) == content(unbroken), f"{name}: whole after some kills")
                fresh("killed")
                whole += 1
        status, said = run(*args, "--out", out)
        expect(status == 0 and content(out) == content(unbroken), f"{name}: {said}")
        expect(kills > 10 and len(states) > 3, f"{name}: expected many kills in many states, found "
                                               f"{kills} in {states}, {whole} times whole")
        if os.environ.get("VERBOSE"):
            print(f"    {name}: {kills} kills, with {sorted(states)} shards done; {whole} "
                  "times whole")


def test_missing_modules():
    source = fresh("a.parquet")
    write_parquet(source, ["text"])
    for name, args, parts in (
            ("numpy", ("tokenizer",), ("expected numpy", "pip install numpy")),
            ("tiktoken", ("tokenizer",), ("expected tiktoken", "pip install tiktoken")),
            ("tokenizers", ("tokenizer",), ("and tokenizers", "pip install tiktoken tokenizers")),
            ("tokenizers", ("tokenizer", "--vocab", vocab), ("expected the package tokenizers",)),
            ("huggingface_hub", ("fineweb", "--out", fresh("x")),
             ("expected huggingface_hub", "pip install huggingface_hub")),
            ("pyarrow", ("--vocab", vocab, "--out", fresh("x"), source), ("expected pyarrow",))):
        fake = fresh("fake")
        (fake / name).mkdir(parents=True)
        (fake / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name}')")
        done = subprocess.run([sys.executable, get.__file__, *map(str, args)],
                              env={**os.environ, "PYTHONPATH": str(fake)}, capture_output=True,
                              text=True)
        if name != "huggingface_hub":                      # which downloads GPT-2's first
            expect_refusal((done.returncode, done.stderr), *parts)
        expect(not (scratch / "x").exists(), "nothing empty stays")


def test_refusals():
    expect_refusal(run("TinyShakespear"), "nothing of the kind", "did you mean tinyshakespeare?")
    text = fresh("text")
    text.write_text(words(3, 2000))
    expect_refusal(run(), "required: what", "--help")
    expect_refusal(run(text), "found no --out", "--out DIR")
    expect_refusal(run("--nonsense", text), "--nonsense")
    expect_refusal(run("tinystories", text), "one dataset or your own files", "./NAME")
    expect_refusal(run("fineweb", "fineweb-edu"), "one dataset")
    expect_refusal(run("fineweb", "--tokens", 5), "expected --shards", "--shards N")
    expect_refusal(run("tinystories", "--shards", 5), "expected --tokens", "--tokens N")
    for bad in ("0", "1", "-1", "2.5", "x", ""):
        expect_refusal(run("--out", scratch / "x", text, f"--tokens={bad}"),
                       "expected a whole number of 2 or more")
    for bad in ("1", str(1 << 31)):
        expect_refusal(run("--out", scratch / "x", text, f"--shard-tokens={bad}"),
                       "expected a whole number of 2 or more and at most 2147483647")
    for what in ("tinystories", "c4-val", "fineweb", "piqa", "tasks", "tokenizer"):
        expect_refusal(run(what, "--val-fraction", 0.5, "--out", fresh("x")),
                       f"{what}: expected no --val-fraction", "leave --val-fraction out")
    for what in ("fineweb", "piqa", "tokenizer"):
        expect_refusal(run(what, "--shard-tokens", 1000, "--out", fresh("x")),
                       f"{what}: expected no --shard-tokens", "leave --shard-tokens out")
    for bad in ("1.01", "-0.1", "x", "nan"):
        expect_refusal(run("--out", scratch / "x", text, f"--val-fraction={bad}"),
                       "expected a number from 0 to 1")
    other = fresh("others")
    other.mkdir()
    (other / "fineweb_train_000001.bin").write_bytes(b"mine")
    expect_refusal(run("--vocab", vocab, "--out", other, text), "found fineweb_train_000001.bin",
                   "another --out")
    expect(content(other) == {"fineweb_train_000001.bin": b"mine"}, "nothing there is touched")
    (other / "get.json").write_text("{")
    expect_refusal(run("--vocab", vocab, "--out", other, text),
                   "expected the state of an earlier run")
    expect(run("--vocab", vocab, "--out", fresh("mine"), text)[0] == 0, "a good run")
    before = content(scratch / "mine")
    expect_refusal(run("tinystories", "--vocab", vocab, "--out", scratch / "mine"),
                   "dataset text, now tinystories")
    another = fresh("another vocabulary")
    make_vocabulary(another, 100)
    expect_refusal(run("--vocab", another, "--out", scratch / "mine", text), "vocabulary ")
    expect(content(scratch / "mine") == before, "nothing there is touched")
    expect_refusal(run("fineweb", "--vocab", vocab, "--out", fresh("x")),
                   "expected GPT-2's vocabulary", "leave --vocab out")
    said = run("tokenizer", "--vocab", vocab, "--out", scratch / "t.bin")[1]
    expect(f"{tokenizer.n_vocab} tokens, of which {EOT} begins documents" in said, said)
    lock = os.open(scratch / "mine", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    expect_refusal(run("--vocab", vocab, "--out", scratch / "mine", text), "another get.py at work")
    os.close(lock)


def test_disk():
    text = fresh("text")
    text.write_text(words(4, 50000))
    texts.PIECE = 10000
    publish_dataset("kjj0/fineweb10B-gpt2", FINEWEB)
    usage, shutil.disk_usage = shutil.disk_usage, lambda path: types.SimpleNamespace(free=2000)
    expect_refusal(run("--vocab", vocab, "--out", fresh("full"), text),
                   "of free disk space, found 2.0 kB", "--tokens")
    expect_refusal(run("fineweb", "--out", fresh("full"), "--shards", 1),
                   "expected 4.0 kB of free disk space")
    expect(run("--vocab", vocab, "--out", fresh("full"), text, "--tokens", 10, "--val-fraction",
               "0.01")[0] == 0, "a little fits")
    shutil.disk_usage = usage
    expect(run("--vocab", vocab, "--out", fresh("whole"), text)[0] == 0, "room")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run("tokenizer", "--vocab", vocab, "--out", scratch / "t.bin")
    room = (scratch / "t.bin").stat().st_size + 2000
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    result = run("--vocab", vocab, "--out", fresh("full"), text)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    expect_refusal(result, "File too large", "the same command continues")
    expect(run("--vocab", vocab, "--out", scratch / "full", text)[0] == 0
           and content(scratch / "full") == content(scratch / "whole"), "it does continue")
    expect_refusal(run("--vocab", vocab, "--out", text / "under a file", text), "Not a directory")
    if os.geteuid():
        locked = fresh("read only")
        locked.mkdir(mode=0o500)
        expect_refusal(run("--vocab", vocab, "--out", locked / "x", text), "Permission denied")
        unreadable = fresh("unreadable")
        unreadable.mkdir(mode=0)
        expect_refusal(run("--vocab", vocab, "--out", fresh("x"), unreadable), "Permission denied")
        unreadable.chmod(0o700)


def test_synced():
    """A file is on disk before it gets its name, and the name right after."""
    text = fresh("text")
    text.write_text(words(5, 500))
    synced.clear()
    run("--vocab", vocab, "--out", fresh("synced"), text)
    renames = [i for i, entry in enumerate(synced) if isinstance(entry, tuple)]
    expect(len(renames) == 7 and len(synced) == 21,
           f"state, tokenizer, two shards with the state after each, state: {synced}")
    expect(all(synced[i - 1] == synced[i][0] and synced[i + 1] == os.path.dirname(synced[i][1])
               for i in renames), f"{synced}")
    sync = os.fsync

    def fail(error):
        """Of folders."""
        def fsync(file):
            if os.path.isdir(f"/proc/self/fd/{file}"):
                raise OSError(error, os.strerror(error))
            sync(file)
        return fsync
    os.fsync = fail(errno.EINVAL)
    status, said = run("--vocab", vocab, "--out", fresh("synced"), text)
    expect(status == 0, f"a file system that cannot sync folders: {said}")
    os.fsync = fail(errno.EIO)
    result = run("--vocab", vocab, "--out", fresh("synced"), text)
    os.fsync = sync
    expect_refusal(result, "Input/output error")


# ---- packages of Debian

APT = """#!{python}
import os, shutil, sys
shop, package = {shop!r}, sys.argv[-1]
open(shop + "/asked", "a").write(package + "\\n")
said = os.path.join(shop, package + ".says")
if os.path.exists(said):
    sys.exit(open(said).read())
if not os.path.exists(os.path.join(shop, package)):
    sys.exit(f"E: Unable to locate package {{package}}")
shutil.copy(os.path.join(shop, package), package + "_1%3a2.0-1_all.deb")
"""
DPKG = """#!{python}
import json, sys
data = open(sys.argv[2], "rb").read()
head, _, tar = data.partition(b"\\n")
control = json.loads(head)
if sys.argv[1] == "-f":
    print(control.get(sys.argv[3], ""))
else:
    sys.stdout.buffer.write(tar)
    if len(tar) != control["size"]:
        sys.exit("dpkg-deb: error: unexpected end of file")
"""


def pack(path, files, **control):
    """A package as the stand-in for dpkg-deb reads it. files: {name: bytes, or the target of a
    symbolic link}."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
            else:
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    tar = stream.getvalue()
    head = json.dumps({"Version": "1:2.0-1", "size": len(tar), **control}).encode()
    path.write_bytes(head + b"\n" + tar)


def page(text, more="", kind="p"):
    filler = "The quick brown fox, whose name is Reynard, jumps over the lazy dog. " * 4
    return (f"<html><head><title>no</title></head><body><nav>no</nav><{kind}>{text}</{kind}>"
            f"<p>{filler}</p>{more}</body></html>").encode()


def encode64(value):
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return (encode64(value // 64) if value >= 64 else "") + digits[value % 64]


def dictionary(*entries):
    """gcide's two files: the index names the first entry twice, and the description."""
    text, index = "About.\n", f"00-database-info\tA\t{encode64(7)}\n"
    for number, entry in enumerate(entries):
        line = f"{encode64(len(text.encode()))}\t{encode64(len(entry.encode()))}\n"
        index += f"word{number}\t{line}" + (f"again\t{line}" if not number else "")
        text += entry
    folder = "./usr/share/dictd/gcide."
    return {folder + "dict.dz": gzip.compress(text.encode()), folder + "index": index.encode()}


def fill_shop(shop):
    """A small stand-in for each package."""
    shop.mkdir()
    places = {"anarchism": "share/doc/anarchism/html/secA.html",
              "debian-handbook": "doc/debian-handbook/html/en-US/apt.html",
              "debian-policy": "doc/debian-policy/policy.html/ch.html",
              "debian-reference-en": "share/debian-reference/ch01.en.html",
              "developers-reference": "share/developers-reference/pkgs.html",
              "git-doc": "share/doc/git-doc/git-add.html"}
    for package, place in places.items():
        pack(shop / package, {"./usr/" + place: page(f"This is {package}.")})
    pod = ("=head1 NAME\n\nperlx - B<Source> C<< a < b >> filters, see L<the manual|perl>\n\n"
           "    my $code;\n\n=begin html\n\nno\n\n=end html\n\n" + "Words of I<prose>. " * 20)
    pack(shop / "perl-doc", {"./usr/share/perl/5.36.0/pod/perlx.pod": pod.encode()})
    for package, real in (("postgresql-doc", "postgresql-doc-15"),
                          ("python3-doc", "python3.11-doc")):
        pack(shop / package, {"./usr/share/doc/x/copyright": b"x"},
             Depends=f"libjs (>= 1), {real} (>= 3.11.2-1~)")
        pack(shop / real, {"./usr/share/doc/x/html/a.html": page(f"This is {real}."),
                           "./usr/share/doc/x/html/genindex.html": page("a list")})
    pack(shop / "dict-gcide", dictionary(*(f"Word{i} \\Word\\, n.\n   A {{thing}} of kind {i}.\n"
                                           "   [1913 Webster]\n\n" for i in range(30))))


@contextlib.contextmanager
def debian_tools(name):
    """The stand-ins for apt-get and dpkg-deb first in PATH, and a shop of packages."""
    shop, tools, path = fresh(name + " shop"), fresh(name + " tools"), os.environ["PATH"]
    fill_shop(shop)
    tools.mkdir()
    for program, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (tools / program).write_text(text.format(python=sys.executable, shop=str(shop)))
        (tools / program).chmod(0o755)
    os.environ["PATH"] = f"{tools}:{path}"
    yield shop
    os.environ["PATH"] = path


def corpus(out, name):
    return [json.loads(line)["text"] for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_debian():
    """Both corpora in both vocabularies; markup, code and lists go; nothing is asked twice."""
    out = fresh("debian")
    with debian_tools("debian") as shop:
        more = ("<pre>code</pre><table><tr><td>cell</td></tr></table><script>s()</script>"
                "<p>Fish &amp; chips<br/>at <b>five</b>.</p><div class='toc'>list</div>")
        main = page("outside", '<div role="main"><div><p>' + "Inside. " * 40 + "</p></div></div>")
        pack(shop / "git-doc", {"./usr/share/doc/git-doc/git-add.html": page("This is it.", more),
                                "./usr/share/doc/git-doc/git-rm.html": main,
                                "./usr/share/doc/git-doc/same.html": main,
                                "./usr/share/doc/git-doc/index.html": page("a list"),
                                "./usr/share/doc/git-doc/short.html": b"<p>short</p>"})
        status, said = run("debian", "--out", out)
        expect(status == 0, said)
        asked = (shop / "asked").read_text().split()
        expect(sorted(asked) == sorted([*debian.PROSE, "postgresql-doc-15", "python3.11-doc",
                                        "dict-gcide"]), f"each package once: {asked}")
        expect(said.count("warning: ") == 2 and "sha256" in said, "another text: a warning")
        prose = corpus(out, "prose")
        expect(len(prose) == 10 and prose == sorted(
            prose, key=lambda text: hashlib.sha256(text.encode()).digest()),
               f"a document for each page, the same one once, in order: {len(prose)}")
        added = next(text for text in prose if text.startswith("This is it."))
        expect(added.endswith("\n\nFish & chips\n\nat five."), added[-60:])
        expect(not re.search("code|cell|s\\(\\)|list|no\\b|outside", "".join(prose)), "markup")
        expect("Inside. " * 39 + "Inside." in prose, "the main part alone")
        pod = next(text for text in prose if text.startswith("NAME"))
        expect(pod.startswith("NAME\n\nperlx - Source a < b filters, see the manual\n\n"
                              "Words of prose. "), pod[:90])
        words_of = corpus(out, "dictionary")
        expect(len(words_of) == 30 and all(re.fullmatch(
            r"Word(\d+) \\Word\\, n\.\n   A thing of kind \1\.", text) for text in words_of),
               f"an entry is a document: {words_of[:1]}")
        for name, documents in (("prose", prose), ("dictionary", words_of)):
            both = shards(out / f"{name}-gpt2", "train") + shards(out / f"{name}-gpt2", "val")
            expect(both == encode(*documents), f"{name}: GPT-2's tokens")
            plain = b"".join(np.fromfile(path, "<u2", offset=1024).astype("u1").tobytes()
                             for split in ("train", "val")
                             for path in sorted((out / f"{name}-bytes").glob(f"*{split}_*.bin")))
            expect(plain == b"".join(b"\0" + text.encode() for text in documents),
                   f"{name}: bytes, a document behind token 0")
            expect(not (out / f"{name}-bytes/tokenizer.bin").exists(), "bytes need none")
        expect("git-doc 1:2.0-1: " in (out / "prose.txt").read_text(), "versions")
        expect(not (out / hub.PARTS).exists(), "the packages go again")
        debian.KNOWN["prose"], known = hashlib.sha256(
            (out / "prose.jsonl").read_bytes()).hexdigest(), dict(debian.KNOWN)
        moved = out.rename(fresh("debian moved"))
        before = content(moved)
        status, said = run("debian", "--out", moved)
        expect(status == 0 and content(moved) == before
               and len((shop / "asked").read_text().split()) == len(asked), f"nothing anew: {said}")
        (moved / "prose.jsonl").unlink()
        status, said = run("debian", "--out", moved)
        expect(status == 0 and "warning" not in said and content(moved) == before, said)
        debian.KNOWN.update(known)


def test_debian_refusals():
    """Without apt-get, network, lists of packages, room: each is said, and what to do; packages
    that came stay for the next time."""
    out, path = fresh("debian"), os.environ["PATH"]
    os.environ["PATH"] = str(fresh("nothing"))
    expect_refusal(run("debian", "--vocab", "bytes", "--out", out), "expected apt-get, ")
    os.environ["PATH"] = path
    expect(not out.exists(), "no empty folder stays")
    with debian_tools("refusals") as shop:
        for said, *parts in (
            ("E: Unable to locate package git-doc", "git-doc", "apt-get update", "universe"),
            ("E: Failed to fetch http://x/  Temporary failure resolving 'x'", "Temporary failure",
             "with a network"),
            ("E: You don't have enough free space in /x.", "enough free space", "disk space"),
            ("", "no package and no word")):
            (shop / "git-doc.says").write_text(said)
            expect_refusal(run("debian", "--vocab", "bytes", "--out", out), *parts)
        (shop / "git-doc.says").unlink()
        expect((shop / "asked").read_text().split().count("anarchism") == 1, "what came stays")
        pack(shop / "perl-doc", {"./usr/share/perl/x": b"no"})
        expect_refusal(run("debian", "--vocab", "bytes", "--out", out),
                       "perl-doc 1:2.0-1: expected text in files", "found none")
        (out / hub.PARTS / "perl-doc_1%3a2.0-1_all.deb").unlink()
        fill = fresh("again shop")
        fill_shop(fill)
        shutil.copy(fill / "perl-doc", shop / "perl-doc")
        pack(shop / "python3-doc", {}, Depends="python3 (>= 3)")
        expect_refusal(run("debian", "--vocab", "bytes", "--out", out), "python3-doc: expected a "
                       "dependency", "python3 (>= 3)")
        (out / hub.PARTS / "python3-doc_1%3a2.0-1_all.deb").unlink()
        shutil.copy(fill / "python3-doc", shop / "python3-doc")
        pack(shop / "dict-gcide", {"./usr/share/dictd/gcide.index": b"x\n"})
        expect_refusal(run("debian", "--vocab", "bytes", "--out", out), "a text and its index")
        (out / hub.PARTS / "dict-gcide_1%3a2.0-1_all.deb").unlink()
        bad = dictionary("Word\n")
        bad["./usr/share/dictd/gcide.dict.dz"] = bad["./usr/share/dictd/gcide.dict.dz"][:-9]
        pack(shop / "dict-gcide", bad)
        expect_refusal(run("debian", "--vocab", "bytes", "--out", out), "a dictionary of dictd's")
        (out / hub.PARTS / "dict-gcide_1%3a2.0-1_all.deb").unlink()
        shutil.copy(fill / "dict-gcide", shop / "dict-gcide")
        status, said = run("debian", "--vocab", "bytes", "--val-fraction", 0.3, "--out", out)
        expect(status == 0, said)


def test_debian_hostile():
    """A damaged package is removed and comes again; links and paths of a package reach nothing; any
    bytes make a text."""
    out = fresh("debian")
    with debian_tools("hostile") as shop:
        whole = (shop / "anarchism").read_bytes()
        for size in (len(whole) - 700, len(whole) - 10300, whole.index(b"\n") + 1):
            (shop / "anarchism").write_bytes(whole[:size])
            expect_refusal(run("debian", "--vocab", "bytes", "--out", out),
                           "expected a whole package", "the same command brings it again")
            expect(not list((out / hub.PARTS).glob("anarchism*")), "it is removed")
        secret, folder = scratch / "secret.html", "./usr/share/doc/anarchism/html/"
        secret.write_bytes(page("a secret"))
        latin = page("caf\u00e9 one").decode().encode("latin-1")
        pack(shop / "anarchism", {
            folder + "link.html": str(secret), folder + "up": "/",
            folder + "up/etc.html": page("up"),
            "../../../../" + folder + "outside.html": page("This is outside."),
            "/" + folder[2:] + "absolute.html": page("This is absolute."),
            folder + "latin.html": latin, folder + "bom.html": b"\xef\xbb\xbf" + page("mark"),
            folder + "nul.html": page("nul\0 and \x1b[2J bell\7"),
            folder + "open.html": b"<p>open " + b"words " * 60 + b"<pre>code <p>more",
            folder + "broken.html": b"<p " + b"\xff<<&#xD800;&bogus;</" * 50 + b"x" * 300,
            folder + "b\udcff.html": page("This has a name.")})
        before = {path for path in scratch.rglob("*") if out not in (path, *path.parents)}
        status, said = run("debian", "--vocab", "bytes", "--out", out)
        expect(status == 0, said)
        after = {path for path in scratch.rglob("*") if out not in (path, *path.parents)}
        new = {path.name for path in after - before}
        expect(new <= {"asked"}, f"nothing else: {new}")
        text = "\n".join(corpus(out, "prose"))
        expect("secret" not in text and "This is outside." in text, "plain files alone are read")
        expect("caf\u00e9 one" in text and "\nmark" in "\n" + text, "encodings")
        expect("open words" in text and "code" not in text, "what is not closed")
        expect("nul and [2J bell" in text and not re.search("[\0-\x08\x0b-\x1f\ufeff]", text),
               "no control characters")
        prose = (out / "prose.jsonl").read_bytes()
        expect(b"\\ud8" not in prose and prose.decode(), "valid UTF-8")


def test_bytes():
    """--vocab bytes: the same tokens as shard.c's, for any text."""
    text = fresh("text.txt")
    text.write_text(words(7, 3000))
    out = fresh("bytes")
    expect(run("--vocab", "bytes", "--out", out, text)[0] == 0, "it is written")
    plain = b"".join(np.fromfile(path, "<u2", offset=1024).astype("u1").tobytes()
                     for split in ("train", "val")
                     for path in sorted(out.glob(f"*_{split}_*.bin")))
    expect(plain[:1] == b"\0" and plain.replace(b"\0", b"") == text.read_bytes(), "its bytes")
    expect(np.fromfile(next(out.glob("*_train_*.bin")), "<i4", 4)[3] == 256, "a vocabulary of 256")
    expect_refusal(run("--vocab", "bytes", "--separator", "x", "--out", out, text), "bytes alone")
    expect_refusal(run("tokenizer", "--vocab", "bytes"), "bytes have no file")
    lines = fresh("nul.jsonl")
    lines.write_text(json.dumps({"text": "a\0b"}) + "\n" + json.dumps({"text": "cd"}) + "\n")
    expect_refusal(run("--vocab", "bytes", "--out", fresh("bytes"), "--val-fraction", 0, lines),
                   "expected no NUL character")


def test_progress():
    clock = [0.0]
    now, time.monotonic = time.monotonic, lambda: clock[0]
    for terminal, gap in ((True, 1), (False, 10)):
        said = io.StringIO()
        said.isatty = lambda: terminal
        with contextlib.redirect_stderr(said):
            progress = shards_file.Progress("x", 4_000_000_000, 1_000_000_000)
            for _ in range(3 * gap):
                clock[0] += 1
                progress.at(progress.done + 10_000_000, 2_500_000)
        lines = said.getvalue()[terminal:].split("\r" if terminal else "\n")
        expect(len(lines) == 3 + (not terminal) and (lines[-1] == "") == (not terminal), f"{lines}")
        expect(lines[0].startswith(f"x: 1.{gap // 10} GB of 4.0 GB, 10.0 MB/s, {2.5 * gap:.1f}M "
                                   f"tokens, {300 - gap} s to go"), lines[0])
    time.monotonic = now


def test_interrupt():
    publish_dataset("roneneldan/TinyStories", STORIES)
    stop = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt())
    fetch, hub.fetch = hub.fetch, stop
    status, said = run("tinystories", "--vocab", vocab, "--out", fresh("stopped"))
    hub.fetch = fetch
    expect(status != 0 and "the same command continues" in said, said)
    expect(run("tinystories", "--vocab", vocab, "--out", scratch / "stopped")[0] == 0, "it does")


def test_readme():
    """The pages' blocks that need Python and a network, in a copy of the tree: their get.py here,
    from the server; what follows as it is written."""
    root, tree, text = pathlib.Path(REAL["HERE"]).parent, scratch / "tree", scratch / "input.txt"
    here = get.HERE
    shutil.copytree(root, tree, ignore=shutil.ignore_patterns("build", "runs", ".git", ".venv",
                                                              "tinyshakespeare", "gpt2"))
    pages = "".join((root / "doc" / name).read_text() for name in ("data.md", "evaluation.md"))
    blocks = [block.replace("\\\n", " ").splitlines()
              for block in re.findall(r"```sh\n(.*?)```", pages, re.S)
              if "/python data/get.py" in block]
    texts.PIECE, hub.CHUNK, shards_file.BATCH = PIECE, CHUNK, BATCH
    get.HERE = str(tree / "data")
    text.write_bytes(words("shakespeare", 300000).encode())
    get.TEXT = {**REAL["TEXT"],
                "tinyshakespeare": {"train": pinned(text, elsewhere + "/input.txt")}}
    Handler.files["/input.txt"] = text.read_bytes()
    publish_tasks()
    output = []
    for line in (line for block in blocks for line in block if "/pip " not in line):
        if " data/get.py " in line:
            status, said = run(*line.split(" data/get.py ")[1].split())
        else:
            result = subprocess.run(line, shell=True, cwd=tree, capture_output=True,
                                    env={**os.environ, "OMP_WAIT_POLICY": "passive"})
            status, said = (result.returncode, result.stdout.decode(errors="replace")
                            + result.stderr.decode(errors="replace"))
        expect(status in (0, None), f"{line}: {said[-2000:]}")
        output.append(said)
    expect(len(output) == 7 and "\n\nROMEO:" in output[3],
           f"the sample continues the prompt: {output[3][-2000:]}")
    expect(all(f"\n{name} " in output[6] for name in tasks.SUITES["spannorm"])
           and "\naverage of 6 " in output[6],
           f"the tasks' table: {output[6][-2000:]}")
    get.TEXT, get.HERE = REAL["TEXT"], here


if __name__ == "__main__":
    vocab = scratch / "vocabulary"
    make_vocabulary(vocab)
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint, elsewhere = (f"http://127.0.0.1:{server.server_port}",
                           f"http://localhost:{server.server_port}")
    for name in ("HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        os.environ.pop(name, None)
    os.environ["HF_ENDPOINT"] = endpoint + "/"
    constants = hub.import_hub().constants
    TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = 0.5
    time.sleep, sleep = (lambda seconds: (waits.append(seconds), None)[1]
                         if threading.current_thread() is threading.main_thread()
                         and sys.argv[0] == "get.py" else sleep(seconds), time.sleep)
    shards_file.fcntl = types.SimpleNamespace(
        LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB,
        flock=lambda handle, how: (locks.append(handle), fcntl.flock(handle, how)))
    # a disk is slow
    os.fsync = lambda handle: synced.append(os.path.realpath(f"/proc/self/fd/{handle}"))
    replace, os.replace = os.replace, lambda old, new: (synced.append((str(old), str(new))),
                                                        replace(old, new))
    get.VOCABULARY = {name: pinned(vocab / name, f"{elsewhere}/{name}")
                      for name in REAL["VOCABULARY"]}
    Handler.files.update({"/" + name: (vocab / name).read_bytes() for name in get.VOCABULARY})
    get.HERE = str(scratch / "beside")                     # where GPT-2's files go
    tokenizer = make_judge(vocab)
    for name, test in [(name, test) for name, test in list(globals().items())
                       if name.startswith("test_")]:
        if len(sys.argv) < 2 or any(word in name for word in sys.argv[1:]):
            Handler.behaviour.clear()
            Handler.etags.clear()
            texts.PIECE, hub.CHUNK, shards_file.BATCH = 150, 100, 500
            begin = time.monotonic()
            try:
                test()
            except Exception as error:
                raise RuntimeError(f"{name} broke off") from error
            if os.environ.get("VERBOSE"):
                print(f"{name}: {time.monotonic() - begin:.1f} s")
    shutil.rmtree(scratch)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)
