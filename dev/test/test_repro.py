#!/usr/bin/env python3
"""Tests of dev/repro: python3 dev/test/test_repro.py [NAME...]

The table is complete and every statistic in it can be computed, each part of the rule for verdicts
on results that are made for it, RESULTS.md is what the committed results give, costs and models are
what the trainer says, and a study that is killed goes on. Needs numpy, scipy and matplotlib, and
builds one trainer.
"""
import itertools
import json
import math
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from unittest import mock

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/repro"), str(ROOT / "dev")]
import ablate
import calculations
import report
import repro
import statistic
from ablation.study import COLLAPSED, DIVERGED, FINISHED, Run
from report import EDGE, ELSEWHERE, MIXED, ONE
from statistic import AGREES, DISAGREES, FEW, OPEN, SIGN, WAITING, Seeds

passed = failed = 0


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


# ---- invented results

def invented_run(axes, layers, dice):
    """A finished run with everything that a statistic may read."""
    norms = {name: [dice.uniform(0.1, 1) for _ in range(layers)]
             for name in (*statistic.GROUPS, "residual_rms", "attn_ratio", "ffn_ratio")}
    part = lambda n: [dice.uniform(0.1, 1) for _ in range(n)]
    probe = {"similarity": [part(layers) for _ in range(layers)],
             "similarity_by_distance": part(layers), "edr_harmonic": {"hidden": 10.0},
             "embedding_spectrum": {"gram": part(8)},
             "hard_rank": {"hidden": part(layers)}, "soft_rank": {"hidden": part(layers)},
             "condition": {name: part(layers) for name in ("gate", "up", "fused", "down")}}
    return {"axes": axes, "status": FINISHED, "seconds": 1, "commit": "0", "steps": 300,
            "parameters": 1, "unigram": 3.0, "loss": dice.uniform(2, 2.5), "early": 2.7,
            "probe": probe,
            "validations": [[step, dice.uniform(2, 3)] for step in (75, 150, 225, 300)],
            "curve": [3 - step / 300 for step in range(300)],
            "layers": {when: norms for when in ("1", "100", "late", "end")}}


