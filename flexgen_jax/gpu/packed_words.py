"""Weights of 4 or 8 bits in a kernel, unpacked a tile at a time: integers, and floats of 4 (MXFP4,
NVFP4) and 8 bits.

A tile is 32-bit words of codes, [output, part, word], whose parts have one scale. A weight is
scale * level + minimum, which takes one operation. An integer is a level that has been added to a
power of two, see `inline`: with 4 bits, the minimum has -128 * scale in it for that.

A float of few bits has a sign, an exponent and a mantissa. Put into a half so that exponents end
together, it is that half times a power of two, also below the normal numbers. For example E2M1's
0110, which is 4, becomes 0 00011 0000000000: 2^-12, times 2^14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flexgen_jax.gpu.inline import BASES, code_on_base, multiply_add
from flexgen_jax.gpu.triton import load, power_of_two
from flexgen_jax.layers.levels import number_of
from flexgen_jax.layers.quantization import QuantizedArray
from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.storage import Storage

WORD, WORDS = 4, 4
"""Bytes of codes in a word, and words that a thread loads at once."""

PART = WORD * WORDS
"""Elements of a plane in this number of words, which share a scale."""

LEAST_OUTPUTS = 16
"""Rows of the kernel, which are outputs, of the smallest place of a grid."""

POWERS = {"e2m1": 2.0**14, "e4m3": 2.0**8, "e5m2": 1.0}
"""By kind of floats: the factor of their halves."""

HALVES = {"e2m1": (12, 9, 0x0E00), "e4m3": (8, 7, 0x3F80), "e5m2": (8, 8, 0x7F00)}
"""By kind of floats: how far the sign is shifted in a half, how far the rest, and its mask."""


class Shape(NamedTuple):
    """A kernel's static parameters: outputs of a place, elements of a plane and of a tile's row,
    the format, and whether JAX interprets the kernel."""

    outputs: int
    plane: int
    tile: int
    packing: Format
    interprets: bool

    @property
    def leaves(self) -> dict[str, Factor]:
        """The factors by the names of their leaves."""
        return dict(self.packing.factors)

    @property
    def parts(self) -> int:
        """Parts in a row of a tile."""
        return self.tile // PART

    @property
    def tiles(self) -> int:
        """Tiles per plane; the last tile may have fewer words."""
        return pl.cdiv(self.plane, self.tile)


def can_unpack(storage: Storage) -> bool:
    """Returns whether a matrix can be unpacked: parts must be whole and have one scale, and the
    rows of a place share numbers that several rows do."""
    packing = storage.packing
    if storage.axis != 1 or packing.levels not in ("integers", *POWERS):
        return False
    if packing.bits not in BASES or storage.shape[0] % LEAST_OUTPUTS:
        return False
    groups = [factor.group for _, factor in packing.factors if factor.group]
    is_whole = storage.plane_length * packing.planes == storage.length
    if not is_whole or storage.plane_length % PART or any(group % PART for group in groups):
        return False
    return all(_is_simple(factor) for _, factor in packing.factors)


def shared_rows(packing: Format) -> list[int]:
    """Returns how many rows share a number, of each factor that several rows share."""
    return [factor.rows for _, factor in packing.factors if factor.rows > 1]


def _is_simple(factor: Factor) -> bool:
    """Returns whether a factor's numbers are of one row, of all, or of a multiple of the rows
    that a place of the grid has."""
    return factor.dtype != "codes" and (factor.rows == 1 or factor.rows % LEAST_OUTPUTS == 0)


def shape_of(kernel: QuantizedArray, outputs: int, largest_tile: int, interprets: bool) -> Shape:
    """Returns the shape of a kernel whose tiles' rows have `largest_tile` bytes of codes at most.
    Elements of a tile beyond the end of a row count as zero."""
    plane = kernel.storage.plane_length
    tile = min(largest_tile, power_of_two(plane))
    return Shape(outputs, plane, tile, kernel.storage.packing, interprets)


def _words_of(kernel: QuantizedArray) -> jax.Array:
    """Returns the codes of a matrix, uint32 [output, part, word]."""
    codes = kernel.packed.reshape(kernel.shape[0], -1, WORDS, WORD)
    return jax.lax.bitcast_convert_type(codes, jnp.uint32)


def inputs_of(
    kernel: QuantizedArray, shape: Shape, block_of: Callable[[Any], Any] = lambda place: place
) -> list[tuple[jax.Array, pl.BlockSpec]]:
    """Returns a matrix' words and factors, and the parts of them that a place of the grid sees;
    block_of: from its index along the first axis, that of its block of outputs."""
    words, factors = _words_of(kernel), shape.leaves.items()
    factor_block = pl.BlockSpec(
        (shape.outputs, *words.shape[1:]), lambda n, *_: (block_of(n), 0, 0)
    )

    def seen(leaf: jax.Array, rows: int) -> pl.BlockSpec:
        """Returns the part of a leaf, [rows, groups]; rows: how many rows of the kernel share one
        of the leaf's, 0 if all do."""
        blocks, groups = rows // shape.outputs, leaf.shape[1]
        if rows == 1:
            return pl.BlockSpec((shape.outputs, groups), lambda n, *_: (block_of(n), 0))
        if not blocks:
            return pl.BlockSpec((1, groups), lambda n, *_: (0, 0))
        return pl.BlockSpec((1, groups), lambda n, *_: (block_of(n) // blocks, 0))

    leaves = [(kernel.leaf(name), factor.rows) for name, factor in factors]
    return [(words, factor_block), *((leaf, seen(leaf, rows)) for leaf, rows in leaves)]


def unpacked(
    kept: Sequence[Any], tile: jax.Array, shape: Shape
) -> list[tuple[jax.Array, list[jax.Array]]]:
    """Unpacks a tile: for each plane the index of its first element, and its weights, fp32 [output,
    part, word], one array for each byte of the words.

    kept: the words and the leaves of the factors, of the outputs of a place.
    """
    words_ref, *leaves = kept
    factors = dict(zip(shape.leaves, leaves, strict=True))
    first, mask = tile * shape.parts, None
    if shape.plane % shape.tile:
        of_words = (shape.outputs, shape.parts, WORDS)
        part = first + jax.lax.broadcasted_iota(jnp.int32, of_words, 1)
        mask = part < shape.plane // PART
    words = load(words_ref, (slice(None), pl.ds(first, shape.parts), slice(None)), mask)
    starts = [plane * shape.plane + tile * shape.tile for plane in range(shape.packing.planes)]
    return [
        (start, _weights(words, plane, _line(factors, start, shape), shape))
        for plane, start in enumerate(starts)
    ]


def _line(
    factors: dict[str, Any], at: jax.Array, shape: Shape
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the factors of a tile's levels, [output, part, word], and the offsets added
    afterwards, None for none; at: the element at which the tile begins."""
    packing, parts = shape.packing, (shape.outputs, shape.parts)
    output = jax.lax.broadcasted_iota(jnp.int32, parts, 0)
    part = jax.lax.broadcasted_iota(jnp.int32, parts, 1)

    def numbers(leaf: str, factor: Factor) -> jax.Array:
        row = output if factor.rows == 1 else jnp.zeros_like(output)
        group = jnp.zeros_like(part)
        if factor.group:
            group = (at + PART * part) // factor.group
            group = jnp.minimum(group, factors[leaf].shape[1] - 1)  # beyond the end, any will do
        stored = number_of(factors[leaf][row, group], factor.dtype)
        values = stored - factor.center if factor.center else stored
        return values if factor.of is None else values * numbers(f"{leaf}_of", factor.of)

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


def _weights(
    words: jax.Array, plane: int, factors: tuple[jax.Array, jax.Array | None], shape: Shape
) -> list[jax.Array]:
    """Returns the weights of a plane, fp32 [output, part, word], one array for each byte of the
    words; factors: see `_line`."""
    scale, least = factors
    levels = _levels(words, plane, shape)
    if least is None:
        return [level * scale for level in levels]
    return [multiply_add(level, scale, least, shape.interprets) for level in levels]


def _levels(words: jax.Array, plane: int, shape: Shape) -> list[jax.Array]:
    """Returns the codes of a plane in fp32, one array for each byte of the words, uint32: integers
    added to the format's power of two, floats divided by theirs."""
    bits = shape.packing.bits
    if shape.packing.levels != "integers":
        return _floats(words, bits * plane, shape.packing.levels)
    lowest = [8 * byte + bits * plane for byte in range(WORD)]
    return [code_on_base(words, bit, bits, shape.interprets) for bit in lowest]


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
