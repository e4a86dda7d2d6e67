#!/usr/bin/env python3
"""estimates.py: how long each layer of a training step should take on an H200, and the step. It is
an estimate, made before any measurement; report.py compares measurements with it.

    python3 dev/bench/gpu/estimates.py > dev/bench/gpu/ESTIMATES.md

A floor is the larger of FLOP over 790 TFLOP/s and of bytes over 4.3 TB/s, every input read once and
every output written once. An estimate is the same work over the rate that RATES expects. A step is
PRE's, one micro-batch: the sum over layers of estimate times calls, and what no layer has.
"""
import textwrap
from collections import namedtuple

from timeline import GAPS, HEAD

PRODUCTS, MEMORY = 790e9, 4.3e9         # FLOP and bytes a millisecond

Model = namedtuple("Model", "name L B T C NH HS F swiglu V Vp")
MODELS = [Model("gpt2-124M", 12, 64, 1024, 768, 12, 64, 3072, False, 50257, 50304),
          Model("span-740M", 24, 16, 2048, 1536, 24, 64, 4224, True, 32000, 32000)]

# Expected rates: TFLOP/s of layers with products, TB/s of the others. By part of the step, as
# timeline.py has them. Attention and experts: an in-order model of one multiprocessor, which issues
# the machine code of the inner loop with ptxas's stalls and barriers and assumed pipe rates. It
# gives FlashAttention-2's forward 319 TFLOP/s without a mask, published is 318 [3]. Its cycles
# are in dev/sass/table.txt (sm_90a, heads of 64). Own rows in registers took attention forward
# from 1522 to 1282 of them, dq and dkv together from 2524 to 2266, and the rates from 240 and 190
# (740M: 265 and 210) to these; experts' dW takes 553 where the product beside it takes 528 and is
# rated 400.
# Products of the library: below its best shapes [1, 2], the smaller the matrices the more. The
# others: the share of the bandwidth that kernels of their kind reach.
RATES = {
    "gpt2-124M": {"products of blocks": 650, HEAD: 700, "attention forward": 285,
                  "attention backward": 212, "bias gradients": 2.6, "norms": 3.1,
                  "classifier": 3.47, "embedding": 1.0, "update": 3.4, "activation": 3.7,
                  "RoPE, norms of q, k, v": 2.9},
    "span-740M": {"products of blocks": 700, HEAD: 700, "attention forward": 315,
                  "attention backward": 234, "norms": 3.2, "classifier": 3.2, "embedding": 1.0,
                  "update": 3.4, "activation": 3.75, "RoPE, norms of q, k, v": 2.9},
    "experts of 512": {"experts": 400, "experts, weights of gathered rows": 380}}
# Launches wait for each other, small sums take microseconds each, and the host waits at the end.
GAPS_MS = 1.5

# What others publish for the same part, on an H100 unless said; numbers as in SOURCES.
PUBLISHED = {
    "products of blocks": "cuBLAS 716-733 TFLOP/s at 4096^3, 762-795 at 8192^3 [1, 2]",
    HEAD: "cuBLAS 762-795 TFLOP/s at 8192^3 [1, 2]",
    "attention forward": "causal, heads of 64, T 1024 / 2048, TFLOP/s: FlashAttention-2 229 / 262, "
                         "cuDNN 9 288 / 334, FlashAttention-3 265 / 371 [3]",
    "attention backward": "heads of 64, T 1024 / 2048, TFLOP/s: FlashAttention-2 about 180 / 222 "
                          "causal (from forward and both together) [3]; without mask cuDNN 348 / "
                          "395, FlashAttention-3 363 / 422 [4]",
    "norms": "cuDNN on an H200, RMSNorm: forward 3.7-3.85 TB/s, backward 3.5-3.8 [5]; llm.c's "
             "LayerNorm backward about 75 % of an A100's bandwidth [6]",
    "classifier": "llm.c: two reads, the second from L2, and one write [7]",
    "update": "llm.c: AdamW and its norm, 1.8 % of a step on an A100 [6]",
    "bias gradients": "llm.c: a kernel of its own, 3.3 % of a step on an A100 [6]",
    "experts": "whole layers, width 1536, 64 experts of 512, 4 a token, forward / backward, in "
               "TFLOP/s: MegaBlocks 190 / 238, ScatterMoE 235 / 248, SonicMoE 435 / 440 [10]",
    "the step": "llm.c on 8 H100, one micro-batch of 64 x 1024 each: 140 ms, 468k tokens/s a GPU "
                "[8]; on an A100 218k [9]",
}
SOURCES = [
    "github.com/pranjalssh/fast.cu, README",
    "github.com/stas00/ml-engineering, compute/accelerator: the best shape 794.5; H200 the same",
    "github.com/Dao-AILab/flash-attention, assets: flash3_fp16_fwd.png, "
    "flash2_h100_fwd_bwd_benchmark.png (read off the plots)",
    "FlashAttention-3, arXiv 2407.08608, figures 5 and 6",
    "github.com/NVIDIA/cudnn-frontend, benchmark/norms/results/h200",
    "github.com/karpathy/llm.c, pull request 378, and the profile in it",
    "github.com/karpathy/llm.c, llmc/fused_classifier.cuh",
    "github.com/KellerJordan/modded-nanogpt, records/track_1_short/2024-10-13_llmc",
    "github.com/karpathy/llm.c, discussion 481",
    "SonicMoE, arXiv 2512.14080, figure 14 (read off the plot)",
]

