"""The gated delta rule by its formula."""

from __future__ import annotations

import numpy as np

Arrays = tuple[np.ndarray, ...]


def made(
    seed: int, batch: int, tokens: int, heads: int, group: int, alike: bool, values: int = 6
) -> tuple[Arrays, np.ndarray]:
    """Queries, keys of length 1, values, logarithms of the fading, shares, and a state; alike:
    whether all keys are equal, which is what a triangular system suffers from."""
    rng = np.random.default_rng(seed)
    shape = (batch, tokens, heads)
    query, key = rng.normal(size=(2, *shape, 8))
    key = np.broadcast_to(key[:, :1], key.shape) if alike else key
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.normal(size=(*shape, group, values))
    log_fade = -rng.exponential(rng.choice([0.01, 1.0, 30.0]), size=(*shape, group))
    write = rng.uniform(size=(*shape, group))
    return (query, key, value, log_fade, write), rng.normal(size=(batch, heads, group, 8, values))


def by_formula(given: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S = a S; S = S + k (b (v - S' k))'; y = S' q, head by head, in fp64."""
    query, key, value, log_fade, write = given
    state, results = state.copy(), np.zeros(value.shape)
    for where in np.ndindex(value.shape[:4]):
        row, token, head, member = where
        kept = state[row, head, member] * np.exp(log_fade[where])
        k, q = key[row, token, head], query[row, token, head]
        kept = kept + np.outer(k, write[where] * (value[where] - kept.T @ k))
        state[row, head, member], results[where] = kept, kept.T @ q
    return results, state
