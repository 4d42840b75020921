"""LoRA adapters for few rows on the CPU.

A small product takes less time than its dispatch, so one kernel computes both products of a layer.
It reads only the adapters that the rows have.
"""

from __future__ import annotations

from functools import lru_cache

from flexgen_jax.cpu.jit.emit import F32, FIRST_CACHE, I16, I32, Array, Function, Value
from flexgen_jax.cpu.jit.handler import Call, compiled_handler
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.vectors import from_bfloat16, lane_sum, to_bfloat16

VECTORS = 4
"""Vectors of a row that are taken together, so that their sums do not wait for each other."""

AHEAD = 512
"""Elements between those that are multiplied and those that are prefetched."""


@lru_cache
def low_rank_handler(name: str) -> int:
    """Returns the handler of out + B (A x).

    Its arguments: out, bfloat16 [row, column]; x, bfloat16 [row, depth]; A, bfloat16 [adapter,
    rank, depth]; B, bfloat16 [adapter, rank, column]; the number of each row's adapter, int32
    [row], -1 for none. Result: [row, column], bfloat16, which may use the memory of out. Depth and
    columns are multiples of 16.
    """
    return compiled_handler(name, _emit)


def _emit(k: Function, call: Call) -> None:
    out, x, a, b = (call.argument(n).array(I16) for n in range(4))
    adapters, result = call.argument(4).array(I32), call.result(0).array(I16)
    rows, columns = (call.argument(0).size(axis) for axis in range(2))
    rank, depth = (call.argument(2).size(axis) for axis in (1, 2))
    begin, end = call.limits(rows)
    with k.workspace((F32, depth), (F32, rank)) as (wide, inner), k.loop(end, begin) as row:
        adapter = adapters.load(row).to(k.index(0).type)
        own_out, own_result = out.at(row * columns), result.at(row * columns)
        with k.either(adapter < 0) as (has_none, has_one):
            with has_none, k.loop(columns, step=LANES) as column:
                own_result.store(column, own_out.load(column, LANES))
            with has_one:
                own_x = x.at(row * depth)
                with k.loop(depth, step=LANES) as n:
                    wide.store(n, from_bfloat16(own_x.load(n, LANES)))
                _multiply_a(wide, a.at(adapter * rank * depth), inner, (rank, depth))
                own_b = b.at(adapter * rank * columns)
                _add_b(own_out, own_b, inner, (rank, columns), own_result)


def _multiply_a(x: Array, a: Array, inner: Array, shape: tuple[Value, Value]) -> None:
    """Writes A x for a row x, fp32."""
    k, (rank, depth) = x.k, shape
    together = LANES * VECTORS
    whole = depth // together * together
    with k.loop(rank) as n:
        line = a.at(n * depth)
        totals = [k.variable(k.filled(F32, LANES)) for _ in range(VECTORS)]
        with k.loop(whole, step=together) as first:
            for half in range(0, VECTORS, 2):
                line.prefetch(first + (AHEAD + half * LANES), FIRST_CACHE)
            for vector, total in enumerate(totals):
                at = first + vector * LANES
                total.set(
                    k.fma(from_bfloat16(line.load(at, LANES)), x.load(at, LANES), total.get())
                )
        with k.loop(depth, begin=whole, step=LANES) as at:
            product = from_bfloat16(line.load(at, LANES)) * x.load(at, LANES)
            totals[0] += product
        one, other, third, fourth = (total.get() for total in totals)
        inner.store(n, lane_sum((one + other) + (third + fourth)))


def _add_b(out: Array, b: Array, inner: Array, shape: tuple[Value, Value], result: Array) -> None:
    """Writes out + B z for a row, where z is the result of A."""
    k, (rank, columns) = out.k, shape

    def add(first: Value, vectors: int) -> None:
        places = [first + vector * LANES for vector in range(vectors)]
        totals = [k.variable(from_bfloat16(out.load(place, LANES))) for place in places]
        with k.loop(rank) as n:
            line, factor = b.at(n * columns), inner.load(n)
            for place, total in zip(places, totals, strict=True):
                total.set(k.fma(from_bfloat16(line.load(place, LANES)), factor, total.get()))
        for place, total in zip(places, totals, strict=True):
            result.store(place, to_bfloat16(total.get()))

    together = LANES * VECTORS
    whole = columns // together * together
    with k.loop(whole, step=together) as first:
        add(first, VECTORS)
    with k.loop(columns, begin=whole, step=LANES) as first:
        add(first, 1)
