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
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.layers.storage import GROUP_SIZE
from flexgen_jax.offload.inline_attention import leaves_of, register

FEW_PRODUCTS = 1 << 28
"""Multiplications with which XLA's own product takes no more than a millisecond, and does without
the loading of Numba."""

FEW_PACKED = 1 << 20
"""Elements of a packed kernel that XLA unpacks in a millisecond."""

MULTIPLE = 32
"""Of a kernel's rows and columns, as tiles are (`amx_tiles`, which would load Numba)."""

NUMBA_TARGETS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Set, they may have Numba compile for a processor without tiles."""

ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # of x86-64's Linux


def dense_inline(x: jax.Array, kernel: Kept, bias: jax.Array | None) -> jax.Array:
    """`layers.linear.rounded`, for programs of the CPU."""
    rows = x.reshape(-1, x.shape[-1])
    count, (columns, depth) = rows.shape[0], kernel.shape
    kinds = {jnp.dtype(x.dtype), jnp.dtype(kernel.dtype)}
    is_odd = depth % MULTIPLE or columns % MULTIPLE
    if kinds != {jnp.dtype(jnp.bfloat16)} or is_odd or not has_amx():
        return rounded(x, kernel, bias)
    if not _is_worth_it(count, kernel):
        return rounded(x, kernel, bias)
    added = jnp.zeros(columns, jnp.float32) if bias is None else bias.astype(jnp.float32)
    bits = kernel.storage.bits if isinstance(kernel, QuantizedArray) else 16
    out = jax.ShapeDtypeStruct((count, columns), rows.dtype)
    found: jax.Array = jax.ffi.ffi_call(_target(bits), out)(rows, added, *leaves_of(kernel))
    return found.reshape(*x.shape[:-1], columns)


def _is_worth_it(rows: int, kernel: Kept) -> bool:
    """Whether it is faster than XLA, which unpacks in memory; and not too short."""
    if isinstance(kernel, QuantizedArray):
        storage = kernel.storage
        is_known = storage.group_size == GROUP_SIZE and storage.axis == 0
        whole = storage.plane_length % MULTIPLE == 0
        return is_known and whole and kernel.shape[0] * kernel.shape[1] >= FEW_PACKED
    return rows > FEW_ROWS and rows * kernel.size >= FEW_PRODUCTS


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
def _target(bits: int) -> str:
    from flexgen_jax.offload.inline_handlers import product_handler

    name = f"flexgen_jax_multiply_rows_{bits}"
    return register(name, product_handler(name, bits))
