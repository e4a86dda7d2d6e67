#!/usr/bin/env python3
"""test_probe.py: every number of dev/probe.py is what another, plainer computation makes of the same tensors; and what --probe writes is whole and in order.

    python3 dev/test/test_probe.py [TRAINER]          of SPAN; without one the formulas alone; from the project's root

Needs numpy, scipy and matplotlib.
"""
import itertools
import json
import math
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

import numpy as np

sys.path.insert(0, "dev")
import probe  # noqa: E402

ENVIRONMENT = dict(os.environ, MPLBACKEND="Agg", OMP_WAIT_POLICY="passive")
SMALL = "--width 32 --heads 2 --seq 16 --batch 4 --micro-batch 4 --steps 4 --warmup 1 --lr 1e-2 --val-tokens 64 --sample 0".split()
counts = {"passed": 0, "failed": 0}


def expect(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")


def near(found, right, error=1e-9):
    found, right = np.asarray(found, float), np.asarray(right, float)
    return found.shape == right.shape and bool(np.all((np.abs(found - right) <= error * (1e-6 + np.abs(right))) | (np.isnan(found) & np.isnan(right)) | (found == right)))


# ---------------------------------------------------------------------------------------------------------------- the formulas, otherwise

def plain_similarity(a, b):
    """One pair of layers, token by token."""
    cosines = []
    for x, y in zip(np.asarray(a, float), np.asarray(b, float)):
        length = math.sqrt(math.fsum(x * x)) * math.sqrt(math.fsum(y * y))
        cosines.append(math.fsum(x * y) / length if length else 0.0)
    return math.fsum(cosines) / len(cosines)


def plain_spectrum(x, centred=True, divisor=None):
    """Eigenvalues of the covariance by the singular values of the data; as many as there are columns, largest first."""
    x = np.asarray(x, float)
    x = x - x.mean(axis=0) if centred else x
    values = np.linalg.svd(x, compute_uv=False) ** 2 / (divisor or len(x) - 1)
    return np.pad(values, (0, max(0, x.shape[1] - len(values))))[:x.shape[1]]


def plain_hard(values):
    total = math.fsum(values)
    return 1 / math.fsum((value / total) ** 2 for value in values) if total > 1e-25 else 0.0


def plain_soft(values):
    total = math.fsum(values)
    return math.prod((value / total) ** -(value / total) for value in values if value > 1e-13 * total) if total > 1e-25 else 0.0


def plain_condition(w):
    """By the eigenvalues of the smaller of W^T W and W W^T."""
    w = np.asarray(w, float)
    values = np.linalg.eigvalsh(w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T)
    return math.sqrt(values[-1] / values[0]) if values[0] > 1e-13 * values[-1] else math.inf


def test_formulas():
    """On random data of odd sizes, whole and in blocks so small that the last is cut."""
    rng = np.random.default_rng(1)
    for elements, kind in itertools.product((1 << 24, 100), ("normal", "float32", "few tokens", "far from zero", "one token of zeros")):
        probe.ELEMENTS = elements
        tokens, width = (5, 12) if kind == "few tokens" else (67, 12)
        streams = [rng.normal(size=(tokens, width)) * rng.uniform(0.1, 3, width) for _ in range(4)]
        if kind == "float32":
            streams = [stream.astype(np.float32) for stream in streams]
        if kind == "far from zero":
            streams = [stream + 1e3 for stream in streams]
        if kind == "one token of zeros":
            streams[1][3] = 0
        found, here = probe.similarity(streams), f"{kind}, blocks of {elements}"
        right = np.array([[plain_similarity(a, b) for b in streams] for a in streams])
        expect(near(found, right), f"{here}: similarity {found}, expected {right}")
        right = [statistics.fmean(found[i][i + k] for i in range(4 - k)) for k in range(4)]
        expect(near(probe.by_distance(found), right), f"{here}: by distance {probe.by_distance(found)}, expected {right}")
        x = streams[0]
        expect(near(probe.covariance(x), np.cov(np.asarray(x, float), rowvar=False), 1e-8), f"{here}: covariance")
        expect(near(probe.rms(x), math.sqrt(math.fsum(float(value) ** 2 for value in x.flat) / x.size)), f"{here}: rms {probe.rms(x)}")
        values, right = probe.eigenvalues(probe.covariance(x)), plain_spectrum(x)
        expect(near(values, right, 1e-6), f"{here}: eigenvalues {values}, expected {right}")
        hard, soft = probe.hard_rank(values), probe.soft_rank(values)
        expect(near(hard, plain_hard(right)) and near(soft, plain_soft(right)), f"{here}: ranks {hard}, {soft}, expected {plain_hard(right)}, {plain_soft(right)}")
        expect(near(probe.ranks(x), [plain_hard(right) / width, plain_soft(right) / width]), f"{here}: ranks over the width")
        expect(1 <= hard <= soft <= min(width, tokens - 1), f"{here}: 1 <= hard {hard} <= soft {soft} <= {min(width, tokens - 1)}")
        for centred in (False, True):
            right = plain_spectrum(x, centred, None if centred else len(x))
            right = right / np.median(right) if kind != "few tokens" else np.full(width, np.nan)
            found = probe.embedding_spectrum(x, centred)
            expect(near(found, right, 1e-6), f"{here}: spectrum of the embedding {found}, expected {right}")
        for w in (x, x.T, x[:width]):
            expect(near(probe.condition(w), plain_condition(w), 1e-5), f"{here}: condition {probe.condition(w)}, expected {plain_condition(w)}")
    a, b = rng.uniform(0.01, 1, (2, 6))
    expect(near(probe.harmonic(a, b), [statistics.harmonic_mean(pair) for pair in zip(a, b)]), "harmonic mean")
    expect(near(probe.geometric(a, b), [statistics.geometric_mean(pair) for pair in zip(a, b)]), "geometric mean")
    expect(near(probe.harmonic(np.array([0.0, 0.5]), np.array([0.0, 0.5])), [0, 0.5]), "harmonic mean of zeros")
    probe.ELEMENTS = 1 << 24


def test_known():
    """Cases whose answer is known."""
    rng = np.random.default_rng(2)
    q = np.linalg.qr(rng.normal(size=(9, 9)))[0]
    expect(near(probe.condition(q), 1) and near(probe.condition(7 * q[:, :4]), 1), "an orthonormal matrix has condition 1")
    expect(near(probe.condition(q @ np.diag([8, 4, 4, 3, 2, 2, 2, 1, 0.5]) @ q.T), 16), "condition of known singular values")
    expect(probe.condition(np.outer(np.arange(1, 5), np.arange(1, 4))) == math.inf and probe.condition(np.ones((3, 3))) == math.inf, "a singular matrix has none")
    every = np.concatenate([np.eye(8), -np.eye(8)])             # covariance: a multiple of the identity
    values = probe.eigenvalues(probe.covariance(every))
    expect(near(probe.hard_rank(values), 8) and near(probe.soft_rank(values), 8), f"all directions alike: ranks {probe.hard_rank(values)}, {probe.soft_rank(values)} of 8")
    two = every * [3, 3, 0, 0, 0, 0, 0, 0]
    expect(near(probe.ranks(two), [2 / 8, 2 / 8]), f"two directions alike: {probe.ranks(two)}")
    expect(near(probe.ranks(1e-7 * two), [2 / 8, 2 / 8]), "and so where all is small")
    line = rng.normal(size=(30, 1)) * np.arange(1, 8) + 5
    expect(near(probe.ranks(line), [1 / 7, 1 / 7], 1e-6), f"rank one, far from zero: {probe.ranks(line)}")
    expect(near(probe.ranks(np.full((30, 7), 3.0)), [0, 0]) and near(probe.ranks(np.zeros((30, 7))), [0, 0]), "constant rows, and zeros, have rank 0")
    h = rng.normal(size=(20, 6))
    expect(near(probe.similarity([h, 2 * h, -h]), [[1, 1, -1], [1, 1, -1], [-1, -1, 1]]), "identical layers have similarity 1, opposite ones -1")
    expect(near(probe.similarity([np.eye(6), np.roll(np.eye(6), 1, 0)]), np.eye(2)), "orthogonal layers have similarity 0")
    expect(near(probe.similarity([np.zeros((5, 6)), np.ones((5, 6))]), [[0, 0], [0, 1]]), "zeros are like nothing")
    expect(near(probe.by_distance(np.array([[1, 0.5, 0.2], [0.5, 1, 0.7], [0.2, 0.7, 1]])), [1, 0.6, 0.2]), "by distance")
    expect(near(probe.embedding_spectrum(np.diag([1.0, 2, 4]), False), [4, 1, 0.25]), "spectrum of a diagonal embedding")
    expect(json.dumps(probe.plain({"a": np.array([1.0, np.inf, np.nan]), "b": np.float64(2), "c": 3})) == '{"a": [1.0, null, null], "b": 2.0, "c": 3}', "what is not finite is null")


# ---------------------------------------------------------------------------------------------------------------- of real runs

def run(*words, environment=ENVIRONMENT):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment)


