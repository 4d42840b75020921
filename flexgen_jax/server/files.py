"""Files that clients send and fetch, in a folder that outlives the server."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from flexgen_jax.progress import logger
from flexgen_jax.server.errors import RefusedError

FILE_ID = re.compile(r"file-[0-9a-f]{24}")


def write_whole(path: Path, content: bytes | IO[bytes]) -> None:
    """Writes a file that appears whole or not at all. content: its bytes, or a file of them."""
    partial = path.with_suffix(f".{secrets.token_hex(4)}.part")
    try:
        with open(partial, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                shutil.copyfileobj(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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

    def add(self, name: str, purpose: str, content: bytes | IO[bytes]) -> dict[str, Any]:
        """Keeps a file; returns what is said of it."""
        file_id = self.new_id()
        write_whole(self.content(file_id), content)
        return self.name(file_id, name, purpose)

    def new_id(self) -> str:
        return f"file-{secrets.token_hex(12)}"

    def name(self, file_id: str, name: str, purpose: str) -> dict[str, Any]:
        """Registers a file with existing content; returns what is said of it."""
        description = {
            "id": file_id,
            "object": "file",
            "bytes": self.content(file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        write_whole(self._said(file_id), json.dumps(description).encode())
        return description

    def get(self, file_id: str) -> dict[str, Any]:
        """Returns a file's description; raises `RefusedError` if there is none of this id."""
        record = read_record(self._said(file_id)) if FILE_ID.fullmatch(file_id) else None
        if record is not None:
            return record
        raise RefusedError(404, f"file {file_id!r} does not exist")

    def all(self) -> Iterator[dict[str, Any]]:
        """Yields the descriptions of all files, newest first."""
        records = map(read_record, self._folder.glob("file-*.json"))
        descriptions = [record for record in records if record is not None]
        yield from sorted(descriptions, key=lambda file: -file["created_at"])

    def remove(self, file_id: str) -> None:
        self.get(file_id)
        self._said(file_id).unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def content(self, file_id: str) -> Path:
        """Returns where a file's content is."""
        return self._folder / f"{file_id}.data"

    def _said(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"
