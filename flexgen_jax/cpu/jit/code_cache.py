"""Compiled code on disk, in Numba's cache, so that it is compiled once for all processes.

Numba numbers the files of what is compiled from one function of the source, such as the variants
for several sizes and formats, and several processes at once may give one number to two of them.
Here every variant, of every version of the source, has file names of its own.

Numba also names what it compiles, by which one function finds another: by the name in the source,
and a number that begins anew in every process. Code from the cache may have the same number as a
variant that is compiled now, and would then be called in its place. Here names differ, too.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import njit
from numba.core import registry as untyped_registry
from numba.core import serialize as untyped_serialize
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

from flexgen_jax.cpu.jit.llvm import FLAGS

registry: Any = untyped_registry
serialize: Any = untyped_serialize

MATH = set(FLAGS)


def source_of(*files: str | None) -> int:
    """Returns a checksum of the files' contents and of this one's, never 0.

    Compiled functions refer to one of all the code that they are made from, so that a change in any
    of these files is noticed: what a function closes over is part of the cache's key.
    """
    contents = (Path(str(file)).read_bytes() for file in (__file__, *files))
    return zlib.crc32(b"".join(contents)) | 1


def cached(make: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Compiles a function, made for this call, with one of Numba's decorators and keeps the result
    on disk where possible."""
    function.__qualname__ += f".{_variant(function)}"
    try:
        return make(cache=True, fastmath=MATH)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return make(fastmath=MATH)(function)


def bound(function: Callable[..., Any], variant: str, helpers: Mapping[str, Any]) -> Any:
    """Returns a function whose globals of these names are helpers: other functions for Numba.

    Numba's cache compares what a function closes over, and numbers such helpers anew in every
    process, so that nothing would be found again. It does not compare globals: `variant` tells the
    helpers apart, and becomes part of the name by which code is kept.
    """
    own = FunctionType(
        function.__code__,
        {**function.__globals__, **helpers},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__qualname__ = f"{function.__qualname__}.{variant}"
    return own


def called(function: Callable[..., Any]) -> Any:
    """Compiles a large function that others call, such as the loops of a product.

    Small ones are inlined by Numba, `njit(inline="always")`, for which it copies all that a
    function has inlined itself: with large ones, compiling would take several times as long.
    """
    known = hashlib.sha256(repr(_described(function)).encode()).hexdigest()
    function.__qualname__ += f".{known[:16]}"
    return njit(nogil=True, fastmath=MATH)(function)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles a function whose callers hold no lock of the interpreter."""
    jitted: Callable[..., None] = cached(partial(njit, nogil=True), function)
    return jitted


def _described(value: Any) -> Any:
    """Returns what tells a value from others that a function may close over: of functions, and of
    intrinsics, their names and what they close over themselves."""
    if isinstance(value, Dispatcher):
        return _described(value.py_func)
    if isinstance(value, _Intrinsic):
        return _described(value._defn)
    if isinstance(value, partial):
        return _described(value.func), [_described(own) for own in value.args]
    if not isinstance(value, FunctionType):
        return repr(value)
    closed = [_described(cell.cell_contents) for cell in value.__closure__ or ()]
    return value.__module__, value.__qualname__, closed


def _variant(function: Callable[..., Any]) -> str:
    """Returns a checksum of all that tells a function from others made from the same source: what
    it closes over, and the processor."""
    closed: Any = function.__closure__ or ()
    for cell in closed:
        assert not isinstance(cell.cell_contents, Dispatcher), "it has another number next time"
    processor = registry.cpu_target.target_context.codegen().magic_tuple()
    known = serialize.dumps((tuple(cell.cell_contents for cell in closed), processor))
    return hashlib.sha256(known).hexdigest()[:16]
