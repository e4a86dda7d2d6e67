#!/usr/bin/env python3
"""test_ablate.py: a study ends the same however often it is killed, tells finished, diverged,
killed and failed runs apart, and refuses what makes no sense.

    python3 dev/test/test_ablate.py [NAME...]  from the project's root; needs scipy, matplotlib

Most of it runs on a stand-in for the trainer, a script that learns nothing but behaves as told by
its flags: a study trains whatever lies in its bin/.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

SMALL = ["--width", "16", "--heads", "1", "--layers", "1", "--seq", "16", "--batch", "2",
         "--val-tokens", "64", "--make", "DEVICE=cpu PREC=fp32"]
ENVIRONMENT = dict(os.environ, MPLBACKEND="Agg", OMP_WAIT_POLICY="passive")
counts = {"passed": 0, "failed": 0}

# The stand-in's loss at step s is 3 - s / steps + lr. With --lr above 0.1 it diverges, with --ffn 1
# it fails, with --ffn 2 it is killed, with --ffn 3 it collapses (it ends at the entropy of the
# tokens' frequencies), with --ffn 4 it ends as the trainer does at SIGTERM; it refuses --heads 3.
STAND_IN = '''#!/usr/bin/env python3
import json, os, signal, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
get = lambda name, default: flags.get("--" + name, default)
config = {"norm_mode": os.path.basename(sys.argv[0]), "parameters": 100, "flops_per_token": 600,
          "initialization": "scale", "unigram_entropy": 3.5,
          "flags": {"layers": "4", "steps": get("steps", "20"), "batch": "2", "seq": "8",
                    "lr": get("lr", "0.01"), "tied": "on", "final_norm": "auto",
                    "decay_gains": "off", "init": "auto", "data": get("data", ""),
                    "val_data": get("val-data", "")}}
if get("heads", "1") == "3":
    sys.exit("error: --heads 3 does not go with --width 16")
if "--show" in flags:
    print("note: something else"); print(json.dumps(config, indent=2)); sys.exit()
out, steps, lr = get("out", ""), int(get("steps", "20")), float(get("lr", "0.01"))
os.makedirs(out, exist_ok=True)
json.dump(config, open(out + "/config.json", "w"))
if get("ffn", "0") == "1":
    sys.exit("error: the disk is full")
if get("ffn", "0") == "2":
    os.kill(os.getpid(), signal.SIGKILL)
if get("ffn", "0") == "4":
    sys.exit(128 + signal.SIGTERM)
with open(out + "/log.jsonl", "w") as log:
    for step in range(1, steps + 1):
        log.write(json.dumps({"step": step, "loss": 3 - step / steps + lr, "ms": 10.0}) + "\\n")
        if lr > 0.1:
            sys.exit(3)
    loss = 3.45 if get("ffn", "0") == "3" else 2 + lr + int(get("seed", "1")) / 100
    log.write(json.dumps({"step": steps, "val_loss": loss, "weights": "0"}) + "\\n")
'''


def expect(ok, what):
    counts["passed" if ok else "failed"] += 1
    if not ok:
        print(f"FAILED: {what}")


def ablate(*words, environment=ENVIRONMENT):
    return subprocess.run([sys.executable, "dev/ablate.py", *map(str, words)], capture_output=True,
                          text=True, env=environment, timeout=300)


def stand_in(folder, *modes):
    """A study's folder whose trainers are stand-ins."""
    (folder / "bin").mkdir(parents=True)
    for mode in modes:
        (folder / "bin" / mode).write_text(STAND_IN)
        (folder / "bin" / mode).chmod(0o755)
    return folder


def outcomes(folder):
    return {path.parent.name: json.loads(path.read_text())
            for path in sorted(folder.glob("runs/*/outcome.json"))}


def results(folder):
    """Every step's loss and the final weights of every run: equal where two studies are equal."""
    found = {}
    for path in sorted(folder.glob("runs/*/log.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [(line["step"], line.get("loss"), line.get("grad_norm"),
                                    line.get("val_loss"), line.get("weights"))
                                   for line in lines if "norm_mode" not in line]
    return found


def alive(folder):
    return subprocess.run(["pgrep", "-f", "--", f"--out {folder}/runs"], capture_output=True,
                          text=True).stdout.split()


