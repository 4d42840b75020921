"""Attention to keys and values that come in as blocks: projections, norms and rotation around the
kernels of `layers/kernels.py`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import (
    KVPair,
    Partial,
    attend_itself,
    first_seen,
    join_heads,
    merge,
    sides,
)
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.norm import Norm
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.rotary import Branches, Rows, angles, position_factors, rotate
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.parts import AttentionSpec

Arrays = tuple[jax.Array, ...]
"""A layer's cached arrays of tokens, in full precision, each [batch, KV head, token, element]."""


def _apart(x: jax.Array, branches: Branches) -> jax.Array:
    """Returns the branches of each row as rows: [batch, head, branches x token, element] as
    [batch x branches, head, token, element]."""
    batch, heads, _, size = x.shape
    split = x.reshape(batch, heads, branches.count, branches.tokens, size)
    return split.swapaxes(1, 2).reshape(-1, heads, branches.tokens, size)


def attend_earlier(
    query: jax.Array,
    blocks: tuple[tuple[Kept, Kept], ...],
    starts: jax.Array,
    position: jax.Array,
    end: jax.Array,
    first_valid: jax.Array,
    spec: AttentionSpec,
    kernels: Kernels,
) -> Partial:
    """Attends with one or several new tokens to the cache.

    query: [batch, head, token, head_dim], scaled; position: int32 [], the index of the first new
    token; end: int32 [], the index of the first invisible token: `position`, or the next index if
    the new token is already in the cache; further arguments are as in `Kernels.decode_attention`,
    but `first_valid` ignores the window. Returns fp32 [batch, head, token, head_dim], and the
    log-sum-exp.
    """
    tokens = query.shape[2]

    def attend(asked: jax.Array, at: jax.Array, spec: AttentionSpec) -> Partial:
        first = first_seen(at, first_valid, spec.window)
        return kernels.decode_attention(asked, blocks, starts, end, first, spec)

    if tokens == 1:
        return attend(query, position, spec)
    if spec.window is not None:  # each token sees others
        outputs = [attend(query[:, :, n : n + 1], position + n, spec) for n in range(tokens)]
        outs, sums = zip(*outputs, strict=True)
        return jnp.concatenate(outs, axis=2), jnp.concatenate(sums, axis=2)
    # All new tokens see the same cache: to the kernel, a head's tokens are heads that
    # share keys and values.
    heads = query.shape[1] * tokens
    asked = query.reshape(query.shape[0], heads, 1, query.shape[3])
    out, lse = attend(asked, position, replace(spec, num_heads=heads))
    return out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])


