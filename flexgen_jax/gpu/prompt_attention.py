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

from flexgen_jax.gpu.head_parts import Part, Side, load_parts, parts_of, width_of
from flexgen_jax.gpu.online_softmax import State, empty, finished, folded, scores_of
from flexgen_jax.gpu.triton import (
    MIN_ROWS,
    NARROW,
    call,
    load,
    power_of_two,
    store,
)
from flexgen_jax.layers.attention import Partial

QUERIES, KEYS, WIDE_KEYS = 64, 64, 32
"""Tokens of a tile of queries, and of one of keys and values, of heads up to `NARROW_HEAD` and
wider: a place has 99 KB of shared memory on the smallest cards."""

NARROW_HEAD, LARGEST_HEAD = 128, 256
"""Elements of the largest head whose tiles four warps hold in registers, and of the largest one
whose tiles fit a multiprocessor."""


class Shape(NamedTuple):
    """A kernel's static parameters: query heads of a KV head, queries, keys, the parts of a key's
    and of a value's head, the attention window, and the softcap."""

    group: int
    asked: int
    tokens: int
    key: tuple[Part, ...]
    value: tuple[Part, ...]
    window: int | None
    softcap: float | None

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return min(QUERIES, max(MIN_ROWS, power_of_two(self.asked)))

    @property
    def is_narrow(self) -> bool:
        return width_of(self.key) <= NARROW_HEAD

    @property
    def keys(self) -> int:
        """Keys and values of a tile."""
        return KEYS if self.is_narrow else WIDE_KEYS


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
    batch, queries, heads = query.shape[0], query.shape[token_axis], query.shape[3 - token_axis]
    shape = Shape(
        group=heads // key.shape[1],
        asked=queries,
        tokens=key.shape[2],
        key=parts_of(query.shape[3]),
        value=parts_of(value.shape[3]),
        window=window,
        softcap=softcap,
    )

    def of_head(size: int) -> pl.BlockSpec:
        if is_token_first:
            return pl.BlockSpec((None, queries, None, size), lambda b, h, t: (b, 0, h, 0))
        return pl.BlockSpec((None, None, queries, size), lambda b, h, t: (b, h, 0, 0))

    def of_keys(size: int) -> pl.BlockSpec:
        whole = (None, None, shape.tokens, size)
        return pl.BlockSpec(whole, lambda b, h, t: (b, h // shape.group, 0, 0))

    key_dim, value_dim = key.shape[3], value.shape[3]
    result = (*query.shape[:3], value_dim)
    out, lse = call(
        partial(_kernel, shape=shape),
        grid=(batch, heads, pl.cdiv(queries, shape.rows)),
        inputs=[
            (query, of_head(key_dim)),
            (key, of_keys(key_dim)),
            (value, of_keys(value_dim)),
            (first_valid, pl.BlockSpec((1,), lambda b, h, t: (b,))),
            (jnp.reshape(lead, 1).astype(jnp.int32), pl.BlockSpec((1,), lambda b, h, t: (0,))),
        ],
        outputs=[
            (jax.ShapeDtypeStruct(result, dtype), of_head(value_dim)),
            (
                jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
                pl.BlockSpec((None, None, queries), lambda b, h, t: (b, h, 0)),
            ),
        ],
        warps=4 if shape.is_narrow else 8,
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
    query_tokens = begin + jnp.arange(rows)
    is_asked = query_tokens < shape.asked
    query = tuple(load(query_ref, *part.at(query_tokens, is_asked)) for part in shape.key)
    last = lead_ref[0] + query_tokens
    state = empty(rows, [part.width for part in shape.value])
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
    tiles = (jnp.maximum(low, 0) // shape.keys, pl.cdiv(jnp.maximum(high, 0), shape.keys))
    out, lse = finished(jax.lax.fori_loop(*tiles, fold, state))
    for part, values in zip(shape.value, out, strict=True):
        place, mask = part.at(query_tokens, is_asked)
        store(out_ref, place, values.astype(out_ref.dtype), mask)
    store(lse_ref, (pl.ds(begin, rows),), lse, is_asked)


def _fold(
    tile: jax.Array,
    state: State,
    query: tuple[jax.Array, ...],
    block: tuple[Any, Any],
    seen: tuple[jax.Array, jax.Array],
    shape: Shape,
) -> State:
    """Adds a tile of keys and values to the sums over the tiles before: the values by their
    weights, the largest score, and the weights.

    query: the parts of the queries; seen: the first token visible to all queries, and the last
    token visible to each query.
    """
    places = tile * shape.keys + jnp.arange(shape.keys)
    is_token = places < shape.tokens if shape.tokens % shape.keys else None
    key, value = (
        load_parts(Side((ref,)), parts, places, is_token, query[0].dtype)
        for ref, parts in zip(block, (shape.key, shape.value), strict=True)
    )
    scores = scores_of(query, key)
    is_seen = ((places >= seen[0]) & (places < shape.tokens))[None, :] & (
        places[None, :] <= seen[1][:, None]
    )
    if shape.window is not None:
        is_seen &= places[None, :] > seen[1][:, None] - shape.window
    return folded(state, scores, is_seen, value, shape.softcap)
