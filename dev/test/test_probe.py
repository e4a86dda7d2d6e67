#!/usr/bin/env python3
"""test_probe.py: every number of dev/probe.py is that of another, plainer computation on the same
tensors, and the tensors agree with the diagnostics of the trainer, which shares no code with them.

    python3 dev/test/test_probe.py [SPAN=TRAINER PRE=TRAINER SDD=TRAINER]   in the project's root

Without trainers it tests the formulas alone. Needs numpy, scipy, matplotlib, and for trainers the
packages of dev/export_hf.py.
"""
import argparse
import contextlib
import io
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
T, SAMPLES = 16, 12
SMALL = f"--width 32 --heads 2 --seq {T} --steps 4 --warmup 1 --lr 1e-2 --sample 0".split()
counts = {"passed": 0, "failed": 0}


def expect(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")


def near(found, right, error=1e-9):
    found, right = np.asarray(found, float), np.asarray(right, float)
    if found.shape != right.shape:
        return False
    close = np.abs(found - right) <= error * (1e-6 + np.abs(right))
    return bool(np.all(close | (np.isnan(found) & np.isnan(right)) | (found == right)))


# ------------------------------------------------------------------------- the formulas, otherwise

def plain_similarity(a, b):
    """One pair of layers, token by token."""
    cosines = []
    for x, y in zip(np.asarray(a, float), np.asarray(b, float)):
        length = math.sqrt(math.fsum(x * x)) * math.sqrt(math.fsum(y * y))
        cosines.append(math.fsum(x * y) / length if length else 0.0)
    return math.fsum(cosines) / len(cosines)


def plain_spectrum(x, centred=True, divisor=None):
    """Eigenvalues of the covariance by the singular values of the data; as many as there are
    columns, largest first."""
    x = np.asarray(x, float)
    x = x - x.mean(axis=0) if centred else x
    values = np.linalg.svd(x, compute_uv=False) ** 2 / (divisor or len(x) - 1)
    return np.pad(values, (0, max(0, x.shape[1] - len(values))))[:x.shape[1]]


def plain_hard(values):
    total = math.fsum(values)
    return 1 / math.fsum((value / total) ** 2 for value in values) if total > 1e-25 else 0.0


def plain_soft(values):
    total = math.fsum(values)
    if total <= 1e-25:
        return 0.0
    return math.prod((p := value / total) ** -p for value in values if value > 1e-13 * total)


def plain_condition(w):
    """By the eigenvalues of the smaller of W^T W and W W^T."""
    w = np.asarray(w, float)
    values = np.linalg.eigvalsh(w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T)
    return math.sqrt(values[-1] / values[0]) if values[0] > 1e-13 * values[-1] else math.inf


def check_formulas(kind, streams, here):
    tokens, width = streams[0].shape
    found = probe.similarity(streams)
    right = np.array([[plain_similarity(a, b) for b in streams] for a in streams])
    expect(near(found, right), f"{here}: similarity {found}, expected {right}")
    right = [statistics.fmean(found[i][i + k] for i in range(4 - k)) for k in range(4)]
    expect(near(probe.by_distance(found), right), f"{here}: by distance, expected {right}")
    x = streams[0]
    right = np.cov(np.asarray(x, float), rowvar=False)
    expect(near(probe.covariance(x), right, 1e-8), f"{here}: covariance")
    right = math.sqrt(math.fsum(float(value) ** 2 for value in x.flat) / x.size)
    expect(near(probe.rms(x), right), f"{here}: rms {probe.rms(x)}, expected {right}")
    values, right = probe.eigenvalues(probe.covariance(x)), plain_spectrum(x)
    expect(near(values, right, 1e-6), f"{here}: eigenvalues {values}, expected {right}")
    hard, soft = probe.hard_rank(values), probe.soft_rank(values)
    expect(near([hard, soft], [plain_hard(right), plain_soft(right)]), f"{here}: {hard}, {soft}")
    expect(near(probe.ranks(x), [plain_hard(right) / width, plain_soft(right) / width]),
           f"{here}: ranks over the width")
    expect(1 <= hard <= soft <= min(width, tokens - 1), f"{here}: 1 <= {hard} <= {soft} <= width")
    for centred in (False, True):
        right = plain_spectrum(x, centred, None if centred else len(x))
        right = right / np.median(right) if kind != "few tokens" else np.full(width, np.nan)
        found = probe.embedding_spectrum(x, centred)
        expect(near(found, right, 1e-6), f"{here}: embedding {found}, expected {right}")
    for w in (x, x.T, x[:width]):
        expect(near(probe.condition(w), plain_condition(w), 1e-5),
               f"{here}: condition {probe.condition(w)}, expected {plain_condition(w)}")


def test_formulas():
    """On random data of odd sizes, whole and in blocks so small that the last is cut."""
    rng = np.random.default_rng(1)
    kinds = ("normal", "float32", "few tokens", "far from zero", "one token of zeros")
    for elements, kind in itertools.product((1 << 24, 100), kinds):
        probe.ELEMENTS = elements
        tokens, width = (5, 12) if kind == "few tokens" else (67, 12)
        streams = [rng.normal(size=(tokens, width)) * rng.uniform(0.1, 3, width) for _ in range(4)]
        if kind == "float32":
            streams = [stream.astype(np.float32) for stream in streams]
        if kind == "far from zero":
            streams = [stream + 1e3 for stream in streams]
        if kind == "one token of zeros":
            streams[1][3] = 0
        check_formulas(kind, streams, f"{kind}, blocks of {elements}")
    probe.ELEMENTS = 1 << 24
    a, b = rng.uniform(0.01, 1, (2, 6))
    expect(near(probe.harmonic(a, b), list(map(statistics.harmonic_mean, zip(a, b)))), "harmonic")
    right = list(map(statistics.geometric_mean, zip(a, b)))
    expect(near(probe.geometric(a, b), right), "geometric mean")
    zeros = np.array([0.0, 0.5])
    expect(near(probe.harmonic(zeros, zeros), [0, 0.5]), "harmonic mean of zeros")


def test_known():
    """Cases whose answer is known."""
    rng = np.random.default_rng(2)
    q = np.linalg.qr(rng.normal(size=(9, 9)))[0]
    expect(near(probe.condition(q), 1) and near(probe.condition(7 * q[:, :4]), 1),
           "an orthonormal matrix has condition 1")
    expect(near(probe.condition(q @ np.diag([8, 4, 4, 3, 2, 2, 2, 1, 0.5]) @ q.T), 16),
           "condition of known singular values")
    singular = np.outer(np.arange(1, 5), np.arange(1, 4)), np.ones((3, 3))
    expect([probe.condition(w) for w in singular] == [math.inf] * 2, "a singular matrix has none")
    every = np.concatenate([np.eye(8), -np.eye(8)])             # covariance: a multiple of identity
    expect(near(probe.ranks(every), [1, 1]), f"all directions alike: {probe.ranks(every)}")
    two = every * [3, 3, 0, 0, 0, 0, 0, 0]
    expect(near(probe.ranks(two), [2 / 8, 2 / 8]), f"two directions alike: {probe.ranks(two)}")
    expect(near(probe.ranks(1e-7 * two), [2 / 8, 2 / 8]), "two small directions alike")
    line = rng.normal(size=(30, 1)) * np.arange(1, 8) + 5
    expect(near(probe.ranks(line), [1 / 7, 1 / 7], 1e-6), f"rank one: {probe.ranks(line)}")
    for constant in (3.0, 0.0):
        expect(near(probe.ranks(np.full((30, 7), constant)), [0, 0]), "constant rows have rank 0")
    h = rng.normal(size=(20, 6))
    expect(near(probe.similarity([h, 2 * h, -h]), [[1, 1, -1], [1, 1, -1], [-1, -1, 1]]),
           "identical layers have similarity 1, opposite ones -1")
    expect(near(probe.similarity([np.eye(6), np.roll(np.eye(6), 1, 0)]), np.eye(2)),
           "orthogonal layers have similarity 0")
    expect(near(probe.similarity([np.zeros((5, 6)), np.ones((5, 6))]), [[0, 0], [0, 1]]),
           "zeros have similarity 0")
    pairs = np.array([[1, 0.5, 0.2], [0.5, 1, 0.7], [0.2, 0.7, 1]])
    expect(near(probe.by_distance(pairs), [1, 0.6, 0.2]), "by distance")
    diagonal = np.diag([1.0, 2, 4])
    expect(near(probe.embedding_spectrum(diagonal, False), [4, 1, 0.25]), "a diagonal embedding")
    values = {"a": np.array([1.0, np.inf, np.nan]), "b": np.float64(2), "c": 3}
    expect(json.dumps(probe.plain(values)) == '{"a": [1.0, null, null], "b": 2.0, "c": 3}', "null")


def test_labels():
    """Runs are named by the shortest ends of their paths that tell them apart."""
    steps = ["A/step_00000020", "A/step_00000100"]
    for runs, want in ((["runs/A"], ["A"]), (["runs/A/", "runs/B"], ["A", "B"]),
                       (["x/A", "y/A"], ["x/A", "y/A"]), (["runs/A", "runs/A"], ["A", "A"]),
                       ([f"runs/{step}" for step in steps], steps)):
        expect(probe.labels(runs) == want, f"{runs}: {probe.labels(runs)}, expected {want}")


# ------------------------------------------------------------------------------------ of real runs

def run(*words):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True,
                          env=ENVIRONMENT)


