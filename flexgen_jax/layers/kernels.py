"""What a device's programs compute the large parts of a layer with: one interface, and XLA's own
implementation of it. `cpu/` has another one.

Shapes: "in" and "out" are a kernel's axes, [out, in] as in checkpoints; "hidden" is heads times
head_dim. A `Kept` array may be quantized; whoever computes with it unpacks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from flexgen_jax.layers.attention import KVPair, Partial, attend_blocks, attend_prompt
from flexgen_jax.layers.matmul import matmul
from flexgen_jax.layers.matmul_int8 import matmul_int8
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.tuning import PLAIN, Tuning
from flexgen_jax.models.spec import Formats


class Sizes(Protocol):
    """How much work kernels take at once; `policy.hardware.KernelSizes` has it for plans too."""

    @property
    def scored_rows(self) -> int:
        """Positions whose logits are formed together when texts are scored."""

    def prefill_sequences(self, batch: int, tokens: int, weight_bits: int) -> int:
        """How many of a batch's sequences go through a layer together in prefill."""

    def scored_heads(self, heads: int, tokens: int) -> int:
        """How many of a batch's heads have their attention scores in memory together."""

    def unpacked_bytes(self, rows: int, out: int) -> int:
        """Bytes of a kernel that are unpacked for a product of this many rows and columns."""


class Kernels(Protocol):
    """The computations that take a layer's time. Implementations are hashable and equal if they
    compute alike, since programs are compiled once for each."""

    @property
    def sizes(self) -> Sizes:
        """How much these kernels take at once."""

    @property
    def tuning(self) -> Tuning:
        """How XLA's own code beside these kernels is written."""

    def __hash__(self) -> int:
        """Equal for implementations that are equal."""

    def decode_attention(
        self,
        query: jax.Array,
        blocks: tuple[tuple[Kept, Kept], ...],
        starts: jax.Array,
        position: jax.Array,
        first_valid: jax.Array,
    ) -> Partial:
        """A new token's attention to some KV blocks, at least one.

        query: [batch, head, 1, head_dim], scaled; blocks: keys and values, each [batch, head,
        token, head_dim]; starts: int32 [block], the index of each block's first token; position:
        int32 [], the new token's index, before which tokens are valid; first_valid: int32 [batch],
        the index of each sequence's first real token. Returns fp32 [batch, head, 1, head_dim] and
        the log-sum-exp of the scores, fp32 [batch, head, 1].
        """

    def prefill_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        first_valid: jax.Array,
        heads: int,
    ) -> tuple[jax.Array, KVPair]:
        """A left-padded prompt's causal attention to itself.

        query (scaled), key, value: [batch, token, hidden]; first_valid: int32 [batch]. Returns
        [batch, token, hidden], and keys and values as they are cached, each [batch, head, token,
        head_dim].
        """

    def matmul(
        self, x: jax.Array, kernel: Kept, bias: jax.Array | None, bits: int = 16
    ) -> jax.Array:
        """Returns `x @ kernel.T + bias`, [..., out], in x's dtype.

        x: [..., in]; kernel: [out, in]; bias: [out] or None. bits: 16 multiplies the numbers
        themselves, 8 rounds both sides to 8-bit integers (LLM.int8(), sections 2 and 3).
        """

    def logits(self, x: jax.Array, table: Kept) -> jax.Array:
        """Returns `x @ table.T`, fp32 [..., vocabulary]; x: [..., in]; table: [vocabulary, in]."""

    def compiler_options(self, formats: Formats) -> dict[str, str | bool] | None:
        """XLA's options for programs with these kernels, None for its defaults."""


@dataclass(frozen=True)
class XlaKernels:
    """XLA's own code, on any backend; see `Kernels`."""

    sizes: Sizes
    tuning: Tuning = PLAIN

    def decode_attention(
        self,
        query: jax.Array,
        blocks: tuple[tuple[Kept, Kept], ...],
        starts: jax.Array,
        position: jax.Array,
        first_valid: jax.Array,
    ) -> Partial:
        return attend_blocks(query, blocks, starts, position, first_valid, self.tuning)

    def prefill_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        first_valid: jax.Array,
        heads: int,
    ) -> tuple[jax.Array, KVPair]:
        batch, tokens, _ = query.shape
        at_once = self.sizes.scored_heads(batch * heads, tokens)
        return attend_prompt(query, key, value, first_valid, heads, at_once)

    def matmul(
        self, x: jax.Array, kernel: Kept, bias: jax.Array | None, bits: int = 16
    ) -> jax.Array:
        part_bytes = self._part_bytes(x, kernel)
        if bits == 8:
            return matmul_int8(x, kernel, bias, part_bytes, self.tuning)
        return matmul(x, kernel, bias, part_bytes, self.tuning).astype(x.dtype)

    def logits(self, x: jax.Array, table: Kept) -> jax.Array:
        return matmul(x, table, None, self._part_bytes(x, table), self.tuning)

    def _part_bytes(self, x: jax.Array, kernel: Kept) -> int:
        return self.sizes.unpacked_bytes(x.size // x.shape[-1], kernel.shape[0])

    def compiler_options(self, formats: Formats) -> dict[str, str | bool] | None:
        return None
