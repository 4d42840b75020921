"""Attention of many tokens to one block of keys and values, without scores in memory.

A place of the grid has a tile of queries of one head, and folds the tiles of keys and values that
it sees: FlashAttention (Dao et al. 2022, algorithm 1; Dao 2023, section 3).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.online_softmax import State, empty, finished, folded
from flexgen_jax.gpu.triton import (
    LEAST_ROWS,
    NARROW,
    call,
    load,
    power_of_two,
    rows_times_rows,
    store,
)
from flexgen_jax.layers.attention import Partial

QUERIES, KEYS = 64, 64
"""Tokens of a tile of queries, and of one of keys and values."""

NARROW_HEAD, LARGEST_HEAD = 128, 256
"""Elements of the largest head whose tiles four warps hold in registers, and of the largest one
whose tiles fit a multiprocessor."""


class Shape(NamedTuple):
    """What a kernel is made for: query heads of a KV head, queries, keys, elements of a key's and
    of a value's head, the attention window, and the softcap."""

    group: int
    asked: int
    tokens: int
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float | None

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return min(QUERIES, max(LEAST_ROWS, power_of_two(self.asked)))


def can_attend(query: jax.Array, key: Any, value: Any) -> bool:
    """Returns whether the kernel takes these arguments of `attend`."""
    if query.dtype not in NARROW or query.shape[3] > LARGEST_HEAD:
        return False
    is_plain = isinstance(key, jax.Array) and isinstance(value, jax.Array)
    return is_plain and key.dtype == value.dtype == query.dtype


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first_valid: jax.Array,
    lead: jax.Array | int,
    window: int | None,
    softcap: float | None,
    is_token_first: bool = False,
    dtype: Any = jnp.float32,
    interprets: bool = False,
) -> Partial:
    """Attends to a block; see `layers.attention.chunk_attention`.

    With `is_token_first`, query and result are [batch, token, head, head_dim]. dtype: of the
    result; the log-sum-exp, [batch, head, token], is fp32.
    """
    token_axis = 1 if is_token_first else 2
    batch, asked, heads = query.shape[0], query.shape[token_axis], query.shape[3 - token_axis]
    shape = Shape(
        group=heads // key.shape[1],
        asked=asked,
        tokens=key.shape[2],
        key_dim=query.shape[3],
        value_dim=value.shape[3],
        window=window,
        softcap=softcap,
    )

    def of_head(size: int) -> pl.BlockSpec:
        if is_token_first:
            return pl.BlockSpec((None, asked, None, size), lambda b, h, t: (b, 0, h, 0))
        return pl.BlockSpec((None, None, asked, size), lambda b, h, t: (b, h, 0, 0))

    def of_keys(size: int) -> pl.BlockSpec:
        whole = (None, None, shape.tokens, size)
        return pl.BlockSpec(whole, lambda b, h, t: (b, h // shape.group, 0, 0))

    result = (*query.shape[:3], shape.value_dim)
    out, lse = call(
        partial(_kernel, shape=shape),
        grid=(batch, heads, pl.cdiv(asked, shape.rows)),
        inputs=[
            (query, of_head(shape.key_dim)),
            (key, of_keys(shape.key_dim)),
            (value, of_keys(shape.value_dim)),
            (first_valid, pl.BlockSpec((1,), lambda b, h, t: (b,))),
            (jnp.reshape(lead, 1).astype(jnp.int32), pl.BlockSpec((1,), lambda b, h, t: (0,))),
        ],
        outputs=[
            (jax.ShapeDtypeStruct(result, dtype), of_head(shape.value_dim)),
            (
                jax.ShapeDtypeStruct((batch, heads, asked), jnp.float32),
                pl.BlockSpec((None, None, asked), lambda b, h, t: (b, h, 0)),
            ),
        ],
        warps=4 if shape.key_dim <= NARROW_HEAD else 8,
        stages=2,
        interprets=interprets,
    )
    return out, lse


def _kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    first_ref: Any,
    lead_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    shape: Shape,
) -> None:
    """Attends with a tile of a head's queries, [query, head_dim], to the keys that it sees."""
    rows, begin = shape.rows, pl.program_id(2) * shape.rows
    key_dim, value_dim = power_of_two(shape.key_dim), power_of_two(shape.value_dim)
    is_asked = begin + jnp.arange(rows) < shape.asked
    here = pl.ds(begin, rows)

    def of_queries(width: int, size: int) -> jax.Array:
        return is_asked[:, None] & (jnp.arange(width) < size)[None, :]

    query = load(query_ref, (here, pl.ds(0, key_dim)), of_queries(key_dim, shape.key_dim))
    last = lead_ref[0] + begin + jnp.arange(rows)
    state = empty(rows, (value_dim,))
    low = first_ref[0]
    if shape.window is not None:
        low = jnp.maximum(low, lead_ref[0] + begin + 1 - shape.window)
    high = jnp.minimum(lead_ref[0] + begin + rows, shape.tokens)
    fold = partial(
        _fold,
        query=query,
        block=(key_ref, value_ref),
        seen=(first_ref[0], last),
        shape=shape,
    )
    tiles = (jnp.maximum(low, 0) // KEYS, pl.cdiv(jnp.maximum(high, 0), KEYS))
    (out,), lse = finished(jax.lax.fori_loop(*tiles, fold, state))
    out = out.astype(out_ref.dtype)
    store(out_ref, (here, pl.ds(0, value_dim)), out, of_queries(value_dim, shape.value_dim))
    store(lse_ref, (here,), lse, is_asked)


def _fold(
    tile: jax.Array,
    state: State,
    query: jax.Array,
    block: tuple[Any, Any],
    seen: tuple[jax.Array, jax.Array],
    shape: Shape,
) -> State:
    """Adds a tile of keys and values to the sums over the tiles before: the values by their
    weights, the largest score, and the weights.

    seen: the first token that all queries see, and the last one that each of them does.
    """
    at, here = tile * KEYS + jnp.arange(KEYS), pl.ds(tile * KEYS, KEYS)

    def tile_of(ref: Any, size: int) -> jax.Array:
        width, mask = power_of_two(size), None
        if shape.tokens % KEYS or width != size:
            mask = (at < shape.tokens)[:, None] & (jnp.arange(width) < size)[None, :]
        return load(ref, (here, pl.ds(0, width)), mask)

    key, value = tile_of(block[0], shape.key_dim), tile_of(block[1], shape.value_dim)
    scores = rows_times_rows(query, key)
    is_seen = ((at >= seen[0]) & (at < shape.tokens))[None, :] & (at[None, :] <= seen[1][:, None])
    if shape.window is not None:
        is_seen &= at[None, :] > seen[1][:, None] - shape.window
    return folded(state, scores, is_seen, (value,), shape.softcap)
