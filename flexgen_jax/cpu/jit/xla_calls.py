"""Calls from code that Numba compiles to functions known by address or name, as LLVM instructions.

words(address), pointer(address), address_in(words)
    what lies at an address, as 8-byte words or as anything; and where words lie
room(count)
    so many words that are there until the function returns
call(function, word), run(name, task), run_part(name, task, part), address_of(name)
    of functions at an address, or that `binding.add_symbol` has named
fetch_add(address, value)
    adds to a word in one step for all threads
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types as untyped_types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic as untyped_intrinsic

cgutils: Any = untyped_cgutils
types: Any = untyped_types
intrinsic: Any = untyped_intrinsic

WORD = ir.IntType(64)


def _words(_context: Any, address: Any) -> Any:
    """What lies at an address, as 8-byte words."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], WORD.as_pointer())

    return types.CPointer(types.intp)(types.intp), generate


def _address(_context: Any, memory: Any) -> Any:
    """Where words lie."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], WORD)

    return types.intp(memory), generate


def _pointer(_context: Any, address: Any) -> Any:
    """An address as a pointer to anything."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


def _call(_context: Any, function: Any, argument: Any) -> Any:
    """Calls the function of one word at an address."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(WORD, [WORD])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(function, [arguments[1]])

    return types.intp(types.intp, types.intp), generate


def _named(builder: Any, name: Any, *more: Any) -> Any:
    """The function of a task, and of what more there is, that `binding.add_symbol` has named."""
    kind = ir.FunctionType(WORD, [WORD.as_pointer(), *more])
    return cgutils.get_or_insert_function(builder.module, kind, name.literal_value)


def _address_of(_context: Any, name: Any) -> Any:
    """Of a function that `binding.add_symbol` has named."""

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return builder.ptrtoint(_named(builder, name), WORD)

    return types.intp(name), generate


def _run(_context: Any, name: Any, task: Any) -> Any:
    """Calls one that takes a task. Numba's own types of functions would do, but have numbers that
    differ from process to process: what is compiled would never be found again in its cache."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.call(_named(builder, name), arguments[1:])

    return types.intp(name, task), generate


def _run_part(_context: Any, name: Any, task: Any, part: Any) -> Any:
    """The same with a part's number."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.call(_named(builder, name, WORD), arguments[1:])

    return types.intp(name, task, types.intp), generate


def _fetch_add(_context: Any, address: Any, value: Any) -> Any:
    """Adds to the word at an address in one step for all threads; returns what it was."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


def _room(_context: Any, count: Any) -> Any:
    """So many words that are there until the function returns. What XLA is called with lies there:
    Numba lets go of an array with the last mention of it, which may be that of its address."""

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return cgutils.alloca_once(builder, WORD, size=ir.Constant(WORD, count.literal_value))

    return types.CPointer(types.intp)(count), generate


words, address_in, pointer = intrinsic(_words), intrinsic(_address), intrinsic(_pointer)
call, fetch_add = intrinsic(_call), intrinsic(_fetch_add)
address_of = intrinsic(prefer_literal=True)(_address_of)
room = intrinsic(prefer_literal=True)(_room)
run, run_part = (intrinsic(prefer_literal=True)(emit) for emit in (_run, _run_part))
