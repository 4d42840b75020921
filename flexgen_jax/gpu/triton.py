"""What the kernels share: how Pallas compiles them with Triton, or interprets them on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that XLA's Triton compiles for: an A100's."""

NARROW = (jnp.float16, jnp.bfloat16)
"""Dtypes of matmul operands; fp32 is left to XLA, which keeps all of its bits."""

MIN_ROWS = 16
"""Rows of the smallest tile that a GPU's matrix units multiply."""


def power_of_two(number: int) -> int:
    """Returns the next power of two: Triton's tiles have no other sizes."""
    return 1 << (number - 1).bit_length()


def rows_times_columns(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns left [m, k] @ right [k, n] in fp32."""
    return _product(left, right, 0)


def rows_times_rows(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns left [m, k] @ right [n, k].T in fp32."""
    return _product(left, right, 1)


def _product(left: jax.Array, right: jax.Array, summed: int) -> jax.Array:
    axes = (((1,), (summed,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def load(ref: Any, index: tuple[Any, ...], mask: jax.Array | None) -> jax.Array:
    """Returns elements of an array, zeros where the mask is false; None means all elements."""
    if mask is None:
        whole: jax.Array = ref[index]
        return whole
    place = ref.at[_with_traced_starts(index)]
    loaded: jax.Array = triton.load(place, mask=mask, other=jnp.zeros((), ref.dtype))
    return loaded


def store(ref: Any, index: tuple[Any, ...], value: jax.Array, mask: jax.Array | None) -> None:
    """Stores elements where the mask is true; None means all elements."""
    if mask is None:
        ref[index] = value
    else:
        triton.store(ref.at[_with_traced_starts(index)], value, mask=mask)


def _with_traced_starts(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the same index with slices that start at traced positions. JAX 0.12 refuses slices
    that extend past the array if it knows their start, even where a mask excludes the excess."""
    zero = jnp.zeros((), jnp.int32)
    return tuple(
        pl.ds(part.start + zero, part.size) if isinstance(part, pl.Slice) else part
        for part in index
    )


def call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    warps: int,
    stages: int,
    interprets: bool,
) -> Any:
    """Calls a kernel once for each place of a grid; returns the outputs.

    inputs, outputs: arrays and the parts of them that a place sees. warps: of 32 threads, in a
    place; stages: loads that are under way while others are computed with; interprets: whether JAX
    interprets the kernel, on any backend.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interprets,
    )(*(array for array, _ in inputs))
