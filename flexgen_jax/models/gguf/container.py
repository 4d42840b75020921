"""The container of GGUF files (ggml's `docs/gguf.md`): metadata by name, and where tensors are."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.blocks import BLOCKS, NAMES

MAGIC, VERSIONS = b"GGUF", (2, 3)

NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Formats of `struct` for the types of metadata."""

STRING, ARRAY = 8, 9

MAX_DIMENSIONS = 4

MAX_ENTRIES = 1 << 20
"""Tensors, entries of metadata, and elements of an array of texts: four times the size of large
vocabularies."""


class Entry(NamedTuple):
    """A tensor: the number of its type, its shape (the last axis is contiguous), and its bytes."""

    kind: int
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class GgufFile:
    """A GGUF file, whose header is read when it is opened; raises `CheckpointError` if that is
    broken, or if a tensor goes past the file's end.

    metadata: by name; arrays are lists, of numbers NumPy's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, "u1")
        self._at, self._view = 0, memoryview(cast("Any", self.bytes))
        try:
            self.metadata, self.tensors = self._header()
        except (struct.error, IndexError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path}: corrupt: its header cannot be read: {error}") from None
        if int(self.metadata.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{path}: it is one part of a split file; join the parts first: llama-gguf-split "
                f"--merge {path.name} whole.gguf"
            )
        for name, entry in self.tensors.items():
            if entry.begin + entry.nbytes > self.bytes.size:
                raise CheckpointError(
                    f"{path}: truncated: tensor {name!r} ends after the end of the file"
                )

    def _header(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if bytes(self.bytes[:4]) != MAGIC:
            raise CheckpointError(f"{self.path}: it is not a GGUF file")
        self._at = 4
        version = self._number("<I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not supported, only {VERSIONS}; "
                "convert the model again"
            )
        tensors, pairs = self._number("<Q"), self._number("<Q")
        self._check_count(tensors + pairs, MAX_ENTRIES)
        metadata = {self._string(): self._value(self._number("<I")) for _ in range(pairs)}
        entries = [self._entry() for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        return metadata, {
            name: entry._replace(begin=start + entry.begin) for name, entry in entries
        }

    def _check_count(self, count: int, most: int | None = None) -> None:
        """Raises `ValueError` for more things than the file has bytes for, or than `most`."""
        if count > self.bytes.size or (most is not None and count > most):
            limit = "" if most is None or count <= most else f", and {most} at most are read"
            raise ValueError(f"it declares {count} entries{limit}")

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(kind, self._view, self._at)
        self._at += struct.calcsize(kind)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        self._check_count(length)
        text = bytes(self._view[self._at : self._at + length])
        self._at += length
        if len(text) < length:
            raise ValueError("it is cut off")
        return text.decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(NUMBERS[kind]) if kind in NUMBERS else self._unknown(kind)
        inner, count = self._number("<I"), self._number("<Q")
        self._check_count(count)
        if inner in (STRING, ARRAY):
            self._check_count(count, MAX_ENTRIES)
            return [self._value(inner) for _ in range(count)]
        if inner not in NUMBERS:
            self._unknown(inner)
        item = np.dtype(NUMBERS[inner].replace("<?", "?"))
        values = self.bytes[self._at : self._at + count * item.itemsize].view(item)
        self._at += count * item.itemsize
        return np.array(values)

    def _unknown(self, kind: int) -> None:
        raise ValueError(f"type {kind} of metadata is not known")

    def _entry(self) -> tuple[str, Entry]:
        name, dimensions = self._string(), self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        tensor_type, begin = self._number("<I"), self._number("<Q")
        if tensor_type not in NAMES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unknown type {tensor_type}"
            )
        block = BLOCKS.get(NAMES[tensor_type])
        if block is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {NAMES[tensor_type]}, which is not "
                f"supported; supported: {', '.join(BLOCKS)}"
            )
        if shape[-1] % block.elements:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]} elements, which blocks of "
                f"{block.elements} ({NAMES[tensor_type]}) do not divide"
            )
        return name, Entry(tensor_type, shape, begin, prod(shape) // block.elements * block.nbytes)
