"""Layer normalisation and RMS normalisation as functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flexgen_jax.models.parts import NormSpec


def normalize(
    x: jax.Array, spec: NormSpec, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """Returns x, [..., element], normalised along its last axis in fp32, in x's dtype.

    scale, bias: [element], as the norm has them; the spec's offset is added to the scale.
    """
    out = x.astype(jnp.float32)
    if not spec.is_rms:
        out = out - out.mean(-1, keepdims=True)
    out = out * jax.lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + spec.eps)
    if scale is not None:
        out = out * (scale.astype(jnp.float32) + spec.offset)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)
