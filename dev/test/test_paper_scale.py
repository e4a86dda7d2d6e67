#!/usr/bin/env python3
"""Tests of the commands at the papers' scale (dev/repro): python3 dev/test/test_paper_scale.py

A shell runs each command of the last table of RESULTS.md with programs that only write down how
they were called. Every run among them is then shown by the trainer of its placement with its own
flags, and trains three steps as a miniature of them, scored on made-up rows of its paper's tasks.
scores.py must find those runs, and put ours beside each row of the papers' tables. Needs numpy,
scipy and matplotlib, and builds a trainer for each placement.
"""
import contextlib
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("dev/repro", "dev", "data")]
import ablate
import report
import repro
import scores
import tasks
from shards import KINDS

# values of a miniature, each for models that have the flag beside it
MINIATURE = {"layers": ("layers", 8), "width": ("width", 32), "heads": ("heads", 4),
             "kv_heads": ("kv_heads", 2), "ffn": ("ffn", 48), "dense_ffn": ("dense_ffn", 48),
             "experts": ("experts", 4), "experts_per_token": ("experts", 2),
             "kv_rank": ("kv_rank", 16), "rope_size": ("kv_rank", 8)}
SHORT = {"vocab": 256, "seq": 128, "batch": 2, "steps": 3, "warmup": 1, "val-tokens": 128,
         "val-every": 3, "save-every": 0, "sample": 0}
RECORD = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
passed = failed = 0


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


# ---- what a command runs

def called(command, folder):
    """The programs that a shell calls for it, each with its words."""
    programs, record = folder / "programs", folder / "record"
    programs.mkdir(exist_ok=True)
    record.unlink(missing_ok=True)
    for name in ("make", "torchrun", "python3"):
        (programs / name).write_text(RECORD.replace("/usr/bin/env python3", sys.executable))
        (programs / name).chmod(0o755)
    done = subprocess.run(["sh", "-ec", command], capture_output=True, text=True, env=dict(
        os.environ, PATH=f"{programs}:{os.environ['PATH']}", RECORD=str(record)))
    expect(done.returncode == 0, f"{command}: {done.stderr}")
    return [json.loads(line) for line in record.read_text().splitlines()]


def pairs(words):
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2])}


def ablate_runs(words):
    """What dev/ablate.py makes of its words: (placement, flags) of each run."""
    options, axes = ablate.parse(words)
    ablate.check_axes(axes, options, set())
    kept = {"axes": axes, "searched": [], "largest_lr": False}
    for one in ablate.combinations(kept):
        flags = {name: value for name, value in one.items() if name != "mode"}
        out = f"{options.out}/runs/{ablate.run_name(kept, one)}"
        yield one["mode"], dict(flags, out=out, resume="auto")


def runs_of(command, folder):
    """(placement, flags) of each run of a command, and the claims that it scores."""
    found, scored, mode = [], [], None
    for name, *words in called(command, folder):
        if name == "make":
            mode = words[-1].removeprefix("NORM_MODE=")
        elif name == "torchrun":
            at = words.index("./train_gpt")
            found.append((mode, pairs(words[at + 1:])))
        elif words[0] == "dev/ablate.py":
            found += ablate_runs(words[1:])
        elif words[0] == "dev/repro/scores.py":
            scored.append(words[1])
    return found, scored


# ---- data

class Bytes:
    """A vocabulary of bytes, for task files."""
    separator, size = 0, 256

    def encode(self, texts):
        return [list(text.encode()) for text in texts]

    def dtype(self):
        return np.dtype("<u2")


