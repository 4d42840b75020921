"""Tests that compiled programs are kept for later processes, in a folder that is the user's
alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax.machine.caches import keep_programs

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
