"""The processor: its features, and the units that the compute kernels use."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from llvmlite import binding

WITHOUT = "FLEXGEN_CPU_WITHOUT"
"""Environment variable: features of the processor to leave unused, by LLVM's names, as in
"avx512bf16,amx-tile". Features that need one of them are unused as well."""

EMULATED = "FLEXGEN_CPU_EMULATED"
"""Environment variable: features to compute by their formulas where the processor lacks them. For
tests: the kernels of another processor run, slowly."""

FOR_PAIRS = frozenset({"avx512f", "avx512bw", "avx512bf16"})
"""Features of a processor whose AVX-512 has dot products of bfloat16 pairs, and tables of words."""

FOR_INTEGERS = frozenset({"avx512f", "avx512vnni"})
"""Features of a processor whose AVX-512 has dot products of four 8-bit integers."""

FOR_FLOATS = frozenset({"avx2", "fma"})
"""Features of a processor that multiplies and adds vectors of fp32 in one instruction."""

FAMILIES = {"avx512f": "avx512", "amx-tile": "amx"}
"""Features that others need: all whose names begin so."""

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # numbers of x86-64 Linux

Kind = Literal["bf16", "int8"]


class Features(NamedTuple):
    """The processor's units for products, best first; see `Processor.units`. Without any, XLA
    multiplies."""

    bf16: tuple[str, ...]
    """Units for products of bfloat16."""
    int8: tuple[str, ...]
    """Units for products of 8-bit integers."""

    def __str__(self) -> str:
        parts = (f"{name}: {', '.join(units) or 'none'}" for name, units in self._asdict().items())
        return "; ".join(parts)


@dataclass(frozen=True)
class Processor:
    """A processor for which kernels are compiled."""

    name: str
    """LLVM's name of the processor, such as "znver3"."""
    features: frozenset[str]
    """Features that the kernels use, by LLVM's names."""
    native: frozenset[str]
    """Features with instructions. Others are computed by their formulas."""
    options: str = ""
    """Features for LLVM's code generator, as in "+avx2,-avx512f"."""
    triple: str = ""
    """LLVM's name of architecture, vendor and system; empty for this machine's."""

    def units(self, kind: Kind = "bf16") -> tuple[str, ...]:
        """Returns the units for tiles of bfloat16 or of 8-bit integers, best first.

        They are "amx"; "avx512"; for bfloat16 "fma", which multiplies it as fp32; and for integers
        "avx2", which multiplies them by the codes of packed weights only.
        """
        units = ("amx",) * self.has_all({"amx-tile", f"amx-{kind}"})
        if kind == "int8":
            units += ("avx512",) * self.has_all(FOR_INTEGERS)
            return units + ("avx2",) * self.has_all({"avx2"})
        has_floats = self.has_all(FOR_FLOATS) or "neon" in self.features
        return units + ("avx512",) * self.multiplies_pairs + ("fma",) * has_floats

    def has_all(self, names: set[str] | frozenset[str]) -> bool:
        return names <= self.features

    @property
    def multiplies_pairs(self) -> bool:
        """Whether AVX-512 has dot products of bfloat16 pairs."""
        return self.has_all(FOR_PAIRS)

    @property
    def multiplies_bytes(self) -> bool:
        """Whether vectors of 256 bits have dot products of four 8-bit integers."""
        return self.has_all({"avx512vnni", "avx512vl"})

    @property
    def has_wide_vectors(self) -> bool:
        """Whether a vector has 512 bits, and there are 32 of them; else 256, and 16."""
        return "avx512f" in self.features

    @property
    def converts_half(self) -> bool:
        """Whether an instruction widens float16 (F16C)."""
        return bool({"f16c", "neon"} & self.features)


@lru_cache
def host() -> Processor:
    """Returns this processor, with the features that the operating system lets this process use."""
    known = {name for name, has in _host_features().items() if has}
    unused = {name for name in os.environ.get(WITHOUT, "").split(",") if name}
    if "amx-tile" in known and not _may_use_amx():
        unused.add("amx-tile")
    for name in [*unused]:
        family = FAMILIES.get(name)
        unused |= {other for other in known if family and other.startswith(family)}
    native = frozenset(known - unused)
    emulated = {name for name in os.environ.get(EMULATED, "").split(",") if name}
    options = ",".join(f"{'+' if name in native else '-'}{name}" for name in sorted(known))
    return Processor(binding.get_host_cpu_name(), native | emulated, native, options)


def features() -> Features:
    """Returns the units of this processor."""
    return Features(host().units(), host().units("int8"))


def tile_unit(kind: Kind = "bf16") -> str | None:
    """Returns the best of this processor's units, or None."""
    return next(iter(host().units(kind)), None)


def core_count() -> int:
    """Returns the number of cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return count or 1


def _host_features() -> dict[str, bool]:
    with suppress(RuntimeError):  # LLVM does not know this system
        return dict(binding.get_host_cpu_features())
    return {}


def _may_use_amx() -> bool:
    """Asks Linux for the permission to use AMX's registers."""
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0)
    return False
