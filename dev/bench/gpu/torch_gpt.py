#!/usr/bin/env python3
"""torch_gpt.py: GPT-2 124M in PyTorch as one would write it for speed today, to stand beside
norm.c: the same model, batch and work of a step.

bfloat16 autocast over float32 weights, scaled_dot_product_attention, fused AdamW with two groups,
gradient clipping, torch.compile; random tokens. One JSON line on stdout: the milliseconds of every
step, as dev/gpu_check.sh writes for norm.c. Needs torch; --device cpu --tiny is for trying it out
without a GPU.
"""
import argparse
import json
import math
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for z in self.qkv(self.norm1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, vocab, seq):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.normal_(block.out.weight, std=0.02 / math.sqrt(2 * layers))
            nn.init.normal_(block.down.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.tokens.weight

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


def train(model, options, vocab, device):
    """The milliseconds of each step, until the time is up."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": others, "weight_decay": 0.0}],
                                  lr=6e-4, betas=(0.9, 0.95), fused=device == "cuda")
    tokens = torch.randint(vocab, (8, options.batch, options.seq + 1), device=device)
    times, end = [], None
    for step in range(options.steps):
        begin = time.perf_counter()
        batch = tokens[step % len(tokens)]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.item()  # waits for the step, as a log line does
        if not math.isfinite(loss):
            sys.exit(f"the loss of step {step} is {loss}")
        times.append(1e3 * (time.perf_counter() - begin))
        end = end or time.perf_counter() + options.seconds  # compilation happens in the first step
        if time.perf_counter() > end:
            break
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8, help="of training after the first step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="2 narrow layers, no compilation")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    layers, width, heads, vocab = (2, 32, 2, 97) if options.tiny else (12, 768, 12, 50304)
    model = GPT(layers, width, heads, vocab, options.seq).to(options.device)
    times, compiled = None, not options.tiny
    if compiled:
        try:
            times = train(torch.compile(model), options, vocab, options.device)
        except Exception as error:  # torch.compile needs a working Triton and a C compiler
            print(f"without torch.compile: {str(error).strip().splitlines()[0]}", file=sys.stderr)
            compiled = False
    if times is None:
        times = train(model, options, vocab, options.device)
    print(json.dumps({"what": "torch", "model": "gpt2-124M", "round": options.round,
                      "from": time.time() - sum(times[1:]) / 1e3, "to": time.time(),
                      "ms": [round(t, 3) for t in times], "torch": torch.__version__,
                      "compiled": compiled, "batch": options.batch, "seq": options.seq}))


if __name__ == "__main__":
    main()