def read_plainly(path):
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    return {name: np.frombuffer(data, "<f4", int(np.prod(t["shape"])), 8 + n + t["data_offsets"][0]).reshape(t["shape"]).astype(float) for name, t in header.items() if name != "__metadata__"}


def check_numbers(found, dump, weights, name):
    """A probe.json against its tensors."""
    L = found["layers"]
    streams = [dump[f"layers.{l}.stream"] for l in range(L)]
    right = [[plain_similarity(a, b) for b in streams] for a in streams]
    expect(near(found["similarity"], right), f"{name}: similarity")
    expect(near(found["similarity_by_distance"], [statistics.fmean(right[i][i + k] for i in range(L - k)) for k in range(L)]), f"{name}: by distance")
    edr = {"hidden": [], "up": []}
    for l in range(L):
        for site in edr:
            x = dump.get(f"layers.{l}.{site}")
            hard, soft = found["hard_rank"][site][l], found["soft_rank"][site][l]
            expect((x is None) == (hard is None) == (soft is None), f"{name}: ranks of {site} in layer {l}: {hard}, {soft}")
            if x is not None:
                values = plain_spectrum(x)
                expect(near([hard, soft], [plain_hard(values) / x.shape[1], plain_soft(values) / x.shape[1]], 1e-6), f"{name}: ranks of {site} in layer {l}: {hard}, {soft}")
                edr[site].append((hard, soft))
        part = {one: weights.get(f"model.layers.{l}.mlp.{one}_proj.weight") for one in ("gate", "up", "down")}
        part["fused"] = np.vstack([part["gate"], part["up"]]) if part["gate"] is not None else None
        for one, w in part.items():
            value = found["condition"][one][l]
            expect(value is None if w is None else near(value, plain_condition(w), 1e-5), f"{name}: condition of {one} in layer {l}: {value}")
    for site, pairs in edr.items():
        right = [100 * statistics.fmean(statistics.harmonic_mean(pair) for pair in pairs), 100 * statistics.fmean(statistics.geometric_mean(pair) for pair in pairs)] if pairs else [None, None]
        expect([found["edr_harmonic"][site], found["edr_geometric"][site]] == right if not pairs else near([found["edr_harmonic"][site], found["edr_geometric"][site]], right), f"{name}: EDR of {site}")
    e = weights["model.embed_tokens.weight"]
    for kind, values in {"gram": plain_spectrum(e, False, len(e)), "centred": plain_spectrum(e)}.items():
        expect(near(found["embedding_spectrum"][kind], values / np.median(values), 1e-6), f"{name}: spectrum of the embedding, {kind}")
    for key, what in (("residual_rms", "stream"), ("gradient_rms", "gradient")):
        right = [math.sqrt(np.mean(dump[f"{place}.{what}"] ** 2)) for place in ["embedded"] + [f"layers.{l}" for l in range(L)]]
        expect(near(found[key], right), f"{name}: {key}")


