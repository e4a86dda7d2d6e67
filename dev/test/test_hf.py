#!/usr/bin/env python3
"""test_hf.py: models go to Hugging Face transformers and come back.

    make build/logits && make binary NORM_MODE=PRE && make binary NORM_MODE=OLMO2 &&
        python3 dev/test/test_hf.py [WORDS]

dev/export_hf.py's folder gives the judge's logits (build/logits) under every placement, dense and
with experts, with a KV cache, padded, and after save_pretrained. dev/import_hf.py makes the same
weights of it again, bit for bit. Folders of transformers' own classes give their logits in the
judge. A round trip changes no loss, and twenty steps of AdamW are the same on both sides.
With words only the tests whose name contains one of them. Needs torch, safetensors, transformers
(written against 5.23), tiktoken and, for `trained`, lm_eval. Broken folders: test_import_hf.py.
"""
import contextlib
import io
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DIR = ROOT / "build" / "test" / "hf"
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(DIR / "home"), "OMP_NUM_THREADS": "1",
               "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline  # noqa: E402

sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "dev" / "test")]
import export_hf  # noqa: E402
import hf  # noqa: E402
import import_hf  # noqa: E402

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
passed = failed = 0


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print("FAILED", what, flush=True)
    return ok


def close(a, b, most, what):
    error = (a - b).abs().max().item() if a.shape == b.shape else math.inf
    return check(error <= most, f"{what}: expected at most {most}, found a difference of {error}")


def export(source, out, dtype="float32"):
    shutil.rmtree(out, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        export_hf.export(pathlib.Path(source), pathlib.Path(out), dtype)
    return said.getvalue()


def imported(folder, out):
    """A checkpoint of norm.c, made of a folder of transformers."""
    shutil.rmtree(out, ignore_errors=True)
    import_hf.import_folder(pathlib.Path(folder), pathlib.Path(out))
    return pathlib.Path(out)


def flags_of(checkpoint):
    """The flags in a checkpoint's config.json that are not at their defaults."""
    flags = json.loads((checkpoint / "config.json").read_text())["flags"]
    default = {name: row["default"] for name, row in hf.tables()["flags"].items()}
    words = {name: value for name, value in flags.items() if value != default.get(name, value)}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in words.items())


def same_weights(a, b, what):
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    equal = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    check(equal, f"{what}: other weights than before")


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def logits_of(*lines):
    """Runs build/logits over (name, mode, flags); {name: tokens, logits}"""
    for name, _, _ in lines:
        shutil.rmtree(DIR / name, ignore_errors=True)
        (DIR / name).mkdir(parents=True)
    text = "".join(f"{DIR / name} {mode} {flags}\n" for name, mode, flags in lines)
    subprocess.run([ROOT / "build" / "logits"], input=text, text=True, check=True)
    return {name: load_file(DIR / name / "logits.safetensors") for name, _, _ in lines}


# --------------------------------------------------------------------------------- every placement

SMALL = "--layers 3 --width 24 --heads 4 --ffn 20 --seq 21 "
SHAPES = {
    "gpt2": SMALL + "--vocab 150 --norm layer --bias on --positions learned --activation gelu "
    "--tied on",
    "llama": SMALL + "--vocab 256 --kv-heads 2 --tied off --rope-theta 500",
    "olmoe": SMALL + "--vocab 150 --tied off --experts 6 --experts-per-token 2",
    "deepseek": SMALL + "--vocab 130 --tied off --experts 6 --experts-per-token 3 "
    "--shared-experts 2 --dense-layers 1 --dense-ffn 40 --router sigmoid --router-scale 1.5 "
    "--balance-rate 0.001 --kv-rank 12 --rope-size 6 --eps 1e-6",
}
SWITCHES = [
    ("SDD", "llama", "--sdd code"), ("SDD_PRE", "llama", "--sdd code"),
    ("SDD", "olmoe", "--sdd code"), ("SDD", "deepseek", "--sdd code"),
    ("SDD_PRE", "deepseek", "--sdd code"), ("SANDWICH", "llama", "--emb-scale sqrt-width"),
    ("SPAN", "llama", "--final-norm on"), ("POST", "gpt2", "--final-norm on"),
    ("MIX_LN", "llama", "--mix-ratio 0.67"), ("PRE", "olmoe", "--router softmax-renorm"),
    ("SPAN", "olmoe", "--router softmax-renorm --balance-rate 0.1"),
    ("OLMO2", "olmoe", "--router softmax-renorm"), ("SPAN", "deepseek", "--norm layer"),
    ("PRE", "gpt2", "--norm dyt"), ("PERI", "llama", "--norm dyt"), ("SDD", "llama", "--norm dyt"),
    ("OLMO2", "gpt2", "--norm dyt"), ("QKVC_POST", "deepseek", "--norm dyt"),
    ("HYBRID", "deepseek", "--norm layer"), ("NGPT", "olmoe", "--activation gelu"),
    ("SPAN", "llama", "--activation gelu --eps 0.1"), ("HYBRID", "llama", "--tied on --bias on"),
    ("PRE", "gpt2", "--bias off"), ("PRE", "gpt2", "--tied off"), ("PRE", "gpt2", "--norm rms"),
    ("SPAN", "deepseek", "--shared-experts 0"), ("PRE", "deepseek", "--eps 1e-5"),
    ("PRE", "deepseek", "--balance-rate 0"),
    ("PRE", "deepseek", "--balance-rate 0 --router softmax"),
    ("PRE", "llama", "--bias qkv"), ("HYBRID", "llama", "--bias qkv --head-size 10"),
    ("PRE", "llama", "--head-size 10 --rope-factor 8 --rope-original 25"),
    ("SPAN", "llama", "--rope-factor 8 --rope-original 25"), ("SDD", "llama", "--head-size 4"),
    ("PRE", "gpt2", "--head-size 10"), ("NGPT", "olmoe", "--head-size 10"),
    ("OLMOE", "olmoe", "--head-size 10"), ("PRE", "gpt2", "--heads 5 --head-size 4"),
    ("PRE", "llama", "--heads 5 --kv-heads 5 --head-size 8"),
    ("PRE", "deepseek", "--balance-rate 0 --router softmax --heads 5 --head-size 8"),
]  # fmt: skip
# What transformers computes with a class of its own; every other model is a NormForCausalLM.
STOCK = {
    "PRE-gpt2": "GPT2LMHeadModel", "PRE-gpt2-tied-off": "GPT2LMHeadModel",
    "PRE-llama": "LlamaForCausalLM", "OLMO2-llama": "Olmo2ForCausalLM",
    "PRE-llama-bias-qkv": "Qwen2ForCausalLM", "OLMOE-olmoe": "OlmoeForCausalLM",
    "PRE-llama-head-size-10-rope-factor-8-rope-original-25": "LlamaForCausalLM",
    "PRE-deepseek-balance-rate-0-router-softmax": "DeepseekV2ForCausalLM",
    "PRE_QK_PRE-llama": "Qwen3ForCausalLM", "PRE-olmoe-router-softmax-renorm": "MixtralForCausalLM",
    "OLMO2-olmoe": "FlexOlmoForCausalLM",
    "OLMO2-olmoe-router-softmax-renorm": "FlexOlmoForCausalLM",
    "PRE_QK_PRE-olmoe": "Qwen3MoeForCausalLM", "PRE-deepseek": "DeepseekV3ForCausalLM",
    "PRE-llama-heads-5-kv-heads-5-head-size-8": "MistralForCausalLM",
}  # fmt: skip


