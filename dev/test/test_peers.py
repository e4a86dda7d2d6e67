#!/usr/bin/env python3
"""Tests of dev/bench/cpu: python3 dev/test/test_peers.py [NAME...]

Contenders whose times are known, some that die and one that spins; then the trainer and PyTorch for a few steps of small models. Needs torch.
"""
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev/bench/cpu"))
import peers

passed = failed = 0
# A contender that does nothing: writes its name into a file at each step and says 5000 ms, then twice ms + 7, then ms. After `last` steps it dies as `death` says.
STUB = r"""
import json, os, sys, threading
name, log, ms, last, death, spins = json.loads(sys.argv[1])
if spins: threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print('a note\n{"flops_per_step": 4e10, "peak": 4e11, "parameters": 7}', flush=True)
for step, _ in enumerate(sys.stdin):
    if step == last: print("warning: odd\n" + death, file=sys.stderr, flush=True); os._exit(3) if death else os.kill(os.getpid(), 9)
    open(log, "a").write(name)
    print(json.dumps({"ms": 5000 if step == 0 else ms + 7 if step < 3 else ms, "loss": 1.5}), flush=True)
"""


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


def raced(rounds, *contenders):
    """Of (name, ms[, last step, death, whether it spins]): the rows after the race, the table, and the order of steps."""
    with tempfile.NamedTemporaryFile("r") as log:
        found = [peers.Contender(c[0], "fp32", [sys.executable, "-c", STUB, json.dumps([c[0], log.name, *c[1:], *(None, "", False)[len(c) - 2:]])], 1) for c in contenders]
        peers.race(found, rounds)
        rows = peers.results(found)
        json.dumps(rows, allow_nan=False)
        return rows, peers.table("x", rows), log.read()


def run(*command, status=0, **environment):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})
    expect(done.returncode == status, f"{command}: status {done.returncode}, expected {status}: {done.stderr[-300:]}")
    return done


def test_ratio():
    """Tables of the sign test: of 6 ratios the first and the last, of 20 the 6th and the 15th. What hits a whole round cancels. The interval holds the truth."""
    expect(peers.ratio([3, 1], [1, 1]) == (2, None, None) and peers.ratio([1] * 5, [1] * 5) == (1, None, None), "too few for an interval")
    expect(peers.ratio([5, 1, 6, 2, 4, 3], [1] * 6) == (3.5, 1, 6) and peers.ratio(range(20, 0, -1), [1] * 20) == (10.5, 6, 15), "6 and 20 rounds")
    rng, hits = random.Random(3), 0
    for _ in range(1000):
        load = [rng.lognormvariate(0, 0.5) for _ in range(20)]
        _, low, high = peers.ratio([1.2 * x * rng.lognormvariate(0, 0.05) for x in load], [x * rng.lognormvariate(0, 0.05) for x in load])
        hits += low <= 1.2 <= high and high / low < 1.2
    expect(940 < hits < 975, f"{hits} of 1000 intervals hold the ratio and are narrow, expected 959")


def test_race():
    rows, text, steps = raced(6, ["a", 400], ["b", 800], ["c", 200])
    expect(steps == "aaabbbccc" + 2 * ("abc" + "bca" + "cab"), f"the order of steps: {steps}")
    expect([(r["ms"], r["median_ms"], r["first_ms"], r["ratio"]) for r in rows] == [([m] * 6, m, 5000, m / 400) for m in (400, 800, 200)], f"{rows}")
    expect("| b | fp32 | 800.00 | 50.0 | 12.5 | 2.000 (2.000 to 2.000) | 5000 |" in text, text)
    rows, _, steps = raced(2, ["a", 90], ["b", 800])
    expect(steps == "aaabbb" + "aaaabb" + "bbaaaa" and [r["ms"] for r in rows] == [[90] * 2, [800] * 2], f"short steps: one, and then 200 ms of them: {steps}")
    _, text, _ = raced(4, ["quiet", 400], ["busy", 400, None, "", True])
    expect("busy, fp32: took" in text and "quiet, fp32: took" not in text, text)


def test_death():
    rows, text, _ = raced(3, ["a", 400], ["b", 400, 4, "error: no room\nmore"], ["c", 400, 0, ""], ["d", 400])
    expect("| b | fp32 | failed: error: no room | - |" in text and "| c | fp32 | failed: ended with status -9: warning: odd | - |" in text, text)
    expect(rows[3]["ratio"] == 1 and len(rows[3]["ms"]) == 3 and rows[2]["first_ms"] is None, f"the others go on: {rows}")
    _, text, _ = raced(2, ["a", 400, 1, "error: first"], ["b", 400])
    expect("| a | fp32 | failed: error: first | - | - | - | - |" in text and "| b | fp32 | 400.00 | - | - | - | 5000 |" in text, f"nothing to compare with: {text}")


