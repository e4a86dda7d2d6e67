#!/usr/bin/env python3
"""export_hf.py: a run or a checkpoint as a folder for Hugging Face transformers.

    python3 dev/export_hf.py RUN|CHECKPOINT FOLDER [--dtype float32|bfloat16]

FOLDER gets config.json, model.safetensors and, where the vocabulary is known, tokenizer.json. Where a class of transformers computes exactly what the model does (a row of
llmc/hf.h), it is that class; everywhere else NormForCausalLM: dev/modeling_norm.py goes along, and the placement's row of llmc/modes.h into config.json, so that
AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) works. The tables are read from those headers by the C preprocessor ($CC, else cc).
Needs torch, safetensors, tokenizers (which comes with transformers) and xxhash.
"""
import argparse
import errno
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

import torch
import xxhash
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

ROOT = pathlib.Path(__file__).resolve().parent.parent
END = "<|endoftext|>"


class Refusal(Exception):
    pass


# ---------------------------------------------------------------------------------------------------------------------- tables


class Names(dict):
    """Identifiers of C stand for themselves."""

    def __missing__(self, name):
        return name


def read_tables():
    """The rows of the tables of llmc/, as the C preprocessor expands them: {table: [row, ...]}"""
    wanted = {name: f"HF_{name.upper()}_TABLE(ROW)" for name in ("class", "key", "must", "tensor")}
    wanted |= {"mode": "MODE_TABLE(ROW, ROW)", "sdd": "SDD_TABLE(ROW)", "flag": "FLAG_TABLE(WORD_ROW)"}
    text = '#include "llmc/hf.h"\n#define ROW(...) row(__VA_ARGS__),\n#define WORD_ROW(word, ...) row(#word, __VA_ARGS__),\n' + "".join(f"@@{name} {call}\n" for name, call in wanted.items())
    command = [*os.environ.get("CC", "cc").split(), "-E", "-P", "-x", "c", "-std=c17", "-D_DEFAULT_SOURCE", "-D_XOPEN_SOURCE=700", f"-I{ROOT}", "-"]
    made = subprocess.run(command, input=text, capture_output=True, text=True)
    if made.returncode:
        raise Refusal(f"{' '.join(command)}: expected the tables of llmc/, found: {made.stderr.strip()}\n  -> CC=the C compiler that builds norm.c")
    tables = {}
    for part in made.stdout.replace("((void *)0)", "None").split("@@")[1:]:
        name, rows = part.split(None, 1)
        classes = {bit: 1 << i for i, bit in enumerate(dict.fromkeys(re.findall(r"\brow\((IS_\w+),", rows if name == "class" else "")))}
        tables.setdefault("bits", Names(row=lambda *row: row)).update(classes)
        tables[name] = eval(f"[{rows}]", {"__builtins__": {}}, tables["bits"])
    return tables


def named_rows(tables, name):
    """The row of a placement, and those that it names for some of its layers."""
    sub = ("in", "c", "out", "skip", "a", "post")
    columns = ("q", "k", "v", "ctx", "per", "emb", "fin", "sdd", "unit", "first", "early")
    rows = {row[0]: {"attn": dict(zip(sub, row[1:7])), "ffn": dict(zip(sub, row[7:13])), **dict(zip(columns, row[13:24]))} for row in tables["mode"]}
    for row in rows.values():
        for column in ("first", "early"):
            row[column] = None if row[column] == "NO_ROW" else row[column]
        for part in (row, row["attn"], row["ffn"]):
            part.update({key: 2 for key, value in part.items() if value == "L2"})
    if name not in rows:
        raise Refusal(f"a run of {name}, which llmc/modes.h does not know\n  -> the norm.c that trained it")
    return {key: rows[key] for key in (name, rows[name]["first"], rows[name]["early"]) if key}


# ------------------------------------------------------------------------------------------------------------------ checkpoint


