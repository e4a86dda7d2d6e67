"""modeling_norm.py: language models of norm.c, for Hugging Face transformers.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

A block is two sublayers, attention and ffn. The placement of its norms is a row of a table: what
the slots of a sublayer hold. With x the stream entering the sublayer, x0 the block's input, N the
norm of the slot (an absent slot is the identity):

    u  = in ? N(x) : x             skip = OWN: x | NORMED: u | BLOCK: x0
    y  = F(c * u)                  c = ONE: 1 | LNS: 1/sqrt(l+1)
    y  = out ? N(y) : y
    s  = a * skip + y              a = ONE: 1 | DEEP: (2L)^(1/4) | SUBLAYERS: 2L
    x' = post ? N(s) : s           a = LEARNED: s = (1 - alpha) skip + alpha y, alpha a parameter

q, k, v and the context (the heads' outputs, before the output projection) have slots of their own.
config.json holds the row ("rows", its name "placement"), and the rows that it names for layer 0
("first") and for the first mix_ratio of the layers ("early"). A slot is 0 (empty), 1 (the model's
norm) or 2 (x / |x|). "sdd": every linear of a block is alpha * rmsnorm(V x), so its out slots are
filled too. "unit": nGPT.

It generates with transformers' DynamicCache, and reads attention masks of padded batches. Needs
torch and transformers (4.57 or 5).
"""
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

# The KV cache's name among arguments and outputs; transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
CHECKPOINTING = "is_activation_checkpointing"  # transformers 4 has it under its older name
if not hasattr(PreTrainedModel, CHECKPOINTING):
    CHECKPOINTING = "is_gradient_checkpointing"
KNOWN = "input_ids, attention_mask, position_ids, cache, labels, use_cache or logits_to_keep"
L2, SCALE = 2, 3  # kinds of a norm beside 1, the model's: x / |x|, and a gain without a norm


class NormConfig(PretrainedConfig):
    """Fields are named as norm.c's flags. Those that other programs ask for have transformers'
    names too."""

    model_type = "norm_c"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {"hidden_size": "width", "num_hidden_layers": "layers",
                     "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
                     "max_position_embeddings": "seq", "intermediate_size": "ffn",
                     "head_dim": "head_size"}  # fmt: skip

    def __init__(self, layers=2, width=64, heads=2, kv_heads=2, ffn=256, vocab_size=256, seq=128,
                 placement="PRE", rows=None, norm="rms", bias=False, positions="rope",
                 activation="swiglu", rope_theta=1e4, eps=1e-5, emb_scale="one", final_norm=True,
                 mix_ratio=0.25, sdd=None, kv_rank=0, rope_size=0, experts=0, experts_per_token=2,
                 shared_experts=0, dense_layers=0, dense_ffn=0, router="softmax", router_scale=1.0,
                 selection_bias=False, use_cache=True, head_size=0, rope_factor=1.0,
                 rope_original=8192, **others):  # fmt: skip
        head_size = head_size or width // heads
        for name, value in locals().items():
            if name not in ("self", "others", "__class__"):
                setattr(self, name, value)
        super().__init__(**others)

    def row(self, l):
        """The row of layer l."""
        base = self.rows[self.placement]
        if base["early"] and l < math.floor(self.mix_ratio * self.layers + 1e-9):
            return self.rows[base["early"]]
        return self.rows[base["first"]] if base["first"] and l == 0 else base


