"""Storage formats of arrays: plain, or quantized in groups. Shapes only, no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from flexgen_jax.models.config import DTYPES

BITS = (16, 8, 4)
"""Bits per element that a policy may ask for; 16 stands for the compute dtype of any size."""

MATMUL_BITS = (16, 8)
"""Bits of the numbers that decoder layers may multiply; 16 stands for the compute dtype."""

GROUP_SIZE = 64
FORMAT_VERSION = 1
"""Version of the quantized format; stored weights of another version are written anew."""

_ITEM_BYTES = {**DTYPES, "uint8": 1}


@dataclass(frozen=True)
class Leaf:
    """One stored array of a `Storage`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Storage:
    """The format of an array of `shape` and `dtype` that is kept in `bits` bits per element.

    With fewer than 16 bits, `group_size` consecutive elements along `axis` (not negative) share
    a scale and a minimum, and a byte holds 8 / bits elements of that axis; see
    `layers/quantization.py`.
    """

    shape: tuple[int, ...]
    dtype: str
    bits: int = 16
    group_size: int = GROUP_SIZE
    axis: int = 0

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The stored arrays: the array itself, or packed codes, scales and minima."""
        if self.bits == 16:
            return (Leaf("", self.shape, self.dtype),)
        kept = parameter_dtype(self.dtype)
        return (
            Leaf("packed", self.along(self.plane_length), "uint8"),
            Leaf("scale", self.along(self.groups), kept),
            Leaf("minimum", self.along(self.groups), kept),
        )

    @property
    def groups(self) -> int:
        return -(-self.shape[self.axis] // self.group_size)

    @property
    def planes(self) -> int:
        """Number of codes in a byte."""
        return 8 // self.bits

    @property
    def plane_length(self) -> int:
        """Number of elements of the axis in a plane: whole groups, if that adds little padding."""
        length = -(-self.shape[self.axis] // self.planes)
        whole = -(-length // self.group_size) * self.group_size
        return whole if whole <= 1.02 * length else length

    def along(self, length: int) -> tuple[int, ...]:
        """Returns the shape with `length` elements along the grouped axis."""
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


def parameter_dtype(dtype: str) -> str:
    """Returns the dtype of a group's scale and minimum: two bytes, with the array's range."""
    return "float16" if dtype == "float16" else "bfloat16"


@lru_cache(maxsize=1024)  # the blocks of a policy search have few different shapes
def kv_storage(shape: tuple[int, ...], dtype: str, bits: int) -> Storage:
    """Returns how a sealed block's keys or values, [batch, head, token, head_dim], are kept.

    Groups are along the hidden dimension: equal parts of a head, of 64 elements or the next
    larger size that divides it.
    """
    head_dim = shape[-1]
    parts = max(n for n in range(1, max(1, head_dim // GROUP_SIZE) + 1) if head_dim % n == 0)
    return Storage(shape, dtype, bits, head_dim // parts, len(shape) - 1)
