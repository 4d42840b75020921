"""The levels of codes, before scaling: integers, small floats, and quantiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flexgen_jax.models.formats.format import Levels
from flexgen_jax.models.formats.levels import NF4


def level_of(codes: jax.Array, levels: Levels) -> jax.Array:
    """Returns the levels, fp32, of codes, uint8."""
    if levels == "integers":
        return codes.astype(jnp.int32).astype(jnp.float32)
    if levels == "nf4":
        return _chosen(codes, NF4)
    wide = codes.astype(jnp.uint16)
    if levels == "e2m1":  # the 4 bits at the top of a half, whose exponent is 14 larger
        return 2.0**14 * _half(((wide & 8) << 12) | ((wide & 7) << 9))
    if levels == "e4m3":
        return 2.0**8 * _half(((wide & 0x80) << 8) | ((wide & 0x7F) << 7))
    return _half(wide << 8)


def number_of(stored: jax.Array, dtype: str) -> jax.Array:
    """Returns stored factors as fp32; dtype: see `Factor`."""
    if dtype == "e8m0":  # the exponents of powers of two; 0 is 2^-127, below fp32's normal numbers
        bits = jnp.maximum(stored.astype(jnp.uint32), 1) << 23
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == "e4m3":
        return level_of(stored, "e4m3")
    if dtype in ("uint8", "int8"):
        return stored.astype(jnp.int32).astype(jnp.float32)
    return stored.astype(jnp.float32)


def _half(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _chosen(codes: jax.Array, numbers: tuple[float, ...]) -> jax.Array:
    """Returns a number of a table for each code, bit by bit, which a CPU does by vectors."""
    if len(numbers) == 1:
        return jnp.full(codes.shape, numbers[0], jnp.float32)
    half = len(numbers) // 2
    is_upper = (codes & half) != 0
    return jnp.where(is_upper, _chosen(codes, numbers[half:]), _chosen(codes, numbers[:half]))
