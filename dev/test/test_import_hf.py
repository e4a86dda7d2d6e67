#!/usr/bin/env python3
"""test_import_hf.py: dev/import_hf.py against folders that are written here.

    python3 dev/test/test_import_hf.py

The tables below state transformers' names, shapes and steps, from its own classes and not from
dev/hf.py: each of our tensors must hold the values that belong there. Folders that are broken, of
other models or hostile are refused, and leave nothing behind. Needs numpy and a C compiler.
(dev/test/test_hf.py asks transformers.)
"""
import contextlib
import io
import json
import pathlib
import random
import re
import shutil
import sys
import tempfile
import unittest.mock
import zlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "dev"))
import hf  # noqa: E402
import import_hf  # noqa: E402

passed = failed = 0
DIR = None  # a temporary folder, made in main


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print("FAILED", what, flush=True)
    return ok


# ------------------------------------------------------------------------------------- the folders

GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 8, "n_head": 2,
        "n_positions": 6, "n_inner": None, "vocab_size": 11, "layer_norm_epsilon": 1e-3,
        "activation_function": "gelu_new", "tie_word_embeddings": True,
        "attn_pdrop": 0.1}  # fmt: skip
GPT2_LAYER = {"ln_1.weight": (8,), "ln_1.bias": (8,), "attn.c_attn.weight": (8, 24),
              "attn.c_attn.bias": (24,), "attn.c_proj.weight": (8, 8), "attn.c_proj.bias": (8,),
              "ln_2.weight": (8,), "ln_2.bias": (8,), "mlp.c_fc.weight": (8, 32),
              "mlp.c_fc.bias": (32,), "mlp.c_proj.weight": (32, 8),
              "mlp.c_proj.bias": (8,)}  # fmt: skip
GPT2_TENSORS = {"wte.weight": (11, 8), "wpe.weight": (6, 8), "ln_f.weight": (8,),
                "ln_f.bias": (8,), "h.0.attn.bias": (6, 6)}  # fmt: skip
GPT2_TENSORS |= {f"h.{l}.{name}": shape for l in (0, 1) for name, shape in GPT2_LAYER.items()}
GPT2_TENSORS = {f"transformer.{name}": shape for name, shape in GPT2_TENSORS.items()}

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8,
           "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 5,
           "max_position_embeddings": 6, "vocab_size": 11, "rms_norm_eps": 1e-5,
           "hidden_act": "silu", "num_local_experts": 2, "num_experts_per_tok": 1,
           "sliding_window": None, "tie_word_embeddings": False,
           "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}  # fmt: skip
MIXTRAL_LAYER = {"input_layernorm.weight": (8,), "post_attention_layernorm.weight": (8,),
                 "self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8),
                 "self_attn.v_proj.weight": (4, 8), "self_attn.o_proj.weight": (8, 8),
                 "block_sparse_moe.gate.weight": (2, 8)}  # fmt: skip
MIXTRAL_LAYER |= {f"block_sparse_moe.experts.{e}.{w}.weight": shape for e in (0, 1)
                  for w, shape in {"w1": (5, 8), "w2": (8, 5), "w3": (5, 8)}.items()}  # fmt: skip
MIXTRAL_TENSORS = {"model.embed_tokens.weight": (11, 8), "lm_head.weight": (11, 8),
                   "model.norm.weight": (8,)}  # fmt: skip
MIXTRAL_TENSORS |= {f"model.layers.0.{name}": shape for name, shape in MIXTRAL_LAYER.items()}


