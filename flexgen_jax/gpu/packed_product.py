"""Products of a few rows with weights of 4 or 8 bits, which are read once and never written.

With the code c of each weight, the scale s and the minimum m of its group,

    y  =  sum over groups ( s * sum(c x)  +  m * sum(x) ).

A code becomes fp32 by one operation: put into the highest bits of the mantissa of a power of two,
it is added to that. With 4 bits, 0x43000000 | c << 16 is 128 + c, so that `sum((128 + c) x)` is
found, from which `128 sum(x)` is subtracted once for the group.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from flexgen_jax.gpu.triton import NARROW, call
from flexgen_jax.layers.levels import number_of
from flexgen_jax.layers.quantization import QuantizedArray
from flexgen_jax.models.formats.format import Factor, Format

MOST_ROWS = 4
"""Rows that are multiplied one after the other; for more, XLA unpacks the weights."""

OUTPUTS = 4
"""Rows of the kernel, which are outputs, of a place of the grid: one warp, which need not wait for
others."""

LARGEST_TILE = 512
"""Bytes of codes in a row of a tile."""

BASES = {4: (0x43000000, 16, 128.0), 8: (0x43800000, 15, 256.0)}
"""By bits of a code: a power of two, how far a code is shifted into its mantissa, and its value."""

AND_OR = 0xEA
"""The table of (a & b) | c for `lop3`, PTX's operation of logic on three registers."""


class Shape(NamedTuple):
    """What a kernel is made for: elements of a plane and of a tile's row, and the format."""

    plane: int
    tile: int
    packing: Format

    @property
    def groups(self) -> int:
        """Groups of a tile's row."""
        return self.tile // self.packing.group

    @property
    def factors(self) -> dict[str, Factor]:
        """The factors that there are, by name."""
        packing = self.packing
        named = {"scale": packing.scale, "minimum": packing.minimum, "zero": packing.zero}
        return {name: factor for name, factor in named.items() if factor is not None}

    @property
    def units(self) -> list[str]:
        """The factors that count in units of their row."""
        return [name for name, factor in self.factors.items() if factor.of is not None]


def can_multiply(rows: jax.Array, kernel: QuantizedArray) -> bool:
    """Returns whether the kernel takes these rows, [n, in], and this matrix."""
    storage, packing = kernel.storage, kernel.storage.packing
    if rows.dtype not in NARROW or rows.shape[0] > MOST_ROWS:
        return False
    if storage.axis != 1 or packing.levels != "integers":
        return False
    if packing.bits not in BASES or storage.shape[0] % OUTPUTS:
        return False
    shape = _shape_of(kernel)
    is_whole = shape.plane * packing.planes == storage.length
    is_whole = is_whole and "zero" not in shape.units
    return is_whole and shape.tile > 0 and all(map(_is_simple, shape.factors.values()))


def _is_simple(factor: Factor) -> bool:
    """Returns whether a factor is a number for each group of a row, perhaps in units of the row."""
    unit = factor.of
    is_of_row = unit is None or (unit.group == 0 and unit.rows == 1 and unit.of is None)
    return factor.dtype != "codes" and factor.rows == 1 and factor.group > 0 and is_of_row


def _shape_of(kernel: QuantizedArray) -> Shape:
    storage, packing = kernel.storage, kernel.storage.packing
    return Shape(storage.plane_length, _tile(storage.plane_length, packing), packing)


def _tile(plane: int, packing: Format) -> int:
    """Returns the elements of a tile's row: the most, in whole groups, that divide a plane; 0 if
    there are none."""
    group = packing.group
    factors = [factor for factor in (packing.minimum, packing.zero) if factor is not None]
    if not group or group & (group - 1) or any(factor.group != group for factor in factors):
        return 0
    tile = LARGEST_TILE
    while tile >= group and plane % tile:
        tile //= 2
    return tile if tile >= group else 0


