"""Tensors that files have in few bits: what all formats' readers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.storage import Storage

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes of factors by the names that safetensors gives them."""


class PackedTensor(Protocol):
    """A tensor in few bits.

    names: of the stored tensors that it is made of; shape: of the plain tensor that it stands for,
    perhaps with an axis of experts first; format: of its leaves.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    format: Format

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        """Returns the leaves of rows [start, stop), of an expert's if there is an axis of these;
        start: a multiple of `Format.rows`."""
        ...


class StoredArrays(Protocol):
    """Where readers find arrays; see `models.tensors.SafeTensors`."""

    def __contains__(self, name: object) -> bool: ...

    def path(self, name: str) -> Path: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def array(self, name: str) -> np.ndarray: ...


@dataclass
class Parts:
    """The stored arrays of one tensor.

    base: what their names begin with; method: the format's name in messages; options: of the
    config's "quantization_config".
    """

    arrays: StoredArrays
    base: str
    method: str
    options: Mapping[str, Any]

    def has(self, end: str) -> bool:
        return self.base + end in self.arrays

    def shape(self, end: str) -> tuple[int, ...]:
        return self.arrays.shape(self.base + end)

    def dtype(self, end: str) -> str:
        return self.arrays.dtype(self.base + end)

    def array(self, end: str) -> np.ndarray:
        return self.arrays.array(self.base + end)

    def need(self, *ends: str) -> str:
        """Returns the first existing name among several endings; raises `CheckpointError` if none
        is."""
        present = [end for end in ends if self.has(end)]
        if not present:
            raise CheckpointError(
                f"{self._file()}: tensor {self.base + ends[0]!r} is missing, without which "
                f"{self.base!r} cannot be read as {self.method}; download the model again"
            )
        return present[0]

    def check(self, end: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Raises `CheckpointError` unless an array has the given shape and an allowed dtype."""
        name = self.base + end
        if self.shape(end) != shape:
            raise CheckpointError(
                f"{self.arrays.path(name)}: tensor {name!r} has shape {self.shape(end)}; as "
                f"{self.method} it must have {shape}"
            )
        if self.dtype(end) not in dtypes:
            raise self.refused(end, f"is {self.dtype(end)}, not {' or '.join(dtypes)}")

    def refused(self, end: str, why: str) -> CheckpointError:
        """Returns an error that describes an array's problem."""
        name = self.base + end
        return CheckpointError(f"{self.arrays.path(name)}: tensor {name!r} {why} ({self.method})")

    def factor(self, end: str, rows: int, columns: int, block: tuple[int, int] | None) -> Factor:
        """Returns the factor of an array of scales for a matrix: one for all, one a row, or one for
        each block of rows and columns."""
        shape, dtype = self.shape(end), self.dtype(end)
        factor_kind = "e8m0" if dtype in ("U8", "F8_E8M0") else FLOATS.get(dtype)
        if factor_kind is None:
            raise self.refused(end, f"is {dtype}, which is no dtype of scales")
        if shape in ((), (1,), (1, 1)):
            return Factor(factor_kind, 0, rows=0)
        if shape in ((rows,), (rows, 1)):
            return Factor(factor_kind, 0, rows=1)
        if block is not None:
            block_rows, block_columns = block
            self.check(end, (-(-rows // block_rows), -(-columns // block_columns)), dtype)
            return Factor(factor_kind, block_columns, rows=block_rows)
        raise self.refused(end, f"has shape {shape}, which does not fit ({rows}, {columns})")

    def _file(self) -> str:
        names = [name for name in self.arrays if name.startswith(self.base)]  # type: ignore[attr-defined]
        return str(self.arrays.path(names[0])) if names else self.base


def factor_rows(stored: np.ndarray, factor: Factor, start: int, stop: int) -> np.ndarray:
    """Returns the part of an array of scales that rows [start, stop) of a matrix have, as a matrix
    [row, group]."""
    if factor.rows == 0:
        return np.ascontiguousarray(stored.reshape(1, 1))
    grid = stored.reshape(stored.shape[0], -1)
    return np.ascontiguousarray(grid[start // factor.rows : -(-stop // factor.rows)])


def packed_rows(packed: PackedTensor, rows: slice, expert: int | None) -> list[np.ndarray]:
    """Returns the leaves of any range of rows, with factors for each row where several rows share
    them; see `with_own_rows`."""
    step = packed.format.rows
    if step <= 1:
        return packed.read(rows.start, rows.stop, expert)
    start = rows.start // step * step
    stop = min(-(-rows.stop // step) * step, packed.shape[-2])
    inside = slice(rows.start - start, rows.stop - start)
    storage = Storage((stop - start, packed.shape[-1]), "float32", packed.format)
    leaves = []
    for array, leaf in zip(packed.read(start, stop, expert), storage.leaves, strict=True):
        expanded = np.repeat(array, leaf.rows, axis=0) if leaf.rows > 1 else array
        leaves.append(np.ascontiguousarray(expanded[inside]) if leaf.rows else expanded)
    return leaves
