"""Choice of token ids from logits: greedy, or random with temperature, top-k, top-p and min-p,
after penalties and biases of single tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Choice(NamedTuple):
    """The features of a sampling program.

    is_greedy: whether all rows are greedy; adjusted: the most logits of a row that `adjust`
    changes, 0 without; logprobs: the number of most likely tokens whose log-probabilities are
    returned in addition to the chosen one's, None without; is_masked: whether only some tokens are
    allowed.
    """

    is_greedy: bool
    adjusted: int = 0
    logprobs: int | None = None
    is_masked: bool = False


def only_allowed(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Replaces logits of tokens that are not allowed by -inf.

    logits: fp32 [batch, vocabulary]; allowed: uint32 [batch, vocabulary / 32, rounded up], a bit
    for each token, the lowest first.
    """
    batch, vocabulary = logits.shape
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(batch, -1)[:, :vocabulary] > 0, logits, -jnp.inf)


def adjust(logits: jax.Array, ids: jax.Array, factor: jax.Array, added: jax.Array) -> jax.Array:
    """Changes some logits of each row.

    A logit above 0 is divided by its factor and any other multiplied by it (CTRL, section 4.1:
    a factor above 1 makes the token less likely); then `added` is added to it.

    logits: fp32 [batch, vocabulary]; ids: int32 [batch, some], distinct in a row, those outside of
    the vocabulary do nothing; factor, added: fp32 [batch, some].
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    current = logits.at[rows, ids].get(mode="fill", fill_value=0.0)
    current = jnp.where(current > 0, current / factor, current * factor) + added
    return logits.at[rows, ids].set(current, mode="drop")


def log_probabilities(
    logits: jax.Array, ids: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probabilities of tokens, fp32 [batch], and the ids and log-probabilities of
    the `count` likeliest ones, int32 and fp32 [batch, count].

    logits: fp32 [batch, vocabulary]; ids: int32 [batch].
    """
    logs = jax.nn.log_softmax(logits)
    of_ids = jnp.take_along_axis(logs, ids[:, None], axis=1)[:, 0]
    best, best_ids = jax.lax.top_k(logs, min(count, logs.shape[-1]))
    return of_ids, best_ids.astype(jnp.int32), best


def greedy(logits: jax.Array) -> jax.Array:
    """Returns the ids, int32 [batch], of the largest logits; ties go to the lowest id.

    logits: fp32 [batch, vocabulary].
    """
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def keep_top(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Replaces the logits that top-k, then top-p, and then min-p, leave out by -inf.

    logits: fp32 [batch, vocabulary], divided by the temperature; top_k: int32 [batch], 0 for
    all; top_p: fp32 [batch], 1 for all; min_p: fp32 [batch], the least probability relative to the
    likeliest token's, 0 for all. The most likely token always stays.
    """
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None, :]
    ranked = jnp.where((top_k[:, None] > 0) & (rank >= top_k[:, None]), -jnp.inf, ranked)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    dropped |= probability < min_p[:, None] * probability[:, :1]
    ranked = jnp.where(dropped & (rank > 0), -jnp.inf, ranked)
    inverse = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(ranked, inverse, axis=-1)


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    keys: jax.Array,
    start: jax.Array,
    token: jax.Array,
) -> jax.Array:
    """Draws one token id per row, int32 [batch].

    logits: fp32 [batch, vocabulary]; temperature, top_p, min_p: fp32 [batch]; top_k: int32 [batch];
    keys: uint32 [batch, 2], a random key for each request; start: int32 [batch], how many tokens of
    each text an earlier run has made; token: int32 [], how many this run has. A row of temperature
    0 is greedy. The draw depends on a row's own key and token alone, not on its neighbours.
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    candidates = keep_top(scaled, top_k, top_p, min_p)

    def draw(key: jax.Array, place: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(key, place), row)

    drawn = jax.vmap(draw)(keys, start + token, candidates).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, greedy(logits))