def invented(name, dice):
    """Results of a study of the repository as if every run had ended; more seeds of a study are at
    all of its rates, as any of them may be invented to be the best, and so are all arms on real
    text, of which some have no rate yet."""
    axes = repro.read_study(name)
    only = [] if "data" in axes else repro.read_only(name)
    if name.endswith("_seeds"):
        axes["lr"] = repro.read_study(name.removesuffix("_seeds"))["lr"]
    shown = {axis: values for axis, values in axes.items()
             if len(values) > 1 or axis in ("mode", "seed")}
    runs = [invented_run({axis: one[axis] for axis in shown}, int(one["layers"]), dice)
            for one in ablate.combinations({"axes": axes, "only": only, "searched": []})]
    for run in runs:                                     # each arm's best rate is inside its grid
        if "lr" in run["axes"]:
            run["loss"] += abs(axes["lr"].index(run["axes"]["lr"]) - len(axes["lr"]) // 2)
    return {"study": name, "axes": shown, "only": only,
            "flags": {axis: values[0] for axis, values in axes.items() if axis not in shown},
            "machine": {"processor": "invented"}, "runs": runs}


def small(losses, status=None, rates=("0.001",), seeds=("1", "2", "3")):
    """A study "s" of placements at rates: losses[mode][rate][seed]; status the same, where a run
    has not just finished."""
    runs = [{"axes": {"mode": mode, "lr": rate, "seed": seed},
             "status": (status or {}).get((mode, rate, seed), FINISHED), "loss": by_rate[i][j],
             "unigram": 3.0, "steps": 300, "parameters": 2400}
            for mode, by_rate in losses.items() for i, rate in enumerate(rates)
            for j, seed in enumerate(seeds[:len(by_rate[i])])]
    return {"s": {"axes": {"mode": list(losses), "lr": list(rates), "seed": list(seeds)},
                  "flags": {}, "runs": runs}}


def CLAIM(*expectations):
    return {"id": "X", "study": "s", "expect": list(expectations)}


def judged(results, *expectations):
    return report.judge(CLAIM(*expectations), results, None).verdict


def said(results, *expectations):
    """What one scale says."""
    for found in results.values():
        found["flags"] = {"width": "64"}
    scales = report.judge(CLAIM(*expectations), results, None).scales
    return report.scale_verdict(scales[0], scales[0].sides) if scales else WAITING


# ---- the table

def test_table():
    """Every claim of the four papers once, and our own questions, each with a study that exists and
    statistics that can be computed once its runs are there."""
    table = repro.read_claims()
    ids = [claim["id"] for claim in table["claim"]]
    expect(sorted(ids) == sorted([f"S{i}" for i in range(1, 45)] + [f"H{i}" for i in range(1, 21)]
                                 + [f"D{i}" for i in range(1, 26)]),
           f"S1-S44, H1-H20, D1-D25, each once: {len(ids)}")
    dice, names = random.Random(1), repro.studies()
    results = {name: invented(name, dice) for name in names}
    results["timing"] = {"flags": "--width 1280",
                         "rounds": [{"PRE": 1.0, "SPAN": 1.0 + i / 100, "SDD": 1.1}
                                    for i in range(3)]}
    results["calculations"] = {"figures": {
        calculations.name_of(words): {"1": 1.0, "2": 1.1, "3": 0.9} for words in calculations.ALL}}
    asked = set()
    for claim in table["claim"] + table["question"]:
        expect(all(claim.get(field) for field in ("where", "claim", "paper")),
               f"{claim['id']} says what, where and with what figures")
        expect(("study" in claim) != ("needs" in claim)
               and ("expect" in claim) == ("study" in claim),
               f"{claim['id']} has a study with expectations, or says what it needs")
        expect(all(name in (*names, "calculations", "timing")
                   for name in [claim.get("study", "timing"), *claim.get("reads", [])]),
               f"{claim['id']}: its studies exist")
        expect("full" in claim or claim.get("study") == "calculations",
               f"{claim['id']} has a command at full scale")
        outcome = report.judge(claim, results, report.calculation_of(results))
        expect((outcome.verdict == ELSEWHERE) == ("needs" in claim)
               and outcome.verdict != WAITING, f"{claim['id']}: {outcome.verdict}")
        expect(all(isinstance(value, (int, float)) for scale in outcome.scales
                   for _, seeds, _ in scale.rows for value in (seeds or {}).values()),
               f"{claim['id']}: a number for each seed")
        expect(claim.get("was") in (None, AGREES, DISAGREES, OPEN, SIGN, ELSEWHERE)
               and ("was" in claim or "put_right" in claim or claim in table["question"]),
               f"{claim['id']} says what its verdict was, or why it is new")
        expect(f"**{outcome.verdict}**: " in report.claim_section(claim, outcome, results)[2],
               f"{claim['id']} has a section")
        every = {name for scale in outcome.scales for name, _ in scale.read + scale.beside}
        asked |= every
        read = {name.partition("@")[0] for name in every}
        expect(read <= {claim.get("study"), *claim.get("reads", [])}
               and set(claim.get("reads", [])) <= read, f"{claim['id']} reads {read}, and says so")
    again = {name for name in names if f"{name}@{statistic.own_width(results, name)}" in names}
    # the study on real text has no verdict yet
    waiting = {name for name in names if "data" in repro.read_study(name)}
    expect(asked | again | waiting == set(names),
           f"every study serves a claim: {set(names) - asked - again}")
    at_least = sum("expect" in claim for claim in table["claim"]) / len(ids)
    expect(at_least >= 0.8, f"{100 * at_least:.0f} % of the claims have figures once all is run")


# ---- verdicts

def test_sides():
    side = lambda seeds, wanted: statistic.plain_sides([statistic.test(seeds, wanted)])[0]
    # mean -0.11, half width 4.303 * 0.01 / sqrt(3) = 0.0248
    near = Seeds({"1": -0.10, "2": -0.11, "3": -0.12})
    for wanted, want in (("< 0", AGREES), ("> 0", DISAGREES), ("< -0.1", OPEN), ("< -0.08", AGREES),
                         ("> -0.2", AGREES), ("< -0.2", DISAGREES), ("in -0.2 0", AGREES),
                         ("in 0 1", DISAGREES), ("in -0.11 0", OPEN), ("sign", SIGN)):
        expect(side(near, wanted) == want,
               f"{wanted}: {side(near, wanted)}, expected {want}")
    expect(side(Seeds({"1": -0.1, "2": 0.1, "3": -0.2}), "< 0") == OPEN,
           "an interval on both sides")
    expect(side(Seeds({"1": -0.1}), "< 0") == OPEN
           and side(Seeds({}), "< 0") == OPEN, "one seed, or none, has no interval")
    expect(side(Seeds({"1": -0.1, "2": math.nan, "3": -0.1}), "< 0") == OPEN,
           "what is not a number is on no side")
    expect(side(Seeds({"1": 0.0, "2": 0.0}), "> 0") == OPEN
           and side(Seeds({"1": 0.0, "2": 0.0}), "> -1") == AGREES, "a tie is on no side")
    expect(side(Seeds({"exact": 0.1}), "in 0.05 0.15") == AGREES
           and side(Seeds({"exact": 0.2}), "in 0.05 0.15") == DISAGREES,
           "an exact figure is its own interval")
    for hits, always, never in ((8, AGREES, DISAGREES), (0, DISAGREES, AGREES), (4, OPEN, OPEN),
                                (7, OPEN, OPEN)):
        seeds = Seeds({str(i): float(i < hits) for i in range(8)})
        expect((side(seeds, "always"), side(seeds, "never")) == (always, never),
               f"always and never of {hits} of 8")
    for sides, verdict in (([AGREES, AGREES], AGREES), ([AGREES, OPEN], OPEN),
                           ([AGREES, OPEN, DISAGREES], DISAGREES), ([SIGN, SIGN], SIGN),
                           ([], OPEN)):
        expect(report.verdict_of(sides) == verdict, f"{sides}: {report.verdict_of(sides)}")


def test_verdicts():
    better = small({"PRE": [[2.00, 2.10, 2.20]], "SPAN": [[1.90, 1.99, 2.09]]})
    minus = "loss('SPAN') - loss('PRE')"
    expect(said(better, ["", minus, "< 0"]) == AGREES,
           "lower in every seed by about the same, though seeds scatter as much")
    expect(said(better, ["", minus, "> 0"]) == DISAGREES, "the other side")
    expect(said(better, ["", minus, "< 0"], ["", minus, "> 0"]) == DISAGREES,
           "one part of two disagrees")
    expect(said(small({"PRE": [[2.0, 2.1, 2.2]], "SPAN": [[1.9, 2.2, 2.1]]}),
                  ["", minus, "< 0"]) == OPEN, "now lower, now higher")
    expect(said(small({"PRE": [[2.00, 2.10, 2.20]], "SPAN": [[1.90, 1.99]]}),
                  ["", minus, "< 0"]) == WAITING, "a seed that has not been run yet")
    killed = small({"PRE": [[2.00, 2.10, 2.20]], "SPAN": [[1.90, 1.99, 2.09]]},
                   {("SPAN", "0.001", "3"): "killed"})
    expect(said(killed, ["", minus, "< 0"]) == WAITING and said({}, ["", minus, "< 0"])
           == WAITING, "a killed run has no result, nor has a study that was never begun")
    broken = small({"PRE": [[2.0, 2.1, 2.2]], "SPAN": [[None, math.nan, 1.9]]},
                   {("SPAN", "0.001", seed): DIVERGED for seed in "123"})
    functions = statistic.Functions(broken, "s")
    expect(list(functions.loss("SPAN").values()) == [3.0, 3.0, 3.0],
           f"a run that diverged counts with the entropy of frequencies: {functions.loss('SPAN')}")
    expect(said(broken, ["", minus, "> 0"]) == AGREES
           and list(functions.fails("SPAN").values()) == [1.0, 1.0, 1.0],
           "all three diverged, one of them after a good validation")
    rates = small({"PRE": [[2.0, 2.1, 2.2], [1.8, 1.9, 2.0]],
                   "SPAN": [[1.95, 2.05, 2.15], [2.4, 3.1, 1.0]]},
                  {("SPAN", "0.002", "1"): COLLAPSED, ("SPAN", "0.002", "2"): DIVERGED},
                  ("0.001", "0.002"))
    functions = statistic.Functions(rates, "s")
    expect(list(functions.fails("SPAN", lr=0.002).values()) == [1.0, 1.0, 0.0]
           and list(functions.fails("PRE", lr=0.002).values()) == [0.0] * 3,
           "two of three failed, and none")
    expect((functions.best("PRE"), functions.best("SPAN")) == ("0.002", "0.001"),
           "each at its best rate; one lucky seed does not make a rate")
    expect(functions.loss("PRE")["1"] == 1.8 and functions.loss("PRE", lr="1e-3")["1"] == 2.0,
           "a rate that is named, written another way")
    most = {mode: list(functions.largest_stable(mode).values()) for mode in ("PRE", "SPAN")}
    expect(most == {"PRE": [0.002] * 3, "SPAN": [0.001, 0.001, 0.002]},
           f"largest stable rates: {most}")
    expect(list(functions.some_rate_fails("SPAN").values()) == [1.0, 1.0, 0.0]
           and list(functions.rates_agree(("PRE", {}), ("SPAN", {})).values()) == [0.0, 0.0, 1.0],
           "collapsed and diverged runs fail; a rate that is only too low does not")
    high = statistic.Functions(small({"PRE": [[2.0, 2.0], [2.6, 2.4]]}, rates=("0.001", "0.002"),
                                     seeds=("1", "2")), "s")
    expect(list(high.some_rate_fails("PRE").values()) == [1.0, 0.0],
           "a rate fails where the loss ends 0.5 above a lower rate's")
    try:
        statistic.Functions(rates, "s").loss("POST")
        expect(False, "a placement that the study does not have")
    except KeyError:
        expect(True, "")


# ---- the rule

def scale(losses, width=None, study="s", **words):
    """A study of `small` at a width, by its name of report.py: s, s@128."""
    found, = small(losses, **words).values()
    found["flags"] = {"width": str(width or 64), "batch": "4", "seq": "8"}
    return {study if width is None else f"{study}@{width}": found}


def arms(difference, seeds=3, rates=1, spread=0.01):
    """PRE, and SPAN so much above it, in every seed with a little scatter; the best of three rates
    is the middle one."""
    pre = [2 + 0.1 * seed for seed in range(seeds)]
    span = [one + difference + spread * (seed % 3 - 1) for seed, one in enumerate(pre)]
    shifted = lambda losses, by: [one + by for one in losses]
    by_rate = {1: [0], 3: [0.3, 0, 0.3]}[rates]
    return {"PRE": [shifted(pre, by) for by in by_rate],
            "SPAN": [shifted(span, by) for by in by_rate]}


MINUS = "loss('SPAN') - loss('PRE')"
THREE = ("0.001", "0.002", "0.004")
EIGHT = tuple("12345678")


def test_two_scales():
    """One scale has no verdict, width 32 no say; two that say the same have one, and what agrees
    here and not there is a verdict of its own."""
    below, above, open_ = arms(-0.3), arms(0.3), arms(0.0, spread=0.3)
    at = lambda small_scale, large, own=64: dict(
        scale(small_scale, study="s") | scale(large, width=128))
    one = judged(scale(below), ["", MINUS, "< 0"])
    expect(one == ONE, f"one scale has no verdict: {one}")
    for pair, verdict in (((below, below), AGREES), ((above, above), DISAGREES),
                          ((below, above), MIXED), ((above, below), MIXED),
                          ((below, open_), OPEN), ((open_, above), OPEN)):
        found = judged(at(*pair), ["", MINUS, "< 0"])
        expect(found == verdict, f"two scales: {found}, expected {verdict}")
    narrow = scale(above)
    narrow["s"]["flags"]["width"] = "32"
    expect(judged(narrow | scale(below, width=128), ["", MINUS, "< 0"]) == ONE
           and judged(narrow | scale(below, width=64) | scale(below, width=128),
                      ["", MINUS, "< 0"]) == AGREES, "width 32 is no scale, and has no say")
    twice = scale(above) | scale(below, width=64) | scale(below, width=128)
    expect(judged(twice, ["", MINUS, "< 0"]) == AGREES, "a width run again: the later runs")
    timing = {"timing": {"flags": "--width 1280",
                         "rounds": [{"PRE": 1.0, "SPAN": 0.9 + i / 100} for i in range(3)]}}
    claim = CLAIM(["", "timing('SPAN', 'PRE')", "< 1"]) | {"study": "timing"}
    expect(report.judge(claim, timing, None).verdict == AGREES, "a time needs no second scale")
    both = scale(below) | scale(below, width=96)
    expect(judged(both, ["", MINUS, "< 0"]) == ONE, "two narrow widths are not two scales")
    made = lambda width, side, edges=(), missing=(): report.Scale(
        {width}, [], [side], [side], list(edges), dict(missing), [], [])
    for scales, verdict in (
            ([made(64, AGREES), made(128, FEW)], FEW),
            ([made(64, AGREES), made(96, OPEN), made(128, DISAGREES)], MIXED),
            ([made(64, SIGN)], SIGN),
            ([made(64, AGREES), made(128, FEW, edges=["e"])], EDGE),
            ([made(64, AGREES), made(128, AGREES, ["e"], {"s": {"1"}})], WAITING)):
        found = report.combined(CLAIM(), scales, lambda one: one.sides)
        expect(found == verdict, f"{[one.sides for one in scales]}: {found}, expected {verdict}")


def test_edge():
    """No verdict while an arm's best rate is the first or the last tried."""
    inside = scale(arms(-0.3, rates=3), rates=THREE) | scale(arms(-0.3, rates=3), 128, rates=THREE)
    expect(judged(inside, ["", MINUS, "< 0"]) == AGREES, "each arm's best rate is inside")
    for order in ([0, 1, 2], [2, 1, 0]):
        edge = arms(-0.3, rates=3)
        edge["SPAN"] = [[one + 0.3 * i for one in edge["SPAN"][1]] for i in order]
        found = report.judge(CLAIM(["", MINUS, "< 0"]),
                             scale(arms(-0.3, rates=3), rates=THREE)
                             | scale(edge, 128, rates=THREE), None)
        expect(found.verdict == EDGE and [arm for _, arm in found.scales[1].edges] == ["SPAN"],
               f"SPAN's best is an end of the rates: {found.verdict}")
    apart = scale(arms(-0.3, rates=3), rates=THREE)      # SPAN has two of the three rates
    apart["s"]["only"] = [{"mode": ["PRE"]}, {"mode": ["SPAN"], "lr": ["1e-3", "0.002"]}]
    apart["s"]["runs"] = [run for run in apart["s"]["runs"]
                          if (run["axes"]["mode"], run["axes"]["lr"]) != ("SPAN", "0.004")]
    found = report.judge(CLAIM(["", MINUS, "< 0"]), apart, None).scales[0]
    expect(len(found.rows[0][1]) == 3 and [arm for _, arm in found.edges] == ["SPAN"],
           f"an end of its own rates: {found.rows}, {found.edges}")
    more = scale(arms(-0.3, rates=3), rates=THREE)
    more |= {"s_seeds": scale(arms(-0.3, rates=3), rates=THREE, seeds=("4", "5", "6"))["s"]}
    tuned = statistic.Functions(more, "s").tuned("SPAN", "s")
    lead = statistic.Functions(more, "s").lead("SPAN", "s")
    expect(len(lead) == 6 and all(0.28 < one < 0.32 for one in lead.values()),
           f"SPAN ends 0.3 below PRE: {lead}")
    expect(sorted(tuned) == ["1", "2", "3", "4", "5", "6"] and abs(tuned["4"] - tuned["1"]) < 1e-9,
           f"another study's seeds at the best rate: {tuned}")
    apart["s"]["axes"]["heads"] = ["2", "8"]             # an axis that goes with another one
    apart["s"]["only"] = [{"mode": ["PRE"], "heads": ["2"]}, {"mode": ["SPAN"], "heads": ["8"]}]
    for run in apart["s"]["runs"]:
        run["axes"]["heads"] = "2" if run["axes"]["mode"] == "PRE" else "8"
    expect(len(statistic.Functions(apart, "s").loss("SPAN", lr=0.001)) == 3,
           "an axis that the others leave one value need not be named")
    named = "loss('SPAN', lr=0.001) - loss('PRE', lr=0.001)"
    expect(judged(inside, ["", named, "< 0"]) == AGREES, "a claim about one rate names it")


def test_proportions():
    """Always and never: eight seeds at least, all of them alike, Clopper and Pearson's interval."""
    low, high = statistic.proportion_interval(8, 8)
    expect(abs(low - 0.025 ** (1 / 8)) < 1e-12 and high == 1, "8 of 8: 0.63 to 1")
    low, high = statistic.proportion_interval(1, 8)
    expect(abs(low - 0.0032) < 1e-4 and abs(high - 0.5265) < 1e-4, f"1 of 8: {low}, {high}")
    for n in range(8, 13):
        for hits in range(n + 1):
            seeds = Seeds({str(i): float(i < hits) for i in range(n)})
            low, high = statistic.proportion_interval(hits, n)
            side, p = statistic.test(seeds, "always")
            expect(side != AGREES or hits == n and low > 0.5 and p < 0.05,
                   f"always agrees with {hits} of {n}")
            expect((side == DISAGREES and p < 0.05) == (high < 0.5),
                   f"always disagrees where the interval is below one half: {hits} of {n}")
    for n, verdict in ((7, FEW), (8, AGREES)):
        losses = {"SPAN": [[3.0] * n]}
        status = {("SPAN", "0.001", seed): COLLAPSED for seed in EIGHT[:n]}
        words = {"status": status, "seeds": EIGHT[:n]}
        found = judged(scale(losses, **words) | scale(losses, 128, **words),
                       ["", "fails('SPAN')", "always"])
        expect(found == verdict, f"{n} of {n} seeds fail: {found}, expected {verdict}")
    for n, verdict in ((2, FEW), (7, FEW), (8, DISAGREES)):
        status = {("SPAN", "0.001", seed): DIVERGED for seed in EIGHT[:n]}
        alike = small({"SPAN": [[None] * n]}, status, seeds=EIGHT[:n])
        found = said(alike, ["", "loss('SPAN') - entropy('SPAN')", "< -0.5"])
        expect(found == verdict, f"{n} seeds without scatter, as all diverged: {found}")


def test_likeness():
    """Not different is not alike: the interval has to lie within the paper's margin."""
    near, far, wide = arms(0.002, spread=0.001), arms(0.3), arms(0.0, spread=0.3)
    claim = dict(CLAIM(["", MINUS, "like"]), margin=0.02, margin_from="table 1")
    for losses, verdict in ((near, AGREES), (far, DISAGREES), (wide, OPEN)):
        found = report.judge(claim, scale(losses) | scale(losses, 128), None).verdict
        expect(found == verdict, f"alike within 0.02: {found}, expected {verdict}")
    seeds = Seeds({"1": 0.009, "2": 0.011, "3": 0.010})
    for wanted, margin, side in (("like", 0.02, AGREES), ("like", 0.01, OPEN),
                                 ("like", 0.005, DISAGREES), ("not above", 0.02, AGREES),
                                 ("not above", 0.005, DISAGREES), ("not below", 0.005, AGREES)):
        found = statistic.plain_sides([statistic.test(seeds, wanted, margin)])[0]
        expect(found == side, f"{wanted} {margin}: {found}, expected {side}")
    for missing, wanted in itertools.product(("margin", "margin_from"), ("like", "not below")):
        bare = {name: value for name, value in claim.items() if name != missing}
        try:
            report.judge(dict(bare, expect=[["", MINUS, wanted]]), scale(near), None)
            expect(False, f"{wanted} without {missing}")
        except ValueError:
            expect(True, "")


def test_family():
    """Holm's correction over the comparisons of a claim, and the count without it."""
    for values, plain, held in (((0.01, 0.03, 0.04), 3, 1), ((0.01, 0.02, 0.04), 3, 3),
                                ((0.02, 0.02, 0.02), 3, 0), ((0.04,), 1, 1), ((0.06, 0.01), 1, 1)):
        tests = [statistic.Test(AGREES, p) for p in values]
        count = lambda sides: sides.count(AGREES)
        expect((count(statistic.plain_sides(tests)), count(statistic.holm_sides(tests)))
               == (plain, held), f"Holm over p-values {values}")
    mixed = statistic.holm_sides([statistic.Test(DISAGREES, 0.04), statistic.Test(AGREES, 0.001),
                                  statistic.Test(FEW, 1.0)])
    expect(mixed == [DISAGREES, AGREES, FEW], f"what has too few seeds is in no family: {mixed}")
    # t = 6.08 of 2 degrees, p = 0.026: below 5 %, above a half of it
    losses = arms(-0.0351, spread=0.01)
    results = scale(losses) | scale(losses, 128)
    parts = [["", MINUS, "< 0"], ["", "loss('SPAN') - loss('PRE') - loss('PRE') + loss('PRE')",
                                  "< 0"]]
    one = report.judge(CLAIM(parts[0]), results, None)
    two = report.judge(CLAIM(*parts), results, None)
    expect(one.verdict == AGREES, f"one comparison at 2.6 %: {one.verdict}")
    expect((two.verdict, two.plain) == (OPEN, AGREES),
           f"two at 2.6 %: {two.verdict}, without the correction {two.plain}")
    claim = dict(CLAIM(*parts), id="S1", put_right="a reason")
    _, _, paper, *_, whole, first, since, plain, _ = report.counts({"claim": [claim]}, {"S1": two})
    cells = lambda line: line.split(" | ", 1)[1]
    expect(cells(paper) == cells(whole) == cells(since) != cells(plain)
           and whole.endswith(" | 1 |") and first.endswith(" | 0 |"),
           f"counts of all, of those put right since, and without the correction: {since}")


def test_order():
    """An order over placements is tested by permuting placements: seeds make no degrees of
    freedom."""
    figures = [[f"M{i}", i] for i in range(4)]
    losses = {name: [[2 + 0.1 * value + 0.001 * seed for seed in range(8)]]
              for name, value in figures}
    claim = dict(CLAIM(["", "order(figures)", "order"]), figures=figures)
    words = {"seeds": EIGHT}
    found = report.judge(claim, scale(losses, **words) | scale(losses, 128, **words), None)
    expect(found.verdict == OPEN and abs(found.scales[0].rows[0][1].p - 2 / 24) < 1e-12,
           f"4 placements in order, 8 seeds: 2 of 24 orders are as far: {found.verdict}")
    for n, ours, side in ((5, [0, 1, 2, 3, 4], AGREES), (5, [4, 3, 2, 1, 0], DISAGREES),
                          (5, [0, 1, 2, 4, 3], OPEN), (12, list(range(12)), AGREES)):
        order = statistic.rank_correlation(ours, range(n))
        found = statistic.plain_sides([statistic.test(order, "order")])[0]
        expect(found == side, f"{ours}: {found} with p {order.p}, expected {side}")
    tied = statistic.rank_correlation([3.0] * 5, range(5))
    expect(tied.p == 1 and statistic.plain_sides([statistic.test(tied, "order")]) == [OPEN],
           f"losses that are all the same have no order: p {tied.p}")
    drawn = statistic.rank_correlation(list(range(12)), range(12))
    expect(drawn.p == 1 / (statistic.DRAWS + 1), f"the order found is one of them: {drawn.p}")
    many = statistic.rank_correlation(np.random.default_rng(0).normal(size=16), range(16))
    exact = math.erfc(abs(many["exact"]) * math.sqrt(15) / math.sqrt(2))
    expect(abs(many.p - exact) < 0.03, f"drawn orders, near the normal limit: {many.p}, {exact}")


def test_missing():
    """A missing seed is named and no verdict is made; figures of the seeds that are there are
    shown. So are the comparisons of a claim of which another waits."""
    whole, part = arms(-0.3), arms(-0.3)
    part["SPAN"] = [part["SPAN"][0][:2]]
    found = report.judge(CLAIM(["", MINUS, "< 0"]), scale(whole) | scale(part, 128), None)
    expect(found.verdict == WAITING and found.scales[1].missing == {"s@128": {"3"}}
           and len(found.scales[1].rows[0][1]) == 2, f"seed 3 is missing: {found.verdict}")
    functions = statistic.Functions(scale(part) | scale(whole, study="t"), "s")
    functions.loss("SPAN")
    functions.results["s"]["axes"]["seed"] = ["1", "2", "3", "4"]
    functions.loss("SPAN"), functions.loss("PRE")
    expect(functions.missing == {"s": {"3", "4"}}, f"gaps of all arms: {functions.missing}")
    found = report.judge(CLAIM(["", MINUS, "< 0"], ["", "loss('PRE', study='t')", "< 9"]),
                         scale(whole) | scale(whole, 128), None)
    expect(found.verdict == WAITING and found.scales[0].sides == [AGREES, WAITING],
           f"one comparison of two waits: {found.verdict}")
    functions = statistic.Functions(scale(dict(whole, SPAN=[[1.9]])), "s")
    functions.results["s"]["only"] = [{"mode": ["PRE"]}, {"mode": ["SPAN"], "seed": ["1"]}]
    expect(len(functions.loss("SPAN")) == 1 and not functions.missing,
           f"seeds that the study does not ask of an arm: {functions.missing}")
    for what, statement in (("probes", "item(probe('PRE', 'hard_rank.hidden'), 0)"),
                            ("norms by layer, late", "lowest(gradient('PRE'))")):
        claim = CLAIM(["", statement, "> 0"])
        found = report.reasons(claim, report.judge(claim, scale(whole), None))
        expect(found == [f"s was run without {what}: `python3 dev/repro/repro.py --fresh s`, "
               "if claims.toml's [keep] has it"],
               f"what the results lack is named: {found}")
    failed = small({"PRE": [[2.9] * 3]}, {("PRE", "0.001", seed): COLLAPSED for seed in "123"})
    for run in failed["s"]["runs"]:
        run["probe"] = {"similarity": [[1.0]]}
    expect(said(failed, ["", "all_pairs(probe('PRE', 'similarity'))", "> 0"]) == OPEN,
           "runs that all failed are not runs that are missing")


def test_other_study():
    """Another study is read at the scale's width, at the width that its name gives, or not yet; so
    is one that lacks the rate which is best."""
    below, above = arms(-0.3), arms(0.3)
    narrow = scale(below)
    narrow["s"]["flags"]["width"] = "32"
    results = narrow | scale(below, 128) | scale(above, study="t") | scale(below, 128, study="t")
    other = MINUS.replace("')", "', study='t')")
    scales = report.judge(CLAIM(["", MINUS, "< 0"], ["", other, "< 0"]), results, None).scales
    expect([one.sides for one in scales] == [[AGREES, WAITING], [AGREES, AGREES]],
           f"no width 32 of t: {[one.sides for one in scales]}")
    named = other.replace("'t'", "'t@64'")
    scales = report.judge(CLAIM(["", MINUS, "< 0"], ["", named, "< 0"]), results, None).scales
    expect([one.sides for one in scales] == [[AGREES, DISAGREES]] * 2,
           f"width 64 of t, at both scales: {[one.sides for one in scales]}")
    waits = dict(CLAIM(["", other, "< 0"]), also=[["beside", MINUS]])
    found = report.judge(waits, narrow | scale(above, study="t"), None)
    expect(found.verdict == WAITING and [what for what, seeds, _ in found.scales[0].rows if seeds]
           == ["beside"], f"what is beside a row that waits is shown: {found.verdict}")
    low = scale(arms(-0.3), study="t") | scale(arms(-0.3, rates=3), rates=THREE)
    best = "loss('SPAN', study='t', lr=best('SPAN')) - loss('PRE')"
    found = report.judge(CLAIM(["", MINUS, "< 0"], ["", best, "< 0"]), low, None)
    expect(found.scales[0].sides == [AGREES, WAITING], f"t lacks 0.002: {found.scales[0].sides}")


def test_sizes():
    """Each scale says layers, tokens, parameters and tokens per parameter."""
    results = scale(arms(-0.3), 128)
    results["s@128"]["flags"]["layers"] = "8"
    runs = [("s@128", run) for run in results["s@128"]["runs"]]
    expect(report.size_text(runs, results) == "8 layers, 9.6k tokens, 2.4k parameters, 4 tokens a "
           "parameter", report.size_text(runs, results))


def test_fresh():
    """--fresh STUDY removes that study's results and runs, and no other's."""
    with tempfile.TemporaryDirectory() as folder:
        before = repro.HERE, repro.ROOT
        repro.HERE = repro.ROOT = pathlib.Path(folder)
        try:
            for name in ("a", "a@128"):
                (repro.ROOT / "ablations/repro" / name).mkdir(parents=True)
                (repro.HERE / "results").mkdir(exist_ok=True)
                (repro.HERE / f"results/{name}.json").write_text("{}")
            repro.remove("a")
            left = sorted(path.name for path in repro.HERE.glob("*/*") if path.name != "repro")
            expect(left == ["a@128.json"] and [path.name for path in repro.ROOT.glob("*/*/*")]
                   == ["a@128"], f"left: {left}")
        finally:
            repro.HERE, repro.ROOT = before
    said = subprocess.run([sys.executable, str(repro.HERE / "repro.py"), "--fresh"],
                          capture_output=True, text=True)
    expect(said.returncode and "--fresh without a study" in said.stderr, said.stderr)


def stopped(*words):
    """What repro.py says where it stops."""
    with mock.patch.object(sys, "argv", ["repro.py", *words]):
        try:
            repro.main()
        except SystemExit as stop:
            return str(stop.code)
    return "nothing"


def test_stops():
    """What cannot be run is refused before anything is removed; where nothing comes of a study's
    folder, the way out is named."""
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        (here / "results").mkdir()
        (here / "results/s.json").write_text('{"flags": {}, "runs": []}')
        (here / "claims.toml").write_text("claim = []\n[keep]\n")
        (here / "questions.toml").write_text("question = []\n")
        nothing = lambda *words, **more: True
        with (mock.patch.multiple(repro, HERE=here, ROOT=here, run_study=nothing,
                                  write_timing=nothing),
              mock.patch.object(report, "write", nothing)):
            for data, words, want in (('data = "nowhere"', ["--fresh", "s"], "no such folder"),
                                      ("", ["--fresh", "--timing", "s"], "--fresh: expected"),
                                      ("", ["--fresh", "--table", "s"], "--fresh: expected"),
                                      ("", ["--budget", "0", "s"], "--budget 0: expected"),
                                      ("", ["--jobs", "-1", "s"], "--jobs -1: expected"),
                                      ("", ["s"], "--fresh STUDY")):
                (here / "s.toml").write_text(f'mode = "PRE"\nseed = 1\n{data}\n')
                found = stopped(*words)
                expect(want in found and (here / "results/s.json").exists(),
                       f"{' '.join(words)}: {found}")


def test_whole():
    """A kill leaves no half of a study's TOML or of a picture, and a study without runs does not
    keep the page from being written."""
    class Kill(Exception):
        pass

    def killed(*words, **more):
        raise Kill

    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        for name in ("s.toml", "s.png"):
            (here / name).write_text("whole")
        chart = mock.Mock(savefig=lambda path, **more: pathlib.Path(path).write_text("half"))
        with (mock.patch.multiple(repro, HERE=here, trainer=lambda: None,
                                  cost_lines=lambda *words: ["# cost"]),
              mock.patch("os.replace", killed)):
            for name, work in (("s.toml", lambda: repro.write_costs(["s"])),
                               ("s.png", lambda: report.save(chart, here / "s.png", 80))):
                try:
                    work()
                    expect(False, f"{name} is not replaced")
                except Kill:
                    expect((here / name).read_text() == "whole", f"half of {name}")
        (here / "results").mkdir()
        (here / "results/s.json").write_text("{}")
        results = {"s": {"axes": {"mode": ["PRE"], "seed": ["1"]}, "flags": {"steps": "9"},
                         "runs": []}}
        (here / "s.png").unlink()
        with (mock.patch.multiple(repro, HERE=here, read_results=lambda: results),
              mock.patch.object(report, "render", lambda *words: "page")):
            report.write({"keep": {"s": ["leads"], "t": ["leads"]}}, here)
            expect((here / "RESULTS.md").read_text() == "page" and not (here / "s.png").exists(),
                   "a picture of no runs")


def test_widened():
    """A study that got another rate or seed since its results were made lacks them: no verdict, and
    no edge of the old grid."""
    with tempfile.TemporaryDirectory() as folder:
        before, repro.HERE = repro.HERE, pathlib.Path(folder)
        try:
            (repro.HERE / "results").mkdir()
            results = scale(arms(-0.3, rates=3), rates=THREE)["s"]
            flags = "".join(f"{name} = {value}\n" for name, value in results["flags"].items())
            (repro.HERE / "results/s.json").write_text(json.dumps(dict(results, machine="m")))
            for rates, seeds, says in (("1e-3, 2e-3, 4e-3", "1, 2, 3", AGREES),
                                       ("1e-3, 2e-3", "1, 2, 3", EDGE),
                                       ("1e-3, 2e-3, 4e-3, 8e-3", "1, 2, 3", WAITING),
                                       ("1e-3, 2e-3, 4e-3", "1, 2, 3, 4", WAITING)):
                (repro.HERE / "s.toml").write_text(
                    f'mode = ["PRE", "SPAN"]\nlr = [{rates}]\nseed = [{seeds}]\n{flags}'
                    'make = "DEVICE=cpu PREC=fp32"\n')
                found = report.judge(CLAIM(["", MINUS, "< 0"]), repro.read_results(), None)
                by_scale = [report.scale_verdict(one, one.sides) for one in found.scales]
                expect((by_scale or [found.verdict]) == [says],
                       f"rates {rates}, seeds {seeds}: {by_scale} {found.verdict}")
            text = (repro.HERE / "s.toml").read_text()
            expect(len(repro.missing("s")) == 6, "the fourth seed of two arms at three rates")
            (repro.HERE / "s.toml").write_text(text.replace("fp32", "bf16"))
            expect(len(repro.missing("s")) == 24 and not repro.read_results()["s"]["runs"],
                   "results of one precision are none of another")
            expect(repro.without_probe("s") == 0, "a study that asks for no probes")
            (repro.HERE / "s.toml").write_text(text + "probe = true\n")
            expect(repro.without_probe("s") == 18, "runs of before it asked for probes")
        finally:
            repro.HERE = before


def test_commit():
    """A run names its commit; results that are written beside it do not make it dirty, sources
    do."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        git = lambda *words: subprocess.run(["git", "-C", folder, "-c", "user.name=a", "-c",
                                             "user.email=a@b.c", *words], check=True,
                                            capture_output=True)
        (root / "dev/repro/results").mkdir(parents=True)
        for name in ("train_gpt.c", "dev/repro/results/a.json", "dev/repro/RESULTS.md",
                     "dev/repro/a.png"):
            (root / name).write_text("before")
        git("init", "-q")
        git("add", "-A")
        git("commit", "-q", "-m", "all")
        clean = repro.commit_of(root)
        (root / "dev/repro/results/a.json").unlink()
        (root / "dev/repro/RESULTS.md").write_text("after")
        (root / "dev/repro/a.png").write_text("after")
        expect(len(clean) >= 7 and "dirty" not in clean and repro.commit_of(root) == clean,
               f"results and pages alone: {clean}, {repro.commit_of(root)}")
        (root / "train_gpt.c").write_text("after")
        expect(repro.commit_of(root) == clean + "-dirty", f"a source: {repro.commit_of(root)}")
    before = ("38a956d-dirty", "609b651-dirty", "b4ad491-dirty")
    for path in (repro.HERE / "results").glob("*.json"):
        for run in json.loads(path.read_text()).get("runs", []):
            expect("dirty" not in run["commit"] or run["commit"] in before,
                   f"{path.stem}: runs of a clean commit: {run['commit']}")


def test_statistics():
    g = Seeds({"1": np.array([1e-14, 1e-3, 1e-2, 1e-1])})
    shared = statistic.SHARED
    for name, want in (("lowest", -14), ("highest", -1), ("first_to_last", -13),
                       ("second_to_last", -2), ("median_to_last", -2), ("slope", math.log(10))):
        expect(abs(shared[name](g)["1"] - want) < 1e-9,
               f"{name}: {shared[name](g)['1']}, expected {want}")
    expect(abs(shared["power"](Seeds({"1": np.arange(1, 9) ** 2.0}))["1"] - 2) < 1e-9,
           "the exponent of a square")
    expect(shared["all_pairs"](Seeds({"1": np.array([[1, 0.2], [0.4, 1]])}))["1"]
           == 0.30000000000000004, "the diagonal is no pair")
    by_depth = {6: Seeds({"1": 1.0, "2": 2.0}), 12: Seeds({"1": 1.5, "2": 1.0}),
                24: Seeds({"1": 2.0, "2": 0.0})}
    expect(np.allclose(list(statistic.Functions({}, "s").trend(by_depth).values()), [0.5, -1.0]),
           "a slope by seed, for each doubling")
    found = small({"PRE": [[2.0, 2.1, 2.9]]}, {("PRE", "0.001", "3"): COLLAPSED})
    for run in found["s"]["runs"]:
        run["probe"] = {"similarity": [[1.0]]}
    functions = statistic.Functions(found, "s")
    expect(functions.entropy("PRE") == {"1": 3.0, "2": 3.0, "3": 3.0}
           and list(functions.probe("PRE", "similarity")) == ["1", "2"],
           "entropies of all runs; probes of those that did not fail")
    found["s"]["runs"][1]["status"] = COLLAPSED
    expect(list(functions.probe("PRE", "similarity")) == ["1"], "one run that did not fail")
    rates = small({"PRE": [[2.0], [2.8], [2.0]], "SPAN": [[2.9], [2.0], [2.0]]},
                  {("SPAN", "0.001", "1"): COLLAPSED}, rates=THREE, seeds=("1",))
    functions = statistic.Functions(rates, "s")
    expect(functions.largest_stable("PRE") == {"1": 0.001},
           "a rate above one that is not stable does not count")
    expect(functions.largest_stable("SPAN") == {"1": 0.0005},
           "half of the lowest where that is not stable")
    expect((functions.near("0.002", 0.5), functions.near("0.002", 2),
            functions.near("4e-3", 2, mode="PRE")) == ("0.001", "0.004", "0.004"),
           "the nearest rate that was tried")
    expect(statistic.SHARED["positive"](Seeds({"1": 0.1, "2": 0.0})) == {"1": 1.0, "2": 0.0},
           "a tie is not above")
    curves = small({"PRE": [[2.0]], "SPAN": [[2.0]]}, seeds=("1",))
    curves["s"]["flags"] = {"warmup": "0"}
    for run in curves["s"]["runs"]:
        run["curve"] = [] if run["axes"]["mode"] == "SPAN" else [3 - i / 100 for i in range(100)]
    expect(statistic.Functions(curves, "s").saved("SPAN", "PRE") == {"1": 0.0},
           "a run that never was there saves nothing")
    for run in curves["s"]["runs"]:
        run["status"] = DIVERGED if run["axes"]["mode"] == "PRE" else FINISHED
        run["curve"] = [3 - i / (100 if run["axes"]["mode"] == "SPAN" else 200) for i in range(50)]
    expect(statistic.Functions(curves, "s").saved("SPAN", "PRE") == {"1": 0.0},
           "nor is anything saved against a run that diverged")
    late = small({"PRE": [[2.0, 2.1]]}, {("PRE", "0.001", "2"): DIVERGED}, seeds=("1", "2"))["s"]
    norms = {name: [1.0] for name in ("ff_proj", "ff_out", "residual_rms", "ffn_ratio")}
    late["runs"][0]["layers"], late["runs"][1]["layers"] = {"1": norms, "late": norms}, {"1": norms}
    functions = statistic.Functions({"s": late}, "s")
    expect([list(seeds) for seeds in (functions.gradient("PRE"), functions.residual("PRE"),
                                      functions.ratio("PRE", "ffn"))] == [["1"]] * 3
           and list(functions.gradient("PRE", when=1)) == ["1", "2"],
           "a run that diverged early has no late norms")
    late["runs"].pop(0)
    try:
        functions.gradient("PRE")
        expect(False, "late norms of a run that diverged early")
    except statistic.AllFailed:
        expect(True, "")
    del by_depth[24]["2"]
    expect(list(statistic.Functions({}, "s").trend(by_depth)) == ["1"], "of the common seeds")


def test_kept():
    """Norms by layer and group as the log has them; over the last quarter, and there alone, the
    geometric mean."""
    weight = {"q_proj": 3.0, "k_proj": 4.0, "v_proj": 0.0, "o_proj": 2.0, "gate_proj": 1.0,
              "up_proj": 0.0, "down_proj": 5.0}
    part = lambda name: "self_attn" if name[0] in "qkvo" else "mlp"
    line = lambda step, size: {
        "step": step, "residual_rms": [size, size], "attn_ratio": [1, 1], "ffn_ratio": [1, 1],
        "loss": 2.0,
        "grad_norms": {f"model.layers.{layer}.{part(name)}.{name}.weight": size * norm * (layer + 1)
                       for layer in (0, 1) for name, norm in weight.items()}}
    run = Run("x", {}, pathlib.Path(), [], config={"flags": {"steps": "400"}},
              log=[line(1, 1), line(100, 2), line(300, 1000), line(350, 1e-8), line(400, 1e-12)])
    kept = repro.kept_layers(run)
    expect(set(kept) == {"1", "100", "late", "end"} and kept["1"]["att_proj"] == [5, 10]
           and kept["100"]["ff_out"] == [10, 20], f"steps 1 and 100: {kept}")
    expect(np.allclose(kept["late"]["attn_out"], [2e-10, 4e-10]),
           f"the last quarter: {kept['late']['attn_out']}")
    expect(np.allclose(kept["end"]["attn_out"], [2e-12, 4e-12]), f"the end: {kept['end']}")
    expect(np.allclose(statistic.gradient_of(kept["1"], "ffn"), [math.sqrt(26), 2 * math.sqrt(26)]),
           "the ffn is gate, up and down")
    config = {"flags": {"steps": "300"}, "git": "0", "parameters": 1, "unigram_entropy": 3.0}
    run = Run("x", {}, pathlib.Path("nowhere"), [], status=DIVERGED, config=config,
              log=[{"step": step, "loss": step / 10} for step in range(1, 61)])
    expect(repro.kept_run(run, ["curve"])["curve"] == [step / 10 for step in range(1, 61)],
           "the curve of a run that diverged")


def test_losses():
    """An arm's losses: what failed is in no mean, and is counted; an arm that did not run is
    empty."""
    arm = lambda *runs: report.arm_text([{"status": status, "loss": loss} for status, loss in runs])
    expect(arm((FINISHED, 2.0), (COLLAPSED, 3.0),
               (FINISHED, 2.5)) == "2.250 (2.000 to 2.500), 1 of 3 fail", "a mean of two")
    expect(arm((DIVERGED, None), (COLLAPSED, 3.0)) == "2 of 2 fail" and arm() == "", "no mean")


def test_borders():
    """The border of the rates that fail: a rate that fails with one seed fails; of two recipes the
    one that fails first counts, and no safe rate of the other; a recipe with one rate, runs of
    unusual ones, and a run that two studies have are left out."""
    def study(runs, **flags):
        return {"flags": {"layers": "8", "width": "64", "steps": "200", "warmup": "40", **flags},
                "runs": [{"axes": {"mode": mode, "lr": rate, "seed": seed}, "status": status}
                         for mode, rate, seed, status in runs]}
    runs = [("SPAN", "0.001", "1", FINISHED), ("SPAN", "0.002", "1", FINISHED),
            ("SPAN", "0.002", "2", DIVERGED), ("SPAN", "0.004", "1", FINISHED),
            ("PRE", "0.002", "1", FINISHED), ("PRE", "0.004", "1", FINISHED),
            ("POST", "0.004", "1", COLLAPSED), ("POST", "0.008", "1", COLLAPSED),
            ("NGPT", "0.004", "1", COLLAPSED)]
    more = [("SPAN", "0.0015", "1", FINISHED), ("SPAN", "0.003", "1", COLLAPSED)]
    dead = [("PRE", "0.0001", "1", COLLAPSED), ("PRE", "0.0002", "1", COLLAPSED)]
    pairs = report.usual_runs({"a": study(runs), "b": study(runs), "timing": {},
                               "c": study(more, warmup="80"),
                               "d": study(runs, **{"val-every": "5"})} | {
        flag: study(dead, **{flag: value}) for flag, value in (
            ("steps", "100"), ("warmup", "0"), ("init", "global"), ("optimizer", "muon"),
            ("width-base", "32"), ("sdd", "code"), ("mix-ratio", "0.5"), ("init-std", "0.01"))})
    expect({mode: len(runs) for mode, runs in pairs.items()}
           == {"SPAN": 6, "PRE": 2, "POST": 2, "NGPT": 1}, f"different runs, usual recipe: {pairs}")
    found = [report.border(pairs[mode], 64, 8) for mode in ("SPAN", "PRE", "POST", "NGPT")]
    expect(found == [(0.001, 0.002), (0.004, None), (None, 0.004), (None, None)],
           f"borders: {found}")
    expect(report.border(pairs["SPAN"], 128, 8) == (None, None), "no run, no border")
    lines = report.failing_tables({"a": study(runs)})
    expect(lines[2:5] == ["| PRE | 0 of 2 | 0.004 |", "| SPAN | 1 of 4 | 0.001 / 0.002 |",
                          "| POST | 2 of 2 |  / 0.004 |"], f"rows, the safest first: {lines}")


def test_sections():
    """A section has a column for each width and a row for each comparison with a figure, and says
    how many seeds each study has. No star of a name is taken for italics."""
    other = scale({"PRE": [[2.0, 2.1]]}, study="t", seeds=("1", "2"))
    results = (scale(arms(-0.3) | {"POST": [[2.0, 2.0, 2.0]]}) | scale(arms(0.3), width=128)
               | other)
    for found in results.values():
        found["flags"]["layers"] = "8"
        found["axes"]["mode"].append("SDD")                  # of which no run has ended
    claim = CLAIM(["HYBRID*", MINUS, "< 0"], ["of both", MINUS, "> -1"]) | {
        "id": "S1", "claim": "c", "where": "w", "paper": "p", "was": MIXED, "put_right": "a reason",
        "also": [["beside", "loss('PRE', study='t')"], ["narrow", "loss('POST')"],
                 ["nowhere", "loss('SDD')"], ["of one width", "loss('POST', study='s@64')"]]}
    section = lambda results: "\n".join(report.claim_section(
        claim, report.judge(claim, results, None), results))
    for line in (
            "### S1", f"**{MIXED}**: c", "- Paper (w): p",
            f"- Before these rules: {MIXED}; a reason",
            "|  | expected | width 64 | width 128 |",
            "| HYBRID\\* | &lt; 0 | -0.3 (-0.325 to -0.275): agrees "
            "| 0.3 (0.275 to 0.325): disagrees |",
            "| *narrow* |  | 2 |  |", "| **this scale** |  | **agrees** | **disagrees** |",
            "Elsewhere: *of one width* 2"):
        expect(f"\n{line}\n" in f"\n{section(results)}\n", f"{line} in {section(results)}")
    expect("nowhere" not in section(results), f"no row without a figure: {section(results)}")
    claim |= {"study": "t", "also": [],
              "expect": [["", "loss('PRE') - loss('PRE', study='s')", "< 0"]]}
    expect("[t](t.toml): 2 seeds, [s](s.toml): 3 seeds" in section(results),
           f"seeds by study: {section(results)}")
    timing = {"timing": {"flags": "--layers 2 --width 1280", "rounds": [{"PRE": 1.0}] * 2}}
    claim |= {"study": "timing", "expect": [["", "timing('PRE', 'PRE')", "in 0 2"]]}
    expect("`--layers 2 --width 1280`; `--timing`: 2 rounds" in section(timing),
           f"flags of a time: {section(timing)}")


# ---- the committed results

def test_leads():
    runs = [{"axes": {"mode": mode, "init": init, "seed": seed}, "validations": losses}
            for mode, init, seed, losses in (
                ("PRE", "auto", "1", [[10, 3.0], [20, 2.0]]),
                ("PRE", "auto", "2", [[10, 3.5], [20, 2.5]]),
                ("SDD", "scale", "1", [[10, 2.0], [20, 1.75]]),
                ("SDD", "scale", "2", [[10, 3.0], [20, None]]),      # diverged after step 10
                ("SDD", "scale", "3", [[10, 9.0], [20, 9.0]]),       # PRE has no such seed
                ("POST", "auto", "1", []))]
    leads = report.leads_on_pre({"runs": runs})
    steps, lead, end = leads["SDD, Scale"]
    expect(list(leads) == ["PRE", "SDD, Scale"], f"arms with a validation, by name: {list(leads)}")
    expect(list(steps) == [10] and lead.tolist() == [[-1.0], [-0.5]] and end == 2.5,
           f"seed by seed, as far as all runs went: {steps}, {lead}, {end}")


def test_page():
    """RESULTS.md is what claims.toml and results/ give; of no study more is said than was run."""
    page = (repro.HERE / "RESULTS.md").read_text()
    expect(report.render(repro.read_claims(), repro.HERE, repro.read_results()) == page,
           "RESULTS.md is up to date: python3 dev/repro/repro.py --table")
    row = re.search(r"^\| \*\*all\*\* \|(.*)\|$", page, re.M)[1].split("|")
    counts = dict(zip((*report.ORDER, "all"), map(int, row)))
    said = (repro.ROOT / "README.md").read_text()
    for verdict, words in (("all", "claims of the four papers"), (AGREES, "agree, "),
                           (DISAGREES, "disagree ("), (OPEN, "are not resolved"),
                           (ONE, "have one width"), (FEW, "have too few seeds"),
                           (WAITING, "waits for runs" if counts[WAITING] == 1 else "wait for runs"),
                           (ELSEWHERE, "need another machine")):
        number = counts[verdict]
        expect(f" {number} {words}" in said, f"README.md: {number} {words}")
    said = (repro.HERE / "CONCLUSIONS.md").read_text()
    for name in re.findall(r"\[([SHDQ]\d+)\](?!\()", said):
        expect(f"\n[{name}]: RESULTS.md#{name.lower()}\n" in said and f"\n### {name}\n" in page,
               f"CONCLUSIONS.md links to the section of {name}")
    runs = report.usual_runs(repro.read_results())
    for mode in ("PRE", "PRE_QK_PRE"):
        failed = sum(report.statistic.failed(run) for _, run in runs[mode])
        words = f"{mode} {failed} of {len(runs[mode])}"
        expect(words in said, f"CONCLUSIONS.md: {words}")
    for path in (repro.HERE / "results").glob("*.json"):
        if path.stem not in ("calculations", "timing"):
            found = json.loads(path.read_text())
            expect(len({json.dumps(run["axes"]) for run in found["runs"]})
                   == len(found["runs"]) > 0
                   and len(found["runs"]) + len(repro.missing(path.stem))
                   == len(repro.study_runs(path.stem)),
                   f"{path.stem}: each run once, with the study's flags, none that it lacks")
    figures = json.loads((repro.HERE / "results/calculations.json").read_text())["figures"]
    expect(set(figures) == {calculations.name_of(words) for words in calculations.ALL},
           "every calculation has its figures")
    for words in (("attention", "pre", "O", "V"), ("sdd", "eq7", 256)):
        expect(all(abs(value - figures[calculations.name_of(words)][seed]) < 1e-5
                   for seed, value in calculations.compute(*words).items()),
               f"{words} computed again")


def test_costs():
    """Costs as stated are costs as computed; models are what the trainer says."""
    binary = repro.trainer()
    for name in repro.studies():
        if "@" not in name:
            lines = (repro.HERE / f"{name}.toml").read_text().splitlines()
            expect(all(line in lines for line in repro.cost_lines(name, binary)),
                   f"{name}: its cost: python3 dev/repro/repro.py --costs")
        limit = 12 if "data" in repro.read_study(name) else 4
        expect(repro.stated_minutes(name) <= 60 * limit,
               f"{name}: at most {limit} hours of one core")
    expect(sum(repro.stated_minutes(name) for name in repro.studies()
               if "data" not in repro.read_study(name)) <= 3000,
           "fifty hours of one core in all, without those that need data")
    for name, row in repro.read_claims()["models"].items():
        shown = subprocess.run([binary, "--model", name, "--show", "config"], capture_output=True,
                               text=True).stdout
        config = json.loads(shown[re.search(r"^\{", shown, re.M).start():])
        flags = config["flags"]
        expect(row == [config["active_parameters"], int(flags["batch"]) * int(flags["seq"]),
                       int(flags["layers"]), config["parameters"]], f"{name}: {row}")
    for claim in repro.read_claims()["claim"]:
        full = claim.get("full", {})
        for words in [full["flags"]] if isinstance(full.get("flags"),
                                                   str) else full.get("flags", []):
            given = [word for flag, values in report.flag_values(words).items()
                     if flag not in ("probe", "mix-ratio") for word in (f"--{flag}", values[0])]
            for model in full["model"].split(","):
                shown = subprocess.run([binary, "--model", model, *given, "--show", "config"],
                                       capture_output=True, text=True)
                expect(shown.returncode == 0,
                       f"{claim['id']}: --model {model} {' '.join(given)}: {shown.stderr}")
    expect(abs(report.gpu_hours(1e9, 20e9) - 6 * 20e18 / (0.4 * 989e12) / 3600) < 1e-9
           and 80 < report.gpu_hours(1e9, 20e9) < 90, "1B parameters on 20B tokens: 84 hours")
    full = {"id": "X", "full": {"model": "span-740M", "mode": "PRE,SPAN", "tokens": 1e9,
                                "flags": "--layers 12,36 --init scale"}}
    (command, runs, cost), = report.full_scale(full, repro.read_claims()["models"])
    expect(runs == 12 and abs(cost - 12 * report.gpu_hours(742860288, 1e9)) < 1e-6
           and "--seed 1,2,3" in command and "--layers 12,36" in command,
           f"two placements, two depths, three seeds: {runs}, {command}")
    full["full"] |= {"model": "span-740M,span-1.3B", "tokens": [1e9, 3e9]}
    given = [re.search(r"--model (\S+) .*--tokens (\d+)", command).groups()
             for command, _, _ in report.full_scale(full, repro.read_claims()["models"])]
    expect(given == [("span-740M", "1000000000"), ("span-1.3B", "3000000000")],
           f"each model has tokens of its own: {given}")


# ---- killed, and gone on with

TINY = ('mode = "SPAN"\nseed = [1, 2, 3]\nlr = [1e-3, 2e-3]\n'
        'only = [{lr = 1e-3}, {lr = 2e-3, seed = 2}]\n'
        'width = 16\nheads = 1\nlayers = 1\nseq = 16\nbatch = 2\n'
        'val-tokens = 64\nsteps = 6000\nnorms-every = 2000\nmake = "DEVICE=cpu PREC=fp32"\n')


def test_resume():
    with tempfile.TemporaryDirectory() as folder:
        folder, before, here = pathlib.Path(folder), repro.HERE, pathlib.Path(folder, "here")
        repro.HERE = here
        try:
            here.mkdir()
            (here / "tiny.toml").write_text(TINY)
            expect(len(repro.missing("tiny")) == 4, "runs of two rates, and of the seeds of one")
            whole = repro.run_study("tiny", folder / "whole", None, 1)
            repro.harvest("tiny", folder / "whole", ["layers", "curve"])
            wanted = json.loads((here / "results/tiny.json").read_text())
            expect(whole and not repro.missing("tiny") and len(wanted["runs"]) == 4,
                   "a study without a kill")
            shutil.rmtree(here / "results")
            (folder / "broken").mkdir()
            shutil.copytree(folder / "whole/bin", folder / "broken/bin")
            kills, left = 0, 4
            while left and kills < 20:  # a busy machine needs longer to get anywhere
                in_time = repro.run_study("tiny", folder / "broken",
                                          time.time() + 1.5 * 1.3 ** kills, 1)
                repro.harvest("tiny", folder / "broken", ["layers", "curve"])
                kills, left = kills + (not in_time), len(repro.missing("tiny"))
            expect(kills >= 1 and left == 0, f"killed {kills} times on the way, {left} runs left")
            found = json.loads((here / "results/tiny.json").read_text())
            same = lambda run: {name: value for name, value in run.items()
                                if name not in ("seconds", "commit")}
            expect(list(map(same, found["runs"])) == list(map(same, wanted["runs"])),
                   "the same losses, curves and norms as without a kill")
            expect(all(run["commit"] == repro.commit_of(ROOT) for run in found["runs"]),
                   f"each run has its commit: {found['runs'][0]['commit']}")
            expect(set(found["runs"][0]["layers"]) == {"1", "late", "end"}
                   and len(found["runs"][0]["curve"]) == 6000, "what is kept of a run")
            repro.harvest("tiny", folder / "broken", ["late"])
            kept = json.loads((here / "results/tiny.json").read_text())["runs"][0]
            expect(set(kept["layers"]) == {"late"} and "curve" not in kept
                   and kept["layers"]["late"] == found["runs"][0]["layers"]["late"],
                   "norms of the last quarter alone")
            parts = {"keep": {"tiny": ["late"]}}
            expect(repro.kept_parts(parts, "tiny") == repro.kept_parts(parts, "tiny@64") == ["late"]
                   and repro.kept_parts(parts, "other") == [], "the same parts at each width")
            shutil.rmtree(folder / "broken")
            repro.harvest("tiny", folder / "broken", [])
            expect(not repro.missing("tiny"), "results stay when the runs' folder is gone")
            path = here / "results/tiny.json"
            repro.write_results(path, dict(wanted, runs=wanted["runs"][:2] + wanted["runs"][3:]))
            shutil.copytree(folder / "whole/bin", folder / "other/bin")
            for _ in range(2):                     # the second time the folder has a study already
                expect(repro.run_study("tiny", folder / "other", None, 1), "a part of a study")
            repro.harvest("tiny", folder / "other", ["layers", "curve"])
            found = json.loads(path.read_text())
            expect(len(list(folder.glob("other/runs/*"))) == 1
                   and (folder / "other/index.html").is_file()
                   and list(map(same, found["runs"])) == list(map(same, wanted["runs"])),
                   "a run whose result is there is not trained again, and stays in its place")
            (here / "tiny.toml").write_text(TINY.replace("6000", "5000"))
            expect(len(repro.missing("tiny")) == 4, "results of other flags are none of the study")
            repro.harvest("tiny", folder / "whole", [])
            expect(len(repro.missing("tiny")) == 4, "nor are runs of other flags in the folder")
            (here / "tiny.toml").write_text(TINY.replace("fp32", "bf16"))
            expect(len(repro.missing("tiny")) == 4, "nor are results of another precision")
            repro.harvest("tiny", folder / "whole", [])
            expect(len(repro.missing("tiny")) == 4, "nor are its runs in the folder")
            (here / "tiny.toml").write_text(TINY)
            grown = [run for run in wanted["runs"] if run["axes"]["lr"] == "0.001"]
            for run in grown:
                run["axes"] = {axis: run["axes"][axis] for axis in ("mode", "seed")}
            repro.write_results(path, dict(wanted, flags=wanted["flags"] | {"lr": "0.001"},
                                           runs=grown))
            repro.harvest("tiny", folder / "other", [])
            expect(not repro.missing("tiny"), "results stay when a flag becomes an axis")
        finally:
            repro.HERE = before


def main():
    tests = {name[5:]: test for name, test in globals().items() if name.startswith("test_")}
    for name in sys.argv[1:] or tests:
        tests[name]()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
