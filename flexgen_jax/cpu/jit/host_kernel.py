"""Kernels that Python calls, on its own threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from llvmlite import ir

from flexgen_jax.cpu.jit.emit import F32, I32, I64, Array, Function, Scalar, Value
from flexgen_jax.cpu.jit.machine_code import compiled
from flexgen_jax.cpu.processor import Processor, host

Argument = np.ndarray | np.float32 | int


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: 8-byte words, which are numbers or the addresses of arrays."""

    words: Array

    def array(self, number: int, scalar: Scalar) -> Array:
        return self.words.array(number, scalar)

    def index(self, number: int) -> Value:
        return self.words.load(number)

    def single(self, number: int) -> Value:
        """Returns an argument that is fp32."""
        return self.words.load(number).to(I32).bits(F32)


Emit = Callable[[Function, Arguments, tuple[Value, Value]], None]
"""Emits a kernel for a range of its rows."""


def kernel_module(name: str, emit: Emit, processor: Processor) -> ir.Module:
    """Returns the module of a kernel: a function of the arguments' address and the limits of a
    range, which returns 1, or 0 if it finds no memory."""
    module = ir.Module(name)
    k = Function(module, name, [(I64,), I64, I64], I64, processor=processor)
    words, begin, end = k.arguments
    emit(k, Arguments(words), (begin, end))
    k.give(k.index(1))
    return module


class HostKernel:
    """A compiled kernel. Its callers hold no lock of the interpreter."""

    def __init__(self, name: str, emit: Emit) -> None:
        parameters = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        library = compiled(kernel_module(name, emit, host()))
        self._call = library.function(name, *parameters, result=ctypes.c_int64)

    def bind(self, *arguments: Argument) -> Callable[[int, int], None]:
        """Returns a function that runs the kernel for a range of rows, from begin to end. Arrays
        are contiguous."""
        words = np.array([_word(argument) for argument in arguments], np.int64)
        return partial(self._run, (words, arguments))

    def _run(self, bound: tuple[np.ndarray, Sequence[Argument]], begin: int, end: int) -> None:
        words, _ = bound  # which keeps the arrays alive
        if not self._call(words.ctypes.data, begin, end):
            raise MemoryError("a kernel of the CPU found no memory for its workspace")


def _word(argument: Argument) -> int:
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous, argument.strides
        return int(argument.ctypes.data)
    return int(argument.view(np.int32)) if isinstance(argument, np.float32) else argument
