#!/usr/bin/env python3
"""Draws the loss curves of runs from their log.jsonl: python3 dev/plot.py runs/A [runs/B ...] [-o FILE]

The picture is loss.png (norms.png) in the first run's folder, if -o does not say otherwise.
Training loss (thin, smoothed over about 1 % of the run), validation loss (dots), the corpus's entropy floor where it is known (dotted).
--norms draws the gradient norm of the FFN's matrices instead, one line per layer, as in SpanNorm's figures 3 and 7.
Needs matplotlib.
"""
import argparse
import json
import pathlib
import re
import sys

try:
    import matplotlib
except ModuleNotFoundError:
    sys.exit("error: expected matplotlib\n  -> python3 -m pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = ["-", "--", "-.", ":"]  # so that curves differ in black and white too


def read_log(run):
    """The log's lines as dictionaries; a cut last line (a run killed while writing) is left out."""
    path = pathlib.Path(run)
    path = path / "log.jsonl" if path.is_dir() else path
    if not path.is_file():
        sys.exit(f"error: {run}: expected the folder of a run, found no {path}\n  -> ls runs/")
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
        if not train:
            sys.exit(f"error: {run}: expected steps in its log, found none\n  -> train it first")
        steps, losses = zip(*train)
        axes.plot(steps, smooth(losses, max(1, len(losses) // 100)), STYLES[i % 4], color=color, lw=1, label=f"{pathlib.Path(run).name}, training")
        if val:
            axes.plot(*zip(*val), "o", color=color, ms=5, mec="black", label=f"{pathlib.Path(run).name}, validation")
        if floors:
            axes.axhline(floors[-1], color="black", ls=":", lw=1, label="entropy of the corpus" if i == 0 else None)
    axes.set_ylabel("loss, nats per token")


def draw_norms(axes, run):
    """One panel for one run; dark is the first layer, light the last."""
    log = [e for e in read_log(run) if any("mlp" in key for key in e)]
    if len(log) < 2:
        sys.exit(f"error: {run}: expected gradient norms of two steps or more, found {len(log)}\n  -> train with a smaller --norms-every")
    pattern = re.compile(r"model\.layers\.(\d+)\.mlp\..*proj\.weight")
    layers = 1 + max(int(m[1]) for e in log for key in e if (m := pattern.match(key)))
    for layer in range(layers):
        norms = [sum(v * v for key, v in e.items() if (m := pattern.match(key)) and int(m[1]) == layer) ** 0.5 for e in log]
        named = layer in (0, layers // 2, layers - 1)
        axes.plot([e["step"] for e in log], norms, STYLES[layer % 4] if named else "-", color=plt.cm.viridis(0.9 * layer / max(1, layers - 1)),
                  lw=2 if named else 0.7, marker="." if len(log) < 30 else None, label=f"layer {layer}" if named else None)
    axes.set_yscale("log")
    axes.set_title(pathlib.Path(run).name, fontsize=10)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders or log.jsonl files")
    parser.add_argument("-o", "--out")
    parser.add_argument("--norms", action="store_true", help="gradient norms per layer instead of losses")
    args = parser.parse_args()
    panels = len(args.runs) if args.norms else 1
    figure, axes = plt.subplots(1, panels, figsize=(max(8, 4 * panels), 4.5), dpi=120, sharey=True, squeeze=False)
    if args.norms:
        for panel, run in zip(axes[0], args.runs):
            draw_norms(panel, run)
        axes[0][0].set_ylabel("gradient norm of the FFN's matrices")
    else:
        draw_loss(axes[0][0], args.runs)
    for panel in axes[0]:
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    first = pathlib.Path(args.runs[0])
    out = args.out or (first if first.is_dir() else first.parent) / ("norms.png" if args.norms else "loss.png")
    figure.savefig(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
