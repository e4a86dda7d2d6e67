#!/usr/bin/env python3
"""import_hf.py: a model of Hugging Face transformers as a checkpoint of norm.c.

    python3 dev/import_hf.py HF_FOLDER OUT

HF_FOLDER holds config.json and model.safetensors, or model.safetensors.index.json and the shards
that it names, in F64, F32, BF16 or F16. OUT becomes a checkpoint in F32: config.json,
model.safetensors and manifest.json, which the trainer reads with --from OUT and --init-from OUT.
The classes are those of the table CLASSES in dev/hf.py, and NormForCausalLM, which
dev/export_hf.py writes. Its tokenizer becomes OUT/tokenizer.bin, if the package tokenizers is
there; its files and the rest of what belongs to the model go along, in OUT/hf, for the export of
what is trained from it. A model that norm.c does not compute is refused
by the name and value of what is different. OUT must be new, or an empty folder. It has a temporary
name until all is written.
Needs numpy and the C compiler that builds norm.c ($CC, else cc).
"""
import argparse
import json
import os
import pathlib
import shlex
import shutil
import struct
import sys
from typing import NamedTuple

import numpy as np

import hf
from hf import ELSEWHERE, HEAD, OWN_CLASS, OWN_LATER, OWN_NAMES, OWN_UNSTATED, REQUIRED, Refusal
from hf import as_text

CONFIG_HINT = "  -> the config.json that belongs to these weights"
# Masks and angles that older versions of transformers kept as tensors.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
WEIGHT_TYPES = ("F64", "F32", "BF16", "F16")


class Model(NamedTuple):
    """A model in norm.c's words."""

    name: str  # the class
    kind: str  # the class's model_type, by which the tables of hf.py name it
    mode: str  # the placement
    flags: dict  # all flags that shape a model, as text
    shapes: dict  # the name and shape of each of its tensors
    note: str = ""  # what the user should know


# ------------------------------------------------------------------------------------- config.json


def member(config, key):
    """The member "a", or "a.b": member b of a. Returns it, and whether it is there."""
    outer, _, inner = key.rpartition(".")
    holder = config.get(outer) if outer else config
    there = isinstance(holder, dict) and inner in holder
    return (holder[inner] if there else None), there


def flag_text(value, flag, key, path):
    """A member's value as text of a flag: true and false are the flag's choices 1 and 0."""
    if not isinstance(value, bool):
        return as_text(value)
    choices = hf.tables()["flags"][flag]["choices"].split("|")
    if len(choices) < 2:
        raise Refusal(f'{path}: expected "{key}" to be a number, found {as_text(value)}\n'
                      f"{CONFIG_HINT}")  # fmt: skip
    return choices[value]


def need(config, key, path):
    value, _ = member(config, key)
    if value is None:
        raise Refusal(f'{path}: expected "{key}", found no such member\n{CONFIG_HINT}')
    return value


def refuse_member(path, key, there, found, known):
    means = "" if there else "missing, which means "
    raise Refusal(f'{path}: "{key}" is {means}{found}; norm.c only computes {known}\n'
                  "  -> another model")  # fmt: skip


def one_rope(*parts):
    """What several members say about RoPE; the last one that says it counts."""
    both = {"rope_type": "default"}
    for each in parts:
        if isinstance(each, dict):
            both |= ({"rope_type": each["type"]} if "type" in each else {}) | each
        elif each is not None:
            both["rope_type"] = each
    return both


def olmo3_ropes(config):
    """The RoPE of each kind of layers of an Olmo3. What names no kind is for full attention."""
    theta = {"rope_theta": hf.OLMO3_THETA}
    older = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else None
    new = config.get("rope_parameters")
    full, sliding = new, None
    if isinstance(new, dict):
        full, sliding = new.get("full_attention", new), new.get("sliding_attention")
    return {"full_attention": one_rope(theta, older, full, config.get("rope_scaling")),
            "sliding_attention": one_rope(theta, sliding)}  # fmt: skip


def merge_rope(config, kind, path):
    """The config with all that it says about RoPE in "rope_parameters", and the name of where it
    said so: older folders have "rope_scaling", some a "rope_parameters" for each kind of layer."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if kind == "olmo3":
        new, old = olmo3_ropes(config), None
    if isinstance(new, dict) and isinstance(new.get("full_attention"), dict):
        kinds = {name: each for name, each in new.items() if isinstance(each, dict)}
        new = kinds["full_attention"]
        for name, each in kinds.items():
            if each != new:
                key = f"rope_parameters.{name}"
                refuse_member(path, key, member(config, key)[1], as_text(each),
                              "what full_attention has")  # fmt: skip
    name = "rope_scaling" if old is not None else "rope_parameters"
    return config | {"rope_parameters": one_rope(new, old)}, name


def llama3_flags(config, name, path):
    """The flags of Llama 3's RoPE."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != hf.LLAMA3["rope_type"]:
        return {}
    for key, value in hf.LLAMA3.items():
        found = as_text(rope.get(key))
        if found != as_text(value):
            refuse_member(path, f"{name}.{key}", key in rope, found, as_text(value))
    need(config, "rope_parameters.factor", path)
    original = rope.get("original_max_position_embeddings")
    original = original or need(config, "max_position_embeddings", path)
    return {"rope_factor": as_text(rope["factor"]), "rope_original": as_text(original)}