def test_kills(folder):
    study = ["--mode", "PRE,SPAN", "--seed", "1,2", "--steps", "20000", "--save-every", "2500",
             *SMALL]
    whole, broken = folder / "whole", folder / "broken"
    done = ablate(*study, "--out", whole)
    expect(done.returncode == 0, f"a study: {done.stdout}{done.stderr}")
    expect({name: outcome["status"] for name, outcome in outcomes(whole).items()}
           == {f"{mode}-seed{seed}": "finished" for mode in ("PRE", "SPAN") for seed in "12"},
           f"its runs: {outcomes(whole)}")
    expect((whole / "index.html").stat().st_size > 10000, "its page")
    expect(all(len(list(run.glob("step_*"))) == 1 for run in whole.glob("runs/*")),
           "one checkpoint is left of a finished run")
    dice = random.Random(1)
    for how in ("ablate.py alone", "everything", "an interrupt", "everything", "ablate.py alone"):
        process = subprocess.Popen([sys.executable, "dev/ablate.py", *study, "--out", str(broken)],
                                   env=ENVIRONMENT, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, start_new_session=True)
        while process.poll() is None and not alive(broken):
            time.sleep(0.01)
        time.sleep(dice.uniform(0.1, 0.6))
        if how == "an interrupt":
            process.send_signal(signal.SIGINT)
            said = process.communicate()[0]
            expect(process.returncode == 130 and "the same command goes on" in said,
                   f"an interrupt: status {process.returncode}, {said}")
            expect(not alive(broken), "an interrupt leaves no trainer behind")
            expect(any(outcome.keys() == {"seconds"} and outcome["seconds"] > 0
                       for outcome in outcomes(broken).values()),
                   f"it leaves the seconds of its runs: {outcomes(broken)}")
        else:
            process.kill()
            for trainer in alive(broken) if how == "everything" else []:
                os.kill(int(trainer), signal.SIGKILL)
            process.communicate()
        ended = [name for name, outcome in outcomes(broken).items() if "status" in outcome]
        expect(any(run.name not in ended for run in broken.glob("runs/*")),
               f"the kill of {how} hits current runs")
    done = ablate(*study, "--out", broken)
    expect(done.returncode == 0, f"after the kills: {done.stdout}{done.stderr}")
    expect(results(whole) == results(broken),
           "a study killed five times ends with the same losses and weights")
    again = ablate("--out", broken)
    expect(again.returncode == 0 and " 0 to train" in again.stdout,
           f"nothing is trained twice: {again.stdout}{again.stderr}")
    changed = ablate("--mode", "PRE,SPAN", "--seed", "1,2", "--steps", "5000", "--out", broken)
    expect(changed.returncode == 1 and "another --out" in changed.stderr,
           f"another study under the same name: {changed.stderr}")


def test_outcomes(folder):
    out = stand_in(folder / "outcomes", "PRE")
    done = ablate("--mode", "PRE", "--seed", "1,2", "--lr", "0.01,0.5", "--ffn", "0,1,2,3,4",
                  "--jobs", "3", "--out", out)
    found = {name: outcome["status"] for name, outcome in outcomes(out).items()}
    for seed in "12":
        for lr in ("0.01", "0.5"):
            for ffn, want in {"0": "finished" if lr == "0.01" else "diverged", "1": "failed",
                              "2": "killed", "4": "killed"}.items():
                name = f"PRE-lr{lr}-ffn{ffn}-seed{seed}"
                expect(found.get(name) == want, f"{name}: {found.get(name)}, expected {want}")
        name = f"PRE-lr0.01-ffn3-seed{seed}"
        expect(f"{name}: collapsed" in done.stdout,
               f"the entropy of the frequencies: {done.stdout}")
    expect(len(found) == 20 and list(found.values()).count("failed") == 4,
           f"an outcome each: {found}")
    for words in ("the disk is full", "exit status -9"):
        expect(words in done.stdout, f"the report says \"{words}\": {done.stdout}")
    expect(done.returncode == 1 and "tries them again" in done.stderr,
           f"a study with failed runs: status {done.returncode}, {done.stderr}")
    expect("the disk is full" in (out / "index.html").read_text(), "the page says why a run failed")
    os.rename(out / "bin/PRE", folder / "PRE")
    (folder / "make").write_text("#!/bin/sh\nexit 2\n")
    (folder / "make").chmod(0o755)
    no_make = dict(ENVIRONMENT, PATH=f"{folder}:{os.environ['PATH']}")
    done = ablate("--out", out, environment=no_make)
    (folder / "make").unlink()
    expect(done.returncode == 1 and "PRE was not built" in done.stderr,
           f"no trainer: {done.stderr}")
    expect({name: outcome["status"] for name, outcome in outcomes(out).items() if outcome["status"]
            in ("finished", "diverged")} == {name: status for name, status in found.items()
                                             if status in ("finished", "diverged")},
           "results stay when their trainer is gone and cannot be built")
    os.rename(folder / "PRE", out / "bin/PRE")
    before = {name: (out / "runs" / name / "outcome.json").stat().st_mtime_ns
              for name, status in found.items() if status in ("finished", "diverged")}
    ablate("--out", out)
    expect(all((out / "runs" / name / "outcome.json").stat().st_mtime_ns == when
               for name, when in before.items()), "finished and diverged runs are not run again")


