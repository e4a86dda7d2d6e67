#!/usr/bin/env python3
"""Tests of dev/sass_check.py: python3 dev/test/test_sass.py [NAME...]

Small kernels in machine code, as nvdisasm prints it, right and wrong: every gate is seen to fail.
Only the standard library; no CUDA. Two seconds.
"""
import contextlib
import io
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import sass_check
from sass import flow, measure, model, parse

passed = failed = 0


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


def control(stall=1, write=7, read=7, wait=0):
    return (stall | write << 5 | read << 8 | wait << 11) << 41


def kernel(text, bits=control()):
    """A kernel from lines of instructions and labels, in the form of nvdisasm -hex -c. A label L
    stands for .L_L."""
    text = re.sub(r"^(\w+):", r".L_\1:", re.sub(r"`\((\w+)\)", r"`(.L_\1)", text), flags=re.M)
    lines, at = ['\t.section\t.text._Z1kv,"ax",@progbits'], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            lines.append(line)
            continue
        lines.append(f"        /*{at:04x}*/   {line} ;   /* 0x0000000000000000 */")
        lines.append(f"                          /* 0x{bits:016x} */")
        at += 16
    return parse.parse(lines)[0]


def apart(text):
    """The instructions before which lanes may be apart, by their first word."""
    found = kernel(text)
    return [found.code[i].base for i in flow.apart(found)]


THREAD = "S2R R0, SR_TID.X\n"
NOT_ZERO = "ISETP.NE.AND P0, PT, R1, RZ, PT\n"
LANE_BRANCH = THREAD + "LOP3.LUT P0, RZ, R0, 0x1, RZ, 0xc0, !PT\n"


# ---- reading

def test_parse():
    k = kernel("L:\n@!P0 LDS.128 R4, [R2+UR4+0x800]\n@P1 BRA `(L)", control(9, 2, 5, 0b100001))
    one, two = k.code
    expect((one.guard, one.name, one.base) == ("!P0", "LDS.128", "LDS"), f"parts: {vars(one)}")
    expect(one.operands == ["R4", "[R2+UR4+0x800]"], f"operands: {one.operands}")
    expect(two.target == ".L_L" and k.labels == {".L_L": 0}, f"label: {two.target}, {k.labels}")
    expect(one.control == (9, 2, 5, 0b100001), f"control: {one.control}")


def test_real_bits():
    """An instruction as nvdisasm printed it for sm_90a: a stall of 1, no barrier."""
    lines = ["\t.section\t.text._Z1kv,\"ax\",@progbits",
             "        /*0000*/                   LDC R1, c[0x0][0x28] ; /* 0x00000a00ff017b82 */",
             "                                                          /* 0x000fe20000000800 */"]
    found = parse.parse(lines)[0].code[0].control
    expect(found == (1, 7, 7, 0), f"control: {found}")


# ---- lanes apart

def test_branch_without_sync():
    bad = LANE_BRANCH + "@P0 BRA `(L)\nFADD R5, R5, R5\nL:\nHMMA.16816 R4, R8, R12, R4\nEXIT"
    expect(apart(bad) == ["HMMA"], "HMMA behind a branch of lanes")
    for base in ("LDSM.16.M88.4 R4, [R8]", "SHFL.BFLY PT, R4, R5, 0x10, 0x1f"):
        found = apart(bad.replace("HMMA.16816 R4, R8, R12, R4", base))
        expect(found == [base.split(".")[0]], f"{base}: {found}")
    shuffle = bad.replace("HMMA.16816 R4, R8, R12, R4", "SHFL.BFLY PT, R4, R5, 0x1, 0x1f")
    for sync in ("WARPSYNC.ALL", "WARPSYNC 0xffffffff", "WARPSYNC R9"):
        expect(not apart(shuffle.replace("L:", "L:\n" + sync)), f"{sync} brings lanes together")
    synced = bad.replace("L:", "L:\nWARPSYNC.ALL")
    expect(apart(synced) == ["HMMA"], "a product under a branch of lanes, WARPSYNC or not")
    expect(not apart(synced.replace(".ALL", ".ALL\nBAR.SYNC.DEFER_BLOCKING 0x0")), "with a barrier")
    expect(apart(bad.replace("L:", "L:\nWARPSYNC 0xffff")), "a mask of half a warp does not")
    expect(apart(bad.replace("L:", "L:\nBAR.SYNC.DEFER_BLOCKING 0x0")), "a barrier does not")


