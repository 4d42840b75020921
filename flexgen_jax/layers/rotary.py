"""Rotary position embeddings: the frequencies of every kind, and the rotation."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.models.parts import AttentionSpec, Rotary


@dataclass(frozen=True)
class Branches:
    """Continuations of one context in one row: at its end there are `count` branches of `tokens`
    tokens each, with padding after shorter ones. Each branch continues at the end of the
    context."""

    count: int
    tokens: int

    @property
    def total(self) -> int:
        """Tokens of all branches."""
        return self.count * self.tokens

    def columns(self, tokens: int) -> np.ndarray:
        """Returns how far each of a row's tokens is from the row's first column in its own
        sequence, int32 [token]."""
        context = tokens - self.total
        columns = np.tile(context + np.arange(self.tokens), self.count)
        return np.concatenate([np.arange(context), columns]).astype(np.int32)


class Rows(NamedTuple):
    """Where the sequences of a batch are: arrays of NumPy or of JAX, or their shapes.

    first_valid: int32 [batch], the index of each sequence's first real token; before: int32
    [batch], the number of prefix tokens before each row; most: int32 [batch], the most tokens that
    each sequence may have in the end, with the prefixes; adapters: int32 [batch], the number of
    each row's adapter, -1 for none, None if rows do not choose; columns: see `Branches`, None
    without.
    """

    first_valid: Any
    before: Any
    most: Any
    adapters: Any = None
    columns: Any = None

    @classmethod
    def of(
        cls,
        first_valid: np.ndarray,
        tokens: int,
        before: np.ndarray | None = None,
        longest: np.ndarray | None = None,
        adapters: np.ndarray | None = None,
    ) -> Rows:
        """Returns the rows of left-padded prompts of `tokens` tokens after prefixes of `before`,
        by default none; longest: by default that of the prompts alone."""
        first = np.asarray(first_valid, np.int32)
        before = np.zeros_like(first) if before is None else before.astype(np.int32)
        limits = before + tokens - first if longest is None else longest
        return cls(first, before, limits.astype(np.int32), adapters)

    @property
    def of_each(self) -> tuple[Any, ...]:
        """The arrays that have an element for each row, of which `Rows(*arrays)` can be made
        again."""
        return tuple(x for x in self[:4] if x is not None)

    @property
    def chosen(self) -> tuple[Any, ...]:
        """The rows' adapters as an argument, if rows choose."""
        return () if self.adapters is None else (self.adapters,)

    def with_branches(self, branches: Branches | None, tokens: int) -> Rows:
        """Returns these rows, of `tokens` tokens that end with branches, if there are any."""
        if branches is None:
            return self
        return self._replace(columns=jnp.asarray(branches.columns(tokens)))

    def positions(self, start: jax.Array, tokens: int) -> jax.Array:
        """Returns the positions of `tokens` tokens from index `start` on, int32 [batch, token];
        padding has positions below those of a sequence."""
        column = start + jnp.arange(tokens) if self.columns is None else self.columns
        positions: jax.Array = (self.before - self.first_valid)[:, None] + column[None, :]
        return positions


def frequencies(rotary: Rotary) -> tuple[np.ndarray, np.ndarray]:
    """Returns the angles per position, fp32 [size / 2], of sequences of up to the original context
    and of longer ones, which differ for longrope alone."""
    plain = (1.0 / rotary.theta ** (np.arange(0, rotary.size, 2) / rotary.size)).astype(np.float32)
    if rotary.kind == "linear":
        plain = plain / np.float32(rotary.factor)
    elif rotary.kind == "llama3":
        plain = _llama3(rotary, plain)
    elif rotary.kind == "yarn":
        plain = _yarn(rotary, plain)
    elif rotary.kind == "proportional":
        pairs = np.arange(rotary.size // 2)
        plain = np.where(pairs < (rotary.turning or 0), plain / np.float32(rotary.factor), 0)
        plain = plain.astype(np.float32)
    elif rotary.kind == "longrope":
        short, long = (plain / np.array(x, np.float32) for x in (rotary.short, rotary.long))
        return short, long
    return plain, plain


def _llama3(rotary: Rotary, plain: np.ndarray) -> np.ndarray:
    """Divides slow frequencies by the factor, with a smooth transition (LLaMA 3.1)."""
    turns = rotary.original * plain / (2 * pi)
    share = np.clip((turns - rotary.slow) / (rotary.fast - rotary.slow), 0, 1)
    divided: np.ndarray = plain * (share + (1 - share) / rotary.factor)
    return divided.astype(np.float32)


def _yarn(rotary: Rotary, plain: np.ndarray) -> np.ndarray:
    """Divides slow frequencies by the factor, with a ramp over the elements of a head (Peng et al.
    2023, section 3.2)."""

    def element(turns: float) -> float:
        return rotary.size * log(rotary.original / (turns * 2 * pi)) / (2 * log(rotary.theta))

    low, high = element(rotary.fast), element(rotary.slow)
    if rotary.truncates:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rotary.size - 1)
    high = high if high != low else high + 0.001
    ramp = np.clip((np.arange(rotary.size // 2) - low) / (high - low), 0, 1)
    mixed: np.ndarray = plain * (1 - ramp) + plain / rotary.factor * ramp
    return mixed.astype(np.float32)


Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines, each fp32 [batch, token, size / 2]."""


def angles(rotary: Rotary, start: jax.Array, tokens: int, rows: Rows) -> Angles:
    """Returns the angles of `tokens` tokens from index `start` on.

    With longrope, all tokens of a sequence have the frequencies of its length in the end, since
    those of its first tokens could not change later without computing them again.
    """
    positions = rows.positions(start, tokens)
    short, long = frequencies(rotary)
    factors = jnp.asarray(short)[None, None]
    if rotary.kind == "longrope":
        is_long = (rows.most > rotary.original)[:, None, None]
        factors = jnp.where(is_long, jnp.asarray(long)[None, None], factors)
    turned = positions[..., None].astype(jnp.float32) * factors
    return jnp.cos(turned) * rotary.scale, jnp.sin(turned) * rotary.scale


def rotate(x: jax.Array, turned: Angles, is_interleaved: bool = False) -> jax.Array:
    """Rotates x, [batch, token, head, head_dim], by angles; elements beyond the rotated ones stay.

    The two halves of the rotated elements are the coordinates of each pair. is_interleaved: they
    are neighbours in x, and in halves in the result: scores are the same in either order.
    """
    cos, sin = (side[:, :, None, :] for side in turned)
    half = cos.shape[-1]
    first, second, unrotated = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    if is_interleaved:
        rotated = jnp.concatenate([first, second], axis=-1)
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    pairs = (first * cos - second * sin, second * cos + first * sin, unrotated)
    return jnp.concatenate(pairs, axis=-1).astype(x.dtype)


def position_factors(spec: AttentionSpec, start: jax.Array, tokens: int, rows: Rows) -> jax.Array:
    """Returns the factors of queries, fp32 [batch, token, 1, 1]; see
    `AttentionSpec.position_scale`."""
    assert spec.position_scale is not None, "not every model has them"
    weight, original = spec.position_scale
    positions = jnp.maximum(rows.positions(start, tokens), 0)
    factors = 1 + weight * jnp.log1p((positions // original).astype(jnp.float32))
    return factors[..., None, None]