def check_run(trainer, folder, name, *flags, layers, experts=0):
    """Trains, probes, and compares every number; the file in micro-batches of another size is the same file."""
    out = folder / name
    done = run(trainer, *SMALL, "--layers", layers, *flags, "--out", out)
    expect(done.returncode == 0, f"{name}: {done.stderr or done.stdout}")
    done = run(sys.executable, "dev/probe.py", out, "--trainer", trainer, "--tokens", 145, "--keep", *["--no-pictures"] * (name != "SPAN"))
    expect(done.returncode == 0, f"{name}: {done.stderr or done.stdout}")
    if done.returncode:
        return
    checkpoint = out / "step_00000004"
    dump, weights = read_plainly(checkpoint / "probe.safetensors"), read_plainly(checkpoint / "model.safetensors")
    found = json.loads((out / "probe.json").read_text(), parse_constant=lambda text: expect(False, f"{name}: {text} in probe.json"))
    shapes = {tensor: x.shape for tensor, x in dump.items()}
    dense = [f"layers.{l}" for l in range(layers) if not experts or l < 1]
    right = {f"{place}.{what}": (160, 32) for place in ["embedded"] + [f"layers.{l}" for l in range(layers)] for what in ("stream", "gradient")}
    right |= {f"{place}.{what}": (160, found["ffn"]) for place in dense for what in ("up", "hidden")}       # samples of 16 tokens
    expect(shapes == right, f"{name}: {shapes}, expected {right}")
    expect((found["version"], found["step"], found["tokens"], found["layers"], found["width"]) == (1, 4, 160, layers, 32), f"{name}: what probe.json says of itself")
    check_numbers(found, dump, weights, name)
    other = folder / f"{name}.safetensors"
    done = run(trainer, "--from", out, "--micro-batch", 3, "--batch", 3, "--probe", other, "--probe-tokens", 160)
    expect(done.returncode == 0, f"{name}, other micro-batches: {done.stderr}")
    if done.returncode == 0 and not experts:
        there = read_plainly(other)
        worst = max(np.linalg.norm(there[tensor] - x) / np.linalg.norm(x) for tensor, x in dump.items())
        expect(there.keys() == dump.keys() and worst < 1e-4, f"{name}: in other micro-batches off by {worst}")
    pictures = sorted(path.name for path in out.glob("probe_*.png"))
    expect(len(pictures) == 7 * (name == "SPAN") and all((out / picture).stat().st_size > 1000 for picture in pictures), f"{name}: pictures {pictures}")


