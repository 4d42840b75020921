"""The page that shows what runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response


async def page(_request: Request) -> Response:
    """Returns the page; all that it shows comes from `/status`."""
    return HTMLResponse(resources.files("flexgen_jax.server").joinpath("page.html").read_text())


def job_row(name: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job's row on the page. progress: of `Job.progress`."""
    return {
        "name": name,
        "done": progress["finished"],
        "failed": progress["errors"],
        "total": progress["requests"],
        "eta_s": progress["eta_s"],
    }
