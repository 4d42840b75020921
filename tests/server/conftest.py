"""The model that the servers of these tests have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.models import TEMPLATE


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    for file in checkpoint().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
