"""Compiled code on disk: processes that compile at once do not take each other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching as untyped_caching

from flexgen_jax.cpu.jit.code_cache import compiled

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
