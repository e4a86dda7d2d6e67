#!/usr/bin/env python3
"""A second implementation of every normalization placement, in PyTorch and double precision, and
the numbers it gives.

    python3 dev/oracle/oracle.py            writes dev/oracle/goldens/ anew (a minute)
    python3 dev/oracle/oracle.py --check    computes everything again and compares it with the files

Needs python3 with torch, numpy and safetensors. dev/test/test_oracle.c compares the judge with the
files, which are part of the repository, and needs none of these.

Nothing here is derived from the C code: a placement is its equations as the papers write them
(section "blocks"), gradients are autograd's, steps are those of torch.optim.AdamW and
torch.optim.Muon. Shared with the C code are only names: of modes, of tensors, of settings (struct
Model in llmc/modes.h).

One file <shape>.safetensors for each entry of SHAPES, for models of that shape:
  <checkpoint name>     F32   a weight, for all cases of the file. A mode whose gain is shorter (one
                              head's instead of the full width) takes the first values. Gains,
                              alphas and biases are drawn away from 1 and 0, or a missing one
                              would not show.
  inputs, targets       I32   [3, B, seq]: a batch for each of three steps
  <case>.steps          F64   [3, 4]: cross-entropy, z-loss, the routers' losses, gradient norm
                              before clipping, for each step
  <case>.gradients      F64   of the first step before clipping, all tensors of the model one after
                              the other in the byte order of their names; zeros for the selection
                              bias of experts, which has none
  <case>.parameters     F64   after the third step, in the same order
  __metadata__                "oracle": JSON {"settings": {...}, "cases": {case: {"mode": ...,
                              "tensors": [...], settings that differ}}}; tensors: the numbers of the
                              model's tensors in the file's weights, these in the byte order of
                              their names.
gpt2.safetensors also holds "files", the list of all of them, and "text", this file: the C test
refuses goldens of another oracle.py.

Sources: SpanNorm (SPAN), HybridNorm (HYB) and Scale-Distribution Decoupling (SDD) by equation
number; Mix-LN (Li et al. 2025), LayerNorm Scaling (Sun et al. 2025), Peri-LN (Kim et al. 2025),
Sandwich-LN (CogView, Ding et al. 2021), OLMo 2 (2025), DeepNorm (Wang et al. 2022); GPT-2 (Radford
et al. 2019), Llama (Touvron et al. 2023), RoPE (Su et al. 2021), AdamW (Loshchilov, Hutter 2019),
Muon (Jordan et al. 2024);
nGPT (Loshchilov et al. 2024); DyT (Zhu et al. 2025); mixture of experts: OLMoE (Muennighoff et al.
2024), DeepSeek-V2 and V3 (2024), whose attention (MLA) this is too.
"""
import json
import math
import pathlib
import sys
import zlib
from functools import partial

import numpy as np
import torch
from unittest import mock
from safetensors import safe_open
from safetensors.torch import save_file

GOLDENS = pathlib.Path(__file__).resolve().parent / "goldens"
STEPS = 3

# The slots of a block's norms, by checkpoint name.
A_IN, A_OUT, A_SUM = "input_layernorm", "post_attention_layernorm", "attention_sum_layernorm"
F_IN, F_OUT, F_SUM = ("pre_feedforward_layernorm", "post_feedforward_layernorm",
                      "feedforward_sum_layernorm")
QKV = {"q_proj", "k_proj", "v_proj"}


# ------------------------------------------------------------------------------------------- layers


def layernorm(x, gain, bias, eps):
    mean = x.mean(-1, keepdim=True)
    return gain * (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps) + bias


def rmsnorm(x, gain, eps):
    return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def dyt(x, alpha, gain, bias):
    return gain * torch.tanh(alpha * x) + bias


def unit(x):
    """L2, x / |x|. The 1e-12 is under the root of the mean square."""
    return x / math.sqrt(x.shape[-1]) / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-12)