def test_peers():
    """Of one model and batch, both have as many parameters, begin with the loss of guessing, and learn. Without a C++ compiler one contender is out."""
    command, out = [sys.executable, "dev/bench/cpu/peers.py", "--rounds", "2"], tempfile.mkdtemp()
    done = run(*command, "--case", "default", "--precision", "fp32", "--json", f"{out}/json", CXX="/nowhere/g++", TORCHINDUCTOR_CACHE_DIR=out)
    report = json.loads(pathlib.Path(f"{out}/json").read_text())
    compiled = report["cases"]["default"].pop()
    expect("ompiler" in compiled["error"] and f"| PyTorch, compiled | fp32 | failed: {compiled['error']} |" in done.stdout, f"{compiled['error']}")
    expect(set(report["machine"]) == {"cpu", "cores", "threads", "isa", "commit", "date", "environment"}, f"{report['machine']}")
    expect(re.search(r"\nPyTorch, fp32: PyTorch \d+\.\d+.*BLAS_INFO.* (fused|foreach) AdamW", done.stdout), "the version of PyTorch and its libraries")
    contenders = peers.contenders_of(peers.CASES["tinyshakespeare"], ["bf16"], None, 2)
    contenders.pop().process.communicate()
    peers.race(contenders, 2)
    rows = peers.results(contenders)
    for ours, theirs in (report["cases"]["default"], rows):
        for row in (ours, theirs):
            losses = row["losses"]
            expect(not row["error"] and len(row["ms"]) == 2 and row["ratio"] > 0 and row["gflops"] > 0 and 0 < row["percent_of_peak"] < 110, f"{row}")
            expect(all(map(math.isfinite, losses)) and abs(losses[0] - math.log(256)) < 0.5 and losses[-1] < losses[0] - 0.05, f"{row['name']}: losses {losses}")
            expect(f"| {row['name']} | {row['precision']} | {row['median_ms']:.2f} | " in done.stdout + peers.table("x", rows), done.stdout)
        expect(ours["parameters"] == theirs["parameters"] and ours["ratio"] == 1, f"{ours['parameters']} and {theirs['parameters']} parameters")
    done = run(*command, "--case", "tinyshakespeare", "--precision", "fp32", "--modes", "PRE,NOPE,SDD")
    expect(all(f"| {text}" in done.stdout for text in ("PRE | fp32 | ", "SDD | fp32 | ", "NOPE | fp32 | failed: error: no placement named NOPE")) and "PyTorch" not in done.stdout, done.stdout)
    for message, *words in (("invalid choice: 'nope' (choose from", "--case", "nope"), ("expected --rounds and --threads of 1 or more", "--threads", "0")):
        expect(message in run(*command, *words, status=2).stderr, message)


def test_bench():
    flags = "--model nanogpt-char --layers 2 --width 32 --vocab 256 --seq 16 --batch 4 --micro-batch 2".split()
    done = run("build/bench-fp32", *flags)
    rows = re.findall(r"^(\S.*?) +([\d.]+) x +(\d+) = +([\d.]+) +[\d.]+ %  +[\d.]+ G(?:FLOP|B)/s +[\d.]+ %$", done.stdout, re.M)
    total, step = (float(re.search(rf"^{name} +([\d.]+) +[\d.]+ %", done.stdout, re.M)[1]) for name in ("the sum", "a whole step, measured"))
    calls = {name: int(count) for name, _, count, _ in rows}
    expect(len(rows) == 26 and calls["attention forward"] == 4 and calls["k, v backward"] == 8 and calls["head forward"] == 2 and calls["optimizer"] == 1, done.stdout)
    expect(abs(sum(float(row[3]) for row in rows) - total) < 0.01 * len(rows) and step > 0, f"the sum is {total}, the step {step}")
    expect(re.match(r"fp32: products at most [1-9][\d.]* GFLOP/s, memory [\d.]+ GB/s\n", done.stdout) and len(re.findall("^timing ", done.stderr, re.M)) == 28, done.stderr)
    done = subprocess.run(["build/bench-fp32", "--serve", *flags], cwd=ROOT, input="\n\n", capture_output=True, text=True)
    about, first, second = map(json.loads, done.stdout.splitlines())
    expect(about["flops_per_step"] == 64 * (6 * (2 * 12 * 32 * 32 + 256 * 32) + 6 * 2 * 32 * 16) and about["peak"] > 1e9, f"{about}")
    expect(about["parameters"] == 2 * (12 * 32 * 32 + 4 * 32) + 2 * 32 + (256 + 16) * 32 and 0 < second["ms"] and second["loss"] < first["loss"], f"{about}, {second}")
    for message, *words in (("no placement named X", "--mode", "X"), ("--mode needs a placement", "--mode"), ("--micro-batch 3 does not divide", "--micro-batch", "3"), ("unknown flag --nope", "--nope")):
        expect(f"error: {message}" in run("build/bench-fp32", *words, status=1).stderr, message)


if __name__ == "__main__":
    os.environ["OMP_WAIT_POLICY"] = "passive"                 # threads that spin would starve each other on a busy machine
    subprocess.run(["make", "-s", "build/bench-fp32", "build/bench-bf16"], cwd=ROOT, check=True)
    for name, test in [(name, test) for name, test in list(globals().items()) if name.startswith("test_")]:
        if len(sys.argv) < 2 or any(word in name for word in sys.argv[1:]):
            test()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)
