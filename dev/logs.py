#!/usr/bin/env python3
"""A run's log.jsonl for other programs:

    python3 dev/logs.py RUN --csv | --tensorboard | --wandb [-o PATH]

--csv writes RUN/log.csv: a row for each step that has something, a column for each number.
--tensorboard writes event files into RUN/tensorboard (tensorboard --logdir RUN; needs the package
tensorboard). --wandb sends a run of the project norm.c to Weights & Biases (needs the package
wandb; with WANDB_MODE=offline it stays in RUN/wandb for `wandb sync`). All have losses, rates,
validations, the results of tasks, and every layer's and tensor's diagnostics: residual_rms/3 is
that of layer 3, router_load/3/17 the load of its expert 17, grad_norms/model.norm.weight that
tensor's. Values that are not numbers are left out, and empty in the table. Reads the log only, also
while the run trains.
"""
import argparse
import csv
import json
import pathlib
import sys


def stop(what, hint):
    sys.exit(f"error: {what}\n  -> {hint}")


def numbers(name, value):
    """Yields (name, number) of what is nested under a name; a null is a number that was not finite,
    text is none."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(f"{name}/{key}", inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers(f"{name}/{i}", inner)
    elif value is None or isinstance(value, (int, float)):
        yield name, value


def read_run(run):
    """{step: {name: number}} in order. A step that is there twice, done again after a kill, is what
    the last of them says; the lines that begin each part of a run are settings."""
    path = pathlib.Path(run)
    path = path / "log.jsonl" if path.is_dir() else path
    if not path.is_file():
        stop(f"{run}: expected the folder of a run, found no {path}", "ls runs/")
    steps = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # cut by a kill, or not written to its end yet
            continue
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        step = line.pop("step")
        # the run begins, or goes on, after `step`: what follows it was of a part that is lost
        if "norm_mode" in line:
            steps = {number: values for number, values in steps.items() if number <= step}
            continue
        found = {name: value for key, inner in line.items() for name, value in numbers(key, inner)}
        steps.setdefault(step, {}).update(found)
    if not steps:
        stop(f"{path}: expected steps, found none", "train it first")
    return path, dict(sorted(steps.items()))


def write_csv(steps, out):
    names = list(dict.fromkeys(name for values in steps.values() for name in values))
    with open(out, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["step", *names])
        for step, values in steps.items():
            table.writerow([step, *(values.get(name) for name in names)])
    print(f"wrote {out}: {len(steps)} steps, {len(names)} columns")


def write_events(steps, out, when):
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        stop(f"expected the package tensorboard, found: {error}",
             "python3 -m pip install tensorboard, or --csv")
    for old in out.glob("events.out.tfevents.*.norm_c*"):  # each time the whole log
        old.unlink()
    writer, count = EventFileWriter(str(out), filename_suffix=".norm_c"), 0
    for step, values in steps.items():
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()
                   if value is not None]
        writer.add_event(Event(wall_time=when, step=step, summary=Summary(value=scalars)))
        count += len(scalars)
    writer.close()
    print(f"wrote {out}: {len(steps)} steps, {count} values; tensorboard --logdir {out}")


def write_wandb(steps, out, name):
    try:
        import wandb
    except ImportError as error:
        stop(f"expected the package wandb, found: {error}",
             "python3 -m pip install wandb, or --csv")
    out.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, console="off")
    with wandb.init(project="norm.c", name=name, dir=out, settings=settings) as run:
        for step, values in steps.items():
            run.log({key: value for key, value in values.items() if value is not None}, step=step)
    where = f"wandb sync {out}/wandb/offline-*" if run.offline else run.url
    print(f"wrote {len(steps)} steps of {name}; {where}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of a run, or its log.jsonl")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--csv", action="store_true", help="a table")
    kind.add_argument("--tensorboard", action="store_true", help="event files")
    kind.add_argument("--wandb", action="store_true", help="a run of Weights & Biases")
    parser.add_argument("-o", "--out", type=pathlib.Path,
                        help="the table, the folder of event files, or the one in which wandb "
                             "makes its own, called wandb")
    args = parser.parse_args()
    path, steps = read_run(args.run)
    out = args.out or (path.parent if args.wandb
                       else path.parent / ("log.csv" if args.csv else "tensorboard"))
    try:
        if args.csv:
            write_csv(steps, out)
        elif args.tensorboard:
            write_events(steps, out, path.stat().st_mtime)
        else:
            write_wandb(steps, out, path.resolve().parent.name)
    except OSError as error:
        stop(f"cannot write {out}: {error}", "-o PATH")


if __name__ == "__main__":
    main()
