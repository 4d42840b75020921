"""Keys and values of a head in parts, which are the tiles that Triton multiplies.

A part is consecutive elements, a power of two of them. For example, a head of 80 elements has parts
of 64 and 16, and one of DeepSeek-V3's latent attention, of 576, has parts of 512 and 64. In a
packed KV block a part has one scale and lies in one plane: a head of 128 elements in 4 bits has
parts of 64, which lie in the low and in the high halves of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flexgen_jax.gpu.inline import BASES, code_on_base, multiply_add
from flexgen_jax.gpu.triton import MIN_ROWS, load, power_of_two
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.models.formats.format import affine
from flexgen_jax.models.formats.storage import Storage


class Part(NamedTuple):
    """Elements of a head: first element, number of elements, and elements per tile."""

    start: int
    size: int
    width: int

    def at(
        self, rows: jax.Array, is_row: jax.Array | None, start: int | None = None
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
        """Returns the index of the part in some rows, int32 [row, element], and which elements
        there are, bool, None if all are.

        is_row: which rows there are; start: where the part begins, if not in a head.
        """
        element = jnp.arange(self.width)
        shape = (rows.shape[0], self.width)
        first = self.start if start is None else start
        index = (
            jnp.broadcast_to(rows[:, None], shape),
            jnp.broadcast_to(first + element[None, :], shape),
        )
        if self.width == self.size and is_row is None:
            return index, None
        mask = jnp.broadcast_to(element[None, :] < self.size, shape)
        return index, mask if is_row is None else mask & is_row[:, None]


class Side(NamedTuple):
    """Keys or values of a block in a kernel: the arrays that they are kept in, each [token, ...],
    their storage, None for plain ones, and whether JAX interprets the kernel."""

    refs: tuple[Any, ...]
    storage: Storage | None = None
    interprets: bool = False


def can_load(kept: Any, dtype: Any) -> bool:
    """Returns whether `load_parts` takes a KV block's keys or values, and gives numbers of a
    dtype."""
    if isinstance(kept, QuantizedArray):
        packing = kept.storage.packing
        is_affine = packing == affine(packing.bits, packing.group) and len(packing.widths) == 1
        return is_affine and jnp.dtype(kept.storage.dtype) == dtype
    return isinstance(kept, jax.Array) and kept.dtype == dtype


def storage_of(kept: Kept) -> Storage | None:
    """Returns how packed keys or values are kept, None for plain ones."""
    return kept.storage if isinstance(kept, QuantizedArray) else None


def arrays_of(kept: Kept) -> tuple[jax.Array, ...]:
    """Returns the arrays that keys or values are kept in."""
    if isinstance(kept, QuantizedArray):
        return kept.packed, kept.scale, kept.minimum
    return (kept,)


def parts_of(head_dim: int, storages: Sequence[Storage | None] = ()) -> tuple[Part, ...]:
    """Returns the parts of a head in blocks that are kept in these ways; packed ones in one."""
    cuts = {0, head_dim}
    for storage in storages:
        if storage is not None:
            cuts.update(range(0, head_dim, storage.group_size))
            cuts.update(range(0, head_dim, storage.plane_length))
    ends = sorted(cuts)
    parts = list[Part]()
    for start, stop in pairwise(ends):
        parts += _powers(start, stop)
    return tuple(parts)


def width_of(parts: Sequence[Part]) -> int:
    """Returns the elements of a head's tiles."""
    return sum(part.width for part in parts)


def _powers(start: int, stop: int) -> list[Part]:
    """Divides elements into parts, the largest first; the last part may have a larger tile."""
    parts = list[Part]()
    while start < stop:
        left = stop - start
        width = max(MIN_ROWS, power_of_two(left + 1) // 2)
        parts.append(Part(start, min(width, left), width))
        start += width
    return parts


def load_parts(
    side: Side, parts: Sequence[Part], tokens: jax.Array, is_token: jax.Array | None, dtype: Any
) -> tuple[jax.Array, ...]:
    """Loads a tile of keys or values, one array [token, element] for each part; tokens: their
    indices in the block, is_token: which of them it has, None if all."""
    if side.storage is not None:
        return _unpacked(side, parts, tokens, is_token, dtype)
    (ref,) = side.refs
    return tuple(load(ref, *part.at(tokens, is_token)) for part in parts)


def _unpacked(
    side: Side, parts: Sequence[Part], tokens: jax.Array, is_token: jax.Array | None, dtype: Any
) -> tuple[jax.Array, ...]:
    """Unpacks a tile of codes; parts that share bytes load them once."""
    assert side.storage is not None
    (codes_ref, *factors), storage = side.refs, side.storage
    bits, loaded, tiles = storage.bits, dict[tuple[int, int], jax.Array](), list[jax.Array]()
    for part in parts:
        plane, at = divmod(part.start, storage.plane_length)
        (index, mask), place = part.at(tokens, is_token, at), (at, part.width)
        if place not in loaded:
            loaded[place] = load(codes_ref, index, mask).astype(jnp.uint32)
        level = code_on_base(loaded[place], bits * plane, bits, side.interprets)
        group = jnp.full_like(tokens, part.start // storage.group_size)
        scale, minimum = (
            load(ref, (tokens, group), is_token).astype(jnp.float32) for ref in factors
        )
        line = (scale, minimum - BASES[bits][2] * scale)
        scale, least = (jnp.broadcast_to(x[:, None], level.shape) for x in line)
        tile = multiply_add(level, scale, least, side.interprets).astype(dtype)
        tiles.append(tile if mask is None else jnp.where(mask, tile, 0))
    return tuple(tiles)