def test_bsync():
    good = LANE_BRANCH + ("BSSY B0, `(L)\n@P0 BRA `(L)\nFADD R5, R5, R5\nL:\nBSYNC B0\n"
                          "HMMA.16816 R4, R8, R12, R4\nEXIT")
    expect(not apart(good), "BSYNC brings lanes together")
    expect(apart(good.replace("BSYNC B0", "BSYNC B1")) == ["HMMA"], "another barrier's does not")
    inside = good.replace("FADD R5, R5, R5", "SHFL.IDX PT, R5, R5, RZ, 0x1f")
    expect(apart(inside) == ["SHFL"], "a shuffle on one of the paths")
    left = good.replace("FADD R5", "@P0 BREAK B0\nFADD R5")
    expect(apart(left) == ["HMMA"], "lanes that left the barrier")
    late = LANE_BRANCH + ("@P0 BRA `(M)\nFADD R5, R5, R5\nM:\nBSSY B0, `(L)\n@P0 BRA `(L)\n"
                          "FADD R5, R5, R5\nL:\nBSYNC B0\nSHFL.BFLY PT, R4, R5, 0x1, 0x1f\nEXIT")
    expect(apart(late) == ["SHFL"], "BSYNC restores what was at BSSY, no more")


def test_uniform():
    """Branches on which all lanes of a warp agree need nothing."""
    rest = "@P0 BRA `(L)\nFADD R5, R5, R5\nL:\nHMMA.16816 R4, R8, R12, R4\nEXIT"
    for same in ("LDC R1, c[0x0][0x28]\nISETP.GE.AND P0, PT, R1, 0x4, PT\n",
                 "S2R R1, SR_CTAID.X\nISETP.GE.AND P0, PT, R1, UR4, PT\n",
                 THREAD + "SHF.R.U32.HI R1, RZ, 0x5, R0\nISETP.GE.AND P0, PT, R1, UR4, PT\n",
                 THREAD + "LOP3.LUT R1, R0, 0x3e0, RZ, 0xc0, !PT\n" + NOT_ZERO,
                 THREAD + "LOP3.LUT R1, R2, 0x60, R0, 0xf8, !PT\n" + NOT_ZERO,
                 THREAD + "ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT\n"):
        expect(not apart(same + rest), f"one answer in a warp: {same!r}")
    for differs in (THREAD + "SHF.R.U32.HI R1, RZ, 0x4, R0\nISETP.GE.AND P0, PT, R1, UR4, PT\n",
                    THREAD + "LOP3.LUT R1, R0, 0x3f0, RZ, 0xc0, !PT\n" + NOT_ZERO,
                    THREAD + "LOP3.LUT R1, R0, 0x60, R2, 0xf8, !PT\n" + NOT_ZERO,
                    THREAD + "ISETP.GT.U32.AND P0, PT, R0, 0x20, PT\n",
                    THREAD + "IMAD.WIDE R2, R0, 0x4, R6\nISETP.NE.AND P0, PT, R3, RZ, PT\n",
                    THREAD + "LDG.E R1, desc[UR4][R0.64]\nISETP.NE.AND P0, PT, R1, RZ, PT\n",
                    "S2R R1, SR_LANEID\nISETP.NE.AND P0, PT, R1, RZ, PT\n",
                    "S2R R1, SR_LANEID\nISETP.NE.AND P1, PT, R1, RZ, PT\nP2R R3, PR, RZ, 0x2\n"
                    "R2P PR, R3, 0x1\n"):
        expect(apart(differs + rest), f"lanes differ: {differs!r}")
    expect(not apart(LANE_BRANCH + rest.replace("@P0 BRA", "@UP0 BRA")), "a uniform predicate")
    # A register of lanes that either of two guards on which all agree overwrites.
    guarded = (THREAD + "MOV R1, R0\nISETP.NE.AND P1, PT, RZ, UR6, PT\n@P1 MOV R1, UR5\n"
               "@P1 IADD3 R1, R1, 0x1, RZ\n@!P1 MOV R1, RZ\n" + NOT_ZERO)
    expect(not apart(guarded + rest), "one of two guarded values")
    for old, new in (("@!P1 MOV R1, RZ\n", ""), ("@!P1 MOV R1, RZ\n", "@!P1 MOV R1, R0\n"),
                     ("@!P1 MOV", "@P1 MOV"), ("@P1 IADD3", "@!P1 IADD3"),
                     ("@!P1", "ISETP.NE.AND P1, PT, RZ, UR7, PT\n@!P1"),
                     ("RZ, UR6", "R0, UR6")):
        expect(apart(guarded.replace(old, new) + rest), f"lanes differ without {old!r}: {new!r}")


