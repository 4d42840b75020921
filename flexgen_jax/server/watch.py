"""A page with a running job's progress."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flexgen_jax.errors import UserError
from flexgen_jax.progress import logger
from flexgen_jax.server.engine import WINDOW_S
from flexgen_jax.server.page import job_row, page

HOST = "127.0.0.1"


class Watch:
    """The routes of the page.

    job: its name; progress: what `Job.progress` returns; policy: the placement in words, None while
    unknown.
    """

    def __init__(
        self,
        model: str,
        job: str,
        progress: Callable[[], Mapping[str, Any]],
        policy: Callable[[], str | None],
    ) -> None:
        self._model, self._job, self._progress, self._policy = model, job, progress, policy
        # Times of looks in the last minute, and the tokens that there were.
        self._looks: deque[tuple[float, int]] = deque()

    def app(self) -> Starlette:
        """Returns the application."""
        return Starlette(routes=[Route("/", page), Route("/status", self.status)])

    async def status(self, _request: Request) -> Response:
        """What the page shows."""
        now = self._progress()
        return JSONResponse(
            {
                "model": self._model,
                "running": None,
                "waiting": now["requests"] - now["finished"],
                "tokens_per_s": round(self._rate(now["tokens"], now["token_s"]), 2),
                "texts": now["finished"],
                "new_tokens": now["tokens"],
                "policy": self._policy(),
                "jobs": [job_row(self._job, now)],
                "talks": False,
            }
        )

    def _rate(self, tokens: int, mean: float) -> float:
        """Returns new tokens a second since the first look of the last minute; mean: since the
        job's start, for the first look."""
        now = time.monotonic()
        while self._looks and self._looks[0][0] < now - WINDOW_S:
            self._looks.popleft()
        self._looks.append((now, tokens))
        began, before = self._looks[0]
        return mean if now - began < 1 else (tokens - before) / (now - began)


@contextmanager
def watched(app: Starlette, port: int) -> Iterator[int]:
    """Serves an application on loopback from a thread, until the end; yields the port, any free one
    for 0. Raises `UserError` if it is taken."""
    config = uvicorn.Config(
        app, host=HOST, port=port, log_level="error", log_config=None, lifespan="off"
    )
    server = uvicorn.Server(config)
    try:
        socket = config.bind_socket()
    except SystemExit:
        raise UserError(f"--watch {port}: the port cannot be used; choose another") from None
    thread = threading.Thread(target=server.run, args=([socket],), name="watch", daemon=True)
    thread.start()
    bound_port = int(socket.getsockname()[1])
    logger().info("flexgen-jax: watch the job at http://%s:%s", HOST, bound_port)
    try:
        yield bound_port
    finally:
        server.should_exit = True
        thread.join()
        socket.close()
