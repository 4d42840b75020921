"""The tensors of safetensors files: plain tensors as numbers, quantized tensors in stored form."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from flexgen_jax.caches import cache_folder, read_cached, write_cached
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.formats.packed import PackedTensor

FINGERPRINT_SAMPLES = 256

MAX_HEADER_BYTES = 100 << 20

KINDS: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U32": np.uint32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "F4": np.uint8,
}
"""Types of arrays for the dtypes of safetensors; of floats that NumPy does not have, the bits."""


DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes by their names in safetensors."""


class Tensors(Protocol):
    """The tensors of a model's files, by the names that Hugging Face gives them.

    packed: those in few bits, which are also listed by the names of plain ones. notes: what a user
    should know about them.
    """

    packed: dict[str, PackedTensor]
    notes: list[str]

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of all tensors that are stored."""

    def path(self, name: str) -> Path:
        """Returns the file that has a tensor."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Returns a stored tensor's dtype as safetensors names it."""

    def rows(self, name: str) -> Any:
        """Returns a plain tensor as something whose rows can be taken by slices."""

    @property
    def files(self) -> Identity: ...


class Identity(Protocol):
    """Identifies a model's tensors, so that their content is known again."""

    def with_times(self) -> list[Any]:
        """Returns a quick identity, which changes with the tensors or their files' times."""

    def contents(self) -> list[Any]:
        """Returns a fingerprint of the content, which may require reading all of it."""


class FileIdentity(NamedTuple):
    """The version of a file. changed_ns: the time of the last change of its content or its times,
    which no program can set."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        status = path.stat()
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Files:
    """The files of a model, which identify its content."""

    def __init__(self, paths: list[Path]) -> None:
        self._identity = {path: FileIdentity.of(path) for path in paths}

    @property
    def paths(self) -> list[Path]:
        return list(self._identity)

    def with_times(self) -> list[Any]:
        """Returns names, sizes, times and samples; raises `CheckpointError` if a file was replaced:
        reads still go to the opened file."""
        entries = []
        for path, identity in sorted(self._identity.items()):
            if FileIdentity.of(path)[:3] != identity[:3]:
                raise CheckpointError(f"{path} changed after it was opened; start again")
            entries.append((path.name, *identity[1:], self._samples[path]))
        return entries

    def contents(self) -> list[Any]:
        """Returns names, sizes and hashes of whole files, equal for copied files."""
        return sorted(
            (path.name, identity.size, _whole_hash(path, identity))
            for path, identity in self._identity.items()
        )

    @cached_property
    def _samples(self) -> dict[Path, str]:
        return {path: _sampled_hash(path) for path in self._identity}


class Stored(NamedTuple):
    """Where a tensor is in a file: its dtype's name, its shape, and its first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


class SafeTensors:
    """The tensors of safetensors files; see `Tensors`. Raises `CheckpointError` for files that are
    broken."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.packed: dict[str, PackedTensor] = {}
        self.notes: list[str] = []
        self.files = Files(list(paths))
        self._opened = {path: _open_shard(path) for path in self.files.paths}
        self._bytes = {path: np.memmap(path, np.uint8, "r") for path in self._opened}
        self._stored: dict[str, Stored] = {}
        for path in self._opened:
            self._stored |= _entries(path)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def path(self, name: str) -> Path:
        return self._stored[name].path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        return self._stored[name].dtype

    def rows(self, name: str) -> Any:
        try:
            return self._opened[self.path(name)].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.path(name)}: cannot read tensor {name!r}: {error}"
            ) from None

    def array(self, name: str) -> np.ndarray:
        """Returns a tensor's elements in the file, or the bits of those that NumPy does not
        have."""
        stored = self._stored[name]
        dtype = np.dtype(KINDS[stored.dtype])
        size = dtype.itemsize * prod(stored.shape)
        whole = self._bytes[stored.path][stored.begin : stored.begin + size]
        array: np.ndarray = whole.view(dtype).reshape(stored.shape)
        return array


def _entries(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a file that `safe_open` has found to be whole."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    return {
        name: Stored(
            path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _whole_hash(path: Path, identity: FileIdentity) -> str:
    """Returns the SHA-256 of a file, which is read once for each of its versions."""
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    cached = cache_folder("hashes") / f"{name}.json"
    cached_hash = read_cached(cached)
    if cached_hash is None or cached_hash[:-1] != [*identity]:
        with open(path, "rb") as file:
            cached_hash = [*identity, hashlib.file_digest(file, "sha256").hexdigest()]
        if FileIdentity.of(path) == identity:  # nobody has written to it meanwhile
            write_cached(cached, cached_hash)
    sha: str = cached_hash[-1]
    return sha


def _sampled_hash(path: Path) -> str:
    """Returns the SHA-256 of the file's first MiB and of samples all over the file.

    Reading all of a large checkpoint at every start would take minutes. Samples tell two training
    runs apart even where a file system keeps no times.
    """
    size, sha = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        sha.update(file.read(1 << 20))
        for sample in range(FINGERPRINT_SAMPLES):
            file.seek(size * (sample + 1) // (FINGERPRINT_SAMPLES + 1))
            sha.update(file.read(4096))
    return sha.hexdigest()


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {_what_is_wrong(path) or error}") from None


def _what_is_wrong(path: Path) -> str | None:
    """Returns how a file is broken, e.g. which tensor is cut off, or None if nothing is found."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size):
            return "corrupt: it does not begin with a safetensors header"
        try:
            header = json.loads(file.read(length))
            ends = {
                name: 8 + length + entry["data_offsets"][1]
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return "corrupt: its safetensors header cannot be read"
    cut = sorted((end, name) for name, end in ends.items() if end > size)
    return f"truncated: tensor {cut[0][1]!r} ends after the end of the file" if cut else None
