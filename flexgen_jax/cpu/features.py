"""What this processor has that the kernels use."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

NUMBA_TARGETS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Set, they may have Numba compile for a processor without tiles."""

FOR_VECTORS = {"avx512f", "avx512_bf16", "avx512_vnni"}
"""Flags of processors with AVX-512's products of pairs of bfloat16 and of four integers."""

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # of x86-64's Linux


class Features(NamedTuple):
    """The processor's units for products, best first: "amx", "avx512". Where there is none, XLA
    multiplies by itself.

    bf16: for products of bfloat16; int8: for products of 8-bit integers.
    """

    bf16: tuple[str, ...]
    int8: tuple[str, ...]

    def __str__(self) -> str:
        parts = (f"{name}: {', '.join(units) or 'none'}" for name, units in self._asdict().items())
        return "; ".join(parts)


def features() -> Features:
    """What this processor has, and the operating system lets this process use."""
    return Features(tile_units(), tile_units("int8"))


def tile_unit(kind: str = "bf16") -> str | None:
    """The best of `tile_units`."""
    return next(iter(tile_units(kind)), None)


@lru_cache
def tile_units(kind: str = "bf16") -> tuple[str, ...]:
    """The processor's units for tiles of bfloat16, or of "int8": "amx", which Linux is asked to let
    this process use, and "avx512"."""
    if any(map(os.environ.get, NUMBA_TARGETS)):
        return ()
    flags = _processor_flags()
    has_amx = f"amx_{kind}" in flags and _may_use_amx()
    return ("amx",) * has_amx + ("avx512",) * (flags >= FOR_VECTORS)


def _processor_flags() -> set[str]:
    """As Linux names them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()


def _may_use_amx() -> bool:
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0)
    return False
