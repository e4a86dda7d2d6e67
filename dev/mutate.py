#!/usr/bin/env python3
"""Mutation testing: breaks the code on purpose, one mistake of dev/mutants and dev/mutants_cuda at
a time, and expects the test named beside it to fail.

    python3 dev/mutate.py [WORD...]          the mutants whose header line contains one of the words
    python3 dev/mutate.py --stale [WORD...]  only whether the text of each is still in the code

It works in a copy of the tree (build/mutate); a mutant takes about 20 seconds of one core. Tests
named cuda_*, gpus and lost run in the emulator, in both precisions; ladder_* by dev/kernels/run.sh;
ptx needs nvcc (dev/ptx). A mutant whose test still passes has SURVIVED: the test does not see this
mistake, or the mutant changes no behavior.
"""
import argparse
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
TREE = ROOT / "build/mutate"
MAKE = "make -s DEVICE=cpu CFLAGS=-O1"
TRAINER = "build/cpu-span-fp32/train_gpt"
PROGRAMS = f"build/shard build/faulty build/shim.so {TRAINER}"    # tests drive whole programs
EMU = "build/emu"
GPU_TRAINERS = f"{EMU}/train_gpt-fp32 {EMU}/train_gpt-bf16"
SECONDS = 600                                                     # for one test
Mutant = collections.namedtuple("Mutant", "test file about old new")

# test -> (make goals, command)
WHOLE = {
    "gpus": (f"{PROGRAMS} {GPU_TRAINERS} {EMU}/ngpt-fp32 {EMU}/ngpt-bf16 {EMU}/libnccl.so.2 "
             f"{EMU}/test_nccl", "sh dev/test/gpus.sh"),
    "lost": (f"build/shim.so {GPU_TRAINERS} {EMU}/libnccl.so.2", "sh dev/test/lost.sh"),
    "processes": (PROGRAMS, "sh dev/test/processes.sh"),
    "faults": (f"build/shard build/shim.so {TRAINER}", "sh dev/test/faults.sh"),
    "torture": (f"build/shard build/shim.so {TRAINER}", "python3 dev/torture.py 24"),
    "ptx": ("build/services.a", "python3 dev/ptx/check.py trainer"),
    "lm_eval": ("build/services.a", "python3 dev/test/test_lm_eval.py"),
    "formulas": ("build/services.a", "python3 dev/test/test_probe.py"),
    "tokenizers": ("build/tokenize", "python3 dev/test/test_tokenizer.py short"),
    "hf_tokenizers": ("build/logits", "python3 dev/test/test_hf.py tokenizers"),
    "import_hf": ("build/services.a", "python3 dev/test/test_import_hf.py"),
    "probe_runs": (f"build/shard {TRAINER}",
                   f"python3 dev/test/test_probe.py SPAN={TRAINER} "
                   f"PRE=$({MAKE} binary NORM_MODE=PRE) SDD=$({MAKE} binary NORM_MODE=SDD)"),
    "repro": ("build/shard",
              "python3 dev/test/test_repro.py table sides verdicts two_scales edge proportions "
              "likeness family order missing other_study sizes fresh commit statistics kept"),
    "paper_scale": ("build/services.a", "python3 dev/test/test_paper_scale.py"),
}
# tests of build/test_gpt that run whole programs
DRIVERS = ("run", "run_sample", "run_tokens", "micro_batch", "comm", "command", "refusals", "shard")


def gpu_source(tree, test):
    """The file of a test of the emulator, or None."""
    files = ["test_gpt.cu", *sorted(str(path.relative_to(tree))
                                    for path in (tree / "dev/test").glob("*.cu"))]
    return next((file for file in files if f"GPU_TEST({test})" in (tree / file).read_text()), None)


def arrange(tree, test):
    """A test's make goals and command; None if there is no test of this name: it would run nothing,
    and every mutant survive."""
    if test in WHOLE:
        return WHOLE[test]
    if test.startswith("cuda_"):
        # The test of a layer is linked alone, a test of whole models with all layers.
        source = gpu_source(tree, test)
        layer = re.match(r"dev/test/test_(\w+)\.cu", source or "")
        folder = f"{EMU}-{layer[1]}" if layer else EMU
        only = f"EMU={folder} GPU_TESTS={layer[1]} " if layer else ""
        binary = f"{folder}/test_gpt-"
        return source and (f"{only}{binary}fp32 {binary}bf16",
                           f"{binary}fp32 {test} && EMU_COMPUTE=120 {binary}bf16 {test}")
    if test.startswith("ladder_"):
        step = test.removeprefix("ladder_")
        there = (tree / f"dev/kernels/{step}.cu").exists()
        return there and ("build/services.a", f"sh dev/kernels/run.sh {step}")
    if test.startswith("get_"):
        name = "test_" + test.removeprefix("get_")
        there = f"\ndef {name}" in (tree / "dev/test/test_get.py").read_text()
        return there and ("build/services.a", f"python3 dev/test/test_get.py {name}")
    there = f'{{"{test}",' in (tree / "test_gpt.c").read_text()
    goals = f"build/test_gpt {PROGRAMS}" if test in DRIVERS else "build/test_gpt"
    return there and (goals, f"build/test_gpt {test}")