class Norm(nn.Module):
    """RMSNorm g x / sqrt(mean(x^2) + eps), LayerNorm or DyT, g tanh(alpha x) + b, over each `width`
    of the last dimension. norm: the flag --norm, None: the model's. The gain is one vector for all
    of them, or `gains` long. Each expert has one of `copies`."""

    def __init__(self, c, kind, width, gains=None, norm=None, scale=1.0, copies=1):
        super().__init__()
        gains = gains or (0 if kind == L2 else width)
        self.kind, self.width, self.copies = kind, width, copies
        self.eps, self.scale = (1e-12, scale / math.sqrt(width)) if kind == L2 else (c.eps, scale)
        shape = (copies, gains) if copies > 1 else (gains,)
        self.weight = nn.Parameter(torch.ones(shape)) if gains else None
        norm = (norm or c.norm) if kind == 1 else "rms"
        self.bias = nn.Parameter(torch.zeros(gains)) if norm != "rms" else None
        self.alpha = nn.Parameter(torch.full((1,), 0.5)) if norm == "dyt" else None

    def forward(self, x, copy=0):
        y = x.unflatten(-1, (-1, self.width)).to(torch.promote_types(x.dtype, torch.float32))
        if self.alpha is not None:
            y = torch.tanh(self.alpha * y)
        elif self.bias is not None:
            y = y - y.mean(-1, keepdim=True)
        if self.alpha is None and self.kind != SCALE:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = self.scale * y
        if self.weight is not None:
            gain = self.weight[copy] if self.copies > 1 else self.weight
            y = gain.unflatten(-1, (-1, self.width)) * y
        if self.bias is not None:
            y = y + self.bias
        return y.flatten(-2).to(x.dtype)


