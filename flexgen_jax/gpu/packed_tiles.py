"""Products of up to 64 rows with weights of 4 or 8 bits by the matrix units, without the matrix in
memory; see `packed_words`.

A place of the grid has some outputs and all rows. It unpacks a tile of its weights into the dtype
of the rows, in the threads' registers, and multiplies it. The bytes of a word lie in one thread,
which puts their weights into the order of the rows' elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.packed_words import (
    Shape,
    can_unpack,
    inputs_of,
    shape_of,
    shared_rows,
    unpacked,
)
from flexgen_jax.gpu.triton import (
    MIN_ROWS,
    NARROW,
    call,
    load,
    power_of_two,
    rows_times_rows,
    store,
)
from flexgen_jax.layers.quantization import QuantizedArray, in_stored_order

MAX_ROWS = 64
"""Maximum rows for unpacking a matrix in registers; for more, XLA unpacks it in memory."""

MANY_ROWS = 32
"""Maximum rows for 64 outputs per program. More rows are read less often by places of 128."""

OUTPUTS_OF_WARP = 16
"""Outputs of a warp, which are the rows of a tile of the matrix units."""

MAX_PLACE_OUTPUTS = 128
"""Outputs of the largest place, whose eight warps share the rows."""

LARGEST_TILE = 128
"""Bytes of codes in a row of a tile; half of the registers in the largest program."""

PLACES = 264
"""Places of a grid that keep the multiprocessors of a large GPU busy, two on each."""

SPLITS = 8
"""Places that share some outputs, each with a range of the inputs: the number that XLA sums in one
kernel together with the consumer."""

MAX_SUM_SHARE = 0.5
"""Bytes of the sums of such places, written and read, over those of the weights."""


def can_multiply(rows: jax.Array, kernel: QuantizedArray) -> bool:
    """Returns whether the kernel takes these rows, [n, in], and this matrix."""
    are_few = rows.shape[0] <= MAX_ROWS
    return rows.dtype in NARROW and are_few and can_unpack(kernel.storage)


def multiply(rows: jax.Array, kernel: QuantizedArray, interprets: bool = False) -> jax.Array:
    """Returns rows [n, in] @ kernel [out, in].T, fp32 [n, out]."""
    (count, _), outputs = rows.shape, kernel.shape[0]
    of_place = _outputs_of_place(count, kernel)
    tile = LARGEST_TILE // (2 if of_place == MAX_PLACE_OUTPUTS else 1)
    shape = shape_of(kernel, of_place, tile, interprets)
    splits = _splits(count, kernel, shape)
    whole = pl.BlockSpec(rows.shape, lambda n, split: (0, 0))
    sums = jax.ShapeDtypeStruct((splits, count, outputs), jnp.float32)
    (out,) = call(
        partial(_kernel, shape=shape, tiles=pl.cdiv(shape.tiles, splits)),
        grid=(outputs // of_place, splits),
        inputs=[(in_stored_order(rows, kernel), whole), *inputs_of(kernel, shape)],
        outputs=[(sums, pl.BlockSpec((None, count, of_place), lambda n, split: (split, 0, n)))],
        warps=of_place // OUTPUTS_OF_WARP,
        stages=3,
        interprets=interprets,
    )
    added: jax.Array = reduce(jnp.add, [out[split] for split in range(splits)])
    return added


def _outputs_of_place(count: int, kernel: QuantizedArray) -> int:
    """Returns the outputs per program for `rows` rows. The outputs share the work for a kernel's
    row."""
    largest = MAX_PLACE_OUTPUTS if count > MANY_ROWS else MAX_PLACE_OUTPUTS // 2
    return gcd(largest, kernel.shape[0], *shared_rows(kernel.storage.packing))


def _splits(count: int, kernel: QuantizedArray, shape: Shape) -> int:
    """Returns the number of programs that split the inputs of a matmul with `rows` rows: enough to
    keep the multiprocessors busy, without much to write for it."""
    outputs = kernel.shape[0]
    num_splits = PLACES // (outputs // shape.outputs)
    written = 2 * 4 * count * outputs  # fp32, written and read
    worth = int(MAX_SUM_SHARE * kernel.nbytes / written)
    return max(1, min(num_splits, worth, SPLITS, shape.tiles))


def _kernel(rows_ref: Any, *refs: Any, shape: Shape, tiles: int) -> None:
    """Multiplies all rows, [n, in], by some tiles of some rows of the kernel; refs: its words,
    [output, part, word], the leaves of its factors, and the output."""
    *kernel_refs, out_ref = refs
    count = rows_ref.shape[0]
    height = max(MIN_ROWS, power_of_two(count))
    is_row = jnp.arange(height) < count

    def add_tile(tile: jax.Array, sums: jax.Array) -> jax.Array:
        element = tile * shape.tile + jnp.arange(shape.tile)
        is_inside = is_row[:, None] & (element < shape.plane)[None, :]
        for place, weights in tile_of(kernel_refs, tile, shape, rows_ref.dtype):
            x = load(rows_ref, (pl.ds(0, height), pl.ds(place, shape.tile)), is_inside)
            sums = sums + rows_times_rows(weights, x)
        return sums

    zeros = jnp.zeros((shape.outputs, height), jnp.float32)
    begin = pl.program_id(1) * tiles
    sums = jax.lax.fori_loop(begin, jnp.minimum(begin + tiles, shape.tiles), add_tile, zeros)
    out_tile = (pl.ds(0, height), slice(None))
    store(out_ref, out_tile, sums.T, jnp.broadcast_to(is_row[:, None], (height, shape.outputs)))


def tile_of(
    kept: Sequence[Any], tile: jax.Array, shape: Shape, dtype: Any
) -> list[tuple[jax.Array, jax.Array]]:
    """Unpacks a tile: for each plane the index of its first element, and weights of a dtype,
    [output, element]; kept: see `unpacked`."""
    return [
        (place, _joined([weight.astype(dtype) for weight in of_bytes], shape))
        for place, of_bytes in unpacked(kept, tile, shape)
    ]


def _joined(of_bytes: list[jax.Array], shape: Shape) -> jax.Array:
    """Returns the weights of each byte of a tile's words, [output, part, word], as rows of the
    tile, [output, element]."""
    first, second, third, fourth = of_bytes
    halves = jnp.stack([first, third], axis=-1), jnp.stack([second, fourth], axis=-1)
    return jnp.stack(halves, axis=-1).reshape(shape.outputs, shape.tile)