def read_mutants(path):
    """The mutants of a file, in the form that its first lines describe."""
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if not lines:
            continue
        test, file, about = lines[0].split(" ", 2)
        text = {"-": [], "+": []}
        for line in lines[1:]:
            if line[:1] not in text or line[1:2] not in ("", " "):
                sys.exit(f"error: {path.name}: {about}: expected a line of - or +, found {line!r}")
            text[line[0]].append(line[2:])
        yield Mutant(test, file, about, "\n".join(text["-"]), "\n".join(text["+"]))


def replaced(mutant, text):
    """The text with the mutant's mistake; None unless what it replaces is there once. White space
    does not count: the code may be wrapped differently."""
    places = [i for i, c in enumerate(text) if not c.isspace()]
    dense, wanted = "".join(text.split()), "".join(mutant.old.split())
    at = dense.find(wanted)
    if not wanted or at < 0 or dense.find(wanted, at + 1) >= 0:
        return None
    return text[:places[at]] + mutant.new.strip() + text[places[at + len(wanted) - 1] + 1:]


def stale(tree, mutant, found):
    """Why a mutant cannot be tried, or None. found: what arrange says of its test."""
    if not found:
        return "THERE IS NO SUCH TEST"
    file = tree / mutant.file
    return (None if file.is_file() and replaced(mutant, file.read_text()) is not None
            else "STALE, the text is not there once")


def make_tree():
    """A copy of what git tracks, or of everything but what was built."""
    shutil.rmtree(TREE, ignore_errors=True)
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"],
                                capture_output=True, text=True, check=True).stdout.splitlines()
        files = [name for name in listed if (ROOT / name).is_file()]
    else:
        files = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()
                 and path.relative_to(ROOT).parts[0] not in ("build", "runs")]
    for name in files:
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, TREE / name)


def built(goals):
    """What make says, if it fails."""
    made = subprocess.run(f"{MAKE} {goals}", shell=True, cwd=TREE, capture_output=True, text=True)
    return made.stdout + made.stderr if made.returncode else None


def fails(command):
    """Whether a test fails; it ends at its first failure."""
    work = subprocess.Popen(["timeout", str(SECONDS), "sh", "-c", command], cwd=TREE, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, errors="replace")
    try:
        for line in work.stdout:
            if "FAILED" in line:
                return True
        return work.wait() != 0
    finally:
        work.terminate()
        work.stdout.close()
        work.wait()


def outcome(mutant, goals, command):
    """Makes the mistake, tests, and takes it back."""
    file = TREE / mutant.file
    whole = file.read_text()
    file.write_text(replaced(mutant, whole))
    try:
        said = built(goals)
        if said is not None:
            return "DOES NOT COMPILE", "\n".join(said.splitlines()[-3:])
        return ("killed" if fails(command) else "SURVIVED"), ""
    finally:
        file.write_text(whole)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="default: all mutants")
    parser.add_argument("--stale", action="store_true", help="nothing is built")
    options = parser.parse_args()
    os.environ.update(OMP_WAIT_POLICY="passive", ASAN_OPTIONS="detect_leaks=0")
    tree = ROOT if options.stale else TREE
    if not options.stale:
        make_tree()
    mutants = [mutant for name in ("mutants", "mutants_cuda")
               for mutant in read_mutants(tree / "dev" / name)
               if not options.words or any(word in " ".join(mutant[:3]) for word in options.words)]
    if not mutants:
        sys.exit(f"error: no mutant has one of the words {' '.join(options.words)}\n"
                 "  -> dev/mutants and dev/mutants_cuda have them all")
    tests = {test: arrange(tree, test) for test in dict.fromkeys(m.test for m in mutants)}
    for test, found in tests.items():
        if found and not options.stale and (built(found[0]) is not None or fails(found[1])):
            sys.exit(f"error: the test {test} is not green without a mutant\n"
                     f"  -> cd {TREE}; {MAKE} {found[0]} && {found[1]}")
    counts = collections.Counter()
    for mutant in mutants:
        said, more = stale(tree, mutant, tests[mutant.test]), ""
        if not said and not options.stale:
            said, more = outcome(mutant, *tests[mutant.test])
        counts["passed" if said in (None, "killed") else "failed"] += 1
        if said:
            print("\n".join(filter(None, (f"{said}: {' '.join(mutant[:3])}", more))), flush=True)
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
