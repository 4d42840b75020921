"""How an array is kept: its shape, its dtype, and the format of its numbers. Shapes only, no JAX
and no NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from flexgen_jax.models.formats.format import Factor, Format, Leaf, affine, plane_length

BITS = (16, 8, 4)
"""Bits per element that a policy may ask for; 16 stands for the compute dtype of any size."""

MATMUL_BITS = (16, 8)
"""Bits of the numbers that decoder layers may multiply; 16 stands for the compute dtype."""

GROUP_SIZE = 64
"""Elements of a group of the KV cache, and of weights in the format of FlexGen, section 5."""

FORMAT_VERSION = 3
"""Version of the stored bytes of formats; stored weights of another version are written again."""


@dataclass(frozen=True)
class Storage:
    """The format of an array of `shape` and `dtype`; None keeps the numbers themselves."""

    shape: tuple[int, ...]
    dtype: str
    format: Format | None = None

    @property
    def packing(self) -> Format:
        """The format of an array that is kept in one."""
        assert self.format is not None, "the array is plain"
        return self.format

    @property
    def bits(self) -> int:
        """Bits of a code; 16 of a plain array."""
        return 16 if self.format is None else self.format.bits

    @property
    def axis(self) -> int:
        """The grouped axis, not negative."""
        return self.packing.axis % len(self.shape)

    @property
    def length(self) -> int:
        """Elements of the grouped axis."""
        return self.shape[self.axis]

    @property
    def group_size(self) -> int:
        """Elements of the grouped axis that share a scale."""
        return self.packing.group or self.length

    @property
    def planes(self) -> int:
        """Number of planes of the narrowest part of codes."""
        return self.packing.planes

    @cached_property
    def plane_length(self) -> int:
        """Number of elements of the axis in a plane of the narrowest part."""
        return plane_length(self.length, self.planes, self.packing.group)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The stored arrays: the array itself, or parts of codes, factors, and the order of
        elements."""
        if self.format is None:
            return (Leaf("", self.shape, self.dtype),)
        name = "packed_lanes" if self.format.in_lanes else "packed"  # so that files differ
        code_parts = [
            Leaf(name + "_high" * number, self.along(length), "uint8")
            for number, (_, length) in enumerate(self.parts(self.length, self.packing))
        ]
        for name, factor in self.packing.factors:
            code_parts += self._of_factor(name, factor)
        if self.packing.has_order:
            code_parts.append(Leaf("order", (self.length,), "int32", rows=0))
        return tuple(code_parts)

    def parts(self, length: int, packed: Format | Factor) -> list[tuple[int, int]]:
        """Returns the bits of each part of `length` codes, and its length in bytes."""
        codes = packed if isinstance(packed, Format) else _codes_of(packed)
        plane_size = plane_length(length, codes.planes, codes.group if packed is codes else 0)
        return [(width, plane_size * codes.planes * width // 8) for width in codes.widths]

    def along(self, length: int, rows: int | None = None) -> tuple[int, ...]:
        """Returns the shape with `length` elements along the grouped axis; rows: instead of the
        first axis of a matrix that is grouped along its last axis."""
        before = self.shape[: self.axis] if rows is None else (rows,)
        return (*before, length, *self.shape[self.axis + 1 :])

    def _of_factor(self, name: str, factor: Factor) -> list[Leaf]:
        count = factor.count(self.length)
        rows = None if factor.rows == 1 else factor.count_rows(self.shape[0])
        if factor.dtype != "codes":
            dtype = parameter_dtype(self.dtype) if factor.dtype == "same" else factor.dtype
            return [Leaf(name, self.along(count, rows), dtype, factor.rows)]
        return [
            Leaf(name + "_high" * number, self.along(length, rows), "uint8", factor.rows)
            for number, (_, length) in enumerate(self.parts(count, factor))
        ]

    @cached_property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


@lru_cache
def _codes_of(factor: Factor) -> Format:
    """Returns the format of a factor's codes, as if they were elements."""
    return Format(factor.bits, Factor("uint8", 0))


def parameter_dtype(dtype: str) -> str:
    """Returns the dtype of a group's scale and minimum: two bytes, with the array's range."""
    return "float16" if dtype == "float16" else "bfloat16"


@lru_cache(maxsize=1024)  # the blocks of a policy search have few different shapes
def kv_storage(shape: tuple[int, ...], dtype: str, bits: int) -> Storage:
    """Returns how a sealed block's keys or values, [batch, head, token, head_dim], are kept.

    Groups are along the hidden dimension: equal parts of a head, of 64 elements or the next
    larger size that divides it.
    """
    if bits == 16:
        return Storage(shape, dtype)
    head_dim = shape[-1]
    num_parts = max(n for n in range(1, max(1, head_dim // GROUP_SIZE) + 1) if head_dim % n == 0)
    return Storage(shape, dtype, affine(bits, head_dim // num_parts))
