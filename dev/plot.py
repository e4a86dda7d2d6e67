#!/usr/bin/env python3
"""Draws the loss curves of runs from their log.jsonl: python3 dev/plot.py runs/A [runs/B ...] [-o loss.png]

Training loss (thin, smoothed over about 1 % of the run), validation loss (dots), the corpus's entropy floor where it is known (dotted).
--norms draws the gradient norm of the FFN's matrices instead, one line per layer, as in SpanNorm's figures 3 and 7.
Needs matplotlib.
"""
import argparse
import json
import pathlib
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = ["-", "--", "-.", ":"]  # so that curves differ in black and white too


def read_log(run):
    """The log's lines as dictionaries; a cut last line (a run killed while writing) is left out."""
    path = pathlib.Path(run)
    path = path / "log.jsonl" if path.is_dir() else path
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def smooth(values, width):
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        out.append(total / min(i + 1, width))
    return out


def draw_loss(axes, runs):
    for i, run in enumerate(runs):
        log, color = read_log(run), f"C{i}"
        train = [(e["step"], e["loss"]) for e in log if e.get("loss") is not None]
        val = [(e["step"], e["val_loss"]) for e in log if e.get("val_loss") is not None]
        floors = [e["val_loss"] - e["val_above_floor"] for e in log if e.get("val_above_floor") is not None]
        steps, losses = zip(*train)
        axes.plot(steps, smooth(losses, max(1, len(losses) // 100)), STYLES[i % 4], color=color, lw=1, label=f"{pathlib.Path(run).name}, training")
        if val:
            axes.plot(*zip(*val), "o", color=color, ms=5, mec="black", label=f"{pathlib.Path(run).name}, validation")
        if floors:
            axes.axhline(floors[-1], color="black", ls=":", lw=1, label="entropy of the corpus" if i == 0 else None)
    axes.set_ylabel("loss, nats per token")


def draw_norms(axes, runs):
    for i, run in enumerate(runs):
        log = [e for e in read_log(run) if any("mlp" in key for key in e)]
        layers = sorted({int(m[1]) for e in log for key in e if (m := re.match(r"model\.layers\.(\d+)\.mlp.*proj\.weight", key))})
        for layer in layers:
            norms = [sum(v * v for key, v in e.items() if re.match(rf"model\.layers\.{layer}\.mlp.*proj\.weight", key)) ** 0.5 for e in log]
            shade = plt.cm.viridis(layer / max(1, layers[-1]))
            label = f"{pathlib.Path(run).name}, layer {layer}" if layer in (layers[0], layers[len(layers) // 2], layers[-1]) else None
            axes.plot([e["step"] for e in log], norms, STYLES[i % 4], color=shade, lw=1, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("gradient norm of the FFN's matrices")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders or log.jsonl files")
    parser.add_argument("-o", "--out", default="loss.png")
    parser.add_argument("--norms", action="store_true", help="gradient norms per layer instead of losses")
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    (draw_norms if args.norms else draw_loss)(axes, args.runs)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
