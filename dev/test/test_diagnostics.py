#!/usr/bin/env python3
"""test_diagnostics.py: the diagnostics of log.jsonl equal what numpy makes of the tensors that the
run's checkpoints hold.

    python3 dev/test/test_diagnostics.py MODE=TRAINER...      e.g. PRE=build/cpu-pre-fp32/train_gpt

A run of three steps saves each. From checkpoints 1 and 2 follow what the trainer said of step 2:
its forward began with the weights of checkpoint 1; the update is the difference of the weights, and
the gradient (m2 - beta1 m1) / (1 - beta1) of the first moments, as nothing was clipped. The forward
is computed again in float64, each placement as its paper writes it. All windows of the data are
alike, so no order of samples is needed. Needs numpy.
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np

L, C, NH, T, BETA1 = 3, 64, 2, 16, 0.9
HS = C // NH
FLAGS = (f"--layers {L} --width {C} --heads {NH} --seq {T} --batch 4 --micro-batch 2 --steps "
         f"3 --warmup 1 --lr 1e-2 --clip 0 --beta1 {BETA1} --save-every 1 --norms-every 1 "
         "--val-every 0 --sample 0").split()
counts = {"passed": 0, "failed": 0}


def expect(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")


def read_safetensors(path):
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    return {name: np.frombuffer(data, "<f4", offset=8 + n + t["data_offsets"][0],
                                count=int(np.prod(t["shape"]))).reshape(t["shape"]).astype(float)
            for name, t in header.items() if name != "__metadata__"}


def write_shards(folder):
    """Tokens with the period of a sequence, so that every sample is the same; one token more for
    the last target."""
    rng = np.random.default_rng(1)
    tokens = np.tile(rng.integers(1, 200, T), 20)
    for split in ("train", "val"):
        header = np.zeros(256, "<i4")
        header[:4] = 20240520, 1, len(tokens) + 1, 256
        (folder / f"{split}_000000.bin").write_bytes(header.tobytes() + np.append(tokens, tokens[0])
                                                     .astype("<u2").tobytes())
    return tokens[:T]


class Model:
    """The forward of one sequence, and what it saw of each layer."""

    def __init__(self, mode, weights, tokens):
        self.mode, self.w, self.l = mode, weights, 0
        self.seen = []
        x = weights["model.embed_tokens.weight"][tokens]
        if mode == "PERI":
            x = self.norm(x, "model.embed_norm")
        for self.l in range(L):
            self.seen.append({"ratios": []})
            x = self.block(x)
            self.seen[-1]["residual_rms"] = rms(x)

    def weight(self, name):
        return self.w[f"model.layers.{self.l}.{name}.weight"]

    def norm(self, x, name=None, slot=None):
        gain = self.w[name + ".weight"] if name else self.weight(slot)
        return gain * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def slot(self, name, x):
        return self.norm(x, slot=name)

    def add(self, y, skip):
        self.seen[-1]["ratios"].append(rms(y) / rms(skip))
        return y + skip

    def attention(self, x, normed=False):
        q, k, v = ((x @ self.weight(f"self_attn.{name}_proj").T).reshape(T, NH, HS)
                   for name in "qkv")
        if normed:
            q, k, v = (self.slot(f"self_attn.{name}_norm", part)
                       for name, part in zip("qkv", (q, k, v)))
        angle = np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(HS // 2) / HS)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        turn = lambda z: np.concatenate([z[..., :HS // 2] * cos - z[..., HS // 2:] * sin,
                                         z[..., HS // 2:] * cos + z[..., :HS // 2] * sin], axis=-1)
        s = np.einsum("qhi,khi->hqk", turn(q), turn(k)) / np.sqrt(HS)
        s[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf
        self.seen[-1]["attn_logit_max"] = s.max()
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khi->qhi", p, v).reshape(T, C) @ self.weight("self_attn.o_proj").T

    def ffn(self, x):
        gate, up = x @ self.weight("mlp.gate_proj").T, x @ self.weight("mlp.up_proj").T
        return (gate / (1 + np.exp(-gate)) * up) @ self.weight("mlp.down_proj").T

    def block(self, x):
        a_in, a_out, a_sum, f_in, f_out, f_sum = (
            "input_layernorm", "post_attention_layernorm", "attention_sum_layernorm",
            "pre_feedforward_layernorm", "post_feedforward_layernorm", "feedforward_sum_layernorm")
        if self.mode == "PRE":
            y = self.add(self.attention(self.slot(a_in, x)), x)
            return self.add(self.ffn(self.slot(f_in, y)), y)
        if self.mode == "POST":
            y = self.slot(a_sum, self.add(self.attention(x), x))
            return self.slot(f_sum, self.add(self.ffn(y), y))
        if self.mode == "SPAN":                                # the ffn's skip is the block's input
            y = self.slot(a_sum,
                          self.add(self.attention(self.slot(a_in, x) if self.l == 0 else x), x))
            return self.slot(f_sum, self.add(self.ffn(y), x))
        if self.mode == "HYBRID":
            y = self.add(self.attention(x, normed=True), x)
            u = self.slot(f_in, y)
            return self.add(self.ffn(u), u)
        if self.mode == "DEEPNORM":
            a = (2 * L) ** 0.25
            y = self.slot(a_sum, self.add(self.attention(x), a * x))
            return self.slot(f_sum, self.add(self.ffn(y), a * y))
        if self.mode == "KEEL":
            a = 2 * L if self.l else 1
            y = self.add(self.attention(self.slot(a_in, x)), a * x)
            y = self.slot(a_sum, y) if self.l else y
            return self.slot(f_sum, self.add(self.ffn(self.slot(f_in, y)), a * y))
        if self.mode == "PERI":
            y = self.add(self.slot(a_out, self.attention(self.slot(a_in, x))), x)
            return self.add(self.slot(f_out, self.ffn(self.slot(f_in, y))), y)
        raise SystemExit(f"error: no block for {self.mode} here\n  -> write it")


def rms(x):
    return np.sqrt(np.mean(x * x))


def near(got, right, error):
    return got is not None and abs(got - right) <= error * abs(right)


def check(mode, trainer, folder):
    tokens = write_shards(folder)
    out = folder / mode
    done = subprocess.run([trainer, *FLAGS, "--data", str(folder), "--out", str(out)],
                          capture_output=True, text=True)
    expect(done.returncode == 0, f"{mode}: {done.stderr or done.stdout}")
    if done.returncode:
        return
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    said = next(line for line in log if line["step"] == 2 and "grad_norms" in line)
    before, after = (read_safetensors(out / f"step_{step:08d}/model.safetensors")
                     for step in (1, 2))
    moments = [read_safetensors(out / f"step_{step:08d}/optimizer.safetensors") for step in (1, 2)]
    seen = Model(mode, before, tokens).seen
    for l in range(L):
        for key, right in {"residual_rms": seen[l]["residual_rms"],
                           "attn_ratio": seen[l]["ratios"][0], "ffn_ratio": seen[l]["ratios"][1],
                           "attn_logit_max": seen[l]["attn_logit_max"]}.items():
            expect(near(said[key][l], right, 1e-4),
                   f"{mode}: {key} of layer {l} is {said[key][l]}, expected {right}")
    expect(set(said["grad_norms"]) == set(before) == set(said["update_ratios"]),
           f"{mode}: names of tensors")
    for name in before:
        first, second = (moment["exp_avg." + name] for moment in moments)
        gradient = np.linalg.norm((second - BETA1 * first) / (1 - BETA1))
        update = np.linalg.norm(after[name] - before[name]) / np.linalg.norm(before[name])
        expect(near(said["grad_norms"][name], gradient, 1e-3),
               f"{mode}: gradient of {name} has norm {said['grad_norms'][name]}, expected "
               f"{gradient}")
        expect(near(said["update_ratios"][name], update, 1e-3),
               f"{mode}: update ratio of {name} is {said['update_ratios'][name]}, expected "
               f"{update}")
    whole = next(line["grad_norm"] for line in log if line["step"] == 2 and "grad_norm" in line)
    parts = np.sqrt(sum(value ** 2 for value in said["grad_norms"].values()))
    expect(near(parts, whole, 1e-5),
           f"{mode}: the tensors' gradient norms make {parts}, all together have {whole}")


def main():
    if len(sys.argv) < 2:
        sys.exit("error: expected MODE=TRAINER\n"
                 "  -> python3 dev/test/test_diagnostics.py SPAN=build/cpu-span-fp32/train_gpt")
    for word in sys.argv[1:]:
        mode, _, trainer = word.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            check(mode, trainer, pathlib.Path(folder))
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