class SelfAttention(nn.Module):
    """Attention to keys and values that come in as blocks; see `AttentionSpec`.

    Another kind of attention has other projections: `_asked`, `_kept` and `_result` for attention
    to the cache, `_of_prompt` and `_prompt_result` for attention within a prompt.
    """

    config: ModelConfig
    spec: AttentionSpec
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        spec = self.spec
        product = partial(Linear, kernels=self.kernels, dtype=self.dtype, bits=self.matmul_bits)
        self.q = product(spec.query_size, use_bias=spec.qkv_bias)
        self.k = product(spec.kv_size, use_bias=spec.qkv_bias)
        if not spec.values_are_keys:
            self.v = product(spec.kv_size, use_bias=spec.qkv_bias)
        if spec.has_value_norm:
            self.v_norm = Norm(replace(self.config.norm, is_affine=False), self.kernels, self.dtype)
        self.out = product(self.config.hidden_size, use_bias=spec.out_bias)
        if spec.is_gated:
            self.gate = product(spec.query_size, use_bias=spec.qkv_bias)
        if spec.qk_norm is not None:
            self.q_norm = Norm(self.config.norm, self.kernels, self.dtype)
            self.k_norm = Norm(self.config.norm, self.kernels, self.dtype)
        if spec.has_sinks:
            zeros = nn.initializers.zeros
            self.sinks = self.param("sinks", zeros, (spec.num_heads,), self.dtype)

    def _asked(self, x: jax.Array, start: jax.Array, rows: Rows) -> jax.Array:
        """Returns scaled queries to the cache, [batch, head, token, head_dim], of tokens from index
        `start` on."""
        norm = self.q_norm if self.spec.qk_norm is not None else None
        heads = self._heads(self.q(x), norm, start, rows)
        return self._scaled(heads, start, rows).swapaxes(1, 2)

    def _kept(self, x: jax.Array, start: jax.Array, rows: Rows) -> Arrays:
        """Returns the cached arrays of tokens from index `start` on."""
        norm = self.k_norm if self.spec.qk_norm is not None else None
        made = self.k(x)
        key = self._heads(made, norm, start, rows)
        value = made if self.spec.values_are_keys else self.v(x)
        value = value.reshape(*x.shape[:2], -1, self.spec.head_dim)
        value = self.v_norm(value) if self.spec.has_value_norm else value
        return key.swapaxes(1, 2), value.swapaxes(1, 2)

    def _result(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns [batch, token, hidden] from the tokens, x, and their attention to the cache,
        [batch, head, token, head_dim]."""
        return self.out(self._gated(x, join_heads(attended.astype(self.dtype))))

    def _gated(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns attention's result, [batch, token, head x head_dim], times the tokens' gate."""
        return attended * jax.nn.sigmoid(self.gate(x)) if self.spec.is_gated else attended

    def _of_prompt(
        self, x: jax.Array, rows: Rows
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Arrays | None]:
        """Returns scaled queries, keys and values of a prompt, each [batch, token, head, element],
        and its cached arrays, None if these are the keys and values."""
        start = jnp.int32(0)
        query, row = self._asked(x, start, rows), self._kept(x, start, rows)
        key, value = (side.swapaxes(1, 2) for side in row)
        return (query.swapaxes(1, 2), key, value), None

    def _prompt_result(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns [batch, token, hidden] from the tokens, x, and the result of their attention
        within a prompt, [batch, token, head, element]."""
        return self.out(self._gated(x, attended.reshape(*attended.shape[:2], -1)))

    def _scaled(self, heads: jax.Array, start: jax.Array, rows: Rows) -> jax.Array:
        """Returns queries, [batch, token, head, element], times the factors of their scores."""
        scaled = heads * jnp.asarray(self.spec.scale, self.dtype)
        if self.spec.position_scale is None:
            return scaled
        return scaled * position_factors(self.spec, start, heads.shape[1], rows).astype(self.dtype)

    def _heads(self, x: jax.Array, norm: Norm | None, start: jax.Array, rows: Rows) -> jax.Array:
        """Divides queries or keys into heads, which are normalised and rotated."""
        if norm is not None and self.spec.qk_norm == "all":
            x = norm(x)
        heads = x.reshape(*x.shape[:2], -1, self.spec.head_dim)
        if norm is not None and self.spec.qk_norm == "head":
            heads = norm(heads)
        return self._rotated(heads, start, rows)

    def _rotated(self, heads: jax.Array, start: jax.Array, rows: Rows) -> jax.Array:
        """Rotates [batch, token, head, element], of tokens from index `start` on."""
        rotary = self.spec.rotary
        if rotary is None:
            return heads
        turned = angles(rotary, start, heads.shape[1], rows)
        return rotate(heads, turned, rotary.is_interleaved)

    def _with_sinks(self, partial: Partial) -> Partial:
        """Adds the heads' sinks to a partial result, once for each token."""
        if not self.spec.has_sinks:
            return partial
        out, lse = partial
        scores = jnp.broadcast_to(self.sinks.astype(jnp.float32)[None, :, None], lse.shape)
        return merge([partial, (jnp.zeros_like(out), scores)])

    def _within(
        self, query: jax.Array, key: jax.Array, value: jax.Array, first_valid: jax.Array
    ) -> tuple[jax.Array, KVPair]:
        """Attends within a prompt; see `Kernels.prefill_attention`."""
        if not self.spec.has_sinks:
            return self.kernels.prefill_attention(query, key, value, first_valid, self.spec)
        q, k, v = (side.swapaxes(1, 2) for side in (query, key, value))
        start = jnp.int32(0)
        partial = self.kernels.chunk_attention(q, k, v, first_valid, start, self.spec)
        out, _ = self._with_sinks(partial)
        return out.astype(self.dtype).swapaxes(1, 2), (k, v)

    def prefill(self, x: jax.Array, rows: Rows) -> tuple[jax.Array, Arrays]:
        """Attends within a prompt x, [batch, token, hidden].

        Returns an array of x's shape, and the prompt's cached arrays.
        """
        prompt, row = self._of_prompt(x, rows)
        out, pair = self._within(*prompt, rows.first_valid)
        return self._prompt_result(x, out), pair if row is None else row

    def prefill_branches(
        self, x: jax.Array, rows: Rows, branches: Branches
    ) -> tuple[jax.Array, Arrays]:
        """Attends within contexts and within their branches, x: [batch, token, hidden]; each branch
        sees its context and itself alone. The result is that of `prefill`."""
        spec, (batch, tokens, _) = self.spec, x.shape
        prompt, row = self._of_prompt(x, rows)
        shared = tokens - branches.total
        first = jnp.minimum(rows.first_valid, shared - 1)  # one is computed where there is none
        query, key, value = (side[:, :shared] for side in prompt)
        out, pair = self._within(query, key, value, first)
        q, k, v = (side[:, shared:].swapaxes(1, 2) for side in prompt)
        # All branches attend to the context as one, each to itself as a row of its own.
        to_prompt = self.kernels.chunk_attention(
            q, *pair, rows.first_valid, jnp.int32(shared), spec
        )
        rows_of_branches = (_apart(q, branches), _apart(k, branches), _apart(v, branches))
        none = jnp.zeros(batch * branches.count, jnp.int32)
        to_branch = self.kernels.chunk_attention(*rows_of_branches, none, jnp.int32(0), spec)
        to_prompt = (
            _apart(to_prompt[0], branches),
            _apart(to_prompt[1][..., None], branches)[..., 0],
        )
        merged = (
            self._with_sinks(merge([to_branch, to_prompt]))[0].astype(self.dtype).swapaxes(1, 2)
        )
        merged = merged.reshape(batch, branches.total, *out.shape[2:])
        if row is None:
            joined = zip(pair, (k, v), strict=True)
            row = tuple(jnp.concatenate(parts, axis=2) for parts in joined)
        return self._prompt_result(x, jnp.concatenate([out, merged], axis=1)), row

    def prefill_last(self, x: jax.Array, rows: Rows) -> tuple[jax.Array, Arrays]:
        """Attends with only the last token of a prompt x, [batch, token, hidden].

        Returns [batch, 1, hidden], and the cached arrays of all tokens.
        """
        last = jnp.int32(x.shape[1] - 1)
        query = self._asked(x[:, -1:], last, rows)
        row = self._kept(x, jnp.int32(0), rows)
        partial = self.kernels.decode_attention(
            query=query,
            blocks=(sides(row),),
            starts=jnp.zeros(1, jnp.int32),
            position=last + 1,
            first_valid=first_seen(last, rows.first_valid, self.spec.window),
            spec=self.spec,
        )
        return self._result(x[:, -1:], self._with_sinks(partial)[0]), row

    def join(
        self, x: jax.Array, query: jax.Array, rows: Arrays, partials: list[Partial]
    ) -> jax.Array:
        """Merges the new tokens' attention to themselves, unless `rows` is (), with partial results
        for the cache.

        x: the tokens, [batch, token, hidden]. Returns an array of its shape.
        """
        if rows:
            partials = [self._itself(query, rows), *partials]
        return self._result(x, self._with_sinks(merge(partials))[0])

    def _itself(self, query: jax.Array, rows: Arrays) -> Partial:
        """Attends with new tokens to themselves."""
        batch, _, tokens, _ = query.shape
        if tokens == 1:
            return attend_itself(query, *sides(rows), self.kernels.tuning, self.spec.softcap)
        none, start = jnp.zeros(batch, jnp.int32), jnp.int32(0)
        return self.kernels.chunk_attention(query, *sides(rows), none, start, self.spec)

    def project_chunk(
        self, x: jax.Array, start: jax.Array, rows: Rows, queries: int
    ) -> tuple[jax.Array, Partial, Arrays]:
        """Projects a chunk of a prompt, [batch, token, hidden], and attends within it.

        Returns the scaled queries of the last `queries` tokens, their partial result, and the
        cached arrays of all tokens.
        """
        lead = x.shape[1] - queries
        query = self._asked(x[:, lead:], start + lead, rows)
        row = self._kept(x, start, rows)
        key, value = sides(row)
        itself = self.kernels.chunk_attention(
            query=query,
            key=key,
            value=value,
            first_valid=jnp.maximum(rows.first_valid - start, 0),
            lead=jnp.int32(lead),
            spec=self.spec,
        )
        return query, self._with_sinks(itself), row

    def join_chunk(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns [batch, token, hidden] from the tokens, x, and the result of their attention,
        [batch, head, token, head_dim]."""
        return self._result(x, attended)

    def project(self, x: jax.Array, position: jax.Array, rows: Rows) -> tuple[jax.Array, Arrays]:
        """Projects x, [batch, token, hidden], to scaled queries, [batch, head, token, head_dim],
        and the tokens' cached arrays."""
        return self._asked(x, position, rows), self._kept(x, position, rows)
