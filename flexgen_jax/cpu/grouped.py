"""Which formats of kernel weights that are grouped along their input the generated code takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.lanes import LANES, lane_elements
from flexgen_jax.models.formats.storage import Storage

STEP = 32
"""Elements that are multiplied at a time: planes of codes must be multiples of it, and groups of it
or of half of it."""

FLOATS = ("float32", "bfloat16", "float16", "e8m0")
"""Dtypes of scales that say what they are without another number."""

LEVELS = ("integers", "e2m1", "nf4", "e4m3")

_UNIT = Factor("float16", 256)

BLOCKS = {
    (Factor("codes", 32, bits=6, of=_UNIT), True): "sixes",
    (Factor("codes", 16, bits=6, center=32, of=_UNIT), False): "signed_sixes",
    (Factor("codes", 16, bits=4, of=_UNIT), True): "fours",
    (Factor("int8", 16, of=_UNIT), False): "bytes",
}
"""Kinds of scales that are integers in units of blocks of 256 elements, with and without minima
of the same format."""

Rounding = Literal["", "pairs", "fours"]
"""How rows are rounded to 8-bit integers: not at all, or for a processor that adds up products of
two bytes, or of four."""


@dataclass(frozen=True)
class Grouping:
    """A format as the generated code knows it.

    levels: what codes stand for; factors: the kind of scales and offsets, see
    `jit.grouped_factors`; dtype: of floats; unit: elements for which factors are laid out, `STEP`
    or half of it; repeats: groups have this many times as many; rows: rows that share their scales,
    0 if all do; has_minimum: whether there are minima; center: the code that stands for zero;
    in_lanes: whether codes lie in lanes, see `models/formats/lanes.py`, and has_half_block: whether
    a row ends with half a block of them; kinds: the dtypes of the leaves other than the codes.
    """

    bits: int
    levels: str
    factors: str
    dtype: str
    unit: int
    repeats: int
    rows: int
    has_minimum: bool
    center: int
    in_lanes: bool
    has_half_block: bool
    kinds: tuple[str, ...]

    def has_integer_tiles(self, rounding: Rounding) -> bool:
        """Returns whether any number of rows can be rounded so; else few can. Sums of 16 products
        of 8-bit codes would not fit into 16 bits, as sums of pairs must."""
        if not rounding or (self.levels, self.unit) != ("integers", STEP):
            return False
        return self.bits == 4 or (rounding == "fours" and self.bits == 8 and self.in_lanes)

    @property
    def name(self) -> str:
        """A name that differs for all that differ."""
        parts: Sequence[object] = (
            self.bits,
            self.levels,
            self.factors,
            self.dtype,
            self.unit,
            self.repeats,
            self.rows,
            int(self.has_minimum),
            self.center,
            int(self.in_lanes),
            int(self.has_half_block),
        )
        return "_".join(map(str, parts))


def grouping_of(storage: Storage) -> Grouping | None:
    """Returns the format of a matrix as the generated code knows it, None if it does not."""
    packing, depth = storage.packing, storage.shape[1]
    group = packing.group or depth
    if packing.axis != -1 or packing.levels not in LEVELS:
        return None
    unit = lane_elements(packing, depth)
    plane = storage.plane_length
    if plane * storage.planes != depth or plane % STEP or group % unit or depth % group:
        return None
    kind = _kind_of(packing)
    if kind is None or (kind not in ("floats", "zeros") and group != unit):
        return None
    leaves = [
        leaf
        for leaf in storage.leaves
        if not leaf.name.startswith("packed") and leaf.name != "order"
    ]
    return Grouping(
        bits=packing.bits,
        levels=packing.levels,
        factors=kind,
        dtype=next((leaf.dtype for leaf in leaves if leaf.dtype in FLOATS), "float32"),
        unit=unit,
        repeats=group // unit,
        rows=packing.rows,
        has_minimum=packing.minimum is not None,
        center=packing.center,
        in_lanes=packing.in_lanes,
        has_half_block=packing.in_lanes and depth % (LANES * unit) > 0,
        kinds=tuple(leaf.kind for leaf in leaves),
    )


def _kind_of(packing: Format) -> str | None:
    scale, minimum, zero = packing.scale, packing.minimum, packing.zero
    if scale.rows != 1 and (packing.levels != "e4m3" or not _is_float(scale)):
        return None
    if zero is not None:
        fits = _is_float(scale) and zero.dtype == "codes" and zero.bits == packing.bits
        return "zeros" if fits and packing.bits in (2, 4, 8) else None
    if _is_float(scale):
        is_alike = minimum is not None and minimum.dtype == scale.dtype and minimum.of is None
        return "floats" if minimum is None or (is_alike and not packing.subtracts) else None
    if scale.dtype == "e4m3":
        return "small" if scale.of == Factor("float32", 0, rows=0) and minimum is None else None
    unit = Factor("bfloat16", 0)
    if (scale.dtype, scale.of) == ("uint8", unit) and minimum is not None:
        return "unit" if (minimum.dtype, minimum.of) == ("int8", unit) else None
    return _kind_in_blocks(packing)


def _kind_in_blocks(packing: Format) -> str | None:
    """Returns the kind of scales, and of minima, that are integers in units of their block."""
    scale, minimum = packing.scale, packing.minimum
    if minimum is not None and (minimum != scale or not packing.subtracts):
        return None
    return BLOCKS.get((scale, minimum is not None))


def _is_float(factor: Factor) -> bool:
    return factor.of is None and (factor.dtype in FLOATS or factor.dtype == "same")
