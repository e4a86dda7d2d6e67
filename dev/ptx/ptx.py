"""ptx.py: reads the PTX that nvcc wrote, and turns each kernel into rows of numbers for vm.cpp.

Here it is settled what an operand is: registers, immediates and special registers each become a
place in the register file of a warp, where the 32 lanes of a register lie side by side. Anything
that this file or vm.cpp does not know is a PtxError that names it. Nothing here knows norm.c.

    python3 dev/ptx/ptx.py FILE.ptx     how often each instruction occurs
"""
import re
import sys
from collections import Counter

import numpy as np


class PtxError(Exception):
    pass


SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
         "b32": 4, "u32": 4, "s32": 4, "f32": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8,
         "f64": 8}
# The order of vm.cpp's special_registers. dynamic: where dynamic shared memory begins.
SPECIAL = [f"%{name}.{d}" for name in ("tid", "ntid", "ctaid", "nctaid") for d in "xyz"]
SPECIAL += ["dynamic", "%laneid", "dynamic32"]
SHARED_FIRST = 1024     # address of the first static shared array: address 0 is nobody's
SHARED_GAP = 16         # bytes behind each array, which no access may touch
ROW = 9 + 8 + 12 + 12   # columns of an instruction: vm.cpp's load_row
LANES = 32


# ------------------------------------------------------------------------------------ text to words

def statements(text, line):
    """Yields (statement, line). Scopes are the statements { and }; a label ends in a colon. A brace
    inside of a statement belongs to a vector operand."""
    for part in text.split("\n"):
        rest = part.strip()
        while rest:
            if rest[0] in "{}":
                yield rest[0], line
                rest = rest[1:].lstrip()
                continue
            label = re.match(r"[\w$]+\s*:", rest)
            if label:
                yield re.sub(r"\s", "", label[0]), line
                rest = rest[label.end():].lstrip()
                continue
            statement, semicolon, rest = rest.partition(";")
            if not semicolon:
                raise PtxError(f"line {line}: a statement over several lines: {part.strip()}")
            if statement.strip():
                yield statement.strip(), line
            rest = rest.lstrip()
        line += 1


def split_operands(text):
    """a, {b, c}, [d] as three strings."""
    out, depth, word = [], 0, ""
    for ch in text:
        depth += (ch in "{[") - (ch in "}]")
        if ch == "," and depth == 0:
            out.append(word.strip())
            word = ""
        else:
            word += ch
    return out + [word.strip()] if word.strip() else out


def round_up(x, align):
    return -(-x // align) * align


def immediate(text):
    """The bits of a number, or None."""
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    m = re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|\d+)U?", text)
    return (-1 if m[1] else 1) * int(m[2], 0) if m else None


# ----------------------------------------------------------------------------------------- a module

class Module:
    """The text of a PTX file. bodies: (parameters, first character, last) of each kernel."""

    def __init__(self, text):
        text = re.sub(r"//[^\n]*", "", text)
        self.text, self.bodies = text, {}
        self.dynamic = {name: int(align or 16) for align, name in re.findall(
            r"\.extern\s+\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w+\s+(\w+)\[\]", text)}
        self.shared = {
            m[3]: (SIZES[m[2]] * int(m[4] or 1), int(m[1] or SIZES[m[2]]))
            for m in re.finditer(r"^\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
                                 r"(?:\[(\d+)\])?;", text, re.M)}
        entry = r"\.entry\s+([\w$]+)\s*\(([^)]*)\)\s*((?:\.[\w]+\s+[\d,\s]*)*)\{"
        for m in re.finditer(entry, text):
            self.bodies[m[1]] = (m[2].strip(), m.end(), text.index("\n}", m.end()))
        # An entry without parameters has none of the parentheses.
        for m in re.finditer(r"\.entry\s+([\w$]+)\s*((?:\.[\w]+\s+[\d,\s]*)*)\{", text):
            self.bodies[m[1]] = ("", m.end(), text.index("\n}", m.end()))
        if len(self.bodies) != text.count(".entry"):
            raise PtxError("an .entry that was not understood")

    def body(self, name):
        return self.text[slice(*self.bodies[name][1:])]

    def line(self, name):
        """The line where the body of a kernel begins."""
        return self.text.count("\n", 0, self.bodies[name][1]) + 1

    def kernel(self, name, body=None):
        """body: another text in the place of the kernel's own."""
        return Kernel(name, self.bodies[name][0], body or self.body(name), self.line(name), self)


# ----------------------------------------------------------------------------------------- a kernel