def window_of(config, kind, path):
    """The sliding window of some of the layers; None: there is none."""
    if kind not in hf.WINDOWS or (kind in hf.QWENS and not config.get("use_sliding_window")):
        return None
    window, types = config.get("sliding_window", hf.WINDOWS[kind]), config.get("layer_types") or []
    if window is not None and (type(window) is not int or window < 1):
        refuse_member(path, "sliding_window", True, as_text(window), "a number of tokens, or null")
    for each in types if isinstance(types, list) else [types]:
        if each not in ("full_attention", "sliding_attention"):
            known = "full_attention|sliding_attention"
            refuse_member(path, "layer_types", True, as_text(each), known)
    return window


def stock_flags(config, row, path):
    """The flags that a class of transformers and its config.json state."""
    flags = {}
    for key in hf.rows_of(hf.KEYS, row.type):
        value, _ = member(config, key.key)
        if key.flag in flags or (value is None and key.missing is ELSEWHERE):
            continue
        if value is None and key.missing is REQUIRED:
            need(config, key.key, path)
        text = key.missing if value is None else flag_text(value, key.flag, key.key, path)
        flags[key.flag] = text
    return row.flags | flags


def check_musts(config, kind, flags, rope, path):
    """Refuses what norm.c does not compute."""
    head = int(flags["head_size"]) or int(flags["width"]) // int(flags["heads"])
    for must in hf.rows_of(hf.MUSTS, kind):
        value, there = member(config, must.key)
        found = as_text(value if there else must.missing)
        allowed = [head if value == HEAD else value for value in must.allowed]
        if found in map(as_text, allowed):
            continue
        known = "|".join(as_text(value) for value in must.allowed)
        width = f", the width of a head: {head}" if HEAD in must.allowed else ""
        key = must.key.replace("rope_parameters", rope)
        refuse_member(path, key, there, found, known + width)


def own_flags(config, path):
    """The placement and flags of a NormForCausalLM, the way back of export_hf.own_config."""
    tables = hf.tables()
    mode = as_text(need(config, "placement", path))
    rows = hf.rows_of_mode(mode)
    if config.get("rows") != rows:
        raise Refusal(f"{path}: its rows of {mode} are not those of llmc/modes.h\n"
                      "  -> the norm.c that exported it")  # fmt: skip
    names = {flag: OWN_NAMES.get(flag, flag) for flag in tables["flags"]}
    stated = [flag for flag in names if flag not in OWN_UNSTATED or flag in OWN_NAMES]
    flags = {flag: flag_text(need(config, names[flag], path), flag, names[flag], path)
             for flag in stated if flag not in OWN_LATER or names[flag] in config}  # fmt: skip
    flags["bias"] = "qkv" if config.get("bias") == "qkv" else "on" if config.get("bias") else "off"
    fin = bool(config.get("final_norm"))
    flags["final_norm"] = "auto" if fin == bool(rows[mode]["fin"]) else ("off", "on")[fin]
    # Any rate makes the selection bias a tensor; this one is DeepSeek-V3's.
    flags["balance_rate"] = "0.001" if config.get("selection_bias") else "0"
    if rows[mode]["sdd"]:
        known = [name for name, row in tables["sdd"].items() if row == config.get("sdd")]
        if not known:
            raise Refusal(f'{path}: expected "sdd" to be a row of SDD_TABLE in llmc/modes.h\n'
                          "  -> the norm.c that exported it")  # fmt: skip
        flags["sdd"] = known[0]
    return mode, flags


