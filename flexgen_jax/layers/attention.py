"""Attention as a fold over write-once blocks of keys and values.

Shapes are [batch, head, token, head_dim]: XLA's CPU backend reads keys and values much faster
with heads before tokens than with tokens first. A block's partial result carries its
log-sum-exp, so that blocks can be attended to anywhere, in any order, and merged.
"""

from __future__ import annotations

from functools import reduce
from typing import TypeVar

import jax
import jax.numpy as jnp

from flexgen_jax.layers.matmul import precision_for
from flexgen_jax.layers.quantization import Kept, parts_of, plain
from flexgen_jax.layers.tuning import PLAIN, Tuning

X = TypeVar("X")

MASKED = -1e30
"""Score of a masked key: finite, so that a block with no valid key stays free of NaN."""

Partial = tuple[jax.Array, jax.Array]
"""Result of attention to some blocks: the softmax-weighted sum of values, fp32 [batch, head, token,
head_dim], and the log-sum-exp of the scores, fp32 [batch, head, token]. When decoding, there is one
token."""

Block = tuple[Kept, ...]
"""A layer's cached arrays of consecutive tokens, each [batch, ..., token, element]."""

KVBlock = tuple[Kept, Kept]
"""Keys and values of some consecutive tokens, each [batch, KV head, token, head_dim]."""

KVPair = tuple[jax.Array, jax.Array]
"""Keys and values, each [batch, head, token, head_dim]."""


def sides(block: tuple[X, ...]) -> tuple[X, X]:
    """Returns the keys and values of a block of a layer that attends; of latent attention's one
    array, it is both."""
    return block[0], block[-1]


def attend(
    query: jax.Array,
    key: Kept,
    value: Kept,
    valid: jax.Array,
    tuning: Tuning = PLAIN,
    softcap: float | None = None,
) -> Partial:
    """Attends with one query token per sequence to one block.

    query: [batch, head, 1, head_dim], already scaled; key, value: [batch, KV head, token,
    head_dim], unpacked here if they are quantized; valid: bool [batch, token]. Query heads share
    heads of keys and values if there are fewer of these: consecutive ones form a group. softcap:
    see `AttentionSpec`.
    """
    return _mixed([key_scores(query, key, valid, tuning, softcap)], [value], tuning)


def _mixed(scores: list[jax.Array], values: list[Kept], tuning: Tuning) -> Partial:
    """Attends to several blocks: weights their values by one softmax over all their scores."""
    peak = reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in scores])
    weights = [jnp.exp(x - peak) for x in scores]
    total = reduce(jnp.add, [x.sum(-1, keepdims=True) for x in weights])
    sums = (weighted_sum(w, v, tuning) for w, v in zip(weights, values, strict=True))
    mixed = reduce(jnp.add, sums)
    return mixed / total[..., None], peak + jnp.log(total)


def key_scores(
    query: jax.Array,
    key: Kept,
    valid: jax.Array,
    tuning: Tuning = PLAIN,
    softcap: float | None = None,
) -> jax.Array:
    """Returns the query times each key, fp32 [batch, head, token]; `MASKED` for invalid keys."""
    rows, start = query.astype(jnp.float32), 0
    scores = jnp.zeros((), jnp.float32)
    for part in parts_of(key, tuning.has_barriers):
        stop = start + part.shape[3]
        scores = scores + _part_scores(rows[..., start:stop], part, tuning)
        start = stop
    return jnp.where(valid[:, None, :], capped(scores, softcap), MASKED)


def _part_scores(rows: jax.Array, part: jax.Array, tuning: Tuning) -> jax.Array:
    """Returns the products of queries with some elements of all keys, fp32 [batch, head, token]."""
    batch, kv_heads, tokens, _ = part.shape
    if rows.shape[1] == kv_heads:
        # For a matrix product, XLA's CPU backend would first copy the cache. Multiplying and
        # summing reads keys and values only once, which is much faster.
        return _sum_last(part.astype(jnp.float32) * rows, tuning.lanes)
    grouped = rows.reshape(batch, kv_heads, -1, rows.shape[3])
    return _grouped("bkgd,bktd->bkgt", grouped, part, tuning).reshape(batch, -1, tokens)


def _grouped(equation: str, grouped: jax.Array, part: jax.Array, tuning: Tuning) -> jax.Array:
    """Multiplies fp32 numbers of query heads with the keys or values that they share; fp32."""
    if tuning.keeps_cache_narrow:
        grouped = grouped.astype(part.dtype)
    else:
        part = part.astype(jnp.float32)
    return jnp.einsum(
        equation,
        grouped,
        part,
        precision=precision_for(part.dtype),
        preferred_element_type=jnp.float32,
    )


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Returns scores between -softcap and softcap (Gemma 2, section 2)."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _sum_last(x: jax.Array, lanes: int) -> jax.Array:
    """Adds up x, [batch, head, token, element], over its elements, in `lanes` partial sums."""
    if lanes == 1 or x.shape[3] % lanes:
        return x.sum(3)
    return x.reshape(*x.shape[:3], -1, lanes).sum(3).sum(3)


def weighted_sum(weights: jax.Array, value: Kept, tuning: Tuning = PLAIN) -> jax.Array:
    """Returns the weighted sum of values over tokens, fp32 [batch, head, 1, head_dim].

    weights: fp32 [batch, head, token]; value: [batch, KV head, token, head_dim].
    """
    batch, heads, tokens = weights.shape
    mixed = []
    for part in parts_of(value, tuning.has_barriers):
        kv_heads = part.shape[1]
        if heads == kv_heads:
            mixed.append((part.astype(jnp.float32) * weights[..., None]).sum(2))
            continue
        grouped = weights.reshape(batch, kv_heads, -1, tokens)
        summed = _grouped("bkgt,bktd->bkgd", grouped, part, tuning)
        mixed.append(summed.reshape(batch, heads, -1))
    return jnp.concatenate(mixed, axis=-1)[:, :, None]


