"""A row's softmax on the CPU, as LLVM instructions on vectors of floats.

    weigh(scores, at, begin, end, room, peak) -> highest, summed
        makes scores[at + token] exp(score - highest) for the tokens from begin to end, and 0 for
        the other ones below room; highest is the largest of those scores and of peak, summed the
        sum of what they are made

scores: fp32, C-contiguous; room: a multiple of `LANES`. Written out because Numba vectorizes short
rows badly, at 2 to 5 ns a score in place of a quarter.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.offload.host_vectors import FLAGS, FLOAT, INT, LANES

cgutils: Any = untyped

VECTOR, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
LOWEST = -87.0
"""e^x is not 0 yet, nor subnormal."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
SERIES = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
"""Of (e^x - 1 - x) / x^2 around 0, highest power first (Cephes)."""


class _Emitter:
    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def all(self, value: float) -> Any:
        return ir.Constant(VECTOR, [value] * LANES)

    def spread(self, scalar: Any, kind: Any) -> Any:
        """A number in all lanes."""
        builder, empty = self.builder, ir.Constant(kind, ir.Undefined)
        one = builder.insert_element(empty, scalar, ir.Constant(INT, 0))
        return builder.shuffle_vector(one, empty, ir.Constant(INTS, [0] * LANES))

    def call(self, name: str, result: Any, *arguments: Any, flags: tuple[str, ...] = ()) -> Any:
        kind = ir.FunctionType(result, [x.type for x in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments, fastmath=flags)

    def larger(self, a: Any, b: Any) -> Any:
        """Of two, b where a is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def times_plus(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=FLAGS), c, flags=FLAGS)

    def exp(self, x: Any) -> Any:
        """e^x for x <= 0, to 2 units in the last place, NaN for NaN."""
        builder = self.builder
        is_low = builder.fcmp_ordered("<", x, self.all(LOWEST))
        x = builder.select(is_low, self.all(LOWEST), x)
        halves = self.times_plus(x, self.all(LOG2_E), self.all(0.5))
        whole = self.call(f"llvm.floor.v{LANES}f32", VECTOR, halves)
        x = self.times_plus(whole, self.all(-LN2_HIGH), x)
        x = self.times_plus(whole, self.all(-LN2_LOW), x)
        series = self.all(SERIES[0])
        for factor in SERIES[1:]:
            series = self.times_plus(series, x, self.all(factor))
        near = self.times_plus(builder.fmul(series, x, flags=FLAGS), x, x)
        near = builder.fadd(near, self.all(1.0), flags=FLAGS)
        power = builder.add(builder.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
        bits = builder.shl(power, ir.Constant(INTS, [23] * LANES))
        return builder.fmul(near, builder.bitcast(bits, VECTOR), flags=FLAGS)


def _emit(builder: Any, scores: Any, at: Any, begin: Any, end: Any, room: Any, peak: Any) -> Any:
    emit, index = _Emitter(builder), at.type
    zero, step = ir.Constant(index, 0), ir.Constant(index, LANES)
    narrow = [emit.spread(builder.trunc(x, INT), INTS) for x in (begin, end)]
    lanes = ir.Constant(INTS, list(range(LANES)))

    def place(start: Any) -> Any:
        pointer = builder.gep(scores.data, [builder.add(at, start)])
        return builder.bitcast(pointer, VECTOR.as_pointer())

    def is_asked(start: Any) -> Any:
        token = builder.add(emit.spread(builder.trunc(start, INT), INTS), lanes)
        after, before = (
            builder.icmp_signed(sign, token, x) for sign, x in zip((">=", "<"), narrow, strict=True)
        )
        return builder.and_(after, before)

    highest = cgutils.alloca_once_value(builder, emit.spread(peak, VECTOR))
    with cgutils.for_range_slice(builder, zero, room, step, index) as (start, _):
        largest = builder.load(highest)
        larger = emit.larger(builder.load(place(start), align=4), largest)
        builder.store(builder.select(is_asked(start), larger, largest), highest)
    name = f"llvm.vector.reduce.fmax.v{LANES}f32"
    top = emit.call(name, FLOAT, builder.load(highest), flags=("nnan",))
    low, summed = emit.spread(top, VECTOR), cgutils.alloca_once_value(builder, emit.all(0.0))
    with cgutils.for_range_slice(builder, zero, room, step, index) as (start, _):
        score = builder.load(place(start), align=4)
        weight = emit.exp(builder.fsub(score, low, flags=FLAGS))
        weight = builder.select(is_asked(start), weight, emit.all(0.0))
        builder.store(weight, place(start), align=4)
        builder.store(builder.fadd(builder.load(summed), weight, flags=FLAGS), summed)
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    total = emit.call(name, FLOAT, ir.Constant(FLOAT, 0.0), builder.load(summed), flags=FLAGS)
    return top, total


def _weigh(_context, scores, at, begin, end, room, peak):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        found = _emit(builder, array, *arguments[1:])
        return context.make_tuple(builder, signature.return_type, found)

    result = types.UniTuple(types.float32, 2)
    return result(scores, *(types.intp,) * 4, types.float32), generate


weigh: Any = intrinsic(_weigh)
