"""The container of GGUF files (ggml's `docs/gguf.md`): metadata by name, and where tensors are."""

from __future__ import annotations

import re
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


PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
"""The name of a part of a split file."""


class Entry(NamedTuple):
    """A tensor: the number of its type, its shape (the last axis is contiguous), its bytes, and the
    number of the file that has them."""

    kind: int
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    part: int = 0


class GgufFile:
    """A GGUF file, or all parts of a split one, of which any names the model. Headers are read when
    it is opened; raises `CheckpointError` if one is broken, if a part is missing, or if a tensor
    goes past its file's end.

    metadata: by name; arrays are lists, of numbers NumPy's. paths: of all parts. is_part: whether
    only this part is read.
    """

    def __init__(self, path: Path, is_part: bool = False) -> None:
        self.path, self.paths = path, [path]
        self.bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, "u1")
        self._at, self._view = 0, memoryview(cast("Any", self.bytes))
        try:
            self.metadata, self.tensors = self._header()
        except (struct.error, IndexError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path}: corrupt: its header cannot be read: {error}") from None
        for name, entry in self.tensors.items():
            if entry.begin + entry.nbytes > self.bytes.size:
                raise CheckpointError(
                    f"{path}: truncated: tensor {name!r} ends after the end of the file"
                )

        self._contents = [self.bytes]
        count = int(self.metadata.get("split.count", 1))
        if count > 1 and not is_part:
            self._join(count)

    def _join(self, count: int) -> None:
        """Opens all parts of a split file. The first has the metadata."""
        match = PART.fullmatch(self.path.name)
        if match is None or int(match[2]) != count:
            raise CheckpointError(
                f"{self.path}: it is one of {count} parts, whose names must end with "
                f"-00001-of-{count:05d}.gguf"
            )
        names = [f"{match[1]}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
        self.paths = [self.path.with_name(name) for name in names]
        missing = [path.name for path in self.paths if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path}: the part {missing[0]} is missing; get it into the same folder"
            )
        parts = [GgufFile(path, is_part=True) for path in self.paths]
        self.path, self.metadata = self.paths[0], parts[0].metadata
        self._contents = [part.bytes for part in parts]
        self.tensors = {
            name: entry._replace(part=number)
            for number, part in enumerate(parts)
            for name, entry in part.tensors.items()
        }
        total = int(self.metadata.get("split.tensors.count", len(self.tensors)))
        if len(self.tensors) != total:
            raise CheckpointError(
                f"{self.path}: its parts have {len(self.tensors)} tensors instead of {total}; get "
                "them again"
            )

    def content(self, entry: Entry) -> np.ndarray:
        """Returns the bytes of the file that has a tensor."""
        return self._contents[entry.part]

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