# calls: launches of the layer in a step of PRE; 0: only other placements have it.
Row = namedtuple("Row", "model part layer calls flops bytes ms")


def floor_ms(flops, bytes_moved):
    return max(flops / PRODUCTS, bytes_moved / MEMORY)


def row(m, part, layer, calls, flops=0.0, bytes_moved=0.0, more_ms=0.0):
    rate = RATES[m.name][part]
    work = flops if part.startswith(("products", HEAD, "attention", "experts")) else bytes_moved
    return Row(m.name, part, layer, calls, flops, bytes_moved, work / rate / 1e9 + more_ms)


def linear(m, name, out, width, biased, forward, backward="backward, input", calls=None):
    """The three products of a linear layer. dW is float and only written: this is the first
    micro-step. The gradient of a bias reads dy once more."""
    n, part = m.B * m.T, HEAD if name == "head" else "products of blocks"
    calls = m.L if calls is None else calls
    flops = 2.0 * n * out * width
    weights = 2.0 * out * width
    x, y = 2.0 * n * width, 2.0 * n * out
    bias_ms = y / RATES[m.name]["bias gradients"] / 1e9 if biased else 0.0
    twice = 2 if "+" in forward else 1
    return [row(m, part, f"{name}{forward}", calls, flops, x + weights + y * twice),
            row(m, part, f"{name} {backward}", calls, flops,
                weights + y + x * (2 if "GELU" in backward else 1)),
            row(m, part, f"{name} backward, weight", calls, flops, x + y + 2 * weights, bias_ms)]


def layers_of(m):
    """Layers by the names that kernels.cu gives them."""
    n, L = m.B * m.T, m.L
    d = 2.0 * n * m.C                   # bytes of an activation [n, C]
    biased = not m.swiglu
    ffn = 2.0 * n * m.F
    attention = 2.0 * m.B * m.NH * m.T * m.T * m.HS
    saved = 4.0 * n * m.NH
    params = L * m.C * (4 * m.C + (3 if m.swiglu else 2) * m.F) + m.Vp * m.C
    rows = linear(m, "q k v", 3 * m.C, m.C, biased, " forward")
    rows += linear(m, "attention output", m.C, m.C, biased, " + skip forward")
    if m.swiglu:
        rows += linear(m, "gate, up", 2 * m.F, m.C, False, " forward")
        rows += linear(m, "down", m.C, m.F, False, " + skip forward")
    else:
        rows += linear(m, "up", m.F, m.C, True, " + GELU forward")
        rows += linear(m, "down", m.C, m.F, True, " + skip forward", "+ GELU backward, input")
    rows += linear(m, "head", m.Vp, m.C, False, " forward", calls=1)
    rows += [
        row(m, "attention forward", "attention forward", L, attention, 4 * d + 2 * saved),
        row(m, "attention backward", "attention backward", L, 2.5 * attention, 8 * d + saved,
            2 * d / MEMORY),            # dC * C is summed before
        row(m, "norms", "norm forward", L + 1, 0, 2 * d),
        row(m, "norms", "add, norm forward", L, 0, 4 * d),
        row(m, "norms", "norm backward", 1, 0, 3 * d),
        row(m, "norms", "norm, add backward", 2 * L, 0, 4 * d),
        row(m, "norms", "norm, add, sum backward", 0, 0, 6 * d)]
    if m.swiglu:
        rows += [row(m, "RoPE, norms of q, k, v", "RoPE forward", L, 0, 4 * d),
                 row(m, "RoPE, norms of q, k, v", "RoPE backward", L, 0, 4 * d),
                 row(m, "activation", "SwiGLU forward", L, 0, 3 * ffn),
                 row(m, "activation", "SwiGLU backward", L, 0, 5 * ffn)]
    rows += [row(m, "embedding", "embedding forward", 1, 0, 2 * d),
             row(m, "embedding", "embedding backward", 1, 0, d),
             row(m, "classifier", "classifier, forward and backward", 1, 0, 4.0 * n * m.Vp),
             row(m, "update", "gradient norm, AdamW", 1, 0, 34.0 * params)]
    return rows