def rope_rates(c, R):
    """The angles theta^(-2i/R) of the pairs at position 1. Llama 3's: a pair that made less than
    one turn over rope_original tokens is rope_factor times slower, one of more than four is as it
    was, and the others are between."""
    rate = c.rope_theta ** (torch.arange(R // 2, dtype=torch.double) * (-2 / R))
    if c.rope_factor <= 1:
        return rate
    keep = ((c.rope_original * rate / (2 * math.pi) - 1) / 3).clamp(0, 1)
    return rate * (keep + (1 - keep) / c.rope_factor)


def slot(c, on, *sizes, **options):
    return Norm(c, on, *sizes, **options) if on else nn.Identity()


def rope(x, turn):
    """Rotary positions, half-split: of the last R channels of each head, the pair (i, i + R/2)
    turns by t theta^(-2i/R). x [B, T, heads, size]; turn: that angle's cosine and sine,
    [B, T, 1, R/2]."""
    cos, sin = (each.to(x.dtype) for each in turn)
    R = 2 * cos.shape[-1]
    first, second = x[..., -R:].chunk(2, -1)
    return torch.cat([x[..., :-R], first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """W_o N_c(attention(rope(N_q(q)), rope(N_k(k)), N_v(v))), causal, query heads in groups. nGPT
    has N(rope(.)) instead, and k has the gains of q. Latent attention (MLA) makes keys and values
    from a narrow latent. The last rope_size channels of a key are shared by all heads, and they
    alone turn with the position."""

    def __init__(self, c, l):
        super().__init__()
        row, sdd, C, NH, KV, HS = c.row(l), c.sdd, c.width, c.heads, c.kv_heads, c.head_size
        QK, kind = HS + c.rope_size if c.kv_rank else HS, "rms" if c.sdd else c.norm
        self.l, self.QK, self.HS, self.rank, self.unit = l, QK, HS, c.kv_rank, row["q"] == L2
        self.scale = math.sqrt(QK) if self.unit else 1 / math.sqrt(QK)
        self.q_proj = nn.Linear(C, NH * QK, bias=bool(c.bias))  # True, False or "qkv"
        if c.kv_rank:
            self.kv_a_proj_with_mqa = nn.Linear(C, c.kv_rank + c.rope_size, bias=False)
            self.kv_a_layernorm = Norm(c, 1, c.kv_rank)
            self.kv_b_proj = nn.Linear(c.kv_rank, NH * 2 * HS, bias=False)
        else:
            self.k_proj = nn.Linear(C, KV * HS, bias=bool(c.bias))
            self.v_proj = nn.Linear(C, KV * HS, bias=bool(c.bias))
        self.o_proj = nn.Linear(NH * HS, C, bias=c.bias is True)

        # HEAD: statistics over each head, one gain for all heads. FULL: over the full width.
        def norm(on, per, heads, size):
            return slot(c, on, size if per == "HEAD" else heads * size, norm=kind)

        per = sdd["per"] if sdd else row["per"]
        q, k, v, context = row["q"], row["k"], row["v"], row["ctx"]
        if sdd:
            q, k, v, context = 1, 1, sdd["v"], 1 - sdd["v"]
        if self.unit:
            self.q_norm = Norm(c, L2, QK, gains=NH * QK, scale=math.sqrt(C))
            self.k_norm = None
        else:
            self.q_norm, self.k_norm = norm(q, per, NH, QK), norm(k, per, KV, QK)
        self.v_norm = norm(v, "FULL" if sdd else per, KV, HS)
        self.context_norm = norm(context, "FULL" if sdd else per, NH, HS)
        self.alpha = nn.Parameter(torch.ones(C)) if row["attn"]["a"] == "LEARNED" else None

    def keys_and_values(self, u):
        if not self.rank:
            return self.k_proj(u), self.v_proj(u)
        latent, turning = self.kv_a_proj_with_mqa(u).split([self.rank, self.QK - self.HS], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, 2 * self.HS))
        k, v = kv.split(self.HS, -1)
        k = torch.cat([k, turning.unsqueeze(-2).expand(*k.shape[:-1], -1)], -1)
        return k.flatten(-2), v.flatten(-2)

    def forward(self, u, turn, mask, cache):
        def turned(x):
            return x if turn is None else rope(x.unflatten(-1, (-1, self.QK)), turn).flatten(-2)

        def normed(norm, x):
            return norm(turned(x)) if self.unit else turned(norm(x))

        def heads(x, size):  # [B, heads, T, size]
            return x.unflatten(-1, (-1, size)).transpose(1, 2)

        k, v = self.keys_and_values(u)
        q = heads(normed(self.q_norm, self.q_proj(u)), self.QK)
        k = heads(normed(self.k_norm or self.q_norm, k), self.QK)
        v = heads(self.v_norm(v), self.HS)
        if cache is not None:
            k, v = cache.update(k, v, self.l)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return self.o_proj(self.context_norm(context.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """W_down act(N_h([W_gate | W_up] u)), act: silu(gate) * up, or gelu(up); N_h is SDD's or
    nGPT's. The matrices of a layer's experts, `copies` of them, lie one below the other: parts of
    one Linear, whose hooks and adapters (LoRA) do not see them."""

    def __init__(self, c, ffn, copies=1, part=False):
        super().__init__()
        base, self.ffn, self.copies = c.rows[c.placement], ffn, copies
        swiglu, kind = c.activation == "swiglu", 1 if c.sdd else SCALE if base["unit"] else 0
        halves = 2 if swiglu and not (c.sdd and c.sdd["fused"] and not part) else 1
        hidden = 2 * ffn if swiglu else ffn
        bias = c.bias is True
        self.gate_proj = nn.Linear(c.width, copies * ffn, bias=bias) if swiglu else None
        self.up_proj = nn.Linear(c.width, copies * ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, copies * c.width, bias=bias)
        scale = math.sqrt(c.width) if base["unit"] else 1.0
        self.hidden_norm = slot(c, kind, hidden // halves, gains=hidden, norm="rms", scale=scale,
                                copies=copies)  # fmt: skip
        self.out_norm = slot(c, 1 if part and c.sdd else 0, c.width, norm="rms", copies=copies)

    def forward(self, u, e=0, hidden_norm=None):
        def linear(f, x):
            if self.copies == 1:
                return f(x)  # as a module, so that its hooks run
            out = f.out_features // self.copies
            return F.linear(x, f.weight[e * out : (e + 1) * out], f.bias)

        def normed(norm, x):
            return norm(x, e) if isinstance(norm, Norm) else x

        hidden = linear(self.up_proj, u)
        if self.gate_proj is not None:
            hidden = torch.cat([linear(self.gate_proj, u), hidden], -1)
        hidden = normed(hidden_norm or self.hidden_norm, hidden)
        if self.gate_proj is None:
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            hidden = F.silu(hidden[..., : self.ffn]) * hidden[..., self.ffn :]
        return normed(self.out_norm, linear(self.down_proj, hidden))


class Mixture(nn.Module):
    """shared(u) + sum over the K chosen experts of gate_e expert_e(u). The router chooses the top-k
    of s = softmax(W u) or sigmoid(W u), plus the selection bias. The gates are the s of the chosen
    experts, divided by their sum unless the router is "softmax"."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.gate = nn.Linear(c.width, c.experts, bias=False)
        if c.selection_bias:
            bias = nn.Parameter(torch.zeros(c.experts), requires_grad=False)
            self.gate.e_score_correction_bias = bias
        self.experts = Mlp(c, c.ffn, copies=c.experts, part=True)
        self.scale = c.router_scale * (c.ffn / c.experts if c.sdd and c.sdd["share"] else 1)
        self.shared_experts = None
        if c.shared_experts:
            self.shared_experts = Mlp(c, c.shared_experts * c.ffn, part=True)
            # Their norm has the name of the layer's.
            self.hidden_norm = self.shared_experts.hidden_norm
            self.shared_experts.hidden_norm = None

    def forward(self, u):
        c, x = self.c, u.flatten(0, -2)
        z = self.gate(x).to(torch.promote_types(x.dtype, torch.float32))
        s = z.sigmoid() if c.router == "sigmoid" else z.softmax(-1)
        biased = s + self.gate.e_score_correction_bias if c.selection_bias else s
        choice = biased.topk(c.experts_per_token).indices
        gates = s.gather(-1, choice)
        if c.router != "softmax":
            gates = gates / gates.sum(-1, keepdim=True)
        gates = self.scale * gates
        if c.shared_experts:
            y = self.shared_experts(x, hidden_norm=self.hidden_norm)
        else:
            y = torch.zeros_like(x)
        for e in range(c.experts):
            token, k = (choice == e).nonzero(as_tuple=True)
            out = gates[token, k, None] * self.experts(x[token], e)
            y = y.index_add(0, token, out.to(y.dtype))
        return y.view_as(u)


class Block(GradientCheckpointingLayer):
    def __init__(self, c, l):
        super().__init__()
        self.row, self.L, self.l = c.row(l), c.layers, l
        moe, out_norm = c.experts and l >= c.dense_layers, "rms" if c.sdd else c.norm
        attn, ffn = self.row["attn"], self.row["ffn"]
        self.input_layernorm = slot(c, attn["in"], c.width)
        self.self_attn = Attention(c, l)
        attn_out, ffn_out = (1, int(not moe)) if c.sdd else (attn["out"], ffn["out"])
        self.post_attention_layernorm = slot(c, attn_out, c.width, norm=out_norm)
        self.attention_sum_layernorm = slot(c, attn["post"], c.width)
        self.pre_feedforward_layernorm = slot(c, ffn["in"], c.width)
        self.mlp = Mixture(c) if moe else Mlp(c, c.dense_ffn if c.experts else c.ffn)
        self.mlp.alpha = nn.Parameter(torch.ones(c.width)) if ffn["a"] == "LEARNED" else None
        self.post_feedforward_layernorm = slot(c, ffn_out, c.width, norm=out_norm)
        self.feedforward_sum_layernorm = slot(c, ffn["post"], c.width)

    def sublayer(self, row, norms, alpha, branch, x, x0):
        """The five lines above."""
        norm_in, norm_out, norm_post = norms
        u = norm_in(x)
        y = norm_out(branch(u / math.sqrt(self.l + 1) if row["c"] == "LNS" else u))
        skip = {"OWN": x, "NORMED": u, "BLOCK": x0}[row["skip"]]
        if alpha is not None:
            s = skip + 0.05 * math.sqrt(x.shape[-1]) * alpha.abs() * (y - skip)
        else:
            a = {"ONE": 1, "DEEP": (2 * self.L) ** 0.25, "SUBLAYERS": 2 * self.L}[row["a"]]
            s = a * skip + y
        return norm_post(s)

    def forward(self, x, turn, mask, cache):
        attn = self.input_layernorm, self.post_attention_layernorm, self.attention_sum_layernorm
        ffn = (self.pre_feedforward_layernorm, self.post_feedforward_layernorm,
               self.feedforward_sum_layernorm)  # fmt: skip

        def attention(u):
            return self.self_attn(u, turn, mask, cache)

        mid = self.sublayer(self.row["attn"], attn, self.self_attn.alpha, attention, x, x)
        return self.sublayer(self.row["ffn"], ffn, self.mlp.alpha, self.mlp, mid, x)


class NormModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.width)
        self.embed_positions = nn.Embedding(c.seq, c.width) if c.positions == "learned" else None
        self.embed_norm = slot(c, c.rows[c.placement]["emb"], c.width)
        self.layers = nn.ModuleList(Block(c, l) for l in range(c.layers))
        self.norm = slot(c, int(c.final_norm), c.width)

    def forward(self, tokens, positions, mask, cache):
        c, x, turn = self.c, self.embed_tokens(tokens), None
        x = math.sqrt(c.width) * x if c.emb_scale == "sqrt-width" else x
        if c.positions == "learned":
            x = x + self.embed_positions(positions)
        else:  # in double, which Apple's GPUs do not have
            home = "cpu" if x.device.type == "mps" else x.device
            rates = rope_rates(c, c.rope_size if c.kv_rank else c.head_size).to(home)
            angle = (positions.to(home).double().unsqueeze(-1) * rates).unsqueeze(-2)
            turn = [each.to(x.dtype).to(x.device) for each in (angle.cos(), angle.sin())]
        x = self.embed_norm(x)
        for block in self.layers:
            x = block(x, turn, mask, cache)
        return self.norm(x)


def refuse(others, cache, past_key_values):
    """Returns the KV cache. Takes out of others the arguments that ask for nothing and leaves
    num_items_in_batch, which is the loss function's. Any other argument is a TypeError."""
    for name in ("inputs_embeds", "output_attentions", "output_hidden_states", "token_type_ids"):
        if others.get(name) is None or others[name] is False:
            others.pop(name, None)  # peft passes them so
    others.pop("cache_position", None)  # transformers 4 passes it; the cache says the same
    if unknown := others.keys() - {"num_items_in_batch"}:
        raise TypeError(f"NormForCausalLM: expected {KNOWN}, found {', '.join(sorted(unknown))}\n"
                        "  -> leave it out")  # fmt: skip
    if cache is not None and past_key_values is not None:
        raise TypeError("NormForCausalLM: expected one KV cache, found cache and past_key_values\n"
                        "  -> pass one")  # fmt: skip
    cache = past_key_values if cache is None else cache
    if getattr(cache, "is_compileable", False):
        found = type(cache).__name__
        raise TypeError(f"NormForCausalLM: expected a DynamicCache, found a {found}\n"
                        "  -> leave cache_implementation out")  # fmt: skip
    return cache


class NormForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NormConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True  # and computes nothing else
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = NormModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.rows[config.placement]["unit"]:
            self.lm_head.s_z = nn.Parameter(torch.ones(config.vocab_size, 1))
        if config.selection_bias:
            self._keep_in_fp32_modules_strict = ["e_score_correction_bias"]
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
                labels=None, use_cache=None, logits_to_keep=0, cache=None, **others):  # fmt: skip
        """Logits [B, T, V] of input_ids [B, T]; with labels [B, T] the loss too. attention_mask
        [B, past + T] is 0 at padding. The KV cache is cache, or past_key_values, the older name."""
        cache = refuse(others, cache, past_key_values)
        B, T = input_ids.shape
        if self.training and getattr(self, CHECKPOINTING):  # a cache would be filled twice
            cache = None
        elif cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        past = cache.get_seq_length() if cache is not None else 0
        key = torch.arange(past + T, device=input_ids.device)
        query = key[past:]
        mask = (key <= query[:, None]).expand(B, 1, -1, -1)
        if attention_mask is not None:  # what is padding is read by itself alone
            mask = mask & attention_mask[:, None, None].bool() | (key == query[:, None])
        if position_ids is None and attention_mask is None:
            position_ids = query.expand(B, -1)
        elif position_ids is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
        x = self.model(input_ids, position_ids, mask, cache)
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = self.lm_head(x[:, logits_to_keep])
        if hasattr(self.lm_head, "s_z"):
            logits = math.sqrt(self.config.width) * self.lm_head.s_z[:, 0] * logits
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
