"""hf.py: what dev/export_hf.py and dev/import_hf.py share.

Four tables say how models of Hugging Face transformers and of norm.c correspond: the classes, the
keys of config.json that are flags here, the keys that must have one value, and the tensors that
have another name or form there. RoPE is half-split on both sides. Below them: JSON, safetensors
files, and dev/hf.c, which answers from the C code. Needs numpy and a C compiler ($CC, else cc).
"""
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Refusal(Exception):
    """Says what was expected, what was found, and on a second line what to do."""


# ---------------------------------------------------------------------------------------- tables

DEEPSEEKS = {"deepseek_v2", "deepseek_v3"}
MOES = {"mixtral", "flex_olmo", "qwen3_moe", "olmoe"} | DEEPSEEKS
QWENS = {"qwen2", "qwen3", "qwen3_moe"}
ROPES = {"llama", "mistral", "olmo2", "olmo3"} | QWENS | MOES
ALL = {"gpt2"} | ROPES
RENAMED_EXPERTS = MOES - {"mixtral"}
LLAMA = {"norm": "rms", "bias": "off", "positions": "rope", "activation": "swiglu"}


class Class(NamedTuple):
    name: str
    type: str  # model_type; the other tables name a class by it
    mode: str  # its placement
    flags: dict  # norm.c's flags that the class implies


CLASSES = [
    Class("GPT2LMHeadModel", "gpt2", "PRE",
          {"norm": "layer", "bias": "on", "positions": "learned", "activation": "gelu"}),
    Class("LlamaForCausalLM", "llama", "PRE", LLAMA),
    Class("MistralForCausalLM", "mistral", "PRE", LLAMA),
    Class("Olmo2ForCausalLM", "olmo2", "OLMO2", LLAMA),
    Class("Qwen3ForCausalLM", "qwen3", "PRE_QK_PRE", LLAMA),
    Class("Qwen2ForCausalLM", "qwen2", "PRE", LLAMA | {"bias": "qkv"}),
    Class("Olmo3ForCausalLM", "olmo3", "OLMO2", LLAMA),
    Class("OlmoeForCausalLM", "olmoe", "OLMOE", LLAMA),
    Class("MixtralForCausalLM", "mixtral", "PRE", LLAMA | {"router": "softmax-renorm"}),
    Class("FlexOlmoForCausalLM", "flex_olmo", "OLMO2", LLAMA),
    Class("Qwen3MoeForCausalLM", "qwen3_moe", "PRE_QK_PRE", LLAMA),
    Class("DeepseekV3ForCausalLM", "deepseek_v3", "PRE",
          LLAMA | {"router": "sigmoid", "balance_rate": "0.001"}),
    Class("DeepseekV2ForCausalLM", "deepseek_v2", "PRE", LLAMA | {"router": "softmax"}),
]

REQUIRED, ELSEWHERE = object(), object()


class Key(NamedTuple):
    """A member of config.json ("a.b": member b of a) that is a flag of norm.c."""

    classes: set
    key: str
    flag: str
    missing: Any  # the flag's value without the member; ELSEWHERE: the flag's next row says it