def placements():
    """Names, modes and flags of a model for each placement and shape."""
    modes = hf.tables()["selectable"]
    for mode, shape, more in [(mode, shape, "") for mode in modes for shape in SHAPES] + SWITCHES:
        words = dict(zip(*[iter((SHAPES[shape] + " " + more).split())] * 2))
        words |= {"--bias": "off"} if mode.startswith(("SDD", "NGPT")) else {}
        words |= {"--positions": "rope", "--kv-heads": "0"} if mode == "NGPT" else {}
        name = "-".join([mode, shape] + more.replace("--", "").split())
        yield name, mode, " ".join(f"{flag} {value}" for flag, value in words.items())


def test_placements():
    lines = list(placements())
    judge = logits_of(*lines)
    for name, mode, _ in lines:
        tokens, want = judge[name]["tokens"].long(), judge[name]["logits"]
        export(DIR / name, DIR / "out" / name)
        model, kind = load(DIR / "out" / name), STOCK.get(name, "NormForCausalLM")
        found = type(model).__name__
        check(found == kind, f"{name}: expected a {kind}, found {found}")
        if kind == "MistralForCausalLM":
            window = model.config.sliding_window
            check(window is None, f"{name}: expected no sliding window, found {window}")
        comes_back(name)
        with torch.no_grad():
            close(model(tokens).logits, want, 1e-4, f"{name}: logits")
            if name in STOCK:
                continue
            found = model.config.intermediate_size, model.config.head_dim
            check(found == (model.config.ffn, model.config.head_size), f"{name}: found {found}")
            cached(name, model, tokens, want)
            padded(name, model, tokens, want)
        again = DIR / "again"
        shutil.rmtree(again, ignore_errors=True)
        model.save_pretrained(again)
        with torch.no_grad():
            close(load(again)(tokens).logits, want, 1e-4, f"{name}: logits after save_pretrained")
        shutil.rmtree(DIR / name)
    generation(["SPAN-llama", "HYBRID-gpt2", "NGPT-llama", "SDD-olmoe", "SPAN-deepseek"])


def comes_back(name):
    """The import of an export has the weights of the checkpoint, bit for bit, and its model."""
    back = imported(DIR / "out" / name, DIR / "back")
    same_weights(back, DIR / name / "step_00000000", name)
    (was, was_default), (now, now_default) = (
        export_hf.read_flags(json.loads((folder / "config.json").read_text()),
                             hf.read_safetensors(folder / "model.safetensors"))
        for folder in (DIR / name / "step_00000000", back)
    )  # fmt: skip
    # Any rate gives the model its selection bias, and the folder does not say which.
    was["balance_rate"], now["balance_rate"] = was["balance_rate"] > 0, now["balance_rate"] > 0
    check(was == now and was_default == now_default, f"{name}: expected flags {was}, found {now}")


def cached(name, model, tokens, want):
    """A prompt, then one token at a time; the cache goes in under either name."""
    out = model(tokens[:, :9], use_cache=True)
    rows = [out.logits]
    for t in range(9, tokens.shape[1]):
        cache = {("cache", "past_key_values")[t % 2]: out.past_key_values}
        out = model(tokens[:, t : t + 1], **cache, use_cache=True)
        rows.append(out.logits)
    close(torch.cat(rows, 1), want, 1e-4, f"{name}: logits with a cache")


