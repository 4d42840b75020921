"""One transformer layer, in its two phases: prefill of a prompt and decode of one token.

A layer with experts ends here after attention: `layers/experts.py` has what follows.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import TypeVar

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
)
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.mlp import MLP
from flexgen_jax.layers.norm import Norm
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.rotary import Branches, Rows, angles, rotate
from flexgen_jax.layers.sparse_attention import attend_top
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.parts import AttentionSpec, LayerParts, MLPSpec

KVBlock = tuple[Kept, Kept]
"""Keys and values of some consecutive tokens, each [batch, KV head, token, head_dim]."""

Block = tuple[Kept, ...]
"""What a layer keeps of some consecutive tokens, each [batch, ..., token, element]."""

T = TypeVar("T", bound=tuple[jax.Array, ...])


def append(tail: T, new: T, at: jax.Array) -> T:
    """Writes what a layer keeps of a token into the tail, the open KV block, at index `at`, in
    place if it is donated."""
    appended: T = jax.tree.map(
        lambda into, x: jax.lax.dynamic_update_slice_in_dim(into, x, at, axis=into.ndim - 2),
        tail,
        new,
    )
    return appended


def _apart(x: jax.Array, branches: Branches) -> jax.Array:
    """Returns the branches of each row as rows: [batch, head, branches x token, element] as
    [batch x branches, head, token, element]."""
    batch, heads, _, size = x.shape
    split = x.reshape(batch, heads, branches.count, branches.tokens, size)
    return split.swapaxes(1, 2).reshape(-1, heads, branches.tokens, size)


class SelfAttention(nn.Module):
    """Attention to keys and values that come in as blocks; see `AttentionSpec`."""

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
        self.v = product(spec.kv_size, use_bias=spec.qkv_bias)
        self.out = product(self.config.hidden_size, use_bias=spec.out_bias)
        if spec.qk_norm is not None:
            self.q_norm = Norm(self.config.norm, self.dtype)
            self.k_norm = Norm(self.config.norm, self.dtype)
        if spec.has_sinks:
            zeros = nn.initializers.zeros
            self.sinks = self.param("sinks", zeros, (spec.num_heads,), self.dtype)

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

    def prefill(self, x: jax.Array, rows: Rows) -> tuple[jax.Array, KVPair]:
        """Attends within a prompt x, [batch, token, hidden].

        Returns an array of x's shape, and the prompt's keys and values.
        """
        start = jnp.int32(0)
        query, (key, value) = self._query(x, start, rows), self._key_value(x, start, rows)
        out, block = self._within(query, key, value, rows.first_valid)
        return self.out(out.reshape(*x.shape[:2], -1)), block

    def prefill_branches(
        self, x: jax.Array, rows: Rows, branches: Branches
    ) -> tuple[jax.Array, KVPair]:
        """Attends within contexts and within their branches, x: [batch, token, hidden]; each branch
        sees its context and itself alone. The result is that of `prefill`."""
        start, spec, (batch, tokens, _) = jnp.int32(0), self.spec, x.shape
        query = self._query(x, start, rows)
        key, value = self._key_value(x, start, rows)
        own = tokens - branches.total
        first = jnp.minimum(rows.first_valid, own - 1)  # one is computed where there is none
        mine = (query[:, :own], key[:, :own], value[:, :own])
        out, block = self._within(*mine, first)
        q, k, v = (side[:, own:].swapaxes(1, 2) for side in (query, key, value))
        # All branches attend to the context as one, each to itself as a row of its own.
        far = self.kernels.chunk_attention(q, *block, rows.first_valid, jnp.int32(own), spec)
        rows_of_branches = (_apart(q, branches), _apart(k, branches), _apart(v, branches))
        none = jnp.zeros(batch * branches.count, jnp.int32)
        near = self.kernels.chunk_attention(*rows_of_branches, none, jnp.int32(0), spec)
        far = (_apart(far[0], branches), _apart(far[1][..., None], branches)[..., 0])
        merged = join_heads(self._with_sinks(merge([near, far]))[0].astype(self.dtype))
        out = out.reshape(batch, own, -1)
        out = jnp.concatenate([out, merged.reshape(batch, branches.total, -1)], axis=1)
        both = zip(block, (k, v), strict=True)
        key, value = (jnp.concatenate(sides, axis=2) for sides in both)
        return self.out(out), (key, value)

    def prefill_last(self, x: jax.Array, rows: Rows) -> tuple[jax.Array, KVPair]:
        """Attends with only the last token of a prompt x, [batch, token, hidden].

        Returns [batch, 1, hidden], and the keys and values of all tokens.
        """
        last = jnp.int32(x.shape[1] - 1)
        query = self._query(x[:, -1:], last, rows).swapaxes(1, 2)
        key, value = (y.swapaxes(1, 2) for y in self._key_value(x, jnp.int32(0), rows))
        partial = self.kernels.decode_attention(
            query=query,
            blocks=((key, value),),
            starts=jnp.zeros(1, jnp.int32),
            position=last + 1,
            first_valid=first_seen(last, rows.first_valid, self.spec.window),
            spec=self.spec,
        )
        out, _ = self._with_sinks(partial)
        return self.out(join_heads(out.astype(self.dtype))), (key, value)

    def join(self, query: jax.Array, new: KVBlock, partials: list[Partial]) -> jax.Array:
        """Merges the new token's attention to itself with partial results for the cache.

        Returns [batch, 1, hidden].
        """
        itself = attend_itself(query, *new, self.kernels.tuning, self.spec.softcap)
        out, _ = self._with_sinks(merge([itself, *partials]))
        return self.out(join_heads(out.astype(self.dtype)))

    def project_chunk(
        self, x: jax.Array, start: jax.Array, rows: Rows, asked: int
    ) -> tuple[jax.Array, Partial, KVPair]:
        """Projects a chunk of a prompt, [batch, token, hidden], and attends within it.

        Returns the query (scaled) of the last `asked` tokens, their partial result, and keys and
        values of all tokens, with heads before tokens.
        """
        lead = x.shape[1] - asked
        query = self._query(x[:, lead:], start + lead, rows).swapaxes(1, 2)
        key, value = (y.swapaxes(1, 2) for y in self._key_value(x, start, rows))
        itself = self.kernels.chunk_attention(
            query=query,
            key=key,
            value=value,
            first_valid=jnp.maximum(rows.first_valid - start, 0),
            lead=jnp.int32(lead),
            spec=self.spec,
        )
        return query, self._with_sinks(itself), (key, value)

    def join_chunk(self, attended: jax.Array) -> jax.Array:
        """Returns [batch, token, hidden] from the result of attention, [batch, head, token,
        head_dim]."""
        return self.out(join_heads(attended.astype(self.dtype)))

    def project(self, x: jax.Array, position: jax.Array, rows: Rows) -> tuple[jax.Array, KVPair]:
        """Projects x, [batch, 1, hidden], to a query (scaled), and a key and value.

        Each result is [batch, head, 1, head_dim].
        """
        query = self._query(x, position, rows).swapaxes(1, 2)
        key, value = (y.swapaxes(1, 2) for y in self._key_value(x, position, rows))
        return query, (key, value)

    def _query(self, x: jax.Array, start: jax.Array, rows: Rows) -> jax.Array:
        """Returns the queries, scaled, [batch, token, head, head_dim], of tokens from index `start`
        on."""
        norm = self.q_norm if self.spec.qk_norm is not None else None
        heads = self._heads(self.q(x), norm, start, rows)
        return heads * jnp.asarray(self.spec.scale, self.dtype)

    def _key_value(self, x: jax.Array, start: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values, each [batch, token, KV head, head_dim]."""
        norm = self.k_norm if self.spec.qk_norm is not None else None
        value = self.v(x).reshape(*x.shape[:2], -1, self.spec.head_dim)
        return self._heads(self.k(x), norm, start, rows), value

    def _heads(self, x: jax.Array, norm: Norm | None, start: jax.Array, rows: Rows) -> jax.Array:
        """Divides queries or keys into heads, which are normalised and rotated."""
        if norm is not None and self.spec.qk_norm == "all":
            x = norm(x)
        heads = x.reshape(*x.shape[:2], -1, self.spec.head_dim)
        if norm is not None and self.spec.qk_norm == "head":
            heads = norm(heads)
        rotary = self.spec.rotary
        if rotary is None:
            return heads
        return rotate(heads, angles(rotary, start, x.shape[1], rows))


