"""texts.py: the documents of get.py's files: UTF-8 text, lines of JSON, rows of Parquet.

A split and a resumed run count in a file's units: bytes of a text, lines of JSONL, rows of Parquet.
All units of a file weigh the same. A place in the text therefore follows from the sizes of the
files, which are known before they are read: the sum of the files before it, and its part of the
file it is in.
"""
import codecs
import fnmatch
import io
import json
import os
import re
import stat

import hub
from vocabulary import EOT, Refusal

PIECE = 1 << 20                                            # bytes of a text tokenized as one
# The most bytes of a document for a tokenizer for which no safe cut is known.
WHOLE = 1 << 27
# Where a text may be cut for tokenizers that split there (Vocabulary.cuttable): behind a newline
# that alone separates two visible characters. No first byte of white space is among those behind
# it, and no last byte of white space among those before it.
BOUNDARY = re.compile(rb"(?<=[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf]\n)"
                      rb"(?=[!-~\xc3-\xe0\xe4-\xf4]|\xe3[\x81-\xbf])")
SEPARATOR = re.compile(re.escape(EOT.encode()))
COMPRESSED = (".gz", ".zst", ".bz2")
KINDS = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")


class File:
    """A file here, or one on the hub that comes when it is read and goes when no range needs it
    any more."""

    def __init__(self, path, pinned=None, kind=None):
        self.path, self.pinned, self.kind, self.units, self.uses = path, pinned, kind, None, 0
        self.name = pinned.url if pinned else path
        self.size = pinned.bytes if pinned else os.path.getsize(path)

    def mark(self):
        if self.pinned:
            return f"{self.name} {self.pinned.sha}\n"
        info = os.stat(self.path)
        return f"{os.fsencode(self.path)!r} {info.st_size} {info.st_mtime_ns}\n"

    def count(self, column):
        """Brings the file and counts its units; what is not as expected in it is refused."""
        if self.units is None:
            if self.pinned and not hub.is_whole(self.path, self.pinned):
                hub.download(self.pinned, self.path)
            self.kind = self.kind or kind_of(self.path, column)
            if self.kind == "jsonl":
                self.units = sum(1 for _ in json_rows(self, column))
            elif self.kind == "parquet":
                self.units = parquet_file(self, column).metadata.num_rows
            else:
                problem = self.pinned and text_problem(self.path)
                if problem:
                    raise Refusal(f"{self.name}: expected UTF-8 text, found {problem}\n"
                                  "  -> another file")
                self.units = self.size
        return self.units

    def rows(self, column):
        return (json_rows if self.kind == "jsonl" else parquet_rows)(self, column)


