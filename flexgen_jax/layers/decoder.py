"""One transformer layer, in its two phases: prefill of a prompt and decode of one token."""

from __future__ import annotations

from itertools import accumulate

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import (
    KVPair,
    Partial,
    attend_itself,
    join_heads,
    merge,
    split_heads,
)
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.mlp import MLP
from flexgen_jax.layers.norm import LayerNorm
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.sparse_attention import attend_top
from flexgen_jax.models.config import ModelConfig

KVBlock = tuple[Kept, Kept]
"""Keys and values of some consecutive tokens, each [batch, head, token, head_dim]."""


Tail = tuple[jax.Array, jax.Array]
"""The open KV block, in full precision."""


def append(tail: Tail, new: Tail, at: jax.Array) -> Tail:
    """Writes a token's key and value into the tail at index `at`, in place if it is donated."""
    key, value = (
        jax.lax.dynamic_update_slice_in_dim(into, x, at, axis=2)
        for into, x in zip(tail, new, strict=True)
    )
    return key, value


class SelfAttention(nn.Module):
    """Multi-head attention to keys and values that come in as blocks."""

    config: ModelConfig
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        how = (self.kernels, self.config.use_bias, self.dtype, self.matmul_bits)
        hidden = self.config.hidden_size
        self.q, self.k = Linear(hidden, *how), Linear(hidden, *how)
        self.v, self.out = Linear(hidden, *how), Linear(hidden, *how)

    def prefill(self, x: jax.Array, first_valid: jax.Array) -> tuple[jax.Array, KVPair]:
        """Attends within a prompt x, [batch, token, hidden].

        Returns an array of x's shape, and the prompt's keys and values.
        """
        out, block = self.kernels.prefill_attention(
            *self._all_heads(x), first_valid, self.config.num_heads
        )
        return self.out(out), block

    def prefill_last(self, x: jax.Array, first_valid: jax.Array) -> tuple[jax.Array, KVPair]:
        """Attends with only the last token of a prompt x, [batch, token, hidden].

        Returns [batch, 1, hidden], and the keys and values of all tokens.
        """
        heads, last = self.config.num_heads, jnp.int32(x.shape[1])
        query = split_heads(self._query(x[:, -1:]), heads)
        block = split_heads(self.k(x), heads), split_heads(self.v(x), heads)
        starts = jnp.zeros(1, jnp.int32)
        out, _ = self.kernels.decode_attention(query, (block,), starts, last, first_valid)
        return self.out(join_heads(out.astype(self.dtype))), block

    def join(self, query: jax.Array, new: KVBlock, partials: list[Partial]) -> jax.Array:
        """Merges the new token's attention to itself with partial results for the cache.

        Returns [batch, 1, hidden].
        """
        itself = attend_itself(query, *new, self.kernels.tuning)
        out, _ = merge([itself, *partials])
        return self.out(join_heads(out.astype(self.dtype)))

    def project_chunk(
        self, x: jax.Array, start: jax.Array, first_valid: jax.Array, asked: int
    ) -> tuple[jax.Array, Partial, KVPair]:
        """Projects a chunk of a prompt, [batch, token, hidden], and attends within it.

        Returns the query (scaled) of the last `asked` tokens, their partial result, and keys and
        values of all tokens, with heads before tokens.
        """
        heads = self.config.num_heads
        query = split_heads(self._query(x[:, -asked:]), heads)
        block = split_heads(self.k(x), heads), split_heads(self.v(x), heads)
        first = jnp.maximum(first_valid - start, 0)
        return query, self.kernels.chunk_attention(query, *block, first, is_causal=True), block

    def join_chunk(self, attended: jax.Array) -> jax.Array:
        """Returns [batch, token, hidden] from the result of attention, [batch, head, token,
        head_dim]."""
        return self.out(join_heads(attended.astype(self.dtype)))

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects x, [batch, token, hidden], to query (scaled), key and value.

        Each result is [batch, head, token, head_dim].
        """
        query, key, value = (split_heads(y, self.config.num_heads) for y in self._all_heads(x))
        return query, key, value

    def _all_heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns query (scaled), key and value, each [batch, token, hidden]."""
        return self._query(x), self.k(x), self.v(x)

    def _query(self, x: jax.Array) -> jax.Array:
        query: jax.Array = self.q(x) * jnp.asarray(self.config.head_dim**-0.5, self.dtype)
        return query


