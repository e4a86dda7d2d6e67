#!/usr/bin/env python3
"""The papers' claims, one by one: runs what is missing of the studies, and writes RESULTS.md.

    python3 dev/repro/repro.py                    everything that is missing, the cheapest claims
                                                  first; after a kill the same command goes on
    python3 dev/repro/repro.py --budget 30        as much of it as fits into 30 minutes
    python3 dev/repro/repro.py moe depth@128      these studies alone ("calculations" too)
    python3 dev/repro/repro.py --fresh nowarmup   that study anew; after a kill leave --fresh out
    python3 dev/repro/repro.py flagship           the study on real text, which needs its data:
                                                  python3 data/get.py debian --vocab bytes
    python3 dev/repro/repro.py --timing           times of steps, placements in turn, which need a
                                                  machine with nothing else to do
    python3 dev/repro/repro.py --table            no runs: RESULTS.md from results/ as it lies there
    python3 dev/repro/repro.py --costs            no runs: updates each study's line "# cost:"

Results are committed, also those of a part of a study: a run that is in results/ with the study's
flags is not trained again, whatever machine it was made on. Runs that are to be committed are made
from a worktree of one clean commit; what this script writes does not make it dirty.

claims.toml has the claims, questions.toml our own, STUDY.toml the studies (each for dev/ablate.py,
which trains and resumes them, in ablations/repro/STUDY), results/STUDY.json what came out,
statistic.py the figures and the tests, report.py the rule for verdicts. STUDY_seeds has more seeds
of STUDY, at each arm's best rate there. STUDY@WIDTH is the study at a width of its table
[at.WIDTH]: heads, experts' ffn and the start's deviation go with the width, other flags are as that
table says.
Needs numpy, scipy and matplotlib; studies with "probe" also the packages that dev/probe.py names.
"""
import argparse
import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]
import ablate
import calculations
import report
from ablation.study import DIVERGED, ENDED, need, read_json, write_json

# Floating-point operations a second of one core, in whole training steps by width: fp32 on an AMD
# EPYC (one short run of each, 2026-11-22), bf16 on a Xeon with AMX (the study muon24, 2026-11-28).
# BESIDES: seconds that a run takes besides (starting, validating).
CORE = {"fp32": {32: 20e9, 64: 31e9, 128: 43e9, 256: 43e9},          # at 256: not measured
        "bf16": {128: 170e9}}
BESIDES = 1.5
# flags left out of the count of operations
COUNTED_ALIKE = ("make", "mode", "seed", "lr", "mix-ratio", "sdd", "data")
# Results without "make": these studies were built with bf16, all others with fp32.
IN_BF16 = ("flagship", "flagship48", "flagship_bf16", "flagship_rates", "flagship_sides", "muon",
           "muon24", "muon24_seeds", "muon_documents", "muon_documents_seeds", "muon_seeds")
# the figures of probe.json that claims read
PROBED = ("similarity", "similarity_by_distance", "hard_rank", "soft_rank", "edr_harmonic",
          "embedding_spectrum", "condition")


def read_claims():
    """The papers' claims, "claim", and our own questions, "question"."""
    with open(HERE / "claims.toml", "rb") as file, open(HERE / "questions.toml", "rb") as more:
        return dict(tomllib.load(file), **tomllib.load(more))


def plain_study(name):
    """A study's table for dev/ablate.py, without its widths: of STUDY@WIDTH heads and ffn go with
    the width (the first of several), a start's deviation with 1/sqrt of it."""
    base, _, width = name.partition("@")
    with open(HERE / f"{base}.toml", "rb") as file:
        table = tomllib.load(file)
    widths = table.pop("at", {})
    if not width:
        return table
    own = table["width"]
    ratio = int(width) / ablate.as_list(own)[0]
    for axis in ("heads", "ffn"):
        if axis in table:
            table[axis] = max(1, round(table[axis] * ratio))
    if "init-std" in table:
        table["init-std"] = [float(f"{std / math.sqrt(ratio):.3g}") for std in table["init-std"]]
    return dict(table, **{"width": int(width), **widths[width]})


def read_study(name):
    """A study's axes, name -> list of texts; "make" is one, as figures go with the precision."""
    options = ("compare", "only", "probe", "probe-tokens")               # dev/ablate.py's own
    return {axis: [ablate.as_text(one) for one in ablate.as_list(value)]
            for axis, value in ({"make": ""} | plain_study(name)).items() if axis not in options}


