"""Runs the requests of a batch among those of the server's clients."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import replace
from math import inf

from flexgen_jax.progress import logger
from flexgen_jax.requests.outputs import OnToken, RequestOutput, TokenLogprob
from flexgen_jax.requests.requests import Request
from flexgen_jax.server.engine import Engine, EngineError, Text

MIN_WAITING_TEXTS = 16
"""The minimum number of waiting texts up to which batches submit more, so that rows are filled."""

MIN_RETRY_S, MAX_RETRY_S = 5.0, 60.0
"""Seconds before requests are submitted again after a fault of the machine."""

MAX_FAILURES = 2
"""A request with which the engine fails so often gets an error: it may be the cause."""

POLL_S = 0.05
"""Seconds between two checks whether more requests may be submitted."""


class InterruptedRunError(Exception):
    """The server stops; a later one continues the batch."""


class SharedRunner:
    """A `jobs.options.Runner` that submits requests to the server's engine.

    `stream`, `unfinished` and `untaken` are called in the job's thread, everything else in the
    event loop. name: the batch, for messages. on_begin: called in the event loop
    before the first request.
    """

    def __init__(self, engine: Engine, name: str, on_begin: Callable[[], object]) -> None:
        self._engine, self._name, self._on_begin = engine, name, on_begin
        self._loop = asyncio.get_running_loop()
        # Submitted requests by the job's id, their texts, and their new tokens.
        self._requests: dict[str, Request] = {}
        self._texts: dict[str, Text] = {}
        self._tokens: dict[str, list[int]] = {}
        self._waiters: set[asyncio.Task[None]] = set()
        # From the event loop to the job's thread: a token, a result, or the engine's failure.
        self._events: queue.SimpleQueue[tuple[str, int | RequestOutput | Exception]]
        self._events = queue.SimpleQueue()
        self._has_result = threading.Event()
        self._ready: deque[RequestOutput] = deque()
        # Requests to submit before those of the source, not before a time; `inf`: never, as the
        # engine is broken.
        self._again: deque[Request] = deque()
        self._retry_at, self._retry_s = 0.0, MIN_RETRY_S
        # How often the engine failed with each request.
        self._num_failures: Counter[str] = Counter()
        self._is_stopped = self._is_cancelled = False

    def stop(self) -> None:
        """Interrupts the job, which writes its journal."""
        self._is_stopped = True
        self._has_result.set()

    def cancel(self) -> None:
        """Ends the stream with the results so far."""
        self._is_cancelled = True
        self._engine.cancel(list(self._texts.values()))

    # In the job's thread

    def stream(
        self, requests: Iterable[Request], on_token: OnToken | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yields results as they come. After a fault of the machine, requests are submitted again
        later. Raises `InterruptedRunError` after `stop`."""
        source = iter(requests)
        is_ended = False
        self._loop.call_soon_threadsafe(self._on_begin)
        try:
            while not (is_ended or self._is_cancelled) or self._requests or self._again:
                if not self._is_cancelled and time.monotonic() >= self._retry_at:
                    is_ended = self._submit(source)
                if self._is_cancelled:
                    self._again.clear()
                self._receive(on_token)
                while self._ready:
                    yield self._ready.popleft()
                if self._is_stopped:
                    raise InterruptedRunError
        finally:
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self.cancel)

    def unfinished(self) -> list[tuple[str, list[int], list[TokenLogprob]]]:
        """Returns the tokens of unfinished requests. Log-probabilities are not kept: a request that
        has some begins again."""
        requests = [*self._requests.values(), *self._again]
        return [(r.id, [*r.continued, *self._tokens.get(r.id, ())], []) for r in requests]

    def untaken(self) -> list[RequestOutput]:
        return list(self._ready)

    def _submit(self, source: Iterable[Request]) -> bool:
        """Submits requests while the engine has room; returns whether the source has ended."""
        requests = iter(source)
        while not self._is_ending:
            request = self._again.popleft() if self._again else next(requests, None)
            if request is None:
                return True
            is_accepted = asyncio.run_coroutine_threadsafe(self._begin(request), self._loop)
            if not is_accepted.result():
                self._again.appendleft(request)
                return False
        return False

    @property
    def _is_ending(self) -> bool:
        """Whether no more requests are to be submitted."""
        return self._is_stopped or self._is_cancelled or self._retry_at == inf

    def _receive(self, on_token: OnToken | None) -> None:
        """Receives tokens and results, after a short wait for a result."""
        self._has_result.wait(POLL_S)
        self._has_result.clear()
        while not self._events.empty():
            name, event = self._events.get()
            if isinstance(event, int):
                self._tokens[name].append(event)
                if on_token is not None:
                    on_token(name, event)
                continue
            request = self._requests.pop(name)
            if isinstance(event, Exception):
                self._fail(request, event)
            else:
                self._retry_s = MIN_RETRY_S
                self._finish(request, event)

    def _finish(self, request: Request, result: RequestOutput) -> None:
        self._tokens.pop(request.id, None)
        if result.finish_reason == "cancelled":
            return
        self._ready.append(replace(result, id=request.id, prompt=request.prompt))

    def _fail(self, request: Request, error: Exception) -> None:
        """Gives an impossible request an error; retries others later."""
        self._num_failures[request.id] += isinstance(error, EngineError) and error.status == 500
        is_its_fault = self._num_failures[request.id] >= MAX_FAILURES
        if isinstance(error, EngineError) and (error.status < 500 or is_its_fault):
            self._tokens.pop(request.id, None)
            prompt_ids = list(request.prompt_token_ids or ())
            self._ready.append(
                RequestOutput(
                    request.prompt, prompt_ids, "", [], "error", id=request.id, error=str(error)
                )
            )
            return
        self._again.append(request)
        if isinstance(error, EngineError) and self._engine.is_broken:
            self._retry_at = inf  # a next server continues
        elif time.monotonic() >= self._retry_at:
            logger().error(
                "flexgen-jax: %s: %s; retrying in %.0f s", self._name, error, self._retry_s
            )
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    # In the event loop

    async def _begin(self, request: Request) -> bool:
        """Submits a request; returns False where the engine has no room for it."""
        if self._is_ending or not self._has_room():
            return False
        # Not the job's id: a request of an earlier run may still be ending.
        renamed = replace(request, id=self._engine.next_id())
        [text] = self._engine.submit([renamed], is_batch=True)
        text.on_token = lambda token: self._events.put((request.id, token))
        self._requests[request.id], self._texts[request.id] = request, text
        self._tokens[request.id] = []
        waiter = asyncio.create_task(self._wait_for(request.id, text))
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)
        return True

    async def _wait_for(self, name: str, text: Text) -> None:
        try:
            event: RequestOutput | Exception = await text.result()
        except Exception as error:
            event = error
        del self._texts[name]
        self._events.put((name, event))
        self._has_result.set()

    def _has_room(self) -> bool:
        """Returns whether more requests may be submitted. No more of them wait than fill the next
        rows. While clients are active, the rows of one batch stay free for them."""
        engine, policy = self._engine, self._engine.llm.policy
        rows = MIN_WAITING_TEXTS if policy is None else policy.batch_size
        if engine.waiting >= max(MIN_WAITING_TEXTS, rows):
            return False
        if policy is None or policy.num_batches == 1 or not engine.has_clients:
            return True
        return engine.running + engine.waiting < rows * (policy.num_batches - 1)
