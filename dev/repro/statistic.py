"""The language of a claim's statistics, and the test of one comparison.

A statistic is an expression of claims.toml over the runs in results/STUDY.json. Its value is a
Seeds: a number, or an array, for each seed. Arithmetic pairs by seed, so that what a seed does to
both arms cancels (dev/ablation/stats.py). A comparison is tested against its predicted side at a
level of 5 %, two-sided; report.py makes a verdict of a claim's comparisons.

A run that diverged has no loss: it counts with the entropy of the bytes' frequencies, what a model
reaches that has learned nothing of the context. It fails, and so does one whose validation loss
ends above 0.98 of that entropy (collapsed: dev/ablation/study.py). Both were set before any run.
"""
import collections
import itertools
import math
import operator
import pathlib
import sys

import numpy as np
import scipy.stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ablation import stats
from ablation.study import COLLAPSED, DIVERGED, ENDED

AGREES, DISAGREES, OPEN, SIGN, FEW, WAITING = ("agrees", "disagrees", "not resolved", "sign only",
                                               "too few seeds", "not run yet")
LEVEL = 0.05                                  # of each test, two-sided, and of each family of tests
FAIL_SEEDS = 8                                # the fewest for "always" and "never"
DRAWS = 20000                                 # permutations, where not all of them are tried
WITHIN = 0.5                                  # nats, as for dev/ablate.py --largest-lr
GROUPS = {"att_proj": ("q_proj", "k_proj", "v_proj"), "attn_out": ("o_proj",),
          "ff_proj": ("gate_proj", "up_proj"), "ff_out": ("down_proj",)}


class Waiting(Exception):
    """Runs that a statistic reads, or parts of their results, are not there yet."""


class AllFailed(Exception):
    """A statistic asks what a model learned in runs of which every one failed."""


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


# -------------------------------------------------------------------------------------------- tests

Test = collections.namedtuple("Test", "side p")       # where the figure points, two-sided p-value


class Order(Seeds):
    """A rank correlation over placements, {"exact": rho}, and its p-value by permutation."""

    def __init__(self, rho, p):
        super().__init__(exact=rho)
        self.p = p


def interval(seeds):
    """The mean over seeds with its 95 % t interval; of an exact figure (one seed, named "exact")
    the figure itself."""
    values = [float(value) for value in seeds.values()]
    if list(seeds) == ["exact"]:
        return stats.Interval(values[0], values[0], values[0], 1, 0.0)
    return stats.mean_interval(values)


def proportion_interval(hits, n):
    """The 95 % interval of a proportion from `hits` of n (Clopper and Pearson, 1934)."""
    low = scipy.stats.beta.ppf(LEVEL / 2, hits, n - hits + 1) if hits else 0.0
    high = scipy.stats.beta.ppf(1 - LEVEL / 2, hits + 1, n - hits) if hits < n else 1.0
    return float(low), float(high)


def test_proportion(seeds, wanted):
    """"always" and "never": agrees if no seed is against it and the interval of the proportion lies
    above one half, disagrees if it lies below. p is that of the binomial test of one half: below
    5 % exactly where the interval excludes one half."""
    hits, n = sum(bool(value) == (wanted == "always") for value in seeds.values()), len(seeds)
    if n < FAIL_SEEDS:
        return Test(FEW, 1.0)
    if hits == n:
        return Test(AGREES, 2 * float(scipy.stats.binom.sf(hits - 1, n, 0.5)))
    below = 2 * float(scipy.stats.binom.cdf(hits, n, 0.5))
    return Test(DISAGREES, below) if hits < n / 2 else Test(OPEN, 1.0)


def region(wanted, margin):
    """The interval in which the mean is predicted to lie."""
    words = wanted.split()
    if words[0] in ("like", "not"):
        return {"like": (-margin, margin), "not above": (-math.inf, margin),
                "not below": (-margin, math.inf)}[wanted]
    return {"<": lambda x: (-math.inf, x), ">": lambda x: (x, math.inf),
            "in": lambda x, y: (x, y)}[words[0]](*map(float, words[1:]))