def read_only(name):
    """The tables of a study's `only`; [] if it runs all combinations."""
    return ablate.read_only(name, plain_study(name))


def study_runs(name):
    """The axes' values of every run of a study."""
    return ablate.combinations({"axes": read_study(name), "only": read_only(name), "searched": []})


def studies():
    """All of them, each followed by itself at other widths."""
    names = []
    for path in sorted(HERE.glob("*.toml")):
        if path.stem not in ("claims", "questions"):
            with open(path, "rb") as file:
                names += [path.stem] + [f"{path.stem}@{width}"
                                        for width in tomllib.load(file).get("at", {})]
    return names


def claims_of(table, study):
    """The claims and questions that read it, at whatever width."""
    study = study.partition("@")[0]
    return [claim for claim in table["claim"] + table["question"] if study == claim.get("study")
            or study in claim.get("reads", [])]


# -------------------------------------------------------------------------------------------- costs

def trainer():
    return calculations.build("SPAN", "DEVICE=cpu", "PREC=fp32")


def flops_per_token(binary, axes):
    words = [word for name, value in axes.items() for word in (f"--{name}", value)]
    return calculations.config_of(binary, *words)["flops_per_token"]


def cost_of(runs, binary, precision):
    """Operations and seconds of one core of a study's runs, by the placement-free count of SPAN's
    trainer."""
    @functools.cache
    def flops_of(*axes):
        return flops_per_token(binary, dict(axes))

    flops, seconds, speeds = 0.0, 0.0, CORE[precision]
    for run in runs:
        same = [pair for pair in run.items() if pair[0] not in COUNTED_ALIKE]
        work = flops_of(*same) * int(run["batch"]) * int(run["seq"]) * int(run["steps"])
        flops, seconds = flops + work, seconds + work / speeds[int(run["width"])] + BESIDES
    return flops, seconds


def cost_line(name, binary):
    runs, precision = study_runs(name), plain_study(name)["make"].partition("PREC=")[2]
    flops, seconds = cost_of(runs, binary, precision)
    return f"# cost: {len(runs)} runs, {flops:.2e} FLOP, {seconds / 60:.1f} minutes of one core"


def cost_lines(base, binary):
    """"# cost: ..." of a study, and "# cost@WIDTH: ..." of each of its widths."""
    return [cost_line(name, binary).replace("# cost", "# cost" + name[len(base):])
            for name in studies() if name.partition("@")[0] == base]


def stated_minutes(name):
    base, at, width = name.partition("@")
    found = re.search(rf"^# cost{at}{width}: .* ([0-9.]+) minutes",
                      (HERE / f"{base}.toml").read_text(), re.M)
    return float(found[1]) if found else math.inf


def write_costs(names):
    binary = trainer()
    for name in names:
        path = HERE / f"{name}.toml"
        lines = [line for line in path.read_text().splitlines() if not line.startswith("# cost")]
        lines[1:1] = cost_lines(name, binary)                              # below what the study is
        write_whole(path, "\n".join(lines) + "\n")
        print(f"{name}: {lines[1][2:]}, {len(claims_of(read_claims(), name))} claims")


# ---------------------------------------------------------------------------- the record of one run

def digits(value, n=5):
    """n significant digits; what is not finite is null."""
    return ([digits(one, n) for one in value] if isinstance(value, (list, np.ndarray))
            else None if value is None or not math.isfinite(value)
            else float(f"{value:.{n}g}"))


def shortened(value):
    return ({name: shortened(one) for name, one in value.items()} if isinstance(value, dict)
            else digits(value, 4))


def layer_norms(line, layers):
    """A line of diagnostics: norms by layer of the four groups of weights, and the stream's
    figures."""
    from statistic import GROUPS
    found = {name: [] for name in GROUPS}
    for name, parts in GROUPS.items():
        for layer in range(layers):
            squares = [math.nan if norm is None else norm ** 2
                       for tensor, norm in line["grad_norms"].items()
                       if tensor.startswith(f"model.layers.{layer}.")
                       and tensor.split(".")[-2] in parts]
            found[name].append(math.sqrt(sum(squares)))
    return dict(found, **{name: line[name] for name in ("residual_rms", "attn_ratio", "ffn_ratio")})


