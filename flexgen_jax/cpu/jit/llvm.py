"""Float arithmetic as LLVM instructions, on scalars and on vectors."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped

cgutils: Any = untyped

LANES = 16
"""Floats in a vector; LLVM uses two of the machine's registers where they are shorter."""

# Sums may be taken in any order; NaN and infinity are respected.
FLAGS = ("reassoc", "nsz", "contract", "arcp")
FLOAT, INT = ir.FloatType(), ir.IntType(32)

FIRST_CACHE, SECOND_CACHE = 3, 2
"""Locality levels of LLVM's prefetch instruction for a core's first and second cache."""

LOWEST = -87.0
"""The least x for `exp`: e^x is still a normal number there."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
SERIES = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
"""Coefficients of (e^x - 1 - x) / x^2 around 0, highest power first (Cephes)."""


def arrays_of(context: Any, builder: Any, kinds: Any, values: Any) -> list[Any]:
    """Returns an intrinsic's arguments, with each array as an object that has its `data` and
    `shape`."""
    return [
        context.make_array(kind)(context, builder, value)
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(kinds, values, strict=True)
    ]


def filled(kind: Any, value: float) -> Any:
    """Returns a constant of a type, in all lanes if it is a vector type."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


class Vectors:
    """Emits instructions on vectors of any number of lanes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def spread(self, scalar: Any, width: int) -> Any:
        """Returns a vector with a scalar in all of its `width` lanes."""
        empty = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
        one = self.builder.insert_element(empty, scalar, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(one, empty, filled(ir.VectorType(INT, width), 0))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        product = self.builder.fmul(a, b, flags=FLAGS)
        return product if c is None else self.builder.fadd(product, c, flags=FLAGS)

    def call(self, name: str, result: Any, *arguments: Any, flags: tuple[str, ...] = ()) -> Any:
        """Calls an LLVM intrinsic by name and returns its result."""
        kind = ir.FunctionType(result, [x.type for x in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments, fastmath=flags)

    def sum_lanes(self, vector: Any) -> Any:
        name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
        return self.call(name, FLOAT, ir.Constant(FLOAT, 0.0), vector, flags=FLAGS)

    def ask(self, pointer: Any, cache: int) -> None:
        """Prefetches the memory at a pointer into a cache; harmless if the address is not valid."""
        how = [ir.Constant(INT, flag) for flag in (0, cache, 1)]  # for reading; data, not code
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, *how)

    def exp(self, x: Any) -> Any:
        """Returns e^x for x <= 0, to 2 units in the last place; NaN stays NaN."""
        builder, kind, name = self.builder, x.type, "llvm.floor.f32"
        integers: Any = INT
        if isinstance(kind, ir.VectorType):
            integers, name = ir.VectorType(INT, kind.count), f"llvm.floor.v{kind.count}f32"
        lowest = filled(kind, LOWEST)
        x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
        halves = self.multiply_add(x, filled(kind, LOG2_E), filled(kind, 0.5))
        whole = self.call(name, kind, halves)
        x = self.multiply_add(whole, filled(kind, -LN2_HIGH), x)
        x = self.multiply_add(whole, filled(kind, -LN2_LOW), x)
        series = filled(kind, SERIES[0])
        for factor in SERIES[1:]:
            series = self.multiply_add(series, x, filled(kind, factor))
        near = self.multiply_add(builder.fmul(series, x, flags=FLAGS), x, x)
        near = builder.fadd(near, filled(kind, 1.0), flags=FLAGS)
        power = builder.add(builder.fptosi(whole, integers), filled(integers, 127))
        bits = builder.shl(power, filled(integers, 23))
        return builder.fmul(near, builder.bitcast(bits, kind), flags=FLAGS)