def test_checkpoints(folder):
    """A finished run keeps its last checkpoint, or what --keep-last asks for."""
    for words, left in (([], 1), (["--keep-last", 1, "--keep-every", 500], 3)):
        out = stand_in(folder / f"checkpoints{left}", "PRE")
        for step in (500, 1000, 1200):
            (out / f"runs/PRE-seed1/step_{step:08d}").mkdir(parents=True)
        done = ablate("--mode", "PRE", *words, "--out", out)
        found = sorted(path.name for path in out.glob("runs/*/step_*"))
        expect(len(found) == left and found[-1] == "step_00001200",
               f"checkpoints with {words}: {found}, {done.stdout}{done.stderr}")


def test_checks(folder):
    """Typing errors stop a study before it builds, what the trainer refuses before training."""
    fake = folder / "checks"
    fake.mkdir()
    (fake / "make").write_text(f"#!/bin/sh\necho built > '{fake}/built'\nexit 2\n")
    (fake / "make").chmod(0o755)
    environment = dict(ENVIRONMENT, PATH=f"{fake}:{os.environ['PATH']}")
    for words, *said in (
            (["--mode", "PRE,SPN"], "--mode SPN: expected a placement", "mean SPAN?", "NGPT"),
            (["--mode", "PRE,span"], "did you mean SPAN?"),
            (["--layer", "2"], "unknown flag --layer", "did you mean --layers?"),
            (["--job", "2"], "unknown flag --job", "did you mean --jobs?"),
            (["--layers", "2,0"], "--layers 0: expected a whole number from 1 to 4096"),
            (["--batch", "1.5"], "--batch 1.5: expected a whole number"),
            (["--lr", "1e-3,fast"], "--lr fast: expected a number from 0 to 10"),
            (["--lr", "nan"], "--lr nan: expected a number"),
            (["--seed", "1,01"], "--seed 1,01: expected numbers that differ"),
            (["--bias", "on,yes"], "--bias yes: expected off, on or qkv"),
            (["--init", "scal"], "--init scal: expected auto", "did you mean scale?")):
        done = ablate(*words, "--out", fake / "study", environment=environment)
        expect(done.returncode == 1 and all(part in done.stderr for part in said),
               f"{words}: {done.stderr}")
        expect(not (fake / "study").exists() and not (fake / "built").exists(),
               f"{words}: it built")
    out = stand_in(folder / "refused-by-trainer", "PRE")
    done = ablate("--mode", "PRE", "--heads", "1,3", "--out", out)
    expect(done.returncode == 1 and "--heads 3 does not go with --width 16" in done.stderr,
           f"{done.stderr}")
    expect(not outcomes(out) and not (out / "study.json").exists(),
           "a refused combination: nothing is kept")
    rows = re.findall(r"^FLAG\((\w+)", pathlib.Path("llmc/run/flags.h").read_text(), re.M)
    known = python("import ablate; print(*ablate.trainer_flags())")
    expect(known.split() == [name.replace("_", "-") for name in rows],
           f"every flag is known: {known}")


def python(code, *words):
    """The output of a program that imports from dev/."""
    environment = dict(ENVIRONMENT, PYTHONPATH="dev")
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True,
                          env=environment).stdout


