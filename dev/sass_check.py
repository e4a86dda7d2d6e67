#!/usr/bin/env python3
"""sass_check.py: gates on the machine code of every kernel, and their table, dev/sass/table.txt.

    sh dev/arch_check.sh             compiles, and then calls this with the folder of its results
    sh dev/arch_check.sh --write     the same, and renews the table
    python3 dev/sass_check.py FOLDER [--gates | --write]     FOLDER: build/arch; --gates: no table

It fails where
  - the table is not what the code gives. The figures depend on nvcc, so the table names its nvcc;
    with another one only HMMA and LDSM of the hot loops are compared;
  - an instruction that needs the whole warp may find lanes apart (sass/flow.py);
  - 16 bytes that lie side by side are read or written in smaller pieces (sass/measure.py);
  - in the loop of a kernel on tensor cores LDSM or HMMA stand between the wait for a copy and the
    barrier behind it, or the loop touches local memory;
  - in the loop of a kernel by wgmma there is a wait for less than four HGMMA each: ptxas has made
    them wait for each other.
Spilled registers are dev/arch_check.sh's own gate. Needs nvdisasm, from the CUDA toolkit or PyPI's
nvidia-cuda-nvdisasm: NVDISASM=, PATH, or Python's packages. Only the standard library.
"""
import collections
import concurrent.futures
import fnmatch
import importlib.metadata
import os
import pathlib
import re
import shutil
import sys

from sass import flow, measure, model, parse

TABLE = pathlib.Path(__file__).parent / "sass" / "table.txt"
ARCHS, MODEL = ("80", "90a", "100", "120"), "90a"
ALONE = re.compile(r"classifier_kernel|attention_decode_kernel")      # a line for each instance

# What may fail: kernel, precision and architecture as FAILED names them, with * for any | the gate,
# or instruction of accesses in pieces | why.
ALLOWED = """
grouped<[012]> bf16 *|lanes apart|`busy` is a bit of a register, the same in all lanes of a warp
norm_backward<*|lanes apart|conditions in bits of a register, which flow.py does not follow
qkv_backward<32, 4, 128, 1, false> bf16 sm_90a|lanes apart|as norm_backward (R2P, P2R)
qkv_backward<256, 4, 256, 1, false> bf16 sm_90a|lanes apart|as norm_backward (R2P, P2R)
qkv_backward<* sm_80|LDS|sums of gains, once a block, at its end
router_plan *|LDS|one block a layer: sums of counts
router_plan *|STS|one block a layer: sums of counts
router_plan *|STG|one block a layer: sums of counts
router_count *|LDG|statistics: one thread at the end of one block
router_count *|STG|statistics: one thread at the end of one block
combine *|LDG|a token's places and gates: one address for all lanes
adamw *|LDG|the tensor that a block works on: one address for all lanes
ngpt_normalize *|LDG|the tensor that a block works on: one address for all lanes
tensor_* *|LDG|statistics: a struct of sums, once a block
tensor_* *|STG|statistics: a struct of sums, once a block
loss_sums *|LDG|two sums, one thread
loss_sums *|STG|two sums, one thread
"""


# ------------------------------------------------------------------------------------- one kernel

Figures = collections.namedtuple(
    "Figures", "name prec arch registers instructions local hmma ldsm loop shared global_ cycles "
    "wgmma")
Wgmma = collections.namedtuple("Wgmma", "hgmma all waits copies registers local bounds")
Loop = collections.namedtuple("Loop", "instructions hmma ldsm copies local order shared global_")


def short(name):
    """attention_forward<64, 64, false> of attention_forward_kernel<AttentionTiles<64, 64, .."""
    name = re.sub(r"(\w+Tiles|Team)<([^<>]*)>", r"\2", name)
    return name.replace("_kernel", "").replace(" >", ">")


def loop_figures(code):
    return Loop(len(code), measure.count(code, "HMMA"), measure.count(code, "LDSM"),
                measure.count(code, "LDGSTS"), measure.count(code, "LDL", "STL"),
                measure.order(code), measure.widths(code, "LDS", "STS"),
                measure.widths(code, "LDG", "STG"))


