"""Calls from Numba-compiled code to functions known by address or name, as LLVM instructions.

words(address), pointer(address)
    the memory at an address, as 8-byte words or as an untyped pointer
address_in(words)
    the address of words
room(count)
    memory for `count` words that lives until the function returns
call(function, word)
    calls the function at an address
run(name, task), run_part(name, task, part), address_of(name)
    calls, or returns the address of, a function that `binding.add_symbol` has named
fetch_add(address, value)
    adds to a word atomically
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
    """Returns the memory at an address, as 8-byte words."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], WORD.as_pointer())

    return types.CPointer(types.intp)(types.intp), generate


def _address(_context: Any, memory: Any) -> Any:
    """Returns the address of words."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], WORD)

    return types.intp(memory), generate


def _pointer(_context: Any, address: Any) -> Any:
    """Returns an address as an untyped pointer."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


def _call(_context: Any, function: Any, argument: Any) -> Any:
    """Calls the function at an address, which takes one word and returns one."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(WORD, [WORD])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(function, [arguments[1]])

    return types.intp(types.intp, types.intp), generate


def _named(builder: Any, name: Any, *more: Any) -> Any:
    """Returns the function, named by `binding.add_symbol`, that takes a task and arguments of the
    types `more`, and returns a word."""
    kind = ir.FunctionType(WORD, [WORD.as_pointer(), *more])
    return cgutils.get_or_insert_function(builder.module, kind, name.literal_value)


def _address_of(_context: Any, name: Any) -> Any:
    """Returns the address of a function that `binding.add_symbol` has named."""

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return builder.ptrtoint(_named(builder, name), WORD)

    return types.intp(name), generate


def _run(_context: Any, name: Any, task: Any) -> Any:
    """Calls a named function that takes a task.

    Numba's own function types would do, but their numbers differ from process to process, so
    compiled code would never be found again in Numba's cache.
    """

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.call(_named(builder, name), arguments[1:])

    return types.intp(name, task), generate


def _run_part(_context: Any, name: Any, task: Any, part: Any) -> Any:
    """Calls a named function that takes a task and the number of a part."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.call(_named(builder, name, WORD), arguments[1:])

    return types.intp(name, task, types.intp), generate


def _fetch_add(_context: Any, address: Any, value: Any) -> Any:
    """Adds atomically to the word at an address; returns the word's old value."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], WORD.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


def _room(_context: Any, count: Any) -> Any:
    """Reserves `count` words on the stack until the function returns.

    Arguments for XLA lie there: Numba frees an array after its last mention, which may be the one
    that takes its address.
    """

    def generate(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        return cgutils.alloca_once(builder, WORD, size=ir.Constant(WORD, count.literal_value))

    return types.CPointer(types.intp)(count), generate


words, address_in, pointer = intrinsic(_words), intrinsic(_address), intrinsic(_pointer)
call, fetch_add = intrinsic(_call), intrinsic(_fetch_add)
address_of = intrinsic(prefer_literal=True)(_address_of)
room = intrinsic(prefer_literal=True)(_room)
run, run_part = (intrinsic(prefer_literal=True)(emit) for emit in (_run, _run_part))
