"""Random arrays, and functions that are traced again for each test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def anew(function: Callable[..., jax.Array]) -> Any:
    """Returns the function jitted anew, since a traced one keeps the unit it was traced with."""
    return jax.jit(lambda *args: function(*args))


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)
