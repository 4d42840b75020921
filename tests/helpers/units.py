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

DECLARED = "FLEXGEN_TEST_UNITS"
"""The variable that names a runner's units, as in "amx,avx512". Without it a test is skipped where
its unit is missing; a unit that it names may not be."""

MISSING = "the processor has none of: "


def present() -> tuple[str, ...]:
    """The units that this process may use."""
    return tuple(unit for unit in UNITS if unit in {*features().bf16, *features().int8})


def declared() -> set[str]:
    names = {name.strip() for name in os.environ.get(DECLARED, "").split(",")} - {""}
    if unknown := names - {*UNITS}:
        raise pytest.UsageError(f"{DECLARED} names {sorted(unknown)}: there are {UNITS}")
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
    monkeypatch.setattr(matmul, "tile_unit", lambda _kind="bf16": unit)


def summary(reasons: Iterable[str]) -> list[str]:
    """A line for each unit that is missing, from the reasons of all skips."""
    missing = Counter(
        unit
        for reason in reasons
        if MISSING in reason
        for unit in reason.partition(MISSING)[2].split(", ")
    )
    return [f"unit {unit} is missing: {count} tests skipped" for unit, count in missing.items()]
