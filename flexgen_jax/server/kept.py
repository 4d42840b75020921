"""The routes of files and batches, and bodies of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response

from flexgen_jax.server.batches import Batches
from flexgen_jax.server.engine import Engine
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.files import Files

BODY_BYTES = 32 << 20
"""The most bytes of a request's body."""

FILE_BYTES = 1 << 30
"""The most bytes of a file that a client sends."""

BODY_S = 60.0
"""Seconds within which a body must have come."""

Handler = Callable[[Request], Awaitable[Response]]


async def body_of(request: Request) -> bytes:
    """Returns a request's body; raises `RefusedError` for one that is too large or too slow."""
    content = bytearray()

    async def read() -> None:
        async for part in request.stream():
            content.extend(part)
            if len(content) > BODY_BYTES:
                raise RefusedError(413, f"the body has more than {BODY_BYTES} bytes")

    try:
        await asyncio.wait_for(read(), BODY_S)
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise RefusedError(400, "the client went away") from None
    return bytes(content)


class Kept:
    """What is kept in a folder: files, and batches of their lines."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.files = Files(folder)
        self.batches = Batches(folder, engine, self.files)

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
        if int(request.headers.get("content-length") or 0) > FILE_BYTES:
            raise RefusedError(413, f"a file has at most {FILE_BYTES} bytes")
        async with request.form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or purpose != "batch":
                raise RefusedError(400, 'send a form with "file" and "purpose", which is "batch"')
            content = await file.read(FILE_BYTES + 1)
            if len(content) > FILE_BYTES:
                raise RefusedError(413, f"a file has at most {FILE_BYTES} bytes")
            name = file.filename or "file.jsonl"
            return JSONResponse(await asyncio.to_thread(self.files.add, name, "batch", content))

    async def list_files(self, _request: Request) -> Response:
        data = await asyncio.to_thread(lambda: list(self.files.all()))
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    async def get_file(self, request: Request) -> Response:
        return JSONResponse(self.files.get(request.path_params["id"]))

    async def get_content(self, request: Request) -> Response:
        said = self.files.get(request.path_params["id"])
        return FileResponse(self.files.content(said["id"]), media_type="application/octet-stream")

    async def remove_file(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        self.files.remove(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def add_batch(self, request: Request) -> Response:
        try:
            body: Any = json.loads(await body_of(request))
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise RefusedError(400, "the body must be a JSON object")
        return JSONResponse(self.batches.add(body))

    async def list_batches(self, _request: Request) -> Response:
        data = self.batches.all()
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    async def get_batch(self, request: Request) -> Response:
        return JSONResponse(self.batches.get(request.path_params["id"]))

    async def cancel_batch(self, request: Request) -> Response:
        return JSONResponse(self.batches.cancel(request.path_params["id"]))
