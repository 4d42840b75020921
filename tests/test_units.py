"""Skips for lack of a unit of the processor."""

from __future__ import annotations

import pytest

from tests.helpers import units


@pytest.fixture(autouse=True)
def only_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that says nothing of its units, on the CPU."""
    monkeypatch.setattr(units, "present", lambda: ("avx512",))
    monkeypatch.setattr(units.jax, "default_backend", lambda: "cpu")
    monkeypatch.delenv(units.DECLARED, raising=False)


def test_a_missing_unit_is_a_skip_that_the_summary_counts() -> None:
    units.need("avx512")
    units.need("amx", "avx512")
    with pytest.raises(pytest.skip.Exception) as caught:
        units.need("amx")
    reasons = [f"Skipped: {caught.value}"] * 3 + ["Skipped: something else"]
    assert units.summary(reasons) == ["unit amx is missing: 3 tests skipped"]


def test_a_missing_unit_that_is_declared_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(units.DECLARED, "avx512")
    with pytest.raises(pytest.skip.Exception):
        units.need("amx")
    monkeypatch.setenv(units.DECLARED, " avx512, amx")
    units.need("avx512")
    with pytest.raises(pytest.fail.Exception, match="names amx"):
        units.need("amx")


def test_a_misspelt_unit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(units.DECLARED, "avx521")
    with pytest.raises(pytest.UsageError, match="avx521"):
        units.declared()
