"""Products of 8-bit integers (LLM.int8(), sections 2 and 3).

    x @ kernel.T  ~  row_scale * column_scale * (integers of x) @ (integers of kernel).T
                     + (outliers of x) @ kernel.T

Rows of x and rows of the kernel, the result's columns, are rounded to -127 ... 127 with a scale
each. Elements of x of at least `OUTLIER` are left out of that and multiplied as they are: large
models have a few features tens of times as large as the rest, to which a row's levels would all
go. The paper takes the whole column of such an element; here no row's result depends on others.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flexgen_jax.layers.matmul import matmul
from flexgen_jax.layers.quantization import Kept, QuantizedArray, dequantize
from flexgen_jax.layers.tuning import PLAIN, Tuning

LEVELS = 127
OUTLIER = 6.0
"""Section 3.2's threshold."""

OUTLIER_BITS = 0x40C0
"""The same as a bfloat16."""


class Rounded(NamedTuple):
    """Rows as integers, int8 [row, depth], and what 1 stands for, fp32 [row]."""

    codes: jax.Array
    scale: jax.Array


def matmul_int8(
    x: jax.Array,
    kernel: Kept,
    bias: jax.Array | None = None,
    part_bytes: int = 1 << 62,
    tuning: Tuning = PLAIN,
) -> jax.Array:
    """Returns `x @ kernel.T + bias` by products of 8-bit integers, in x's dtype; arguments as in
    `matmul.matmul`. The integers are multiplied as floats, which hold them exactly, so that any
    device can."""
    rows, scale = x.reshape(-1, x.shape[-1]), column_scale(kernel)
    codes, row_scale = round_rows(rows)
    integers = round_kernel(kernel, scale, tuning.has_barriers).astype(x.dtype)
    found = matmul(codes.astype(x.dtype), integers, None, part_bytes, tuning)
    found = found * (row_scale[:, None] * scale)
    apart = is_outlier(rows)
    found = jax.lax.cond(
        apart.any(),
        lambda: found + matmul(jnp.where(apart, rows, 0), kernel, None, part_bytes, tuning),
        lambda: found,
    )
    if bias is not None:
        found = found + bias.astype(jnp.float32)
    out: jax.Array = found.astype(x.dtype)
    return out.reshape(*x.shape[:-1], -1)


def is_outlier(x: jax.Array) -> jax.Array:
    """Of each element; NaN is one."""
    return ~(jnp.abs(x.astype(jnp.float32)) < OUTLIER)


def round_rows(x: jax.Array) -> Rounded:
    """[row, depth] to the nearest of each row's levels, outliers to 0."""
    wide = jnp.where(is_outlier(x), 0.0, x.astype(jnp.float32))
    scale = jnp.max(jnp.abs(wide), axis=1) * jnp.float32(1 / LEVELS)
    return Rounded(_codes(wide, scale), scale)


def column_scale(kernel: Kept) -> jax.Array:
    """What 1 stands for in each row of a kernel [column, depth], fp32 [column]; in one that is
    packed, whose rows make groups, one number for all of a group."""
    if isinstance(kernel, QuantizedArray):
        storage, low = kernel.storage, kernel.minimum.astype(jnp.float32)
        high = low + ((1 << storage.bits) - 1) * kernel.scale.astype(jnp.float32)
        largest = jnp.max(jnp.maximum(jnp.abs(low), jnp.abs(high)), axis=1)
        largest = jnp.repeat(largest, storage.group_size)[: storage.shape[0]]
    else:
        largest = jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=1)
    scale: jax.Array = largest * jnp.float32(1 / LEVELS)
    return scale


def round_kernel(kernel: Kept, scale: jax.Array, has_barrier: bool = False) -> jax.Array:
    """The integers of a kernel whose columns have this scale, int8 [column, depth]."""
    plain = dequantize(kernel, has_barrier) if isinstance(kernel, QuantizedArray) else kernel
    return _codes(plain.astype(jnp.float32), scale)


def _codes(wide: jax.Array, scale: jax.Array) -> jax.Array:
    inverse = jnp.where(scale == 0, 0.0, 1 / scale)
    codes: jax.Array = jnp.round(wide * inverse[:, None]).astype(jnp.int8)
    return codes
