"""AdamW with gradient clipping, stochastic rounding, nGPT's lines of length 1, Muon, and the
statistics of tensors and layers."""
import numpy as np

from gpu import F32, F64, round_bf16
from harness import CLOSE

BETA1, BETA2, EPS, STEP, KEY = 0.9, 0.95, 1e-8, 7, 12345
# Elements, learning rate, decay, target of decay; length of a line and its step where there are.
ENTRIES = [(1000, 0.01, 0.1, 0.0, 0, 0), (40 * 96, 0.02, 0.1, 0.0, 96, 1),
           (7, 0.01, 0.05, 1.0, 0, 0), (140 * 8 * 64, 0.03, 0.0, 0.0, 8, 64),
           (2 * 24 * 64, 0.03, 0.0, 0.0, 24, 64), (5000, 0.01, 0.2, 0.0, 0, 0)]


def mixed(z):
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def stochastic(x, key):
    """Rounds to bfloat16. Four neighbours share a hash of the key and their number; 16 of its bits
    are added to what is cut off."""
    with np.errstate(over="ignore"):
        i = np.arange(x.size, dtype=np.uint64)
        h = mixed(np.uint64(key) + np.uint64(0x9E3779B97F4A7C15))
        h = mixed(h ^ mixed(i // np.uint64(4) + np.uint64(0xD1B54A32D192ED03)))
    random = (h >> np.uint64(16) * (i % np.uint64(4)) & np.uint64(0xffff)).astype(np.uint32)
    bits = x.astype(F32).view(np.uint32) + random
    return (bits & np.uint32(0xffff0000)).view(F32).astype(F64)


class Model:
    """Tensors in an arena, with gaps of zeros between; moments and gradients beside them."""

    def __init__(self, t, lines, clip=1.0, is_stochastic=0):
        self.t, self.lines, self.is_stochastic = t, lines, is_stochastic
        self.first, at = [], 0
        for size, *_ in ENTRIES:
            self.first.append(at)
            at += -(-size // 32) * 32
        self.total, self.live = at, np.zeros(at, bool)
        for first, (size, *_) in zip(self.first, ENTRIES):
            self.live[first:first + size] = True
        self.master, self.m, self.d = (np.where(self.live, t.floats(at), 0) for _ in range(3))
        self.v = np.where(self.live, t.rng.random(at), 0).astype(F32).astype(F64)
        self.arrays = [t.put(x, F32) for x in (self.master, self.m, self.v, self.d)]
        self.w = t.put(self.master) if t.gpu.prec == "bf16" else self.arrays[0]
        t.call("set_arenas", self.w, *self.arrays, at)
        self.correct = 1 / (1 - BETA1 ** STEP), 1 / (1 - BETA2 ** STEP)
        self.clip = clip
        self.entries = t.put(np.zeros(len(ENTRIES) * t.gpu.ask("entry_bytes"), np.uint8))
        for k, (size, lr, decay, target, line, step) in enumerate(ENTRIES):
            t.call("set_entry", self.entries, k, self.first[k], self.first[k], size, lr, decay,
                   target, *((line, step) if lines else (0, 0)))

    def set_step(self, max_ce=0.0, max_norm=0.0):
        self.t.call("set_step", BETA1, BETA2, EPS, *self.correct, self.clip, self.is_stochastic,
                    KEY, max_ce, max_norm)

    def slices(self):
        for first, entry in zip(self.first, ENTRIES):
            yield slice(first, first + entry[0]), entry

    def step_of(self, a, entry, m, v, before):
        _, lr, decay, target, _, _ = entry
        adam = m[a] * self.correct[0] / (np.sqrt(v[a] * self.correct[1]) + EPS)
        return lr * (adam + decay * (before - target))


def unit_lines(w, line, step):
    w = w.reshape(-1, line) if step == 1 else w.reshape(-1, line, step)
    return (w / np.sqrt((w ** 2).sum(1, keepdims=True))).ravel()


def adamw(t, what, lines=False, clip=1.0, is_stochastic=0, refused=None, shards=False):
    """refused: (sums of losses, largest sum, largest norm) with which the step is not taken."""
    t.case(f"AdamW {what}")
    f = Model(t, lines, clip, is_stochastic)
    sums, max_ce, max_norm = refused or (3.0, 0.0, 0.0)
    state, seen = t.put(np.zeros(t.gpu.ask("state_bytes"), np.uint8)), np.zeros(4)
    f.set_step(max_ce, max_norm)
    t.call("set_state", state, sums, 0.0, 0.0)
    t.call("run_gradient_square", state, f.entries, len(ENTRIES))
    t.call("run_adamw", f.entries, len(ENTRIES), state)
    t.call("run_normalize", f.entries, len(ENTRIES), state)
    t.call("get_state", seen, state)
    length = np.sqrt((f.d ** 2).sum())
    t.expect("square and norm", seen[:2], [length ** 2, length], (1e-14, 1e-9))
    t.same("finite", seen[3], 0 if refused else 1)
    master, m, v, _ = (a.get() for a in f.arrays)
    if refused:
        for name, got, want in zip("wmv", (master, m, v), (f.master, f.m, f.v)):
            t.same(f"{name} stays", got, want)
        return
    G = f.d * (min(1, clip / length) if clip else 1)
    M, V = BETA1 * f.m + (1 - BETA1) * G, BETA2 * f.v + (1 - BETA2) * G ** 2
    W = f.master.copy()
    for a, entry in f.slices():
        W[a] -= f.step_of(a, entry, M, V, W[a])
        if lines and entry[4]:
            W[a] = unit_lines(W[a], *entry[4:])
    t.expect("m", m[f.live], M[f.live], CLOSE)
    t.expect("v", v[f.live], V[f.live], CLOSE)
    t.expect("master", master[f.live], W[f.live], CLOSE)
    t.same("gaps", master[~f.live], np.zeros((~f.live).sum()))
    if t.gpu.prec == "bf16":
        rounded = stochastic(master, KEY) if is_stochastic else round_bf16(master.astype(F32))
        t.same("w", f.w, rounded)
        f.w.raw[...] = 0
        t.call("run_weights_round", is_stochastic, KEY)
        t.same("w rounded again", f.w, rounded)
    tensor_sums(t, f, master, M, V)


def tensor_sums(t, f, master, M, V):
    """Squares of the gradient, of the weights before the step, and of the step. Lines of length 1
    keep their length, so there the weights after the step count."""
    got, want = t.empty((len(ENTRIES), 3), F64), []
    t.call("run_tensor_sums", got, f.entries, len(ENTRIES))
    for a, entry in f.slices():
        before = master[a] if f.lines and entry[4] else f.master[a]
        step = f.step_of(a, entry, M, V, before)
        want.append([(x ** 2).sum() for x in (f.d[a], before, step)])
    for k, name in enumerate(("gradients", "weights", "steps")):
        t.expect(f"squares of {name}", got.get()[:, k], np.array(want)[:, k], (1e-8, 1e-3))


def check_update(t):
    adamw(t, "plain")
    adamw(t, "of shards", shards=True)
    adamw(t, "stochastic, no clipping", clip=0.0, is_stochastic=1)
    adamw(t, "lines of length 1", lines=True, clip=1e9)
    adamw(t, "refused: NaN", refused=(np.nan, 0.0, 0.0))
    adamw(t, "refused: loss", refused=(3.0, 2.0, 0.0))
    adamw(t, "refused: norm", refused=(3.0, 0.0, 1.0))
    if t.gpu.prec == "fp32":
        t.case("weights rounded to float: a copy")
        x = t.floats(96)
        w = t.empty(96)
        t.call("set_arenas", w, t.put(x, F32), None, None, None, 96)
        t.call("run_weights_round", 0, KEY)
        t.same("w", w, x)


def orthogonalized(u):
    """Five Newton-Schulz steps (Jordan et al. 2024)."""
    x = u.T if len(u) > len(u.T) else u
    x = x / np.sqrt((x ** 2).sum())
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if len(u) > len(u.T) else x


def muon(t, count, rows, cols, refused=False):
    t.case(f"Muon {count} x {rows} x {cols}{' refused' if refused else ''}")
    lr, decay, mu, scale, size = 0.03, 0.1, 0.8, 0.6, count * rows * cols
    master, m, d = (t.floats(size) for _ in range(3))
    arrays = [t.put(x, F32) for x in (master, m, d)]
    w = t.put(master) if t.gpu.prec == "bf16" else arrays[0]
    t.call("set_arenas", w, arrays[0], arrays[1], None, arrays[2], size)
    t.call("set_step", BETA1, BETA2, EPS, 1.0, 1.0, 0.0, 0, KEY, 0.0, 0.0)
    entry = t.put(np.zeros(t.gpu.ask("entry_bytes"), np.uint8))
    t.call("set_entry", entry, 0, 0, 0, size, lr, decay, 0.0, 0, 0)
    t.call("set_muon", entry, scale)
    state = t.put(np.zeros(t.gpu.ask("state_bytes"), np.uint8))
    t.call("set_state", state, np.nan if refused else 3.0, 0.0, 0.0)
    t.call("run_gradient_square", state, entry, 1)
    t.call("run_adamw", entry, 1, state)             # decides about the step, and leaves the entry
    k = min(rows, cols)
    x, sums = t.empty(size), t.empty(3, F64)
    scratch = t.empty(2 * size + 2 * count * k * k)
    t.call("run_muon", scratch, entry, state, count, rows, cols, mu, x, sums)
    if refused:
        t.same("w stays", arrays[0], master)
        t.same("m stays", arrays[1], m)
        return
    M = mu * m + (1 - mu) * d
    U = ((1 - mu) * d + mu * M).reshape(count, rows, cols)
    X = np.stack([orthogonalized(u) for u in U]).ravel()
    step = lr * (scale * X + decay * master)
    products = (3e-3, 0.5) if t.gpu.prec == "bf16" else (1e-9, 1e-3)
    t.expect("m", arrays[1], M, CLOSE)
    t.expect("x", x, X, products)
    t.expect("step", master - arrays[0].get(), step, products)
    t.expect("squares", sums, [(v ** 2).sum() for v in (d, master, step)], (1e-3, 0.1))
    if t.gpu.prec == "bf16":
        t.same("w", w, round_bf16(arrays[0].get().astype(F32)))


def check_muon(t):
    muon(t, 1, 40, 72)
    muon(t, 3, 48, 24)
    muon(t, 1, 24, 40, refused=True)


def check_stats(t):
    for is_unit in (False, True):
        t.case("statistics of a layer" + (", nGPT" if is_unit else ""))
        n, C, heads, a = 60, 200, 3, np.array([1.0, 2.5])
        s, skip = ([t.normal(n, C) for _ in range(2)] for _ in range(2))
        x, peak = t.normal(n, C), t.floats(n * heads)
        p = [t.normal(C, scale=C ** -0.5) for _ in range(2)]
        rstd = [(1 + t.rng.random(n)).astype(F32).astype(F64) for _ in range(2)]

        def pointers(values, kind=None):
            return np.array([t.put(v, kind).ptr for v in values], np.uint64)
        sums = t.put(np.array([0.5, 0, 0, 0, 0, -np.inf]), F64)
        t.call("run_layer_sums", sums, pointers(s), pointers(skip), t.put(x), t.put(peak, F32), a,
               n, C, n * heads, pointers(rstd, F32) if is_unit else None,
               pointers(p) if is_unit else None)
        want = [0.5 + (x ** 2).sum()]
        for k in range(2):
            alpha = 0.05 * np.sqrt(C) * np.abs(p[k])
            kept = (1 - alpha) * skip[k] if is_unit else a[k] * skip[k]
            branch = alpha * s[k] * rstd[k][:, None] / np.sqrt(C) if is_unit else s[k] - kept
            want += [(branch ** 2).sum(), (kept ** 2).sum()]
        t.expect("squares", sums.get()[:5], want, (1e-9, 1e-5))
        t.same("largest logit", F32(sums.get()[5]), F32(peak.max()))