def test_labels():
    """Runs are named by the shortest ends of their paths that tell them apart."""
    steps = ["A/step_00000020", "A/step_00000100"]
    for runs, want in ((["runs/A"], ["A"]), (["runs/A/", "runs/B"], ["A", "B"]),
                       (["x/A", "y/A"], ["x/A", "y/A"]), (["runs/A", "runs/A"], ["A", "A"]),
                       ([f"runs/{step}" for step in steps], steps)):
        expect(probe.labels(runs) == want, f"{runs}: {probe.labels(runs)}, expected {want}")


def check_refusals(trainer, folder):
    """What makes no sense, or does not fit."""
    out, there = folder / "SPAN", folder / "there.safetensors"
    there.write_text("mine")
    done = run(trainer, "--from", out, "--probe", there)
    expect(done.returncode == 1 and "is there already" in done.stderr and there.read_text() == "mine", f"a file that is there: {done.stderr}")
    done = run(trainer, "--probe", folder / "x")
    expect(done.returncode == 1 and "--from RUN" in done.stderr, f"no model: {done.stderr}")
    done = run(trainer, "--from", out, "--eval", "--probe-tokens", 5)
    expect(done.returncode == 1 and "--probe FILE" in done.stderr, f"tokens of no probe: {done.stderr}")
    done = run(trainer, "--from", out, "--probe", folder / "no/where")
    expect(done.returncode == 2 and "check that it exists" in done.stderr, f"no folder: {done.stderr}")
    (folder / "full.c").write_text("#include <string.h>\n#include <sys/statvfs.h>\nint fstatvfs(int fd, struct statvfs *s) { (void)fd; memset(s, 0, sizeof *s); s->f_frsize = 4096; s->f_bavail = 20; return 0; }\n")
    made = run(os.environ.get("CC", "cc"), "-shared", "-fPIC", folder / "full.c", "-o", folder / "full.so")
    done = run(trainer, "--from", out, "--probe", folder / "big", environment=dict(ENVIRONMENT, LD_PRELOAD=str(folder / "full.so")))
    expect(made.returncode == 0 and done.returncode == 2 and "fewer --probe-tokens" in done.stderr, f"a full disk: {done.stderr}")
    expect(not list(folder.glob("big*")), f"a full disk leaves {list(folder.glob('big*'))}")
    done = run(sys.executable, "dev/probe.py", folder)
    expect(done.returncode == 1 and "found no checkpoint" in done.stderr, f"no run: {done.stderr}")
    done = run(sys.executable, "dev/probe.py", out, "--dump", folder / "nothing")
    expect(done.returncode == 1 and "no such file" in done.stderr, f"no dump: {done.stderr}")
    done = run(trainer, "--from", out, "--probe", folder / "all", "--probe-tokens", 10**9)
    whole = read_plainly(folder / "all")["embedded.stream"].shape if done.returncode == 0 else None
    expect("note: the validation data has" in done.stdout and whole is not None, f"more tokens than there are: {done.stdout} {done.stderr}")


