"""mutate.py: breaks the PTX of a kernel, one place at a time, and expects its check to see it.

    python3 dev/ptx/mutate.py [--each N] [--edit WORD] [--verbose] [WORDS]
                                                            kernels whose name has a word

The edits are the mistakes that inline PTX and barriers invite: operands in the wrong order, a
barrier or a wait that is missing or comes too late, a copy of the wrong length. It fails if a
mutant is not seen, except for those in UNSEEN, which change nothing.
"""
import argparse
import re
import sys
import time
import zlib

import build

build.leave_if_missing("mutants of PTX")
import numpy as np
from gpu import Gpu
from harness import Test
from layers import attention, loss, moe, norm, small, sm90, update


def attention_of(QK, HS, KV=1, backward=True):
    """129 tokens and 1: of every tile that is copied, some row lies past the end. Documents of 43
    in two sequences: borders inside tiles."""
    def check(t):
        for B, T, document in ((1, 129, 0), (1, 1, 0), (2, 129, 43)):
            attention.attention(t, B, T, 2, KV, QK, HS, backward=backward, document=document)
    return check


def product(t):
    sm90.ladder(t, "product")


def experts(t):
    moe.experts(t, 130, 4, 2, 1, 136, 136, True, empty=2)


def experts_sm90(t):
    sm90.experts_by_wgmma(t, 150, 3, 2, 1, 264, 328, True, empty=2)


# A part of the mangled name, and the check that executes the kernel.
KERNELS = {
    "attention_forward_kernelI14AttentionTilesILi64ELi64": attention_of(64, 64),
    "attention_dq_kernelI14AttentionTilesILi64ELi64": attention_of(64, 64),
    "attention_dkv_kernelI14AttentionTilesILi64ELi64": attention_of(64, 64),
    "attention_forward_kernelI14AttentionTilesILi128ELi128": attention_of(128, 128),
    "attention_dkv_kernelI14AttentionTilesILi128ELi128": attention_of(128, 128),
    "attention_forward_kernelI14AttentionTilesILi192ELi128": attention_of(192, 128, 2, False),
    "attention_dq_kernelI14AttentionTilesILi96ELi96": attention_of(96, 96),
    "attention_decode_kernel": attention.check_decode,
    "grouped_kernelILi0": experts,
    "grouped_kernelILi1": experts,
    "grouped_kernelILi2": experts,
    "grouped_sm90_kernelILi0": experts_sm90,
    "grouped_sm90_kernelILi1": experts_sm90,
    "grouped_sm90_kernelILi2": experts_sm90,
    "norm_backward_kernelI4TeamILi256ELi2":
        lambda t: norm.add_norm(t, 9, 1, 2560, bias=True, scratch=2 * 2560 * 2),
    "classifier_kernelILi1ELb0": loss.check_loss,
    "embedding_backward_kernel": small.check_embedding,
    "router_forward_kernel": moe.check_router,
    "router_backward_kernel": moe.check_router,
    "tile_kernel": product,
    "ring_kernel": product,
    "ngpt_normalize_kernel": lambda t: update.adamw(t, "lines of length 1", lines=True, clip=1e9),
}

