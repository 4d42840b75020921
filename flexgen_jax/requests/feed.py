"""Where requests come from: a list, or an iterator that is read by a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R", covariant=True)


class Source(Protocol[R]):
    """Requests that arrive over time."""

    @property
    def is_ended(self) -> bool:
        """Whether no more will come, but for those that `take` still returns."""

    def take(self, max_count: int) -> Sequence[R]:
        """Returns those that have come and were not taken; does not wait. If more will come,
        returns at most `max_count`."""

    def wait(self) -> bool:
        """Waits until one has come; returns false if none will come any more."""


class Listed(Generic[T]):
    """Requests that are all there from the beginning."""

    is_ended = True

    def __init__(self, requests: Sequence[T]) -> None:
        self._left = requests

    def take(self, max_count: int) -> Sequence[T]:
        requests, self._left = self._left, ()
        return requests

    def wait(self) -> bool:
        return bool(self._left)


class Feed(Generic[S, T]):
    """Reads an iterator in a thread, so that a slow one holds up nothing.

    prepare: the thread's conversion of each request and its number; limit: how many requests may be
    read before they are taken. An exception of the iterator is stored in `error` and ends the feed.
    """

    def __init__(self, requests: Iterable[S], prepare: Callable[[S, int], T], limit: int) -> None:
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._limit, self._prepare = limit, prepare
        self._is_closed = self._is_ended = False
        self.error: BaseException | None = None
        arguments = (iter(requests),)
        threading.Thread(target=self._read, args=arguments, name="requests", daemon=True).start()

    @property
    def is_ended(self) -> bool:
        with self._changed:
            return self._is_ended

    def allow(self, limit: int) -> None:
        """Changes how many requests may be read before they are taken."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def take(self, max_count: int) -> Sequence[T]:
        with self._changed:
            count = len(self._ready) if self._is_ended else min(max_count, len(self._ready))
            requests = [self._ready.popleft() for _ in range(count)]
            self._changed.notify_all()
            return requests

    def wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_ended)
            return bool(self._ready)

    def close(self) -> None:
        """Reads no more; a running `next()` finishes on its own."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _read(self, requests: Iterator[S]) -> None:
        number = 0
        try:
            while self._may_read():
                try:
                    request = next(requests)
                except StopIteration:
                    break
                prepared = self._prepare(request, number)
                number += 1
                with self._changed:
                    self._ready.append(prepared)
                    self._changed.notify_all()
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self._is_ended = True
                self._changed.notify_all()

    def _may_read(self) -> bool:
        """Waits until another request may be read; returns false if the feed was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._limit)
            return not self._is_closed


class Incoming(Generic[T]):
    """The requests of a source, and those that are to be run again."""

    def __init__(self, source: Source[T]) -> None:
        self._source = source
        self._back: list[T] = []

    @property
    def is_ended(self) -> bool:
        """Whether no more will come, but for those that `take` still returns."""
        return self._source.is_ended

    def put_back(self, requests: Iterable[T]) -> None:
        """Gives back requests that were taken."""
        self._back += requests

    def begin_again(self, requests: Iterable[T]) -> None:
        """Gives back all requests that were taken and are not finished."""
        self._back = list(requests)

    def take(self, max_count: int) -> Sequence[T]:
        """Returns those that are to be run again, and others as `Source.take` does."""
        back, self._back = self._back, []
        return [*back, *self._source.take(max_count)]

    def wait(self) -> bool:
        """Waits until one has come; returns false if none will come any more."""
        return bool(self._back) or self._source.wait()