def check_study(trainer, folder):
    """A study with probes: all runs, what is there is not done again, what fails is said and stops no other."""
    study, words = folder / "study", ["--mode", "SPAN", "--seed", "1,2", "--layers", "2", *SMALL[:-2], "--jobs", "2", "--probe", "--probe-tokens", "64"]
    (study / "bin").mkdir(parents=True)
    shutil.copy2(trainer, study / "bin/SPAN")
    ablate = lambda *more: run(sys.executable, "dev/ablate.py", "--out", study, *more)
    done = ablate(*words)
    probes = sorted(study.glob("runs/*/probe.json"))
    expect(done.returncode == 0 and len(probes) == 2, f"a study with probes: {probes} {done.stdout}{done.stderr}")
    page = (study / "index.html").read_text()
    expect(all(title in page for title in ("Similarity by distance", "EDR", "Condition of the ffn", "Gradients by layer over the run")), "the pictures are on the page")
    expect(not list(study.glob("runs/*/step_*/probe.safetensors")), "the activations are gone")
    before = [path.stat().st_mtime_ns for path in probes]
    probes[0].unlink()
    done = ablate()
    expect(done.returncode == 0 and probes[0].exists() and probes[1].stat().st_mtime_ns == before[1], f"only what lacks is done again: {done.stdout}{done.stderr}")
    done = ablate(*words[:-1], "32")
    expect(done.returncode == 0 and [json.loads(path.read_text())["tokens"] for path in probes] == [32, 32], f"probes of other tokens are others: {done.stdout}{done.stderr}")
    probes[0].unlink()
    damaged = next(study.glob("runs/SPAN-seed1/step_*/model.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = ablate()
    expect(done.returncode == 1 and "1 runs could not be probed" in done.stderr and "SPAN-seed1 could not be probed" in (study / "index.html").read_text(), f"a damaged checkpoint: {done.stdout}{done.stderr}")


def main():
    trainer = sys.argv[1] if len(sys.argv) > 1 else None
    test_formulas()
    test_known()
    test_labels()
    if trainer:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            check_run(trainer, folder, "SPAN", layers=3)
            check_run(trainer, folder, "GELU", "--activation", "gelu", "--bias", "on", "--norm", "layer", "--tied", "off", layers=2)
            check_run(trainer, folder, "experts", "--experts", "4", "--dense-layers", "1", "--ffn", "24", layers=3, experts=4)
            check_refusals(trainer, folder)
            check_study(trainer, folder)
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
