#!/usr/bin/env python3
"""Kills of training runs, by the hundred: python3 dev/torture.py [KILLS] [SEED], from the root of
the repository, after make build/shim.so and the CPU trainer.

Sixteen configurations: {built-in stories, shards that are shuffled, some epochs of them} x {dense,
experts with a selection bias} x {AdamW, Muon} x {1, 4 processes (mpirun)}. Each first has one run
that nobody disturbs, then runs that are killed, by turns
  at a moment   SIGKILL, to the process, one of four, or mpirun
  at a call     before one of the calls that change something on the disk (dev/test/shim.c); half of
                them as a power cut: what was not synced in a file is lost
and begun again with --resume auto, often killed again, until the end. There everything must be as
if nothing had happened: weight hash, the last checkpoint bit for bit, each line of the log once. A
third of the runs goes on with another number of processes; then losses agree to 1e-5.

Needs nothing beyond Python's standard library. Without mpirun there are no configurations of 4
processes, and it says so."""
import atexit, itertools, json, math, os, random, re, shutil, signal, subprocess, sys, tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN, SHIM = ROOT + "/build/cpu-span-fp32/train_gpt", ROOT + "/build/shim.so"
# on a disk the runs take four times as long
DIR = tempfile.mkdtemp(prefix="norm-torture.",
                       dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
atexit.register(shutil.rmtree, DIR, ignore_errors=True)
STEPS, LIMIT = 90, 60  # LIMIT: seconds within which a run must end, and a killed one be gone
# A narrow limit, so that some steps of every run are skipped as spikes. Experts without the loss
# that is a micro-batch's, which is another one on other processes.
MODEL = f"""--layers 2 --width 32 --heads 2 --ffn 48 --seq 32 --batch 8 --steps {STEPS} --warmup 4
            --lr 1e-2 --spike-z 0.2 --skip-spikes --save-every 5 --keep-last 2 --val-every 10
            --val-tokens 256 --norms-every 20 --sample 0""".split()
EXPERTS = ("--experts 4 --shared-experts 1 --balance-rate 0.01 --balance-loss 0 "
           "--sequence-loss 0.001".split())
ENV = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive",
           OMPI_MCA_rmaps_base_oversubscribe="1",
           # an mpirun that is killed leaves its files behind
           OMPI_MCA_orte_tmpdir_base=DIR, OMPI_MCA_btl_vader_backing_directory=DIR)
if os.getuid() == 0: ENV.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


class Configuration:
    def __init__(self, data, ffn, optimizer, processes):
        self.name = f"{data} {ffn} {optimizer} {processes}"
        self.flags = MODEL + ["--optimizer", optimizer] + (EXPERTS if ffn == "experts"
                              else []) + (["--data", f"{DIR}/data"] if data == "shards" else [])
        self.processes = processes


def start(configuration, out, processes, shim=""):
    launcher = ["mpirun", "-np", str(processes)] if processes > 1 else []
    env = dict(ENV, LD_PRELOAD=SHIM, SHIM_DIR=out, SHIM=shim) if shim else ENV
    with open(DIR + "/said", "w") as said:
        return subprocess.Popen(launcher + [TRAIN, *configuration.flags, "--out", out, "--resume",
                                            "auto"], env=env, stdin=subprocess.DEVNULL, stdout=said,
                                stderr=said)


def said():
    with open(DIR + "/said") as f: return f.read()


def ranks(mpirun):
    """The processes that mpirun began."""
    pids = []
    for task in os.listdir(f"/proc/{mpirun}/task"):
        with open(f"/proc/{mpirun}/task/{task}/children") as f: pids += map(int, f.read().split())
    return pids


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError: return False


def end(process, pids=()):
    """Waits until the process and pids are gone; what is not within LIMIT is ended here and is an
    error. But an mpirun may hang that loses a process just as that one calls in (Open MPI 4.1:
    "PMIX ERROR: UNREACHABLE"); where all it began are gone that is its own affair, and only
    said."""
    until, hangs = time.time() + LIMIT, time.time() + LIMIT
    while time.time() < until and (process.poll() is None or any(map(alive, pids))):
        if not pids or any(map(alive, pids)): hangs = time.time() + 10
        if time.time() > hangs:
            print("  note: all processes are gone and mpirun is not; it is ended", flush=True)
            process.kill()
        time.sleep(0.005)
    late = [p for p in (process.pid, *pids) if alive(p)]
    for pid in late: os.kill(pid, signal.SIGKILL)
    process.wait()
    return f"processes {late} were still there after {LIMIT} s" if late else ""


