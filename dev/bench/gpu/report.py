#!/usr/bin/env python3
"""report.py: what dev/gpu_check.sh left in a folder, as report.json and report.md there (and on
stdout). Only the standard library.

A run's time is the median of its steps but for the first WARMUP. A mode's time is the median of its
runs; over PRE's: the mean over rounds of the ratio of the two runs of a round, with a 95 % interval
(Student's t over rounds). Percent of the peak: formula F1, 6 (parameters in matrix products of a
token) + 6 layers width sequence FLOP a token (causal attention counts half), over the dense
bfloat16 rate of the datasheet.
"""
import json
import math
import re
import statistics
import sys
from pathlib import Path

import layers
from layers import lines_of, number

WARMUP = 5
# 95 %, two-sided, 1.. degrees of freedom
STUDENT = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14,
           2.13]


def machine_of(folder):
    path = folder / "machine.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    gpu = [part.strip() for part in lines[0].split(",")] if len(lines) > 2 else []
    found = dict(zip(("gpu", "driver", "memory", "clock", "power"), gpu))
    return {"gpu": found.get("gpu", "none"), "driver": found.get("driver", "unknown"),
            "memory": found.get("memory", ""), "power limit": found.get("power", ""),
            "busy": lines[1] if len(lines) > 3 else "",
            "commit": lines[-2] if len(lines) > 1 else "unknown",
            "date": lines[-1] if lines else "unknown"}


