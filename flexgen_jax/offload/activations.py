"""The hidden states between layers, each batch's in the tier that the policy gives it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from flexgen_jax.offload.disk.folder import DiskArray, OffloadFolder
from flexgen_jax.offload.prefetch import Load, Write
from flexgen_jax.offload.tiers import HostBuffer, Memories
from flexgen_jax.offload.watcher import counted
from flexgen_jax.policy.plan import HiddenPart


class Activations:
    """The hidden states of every batch, from one layer's output to the next one's input.

    folder: None if the plan puts none of them on disk.
    """

    def __init__(self, memories: Memories, folder: OffloadFolder | None) -> None:
        self._memories = memories
        self._folder = folder
        self._arrays: dict[int, jax.Array] = {}
        self._files: dict[tuple[int, tuple[int, ...]], DiskArray] = {}
        self._latest: dict[int, DiskArray] = {}
        self._writes: dict[int, Write] = {}

    def keep(self, part: HiddenPart, hidden: jax.Array) -> None:
        """Keeps a step's hidden states [batch, token, hidden] in the memory of their home, for disk
        on the host."""
        if part.home != "device":
            hidden = self._memories.to_host(hidden, "activations", _name(part.batch))
        self._arrays[part.batch] = hidden

    def write(self, part: HiddenPart) -> Write:
        """Starts writing kept hidden states to disk; their memory is free when that is done."""
        batch, host = part.batch, self._arrays[part.batch]
        if (batch, host.shape) not in self._files:
            assert self._folder is not None, "the policy puts hidden states on disk"
            name = f"hidden-{batch}-{host.shape[1]}"
            self._files[batch, host.shape] = self._folder.scratch_array(
                name, host.shape, host.shape, np.dtype(host.dtype), is_cached=True
            )
        self._latest[batch] = self._files[batch, host.shape]
        name, metrics = _name(batch), self._memories.metrics
        future = self._latest[batch].write(np.asarray(host))
        counted(metrics, "disk_write", "activations", name, host.nbytes, [future])
        self._writes[batch] = Write(name, [future], lambda: self._arrays.pop(batch))
        return self._writes[batch]

    def fetch(self, part: HiddenPart, buffers: Sequence[HostBuffer]) -> Load[jax.Array]:
        """Starts a load of a batch's hidden states, from disk if there is a buffer for them."""
        if not buffers:
            return Load("activations", _name(part.batch), self._arrays[part.batch])
        (array,), (view,) = buffers[0].arrays, buffers[0].views
        load = Load("activations", _name(part.batch), array)
        load.reads.append(self._latest[part.batch].read_into(view, is_urgent=True))
        metrics = self._memories.metrics
        counted(metrics, "disk_read", "activations", load.what, array.nbytes, load.reads)
        return load

    def leave(self, batch: int) -> None:
        """Frees the hidden states of a batch, in memory and on disk."""
        self._arrays.pop(batch, None)
        if batch in self._writes:
            self._writes.pop(batch).end()
            del self._latest[batch]
        for what in [what for what in self._files if what[0] == batch]:
            assert self._folder is not None, "there are files"
            self._folder.remove(self._files.pop(what))

    def close(self) -> None:
        """Waits for the writes that nobody will read, and frees all hidden states."""
        for write in self._writes.values():
            write.end()
        self._arrays.clear()


def _name(batch: int) -> str:
    return f"activations of batch {batch}"
