"""Layer normalisation, with or without learned scale and bias."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.models.config import ModelConfig


class LayerNorm(nn.Module):
    """Normalises the last axis in fp32 and returns the input's dtype."""

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x, [..., hidden], normalised, in x's dtype."""
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        centred = wide - mean
        variance = jnp.square(centred).mean(-1, keepdims=True)
        out = centred * jax.lax.rsqrt(variance + self.config.norm_eps)
        if self.config.norm_affine:
            shape = (x.shape[-1],)
            scale = self.param("scale", nn.initializers.ones, shape, self.dtype)
            bias = self.param("bias", nn.initializers.zeros, shape, self.dtype)
            out = out * scale.astype(jnp.float32) + bias.astype(jnp.float32)
        return out.astype(x.dtype)
