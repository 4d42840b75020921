"""Attention as a fold over write-once blocks of keys and values.

Shapes are [batch, head, token, head_dim]: with heads before tokens XLA's CPU products read
KV ten times faster than with tokens first. A block's partial result carries its
log-sum-exp, so that blocks can be attended to anywhere, in any order, and merged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flexgen_jax.layers.linear import precision_for
from flexgen_jax.layers.quantization import Kept, contract, expand
from flexgen_jax.layers.spec import scored_heads

MASKED = -1e30
"""Score of a masked key: finite, so that a block with no valid key stays free of NaN."""


def attend(
    query: jax.Array, key: Kept, value: Kept, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One query token a sequence against one block.

    query: [batch, head, 1, head_dim], already scaled; key, value: [batch, head, token,
    head_dim], unpacked here if they are quantized; valid: bool [batch, token]. Returns the
    block's softmax-weighted values (fp32, [batch, head, 1, head_dim]) and the log-sum-exp of
    its scores (fp32, [batch, head, 1]).
    """
    # XLA's CPU backend: with a lone 16-bit row a product is ten times slower than with two, and
    # with the long operand first, for the scores, it is twice as fast.
    copies = 1 if key.dtype == jnp.float32 else 2
    precision = precision_for(key.dtype)

    def scores_of(rows: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            part,
            rows,
            (((3,), (3,)), ((0, 1), (0, 1))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def mixed(rows: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            rows,
            part,
            (((3,), (2,)), ((0, 1), (0, 1))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    scores = contract(jnp.concatenate([query] * copies, axis=2), key, scores_of)[..., 0]
    scores = jnp.where(valid[:, None, :], scores, MASKED)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    rows = jnp.stack([weights.astype(value.dtype)] * copies, axis=2)
    out = expand(rows, value, mixed)[:, :, :1] / total[..., None]
    return out, peak + jnp.log(total)


def merge(partials: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Combines partial results of `attend` by their log-sum-exp.

    partials: (out [batch, head, 1, head_dim], lse [batch, head, 1]) a block. Returns fp32
    [batch, head, 1, head_dim], the attention over all the blocks' keys together.
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
    return out / total[..., None]


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, first_valid: jax.Array
) -> jax.Array:
    """Attention of a left-padded prompt to itself.

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
    at_once = scored_heads(batch * heads, tokens)
    if at_once == batch * heads:
        out = jax.vmap(one_head)(args)
    else:
        out = jax.lax.map(one_head, args, batch_size=at_once)
    return out.reshape(batch, heads, tokens, head_dim)
