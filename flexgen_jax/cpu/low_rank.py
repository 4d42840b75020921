"""LoRA adapters for few rows on the CPU, called from inside XLA's programs."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp

from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.low_rank import low_rank_handler
from flexgen_jax.cpu.targets import register

MOST_ROWS = 16
"""For more rows, products of matrices take less time."""


def add_low_rank(
    out: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, adapters: jax.Array | None
) -> jax.Array | None:
    """Computes out + B (A x), or returns None if XLA's own code should be used; see
    `layers.kernels.Kernels.add_low_rank`."""
    columns, depth, count = out.shape[-1], x.shape[-1], prod(x.shape[:-1])
    is_narrow = out.dtype == x.dtype == jnp.bfloat16
    if not is_narrow or count > MOST_ROWS or columns % LANES or depth % LANES:
        return None
    target = _target()
    if target is None:
        return None
    numbers = jnp.zeros(count, jnp.int32)
    if adapters is not None:
        numbers = jnp.repeat(adapters, count // len(adapters))
    rows = out.reshape(count, columns)
    shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = jax.ffi.ffi_call(target, shape, input_output_aliases={0: 0})
    added: jax.Array = call(rows, x.reshape(count, depth), a, b, numbers)
    return added.reshape(out.shape)


@lru_cache
def _target() -> str | None:
    """Returns the name of the registered function, None if it cannot be used."""
    name = "flexgen_jax_low_rank"
    return register(name, lambda: low_rank_handler(name))
