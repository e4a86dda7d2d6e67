"""Claims that are mathematics: seconds of numpy in double, three seeds where random numbers are
drawn; parameter counts from the trainer itself.

    python3 dev/repro/calculations.py          prints all of them
"""
import itertools
import json
import pathlib
import re
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEEDS = ("1", "2", "3")


# -------------------------------------------------------------- attention, HybridNorm's theorem A.3

def unit_rms(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))


def attention(x, weights, kind):
    """One head: S = softmax(q k^T / sqrt(d)) v W_O; pre: of the normed x; qkv: q, k and v
    themselves are normed."""
    x = unit_rms(x) if kind == "pre" else x
    q, k, v = (x @ weights[name] for name in "QKV")
    if kind == "qkv":
        q, k, v = unit_rms(q), unit_rms(k), unit_rms(v)
    logits = q @ k.T / np.sqrt(q.shape[-1])
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)) @ v @ weights["O"]


def jacobian_norm(x, weights, kind, of):
    """|dS/dW|_F by central differences, W of small or large entries alike: the step is a part of
    their size."""
    step, total = 1e-5 * np.std(weights[of]), 0.0
    for i in np.ndindex(weights[of].shape):
        moved = [dict(weights, **{of: weights[of].copy()}) for _ in range(2)]
        moved[0][of][i] += step
        moved[1][of][i] -= step
        total += np.sum(((attention(x, moved[0], kind) - attention(x, moved[1], kind))
                         / (2 * step)) ** 2)
    return np.sqrt(total)


def attention_exponent(seed, kind, of, scaled):
    """d ln |dS/dW_of| / d ln |W_scaled|, from W_scaled times 1/2 and times 2. Weights are small, so
    that softmax is close to even, as the bounds have it."""
    random = np.random.default_rng(int(seed))
    width, tokens = 8, 6
    x = random.normal(size=(tokens, width))
    weights = {name: 0.1 * random.normal(size=(width, width)) for name in "QKVO"}
    norms = [jacobian_norm(x, dict(weights, **{scaled: c * weights[scaled]}), kind, of)
             for c in (0.5, 2.0)]
    return float(np.log(norms[1] / norms[0]) / np.log(4.0))


# ---------------------------------------------------------------------------------- SDD's equations

def sdd_gradients(v, alpha, x, dy):
    """y = alpha * z / rms(z), z = V x: exact gradients of alpha, V and x for one token."""
    z = v @ x
    r = 1 / np.sqrt(np.mean(z * z))
    u, hat = alpha * dy, z * r
    dz = r * (u - hat * np.mean(u * hat))
    return dy * hat, np.outer(dz, x), v.T @ dz


def rms(x):
    return float(np.sqrt(np.mean(x * x)))


def sdd(seed, what, *sizes):
    random = np.random.default_rng(int(seed))
    if what in ("alpha", "dv"):
        v, x, dy = (random.normal(size=(256, 256)) / 16, random.normal(size=256),
                    random.normal(size=256))
        if what == "dv":  # exponent of the gradient's norm in that of V
            norms = [rms(sdd_gradients(c * v, np.ones(256), x, dy)[1]) for c in (0.5, 2)]
            return float(np.log(norms[1] / norms[0]) / np.log(4))
        # the gradient of alpha, V times 100 over V
        return (rms(sdd_gradients(100 * v, np.ones(256), x, dy)[0])
                / rms(sdd_gradients(v, np.ones(256), x, dy)[0]))
    if what == "dx":  # RMS of dx over RMS of dy, mean over tokens
        inputs, outputs, alpha = sizes
        v = random.normal(size=(outputs, inputs)) / np.sqrt(2.5 * inputs)
        tokens = [(random.normal(size=inputs), random.normal(size=outputs)) for _ in range(64)]
        return float(np.mean([rms(sdd_gradients(v, np.full(outputs, alpha), x, dy)[2]) / rms(dy)
                              for x, dy in tokens]))
    if what in ("eq6", "eq7"):  # the norm of the approximate gradient over that of the exact one
        n = sizes[0]
        v, x, dy = (random.normal(size=(n, n)) / np.sqrt(2.5 * n), random.normal(size=n),
                    random.normal(size=n))
        z, (_, dv, dx) = v @ x, sdd_gradients(v, np.ones(n), x, dy)
        projected = (dy - z * np.dot(z, dy) / (n * np.mean(z * z))) / np.linalg.norm(v) / rms(x)
        return float(np.linalg.norm(np.outer(projected, x)) / np.linalg.norm(dv)
                     if what == "eq6" else np.linalg.norm(v.T @ projected) / np.linalg.norm(dx))
    n = sizes[0]
    w = random.normal(size=(n, n)) / np.sqrt(n)
    if what == "express":  # relative error of a norm(W x) against W x, a = |W|_F / sqrt(n)
        y = w @ random.normal(size=(n, 256))
        error = np.linalg.norm(w) / np.sqrt(n) * y / np.sqrt(np.mean(y * y, axis=0)) - y
        return float(np.linalg.norm(error) / np.linalg.norm(y))
    # W = U S V', the proof's construction: relative error of alpha norm(V' x) against S V' x, which
    # leaves U to the next layer, or against W x; alpha is the best diagonal
    u, s, vt = np.linalg.svd(w)
    z = vt @ random.normal(size=(n, 256))
    normed = z / np.sqrt(np.mean(z * z, axis=0))
    y = (u if what == "express_with_u" else np.eye(n)) @ (s[:, None] * z)
    alpha = np.sum(y * normed, axis=1) / np.sum(normed * normed, axis=1)
    return float(np.linalg.norm(alpha[:, None] * normed - y) / np.linalg.norm(y))


