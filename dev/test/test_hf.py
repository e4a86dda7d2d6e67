#!/usr/bin/env python3
"""test_hf.py: models go to Hugging Face transformers and come back.

    make build/logits && make binary NORM_MODE=PRE && make binary NORM_MODE=OLMO2 && python3 dev/test/test_hf.py [WORDS]

Of every placement, dense and with experts, dev/export_hf.py's folder gives the judge's logits (build/logits); with a cache, padded, and after save_pretrained too. Folders of
transformers' own classes give theirs in the judge. A round trip changes no loss, and twenty steps of AdamW are the same on both sides. Broken folders are refused.
With words only the tests whose name contains one of them. Needs torch, safetensors, xxhash,
transformers (written against 5.23) and, for `trained`, lm_eval.
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
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(DIR / "home"), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline  # noqa: E402

sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "dev" / "test")]
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
    modes = re.findall(r"^MODE\((\w+)", (ROOT / "llmc" / "modes.h").read_text(), re.M)
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
    """A prompt, then one token at a time; the cache goes in under either name."""
    out = model(tokens[:, :9], use_cache=True)
    rows = [out.logits]
    for t in range(9, tokens.shape[1]):
        cache = {("cache", "past_key_values")[t % 2]: out.past_key_values}
        out = model(tokens[:, t : t + 1], **cache, use_cache=True)
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


# ---------------------------------------------------------------------------------------------------------------- their classes

COMMON = dict(vocab_size=150, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20, max_position_embeddings=21, bos_token_id=0, eos_token_id=0, pad_token_id=None)
MIX = dict(num_experts_per_tok=2, moe_intermediate_size=12)
LATENT = dict(num_key_value_heads=4, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=6, n_group=1,
              topk_group=1, rope_interleave=False, routed_scaling_factor=1.5)  # fmt: skip
CLASSES = {
    "GPT2LMHeadModel": ("PRE", dict(vocab_size=150, n_embd=24, n_layer=2, n_head=4, n_positions=21, bos_token_id=0, eos_token_id=0, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)),
    "LlamaForCausalLM": ("PRE", COMMON | dict(rope_theta=500.0)), "MistralForCausalLM": ("PRE", COMMON | dict(sliding_window=None)), "Olmo2ForCausalLM": ("OLMO2", COMMON),
    "Qwen3ForCausalLM": ("PRE_QK_PRE", COMMON | dict(head_dim=6, tie_word_embeddings=True)), "MixtralForCausalLM": ("PRE", COMMON | dict(num_local_experts=4)),
    "FlexOlmoForCausalLM": ("OLMO2", COMMON | dict(num_experts=4, num_experts_per_tok=2)), "Qwen3MoeForCausalLM": ("PRE_QK_PRE", COMMON | MIX | dict(head_dim=6, num_experts=4, norm_topk_prob=True)),
    "DeepseekV3ForCausalLM": ("PRE", COMMON | MIX | LATENT),
}  # fmt: skip


def their_model(name, **more):
    """A model of that class, its weights away from ones and zeros."""
    model_class = getattr(transformers, name)
    torch.manual_seed(len(name))
    model = model_class(model_class.config_class(**CLASSES[name][1] | more)).eval()
    for key, p in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in key:
            p.data += 0.2 * torch.randn_like(p)
    return model


def test_classes():
    """Folders that transformers saved: whole, in shards, in bfloat16 and float16, and as its older versions wrote them."""
    models, lines = {}, []
    for name, (mode, _) in CLASSES.items():
        for how, options in {"whole": {}, "shards": {"max_shard_size": "20KB"}, "bfloat16": {}, "float16": {}}.items():
            model, folder = their_model(name), DIR / "theirs" / f"{name}-{how}"
            model = model.to(getattr(torch, how)) if "float" in how else model
            model.save_pretrained(folder, **options)
            models[f"{name}-{how}"] = type(model).from_pretrained(folder, dtype=torch.float32).eval()
            lines.append((f"{name}-{how}", mode, f"--init-from {folder}"))
    old = DIR / "theirs" / "old"
    shutil.copytree(DIR / "theirs" / "GPT2LMHeadModel-whole", old)
    w = {key.removeprefix("transformer."): value for key, value in load_file(old / "model.safetensors").items()}
    save_file(w | {"h.0.attn.bias": torch.ones(1, 1, 21, 21), "h.1.attn.masked_bias": torch.tensor(-1e4)}, old / "model.safetensors")
    llama = DIR / "theirs" / "LlamaForCausalLM-whole" / "config.json"
    config = json.loads(llama.read_text())
    llama.write_text(json.dumps(config | {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}))
    lines.append(("old", "PRE", f"--init-from {old}"))
    check((DIR / "theirs" / "LlamaForCausalLM-shards" / "model.safetensors.index.json").exists(), "no shards")
    for name, out in logits_of(*lines).items():
        with torch.no_grad():
            close(models["GPT2LMHeadModel-whole" if name == "old" else name](out["tokens"].long()).logits, out["logits"], 1e-4, f"{name}: logits in the judge")


# ---------------------------------------------------------------------------------------------------------------- there and back, and training


def train(mode, *flags):
    made = subprocess.run([ROOT / "build" / f"cpu-{mode.lower()}-fp32" / "train_gpt", *map(str, flags)], capture_output=True, text=True)
    check(made.returncode == 0, f"{mode} {' '.join(map(str, flags))}: {made.stderr}")
    return made.stdout


def losses(run):
    return torch.tensor([line["loss"] for line in map(json.loads, (run / "log.jsonl").read_text().splitlines()) if "loss" in line])


def test_round_trip():
    """A run of ours, exported and read again: the same loss and weights, the same twenty steps from there, and in transformers the loss of the same tokens."""
    small = "--layers 2 --width 32 --heads 4 --seq 32 --batch 4 --warmup 2 --val-tokens 2048 --norms-every 0 --sample 0".split()
    for name, mode, more, architecture in (
        ("gpt2", "PRE", "--norm layer --bias on --positions learned --activation gelu", "GPT2LMHeadModel"), ("llama", "PRE", "--kv-heads 2 --tied off", "LlamaForCausalLM"),
        ("olmo2", "OLMO2", "--kv-heads 2", "Olmo2ForCausalLM"), ("mixtral", "PRE", "--experts 4 --router softmax-renorm --tied off --ffn 24", "MixtralForCausalLM"),
    ):  # fmt: skip
        run, out, flags = DIR / f"run-{name}", DIR / f"out-{name}", small + more.split()
        train(mode, *flags, "--steps", 20, "--out", run)
        export(run, out)
        said = [re.search(r"validation loss ([\d.]+), weights (\w+)", train(mode, "--from", path, "--eval", "--seq", 32, "--val-tokens", 2048)) for path in (run, out)]
        check(said[0] and said[1] and said[0][0] == said[1][0], f"{name}: expected the run's loss and weights, found {said}")
        model = load(out)
        check(type(model).__name__ == architecture, f"{name}: found {type(model).__name__}")
        ids = AutoTokenizer.from_pretrained(out)("a")["input_ids"]
        check(ids == [0, 97], f"{name}: expected a separator and a byte, found {ids}")
        free = [flag for flag in small[6:]] + ["--steps", 20]
        train(mode, *flags, "--steps", 20, "--init-from", run, "--out", DIR / f"there-{name}")
        train(mode, *free, "--init-from", out, "--out", DIR / f"back-{name}")
        there, back = losses(DIR / f"there-{name}"), losses(DIR / f"back-{name}")
        check(len(there) == 20 and torch.equal(there, back), f"{name}: twenty steps from the run {there}, from the export {back}")
        tokens = torch.tensor(list(pathlib.Path(__file__).read_bytes()[:129]))
        save_bytes(DIR / "text.bin", tokens.tolist(), 256)
        said = re.search(r"validation loss ([\d.]+)", train(mode, "--from", out, "--eval", "--val-data", DIR / "text.bin", "--seq", 32, "--val-tokens", 128))
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(tokens[:-1].view(4, 32)).logits.flatten(0, 1), tokens[1:])
        close(torch.tensor(float(said[1])), loss, 2e-6, f"{name}: the loss in transformers")


def test_own_class():
    """What is exported as NormForCausalLM comes back as its model.safetensors, with the run's flags."""
    flags = "--layers 2 --width 32 --heads 4 --seq 32 --batch 4 --warmup 2 --val-tokens 2048 --norms-every 0 --sample 0 --norm layer".split()
    run, out = DIR / "run-norm", DIR / "out-norm"
    train("PRE", *flags, "--steps", 20, "--out", run)
    export(run, out)
    check(json.loads((out / "config.json").read_text())["architectures"] == ["NormForCausalLM"], "a class of transformers has LayerNorm and RoPE now?")
    for name, source in (("there", run), ("back", out / "model.safetensors")):
        train("PRE", *flags, "--steps", 20, "--init-from", source, "--out", DIR / f"{name}-norm")
    check(len(losses(DIR / "back-norm")) == 20 and torch.equal(losses(DIR / "there-norm"), losses(DIR / "back-norm")), "norm: twenty steps from the run and from the export")


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
    refuses as it does. A checkpoint may be a link."""
    whole, run, aside = DIR / "run-whole", DIR / "run-damaged", DIR / "elsewhere"
    flags = "--layers 1 --width 8 --heads 2 --ffn 8 --seq 16 --batch 1 --steps 3 --save-every 1 "
    flags += "--val-tokens 64 --norms-every 0 --sample 0"
    train("PRE", *flags.split(), "--out", whole)
    names = [f"step_{step:08d}" for step in (1, 2, 3)]
    weights = {name: chosen_by_trainer(whole / name)[0] for name in names}
    check(len(set(weights.values())) == 3, f"three checkpoints: found the weights {weights}")
    last, old = run / names[2], run / f".old-{names[2]}"

    def flip(path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def manifest(text):
        return lambda: (last / "manifest.json").write_text(text)

    cases = {
        "nothing": lambda: None,
        "the weights": lambda: flip(last / "model.safetensors"),
        "the optimizer's state": lambda: flip(last / "optimizer.safetensors"),
        "two checkpoints": lambda: [flip(run / name / "config.json") for name in names[1:]],
        "every checkpoint": lambda: [flip(run / name / "state.json") for name in names],
        "a file, cut short": lambda: os.truncate(last / "model.safetensors", 50),
        "a file, gone": lambda: (last / "state.json").unlink(),
        "the manifest, gone": lambda: (last / "manifest.json").unlink(),
        "the manifest, empty": manifest("{}"),
        "the manifest, a list": manifest("[1]"),
        "a size": manifest('{"state.json": {"xxh64": "0"}}'),
        "a long name": manifest('{"%s": {"size": 1, "xxh64": "0"}}' % (64 * "x")),
        "a name": manifest('{"../config.json": {"size": 1, "xxh64": "0"}}'),
        "the plain name": lambda: last.rename(old),
        "the plain name and a file": lambda: [last.rename(old), flip(old / "state.json")],
        "the number": lambda: last.rename(run / "step_000000003"),
        "all names": lambda: [shutil.rmtree(run / name) for name in names],
        "nothing, but a link": lambda: [last.rename(aside), last.symlink_to(aside)],
    }
    for what, harm in cases.items():
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        harm()
        for source in (run, last):
            theirs, (folder, said) = chosen_by_trainer(source), chosen_by_export(source)
            ours = (weights.get(folder and folder.name.removeprefix(".old-")), said)
            where = f"damaged: {what}; {source.name}"
            check(ours == theirs, f"{where}: expected {theirs}, found {ours}")
    (DIR / "tokenizer.bin").write_bytes(b"not a tokenizer")
    refusal = str(attempt(lambda: export(last, DIR / "x")))
    check("expected a tokenizer.bin" in refusal, f"the tokenizer beside a link's aim: {refusal}")
    (DIR / "tokenizer.bin").unlink()


def chosen_by_trainer(source):
    """The hash of the weights that it reads, and its warnings and refusal without the hints."""
    program, flags = ROOT / "build" / "cpu-pre-fp32" / "train_gpt", "--eval --val-tokens 64".split()
    made = subprocess.run([program, "--from", source, *flags], capture_output=True, text=True)
    weights = re.search(r"weights (\w{16})", made.stdout)
    said = [line for line in made.stderr.splitlines() if line.startswith(("warning: ", "error: "))]
    return weights and weights[1], list(dict.fromkeys(said))


def chosen_by_export(source):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            folder = export_hf.find_checkpoint(source)
        except export_hf.Refusal as refusal:
            folder = None
            print(f"error: {refusal}", file=sys.stderr)
    return folder, [line for line in said.getvalue().splitlines() if not line.startswith("  -> ")]


def save_bytes(path, tokens, vocab):
    path.write_bytes(struct.pack("<4i", 20240520, 1, len(tokens), vocab) + bytes(1008) + struct.pack(f"<{len(tokens)}H", *tokens))


def test_training():
    """From one folder twenty steps here, and in transformers with torch's AdamW: the same losses. The data is one batch, whose order means nothing."""
    B, T = 4, 16
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        model, folder, run = their_model(name), DIR / "theirs" / f"{name}-trained", DIR / f"trained-{name}"
        model.save_pretrained(folder)
        tokens = torch.randint(0, 150, (B * T + 1,), generator=torch.Generator().manual_seed(3))
        save_bytes(DIR / "batch.bin", tokens.tolist(), 150)
        train("PRE", "--init-from", folder, "--data", DIR / "batch.bin", "--seq", T, "--batch", B, "--steps", 20, "--lr", 3e-3, "--warmup", 0, "--schedule", "constant", "--sample", 0, "--norms-every", 0,
              "--out", run)  # fmt: skip
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}], lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
        theirs = []
        for _ in range(20):
            loss = torch.nn.functional.cross_entropy(model(tokens[:-1].view(B, T)).logits.flatten(0, 1), tokens[1:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            theirs.append(loss.item())
        check(theirs[0] > theirs[-1] + 0.5, f"{name}: nothing was learned: {theirs}")
        close(losses(run), torch.tensor(theirs), 1e-4, f"{name}: twenty steps")


# ---------------------------------------------------------------------------------------------------------------- tokenizers, and what is refused


def test_tokenizers():
    """Bytes, and a learned vocabulary: what transformers makes of a text; and a folder's tokenizer.json back into tokenizer.bin."""
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
    made = DIR / "tokens" / "tokenizer.bin"
    subprocess.run([sys.executable, ROOT / "data" / "get.py", "tokenizer", "--vocab", learned, "--out", made], check=True, capture_output=True)
    export(DIR / "tokens", DIR / "out-tokens")
    with unittest.mock.patch("builtins.input", return_value="n"):  # to the question for trust
        t = AutoTokenizer.from_pretrained(DIR / "out-tokens")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(learned / "vocab.bpe"), str(learned / "encoder.json"))
    encoding = tiktoken.Encoding("test", pat_str=test_tokenizer.PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
    for some in (text, source.replace("<|endoftext|>", "")):
        ids = t(some)["input_ids"]
        right = ids == [len(ranks), *encoding.encode_ordinary(some)] and t.decode(ids[1:]) == some
        check(right, "a learned vocabulary: not tiktoken's tokens after a separator")
    check(t.eos_token_id == len(ranks), "a learned vocabulary: the token that ends a text")
    back = DIR / "back.bin"
    subprocess.run([sys.executable, ROOT / "data" / "get.py", "tokenizer", "--vocab", DIR / "out-tokens", "--out", back], check=True, capture_output=True)
    check(back.read_bytes() == made.read_bytes(), "tokenizer.json does not give the tokenizer.bin it is made of")
    config = json.loads((DIR / "out-tokens" / "tokenizer.json").read_text())
    (DIR / "learned" / "tokenizer.json").write_text(json.dumps(config | {"pre_tokenizer": {"type": "Metaspace"}}))
    (DIR / "learned" / "vocab.bpe").unlink()
    refused = subprocess.run([sys.executable, ROOT / "data" / "get.py", "tokenizer", "--vocab", learned, "--out", back], capture_output=True, text=True)
    check(refused.returncode == 1 and "cuts text as GPT-2 does, found BPE after Metaspace" in refused.stdout + refused.stderr, f"another pattern: {refused.stdout}{refused.stderr}")


def test_export():
    """bfloat16, and what export_hf.py refuses."""
    logits_of(("bf16", "SPAN", SHAPES["deepseek"]))
    said = export(DIR / "bf16", DIR / "out-bf16", "bfloat16")
    model, want = load(DIR / "out-bf16"), load_file(DIR / "bf16" / "logits.safetensors")
    check("no tokenizer" in said, "that there is no tokenizer is said")
    check(model.dtype == torch.bfloat16 and model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32, f"found weights in {model.dtype}")
    with torch.no_grad():
        z = model(want["tokens"].long()).logits.float()
    off = ((z - want["logits"]).square().mean() / want["logits"].square().mean()).sqrt().item()
    check(1e-4 < off < 0.3, f"bfloat16: logits off by {off} of their size")
    for words, source, out in (
        ("nothing was overwritten", "bf16", "out-bf16"), ("every checkpoint in", "damaged", "x"),
        ("expected the folder of a run", "nowhere", "x"),
    ):  # fmt: skip
        if source == "damaged":
            shutil.copytree(DIR / "bf16", DIR / "damaged")
            os.truncate(DIR / "damaged" / "step_00000000" / "model.safetensors", 5000)
        made = subprocess.run([sys.executable, ROOT / "dev" / "export_hf.py", DIR / source, DIR / out], capture_output=True, text=True)
        check(made.returncode == 1 and words in made.stderr and "\n  -> " in made.stderr, f"{source}: expected {words}, found {made.stderr}")


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
