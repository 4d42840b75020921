"""Tensors that a program has, in the place of a model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.formats.packed import PackedTensor
from flexgen_jax.models.tensors import DTYPE_NAMES

PIECE_BYTES = 64 << 20
"""Bytes that are read at once to name the content."""


class GivenTensors:
    """Tensors by the names that Hugging Face gives them; see `Tensors`.

    given: arrays, or anything that has a shape and a dtype and gives arrays for slices of its rows,
    such as `numpy.memmap` or datasets of h5py and zarr.
    """

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.packed: dict[str, PackedTensor] = {}
        self.notes: list[str] = []
        self._name, self._given = name, given
        self.files = GivenContent(self)
        for key, tensor in given.items():
            if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
                raise CheckpointError(f"{name}: tensor {key!r} is {type(tensor).__name__}")

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def path(self, name: str) -> Path:
        return Path(self._name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._given[name].shape)

    def dtype(self, name: str) -> str:
        dtype_name = str(np.dtype(self._given[name].dtype))
        return next(
            (name for name, dtype in DTYPE_NAMES.items() if dtype == dtype_name), dtype_name
        )

    def rows(self, name: str) -> GivenRows:
        return GivenRows(self._given[name])


class GivenRows:
    """A tensor whose rows are taken by slices."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._tensor[index])


class GivenContent:
    """Names the content of given tensors; reads the whole array, once."""

    paths: tuple[Path, ...] = ()

    def __init__(self, tensors: GivenTensors) -> None:
        self._tensors = tensors

    def with_times(self) -> list[Any]:
        return self.contents()

    def contents(self) -> list[Any]:
        return [self._digest]

    @cached_property
    def _digest(self) -> str:
        named = hashlib.blake2b(digest_size=16)
        for name in self._tensors:
            shape, rows = self._tensors.shape(name), self._tensors.rows(name)
            named.update(repr((name, shape, self._tensors.dtype(name))).encode())
            row = max(1, int(np.prod(shape[1:])) * 4)
            step = max(1, PIECE_BYTES // row)
            for start in range(0, shape[0] if shape else 1, step):
                piece = rows[start : start + step] if shape else rows[()]
                named.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        return named.hexdigest()
