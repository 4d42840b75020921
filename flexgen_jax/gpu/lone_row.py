"""The product of one row with a kernel in 16 bits: every place of the grid reads some rows of the
kernel once and adds up in fp32. XLA's matrix units would multiply fifteen rows of padding too."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.triton import call

OUTPUTS = 4
"""Rows of the kernel, which are outputs, of a place of the grid, one warp."""

LARGEST_TILE, SMALLEST_TILE = 512, 64
"""Elements of a row of the kernel that are loaded at a time."""


def can_multiply(row: jax.Array, kernel: jax.Array) -> bool:
    """Returns whether the kernel takes a row and this matrix."""
    is_narrow = row.dtype in (jnp.float16, jnp.bfloat16) and kernel.dtype == row.dtype
    return is_narrow and row.shape[0] == 1 and kernel.shape[0] % OUTPUTS == 0 and _tile(kernel) > 0


def _tile(kernel: jax.Array) -> int:
    """Returns the elements of a tile's row, 0 if none divide the kernel's."""
    tile = LARGEST_TILE
    while kernel.shape[1] % tile:
        tile //= 2
    return tile if tile >= SMALLEST_TILE else 0


def multiply(row: jax.Array, kernel: jax.Array, interprets: bool = False) -> jax.Array:
    """Returns row [1, in] @ kernel [out, in].T, fp32 [1, out]."""
    outputs, length = kernel.shape
    wide = row.astype(jnp.float32).reshape(length)
    (out,) = call(
        partial(_kernel, tile_size=_tile(kernel)),
        grid=(outputs // OUTPUTS,),
        inputs=[
            (wide, pl.BlockSpec((length,), lambda n: (0,))),
            (kernel, pl.BlockSpec((OUTPUTS, length), lambda n: (n, 0))),
        ],
        outputs=[
            (
                jax.ShapeDtypeStruct((outputs,), jnp.float32),
                pl.BlockSpec((OUTPUTS,), lambda n: (n,)),
            )
        ],
        warps=1,
        stages=3,
        interprets=interprets,
    )
    product: jax.Array = out.reshape(1, outputs)
    return product


def _kernel(row_ref: Any, kernel_ref: Any, out_ref: Any, tile_size: int) -> None:
    """Multiplies the row by some rows of the kernel."""

    def add(tile: jax.Array, sums: jax.Array) -> jax.Array:
        here = pl.ds(tile * tile_size, tile_size)
        part: jax.Array = kernel_ref[:, here].astype(jnp.float32) * row_ref[here][None, :]
        return sums + part

    zeros = jnp.zeros((OUTPUTS, tile_size), jnp.float32)
    sums = jax.lax.fori_loop(0, kernel_ref.shape[1] // tile_size, add, zeros)
    out_ref[...] = sums.sum(1)
