#!/usr/bin/env python3
"""Tests of dev/ablation/stats.py: python3 dev/test/test_stats.py [NAME...]

Invented runs whose answers are known: from published tables, by construction, or counted in
simulated experiments. Needs numpy and scipy.
"""
import math
import pathlib
import random
import re
import sys
import warnings

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev"))
from ablation import stats
from ablation.study import DIVERGED, FINISHED, WAITING, Run, Study

passed = failed = 0


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


def near(found, expected, within=1e-12):
    return found is not None and abs(found - expected) <= within


# ---- intervals

def test_t_table():
    """0.975 and 0.95 quantiles of t as printed in tables: the half width of 0, 1, .. n - 1 is the
    quantile times sd / sqrt(n)."""
    for degrees, quantile in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262),
                              (29, 2.045)):
        i = stats.mean_interval(list(range(degrees + 1)))
        expect(near((i.high - i.mean) / i.sd * i.n ** 0.5, quantile, 5e-4)
               and near(i.mean - i.low, i.high - i.mean), f"{degrees} degrees: {i}")
    i = stats.mean_interval([1.0, 2.0, 3.0], 0.9)
    expect(near((i.high - 2) * 3 ** 0.5, 2.920, 5e-4), f"90 %: {i}")
    expect(i.mean == 2 and i.sd == 1 and i.n == 3, f"mean, sd, n: {i}")


def test_few_values():
    one, none = stats.mean_interval([2.5]), stats.mean_interval([])
    expect(one.mean == 2.5 and one.n == 1 and all(map(math.isnan, (one.low, one.high, one.sd))),
           f"one value: {one}")
    expect(none.n == 0 and all(map(math.isnan, (none.mean, none.low, none.high, none.sd))),
           f"no value: {none}")
    same = stats.mean_interval([3.0, 3.0])
    expect(same == (3, 3, 3, 2, 0), f"equal values: {same}")


def test_coverage():
    """4000 studies of 3 seeds: seeds differ by 0.02, modes by 0.01, and what is left by 0.002, as
    paired runs do. 95 % of the intervals hold the truth."""
    rng, count, hits, paired_hits, width, paired_width = np.random.default_rng(1), 4000, 0, 0, 0, 0
    for _ in range(count):
        seed_effect = rng.normal(0, 0.02, 3)
        a, b = 2.01 + seed_effect + rng.normal(0, 0.002,
                                               3), 2.0 + seed_effect + rng.normal(0, 0.002, 3)
        one, pair = stats.mean_interval(a), stats.paired_difference(dict(enumerate(a)),
                                                                    dict(enumerate(b)))
        hits, paired_hits = (hits + (one.low <= 2.01 <= one.high),
                             paired_hits + (pair.low <= 0.01 <= pair.high))
        width, paired_width = width + one.high - one.low, paired_width + pair.high - pair.low
    within = 4 * (0.95 * 0.05 / count) ** 0.5
    expect(near(hits / count, 0.95, within), f"of a mean: {hits / count}")
    expect(near(paired_hits / count, 0.95, within),
           f"of a paired difference: {paired_hits / count}")
    expect(paired_width < 0.2 * width,
           f"a pair's interval is narrow: {paired_width / count}, a mean's: {width / count}")


def test_pairs():
    i = stats.paired_difference({1: 2.0, 2: 3.0, 3: None, 4: 9.0},
                                {2: 2.5, 1: 1.75, 3: 1.0, 5: 1.0})
    expect(i.n == 2 and near(i.mean, 0.375) and near(i.sd, 0.125 * 2 ** 0.5),
           f"common seeds, a - b: {i}")
    expect(stats.paired_difference({1: 2.0}, {1: None}).n == 0, "no pair")


def with_effect(effect, n=6):
    """n values of mean `effect` and standard deviation 1."""
    values = np.arange(n) - (n - 1) / 2
    return list(effect + values / np.std(values, ddof=1))