def lines(out):
    """The log, without the lines that begin the run and its resumes, and without times."""
    with open(out + "/log.jsonl") as f: rows = [json.loads(line) for line in f]
    return [{k: v for k, v in row.items() if k != "ms"} for row in rows if "norm_mode" not in row]


def compare(out, whole, same):
    """Differences between a run that has ended and the undisturbed one; empty if all is well."""
    a, b = lines(out), lines(whole)
    if [(row["step"], sorted(row)) for row in a] != [(row["step"], sorted(row)) for row in b]:
        return "the log has other lines"
    if same and a != b:
        return f"the log differs at step {next(x['step'] for x, y in zip(a, b) if x != y)}"
    for x, y in zip(a, b):
        for key in ("loss", "val_loss"):
            if key in x and not math.isclose(x[key], y[key], rel_tol=1e-5):
                return f"{key} {x[key]} at step {x['step']}, expected {y[key]}"
    manifests = [open(f"{d}/step_{STEPS:08}/manifest.json").read() for d in (out, whole)]
    return "the last checkpoint differs" if same and manifests[0] != manifests[1] else ""


class Whole:
    """The undisturbed run of a configuration: what the others are compared with, and how long and
    how many calls there are to kill in."""
    def __init__(self, configuration):
        self.out = f"{DIR}/whole {configuration.name}".replace(" ", "-")
        began = time.time()
        late = end(start(configuration, self.out, configuration.processes, "count 0"))
        self.seconds = time.time() - began
        found = re.search(r"^weights (\w+) after", said(),
                          re.M), re.search(r"^shim: (\d+) calls", said(), re.M)
        if late or not all(found):
            sys.exit(f"{configuration.name}: the undisturbed run failed: {late}\n{said()}")
        self.hash, self.calls = found[0][1], int(found[1][1])
        skipped = sum("skipped" in row for row in lines(self.out))
        if not skipped:
            sys.exit(f"{configuration.name}: no step was skipped as a spike, so resumes are not "
                     f"tested with one\n  -> another --spike-z in {__file__}")
        print(f"{configuration.name:18} {self.seconds:5.1f} s, {self.calls} calls, {skipped} of "
              f"{STEPS} steps skipped as spikes, weights {self.hash}", flush=True)


def kill(dice, configuration, whole, out, processes, at_call):
    """Starts or resumes the run and kills it. Returns (how it was killed, "" if it ended before;
    what is wrong)."""
    how = f"{dice.choice(['kill', 'power'])} {dice.randint(1, whole.calls)}" if at_call else ""
    delay, victim = dice.uniform(0,
                                 whole.seconds), dice.randint(0, processes) if processes > 1 else 0
    process, pids = start(configuration, out, processes, how), []
    if not at_call:
        time.sleep(delay)
        pids = ranks(process.pid) if processes > 1 and process.poll() is None else []
        victim = min(victim, len(pids))                       # 0: mpirun, or the only process
        if process.poll() is None: os.kill([process.pid, *pids][victim], signal.SIGKILL)
        how = f"after {delay:.2f} s" + (f", {f'rank {victim - 1}' if victim else 'mpirun'}"
                                        if processes > 1 else "")
    error = end(process, pids) or complaint() or halves(out)
    if process.returncode == 0: return "", error
    if process.returncode not in (-signal.SIGKILL, 128 + signal.SIGKILL):
        error = error or f"status {process.returncode}"
    return how.replace(" ", " at call ") if at_call else how, error


def complaint():
    """A kill never leaves anything that a resume warns of or refuses."""
    found = re.search(r"^(warning|error): .*", said(), re.M)
    return found[0] if found else ""


def halves(out):
    """Whatever has the name of a checkpoint is one: all files that its manifest promises are there
    and as long as it says. (Their bits: the trainer looks when it resumes.)"""
    for name in os.listdir(out) if os.path.isdir(out) else []:
        if not name.startswith("step_"): continue
        try:
            with open(f"{out}/{name}/manifest.json") as f:
                wrong = [n for n, promised in json.load(f).items()
                         if os.path.getsize(f"{out}/{name}/{n}") != promised["size"]]
        except (OSError, ValueError) as e: wrong = [e]
        if wrong: return f"{name} is no whole checkpoint: {wrong[0]}"
    return ""


