"""Transfers of trees to the device, single or streamed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from flexgen_jax.errors import UserError
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.offload.disk.folder import OffloadError
from flexgen_jax.offload.prefetch import Load
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offloading.entries import Arriving, Entry, Markers, shaped, without_flags
from flexgen_jax.offloading.kept_trees import KeptTrees
from flexgen_jax.offloading.room import Room
from flexgen_jax.offloading.stream_memory import LayerMemory, StreamMemory, block_bytes
from flexgen_jax.policy.policy import Tier


class Streams:
    """Loads trees to the device within the memory limits.

    entry: returns the entry of a tree's name; raises `UserError` if there is no such tree.
    """

    def __init__(
        self, memories: Memories, trees: KeptTrees, room: Room, entry: Callable[[str], Entry]
    ) -> None:
        self._memories, self._trees, self._room = memories, trees, room
        self._entry = entry
        self._copying = ThreadPoolExecutor(1, "flexgen-copy")

    def largest(self, entries: Collection[Entry]) -> dict[Tier, int]:
        """Returns the transfer memory of the largest tree, by tier."""
        read = max((block_bytes(entry.on_disk) for entry in entries), default=0)
        moved = max((entry.moved for entry in entries), default=0)
        return {"device": 0 if self._memories.unified else moved, "host": read, "disk": 0}

    def one(self, name: str) -> Any:
        """Returns a tree on the device, which may be kept."""
        read = block_bytes(self._entry(name).on_disk)
        self._room.check({"host": read}, name)
        memory = StreamMemory(self._memories, read, 1, self._trees.settle)
        return self._arrived(self._start(name, memory), memory)

    def begin(self, names: Sequence[str], ahead: int) -> Iterator[tuple[str, Any]]:
        """Returns an iterator over names and their trees on the device; raises `UserError` if
        there is no room for it."""
        largest = self.largest([*map(self._entry, names)])
        count = min(ahead + 2, len(names))
        needed = {tier: count * size for tier, size in largest.items()}
        self._room.check(needed, "a stream")
        return self._stream(names, ahead, largest, needed)

    def _stream(
        self,
        names: Sequence[str],
        ahead: int,
        largest: Mapping[Tier, int],
        needed: Mapping[Tier, int],
    ) -> Iterator[tuple[str, Any]]:
        coming, upcoming = deque[Arriving](), iter(names)
        self._room.check(needed, "a stream")  # again: others may have begun meanwhile
        memory = self._memory_of(largest["host"], min(ahead + 2, len(names)))
        self._room.begin(memory, needed)
        markers = Markers(self._memories)
        try:
            for name in names:
                while len(coming) <= ahead and (following := next(upcoming, None)) is not None:
                    coming.append(self._start(following, memory))
                tree = self._arrived(coming.popleft(), memory)
                yield name, tree
                del tree
                markers.wait_for_last()
        finally:
            for arriving in coming:
                arriving.moved.exception()
                arriving.memory.buffers.clear()
            self._room.end(memory)

    def _memory_of(self, nbytes: int, count: int) -> StreamMemory:
        """Returns memory for a stream: the last stream's memory if its blocks are large enough,
        because touching new memory is slow."""
        last, self._room.idle = self._room.idle, None
        if last is None or not last.suits(nbytes, count):
            last = StreamMemory(self._memories, nbytes, count, self._trees.settle)
        last.begin()
        return last

    def _start(self, name: str, memory: StreamMemory) -> Arriving:
        entry = self._entry(name)
        self._trees.finish(entry)
        if entry.failure is not None:
            raise UserError(f"{name} could not be written: {entry.failure}; put it again")
        buffers = memory.take(entry.on_disk)
        load = self._trees.tensors.load(name, entry.keys, buffers.buffers)
        moved = self._copying.submit(self._arrive, load, buffers, memory)
        return Arriving(entry.generation, name, buffers, moved)

    def _arrive(
        self, load: Load[dict[str, Kept]], own: LayerMemory, memory: StreamMemory
    ) -> dict[str, Kept]:
        """Waits for the reads of a tree and copies it to the device."""
        try:
            load.copy(self._memories)
        except BaseException:
            memory.give_up(own)
            raise
        moved = load.arriving
        memory.give_back(own, moved)
        return moved

    def _arrived(self, arriving: Arriving, memory: StreamMemory) -> Any:
        """Returns a tree on the device; the caller has its only reference."""
        name = arriving.name
        if arriving.generation != self._entry(name).generation:  # it was put meanwhile
            arriving.moved.exception()
            arriving.memory.hand_out()
            del arriving
            arriving = self._start(name, memory)
        try:
            return self._tree(name, arriving.moved.result())
        except OffloadError as error:
            raise without_flags(error) from None
        finally:
            arriving.memory.hand_out()

    def _tree(self, name: str, leaves: Mapping[str, Kept]) -> Any:
        entry = self._entry(name)
        whole = [shaped(leaf, entry.shapes[path]) for path, leaf in leaves.items()]
        return jax.tree.unflatten(entry.structure, whole)

    def close(self) -> None:
        """Waits for transfers in flight."""
        self._room.idle = None
        self._copying.shutdown()