def gelu(x):
    """The tanh form, GPT-2's."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def llama3(frequencies, factor, context):
    """Llama 3's RoPE, by the wavelength of a pair in tokens: longer than the context it was trained
    with, factor times longer; shorter than a quarter of it, as it was; a blend of both between."""
    wavelength = 2 * math.pi / frequencies
    kept = (context / wavelength - 1) / (4 - 1)
    blend = (1 - kept) * frequencies / factor + kept * frequencies
    blend = torch.where(wavelength < context / 4, frequencies, blend)
    return torch.where(wavelength > context, frequencies / factor, blend)


def rope(x, s):
    """x: [B, T, heads, HS]. Turns the pair (i, i + HS/2) of each head by the angle t
    theta^(-2i/HS)."""
    T, HS = x.shape[1], x.shape[3]
    frequencies = s["theta"] ** (-2 * torch.arange(HS // 2).double() / HS)
    if s["rope_factor"] > 1:
        frequencies = llama3(frequencies, s["rope_factor"], s["rope_original"])
    angle = torch.arange(T)[:, None, None] * frequencies
    a, b = x[..., : HS // 2], x[..., HS // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def softmax_attention(Q, K, V, scale, document):
    """softmax(scale Q K^T) V over the past in the same document. A run of NH / KV query heads
    shares one head of keys and values. document: [B, T], its number."""
    T, NH = Q.shape[1:3]
    K, V = (x.repeat_interleave(NH // x.shape[2], dim=2) for x in (K, V))
    scores = scale * torch.einsum("bthi,bshi->bhts", Q, K)
    hidden = torch.ones(T, T).triu(1).bool() | (document[:, :, None] != document[:, None, :])
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    return torch.einsum("bhts,bshi->bthi", scores.softmax(-1), V)


def load_balance(chosen, p, sequences):
    """E sum_e f_e P_e over each group of so many sequences, averaged over the groups. f_e: the
    share of the assignments that expert e gets, without a gradient; P_e: its mean probability.
    (OLMoE's loss over a micro-batch; DeepSeek-V3 eq 17-20 over each sequence.)"""
    f, P = (x.reshape(-1, sequences * x.shape[1], x.shape[2]).mean(1)
            for x in (chosen / chosen.sum(-1, keepdim=True), p))
    return p.shape[2] * (f * P).sum(-1).mean()


# ---------------------------------------------------------------------------------------- sublayers


def of_part(part, name):
    """The name in a mixture of what a dense ffn calls `name`. (SDD's norm of the ffn's output then
    belongs to the part, before the gate.)"""
    return f"mlp.{part}." + ("out_norm.weight" if name == F_OUT + ".weight"
                             else name.removeprefix("mlp."))


class Block:
    """Layer l of L: its norms and sublayers, under the letters of the papers. `weight(name,
    *sizes)` gives a weight of the layer; its router leaves what it found in the list `routed`.
    part: not the layer but an ffn inside its mixture of experts."""

    def __init__(self, weight, s, l, routed, part=False):
        self.weight, self.s, self.l, self.L = weight, s, l, s["L"]
        self.routed, self.part = routed, part

    def N(self, slot, x):
        """The model's norm over the last dimension. (On [B, T, heads, HS] this is one gain shared
        by the heads, HYB algorithm 1.)"""
        gain = self.weight(slot + ".weight", x.shape[-1])
        if not (self.s["layernorm"] or self.s["dyt"]):
            return rmsnorm(x, gain, self.s["eps"])
        bias = self.weight(slot + ".bias", x.shape[-1])
        if self.s["dyt"]:
            return dyt(x, self.weight(slot + ".alpha", 1), gain, bias)
        return layernorm(x, gain, bias, self.s["eps"])

    def linear(self, name, x, out):
        y = x @ self.weight(name + ".weight", out, x.shape[-1]).T
        biased = self.s["bias"] or self.s["qkv_bias"] and name[-6:] in QKV
        return y + self.weight(name + ".bias", out) if biased else y

    def alpha_norm(self, slot, z):
        """SDD eq 2, y = alpha * norm(V x), given z = V x. The norm is RMS in both families: alpha
        is all that SDD adds."""
        return rmsnorm(z, self.weight(slot + ".weight", z.shape[-1]), self.s["eps"])

    # Attention. Q, K, V are [B, T, heads, width of a head].

    def qkv(self, x):
        """MLA (DeepSeek-V2 eq 9-19, q not compressed): keys and values come from a latent, but for
        the last rope_size channels of a key, which come from x and are the same in every head. They
        and the last ones of q turn with the position, the others do not. How norms of q and k go
        with that, papers leave open; taken: they act on heads as attention sees them, before they
        turn."""
        s, NH, HS = self.s, self.s["NH"], self.s["HS"]
        if not s["kv_rank"]:
            widths = (("q", NH), ("k", s["KV"]), ("v", s["KV"]))
            return [self.linear(f"self_attn.{c}_proj", x, heads * HS).unflatten(-1, (heads, HS))
                    for c, heads in widths]
        Q = self.linear("self_attn.q_proj", x, NH * (HS + s["rope_size"])).unflatten(-1, (NH, -1))
        latent, turning = self.linear("self_attn.kv_a_proj_with_mqa", x, s["kv_rank"]
                                      + s["rope_size"]).split([s["kv_rank"], s["rope_size"]], -1)
        latent = self.N("self_attn.kv_a_layernorm", latent)
        K, V = self.linear("self_attn.kv_b_proj", latent,
                           NH * 2 * HS).unflatten(-1, (NH, 2 * HS)).split(HS, -1)
        return [Q, torch.cat([K, turning[:, :, None].expand(-1, -1, NH, -1)], -1), V]

    def turn(self, x):
        R = self.s["rope_size"] if self.s["kv_rank"] else self.s["HS"]
        return (torch.cat([x[..., :-R], rope(x[..., -R:], self.s)], -1)
                if self.s["rope"] else x)

    def attend(self, Q, K, V):
        return softmax_attention(self.turn(Q), self.turn(K), V, 1 / math.sqrt(Q.shape[-1]),
                                 self.s["document"])

    def out(self, context):
        return self.linear("self_attn.o_proj", context.flatten(2), self.s["C"])

    def MHA(self, x, norms=""):
        """HYB eq 35-40: MHA_# with # the letters in `norms`, each norm over a head, before RoPE."""
        Q, K, V = self.qkv(x)
        Q = self.N("self_attn.q_norm", Q) if "Q" in norms else Q
        K = self.N("self_attn.k_norm", K) if "K" in norms else K
        V = self.N("self_attn.v_norm", V) if "V" in norms else V
        C = self.attend(Q, K, V)
        return self.out(self.N("self_attn.context_norm", C) if "C" in norms else C)

    def MHA_full_qk(self, x):
        """OLMo 2: norms of q and k over their full width, all heads together."""
        Q, K, V = self.qkv(x)
        Q, K = (self.N(f"self_attn.{c}_norm", X.flatten(2)).view_as(X)
                for c, X in (("q", Q), ("k", K)))
        return self.out(self.attend(Q, K, V))

    def MHA_sdd(self, x):
        """SDD figure 2. paper: every linear by eq 2, over all its outputs. code (the release): q
        and k over each head with a shared alpha, v plain, and a norm of the concatenated context
        instead; o by eq 2."""
        Q, K, V = self.qkv(x)
        if self.s["sdd"] == "paper":
            Q, K, V = (self.alpha_norm(f"self_attn.{c}_norm", X.flatten(2)).view_as(X)
                       for c, X in (("q", Q), ("k", K), ("v", V)))
            context = self.attend(Q, K, V)
        else:
            Q, K = self.alpha_norm("self_attn.q_norm", Q), self.alpha_norm("self_attn.k_norm", K)
            context = self.alpha_norm("self_attn.context_norm", self.attend(Q, K, V).flatten(2))
        return self.alpha_norm(A_OUT, self.out(context))

    def MHA_ngpt(self, x):
        """nGPT: q and k of length 1 in each head, after RoPE, times s_qk, one vector for both; so
        the scale is the root of the head's width itself."""
        Q, K, V = self.qkv(x)
        s_qk = math.sqrt(self.s["C"]) * self.weight("self_attn.q_norm.weight",
                                                    Q[0, 0].numel()).view_as(Q[0, 0])
        return self.out(softmax_attention(s_qk * unit(self.turn(Q)), s_qk * unit(self.turn(K)), V,
                                          math.sqrt(Q.shape[-1]), self.s["document"]))

    # The ffn: dense, of hidden width F, or a mixture of such.

    def MLP(self, x, F):
        up = self.linear("mlp.up_proj", x, F)
        if not self.s["swiglu"]:
            return self.linear("mlp.down_proj", gelu(up), self.s["C"])
        gate = self.linear("mlp.gate_proj", x, F)
        return self.linear("mlp.down_proj", torch.nn.functional.silu(gate) * up, self.s["C"])

    def MLP_sdd(self, x, F):
        """The alphas of gate and up are one vector, [gate | up]. paper: a norm for each of the two;
        code: one norm over both, but not in a mixture."""
        up = self.linear("mlp.up_proj", x, F)
        if not self.s["swiglu"]:
            hidden = gelu(self.alpha_norm("mlp.hidden_norm", up))
        else:
            gate = self.linear("mlp.gate_proj", x, F)
            if self.s["sdd"] == "paper" or self.part:
                alpha = self.weight("mlp.hidden_norm.weight", 2 * F)
                gate = rmsnorm(gate, alpha[:F], self.s["eps"])
                up = rmsnorm(up, alpha[F:], self.s["eps"])
            else:
                gate, up = self.alpha_norm("mlp.hidden_norm",
                                           torch.cat([gate, up], -1)).split(F, -1)
            hidden = torch.nn.functional.silu(gate) * up
        return self.alpha_norm(F_OUT, self.linear("mlp.down_proj", hidden, self.s["C"]))

    def MLP_ngpt(self, x, F):
        """nGPT: gate and up times s_uv, [gate | up], and the root of the width."""
        root, up = math.sqrt(self.s["C"]), self.linear("mlp.up_proj", x, F)
        if not self.s["swiglu"]:
            hidden = gelu(root * self.weight("mlp.hidden_norm.weight", F) * up)
        else:
            s_gate, s_up = self.weight("mlp.hidden_norm.weight", 2 * F).split(F)
            hidden = (torch.nn.functional.silu(root * s_gate * self.linear("mlp.gate_proj", x, F))
                      * (root * s_up * up))
        return self.linear("mlp.down_proj", hidden, self.s["C"])

    def FFN(self, x, mlp=MLP):
        s = self.s
        if s["moe.E"] and self.l >= s["moe.dense"]:
            return self.mixture(x, mlp)
        return mlp(self, x, s["moe.dense_F"] if s["moe.E"] else s["F"])

    def mixture(self, x, mlp):
        """OLMoE eq 1-2, DeepSeek-V3 eq 12-16: y = shared(x) + sum over the K chosen of g_e
        expert_e(x). Here every expert reads every token, and the gates of those that were not
        chosen are zero."""
        s, E, K = self.s, self.s["moe.E"], self.s["moe.K"]
        z = x @ self.weight("mlp.gate.weight", E, s["C"]).T
        score = z.sigmoid() if s["moe.router"] == "sigmoid" else z.softmax(-1)
        rank = score.detach() + (self.weight("mlp.gate.e_score_correction_bias", E)
                                 if s["moe.bias_rate"] else 0)
        chosen = torch.zeros_like(rank).scatter(-1, rank.topk(K).indices, 1.0)
        if K < E:
            order = rank.sort(-1, descending=True).values
            assert (order[..., K - 1] - order[..., K]).min() > 1e-6, (
                f"{s['mode']}, layer {self.l}: a choice so close that rounding may decide it")
        # SDD's release
        share = s["F"] / E if s["mode"].startswith("SDD") and s["sdd"] == "code" else 1
        gates = s["moe.scale"] * share * chosen * score
        if s["moe.router"] != "softmax":
            gates = gates / (chosen * score).sum(-1, keepdim=True)
        p = score / score.sum(-1, keepdim=True)
        losses = (load_balance(chosen, p, s["micro"]), load_balance(chosen, p, 1),
                  (z.logsumexp(-1) ** 2).mean())
        self.routed.append((self.l, losses, chosen.sum((0, 1))))
        y = sum(gates[..., e, None] * mlp(self.expert(e), x, s["F"]) for e in range(E))
        return y + mlp(self.shared_experts(), x, s["moe.shared_F"]) if s["moe.shared_F"] else y

    def expert(self, e):
        """Expert e as a dense ffn: matrices of all experts lie one below the other, and so do
        gains."""

        def weight(name, *sizes):
            E = self.s["moe.E"]
            stacked = (E * sizes[0], sizes[1]) if len(sizes) == 2 else (E, *sizes)
            return self.weight(of_part("experts", name), *stacked).reshape(E, *sizes)[e]

        return Block(weight, self.s, self.l, None, part=True)

    def shared_experts(self):
        """The part that all tokens go through, as a dense ffn."""

        def weight(name, *sizes):
            return self.weight(name if name == "mlp.hidden_norm.weight"
                               else of_part("shared_experts", name), *sizes)

        return Block(weight, self.s, self.l, None, part=True)

    def rate(self, sublayer):
        """nGPT's alpha, how far the stream turns towards the sublayer's output: 0.05 where its
        parameter is as at the start, 1 / sqrt(C)."""
        return 0.05 * math.sqrt(self.s["C"]) * self.weight(sublayer + ".alpha", self.s["C"]).abs()


# ------------------------------------------------------------------------------------------- blocks
# X: the stream into the block (E, the embedding, in layer 0). Y: between attention and ffn.
# Returned: the stream into the next block.


def pre(b, X):  # SPAN eq 3-4
    Y = b.MHA(b.N(A_IN, X)) + X
    return b.FFN(b.N(F_IN, Y)) + Y


def post(b, X):  # SPAN eq 1-2
    Y = b.N(A_SUM, b.MHA(X) + X)
    return b.N(F_SUM, b.FFN(Y) + Y)


def span(b, X):  # SPAN eq 5-6; layer 0: eq 7-8
    if b.l == 0:
        Y = b.N(A_SUM, b.MHA(b.N(A_IN, X)) + X)
    else:
        Y = b.N(A_SUM, b.MHA(X) + X)
    return b.N(F_SUM, b.FFN(Y) + X)


def x_post(b, X, norms):  # HYB eq 41-42, "#-Post"; HybridNorm itself, eq 8-9, for QKV
    Y = b.MHA(X, norms) + X
    return b.FFN(b.N(F_IN, Y)) + b.N(F_IN, Y)


def x_pre(b, X, norms):  # HYB eq 43-44, "#-Pre"
    Y = b.MHA(X, norms) + X
    return b.FFN(b.N(F_IN, Y)) + Y


def pre_x_post(b, X, norms):  # HYB eq 45-46, "Pre-#-Post"; eq 49-50, "Pre-Post", without norms
    Y = b.MHA(b.N(A_IN, X), norms) + X
    return b.FFN(b.N(F_IN, Y)) + b.N(F_IN, Y)


def pre_x_pre(b, X, norms):  # HYB eq 47-48, "Pre-#-Pre"
    Y = b.MHA(b.N(A_IN, X), norms) + X
    return b.FFN(b.N(F_IN, Y)) + Y


def post_pre(b, X):  # HYB eq 51-52
    Y = b.MHA(b.N(A_IN, X)) + b.N(A_IN, X)
    return b.FFN(b.N(F_IN, Y)) + Y


# the released code of HYB and SDD: the norm of each sum moved to the start of the next sublayer
def post_shifted(b, X):
    Y = b.MHA(b.N(A_IN, X)) + b.N(A_IN, X)
    return b.FFN(b.N(F_IN, Y)) + b.N(F_IN, Y)


def hybrid_star(b, X):  # HYB eq 10-11 in layer 0, eq 8-9 above
    return pre_x_pre(b, X, "QKV") if b.l == 0 else x_post(b, X, "QKV")


def first_qkv_pre(b, X):  # HYB section 4.4, First-QKV-Pre
    return x_pre(b, X, "QKV") if b.l == 0 else x_post(b, X, "QKV")


# Mix-LN: the first floor(ratio L) layers PostNorm (the classical one), the others PreNorm
def mix_ln(b, X):
    return post(b, X) if b.l < math.floor(b.s["mix_ratio"] * b.L) else pre(b, X)


# LayerNorm Scaling: 1 / sqrt of the layer's number, counted from 1, on what the sublayer reads
def lns(b, X):
    c = 1 / math.sqrt(b.l + 1)
    Y = b.MHA(c * b.N(A_IN, X)) + X
    return b.FFN(c * b.N(F_IN, Y)) + Y


def peri(b, X):  # Peri-LN; Sandwich-LN is the same block
    Y = b.N(A_OUT, b.MHA(b.N(A_IN, X))) + X
    return b.N(F_OUT, b.FFN(b.N(F_IN, Y))) + Y


def olmo2(b, X):
    Y = b.N(A_OUT, b.MHA_full_qk(X)) + X
    return b.N(F_OUT, b.FFN(Y)) + Y


def olmoe(b, X):  # PreNorm with those norms of q and k
    Y = b.MHA_full_qk(b.N(A_IN, X)) + X
    return b.FFN(b.N(F_IN, Y)) + Y


def deepnorm(b, X):  # decoder only: alpha = (2L)^(1/4)
    a = (2 * b.L) ** 0.25
    Y = b.N(A_SUM, a * X + b.MHA(X))
    return b.N(F_SUM, a * Y + b.FFN(Y))


# Keel eq 8: a skip as strong as there are sublayers. Section 3.1: not in the first two, and the
# first attention has no norm of its sum.
def keel(b, X):
    if b.l == 0:
        Y = X + b.MHA(b.N(A_IN, X))
        return b.N(F_SUM, Y + b.FFN(b.N(F_IN, Y)))
    sublayers = 2 * b.L
    Y = b.N(A_SUM, sublayers * X + b.MHA(b.N(A_IN, X)))
    return b.N(F_SUM, sublayers * Y + b.FFN(b.N(F_IN, Y)))


def sdd(b, X):  # SDD's own models: post_shifted with eq 2 for every linear of the block
    Y = b.MHA_sdd(b.N(A_IN, X)) + b.N(A_IN, X)
    return b.FFN(b.N(F_IN, Y), Block.MLP_sdd) + b.N(F_IN, Y)


def sdd_pre(b, X):  # SDD figure 8: on PreNorm
    Y = b.MHA_sdd(b.N(A_IN, X)) + X
    return b.FFN(b.N(F_IN, Y), Block.MLP_sdd) + Y


def ngpt(b, X):  # nGPT eq 10-11; the branches read the stream, which has length 1
    Y = unit(X + b.rate("self_attn") * (unit(b.MHA_ngpt(X)) - X))
    return unit(Y + b.rate("mlp") * (unit(b.FFN(Y, Block.MLP_ngpt)) - Y))


MODES = {
    "SPAN": span, "PRE": pre, "POST": post, "SDD": sdd, "SDD_PRE": sdd_pre, "MIX_LN": mix_ln,
    "LNS": lns, "PERI": peri, "SANDWICH": peri, "OLMO2": olmo2, "OLMOE": olmoe,
    "DEEPNORM": deepnorm, "KEEL": keel, "POST_SHIFTED": post_shifted,
    "POST_PRE": post_pre, "HYBRID_STAR": hybrid_star, "FIRST_QKV_PRE": first_qkv_pre,
    "HYBRID": partial(x_post, norms="QKV"), "EMBED_NORM": partial(x_post, norms="QKV"),
    "QKVC_POST": partial(x_post, norms="QKVC"),
    "QKC_POST": partial(x_post, norms="QKC"), "QK_POST": partial(x_post, norms="QK"),
    "KV_POST": partial(x_post, norms="KV"),
    "KC_POST": partial(x_post, norms="KC"), "QKV_PRE": partial(x_pre, norms="QKV"),
    "PRE_POST": partial(pre_x_post, norms=""),
    "PRE_QKV_POST": partial(pre_x_post, norms="QKV"),
    "PRE_QKV_PRE": partial(pre_x_pre, norms="QKV"), "PRE_QK_PRE": partial(pre_x_pre, norms="QK"),
    "NGPT": ngpt,
}
# Peri-LN leaves it open; taken: with it. Without it, the block is SANDWICH's.
EMBEDDING_NORM = {"EMBED_NORM", "PERI"}
# so the papers leave a norm before the head open; taken: none, unless final_norm is on
STREAM_IS_NORMED = {"SPAN", "POST", "DEEPNORM", "KEEL", "NGPT"}


# -------------------------------------------------------------------------------------------- model


def logits_of(get, s, inputs, routed):
    C, V = s["C"], s["V"]
    begins = inputs == s["separator"]
    s = s | {"document": begins.cumsum(1)}
    tokens = get("model.embed_tokens.weight", V, C)
    # learned positions are not scaled: the setting is Gemma's, which has none
    X = s["emb_scale"] * tokens[inputs]
    if not s["rope"]:
        at = torch.arange(inputs.shape[1]).expand(inputs.shape)
        if s["restart"]:
            at = at - (begins * at).cummax(1).values
        X = X + get("model.embed_positions.weight", s["T"], C)[at]
    # only for its norm
    model = Block(lambda name, *sizes: get("model." + name, *sizes), s, None, None)
    if s["mode"] in EMBEDDING_NORM:
        X = model.N("embed_norm", X)
    for l in range(s["L"]):
        X = MODES[s["mode"]](Block(lambda name, *sizes: get(f"model.layers.{l}.{name}", *sizes), s,
                                   l, routed), X)
    if s["final_norm"] or s["mode"] not in STREAM_IS_NORMED:
        X = model.N("norm", X)
    logits = X @ (tokens if s["tied"] else get("lm_head.weight", V, C)).T
    return math.sqrt(C) * get("lm_head.s_z", V, 1).T * logits if s["mode"] == "NGPT" else logits


def loss_of(logits, targets, z_loss):
    """Means over the tokens of the cross-entropy and of z_loss logsumexp^2 (PaLM, OLMo 2), in
    nats."""
    lse = logits.logsumexp(-1)
    return (lse - logits.gather(-1, targets[..., None])[..., 0]).mean(), z_loss * (lse**2).mean()


def router_loss(routed, s):
    """The losses of all layers with experts together. mean (OLMoE): their average, and the z-loss
    over K besides. sum (DeepSeek)."""
    balance, sequence, z = (sum(losses[i] for _, losses, _ in routed) for i in range(3))
    if s["moe.losses"] == "mean":
        balance, sequence, z = (balance / len(routed), sequence / len(routed),
                                z / len(routed) / s["moe.K"])
    return s["moe.balance"] * balance + s["moe.sequence"] * sequence + s["moe.z"] * z


# ----------------------------------------------------------------------------------------- training


class Weights(dict):
    """The weights of a shape, drawn when first asked for: a function of the name, rounded to float.
    The longest asked for is kept."""

    def draw(self, name, *sizes):
        # RandomState: its streams never change
        n, random = math.prod(sizes), np.random.RandomState(zlib.crc32(name.encode()))
        if is_dyts(name):
            std, mean = 0.2, 0.7
        elif name.endswith(".alpha"):
            std, mean = 3, 0  # nGPT's counts by its absolute value
        elif is_gain(name) or name.endswith("bias"):
            std, mean = 0.3, 1 if is_gain(name) else 0
        else:
            std, mean = 0.5 if "embed" in name else 1.2 / math.sqrt(sizes[-1]), 0
        value = torch.tensor((mean + std * random.standard_normal(n))
                             .astype(np.float32)).reshape(sizes)
        if name not in self or self[name].numel() < n:
            self[name] = value
        return value.double()


def is_dyts(name):
    """Whether it is the alpha of a DyT in the place of a norm."""
    return name.endswith("norm.alpha")


def is_gain(name):
    return name.endswith(("norm.weight", ".alpha", ".s_z")) and not is_dyts(name)


def group_of(name, s):
    """Learning rate and weight decay of a tensor: embeddings (the tied head is one), head, other
    matrices, vectors. DyT's alpha does not decay."""
    embedding, hidden, head, vector = s["lr"]
    of_matrix, of_embedding, of_vector = s["decay"]
    if "embed_tokens" in name or "embed_positions" in name:
        return {"lr": embedding, "weight_decay": of_embedding}
    if name == "lm_head.weight":
        return {"lr": head, "weight_decay": of_matrix}
    if is_dyts(name):
        return {"lr": vector, "weight_decay": 0}
    if is_gain(name) or name.endswith(".bias"):
        return {"lr": vector, "weight_decay": of_vector}
    return {"lr": hidden, "weight_decay": of_matrix}


def is_muons(name):
    """Whether Muon updates the tensor: a matrix of a block, but for the router."""
    return "_proj" in name and name.endswith("weight")


class Optimizer:
    """AdamW for all tensors, or Muon for some."""

    def __init__(self, leaves, s):
        muons = {n: w for n, w in leaves.items() if is_muons(n) and s["optimizer"] == "muon"}
        self.adamw = torch.optim.AdamW([{"params": [w], **group_of(n, s)}
                                        for n, w in leaves.items() if n not in muons],
                                       betas=s["betas"], eps=s["adam_eps"])
        # Each expert's matrix is one by itself: a view of all experts'.
        self.matrices = [(w, w.detach().chunk(s["moe.E"] if "mlp.experts" in n else 1))
                         for n, w in muons.items()]
        self.muon = self.matrices and torch.optim.Muon(
            [matrix for _, parts in self.matrices for matrix in parts], lr=s["muon_lr"],
            weight_decay=s["decay"][0], momentum=s["momentum"], adjust_lr_fn=s["muon_scale"])

    def step(self):
        self.adamw.step()
        for whole, parts in self.matrices:
            for matrix, grad in zip(parts, whole.grad.chunk(len(parts))):
                matrix.grad = grad
        if self.muon:  # which computes its iteration in bfloat16: here in double
            with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.clone()):
                self.muon.step()


