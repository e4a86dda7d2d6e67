"""parse.py: machine code (SASS) as nvdisasm prints it, as Python objects.

    nvdisasm -hex -c FILE.cubin         every instruction with its 128 bits

    /*0350*/    @!P0 LDS.128 R4, [R2+UR4+0x800] ;    /* 0x0008000402047984 */
                                                     /* 0x000e620008000c00 */

The upper 64 bits hold what ptxas decided about issue (control): bits 41 to 44 the stall, cycles
until the warp's next instruction; 46 to 48 and 49 to 51 the barriers that the instruction releases
when its result is written and its operands are read (7: none); 52 to 57 the barriers it waits for.
NVIDIA does not document them; source of their places: Jia et al. 2018, "Dissecting the NVIDIA Volta
GPU Architecture via Microbenchmarking", section 2.1.
"""
import collections
import re
import subprocess

Control = collections.namedtuple("Control", "stall write read wait")


class Instruction:
    """guard: "", "P0", "!P0", "UP0", ..; name: LDS.128; base: LDS; operands: their texts;
    target: the label that a branch names, or None."""

    def __init__(self, text):
        guard, rest = re.match(r"(?:@(!?U?PT?\d*)\s+)?(.*)", text, re.S).groups()
        name, _, operands = rest.strip().partition(" ")
        self.text, self.guard, self.name = text, guard or "", name
        self.base = name.split(".")[0]
        self.operands = [part.strip() for part in operands.split(",") if part.strip()]
        label = re.search(r"`\((\S+?)\)", operands)
        self.target = label and label[1]
        self.control = None


class Kernel:
    """A function: its mangled name, instructions, and labels as indices of instructions."""

    def __init__(self, mangled):
        self.mangled, self.name = mangled, mangled
        self.code, self.labels = [], {}
        self.effects = []                  # of flow.py


def parse(lines):
    """The functions of nvdisasm's output, by their order."""
    kernels, kernel = [], None
    for line in lines:
        if section := re.match(r"\s*\.section\s+(\S+)", line):
            name = section[1].rstrip(",").split(",")[0].strip('"')
            kernel = Kernel(name.removeprefix(".text.")) if name.startswith(".text.") else None
            if kernel:
                kernels.append(kernel)
        elif not kernel:
            continue
        elif label := re.match(r"(\.L_\S+|\$\S+):", line):
            kernel.labels[label[1]] = len(kernel.code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            kernel.code.append(Instruction(found[1]))
        elif (bits := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/", line)) and kernel.code:
            high = int(bits[1], 16) >> 41
            kernel.code[-1].control = Control(high & 15, high >> 5 & 7, high >> 8 & 7,
                                              high >> 11 & 63)
    return kernels


def demangle(kernels):
    """Sets the names of kernels to C++, without what all have: `void`, arguments."""
    try:
        said = subprocess.run(["c++filt", "-p"], input="\n".join(k.mangled for k in kernels),
                              capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return
    for kernel, name in zip(kernels, said):
        kernel.name = name.removeprefix("void ")


def disassemble(cubin, nvdisasm):
    command = [nvdisasm, "-hex", "-c", cubin]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        kernels = parse(process.stdout)
    if process.returncode:
        raise OSError(f"{nvdisasm} ended with status {process.returncode} on {cubin}")
    demangle(kernels)
    return kernels
