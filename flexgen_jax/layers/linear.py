"""Matrix products with Hugging Face's `[out, in]` kernels and fp32 accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flexgen_jax.layers.quantization import Kept, QuantizedArray, row_parts
from flexgen_jax.models.spec import part_bytes

FEW_ROWS = 64
"""With at most so many rows a product takes little longer than the reading of its kernel."""


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """fp32 means fp32: an accelerator must not round operands to TF32 or bf16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def parameter(
    module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: jnp.dtype
) -> Kept:
    """A module's tensor, which may be quantized: Flax checks the shape of plain ones only."""
    found: Kept | None = module.get_variable("params", name)
    if isinstance(found, QuantizedArray):
        return found
    plain: jax.Array = module.param(name, init, shape, dtype)
    return plain


def dense(x: jax.Array, kernel: Kept, bias: jax.Array | None = None) -> jax.Array:
    """`x @ kernel.T + bias`.

    x: [..., in]; kernel: [out, in], unpacked here if it is quantized; bias: [out] or None.
    Returns [..., out] in fp32.
    """
    rows = x.reshape(-1, x.shape[-1])
    # XLA's CPU product of one 16-bit row is 15 times slower than of two.
    lone_row = rows.shape[0] == 1 and x.dtype != jnp.float32
    if lone_row:
        rows = jnp.concatenate([rows, rows])

    if isinstance(kernel, QuantizedArray):
        parts = row_parts(kernel, part_bytes(rows.shape[0], kernel.shape[0]))
        found = [_product(rows, x.reshape(-1, x.shape[2])).reshape(-1, *x.shape[:2]) for x in parts]
        out = jnp.concatenate(found, axis=2).reshape(rows.shape[0], -1)[:, : kernel.shape[0]]
    else:
        out = _product(rows, kernel)
    if lone_row:
        out = out[:1]
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def rounded(x: jax.Array, kernel: Kept, bias: jax.Array | None = None) -> jax.Array:
    """`dense` in x's dtype."""
    return dense(x, kernel, bias).astype(x.dtype)


def _product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """rows [n, in] @ kernel [out, in].T, fp32."""

    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            left,
            right,
            (((1,), (1,)), ((), ())),
            precision=precision_for(rows.dtype),
            preferred_element_type=jnp.float32,
        )

    count = rows.shape[0]
    if count > FEW_ROWS or rows.dtype == jnp.float32 or jax.default_backend() != "cpu":
        return dot(rows, kernel)
    # XLA's CPU backend copies the right operand, so the kernel is the left one. Without the barrier
    # XLA would turn the product around again.
    turned: jax.Array = jax.lax.optimization_barrier(dot(kernel, rows))
    return turned.T


class Linear(nn.Module):
    """A dense layer whose kernel keeps the checkpoint's `[out, in]` layout."""

    features: int
    use_bias: bool = True
    dtype: jnp.dtype = jnp.float32
    compute: Callable[[jax.Array, Kept, jax.Array | None], jax.Array] = rounded

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., in] -> [..., features], in `dtype`."""
        shape = (self.features, x.shape[-1])
        kernel = parameter(self, "kernel", nn.initializers.normal(0.02), shape, self.dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
        return self.compute(x, kernel, bias)