@torch.no_grad()
def to_length_one(name, W, C):
    """nGPT, after every step: rows of matrices get length 1; of the projections into the stream, of
    each expert's too, the columns. The router and vectors stay. No gradient knows of it."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        each = W.unflatten(0, (-1, C))
        each /= each.norm(dim=1, keepdim=True)
    elif "_proj" in name or name in ("model.embed_tokens.weight", "lm_head.weight"):
        W /= W.norm(dim=1, keepdim=True)


def train(s, weights, inputs, targets):
    """Three steps: names of the model's tensors in order, steps, first gradients, last parameters;
    and the tokens of the idlest expert."""
    leaves, record, first, optimizer, least = {}, [], None, None, math.inf

    def from_one(name):  # gains as 1 + w, where decay moves w towards 0 (Gemma)
        return s["gain_target"] if is_gain(name) else 0

    def get(name, *sizes):
        if name not in leaves:
            learned = not name.endswith("e_score_correction_bias")
            leaves[name] = (weights.draw(name, *sizes) - from_one(name)).requires_grad_(learned)
        return leaves[name] + from_one(name)

    for step in range(STEPS):
        routed = []
        ce, z = loss_of(logits_of(get, s, inputs[step].long(), routed), targets[step].long(),
                        s["z_loss"])
        router = router_loss(routed, s) if routed else torch.tensor(0.0)
        names = sorted(leaves, key=str.encode)
        trained = [n for n in names if leaves[n].requires_grad]
        optimizer = optimizer or Optimizer({n: leaves[n] for n in trained}, s)
        for name in trained:
            leaves[name].grad = None
        (ce + z + router).backward()
        gradients = torch.cat([(leaves[n].grad if n in trained else torch.zeros_like(leaves[n]))
                               .flatten() for n in names])
        norm = gradients.norm().item()
        assert (norm > s["clip"]) == s["clipped"], (
            f"{s['mode']}: a gradient norm of {norm} and --clip {s['clip']}")
        record.append([ce.item(), z.item(), router.item(), norm])
        first = gradients if first is None else first
        for name in trained:
            leaves[name].grad *= min(1, s["clip"] / norm)
        optimizer.step()
        for name in trained if s["mode"] == "NGPT" else []:
            to_length_one(name, leaves[name], s["C"])
        for l, _, load in routed:
            least = min(least, load.min().item())
            if s["moe.bias_rate"]:  # DeepSeek-V3 section 2.1.2
                bias = leaves[f"model.layers.{l}.mlp.gate.e_score_correction_bias"]
                bias += s["moe.bias_rate"] * (load.mean() - load).sign()
    return (names, torch.tensor(record), first,
            torch.cat([(leaves[n].detach() + from_one(n)).flatten() for n in names]), least)


# -------------------------------------------------------------------------------------------- cases

GPT2 = {"layernorm": True, "bias": True, "rope": False, "swiglu": False, "tied": True}
LLAMA = {"layernorm": False, "bias": False, "rope": True, "swiglu": True, "tied": False}
# Router losses over a micro-batch; DeepSeek: latent attention, a dense layer first, shared experts,
# a loss over sequences, a selection bias.
OLMOE = LLAMA | {"moe.router": "softmax", "moe.losses": "mean", "moe.balance": 0.2, "moe.z": 0.1}
DEEPSEEK = LLAMA | {"moe.dense": 1, "moe.router": "sigmoid", "moe.scale": 1.5, "moe.losses": "sum",
                    "moe.sequence": 0.2, "moe.bias_rate": 0.05}
# B, seq: the batch; T: the context; micro: sequences of a micro-batch, B where nothing else is
# said. moe.*: modes.h's Moe; router and losses as flags.h names them. lr: embedding, hidden, head,
# vector; decay: matrix, embedding, vector (tensors.h's groups). adam_eps: a gradient that is zero
# but for rounding (a key's bias, 1e-17) must stay small against it, or the step amplifies the
# rounding; gradients that matter (1e-6 and more) still show whether it is there.
SETTINGS = {
    "theta": 1e4, "rope_factor": 1.0, "rope_original": 1.0, "qkv_bias": False,
    "eps": 1e-5, "emb_scale": 1.0, "mix_ratio": 0.34, "final_norm": False, "dyt": False,
    "sdd": "paper", "z_loss": 0.0, "kv_rank": 0, "rope_size": 0,
    "moe.E": 0, "moe.K": 0, "moe.dense": 0, "moe.dense_F": 0, "moe.shared_F": 0,
    "moe.router": "softmax", "moe.losses": "mean", "moe.scale": 1.0,
    "moe.balance": 0.0, "moe.sequence": 0.0, "moe.z": 0.0, "moe.bias_rate": 0.0,
    "lr": [0.002, 0.004, 0.003, 0.006], "decay": [0.1, 0.3, 0.2], "gain_target": 0,
    "betas": [0.9, 0.95], "adam_eps": 1e-6, "clip": 0.1, "clipped": True,
    "separator": -1, "restart": False,
    "optimizer": "adamw", "muon_scale": "original", "muon_lr": 0.02, "momentum": 0.8,
}
SHAPES = {  # each with its peculiarity
    # every mode
    "gpt2": GPT2 | {"L": 3, "C": 6, "NH": 2, "KV": 2, "HS": 3, "F": 4, "V": 11, "Vp": 128, "T": 7,
                    "B": 2, "seq": 5},
    # every mode; Vp = V, odd
    "llama": LLAMA | {"L": 3, "C": 6, "NH": 3, "KV": 1, "HS": 2, "F": 4, "V": 11, "Vp": 11, "T": 5,
                      "B": 2, "seq": 5},
    "gpt2-switches": GPT2 | {"L": 2, "C": 4, "NH": 1, "KV": 1, "HS": 4, "F": 3, "V": 7, "Vp": 7,
                             "T": 3, "B": 3, "seq": 3},
    "llama-switches": LLAMA | {"L": 2, "C": 4, "NH": 2, "KV": 1, "HS": 2, "F": 3, "V": 7, "Vp": 8,
                               "T": 4, "B": 3, "seq": 4},
    # two heads share one
    "llama-groups": LLAMA | {"L": 2, "C": 8, "NH": 4, "KV": 2, "HS": 2, "F": 3, "V": 5, "Vp": 8,
                             "T": 6, "B": 2, "seq": 6},
    # heads of their own size; pairs that Llama 3's RoPE slows, keeps and blends
    "llama-heads": LLAMA | {"L": 2, "C": 6, "NH": 2, "KV": 1, "HS": 10, "F": 3, "V": 5, "Vp": 8,
                            "T": 9, "B": 2, "seq": 9, "theta": 500.0, "rope_factor": 8.0,
                            "rope_original": 25.0},
    "llama-angles": LLAMA | {"L": 2, "C": 8, "NH": 2, "KV": 2, "HS": 4, "F": 3, "V": 5, "Vp": 8,
                             "T": 9, "B": 1, "seq": 7, "theta": 500.0},
    # whole blocks of queries
    "gpt2-long": GPT2 | {"L": 2, "C": 3, "NH": 1, "KV": 1, "HS": 3, "F": 5, "V": 7, "Vp": 8,
                         "T": 128, "B": 1, "seq": 128},
    # a part of a block of queries
    "llama-long": LLAMA | {"L": 2, "C": 4, "NH": 2, "KV": 1, "HS": 2, "F": 5, "V": 7, "Vp": 8,
                           "T": 140, "B": 1, "seq": 131},
    # a layer, a head, odd
    "gpt2-one": GPT2 | {"L": 1, "C": 3, "NH": 1, "KV": 1, "HS": 3, "F": 13, "V": 128, "Vp": 128,
                        "T": 4, "B": 3, "seq": 4},
    "llama-one": LLAMA | {"L": 1, "C": 10, "NH": 1, "KV": 1, "HS": 10, "F": 13, "V": 9, "Vp": 128,
                          "T": 4, "B": 5, "seq": 4, "theta": 50.0},
    # every mode
    "olmoe": OLMOE | {"L": 2, "C": 4, "NH": 2, "KV": 2, "HS": 2, "F": 3, "V": 7, "Vp": 8, "T": 6,
                      "B": 2, "seq": 5, "mix_ratio": 0.5, "moe.E": 5, "moe.K": 2},
    "olmoe-switches": OLMOE | {"L": 2, "C": 4, "NH": 2, "KV": 2, "HS": 2, "F": 3, "V": 7, "Vp": 8,
                               "T": 5, "B": 4, "seq": 3, "moe.E": 4, "moe.K": 2},
    "gpt2-experts": GPT2 | {"bias": False, "L": 2, "C": 4, "NH": 2, "KV": 2, "HS": 2, "F": 3,
                            "V": 7, "Vp": 7, "T": 5, "B": 2, "seq": 5, "moe.E": 3, "moe.K": 2,
                            "moe.shared_F": 5, "moe.balance": 0.1},
    # every mode
    "deepseek": DEEPSEEK | {"L": 2, "C": 4, "NH": 2, "KV": 2, "HS": 2, "F": 3, "V": 7, "Vp": 8,
                            "T": 6, "B": 2, "seq": 5, "mix_ratio": 0.5, "moe.E": 5, "moe.K": 2,
                            "kv_rank": 3, "rope_size": 4, "moe.dense_F": 7, "moe.shared_F": 6},
    "deepseek-switches": DEEPSEEK | {"L": 3, "C": 4, "NH": 2, "KV": 2, "HS": 2, "F": 2, "V": 7,
                                     "Vp": 8, "T": 4, "B": 2, "seq": 4, "moe.E": 4, "moe.K": 2,
                                     "kv_rank": 5, "rope_size": 2, "moe.dense_F": 3,
                                     "moe.shared_F": 4},
    "deepseek-long": DEEPSEEK | {"L": 2, "C": 4, "NH": 2, "KV": 2, "HS": 2, "F": 2, "V": 5, "Vp": 8,
                                 "T": 140, "B": 1, "seq": 131, "moe.E": 4, "moe.K": 2,
                                 "kv_rank": 3, "rope_size": 4, "moe.dense_F": 3, "moe.shared_F": 3,
                                 "theta": 500.0},
}
CODE = {"sdd": "code"}
DOCUMENTS = {"separator": 3}
MUON = {"optimizer": "muon"}
MATCH = MUON | {"muon_scale": "match_rms_adamw", "muon_lr": 0.01}
SWITCHES = {  # name: settings, and the modes to try them with
    "z_loss": ({"z_loss": 0.01}, ["SPAN", "HYBRID", "SDD", "OLMO2"]),
    "final_norm": ({"final_norm": True}, ["SPAN", "POST", "DEEPNORM", "KEEL"]),
    # the square root of the width
    "emb_scale": ({"emb_scale": 2.0}, ["SPAN", "HYBRID", "SDD", "SANDWICH"]),
    "towards_one": ({"gain_target": 1}, ["SPAN", "HYBRID", "SDD", "SANDWICH"]),
    "eps": ({"eps": 0.3}, ["SPAN", "HYBRID", "SDD", "PERI"]),
    "no_clip": ({"clip": 1e9, "clipped": False}, ["SPAN", "HYBRID"]),
    "small_adam_eps": ({"adam_eps": 1e-8}, ["SPAN", "HYBRID"]),
    # every slot of a norm, statistics over heads and rows, SDD's RMS beside it
    "dyt": ({"dyt": True}, ["SPAN", "POST_SHIFTED", "QKVC_POST", "OLMO2", "PERI", "KEEL", "LNS",
                            "SDD"]),
    "mix_none": ({"mix_ratio": 0.49}, ["MIX_LN"]),
    "mix_half": ({"mix_ratio": 0.5}, ["MIX_LN"]),
    "mix_all": ({"mix_ratio": 1.0}, ["MIX_LN"]),
}
OF_GPT2 = {"untied": ({"tied": False}, ["SPAN", "POST", "SDD"]),
           "no_bias": ({"bias": False}, ["SPAN", "HYBRID"]),
           "rope": ({"rope": True}, ["SPAN", "HYBRID", "NGPT"]),
           "muon": (MUON, ["SPAN", "PRE", "SDD"]),
           "muon_match": (MATCH, ["SPAN"]),
           "muon_rope": (MUON | {"rope": True}, ["NGPT"])}
OF_LLAMA = {"tied": ({"tied": True}, ["SPAN", "HYBRID", "SDD"]),
            "gelu": ({"swiglu": False}, ["SPAN", "HYBRID"]),
            "bias": ({"bias": True}, ["SPAN", "HYBRID"]),
            "qkv_bias": ({"qkv_bias": True}, ["SPAN", "OLMOE"]),
            "muon": (MUON, ["SPAN", "POST", "HYBRID"]),
            "muon_dyt": (MUON | {"dyt": True}, ["HYBRID"]),
            "muon_match": (MATCH, ["SDD"])}
OF_OLMOE = {
    "renorm": ({"moe.router": "softmax-renorm"}, ["SPAN", "NGPT"]),
    "sigmoid": ({"moe.router": "sigmoid"}, ["LNS"]),
    "all": ({"moe.K": 4}, ["SPAN"]),
    "all_renorm": ({"moe.K": 4, "moe.router": "softmax-renorm"}, ["PRE"]),
    "all_sigmoid": ({"moe.K": 4, "moe.router": "sigmoid", "moe.bias_rate": 0.05}, ["PRE"]),
    "one": ({"moe.K": 1}, ["SPAN"]),
    "sum": ({"moe.losses": "sum"}, ["SPAN"]),
    "each_sequence": ({"micro": 1}, ["SPAN"]),
    "halves": ({"micro": 2, "moe.sequence": 0.1, "z_loss": 0.01}, ["SPAN"]),
    "scale": ({"moe.scale": 2.5}, ["SPAN"]),
    "qkv_bias": ({"qkv_bias": True}, ["PRE"]),
    "biased": ({"moe.bias_rate": 0.05}, ["SPAN", "SDD"]),
    "biased_renorm": ({"moe.bias_rate": 0.05, "moe.router": "softmax-renorm", "moe.scale": 1.5},
                      ["SPAN"]),
    "no_loss": ({"moe.balance": 0.0, "moe.z": 0.0}, ["SPAN"]),
    "towards_one": ({"gain_target": 1}, ["SDD"]),
    "eps": ({"eps": 0.3}, ["SDD"]),
    "muon": (MUON, ["SPAN", "NGPT"]),
    "muon_match": (MATCH, ["SPAN"]),
}
OF_DEEPSEEK = {
    "mean": ({"moe.losses": "mean"}, ["SPAN"]),
    "balance": ({"moe.balance": 0.2, "moe.z": 0.1}, ["SPAN"]),
    "v2": ({"moe.router": "softmax", "moe.scale": 1.0, "moe.bias_rate": 0.0}, ["SPAN", "NGPT"]),
    "none_shared": ({"moe.shared_F": 0}, ["SPAN", "SDD", "NGPT"]),
    "none_dense": ({"moe.dense": 0}, ["SDD"]),
    "dense": ({"moe.E": 0, "F": 3}, ["SPAN", "SDD", "NGPT"]),
    "layernorm": ({"layernorm": True}, ["SPAN", "QKVC_POST"]),
    "dyt": ({"dyt": True}, ["SPAN", "QKVC_POST", "SDD"]),
    "muon": (MUON, ["SPAN", "SDD"]),
}


def cases_of(shape):
    """{case: settings that differ from the shape's, mode among them}"""
    s = SHAPES[shape]
    if shape in ("gpt2", "llama", "olmoe", "deepseek"):
        # its q and k turn, and share one vector of gains
        modes = [mode for mode in MODES if mode != "NGPT" or s["rope"] and s["KV"] == s["NH"]]
        return ({mode: {"mode": mode} for mode in modes}
                | {mode + ".code": {"mode": mode} | CODE for mode in ("SDD", "SDD_PRE")})
    if not shape.endswith("switches"):
        modes = ({"SPAN": {}, "HYBRID": {}, "SDD": {}, "SDD.code": CODE}
                 | ({"OLMO2": {}, "QKVC_POST": {}} if shape == "llama-groups" else {}))
        if shape.endswith("-long"):
            modes |= {"SPAN.documents": DOCUMENTS}
            modes |= {} if s["rope"] else {"PRE.restart": DOCUMENTS | {"restart": True}}
        if s["KV"] == s["NH"] and s["HS"] % 2 == 0:
            modes |= {"NGPT": {"rope": True}, "NGPT.documents": DOCUMENTS | {"rope": True}}
        return {name: {"mode": name.split(".")[0]} | options for name, options in modes.items()}
    switches = {"gpt2-switches": SWITCHES | OF_GPT2, "llama-switches": SWITCHES | OF_LLAMA,
                "olmoe-switches": OF_OLMOE, "deepseek-switches": OF_DEEPSEEK}[shape]
    return {f"{name}.{mode}": {"mode": mode} | options
            for name, (options, modes) in switches.items() for mode in modes}


def batches(s):
    """Three batches. Every third token is the last of the vocabulary: the same row of the embedding
    collects many gradients."""
    random = np.random.RandomState(s["seq"])
    inputs, targets = (random.randint(0, s["V"], size=(STEPS, s["B"], s["seq"])).astype(np.int32)
                       for _ in range(2))
    inputs[..., ::3] = s["V"] - 1
    return torch.tensor(inputs), torch.tensor(targets)


def golden(shape):
    """The tensors and the description of one file."""
    weights, tensors, cases, idlest = Weights(), {}, {}, math.inf
    settings = SETTINGS | {"micro": SHAPES[shape]["B"]} | SHAPES[shape]
    tensors["inputs"], tensors["targets"] = batches(settings)
    for case, options in cases_of(shape).items():
        if options["mode"].startswith(("SDD", "NGPT")):
            options = options | {"bias": False}  # eq 2 has none
        names, *results, least = train(settings | options, weights, tensors["inputs"],
                                       tensors["targets"])
        idlest = min(idlest, least)
        tensors |= {f"{case}.{what}": result
                    for what, result in zip(("steps", "gradients", "parameters"), results)}
        cases[case] = options | {"tensors": names}
    assert idlest == (0 if settings["moe.E"] else math.inf), (
        f"{shape}: no expert without a token in any case")
    order = sorted(weights, key=str.encode)
    for case in cases.values():
        case["tensors"] = [order.index(name) for name in case["tensors"]]
    about = {"settings": settings, "cases": cases}
    if shape == "gpt2":
        about |= {"files": [name + ".safetensors" for name in SHAPES],
                  "text": pathlib.Path(__file__).read_text(encoding="utf-8")}
    return weights | tensors, about


# -------------------------------------------------------------------------------------------- files


def differences(path, tensors, about):
    """Differences between a file and what was computed, a line each."""
    if not path.exists():
        return [f"{path.name} is missing"]
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
        was = json.loads(file.metadata()["oracle"])
    wrong = [f"{path.name}: {key} differs" for key in sorted(about.keys() | was.keys())
             if about.get(key) != was.get(key)]
    wrong += [f"{path.name}: {name} is in one of the two only"
              for name in sorted(found.keys() ^ tensors.keys())]
    for name in sorted(found.keys() & tensors.keys()):
        a, b = found[name], tensors[name]
        alike = a.shape == b.shape and a.dtype == b.dtype
        error = ((a - b).double().norm() / b.double().norm()).item() if alike else math.inf
        # the same machine gives the same bits; another one rounds otherwise, and three steps
        # amplify it
        if not error <= 1e-11:
            wrong.append(f"{path.name}: {name} differs by {error:.2g} of its norm")
    return wrong


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(f"expected no argument or --check, found {' '.join(sys.argv[1:])}\n"
                 "  -> python3 dev/oracle/oracle.py [--check]")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    made = {GOLDENS / f"{shape}.safetensors": golden(shape) for shape in SHAPES}
    there = set(GOLDENS.glob("*"))
    if sys.argv[1:]:
        wrong = [line for path, (tensors, about) in made.items()
                 for line in differences(path, tensors, about)]
        wrong += [f"{path.name} is no golden" for path in sorted(there - made.keys())]
        if wrong:
            sys.exit("\n".join(wrong) + "\n  -> python3 dev/oracle/oracle.py, and look at what "
                                        "changed before you commit it")
        print(f"{len(made)} files hold what oracle.py computes")
        return
    GOLDENS.mkdir(exist_ok=True)
    for path in there - made.keys():
        path.unlink()
    for path, (tensors, about) in made.items():
        save_file(tensors, path, metadata={"oracle": json.dumps(about)})
        print(f"{path.name:30} {len(about['cases']):3} cases {path.stat().st_size:8} bytes")


if __name__ == "__main__":
    main()
