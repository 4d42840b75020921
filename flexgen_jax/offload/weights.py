"""The weights in their home tiers, and their way to the device, layer by layer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import compress

import numpy as np

from flexgen_jax.layers.encoding import encode_rows
from flexgen_jax.layers.quantization import Kept, encode
from flexgen_jax.models.config import DTYPES
from flexgen_jax.models.formats.decoding import leaves_in_lanes
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.tensor_spec import TensorSpec
from flexgen_jax.models.weight_source import WeightSource
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import OffloadFolder, WeightFolder, row_ranges
from flexgen_jax.offload.prefetch import Load
from flexgen_jax.offload.tiered import Stored, TieredTensors, stored_leaf
from flexgen_jax.offload.tiers import HostBuffer
from flexgen_jax.policy.parts import WeightsPart
from flexgen_jax.policy.policy import Tier
from flexgen_jax.schedule.ledger import Ledger

Progress = Callable[[int], object]
"""Called with the number of bytes that were placed."""


WRITERS = 8
"""Files that are written at the same time."""

PENDING_BYTES = 32 << 20
"""The most bytes of leaves that wait to be written, except of one larger tensor."""


class Written:
    """Writes leaves of tensors while the next ones are made: those of experts are so small that to
    make a file takes longer than to fill it."""

    def __init__(self, folder: WeightFolder) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(WRITERS, "flexgen-write")
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._bytes = 0

    def __enter__(self) -> Written:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for all futures, and raises the first error."""
        try:
            while self._pending and kind is None:
                self._finish_first()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def make_room(self, nbytes: int) -> None:
        """Waits until `nbytes` more bytes fit the limit, or until nothing else is pending."""
        while self._pending and self._bytes + nbytes > PENDING_BYTES:
            self._finish_first()

    def add(self, what: Stored, leaf: np.ndarray) -> None:
        """Writes a leaf."""
        ranges = row_ranges(leaf.shape, leaf.dtype.itemsize)
        pieces = (leaf[start:stop] for start, stop in ranges)
        self._pending.append((leaf.nbytes, self._pool.submit(self._folder.write, *what, pieces)))
        self._bytes += leaf.nbytes

    def _finish_first(self) -> None:
        nbytes, write = self._pending.popleft()
        write.result()
        self._bytes -= nbytes