def kept_layers(run):
    """Diagnostics at step 1, at step 100, at the last of them ("end"), and over the last quarter of
    the run ("late"): geometric means, as norms there span many orders."""
    lines = [line for line in run.log if "grad_norms" in line]
    layers, steps = len(lines[0]["residual_rms"]) if lines else 0, int(run.config["flags"]["steps"])
    found = {line["step"]: layer_norms(line, layers) for line in lines}
    late = [norms for step, norms in found.items() if step > max(1, 0.75 * steps)]
    kept = {str(step): found[step] for step in (1, 100) if step in found}
    if late:
        kept["end"] = late[-1]
        logs = {name: np.log(np.maximum(np.array([one[name] for one in late], float), 1e-300))
                for name in late[0]}
        kept["late"] = {name: np.exp(np.mean(values, axis=0)) for name, values in logs.items()}
    return {when: {name: digits(list(values), 4) for name, values in norms.items()}
            for when, norms in kept.items()}


def kept_parts(table, name):
    """The parts of a log that a study's results keep, at any width."""
    return table["keep"].get(name.partition("@")[0], [])


def kept_run(run, keep):
    """An ended run as results/STUDY.json has it."""
    steps = int(run.config["flags"]["steps"])
    losses, half = run.series("loss")[1], steps // 2
    values = dict(zip(*run.series("loss")))
    last = max(values, default=0)
    found = {"axes": run.axes, "status": run.status, "seconds": run.seconds,
             "commit": run.config["git"], "steps": steps,
             "parameters": run.config["parameters"],
             "unigram": digits(run.config["unigram_entropy"]), "loss": digits(run.last_loss(), 6),
             "early": digits(float(np.mean(losses[:half])) if len(losses) >= half > 0 else None),
             "validations": [[line["step"], digits(line["val_loss"], 6)] for line in run.log
                             if "val_loss" in line]}
    if "curve" in keep:
        found["curve"] = [digits(values.get(step), 4) for step in range(1, last + 1)]
    if "layers" in keep or "late" in keep:
        found["layers"] = {when: norms for when, norms in kept_layers(run).items()
                           if "layers" in keep or when == "late"}
    probe = read_json(run.folder / "probe.json")
    if probe:
        found["probe"] = {name: shortened(probe[name]) for name in PROBED if name in probe}
    return found


def write_whole(path, text):
    """Whole or not at all: a kill leaves the old file."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def write_results(path, found):
    """One line for each run, so that changes can be read."""
    runs = ",\n".join(json.dumps(run) for run in found["runs"])
    text = json.dumps(dict(found, runs=[]), indent=1)
    if runs:
        text = text.replace('"runs": []', '"runs": [\n' + runs + "\n ]")
    path.parent.mkdir(exist_ok=True)
    write_whole(path, text + "\n")


def run_key(flags, axes):
    """The same text for two runs that have all flags in common."""
    return json.dumps(flags | axes, sort_keys=True)


def by_key(name, found):
    built = f"DEVICE=cpu PREC={'bf16' if name in IN_BF16 else 'fp32'}"
    return {run_key({"make": built} | found["flags"], run["axes"]): run for run in found["runs"]}


def read_runs(name):
    """The runs of results/STUDY.json, by key."""
    return by_key(name, read_json(HERE / f"results/{name}.json") or {"flags": {}, "runs": []})


def arranged(name, have, machine):
    """A study's results by its TOML of today: its axes, and the runs of `have` it asks for."""
    every, only = read_study(name), read_only(name)
    axes = {axis: values for axis, values in every.items()
            if len(values) > 1 or axis in ("mode", "seed")}
    return {"study": name, "machine": machine, "axes": axes, **({"only": only} if only else {}),
            "flags": {axis: values[0] for axis, values in every.items() if axis not in axes},
            "runs": [dict(have[key], axes={axis: run[axis] for axis in axes})
                     for run in study_runs(name) for key in [run_key({}, run)] if key in have]}


def read_results():
    """Study -> its results; a grid that was widened since lacks the runs of its new part."""
    found = {path.stem: read_json(path) for path in sorted((HERE / "results").glob("*.json"))}
    return {name: arranged(name, by_key(name, one), one["machine"]) if "runs" in one else one
            for name, one in found.items()}


def harvest(name, out, keep):
    """Brings results/STUDY.json up to date with the runs that have ended in the folder; others that
    it has stay."""
    kept = read_json(out / "study.json")
    if kept is None:
        return
    path, study = HERE / f"results/{name}.json", ablate.make_study(out, kept)
    have = read_runs(name)
    have |= {run_key({"make": kept["make"]} | study.flags, run.axes): kept_run(run, keep)
             for run in study.runs if run.status in ENDED}
    found = arranged(name, have, kept["machine"])
    if found["runs"]:
        write_results(path, found)


