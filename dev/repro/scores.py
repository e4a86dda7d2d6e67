#!/usr/bin/env python3
"""The papers' tables of scores, with ours beside them.

    python3 dev/repro/scores.py S12        the runs of S12's command (the last table of RESULTS.md)

Reads the last results of --tasks from the logs of those runs (runs/S12-*, ablations/full-S12*),
keeps them in dev/repro/scores/S12.json, and prints the rows of the paper's table, each followed by
ours: the mean over seeds. It may be called while runs train. report.py draws all that is kept in
RESULTS.md. scores/tables.toml has the papers' figures.
"""
import json
import math
import pathlib
import statistics
import sys
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
from ablation.study import read_json, read_log, write_json

# flags that tell apart the runs of one claim, beside the placement
FLAGS = ("model", "init", "init_baseline", "init_std", "lr", "warmup", "width_base", "mix_ratio",
         "layers", "recompute", "seed")


def read_tables():
    with open(HERE / "scores/tables.toml", "rb") as file:
        return tomllib.load(file)["table"]


def read_run(folder):
    """What is kept of a run: placement, flags, and the last line of its log with results."""
    config, log = read_json(folder / "config.json"), read_log(folder / "log.jsonl")
    flags = config["flags"]
    last = next((line for line in reversed(log) if "task_results" in line), {})
    losses = [line["val_loss"] for line in log if line.get("val_loss") is not None]
    return {"mode": config["norm_mode"], "flags": {name: flags[name] for name in FLAGS
                                                   if name in flags},
            "step": last.get("step", 0), "steps": int(flags["steps"]),
            "results": last.get("task_results"), "average": last.get("task_average"),
            "val_loss": losses[-1] if losses else None}


def harvest(claim, root):
    """All runs of a claim, in the folders that its command names."""
    patterns = (f"runs/{claim}-*", f"ablations/full-{claim}/runs/*",
                f"ablations/full-{claim}-*/runs/*")
    return [read_run(path.parent) for pattern in patterns
            for path in sorted(root.glob(f"{pattern}/config.json"))]


def read_kept():
    """Claim -> its runs."""
    return {path.stem: read_json(path)["runs"] for path in sorted((HERE / "scores").glob("*.json"))}


def fits(run, arm):
    """Whether a run has the placement and the flags of "SPAN width-base=640"."""
    mode, *flags = arm.split()
    same = lambda have, want: have == want or number(have) == number(want) is not None
    return run["mode"] == mode and all(
        same(run["flags"].get(name.replace("-", "_")), value)
        for name, value in (word.split("=") for word in flags))


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def value_of(run, column):
    """A figure as the papers print it, or None."""
    if column == "average":
        return 100 * run["average"] if run["average"] is not None else None
    if column == "validation perplexity":
        return math.exp(run["val_loss"]) if run["val_loss"] is not None else None
    task, metric = column.split()
    value = ((run["results"] or {}).get(task) or {}).get(metric)
    return 100 * value if value is not None and metric.startswith("acc") else value


def cells(values):
    return " | ".join("" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")
                      for value in values)


def our_row(name, runs, columns):
    """The mean over the seeds of one arm."""
    found = [[value for run in runs if (value := value_of(run, column)) is not None]
             for _, column in columns]
    step, steps = min((run["step"], run["steps"]) for run in runs)
    when = (f"step {step} of {steps}" if step < steps
            else f"{len(runs)} runs" if len(runs) > 1 else "1 run")
    return (f"| {name}, here, {when} | "
            + cells([statistics.fmean(values) if values else None for values in found]) + " |")


def table_of(claim, tables):
    """The table whose columns a claim's runs are shown in: one with a row of it, or its paper's."""
    return next((table for table in tables
                 if any(claim in row[0].split() for row in table["rows"])), None) or next(
                     table for table in tables if table.get("letter") == claim[0])


def draw(claims, kept, tables):
    """Markdown lines: for each table that concerns the claims, the paper's rows and ours."""
    lines = []
    for table in tables:
        here = [claim for claim in claims if table_of(claim, tables) is table]
        if not here:
            continue
        columns, rest = table["columns"], [(claim, run) for claim in here
                                           for run in kept.get(claim, [])]
        lines += [f"**{table['where']}**", "",
                  "| | " + " | ".join(heading for heading, _ in columns) + " |",
                  "|---" * (len(columns) + 1) + "|"]
        for names, arm, figures in table["rows"]:
            names = names.split()
            if not set(names) & set(here):
                continue
            ours = [run for name in names for run in kept.get(name, []) if fits(run, arm)]
            rest = [(name, run) for name, run in rest if name not in names or run not in ours]
            padded = figures + [None] * (len(columns) - len(figures))
            lines.append(f"| {arm}, the paper{'' if figures else ': failed'} | {cells(padded)} |")
            lines += [our_row(arm, ours, columns)] if ours else []
        arms = {}
        for claim, run in rest:
            flags = " ".join(f"{name.replace('_', '-')}={value}"
                             for name, value in run["flags"].items()
                             if name != "seed" and differs(name, kept[claim]))
            arms.setdefault(f"{claim}: {run['mode']} {flags}".strip(), []).append(run)
        lines += [our_row(arm, runs, columns) for arm, runs in arms.items()] + [""]
    return lines


def differs(flag, runs):
    return len({run["flags"].get(flag) for run in runs}) > 1


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    claim, root, tables = sys.argv[1], pathlib.Path.cwd(), read_tables()
    if not any(table.get("letter") == claim[:1] for table in tables):
        sys.exit(f"error: {claim}: expected a claim such as S12\n  -> RESULTS.md lists them")
    runs = harvest(claim, root)
    if not runs:
        sys.exit(f"error: expected runs of {claim} in {root}/runs or {root}/ablations, found none\n"
                 "  -> the command of its row in the last table of dev/repro/RESULTS.md")
    write_json(HERE / f"scores/{claim}.json", {"claim": claim, "runs": runs})
    print("\n".join(draw([claim], read_kept(), tables)), end="")


if __name__ == "__main__":
    main()
