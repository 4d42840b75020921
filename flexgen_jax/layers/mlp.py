"""The two-product feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.config import ModelConfig
from flexgen_jax.layers.linear import Linear


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function behind a name of `config.ACTIVATIONS`; "gelu" is the exact, erf-based one."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "relu": jax.nn.relu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_new": partial(jax.nn.gelu, approximate=True),
    }
    return functions[name]


class MLP(nn.Module):
    """fc2(activation(fc1(x)))."""

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., hidden] -> the same shape."""
        config = self.config
        up = Linear(config.ffn_size, config.use_bias, self.dtype, name="fc1")(x)
        up = activation(config.activation)(up)
        return Linear(config.hidden_size, config.use_bias, self.dtype, name="fc2")(up)
