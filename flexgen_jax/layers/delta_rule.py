"""The gated delta rule: a state that tokens update, one at a time or in chunks.

Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks", section 3. With S the state of a head,
[key element, value element], each token with query q, key k and value v, its fading a and the share
b with which it writes, does

    S = a S;  S = S + k (b (v - S' k))';  y = S' q
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Sides(NamedTuple):
    """What tokens ask of a state and write to it, fp32: of one token, or with an axis of tokens
    after the batch.

    query, key: [batch, key head, key element]; value: [batch, key head, value head of its group,
    value element]; log_fade, write: [batch, key head, value head], the logarithm of the fading and
    the share that is written.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_fade: jax.Array
    write: jax.Array


def step(sides: Sides, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes one token.

    state: fp32 [batch, key head, value head, key element, value element]. Returns the result, of
    the value's shape, and the new state.
    """
    query, key, value, log_fade, write = sides
    fade = jnp.exp(log_fade)[..., None]
    # One read of the state serves key and query; the token's own contribution is added afterwards.
    key_and_query = jnp.stack([key, query], axis=2)
    seen = _product("bkid,bkgde->bkgie", key_and_query, state) * fade[..., None]
    written = write[..., None] * (value - seen[..., 0, :])
    state = state * fade[..., None] + key[:, :, None, :, None] * written[..., None, :]
    return seen[..., 1, :] + (query * key).sum(-1)[..., None, None] * written, state


def chunk(sides: Sides, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes some tokens at once, as `step` computes one.

    A token whose key and log of fading are zeros changes nothing.

    The written values W solve (I + L) W = R, a triangular system: L[i, j] is the weight of token
    j's key for token i, R its value minus the prediction of the state before the chunk (section
    3.2, the UT transform).
    """
    query, key, value, log_fade, write = sides
    tokens = query.shape[1]
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool), -1)
    until = earlier | jnp.eye(tokens, dtype=bool)
    total = jnp.moveaxis(log_fade.cumsum(1), 1, -1)  # [batch, key head, value head, token]
    write = jnp.moveaxis(write, 1, -1)[..., None]
    value = jnp.moveaxis(value, 1, 3)
    # Masked before the exponential, because later tokens would overflow.
    between = jnp.exp(jnp.where(until, total[..., :, None] - total[..., None, :], -jnp.inf))
    since = jnp.exp(total)[..., None]
    keys = _product("bikd,bjkd->bkij", key, key)[:, :, None] * between
    from_state = _product("bikd,bkgde->bkgie", key, state) * since
    written = jax.lax.linalg.triangular_solve(
        jnp.where(earlier, keys * write, 0.0),
        write * (value - from_state),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    scores = _product("bikd,bjkd->bkij", query, key)[:, :, None] * between
    out = _product("bikd,bkgde->bkgie", query, state) * since
    out = out + _product("bkgij,bkgje->bkgie", scores, written)
    to_end = jnp.exp(total[..., -1:] - total)[..., None]  # the decay after each token
    state = state * since[..., -1:, :] + _product("bikd,bkgie->bkgde", key, written * to_end)
    return jnp.moveaxis(out, 3, 1), state
