"""Files in the user's cache folder, which later runs read."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder(name: str) -> Path:
    """Returns the folder of this package with a name in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flexgen_jax" / name


def checksum(*content: Any) -> int:
    """Returns the CRC-32 of some JSON values."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def write_cached(path: Path, content: Any) -> None:
    """Writes JSON with a checksum as a whole, or not at all where that is impossible."""
    part = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"content": content, "crc32": checksum(content)}))
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()


def read_cached(path: Path) -> Any:
    """Returns the JSON that `write_cached` has written; None if it is missing or damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return raw["content"] if raw["crc32"] == checksum(raw["content"]) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