# ------------------------------------------------------------------------------------------ running

def missing(name):
    """The runs of a study without a result."""
    done = read_runs(name)
    return [run for run in study_runs(name) if run_key({}, run) not in done]


def without_probe(name):
    """How many results of a study that asks for probes have none."""
    runs = read_runs(name).values() if plain_study(name).get("probe") else []
    return sum("probe" not in run and run["status"] != DIVERGED for run in runs)


def left_to_train(name, out):
    """A study's table for dev/ablate.py: all of it, or where results/ has runs that the folder
    lacks, its other runs as rows of `only`."""
    table, every, kept = plain_study(name), study_runs(name), read_json(out / "study.json")
    begun = ablate.combinations(kept) if kept else []
    wanted = missing(name) + [run | {"make": kept["make"]} for run in begun]
    asked = [run for run in every if run in wanted]
    if len(asked) == len(every):
        return table
    several = [axis for axis, values in read_study(name).items() if len(values) > 1]
    return dict(table, only=[{axis: run[axis] for axis in several} for run in asked])


def has_data(name):
    """Whether the study's data is there; most need none."""
    data = plain_study(name).get("data")
    return not data or (ROOT / data).is_dir()


def need_data(name):
    """Ends the program if a study's data is not there."""
    if not has_data(name):
        sys.exit(f"error: {name}: expected {plain_study(name)['data']}, found no such folder\n"
                 "  -> python3 data/get.py debian --vocab bytes")


def commit_of(root):
    """The commit, and "-dirty" if a tracked file differs from it that this script does not write:
    one study's results are no change of the next one's sources."""
    git = lambda *words: subprocess.run(["git", "-C", str(root), *words], capture_output=True,
                                        text=True)
    written = ("results", "RESULTS.md", "*.png")
    changed = git("diff", "--quiet", "HEAD", "--", ".",
                  *(f":(exclude)dev/repro/{name}" for name in written)).returncode == 1
    found = git("describe", "--always", "--exclude", "*").stdout.strip() or "unknown"
    return found + "-dirty" * changed


def as_toml(value):
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {as_toml(one)}' for name, one in value.items())}}}"
    return json.dumps(value)