def damage(folder):
    """What is wrong with the files that a checkpoint's manifest promises; None: nothing is."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except OSError as error:
        return f"manifest.json: {error.strerror}"
    except ValueError as error:
        return f"manifest.json: {error}"
    if not isinstance(manifest, dict) or not manifest:
        return "manifest.json: expected an object of files"
    for name, entry in manifest.items():
        size, xxh64 = map((entry if isinstance(entry, dict) else {}).get, ("size", "xxh64"))
        plain = re.fullmatch(r"[^./\0][^/\0]{0,62}", name) and name != "manifest.json"
        if not plain or type(size) is not int or not isinstance(xxh64, str):
            return f'manifest.json: expected a plain name, "size" and "xxh64" for "{name:.80}"'
        try:
            found, digest = 0, xxhash.xxh64()
            if (folder / name).is_fifo():
                return f"{name}: {os.strerror(errno.ENOTSUP)}"
            with open(folder / name, "rb") as file:
                while piece := file.read(1 << 20):
                    found += len(piece)
                    digest.update(piece)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != size or digest.hexdigest() != xxh64:
            return (f"{name}: expected {size} bytes with checksum {xxh64:.16}, "
                    f"found {found} with {digest.hexdigest()}")
    return None


def other_step(folder, step):
    """Why a whole checkpoint is not that of this step: it was renamed. "" if it is."""
    try:
        stated = json.loads((folder / "state.json").read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return "its state.json names no step"
    return "" if stated == step else f"its state.json is of step {stated}, was it renamed?"


def find_checkpoint(path):
    """The newest whole checkpoint of a run, or the checkpoint that path is. Finds, refuses and
    passes over what checkpoint_find and checkpoint_latest of llmc/ do. A folder may be a link."""
    if (path / "manifest.json").exists():
        if why := damage(path):
            raise Refusal(f"{path} is damaged: {why}\n  -> use another checkpoint of that run")
        return path
    if not path.is_dir():
        raise Refusal(f"{path}: expected the folder of a run or of a checkpoint\n  -> ls runs/")
    damaged, below = False, math.inf
    while True:
        names = [entry.name for entry in path.iterdir()]
        names = [name for name in names if re.fullmatch(r"step_\d+", name)]
        steps = {step for name in names if name == f"step_{(step := int(name[5:])):08d}"}
        step = max((step for step in steps if step < below), default=-1)
        if step < 0:
            break
        folder = path / f"step_{step:08d}"
        if not (why := damage(folder) or other_step(folder, step)):
            return folder
        if not os.path.lexists(folder):  # it made room for a newer one
            below = math.inf
            continue
        below, damaged = step, True
        print(f"warning: passing over the damaged checkpoint {folder}: {why}", file=sys.stderr)
    if damaged:
        raise Refusal(f"every checkpoint in {path} is damaged\n  -> restore one from a copy")
    raise Refusal(f"{path} holds no checkpoint\n  -> train with --save-every, or give another run")


def read_flags(config, tables, w):
    """The flags that shape the model, as numbers and words; what is 0 for "as usual" is taken from the tensors w, and what means nothing in this model has its default."""
    order = [row[0] for row in tables["flag"]]
    default = {row[0]: row[2] for row in tables["flag"][1 : order.index("init")]}
    kinds = {row[0]: row[1] for row in tables["flag"]}

    def typed(name, text):
        return int(text) if kinds[name] == "INT" else float(text) if kinds[name] == "NUMBER" else text

    f = {name: typed(name, config["flags"].get(name, text)) for name, text in default.items()}
    f["vocab"] = len(w["model.embed_tokens.weight"])
    default["kv_heads"], f["kv_heads"] = str(f["heads"]), f["kv_heads"] or f["heads"]
    last = f"model.layers.{f['layers'] - 1}.mlp."
    f["ffn"] = len(w[last + "experts.up_proj.weight"]) // f["experts"] if f["experts"] else len(w[last + "up_proj.weight"])
    f["dense_ffn"] = len(w["model.layers.0.mlp.up_proj.weight"]) if f["experts"] and f["dense_layers"] else 0
    rows = named_rows(tables, config["norm_mode"])
    idle = ["balance_loss", "sequence_loss", "router_z_loss", "router_losses"]
    idle += ["rope_theta"] * (f["positions"] == "learned") + ["rope_size"] * (not f["kv_rank"]) + ["sdd"] * (not rows[config["norm_mode"]]["sdd"])
    idle += [] if rows[config["norm_mode"]]["early"] else ["mix_ratio"]
    idle += [] if f["experts"] else ["experts_per_token", "shared_experts", "dense_layers", "dense_ffn", "router", "router_scale", "balance_rate"]
    f["final_norm"] = "auto" if ("model.norm.weight" in w) == (rows[config["norm_mode"]]["fin"] == 1) else "on"
    return f | {name: typed(name, default[name]) for name in idle}, {name: typed(name, text) for name, text in default.items()}, rows


# --------------------------------------------------------------------------------------------------------------- stock classes


def value_of(word):
    """null, true, a number or [] as JSON has them; any other word is itself."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def stock_class(tables, mode, f, default):
    """The row of the first class that is this model, and its config.json; or None. A class fits where its placement and flags are ours, and what it has no key for is as usual."""
    choices = {row[0]: row[5].split("|") for row in tables["flag"]}
    for row in tables["class"]:
        bit, name, model_type, placement, flags = row
        keys = [key[1:3] for key in tables["key"] if key[0] & tables["bits"][bit]]
        words = iter(flags.split())
        own = {flag[2:].replace("-", "_"): value for flag, value in zip(words, words)}
        told = {flag for _, flag in keys} | {"seq"}
        fits = mode == placement and all(f[flag] > 0 if flag == "balance_rate" else f[flag] == value for flag, value in own.items())
        fits = fits and all(f[flag] == value for flag, value in default.items() if flag not in told | own.keys())
        fits = fits and all(f[flag] for flag in ("experts", "kv_rank", "shared_experts") if flag in told)
        config = {"architectures": [name], "model_type": model_type}

        def put(key, value):
            *outer, last = key.split(".")
            (config.setdefault(outer[0], {}) if outer else config)[last] = value

        for key, flag in keys if fits else []:
            if choices[flag] != [""]:
                fits = fits and f[flag] in choices[flag][:2]
                put(key, f[flag] == choices[flag][1])
            else:
                put(key, f[flag])
        for classes, key, missing, allowed in tables["must"] if fits else []:
            if not classes & tables["bits"][bit]:
                continue
            allowed = [f["width"] // f["heads"] if word == "head" else value_of(word) for word in allowed.split("|")]
            if key in config:
                fits = fits and config[key] in allowed
            elif allowed[0] is not None or missing != "null":
                put(key, allowed[0])
        if fits:
            return row, config
    return None


def their_tensors(tables, bit, f, w):
    """Our tensors under the names and in the form of that class."""
    parts, theirs = {}, {}
    for name, tensor in w.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        ours = re.sub(r"^model\.layers\.\d+\.", "model.layers.%d.", name)
        row = next((row[2:] for row in tables["tensor"] if row[0] & tables["bits"][bit] and row[1] == ours), (ours, 0, 0, 1))
        pattern, turned, part, count = row
        pattern = pattern.replace("%d", layer[1], 1) if layer else pattern
        for e, piece in enumerate(tensor.chunk(f["experts"]) if "%d" in pattern else [tensor]):
            parts.setdefault((pattern.replace("%d", str(e)), turned), [None] * count)[part] = piece
    for (name, turned), pieces in parts.items():
        theirs[name] = torch.cat(pieces).T if turned else torch.cat(pieces)
    return theirs


# ------------------------------------------------------------------------------------------------------------------- tokenizer


def letters():
    """GPT-2's way to write bytes as characters of a vocabulary (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def read_tokens(path):
    """The tokens of a tokenizer.bin (data/README.md), and the number of the one that ends a text."""
    data = path.read_bytes()
    magic, version, count, end = struct.unpack_from("<4I", data) if len(data) >= 1024 else (0, 0, 0, 0)
    if (magic, version) != (20240328, 2):
        raise Refusal(f"{path}: expected a tokenizer.bin of version 2, found another file\n  -> python3 data/get.py tokenizer --out {path}")
    tokens, at = [], 1024
    for _ in range(count):
        tokens.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    return tokens, end


def merges_of(tokens, end):
    """The pairs that byte-pair encoding merges, in their order: those that each token falls into by the merges before it."""
    rank = {token: i for i, token in enumerate(tokens) if i != end}
    for i, token in enumerate(tokens):
        pieces = [token[k : k + 1] for k in range(len(token))] if i != end else [token]
        while len(pieces) > 2:
            best = min(range(len(pieces) - 1), key=lambda k: rank.get(pieces[k] + pieces[k + 1], i))
            if rank.get(pieces[best] + pieces[best + 1], i) >= i:
                raise Refusal(f"token {i} of tokenizer.bin is made by no merge\n  -> a tokenizer.bin that data/get.py wrote")
            pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
        if len(pieces) == 2:
            yield tuple(pieces)


def write_tokenizer(out, path, seq):
    """tokenizer.json: of bytes (path None), whose token 0 begins and ends texts, or of a
    tokenizer.bin. A text begins with that token, the separator, as a prompt of the trainer does
    (run_sample). Returns its number."""
    letter = letters()
    tokens, end = read_tokens(path) if path else ([bytes([b]) for b in range(256)], 0)
    vocab = {END if i == end else "".join(letter[b] for b in token): i for i, token in enumerate(tokens)}
    merges = [("".join(letter[b] for b in first), "".join(letter[b] for b in second)) for first, second in merges_of(tokens, end)]
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=path is not None)
    t.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, end)])  # fmt: skip
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([END])
    t.save(str(out / "tokenizer.json"))
    theirs = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
    theirs |= {"bos_token": END, "eos_token": END, "pad_token": END, "model_max_length": seq}
    theirs |= {"model_input_names": ["input_ids", "attention_mask"]}
    theirs |= {"clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(theirs, indent=2) + "\n")
    return end


# ---------------------------------------------------------------------------------------------------------------------- export


def export(source, out, dtype):
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal(f"{out} is there already; nothing was overwritten\n  -> another folder")
    checkpoint = find_checkpoint(source)
    config = json.loads((checkpoint / "config.json").read_text())
    tables, mode, w = read_tables(), config["norm_mode"], load_file(checkpoint / "model.safetensors")
    f, default, rows = read_flags(config, tables, w)
    stock = stock_class(tables, mode, f, default)
    out.mkdir(parents=True, exist_ok=True)
    if stock:
        (bit, name, *_), theirs = stock
        w = their_tensors(tables, bit, f, w)
    else:
        name, sdd = "NormForCausalLM", {row[0]: dict(zip(("v", "fused", "per", "share"), row[3:7])) for row in tables["sdd"]}[f["sdd"]]
        shaping = [flag for flag in f if flag not in ("vocab", "tied", "sdd", "bias", "final_norm", "balance_loss", "sequence_loss", "router_z_loss", "router_losses", "balance_rate")]
        theirs = {"architectures": [name], "model_type": "norm_c", "auto_map": {"AutoConfig": "modeling_norm.NormConfig", "AutoModelForCausalLM": "modeling_norm.NormForCausalLM"}}
        theirs |= {"placement": mode, "rows": rows, "sdd": sdd if rows[mode]["sdd"] else None} | {flag: f[flag] for flag in shaping} | {"vocab_size": f["vocab"]}
        theirs |= {"bias": "model.layers.0.self_attn.o_proj.bias" in w, "final_norm": "model.norm.weight" in w, "tie_word_embeddings": f["tied"] == "on"}
        theirs |= {"selection_bias": any(key.endswith("e_score_correction_bias") for key in w)}
        shutil.copy(ROOT / "dev" / "modeling_norm.py", out / "modeling_norm.py")
    flags = config["flags"]
    tokenizer, data = (pathlib.Path(flags.get(name) or "-") for name in ("tokenizer", "data"))
    places = [checkpoint / ".." / "tokenizer.bin", tokenizer, data / "tokenizer.bin"]
    path = next((place for place in places if place.is_file()), None)
    if path or f["vocab"] == 256:
        end = write_tokenizer(out, path, f["seq"])
        theirs |= {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}             # or classes of transformers would not train its row of the embedding
        (out / "generation_config.json").write_text(json.dumps({"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}, indent=2) + "\n")
    else:
        theirs |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        print("note: no tokenizer.bin of the run, so the folder gets no tokenizer")
    kept = {key: value if key.endswith("e_score_correction_bias") else value.to(dtype) for key, value in w.items()}      # transformers keeps that one in float32
    save_file({key: value.contiguous() for key, value in kept.items()}, out / "model.safetensors", metadata={"format": "pt"})
    word = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(theirs | {"dtype": word, "torch_dtype": word}, indent=2) + "\n")
    print(f"{out}: {mode} as {name}, {word}, from {checkpoint}" + ("" if stock else "; trust_remote_code=True loads it"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, help="a run or a checkpoint")
    parser.add_argument("out", type=pathlib.Path, help="the folder to make")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    try:
        export(args.source, args.out, getattr(torch, args.dtype))
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")


if __name__ == "__main__":
    main()