def padded(name, model, tokens, want):
    """Two texts of different lengths in a batch: padded on the right, as lm_eval does without a
    mask, and on the left with one."""
    n, pad = tokens.shape[1] - 6, torch.zeros(1, 6, dtype=torch.long)
    right = torch.cat([tokens[:1], torch.cat([tokens[1:, :n], pad], 1)])
    close(model(right).logits[1, :n], want[1, :n], 1e-4, f"{name}: logits, padded on the right")
    left = torch.cat([tokens[:1], torch.cat([pad, tokens[1:, :n]], 1)])
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    z = model(left, attention_mask=mask).logits
    close(z[1, 6:], want[1, :n], 1e-4, f"{name}: logits, padded on the left")
    close(z[0], want[0], 1e-4, f"{name}: logits beside a padded one")
    labels = tokens.clone()
    labels[0, :5] = -100
    loss = torch.nn.functional.cross_entropy(want[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    close(model(tokens, labels=labels).loss, loss, 1e-4, f"{name}: the loss of labels")


def gradients(model, tokens):
    model.train()
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_checkpointing():
    """Gradient checkpointing changes no gradient and computes blocks twice, and
    attn_implementation="sdpa" is taken."""
    logits_of(("again", "SPAN", SHAPES["deepseek"]))
    export(DIR / "again", DIR / "out-again")
    tokens = load_file(DIR / "again" / "logits.safetensors")["tokens"].long()
    model = load(DIR / "out-again", attn_implementation="sdpa")
    calls, plain = [], gradients(model, tokens)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    again = gradients(model, tokens)
    right = plain.keys() == again.keys() and all(torch.equal(plain[k], again[k]) for k in plain)
    check(right and len(calls) == 2, f"checkpointing: other gradients, or {len(calls)} calls")
    model.eval()
    with torch.no_grad():
        check(model(tokens).past_key_values is not None, "a cache where nothing is trained")


def generation(names):
    for name in names:
        model, pad = load(DIR / "out" / name), 0
        torch.manual_seed(1)
        prompt = torch.randint(1, model.config.vocab_size, (2, 5))
        mask = torch.ones_like(prompt)
        prompt[0, :2], mask[0, :2] = pad, 0
        options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False,
                   "pad_token_id": pad, "eos_token_id": None}  # fmt: skip
        first = options | {"attention_mask": mask[:1, 2:]}
        with torch.no_grad():
            with_cache = model.generate(prompt, use_cache=True, **options)
            without = model.generate(prompt, use_cache=False, **options)
            alone = model.generate(prompt[:1, 2:], use_cache=True, **first)
        right = with_cache.shape == (2, 14) and torch.equal(with_cache, without)
        check(right, f"{name}: generate with a cache is not as without one")
        right = torch.equal(with_cache[0, 2:], alone[0])
        check(right, f"{name}: a text padded on the left goes on otherwise than alone")


# ----------------------------------------------------------------------------------- their classes

COMMON = dict(vocab_size=150, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, intermediate_size=20, max_position_embeddings=21,
              bos_token_id=0, eos_token_id=0, pad_token_id=None)  # fmt: skip
MIX = dict(num_experts_per_tok=2, moe_intermediate_size=12)
LATENT = dict(num_key_value_heads=4, n_routed_experts=4, n_shared_experts=2,
              first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=12, qk_rope_head_dim=4,
              qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1, rope_interleave=False,
              routed_scaling_factor=1.5)  # fmt: skip
CLASSES = {
    "GPT2LMHeadModel": ("PRE", dict(vocab_size=150, n_embd=24, n_layer=2, n_head=4,
                                    n_positions=21, bos_token_id=0, eos_token_id=0, attn_pdrop=0,
                                    embd_pdrop=0, resid_pdrop=0)),
    "LlamaForCausalLM": ("PRE", COMMON | dict(rope_theta=500.0)),
    "MistralForCausalLM": ("PRE", COMMON | dict(sliding_window=None, head_dim=8)),
    "Qwen2ForCausalLM": ("PRE", COMMON),
    "Olmo3ForCausalLM": ("OLMO2", COMMON | dict(sliding_window=21)),
    "OlmoeForCausalLM": ("OLMOE", COMMON | dict(num_experts=4, num_experts_per_tok=2)),
    "DeepseekV2ForCausalLM": ("PRE", COMMON | MIX | LATENT | dict(
        topk_method="greedy", routed_scaling_factor=1.5, head_dim=4)),
    "Olmo2ForCausalLM": ("OLMO2", COMMON),
    "Qwen3ForCausalLM": ("PRE_QK_PRE", COMMON | dict(head_dim=10, tie_word_embeddings=True)),
    "MixtralForCausalLM": ("PRE", COMMON | dict(num_local_experts=4)),
    "FlexOlmoForCausalLM": ("OLMO2", COMMON | dict(num_experts=4, num_experts_per_tok=2)),
    "Qwen3MoeForCausalLM": ("PRE_QK_PRE", COMMON | MIX | dict(head_dim=6, num_experts=4,
                                                              norm_topk_prob=True)),
    "DeepseekV3ForCausalLM": ("PRE", COMMON | MIX | LATENT),
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 25}  # fmt: skip
VARIANTS = {  # as CLASSES; the class's name is what stands before the dash
    "LlamaForCausalLM-llama3": ("PRE", COMMON | dict(head_dim=12, rope_parameters=LLAMA3)),
    "LlamaForCausalLM-wide": ("PRE", COMMON | dict(head_dim=8)),
    "Olmo2ForCausalLM-wide": ("OLMO2", COMMON | dict(head_dim=8)),
    "Qwen2ForCausalLM-window": ("PRE", COMMON | dict(use_sliding_window=True, sliding_window=21,
                                                     max_window_layers=1)),
    "MistralForCausalLM-window": ("PRE", COMMON | dict(sliding_window=21,
                                                       max_position_embeddings=40)),
    "Olmo3ForCausalLM-llama3": ("OLMO2", COMMON | dict(
        sliding_window=21, max_position_embeddings=40,
        rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), LLAMA3))),
    "Olmo3ForCausalLM-theta": ("OLMO2", COMMON | dict(
        sliding_window=21, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"),
                                      {"rope_type": "default", "rope_theta": 500.0}))),
    "Qwen3MoeForCausalLM-plain": ("PRE_QK_PRE", COMMON | MIX | dict(num_experts=4)),
    "OlmoeForCausalLM-renorm": ("OLMOE", COMMON | dict(num_experts=4, num_experts_per_tok=2,
                                                       norm_topk_prob=True)),
    "DeepseekV2ForCausalLM-plain": ("PRE", COMMON | MIX | LATENT | dict(
        topk_method="greedy", routed_scaling_factor=1.0, head_dim=4, n_shared_experts=1)),
}  # fmt: skip


def their_model(name, **more):
    """A model of that class, its weights away from ones and zeros."""
    model_class = getattr(transformers, name.split("-")[0])
    torch.manual_seed(len(name))
    model = model_class(model_class.config_class(**(CLASSES | VARIANTS)[name][1] | more)).eval()
    for key, p in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in key:
            p.data += 0.2 * torch.randn_like(p)
    return model


