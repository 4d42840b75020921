"""The two memory tiers, host and device: how arrays get into them and move between them.

On the CPU backend both are the same RAM, so a move only hands the array over; budgets are still
kept apart. Elsewhere the host tier is pinned memory, and a move is a copy. `unified=False` takes
the copying path on the CPU too, which is how it is tested.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from flexgen_jax.offload.disk.direct_reads import whole_pages
from flexgen_jax.offload.metrics import (
    Content,
    Link,
)
from flexgen_jax.offload.watcher import Watcher, wait_for
from flexgen_jax.policy.ledger import Ledger

T = TypeVar("T")


def tree_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class Memories:
    """The device's memory, and the host memory that the device can copy from and to."""

    def __init__(self, watcher: Watcher, unified: bool | None = None) -> None:
        self.device = jax.devices()[0]
        self._watcher = watcher
        self.unified = self.device.platform == "cpu" if unified is None else unified
        self._device_sharding = jax.sharding.SingleDeviceSharding(self.device)
        self._host_sharding = self._device_sharding
        if not self.unified:
            self._host_sharding = self._device_sharding.with_memory_kind("pinned_host")

    def to_device(self, tree: T, content: Content, what: str) -> T:
        """Starts moving those leaves of a tree that are on the host to the device; returns at once.
        content, what: see `metrics.Operation`."""
        return tree if self.unified else self._move(tree, "host_to_device", content, what)

    def to_host(self, tree: T, content: Content, what: str) -> T:
        """Starts moving the leaves of a tree to the host; returns at once."""
        return tree if self.unified else self._move(tree, "device_to_host", content, what)

    def send(self, tree: Any, content: Content, what: str) -> Any:
        """Starts moving small NumPy arrays, which must not change any more, to the device."""
        if self.unified:
            return tree
        return self._put(tree, "host_to_device", content, what)

    def on_host(self, array: jax.Array) -> bool:
        """Returns whether an array must be copied to the device before computing with it."""
        return not self.unified and array.sharding.memory_kind == "pinned_host"

    def _move(self, tree: T, link: Link, content: Content, what: str) -> T:
        to_device = link == "host_to_device"
        leaves, shape = jax.tree.flatten(tree)
        chosen = [i for i, leaf in enumerate(leaves) if self.on_host(leaf) == to_device]
        if chosen:
            moved = self._put([leaves[i] for i in chosen], link, content, what)
            for i, leaf in zip(chosen, moved, strict=True):
                leaves[i] = leaf
        result: T = jax.tree.unflatten(shape, leaves)
        return result

    def _put(self, tree: Any, link: Link, content: Content, what: str) -> Any:
        """Starts a copy, which the metrics count as under way until it is done."""
        target = self._device_sharding if link == "host_to_device" else self._host_sharding
        operation = self._watcher.metrics.queue(link, content, what, tree_bytes(tree))
        moved = jax.device_put(tree, target)
        self._watcher.follow(operation, tree, moved)
        return moved

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """Returns a zeroed array in host memory, in whole pages, so that the disk can be read
        directly into it. On the CPU backend the array is these pages; elsewhere it is a pinned
        copy."""
        zeros = whole_pages(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        zeros = zeros.view(dtype).reshape(shape)
        array: jax.Array = jax.device_put(zeros, self._host_sharding)
        array.block_until_ready()
        return array


def _is_ready(array: Any) -> bool:
    return array is None or bool(array.is_ready())


def writable_view(array: jax.Array) -> np.ndarray:
    """Returns a writable view of a host array's memory. Safe while nothing computes with the
    array."""
    address = array.unsafe_buffer_pointer()
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address)
    memory.owner = array  # type: ignore[attr-defined] # a view keeps the memory alive
    view: np.ndarray = np.ctypeslib.as_array(memory).view(array.dtype).reshape(array.shape)
    return view


@dataclass(eq=False)
class HostBuffer:
    """Reusable host memory. `view` is written to, `array` is computed with, and `holders` counts
    the current users."""

    array: jax.Array
    view: np.ndarray
    holders: int = 1

    @property
    def key(self) -> tuple[tuple[int, ...], np.dtype]:
        return self.view.shape, self.view.dtype


class BufferPool:
    """Host buffers by shape and dtype, reused as soon as the computations that read them are done.

    most_bytes: the size above which free buffers of other shapes are freed first. A run of equally
    long prompts never reaches it; in a run of many lengths, every length has shapes of its own.
    """

    def __init__(self, memories: Memories, ledger: Ledger) -> None:
        self._memories = memories
        self._ledger = ledger
        self._free: dict[Any, list[tuple[HostBuffer, jax.Array | None]]] = {}
        self._bytes = 0
        self.most_bytes: float = math.inf

    def acquire(self, shape: tuple[int, ...], dtype: np.dtype, may_wait: bool = True) -> HostBuffer:
        """Acquires a free buffer, once its last reader is done, or else a new one. With `may_wait`
        false it does not wait for a reader but makes a new buffer at once."""
        free = self._free.get((shape, np.dtype(dtype)))
        if free and not may_wait and not _is_ready(free[0][1]):
            free = None
        if free:
            wait_for(free[0][1])
            buffer, _ = free.pop(0)
            buffer.holders = 1
            return buffer
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._make_room(nbytes)
        self._ledger.reserve("host", nbytes)
        try:
            array = self._memories.host_array(shape, np.dtype(dtype))
        except BaseException:
            self._ledger.release("host", nbytes)
            raise
        self._bytes += nbytes
        return HostBuffer(array, writable_view(array))

    def release(self, buffer: HostBuffer, last_reader: jax.Array | None) -> None:
        """Releases one hold; the last one frees the buffer once `last_reader` is computed."""
        buffer.holders -= 1
        if buffer.holders == 0:
            self._free.setdefault(buffer.key, []).append((buffer, last_reader))

    def _make_room(self, nbytes: int) -> None:
        """Frees idle buffers to keep a new one within `most_bytes`, as far as that needs no
        waiting."""
        for entries in self._free.values():
            while entries and self._bytes + nbytes > self.most_bytes and _is_ready(entries[0][1]):
                self._let_go(entries)

    def trim(self) -> None:
        """Frees the memory of all idle buffers, after their last readers."""
        for entries in self._free.values():
            while entries:
                wait_for(entries[0][1])
                self._let_go(entries)

    def _let_go(self, entries: list[tuple[HostBuffer, jax.Array | None]]) -> None:
        buffer, _ = entries.pop(0)
        self._bytes -= buffer.view.nbytes
        self._ledger.release("host", buffer.view.nbytes)
