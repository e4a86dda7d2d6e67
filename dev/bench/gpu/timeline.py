"""timeline.py: where the time of a training step goes, from the launches that timeline.cu or
cupti.cpp recorded. report.py uses it. Only the standard library.

A step lasts from the end of one launch of AdamW to the end of the next. Every moment of it belongs
to one launch or to a gap, so the rows add up to the step.
"""
import json
import re
import statistics
import sys

# The parts of a step, as estimates.py has them, and which launches belong to each. The first match
# counts. The LM head's products are those that take more than half as long as the longest.
HEAD = "LM head"
PARTS = [("attention forward", r"attention_forward|attention_decode"),
         ("attention backward", r"attention_(dot|dq|dkv)"),
         ("classifier", r"classifier|loss_sums"),
         ("norms", r"add_norm_forward|norm_backward|partials_add|interpolate|gain_"),
         ("RoPE, norms of q, k, v", r"qkv_(for|back)ward|latent_sum"),
         ("activation", r"activation_(for|back)ward|bias_kernel"),
         ("experts", r"grouped_|router_|combine"),
         ("embedding", r"embedding_|inside_add"),
         ("update", r"adamw|square_sum|sums_add|decide|ngpt_normalize|fill|copy"),
         ("bias gradients", r"column_sums|add_sums"),
         ("products of blocks", r"product|gemm|nvjet|xmma|cutlass|cublas|splitK")]
GAPS = "gaps"


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


def launches_of(path):
    """[(start, end, name)] in the order of their start. Milliseconds."""
    return sorted((row["start"], row["start"] + row["ms"], short(row["name"]))
                  for row in lines_of(path))


def short(name):
    """A kernel's name without its return type, namespaces, template and other arguments."""
    if name.startswith("product "):
        return name
    name = name.removeprefix("void ")
    return re.split(r"[<(]", name)[0].split("::")[-1] or name


def steps_of(launches):
    """The launches of each step and its length. The first launch of AdamW only begins a step."""
    ends = [end for _, end, name in launches if "adamw" in name]
    steps = []
    for begin, end in zip(ends, ends[1:]):
        steps.append((end - begin, [x for x in launches if begin < (x[0] + x[1]) / 2 < end]))
    return steps


def part_of(name, ms, longest):
    part = next((part for part, pattern in PARTS if re.search(pattern, name)), "other")
    return HEAD if part == PARTS[-1][0] and ms > longest / 2 else part


def summary(path):
    """The step's length, its kernels and its parts, each [(name, launches, ms)] with the longest
    first; None if there is no whole step. Means over steps. Overlapping launches count once."""
    steps = steps_of(launches_of(path))
    if not steps:
        return None
    products = [end - start for _, launches in steps for start, end, name in launches
                if part_of(name, 0, 1) == PARTS[-1][0]]
    kernels, parts = {}, {}
    for length, launches in steps:
        busy, until = 0.0, -1.0
        for start, end, name in launches:
            ms = max(0.0, end - max(start, until))
            until = max(until, end)
            busy += ms
            for table, key in ((kernels, name), (parts, part_of(name, ms, max(products or [0])))):
                count, sum_ms = table.get(key, (0, 0.0))
                table[key] = (count + 1, sum_ms + ms)
        for table in (kernels, parts):
            table[GAPS] = (0, table.get(GAPS, (0, 0.0))[1] + length - busy)
    rows = [sorted(((name, count / len(steps), ms / len(steps))
                    for name, (count, ms) in table.items()), key=lambda row: -row[2])
            for table in (kernels, parts)]
    lengths = [length for length, _ in steps]
    return {"steps": len(steps), "ms": statistics.mean(lengths), "slowest": max(lengths),
            "kernels": rows[0], "parts": rows[1]}
