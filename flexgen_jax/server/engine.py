"""One engine for all clients: a thread walks their requests through the model."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from flexgen_jax.engine.llm import LLM
from flexgen_jax.errors import MachineError, UserError
from flexgen_jax.progress import logger
from flexgen_jax.requests.outputs import RequestOutput, TokenLogprob
from flexgen_jax.requests.requests import Request

WINDOW_S = 60.0
"""Window in seconds for tokens per second, and for rows reserved after a client's request."""

FAULT = "the server's disk, memory or weights failed, as its log says; try again later"
"""The message to clients for a `MachineError`, whose own message has paths of the server."""

FAILURES = 3
"""Number of consecutive engine failures before the server reports a fault."""


class OverloadedError(Exception):
    """The maximum number of requests is waiting."""


class EngineError(Exception):
    """The engine failed while it ran a request, or could not; the message says how. status: of
    HTTP."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Text:
    """A requested completion.

    events: its tokens as they come, and then its result, or what the engine failed with; is_batch:
    whether nobody waits for it at once; on_token: called with each token in the event loop;
    logprobs: of the tokens in `events`, if it asked for them.
    """

    request: Request
    is_batch: bool = False
    on_token: Callable[[int], object] | None = None
    logprobs: deque[TokenLogprob] = field(default_factory=deque)
    events: asyncio.Queue[int | RequestOutput | EngineError] = field(default_factory=asyncio.Queue)
    has_begun: bool = False

    async def result(self) -> RequestOutput:
        """Returns its result; raises what the engine failed with."""
        while isinstance(event := await self.events.get(), int):
            pass
        if isinstance(event, EngineError):
            raise event
        return event


@dataclass
class Counts:
    """The server's counts since its start."""

    texts: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    refused: int = 0
    failed: int = 0


