"""Host memory into which the layers of a stream are read, and when it may be read into again.

Where the device computes with host memory itself, as a CPU does, a layer's arrays lie in the block
of memory that the disk was read into. JAX holds such memory until nothing computes with it any
more, even if nobody has the array: so an object that dies with the memory says when the block is
free. Elsewhere the block is free when its copy to the device is done.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.models.weight_source import numpy_dtype
from flexgen_jax.offload.disk.direct_reads import PAGE, whole_pages
from flexgen_jax.offload.tiers import HostBuffer, Memories
from flexgen_jax.policy.parts import Layout

LOOK_S = 0.001
"""Seconds between two looks at whether a block is free."""


def block_bytes(layouts: Sequence[Layout]) -> int:
    """Returns the bytes of a block for the arrays of some layouts, each of which begins at a
    page."""
    return sum(-(-leaf.nbytes // PAGE) * PAGE for layout in layouts for leaf in layout.leaves)


class _Lease:
    """Dies with the memory of a layer's arrays."""


@dataclass(eq=False)
class LayerMemory:
    """The buffers of one layer. is_yielded: whether it was handed out."""

    buffers: list[HostBuffer]
    is_yielded: bool = False
    _arrays: list[weakref.ref[jax.Array]] = field(default_factory=list)

    def watch(self) -> None:
        """Remembers the arrays without keeping them."""
        self._arrays = [weakref.ref(x) for buffer in self.buffers for x in buffer.arrays]

    @property
    def is_held(self) -> bool:
        """Whether somebody still has one of the arrays."""
        return any(array() is not None for array in self._arrays)


class StreamMemory:
    """Blocks of host memory for a stream's layers.

    nbytes: of a block; count: how many there may be; settle: waits for something that may hold a
    block for a while, and returns whether there was any.
    """

    def __init__(
        self, memories: Memories, nbytes: int, count: int, settle: Callable[[], bool]
    ) -> None:
        self._memories, self._nbytes, self._count = memories, nbytes, count
        self._settle = settle
        self._free: list[np.ndarray] = []
        self._made = 0
        self._taken: dict[int, LayerMemory] = {}
        self._copied: defaultdict[tuple[Layout, ...], list[list[HostBuffer]]] = defaultdict(list)
        self._changed = threading.Condition()

    def suits(self, nbytes: int, count: int) -> bool:
        """Returns whether there are as many blocks of such a size."""
        return (self._nbytes, self._count) == (nbytes, count)

    def begin(self) -> None:
        """Begins another stream: what is still kept of the last one counts no more."""
        self._made -= len(self._taken)
        self._taken.clear()

    def take(self, layouts: Sequence[Layout]) -> LayerMemory:
        """Returns buffers of some layouts; waits until a block is free. Raises `UserError` if none
        will be, because somebody keeps what was handed out."""
        if not layouts:
            return LayerMemory([])
        if not self._memories.unified:
            free = self._copied[tuple(layouts)]
            return LayerMemory(free.pop() if free else [*map(self._memories.buffer, layouts)])
        block = self._free_block()
        memory, lease, offset = LayerMemory([]), _Lease(), 0
        self._taken[id(block)] = memory
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
            memory.buffers.append(HostBuffer(layout, arrays, tuple(views)))
        memory.watch()
        return memory

    def give_back(self, memory: LayerMemory, moved: object) -> None:
        """Takes back buffers that are copied to the device, where `moved` is what they become;
        waits for that."""
        if memory.buffers and not self._memories.unified:
            jax.block_until_ready(moved)
            layouts = tuple(buffer.layout for buffer in memory.buffers)
            self._copied[layouts].append([*memory.buffers])

    def _free_block(self) -> np.ndarray:
        while True:
            with self._changed:
                if self._free:
                    return self._free.pop()
                if self._made < self._count:
                    self._made += 1
                    return whole_pages(self._nbytes)
                taken = list(self._taken.values())  # at once: others give back meanwhile
                yielded = [memory for memory in taken if memory.is_yielded]
                self._changed.wait(LOOK_S)
            is_held = bool(yielded) and all(memory.is_held for memory in yielded)
            if is_held and not self._settle():
                raise UserError(
                    f"the arrays of {len(yielded)} layers of a stream are still in use, so that "
                    "there is no memory for the next one: keep what a stream has yielded no longer "
                    "than to the next layer, or copy it with jnp.array(x, copy=True)"
                )
            # JAX lets go of memory that was in use by a computation when it is called again.
            jax.device_put(np.int32(0), self._memories.device)

    def _give_back(self, block: np.ndarray) -> None:
        # Also called amid other work of this thread, so it must not wait.
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