def stops(words, function, *arguments):
    """Does the call end the program with these words?"""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            function(*arguments)
    except SystemExit as error:
        return words in str(error)
    return False


def read_plainly(path):
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data, "<f4", int(np.prod(t["shape"])), 8 + n + t["data_offsets"][0])
            .reshape(t["shape"]).astype(float) for name, t in header.items()}


def write_shards(folder, tokens, vocabulary=256, wide=False):
    """The same tokens for training and validation, the latter in two shards."""
    header = np.zeros(256, "<i4")
    folder.mkdir()
    parts = {"train_0": tokens, "val_0": tokens[:75], "val_1": tokens[75:]}
    for name, part in parts.items():
        header[:4] = *((20240801, 7) if wide else (20240520, 1)), len(part), vocabulary
        body = part.astype("<u4" if wide else "<u2").tobytes()
        (folder / f"{name}.bin").write_bytes(header.tobytes() + body)
    return folder


def check_numbers(found, dump, weights, name):
    """probe.json against its tensors, whose activations went through in other micro-batches."""
    L, near_enough = found["layers"], 1e-4
    expect_near = lambda value, right, what: expect(near(value, right, near_enough),
                                                    f"{name}: {what} {value}, expected {right}")
    streams = [dump[f"layers.{l}.stream"] for l in range(L)]
    right = [[plain_similarity(a, b) for b in streams] for a in streams]
    expect_near(found["similarity"], right, "similarity")
    right = [statistics.fmean(right[i][i + k] for i in range(L - k)) for k in range(L)]
    expect_near(found["similarity_by_distance"], right, "by distance")
    pairs = {"hidden": [], "up": []}
    for l, site in itertools.product(range(L), pairs):
        x = dump.get(f"layers.{l}.{site}")
        ranks = [found[key][site][l] for key in ("hard_rank", "soft_rank")]
        if x is None:
            expect(ranks == [None, None], f"{name}: ranks of {site} in layer {l}: {ranks}")
            continue
        values = plain_spectrum(x)
        pairs[site].append([plain_hard(values) / x.shape[1], plain_soft(values) / x.shape[1]])
        expect_near(ranks, pairs[site][-1], f"ranks of {site} in layer {l}")
    for site, mean in itertools.product(pairs, ("harmonic", "geometric")):
        right = 100 * statistics.fmean(map(getattr(statistics, f"{mean}_mean"), pairs[site]))
        expect_near(found[f"edr_{mean}"][site], right, f"EDR, {mean}, of {site}")
    for l in range(L):
        part = {one: weights.get(f"model.layers.{l}.mlp.{one}_proj.weight")
                for one in ("gate", "up", "down")}
        both = part["gate"] is not None
        part["fused"] = np.vstack([part["gate"], part["up"]]) if both else None
        for one, w in part.items():
            value, what = found["condition"][one][l], f"condition of {one} in layer {l}"
            if w is None:
                expect(value is None, f"{name}: {what}: {value}")
            else:
                expect_near(value, plain_condition(w), what)
    e = weights["model.embed_tokens.weight"]
    spectra = {"gram": plain_spectrum(e, False, len(e)), "centred": plain_spectrum(e)}
    for kind, values in spectra.items():
        expect_near(found["embedding_spectrum"][kind], values / np.median(values), kind)
    places = ["embedded"] + [f"layers.{l}" for l in range(L)]
    for key, what in (("residual_rms", "stream"), ("gradient_rms", "gradient")):
        right = [math.sqrt(np.mean(dump[f"{place}.{what}"] ** 2)) for place in places]
        expect_near(found[key], right, key)


