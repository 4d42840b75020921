"""Matrices of bfloat16 as tiles, and the units of the processor that multiply them.

A tile is 16 rows of 64 bytes; `PAIR` rows or columns, two tiles, go together. In the left operand a
tile holds 16 rows of 32 elements, in the right one 32 rows of 16 elements with rows interleaved in
pairs, and in the product 16 x 16 fp32. Tiles of fp32 have 16 rows of 32 elements, and are not
interleaved.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Self

from flexgen_jax.cpu.jit.emit import (
    F32,
    FIRST_CACHE,
    I8,
    I16,
    I32,
    SECOND_CACHE,
    Array,
    Function,
    Scalar,
    Value,
    Variable,
)
from flexgen_jax.cpu.jit.instructions import (
    LANES,
    TileRegisters,
    bfloat16_halves,
    dot_bytes,
    dot_pairs,
)
from flexgen_jax.cpu.jit.operands import PAIR, STEP, Operands, store_step
from flexgen_jax.cpu.jit.vectors import bfloat16_words, to_bfloat16, transposed
from flexgen_jax.models.formats.storage import GROUP_SIZE

TILE = LANES * STEP
"""Elements of a tile of 16-bit numbers."""

SQUARE = LANES * LANES
"""Elements of a tile of sums."""

PAIR_SUMS = PAIR * PAIR

ROWS_AHEAD = 4
"""Rows that are prefetched while a step of tiles is multiplied."""

UNSIGNED = 128
"""What is added to integers where the unit needs unsigned ones."""

SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
"""Numbers of AMX's registers; the register of sums [i][j] is 2 i + j."""

AVX512_SIDES = (2, 8)
"""Tiles of columns, and rows, multiplied at a time by AVX-512: their sums take half of its
registers."""

WIDE_FLOAT_SIDES, FLOAT_SIDES = (2, 8), (1, 4)
"""The same for fp32, with vectors of 512 bits, and of 256."""


class ColumnSource:
    """Kernel weights of which some rows, columns of the product, become tiles."""

    elements = STEP
    """Elements of a row in one step."""

    def prepare(self, column: Value) -> None:
        """Prepares `PAIR` columns."""

    def load(self, column: Value, element: Value) -> list[Value]:
        """Returns a step of each of `LANES` columns, as words of two bfloat16 or of four
        integers."""
        raise NotImplementedError

    def take(self, column: Value, top: Value, steps: Value, packed: Array) -> None:
        """Copies `steps` steps of `PAIR` columns, from the element `top` on, into tiles for the
        right operand."""
        k = steps.k
        self.prepare(column)
        # Goes step by step within a tile: cache lines of packed rows hold two steps' elements.
        with k.loop(2) as tile, k.loop(steps) as step:
            target = step * (2 * TILE) + tile * TILE
            lines = self.load(column + tile * LANES, top + step * self.elements)
            for line, words in enumerate(transposed(lines)):
                store_step(packed, target + line * STEP, words)


def load_lines(array: Array, begin: Value, pitch: Value, lanes: int) -> list[Value]:
    """Loads `LANES` lines of an array, `pitch` apart, and prefetches the next ones into the second
    cache: processors see no pattern in that many."""
    for line in range(LANES, 2 * LANES):
        array.prefetch(begin + pitch * line, SECOND_CACHE)
    return [array.load(begin + pitch * line, lanes) for line in range(LANES)]


@dataclass(frozen=True)
class PlainColumns(ColumnSource):
    """Kernel weights of bfloat16, [column, depth], as bits."""

    array: Array
    depth: Value

    def load(self, column: Value, element: Value) -> list[Value]:
        lines = load_lines(self.array, column * self.depth + element, self.depth, STEP)
        return [line.bits(I32) for line in lines]


