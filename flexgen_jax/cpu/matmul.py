"""Products inside XLA's programs on the CPU, where the processor has a unit for them: of many rows,
of any number of rows with a packed kernel, and by AVX-512 of few rows.

Each function returns None where XLA's own code is to be used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.cpu.features import tile_unit
from flexgen_jax.cpu.targets import register
from flexgen_jax.layers.matmul_int8 import column_scale
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.models.storage import GROUP_SIZE

FEW_PRODUCTS = 1 << 28
"""Multiplications with which XLA's own product takes no more than a millisecond, and does without
the loading of Numba."""

FEW_PACKED = 1 << 20
"""Elements of a packed kernel that XLA unpacks in a millisecond."""

MULTIPLE = 32
"""Of a kernel's rows and columns, as tiles are (`tiles`, which would load Numba)."""

FEW_ROWS = 64
"""Up to this many rows a product takes little longer than the reading of its kernel."""


def matmul(x: jax.Array, kernel: Kept, bias: jax.Array | None, dtype: Any) -> jax.Array | None:
    """`x @ kernel.T + bias` in `dtype`, x's own or fp32; see `layers.kernels.Kernels.matmul`."""
    unit = _unit_for(x, kernel)
    bits = kernel.storage.bits if isinstance(kernel, QuantizedArray) else 16
    target = _target(bits, dtype == jnp.float32, unit) if unit else None
    if target is None:
        return None
    rows, columns = x.reshape(-1, x.shape[-1]), kernel.shape[0]
    added = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((rows.shape[0], columns), dtype)
    found: jax.Array = jax.ffi.ffi_call(target, out)(rows, added, *jax.tree.leaves(kernel))
    return found.reshape(*x.shape[:-1], columns)


def matmul_int8(x: jax.Array, kernel: Kept, bias: jax.Array | None) -> jax.Array | None:
    """`x @ kernel.T + bias` by products of 8-bit integers, in x's dtype."""
    unit = _unit_for_integers(x, kernel)
    bits = kernel.storage.bits if isinstance(kernel, QuantizedArray) else 16
    target = _int8_target(bits, unit) if unit else None
    rounding = _rounding_target() if target else None
    if target is None or rounding is None:
        return None
    rows = x.reshape(-1, x.shape[-1])
    count, columns = rows.shape[0], kernel.shape[0]
    added = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    flags, *found = _rounded(rounding, rows)
    out = jax.ShapeDtypeStruct((count, columns), x.dtype)
    arguments = (*found, column_scale(kernel), added, rows, flags.max(axis=0))
    call = jax.ffi.ffi_call(target, out)
    product: jax.Array = call(*arguments, *jax.tree.leaves(kernel))
    return product.reshape(*x.shape[:-1], columns)


def _rounded(target: str, rows: jax.Array) -> list[jax.Array]:
    """Where outliers are, uint8 [rows / 32, depth], `layers.matmul_int8.round_rows`, and the sums
    of its rows, int32."""
    count, depth = rows.shape
    kinds = (
        jax.ShapeDtypeStruct((-(-count // MULTIPLE), depth), jnp.uint8),
        jax.ShapeDtypeStruct((count, depth), jnp.int8),
        jax.ShapeDtypeStruct((count,), jnp.float32),
        jax.ShapeDtypeStruct((count,), jnp.int32),
    )
    return list(jax.ffi.ffi_call(target, kinds)(rows))


def _unit_for_integers(x: jax.Array, kernel: Kept) -> str | None:
    """The same of 8-bit integers, to which XLA would round a plain kernel in memory too."""
    fits = _fit_tiles(x, kernel) and kernel.shape[1] % (2 * MULTIPLE) == 0
    is_large = kernel.shape[0] * kernel.shape[1] >= FEW_PACKED
    return tile_unit("int8") if fits and is_large else None


def _unit_for(x: jax.Array, kernel: Kept) -> str | None:
    """Which unit takes a product in tiles, if one can, and is faster than XLA."""
    columns, depth = kernel.shape
    if isinstance(kernel, QuantizedArray):  # which XLA unpacks in memory
        is_faster = columns * depth >= FEW_PACKED
    else:
        rows = x.size // depth
        is_faster = rows > FEW_ROWS and rows * columns * depth >= FEW_PRODUCTS
        if tile_unit() == "avx512" and rows <= FEW_ROWS:  # as the kernel comes from memory
            is_faster = columns * depth >= FEW_PACKED
    return tile_unit() if _fit_tiles(x, kernel) and is_faster else None


def _fit_tiles(x: jax.Array, kernel: Kept) -> bool:
    kinds = {jnp.dtype(x.dtype), jnp.dtype(kernel.dtype)}
    fits = kinds == {jnp.dtype(jnp.bfloat16)} and not any(n % MULTIPLE for n in kernel.shape)
    if not isinstance(kernel, QuantizedArray):
        return fits
    storage = kernel.storage
    is_grouped = (storage.group_size, storage.axis) == (GROUP_SIZE, 0)
    return fits and is_grouped and storage.plane_length % MULTIPLE == 0


# Numba takes half a second to import, and not every run multiplies here.


@lru_cache
def _target(bits: int, is_wide: bool, unit: str) -> str | None:
    name = f"flexgen_jax_multiply_rows_{bits}{'_wide' * is_wide}_{unit}"

    def make() -> tuple[Any, ...]:
        from flexgen_jax.cpu.jit.matmul_entry import product_handler

        return product_handler(name, bits, is_wide, unit == "amx")

    return register(name, make)


@lru_cache
def _int8_target(bits: int, unit: str) -> str | None:
    name = f"flexgen_jax_multiply_integers_{bits}_{unit}"

    def make() -> tuple[Any, ...]:
        from flexgen_jax.cpu.jit.matmul_entry import int8_handler

        return int8_handler(name, bits, unit == "amx")

    return register(name, make)


@lru_cache
def _rounding_target() -> str | None:
    name = "flexgen_jax_round_rows"

    def make() -> tuple[Any, ...]:
        from flexgen_jax.cpu.jit.matmul_entry import rounding_handler

        return rounding_handler(name)

    return register(name, make)
