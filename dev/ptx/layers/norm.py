"""Norms with the residual beside them, nGPT's interpolation and gains, from their equations."""
import numpy as np

from gpu import F32
from harness import SUMS, TWICE

EPS = 1e-5
# Widths in 16-byte packs that take each team of norm_launch, none a full one.
PACKS = (7, 12, 30, 50, 90, 120, 190, 250, 500, 1000, 2000)
DYT_PACKS = (7, 30, 120, 500, 1000, 2000)                         # the teams of DyT
WIDEST = 4000                    # float alone has a team for so many
DYT = 4                          # modes.h


def norm(x, w=1.0, b=None, eps=EPS):
    """Over the last axis: LayerNorm if there is a bias b, else RMSNorm. Returns the result, xhat,
    mean and the reciprocal standard deviation."""
    mean = x.mean(-1, keepdims=True) if b is not None else np.zeros((*x.shape[:-1], 1))
    rstd = (((x - mean) ** 2).mean(-1, keepdims=True) + eps) ** -0.5
    xhat = (x - mean) * rstd
    return w * xhat + (0 if b is None else b), xhat, mean[..., 0], rstd[..., 0]


def norm_gradient(dy, xhat, rstd, w, centered):
    u = w * dy
    mean = u.mean(-1, keepdims=True) if centered else 0
    return rstd[..., None] * (u - mean - xhat * (u * xhat).mean(-1, keepdims=True))


def dyt(x, alpha, w=1.0, b=0.0):
    """g tanh(alpha x) + b, and the tanh."""
    xhat = np.tanh(alpha * x)
    return w * xhat + b, xhat


def widths(t, packs=PACKS):
    packs = packs + ((WIDEST,) if t.gpu.prec == "fp32" else ())
    return [p * t.gpu.pack for p in packs]


def set_norm(t, slot, on, shape, gains, arrays, n, eps=EPS, scale=1.0):
    """shape: (groups, width). arrays: w, b, dw, db, mean, rstd."""
    t.call("set_norm", slot, on, *shape, gains, scale, n, eps)
    t.call("set_norm_arrays", slot, *arrays)


def add_norm(t, n, groups, width, shared=True, bias=False, out=False, skip=True, scratch=1 << 20):
    """s = a skip + N_out(y), z = N_next(s); then N_next's backward with all that stands beside it.
    shared: the groups share one gain."""
    kind = ("LayerNorm" if bias else "RMSNorm") + (", shared gain" if shared and groups > 1 else "")
    t.case(f"norm {n}x{groups}x{width} {kind}{', out' if out else ''}"
           f"{', few chunks' if scratch < 1 << 20 else ''}", scratch)
    shape, gains = (n, groups, width), (1, 1 if shared else groups, width)
    y, x0 = t.normal(*shape, scale=2, mean=0.5), t.normal(*shape)
    w, w_out = (t.normal(*gains, scale=0.2, mean=1) for _ in range(2))
    b, b_out = (t.normal(*gains) if bias else None for _ in range(2))
    s, z = t.empty(shape), t.empty(shape)
    mean, rstd, mean_out, rstd_out = (t.empty((n, groups), F32) for _ in range(4))
    dw0, db0 = t.floats(w.size), t.floats(w.size)
    dw, db = t.put(dw0, F32), t.put(db0, F32) if bias else None
    set_norm(t, 0, 1, (groups, width), w.size, (t.put(w), t.put(b), dw, db, mean, rstd), n)
    set_norm(t, 1, int(out), (groups, width), w.size,
             (t.put(w_out), t.put(b_out), None, None, mean_out, rstd_out), n)
    t.call("run_add_norm", s, z, t.put(y), t.put(x0) if skip else None, 0.75)
    want = norm(y, w_out, b_out)[0] if out else y
    t.expect("s", s, want + (0.75 * x0 if skip else 0))
    Z, xhat, m, r = norm(s.get(), w, b)          # the next norm reads s as it is stored
    t.expect("z", z, Z)
    t.expect("rstd", rstd, r, SUMS)
    if bias:
        t.expect("mean", mean, m, (1e-9, 1e-3))
    dy, add, other = t.normal(*shape), t.normal(*shape), t.normal(*shape)
    dx, total = t.empty(shape), t.empty(shape)
    t.call("run_norm_backward", dx, total, t.put(dy), s, t.put(add), t.put(other), 0.5, 2.0, -1.5)
    DX = 0.5 * add + norm_gradient(dy, xhat, r, w, bias)
    t.expect("dx", dx, DX)
    t.expect("sum", total, 2 * DX - 1.5 * other)
    over = (0, 1) if shared else 0
    t.expect("dw", dw, dw0 + (dy * xhat).sum(over).ravel(), SUMS)
    if bias:
        t.expect("db", db, db0 + dy.sum(over).ravel(), SUMS)


