"""A study: a folder with one run of the trainer for each combination of its axes' values.

    OUT/study.json                 axes, fixed flags, budget, machine: what was asked
    OUT/bin/MODE                   the trainer of each placement, built once
    OUT/runs/NAME/                 a run of the trainer: config.json, log.jsonl, checkpoints
    OUT/runs/NAME/output.txt       what it printed
    OUT/runs/NAME/outcome.json     how it ended, and after how many seconds of training; without a
                                   status, or absent: waiting, running or interrupted
    OUT/runs/NAME/probe.json       what it does inside (dev/probe.py), where that was asked for
    OUT/index.html, OUT/*.png      the page

Everything that is known about a run lies in its folder: whatever is killed, the same command goes
on from there.
"""
import ctypes
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import sys

WAITING, FINISHED, COLLAPSED, DIVERGED, KILLED, FAILED = ("waiting", "finished", "collapsed",
                                                          "diverged", "killed", "failed")
ENDED = (FINISHED, COLLAPSED, DIVERGED)      # results; the others have none yet


@dataclasses.dataclass
class Run:
    """One run. axes: axis -> value as typed, of every axis of the study ("mode", "layers", "lr",
    "seed", ...)."""
    name: str
    axes: dict
    folder: pathlib.Path
    command: list
    status: str = WAITING
    exit: int | None = None
    seconds: float | None = None
    # config.json: flags (as text), parameters, flops_per_token, initialization, unigram_entropy
    config: dict | None = None
    log: list = dataclasses.field(default_factory=list)
    probe: dict | None = None                # probe.json

    def series(self, key):
        """Steps and values of one key of the log, as lists; values that are null (not finite) are
        left out."""
        points = [(line["step"], line[key]) for line in self.log if line.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def final_loss(self):
        """The validation loss at the end, in nats per token; None for a run that has not finished,
        has collapsed, or has no validation data."""
        return self.last_loss() if self.status == FINISHED else None

    def last_loss(self):
        values = [line["val_loss"] for line in self.log if "val_loss" in line]
        return values[-1] if values else None

    def floor(self):
        """The entropy of the validation data, nats per token; None where it is not known."""
        losses, above = self.series("val_loss")[1], self.series("val_above_floor")[1]
        return losses[-1] - above[-1] if losses and above else None

    def tail(self, lines=8):
        """The last lines it printed."""
        path = self.folder / "output.txt"
        return path.read_text(errors="replace").splitlines()[-lines:] if path.is_file() else []


@dataclasses.dataclass
class Study:
    """axes: axis -> list of values, in the order given; of these `compare` is the one whose values
    are set against each other (first: the baseline), `tune` the one of which each gets its best
    (None: none), "seed" the one over which pairs are made; the others are panels, each looked at by
    itself."""
    folder: pathlib.Path
    axes: dict
    flags: dict                              # the flags that all runs share
    command: str
    machine: dict                            # property -> text
    compare: str
    tune: str | None
    runs: list
    notes: list = dataclasses.field(default_factory=list)          # sentences for the page
    tokens_per_step: int = 0                 # 0: not the same in all runs, or not known yet

    def panels(self):
        """The combinations of the axes that are neither compared, tuned nor seeds, as dictionaries;
        [{}] where there are none."""
        names = [name for name in self.axes if name not in (self.compare, self.tune, "seed")]
        found = [{}]
        for name in names:
            found = [dict(panel, **{name: value}) for panel in found for value in self.axes[name]]
        return found

    def cell(self, panel, level, rate=None):
        """The runs of one panel with one value of the compared axis (and of the tuned one), by
        seed."""
        wanted = dict(panel, **{self.compare: level},
                      **({self.tune: rate} if self.tune and rate is not None else {}))
        return {run.axes["seed"]: run for run in self.runs
                if all(run.axes[axis] == value for axis, value in wanted.items())}


def read_log(path):
    """The lines of a log.jsonl as dictionaries with their step; anything else, like a cut last line
    (a run killed while writing), is left out."""
    lines = []
    for text in pathlib.Path(path).read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def need(packages):
    """Ends the program if one of these Python packages is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: expected the Python packages {', '.join(missing)}\n"
                 f"  -> python3 -m pip install {' '.join(missing)}")


def read_json(path):
    """The file's value; None where there is no file."""
    try:
        return json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        sys.exit(f"error: {path}: {error}\n  -> was it edited? put it back, or take another --out")


def write_json(path, value):
    """Whole or not at all: a kill leaves the old file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    with open(new, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def die_with_parent():
    """In the child: when this program is gone the trainer gets SIGTERM, saves if it trains, and
    ends (Linux: PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def read_run(run):
    """Brings a run up to date with its folder."""
    outcome = read_json(run.folder / "outcome.json") or {}
    run.status, run.exit, run.seconds = (outcome.get("status", WAITING), outcome.get("exit"),
                                         outcome.get("seconds"))
    run.config, run.probe = (read_json(run.folder / "config.json"),
                             read_json(run.folder / "probe.json"))
    run.log = read_log(run.folder / "log.jsonl") if (run.folder / "log.jsonl").is_file() else []
    # entropy of the validation tokens' frequencies, nats: the loss of a model without context
    unigram = (run.config or {}).get("unigram_entropy")
    if (run.status == FINISHED and unigram and run.last_loss() is not None
        and run.last_loss() > 0.98 * unigram):
        run.status = COLLAPSED
    return run
