"""Top-K sparse attention (FlexGen, section 5): all keys are scored, few values are read.

The softmax is over all tokens. Then every head keeps the new token and the `counts` earlier tokens
with the highest scores (the earlier token at equal scores). As in FlexGen's own code, the weights
of the kept tokens are not scaled up, which also loses less accuracy.

`rank` finds candidates among some blocks, and `attend_ranked` gathers the values of the first
`counts` of them. Between the two calls, a caller that also knows the candidates of other places
can decide on the counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import (
    Partial,
    key_scores,
    valid_tokens,
    weighted_sum,
)
from flexgen_jax.layers.quantization import Kept, QuantizedArray, assemble
from flexgen_jax.layers.tuning import PLAIN, Tuning


class Ranked(NamedTuple):
    """The candidates that `rank` found in some blocks.

    scores: fp32 [batch, head, candidate], highest first; tokens: int32 [batch, head, candidate],
    the candidates' indices as if the blocks were one; lse: fp32 [batch, head, 1], the log-sum-exp
    of all the blocks' scores.
    """

    scores: jax.Array
    tokens: jax.Array
    lse: jax.Array


GATHERED_TOGETHER = 4
"""Number of blocks whose values are gathered together, as one block. XLA looks up
every element's block, which costs little only for a few blocks. Each time, room for all candidates
is gathered, so that a cache of very many blocks is better on the host."""


def rank(
    query: jax.Array,
    keys: tuple[Kept, ...],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    max_tokens: int,
    tuning: Tuning = PLAIN,
    softcap: float | None = None,
) -> Ranked:
    """Returns the `max_tokens` tokens with the highest scores, or all tokens if they are fewer.

    query: [batch, head, 1, head_dim], scaled; keys: each [batch, head, token, head_dim]; starts:
    int32 [block], the index of each block's first token in the sequence; position: int32, the
    new token's index; first_valid: int32 [batch]. Tokens that are not valid score `MASKED`.
    """
    scores = [
        key_scores(
            query,
            key,
            valid_tokens(start, key.shape[2], position, first_valid),
            tuning,
            softcap,
        )
        for start, key in zip(starts, keys, strict=True)
    ]
    together = jnp.concatenate(scores, axis=2)
    highest, tokens = jax.lax.top_k(together, min(max_tokens, together.shape[2]))
    peak = together.max(-1, keepdims=True)
    lse = peak + jnp.log(jnp.exp(together - peak).sum(-1, keepdims=True))
    return Ranked(highest, tokens, lse)


def attend_ranked(
    values: tuple[Kept, ...], ranked: Ranked, counts: jax.Array, tuning: Tuning = PLAIN
) -> Partial:
    """Attends with the query that was ranked to the first `counts` candidates of each head.

    values: those of the ranked blocks, each [batch, head, token, head_dim]; counts: int32 [batch,
    head], at most the number of valid candidates.
    """
    slots = jnp.arange(ranked.scores.shape[2])
    weights = jnp.where(slots < counts[..., None], jnp.exp(ranked.scores - ranked.lse), 0)
    out = jnp.zeros((*ranked.lse.shape, values[0].shape[3]), jnp.float32)
    for start, length, group in _groups(values):
        places = ranked.tokens - start
        is_inside = (places >= 0) & (places < length)
        gathered = _take(group, jnp.clip(places, 0, length - 1))
        out = out + weighted_sum(jnp.where(is_inside, weights, 0), gathered, tuning)
    return out, ranked.lse


def attend_top(
    query: jax.Array,
    blocks: tuple[tuple[Kept, Kept], ...],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
    counts: jax.Array,
    max_tokens: int,
    tuning: Tuning = PLAIN,
    softcap: float | None = None,
) -> Partial:
    """Computes sparse attention to blocks that are all in one place.

    counts: int32 [batch], at most `max_tokens` and the number of each sequence's valid tokens;
    further arguments as in `rank`.
    """
    keys, values = zip(*blocks, strict=True)
    ranked = rank(query, keys, starts, position, first_valid, max_tokens, tuning, softcap)
    per_head = jnp.broadcast_to(counts[:, None], query.shape[:2])
    return attend_ranked(values, ranked, per_head, tuning)


def _groups(values: Sequence[Kept]) -> Iterator[tuple[int, int, list[Kept]]]:
    """Groups up to `GATHERED_TOGETHER` consecutive blocks of the same format.

    Yields the index of a group's first token, its number of tokens, and its blocks.
    """
    starts = [0, *accumulate(value.shape[2] for value in values)]
    begin = 0
    while begin < len(values):
        is_packed = isinstance(values[begin], QuantizedArray)
        end = begin + 1
        while end < min(len(values), begin + GATHERED_TOGETHER):
            if isinstance(values[end], QuantizedArray) != is_packed:
                break
            end += 1
        yield starts[begin], starts[end] - starts[begin], list(values[begin:end])
        begin = end


def _take(blocks: list[Kept], tokens: jax.Array) -> Kept:
    """Gathers tokens, int32 [batch, head, slot], from blocks of the same format.

    Tokens of quantized blocks stay quantized. Returns [batch, head, slot, head_dim].
    """
    batch, heads, slots = tokens.shape
    places = tokens.reshape(batch, blocks[0].shape[1], -1, 1)  # by KV head

    def gather(parts: Sequence[jax.Array]) -> jax.Array:
        gathered = jnp.take_along_axis(jnp.concatenate(parts, axis=2), places, axis=2)
        return gathered.reshape(batch, heads, slots, gathered.shape[3])

    leaves = [gather(parts) for parts in zip(*map(jax.tree.leaves, blocks), strict=True)]
    if not isinstance(blocks[0], QuantizedArray):
        return leaves[0]
    shape = (*tokens.shape, blocks[0].shape[3])
    array: Kept = assemble(replace(blocks[0].storage, shape=shape), leaves)
    return array
