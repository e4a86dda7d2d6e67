"""Softmax and cross-entropy with their gradient, and the sums of the losses."""
import numpy as np

from gpu import F32, F64, I32
from harness import SUMS
from layers.norm import set_norm


def log_sum_exp(z):
    peak = z.max(1, keepdims=True)
    return (peak + np.log(np.exp(z - peak).sum(1, keepdims=True)))[:, 0]


def logits_gradient(z, V, targets, z_loss):
    """The gradient of cross-entropy + z_loss lse^2 over the first V columns; 0 in the others."""
    lse, d = log_sum_exp(z[:, :V]), np.zeros(z.shape)
    d[:, :V] = (1 + 2 * z_loss * lse)[:, None] * np.exp(z[:, :V] - lse[:, None])
    d[np.arange(len(z)), targets] -= 1
    return d


class Rows:
    """Logits [n, Vp] of V columns, with targets, and room for the losses."""

    def __init__(self, t, n, V, Vp, z_loss):
        self.z, self.targets = t.normal(n, Vp, scale=3), t.rng.integers(0, V, n).astype(I32)
        self.targets[0] = V - 1
        self.losses, self.logsum, self.zs = t.empty(n, F32), t.empty(n, F32), t.put(self.z)
        t.call("set_logits", self.zs, self.losses, self.logsum, t.put(self.targets), n, V, Vp,
               z_loss)

    def of_targets(self, z):
        return z[np.arange(len(z)), self.targets]


def classifier(t, n, V, Vp, gradient, z_loss):
    t.case(f"classifier {n}x{V} of {Vp}{'' if gradient else ', no gradient'}")
    r = Rows(t, n, V, Vp, z_loss)
    t.call("run_classifier", gradient)
    lse = log_sum_exp(r.z[:, :V])
    t.expect("losses", r.losses, lse - r.of_targets(r.z), SUMS)
    t.expect("logsum", r.logsum, lse, SUMS)
    if gradient:
        want, got = logits_gradient(r.z, V, r.targets, z_loss), r.zs.get()
        others = np.ones((n, Vp), bool)
        others[np.arange(n), r.targets] = False
        t.expect("gradient", got, want)
        t.expect("gradient but the target's", got[others], want[others])
        t.same("padding", got[:, V:], np.zeros((n, Vp - V)))
    else:
        t.same("logits stay", r.zs, r.z)
    sums = t.put(np.array([1.0, 2.0]), F64)
    t.call("run_loss_sums", sums)
    want = [1 + r.losses.get().sum(), 2 + z_loss * (r.logsum.get() ** 2).sum()]
    t.expect("sums", sums, want, (1e-12, 1e-6))


def gained_classifier(t):
    """nGPT: the logits have a gain, here 2 w."""
    n, V, Vp, scale, z_loss = 9, 1001, 1088, 0.5, 1e-3
    t.case("classifier with a gain")
    r = Rows(t, n, V, Vp, z_loss)
    w, dw0 = t.normal(Vp, scale=0.25, mean=1), t.floats(Vp)
    dw = t.put(dw0, F32)
    set_norm(t, 0, 3, (1, Vp), Vp, (t.put(w), None, dw, None, None, None), n, 0.0, 2.0)
    t.call("set_logits_gain")
    t.call("run_classifier", 1)
    L = 2 * w * r.z
    t.expect("losses", r.losses, log_sum_exp(L[:, :V]) - r.of_targets(L), SUMS)
    t.call("run_gained_classifier_backward", scale)
    d = logits_gradient(L, V, r.targets, z_loss)
    t.expect("dz", r.zs, 2 * w * d)
    t.expect("dw", dw, dw0 + scale * 2 * (d * r.z).sum(0), SUMS)


def check_loss(t):
    classifier(t, 6, 1003, 1024, 1, 1e-2)
    classifier(t, 3, 5000, 5056, 1, 0.0)
    classifier(t, 3, 777, 832, 0, 1e-3)
    classifier(t, 1, 119990, 120064, 1, 1e-3)      # does not fit in shared memory
    gained_classifier(t)