# --------------------------------------------------------------------------------------- parameters

def build(mode, *variables):
    """The path of a placement's trainer, after make has built it."""
    made = subprocess.run(["make", "-s", "-C", str(ROOT), "--no-print-directory", "binary",
                           f"NORM_MODE={mode}", *variables], capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"error: the trainer was not built:\n{made.stdout}{made.stderr}")
    return str(ROOT / made.stdout.split()[-1])


def config_of(binary, *words):
    """What --show config prints; notes may stand before it."""
    shown = subprocess.run([binary, *words, "--show", "config"], capture_output=True, text=True,
                           check=True).stdout
    return json.loads(shown[re.search(r"^\{", shown, re.M).start():])


def parameters(mode, model):
    return config_of(build(mode, "DEVICE=cpu", "PREC=fp32"), "--model", model)["parameters"]


# --------------------------------------------------------------------------------------- operations

def sdd_operations(width):
    """SDD's norm and gain, 6 operations for each output of a matrix, over 2 for each weight, in %:
    q, k, v, o of width C and gate, up, down of an ffn of 8/3 C. Attention's products are left out,
    so it is an upper bound."""
    ffn = 8 * width / 3
    outputs = 5 * width + 2 * ffn                       # q, k, v, o, down; gate, up
    weights = 4 * width ** 2 + 3 * width * ffn
    return 100 * 6 * outputs / (2 * weights)


# -------------------------------------------------------------------------------------- all of them

ALL = [("attention", *words) for words in itertools.product(("pre", "qkv"), "QKVO", "QKVO")]
ALL += [("sdd", "alpha"), ("sdd", "dx", 256, 256, 1.0), ("sdd", "dx", 256, 256, 0.25),
        ("sdd", "dx", 256, 1024, 1.0), ("sdd", "eq6", 256), ("sdd", "eq7", 256),
        ("sdd", "dv"), ("sdd", "express", 256), ("sdd", "express", 1024),
        ("sdd", "express_without_u", 256), ("sdd", "express_with_u", 256),
        ("parameters", "olmoe-588M-3B"), ("flops", 1040)]


def compute(kind, *words):
    """seed -> value; "exact" -> value where nothing is random."""
    if kind == "parameters":
        pre = parameters("PRE", words[0])
        return {"exact": 100 * (parameters("SDD", words[0]) / pre - 1)}
    if kind == "flops":
        return {"exact": sdd_operations(*words)}
    return {seed: {"attention": attention_exponent, "sdd": sdd}[kind](seed, *words)
            for seed in SEEDS}


def name_of(words):
    return " ".join(map(str, words))


def compute_all():
    return {name_of(words): {seed: float(f"{value:.6g}") for seed, value in compute(*words).items()}
            for words in ALL}


if __name__ == "__main__":
    print(json.dumps(compute_all(), indent=1))
