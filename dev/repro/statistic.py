"""The language of a claim's statistics, and the one rule for verdicts.

A statistic is an expression of claims.toml over the runs in results/STUDY.json. Its value is a
Seeds: a number, or an array, for each seed. Arithmetic pairs by seed, so that what a seed does to
both arms cancels (dev/ablation/stats.py). A claim waits until every run that it reads has ended.

A run that diverged has no loss: it counts with the entropy of the bytes' frequencies, what a model
reaches that has learned nothing of the context. It fails, and so does one whose validation loss
ends above 0.98 of that entropy (collapsed: dev/ablation/study.py). Both were set before any run.
"""
import math
import operator
import pathlib
import sys

import numpy as np
import scipy.stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ablation import stats
from ablation.study import COLLAPSED, DIVERGED, ENDED

AGREES, DISAGREES, OPEN, SIGN, WAITING, ELSEWHERE = ("agrees", "disagrees",
                                                     "not resolved at this scale", "sign only",
                                                     "not run yet", "needs another machine")
WITHIN = 0.5                                  # nats, as for dev/ablate.py --largest-lr
GROUPS = {"att_proj": ("q_proj", "k_proj", "v_proj"), "attn_out": ("o_proj",),
          "ff_proj": ("gate_proj", "up_proj"), "ff_out": ("down_proj",)}


class Waiting(Exception):
    """Runs, or probes, that a statistic reads are not there yet."""


class Seeds(dict):
    """seed -> number or array."""

    def apply(self, function, *others):
        common = [seed for seed in self
                  if all(seed in other for other in others if isinstance(other, Seeds))]
        def at(seed):
            return [other[seed] if isinstance(other, Seeds) else other for other in others]

        return Seeds({seed: function(self[seed], *at(seed)) for seed in common})

    def __add__(self, other):
        return self.apply(operator.add, other)

    def __sub__(self, other):
        return self.apply(operator.sub, other)

    def __neg__(self):
        return self.apply(operator.neg)


def of_array(function):
    """A function of an array, or of a number, as one of Seeds."""
    return lambda seeds: seeds.apply(lambda value: function(np.asarray(value, dtype=float)))


# ----------------------------------------------------------------------------------------- verdicts

def interval(seeds):
    """The mean over seeds with its 95 % t interval; of an exact figure (one seed, named "exact")
    the figure itself."""
    values = [float(value) for value in seeds.values()]
    if list(seeds) == ["exact"]:
        return stats.Interval(values[0], values[0], values[0], 1, 0.0)
    return stats.mean_interval(values)


def side(seeds, wanted):
    """Whether the 95 % interval lies wholly on the predicted side, wholly on the other, or neither.
    Of "always" and "never" (values 0 and 1): all seeds, none, or some."""
    if wanted == "sign":
        return SIGN
    if wanted in ("always", "never"):
        hits = [bool(value) == (wanted == "always") for value in seeds.values()]
        return (OPEN if len(hits) < 2
                else AGREES if all(hits)
                else DISAGREES if not any(hits)
                else OPEN)
    found, words = interval(seeds), wanted.split()
    low, high = {"<": lambda x: (-math.inf, x), ">": lambda x: (x, math.inf),
                 "in": lambda x, y: (x, y)}[words[0]](*map(float, words[1:]))
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return OPEN
    return (AGREES if low < found.low and found.high < high
            else DISAGREES if found.high < low or found.low > high
            else OPEN)


def verdict(sides):
    """A claim with several parts: all must agree; one that disagrees is enough."""
    return (SIGN if SIGN in sides
            else DISAGREES if DISAGREES in sides
            else AGREES if sides and set(sides) == {AGREES}
            else OPEN)


# ------------------------------------------------------------------------------ a claim's functions

def text(value):
    return value if isinstance(value, str) else f"{value:.15g}"


def cost(run):
    """The final validation loss as it counts in means: of a run that diverged the entropy of
    frequencies."""
    lost = (run["status"] == DIVERGED or run["loss"] is None
            or not math.isfinite(run["loss"]))
    return run["unigram"] if lost else run["loss"]


def failed(run):
    return run["status"] in (DIVERGED, COLLAPSED)


def gradient_of(layers, group):
    """Norms by layer of a group's gradients, or of "ffn" or "all": the root of the sum of
    squares."""
    names = {"ffn": ("ff_proj", "ff_out"), "all": tuple(GROUPS)}.get(group, (group,))
    return np.sqrt(sum(np.square(np.array(layers[name], dtype=float)) for name in names))


def slope_of(x, y):
    return float(np.polyfit(np.asarray(x, dtype=float), np.asarray(y, dtype=float), 1)[0])


def safe_log10(values):
    return np.log10(np.maximum(values, 1e-300))


