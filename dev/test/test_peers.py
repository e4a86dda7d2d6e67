#!/usr/bin/env python3
"""Tests of dev/bench/cpu: contenders whose times are known, some that die and one that spins; then
the trainer and PyTorch on small models. Needs torch."""
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

PEERS = [sys.executable, "dev/bench/cpu/peers.py", "--rounds", "2"]
passed = failed = 0
# A contender that does nothing: writes its name into a file at each step and says 5000 ms, then
# twice ms + 7, then ms; peaks are 2, 4, 6.. e11. After `last` steps it dies as `death` says.
STUB = r"""
import json, os, sys, threading
name, log, ms, last, death, spins = json.loads(sys.argv[1])
if spins: threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print('a note\n{"flops_per_step": 4e10, "peak": 4e11, "parameters": 7}', flush=True)
step = peaks = 0
for line in sys.stdin:
    peaks += line == "peak\n"
    if line == "peak\n": print(json.dumps({"peak": 2e11 * peaks}), flush=True); continue
    if step == last:
        print("warning: odd\n" + death, file=sys.stderr, flush=True)
        os._exit(3) if death else os.kill(os.getpid(), 9)
    open(log, "a").write(name), sum(range(10 ** 6 if name == "quiet" else 0))
    said = 5000 if step == 0 else ms + 7 if step < 3 else ms
    print(json.dumps({"ms": said, "loss": 1.5}), flush=True)
    step += 1
"""


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


def raced(rounds, *contenders):
    """Races contenders [name (capital: bf16), ms, last step, death, whether it spins]. Returns the
    rows after the race, the table, and the order of steps."""
    with tempfile.NamedTemporaryFile("r") as log:
        def stub(name, *rest):
            words = [name, log.name, *rest, *(None, "", False)[len(rest) - 1:]]
            return [sys.executable, "-c", STUB, json.dumps(words)]

        found = [peers.Contender(c[0], "bf16" if c[0].isupper() else "fp32", stub(*c), 1)
                 for c in contenders]
        peers.race(found, rounds)
        rows = json.loads(json.dumps(peers.results(found), allow_nan=False))
        return rows, peers.table("x", rows), log.read()


def run(*command, status=0, **environment):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, **environment})
    expect(done.returncode == status,
           f"{command}: status {done.returncode}, expected {status}: {done.stderr[-300:]}")
    return done


# tables of the sign test: of 6 ratios the first and the last, of 20 the 6th and the 15th
def test_ratio():
    expect(peers.ratio([3, 1], [1, 1]) == (2, None, None)
           and peers.ratio([1] * 5, [1] * 5) == (1, None, None), "too few for an interval")
    expect(peers.ratio([5, 1, 6, 2, 4, 3], [1] * 6) == (3.5, 1, 6)
           and peers.ratio(range(20, 0, -1), [1] * 20) == (10.5, 6, 15), "6 and 20 rounds")
    rng, hits = random.Random(3), 0
    for _ in range(1000):
        load = [rng.lognormvariate(0, 0.5) for _ in range(20)]
        _, low, high = peers.ratio([1.2 * x * rng.lognormvariate(0, 0.05) for x in load],
                                   [x * rng.lognormvariate(0, 0.05) for x in load])
        hits += low <= 1.2 <= high and high / low < 1.2
    expect(940 < hits < 975,
           f"{hits} of 1000 intervals hold the ratio and are narrow, expected 959")


