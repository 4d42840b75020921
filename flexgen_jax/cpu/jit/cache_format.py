"""How keys and values of a KV block are stored, and loads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from flexgen_jax.cpu.jit.emit import (
    F32,
    FIRST_CACHE,
    I8,
    I16,
    I32,
    ITEM_BYTES,
    LINE_BYTES,
    Array,
    Scalar,
    Value,
)
from flexgen_jax.cpu.jit.host_kernel import Arguments
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.vectors import from_bfloat16, from_float16
from flexgen_jax.models.formats.storage import kv_storage


class Chunk(NamedTuple):
    """Consecutive elements of a head that are stored together."""

    start: int
    """Index of the first element in the head."""
    width: int
    """Number of elements."""
    first: int
    """Their place in the stored row."""
    plane: int
    """Number of their plane, see `layers/quantization.py`; 0 where they are not packed."""
    group: int
    """Number of their group; 0 where they are not packed."""


@dataclass(frozen=True)
class CacheFormat:
    """How a head's keys and values are stored."""

    size: int
    """Elements of a head."""
    dtype: str
    """Of plain blocks."""
    bits: int
    """Of packed blocks; 16 for plain ones."""

    @property
    def is_packed(self) -> bool:
        return self.bits < 16

    @property
    def scalar(self) -> Scalar:
        """Type of the stored elements; 16-bit floats are given as bits."""
        return I8 if self.is_packed else F32 if self.dtype == "float32" else I16

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Chunks within one plane and one group, of a power of two of elements, `LANES` at most."""
        storage = kv_storage((1, 1, 1, self.size), "bfloat16", self.bits)
        length = storage.plane_length if self.is_packed else self.size
        group = storage.group_size if self.is_packed else self.size
        chunks, start = list[Chunk](), 0
        while start < self.size:
            end = min(self.size, (start // length + 1) * length, (start // group + 1) * group)
            width = min(LANES, 1 << ((end - start).bit_length() - 1))
            chunks.append(Chunk(start, width, start % length, start // length, start // group))
            start += width
        return chunks

    @property
    def stored_size(self) -> int:
        """Stored elements of a token."""
        return max(chunk.first + chunk.width for chunk in self.chunks)

    @property
    def num_groups(self) -> int:
        return self.chunks[-1].group + 1

    def widened(self, bits: Value) -> Value:
        """Widens plain elements, or scales and minima."""
        if bits.is_float:
            return bits
        return from_float16(bits) if self.dtype == "float16" else from_bfloat16(bits)


@dataclass(frozen=True)
class Side:
    """Keys or values of a KV block: [row / group, token, ...] elements; if packed also scales and
    minima."""

    format: CacheFormat
    arrays: Sequence[Array]
    tokens: Value

    def at(self, row: Value) -> Side:
        """Returns the keys or values of the rows of a group."""
        sizes = (self.format.stored_size, self.format.num_groups, self.format.num_groups)
        begin = row * self.tokens
        arrays = [array.at(begin * size) for array, size in zip(self.arrays, sizes, strict=False)]
        return Side(self.format, arrays, self.tokens)

    def prefetch(self, token: Value, ahead_bytes: int = 0) -> None:
        """Prefetches a token's elements; harmless if there is no such token."""
        line = max(1, LINE_BYTES // ITEM_BYTES[str(self.format.scalar)])
        elements = self.arrays[0].at(token * self.format.stored_size)
        ahead = ahead_bytes // ITEM_BYTES[str(self.format.scalar)]
        for first in range(0, self.format.stored_size, line):
            elements.prefetch(ahead + first, FIRST_CACHE)

    def chunk(self, token: Value, chunk: Chunk) -> Value:
        """Loads a chunk of a token as fp32; if it is packed, its codes."""
        stored = self.arrays[0].load(token * self.format.stored_size + chunk.first, chunk.width)
        if not self.format.is_packed:
            return self.format.widened(stored)
        codes = stored.to(I32, is_signed=False) >> self.format.bits * chunk.plane
        return (codes & (1 << self.format.bits) - 1).to(F32)

    def factors(self, token: Value, group: int) -> tuple[Value, Value]:
        """Loads the scale and the minimum of a token's group."""
        index = token * self.format.num_groups + group
        scale, minimum = (self.format.widened(side.load(index)) for side in self.arrays[1:])
        return scale, minimum


def side_of(of: CacheFormat, arguments: Arguments, number: int, tokens: Value) -> Side:
    """Returns keys or values whose three arrays are arguments."""
    scalars = (of.scalar, I16, I16)[: 3 if of.is_packed else 1]
    arrays = [arguments.array(number + n, scalar) for n, scalar in enumerate(scalars)]
    return Side(of, arrays, tokens)
