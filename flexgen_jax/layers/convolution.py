"""Causal depthwise convolutions, for layers whose state is their last inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flexgen_jax.layers.rotary import Rows


def padding_of(rows: Rows, start: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of padding tokens in each row, int32 [batch], and whether tokens are real,
    bool [batch, token, 1]. The rows are `tokens` tokens from index `start` on."""
    padding = jnp.clip(rows.first_valid - start, 0, tokens)
    return padding, (jnp.arange(tokens) >= padding[:, None])[..., None]


def after(columns: jax.Array, new: jax.Array, padding: jax.Array) -> jax.Array:
    """Returns a convolution's inputs, [batch, columns + token, channel]: each row's cached columns
    directly before its first real token.

    padding: int32 [batch], the tokens before it. With the columns "a b" and one token of padding, a
    row "0 c d" becomes "0 a b c d".
    """
    width = columns.shape[1]
    joined = jnp.pad(new, ((0, 0), (width, 0), (0, 0)))

    def place(row: jax.Array, kept: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(row, kept, start, axis=0)

    return jax.vmap(place)(joined, columns.astype(new.dtype), padding)


def convolved(joined: jax.Array, weights: jax.Array, tokens: int) -> jax.Array:
    """Returns the weighted sums of each channel, fp32 [batch, token, channel].

    joined: of these tokens, and of those before them that the sums need; weights: [channel, 1,
    width], the latest token's last.
    """
    wide, width = weights.astype(jnp.float32), weights.shape[-1]
    total = jnp.zeros((joined.shape[0], tokens, joined.shape[2]), jnp.float32)
    for n in range(width):
        total = total + joined[:, n : n + tokens].astype(jnp.float32) * wide[:, 0, n]
    return total


def columns_after(joined: jax.Array, seen: jax.Array, width: int) -> jax.Array:
    """Returns the inputs that the next token needs, fp32 [batch, width - 1, channel]. seen: int32
    [], the number of tokens until then."""
    window = jax.lax.dynamic_slice_in_dim(joined, seen, width - 1, axis=1)
    return window.astype(jnp.float32)