def test_race():
    rows, text, steps = raced(6, ["a", 400], ["b", 800], ["A", 200], ["B", 300])
    expect(steps == "aaabbbAAABBB" + "abAB" + "bABa" + "ABab" + "BabA" + "abAB" + "bABa",
           f"the order of steps: {steps}")
    expect([(r["ms"], r["median_ms"], r["first_ms"], r["ratio"]) for r in rows] == [
        ([m] * 6, m, 5000, ratio) for m, ratio in ((400, 1), (800, 2), (200, 1), (300, 1.5))],
           f"{rows}")
    expect("| b | fp32 | 800.00 | 50.0 | 7.3 | 2.000 (2.000 to 2.000) | 5000 |" in text, text)
    rows, _, steps = raced(2, ["a", 90], ["b", 800])
    expect(steps == "aaabbb" + "aaaabb" + "bbaaaa" and [r["ms"] for r in rows]
           == [[90] * 2, [800] * 2], f"short steps: one, and then 200 ms of them: {steps}")
    _, text, _ = raced(4, ["quiet", 400], ["busy", 400, None, "", True])
    expect("busy, fp32: took" in text and "quiet, fp32: took" not in text, text)
    rows, text, _ = raced(3, ["a", 400], ["b", 400, 4, "error: no room\nmore"], ["c", 400, 0, ""],
                          ["d", 400])
    expect("| b | fp32 | failed: error: no room | - |" in text
           and "| c | fp32 | failed: ended with status -9: warning: odd | - |" in text, text)
    expect(rows[3]["ratio"] == 1 and len(rows[3]["ms"]) == 3 and rows[2]["first_ms"] is None,
           f"the others go on: {rows}")
    _, text, _ = raced(2, ["a", 400, 1, "error: first"], ["b", 400])
    expect("| a | fp32 | failed: error: first | - | - | - | - |" in text
           and "| b | fp32 | 400.00 | - | - | - | 5000 |" in text,
           f"nothing to compare with: {text}")


def test_bench():
    flags = ("--model nanogpt-char --layers 2 --width 32 --vocab 256 --seq 16 --batch 4 "
             "--micro-batch 2".split())
    done = run("build/bench-fp32", *flags)
    rows = re.findall(r"^(\S.*?) +([\d.]+) x +(\d+) = +([\d.]+) +[\d.]+ %  +[\d.]+ G(?:FLOP|B)/s "
                      r"+[\d.]+ %$", done.stdout, re.M)
    total, step = (float(re.search(rf"^{name} +([\d.]+) +[\d.]+ %", done.stdout, re.M)[1])
                   for name in ("the sum", "a whole step, measured"))
    expect(len(rows) == 25 and {("attention forward", "4"), ("k, v forward", "8"),
                                ("k, v backward", "8"), ("head forward", "2"), ("optimizer", "1")}
           < {(row[0], row[2]) for row in rows}, done.stdout)
    expect(abs(sum(float(row[3]) for row in rows) - total) < 0.01 * len(rows) and step > 0,
           f"the sum is {total}, the step {step}")
    expect(re.match(r"fp32: products at most [1-9][\d.]* GFLOP/s, memory [\d.]+ GB/s\n",
                    done.stdout) and len(re.findall("^timing ", done.stderr, re.M)) == 27,
           done.stderr)
    done = subprocess.run(["build/bench-fp32", "--serve", *flags], cwd=ROOT, input="\n\n",
                          capture_output=True, text=True)
    about, first, second = map(json.loads, done.stdout.splitlines())
    expect(about["flops_per_step"] == 64 * (6 * (2 * 12 * 32 * 32 + 256 * 32) + 6 * 2 * 32 * 16)
           and about["peak"] > 1e9, f"{about}")
    expect(about["parameters"] == 2 * (12 * 32 * 32 + 4 * 32) + 2 * 32 + (256 + 16) * 32
           and 0 < second["ms"] and second["loss"] < first["loss"], f"{about}, {second}")
    bench = ["build/bench-fp32"]
    for message, status, *command in (
            ("no placement named X", 1, *bench, "--mode", "X"),
            ("--mode needs a placement", 1, *bench, "--mode"),
            ("command line: unknown flag nope", 1, *bench, "--nope"),
            ("--micro-batch 3 does not go with", 1, *bench, "--micro-batch", "3"),
            ("argument --case: invalid choice: 'nope'", 2, *PEERS, "--case", "nope"),
            ("expected --rounds and --threads of 1 or more", 2, *PEERS, "--threads", "0"),
            ("expected a program as --python", 2, *PEERS, "--python", "/nowhere/python3")):
        expect(f"error: {message}" in run(*command, status=status).stderr, message)


