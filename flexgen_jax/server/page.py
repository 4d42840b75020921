"""The page that shows what runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of the page: it loads nothing from elsewhere, and no other site may frame it."""


async def page(_request: Request) -> Response:
    """Returns the page; all that it shows comes from `/status`."""
    text = resources.files("flexgen_jax.server").joinpath("page.html").read_text()
    return HTMLResponse(text, headers=HEADERS)


def job_row(name: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job's row on the page. progress: of `Job.progress`."""
    return {
        "name": name,
        "done": progress["finished"],
        "failed": progress["errors"],
        "total": progress["requests"],
        "eta_s": progress["eta_s"],
    }