def experts():
    """The grouped products of kernels.cu's layer of experts, 16 layers a step; FLOP bound all. The
    gradient of `gate, up` reads each row of a token through an index, which it looks up a step
    ahead."""
    model = namedtuple("Name", "name")("experts of 512")
    flops = 2.0 * 16 * 2048 * 8 * 1024 * 512          # of one of gate, up and down
    rows = [row(model, "experts", f"{name} of experts {direction}", 16, parts * flops)
            for name, parts in (("gate, up", 2), ("down", 1))
            for direction in ("forward", "backward, input")]
    return rows + [row(model, "experts, weights of gathered rows",
                       "gate, up of experts backward, weight", 16, 2 * flops)]


def estimates():
    """{(model, layer): Row} of all layers."""
    rows = [r for m in MODELS for r in layers_of(m)] + experts()
    return {(r.model, r.layer): r for r in rows}


def parts_of(m):
    """[(part, floor, estimate)] of a step in milliseconds; the floor of a bias's gradient is 0."""
    parts = {}
    for r in layers_of(m):
        floor, ms = parts.get(r.part, (0.0, 0.0))
        parts[r.part] = (floor + r.calls * floor_ms(r.flops, r.bytes), ms + r.calls * r.ms)
    if not m.swiglu:                    # apart, as the timeline has them
        width = 3 * m.C + m.C + m.F + m.C
        bias_ms = m.L * 2.0 * m.B * m.T * width / RATES[m.name]["bias gradients"] / 1e9
        floor, ms = parts["products of blocks"]
        parts["products of blocks"] = (floor, ms - bias_ms)
        parts["bias gradients"] = (0.0, bias_ms)
    return [(part, *both) for part, both in parts.items()] + [(GAPS, 0.0, GAPS_MS)]


def step_of(m):
    """Milliseconds, tokens a second, and percent of the peak of the datasheet (report.py)."""
    ms = sum(row[2] for row in parts_of(m))
    width = 4 * m.C * m.C + (3 if m.swiglu else 2) * m.C * m.F
    flops = 6 * (m.L * width + m.V * m.C) + 6 * m.L * m.C * m.T
    rate = m.B * m.T / ms * 1e3
    return ms, rate, 100 * rate * flops / 989.4e12


def main():
    print("# Estimates\n\n**Nothing here is measured.** `estimates.py` computes these tables; its "
          "head says how.\n`report.py` compares measurements with them.\n")
    for m in MODELS:
        ms, rate, percent = step_of(m)
        print(f"## {m.name}: a step of {m.B} x {m.T} tokens under PRE, one H200\n\n"
              f"| part | floor, ms | estimate, ms | published |\n|---|---|---|---|")
        for part, floor, estimate in parts_of(m):
            print(f"| {part} | {floor:.1f} | {estimate:.1f} | {PUBLISHED.get(part, '')} |")
        published = PUBLISHED["the step"] if m is MODELS[0] else ""
        floor = sum(part[1] for part in parts_of(m))
        print(f"| **the step** | {floor:.1f} | {ms:.1f}: {rate / 1e3:.0f}k tokens/s, "
              f"{percent:.0f} % of the peak | {published} |\n\n"
              f"| layer | calls | floor, ms | estimate, ms |\n|---|---|---|---|")
        for r in layers_of(m):
            print(f"| {r.layer} | {r.calls} | {floor_ms(r.flops, r.bytes):.3f} | {r.ms:.3f} |")
        print()
    print(f"## experts of 512: 16 x 2048 tokens of width 1024, 64 experts, 8 a token\n\n"
          f"{textwrap.fill('Published: ' + PUBLISHED['experts'], 100)}\n\n"
          "| layer | floor, ms | estimate, ms |\n|---|---|---|")
    for r in experts():
        print(f"| {r.layer} | {floor_ms(r.flops, r.bytes):.3f} | {r.ms:.3f} |")
    print()
    print("## Sources\n")
    for number, source in enumerate(SOURCES, 1):
        print(textwrap.fill(f"{number}. {source}", 100, subsequent_indent="   "))


if __name__ == "__main__":
    main()
