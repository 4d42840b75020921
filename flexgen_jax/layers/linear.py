"""A dense layer with a Hugging Face kernel, tensors that may be quantized, and adapters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.quantization import Kept, QuantizedArray

ADAPTERS = "adapters"
"""The collection of variables that say which adapter a row uses."""


def parameter(
    module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: jnp.dtype
) -> Kept:
    """Returns a module's tensor, plain or quantized; Flax checks the shape of plain ones only."""
    array: Kept | None = module.get_variable("params", name)
    if isinstance(array, QuantizedArray):
        return array
    plain: jax.Array = module.param(name, init, shape, dtype)
    return plain


class Linear(nn.Module):
    """A dense layer whose kernel keeps the checkpoint's `[out, in]` layout.

    bits: 16, or 8 to multiply numbers that `kernels` rounds to 8-bit integers.

    With LoRA adapters, the result is W x + B (A x); see `models.adapters`.

    lora_a: A, [adapter, rank, in]; lora_b: B, [adapter, rank, features]
    rows (collection `ADAPTERS`): int32 [batch], the number of each row's adapter, -1 for none. If
        this variable is missing, the only adapter applies to all rows.
    """

    features: int
    kernels: Kernels
    use_bias: bool = True
    dtype: jnp.dtype = jnp.float32
    bits: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the layer's result, [..., features], for x, [..., in], in x's dtype."""
        shape = (self.features, x.shape[-1])
        kernel = parameter(self, "kernel", nn.initializers.normal(0.02), shape, self.dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
        out = self.kernels.matmul(x, kernel, bias, self.bits)
        a: jax.Array | None = self.get_variable("params", "lora_a")
        if a is None:
            return out
        b: jax.Array = self.get_variable("params", "lora_b")
        rows: jax.Array | None = self.get_variable(ADAPTERS, "rows")
        return self.kernels.add_low_rank(out, x, a, b, rows)