def wgmma_figures(kernel):
    """Of a kernel by wgmma, or None."""
    loop = measure.wgmma_loop(kernel)
    if not loop:
        return None
    return Wgmma(measure.count(loop, "HGMMA"), measure.count(kernel.code, "HGMMA"),
                 measure.waits(loop), measure.count(kernel.code, "UTMALDG", "LDGSTS"),
                 measure.warpgroup_registers(kernel.code), measure.count(loop, "LDL", "STL"),
                 measure.wgmma_bounds(loop))


def figures(kernel, prec, arch, registers, cycles=False):
    code, place = kernel.code, measure.hot_loop(kernel)
    loop = loop_figures(code[place[0]:place[1] + 1]) if place else None
    cycles = model.cycles(kernel, place) if cycles and place and arch == MODEL else None
    return Figures(kernel.name, prec, arch, registers, len(code) - measure.count(code, "NOP"),
                   measure.count(code, "LDL", "STL"), measure.count(code, "HMMA"),
                   measure.count(code, "LDSM"), loop, measure.width_counts(code, "LDS", "STS"),
                   measure.width_counts(code, "LDG", "STG"), cycles, wgmma_figures(kernel))


def gates(kernel, found):
    """(gate, detail) of whatever is wrong."""
    for i in flow.apart(kernel):
        yield "lanes apart", f"{kernel.code[i].text} (instruction {i})"
    for run in measure.narrow_runs(kernel):
        yield run.base, (f"{run.bytes} bytes side by side in {run.accesses} accesses, "
                         f"from {kernel.code[run.at].text} (instruction {run.at}) on")
    if found.loop and not measure.products_wait(found.loop.order):
        yield "order", f"products before their copies are there: {found.loop.order:.120}"
    if found.loop and found.loop.local:
        yield "local memory", f"{found.loop.local} accesses in the hot loop"
    if (wgmma := found.wgmma) and wgmma.local:
        yield "local memory", f"{wgmma.local} accesses in the hot loop"
    if wgmma and 4 * wgmma.waits > wgmma.hgmma:
        yield "serialized", f"{wgmma.waits} waits for {wgmma.hgmma} HGMMA of the hot loop"


def examine(cubin, prec, arch, registers, nvdisasm, cycles):
    """(figures, failures as (kernel, prec, arch, gate, detail)) of a file; a process of its own."""
    every, failures = [], []
    for kernel in parse.disassemble(cubin, nvdisasm):
        known = registers.get((kernel.name, prec, "sm_" + arch))
        found = figures(kernel, prec, arch, known, cycles)
        every.append(found)
        failures += [(kernel.name, prec, arch, *failure) for failure in gates(kernel, found)]
    return every, failures


# -------------------------------------------------------------------------------------- the table

TENSOR = "{:42} {:7} {:>4} {:>5} {:>5} {:>5} {:>9} {:>8} {:>5} {:>6}  {:12} {:8} {:>6}"
WGMMA = "{:34} {:>4} {:>7} {:>5} {:>5} {:>6} {:>5} {:>6} {:>6} {:>6} {:>7} {:>5}"
PLAIN = "{:34} {:>3} {:4}  {:>19}  {:>27}  {:>11}  {:22} {}"


def tensor_lines(every):
    yield TENSOR.format("kernel", "arch", "regs", "instr", "local", "loop", "HMMA", "LDSM", "ratio",
                        "copies", "LDS STS", "LDG STG", "cycles").rstrip()
    for f in sorted(every, key=lambda f: (short(f.name), f.prec, ARCHS.index(f.arch))):
        if f.loop:
            yield TENSOR.format(
                short(f.name), "sm_" + f.arch, f.registers, f.instructions, f.local,
                f.loop.instructions, f"{f.loop.hmma}/{f.hmma}", f"{f.loop.ldsm}/{f.ldsm}",
                f"{f.loop.ldsm / f.loop.hmma:.2f}", f.loop.copies, f.loop.shared, f.loop.global_,
                f.cycles or "").rstrip()


