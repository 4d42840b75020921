"""Sources of weights: safetensors files that are read in place, or seeded random numbers.

A source returns ranges of a tensor's rows, so that no tensor has to be in RAM whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from flexgen_jax.errors import UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import family_of, read_config
from flexgen_jax.models.family import Stored
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.spec import TensorSpec, model_spec

FORMAT_VERSION = 1
"""Version of the bytes in offload folders, part of every fingerprint; raise it on a change."""

FINGERPRINT_SAMPLES = 256

MAX_HEADER_BYTES = 100 << 20


class CheckpointError(UserError):
    """A checkpoint that cannot be read; the message names the file and the tensor."""


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class WeightSource(Protocol):
    """Anything that can fill a model's tensors."""

    config: ModelConfig

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        """Returns rows [start, stop) of the tensor's first axis, in `dtype`."""
        ...

    def fingerprint(self, dtype: str) -> str:
        """Returns a name for these weights in `dtype`, by which later runs find stored copies.

        It changes when the files are modified or replaced, even by equal ones.
        """
        ...

    def content(self, dtype: str) -> str:
        """Returns a name for the content of these weights in `dtype`, equal for copied files."""
        ...

    @property
    def reads_at_once(self) -> int:
        """How many threads may read, and gain from it."""


class DummyWeights:
    """Random weights of the right shapes. A tensor's numbers depend on seed and key alone."""

    ROWS = 256  # numbers are drawn in pieces of this many rows, whatever range is read
    reads_at_once = 8

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self._seed = seed

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        target = numpy_dtype(dtype)
        if len(tensor.shape) == 1:
            fill = 1.0 if tensor.path.endswith("scale") else 0.0
            return np.full(stop - start, fill, target)
        first = start // self.ROWS
        pieces = [
            self._draw(tensor, piece, target) for piece in range(first, -(-stop // self.ROWS))
        ]
        offset = first * self.ROWS
        return np.concatenate(pieces)[start - offset : stop - offset]

    def _draw(self, tensor: TensorSpec, piece: int, dtype: np.dtype) -> np.ndarray:
        """Draws uniform numbers with standard deviation 0.02, OPT's own initial scale."""
        name = f"{self._seed}/{tensor.key}/{piece}".encode()
        seed = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
        generator = np.random.Generator(np.random.SFC64(seed))
        rows = min(self.ROWS, tensor.shape[0] - piece * self.ROWS)
        numbers = generator.random((rows, *tensor.shape[1:]), np.float32)
        numbers -= np.float32(0.5)
        numbers *= np.float32(0.02 * 12**0.5)
        return numbers.astype(dtype)

    def fingerprint(self, dtype: str) -> str:
        return digest("dummy", FORMAT_VERSION, self.config, self._seed, dtype)

    def content(self, dtype: str) -> str:
        return self.fingerprint(dtype)


class Checkpoint:
    """A Hugging Face folder's safetensors, single or sharded, read lazily and in place.

    Opening it checks all headers: every tensor of the model must be there with its shape, and no
    tensor that is not part of the model. Raises `CheckpointError` otherwise.
    """

    reads_at_once = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_folder_config(folder)
        self._identity = {path: _identity(path) for path in _shards(folder)}
        self._files = {path: _open_shard(path) for path in self._identity}
        where = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self._where = self._match(where)

    def _match(self, where: Mapping[str, Path]) -> dict[str, tuple[Stored, Path]]:
        """Returns for each tensor's key how it is stored, by its full name, and the file's path."""
        family = family_of(self.config)
        found: dict[str, tuple[Stored, Path]] = {}
        for key, tensor in model_spec(self.config).tensors.items():
            stored = family.stored(tensor, self.config)
            name = stored.name
            full = next((p + name for p in family.prefixes if p + name in where), None)
            if full is None:
                raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
            found[key] = (replace(stored, name=full), where[full])
            rows = tensor.shape[0] if stored.total is None else stored.total
            self._check_shape(full, where[full], (rows, *tensor.shape[1:]))
        tied = {family.names["head.tokens"]} if self.config.tied_head else set()
        known = {stored.name for stored, _ in found.values()}
        for full in sorted(set(where) - known):
            bare = next((full[len(p) :] for p in family.prefixes if full.startswith(p)), full)
            if bare not in tied and not family.is_ignored(bare):
                raise CheckpointError(f"{where[full]}: tensor {full!r} is not part of the model")
        return found

    def _check_shape(self, name: str, path: Path, shape: tuple[int, ...]) -> None:
        found = self._files[path].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {tuple(found.get_shape())}, "
                f"the config says {shape}"
            )
        if found.get_dtype() not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                f"{path}: tensor {name!r} is {found.get_dtype()}; only F32, F16 and BF16 are read"
            )

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        stored, path = self._where[tensor.key]
        try:
            whole = self._files[path].get_slice(stored.name)
            rows: np.ndarray = _rows_of(whole, stored, start, stop)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot read tensor {stored.name!r}: {error}") from None
        return rows.astype(numpy_dtype(dtype), copy=False)

    def fingerprint(self, dtype: str) -> str:
        files = []
        for path, identity in sorted(self._identity.items()):
            if _identity(path) != identity:  # reads still go to the file that was opened
                raise CheckpointError(f"{path} was replaced since it was opened; start again")
            _, *size_and_time = identity
            files.append((path.name, *size_and_time, self._samples[path]))
        return digest("checkpoint", FORMAT_VERSION, self.config, files, dtype)

    def content(self, dtype: str) -> str:
        files = [(p.name, size, self._samples[p]) for p, (_, size, _) in self._identity.items()]
        return digest("content", FORMAT_VERSION, self.config, sorted(files), dtype)

    @cached_property
    def _samples(self) -> dict[Path, str]:
        return {path: _sampled_hash(path) for path in self._identity}


