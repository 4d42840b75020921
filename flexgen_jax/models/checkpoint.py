"""Sources of weights: safetensors files that are read in place, or seeded random numbers.

A source returns ranges of a tensor's rows, so that no tensor has to be in RAM whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import QUANTIZED, family_of, read_config
from flexgen_jax.models.family import Fields, Stored
from flexgen_jax.models.folder import INDEX, SINGLE, CheckpointError, read_json, weight_files
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.spec import TensorSpec, model_spec

FORMAT_VERSION = 1
"""Version of the bytes in offload folders, part of every fingerprint; raise it on a change."""

FINGERPRINT_SAMPLES = 256

MAX_HEADER_BYTES = 100 << 20

READ = ("F32", "F16", "BF16")
"""Names of dtypes in safetensors that are read."""

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

PIECE_BYTES = 16 << 20
"""Bytes that are compared at once."""

BUFFERS = (
    "inv_freq",
    "masked_bias",
    "position_ids",
    ".version",
    "._float_tensor",
    "attention.bias",
)
"""Ends of names of tensors that are passed over without a word: they are computed anew."""


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
    tensor that is neither part of the model nor known to be useless. Raises `CheckpointError`
    otherwise. notes: what a user should know about how the files were taken.
    """

    reads_at_once = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.config = read_folder_config(folder)
        self._identity = {path: _identity(path) for path in weight_files(folder)}
        self._files = {path: _open_shard(path) for path in self._identity}
        where = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self._refuse_quantized(where)
        self.config = self._as_stored(where)
        self._where = self._match(where)

    def _refuse_quantized(self, where: Mapping[str, Path]) -> None:
        """Raises `CheckpointError` for tensors in a format of a few bits, which a config may not
        mention."""
        for name, path in where.items():
            dtype = self._files[path].get_slice(name).get_dtype()
            is_packed = name.endswith((".qweight", ".weight_packed", ".weight_scale_inv"))
            if (name.endswith(".weight") and dtype not in READ) or is_packed:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is {dtype}; only {', '.join(READ)} are read: "
                    f"{QUANTIZED}"
                )

    def _as_stored(self, where: Mapping[str, Path]) -> ModelConfig:
        """Returns the config, with a head of its own where one is stored that differs from the
        embedding, although the config ties them. As in transformers."""
        family = family_of(self.config)
        names = [family.names[key] for key in ("embedding.tokens", "head.tokens")]
        stored = [family.full_name(str(name), where) for name in names]
        if not self.config.tied_head or None in stored:
            return self.config
        embedding, head = map(str, stored)
        if self._are_equal(embedding, head, where):
            return self.config
        self.notes.append(
            f"{head} differs from {embedding}, although config.json ties them: both are used as "
            'they are; "tie_word_embeddings": false in config.json says so'
        )
        return replace(self.config, tied_head=False)

    def _are_equal(self, one: str, other: str, where: Mapping[str, Path]) -> bool:
        """Returns whether two stored tensors are equal; reads them in pieces."""
        first, second = (self._files[where[name]].get_slice(name) for name in (one, other))
        shape = tuple(first.get_shape())
        if shape != tuple(second.get_shape()) or first.get_dtype() != second.get_dtype():
            return False
        rows = max(1, PIECE_BYTES // max(1, 4 * prod(shape[1:])))
        count = shape[0]
        pieces = (slice(row, min(row + rows, count)) for row in range(0, count, rows))
        return all(np.array_equal(_bytes(first[p]), _bytes(second[p])) for p in pieces)

    def _match(self, where: Mapping[str, Path]) -> dict[str, tuple[Stored, Path]]:
        """Returns for each tensor's key how it is stored, by its full name, and the file's path."""
        family = family_of(self.config)
        matched: dict[str, tuple[Stored, Path]] = {}
        for key, tensor in model_spec(self.config).tensors.items():
            layouts = family.layouts(tensor, self.config)
            named = [(stored, family.full_name(stored.name, where)) for stored in layouts]
            named.append((layouts[0], self._head_as_table(key, where)))
            stored, full = next((x for x in named if x[1] is not None), named[0])
            if full is None:
                raise self._missing(key, stored.name)
            matched[key] = (replace(stored, name=full), where[full])
            self._check_shape(full, where[full], stored.shape(tensor))
        self._pass_over({stored.name for stored, _ in matched.values()}, where)
        return matched

    def _head_as_table(self, key: str, where: Mapping[str, Path]) -> str | None:
        """Returns the head's stored name where it is tied, and the only one of both that is
        stored."""
        if key != "embedding.tokens" or not self.config.tied_head:
            return None
        family = family_of(self.config)
        return family.full_name(str(family.names["head.tokens"]), where)

    def _missing(self, key: str, name: str) -> CheckpointError:
        said = f"{self.folder}: tensor {name!r} is missing"
        if key == "head.tokens":
            said += (
                "; config.json says that the head has a table of its own: if it is the "
                'embedding\'s, set "tie_word_embeddings": true there'
            )
        return CheckpointError(said)

    def _pass_over(self, known: set[str], where: Mapping[str, Path]) -> None:
        """Notes which stored tensors are useless; raises `CheckpointError` for one of which that is
        not known."""
        family, count = family_of(self.config), len(self.config.pattern)
        tied = {family.names["head.tokens"]} if self.config.tied_head else set()
        useless = []
        for full in sorted(set(where) - known):
            bare = family.bare_name(full)
            if bare in tied:
                continue
            if not family.is_ignored(bare, count) and not family.is_ignored(full, count):
                raise CheckpointError(f"{where[full]}: tensor {full!r} is not part of the model")
            useless.append(full)
        told = [name for name in useless if not name.endswith(BUFFERS)]
        if told:
            kinds = dict.fromkeys(re.sub(r"\d+", "*", name) for name in told)
            shown = ", ".join(list(kinds)[:4]) + (", ..." if len(kinds) > 4 else "")
            self.notes.append(
                f"passed over {len(told)} tensors that generation does not need: {shown}"
            )

    def _check_shape(self, name: str, path: Path, shape: tuple[int, ...]) -> None:
        stored = self._files[path].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {tuple(stored.get_shape())}, "
                f"the config says {shape}"
            )
        if stored.get_dtype() not in READ:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {stored.get_dtype()}; only {', '.join(READ)} are read"
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


def _bytes(array: np.ndarray) -> np.ndarray:
    """Returns an array's bytes, in which NaN equals itself."""
    return np.ascontiguousarray(array).view(np.uint8)


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
        rows = slice(begin, begin + end - start)
        pieces.append(whole[rows] if stored.expert is None else whole[stored.expert, rows])
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


def read_folder_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face model folder?")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    try:
        config = read_config(raw)
        if Fields(raw).dtype is None and Fields(raw.get("text_config") or {}).dtype is None:
            config = replace(config, dtype=_stored_dtype(folder) or config.dtype)
        return config
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _stored_dtype(folder: Path) -> str | None:
    """Returns the dtype of the first weight that is stored, as transformers takes it where a config
    does not say; None if there are no weights."""
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        return None
    file = _open_shard(weight_files(folder)[0])
    dtypes = (file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    return next((DTYPE_NAMES[dtype] for dtype in dtypes if dtype in DTYPE_NAMES), None)


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
