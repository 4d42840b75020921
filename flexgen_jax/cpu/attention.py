"""Decode attention on the CPU as a part of XLA's programs.

Where the device is a CPU, keys and values are read where they lie by the kernels of
`host_kernels`, at memory speed, from within the program of a decode step: a step of three programs,
with XLA's threads still spinning while the kernels' compute, costs 1 to 4 ms more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.attention import (
    KVPair,
    Partial,
    attend_blocks,
    attend_prompt,
)
from flexgen_jax.layers.decoder import KVBlock
from flexgen_jax.layers.quantization import QuantizedArray

FEW_ELEMENTS = 1 << 20
"""Of keys and values, with which XLA's own attention costs no more than a tenth of a millisecond,
and does without the loading of Numba."""

FEW_OF_A_PROMPT = 1 << 18
"""The same for prompts that go through a layer together: 2 milliseconds."""


def attend_inline(
    query: jax.Array,
    blocks: tuple[KVBlock, ...],
    starts: jax.Array,
    position: jax.Array,
    first_valid: jax.Array,
) -> Partial:
    """`layers.attention.attend_blocks`, for programs of the CPU."""
    batch, heads, _, size = query.shape
    rows = batch * heads
    if 2 * rows * size * sum(key.shape[2] for key, _ in blocks) < FEW_ELEMENTS:
        return attend_blocks(query, blocks, starts, position, first_valid)
    lengths = jnp.array([key.shape[2] for key, _ in blocks], jnp.int32)
    starts = jnp.asarray(starts, jnp.int32)
    first = jnp.maximum(first_valid[None, :] - starts[:, None], 0)
    stop = jnp.minimum(lengths, position - starts)
    leaves = jax.tree.leaves(blocks)
    bits = next((key.storage.bits for key, _ in blocks if isinstance(key, QuantizedArray)), 16)
    target = _target(size, str(query.dtype), bits)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, size), (rows,))]
    asked = query.astype(jnp.float32).reshape(rows, size)
    out, lse = jax.ffi.ffi_call(target, shapes)(asked, first, stop, *leaves)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def attend_prompt_inline(
    query: jax.Array, key: jax.Array, value: jax.Array, first_valid: jax.Array, heads: int
) -> tuple[jax.Array, KVPair]:
    """`layers.attention.attend_prompt`, for programs of the CPU."""
    if key.size + value.size < FEW_OF_A_PROMPT:
        return attend_prompt(query, key, value, first_valid, heads)
    batch, tokens, hidden = query.shape
    dtype, rows, size = query.dtype, batch * heads, hidden // heads
    shape = (batch, tokens, heads, size)
    kept = jax.ShapeDtypeStruct((rows, tokens, size), dtype)
    call = jax.ffi.ffi_call(
        _prompt_target(size, str(dtype)), (kept, kept, jax.ShapeDtypeStruct(shape, jnp.float32))
    )
    keys, values, out = call(*(x.reshape(shape) for x in (query, key, value)), first_valid)
    key, value = (x.reshape(batch, heads, tokens, size) for x in (keys, values))
    return out.reshape(query.shape).astype(dtype), (key, value)


@lru_cache
def _target(size: int, dtype: str, bits: int) -> str:
    """The name of the registered function for heads of this size and format."""
    # Numba takes half a second to import, and not every run attends here.
    from flexgen_jax.cpu.jit.attention_entry import attention_handler

    name = f"flexgen_jax_attend_{size}_{dtype}_{bits}"
    return register(name, attention_handler(name, size, dtype, bits))


@lru_cache
def _prompt_target(size: int, dtype: str) -> str:
    from flexgen_jax.cpu.jit.attention_entry import prompt_handler

    name = f"flexgen_jax_attend_prompt_{size}_{dtype}"
    return register(name, prompt_handler(name, size, dtype))


def register(name: str, handler: tuple[Any, ...]) -> str:
    """Makes a handler known to XLA; returns its name."""
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler[0].ctypes), platform="cpu")
    return name
