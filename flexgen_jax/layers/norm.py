"""Layer normalisation and RMS normalisation, with or without learned scales."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.models.parts import NormSpec


class Norm(nn.Module):
    """Normalises the last axis in fp32 and returns the input's dtype."""

    spec: NormSpec
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x, [..., element], normalised, in x's dtype."""
        spec, out = self.spec, x.astype(jnp.float32)
        if not spec.is_rms:
            out = out - out.mean(-1, keepdims=True)
        out = out * jax.lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + spec.eps)
        if spec.is_affine:
            shape = (x.shape[-1],)
            scale = self.param("scale", nn.initializers.ones, shape, self.dtype)
            out = out * (scale.astype(jnp.float32) + spec.offset)
            if not spec.is_rms:
                bias = self.param("bias", nn.initializers.zeros, shape, self.dtype)
                out = out + bias.astype(jnp.float32)
        return out.astype(x.dtype)