def run_study(name, out, deadline, jobs):
    """Trains what is missing through dev/ablate.py; at the deadline runs in work save a checkpoint
    and end. Whether there was time enough."""
    need_data(name)
    commit = commit_of(ROOT)
    if commit.endswith("-dirty"):
        print(f"note: sources differ from commit {commit[:-6]}: no results to be committed\n"
              "  -> git worktree add ../runs, and the same command there", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    asked = out.parent / f"{name}.toml"
    asked.write_text("".join(f"{axis} = {as_toml(value)}\n"
                             for axis, value in left_to_train(name, out).items()))
    words = [sys.executable, str(ROOT / "dev/ablate.py"), str(asked), "--out", str(out)]
    words += ["--jobs", str(jobs)] if jobs else []
    flags = f"{os.environ.get('MAKEFLAGS', '')} GIT={commit}".strip()
    work = subprocess.Popen(words, cwd=ROOT,
                            env=dict(os.environ, MPLBACKEND="Agg", MAKEFLAGS=flags))
    try:
        work.wait(max(0.0, deadline - time.time()) if deadline else None)
    except subprocess.TimeoutExpired:
        work.send_signal(signal.SIGINT)
        work.wait()
        return False
    except KeyboardInterrupt:
        work.wait()
        raise
    return True


def remove(name):
    """Results and runs of a study, so that it is run anew."""
    (HERE / f"results/{name}.json").unlink(missing_ok=True)
    shutil.rmtree(ROOT / "ablations/repro" / name, ignore_errors=True)


def write_calculations():
    write_json(HERE / "results/calculations.json",
               {"study": "calculations", "figures": calculations.compute_all()})


def write_timing(rounds=10, modes=("PRE", "SPAN", "SDD"),
                 flags=("--width", "1280", "--heads", "20", "--layers", "2", "--seq", "256",
                        "--batch", "1")):
    """Rounds in each of which every placement trains a few steps, in a new order: what the machine
    does meanwhile reaches all alike."""
    binaries = {mode: calculations.build(mode) for mode in modes}
    found = []
    for i in range(rounds):
        times = {}
        for mode in modes[i % len(modes):] + modes[:i % len(modes)]:
            with tempfile.TemporaryDirectory() as folder:
                words = ["--steps", "8", "--warmup", "2", "--val-every", "0", "--save-every", "0",
                         "--norms-every", "0", "--sample", "0", "--val-tokens", "1", "--out",
                         f"{folder}/run"]
                subprocess.run([binaries[mode], *flags, *words], check=True,
                               stdout=subprocess.DEVNULL)
                log = ablate.read_log(f"{folder}/run/log.jsonl")
                times[mode] = statistics.median(line["ms"] for line in log
                                                if "ms" in line and line["step"] > 2)
        found.append(times)
        print(f"round {i + 1}: " + ", ".join(f"{mode} {ms:.1f} ms" for mode, ms in times.items()),
              flush=True)
    write_json(HERE / "results/timing.json", {"study": "timing", "flags": " ".join(flags),
                                              "machine": ablate.machine(), "rounds": found})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("studies", nargs="*", help="these alone; default: all that a claim reads")
    parser.add_argument("--budget", type=float, metavar="MINUTES",
                        help="stop after so many minutes; the same command goes on")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: one for each core")
    parser.add_argument("--timing", action="store_true",
                        help="measure times of steps, on a machine with nothing else to do")
    parser.add_argument("--table", action="store_true", help="no runs: RESULTS.md alone")
    parser.add_argument("--fresh", action="store_true",
                        help="these studies anew: their results and runs are removed first")
    parser.add_argument("--costs", action="store_true",
                        help="no runs: the lines \"# cost\" of each study")
    options = parser.parse_args()
    table, known = read_claims(), [*studies(), "calculations"]
    for name in options.studies:
        if name not in known:
            sys.exit(f"error: no study {name}\n  -> one of {', '.join(known)}")
    chosen = options.studies or known
    if options.fresh and not options.studies:
        sys.exit("error: --fresh without a study\n  -> python3 dev/repro/repro.py --fresh nowarmup")
    if options.fresh and (options.table or options.timing or options.costs):
        sys.exit("error: --fresh: expected studies to run anew, found an option that runs none\n"
                 "  -> leave out --table, --timing and --costs")
    for flag, value in (("budget", options.budget), ("jobs", options.jobs)):
        if value is not None and not value > 0:
            sys.exit(f"error: --{flag} {value:g}: expected a number above 0\n"
                     f"  -> --{flag} 2, or leave it out")
    if not (options.studies or options.costs):
        chosen = [name for name in known if name == "calculations" or has_data(name)]
    if not (options.table or options.costs):
        need(["matplotlib"])
    if options.costs:
        write_costs(sorted({name.partition("@")[0] for name in chosen if name != "calculations"}))
        return
    if options.fresh:
        trained = [name for name in options.studies if name != "calculations"]
        for name in trained:
            need_data(name)
        if any(plain_study(name).get("probe") for name in trained):
            need(["torch", "transformers"])
        for name in options.studies:
            remove(name)
    if options.timing:
        write_timing()
    elif not options.table:
        deadline = time.time() + 60 * options.budget if options.budget else None
        if "calculations" in chosen:
            write_calculations()
        for name in sorted((name for name in chosen if name != "calculations"),
                           key=lambda name: (name.endswith("_seeds"), stated_minutes(name)
                                             / max(1, len(claims_of(table, name))))):
            out = ROOT / "ablations/repro" / name
            keep = kept_parts(table, name)
            harvest(name, out, keep)
            if not missing(name):
                count = without_probe(name)
                gap = f", {count} of them without a probe" if count else ""
                print(f"{name}: all results are committed{gap}; --fresh {name} runs it anew",
                      flush=True)
                continue
            in_time = (not (deadline and time.time() >= deadline)
                       and run_study(name, out, deadline, options.jobs))
            harvest(name, out, keep)
            if not in_time:
                print("the time is up: the same command goes on", flush=True)
                break
    report.write(table, HERE, pictures=not options.table)
    left = {name: len(runs) for name in chosen
            if name != "calculations" and (runs := missing(name))}
    if left and not (options.table or options.timing or options.budget):
        sys.exit("error: runs without a result: "
                 f"{', '.join(f'{name} {count}' for name, count in left.items())}\n"
                 "  -> see above; the same command tries them again, and --fresh STUDY begins anew "
                 "where the folder has runs of other flags")


if __name__ == "__main__":
    main()
