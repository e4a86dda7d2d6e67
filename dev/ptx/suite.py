"""suite.py: the project's own tests of CUDA code (dev/test/test_*.cu, test_gpt.cu), built by nvcc,
with their kernels executed from its PTX: the whole trainer against the judge in double.

    python3 dev/ptx/suite.py [--arch 90a] [--prec bf16] [WORDS]      tests whose name has a word
    python3 dev/ptx/suite.py --list

Each test runs in a process of its own. A kernel that reads memory which nobody has written fails.
"""
import argparse
import ctypes
import glob
import os
import subprocess
import sys
import time

import build

build.leave_if_missing("tests of CUDA code as PTX")
from gpu import Interpreter
from ptx import Module

# cuda_gpu starts its own program again with other settings of the emulator; here that is Python.
# other_modes_muon runs no kernel that other_modes and cuda_muon_modes do not, and takes an hour.
SKIPPED = ("cuda_gpu", "other_modes_muon")


class Suite(Interpreter):
    """The tests of suite.so, linked from every file, and the PTX of each file."""

    def __init__(self, folder, arch, seed):
        super().__init__(arch, seed)
        # The trainer first: the files of tests have copies of the kernels that they call.
        self.unread = sorted(glob.glob(folder + "/*.ptx"), key=lambda p: ("train_gpt" not in p, p))
        self.vm.runtime_exit(1)
        self.lib = ctypes.CDLL(folder + "/suite.so", ctypes.RTLD_GLOBAL)

    def load(self, name, body=None):
        """Reads files until one has the kernel."""
        while self.unread and not any(name in m.bodies for m in self.modules):
            with open(self.unread.pop(0), encoding="utf-8") as f:
                self.modules.append(Module(f.read()))
        super().load(name, body)

    def main(self, *words):
        argv = [b"suite", *(w.encode() for w in words), None]
        return self.lib.main(len(words) + 1, (ctypes.c_char_p * len(argv))(*argv))


def run_tests(base, names, limit):
    """(passed, failed), one process a test."""
    passed = failed = 0
    for name in names:
        begun, out = time.time(), ""
        try:
            run = subprocess.run([*base, "--here", name], capture_output=True, text=True,
                                 timeout=limit, env={**os.environ, "OMP_NUM_THREADS": "1"},
                                 check=False)
            good, out = run.returncode == 0, run.stdout + run.stderr
        except subprocess.TimeoutExpired:
            good, out = False, f"more than {limit} s"
        passed, failed = passed + good, failed + (not good)
        print(f"{name:40s} {'ok' if good else 'FAILED'}  {time.time() - begun:.0f} s", flush=True)
        if not good:
            print("    " + "\n    ".join(out.strip().split("\n")[-8:]), flush=True)
    return passed, failed


def main():
    a = argparse.ArgumentParser(description="the project's tests of CUDA code, on nvcc's PTX")
    a.add_argument("words", nargs="*")
    a.add_argument("--arch", default="90a", choices=build.ARCHS)
    a.add_argument("--prec", default="bf16", choices=build.REALS)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--list", action="store_true")
    a.add_argument("--here", action="store_true", help="the tests of these names, in this process")
    a.add_argument("--limit", type=int, default=5400, help="seconds for a test")
    o = a.parse_args()
    folder = build.build_suite(o.arch, o.prec)
    if o.here or o.list:
        suite = Suite(folder, o.arch, o.seed)
        status = suite.main(*(["--list"] if o.list else [f"={w}" for w in o.words]))
        sys.stdout.flush()
        os._exit(status)       # without the destructors of a program that believes in a GPU
    base = [sys.executable, __file__, "--arch", o.arch, "--prec", o.prec, "--seed", str(o.seed)]
    names = subprocess.run([*base, "--list"], capture_output=True, text=True, check=True)
    # Two files may have tests of one name: they run together.
    names = [n for n in dict.fromkeys(names.stdout.split()) if n not in SKIPPED and
             (not o.words or any(w in n for w in o.words))]
    if not names:
        sys.exit(f"error: no test has one of the words {' '.join(o.words)}
  -> --list")
    passed, failed = run_tests(base, names, o.limit)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