def wgmma_lines(every):
    yield WGMMA.format("kernel", "regs", "taken", "instr", "local", "HGMMA", "waits", "copies",
                       "tensor", "shared", "special", "issue").rstrip()
    for f in sorted(every, key=lambda f: short(f.name)):
        if w := f.wgmma:
            yield WGMMA.format(short(f.name), f.registers, w.registers, f.instructions, f.local,
                               f"{w.hgmma}/{w.all}", w.waits, w.copies, *w.bounds).rstrip()


def plain_lines(every):
    groups = collections.defaultdict(list)
    for f in every:
        if not f.loop and not f.wgmma:
            name = short(f.name) if ALONE.match(f.name) else short(f.name.partition("<")[0])
            groups[name, f.prec].append(f)
    yield PLAIN.format("kernel", "of", "prec", "regs", "instr", "local", "LDS STS",
                       "LDG STG").rstrip()
    for (name, prec), group in sorted(groups.items()):
        of = {arch: [f for f in group if f.arch == arch] for arch in ARCHS}
        def each(value, combine=sum):
            return " ".join(str(combine([value(f) for f in of[a]] or [0])) for a in ARCHS)
        model_of = of[MODEL] or group
        shared, global_ = (sum((getattr(f, field) for f in model_of), collections.Counter())
                           for field in ("shared", "global_"))
        yield PLAIN.format(name, len(model_of), prec, each(lambda f: f.registers or 0, max),
                           each(lambda f: f.instructions), each(lambda f: f.local),
                           measure.as_text(shared), measure.as_text(global_)).rstrip()


HEAD = """\
# The machine code of every kernel, as `make arch-check` compiles it. A change of a kernel shows as
# a diff of this file, which `sh dev/arch_check.sh --write` renews. Nothing here ran on a GPU.
# {nvcc}
#
# Kernels on tensor cores, in bf16. local: LDL and STL, accesses to spills and arrays. loop: the
# instructions of the loop with the most HMMA, as all columns behind it; HMMA, LDSM: in the loop/in
# the kernel; ratio: LDSM for an HMMA; copies: LDGSTS; LDS STS and LDG STG: bits of an access:how
# many; cycles: of a multiprocessor for one round of the loop of one block, sm_90a, by a model
# (dev/sass/model.py), not by a GPU.
"""
BY_WGMMA = """
# Kernels by wgmma, sm_90a, bf16. regs: at the launch; taken: given away by the producer/taken by a
# consumer; HGMMA and waits (for wgmma): in the hot loop (dev/sass/measure.py); copies: instructions
# that copy to shared memory, by TMA or cp.async; tensor, shared, special, issue: the cycles that a
# warpgroup's round of that loop takes at least for its products, reads of shared memory,
# exponentials and instructions. They rank variants and say what bounds a loop; they are no times.
"""
MIDDLE = """
# All other kernels: for sm_80, sm_90a, sm_100, sm_120 the most registers, the instructions and the
# local accesses of all instances together; of: how many instances; accesses are those of sm_90a.
"""


def table(every, nvcc):
    lines = [HEAD.format(nvcc=nvcc) + "#\n", *(line + "\n" for line in tensor_lines(every)),
             BY_WGMMA, *(line + "\n" for line in wgmma_lines(every)),
             MIDDLE, *(line + "\n" for line in plain_lines(every))]
    return "".join(lines)


def nvcc_of(text):
    return next((line[2:] for line in text.splitlines() if line.startswith("# nvcc")), "none")


def products_of(text):
    """(kernel, arch): (HMMA, LDSM) of the hot loop, from a table."""
    pattern = r"^(\S.*?)\s+(sm_\w+)(?:\s+\d+){4}\s+(\d+)/\d+\s+(\d+)/\d+"
    return {(kernel, arch): (int(hmma), int(ldsm))
            for kernel, arch, hmma, ldsm in re.findall(pattern, text, re.M)}