# (edit, why it changes nothing, in these kernels), at the places that are chosen.
UNSEEN = [
    ("mma: C's registers 0 and 2 swapped", "the sums are still zero",
     ("attention_dkv_kernelI14AttentionTilesILi64ELi64",
      "attention_dq_kernelI14AttentionTilesILi96ELi96")),
    ("cp.async: always 16 bytes", "it reads inside of the array; the other operand is zero there, "
     "or the result is not stored", ("grouped_kernelILi0", "grouped_kernelILi1",
                                     "grouped_kernelILi2", "grouped_sm90_kernelILi0",
                                     "grouped_sm90_kernelILi2")),
    ("bar.warp.sync dropped", "a barrier of the block, or of dk's rows, has just been",
     ("attention_dkv_kernelI14AttentionTilesILi64ELi64", "grouped_kernelILi0",
      "grouped_kernelILi1")),
    ("bar.warp.sync dropped", "the first of two: the rows that it guards were last read before a "
     "barrier of the block, into registers",
     ("attention_forward_kernelI14AttentionTilesILi64ELi64",
      "attention_dq_kernelI14AttentionTilesILi64ELi64",
      "attention_dq_kernelI14AttentionTilesILi96ELi96")),
    ("wait_group: one more under way", "the wait for the block's own rows, in front of the loop: "
     "the group that may stay is the first step's, and the loop waits for it",
     ("attention_dq_kernelI14AttentionTilesILi64ELi64",
      "attention_dq_kernelI14AttentionTilesILi96ELi96",
      "attention_dkv_kernelI14AttentionTilesILi64ELi64",
      "attention_dkv_kernelI14AttentionTilesILi128ELi128")),
    ("commit_group dropped", "the first: its copies join the next group, before the same wait",
     ("attention_dq_kernelI14AttentionTilesILi96ELi96",
      "attention_dkv_kernelI14AttentionTilesILi64ELi64",
      "attention_dkv_kernelI14AttentionTilesILi128ELi128")),
    ("bar.sync dropped", "a thread reads its own sums alone: the team is the block",
     ("norm_backward_kernelI4TeamILi256ELi2",)),
    ("bar.sync dropped", "it keeps two rounds of a reduction apart, of which there is one",
     ("classifier_kernelILi1ELb0",)),
    ("shfl: its own lane", "a maximum of the same values: there are fewer warps than lanes",
     ("classifier_kernelILi1ELb0",)),
    ("bar.sync dropped", "the loop's last: no tile is loaded after it", ("tile_kernel",)),
    ("wgmma dropped", "columns past the end of A and B, which are zeros", ("tile_kernel",)),
    ("try_wait: the other phase", "its phase has parity 1", ("tile_kernel",)),
    ("setmaxnreg dropped", "PTX has as many registers as it names",
     ("ring_kernel", "grouped_sm90_kernelILi0", "grouped_sm90_kernelILi1",
      "grouped_sm90_kernelILi2")),
    ("wait_group: one more under way", "the producer's last but one: the last one follows before "
     "another warp runs", ("grouped_sm90_kernelILi0", "grouped_sm90_kernelILi2")),
    ("fence.proxy.async dropped", "the producer's last but one, as above",
     ("grouped_sm90_kernelILi0", "grouped_sm90_kernelILi2")),
    ("ex2: of another register", "the exponent before its last correction, which has the same bits",
     ("router_backward_kernel",)),
]


# ---------------------------------------------------------------------------------------- the edits

def swap(group, a, b):
    """Swaps two registers of the line's group-th {...}."""
    def edit(line):
        start = [m.start(1) for m in re.finditer(r"\{([^}]*)\}", line)][group]
        spans = [m.span() for m in re.finditer(r"[^,\s{}]+", line[start:line.index("}", start)])]
        (a0, a1), (b0, b1) = ((start + x, start + y) for x, y in sorted([spans[a], spans[b]]))
        return line[:a0] + line[b0:b1] + line[a1:b0] + line[a0:a1] + line[b1:]
    return edit


def change(pattern, new):
    return lambda line: re.sub(pattern, new, line)


def drop(_):
    return ""


def further(match):
    return f"[{match[1]}+{int(match[2] or 0) + 4}]"


def more(match):
    return f"{int(match[1]) + 1};"


# (name, pattern of the line, edit)
EDITS = [(f"mma: A's registers {a} and {b} swapped", "mma.sync", swap(1, a, b))
         for a, b in ((0, 1), (0, 2), (1, 2), (2, 3))]
EDITS += [("mma: B's registers swapped", "mma.sync", swap(2, 0, 1))]
EDITS += [(f"mma: C's registers {a} and {b} swapped", "mma.sync", swap(3, a, b))
          for a, b in ((0, 1), (0, 2))]