def test_names(folder):
    """Folders are named by content: the same command goes on, another has another folder."""
    program, study = os.path.abspath("dev/ablate.py"), ["--mode", "PRE,SPAN", "--seed", "1,2"]

    def expect_study(words, *said):
        done = subprocess.run([sys.executable, program, *words], capture_output=True, text=True,
                              env=ENVIRONMENT, cwd=folder)
        expect(done.returncode == 0 and all(part in done.stdout for part in said),
               f"{words}: {done.stdout}{done.stderr}")

    old = folder / "ablations/PRE-SPAN/study.json"             # an older version named it so
    old.parent.mkdir(parents=True)
    old.write_text("unfinished")
    for steps in ("200", "100"):
        out = f"ablations/PRE-SPAN-seed-1-2-steps-{steps}"
        stand_in(folder / out, "PRE", "SPAN")
        expect_study([*study, "--steps", steps], "4 to train", f"wrote {out}/index.html")
    expect(old.read_text() == "unfinished", "an older study is left alone")
    first = "ablations/PRE-SPAN-seed-1-2-steps-200"
    expect_study(["--steps=200", "--seed", "1,2", "--mode", "PRE,SPAN"],
                 f"{first}: 4 runs, 0 to train")
    expect_study(["--mode", "PRE,SPAN", "--seed", "1,2,3", "--steps", "200", "--out", first],
                 "6 runs, 2 to train")
    expect_study([*study, "--steps", "200"], f"{first}: 6 runs, 0 to train")
    many = ",".join(map(str, range(1, 60)))
    flags = ("", "--steps 2", "--tokens 2", "--flops 2", "--lr 1", "--lr 1 --largest-lr",
             "--make PREC=fp32", "--make PREC=fp64", "--data a/b", "--data a_b", "--data a,b",
             "--data a-b", "--data a --seq 64", "--data a,seq,64", f"--lr {many}",
             f"--lr {many},60")
    code = "import sys, ablate; options, axes = ablate.parse(sys.argv[1:]); "
    code += "print(ablate.study_name({'seed': ['1']} | axes, options))"
    names = [python(code, "--mode", "PRE", *words.split()).strip() for words in flags]
    expect(len(set(names)) == len(names), f"each has a name of its own: {names}")
    expect(all(re.fullmatch(r"[A-Za-z0-9._-]{3,89}", name) for name in names),
           f"plain names: {names}")


def test_growth_and_budgets(folder):
    out = stand_in(folder / "growth", "PRE", "POST", "SPAN")
    expect(ablate("--mode", "PRE,SPAN", "--lr", "0.01,0.02", "--out", out).returncode == 0,
           "a study to grow")
    done = ablate("--mode", "PRE,SPAN,POST", "--lr", "0.01,0.02,0.03", "--seed", "1,2", "--out",
                  out)
    expect(done.returncode == 0 and "18 runs, 14 to train" in done.stdout,
           f"more modes, rates and seeds: {done.stdout}{done.stderr}")
    expect(len(json.loads((out / "study.json").read_text())["axes"]["mode"]) == 3,
           "study.json has grown")
    done = ablate("--mode", "PRE,SPAN", "--lr", "0.01,0.02", "--largest-lr", "--out", out)
    expect(done.returncode == 1 and "largest_lr" in done.stderr, f"a search besides: {done.stderr}")
    for words in (["--largest-lr"], ["--tokens", 100], ["--within", 0.1], ["--make", "PREC=fp32"]):
        done = ablate("--out", out, *words)
        expect(done.returncode == 1 and f"{words[0]}: expected the flags of the study"
               in done.stderr, f"{words} alone: {done.stdout}{done.stderr}")
    # a step is 16 tokens of 600 operations each
    for budget, amount, steps in (("--tokens", 1600, 100), ("--flops", 9600 * 7, 7)):
        out = stand_in(folder / budget[2:], "PRE")
        done = ablate("--mode", "PRE", budget, amount, "--out", out)
        config = json.loads((out / "runs/PRE-seed1/config.json").read_text())
        expect(config["flags"]["steps"] == str(steps),
               f"{budget} {amount}: {config['flags']['steps']} steps, expected {steps}; "
               f"{done.stdout}{done.stderr}")
    out, calls = stand_in(folder / "minutes", "PRE"), folder / "calls"
    (out / "bin/PRE").write_text(STAND_IN + f"open('{calls}', 'a').write('x')\n")
    done = ablate("--mode", "PRE", "--minutes", 0.05, "--jobs", 2, "--out", out)  # a step is 10 ms
    expect(json.loads((out / "runs/PRE-seed1/config.json").read_text())["flags"]["steps"] == "300",
           f"--minutes 0.05: {done.stdout}{done.stderr}")
    expect(calls.read_text() == "xx", f"one trial for one run: {calls.read_text()}")
    done = ablate("--mode", "PRE", "--tokens", 3, "--out", stand_in(folder / "too-little", "PRE"))
    expect(done.returncode == 1 and "no step to train" in done.stderr,
           f"less than a step: {done.stderr}")


