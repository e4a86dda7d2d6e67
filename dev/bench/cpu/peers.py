#!/usr/bin/env python3
"""peers.py: a training step of norm.c on this CPU beside the same step in PyTorch: same model,
batch, optimizer and number of threads.

    python3 dev/bench/cpu/peers.py [--case NAME] [--precision fp32|bf16|all] [--rounds N] \
                                   [--threads N] [--installed] [--python PROGRAM] [--json FILE]
    python3 dev/bench/cpu/peers.py --modes PRE,POST,SPAN,HYBRID,SDD [...]
                                   our placements against the first of them; no PyTorch

Every contender is a process that waits for a line and then makes a step. They take turns, and each
round begins with another one, so that whatever else the machine does hits all alike. Short steps
(SHORT_MS) share a turn: the first does not count, it wakes up threads and caches; the median counts
of as many more as fit into that time. First steps (compilation, page faults) stand apart; WARMUP
more do not count. A ratio is the median over rounds of the ratio of two times of the same round.
Its 95 % interval is the sign test's: between two of the ratios in order, such that the true median
lies outside with a probability of at most 5 %, whatever the distribution. It takes 6 rounds. Needs
make and gcc or clang; PyTorch 1.13 or later, but for --modes.
"""
import argparse
import glob
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
WARMUP, SHORT_MS = 2, 200
# seconds: for some 10 ms after a step OpenMP's threads spin, on cores that the next contender
# needs, and then they sleep
SETTLE = 0.03
ISA = "avx2 fma avx512f avx512_bf16 amx_bf16 asimd bf16 sve".split()
# PyTorch allocates and frees within a step. With glibc's own settings the memory goes back to the
# system each time; kept, and in large pages, steps are faster.
KEPT = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SAME = ("--lr 6e-4 --warmup 0 --schedule constant --weight-decay 0.1 --beta1 0.9 --beta2 0.95 "
        "--clip 1")


class Case(NamedTuple):
    llama: bool          # RMSNorm, RoPE, SwiGLU; otherwise as GPT-2
    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    seq: int
    bias: bool
    flags: str


# PyTorch's vocabulary padded, as ours is
CASES = {"gpt2-4x64": Case(False, 12, 768, 12, 50304, 4, 64, True,
                           "--model gpt2-124M --vocab 50257"),
         "gpt2-4x256": Case(False, 12, 768, 12, 50304, 4, 256, True,
                            "--model gpt2-124M --vocab 50257"),
         "six": Case(False, 6, 384, 6, 256, 8, 256, True,
                     "--model nanogpt-char --vocab 256 --layers 6 --width 384 --heads 6 --bias on"),
         "default": Case(True, 4, 128, 4, 256, 8, 128, False, "--model stories --vocab 256"),
         "tinyshakespeare": Case(False, 4, 128, 4, 256, 12, 64, False,
                                 "--model nanogpt-char --vocab 256")}


