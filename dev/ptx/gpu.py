"""gpu.py: the interpreted GPU as checks see it: arrays in its memory, and calls of kernels.cu."""
import ctypes
import os
import sys

import numpy as np

import build
from ptx import SPECIAL, Module, PtxError

# Bytes of shared memory that a block may have at most (CUDA C++ Programming Guide, table of
# technical specifications per compute capability).
SHARED_LIMIT = {"80": 163 << 10, "90a": 227 << 10, "120": 99 << 10}
F32, F64, I32 = np.float32, np.float64, np.int32


def round_bf16(x):
    """The nearest values of bfloat16 (ties to even), as float32."""
    b = np.ascontiguousarray(x, np.float32).view(np.uint32)
    b = (b + np.uint32(0x7fff) + (b >> np.uint32(16) & np.uint32(1))) & np.uint32(0xffff0000)
    return b.view(np.float32)


class Failed(Exception):
    """A launch ended with a message of the interpreter."""


class Array:
    """An array of the GPU. kind None: of the storage type."""

    def __init__(self, gpu, shape, kind, values=None):
        self.gpu, self.shape = gpu, tuple(shape)
        self.is_bf16 = kind is None and gpu.prec == "bf16"
        self.dtype = np.dtype(np.uint16 if self.is_bf16 else kind or np.float32)
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        self.ptr = gpu.vm.vm_alloc(size, values is not None)
        bytes_ = (ctypes.c_uint8 * size).from_address(self.ptr)
        self.raw = np.frombuffer(bytes_, self.dtype).reshape(self.shape)
        if values is not None:
            self.raw[...] = self.stored(values)

    def stored(self, values):
        if not self.is_bf16:
            return values
        return (round_bf16(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    def get(self):
        """The values: float64, or integers as they are."""
        x = self.raw
        if self.is_bf16:
            x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return x.astype(np.float64) if x.dtype.kind == "f" else x.copy()

    def at(self, elements):
        """The address of an element."""
        return self.ptr + elements * self.dtype.itemsize


def c_value(x):
    """An argument for kernels.cu: integers are int64_t, other numbers double, None is nullptr."""
    if isinstance(x, Array):
        return ctypes.c_void_p(x.ptr)
    if isinstance(x, np.ndarray):
        return ctypes.c_void_p(x.ctypes.data)
    if isinstance(x, (bool, int, np.integer)):
        return ctypes.c_int64(int(x))
    return ctypes.c_void_p(0) if x is None else ctypes.c_double(x)


class Interpreter:
    """vm.so with the kernels of one or several PTX files, which are read when they are launched."""

    def __init__(self, arch, seed, noise=1):
        folder = os.path.join(build.ROOT, build.OUT)
        ctypes.CDLL(folder + "/services.so", ctypes.RTLD_GLOBAL)
        self.vm = vm = ctypes.CDLL(folder + "/vm.so", ctypes.RTLD_GLOBAL)
        vm.vm_alloc.restype, vm.vm_alloc.argtypes = ctypes.c_void_p, (ctypes.c_uint64, ctypes.c_int)
        vm.vm_free.argtypes = vm.vm_written.argtypes = (ctypes.c_void_p,)
        vm.vm_operation.restype = vm.vm_error.restype = ctypes.c_char_p
        vm.vm_executed.restype = ctypes.c_uint64
        vm.vm_open.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
        self.arch, self.modules, self.loaded, self.trouble = arch, [], {}, ""
        self.open(seed, noise)
        self.number_of = {}
        while vm.vm_operation(len(self.number_of)):
            self.number_of[vm.vm_operation(len(self.number_of)).decode()] = len(self.number_of)
        self.need = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self.load_needed)
        vm.runtime_need(self.need)

    def open(self, seed, noise=1):
        self.vm.vm_open(seed, noise, SHARED_LIMIT[self.arch])

    def load_needed(self, name):
        """Called by runtime.cpp; an exception would not get through it."""
        try:
            self.load(name.decode())
        except PtxError as error:
            self.trouble = self.trouble or str(error)
            print(f"FAILED: {error}", file=sys.stderr, flush=True)

    def load(self, name, body=None):
        """body: another text for the kernel (mutate.py)."""
        module = next((m for m in self.modules if name in m.bodies), None)
        if module is None:
            raise PtxError(f"no PTX has the kernel {name}")
        kernel = module.kernel(name, body)
        rows = kernel.rows(self.number_of)
        constants = np.array([(place, size, value - (value >> 63 << 64))
                              for (value, size), place in kernel.constants.items()], np.int64)
        special = np.array([kernel.special.get(s, -1) for s in SPECIAL], np.int32)
        sizes = np.array([kernel.file, kernel.shared_bytes, kernel.parameter_bytes, kernel.align],
                         np.int32)
        many = np.array(kernel.many, np.int32)
        parameters = np.array(list(kernel.parameters.values()), np.int32)
        self.vm.vm_kernel(name.encode(), c_value(rows), len(rows),
                          c_value(constants), len(constants), c_value(special), c_value(sizes),
                          c_value(parameters), len(parameters), c_value(many), len(many))
        self.loaded[name] = kernel

    def hits(self, name):
        """For each instruction of a kernel whether it has run."""
        hit = np.zeros(len(self.loaded[name].code), np.uint8)
        self.vm.vm_hits(name.encode(), c_value(hit))
        return hit


class Gpu(Interpreter):
    """The launchers of kernels.cu for one architecture and precision."""

    def __init__(self, arch, prec, seed=1):
        base = build.build_kernels(arch, prec)
        super().__init__(arch, seed)
        self.prec = prec
        self.pack = 8 if prec == "bf16" else 4      # values in 16 bytes
        self.modules = [Module(open(base + ".ptx", encoding="utf-8").read())]
        self.lib = ctypes.CDLL(base + ".so", ctypes.RTLD_GLOBAL)
        self.arrays = []
        self.fresh()

    def fresh(self, scratch=1 << 20):
        """Frees all arrays. scratch: floats that launchers have for partial sums."""
        for a in self.arrays:
            self.vm.vm_free(a.ptr)
        self.arrays = []
        self.call("set_scratch", self.empty(scratch, F32), scratch)

    def put(self, values, kind=None):
        """A new array with these values: floats in the storage type unless `kind` says another."""
        if values is None:
            return None
        values = np.asarray(values)
        if kind is None and values.dtype.kind != "f":
            kind = values.dtype
        self.arrays.append(Array(self, values.shape, kind, values))
        return self.arrays[-1]

    def empty(self, shape, kind=None):
        """A new array of NaN that no kernel may read before one has written it."""
        self.arrays.append(Array(self, np.atleast_1d(shape), kind))
        return self.arrays[-1]

    def written(self, *arrays):
        """From now on all of these arrays may be read."""
        for a in arrays:
            self.vm.vm_written(a.ptr)

    def call(self, name, *arguments):
        """Calls a function of kernels.cu. Ends with Failed if a launch did."""
        function = getattr(self.lib, name)
        self.vm.vm_clear()
        self.trouble = ""
        function(*(c_value(a) for a in arguments))
        error = self.trouble or self.vm.vm_error().decode()
        if error:
            raise Failed(f"{name}: {error}")

    def ask(self, name, *arguments):
        """Calls a function of kernels.cu that returns a number."""
        function = getattr(self.lib, name)
        function.restype = ctypes.c_int64
        return function(*(c_value(a) for a in arguments))
