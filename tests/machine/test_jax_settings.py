"""Tests what is set before JAX starts: a folder of compiled programs that is the user's alone, and
how much of a GPU's memory and of pinned memory it may take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax.errors import UserError
from flexgen_jax.machine import jax_settings
from flexgen_jax.machine.jax_settings import (
    DEFAULT_GPU_SHARE,
    FRACTION,
    OLD_FRACTION,
    PINNED,
    PINNED_DEFAULT,
    PREALLOCATE,
    STAGING_BYTES,
    allow_pinned,
    keep_programs,
    may_find_gpu,
    pinned_bytes,
    set_up_jax,
)

FOLDER = "JAX_COMPILATION_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a user's cache folder with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flexgen_jax" / "programs"


def kept_in() -> str | None:
    environment: dict[str, str] = {}
    keep_programs(environment)
    return environment.get(FOLDER)


def test_the_folder_is_the_users_alone(cache: Path) -> None:
    folder = Path(str(kept_in()))
    assert folder.parent == cache
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    assert kept_in() is None
    folder.chmod(0o700)
    assert kept_in() == str(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_left_alone(cache: Path) -> None:
    os.chown(str(kept_in()), 1, 1)
    assert kept_in() is None


def test_there_may_be_no_folder(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    assert kept_in() is None


def test_the_users_own_settings_stay(cache: Path) -> None:
    environment = {FOLDER: "/somewhere"}
    keep_programs(environment)
    assert environment == {FOLDER: "/somewhere"}
    environment = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5"}
    keep_programs(environment)
    assert environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "5"
    assert not any(cache.glob("*/*"))  # nothing was compiled


@pytest.mark.slow
def test_the_next_process_compiles_nothing(cache: Path, tmp_path: Path) -> None:
    def programs() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in cache.glob("*/*-cache")}

    first = run(tmp_path)
    kept = programs()
    assert len(kept) >= 4  # embedding, prefill, decode, head
    assert run(tmp_path) == first
    assert programs() == kept
    for path, content in kept.items():
        path.write_bytes(content[: len(content) // 2])  # as after a crash while it was written
    assert run(tmp_path) == first


def run(folder: Path) -> Any:
    """Generates in a process of its own; returns its results."""
    file = folder / "result.json"
    command = [sys.executable, "-m", "flexgen_jax", "generate", "--max-tokens", "4"]
    command += ["--batch-size", "1"]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "1"}
    environment.pop(FOLDER, None)
    command += ["--offload-dir", str(folder / "offload"), "--json", str(file), "In the end"]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=300)
    content = json.loads(file.read_text())
    return [(result["text"], result["token_ids"]) for result in content["results"]]


def test_one_call_sets_up_what_the_commands_do(cache: Path) -> None:
    environment: dict[str, str] = {}
    set_up_jax(environment)
    assert FOLDER in environment
    assert environment[FRACTION] == DEFAULT_GPU_SHARE


def test_the_call_reaches_jax_even_if_that_is_imported(cache: Path, tmp_path: Path) -> None:
    code = "import jax, flexgen_jax; flexgen_jax.set_up_jax()\n"
    code += "print(jax.config.jax_compilation_cache_dir)"
    environment = {key: value for key, value in os.environ.items() if key != FOLDER}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert Path(said.stdout.strip()).parent == cache


@pytest.mark.parametrize("name", [FRACTION, OLD_FRACTION])
def test_a_share_of_the_card_that_the_user_has_set_stays(name: str, cache: Path) -> None:
    """Both variables together are an error."""
    environment = {name: "0.5"}
    set_up_jax(environment)
    assert environment[name] == "0.5"
    assert not {FRACTION, OLD_FRACTION} - {name} & set(environment)


@pytest.mark.parametrize("tier", [1 << 30, 100 << 30, 1 << 40])
def test_pinned_memory_is_enough_for_the_host_tier(tier: int) -> None:
    environment: dict[str, str] = {}
    allow_pinned(tier, environment, has_started=False)
    pool = int(environment[PINNED]) << 30
    assert tier * 9 / 8 + STAGING_BYTES <= pool < tier * 9 / 8 + STAGING_BYTES + (1 << 30)
    assert tier <= pinned_bytes(environment)


def test_a_limit_of_pinned_memory_that_cannot_be_changed_stays() -> None:
    environment = {PINNED: "10"}
    allow_pinned(1 << 40, environment, has_started=False)
    assert environment == {PINNED: "10"}
    environment = {}
    allow_pinned(1 << 40, environment, has_started=True)
    assert environment == {}
    assert pinned_bytes({}) == ((PINNED_DEFAULT << 30) - STAGING_BYTES) * 8 // 9
    environment = {PREALLOCATE: "true"}
    allow_pinned(1 << 40, environment, has_started=False)
    assert environment == {PREALLOCATE: "true"}
    assert pinned_bytes(environment) == 14 * (8 << 30) // 9


def test_the_library_allows_pinned_memory_before_jax_starts(cache: Path) -> None:
    """JAX reads the limit when it starts, and never again."""
    code = f"""
import os, jax
from flexgen_jax.machine import start
seen = []
start.is_cpu = lambda: seen.append(os.environ.get({PINNED!r})) or True
start.start_jax(8 << 30)
jax.devices()
start.start_jax(80 << 30)
print(seen)
"""
    environment = {key: value for key, value in os.environ.items() if key != PINNED}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "['11', '11']"


def test_a_gpu_is_looked_for_if_its_plugin_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        return name if name == "jax_cuda13_plugin" else None

    monkeypatch.setattr(jax_settings, "find_spec", find)
    monkeypatch.setattr(jax_settings, "GPU_DRIVERS", (__file__,))
    assert may_find_gpu({})
    assert not may_find_gpu({"JAX_PLATFORMS": "cpu"})
    monkeypatch.setattr(jax_settings, "GPU_DRIVERS", ("/no/driver",))
    assert not may_find_gpu({})
    monkeypatch.setattr(jax_settings, "GPU_DRIVERS", (__file__,))
    monkeypatch.setattr(jax_settings, "find_spec", lambda name: None)
    assert not may_find_gpu({})


@pytest.mark.parametrize("said", ["20.5", "", "many"])
def test_a_limit_that_is_no_number_is_named(said: str) -> None:
    with pytest.raises(UserError, match=PINNED):
        pinned_bytes({PINNED: said})
