#!/usr/bin/env python3
"""torch_experts.py: the products of experts in PyTorch, torch._grouped_mm, at the shapes that
kernels.cu times: 64 experts of 512, 8 a token, width 1024.

The three products of a matrix in bfloat16, with as many rows for every expert; rows lie gathered
already. JSON lines on stdout as kernels.cu prints them, for report.py. dW is made in bfloat16 and
does not accumulate, so its work is less than ours. Needs torch 2.8 or later; --device cpu --tiny is
for trying it out without a GPU.
"""
import argparse
import json
import statistics
import sys
import time

import torch

SAMPLES, RUNS = 11, 5


def milliseconds(run, device):
    """Milliseconds of one run: the median of SAMPLES, each over RUNS in a row."""
    times = []
    for sample in range(SAMPLES + 1):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        started = time.perf_counter()
        for _ in range(RUNS):
            run()
        if device == "cuda":
            end.record()
            end.synchronize()
        times.append((begin.elapsed_time(end)
                      if device == "cuda" else 1e3 * (time.perf_counter() - started)) / RUNS)
    return times[1:]                                           # the first one warms up


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not hasattr(torch, "_grouped_mm"):
        sys.exit(f"torch {torch.__version__} has no _grouped_mm\n  -> torch 2.8 or later")
    tokens, width, hidden, experts, each = ((64, 64, 32, 8, 2) if options.tiny
                                            else (16 * 2048, 1024, 512, 64, 8))
    rows = tokens * each
    torch.manual_seed(1)
    ends = torch.arange(1, experts + 1, dtype=torch.int32,
                        device=options.device) * (rows // experts)
    for name, n_in, n_out in (("gate, up of experts", width, 2 * hidden),
                              ("down of experts", hidden, width)):
        x = torch.randn(rows, n_in, dtype=torch.bfloat16, device=options.device)
        dy = torch.randn(rows, n_out, dtype=torch.bfloat16, device=options.device)
        w = 0.02 * torch.randn(experts, n_out, n_in, dtype=torch.bfloat16, device=options.device)
        products = {"forward": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
                    "backward, input": lambda: torch._grouped_mm(dy, w, offs=ends),
                    "backward, weight": lambda: torch._grouped_mm(dy.t(), x, offs=ends)}
        for product, run in products.items():
            times = milliseconds(run, options.device)
            flops, moved = (2.0 * rows * n_in * n_out,
                            2.0 * (rows * (n_in + n_out) + experts * n_in * n_out))
            row = {"model": "experts of 512", "layer": f"{name} {product}, torch._grouped_mm",
                   "tokens": tokens, "ms": statistics.median(times), "ms_min": min(times),
                   "ms_max": max(times), "flops": flops, "bytes": moved,
                   "from": time.time() - RUNS * sum(times) / 1e3, "to": time.time(),
                   "torch": torch.__version__}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
