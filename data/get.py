#!/usr/bin/env python3
"""get.py: text, tokenized, as shards for training (data/README.md draws the format).

    python3 data/get.py --out DIR PATH...       your own: UTF-8 text, JSONL, Parquet (compressed
                                                JSONL too), folders, or files on the hub:
                                                hf://datasets/OWNER/NAME[@REVISION][/PATTERN]
    python3 data/get.py tinyshakespeare         1 MB of text: 302 thousand tokens
    python3 data/get.py tinystories             2.2 GB of text
    python3 data/get.py fineweb | fineweb-edu   ready-made shards of 100 million tokens and 200 MB
                                                each, --shards N of them, by default 10
    python3 data/get.py c4-val | pile-val       validation text of C4, of the Pile
    python3 data/get.py debian                  32 MB of prose and 35 MB of a dictionary, from
                                                packages of Debian or Ubuntu by apt-get: as bytes
                                                and as GPT-2's tokens, or as those of --vocab
    python3 data/get.py tasks                   files for ./train_gpt --tasks: all, or those of a
                                                paper (spannorm, hybridnorm, hybridnorm-moe, sdd),
                                                or some by name (data/tasks.py lists them)
    python3 data/get.py tokenizer               tokenizer.bin alone

The tokens are GPT-2's, or with --vocab those of any tokenizer.json, or bytes (--vocab bytes).
Folders also get tokenizer.bin, so that the trained model can be prompted and its samples read.
Whatever stops a run (a kill, a full disk, no network), the same command continues it: DIR/get.json
lists the finished parts. Needs numpy, and for tokens tokenizers, for GPT-2's also tiktoken;
huggingface_hub for downloads, pyarrow for Parquet and compressed files. HF_ENDPOINT, HF_TOKEN and
the usual proxy variables are honoured. A folder of your own called tinystories is ./tinystories
here.
"""
import argparse
import contextlib
import difflib
import hashlib
import os
import re
import shlex
import sys

try:
    import numpy
except ImportError as missing:
    sys.exit(f"error: expected numpy, found: {missing}\n  -> python3 -m pip install numpy tiktoken "
             "tokenizers huggingface_hub pyarrow")
import debian
import hub
import tasks
import texts
from shards import Folder, lock_folder, say, shard_tokens, write_split
from vocabulary import EOT, Bytes, Gpt2, Learned, Refusal

