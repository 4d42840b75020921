"""Products of each head's vector with a part of its head's kernel, which is read once and never
copied: those of latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2).

A place of the grid has a head and all rows. Packed kernels are unpacked tile by tile, as in
`packed_tiles`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.packed_tiles import tile_of
from flexgen_jax.gpu.packed_words import Shape, can_unpack, inputs_of, shape_of, shared_rows
from flexgen_jax.gpu.triton import (
    MIN_ROWS,
    NARROW,
    call,
    load,
    power_of_two,
    rows_times_columns,
    rows_times_rows,
    store,
)
from flexgen_jax.layers.quantization import Kept, QuantizedArray

MAX_ROWS = 64
"""Maximum rows for a single program per head, which reads the head's part once."""

LARGEST_PART = 128
"""Features of a head's part whose tiles fit a multiprocessor."""

TILE = 64
"""Elements of the rank that are multiplied together."""


class Product(NamedTuple):
    """A kernel's static parameters: rows, features of a part, the rank, whether the features are
    the inputs, and the shape of a packed kernel, None for a plain one."""

    rows: int
    features: int
    rank: int
    is_inverse: bool
    packed: Shape | None

    @property
    def tiles(self) -> int:
        """Number of tiles along the rank; packed ones have elements of every plane."""
        return self.rank // TILE if self.packed is None else self.packed.tiles


def can_multiply(x: jax.Array, kernel: Kept, features: tuple[int, int]) -> bool:
    """Returns whether the kernel takes these arguments of `multiply`."""
    (first, count), (heads, rank) = features, (x.shape[1], kernel.shape[1])
    if x.dtype not in NARROW or x.shape[0] > MAX_ROWS:
        return False
    is_tile = MIN_ROWS <= count <= LARGEST_PART and power_of_two(count) == count
    if not is_tile or first % count or kernel.shape[0] // heads % count or rank % TILE:
        return False
    if not isinstance(kernel, QuantizedArray):
        return bool(kernel.dtype == x.dtype)
    packing = kernel.storage.packing
    if packing.has_order or kernel.storage.plane_length % TILE:
        return False
    is_within_shared = all(rows % count == 0 for rows in shared_rows(packing))
    return can_unpack(kernel.storage) and is_within_shared


def multiply(
    x: jax.Array,
    kernel: Kept,
    features: tuple[int, int],
    is_inverse: bool,
    interprets: bool = False,
) -> jax.Array:
    """Returns the products in x's dtype; see `layers.matmul.matmul_by_heads`."""
    (rows, heads, length), (first, count) = x.shape, features
    rank, part_size = kernel.shape[1], kernel.shape[0] // heads // count

    def block_of(head: Any) -> Any:
        """Returns which block of `count` rows of the kernel a head's part is."""
        return head * part_size + first // count

    packed = None
    if isinstance(kernel, QuantizedArray):
        packed = shape_of(kernel, count, TILE, interprets)
        arrays = inputs_of(kernel, packed, block_of)
    else:
        arrays = [(kernel, pl.BlockSpec((count, rank), lambda h, t: (block_of(h), 0)))]
    product = Product(rows, count, rank, is_inverse, packed)
    size = rank if is_inverse else count
    (out,) = call(
        partial(_kernel, product=product),
        grid=(heads, product.tiles if is_inverse else 1),
        inputs=[(x, pl.BlockSpec((rows, None, length), lambda h, t: (0, h, 0))), *arrays],
        outputs=[
            (
                jax.ShapeDtypeStruct((rows, heads, size), x.dtype),
                pl.BlockSpec((rows, None, size), lambda h, t: (0, h, 0)),
            )
        ],
        warps=4,
        stages=2,
        interprets=interprets,
    )
    result: jax.Array = out
    return result


def _kernel(x_ref: Any, *refs: Any, product: Product) -> None:
    """Multiplies a head's rows, [row, element], by its part of the kernel, [feature, ...]; refs:
    the arrays of the kernel, and the result."""
    *kernel_refs, out_ref = refs
    height = max(MIN_ROWS, power_of_two(product.rows))
    is_row = (jnp.arange(height) < product.rows)[:, None] if height != product.rows else None

    def index_of(start: Any, size: int) -> tuple[tuple[Any, Any], jax.Array | None]:
        mask = None if is_row is None else jnp.broadcast_to(is_row, (height, size))
        return (pl.ds(0, height), pl.ds(start, size)), mask

    if product.is_inverse:
        index, mask = index_of(0, product.features)
        x = load(x_ref, index, mask)
        for start, weights in _tiles(kernel_refs, pl.program_id(1), product, x.dtype):
            index, mask = index_of(start, weights.shape[1])
            store(out_ref, index, rows_times_columns(x, weights).astype(x.dtype), mask)
        return

    def add_tile(tile: jax.Array, sums: jax.Array) -> jax.Array:
        for start, weights in _tiles(kernel_refs, tile, product, x_ref.dtype):
            x = load(x_ref, *index_of(start, weights.shape[1]))
            sums = sums + rows_times_rows(x, weights)
        return sums

    zeros = jnp.zeros((height, product.features), jnp.float32)
    sums = jax.lax.fori_loop(0, product.tiles, add_tile, zeros)
    index, mask = index_of(0, product.features)
    store(out_ref, index, sums.astype(out_ref.dtype), mask)


def _tiles(kept: list[Any], tile: Any, product: Product, dtype: Any) -> list[tuple[Any, jax.Array]]:
    """Returns the parts of a tile, one for each plane: the first element of the rank, and weights
    [feature, element]."""
    if product.packed is None:
        start = tile * TILE
        return [(start, kept[0][:, pl.ds(start, TILE)])]
    return tile_of(kept, tile, product.packed, dtype)