def values(name, shape):
    """Small numbers that every type holds exactly."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    return (draw.integers(0, 256, shape) / 64 - 2).astype("<f4")


def stored(array, dtype):
    """float32 in a type of safetensors, as bytes."""
    if dtype == "BF16":
        return (array.view("<u4") >> 16).astype("<u2").tobytes()
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I32": "<i4", "BOOL": "?"}
    return array.astype(kinds[dtype]).tobytes()


def write_tensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, data = {}, b""
    for name, (dtype, shape, each) in tensors.items():
        offsets = [len(data), len(data) + len(each)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += each
    write_raw(path, json.dumps(header).encode(), data)


def write_raw(path, header, data=b""):
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_folder(config, shapes, dtype="F32", change=None, sharded=False, index=None):
    """change(config, tensors) may edit both; index: more of the shards' weight_map."""
    folder = DIR / "theirs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config, tensors = json.loads(json.dumps(config)), {}
    for name, shape in shapes.items():
        each = "BOOL" if re.search(r"\.attn\.bias$", name) else dtype  # a mask
        tensors[name] = (each, shape, stored(values(name, shape), each))
    if change:
        change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        write_tensors(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    files = {"one.safetensors": names[: len(names) // 2]}
    files["two.safetensors"] = names[len(names) // 2 :]
    weight_map = {name: file for file, each in files.items() for name in each} | (index or {})
    for file, each in files.items():
        write_tensors(folder / file, {name: tensors[name] for name in each})
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def imported(folder):
    """The checkpoint made of a folder: its directory, config.json and tensors."""
    out = DIR / "out"
    shutil.rmtree(out, ignore_errors=True)
    import_hf.import_folder(folder, out)
    return out, json.loads((out / "config.json").read_text()), weights(out / "model.safetensors")


def weights(path):
    """Tensors in F32, read without dev/hf.py."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header, found = json.loads(data[8:start]), {}
    check(header.pop("__metadata__") == {"format": "pt"} and start % 64 == 0, "the header")
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[start + begin : start + end], "<f4")
        check(entry["dtype"] == "F32", f"{name}: found {entry['dtype']}")
        found[name] = array.reshape(entry["shape"])
    return found


# --------------------------------------------------------------------------------------- the values


def expected_gpt2():
    """Ours of theirs: GPT-2 keeps matrices as [in, out], and q, k, v in one."""
    w = {name.removeprefix("transformer."): values(name, shape)
         for name, shape in GPT2_TENSORS.items()}  # fmt: skip
    ours = {"model.embed_tokens.weight": w["wte.weight"],
            "model.embed_positions.weight": w["wpe.weight"],
            "model.norm.weight": w["ln_f.weight"], "model.norm.bias": w["ln_f.bias"]}  # fmt: skip
    for l in (0, 1):
        to, of = f"model.layers.{l}.", f"h.{l}."
        for k, each in enumerate("qkv"):
            columns = slice(8 * k, 8 * k + 8)
            ours[f"{to}self_attn.{each}_proj.weight"] = w[of + "attn.c_attn.weight"].T[columns]
            ours[f"{to}self_attn.{each}_proj.bias"] = w[of + "attn.c_attn.bias"][columns]
        for name, their in {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
                            "mlp.down_proj": "mlp.c_proj"}.items():  # fmt: skip
            ours[f"{to}{name}.weight"] = w[f"{of}{their}.weight"].T
            ours[f"{to}{name}.bias"] = w[f"{of}{their}.bias"]
        for name, their in {"input_layernorm": "ln_1", "pre_feedforward_layernorm": "ln_2"}.items():
            ours |= {f"{to}{name}.{end}": w[f"{of}{their}.{end}"] for end in ("weight", "bias")}
    return ours


def expected_mixtral():
    """Ours of theirs: the matrices of all experts are one below the other."""
    w = {name: values(name, shape) for name, shape in MIXTRAL_TENSORS.items()}
    at, moe = "model.layers.0.", "model.layers.0.block_sparse_moe."
    ours = {name: w[name] for name in w if moe not in name and "post_attention" not in name}
    ours[at + "pre_feedforward_layernorm.weight"] = w[at + "post_attention_layernorm.weight"]
    ours[at + "mlp.gate.weight"] = w[moe + "gate.weight"]
    for part, their in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        both = [w[f"{moe}experts.{e}.{their}.weight"] for e in (0, 1)]
        ours[f"{at}mlp.experts.{part}.weight"] = np.concatenate(both)
    return ours


def test_values():
    gpt2 = {"layers": "2", "width": "8", "heads": "2", "ffn": "0", "vocab": "11", "seq": "6",
            "eps": "0.001", "norm": "layer", "bias": "on", "positions": "learned",
            "activation": "gelu", "tied": "on", "experts": "0"}  # fmt: skip
    mixtral = {"layers": "1", "kv_heads": "1", "ffn": "5", "rope_theta": "500", "experts": "2",
               "experts_per_token": "1", "router": "softmax-renorm", "tied": "off", "norm": "rms",
               "bias": "off", "positions": "rope", "activation": "swiglu"}  # fmt: skip
    for config, shapes, flags, ours in ((GPT2, GPT2_TENSORS, gpt2, expected_gpt2()),
                                        (MIXTRAL, MIXTRAL_TENSORS, mixtral,
                                         expected_mixtral())):  # fmt: skip
        for dtype in ("F64", "F32", "BF16", "F16"):
            for sharded in (False, True):
                folder = write_folder(config, shapes, dtype, sharded=sharded)
                what = f"{config['architectures'][0]} in {dtype}"
                out, made, found = imported(folder)
                check(made["flags"] | flags == made["flags"], f"{what}: found {made['flags']}")
                check(made["norm_mode"] == "PRE" and made["precision"] == "fp32", what)
                check(found.keys() == ours.keys(), f"{what}: {found.keys() ^ ours.keys()}")
                for name in ours:
                    check(np.array_equal(found.get(name), ours[name]), f"{what}: {name}")
                check(hf.ask_c("find", out) == f"{out}\n", f"{what}: its checksums")


def test_kept():
    """What a folder may hold besides: buffers, a tied head; names without the first word."""
    ones = np.ones((1, 1), "<f4").tobytes()

    def change(config, tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.1.attn.masked_bias"] = ("F32", (1, 1), ones)
        tensors["lm_head.weight"] = tensors["wte.weight"]

    _, _, found = imported(write_folder(GPT2, GPT2_TENSORS, change=change))
    check(found.keys() == expected_gpt2().keys(), "GPT-2's tensors without their first word")


def test_config():
    """The checksum of config.json is its last member, and covers what stands before it."""
    out, _, _ = imported(write_folder(GPT2, GPT2_TENSORS))
    text = (out / "config.json").read_text()
    body, comma, end = text.rpartition(",")
    (DIR / "body").write_text(body)
    xxh64 = hf.ask_c("xxh64", DIR / "body").strip()
    check(comma + end == f',\n  "xxh64": "{xxh64}"\n}}\n', f"the end of config.json: {end}")
    check(re.fullmatch(r"[0-9a-f]{16}", xxh64), "a checksum")
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (out / "model.safetensors").write_bytes(data)
    with contextlib.suppress(hf.Refusal):
        hf.ask_c("find", out)
        check(False, "a damaged import passes")
    (DIR / "empty").write_bytes(b"")
    check(hf.ask_c("xxh64", DIR / "empty") == "ef46db3751d8e999\n", "XXH64 of nothing")


# ------------------------------------------------------------------------------------ the refusals


def refused(what, words, folder, out=None):
    """import_hf refuses the folder with these words and a hint, and leaves nothing behind."""
    out = out or DIR / "refused"
    before = sorted(DIR.iterdir())
    try:
        import_hf.import_folder(folder, out)
        found = "no refusal"
        shutil.rmtree(out)
    except hf.Refusal as refusal:
        found = str(refusal)
    check(words in found and "\n  -> " in found, f"{what}: expected {words}, found {found}")
    check(sorted(DIR.iterdir()) == before, f"{what}: found {sorted(DIR.iterdir())}")


GONE = object()


def member_cases():
    """(the model, a member of config.json, its value, words of the refusal)"""
    gpt2, mixtral = (GPT2, GPT2_TENSORS), (MIXTRAL, MIXTRAL_TENSORS)
    yield gpt2, "architectures", ["FooForCausalLM"], "found FooForCausalLM"
    yield gpt2, "architectures", [], "found a list of 0"
    yield gpt2, "architectures", [5], "found 5"
    yield gpt2, "architectures", GONE, 'expected "architectures" to be an array, found null'
    yield gpt2, "n_layer", GONE, 'expected "n_layer", found no such member'
    yield gpt2, "n_layer", "x", "--layers=x: expected a whole number"
    yield gpt2, "n_layer", "\0", r"--layers=\u0000: expected a whole number"
    yield gpt2, "n_layer", "\ud800", r"--layers=\ud800: expected a whole number"
    yield gpt2, "n_layer", "9" * 5000, "expected a whole number from 1 to 4096"
    yield gpt2, "n_layer", 10**400, "--layers=1000"
    yield gpt2, "n_layer", 1.5, "--layers=1.5: expected a whole number"
    yield gpt2, "n_layer", [2], "--layers=[...]: expected a whole number"
    yield gpt2, "n_layer", {}, "--layers={}: expected a whole number"
    yield gpt2, "n_layer", True, 'expected "n_layer" to be a number, found true'
    yield gpt2, "n_layer", 1, "holds transformer.h.1"
    yield gpt2, "n_layer", 3, "no tensor transformer.h.2.ln_1.weight"
    yield gpt2, "n_head", 3, "--heads 3 does not go with --width 8"
    yield gpt2, "vocab_size", 12, "transformer.wte.weight has shape [11, 8], expected [12, 8]"
    yield gpt2, "n_positions", 7, "transformer.wpe.weight has shape [6, 8], expected [7, 8]"
    yield gpt2, "tie_word_embeddings", False, "no tensor lm_head.weight"
    yield gpt2, "activation_function", "gelu", (
        '"activation_function" is gelu; norm.c only computes gelu_new|gelu_pytorch_tanh')
    yield gpt2, "scale_attn_by_inverse_layer_idx", True, 'layer_idx" is true'
    yield gpt2, "quantization_config", {"bits": 4}, '"quantization_config" is {...}'
    yield mixtral, "sliding_window", "x", '"sliding_window" is x; norm.c only computes a number'
    yield mixtral, "sliding_window", 0, '"sliding_window" is 0'
    yield mixtral, "layer_types", ["chunked_attention"], '"layer_types" is chunked_attention'
    yield mixtral, "hidden_act", "gelu", '"hidden_act" is gelu; norm.c only computes silu'
    yield mixtral, "head_dim", 8, "q_proj.weight has shape [8, 8], expected [16, 8]"
    yield mixtral, "head_dim", 5, "--head-size 5 does not go with --positions rope"
    yield mixtral, "attention_bias", True, '"attention_bias" is true'
    yield mixtral, "tie_word_embeddings", True, "lm_head.weight is not the embedding"


def rope_cases():
    """The same of RoPE."""
    mixtral = MIXTRAL, MIXTRAL_TENSORS
    yield mixtral, "rope_scaling", {"type": "linear"}, '"rope_scaling.rope_type" is linear'
    yield mixtral, "rope_scaling", [2], '"rope_scaling.rope_type" is [...]'
    llama3 = {"rope_type": "llama3", "rope_theta": 5e2, "factor": 8, "low_freq_factor": 1,
              "high_freq_factor": 4, "original_max_position_embeddings": 6}  # fmt: skip
    yield mixtral, "rope_scaling", llama3 | {"high_freq_factor": 8}, (
        '"rope_scaling.high_freq_factor" is 8; norm.c only computes 4')
    yield mixtral, "rope_parameters", llama3 | {"low_freq_factor": 2}, (
        '"rope_parameters.low_freq_factor" is 2; norm.c only computes 1')
    yield mixtral, "rope_parameters", llama3 | {"factor": None}, (
        'expected "rope_parameters.factor", found no such member')
    yield mixtral, "rope_parameters", llama3 | {"factor": 0.5}, "--rope-factor=0.5: expected"
    yield mixtral, "rope_parameters", {"full_attention": {"rope_theta": 5e2},
                                       "sliding_attention": {"rope_theta": 6e2}}, (
        '"rope_parameters.sliding_attention" is {...}; norm.c only computes what full')
    yield mixtral, "rope_parameters", {"rope_theta": 5e2, "rope_type": "yarn"}, (
        '"rope_parameters.rope_type" is yarn')
    yield mixtral, "rope_parameters", {"rope_theta": 5e2, "partial_rotary_factor": 0.5}, (
        'partial_rotary_factor" is 0.5')
    yield mixtral, "partial_rotary_factor", True, 'partial_rotary_factor" is true'
    yield mixtral, "rope_parameters", {}, 'expected "rope_theta", found no such member'
    olmo3 = MIXTRAL | {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": None}, {}
    differs = ('"rope_parameters.sliding_attention" is missing, which means {...}; norm.c only '
               "computes what full_attention has")  # fmt: skip
    yield olmo3, "rope_theta", 5e2, differs
    yield olmo3, "rope_scaling", llama3, differs
    yield olmo3, "rope_parameters", {"rope_theta": 5e2}, differs
    yield olmo3, "rope_parameters", {"full_attention": {"rope_theta": 5e2}}, differs
    yield olmo3, "rope_parameters", [5], differs


def class_cases():
    """The same of single classes."""
    deepseek = dict(architectures=["DeepseekV3ForCausalLM"], moe_intermediate_size=4,
                    n_routed_experts=2, n_shared_experts=1, first_k_dense_replace=0,
                    routed_scaling_factor=1, kv_lora_rank=4, qk_rope_head_dim=2, q_lora_rank=None,
                    qk_nope_head_dim=4, v_head_dim=4, n_group=1, topk_group=1,
                    num_key_value_heads=2, rms_norm_eps=1e-6, rope_interleave=False)  # fmt: skip
    yield (MIXTRAL | deepseek, {}), "rope_interleave", GONE, "is missing, which means true"
    yield (MIXTRAL | deepseek, {}), "rms_norm_eps", 1e-5, "only computes 1e-06"
    yield (MIXTRAL | deepseek, {}), "q_lora_rank", GONE, (
        '"q_lora_rank" is missing, which means 1536; norm.c only computes null')
    yield (MIXTRAL | deepseek, {}), "v_head_dim", 2, '"v_head_dim" is 2; norm.c only computes head'
    deepseek |= dict(architectures=["DeepseekV2ForCausalLM"])
    yield (MIXTRAL | deepseek, {}), "topk_method", "group_limited_greedy", '"topk_method" is group'
    yield (MIXTRAL | deepseek, {}), "norm_topk_prob", True, '"norm_topk_prob" is true'
    yield (MIXTRAL | deepseek, {}), "q_lora_rank", 8, '"q_lora_rank" is 8'
    yield (MIXTRAL | deepseek, {}), "rope_scaling", {"type": "yarn"}, (
        '"rope_scaling.rope_type" is yarn; norm.c only computes default')
    olmoe = dict(architectures=["OlmoeForCausalLM"])
    yield (MIXTRAL | olmoe, {}), "clip_qkv", 8.0, '"clip_qkv" is 8; norm.c only computes null'
    qwen3 = dict(architectures=["Qwen3ForCausalLM"])
    yield (MIXTRAL | qwen3, MIXTRAL_TENSORS), "head_dim", GONE, (
        "q_proj.weight has shape [8, 8], expected [256, 8]")
    qwen2 = dict(architectures=["Qwen2ForCausalLM"])
    yield (MIXTRAL | qwen2, MIXTRAL_TENSORS), "vocab_size", 11, "no tensor model.layers.0.self_attn"


def test_members():
    for (config, shapes), key, value, words in [*member_cases(), *rope_cases(), *class_cases()]:

        def change(config, tensors):
            config[key] = value
            if value is GONE:
                del config[key]

        what = f"{config['architectures'][0]}: {key} {str(value)[:40]}"
        refused(what, words, write_folder(config, shapes, change=change))


def test_tensors():
    """A tensor too many, missing, misshapen, of another type or not finite is refused by name."""

    def drop(name):
        return lambda config, tensors: tensors.pop(name)

    def put(name, dtype, shape, data=None):
        array = np.zeros(shape, "<f4") if data is None else data
        return lambda config, tensors: tensors.update({name: (dtype, shape,
                                                              stored(array, dtype))})

    large, c_attn = np.zeros(8, "<f8"), "transformer.h.1.attn.c_attn"
    large[3] = 1e39
    nan = np.zeros(8, "<f4")
    nan[2:4] = np.nan, np.inf
    for words, change in (
        (f"no tensor {c_attn}.bias", drop(f"{c_attn}.bias")),
        ("lm_head.weight is not the embedding", put("lm_head.weight", "F32", (11, 8))),
        ("holds transformer.h.0.attn.c_more.weight, which a GPT2LMHeadModel of this",
         put("transformer.h.0.attn.c_more.weight", "F32", (11, 8))),
        ("c_attn.weight has shape [9, 24], expected [8, 24]",
         put(f"{c_attn}.weight", "F32", (9, 24))),
        ("ln_f.bias has shape [8, 1], expected [8]", put("transformer.ln_f.bias", "F32", (8, 1))),
        ("in F64, F32, BF16, F16, found I32", put("transformer.ln_f.bias", "I32", (8,))),
        ("1 values of transformer.ln_f.bias are infinite or NaN in F32",
         put("transformer.ln_f.bias", "F64", (8,), large)),
        ("2 values of transformer.ln_f.bias", put("transformer.ln_f.bias", "BF16", (8,), nan)),
        ("2 values of transformer.ln_f.bias", put("transformer.ln_f.bias", "F16", (8,), nan)),
    ):  # fmt: skip
        refused("GPT-2", words, write_folder(GPT2, GPT2_TENSORS, change=change))
    lost = write_folder(MIXTRAL, MIXTRAL_TENSORS, change=drop("lm_head.weight"))
    refused("Mixtral", "no tensor lm_head.weight", lost)
    twice = write_folder(GPT2, GPT2_TENSORS, sharded=True)
    shutil.copy(twice / "one.safetensors", twice / "two.safetensors")
    refused("two shards", "holds transformer.wte.weight twice", twice)


def test_index():
    for file, words in (
        ("../x.safetensors", "a file of this folder, found ../x.safetensors"),
        ("/etc/passwd", "a file of this folder, found /etc/passwd"), (".hidden", "found .hidden"),
        ("a\0b", r"found a\u0000b"), (5, "found no name"), ("", "found no name"),
        ("three.safetensors", "three.safetensors: expected a whole safetensors file, found: "),
    ):  # fmt: skip
        folder = write_folder(GPT2, GPT2_TENSORS, sharded=True, index={"x": file})
        refused(f"an index with {file!r}", words, folder)
    for text, words in (("{}", 'in "weight_map", found none'), ("[]", "expected an object"),
                        ('{"weight_map": []}', 'in "weight_map", found none'),
                        ('{"weight_map"', "not valid JSON")):  # fmt: skip
        folder = write_folder(GPT2, GPT2_TENSORS, sharded=True)
        (folder / "model.safetensors.index.json").write_text(text)
        refused(f"an index {text}", words, folder)


def test_files():
    """Files that are lost or cut, and JSON that is none."""
    whole = "expected a whole safetensors file"
    for sharded, name, size, words in (
        (False, "model.safetensors", -4, f"model.safetensors: {whole}"),
        (True, "two.safetensors", -4, f"two.safetensors: {whole}"),
        (False, "model.safetensors", 7, "no regular file of at least 8 bytes"),
        (False, "model.safetensors", None, "found neither"),
        (True, "two.safetensors", None, f"two.safetensors: {whole}"),
        (False, "config.json", None, "cannot read"), (False, "config.json", -4, "not valid JSON"),
    ):  # fmt: skip
        path = write_folder(GPT2, GPT2_TENSORS, sharded=sharded) / name
        data = path.read_bytes()
        path.unlink()
        if size is not None:
            path.write_bytes(data[:size])
        refused(f"{name} cut to {size}", words, path.parent)
    for text in ('{"architectures": [', "", "\0", '{"a": 1, "a": 2}', "[NaN]", "[" * 100000,
                 "1" * 9999, b"\xff\xfe{"):  # fmt: skip
        folder = write_folder(GPT2, GPT2_TENSORS)
        data = text if isinstance(text, bytes) else text.encode()
        (folder / "config.json").write_bytes(data)
        refused(f"config.json {text[:20]}", "not valid JSON", folder)
    (folder / "config.json").write_text("[]")
    refused("config.json []", "expected an object, found []", folder)


def test_headers():
    """Hostile headers of safetensors files."""

    def entry(dtype='"F32"', shape="[1]", offsets="[0,4]"):
        return '{"a":{"dtype":%s,"shape":%s,"data_offsets":%s}}' % (dtype, shape, offsets)

    both = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},%s}'
    for header, words in (
        (entry(dtype='"F8"'), "found F8\n  -> convert the file"), (entry(dtype="[]"), "found []"),
        (entry(shape="[-1]"), "expected a shape of at most 4 sizes"),
        (entry(shape="[1,1,1,1,1]"), "expected a shape of at most 4 sizes"),
        (entry(shape="[true]"), "expected a shape"), (entry(shape='"1"'), "expected a shape"),
        (entry(shape="[2]"), "its shape does not take the 4 bytes it has"),
        (entry(shape="[4294967296,4294967296,0]"), "does not take the 4 bytes"),
        (entry(shape="[%d]" % 2**62), "does not take the 4 bytes"),
        (entry(offsets="[0]"), 'expected "data_offsets" to be [begin, end]'),
        (entry(offsets="[4,0]"), "outside of 4 bytes"), (entry(offsets="[0,8]"), "outside of 4"),
        (entry(offsets="[0,1e1]"), 'expected "data_offsets"'), ("[]", "a header that is no object"),
        ("{}", "4 bytes of data that belong to no tensor"), ("{", "not valid JSON"),
        (both % '"a":1', "not valid JSON: an object with a name twice"),
        (both % '"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}', "tensors overlap at 4"),
        (entry(dtype='"F16"', offsets="[2,4]"), "tensors leave a hole at 0"),
        (both % '"b":1', "found null\n  -> convert the file"),
    ):  # fmt: skip
        folder = write_folder(GPT2, GPT2_TENSORS)
        write_raw(folder / "model.safetensors", header.encode(), bytes(4))
        refused(f"a header {header}", words, folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    refused("a long header", "a header of 18446744073709551615 bytes in a file of 64", folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused("a folder", "no regular file", folder)


def test_window():
    """Sequences as long as a sliding window, where it is shorter than what the model allows."""
    for window, seq in ((None, "6"), (5, "5"), (9, "6")):
        folder = write_folder(MIXTRAL | {"sliding_window": window}, MIXTRAL_TENSORS)
        _, made, _ = imported(folder)
        check(made["flags"]["seq"] == seq, f"a window of {window}: found {made['flags']['seq']}")


def test_olmo3():
    """One theta where no kind of layers has its own."""
    for members in ({}, {"rope_theta": 5e5}, {"rope_parameters": {}},
                    {"rope_parameters": {"rope_theta": 500000, "rope_type": "default"}}):
        config = MIXTRAL | {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": None}
        model = import_hf.read_config(write_folder(config | members, {}) / "config.json")
        found = model.flags["rope_theta"], model.flags["rope_factor"]
        check(found == ("500000", "1"), f"Olmo3 with {members}: found {found}")


def test_kept_files():
    """What belongs to the model goes along, and nothing else."""
    folder = write_folder(MIXTRAL, MIXTRAL_TENSORS)
    for name in ("tokenizer.json", "generation_config.json", "README.md", ".hidden"):
        (folder / name).write_text(f"{name}, as it was")
    out, _, _ = imported(folder)
    found = {path.name: path.read_bytes() for path in (out / "hf").iterdir()}
    names = ("config.json", "tokenizer.json", "generation_config.json")
    check(found == {name: (folder / name).read_bytes() for name in names}, f"hf/: {found.keys()}")
    manifest = json.loads((out / "manifest.json").read_text())
    check(manifest.keys() == {"config.json", "model.safetensors"}, f"found {manifest.keys()}")


def test_own_class():
    """NormForCausalLM: the placement, its rows and its flags."""
    rows = hf.rows_of_mode("PRE")
    config = {"architectures": ["NormForCausalLM"], "placement": "PRE", "rows": rows, "sdd": None,
              "bias": False, "final_norm": True, "selection_bias": False, "vocab_size": 11,
              "tie_word_embeddings": True, "layers": 1, "width": 8, "heads": 2, "kv_heads": 2,
              "kv_rank": 0, "rope_size": 64, "ffn": 5, "experts": 0, "experts_per_token": 2,
              "shared_experts": 0, "dense_layers": 0, "dense_ffn": 0, "router": "softmax",
              "router_scale": 1.0, "seq": 6, "norm": "layer", "positions": "rope",
              "activation": "gelu", "rope_theta": 500.0, "eps": 1e-5, "emb_scale": "one",
              "mix_ratio": 0.25}  # fmt: skip
    at = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (11, 8), at + "mlp.up_proj.weight": (5, 8),
              at + "mlp.down_proj.weight": (8, 5)}  # fmt: skip
    shapes |= {f"{at}self_attn.{each}_proj.weight": (8, 8) for each in "qkvo"}
    for norm in ("model.norm", at + "input_layernorm", at + "pre_feedforward_layernorm"):
        shapes |= {f"{norm}.weight": (8,), f"{norm}.bias": (8,)}
    _, made, found = imported(write_folder(config, shapes, "BF16"))
    check(made["norm_mode"] == "PRE" and made["flags"]["norm"] == "layer", "the flags")
    right = all(np.array_equal(found[name], values(name, shape)) for name, shape in shapes.items())
    check(right and found.keys() == shapes.keys(), "the tensors of a NormForCausalLM")
    other = json.loads(json.dumps(rows))
    other["PRE"]["attn"]["post"] = 1
    for key, value, words in (
        ("placement", "NOWHERE", "found NOWHERE"), ("placement", 5, "found 5"),
        ("placement", GONE, 'expected "placement"'), ("rows", other, "its rows of PRE are not"),
        ("rows", 5, "its rows of PRE are not"), ("layers", 2, "no tensor model.layers.1."),
        ("width", GONE, 'expected "width", found no such member'),
        ("norm", "batch", "--norm=batch: expected rms|layer"), ("bias", True, "_proj.bias"),
        ("tie_word_embeddings", False, "no tensor lm_head.weight"),
        ("final_norm", False, "reads a stream that has no norm"),
    ):  # fmt: skip
        edited = config | {key: value}
        edited = {name: each for name, each in edited.items() if each is not GONE}
        refused(f"{key} {value}", words, write_folder(edited, shapes))
    sdd = config | {"placement": "SDD", "rows": hf.rows_of_mode("SDD"), "sdd": {"v": 2}}
    refused("sdd", 'expected "sdd" to be a row of SDD_TABLE', write_folder(sdd, shapes))
    layer = config | {"placement": "SPAN_FIRST", "rows": hf.rows_of_mode("SPAN_FIRST")}
    refused("a layer's row", "no placement SPAN_FIRST", write_folder(layer, shapes))


def test_out():
    """Nothing is overwritten. An error while weights are read leaves nothing behind."""
    folder = write_folder(GPT2, GPT2_TENSORS)
    for name in ("file", "folder", "link"):
        out = DIR / f"there-{name}"
        if name == "file":
            out.write_text("kept")
        elif name == "folder":
            out.mkdir()
            (out / "kept").write_text("")
        else:
            out.symlink_to(DIR / "nowhere")
        refused(f"OUT is a {name}", "is there already; nothing was overwritten", folder, out)
    (DIR / "new").mkdir()  # empty: nothing to overwrite
    import_hf.import_folder(folder, DIR / "new")
    import_hf.import_folder(folder, DIR / "deep" / "new")
    check((DIR / "deep" / "new" / "manifest.json").is_file(), "folders above OUT are made")
    refused("OUT below a file", "cannot read or write", folder, DIR / "there-file" / "out")
    with unittest.mock.patch.object(hf, "write_safetensors", side_effect=OSError(28, "No space")):
        refused("a full disk", "cannot read or write", folder)


def test_command():
    """What the command prints: its refusal, the trainer's command, and the tokenizer's."""
    tensors = GPT2_TENSORS | {"transformer.wte.weight": (257, 8)}
    folder = write_folder(GPT2 | {"vocab_size": 257}, tensors)

    def run(out):
        words = ["import_hf.py", str(folder), str(out)]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            with unittest.mock.patch.object(sys, "argv", words):
                try:
                    import_hf.main()
                except SystemExit as end:
                    return said.getvalue(), end.code
        return said.getvalue(), None

    said, _ = run(DIR / "a b")
    last = said.splitlines()[-1]
    check("NORM_MODE=PRE && ./train_gpt --init-from '" in last, f"the last line: {last}")
    check("found neither" in said or "pip install tokenizers" in said, f"no tokenizer: {said}")
    _, refusal = run(DIR / "a b")
    check(str(refusal).startswith("error: ") and "is there already" in refusal, f"{refusal}")
    with unittest.mock.patch.object(hf, "load_converter", side_effect=ImportError("No tokenizers")):
        said, _ = run(DIR / "absent")
    check(f"pip install tokenizers && python3 data/tokenizer.py {folder}" in said, f"found {said}")
    try:
        byte_of = hf.load_converter().byte_of()
    except ImportError:
        print("note: tokenizers is missing: what the import makes of a tokenizer is not tested")
        return
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    merges = {"type": "BPE", "vocab": byte_of, "merges": []}
    for k, (model, cut, words, is_made) in enumerate((
        (merges, level, "its tokenizer, for prompts and samples", True),
        (merges, level | {"add_prefix_space": True}, "does not have the pre-tokenizer Byte", True),
        (merges | {"dropout": 0.1}, level, "does not have BPE with dropout", True),
        (merges, {"type": "Sequence", "pretokenizers": []}, "does not have another normal", True),
        ({"type": "WordLevel", "vocab": {"a": 0}}, level, "does not have WordLevel", True),
        (5, level, "expected a tokenizer.json, found TypeError", False),
        (merges, [], "prompts are refused", True),
    )):  # fmt: skip
        ways = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        end = {"id": 256, "content": "<|endoftext|>", "special": True} | ways
        text = json.dumps({"version": "1.0", "model": model, "pre_tokenizer": cut,
                           "added_tokens": [end]})  # fmt: skip
        (folder / "tokenizer.json").write_text(text)
        said, _ = run(DIR / f"t{k}")
        made = (DIR / f"t{k}" / "tokenizer.bin").is_file()
        check(words in said and made == is_made, f"{text}: {said}")
        manifest = json.loads((DIR / f"t{k}" / "manifest.json").read_text())
        check("tokenizer.bin" not in manifest, "the tokenizer can be replaced")
    text = json.dumps({"version": "1.0", "model": merges, "pre_tokenizer": level,
                       "added_tokens": [end]})  # fmt: skip
    (folder / "tokenizer.json").write_text(text)
    with unittest.mock.patch("os.replace", side_effect=OSError(28, "No space")):
        said, _ = run(DIR / "no space")
    made = (DIR / "no space" / "tokenizer.bin").exists()
    check("no tokenizer.bin" in said and "No space" in said and not made, f"a full disk: {said}")
    small = write_folder(GPT2, GPT2_TENSORS)
    (small / "tokenizer.json").write_text(text)
    said, _ = run(DIR / "small")
    words = "has 257 tokens, the model a vocabulary of 11\n  -> "
    check(words in said and not (DIR / "small" / "tokenizer.bin").exists(), f"too large: {said}")


def test_mutated():
    """Bytes of a config.json, an index and a header, changed at random: imported or refused."""
    draw = random.Random(1)
    pieces = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e9", b"0",
              b"18446744073709551616", b"\\u0000", b"\xff", b"9" * 30]  # fmt: skip
    for k in range(240):
        config, shapes = ((GPT2, GPT2_TENSORS), (MIXTRAL, MIXTRAL_TENSORS))[k % 2]
        name = ("config.json", "model.safetensors.index.json", "one.safetensors")[k % 3]
        path = write_folder(config, shapes, sharded=True) / name
        data = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(min(len(data), 1200))
            data[at : at + draw.randint(0, 4)] = draw.choice(pieces)
        path.write_bytes(data)
        shutil.rmtree(DIR / "mutated", ignore_errors=True)
        try:
            import_hf.import_folder(path.parent, DIR / "mutated")
            found = None
        except hf.Refusal as refusal:
            found = None if "\n  -> " in str(refusal) else refusal
        except Exception as error:
            found = repr(error)
        check(found is None, f"{name}, mutation {k}: {found}")


def main():
    global DIR
    with tempfile.TemporaryDirectory() as folder:
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                DIR = pathlib.Path(folder) / name
                DIR.mkdir()
                test()
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