def test_classes():
    """Folders that transformers saved: whole, in shards, in bfloat16 and float16, and as its older
    versions wrote them."""
    models, lines = {}, []
    kinds = {"whole": {}, "shards": {"max_shard_size": "20KB"}, "bfloat16": {}, "float16": {}}

    def add(name, mode):
        out = imported(DIR / "theirs" / name, DIR / "ours" / name)
        made = json.loads((out / "config.json").read_text())
        check(made["norm_mode"] == mode, f"{name}: expected {mode}, found {made['norm_mode']}")
        weights = f"--init-from {out}/model.safetensors"
        lines.append((f"logits-{name}", mode, f"{flags_of(out)} {weights}"))

    for name, (mode, _) in CLASSES.items():
        for how, options in kinds.items():
            model, folder = their_model(name), DIR / "theirs" / f"{name}-{how}"
            model = model.to(getattr(torch, how)) if "float" in how else model
            model.save_pretrained(folder, **options)
            again = type(model).from_pretrained(folder, dtype=torch.float32).eval()
            models[f"logits-{name}-{how}"] = again
            add(f"{name}-{how}", mode)
        with_trainer(name, mode, DIR / "ours" / f"{name}-whole")
    for name, (mode, _) in VARIANTS.items():
        models[f"logits-{name}"] = their_model(name)
        models[f"logits-{name}"].save_pretrained(DIR / "theirs" / name)
        add(name, mode)
    old, older = DIR / "theirs" / "old", DIR / "theirs" / "old-llama"
    shutil.copytree(DIR / "theirs" / "GPT2LMHeadModel-whole", old)
    w = load_file(old / "model.safetensors")
    w = {key.removeprefix("transformer."): value for key, value in w.items()}
    w |= {"h.0.attn.bias": torch.ones(1, 1, 21, 21), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(w, old / "model.safetensors")
    models["logits-old"] = models["logits-GPT2LMHeadModel-whole"]
    add("old", "PRE")
    shutil.copytree(DIR / "theirs" / "LlamaForCausalLM-whole", older)
    config = json.loads((older / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"rope_theta": theta, "rope_scaling": None}
    (older / "config.json").write_text(json.dumps(config))
    models["logits-old-llama"] = models["logits-LlamaForCausalLM-whole"]
    add("old-llama", "PRE")
    index = DIR / "theirs" / "LlamaForCausalLM-shards" / "model.safetensors.index.json"
    check(index.exists(), "no shards")
    for name, out in logits_of(*lines).items():
        with torch.no_grad():
            tokens, logits = out["tokens"].long(), models[name](out["tokens"].long()).logits
        close(logits, out["logits"], 1e-4, f"{name}: in the judge")
        if "float" not in name:
            ours = mean_loss(out["logits"], tokens)
            close(ours, mean_loss(logits, tokens), 1e-6 * ours, f"{name}: the loss")


def mean_loss(logits, tokens):
    logits, targets = logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets)


def with_trainer(name, mode, checkpoint):
    """The trainer reads an import with --from and --init-from, and a wrong build refuses it."""
    reads = ["--from", checkpoint, "--eval", "--val-tokens", 64, "--seq", 16]
    save_bytes(DIR / "150.bin", [7 * i % 150 for i in range(129)], 150)
    reads += ["--val-data", DIR / "150.bin"]
    for built in ("PRE", "OLMO2"):
        made = run_trainer(built, *reads)
        wanted = f"make train_gpt NORM_MODE={mode}"
        right = made.returncode == 0 if built == mode else wanted in made.stderr
        check(right, f"{name} by a {built}: expected {wanted}, found {made.stderr}")
    if mode in ("PRE", "OLMO2"):
        train(mode, "--init-from", checkpoint, "--data", DIR / "150.bin", "--val-data",
              DIR / "150.bin", "--val-tokens", 64, "--seq", 16, "--batch", 2, "--steps", 2,
              "--warmup", 0, "--sample", 0, "--out", DIR / f"started-{name}")  # fmt: skip


# -------------------------------------------------------------------- there and back, and training


def run_trainer(mode, *flags):
    program = ROOT / "build" / f"cpu-{mode.lower()}-fp32" / "train_gpt"
    return subprocess.run([program, *map(str, flags)], capture_output=True, text=True)


def train(mode, *flags):
    made = run_trainer(mode, *flags)
    check(made.returncode == 0, f"{mode} {' '.join(map(str, flags))}: {made.stderr}")
    return made.stdout


def losses(run):
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return torch.tensor([line["loss"] for line in lines if "loss" in line])


SMALL_RUN = "--layers 2 --width 32 --heads 4 --seq 32 "
FREE = "--batch 4 --warmup 2 --val-tokens 2048 --norms-every 0 --sample 0 --steps 20"


def test_round_trip():
    """A run of ours, exported and imported again: the same loss and weights, the same twenty steps
    from there, and in transformers the loss of the same tokens."""
    for name, mode, more, kind in (
        ("gpt2", "PRE", "--norm layer --bias on --positions learned --activation gelu",
         "GPT2LMHeadModel"),
        ("llama", "PRE", "--kv-heads 2 --tied off", "LlamaForCausalLM"),
        ("olmo2", "OLMO2", "--kv-heads 2", "Olmo2ForCausalLM"),
        ("mixtral", "PRE", "--experts 4 --router softmax-renorm --tied off --ffn 24",
         "MixtralForCausalLM"),
        ("norm", "PRE", "--norm layer", "NormForCausalLM"),
    ):  # fmt: skip
        run, out, flags = DIR / f"run-{name}", DIR / f"out-{name}", (SMALL_RUN + more).split()
        train(mode, *flags, *FREE.split(), "--out", run)
        export(run, out)
        back = imported(out, DIR / f"import-{name}")
        reads = "--eval --seq 32 --val-tokens 2048".split()
        said = [re.search(r"validation loss ([\d.]+), weights (\w+)",
                          train(mode, "--from", path, *reads)) for path in (run, back)]
        right = said[0] and said[1] and said[0][0] == said[1][0]
        check(right, f"{name}: expected the run's loss and weights, found {said}")
        model = load(out)
        check(type(model).__name__ == kind, f"{name}: found {type(model).__name__}")
        ids = AutoTokenizer.from_pretrained(out, trust_remote_code=False)("a")["input_ids"]
        check(ids == [0, 97], f"{name}: expected a separator and a byte, found {ids}")
        train(mode, *flags, *FREE.split(), "--init-from", run, "--out", DIR / f"there-{name}")
        train(mode, "--seq", 32, *FREE.split(), "--init-from", back, "--out",
              DIR / f"back-{name}")  # fmt: skip
        there, again = losses(DIR / f"there-{name}"), losses(DIR / f"back-{name}")
        right = len(there) == 20 and torch.equal(there, again)
        check(right, f"{name}: twenty steps from the run {there}, from the import {again}")
        tokens = torch.tensor(list(pathlib.Path(__file__).read_bytes()[:129]))
        save_bytes(DIR / "text.bin", tokens.tolist(), 256)
        printed = train(mode, "--from", back, "--eval", "--val-data", DIR / "text.bin",
                        "--seq", 32, "--val-tokens", 128)  # fmt: skip
        loss = re.search(r"validation loss ([\d.]+)", printed)[1]
        with torch.no_grad():
            logits = model(tokens[:-1].view(4, 32)).logits.flatten(0, 1)
        theirs = torch.nn.functional.cross_entropy(logits, tokens[1:])
        close(torch.tensor(float(loss)), theirs, 2e-6, f"{name}: the loss in transformers")


def make_tokenizer(folder, template):
    """A byte-level tokenizer of 150 tokens; template: what it puts around a text, or None."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = export_hf.letters()
    vocab = {"<|endoftext|>": 0} | {letters[b + 30]: b for b in range(1, 150)}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.add_special_tokens(["<|endoftext|>"])
    if template:
        t.post_processor = processors.TemplateProcessing(
            single=f"{template} $A", special_tokens=[(template, vocab[template])])  # fmt: skip
    t.save(str(folder / "tokenizer.json"))
    # As GPT-2's own folder: the class names the tokens that begin and end a text.
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 21}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [0, 1]}')
    tokens = [b"<|endoftext|>"] + [bytes([b + 30]) for b in range(1, 150)]
    return struct.pack("<4I", 20240328, 2, 150, 0) + bytes(1008) + b"".join(
        bytes([len(token)]) + token for token in tokens)


def test_kept():
    """What belongs to an imported model comes back after two runs of tuning: class, tokenizer,
    generation config, ids of tokens, window and longest sequence. The separator is added where the
    tokenizer puts nothing before a text."""
    name, flags = "MistralForCausalLM-window", "--seq 16 --batch 2 --steps 2 --warmup 0 --sample 0"
    flags = [*flags.split(), "--data", DIR / "150.bin", "--val-data", DIR / "150.bin"]
    save_bytes(DIR / "150.bin", [7 * i % 150 for i in range(129)], 150)
    for template in (None, "<|endoftext|>"):
        theirs, start = DIR / f"kept-{template}", DIR / f"kept-import-{template}"
        their_model(name, eos_token_id=[0, 1], bos_token_id=1).save_pretrained(theirs)
        tokenizer = make_tokenizer(theirs, template)
        imported(theirs, start)
        (start / "tokenizer.bin").write_bytes(tokenizer)
        runs = [DIR / f"kept-run-{template}-{k}" for k in (0, 1)]
        train("PRE", "--init-from", start, *flags, "--tokenizer", start / "tokenizer.bin", "--out",
              runs[0])  # fmt: skip
        train("PRE", "--init-from", runs[0], *flags, "--tokenizer", start / "tokenizer.bin",
              "--out", runs[1])  # fmt: skip
        for source in (start, runs[1]):
            out = DIR / f"kept-out-{template}"
            export(source, out)
            was, now = (json.loads((each / "config.json").read_text()) for each in (theirs, out))
            for key in ("architectures", "sliding_window", "max_position_embeddings", "head_dim",
                        "bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps"):
                check(was.get(key) == now.get(key), f"{key}: {was.get(key)}, now {now.get(key)}")
            same = "generation_config.json"
            check((theirs / same).read_text() == (out / same).read_text(), "the generation config")
            t = AutoTokenizer.from_pretrained(out)
            ids = t("AB")["input_ids"]
            check(ids == [0, 35, 36], f"a tokenizer with {template}: found {ids}")
            check(t.decode(ids[1:]) == "AB", f"decoded {t.decode(ids[1:])}")
            if not template:
                found = t.bos_token_id, t.eos_token_id
                check(found == (0, 0), f"the tokens that begin and end a text: found {found}")
            check(load(out).generation_config.eos_token_id == [0, 1], "the ids that end a text")
        shutil.rmtree(start)
        said = export(runs[1], DIR / "kept-lost")
        check(f"{start}, which this run began with, is gone" in said, f"lost: {said}")
        shutil.rmtree(DIR / "kept-lost")
        with contextlib.redirect_stdout(io.StringIO()):
            export_hf.export(runs[1], DIR / "kept-lost", kept=theirs)
        now = json.loads((DIR / "kept-lost" / "config.json").read_text())
        check(now["sliding_window"] == 21, f"--kept: found {now}")
        shutil.rmtree(DIR / "kept-lost")
        for checkpoint in runs[0].glob("step_*"):
            shutil.rmtree(checkpoint)
        said = str(attempt(lambda: export(runs[1], DIR / "kept-lost")))
        check(f"{runs[0]}, which this run began with, is gone" in said, f"pruned: {said}")
    relative = DIR / "relative" / "step_1"
    relative.mkdir(parents=True)
    (relative / "config.json").write_text('{"flags": {"init_from": "imported"}}')
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = export_hf.find_kept(relative)
    right = found is None and "this command where the run was trained" in said.getvalue()
    check(right, f"a relative --init-from in another folder: {found}, {said.getvalue()}")


def test_kept_positions():
    """What began with an import turns as the original in every layer of an Olmo3, and has as many
    learned positions as the run."""
    for name in ("Olmo3ForCausalLM-theta", "Olmo3ForCausalLM-llama3"):
        model, theirs, out = their_model(name), DIR / f"turns-{name}", DIR / f"out-turns-{name}"
        model.save_pretrained(theirs)
        export(imported(theirs, DIR / f"start-turns-{name}"), out)
        tokens, again = torch.arange(42).view(2, 21), attempt(lambda: load(out))
        if check(type(again) is type(model), f"{name}: exported as {repr(again):.200}"):
            with torch.no_grad():
                close(again(tokens).logits, model(tokens).logits, 1e-5, f"{name}: exported")
    logits_of(("long", "PRE", SHAPES["gpt2"].replace("--norm layer", "--norm rms")))
    export(DIR / "long", DIR / "out-long")
    start, run = imported(DIR / "out-long", DIR / "start-long"), DIR / "run-short"
    save_bytes(DIR / "150.bin", [7 * i % 150 for i in range(129)], 150)
    train("PRE", "--init-from", start, "--data", DIR / "150.bin", "--val-data", DIR / "150.bin",
          *"--seq 16 --batch 2 --steps 2 --warmup 0 --sample 0".split(), "--out", run)
    export(run, DIR / "out-short")
    model = attempt(lambda: load(DIR / "out-short"))
    right = type(model).__name__ == "NormForCausalLM" and model.config.seq == 16
    check(right, f"a shorter run with learned positions: found {repr(model):.200}")


def test_trained():
    """A model that learned the built-in stories goes on with a prompt as it does in the trainer:
    alone, with a cache and without, padded in a batch, in a pipeline, and for lm_eval."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    run, out, n = DIR / "run-trained", DIR / "out-trained", 48
    flags = "--layers 2 --width 64 --heads 4 --seq 96 --norm layer --batch 16 --lr 5e-3 "
    flags += "--steps 400 --warmup 40 --val-tokens 1024 --norms-every 0 --sample 0"
    train("PRE", *flags.split(), "--out", run)
    export(run, out)
    model, tokenizer = load(out), AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    check(type(model).__name__ == "NormForCausalLM", f"trained: found a {type(model).__name__}")
    prompts = ["The ", "Once upon a time ", "One day a little "]
    options, said = {"max_new_tokens": n, "do_sample": False}, []
    for text in prompts:
        printed = train("PRE", "--from", run, "--prompt", text, "--sample", n, "--top-k", 1)
        said += [re.search(rf"\n\n({text}.*)\nprefill", printed, re.S)[1].split("\n\n")[0]]
    words = set(re.findall("[A-Za-z]{2,}", " ".join(said)))
    check(len(words) >= 12, f"trained: expected a dozen different words, found {said}")

    def texts(prompts, **more):
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        rows = model.generate(**inputs, **options, **more)
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    lm = HFLM(pretrained=str(out), device="cpu", batch_size=3, trust_remote_code=True)
    until = {"until": ["<|endoftext|>"], "max_gen_toks": n, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, until), i) for i, text in enumerate(prompts)]
    pipe = pipeline("text-generation", str(out), trust_remote_code=True, batch_size=3)

    def lm_eval_texts():
        return [*map("".join, zip(prompts, lm.generate_until(requests, disable_tqdm=True)))]

    for how, go_on in {
        "alone": lambda: [texts([text])[0] for text in prompts],
        "without a cache": lambda: [texts([text], use_cache=False)[0] for text in prompts],
        "in a padded batch": lambda: texts(prompts),
        "in a padded batch without a cache": lambda: texts(prompts, use_cache=False),
        "in a pipeline": lambda: [each[0]["generated_text"] for each in pipe(prompts, **options)],
        "for lm_eval": lm_eval_texts,
    }.items():
        found = attempt(go_on)
        check(found == said, f"trained, {how}: expected the trainer's {said}, found {found}")
    arguments(model, tokenizer("The ", return_tensors="pt"))


