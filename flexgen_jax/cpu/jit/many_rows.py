"""Products of many rows with kernel weights, by the units of `tiles`.

XLA's CPU backend reaches only a part of what these units can do. Here some columns of the kernel
weights at a time are turned into tiles that stay in the core's second cache, unpacked on the way if
need be. The rows pass by, `PAIR` at a time, while the next ones are prefetched. Results get their
bias and are rounded on the way out, past the caches, which saves one more pass in fp32.

A thread's own memory is 1 MiB of tiles and, where depth is over `DEPTH`, the sums of 512 columns of
the result. That is less than the fp32 product that it replaces, which `workspace_bytes` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexgen_jax.cpu.jit.emit import F32, ITEM_BYTES, LINE_BYTES, Array, Value
from flexgen_jax.cpu.jit.operands import PAIR, STEP, Operands
from flexgen_jax.cpu.jit.tiles import (
    PAIR_SUMS,
    ColumnSource,
    PanelStep,
    TileUnit,
    give_rows,
    take_rows,
)

COLUMNS, DEPTH, CHUNK = 512, 1024, 256
"""Sizes of the part of the kernel weights that stays in the second cache, 1 MiB: columns of the
result, and elements of their sums (half of the one and twice of the other where there are fewer
columns); and how many elements are summed while a panel of the rows is in the first cache. All are
of 16 bits."""


@dataclass(frozen=True)
class ColumnTile:
    """Some columns of the kernel weights as tiles, and the panels of rows that pass by."""

    unit: TileUnit
    packed: Array
    panel: Array
    sums: Array
    """[pair of columns][2][2][16][16], of one panel or of all."""
    chunk_steps: int
    """Steps that are summed while a panel is in the first cache."""
    rows: Array
    """Numbers of 16 bits, `pitch` apart."""
    pitch: Value
    sizes: TileSizes

    def multiply(
        self,
        source: ColumnSource,
        first: Value,
        counts: tuple[Value, Value],
        apart: Value,
        finish: Callable[[Value, Array], None],
    ) -> None:
        """Multiplies all rows by some columns.

        first: the first column; counts: rows, and pairs of columns; apart: between the sums of
        panels, 0 if all use the same memory; finish: emits what follows for a panel, by its first
        row and its sums.
        """
        k, height = first.k, self.sizes.height
        with k.loop(self.pitch, step=height) as top:
            steps = (self.pitch - top).minimum(height) // STEP
            shape = TileShape(*counts, steps)
            with k.loop(shape.pairs) as pair:
                packed = self.packed.at(pair * steps * (PAIR * STEP))
                source.take(first + pair * PAIR, top * (source.elements // STEP), steps, packed)
            with k.loop(shape.count, step=PAIR) as row:
                at = row // PAIR * apart
                own = self.sums.at(at)
                self.add_panel(row, top, shape, own, self.sums.at(at + apart))
                with k.when(top + height >= self.pitch):
                    finish(row, own)

    def add_panel(
        self, row: Value, top: Value, shape: TileShape, sums: Array, next_panel: Array
    ) -> None:
        """Adds the product of a panel of rows to sums. row, top: the first row and element;
        next_panel: the sums that come next."""
        k = row.k
        count = (shape.count - row).minimum(PAIR)
        with k.loop(shape.steps, step=self.chunk_steps) as step:
            now = (shape.steps - step).minimum(self.chunk_steps)
            source = self.rows.at(row * self.pitch + top + step * STEP)
            take_rows(source, self.pitch, count, now, self.panel)
            is_last = (step + now).equals(shape.steps)
            next_row = is_last.select(row + PAIR, row)
            next_step = is_last.select(k.index(0), step + now)
            after = Array(k, k.build.select(is_last.ir, next_panel.ir, sums.ir), F32)
            with k.loop(shape.pairs) as pair:
                is_inside = pair + 1 < shape.pairs
                here = sums.at(pair * PAIR_SUMS)
                next_sums = k.build.select(is_inside.ir, here.at(PAIR_SUMS).ir, after.ir)
                later = next_row + pair * PAIR // shape.pairs
                self.unit.multiply(
                    PanelStep(
                        panel=self.panel,
                        packed=self.packed.at((pair * shape.steps + step) * (PAIR * STEP)),
                        sums=here,
                        adds=top + step > 0,
                        steps=now,
                        count=count,
                        next_sums=Array(k, next_sums, F32),
                        next_rows=self.rows.at(later * self.pitch + top + next_step * STEP),
                        pitch=self.pitch,
                    )
                )


@dataclass(frozen=True)
class TileShape:
    """Rows of a product; pairs of tiles of columns; steps of a column tile."""

    count: Value
    pairs: Value
    steps: Value


@dataclass(frozen=True)
class TileSizes:
    """Sizes of a column tile, for a range of columns."""

    width: Value
    """Columns."""
    height: Value
    """Elements of a column."""

    @property
    def panel_sums(self) -> Value:
        """Sums of a panel of rows."""
        return self.width // PAIR * PAIR_SUMS

    @classmethod
    def of(cls, limits: tuple[Value, Value], item_bytes: int) -> TileSizes:
        """Chooses the sizes, by the bytes of a tile's elements."""
        k = limits[0].k
        if item_bytes == 4:
            width = k.index(COLUMNS // 2)
        else:
            width = (limits[1] - limits[0] >= COLUMNS).select(k.index(COLUMNS), COLUMNS // 2)
        return cls(width, k.index(COLUMNS * DEPTH * 2 // item_bytes) // width // (item_bytes // 2))


def emit_many_rows(
    operands: Operands, source: ColumnSource, unit_type: type[TileUnit], limits: tuple[Value, Value]
) -> None:
    """Computes a range of columns; its limits are multiples of `PAIR`."""
    k, depth, scalar = operands.k, operands.depth, unit_type.scalar
    item_bytes = ITEM_BYTES[str(scalar)]
    sizes, chunk_steps = TileSizes.of(limits, item_bytes), CHUNK * 2 // item_bytes // STEP
    is_deep = depth > sizes.height
    panels = is_deep.select(operands.turns(PAIR), k.index(1))
    with k.workspace(
        (scalar, sizes.width * depth.minimum(sizes.height)),
        (scalar, PAIR * STEP * chunk_steps),
        (F32, panels * sizes.panel_sums),
    ) as (packed, panel, sums):
        panel.fill(k.index(PAIR * STEP * chunk_steps))
        unit = unit_type(k)
        tile = ColumnTile(unit, packed, panel, sums, chunk_steps, operands.rows, depth, sizes)
        is_aligned = (operands.out.address() % LINE_BYTES).equals(0)
        apart = is_deep.select(sizes.panel_sums, 0)
        with k.loop(limits[1], limits[0], sizes.width) as first:
            pairs = (limits[1] - first).minimum(sizes.width) // PAIR

            def give(row: Value, own: Array) -> None:
                some = (operands.count - row).minimum(PAIR)
                give_rows(operands, own, (row, first), (some, pairs), is_aligned)

            tile.multiply(source, first, (operands.count, pairs), apart, give)
        unit.release()
