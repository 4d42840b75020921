"""The feed-forward block of two products, or of three with a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.models.parts import MLPSpec


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the function of a name in `parts.ACTIVATIONS`; "gelu" is exact, with erf."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "relu": jax.nn.relu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_new": partial(jax.nn.gelu, approximate=True),
        "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
        "silu": jax.nn.silu,
    }
    return functions[name]


class MLP(nn.Module):
    """A feed-forward block; see `MLPSpec`."""

    spec: MLPSpec
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the block's result, [..., hidden], for x, [..., hidden]."""
        spec, hidden = self.spec, x.shape[-1]
        product = partial(
            Linear,
            kernels=self.kernels,
            use_bias=spec.bias,
            dtype=self.dtype,
            bits=self.matmul_bits,
        )
        act = activation(spec.activation)
        if spec.limit is not None:
            gate = jnp.minimum(product(spec.width, name="gate")(x), spec.limit)
            up = jnp.clip(product(spec.width, name="up")(x), -spec.limit, spec.limit)
            inner = gate * jax.nn.sigmoid(spec.swish * gate) * (up + 1)
        elif spec.is_gated:
            gate = act(product(spec.width, name="gate")(x))
            inner = gate * product(spec.width, name="up")(x)
        else:
            inner = act(product(spec.width, name="up")(x))
        out: jax.Array = product(hidden, name="down")(inner)
        return out