def attend_blocks(
    query: jax.Array,
    blocks: tuple[tuple[Kept, Kept], ...],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    tuning: Tuning = PLAIN,
    softcap: float | None = None,
) -> Partial:
    """Attends with the new token's query to one or more blocks together.

    starts: int32 [block], the index of each block's first token; position: int32 [], the index of
    the new token; earlier tokens are valid; first_valid: int32 [batch], the index of each
    sequence's first token that it sees. Query and blocks have the shapes that `attend` takes.
    """
    scores = []
    for start, (key, _) in zip(starts, blocks, strict=True):
        valid = valid_tokens(start, key.shape[2], position, first_valid)
        scores.append(key_scores(query, key, valid, tuning, softcap))
    return _mixed(scores, [value for _, value in blocks], tuning)


def attend_itself(
    query: jax.Array,
    key: Kept,
    value: Kept,
    tuning: Tuning = PLAIN,
    softcap: float | None = None,
) -> Partial:
    """Attends with the new token's query to its own key and value, [batch, head, 1, head_dim]."""
    return attend(query, key, value, jnp.ones((query.shape[0], 1), bool), tuning, softcap)


def first_seen(position: jax.Array, first_valid: jax.Array, window: int | None) -> jax.Array:
    """Returns the index of the first token that the token at `position` sees, int32 [batch]."""
    return first_valid if window is None else jnp.maximum(first_valid, position + 1 - window)


def valid_tokens(
    start: jax.Array, count: int, position: jax.Array, first_valid: jax.Array
) -> jax.Array:
    """Returns which of `count` tokens from index `start` on are valid, bool [batch, token].

    Valid tokens are real ones (from `first_valid` on) before `position`.
    """
    places = start + jnp.arange(count)
    return (places[None, :] >= first_valid[:, None]) & (places < position)[None, :]


def merge(partials: list[Partial]) -> Partial:
    """Combines partial results of `attend` by their log-sum-exp.

    The result equals attention over the keys of all the blocks together.
    """
    if len(partials) == 1:
        return partials[0]
    peak = partials[0][1]
    for _, lse in partials[1:]:
        peak = jnp.maximum(peak, lse)
    total = jnp.zeros_like(peak)
    out = jnp.zeros_like(partials[0][0])
    for part, lse in partials:
        weight = jnp.exp(lse - peak)
        total = total + weight
        out = out + part * weight[..., None]
    return out / total[..., None], peak + jnp.log(total)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first_valid: jax.Array,
    at_once: int,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes a left-padded prompt's causal attention to itself, `at_once` heads at a time.

    query (scaled): [batch, head, token, head_dim]; key, value: the same with KV heads; first_valid:
    int32 [batch], the index of each sequence's first real token. Returns [batch, head, token,
    head_dim] in the value's dtype; rows of padding hold finite, meaningless numbers.
    """
    args = (query, key, value, first_valid, jnp.int32(0), at_once, window, softcap)
    return chunk_attention(*args)[0].astype(value.dtype)


def chunk_attention(
    query: jax.Array,
    key: Kept,
    value: Kept,
    first_valid: jax.Array,
    lead: jax.Array,
    at_once: int,
    window: int | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attends with several tokens per sequence to one block, `at_once` heads at a time.

    query (scaled): [batch, head, token, head_dim]; key, value: the same with KV heads and the
    block's tokens; first_valid: int32 [batch], the index in the block of each sequence's first real
    token; lead: int32 [], the first query's position relative to the block's first token (at least
    the block's length for an earlier block), or int32 [token], the position of each query. A token
    attends to none after it. Returns fp32 [batch, head, token, head_dim] and the log-sum-exp, fp32
    [batch, head, token].
    """
    batch, heads, queries, head_dim = query.shape
    tokens, group = key.shape[2], heads // key.shape[1]
    places, last = jnp.arange(tokens), lead if lead.ndim else lead + jnp.arange(queries)
    seen = places[None, :] <= last[:, None]
    if window is not None:
        seen &= places[None, :] > last[:, None] - window

    def one_head(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> Partial:
        """Attends with the queries of a group, [query, token, head_dim], to their head."""
        q, k, v, first = args
        precision = precision_for(k.dtype)
        rows = q.reshape(-1, head_dim)
        scores = jax.lax.dot_general(
            rows,
            k,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        ).reshape(group, queries, tokens)
        scores = jnp.where(seen & (places >= first)[None, :], capped(scores, softcap), MASKED)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        mixed = jnp.matmul(
            weights.astype(v.dtype).reshape(-1, tokens),
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return mixed.reshape(q.shape) / total, (peak + jnp.log(total))[..., 0]

    k, v = (x.reshape(-1, tokens, head_dim) for x in map(plain, (key, value)))
    q = query.reshape(-1, group, queries, head_dim)
    args = (q, k, v, jnp.repeat(first_valid, heads // group))
    if at_once >= batch * heads:
        out, lse = jax.vmap(one_head)(args)
    else:
        out, lse = jax.lax.map(one_head, args, batch_size=max(1, at_once // group))
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Reshapes [batch, token, hidden] to [batch, head, token, head_dim]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def join_heads(x: jax.Array) -> jax.Array:
    """Reshapes [batch, head, token, head_dim] to [batch, token, hidden]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