def attempt(call):
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:
        return error


def arguments(model, inputs):
    """What forward takes besides, and what it refuses."""
    no = {"output_attentions": False, "inputs_embeds": None}
    cache, static = {"cache": DynamicCache()}, {"cache_implementation": "static", "max_length": 9}
    two = {"cache": DynamicCache(), "past_key_values": DynamicCache()}
    for kind, more in ((dict, no), (dict, cache), (tuple, {"return_dict": False})):
        found = attempt(lambda: model(**inputs, **more))
        check(isinstance(found, kind), f"forward with {', '.join(more)}: found {repr(found):.200}")
    for words, call in {
        "found kv_cache": lambda: model(**inputs, kv_cache=None),
        "found output_attentions": lambda: model(**inputs, output_attentions=True),
        "found token_type_ids": lambda: model(**inputs, token_type_ids=inputs["input_ids"]),
        "found cache and past_key_values": lambda: model(**inputs, **two),
        "found a StaticCache": lambda: model.generate(**inputs, **static),
    }.items():
        found = attempt(call)
        right = isinstance(found, TypeError) and f"{words}\n  -> " in str(found)
        check(right, f"forward: expected a TypeError, {words}; found {repr(found):.200}")


def test_damaged():
    """Of a run with damage export_hf.py takes the checkpoint that the trainer takes, and warns and
    refuses as it does: it asks the same code. A checkpoint may be a link."""
    whole, run, aside = DIR / "run-whole", DIR / "run-damaged", DIR / "elsewhere"
    flags = "--layers 1 --width 8 --heads 2 --ffn 8 --seq 16 --batch 1 --steps 2 --save-every 1 "
    flags += "--val-tokens 64 --norms-every 0 --sample 0"
    train("PRE", *flags.split(), "--out", whole)
    first, last = (run / f"step_{step:08d}" for step in (1, 2))

    def flip(path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    for what, harm, expected, words in (
        ("nothing", lambda: None, last, ""),
        ("the weights", lambda: flip(last / "model.safetensors"), first,
         "warning: passing over the damaged checkpoint"),
        ("a link", lambda: [last.rename(aside), last.symlink_to(aside)], last, ""),
        ("every checkpoint", lambda: [flip(each / "config.json") for each in (first, last)], None,
         f"every checkpoint in {run} is damaged\n  -> "),
    ):  # fmt: skip
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        harm()
        with contextlib.redirect_stderr(io.StringIO()) as warned:
            said = attempt(lambda: export(run, DIR / "x"))
        found = f"{warned.getvalue()}{said}"
        right = words in found and (f"from {expected}" in found if expected else "->" in found)
        check(right, f"damaged: {what}: expected {expected} and {words}, found {found}")
    refusal = str(attempt(lambda: export(last, DIR / "x")))
    check(f"{last} is damaged: " in refusal, f"a damaged checkpoint: {refusal}")
    shutil.rmtree(run)
    shutil.copytree(whole, run)
    last.rename(aside)
    last.symlink_to(aside)
    (DIR / "tokenizer.bin").write_bytes(b"not a tokenizer")
    refusal = str(attempt(lambda: export(last, DIR / "x")))
    check("expected a tokenizer.bin" in refusal, f"the tokenizer beside a link's aim: {refusal}")
    for count, end, tokens, words in (
        (3, 0, b"\1a\1b", "expected 3 whole tokens, found 1028 bytes"),
        (2, 0, b"\1a\2b", "expected 2 whole tokens, found 1028 bytes"),
        (2, 2, b"\1a\1b", "expected a separator below 2, found token 2"),
    ):  # fmt: skip
        header = struct.pack("<4I", 20240328, 2, count, end) + bytes(1008)
        (DIR / "tokenizer.bin").write_bytes(header + tokens)
        refusal = str(attempt(lambda: export(last, DIR / "x")))
        check(words in refusal, f"a cut tokenizer.bin: expected {words}, found {refusal}")
    (DIR / "tokenizer.bin").unlink()


def save_bytes(path, tokens, vocab):
    header = struct.pack("<4i", 20240520, 1, len(tokens), vocab) + bytes(1008)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))