MIXERS: dict[type, type[nn.Module]] = {AttentionSpec: SelfAttention}
"""The module of each kind of mixer. It takes the config, the mixer, kernels, the dtype and
`matmul_bits`. One that does not attend has a method `mix`, see `DecoderLayer.mix`."""


class DecoderLayer(nn.Module):
    """Attention, or another mixer, and a feed-forward block, with residuals, and norms where
    `config.norm_place` says.

    parts: what this layer is made of; kernels: the functions of the large computations, XLA's own
    or faster ones for the machine; matmul_bits: 16, or 8 for products of 8-bit integers.
    """

    config: ModelConfig
    parts: LayerParts
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        config = self.config
        self.attention = MIXERS[type(self.parts.mixer)](
            config=config,
            spec=self.parts.mixer,
            kernels=self.kernels,
            dtype=self.dtype,
            matmul_bits=self.matmul_bits,
        )
        if isinstance(self.parts.mlp, MLPSpec):
            self.mlp = MLP(self.parts.mlp, self.kernels, self.dtype, self.matmul_bits)
        if config.norm_place != "result":
            self.attention_norm = Norm(config.norm, self.dtype)
            self.mlp_norm = Norm(config.norm, self.dtype)
        if config.norm_place in ("around", "result"):
            self.attention_result_norm = Norm(config.norm, self.dtype)
            self.mlp_result_norm = Norm(config.norm, self.dtype)

    def prefill(
        self,
        hidden: jax.Array,
        rows: Rows,
        only_last: bool = False,
        branches: Branches | None = None,
    ) -> tuple[jax.Array, KVBlock]:
        """Runs a prompt's hidden states, [batch, token, hidden], through the layer.

        Returns the new hidden states, and the prompt's keys and values. With `only_last`, hidden
        states are those of the last token, [batch, 1, hidden], which is all that is used of the
        last layer; keys and values are those of all tokens. branches: what the rows end with.
        """
        x = self._attention_input(hidden)
        if only_last:
            out, block = self.attention.prefill_last(x, rows)
            hidden = hidden[:, -1:]
        elif branches is not None:
            out, block = self.attention.prefill_branches(x, rows, branches)
        else:
            out, block = self.attention.prefill(x, rows)
        return self._after_attention(hidden, out), block

    def decode(
        self,
        hidden: jax.Array,
        blocks: tuple[KVBlock, ...],
        tail: KVPair,
        position: jax.Array,
        rows: Rows,
        counts: jax.Array | None = None,
        most: int = 0,
        appends: bool = False,
    ) -> tuple[jax.Array, KVBlock]:
        """Runs one token's hidden states, [batch, 1, hidden], through the layer.

        Returns the new hidden states, and the token's key and value, or with `appends` the tail
        with these. `blocks` hold the tokens from
        0 on and are full; `tail` holds the tokens after them up to `position` (int32 [], the new
        token's index), and has room for more. With `counts`, int32 [batch], attention is sparse:
        each sequence attends to that number of earlier tokens, which is at most `most`.
        """
        spec = self.parts.attention
        query, new = self.project(hidden, position, rows)
        starts = jnp.array([0, *accumulate(key.shape[2] for key, _ in blocks)])
        if appends:  # before attention reads the tail: the other way round XLA would copy it
            tail = append(tail, new, position - starts[-1])
        first = first_seen(position, rows.first_valid, spec.window)
        cache = (*blocks, tail)
        if counts is None:
            here = self.kernels.decode_attention(query, cache, starts, position, first, spec)
        else:
            here = attend_top(
                query=query,
                blocks=cache,
                starts=starts,
                position=position,
                first_valid=first,
                counts=counts,
                most=most,
                tuning=self.kernels.tuning,
                softcap=spec.softcap,
            )
        return self.finish(hidden, query, new, [here]), tail if appends else new

    def project(
        self, hidden: jax.Array, position: jax.Array, rows: Rows
    ) -> tuple[jax.Array, KVPair]:
        """Computes `decode` up to attention: the query, and the new token's key and value."""
        projected: tuple[jax.Array, KVPair]
        projected = self.attention.project(self._attention_input(hidden), position, rows)
        return projected

    def finish(
        self, hidden: jax.Array, query: jax.Array, new: KVBlock, partials: list[Partial]
    ) -> jax.Array:
        """Computes `decode` after attention: hidden states from the partial results."""
        return self._after_attention(hidden, self.attention.join(query, new, partials))

    def project_chunk(
        self, hidden: jax.Array, start: jax.Array, rows: Rows, asked: int
    ) -> tuple[jax.Array, Partial, KVBlock]:
        """Runs a chunk of a prompt, [batch, token, hidden], through the layer up to attention to
        earlier tokens.

        start: int32 [], the index of the chunk's first token; asked: for how many of the last
        tokens hidden states are wanted. Returns their query, their attention within the chunk, and
        the chunk's keys and values.
        """
        projected: tuple[jax.Array, Partial, KVBlock]
        x = self._attention_input(hidden)
        projected = self.attention.project_chunk(x, start, rows, asked)
        return projected

    def mix(
        self,
        hidden: jax.Array,
        blocks: tuple[Block, ...],
        state: tuple[jax.Array, ...],
        start: jax.Array,
        rows: Rows,
        asked: int,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Runs some tokens, [batch, token, hidden], through a layer that does not attend.

        blocks: what it keeps of earlier tokens, from the first one on; the last block may have room
        for more; state: what it replaces with every token; start: int32 [], the index of the first
        token; asked: for how many of the last tokens hidden states are wanted. Returns them, what
        the layer keeps of all tokens, and the new state.
        """
        out, new, state = self.attention.mix(
            self._attention_input(hidden), blocks, state, start, rows
        )
        return self._after_attention(hidden[:, -asked:], out[:, -asked:]), new, state

    def finish_chunk(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the hidden states of a chunk's last tokens, from the result of their
        attention."""
        hidden = hidden[:, -attended.shape[2] :]
        return self._after_attention(hidden, self.attention.join_chunk(attended))

    def _attention_input(self, hidden: jax.Array) -> jax.Array:
        is_before = self.config.norm_place in ("before", "around")
        return self.attention_norm(hidden) if is_before else hidden

    def _after_attention(self, hidden: jax.Array, out: jax.Array) -> jax.Array:
        """Returns hidden states from those before the layer and attention's result."""
        place, has_experts = self.config.norm_place, not isinstance(self.parts.mlp, MLPSpec)
        if place in ("around", "result"):
            out = self.attention_result_norm(out)
        if self.config.is_parallel:
            return hidden + out + self.mlp(self.mlp_norm(hidden))
        hidden = hidden + out
        if place == "after":
            hidden = self.attention_norm(hidden)
        if has_experts:
            return hidden
        out = self.mlp(self.mlp_norm(hidden) if place in ("before", "around") else hidden)
        if place in ("around", "result"):
            out = self.mlp_result_norm(out)
        return self.mlp_norm(hidden + out) if place == "after" else hidden + out