def gelu_slope(x):
    """Derivative of x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    c = math.sqrt(2 / math.pi)
    tanh = np.tanh(c * (x + 0.044715 * x ** 3))
    return (1 + tanh) / 2 + x * (1 - tanh ** 2) / 2 * c * (1 + 3 * 0.044715 * x ** 2)


def check_trainer(dump, weights, log, tokens, name):
    """The tensors against what the trainer logged of the step that read the same tokens with the
    same weights: its residual_rms, and the norms of those gradients that follow from the tensors.
    The trainer's loss is the mean over tokens. Under PRE dL/d(stream) is that of the branch too."""
    L, inputs = len(log["residual_rms"]), tokens[:-1]
    lowest = -0.2785                                           # of silu
    expect_near = lambda value, right, what: expect(near(value, right, 1e-3),
                                                    f"{name}: {what} {value}, expected {right}")
    found = [math.sqrt(np.mean(dump[f"layers.{l}.stream"] ** 2)) for l in range(L)]
    expect_near(found, log["residual_rms"], "residual_rms")
    norms = {key: value * len(inputs) for key, value in log["grad_norms"].items()}
    embedding = np.zeros_like(weights["model.embed_tokens.weight"])
    np.add.at(embedding, inputs, dump["embedded.gradient"])
    expect_near(np.linalg.norm(embedding), norms["model.embed_tokens.weight"], "embedding")
    for l in range(L):
        ffn, here = f"model.layers.{l}.mlp", f"layers.{l}"
        if f"{here}.hidden" not in dump:
            continue
        gradient, hidden, up = (dump[f"{here}.{what}"] for what in ("gradient", "hidden", "up"))
        if f"{ffn}.gate_proj.weight" in weights:               # hidden = silu(gate) up
            expect(np.all(hidden / up > lowest), f"{name}: up and hidden of layer {l}")
        if not name.startswith("PRE"):
            continue
        found = np.linalg.norm(gradient.T @ hidden)
        expect_near(found, norms[f"{ffn}.down_proj.weight"], f"down projection of layer {l}")
        if f"{ffn}.up_proj.bias" in norms:
            slope = hidden / up if f"{ffn}.gate_proj.weight" in weights else gelu_slope(up)
            found = np.sum(gradient @ weights[f"{ffn}.down_proj.weight"] * slope, axis=0)
            found = np.linalg.norm(found)
            expect_near(found, norms[f"{ffn}.up_proj.bias"], f"up projection's bias of layer {l}")


