#!/usr/bin/env python3
"""What a trained model does inside, in numbers and pictures: how alike its layers are, how much of the ffn's width they use, how well conditioned its matrices are.

    python3 dev/probe.py runs/A [runs/B ...]           writes probe.json into each run's folder, and probe_*.png into the first one's, the runs side by side

A run is a folder of ./train_gpt, whose last checkpoint is probed, or one of its checkpoints (runs/A/step_00000100). The trainer writes activations of validation tokens
and gradients into a file (./train_gpt --from RUN --probe FILE), which is gigabytes for large models and goes when the numbers are there, unless --keep.
Everything is computed in float64, in blocks of tokens. Ranks need more tokens than the ffn is wide, ten times as many to be known well.

Equations are those of SpanNorm (figures 5, 6 and 8 to 10), and of what it cites where it leaves them open: each function says which. Needs numpy, scipy and matplotlib.
"""
import argparse
import importlib.util
import json
import pathlib
import re
import struct
import subprocess
import sys

import numpy as np
from scipy.linalg import eigvalsh, svdvals

from ablation.study import die_with_parent, read_json, write_json

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSION = 1
ELEMENTS = 1 << 24                            # of float64 in work at a time
TYPES = {"F32": "<f4", "F64": "<f8"}


def stop(what, hint):
    sys.exit(f"error: {what}\n  -> {hint}")


# ---------------------------------------------------------------------------------------------------------------- the formulas