KEYS = [
    Key({"gpt2"}, "n_layer", "layers", REQUIRED),
    Key({"gpt2"}, "n_embd", "width", REQUIRED),
    Key({"gpt2"}, "n_head", "heads", REQUIRED),
    Key({"gpt2"}, "n_inner", "ffn", "0"),
    Key({"gpt2"}, "n_positions", "seq", REQUIRED),
    Key({"gpt2"}, "layer_norm_epsilon", "eps", "1e-5"),
    Key({"gpt2"}, "tie_word_embeddings", "tied", "on"),
    Key(ROPES, "tie_word_embeddings", "tied", "off"),
    Key(ALL, "vocab_size", "vocab", REQUIRED),
    Key(ROPES, "num_hidden_layers", "layers", REQUIRED),
    Key(ROPES, "hidden_size", "width", REQUIRED),
    Key(ROPES, "num_attention_heads", "heads", REQUIRED),
    Key(ROPES, "num_key_value_heads", "kv_heads", "0"),
    Key(ROPES, "max_position_embeddings", "seq", REQUIRED),
    Key(ROPES, "rms_norm_eps", "eps", REQUIRED),
    Key(ROPES, "rope_parameters.rope_theta", "rope_theta", ELSEWHERE),
    Key({"llama"}, "rope_theta", "rope_theta", "10000"),
    Key(ROPES - {"llama"}, "rope_theta", "rope_theta", REQUIRED),
    Key(ROPES - DEEPSEEKS - {"qwen3", "olmoe"}, "head_dim", "head_size", "0"),
    Key({"qwen3"}, "head_dim", "head_size", "128"),
    Key(DEEPSEEKS, "qk_nope_head_dim", "head_size", "128"),
    Key(ROPES - DEEPSEEKS - {"qwen3_moe"}, "intermediate_size", "ffn", REQUIRED),
    Key(DEEPSEEKS | {"qwen3_moe"}, "moe_intermediate_size", "ffn", REQUIRED),
    Key({"flex_olmo", "qwen3_moe", "olmoe"}, "num_local_experts", "experts", ELSEWHERE),
    Key({"flex_olmo", "qwen3_moe", "olmoe"}, "num_experts", "experts", REQUIRED),
    Key({"mixtral"}, "num_local_experts", "experts", REQUIRED),
    Key(MOES, "num_experts_per_tok", "experts_per_token", REQUIRED),
    Key({"flex_olmo", "qwen3_moe", "olmoe"}, "norm_topk_prob", "router", "softmax"),
    Key(DEEPSEEKS, "n_routed_experts", "experts", REQUIRED),
    Key(DEEPSEEKS, "n_shared_experts", "shared_experts", REQUIRED),
    Key(DEEPSEEKS, "first_k_dense_replace", "dense_layers", REQUIRED),
    Key(DEEPSEEKS, "intermediate_size", "dense_ffn", REQUIRED),
    Key(DEEPSEEKS, "routed_scaling_factor", "router_scale", REQUIRED),
    Key(DEEPSEEKS, "kv_lora_rank", "kv_rank", REQUIRED),
    Key(DEEPSEEKS, "qk_rope_head_dim", "rope_size", REQUIRED),
]

HEAD = "head"  # stands for the width of a head


class Must(NamedTuple):
    """A member of config.json that must have one of the values that norm.c computes."""

    classes: set
    key: str
    missing: Any  # the value that transformers takes without the member
    allowed: list  # the first one is what an export writes


MUSTS = [
    Must(ALL, "quantization_config", None, [None]),
    Must({"gpt2"}, "activation_function", "gelu_new", ["gelu_new", "gelu_pytorch_tanh"]),
    Must({"gpt2"}, "scale_attn_weights", True, [True]),
    Must({"gpt2"}, "scale_attn_by_inverse_layer_idx", False, [False]),
    Must({"gpt2"}, "add_cross_attention", False, [False]),
    Must(ROPES, "hidden_act", "silu", ["silu"]),
    Must(ROPES, "attention_bias", False, [False]),
    Must({"llama", "deepseek_v2"}, "mlp_bias", False, [False]),
    Must(ROPES - DEEPSEEKS, "rope_parameters.rope_type", "default", ["default", "llama3"]),
    Must(DEEPSEEKS, "rope_parameters.rope_type", "default", ["default"]),
    Must(ROPES, "rope_parameters.partial_rotary_factor", 1, [1]),
    Must(ROPES, "partial_rotary_factor", 1, [1]),
    Must({"olmoe"}, "clip_qkv", None, [None]),
    Must({"qwen3_moe"}, "decoder_sparse_step", 1, [1]),
    Must({"qwen3_moe"}, "mlp_only_layers", [], [[], None]),
    Must(DEEPSEEKS, "q_lora_rank", 1536, [None]),
    Must(DEEPSEEKS, "v_head_dim", 128, [HEAD]),
    Must({"deepseek_v2"}, "topk_method", "greedy", ["greedy"]),
    Must({"deepseek_v2"}, "norm_topk_prob", False, [False]),
    Must({"deepseek_v3"}, "n_group", 8, [1]),
    Must({"deepseek_v3"}, "topk_group", 4, [1]),
    Must({"deepseek_v3"}, "norm_topk_prob", True, [True]),
    Must({"deepseek_v3"}, "rope_interleave", True, [False]),
    Must(DEEPSEEKS, "rms_norm_eps", 1e-6, [1e-6]),  # transformers fixes that of the latent's norm
]

# Llama 3's RoPE: members beside "factor" and "original_max_position_embeddings", and their values.
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# The theta of each kind of layers of an Olmo3 if config.json has none for it.
OLMO3_THETA = 500000
# Classes that refuse a width which the heads do not divide, or have no other size of a head.
DIVIDED = {"gpt2", "llama", "olmoe", "deepseek_v2"}
# The sliding window if config.json has none. Up to so many tokens attention is full.
WINDOWS = {"mixtral": None} | dict.fromkeys({"mistral", "olmo3"} | QWENS, 4096)

# What an import copies into its folder hf/, and an export puts back.
KEPT = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
        "tokenizer.model", "chat_template.jinja"]

