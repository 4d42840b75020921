"""The routes of files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from flexgen_jax.jobs.source import PIECE_BYTES
from flexgen_jax.server.batches import Batches
from flexgen_jax.server.bodies import object_of
from flexgen_jax.server.engine import Engine
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.files import Files
from flexgen_jax.server.incoming import FILE_BYTES, Bodies, limited

Handler = Callable[[Request], Awaitable[Response]]


class Kept:
    """Objects stored in a folder: files, and batches of their lines."""

    def __init__(self, folder: Path, engine: Engine, bodies: Bodies) -> None:
        self._bodies = bodies
        self.files = Files(folder)
        llm = engine.llm
        model_id = f"{llm.files_fingerprint}-{llm.chat_fingerprint}"
        self.batches = Batches(folder, engine, self.files, model_id)

    @property
    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/v1/files", self.add_file),
            ("GET", "/v1/files", self.list_files),
            ("GET", "/v1/files/{id}", self.get_file),
            ("GET", "/v1/files/{id}/content", self.get_content),
            ("DELETE", "/v1/files/{id}", self.remove_file),
            ("POST", "/v1/batches", self.add_batch),
            ("GET", "/v1/batches", self.list_batches),
            ("GET", "/v1/batches/{id}", self.get_batch),
            ("POST", "/v1/batches/{id}/cancel", self.cancel_batch),
        ]

    async def add_file(self, request: Request) -> Response:
        async with limited(request, FILE_BYTES).form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or purpose != "batch":
                raise RefusedError(400, 'send a form with "file" and "purpose", which is "batch"')
            name = file.filename or "file.jsonl"
            pieces = iter(partial(file.file.read, PIECE_BYTES), b"")
            return JSONResponse(await asyncio.to_thread(self.files.add, name, "batch", pieces))

    async def list_files(self, request: Request) -> Response:
        data = await asyncio.to_thread(self.files.all)
        purpose = request.query_params.get("purpose")
        chosen = [file for file in data if purpose in (None, file["purpose"])]
        return JSONResponse(_page(chosen, request, max_limit=10_000, default=10_000))

    async def get_file(self, request: Request) -> Response:
        return JSONResponse(self.files.get(request.path_params["id"]))

    async def get_content(self, request: Request) -> Response:
        description = self.files.get(request.path_params["id"])
        return FileResponse(
            self.files.content(description["id"]), media_type="application/octet-stream"
        )

    async def remove_file(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        self.files.remove(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def add_batch(self, request: Request) -> Response:
        body = await self._bodies.read(request, object_of)
        return JSONResponse(self.batches.add(body))

    async def list_batches(self, request: Request) -> Response:
        return JSONResponse(_page(self.batches.all(), request, max_limit=100, default=20))

    async def get_batch(self, request: Request) -> Response:
        return JSONResponse(self.batches.get(request.path_params["id"]))

    async def cancel_batch(self, request: Request) -> Response:
        return JSONResponse(self.batches.cancel(request.path_params["id"]))


def _page(
    entries: list[dict[str, Any]], request: Request, max_limit: int, default: int
) -> dict[str, Any]:
    """Returns a page of a list, as the query asks for it: `limit`, `after` an id, and `order` by
    creation, the latest first by default."""
    query = request.query_params
    limit, after = query.get("limit", str(default)), query.get("after")
    order = query.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit) <= max_limit:
        raise RefusedError(400, f'"limit" must be an integer from 1 to {max_limit}, not {limit!r}')
    if order not in ("asc", "desc"):
        raise RefusedError(400, f'"order" must be "asc" or "desc", not {order!r}')
    ordered = sorted(
        entries, key=lambda entry: (entry["created_at"], entry["id"]), reverse=order == "desc"
    )
    ids = [entry["id"] for entry in ordered]
    if after is not None and after not in ids:
        raise RefusedError(404, f'"after" names {after!r}, which does not exist')
    first = 0 if after is None else ids.index(after) + 1
    page = ordered[first : first + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + len(page) < len(ordered),
    }
