"""flow.py: whether a warp is together (converged) where its instructions need it.

Lanes of a warp part at a branch whose condition differs between them. They are together again at

    BSSY B0, L   ..   @P0 BRA L   ..   L: BSYNC B0     all lanes that passed BSSY
    WARPSYNC.ALL, or with a mask                       the lanes of the mask

Tensor cores, LDSM, SHFL and their like need the whole warp. apart() follows, along every path from
the kernel's beginning, which registers may differ between lanes, and whether lanes may be on
different paths. Assumptions: a block has one dimension, so threadIdx.x / 32 is the same in a warp;
lanes that a condition sent to EXIT are needed no more; a mask in a register names all lanes that
are there; a subroutine (slow paths of divisions) returns behind its calls; two lanes that read one
address at one time read one value.
"""
import re

COLLECTIVE = {"HMMA", "HGMMA", "IMMA", "LDSM", "MOVM", "SHFL", "VOTE", "MATCH", "REDUX"}
# Instructions without a register as their result.
NO_RESULT = re.compile(r"ST[GSL]?$|REDG?$|LDGSTS|LDGDEPBAR|DEPBAR|BAR|BRA|BRX|EXIT|BSSY|BSYNC"
                       r"|BREAK|NOP|WARPSYNC|ENDCOLLECTIVE|MEMBAR|ERRBAR|CCTL|CALL|RET")
LANE_RESULT = {"HMMA", "LDSM", "MOVM", "ATOM", "ATOMG", "ATOMS", "MATCH", "LDL"}
TWO_WIDE = re.compile(r"\.WIDE|\.64|F64|^D(ADD|MUL|FMA)|^CS2R|^F(ADD|MUL|FMA)2")
REGISTER = re.compile(r"(?<![A-Z])([RP]\d+)(\.64)?")
LANE = 99          # a value that may differ between lanes; 0..4: threadIdx.x >> that


class Effect:
    """Registers that an instruction reads and writes. Uniform registers (UR, UP) belong to the
    warp, so they do not count."""

    def __init__(self, ins):
        names = ins.operands
        self.reads, self.writes = [], []
        if "P" in ins.guard and "U" not in ins.guard:
            self.reads.append(ins.guard.strip("!"))
        first = 0
        if not NO_RESULT.match(ins.base):
            while first < len(names) and re.fullmatch(r"U?P[T\d]", names[first]):
                first += 1
            if "SETP" not in ins.base and ins.base not in ("PLOP3", "FCHK", "R2P"):
                first += 1                                           # the result, then carries
                while first < len(names) and re.fullmatch(r"P[T\d]", names[first]):
                    first += 1
        for name in names[:first]:
            for register, _ in REGISTER.findall(name):
                self.writes.append(register)
                if register[0] == "R":
                    wide = 2 if TWO_WIDE.search(ins.name) else 1
                    wide = 4 if ins.base in LANE_RESULT or ".128" in ins.name else wide
                    self.writes += [f"R{int(register[1:]) + i}" for i in range(1, wide)]
        # P2R packs the predicates of a mask into a register, R2P unpacks them.
        packed = []
        if ins.base in ("P2R", "R2P"):
            mask = int(names[-1], 16) if names[-1].startswith("0x") else 127
            packed = [f"P{i}" for i in range(7) if mask >> i & 1]
        self.writes += packed if ins.base == "R2P" else []
        self.reads += packed if ins.base == "P2R" else []
        for name in names[first:]:
            for register, pair in REGISTER.findall(name):
                self.reads.append(register)
                if pair or (register[0] == "R" and ins.base[0] == "D"):
                    self.reads.append(f"R{int(register[1:]) + 1}")


def effects_of(kernel):
    """The Effect of each instruction."""
    if not kernel.effects:
        kernel.effects = [Effect(ins) for ins in kernel.code]
    return kernel.effects