class DecoderLayer(nn.Module):
    """Attention and MLP with residuals; layer norm comes before each (most OPTs) or after (350m).

    kernels: the functions of the large computations, XLA's own or faster ones for the machine;
    matmul_bits: 16, or 8 for products of 8-bit integers.
    """

    config: ModelConfig
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        how = (self.config, self.kernels, self.dtype, self.matmul_bits)
        self.attention = SelfAttention(*how)
        self.attention_norm = LayerNorm(self.config, self.dtype)
        self.mlp = MLP(*how)
        self.mlp_norm = LayerNorm(self.config, self.dtype)

    def prefill(
        self, hidden: jax.Array, first_valid: jax.Array, only_last: bool = False
    ) -> tuple[jax.Array, KVBlock]:
        """Runs a prompt's hidden states, [batch, token, hidden], through the layer.

        Returns the new hidden states, and the prompt's keys and values. With `only_last`, hidden
        states are those of the last token, [batch, 1, hidden], which is all that is used of the
        last layer; keys and values are those of all tokens.
        """
        x = self._before(hidden, self.attention_norm)
        if only_last:
            out, block = self.attention.prefill_last(x, first_valid)
            hidden = hidden[:, -1:]
        else:
            out, block = self.attention.prefill(x, first_valid)
        hidden = self._after(hidden + out, self.attention_norm)
        return self._feed_forward(hidden), block

    def decode(
        self,
        hidden: jax.Array,
        blocks: tuple[KVBlock, ...],
        tail: Tail,
        position: jax.Array,
        first_valid: jax.Array,
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
        query, new = self.project(hidden)
        starts = jnp.array([0, *accumulate(key.shape[2] for key, _ in blocks)])
        if appends:  # before attention reads the tail: the other way round XLA would copy it
            tail = append(tail, new, position - starts[-1])
        args = (query, (*blocks, tail), starts, position, first_valid)
        if counts is None:
            here = self.kernels.decode_attention(*args)
        else:
            here = attend_top(*args, counts, most, self.kernels.tuning)
        return self.finish(hidden, query, new, [here]), tail if appends else new

    def project(self, hidden: jax.Array) -> tuple[jax.Array, Tail]:
        """Computes `decode` up to attention: the query, and the new token's key and value."""
        query, key, value = self.attention.project(self._before(hidden, self.attention_norm))
        return query, (key, value)

    def finish(
        self, hidden: jax.Array, query: jax.Array, new: KVBlock, partials: list[Partial]
    ) -> jax.Array:
        """Computes `decode` after attention: hidden states from the partial results."""
        out = self.attention.join(query, new, partials)
        hidden = self._after(hidden + out, self.attention_norm)
        return self._feed_forward(hidden)

    def project_chunk(
        self, hidden: jax.Array, start: jax.Array, first_valid: jax.Array, asked: int
    ) -> tuple[jax.Array, Partial, KVBlock]:
        """Runs a chunk of a prompt, [batch, token, hidden], through the layer up to attention to
        earlier tokens.

        start: int32 [], the index of the chunk's first token; asked: for how many of the last
        tokens hidden states are wanted. Returns their query, their attention within the chunk, and
        the chunk's keys and values.
        """
        x = self._before(hidden, self.attention_norm)
        return self.attention.project_chunk(x, start, first_valid, asked)

    def finish_chunk(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the hidden states of a chunk's last tokens, from the result of their
        attention."""
        hidden = hidden[:, -attended.shape[2] :]
        hidden = self._after(hidden + self.attention.join_chunk(attended), self.attention_norm)
        return self._feed_forward(hidden)

    def _feed_forward(self, hidden: jax.Array) -> jax.Array:
        out = self.mlp(self._before(hidden, self.mlp_norm))
        return self._after(hidden + out, self.mlp_norm)

    def _before(self, hidden: jax.Array, norm: LayerNorm) -> jax.Array:
        return norm(hidden) if self.config.pre_norm else hidden

    def _after(self, hidden: jax.Array, norm: LayerNorm) -> jax.Array:
        return hidden if self.config.pre_norm else norm(hidden)
