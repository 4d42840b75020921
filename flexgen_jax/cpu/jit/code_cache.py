"""Compiled code on disk, in Numba's cache, so that it is compiled once for all processes.

Numba numbers the files of what is compiled from one function of the source, such as the variants
for several sizes and formats, and several processes at once may give one number to two of them.
Here every variant, of every version of the source, has file names of its own.
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

from flexgen_jax.cpu.jit.llvm import FLAGS

registry: Any = untyped_registry
serialize: Any = untyped_serialize

MATH = set(FLAGS)


def source_of(*files: str | None) -> int:
    """Returns a checksum of the files' contents, never 0.

    Compiled functions refer to one of all the code that they are made from, so that a change in any
    of these files is noticed: what a function closes over is part of the cache's key.
    """
    return zlib.crc32(b"".join(Path(str(file)).read_bytes() for file in files)) | 1


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


called: Callable[[Callable[..., Any]], Any] = njit(nogil=True, fastmath=MATH)
"""Compiles a large function that others call, such as the loops of a product.

Small ones are inlined by Numba, `njit(inline="always")`, for which it copies all that a function
has inlined itself: with large ones, compiling would take several times as long.
"""


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles a function whose callers hold no lock of the interpreter."""
    jitted: Callable[..., None] = cached(partial(njit, nogil=True), function)
    return jitted


def _variant(function: Callable[..., Any]) -> str:
    """Returns a checksum of all that tells a function from others made from the same source: what
    it closes over, and the processor."""
    closed: Any = function.__closure__ or ()
    for cell in closed:
        assert not isinstance(cell.cell_contents, Dispatcher), "it has another number next time"
    processor = registry.cpu_target.target_context.codegen().magic_tuple()
    known = serialize.dumps((tuple(cell.cell_contents for cell in closed), processor))
    return hashlib.sha256(known).hexdigest()[:16]
