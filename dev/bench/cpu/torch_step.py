#!/usr/bin/env python3
"""torch_step.py: the contender of peers.py in PyTorch, as one would write it for speed on a CPU
today: one training step for every line of stdin.

    python3 dev/bench/cpu/torch_step.py '{"llama": false, "layers": 2, ..., "compiled": true,
                                          "bf16": false, "threads": 2}'       (peers.py: Case)

GPT-2 (dev/bench/gpu/torch_gpt.py) or a Llama, scaled_dot_product_attention, linears that read the
same input in one, autocast to bfloat16 if asked, gradients clipped, the faster of the fused and the
foreach AdamW. The lines of JSON are those of build/bench-fp32 --serve.
"""
import json
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from torch_gpt import GPT

OLD = not hasattr(nn, "RMSNorm")  # before 2.4, when AdamW was fused on GPUs alone
if not hasattr(F, "scaled_dot_product_attention"):             # PyTorch 1
    def attention(q, k, v, is_causal):
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return F.softmax((q @ k.transpose(2, 3) / math.sqrt(q.shape[3]))
                         .masked_fill(hidden, -math.inf), dim=3).to(v.dtype) @ v

    F.scaled_dot_product_attention = attention
if OLD:
    class RMSNorm(nn.Module):
        def __init__(self, width, eps):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    nn.RMSNorm = RMSNorm


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, hidden = heads, 32 * math.ceil(8 * width / 3 / 32)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for z in self.qkv(self.norm1(x)).split(C, dim=2))
        q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), dim=3)
                for a, b in (q.chunk(2, dim=3), k.chunk(2, dim=3)))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
                         .reshape(B, T, C))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers, width, heads, vocab, seq):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(vocab, width), nn.RMSNorm(width, eps=1e-5)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)
        size = width // heads
        angles = torch.arange(seq)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, inputs, targets):
        x = self.tokens(inputs)
        cos, sin = self.turns
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def fastest_adamw(model):
    """The faster of PyTorch's two AdamW for many tensors, timed on gradients of zero and a rate of
    zero, and its name."""
    groups = [[p for p in model.parameters() if p.dim() >= 2],
              [p for p in model.parameters() if p.dim() < 2]]

    def adamw(kind, lr):
        return torch.optim.AdamW([{"params": group, "weight_decay": decay}
                                  for group, decay in zip(groups, (0.1, 0.0))], lr=lr,
                                 betas=(0.9, 0.95), **{kind: True})

    times = {"fused": [], "foreach": []} if not OLD else {"foreach": []}
    for kind, found in times.items():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        idle = adamw(kind, 0.0)
        for _ in range(4):
            begin = time.perf_counter()
            idle.step()
            found.append(time.perf_counter() - begin)
    model.zero_grad(set_to_none=True)
    best = min(times, key=lambda kind: min(times[kind]))
    return best, adamw(best, 6e-4)


def serve(case):
    torch.set_num_threads(case.threads)
    torch.manual_seed(1)
    model = (Llama if case.llama else GPT)(case.layers, case.width, case.heads, case.vocab,
                                           case.seq)
    for linear in (m for m in model.modules() if isinstance(m, nn.Linear) and not case.bias):
        linear.bias = None
    if case.llama and case.bf16:
        model.turns = model.turns.bfloat16()
    kind, optimizer = fastest_adamw(model)
    run = torch.compile(model) if case.compiled else model
    tokens = torch.randint(case.vocab, (case.batch * case.seq + 1,))
    inputs, targets = tokens[:-1].view(case.batch, case.seq), tokens[1:].view(case.batch, case.seq)
    libraries = (re.findall(r"BLAS_INFO=\w+|MKL-DNN v[\d.]+", torch.__config__.show())
                 + re.findall(r"CPU capability usage: (\w+)", torch.__config__.show()))
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "adamw": kind,
                      "torch": torch.__version__, "libraries": libraries}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.bf16):
            loss = run(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - begin), "loss": value}), flush=True)


if __name__ == "__main__":
    try:
        serve(SimpleNamespace(**json.loads(sys.argv[1])))
    except Exception as error:  # torch.compile needs a C++ compiler; memory may run out
        sys.exit(f"error: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
