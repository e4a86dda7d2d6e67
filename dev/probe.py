#!/usr/bin/env python3
"""What a trained model does inside, in numbers and pictures: how alike its layers are, how much of
the ffn's width they use, how well conditioned its matrices are.

    python3 dev/probe.py runs/A [runs/B ...]           writes probe.json into each run's folder, and
                                                       probe_*.png into the first one's

A run is a folder of ./train_gpt, whose last checkpoint is probed, or one of its checkpoints
(runs/A/step_00000100). dev/export_hf.py makes a PyTorch model of it. Validation tokens go through
the model, forward and backward, and hooks take the streams, their gradients and the activations of
the ffn. These lie in a temporary folder ($TMPDIR), gigabytes for large models, until the numbers
are there. Everything else is computed in float64, in blocks of tokens. Ranks need more tokens than
the ffn is wide, ten times as many to be known well.

Equations are those of SpanNorm (figures 5, 6 and 8 to 10), and of the papers it cites: each
function says which. Needs numpy, scipy, matplotlib, and the packages of dev/export_hf.py.
"""
import argparse
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile

import numpy as np
from scipy.linalg import eigvalsh, svdvals

from ablation.study import die_with_parent, need, read_json, write_json

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSION = 1
ELEMENTS = 1 << 24                            # of float64 computed with at a time
MICRO_BATCH = 2048                            # tokens that go through the model at a time
TYPES = {"F32": "<f4", "F64": "<f8"}
SHARDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}        # magic, version (data/README.md)


def stop(what, hint):
    sys.exit(f"error: {what}\n  -> {hint}")


# ------------------------------------------------------------------------------------ the formulas