def write_data(folder):
    """Shards in DATA and data/c4-val, and two rows of each task in the suites' folders."""
    rows, shots = {name: [] for name in tasks.TASKS}, []
    for line in (ROOT / "dev/test/tasks.jsonl").read_text().splitlines():
        row = json.loads(line)
        name, split = row.pop("task"), row.pop("split", "")
        (shots if split == "dev" else rows["mmlu_var" if name == "mmlu" else name]).append(row)
    tokens = np.random.default_rng(1).integers(1, 256, 4096).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:4] = [*KINDS[2], len(tokens), 256]
    for name in ("DATA/x_train_0.bin", "DATA/x_val_0.bin", "data/c4-val/c4-val_val_0.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(header.tobytes() + tokens.tobytes())
    for suite, columns in tasks.SUITES.items():
        (folder / "data" / suite).mkdir()
        for name, metric in columns.items():
            data, _ = (tasks.text_file(rows[name][:2], Bytes()) if name == "wikitext" else
                       tasks.eval_file(name, rows[name][:2], Bytes(), shots, metric))
            (folder / "data" / suite / f"{name}.bin").write_bytes(data)


# ---- runs

@functools.cache
def trainer(mode):
    made = subprocess.run(["make", "-s", "-C", str(ROOT), "--no-print-directory", "binary",
                           f"NORM_MODE={mode}", "DEVICE=cpu", "PREC=fp32"], capture_output=True,
                          text=True)
    expect(made.returncode == 0, f"NORM_MODE={mode}: {made.stderr}")
    return str(ROOT / made.stdout.split()[-1])


def train(mode, flags, folder, what):
    """Shows a run, then trains its miniature. Its tasks are scored in both validations."""
    call = lambda flags, *more: subprocess.run(
        [trainer(mode), *(word for name, value in flags.items()
                          for word in (f"--{name}", str(value))), *more],
        capture_output=True, text=True, cwd=folder)
    shown = call({name: value for name, value in flags.items()
                  if name not in ("data", "tasks", "val-data", "out", "resume")},
                 "--show", "config")
    expect(shown.returncode == 0, f"{what} {mode}: {shown.stderr}")
    if shown.returncode:
        return
    config = json.loads(shown.stdout[re.search(r"^\{", shown.stdout, re.M).start():])["flags"]
    small = {name.replace("_", "-"): value for name, (has, value) in MINIATURE.items()
             if config[has] != "0"}
    small = dict(flags, **small) | SHORT
    if flags.get("warmup") == "0":
        small["warmup"] = 0
    trained = call(small)
    expect(trained.returncode == 0 and "after 3 steps" in trained.stdout,
           f"{what} {mode} {small}: {trained.stderr}")
    expect(("average of" in trained.stdout) == ("tasks" in flags), f"{what} {mode}: its average")


def read_commands(folder):
    """Claim -> the runs of its commands. Each command is scored at the end if its runs are."""
    table = repro.read_claims()
    claims = [claim for claim in table["claim"] if "model" in claim.get("full", {})]
    commands = [(claim, command, runs) for claim in claims
                for command, runs, _ in report.full_scale(claim, table["models"])]
    seen = {}
    for claim, command, count in commands:
        found, scored = runs_of(command, folder)
        expect(len(found) == count, f"{claim['id']}: {len(found)} runs of {count}: {command}")
        measured = {"tasks" in flags for _, flags in found}
        expect(len(measured) == 1 and scored == [claim["id"]] * max(measured),
               f"{claim['id']}: scored on the tasks at the end: {command}")
        seen.setdefault(claim["id"], []).extend(found)
    return seen


def test_commands(folder, seen):
    for claim, runs in seen.items():
        for mode, flags in runs:
            if flags.get("seed", "1") == "1":
                train(mode, flags, folder, claim)


def rates(seen, claim):
    """(placement, rate, width base) of a claim's runs."""
    return {(mode, float(flags.get("lr", 0)), flags.get("width-base", "0"))
            for mode, flags in seen[claim]}


def test_settings(seen):
    """Appendix B of SpanNorm, its table 4, and its proxy of width 640."""
    expect(rates(seen, "S12") == {*((mode, 0, "0") for mode in ("SPAN", "MIX_LN", "PRE", "LNS")),
                                  ("HYBRID", 1e-4, "0"), ("SANDWICH", 1e-4, "0")},
           f"S12: {rates(seen, 'S12')}")
    expect(rates(seen, "S34") == {("SPAN", 2e-4, "0"), ("SPAN", 9.6e-4, "640")},
           f"S34: {rates(seen, 'S34')}")
    expect(abs(9.6e-4 * 640 / 2560 - 2.4e-4) < 1e-12, "the matrices' rate of table 4, width 2560")
    sigmas = {}
    for name in ("span-d640", "span-5B"):
        shown = subprocess.run([trainer("SPAN"), "--model", name, "--show", "config"],
                               capture_output=True, text=True).stdout
        flags = json.loads(shown[re.search(r"^\{", shown, re.M).start():])["flags"]
        sigmas[name] = float(flags["init_std"]) * int(flags["width"]) ** 0.5
    expect(abs(sigmas["span-d640"] - sigmas["span-5B"]) < 1e-9,
           f"sigma sqrt(width) of the proxy and of its target: {sigmas}")


def test_scores(folder, seen):
    """Each row of the papers' tables has ours beside it, with every figure that the paper has."""
    scored = [claim for claim, runs in seen.items() if "tasks" in runs[0][1]]
    kept, tables = {claim: scores.harvest(claim, folder) for claim in scored}, scores.read_tables()
    expect(all(len(kept[claim]) == sum(flags.get("seed", "1") == "1" for _, flags in seen[claim])
               for claim in scored), "every run is found")
    for table in tables:
        for names, arm, figures in table["rows"]:
            ours = [run for name in names.split() for run in kept.get(name, [])
                    if scores.fits(run, arm)]
            expect(ours, f"{table['where']}: {names} {arm} has runs")
            columns = [column for _, column in table["columns"]]
            values = [scores.value_of(run, column) for run in ours for column in columns]
            expect(None not in values, f"{table['where']}: {names} {arm}: {values}")
            expect(len(figures) <= len(table["columns"]), f"{names} {arm}: {figures}")
            if figures and table["columns"][len(figures) - 1][1] == "average":
                accuracies = [figure for figure, (_, column) in zip(figures, table["columns"])
                              if " acc" in column]
                expect(abs(sum(accuracies) / len(accuracies) - figures[-1]) < 0.1,
                       f"{names} {arm}: the paper's average is that of its columns")
    drawn = "\n".join(scores.draw(scored, kept, tables))
    for row in ("| PRE, the paper | 22.5 | 22.9 |", "| PRE, here, 1 run |",
                "| POST, the paper: failed |", "| S16: SANDWICH lr=0.0002, here, "):
        expect(row in drawn, f"{row} in the tables")


def test_means():
    """A row is the mean over seeds, and says how far its runs are; accuracies in percent."""
    run = lambda seed, accuracy, step: {
        "mode": "SPAN", "flags": {"lr": "0.00010", "seed": seed}, "step": step, "steps": 20,
        "results": {"piqa": {"acc": accuracy}}, "average": 0.25, "val_loss": 0.0}
    columns = [["PIQA", "piqa acc"], ["C4 ppl", "validation perplexity"], ["", "average"],
               ["Hella.", "hellaswag acc_norm"]]
    runs = [run("1", 0.5, 20), run("2", 0.6, 20)]
    expect(scores.our_row("SPAN", runs, columns) == "| SPAN, here, 2 runs | 55 | 1 | 25 |  |",
           scores.our_row("SPAN", runs, columns))
    expect("step 10 of 20" in scores.our_row("SPAN", [runs[0], run("2", 0.6, 10)], columns),
           "a run in work")
    expect(scores.fits(runs[0], "SPAN lr=1e-4") and not scores.fits(runs[0], "SPAN lr=2e-4")
           and not scores.fits(runs[0], "PRE") and not scores.fits(runs[0], "SPAN width-base=640"),
           "rates are compared as numbers; a flag that a run lacks does not fit")


def main():
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_data(folder)
        test_means()
        seen = read_commands(folder)
        test_settings(seen)
        if not failed:                                     # the runs take minutes
            test_commands(folder, seen)
            test_scores(folder, seen)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
