#!/usr/bin/env python3
"""torch_layers.py: attention and the products of experts in PyTorch, at the shapes that kernels.cu
times, in bfloat16.

Attention: scaled_dot_product_attention, causal, by PyTorch's FlashAttention and by cuDNN; their
backward runs by itself on what one forward has saved. Experts: torch._grouped_mm, the three
products of a matrix, with as many rows for every expert; rows lie gathered already, and dW is made
in bfloat16 and does not accumulate, so its work is less than ours. JSON lines on stdout as
kernels.cu prints them, for report.py. What this PyTorch or GPU does not have is left out, and
stderr says so. --device cpu --tiny is for trying it out without a GPU.
"""
import argparse
import json
import statistics
import sys
import time

import torch

SAMPLES, RUNS = 11, 5
# model, sequences, length, heads, size of a head; those of kernels.cu
ATTENTION = [("gpt2-124M", 64, 1024, 12, 64), ("span-740M", 16, 2048, 24, 64)]
TINY_ATTENTION = [("gpt2-124M", 2, 32, 2, 32)]
BACKENDS = {"torch FlashAttention": "FLASH_ATTENTION", "torch cuDNN": "CUDNN_ATTENTION"}


def milliseconds(run, device):
    """Milliseconds of one run: SAMPLES of them, each the mean over RUNS in a row."""
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


def print_row(model, layer, tokens, times, flops, moved):
    row = {"model": model, "layer": layer, "tokens": tokens, "ms": statistics.median(times),
           "ms_min": min(times), "ms_max": max(times), "flops": flops, "bytes": moved,
           "from": time.time() - RUNS * sum(times) / 1e3, "to": time.time(),
           "torch": torch.__version__}
    print(json.dumps(row), flush=True)


def time_attention(model, B, T, heads, size, how, device):
    q, k, v, dc = (torch.randn(B, T, heads, size, dtype=torch.bfloat16, device=device,
                               requires_grad=True).transpose(1, 2) for _ in range(4))
    flops, tensor = 2.0 * B * heads * T * T * size, 2.0 * B * heads * T * size

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        print_row(model, f"attention forward{how}", B * T, milliseconds(forward, device), flops,
                  4 * tensor)
    c = forward()
    dc = dc.detach()
    times = milliseconds(lambda: torch.autograd.grad(c, (q, k, v), dc, retain_graph=True), device)
    print_row(model, f"attention backward{how}", B * T, times, 2.5 * flops, 8 * tensor)


def attention(device, tiny):
    for model, B, T, heads, size in TINY_ATTENTION if tiny else ATTENTION:
        for suffix, n, width in (("", heads, size),
                                 (f", heads of {2 * size}", heads // 2, 2 * size)):
            for name, backend in ({"torch": "MATH"} if tiny else BACKENDS).items():
                try:
                    from torch.nn.attention import SDPBackend, sdpa_kernel
                    with sdpa_kernel(getattr(SDPBackend, backend)):
                        time_attention(model, B, T, n, width, f"{suffix}, {name}", device)
                except (AttributeError, ImportError, RuntimeError) as error:
                    print(f"no {name}: {str(error).splitlines()[0]}", file=sys.stderr)


def experts(device, tiny):
    if not hasattr(torch, "_grouped_mm"):
        print(f"torch {torch.__version__} has no _grouped_mm\n  -> torch 2.8 or later",
              file=sys.stderr)
        return
    tokens, width, hidden, count, each = ((64, 64, 32, 8, 2) if tiny
                                          else (16 * 2048, 1024, 512, 64, 8))
    rows = tokens * each
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=device) * (rows // count)
    for name, n_in, n_out in (("gate, up of experts", width, 2 * hidden),
                              ("down of experts", hidden, width)):
        x = torch.randn(rows, n_in, dtype=torch.bfloat16, device=device)
        dy = torch.randn(rows, n_out, dtype=torch.bfloat16, device=device)
        w = 0.02 * torch.randn(count, n_out, n_in, dtype=torch.bfloat16, device=device)
        products = {"forward": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
                    "backward, input": lambda: torch._grouped_mm(dy, w, offs=ends),
                    "backward, weight": lambda: torch._grouped_mm(dy.t(), x, offs=ends)}
        for product, run in products.items():
            print_row("experts of 512", f"{name} {product}, torch._grouped_mm", tokens,
                      milliseconds(run, device), 2.0 * rows * n_in * n_out,
                      2.0 * (rows * (n_in + n_out) + count * n_in * n_out))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(1)
    attention(options.device, options.tiny)
    experts(options.device, options.tiny)


if __name__ == "__main__":
    main()
