"""Products of a few rows with weights of 4 or 8 bits, which are read once and never written:
integers, and floats of 4 (MXFP4, NVFP4) and 8 bits.

A weight is scale * level + minimum, which takes one operation more for each weight, whatever the
number of rows. A code becomes fp32 by one operation: put into the highest bits of the mantissa of a
power of two, it is added to that. With 4 bits, 0x43000000 | c << 16 is 128 + c; the minimum has
-128 * scale in it for that.

A float of few bits has a sign, an exponent and a mantissa. Put into a half so that exponents end
together, it is that half times a power of two, also below the normal numbers. For example E2M1's
0110, which is 4, becomes 0 00011 0000000000: 2^-12, times 2^14.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from flexgen_jax.gpu.triton import NARROW, call, load, power_of_two
from flexgen_jax.layers.levels import number_of
from flexgen_jax.layers.quantization import QuantizedArray
from flexgen_jax.models.formats.format import Factor, Format

MOST_ROWS = 8
"""Rows that are multiplied one after the other; for more, XLA unpacks the weights."""

OUTPUTS = 16
"""Rows of the kernel, which are outputs, of a place of the grid, which has four warps; none of them
waits for another."""

WORD, WORDS = 4, 4
"""Bytes of codes in a word, and words that a thread loads at once."""

PART = WORD * WORDS
"""Elements of a plane in so many words, which have one scale."""

LARGEST_TILE = 256
"""Bytes of codes in a row of a tile. What a tile has beyond the end of a row counts as zero."""

POWERS = {"e2m1": 2.0**14, "e4m3": 2.0**8, "e5m2": 1.0}
"""By kind of floats: what their halves are multiplied by."""

BASES = {4: (0x43000000, 16, 128.0), 8: (0x43800000, 15, 256.0)}
"""By bits of a code: a power of two, how far a code is shifted into its mantissa, and its value."""

HALVES = {"e2m1": (12, 9, 0x0E00), "e4m3": (8, 7, 0x3F80), "e5m2": (8, 8, 0x7F00)}
"""By kind of floats: how far the sign is shifted in a half, how far the rest, and its mask."""

FusedMultiplyAdd = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Shape(NamedTuple):
    """What a kernel is made for: elements of a plane and of a tile's row, and the format."""

    plane: int
    tile: int
    packing: Format

    @property
    def leaves(self) -> dict[str, Factor]:
        """The factors by the names of their leaves."""
        return dict(self.packing.factors)


def can_multiply(rows: jax.Array, kernel: QuantizedArray) -> bool:
    """Returns whether the kernel takes these rows, [n, in], and this matrix."""
    storage, packing = kernel.storage, kernel.storage.packing
    if rows.dtype not in NARROW or rows.shape[0] > MOST_ROWS:
        return False
    if storage.axis != 1 or packing.levels not in ("integers", *POWERS):
        return False
    if packing.bits not in BASES or storage.shape[0] % OUTPUTS:
        return False
    shape = _shape_of(kernel)
    is_whole = shape.plane * packing.planes == storage.length and shape.tile > 0
    return is_whole and all(_is_simple(factor) for factor in shape.leaves.values())


def _is_simple(factor: Factor) -> bool:
    """Returns whether a factor's numbers are of one row, of all, or of a multiple of the rows
    that a place of the grid has."""
    return factor.dtype != "codes" and (factor.rows == 1 or factor.rows % OUTPUTS == 0)


def _shape_of(kernel: QuantizedArray) -> Shape:
    storage, packing = kernel.storage, kernel.storage.packing
    return Shape(storage.plane_length, _tile(storage.plane_length, packing), packing)


def _tile(plane: int, packing: Format) -> int:
    """Returns the elements of a tile's row, 0 if there are none: parts must be whole and have one
    scale."""
    groups = [factor.group for _, factor in packing.factors if factor.group]
    if plane % PART or any(group % PART for group in groups):
        return 0
    return min(LARGEST_TILE, power_of_two(plane))


