"""Compiled code on disk: processes that compile at once do not take each other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching as untyped_caching

from flexgen_jax.cpu.jit.code_cache import bound, called, compiled

caching: Any = untyped_caching
pytestmark = pytest.mark.filterwarnings("ignore::numba.NumbaWarning")


def returning(number: int) -> Any:
    def function():  # type: ignore[no-untyped-def]
        return number

    return compiled(function)


def test_variants_that_are_kept_at_once_are_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process keeps its variant, and sees none before it, while this one keeps its own."""
    monkeypatch.setattr(vars(numba)["config"], "CACHE_DIR", str(tmp_path))
    files = caching.IndexDataCacheFile
    keep, look = files._save_data, files._load_index

    def keep_after_another(self: Any, name: str, data: Any) -> None:
        monkeypatch.setattr(files, "_save_data", keep)
        monkeypatch.setattr(files, "_load_index", lambda _: {})
        assert returning(2)() == 2
        monkeypatch.setattr(files, "_load_index", look)
        keep(self, name, data)

    monkeypatch.setattr(files, "_save_data", keep_after_another)
    assert returning(1)() == 1
    found = [returning(number) for number in (1, 2)]
    assert [function() for function in found] == [1, 2]
    assert all(function.stats.cache_hits for function in found)


added: Any = None  # what `adding` calls


def adding(number: int, variant: str) -> Any:
    """Returns a function that adds what its helper returns, which is made anew."""

    @called
    def helper():  # type: ignore[no-untyped-def]
        return 10 * number

    def function():  # type: ignore[no-untyped-def]
        return number + added()

    return compiled(bound(function, variant, {"added": helper}))


def test_helpers_that_are_made_anew_are_not_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are in every process: Numba numbers them."""
    monkeypatch.setattr(vars(numba)["config"], "CACHE_DIR", str(tmp_path))
    assert adding(1, "a")() == 11
    again, other = adding(1, "a"), adding(1, "b")
    assert again() == other() == 11
    assert again.stats.cache_hits and not other.stats.cache_hits


def test_a_function_that_closes_over_a_helper_is_refused() -> None:
    helper = returning(1)

    def function():  # type: ignore[no-untyped-def]
        return helper()

    with pytest.raises(AssertionError, match="another number next time"):
        compiled(function)
