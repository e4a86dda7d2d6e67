#!/usr/bin/env python3
"""Tests of dev/repro: python3 dev/test/test_repro.py [NAME...]

The table is complete and every statistic in it can be computed, the rule for verdicts on invented
runs, RESULTS.md is what the committed results give, costs and models are what the trainer says, and
a study that is killed goes on. Needs numpy, scipy and matplotlib, and builds one trainer.
"""
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

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "dev/repro"), str(ROOT / "dev")]
import calculations
import report
import repro
import statistic
from ablation.study import COLLAPSED, DIVERGED, FINISHED, Run
from statistic import AGREES, DISAGREES, ELSEWHERE, OPEN, SIGN, WAITING, Seeds

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
            "layers": {when: norms for when in ("1", "100", "late")}}


def invented(name, dice):
    """Results of a study of the repository as if every run had ended."""
    axes = repro.read_study(name)
    shown = {axis: values for axis, values in axes.items()
             if len(values) > 1 or axis in ("mode", "seed")}
    combinations = [{}]
    for axis, values in shown.items():
        combinations = [dict(one, **{axis: value}) for one in combinations for value in values]
    runs = [invented_run(one, int(one.get("layers", axes["layers"][0])), dice)
            for one in combinations]
    return {"study": name, "axes": shown,
            "flags": {axis: values[0] for axis, values in axes.items() if axis not in shown},
            "machine": {"processor": "invented"}, "runs": runs}


def small(losses, status=None, rates=("0.001",), seeds=("1", "2", "3")):
    """A study "s" of placements at rates: losses[mode][rate][seed]; status the same, where a run
    has not just finished."""
    runs = [{"axes": {"mode": mode, "lr": rate, "seed": seed},
             "status": (status or {}).get((mode, rate, seed), FINISHED), "loss": by_rate[i][j],
             "unigram": 3.0} for mode, by_rate in losses.items() for i, rate in enumerate(rates)
            for j, seed in enumerate(seeds[:len(by_rate[i])])]
    return {"s": {"axes": {"mode": list(losses), "lr": list(rates), "seed": list(seeds)},
                  "flags": {}, "runs": runs}}


def judged(results, *expectations):
    return report.judge({"id": "X", "study": "s", "expect": list(expectations)}, results,
                        None).verdict


# ---- the table

def test_table():
    """Every claim of the four papers once, each with a study that exists and statistics that can be
    computed once its runs are there."""
    table = repro.read_claims()
    ids = [claim["id"] for claim in table["claim"]]
    expect(sorted(ids) == sorted([f"S{i}" for i in range(1, 39)] + [f"H{i}" for i in range(1, 19)]
                                 + [f"D{i}" for i in range(1, 18)]),
           f"S1-S38, H1-H18, D1-D17, each once: {len(ids)}")
    dice, names = random.Random(1), repro.studies()
    results = {name: invented(name, dice) for name in names}
    results["timing"] = {"rounds": [{"PRE": 1.0, "SPAN": 1.0 + i / 100, "SDD": 1.1}
                                    for i in range(3)]}
    results["calculations"] = {"figures": {
        calculations.name_of(words): {"1": 1.0, "2": 1.1, "3": 0.9} for words in calculations.ALL}}
    asked = set()
    for claim in table["claim"]:
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
        expect(outcome.verdict in (AGREES, DISAGREES, OPEN, SIGN) or "needs" in claim
               and outcome.verdict == ELSEWHERE, f"{claim['id']}: {outcome.verdict} {outcome.why}")
        expect(all(isinstance(value, (int, float)) for _, seeds, _, _ in outcome.rows
                   for value in seeds.values()), f"{claim['id']}: a number for each seed")
        read = {name for name, _ in outcome.read}
        expect(read <= {claim.get("study"), *claim.get("reads", [])}
               and set(claim.get("reads", [])) <= read, f"{claim['id']} reads {read}, and says so")
        asked |= read
    expect(asked == set(names), f"every study serves a claim: {set(names) - asked}")
    at_least = sum("expect" in claim for claim in table["claim"]) / len(ids)
    expect(at_least >= 0.8, f"{100 * at_least:.0f} % of the claims have figures once all is run")


# ---- verdicts

