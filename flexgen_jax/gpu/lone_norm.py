"""Normalisation of one row, the token of one sequence, in one kernel.

XLA reduces several rows and multiplies by the result in one kernel, but reduces a lone row by one
kernel for each sum, and multiplies by another.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.triton import NARROW, call, load, power_of_two, store
from flexgen_jax.models.parts import NormSpec

MAX_ROW_ELEMENTS = 32_768
"""Elements of the largest row that the threads of a block keep in registers."""


def can_normalize(x: jax.Array) -> bool:
    """Returns whether the kernel takes these numbers."""
    return x.dtype in NARROW and x.size == x.shape[-1] <= MAX_ROW_ELEMENTS


def normalize(
    x: jax.Array,
    spec: NormSpec,
    scale: jax.Array | None,
    bias: jax.Array | None,
    interprets: bool = False,
) -> jax.Array:
    """Normalises x, [..., element], whose one row is its last axis; see
    `layers.normalization.normalize`. There is no bias without a scale."""
    size = x.shape[-1]
    whole = pl.BlockSpec((size,), lambda place: (0,))
    learned = [array for array in (scale, bias) if array is not None]
    row: jax.Array = call(
        partial(_kernel, spec=spec, size=size),
        grid=(1,),
        inputs=[(array, whole) for array in (x.reshape(size), *learned)],
        outputs=[(jax.ShapeDtypeStruct((size,), x.dtype), whole)],
        warps=8,
        stages=1,
        interprets=interprets,
    )[0]
    return row.reshape(x.shape)


def _kernel(x_ref: Any, *refs: Any, spec: NormSpec, size: int) -> None:
    """Normalises a row; refs: its scale and its bias, where it has them, and the result."""
    *learned, out_ref = refs
    width = power_of_two(size)
    of_row, mask = (pl.ds(0, width),), None
    if width != size:
        mask = jnp.arange(width) < size

    def loaded(ref: Any) -> jax.Array:
        return load(ref, of_row, mask).astype(jnp.float32)

    x = loaded(x_ref)
    if not spec.is_rms:
        x = x - x.sum() / size
        x = x if mask is None else jnp.where(mask, x, 0.0)
    x = x * jax.lax.rsqrt(jnp.square(x).sum() / size + spec.eps)
    if learned:
        x = x * (loaded(learned[0]) + spec.offset)
    for bias_ref in learned[1:]:
        x = x + loaded(bias_ref)
    store(out_ref, of_row, x.astype(out_ref.dtype), mask)
