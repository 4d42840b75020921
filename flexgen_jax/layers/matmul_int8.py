"""Products of 8-bit integers (LLM.int8(), sections 2 and 3).

    x @ kernel.T  ~  row_scale * column_scale * (integers of x) @ (integers of kernel).T
                     + (outliers of x) @ kernel.T

Every row of x, and every row of the kernel (a column of the result), is rounded to integers from
-127 to 127 with a scale of its own. Outliers, elements of x of at least `OUTLIER`, are multiplied
    unrounded: large models have a few features that are much larger than the rest and would take
all the levels of their row. In the paper an outlier's whole column is left unrounded; here only
the element is, so that no row's result depends on other rows.
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
"""Minimum absolute value of an outlier in x: the threshold of section 3.2."""

OUTLIER_BITS = 0x40C0
"""Bits of `OUTLIER` as a bfloat16."""


class Rounded(NamedTuple):
    """Rows as integers, int8 [row, depth], and the scale of each row, fp32 [row]."""

    codes: jax.Array
    scale: jax.Array


def matmul_int8(
    x: jax.Array,
    kernel: Kept,
    bias: jax.Array | None = None,
    part_bytes: int = 1 << 62,
    tuning: Tuning = PLAIN,
) -> jax.Array:
    """Returns `x @ kernel.T + bias` by products of 8-bit integers, in x's dtype.

    Arguments are those of `matmul.matmul`. The integers are multiplied as floats, which hold them
    exactly, so that any device can do it.
    """
    rows, scale = x.reshape(-1, x.shape[-1]), column_scale(kernel)
    codes, row_scale = round_rows(rows)
    integers = round_kernel(kernel, scale, tuning.has_barriers).astype(x.dtype)
    product = matmul(codes.astype(x.dtype), integers, None, part_bytes, tuning)
    product = product * (row_scale[:, None] * scale)
    outliers = is_outlier(rows)
    product = jax.lax.cond(
        outliers.any(),
        lambda: product + matmul(jnp.where(outliers, rows, 0), kernel, None, part_bytes, tuning),
        lambda: product,
    )
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    out: jax.Array = product.astype(x.dtype)
    return out.reshape(*x.shape[:-1], -1)


def is_outlier(x: jax.Array) -> jax.Array:
    """Returns whether each element is an outlier; NaN is one."""
    return ~(jnp.abs(x.astype(jnp.float32)) < OUTLIER)


def round_rows(x: jax.Array) -> Rounded:
    """Rounds each row of x, [row, depth], to its nearest levels, and outliers to 0."""
    wide = jnp.where(is_outlier(x), 0.0, x.astype(jnp.float32))
    scale = jnp.max(jnp.abs(wide), axis=1) * jnp.float32(1 / LEVELS)
    return Rounded(_codes(wide, scale), scale)


def column_scale(kernel: Kept) -> jax.Array:
    """Returns the scale of each row of a kernel [column, depth], fp32 [column].

    In a packed kernel whose rows form groups, all rows of a group have one scale.
    """
    if isinstance(kernel, QuantizedArray) and kernel.storage.axis == 1:
        kernel = dequantize(kernel)
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
    """Returns a kernel as integers, int8 [column, depth]; scale: of each row, fp32 [column]."""
    plain = dequantize(kernel, has_barrier) if isinstance(kernel, QuantizedArray) else kernel
    return _codes(plain.astype(jnp.float32), scale)


def _codes(wide: jax.Array, scale: jax.Array) -> jax.Array:
    inverse = jnp.where(scale == 0, 0.0, 1 / scale)
    codes: jax.Array = jnp.round(wide * inverse[:, None]).astype(jnp.int8)
    return codes