def test_loops_and_paths():
    """A value that only some lanes changed differs from then on, in the loop's next round too."""
    loop = LANE_BRANCH + ("MOV R1, RZ\nT:\nSHFL.BFLY PT, R4, R5, 0x1, 0x1f\n"
                          "@P0 IADD3 R1, R1, 0x1, RZ\n"
                          "ISETP.GE.AND P1, PT, R1, UR4, PT\n@!P1 BRA `(T)\nEXIT")
    expect(apart(loop) == ["SHFL"], "lanes that leave a loop one after the other")
    expect(not apart(loop.replace("@P0 IADD3", "IADD3")), "a loop of one length")
    two = LANE_BRANCH + ("MOV R1, RZ\nBSSY B0, `(L)\n@P0 BRA `(L)\nMOV R1, UR4\nL:\nBSYNC B0\n"
                         "ISETP.NE.AND P1, PT, R1, RZ, PT\n@P1 BRA `(M)\nFADD R5, R5, R5\nM:\n"
                         "SHFL.BFLY PT, R4, R5, 0x1, 0x1f\nEXIT")
    expect(apart(two) == ["SHFL"], "one value on each path")
    slow = LANE_BRANCH + ("@P0 BRA `(L)\nFADD R5, R5, R5\nL:\nBRA.DIV UR4, `(S)\n"
                          "SHFL.BFLY PT, R4, R5, 0x1, 0x1f\nE:\nEXIT\nS:\n"
                          "WARPSYNC.COLLECTIVE R9, `(C)\nC:\nSHFL.BFLY PT, R4, R5, 0x1, 0x1f\n"
                          "BRA `(E)")
    expect(not apart(slow), "ptxas's own test whether lanes are together")
    expect(apart(slow.replace("BRA.DIV UR4, `(S)\n", "")) == ["SHFL"], "and without it")
    call = ("MOV R1, UR4\nCALL.REL.NOINC `($div)\nISETP.NE.AND P0, PT, R2, RZ, PT\n@P0 BRA `(L)\n"
            "FADD R5, R5, R5\nL:\nSHFL.BFLY PT, R4, R5, 0x1, 0x1f\nEXIT\n$div:\n"
            "MUFU.RCP R2, R1\nRET.REL.NODEC R8 `(k)")
    expect(not apart(call), "a subroutine of values that are the same")
    expect(apart(THREAD + call.replace("R1, UR4", "R1, R0")) == ["SHFL"], "of values that differ")


# ---- memory in pieces

def test_narrow():
    def runs(text):
        return [(r.base, r.bytes, r.accesses) for r in measure.narrow_runs(kernel(text + "\nEXIT"))]
    halves = "\n".join(f"STS.U16 [R4+{2 * i:#x}], R{8 + i}" for i in range(8))
    expect(runs(halves) == [("STS", 16, 8)], f"eight halves: {runs(halves)}")
    seven = halves.replace("STS.U16 [R4+0x0], R8\nSTS.U16 [R4+0x2], R9", "STS [R4], R8")
    expect(runs(seven) == [("STS", 16, 7)], f"seven stores: {runs(seven)}")
    expect(runs("STS.128 [R4], R8") == [], "16 bytes at once")
    expect(runs("LDS.64 R8, [R4]\nLDS.64 R10, [R4+0x8]") == [("LDS", 16, 2)], "two of eight")
    expect(runs("LDS R8, [R4]\nLDS R9, [R4+0x4]\nLDS R10, [R4+0x8]") == [], "twelve bytes")
    gaps = "\n".join(f"LDS R{8 + i}, [R4+{8 * i:#x}]" for i in range(4))
    expect(runs(gaps) == [], "gaps between")
    expect(runs("LDS.64 R8, [R4]\nIADD3 R4, R4, 0x1, RZ\nLDS.64 R10, [R4+0x8]") == [], "moved")
    expect(runs("LDS.64 R8, [R4]\n@P0 BRA `(L)\nL:\nLDS.64 R10, [R4+0x8]") == [], "a branch")
    expect(runs("LDG.E.64 R8, desc[UR4][R2.64+-0x8]\nLDG.E.64 R10, desc[UR4][R2.64]")
           == [("LDG", 16, 2)], "global memory, and before its address")
    wide = "LDG.E.128 R8, desc[UR4][R2.64]\nLDG.E.128 R12, desc[UR4][R2.64+0x10]"
    expect(runs(wide) == [], "two of 16 bytes")