def add_dyt(t, n, groups, width, out=False, biased=True, scratch=1 << 20):
    """The same with DyT: z = N_next(s) for s = a skip + N_out(y), where N_out is RMSNorm if there
    is one, as in SDD."""
    t.case(f"norm {n}x{groups}x{width} DyT{', out' if out else ''}"
           f"{', few chunks' if scratch < 1 << 20 else ''}", scratch)
    shape, alpha0 = (n, groups, width), t.floats(1)
    y, x0 = t.normal(*shape, scale=2, mean=0.5), t.normal(*shape)
    w, w_out = (t.normal(width, scale=0.2, mean=1) for _ in range(2))
    b, alpha = t.normal(width) if biased else None, t.normal(1, scale=0.1, mean=0.6)
    s, z, rstd = t.empty(shape), t.empty(shape), t.empty((n, groups), F32)
    dw0, db0 = t.floats(width), t.floats(width)
    dw, db, dalpha = t.put(dw0, F32), t.put(db0, F32) if biased else None, t.put(alpha0, F32)
    set_norm(t, 0, DYT, (groups, width), width, (t.put(w), t.put(b), dw, db, None, None), n)
    t.call("set_norm_alpha", 0, t.put(alpha), dalpha)
    set_norm(t, 1, int(out), (groups, width), width, (t.put(w_out), None, None, None, None, rstd),
             n)
    t.call("run_add_norm", s, z, t.put(y), t.put(x0), 0.75)
    t.expect("s", s, (norm(y, w_out)[0] if out else y) + 0.75 * x0)
    x = s.get()                                  # the next norm reads s as it is stored
    Z, xhat = dyt(x, alpha, w, b if biased else 0)
    t.expect("z", z, Z)
    dy, add = t.normal(*shape), t.normal(*shape)
    dx, v = t.empty(shape), w * dy * (1 - xhat ** 2)
    t.call("run_norm_backward", dx, None, t.put(dy), s, t.put(add), None, 0.5, 1.0, 1.0)
    t.expect("dx", dx, 0.5 * add + alpha * v)
    t.expect("dw", dw, dw0 + (dy * xhat).sum((0, 1)), SUMS)
    if biased:
        t.expect("db", db, db0 + dy.sum((0, 1)), SUMS)
    t.expect("dalpha", dalpha, alpha0 + (v * x).sum(), SUMS)


def norm_of_experts(t):
    """The rows of each expert have a gain of their own; the second expert has no rows."""
    n, C, E = 50, 96, 3
    t.case(f"norm of {E} experts")
    start = np.array([0, 20, 20, 50], np.int32)
    of = np.repeat(np.arange(E), np.diff(start))
    x, w, dy = t.normal(n, C), t.normal(E, C, scale=0.25, mean=1), t.normal(n, C)
    z, dx, rstd, xs = t.empty((n, C)), t.empty((n, C)), t.empty(n, F32), t.put(x)
    dw = t.put(np.zeros((E, C)), F32)
    set_norm(t, 0, 1, (1, C), C, (t.put(w), None, dw, None, None, rstd), n)
    t.call("set_norm_experts", 0, t.put(start), E)
    set_norm(t, 1, 0, (1, C), C, (None,) * 6, n)
    t.call("run_add_norm", None, z, xs, None, 1.0)
    Z, xhat, _, r = norm(x, w[of])
    t.expect("z", z, Z)
    t.call("run_norm_backward", dx, None, t.put(dy), xs, None, None, 1.0, 1.0, 1.0)
    t.expect("dx", dx, norm_gradient(dy, xhat, r, w[of], False))
    want = np.zeros((E, C))
    np.add.at(want, of, dy * xhat)
    t.expect("dw", dw, want, SUMS)


