#!/usr/bin/env python3
"""Draws the loss curves of runs from their log.jsonl: python3 dev/plot.py runs/A [runs/B ...] [-o
FILE]

The picture is loss.png (norms.png) in the first run's folder, if -o does not say otherwise.
Training loss (thin, smoothed over about 1 % of the run), validation loss (dots), the corpus's
entropy floor where it is known (dotted, or a note if it is far below). The fall of the first steps
is cut off: the scale fits what follows the warmup, or the first tenth of the steps. --norms draws
the gradient norm of the FFN's matrices instead, one line per layer, as in SpanNorm's figures 3 and
7. Needs numpy, scipy and matplotlib.
"""
import argparse
import pathlib
import sys

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
    from ablation.pictures import diagnostics, draw_layer_norms, legend
    from ablation.stats import smooth
    from ablation.study import read_log
except ModuleNotFoundError as error:
    sys.exit(f"error: expected {error.name}\n  -> python3 -m pip install {error.name}")

STYLES = ["-", "--", "-.", ":"]  # so that curves differ in black and white too


def log_of(run):
    """The log's lines as dictionaries, of a run's folder or of the file itself."""
    path = pathlib.Path(run)
    path = path / "log.jsonl" if path.is_dir() else path
    if not path.is_file():
        sys.exit(f"error: {run}: expected the folder of a run, found no {path}\n  -> ls runs/")
    return read_log(path)


def name_of(run):
    """The name of a run's folder, or of a log that is called otherwise than log.jsonl."""
    path = pathlib.Path(run).absolute()
    return path.parent.name if path.name == "log.jsonl" else path.name


def after_warmup(log, last):
    """The first step that the scale must show: where the learning rate peaks, between a tenth and a
    quarter of the run."""
    rates = {line["step"]: line["lr"] for line in log if "loss" in line and "lr" in line}
    return min(max(0.1 * last, max(rates, key=rates.get, default=0)), 0.25 * last)


def draw_loss(axes, runs):
    seen, tops, starts, floors = [], [], [], []
    for i, run in enumerate(runs):
        log, color, name = log_of(run), f"C{i}", name_of(run)
        train = [(e["step"], e["loss"]) for e in log if e.get("loss") is not None]
        val = [(e["step"], e["val_loss"]) for e in log if e.get("val_loss") is not None]
        above = [e for e in log if e.get("val_above_floor") is not None]
        floors += [e["val_loss"] - e["val_above_floor"] for e in above[-1:]]
        if not train:
            sys.exit(f"error: {run}: expected steps in its log, found none\n  -> train it first")
        steps, losses = zip(*train)
        curve = smooth(losses, max(1, len(losses) // 100))
        axes.plot(steps, curve, STYLES[i % 4], color=color, lw=1, label=f"{name}, training")
        if val:
            axes.plot(*zip(*val), "o", color=color, ms=5, mec="black", label=f"{name}, validation")
        begin = after_warmup(log, steps[-1])
        shown = curve[np.array(steps) >= begin]
        seen += [*shown, *(loss for step, loss in val if step >= begin)]
        tops.append(np.quantile(shown, 0.98))                  # a spike does not set the scale
        starts.append(curve[0])                                # nor does a run that blew up
    low, high = min(seen), max(min(max(tops), max(starts)), min(seen))
    if floors and floors[-1] > 0.6 * low:
        low = min(low, floors[-1])
        axes.axhline(floors[-1], color="black", ls=":", lw=1, label="entropy of the corpus")
    elif floors:
        axes.text(0.98, 0.97, f"entropy of the corpus, {floors[-1]:.3f}, far below", fontsize=8,
                  transform=axes.transAxes, ha="right", va="top")
    margin = 0.05 * (high - low) or 0.05
    axes.set_ylim(low - margin, high + margin)
    axes.set_ylabel("loss, nats per token")


def draw_norms(axes, run):
    """One panel for one run; dark is the first layer, light the last."""
    log = log_of(run)
    if len(diagnostics(log)) < 2:
        sys.exit(f"error: {run}: expected gradient norms of two steps or more, found "
                 f"{len(diagnostics(log))}\n  -> train with a smaller --norms-every")
    draw_layer_norms(axes, log)
    axes.set_title(name_of(run), fontsize=10, pad=20)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 0.99), ncols=3, frameon=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders or log.jsonl files")
    parser.add_argument("-o", "--out", type=pathlib.Path,
                        help="the picture; its name's end says which kind, none: .png")
    parser.add_argument("--norms", action="store_true",
                        help="gradient norms per layer instead of losses")
    args = parser.parse_args()
    panels = len(args.runs) if args.norms else 1
    figure, axes = plt.subplots(1, panels, figsize=(max(8, 4 * panels), 4.5), dpi=120, sharey=True,
                                squeeze=False, layout="constrained")
    if args.norms:
        for panel, run in zip(axes[0], args.runs):
            draw_norms(panel, run)
        axes[0][0].set_ylabel("gradient norm of the FFN's matrices")
    else:
        draw_loss(axes[0][0], args.runs)
        legend(figure, *axes[0][0].get_legend_handles_labels())
    for panel in axes[0]:
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    first = pathlib.Path(args.runs[0])
    out = args.out or (first if first.is_dir()
                       else first.parent) / ("norms.png" if args.norms else "loss.png")
    out = out if out.suffix else out.with_suffix(".png")
    figure.savefig(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
