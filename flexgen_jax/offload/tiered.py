"""Tensors in their home tiers, in memory or on disk, and their way to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from flexgen_jax.layers.quantization import Kept, assemble
from flexgen_jax.models.formats.format import Leaf
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.weight_source import numpy_dtype
from flexgen_jax.offload.disk.folder import DiskArray
from flexgen_jax.offload.metrics import Content
from flexgen_jax.offload.prefetch import Load, ended_on_error
from flexgen_jax.offload.tiers import HostBuffer, Memories, writable_view
from flexgen_jax.offload.watcher import counted
from flexgen_jax.policy.policy import TIERS, Tier
from flexgen_jax.schedule.ledger import Ledger

Stored = tuple[str, tuple[int, ...], np.dtype]
"""The name, shape and dtype of one stored array (leaf) in the offload folder."""


def stored_leaf(key: str, leaf: Leaf) -> Stored:
    """Returns how a leaf of the tensor `key` is stored."""
    return f"{key}.{leaf.name}" if leaf.name else key, leaf.shape, numpy_dtype(leaf.kind)


class TieredTensors:
    """Tensors by key: arrays on the device and the host, files on disk.

    content: their content, for the metrics; cached: keys of tensors on disk that are read through
    the page cache, because RAM is free; may be changed while nothing is loaded.
    """

    def __init__(self, memories: Memories, ledger: Ledger, content: Content) -> None:
        self._memories, self._ledger, self._content = memories, ledger, content
        self.cached: frozenset[str] = frozenset()
        self._arrays: dict[str, Kept] = {}
        self._files: dict[str, list[DiskArray]] = {}
        self._storages: dict[str, Storage] = {}
        self._reserved: dict[str, tuple[Tier, int]] = {}

    def reserve(self, key: str, storage: Storage, tier: Tier) -> None:
        """Reserves a tensor's bytes in its home; raises `BudgetError` if there is no room."""
        self._ledger.reserve(tier, storage.nbytes)
        self._reserved[key] = tier, storage.nbytes
        self._storages[key] = storage

    def make(
        self, key: str, storage: Storage, tier: Tier, fill: Callable[[list[np.ndarray]], object]
    ) -> None:
        """Makes a tensor in memory; fill: writes its leaves, which are zeros on the host."""
        self.reserve(key, storage, tier)
        arrays = [
            self._memories.host_array(leaf.shape, numpy_dtype(leaf.kind)) for leaf in storage.leaves
        ]
        fill([writable_view(array) for array in arrays])
        whole = assemble(storage, arrays)
        if tier == "device":
            whole = jax.block_until_ready(self._memories.to_device(whole, self._content, key))
        self._arrays[key] = whole

    def keep_files(self, key: str, files: list[DiskArray]) -> None:
        """Keeps a tensor that is on disk, a file for each leaf, and whose bytes are reserved."""
        self._files[key] = files

    def __getitem__(self, key: str) -> Kept:
        """A tensor that is in memory."""
        return self._arrays[key]

    def load(
        self, what: str, keys: Mapping[Any, str], buffers: Sequence[HostBuffer]
    ) -> Load[dict[Any, Kept]]:
        """Starts gathering some tensors, by the names that `keys` gives them; those on disk are
        read into the buffers, in their order."""
        load: Load[dict[Any, Kept]] = Load(self._content, what, {})
        free_buffers = iter(buffers)
        with ended_on_error(load.reads):
            for name, key in keys.items():
                if key in self._files:
                    buffer = next(free_buffers)
                    self._read(key, buffer, load.reads)
                    load.tree[name] = assemble(self._storages[key], buffer.arrays)
                else:
                    load.tree[name] = self._arrays[key]
        if load.reads:
            nbytes = sum(buffer.layout.nbytes for buffer in buffers)
            metrics = self._memories.metrics
            counted(metrics, "disk_read", self._content, what, nbytes, load.reads)
        return load

    def _read(self, key: str, buffer: HostBuffer, reads: list[Any]) -> None:
        """Starts reading every leaf of a tensor into a buffer; adds the futures to `reads`."""
        for file, view in zip(self._files[key], buffer.views, strict=True):
            file = replace(file, direct=False) if key in self.cached else file
            reads.append(file.read_into(view))

    def used(self) -> dict[Tier, int]:
        """Returns the bytes of all tensors, by home."""
        used_bytes = dict.fromkeys(TIERS, 0)
        for tier, nbytes in self._reserved.values():
            used_bytes[tier] += nbytes
        return used_bytes

    def drop(self, key: str) -> None:
        """Forgets a tensor; its files stay."""
        self._ledger.release(*self._reserved.pop(key))
        self._arrays.pop(key, None)
        self._files.pop(key, None)
        del self._storages[key]

    def close(self) -> None:
        """Forgets all tensors."""
        for key in list(self._reserved):
            self.drop(key)