EDITS += [(f"mma: D's registers {a} and {b} swapped", "mma.sync", swap(0, a, b))
          for a, b in ((0, 1), (0, 2))]
EDITS += [(f"ldmatrix: registers {a} and {b} swapped", "ldmatrix", swap(0, a, b))
          for a, b in ((0, 1), (1, 2))]
EDITS += [
    ("ldmatrix: .trans dropped", r"ldmatrix.*\.trans", change(r"\.trans", "")),
    ("ldmatrix: .trans added", r"ldmatrix((?!trans).)*$", change(r"\.x4\.", ".x4.trans.")),
    ("wait_group dropped", r"cp\.async\.wait_group", drop),
    ("wait_group: one more under way", r"cp\.async\.wait_group", change(r"(\d+);", more)),
    ("commit_group dropped", r"cp\.async\.commit_group", drop),
    ("cp.async: always 16 bytes", r"cp\.async\.cg", change(r"16, %r\d+;", "16, 16;")),
    ("cp.async: no bytes", r"cp\.async\.cg", change(r"16, %r\d+;", "16, 0;")),
    ("cp.async dropped", r"cp\.async\.cg", drop),
    ("bar.sync dropped", r"bar\.sync", drop),
    ("bar.warp.sync dropped", r"bar\.warp\.sync", drop),
    ("ld.global: 4 bytes further", r"ld\.global", change(r"\[(%rd\d+)(?:\+(-?\d+))?\]", further)),
    ("shfl: half of the warp", r"shfl\.sync", change(r", [^,]+;", ", 65535;")),
    ("cvt.rn.bf16x2: halves swapped", r"cvt\.rn\.bf16x2",
     change(r"(%f\d+), (%f\d+);", r"\2, \1;")),
    ("ex2: of another register", r"ex2\.approx",
     change(r", (%f)(\d+);", lambda m: f", %f{int(m[2]) - 1};")),
    ("shfl: its own lane", r"shfl\.sync\.bfly",
     change(r"(bfly\.b32\s+\S+, %[rf]\d+, )%?r?\d+", r"\g<1>0")),
]
# Of compute capability 9.0.
EDITS += [(f"{what} dropped", pattern, drop) for what, pattern in (
    ("wgmma.fence", r"wgmma\.fence"), ("wgmma.commit_group", r"wgmma\.commit_group"),
    ("wgmma.wait_group", r"wgmma\.wait_group"), ("wgmma", r"wgmma\.mma_async"),
    ("fence.proxy.async", r"fence\.proxy\.async"), ("mbarrier.try_wait", r"mbarrier\.try_wait"),
    ("mbarrier's fence", r"fence\.mbarrier_init"), ("mbarrier.arrive", r"mbarrier\.arrive\.sh"),
    ("mbarrier.init", r"mbarrier\.init"), ("TMA", r"cp\.async\.bulk\.tensor"),
    ("bulk wait_group", r"cp\.async\.bulk\.wait_group"), ("setmaxnreg", "setmaxnreg"))]
EDITS += [
    ("wgmma: D's registers 0 and 2 swapped", r"wgmma\.mma_async",
     change(r"\{(%f\d+), (%f\d+), (%f\d+)", r"{\3, \2, \1")),
    ("wgmma: the other operand's descriptor", r"wgmma\.mma_async.*}, %rd",
     change(r"}, (%rd\d+), (%rd\d+), p", r"}, \2, \1, p")),
    ("wgmma: B the other way", r"wgmma\.mma_async",
     change(r", (\d);\}", lambda m: f", {1 - int(m[1])};}}")),
    ("expect_tx: other bytes", r"expect_tx", change(r", %r(\d+);", r", 4096;")),
    ("try_wait: the other phase", r"try_wait\.parity", change(r"\], %r\d+;", "], 1;")),
    ("TMA: x and y swapped", r"cp\.async\.bulk\.tensor", swap(0, 0, 1)),
]
# As if the asm had no "memory" clobber, and nvcc had moved a load up.
LATER = ("bar.sync", "cp.async.wait_group")


