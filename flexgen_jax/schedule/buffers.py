"""Host buffers, used again and again."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from flexgen_jax.policy.parts import Layout
from flexgen_jax.policy.policy import Tier
from flexgen_jax.schedule.backend import Backend
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.passes import Buffer


class Ring:
    """Host buffers by layout.

    A buffer is free again once the step that read it last is finished. If none is, a new one is
    made rather than waiting: so the number of buffers depends on the steps alone, not on time.

    finished: number of steps that are finished; the loop counts them. most: the most bytes that
    there were.
    """

    def __init__(self, backend: Backend, ledger: Ledger) -> None:
        self._backend, self._ledger = backend, ledger
        self._free: defaultdict[Layout, deque[tuple[int, Buffer]]] = defaultdict(deque)
        self._bytes = 0
        self.finished = self.most = 0

    def acquire(self, layouts: Iterable[Layout]) -> list[Buffer]:
        """Returns a buffer of each layout."""
        buffers, finished, all_free = list[Buffer](), self.finished, self._free
        for layout in layouts:
            free = all_free[layout]
            if free and free[0][0] <= finished:
                buffers.append(free.popleft()[1])
            else:
                buffers.append(self._made(layout))
        return buffers

    def has_room(self, layouts: Sequence[Layout]) -> bool:
        """Returns whether buffers of these layouts fit the plan; where
        batches differ in shape, each has layouts of its own."""
        room = self._ledger.room("host")
        if room is None or not layouts:
            return True
        wanted, spare = Counter(layouts), 0
        for layout, free in self._free.items():
            count = sum(after <= self.finished for after, _ in free)
            spare += layout.nbytes * max(0, count - wanted[layout])
            wanted[layout] -= count
        made = sum(layout.nbytes * max(0, count) for layout, count in wanted.items())
        return made == 0 or made - spare <= room

    def _made(self, layout: Layout) -> Buffer:
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
        self._let_go(buffer.layout.nbytes)

    def trim(self, kept: Layout | None, count: int) -> None:
        """Gives up all buffers that are free, but for `count` of one layout."""
        for layout, free in self._free.items():
            self._shorten(free, count if layout is kept else 0)

    def relieved(self, peaks: Mapping[Tier, int] | None) -> AbstractContextManager[None]:
        """Returns a context that frees unused buffers before the host exceeds its planned bytes;
        peaks: those bytes by tier, None if nothing was planned."""
        if peaks is None:
            return nullcontext()
        return self._ledger.relieved("host", peaks["host"], self._relieve)

    def _relieve(self, nbytes: int) -> None:
        """Frees `nbytes` bytes of unused buffers, if available."""
        remaining = self._bytes - nbytes
        for free in self._free.values():
            self._shorten(free, 0, remaining)

    def _shorten(self, free: deque[tuple[int, Buffer]], count: int, least: int = 0) -> None:
        """Frees unused buffers until `count` remain, or until all have at least `least` bytes."""
        while len(free) > count and self._bytes > least and free[0][0] <= self.finished:
            self._let_go(free.popleft()[1].layout.nbytes)

    def _let_go(self, nbytes: int) -> None:
        self._ledger.release("host", nbytes)
        self._bytes -= nbytes

    def close(self) -> None:
        """Releases the memory of all buffers; nothing reads or writes them any more."""
        self._free.clear()
        self._let_go(self._bytes)