class Contender:
    """A process that makes a step for each line. One that dies is out; the first line of its error
    says why."""

    def __init__(self, name, precision, command, threads, environment=None):
        self.name, self.precision = name, precision
        self.first = self.error = None
        self.times, self.peaks, self.losses, self.waiting = [], [], [], []
        print(f"{precision}: {name}", file=sys.stderr)
        self.stderr = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.stderr, text=True, cwd=ROOT,
                                        env={**os.environ, **(environment or {}),
                                             "OMP_NUM_THREADS": str(threads)})
        self.about = self.answer()

    def answer(self):
        """The next line of JSON; {} from one that is out."""
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr if line.strip()]
        self.error = next((line for line in lines if line.startswith("error: ")),
                          ": ".join([f"ended with status {status}"] + lines[-1:]))
        return {}

    def ask(self, line):
        """The answer to a line; {} from one that is out."""
        if self.error:
            return {}
        try:
            print(line, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass                                               # answer finds out why
        return self.answer()

    def step(self):
        """The milliseconds of a step; NaN from one that is out."""
        found = self.ask("step")
        self.losses += [found["loss"]] if found else []
        return found.get("ms", math.nan)

    def busy(self):
        """Milliseconds of a core that all its threads have used so far; 0 where the system does not
        say."""
        used = 0
        for path in glob.glob(f"/proc/{self.process.pid}/task/*/schedstat"):
            try:
                used += int(Path(path).read_text().split()[0])
            except OSError:
                pass                                           # a thread that has just ended
        return used / 1e6

    def turn(self, short):
        before = self.busy()
        if self.times:
            self.waiting.append(before - self.asleep)
        times = [self.step() for _ in range(1 + short)][short:]
        while short and sum(times) < SHORT_MS:
            times.append(self.step())
        if "flops_per_step" in self.about:  # ours: what the machine can do in this round
            self.peaks.append(self.ask("peak").get("peak"))
        if not self.error:
            self.times.append(statistics.median(times))
        time.sleep(SETTLE)
        self.asleep = self.busy()


def race(contenders, rounds):
    steps = []
    for c in contenders:
        c.first = c.step()
        steps += [c.step() for _ in range(WARMUP)]
        time.sleep(SETTLE)
    short = min((ms for ms in steps if ms > 0), default=0) < SHORT_MS
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        turn = number % len(contenders)
        for c in contenders[turn:] + contenders[:turn]:
            c.turn(short)
    for c in contenders:
        c.process.communicate()


def ratio(times, base):
    """The median of the ratios of the two times of a round, and the ends of its 95 % interval (None
    for fewer than 6 rounds)."""
    ratios = sorted(t / b for t, b in zip(times, base))
    # tail: the probability that at most `cut` of n rounds lie below the true median
    n, cut, tail = len(ratios), 0, 0.5 ** len(ratios)
    while tail <= 0.025:
        cut += 1
        tail += math.comb(n, cut) * 0.5 ** n
    return (statistics.median(ratios), ratios[cut - 1] if cut else None,
            ratios[n - cut] if cut else None)


def results(contenders):
    """A row each. Work, peak and what the ratio is to are of the first of the same precision,
    ours."""
    rows = []
    for c in contenders:
        base = next(b for b in contenders if b.precision == c.precision)
        row = {"name": c.name, "precision": c.precision, "error": c.error,
               "first_ms": None if c.error else c.first, "ms": c.times, "peaks": c.peaks,
               "losses": c.losses, **c.about}
        if not c.error:
            row.update(median_ms=statistics.median(c.times),
                       waiting_ms=statistics.mean(c.waiting or [0.0]))
        if not c.error and not base.error:
            rates = [base.about["flops_per_step"] / ms * 1e3 for ms in c.times]
            row.update(gflops=base.about["flops_per_step"] / row["median_ms"] * 1e-6,
                       percent_of_peak=100
                       * statistics.median(rate / peak for rate, peak in zip(rates, base.peaks)))
            row.update(zip(("ratio", "low", "high"), ratio(c.times, base.times)))
        rows.append(row)
    return rows


def table(name, rows):
    text = [f"\n### {name}\n",
            "| | precision | ms a step | GFLOP/s | % of peak | time over ours (95 %) "
            "| first step, ms |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = ([f"failed: {r['error']}" if r["error"] else f"{r['median_ms']:.2f}"]
                 + [f"{r[key]:.1f}" if key in r else "-" for key in ("gflops", "percent_of_peak")])
        interval = f" ({r['low']:.3f} to {r['high']:.3f})" if r.get("low") else ""
        cells += [f"{r['ratio']:.3f}{interval}" if "ratio" in r else "-",
                  "-" if r["error"] else f"{r['first_ms']:.0f}"]
        text.append(" | ".join([f"| {r['name']}", r["precision"], *cells]) + " |")
    notes = [f"{r['name']}, {r['precision']}: PyTorch {r['torch']}, {', '.join(r['libraries'])}, "
             f"{r['adamw']} AdamW" for r in rows if "torch" in r]
    notes += [f"{r['name']}, {r['precision']}: took {r['waiting_ms']:.0f} ms of a core in a round "
              "while others ran" for r in rows if r.get("waiting_ms", 0) > 5]
    return "\n".join(text + [""] + notes)


def machine(threads):
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines()
             if ":" in line]
    info = {key.strip().lower(): value.split() for key, value in lines}
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT,
                            capture_output=True, text=True).stdout.strip()
    return {"cpu": " ".join(info.get("model name", [platform.machine()])), "cores": os.cpu_count(),
            "threads": threads,
            "isa": [flag for flag in ISA if flag in info.get("flags", info.get("features", []))],
            "commit": commit, "date": time.strftime("%Y-%m-%d"),
            "environment": {name: value for name, value in os.environ.items()
                            if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))}}


def contenders_of(case, precisions, modes, threads, installed, python):
    found = []
    flags = [*case.flags.split(), "--batch", str(case.batch), "--seq", str(case.seq), *SAME.split()]
    for p in precisions:
        for mode in modes or ["PRE"]:
            found.append(Contender(mode if modes else "norm.c", p,
                                   [f"build/bench-{p}", "--serve", "--mode", mode, *flags],
                                   threads))
        for compiled in () if modes else (False, True):
            spec = json.dumps({**case._asdict(), "compiled": compiled, "bf16": p == "bf16",
                               "threads": threads})
            name = "PyTorch" + ", compiled" * compiled + ", as installed" * installed
            found.append(Contender(name, p, [python, str(Path(__file__).with_name("torch_step.py")),
                                             spec], threads, None if installed else KEPT))
    return found


def main():
    parser = argparse.ArgumentParser(description="A training step of norm.c on this CPU beside the "
                                                 "same step in PyTorch.")
    parser.add_argument("--case", choices=[*CASES, "all"], default="gpt2-4x64")
    parser.add_argument("--precision", choices=["fp32", "bf16", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--modes", help="our placements, separated by commas, and no PyTorch")
    parser.add_argument("--installed", action="store_true",
                        help="PyTorch with the allocator's own settings, not those that make "
                             "it faster")
    parser.add_argument("--python", default=sys.executable, help="the Python whose PyTorch it is")
    parser.add_argument("--json", help="a file for the machine and all times")
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 1:
        parser.error("expected --rounds and --threads of 1 or more")
    if not shutil.which(options.python):
        parser.error("expected a program as --python, that runs Python with PyTorch; "
                     f"{options.python} is none")
    precisions = ["fp32", "bf16"] if options.precision == "all" else [options.precision]
    for p in precisions:
        if subprocess.run(["make", "-s", f"build/bench-{p}"], cwd=ROOT,
                          stdout=sys.stderr).returncode:
            sys.exit(f"error: make build/bench-{p} failed, see above\n"
                     "  -> --precision with what this tree builds")
    report = {"machine": machine(options.threads), "cases": {}}
    m = report["machine"]
    print(f"{m['cpu']}, {m['cores']} cores ({' '.join(m['isa'])}), {m['threads']} threads; norm.c "
          f"{m['commit']}; {m['date']}")
    for name in CASES if options.case == "all" else [options.case]:
        contenders = contenders_of(CASES[name], precisions,
                                   options.modes and options.modes.split(","), options.threads,
                                   options.installed, options.python)
        race(contenders, options.rounds)
        report["cases"][name] = results(contenders)
        print(table(name, report["cases"][name]), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