def train(trainer, data, name, *flags):
    """Trains with all samples in each batch, so that their order has no effect. Returns the
    checkpoint with the weights that the last step begins with, and what that step logs."""
    out = data.parent / name
    done = run(trainer, *SMALL, "--batch", SAMPLES, "--micro-batch", SAMPLES, "--tied", "off",
               "--save-every", 1, "--norms-every", 1, *flags, "--data", data, "--out", out)
    expect(done.returncode == 0, f"{name}: {done.stderr}")
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return out / "step_00000003", [line for line in lines if "grad_norms" in line][-1]


def check_run(checkpoint, log, tokens, dense):
    """The tensors of a checkpoint against the log, and its probe.json against the tensors. The
    first `dense` layers have no routed experts."""
    name, L = checkpoint.parent.name, len(log["residual_rms"])
    data = checkpoint.parent.parent / "data"
    weights = read_plainly(checkpoint / "model.safetensors")
    found = json.loads((checkpoint / "probe.json").read_text(), parse_constant=lambda text: expect(
        False, f"{name}: {text} in probe.json"))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        probe.MICRO_BATCH = 5 * T
        samples = probe.read_samples(data, T, SAMPLES * T)
        expect(np.array_equal(samples, [tokens[i * T:(i + 1) * T + 1] for i in range(SAMPLES)]),
               f"{name}: samples")
        model = probe.load_model(checkpoint, folder / "model")
        dump = probe.take_activations(model, samples, folder)
        dump = {tensor: np.array(x, float) for tensor, x in dump.items()}
    places = [f"layers.{l}" for l in range(L)]
    shapes = {f"{place}.{what}": (SAMPLES * T, 32) for place in ["embedded", *places]
              for what in ("stream", "gradient")}
    shapes |= {f"{place}.{what}": (SAMPLES * T, found["ffn"]) for place in places[:dense]
               for what in ("up", "hidden")}
    expect({tensor: x.shape for tensor, x in dump.items()} == shapes, f"{name}: {shapes}")
    expect([found[key] for key in ("version", "norm_mode", "step", "tokens", "layers", "width")]
           == [1, name.split("-")[0], 3, SAMPLES * T, L, 32], f"{name}: head of probe.json")
    check_numbers(found, dump, weights, name)
    check_trainer(dump, weights, log, tokens, name)