class Functions:
    """The names a statistic may use, over the results of a claim's study; results: study -> its
    JSON. `read` gathers the runs that were looked at."""

    def __init__(self, results, study, calculation=None):
        self.results, self.study, self.calculation, self.read = results, study, calculation, []

    def runs(self, mode=None, study=None, **axes):
        """Runs by seed. An axis of one value may be left out, so may lr, of which the best is
        taken."""
        name = study or self.study
        if name not in self.results:
            raise Waiting(name)
        found = self.results[name]
        wanted = dict({axis.replace("_", "-"): text(value) for axis, value in axes.items()},
                      **({"mode": mode} if mode else {}))
        several = [axis for axis, values in found["axes"].items()
                   if len(values) > 1 and axis not in ("seed", *wanted)]
        for axis, value in wanted.items():
            if axis not in ("init", "sdd"):
                value = next((one for one in found["axes"].get(axis, [])
                              if one == value or axis != "mode" and float(one) == float(value)),
                             None)
            if value not in found["axes"].get(axis, []):
                raise KeyError(f"study {name} has no {axis} {wanted[axis]}")
            wanted[axis] = value
        if several == ["lr"]:
            return self.runs(mode, study, **axes, lr=self.best(mode, study, **axes))
        if several:
            raise KeyError(f"study {name} has several {', '.join(several)}: the statistic must "
                           "name one")
        chosen = {run["axes"]["seed"]: run for run in found["runs"]
                  if all(run["axes"][axis] == value for axis, value in wanted.items())}
        missing = [seed for seed in found["axes"]["seed"] if seed not in chosen
                   or chosen[seed]["status"] not in ENDED]
        if missing:
            raise Waiting(name)
        self.read += [(name, run) for run in chosen.values()]
        return chosen

    def values(self, function, *words, **axes):
        return Seeds({seed: function(run) for seed, run in self.runs(*words, **axes).items()})

    def rates(self, study=None):
        if (study or self.study) not in self.results:
            raise Waiting(study or self.study)
        return sorted(self.results[study or self.study]["axes"]["lr"], key=float)

    def best(self, mode=None, study=None, **axes):
        """The learning rate with the lowest mean final loss; the lower one of equals."""
        return min(self.rates(study),
                   key=lambda rate: np.mean(list(self.loss(mode, study, **axes, lr=rate).values())))

    def loss(self, mode=None, study=None, **axes):
        return self.values(cost, mode, study, **axes)

    def loss_at(self, mode, step, **axes):
        """The validation loss at a step; of a run that diverged the entropy of frequencies."""
        return self.values(lambda run: run["unigram"] if run["status"] == DIVERGED
                           else dict(map(tuple, run["validations"]))[step], mode, **axes)

    def early(self, mode, **axes):
        """The mean training loss of the first half."""
        return self.values(lambda run: run["early"] if run["early"] is not None else run["unigram"],
                           mode, **axes)

    def fails(self, mode=None, study=None, **axes):
        return self.values(lambda run: float(failed(run)), mode, study, **axes)

    def stable(self, mode, axes):
        """rate -> seed -> whether the run is stable: it did not fail, and does not end WITHIN above
        the best of the rates up to its own (one that is too low is slow, not unstable)."""
        runs = {rate: self.runs(mode, **axes, lr=rate) for rate in self.rates()}
        best = lambda rate, seed: min(cost(runs[lower][seed]) for lower in runs
                                      if float(lower) <= float(rate))
        return {rate: {seed: not failed(run) and cost(run) <= best(rate, seed) + WITHIN
                       for seed, run in cell.items()} for rate, cell in runs.items()}

    def largest_stable(self, mode, **axes):
        """log2 of the largest rate of the grid up to which all are stable; where the lowest is not,
        that of half of it."""
        table = self.stable(mode, axes)
        rates = list(table)
        good = lambda seed: [rate for i, rate in enumerate(rates)
                             if all(table[lower][seed] for lower in rates[:i + 1])]
        return Seeds({seed: math.log2(float(good(seed)[-1]) if good(seed) else float(rates[0]) / 2)
                      for seed in table[rates[0]]})

    def some_rate_fails(self, mode, **axes):
        table = self.stable(mode, axes)
        return Seeds({seed: float(not all(table[rate][seed] for rate in table))
                      for seed in table[self.rates()[0]]})

    def rates_agree(self, one, other):
        a, b = self.stable(one[0], one[1]), self.stable(other[0], other[1])
        return Seeds({seed: float(all(a[rate][seed] == b[rate][seed] for rate in a))
                      for seed in a[self.rates()[0]]})

    def saved(self, a, b):
        """The part of b's steps that a saves (dev/ablation/stats.py: steps_saved)."""
        one, other = self.runs(a), self.runs(b)
        return Seeds({seed: stats.steps_saved_once(one[seed]["curve"], other[seed]["curve"]) or 0.0
                      for seed in one})

    def layers(self, run, when):
        try:
            return run["layers"][str(when)]
        except KeyError:
            raise Waiting("norms by layer")

    def gradient(self, mode, group="ffn", when="late", **axes):
        return self.values(lambda run: gradient_of(self.layers(run, when), group), mode, **axes)

    def group_spread(self, mode, when="late", **axes):
        """The deviation of log10 of the gradient norms over layers, mean of the four groups of
        weights."""
        def spread(run, group):
            return np.std(safe_log10(gradient_of(self.layers(run, when), group)))

        return self.values(lambda run: float(np.mean([spread(run, group) for group in GROUPS])),
                           mode, **axes)

    def residual(self, mode, when="late", **axes):
        return self.values(lambda run: np.array(self.layers(run, when)["residual_rms"]), mode,
                           **axes)

    def ratio(self, mode, branch, when="late", **axes):
        return self.values(lambda run: np.array(self.layers(run, when)[f"{branch}_ratio"]), mode,
                           **axes)

    def branch_variance(self, mode, when="late", **axes):
        """The ratios of attention and ffn to the stream, squared and added: the mean over all
        layers but the first."""
        attention, ffn = (self.ratio(mode, branch, when, **axes) for branch in ("attn", "ffn"))
        return attention.apply(lambda a, f: float(np.mean(a[1:] ** 2 + f[1:] ** 2)), ffn)

    def probe(self, mode, path, **axes):
        """A field of probe.json, as "hard_rank.hidden"."""
        def field(run):
            value = run.get("probe")
            for name in path.split("."):
                value = (value or {}).get(name)
            if value is None:
                raise Waiting("probes")
            return np.array(value, dtype=float)
        return self.values(field, mode, **axes)

    def ranks(self, papers):
        """Spearman's rank correlation of our losses with the paper's figures, [placement, figure],
        by seed."""
        losses = [self.loss(mode) for mode, _ in papers]
        return Seeds({seed: float(scipy.stats.spearmanr([loss[seed] for loss in losses],
                                                        [figure for _, figure in papers])[0])
                      for seed in losses[0]})

    def placements(self):
        if self.study not in self.results:
            raise Waiting(self.study)
        return self.results[self.study]["axes"]["mode"]

    def trend(self, by_depth):
        """The slope over log2 of the depth, by seed."""
        return Seeds({seed: slope_of(np.log2(list(by_depth)),
                                     [value[seed] for value in by_depth.values()])
                      for seed in next(iter(by_depth.values()))})

    def timing(self, a, b):
        """Time of a step of a over that of b, by round."""
        if "timing" not in self.results:
            raise Waiting("timing")
        rounds = self.results["timing"]["rounds"]
        return Seeds({str(i): one[a] / one[b] for i, one in enumerate(rounds)})

    def names(self):
        own = ("loss", "loss_at", "early", "fails", "best", "largest_stable", "some_rate_fails",
               "rates_agree", "saved", "gradient", "group_spread", "residual", "ratio",
               "branch_variance", "probe", "ranks", "placements", "trend", "timing")
        return dict({name: getattr(self, name) for name in own}, calculation=self.calculation,
                    **SHARED)


