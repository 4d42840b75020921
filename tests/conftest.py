from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import write_checkpoint

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
"""Tests leave the user's cache alone. One of their own saves no time: they share programs."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's tiny checkpoint, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(variant: str = "base") -> Path:
        folder = root / variant
        return folder if folder.exists() else write_checkpoint(folder, variant)

    return get
