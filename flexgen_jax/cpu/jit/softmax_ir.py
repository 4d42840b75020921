"""A row's softmax on the CPU, as LLVM instructions on vectors of floats.

    weigh(scores, at, begin, end, room, peak) -> highest, summed
        replaces scores[at + token] by exp(score - highest) for the tokens from begin to end, and by
        0 for the other tokens below room; highest is the maximum of those scores and of peak;
        summed is the sum of the new values
    exp(x)
        e^x for one x <= 0; loops over it vectorize

scores: fp32, C-contiguous; room: a multiple of `LANES`. This is written out because Numba
vectorizes short rows badly.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.llvm import FLAGS, FLOAT, INT, LANES, Vectors, arrays_of, filled

cgutils: Any = untyped

VECTOR, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)


def _emit(builder: Any, scores: Any, at: Any, begin: Any, end: Any, room: Any, peak: Any) -> Any:
    emit, index, none = Vectors(builder), at.type, filled(VECTOR, 0.0)
    zero, step = ir.Constant(index, 0), ir.Constant(index, LANES)
    first, last = (emit.spread(builder.trunc(x, INT), LANES) for x in (begin, end))
    lanes = ir.Constant(INTS, list(range(LANES)))

    def place(start: Any) -> Any:
        pointer = builder.gep(scores.data, [builder.add(at, start)])
        return builder.bitcast(pointer, VECTOR.as_pointer())

    def is_asked(start: Any) -> Any:
        token = builder.add(emit.spread(builder.trunc(start, INT), LANES), lanes)
        is_before = builder.icmp_signed("<", token, last)
        return builder.and_(builder.icmp_signed(">=", token, first), is_before)

    highest = cgutils.alloca_once_value(builder, emit.spread(peak, LANES))
    with cgutils.for_range_slice(builder, zero, room, step, index) as (start, _):
        score, so_far = builder.load(place(start), align=4), builder.load(highest)
        is_larger = builder.fcmp_ordered(">", score, so_far)  # not for NaN, which the sum shows
        is_larger = builder.and_(is_asked(start), is_larger)
        builder.store(builder.select(is_larger, score, so_far), highest)
    name = f"llvm.vector.reduce.fmax.v{LANES}f32"
    top = emit.call(name, FLOAT, builder.load(highest), flags=("nnan",))
    tops, summed = emit.spread(top, LANES), cgutils.alloca_once_value(builder, none)
    with cgutils.for_range_slice(builder, zero, room, step, index) as (start, _):
        score = builder.load(place(start), align=4)
        weight = emit.exp(builder.fsub(score, tops, flags=FLAGS))
        weight = builder.select(is_asked(start), weight, none)
        builder.store(weight, place(start), align=4)
        builder.store(builder.fadd(builder.load(summed), weight, flags=FLAGS), summed)
    return top, emit.sum_lanes(builder.load(summed))


def _weigh(_context, scores, at, begin, end, room, peak):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        result = _emit(builder, *arrays_of(context, builder, signature.args, arguments))
        return context.make_tuple(builder, signature.return_type, result)

    result = types.UniTuple(types.float32, 2)
    return result(scores, *(types.intp,) * 4, types.float32), generate


def _exp(_context, x):
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return Vectors(builder).exp(arguments[0])

    return types.float32(types.float32), generate


weigh: Any = intrinsic(_weigh)
exp: Any = intrinsic(_exp)
