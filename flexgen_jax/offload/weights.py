"""The weights in their home tiers, and their way to the device, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

import jax
import numpy as np

from flexgen_jax.layers.quantization import Kept, assemble, encode
from flexgen_jax.models.checkpoint import WeightSource, numpy_dtype
from flexgen_jax.models.spec import LayerSpec, TensorSpec
from flexgen_jax.models.storage import Leaf, Storage
from flexgen_jax.offload.context import Runtime
from flexgen_jax.offload.disk.folder import DiskArray, WeightFolder, row_ranges
from flexgen_jax.offload.prefetch import Load
from flexgen_jax.offload.tiers import HostBuffer, writable_view
from flexgen_jax.offload.watcher import counted
from flexgen_jax.policy.policy import Tier

Progress = Callable[[int], object]
"""Called with the number of bytes that were placed."""


Stored = tuple[str, tuple[int, ...], np.dtype]
"""The name, shape and dtype of one stored array (leaf) in the offload folder."""


def _stored(tensor: TensorSpec, leaf: Leaf) -> Stored:
    name = f"{tensor.key}.{leaf.name}" if leaf.name else tensor.key
    return name, leaf.shape, numpy_dtype(leaf.dtype)


class WeightStore:
    """Holds every tensor in the tier that the placement gives it.

    cached: keys of tensors on disk that are read through the page cache, because RAM is free; may
        be changed between blocks.
    """

    def __init__(
        self,
        runtime: Runtime,
        source: WeightSource,
        tiers: dict[str, Tier],
    ) -> None:
        self._runtime = runtime
        self._source = source
        self._tiers = tiers
        self.cached: frozenset[str] = frozenset()
        self._arrays: dict[str, Kept] = {}
        self._files: dict[str, list[DiskArray]] = {}
        self._reserved = dict.fromkeys(("device", "host", "disk"), 0)
        # Embedding and head have buffer shapes of their own, which would lie idle while the decoder
        # layers run: what is read into them stays for the block's other tokens.
        self._kept: dict[tuple[str, int], tuple[HostBuffer, Any]] = {}

    def place(self, progress: Progress) -> None:
        """Brings every tensor to its home tier; besides the tensors, a few chunks at a time are in
        RAM."""
        tensors = list(self._runtime.spec.tensors.values())
        for tensor in tensors:
            if self._tiers[tensor.key] != "disk":
                self._place_in_memory(tensor)
                progress(self._storage(tensor).nbytes)
        on_disk = [tensor for tensor in tensors if self._tiers[tensor.key] == "disk"]
        if on_disk:
            self._place_on_disk(on_disk, progress)

    def _place_in_memory(self, tensor: TensorSpec) -> None:
        runtime = self._runtime
        tier = self._tiers[tensor.key]
        self._reserve(tier, tensor)
        storage = self._storage(tensor)
        arrays = [
            runtime.memories.host_array(leaf.shape, numpy_dtype(leaf.dtype))
            for leaf in storage.leaves
        ]
        self._fill(tensor, [writable_view(array) for array in arrays])
        whole = assemble(storage, arrays)
        if tier == "device":
            whole = jax.block_until_ready(runtime.memories.to_device(whole, "weights", tensor.key))
        self._arrays[tensor.key] = whole

    def _storage(self, tensor: TensorSpec) -> Storage:
        return self._runtime.formats.weight(tensor)

    def _fill(self, tensor: TensorSpec, leaves: list[np.ndarray]) -> None:
        """Fills the tensor's stored leaves, which must be zero, a few chunks at a time; if the
        tensor is quantized, the device does that."""
        storage = self._storage(tensor)
        if storage.bits == 16:
            start = 0
            for piece in self._pieces(tensor):
                leaves[0][start : start + len(piece)] = piece
                start += len(piece)
            return
        packed, scale, minimum = leaves
        length, group = storage.plane_length, storage.group_size
        itemsize = self._runtime.numpy_dtype.itemsize
        for start, stop in row_ranges(storage.shape, itemsize, group):
            piece = self._source.read(tensor, start, stop, storage.dtype)
            part = replace(storage, shape=piece.shape)
            codes, *values = (np.asarray(array) for array in encode(piece, part))
            groups = slice(start // group, -(-stop // group))
            scale[groups], minimum[groups] = values
            for index in range(start // length, -(-stop // length)):  # usually one
                low, high = max(start, index * length), min(stop, (index + 1) * length)
                rows = codes[low - start : high - start] << (storage.bits * index)
                packed[low - index * length : high - index * length] |= rows

    def _place_on_disk(self, tensors: list[TensorSpec], progress: Progress) -> None:
        runtime = self._runtime
        dtype, suffix = runtime.formats.dtype, runtime.formats.suffix
        folder = runtime.disk().weights(self._source.fingerprint(dtype) + suffix)
        with folder.locked():
            for tensor in tensors:
                self._reserve("disk", tensor)
                stored = [_stored(tensor, leaf) for leaf in self._storage(tensor).leaves]
                missing = [not folder.has(*what) for what in stored]
                if any(missing):
                    self._write(folder, tensor, stored, missing)
                self._files[tensor.key] = [folder.open(*what) for what in stored]
                progress(self._storage(tensor).nbytes)

    def _write(
        self, folder: WeightFolder, tensor: TensorSpec, stored: list[Stored], missing: list[bool]
    ) -> None:
        """Writes a tensor's missing leaves to disk. A quantized tensor is in RAM whole meanwhile;
        of others, only a few chunks are."""
        if len(stored) == 1:
            folder.write(*stored[0], self._pieces(tensor))
            return
        leaves = [np.zeros(shape, dtype) for _, shape, dtype in stored]
        self._fill(tensor, leaves)
        for what, leaf in compress(zip(stored, leaves, strict=True), missing):
            ranges = row_ranges(leaf.shape, leaf.dtype.itemsize)
            folder.write(*what, (leaf[start:stop] for start, stop in ranges))

    def _reserve(self, tier: Tier, tensor: TensorSpec) -> None:
        nbytes = self._storage(tensor).nbytes
        self._runtime.ledger.reserve(tier, nbytes)
        self._reserved[tier] += nbytes

    def _pieces(self, tensor: TensorSpec) -> Iterator[np.ndarray]:
        for start, stop in row_ranges(tensor.shape, self._runtime.numpy_dtype.itemsize):
            yield self._source.read(tensor, start, stop, self._runtime.formats.dtype)

    def start(self, layer: LayerSpec) -> Load[dict[str, Kept]]:
        """Starts gathering a layer's tensors; those on disk are read into pooled host buffers."""
        load: Load[dict[str, Kept]] = Load("weights", f"weights of {layer.name}", {})
        reads: list[tuple[int, Any]] = []
        with load.abandoned_on_error(self._runtime.pool):
            for tensor in layer.tensors:
                if tensor.key in self._files:
                    arrays = self._read(tensor.key, layer.kind != "decoder", load, reads)
                    load.tree[tensor.path] = assemble(self._storage(tensor), arrays)
                else:
                    load.tree[tensor.path] = self._arrays[tensor.key]
        if reads:
            sizes, futures = zip(*reads, strict=True)
            metrics = self._runtime.metrics
            counted(metrics, "disk_read", "weights", load.what, sum(sizes), futures)
        return load

    def _read(
        self, key: str, is_end: bool, load: Load[Any], reads: list[tuple[int, Any]]
    ) -> list[jax.Array]:
        """Starts reading every leaf of a tensor into pooled host buffers, as a part of `load`.

        is_end: whether the tensor belongs to the embedding or the head, whose buffers are kept.
        Adds to `reads` the bytes and the future of each read that was not under way already.
        """
        runtime, arrays = self._runtime, []
        for name, file in enumerate(self._files[key]):
            file = replace(file, direct=False) if key in self.cached else file
            if (key, name) in self._kept:
                buffer, read = self._kept[key, name]
                buffer.holders += 1
            else:
                buffer = runtime.pool.acquire(file.shape, file.dtype)
                read = file.read_into(buffer.view)
                reads.append((file.nbytes, read))
                if is_end:
                    buffer.holders += 1
                    self._kept[key, name] = (buffer, read)
            load.buffers.append(buffer)
            load.reads.append(read)
            arrays.append(buffer.array)
        return arrays

    def end_block(self) -> None:
        """Releases the buffers that were kept during the block; all reads are done by then."""
        for buffer, _ in self._kept.values():
            self._runtime.pool.release(buffer, None)
        self._kept.clear()

    def close(self) -> None:
        for tier, nbytes in self._reserved.items():
            self._runtime.ledger.release(tier, nbytes)  # type: ignore[arg-type]
        self._arrays.clear()
        self._files.clear()
        self._kept.clear()
