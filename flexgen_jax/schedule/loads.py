"""Loads under way: data in flight to its place of use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from flexgen_jax.schedule.backend import Backend, Part
from flexgen_jax.schedule.buffers import Ring
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.passes import Buffer, Handle

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False, slots=True)
class PartLoad:
    """A part on its way to the device.

    handle: the backend's; buffers: host buffers to release after its use; is_copied: whether its
    copy to the device has begun.
    """

    part: Part
    handle: Handle
    buffers: list[Buffer]
    is_copied: bool = False


class Loader:
    """Starts, copies and ends loads, and reserves their memory."""

    def __init__(self, backend: Backend, ledger: Ledger, ring: Ring) -> None:
        self._backend, self._ledger, self._ring = backend, ledger, ring
        self._kept: dict[Part, PartLoad] = {}

    def start(self, part: Part) -> PartLoad:
        """Starts a load; arrays on disk are read into buffers."""
        buffers = self._ring.acquire(part.layouts) if part.layouts else []
        handle = self._backend.fetch(part, [buffer.handle for buffer in buffers])
        return PartLoad(part, handle, buffers)

    def start_kept(self, part: Part) -> PartLoad:
        """Starts a load of a part whose buffers are kept: only the first load reads the disk."""
        if part not in self._kept:
            self._kept[part] = self.start(part)
        return PartLoad(part, self._backend.fetch(part, (), self._kept[part].handle), [])

    def copy_if_read(self, load: PartLoad) -> bool:
        """Starts a load's copy to the device after its reads; returns
        whether it began."""
        if self._backend.is_done(load.handle):
            self.copy(load)
        return load.is_copied

    def copy(self, load: PartLoad) -> None:
        """Waits for a load's reads and starts its copy to the device, which has not begun."""
        if load.part.copied:
            self._ledger.reserve("device", load.part.copied)
        load.is_copied = True
        self._backend.copy(load.handle)

    def wait_read(self, load: PartLoad) -> None:
        """Waits for a load's reads."""
        self._backend.wait_read(load.handle)

    def end(self, load: PartLoad, after: int, is_used: bool) -> None:
        """Ends a load; its buffers are free after step number `after`."""
        self._backend.drop(load.handle, is_used)
        if load.is_copied and load.part.copied:
            self._ledger.release("device", load.part.copied)
        if load.buffers:
            self._ring.release(load.buffers, after)

    def detach(self, load: PartLoad, after: int) -> None:
        """Gives back a load's buffers, which step number `after` was the last to use, and the
        memory that was reserved for its copy. The copy stays in memory that the caller has
        reserved."""
        self._backend.detach(load.handle)
        self._ring.release(load.buffers, after)
        load.buffers = []
        self._ledger.release("device", load.part.copied)

    def drop(self, load: PartLoad) -> None:
        """Frees the copy of a detached load, which steps have used."""
        self._backend.drop(load.handle, is_used=True)

    def close(self) -> None:
        """Ends the loads that were kept."""
        while self._kept:
            self.end(self._kept.popitem()[1], 0, is_used=False)


class Stream(Generic[K]):
    """Loads of one kind in flight, by purpose."""

    def __init__(self, loader: Loader, start: Callable[[K], PartLoad]) -> None:
        self._loader, self._start = loader, start
        self._loads: dict[K, PartLoad] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._loads

    def prefetch(self, key: K) -> None:
        """Starts a load if it is not under way yet."""
        if key not in self._loads:
            self._loads[key] = self._start(key)

    def copy_if_read(self, key: K) -> bool:
        """Starts the copy of a load after its reads; returns whether it has begun."""
        load = self._loads.get(key)
        return load is not None and (load.is_copied or self._loader.copy_if_read(load))

    def is_copied(self, key: K) -> bool:
        """Returns whether a load's copy has begun."""
        load = self._loads.get(key)
        return load is not None and load.is_copied

    def take(self, key: K) -> Handle:
        """Returns a load on its way to the device; waits for the disk but not for the copy."""
        self.prefetch(key)
        load = self._loads[key]
        if not load.is_copied:
            self._loader.copy(load)
        return load.handle

    def take_on_host(self, key: K) -> Handle:
        """Returns a load that the CPU computes with; waits for the disk."""
        self.prefetch(key)
        load = self._loads[key]
        self._loader.wait_read(load)
        return load.handle

    def release(self, key: K, after: int) -> None:
        """Ends a load, which step number `after` was the last to use."""
        self._loader.end(self._loads.pop(key), after, is_used=True)

    def hand_over(self, key: K) -> PartLoad:
        """Returns a load, which the caller ends."""
        return self._loads.pop(key)

    def rename(self, renamed: Callable[[K], K]) -> None:
        """Gives loads that are for something else now another key, unless that has a load."""
        for key in list(self._loads):
            if renamed(key) not in self._loads:
                self._loads[renamed(key)] = self._loads.pop(key)

    def keep_only(self, is_wanted: Callable[[K], bool], after: int) -> None:
        """Drops all other loads; no step after number `after` uses them."""
        for key in [key for key in self._loads if not is_wanted(key)]:
            self._loader.end(self._loads.pop(key), after, is_used=False)

    def close(self) -> None:
        while self._loads:
            self._loader.end(self._loads.popitem()[1], 0, is_used=False)
