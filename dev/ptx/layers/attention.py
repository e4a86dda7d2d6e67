"""Attention and decoding, from the definition: c = softmax(scale q k^T) v over keys <= query."""
import numpy as np

from gpu import F32, I32
from harness import STORED, SUMS, TWICE

# Head sizes of q and k, and of v: all that attention_launch has. The last three are latent.
SIZES = [(32, 32), (48, 48), (64, 64), (96, 96), (128, 128), (48, 32), (96, 64), (192, 128)]


def softmax_attention(q, k, v, scale, document=0):
    """q [B, T, NH, QK], k [B, T, KV, QK], v [B, T, KV, HS]. Returns the context, and of each row
    of scores the largest, the log-sum-exp (natural) and the probabilities, [B, NH, T(, T)].
    document: tokens of each one, the last may be shorter; 0: a sequence is one."""
    group, T = q.shape[2] // k.shape[2], q.shape[1]
    s = scale * np.einsum("bihd,bjhd->bhij", q, np.repeat(k, group, 2))
    seen, number = np.tril(np.ones((T, T), bool)), np.arange(T) // (document or T)
    s = np.where(seen & (number[:, None] == number), s, -np.inf)
    peak = s.max(-1)
    lse = peak + np.log(np.exp(s - peak[..., None]).sum(-1))
    p = np.exp(s - lse[..., None])
    return np.einsum("bhij,bjhd->bihd", p, np.repeat(v, group, 2)), peak, lse, p


def attention_gradients(q, k, v, p, dc, scale, c=None):
    """(dq, dk, dv). c: a context from which D = rowsum(dc c) is taken instead of the exact one."""
    group = q.shape[2] // k.shape[2]
    keys, values = np.repeat(k, group, 2), np.repeat(v, group, 2)
    dp = np.einsum("bihd,bjhd->bhij", dc, values)
    D = (p * dp).sum(-1) if c is None else np.einsum("bihd,bihd->bhi", dc, c)
    ds = p * (dp - D[..., None])

    def grouped(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)
    return (scale * np.einsum("bhij,bjhd->bihd", ds, keys),
            grouped(scale * np.einsum("bhij,bihd->bjhd", ds, q)),
            grouped(np.einsum("bhij,bihd->bjhd", p, dc)))


def place_heads(t, parts, first, values):
    """Puts q, k and v (values), or room for their gradients (None), in memory as heads[first..].
    With one head size they are side by side in one row. Returns a function that reads them."""
    n = int(np.prod(parts[0][:2]))
    widths = [heads * size for _, _, heads, size in parts]
    if len({size for *_, size in parts}) == 1:
        row = None if values is None else np.concatenate([x.reshape(n, -1) for x in values], 1)
        a = t.empty((n, sum(widths))) if row is None else t.put(row)
        at = np.cumsum([0] + widths[:2])
        for i, part in enumerate(parts):
            t.call("set_heads", first + i, a.at(at[i]), sum(widths), part[3])
        return lambda: [x.reshape(s) for x, s in zip(np.split(a.get(), at[1:], 1), parts)]
    arrays = [t.empty(s) if values is None else t.put(x)
              for s, x in zip(parts, values or parts)]
    for i, (a, part) in enumerate(zip(arrays, parts)):
        t.call("set_heads", first + i, a.at(0), widths[i], part[3])
    return lambda: [a.get() for a in arrays]


def attention(t, B, T, NH, KV, QK, HS, sharp=1.0, backward=True, document=0):
    t.case(f"attention {QK}/{HS} B{B} T{T} {NH}:{KV}{' sharp' if sharp > 1 else ''}"
           f"{f' documents of {document}' if document else ''}")
    begins = np.tile(np.arange(T) // (document or T) * document, B).astype(I32)
    ends = np.minimum(begins + (document or T), T).astype(I32)
    t.call("set_documents", *((t.put(begins), t.put(ends)) if document else (None, None)))
    scale, shape = 1 / np.sqrt(QK), np.array([B, T, NH, KV, QK, HS])
    parts = [(B, T, NH, QK), (B, T, KV, QK), (B, T, KV, HS)]
    q, k, v = (t.normal(*s, scale=f) for s, f in zip(parts, (sharp, 1, 1)))
    place_heads(t, parts, 0, (q, k, v))
    c, peak, lse = t.empty((B, T, NH, HS)), t.empty((B, NH, T), F32), t.empty((B, NH, T), F32)
    t.call("run_attention_forward", c, peak, lse, shape, scale)
    want, want_peak, want_lse, p = softmax_attention(q, k, v, scale, document)
    t.expect("c", c, want)
    t.expect("peak", peak, want_peak, SUMS)
    t.expect("lse", lse.get() * np.log(2), want_lse, SUMS)
    if not backward:
        return
    dc, D = t.normal(B, T, NH, HS), t.empty((B, NH, T), F32)
    t.written(c, lse)
    read = place_heads(t, parts, 3, None)
    t.call("run_attention_backward", D, t.put(dc), c, lse, shape, scale)
    # If softmax is sharp, dP - D nearly cancels, and most of the error is the rounding of the
    # stored c. So D is taken from that c, and the exact gradients have a wider limit.
    exact = attention_gradients(q, k, v, p, dc, scale)
    of_stored = attention_gradients(q, k, v, p, dc, scale, c.get())
    floor = 1.0 if T == 1 else 0.0       # with one key the gradients are 0: a difference of ones
    for name, got, near, far in zip(("dq", "dk", "dv"), read(), of_stored, exact):
        t.expect(f"{name}, D of the stored c", got, near, STORED, floor)
        t.expect(name, got, far, TWICE if sharp == 1 else (1e-4, 0.2), floor)


def check_attention(t):
    for QK, HS in SIZES:
        if t.full:
            attention(t, 1, 150, 4, 2, QK, HS)
        else:
            attention(t, 1, 70, 2, 1, QK, HS)
    attention(t, 2, 37, 2, 1, 64, 64, sharp=4)
    attention(t, 1, 1, 2, 2, 64, 64)
    for QK, HS in SIZES if t.full else [(64, 64), (128, 128)]:
        attention(t, 1, 110, 2, 1, QK, HS, document=43)
    t.call("set_documents", None, None)
    if t.full:
        attention(t, 1, 256, 2, 2, 64, 64)


def check_decode(t):
    for QK, HS, NH, KV, cached, n in [(64, 64, 4, 2, 300, 3), (128, 128, 2, 1, 0, 5),
                                      (96, 64, 2, 2, 40, 1), (192, 128, 2, 1, 257, 2)]:
        t.case(f"decode {QK}/{HS} {NH}:{KV}, {n} tokens after {cached}")
        scale, rows = 1 / np.sqrt(QK), cached + n
        q, k, v = t.normal(rows, NH, QK), t.normal(rows, KV, QK), t.normal(rows, KV, HS)
        old = (np.arange(rows) < cached)[:, None, None]
        cache_k, cache_v = t.put(np.where(old, k, np.nan)), t.put(np.where(old, v, np.nan))
        for slot, x in enumerate((q, k, v)):
            t.call("set_heads", slot, t.put(x[cached:]).at(0), x[0].size, x.shape[2])
        c = t.empty((n, NH, HS))
        t.call("run_decode", c, cache_k, cache_v, cached, np.array([1, n, NH, KV, QK, HS]), scale)
        t.same("cached k", cache_k, k)
        t.same("cached v", cache_v, v)
        want = softmax_attention(q[None], k[None], v[None], scale)[0]
        t.expect("c", c, want[0, cached:])
