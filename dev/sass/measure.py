"""measure.py: what a kernel's machine code is made of.

The hot loop of a kernel on tensor cores is its loop with the most HMMA, the shortest of those. Of a
kernel by wgmma, where loops that wait for a barrier overlap it and a prologue does half a round, it
is the shortest loop with about half as many HGMMA, and exponentials, as any other (0.45, by
inspection).
"""
import collections
import math
import re

from . import flow

MEMORY = ("LDS", "STS", "LDG", "STG", "LD", "ST")
ADDRESS = re.compile(r"\[([^\[\]]*)\]$")
Run = collections.namedtuple("Run", "base bytes accesses at")


def loops(kernel):
    """(first, last) of each loop: where branches backwards lead, and the last of them."""
    found = {}
    for i, ins in enumerate(kernel.code):
        at = kernel.labels.get(ins.target)
        if ins.base == "BRA" and at is not None and at < i:
            found[at] = i
    return sorted(found.items())


def count(code, *bases):
    return sum(ins.base in bases for ins in code)


def hot_loop(kernel):
    """(first, last), or None for a kernel without HMMA in a loop."""
    def weight(loop):
        code = kernel.code[loop[0]:loop[1] + 1]
        return count(code, "HMMA"), -len(code)
    best = max(loops(kernel), key=weight, default=None)
    return best if best and weight(best)[0] else None


def wgmma_loop(kernel):
    """The instructions of the hot loop of a kernel by wgmma, or None."""
    found = [kernel.code[first:last + 1] for first, last in loops(kernel)]
    found = [code for code in found if count(code, "HGMMA")]
    for word in ("HGMMA", "MUFU.EX2"):
        counts = [sum(ins.name.startswith(word) for ins in code) for code in found]
        found = [code for code, n in zip(found, counts) if n >= 0.45 * max(counts)]
    return min(found, key=len, default=None)


Bounds = collections.namedtuple("Bounds", "tensor shared special issue")


def wgmma_bounds(code):
    """Cycles of a multiprocessor of compute capability 9.0 that a warpgroup's round of the loop
    takes at least. tensor: 64 x N x 16 takes N / 2. shared: each HGMMA reads B, and A unless it is
    in registers, 128 bytes a cycle. special: 8 for each MUFU of a warp. issue: one instruction a
    cycle of each of the four partitions, which hold a warp each."""
    tensor = shared = 0
    for ins in code:
        if ins.base == "HGMMA":
            n = int(re.search(r"x(\d+)x16", ins.name)[1])
            tensor += n // 2
            shared += (32 * n + 2048 * ins.operands[1].startswith("gdesc")) // 128
    return Bounds(tensor, shared, 8 * count(code, "MUFU"), len(code) - count(code, "NOP"))


def waits(code):
    """How many times the code waits for wgmma."""
    return sum(ins.name.startswith("WARPGROUP.DEPBAR") for ins in code)


def warpgroup_registers(code):
    """The registers of a thread that setmaxnreg gives away, and that it takes: 24/240."""
    found = {ins.name.split(".")[1]: int(ins.operands[-1], 16) for ins in code
             if ins.base == "USETMAXREG"}
    return "/".join(str(found.get(word, "-")) for word in ("DEALLOC", "TRY_ALLOC"))


def width(ins):
    """Bytes that a lane loads or stores."""
    for part in ins.name.split(".")[1:]:
        if part in ("U8", "S8", "U16", "S16", "64", "128"):
            return int(re.sub(r"\D", "", part)) // 8
    return 4


def width_counts(code, *bases):
    """Bits of an access: how many such accesses."""
    return collections.Counter(8 * width(ins) for ins in code if ins.base in bases)


def as_text(counts):
    """128:16 32:4 are 16 accesses of 128 bits and 4 of 32."""
    return " ".join(f"{bits}:{counts[bits]}" for bits in sorted(counts, reverse=True)) or "-"


def widths(code, *bases):
    return as_text(width_counts(code, *bases))


def address(ins):
    """(registers of the address, its constant), or None."""
    for operand in ins.operands:
        if found := ADDRESS.search(operand):
            parts = found[1].split("+")
            constant = sum(int(part, 16) for part in parts if re.fullmatch(r"-?0x[0-9a-f]+", part))
            return tuple(part for part in parts if not part.startswith(("0x", "-0x"))), constant
    return None


def narrow_runs(kernel):
    """Runs of 16 bytes or more that lie side by side and that a lane reads or writes in more
    accesses than 16 bytes at a time would take. Between two labels or branches, from one value of
    the address's registers."""
    blocks, versions, groups = set(kernel.labels.values()), collections.Counter(), {}
    for i, ins in enumerate(kernel.code):
        if i in blocks or (i and kernel.code[i - 1].base in ("BRA", "EXIT", "BSYNC")):
            versions["block"] += 1
        if ins.base in MEMORY and (place := address(ins)):
            registers, constant = place
            names = re.findall(r"U?R\d+", " ".join(registers))
            key = (ins.base, registers, versions["block"], ins.guard,
                   *(versions[name] for name in names))
            groups.setdefault(key, []).append((constant, width(ins), i))
        versions.update(flow.effects_of(kernel)[i].writes)
        if ins.operands and ins.operands[0].startswith("UR"):
            versions[ins.operands[0]] += 1
    found = []
    for (base, *_), accesses in groups.items():
        run = []
        for access in sorted(set(accesses)) + [(math.inf, 0, 0)]:
            if run and access[0] > run[-1][0] + run[-1][1]:
                found += wide_enough(base, run)
                run = []
            run.append(access)
    return found


def wide_enough(base, run):
    """A list of a Run, or of none if 16 bytes at a time would take as many accesses."""
    size, places = run[-1][0] + run[-1][1] - run[0][0], {constant for constant, *_ in run}
    if size < 16 or len(places) <= -(-size // 16):
        return []
    return [Run(base, size, len(places), run[0][2])]


ORDER = {"HMMA": "mma", "LDSM": "ldsm", "LDGSTS": "copy", "LDGDEPBAR": "commit", "DEPBAR": "wait",
         "BAR": "barrier"}


def order(code):
    """wait, barrier, copy, commit, ldsm and mma of a loop in their order, each run once. Loads and
    products are mixed on purpose, so they count as one kind: products."""
    steps = []
    for ins in code:
        word = ORDER.get(ins.base)
        word = "products" if word in ("ldsm", "mma") else word
        if word and (not steps or steps[-1] != word):
            steps.append(word)
    return " ".join(steps)


def products_wait(steps):
    """Whether in a loop of these steps no product stands between a wait for copies and the barrier
    behind it, after which other threads' copies are there too. The loop may begin anywhere."""
    found = steps.split()
    if "wait" not in found:
        return True
    turned = found[found.index("wait"):] + found[:found.index("wait")]
    open_ = True
    for step in turned:
        open_ = step == "barrier" or (open_ and step != "wait")
        if step == "products" and not open_:
            return False
    return True
