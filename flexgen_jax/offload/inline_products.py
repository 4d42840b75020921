"""Products of many rows on the CPU as a part of XLA's programs, where the processor has AMX."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp

from flexgen_jax.layers.linear import FEW_ROWS, rounded
from flexgen_jax.layers.quantization import Kept, QuantizedArray, row_parts
from flexgen_jax.layers.spec import part_bytes
from flexgen_jax.offload.inline_attention import register

FEW_PRODUCTS = 1 << 28
"""Multiplications with which XLA's own product takes no more than a millisecond, and does without
the loading of Numba."""

MULTIPLE = 32
"""Of a kernel's rows and columns, as tiles are (`amx_tiles`, which would load Numba)."""

NUMBA_TARGETS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Set, they may have Numba compile for a processor without tiles."""

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # of x86-64's Linux


def dense_inline(x: jax.Array, kernel: Kept, bias: jax.Array | None) -> jax.Array:
    """`layers.linear.rounded`, for programs of the CPU."""
    rows = x.reshape(-1, x.shape[-1])
    count, (columns, depth) = rows.shape[0], kernel.shape
    is_small = count <= FEW_ROWS or count * depth * columns < FEW_PRODUCTS
    is_odd = depth % MULTIPLE or columns % MULTIPLE
    kinds = {jnp.dtype(x.dtype), jnp.dtype(kernel.dtype)}
    if kinds != {jnp.dtype(jnp.bfloat16)} or is_small or is_odd or not has_amx():
        return rounded(x, kernel, bias)
    added = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    if not isinstance(kernel, QuantizedArray):
        return _product(rows, kernel, added).reshape(*x.shape[:-1], columns)
    parts = row_parts(kernel, part_bytes(count, columns))
    if any(part.shape[0] * part.shape[1] % MULTIPLE for part in parts):
        return rounded(x, kernel, bias)
    planes, length = parts[0].shape[0], sum(part.shape[1] for part in parts)
    added = jnp.pad(added, (0, planes * length - columns)).reshape(planes, length)
    found, start = [], 0
    for part in parts:
        stop = start + part.shape[1]
        product = _product(rows, part.reshape(-1, depth), added[:, start:stop].reshape(-1))
        found.append(product.reshape(count, *part.shape[:2]))
        start = stop
    out = jnp.concatenate(found, axis=2).reshape(count, -1)[:, :columns]
    return out.reshape(*x.shape[:-1], columns)


def _product(rows: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((rows.shape[0], kernel.shape[0]), rows.dtype)
    found: jax.Array = jax.ffi.ffi_call(_target(), out)(rows, kernel, bias)
    return found


@lru_cache
def has_amx() -> bool:
    """Whether tiles of bfloat16 can be multiplied; asks Linux for leave to, for this process."""
    if not sys.platform.startswith("linux") or any(map(os.environ.get, NUMBA_TARGETS)):
        return False
    with suppress(OSError, AttributeError):
        if "amx_bf16" in Path("/proc/cpuinfo").read_text():
            libc = ctypes.CDLL(None)
            return bool(libc.syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0)
    return False


@lru_cache
def _target() -> str:
    from flexgen_jax.offload.inline_handlers import product_handler

    name = "flexgen_jax_multiply_rows"
    return register(name, product_handler(name))
