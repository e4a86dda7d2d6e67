#!/usr/bin/env python3
"""test_logs.py: dev/logs.py's table and event files, read back, hold what log.jsonl says: python3
dev/test/test_logs.py PROGRAM

PROGRAM trains a little mixture of experts, in two parts; a log by hand has what a kill leaves
behind. Needs tensorboard and wandb.
"""
import csv
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

LOGS = pathlib.Path(__file__).resolve().parents[1] / "logs.py"
passed = failed = 0


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED line {sys._getframe(1).f_lineno}: {what}")


def call(*command, status=0, env=None):
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
    expect(result.returncode == status,
           f"{command}: status {result.returncode}: {result.stdout[-1000:]}{result.stderr[-1000:]}")
    return result.stdout + result.stderr


def read_csv(path):
    with open(path, newline="", encoding="utf-8") as file:
        return {int(row.pop("step")): {name: float(value) for name, value in row.items() if value}
                for row in csv.DictReader(file)}


def read_events(folder):
    events, found = EventAccumulator(str(folder), size_guidance={SCALARS: 0}), {}
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            expect(name not in found.setdefault(event.step, {}),
                   f"{name} of step {event.step} is there once")
            found[event.step][name] = event.value
    return found


def alike(a, b, digits):
    least = 1e-300 if digits < 1e-9 else 1e-37
    return (a.keys() == b.keys()
            and all(a[step].keys() == b[step].keys()
                    and all(math.isclose(a[step][k], b[step][k], rel_tol=digits, abs_tol=least)
                            for k in a[step])
                    for step in a))


def test_by_hand(scratch):
    """Two parts of a run, the first killed after step 3 with a checkpoint at 2; validated twice; a
    number that was not finite; a line that was cut."""
    lines = [{"step": 0, "norm_mode": "SPAN", "seq": "8"},
             {"step": 1, "loss": 5.5, "event": "a spike of the loss"}, {"step": 2, "loss": 4.0},
             {"step": 3, "loss": 9.0, "lost": 1},
             {"step": 2, "norm_mode": "SPAN", "seq": "8"},
             {"step": 2, "task_results": {"piqa": {"examples": 2, "acc": 0.25}}},
             {"step": 2, "val_loss": 4.5},
             {"step": 2, "task_results": {"piqa": {"examples": 2, "acc": 0.5}}},
             {"step": 3, "loss": None, "grad_norm": 2},
             {"step": 3, "residual_rms": [1.5, 2.5], "router_load": {"1": [0.25, 0.75]}}]
    (scratch / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines)
                                       + '{"step": 4, "loss": 1.')
    wanted = {1: {"loss": 5.5}, 2: {"loss": 4.0, "task_results/piqa/examples": 2,
                                    "task_results/piqa/acc": 0.5, "val_loss": 4.5},
              3: {"grad_norm": 2, "residual_rms/0": 1.5, "residual_rms/1": 2.5,
                  "router_load/1/0": 0.25, "router_load/1/1": 0.75}}
    for _ in range(2):                                     # again, over what is there
        call(sys.executable, LOGS, scratch, "--csv")
        call(sys.executable, LOGS, scratch / "log.jsonl", "--tensorboard")
    expect(read_csv(scratch / "log.csv") == wanted, read_csv(scratch / "log.csv"))
    expect(read_events(scratch / "tensorboard") == wanted, read_events(scratch / "tensorboard"))
    expect("loss" in (scratch / "log.csv").read_text().splitlines()[0].split(","),
           "a column for what was never finite too")