def test_only(folder):
    """Each placement at a rate of its own, with every seed."""
    study, out = folder / "only.toml", stand_in(folder / "only", "PRE", "SPAN")
    text = 'mode = ["PRE", "SPAN"]\nlr = [0.02, 0.01]\nseed = [1, 2]\n'
    study.write_text(text + 'only = [{mode = "PRE", lr = 2e-2}, {mode = "SPAN", lr = 1e-2}]\n')
    done = ablate(study, "--out", out)
    expect(done.returncode == 0 and sorted(outcomes(out)) == [
        f"{mode}-lr{rate}-seed{seed}" for mode, rate in (("PRE", "0.02"), ("SPAN", "0.01"))
        for seed in (1, 2)], f"four runs of eight: {sorted(outcomes(out))}, {done.stderr}")
    expect("0 to train" in ablate("--out", out).stdout, "the study goes on with what it has")
    study.write_text(text + 'only = [{mode = "PRE"}, {mode = ["SPAN"], lr = [1e-2]}]\n')
    done = ablate(study, "--out", out)
    expect("6 runs, 2 to train" in done.stdout, f"one more rate: {done.stdout}{done.stderr}")
    for words, said in (([study, "--mode", "PRE,SPAN,POST"], "POST is in no run"),
                        (["--mode", "PRE,SPAN,POST", "--lr", "0.02,0.01"], "POST is in no run")):
        done = ablate(*words, "--out", out)
        expect(done.returncode == 1 and said in done.stderr, f"{words}: {done.stderr}")
    study.write_text(text + 'only = [{mode = "PRE"}]\n')
    done = ablate(study, "--out", out)
    expect(done.returncode == 1 and "leaves out" in done.stderr, f"fewer runs: {done.stderr}")
    study.write_text(text)
    done = ablate(study, "--out", out)
    expect("8 runs, 2 to train" in done.stdout, f"a file without it: {done.stdout}{done.stderr}")
    expect("did you mean --only" not in ablate("--mode", "PRE", "--only", "x").stderr, "no flag")
    for only in ('[{mode = "POST"}]', "[{width = 16}]", "[1]", "1", "[{lr = [[0.01]]}]",
                 "[{lr = [0.01, 3]}]"):
        study.write_text(f"{text}only = {only}\n")
        done = ablate(study, "--out", folder / "none")
        expect(done.returncode == 1 and "error: " in done.stderr and "only = " in done.stderr
               and "Traceback" not in done.stderr, f"only = {only}: {done.stderr}")


def test_largest_rate(folder):
    """The stand-in diverges above 0.1: the largest stable rate is found to a factor of 1.25, from
    below and from above."""
    for first in ("0.01", "0.7"):
        out = stand_in(folder / f"rate{first}", "PRE", "SPAN")
        done = ablate("--mode", "PRE,SPAN", "--lr", first, "--seed", "1,2", "--largest-lr", "--out",
                      out)
        expect(done.returncode == 0, f"--largest-lr from {first}: {done.stdout}{done.stderr}")
        lines = [line for line in done.stdout.splitlines() if "largest stable" in line]
        expect(len(lines) == 2, f"one sentence for each mode: {lines}")
        for line in lines:
            low, high = (float(word) for word in line.split() if word[0].isdigit())
            expect(low <= 0.1 < high <= 1.26 * low, f"--largest-lr from {first}: {line}")
        runs = len(outcomes(out))
        again = ablate("--out", out)
        expect(again.returncode == 0 and len(outcomes(out)) == runs and " 0 to train"
               in again.stdout, f"the search goes on where it was: {again.stdout}{again.stderr}")
    grown = ablate("--mode", "PRE,SPAN", "--lr", "0.7", "--seed", "1,2,3", "--largest-lr", "--out",
                   out)
    expect(len(outcomes(out)) == runs * 3 // 2 and f"{runs // 2} to train" in grown.stdout,
           f"a new seed at every rate: {grown.stdout}{grown.stderr}")
    out = stand_in(folder / "rates", "PRE")
    done = ablate("--mode", "PRE", "--lr", "0.01,0.02", "--largest-lr", "--out", out)
    found = re.findall(r"largest stable learning rate is between (\S+) and (\S+)", done.stdout)
    expect(len(found) == 1 and float(found[0][0]) <= 0.1 < float(found[0][1]),
           f"--largest-lr from two rates: {done.stdout}{done.stderr}")
    runs = len(outcomes(out))
    done = ablate("--mode", "PRE", "--lr", "0.01,0.02,0.04", "--largest-lr", "--out", out)
    expect(f"{runs} runs, 0 to train" in done.stdout,
           f"a rate of the search among those asked for: {done.stdout}{done.stderr}")
    out = stand_in(folder / "rate-failed", "PRE")
    done = ablate("--mode", "PRE", "--lr", "1e-2", "--ffn", "0,1", "--largest-lr", "--out", out)
    expect(done.stdout.count(": failed") == 1 and len(outcomes(out)) > 3 and "1 runs failed"
           in done.stderr, f"a failed run is not searched on: {done.stdout}{done.stderr}")
    for words, status in ((["--data", "x.bin"], 1),
                          (["--data", "x.bin", "--val-data", "y.bin"], 0)):
        out = stand_in(folder / f"rate-data{status}", "PRE")
        done = ablate("--mode", "PRE", "--lr", "0.1", *words, "--largest-lr", "--out", out)
        expect(done.returncode == status and ("compares validation losses" in done.stderr)
               == (status == 1), f"--largest-lr {words}: {done.stdout}{done.stderr}")


