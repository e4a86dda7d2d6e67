#!/usr/bin/env python3
"""export_hf.py: a run or a checkpoint as a folder for Hugging Face transformers.

    python3 dev/export_hf.py RUN|CHECKPOINT FOLDER [--dtype float32|bfloat16] [--kept FOLDER]

FOLDER gets config.json, model.safetensors and, if the vocabulary is known, tokenizer.json. A model
that a class of transformers computes exactly (the tables of dev/hf.py) becomes that class. Every
other model becomes a NormForCausalLM: dev/modeling_norm.py goes along, and the placement's row of
llmc/modes.h goes into config.json, so that
AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) works. A model that was trained
from an imported one keeps its class, tokenizer, generation config, ids of tokens and longest
sequence: they are in the import's folder hf/, or in --kept. Checksums are verified first. Needs
numpy, tokenizers (it comes with transformers) and the C compiler that builds norm.c.
"""
import argparse
import contextlib
import json
import pathlib
import shutil
import struct
import sys

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import hf
from hf import HEAD, OWN_CLASS, OWN_NAMES, OWN_UNSTATED, ROOT, Refusal, as_text

END = "<|endoftext|>"
TYPES = {"float32": "F32", "bfloat16": "BF16"}


# ------------------------------------------------------------------------------------------- flags


def typed(name, text):
    """A flag's text as the number or word that it is."""
    kind = hf.tables()["flags"][name]["kind"]
    return int(text) if kind == "INT" else float(text) if kind == "NUMBER" else text


def idle_flags(f, row):
    """Flags that mean nothing in this model."""
    idle = ["balance_loss", "sequence_loss", "router_z_loss", "router_losses"]
    if f["positions"] == "learned":
        idle += ["rope_theta", "rope_factor"]
    if f["positions"] == "learned" or f["rope_factor"] == 1:
        idle.append("rope_original")
    if not f["kv_rank"]:
        idle.append("rope_size")
    if not row["sdd"]:
        idle.append("sdd")
    if not row["early"]:
        idle.append("mix_ratio")
    if not f["experts"]:
        idle += ["experts_per_token", "shared_experts", "dense_layers", "dense_ffn", "router"]
        idle += ["router_scale", "balance_rate"]
    return idle


