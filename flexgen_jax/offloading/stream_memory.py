"""Host memory into which the layers of a stream are read, and when it may be read into again.

Where the device computes with host memory itself, as a CPU does, a layer's arrays lie in the block
of memory that the disk was read into. JAX holds such memory until nothing computes with it any
more, even if nobody has the array: so an object that dies with the memory says when the block is
free. Otherwise the block is free after its copy to the device.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.models.weight_source import numpy_dtype
from flexgen_jax.offload.disk.direct_reads import PAGE, whole_pages
from flexgen_jax.offload.tiers import HostBuffer, Memories
from flexgen_jax.policy.parts import Layout

LOOK_S = 0.001
"""Seconds between two looks at whether a block is free."""

HELD_S = 5.0
"""Seconds for which the caller may keep a layer that a stream waits for, for instance while writing
it."""

LOST_S = 900.0
"""Maximum seconds of a computation with a layer that a stream waits for."""


def block_bytes(layouts: Sequence[Layout]) -> int:
    """Returns the bytes of a block for arrays with the given layouts; each array begins at a
    page."""
    return sum(-(-leaf.nbytes // PAGE) * PAGE for layout in layouts for leaf in layout.leaves)


class _Lease:
    """Dies with the memory of a layer's arrays."""


@dataclass(eq=False)
class Taken:
    """A block that is in use. arrays: those in it, which this does not keep; is_yielded: whether
    they were handed out."""

    arrays: list[weakref.ref[jax.Array]]
    is_yielded: bool = False

    @property
    def is_held(self) -> bool:
        """Whether somebody still has one of the arrays."""
        return any(array() is not None for array in self.arrays)


@dataclass(eq=False)
class LayerMemory:
    """The buffers of one layer, and the block that they are in, if there is one."""

    buffers: list[HostBuffer]
    block: Taken | None = None

    def hand_out(self) -> None:
        """Drops the references to arrays that now belong to the caller."""
        self.buffers.clear()
        if self.block is not None:
            self.block.is_yielded = True


class StreamMemory:
    """Blocks of host memory for a stream's layers.

    nbytes: of a block; count: how many there may be; settle: waits for a write that may keep a
    layer, and returns whether there was any.
    """

    def __init__(
        self, memories: Memories, nbytes: int, count: int, settle: Callable[[], bool]
    ) -> None:
        self._memories, self._nbytes, self._count = memories, nbytes, count
        self._settle = settle
        self._free: list[np.ndarray] = []
        self._made = 0
        self._taken: dict[int, Taken] = {}
        # Where arrays are copied to the device: free buffers, by their layouts.
        self._buffers: defaultdict[tuple[Layout, ...], list[list[HostBuffer]]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that there may be."""
        return self._nbytes * self._count

    def suits(self, nbytes: int, count: int) -> bool:
        """Returns whether there are `count` blocks of the given size."""
        return (self._nbytes, self._count) == (nbytes, count)

    def begin(self) -> None:
        """Begins another stream: arrays that a caller keeps from the last stream no longer count;
        blocks still in use by computations return later."""
        for block, lease in list(self._taken.items()):
            if lease.is_held:
                del self._taken[block]
                self._made -= 1

    def take(self, layouts: Sequence[Layout]) -> LayerMemory:
        """Returns buffers of some layouts; waits until a block is free. Raises `UserError` if none
        will be, because somebody keeps what was handed out."""
        if not layouts:
            return LayerMemory([])
        if not self._memories.unified:
            return LayerMemory(self._copied_buffers(tuple(layouts)))
        block = self._free_block()
        lease, offset, buffers = _Lease(), 0, list[HostBuffer]()
        weakref.finalize(lease, self._give_back, block).atexit = False
        for layout in layouts:
            views = []
            for leaf in layout.leaves:
                part = _leased(block[offset : offset + leaf.nbytes], block, lease)
                views.append(part.view(numpy_dtype(leaf.kind)).reshape(leaf.shape))
                offset += -(-leaf.nbytes // PAGE) * PAGE
            arrays = tuple(jax.device_put(view, self._memories.device) for view in views)
            pairs = zip(arrays, views, strict=True)
            is_same = all(a.unsafe_buffer_pointer() == v.ctypes.data for a, v in pairs)
            assert is_same, "JAX copied memory that is still to be read into"
            buffers.append(HostBuffer(layout, arrays, tuple(views)))
        lease_record = Taken([weakref.ref(array) for buffer in buffers for array in buffer.arrays])
        self._taken[id(block)] = lease_record
        return LayerMemory(buffers, lease_record)

    def _copied_buffers(self, layouts: tuple[Layout, ...]) -> list[HostBuffer]:
        if self._buffers[layouts]:
            return self._buffers[layouts].pop()
        if self._made < self._count:
            self._made += 1
        elif free_buffers := [free for free in self._buffers.values() if free]:
            free_buffers[0].pop()  # of other layouts, whose place these take
        return [*map(self._memories.buffer, layouts)]

    def give_back(self, memory: LayerMemory, moved: object) -> None:
        """Takes back buffers that are copied to the device, where `moved` is what they become;
        waits for that."""
        if memory.buffers and not self._memories.unified:
            jax.block_until_ready(moved)
            layouts = tuple(buffer.layout for buffer in memory.buffers)
            self._buffers[layouts].append([*memory.buffers])

    def give_up(self, memory: LayerMemory) -> None:
        """Forgets buffers whose layer could not be read."""
        if memory.buffers and not self._memories.unified:
            self._made -= 1

    def _free_block(self) -> np.ndarray:
        held_since = waits_since = time.monotonic()
        while True:
            if self._free:
                return self._free.pop()
            if self._made < self._count:
                self._made += 1
                return whole_pages(self._nbytes)
            now, leases = time.monotonic(), list(self._taken.values())
            yielded = [block for block in leases if block.is_yielded]
            if not all(block.is_held for block in yielded) or self._settle():
                held_since = now
            if now - held_since > HELD_S or now - waits_since > LOST_S:
                raise UserError(
                    f"the arrays of {len(yielded)} layers of a stream are still in use, so there "
                    "is no memory for the next one: use a layer only until the next one arrives, "
                    "or copy it with jnp.array(x, copy=True)"
                )
            time.sleep(LOOK_S)
            # JAX releases memory of finished computations at its next call.
            jax.device_put(np.int32(0), self._memories.device)

    def _give_back(self, block: np.ndarray) -> None:
        # It may be called during other work in any thread, so it must not wait.
        if self._taken.pop(id(block), None) is None:  # of an earlier stream
            if self._made >= self._count:
                return
            self._made += 1
        self._free.append(block)


def _leased(part: np.ndarray, block: np.ndarray, lease: _Lease) -> np.ndarray:
    """Returns an array over the same memory, which keeps the block and the lease."""
    memory = (ctypes.c_uint8 * part.nbytes).from_address(part.ctypes.data)
    memory.kept = (block, lease)  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(memory)
