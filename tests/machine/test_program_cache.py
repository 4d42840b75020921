"""Compiled programs that were damaged on disk are compiled again, never run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.machine.program_cache import CheckedCache

PROGRAM = """
from flexgen_jax.machine.jax_settings import set_up_jax
set_up_jax()
from flexgen_jax.machine.start import start_jax
start_jax()
import jax, jax.monitoring
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
print(jax.jit(lambda x: jax.numpy.sin(x) @ x.T)(jax.numpy.ones((4, 4))).sum())
print("hits", events.count("/jax/compilation_cache/cache_hits"))
"""


def cache_in(folder: Path) -> CheckedCache:
    return CheckedCache(str(folder), max_size=1 << 20)


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_entry_is_removed(
    tmp_path_factory: object, place: int, bit: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("programs")  # type: ignore[attr-defined]
    cache, value = cache_in(folder), os.urandom(100)
    cache.put("key", value)
    assert cache.get("key") == value
    path = folder / "key-cache"
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content[: place % len(content)] if cut else content)
    assert cache.get("key") is None
    cache.put("key", value)
    assert cache.get("key") == value


def test_entries_of_other_keys_and_of_jax_itself_are_not_taken(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.put("one", b"program")
    cache.put("two", b"another")
    (tmp_path / "one-cache").replace(tmp_path / "two-cache")
    assert cache.get("two") is None
    (tmp_path / "three-cache").write_bytes(b"program")
    assert cache.get("three") is None


def test_the_programs_used_last_are_kept(tmp_path: Path) -> None:
    """Also those of an earlier process."""
    for _ in range(2):
        cache = CheckedCache(str(tmp_path), max_size=10_000)
        for number in range(40):
            cache.put(f"{number}", bytes(1000))
            assert cache.get("0") is not None
            assert sum(path.stat().st_size for path in tmp_path.glob("*-cache")) <= 10_000
        assert cache.get("39") is not None and cache.get("20") is None


def test_a_cache_of_any_size_evicts_nothing(tmp_path: Path) -> None:
    cache = CheckedCache(str(tmp_path), max_size=-1)
    for number in range(3):
        cache.put(f"{number}", bytes(1000))
    assert all(cache.get(f"{number}") == bytes(1000) for number in range(3))


def test_a_process_compiles_damaged_programs_again(tmp_path: Path) -> None:
    others = {key: value for key, value in os.environ.items() if "COMPILATION_CACHE" not in key}
    environment = {**others, "XDG_CACHE_HOME": str(tmp_path)}

    def run() -> tuple[str, int]:
        command = [sys.executable, "-c", PROGRAM]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        value, hits = out.stdout.splitlines()
        return value, int(hits.split()[1])

    value, hits = run()
    assert hits == 0
    entries = list(tmp_path.rglob("*-cache"))
    assert entries and run() == (value, len(entries))
    for path in entries:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)
    assert run() == (value, 0)
    assert run() == (value, len(entries))
