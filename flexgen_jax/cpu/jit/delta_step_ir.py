"""The inner loops of a gated delta rule's token on the CPU, as LLVM instructions on vectors.

    step_row(arrays, row, at, fade, write, key_size, value_size)
        computes a head: arrays are value, query, key, state, out and after, flat and fp32, and
        `row` and `at` the numbers of the head's rows in those of values and of keys; fade and write
        are its two numbers; the sizes are compile-time constants

A head's state is read in blocks of columns: once for what it says of key and query, which is summed
in registers, and again, from the first cache, for what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.llvm import FLAGS, FLOAT, LANES, Vectors, arrays_of, filled

cgutils: Any = untyped

COLUMNS = 4 * LANES
"""The most columns of a block."""


def blocks(size: int) -> Iterator[list[tuple[int, int]]]:
    """Splits `size` columns into blocks of vectors: the first column and the width of each, a power
    of two. 76 columns are a block of four vectors of 16, and one of vectors of 8 and 4."""
    vectors, start = list[tuple[int, int]](), 0
    while start < size:
        width = min(LANES, 1 << ((size - start).bit_length() - 1))
        vectors.append((start, width))
        start += width
    for first in range(0, len(vectors), COLUMNS // LANES):
        yield vectors[first : first + COLUMNS // LANES]


class Emitter(Vectors):
    """Emits instructions for one head."""

    def __init__(self, builder: Any, key_size: int, value_size: int) -> None:
        super().__init__(builder)
        self._keys, self._values = key_size, value_size

    def step(self, arrays: list[Any], row: Any, at: Any, fade: Any, write: Any) -> None:
        """Computes the head of row `row`, whose queries and keys are in row `at`."""
        value, query, key, state, out, after = (array.data for array in arrays)
        self._query, self._key = (self._from(x, at, self._keys) for x in (query, key))
        square = self._keys * self._values
        old, new = (self._from(x, row, square) for x in (state, after))
        value, out = (self._from(x, row, self._values) for x in (value, out))
        for vectors in blocks(self._values):
            of_key, of_query, both = self._seen(old, vectors)
            written = []
            for (start, width), k, q in zip(vectors, of_key, of_query, strict=True):
                faded = self.spread(fade, width)
                known = self.builder.fmul(faded, k, flags=FLAGS)
                missing = self.builder.fsub(self._load(value, start, width), known, flags=FLAGS)
                new_value = self.builder.fmul(self.spread(write, width), missing, flags=FLAGS)
                own = self.builder.fmul(self.spread(both, width), new_value, flags=FLAGS)
                self._store(self.multiply_add(faded, q, own), out, start)
                written.append(new_value)
            self._become(old, new, vectors, written, fade)

    def _seen(self, state: Any, vectors: list[tuple[int, int]]) -> tuple[list[Any], list[Any], Any]:
        """Returns the products of some columns with key and query, and that of these two."""
        builder = self.builder
        kinds = [ir.VectorType(FLOAT, width) for _, width in vectors] * 2 + [FLOAT]
        sums = [cgutils.alloca_once_value(builder, filled(kind, 0.0)) for kind in kinds]
        for kind, total in zip(kinds, sums, strict=True):
            builder.store(filled(kind, 0.0), total)
        with cgutils.for_range(builder, ir.Constant(ir.IntType(64), self._keys)) as loop:
            of_key, of_query = (self._number(x, loop.index) for x in (self._key, self._query))
            line = self._from(state, loop.index, self._values)
            terms = [self._load(line, start, width) for start, width in vectors]
            factors = [of_key] * len(vectors) + [of_query] * len(vectors)
            for term, factor, total in zip(terms * 2, factors, sums[:-1], strict=True):
                spread = self.spread(factor, term.type.count)
                builder.store(self.multiply_add(term, spread, builder.load(total)), total)
            builder.store(self.multiply_add(of_key, of_query, builder.load(sums[-1])), sums[-1])
        loaded = [builder.load(total) for total in sums]
        return loaded[: len(vectors)], loaded[len(vectors) : -1], loaded[-1]

    def _become(
        self, old: Any, new: Any, vectors: list[tuple[int, int]], written: list[Any], fade: Any
    ) -> None:
        """Writes some columns of the new state."""
        builder = self.builder
        with cgutils.for_range(builder, ir.Constant(ir.IntType(64), self._keys)) as loop:
            of_key = self._number(self._key, loop.index)
            before, after = (self._from(x, loop.index, self._values) for x in (old, new))
            for (start, width), new_value in zip(vectors, written, strict=True):
                kept = builder.fmul(
                    self._load(before, start, width), self.spread(fade, width), flags=FLAGS
                )
                changed = self.multiply_add(self.spread(of_key, width), new_value, kept)
                self._store(changed, after, start)

    def _from(self, pointer: Any, row: Any, size: int) -> Any:
        """Returns where a row of `size` numbers begins."""
        return self.builder.gep(pointer, [self.builder.mul(row, ir.Constant(row.type, size))])

    def _number(self, pointer: Any, index: Any) -> Any:
        return self.builder.load(self.builder.gep(pointer, [index]))

    def _vector(self, pointer: Any, start: int, width: int) -> Any:
        at = self.builder.gep(pointer, [ir.Constant(ir.IntType(64), start)])
        return self.builder.bitcast(at, ir.VectorType(FLOAT, width).as_pointer())

    def _load(self, pointer: Any, start: int, width: int) -> Any:
        return self.builder.load(self._vector(pointer, start, width), align=4)

    def _store(self, vector: Any, pointer: Any, start: int) -> None:
        self.builder.store(vector, self._vector(pointer, start, vector.type.count), align=4)


def _step_row(
    _typing: Any,
    arrays: Any,
    row: Any,
    at: Any,
    fade: Any,
    write: Any,
    key_size: Any,
    value_size: Any,
) -> Any:
    """Computes one head; see the module's docstring."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = cgutils.unpack_tuple(builder, arguments[0])
        given = arrays_of(context, builder, signature.args[0], values)
        emitter = Emitter(builder, key_size.literal_value, value_size.literal_value)
        emitter.step(given, *arguments[1:5])
        return context.get_dummy_value()

    return types.void(arrays, types.intp, types.intp, fade, write, key_size, value_size), generate


step_row: Any = intrinsic(prefer_literal=True)(_step_row)