def test_sides():
    # mean -0.11, half width 4.303 * 0.01 / sqrt(3) = 0.0248
    near = Seeds({"1": -0.10, "2": -0.11, "3": -0.12})
    for wanted, side in (("< 0", AGREES), ("> 0", DISAGREES), ("< -0.1", OPEN), ("< -0.08", AGREES),
                         ("> -0.2", AGREES), ("< -0.2", DISAGREES), ("in -0.2 0", AGREES),
                         ("in 0 1", DISAGREES), ("in -0.11 0", OPEN), ("sign", SIGN)):
        expect(statistic.side(near, wanted) == side,
               f"{wanted}: {statistic.side(near, wanted)}, expected {side}")
    expect(statistic.side(Seeds({"1": -0.1, "2": 0.1, "3": -0.2}), "< 0") == OPEN,
           "an interval on both sides")
    expect(statistic.side(Seeds({"1": -0.1}), "< 0") == OPEN
           and statistic.side(Seeds({}), "< 0") == OPEN, "one seed, or none, has no interval")
    expect(statistic.side(Seeds({"1": -0.1, "2": math.nan, "3": -0.1}), "< 0") == OPEN,
           "what is not a number is on no side")
    expect(statistic.side(Seeds({"exact": 0.1}), "in 0.05 0.15") == AGREES
           and statistic.side(Seeds({"exact": 0.2}), "in 0.05 0.15") == DISAGREES,
           "an exact figure is its own interval")
    for values, always, never in (((1, 1, 1), AGREES, DISAGREES), ((0, 0, 0), DISAGREES, AGREES),
                                  ((1, 0, 1), OPEN, OPEN), ((1,), OPEN, OPEN)):
        seeds = Seeds({str(i): float(value) for i, value in enumerate(values)})
        expect((statistic.side(seeds, "always"), statistic.side(seeds, "never")) == (always, never),
               f"always and never of {values}")
    for sides, verdict in (([AGREES, AGREES], AGREES), ([AGREES, OPEN], OPEN),
                           ([AGREES, OPEN, DISAGREES], DISAGREES), ([SIGN, SIGN], SIGN),
                           ([], OPEN)):
        expect(statistic.verdict(sides) == verdict, f"{sides}: {statistic.verdict(sides)}")


def test_verdicts():
    better = small({"PRE": [[2.00, 2.10, 2.20]], "SPAN": [[1.90, 1.99, 2.09]]})
    minus = "loss('SPAN') - loss('PRE')"
    expect(judged(better, ["", minus, "< 0"]) == AGREES,
           "lower in every seed by about the same, though seeds scatter as much")
    expect(judged(better, ["", minus, "> 0"]) == DISAGREES, "the other side")
    expect(judged(better, ["", minus, "< 0"], ["", minus, "> 0"]) == DISAGREES,
           "one part of two disagrees")
    expect(judged(small({"PRE": [[2.0, 2.1, 2.2]], "SPAN": [[1.9, 2.2, 2.1]]}),
                  ["", minus, "< 0"]) == OPEN, "now lower, now higher")
    expect(judged(small({"PRE": [[2.00, 2.10, 2.20]], "SPAN": [[1.90, 1.99]]}),
                  ["", minus, "< 0"]) == WAITING, "a seed that has not been run yet")
    killed = small({"PRE": [[2.00, 2.10, 2.20]], "SPAN": [[1.90, 1.99, 2.09]]},
                   {("SPAN", "0.001", "3"): "killed"})
    expect(judged(killed, ["", minus, "< 0"]) == WAITING and judged({}, ["", minus, "< 0"])
           == WAITING, "a killed run has no result, nor has a study that was never begun")
    broken = small({"PRE": [[2.0, 2.1, 2.2]], "SPAN": [[None, math.nan, 1.9]]},
                   {("SPAN", "0.001", seed): DIVERGED for seed in "123"})
    functions = statistic.Functions(broken, "s")
    expect(list(functions.loss("SPAN").values()) == [3.0, 3.0, 3.0],
           f"a run that diverged counts with the entropy of frequencies: {functions.loss('SPAN')}")
    expect(judged(broken, ["", minus, "> 0"]) == AGREES
           and judged(broken, ["", "fails('SPAN')", "always"]) == AGREES,
           "all three diverged, one of them after a good validation")
    rates = small({"PRE": [[2.0, 2.1, 2.2], [1.8, 1.9, 2.0]],
                   "SPAN": [[1.95, 2.05, 2.15], [2.4, 3.1, 1.0]]},
                  {("SPAN", "0.002", "1"): COLLAPSED, ("SPAN", "0.002", "2"): DIVERGED},
                  ("0.001", "0.002"))
    expect(judged(rates, ["", "fails('SPAN', lr=0.002)", "always"]) == OPEN
           and judged(rates, ["", "fails('PRE', lr=0.002)", "never"]) == AGREES,
           "two of three failed, and none")
    functions = statistic.Functions(rates, "s")
    expect((functions.best("PRE"), functions.best("SPAN")) == ("0.002", "0.001"),
           "each at its best rate; one lucky seed does not make a rate")
    expect(functions.loss("PRE")["1"] == 1.8 and functions.loss("PRE", lr="1e-3")["1"] == 2.0,
           "a rate that is named, written another way")
    expect(list((functions.largest_stable("PRE") - functions.largest_stable("SPAN")).values())
           == [1.0, 1.0, 0.0], "largest stable rates in doublings")
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
    expect(set(kept) == {"1", "100", "late"} and kept["1"]["att_proj"] == [5, 10]
           and kept["100"]["ff_out"] == [10, 20], f"steps 1 and 100: {kept}")
    expect(np.allclose(kept["late"]["attn_out"], [2e-10, 4e-10]),
           f"the last quarter: {kept['late']['attn_out']}")
    expect(np.allclose(statistic.gradient_of(kept["1"], "ffn"), [math.sqrt(26), 2 * math.sqrt(26)]),
           "the ffn is gate, up and down")