def check_norm(t):
    for k, width in enumerate(widths(t)):
        # Backward of LayerNorm over more than 8192 values takes 128 KiB, more than 12.0 has.
        bias = k % 2 == 0 and (width <= 8192 or t.gpu.arch != "120")
        add_norm(t, 3 if width > 2000 else 9, 1, width, bias=bias, out=k % 3 == 0)
    add_norm(t, 20, 3, 64, bias=True)
    add_norm(t, 9, 4, 200, shared=False, bias=True)
    add_norm(t, 9, 1, 2560, bias=True, scratch=2 * 2560 * 2)      # a block has several lines
    add_norm(t, 300, 1, 128, skip=False)
    for k, width in enumerate(widths(t, DYT_PACKS)):
        # As above: without biases half the shared memory, for the kernel's sake.
        biased = width <= 8192 or t.gpu.arch != "120"
        add_dyt(t, 3 if width > 2000 else 9, 1, width, out=k % 2 == 0, biased=biased)
    add_dyt(t, 20, 3, 64)
    add_dyt(t, 9, 1, 2560, scratch=2 * (2560 * 2 + 4))
    norm_of_experts(t)


# --------------------------------------------------------------------------------------------- nGPT

def unit(x):
    return x / np.sqrt((x ** 2).sum(-1, keepdims=True))


def unit_gradient(d, x):
    u = unit(x)
    return (d - u * (d * u).sum(-1, keepdims=True)) / np.sqrt((x ** 2).sum(-1, keepdims=True))


def interpolation(t, n, C):
    t.case(f"interpolation {n}x{C}")
    y, skip, dz = t.normal(n, C), t.normal(n, C, scale=C ** -0.5), t.normal(n, C, scale=0.1)
    p = t.normal(C, scale=C ** -0.5)
    z, rstd, rstd_z = t.empty((n, C)), t.empty(n, F32), t.empty(n, F32)
    ys, skips, ps = t.put(y), t.put(skip), t.put(p)
    for slot, kept in enumerate((rstd, rstd_z)):
        set_norm(t, slot, 2, (1, C), 0, (None,) * 5 + (kept,), n, 1e-12, C ** -0.5)
    t.call("run_interpolate_forward", z, ys, skips, ps)
    slope = 0.05 * np.sqrt(C)
    alpha, yn = slope * np.abs(p), unit(y)
    s = skip + alpha * (yn - skip)
    t.expect("z", z, unit(s))
    dp0 = t.floats(C, scale=0.01)
    dp, dy, dskip = t.put(dp0, F32), t.empty((n, C)), t.empty((n, C))
    t.call("run_interpolate_backward", dy, dskip, t.put(dz), z, ys, skips, ps, dp)
    ds = unit_gradient(dz, s)
    t.expect("dskip", dskip, (1 - alpha) * ds, TWICE)
    t.expect("dy", dy, unit_gradient(alpha * ds, y), TWICE)
    t.expect("dp", dp, dp0 + slope * np.sign(p) * (ds * (yn - skip)).sum(0), TWICE)


def gains(t, experts):
    n, C = 70, 264
    t.case(f"gains{' of experts' if experts else ''}")
    start = np.array([0, 33, 70] if experts else [0, n], np.int32)
    E = len(start) - 1
    of = np.repeat(np.arange(E), np.diff(start))
    x, dy, w, dw0 = t.normal(n, C), t.normal(n, C), t.normal(E, C), t.floats(E, C)
    y, dx, dw, xs = t.empty((n, C)), t.empty((n, C)), t.put(dw0, F32), t.put(x)
    set_norm(t, 0, 3, (1, C), C, (t.put(w), None, dw, None, None, None), n, 0.0, 1.5)
    if experts:
        t.call("set_norm_experts", 0, t.put(start), E)
    t.call("run_gain_forward", y, xs)
    t.expect("y", y, 1.5 * w[of] * x)
    t.call("run_gain_backward", dx, t.put(dy), xs)
    t.expect("dx", dx, 1.5 * w[of] * dy)
    want = np.zeros((E, C))
    np.add.at(want, of, 1.5 * dy * x)
    t.expect("dw", dw, dw0 + want, SUMS)


def check_ngpt(t):
    for width in widths(t):
        interpolation(t, 3 if width > 2000 else 9, width)
    gains(t, False)
    gains(t, True)