def test_seeds_needed():
    """Published: with effects of 0.2, 0.5, 0.8 a paired t test takes 199, 34, 15 pairs (G*Power 3).
    Simulated: n pairs see it often enough, n - 1 do not."""
    for effect, pairs in ((0.2, 199), (0.5, 34), (0.8, 15), (-0.5, 34)):
        found = stats.seeds_needed(with_effect(effect))
        expect(found == pairs, f"effect {effect}: {found} pairs, published {pairs}")
    # effect, power, alpha; pairs, and quantiles of t for one pair fewer and for these
    rng, count = np.random.default_rng(2), 30000
    for effect, power, alpha, n, *quantiles in ((2.0, 0.8, 0.05, 5, 3.182, 2.776),
                                                (1.6, 0.8, 0.05, 6, 2.776, 2.571),
                                                (1.8, 0.9, 0.05, 6, 2.776, 2.571),
                                                (1.8, 0.8, 0.1, 4, 2.920, 2.353)):
        found, seen = stats.seeds_needed(with_effect(effect), power, alpha), []
        for pairs, quantile in zip((n - 1, n), quantiles):
            x = rng.normal(effect, 1, (count, pairs))
            seen.append(np.mean(np.abs(x.mean(1)) / x.std(1, ddof=1) * pairs ** 0.5 > quantile))
        error = 4 * (power * (1 - power) / count) ** 0.5
        expect(found == n, f"effect {effect}: {found} pairs, expected {n}")
        expect(seen[0] < power - error < power + error < seen[1],
               f"effect {effect}: the power of {n - 1} and {n} pairs is {seen}, asked {power}")


def test_seeds_needed_edges():
    expect(stats.seeds_needed([0.1]) is None and stats.seeds_needed([]) is None,
           "fewer than two pairs")
    expect(stats.seeds_needed([-1.0, 1.0]) is None and stats.seeds_needed([0.0, 0.0]) is None,
           "a mean of zero")
    expect(stats.seeds_needed([0.25, 0.25]) == 2, "no scatter")
    expect(stats.seeds_needed([1.0, 1.0 + 1e-12]) == 2, "hardly any scatter")
    expect(stats.seeds_needed(with_effect(0.09)) == 971
           and stats.seeds_needed(with_effect(0.08)) is None, "a thousand at most")


# ---- curves

def test_smooth():
    expect(list(stats.smooth([4.0, 2.0, 6.0, 0.0, 8.0], 3)) == [4, 3, 4, 8 / 3, 14 / 3], "three")
    expect(list(stats.smooth([4.0, 2.0, 6.0], 1)) == [4, 2, 6], "one: as they are")
    expect(list(stats.smooth([4.0, 2.0], 10)) == [4, 3] and len(stats.smooth([], 3)) == 0,
           "more than there are; none")


def line(ahead, steps=400):
    """A loss that falls by 1/64 a step (exact in binary), `ahead` steps ahead of line(0)."""
    return [8 - (step + ahead) / 64 for step in range(steps)]