def test_run(scratch, program):
    flags = ("--layers 2 --width 32 --heads 2 --seq 32 --batch 2 --experts 4 --warmup 2 "
             "--val-tokens 64 --val-every 3 --save-every 3 --norms-every 2 --sample 0".split())
    call(program, *flags, "--steps", 5, "--out", scratch / "run")
    call(program, "--steps", 7, "--out", scratch / "run", "--resume", "required", "--sample", 0)
    call(sys.executable, LOGS, scratch / "run", "--csv", "-o", scratch / "run.csv")
    call(sys.executable, LOGS, scratch / "run", "--tensorboard", "-o", scratch / "events")
    table, events = read_csv(scratch / "run.csv"), read_events(scratch / "events")
    log = [json.loads(line) for line in (scratch / "run/log.jsonl").read_text().splitlines()]
    expect(sorted(table) == list(range(1, 8)) and alike(table, events, 1e-6),
           "all steps, and the same in both")
    for line in log:
        for key, value in line.items():
            if isinstance(value, float):
                expect(table[line["step"]][key] == value, f"{key} of step {line['step']}")
    diagnostics = next(line for line in log if line["step"] == 6 and "grad_norms" in line)
    expect(table[6]["residual_rms/1"] == diagnostics["residual_rms"][1]
           and table[6]["router_load/0/3"] == diagnostics["router_load"]["0"][3],
           "layers and experts")
    expect(table[6]["update_ratios/model.norm.weight"]
           == diagnostics["update_ratios"]["model.norm.weight"]
           if "model.norm.weight" in diagnostics["update_ratios"]
           else any(name.startswith("update_ratios/model.layers.0.") for name in table[6]),
           "tensors")
    expect("val_loss" in table[3] and "val_loss" in table[7], "validations")


def wandb_records(data):
    """LevelDB's log format, after 7 bytes: blocks of 32 KiB of pieces [checksum 4, size 2, kind 1],
    a record being one whole (1), or a first (2), some (3) and a last one (4)."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb(scratch):
    """An offline run of Weights & Biases, read back from its file."""
    from wandb.proto.wandb_internal_pb2 import Record

    run, found = scratch / "named", {}
    run.mkdir()
    lines = [{"step": 1, "loss": 5.5, "grad_norm": None}, {"step": 3, "residual_rms": [1.5, 2.5]}]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    offline = os.environ | {"WANDB_MODE": "offline"}
    said = call(sys.executable, LOGS, run, "--wandb", env=offline)
    expect("2 steps of named; wandb sync" in said, said)
    (path,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    for data in wandb_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or ".".join(item.nested_key): json.loads(item.value_json)
                      for item in record.history.item}
            found[values["_step"]] = {k: v for k, v in values.items() if k[0] != "_"}
    wanted = {1: {"loss": 5.5}, 3: {"residual_rms/0": 1.5, "residual_rms/1": 2.5}}
    expect(found == wanted, found)
    said = call(sys.executable, LOGS, run, "--wandb", "-o", scratch / "elsewhere", env=offline)
    expect(f"wandb sync {scratch}/elsewhere/wandb/offline-*" in said
           and list((scratch / "elsewhere/wandb").glob("offline-*")), said)


def test_refusals(scratch):
    expect("expected the folder of a run" in call(sys.executable, LOGS, scratch / "nowhere",
                                                  "--csv", status=1), "no run")
    (scratch / "empty").mkdir()
    (scratch / "empty/log.jsonl").write_text("[1]\nnonsense\n")
    expect("found none" in call(sys.executable, LOGS, scratch / "empty", "--csv", status=1),
           "no steps")
    (scratch / "empty/log.jsonl").write_text('{"step": 1, "loss": 1}\n')
    (scratch / "broken/tensorboard").mkdir(parents=True)
    (scratch / "broken/tensorboard/__init__.py").write_text("raise ImportError('no "
                                                            "tensorboard here')")
    expect("pip install tensorboard"
           in call(sys.executable, LOGS, scratch / "empty", "--tensorboard", status=1,
                   env={"PYTHONPATH": str(scratch / "broken")}), "without the package")
    expect("cannot write" in call(sys.executable, LOGS, scratch / "empty", "--csv", "-o",
                                  scratch / "no/such/folder.csv", status=1), "no folder")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="test_logs_") as folder:
        scratch = pathlib.Path(folder)
        test_by_hand(scratch)
        test_run(scratch, sys.argv[1])
        test_wandb(scratch)
        test_refusals(scratch)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)
