"""Attention as a fold over write-once blocks of keys and values.

Shapes are [batch, head, token, head_dim]: XLA's CPU backend reads keys and values much faster
with heads before tokens than with tokens first. A block's partial result carries its
log-sum-exp, so that blocks can be attended to anywhere, in any order, and merged.
"""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp

from flexgen_jax.layers.matmul import precision_for
from flexgen_jax.layers.quantization import Kept, QuantizedArray, dequantize, parts_of
from flexgen_jax.layers.tuning import PLAIN, Tuning

MASKED = -1e30
"""Score of a masked key: finite, so that a block with no valid key stays free of NaN."""

Partial = tuple[jax.Array, jax.Array]
"""Result of attention to some blocks: the softmax-weighted sum of values, fp32 [batch, head, token,
head_dim], and the log-sum-exp of the scores, fp32 [batch, head, token]. When decoding, there is one
token."""

KVPair = tuple[jax.Array, jax.Array]
"""Keys and values, each [batch, head, token, head_dim]."""


def attend(
    query: jax.Array, key: Kept, value: Kept, valid: jax.Array, tuning: Tuning = PLAIN
) -> Partial:
    """Attends with one query token per sequence to one block.

    query: [batch, head, 1, head_dim], already scaled; key, value: [batch, head, token,
    head_dim], unpacked here if they are quantized; valid: bool [batch, token].
    """
    return _mixed([key_scores(query, key, valid, tuning)], [value], tuning)


def _mixed(scores: list[jax.Array], values: list[Kept], tuning: Tuning) -> Partial:
    """Attends to several blocks: weights their values by one softmax over all their scores."""
    peak = reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in scores])
    weights = [jnp.exp(x - peak) for x in scores]
    total = reduce(jnp.add, [x.sum(-1, keepdims=True) for x in weights])
    sums = (weighted_sum(w, v, tuning) for w, v in zip(weights, values, strict=True))
    mixed = reduce(jnp.add, sums)
    return mixed / total[..., None], peak + jnp.log(total)


def key_scores(query: jax.Array, key: Kept, valid: jax.Array, tuning: Tuning = PLAIN) -> jax.Array:
    """Returns the query times each key, fp32 [batch, head, token]; `MASKED` for invalid keys."""
    # For a matrix product, XLA's CPU backend would first copy the cache. Multiplying and summing
    # reads keys and values only once, which is much faster.
    rows, start = query.astype(jnp.float32), 0
    scores = jnp.zeros((), jnp.float32)
    for part in parts_of(key, tuning.has_barriers):
        stop = start + part.shape[3]
        scores = scores + _sum_last(part.astype(jnp.float32) * rows[..., start:stop], tuning.lanes)
        start = stop
    return jnp.where(valid[:, None, :], scores, MASKED)


def _sum_last(x: jax.Array, lanes: int) -> jax.Array:
    """Adds up x, [batch, head, token, element], over its elements, in `lanes` partial sums."""
    if lanes == 1 or x.shape[3] % lanes:
        return x.sum(3)
    return x.reshape(*x.shape[:3], -1, lanes).sum(3).sum(3)


def weighted_sum(weights: jax.Array, value: Kept, tuning: Tuning = PLAIN) -> jax.Array:
    """Returns the weighted sum of values over tokens, fp32 [batch, head, 1, head_dim].

    weights: fp32 [batch, head, token]; value: [batch, head, token, head_dim].
    """
    parts = parts_of(value, tuning.has_barriers)
    mixed = [(part.astype(jnp.float32) * weights[..., None]).sum(2) for part in parts]
    return jnp.concatenate(mixed, axis=-1)[:, :, None]


def attend_blocks(
    query: jax.Array,
    blocks: tuple[tuple[Kept, Kept], ...],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    tuning: Tuning = PLAIN,
) -> Partial:
    """Attends with the new token's query to one or more blocks together.

    starts: int32 [block], the index of each block's first token; position: int32 [], the index of
    the new token, before which tokens are valid; first_valid: int32 [batch], the index of each
    sequence's first real token. Query and blocks have the shapes that `attend` takes.
    """
    scores = []
    for start, (key, _) in zip(starts, blocks, strict=True):
        valid = valid_tokens(start, key.shape[2], position, first_valid)
        scores.append(key_scores(query, key, valid, tuning))
    return _mixed(scores, [value for _, value in blocks], tuning)


def attend_itself(query: jax.Array, key: Kept, value: Kept, tuning: Tuning = PLAIN) -> Partial:
    """Attends with the new token's query to its own key and value, [batch, head, 1, head_dim]."""
    return attend(query, key, value, jnp.ones((query.shape[0], 1), bool), tuning)