def multiply(rows: jax.Array, kernel: QuantizedArray, interprets: bool = False) -> jax.Array:
    """Returns rows [n, in] @ kernel [out, in].T, fp32 [n, out]."""
    shape, count, outputs = _shape_of(kernel), rows.shape[0], kernel.shape[0]
    if shape.packing.has_order:
        rows = jnp.take(rows, kernel.leaf("order"), axis=1)
    wide = rows.astype(jnp.float32)
    sums = wide.reshape(count, -1, shape.packing.group).sum(2)
    leaves = [kernel.packed, *(kernel.leaf(name) for name in shape.factors)]
    leaves += [kernel.leaf(f"{name}_of") for name in shape.units]
    inputs = [(array, pl.BlockSpec(array.shape, lambda n: (0, 0))) for array in (wide, sums)]
    inputs += [(x, pl.BlockSpec((OUTPUTS, x.shape[1]), lambda n: (n, 0))) for x in leaves]
    product = jax.ShapeDtypeStruct((count, outputs), jnp.float32)
    (out,) = call(
        partial(_kernel, shape=shape, interprets=interprets),
        grid=(outputs // OUTPUTS,),
        inputs=inputs,
        outputs=[(product, pl.BlockSpec((count, OUTPUTS), lambda n: (0, n)))],
        warps=1,
        stages=3,
        interprets=interprets,
    )
    result: jax.Array = out
    return result


def _kernel(
    rows_ref: Any, sums_ref: Any, codes_ref: Any, *refs: Any, shape: Shape, interprets: bool
) -> None:
    """Multiplies all rows by some rows of the kernel; refs: their factors and units by name, and
    the output."""
    *leaves, out_ref = refs
    factors = dict(zip(shape.factors, leaves, strict=False))
    units = dict(zip(shape.units, leaves[len(factors) :], strict=True))
    zeros = jnp.zeros((OUTPUTS, shape.groups), jnp.float32)
    count, planes = rows_ref.shape[0], shape.packing.planes

    def add(tile: jax.Array, sums: list[tuple[jax.Array, jax.Array]]) -> Any:
        codes = codes_ref[:, pl.ds(tile * shape.tile, shape.tile)]
        for plane in range(planes):
            at = plane * shape.plane + tile * shape.tile
            level = _levels(codes, plane, shape.packing, interprets)
            group = at // shape.packing.group
            here = (slice(None), pl.ds(group, shape.groups))
            of_group = {
                name: _factor(factors[name][here], factor) for name, factor in shape.factors.items()
            }
            for row in range(count):
                x = rows_ref[row, pl.ds(at, shape.tile)]
                total = sums_ref[row, pl.ds(group, shape.groups)][None, :]
                parts = (level * x[None, :]).reshape(OUTPUTS, shape.groups, -1).sum(2)
                parts = parts - _offset(shape, of_group) * total
                scaled, least = sums[row]
                scaled = scaled + parts * of_group["scale"]
                if "minimum" in of_group:
                    least = least + of_group["minimum"] * total
                sums[row] = (scaled, least)
        return sums

    sums = jax.lax.fori_loop(0, shape.plane // shape.tile, add, [(zeros, zeros)] * count)
    for row, (scaled, least) in enumerate(sums):
        out = _in_units(scaled.sum(1), "scale", units, shape)
        if "minimum" in factors:
            more = _in_units(least.sum(1), "minimum", units, shape)
            out = out - more if shape.packing.subtracts else out + more
        out_ref[row, :] = out


def _levels(codes: jax.Array, plane: int, packing: Format, interprets: bool) -> jax.Array:
    """Returns the codes of a plane in fp32, each added to the format's power of two; codes: uint8.

    A GPU takes four of them in a register: a shift brings one to its place in the mantissa, and one
    operation of logic leaves it there alone and adds the exponent.
    """
    bits = packing.bits
    power, place, _ = BASES[bits]
    mask = ((1 << bits) - 1) << place
    if interprets:
        code = (codes.astype(jnp.int32) >> (bits * plane)) << place
        return jax.lax.bitcast_convert_type((code & mask) | power, jnp.float32)
    lines = []
    for byte in range(4):
        shift = place - (8 * byte + bits * plane)
        moved = "shl.b32 t, $4, " if shift > 0 else "shr.u32 t, $4, "
        lines.append(f"{moved}{abs(shift)}; lop3.b32 ${byte}, t, {mask}, {power}, {AND_OR};")
    (levels,) = triton.elementwise_inline_asm(
        "{ .reg .b32 t; " + " ".join(lines) + " }",
        args=[codes],
        constraints="=f,=f,=f,=f,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float32)],
    )
    return levels


def _offset(shape: Shape, of_group: dict[str, jax.Array]) -> jax.Array | float:
    """Returns what is subtracted from the levels of a group."""
    offset = BASES[shape.packing.bits][2] + shape.packing.center
    return offset + of_group["zero"] if "zero" in of_group else offset


def _factor(stored: jax.Array, factor: Factor) -> jax.Array:
    """Returns factors of groups, fp32, in units of their row."""
    numbers = number_of(stored, factor.dtype)
    return numbers - factor.center if factor.center else numbers


def _in_units(sums: jax.Array, name: str, units: dict[str, Any], shape: Shape) -> jax.Array:
    """Returns sums of outputs, [out], times the unit of each of them, if there is one."""
    unit = shape.factors[name].of
    if unit is None:
        return sums
    return sums * _factor(units[name][...], unit)[:, 0]