EXPERTS = "--experts 4 --dense-layers 1 --ffn 24 --balance-loss 0 --router-z-loss 0"
RUNS = {
    "SPAN": "--layers 3",
    "SDD": "--layers 2",
    "PRE-llama": "--layers 2",
    "PRE-gpt2": "--layers 2 --activation gelu --bias on --norm layer --positions learned",
    "PRE-bias": "--layers 2 --bias on",
    "PRE-moe": f"--layers 3 {EXPERTS}",
}


def check_runs(trainers, folder):
    """Llama's and GPT-2's classes of transformers, NormForCausalLM, a norm over gate and up (SDD),
    and experts."""
    tokens = np.random.default_rng(3).integers(1, 60, SAMPLES * T + 1)
    data = write_shards(folder / "data", tokens)
    made = [train(trainers[name.split("-")[0]], data, name, *flags.split())
            for name, flags in RUNS.items()]
    done = run(sys.executable, "dev/probe.py", *(checkpoint for checkpoint, _ in made))
    expect(done.returncode == 0, f"dev/probe.py: {done.stdout}{done.stderr}")
    for checkpoint, log in made:
        dense = 1 if "moe" in str(checkpoint) else None
        check_run(checkpoint, log, tokens, dense)
    sizes = [path.stat().st_size for path in made[0][0].glob("probe_*.png")]
    expect(len(sizes) == 7 and min(sizes) > 1000, f"pictures of {sizes} bytes")


