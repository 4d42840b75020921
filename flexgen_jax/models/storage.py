"""How an array is kept: as it is, or in groups of few bits. Shapes only, no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from flexgen_jax.models.config import DTYPES

BITS = (16, 8, 4)
"""What a policy may ask for; 16 stands for the compute dtype, whatever its size."""

MATMUL_BITS = (16, 8)
"""The same of what decoder layers multiply."""

GROUP_SIZE = 64
FORMAT_VERSION = 1
"""Of what is stored in few bits; another version is not read but written anew."""

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
    """An array of `shape` and `dtype`, kept in `bits` bits an element.

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
        """The arrays it is kept in: itself, or packed codes, scales and minima."""
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
        """How many codes a byte holds."""
        return 8 // self.bits

    @property
    def plane_length(self) -> int:
        """How many elements of the axis a plane holds: whole groups, where that costs little."""
        length = -(-self.shape[self.axis] // self.planes)
        whole = -(-length // self.group_size) * self.group_size
        return whole if whole <= 1.02 * length else length

    def along(self, length: int) -> tuple[int, ...]:
        """The shape with another length of the axis."""
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


def parameter_dtype(dtype: str) -> str:
    """In which dtype a group's scale and minimum are kept: two bytes, with the array's range."""
    return "float16" if dtype == "float16" else "bfloat16"


@lru_cache(maxsize=1024)  # of every block of a search the same few
def kv_storage(shape: tuple[int, ...], dtype: str, bits: int) -> Storage:
    """Keys or values of a sealed block, [batch, head, token, head_dim], in groups along the
    hidden dimension: equal parts of a head, of 64 or the next larger size that divides."""
    head_dim = shape[-1]
    parts = max(n for n in range(1, max(1, head_dim // GROUP_SIZE) + 1) if head_dim % n == 0)
    return Storage(shape, dtype, bits, head_dim // parts, len(shape) - 1)
