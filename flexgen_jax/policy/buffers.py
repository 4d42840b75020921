"""Host buffers, used again and again."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flexgen_jax.policy.backend import Backend, Handle
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.plan import Layout


class Buffer(NamedTuple):
    """A host buffer, and its backend's handle."""

    layout: Layout
    handle: Handle


class Ring:
    """Host buffers by layout.

    A buffer is free again once the step that read it last is finished. If none is, a new one is
    made rather than waiting: so the number of buffers depends on the steps alone, not on time.

    limit: bytes above which free buffers of other layouts are given up for a new one; where prompts
    differ in length, each has layouts of its own. finished: number of steps that are finished; the
    loop counts them. most: the most bytes that there were.
    """

    def __init__(self, backend: Backend, ledger: Ledger, limit: int | None) -> None:
        self._backend, self._ledger, self._limit = backend, ledger, limit
        self._free: defaultdict[Layout, deque[tuple[int, Buffer]]] = defaultdict(deque)
        self._bytes = 0
        self.finished = self.most = 0

    def acquire(self, layouts: Iterable[Layout]) -> list[Buffer]:
        """Returns a buffer of each layout."""
        found, finished, all_free = [], self.finished, self._free
        for layout in layouts:
            free = all_free[layout]
            if free and free[0][0] <= finished:
                found.append(free.popleft()[1])
            else:
                found.append(self._made(layout))
        return found

    def _made(self, layout: Layout) -> Buffer:
        if self._limit is not None:
            self._make_room(self._limit - layout.nbytes)
        self._ledger.reserve("host", layout.nbytes)
        self._bytes += layout.nbytes
        self.most = max(self.most, self._bytes)
        return Buffer(layout, self._backend.allocate(layout))

    def release(self, buffers: Sequence[Buffer], after: int) -> None:
        """Releases buffers that step number `after` was the last to read."""
        free = self._free
        for buffer in buffers:
            free[buffer.layout].append((after, buffer))

    def discard(self, buffer: Buffer) -> None:
        """Gives up a buffer that nothing reads any more."""
        self._give_up(buffer)

    def trim(self, kept: Layout | None, count: int) -> None:
        """Gives up all buffers that are free, but for `count` of one layout."""
        for layout, free in self._free.items():
            self._shorten(free, count if layout is kept else 0)

    def _make_room(self, limit: int) -> None:
        for free in self._free.values():
            self._shorten(free, 0, limit)

    def _shorten(self, free: deque[tuple[int, Buffer]], count: int, limit: int = 0) -> None:
        """Gives up free buffers until `count` of them are left, or all have `limit` bytes."""
        while len(free) > count and self._bytes > limit and free[0][0] <= self.finished:
            self._give_up(free.popleft()[1])

    def _give_up(self, buffer: Buffer) -> None:
        self._let_go(buffer.layout.nbytes)
        self._backend.free(buffer.handle)

    def _let_go(self, nbytes: int) -> None:
        self._ledger.release("host", nbytes)
        self._bytes -= nbytes

    def close(self) -> None:
        """Releases the memory of all buffers; nothing reads or writes them any more."""
        self._free.clear()
        self._let_go(self._bytes)
