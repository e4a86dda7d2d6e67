#!/usr/bin/env python3
"""Memory and time per step of the 7B and 16B presets on 8 and 64 GPUs, on paper: prints the tables
of dev/SCALE.md.

    python3 dev/scale.py

Sizes come from the code (dev/scale.c, compiled here: its tables of tensors, layout_share, the GPU's
activations in bf16), rates from INPUTS. Nothing is measured. A step is the sum of its parts, but
for two overlaps (`step`). Needs Python and a C compiler.
"""
import pathlib
import subprocess

INPUTS = {  # name, modest, good, source
    "peak": ("bf16 peak, dense, TFLOP/s", 989.4, 989.4, "H100 SXM and H200 data sheets"),
    "products": ("products, TFLOP/s", 555, 716,
                 "cuBLAS on an H100, 2048^3; 4096^3: pranjalssh/fast.cu, README"),
    "attention": ("attention, head 128, 4k, causal, forward", 319, 591,
                  "FA2: flash-attention, flash3_fp16_fwd.png; cuDNN 9.19, H200: "
                  "NVIDIA/cudnn-frontend, benchmark"),
    "attention_back": ("its backward", round(2.5 / (3.5 / 294 - 1 / 319)), 474,
                       "FA2: from 294 for both, flash2_h100_fwd_bwd_benchmark.png; cuDNN: "
                       "the same"),
    "experts": ("a layer's experts, with router, gather and combine, forward", 216, 467,
                "MegaBlocks; SonicMoE: arXiv 2512.14080 figure 14, width 1536, read off to 10"),
    "experts_back": ("their backward", 291, 468, "the same"),
    "memory": ("part of the memory's rate that kernels reach", 0.78, 0.78,
               "RMSNorm on an H200: NVIDIA/cudnn-frontend, benchmark/norms/results/h200"),
    "80 GB": ("memory of an H100, TB/s", 3.35, 3.35, "data sheet"),
    "141 GB": ("of an H200", 4.8, 4.8, "data sheet"),
    "nvlink": ("NVLink, GB/s each way", 450, 450, "H100 data sheet: 900 both ways"),
    "adapter": ("an InfiniBand adapter, eight a node", 50, 50, "DGX H100 data sheet: 400 Gb/s"),
    "pcie": ("PCIe 5 x16", 64, 64, "H100 data sheet: 128 both ways"),
    "links": ("part of a link's rate reached", 0.8, 0.8, "assumption"),
    "disk": ("disk, one writer, GB/s", 2, 2, "assumption"),
    "libraries": ("CUDA, cuBLASLt, NCCL, GiB a GPU", 1.5, 1.5, "assumption"),
}
GIB, LEVELS, GPUS = 2.0**30, ("off", "cheap", "on"), (8, 64)


def given(key, rates="good"): return INPUTS[key][1 + (rates == "good")]
def capacity(gpu): return float(gpu.split()[0]) * 1e9 - given("libraries") * GIB
def bandwidth(gpu): return given("memory") * given(gpu) * 1e12
def link(processes, adapters=8):
    return given("links") * 1e9 * (given("nvlink") if processes <= 8
                                   else min(given("nvlink"), adapters * given("adapter")))


def sizes(name):
    """A preset's sizes by the code, for steps of 1024 sequences of 4096 tokens, 4.2 million."""
    root = pathlib.Path(__file__).resolve().parent.parent
    subprocess.run(["make", "-s", "-C", root, "build/scale"], check=True)
    command = [root / "build/scale", "--model", name, "--seq", "4096", "--batch", "1024"]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    of = lambda kind: [[int(x) for x in line.split()[1:]] for line in text.splitlines()
                       if line.startswith(kind)]
    g = dict(zip("L C T V qk batch ffn expert_ffn expert_rows hidden experts head flops".split(),
                 of("model")[0]), name=name)
    # forward, of a token
    g["attention"] = (g["flops"] - 6 * (g["hidden"] + g["experts"] + g["head"])) / 3
    g["N"], g["expert_all"] = (sum(n for _, n, _ in of("entry")),
                               sum(n for _, n, expert in of("entry") if expert))
    # elements outside the layers, of layer 0, 1 ..
    g["layers"] = [sum(n for layer, n, _ in of("entry") if layer == l) for l in range(-1, g["L"])]
    g["share"] = {p: [n for q, n in of("share") if q == p] for p in (8, 64)}
    g["acts"] = {(LEVELS[i], B): n for i, B, n in of("acts")}
    return g


def fixed(g, processes): return 6 * g["N"] + 12 * max(g["share"][processes])


