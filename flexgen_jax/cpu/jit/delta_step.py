"""One token of the gated delta rule on the CPU.

XLA's CPU backend computes it well below the memory's speed, as many small products. This reads each
head's state twice, the second time from the core's cache, and writes it once: in blocks of columns,
first for the products with key and query, which are summed in registers, then for the new state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from flexgen_jax.cpu.jit.emit import F32, Array, Function, Value
from flexgen_jax.cpu.jit.handler import Call, compiled_handler
from flexgen_jax.cpu.jit.instructions import LANES

BLOCK_VECTORS = 4
"""Vectors of columns that are taken together."""

Columns = list[tuple[int, int]]
"""First column and width of some vectors."""


@lru_cache
def delta_handler(name: str, key_size: int, value_size: int) -> int:
    """Returns the handler of one token for heads of these sizes.

    Its arguments, all fp32: value, [row, value_size], with a row for each value head of each
    sequence; query, key, [row / group, key_size], since a group's rows share them; fade, write,
    [row]; state, [row, key_size, value_size]. Results: the products of the new state with the
    query, of value's shape, and the new state, which may use the old one's memory.
    """
    return compiled_handler(name, partial(_emit, key_size, value_size))


def _emit(key_size: int, value_size: int, k: Function, call: Call) -> None:
    value, query, key, fade, write, state = (call.argument(n).array(F32) for n in range(6))
    out, after = (call.result(n).array(F32) for n in range(2))
    rows = call.argument(0).size(0)
    group = rows // call.argument(1).size(0)
    begin, end = call.limits(rows)
    with k.loop(end, begin) as row:
        own_query, own_key = (side.at(row // group * key_size) for side in (query, key))
        old, new = (side.at(row * (key_size * value_size)) for side in (state, after))
        own_value, own_out = (side.at(row * value_size) for side in (value, out))
        sides = old, own_key, own_query
        for columns in column_blocks(value_size):
            with_key, with_query, both = _products(sides, columns, key_size, value_size)
            new_values = []
            for (first, width), known, seen in zip(columns, with_key, with_query, strict=True):
                missing = own_value.load(first, width) - fade.load(row) * known
                new_value = write.load(row) * missing
                own_out.store(first, k.fma(fade.load(row), seen, both * new_value))
                new_values.append(new_value)
            with k.loop(key_size) as n:
                before, then = (side.at(n * value_size) for side in (old, new))
                for (first, width), new_value in zip(columns, new_values, strict=True):
                    kept = before.load(first, width) * fade.load(row)
                    then.store(first, k.fma(own_key.load(n), new_value, kept))


def column_blocks(size: int) -> Iterator[Columns]:
    """Divides `size` columns into blocks of vectors, whose widths are powers of two. 76 columns are
    a block of four vectors of 16, and one of vectors of 8 and 4."""
    vectors, first = Columns(), 0
    while first < size:
        width = min(LANES, 1 << ((size - first).bit_length() - 1))
        vectors.append((first, width))
        first += width
    for number in range(0, len(vectors), BLOCK_VECTORS):
        yield vectors[number : number + BLOCK_VECTORS]


def _products(
    sides: tuple[Array, Array, Array], columns: Columns, key_size: int, value_size: int
) -> tuple[list[Value], list[Value], Value]:
    """Returns the products of some columns of the state with key and query, and that of these two.

    sides: state, key and query of a head.
    """
    (state, key, query), k = sides, sides[0].k
    sums = [[k.variable(k.filled(F32, width)) for _, width in columns] for _ in range(2)]
    both = k.variable(k.number(F32, 0.0))
    with k.loop(key_size) as n:
        line = state.at(n * value_size)
        for place, (first, width) in enumerate(columns):
            for side, total in zip((key, query), sums, strict=True):
                product = k.fma(line.load(first, width), side.load(n), total[place].get())
                total[place].set(product)
        both.set(k.fma(key.load(n), query.load(n), both.get()))
    with_key, with_query = ([total.get() for total in side] for side in sums)
    return with_key, with_query, both.get()
