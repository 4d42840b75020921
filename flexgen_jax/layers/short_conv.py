"""Gated short convolutions as a Flax module; see `ShortConvSpec`."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import Block
from flexgen_jax.layers.convolution import after, columns_after, convolved, padding_of
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.short_conv import ShortConvSpec


class ShortConv(nn.Module):
    """A layer that keeps its last inputs as its state; see `ShortConvSpec`."""

    config: ModelConfig
    spec: ShortConvSpec
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        spec, init = self.spec, nn.initializers.ones
        self.inputs, self.out = (
            Linear(
                size,
                kernels=self.kernels,
                use_bias=spec.has_bias,
                dtype=self.dtype,
                bits=self.matmul_bits,
            )
            for size in (3 * spec.channels, self.config.hidden_size)
        )
        self.weights = self.param("weights", init, (spec.channels, 1, spec.width), self.dtype)
        if spec.has_bias:
            self.weights_bias = self.param("weights_bias", init, (spec.channels,), self.dtype)

    def mix(
        self,
        x: jax.Array,
        blocks: tuple[Block, ...],
        state: tuple[jax.Array, ...],
        start: jax.Array,
        rows: Rows,
        num_known: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Computes some tokens, x: [batch, token, hidden]; see `DecoderLayer.mix`."""
        tokens, (columns,) = x.shape[1], state
        padding, is_real = padding_of(rows, start, tokens)
        gate, out_gate, value = jnp.split(self.inputs(x), 3, axis=-1)
        joined = after(columns, jnp.where(is_real, gate * value, 0), padding)
        total = convolved(joined, self.weights, tokens)
        if self.spec.has_bias:
            total = total + self.weights_bias.astype(jnp.float32)
        seen = jnp.int32(tokens) if num_known is None else num_known
        result = self.out(out_gate * total.astype(self.dtype))
        return result, (), (columns_after(joined, seen, self.spec.width),)
