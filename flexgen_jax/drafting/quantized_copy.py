"""Writes a checkpoint in this package's own formats of 4 or 8 bits, once for all later runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from flexgen_jax.drafting.input_sizes import input_sizes, windows_of_text
from flexgen_jax.layers.encoding import encode_rows
from flexgen_jax.models.checkpoint import Checkpoint
from flexgen_jax.models.convert import copy_others
from flexgen_jax.models.file_writing import Entry, write_json, write_safetensors
from flexgen_jax.models.folder import INDEX, CheckpointError, read_object, weight_files
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.own_reader import DTYPES, METHOD
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensors import SafeTensors
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.progress import Progress

PIECE = 1 << 22
"""Elements that are encoded at once."""


class QuantizedCopy:
    """A copy of a folder whose large matrices are in an own format.

    bits: 4 or 8; sizes: the mean squares of kernels' inputs, by key, as `input_sizes` returns them:
    each error is weighted by the root of its input's mean square. Matrices that are stored for
    all experts together stay in 16 bits. Raises `CheckpointError` for a source that is not a folder
    of plain numbers.
    """

    def __init__(
        self, source: Checkpoint, bits: int, sizes: Mapping[str, np.ndarray] | None = None
    ) -> None:
        if source.container is not None or source.config.published is not None:
            raise CheckpointError(
                f"{source.folder} is already quantized; --weight-bits needs 16-bit "
                "numbers in safetensors"
            )
        self._source, self._bits, self._sizes = source, bits, sizes or {}
        self._tensors = SafeTensors(weight_files(source.folder))
        spec = model_spec(source.config).tensors
        self._large = {
            name: spec[key] for name, key in source.first_keys().items() if not spec[key].is_small
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(self._tensors.array(name).nbytes for name in self._tensors)

    def write(self, target: Path, progress: Callable[[int], object] = lambda done: None) -> None:
        """Writes the folder; every file appears whole or not at all, config.json last. progress:
        called with the bytes that are read."""
        folder = self._source.folder
        if target.resolve() == folder.resolve():
            raise CheckpointError(f"{target}: choose a folder other than the model's own")
        target.mkdir(parents=True, exist_ok=True)
        weight_map: dict[str, str] = {}
        files = weight_files(folder)
        for path in files:
            names = [name for name in self._tensors if self._tensors.path(name) == path]
            entries = [entry for name in names for entry in self._entries(name)]
            write_safetensors(target / path.name, entries, self._content(names, progress))
            weight_map.update(dict.fromkeys((entry.name for entry in entries), path.name))
        if len(files) > 1:
            write_json(target / INDEX, {"metadata": {}, "weight_map": weight_map})
        copy_others(folder, target, but=("config.json",))
        quantization = {"quant_method": METHOD, "version": 1, "bits": self._bits}
        config = read_object(folder / "config.json") | {"quantization_config": quantization}
        write_json(target / "config.json", config)

    def _is_packed(self, name: str) -> bool:
        return name in self._large and len(self._tensors.shape(name)) == 2

    def _storage(self, name: str) -> Storage:
        shape, tensor = self._tensors.shape(name), self._large[name]
        return Storage(shape, "bfloat16", own(self._bits, tensor.is_table))

    def _entries(self, name: str) -> Iterator[Entry]:
        """Yields what a stored tensor becomes."""
        if not self._is_packed(name):
            yield Entry(name, self._tensors.dtype(name), self._tensors.shape(name))
            return
        for leaf in self._storage(name).leaves:
            yield Entry(f"{name}.{leaf.name}", DTYPES[leaf.kind], leaf.shape)
        yield Entry(f"{name}.shape", "I64", (2,))

    def _content(self, names: Iterable[str], progress: Callable[[int], object]) -> Iterator[bytes]:
        """Yields the bytes of the converted tensors."""
        for name in names:
            yield from self._bytes(name)
            progress(self._tensors.array(name).nbytes)

    def _bytes(self, name: str) -> Iterator[bytes]:
        array = self._tensors.array(name)
        if not self._is_packed(name):
            yield array.tobytes()
            return
        weights = self._sizes.get(self._large[name].key)
        # The root of the mean square: the mean square itself fits the text of the calibration too
        # closely to help on others.
        error_weights = None if weights is None else jnp.sqrt(jnp.asarray(weights))
        storage, count = self._storage(name), max(1, PIECE // array.shape[1])
        pieces: list[list[np.ndarray]] = []
        for start in range(0, len(array), count):
            rows = jnp.asarray(array[start : start + count])
            leaves = encode_rows(rows, replace(storage, shape=rows.shape), error_weights)
            pieces.append([np.asarray(leaf) for leaf in leaves])
        for arrays in zip(*pieces, strict=True):
            yield np.concatenate(arrays).tobytes()
        yield np.array(array.shape, np.int64).tobytes()


def quantize_folder(
    source: Path, target: Path, bits: int, text: str | None, progress: Progress
) -> float:
    """Writes a model's folder in fewer bits; returns the bits of a weight on average.

    text: the weights of quantization errors, None for equal weights; see `input_sizes`. Raises
    `UserError` for a model that cannot be read or written so.
    """
    checkpoint = Checkpoint(source)
    sizes = None
    if text is not None:
        tokenizer = Tokenizer(source, checkpoint.config.bos_id)
        ids = windows_of_text(tokenizer.encode(text), checkpoint.config.max_positions)
        with progress.counting("calibrating", checkpoint.config.num_layers) as begin:
            sizes = input_sizes(checkpoint, ids, begin)
    copy = QuantizedCopy(checkpoint, bits, sizes)
    with progress.placing(copy.nbytes, "writing weights") as done:
        copy.write(target, done)
    written = sum(path.stat().st_size for path in weight_files(target))
    return 8 * written / model_spec(checkpoint.config).num_parameters