class State:
    """lanes: registers that may differ between lanes; apart: whether lanes may be on different
    paths; missing: whether WARPSYNC.ALL stands on only one of those paths, so that it may wait for
    lanes that will not come; at_bssy: what `apart` was where each barrier's lanes gathered; under:
    registers of `lanes` that are the same in all lanes under a guard on which all lanes agree."""

    def __init__(self, lanes=None, apart=False, missing=False, at_bssy=None, under=None):
        self.lanes, self.at_bssy, self.under = lanes or {}, at_bssy or {}, under or {}
        self.apart, self.missing = apart, missing

    def copy(self):
        return State(dict(self.lanes), self.apart, self.missing, dict(self.at_bssy),
                     dict(self.under))

    def join(self, other):
        """Adds the other state's possibilities; whether that changed anything."""
        changed = other.apart and not self.apart or other.missing and not self.missing
        self.apart |= other.apart
        self.missing |= other.missing
        for register, kind in other.lanes.items():
            mine = self.lanes.get(register)
            if mine != kind and mine != LANE:
                self.lanes[register] = LANE if mine is not None or kind == LANE else kind
                changed = True
        for register in self.lanes.keys() - other.lanes.keys():      # the same in one path only
            if self.lanes[register] != LANE:
                self.lanes[register], changed = LANE, True
        for register in [r for r, guard in self.under.items() if other.under.get(r) != guard]:
            if register in other.lanes:
                del self.under[register]
                changed = True
        for barrier, apart in other.at_bssy.items():
            if apart and not self.at_bssy.get(barrier):
                changed = True
            self.at_bssy[barrier] = self.at_bssy.get(barrier, False) or apart
        return changed


def thread_index(ins, effect, state):
    """The result's kind, from an instruction that shifts, masks or compares threadIdx.x; None if it
    is another instruction."""
    shifts = {state.lanes.get(r) for r in effect.reads} - {None}
    if len(shifts) != 1 or LANE in shifts:
        return None
    shift, last = shifts.pop(), ins.operands[-1]
    numbers = [int(name, 16) for name in ins.operands if re.fullmatch(r"0x[0-9a-f]+", name)]
    if ins.base == "MOV" or ins.name == "IMAD.MOV.U32":
        return shift
    if ins.name.startswith("SHF.R") and len(numbers) == 1:
        return shift + numbers[0] if shift + numbers[0] < 5 else -1
    if ins.base == "LEA" and last.startswith("0x") and ".HI" in ins.name:
        return shift + 32 - numbers[-1] if shift + 32 - numbers[-1] < 5 else -1
    if ins.base == "LOP3":                                           # a & b, a | b & c, a & b | c
        a, b, c, table = (name.split(".")[0] for name in ins.operands[-5:-1])
        pair = {"0xc0": (a, b), "0xf8": (b, c), "0xea": (a, b)}.get(table, ())
        mask = [int(name, 16) for name in pair if name.startswith("0x")]
        index = [name for name in (a, b, c) if name in state.lanes]
        whole = mask and mask[0] & (31 >> shift) == 0 and len(index) == 1 and index[0] in pair
        return -1 if whole else None
    if ins.base == "ISETP" and len(numbers) == 1:
        edge = numbers[0] + (".GT" in ins.name or ".LE" in ins.name)
        whole = edge % (32 >> shift) == 0 and not re.search(r"\.(EQ|NE)", ins.name)
        return -1 if whole else None
    return None


def kind_of(ins, effect, state):
    """LANE, a shift of threadIdx.x, or -1 for a result that is the same in all lanes."""
    if ins.base == "S2R":
        special = ins.operands[1]
        return 0 if special == "SR_TID.X" else LANE if re.search("TID|LANE|CLOCK", special) and \
            "CTAID" not in special else -1
    if ins.base in LANE_RESULT:
        return LANE
    if ins.base == "VOTE":
        return -1
    if ins.base == "SHFL":
        one = ".IDX" in ins.name and not REGISTER.search(ins.operands[3])
        return -1 if one and ins.operands[-1] == "0x1f" else LANE
    found = thread_index(ins, effect, state)
    if found is not None:
        return found
    # A guard itself is among what an instruction reads.
    own = (register for register in effect.reads
           if not ins.guard or state.under.get(register) != ins.guard)
    return LANE if any(register in state.lanes for register in own) else -1


