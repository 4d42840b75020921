"""The two memory tiers, host and device: how arrays get into them and move between them.

On the CPU backend both are the same RAM, so a move only hands the array over; budgets are still
kept apart. Elsewhere the host tier is pinned memory, and a move is a copy. `unified=False` takes
the copying path on the CPU too, which is how it is tested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import cpu_device, is_cpu
from flexgen_jax.errors import UserError
from flexgen_jax.models.weight_source import numpy_dtype
from flexgen_jax.offload.disk.direct_reads import PAGE, whole_pages
from flexgen_jax.offload.metrics import Content, Link, Metrics
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.policy.parts import Layout

T = TypeVar("T")

TRIES = 3
"""Attempts to allocate a page-aligned array."""


def tree_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class Memories:
    """The device's memory, and the host memory that the device can copy from and to."""

    def __init__(self, watcher: Watcher, unified: bool | None = None) -> None:
        self.device = jax.local_devices()[0]
        self.watcher = watcher
        self.unified = is_cpu() if unified is None else unified
        self._numbers: dict[int | tuple[int, ...], jax.Array] = {}
        self._device_sharding = jax.sharding.SingleDeviceSharding(self.device)
        self._host_sharding = self._device_sharding
        if not self.unified:
            self._host_sharding = self._device_sharding.with_memory_kind("pinned_host")

    @property
    def metrics(self) -> Metrics:
        return self.watcher.metrics

    def to_device(self, tree: T, content: Content, name: str) -> T:
        """Starts moving those leaves of a tree that are on the host to the device; returns at once.
        content, name: see `metrics.Operation`."""
        return tree if self.unified else self._move(tree, "host_to_device", content, name)

    def to_host(self, tree: T, content: Content, name: str) -> T:
        """Starts moving the leaves of a tree to the host; returns at once."""
        return tree if self.unified else self._move(tree, "device_to_host", content, name)

    def ask(self, tree: Any, content: Content, name: str) -> None:
        """Starts copying small arrays to the host; later calls read them as NumPy arrays.

        Such a copy has a stream of its own and does not wait behind weights, as one to pinned
        memory would.
        """
        if self.unified:
            return
        operation = self.metrics.queue("device_to_host", content, name, tree_bytes(tree))
        for leaf in jax.tree.leaves(tree):
            leaf.copy_to_host_async()
        self.watcher.follow(operation, tree, lambda: jax.tree.map(np.asarray, tree))

    def constant(self, array: np.ndarray) -> jax.Array:
        """Returns a small array on the device, which programs take again and again."""
        placed: jax.Array = jax.device_put(array, self._device_sharding)
        return placed

    def numbers(self, values: int | tuple[int, ...]) -> jax.Array:
        """Returns indices as int32 on the device; they are kept, since there are few."""
        if values not in self._numbers:
            self._numbers[values] = self.constant(np.array(values, np.int32))
        return self._numbers[values]

    def send(self, tree: Any, content: Content, name: str) -> Any:
        """Starts moving small NumPy arrays, which must not change any more, to the device."""
        if self.unified:
            return tree
        return self._put(tree, "host_to_device", content, name)

    @cached_property
    def cpu(self) -> jax.Device:
        """The CPU as JAX's device, whose arrays can lie in host memory."""
        device = cpu_device()
        if device is None:
            raise UserError(
                "experts on the host need JAX's CPU device, which is not there; set "
                'JAX_PLATFORMS to "cuda,cpu", or host_experts to 0'
            )
        return device

    def of_cpu(self, tree: T) -> T:
        """Returns arrays of host memory as the CPU's, in the same memory."""

        viewed: T = jax.tree.map(lambda x: jax.device_put(writable_view(x), self.cpu), tree)
        return viewed

    def device_peak_bytes(self) -> int | None:
        """Returns the most bytes that this process has had on the device, by its own count; None
        where it does not count, as on a CPU."""
        stats = self.device.memory_stats()
        return None if stats is None else int(stats["peak_bytes_in_use"])

    def on_host(self, array: jax.Array) -> bool:
        """Returns whether an array must be copied to the device before computing with it."""
        return not self.unified and array.sharding.memory_kind == "pinned_host"

    def _move(self, tree: T, link: Link, content: Content, name: str) -> T:
        to_device = link == "host_to_device"
        leaves, shape = jax.tree.flatten(tree)
        moved_indices = [i for i, leaf in enumerate(leaves) if self.on_host(leaf) == to_device]
        if moved_indices:
            moved = self._put([leaves[i] for i in moved_indices], link, content, name)
            for i, leaf in zip(moved_indices, moved, strict=True):
                leaves[i] = leaf
        result: T = jax.tree.unflatten(shape, leaves)
        return result

    def _put(self, tree: Any, link: Link, content: Content, name: str) -> Any:
        """Starts a copy, which the metrics count as active until it is done."""
        target = self._device_sharding if link == "host_to_device" else self._host_sharding
        operation = self.metrics.queue(link, content, name, tree_bytes(tree))
        moved = jax.device_put(tree, target)
        self.watcher.follow(operation, tree, moved)
        return moved

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """Returns a zeroed array in host memory that begins at a page, so that the disk can be read
        directly into it."""
        if not is_cpu():
            return self.pinned_array(shape, dtype)
        zeros = whole_pages(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        zeros = zeros.view(dtype).reshape(shape)
        array: jax.Array = jax.device_put(zeros, self._host_sharding)
        array.block_until_ready()  # it is these pages
        return array

    def pinned_array(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """Returns a zeroed array in pinned memory. It is copied from the device, since one from the
        host would fault in pages of its own and go through XLA's staging buffers."""

        def make(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
            zeros = jnp.zeros(shape, dtype, device=self._device_sharding)
            array: jax.Array = jax.device_put(zeros, self._host_sharding)
            return array.block_until_ready()

        return at_page(lambda: make(shape, dtype), lambda gap: make((gap,), np.dtype(np.uint8)))

    def buffer(self, layout: Layout) -> HostBuffer:
        """Returns zeroed host arrays of a layout."""
        arrays = tuple(
            self.host_array(leaf.shape, numpy_dtype(leaf.kind)) for leaf in layout.leaves
        )
        return HostBuffer(layout, arrays, tuple(map(writable_view, arrays)))


def at_page(make: Callable[[], jax.Array], fill: Callable[[int], jax.Array]) -> jax.Array:
    """Returns an array that begins at a page, if a few tries bring the allocator to it.

    XLA's allocator of pinned memory begins arrays at multiples of 256 bytes, at the start of the
    smallest free piece that is large enough. So an unaligned array is freed, and a small array in
    its place moves the next one to a page boundary.

    make: makes the array; fill: makes an array of that many bytes.
    """
    fillers = []
    array = make()
    for _ in range(TRIES):
        gap = -array.unsafe_buffer_pointer() % PAGE
        if gap == 0:
            break
        del array
        fillers.append(fill(gap))
        array = make()
    return array


def writable_view(array: jax.Array) -> np.ndarray:
    """Returns a writable view of a host array's memory. Safe while nothing computes with the
    array."""
    address = array.unsafe_buffer_pointer()
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address)
    memory.owner = array  # type: ignore[attr-defined] # a view keeps the memory alive
    view: np.ndarray = np.ctypeslib.as_array(memory).view(array.dtype).reshape(array.shape)
    return view


class HostBuffer(NamedTuple):
    """Reusable host memory: `views` are written to, `arrays` are computed with."""

    layout: Layout
    arrays: tuple[jax.Array, ...]
    views: tuple[np.ndarray, ...]
