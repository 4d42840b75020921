"""The interface of the large computations of a layer, and its implementation by XLA's own code.
`cpu/` has another implementation.

Shapes: "in" and "out" are a kernel's axes, [out, in] as in checkpoints; there may be fewer KV heads
than query heads. A `Kept` array may be quantized; the function that computes with it unpacks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from flexgen_jax.layers import delta_rule
from flexgen_jax.layers.attention import (
    KVPair,
    Partial,
    attend_blocks,
    causal_attention,
    chunk_attention,
)
from flexgen_jax.layers.matmul import matmul, matmul_by_heads
from flexgen_jax.layers.matmul_int8 import matmul_int8
from flexgen_jax.layers.normalization import normalize
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.tuning import PLAIN, Tuning
from flexgen_jax.models.parts import AttentionSpec, NormSpec
from flexgen_jax.models.tensor_spec import Formats


class Sizes(Protocol):
    """Amounts of work that kernels take at once, as in `policy.hardware.KernelSizes`."""

    @property
    def scored_rows(self) -> int:
        """Number of positions whose logits are computed together when texts are scored."""

    @property
    def expert_rows(self) -> int:
        """The fewest tokens that an expert computes at once."""

    def prefill_sequences(self, batch: int, tokens: int, weight_bits: int) -> int:
        """Returns the number of a batch's sequences that prefill takes through a layer together."""

    def scored_heads(self, heads: int, tokens: int) -> int:
        """Returns the number of a batch's heads whose attention scores are in memory at once."""

    def unpacked_bytes(self, rows: int, out: int) -> int:
        """Returns the bytes of a kernel that are unpacked at a time, for a product [rows, out]."""


