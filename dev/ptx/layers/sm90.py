"""The ladders of dev/kernels for compute capability 9.0, with their own truths in double."""
import ctypes
import os
import tempfile

import build
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


def check_sm90(t):
    if t.gpu.arch == "90a" and t.gpu.prec == "bf16":
        for name in ("product", "attention_sm90"):
            ladder(t, name)