class Kernel:
    """A kernel as tables: code (instructions), constants, special registers, sizes."""

    def __init__(self, name, header, body, line, module):
        self.name, self.module = name, module
        self.parameters, self.labels, self.shared = {}, {}, {}
        self.file, self.constants, self.special = 0, {}, {}
        self.shared_bytes, self.align = SHARED_FIRST, 16    # align: of dynamic shared memory
        self.many = []                  # places of the registers D of all wgmma, in a row
        self.code = []
        self.scopes = [{}]              # names of registers; an inner scope hides an outer one
        self.read_parameters(header)
        for statement, at in statements(body, line):
            self.statement(statement, at)
        for ins in self.code:
            if isinstance(ins["target"], str):
                if ins["target"] not in self.labels:
                    raise self.error(f"no label {ins['target']}", ins["line"])
                ins["target"] = self.labels[ins["target"]]

    def error(self, text, line):
        return PtxError(f"{self.name}, line {line}: {text}")

    def read_parameters(self, header):
        at = 0
        pattern = (r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+[.\w\s]*?)?(\w+)"
                   r"(?:\[(\d+)\])?\s*(?=,|$)")
        for p in re.finditer(pattern, header):
            size, align = SIZES[p[2]] * int(p[4] or 1), int(p[1] or SIZES[p[2]])
            at = round_up(at, align)
            self.parameters[p[3]] = (at, size)
            at += size
        if len(self.parameters) != header.count(".param"):
            raise PtxError(f"{self.name}: parameters not understood: {header}")
        self.parameter_bytes = at

    # ---- places in the register file

    def place(self, size):
        at = self.file
        self.file += LANES * (8 if size == 8 else 4)
        return at

    def declare(self, names, type_):
        for name in names:
            many = re.fullmatch(r"(.+)<(\d+)>", name.strip())
            all_ = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
            for register in all_:
                self.scopes[-1][register] = [SIZES[type_], None]

    def register(self, name):
        """(place, size), or None. A register gets its place at its first use."""
        for scope in reversed(self.scopes):
            if name in scope:
                held = scope[name]
                if held[1] is None:
                    held[1] = self.place(held[0])
                return held[1], held[0]
        return None

    def constant(self, value, size):
        key = (value & (1 << 64) - 1, 8 if size == 8 else 4)
        if key not in self.constants:
            self.constants[key] = self.place(key[1])
        return self.constants[key]

    def special_register(self, name, size):
        if name not in self.special:
            self.special[name] = self.place(size)
        return self.special[name]

    def shared_array(self, name, size, align):
        at = round_up(self.shared_bytes, align)
        self.shared[name], self.shared_bytes = at, at + size + SHARED_GAP
        return at

    def symbol(self, name):
        """The address of a shared array or a parameter; None for an unknown name."""
        if name in self.shared:
            return self.shared[name]
        if name in self.parameters:
            return self.parameters[name][0]
        if name in self.module.shared:
            return self.shared_array(name, *self.module.shared[name])
        return None

    def operand(self, text, size, line):
        """(place, size) of an operand where one of `size` bytes stands."""
        register = self.register(text)
        if register:
            return register
        if text in SPECIAL:
            return self.special_register(text, 4), 4
        if text in self.module.dynamic:
            self.align = max(self.align, self.module.dynamic[text])
            return self.special_register("dynamic" if size == 8 else "dynamic32", size), size
        value = immediate(text)
        if value is None:
            value = self.symbol(text)
        if value is None:
            raise self.error(f"operand {text!r} not understood", line)
        return self.constant(value, size), size

    def address(self, text, line):
        """(place of the base, its size, offset); place -1: the offset alone."""
        m = re.fullmatch(r"([^+]+?)(?:\s*\+\s*(-?\d+))?", text[1:-1].strip())
        base, offset = m[1].strip(), int(m[2] or 0)
        if base in self.parameters:
            return -1, 8, self.parameters[base][0] + offset
        value = immediate(base)
        if value is not None:
            return -1, 8, value + offset
        return (*self.operand(base, 8, line), offset)

    # ---- statements

    def statement(self, text, line):
        if text == "{":
            self.scopes.append({})
        elif text == "}":
            self.scopes.pop()
        elif text.endswith(":"):
            self.labels[text[:-1]] = len(self.code)
        elif text.startswith("."):
            self.directive(text, line)
        else:
            m = re.fullmatch(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
            if not m:
                raise self.error(f"{text!r} not understood", line)
            self.instruction(m[2], bool(m[1]), m[3], split_operands(m[4]), line)

    def directive(self, text, line):
        if text.startswith((".pragma", ".loc")):
            return
        m = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text)
        if m:
            self.declare(m[2].split(","), m[1])
            return
        m = re.fullmatch(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?",
                         text)
        if not m:
            raise self.error(f"{text!r} not understood", line)
        self.shared_array(m[3], SIZES[m[2]] * int(m[4] or 1), int(m[1] or SIZES[m[2]]))

    def instruction(self, guard, negated, name, operands, line):
        ins = {"name": name, "predicate": -1, "negated": int(negated), "target": -1, "line": line,
               "wide": 0, "offset": 0, "d": [], "s": [], "size": []}
        if guard:
            if self.register(guard) is None:
                raise self.error(f"no predicate {guard}", line)
            ins["predicate"] = self.register(guard)[0]
        base = name.split(".")[0]
        if base == "bra":
            ins["name"], ins["target"] = "bra", operands[0]
        elif base in ("ret", "exit"):
            ins["name"] = "ret"
        elif name.startswith("wgmma.mma_async"):
            ins["d"] = [len(self.many)]
            self.many += [self.operand(d.strip(), 4, line)[0] for d in operands[0][1:-1].split(",")]
            for text, size in zip(operands[1:], (4 if "{" in operands[1] else 8, 8, 1, 4, 4, 4, 4)):
                self.source(ins, text, size, line)
        elif base in ("st", "red", "cp", "bar", "membar", "fence", "wgmma", "setmaxnreg") or \
                name.startswith("mbarrier.init"):
            for text in operands:
                self.source(ins, text, operand_size(name), line)
        else:
            self.destinations(ins, operands[0], line)
            for k, text in enumerate(operands[1:]):
                self.source(ins, text, source_size(name, operands, k), line)
        if base == "mov":
            ins["name"] = move_name(name, operands)
        self.code.append(ins)

    def destinations(self, ins, text, line):
        """One register, {several}, or a value | a predicate."""
        many = "{" in text or "|" in text
        base, *types = ins["name"].split(".")
        for name in re.split(r"[,|]", text.strip("{}")):
            name = name.strip()
            if name == "_":
                ins["d"].append(-1)
                continue
            register = self.register(name)
            if register is None:
                raise self.error(f"{name} is written and not declared", line)
            ins["wide"] |= (register[1] == 8) << len(ins["d"])
            ins["d"].append(register[0])
            if base not in ("mov", "add", "sub", "fma", "and", "or", "cvt", "cvta") or many:
                continue
            size = SIZES[types[-2 if base == "cvt" else -1]]
            if (size == 8) != (register[1] == 8):
                raise self.error(f"{ins['name']}: {name} has {register[1]} bytes, not {size}", line)

    def source(self, ins, text, size, line):
        if text.startswith("{"):
            for part in text.strip("{}").split(","):
                self.source(ins, part.strip(), size, line)
            return
        if text.startswith("[") and "{" in text:            # [map, {x, y, ...}]
            address, x = text[1:-1].split(",", 1)
            self.source(ins, f"[{address}]", 8, line)
            self.source(ins, x.strip(), 4, line)
            return
        if text.startswith("["):
            if ins["offset"]:
                raise self.error(f"two addresses with offsets in {ins['name']}", line)
            place, size, ins["offset"] = self.address(text, line)
        else:
            place, found = self.operand(text, size, line)
            if (found == 8) != (size == 8) or (found == 1) != (size == 1):
                raise self.error(f"{ins['name']}: {text} has {found} bytes, not {size}", line)
            size = found
        ins["s"].append(place)
        ins["size"].append(size)

    def rows(self, number_of):
        """The instructions as vm.cpp's load_row reads them. number_of: of each known name."""
        missing = sorted({c["name"] for c in self.code if c["name"] not in number_of})
        if missing:
            raise PtxError(f"{self.name}: instructions that vm.cpp lacks: {', '.join(missing)}")
        table = np.zeros((len(self.code), ROW), np.int64)
        for row, c in zip(table, self.code):
            row[:9] = (number_of[c["name"]], c["predicate"], c["negated"], c["target"], c["line"],
                       c["wide"], len(c["d"]), len(c["s"]), c["offset"])
            row[9:9 + len(c["d"])] = c["d"]
            row[17:17 + len(c["s"])] = c["s"]
            row[29:29 + len(c["s"])] = c["size"]
        return table


