"""A new token's attention to all KV blocks in one kernel.

A place of the grid folds the tiles of every block, for the query heads that share one KV head of a
sequence: online softmax, as in FlashAttention (Dao et al. 2022, section 3.1). Few sequences are
divided along their tokens as well, so that all multiprocessors read; the parts are merged by their
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from flexgen_jax.layers.attention import KVPair, Partial, merge

TILE = 64
"""Tokens whose keys and values are multiplied together."""

LARGEST_HEAD = 256
"""Elements of the largest head whose tiles fit a multiprocessor."""

LARGEST_GROUP = 64
"""Query heads that share keys and values, up to which their results fit a multiprocessor."""

MOST_BLOCKS = 64
"""KV blocks that one kernel takes, each of which is two arguments."""

PLACES = 264
"""Places of a grid that keep the multiprocessors of a large GPU busy, two on each."""

FEW_PLACES = 8
"""Places of a head up to which XLA merges them in one kernel, with whatever takes the result: more
of them are reduced along an axis, by three kernels."""

LEAST_TOKENS = 512
"""The fewest tokens that are worth a place of their own."""


class Shape(NamedTuple):
    """What a kernel is made for: tokens of the blocks, query heads of a KV head, elements of a
    head, tokens of a place, and the softcap."""

    lengths: tuple[int, ...]
    group: int
    head_dim: int
    tokens: int
    softcap: float | None


def can_attend(query: jax.Array, blocks: Sequence[tuple[Any, Any]]) -> bool:
    """Returns whether the kernel takes these arguments of `attend`."""
    is_narrow = query.dtype in NARROW
    if not is_narrow or len(blocks) > MOST_BLOCKS or query.shape[3] > LARGEST_HEAD:
        return False
    if query.shape[1] > LARGEST_GROUP * blocks[0][0].shape[1]:
        return False
    arrays = [array for block in blocks for array in block]
    return all(
        isinstance(x, jax.Array) and x.dtype == query.dtype and x.shape[3] == query.shape[3]
        for x in arrays
    )


def attend(
    query: jax.Array,
    blocks: Sequence[KVPair],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    softcap: float | None,
    interprets: bool = False,
) -> Partial:
    """Attends to one or more KV blocks; see `Kernels.decode_attention`."""
    batch, heads, _, head_dim = query.shape
    kv_heads, total = blocks[0][0].shape[1], sum(key.shape[2] for key, _ in blocks)
    group = heads // kv_heads
    places = max(1, min(PLACES // (batch * kv_heads), total // LEAST_TOKENS))
    tokens = -(-total // (places * TILE)) * TILE
    shape = Shape(tuple(key.shape[2] for key, _ in blocks), group, head_dim, tokens, softcap)
    indices = jnp.concatenate([starts.astype(jnp.int32), jnp.reshape(position, 1)])
    of_head = pl.BlockSpec((None, None, group, head_dim), lambda b, h, p: (b, h, 0, 0))
    inputs = [
        (query.reshape(batch, kv_heads, group, head_dim), of_head),
        (indices, pl.BlockSpec(indices.shape, lambda b, h, p: (0,))),
        (first_valid, pl.BlockSpec((1,), lambda b, h, p: (b,))),
    ]
    for array in (array for block in blocks for array in block):
        size = (None, None, array.shape[2], head_dim)
        inputs.append((array, pl.BlockSpec(size, lambda b, h, p: (b, h, 0, 0))))
    out_shape = (batch, kv_heads, places, group, head_dim)
    outputs = [
        (
            jax.ShapeDtypeStruct(out_shape, jnp.float32),
            pl.BlockSpec((None, None, None, group, head_dim), lambda b, h, p: (b, h, p, 0, 0)),
        ),
        (
            jax.ShapeDtypeStruct(out_shape[:-1], jnp.float32),
            pl.BlockSpec((None, None, None, group), lambda b, h, p: (b, h, p, 0)),
        ),
    ]
    out, lse = call(
        partial(_kernel, shape=shape),
        grid=(batch, kv_heads, places),
        inputs=inputs,
        outputs=outputs,
        warps=4,
        stages=2,
        interprets=interprets,
    )
    out, lse = _merged(out, lse)
    return out.reshape(query.shape), lse.reshape(batch, heads, 1)


def _merged(out: jax.Array, lse: jax.Array) -> Partial:
    """Merges the places of each head, the third axis."""
    places = out.shape[2]
    if places <= FEW_PLACES:
        return merge([(out[:, :, n], lse[:, :, n]) for n in range(places)])
    peak = lse.max(2, keepdims=True)
    weights = jnp.exp(lse - peak)
    total = weights.sum(2)
    mixed = (out * weights[..., None]).sum(2) / total[..., None]
    return mixed, peak[:, :, 0] + jnp.log(total)


def _kernel(query_ref: Any, indices_ref: Any, first_ref: Any, *refs: Any, shape: Shape) -> None:
    """Attends with the queries of a group, [group, head_dim], to some tokens of all blocks.

    indices_ref: the index of each block's first token, and of the new token; first_ref: of the
    sequence's first token; refs: keys and values by block, [token, head_dim], and the outputs.
    """
    *cache, out_ref, lse_ref = refs
    rows, width = max(LEAST_ROWS, power_of_two(shape.group)), power_of_two(shape.head_dim)
    is_row, is_element = jnp.arange(rows) < shape.group, jnp.arange(width) < shape.head_dim
    of_group = (pl.ds(0, rows), pl.ds(0, width))
    in_group = is_row[:, None] & is_element[None, :]
    query = load(query_ref, of_group, in_group)
    # A place has tokens from `begin` on.
    begin = pl.program_id(2) * shape.tokens
    first = jnp.maximum(first_ref[0], begin)
    stop = jnp.minimum(indices_ref[len(shape.lengths)], begin + shape.tokens)
    state = empty(rows, width)
    for index, length in enumerate(shape.lengths):
        start = indices_ref[index]
        fold = partial(
            _fold,
            query=query,
            block=(cache[2 * index], cache[2 * index + 1]),
            seen=(first - start, stop - start),
            length=length,
            shape=shape,
        )
        low = jnp.clip(first - start, 0, length) // TILE
        high = pl.cdiv(jnp.clip(stop - start, 0, length), TILE)
        state = jax.lax.fori_loop(low, high, fold, state)
    out, lse = finished(state)
    store(out_ref, of_group, out, in_group)
    store(lse_ref, (pl.ds(0, rows),), lse, is_row)


def _fold(
    tile: jax.Array,
    state: State,
    query: jax.Array,
    block: tuple[Any, Any],
    seen: tuple[jax.Array, jax.Array],
    length: int,
    shape: Shape,
) -> State:
    """Adds a tile of a block to the sums over the tiles before: the values by their weights, the
    largest score, and the weights.

    seen: the first token of the block that is attended to, and the first one after these.
    """
    at = tile * TILE + jnp.arange(TILE)
    of_tile, mask = (pl.ds(tile * TILE, TILE), pl.ds(0, query.shape[1])), None
    if length % TILE or query.shape[1] != shape.head_dim:
        is_element = jnp.arange(query.shape[1]) < shape.head_dim
        mask = (at < length)[:, None] & is_element[None, :]
    key, value = (load(ref, of_tile, mask) for ref in block)
    scores = rows_times_rows(query, key)
    is_seen = ((at >= seen[0]) & (at < seen[1]) & (at < length))[None, :]
    return folded(state, scores, is_seen, value, shape.softcap)
