"""The functions that XLA calls: they divide a kernel's work among XLA's threads.

XLA's structures are read as 8-byte words, by the layouts of `xla/ffi/api/c_api.h`, version 0.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from flexgen_jax.cpu import targets
from flexgen_jax.cpu.jit.emit import I8, I64, Array, Function, Scalar, Value
from flexgen_jax.cpu.jit.machine_code import compiled
from flexgen_jax.cpu.processor import core_count, host

EXTENSION, API, CONTEXT, ARGUMENTS, RESULTS = 1, 2, 3, 9, 14  # words of XLA_FFI_CallFrame
FAIL, SCHEDULE, THREADS = 6, 17, 18  # words of XLA_FFI_Api
DTYPE, DATA, SIZES = 2, 3, 5  # words of XLA_FFI_Buffer
METADATA = 1
API_VERSION = targets.INTERFACE[1] << 32 | targets.INTERFACE[0]
UINT8 = 6  # XLA's number of the type
RESOURCE_EXHAUSTED = 8
MESSAGE = b"a kernel of the CPU found no memory for its workspace\0"

RANGES_PER_THREAD = 4
"""Each range of the work goes to whichever thread is free."""

NEXT, DONE, SUCCEEDED, HOLDERS, ALL, FRAME, TASK_WORDS = range(7)
"""Indices of words in the task that the threads of a call share."""


@dataclass(frozen=True)
class Buffer:
    """An argument or a result of a call."""

    words: Array

    def array(self, scalar: Scalar) -> Array:
        return self.words.array(DATA, scalar)

    def size(self, axis: int) -> Value:
        return self.words.array(SIZES, I64).load(axis)

    def is_packed(self) -> Value:
        """Whether the elements are of the type uint8."""
        return (self.words.load(DTYPE) & 0xFFFFFFFF).equals(UINT8)


@dataclass(frozen=True)
class Call:
    """A call of XLA, and the range of its work to be done: number `part` of `parts`."""

    frame: Array
    part: Value
    parts: Value

    def argument(self, number: Value | int) -> Buffer:
        return Buffer(self.frame.array(ARGUMENTS, I64).array(number, I64))

    def result(self, number: int) -> Buffer:
        return Buffer(self.frame.array(RESULTS, I64).array(number, I64))

    def limits(self, count: Value, multiple: int = 1) -> tuple[Value, Value]:
        """Returns where the range begins and ends, both multiples of `multiple`."""
        units = count // multiple
        begin, end = (units * n // self.parts * multiple for n in (self.part, self.part + 1))
        return begin, end


@dataclass(frozen=True)
class Division:
    """How a call's work is divided: into ranges of at least `grain` along an axis of the first
    result, and of at least `min_products` multiplications, if each element of the first argument is
    multiplied once for each element of that axis. Waking a thread takes longer than a few of them.
    """

    axis: int = 0
    grain: int = 1
    min_products: int = 1


Compute = Callable[[Function, Call], None]
"""Emits the work of a range. The function returns 1, or 0 if it finds no memory."""


def compiled_handler(name: str, compute: Compute, division: Division | None = None) -> int:
    """Returns the address of the function that XLA calls."""
    module = ir.Module(name)
    _emit_handler(module, name, compute, division or Division())
    library = compiled(module)
    ctypes.c_int64.from_address(library.address("num_cores")).value = core_count()
    return library.address(name)


def _emit_handler(module: ir.Module, name: str, compute: Compute, division: Division) -> None:
    processor = host()
    cores = ir.GlobalVariable(module, I64, "num_cores")  # set when the code is loaded
    cores.initializer = ir.Constant(I64, 1)

    parameters = [(I64,), I64, I64]
    one = Function(module, f"{name}_range", parameters, I64, processor=processor)
    compute(one, Call(*one.arguments))
    one.give(one.index(1))
    one.ir.linkage = "internal"

    work = Function(module, f"{name}_work", [(I64,)], processor=processor)
    _emit_work(work, one)

    k = Function(module, name, [(I64,)], I64, processor=processor)
    (frame,) = k.arguments
    _answer_version(k, frame)
    sent = k.stack(I64, 5)
    num_cores = Array(k, cores.bitcast(ir.PointerType()), I64).load(0)
    helpers, parts = _threads(k, Call(frame, k.index(0), k.index(1)), sent, division, num_cores)
    task = _allocated_task(k, frame, sent)
    for word, value in enumerate((0, 0, 0, helpers + 2, parts, frame.address())):
        task.store(word, value)
    with k.loop(helpers):
        scheduled = _send(k, frame, SCHEDULE, sent, frame.load(CONTEXT), work.address(), task)
        with k.when(scheduled.differs(0)):
            task.fetch_add(HOLDERS, -1)
    k.run(work, task)
    with k.while_(lambda: task.fetch_add(DONE, 0) < task.load(ALL)):
        pass
    is_done = task.load(SUCCEEDED).equals(task.load(ALL))
    _release(k, task)
    with k.when(is_done):
        k.give(k.index(0))
    k.give(_fail(k, frame, sent))


def _emit_work(k: Function, one: Function) -> None:
    """Emits the function of each thread: it takes ranges until all are taken."""
    (task,) = k.arguments
    part = k.variable(task.fetch_add(NEXT, 1))
    with k.while_(lambda: part.get() < task.load(ALL)):
        succeeded = k.run(one, task.array(FRAME, I64), part.get(), task.load(ALL))
        task.fetch_add(SUCCEEDED, succeeded)
        task.fetch_add(DONE, 1)
        part.set(task.fetch_add(NEXT, 1))
    _release(k, task)
    k.give()


def _answer_version(k: Function, frame: Array) -> None:
    """Tells XLA the version of its interface, for which it asks before the first call."""
    with k.when(frame.load(EXTENSION).differs(0)):
        extension = frame.array(EXTENSION, I64)
        with k.when((extension.load(1) & 0xFFFFFFFF).equals(METADATA)):
            extension.array(3, I64).store(3, API_VERSION)
            k.give(k.index(0))


def _threads(
    k: Function, call: Call, sent: Array, division: Division, num_cores: Value
) -> tuple[Value, Value]:
    """Returns how many threads help, and the number of ranges.

    XLA may have more threads than there are cores, see `engine/stages/worker.py`. Here they would
    take each other's core, and a thread without work would wait for the other.
    """
    size = call.result(0).size(division.axis)
    most = (size // division.grain).maximum(1)
    if division.min_products > 1:
        rows = call.argument(0)
        products = size * rows.size(0) * rows.size(1)
        most = most.minimum(products // division.min_products).maximum(1)
    threads = k.stack(I64, 1)
    threads.store(0, 1)
    context = call.frame.load(CONTEXT)
    status = _send(k, call.frame, THREADS, sent, context, threads.address())
    running = threads.load(0).minimum(num_cores).minimum(most)
    helpers = status.equals(0).select(running - 1, 0).maximum(0)
    return helpers, most.minimum((helpers + 1) * RANGES_PER_THREAD)


def _allocated_task(k: Function, frame: Array, sent: Array) -> Array:
    address = k.call("malloc", I64, k.index(8 * TASK_WORDS))
    with k.when(address.equals(0)):
        k.give(_fail(k, frame, sent))
    return Array(k, k.build.inttoptr(address.ir, ir.PointerType()), I64)


def _send(
    k: Function, frame: Array, function: int, sent: Array, *words: Value | Array | int
) -> Value:
    """Calls a function of XLA, by its place in XLA_FFI_Api, with a structure of these words."""
    for number, word in enumerate((8 * (2 + len(words)), 0, *words)):
        sent.store(number, word.address() if isinstance(word, Array) else word)
    status: Value = k.call(frame.array(API, I64).load(function), I64, sent)
    return status


def _fail(k: Function, frame: Array, sent: Array) -> Value:
    """Returns XLA's error of exhausted memory."""
    return _send(k, frame, FAIL, sent, k.static("message", I8, MESSAGE), RESOURCE_EXHAUSTED)


def _release(k: Function, task: Array) -> None:
    """Drops one hold on the task. The last one frees it, because a thread may start when the others
    have long finished."""
    with k.when(task.fetch_add(HOLDERS, -1).equals(1)):
        k.call("free", ir.VoidType(), task)