def resumed_from():
    at = re.search(r"^resumed from .* at step (\d+)", said(), re.M)
    if at:
        return f"step {at[1]}"
    begun = re.search("beginning again|a new one begins", said())
    return "the beginning" if begun else "where it did not come to say"


def state(out):
    """The place of a kill: the last whole line of the log, and the files left unfinished."""
    try:
        with open(out + "/log.jsonl", "rb") as f: log = f.read().split(b"\n")[:-1]
    except FileNotFoundError: return "before the log"
    names = [n for n in os.listdir(out) if n.startswith((".tmp", ".old")) or n.endswith(".tmp")]
    step = json.loads(log[-1])["step"] if log else 0
    return f"step {step}" + (f" with {' '.join(sorted(names))}" if names else "")


def torture(dice, configuration, whole, out, most, first_at_call):
    """One run, killed up to `most` times. Returns a line for each kill, and what is wrong in the
    end."""
    processes, kills, error = configuration.processes, [], ""
    # goes on with another number of processes
    elsewhere = dice.random() < 1 / 3 and shutil.which("mpirun")
    for again in range(dice.randint(1, most)):
        how, error = kill(dice, configuration, whole, out, processes, (first_at_call + again) % 2)
        if kills: kills[-1] += f", resumed from {resumed_from()} by {processes}"
        if how: kills.append(f"{configuration.name:18} {how:24} {state(out)}")
        if error or not how: break
        if elsewhere: processes = dice.choice([p for p in (1, 3, 4) if p != processes])
    if error: return kills, error
    process = start(configuration, out, processes)
    error = end(process) or complaint()
    if kills and "resumed" not in kills[-1]:
        kills[-1] += f", resumed from {resumed_from()} by {processes}"
    weights = re.search(r"^weights (\w+) after", said(), re.M)
    same = not elsewhere or not kills
    if error: return kills, error
    if process.returncode != 0 or not weights: return kills, f"status {process.returncode}"
    return (kills, f"weights {weights[1]}, expected {whole.hash}"
            if same and weights[1] != whole.hash else compare(out, whole.out, same))


def main(kills=100, seed=1):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    shutil.rmtree(ROOT + "/build/test/torture", ignore_errors=True)
    # A text that no edit changes: another one might have no spikes.
    with open(ROOT + "/LICENSE") as f, open(DIR + "/text", "w") as text:
        text.write(" ".join(random.Random(0).choices(f.read().split(), k=1000)))
    subprocess.run([ROOT + "/build/shard", "--out", DIR + "/data", "--shard-tokens", "1500",
                    DIR + "/text"], check=True, stdout=subprocess.DEVNULL)
    if not shutil.which("mpirun"):
        print("skipped: kills of 4 processes: no mpirun (apt install openmpi-bin)")
    matrix = [Configuration(*c)
              for c in itertools.product(["stories", "shards"], ["dense", "experts"],
                                         ["adamw", "muon"],
                                         [1, 4] if shutil.which("mpirun") else [1])]
    wholes, done, failed, began = {}, 0, 0, time.time()
    for run in itertools.count():
        if done >= kills: break
        # by threes: a few of them have a bit of everything
        configuration, out = matrix[3 * run % len(matrix)], f"{DIR}/run-{run}"
        if configuration not in wholes: wholes[configuration] = Whole(configuration)
        lines, error = torture(random.Random(f"{seed} {run}"), configuration, wholes[configuration],
                               out, min(3, kills - done), run // len(matrix) + run)
        for line in lines:
            done, failed = done + 1, failed + bool(error)
            print(f"{done:4}/{kills} {line}: {'FAILED: ' + error if error else 'ok'}; ETA "
                  f"{(kills - done) * (time.time() - began) / done:.0f} s", flush=True)
        if error:
            kept = shutil.copytree(out, f"{ROOT}/build/test/torture/run-{run}", dirs_exist_ok=True)
            print(f"  it said, and is now {kept}:\n" + "\n".join(said().splitlines()[-8:]))
        shutil.rmtree(out)
        if error and not lines: return f"{configuration.name}: {error}"
    print(f"{time.time() - began:.0f} s, seed {seed}")
    print(f"{done - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
