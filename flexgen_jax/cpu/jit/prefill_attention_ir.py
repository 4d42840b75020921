"""Small matrix products on the CPU, as LLVM instructions on vectors of floats.

    multiply(left, width, right, begin, step, out, at, pitch, count)
        out = left @ right, for `ROWS` rows and `COLUMNS` columns of out, whose rows lie `pitch`
        apart from `at` on. Rows of left lie `width` apart; `count` elements of each are used, with
        `count` rows of right, which lie `step` apart from `begin` on
    widen(stored, begin, out, at, size, is_half)
        converts `size` elements of stored, from `begin` on, to fp32 in out, from `at` on
    keep(stored, begin, out, at, size, is_half)
        copies `size` elements of stored, from `begin` on, to out, from `at` on, as they are

Arrays are flat. left, right and the out of `multiply` and `widen` are fp32. size and is_half are
compile-time constants.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.decode_attention_ir import Emitter
from flexgen_jax.cpu.jit.llvm import FLOAT, LANES, Vectors, arrays_of, filled
from flexgen_jax.cpu.processor import has_wide_vectors

cgutils: Any = untyped

ROWS, COLUMNS = 8, 2 * LANES
"""Rows and columns of a part of a product. All of it is summed in registers where these are
AVX-512's: 16 vectors of 32; elsewhere a quarter of it at a time: 8 half vectors of 16."""


def _multiply(_context, left, width, right, begin, step, out, at, pitch, count):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = arrays_of(context, builder, signature.args, arguments)
        _emit_product(builder, *values)
        return context.get_dummy_value()

    index = types.intp
    return types.void(left, index, right, index, index, out, index, index, index), generate


def _emit_product(
    builder: Any,
    left: Any,
    width: Any,
    right: Any,
    begin: Any,
    step: Any,
    out: Any,
    at: Any,
    pitch: Any,
    count: Any,
) -> None:
    high, wide = (ROWS, COLUMNS) if has_wide_vectors() else (ROWS // 2, LANES)
    for top in range(0, ROWS, high):
        for left_most in range(0, COLUMNS, wide):
            rows, columns = range(top, top + high), range(left_most, left_most + wide, LANES)
            _emit_tile(
                builder, left, width, right, begin, step, out, at, pitch, count, rows, columns
            )


def _emit_tile(
    builder: Any,
    left: Any,
    width: Any,
    right: Any,
    begin: Any,
    step: Any,
    out: Any,
    at: Any,
    pitch: Any,
    count: Any,
    tile_rows: range,
    columns: range,
) -> None:
    """Writes the loop for the sums that are in registers together."""
    vector, index = ir.VectorType(FLOAT, LANES), count.type
    zero, one = ir.Constant(index, 0), ir.Constant(index, 1)
    starts = [ir.Constant(index, start) for start in columns]
    rows = [ir.Constant(index, row) for row in tile_rows]
    emit = Vectors(builder)

    def vectors(array: Any, first: Any, row: Any, apart: Any) -> list[Any]:
        base = builder.add(first, builder.mul(row, apart))
        places = [builder.gep(array.data, [builder.add(base, start)]) for start in starts]
        return [builder.bitcast(place, vector.as_pointer()) for place in places]

    sums = [[cgutils.alloca_once_value(builder, filled(vector, 0.0)) for _ in starts] for _ in rows]
    with cgutils.for_range_slice(builder, zero, count, one, index) as (k, _):
        taken = [builder.load(place, align=4) for place in vectors(right, begin, k, step)]
        for row, places in zip(rows, sums, strict=True):
            factor = builder.load(builder.gep(left.data, [builder.add(builder.mul(row, width), k)]))
            spread = emit.spread(factor, LANES)
            for place, mixed in zip(places, taken, strict=True):
                builder.store(emit.multiply_add(spread, mixed, builder.load(place)), place)
    for row, places in zip(rows, sums, strict=True):
        for place, target in zip(places, vectors(out, at, row, pitch), strict=True):
            builder.store(builder.load(place), target, align=4)


def _moving(is_widened: bool) -> Any:
    def move(_context, stored, begin, out, at, size, is_half):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit = Emitter(context, builder, size.literal_value, is_half.literal_value, 16)
            source, first, target, to, *_ = arrays_of(context, builder, signature.args, arguments)
            for chunk in emit.chunks:
                vector = emit.load(source, emit.plus(first, chunk.start), chunk.width)
                vector = emit.widened(vector, chunk.width) if is_widened else vector
                place = builder.gep(target.data, [emit.plus(to, chunk.start)])
                place = emit.vector(place, target.data.type.pointee, chunk.width)
                builder.store(vector, place, align=emit.element_bytes(target))
            return context.get_dummy_value()

        return types.void(stored, types.intp, out, types.intp, size, is_half), generate

    return move


multiply: Any = intrinsic(_multiply)
widen: Any = intrinsic(prefer_literal=True)(_moving(True))
keep: Any = intrinsic(prefer_literal=True)(_moving(False))
