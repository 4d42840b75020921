"""The hidden states between layers, each batch's in the tier that the policy gives it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flexgen_jax.offload.context import Runtime
from flexgen_jax.offload.disk.folder import DiskArray
from flexgen_jax.offload.prefetch import Load, finish
from flexgen_jax.offload.watcher import counted
from flexgen_jax.policy.memory import PENDING_WRITES
from flexgen_jax.policy.placement import ActivationPlan
from flexgen_jax.policy.policy import Tier


class Activations:
    """The hidden states of every batch, from one layer's output to the next one's input."""

    def __init__(self, runtime: Runtime, plan: ActivationPlan) -> None:
        self._runtime = runtime
        self._plan = plan
        self._arrays: dict[int, jax.Array] = {}
        self._files: dict[int, DiskArray] = {}
        self._on_disk: dict[int, DiskArray] = {}
        self._writes: dict[int, tuple[Any, int]] = {}
        self._reserved: dict[int, tuple[Tier, int]] = {}
        self._version: dict[int, tuple[int, int]] = {}

    def is_ready(self, token: int, layer: int, batch: int) -> bool:
        """Returns whether the output of `layer` can be loaded without waiting for its
        computation."""
        return self._version.get(batch) == (token, layer) and not self._is_unwritten(batch)

    def _is_unwritten(self, batch: int) -> bool:
        return self._reserved[batch][0] == "disk" and batch not in self._on_disk

    def put(self, token: int, layer: int, batch: int, hidden: jax.Array) -> None:
        """Stores the output of `layer`; if its home is the disk, `settle` writes it there."""
        home = self._plan.home(hidden.shape[1], layer, batch)
        self._forget(batch)
        self._runtime.ledger.reserve(home, hidden.nbytes)
        self._reserved[batch] = (home, hidden.nbytes)
        if home != "device":
            hidden = self._runtime.memories.to_host(hidden, "activations", _name(batch))
        self._arrays[batch] = hidden
        self._version[batch] = (token, layer)

    def settle(self, token: int, layer: int, batch: int) -> None:
        """Starts writing the output of `layer`, which is now computed, if its home is the disk."""
        if self._version.get(batch) == (token, layer) and self._is_unwritten(batch):
            self._write(batch)

    def _write(self, batch: int) -> None:
        host = self._arrays[batch]
        file = self._files.get(batch)
        if file is None:
            file = self._files[batch] = self._runtime.disk().scratch_array(
                f"hidden-{batch}", host.shape, host.shape, self._runtime.numpy_dtype, is_cached=True
            )
        self._runtime.ledger.reserve("host", host.nbytes)
        write = file.write(np.asarray(host))
        name, metrics = _name(batch), self._runtime.metrics
        counted(metrics, "disk_write", "activations", name, host.nbytes, [write])
        self._writes[batch] = (write, host.nbytes)
        self._on_disk[batch] = file
        while len(self._writes) > PENDING_WRITES:
            self._finish_write(next(iter(self._writes)))

    def start(self, batch: int) -> Load[jax.Array]:
        """Starts bringing the batch's hidden states to the device.

        If they are still in RAM, because they are needed again so soon, they are not read from
        disk.
        """
        if batch in self._arrays:
            return Load("activations", _name(batch), self._arrays[batch])
        file, runtime = self._on_disk[batch], self._runtime
        buffer = runtime.pool.acquire(file.shape, file.dtype)
        load = Load("activations", _name(batch), buffer.array, buffers=[buffer])
        with load.abandoned_on_error(runtime.pool):
            load.reads.append(file.read_into(buffer.view, is_urgent=True))
            metrics, nbytes = runtime.metrics, file.nbytes
            counted(metrics, "disk_read", "activations", load.what, nbytes, load.reads)
        return load

    def _finish_write(self, batch: int) -> None:
        """Waits for the batch's write, if there is one, and releases the memory that it holds."""
        if batch in self._writes:
            write, nbytes = self._writes.pop(batch)
            self._runtime.ledger.release("host", nbytes)
            del self._arrays[batch]
            finish([write], _name(batch))

    def _forget(self, batch: int) -> None:
        self._finish_write(batch)
        if batch in self._reserved:
            self._runtime.ledger.release(*self._reserved.pop(batch))
        self._arrays.pop(batch, None)
        self._on_disk.pop(batch, None)

    def close(self) -> None:
        """Releases everything, including writes that nobody will read."""
        for write, nbytes in self._writes.values():
            write.exception()
            self._runtime.ledger.release("host", nbytes)
        self._writes.clear()
        for batch in list(self._reserved):
            self._forget(batch)
        self._version.clear()


def _name(batch: int) -> str:
    return f"activations of batch {batch}"