class WeightStore:
    """Holds every tensor of a model in the tier that the placement gives it.

    folder: None if the placement puts no tensor on disk.
    """

    def __init__(
        self,
        device: Device,
        source: WeightSource,
        tiers: Mapping[str, Tier],
        ledger: Ledger,
        folder: OffloadFolder | None = None,
    ) -> None:
        self._spec, self._formats = device.spec, device.formats
        self._tensors = TieredTensors(device.memories, ledger, "weights")
        self._source = source
        self._tiers = tiers
        self._folder = folder
        self._memories = device.memories
        # Tensors in host memory as arrays of the CPU, by key.
        self._of_cpu: dict[str, Kept] = {}

    @property
    def cached(self) -> frozenset[str]:
        """Keys of tensors on disk that are read through the page cache; may be changed between
        blocks."""
        return self._tensors.cached

    @cached.setter
    def cached(self, keys: frozenset[str]) -> None:
        self._tensors.cached = keys

    def place(self, progress: Progress) -> None:
        """Brings every tensor to its home tier; besides the tensors, a few chunks at a time are in
        RAM."""
        tensors = list(self._spec.tensors.values())
        for tensor in tensors:
            tier, storage = self._tiers[tensor.key], self._storage(tensor)
            if tier != "disk":
                self._tensors.make(tensor.key, storage, tier, partial(self._fill, tensor))
                if tensor.has_host_copy and not self._memories.unified:
                    self._tensors.make(
                        host_copy(tensor.key), storage, "host", partial(self._fill, tensor)
                    )
                progress(storage.nbytes)
        on_disk = [tensor for tensor in tensors if self._tiers[tensor.key] == "disk"]
        if on_disk:
            self._place_on_disk(on_disk, progress)

    def _storage(self, tensor: TensorSpec) -> Storage:
        return self._formats.weight(tensor)

    def _fill(self, tensor: TensorSpec, leaves: list[np.ndarray]) -> None:
        """Fills the tensor's stored leaves, which must be zero, a few chunks at a time; if the
        tensor is quantized, the device does that."""
        storage = self._storage(tensor)
        if storage.format is None:
            for start, stop, piece in self._pieces(tensor):
                leaves[0][start:stop] = piece
        elif tensor.published is not None:
            self._fill_published(tensor, leaves)
        elif storage.axis == 0:
            self._fill_packed(tensor, leaves)
        else:
            self._fill_own(tensor, leaves)

    def _fill_own(self, tensor: TensorSpec, leaves: list[np.ndarray]) -> None:
        """Fills the leaves of a tensor that is grouped along its input, by rows."""
        storage = self._storage(tensor)
        for start, stop, piece in self._pieces(tensor):
            arrays = encode_rows(piece, replace(storage, shape=piece.shape))
            for array, whole in zip(arrays, leaves, strict=True):
                whole[start:stop] = np.asarray(array)

    def _fill_published(self, tensor: TensorSpec, leaves: list[np.ndarray]) -> None:
        """Fills the leaves with those of the model's files."""
        storage = self._storage(tensor)
        multiple = storage.packing.rows or tensor.shape[0]
        for start, stop in row_ranges(tensor.shape, DTYPES[self._formats.dtype], multiple):
            piece = replace(storage, shape=(stop - start, *storage.shape[1:]))
            arrays = leaves_in_lanes(self._source.read_packed(tensor, start, stop), piece)
            for leaf, array, whole in zip(storage.leaves, arrays, leaves, strict=True):
                if leaf.rows:
                    whole[start // leaf.rows : -(-stop // leaf.rows)] = array
                else:
                    whole[...] = array

    def _fill_packed(self, tensor: TensorSpec, leaves: list[np.ndarray]) -> None:
        """Fills the leaves of a tensor that is grouped along its rows."""
        storage = self._storage(tensor)
        packed, scale, minimum = leaves
        length, group = storage.plane_length, storage.group_size
        for start, stop, piece in self._pieces(tensor, group):
            piece_storage = replace(storage, shape=piece.shape)
            codes, *values = (np.asarray(array) for array in encode(piece, piece_storage))
            groups = slice(start // group, -(-stop // group))
            scale[groups], minimum[groups] = values
            for index in range(start // length, -(-stop // length)):  # usually one
                begin, end = max(start, index * length), min(stop, (index + 1) * length)
                rows = codes[begin - start : end - start] << (storage.bits * index)
                packed[begin - index * length : end - index * length] |= rows

    def _place_on_disk(self, tensors: list[TensorSpec], progress: Progress) -> None:
        assert self._folder is not None, "the placement puts tensors on disk"
        dtype, suffix = self._formats.dtype, self._formats.suffix
        folder = self._folder.weights(self._source.fingerprint(dtype) + suffix)
        with folder.locked(), Written(folder) as written:
            for tensor in tensors:
                self._tensors.reserve(tensor.key, self._storage(tensor), "disk")
                stored = [stored_leaf(tensor.key, x) for x in self._storage(tensor).leaves]
                missing = [not folder.has(*array_key) for array_key in stored]
                if any(missing):
                    self._write(folder, tensor, stored, missing, written)
                progress(self._storage(tensor).nbytes)
        for tensor in tensors:
            stored = [stored_leaf(tensor.key, leaf) for leaf in self._storage(tensor).leaves]
            self._tensors.keep_files(tensor.key, [folder.open(*array_key) for array_key in stored])

    def _write(
        self,
        folder: WeightFolder,
        tensor: TensorSpec,
        stored: list[Stored],
        missing: list[bool],
        written: Written,
    ) -> None:
        """Writes a tensor's missing leaves to disk. A quantized tensor is in RAM whole meanwhile;
        of others, only a few chunks are."""
        if len(stored) == 1:
            folder.write(*stored[0], (piece for *_, piece in self._pieces(tensor)))
            return
        written.make_room(self._storage(tensor).nbytes)
        leaves = [np.zeros(shape, dtype) for _, shape, dtype in stored]
        self._fill(tensor, leaves)
        for array_key, leaf in compress(zip(stored, leaves, strict=True), missing):
            written.add(array_key, leaf)

    def _pieces(
        self, tensor: TensorSpec, multiple: int = 1
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yields (start, stop, rows) of consecutive ranges of a tensor's rows, whose starts are
        multiples of `multiple`. Some are read ahead, where the source gains from it."""
        dtype = tensor.dtype or self._formats.dtype
        count = min(self._source.reads_at_once, os.cpu_count() or 1)
        with ThreadPoolExecutor(count, "flexgen-place") as pool:
            reads: deque[tuple[int, int, Future[np.ndarray]]] = deque()
            for start, stop in row_ranges(tensor.shape, DTYPES[dtype], multiple):
                read = pool.submit(self._source.read, tensor, start, stop, dtype)
                reads.append((start, stop, read))
                if len(reads) == count:
                    begin, end, first = reads.popleft()
                    yield begin, end, first.result()
            for begin, end, first in reads:
                yield begin, end, first.result()

    def routing(self, layer: LayerSpec) -> dict[str, Kept]:
        """Returns the tensors of a layer's router, by path."""
        return {tensor.path: self._tensors[tensor.key] for tensor in layer.routing}

    def expert_of_cpu(
        self, layer: LayerSpec, number: int, loaded: Mapping[str, Kept]
    ) -> dict[str, Kept]:
        """Returns an expert's tensors as the CPU's arrays, by path in the expert.

        loaded: those of the layer that are in host memory, by path; they may be in buffers.
        """
        return {
            tensor.own_path: self._as_of_cpu(tensor, loaded)
            for tensor in layer.expert_tensors[number]
        }

    def _as_of_cpu(self, tensor: TensorSpec, loaded: Mapping[str, Kept]) -> Kept:
        if self._tiers[tensor.key] == "disk":
            return self._memories.of_cpu(loaded[tensor.path])
        if tensor.key not in self._of_cpu:
            array = self._tensors[host_copy(tensor.key) if tensor.has_host_copy else tensor.key]
            self._of_cpu[tensor.key] = self._memories.of_cpu(array)
        return self._of_cpu[tensor.key]

    def resident(self, layer: LayerSpec) -> dict[str, Kept]:
        """Returns a layer's tensors, all in memory, by path."""
        return {tensor.path: self._tensors[tensor.key] for tensor in layer.tensors}

    def fetch(self, part: WeightsPart, buffers: Sequence[HostBuffer]) -> Load[dict[str, Kept]]:
        """Starts gathering a part's tensors, by path; those on disk are read into the buffers."""
        name = f"weights of {self._spec.layers[part.layer].name}"
        if len(part.keys) == 1:
            name += f", {self._spec.tensors[part.keys[0]].path}"
        keys = {self._spec.tensors[key].path: key for key in part.keys}
        return self._tensors.load(name, keys, buffers)

    def close(self) -> None:
        self._of_cpu.clear()
        self._tensors.close()


def host_copy(key: str) -> str:
    """Returns the key of a tensor's copy in host memory; see `TensorSpec.has_host_copy`."""
    return f"{key} on the host"
