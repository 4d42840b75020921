"""Hidden states between layers, each batch's in the tier that the policy gives it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flexgen_jax.offload.context import Runtime
from flexgen_jax.offload.disk import DiskArray
from flexgen_jax.offload.transfer import Load, counted, finish
from flexgen_jax.policy.policy import Tier


class Activations:
    """The hidden state of every batch, from one layer's output to the next one's input."""

    def __init__(self, runtime: Runtime, homes: dict[tuple[int, int], Tier]) -> None:
        self._runtime = runtime
        self._homes = homes
        self._arrays: dict[int, jax.Array] = {}
        self._files: dict[tuple[int, tuple[int, ...]], DiskArray] = {}
        self._stored: dict[int, tuple[DiskArray, Any, jax.Array]] = {}
        self._taken: dict[int, tuple[Tier, int]] = {}
        self._version: dict[int, tuple[int, int]] = {}

    def version(self, batch: int) -> tuple[int, int] | None:
        """(token, layer) whose output is ready to be loaded."""
        return self._version.get(batch)

    def put(self, token: int, layer: int, batch: int, hidden: jax.Array) -> None:
        """Takes the output of `layer`; what goes to disk waits for the computation."""
        home = self._homes[layer, batch]
        self._forget(batch)
        self._runtime.ledger.take(home, hidden.nbytes)
        self._taken[batch] = (home, hidden.nbytes)
        if home == "disk":
            self._write(batch, hidden)
        else:
            self._arrays[batch] = (
                hidden if home == "device" else self._runtime.memories.to_host(hidden)
            )
        self._version[batch] = (token, layer)

    def _write(self, batch: int, hidden: jax.Array) -> None:
        file = self._files.get((batch, hidden.shape))
        if file is None:
            name = f"hidden-{batch}-{hidden.shape[1]}"
            file = self._runtime.disk().scratch_array(
                name, hidden.shape, hidden.shape, self._runtime.numpy_dtype
            )
            self._files[batch, hidden.shape] = file
        host = self._runtime.memories.to_host(hidden)
        future = counted(
            self._runtime.metrics, "disk_write", hidden.nbytes, file.write(np.asarray(host))
        )
        self._stored[batch] = (file, future, host)

    def start(self, batch: int) -> Load[jax.Array]:
        """Starts bringing the batch's hidden state to the device."""
        what = f"activations of batch {batch}"
        if batch not in self._stored:
            return Load(what, self._arrays[batch])
        file, written, _ = self._stored[batch]
        finish([written], what)
        buffer = self._runtime.pool.take(file.shape, file.dtype)
        future = file.read_into(buffer.view)
        read = counted(self._runtime.metrics, "disk_read", file.nbytes, future)
        return Load(what, buffer.array, [read], [buffer])

    def _forget(self, batch: int) -> None:
        if batch in self._taken:
            self._runtime.ledger.give(*self._taken.pop(batch))
        self._arrays.pop(batch, None)
        if batch in self._stored:
            finish([self._stored.pop(batch)[1]], f"activations of batch {batch}")

    def close(self) -> None:
        for batch in list(self._taken):
            self._forget(batch)
        self._version.clear()
