"""Computes a batch some rows at a time, and leaves out the padding of rows that are shorter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Segment = tuple[int, int]
"""Some rows of a batch, in their order, and how many of their first tokens are left out."""


def in_groups(compute: Callable[..., Any], size: int, *arrays: jax.Array) -> Any:
    """Applies `compute` to `size` rows at a time, sequentially; joins the results."""
    rows = arrays[0].shape[0]
    if rows <= size:
        return compute(*arrays)

    def some(skipped: int, *group: jax.Array) -> Any:
        return compute(*group)

    return in_segments(some, [(rows, 0)], lambda rows, skipped: size, *arrays)


def in_segments(
    compute: Callable[..., Any],
    segments: Sequence[Segment],
    at_once: Callable[[int, int], int],
    *arrays: jax.Array,
) -> Any:
    """Applies `compute` to a segment's skipped tokens and groups of its rows, sequentially; joins
    the results, whose shapes must not depend on the segment.

    at_once: returns how many rows of a segment go together.
    """
    rows, skipped = arrays[0].shape[0], segments[0][1]
    if len(segments) == 1 and rows <= at_once(rows, skipped):
        return compute(skipped, *arrays)
    result_shapes = jax.eval_shape(partial(compute, 0), *(x[:1] for x in arrays))
    # As integers, since XLA's CPU backend copies 16-bit floats to and from joined arrays by way of
    # fp32.
    bit_arrays = [_as_bits(x) for x in arrays]
    joined = jax.tree.map(
        lambda kind: _as_bits(jnp.zeros((rows, *kind.shape[1:]), kind.dtype)), result_shapes
    )

    def one(size: int, skipped: int, at: jax.Array | int, joined: Any) -> Any:
        """Computes `size` rows from row `at` on."""
        group = [jax.lax.dynamic_slice_in_dim(x, at, size) for x in bit_arrays]
        results = compute(skipped, *map(_from_bits, group, arrays))
        return jax.tree.map(
            lambda into, x: jax.lax.dynamic_update_slice_in_dim(into, _as_bits(x), at, 0),
            joined,
            results,
        )

    start = 0
    for rows, skipped in segments:
        size = min(at_once(rows, skipped), rows)
        count, remainder = divmod(rows, size)
        for group, times in ((size, count), (remainder, 1)):
            if group:
                compute_one = partial(one, group, skipped)
                joined = _repeated(compute_one, start, group, times, joined)
                start += group * times
    return jax.tree.map(_from_bits, joined, result_shapes)


def _repeated(compute: Callable[..., Any], start: int, step: int, times: int, joined: Any) -> Any:
    """Updates results from row `start` on, `step` rows at a time."""
    if times == 1:
        return compute(start, joined)
    return jax.lax.fori_loop(0, times, lambda n, joined: compute(start + n * step, joined), joined)


def _as_bits(x: jax.Array) -> jax.Array:
    """Returns an array of 16-bit floats as uint16, and any other array unchanged."""
    if x.dtype.itemsize != 2:
        return x
    bits: jax.Array = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return bits


def _from_bits(x: jax.Array, like: Any) -> jax.Array:
    if x.dtype == like.dtype:
        return x
    floats: jax.Array = jax.lax.bitcast_convert_type(x, like.dtype)
    return floats
