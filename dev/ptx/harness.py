"""harness.py: what the checks share: random inputs, comparisons and their limits."""
import zlib

import numpy as np

from gpu import F32, Failed, round_bf16

# A limit: the largest normalized mean square error, sum (x - y)^2 / sum y^2, and the largest error
# of one value, relative to that value plus the root mean square of all.
STORED = (1.5e-5, 0.04)     # rounded to bfloat16, whose one rounding has an error of 2.8e-6
TWICE = (3e-5, 0.06)        # the difference of nearly equal values, or two roundings
SUMS = (1e-9, 1e-4)         # float
CLOSE = (1e-12, 1e-5)       # float, of few operations
EXACT = (1e-10, 1e-3)       # the first two where the storage type is float


def nmse(got, want, floor=0.0):
    """floor: the least root mean square to measure against."""
    size = max((want ** 2).mean(), floor ** 2, 1e-300)
    return ((got - want) ** 2).mean() / size if np.isfinite(got).all() else np.inf


def worst(got, want, floor=0.0):
    size = np.abs(want) + max(np.sqrt((want ** 2).mean()), floor) + 1e-300
    return (np.abs(got - want) / size).max() if np.isfinite(got).all() else np.inf


class Test:
    """The checks of one architecture and precision. results: (name, error, passed) of each.
    show: True prints every result, False failures alone, None nothing."""

    def __init__(self, gpu, seed=1, show=True, full=False):
        self.gpu, self.seed, self.show, self.full = gpu, seed, show, full
        self.results, self.name, self.rng = [], "", None
        self.put, self.empty = gpu.put, gpu.empty
        self.call, self.written = gpu.call, gpu.written

    def case(self, name, scratch=1 << 20):
        """Begins a case: memory is free, and the random numbers depend on seed and name alone."""
        self.gpu.fresh(scratch)
        self.name = name
        self.rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def run(self, check):
        """Runs a check; a launch that ends with a message is a failure of its present case."""
        try:
            check(self)
        except Failed as error:
            self.note(str(error), np.inf, False)

    def stored(self, x):
        """As the storage type has it, in float64."""
        x = np.asarray(x, F32)
        return (round_bf16(x) if self.gpu.prec == "bf16" else x).astype(np.float64)

    def normal(self, *shape, scale=1.0, mean=0.0):
        return self.stored(mean + scale * self.rng.standard_normal(shape))

    def floats(self, *shape, scale=1.0):
        """Normal numbers that are floats in any precision: statistics, gradients of weights."""
        return (scale * self.rng.standard_normal(shape)).astype(F32).astype(np.float64)

    def note(self, what, error, passed):
        name = f"{self.name}: {what}"
        self.results.append((name, error, passed))
        if self.show or (self.show is False and not passed):
            print(f"  {'ok    ' if passed else 'FAILED'} {name:66s} {error:.1e}", flush=True)

    def expect(self, what, got, want, limit=STORED, floor=0.0):
        """The values agree within the limit. got: an array of the GPU, or numbers."""
        got = np.asarray(got.get() if hasattr(got, "get") else got, np.float64)
        want = np.asarray(want, np.float64)
        if got.shape != want.shape:
            raise ValueError(f"{self.name}: {what}: shapes {got.shape} and {want.shape}")
        if self.gpu.prec == "fp32" and limit in (STORED, TWICE):
            limit = EXACT
        error, single = nmse(got, want, floor), worst(got, want, floor)
        text = what if single <= limit[1] else f"{what} (a value off by {single:.1e})"
        self.note(text, error, bool(error <= limit[0] and single <= limit[1]))

    def same(self, what, got, want):
        """The values are equal."""
        got = np.asarray(got.get() if hasattr(got, "get") else got)
        wrong = int((got != np.asarray(want)).sum())
        self.note(what, wrong, wrong == 0)