def test_losses():
    """An arm's losses: what failed is in no mean, and is counted; an arm that did not run is
    empty."""
    arm = lambda *runs: report.arm_text([{"status": status, "loss": loss} for status, loss in runs])
    expect(arm((FINISHED, 2.0), (COLLAPSED, 3.0),
               (FINISHED, 2.5)) == "2.250 (2.000 to 2.500), 1 of 3 fail", "a mean of two")
    expect(arm((DIVERGED, None), (COLLAPSED, 3.0)) == "2 of 2 fail" and arm() == "", "no mean")


# ---- the committed results

def test_page():
    """RESULTS.md is what claims.toml and results/ give; of no study more is said than was run."""
    expect(report.render(repro.read_claims(), repro.HERE) == (repro.HERE / "RESULTS.md")
           .read_text(), "RESULTS.md is up to date: python3 dev/repro/repro.py --table")
    for path in (repro.HERE / "results").glob("*.json"):
        if path.stem not in ("calculations", "timing"):
            found = json.loads(path.read_text())
            expect(len({json.dumps(run["axes"]) for run in found["runs"]})
                   == len(found["runs"]) > 0 <= repro.missing(path.stem),
                   f"{path.stem}: each run once, and no more than the study has")
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
        line = repro.cost_line(repro.read_study(name), binary)
        expect(line in (repro.HERE / f"{name}.toml").read_text().splitlines(),
               f"{name}: {line}: python3 dev/repro/repro.py --costs")
        expect(repro.stated_minutes(name) / len(repro.claims_of(repro.read_claims(), name)) <= 20,
               f"{name}: at most 20 minutes for each claim")
    expect(sum(repro.stated_minutes(name) for name in repro.studies()) <= 240,
           "four hours of one core in all")
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

TINY = ('mode = "SPAN"\nseed = [1, 2, 3]\nwidth = 16\nheads = 1\nlayers = 1\nseq = 16\nbatch = 2\n'
        'val-tokens = 64\nsteps = 6000\nnorms-every = 2000\nmake = "DEVICE=cpu PREC=fp32"\n')


def test_resume():
    with tempfile.TemporaryDirectory() as folder:
        folder, before = pathlib.Path(folder), repro.HERE
        repro.HERE = folder
        try:
            (folder / "tiny.toml").write_text(TINY)
            whole = repro.run_study("tiny", folder / "whole", None, 1)
            repro.harvest("tiny", folder / "whole", ["layers", "curve", "picture"])
            wanted = json.loads((folder / "results/tiny.json").read_text())
            expect(whole and repro.missing("tiny") == 0 and len(wanted["runs"]) == 3,
                   "a study without a kill")
            shutil.rmtree(folder / "results")
            (folder / "broken").mkdir()
            shutil.copytree(folder / "whole/bin", folder / "broken/bin")
            kills, left = 0, 3
            while left and kills < 20:  # a busy machine needs longer to get anywhere
                in_time = repro.run_study("tiny", folder / "broken",
                                          time.time() + 1.5 * 1.3 ** kills, 1)
                repro.harvest("tiny", folder / "broken", ["layers", "curve", "picture"])
                kills, left = kills + (not in_time), repro.missing("tiny")
            expect(kills >= 1 and left == 0, f"killed {kills} times on the way, {left} runs left")
            found = json.loads((folder / "results/tiny.json").read_text())
            same = lambda run: {name: value for name, value in run.items()
                                if name not in ("seconds", "commit")}
            expect(list(map(same, found["runs"])) == list(map(same, wanted["runs"])),
                   "the same losses, curves and norms as without a kill")
            expect(set(found["runs"][0]["layers"]) == {"1", "late"}
                   and len(found["runs"][0]["curve"]) == 6000
                   and len(found["runs"][0]["drawn"]) == 30, "what is kept of a run")
            shutil.rmtree(folder / "broken")
            repro.harvest("tiny", folder / "broken", [])
            expect(repro.missing("tiny") == 0, "results stay when the runs' folder is gone")
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