def test_region(seeds, low, high):
    """Whether the mean lies between low and high, or outside: t tests against the bounds. It lies
    between two bounds where both tests say so (equivalence: Schuirmann, 1987)."""
    found = interval(seeds)
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return Test(OPEN, 1.0)
    error = found.sd / math.sqrt(found.n)
    if error == 0:
        return (Test(OPEN, 1.0) if found.mean in (low, high)
                else Test(AGREES if low < found.mean < high else DISAGREES, 0.0))
    under = lambda bound: float(scipy.stats.t.cdf((found.mean - bound) / error, found.n - 1))
    over = lambda bound: float(scipy.stats.t.sf((found.mean - bound) / error, found.n - 1))
    inside, outside = max(over(low), under(high)), min(under(low), over(high))
    return Test(AGREES if inside < outside else DISAGREES, min(1.0, 2 * min(inside, outside)))


def test(seeds, wanted, margin=None, diverged=False):
    """One comparison. wanted: "< x", "> x", "in a b"; "like", "not above", "not below" of a
    difference, within the claim's margin; "always", "never"; "order" of an Order; "sign". Where
    every run failed there are no seeds, and nothing is resolved. diverged: a run among those read
    did. All such runs have one figure, so that seeds alike are all or none, not a mean."""
    if wanted == "sign":
        return Test(SIGN, 1.0)
    if not seeds:
        return Test(OPEN, 1.0)
    if wanted in ("always", "never"):
        return test_proportion(seeds, wanted)
    if wanted == "order":
        return Test(AGREES if seeds["exact"] > 0 else DISAGREES, seeds.p)
    if diverged and len(seeds) < FAIL_SEEDS and len(set(seeds.values())) == 1:
        return Test(FEW, 1.0)
    return test_region(seeds, *region(wanted, margin))


def plain_sides(tests):
    """The side of each comparison by itself."""
    return [one.side if one.side in (SIGN, FEW, WAITING) or one.p < LEVEL else OPEN
            for one in tests]


def holm_sides(tests):
    """The sides with the whole family's level kept: the k-th smallest of n p-values has to be below
    5 % / (n - k + 1), and all before it (Holm, 1979)."""
    sides, counted = plain_sides(tests), [i for i, one in enumerate(tests)
                                          if one.side not in (SIGN, FEW, WAITING)]
    held = True
    for rank, i in enumerate(sorted(counted, key=lambda i: tests[i].p)):
        held = held and tests[i].p < LEVEL / (len(counted) - rank)
        sides[i] = tests[i].side if held else OPEN
    return sides


def rank_correlation(ours, papers):
    """Spearman's rank correlation of two lists of figures as an Order. p: the part of the orders of
    `ours` whose correlation is as far from 0, of all orders up to 8 placements, else of DRAWS drawn
    ones and the one found. Figures that are all the same have no order."""
    a, b = (scipy.stats.rankdata(values) for values in (ours, papers))
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return Order(math.nan, 1.0)
    unit = lambda x: (x - x.mean()) / np.linalg.norm(x - x.mean())
    a, b = unit(a), unit(b)
    orders = (np.array(list(itertools.permutations(a))) if len(a) <= 8
              else np.random.default_rng(1).permuted(np.tile(a, (DRAWS, 1)), axis=1))
    as_far = np.abs(orders @ b) >= abs(a @ b) - 1e-12
    extra = 0 if len(a) <= 8 else 1
    return Order(float(a @ b), float((as_far.sum() + extra) / (len(orders) + extra)))


# ------------------------------------------------------------------------------ a claim's functions

def text(value):
    return value if isinstance(value, str) else f"{value:.15g}"


