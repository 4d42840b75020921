"""The operands of a matrix product, and its results.

A product is out = rows @ kernel.T + bias, where a column of the result is a row of the kernel
weights. Rows of bfloat16 are taken `STEP` elements at a time, columns `PAIR` at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexgen_jax.cpu.jit.emit import F32, I16, I32, Array, Function, Scalar, Value
from flexgen_jax.cpu.jit.handler import Call
from flexgen_jax.cpu.jit.instructions import LANES, bfloat16_halves, dot_pairs
from flexgen_jax.cpu.jit.vectors import lane_sums, to_bfloat16

PAIR, STEP = 32, 32
"""Columns that go together, and elements of a step."""

Sides = tuple[int, int]
"""Columns, and rows, that are multiplied at a time."""

SidesByRows = tuple[Sides, Sides, Sides]
"""The sides for one row, for two, and for more."""


@dataclass(frozen=True)
class Operands:
    """A product but for its kernel weights."""

    rows: Array
    """bfloat16 [count, depth], as bits."""
    bias: Array
    """fp32 [columns]."""
    out: Array
    """[count, columns], fp32 or bfloat16 as bits."""
    count: Value
    depth: Value
    columns: Value

    @classmethod
    def of(cls, call: Call, is_wide: bool) -> Operands:
        """Returns the operands of a call, whose first arguments are rows and bias. is_wide: whether
        results are fp32."""
        rows, bias = call.argument(0), call.argument(1)
        out = call.result(0).array(F32 if is_wide else I16)
        sizes = rows.size(0), rows.size(1), bias.size(0)
        return cls(rows.array(I16), bias.array(F32), out, *sizes)

    @property
    def k(self) -> Function:
        return self.count.k

    def turns(self, many: int) -> Value:
        """Returns how many times `many` rows are taken."""
        return (self.count + (many - 1)) // many

    def give(self, sums: Sequence[Value], row: Value, column: Value, sides: Sides) -> None:
        """Writes results. sums: for each row, for each column, a vector whose lanes are added up;
        rows from `count` on are left out."""
        wide, many = sides
        totals = lane_sums(sums)
        for line in range(many):
            some = totals.shuffle(range(line * wide, (line + 1) * wide))
            with self.k.when(row + line < self.count):
                self.store(row + line, column, some + self.bias.load(column, wide))

    def store(self, row: Value, column: Value, results: Value) -> None:
        """Writes results of a row, fp32, from a column on."""
        stored = results if self.out.scalar == F32 else to_bfloat16(results)
        self.out.store(row * self.columns + column, stored)


def for_each_number_of_rows(
    operands: Operands, wide: SidesByRows, short: SidesByRows, emit: Callable[[Sides], None]
) -> None:
    """Emits a product for one row, for two, and for more.

    wide, short: the sides with vectors of 512 bits, and of 256.
    """
    one, two, more = wide if operands.k.processor.has_wide_vectors else short
    with operands.k.either(operands.count.equals(1)) as (is_one, otherwise):
        with is_one:
            emit(one)
        with otherwise, operands.k.either(operands.count.equals(2)) as (is_two, is_more):
            with is_two:
                emit(two)
            with is_more:
                emit(more)


def step_of_rows(array: Array, at: Value) -> list[Value]:
    """Loads a step of a row as it is multiplied: a vector of bfloat16 pairs; or from an array of
    fp32, which has a step's even elements before its odd ones, two vectors."""
    if array.scalar == F32:
        return [array.load(at + part, LANES) for part in range(0, STEP, LANES)]
    return [array.at(at).of(I32).load(0, LANES)]


def step_as(scalar: Scalar, words: Value) -> list[Value]:
    """Returns a step of bfloat16 pairs as it is multiplied, see `step_of_rows`."""
    return [*bfloat16_halves(words)] if scalar == F32 else [words]


def store_step(array: Array, at: Value, words: Value) -> None:
    """Stores a step of bfloat16 pairs, in an array of fp32 its even elements before its odd
    ones."""
    if array.scalar == F32:
        for number, half in enumerate(bfloat16_halves(words)):
            array.store(at + number * LANES, half)
    else:
        array.at(at).of(I32).store(0, words)


def add_products(total: Value, one: Value, other: Value) -> Value:
    """Adds to each lane of total the products in that lane: of fp32, or of bfloat16 pairs."""
    return total.k.fma(one, other, total) if one.is_float else dot_pairs(total, one, other)