def read_config(path):
    """The model that a config.json of transformers describes."""
    config = hf.read_json(path)
    names = config.get("architectures")
    if not isinstance(names, list):
        raise Refusal(f'{path}: expected "architectures" to be an array, found {as_text(names)}\n'
                      "  -> the config.json of a model of Hugging Face transformers")  # fmt: skip
    name = as_text(names[0]) if len(names) == 1 else f"a list of {len(names)}"
    row = next((row for row in hf.CLASSES if row.name == name), None)
    if not row and name != OWN_CLASS:
        known = ", ".join([row.name for row in hf.CLASSES] + [OWN_CLASS])
        raise Refusal(f'{path}: expected "architectures" to be one of {known}; found {name}\n'
                      "  -> a model of one of these classes")  # fmt: skip
    note, rope = "", ""
    if row:
        config, rope = merge_rope(config, row.type, path)
        mode, flags = row.mode, stock_flags(config, row, path)
        flags |= llama3_flags(config, rope, path) if row.type in hf.ROPES - hf.DEEPSEEKS else {}
        window = window_of(config, row.type, path)
        if window is not None and str(flags["seq"]).isdigit() and int(flags["seq"]) > window:
            note = f"note: sequences of {window}, its sliding window, not of {flags['seq']}"
            flags["seq"] = str(window)
    else:
        mode, flags = own_flags(config, path)
    words = [f"--{flag.replace('_', '-')}={text}" for flag, text in flags.items()]
    try:
        model = json.loads(hf.ask_c("model", mode, *words))
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal}") from None
    if row:
        check_musts(config, row.type, model["flags"], rope, path)
    shapes = {key: tuple(shape) for key, shape in model["tensors"].items()}
    return Model(name, row.type if row else OWN_CLASS, mode, model["flags"], shapes, note)


# ----------------------------------------------------------------------------------------- weights


