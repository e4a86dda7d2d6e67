#!/usr/bin/env python3
"""From a question to a picture: trains every combination of the values given, compares them, and
writes a page.

    python3 dev/ablate.py --mode PRE,SPAN --seed 1,2,3 --layers 6,24 --lr 1e-3,3e-3 --steps 300 \
                          --out ablations/depth
    python3 dev/ablate.py study.toml            the same from a file: mode = ["PRE", "SPAN"],
                                                layers = [6, 24], steps = 300, ...

In a file  only = [{mode = "PRE", lr = 3e-3}, {mode = "SPAN", lr = 1e-3}]  trains only the
combinations that have the values of one of its tables: each placement at a rate of its own.

Any flag of ./train_gpt may be given, with one value or several, and --mode, the placement. Runs
with the same seed are pairs: the same order of the data, and the same bits in every weight they
have in common. The values of --compare (default: mode, or else the first flag with several values)
are set against the first of them; of several --lr each gets its best; every other flag with several
values makes panels of their own.

The study's folder is named by its content, so another command is another study. Killed or stopped,
the same command goes on from the last checkpoints, to the same result. With the same --out and more
values, a study grows. --report writes the page of what there is, at any time. Needs numpy, scipy
and matplotlib; --probe also the packages that dev/probe.py names.
"""
import argparse
import concurrent.futures
import dataclasses
import difflib
import fcntl
import hashlib
import itertools
import json
import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from ablation.study import (COLLAPSED, DIVERGED, ENDED, FAILED, FINISHED, KILLED, WAITING, Run,
                            Study, die_with_parent, need, read_json, read_log, read_run,
                            write_json)

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSION = 1
EXIT_DIVERGED = 3                             # the trainer's exit status
# flags that a study sets itself, or that train nothing
NOT_FOR_STUDIES = ("resume", "from", "show", "eval", "sample", "prompt")
BUDGETS = ("tokens", "flops", "minutes")
EXAMPLE = "python3 dev/ablate.py --mode PRE,SPAN --seed 1,2,3 --steps 200"


def stop(what, hint):
    sys.exit(f"error: {what}\n  -> {hint}")


# -------------------------------------------------------------------------------------- the request

def add_axis(axes, name, values):
    name = name.replace("_", "-")
    if name in NOT_FOR_STUDIES:
        stop(f"--{name} is not for a study",
             "leave it out; each run is a folder of its own, which ./train_gpt --from samples from")
    if name in axes:
        stop(f"--{name} is given twice", f"give it once, with all its values: --{name} A,B")
    if not values or not all(values) or len(set(values)) < len(values):
        stop(f"--{name} {','.join(values)}: expected values that differ, with commas between them",
             f"--{name} A,B")
    axes[name] = values


def parse_flags(words):
    """Flags of the trainer, each with its values."""
    axes, words = {}, list(words)
    while words:
        word = words.pop(0)
        if not re.match(r"--[a-z]", word):
            stop(f"expected a flag, found \"{word}\"",
                 "values follow their flag, with commas and no spaces between them: " + EXAMPLE)
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                stop(f"{word} needs a value", f"{word} A, or several: {word} A,B")
            value = words.pop(0)
        add_axis(axes, name, value.split(","))
    return axes


def trainer_flags():
    """The table of llmc/run/flags.h: name -> (kind, low, high, choices)."""
    def number(text):
        base, _, shift = text.partition("<<")
        return float(base) * 2 ** int(shift or 0)
    files = ("run/flags.h", "run/schedule.h", "init.h", "modes.h")
    text = "".join((ROOT / "llmc" / name).read_text() for name in files)
    flags = {}
    row = r'^FLAG\((\w+), (\w+)\([^,()]*(?:, (.*?))?\), ["\\]'
    for name, kind, more in re.findall(row, text, re.M):
        low, high, choices = 0, 0, ["off", "on"] if kind == "SWITCH" else [""]
        if kind in ("INT", "NUMBER"):
            low, high = map(number, more.split(","))
        elif kind == "CHOICE":                             # "a|b", or the rows of another table
            table = re.search(r"\((\w+)_TABLE\)", more)
            choices = [word for words in re.findall(r'"(.*?)"', more) for word in words.split("|")]
            if table:
                choices += re.findall(rf'^{table[1]}\(\w+, *"(.*?)"', text, re.M)
        flags[name.replace("_", "-")] = kind, low, high, choices
    return flags


def nearest(word, known, before=""):
    """A suggestion for a mistyped word, if one is near."""
    found = difflib.get_close_matches(word, known, 1, 0.5)
    return f"did you mean {before}{found[0]}? " if found else ""


