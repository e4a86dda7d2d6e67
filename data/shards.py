"""shards.py: shards of tokens for get.py (data/README.md draws the format), written one after the
other; and get.json, the state of a folder of them, which a later run continues from.
"""
import fcntl
import json
import os
import shlex
import shutil
import sys
import time

import hub
import numpy as np
from vocabulary import Refusal

HEADER_BYTES, KINDS = 1024, {2: (20240520, 1), 4: (20240801, 7)}            # llmc/run/data.h
BATCH = 1 << 24                                            # bytes of text tokenized at once


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

    def at(self, done, tokens):
        self.done, self.tokens, now = done, self.tokens + tokens, time.monotonic()
        if now - self.last < (1 if self.terminal else 10):
            return
        self.last, rate = now, max(1.0, (self.done - self.first) / (now - self.start))
        line = (f"{self.label}: {hub.readable(self.done)} of {hub.readable(self.total)}, "
                f"{rate / 1e6:.1f} MB/s, {self.tokens / 1e6:.1f}M tokens, "
                f"{max(0, self.total - self.done) / rate:.0f} s to go")
        print(f"\r{line}\x1b[K" if self.terminal else line, end="" if self.terminal else "\n",
              file=sys.stderr, flush=True)


# ---- shards, and the state of a folder of them

def lock_folder(path):
    """Until this process ends no other get.py works there."""
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(f"{path}: expected to be alone, found another get.py at work there\n"
                      "  -> wait for it, or another --out") from None
    except OSError:
        pass                                               # a file system without locks


class Folder:
    """A folder of shards and its get.json: the settings it was made with, the text it is made of,
    and the shards that are done."""

    def __init__(self, path, settings):
        self.path, self.file = path, os.path.join(path, "get.json")
        self.is_new = not os.path.exists(path)
        os.makedirs(path, exist_ok=True)
        lock_folder(path)
        self.before = set(os.listdir(path))
        there = sorted(name for name in self.before if name.endswith(".bin")
                       and name != "tokenizer.bin")
        if not os.path.exists(self.file):
            if there:
                raise Refusal(f"{path}: expected a folder without shards, found {there[0]}\n"
                              "  -> remove the old *.bin files, or another --out")
            self.begin(settings)
            return
        try:
            with open(self.file, encoding="utf-8") as file:
                self.state = json.load(file)
            before, _ = self.state["settings"], self.state["shards"]
        except (ValueError, TypeError, KeyError):
            raise Refusal(f"{self.file}: expected the state of an earlier run, found something "
                          f"else\n  -> remove {path}, or another --out") from None
        differ = [f"{key} {before.get(key)}, now {settings.get(key)}"
                  for key in {**before, **settings} if before.get(key) != settings.get(key)]
        if differ and there:
            raise Refusal(f"{path}: expected the settings this folder "
                          f"was begun with, found {'; '.join(differ)}\n"
                          "  -> the earlier settings to continue it, or another --out")
        if differ:
            self.begin(settings)                           # nothing was done under the earlier ones

    def begin(self, settings):
        self.state = {"settings": settings, "text": None, "shards": {}, "complete": False}
        self.save()

    def save(self):
        hub.write_whole(self.file, (json.dumps(self.state, indent=1) + "\n").encode())

    def clear(self):
        """After a refusal without work to continue: removes what this command has made."""
        parts = os.path.join(self.path, hub.PARTS)
        made = {"get.json", "tokenizer.bin", hub.PARTS}
        others = set(os.listdir(self.path)) - self.before - made
        if others or os.path.isdir(parts) and os.listdir(parts):
            return
        hub.remove_parts(self.path)
        for name in set(os.listdir(self.path)) - self.before:
            os.remove(os.path.join(self.path, name))
        if self.is_new:
            os.rmdir(self.path)

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

    def tokens(self, split):
        return sum(shard["tokens"] for name, shard in self.state["shards"].items()
                   if f"_{split}_" in name)

    def complete(self):
        return self.state["complete"] and all(map(self.intact, self.state["shards"]))

    def need(self, size):
        free = shutil.disk_usage(self.path).free
        if size > free:
            raise Refusal(f"{self.path}: expected {hub.readable(size)} of "
                          f"free disk space, found {hub.readable(free)}\n"
                          "  -> free some, or another --out, or less: --tokens, --shards")

    def report(self, model):
        """The tokens of each split, and a command that works with them."""
        self.state["complete"] = True
        self.save()
        say(f"{self.path}: complete, {len(self.state['shards'])} shards")
        counts = {split: self.tokens(split) for split in ("train", "val")}
        for split, tokens in counts.items():
            print(f"{split:5}  {tokens} tokens")
        tokenizer = os.path.join(self.path, "tokenizer.bin")
        flags = ["--data", self.path, "--model", model]
        if not counts["val"]:                              # a pattern has no validation beside it
            flags[1] = os.path.join(self.path, "*_train_*.bin")
            flags += ["--tokenizer", tokenizer] if os.path.exists(tokenizer) else []
        if not counts["train"]:
            flags = ["--from", "RUN", "--eval", "--val-data", self.path]
        fewest = min(filter(None, counts.values()))
        flags += ["--seq", str(fewest - 1)] if fewest <= 128 else []        # llama-char's
        print(f"next: ./train_gpt {shlex.join(flags)}")


