"""The activation, the embedding, the kernels beside a library's product, and the interpreter's own
mma and ldmatrix."""
import ctypes
import os

import numpy as np

from gpu import F32, I32, Failed
from harness import CLOSE, SUMS
from layers.moe import sigmoid
from ptx import Module


def check_activation(t):
    n, F, e = 11, 1056, 1e-6
    for swiglu in (1, 0):
        t.case("SwiGLU" if swiglu else "GELU")
        gu, dh = t.normal(n, 2 * F if swiglu else F, scale=2), t.normal(n, F)
        gu[0, :4] = [100, -100, 60, -90]

        def f(x):
            if swiglu:
                return x[:, :F] * sigmoid(x[:, :F]) * x[:, F:]
            return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))
        h, dgu, gus = t.empty((n, F)), t.empty(gu.shape), t.put(gu)
        t.call("run_activation_forward", h, gus, n, F, swiglu)
        t.call("run_activation_backward", dgu, t.put(dh), gus, n, F, swiglu)
        with np.errstate(over="ignore"):
            t.expect("h", h, f(gu))
            if swiglu:
                zero, shift = np.zeros((n, F)), np.full((n, F), e)
                gate, up = np.hstack([shift, zero]), np.hstack([zero, shift])
                want = np.hstack([dh * (f(gu + s) - f(gu - s)) / (2 * e) for s in (gate, up)])
            else:
                want = dh * (f(gu + e) - f(gu - e)) / (2 * e)
        t.expect("dgu", dgu, want)


