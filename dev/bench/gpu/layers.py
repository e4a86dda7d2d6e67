"""layers.py: layers and parts of a step beside floor and estimate, from what the stages kernels,
ncu and timeline of dev/gpu_check.sh left. report.py uses it. Only the standard library."""
import csv
import datetime
import math
import statistics
import sys

import estimates
import timeline
from timeline import lines_of

# TFLOP/s and TB/s of the datasheets, by the first of these parts that is in the name.
PEAKS = {"GH200 480GB": (989.4, 4.0), "GH200": (989.4, 4.9), "H200": (989.4, 4.8),
         "H100 80GB HBM3": (989.4, 3.35), "A100-SXM4-80GB": (312.0, 2.04),
         "A100 80GB": (312.0, 1.94), "A100": (312.0, 1.56)}
# The share of these peaks that the best products of random numbers and a copy inside the memory
# reach on an H100 and an H200 (790 TFLOP/s, 3.0 and 4.3 TB/s): where the ceilings are not measured.
REACHED = (0.8, 0.9)
ESTIMATED_GPU = "NVIDIA H200"


def peaks_of(gpu):
    return next((both for name, both in PEAKS.items() if name in gpu), None)


# -------------------------------------------------------------------------- clock and power

def clocks_of(folder):
    """[(seconds since 1970, MHz, W)] in the order of time, of all stages."""
    found = []
    lines = [line for path in folder.glob("clocks*.csv") for line in path.read_text().splitlines()]
    for line in lines:
        try:
            stamp, mhz, _, watts = line.split(",")[:4]
            at = datetime.datetime.strptime(stamp.strip(), "%Y/%m/%d %H:%M:%S.%f")
            found.append((at.replace(tzinfo=datetime.timezone.utc).timestamp(), float(mhz),
                          float(watts)))
        except ValueError:
            continue                    # a line cut by the end of a stage, or a value not there
    return sorted(found)


def clock_during(clocks, row):
    """Median clock and power from row["from"] to row["to"], or of the nearest second."""
    if "from" not in row:
        return {"mhz": None, "watts": None}
    begin, end = row["from"], row["to"]
    inside = [c for c in clocks if begin <= c[0] <= end] or [
        c for c in clocks if begin - 1 <= c[0] <= end + 1]
    return {"mhz": statistics.median(c[1] for c in inside) if inside else None,
            "watts": statistics.median(c[2] for c in inside) if inside else None}


# ----------------------------------------------------------------------------------- layers

def ceilings_of(rows, gpu):
    """(TFLOP/s, TB/s) that this GPU reaches, and whether they are measured; None if neither known
    nor measured."""
    best = {row["layer"]: row for row in rows if row.get("model") == "ceilings"}
    if "product" in best and "copy" in best:
        return (best["product"]["flops"] / best["product"]["ms"] / 1e9,
                best["copy"]["bytes"] / best["copy"]["ms"] / 1e9), True
    peaks = peaks_of(gpu)
    return peaks and tuple(share * peak for share, peak in zip(REACHED, peaks)), False


def kernels_of(folder, gpu):
    """Layers with their floor: the larger of FLOP and bytes over the ceilings; None where these are
    not known. Without it, a layer with products is bound by them. And the ceilings."""
    rows, clocks, known = lines_of(folder / "kernels.jsonl"), clocks_of(folder), {}
    ceilings, measured = ceilings_of(rows, gpu)
    if gpu == ESTIMATED_GPU:
        known = estimates.estimates()
    layers = []
    for row in rows:
        if "layer" not in row or row["model"] == "ceilings":
            continue
        floors = [row["flops"], 0]
        if ceilings:
            floors = [1e-9 * row["flops"] / ceilings[0], 1e-9 * row["bytes"] / ceilings[1]]
        product = floors[0] > floors[1]
        floor = max(floors) if ceilings else None
        estimate = known.get((row["model"], row["layer"]))
        layers.append({**row, **clock_during(clocks, row), "floor_ms": floor,
                       "percent_of_floor": 100 * floor / row["ms"] if floor else None,
                       "rate": row["flops" if product else "bytes"] / row["ms"] / 1e9,
                       "unit": "TFLOP/s" if product else "TB/s",
                       "estimate_ms": estimate and estimate.ms,
                       "calls": estimate.calls if estimate else 0,
                       "published": estimate and estimates.PUBLISHED.get(estimate.part)})
    return layers, {"products_tflops": ceilings and ceilings[0],
                    "memory_tbs": ceilings and ceilings[1], "measured": measured}


def surprises_of(layers):
    """Layers with an estimate, those first that move a step the most away from it."""
    known = [{**row, "step_ms": row["calls"] * (row["ms"] - row["estimate_ms"])}
             for row in layers if row["estimate_ms"]]
    return sorted(known, key=lambda row: (-abs(row["step_ms"]),
                                          -abs(math.log(row["ms"] / row["estimate_ms"]))))


# --------------------------------------------------------------------------------- the step

def steps_of(folder, gpu):
    """One entry for each timeline: the step, its kernels, its parts with floor and estimate."""
    found, clocks = [], clocks_of(folder)
    models = {m.name: m for m in estimates.MODELS}
    for path in sorted(folder.glob("timeline-*.jsonl")):
        _, tool, model = path.stem.split("-", 2)
        step = timeline.summary(path)
        if not step:
            print(f"{path.name}: no whole step", file=sys.stderr)
            continue
        guess = gpu == ESTIMATED_GPU and model in models
        expected = {part: (floor, ms) for part, floor, ms in
                    (estimates.parts_of(models[model]) if guess else [])}
        parts = [{"part": part, "ms": ms, "floor_ms": expected.get(part, (None, None))[0],
                  "estimate_ms": expected.get(part, (None, None))[1]}
                 for part, _, ms in step["parts"]]
        written = path.stat().st_mtime  # right after the last step
        during = {"from": written - step["steps"] * step["ms"] / 1e3, "to": written}
        found.append({"model": model, "tool": tool, **step, "parts": parts,
                      **clock_during(clocks, during)})
    return found


