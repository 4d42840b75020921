"""Units of the processor that tests need, and those that a runner is known to have."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

import jax
import pytest

from flexgen_jax.cpu import features, matmul

UNITS = ("amx", "avx512", "fma")
FOR_INTEGERS = ("amx", "avx512")
"""Units for products of bfloat16, and those of them that multiply 8-bit integers, too."""

FOR_CODES = "avx2"
"""The unit that multiplies 8-bit integers by the codes of packed weights only."""

ALL = (*UNITS, FOR_CODES)

DECLARED = "FLEXGEN_TEST_UNITS"
"""The variable that names a runner's units, as in "amx,avx512". Without it a test is skipped where
its unit is missing; a unit that it names may not be."""

MISSING = "the processor has none of: "


def present() -> tuple[str, ...]:
    """The units that this process may use."""
    return tuple(unit for unit in ALL if unit in {*features().bf16, *features().int8})


def declared() -> set[str]:
    names = {name.strip() for name in os.environ.get(DECLARED, "").split(",")} - {""}
    if unknown := names - {*ALL}:
        raise pytest.UsageError(f"{DECLARED} names {sorted(unknown)}: there are {ALL}")
    return names


def need(*units: str) -> None:
    """Skips a test where the processor has none of these units, or fails it where it should have
    one."""
    if jax.default_backend() != "cpu":
        pytest.skip("for the CPU as the device")
    if {*units} & {*present()}:
        return
    if promised := {*units} & declared():
        pytest.fail(f"{DECLARED} names {', '.join(sorted(promised))}: {MISSING}{', '.join(units)}")
    pytest.skip(MISSING + ", ".join(units))


def use_unit(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has products in tiles made by this unit."""
    need(unit)
    floats = "fma" if unit == FOR_CODES else unit
    monkeypatch.setattr(matmul, "tile_unit", lambda kind="bf16": unit if kind == "int8" else floats)


def summary(reasons: Iterable[str]) -> list[str]:
    """A line for each unit that is missing, from the reasons of all skips."""
    missing = Counter(
        unit
        for reason in reasons
        if MISSING in reason
        for unit in reason.partition(MISSING)[2].split(", ")
    )
    return [f"unit {unit} is missing: {count} tests skipped" for unit, count in missing.items()]