# ---- the loop of tensor cores

LOOP = """
MOV R1, RZ
T:
DEPBAR.LE SB0, 0x0
BAR.SYNC.DEFER_BLOCKING 0x0
LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]
LDGDEPBAR
LDSM.16.M88.4 R8, [R4]
HMMA.16816.F32.BF16 R12, R8, R16, R12
HMMA.16816.F32.BF16 R12, R8, R18, R12
IADD3 R1, R1, 0x1, RZ
ISETP.GE.AND P1, PT, R1, UR4, PT
@!P1 BRA `(T)
EXIT
"""


def failures(text):
    k = kernel(text)
    return [gate for gate, _ in sass_check.gates(k, sass_check.figures(k, "bf16", "80", 1))]


def test_loop():
    found = sass_check.figures(kernel(LOOP), "bf16", "80", 40)
    expect((found.hmma, found.ldsm, found.local) == (2, 1, 0), f"kernel: {found}")
    expect(found.loop[:5] == (10, 2, 1, 1, 0), f"loop: {found.loop}")
    expect(found.loop.order == "wait barrier copy commit products", found.loop.order)
    expect(failures(LOOP) == [], f"no failure: {failures(LOOP)}")
    early = LOOP.replace("BAR.SYNC.DEFER_BLOCKING 0x0\n", "").replace(
        "LDGDEPBAR\n", "LDGDEPBAR\nLDSM.16.M88.4 R20, [R4]\nBAR.SYNC.DEFER_BLOCKING 0x0\n")
    expect(failures(early) == ["order"], f"LDSM before the barrier: {failures(early)}")
    gone = LOOP.replace("BAR.SYNC.DEFER_BLOCKING 0x0\n", "")
    expect(failures(gone) == ["order"], f"no barrier: {failures(gone)}")
    spilled = LOOP.replace("LDGDEPBAR", "LDGDEPBAR\nSTL [R1], R12\nLDL R12, [R1]")
    expect(failures(spilled) == ["local memory"], f"spilled: {failures(spilled)}")
    turned = "products wait barrier copy commit products"
    expect(measure.products_wait(turned), "a loop that begins in the middle of its products")


WGMMA_LOOP = """
USETMAXREG.DEALLOC.CTAPOOL 0x18
USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0
T:
WARPGROUP.ARRIVE
MUFU.EX2 R8, R8
""" + "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24\n" * 8 + """
WARPGROUP.DEPBAR.LE gsb0, 0x1
WARPGROUP.DEPBAR.LE gsb0, 0x0
@!P1 BRA `(T)
EXIT
"""


def test_wgmma():
    found = sass_check.figures(kernel(WGMMA_LOOP), "bf16", "90a", 168)
    expect(found.wgmma == (8, 8, 2, 0, "24/240", 0, (512, 384, 8, 13)) and not found.loop,
           f"{found.wgmma}")
    expect(failures(WGMMA_LOOP) == [], f"no failure: {failures(WGMMA_LOOP)}")
    one = "WARPGROUP.DEPBAR.LE gsb0, 0x0\n"
    expect(failures(WGMMA_LOOP.replace(one, one * 2)) == ["serialized"], "a wait too many")
    spilled = WGMMA_LOOP.replace(one, "LDL R12, [R1]\n" + one)
    expect(failures(spilled) == ["local memory"], f"spilled: {failures(spilled)}")
    line = next(line for line in sass_check.wgmma_lines([found._replace(name="a_kernel<1>")])
                if line.startswith("a<1>"))
    expect(line.split() == "a<1> 168 24/240 16 0 8/8 2 0 512 384 8 13".split(), line)
    # A in registers is not read; a loop around the loop is not the hot one.
    held = WGMMA_LOOP.replace("R24, gdesc[UR4], R24", "R24, R4, gdesc[UR4], R24")
    expect(measure.wgmma_bounds(kernel(held).code)[:2] == (512, 256), "A in registers")
    around = WGMMA_LOOP.replace("T:", "U:\nHGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24\nT:")
    around = around.replace("EXIT", "@!P1 BRA `(U)\nEXIT")
    expect(len(measure.wgmma_loop(kernel(around))) == 13, "the loop inside")