def test_refusals(folder):
    bad = folder / "bad.toml"
    for words, said in (
            ([], "expected something to compare"),
            (["--mode", "PRE", "--lr"], "--lr needs a value"),
            (["--mode", "PRE", "--lr", "1,,2"], "expected values that differ"),
            (["--mode", "PRE", "--lr", "0,1e-3"], "expected rates above 0"),
            (["--lr", "1,1", "--mode", "PRE"], "expected values that differ"),
            (["--mode", "PRE", "--mode", "SPAN"], "given twice"),
            (["--mode", "PRE", "SPAN"], 'found "SPAN"'),
            (["--mode", "PRE", "--resume", "auto"], "not for a study"),
            (["--mode", "PRE", "--steps", "10", "--tokens", "1e6"], "expected one budget"),
            (["--mode", "PRE", "--tokens", "-1"], "above 0"),
            (["--mode", "PRE", "--within", "-1"], "--within -1.0: expected a number above 0"),
            (["--mode", "PRE", "--within", "nan"], "--within nan: expected a number above 0"),
            (["--mode", "PRE,SPAN", "--report"], "holds no study"),
            (["--mode", "PRE", "--jobs", "0"], "expected 1 to 1024"),
            (["--mode", "PRE", "--compare", "width"], "--compare width"),
            (["--mode", "PRE", "--largest-lr"], "begins with a rate"),
            ([folder / "nowhere.toml"], "cannot read"),
            (["--out", folder / "nowhere"], "holds no study"), ([bad], "bad.toml")):
        bad.write_text("mode = [\n")
        done = ablate(*words, *([] if "--out" in words else ["--out", folder / "refused"])
                      if words else [])
        expect(done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr,
               f"{words}: status {done.returncode}, {done.stderr}, expected \"{said}\"")
        expect(not (folder / "refused").exists(), f"{words} leaves nothing behind")
    for text in ("mode = 3.5", "lr = [[1]]", "lr = 2020-01-01", 'mode = "PRE"\nlr = []', "\0"):
        bad.write_text(text)
        done = ablate(bad, "--out", folder / "refused2")
        expect(done.returncode != 0 and "error:" in done.stderr and "Traceback" not in done.stderr,
               f"{text!r}: {done.stderr}")
    for text, said in (('largest-lr = "off"', "largest-lr = 'off': expected true or false"),
                       ("jobs = 2.5", "--jobs: invalid int value: '2.5'"),
                       ('make = ["DEVICE=cpu"]', "make = ['DEVICE=cpu']: expected one value"),
                       ('compare = ["mode"]', "compare = ['mode']: expected one value")):
        bad.write_text(f'mode = "PRE"\nlr = 1e-3\n{text}\n')
        done = ablate(bad, "--out", stand_in(folder / text.split()[0], "PRE"))
        expect(done.returncode in (1, 2) and said in done.stderr and not done.stdout,
               f"{text}: {done.stdout}{done.stderr}")
    good = folder / "good.toml"
    good.write_text('mode = ["PRE", "SPAN"]\nseed = [1, 2]\nlr = 0.02\ntied = true\nsteps = 5\n'
                    f'jobs = 1\nout = "{stand_in(folder / "toml", "PRE", "SPAN")}"\n')
    done = ablate(good, "--lr", "0.03")
    command = (json.loads((folder / "toml/runs/SPAN-seed2/config.json").read_text())["flags"]
               if done.returncode == 0 else {})
    expect(command.get("lr") == "0.03" and command.get("steps") == "5" and "1 at a time"
           in done.stdout, f"a TOML file, and a flag that wins over it: {done.stdout}{done.stderr}")
    whole = json.loads((folder / "toml/study.json").read_text())
    (folder / "toml/runs/SPAN-seed2/log.jsonl").write_text('[1]\n"x"\n{"step": "many", "loss": 1}\n'
                                                           '{"step": 5, "val_loss": 2.0}\n\xff{"st')
    (folder / "toml/study.json").write_text(json.dumps(dict(whole, source="another")))
    done = ablate("--out", folder / "toml")
    expect(done.returncode == 0 and "the source has changed" in done.stdout,
           f"other code, and a log of other things: {done.stdout}{done.stderr}")
    for text in ("{", "[]", '{"version": 1}', json.dumps(dict(whole, axes={"mode": "PRE"})),
                 json.dumps(dict(whole, version=2)), json.dumps(dict(whole, plans=[]))):
        (folder / "toml/study.json").write_text(text)
        done = ablate("--out", folder / "toml")
        expect(done.returncode == 1 and "study.json" in done.stderr and "Traceback"
               not in done.stderr, f"a study.json that is {text[:40]}: {done.stderr}")
    wrong = stand_in(folder / "wrong", "PRE")
    expect(ablate("--mode", "PRE", "--heads", "3", "--out", wrong).returncode == 1
           and ablate("--mode", "PRE", "--heads", "1", "--out", wrong).returncode == 0,
           "a corrected attempt under the same name")
    stale = folder / "stale"
    done = ablate("--mode", "PRE", "--width", "16", "--heads", "3", *SMALL[4:], "--out", stale)
    expect(done.returncode == 1 and "nothing was trained" in done.stderr
           and not list(stale.glob("bin/*")), f"a refused attempt leaves no trainer: {done.stderr}")


