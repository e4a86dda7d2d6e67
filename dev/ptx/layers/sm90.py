"""The ladders of dev/kernels for compute capability 9.0, with their own truths in double; the
products of experts by wgmma; and the comparison of both kinds at the start of a run."""
import ctypes
import os
import tempfile

import build
import numpy as np
from layers import moe
from ptx import Module


def ladder_module(name, arch):
    with open(build.build_ladder(name, arch) + ".ptx", encoding="utf-8") as f:
        return Module(f.read())


def quietly(function, show):
    """Its status; what it prints is shown or forgotten."""
    if show:
        return function()
    with tempfile.TemporaryFile() as away:
        kept = os.dup(1)
        os.dup2(away.fileno(), 1)
        try:
            status = function()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    return status


def ladder(t, name):
    """Runs main of dev/kernels/NAME.cu, whose status is 0 if every step is right."""
    t.case(f"ladder {name}")
    t.gpu.modules.append(ladder_module(name, t.gpu.arch))
    t.gpu.vm.vm_clear()
    t.gpu.trouble = ""
    main = ctypes.CDLL(build.build_ladder(name, t.gpu.arch) + ".so").main
    status = quietly(main, t.show)
    t.gpu.modules.pop()
    error = t.gpu.trouble or t.gpu.vm.vm_error().decode()
    t.note(error or "every step", status, status == 0 and not error)


MMA, WGMMA = 1, 2


def experts_choose(t, tokens, K):
    """For the experts that the last check has set."""
    t.case(f"comparison of experts, {tokens} tokens")
    arena = t.empty(1 << 20)
    t.written(arena)
    t.gpu.vm.vm_clear()
    kinds = t.gpu.ask("run_experts_choose", arena, 1 << 20, tokens, K)
    error = t.gpu.trouble or t.gpu.vm.vm_error().decode()
    t.note(error or "both kinds agree", kinds, kinds == 111 * WGMMA and not error)


def experts_by_wgmma(t, *sizes, **more):
    t.call("set_experts_kind", WGMMA)
    try:
        moe.experts(t, *sizes, **more)
    finally:
        t.call("set_experts_kind", MMA)


def experts(t):
    """More experts than multiprocessors; more steps than stages; an expert without rows."""
    experts_by_wgmma(t, 90, 4, 2, 2, 88, 328, True, empty=3)
    experts_by_wgmma(t, 80, 2, 1, 1, 264, 72, False)
    experts_choose(t, 60, 2)


def check_sm90(t):
    if t.gpu.arch != "90a" or t.gpu.prec != "bf16":
        return
    for name in ("product", "attention_sm90"):
        ladder(t, name)
    for T, NH, KV, QK, HS in [(150, 2, 1, 64, 64), (70, 2, 2, 96, 96), (131, 2, 1, 128, 128),
                              (70, 1, 1, 192, 128)]:
        t.case(f"comparison of heads of {QK} and {HS}")
        arena, shape = t.empty(1 << 20), np.array([1, T, NH, KV, QK, HS])
        t.written(arena)
        if QK == 64:
            t.call("set_documents", t.empty(T, np.int32), t.empty(T, np.int32))
        t.gpu.vm.vm_clear()
        kinds = t.gpu.ask("run_attend_choose", arena, 1 << 20, shape, 1 / np.sqrt(QK))
        error = t.gpu.trouble or t.gpu.vm.vm_error().decode()
        t.call("set_documents", None, None)
        backward = MMA if QK == 192 else WGMMA
        t.note(error or "both kinds agree", kinds, kinds == 10 * WGMMA + backward and not error)
    experts(t)