class Kernels(Protocol):
    """The computations that take most of a layer's time.

    Implementations are hashable and compare equal if they compute the same, because programs are
    compiled once for each.
    """

    @property
    def sizes(self) -> Sizes:
        """Amounts of work that these kernels take at once."""

    @property
    def tuning(self) -> Tuning:
        """Variants of the XLA code around these kernels."""

    def __hash__(self) -> int:
        """Equal for implementations that are equal."""

    def decode_attention(
        self,
        query: jax.Array,
        blocks: tuple[tuple[Kept, Kept], ...],
        starts: jax.Array,
        position: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        """Computes a new token's attention to one or more KV blocks.

        query: [batch, head, 1, head_dim], scaled; blocks: keys and values, each [batch, KV head,
        token, head_dim]; starts: int32 [block], the index of each block's first token; position:
        int32 [], the new token's index; earlier tokens are valid; first_valid: int32 [batch],
        the index of each sequence's first token that the new one sees. Returns fp32 [batch, head,
        1, head_dim] and the log-sum-exp of the scores, fp32 [batch, head, 1].
        """

    def prefill_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, KVPair]:
        """Computes a left-padded prompt's causal attention to itself.

        query (scaled): [batch, token, head, head_dim]; key, value: the same with KV heads;
        first_valid: int32 [batch]. Returns [batch, token, head, head_dim], and keys and values in
        cache layout, each [batch, KV head, token, head_dim].
        """

    def chunk_attention(
        self,
        query: jax.Array,
        key: Kept,
        value: Kept,
        first_valid: jax.Array,
        lead: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        """Attends with the tokens of a prompt's chunk to one KV block; see
        `layers.attention.chunk_attention`."""

    def matmul(
        self, x: jax.Array, kernel: Kept, bias: jax.Array | None, bits: int = 16
    ) -> jax.Array:
        """Returns `x @ kernel.T + bias`, [..., out], in x's dtype.

        x: [..., in]; kernel: [out, in]; bias: [out] or None. bits: 16 multiplies the numbers
        themselves, 8 rounds both sides to 8-bit integers (LLM.int8(), sections 2 and 3).
        """

    def add_low_rank(
        self,
        out: jax.Array,
        x: jax.Array,
        a: jax.Array,
        b: jax.Array,
        adapters: jax.Array | None,
    ) -> jax.Array:
        """Returns `out + B (A x)`, with the matrices of each row's adapter.

        out: [batch, ..., out]; x: [batch, ..., in]; a: [adapter, rank, in]; b: [adapter, rank,
        out]; adapters: int32 [batch], the number of each row's adapter, -1 for none; None means the
        first for all.
        """

    def matmul_by_heads(
        self, x: jax.Array, kernel: Kept, features: tuple[int, int], is_inverse: bool
    ) -> jax.Array:
        """Multiplies the vectors of heads by a part of their kernels; see
        `layers.matmul.matmul_by_heads`."""

    def logits(self, x: jax.Array, table: Kept) -> jax.Array:
        """Returns `x @ table.T`, fp32 [..., vocabulary]; x: [..., in]; table: [vocabulary, in]."""

    def normalize(
        self, x: jax.Array, spec: NormSpec, scale: jax.Array | None, bias: jax.Array | None
    ) -> jax.Array:
        """Normalises the last axis of x; see `layers.normalization.normalize`."""

    def delta_step(self, sides: delta_rule.Sides, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes one token of the gated delta rule; see `layers.delta_rule.step`."""

    def compiler_options(
        self, formats: Formats, is_lone: bool = False
    ) -> dict[str, str | bool] | None:
        """Returns XLA's options for programs with these kernels, None for its defaults. is_lone:
        whether the program's products have one row, the token of one sequence."""


@dataclass(frozen=True)
class XlaKernels:
    """Kernels in plain JAX, which XLA compiles for any backend; see `Kernels`."""

    sizes: Sizes
    tuning: Tuning = PLAIN

    def decode_attention(
        self,
        query: jax.Array,
        blocks: tuple[tuple[Kept, Kept], ...],
        starts: jax.Array,
        position: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        return attend_blocks(
            query=query,
            blocks=blocks,
            starts=starts,
            position=position,
            first_valid=first_valid,
            tuning=self.tuning,
            softcap=spec.softcap,
        )

    def prefill_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        first_valid: jax.Array,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, KVPair]:
        batch, tokens, heads, _ = query.shape
        at_once = self.sizes.scored_heads(batch * heads, tokens)
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
        attended = causal_attention(
            query=query,
            key=key,
            value=value,
            first_valid=first_valid,
            at_once=at_once,
            window=spec.window,
            softcap=spec.softcap,
        )
        return attended.swapaxes(1, 2), (key, value)

    def chunk_attention(
        self,
        query: jax.Array,
        key: Kept,
        value: Kept,
        first_valid: jax.Array,
        lead: jax.Array,
        spec: AttentionSpec,
    ) -> Partial:
        batch, heads, queries, _ = query.shape
        at_once = self.sizes.scored_heads(batch * heads, max(queries, key.shape[2]))
        return chunk_attention(
            query=query,
            key=key,
            value=value,
            first_valid=first_valid,
            lead=lead,
            at_once=at_once,
            window=spec.window,
            softcap=spec.softcap,
        )

    def matmul(
        self, x: jax.Array, kernel: Kept, bias: jax.Array | None, bits: int = 16
    ) -> jax.Array:
        part_bytes = self._part_bytes(x, kernel)
        if bits == 8:
            return matmul_int8(x, kernel, bias, part_bytes, self.tuning)
        return matmul(x, kernel, bias, part_bytes, self.tuning).astype(x.dtype)

    def add_low_rank(
        self,
        out: jax.Array,
        x: jax.Array,
        a: jax.Array,
        b: jax.Array,
        adapters: jax.Array | None,
    ) -> jax.Array:
        count, rank, _ = a.shape
        inner = self.matmul(x, a.reshape(count * rank, -1), None)
        if adapters is not None:
            is_own = jnp.repeat(adapters[:, None] == jnp.arange(count), rank, axis=1)
            inner = jnp.where(is_own.reshape(len(x), *[1] * (x.ndim - 2), -1), inner, 0)
        return out + self.matmul(inner, b.reshape(count * rank, -1).T, None)

    def matmul_by_heads(
        self, x: jax.Array, kernel: Kept, features: tuple[int, int], is_inverse: bool
    ) -> jax.Array:
        return matmul_by_heads(x, kernel, features, is_inverse, self.tuning)

    def logits(self, x: jax.Array, table: Kept) -> jax.Array:
        return matmul(x, table, None, self._part_bytes(x, table), self.tuning)

    def normalize(
        self, x: jax.Array, spec: NormSpec, scale: jax.Array | None, bias: jax.Array | None
    ) -> jax.Array:
        return normalize(x, spec, scale, bias)

    def delta_step(self, sides: delta_rule.Sides, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return delta_rule.step(sides, state)

    def _part_bytes(self, x: jax.Array, kernel: Kept) -> int:
        return self.sizes.unpacked_bytes(x.size // x.shape[-1], kernel.shape[0])

    def compiler_options(
        self, formats: Formats, is_lone: bool = False
    ) -> dict[str, str | bool] | None:
        return None