class Range:
    """The units begin..end of a file; end None: to its end."""

    def __init__(self, file, column, begin=0, end=None):
        self.file, self.column, self.begin, self.end = file, column, begin, end
        file.uses += 1

    def place(self, unit):
        """The bytes of the file before a unit. The file need not be here for the ends of it."""
        if unit in (0, None):
            return 0 if unit == 0 else self.file.size
        return unit * self.file.size // self.file.count(self.column)

    def before(self, unit):
        return self.place(unit) - self.place(self.begin)

    def bytes(self):
        return self.before(self.end)

    def pieces(self, cuttable, first=None):
        """Yields (unit, text, whether a document begins) from unit `first` on."""
        units = self.file.count(self.column)
        first, end = first or self.begin, units if self.end is None else self.end
        if self.file.kind == "stories":
            yield from self.stories(first, end)
        elif self.file.kind == "text":
            for unit, data in self.text(first, end, cuttable):
                yield unit, data.decode(), unit == self.begin
        else:
            for unit, text in enumerate(self.file.rows(self.column)):
                if first <= unit < end and text:
                    yield unit, text, True
        self.file.uses -= 1
        if self.file.pinned and not self.file.uses:
            os.remove(self.file.path)

    def text(self, first, end, cuttable):
        if not cuttable and end - self.begin > WHOLE:
            raise Refusal(f"{self.file.name}: expected a document of at most {WHOLE} bytes, as "
                          f"this tokenizer must have it in one piece, found {end - self.begin}\n"
                          "  -> write its parts as lines of JSONL")
        return cut(self.read(first, end), BOUNDARY if cuttable else None, first)

    def stories(self, first, end):
        """Documents with the words "<|endoftext|>" between them. A document's unit is where these
        words begin; if they begin the file, no document is before them."""
        for unit, data in cut(self.read(first, end), SEPARATOR, first):
            before, *texts = data.decode().split(EOT)
            if unit == 0 and before:
                yield unit, before, True
            unit += len(before.encode())
            for text in texts:
                yield unit, text, True
                unit += len(EOT) + len(text.encode())

    def read(self, at, end):
        with open(self.file.path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size != self.file.size:
                raise Refusal(f"{self.file.name}: expected {self.file.size} bytes as at the start, "
                              "found that it has changed\n  -> run again, with another --out, when "
                              "nothing writes to it")
            stream.seek(at)
            while at < end and (block := stream.read(min(PIECE, end - at))):
                at += len(block)
                yield block


def cut(blocks, boundary, at):
    """Yields (offset, bytes): a text in pieces of PIECE bytes and whatever it takes to a
    boundary; without a boundary in one."""
    rest, searched = bytearray(), PIECE
    for block in blocks:
        rest += block
        while boundary and (match := boundary.search(rest, searched)):
            yield at, bytes(rest[:match.start()])
            at, searched = at + match.start(), PIECE
            del rest[:match.start()]
        searched = max(PIECE, len(rest) - len(EOT))
    if rest:
        yield at, bytes(rest)


# ---- kinds of files

def open_lines(path):
    """The file's bytes, without its compression."""
    if not path.endswith(COMPRESSED):
        return open(path, "rb")
    return io.BufferedReader(import_arrow(path).input_stream(path))


def first_row(path):
    """The JSON of the first line of a text, or None."""
    try:
        with open_lines(path) as stream:
            return json.loads(stream.readline(1 << 24))
    except (OSError, ValueError, RecursionError):
        return None


def kind_of(path, column):
    """By the content and the name; a file .json is read by lines if its first line has the
    column."""
    with open(path, "rb") as stream:
        if stream.read(4) == b"PAR1":
            return "parquet"
    plain = re.sub(r"\.(gz|zst|bz2)$", "", path)
    row = first_row(path) if plain.endswith(".json") else None
    lines = plain.endswith((".jsonl", ".ndjson")) or isinstance(row, dict) and column in row
    return "jsonl" if lines else "text"


def is_json(path):
    """Whether a text that is read as such is JSON, as a whole or by its first line."""
    with open(path, "rb") as stream:
        begin = stream.read(256).lstrip()[:1]
    return begin in (b"{", b"[") and (path.endswith(".json")
                                      or isinstance(first_row(path), (dict, list)))


def import_arrow(path):
    try:
        import pyarrow
        import pyarrow.parquet
        return pyarrow
    except ImportError as error:
        raise Refusal(f"{path}: expected pyarrow, found: {error}\n"
                      "  -> python3 -m pip install pyarrow") from None


def json_rows(file, column):
    """The text of each line; an empty line and null are no document."""
    def refuse(found):
        raise Refusal(f"{file.name}: line {number}: expected JSON with a text in the column "
                      f"{column}, found {found}\n"
                      "  -> --column NAME, or mend or leave out this file")

    number = 0
    with open_lines(file.path) as stream:
        try:
            for number, line in enumerate(stream, 1):
                row = json.loads(line) if line.strip() else {column: None}
                if not isinstance(row, dict) or column not in row:
                    refuse(f"the columns {', '.join(row)}" if isinstance(row, dict)
                           else type(row).__name__)
                text = "" if row[column] is None else row[column]
                if not isinstance(text, str):
                    refuse(f"{column}: {type(text).__name__}")
                text.encode()                              # half of a surrogate pair is no text
                yield text
        except (OSError, ValueError, RecursionError) as error:
            refuse(error)


def parquet_file(file, column):
    try:
        table = import_arrow(file.name).parquet.ParquetFile(file.path)
        types = {field.name: str(field.type) for field in table.schema_arrow}
    except (OSError, ValueError) as error:
        raise Refusal(f"{file.name}: expected Parquet, found: {error}\n"
                      "  -> download it again, or leave it out") from None
    if types.get(column) not in ("string", "large_string", "string_view"):
        found = ", ".join(f"{name} of {kind}" for name, kind in types.items())
        raise Refusal(f"{file.name}: expected a column {column} of strings, found {found}\n"
                      "  -> --column NAME")
    return table


def parquet_rows(file, column):
    table = parquet_file(file, column)
    try:
        for group in range(table.num_row_groups):
            for text in table.read_row_group(group, [column])[column].to_pylist():
                yield text or ""
    except (OSError, ValueError) as error:
        raise Refusal(f"{file.name}: expected text in the column {column}, found: {error}\n"
                      "  -> download it again, or leave it out") from None


def text_problem(path):
    """Why a file is no text, or None."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as stream:
        try:
            while block := stream.read(PIECE):
                if b"\0" in block:
                    return "a NUL byte: no text, or UTF-16"
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return f"not UTF-8 ({error.reason})"
    return None if os.path.getsize(path) else "empty"


# ---- lists of files, and their splits

def find(paths, out, kept):
    """The files at `paths` and within them, in a fixed order; what is hidden, a link within a
    folder, or the output stays out. kept: where files of the hub go."""
    found, out = [], os.path.realpath(out)

    def unreadable(error):
        raise error
    for path in paths:
        if path.startswith("hf://"):
            found += hub_files(path, kept)
        elif os.path.isfile(path):
            found.append(File(path))
        walk = os.walk(path, onerror=unreadable) if os.path.isdir(path) else ()
        for folder, inner, names in walk:
            inner[:] = sorted(name for name in inner if name[0] != "."
                              and os.path.realpath(os.path.join(folder, name)) != out)
            files = [os.path.join(folder, name) for name in sorted(names) if name[0] != "."]
            found += [File(file) for file in files if stat.S_ISREG(os.lstat(file).st_mode)]
    return found


def hub_files(address, kept, kind=None):
    """The files of a dataset that a pattern matches; without one all texts, JSONL and Parquet, or,
    where there are such, those with "train" in their path."""
    repository, revision, pattern = hub.parse(address)
    files = hub.files(repository, revision)
    names = [name for name in sorted(files)
             if (fnmatch.fnmatchcase(name, pattern) if pattern
                 else re.sub(r"\.(gz|zst|bz2)$", "", name).endswith(KINDS))]
    train = [name for name in names if "train" in name]
    if not names:
        raise Refusal(f"{address}: expected {pattern or 'text, JSONL or Parquet'}, found "
                      f"{', '.join(list(files)[:9]) or 'no files'}\n"
                      "  -> another pattern, or another HF_ENDPOINT")
    return [File(os.path.join(kept, f"{repository}/{name}".replace("/", "--")), files[name], kind)
            for name in (names if pattern else train or names)]


def check(files, column):
    """The files that are text of some kind, after those that are not have been named."""
    good, said = [], []
    for file in files:
        if not file.pinned:
            file.kind = kind_of(file.path, column)
        problem = text_problem(file.path) if file.kind == "text" and not file.pinned else None
        if problem:
            said.append(f"skipped {file.path}: {problem}")
            continue
        if file.kind == "text" and not file.pinned and is_json(file.path):
            print(f"note: {file.path}: JSON, read as plain text\n  -> lines of JSON in a file "
                  ".jsonl are read by their column")
        good.append(file)
    for file in good:
        if not file.pinned:
            file.count(column)
    total = sum(file.size for file in good)
    print("\n".join(said[:10] + [f"{len(good)} files, {hub.readable(total)}; {len(said)} files "
                                 "skipped"]))
    if not total:
        raise Refusal("expected text, found none in these files\n"
                      "  -> UTF-8 files that are not empty")
    return good


def split(files, val_fraction, column):
    """Validation is the end of all files: from 1 - val_fraction of their bytes on, or the first
    character or row that begins after that."""
    total, begin, splits = sum(file.size for file in files), 0, {"train": [], "val": []}
    middle = int(total * (1 - val_fraction))
    for file in files:
        inside = min(max(middle - begin, 0), file.size)    # bytes of training
        unit = None if inside else 0
        begin += file.size
        if 0 < inside < file.size:
            unit = -(-inside * file.count(column) // file.size)
            if file.kind == "text":
                with open(file.path, "rb") as stream:
                    stream.seek(unit)
                    head = stream.read(4)
                unit += next((i for i, byte in enumerate(head) if byte & 0xC0 != 0x80), len(head))
            unit = None if unit >= file.units else unit
        if unit != 0:
            splits["train"].append(Range(file, column, 0, unit))
        if unit is not None:
            splits["val"].append(Range(file, column, unit))
    for part, share in (("train", 1 - val_fraction), ("val", val_fraction)):
        if share and not splits[part]:
            raise Refusal(f"expected text for both splits, found {total} bytes in all: too few for "
                          f"--val-fraction {val_fraction:g}\n  -> more text, or --val-fraction 0")
    return splits