def blocks(rows, width):
    """Slices of so many rows that ELEMENTS values are in each."""
    step = max(1, ELEMENTS // width)
    return [slice(first, first + step) for first in range(0, rows, step)]


def rms(x):
    """sqrt(mean(x^2)) over all values of x."""
    squares = sum(np.sum(np.square(x[rows], dtype=float)) for rows in blocks(*x.shape))
    return np.sqrt(squares / x.size)


def similarity(streams):
    """S[i, j] = mean over tokens t of cos(h_i,t, h_j,t), h_i the stream that leaves block i
    (SpanNorm figure 5). The cosine of a vector of zeros is 0."""
    count, (tokens, width) = len(streams), streams[0].shape
    found = np.zeros((count, count))
    for rows in blocks(tokens, count * width):
        h = np.stack([np.asarray(stream[rows], float) for stream in streams])
        norms = np.linalg.norm(h, axis=2, keepdims=True)
        h = np.divide(h, norms, out=np.zeros_like(h), where=norms > 0).reshape(count, -1)
        found += h @ h.T
    return found / tokens


def by_distance(s):
    """s(k) = mean over i of S[i, i + k], pairs of layers unweighted (SpanNorm figure 6, FuseNorm
    figure 12)."""
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
    """Eigenvalues of a positive semidefinite matrix, largest first. Those that are zero but for
    rounding are set to zero."""
    found = eigvalsh(symmetric)[::-1]
    return np.where(found > found[0] * len(found) * np.finfo(float).eps, found, 0)


def hard_rank(values):
    """(sum l)^2 / sum l^2 of the eigenvalues l of a covariance: their participation ratio. SpanNorm
    figure 8 plots it over the width (after Jha and Reagen, whom it cites). Their code raises
    eigenvalues to 1e-12 at least, which gives a layer of zeros full rank; here its rank is 0."""
    return np.sum(values) ** 2 / np.sum(values ** 2) if np.any(values) else 0.0


def soft_rank(values):
    """exp(-sum p ln p), p = l / sum l: the exponential of the spectrum's entropy (Roy and Vetterli
    2007, of singular values; SpanNorm figure 8)."""
    p = values[values > 0] / np.sum(values)
    return np.exp(-np.sum(p * np.log(p))) if len(p) else 0.0


def harmonic(a, b):
    """2ab / (a + b). With the two ranks over the width, times 100, it is SpanNorm's EDR as it is
    most likely meant (figure 8: 30.66 where the hard rank is 0.23)."""
    return np.divide(2 * a * b, a + b, out=np.zeros_like(a), where=a + b > 0)


def geometric(a, b):
    """sqrt(ab): the other mean that EDR may be."""
    return np.sqrt(a * b)


def embedding_spectrum(e, centred):
    """Eigenvalues of E^T E / V, largest first, over their median (SpanNorm figure 9); centred: of
    the covariance of the rows instead."""
    if centred:
        values = eigenvalues(covariance(e))
    else:
        parts = (np.asarray(e[rows], float) for rows in blocks(*e.shape))
        values = eigenvalues(sum(part.T @ part for part in parts) / len(e))
    return values / np.median(values) if np.median(values) > 0 else np.full_like(values, np.nan)


def condition(w):
    """sigma_max / sigma_min (SpanNorm figure 10). Infinite if the smallest singular value is zero
    but for rounding."""
    values = svdvals(np.asarray(w, float))
    least = values[0] * max(w.shape) * np.finfo(float).eps
    return values[0] / values[-1] if values[-1] > least else np.inf


# ------------------------------------------------------------------------------------ the numbers

def ranks(x):
    """Hard and soft rank over the width."""
    values = eigenvalues(covariance(x))
    return hard_rank(values) / len(values), soft_rank(values) / len(values)


def ffn_matrices(weights, layer):
    """gate, up, both as one [2 ffn, width], and down, of a dense ffn; without a gate up alone."""
    name = f"model.layers.{layer}.mlp.{{}}_proj.weight"
    gate, up, down = (weights.get(name.format(part)) for part in ("gate", "up", "down"))
    fused = np.concatenate([gate, up]) if gate is not None else None
    return {"gate": gate, "up": up, "fused": fused, "down": down}


def measure(dump, weights, say=lambda text: None):
    """The numbers of probe.json. dump: name -> array [tokens, width], as take_activations makes it;
    weights: name -> array, as a checkpoint has them. A number that does not exist is NaN."""
    layers = sum(name.endswith(".stream") for name in dump) - 1
    tokens, width = dump["embedded.stream"].shape
    places = ["embedded"] + [f"layers.{layer}" for layer in range(layers)]
    ffn = max((x.shape[1] for name, x in dump.items() if name.endswith(".hidden")), default=0)
    found = {"layers": layers, "width": width, "ffn": ffn, "tokens": tokens}
    say("similarity")
    found["similarity"] = similarity([dump[f"{place}.stream"] for place in places[1:]])
    found["similarity_by_distance"] = by_distance(found["similarity"])
    hard, soft = ({site: np.full(layers, np.nan) for site in ("hidden", "up")} for _ in range(2))
    parts = ("gate", "up", "fused", "down")
    conditions = {part: np.full(layers, np.nan) for part in parts}
    for layer in range(layers):
        say(f"layer {layer} of {layers}")
        for site in hard:
            if f"layers.{layer}.{site}" in dump:
                hard[site][layer], soft[site][layer] = ranks(dump[f"layers.{layer}.{site}"])
        for part, matrix in ffn_matrices(weights, layer).items():
            conditions[part][layer] = condition(matrix) if matrix is not None else np.nan
    found |= {"hard_rank": hard, "soft_rank": soft}
    dense = {site: np.isfinite(hard[site]) for site in hard}
    for mean in (harmonic, geometric):
        found[f"edr_{mean.__name__}"] = {
            site: 100 * np.mean(mean(hard[site], soft[site])[dense[site]])
            if np.any(dense[site]) else np.nan for site in hard}
    say("embedding")
    embedding = weights["model.embed_tokens.weight"]
    found["embedding_spectrum"] = {"gram": embedding_spectrum(embedding, False),
                                   "centred": embedding_spectrum(embedding, True)}
    found["condition"] = conditions
    for key, what in (("residual_rms", "stream"), ("gradient_rms", "gradient")):
        found[key] = np.array([rms(dump[f"{place}.{what}"]) for place in places])
    return found


def plain(value):
    """As JSON has it: lists, and null for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value]
    if isinstance(value, (str, int)):
        return value
    return float(value) if np.isfinite(value) else None


# ------------------------------------------------------------------------------------- the samples

def run_or_stop(command, hint):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          errors="replace", preexec_fn=die_with_parent)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-800:]
        stop(f"{' '.join(map(str, command))}: status {done.returncode}\n{said}", hint)


def validation_data(run, flags, val_data, folder):
    """The path of the validation shards: asked for, or the run's own. The built-in corpus is
    written into the folder."""
    path = val_data or flags["val_data"] or flags["data"]
    if not path:
        shard = ROOT / "build/shard"
        if not shard.exists():
            stop(f"{run} was trained on the built-in stories, which are not on the disk",
                 "make shard, or --val-data SHARDS")
        run_or_stop([shard, "--out", folder / "stories", "--stories", "1"], "make shard")
        return folder / "stories"
    if not val_data and not flags["val_data"] and not os.path.isdir(path):
        stop(f"{run}: expected validation data, found that its data is {path}", "--val-data SHARDS")
    return path


def list_shards(path):
    """A shard, those of a folder (its *val*.bin) or of a pattern, in the order of their names."""
    inside = f"{glob.escape(str(path))}/*val*.bin"
    found = [path] if os.path.isfile(path) else glob.glob(inside if os.path.isdir(path) else path)
    if not found:
        stop(f"{path}: expected a shard, a folder with *val*.bin or a pattern, found no file",
             "--val-data SHARDS")
    return sorted(found)


def read_shard(path):
    """The tokens of a shard (data/README.md), read from the disk when they are used."""
    header = np.fromfile(path, "<i4", 256)
    kind = SHARDS.get(tuple(header[:2].tolist()))
    bytes_expected = kind and 1024 + int(header[2]) * np.dtype(kind).itemsize
    if not kind or os.path.getsize(path) != bytes_expected:
        stop(f"{path}: expected a shard, found another file, or a part of one",
             "make shard && ./shard --out DIR your.txt, then --val-data DIR")
    return np.memmap(path, kind, "r", 1024, (int(header[2]),))


def read_samples(path, seq, tokens):
    """The first samples of the data, as many as hold these tokens: [samples, seq + 1]. As in the
    trainer's validation the last token of a sample, only a target, is the first of the next."""
    shards = [read_shard(shard) for shard in list_shards(path)]
    there = (sum(map(len, shards)) - 1) // seq
    count = min(-(-tokens // seq), there)
    if count < 1:
        stop(f"{path}: expected at least seq + 1 = {seq + 1} tokens", "--val-data with more")
    if there * seq < tokens:
        print(f"note: the validation data has {there * seq} tokens, a probe would have {tokens}\n"
              "  -> --val-data with more")
    pieces, left = [], count * seq + 1
    for shard in shards:
        pieces.append(shard[:left])
        left -= len(pieces[-1])
    return np.lib.stride_tricks.sliding_window_view(np.concatenate(pieces), seq + 1)[::seq]


# ------------------------------------------------------------------------------------- activations

def read_tensors(path):
    """Name -> array of a safetensors file, read when it is touched."""
    with open(path, "rb") as file:
        (n,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(n))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in TYPES:
            stop(f"{path}: {name} is of type {entry['dtype']}, expected F32 or F64",
                 "a file that ./train_gpt has written")
    return {name: np.memmap(path, TYPES[entry["dtype"]], "r", 8 + n + entry["data_offsets"][0],
                            tuple(entry["shape"])) for name, entry in header.items()}


def load_model(checkpoint, folder):
    """The PyTorch model of a checkpoint, exported into the folder, without weight gradients."""
    import torch
    import transformers
    import modeling_norm
    export = [sys.executable, ROOT / "dev/export_hf.py", checkpoint, folder]
    run_or_stop(export, "see above")
    transformers.logging.disable_progress_bar()
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    place = modeling_norm if name == "NormForCausalLM" else transformers
    model = getattr(place, name).from_pretrained(folder).eval().requires_grad_(False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def dense_ffn(layer):
    """The modules of a block whose output is the up projection as the activation function reads it,
    and whose input is the down projection's. None of a block with routed experts."""
    import torch
    mlp = getattr(layer, "mlp", None)
    up, down = (getattr(mlp, ours, getattr(mlp, gpt2, None))
                for ours, gpt2 in (("up_proj", "c_fc"), ("down_proj", "c_proj")))
    norm = getattr(mlp, "hidden_norm", None)              # SDD and nGPT: over gate and up
    if norm is not None and not isinstance(norm, torch.nn.Identity):
        up = norm
    return (up, down) if down is not None else None


def watch(model, seen):
    """Hooks the model, so that each forward puts into seen, name -> tensor [B, T, width]:

        embedded.stream                    the stream into block 0
        layers.3.stream                    out of block 3
        layers.3.up, layers.3.hidden       of a dense ffn: the up projection as the activation
                                           function reads it, and the down projection's input

    After a backward the streams have their gradients."""
    import torch

    def embedded(module, inputs):
        seen["embedded.stream"] = inputs[0].detach().requires_grad_()
        return seen["embedded.stream"], *inputs[1:]

    def leaves(name):
        def hook(module, inputs, output):
            seen[name] = output[0] if isinstance(output, tuple) else output
            seen[name].retain_grad()
        return hook

    def passes(name, entering):
        def hook(module, inputs, output):
            seen[name] = (inputs[0] if entering else output).detach()
        return hook

    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    layers[0].register_forward_pre_hook(embedded)
    for l, layer in enumerate(layers):
        layer.register_forward_hook(leaves(f"layers.{l}.stream"))
        if ffn := dense_ffn(layer):
            ffn[0].register_forward_hook(passes(f"layers.{l}.up", entering=False))
            ffn[1].register_forward_hook(passes(f"layers.{l}.hidden", entering=True))


def split_rows(seen):
    """Name -> array [tokens, width] of one micro-batch: what watch has seen, and of each stream the
    gradient. The up projection's columns are the last ones of a norm over gate and up."""
    rows = dict(seen)
    for name, tensor in seen.items():
        if name.endswith(".stream"):
            rows[name.replace(".stream", ".gradient")] = tensor.grad
        if name.endswith(".up"):
            rows[name] = tensor[..., -seen[name.replace(".up", ".hidden")].shape[-1]:]
    return {name: tensor.detach().flatten(0, -2).float().cpu().numpy()
            for name, tensor in rows.items()}


def take_activations(model, samples, folder, say=lambda text: None):
    """Goes through the samples, forward and backward. Returns name -> array [tokens, width], kept
    in files of the folder: the tensors that watch names, and for layers.3.stream also
    layers.3.gradient, dL/d(stream), where L is the sum of the tokens' cross-entropies (nats)."""
    import torch
    seen, dump, T = {}, {}, samples.shape[1] - 1
    watch(model, seen)
    micro = max(1, MICRO_BATCH // T)
    for first in range(0, len(samples), micro):
        say(f"activations of {first * T} tokens of {len(samples) * T}")
        batch = torch.from_numpy(samples[first:first + micro].astype(np.int64)).to(model.device)
        logits = model(batch[:, :-1], use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(),
                                          reduction="sum").backward()
        for name, rows in split_rows(seen).items():
            if name not in dump:
                shape = (len(samples) * T, rows.shape[1])
                dump[name] = np.memmap(folder / name, "f4", "w+", shape=shape)
            dump[name][first * T:first * T + len(rows)] = rows
    return dump


def check_room(folder, tokens, columns):
    needed, free = 4 * tokens * columns, shutil.disk_usage(folder).free
    if needed > free:
        stop(f"the activations take {needed >> 20} MiB, the disk of {folder} has {free >> 20} free",
             "TMPDIR=another disk, or fewer --tokens")


def show(text):
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def probe_checkpoint(run, checkpoint, options):
    """The numbers of one checkpoint (measure)."""
    flags = read_json(checkpoint / "config.json")["flags"]
    weights = read_tensors(checkpoint / "model.safetensors")
    vocabulary, width = weights["model.embed_tokens.weight"].shape
    layers = int(flags["layers"])
    ffns = [len(up) for layer in range(layers)
            if (up := weights.get(f"model.layers.{layer}.mlp.up_proj.weight")) is not None]
    with tempfile.TemporaryDirectory(prefix="probe-") as name:
        folder = pathlib.Path(name)
        path = validation_data(run, flags, options.val_data, folder)
        tokens = options.tokens or 10 * max([width, *ffns])
        samples = read_samples(path, int(flags["seq"]), tokens)
        if samples.max() >= vocabulary:
            stop(f"{path}: expected tokens below {vocabulary}, found {samples.max()}",
                 "--val-data of the run's tokenizer")
        check_room(folder, samples[:, 1:].size, 2 * width * (layers + 1) + 2 * sum(ffns))
        show(f"{run}: the model")
        model = load_model(checkpoint, folder / "model")
        dump = take_activations(model, samples, folder, lambda what: show(f"{run}: {what}"))
        return measure(dump, weights, lambda what: show(f"{run}: {what}"))


# -------------------------------------------------------------------------------------------- runs

def find_checkpoint(run):
    """The checkpoint to probe: the folder itself, or the last one in it."""
    run = pathlib.Path(run)
    if (run / "manifest.json").is_file():
        return run
    found = [path for path in run.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    if not found:
        stop(f"{run}: expected the folder of a run or of a checkpoint, found no checkpoint",
             "ls runs/")
    return max(found, key=lambda path: int(path.name[5:]))


def probe(run, options):
    """Probes one run and writes its probe.json; returns it."""
    checkpoint = find_checkpoint(run)
    named = checkpoint.name.startswith("step_")
    found = {"version": VERSION, "norm_mode": read_json(checkpoint / "config.json")["norm_mode"],
             "step": int(checkpoint.name[5:]) if named else None, "checkpoint": str(checkpoint),
             "tokens_asked": options.tokens}
    found = plain(found | probe_checkpoint(run, checkpoint, options))
    show("")
    if found["tokens"] <= found["ffn"]:
        print(f"note: {found['tokens']} tokens of an ffn of {found['ffn']} channels: ranks are at "
              f"most {found['tokens'] - 1}\n  -> more --tokens, or more validation data")
    write_json(pathlib.Path(run) / "probe.json", found)
    edr, near = found["edr_harmonic"]["hidden"], found["similarity_by_distance"]
    print(f"{run}: {found['norm_mode']} at step {found['step']}, {found['tokens']} tokens: "
          f"similarity of neighbours {near[min(1, found['layers'] - 1)]:.3f}, "
          f"of first and last layer {near[-1]:.3f}"
          + (f", EDR {edr:.1f}" if edr is not None else ""))
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
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, or of checkpoints")
    parser.add_argument("--tokens", type=int, default=0, help="how many to look at; default: ten "
                        "for each channel of the ffn, at most the validation data")
    parser.add_argument("--val-data", help="a shard, a pattern or a folder of shards; default: "
                        "the run's validation data")
    parser.add_argument("--no-pictures", action="store_true", help="numbers alone")
    options = parser.parse_args()
    if options.tokens < 0:
        stop(f"--tokens {options.tokens}: expected 1 or more", "--tokens 8192")
    need(["torch", "transformers"] + ["matplotlib"] * (not options.no_pictures))
    # SIGTERM too removes the temporary folder of activations
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    found = [probe(run, options) for run in options.runs]
    if not options.no_pictures:
        from ablation import inside
        for name, *_ in inside.draw_probes(inside.arms_of_probes(labels(options.runs), found),
                                           options.runs[0], "probe_"):
            print(f"wrote {options.runs[0]}/{name}")


if __name__ == "__main__":
    main()
