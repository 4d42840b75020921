"""Loads under way: arrays on their way to where they will be computed with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax

from flexgen_jax.offload.disk.folder import OffloadError
from flexgen_jax.offload.metrics import Content
from flexgen_jax.offload.tiers import BufferPool, HostBuffer, Memories, tree_bytes
from flexgen_jax.policy.ledger import Ledger

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def finish(futures: Sequence[Any], what: str) -> None:
    """Waits for disk transfers; raises `OffloadError` that names what was being moved."""
    for future in futures:
        try:
            future.result()
        except (ValueError, OSError) as error:
            raise OffloadError(
                f"{what}: {error}; if the disk is full or failing, free space there or choose "
                "another with --offload-dir"
            ) from None


@dataclass(eq=False)
class Load(Generic[T]):
    """A pytree of arrays on its way to the device.

    content, what: for the counters and for people; tree: its leaves, in whatever tier they are in
    now; reads: disk reads that are filling host buffers among the leaves; buffers: host buffers to
    release after use; last_reader: a result of the last computation that reads the tree; staying:
    data that is read with the tree but not moved to the device.
    """

    content: Content
    what: str
    tree: T
    reads: list[Any] = field(default_factory=list)
    buffers: list[HostBuffer] = field(default_factory=list)
    last_reader: jax.Array | None = None
    staying: Any = None
    _copied: bool = False
    _copied_bytes: int = 0

    @contextmanager
    def abandoned_on_error(self, pool: BufferPool) -> Iterator[None]:
        """Releases the buffers acquired so far if acquiring the rest fails."""
        try:
            yield
        except BaseException:
            for read in self.reads:
                read.exception()
            for buffer in self.buffers:
                pool.release(buffer, None)
            raise

    def is_read(self) -> bool:
        return all(read.done() for read in self.reads)

    def copy(self, memories: Memories, ledger: Ledger) -> None:
        """Waits for the disk reads, then starts the copy to the device; further calls do
        nothing."""
        if self._copied:
            return
        finish(self.reads, self.what)
        on_host = [leaf for leaf in jax.tree.leaves(self.tree) if memories.on_host(leaf)]
        ledger.reserve("device", tree_bytes(on_host))
        self._copied_bytes = tree_bytes(on_host)
        self.tree = memories.to_device(self.tree, self.content, self.what)
        self._copied = True

    def release(self, pool: BufferPool, ledger: Ledger) -> None:
        """Releases the memory, to be reused after the last reader is computed."""
        if not self._copied:
            for read in self.reads:
                read.exception()  # nobody wants the data any more; only the read's end matters
        ledger.release("device", self._copied_bytes)
        for buffer in self.buffers:
            pool.release(buffer, self.last_reader)


class Stream(Generic[K, T]):
    """Keeps the next loads of one kind under way, in the order in which they will be used."""

    def __init__(
        self,
        start: Callable[[K], Load[T]],
        memories: Memories,
        pool: BufferPool,
        ledger: Ledger,
    ) -> None:
        self._start = start
        self._memories = memories
        self._pool = pool
        self._ledger = ledger
        self._loads: OrderedDict[K, Load[T]] = OrderedDict()

    def prefetch(self, keys: Sequence[K]) -> None:
        """Starts the loads of `keys` that are not under way yet, and drops those that are not in
        `keys`."""
        wanted = set(keys)
        for key in [key for key in self._loads if key not in wanted]:
            self.release(key)
        for key in keys:
            if key not in self._loads:
                self._loads[key] = self._start(key)

    def copy(self, keys: Sequence[K]) -> None:
        """Starts the copy to the device for those of `keys` whose disk reads are done."""
        for key in keys:
            load = self._loads.get(key)
            if load is not None and load.is_read():
                load.copy(self._memories, self._ledger)

    def take(self, key: K) -> T:
        """Returns the tree on the device; waits for the disk but not for the copy."""
        if key not in self._loads:
            self._loads[key] = self._start(key)
        load = self._loads[key]
        load.copy(self._memories, self._ledger)
        return load.tree

    def staying(self, key: K) -> Any:
        """Returns the data that was read with a taken tree and stays on the host."""
        return self._loads[key].staying

    def used(self, key: K, reader: jax.Array) -> None:
        """Records that a computation that reads the tree was dispatched; `reader` is a result of
        it."""
        self._loads[key].last_reader = reader

    def release(self, key: K) -> None:
        self._loads.pop(key).release(self._pool, self._ledger)

    def close(self) -> None:
        for key in list(self._loads):
            self.release(key)
