"""Experts: the router with its losses, rows, grouped products, and the sums over a token's experts.

Gradients of the router are differences of its definition, not formulas."""
import numpy as np

from gpu import F32, F64, I32
from harness import SUMS

TILE = 128                       # rows of a tile of the grouped products
SOFTMAX, RENORM, SIGMOID = 0, 1, 2
SCALE, BALANCE, SEQUENCE, Z_LOSS = 1.25, 0.01, 0.003, 0.001


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rows_of(choice, E):
    """The rows of experts, those of an expert in the order of the tokens: place [n, K],
    start [E + 1], source [n K], and the tiles (expert, first row)."""
    order = np.argsort(choice.ravel(), kind="stable")
    place = np.empty(choice.size, I32)
    place[order] = np.arange(choice.size)
    counts = np.bincount(choice.ravel(), minlength=E)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(I32)
    tiles = [(e, r) for e in range(E) for r in range(start[e], start[e + 1], TILE)]
    return place.reshape(choice.shape), start, (order // choice.shape[1]).astype(I32), tiles


class RouterCase:
    """A router's inputs, its results on the GPU, and its definition."""

    def __init__(self, t, B, T, E, K, kind, has_bias):
        self.B, self.T, self.E, self.K, self.n, self.kind = B, T, E, K, B * T, kind
        n, rng = self.n, t.rng
        self.z = rng.standard_normal((n, E)).astype(F32)
        self.z[3] = self.z[3].round()                  # equal scores: the first expert is chosen
        self.bias = (rng.standard_normal(E) * 0.1).astype(F32) if has_bias else None
        t.call("set_router", B, T, E, K, kind, SCALE, BALANCE, SEQUENCE, Z_LOSS)
        t.call("set_router_inputs", t.put(self.z, F32), t.put(self.bias, F32))
        shapes = {"gate": ((n, K), F32), "lse": (n, F32), "entropy": (n, F32),
                  "load": ((B + 1, E), F32), "share": ((B, E), F32),
                  "choice": ((n, K), I32), "place": ((n, K), I32),
                  "start": (E + 1, I32), "source": (n * K, I32),
                  "tiles": ((t.gpu.ask("router_tiles", n * K, E), 2), I32)}
        self.got = {name: t.empty(*shape) for name, shape in shapes.items()}
        t.call("set_router_results", *self.got.values())
        self.z = self.z.astype(F64)
        self.choice = None

    def scores(self, z):
        return sigmoid(z) if self.kind == SIGMOID else softmax(z)

    def shares(self, z):
        p = self.scores(z)
        return p / p.sum(1, keepdims=True)

    def chosen(self, z):
        """The top K experts of each token, and whether no two scores are too close to tell."""
        key = self.scores(z).astype(F32) + (0 if self.bias is None else self.bias)
        order = np.argsort(-key.astype(F64), 1, kind="stable")
        top = np.sort(-key, 1)[:, :self.K + 1]
        clear = np.diff(top, axis=1).min(1) > 1e-6 if self.K < self.E else np.ones(self.n, bool)
        return order[:, :self.K], clear

    def gates(self, z):
        s = np.take_along_axis(self.scores(z), self.choice, 1)
        return SCALE * s / (1 if self.kind == SOFTMAX else s.sum(1, keepdims=True))

    def loads(self):
        """Tokens of each expert, by sequence."""
        load = np.zeros((self.B, self.E))
        np.add.at(load, (np.arange(self.n)[:, None] // self.T, self.choice), 1)
        return load

    def losses(self, z):
        """Balance over the micro-batch, balance over each sequence, and the square of lse: means
        over tokens."""
        load, p = self.loads(), self.shares(z)
        each = self.E / self.K
        balance = each * (load.sum(0) / self.n * p.mean(0)).sum()
        of_sequences = p.reshape(self.B, self.T, self.E).mean(1)
        sequence = each * (load / self.T * of_sequences).sum(1).mean()
        return np.array([balance, sequence, (np.log(np.exp(z).sum(1)) ** 2).mean()])


def router_forward(t, r):
    t.call("run_router_forward")
    choice, clear = r.chosen(r.z)
    got = r.got["choice"].get()
    t.same("choice", got[clear], choice[clear])
    r.choice = got.astype(int)
    load = r.loads()
    place, start, source, tiles = rows_of(r.choice, r.E)
    t.expect("gate", r.got["gate"], r.gates(r.z), SUMS)
    t.expect("lse", r.got["lse"], np.log(np.exp(r.z).sum(1)), SUMS)
    t.same("load", r.got["load"], np.concatenate([load, load.sum(0, keepdims=True)]))
    t.expect("share", r.got["share"], r.shares(r.z).reshape(r.B, r.T, r.E).mean(1), SUMS)
    t.same("place", r.got["place"], place)
    t.same("start", r.got["start"], start)
    t.same("source", r.got["source"], source)
    got = r.got["tiles"].get()
    t.same("tiles", got[:len(tiles)], tiles)
    t.same("no more tiles", got[len(tiles):, 0], np.full(len(got) - len(tiles), -1))


def router_backward(t, r):
    dgate, dloss, h = t.floats(r.n, r.K), 0.5, 1e-5
    dz, alone = t.empty((r.n, r.E)), t.empty((r.n, r.E))
    t.call("run_router_backward", dz, t.put(dgate, F32), dloss)
    t.call("run_router_backward", alone, t.put(0 * dgate, F32), dloss)
    some = t.rng.choice(r.n, 4, replace=False)
    of_gates, of_losses = np.zeros((4, r.E)), np.zeros((4, r.E))
    weights = np.array([BALANCE, SEQUENCE, Z_LOSS])
    for i, token in enumerate(some):
        for e in range(r.E):
            up, down = r.z.copy(), r.z.copy()
            up[token, e] += h
            down[token, e] -= h
            of_gates[i, e] = (dgate * (r.gates(up) - r.gates(down))).sum() / (2 * h)
            of_losses[i, e] = dloss * weights @ (r.losses(up) - r.losses(down)) / (2 * h)
    t.expect("dz", dz.get()[some], of_gates + of_losses)
    t.expect("dz of the losses", alone.get()[some], of_losses)


def router_count(t, r):
    loss, loads = t.put(np.ones(1), F64), t.put(np.full(r.E, 2.0), F32)
    stats = t.put(np.full(4 + r.E, 3.0), F64)
    t.call("run_router_count", loss, loads, stats)
    p, load, losses = r.shares(r.z), r.loads().sum(0), r.losses(r.z)
    entropy = -(p * np.log(p)).sum()
    want = np.concatenate([[entropy], r.n * losses])
    t.expect("loss", loss, [1 + r.n * (np.array([BALANCE, SEQUENCE, Z_LOSS]) @ losses)], SUMS)
    t.expect("sums", stats.get()[:4], 3 + want, SUMS)
    t.same("loads", loads, 2 + load)
    t.same("loads of the statistics", stats.get()[4:], 3 + load)
    for applied in (0, 1):
        bias = t.put(np.zeros(r.E), F32)
        flag = t.put(np.array([applied], I32))
        t.call("run_router_balance", bias, loads, r.E, 0.001, flag)
        want = 0.001 * applied * np.sign((2 + load).mean() - (2 + load))
        t.expect(f"bias, step {'taken' if applied else 'refused'}", bias, want, SUMS)


def check_router(t):
    for B, T, E, K, kind, bias in [(2, 100, 16, 4, SOFTMAX, False), (1, 70, 64, 8, RENORM, False),
                                   (3, 40, 40, 6, SIGMOID, True)]:
        t.case(f"router {('softmax', 'renorm', 'sigmoid')[kind]} {B}x{T}, {K} of {E}"
               f"{', bias' if bias else ''}")
        r = RouterCase(t, B, T, E, K, kind, bias)
        router_forward(t, r)
        router_backward(t, r)
        router_count(t, r)


# --------------------------------------------------------------------------------------------- rows

def uneven_choice(t, n, E, K, empty):
    """K different experts for each token; half of the tokens have the first, none the empty one."""
    there = [e for e in range(E) if e != empty]
    choice = np.array([t.rng.choice(there, K, replace=False) for _ in range(n)])
    for token in range(n // 2):
        if there[0] not in choice[token]:
            choice[token, 0] = there[0]
    return choice


def experts(t, n, E, K, parts, width, inner, gather, empty=None):
    """Products of `inner` values in and parts * width out. gather: x has a row for each token."""
    t.case(f"experts {n} tokens, {K} of {E}, {inner} -> {parts}x{width}"
           f"{', gathered' if gather else ''}")
    choice = uneven_choice(t, n, E, K, empty)
    _, start, source, tiles = rows_of(choice, E)
    rows, out, c = n * K, parts * width, 0.5
    tiles += [(-1, rows)] * (t.gpu.ask("router_tiles", rows, E) - len(tiles))
    of = np.repeat(np.arange(E), np.diff(start))
    # In memory the first part of all experts comes before their second part.
    w, dw0 = t.normal(parts, E, width, inner), t.floats(parts, E, width, inner)
    x, dy = t.normal(n if gather else rows, inner), t.normal(rows, out)
    W, X = w.transpose(1, 0, 2, 3).reshape(E, out, inner), x[source] if gather else x
    xs, dys, dw = t.put(x), t.put(dy), t.put(dw0, F32)
    y, dx = t.empty((rows, out)), t.empty((rows, inner))
    t.call("set_experts", t.put(w), dw, E, parts, width, inner, c, rows, t.put(start),
           t.put(np.array(tiles, I32)), t.put(source) if gather else None)
    t.call("run_experts_forward", y, xs)
    t.expect("y", y, c * np.einsum("rof,rf->ro", W[of], X))
    t.call("run_experts_backward", dx, dys, xs)
    t.expect("dx", dx, c * np.einsum("ro,rof->rf", dy, W[of]))
    want = np.array([c * dy[of == e].T @ X[of == e] for e in range(E)])
    want = want.reshape(E, parts, width, inner).transpose(1, 0, 2, 3)
    t.expect("dw", dw, dw0 + want, SUMS)


def combine(t, n, K, C):
    t.case(f"combine {n}x{K}x{C}")
    place = t.rng.permutation(n * K).reshape(n, K).astype(I32)
    rows, add, dy = t.normal(n * K, C), t.normal(n, C), t.normal(n, C)
    gate = t.floats(n, K)
    y, total, drows = t.empty((n, C)), t.empty((n, C)), t.empty((n * K, C))
    rs, places, gates = t.put(rows), t.put(place), t.put(gate, F32)
    t.call("set_router", 1, n, 8, K, 0, 1.0, 0.0, 0.0, 0.0)
    t.call("set_router_results", gates, None, None, None, None, None, places, None, None, None)
    t.call("run_combine", y, rs, t.put(add), 0.25, C)
    t.expect("y", y, (gate[..., None] * rows[place]).sum(1) + 0.25 * add)
    dgate = t.empty((n, K), F32)
    t.call("run_combine_backward", drows, dgate, t.put(dy), rs, C)
    want = np.empty((n * K, C))
    want[place] = gate[..., None] * dy[:, None]
    t.expect("drows", drows, want)
    t.expect("dgate", dgate, (rows[place] * dy[:, None]).sum(-1), SUMS)
    t.call("set_router_results", None, None, None, None, None, None, places, None, None, None)
    t.call("run_combine", total, rs, None, 0.0, C)
    t.expect("sum without gates", total, rows[place].sum(1))


def check_moe(t):
    experts(t, 130, 4, 2, 2, 88, 136, True, empty=3)
    experts(t, 90, 3, 2, 1, 136, 200, False)
    if t.full:
        experts(t, 300, 5, 3, 2, 64, 256, True)
        experts(t, 140, 3, 1, 1, 128, 128, False)
    combine(t, 20, 3, 264)
