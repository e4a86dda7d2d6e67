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

WARMUP = 5
# TFLOP/s and TB/s of the datasheets, by the first of these parts that is in the name.
PEAKS = {"GH200 480GB": (989.4, 4.0), "GH200": (989.4, 4.9), "H200": (989.4, 4.8),
         "H100 80GB HBM3": (989.4, 3.35), "A100-SXM4-80GB": (312.0, 2.04),
         "A100 80GB": (312.0, 1.94), "A100": (312.0, 1.56)}
# The share of these peaks that the best products of random numbers and a copy inside the memory
# reach on an H100 and an H200 (790 TFLOP/s, 3.0 and 4.3 TB/s): a layer's floor.
REACHED = (0.8, 0.9)
# 95 %, two-sided, 1.. degrees of freedom
STUDENT = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14,
           2.13]
MODES = ["pre", "span", "post", "hybrid", "sdd", "torch"]


def lines_of(path):
    """The JSON objects of a file of lines; [] where there is none. A line cut by the end of a stage
    is left out."""
    objects = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            objects.append(json.loads(line))
        except ValueError:
            print(f"{path.name}: not JSON: {line[:60]}", file=sys.stderr)
    return objects


def machine_of(folder):
    path = folder / "machine.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    gpu = [part.strip() for part in lines[0].split(",")] if len(lines) > 2 else []
    found = dict(zip(("gpu", "driver", "memory", "clock", "power"), gpu))
    return {"gpu": found.get("gpu", "none"), "driver": found.get("driver", "unknown"),
            "memory": found.get("memory", ""), "power limit": found.get("power", ""),
            "commit": lines[-2] if len(lines) > 1 else "unknown",
            "date": lines[-1] if lines else "unknown"}


def peaks_of(gpu):
    return next((both for name, both in PEAKS.items() if name in gpu), None)


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
    """One entry a run: what, model, round, its median milliseconds and spread."""
    runs = []
    for run in lines_of(folder / name):
        steps = run["ms"][WARMUP:]
        if not steps:
            print(f"{name}: {run['what']}, round {run['round']}: {len(run['ms'])} steps, more than "
                  f"{WARMUP} needed", file=sys.stderr)
            continue
        flags = run.get("config", {}).get("flags")
        runs.append({"what": run["what"], "model": run["model"], "round": run["round"],
                     "steps": len(steps), "ms": statistics.median(steps), "slowest": max(steps),
                     "flops": flops_per_token(flags) if flags else None,
                     "tokens": int(flags["batch"]) * int(flags["seq"])
                     if flags else run["batch"] * run["seq"],
                     "micro": int(flags.get("micro_batch", 0)) if flags else 0,
                     "torch": run.get("torch"), "compiled": run.get("compiled")})
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


def training_of(runs, peak):
    rows = []
    # PyTorch's model is the same
    flops = next((run["flops"] for run in runs if run["flops"]), None)
    for what in MODES:
        mine = [run for run in runs if run["what"] == what]
        if not mine:
            continue
        ms = statistics.median(run["ms"] for run in mine)
        rate = mine[0]["tokens"] / ms * 1e3
        tflops = rate * flops / 1e12 if flops else None
        rows.append({"what": what, "runs": len(mine), "steps": sum(run["steps"] for run in mine),
                     "ms": ms, "tokens_per_second": rate, "tflops": tflops,
                     "percent_of_peak": 100 * tflops / peak if tflops and peak else None,
                     "over_pre": ratio_to(runs, what, "pre"),
                     "micro": mine[0]["micro"], "torch": mine[0]["torch"],
                     "compiled": mine[0]["compiled"]})
    return rows


def kernels_of(folder, peaks):
    """Layers with their floor: the larger of FLOP and bytes over what the GPU reaches; None where
    it is not known. Without it, a layer with products is bound by them."""
    rows = []
    for row in lines_of(folder / "kernels.jsonl"):
        if "layer" in row:
            floors = ([1e-9 * row[work] / (reached * peak)
                       for work, reached, peak in zip(("flops", "bytes"), REACHED, peaks)]
                      if peaks else [row["flops"], 0])
            product = floors[0] > floors[1]
            floor = max(floors) if peaks else None
            rows.append({**row, "floor_ms": floor,
                         "percent_of_floor": 100 * floor / row["ms"] if floor else None,
                         "million_tokens_per_second": row["tokens"] / row["ms"] / 1e3,
                         "rate": row["flops" if product else "bytes"] / row["ms"] / 1e9,
                         "unit": "TFLOP/s" if product else "TB/s"})
    return rows


