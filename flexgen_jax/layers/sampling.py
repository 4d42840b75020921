"""Choice of token ids from logits: greedy, or random with temperature, top-k and top-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def greedy(logits: jax.Array) -> jax.Array:
    """Returns the ids, int32 [batch], of the largest logits; ties go to the lowest id.

    logits: fp32 [batch, vocabulary].
    """
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def keep_top(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Replaces the logits that top-k, and then top-p, leave out by -inf.

    logits: fp32 [batch, vocabulary], divided by the temperature; top_k: int32 [batch], 0 for
    all; top_p: fp32 [batch], 1 for all. The most likely token always stays.
    """
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None, :]
    ranked = jnp.where((top_k[:, None] > 0) & (rank >= top_k[:, None]), -jnp.inf, ranked)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    ranked = jnp.where(dropped & (rank > 0), -jnp.inf, ranked)
    inverse = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(ranked, inverse, axis=-1)


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    keys: jax.Array,
    token: jax.Array,
) -> jax.Array:
    """Draws one token id per row, int32 [batch].

    logits: fp32 [batch, vocabulary]; temperature, top_p: fp32 [batch]; top_k: int32 [batch]; keys:
    uint32 [batch, 2], a random key for each request; token: int32 [], the index of the token that
    is generated. A row of temperature 0 is greedy. The draw depends on a row's own key and token
    alone, not on its neighbours.
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    kept = keep_top(scaled, top_k, top_p)

    def draw(key: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(key, token), row)

    drawn = jax.vmap(draw)(keys, kept).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, greedy(logits))
