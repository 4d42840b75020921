"""Files that clients send and fetch, in a folder that outlives the server."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flexgen_jax.jobs.store import Disk
from flexgen_jax.progress import logger
from flexgen_jax.server.errors import RefusedError

FILE_ID = re.compile(r"file-[0-9a-f]{24}")


def read_record(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object of a file or batch; None if there is none, or if it is damaged."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger().error("flexgen-jax: %s cannot be read: %s", path, error)
        return None
    return record if isinstance(record, dict) else None


class Files:
    """The files of a folder: each file has a JSON description, and its content in a second file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "files"
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(
        self, name: str, purpose: str, content: bytes | Iterable[bytes], file_id: str | None = None
    ) -> dict[str, Any]:
        """Stores a file; returns its description.

        content: the file, whole or in pieces. file_id: None for a new one.
        """
        file_id = file_id or f"file-{secrets.token_hex(12)}"
        pieces = [content] if isinstance(content, bytes) else content
        Disk().write_whole(self.content(file_id), pieces)
        description = {
            "id": file_id,
            "object": "file",
            "bytes": self.content(file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        Disk().write_whole(self._description(file_id), [json.dumps(description).encode()])
        return description

    def get(self, file_id: str) -> dict[str, Any]:
        """Returns a file's description; raises `RefusedError` for an unknown id."""
        record = read_record(self._description(file_id)) if FILE_ID.fullmatch(file_id) else None
        if record is not None:
            return record
        raise RefusedError(404, f"file {file_id!r} does not exist")

    def all(self) -> list[dict[str, Any]]:
        """Returns the descriptions of all files."""
        records = map(read_record, self._folder.glob("file-*.json"))
        return [record for record in records if record is not None]

    def remove(self, file_id: str) -> None:
        self.get(file_id)
        self._description(file_id).unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def content(self, file_id: str) -> Path:
        """Returns the path of a file's content."""
        return self._folder / f"{file_id}.data"

    def _description(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"
