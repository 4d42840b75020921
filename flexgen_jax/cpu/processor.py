"""The processor's features that the compute kernels use."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

NUMBA_TARGETS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Environment variables that can make Numba compile for another processor, one without these
units."""

FOR_VECTORS = {"avx512f", "avx512_bf16", "avx512_vnni"}
"""Flags of processors whose AVX-512 has dot products of bfloat16 pairs and of four 8-bit
integers."""

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # numbers of x86-64 Linux


class Features(NamedTuple):
    """The processor's units for products, best first: "amx", "avx512". Without any, XLA multiplies.

    bf16: units for products of bfloat16; int8: units for products of 8-bit integers.
    """

    bf16: tuple[str, ...]
    int8: tuple[str, ...]

    def __str__(self) -> str:
        parts = (f"{name}: {', '.join(units) or 'none'}" for name, units in self._asdict().items())
        return "; ".join(parts)


def features() -> Features:
    """Returns the features that this processor has and the operating system lets this process
    use."""
    return Features(tile_units(), tile_units("int8"))


def tile_unit(kind: str = "bf16") -> str | None:
    """Returns the best unit of `tile_units`, or None."""
    return next(iter(tile_units(kind)), None)


@lru_cache
def tile_units(kind: str = "bf16") -> tuple[str, ...]:
    """Returns the processor's units for tiles of bfloat16 or, if `kind` is "int8", of 8-bit
    integers.

    They are "amx", if Linux lets this process use it (it is asked here), and "avx512", best first.
    """
    if any(map(os.environ.get, NUMBA_TARGETS)):
        return ()
    flags = _processor_flags()
    has_amx = f"amx_{kind}" in flags and _may_use_amx()
    return ("amx",) * has_amx + ("avx512",) * (flags >= FOR_VECTORS)


@lru_cache
def converts_half() -> bool:
    """Returns whether the processor has an instruction that widens float16 (F16C)."""
    return not any(map(os.environ.get, NUMBA_TARGETS)) and "f16c" in _processor_flags()


def _processor_flags() -> set[str]:
    """Returns the processor's features by the names that Linux gives them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()


def _may_use_amx() -> bool:
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0)
    return False