def test_builds(folder):
    """Whatever ends a build, no trainer stays whose source and variables are not known."""
    built = stand_in(folder / "ready", "PRE") / "bin/PRE"
    make = folder / "building/make"
    make.parent.mkdir()
    make.touch(0o755)
    environment = dict(ENVIRONMENT, PATH=f"{make.parent}:{os.environ['PATH']}")
    for end, stays in (("exit 2", False), ("kill -KILL $PPID", True)):
        make.write_text(f"#!/bin/sh\ncase $* in *=SPAN*) {end} ;; esac\necho {built}\n")
        out = folder / f"built-{stays}"
        done = ablate("--mode", "PRE,SPAN", "--out", out, environment=environment)
        expect((out / "bin/PRE").exists() == (out / "study.json").exists() == stays,
               f"{end}: {sorted(out.rglob('*'))}, {done.stdout}{done.stderr}")
    done = ablate("--mode", "PRE,SPAN", "--make", "PREC=bf16", "--out", out,
                  environment=environment)
    expect(done.returncode == 1 and "holds a study whose make is" in done.stderr,
           f"other variables: {done.stdout}{done.stderr}")


def test_probe_ends(folder):
    """SIGTERM removes what a probe has in its temporary folder."""
    code = """
import probe, tempfile, time
def wait(*given):
    with tempfile.TemporaryDirectory():
        print("begun", flush=True)
        time.sleep(60)
probe.need, probe.probe = list, wait
probe.main()
"""
    (folder / "probed").mkdir()
    environment = dict(ENVIRONMENT, PYTHONPATH="dev", TMPDIR=str(folder / "probed"))
    process = subprocess.Popen([sys.executable, "-c", code, "run", "--no-pictures"],
                               env=environment, stdout=subprocess.PIPE, text=True)
    expect(process.stdout.readline() == "begun\n" and list((folder / "probed").iterdir()),
           "a probe has a temporary folder")
    process.terminate()
    expect(process.wait() == 143 and not list((folder / "probed").iterdir()),
           f"a probe that is ended: status {process.returncode}")


