"""Writes a checkpoint in this package's own formats of 4 or 8 bits, once for all later runs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from flexgen_jax.engine.input_sizes import input_sizes, windows_of
from flexgen_jax.layers.encoding import encode_rows
from flexgen_jax.models.checkpoint import Checkpoint
from flexgen_jax.models.convert import copy_others
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

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"} | DTYPES
"""Safetensors' names of dtypes."""


class QuantizedCopy:
    """A copy of a folder whose large matrices are in an own format.

    bits: 4 or 8; sizes: the mean squares of kernels' inputs, by key, as `input_sizes` returns them:
    the error of a weight counts by the root of the one that meets it. Matrices that are stored for
    all experts together stay in 16 bits. Raises `CheckpointError` for a source that is not a folder
    of plain numbers.
    """

    def __init__(
        self, source: Checkpoint, bits: int, sizes: Mapping[str, np.ndarray] | None = None
    ) -> None:
        if source.container is not None or source.config.published is not None:
            raise CheckpointError(
                f"{source.folder} has its weights in few bits already; --weight-bits is for plain "
                "numbers in safetensors"
            )
        self._source, self._bits, self._sizes = source, bits, sizes or {}
        self._tensors = SafeTensors(source.folder)
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
            raise CheckpointError(f"{target}: write to another folder than the model's own")
        target.mkdir(parents=True, exist_ok=True)
        where: dict[str, str] = {}
        files = weight_files(folder)
        for path in files:
            names = [name for name in self._tensors if self._tensors.path(name) == path]
            where.update(dict.fromkeys(self._write(target / path.name, names, progress), path.name))
        if len(files) > 1:
            self._put(target / INDEX, {"metadata": {}, "weight_map": where})
        copy_others(folder, target, but=("config.json",))
        quantization = {"quant_method": METHOD, "version": 1, "bits": self._bits}
        config = read_object(folder / "config.json") | {"quantization_config": quantization}
        self._put(target / "config.json", config)

    def _put(self, path: Path, content: Mapping[str, Any]) -> None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(content, indent=2))
        part.replace(path)

    def _write(
        self, path: Path, names: list[str], progress: Callable[[int], object]
    ) -> dict[str, Any]:
        """Writes a file with some stored tensors; returns its header."""
        header: dict[str, Any] = {}
        at = 0
        for name in names:
            for own_name, shape, dtype in self._described(name):
                end = at + int(np.prod(shape)) * np.dtype(dtype).itemsize
                kind = NAMES[np.dtype(dtype).name]
                header[own_name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
                at = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)  # so that tensors are aligned
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                self._write_tensor(file, name)
                progress(self._tensors.array(name).nbytes)
        part.replace(path)
        return header

    def _is_packed(self, name: str) -> bool:
        return name in self._large and len(self._tensors.shape(name)) == 2

    def _storage(self, name: str) -> Storage:
        shape, tensor = self._tensors.shape(name), self._large[name]
        return Storage(shape, "bfloat16", own(self._bits, tensor.is_table))

    def _described(self, name: str) -> Iterator[tuple[str, tuple[int, ...], np.dtype]]:
        """Yields the names, shapes and dtypes of what a stored tensor becomes."""
        if not self._is_packed(name):
            array = self._tensors.array(name)
            yield name, array.shape, array.dtype
            return
        for leaf in self._storage(name).leaves:
            yield f"{name}.{leaf.name}", leaf.shape, jnp.dtype(leaf.kind)
        yield f"{name}.shape", (2,), np.dtype(np.int64)

    def _write_tensor(self, file: BinaryIO, name: str) -> None:
        array = self._tensors.array(name)
        if not self._is_packed(name):
            file.write(np.ascontiguousarray(array).view(np.uint8).tobytes())
            return
        weights = self._sizes.get(self._large[name].key)
        # The root, by measurement: with the mean squares themselves, perplexity on other text than
        # that of the calibration is no better than without any (docs/accuracy.md).
        asked = None if weights is None else jnp.sqrt(jnp.asarray(weights))
        storage, count = self._storage(name), max(1, PIECE // array.shape[1])
        pieces: list[list[np.ndarray]] = []
        for start in range(0, len(array), count):
            rows = jnp.asarray(array[start : start + count])
            leaves = encode_rows(rows, replace(storage, shape=rows.shape), asked)
            pieces.append([np.asarray(leaf) for leaf in leaves])
        for parts in zip(*pieces, strict=True):
            file.write(np.ascontiguousarray(np.concatenate(parts)).view(np.uint8).tobytes())
        file.write(np.array(array.shape, np.int64).tobytes())


def quantize_folder(
    source: Path, target: Path, bits: int, text: str | None, progress: Progress
) -> float:
    """Writes a model's folder in fewer bits; returns the bits of a weight on average.

    text: by which errors of weights count, None if all count alike; see `input_sizes`. Raises
    `UserError` for a model that cannot be read or written so.
    """
    checkpoint = Checkpoint(source)
    sizes = None
    if text is not None:
        tokenizer = Tokenizer(source, checkpoint.config.bos_id)
        ids = windows_of(tokenizer.encode(text), checkpoint.config.max_positions)
        with progress.counting("calibrating", checkpoint.config.num_layers) as begin:
            sizes = input_sizes(checkpoint, ids, begin)
    copy = QuantizedCopy(checkpoint, bits, sizes)
    with progress.placing(copy.nbytes, "writing weights") as done:
        copy.write(target, done)
    written = sum(path.stat().st_size for path in weight_files(target))
    return 8 * written / model_spec(checkpoint.config).num_parameters