def flops_per_token(flags):
    layers, width, heads, seq, vocab = (int(flags[name])
                                        for name in ("layers", "width", "heads", "seq", "vocab"))
    kv, swiglu = int(flags["kv_heads"]) or heads, flags["activation"] == "swiglu"
    hidden = int(flags["ffn"]) or (32 * math.ceil(8 * width / 3 / 32) if swiglu else 4 * width)
    attention = 2 * width * width + 2 * kv * (width // heads) * width
    experts = int(flags.get("experts", 0))
    met = int(flags["experts_per_token"]) if experts else 1  # by a token; and all of the router
    products = layers * (attention + (3 if swiglu else 2) * width * hidden * met
                         + experts * width) + vocab * width
    return 6 * products + 6 * layers * width * seq


def runs_of(folder, name):
    """One entry a run: what, model, round, its median milliseconds and spread, clock and power."""
    runs, clocks = [], layers.clocks_of(folder)
    for run in lines_of(folder / name):
        steps = run["ms"][WARMUP:]
        if not steps:
            print(f"{name}: {run['what']}, round {run['round']}: {len(run['ms'])} steps, more than "
                  f"{WARMUP} needed", file=sys.stderr)
            continue
        flags = run.get("config", {}).get("flags")
        runs.append({"what": run["what"], "model": run["model"], "round": run["round"],
                     **layers.clock_during(clocks, run),
                     "batch": int(flags["batch"]) if flags else run["batch"],
                     "steps": len(steps), "ms": statistics.median(steps), "slowest": max(steps),
                     "flops": flops_per_token(flags) if flags else None,
                     "tokens": int(flags["batch"]) * int(flags["seq"])
                     if flags else run["batch"] * run["seq"],
                     "micro": int(flags.get("micro_batch", 0)) if flags else 0,
                     "torch": run.get("torch"), "compiled": run.get("compiled"),
                     "kinds": run.get("kinds", [])})
    return runs


def ratio_to(runs, what, base):
    """Mean ratio of times over the rounds both ran in, and half of its 95 % interval (None for one
    round)."""
    time = {(run["what"], run["round"]): run["ms"] for run in runs}
    ratios = [ms / time[base, turn] for (name, turn), ms in time.items()
              if name == what and (base, turn) in time]
    if not ratios:
        return None
    half = None
    if len(ratios) > 1:
        t = STUDENT[len(ratios) - 2] if len(ratios) - 2 < len(STUDENT) else 2.0
        half = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {"mean": statistics.mean(ratios), "half": half, "rounds": len(ratios)}


def median_of(runs, name):
    values = [run[name] for run in runs if run[name] is not None]
    return statistics.median(values) if values else None


def groups_of(model, runs):
    """{title: runs}: runs of the same batch and micro-batch are comparable."""
    groups = {}
    for run in runs:
        if run["torch"]:                # has no micro-batches, and the batch of the others
            continue
        title = f"{model}, {run['batch']} sequences a step"
        if run["micro"] and run["micro"] != run["batch"]:
            title += f" in micro-batches of {run['micro']}"
        groups.setdefault(title, []).append(run)
    for title in groups:
        groups[title] += [run for run in runs if run["torch"]]
    return groups


def kinds_of(runs):
    """What the first of these runs said of kernels of two kinds, and what any said to be wrong."""
    wrong = {line for run in runs for line in run["kinds"] if " is wrong" in line}
    return [line for line in runs[0]["kinds"] if " is wrong" not in line] + sorted(wrong)


def training_of(runs, peak):
    rows = []
    # PyTorch's model is the same
    flops = next((run["flops"] for run in runs if run["flops"]), None)
    for what in dict.fromkeys(run["what"] for run in runs):
        mine = [run for run in runs if run["what"] == what]
        ms = statistics.median(run["ms"] for run in mine)
        rate = mine[0]["tokens"] / ms * 1e3
        tflops = rate * flops / 1e12 if flops else None
        rows.append({"what": what, "runs": len(mine), "steps": sum(run["steps"] for run in mine),
                     "ms": ms, "tokens_per_second": rate, "tflops": tflops,
                     "percent_of_peak": 100 * tflops / peak if tflops and peak else None,
                     "over_pre": ratio_to(runs, what, "pre"),
                     "mhz": median_of(mine, "mhz"), "watts": median_of(mine, "watts"),
                     "torch": mine[0]["torch"],
                     "compiled": mine[0]["compiled"], "kinds": kinds_of(mine)})
    return rows


def count_of(text):
    """The counts in the last line of a run of tests. If time was up before it: the failures so far,
    and None for those that passed."""
    count = re.search(r"^(\d+) passed, (\d+) failed$", text, re.MULTILINE)
    if count:
        return {"passed": int(count[1]), "failed": int(count[2])}
    return {"passed": None, "failed": len(re.findall(r"^FAILED ", text, re.MULTILINE))}


def tests_of(folder, name):
    """How many tests of each precision passed, and how each other one ended."""
    path, found = folder / name, {}
    text = path.read_text() if path.exists() else ""
    for precision, name, verdict in re.findall(r"^(\w+): (\w+): (passed|failed|crashed with status "
                                               r"\d+|timed out|not run)$", text, re.MULTILINE):
        count = found.setdefault(precision, {"passed": 0, "others": {}})
        if verdict == "passed":
            count["passed"] += 1
        else:
            count["others"][name] = verdict
    return dict(sorted(found.items()))


def trainer_of(folder):
    path = folder / "runs.txt"
    return count_of(path.read_text()) if path.exists() else None


def sanitizer_of(folder):
    path = folder / "sanitize.txt"
    words = {"0": "clean", "124": "clean until time was up", "137": "clean until time was up",
             "9": "FOUND SOMETHING"}
    found = re.findall(r"^(\w+ \w+ \w+): status (\d+)$", path.read_text(),
                       re.MULTILINE) if path.exists() else []
    return {run: words.get(status, f"status {status}") for run, status in found}


def count_text(count):
    return (f"not finished, {count['failed']} failed so far"
            if count["passed"] is None else f"{count['passed']} passed, {count['failed']} failed")


def tests_text(count):
    return (f"{count['passed']} passed, {len(count['others'])} did not"
            + "".join(f"; {name} {verdict}" for name, verdict in sorted(count["others"].items())))


def training_text(title, rows):
    text = [f"## {title}", "",
            "| | ms a step | tokens/s | TFLOP/s | % of peak | time over PRE's (95 %) | steps "
            "| MHz | W |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        over = row["over_pre"]
        ratio = ("-" if not over or row["what"] == "pre" else f"{over['mean']:.4f}"
                 + (f" ± {over['half']:.4f}" if over["half"] is not None else ", one round"))
        mode, *flags = row["what"].split(",")
        name = ", ".join([mode.upper(), *flags])
        if row["torch"]:
            name = f"PyTorch {row['torch']}" + ("" if row["compiled"] else ", not compiled")
        text.append(f"| {name} | {row['ms']:.2f} | {row['tokens_per_second']:.0f} | "
                    f"{number(row['tflops'], 0)} | {number(row['percent_of_peak'], 1)} | {ratio} | "
                    f"{row['steps']} in {row['runs']} | {number(row['mhz'], 0)} | "
                    f"{number(row['watts'], 0)} |")
    text += [""] + [f"- {row['what']}: {line}" for row in rows for line in row["kinds"]]
    return text + [""]


def machine_text(report):
    machine, found = report["machine"], report["ceilings"]
    text = [f"{machine['date']}, commit {machine['commit']}, driver {machine['driver']}, "
            f"{machine['memory']}, power limit {machine['power limit']}.", ""]
    if machine["busy"]:
        text += [f"**{machine['busy']}**", ""]
    if found["products_tflops"]:
        how = "measured" if found["measured"] else "assumed, not measured"
        text += [f"Ceilings, {how}: {found['products_tflops']:.0f} TFLOP/s, "
                 f"{found['memory_tbs']:.2f} TB/s.", ""]
    return text


def checks_text(report):
    text = [f"- the first tests, {precision}: {tests_text(count)}"
            for precision, count in report["first"].items()]
    text += [f"- tests, {precision}: {tests_text(count)}"
             for precision, count in report["tests"].items()]
    if report["runs"]:
        text.append(f"- runs of the trainer: {count_text(report['runs'])}")
    text += [f"- compute-sanitizer, {run}: {verdict}"
             for run, verdict in report["sanitizer"].items()]
    return text + [""]


def plain_ms(report, model):
    """PRE's step in the stages that train, of the batch that the timeline has."""
    title = {"gpt2-124M": "GPT-2 124M, 64 sequences a step",
             "span-740M": "740M, 16 sequences a step"}.get(model)
    rows = [row for row in report["training"].get(title, []) if row["what"] == "pre"]
    return rows[0]["ms"] if rows else None


def markdown(report):
    text = [f"# norm.c on {report['machine']['gpu']}", ""]
    text += layers.headline(report["surprises"]) + machine_text(report) + checks_text(report)
    for title, rows in report["training"].items():
        text += training_text(title, rows)
    text += layers.surprises_text(report["surprises"])
    for step in report["steps"]:
        text += layers.step_text(step, plain_ms(report, step["model"]))
    text += layers.ncu_text(report["ncu"])
    for model in dict.fromkeys(row["model"] for row in report["kernels"]):
        text += layers.layers_text(model, report["kernels"])
    return "\n".join(text)


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("error: expected the folder that dev/gpu_check.sh wrote\n"
                 "  -> python3 dev/bench/gpu/report.py build/gpu_check")
    folder = Path(sys.argv[1])
    machine = machine_of(folder)
    peaks = layers.peaks_of(machine["gpu"])
    peak = peaks and peaks[0]
    training = {}
    for model, name in (("GPT-2 124M", "train124"), ("740M", "train740"),
                        ("OLMoE 588M-3B", "trainmoe"), ("GPT-2 124M in graphs", "graph"),
                        ("GPT-2 124M beside PyTorch", "torch")):
        training.update(groups_of(model, runs_of(folder, f"{name}.jsonl")))
    kernels, ceilings = layers.kernels_of(folder, machine["gpu"])
    report = {"machine": machine, "peak_tflops": peak, "ceilings": ceilings,
              "first": tests_of(folder, "first.txt"), "tests": tests_of(folder, "tests.txt"),
              "runs": trainer_of(folder), "sanitizer": sanitizer_of(folder),
              "training": {title: training_of(runs, peak) for title, runs in training.items()},
              "surprises": layers.surprises_of(kernels),
              "steps": layers.steps_of(folder, machine["gpu"]), "ncu": layers.ncu_of(folder),
              "kernels": kernels}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
