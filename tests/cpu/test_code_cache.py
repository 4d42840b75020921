"""Compiled code on disk: processes that compile at once do not take each other's."""

from __future__ import annotations

import subprocess
import sys
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


@numba.njit(inline="always")
def a_step(number):  # type: ignore[no-untyped-def]
    return number // 2 if number % 2 == 0 else 3 * number + 1


@numba.njit(inline="always")
def four_steps(number):  # type: ignore[no-untyped-def]
    return a_step(a_step(a_step(a_step(number))))


@numba.njit(inline="always")
def many_steps(number):  # type: ignore[no-untyped-def]
    return four_steps(four_steps(four_steps(four_steps(four_steps(four_steps(number))))))


def adding(number: int, variant: str) -> Any:
    """Returns a function that adds what its helper returns, which is made anew, and is too large to
    become a part of it."""

    @called
    def helper(start):  # type: ignore[no-untyped-def]
        return number * many_steps(start)

    def function(start):  # type: ignore[no-untyped-def]
        return number + added(start)

    return compiled(bound(function, variant, {"added": helper}))


def test_helpers_that_are_made_anew_are_not_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are in every process: Numba numbers them."""
    monkeypatch.setattr(vars(numba)["config"], "CACHE_DIR", str(tmp_path))
    assert adding(4, "a")(1) == 8  # 24 steps lead from 1 to 4, 2, 1, 4, ... and to 1
    again, other = adding(4, "a"), adding(4, "b")
    assert again(1) == other(1) == 8
    assert again.stats.cache_hits and not other.stats.cache_hits


IN_ANOTHER_PROCESS = """
import sys
from tests.cpu.test_code_cache import adding
print(*[adding(int(number), number)(1) for number in sys.argv[1:]])
"""


@pytest.mark.slow
def test_cached_code_is_not_called_in_place_of_what_is_compiled_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba's numbers begin anew in each process, so that the helpers of both have the same one.
    Names also have options, in an order that depends on Python's seed."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def run(*numbers: str) -> str:
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, *numbers]
        return subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip()

    assert run("4") == "8"
    assert run("1") == "2"
    assert run("1", "4", "2") == "2 8 4"


def test_a_function_that_closes_over_a_helper_is_refused() -> None:
    helper = returning(1)

    def function():  # type: ignore[no-untyped-def]
        return helper()

    with pytest.raises(AssertionError, match="another number next time"):
        compiled(function)
