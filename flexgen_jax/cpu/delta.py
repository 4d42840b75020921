"""One token of the gated delta rule on the CPU, called from inside XLA's programs."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp

from flexgen_jax.cpu.jit.delta_step import delta_handler
from flexgen_jax.cpu.targets import register
from flexgen_jax.layers.delta_rule import Sides

MIN_KERNEL_ELEMENTS = 1 << 18
"""Below this many elements of states, XLA's own code is fast enough."""


def delta_step(sides: Sides, state: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Computes one token of each sequence, or returns None if XLA's own code should be used; see
    `layers.delta_rule.step`. The new state takes the old one's memory if that is donated."""
    query, key, value, log_fade, write = sides
    key_size, value_size = state.shape[-2:]
    if state.size < MIN_KERNEL_ELEMENTS:
        return None
    target = _target(key_size, value_size)
    if target is None:
        return None
    rows = state.size // (key_size * value_size)
    shapes = ((rows, value_size), state.shape)
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        input_output_aliases={5: 1},
    )
    out, after = call(
        value.reshape(shapes[0]),
        query.reshape(-1, key_size),
        key.reshape(-1, key_size),
        jnp.exp(log_fade).reshape(rows),
        write.reshape(rows),
        state,  # in its own shape: XLA would copy another one
    )
    return out.reshape(value.shape), after


@lru_cache
def _target(key_size: int, value_size: int) -> str | None:
    """Returns the name of the registered function for heads of these sizes; None if it cannot be
    used."""
    name = f"flexgen_jax_delta_{key_size}_{value_size}"

    return register(name, lambda: delta_handler(name, key_size, value_size))