HERE = os.path.dirname(os.path.abspath(__file__))
# the files that tiktoken takes
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
VOCABULARY = {
    "encoder.json": hub.Pinned(GPT2 + "encoder.json", 1042301,
                               "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    "vocab.bpe": hub.Pinned(GPT2 + "vocab.bpe", 456318,
                            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
}
# Text: train and val are the splits' files on the hub, or one pinned file that is split here.
# Ready: shards already, numbered from 1 for training.
TEXT = {
    "tinyshakespeare": {"train": hub.Pinned(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")},
    "tinystories": {"train": "roneneldan/TinyStories/TinyStoriesV2-GPT4-train.txt",
                    "val": "roneneldan/TinyStories/TinyStoriesV2-GPT4-valid.txt"},
    "c4-val": {"val": "allenai/c4/en/c4-validation.*.json.gz"},
    "pile-val": {"val": "monology/pile-uncopyrighted/val.jsonl.zst"},
}
READY = {
    "fineweb": ("kjj0/fineweb10B-gpt2", "fineweb_train_{:06d}.bin", "fineweb_val_000000.bin"),
    "fineweb-edu": ("karpathy/fineweb-edu-100B-gpt2-token-shards", "edu_fineweb_train_{:06d}.bin",
                    "edu_fineweb_val_000000.bin"),
}
NAMES = (*TEXT, *READY, *tasks.SUITES, *tasks.TASKS, "debian", "tokenizer")
MOST_TOKENS = (1 << 31) - 1                                # of a shard, whose header has int32


def get_vocabulary(path, separator):
    """GPT-2's, downloaded beside this program; bytes; or that of a file, a folder or a
    repository."""
    if path == "bytes":
        if separator:
            raise Refusal(f"expected --vocab bytes alone, found --separator {separator}\n"
                          "  -> without it: token 0 begins documents")
        return Bytes()
    if path is None:
        try:
            import tiktoken, tokenizers  # noqa: E401, F401
        except ImportError as error:
            raise Refusal(f"GPT-2's tokens: expected tiktoken and tokenizers, found: {error}\n"
                          "  -> python3 -m pip install tiktoken tokenizers, or --vocab bytes"
                          ) from None
        paths = {name: os.path.join(HERE, "gpt2", name) for name in VOCABULARY}
        for name, pinned in VOCABULARY.items():
            if not hub.is_whole(paths[name], pinned):
                hub.download(pinned, paths[name])
        return Gpt2(*paths.values())
    if not os.path.exists(path):
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            raise Refusal(f"{path}: expected a tokenizer, found nothing there\n"
                          "  -> --vocab with a folder, a tokenizer.json, or OWNER/NAME on the hub")
        path = hub.get_tokenizer(path, os.path.join(HERE, "tokenizers", path))
    vocabulary = Learned(path, separator)
    say(f"{path}: a vocabulary of {vocabulary.size} tokens, of which "
        f"{vocabulary.tokenizer.id_to_token(vocabulary.separator)} begins documents")
    return vocabulary


def write_tokenizer(vocabulary, path):
    """tokenizer.bin, unless this kind has none."""
    data, cannot = vocabulary.packed()
    if data is None and cannot is None:
        return
    if data is None:
        say(f"note: no {path}: {cannot}: samples are numbers of tokens, and there are no prompts")
        return
    if cannot:
        say(f"note: {path} decodes samples; --prompt will be refused: the trainer does not have "
            f"{cannot}")
    if not os.path.exists(path) or hub.read(path) != data:
        hub.write_whole(path, data)


# ---- datasets

def get_ready(source, folder, count):
    """Ready-made shards: the first `count` for training, and the one for validation."""
    repository, train, val = source
    names = [val, *(train.format(i) for i in range(1, count + 1))]
    missing = [name for name in names if not folder.intact(name)]
    files = hub.files(repository) if missing else {}
    absent = [name for name in missing if name not in files]
    if absent:
        there = sum(train.format(i) in files for i in range(1, len(files) + 1))
        raise Refusal(f"{repository}: expected {absent[0]} on "
                      f"{hub.endpoint()}, found {there} training shards without it\n"
                      + (f"  -> --shards {there} or fewer" if val in files and there
                         else "  -> another HF_ENDPOINT, or another dataset"))
    folder.need(sum(files[name].bytes for name in missing) - hub.parts_bytes(folder.path))
    for name in missing:
        path = os.path.join(folder.path, name)
        if not hub.is_whole(path, files[name]):            # a kill came before it was noted
            hub.download(files[name], path)
        tokens = shard_tokens(path)
        if tokens is None:
            os.remove(path)
            raise Refusal(f"{files[name].url}: expected a shard with as many tokens as it says, "
                          "found another file\n  -> the dataset's authors have changed its format: "
                          "take another dataset")
        folder.state["shards"][name] = {"tokens": tokens}
        folder.save()


def find_files(name, args, out):
    """The files of a dataset, or those that the user names: for training and for validation (None:
    a part of the former). Files named for validation are not trained on."""
    kept = os.path.join(out, hub.PARTS)
    if name is None:
        val = texts.find(args.val, out, kept) if args.val else None
        taken = {os.path.realpath(file.path) for file in val or ()}
        train = texts.find(args.what, out, kept)
        rest = [file for file in train if os.path.realpath(file.path) not in taken]
        if train and not rest:
            raise Refusal(f"expected files for training beside those of --val, found "
                          f"{len(train)} that are all named there\n"
                          "  -> other files, or --val-fraction 0.1 for a part of each")
        return rest, val
    if name == "tinyshakespeare":
        pinned = TEXT[name]["train"]
        return [texts.File(os.path.join(kept, "input.txt"), pinned, "text")], None
    kind = "stories" if name == "tinystories" else None
    train, val = (texts.hub_files("hf://datasets/" + TEXT[name][split], kept, kind)
                  if split in TEXT[name] else [] for split in ("train", "val"))
    return train, val


def get_text(name, folder, vocabulary, args, train, val):
    """Tokenizes both splits; validation first, because it is short."""
    train = texts.check(train, args.column) if train or not name else []
    if val is None:
        splits = texts.split(train, args.val_fraction, args.column)
    else:
        val = texts.check(val, args.column)
        splits = {split: [texts.Range(file, args.column) for file in files]
                  for split, files in (("train", train), ("val", val))}
    limited, width = "train" if splits["train"] else "val", vocabulary.dtype().itemsize
    each = 1 if isinstance(vocabulary, Bytes) else 4         # bytes of text a token
    sizes = {split: sum(part.bytes() for part in ranges) // each * width
             for split, ranges in splits.items()}
    if args.tokens:
        sizes[limited] = min(sizes[limited], width * args.tokens)
    folder.need(sum(sizes.values())
                - sum(width * shard["tokens"] for shard in folder.state["shards"].values()))
    for split in (split for split in ("val", "train") if splits[split]):
        write_split(folder, name or "text", split, splits[split], vocabulary,
                    args.tokens if split == limited else None, args.shard_tokens)
        if folder.tokens(split) < 2:
            raise Refusal(f"expected two tokens or more for {split}, found fewer: its documents "
                          "are empty\n  -> other files")
    hub.remove_parts(folder.path)


# ---- the command line

def at_least(least, most=None):
    def number(text):
        value = int(text) if text.isdecimal() else -1
        if value < least or most and value > most:
            limit = f" and at most {most}" if most else ""
            raise Refusal(f"expected a whole number of {least} or more{limit}, found {text!r}\n"
                          "  -> digits alone, as in --tokens 1000000")
        return value
    return number


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refusal(f"--val-fraction: expected a number from 0 to 1, found {text!r}\n"
                      "  -> --val-fraction 0.1")
    return value


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        raise Refusal(f"{message}\n  -> python3 data/get.py --help")


def parse_arguments():
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                       allow_abbrev=False)
    add = parser.add_argument
    add("what", nargs="+", help="a dataset, tasks, `tokenizer`, or files and folders")
    add("--out", help="the folder for the shards (data/NAME for a dataset), or the file for "
                      "`tokenizer` (tokenizer.bin)")
    add("--val", action="append", metavar="PATH", help="the text for validation; may be repeated")
    add("--val-fraction", type=fraction, help="part of the text for validation instead (0.1); 0: "
                                              "none, 1: all")
    add("--column", help="of JSONL and Parquet: what holds the text (text)")
    add("--tokens", type=at_least(2), help="at most this many tokens for training")
    add("--shards", type=at_least(1), help="this many ready-made shards for training (10)")
    add("--shard-tokens", type=at_least(2, MOST_TOKENS), help="tokens per shard (100000000)")
    add("--vocab", help="bytes, a tokenizer.json, a folder with it or with vocab.json and "
                        "merges.txt, or OWNER/NAME on the hub (GPT-2's, downloaded to data/gpt2)")
    add("--separator", metavar="TOKEN", help="the token of --vocab that begins documents (its BOS, "
                                             "or else its EOS)")
    return parser.parse_args()


def check_arguments(args):
    """What is asked for: a name of NAMES, "tasks", or None for the user's own files."""
    commands = [what for what in args.what if what in (*NAMES, "tasks")]
    name = commands[0] if len(args.what) == 1 and commands else None
    if not name and all(what in tasks.TASKS for what in args.what):
        name = "tasks"
    is_task = name == "tasks" or name in tasks.TASKS or name in tasks.SUITES
    if is_task and (args.tokens or args.shards):
        raise Refusal("expected a task alone, found a number of tokens or shards\n"
                      "  -> without --tokens and --shards: tasks are small")
    if commands and not name:
        raise Refusal(f"expected one dataset or your own files, found {' '.join(args.what)}\n"
                      "  -> one command each; a folder of that name is ./NAME")
    if name in READY and args.tokens or name not in READY and args.shards:
        raise Refusal(f"expected {'--shards' if name in READY else '--tokens'} for "
                      f"{' '.join(args.what)}, found {'--tokens' if name in READY else '--shards'}"
                      "\n  -> ready-made shards have 100 million tokens each: --shards N; other "
                      "text is counted in tokens: --tokens N")
    own = [flag for flag, value in (("--val", args.val), ("--column", args.column)) if value]
    if name and own or args.val and args.val_fraction is not None:
        raise Refusal(f"expected {own[0]} with your own files and without --val-fraction, found "
                      "otherwise\n  -> either --val PATH or --val-fraction")
    is_text = name is None or name in TEXT or name == "debian"
    if args.shard_tokens and not is_text:
        raise Refusal(f"{' '.join(args.what)}: expected no --shard-tokens, as no text becomes "
                      f"shards, found {args.shard_tokens}\n  -> leave --shard-tokens out")
    if args.val_fraction is not None and (not is_text or "val" in TEXT.get(name, ())):
        raise Refusal(f"{' '.join(args.what)}: expected no --val-fraction, as no text is split, "
                      f"found {args.val_fraction:g}\n  -> leave --val-fraction out")
    for what in () if name else [*args.what, *(args.val or [])]:
        if not os.path.isfile(what) and not os.path.isdir(what) and not what.startswith("hf://"):
            near = difflib.get_close_matches(what.lower(), NAMES, 1)
            raise Refusal(f"{what}: expected a text file, a folder, hf://datasets/... or one of "
                          f"{', '.join(NAMES)}; found nothing of the kind\n"
                          f"  -> {'did you mean ' + near[0] + '?' if near else 'check the path'}")
    if not name and not args.out:
        raise Refusal("expected a folder to write to, found no --out\n  -> --out DIR")
    if args.separator and not args.vocab:
        raise Refusal("expected --vocab with --separator, found GPT-2's vocabulary\n"
                      f"  -> without --separator: it has {EOT} alone")
    args.val_fraction = 0.1 if args.val_fraction is None else args.val_fraction
    args.shard_tokens = args.shard_tokens or 100_000_000
    args.column = args.column or "text"
    return "tasks" if is_task else name


def get_tasks(args, vocabulary, folder):
    """The files of the tasks, into their folder."""
    what = args.what[0]
    columns = tasks.SUITES.get(what) or dict.fromkeys(tasks.TASKS if what == "tasks" else args.what)
    for task, metric in columns.items():
        tasks.get_task(task, folder.path, vocabulary, metric)
    print(f"next: ./train_gpt --from RUN --eval --tasks {shlex.quote(folder.path)}")


def on_hub(args):
    """The addresses on the hub among the user's paths."""
    return [what for what in [*args.what, *(args.val or [])] if what.startswith("hf://")]


def get_shards(name, args, vocabulary, folder):
    if name in READY:
        get_ready(READY[name], folder, args.shards or 10)
        folder.report("gpt2-124M")
        return
    remote = name or len(on_hub(args)) == len(args.what) + len(args.val or [])
    if not (remote and folder.complete()):                 # what is complete needs no request
        train, val = find_files(name, args, folder.path)
        marks = "\nvalidation\n".join("".join(file.mark() for file in files)
                                      for files in (train, val) if files is not None)
        folder.same_text(f"{len(train) + len(val or [])} files "
                         f"{hashlib.sha256(marks.encode()).hexdigest()[:16]}")
        if not folder.complete():
            get_text(name, folder, vocabulary, args, train, val)
    folder.report("llama-char")


def get_debian(args):
    """Both corpora, each as shards of bytes and of GPT-2's tokens, or of those of --vocab."""
    folder = args.out or os.path.relpath(os.path.join(HERE, "debian"))
    os.makedirs(folder, exist_ok=True)
    lock_folder(folder)
    try:
        files = dict(debian.bring(folder))
    except Refusal:
        for empty in (os.path.join(folder, hub.PARTS), folder):
            with contextlib.suppress(OSError):
                os.rmdir(empty)
        raise
    for vocab in [args.vocab] if args.vocab else ["bytes", None]:
        vocabulary = get_vocabulary(vocab, args.separator)
        kind = vocab if vocab == "bytes" else f"{vocabulary.size}"
        for corpus, path in files.items():
            settings = {"dataset": f"debian {corpus}", "vocabulary": vocabulary.fingerprint(),
                        "version": 2, "--tokens": args.tokens, "--val-fraction": args.val_fraction,
                        "--shard-tokens": args.shard_tokens}
            shards = Folder(os.path.join(folder, f"{corpus}-{kind if vocab else 'gpt2'}"), settings)
            write_tokenizer(vocabulary, os.path.join(shards.path, "tokenizer.bin"))
            file = texts.File(path)
            shards.same_text(hashlib.sha256(hub.read(path)).hexdigest())
            if not shards.complete():
                get_text(corpus, shards, vocabulary, args, [file], None)
            shards.report("llama-char")


def run():
    args = parse_arguments()
    name = check_arguments(args)
    if name == "debian":
        get_debian(args)
        return
    if name in READY and args.vocab:
        raise Refusal(f"{name}: expected GPT-2's vocabulary, which its shards are made with, found "
                      f"--vocab {args.vocab}\n  -> leave --vocab out")
    vocabulary = get_vocabulary(args.vocab, args.separator)
    if name == "tokenizer":
        path = args.out or "tokenizer.bin"
        path = os.path.join(path, "tokenizer.bin") if os.path.isdir(path) else path
        data, cannot = vocabulary.packed()
        if data is None:
            raise Refusal(f"{args.vocab}: {cannot or 'bytes have no file, and need none'}\n"
                          "  -> without it: --data works, samples are numbers of tokens")
        write_tokenizer(vocabulary, path)
        print(f"{path}: {vocabulary.size} tokens")
        return
    where = args.what[0] if args.what[0] in tasks.SUITES else name
    settings = {"dataset": where or "text", "vocabulary": vocabulary.fingerprint()}
    if name != "tasks" and name not in READY:
        settings.update({"version": 2, "--tokens": args.tokens, "--column": args.column,
                         "--shard-tokens": args.shard_tokens, "hub": on_hub(args),
                         "--val-fraction": None if args.val else args.val_fraction})
    folder = Folder(args.out or os.path.relpath(os.path.join(HERE, where)), settings)
    try:
        write_tokenizer(vocabulary, os.path.join(folder.path, "tokenizer.bin"))
        if name == "tasks":
            get_tasks(args, vocabulary, folder)
        else:
            get_shards(name, args, vocabulary, folder)
    except Refusal:
        folder.clear()
        raise


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
