"""Host buffers that one block of batches takes over from the one before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from flexgen_jax.models.storage import Leaf
from flexgen_jax.offload.tiers import HostBuffer, Memories
from flexgen_jax.policy.plan import Layout


class BufferPool:
    """The host buffers of the blocks of a session.

    Only those that every block makes first, before it runs, are kept between blocks: others would
    be there before the plan counts them.

    limit: bytes of a block's buffers that its ring may have; None for no limit.
    """

    def __init__(self, memories: Memories, limit: int | None = None) -> None:
        self.limit = limit
        self._memories = memories
        self._kept: defaultdict[tuple[Leaf, ...], list[HostBuffer]] = defaultdict(list)
        self._taken: dict[int, HostBuffer] = {}

    def take(self, layout: Layout) -> HostBuffer:
        """Returns a buffer of a layout; its contents are those of its last use."""
        kept = self._kept[layout.leaves]
        buffer = kept.pop() if kept else self._memories.buffer(layout)
        self._taken[id(buffer)] = buffer
        return buffer

    def drop(self, buffer: HostBuffer) -> None:
        """Frees a buffer that was taken."""
        del self._taken[id(buffer)]

    def keep_only(self, first: Iterable[Layout]) -> None:
        """Frees what was kept, but for what the next block will make first."""
        wanted = Counter(layout.leaves for layout in first)
        for leaves in list(self._kept):
            del self._kept[leaves][wanted[leaves] :]

    def take_back(self, first: Iterable[Layout]) -> None:
        """Ends a block, whose buffers nothing uses any more; keeps those that the next block will
        make first, if it is like this one."""
        ended = defaultdict(list)
        for buffer in self._taken.values():
            ended[buffer.layout.leaves].append(buffer)
        self._taken.clear()
        for layout in first:
            if ended[layout.leaves]:
                self._kept[layout.leaves].append(ended[layout.leaves].pop())

    def drop_taken(self) -> None:
        """Ends a block that had an error; something may still be using its buffers."""
        self._taken.clear()
        self._kept.clear()
