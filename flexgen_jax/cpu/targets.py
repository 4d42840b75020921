"""Registers generated code with XLA, through its foreign-function interface.

If code cannot be generated or called, XLA's own code is used: with equal results, but slower.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import jax

INTERFACE = (0, 3)
"""Major and minor version of `xla/ffi/api/c_api.h` whose layouts `jit.handler` reads."""

NEWEST = (0, 5)
"""The newest version that was found to keep these layouts; minor versions only add to them."""


class KernelWarning(RuntimeWarning):
    """The generated CPU kernels cannot be used, so XLA's, which are slower, are used instead."""


@lru_cache
def interface_version() -> tuple[int, int] | None:
    """Returns the version of XLA's foreign-function interface; None if its header is missing."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    matches = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(part[1]) if part else -1 for part in matches)
    return major, minor


def can_be_called() -> bool:
    """Returns whether XLA's interface matches the handlers."""
    version = interface_version()
    return version is None or INTERFACE <= version <= NEWEST  # without the header, XLA checks


def register(name: str, compile_handler: Callable[[], int]) -> str | None:
    """Registers the handler at the address that `compile_handler` returns with XLA under `name`.

    Returns the name, or None if that fails, with a `KernelWarning` that says why.
    """
    if not can_be_called():
        _warn(f"XLA's foreign-function interface {interface_version()} is newer than {NEWEST}")
        return None
    try:
        handler = ctypes.c_void_p(compile_handler())
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    except MemoryError:
        raise
    except Exception as error:  # any failure of LLVM or XLA
        _warn(f"{name}: {type(error).__name__}: {error}")
        return None
    return name


def _warn(reason: str) -> None:
    text = f"the CPU's own kernels cannot be used, so computing is slower: {reason}"
    warnings.warn(text, KernelWarning, stacklevel=3)