BLOCK = "model.layers.%d."


class Renamed(NamedTuple):
    """A tensor with another name or form in a class. %d: the layer, then the expert."""

    classes: set
    ours: str
    theirs: str
    turned: bool = False  # theirs is [in, out], ours [out, in]
    part: int = 0  # theirs holds `parts` of ours one below the other; ours is this one
    parts: int = 1
    pairs: str = ""  # rotary channels are neighbouring pairs in theirs: of each "head", or "latent"


def gpt2_rows(ours, theirs, turned=False, part=0, parts=1):
    return [Renamed({"gpt2"}, f"{ours}.weight", f"{theirs}.weight", turned, part, parts),
            Renamed({"gpt2"}, f"{ours}.bias", f"{theirs}.bias", False, part, parts)]


def expert_row(classes, part, theirs):
    return Renamed(classes, f"{BLOCK}mlp.experts.{part}.weight", f"{BLOCK}{theirs}.weight")


TENSORS = [
    Renamed({"gpt2"}, "model.embed_tokens.weight", "transformer.wte.weight"),
    Renamed({"gpt2"}, "model.embed_positions.weight", "transformer.wpe.weight"),
    *gpt2_rows("model.norm", "transformer.ln_f"),
    *gpt2_rows(BLOCK + "input_layernorm", "transformer.h.%d.ln_1"),
    *gpt2_rows(BLOCK + "self_attn.q_proj", "transformer.h.%d.attn.c_attn", True, 0, 3),
    *gpt2_rows(BLOCK + "self_attn.k_proj", "transformer.h.%d.attn.c_attn", True, 1, 3),
    *gpt2_rows(BLOCK + "self_attn.v_proj", "transformer.h.%d.attn.c_attn", True, 2, 3),
    *gpt2_rows(BLOCK + "self_attn.o_proj", "transformer.h.%d.attn.c_proj", True),
    *gpt2_rows(BLOCK + "pre_feedforward_layernorm", "transformer.h.%d.ln_2"),
    *gpt2_rows(BLOCK + "mlp.up_proj", "transformer.h.%d.mlp.c_fc", True),
    *gpt2_rows(BLOCK + "mlp.down_proj", "transformer.h.%d.mlp.c_proj", True),
    Renamed(ROPES - {"olmo2", "olmo3", "flex_olmo"}, BLOCK + "pre_feedforward_layernorm.weight",
            BLOCK + "post_attention_layernorm.weight"),
    Renamed({"mixtral"}, BLOCK + "mlp.gate.weight", BLOCK + "block_sparse_moe.gate.weight"),
    *(Renamed({"deepseek_v2"}, name, name, pairs=pairs) for name, pairs in (
        (BLOCK + "self_attn.q_proj.weight", "head"),
        (BLOCK + "self_attn.kv_a_proj_with_mqa.weight", "latent"))),
    expert_row({"mixtral"}, "gate_proj", "block_sparse_moe.experts.%d.w1"),
    expert_row({"mixtral"}, "up_proj", "block_sparse_moe.experts.%d.w3"),
    expert_row({"mixtral"}, "down_proj", "block_sparse_moe.experts.%d.w2"),
    expert_row(RENAMED_EXPERTS, "gate_proj", "mlp.experts.%d.gate_proj"),
    expert_row(RENAMED_EXPERTS, "up_proj", "mlp.experts.%d.up_proj"),
    expert_row(RENAMED_EXPERTS, "down_proj", "mlp.experts.%d.down_proj"),
]


def rows_of(table, kind):
    """The rows of a table that are of a class, by its model_type."""
    return [row for row in table if kind in row.classes]


def renamed(kind, name):
    """The row of one of our tensors, its layer filled in; "%d" in theirs is the expert then."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    ours = BLOCK + name[layer.end() :] if layer else name
    row = next((row for row in rows_of(TENSORS, kind) if row.ours == ours), None)
    row = row or Renamed({kind}, ours, ours)
    return row._replace(theirs=row.theirs.replace("%d", layer[1], 1) if layer else row.theirs)


def pair_order(pairs, flags, rows):
    """For each of our rows theirs: of the last R channels of a head, or of those below the latent,
    they turn the pairs (2i, 2i + 1), we (i, i + R/2). flags: a model's."""
    R, rank, head = (int(flags[name]) for name in ("rope_size", "kv_rank", "head_size"))
    head = head or int(flags["width"]) // int(flags["heads"])
    order = np.arange(rows).reshape(-1, (rank if pairs == "latent" else head) + R)
    order[:, -R:] = np.concatenate([order[:, -R::2], order[:, 1 - R :: 2]], 1)
    return order.ravel()