@dataclass(frozen=True)
class PaperWeights:
    """Packed kernel weights that are grouped along their output (FlexGen, section 4.2)."""

    codes: Array
    """uint8 [length, depth]; a byte has codes of columns that are `length` apart."""
    scale: Array
    """bfloat16 as bits, [group of columns, depth]."""
    minimum: Array
    length: Value
    depth: Value
    bits: int

    @property
    def planes(self) -> int:
        """Codes of a byte."""
        return 8 // self.bits

    def factors(self, column: Value, element: Value) -> tuple[Value, Value]:
        """Returns scale and minimum of a step, as pairs of bfloat16."""
        at = column // GROUP_SIZE * self.depth + element
        scale, minimum = (side.at(at).of(I32).load(0, LANES) for side in (self.scale, self.minimum))
        return scale, minimum

    def place(self, column: Value, element: Value) -> tuple[Value, Value]:
        """Returns where a column's byte lies, and where its code begins in it, as int32."""
        at = column % self.length * self.depth + element
        return at, (column // self.length * self.bits).to(I32)


@dataclass(frozen=True)
class PaperColumns(ColumnSource):
    """Packed kernel weights in the paper's format, unpacked in registers."""

    weights: PaperWeights

    def load(self, column: Value, element: Value) -> list[Value]:
        of = self.weights
        scales, minima = (bfloat16_halves(side) for side in of.factors(column, element))
        at, shift = of.place(column, element)
        lines = []
        for stored in load_lines(of.codes, at, of.depth, STEP):
            words, halves = stored.bits(I16).to(I32, is_signed=False), []
            for half, byte in enumerate((0, 8)):
                code = words >> (shift + byte).spread(LANES) & (1 << of.bits) - 1
                halves.append(code.to(F32) * scales[half] + minima[half])
            lines.append(bfloat16_words(*halves))
        return lines


def take_rows(rows: Array, pitch: Value, count: Value, steps: Value, panel: Array) -> None:
    """Copies `steps` steps of `count` rows, at most `PAIR`, into the tiles of a panel,
    [step][2][16][32]."""
    with count.k.loop(count) as row, count.k.loop(steps) as step:
        words = rows.at(row * pitch + step * STEP).of(I32).load(0, LANES)
        store_step(panel, row * STEP + step * (2 * TILE), words)


def give_rows(
    operands: Operands,
    sums: Array,
    place: tuple[Value, Value],
    shape: tuple[Value, Value | int],
    is_aligned: Value,
) -> None:
    """Writes sums, fp32 [pair][2][2][16][16], plus the bias. place: the first row and column;
    shape: rows, and pairs of tiles of columns; is_aligned: whether out's lines begin with cache
    lines, so that they are written past the caches."""
    k, (first_row, first_column) = operands.k, place
    with k.loop(shape[0]) as row:
        line = sums.at(row // LANES * (2 * SQUARE) + row % LANES * LANES)
        with k.loop(shape[1]) as pair:
            column, halves = first_column + pair * PAIR, []
            for j in range(2):
                total = line.load(pair * PAIR_SUMS + j * SQUARE, LANES)
                total = total + operands.bias.load(column + j * LANES, LANES)
                halves.append(total if operands.out.scalar == F32 else to_bfloat16(total))
            results = halves[0].joined(halves[1])
            target = (first_row + row) * operands.columns + column
            with k.either(is_aligned) as (then, otherwise):
                with then:
                    operands.out.store(target, results, is_streamed=True)
                with otherwise:
                    operands.out.store(target, results)


@dataclass(frozen=True)
class PanelStep:
    """A product of a panel of up to `PAIR` rows and `PAIR` columns, over some steps."""

    panel: Array
    packed: Array
    sums: Array
    """[2][2][16][16], to which the product is added."""
    adds: Value
    """Whether the sums begin with what they are; else with 0."""
    steps: Value
    count: Value
    """Rows of the panel."""
    next_sums: Array
    """Sums to prefetch into the first cache meanwhile."""
    next_rows: Array
    """Rows to prefetch into the second cache meanwhile, `pitch` apart."""
    pitch: Value

    def prefetch_row(self, row: Value | int, step: Value) -> None:
        place = self.steps.k.index(row) * self.pitch + step * STEP
        self.next_rows.prefetch(place, SECOND_CACHE)

    def prefetch_sums(self, line: Value) -> None:
        self.next_sums.prefetch(line * LANES, FIRST_CACHE)


class TileUnit:
    """A unit that multiplies tiles, from `__init__` until `release`.

    has_integers: whether tiles hold int8, two in place of a bfloat16, and sums are int32.
    """

    scalar: Scalar = I16
    """Type of the tiles' elements."""

    def __init__(self, k: Function, has_integers: bool = False) -> None:
        self.k, self.has_integers = k, has_integers

    @property
    def sum_lines(self) -> int:
        """Cache lines of sums that are prefetched in a step: in all steps all of a pair's."""
        return 4 if self.has_integers else 8

    def for_pairs(self) -> Self:
        """Returns the same unit for tiles of bfloat16."""
        unit = copy(self)
        unit.has_integers = False
        return unit

    def multiply(self, of: PanelStep) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Releases the unit's state."""

    def begun_sums(self, of: PanelStep, places: list[Array]) -> list[Variable]:
        """Returns the sums, which stay in registers."""
        zero = self.k.filled(I32 if self.has_integers else F32, LANES)
        sums = [self.k.variable(zero) for _ in places]
        with self.k.when(of.adds):
            for total, place in zip(sums, places, strict=True):
                total.set(place.load(0, LANES))
        return sums


class Amx(TileUnit):
    """Intel's AMX, whose registers hold tiles."""

    def __init__(self, k: Function, has_integers: bool = False) -> None:
        super().__init__(k, has_integers)
        self._registers = TileRegisters(k)

    def release(self) -> None:
        self._registers.release()

    def multiply(self, of: PanelStep) -> None:
        k, tiles = self.k, self._registers
        places = [of.sums.at(register * SQUARE).of(I8) for register in SUMS]
        with k.either(of.adds) as (then, otherwise):
            with then:
                for register, place in zip(SUMS, places, strict=True):
                    tiles.load(register, place)
            with otherwise:
                for register in SUMS:
                    tiles.zero(register)
        with k.loop(of.steps) as step:
            left, right = (side.at(step * (2 * TILE)) for side in (of.panel, of.packed))
            for row in range(ROWS_AHEAD):
                of.prefetch_row(row, step)
            for line in range(self.sum_lines):
                of.prefetch_sums(step * self.sum_lines + line)
            for j in range(2):
                tiles.load(RIGHT[j], right.at(j * TILE))
            for i in range(2):
                tiles.load(LEFT[i], left.at(i * TILE))
                for j in range(2):
                    register = SUMS[2 * i + j]
                    tiles.multiply(register, LEFT[i], RIGHT[j], has_integers=self.has_integers)
        for register, place in zip(SUMS, places, strict=True):
            tiles.store(register, place)


class VectorUnit(TileUnit):
    """Vectors, whose registers hold sums of some rows and columns."""

    def sides(self) -> tuple[int, int]:
        """Returns tiles of columns, and rows, multiplied at a time."""
        raise NotImplementedError

    def multiply(self, of: PanelStep) -> None:
        k, (wide, many) = self.k, self.sides()
        lines = self.sum_lines * many // PAIR
        kind = I32 if self.has_integers else F32
        with k.loop((of.count + (many - 1)) // many) as group:
            in_tile = LANES // many
            first = of.sums.of(kind).at(
                group // in_tile * (2 * SQUARE) + group % in_tile * (many * LANES)
            )
            for tile in range(0, 2, wide):
                pairs = [(row, j) for row in range(many) for j in range(tile, tile + wide)]
                places = [first.at(j * SQUARE + row * LANES) for row, j in pairs]
                sums = self.begun_sums(of, places)
                with k.loop(of.steps) as step:
                    if tile == 0:
                        of.prefetch_row(group, step)
                        for line in range(lines):
                            of.prefetch_sums(step * self.sum_lines + group * lines + line)
                    left = of.panel.at(step * (2 * TILE) + group * (many * STEP))
                    right = of.packed.at(step * (2 * TILE) + tile * TILE)
                    self.add_step(left, right, sums)
                for total, place in zip(sums, places, strict=True):
                    place.store(0, total.get())

    def add_step(self, left: Array, right: Array, sums: list[Variable]) -> None:
        """Adds a step's products."""
        raise NotImplementedError


class Avx512(VectorUnit):
    """Dot products of pairs of bfloat16, or of four integers."""

    def sides(self) -> tuple[int, int]:
        return AVX512_SIDES

    def add_step(self, left: Array, right: Array, sums: list[Variable]) -> None:
        wide, many = self.sides()
        for word in range(LANES):
            lines = [right.at(j * TILE + word * STEP).of(I32) for j in range(wide)]
            columns = [line.load(0, LANES) for line in lines]
            for row in range(many):
                spread = left.at(row * STEP + 2 * word).of(I32).load(0).spread(LANES)
                for j, column in enumerate(columns):
                    total = sums[row * wide + j]
                    dot = dot_bytes if self.has_integers else dot_pairs
                    total.set(dot(total.get(), column, spread))


class Floats(VectorUnit):
    """Products of fp32, whose tiles have a step's even elements before its odd ones."""

    scalar = F32

    def sides(self) -> tuple[int, int]:
        return WIDE_FLOAT_SIDES if self.k.processor.has_wide_vectors else FLOAT_SIDES

    def add_step(self, left: Array, right: Array, sums: list[Variable]) -> None:
        wide, many = self.sides()
        for element in range(STEP):
            columns = [right.load(j * TILE + element * LANES, LANES) for j in range(wide)]
            for row in range(many):
                factor = left.load(row * STEP + element // 2 + element % 2 * LANES)
                for j, column in enumerate(columns):
                    total = sums[row * wide + j]
                    total.set(self.k.fma(column, factor, total.get()))


UNITS: dict[str, type[TileUnit]] = {"amx": Amx, "avx512": Avx512, "fma": Floats}
