"""Weights in safetensors and GGUF files, which are read in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import family_of, quantization_of, read_config
from flexgen_jax.models.family import Fields, Stored
from flexgen_jax.models.folder import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    INDEX,
    SINGLE,
    CheckpointError,
    read_json,
    weight_files,
    what_it_has,
)
from flexgen_jax.models.formats.decoding import decoded
from flexgen_jax.models.formats.format import Format, with_own_rows
from flexgen_jax.models.formats.packed import PackedTensor, packed_rows
from flexgen_jax.models.formats.published import Published, of_any_expert
from flexgen_jax.models.formats.readers import ALWAYS_BESIDE, packed_tensors
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.gguf.config import config_of
from flexgen_jax.models.gguf.container import GgufFile
from flexgen_jax.models.gguf.tensors import GgufTensors
from flexgen_jax.models.given import GivenTensors
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import TensorSpec
from flexgen_jax.models.tensors import DTYPE_NAMES, SafeTensors, Tensors
from flexgen_jax.models.weight_source import FORMAT_VERSION, digest, numpy_dtype

READ = ("F32", "F16", "BF16")
"""Names of dtypes in safetensors that are read."""

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
"""Ends of names of tensors that are passed over without a word: they are computed again."""


Opened = tuple[ModelConfig, Tensors, Mapping[str, Any]]
"""A model's config, its tensors, and how the config says that they are quantized."""