def pairs(similarity, first):
    """The mean over pairs of different layers from `first` on."""
    part = similarity[first:, first:]
    return float((part.sum() - np.trace(part)) / (part.size - len(part)))


SHARED = {
    "log10": of_array(safe_log10), "log2": of_array(np.log2), "square": of_array(np.square),
    "absolute": of_array(np.abs), "mean": of_array(np.mean), "deviation": of_array(np.std),
    "lowest": of_array(lambda g: float(safe_log10(g.min()))),
    "highest": of_array(lambda g: float(safe_log10(g.max()))),
    "spread": of_array(lambda g: float(np.std(safe_log10(g)))),
    "first_to_last": of_array(lambda g: float(safe_log10(g[0]) - safe_log10(g[-1]))),
    "second_to_last": of_array(lambda g: float(safe_log10(g[1]) - safe_log10(g[-1]))),
    "median_to_last": of_array(lambda g: float(safe_log10(np.median(g[:-1])) - safe_log10(g[-1]))),
    # slope of ln g over the layer, layer 0 left out
    "slope": of_array(lambda g: slope_of(np.arange(1, len(g)), np.log(np.maximum(g[1:], 1e-300)))),
    # exponent of v over the layer's number, from 1
    "power": of_array(lambda v: slope_of(np.log(np.arange(1, len(v) + 1)), np.log(v))),
    "farthest_from_one": of_array(lambda v: float(np.max(np.abs(v - 1)))),
    "line": of_array(lambda s: float(np.corrcoef(np.arange(len(s)), s)[0, 1])),
    "item": lambda seeds, i: seeds.apply(lambda v: float(v[i])),
    "part": lambda seeds, a, b: seeds.apply(lambda v: v[a:b]),
    "all_pairs": of_array(lambda s: pairs(s, 0)),
    "deep_pairs": of_array(lambda s: pairs(s, len(s) // 2)),
    "lowest_of": lambda first, *others: first.apply(lambda *values: min(values), *others),
}


def evaluate(claim, results, calculation):
    """[(what, seeds, side or None), ...] of a claim's expect and also, and the runs they read;
    Waiting where something is not there yet."""
    functions = Functions(results, claim.get("study"), calculation)
    names = dict(functions.names(), figures=claim.get("figures"), ours=claim.get("ours"),
                 __builtins__={"dict": dict})
    rows = [(what, eval(statistic, names), wanted) for what, statistic, wanted in claim["expect"]]
    rows += [(what, eval(statistic, names), None) for what, statistic in claim.get("also", [])]
    return [(what, seeds, side(seeds, wanted) if wanted else None, wanted)
            for what, seeds, wanted in rows], functions.read