def shard_tokens(path):
    """The number of tokens that a whole shard's header gives; None where the file is not one."""
    if not os.path.isfile(path) or os.path.getsize(path) <= HEADER_BYTES:
        return None
    magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
    whole = any((magic, version, HEADER_BYTES + width * tokens) == (*kind, os.path.getsize(path))
                for width, kind in KINDS.items())
    return tokens if whole else None


# ---- text to shards

def tokenized(ranges, vocabulary, first):
    """Yields (range, unit, bytes done, tokens) of all pieces from `first` = (range, unit) on; a
    document's first piece has the separator before it."""
    def encode(batch):
        for (*place, begins, _), ids in zip(batch, vocabulary.encode([row[-1] for row in batch])):
            yield *place, np.array([vocabulary.separator] * begins + ids, vocabulary.dtype())
        batch.clear()

    batch, size, before = [], 0, 0
    for index, part in enumerate(ranges):
        if index >= first[0]:
            for unit, text, begins in part.pieces(vocabulary.cuttable,
                                                  first[1] if index == first[0] else None):
                batch.append((index, unit, before + part.before(unit), begins, text))
                size += len(text)
                if size >= BATCH:
                    yield from encode(batch)
                    size = 0
        before += part.bytes()
    yield from encode(batch)


class Shards:
    """Writes the shards of one split, one after the other; get.json knows of each which piece of
    the text its end lies in ("range", "unit") and how many tokens of that piece it has ("skip")."""

    def __init__(self, folder, prefix, split, vocabulary, largest):
        self.folder, self.start, self.largest = folder, f"{prefix}_{split}_", largest
        self.vocabulary, self.shards, self.file = vocabulary, folder.state["shards"], None
        self.lengths = vocabulary.lengths()
        names = [name for name in sorted(self.shards) if name.startswith(self.start)]
        kept = next((i for i, name in enumerate(names) if not folder.intact(name)), len(names))
        for name in names[kept:]:
            say(f"{folder.path}: expected {name} as it was written, found otherwise: it and those "
                "after it are written again")
            del self.shards[name]
        self.number, self.total = kept, sum(self.shards[name]["tokens"] for name in names[:kept])
        begin = {"range": 0, "unit": 0, "skip": 0}
        self.last = self.shards[names[kept - 1]] if kept else begin

    def put(self, tokens, place):
        """Appends some tokens of a piece; place: how far in the text they reach."""
        done = 0
        while done < len(tokens):
            if self.file is None:
                name = f"{self.start}{self.number:06d}.bin"
                self.path, self.count, self.bytes = os.path.join(self.folder.path, name), 0, 0
                self.file = open(self.path + ".tmp", "wb")
                self.file.write(bytes(HEADER_BYTES))
            part = tokens[done:done + self.largest - self.count]
            self.file.write(part.tobytes())
            self.bytes += 0 if self.lengths is None else int(self.lengths[part].sum())
            done += len(part)
            self.count += len(part)
            self.total += len(part)
            self.reached = {**place, "skip": place["skip"] + done}
            if self.count == self.largest:
                self.end()

    def end(self):
        if self.file is None:
            return
        kind = KINDS[self.vocabulary.dtype().itemsize]
        self.file.seek(0)
        self.file.write(np.array([*kind, self.count, self.vocabulary.size,
                                  self.bytes if self.bytes < 1 << 31 else 0], "<i4").tobytes())
        hub.publish(self.file, self.path + ".tmp", self.path)
        self.shards[os.path.basename(self.path)] = {"tokens": self.count, **self.reached}
        self.folder.save()
        self.file, self.number = None, self.number + 1


def write_split(folder, prefix, split, ranges, vocabulary, limit, largest):
    """Tokenizes one split from where its last whole shard ends, up to `limit` tokens."""
    shards = Shards(folder, prefix, split, vocabulary, largest)
    first, skip = (shards.last["range"], shards.last["unit"]), shards.last["skip"]
    before = sum(part.bytes() for part in ranges[:first[0]])
    done = max(0, before + ranges[first[0]].before(first[1]))     # unit 0 may be before the range
    progress = Progress(f"{prefix} {split}", sum(part.bytes() for part in ranges), done)
    if limit is not None and shards.total >= limit:
        return
    for index, unit, done, tokens in tokenized(ranges, vocabulary, first):
        used = min(skip, len(tokens))
        skip = 0
        end = len(tokens) if limit is None else min(len(tokens), used + limit - shards.total)
        shards.put(tokens[used:end], {"range": index, "unit": unit, "skip": used})
        progress.at(done, len(tokens))
        if shards.total == limit:
            break
    shards.end()