def check_refusals(folder):
    """Every refusal names the cure, and nothing is left in the run."""
    data, checkpoint = folder / "data", folder / "SPAN/step_00000003"
    options = argparse.Namespace(tokens=0, val_data=None)
    expect(stops("found no checkpoint\n  -> ls runs/", probe.probe, folder, options), "no run")
    done = run(sys.executable, "dev/probe.py", folder / "SPAN", "--tokens", 0, "--val-data",
               folder / "nothing")
    expect(done.returncode == 1 and "found no file\n  -> --val-data" in done.stderr, done.stderr)
    (folder / "text").write_text("no shard")
    (folder / "cut.bin").write_bytes((data / "val_0.bin").read_bytes()[:-1])
    for name in ("text", "cut.bin"):
        options.val_data = str(folder / name)
        expect(stops("expected a shard, found another file, or a part of one", probe.probe,
                     checkpoint, options), name)
    options.val_data = str(write_shards(folder / "wide", np.arange(100) + 200, 1000, wide=True))
    expect(stops("expected tokens below 256, found 296", probe.probe, checkpoint, options), "wide")
    options.val_data = str(data / "val_[01].bin")
    samples = probe.read_samples(options.val_data, T, 3 * T + 1)
    expect(len(samples) == 4, f"samples that hold {3 * T + 1} tokens: {len(samples)}")
    expect(stops("expected at least seq + 1 = 301", probe.read_samples, data, 300, 10), "few")
    usage, probe.shutil.disk_usage = shutil.disk_usage, lambda _: argparse.Namespace(free=4096)
    expect(stops("-> TMPDIR=another disk", probe.probe, checkpoint, options), "a full disk")
    probe.shutil.disk_usage = usage
    flags, root, probe.ROOT = {"val_data": "", "data": ""}, probe.ROOT, folder
    expect(stops("-> make shard", probe.validation_data, "A", flags, None, folder), "no shard")
    probe.ROOT = root
    flags["data"] = str(data / "train_0.bin")
    expect(stops("-> --val-data SHARDS", probe.validation_data, "A", flags, None, folder),
           "no validation data")


def check_study(trainer, folder):
    """A study with probes of the built-in stories: every run gets one, those that are there stay,
    and a probe that fails is reported and stops no other."""
    study, words = folder / "study", ["--mode", "SPAN", "--seed", "1,2", "--layers", "2", "--batch",
                                      "4", "--micro-batch", "4", "--val-tokens", "64", *SMALL[:-2],
                                      "--jobs", "2", "--probe", "--probe-tokens", "64"]
    (study / "bin").mkdir(parents=True)
    shutil.copy2(trainer, study / "bin/SPAN")

    def ablate(*more):
        return run(sys.executable, "dev/ablate.py", "--out", study, *more)

    done = ablate(*words)
    said = done.stdout + done.stderr
    probes = sorted(study.glob("runs/*/probe.json"))
    expect(done.returncode == 0 and len(probes) == 2, f"a study with probes: {probes} {said}")
    page = (study / "index.html").read_text()
    titles = ("Similarity by distance", "EDR", "Condition of the ffn", "Gradients by layer over")
    expect(all(title in page for title in titles), "the pictures are on the page")
    before = [path.stat().st_mtime_ns for path in probes]
    probes[0].unlink()
    done = ablate()
    expect(done.returncode == 0 and probes[0].exists()
           and probes[1].stat().st_mtime_ns == before[1], f"one probe is lacking: {done.stderr}")
    done = ablate(*words[:-1], "32")
    tokens = [json.loads(path.read_text())["tokens"] for path in probes]
    expect(done.returncode == 0 and tokens == [32, 32], f"of 32 tokens: {tokens} {done.stderr}")
    probes[0].unlink()
    damaged = next(study.glob("runs/SPAN-seed1/step_*/model.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done, words = ablate(), "SPAN-seed1 could not be probed"
    expect(done.returncode == 1 and "1 runs could not be probed" in done.stderr
           and words in (study / "index.html").read_text(), f"damaged: {done.stderr}")


def main():
    trainers = dict(word.split("=", 1) for word in sys.argv[1:])
    test_formulas()
    test_known()
    test_labels()
    if trainers:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            check_runs(trainers, folder)
            check_refusals(folder)
            check_study(trainers["SPAN"], folder)
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
