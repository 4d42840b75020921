"""Copies of a model on several machines, which a job sees as one engine.

Requests go to the copies that have room for them, and results come back. When a copy is lost, its
requests go to others, with the tokens that it has told of; copies may join at any time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from flexgen_jax.engine.llm import LLM
from flexgen_jax.machine.jax_settings import set_up_jax
from flexgen_jax.requests.outputs import OnToken, RequestOutput, TokenLogprob
from flexgen_jax.requests.requests import Request

Unfinished = tuple[str, list[int], list[TokenLogprob]]
"""A request's id, its tokens so far, and those tokens' log-probabilities, if it asked for them."""

AT_FIRST = 32
"""Requests that a copy may have before it is known how many it runs together."""

TELL_S = 0.5
"""Seconds between two times that a copy tells how far its texts are."""

LOOK_S = 0.05
"""Seconds between polls of copies without news."""

MAX_FAILURES = 3
"""A request gets an error after losing this number of copies: it may be the cause."""


class LostError(RuntimeError):
    """A copy is lost, with everything that it has not reported."""


class News(NamedTuple):
    """What happened in a copy since the last news.

    results: finished requests; unfinished: the progress of unfinished requests; wants: how many
    requests it could take; error: why it cannot go on, if it cannot.
    """

    results: list[RequestOutput]
    unfinished: list[Unfinished]
    wants: int
    error: str | None = None


class Copy(Protocol):
    """A copy of the model somewhere. Each call returns at once, or raises `LostError`."""

    name: str

    def give(self, requests: Sequence[Request]) -> None:
        """Has the copy run requests."""

    def news(self) -> News | None:
        """Returns the reason, None if it is unknown."""

    def end(self) -> None:
        """The copy is not needed any more."""


class Crew(Protocol):
    """Where copies come from."""

    def copies(self) -> Sequence[Copy]:
        """Returns the copies that there are now; those of machines that join are new ones."""

    def lost(self, copy: Copy, why: str) -> None:
        """A copy was lost; another may take its place."""

    def close(self) -> None:
        """Ends all copies."""


class Replica:
    """A copy of a model in this process, which runs its requests until it is closed.

    options: as of `LLM`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        set_up_jax()
        self._llm = LLM(**options)
        self._asked: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._results: list[RequestOutput] = []
        self._unfinished: list[Unfinished] = []
        self._given = self._done = 0
        self._told_at = 0.0
        self._error: str | None = None
        threading.Thread(target=self._run, name="flexgen-replica", daemon=True).start()

    def give(self, requests: Sequence[Request]) -> None:
        """Takes in requests."""
        with self._changed:
            self._given += len(requests)
        for request in requests:
            self._asked.put(request)

    def news(self, wait_s: float) -> News:
        """Returns what happened since the last call; waits so long for something that did."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._error, wait_s)
            results, self._results = self._results, []
            unfinished, self._unfinished = self._unfinished, []
            policy = self._llm.policy
            max_requests = (
                AT_FIRST if policy is None else 2 * policy.batch_size * policy.num_batches
            )
            wants = max(0, max_requests - (self._given - self._done))
            return News(results, unfinished, wants, self._error)

    def end(self) -> None:
        """Ends the copy when its requests are finished."""
        self._asked.put(None)

    def _run(self) -> None:
        try:
            with self._llm:
                for result in self._llm.stream(iter(self._asked.get, None), self._on_token):
                    with self._changed:
                        self._results.append(result)
                        self._done += 1
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = str(error) or type(error).__name__
                self._changed.notify_all()

    def _on_token(self, _id: str, _token: int) -> None:
        now = time.monotonic()
        if now - self._told_at < TELL_S:
            return
        self._told_at = now
        unfinished = [(name, list(ids), list(logs)) for name, ids, logs in self._llm.unfinished()]
        with self._changed:
            self._unfinished = unfinished


@dataclass
class Given:
    """A request that some copy has.

    request: as it was given to that copy; tokens, logprobs: of the text so far, the latter of this
    job's run; earlier: those of `logprobs` that lost copies have made; failures: lost copies.
    """

    request: Request
    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    earlier: list[TokenLogprob] = field(default_factory=list)
    failures: int = 0

    def again(self) -> Given:
        """Returns the request to continue in another copy."""
        tokens = self.tokens
        if self.request.sampling_params.logprobs is not None:
            num_new = len(tokens) - len(self.request.continued)
            whole = min(num_new, len(self.logprobs) - len(self.earlier))
            tokens = tokens[: len(self.request.continued) + max(0, whole)]
        known_logprobs = self.logprobs[
            : len(self.earlier) + len(tokens) - len(self.request.continued)
        ]
        request = replace(self.request, continued=tuple(tokens))
        return Given(
            request, list(tokens), list(known_logprobs), list(known_logprobs), self.failures + 1
        )


class Fleet:
    """Copies of a model as one `jobs.options.Runner`."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._running: dict[str, Given] = {}
        self._at: dict[str, Copy] = {}
        self._again: deque[Given] = deque()
        self._ready: deque[RequestOutput] = deque()

    def unfinished(self) -> list[Unfinished]:
        """Returns how far the requests are that are not finished, as far as copies have told."""
        unfinished = [*self._running.values(), *self._again]
        return [(entry.request.id, entry.tokens, entry.logprobs) for entry in unfinished]

    def untaken(self) -> list[RequestOutput]:
        return list(self._ready)

    def stream(
        self, requests: Iterable[Request], on_token: OnToken | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Runs requests in all copies, and yields results as they come; see `LLM.stream`."""
        source = _Source(requests)
        try:
            while self._running or self._again or not source.is_ended:
                is_quiet = True
                for copy in self._crew.copies():
                    try:
                        news = copy.news()
                        if news is None:
                            continue
                        is_quiet = False
                        self._hear(news, on_token)
                        if news.error is not None:
                            raise LostError(news.error)
                        self._give(copy, news.wants, source)
                    except LostError as error:
                        self._lose(copy, str(error))
                while self._ready:
                    yield self._ready.popleft()
                if is_quiet:
                    time.sleep(LOOK_S)
        finally:
            self._crew.close()

    def _give(self, copy: Copy, wants: int, source: _Source) -> None:
        """Fills a copy with requests, starting with those of lost copies."""
        batch: list[Given] = []
        while len(batch) < wants:
            if self._again:
                batch.append(self._again.popleft())
                continue
            request = source.next()
            if request is None:
                break
            batch.append(Given(request, list(request.continued)))
        for entry in batch:
            self._running[entry.request.id], self._at[entry.request.id] = entry, copy
        if batch:
            copy.give([entry.request for entry in batch])

    def _hear(self, news: News, on_token: OnToken | None) -> None:
        for name, tokens, logprobs in news.unfinished:
            if name in self._running:
                self._advance(name, tokens, on_token)
                running = self._running[name]
                running.logprobs = [*running.earlier, *logprobs]
        for result in news.results:
            running = self._running.pop(result.id)
            del self._at[result.id]
            self._tell(result.id, result.token_ids[len(running.tokens) :], on_token)
            if result.logprobs is not None:
                result = replace(result, logprobs=[*running.earlier, *result.logprobs])
            self._ready.append(result)

    def _advance(self, name: str, tokens: list[int], on_token: OnToken | None) -> None:
        running = self._running[name]
        new_tokens = tokens[len(running.tokens) :]
        running.tokens = tokens if new_tokens else running.tokens
        self._tell(name, new_tokens, on_token)

    def _tell(self, name: str, tokens: Sequence[int], on_token: OnToken | None) -> None:
        if on_token is not None:
            for token in tokens:
                on_token(name, token)

    def _lose(self, copy: Copy, why: str) -> None:
        """Takes back the requests of a lost copy."""
        self._crew.lost(copy, why)
        for name in [name for name, holder in self._at.items() if holder is copy]:
            running = self._running.pop(name).again()
            del self._at[name]
            if running.failures < MAX_FAILURES:
                self._again.append(running)
                continue
            request = running.request
            ids = list(request.prompt_token_ids or ())
            why = f"{running.failures} processes ended while they ran it"
            self._ready.append(RequestOutput(request.prompt, ids, "", [], "error", name, why))


class _Source:
    """Requests that are read one by one."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: Iterator[Request] = iter(requests)
        self.is_ended = False

    def next(self) -> Request | None:
        """Returns the next request, None at the end."""
        if self.is_ended:
            return None
        request = next(self._requests, None)
        self.is_ended = request is None
        return request
