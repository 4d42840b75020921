"""Matrix products by XLA, with Hugging Face's `[out, in]` kernels and fp32 accumulation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from flexgen_jax.layers.quantization import (
    Kept,
    QuantizedArray,
    in_stored_order,
    parts_of,
    plain,
    ranges_of_rows,
    row_parts,
)
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
    out = _multiplied(x.reshape(-1, x.shape[-1]), kernel, part_bytes, tuning)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _multiplied(rows: jax.Array, kernel: Kept, part_bytes: int, tuning: Tuning) -> jax.Array:
    """Computes rows [n, in] @ kernel [out, in].T in fp32; see `matmul`."""
    count = rows.shape[0]
    if isinstance(kernel, QuantizedArray) and _is_added(count, kernel, tuning):
        return _added(rows, kernel)
    if count == 1 and tuning.doubles_lone_row and rows.dtype != jnp.float32:
        return _multiplied(jnp.concatenate([rows, rows]), kernel, part_bytes, tuning)[:1]
    if not isinstance(kernel, QuantizedArray):
        return _product(rows, kernel, tuning)
    multiply = _by_groups_of_rows if kernel.storage.axis == 0 else _by_planes
    return multiply(rows, kernel, part_bytes, tuning)


def _is_added(count: int, kernel: QuantizedArray, tuning: Tuning) -> bool:
    """Returns whether `_added` is to multiply this number of rows."""
    return kernel.storage.axis == 1 and count <= tuning.added_rows


def matmul_by_heads(
    x: jax.Array,
    kernel: Kept,
    features: tuple[int, int],
    is_inverse: bool,
    tuning: Tuning = PLAIN,
) -> jax.Array:
    """Multiplies the vectors of heads, [row, head, element], each by a part of its head's kernel,
    in x's dtype.

    kernel: [head x feature, rank]; features: first index and number of the part's elements. The
    elements are the kernel's inputs (rank), and the results features; with `is_inverse`, the
    opposite order.
    """
    first, count = features
    heads = plain(kernel).reshape(x.shape[1], -1, kernel.shape[1])[:, first : first + count]
    heads = heads.astype(x.dtype)
    product = partial(
        jnp.einsum, precision=precision_for(x.dtype), preferred_element_type=jnp.float32
    )
    if not is_inverse:
        out = product("shr,hfr->shf", x, heads)
    elif tuning.turns_heads and x.shape[0] > 1 and x.dtype != jnp.float32:
        out = product("shf,hrf->shr", x, jax.lax.optimization_barrier(heads.swapaxes(1, 2)))
    else:  # heads first: XLA's CPU backend takes bfloat16 in no other order
        out = product("hsf,hfr->hsr", x.swapaxes(0, 1), heads).swapaxes(0, 1)
    return out.astype(x.dtype)


def _by_groups_of_rows(
    rows: jax.Array, kernel: QuantizedArray, part_bytes: int, tuning: Tuning
) -> jax.Array:
    """Multiplies by a kernel that is grouped along its output, part by part."""
    products = [
        _product(rows, part.reshape(-1, part.shape[2]), tuning).reshape(-1, *part.shape[:2])
        for part in row_parts(kernel, part_bytes, tuning.has_barriers)
    ]
    return jnp.concatenate(products, axis=2).reshape(rows.shape[0], -1)[:, : kernel.shape[0]]


def _added(rows: jax.Array, kernel: QuantizedArray) -> jax.Array:
    """Multiplies rows, [n, in], by a kernel that is grouped along its input, by sums that XLA
    computes in one kernel from the codes, without a matrix in memory."""
    wide = in_stored_order(rows, kernel).astype(jnp.float32)
    out, start = jnp.zeros((), jnp.float32), 0
    for plane in parts_of(kernel):
        stop, numbers = start + plane.shape[1], plane.astype(jnp.float32)
        out = out + jnp.stack([(numbers * row).sum(1) for row in wide[:, start:stop]])
        start = stop
    return out


def _by_planes(
    rows: jax.Array, kernel: QuantizedArray, part_bytes: int, tuning: Tuning
) -> jax.Array:
    """Multiplies by a kernel that is grouped along its input: each plane by its part of the rows,
    which is faster than joining the planes first."""
    rows, outs = in_stored_order(rows, kernel), list[jax.Array]()
    for part in ranges_of_rows(kernel, part_bytes):
        if tuning.orders_parts and outs:
            outs[-1], part = _in_order(outs[-1], part)
        out, start = jnp.zeros((), jnp.float32), 0
        for plane in parts_of(part, tuning.has_barriers):
            stop = start + plane.shape[1]
            out = out + _product(rows[:, start:stop], plane, tuning)
            start = stop
        outs.append(out)
    return jnp.concatenate(outs, axis=1) if len(outs) > 1 else outs[0]


def _in_order(out: jax.Array, part: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    """Returns a product, and a part of a kernel that cannot be unpacked before the product is
    there: its smallest leaf waits for it, which is copied for that."""
    leaves = list(part.leaves)
    smallest = min(range(len(leaves)), key=lambda index: leaves[index].nbytes)
    out, leaves[smallest] = jax.lax.optimization_barrier((out, leaves[smallest]))
    return out, QuantizedArray(part.storage, tuple(leaves))


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