# Members of the config.json of a NormForCausalLM (dev/modeling_norm.py) that are no flags' names.
OWN_CLASS = "NormForCausalLM"
OWN_NAMES = {"vocab": "vocab_size", "tied": "tie_word_embeddings"}
# Flags that it does not state under their names: they shape no tensor, or follow from others.
OWN_UNSTATED = {"vocab", "tied", "sdd", "bias", "final_norm", "balance_rate"}
# Flags that came later: a folder without them has their defaults.
OWN_LATER = {"head_size", "rope_factor", "rope_original"}
OWN_UNSTATED |= {"balance_loss", "sequence_loss", "router_z_loss", "router_losses"}


# ------------------------------------------------------------------------------------------ C code


@functools.cache
def program():
    """dev/hf.c, compiled into a folder that lives as long as this process."""
    folder = tempfile.TemporaryDirectory()
    services = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "llmc/run").glob("*.c"))
    flags = ("-std=c17 -D_DEFAULT_SOURCE -D_XOPEN_SOURCE=700 -O0 -pthread -I. dev/hf.c "
             "data/stories.c")
    command = [*os.environ.get("CC", "cc").split(), *flags.split(), *services, "-lm", "-o",
               f"{folder.name}/hf"]
    try:
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        found = made.stderr.strip() if made.returncode else None
    except OSError as error:
        found = error.strerror
    if found is not None:
        raise Refusal(f"{' '.join(command)}: expected to compile dev/hf.c, found: {found}\n"
                      "  -> CC=the C compiler that builds norm.c")
    return folder


def ask_c(*words):
    """The output of dev/hf.c. Its warnings go to stderr, and its error becomes a Refusal."""
    command = [f"{program().name}/hf", *map(str, words)]
    made = subprocess.run(command, capture_output=True, text=True, errors="replace")
    warnings, _, error = made.stderr.partition("error: ")
    sys.stderr.write(warnings)
    if made.returncode:
        raise Refusal(error.rpartition("\n  (")[0] or f"dev/hf.c: status {made.returncode}")
    return made.stdout


@functools.cache
def tables():
    """The version of config.json, and the tables of modes, SDD and flags of the model."""
    return json.loads(ask_c("tables"))


def rows_of_mode(name):
    """The row of a placement, and those that it names for some of its layers."""
    modes = tables()["modes"]
    if name not in modes:
        raise Refusal(f"expected a placement of llmc/modes.h, found {name}\n"
                      "  -> the norm.c that trained it")
    names = (name, modes[name]["first"], modes[name]["early"])
    return {key: modes[key] for key in names if key}


# -------------------------------------------------------------------------------------------- JSON


def parse_json(text, path):
    """Any JSON value. A name that stands twice in an object, NaN and Infinity are refused."""

    def members(pairs):
        if len(names := dict(pairs)) < len(pairs):
            raise ValueError("an object with a name twice")
        return names

    def constant(word):
        raise ValueError(f"{word}, which is no JSON")

    try:
        return json.loads(text, object_pairs_hook=members, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: not valid JSON: {error}\n"
                      "  -> a whole copy of the file") from None


