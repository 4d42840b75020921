"""Files that are kept between runs, in the user's cache folder."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Returns the folder of this package with a name in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flexgen_jax" / name


def write_cached(path: Path, text: str) -> None:
    """Writes a file of the cache as a whole, or not at all where that is impossible."""
    part = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
