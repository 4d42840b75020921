"""Attention tile by tile, without all scores in memory (Dao et al. 2022, section 3.1).

The state of a tile of queries: the values of the keys so far, weighted, fp32 [query, element] for
each part of a head; each query's largest score, and the sum of its weights, fp32 [query].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from flexgen_jax.gpu.triton import rows_times_columns, rows_times_rows
from flexgen_jax.layers.attention import MASKED

Parts = tuple[jax.Array, ...]
State = tuple[Parts, jax.Array, jax.Array]


def empty(queries: int, widths: Sequence[int]) -> State:
    """Returns the state before any key; widths: elements of the parts of a value."""
    return (
        tuple(jnp.zeros((queries, width), jnp.float32) for width in widths),
        jnp.full((queries,), MASKED, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
    )


def scores_of(query: Parts, key: Parts) -> jax.Array:
    """Returns the product of queries and keys, fp32 [query, key], from the parts of their heads."""
    return reduce(jnp.add, map(rows_times_rows, query, key))


def folded(
    state: State,
    scores: jax.Array,
    is_seen: jax.Array,
    value: Parts,
    softcap: float | None,
) -> State:
    """Returns the state with a tile of keys.

    scores: fp32 [query, key]; is_seen: bool, of their shape or one that spreads to it; value: parts
    [key, element]; softcap: see `AttentionSpec`.
    """
    mixed, peak, total = state
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(is_seen, scores, MASKED)
    higher = jnp.maximum(peak, scores.max(1))
    weights = jnp.where(is_seen, jnp.exp(scores - higher[:, None]), 0.0)
    shrunk = jnp.exp(peak - higher)
    rounded = weights.astype(value[0].dtype)
    mixed = tuple(
        before * shrunk[:, None] + rows_times_columns(rounded, part)
        for before, part in zip(mixed, value, strict=True)
    )
    return mixed, higher, total * shrunk + weights.sum(1)


def finished(state: State) -> tuple[Parts, jax.Array]:
    """Returns the result of attention, fp32 [query, element] for each part, and the log-sum-exp of
    the scores, fp32 [query]: zeros and `MASKED` for a query that sees no key."""
    mixed, peak, total = state
    divisor = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, peak + jnp.log(divisor), MASKED)
    return tuple(part / divisor[:, None] for part in mixed), lse
