"""Matrix products by XLA, with Hugging Face's `[out, in]` kernels and fp32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flexgen_jax.layers.quantization import Kept, QuantizedArray, row_parts
from flexgen_jax.layers.tuning import PLAIN, Tuning


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision:
    """Returns the precision of products: fp32 operands must not be rounded to TF32 or bf16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def matmul(
    x: jax.Array,
    kernel: Kept,
    bias: jax.Array | None = None,
    part_bytes: int = 1 << 62,
    tuning: Tuning = PLAIN,
) -> jax.Array:
    """Returns `x @ kernel.T + bias` in fp32, [..., out].

    x: [..., in]; kernel: [out, in], unpacked here, `part_bytes` at a time, if it is quantized;
    bias: [out] or None.
    """
    rows = x.reshape(-1, x.shape[-1])
    is_doubled = tuning.doubles_lone_row and rows.shape[0] == 1 and x.dtype != jnp.float32
    if is_doubled:
        rows = jnp.concatenate([rows, rows])
    if isinstance(kernel, QuantizedArray):
        parts = row_parts(kernel, part_bytes, tuning.has_barriers)
        found = [
            _product(rows, part.reshape(-1, part.shape[2]), tuning).reshape(-1, *part.shape[:2])
            for part in parts
        ]
        out = jnp.concatenate(found, axis=2).reshape(rows.shape[0], -1)[:, : kernel.shape[0]]
    else:
        out = _product(rows, kernel, tuning)
    if is_doubled:
        out = out[:1]
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _product(rows: jax.Array, kernel: jax.Array, tuning: Tuning) -> jax.Array:
    """Computes rows [n, in] @ kernel [out, in].T in fp32."""

    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            left,
            right,
            (((1,), (1,)), ((), ())),
            precision=precision_for(rows.dtype),
            preferred_element_type=jnp.float32,
        )

    if rows.shape[0] > tuning.kernel_first_rows or rows.dtype == jnp.float32:
        return dot(rows, kernel)
    # Without the barrier XLA would swap the operands back.
    turned: jax.Array = jax.lax.optimization_barrier(dot(kernel, rows))
    return turned.T
