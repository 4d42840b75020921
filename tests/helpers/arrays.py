"""Random arrays, and functions that are traced again for each test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers.quantization import QuantizedArray, dequantize


def anew(function: Callable[..., jax.Array]) -> Any:
    """Returns the function jitted anew, since a traced one keeps the unit it was traced with."""
    return jax.jit(lambda *args: function(*args))


def levels(kernel: QuantizedArray) -> np.ndarray:
    """Returns the numbers that codes stand for, in fp32, not rounded to 16 bits."""
    wide = replace(kernel.storage, dtype="float32")
    return np.asarray(dequantize(replace(kernel, storage=wide)))


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(jnp.bfloat16))