def _rows_of(whole: Any, stored: Stored, start: int, stop: int) -> np.ndarray:
    """Reads rows [start, stop) of a tensor that is stored as `stored` says."""
    unit, first = stored.unit, stored.first
    if unit is None:
        found: np.ndarray = whole[start:stop]
        return found
    pieces = []
    while start < stop:  # unit by unit
        number, at = divmod(start, unit)
        end = min(stop, (number + 1) * unit)
        begin = first + number * stored.stride + at
        pieces.append(whole[begin : begin + end - start])
        start = end
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _sampled_hash(path: Path) -> str:
    """Returns the SHA-256 of the file's first MiB and of samples all over the file.

    Reading all of a large checkpoint at every start would take minutes. Two training runs differ
    in nearly every tensor, so samples tell them apart even if their files' times are equal.
    """
    size, found = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        found.update(file.read(1 << 20))
        for sample in range(FINGERPRINT_SAMPLES):
            file.seek(size * (sample + 1) // (FINGERPRINT_SAMPLES + 1))
            found.update(file.read(4096))
    return found.hexdigest()


def digest(*parts: Any) -> str:
    """Returns a short name for some values: 24 hex digits of the SHA-256 of their `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None


def read_folder_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face model folder?")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    try:
        return read_config(raw)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _shards(folder: Path) -> list[Path]:
    """Returns the folder's safetensors files; an index may name only files inside the folder."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return [single]
        hint = ""
        if any(folder.glob("*.bin")):
            hint = f"; it has .bin files: run `flexgen-jax convert {folder} DST` first"
        raise CheckpointError(
            f"{folder} has no model.safetensors{hint or '; .bin files have to be converted first'}"
        )
    raw = read_json(index)
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    return [safe_member(folder, name, index) for name in sorted(set(names.values()))]


def safe_member(folder: Path, name: str, index: Path) -> Path:
    """Returns `folder` / `name`, a file that `index` names.

    Raises `CheckpointError` if the file is missing or the name points outside the folder.
    """
    path = folder / name
    # The path is not resolved: files in the hub's cache are links to a blob store elsewhere.
    if Path(name).name != name or name in (".", ".."):
        raise CheckpointError(f"{index} names the file {name!r}, which is outside its folder")
    if not path.is_file():
        raise CheckpointError(f"{index} names {name!r}, which is missing")
    return path


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
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "corrupt: its safetensors header cannot be read"
    cut = sorted((end, name) for name, end in ends.items() if end > size)
    return f"truncated: tensor {cut[0][1]!r} ends after the end of the file" if cut else None
