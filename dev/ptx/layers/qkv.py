"""QK norm and RoPE, in the usual order and in nGPT's, with latent attention and without."""
import numpy as np

from gpu import F32
from harness import SUMS, TWICE
from layers.norm import DYT, EPS, dyt, norm, norm_gradient, set_norm

THETA = 10000.0
HEAD, FULL, NONE = ("head",) * 3, ("full",) * 3, ("none",) * 3    # the norms of q, k and v
UNIT = ("unit", "unit", "none")


def angles(T, R):
    return np.arange(T)[:, None] * THETA ** (-2.0 * np.arange(R // 2) / R)


def rope(x, T, R, direction=1):
    """x [n, heads, size]: the last R channels turn, channel i with i + R / 2."""
    if not R:
        return x
    angle = direction * angles(T, R)[np.arange(len(x)) % T]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., -R:-R // 2], x[..., -R // 2:]
    return np.concatenate([x[..., :-R], a * cos - b * sin, b * cos + a * sin], -1)


class Part:
    """q, k or v: its shape, its norm and its reference. kind: "none", "head", "full" or "unit".
    tanh: DyT in the place of the norm."""

    def __init__(self, t, n, heads, size, kind, bias, R, tanh=False):
        self.n, self.heads, self.size, self.R, self.kind = n, heads, size, R, kind
        self.on = kind != "none"
        self.scale = 1.5 if kind == "unit" else 1.0
        width = heads * size if kind == "full" else size
        self.shape = (heads * size // width, width)               # groups, width
        self.gains = heads * size if kind == "unit" else width
        self.w = t.normal(self.gains, scale=0.2, mean=1)
        self.b = t.normal(self.gains) if bias else None
        self.raw, self.d = t.normal(n, heads, size), t.normal(n, heads, size)
        self.dw0, self.db0 = t.floats(self.gains), t.floats(self.gains)
        self.dw = self.db = None
        self.shares = False
        self.alpha = t.normal(1, scale=0.1, mean=0.6) if tanh and self.on else None
        self.dalpha0, self.dalpha = t.floats(1), None

    def share(self, other):
        """The two have one gain, and add to one gradient."""
        self.shares, self.w, self.dw0 = True, other.w, other.dw0

    def put(self, t, slot, n, other):
        self.dw = other.dw if self.shares else t.put(self.dw0, F32)
        self.db = t.put(self.db0, F32) if self.b is not None else None
        mean, rstd = t.empty((n, self.heads), F32), t.empty((n, self.heads), F32)
        on = {"none": 0, "unit": 2}.get(self.kind, DYT if self.alpha is not None else 1)
        set_norm(t, slot, on, self.shape, self.gains,
                 (t.put(self.w), t.put(self.b), self.dw, self.db, mean, rstd), n, EPS, self.scale)
        if self.alpha is not None:
            self.dalpha = t.put(self.dalpha0, F32)
            t.call("set_norm_alpha", slot, t.put(self.alpha), self.dalpha)

    def lines(self, x):
        return x.reshape(self.n, *self.shape)

    def gain(self):
        return self.scale * self.w.reshape(self.shape) if self.kind == "unit" else self.w

    def forward(self, T):
        """None for a part with neither norm nor RoPE, which stays as it is."""
        if not self.on:
            return rope(self.raw, T, self.R) if self.R else None
        if self.kind == "unit":
            return norm(rope(self.raw, T, self.R), self.gain())[0]
        if self.alpha is not None:
            y = dyt(self.lines(self.raw), self.alpha, self.w, 0 if self.b is None else self.b)[0]
        else:
            y = norm(self.lines(self.raw), self.gain(), self.b)[0]
        return rope(y.reshape(self.raw.shape), T, self.R)

    def backward(self, T):
        """(draw, dw, db), and with DyT the terms of dalpha"""
        back = rope(self.d, T, self.R, -1)
        if not self.on:
            return (back if self.R else None), None, None
        if self.kind == "unit":
            _, xhat, _, rstd = norm(rope(self.raw, T, self.R), self.gain())
            dx = norm_gradient(self.d, xhat, rstd, self.gain(), False)
            return rope(dx, T, self.R, -1), self.scale * (self.d * xhat).sum(0).ravel(), None
        d = self.lines(back)
        if self.alpha is not None:
            x = self.lines(self.raw)
            xhat = dyt(x, self.alpha)[1]
            v = self.w * d * (1 - xhat ** 2)
            dx = (self.alpha * v).reshape(back.shape)
            return dx, (d * xhat).sum((0, 1)), d.sum((0, 1)), v * x
        _, xhat, _, rstd = norm(self.lines(self.raw), self.gain(), self.b)
        dx = norm_gradient(d, xhat, rstd, self.gain(), self.b is not None)
        return dx.reshape(back.shape), (d * xhat).sum((0, 1)), d.sum((0, 1))


def place(t, which, parts, values, latent=0, turned="inside"):
    """Puts q, k and v in memory as the places `which` (0 results, 1 gradients, 2 inputs) of
    kernels.cu; values None: room for results. With latent attention the last channels of a head,
    which turn, have a place of their own. turned of k: "inside" of its heads, "once" for all heads,
    or "apart". Returns functions that read the parts."""
    reads = []
    for p, part in enumerate(parts):
        x = None if values is None else values[p]
        shape, R = (part.n, part.heads, part.size), latent
        slot = 6 * which + p
        if p != 1 or turned == "inside":
            a = t.empty(shape) if x is None else t.put(x)
            t.call("set_heads", slot, a.at(0), part.heads * part.size, part.size)
            t.call("set_heads", slot + 3, a.at(part.size - R), part.heads * part.size, part.size)
            reads.append(a.get)
            continue
        low = t.empty((*shape[:2], part.size - R)) if x is None else t.put(x[..., :-R])
        t.call("set_heads", slot, low.at(0), low.shape[1] * low.shape[2], low.shape[2])
        if turned == "once":
            high = t.put(x[:, 0, -R:])
            t.call("set_heads", slot + 3, high.at(0), R, 0)
        else:
            high = t.empty((*shape[:2], R))
            t.call("set_heads", slot + 3, high.at(0), part.heads * R, R)
        reads.append(lambda low=low, high=high: np.concatenate([low.get(), high.get()], -1))
    return reads


def qkv(t, B, T, NH, KV, QK, HS, kinds, bias=False, turn=True, latent=0, tanh=False):
    """kinds: the norms of q, k and v. latent: how many channels turn; 0: all, or none. tanh: they
    are DyT."""
    name = " DyT" if tanh else " LayerNorm" if bias else ""
    t.case(f"qkv {B}x{T} {NH}:{KV} {QK}/{HS} {' '.join(kinds)}{name}"
           f"{' rope' if turn else ''}{f' latent {latent}' if latent else ''}")
    n, R = B * T, latent or (QK if turn else 0)
    sizes = [(NH, QK, R), (KV, QK, R), (KV, HS, 0)]
    parts = [Part(t, n, h, s, kind, bias and kind != "none", r, tanh)
             for (h, s, r), kind in zip(sizes, kinds)]
    if latent:
        parts[1].raw[..., -R:] = parts[1].raw[:, :1, -R:]          # one k_rope for all heads
    table = None
    if R:
        table = t.put(np.stack([np.cos(angles(T, R)), np.sin(angles(T, R))], -1), F32)
    shape = np.array([B, T, NH, KV, QK, R or QK, HS])
    if kinds == UNIT and NH == KV:
        parts[1].share(parts[0])
    for p, part in enumerate(parts):
        part.put(t, p, n, parts[0])
    place(t, 2, parts, [x.raw for x in parts], latent, "once" if latent else "inside")
    reads = place(t, 0, parts, None, latent)
    t.call("run_qkv_forward", shape, table)
    for name, part, read in zip("qkv", parts, reads):
        want = part.forward(T)
        if want is not None:
            t.expect(name, read(), want)
    place(t, 1, parts, [x.d for x in parts], latent)
    reads = place(t, 0, parts, None, latent, "apart" if latent else "inside")
    t.call("run_qkv_backward", shape, table)
    for name, part, read in zip("qkv", parts, reads):
        draw, dw, db, *terms = part.backward(T)
        if draw is not None:
            t.expect("d" + name, read(), draw, TWICE)
        if part.on:
            shared = dw + parts[0].backward(T)[1] if part.shares else dw
            if not (name == "q" and parts[1].shares):
                t.expect("dw of " + name, part.dw, part.dw0 + shared)
        if part.db:
            t.expect("db of " + name, part.db, part.db0 + db)
        if part.dalpha:  # terms of either sign: the sum may be smaller than their rounding
            t.expect("dalpha of " + name, part.dalpha, part.dalpha0 + terms[0].sum(),
                     floor=np.sqrt((terms[0] ** 2).sum()))


def latent_norm(t, n, width, tanh=False):
    """The norm of the latent runs in the same kernels."""
    t.case(f"latent {n}x{width}{' DyT' if tanh else ''}")
    part = Part(t, n, 1, width, "head", tanh, 0, tanh)
    part.put(t, 0, n, part)
    to, dx = t.empty((n, width)), t.empty((n, width))
    t.call("set_heads", 0, to.at(0), width, width)
    t.call("set_heads", 2, t.put(part.raw).at(0), width, width)
    t.call("run_latent_forward")
    t.expect("y", to, part.forward(1).reshape(n, width))
    t.call("set_heads", 0, dx.at(0), width, width)
    t.call("set_heads", 1, t.put(part.d).at(0), width, width)
    t.call("run_latent_backward")
    draw, dw, _, *terms = part.backward(1)
    t.expect("dx", dx, draw.reshape(n, width), TWICE)
    t.expect("dw", part.dw, part.dw0 + dw, SUMS)
    if tanh:
        t.expect("dalpha", part.dalpha, part.dalpha0 + terms[0].sum(), SUMS)


def latent_sum(t, n, heads, R):
    t.case(f"sum of {heads} heads")
    x, total = t.normal(n, heads, R), t.empty((n, R))
    t.call("set_heads", 0, total.at(0), R, 0)
    t.call("set_heads", 1, t.put(x).at(0), heads * R, R)
    t.call("run_latent_sum", n, heads, R)
    t.expect("sum", total, x.sum(1))


def check_qkv(t):
    """Lines of `pairs` pairs of 16-byte packs take each team of qkv_launch, none a full one."""
    pair = 2 * t.gpu.pack
    for pairs in (4, 7, 12, 50):                                  # heads
        size = pairs * pair
        qkv(t, 1, 9, 2, 1, size, size, HEAD, bias=pairs == 7)
        qkv(t, 1, 9, 2, 2, size, size, UNIT)
        qkv(t, 1, 9, 4, 2, size, 64, UNIT, latent=pairs // 2 * pair)
        latent_norm(t, 9, size)
    for pairs in (100, 200, 500, 1000):                           # full rows
        size = pairs * pair // 4
        qkv(t, 1, 5, 4, 2, size, size, FULL, bias=pairs == 200)
        latent_norm(t, 5, pairs * pair)
    for pairs in (4, 7, 50):                                      # DyT's teams
        size = pairs * pair
        qkv(t, 1, 9, 2, 1, size, size, HEAD, bias=True, tanh=True)
        qkv(t, 1, 9, 4, 2, size, 64, HEAD, latent=pairs // 2 * pair, bias=True,
            tanh=True)
        latent_norm(t, 9, size, tanh=True)
    for pairs in (200, 500, 1000):
        size = pairs * pair // 4
        bias = pairs < 1000 or t.gpu.arch != "120"     # with biases 128 KiB, more than 12.0 has
        qkv(t, 1, 5, 4, 2, size, size, FULL, bias, tanh=True)
        qkv(t, 1, 5, 4, 2, size, size, FULL, bias, latent=pairs // 8 * pair, tanh=True)
    qkv(t, 2, 21, 4, 2, 64, 64, ("none", "head", "head"), bias=True, tanh=True)
    qkv(t, 2, 21, 4, 2, 64, 64, HEAD)
    qkv(t, 2, 9, 4, 2, 64, 64, NONE)
    qkv(t, 2, 9, 4, 2, 64, 64, ("none", "head", "head"), bias=True)
    qkv(t, 1, 19, 3, 3, 64, 64, HEAD, turn=False)
    qkv(t, 2, 15, 2, 2, 96, 64, NONE, latent=32)
    latent_sum(t, 15, 3, 32)