def alike(one, other):
    """Whether two values of an axis are the same: 1e-3 and 0.001 are."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def cost(run):
    """The final validation loss as it counts in means: of a run that diverged the entropy of
    frequencies."""
    lost = (run["status"] == DIVERGED or run["loss"] is None
            or not math.isfinite(run["loss"]))
    return run["unigram"] if lost else run["loss"]


def own_width(results, study):
    """The width of a study without "@", as text: the first where it has several; None without
    results."""
    found = results.get(study, {})
    return found["axes"].get("width", [found["flags"].get("width")])[0] if "axes" in found else None


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


def choices(found, axis, arm):
    """The values of an axis that a study tries with an arm."""
    has = lambda value: any(all(any(alike(one, dict(arm, **{axis: value}).get(name, one))
                                    for one in values) for name, values in row.items())
                            for row in found.get("only") or [{}])
    return list(filter(has, found["axes"][axis]))


class Functions:
    """The names a statistic may use, over the results of a claim's study; results: study -> its
    JSON. width: of each study the runs at this width are read. Gathered on the way: `read`,
    the runs that were looked at; `edges`, pairs of texts, an end of a study's rates and an arm that
    is best there; `missing`, seeds that have not been run, by study; `lacking`, pairs of a study
    and a part that its results do not have."""

    def __init__(self, results, study, calculation=None, width=None):
        self.results, self.study, self.calculation, self.width = results, study, calculation, width
        self.read, self.edges, self.missing, self.lacking = [], [], {}, []

    def name_of(self, study):
        """The study, the claim's own if None, at this scale's width or at the one that it names."""
        base, _, width = (study or self.study).partition("@")
        width = width or str(self.width or own_width(self.results, self.study) or "")
        named = f"{base}@{width}"
        own = own_width(self.results, base) == width
        return base if not width or own and named not in self.results else named

    def runs(self, mode=None, study=None, **axes):
        """Runs by seed. An axis may be left out where the others leave it one value, so may lr, of
        which the best is taken."""
        name = self.name_of(study)
        if name not in self.results:
            raise Waiting(name)
        found = self.results[name]
        wanted = dict({axis.replace("_", "-"): text(value) for axis, value in axes.items()},
                      **({"mode": mode} if mode else {}))
        # What equals a flag of the study needs no match: every run has it.
        wanted = {axis: value for axis, value in wanted.items() if axis in found["axes"]
                  or not alike(found["flags"].get(axis, ""), value)}
        several = [axis for axis in found["axes"] if axis not in ("seed", *wanted)
                   and len(choices(found, axis, wanted)) > 1]
        for axis, value in wanted.items():
            value = next((one for one in found["axes"].get(axis, []) if alike(one, value)), None)
            if value is None:
                if axis == "lr" and study:      # another study's best rate, not tried in this one
                    raise Waiting(name)
                raise KeyError(f"study {name} has no {axis} {wanted[axis]}")
            wanted[axis] = value
        if several == ["lr"]:
            return self.runs(mode, study, **axes, lr=self.best(mode, study, **axes))
        if several:
            raise KeyError(f"study {name} has several {', '.join(several)}: the statistic must "
                           "name one")
        chosen = {run["axes"]["seed"]: run for run in found["runs"]
                  if all(run["axes"][axis] == value for axis, value in wanted.items())}
        ended = {seed: run for seed, run in chosen.items() if run["status"] in ENDED}
        missing = set(choices(found, "seed", wanted)) - set(ended)
        if not ended:
            raise Waiting(name)
        if missing:
            self.missing[name] = self.missing.get(name, set()) | missing
        self.read += [(name, run) for run in ended.values()]
        return ended

    def values(self, function, *words, **axes):
        return Seeds({seed: function(run) for seed, run in self.runs(*words, **axes).items()})

    def rates(self, study=None, **arm):
        """The rates that a study tries with this arm; without an arm, all of them."""
        name = self.name_of(study)
        if name not in self.results:
            raise Waiting(name)
        arm = {axis.replace("_", "-"): text(value) for axis, value in arm.items()}
        return sorted(choices(self.results[name], "lr", arm), key=float)

    def at_edge(self, what, rate, rates, study):
        """Notes an arm's rate if it is the first or the last of its rates."""
        if len(rates) > 1 and rate in (rates[0], rates[-1]):
            word = "lowest" if rate == rates[0] else "highest"
            self.edges.append((f"the {word} rate tried in {self.name_of(study)}, {rate}, is the "
                               "best", what))

    def best(self, mode=None, study=None, **axes):
        """The learning rate with the lowest mean final loss; the lower one of equals."""
        rates = self.rates(study, **axes, **({"mode": mode} if mode else {}))
        if not rates:
            raise Waiting(self.name_of(study))
        found = min(rates,
                    key=lambda rate: np.mean(list(self.loss(mode, study, **axes, lr=rate)
                                                  .values())))
        self.at_edge(", ".join(filter(None, (mode, *(f"{axis} {value}"
                                                     for axis, value in axes.items())))),
                     found, rates, study)
        return found

    def near(self, rate, factor, **arm):
        """The rate tried with this arm that is nearest to factor times this one."""
        away = lambda one: abs(math.log(float(one) / (factor * float(rate))))
        return min(self.rates(**arm), key=away)

    def loss(self, mode=None, study=None, **axes):
        return self.values(cost, mode, study, **axes)

    def entropy(self, mode=None, study=None, **axes):
        """The entropy of the bytes' frequencies, what a model reaches that learns nothing else."""
        return self.values(lambda run: run["unigram"], mode, study, **axes)

    def tuned(self, mode, study, **axes):
        """The losses of a mode at the rate that is best in a study: of its seeds there, which chose
        the rate, and of those that STUDY_seeds adds."""
        rate = self.best(mode, study, **axes)
        return Seeds({**self.loss(mode, study, **axes, lr=rate),
                      **self.loss(mode, f"{study}_seeds", **axes, lr=rate)})

    def lead(self, mode, study, **axes):
        """How far a mode ends below PRE, both tuned."""
        return self.tuned("PRE", study, **axes) - self.tuned(mode, study, **axes)

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
        runs = {rate: self.runs(mode, **axes, lr=rate) for rate in self.rates(mode=mode, **axes)}
        seeds = [seed for seed in next(iter(runs.values()))
                 if all(seed in cell for cell in runs.values())]
        best = lambda rate, seed: min(cost(runs[lower][seed]) for lower in runs
                                      if float(lower) <= float(rate))
        good = lambda rate, run, seed: (not failed(run)
                                        and cost(run) <= best(rate, seed) + WITHIN)
        return {rate: {seed: good(rate, cell[seed], seed) for seed in seeds}
                for rate, cell in runs.items()}

    def largest_stable(self, mode, **axes):
        """The largest rate of the grid up to which all are stable; where the lowest is not, half of
        it."""
        table = self.stable(mode, axes)
        rates = list(table)
        good = lambda seed: [rate for i, rate in enumerate(rates)
                             if all(table[lower][seed] for lower in rates[:i + 1])]
        for seed in table[rates[0]]:
            if len(good(seed)) in (0, len(rates)):               # the largest is not among them
                end = rates[-1 if good(seed) else 0]
                self.at_edge(f"{mode}'s largest stable", end, rates, None)
        return Seeds({seed: float(good(seed)[-1]) if good(seed) else float(rates[0]) / 2
                      for seed in table[rates[0]]})

    def some_rate_fails(self, mode, **axes):
        table = self.stable(mode, axes)
        return Seeds({seed: float(not all(table[rate][seed] for rate in table))
                      for seed in next(iter(table.values()))})

    def rates_agree(self, one, other):
        a, b = self.stable(one[0], one[1]), self.stable(other[0], other[1])
        return Seeds({seed: float(all(a[rate][seed] == b[rate][seed] for rate in a))
                      for seed in next(iter(a.values())) if seed in next(iter(b.values()))})

    def saved(self, a, b):
        """The part of b's steps after the warmup that a saves (dev/ablation/stats.py:
        steps_saved). Where one of the two diverged, none is."""
        one, other = self.runs(a), self.runs(b)
        warmup = int(self.results[self.name_of(None)]["flags"]["warmup"])
        after = lambda run: [] if run["status"] == DIVERGED else run["curve"][warmup:]
        return Seeds({seed: stats.steps_saved_once(after(one[seed]), after(other[seed])) or 0.0
                      for seed in one if seed in other})

    def lack(self, what):
        """Notes that the study read last has no such part."""
        self.lacking.append((self.read[-1][0], what))
        raise Waiting(what)

    def layers(self, run, when):
        kept = run.get("layers", {})
        if str(when) not in kept:
            self.lack(f"norms by layer, {when}")
        return kept[str(when)]

    def by_layer(self, function, mode, when, **axes):
        """The values of a function of a run's norms by layer. A run that diverged before that time
        has none, and no say."""
        before = lambda run: (run["status"] == DIVERGED and "layers" in run
                              and str(when) not in run["layers"])
        runs = {seed: run for seed, run in self.runs(mode, **axes).items() if not before(run)}
        if not runs:
            raise AllFailed
        return Seeds({seed: function(self.layers(run, when)) for seed, run in runs.items()})

    def gradient(self, mode, group="ffn", when="late", **axes):
        return self.by_layer(lambda layers: gradient_of(layers, group), mode, when, **axes)

    def trained(self, function, *words, **axes):
        """The values of runs that did not fail: others show nothing of what a model learns."""
        found = Seeds({seed: function(run) for seed, run in self.runs(*words, **axes).items()
                       if not failed(run)})
        if not found:
            raise AllFailed
        return found

    def group_spread(self, mode, when="late", **axes):
        """The deviation of log10 of the gradient norms over layers, mean of the four groups of
        weights."""
        def spread(run, group):
            return np.std(safe_log10(gradient_of(self.layers(run, when), group)))

        return self.trained(lambda run: float(np.mean([spread(run, group) for group in GROUPS])),
                            mode, **axes)

    def residual(self, mode, when="late", **axes):
        return self.by_layer(lambda layers: np.array(layers["residual_rms"], float), mode, when,
                             **axes)

    def ratio(self, mode, branch, when="late", **axes):
        return self.by_layer(lambda layers: np.array(layers[f"{branch}_ratio"], float), mode, when,
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
                self.lack("probes")
            return np.array(value, dtype=float)
        return self.trained(field, mode, **axes)

    def order(self, papers):
        """The rank correlation of our mean losses with the paper's figures: [placement, figure], or
        [placement, figure, study]."""
        losses = [np.mean(list(self.loss(mode, *study).values())) for mode, _, *study in papers]
        return rank_correlation(losses, [figure for _, figure, *_ in papers])

    def nth(self, axis, i, study=None):
        """The i-th value of an axis, of which the values differ with the width."""
        name = self.name_of(study)
        if name not in self.results:
            raise Waiting(name)
        return self.results[name]["axes"][axis][i]

    def trend(self, by_depth):
        """The slope over log2 of the depth, by seed."""
        first, *others = by_depth.values()
        return first.apply(lambda *values: slope_of(np.log2(list(by_depth)), values), *others)

    def timing(self, a, b):
        """Time of a step of a over that of b, by round."""
        if "timing" not in self.results:
            raise Waiting("timing")
        rounds = self.results["timing"]["rounds"]
        return Seeds({str(i): one[a] / one[b] for i, one in enumerate(rounds)})

    def names(self):
        own = ("loss", "entropy", "tuned", "lead", "loss_at", "early", "fails", "best", "near",
               "largest_stable", "some_rate_fails", "rates_agree", "saved", "gradient",
               "group_spread", "residual", "ratio", "branch_variance", "probe", "order",
               "nth", "trend", "timing")
        return dict({name: getattr(self, name) for name in own}, calculation=self.calculation,
                    **SHARED)


def pairs(similarity, first):
    """The mean over pairs of different layers from `first` on."""
    part = similarity[first:, first:]
    return float((part.sum() - np.trace(part)) / (part.size - len(part)))


SHARED = {
    "log10": of_array(safe_log10), "log2": of_array(np.log2), "square": of_array(np.square),
    "absolute": of_array(np.abs), "mean": of_array(np.mean), "deviation": of_array(np.std),
    "positive": of_array(lambda x: float(x > 0)),
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
    "highest_of": lambda first, *others: first.apply(lambda *values: max(values), *others),
}


Figures = collections.namedtuple("Figures", "rows tests functions beside")


def seeds_of(statistic, names):
    """A statistic's value by seed; None while its runs are not there yet, empty where every one
    failed."""
    try:
        return eval(statistic, names)
    except AllFailed:
        return Seeds()
    except Waiting:
        return None


def evaluate(claim, results, calculation, width=None):
    """A claim's figures at one width: rows [(what, seeds, wanted or None), ...] of its expect and
    also, tests of the first of them, the Functions with what they read, and the runs that also
    reads. Seeds are None where runs are missing. Waiting where no row has runs."""
    functions = Functions(results, claim.get("study"), calculation, width)
    names = dict(functions.names(), figures=claim.get("figures"), __builtins__={"dict": dict})
    if any(wanted in ("like", "not above", "not below") for _, _, wanted in claim["expect"]):
        if not claim.get("margin") or not claim.get("margin_from"):
            raise ValueError(f"{claim['id']}: likeness needs a margin, and where in the paper it "
                             "is from")
    rows, tests = [], []
    for what, statistic, wanted in claim["expect"]:
        before = len(functions.read)
        seeds = seeds_of(statistic, names)
        diverged = any(run["status"] == DIVERGED for _, run in functions.read[before:])
        rows.append((what, seeds, wanted))
        tests.append(Test(WAITING, 1.0) if seeds is None
                     else test(seeds, wanted, claim.get("margin"), diverged))
    beside = Functions(results, claim.get("study"), calculation, width)
    names = dict(names, **beside.names())
    for what, statistic in claim.get("also", []):
        try:
            seeds = seeds_of(statistic, names)
        except KeyError:                      # rates and depths may be others at this width
            if not width:
                raise
            seeds = None
        rows.append((what, seeds, None))
    if all(seeds is None for _, seeds, _ in rows) and not functions.lacking:
        raise Waiting(claim["study"])
    return Figures(rows, tests, functions, beside.read)
