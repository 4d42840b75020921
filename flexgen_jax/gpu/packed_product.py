"""Products of one or two rows with weights of 4 or 8 bits, which are read once and never written;
see `packed_words`. Each row takes one operation for a weight, without the matrix units."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.packed_words import (
    LEAST_OUTPUTS,
    PART,
    WORD,
    WORDS,
    Shape,
    can_unpack,
    in_order,
    inputs_of,
    inside,
    line,
    multiply_add,
    shape_of,
    weights_of,
)
from flexgen_jax.gpu.triton import NARROW, call, load
from flexgen_jax.layers.quantization import QuantizedArray

LARGEST_COUNT = 2
"""Rows that are multiplied one after the other. A weight takes one operation more for each, and
the matrix units take as many for three rows as for sixteen."""

LARGEST_TILE = 256
"""Bytes of codes in a row of a tile."""


def can_multiply(rows: jax.Array, kernel: QuantizedArray) -> bool:
    """Returns whether the kernel takes these rows, [n, in], and this matrix."""
    are_few = rows.shape[0] <= LARGEST_COUNT
    return rows.dtype in NARROW and are_few and can_unpack(kernel.storage)


def multiply(rows: jax.Array, kernel: QuantizedArray, interprets: bool = False) -> jax.Array:
    """Returns rows [n, in] @ kernel [out, in].T, fp32 [n, out]."""
    shape = shape_of(kernel, LEAST_OUTPUTS, LARGEST_TILE, interprets)
    (count, _), outputs = rows.shape, kernel.shape[0]
    wide = in_order(rows, kernel).astype(jnp.float32)
    of_bytes = wide.reshape(count, -1, WORDS, WORD).transpose(0, 3, 1, 2)
    whole = pl.BlockSpec(of_bytes.shape, lambda n: (0, 0, 0, 0))
    product = jax.ShapeDtypeStruct((count, outputs), jnp.float32)
    (out,) = call(
        partial(_kernel, shape=shape),
        grid=(outputs // shape.outputs,),
        inputs=[(of_bytes, whole), *inputs_of(kernel, shape)],
        outputs=[(product, pl.BlockSpec((count, shape.outputs), lambda n: (0, n)))],
        warps=4,  # none of which waits for another
        stages=3,
        interprets=interprets,
    )
    result: jax.Array = out
    return result


def _kernel(rows_ref: Any, words_ref: Any, *refs: Any, shape: Shape) -> None:
    """Multiplies all rows, [n, byte, part, word], by some rows of the kernel, [output, part, word];
    refs: the leaves of their factors, and the output."""
    *leaves, out_ref = refs
    factors = dict(zip(shape.leaves, leaves, strict=True))
    count, parts = rows_ref.shape[0], shape.parts
    zeros = jnp.zeros((shape.outputs, parts, WORDS), jnp.float32)

    def add_tile(tile: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        mask = inside(tile, shape)
        of_outputs = None if mask is None else jnp.broadcast_to(mask[None], zeros.shape)
        of_tile = (slice(None), pl.ds(tile * parts, parts), slice(None))
        words = load(words_ref, of_tile, of_outputs)
        for plane in range(shape.packing.planes):
            at = plane * shape.plane + tile * shape.tile
            weights = weights_of(words, plane, line(factors, at, shape), shape)
            for byte, weight in enumerate(weights):
                for row in range(count):
                    of_row = (jnp.int32(row), jnp.int32(byte), pl.ds(at // PART, parts))
                    x = load(rows_ref, (*of_row, slice(None)), mask)
                    x = jnp.broadcast_to(x[None], weight.shape)
                    sums[row] = multiply_add(weight, x, sums[row], shape.interprets)
        return sums

    sums = jax.lax.fori_loop(0, shape.tiles, add_tile, [zeros] * count)
    for row, products in enumerate(sums):
        out_ref[row, :] = products.sum(2).sum(1)