def check_embedding(t):
    for B, T, C, V, positions, restart in [(2, 40, 136, 50, True, False),
                                           (3, 70, 264, 20, False, False),
                                           (2, 400, 64, 3000, True, False),
                                           (2, 90, 72, 50, True, True)]:
        t.case(f"embedding {B}x{T}x{C}{' of documents' if restart else ''}")
        n, scale = B * T, 0.5
        tokens = t.rng.integers(0, V, n).astype(I32)
        if V < 1000:
            tokens[::3] = 5                        # a group of several pieces
        at = np.tile(np.arange(T), B)
        begins = (at // 7 * 7).astype(I32) if restart else None
        at = at - begins if restart else at
        t.call("set_documents", t.put(begins), None)
        wte, wpe = t.normal(V, C), t.normal(T, C) if positions else None
        e, ts = t.empty((n, C)), t.put(tokens)
        t.call("run_embedding_forward", e, ts, t.put(wte), t.put(wpe), B, T, C, scale)
        t.expect("e", e, scale * wte[tokens] + (wpe[at] if positions else 0))
        groups = np.zeros(t.gpu.ask("group_ints", n), I32)
        t.call("run_token_groups", groups, tokens, begins, B, T)
        de, a0, b0 = t.normal(n, C), t.floats(V, C), t.floats(T, C)
        dwte, dwpe = t.put(a0, F32), t.put(b0, F32)
        t.call("run_embedding_backward", dwte, dwpe if positions else None, t.put(de),
               t.put(groups), B, T, C, scale)
        want = a0.copy()
        np.add.at(want, tokens, scale * de)
        t.expect("dwte", dwte, want, SUMS)
        if positions:
            want = b0.copy()
            np.add.at(want, at, de)
            t.expect("dwpe", dwpe, want, SUMS)
    t.call("set_documents", None, None)


def check_linear(t):
    """The products are dev/emu's. Without epilogues of the library, bias and GELU are kernels."""
    os.environ["EMU_CUBLASLT_PLAIN"] = "1"
    n, inner, out, c = 530, 48, 1064, 0.5
    t.case("linear with a bias")
    x, w, b, dy = (t.normal(*s) for s in ((n, inner), (out, inner), (out,), (n, out)))
    add, dw0, db0 = t.normal(n, inner), t.floats(out, inner), t.floats(out)
    xs, dys, dw, db = t.put(x), t.put(dy), t.put(dw0, F32), t.put(db0, F32)
    y, dx = t.empty((n, out)), t.empty((n, inner))
    t.call("set_linear", t.put(w), t.put(b), dw, db, n, out, inner, c)
    t.call("run_linear_forward", y, xs, None, 0.0)
    t.expect("y", y, c * x @ w.T + b, (1e-4, 0.1))           # rounded before the bias, and after
    t.call("run_linear_backward", dx, dys, xs, t.put(add), 2.0)
    t.expect("dx", dx, c * dy @ w + 2 * add)
    t.expect("dw", dw, dw0 + c * dy.T @ x, SUMS)
    t.expect("db", db, db0 + dy.sum(0), SUMS)


# -------------------------------------------------------------------------- the interpreter itself

def offsets(shape, stride):
    """The offset of every coordinate of a CuTe layout, the first coordinate running fastest."""
    def flat(x):
        return [z for y in x for z in flat(y)] if isinstance(x, tuple) else [x]
    out = np.zeros(1, int)
    for n, s in zip(flat(shape), flat(stride)):
        out = (out[None, :] + (np.arange(n) * s)[:, None]).ravel()
    return out


def launch_warp(t, name, *arrays):
    """One warp of a kernel of isa.ptx."""
    class Dim(ctypes.Structure):
        _fields_ = [(d, ctypes.c_uint32) for d in "xyz"]
    pointers = [ctypes.c_uint64(a.ptr) for a in arrays]
    arguments = (ctypes.c_void_p * len(pointers))(*[ctypes.addressof(p) for p in pointers])
    t.gpu.vm.vm_clear()
    t.gpu.vm.vm_launch(name.encode(), Dim(1, 1, 1), Dim(32, 1, 1), arguments, 0)
    if t.gpu.vm.vm_error():
        raise Failed(t.gpu.vm.vm_error().decode())


def check_isa(t):
    """mma and ldmatrix by themselves, against the layouts in NVIDIA's CUTLASS: of
    cute/atom/mma_traits_sm80.hpp SM80_16x8x16_F32BF16BF16F32_TN, of copy_traits_sm75.hpp
    SM75_U32x4_LDSM_N and SM75_U16x8_LDSM_T."""
    t.case("mma")
    path = os.path.join(os.path.dirname(__file__), "..", "isa.ptx")
    t.gpu.modules.append(Module(open(path, encoding="utf-8").read()))
    for name in ("isa_mma", "isa_ldmatrix"):
        t.gpu.load(name)
    t.gpu.modules.pop()
    A, B, C = (np.round(t.normal(*s, scale=8)) for s in ((16, 16), (16, 8), (16, 8)))
    a = offsets(((4, 8), (2, 2, 2)), ((32, 1), (16, 8, 128))).reshape(8, 32).T    # m + 16 k
    b = offsets(((4, 8), (2, 2)), ((16, 1), (8, 64))).reshape(4, 32).T            # n + 8 k
    c = offsets(((4, 8), (2, 2)), ((32, 1), (16, 8))).reshape(4, 32).T            # m + 16 n

    def bf16(x):
        bits = np.ascontiguousarray(x, F32).view(np.uint32)
        return (bits >> np.uint32(16)).astype(np.uint16)
    lanes = np.zeros((32, 10), np.uint32)
    lanes[:, :4] = bf16(A.T.ravel()[a]).view(np.uint32)
    lanes[:, 4:6] = bf16(B.ravel()[b]).view(np.uint32)
    lanes[:, 6:] = np.ascontiguousarray(C.T.ravel()[c], F32).view(np.uint32)
    d = t.empty((32, 4), F32)
    launch_warp(t, "isa_mma", t.put(lanes), d)
    t.expect("D", d, (A @ B + C).T.ravel()[c], CLOSE)
    t.case("ldmatrix")
    m, to = np.arange(256, dtype=np.uint16).reshape(32, 8), t.empty((32, 2, 8), np.uint16)
    launch_warp(t, "isa_ldmatrix", t.put(m), to)
    plain = offsets((32, (2, 4)), (2, (1, 64))).reshape(8, 32).T
    transposed = offsets(((4, 8), (2, 4)), ((16, 1), (8, 64))).reshape(8, 32).T
    t.same("plain", to.get()[:, 0], m.ravel()[plain])
    t.same("transposed", to.get()[:, 1], m.ravel()[transposed])
    t.call("run_probe")