def multiply(rows: jax.Array, kernel: QuantizedArray, interprets: bool = False) -> jax.Array:
    """Returns rows [n, in] @ kernel [out, in].T, fp32 [n, out]."""
    shape, count, outputs = _shape_of(kernel), rows.shape[0], kernel.shape[0]
    if shape.packing.has_order:
        rows = jnp.take(rows, kernel.leaf("order"), axis=1)
    of_bytes = rows.astype(jnp.float32).reshape(count, -1, WORDS, WORD).transpose(0, 3, 1, 2)
    codes = kernel.packed.reshape(outputs, -1, WORDS, WORD)
    words = jax.lax.bitcast_convert_type(codes, jnp.uint32)
    inputs = [
        (of_bytes, pl.BlockSpec(of_bytes.shape, lambda n: (0, 0, 0, 0))),
        (words, pl.BlockSpec((OUTPUTS, *words.shape[1:]), lambda n: (n, 0, 0))),
    ]
    inputs += [_of_place(kernel.leaf(leaf), factor.rows) for leaf, factor in shape.leaves.items()]
    product = jax.ShapeDtypeStruct((count, outputs), jnp.float32)
    (out,) = call(
        partial(_kernel, shape=shape, multiply_add=_plain_fma if interprets else _fma),
        grid=(outputs // OUTPUTS,),
        inputs=inputs,
        outputs=[(product, pl.BlockSpec((count, OUTPUTS), lambda n: (0, n)))],
        warps=4,
        stages=3,
        interprets=interprets,
    )
    result: jax.Array = out
    return result


def _of_place(leaf: jax.Array, rows: int) -> tuple[jax.Array, pl.BlockSpec]:
    """Returns a leaf, [rows, groups], and the part of it that a place of the grid sees; rows: how
    many rows of the kernel share one of the leaf's, 0 if all do."""
    if rows == 1:
        return leaf, pl.BlockSpec((OUTPUTS, leaf.shape[1]), lambda n: (n, 0))
    places = rows // OUTPUTS
    return leaf, pl.BlockSpec((1, leaf.shape[1]), lambda n: (n // places if places else 0, 0))


def _kernel(
    rows_ref: Any, words_ref: Any, *refs: Any, shape: Shape, multiply_add: FusedMultiplyAdd
) -> None:
    """Multiplies all rows, [n, byte, part, word], by some rows of the kernel, [output, part, word];
    refs: the leaves of their factors, and the output."""
    *leaves, out_ref = refs
    factors = dict(zip(shape.leaves, leaves, strict=True))
    count, parts = rows_ref.shape[0], shape.tile // PART
    zeros = jnp.zeros((OUTPUTS, parts, WORDS), jnp.float32)

    def add_tile(tile: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        mask = _inside(tile, shape)
        of_outputs = None if mask is None else jnp.broadcast_to(mask[None], zeros.shape)
        of_tile = (slice(None), pl.ds(tile * parts, parts), slice(None))
        codes = load(words_ref, of_tile, of_outputs)
        for plane in range(shape.packing.planes):
            at = plane * shape.plane + tile * shape.tile
            scale, least = _line(factors, at, shape)
            for byte, level in enumerate(_levels(codes, plane, shape.packing)):
                weight = level * scale if least is None else multiply_add(level, scale, least)
                for row in range(count):
                    of_row = (jnp.int32(row), jnp.int32(byte), pl.ds(at // PART, parts))
                    x = load(rows_ref, (*of_row, slice(None)), mask)
                    x = jnp.broadcast_to(x[None], weight.shape)
                    sums[row] = multiply_add(weight, x, sums[row])
        return sums

    tiles = -(-shape.plane // shape.tile)
    sums = jax.lax.fori_loop(0, tiles, add_tile, [zeros] * count)
    for row, products in enumerate(sums):
        out_ref[row, :] = products.sum(2).sum(1)


def _inside(tile: jax.Array, shape: Shape) -> jax.Array | None:
    """Returns which words of a tile, [part, word], a row has; None if it has whole tiles."""
    if shape.plane % shape.tile == 0:
        return None
    parts = shape.tile // PART
    part = tile * parts + jax.lax.broadcasted_iota(jnp.int32, (parts, WORDS), 0)
    return part < shape.plane // PART


def _line(
    factors: dict[str, Any], at: jax.Array, shape: Shape
) -> tuple[jax.Array, jax.Array | None]:
    """Returns by what the levels of a tile, [output, part, word], are multiplied, and what is added
    then, None for nothing; at: the element at which the tile begins."""
    packing, parts = shape.packing, (OUTPUTS, shape.tile // PART)
    output = jax.lax.broadcasted_iota(jnp.int32, parts, 0)
    part = jax.lax.broadcasted_iota(jnp.int32, parts, 1)

    def numbers(leaf: str, factor: Factor) -> jax.Array:
        row = output if factor.rows == 1 else jnp.zeros_like(output)
        group = jnp.zeros_like(part)
        if factor.group:
            group = (at + PART * part) // factor.group
            group = jnp.minimum(group, factors[leaf].shape[1] - 1)  # beyond the end, any will do
        stored = number_of(factors[leaf][row, group], factor.dtype)
        own = stored - factor.center if factor.center else stored
        return own if factor.of is None else own * numbers(f"{leaf}_of", factor.of)

    scale = numbers("scale", packing.scale)
    if packing.levels != "integers":
        return _of_words(scale * POWERS[packing.levels]), None
    offset = BASES[packing.bits][2] + packing.center
    zero = offset if packing.zero is None else offset + numbers("zero", packing.zero)
    least = -scale * zero
    if packing.minimum is not None:
        minimum = numbers("minimum", packing.minimum)
        least = least - minimum if packing.subtracts else least + minimum
    return _of_words(scale), _of_words(least)


def _of_words(numbers: jax.Array) -> jax.Array:
    """Returns numbers of parts, [output, part], for each of their words."""
    return jnp.broadcast_to(numbers[:, :, None], (*numbers.shape, WORDS))


def _plain_fma(left: jax.Array, right: jax.Array, more: jax.Array) -> jax.Array:
    """Returns left * right + more."""
    return left * right + more


def _fma(left: jax.Array, right: jax.Array, more: jax.Array) -> jax.Array:
    """Returns left * right + more by one instruction of a GPU, of which Triton would make two."""
    (out,) = triton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[left, right, more],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(left.shape, jnp.float32)],
    )
    return out


def _levels(words: jax.Array, plane: int, packing: Format) -> list[jax.Array]:
    """Returns the codes of a plane in fp32, one array for each byte of the words, uint32: integers
    added to the format's power of two, floats divided by theirs."""
    bits = packing.bits
    if packing.levels != "integers":
        return _floats(words, bits * plane, packing.levels)
    power, place, _ = BASES[bits]
    mask, levels = ((1 << bits) - 1) << place, []
    for byte in range(WORD):
        left = place - (8 * byte + bits * plane)
        moved = words << left if left > 0 else words >> -left
        number = (moved & jnp.uint32(mask)) | jnp.uint32(power)
        levels.append(jax.lax.bitcast_convert_type(number, jnp.float32))
    return levels


def _floats(words: jax.Array, lowest: int, kind: str) -> list[jax.Array]:
    """Returns floats divided by their power of two, one array for each byte of the words; lowest:
    their lowest bit in each byte.

    The two halves of a register take bytes 0 and 2, or 1 and 3: one shift brings the signs of both
    to their places, and one the rest.
    """
    sign_at, rest_at, rest = HALVES[kind]
    pairs = []
    for pair in (words, words >> 8):
        sign = (pair << (sign_at - lowest)) & jnp.uint32(0x80008000)
        halves = sign | ((pair << (rest_at - lowest)) & jnp.uint32(rest << 16 | rest))
        pairs.append((_half(halves & jnp.uint32(0xFFFF)), _half(halves >> 16)))
    (first, third), (second, fourth) = pairs
    return [first, second, third, fourth]


def _half(bits: jax.Array) -> jax.Array:
    """Returns halves, whose bits are in the low half of words, in fp32."""
    half = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    return half.astype(jnp.float32)