def check_value(name, value, kind, low, high, choices):
    """Stops at a value that the trainer would refuse whatever the other flags are."""
    if kind in ("CHOICE", "SWITCH"):
        if value not in choices:
            stop(f"--{name} {value}: expected {', '.join(choices[:-1])} or {choices[-1]}",
                 nearest(value, choices) or f"--{name} {choices[0]}")
    elif kind != "TEXT":
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not low <= number <= high or (kind == "INT" and number != int(number)):
            what = "a whole number" if kind == "INT" else "a number"
            stop(f"--{name} {value}: expected {what} from {low:g} to {high:g}",
                 f"./train_gpt --help says what --{name} is")


def check_axes(axes, options, built):
    """Stops at an unknown placement, flag or value. built: placements with a trainer."""
    modes = re.findall(r"^MODE\((\w+),", (ROOT / "llmc/modes.h").read_text(), re.M) + ["FUSE"]
    flags = trainer_flags()
    for mode in axes.get("mode", ()):
        if mode not in modes and mode not in built:
            stop(f"--mode {mode}: expected a placement, found none of this name",
                 f"{nearest(mode.upper(), modes)}known are {', '.join(modes)}")
    for name, values in axes.items():
        if name != "mode" and name not in flags:
            known = ["mode", *(name.replace("_", "-") for name in vars(options) if name != "only"),
                         *flags]
            stop(f"unknown flag --{name}",
                 nearest(name, known, "--") + "./train_gpt --help lists the flags of a run, "
                 "python3 dev/ablate.py --help those of a study")
        if name == "mode":
            continue
        for value in values:
            check_value(name, value, *flags[name])
        if flags[name][0] in ("INT", "NUMBER") and len(set(map(float, values))) < len(values):
            stop(f"--{name} {','.join(values)}: expected numbers that differ", f"--{name} A,B")
    rates = axes.get("lr", [])
    if (len(rates) > 1 or options.largest_lr) and not all(float(rate) > 0 for rate in rates):
        stop(f"--lr {','.join(rates)}: expected rates above 0", "--lr 1e-3,2e-3")


def as_list(value):
    return value if isinstance(value, list) else [value]


def is_plain(value):
    return all(isinstance(one, (str, int, float)) for one in as_list(value))


def read_only(path, table):
    """Takes `only` out of a file's table: tables of flags, each with a value or a list of them, as
    name -> list of texts."""
    only = table.pop("only", [])
    if not isinstance(only, list) or not all(isinstance(row, dict) and all(map(is_plain,
                                                                               row.values()))
                                             for row in only):
        stop(f"{path}: only = {only!r}: expected a list of tables",
             'only = [{mode = "PRE", lr = 3e-3}]')
    return [{name.replace("_", "-"): list(map(as_text, as_list(value)))
             for name, value in row.items()} for row in only]


def check_only(only, axes):
    for name, values in (pair for row in only for pair in row.items()):
        for value in values:
            if value not in axes.get(name, []):
                stop(f"only = ... {name} = {value}: expected one of this study's values of {name}, "
                     f"{', '.join(axes.get(name, ['none']))}", f"{name} = [{value}, ...]")


