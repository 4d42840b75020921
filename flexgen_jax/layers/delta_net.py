"""Gated DeltaNet as a Flax module; see `DeltaNetSpec`."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers import delta_rule
from flexgen_jax.layers.attention import Block
from flexgen_jax.layers.convolution import after, columns_after, convolved, padding_of
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.norm import Norm
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.delta_net import CHUNK, DeltaNetSpec
from flexgen_jax.models.parts import NormSpec


def _unit(x: jax.Array) -> jax.Array:
    """Returns vectors of length 1, in fp32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    """A layer with a state that is replaced with every token; see `DeltaNetSpec`."""

    config: ModelConfig
    spec: DeltaNetSpec
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        spec = self.spec
        product = partial(
            Linear, kernels=self.kernels, use_bias=False, dtype=self.dtype, bits=self.matmul_bits
        )
        self.q, self.k = product(spec.keys), product(spec.keys)
        self.v, self.z = product(spec.values), product(spec.values)
        self.write, self.fade = (
            Linear(spec.value_heads, self.kernels, use_bias=False, dtype=self.dtype)
            for _ in range(2)
        )
        ones = nn.initializers.ones
        shape = (spec.channels, 1, spec.width)
        self.weights = self.param("weights", ones, shape, self.dtype)
        self.fade_log = self.param("fade_log", ones, (spec.value_heads,), jnp.float32)
        self.fade_bias = self.param("fade_bias", ones, (spec.value_heads,), jnp.float32)
        self.norm = Norm(NormSpec(is_rms=True, eps=self.config.norm.eps), self.kernels, self.dtype)
        self.out = product(self.config.hidden_size)

    def mix(
        self,
        x: jax.Array,
        blocks: tuple[Block, ...],
        state: tuple[jax.Array, ...],
        start: jax.Array,
        rows: Rows,
        num_known: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Computes some tokens, x: [batch, token, hidden]; see `DecoderLayer.mix`. Padding writes
        nothing, and nothing fades with it."""
        (batch, tokens, _), spec = x.shape, self.spec
        columns, matrices = state
        padding, is_real = padding_of(rows, start, tokens)
        x = jnp.where(is_real, x, 0)
        projected = jnp.concatenate([self.q(x), self.k(x), self.v(x)], axis=-1)
        joined = after(columns, projected, padding)
        fade = jax.nn.softplus(self.fade(x).astype(jnp.float32) + self.fade_bias)
        fade = jnp.where(is_real, -jnp.exp(self.fade_log) * fade, 0)
        inputs = (joined, fade, jax.nn.sigmoid(self.write(x)), is_real)
        if tokens == 1:
            only = delta_rule.Sides(*(side[:, 0] for side in self._sides(*inputs)))
            out, kept = self.kernels.delta_step(only, matrices)
        else:
            out, kept = self._in_chunks(inputs, matrices, tokens)
        seen = jnp.int32(tokens) if num_known is None else num_known
        if num_known is not None:
            is_known = is_real & (jnp.arange(tokens) < num_known)[:, None]
            inputs = (joined, jnp.where(is_known, fade, 0), inputs[2], is_known)
            _, kept = self._in_chunks(inputs, matrices, tokens)
        out = out.reshape(batch, tokens, spec.key_heads, spec.group, spec.value_size)
        out = out.swapaxes(2, 3) if spec.are_tiled else out
        heads = self.norm(out.reshape(batch, tokens, -1, spec.value_size).astype(self.dtype))
        gate = jax.nn.silu(self.z(x).astype(jnp.float32)).reshape(heads.shape)
        result = (heads * gate).astype(self.dtype).reshape(batch, tokens, -1)
        return self.out(result), (), (columns_after(joined, seen, spec.width), kept)

    def _sides(
        self, joined: jax.Array, fade: jax.Array, write: jax.Array, is_real: jax.Array
    ) -> delta_rule.Sides:
        """Returns what some tokens ask of the state and write to it.

        joined: of these tokens, and of those before them that weighted sums need."""
        spec, (batch, tokens, _) = self.spec, fade.shape
        total = convolved(joined, self.weights, tokens)
        mixed = jnp.where(is_real, jax.nn.silu(total.astype(self.dtype)), 0)
        query, key, value = jnp.split(mixed, [spec.keys, 2 * spec.keys], axis=-1)
        heads = (batch, tokens, spec.key_heads)
        return delta_rule.Sides(
            _unit(query.reshape(*heads, spec.key_size)) * spec.key_size**-0.5,
            _unit(key.reshape(*heads, spec.key_size)),
            self._by_key_head(value, spec.value_size).astype(jnp.float32),
            self._by_key_head(fade),
            self._by_key_head(write).astype(jnp.float32),
        )

    def _by_key_head(self, of_value_heads: jax.Array, *size: int) -> jax.Array:
        """Returns [batch, token, key head, group, ...] of [batch, token, value heads]; size: of a
        head."""
        (batch, tokens, _), spec = of_value_heads.shape, self.spec
        if not spec.are_tiled:
            return of_value_heads.reshape(batch, tokens, spec.key_heads, spec.group, *size)
        tiled = of_value_heads.reshape(batch, tokens, spec.group, spec.key_heads, *size)
        return tiled.swapaxes(2, 3)

    def _in_chunks(
        self, inputs: tuple[jax.Array, ...], state: jax.Array, tokens: int
    ) -> tuple[jax.Array, jax.Array]:
        """Computes a prompt, a chunk at a time, so that only one chunk has numbers in fp32; inputs:
        the arguments of `_sides`. Tokens that fill the last chunk are no real ones."""
        size = min(CHUNK, tokens)
        count = -(-tokens // size)
        filled = [jnp.pad(x, ((0, 0), (0, count * size - tokens), (0, 0))) for x in inputs]

        def one(state: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Computes a chunk; of the convolution's inputs, it has the preceding tokens."""
            lengths = (size + self.spec.width - 1, size, size, size)
            pieces = (
                jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
                for x, length in zip(filled, lengths, strict=True)
            )
            out, state = delta_rule.chunk(self._sides(*pieces), state)
            return state, out.astype(self.dtype)

        state, out = jax.lax.scan(one, state, jnp.arange(count) * size)
        joined = jnp.moveaxis(out, 0, 1).reshape(out.shape[1], count * size, *out.shape[3:])
        return joined[:, :tokens], state
