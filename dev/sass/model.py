"""model.py: an in-order issue model of one multiprocessor. It is not a GPU.

Four partitions share one path to shared memory; each has a tensor core and other pipes of its own.
Each holds one warp of every block. Per cycle a partition issues one instruction of one of its
warps: stall counts and barriers are those that ptxas wrote into the code (parse.py), and a pipe is
busy for a fixed number of cycles, the tables below. These are assumptions for compute capability
9.0: an mma.sync of 16 x 8 x 16 takes 6 cycles of a tensor core (62 % of its rate), a wavefront of
shared memory one cycle, four for 16 bytes a lane. Branches over a mask of the diagonal are taken.

The result ranks variants of one loop; differences below 5 % are noise. No memory but the shared one
limits it, and wgmma is not modelled.
"""
import collections

from . import measure

PARTITIONS, BLOCKS = 4, 2
ROUNDS, WARM = 24, 8                      # of all blocks together; the first WARM are left out
STARTS = (150, 350, 550)                  # cycles by which the second block begins later; averaged
PIPES = {  # the pipe of an instruction, and the cycles for which it takes that pipe
    "tensor": {"HMMA": 6},
    "special": {"MUFU": 8},
    "fma": {"FFMA": 1, "FADD": 1, "FMUL": 1, "CS2R": 1, "IMAD": 2, "HFMA2": 2},
    "alu": dict.fromkeys(("FMNMX", "FSEL", "ISETP", "LOP3", "F2FP", "IADD3", "VIADD", "SHF", "SEL",
                          "PRMT", "LEA", "FSETP", "PLOP3", "MOV"), 2),
    "shared": {"LDSM": 4, "LDGSTS": 4, "STS": 1, "LDS": 1, "SHFL": 1},
    "global": {"LDG": 4, "STG": 4}}
PIPE_OF = {base: (pipe, cycles) for pipe, takes in PIPES.items()
           for base, cycles in takes.items()}
LATENCY = {"special": 24, "shared": 30, "global": 450}    # cycles behind the pipe
COPY = 700                                # cycles until a copy to shared memory (LDGSTS) is there
QUEUE = 32                                # cycles of work that wait in front of shared memory


class Warp:
    def __init__(self, block, partition, start):
        self.block, self.partition, self.ready = block, partition, start
        self.at = self.round = 0          # instruction; rounds of the loop that it has done
        self.barriers = [[] for _ in range(6)]       # cycles at which each is released
        self.copied = 0                   # cycle at which all its copies are there
        self.arrived = None               # the generation of the block's barrier it waits for


class Barrier:
    """__syncthreads of a block: its generation begins when all four warps have arrived."""

    def __init__(self):
        self.waiting = self.generation = self.open_at = 0

    def arrive(self, now):
        self.waiting += 1
        if self.waiting == PARTITIONS:
            self.waiting, self.open_at = 0, now + 8
            self.generation += 1


def pipe_of(ins):
    """(pipe or None, cycles)."""
    pipe, cycles = PIPE_OF.get(ins.base, (None, 0))
    if ins.base in ("IMAD", "HFMA2") and "MOV" in ins.name:
        cycles = 1
    if ins.base in ("LDS", "STS") and ".128" in ins.name:
        cycles = 4
    return pipe, cycles


def body(kernel, loop):
    """The loop's instructions without masks: forward branches over 8 or more FSEL and no HMMA."""
    kept, i = [], loop[0]
    while i <= loop[1]:
        ins = kernel.code[i]
        kept.append(ins)
        i += 1
        at = kernel.labels.get(ins.target, 0)
        over = kernel.code[i:at]
        if ins.base == "BRA" and ins.guard and i < at <= loop[1] and \
                measure.count(over, "FSEL") >= 8 and not measure.count(over, "HMMA"):
            i = at
    return kept


class Machine:
    def __init__(self, code, start):
        self.code = [(ins.base, ins.control, *pipe_of(ins)) for ins in code]
        self.warps = [[Warp(block, p, block * start) for block in range(BLOCKS)]
                      for p in range(PARTITIONS)]
        self.block_barrier = [Barrier() for _ in range(BLOCKS)]
        self.free = collections.Counter()            # cycle at which a pipe is free
        self.last = [None] * PARTITIONS              # the warp that issued last goes first
        self.ends = []                    # cycles at which a warp of partition 0 ended a round

    def earliest(self, warp, now):
        """The cycle at which the warp's instruction can issue; at the block's barrier the next."""
        base, control, pipe, _ = self.code[warp.at]
        ready = warp.ready
        for b, ends in enumerate(warp.barriers):
            if control.wait >> b & 1 and ends:
                ready = max(ready, max(ends))
        if base == "DEPBAR":
            ready = max(ready, warp.copied)
        if base == "BAR":
            barrier = self.block_barrier[warp.block]
            if warp.arrived is None and ready <= now:
                warp.arrived = barrier.generation
                barrier.arrive(now)
            if warp.arrived is None or barrier.generation == warp.arrived:
                return max(ready, now + 1)
            ready = max(ready, barrier.open_at)
        if pipe:
            queue = QUEUE if pipe == "shared" else 0
            ready = max(ready, self.free[self.key(warp, pipe)] - queue)
        return ready

    @staticmethod
    def key(warp, pipe):
        return pipe if pipe == "shared" else (pipe, warp.partition)

    def issue(self, warp, now):
        base, control, pipe, cycles = self.code[warp.at]
        written, read = now + 20, now + 10
        if pipe:
            key = self.key(warp, pipe)
            begin = max(now, self.free[key])
            self.free[key] = begin + cycles
            written, read = begin + cycles + LATENCY.get(pipe, 0), begin + cycles + 8
            if base == "LDGSTS":
                warp.copied = max(warp.copied, begin + COPY)
        for b, end in ((control.write, written), (control.read, read)):
            if b < 6:
                warp.barriers[b] = [cycle for cycle in warp.barriers[b] if cycle > now] + [end]
        if base == "BAR":
            warp.arrived = None
        warp.ready = now + max(control.stall, 1)
        warp.at += 1
        self.last[warp.partition] = warp
        if warp.at == len(self.code):
            warp.at, warp.round = 0, warp.round + 1
            if warp.partition == 0:
                self.ends.append(now)

    def run(self):
        """Cycles of the multiprocessor for one round of one block."""
        now = 0
        while len(self.ends) < ROUNDS:
            later = []
            for warps in self.warps:
                last = self.last[warps[0].partition]
                for warp in sorted(warps, key=lambda w: (w is not last, w.round, w.at)):
                    ready = self.earliest(warp, now)
                    later.append(max(ready, now + 1))
                    if ready <= now:
                        self.issue(warp, now)
                        break
            now = min(later)
        return (self.ends[-1] - self.ends[WARM - 1]) / (ROUNDS - WARM)


def cycles(kernel, loop):
    """Cycles of the multiprocessor for one round of the loop of one block."""
    code = body(kernel, loop)
    found = [Machine(code, start).run() for start in STARTS]
    return round(sum(found) / len(found))
