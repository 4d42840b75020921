"""A format of numbers in a few bits. Shapes only, no JAX and no NumPy.

    number  =  (level of its code - zero) * scale + minimum

A code of 8, 6, 5, 4, 3 or 2 bits stands for a level: an integer, or a number of a table. Groups of
consecutive elements along one axis (or of several rows) share factors: a scale, a zero, a minimum.
Each is a `Factor`: numbers of their own, which may be codes with a factor again.

Codes are packed in planes along the grouped axis: with 4 bits, byte j of n/2 holds the codes of
elements j (low half) and j + n/2 (high half). So a plane unpacks with one shift and one mask into a
contiguous part of the array. Codes of 6, 5 and 3 bits are kept in two parts, of 4 + 2, 4 + 1 and
2 + 1 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

Levels = Literal["integers", "e2m1", "nf4", "e4m3", "e5m2"]
"""What codes stand for: integers, the 8 magnitudes of a 4-bit float with a sign, the 16 quantiles
of a normal distribution (Dettmers et al. 2023, "QLoRA", section 3), or an 8-bit float."""

WIDTHS = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits of the parts of a code, lowest bits first."""

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "e8m0": 1,
    "e4m3": 1,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int16": 2,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "bool": 1,
    "complex64": 8,
}
"""Bytes of a leaf's elements. "e8m0" and "e4m3" are 8-bit floats, whose bits are kept."""


@dataclass(frozen=True)
class Leaf:
    """One stored array of a `Storage`. rows: how many rows of the array share one of the leaf's; 0
    if all do."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: int = 1

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def kind(self) -> str:
        """The dtype of an array with the leaf's elements, or with their bits."""
        return {"e8m0": "uint8", "e4m3": "uint8"}.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class Factor:
    """Numbers that groups of elements share.

    dtype: of the stored numbers; "same" is two bytes with the range of the array's own dtype, and
        "codes" stands for codes of `bits` bits, which are packed like elements.
    group: elements along the axis that share a number; 0: all of them.
    rows: rows that share one; 0: all of them.
    center: the offset subtracted from stored integers.
    of: optional multipliers of the stored numbers.
    """

    dtype: str
    group: int
    rows: int = 1
    bits: int = 0
    center: int = 0
    of: Factor | None = None

    def count(self, length: int) -> int:
        """Returns how many numbers `length` elements of the axis have."""
        return -(-length // self.group) if self.group else 1

    def count_rows(self, rows: int) -> int:
        """Returns how many numbers some rows have."""
        return -(-rows // self.rows) if self.rows else 1


@dataclass(frozen=True)
class Format:
    """How numbers are kept in few bits; see the module.

    bits: of a code; axis: the grouped one, from the end (-1, or -2 for a matrix's rows); center:
    the offset subtracted from an integer code; has_order: whether the elements of the axis
    were put into another order, which a leaf says; subtracts: whether minima are subtracted;
    in_lanes: whether codes are packed in lanes, see `models/formats/lanes.py`, not in planes.
    """

    bits: int
    scale: Factor
    levels: Levels = "integers"
    zero: Factor | None = None
    minimum: Factor | None = None
    axis: int = -1
    center: int = 0
    subtracts: bool = False
    has_order: bool = False
    in_lanes: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of the fields, once: plans look up tens of thousands of tensors by it."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the parts of a code, the lowest first."""
        return WIDTHS[self.bits]

    @property
    def planes(self) -> int:
        """Number of planes, 1 of codes in lanes; see `planes_of`."""
        return 1 if self.in_lanes else planes_of(self.bits)

    @property
    def group(self) -> int:
        """Elements along the axis that share a scale; 0: all of them."""
        return self.scale.group

    @property
    def rows(self) -> int:
        """Row alignment: a part of the array may begin at multiples of this number of rows.
        rows that share a number; 0 if all do."""
        return self.scale.rows

    @property
    def factors(self) -> Iterator[tuple[str, Factor]]:
        """The factors by the names of their leaves, the inner ones after the outer ones."""
        for name in ("scale", "minimum", "zero"):
            factor: Factor | None = getattr(self, name)
            while factor is not None:
                yield name, factor
                name, factor = f"{name}_of", factor.of


def planes_of(bits: int) -> int:
    """Returns the number of planes of codes: elements that share a byte of the narrowest part."""
    return 8 // min(WIDTHS[bits])


def plane_length(length: int, planes: int, group: int) -> int:
    """Returns the number of elements in a plane: whole groups, if that adds little padding."""
    least = -(-length // planes)
    whole = -(-least // group) * group if group else least
    return whole if whole <= 1.02 * least else least


@lru_cache
def affine(bits: int, group: int, axis: int = -1, dtype: str = "same") -> Format:
    """Returns the format of integers with a scale and a minimum a group."""
    return Format(bits, Factor(dtype, group), minimum=Factor(dtype, group), axis=axis)


@lru_cache
def centered(bits: int, group: int, dtype: str) -> Format:
    """Returns the format of integers around zero with a scale a group."""
    return Format(bits, Factor(dtype, group), center=1 << (bits - 1))


@lru_cache
def with_own_rows(packing: Format) -> Format:
    """Returns a format in which each row has its own factors, where several rows share them."""

    def own(factor: Factor | None) -> Factor | None:
        if factor is None:
            return None
        return replace(factor, rows=min(factor.rows, 1), of=own(factor.of))

    scale = own(packing.scale)
    assert scale is not None
    return replace(packing, scale=scale, minimum=own(packing.minimum), zero=own(packing.zero))
