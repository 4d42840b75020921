"""Weights in their home tiers, and their way to the device layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flexgen_jax.checkpoint import WeightSource
from flexgen_jax.layers.spec import LayerSpec, TensorSpec, unique_tensors
from flexgen_jax.offload.context import Runtime
from flexgen_jax.offload.disk import DiskArray, row_ranges
from flexgen_jax.offload.tiers import HostBuffer, writable_view
from flexgen_jax.offload.transfer import Load, counted
from flexgen_jax.policy.policy import Tier

Progress = Callable[[int], object]
"""Called with the bytes that were placed."""


class WeightStore:
    """Holds every tensor in the tier the placement gives it.

    cached: keys of tensors on disk that are read through the page cache, for RAM is free.
    """

    def __init__(
        self,
        runtime: Runtime,
        source: WeightSource,
        tiers: dict[str, Tier],
        cached: frozenset[str] = frozenset(),
    ) -> None:
        self._runtime = runtime
        self._source = source
        self._tiers = tiers
        self._cached = cached
        self._arrays: dict[str, jax.Array] = {}
        self._files: dict[str, DiskArray] = {}
        self._taken = dict.fromkeys(("device", "host", "disk"), 0)
        # Buffers of the model's two ends have shapes of their own, so they would lie idle while
        # the decoder layers run: what is read into them stays for the block's other tokens.
        self._kept: dict[str, tuple[HostBuffer, Any]] = {}

    def place(self, progress: Progress) -> None:
        """Brings every tensor to its home tier, holding a few chunks beside them in RAM."""
        tensors = list(unique_tensors(self._runtime.layers).values())
        for tensor in tensors:
            if self._tiers[tensor.key] != "disk":
                self._place_in_memory(tensor)
                progress(tensor.nbytes(self._runtime.dtype))
        on_disk = [tensor for tensor in tensors if self._tiers[tensor.key] == "disk"]
        if on_disk:
            self._place_on_disk(on_disk, progress)

    def _place_in_memory(self, tensor: TensorSpec) -> None:
        runtime = self._runtime
        tier = self._tiers[tensor.key]
        self._take(tier, tensor)
        array = runtime.memories.host_array(tensor.shape, runtime.numpy_dtype)
        view = writable_view(array)
        start = 0
        for piece in self._pieces(tensor):
            view[start : start + len(piece)] = piece
            start += len(piece)
        if tier == "device":
            array = runtime.memories.to_device(array)
            array.block_until_ready()
        self._arrays[tensor.key] = array

    def _place_on_disk(self, tensors: list[TensorSpec], progress: Progress) -> None:
        runtime = self._runtime
        folder = runtime.disk().weights(self._source.fingerprint(runtime.dtype))
        with folder.locked():
            for tensor in tensors:
                self._take("disk", tensor)
                what = (tensor.key, tensor.shape, runtime.numpy_dtype)
                if not folder.has(*what):
                    folder.write(*what, self._pieces(tensor))
                file = folder.open(*what, is_cached=tensor.key in self._cached)
                self._files[tensor.key] = file
                progress(file.nbytes)

    def _take(self, tier: Tier, tensor: TensorSpec) -> None:
        nbytes = tensor.nbytes(self._runtime.dtype)
        self._runtime.ledger.take(tier, nbytes)
        self._taken[tier] += nbytes

    def _pieces(self, tensor: TensorSpec) -> Iterator[np.ndarray]:
        for start, stop in row_ranges(tensor.shape, self._runtime.numpy_dtype.itemsize):
            yield self._source.read(tensor, start, stop, self._runtime.dtype)

    def start(self, layer: LayerSpec) -> Load[dict[str, jax.Array]]:
        """Starts bringing a layer's tensors together; what is on disk is read into the ring."""
        load: Load[dict[str, jax.Array]] = Load(f"weights of {layer.name}", {})
        with load.abandoned_on_error(self._runtime.pool):
            for tensor in layer.tensors:
                if tensor.key in self._files:
                    buffer, read = self._read(tensor.key, layer.kind != "decoder")
                    load.buffers.append(buffer)
                    load.reads.append(read)
                    load.tree[tensor.path] = buffer.array
                else:
                    load.tree[tensor.path] = self._arrays[tensor.key]
        return load

    def _read(self, key: str, is_end: bool) -> tuple[HostBuffer, Any]:
        if key in self._kept:
            self._kept[key][0].holders += 1
            return self._kept[key]
        runtime, file = self._runtime, self._files[key]
        buffer = runtime.pool.take(file.shape, file.dtype)
        read = counted(runtime.metrics, "disk_read", file.nbytes, file.read_into(buffer.view))
        if is_end:
            buffer.holders += 1
            self._kept[key] = (buffer, read)
        return buffer, read

    def end_block(self) -> None:
        """Gives back the buffers that were kept during the block; all reads are done."""
        for buffer, _ in self._kept.values():
            self._runtime.pool.give(buffer, None)
        self._kept.clear()

    def close(self) -> None:
        for tier, nbytes in self._taken.items():
            self._runtime.ledger.give(tier, nbytes)  # type: ignore[arg-type]
        self._arrays.clear()
        self._files.clear()
        self._kept.clear()