def compare(committed, now):
    """Lines that say how the tables differ."""
    if not committed:
        return ["expected a table, found none"]
    if nvcc_of(committed) == nvcc_of(now):
        old, new = committed.splitlines(), now.splitlines()
        return [f"- {line}" for line in old if line not in new] + \
               [f"+ {line}" for line in new if line not in old]
    print(f"skipped: the table is of {nvcc_of(committed)}, this is {nvcc_of(now)}")
    expected, found = products_of(committed), products_of(now)
    return [f"{kernel}, {arch}: expected {expected[kernel, arch][0]} HMMA and "
            f"{expected[kernel, arch][1]} LDSM in the loop, found {hmma} and {ldsm}"
            for (kernel, arch), (hmma, ldsm) in found.items()
            if expected.get((kernel, arch), (hmma, ldsm)) != (hmma, ldsm)]


# ----------------------------------------------------------------------------------------- a run

def find_nvdisasm():
    """The path of nvdisasm, or None."""
    if given := os.environ.get("NVDISASM") or shutil.which("nvdisasm"):
        return given
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == "nvdisasm"), None)


def registers_of(path):
    """(kernel, prec, arch): registers, from the lines that arch_check.sh made of ptxas's output."""
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return {(row[0], row[1], row[2]): int(row[3]) for row in rows}


def allowed():
    """(pattern, gate, reason) of each line of ALLOWED."""
    return [tuple(line.split("|")) for line in ALLOWED.splitlines() if line]


def report(failures, rows):
    """Prints a line for each gate that a kernel fails, and for each allowed row that was needed;
    returns how many kernels and gates failed."""
    groups, reasons = collections.defaultdict(list), {}
    for name, prec, arch, gate, detail in failures:
        groups[f"{short(name)} {prec} sm_{arch}", gate].append(detail)
    failed = 0
    for (kernel, gate), details in groups.items():
        matching = (row for row in rows if row[1] == gate and fnmatch.fnmatch(kernel, row[0]))
        row = next(matching, None)
        if row:
            reasons[row] = reasons.get(row, 0) + 1
            continue
        failed += 1
        more = f", and {len(details) - 1} more" if len(details) > 1 else ""
        print(f"FAILED: {kernel}: {gate}: {details[0]}{more}")
    for (pattern, gate, reason), count in reasons.items():
        print(f"allowed: {pattern}, {gate}, in {count}: {reason}")
    return failed


def main():
    options = [option for option in sys.argv[1:] if option.startswith("--")]
    if len(sys.argv) < 2 or len(sys.argv) - len(options) != 2 or \
            set(options) - {"--gates", "--write"}:
        sys.exit(__doc__)
    folder = pathlib.Path(next(word for word in sys.argv[1:] if not word.startswith("--")))
    nvdisasm = find_nvdisasm()
    if not nvdisasm:
        print("skipped: gates on machine code: no nvdisasm (sh dev/setup.sh --all, or NVDISASM=)")
        return
    registers, jobs = registers_of(folder / "kernels"), []
    for cubin in sorted(folder.glob("*-*/*.cubin")):
        prec = cubin.parent.name.rpartition("-")[2]
        arch = re.search(r"compute_(\w+)\.", cubin.name)[1]
        jobs.append((cubin, prec, arch, registers, nvdisasm, "--gates" not in options))
    if not jobs:
        sys.exit(f"error: expected {folder}/*-PREC/*.cubin, found none\n  -> sh dev/arch_check.sh")
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        results = list(pool.map(examine, *zip(*jobs)))
    every = [found for figures, _ in results for found in figures]
    failed = report([failure for _, failures in results for failure in failures], allowed())
    passed = len(every)
    if "--gates" not in options:
        now = table(every, (folder / "nvcc").read_text().strip())
        if "--write" in options:
            TABLE.write_text(now)
        different = compare(TABLE.read_text() if TABLE.exists() else "", now)
        for line in different:
            print(f"FAILED: {TABLE.name}: {line}")
        if different:
            print("a change on purpose: sh dev/arch_check.sh --write, and commit the table")
        failed, passed = failed + len(different), passed + (not different)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
