"""Answers in pieces: the events of texts, and responses of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.server.engine import Engine, EngineError, Text
from flexgen_jax.server.errors import RefusedError

T = TypeVar("T")

Event = tuple[str, dict[str, Any]]
"""A server-sent event's name and body."""

PING, PING_S = b": ping\n\n", 10.0
"""A comment of a stream, which clients skip, and the seconds without an event after which one is
sent, so that clients and proxies do not give up."""

EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that keep proxies from holding back a stream."""

LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


class Cancelling:
    """Cancels texts at its end; finished results are not affected."""

    def __init__(self, engine: Engine, texts: list[Text]) -> None:
        self._engine, self._texts = engine, texts

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._engine.cancel(self._texts)


async def events_of(texts: list[Text]) -> AsyncIterator[tuple[int, int | RequestOutput]]:
    """Yields the number of a completion and its events; raises `RefusedError` for one that
    cannot be made."""
    waits = {asyncio.create_task(text.events.get()): n for n, text in enumerate(texts)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number, event = waits.pop(task), task.result()
                if isinstance(event, EngineError):
                    raise RefusedError(event.status, str(event))
                if isinstance(event, RequestOutput) and event.error is not None:
                    raise RefusedError(400, event.error)
                yield number, event
                if isinstance(event, int):
                    waits[asyncio.create_task(texts[number].events.get())] = number
    finally:
        for task in waits:
            task.cancel()


async def results_of(texts: list[Text]) -> list[RequestOutput]:
    """Returns the results of all texts."""
    results: dict[int, RequestOutput] = {}
    async for number, event in events_of(texts):
        if isinstance(event, RequestOutput):
            results[number] = event
    return [result for _, result in sorted(results.items())]


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Awaits something, unless the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    made, leaving = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((made, leaving), return_when=asyncio.FIRST_COMPLETED)
        if made.done():
            return made.result()
        raise RefusedError(400, "the client disconnected")
    finally:
        for task in (made, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def event_response(
    engine: Engine,
    texts: list[Text],
    events: AsyncIterator[bytes],
    on_error: Callable[[RefusedError], Iterable[bytes]],
) -> StreamingResponse:
    """Returns a response of server-sent events, which cancels the texts if its client goes away.

    Its headers are sent at once, while the prompt waits. on_error: returns the last events after an
    error, which comes too late for a status of its own.
    """

    async def content() -> AsyncIterator[bytes]:
        with Cancelling(engine, texts):
            try:
                async for event in _with_pings(events):
                    yield PING if event is None else event
            except RefusedError as error:
                for event in on_error(error):
                    yield event

    return StreamingResponse(content(), headers=EVENT_HEADERS, media_type="text/event-stream")


async def _with_pings(chunks: AsyncIterator[T]) -> AsyncIterator[T | None]:
    """Yields chunks, and None after each `PING_S` without one."""
    pending = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=PING_S)
            if not done:
                yield None
                continue
            try:
                chunk = pending.result()
            except StopAsyncIteration:
                return
            yield chunk
            pending = asyncio.ensure_future(anext(chunks))
    finally:
        pending.cancel()


def event_bytes(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """Returns a server-sent event. name: its type, None for none. Some readers take U+0085, U+2028
    and U+2029 for line ends."""
    text = json.dumps(body, ensure_ascii=False).translate(LINE_ENDS)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()