def blocks(rows, width):
    """Slices of so many rows that ELEMENTS values are in each."""
    step = max(1, ELEMENTS // width)
    return [slice(first, first + step) for first in range(0, rows, step)]


def rms(x):
    """sqrt(mean(x^2)) over all values of x."""
    return np.sqrt(sum(np.sum(np.square(x[rows], dtype=float)) for rows in blocks(*x.shape)) / x.size)


def similarity(streams):
    """S[i, j] = mean over tokens t of cos(h_i,t, h_j,t), h_i the stream that leaves block i (SpanNorm figure 5). A vector of zeros is like no other: its cosine is 0."""
    count, (tokens, width) = len(streams), streams[0].shape
    found = np.zeros((count, count))
    for rows in blocks(tokens, count * width):
        h = np.stack([np.asarray(stream[rows], float) for stream in streams])
        norms = np.linalg.norm(h, axis=2, keepdims=True)
        h = np.divide(h, norms, out=np.zeros_like(h), where=norms > 0).reshape(count, -1)
        found += h @ h.T
    return found / tokens


def by_distance(s):
    """s(k) = mean over i of S[i, i + k], pairs of layers unweighted (SpanNorm figure 6, FuseNorm figure 12)."""
    return np.array([np.mean(np.diagonal(s, k)) for k in range(len(s))])


def covariance(x):
    """sum over tokens of (x_t - mean)(x_t - mean)^T / (tokens - 1)"""
    tokens, width = x.shape
    mean = sum(np.sum(x[rows], axis=0, dtype=float) for rows in blocks(tokens, width)) / tokens
    found = np.zeros((width, width))
    for rows in blocks(tokens, width):
        centred = x[rows] - mean
        found += centred.T @ centred
    return found / max(1, tokens - 1)


def eigenvalues(symmetric):
    """Of a positive semidefinite matrix, largest first; what rounding leaves of a zero is a zero."""
    found = eigvalsh(symmetric)[::-1]
    return np.where(found > found[0] * len(found) * np.finfo(float).eps, found, 0)


def hard_rank(values):
    """(sum l)^2 / sum l^2 of the eigenvalues l of a covariance: their participation ratio. SpanNorm figure 8 plots it over the width (after Jha and Reagen, whom it cites).
    Their code raises eigenvalues to 1e-12 at least, which gives a layer that is zero all ranks; here it has none."""
    return np.sum(values) ** 2 / np.sum(values ** 2) if np.any(values) else 0.0


def soft_rank(values):
    """exp(-sum p ln p), p = l / sum l: the exponential of the spectrum's entropy (Roy and Vetterli 2007, of singular values; SpanNorm figure 8)."""
    p = values[values > 0] / np.sum(values)
    return np.exp(-np.sum(p * np.log(p))) if len(p) else 0.0


def harmonic(a, b):
    """2ab / (a + b); with the two ranks over the width, times 100, SpanNorm's EDR as it is most likely meant (figure 8: 30.66 where the hard rank is 0.23)."""
    return np.divide(2 * a * b, a + b, out=np.zeros_like(a), where=a + b > 0)


def geometric(a, b):
    """sqrt(ab): the other mean that EDR may be."""
    return np.sqrt(a * b)


def embedding_spectrum(e, centred):
    """Eigenvalues of E^T E / V, largest first, over their median (SpanNorm figure 9); centred: of the covariance of the rows instead."""
    values = eigenvalues(covariance(e) if centred else sum(np.asarray(e[rows], float).T @ np.asarray(e[rows], float) for rows in blocks(*e.shape)) / len(e))
    return values / np.median(values) if np.median(values) > 0 else np.full_like(values, np.nan)


def condition(w):
    """sigma_max / sigma_min (SpanNorm figure 10); infinite where the smallest singular value is zero but for rounding."""
    values = svdvals(np.asarray(w, float))
    return values[0] / values[-1] if values[-1] > values[0] * max(w.shape) * np.finfo(float).eps else np.inf


# ---------------------------------------------------------------------------------------------------------------- a probe

def read_tensors(path):
    """Name -> array of a safetensors file, read when it is touched."""
    with open(path, "rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(n))
    wrong = [name for name, entry in header.items() if name != "__metadata__" and entry["dtype"] not in TYPES]
    if wrong:
        stop(f"{path}: {wrong[0]} is of type {header[wrong[0]]['dtype']}, expected F32 or F64", "a file that ./train_gpt has written")
    return {name: np.memmap(path, TYPES[entry["dtype"]], "r", 8 + n + entry["data_offsets"][0], tuple(entry["shape"]))
            for name, entry in header.items() if name != "__metadata__"}


def ranks(x):
    """Hard and soft rank over the width."""
    values = eigenvalues(covariance(x))
    return hard_rank(values) / len(values), soft_rank(values) / len(values)


def ffn_matrices(weights, layer):
    """gate, up, both as one [2 ffn, width], and down, of a dense ffn; without a gate up alone."""
    gate, up, down = (weights.get(f"model.layers.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
    return {"gate": gate, "up": up, "fused": np.concatenate([gate, up]) if gate is not None else None, "down": down}


def measure(dump, weights, say=lambda text: None):
    """The numbers of a probe: dump, weights: name -> array, as --probe and a checkpoint have them. What does not exist is NaN."""
    layers = sum(name.endswith(".stream") for name in dump) - 1
    tokens, width = dump["embedded.stream"].shape
    places = ["embedded"] + [f"layers.{layer}" for layer in range(layers)]
    found = {"layers": layers, "width": width, "ffn": max((x.shape[1] for name, x in dump.items() if name.endswith(".hidden")), default=0), "tokens": tokens}
    say("similarity")
    found["similarity"] = similarity([dump[f"{place}.stream"] for place in places[1:]])
    found["similarity_by_distance"] = by_distance(found["similarity"])
    hard, soft = ({site: np.full(layers, np.nan) for site in ("hidden", "up")} for _ in range(2))
    conditions = {part: np.full(layers, np.nan) for part in ("gate", "up", "fused", "down")}
    for layer in range(layers):
        say(f"layer {layer} of {layers}")
        for site in hard:
            if f"layers.{layer}.{site}" in dump:
                hard[site][layer], soft[site][layer] = ranks(dump[f"layers.{layer}.{site}"])
        for part, matrix in ffn_matrices(weights, layer).items():
            conditions[part][layer] = condition(matrix) if matrix is not None else np.nan
    found |= {"hard_rank": hard, "soft_rank": soft}
    for mean in (harmonic, geometric):
        found[f"edr_{mean.__name__}"] = {site: 100 * np.mean(there) if len(there := mean(hard[site], soft[site])[np.isfinite(hard[site])]) else np.nan for site in hard}
    say("embedding")
    embedding = weights["model.embed_tokens.weight"]
    found["embedding_spectrum"] = {"gram": embedding_spectrum(embedding, False), "centred": embedding_spectrum(embedding, True)}
    found["condition"] = conditions
    found["residual_rms"] = np.array([rms(dump[f"{place}.stream"]) for place in places])
    found["gradient_rms"] = np.array([rms(dump[f"{place}.gradient"]) for place in places])
    return found


def plain(value):
    """As JSON has it: lists, and null for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value]
    return value if isinstance(value, (str, int)) else float(value) if np.isfinite(value) else None


# ---------------------------------------------------------------------------------------------------------------- runs

def find_checkpoint(run):
    """The checkpoint to probe: the folder itself, or the last one in it."""
    run = pathlib.Path(run)
    if (run / "manifest.json").is_file():
        return run
    found = sorted(path for path in run.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))
    if not found:
        stop(f"{run}: expected the folder of a run or of a checkpoint, found no checkpoint", "ls runs/")
    return max(found, key=lambda path: int(path.name[5:]))


def find_trainer(config, options):
    if options.trainer:
        return options.trainer
    made = subprocess.run(["make", "-s", "-C", str(ROOT), "--no-print-directory", "binary", f"NORM_MODE={config['norm_mode']}", f"PREC={config['precision']}"], capture_output=True, text=True)
    if made.returncode:
        stop(f"the trainer of {config['norm_mode']} was not built:\n{made.stderr.strip()}", "--trainer PATH")
    return str(ROOT / made.stdout.split()[-1])


def make_dump(checkpoint, config, options):
    """The file with the activations: what is there of as many tokens, or a new one."""
    path = pathlib.Path(options.dump or checkpoint / "probe.safetensors")
    if path.is_file() and (options.dump or not options.tokens or len(read_tensors(path)["embedded.stream"]) == -(-options.tokens // int(config["flags"]["seq"])) * int(config["flags"]["seq"])):
        return path
    if options.dump:
        stop(f"--dump {path}: no such file", f"./train_gpt --from {checkpoint} --probe {path}")
    path.unlink(missing_ok=True)
    command = [find_trainer(config, options), "--from", str(checkpoint), "--probe", str(path), "--probe-tokens", str(options.tokens)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", preexec_fn=die_with_parent)
    for line in re.findall(r"^note:.*\n.*->.*", done.stdout, re.M):
        print(line)
    if done.returncode:
        stop(f"{' '.join(command)}: status {done.returncode}\n{(done.stdout + done.stderr).strip()[-800:]}", "see above")
    return path


def show(text):
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def probe(run, options):
    """Probes one run and writes its probe.json; returns it."""
    checkpoint = find_checkpoint(run)
    config = read_json(checkpoint / "config.json")
    show(f"{run}: activations")
    path = make_dump(checkpoint, config, options)
    found = measure(read_tensors(path), read_tensors(checkpoint / "model.safetensors"), lambda what: show(f"{run}: {what}"))
    if found["tokens"] <= found["ffn"]:
        print(f"note: {found['tokens']} tokens of an ffn of {found['ffn']} channels: ranks are at most {found['tokens'] - 1}\n  -> more --tokens, or more validation data")
    found = plain({"version": VERSION, "norm_mode": config["norm_mode"], "step": int(checkpoint.name[5:]) if checkpoint.name.startswith("step_") else None, "checkpoint": str(checkpoint), "tokens_asked": options.tokens} | found)
    write_json(pathlib.Path(run) / "probe.json", found)
    if not options.keep and not options.dump:
        path.unlink()
    show("")
    edr = found["edr_harmonic"]["hidden"]
    print(f"{run}: {found['norm_mode']} at step {found['step']}, {found['tokens']} tokens: similarity of neighbours {found['similarity_by_distance'][min(1, found['layers'] - 1)]:.3f}, of first and last layer "
          f"{found['similarity_by_distance'][-1]:.3f}" + (f", EDR {edr:.1f}" if edr is not None else ""))
    return found


def labels(runs):
    """The shortest ends of the paths that tell the runs apart; of a checkpoint with its run."""
    paths = [pathlib.Path(run).absolute() for run in runs]
    least = 1 + any(path.name.startswith("step_") for path in paths)
    for parts in range(least, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="folders of runs, or of checkpoints")
    parser.add_argument("--tokens", type=int, default=0, help="how many to look at; default: ten for each channel of the ffn, at most the validation data")
    parser.add_argument("--trainer", help="the program that trained it; default: make builds it")
    parser.add_argument("--dump", help="a file that --probe has written, for one run")
    parser.add_argument("--keep", action="store_true", help="leave the file with the activations in the checkpoint's folder")
    parser.add_argument("--no-pictures", action="store_true", help="numbers alone")
    options = parser.parse_args()
    if options.dump and len(options.runs) > 1:
        stop("--dump is of one run", "one run at a time")
    if options.tokens < 0:
        stop(f"--tokens {options.tokens}: expected 1 or more", "--tokens 8192")
    if not options.no_pictures and importlib.util.find_spec("matplotlib") is None:
        stop("expected the Python package matplotlib", "python3 -m pip install matplotlib, or --no-pictures")
    found = [probe(run, options) for run in options.runs]
    if not options.no_pictures:
        from ablation import inside
        for name, *_ in inside.draw_probes(inside.arms_of_probes(labels(options.runs), found),
                                           options.runs[0], "probe_"):
            print(f"wrote {options.runs[0]}/{name}")


if __name__ == "__main__":
    main()