def read_toml(path):
    """A file of the same names, each with a value or a list of them; and its `only`."""
    try:
        import tomllib
    except ModuleNotFoundError:
        stop("expected Python 3.11 or newer to read TOML", "give the flags on the command line")
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        stop(f"cannot read {path}: {error.strerror}",
             f"the path of a TOML file, or flags: {EXAMPLE}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        stop(f"{path}: {error}", 'lines like  mode = ["PRE", "SPAN"]')
    only = read_only(path, table)
    for name, value in table.items():
        if not is_plain(value):
            stop(f"{path}: {name} = {value!r}: expected a number, a text, true or false, or a list "
                 "of them", f"{name} = [1, 2]")
    return {name.replace("_", "-"): value for name, value in table.items()}, only


def as_text(value):
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else f"{value:.15g}"


def option_words(path, name, value, default):
    """An option of a file as words of a command line."""
    switch = isinstance(default, bool)
    if isinstance(value, list) or isinstance(value, bool) != switch:
        stop(f"{path}: {name} = {value!r}: expected {'true or false' if switch else 'one value'}",
             "python3 dev/ablate.py --help lists the options")
    return [f"--{name}"] * value if switch else [f"--{name}={as_text(value)}"]


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False,
                                     usage="ablate.py [STUDY.toml] [--mode A,B] [--FLAG "
                                           "VALUE,VALUE...] [options]")
    parser.add_argument("--out", help="the study's folder; default: ablations/ and all flags")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: one for each GPU, on "
                                                 "the CPU one for each core")
    parser.add_argument("--tokens", type=float,
                        help="budget of a run in tokens, instead of --steps")
    parser.add_argument("--flops", type=float, help="budget of a run in floating-point operations "
                                                    "(flops_per_token of config.json)")
    parser.add_argument("--minutes", type=float, help="budget of a run in minutes of training on "
                                                      "this machine, by a trial at the start")
    parser.add_argument("--compare", help="the flag whose values are compared")
    parser.add_argument("--largest-lr", action="store_true",
                        help="also search the largest stable learning rate of each, by bisection, "
                             "from --lr on")
    parser.add_argument("--within", type=float,
                        help="a rate is stable if its loss ends within so many nats of the best "
                             "rate's (default: 0.5)")
    parser.add_argument("--probe", action="store_true", help="look into every finished run "
                        "(dev/probe.py, needs torch and transformers): similarity of layers, "
                        "ranks, spectra, condition numbers")
    parser.add_argument("--probe-tokens", type=int, default=0,
                        help="tokens of a probe; default: ten for each channel of the ffn")
    parser.add_argument("--report", action="store_true",
                        help="no training: the page of the runs that are there")
    parser.add_argument("--make", default="", metavar="'DEVICE=cpu PREC=fp32'",
                        help="variables for make")
    table, only = {}, None                          # None: no file
    if argv and not argv[0].startswith("-"):
        path, *argv = argv
        table, only = read_toml(path)
        defaults = {name.replace("_", "-"): value
                    for name, value in vars(parser.parse_args([])).items()}
        argv = [word for name in list(table) if name in defaults
                for word in option_words(path, name, table.pop(name), defaults[name])] + argv
    options, words = parser.parse_known_args(argv)
    options.only = only
    axes = parse_flags(words)
    for name, value in table.items():
        if name not in axes:                                   # the command line wins
            add_axis(axes, name, list(map(as_text, as_list(value))))
    check_only(only or [], {"mode": ["SPAN"], "seed": ["1"]} | axes)
    for name in (*BUDGETS, "within"):
        value, example = getattr(options, name), "0.5" if name == "within" else "1e6"
        if value is not None and not 0 < value < math.inf:
            stop(f"--{name} {value}: expected a number above 0", f"--{name} {example}")
    given = ([name for name in BUDGETS if getattr(options, name) is not None]
             + ["steps"] * ("steps" in axes))
    if len(given) > 1:
        stop(f"--{' and --'.join(given)}: expected one budget", f"--{given[0]} alone")
    if options.jobs is not None and not 1 <= options.jobs <= 1024:
        stop(f"--jobs {options.jobs}: expected 1 to 1024", "--jobs 2")
    if options.probe_tokens < 0:
        stop(f"--probe-tokens {options.probe_tokens}: expected 0 or more", "--probe-tokens 8192")
    if options.largest_lr and axes and "lr" not in axes:
        stop("--largest-lr begins with a rate that may work", "--lr 1e-3")
    return options, axes


def machine():
    """The machine on which the figures were measured."""
    def first_line(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True,
                                  timeout=20).stdout.strip().partition("\n")[0]
        except (OSError, subprocess.TimeoutExpired):
            return ""
    info = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", info.read_text(), re.M) if info.is_file() else []
    found = {"processor": names[0] if names else platform.machine(), "cores": str(os.cpu_count()),
             "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
             "GPU": first_line("nvidia-smi", "--query-gpu=name,driver_version",
                               "--format=csv,noheader"),
             "compiler": first_line(os.environ.get("CC", "cc"), "--version"),
             "commit": first_line("git", "-C", str(ROOT), "describe", "--always", "--dirty",
                                  "--exclude", "*"), "begun": time.strftime("%Y-%m-%d")}
    return {what: text for what, text in found.items() if text}


# -------------------------------------------------------------------------------- the study as kept

def study_name(axes, options):
    """The study's content as a name: PRE-SPAN-seed-1-2-3-steps-200. A hash ends unclear names."""
    budgets = {name: getattr(options, name) for name in BUDGETS}
    content = {name: [as_text(value)] for name, value in budgets.items() if value}
    content |= {"largest-lr": ["on"]} if options.largest_lr else {}
    content |= {"make": [options.make]} if options.make else {}
    content |= {"only": [json.dumps(options.only)]} if options.only else {}
    content |= {name: values for name, values in axes.items() if name != "mode"}
    parts = axes["mode"] + [word for name in sorted(content) for word in (name, *content[name])]
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))[:80]
    texts = {flag for flag, (kind, *_) in trainer_flags().items() if kind == "TEXT"}
    if name == "-".join(parts) and not content.keys() & (texts | {"make", "only"}):
        return name
    content["mode"] = axes["mode"]
    return f"{name}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]}"


def check_growth(out, kept, asked):
    """Stops at another study. This one may get more modes, seeds, or values of a flag with
    several, and keeps those that a command leaves out; any other difference makes another study."""
    for name in sorted(set(kept["axes"]) | set(asked["axes"])):
        was, now = kept["axes"].get(name), asked["axes"].get(name)
        several = was and now and (len(was) > 1 or name in ("mode", "seed"))
        if was != now and not (several and (set(was) <= set(now) or set(now) <= set(was))):
            stop(f"{out} holds a study with --{name} {','.join(was) if was else '(default)'}, "
                 f"not {','.join(now) if now else '(default)'}",
                 "its own command goes on with it, and may have more modes, seeds, or values of a "
                 "flag that has several; for another study: another --out")
    for name in ("budget", "make", "largest_lr"):
        if kept[name] != asked[name]:
            stop(f"{out} holds a study whose {name} is {kept[name]}, not {asked[name]}",
                 "its own command goes on with it; for another study: another --out")


