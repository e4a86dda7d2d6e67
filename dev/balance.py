#!/usr/bin/env python3
"""How fast each way of balancing experts mends a skewed router, and what happens without one.

    python3 dev/balance.py [--mode PRE] [--steps 2000] [--jobs 2] [--out balance]

A miniature of OLMoE (--model olmoe-char: 8 experts, 2 a token) starts from routers whose first two
rows point to the embeddings of the commonest letters: most tokens go through experts 0 and 1.
METHODS then train it. Writes OUT/balance.png, the largest load over the mean (1: even, 4: two
experts have all) against the steps, and prints it as a table. Runs that are there already are not
run again. Needs numpy, safetensors and matplotlib.
"""
import argparse
import json
import pathlib
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from safetensors.numpy import load_file, save_file

MODEL = ("--model olmoe-char --sample 0 --save-every 0 --val-every 500 --val-tokens 32768 "
         "--norms-every 20")
NONE = "--balance-loss 0 --router-z-loss 0"
METHODS = {
    "nothing": NONE,
    "balance loss 0.01": "--balance-loss 0.01 --router-z-loss 0",
    "sequence loss 0.01": f"{NONE} --sequence-loss 0.01",
    "z-loss 0.001": "--balance-loss 0 --router-z-loss 0.001",
    "balance and z-loss (OLMoE)": "--balance-loss 0.01 --router-z-loss 0.001",
    "sigmoid, nothing": f"{NONE} --router sigmoid",
    "sigmoid, bias 0.001 (DeepSeek-V3)": f"{NONE} --router sigmoid --balance-rate 0.001 "
                                         "--sequence-loss 1e-4",
}
SHOWN = (1, 20, 100, 200, 500, 1000, 2000)


def skewed(program, out):
    """The weights of a new model, its routers skewed; the same with a selection bias."""
    paths = [out / "skewed.safetensors", out / "skewed_bias.safetensors"]
    if not paths[1].exists():
        subprocess.run([program, *MODEL.split(), "--steps", "1", "--lr", "0", "--warmup", "0",
                        "--out", str(out / "start")], check=True, stdout=subprocess.DEVNULL)
        weights = load_file(next((out / "start").glob("step_*")) / "model.safetensors")
        common = weights["model.embed_tokens.weight"][list(b" etaoinsrh")]
        toward = (common / np.linalg.norm(common, axis=1, keepdims=True)).sum(0)
        for name in weights:
            if name.endswith("mlp.gate.weight"):
                size = np.linalg.norm(weights[name], axis=1).mean()
                weights[name][:2] += toward / np.linalg.norm(toward) * size * 3
        save_file(weights, paths[0])
        routers = [name for name in weights if name.endswith("mlp.gate.weight")]
        bias = {name.replace("weight",
                             "e_score_correction_bias"): np.zeros(len(weights[name]), np.float32)
                for name in routers}
        save_file({**weights, **bias}, paths[1])
    return paths


def train(program, out, name, starts, steps):
    """The largest load over the mean, by step, the mean over layers; and the last validation
    loss."""
    folder = out / name.replace(" ", "-").replace("(", "").replace(")", "").replace(",", "")
    command = [program, *MODEL.split(), "--init-from",
               str(starts["--balance-rate" in METHODS[name]]), "--steps", str(steps),
               *METHODS[name].split(), "--out", str(folder), "--resume", "auto"]
    log = subprocess.run(command, capture_output=True, text=True)
    if log.returncode:
        raise SystemExit(f"{' '.join(command)}\n{log.stderr}")
    lines = [json.loads(line) for line in open(folder / "log.jsonl")]
    loads = {line["step"]: np.mean(line["router_max_load"]) for line in lines
             if "router_max_load" in line}
    return loads, [line["val_loss"] for line in lines if "val_loss" in line][-1]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--mode", default="PRE")
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--out", type=pathlib.Path, default="balance")
    a = arguments.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    program = subprocess.run(["make", "-s", "binary", f"NORM_MODE={a.mode}", "DEVICE=cpu"],
                             check=True, capture_output=True, text=True).stdout.split()[-1]
    starts = skewed(program, a.out)
    with ThreadPoolExecutor(a.jobs) as pool:
        runs = dict(zip(METHODS, pool.map(lambda name: train(program, a.out, name, starts, a.steps),
                                          METHODS)))
    print("| largest load over the mean, step | " + " | ".join(str(step) for step in SHOWN)
          + " | validation loss |")
    print("|---" * (len(SHOWN) + 2) + "|")
    for name, (loads, loss) in runs.items():
        print(f"| {name} | " + " | ".join(f"{loads[step]:.2f}" if step in loads else ""
                                          for step in SHOWN) + f" | {loss:.4f} |")

    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name, (loads, _) in runs.items():
        axes.plot(list(loads), list(loads.values()), label=name,
                  linestyle="--" if "nothing" in name else "-")
    axes.set(xlabel="step", ylabel="largest load over the mean", xscale="log",
             title=f"A skewed router, and what mends it ({a.mode}, olmoe-char)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(a.out / "balance.png", dpi=120)


if __name__ == "__main__":
    main()