def read_flags(config, w):
    """The flags that shape the model, as numbers and words, and their defaults. A flag that is 0
    for "as usual" gets its value from the tensors w. An idle flag has its default."""
    default = {name: row["default"] for name, row in hf.tables()["flags"].items()}
    f = {name: typed(name, config["flags"].get(name, text)) for name, text in default.items()}
    f["vocab"] = w["model.embed_tokens.weight"].shape[0]
    default["kv_heads"], f["kv_heads"] = str(f["heads"]), f["kv_heads"] or f["heads"]
    q_size = w["model.layers.0.self_attn.q_proj.weight"].shape[0] // f["heads"]
    f["head_size"] = q_size - (f["rope_size"] if f["kv_rank"] else 0)
    default["head_size"] = str(f["width"] // f["heads"])
    mlp = f"model.layers.{f['layers'] - 1}.mlp."
    if f["experts"]:
        f["ffn"] = w[mlp + "experts.up_proj.weight"].shape[0] // f["experts"]
    else:
        f["ffn"] = w[mlp + "up_proj.weight"].shape[0]
    dense = f["experts"] and f["dense_layers"]
    f["dense_ffn"] = w["model.layers.0.mlp.up_proj.weight"].shape[0] if dense else 0
    row = hf.rows_of_mode(config["norm_mode"])[config["norm_mode"]]
    f["final_norm"] = "auto" if ("model.norm.weight" in w) == (row["fin"] == 1) else "on"
    default = {name: typed(name, text) for name, text in default.items()}
    return f | {name: default[name] for name in idle_flags(f, row)}, default


# ----------------------------------------------------------------------------------------- classes


def flags_fit(row, mode, f, default):
    """Whether the placement and flags of a class are ours. A flag that its config.json cannot
    state must have its default."""
    stated = {key.flag for key in hf.rows_of(hf.KEYS, row.type)} | {"seq"}
    if row.type in hf.ROPES - hf.DEEPSEEKS:
        stated |= {"rope_factor", "rope_original"}
    own = dict(row.flags)
    rate = own.pop("balance_rate", None)  # any rate gives the model its selection bias
    return (
        mode == row.mode
        and (row.type not in hf.DIVIDED or f["width"] % f["heads"] == 0)
        and all(f[flag] == value for flag, value in own.items())
        and (rate is None or f["balance_rate"] > 0)
        and all(f[flag] == value for flag, value in default.items()
                if flag not in stated | row.flags.keys())
        and all(f[flag] for flag in ("experts", "kv_rank", "shared_experts") if flag in stated)
    )  # fmt: skip


def put(config, key, value):
    """Sets the member "a", or "a.b": member b of a."""
    outer, _, inner = key.rpartition(".")
    (config.setdefault(outer, {}) if outer else config)[inner] = value


def stock_config(row, f):
    """The config.json of this model as a class of transformers; None: it cannot be one."""
    config = {"architectures": [row.name], "model_type": row.type}
    for key in hf.rows_of(hf.KEYS, row.type):
        choices, value = hf.tables()["flags"][key.flag]["choices"].split("|"), f[key.flag]
        if len(choices) > 1:  # a member that is false or true for the first two
            if value not in choices[:2]:
                return None
            value = value == choices[1]
        put(config, key.key, value)
    for must in hf.rows_of(hf.MUSTS, row.type):
        allowed = [f["head_size"] if value == HEAD else value for value in must.allowed]
        if must.key in config:
            if as_text(config[must.key]) not in map(as_text, allowed):
                return None
        elif allowed[0] is not None or must.missing is not None:
            put(config, must.key, allowed[0])
    if f["rope_factor"] > 1:
        config["rope_parameters"] |= hf.LLAMA3 | {"factor": f["rope_factor"]}
        config["rope_parameters"]["original_max_position_embeddings"] = f["rope_original"]
        config["rope_scaling"] = config["rope_parameters"]  # transformers 4
    if row.type == "olmo3":
        kinds = ("full_attention", "sliding_attention")
        config["rope_parameters"] = dict.fromkeys(kinds, config["rope_parameters"])
        config.pop("rope_scaling", None)  # would be for full attention alone
    if row.type == "mistral":
        config["sliding_window"] = None
    return config


def own_config(mode, f, w):
    """The config.json of this model as a NormForCausalLM."""
    rows, sdd = hf.rows_of_mode(mode), hf.tables()["sdd"][f["sdd"]]
    auto = {"AutoConfig": "modeling_norm.NormConfig",
            "AutoModelForCausalLM": f"modeling_norm.{OWN_CLASS}"}  # fmt: skip
    config = {"architectures": [OWN_CLASS], "model_type": "norm_c", "auto_map": auto,
              "placement": mode, "rows": rows}  # fmt: skip
    config |= {flag: value for flag, value in f.items() if flag not in OWN_UNSTATED}
    attention = "model.layers.0.self_attn."
    return config | {
        OWN_NAMES["vocab"]: f["vocab"],
        OWN_NAMES["tied"]: f["tied"] == "on",
        "sdd": sdd if rows[mode]["sdd"] else None,
        "bias": f["bias"] if f"{attention}q_proj.bias" in w and f["bias"] == "qkv"
        else f"{attention}o_proj.bias" in w,
        "final_norm": "model.norm.weight" in w,
        "selection_bias": any(name.endswith("e_score_correction_bias") for name in w),
    }


def describe(mode, config, w, kept):
    """The class's model_type (OWN_CLASS: none of transformers), its config.json, and the flags.
    kept: the config.json of the imported model, whose class comes first, or {}."""
    f, default = read_flags(config, w)
    was = (kept.get("architectures") or [None])[0]
    for row in sorted(hf.CLASSES, key=lambda row: row.name != was):
        stock = stock_config(row, f) if flags_fit(row, mode, f, default) else None
        if stock:
            return row.type, stock, f
    return OWN_CLASS, own_config(mode, f, w), f


# ----------------------------------------------------------------------------------------- weights


def their_tensors(kind, f, w, dtype):
    """Our tensors under the names and in the form of a class, for hf.write_safetensors."""
    pieces = {}  # (their name, turned): for each part of it, our tensor and the rows that it takes
    for name, tensor in w.items():
        row = hf.renamed(kind, name)
        copies = f["experts"] if "%d" in row.theirs else 1
        rows = tensor.shape[0] // copies
        for e in range(copies):
            key = row.theirs.replace("%d", str(e)), row.turned
            parts = pieces.setdefault(key, [None] * row.parts)
            parts[row.part] = tensor, range(e * rows, (e + 1) * rows), row.pairs
    for (name, turned), parts in pieces.items():
        shape = (sum(len(rows) for _, rows, _ in parts), *parts[0][0].shape[1:])
        # transformers keeps the selection bias in float32.
        kept = "F32" if name.endswith("e_score_correction_bias") else dtype
        make = lambda parts=parts, turned=turned, kept=kept: join(parts, turned, kept, f)
        yield name, kept, shape[::-1] if turned else shape, make


def join(parts, turned, dtype, f):
    pieces = []
    for tensor, rows, pairs in parts:
        words = tensor.words()[rows.start : rows.stop]
        pieces.append(hf.float32(words[np.argsort(hf.pair_order(pairs, f, len(words)))]
                                 if pairs else words))  # fmt: skip
    whole = np.concatenate(pieces)
    whole = np.ascontiguousarray(whole.T if turned else whole)
    return hf.bfloat16(whole) if dtype == "BF16" else whole


# --------------------------------------------------------------------------------------- tokenizer


def letters():
    """GPT-2's character for each byte."""
    return {byte: letter for letter, byte in hf.load_converter().byte_of().items()}


def read_tokens(path):
    """The tokens of a tokenizer.bin (data/README.md), and the number of the one that ends a
    text."""
    data = path.read_bytes()
    header = struct.unpack_from("<4I", data) if len(data) >= 1024 else (0, 0, 0, 0)
    magic, version, count, end = header
    if magic != 20240328 or version not in (2, 3):
        raise Refusal(f"{path}: expected a tokenizer.bin of version 2 or 3, found another file\n"
                      f"  -> python3 data/get.py tokenizer --out {path}")  # fmt: skip
    tokens, at = [], 1024
    while len(tokens) < count and at < len(data):
        tokens.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    again = "  -> python3 data/tokenizer.py FOLDER writes it again"
    if len(tokens) < count or at > len(data):
        raise Refusal(f"{path}: expected {count} whole tokens, found {len(data)} bytes\n{again}")
    if end >= count:
        raise Refusal(f"{path}: expected a separator below {count}, found token {end}\n{again}")
    return tokens, end


def merges_of(tokens, end):
    """The pairs that byte-pair encoding merges, in their order: those that each token falls into
    by the merges before it."""
    rank = {token: i for i, token in enumerate(tokens) if i != end}
    for i, token in enumerate(tokens):
        pieces = [token[k : k + 1] for k in range(len(token))] if i != end else [token]
        while len(pieces) > 2:
            ranks = [rank.get(a + b, i) for a, b in zip(pieces, pieces[1:])]
            best = ranks.index(min(ranks))
            if ranks[best] >= i:
                raise Refusal(f"token {i} of tokenizer.bin is made by no merge\n"
                              "  -> a tokenizer.bin that data/tokenizer.py wrote: it holds the "
                              "tokenizer's own files")  # fmt: skip
            pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
        if len(pieces) == 2:
            yield tuple(pieces)


def write_tokenizer(out, path, seq):
    """tokenizer.json: of bytes (path None), whose token 0 begins and ends texts, or of a
    tokenizer.bin. A text begins with that token, the separator, as a prompt of the trainer does
    (run_sample). Returns its number."""
    letter = letters()
    tokens, end = read_tokens(path) if path else ([bytes([b]) for b in range(256)], 0)

    def word(token):
        return "".join(letter[b] for b in token)

    separator = tokens[end].decode(errors="replace") if path else END
    vocab = {separator if i == end else word(token): i for i, token in enumerate(tokens)}
    merges = [(word(first), word(second)) for first, second in merges_of(tokens, end)]
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=path is not None)  # fmt: skip
    t.post_processor = processors.TemplateProcessing(
        single=[separator, "$A"], pair=[separator, "$A", separator, "$B"],
        special_tokens=[(separator, end)])  # fmt: skip
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([separator])
    t.save(str(out / "tokenizer.json"))
    theirs = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
    theirs |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), separator)
    theirs |= {"model_max_length": seq}
    theirs |= {"model_input_names": ["input_ids", "attention_mask"]}
    theirs |= {"clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(theirs, indent=2) + "\n")
    return end


def put_separator(path, end):
    """Lets the tokenizer.json of a model begin a text with token `end`, as a prompt of
    the trainer begins. One that begins with a special token already is left as it is. Returns
    the token's name; None: nothing was changed."""
    t = Tokenizer.from_file(str(path))
    plain, word = t.encode("a", add_special_tokens=False).ids, t.id_to_token(end)
    if word is None or t.encode("a").ids[:1] != plain[:1]:
        return None
    first = processors.TemplateProcessing(
        single=f"{word} $A", pair=f"{word} $A {word} $B", special_tokens=[(word, end)])  # fmt: skip
    was = t.post_processor
    t.post_processor = processors.Sequence([was, first]) if was else first
    t.save(str(path))
    return word


def begin_texts(out, path):
    """Adds the separator to the tokenizer's own files in the folder out, where the run has a
    tokenizer.bin (path)."""
    if path and (out / "tokenizer.json").is_file():
        word = put_separator(out / "tokenizer.json", read_tokens(path)[1])
        if word is not None:
            settings = out / "tokenizer_config.json"
            theirs = hf.read_json(settings) if settings.is_file() else {}
            # GPT-2's class has these, its folder does not
            theirs = {"bos_token": word, "eos_token": word} | theirs
            # classes of their own would make another tokenizer from the vocabulary
            theirs |= {"tokenizer_class": "PreTrainedTokenizerFast"}
            settings.write_text(json.dumps(theirs, indent=2, ensure_ascii=False) + "\n")


def keep_tokenizer(out, folder):
    """Copies the files of an imported model, all but its config.json."""
    for name in hf.KEPT:
        if name != "config.json" and (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def unpack_tokenizer(out, path):
    """Writes the tokenizer's own files that a tokenizer.bin holds. Returns whether it does."""
    converter = hf.load_converter()
    try:
        files = converter.attached_files(path.read_bytes())
    except converter.Refusal as refusal:
        raise Refusal(f"{path}: {refusal}") from None
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    return "tokenizer.json" in files


# ------------------------------------------------------------------------------------------ export


def find_kept(checkpoint, most=8):
    """The folder hf/ of the import that a checkpoint is, or was trained from (--init-from), over
    several runs. None: there is none."""
    for place in (checkpoint / "hf", checkpoint / ".." / "hf"):
        if (place / "config.json").is_file():
            return place
    path = checkpoint / "config.json"
    start = hf.read_json(path).get("flags", {}).get("init_from") if path.is_file() else None
    if not start or not most:
        return None
    start = pathlib.Path(start)
    start = start.parent if start.name == "model.safetensors" else start
    found = start if (start / "manifest.json").is_file() else None
    if not found and start.is_dir():
        with contextlib.suppress(Refusal):
            found = pathlib.Path(hf.ask_c("find", start).removesuffix("\n"))
    if not found:
        print(f"note: {start}, which this run began with, is gone or damaged: what belongs to it "
              "is lost, but for what tokenizer.bin holds\n"
              "  -> --kept FOLDER: the folder that was imported"
              + ("" if start.is_absolute() else ", or this command where the run was trained"))
        return None
    return find_kept(found, most - 1)


def keep_members(theirs, kind, kept):
    """Puts back what an imported model's config.json said and training does not change."""
    if kind != "gpt2" and theirs.get("positions") != "learned":  # those are a tensor
        key = "seq" if kind == OWN_CLASS else "max_position_embeddings"
        longest = kept.get("max_position_embeddings", kept.get("seq"))
        if type(longest) is int:
            theirs[key] = max(theirs[key], longest)
    same = kept.get("architectures") == theirs["architectures"]
    if same and kind in hf.WINDOWS:
        theirs["sliding_window"] = kept.get("sliding_window", hf.WINDOWS[kind])
        for key in ("use_sliding_window", "max_window_layers", "layer_types"):
            if key in kept:
                theirs[key] = kept[key]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        theirs[key] = kept.get(key)


def find_tokenizer(checkpoint, flags):
    """The tokenizer.bin of a run: beside its checkpoints, or the flags'. None: there is none."""
    tokenizer, data = (pathlib.Path(flags.get(name) or "-") for name in ("tokenizer", "data"))
    places = [checkpoint / "tokenizer.bin", checkpoint / ".." / "tokenizer.bin", tokenizer]
    places.append(data / "tokenizer.bin")
    return next((place for place in places if place.is_file()), None)


def add_tokenizer(folder, path, f):
    """Writes the tokenizer, where the vocabulary is known. Returns members of config.json."""
    if not path and f["vocab"] != 256:
        print("note: no tokenizer.bin of the run, so the folder gets no tokenizer.json")
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if path and unpack_tokenizer(folder, path):
        begin_texts(folder, path)
        end = read_tokens(path)[1]
    else:
        end = write_tokenizer(folder, path, f["seq"])
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    settings = folder / "generation_config.json"
    if settings.is_file():
        theirs = hf.read_json(settings)
        return {name: theirs.get(name) for name in tokens}
    settings.write_text(json.dumps(tokens, indent=2) + "\n")
    # Classes of transformers do not train the embedding of a pad token: config.json names none.
    return tokens | {"pad_token_id": None}


def export(source, out, dtype="float32", kept=None):
    """source: a run or a checkpoint. out: the folder to make. dtype: float32 or bfloat16. kept: the
    folder of the model that the run began with, if it cannot be found."""
    with hf.new_folder(out) as temp:
        checkpoint = pathlib.Path(hf.ask_c("find", source).removesuffix("\n"))
        config = json.loads((checkpoint / "config.json").read_text())
        mode, w = config["norm_mode"], hf.read_safetensors(checkpoint / "model.safetensors")
        kept = kept or find_kept(checkpoint)
        was = hf.read_json(kept / "config.json") if kept else {}
        if was and was.get("vocab_size") != w["model.embed_tokens.weight"].shape[0]:
            print(f"note: {kept} is of another vocabulary, and nothing of it is kept")
            kept, was = None, {}
        kind, theirs, f = describe(mode, config, w, was)
        if kind == OWN_CLASS:
            shutil.copy(ROOT / "dev" / "modeling_norm.py", temp / "modeling_norm.py")
        tokenizer = find_tokenizer(checkpoint, config["flags"])
        if kept:
            keep_members(theirs, kind, was)
            keep_tokenizer(temp, kept)
            begin_texts(temp, tokenizer)
        if not (temp / "tokenizer.json").is_file():
            ids = add_tokenizer(temp, tokenizer, f)
            theirs |= {} if kept else ids
        tensors = list(their_tensors(kind, f, w, TYPES[dtype]))
        hf.write_safetensors(temp / "model.safetensors", tensors, hf.show_progress())
        theirs |= {"dtype": dtype, "torch_dtype": dtype}
        (temp / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")
    remote = "; trust_remote_code=True loads it" if kind == OWN_CLASS else ""
    print(f"{out}: {mode} as {theirs['architectures'][0]}, {dtype}, from {checkpoint}{remote}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("source", type=pathlib.Path, help="a run or a checkpoint")
    parser.add_argument("out", type=pathlib.Path, help="the folder to make")
    parser.add_argument("--dtype", choices=TYPES, default="float32")
    parser.add_argument("--kept", type=pathlib.Path, metavar="FOLDER",
                        help="the model that was imported, if its import is gone")  # fmt: skip
    args = parser.parse_args()
    try:
        export(args.source, args.out, args.dtype, args.kept)
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")


if __name__ == "__main__":
    main()