def test_training():
    """From one folder twenty steps here, and in transformers with torch's AdamW: the same losses.
    The data is one batch, whose order means nothing."""
    B, T = 4, 16
    flags = f"--seq {T} --batch {B} --steps 20 --lr 3e-3 --warmup 0 --schedule constant --sample 0 "
    flags += "--norms-every 0"
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        model, run = their_model(name), DIR / f"trained-{name}"
        folder = DIR / "theirs" / f"{name}-trained"
        model.save_pretrained(folder)
        draw = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 150, (B * T + 1,), generator=draw)
        save_bytes(DIR / "batch.bin", tokens.tolist(), 150)
        start = imported(folder, DIR / f"start-{name}")
        train("PRE", "--init-from", start, "--data", DIR / "batch.bin", *flags.split(), "--out",
              run)  # fmt: skip
        groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                  {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
        theirs = []
        for _ in range(20):
            logits = model(tokens[:-1].view(B, T)).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[1:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            theirs.append(loss.item())
        check(theirs[0] > theirs[-1] + 0.5, f"{name}: nothing was learned: {theirs}")
        close(losses(run), torch.tensor(theirs), 1e-4, f"{name}: twenty steps")


# ------------------------------------------------------------- tokenizers, and what is refused


def get_tokenizer(vocab, out):
    """data/get.py makes a tokenizer.bin."""
    command = [sys.executable, ROOT / "data" / "get.py", "tokenizer", "--vocab", vocab]
    return subprocess.run([*command, "--out", out], capture_output=True, text=True)


def test_tokenizers():
    """Bytes, and a learned vocabulary: what transformers makes of a text; and a folder's
    tokenizer.json back into tokenizer.bin."""
    import test_tokenizer
    import tiktoken.load

    logits_of(("bytes", "SPAN", SHAPES["llama"]), ("tokens", "SPAN", SMALL + "--vocab 557"))
    text = "The cat's naïve \u4e2d\u6587, 12  34!\n\n  It said: \"Ā ~\" 'll"
    export(DIR / "bytes", DIR / "out-bytes")
    t = AutoTokenizer.from_pretrained(DIR / "out-bytes", trust_remote_code=False)
    ids = t(text)["input_ids"]
    right = ids == [0, *text.encode()] and t.decode(ids[1:]) == text
    check(right, f"bytes: found {ids}, {t.decode(ids)!r}")
    check(t("a", "b")["input_ids"] == [0, 97, 0, 98], "bytes: a separator before each text")
    check(t("a", add_special_tokens=False)["input_ids"] == [97], "bytes: a separator unwanted")
    right = (t.eos_token_id, t.bos_token_id, t.pad_token_id) == (0, 0, 0)
    check(right and t("<|endoftext|>")["input_ids"] == [0, 0], "bytes: token 0 ends a text")
    learned = DIR / "learned"
    learned.mkdir()
    source = pathlib.Path(test_tokenizer.__file__).read_text(encoding="utf-8")
    test_tokenizer.learn_vocabulary(source, 300, learned)
    made, back = DIR / "tokens" / "tokenizer.bin", DIR / "back.bin"
    get_tokenizer(learned, made)
    export(DIR / "tokens", DIR / "out-tokens")
    with unittest.mock.patch("builtins.input", return_value="n"):  # to the question for trust
        t = AutoTokenizer.from_pretrained(DIR / "out-tokens")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # its cache goes by the file's name alone
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(learned / "vocab.bpe"), str(learned / "encoder.json"))  # fmt: skip
    encoding = tiktoken.Encoding("test", pat_str=test_tokenizer.PATTERN, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": len(ranks)})  # fmt: skip
    for some in (text, source.replace("<|endoftext|>", "")):
        ids = t(some)["input_ids"]
        right = ids == [len(ranks), *encoding.encode_ordinary(some)] and t.decode(ids[1:]) == some
        check(right, "a learned vocabulary: not tiktoken's tokens after a separator")
    check(t.eos_token_id == len(ranks), "a learned vocabulary: the token that ends a text")
    get_tokenizer(DIR / "out-tokens", back)
    right = back.read_bytes() == made.read_bytes()
    check(right, "tokenizer.json does not give the tokenizer.bin it is made of")
    config = json.loads((DIR / "out-tokens" / "tokenizer.json").read_text())
    config |= {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "split": True,
                                 "prepend_scheme": "always"}}
    (learned / "tokenizer.json").write_text(json.dumps(config))
    (learned / "vocab.bpe").unlink()
    refused = get_tokenizer(learned, back)
    said = refused.stdout + refused.stderr
    right = refused.returncode == 0 and "--prompt will be refused" in said
    check(right, f"another pattern: {said}")
    said = import_hf.write_tokenizer(learned, back, 557)
    check("prompts are refused: the trainer does not have Metaspace" in said, f"found {said}")
    renamed_separator(made)
    own_files(DIR / "out-tokens", made)


def renamed_separator(made):
    """A separator of another name keeps its name."""
    data = made.read_bytes()
    made.write_bytes(data.replace(b"\x0d<|endoftext|>", b"\x04</s>"))
    export(DIR / "tokens", DIR / "out-renamed")
    t = AutoTokenizer.from_pretrained(DIR / "out-renamed", trust_remote_code=False)
    found = t.eos_token, t.bos_token, t("a")["input_ids"][0]
    check(found == ("</s>", "</s>", t.convert_tokens_to_ids("</s>")), f"</s>: found {found}")
    made.write_bytes(data)


def own_files(folder, made):
    """A tokenizer.bin holds the files of its tokenizer, which is exported as it was: here with
    several special tokens."""
    t = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    t.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    t.save_pretrained(folder)
    said = import_hf.write_tokenizer(folder, made, 559)
    check("for prompts and samples" in said, f"the import's tokenizer: {said}")
    export(DIR / "tokens", DIR / "out-own")
    back = AutoTokenizer.from_pretrained(DIR / "out-own", trust_remote_code=False)
    ids = t("<|im_start|>a b")["input_ids"]
    check(back("<|im_start|>a b")["input_ids"] == ids, f"its own files: expected {ids}")
    texts = [(each / "tokenizer.json").read_text() for each in (folder, DIR / "out-own")]
    check(texts[0] == texts[1], "its own tokenizer.json is exported as another")
    data = made.read_bytes()
    size = struct.unpack_from("<I", data, 60)[0]
    made.write_bytes(data[:-size] + b"\xff" + data[len(data) - size + 1:])
    try:
        export(DIR / "tokens", DIR / "out-damaged")
        refusal = "nothing"
    except hf.Refusal as error:
        refusal = str(error)
    check("the files of a tokenizer behind its tokens" in refusal, f"damaged files: {refusal}")


def test_export():
    """bfloat16, and what export_hf.py refuses."""
    logits_of(("bf16", "SPAN", SHAPES["deepseek"]))
    said = export(DIR / "bf16", DIR / "out-bf16", "bfloat16")
    model, want = load(DIR / "out-bf16"), load_file(DIR / "bf16" / "logits.safetensors")
    check("gets no tokenizer.json" in said, "that there is no tokenizer is said")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias.dtype
    right = model.dtype == torch.bfloat16 and bias == torch.float32
    check(right, f"found weights in {model.dtype}, the selection bias in {bias}")
    w = load_file(DIR / "bf16" / "step_00000000" / "model.safetensors")
    for name, found in load_file(DIR / "out-bf16" / "model.safetensors").items():
        check(torch.equal(found, w[name].to(found.dtype)), f"bfloat16: {name} is not rounded so")
    back = imported(DIR / "out-bf16", DIR / "back-bf16")
    for name, found in load_file(back / "model.safetensors").items():
        kept = w[name] if name.endswith("correction_bias") else w[name].bfloat16().float()
        check(torch.equal(found, kept), f"bfloat16: {name} comes back as another")
    with torch.no_grad():
        z = model(want["tokens"].long()).logits.float()
    square = (z - want["logits"]).square().mean() / want["logits"].square().mean()
    off = square.sqrt().item()
    check(1e-4 < off < 0.3, f"bfloat16: logits off by {off} of their size")
    for words, source, out in (
        ("nothing was overwritten", "bf16", "out-bf16"), ("every checkpoint in", "damaged", "x"),
        ("expected the folder of a run", "nowhere", "x"),
    ):  # fmt: skip
        if source == "damaged":
            shutil.copytree(DIR / "bf16", DIR / "damaged")
            os.truncate(DIR / "damaged" / "step_00000000" / "model.safetensors", 5000)
        command = [sys.executable, ROOT / "dev" / "export_hf.py", DIR / source, DIR / out]
        made = subprocess.run(command, capture_output=True, text=True)
        right = made.returncode == 1 and words in made.stderr and "\n  -> " in made.stderr
        check(right, f"{source}: expected {words}, found {made.stderr}")
    (DIR / "empty").mkdir()
    command = [sys.executable, ROOT / "dev" / "export_hf.py", DIR / "bf16", "."]
    made = subprocess.run(command, cwd=DIR / "empty", capture_output=True, text=True)
    right = "error: .: expected the name of a new folder" in made.stderr
    check(right, f"an empty folder from within: found {made.stderr}")


def test_import():
    """Broken and hostile folders: in a file of its own, which needs no torch."""
    test = ROOT / "dev" / "test" / "test_import_hf.py"
    made = subprocess.run([sys.executable, test], capture_output=True, text=True)
    check(made.returncode == 0, f"test_import_hf.py: {made.stdout}{made.stderr}")


def main():
    shutil.rmtree(DIR, ignore_errors=True)
    DIR.mkdir(parents=True, exist_ok=True)
    tests = {name[5:]: test for name, test in globals().items() if name.startswith("test_")}
    for name, test in tests.items():
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            test()
    shutil.rmtree(DIR)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
