"""Arithmetic of vectors: bfloat16 and float16, the exponential function, sums and transposes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from flexgen_jax.cpu.jit.emit import F16, F32, I16, I32, Value
from flexgen_jax.cpu.jit.instructions import HIGH_HALF, LANES, nearest_integers

LOWEST = -87.0
"""The least x for `exp`: e^x is still a normal number there."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
SERIES = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
"""Coefficients of (e^x - 1 - x) / x^2 around 0, highest power first (Cephes)."""


def from_bfloat16(bits: Value) -> Value:
    """Widens bfloat16, given as bits."""
    return (bits.to(I32, is_signed=False) << 16).bits(F32)


def to_bfloat16(floats: Value) -> Value:
    """Rounds fp32 to the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = floats.bits(I32)
    upper = bits >> 16
    nearest = (bits + 0x7FFF + (upper & 1)) >> 16
    return floats.is_nan().select(upper | 0x40, nearest).to(I16)


def bfloat16_words(even: Value, odd: Value) -> Value:
    """Rounds fp32 to the nearest bfloat16, ties away from zero, as `layers.quantization` does;
    returns them in their order, two in a word."""
    low, high = (half.bits(I32) + 0x8000 for half in (even, odd))
    return low >> 16 | high & HIGH_HALF


def from_float16(bits: Value) -> Value:
    """Widens float16, given as bits, also below its least normal number."""
    if bits.k.processor.converts_half:
        return bits.bits(F16).to(F32)
    wide = bits.to(I32, is_signed=False)
    sign, rest = (wide & 0x8000) << 16, (wide & 0x7FFF) << 13
    # The exponent of float16 counts from 15, that of fp32 from 127.
    normal = rest + (112 << 23)
    exponent = wide & 0x7C00
    # The largest exponent stands for infinity and NaN in both.
    normal = exponent.equals(0x7C00).select(normal | 0x7F800000, normal)
    # The least one has no leading 1. XLA's threads take subnormal fp32 numbers for zero, so a 1 is
    # put there and subtracted.
    small = ((rest | 113 << 23).bits(F32) - 2.0**-14).bits(I32)
    return (exponent.equals(0).select(small, normal) | sign).bits(F32)


def exp(x: Value) -> Value:
    """Returns e^x for x <= 0, to 2 units in the last place; NaN stays NaN."""
    k, number = x.k, partial(x.k.filled, F32, x.lanes)
    x = (x < LOWEST).select(number(LOWEST), x)
    name = "llvm.floor.f32" if x.lanes == 1 else f"llvm.floor.v{x.lanes}f32"
    whole = k.call(name, x.type, k.fma(x, number(LOG2_E), number(0.5)))
    x = k.fma(whole, number(-LN2_HIGH), x)
    x = k.fma(whole, number(-LN2_LOW), x)
    series = number(SERIES[0])
    for factor in SERIES[1:]:
        series = k.fma(series, x, number(factor))
    near: Value = k.fma(series * x, x, x) + 1.0
    power: Value = ((whole.to(I32) + 127) << 23).bits(F32)
    return near * power


def inverse_or_zero(number: Value) -> Value:
    """Returns 1 / number, or 0 if the number is 0."""
    one = number.k.filled(F32, number.lanes, 1.0)
    return number.equals(0.0).select(number.k.filled(F32, number.lanes), one / number)


def lane_sums(vectors: Sequence[Value]) -> Value:
    """Returns a vector whose lane i is the sum of all lanes of the i-th of up to `LANES` vectors;
    the order of the sum does not depend on their number."""
    k, half = vectors[0].k, LANES
    # The compiler leaves out additions of -0.
    vectors = [*vectors, *[k.filled(F32, LANES, -0.0)] * (LANES - len(vectors))]
    while half > 1:
        half //= 2
        blocks = range(0, LANES, 2 * half)
        low = [side + block + n for block in blocks for side in (0, LANES) for n in range(half)]
        high = [lane + half for lane in low]
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [one.shuffle(low, other) + one.shuffle(high, other) for one, other in pairs]
    return vectors[0]


def lane_sum(vector: Value) -> Value:
    """Returns the sum of all lanes of a vector of up to `LANES` lanes, as `lane_sums` does."""
    return lane_sums([padded(vector)]).lane(0)


def rounded_in_units(floats: Value, largest: int) -> tuple[Value, Value]:
    """Rounds a vector of fp32 to integers, int32, so that its largest magnitude becomes `largest`.
    Returns the unit, fp32, and the integers."""
    one = floats.k.number(F32, 1.0)
    # As integers, so that NaN is the largest, and the unit is NaN.
    top = (floats.bits(I32) & 0x7FFFFFFF).reduce("umax").bits(F32)
    unit = top * float(np.float32(1 / largest))
    return unit, nearest_integers(floats * (one / unit.equals(0.0).select(one, unit)))


def transposed(rows: Sequence[Value]) -> list[Value]:
    """Transposes a square of words, given by rows, by exchanging ever larger squares in it."""
    square = [*rows]
    for step in (1, 2, 4, 8):
        low = [j + LANES - step if j & step else j for j in range(LANES)]
        high = [j + LANES if j & step else j + step for j in range(LANES)]
        for i in (i for i in range(LANES) if not i & step):
            one, other = square[i], square[i + step]
            square[i], square[i + step] = one.shuffle(low, other), one.shuffle(high, other)
    return square


def padded(vector: Value) -> Value:
    """Returns a vector of `LANES` lanes that ends with zeros."""
    if vector.lanes == LANES:
        return vector
    zeros = vector.k.filled(vector.scalar, LANES)
    if vector.lanes == 1:
        return zeros.with_lane(0, vector)
    lanes = [min(lane, vector.lanes) for lane in range(LANES)]
    return vector.shuffle(lanes, vector.k.filled(vector.scalar, vector.lanes))