def check_only_growth(out, kept, asked):
    """Stops at an `only` that leaves out runs of the study, or every run of a new value."""
    runs = combinations(dict(kept, **asked))
    if not all(run in runs for run in combinations(kept)):
        stop(f"{out} has runs that `only` leaves out",
             "its tables and more of them; for another study: another --out")
    for name, values in asked["axes"].items():
        for value in values:
            if (value not in kept["axes"].get(name, [])
                    and not any(run[name] == value for run in runs)):
                stop(f"--{name} {value} is in no run of {out}: its `only` names it in no table",
                     f'a file with a table more: only = [..., {{{name} = "{value}"}}]')


def source_hash():
    """The hash of all files that a trainer is made of."""
    names = ("Makefile", "train_gpt.c*", "llmc/**/*.c", "llmc/**/*.*h", "data/stories.*")
    paths = sorted(path for name in names for path in ROOT.glob(name))
    content = b"".join(path.name.encode() + path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()


def open_study(options, axes):
    """study.json as a dictionary: new, as it was, or grown."""
    if not axes and not options.out:
        stop("expected something to compare", EXAMPLE)
    named = {"mode": ["SPAN"], "seed": ["1"]} | axes
    out = pathlib.Path(options.out or f"ablations/{study_name(named, options)}")
    kept = read_json(out / "study.json")
    if kept is not None and (not isinstance(kept, dict) or kept.get("version") != VERSION):
        stop(f"{out}/study.json is not of version {VERSION}, which this program knows",
             "use the norm.c that wrote it, or another --out")
    if not kept and (not axes or options.report):
        stop(f"{out} holds no study", EXAMPLE)
    if not axes:
        ignored = [name.replace("_", "-")
                   for name in (*BUDGETS, "largest_lr", "within", "make", "only")
                   if getattr(options, name)]
        if ignored:
            stop(f"--{' and --'.join(ignored)}: expected the flags of the study too, found none",
                 f"leave it out, {out} has its own; or give the study's whole command")
        return out, dict(kept, compare=options.compare or kept.get("compare"),
                         probe=options.probe or kept.get("probe", False),
                         probe_tokens=options.probe_tokens or kept.get("probe_tokens", 0))
    check_axes(axes, options, {path.name for path in out.glob("bin/*")})
    for name, value in (("mode", ["SPAN"]), ("seed", ["1"])):
        axes.setdefault(name, kept["axes"][name] if kept else value)
    asked = {"version": VERSION, "command": shlex.join(["python3", "dev/ablate.py"] + sys.argv[1:]),
             "axes": axes, "budget": {name: getattr(options, name) for name in BUDGETS},
             "compare": options.compare, "largest_lr": options.largest_lr,
             "within": options.within or 0.5,
             "make": options.make, "only": options.only or [], "probe": options.probe,
             "probe_tokens": options.probe_tokens}
    if kept:
        check_growth(out, kept, asked)
        # The kept order of flags stays, because it names the runs.
        merged = {name: dict.fromkeys(was + axes[name]) for name, was in kept["axes"].items()}
        asked["axes"] = {name: list(values) for name, values in merged.items()}
        # every rate that was searched has every seed
        seeds = asked["axes"]["seed"]
        asked["searched"] = [dict(row, seed=seed) for row in kept["searched"]
                             if row["seed"] == seeds[0] for seed in seeds]
        if options.only is None:
            asked["only"] = kept.get("only", [])
        check_only_growth(out, kept, asked)
        return out, dict(kept, **asked)
    return out, dict(asked, source=source_hash(), machine=machine(), plans={}, searched=[])


def combinations(kept):
    """The axes' values of every run. Seeds go round last, so that what is there first is a
    comparison already."""
    names = [name for name in kept["axes"] if name != "seed"]
    rest = [dict(zip(names, values))
            for values in itertools.product(*(kept["axes"][name] for name in names))]
    grid = [dict(axes, seed=seed) for seed in kept["axes"]["seed"] for axes in rest]
    if kept.get("only"):
        grid = [axes for axes in grid if any(all(axes[name] in values for name, values
                                                 in row.items()) for row in kept["only"])]
    return grid + [axes for axes in kept["searched"] if axes not in grid]


def run_name(kept, axes):
    several = [name for name in kept["axes"] if name not in ("mode", "seed")
               and (len(kept["axes"][name]) > 1 or (name == "lr" and kept["largest_lr"]))]
    text = "-".join([axes["mode"]] + [name + axes[name] for name in several]
                    + [f"seed{axes['seed']}"])
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", text)


def plan_of(kept, axes):
    """Runs that differ by their seed alone share a plan: {"steps", "tokens_per_step",
    "flops_per_token"}, or {"error": lines}."""
    return kept["plans"].get(run_name(kept, dict(axes, seed="")), {})


def run_command(out, kept, axes):
    """The flags asked for, and a study's defaults for the rest: validations, checkpoints and
    diagnostics by the run's length."""
    steps = plan_of(kept, axes).get("steps", 0)
    flags = {"val-every": max(1, steps // 4), "save-every": max(1, steps // 4),
             "norms-every": max(1, steps // 40)}
    flags.update({name: value for name, value in axes.items() if name != "mode"}, steps=steps)
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    folder = out / "runs" / run_name(kept, axes)
    return [str(out / "bin" / axes["mode"])] + words + ["--sample", "0", "--out", str(folder),
                                                        "--resume", "auto"]


def make_study(out, kept):
    """The study with its runs as they lie on the disk."""
    several = ([name for name, values in kept["axes"].items()
                if len(values) > 1 and name not in ("seed", "lr")]
               + ["lr"] * (len(kept["axes"].get("lr", "")) > 1 and not kept["largest_lr"]))
    compare = kept["compare"] or ("mode" if "mode" in several or not several else several[0])
    if compare not in kept["axes"] or compare == "seed" or compare == "lr" and kept["largest_lr"]:
        stop(f"--compare {compare}: expected one of the flags given: "
             f"{', '.join(name for name in kept['axes'] if name != 'seed')}", "--compare mode")
    tune = "lr" if compare != "lr" and (len(kept["axes"].get("lr", "")) > 1
                                        or kept["largest_lr"]) else None
    shown = {name: values for name, values in kept["axes"].items()
             if len(values) > 1 or name in ("mode", "seed", compare, tune)}
    if tune:
        shown["lr"] = sorted(set(kept["axes"]["lr"]) | {axes["lr"] for axes in kept["searched"]},
                             key=float)
    flags = {name: values[0] for name, values in kept["axes"].items() if name not in shown}
    runs = [read_run(Run(name, {axis: axes[axis] for axis in shown}, out / "runs" / name,
                         run_command(out, kept, axes))) for axes in combinations(kept)
            for name in [run_name(kept, axes)]]
    tokens = {plan["tokens_per_step"] for plan in kept["plans"].values() if "steps" in plan}
    return Study(out, shown, flags, kept["command"], kept["machine"], compare, tune, runs,
                 tokens_per_step=tokens.pop() if len(tokens) == 1 else 0)


# ---------------------------------------------------------------------------- building and planning

def build(out, kept):
    """One trainer for each mode, kept with the study, so that later runs use the same one."""
    for mode in kept["axes"]["mode"]:
        binary = out / "bin" / mode
        if binary.exists():
            continue
        print(f"building {mode}", flush=True)
        made = subprocess.run(["make", "-s", "-C", str(ROOT), "--no-print-directory",
                               "binary", f"NORM_MODE={mode}"] + shlex.split(kept["make"]),
                              capture_output=True, text=True)
        if made.returncode:
            said = "\n  ".join((made.stdout + made.stderr).strip().splitlines()[-8:])
            stop(f"{mode} was not built:\n  {said}", "see above; nothing was trained")
        built = made.stdout.split()[-1]
        kept["device"] = "cuda" if "/cuda-" in built else "cpu"
        # before the first trainer: whatever is killed, its source, variables and device are known
        if not (out / "study.json").exists():
            write_json(out / "study.json", kept)
        binary.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / built, f"{binary}.new")
        os.replace(f"{binary}.new", binary)


def environments(kept, jobs):
    """One for each run at a time: a GPU of its own, or a part of the cores."""
    if kept.get("device") == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        listed = ("" if visible is not None or not shutil.which("nvidia-smi")
                  else subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout)
        gpus = (visible.split(",") if visible
                else [str(i) for i in range(len(re.findall(r"^GPU \d+:", listed, re.M)))] or ["0"])
        return [dict(os.environ, CUDA_VISIBLE_DEVICES=gpus[i % len(gpus)])
                for i in range(jobs or len(gpus))]
    cores = len(os.sched_getaffinity(0))
    jobs = jobs or cores
    return [dict(os.environ, OMP_NUM_THREADS=str(max(1, cores // jobs)), OMP_WAIT_POLICY="passive")
            for _ in range(jobs)]


def time_of_step(command, slots):
    """Milliseconds, the median over short trials, as many at a time as there will be runs."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--steps", "8", "--val-every", "0", "--save-every", "0", "--norms-every", "0",
                 "--sample", "0", "--val-tokens", "1"]
        trials = [subprocess.Popen(command + words + ["--out", f"{folder}/{i}"], env=slot,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                  for i, slot in enumerate(slots)]
        for trial in trials:
            trial.wait()
        logs = [log for i in range(len(slots))
                if (log := pathlib.Path(folder, str(i), "log.jsonl")).is_file()]
        times = [line["ms"] for log in logs for line in read_log(log)
                 if "ms" in line and line["step"] > 2]
    return statistics.median(times) if times else None


def make_plan(out, kept, axes, slots):
    """Steps and cost of a configuration, from the trainer itself, which checks the flags on the
    way; or why it refuses them."""
    set_here = ("steps", "val-every", "save-every", "norms-every", "val-tokens")
    binary = str(out / "bin" / axes["mode"])
    words = [word for name, value in axes.items() if name not in ("mode", "seed")
             for word in (f"--{name}", value)]
    shown = subprocess.run([binary] + words + ["--show", "config"], capture_output=True, text=True,
                           errors="replace")
    if shown.returncode:
        return {"error": (shown.stdout + shown.stderr).strip().splitlines()[-8:]}
    # notes may stand before it
    config = json.loads(shown.stdout[re.search(r"^\{", shown.stdout, re.M).start():])
    flags, budget = config["flags"], kept["budget"]
    data = flags.get("data")
    if kept["largest_lr"] and data and not flags.get("val_data") and not os.path.isdir(data):
        return {"error": ["--largest-lr compares validation losses: expected a folder of shards or "
                          f"--val-data, found --data {data} alone"]}
    plan = {"steps": int(flags["steps"]),
            "tokens_per_step": int(flags["batch"]) * int(flags["seq"]),
            "flops_per_token": config["flops_per_token"]}
    if budget["tokens"] or budget["flops"]:
        plan["steps"] = round((budget["tokens"] or budget["flops"] / plan["flops_per_token"])
                              / plan["tokens_per_step"])
    if budget["minutes"]:
        step = time_of_step([binary] + [word for name, value in axes.items()
                                        if name not in ("mode",) + set_here
                                        for word in (f"--{name}", value)], slots)
        if step is None:
            return {"error": ["a trial of eight steps came to nothing"]}
        plan["steps"] = round(60e3 * budget["minutes"] / step)
    return (plan if plan["steps"] > 0
            else {"error": [f"no step to train: a step is {plan['tokens_per_step']} tokens, "
                            f"{plan['tokens_per_step'] * plan['flops_per_token']:.3g} FLOP"]})


def plan_runs(out, kept, slots):
    """Plans each run without a plan. Stops before training where the trainer refuses one."""
    refused, runs = [], combinations(kept)
    for axes in runs:
        if "steps" not in plan_of(kept, axes):
            plan = make_plan(out, kept, axes, slots[:len(runs)])
            kept["plans"][run_name(kept, dict(axes, seed=""))] = plan
            refused += ["\n  ".join(plan["error"])] if "error" in plan else []
    if refused:
        found = [f"the trainer refuses {refused.count(text)} of the study's combinations:\n  {text}"
                 for text in dict.fromkeys(refused)]
        stop("\n".join(found), "other flags or values; nothing was trained")
    write_json(out / "study.json", kept)


# ----------------------------------------------------------------------------------------- training

def wait_for_lock(folder, seconds=60):
    """The trainer of an ablate.py that was killed may still be saving its last checkpoint."""
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(10 * seconds):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            time.sleep(0.1)
    os.close(handle)


@dataclasses.dataclass
class Work:
    """A run that is training."""
    run: Run
    slot: dict
    process: subprocess.Popen
    begun: float


def start(run, slot):
    run.folder.mkdir(parents=True, exist_ok=True)
    wait_for_lock(run.folder)
    with open(run.folder / "output.txt", "ab") as output:
        process = subprocess.Popen(run.command, env=slot, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   preexec_fn=die_with_parent)
    return Work(run, slot, process, time.time())


def record(work, **outcome):
    """Writes down how a run ended, if it did, and adds this session's seconds to the run's."""
    path = work.run.folder / "outcome.json"
    before = (read_json(path) or {}).get("seconds", 0)
    write_json(path, dict(outcome, seconds=round(before + time.time() - work.begun, 1)))


def finish(work):
    """Writes down and says how a run ended. Status 0: finished; 3: diverged; a signal, or above 128
    (a checkpoint was saved): killed; others: failed."""
    run, code = work.run, work.process.returncode
    killed = code < 0 or code > 128
    status = {0: FINISHED, EXIT_DIVERGED: DIVERGED}.get(code, KILLED if killed else FAILED)
    record(work, status=status, exit=code)
    read_run(run)
    # the last checkpoint is the result; those before it were for a kill, if nobody asked for them
    if status == FINISHED and "--keep-last" not in run.command:
        for checkpoint in sorted(run.folder.glob("step_*"))[:-1]:
            shutil.rmtree(checkpoint, ignore_errors=True)
    loss = run.last_loss()
    print(f"{run.name}: {run.status}" + (f", validation loss {loss:.4f}" if loss is not None
                                         else "") + f", {clock(time.time() - work.begun)}",
          flush=True)
    if status in (FAILED, KILLED):
        print("  " + "\n  ".join([f"exit status {code}; the last lines of {run.folder}/output.txt:"]
                                 + run.tail()), flush=True)


def clock(seconds):
    seconds = int(seconds)
    return (f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            if seconds >= 3600 else f"{seconds // 60}:{seconds % 60:02d}")


def last_step(run):
    """The step a run is at, and its loss as text, from the end of its log."""
    path = run.folder / "log.jsonl"
    if not path.is_file():
        return 0, ""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
        found = re.findall(rb'^\{"step": (\d+), "loss": ([0-9.e+-]+|null)', file.read(), re.M)
    return (int(found[-1][0]), f" loss {float(found[-1][1]):.3f}"
            if found[-1][1] != b"null" else " loss not finite") if found else (0, "")


class Progress:
    """One line every few seconds: runs that have ended, the current runs, the part of all
    floating-point operations that is done, and the ETA."""

    def __init__(self, study, cost):
        self.study, self.cost, self.begun, self.printed = study, cost, time.time(), time.time()
        self.every = 10 if sys.stdout.isatty() else 30
        self.at_start = self.done([])

    def done(self, working):
        ended = [run for run in self.study.runs if run.status in (*ENDED, KILLED, FAILED)]
        whole = sum(self.cost[run.name]["flops"] for run in ended)
        return whole + sum(self.cost[w.run.name]["flops"] * last_step(w.run)[0]
                           / self.cost[w.run.name]["steps"] for w in working)

    def show(self, working):
        if time.time() - self.printed < self.every:
            return
        self.printed = time.time()
        counts = {status: sum(run.status == status for run in self.study.runs)
                  for status in (*ENDED, KILLED, FAILED)}
        ended = ", ".join(f"{count} {status}" for status, count in counts.items()
                          if count or status == FINISHED)
        here = "; ".join(f"{w.run.name} {step}/{self.cost[w.run.name]['steps']}{loss}"
                         for w in working for step, loss in [last_step(w.run)])
        done, total, spent = (self.done(working), sum(cost["flops"] for cost in self.cost.values()),
                              time.time() - self.begun)
        eta = (f", ETA {clock(spent * (total - done) / (done - self.at_start))}"
               if done > self.at_start else "")
        print(f"{clock(spent):>7}  {ended} of {len(self.study.runs)} | {here} | "
              f"{100 * done / total:.0f} %{eta}", flush=True)


def train(out, kept, slots, again=(FAILED, KILLED)):
    """Trains all runs that wait or ended as in `again`, as many at a time as there are slots. A run
    that fails does not stop the others."""
    study = make_study(out, kept)
    cost = {run.name: {"steps": plan["steps"],
                       "flops": plan["steps"] * plan["tokens_per_step"] * plan["flops_per_token"]}
            for run, axes in zip(study.runs, combinations(kept)) for plan in [plan_of(kept, axes)]}
    waiting = [run for run in study.runs if run.status in (WAITING, *again)]
    for run in waiting:
        run.status = WAITING
    print(f"{out}: {len(study.runs)} runs, {len(waiting)} to train, {len(slots)} at a time; "
          f"{sum(c['flops'] for c in cost.values()):.3g} FLOP in all", flush=True)
    working, free, stopped, progress = [], list(slots), [], Progress(study, cost)
    before = {number: signal.signal(number, lambda number, frame: stopped.append(number))
              for number in (signal.SIGINT, signal.SIGTERM)}
    while (waiting or working) and not stopped:
        while waiting and free:
            working.append(start(waiting.pop(0), free.pop(0)))
        time.sleep(0.1)
        for work in [work for work in working if work.process.poll() is not None]:
            working.remove(work)
            free.append(work.slot)
            finish(work)
        progress.show(working)
    for work in working:
        work.process.terminate()
    for work in working:
        work.process.wait()
        record(work)
    for number, handler in before.items():
        signal.signal(number, handler)
    if stopped:
        print("\nstopped; the current runs have saved a checkpoint, and the same command goes on",
              flush=True)
        sys.exit(128 + stopped[0])


# -------------------------------------------------------------------------- the largest stable rate

def rates_tried(study, kept, panel, level):
    """Rate -> whether it is stable, for those whose runs have all ended."""
    from ablation import stats
    cells = {rate: list(study.cell(panel, level, rate).values()) for rate in study.axes["lr"]}
    losses = {rate: [run.final_loss() for run in runs] for rate, runs in cells.items()
              if runs and all(run.status in ENDED for run in runs)}
    means = [statistics.fmean(found) for found in losses.values() if None not in found]
    return {float(rate): bool(means) and stats.is_stable(found, min(means), kept["within"])
            for rate, found in losses.items()}


def search_rates(out, kept, slots):
    """More rates for each level and panel, until the largest stable one is known to a factor of
    1.25. Where a run has no result, failed or killed, the search goes no further."""
    from ablation import stats
    while True:
        study, added = make_study(out, kept), []
        for axes in {run_name(kept, dict(axes, seed="", lr="")): axes
                     for axes in combinations(kept)}.values():
            panel = {name: axes[name] for name in study.panels()[0]}
            cells = stats.cells(study, panel, axes[study.compare]).values()
            if any(run.status not in ENDED for cell in cells for run in cell.values()):
                continue
            rate = stats.next_rate(rates_tried(study, kept, panel, axes[study.compare]),
                                   float(kept["axes"]["lr"][0]))
            new = [dict(axes, lr=as_text(rate), seed=seed)
                   for seed in kept["axes"]["seed"]] if rate is not None else []
            added += [axes for axes in new if axes not in combinations(kept)]
        if not added:
            return
        kept["searched"] += added
        plan_runs(out, kept, slots)
        train(out, kept, slots, again=())


def say_rates(study, kept):
    from ablation import stats
    for panel in study.panels():
        for level in study.axes[study.compare]:
            low, high = stats.bracket(rates_tried(study, kept, panel, level))
            where = (f"between {low:g} and {high:g}" if low and high
                     else f"at {low:g} or above" if low
                     else f"below {high:g}" if high
                     else "outside of what was tried")
            study.notes.append(", ".join([f"{name} {value}" for name, value in panel.items()]
                                         + [f"{level}: the largest stable learning rate "
                                            f"is {where}"]))


# ------------------------------------------------------------------------------------------- probes

def probe_runs(out, kept, slots):
    """A probe.json of as many tokens as asked for each finished run that lacks it, as many at a
    time as there are slots. Returns what failed, as sentences."""
    tokens, failed, free = kept["probe_tokens"], [], list(slots)
    runs = [run for run in make_study(out, kept).runs if run.status in (FINISHED, COLLAPSED)
            and (not run.probe or run.probe.get("tokens_asked") != tokens)]
    if runs and not (ROOT / "build/shard").exists():           # it writes the built-in stories
        subprocess.run(["make", "-s", "-C", str(ROOT), "build/shard", *shlex.split(kept["make"])])

    def one(run):
        slot = free.pop()
        command = [sys.executable, ROOT / "dev/probe.py", run.folder, "--tokens", tokens]
        done = subprocess.run([*map(str, command), "--no-pictures"], env=slot, errors="replace",
                              stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              preexec_fn=die_with_parent)
        free.append(slot)
        return run, done

    with concurrent.futures.ThreadPoolExecutor(len(slots)) as pool:
        try:
            for run, done in pool.map(one, runs):
                print((done.stdout or done.stderr).strip(), flush=True)
                if done.returncode:
                    said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-3:]
                    failed.append(f"{run.name} could not be probed: {' '.join(said)}")
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print("\nstopped; the same command goes on", flush=True)
            sys.exit(128 + signal.SIGINT)
    return failed


# --------------------------------------------------------------------------------------- the report

def report(out, kept, notes=()):
    """The pictures and the page of what there is; returns how many runs have no result."""
    from ablation import inside, page, pictures, stats
    study = make_study(out, kept)
    study.notes += notes
    if kept["largest_lr"]:
        say_rates(study, kept)
    rows, warnings = stats.summarize(study), stats.confounded(study)
    page.write_page(study, rows, warnings, pictures.draw(study, rows, out)
                    + inside.draw(study, rows, out), out / "index.html")
    for text in warnings + study.notes:
        print(f"note: {text}")
    print(f"wrote {out}/index.html")
    return sum(run.status not in ENDED for run in study.runs)


def lock(out):
    """One ablate.py works on a study; the handle stays open as long as it lives."""
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stop(f"{out} is in use by another ablate.py",
             "wait for it to end, or another --out; --report works beside it")


def main():
    options, axes = parse(sys.argv[1:])
    need(["numpy", "scipy", "matplotlib"] + ["torch", "transformers"] * options.probe)
    out, kept = open_study(options, axes)
    try:
        make_study(out, kept)  # a wrong --compare is refused before anything is built
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        stop(f"{out}/study.json does not describe a study: {error!r}",
             "was it edited? put it back, or take another --out")
    notes = []
    if not options.report:
        if kept["source"] != source_hash():
            print(f"note: the source has changed since {out} was begun, whose trainers "
                  "stay as they are; modes built from now on differ from them\n"
                  "  -> another --out compares the new code", flush=True)
        lock(out)
        begun, before = (out / "study.json").exists(), set(out.glob("bin/*"))
        try:
            build(out, kept)
            slots = environments(kept, options.jobs)
            plan_runs(out, kept, slots)
        except BaseException:                          # the next attempt builds its own
            for binary in set(out.glob("bin/*")) - before:
                binary.unlink()
            if not begun:
                (out / "study.json").unlink(missing_ok=True)
            raise
        train(out, kept, slots)
        if kept["largest_lr"]:
            search_rates(out, kept, slots)
        if kept.get("probe"):
            notes = probe_runs(out, kept, slots)
    left = report(out, kept, notes)
    if left and not options.report:
        stop(f"{left} runs failed or were killed, see above and the page",
             "the same command tries them again")
    if notes:
        stop(f"{len(notes)} runs could not be probed, see above and the page",
             "the same command tries them again")


if __name__ == "__main__":
    main()