def step(ins, effect, state):
    """Changes the state to the one behind the instruction."""
    barrier = ins.operands[0] if ins.operands else ""
    if ins.base == "BSSY":
        state.at_bssy[barrier] = state.apart
    elif ins.base == "BSYNC":
        state.apart = state.at_bssy.get(barrier, True)
    elif ins.base == "BREAK":
        state.at_bssy[barrier] = True                                # some lanes will not come
    elif ins.base == "BAR":
        state.missing = False                                        # all threads come here
    elif ins.base == "WARPSYNC" and (barrier in ("", "0xffffffff") or REGISTER.search(barrier)):
        state.missing |= state.apart and barrier in ("", "0xffffffff")
        state.apart = False
    if not effect.writes:
        return
    kind = kind_of(ins, effect, state)
    if state.apart:                                                  # lanes elsewhere keep theirs
        kind = LANE
    agreed = ins.guard and ins.guard.strip("!") not in state.lanes
    opposite = ins.guard[1:] if ins.guard.startswith("!") else f"!{ins.guard}"
    for register in effect.writes:
        before = state.under.pop(register, None)
        if kind >= 0:
            state.lanes[register] = kind
        elif not ins.guard or (agreed and before == opposite):
            state.lanes.pop(register, None)
        elif agreed and register in state.lanes:
            state.under[register] = ins.guard
        for other in [r for r, guard in state.under.items() if guard.strip("!") == register]:
            del state.under[other]


class Graph:
    """Blocks of a kernel: instructions first..last, and the first of each block that follows."""

    def __init__(self, kernel):
        code, labels = kernel.code, kernel.labels
        self.kernel = kernel
        starts, self.next = {0} | set(labels.values()), {}
        for i, ins in enumerate(code):
            follow = self.after(ins, i, labels)
            if follow != [i + 1] or ins.base == "BRA":
                starts.update(follow + [i + 1])
                self.next[i] = [f for f in follow if f < len(code)]
        self.blocks, starts = {}, sorted(s for s in starts if s < len(code))
        for first, end in zip(starts, starts[1:] + [len(code)]):
            self.blocks[first] = end - 1
            self.next.setdefault(end - 1, [end] if end < len(code) else [])

    @staticmethod
    def after(ins, i, labels):
        """Where execution goes on."""
        at = labels.get(ins.target)
        conditional = ins.guard or any(re.fullmatch(r"!?U?P\d", name) for name in ins.operands)
        if ins.base == "BRA" or (ins.base == "CALL" and (ins.target or "").startswith(".L")):
            conditional = conditional or ins.name in ("BRA.DIV", "BRA.CONV")
            return ([] if at is None else [at]) + ([i + 1] if conditional else [])
        if ins.base in ("EXIT", "RET"):
            return [i + 1] if ins.guard else []
        return [i + 1]


def subroutines(kernel, effects):
    """label: (registers that the subroutine behind it writes, those that it reads first)."""
    found, starts = {}, {i: label for label, i in kernel.labels.items() if label.startswith("$")}
    edges = sorted(starts) + [len(kernel.code)]
    for first, end in zip(edges, edges[1:]):
        writes, inputs = set(), set()
        for effect in effects[first:end]:
            inputs |= set(effect.reads) - writes
            writes |= set(effect.writes)
        found[starts[first]] = writes, inputs
    return found


def leave(ins, state, followers, i):
    """(follower, state) of each way out of a block."""
    condition = [ins.guard.strip("!")] + [n.strip("!") for n in ins.operands]
    parts = ins.base in ("BRA", "CALL") and len(followers) > 1 and \
        any(name in state.lanes for name in condition)
    for follower in followers:
        out = state.copy()
        if ins.name == "BRA.DIV":
            out.apart = follower != i + 1
        elif ins.name == "BRA.CONV":
            out.apart = out.apart and follower == i + 1
        elif parts:
            out.apart = True
        yield follower, out


def apart(kernel):
    """Indices of the instructions that need a whole warp and may not find it: lanes may be apart;
    or, for products and LDSM, only WARPSYNC under a branch of lanes and no BAR stand between."""
    if not any(ins.base in COLLECTIVE for ins in kernel.code):
        return []
    graph, effects = Graph(kernel), effects_of(kernel)
    called = subroutines(kernel, effects)
    before, work, found = {0: State()}, [0], set()
    while work:
        first = work.pop()
        state, last = before[first].copy(), graph.blocks[first]
        for i in range(first, last + 1):
            ins = kernel.code[i]
            if ins.base in COLLECTIVE and (state.apart or (
                    state.missing and ins.base in ("LDSM", "HMMA"))):
                found.add(i)
            step(ins, effects[i], state)
            if ins.target in called:
                writes, inputs = called[ins.target]
                if state.apart or any(register in state.lanes for register in inputs):
                    state.lanes.update((register, LANE) for register in writes)
        for follower, out in leave(kernel.code[last], state, graph.next[last], last):
            if follower not in before:
                before[follower] = out
            elif not before[follower].join(out):
                continue
            if follower not in work:
                work.append(follower)
    return sorted(found)