# Two contenders of one model have as many parameters, begin with the loss of guessing, and learn.
# Without a C++ compiler one of them is out.
def test_peers():
    out = tempfile.mkdtemp()
    done = run(*PEERS, "--case", "default", "--precision", "fp32", "--json", f"{out}/json",
               CXX="/nowhere/g++", TORCHINDUCTOR_CACHE_DIR=out)
    report = json.loads(pathlib.Path(f"{out}/json").read_text())
    compiled = report["cases"]["default"].pop()
    expect(re.match("error: .*ompiler", compiled["error"])
           and f"| PyTorch, compiled | fp32 | failed: {compiled['error']} |" in done.stdout,
           f"{compiled['error']}")
    expect(set(report["machine"]) == {"cpu", "cores", "threads", "isa", "commit", "date",
                                      "environment"}, f"{report['machine']}")
    expect(re.search(r"\nPyTorch, fp32: PyTorch \d+\.\d+.*BLAS_INFO.* (fused|foreach) AdamW",
                     done.stdout), "the version of PyTorch and its libraries")
    old = pathlib.Path(out, "python")  # one whose PyTorch lacks what 1.13 lacks
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import runpy, sys, torch; del "
                   "torch.nn.RMSNorm, torch.nn.functional.scaled_dot_product_attention; del "
                   "sys.argv[0]; sys.path[0] = \"dev/bench/cpu\"; runpy.run_path(sys.argv[0], "
                   "run_name=\"__main__\")' \"$@\"\n")
    old.chmod(0o755)
    contenders = peers.contenders_of(peers.CASES["default"], ["fp32"], None, 2, True, str(old))[:2]
    peers.race(contenders, 2)
    ours, theirs = report["cases"]["default"][1], peers.results(contenders)[1]
    expect(theirs["adamw"] == "foreach"
           and all(abs(a - b) < 1e-3 for a, b in zip(ours["losses"][:3], theirs["losses"])),
           f"written out: {ours['losses'][:3]}, {theirs['losses'][:3]}, {theirs['error']}")
    contenders = peers.contenders_of(peers.CASES["tinyshakespeare"], ["bf16"], None, 2, True,
                                     sys.executable)
    expect([c.name for c in contenders] == ["norm.c", "PyTorch, as installed",
                                            "PyTorch, compiled, as installed"] and b"MALLOC"
           not in pathlib.Path(f"/proc/{contenders[1].process.pid}/environ").read_bytes(),
           "PyTorch as installed has its own allocator")
    gone = contenders.pop()
    gone.process.kill()
    expect(gone.process.wait() and math.isnan(gone.step()) and "status -9" in gone.error,
           f"killed while it waits: {gone.error}")
    peers.race(contenders, 2)
    for ours, theirs in (report["cases"]["default"], peers.results(contenders)):
        for row in (ours, theirs):
            expect(not row["error"] and len(row["ms"]) == 2 and row["ratio"] > 0
                   and row["gflops"] > 0 and 0 < row["percent_of_peak"] < 110, f"{row}")
            expect(abs(row["losses"][0] - math.log(256)) < 0.5 and 0 < row["losses"][-1]
                   < row["losses"][0] - 0.05, f"{row['name']}: losses {row['losses']}")
        expect(ours["parameters"] == theirs["parameters"] and ours["ratio"] == 1,
               f"{ours['parameters']} and {theirs['parameters']} parameters")
    done = run(*PEERS, "--case", "tinyshakespeare", "--precision", "fp32", "--modes",
               "PRE,NOPE,SDD")
    expect(all(f"| {text}" in done.stdout for text in (
        "PRE | fp32 | ", "SDD | fp32 | ", "NOPE | fp32 | failed: error: no placement named NOPE"))
           and "PyTorch" not in done.stdout, done.stdout)


if __name__ == "__main__":
    # threads that spin would starve each other on a busy machine
    os.environ["OMP_WAIT_POLICY"] = "passive"
    subprocess.run(["make", "-s", "build/bench-fp32", "build/bench-bf16"], cwd=ROOT, check=True)
    for test in (test_ratio, test_race, test_bench, test_peers):
        test()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)
