"""The processor's features that the compute kernels use."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

NUMBA_TARGETS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Environment variables that can make Numba compile for another processor, with fewer
features."""

FOR_PAIRS = {"avx512f", "avx512bw", "avx512_bf16"}
"""Flags of processors whose AVX-512 has dot products of bfloat16 pairs, and tables of words."""

FOR_INTEGERS = {"avx512f", "avx512_vnni"}
"""Flags of processors whose AVX-512 has dot products of four 8-bit integers."""

FOR_FLOATS = {"avx2", "fma"}
"""Flags of processors that multiply and add vectors of fp32 in one instruction."""

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # numbers of x86-64 Linux


def core_count() -> int:
    """Returns the number of cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return count or 1


class Features(NamedTuple):
    """The processor's units for products, best first; see `tile_units`. Without any, as on ARM, XLA
    multiplies.

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

    They are "amx", if Linux lets this process use it (it is asked here), "avx512", for bfloat16
    "fma", which multiplies it as fp32, and for integers "avx2", which multiplies them by the codes
    of packed weights only; best first.
    """
    flags = _flags()
    has_amx = f"amx_{kind}" in flags and _may_use_amx()
    units = ("amx",) * has_amx
    if kind == "int8":
        return units + ("avx512",) * (flags >= FOR_INTEGERS) + ("avx2",) * ("avx2" in flags)
    return units + ("avx512",) * (flags >= FOR_PAIRS) + ("fma",) * (flags >= FOR_FLOATS)


@lru_cache
def multiplies_pairs() -> bool:
    """Returns whether AVX-512 has dot products of bfloat16 pairs."""
    return _flags() >= FOR_PAIRS


@lru_cache
def multiplies_bytes() -> bool:
    """Returns whether vectors of 256 bits have dot products of four 8-bit integers."""
    return _flags() >= {"avx512_vnni", "avx512vl"}


@lru_cache
def has_wide_vectors() -> bool:
    """Returns whether a vector has 512 bits, and there are 32 of them; else 256, and 16."""
    return "avx512f" in _flags()


@lru_cache
def converts_half() -> bool:
    """Returns whether the processor has an instruction that widens float16 (F16C)."""
    return "f16c" in _flags()


def _flags() -> set[str]:
    """Returns the features that Numba compiles for, by the names that Linux gives them: the
    processor's, or those of them that `NUMBA_CPU_FEATURES` names."""
    flags = _processor_flags()
    if not any(map(os.environ.get, NUMBA_TARGETS)):
        return flags
    named = os.environ.get("NUMBA_CPU_FEATURES", "").split(",")
    kept = {name[1:].replace("-", "") for name in named if name.startswith("+")}
    return {flag for flag in flags if flag.replace("_", "") in kept}


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