class Engine:
    """Runs the texts of all clients, in waves, in a thread of its own.

    most: how many texts of clients that wait may be under way or wait; more are refused. lengths:
    of prompts and new tokens that the first plan has room for. fault: the machine's fault that
    failed the latest completions. on_broken: called in the engine's thread when it gives up.
    """

    def __init__(self, llm: LLM, most: int, lengths: tuple[int, int]) -> None:
        self.llm, self.counts = llm, Counts()
        self._most, self._lengths = most, lengths
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._texts: dict[str, Text] = {}
        self._numbers = itertools.count()
        self._recent: deque[tuple[float, int]] = deque()
        self._failures = 0
        self.fault: str | None = None
        self.on_broken: Callable[[], object] = lambda: None
        self._client_came = float("-inf")
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to run texts; called in the event loop that asks for them."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Cancels running requests and ends the thread; does nothing the second time."""
        with self._lock:
            self._is_stopping = True
            self._asked.put(None)
            for name in list(self._texts):
                self.llm.cancel(name)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_broken(self) -> bool:
        return self._failures >= FAILURES

    @property
    def has_clients(self) -> bool:
        """Whether a client asked for a text in the last minute, besides batches."""
        return time.monotonic() - self._client_came < WINDOW_S

    @property
    def running(self) -> int:
        """Texts that have a token and are not finished."""
        return sum(text.has_begun for text in self._texts.values())

    @property
    def waiting(self) -> int:
        """Texts without a token."""
        return len(self._texts) - self.running

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, over the last minute."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        return sum(count for _, count in self._recent) / WINDOW_S

    def next_id(self) -> str:
        return str(next(self._numbers))

    def submit(self, requests: list[Request], is_batch: bool = False) -> list[Text]:
        """Takes up some texts; raises `OverloadedError` if too many are under way, but for those of
        batches, which ask for few at a time."""
        num_clients = sum(not text.is_batch for text in self._texts.values())
        if not is_batch and num_clients and num_clients + len(requests) > self._most:
            self.counts.refused += len(requests)
            raise OverloadedError
        texts = [Text(request, is_batch) for request in requests]
        if self.is_broken:
            for text in texts:
                text.events.put_nowait(EngineError(FAULT, status=503))
            return texts
        if not is_batch:
            self._client_came = time.monotonic()
        with self._lock:
            for text in texts:
                self._texts[text.request.id] = text
                self._asked.put(text.request)
        return texts

    def cancel(self, texts: list[Text]) -> None:
        """Ends texts that nobody waits for any more."""
        for text in texts:
            if text.request.id in self._texts:
                self.llm.cancel(text.request.id)

    # In the engine's thread

    def _run(self) -> None:
        while not self._is_stopping and not self.is_broken:
            try:
                self._stream(self._requests(self._asked))
            except MachineError as error:
                self._fail(self._begin_anew(), error)
            except UserError as error:  # such as a request that no plan has room for
                self._one_by_one(self._begin_anew(), error)
            except Exception as error:
                self._failures += 1
                logger().error("flexgen-jax: the engine failed: %s", error, exc_info=True)
                for text in self._begin_anew():
                    self._tell(text.request.id, EngineError(f"{type(error).__name__}: {error}"))
        if self.is_broken:
            logger().error("flexgen-jax: the engine failed %d times in a row; ending", FAILURES)
            self.on_broken()

    def _fail(self, texts: list[Text], error: MachineError) -> None:
        """Ends texts by a fault of the machine, which later ones may not meet."""
        self.fault = FAULT
        logger().error("flexgen-jax: %s", error)
        for text in texts:
            self._tell(text.request.id, EngineError(FAULT, status=503))

    def _stream(self, requests: Iterator[Request]) -> None:
        for result in self.llm.stream(requests, self._add, self._lengths):
            self._failures, self.fault = 0, None
            self._tell(result.id, result)

    @staticmethod
    def _requests(asked: queue.SimpleQueue[Request | None]) -> Iterator[Request]:
        while (request := asked.get()) is not None:
            yield request

    def _begin_anew(self) -> list[Text]:
        """Returns the texts that are not finished, which no stream has any more. The reader thread
        of the last run reads until it gets the end mark."""
        with self._lock:
            self._asked.put(None)
            self._asked = queue.SimpleQueue()
            if self._is_stopping:
                self._asked.put(None)
            return list(self._texts.values())

    def _one_by_one(self, texts: list[Text], error: UserError) -> None:
        """Runs each completion separately, so that a failure affects no other completion."""
        for number, text in enumerate(texts):
            if text.has_begun:
                self._tell(text.request.id, EngineError(str(error)))
                continue
            try:
                self._stream(iter([text.request]))
            except MachineError as fault:
                self._fail(texts[number:], fault)
                return
            except UserError as own:
                self._tell(text.request.id, EngineError(str(own), status=400))

    def _add(self, name: str, token: int) -> None:
        text = self._texts.get(name)
        if text is not None and text.request.sampling_params.logprobs is not None:
            logprob = self.llm.latest_logprob
            assert logprob is not None, "it asked for them"
            text.logprobs.append(logprob)
        self._tell(name, token)

    def _tell(self, name: str, event: int | RequestOutput | EngineError) -> None:
        """Hands an event to the loop, where all else of a text happens."""
        assert self._loop is not None, "the engine was started"
        with suppress(RuntimeError):  # the loop has ended, and with it who asked
            self._loop.call_soon_threadsafe(self._take, name, event)

    # In the event loop

    def _take(self, name: str, event: int | RequestOutput | EngineError) -> None:
        text = self._texts.get(name)
        if text is None:
            return
        if isinstance(event, int):
            text.has_begun = True
            self._count()
            if text.on_token is not None:
                text.on_token(event)
        else:
            del self._texts[name]
            self.counts.texts += 1
            self.counts.failed += isinstance(event, EngineError)
            if isinstance(event, RequestOutput):
                self.counts.prompt_tokens += len(event.prompt_token_ids)
        text.events.put_nowait(event)

    def _count(self) -> None:
        """Counts a token, by the second."""
        self.counts.new_tokens += 1
        now = time.monotonic()
        if self._recent and self._recent[-1][0] > now - 1:
            began, count = self._recent[-1]
            self._recent[-1] = (began, count + 1)
        else:
            self._recent.append((now, 1))
            if self._recent[0][0] < now - WINDOW_S:
                self._recent.popleft()
