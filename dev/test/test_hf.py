#!/usr/bin/env python3
"""test_hf.py: models go to Hugging Face transformers and come back.

    make build/logits && make binary NORM_MODE=PRE && make binary NORM_MODE=OLMO2 && python3 dev/test/test_hf.py [WORDS]

Of every placement, dense and with experts, dev/export_hf.py's folder gives the judge's logits (build/logits); with a cache, padded, and after save_pretrained too. Folders of
transformers' own classes give theirs in the judge. A round trip changes no loss, and twenty steps of AdamW are the same on both sides. Broken folders are refused.
With words only the tests whose name contains one of them. Needs torch, safetensors and transformers; 5.23 is what this was written against.
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

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DIR = ROOT / "build" / "test" / "hf"
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(DIR / "home"), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

sys.path.insert(0, str(ROOT / "dev"))
import export_hf  # noqa: E402

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
        export_hf.export(pathlib.Path(source), pathlib.Path(out), getattr(torch, dtype))
    return said.getvalue()


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


# ---------------------------------------------------------------------------------------------------------------- every placement

SMALL = "--layers 3 --width 24 --heads 4 --ffn 20 --seq 21 "
SHAPES = {
    "gpt2": SMALL + "--vocab 150 --norm layer --bias on --positions learned --activation gelu --tied on",
    "llama": SMALL + "--vocab 256 --kv-heads 2 --tied off --rope-theta 500",
    "olmoe": SMALL + "--vocab 150 --tied off --experts 6 --experts-per-token 2",
    "deepseek": SMALL + "--vocab 130 --tied off --experts 6 --experts-per-token 3 --shared-experts 2 --dense-layers 1 --dense-ffn 40 --router sigmoid --router-scale 1.5 "
    "--balance-rate 0.001 --kv-rank 12 --rope-size 6 --eps 1e-6",
}
SWITCHES = [
    ("SDD", "llama", "--sdd code"), ("SDD_PRE", "llama", "--sdd code"), ("SDD", "olmoe", "--sdd code"), ("SDD", "deepseek", "--sdd code"), ("SDD_PRE", "deepseek", "--sdd code"),
    ("SANDWICH", "llama", "--emb-scale sqrt-width"), ("SPAN", "llama", "--final-norm on"), ("POST", "gpt2", "--final-norm on"), ("MIX_LN", "llama", "--mix-ratio 0.67"),
    ("PRE", "olmoe", "--router softmax-renorm"), ("SPAN", "olmoe", "--router softmax-renorm --balance-rate 0.1"), ("OLMO2", "olmoe", "--router softmax-renorm"),
    ("SPAN", "deepseek", "--norm layer"), ("HYBRID", "deepseek", "--norm layer"), ("NGPT", "olmoe", "--activation gelu"), ("SPAN", "llama", "--activation gelu --eps 0.1"),
    ("HYBRID", "llama", "--tied on --bias on"), ("PRE", "gpt2", "--bias off"), ("PRE", "gpt2", "--tied off"), ("PRE", "gpt2", "--norm rms"),
    ("SPAN", "deepseek", "--shared-experts 0"), ("PRE", "deepseek", "--eps 1e-5"), ("PRE", "deepseek", "--balance-rate 0"),
]  # fmt: skip
# What transformers computes with a class of its own; every other model is a NormForCausalLM.
STOCK = {
    "PRE-gpt2": "GPT2LMHeadModel", "PRE-gpt2-tied-off": "GPT2LMHeadModel", "PRE-llama": "LlamaForCausalLM", "OLMO2-llama": "Olmo2ForCausalLM", "PRE_QK_PRE-llama": "Qwen3ForCausalLM",
    "PRE-olmoe-router-softmax-renorm": "MixtralForCausalLM", "OLMO2-olmoe": "FlexOlmoForCausalLM", "OLMO2-olmoe-router-softmax-renorm": "FlexOlmoForCausalLM",
    "PRE_QK_PRE-olmoe": "Qwen3MoeForCausalLM", "PRE-deepseek": "DeepseekV3ForCausalLM",
}  # fmt: skip


def placements():
    """Names, modes and flags of a model for each placement and shape."""
    modes = re.findall(r"^MODE\( (\w+)", (ROOT / "llmc" / "modes.h").read_text(), re.M)
    for mode, shape, more in [(mode, shape, "") for mode in modes for shape in SHAPES] + SWITCHES:
        words = dict(zip(*[iter((SHAPES[shape] + " " + more).split())] * 2))
        words |= {"--bias": "off"} if mode.startswith(("SDD", "NGPT")) else {}
        words |= {"--positions": "rope", "--kv-heads": "0"} if mode == "NGPT" else {}
        yield "-".join([mode, shape] + more.replace("--", "").split()), mode, " ".join(f"{k} {v}" for k, v in words.items())


def test_placements():
    lines = list(placements())
    judge = logits_of(*lines)
    for name, mode, _ in lines:
        tokens, want = judge[name]["tokens"].long(), judge[name]["logits"]
        export(DIR / name, DIR / "out" / name)
        model = load(DIR / "out" / name)
        check(type(model).__name__ == STOCK.get(name, "NormForCausalLM"), f"{name}: expected a {STOCK.get(name, 'NormForCausalLM')}, found {type(model).__name__}")
        with torch.no_grad():
            close(model(tokens).logits, want, 1e-4, f"{name}: logits")
            if name in STOCK:
                continue
            cached(name, model, tokens, want)
            padded(name, model, tokens, want)
        again = DIR / "again"
        shutil.rmtree(again, ignore_errors=True)
        model.save_pretrained(again)
        with torch.no_grad():
            close(load(again)(tokens).logits, want, 1e-4, f"{name}: logits after save_pretrained")
        shutil.rmtree(DIR / name)
    generation(["SPAN-llama", "HYBRID-gpt2", "NGPT-llama", "SDD-olmoe", "SPAN-deepseek"])


def cached(name, model, tokens, want):
    """A prompt, then one token at a time."""
    out = model(tokens[:, :9], use_cache=True)
    rows = [out.logits]
    for t in range(9, tokens.shape[1]):
        out = model(tokens[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits)
    close(torch.cat(rows, 1), want, 1e-4, f"{name}: logits with a cache")


def padded(name, model, tokens, want):
    """Two texts of different lengths in a batch: padded on the right, as lm_eval does without a mask, and on the left with one."""
    n, pad = tokens.shape[1] - 6, torch.zeros(1, 6, dtype=torch.long)
    right = torch.cat([tokens[:1], torch.cat([tokens[1:, :n], pad], 1)])
    close(model(right).logits[1, :n], want[1, :n], 1e-4, f"{name}: logits, padded on the right")
    left, mask = torch.cat([tokens[:1], torch.cat([pad, tokens[1:, :n]], 1)]), torch.ones_like(tokens)
    mask[1, :6] = 0
    z = model(left, attention_mask=mask).logits
    close(z[1, 6:], want[1, :n], 1e-4, f"{name}: logits, padded on the left")
    close(z[0], want[0], 1e-4, f"{name}: logits beside a padded one")
    labels = tokens.clone()
    labels[0, :5] = -100
    loss = torch.nn.functional.cross_entropy(want[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    close(model(tokens, labels=labels).loss, loss, 1e-4, f"{name}: the loss of labels")


def generation(names):
    for name in names:
        model, pad = load(DIR / "out" / name), 0
        torch.manual_seed(1)
        prompt = torch.randint(1, model.config.vocab_size, (2, 5))
        mask = torch.ones_like(prompt)
        prompt[0, :2], mask[0, :2] = pad, 0
        options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": pad, "eos_token_id": None}
        with torch.no_grad():
            with_cache, without = model.generate(prompt, use_cache=True, **options), model.generate(prompt, use_cache=False, **options)
            alone = model.generate(prompt[:1, 2:], use_cache=True, **options | {"attention_mask": mask[:1, 2:]})
        check(with_cache.shape == (2, 14) and torch.equal(with_cache, without), f"{name}: generate with a cache is not as without one")
        check(torch.equal(with_cache[0, 2:], alone[0]), f"{name}: a text padded on the left goes on otherwise than alone")


def main():
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