# -------------------------------------------------------------------------------------- ncu

NCU = {"Duration": "ns", "SM Frequency": "hz", "Compute (SM) Throughput": "sm",
       "Memory Throughput": "memory", "DRAM Throughput": "dram",
       "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "wavefronts",
       "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "conflicts"}


def ncu_of(folder):
    """One entry a kernel: milliseconds, percents of the speed of light, shared-memory wavefronts
    and the share of them that bank conflicts add. ncu writes a line for each metric."""
    path, kernels, header = folder / "ncu.csv", {}, None
    for line in csv.reader(path.read_text().splitlines() if path.exists() else []):
        if "Metric Name" in line:
            header = line
        elif header and len(line) > header.index("Metric Value"):  # columns after it may lack
            row = dict(zip(header, line))
            name, unit = NCU.get(row["Metric Name"]), row.get("Metric Unit")
            if name and not (name == "memory" and unit != "%"):     # TB/s has this name as well
                value = float(row["Metric Value"].replace(",", ""))
                kernels.setdefault(timeline.short(row["Kernel Name"]), {})[name] = value
    return [{"kernel": kernel, **found} for kernel, found in kernels.items()]


# --------------------------------------------------------------------------------- markdown

def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def headline(surprises):
    """The largest surprise in a sentence; nothing without one."""
    if not surprises:
        return []
    row = surprises[0]
    off = f"{abs(row['step_ms']):.1f} ms a step {'more' if row['step_ms'] > 0 else 'less'}"
    return [f"**The largest surprise: {row['layer']} of {row['model']} takes {row['ms']:.3f} ms, "
            f"estimated were {row['estimate_ms']:.3f}: {off}.**", ""]


def surprises_text(surprises):
    if not surprises:
        return []
    text = ["## Layers by their distance from the estimate", "",
            "| layer | ms | estimate | floor | calls a step | ms a step off | published |",
            "|---|---|---|---|---|---|---|"]
    text += [f"| {row['model']}: {row['layer']} | {row['ms']:.4f} | {row['estimate_ms']:.4f} | "
             f"{number(row['floor_ms'], 4)} | {row['calls']} | {row['step_ms']:+.2f} | "
             f"{row['published'] or ''} |" for row in surprises]
    return text + [""]


def step_text(step, plain_ms):
    """plain_ms: of a step that nobody records, or None."""
    text = [f"## A step of {step['model']}, PRE, by {step['tool']}", "",
            f"{step['steps']} steps of {step['ms']:.2f} ms, the slowest {step['slowest']:.2f}; "
            f"without recording {number(plain_ms, 2)}; {number(step['mhz'], 0)} MHz, "
            f"{number(step['watts'], 0)} W.", "",
            "| part | ms | estimate | floor |", "|---|---|---|---|"]
    text += [f"| {row['part']} | {row['ms']:.2f} | {number(row['estimate_ms'], 1)} | "
             f"{number(row['floor_ms'], 1)} |" for row in step["parts"]]
    text += [f"| the step | {sum(row['ms'] for row in step['parts']):.2f} | | |", "",
             "| launch | a step | ms a step | TFLOP/s |", "|---|---|---|---|"]
    for name, count, ms in step["kernels"]:
        sizes = [int(size) for size in name.split()[1:]] if name.startswith("product ") else []
        rate = f"{2e-9 * math.prod(sizes) * count / ms:.0f}" if len(sizes) == 3 and ms else ""
        text.append(f"| {name} | {count:g} | {ms:.3f} | {rate} |")
    return text + [""]


def layers_text(model, layers):
    text = [f"## Layers of {model}", "",
            "| layer | ms | floor, ms | % of floor | rate | million tokens/s | MHz | W |",
            "|---|---|---|---|---|---|---|---|"]
    text += [f"| {row['layer']} | {row['ms']:.4f} | {number(row['floor_ms'], 4)} "
             f"| {number(row['percent_of_floor'], 0)} | "
             f"{row['rate']:.{0 if row['unit'] == 'TFLOP/s' else 2}f} {row['unit']} | "
             f"{row['tokens'] / row['ms'] / 1e3:.1f} | {number(row['mhz'], 0)} | "
             f"{number(row['watts'], 0)} |" for row in layers if row["model"] == model]
    return text + [""]


def ncu_text(kernels):
    if not kernels:
        return []
    text = ["## Nsight Compute", "",
            "| kernel | ms | SM, % | memory, % | DRAM, % | shared wavefronts, million | "
            "of them by bank conflicts, % | MHz |", "|---|---|---|---|---|---|---|---|"]
    for row in kernels:
        waves, conflicts = row.get("wavefronts"), row.get("conflicts")
        share = 100 * conflicts / waves if waves and conflicts is not None else None
        ms, millions, mhz = (row[name] / 1e6 if name in row else None
                             for name in ("ns", "wavefronts", "hz"))
        percents = " | ".join(number(row.get(name), 0) for name in ("sm", "memory", "dram"))
        text.append(f"| {row['kernel']} | {number(ms, 4)} | {percents} | {number(millions, 2)} | "
                    f"{number(share, 1)} | {number(mhz, 0)} |")
    return text + [""]