class Checkpoint:
    """A model's files, single or sharded, read lazily and in place.

    Opening it checks all headers: every tensor of the model must be there with its shape, and no
    tensor that is neither part of the model nor known to be useless. Raises `CheckpointError`
    otherwise. Tensors that are published in few bits have their formats in the config.

    folder: a Hugging Face folder, or a GGUF file; container: the latter, opened; notes: what a user
    should know about how the files were taken.
    """

    reads_at_once = 1

    def __init__(self, folder: Path, given: Opened | None = None) -> None:
        """given: arrays in memory instead of files; `folder` is then only a name."""
        self.folder = folder
        self.container = GgufFile(folder) if given is None and folder.is_file() else None
        if given is not None:
            opened = given
        elif self.container is not None:
            opened = _opened_gguf(self.container)
        else:
            opened = _opened_folder(folder)
        self.config, self._tensors, options = opened
        self.notes = list(self._tensors.notes)
        if given is None and (folder / ADAPTER).is_file():
            has_weights = (folder / ADAPTER_WEIGHTS).is_file()
            end = "applied when the model runs" if has_weights else "not applied: it has no weights"
            self.notes.append(f"the adapter (LoRA) in {ADAPTER} is {end}")
        self.config = self._as_stored()
        self._where = self._match()
        self.config = replace(self.config, published=self._published(options))

    @classmethod
    def of_arrays(cls, name: str, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> Checkpoint:
        """Returns a model of a program's own tensors; see `GivenTensors`.

        raw: the config, as in `config.json`.
        """
        try:
            config = read_config(raw)
        except ConfigError as error:
            raise CheckpointError(f"{name}: {error}") from None
        return cls(Path(name), (config, GivenTensors(name, tensors), {}))

    def _has(self, name: str) -> bool:
        """Returns whether a tensor is stored, in few bits perhaps."""
        return name in self._tensors or name in self._tensors.packed

    def _full_name(self, name: str) -> str | None:
        """Returns a tensor's stored name, possibly with a prefix; None if it is not."""
        return family_of(self.config).full_name(name, self._has)

    def _as_stored(self) -> ModelConfig:
        """Returns the config, with a head of its own where one is stored that differs from the
        embedding, although the config ties them. As in transformers."""
        family = family_of(self.config)
        names = [family.names[key] for key in ("embedding.tokens", "head.tokens")]
        stored = [self._full_name(str(name)) for name in names]
        if not self.config.tied_head or None in stored:
            return self.config
        embedding, head = map(str, stored)
        if self._are_equal(embedding, head):
            return self.config
        self.notes.append(
            f"{head} differs from {embedding}, although config.json ties them: both are used as "
            'they are; "tie_word_embeddings": false in config.json says so'
        )
        return replace(self.config, tied_head=False)

    def _are_equal(self, one: str, other: str) -> bool:
        """Returns whether two stored tensors are equal; reads them in pieces."""
        tensors = self._tensors
        if one in tensors.packed or other in tensors.packed:
            return False
        shape = tensors.shape(one)
        if shape != tensors.shape(other) or tensors.dtype(one) != tensors.dtype(other):
            return False
        first, second = tensors.rows(one), tensors.rows(other)
        rows = max(1, PIECE_BYTES // max(1, 4 * prod(shape[1:])))
        count = shape[0]
        pieces = (slice(row, min(row + rows, count)) for row in range(0, count, rows))
        return all(np.array_equal(_bytes(first[p]), _bytes(second[p])) for p in pieces)

    def _match(self) -> dict[str, Stored]:
        """Returns for each tensor's key how it is stored, by its full name."""
        family = family_of(self.config)
        matched: dict[str, Stored] = {}
        for key, tensor in model_spec(self.config).tensors.items():
            layouts = family.layouts(tensor, self.config)
            named = [(stored, self._full_name(stored.name)) for stored in layouts]
            named.append((layouts[0], self._head_as_table(key)))
            stored, full = self._as_shaped(named, tensor)
            if full is None:
                raise self._missing(key, stored.name)
            is_plain = full not in self._tensors.packed
            stored = replace(stored, name=full, is_transposed=stored.is_transposed and is_plain)
            matched[key] = stored
            self._check_shape(full, stored.shape(tensor))
        self._pass_over({stored.name for stored in matched.values()})
        return matched

    def first_keys(self) -> dict[str, str]:
        """Returns the key of the first tensor that is in each stored one, by its full name."""
        keys: dict[str, str] = {}
        for key, stored in self._where.items():
            keys.setdefault(stored.name, key)
        return keys

    def _as_shaped(
        self, named: list[tuple[Stored, str | None]], tensor: TensorSpec
    ) -> tuple[Stored, str | None]:
        """Returns the first layout whose name is stored, one with the stored shape before others:
        the same experts are stored transposed and not."""
        stored_names = [(stored, full) for stored, full in named if full is not None]
        fitting = (
            (stored, full)
            for stored, full in stored_names
            if full in self._tensors and self._tensors.shape(full) == stored.shape(tensor)
        )
        return next(fitting, stored_names[0] if stored_names else named[0])

    def _head_as_table(self, key: str) -> str | None:
        """Returns the head's stored name where it is tied, and the only one of both that is
        stored."""
        if key != "embedding.tokens" or not self.config.tied_head:
            return None
        return self._full_name(str(family_of(self.config).names["head.tokens"]))

    def _missing(self, key: str, name: str) -> CheckpointError:
        message = f"{self.folder}: tensor {name!r} is missing"
        if key == "head.tokens":
            message += (
                "; config.json says that the head has a table of its own: if it is the "
                'embedding\'s, set "tie_word_embeddings": true there'
            )
        return CheckpointError(message)

    def _pass_over(self, known: set[str]) -> None:
        """Notes which stored tensors are useless; raises `CheckpointError` if it is unknown."""
        family, count = family_of(self.config), len(self.config.pattern)
        tied = {family.names["head.tokens"]} if self.config.tied_head else set()
        packed = self._tensors.packed
        used_names = {
            array_name for name in known & set(packed) for array_name in packed[name].names
        }
        useless = []
        for full in sorted(set(self._tensors) - known - used_names):
            bare = family.bare_name(full)
            if bare in tied or full.endswith(ALWAYS_BESIDE):
                continue
            if not family.is_ignored(bare, count) and not family.is_ignored(full, count):
                path = self._tensors.path(full)
                raise CheckpointError(f"{path}: tensor {full!r} is not part of the model")
            useless.append(full)
        reported = [name for name in useless if not name.endswith(BUFFERS)]
        if reported:
            patterns = dict.fromkeys(re.sub(r"\d+", "*", name) for name in reported)
            shown = ", ".join(list(patterns)[:4]) + (", ..." if len(patterns) > 4 else "")
            self.notes.append(
                f"passed over {len(reported)} tensors that generation does not need: {shown}"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        packed = self._tensors.packed.get(name)
        stored = self._tensors.shape(name) if packed is None else packed.shape
        path = self._tensors.path(name if packed is None else packed.names[0])
        if stored != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {stored}, but the config requires {shape}"
            )
        if packed is None and self._tensors.dtype(name) not in READ:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {self._tensors.dtype(name)}; only {', '.join(READ)} "
                "are read, and formats of few bits whose scales are beside"
            )

    def _published(self, options: Mapping[str, Any]) -> Published | None:
        """Returns the formats of the tensors that are in few bits, None if none is."""
        formats: dict[str, Format] = {}
        count, sizes = 0, {4: 0, 8: 0}
        for key, tensor in model_spec(self.config).tensors.items():
            packing = self._format_of(tensor)
            if packing is None:
                continue
            first_packing = formats.setdefault(of_any_expert(key), packing)
            if first_packing != packing:
                name = self._where[key].name
                raise CheckpointError(
                    f"{self.folder}: tensor {name!r} has a different format than in other "
                    "experts of the layer, which is not supported"
                )
            count += 1
            sizes[4 if packing.bits <= 4 else 8] += tensor.size
        if not formats:
            return None
        names = {p.METHOD for p in self._tensors.packed.values() if hasattr(p, "METHOD")}
        method = str(options.get("quant_method") or " and ".join(sorted(names)))
        bits = 4 if sizes[4] >= sizes[8] else 8
        return Published(method.upper(), bits, tuple(sorted(formats.items())))

    def _format_of(self, tensor: TensorSpec) -> Format | None:
        """Returns a tensor's published format; None of a plain one, and
        of a small one, which is decoded."""
        stored = self._where[tensor.key]
        packed = self._tensors.packed.get(stored.name)
        if packed is None or tensor.is_small:
            return None
        return with_own_rows(packed.format) if _cuts_rows(stored, packed) else packed.format

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        stored = self._where[tensor.key]
        packed = self._tensors.packed.get(stored.name)
        if packed is not None:
            return self._decoded(packed, stored, tensor, start, stop).astype(numpy_dtype(dtype))
        whole = self._tensors.rows(stored.name)
        try:
            rows: np.ndarray = _joined(
                [_part_of(whole, rows, stored) for rows in stored.ranges(start, stop)]
            )
        except (SafetensorError, OSError) as error:
            path = self._tensors.path(stored.name)
            raise CheckpointError(f"{path}: cannot read tensor {stored.name!r}: {error}") from None
        return rows.astype(numpy_dtype(dtype), copy=False)

    def _decoded(
        self, packed: PackedTensor, stored: Stored, tensor: TensorSpec, start: int, stop: int
    ) -> np.ndarray:
        """Returns rows of a tensor in few bits as fp32."""
        pieces = []
        for rows in stored.ranges(start, stop):
            leaves = packed_rows(packed, rows, stored.expert)
            shape = (rows.stop - rows.start, packed.shape[-1])
            storage = Storage(shape, "float32", with_own_rows(packed.format))
            pieces.append(decoded(leaves, storage)[:: rows.step].reshape(-1, *tensor.shape[1:]))
        return _joined(pieces)

    def read_packed(self, tensor: TensorSpec, start: int, stop: int) -> list[np.ndarray]:
        stored = self._where[tensor.key]
        packed = self._tensors.packed[stored.name]
        if _cuts_rows(stored, packed):
            pieces = [
                packed_rows(packed, rows, stored.expert) for rows in stored.ranges(start, stop)
            ]
        else:
            pieces = [
                packed.read(rows.start, rows.stop, stored.expert)
                for rows in stored.ranges(start, stop)
            ]
        if stored.unit == 1:
            pieces = [_every(leaves, stored.stride) for leaves in pieces]
        if len(pieces) == 1:
            return pieces[0]
        leaves = Storage(tensor.shape, "float32", self._format_of(tensor)).leaves
        return [
            np.concatenate(arrays) if leaf.rows else arrays[0]
            for leaf, arrays in zip(leaves, zip(*pieces, strict=True), strict=True)
        ]

    def fingerprint(self, dtype: str) -> str:
        files = self._tensors.files.with_times()
        return digest("checkpoint", FORMAT_VERSION, self.config, files, dtype)

    def content(self, dtype: str) -> str:
        files = self._tensors.files.contents()
        return digest("content", FORMAT_VERSION, self.config, files, dtype)


def _opened_folder(folder: Path) -> Opened:
    config, tensors = read_folder_config(folder), SafeTensors(weight_files(folder))
    options = quantization_of(read_json(folder / "config.json"))
    tensors.packed = packed_tensors(tensors, list(tensors), options)
    return config, tensors, options


def _opened_gguf(file: GgufFile) -> Opened:
    raw = config_of(file)
    try:
        config = read_config(raw)
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    heads = raw["num_attention_heads"], raw.get("num_key_value_heads", raw["num_attention_heads"])
    return config, GgufTensors(file, heads, raw["num_hidden_layers"]), {}


def _bytes(array: np.ndarray) -> np.ndarray:
    """Returns an array's bytes, so that NaN equals itself."""
    return np.ascontiguousarray(array).view(np.uint8)


def _part_of(whole: Any, rows: slice, stored: Stored) -> np.ndarray:
    """Returns some rows of a stored tensor, of an expert perhaps."""
    row_range: np.ndarray
    if stored.is_transposed:
        row_range = whole[stored.expert, :, rows].T
    else:
        row_range = whole[rows] if stored.expert is None else whole[stored.expert, rows]
    return row_range


def _every(leaves: list[np.ndarray], stride: int) -> list[np.ndarray]:
    """Returns every `stride`th row of leaves that have all a row of their own."""
    return [np.ascontiguousarray(leaf[::stride]) for leaf in leaves]


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _cuts_rows(stored: Stored, packed: PackedTensor) -> bool:
    """Returns whether a tensor that is a part of a stored one begins or ends within rows that share
    a scale."""
    rows = packed.format.rows
    if rows <= 1 or stored.unit is None:
        return False
    return any(number % rows for number in (stored.first, stored.unit, stored.stride))


def read_folder_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; {what_it_has(folder)}")
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
    tensors = SafeTensors(weight_files(folder))
    dtypes = (tensors.dtype(name) for name in tensors)
    return next((DTYPE_NAMES[dtype] for dtype in dtypes if dtype in DTYPE_NAMES), None)
