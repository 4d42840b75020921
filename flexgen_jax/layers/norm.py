"""Layer normalisation and RMS normalisation, with or without learned scales."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.models.parts import NormSpec


class Norm(nn.Module):
    """Normalises the last axis in fp32 and returns the input's dtype."""

    spec: NormSpec
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x, [..., element], normalised, in x's dtype."""
        spec, shape = self.spec, (x.shape[-1],)
        scale = bias = None
        if spec.is_affine:
            scale = self.param("scale", nn.initializers.ones, shape, self.dtype)
            if not spec.is_rms:
                bias = self.param("bias", nn.initializers.zeros, shape, self.dtype)
        return self.kernels.normalize(x, spec, scale, bias)
