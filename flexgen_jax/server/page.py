"""The page that shows what runs."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response


async def page(_request: Request) -> Response:
    """Returns the page; all that it shows comes from `/status`."""
    return HTMLResponse(resources.files("flexgen_jax.server").joinpath("page.html").read_text())
