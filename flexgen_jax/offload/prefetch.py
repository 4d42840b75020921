"""Loads under way: arrays on their way to where they will be computed with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from flexgen_jax.offload.disk.folder import OffloadError
from flexgen_jax.offload.metrics import Content
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offload.watcher import wait_for

T = TypeVar("T")


def finish(futures: Sequence[Any], name: str) -> None:
    """Waits for disk transfers; raises `OffloadError` that names what was being moved."""
    for future in futures:
        try:
            future.result()
        except (ValueError, OSError) as error:
            raise OffloadError(
                f"{name}: {error}; if the disk is full or failing, free space there or choose "
                "another with --offload-dir"
            ) from None


@contextmanager
def ended_on_error(reads: list[Any]) -> Iterator[None]:
    """Waits for started reads if starting further reads fails."""
    try:
        yield
    except BaseException:
        for read in reads:
            read.exception()
        raise


@dataclass(eq=False)
class Load(Generic[T]):
    """A pytree of arrays on its way to the device.

    content, what: for the counters and for people; tree: its leaves, in any tier;
    reads: disk reads that are filling host buffers among the leaves; arrival: tells that the copy
    to the device has ended, if there is one and it is timed.
    """

    content: Content
    what: str
    tree: T
    reads: list[Any] = field(default_factory=list)
    arrival: threading.Event | None = None
    _arriving: T | None = None

    @property
    def arriving(self) -> T:
        """The tree on the device, once its copy has begun."""
        assert self._arriving is not None, f"{self.what}: not copied yet"
        return self._arriving

    def again(self) -> Load[T]:
        """Returns another load of the same arrays."""
        return replace(self, arrival=None, _arriving=None)

    def is_done(self) -> bool:
        return all(read.done() for read in self.reads)

    def wait_read(self) -> None:
        """Waits for the disk reads."""
        finish(self.reads, self.what)

    def copy(self, memories: Memories) -> None:
        """Waits for the disk reads, then starts the copy to the device."""
        self.wait_read()
        before = memories.watcher.last("host_to_device")
        self._arriving = memories.to_device(self.tree, self.content, self.what)
        last = memories.watcher.last("host_to_device")
        self.arrival = None if last is before else last

    def put(self, arriving: T) -> None:
        """Puts something that was made of the tree on the device in its place."""
        self._arriving = arriving

    def detach(self) -> None:
        """Forgets the arrays that it was copied from, which may lie in buffers."""
        self.tree, self.reads = None, []  # type: ignore[assignment] # nobody reads it any more

    def drop(self, is_used: bool) -> None:
        """Frees the copy. If no step used the load, waits for the end of its reads and of the copy,
        since its buffers will be used again."""
        if not is_used:
            for read in self.reads:
                read.exception()  # nobody wants the data any more
            wait_for(self._arriving)
        self._arriving = None


@dataclass(eq=False)
class Write:
    """A write to disk under way; `free` gives back the memory that it reads."""

    what: str
    futures: list[Any]
    free: Callable[[], object]

    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)

    def wait(self) -> None:
        """Waits for the write; raises `OffloadError` if it failed."""
        finish(self.futures, self.what)
        self.free()

    def end(self) -> None:
        """Waits for the end of a write that nobody will read."""
        for future in self.futures:
            future.exception()