def test_pictures(folder):
    """Gradients are means over the runs that came to a step; dev/plot.py's names of files and
    runs."""
    norms = {"model.layers.0.mlp.up_proj.weight": 2.0}
    log = [{"step": step, "loss": 1.0, "grad_norms": norms} for step in (1, 3)]
    more = [dict(log[0], grad_norms=dict.fromkeys(norms, 8.0))]
    said = python("import json, sys; from ablation import inside; "
                  "steps, norms = inside.mean_norms(json.loads(sys.argv[1])); "
                  "print(steps, norms.round(9).tolist())", json.dumps([more, log]))
    expect(said == "[1, 3] [[4.0], [2.0]]\n", f"one run of two ended early: {said}")
    for name in ("A", "B"):
        (folder / name).mkdir()
        (folder / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    done = subprocess.run([sys.executable, "dev/plot.py", folder / "A/log.jsonl", "-o",
                           folder / "curve"], capture_output=True, text=True, env=ENVIRONMENT)
    expect(done.stdout == f"wrote {folder}/curve.png\n" and (folder / "curve.png").exists(),
           f"-o without an ending: {done.stdout}{done.stderr}")
    said = python("import plot, sys; print(*map(plot.name_of, sys.argv[1:]))",
                  str(folder / "A/log.jsonl"), str(folder / "B"), "C.jsonl")
    expect(said == "A B C.jsonl\n", f"names of runs: {said}")


def test_lock(folder):
    out = stand_in(folder / "lock", "PRE")
    (out / "bin/PRE").write_text(STAND_IN.replace("with open(out",
                                                  "import time; time.sleep(3)\nwith open(out"))
    first = subprocess.Popen([sys.executable, "dev/ablate.py", "--mode", "PRE", "--out", str(out)],
                             env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    while not (out / "study.json").exists():
        time.sleep(0.01)
    second, beside = ablate("--mode", "PRE", "--out", out), ablate("--out", out, "--report")
    expect(second.returncode == 1 and "in use" in second.stderr, f"two at a time: {second.stderr}")
    expect(beside.returncode == 0 and (out / "index.html").exists(),
           f"a report beside it: {beside.stderr}")
    expect(first.wait() == 0, "the first goes on")


def test_gpus(folder):
    """One run for each GPU at a time, which sees that GPU alone; --jobs deals them out in turn."""
    (folder / "fake").mkdir()
    smi = folder / "fake/nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n"
                   "echo 'GPU 1: NVIDIA H100 (UUID: GPU-2)'\n")
    smi.chmod(0o755)
    for visible, jobs, want in ((None, None, ["0", "1"]), (None, 3, ["0", "1", "0"]),
                                ("5,7", None, ["5", "7"]), ("GPU-2", None, ["GPU-2"])):
        environment = {**{name: value for name, value in ENVIRONMENT.items()
                          if name != "CUDA_VISIBLE_DEVICES"},
                       "PATH": f"{folder}/fake:{os.environ['PATH']}", "PYTHONPATH": "dev"}
        environment.update({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
        code = ("import ablate; print([slot['CUDA_VISIBLE_DEVICES'] for slot in "
                f"ablate.environments({{'device': 'cuda'}}, {jobs})])")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env=environment)
        expect(done.stdout.strip() == str(want), f"GPUs with CUDA_VISIBLE_DEVICES={visible}, "
                                                 f"--jobs {jobs}: {done.stdout}{done.stderr}, "
                                                 f"expected {want}")


def test_own_placement(folder):
    """doc/adding.md: a row in modes.h, and dev/ablate.py compares it. In 20 steps such a model
    learns less than the frequencies of bytes."""
    tree = folder / "tree"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True,
                           text=True).stdout.split() or ["."]
    tree.mkdir()
    subprocess.run(["sh", "-c", 'tar cf - "$@" | tar xf - -C "$0"', str(tree),
                    *[name for name in files if name == "." or os.path.exists(name)]], check=True)
    row = re.search(r"^    (MODE\( ?MINE,.*\\)$", (tree / "doc/adding.md").read_text(), re.M)
    expect(row is not None, "doc/adding.md has the row of a placement called MINE")
    modes = tree / "llmc/modes.h"
    modes.write_text(modes.read_text().replace("MODE(PRE, ", row[1] + "\nMODE(PRE, ", 1))
    small = [*SMALL[:-2], "--make", "DEVICE=cpu PREC=fp32 CFLAGS=-O1"]
    done = subprocess.run([sys.executable, "dev/ablate.py", "--mode", "PRE,MINE", "--steps",
                           "20", *small, "--out", "mine"], capture_output=True, text=True,
                          env=ENVIRONMENT, cwd=tree)
    expect(done.returncode == 0 and "MINE-seed1: collapsed" in done.stdout
           and "MINE" in (tree / "mine/index.html").read_text(),
           f"a placement of one's own: {done.stdout}{done.stderr}")


def main():
    tests = (test_kills, test_own_placement, test_gpus, test_largest_rate, test_only, test_outcomes,
             test_checks, test_names, test_growth_and_budgets, test_refusals, test_lock,
             test_checkpoints, test_builds, test_probe_ends, test_pictures)
    asked = sys.argv[1:] or ["test"]
    tests = [test for test in tests if any(word in test.__name__ for word in asked)]
    # each in folders of its own
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(test, pathlib.Path(folder)) for test in tests]:
            done.result()
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