# ------------------------------------------------------------------------------- sizes of operands

def operand_size(name):
    """Bytes of the type that the instruction's name ends in; bytes lie in registers of 16 bits."""
    types = [t for t in name.split(".") if t in SIZES]
    if not types or name.startswith("mbarrier"):
        return 4
    return 2 if types[-1] in ("b8", "u8", "s8") else SIZES[types[-1]]


def source_size(name, operands, k):
    """Bytes of source k of an instruction that has a destination."""
    base = name.split(".")[0]
    if base == "selp" and k == 2:
        return 1
    if base in ("shl", "shr", "shf") and k == len(operands) - 2:
        return 4
    if base == "mad" and "wide" in name and k == 2:
        return 2 * operand_size(name)
    if base == "mov" and operands[1].startswith("{"):
        return operand_size(name) // (operands[1].count(",") + 1)
    if base == "bfi" and k >= 2:
        return 4
    return operand_size(name)


def move_name(name, operands):
    """mov has forms that take a register apart, or put one together."""
    if operands[0].startswith("{"):
        return name + ".unpack"
    return name + ".pack" if operands[1].startswith("{") else name


if __name__ == "__main__":
    module = Module(open(sys.argv[1], encoding="utf-8").read())
    count = Counter()
    for kernel_name in module.bodies:
        count.update(c["name"] for c in module.kernel(kernel_name).code)
    for instruction_name, times in count.most_common():
        print(times, instruction_name)
