"""Operations with a single GPU instruction where compilers would emit two.

One of these instructions converts a low-bit code to fp32: put into the highest bits of the mantissa
of a power of two, it is added to that. With 4 bits, 0x43000000 | c << 16 is 128 + c.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

BASES = {4: (0x43000000, 16, 128.0), 8: (0x43800000, 15, 256.0)}
"""By bits of a code: a power of two, how far a code is shifted into its mantissa, and its value."""


def multiply_add(left: jax.Array, right: jax.Array, more: jax.Array, interprets: bool) -> jax.Array:
    """Returns left * right + more, fp32; interprets: whether JAX interprets the kernel."""
    if interprets:
        return left * right + more
    return _inline("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", left, right, more)


def code_on_base(words: jax.Array, lowest: int, bits: int, interprets: bool) -> jax.Array:
    """Returns codes added to their power of two, fp32; lowest: a code's lowest bit in its word,
    uint32."""
    power, place, _ = BASES[bits]
    shift = place - lowest
    moved = words << shift if shift > 0 else words >> -shift
    mask = ((1 << bits) - 1) << place
    if interprets:
        number = (moved & jnp.uint32(mask)) | jnp.uint32(power)
        return jax.lax.bitcast_convert_type(number, jnp.float32)
    constants = [jnp.full(words.shape, number, jnp.uint32) for number in (mask, power)]
    return _inline("lop3.b32 $0, $1, $2, $3, 0xEA;", "=f,r,r,r", moved, *constants)


def _inline(instruction: str, constraints: str, *operands: jax.Array) -> jax.Array:
    """Returns the fp32 results of an instruction, element by element."""
    out = jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)
    result: jax.Array = triton.elementwise_inline_asm(
        instruction,
        args=operands,
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[out],
    )[0]
    return result
