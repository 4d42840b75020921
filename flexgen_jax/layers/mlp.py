"""The two-product feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.models.config import ModelConfig


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the function of a name in `config.ACTIVATIONS`; "gelu" is exact, with erf."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "relu": jax.nn.relu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_new": partial(jax.nn.gelu, approximate=True),
    }
    return functions[name]


class MLP(nn.Module):
    """The feed-forward block: fc2(activation(fc1(x)))."""

    config: ModelConfig
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the block's result, [..., hidden], for x, [..., hidden]."""
        config = self.config
        how = (self.kernels, config.use_bias, self.dtype, self.matmul_bits)
        up = activation(config.activation)(Linear(config.ffn_size, *how, name="fc1")(x))
        return Linear(config.hidden_size, *how, name="fc2")(up)