def test_steps_saved():
    saved = stats.steps_saved([line(100), line(40)], [line(0), line(0)])
    expect(saved.n == 2 and near(saved.mean, 0.175), f"100 and 40 of 400 steps ahead: {saved}")
    expect(near(saved.sd, 0.15 / 2 ** 0.5), f"each for itself: {saved}")
    expect(near(stats.steps_saved([line(0)], [line(100)]).mean, -0.25), "behind")
    expect(stats.steps_saved([line(0)], [line(0)]).mean == 0, "equal")
    for steps, width in ((200, 10), (400, 10), (800, 20)):
        shaken = [loss + (1 - width if step % width == width - 1 else 1)
                  for step, loss in enumerate(line(steps // 4, steps))]
        expect(near(stats.steps_saved([shaken], [line(0, steps)]).mean, 0.25),
               f"{steps} steps: noise whose mean over {width} is zero")


def test_steps_saved_of_broken_curves():
    expect(near(stats.steps_saved([line(100, 500)], [line(0)]).mean, 0.25),
           "the common part, the first longer")
    expect(near(stats.steps_saved([line(100)], [line(0, 500)]).mean, 0.25), "the second longer")
    gaps = [None if step in (0, 50, 51) else math.nan if step == 90 else loss
            for step, loss in enumerate(line(100))]
    expect(near(stats.steps_saved([gaps], [line(0)]).mean, 0.25), "skipped steps")
    for lost in (line(100)[:-1] + [None], line(100)[:-5] + [math.nan] * 5,
                 line(100)[:-1] + [math.inf], [], None, [None] * 400):
        saved = stats.steps_saved([lost, line(100)], [line(0), line(0)])
        expect(saved.n == 1 and near(saved.mean, 0.25), f"diverged, the better: {saved}")
        expect(stats.steps_saved([line(100)], [lost]).n == 0, "diverged, the other")


def test_steps_saved_in_noise():
    """Batches shake both curves alike: equal modes save nothing, and a mode twice as far at each
    step (in a tenth of the noise) saves half."""
    rng, steps = np.random.default_rng(3), np.arange(1, 1001)
    loss, found = lambda step: 1.7 + 2 * (step / 50 + 1) ** -0.7, {1.0: [], 1.02: [], 2.0: []}
    for _ in range(100):
        batch = rng.normal(0, 0.06, len(steps))
        for speed in found:
            found[speed].append((loss(speed * steps) + batch + rng.normal(0, 0.006, len(steps)),
                                 loss(steps) + batch + rng.normal(0, 0.006, len(steps))))
    for speed, pairs in found.items():
        i = stats.steps_saved(*map(list, zip(*pairs)))
        expect(near(i.mean, 1 - 1 / speed, 0.03), f"{speed} times as fast: {i}")


# ---- the largest stable rate

def search(good, start=1e-3, **options):
    """Rates in the order tried, and the bracket at the end."""
    tried = {}
    while len(tried) < 100 and (rate := stats.next_rate(tried, start, **options)) is not None:
        expect(rate not in tried and rate == float(f"{rate:.3g}"), f"{rate} is new and short")
        if rate in tried:
            break
        tried[rate] = good(rate)
    expect(len(tried) < 100, f"no end: {list(tried)[-5:]}")
    return list(tried), stats.bracket(tried)


def test_next_rate():
    tried, ends = search(lambda rate: rate < 5e-3)
    expect(tried == [0.001, 0.002, 0.004, 0.008, 0.00566, 0.00476] and ends == (0.00476, 0.00566),
           f"up, then between: {tried}")
    tried, ends = search(lambda rate: rate < 3e-4)
    expect(tried == [0.001, 0.0005, 0.00025, 0.000354, 0.000297] and ends == (0.000297, 0.000354),
           f"down, then between: {tried}")
    for threshold in np.geomspace(2e-6, 0.9, 40):
        tried, (low, high) = search(lambda rate: rate <= threshold)
        expect(low <= threshold < high <= 1.25 * low, f"threshold {threshold}: {low} to {high}")
    low, high = search(lambda rate: rate < 5e-3, precision=1.02)[1]
    expect(low < 5e-3 <= high <= 1.02 * low, f"more precise: {low} to {high}")
    tried = search(lambda rate: rate < 5e-3, factor=10.0)[0]
    expect(tried[:3] == [0.001, 0.01, 0.00316], f"larger strides: {tried}")


def test_next_rate_ends():
    tried, ends = search(lambda rate: True)
    expect(tried[-1] == 1.0 and ends == (1.0, None) and len(tried) == 11, f"all stable: {tried}")
    tried, ends = search(lambda rate: False)
    expect(tried[-1] == 1e-6 and ends == (None, 1e-6) and len(tried) == 11, f"none stable: {tried}")
    expect(search(lambda rate: True, highest=0.003)[0] == [0.001, 0.002, 0.003], "as high as asked")
    expect(search(lambda rate: False, lowest=0.0004)[0] == [0.001, 0.0005, 0.0004],
           "as low as asked")
    tried, (low, high) = search(lambda rate: rate < 5e-3, precision=1.0)
    expect((low, high) == (0.00499, 0.005), f"as precise as three digits: {low}, {high}")
    expect(search(lambda rate: True, factor=1.0001)[0] == [0.001], "a factor that rounding undoes")
    expect(search(lambda rate: True, start=0.00123456)[0][0] == 0.00123,
           "the start has three digits too")
    wild = random.Random(4)
    for _ in range(200):
        tried, (low, high) = search(lambda rate: wild.random() < 0.5)
        expect(len(tried) < 40 and (low is None or high is None or low < high <= 1.25 * low),
               f"results at random: {tried}")


def test_bracket():
    expect(stats.bracket({}) == (None, None), "nothing tried")
    expect(stats.bracket({1: True, 2: True, 8: False, 4: False}) == (2, 4), "in between")
    expect(stats.bracket({1: True, 2: False, 4: True, 8: False}) == (1, 2),
           "stable again above an unstable rate: not trusted")
    expect(stats.next_rate({1e-3: True, 2e-3: False, 4e-3: True}, 1e-3) == 0.00141, "nor searched")
    expect(stats.bracket({2: False, 4: True}) == (None, 2), "none below")


def test_is_stable():
    expect(stats.is_stable([2.0, 2.2], 2.0, 0.1), "at the tolerance")
    expect(not stats.is_stable([2.0, 2.3], 2.0, 0.1), "above it")
    expect(stats.is_stable([1.5], 2.0, 0.0) and stats.is_stable([9.0], None, 0.1),
           "a new best; the first")
    expect(not stats.is_stable([1.5, None], 2.0, 0.1) and not stats.is_stable([None], None, 0.1)
           and not stats.is_stable([], None, 0.1), "diverged; no run")


# ---- studies

def config(mode, initialization="normal", decay_gains="off", final_norm="auto", tied="off"):
    return {"norm_mode": mode, "initialization": initialization, "parameters": 1000 + len(mode),
            "flops_per_token": 6000 + len(mode),
            "flags": {"decay_gains": decay_gains, "final_norm": final_norm, "tied": tied}}


def make_run(axes, losses, given):
    """losses: the training curve, ended by the final validation loss; a string: a status without
    one; None: no such run."""
    run = Run("-".join(axes.values()), axes, pathlib.Path("nowhere"), [], config=given)
    run.status = losses if isinstance(losses, str) else FINISHED
    if run.status == FINISHED:
        run.log = ([{"step": i + 1, "loss": loss} for i, loss in enumerate(losses[:-1])]
                   + [{"step": len(losses) - 1, "val_loss": losses[-1]}])
    return run


def make_study(axes, losses, configs=config, compare="mode", tune=None):
    """losses(axes of a run), configs(mode): what to give the run."""
    study = Study(pathlib.Path("nowhere"), axes, {}, "", {}, compare, tune, [])
    combinations = [{}]
    for axis, values in axes.items():
        combinations = [dict(one, **{axis: value}) for one in combinations for value in values]
    study.runs = [make_run(one, given, configs(one.get("mode", "PRE"))) for one in combinations
                  if (given := losses(one)) is not None]
    return study


FINAL = {  # (mode, lr) -> final losses of seeds 1, 2, 3; at layers 8 a quarter more
    ("PRE", "1e-3"): (2.50, 2.60, 2.70), ("PRE", "3e-3"): (2.25, 2.375, 2.5),
    ("PRE", "1e-2"): (2.0, 2.0, DIVERGED),
    ("SPAN", "1e-3"): (2.00, 2.25, 2.25), ("SPAN", "3e-3"): (1.00, WAITING, None),
    ("SPAN", "1e-2"): (3.0, 3.0, 3.0),
    ("POST", "1e-3"): (3.00, DIVERGED, 2.0), ("POST", "3e-3"): (2.00, DIVERGED, 2.5),
    ("POST", "1e-2"): (1.0, DIVERGED, DIVERGED),
    ("SDD", "1e-3"): (DIVERGED, WAITING, DIVERGED), ("SDD", "3e-3"): (DIVERGED, WAITING, None),
    ("SDD", "1e-2"): (DIVERGED, DIVERGED, DIVERGED)}
AHEAD = {"PRE": 0, "SPAN": 100, "POST": -100}
AXES = {"mode": ["PRE", "SPAN", "POST", "SDD"], "layers": ["4", "8"],
        "lr": ["1e-3", "3e-3", "1e-2"], "seed": ["1", "2", "3"]}


def invented(axes):
    final = FINAL[axes["mode"], axes["lr"]][int(axes["seed"]) - 1]
    return (line(AHEAD[axes["mode"]]) + [final * (1.25 if axes["layers"] == "8" else 1)]
            if isinstance(final, float) else final)


def test_summarize():
    study = make_study(AXES, invented, tune="lr")
    rows = stats.summarize(study)
    expect([(row.panel["layers"], row.level) for row in rows]
           == [(layers, mode) for layers in ("4", "8") for mode in AXES["mode"]], "a row for each")
    for row, factor in zip(rows, [1] * 4 + [1.25] * 4):
        counts = rate, finished, _, _ = {"PRE": ("3e-3", 3, 0, 3), "SPAN": ("1e-3", 3, 0, 3),
                                         "POST": ("3e-3", 2, 1, 3),
                                         "SDD": (None, 0, 6, 8)}[row.level]
        expect((row.rate, row.finished, row.diverged, row.total) == counts,
               f"{row.level}: {row.rate}, {row.finished} {row.diverged} {row.total}")
        expect(row.loss.n == finished, f"{row.level}: losses of those that finished: {row.loss}")
        axes = [{"mode": row.level, "layers": row.panel["layers"], "lr": rate, "seed": seed}
                for seed in AXES["seed"] if rate]
        expect([run.axes for run in row.runs.values()] == axes and list(row.runs)
               == [one["seed"] for one in axes], f"{row.level}: {list(row.runs)}")
        expect((row.parameters, row.flops_per_token)
               == (1000 + len(row.level), 6000 + len(row.level)), f"{row.level}: size")
        if row.level == "PRE":
            expect(near(row.loss.mean, 2.375 * factor)
                   and (row.difference, row.saved, row.seeds_needed) == (None, None, None),
                   f"the baseline: {row.loss}")
        if row.level == "SPAN":                            # differences -0.25, -0.125, -0.25
            expect(near(row.difference.mean, -0.625 / 3 * factor) and row.difference.n == 3,
                   f"to the baseline's best: {row.difference}")
            expect(near(row.difference.high - row.difference.mean, 4.303 * row.difference.sd
                        / 3 ** 0.5, 1e-4), f"its interval: {row.difference}")
            expect(row.seeds_needed == 4, f"pairs: {row.seeds_needed}")
            expect(near(row.saved.mean, 0.25) and row.saved.n == 3, f"steps: {row.saved}")
        if row.level == "POST":                            # seeds 1 and 3: -0.25, 0
            expect(near(row.difference.mean, -0.125 * factor) and row.difference.n == 2,
                   f"of the seeds that finished: {row.difference}")
            expect(near(row.saved.mean, -0.25) and row.saved.n == 2, f"steps: {row.saved}")
        if row.level == "SDD":
            expect(row.difference.n == row.saved.n == 0 and row.seeds_needed is None
                   and math.isnan(row.loss.mean), f"nothing finished: {row}")


def test_summarize_other_settings():
    rows = stats.summarize(make_study(AXES, invented, tune="lr"), baseline="SPAN")
    expect([row.difference is None for row in rows] == [False, True, False, False] * 2,
           "another baseline")
    expect(near(rows[0].difference.mean, 0.625 / 3) and near(rows[0].saved.mean, -0.25),
           f"and its differences: {rows[0]}")
    rows = stats.summarize(make_study(AXES, invented, tune="lr"), baseline="SDD")
    expect(rows[0].difference.n == 0 and rows[3].difference is None,
           "a baseline of which nothing finished")
    rows = stats.summarize(make_study(AXES, invented))
    expect(len(rows) == 2 * 3 * 4 and all(row.rate is None for row in rows),
           "nothing tuned: the rates are panels")
    row = next(row for row in rows if row.panel == {"layers": "4", "lr": "1e-2"}
               and row.level == "POST")
    expect((row.finished, row.diverged, row.total, list(row.runs)) == (1, 2, 3, ["1", "2", "3"])
           and row.difference.mean == -1, f"one finished: {row}")
    row = next(row for row in rows if row.panel == {"layers": "4", "lr": "3e-3"}
               and row.level == "SDD")
    expect((row.finished, row.diverged, row.total, list(row.runs)) == (0, 1, 2, ["1", "2"]),
           f"none finished, one missing: {row}")
    skipping = lambda axes: [None if step == 50 and axes["mode"] == "SPAN" else loss
                             for step, loss in enumerate(line(AHEAD[axes["mode"]]))] + [2.0]
    row = stats.summarize(make_study({"mode": ["PRE", "SPAN"], "seed": ["1"]}, skipping))[1]
    expect(near(row.saved.mean, 0.25), f"a step that is not finite keeps its place: {row.saved}")


def warned(configs, losses=lambda axes: [1.0, 1.0], compare="mode", tune="lr", **axes):
    """The warnings about a study without a fault but the one asked for."""
    return stats.confounded(make_study({"mode": ["PRE", "HYBRID"], "lr": ["1", "2", "4"],
                                        "seed": ["1", "2", "3"], **axes}, losses, configs, compare,
                                       tune))


def best_at(**rates):
    return lambda axes: [1.0, 1.0 if axes["lr"] == rates.get(axes.get("mode"), "2") else 2.0]


def one(found, *words):
    """There is one warning, in at most two lines, with these words."""
    return (len(found) == 1 and found[0].count("\n  -> ") == found[0].count("\n") == 1
            and all(word in found[0] for word in words))


def test_no_warning():
    found = warned(config, best_at())
    expect(found == [], f"{found}")
    found = warned(lambda mode: None, best_at())
    expect(found == [], f"no run has begun: {found}")


def test_warning_lns():
    for start, count in (("scale", 1), ("scale-recipe", 1), ("megatron", 1), ("depth", 1),
                         ("normal", 0), ("global", 0), ("olmo", 0)):
        found = warned(lambda mode: config(mode, start), best_at(), mode=["PRE", "LNS"],
                       layers=["4", "8"])
        expect(len(found) == count and (not count or one(found, "LNS", start, "--init normal")),
               f"{start}: {found}")
    expect(warned(lambda mode: config(mode, "scale"), best_at()) == [], "other modes may")
    expect(one(warned(lambda mode: config("LNS", "scale"), best_at(), compare="layers",
                      mode=["LNS"], layers=["4", "8"]), "LNS"), "whatever is compared")


def test_warning_initialization():
    starts = lambda mode: config(mode,
                                 {"PRE": "scale", "HYBRID": "megatron", "SPAN": "scale"}[mode])
    found = warned(starts, best_at(), layers=["4", "8"])
    expect(one(found, "PRE: scale, HYBRID: megatron", "--init NAME"), f"{found}")
    expect(warned(starts, best_at(), mode=["PRE", "SPAN"]) == [], "the same for both")
    study = make_study({"init": ["normal", "scale"], "lr": ["1", "2", "4"],
                        "seed": ["1", "2", "3"]}, best_at(), compare="init", tune="lr")
    for run in study.runs:
        run.config["initialization"] = run.axes["init"]
    expect(stats.confounded(study) == [], "where the initialization is the question")


def test_warning_gains():
    for mode in stats.BRANCH_GAINS:
        for decay in ("zero", "one"):
            found = warned(lambda name: config(name, decay_gains=decay), best_at(),
                           mode=["PRE", mode], layers=["4", "8"])
            expect(one(found, f"({mode})", f"--decay-gains {decay}", "-> --decay-gains off"),
                   f"{mode}, {decay}: {found}")
        expect(warned(config, best_at(), mode=["PRE", mode]) == [], f"{mode} without decay")
    expect(warned(lambda mode: config(mode, decay_gains="zero"), best_at()) == [],
           "no mode has such gains")
    expect(warned(lambda mode: config(mode, decay_gains="zero"), best_at(),
                  mode=["PERI", "SANDWICH"]) == [], "all have")


def test_warning_head():
    for mode in stats.NO_FINAL_NORM:
        found = warned(lambda name: config(name, tied="on"), best_at(), mode=["PRE", mode],
                       layers=["4", "8"])
        expect(one(found, f"({mode})", "--final-norm on", "--tied off"), f"{mode}: {found}")
        expect(warned(config, best_at(), mode=["PRE", mode]) == [], f"{mode}, not tied")
        for forced in ("on", "off"):
            expect(warned(lambda name: config(name, tied="on", final_norm=forced), best_at(),
                          mode=["PRE", mode]) == [], f"{mode}, --final-norm {forced}")
    expect(warned(lambda mode: config(mode, tied="on"), best_at()) == [], "all have one")
    expect(warned(lambda mode: config(mode, tied="on"), best_at(), mode=["POST", "SPAN"]) == [],
           "none has one")


def test_warning_one_rate():
    found = warned(config, lr=["1"])
    expect(one(found, "one learning rate", "--lr A,B,C"), f"{found}")
    study = make_study({"mode": ["PRE", "HYBRID"], "seed": ["1", "2", "3"]},
                       lambda axes: [1.0, 1.0])
    expect(one(stats.confounded(study), "one learning rate"), "no such axis")
    expect(warned(config, lr=["1"], compare="layers", layers=["4", "8"]) == [],
           "modes are not compared")
    expect(warned(config, lr=["1"], mode=["PRE"]) == [], "one mode")
    expect(warned(config, tune=None) == [], "a panel for each rate")


def test_warning_edge():
    found = warned(config, best_at(HYBRID="4"), layers=["4", "8"])
    expect(one(found, "of HYBRID is the highest tried, 4", "add 8 to"), f"{found}")
    found = warned(config, best_at(HYBRID="1", PRE="1"))
    expect(one(found, "of PRE, HYBRID is the lowest tried, 1", "add 0.5 to"), f"{found}")
    found = warned(config, best_at(HYBRID="1"), lr=["2", "1", "4"])
    expect(one(found, "of HYBRID is the lowest tried, 1"), f"in any order: {found}")
    found = warned(config, best_at(HYBRID="10"), lr=["1", "2", "10"])
    expect(one(found, "of HYBRID is the highest tried, 10", "add 50 to"),
           f"ordered as numbers: {found}")
    expect(len(warned(config, best_at(HYBRID="4", PRE="1"))) == 2, "both edges")
    diverged = lambda axes: DIVERGED if axes["lr"] == "4" else best_at()(axes)
    expect(warned(config, diverged) == [], "the highest diverged")
    expect(warned(config, lambda axes: DIVERGED) == [], "all diverged")
    expect(warned(config, best_at(HYBRID="4"), tune=None) == [], "not tuned")
    found = warned(config, lambda axes: None if axes["mode"] == "HYBRID" and axes["lr"] == "4"
                   else best_at()(axes))
    expect(one(found, "of HYBRID is the highest tried, 2", "add 4 to"),
           f"of those tried with it: {found}")
    expect(warned(config, lambda axes: best_at()(axes) if axes["lr"] == "2" else None) == [],
           "tried with one rate only")


def test_warning_seeds():
    for seeds, count in ((["1"], 1), (["1", "2"], 1), (["1", "2", "3"], 0)):
        found = warned(config, best_at(), seed=seeds)
        expect(len(found) == count and (not count or one(found, f"seeds: {len(seeds)};",
                                                         "3 seeds or more")), f"{seeds}: {found}")


def test_tables():
    """stats.py and the trainer's tables agree on the modes and initializations."""
    text = (ROOT / "llmc/modes.h").read_text().replace("\\\n", " ")
    rows = dict(re.findall(r"\bMODE\((\w+), +(\..*?\")\)", text))
    expect(len(rows) > 25 and "SPAN" in rows, f"{len(rows)} modes")
    # nGPT has no final norm either, but its embedding has length 1 and its logits have a gain.
    without = {name for name, row in rows.items() if ".fin = 1" not in row and "L2" not in row}
    expect(without == set(stats.NO_FINAL_NORM), f"no final norm: {without}")
    gains = {name for name, row in rows.items() if re.search(r"\.(sdd|out) = 1", row)}
    expect(gains == set(stats.BRANCH_GAINS), f"gains of branches: {gains}")
    text = (ROOT / "llmc/init.h").read_text()
    rows = re.findall(r'^INIT\(\w+, *"([\w-]+)", *[^"]*?, *(sigma[^,"]*),', text, re.M)
    scaled = {name for name, out in rows if out.strip() != "sigma"}
    expect(len(rows) > 6 and scaled == set(stats.SCALED_OUTPUTS), f"{rows}")
    for word in ("decay_gains", "final_norm", "tied", "init", "lr"):
        expect(f"FLAG({word}," in (ROOT / "llmc/run/flags.h").read_text(), f"--{word}")


if __name__ == "__main__":
    warnings.simplefilter("error")                         # NaN is asked for where it is meant
    for name, test in [(name, test) for name, test in list(globals().items())
                       if name.startswith("test_")]:
        if len(sys.argv) < 2 or any(word in name for word in sys.argv[1:]):
            test()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)