def test_model():
    """Two warps of a partition share its tensor core, 12 cycles a round each; a chain of stalls is
    as long as its sum for both."""
    k = kernel(LOOP.replace("LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]\nLDGDEPBAR\n", ""))
    cycles = model.cycles(k, measure.hot_loop(k))
    expect(12 <= cycles <= 40, f"short loop: {cycles}")
    many = LOOP.replace("LDSM", "HMMA.16816.F32.BF16 R12, R8, R18, R12\n" * 100 + "LDSM")
    k = kernel(many)
    cycles = model.cycles(k, measure.hot_loop(k))
    expect(abs(cycles - 612) < 40, f"102 products of 6 cycles: {cycles}")
    k = kernel("T:\n" + "FADD R5, R5, R5\n" * 8 + "HMMA R4, R8, R12, R4\n@P0 BRA `(T)\nEXIT",
               control(stall=15))
    cycles = model.cycles(k, measure.hot_loop(k))
    expect(cycles == 10 * 15 / 2, f"stalls of 15, two warps in turn: {cycles}")


# ---- the table

def figures(**changed):
    every = []
    for arch in sass_check.ARCHS:
        found = sass_check.figures(kernel(LOOP), "bf16", arch, 40)._replace(name="a_kernel<1>")
        every.append(found._replace(**changed) if arch == "90a" else found)
        plain = sass_check.figures(kernel("LDS.128 R4, [R2]\nEXIT"), "fp32", arch, 20)
        every.append(plain._replace(name="b_kernel<2>"))
    return every


def compare(old, new):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        return sass_check.compare(old, new), said.getvalue()


def test_table():
    committed = sass_check.table(figures(), "nvcc 1")
    expect(compare(committed, committed) == ([], ""), "the same")
    expect("a<1>" in committed and "2/2" in committed and "sm_90a" in committed, committed)
    expect("20 20 20 20" in committed and "128:1" in committed, committed)
    changed = sass_check.table(figures(registers=41), "nvcc 1")
    lines, _ = compare(committed, changed)
    expect(len(lines) == 2 and lines[0][0] == "-" and " 41 " in lines[1], f"registers: {lines}")
    spilled = sass_check.table(figures(local=7), "nvcc 1")
    expect(len(compare(committed, spilled)[0]) == 2, "local accesses")
    expect(compare("", committed)[0] == ["expected a table, found none"], "no table")


def test_other_nvcc():
    committed = sass_check.table(figures(), "nvcc 1")
    lines, said = compare(committed, sass_check.table(figures(registers=41), "nvcc 2"))
    expect(lines == [] and "skipped: the table is of nvcc 1" in said, f"{lines}, {said}")
    loop = figures()[2].loop._replace(ldsm=3)
    lines, _ = compare(committed, sass_check.table(figures(loop=loop, ldsm=3), "nvcc 2"))
    expect(lines == ["a<1>, sm_90a: expected 2 HMMA and 1 LDSM in the loop, found 2 and 3"],
           f"the loop's products are compared: {lines}")


def test_allowed():
    failure = [("a_kernel<1>", "bf16", "80", "STS", "16 bytes")] * 2
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        failed = [sass_check.report(failure, rows) for rows in (
            [], [("a<1> bf16 sm_80", "STS", "because")], [("a<*", "LDS", "no")],
            [("a<1> bf16 sm_90a", "STS", "no")], [("a<*> * sm_80", "STS", "because")])]
    expect(failed == [1, 0, 1, 1, 0], f"{failed}")
    expect("FAILED: a<1> bf16 sm_80: STS: 16 bytes, and 1 more" in said.getvalue()
           and "allowed: a<1> bf16 sm_80, STS, in 1: because" in said.getvalue(), said.getvalue())
    for row in sass_check.allowed():
        expect(len(row) == 3 and all(row), f"a row of ALLOWED: {row}")


def main():
    tests = {name[5:]: test for name, test in globals().items() if name.startswith("test_")}
    chosen = sys.argv[1:] or tests
    for name in chosen:
        tests[name]()
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
