"""Limits of incoming requests: bytes and time of each, bytes of all together."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from flexgen_jax.progress import logger
from flexgen_jax.server.errors import RefusedError

T = TypeVar("T")

BODY_BYTES = 8 << 20
"""The most bytes of a request's body."""

BODIES_BYTES = 32 << 20
"""The most bytes of all bodies that are being read."""

SERIAL_PARSE_BYTES = 1 << 20
"""Bodies of more bytes are parsed one at a time: a parsed body takes many times its bytes."""

FILE_BYTES = 1 << 30
"""The most bytes of a form with a file."""

PATIENCE_S, SLOWEST = 60.0, 64 << 10
"""Deadline of a body: seconds, and one more second for every `SLOWEST` bytes."""

HEADERS_S = 10.0
"""Seconds within which the headers of a request must have come."""

MAX_HALF_HEADS = 256
"""The maximum number of connections whose headers are still to come; the oldest is closed."""


def limited(request: Request, most: int) -> Request:
    """Returns a request that refuses a body of more than `most` bytes, or one that comes too
    slowly, while it is being received."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(most)
    started, received = time.monotonic(), 0

    async def receive() -> MutableMapping[str, Any]:
        nonlocal received
        seconds_left = started + PATIENCE_S + received / SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(request.receive(), max(seconds_left, 0.0))
        except TimeoutError:
            raise RefusedError(
                408, "the body arrived too slowly", headers={"Connection": "close"}
            ) from None
        received += len(message.get("body", b""))
        if received > most:
            raise _too_large(most)
        return message

    return Request(request.scope, receive)


def _too_large(most: int) -> RefusedError:
    return RefusedError(
        413, f"the body has more than {most} bytes", headers={"Connection": "close"}
    )


def check_site(request: Request, allowed_origins: Sequence[str]) -> None:
    """Raises `RefusedError` for a request of another site's page, which a browser on this machine
    sends: one with a foreign Host or Origin, or with a body that needs no permission of CORS."""
    host = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        raise RefusedError(403, f"the host {host!r} is not this machine; or set --api-key")
    origin = request.headers.get("origin")
    is_allowed = origin is None or origin in allowed_origins or "*" in allowed_origins
    if not is_allowed and origin != f"{request.url.scheme}://{host}":
        raise RefusedError(
            403, f"the origin {origin!r} may not use this server: set --allow-origin {origin}"
        )
    if request.headers.get("content-type", "").lower().startswith("text/plain"):
        raise RefusedError(415, "send Content-Type: application/json")


def is_loopback(host: str) -> bool:
    """Returns whether a host's name or address is that of the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Bodies:
    """The bodies that are being read, bounded together."""

    def __init__(self) -> None:
        self._bytes = 0
        self._parsing = asyncio.Lock()

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """Parses a request's body in a thread. Raises `RefusedError` for a body that is too large
        or too slow, and while too many bodies are being read."""
        content, reserved = bytearray(), 0
        try:
            async for piece in limited(request, BODY_BYTES).stream():
                content.extend(piece)
                reserved += len(piece)
                self._bytes += len(piece)
                if self._bytes > BODIES_BYTES:
                    message = "too many large bodies come at once; try again later"
                    raise RefusedError(503, message, "overloaded", {"Retry-After": "5"})
            if len(content) <= SERIAL_PARSE_BYTES:
                return await asyncio.to_thread(parse, bytes(content))
            async with self._parsing:
                return await asyncio.to_thread(parse, bytes(content))
        except ClientDisconnect:
            raise RefusedError(400, "the client disconnected") from None
        finally:
            self._bytes -= reserved


class PatientProtocol(H11Protocol):
    """HTTP of a connection whose headers must come within `HEADERS_S`."""

    _deadline: asyncio.TimerHandle | None = None
    # When the class may log the next time that it closes connections.
    _silent_until = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        waiting = [
            (each._deadline.when(), each)
            for each in self.connections
            if isinstance(each, PatientProtocol) and each._deadline is not None
        ]
        self._deadline = self.loop.call_later(HEADERS_S, self._close_if_idle)
        if len(waiting) < MAX_HALF_HEADS:
            return
        if time.monotonic() > PatientProtocol._silent_until:
            PatientProtocol._silent_until = time.monotonic() + HEADERS_S
            logger().warning(
                "flexgen-jax: %d connections send no whole request; closing the oldest",
                len(waiting),
            )
        min(waiting, key=lambda each: each[0])[1]._close_if_idle()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is None and self._is_idle:
            self._deadline = self.loop.call_later(HEADERS_S, self._close_if_idle)
        elif self._deadline is not None and not self._is_idle:  # the headers have come
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        self._deadline = None
        if self._is_idle:
            self.transport.close()