def count_of(text):
    """The counts in the last line of a run of tests. If time was up before it: the failures so far,
    and None for those that passed."""
    count = re.search(r"^(\d+) passed, (\d+) failed$", text, re.MULTILINE)
    if count:
        return {"passed": int(count[1]), "failed": int(count[2])}
    return {"passed": None, "failed": len(re.findall(r"^FAILED ", text, re.MULTILINE))}


def tests_of(folder):
    """How many tests of each precision passed, and how each other one ended."""
    path, found = folder / "tests.txt", {}
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
    words = {"0": "clean", "124": "clean until time was up", "9": "FOUND SOMETHING"}
    found = re.findall(r"^(\w+ \w+ \w+): status (\d+)$", path.read_text(),
                       re.MULTILINE) if path.exists() else []
    return {run: words.get(status, f"status {status}") for run, status in found}


def count_text(count):
    return (f"not finished, {count['failed']} failed so far"
            if count["passed"] is None else f"{count['passed']} passed, {count['failed']} failed")


def tests_text(count):
    return (f"{count['passed']} passed, {len(count['others'])} did not"
            + "".join(f"; {name} {verdict}" for name, verdict in sorted(count["others"].items())))


def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def training_text(model, rows):
    micro = rows[0]["micro"]
    text = [f"## {model}" + (f", micro-batches of {micro}" if micro else ""), "",
            "| | ms a step | tokens/s | TFLOP/s | % of peak | time over PRE's (95 %) | steps |",
            "|---|---|---|---|---|---|---|"]
    for row in rows:
        over = row["over_pre"]
        ratio = ("-" if not over or row["what"] == "pre" else f"{over['mean']:.4f}"
                 + (f" ± {over['half']:.4f}" if over["half"] is not None else ", one round"))
        name = (row["what"].upper() if row["what"] != "torch" else f"PyTorch {row['torch']}"
                + ("" if row["compiled"] else ", not compiled"))
        text.append(f"| {name} | {row['ms']:.2f} | {row['tokens_per_second']:.0f} | "
                    f"{number(row['tflops'], 0)} | {number(row['percent_of_peak'], 1)} | {ratio} | "
                    f"{row['steps']} in {row['runs']} |")
    return text + [""]


def markdown(report):
    machine = report["machine"]
    text = [f"# norm.c on {machine['gpu']}", "",
            f"{machine['date']}, commit {machine['commit']}, driver {machine['driver']}, "
            f"{machine['memory']}, power limit {machine['power limit']}.", ""]
    for precision, count in report["tests"].items():
        text.append(f"- tests, {precision}: {tests_text(count)}")
    if report["runs"]:
        text.append(f"- runs of the trainer: {count_text(report['runs'])}")
    for run, verdict in report["sanitizer"].items():
        text.append(f"- compute-sanitizer, {run}: {verdict}")
    text.append("")
    for model, rows in report["training"].items():
        text += training_text(model, rows)
    for model in dict.fromkeys(row["model"] for row in report["kernels"]):
        text += [f"## Layers of {model}", "",
                 "| layer | ms | floor, ms | % of floor | rate | million tokens/s |",
                 "|---|---|---|---|---|---|"]
        text += [f"| {row['layer']} | {row['ms']:.4f} | {number(row['floor_ms'], 4)} "
                 f"| {number(row['percent_of_floor'], 0)} | "
                 f"{row['rate']:.{0 if row['unit'] == 'TFLOP/s' else 2}f} "
                 f"{row['unit']} | {row['million_tokens_per_second']:.1f} |"
                 for row in report["kernels"] if row["model"] == model]
        text.append("")
    return "\n".join(text)


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("error: expected the folder that dev/gpu_check.sh wrote\n"
                 "  -> python3 dev/bench/gpu/report.py build/gpu_check")
    folder = Path(sys.argv[1])
    machine = machine_of(folder)
    peaks = peaks_of(machine["gpu"])
    peak = peaks and peaks[0]
    training = {"GPT-2 124M": runs_of(folder, "train124.jsonl"),
                "740M": runs_of(folder, "train740.jsonl"),
                "OLMoE 588M-3B": runs_of(folder, "trainmoe.jsonl"),
                "GPT-2 124M beside PyTorch": runs_of(folder, "torch.jsonl")}
    report = {"machine": machine, "peak_tflops": peak, "tests": tests_of(folder),
              "runs": trainer_of(folder), "sanitizer": sanitizer_of(folder),
              "training": {model: training_of(runs, peak) for model, runs in training.items()
                           if runs}, "kernels": kernels_of(folder, peaks)}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