def mutants(name, lines, ran, each):
    """Yields (edit, new lines): `each` places of each edit, among the lines that ran."""
    def places(what, pattern):
        found = [i for i, line in enumerate(lines) if i in ran and re.search(pattern, line)]
        rng = np.random.default_rng(zlib.crc32(f"{name} {what}".encode()))
        return sorted(rng.permutation(found)[:each].astype(int))
    for what, pattern, edit in EDITS:
        for i in places(what, pattern):
            yield what, lines[:i] + [edit(lines[i])] + lines[i + 1:]
    loads = [i for i, line in enumerate(lines) if i in ran and "ldmatrix" in line]
    for barrier in LATER:
        for i in places("later", re.escape(barrier)):
            after = [j for j in loads if j > i]
            if after:
                yield (f"{barrier} below the next ldmatrix",
                       lines[:i] + lines[i + 1:after[0] + 1] + [lines[i]] + lines[after[0] + 1:])


# ------------------------------------------------------------------------------------------ running

def complaint(gpu, check, seed):
    """The first complaint of the check; "" if all is well."""
    gpu.open(seed)
    t = Test(gpu, seed, show=None)
    t.run(check)
    return next((name for name, _, passed in t.results if not passed), "")


def module_with(gpu, part):
    """(module, name) of the kernel whose name has this part."""
    return next((m, n) for m in gpu.modules for n in m.bodies if part in n)


def lines_that_ran(gpu, name):
    """Numbers of the body's lines that ran."""
    first, hit = module_with(gpu, name)[0].line(name), gpu.hits(name)
    return {c["line"] - first for c, h in zip(gpu.loaded[name].code, hit) if h}


def mutate_kernel(gpu, part, check, o):
    """(seen, unseen without a reason, unseen with one) among the mutants of a kernel."""
    module, name = module_with(gpu, part)
    body, count = module.body(name), [0, 0, 0]
    gpu.load(name)
    before = complaint(gpu, check, o.seed)
    if before:
        sys.exit(f"FAILED {part} without a mutant: {before}")
    for what, lines in mutants(part, body.split("\n"), lines_that_ran(gpu, name), o.each):
        if o.edit not in what:
            continue
        if "\n".join(lines) == body:
            sys.exit(f"FAILED {part}: {what}: the edit changes no text")
        gpu.load(name, "\n".join(lines))
        said = complaint(gpu, check, o.seed)
        reason = next((why for edit, why, parts in UNSEEN if edit == what and part in parts), "")
        count[0 if said else 2 if reason else 1] += 1
        if not said and not reason:
            print(f"FAILED {part}: {what}: not seen", flush=True)
        elif o.verbose:
            print(f"{part}: {what}: {said or 'not seen: ' + reason}", flush=True)
    gpu.load(name)
    return count


def main():
    a = argparse.ArgumentParser(description="breaks PTX, and expects check.py to see it")
    a.add_argument("words", nargs="*")
    a.add_argument("--arch", default="90a", choices=build.ARCHS)
    a.add_argument("--edit", default="", help="only edits with this word in their name")
    a.add_argument("--each", type=int, default=2, help="places of each edit in a kernel")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--verbose", action="store_true")
    o = a.parse_args()
    gpu, begun, total = Gpu(o.arch, "bf16"), time.time(), np.zeros(3, int)
    gpu.modules.append(sm90.ladder_module("product", o.arch))
    for part, check in KERNELS.items():
        if not o.words or any(word in part for word in o.words):
            total += mutate_kernel(gpu, part, check, o)
    seen, bad, equal = total
    if not total.any():
        sys.exit(f"error: no edit {o.edit} of a kernel {' '.join(o.words)}
  -> --verbose lists all")
    print(f"{seen} mutants seen, {equal} that change nothing, {bad} not seen, in "
          f"{time.time() - begun:.0f} s")
    print(f"{seen} passed, {bad} failed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