def fitting(g, before, gpu, processes):
    """(level, B): of each level of --recompute the largest micro-batch beside `before` bytes."""
    most = [(level, [B for (of, B), n in g["acts"].items() if of == level and B <= g["batch"]
                     // processes and before + n <= capacity(gpu)]) for level in LEVELS]
    return [(level, max(B)) for level, B in most if B]


def fitting_text(*case): return ", ".join(f"{level} {B}" for level, B in fitting(*case)) or "none"


def micro_step(g, gpu, rates, level, B):
    """Seconds of the parts of a micro-step, and of its backward through the blocks. Norms: llmc's
    fused [add + norm], two a layer, and rotary on q and k."""
    products, attention, attention_back, experts, experts_back = (
        1e12 * given(k, rates)
        for k in ("products", "attention", "attention_back", "experts", "experts_back"))
    n, memory, other = B * g["T"], bandwidth(gpu), "norms, rotary, shared ffn's activation"
    forward = {"products": 2 * g["hidden"] * n / products,
               "experts": 2 * g["experts"] * n / experts,
               "attention": g["attention"] * n / attention,
               other: 2 * n * (g["L"] * (8 * g["C"] + 4 * g["qk"]) + 3 * g["ffn"]) / memory}
    again = {"off": 0, "cheap": 2 * n * 3 * (g["ffn"] + g["expert_ffn"]) / memory,
             "on": sum(forward.values())}[level]
    back = {"products": 2 * forward["products"], "experts": 4 * g["experts"] * n / experts_back,
            "attention": 2.5 * g["attention"] * n / attention_back,
            other: 2 * n * (g["L"] * (9 * g["C"] + 4 * g["qk"]) + 5 * g["ffn"]) / memory,
            "float gradients, read and written": 8 * g["N"] / memory, "recomputation": again}
    parts = {"head and classifier": 6 * g["head"] * n / products + 4 * n * g["V"] / memory,
             **{k: forward.get(k, 0) + s for k, s in back.items()}}
    return parts, sum(back.values())


def step(g, gpu, rates, processes, level, B, adapters=8):
    """Seconds of a step's parts. Overlaps: a layer's reduction runs while backward is below it; an
    entry's broadcast while the next ones are updated."""
    parts, back = micro_step(g, gpu, rates, level, B)
    own, rate = max(g["share"][processes]), link(processes, adapters)
    now = free = 0
    for n in g["layers"][:0:-1]:
        now += back / g["L"]
        free = max(now, free) + 4 * n / rate
    free = max(now, free) + 4 * g["layers"][0] / rate
    seconds = {k: g["batch"] // processes // B * s for k, s in parts.items()}
    seconds["reduction that backward does not hide"] = free - now
    seconds["zeroing, norm, then AdamW or broadcast"] = (
        (4 * g["N"] + 4 * own) / bandwidth(gpu)
        + max(30 * own / bandwidth(gpu), 2 * g["N"] / rate))
    return {"parts": seconds, "all": sum(seconds.values()),
            "alone": (4 * g["N"] / rate, 2 * g["N"] / rate, 30 * own / bandwidth(gpu))}


def table(rows):
    print("\n".join("| " + " | ".join(row) + " |"
                    + ("\n|" + "---|" * len(row) if row is rows[0] else "") for row in rows) + "\n")
def columns(cases): table([(label, *(case[label] for case in cases)) for label in cases[0]])


def inputs_table():
    rate = (lambda key, x: f"{x:g} ({100 * x / given('peak'):.0f} %)"
            if key.split("_")[0] in ("products", "attention", "experts") else f"{x:g}")
    table([("input", "modest", "good", "source"),
           *((what, rate(key, a), rate(key, b), source)
             for key, (what, a, b, source) in INPUTS.items())])


def memory_column(g, p):
    N, share, before = g["N"], g["share"][p], fixed(g, p)
    column = {"GiB a GPU, before activations": f"{g['name']}, {p}",
              "bf16 weights of the products, 2 bytes": f"{2 * N / GIB:.1f}",
              "float gradients, 4": f"{4 * N / GIB:.1f}",
              "float master weights and moments, 12, of the fullest process":
                  f"{12 * max(share) / GIB:.1f}",
              "their mean; fullest over mean": f"{12 * sum(share) / p / GIB:.1f}; "
                                               f"{max(share) * p / sum(share):.2f}",
              "together": f"**{before / GIB:.1f}**"}
    for gpu in ("80 GB", "141 GB"):
        column[f"left of {gpu}"] = f"{(capacity(gpu) - before) / GIB:.1f}"
        column[f"--recompute and largest micro-batch, {gpu}"] = fitting_text(g, before, gpu, p)
    return {**column, "activations of one sequence, off, cheap, on":
                      ", ".join(f"{g['acts'][level, 1] / GIB:.1f}" for level in LEVELS)}


def step_column(g, gpu, p, rates):
    timed = lambda adapters: min(((step(g, gpu, rates, p, level, B, adapters), level, B)
                                  for level, B in fitting(g, fixed(g, p), gpu, p)),
                                 key=lambda t: t[0]["all"])
    s, level, B = timed(8)
    speed = g["batch"] * g["T"] / s["all"] / p
    return {"ms a step": f"{g['name'].split('-')[-1]} ({gpu}), {p}, {rates}",
            "micro-steps x micro-batch, recompute": f"{g['batch'] // p // B} x {B}, {level}",
            **{part: f"{1e3 * seconds:.0f}" for part, seconds in s["parts"].items()},
            "**step**": f"**{1e3 * s['all']:.0f}**",
            "thousand tokens/s a GPU": f"{speed / 1e3:.1f}",
            "million tokens/s in all": f"{speed * p / 1e6:.2f}",
            "of peak": f"{speed * g['flops'] / given('peak') / 1e10:.0f} %",
            "alone: reduction, broadcast, AdamW": ", ".join(f"{1e3 * x:.0f}" for x in s["alone"]),
            "step with one adapter a node": f"{1e3 * timed(1)[0]['all']:.0f}" if p > 8 else ""}


def checkpoint_table(models):
    rows = [("a checkpoint", "GB", "to rank 0, 8 GPUs; 64", "to the host", "to the disk",
             "one after the other, 8; 64")]
    for size, g in ((12 * g["N"] / 1e9, g) for g in models):
        near, far, host = (part * size / given("links") / given(by)
                           for part, by in ((7 / 8, "nvlink"), (7 / 8, "adapter"), (1, "pcie")))
        disk = size / given("disk")
        rows.append((g["name"], f"{size:.0f}", f"{near:.1f}; {far:.1f} s", f"{host:.1f} s",
                     f"{disk:.0f} s", f"{near + host + disk:.0f}; {far + host + disk:.0f} s"))
    table(rows)


def changes_table(g, gpu):
    """Changes of the design that save memory: bytes before activations (s: elements of the fullest
    share); bytes that a GPU sends in a step of `micro` micro-steps, n tokens."""
    # two layers of gradients, and of weights, are on their way at a time
    N, e, layer = g["N"], g["expert_all"], max(g["layers"][1:])
    # bytes a token sends to its experts and back, forward and backward, bf16
    rows = 4 * 2 * g["expert_rows"] * 7 / 8
    changes = {"as designed": (lambda s, p: 6 * N + 12 * s, lambda micro, n, p: 6 * N),
               "bf16 gradients": (lambda s, p: 4 * N + 12 * s, lambda micro, n, p: 4 * N),
               "gradients at their owners alone (ZeRO-2)":
                   (lambda s, p: 2 * N + 16 * s + 8 * layer,
                    lambda micro, n, p: 4 * N * micro + 2 * N),
               "weights too (ZeRO-3), even shares":
                   (lambda s, p: 18 * N / p + 12 * layer, lambda micro, n, p: 8 * N * micro),
               "experts over a node's 8 GPUs, even shares":
                   (lambda s, p: 6 * (N - e * 7 / 8) + 12 * N / p,
                    lambda micro, n, p: 6 * (N - e + (e / 8 if p > 8 else 0)) + rows * n)}
    labels = ("GiB before activations", "micro-batch", "s a step on the links")
    lines = [(f"{g['name']}, {gpu}", *(f"{p} GPUs: {label}" for p in GPUS for label in labels))]
    for name, (memory, sent) in changes.items():
        line = [name]
        for p, mine in ((p, g["batch"] // p) for p in GPUS):
            before = memory(max(g["share"][p]), p)
            most = max((B for _, B in fitting(g, before, gpu, p)), default=0)
            line += [f"{before / GIB:.1f}", fitting_text(g, before, gpu, p),
                     f"{sent(mine // most, mine * g['T'], p) / link(p):.1f}" if most else ""]
        lines.append(line)
    table(lines)


if __name__ == "__main__":
    models = [sizes(name) for name in ("olmoe-1B-7B", "deepseek-16B")]
    inputs_table()
    columns([memory_column(g, p) for g in models for p in GPUS])
    columns([step_column(g, gpu, p, rates) for g, gpu in zip(models, ("80 GB", "141 GB"))
             for p in GPUS for rates in ("modest", "good")])
    checkpoint_table(models)
    changes_table(models[1], "80 GB")
