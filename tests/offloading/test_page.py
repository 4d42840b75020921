"""The first example of docs/library.md runs as it is written there, but for its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_first_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, code, *_ = PAGE.read_text().split("```")
    code = code.removeprefix("python\n").replace("2048", "256").replace("range(48)", "range(6)")
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    wanted = jnp.ones((16, 256))
    for number in range(6):
        key = jax.random.key(number)
        wanted = jax.nn.relu(wanted @ (jax.random.normal(key, (256, 256)) / 50))
    np.testing.assert_array_equal(names["x"], wanted)