def valid_tokens(
    start: jax.Array, count: int, position: jax.Array, first_valid: jax.Array
) -> jax.Array:
    """Returns which of `count` tokens from index `start` on are valid, bool [batch, token].

    Valid tokens are real ones (from `first_valid` on) before `position`.
    """
    at = start + jnp.arange(count)
    return (at[None, :] >= first_valid[:, None]) & (at < position)[None, :]


def merge(partials: list[Partial]) -> Partial:
    """Combines partial results of `attend` by their log-sum-exp.

    The result equals attention over the keys of all the blocks together.
    """
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
    query: jax.Array, key: jax.Array, value: jax.Array, first_valid: jax.Array, at_once: int
) -> jax.Array:
    """Computes a left-padded prompt's causal attention to itself, `at_once` heads at a time.

    query (scaled), key, value: [batch, head, token, head_dim]; first_valid: int32 [batch],
    the index of each sequence's first real token. Returns [batch, head, token, head_dim] in
    the value's dtype; rows of padding hold finite, meaningless numbers.
    """
    batch, heads, tokens, head_dim = query.shape
    positions = jnp.arange(tokens)
    causal = positions[:, None] >= positions[None, :]

    def one_head(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v, first = args
        precision = precision_for(k.dtype)
        scores = jax.lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(causal & (positions >= first)[None, :], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.matmul(weights, v, precision=precision, preferred_element_type=jnp.float32)
        return out.astype(v.dtype)

    q, k, v = (x.reshape(batch * heads, tokens, head_dim) for x in (query, key, value))
    args = (q, k, v, jnp.repeat(first_valid, heads))
    if at_once >= batch * heads:
        out = jax.vmap(one_head)(args)
    else:
        out = jax.lax.map(one_head, args, batch_size=at_once)
    return out.reshape(batch, heads, tokens, head_dim)


def chunk_attention(
    query: jax.Array,
    key: Kept,
    value: Kept,
    first_valid: jax.Array,
    is_causal: bool,
    at_once: int,
) -> Partial:
    """Attends with several tokens per sequence to one block, `at_once` heads at a time.

    query (scaled): [batch, head, token, head_dim]; key, value: the same with the block's tokens;
    first_valid: int32 [batch], the index in the block of each sequence's first real token;
    is_causal: whether the queries are those of the block's last tokens, each of which attends to
    no later one. Returns fp32 [batch, head, token, head_dim] and the log-sum-exp, fp32 [batch,
    head, token].
    """
    batch, heads, asked, head_dim = query.shape
    tokens = key.shape[2]
    at = jnp.arange(tokens)
    last = tokens - asked + jnp.arange(asked)
    seen = (at[None, :] <= last[:, None]) | (not is_causal)

    def one_head(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> Partial:
        q, k, v, first = args
        precision = precision_for(k.dtype)
        scores = jax.lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen & (at >= first)[None, :], scores, MASKED)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        weights = weights.astype(v.dtype)
        out = jnp.matmul(weights, v, precision=precision, preferred_element_type=jnp.float32)
        return out / total, (peak + jnp.log(total))[:, 0]

    k, v = (x.reshape(batch * heads, tokens, head_dim) for x in map(plain, (key, value)))
    q = query.reshape(batch * heads, asked, head_dim)
    args = (q, k, v, jnp.repeat(first_valid, heads))
    if at_once >= batch * heads:
        out, lse = jax.vmap(one_head)(args)
    else:
        out, lse = jax.lax.map(one_head, args, batch_size=at_once)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def plain(kept: Kept) -> jax.Array:
    """Returns an array with its numbers unpacked."""
    return dequantize(kept) if isinstance(kept, QuantizedArray) else kept


def attend_prompt(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first_valid: jax.Array,
    heads: int,
    at_once: int,
) -> tuple[jax.Array, KVPair]:
    """Computes a left-padded prompt's attention to itself, and its keys and values for the cache.

    query (scaled), key, value: [batch, token, hidden]; at_once: number of heads, of the whole
    batch, that are computed at a time. Returns the result, [batch, token, hidden], and keys and
    values, each [batch, head, token, head_dim].
    """
    query, key, value = (split_heads(x, heads) for x in (query, key, value))
    return join_heads(causal_attention(query, key, value, first_valid, at_once)), (key, value)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Reshapes [batch, token, hidden] to [batch, head, token, head_dim]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def join_heads(x: jax.Array) -> jax.Array:
    """Reshapes [batch, head, token, head_dim] to [batch, token, hidden]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
