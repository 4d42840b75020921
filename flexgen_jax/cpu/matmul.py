"""Products on the CPU as a part of XLA's programs, where the processor has AMX, or AVX-512 with
bfloat16: of many rows, of any number with a packed kernel, and by AVX-512 of few."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.cpu.attention import register
from flexgen_jax.layers.int8_products import column_scale, rounded_int8
from flexgen_jax.layers.linear import FEW_ROWS, dense, rounded
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.models.storage import GROUP_SIZE

FEW_PRODUCTS = 1 << 28
"""Multiplications with which XLA's own product takes no more than a millisecond, and does without
the loading of Numba."""

FEW_PACKED = 1 << 20
"""Elements of a packed kernel that XLA unpacks in a millisecond."""

MULTIPLE = 32
"""Of a kernel's rows and columns, as tiles are (`tiles`, which would load Numba)."""

NUMBA_TARGETS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Set, they may have Numba compile for a processor without tiles."""

FOR_VECTORS = {"avx512f", "avx512_bf16", "avx512_vnni"}
"""Flags of processors with AVX-512's products of pairs of bfloat16 and of four integers."""

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # of x86-64's Linux


def dense_inline(x: jax.Array, kernel: Kept, bias: jax.Array | None) -> jax.Array:
    """`layers.linear.rounded`, for programs of the CPU."""
    unit = _unit_for(x, kernel)
    if unit is None:
        return rounded(x, kernel, bias)
    added = None if bias is None else bias.astype(jnp.float32)
    return _product(unit, x, kernel, added, x.dtype)


def logits_inline(x: jax.Array, table: Kept) -> jax.Array:
    """`layers.linear.dense`, for programs of the CPU."""
    unit = _unit_for(x, table)
    return _product(unit, x, table, None, jnp.float32) if unit else dense(x, table)


def _product(
    unit: str, x: jax.Array, kernel: Kept, bias: jax.Array | None, dtype: Any
) -> jax.Array:
    rows, columns = x.reshape(-1, x.shape[-1]), kernel.shape[0]
    bias = jnp.zeros(columns, jnp.float32) if bias is None else bias
    bits = kernel.storage.bits if isinstance(kernel, QuantizedArray) else 16
    out = jax.ShapeDtypeStruct((rows.shape[0], columns), dtype)
    target = _target(bits, dtype == jnp.float32, unit)
    found: jax.Array = jax.ffi.ffi_call(target, out)(rows, bias, *jax.tree.leaves(kernel))
    return found.reshape(*x.shape[:-1], columns)


def int8_inline(x: jax.Array, kernel: Kept, bias: jax.Array | None) -> jax.Array:
    """`layers.int8_products.rounded_int8`, for programs of the CPU."""
    unit = _unit_for_integers(x, kernel)
    if unit is None:
        return rounded_int8(x, kernel, bias)
    rows = x.reshape(-1, x.shape[-1])
    count, columns = rows.shape[0], kernel.shape[0]
    added = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    flags, *found = _rounded(rows)
    bits = kernel.storage.bits if isinstance(kernel, QuantizedArray) else 16
    out = jax.ShapeDtypeStruct((count, columns), x.dtype)
    arguments = (*found, column_scale(kernel), added, rows, flags.max(axis=0))
    call = jax.ffi.ffi_call(_int8_target(bits, unit), out)
    product: jax.Array = call(*arguments, *jax.tree.leaves(kernel))
    return product.reshape(*x.shape[:-1], columns)


def _rounded(rows: jax.Array) -> list[jax.Array]:
    """Where outliers are, uint8 [rows / 32, depth], `layers.int8_products.round_rows`, and the sums
    of its rows, int32."""
    count, depth = rows.shape
    kinds = (
        jax.ShapeDtypeStruct((-(-count // MULTIPLE), depth), jnp.uint8),
        jax.ShapeDtypeStruct((count, depth), jnp.int8),
        jax.ShapeDtypeStruct((count,), jnp.float32),
        jax.ShapeDtypeStruct((count,), jnp.int32),
    )
    return list(jax.ffi.ffi_call(_rounding_target(), kinds)(rows))


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


def tile_unit(kind: str = "bf16") -> str | None:
    """The best of `tile_units`."""
    return next(iter(tile_units(kind)), None)


@lru_cache
def tile_units(kind: str = "bf16") -> tuple[str, ...]:
    """The processor's units for tiles of bfloat16, or of "int8": "amx", which Linux is asked to let
    this process use, and "avx512"."""
    if any(map(os.environ.get, NUMBA_TARGETS)):
        return ()
    flags = _processor_flags()
    has_amx = f"amx_{kind}" in flags and _may_use_amx()
    return ("amx",) * has_amx + ("avx512",) * (flags >= FOR_VECTORS)


def _processor_flags() -> set[str]:
    """As Linux names them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()


def _may_use_amx() -> bool:
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0)
    return False


@lru_cache
def _target(bits: int, is_wide: bool, unit: str) -> str:
    from flexgen_jax.cpu.jit.matmul_entry import product_handler

    name = f"flexgen_jax_multiply_rows_{bits}{'_wide' * is_wide}_{unit}"
    return register(name, product_handler(name, bits, is_wide, unit == "amx"))


@lru_cache
def _int8_target(bits: int, unit: str) -> str:
    from flexgen_jax.cpu.jit.matmul_entry import int8_handler

    name = f"flexgen_jax_multiply_integers_{bits}_{unit}"
    return register(name, int8_handler(name, bits, unit == "amx"))


@lru_cache
def _rounding_target() -> str:
    from flexgen_jax.cpu.jit.matmul_entry import rounding_handler

    name = "flexgen_jax_round_rows"
    return register(name, rounding_handler(name))