def open_files(folder):
    """model.safetensors, or the shards of the index, each a file of the folder."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise Refusal(f"{folder}: expected model.safetensors or {index.name}, found neither\n"
                      "  -> convert the weights to safetensors")  # fmt: skip
    files = hf.read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise Refusal(f'{index}: expected tensors and their files in "weight_map", found none\n'
                      "  -> download the file again")  # fmt: skip
    for name, file in files.items():
        plain = isinstance(file, str) and file and file[0] != "." and not set("/\0") & set(file)
        if not plain:
            found = as_text(file) if isinstance(file, str) and file else "no name"
            raise Refusal(f"{index}: expected {as_text(name)} in a file of this folder, found "
                          f"{found}\n  -> download the index again, and do not trust where it "
                          "is from")  # fmt: skip
    return [folder / file for file in dict.fromkeys(files.values())]


class Source:
    """The tensors of a folder, and which of them the model has asked for."""

    def __init__(self, folder):
        self.folder, self.tensors, self.used = folder, {}, set()
        for path in open_files(folder):
            for name, tensor in hf.read_safetensors(path).items():
                if name in self.tensors:
                    raise Refusal(f"{folder} holds {as_text(name)} twice\n"
                                  "  -> download the index and its files again")  # fmt: skip
                self.tensors[name] = tensor

    def find(self, name):
        """A tensor by name. Folders of the model without its head leave out the first word."""
        for each in (name, name.removeprefix("transformer.")):
            if each in self.tensors:
                self.used.add(each)
                return self.tensors[each]
        return None

    def take(self, name, shape):
        """A tensor that the model needs, in this shape."""
        tensor = self.find(name)
        if tensor is None:
            raise Refusal(f"{self.folder} has no tensor {name}, which its config.json needs\n"
                          "  -> all files of the model, and the config.json that belongs to "
                          "them")  # fmt: skip
        if tensor.shape != shape:
            raise Refusal(f"{self.folder}: {name} has shape {list(tensor.shape)}, expected "
                          f"{list(shape)}\n{CONFIG_HINT}")  # fmt: skip
        if tensor.dtype not in WEIGHT_TYPES:
            raise Refusal(f"{self.folder}: expected {name} in {', '.join(WEIGHT_TYPES)}, found "
                          f"{tensor.dtype}\n  -> convert the file")  # fmt: skip
        return name, tensor

    def check_rest(self, model):
        """Refuses a tied head that is another matrix, and tensors that the model does not have."""
        head = self.find("lm_head.weight") if model.flags["tied"] == "on" else None
        wte = self.find(hf.renamed(model.kind, "model.embed_tokens.weight").theirs)
        if head and (head.shape != wte.shape or not np.array_equal(head.data, wte.data)):
            raise Refusal(f'{self.folder}/config.json: "tie_word_embeddings" is true, but '
                          "lm_head.weight is not the embedding\n"
                          "  -> set it to false, if the head is its own")  # fmt: skip
        for name in self.tensors:
            if name not in self.used and not name.endswith(BUFFERS):
                raise Refusal(f"{self.folder} holds {as_text(name)}, which a {model.name} of this "
                              f"config.json does not have\n{CONFIG_HINT}")  # fmt: skip


def find_weights(source, model, name):
    """Where the values of one of our tensors are: the row of hf.TENSORS, and their tensors. The
    matrices of experts are one below the other in ours, and a tensor each in theirs."""
    row = hf.renamed(model.kind, name)
    copies = int(model.flags["experts"]) if "%d" in row.theirs else 1
    rows, *cols = model.shapes[name]
    shape = (rows // copies * row.parts, *cols)
    shape = shape[::-1] if row.turned else shape
    return row, [source.take(row.theirs.replace("%d", str(e)), shape) for e in range(copies)]


def read_weights(source, model, row, tensors):
    """Our tensor in float32. Infinite values and NaN are refused."""
    pieces = []
    for name, tensor in tensors:
        words = tensor.words().T if row.turned else tensor.words()
        words = words[hf.pair_order(row.pairs, model.flags, len(words))] if row.pairs else words
        rows = len(words) // row.parts
        piece = hf.float32(words[row.part * rows : (row.part + 1) * rows])
        if bad := np.count_nonzero(~np.isfinite(piece)):
            raise Refusal(f"{source.folder}: {bad} values of {name} are infinite or NaN in F32\n"
                          "  -> a sound copy of the weights")  # fmt: skip
        pieces.append(piece)
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


# -------------------------------------------------------------------------------------- checkpoint


def checksum(path):
    return hf.ask_c("xxh64", path).strip()


def write_config(path, model):
    """config.json as the trainer writes it (config_text): its last member is the checksum of all
    bytes before the comma."""
    config = {"norm_c_version": hf.tables()["config_version"], "norm_mode": model.mode,
              "precision": "fp32", "imported": model.name, "flags": model.flags}  # fmt: skip
    path.write_text(json.dumps(config, indent=2).removesuffix("\n}"))
    with open(path, "a") as file:
        file.write(f',\n  "xxh64": "{checksum(path)}"\n}}\n')


def write_manifest(folder):
    """The size and checksum of each file, which the trainer verifies before it reads one."""
    files = {path.name: {"size": path.stat().st_size, "xxh64": checksum(path)}
             for path in sorted(folder.iterdir()) if path.is_file()}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(files, indent=2) + "\n")


def keep_files(folder, out):
    """Copies what belongs to the model, and is no weight, for the export of what is trained from
    it."""
    out.mkdir()
    for name in hf.KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def import_folder(folder, out):
    """Everything is checked but the values, which are read once, before a byte is written."""
    with hf.new_folder(out) as temp:
        model, source = read_config(folder / "config.json"), Source(folder)
        found = {name: find_weights(source, model, name) for name in model.shapes}
        source.check_rest(model)
        tensors = [(name, "F32", shape, lambda name=name: read_weights(source, model, *found[name]))
                   for name, shape in model.shapes.items()]  # fmt: skip
        hf.write_safetensors(temp / "model.safetensors", tensors, hf.show_progress())
        write_config(temp / "config.json", model)
        write_manifest(temp)
        keep_files(folder, temp / "hf")
    return model


def write_tokenizer(folder, out, vocab):
    """Writes tokenizer.bin, with which the trainer reads prompts and writes samples. Returns what
    to say about it. vocab: the size of the model's vocabulary."""
    temp = out.with_name(f"{out.name}.tmp")
    again = f"python3 data/tokenizer.py {shlex.quote(str(folder))} --out {shlex.quote(str(out))}"
    try:
        converter = hf.load_converter()
        data, cannot = converter.tokenizer_bin(converter.read_files(str(folder)))
        count = struct.unpack_from("<I", data, 8)[0]
        if count > vocab:
            return (f"note: no tokenizer.bin, and samples are numbers of tokens: {folder} has "
                    f"{count} tokens, the model a vocabulary of {vocab}\n"
                    "  -> resize_token_embeddings in transformers, then this import again")
        temp.write_bytes(data)
        os.replace(temp, out)
    except ImportError as missing:
        return (f"note: no tokenizer.bin, as {missing}: samples are numbers of tokens\n"
                f"  -> python3 -m pip install tokenizers && {again}")  # fmt: skip
    except (converter.Refusal, OSError, UnicodeDecodeError) as error:
        return f"note: no tokenizer.bin, and samples are numbers of tokens: {error}"
    if cannot:
        return (f"note: samples are text, prompts are refused: the trainer does not have {cannot}\n"
                "  -> dev/export_hf.py, and prompts in transformers")  # fmt: skip
    return f"{out}: its tokenizer, for prompts and samples"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", metavar="HF_FOLDER", type=pathlib.Path, help="the model")
    parser.add_argument("out", metavar="OUT", type=pathlib.Path, help="the checkpoint to make")
    args = parser.parse_args()
    try:
        model = import_folder(args.folder, args.out)
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")
    count = sum(int(np.prod(shape)) for shape in model.shapes.values())
    out = shlex.quote(str(args.out))
    print(f"{args.out}: {model.name} as {model.mode}, {count:,} weights in F32")
    if model.note:
        print(model.note)
    print(write_tokenizer(args.folder, args.out / "tokenizer.bin", int(model.flags["vocab"])))
    print(f"  -> make train_gpt NORM_MODE={model.mode} && ./train_gpt --init-from {out} "
          "--data SHARDS")  # fmt: skip


if __name__ == "__main__":
    main()
