"""The arrays that batches replace with every token: hidden states, and recurrent states.

Which there are, and when they are written, is decided by `schedule/replaced.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from flexgen_jax.offload.disk.folder import DiskArray, OffloadFolder
from flexgen_jax.offload.prefetch import Load, Write
from flexgen_jax.offload.tiers import HostBuffer, Memories
from flexgen_jax.offload.watcher import counted
from flexgen_jax.schedule.running import ReplacedPart, ReplacedSlot, Running

Arrays = tuple[jax.Array, ...]


@dataclass(eq=False)
class SlotArrays:
    """A slot's content at runtime: its payload."""

    # None where they are on disk alone.
    arrays: Arrays | None = None
    # By the arrays' shapes, and those that were written last.
    files: dict[tuple[tuple[int, ...], ...], list[DiskArray]] = field(default_factory=dict)
    latest: Sequence[DiskArray] = ()
    write: Write | None = None


class ReplacedStore:
    """Keeps the arrays of slots in their tiers.

    folder: None if the plan puts no slot on disk.
    """

    def __init__(self, memories: Memories, folder: OffloadFolder | None) -> None:
        self._memories = memories
        self._folder = folder

    def enter(self, running: Running) -> None:
        """Admits a batch; its slots are emptied when it closes."""
        for slot in (running.hidden, *(state.slot for state in running.layers)):
            slot.payload = SlotArrays()
            running.closing.callback(self._empty, slot)

    def keep(self, part: ReplacedPart, arrays: Arrays) -> None:
        """Stores a step's result in its home's memory (on the host for disk)."""
        slot = part.slot
        if part.home != "device":
            arrays = self._memories.to_host(arrays, slot.content, _name(slot))
        slot.payload.arrays = arrays

    def write(self, part: ReplacedPart) -> Write:
        """Starts writing a slot to disk; its memory is free after the write."""
        slot, payload = part.slot, part.slot.payload
        arrays = payload.arrays
        shapes = tuple(array.shape for array in arrays)
        if shapes not in payload.files:
            payload.files[shapes] = [self._file(part, n, array) for n, array in enumerate(arrays)]
        payload.latest = payload.files[shapes]
        futures = [
            file.write(np.asarray(array))
            for file, array in zip(payload.latest, arrays, strict=True)
        ]
        metrics, nbytes = self._memories.metrics, sum(array.nbytes for array in arrays)
        counted(metrics, "disk_write", slot.content, _name(slot), nbytes, futures)
        write = payload.write = Write(_name(slot), futures, lambda: _forget(payload))
        return write

    def _file(self, part: ReplacedPart, number: int, array: jax.Array) -> DiskArray:
        """Returns a new file for an array that is replaced."""
        assert self._folder is not None, "the policy puts it on disk"
        slot, shape = part.slot, array.shape
        name = f"hidden-{slot.running.number}-{shape[1]}"
        if slot.content == "cache":
            name = f"state-{slot.running.number}-{part.layer}-{number}-{shape[0]}"
        return self._folder.scratch_array(name, shape, shape, np.dtype(array.dtype), is_cached=True)

    def fetch(self, part: ReplacedPart, buffers: Sequence[HostBuffer]) -> Load[Arrays]:
        """Starts loading a slot, from disk if a buffer is available."""
        slot, payload = part.slot, part.slot.payload
        if not buffers:
            return Load(slot.content, _name(slot), payload.arrays)
        (buffer,) = buffers
        load = Load(slot.content, _name(slot), tuple(buffer.arrays))
        for file, view in zip(payload.latest, buffer.views, strict=True):
            load.reads.append(file.read_into(view, is_urgent=True))
        metrics, nbytes = self._memories.metrics, sum(array.nbytes for array in buffer.arrays)
        counted(metrics, "disk_read", slot.content, load.what, nbytes, load.reads)
        return load

    def read(self, slot: ReplacedSlot) -> HostBuffer:
        """Returns the content of a slot that is only on disk; waits for it."""
        assert slot.part is not None, "a step has made something"
        buffer = self._memories.buffer(*slot.part.layouts)
        for file, view in zip(slot.payload.latest, buffer.views, strict=True):
            file.read_into(view, is_urgent=True).result()
        return buffer

    def _empty(self, slot: ReplacedSlot) -> None:
        """Frees a slot, in memory and on disk; waits for the end of its write."""
        payload, slot.payload = slot.payload, None
        if payload.write is not None:
            payload.write.end()
        for file in (file for files in payload.files.values() for file in files):
            assert self._folder is not None, "there are files"
            self._folder.remove(file)


def _forget(kept: SlotArrays) -> None:
    kept.arrays = None


def _name(slot: ReplacedSlot) -> str:
    content_name = "activations" if slot.content == "activations" else "state"
    return f"{content_name} of batch {slot.running.number}"
