"""Products of one or two rows with weights of 4 or 8 bits, which are read once and never written;
see `packed_words`. Each row takes one operation for a weight, without the matrix units."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.inline import multiply_add
from flexgen_jax.gpu.packed_words import (
    LEAST_OUTPUTS,
    WORD,
    WORDS,
    Shape,
    can_unpack,
    inputs_of,
    shape_of,
    unpacked,
)
from flexgen_jax.gpu.triton import NARROW, call, load
from flexgen_jax.layers.quantization import QuantizedArray, in_stored_order

MAX_ROWS = 2
"""Maximum rows that are multiplied row by row. Each row adds one operation per weight, while tensor
cores need the same operations for three rows as for sixteen."""

LARGEST_TILE = 256
"""Bytes of codes in a row of a tile."""


def can_multiply(rows: jax.Array, kernel: QuantizedArray) -> bool:
    """Returns whether the kernel takes these rows, [n, in], and this matrix."""
    are_few = rows.shape[0] <= MAX_ROWS
    return rows.dtype in NARROW and are_few and can_unpack(kernel.storage)


def multiply(rows: jax.Array, kernel: QuantizedArray, interprets: bool = False) -> jax.Array:
    """Returns rows [n, in] @ kernel [out, in].T, fp32 [n, out]."""
    shape = shape_of(kernel, LEAST_OUTPUTS, LARGEST_TILE, interprets)
    (count, _), outputs = rows.shape, kernel.shape[0]
    whole = pl.BlockSpec(rows.shape, lambda n: (0, 0))
    product = jax.ShapeDtypeStruct((count, outputs), jnp.float32)
    (out,) = call(
        partial(_kernel, shape=shape),
        grid=(outputs // shape.outputs,),
        inputs=[(in_stored_order(rows, kernel), whole), *inputs_of(kernel, shape)],
        outputs=[(product, pl.BlockSpec((count, shape.outputs), lambda n: (0, n)))],
        warps=4,
        stages=3,
        interprets=interprets,
    )
    result: jax.Array = out
    return result


def _kernel(rows_ref: Any, *refs: Any, shape: Shape) -> None:
    """Multiplies all rows, [n, in], by some rows of the kernel; refs: its words, [output, part,
    word], the leaves of its factors, and the output."""
    *kernel_refs, out_ref = refs
    zeros = jnp.zeros((shape.outputs, shape.parts, WORDS), jnp.float32)

    def add_tile(tile: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        mask = None
        if shape.plane % shape.tile:
            mask = tile * shape.tile + jnp.arange(shape.tile) < shape.plane
        for place, weights in unpacked(kernel_refs, tile, shape):
            for row in range(len(sums)):
                x = load(rows_ref, (jnp.int32(row), pl.ds(place, shape.tile)), mask)
                for weight, element in zip(weights, _of_bytes(x, shape), strict=True):
                    sums[row] = multiply_add(weight, element, sums[row], shape.interprets)
        return sums

    sums = jax.lax.fori_loop(0, shape.tiles, add_tile, [zeros] * rows_ref.shape[0])
    for row, products in enumerate(sums):
        out_ref[row, :] = products.sum(2).sum(1)


def _of_bytes(x: jax.Array, shape: Shape) -> list[jax.Array]:
    """Returns the elements of a row, [element], that each byte of a tile's words is multiplied by,
    fp32 [output, part, word]."""
    of_words = x.reshape(shape.parts, WORDS, WORD)
    size = (shape.outputs, shape.parts, WORDS)
    return [
        jnp.broadcast_to(element.reshape(size[1:]).astype(jnp.float32)[None], size)
        for element in jnp.split(of_words, WORD, axis=2)
    ]
