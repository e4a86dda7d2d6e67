"""check.py: every kernel of train_gpt.cu, as PTX that nvcc made, executed on the CPU and compared
with numpy in float64. See README.md.

    python3 dev/ptx/check.py                   bf16, compute capability 9.0
    python3 dev/ptx/check.py --short           the same in the smaller sizes: a part of make test
    python3 dev/ptx/check.py --all             bf16 and fp32 for 8.0, 9.0 and 12.0
    python3 dev/ptx/check.py norm qkv          some checks; then kernels may remain unexecuted

It fails if a value is off by more than its limit, if the interpreter ends a launch with a message,
or if a kernel of train_gpt.cu was never executed. Needs nvcc and numpy, no GPU.
"""
import argparse
import re
import shutil
import subprocess
import sys
import time

import build

build.leave_if_missing("kernels as PTX")
from gpu import Gpu
from harness import Test
from layers import attention, loss, moe, norm, qkv, sm90, small, trainer, update

# The check_ functions of the layers, by name.
CHECKS = {name[6:]: check
          for module in (small, sm90, attention, norm, qkv, moe, loss, update, trainer)
          for name, check in vars(module).items() if name.startswith("check_")}


def readable(names):
    """Kernels' names as C++ has them, without their parameters."""
    if not names or not shutil.which("c++filt"):
        return names
    text = subprocess.run(["c++filt", "-p", *names], capture_output=True, text=True, check=True)
    return [n.removeprefix("void ") for n in text.stdout.splitlines()]


# Of kinds.cuh: they compare kernels by wgmma with the others, in bf16 for 9.0 alone.
COMPARISON = ("fill_kernel", "fill_documents_kernel", "compare_kernel")


def coverage(gpu):
    """The kernels of train_gpt.cu that no launch executed, and the percentage of the others'
    instructions that ran."""
    hits = {name: gpu.hits(name) for name in gpu.modules[0].bodies if name in gpu.loaded}
    left = [name for name in gpu.modules[0].bodies
            if (name not in hits or not hits[name].any()) and
            gpu.modules[0].body(name).split() != ["ret;"]]     # for other architectures
    ran, of = sum(h.sum() for h in hits.values()), sum(len(h) for h in hits.values())
    return left, 100 * ran // max(of, 1)


def check_one(arch, prec, o):
    """Returns (passed, failed) of one architecture and precision."""
    begun = time.time()
    gpu = Gpu(arch, prec, o.seed)
    built = time.time() - begun
    t = Test(gpu, o.seed, not o.quiet, not o.short)
    for name, check in CHECKS.items():
        if o.names and name not in o.names:
            continue
        at, executed = time.time(), gpu.vm.vm_executed()
        t.run(check)
        if not o.quiet:
            executed = (gpu.vm.vm_executed() - executed) / 1e6
            print(f"{name}: {time.time() - at:.1f} s, {executed:.1f} M instructions of warps")
    failed = sum(not passed for _, _, passed in t.results)
    passed = len(t.results) - failed
    left, percent = coverage(gpu)
    kernels = len(gpu.modules[0].bodies)
    if (arch, prec) != ("90a", "bf16"):
        compare = [name for name in left if any(word in name for word in COMPARISON)]
        left, kernels = [name for name in left if name not in compare], kernels - len(compare)
    ran = kernels - len(left)
    if o.names:
        left = []
    for kernel in readable(left):
        print(f"  FAILED {kernel}: no check executes this kernel")
    print(f"sm_{arch} {prec}: {ran} of {kernels} kernels, {percent} % of their instructions; "
          f"{passed} checks passed, {failed + len(left)} failed; nvcc {built:.0f} s, checks "
          f"{time.time() - begun - built:.0f} s", flush=True)
    return passed + ran, failed + len(left)


def check_all(o):
    """Each pair in a process of its own: their kernels have the same names."""
    passed = failed = 0
    for arch in build.ARCHS:
        for prec in build.REALS:
            command = [sys.executable, __file__, "--quiet", "--arch", arch, "--prec", prec,
                       "--seed", str(o.seed)] + ["--short"] * o.short + o.names
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            *lines, last = run.stdout.splitlines() or [""]
            print("\n".join(lines), flush=True)
            count = re.fullmatch(r"(\d+) passed, (\d+) failed", last)
            passed += int(count[1]) if count else 0
            failed += int(count[2]) if count else 1
    return passed, failed


def main():
    a = argparse.ArgumentParser(description="executes nvcc's PTX and compares it with numpy")
    a.add_argument("names", nargs="*", help="checks; default: all")
    a.add_argument("--arch", default="90a", choices=build.ARCHS)
    a.add_argument("--prec", default="bf16", choices=build.REALS)
    a.add_argument("--all", action="store_true", help="every architecture and precision")
    a.add_argument("--short", action="store_true", help="smaller sizes")
    a.add_argument("--quiet", action="store_true", help="only failures and sums")
    a.add_argument("--seed", type=int, default=1, help="of inputs and of the order of threads")
    o = a.parse_args()
    unknown = sorted(set(o.names) - set(CHECKS))
    if unknown:
        sys.exit(f"error: no check {' '.join(unknown)}; expected some of {' '.join(CHECKS)}")
    passed, failed = check_all(o) if o.all else check_one(o.arch, o.prec, o)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
