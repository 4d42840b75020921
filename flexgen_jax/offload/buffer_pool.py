"""Host buffers that one block of batches uses after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from flexgen_jax.models.storage import Leaf
from flexgen_jax.offload.tiers import HostBuffer, Memories
from flexgen_jax.policy.plan import Layout


class BufferPool:
    """Host buffers, made before a run and kept between its blocks.

    Making one while a block runs would hold the run up: new pinned memory is touched page by page,
    and waits for what the device computes.

    wanted: the number of buffers of each layout that `fill` makes; limit: bytes above which free
    buffers of other layouts are given up for a new one, or None.
    """

    def __init__(
        self, memories: Memories, wanted: Mapping[Layout, int], limit: int | None = None
    ) -> None:
        self._memories, self._wanted, self.limit = memories, wanted, limit
        self._free: defaultdict[tuple[Leaf, ...], list[HostBuffer]] = defaultdict(list)
        self._used: dict[int, HostBuffer] = {}
        self._bytes = 0

    def fill(self) -> None:
        """Makes the wanted buffers that are missing."""
        for layout, count in self._wanted.items():
            free = self._free[layout.leaves]
            while len(free) < count:
                free.append(self._made(layout))

    def take(self, layout: Layout) -> HostBuffer:
        """Returns a buffer of a layout; its contents are those of its last use."""
        free = self._free[layout.leaves]
        if not free:
            self._make_room(layout.nbytes)
        buffer = free.pop() if free else self._made(layout)
        self._used[id(buffer)] = buffer
        return buffer

    def drop(self, buffer: HostBuffer) -> None:
        """Frees a buffer that was taken."""
        self._bytes -= self._used.pop(id(buffer)).layout.nbytes

    def take_back(self) -> None:
        """Keeps all buffers that are still taken for the next block; nothing uses them any more."""
        for buffer in self._used.values():
            self._free[buffer.layout.leaves].append(buffer)
        self._used.clear()

    def drop_all(self) -> None:
        """Frees all buffers that are still taken, which something may still be using."""
        for buffer in list(self._used.values()):
            self.drop(buffer)

    def _made(self, layout: Layout) -> HostBuffer:
        self._bytes += layout.nbytes
        return self._memories.buffer(layout)

    def _make_room(self, nbytes: int) -> None:
        for free in self._free.values():
            while free and self.limit is not None and self._bytes + nbytes > self.limit:
                self._bytes -= free.pop().layout.nbytes
