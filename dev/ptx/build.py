"""build.py: compiles what the checks run, into build/ptx, and only what is older than its sources.

    vm.so                   the interpreter, the CUDA runtime, and dev/emu's cuBLASLt
    services.so             llmc/run and the built-in corpus
    ARCH-PREC.so, .ptx      kernels.cu by nvcc: host code for launches, and the kernels as PTX
    ladder-NAME-ARCH.so     a ladder of dev/kernels, likewise
    suite-ARCH-PREC/        the project's tests of CUDA code by nvcc: suite.so and a .ptx for each

Needs nvcc (NVCC=, else in PATH or in CUDA/bin), its headers, and cublasLt.h (CUBLAS=); see
dev/cuda_headers.sh.
"""
import contextlib
import fcntl
import glob
import importlib.util
import os
import shutil
import subprocess
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
HERE = "dev/ptx"                                     # commands run in ROOT
OUT = "build/ptx"
ARCHS = ("80", "90a", "120")                         # as in compute_90a
REALS = {"bf16": "__nv_bfloat16", "fp32": "float"}
HOST = "-fPIC -O1 -w -fno-math-errno -fno-trapping-math -fopenmp"


def run(command, quiet=False):
    """Runs a command in ROOT; a failure ends the program with its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"FAILED: {' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr.strip() and not quiet:
        sys.stderr.write(done.stderr)
    return done.stdout


def toolkit():
    """(nvcc or None, CUDA's folder, folder of cublasLt.h)"""
    cuda, cublas = run(["sh", "-c", ". dev/cuda_headers.sh; echo $CUDA; echo $CUBLAS"]).split()
    nvcc = shutil.which(os.environ.get("NVCC") or "nvcc") or shutil.which(cuda + "/bin/nvcc")
    return nvcc, cuda, cublas


def missing():
    """Why nothing can run here; "" if it can."""
    if not importlib.util.find_spec("numpy"):
        return "no numpy (sh dev/setup.sh --all)"
    nvcc, cuda, cublas = toolkit()
    if not nvcc:
        return f"no nvcc in PATH or {cuda}/bin"
    for header in (cuda + "/include/cuda_runtime.h", cublas + "/cublasLt.h"):
        if not os.path.exists(header):
            return f"no {header} (sh dev/setup.sh --all, or CUDA=... CUBLAS=...)"
    return ""


def leave_if_missing(what):
    """Ends the program with a line that says what is skipped, where nothing can run."""
    why = missing()
    if why:
        print(f"skipped: {what}: {why}\n0 passed, 0 failed")
        sys.exit(0)


def files(*patterns):
    return sorted(f for p in patterns for f in glob.glob(p, root_dir=ROOT))


def is_fresh(target, sources):
    path = os.path.join(ROOT, target)
    if not os.path.exists(path):
        return False
    made = os.path.getmtime(path)
    return all(os.path.getmtime(os.path.join(ROOT, s)) < made for s in sources)


def trainer_sources():
    return files("train_gpt.cu", "llmc/*.cuh", "llmc/*.h", "llmc/run/*.h")


@contextlib.contextmanager
def alone():
    """Two programs never build at the same time."""
    os.makedirs(os.path.join(ROOT, OUT), exist_ok=True)
    with open(os.path.join(ROOT, OUT, "lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_interpreter():
    _, cuda, cublas = toolkit()
    sources = [f"{HERE}/vm.cpp", f"{HERE}/runtime.cpp", "dev/emu/cublaslt.cpp"]
    if not is_fresh(f"{OUT}/vm.so", sources + files(f"{HERE}/*.h")):
        run(["g++", "-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared",
             "-Wall", "-Wextra", "-Wno-free-nonheap-object", "-isystem", cuda + "/include",
             "-isystem", cublas, *sources, "-o", f"{OUT}/vm.so"])
    sources = files("llmc/run/*.c", "data/stories.c")
    if not is_fresh(f"{OUT}/services.so", sources + files("llmc/*.h", "llmc/run/*.h", "data/*.h")):
        run(["gcc", "-std=c17", "-D_DEFAULT_SOURCE", "-D_XOPEN_SOURCE=700", "-O1", "-fPIC", "-w",
             "-shared", "-pthread", *sources, "-o", f"{OUT}/services.so", "-lm"])


def nvcc_flags(arch, prec):
    _, _, cublas = toolkit()
    return ["-std=c++17", "-O3", f"-DREAL={REALS[prec]}", f"-DPREC={prec}", f"-I{cublas}", "-w",
            "-gencode", f"arch=compute_{arch},code=compute_{arch}", "-Xcompiler", HOST]


def compile_cuda(source, target, arch, prec, *more):
    """nvcc: target.o or .so, and target.ptx beside it."""
    base, extension = os.path.splitext(target)
    keep = base + ".keep"
    os.makedirs(os.path.join(ROOT, keep), exist_ok=True)
    run([toolkit()[0], *nvcc_flags(arch, prec), "--keep", "--keep-dir", keep, *more, source,
         "-o", target], quiet=True)
    stem = os.path.splitext(os.path.basename(source))[0]
    shutil.move(os.path.join(ROOT, keep, stem + ".ptx"), os.path.join(ROOT, base + ".ptx"))
    shutil.rmtree(os.path.join(ROOT, keep))


def build_kernels(arch, prec):
    """The path of ARCH-PREC, without an extension."""
    base, source = f"{OUT}/{arch}-{prec}", f"{HERE}/kernels.cu"
    with alone():
        build_interpreter()
        if not is_fresh(base + ".so", trainer_sources() + [source]):
            compile_cuda(source, base + ".so", arch, prec, "-shared", "-cudart", "none")
    return os.path.join(ROOT, base)


def build_ladder(name, arch):
    """The path of a ladder of dev/kernels in bf16, without an extension: a library with its main,
    in the emulator's sizes."""
    base, source = f"{OUT}/ladder-{name}-{arch}", f"dev/kernels/{name}.cu"
    with alone():
        build_interpreter()
        sources = trainer_sources() + files("dev/kernels/*.cuh", "dev/test/*.cuh", "dev/test/*.h")
        if not is_fresh(base + ".so", sources + [source]):
            compile_cuda(source, base + ".so", arch, "bf16", "-DUNTIMED", "-shared", "-cudart",
                         "none")
    return os.path.join(ROOT, base)


def build_suite_objects(folder, arch, prec):
    """Compiles the judge and every file of tests; returns the objects."""
    objects = [folder + "/judge.o"]
    if not is_fresh(objects[0], files("train_gpt.c", "llmc/*.h", "llmc/run/*.h")):
        run(["gcc", "-std=c17", "-D_DEFAULT_SOURCE", "-D_XOPEN_SOURCE=700", "-O2", "-fPIC", "-w",
             "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
             "-fopenmp-simd", "-DREAL=double", "-DPREC=fp64", "-Dmain=judge_main", "-c",
             "train_gpt.c", "-o", objects[0]])
    for source in files("dev/test/gpu_main.cu", "dev/test/test_*.cu", "test_gpt.cu",
                        "train_gpt.cu"):
        target = f"{folder}/{os.path.splitext(os.path.basename(source))[0]}.o"
        main = ["-Dmain=trainer_main"] if source == "train_gpt.cu" else []
        headers = trainer_sources() + files("dev/test/*.cuh", "dev/test/*.h")
        if not is_fresh(target, headers + [source]):
            compile_cuda(source, target, arch, prec, *main, "-c")
        objects.append(target)
    return objects


def build_suite(arch, prec):
    """The folder of the suite."""
    folder = f"{OUT}/suite-{arch}-{prec}"
    with alone():
        build_interpreter()
        os.makedirs(os.path.join(ROOT, folder), exist_ok=True)
        objects = build_suite_objects(folder, arch, prec)
        if not is_fresh(f"{folder}/suite.so", objects):
            run(["g++", "-shared", "-fopenmp", *objects, "-o", f"{folder}/suite.so"])
    return os.path.join(ROOT, folder)