def read_json(path):
    """The object that a file holds."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}\n  -> check the path") from None
    value = parse_json(data, path)
    if not isinstance(value, dict):
        raise Refusal(f"{path}: expected an object, found {as_text(value)}\n"
                      "  -> a whole copy of the file")
    return value


def as_text(value):
    """A JSON value as it would be typed, at most 80 characters, without control characters."""
    if isinstance(value, str):
        return json.dumps(value)[1:-1][:80]
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    if isinstance(value, list):
        return "[...]" if value else "[]"
    return f"{value:.15g}" if isinstance(value, float) else json.dumps(value)[:80]


# --------------------------------------------------------------------------------------- tokenizer


@functools.cache
def load_converter():
    """data/tokenizer.py as a module. ImportError: the package tokenizers is not there."""
    path = ROOT / "data" / "tokenizer.py"
    spec = importlib.util.spec_from_file_location("norm_tokenizer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------- safetensors

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "BOOL": 1}
HEADER_MOST = 100_000_000  # bytes, the format's limit
RANK_MOST = 4


class Tensor(NamedTuple):
    path: pathlib.Path
    dtype: str
    shape: tuple
    data: np.ndarray  # bytes of the mapped file: pages are read when they are touched

    def words(self):
        """The values in their shape, as stored: BF16 as integers."""
        kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
        return self.data.view(kinds[self.dtype]).reshape(self.shape)


def float32(words):
    """Stored floats, some of Tensor.words(), as float32. Too large values become infinite."""
    if words.dtype == np.uint16:
        return (words.astype("<u4") << 16).view("<f4")
    with np.errstate(over="ignore"):
        return words.astype("<f4")


def bfloat16(values):
    """float32 rounded to the nearest bfloat16, ties to even, as integers."""
    bits = values.view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def is_sizes(value, least, most):
    """Whether a JSON value is a list of so many integers that are not negative."""
    return (isinstance(value, list) and least <= len(value) <= most
            and all(type(size) is int and size >= 0 for size in value))


def read_entry(path, name, entry, data):
    """One member of a header: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}."""
    entry, name = entry if isinstance(entry, dict) else {}, as_text(name)
    dtype, shape, offsets = map(entry.get, ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BYTES:
        known = "F64, F32, BF16, F16, I64, I32, U8 or BOOL"
        raise Refusal(f"{path}: expected tensor {name} in {known}, found "
                      f"{as_text(dtype)}\n  -> convert the file")
    if not is_sizes(shape, 0, RANK_MOST):
        raise ValueError(f"tensor {name}: expected a shape of at most {RANK_MOST} sizes")
    if not is_sizes(offsets, 2, 2):
        raise ValueError(f'tensor {name}: expected "data_offsets" to be [begin, end]')
    begin, end = offsets
    if not begin <= end <= len(data):
        raise ValueError(f"tensor {name}: offsets {offsets} outside of {len(data)} bytes of data")
    size = BYTES[dtype]
    for each in shape:
        size *= each
    if size != end - begin:
        raise ValueError(f"tensor {name}: its shape does not take the {end - begin} bytes it has")
    return Tensor(path, dtype, tuple(shape), data[begin:end]), begin, end


def read_safetensors(path):
    """The tensors of a file by name. Each byte of its data must belong to one tensor."""
    try:
        if not path.is_file() or path.stat().st_size < 8:
            raise ValueError("no regular file of at least 8 bytes")
        file = np.memmap(path, np.uint8, "r")
        length = int(file[:8].view("<u8")[0])
        if length > min(len(file) - 8, HEADER_MOST):
            raise ValueError(f"a header of {length} bytes in a file of {len(file)}")
        header = parse_json(file[8 : 8 + length].tobytes(), path)
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
        header.pop("__metadata__", None)
        data, tensors, at = file[8 + length :], {}, 0
        for name, entry in header.items():
            tensors[name] = read_entry(path, name, entry, data)
        for name, (_, begin, end) in sorted(tensors.items(), key=lambda item: item[1][1:]):
            if begin != at:
                raise ValueError(f"tensors {'overlap' if begin < at else 'leave a hole'} at {at}")
            at = end
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes of data that belong to no tensor")
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise Refusal(f"{path}: expected a whole safetensors file, found: {found}\n"
                      "  -> copy or download the file again") from None
    return {name: tensor for name, (tensor, _, _) in tensors.items()}


def write_safetensors(path, tensors, progress=None):
    """tensors: (name, dtype, shape, make) each. make() gives the data when its turn comes, so
    that one tensor at a time is in memory. progress(tensor, tensors, bytes, bytes in all)."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in tensors:
        end = at + BYTES[dtype] * int(np.prod(shape, dtype=object))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begins at a multiple of 64 bytes
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for k, (name, _, _, make) in enumerate(tensors):
            file.write(np.ascontiguousarray(make()).data)
            if progress:
                progress(k + 1, len(tensors), header[name]["data_offsets"][1], at)
        file.flush()
        os.fsync(file.fileno())


def show_progress():
    """Prints one line every few seconds."""
    last = time.monotonic()

    def progress(k, count, done, size):
        nonlocal last
        if time.monotonic() - last > 3:
            last = time.monotonic()
            print(f"tensor {k} of {count}, {done >> 20} of {size >> 20} MiB", flush=True)

    return progress


# ---------------------------------------------------------------------------------------- folders


@contextlib.contextmanager
def new_folder(out):
    """A temporary folder beside `out` that gets its name when all is written. `out` may be an
    empty folder; anything else is never overwritten."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise Refusal(f"{out} is there already; nothing was overwritten\n  -> another folder")
    if not out.name:
        raise Refusal(f"{out}: expected the name of a new folder, found the current one\n"
                      "  -> another folder")
    temp = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        temp.mkdir(parents=True)
        yield temp
        os.rename(temp, out)
    except OSError as error:
        raise Refusal(f"cannot read or write {error.filename or temp}: {error.strerror}\n"
                      "  -> check its permissions and the space on that disk") from None
    finally:
        shutil.rmtree(temp, ignore_errors=True)
