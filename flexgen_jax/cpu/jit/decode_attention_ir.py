"""The inner loops of decode attention on the CPU, as LLVM instructions on vectors of floats.

They are written out because Numba's own vectorization of these loops reads the cache far below the
memory's speed. Keys, or values, of a block are a tuple of C-contiguous arrays, [row, token, ...]:
(fp32 floats,), (16-bit floats as bits,) or (packed, scale, minimum).

    score_row(keys, row, begin, stop, query, scores, size, is_half, bits)
        scores[token] = query * key for the tokens from begin to stop
    add_row(values, row, begin, stop, weights, out, size, is_half, bits)
        out += weights[token] * value for the tokens from begin to stop
    add_some(values, row, begin, stop, weights, out, tokens, offset, size, is_half, bits)
        out += weights[slot] * the value of token tokens[slot] - offset, for the slots from begin
        to stop

query, out: fp32 [head_dim]; scores, weights: fp32; tokens: int32; size, is_half and bits are
compile-time constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped
from numba.extending import intrinsic

from flexgen_jax.cpu.jit.llvm import (
    FIRST_CACHE,
    FLAGS,
    FLOAT,
    INT,
    LANES,
    Vectors,
    arrays_of,
    filled,
)
from flexgen_jax.cpu.processor import converts_half
from flexgen_jax.models.formats.storage import kv_storage

cgutils: Any = untyped

AHEAD = 2048
"""Distance in bytes between the token in use and the one that is prefetched into the cache."""

SLOTS_AHEAD = 8
"""Distance in slots between the chosen token in use and the one that is prefetched into the
cache."""


class Chunk(NamedTuple):
    """Consecutive elements of a head that are stored together.

    start: the first element's index in the head; width: how many elements; first: their place in
    the stored row; plane, group: where they are packed (see `layers/quantization.py`), 0 where they
    are not.
    """

    start: int
    width: int
    first: int
    plane: int
    group: int


def chunks(size: int, bits: int) -> Iterator[Chunk]:
    """Splits a head's `size` elements into chunks within one plane and one group, each of a power
    of two of elements, `LANES` at most."""
    storage = kv_storage((1, 1, 1, size), "bfloat16", bits)
    is_packed = bits < 16
    length = storage.plane_length if is_packed else size
    group = storage.group_size if is_packed else size
    start = 0
    while start < size:
        end = min(size, (start // length + 1) * length, (start // group + 1) * group)
        width = min(LANES, 1 << ((end - start).bit_length() - 1))
        yield Chunk(start, width, start % length, start // length, start // group)
        start += width


class Emitter(Vectors):
    """Emits instructions for heads of one size in one cache format."""

    def __init__(self, context: Any, builder: Any, size: int, is_half: bool, bits: int) -> None:
        super().__init__(builder)
        self.context = context
        self.is_half, self.bits = is_half, bits
        self.chunks = list(chunks(size, bits))
        self.stored = max(chunk.first + chunk.width for chunk in self.chunks)

    def arrays(self, kind: Any, value: Any) -> list[Any]:
        """Unpacks a Numba tuple of arrays."""
        values = cgutils.unpack_tuple(self.builder, value)
        return arrays_of(self.context, self.builder, kind, values)

    def vector(self, pointer: Any, element: Any, width: int) -> Any:
        """Casts a pointer to one to a vector of `width` elements."""
        return self.builder.bitcast(pointer, ir.VectorType(element, width).as_pointer())

    def load(self, array: Any, index: Any, width: int) -> Any:
        """Loads `width` consecutive elements of an array, as they are stored."""
        pointer = self.builder.gep(array.data, [index])
        element = array.data.type.pointee
        vector = self.vector(pointer, element, width)
        return self.builder.load(vector, align=self.element_bytes(array))

    def at(self, array: Any, row: Any, token: Any) -> Any:
        """Returns the index of a token's first element in a flat [row, token, element] array."""
        builder = self.builder
        _, tokens, elements = cgutils.unpack_tuple(builder, array.shape)
        return builder.mul(builder.add(builder.mul(row, tokens), token), elements)

    def ask_token(self, array: Any, index: Any) -> None:
        """Prefetches a token's elements into the first cache; harmless if there is no such
        token."""
        builder, kind = self.builder, ir.IntType(8).as_pointer()
        size, width = self.stored, self.element_bytes(array)
        for start in range(0, size, max(1, 64 // width)):
            pointer = builder.gep(array.data, [self.plus(index, start)])
            self.ask(builder.bitcast(pointer, kind), FIRST_CACHE)

    def element_bytes(self, array: Any) -> int:
        element = array.data.type.pointee
        return 4 if element == FLOAT else int(element.width) // 8

    def plus(self, index: Any, offset: int) -> Any:
        return self.builder.add(index, ir.Constant(index.type, offset))

    def widened(self, stored: Any, width: int) -> Any:
        """Converts a vector of stored floats, of 16 bits or fp32, to fp32."""
        builder = self.builder
        if stored.type.element == FLOAT:
            return stored
        floats, integers = ir.VectorType(FLOAT, width), ir.VectorType(INT, width)
        if self.is_half and converts_half():
            halves = builder.bitcast(stored, ir.VectorType(ir.HalfType(), width))
            return builder.fpext(halves, floats)
        wide = builder.zext(stored, integers)
        if not self.is_half:
            return builder.bitcast(builder.shl(wide, filled(integers, 16)), floats)
        sign = builder.shl(builder.and_(wide, filled(integers, 0x8000)), filled(integers, 16))
        rest = builder.shl(builder.and_(wide, filled(integers, 0x7FFF)), filled(integers, 13))
        # float16's exponent counts from 15, float32's from 127.
        bits = builder.add(rest, filled(integers, 112 << 23))
        largest = filled(integers, 0x7C00)
        exponent = builder.and_(wide, largest)
        # Its largest exponent stands for infinity and NaN, as float32's does.
        special = builder.or_(bits, filled(integers, 0x7F800000))
        bits = builder.select(builder.icmp_unsigned("==", exponent, largest), special, bits)
        # The smallest has no leading one. XLA's threads take subnormal numbers, here of float32,
        # for zero, so one is put there and subtracted.
        begun = builder.bitcast(builder.or_(rest, filled(integers, 113 << 23)), floats)
        small = builder.bitcast(builder.fsub(begun, filled(floats, 2.0**-14)), integers)
        is_small = builder.icmp_unsigned("==", exponent, filled(integers, 0))
        bits = builder.select(is_small, small, bits)
        return builder.bitcast(builder.or_(bits, sign), floats)

    def codes(self, stored: Any, chunk: Chunk) -> Any:
        """Extracts a chunk's codes from packed bytes, as fp32."""
        builder, integers = self.builder, ir.VectorType(INT, chunk.width)
        wide = builder.zext(stored, integers)
        shifted = builder.lshr(wide, filled(integers, self.bits * chunk.plane))
        code = builder.and_(shifted, filled(integers, (1 << self.bits) - 1))
        return builder.sitofp(code, ir.VectorType(FLOAT, chunk.width))

    def scalar(self, array: Any, index: Any) -> Any:
        """Loads one stored float, of 16 bits or fp32, as fp32."""
        wide = self.widened(self.load(array, index, 1), 1)
        return self.builder.extract_element(wide, ir.Constant(INT, 0))

    def total(self, vectors: list[Any]) -> Any:
        """Returns the sum of all lanes of all vectors."""
        summed = ir.Constant(FLOAT, 0.0)
        by_width: dict[int, Any] = {}
        for vector in vectors:
            width = vector.type.count
            so_far = by_width.get(width)
            found_so_far = vector if so_far is None else self.builder.fadd(so_far, vector, FLAGS)
            by_width[width] = found_so_far
        for vector in by_width.values():
            summed = self.builder.fadd(summed, self.sum_lanes(vector), flags=FLAGS)
        return summed


def _score(emit: Emitter, keys: list[Any], row: Any, span: Any, query: Any, scores: Any) -> None:
    builder = emit.builder
    zero, one = (ir.Constant(row.type, n) for n in (0, 1))
    rows = [emit.load(query, emit.plus(zero, c.start), c.width) for c in emit.chunks]
    summed: dict[int, Any] = {}
    if emit.bits < 16:  # the factor of a group's minimum does not depend on the token
        for group in {chunk.group for chunk in emit.chunks}:
            parts = [x for x, c in zip(rows, emit.chunks, strict=True) if c.group == group]
            summed[group] = emit.total(parts)
    with cgutils.for_range_slice(builder, *span, one, row.type) as (token, _):
        base = emit.at(keys[0], row, token)
        emit.ask_token(keys[0], emit.plus(base, AHEAD // emit.element_bytes(keys[0])))
        products = []
        low = ir.Constant(FLOAT, 0.0)
        by_group: dict[tuple[int, int], Any] = {}
        for chunk, part in zip(emit.chunks, rows, strict=True):
            stored = emit.load(keys[0], emit.plus(base, chunk.first), chunk.width)
            if emit.bits == 16:
                products.append(builder.fmul(emit.widened(stored, chunk.width), part, flags=FLAGS))
                continue
            where = (chunk.group, chunk.width)
            codes = emit.codes(stored, chunk)
            by_group[where] = emit.multiply_add(codes, part, by_group.get(where))
        for (group, width), codes in by_group.items():
            scale = emit.scalar(keys[1], emit.plus(emit.at(keys[1], row, token), group))
            products.append(builder.fmul(codes, emit.spread(scale, width), flags=FLAGS))
        for group, part in summed.items():
            minimum = emit.scalar(keys[2], emit.plus(emit.at(keys[2], row, token), group))
            low = emit.multiply_add(minimum, part, low)
        score = builder.fadd(emit.total(products), low, flags=FLAGS)
        builder.store(score, builder.gep(scores.data, [token]))


def _add(
    emit: Emitter,
    values: list[Any],
    row: Any,
    span: Any,
    weights: Any,
    out: Any,
    tokens: Any = None,
    offset: Any = None,
) -> None:
    builder = emit.builder
    zero, one = (ir.Constant(row.type, n) for n in (0, 1))

    def token_of(slot: Any) -> Any:
        if tokens is None:
            return slot
        token = builder.load(builder.gep(tokens.data, [slot]))
        return builder.sub(builder.sext(token, slot.type), offset)

    empty = [ir.Constant(ir.VectorType(FLOAT, c.width), [0.0] * c.width) for c in emit.chunks]
    sums = [cgutils.alloca_once_value(builder, vector) for vector in empty]
    groups = {chunk.group for chunk in emit.chunks} if emit.bits < 16 else set()
    lows = {g: cgutils.alloca_once_value(builder, ir.Constant(FLOAT, 0.0)) for g in groups}
    with cgutils.for_range_slice(builder, *span, one, row.type) as (slot, _):
        token = token_of(slot)
        base = emit.at(values[0], row, token)
        if tokens is None:
            emit.ask_token(values[0], emit.plus(base, AHEAD // emit.element_bytes(values[0])))
        else:
            later = emit.plus(slot, SLOTS_AHEAD)
            last = builder.sub(span[1], one)
            later = builder.select(builder.icmp_signed("<", later, last), later, last)
            emit.ask_token(values[0], emit.at(values[0], row, token_of(later)))
        weight = builder.load(builder.gep(weights.data, [slot]))
        slopes = {}
        for group, low in lows.items():
            scale = emit.scalar(values[1], emit.plus(emit.at(values[1], row, token), group))
            minimum = emit.scalar(values[2], emit.plus(emit.at(values[2], row, token), group))
            slopes[group] = builder.fmul(weight, scale, flags=FLAGS)
            builder.store(emit.multiply_add(weight, minimum, builder.load(low)), low)
        for chunk, place in zip(emit.chunks, sums, strict=True):
            stored = emit.load(values[0], emit.plus(base, chunk.first), chunk.width)
            is_packed = emit.bits < 16
            value = emit.codes(stored, chunk) if is_packed else emit.widened(stored, chunk.width)
            factor = emit.spread(slopes.get(chunk.group, weight), chunk.width)
            builder.store(emit.multiply_add(value, factor, builder.load(place)), place)
    for chunk, place in zip(emit.chunks, sums, strict=True):
        pointer = builder.gep(out.data, [emit.plus(zero, chunk.start)])
        vector = emit.vector(pointer, FLOAT, chunk.width)
        added = builder.fadd(builder.load(vector, align=4), builder.load(place), flags=FLAGS)
        if chunk.group in lows:
            low = emit.spread(builder.load(lows[chunk.group]), chunk.width)
            added = builder.fadd(added, low, flags=FLAGS)
        builder.store(added, vector, align=4)


def _generated(emit_row: Any) -> Any:
    """Returns Numba's code generator for a call with the arguments (side, row, begin, stop, ...,
    size, is_half, bits), where `side` is the tuple of a block's keys or values."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder, *(kind.literal_value for kind in signature.args[-3:]))
        side = emit.arrays(signature.args[0], arguments[0])
        rest = arrays_of(context, builder, signature.args[4:-3], arguments[4:-3])
        emit_row(emit, side, arguments[1], arguments[2:4], *rest)
        return context.get_dummy_value()

    return generate


INDEX = (types.intp,) * 3
"""Types of the arguments row, begin and stop."""


def _score_row(_typing, side, row, begin, stop, query, scores, size, is_half, bits):
    return types.void(side, *INDEX, query, scores, size, is_half, bits), _generated(_score)


def _add_row(_typing, side, row, begin, stop, weights, out, size, is_half, bits):
    return types.void(side, *INDEX, weights, out, size, is_half, bits), _generated(_add)


def _add_some(_typing, side, row, begin, stop, weights, out, tokens, offset, size, is_half, bits):
    vectors = (weights, out, tokens, types.intp)
    return types.void(side, *INDEX, *vectors, size, is_half, bits), _generated(_add)


# Numba binds arguments by name, so it needs functions with named arguments.
score_row: Any = intrinsic(prefer_literal=True)(_score_row)
add_row: Any = intrinsic(prefer_literal=True)(_add_row)
add_some: Any = intrinsic(prefer_literal=True)(_add_some)
