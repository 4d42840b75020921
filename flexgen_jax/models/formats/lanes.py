"""The order of codes in lanes: the bytes of 16 groups lie side by side, for vectors of bytes.
Arrays are NumPy's or JAX's; neither of both here.

A lane of a vector belongs to a group, so products add up in registers for a whole group, and scales
are vectors. A row is divided into blocks of 16 lanes and, where 8 groups remain, one of 8. A lane
has `unit` elements: 32, or 16 where groups are no multiples of 32. With 8 bits, line j of a block
has the elements 4j to 4j + 3 of every lane,

    g0[4j] g0[4j + 1] g0[4j + 2] g0[4j + 3]  g1[4j] ...  g15[4j + 3]

With 4 bits, byte b of a lane in line j has the codes of two elements: 8j + b in its low half, and
8j + 4 + b in its high half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flexgen_jax.models.formats.format import Format
from flexgen_jax.models.formats.storage import Storage

LANES = 16
BYTES = 4
"""Bytes of a lane in a line."""

Join = Callable[..., Any]
"""np.concatenate or jnp.concatenate."""


def lane_elements(packing: Format, length: int) -> int:
    """Returns the elements of a lane, for rows of `length` elements."""
    return 32 if (packing.group or length) % 32 == 0 else 16


def lane_blocks(length: int, unit: int) -> list[tuple[int, int, int]]:
    """Returns blocks of lanes: the first element, lanes of a block, and the number of blocks."""
    whole = length // (LANES * unit)
    blocks = [(0, LANES, whole)] if whole else []
    if length % (LANES * unit):
        blocks.append((whole * LANES * unit, LANES // 2, 1))
    return blocks


@lru_cache(maxsize=1024)  # tensors have few different shapes
def in_lanes(storage: Storage) -> Storage:
    """Returns how a matrix of bfloat16 is kept with its codes in lanes; as before where that does
    not fit."""
    packing, is_matrix = storage.format, len(storage.shape) == 2
    if packing is None or not is_matrix or packing.axis != -1 or storage.dtype != "bfloat16":
        return storage
    fits = packing.levels == "integers" and packing.bits in (4, 8) and not packing.in_lanes
    unit = lane_elements(packing, storage.length)
    if not fits or (packing.group or unit) % unit or storage.length % (LANES // 2 * unit):
        return storage
    return replace(storage, format=replace(packing, in_lanes=True))


def packed_in_lanes(codes: Any, storage: Storage, join: Join) -> Any:
    """Returns the bytes of codes, uint8 [row, element]."""
    unit = lane_elements(storage.packing, storage.length)
    pieces = []
    for first, lanes, count in lane_blocks(storage.length, unit):
        part = codes[:, first : first + lanes * unit * count]
        if storage.bits == 8:
            lines = part.reshape(-1, count, lanes, unit // BYTES, BYTES)
        else:
            halves = part.reshape(-1, count, lanes, unit // (2 * BYTES), 2, BYTES)
            lines = halves[..., 0, :] | halves[..., 1, :] << 4
        pieces.append(lines.transpose(0, 1, 3, 2, 4).reshape(codes.shape[0], -1))
    return join(pieces, axis=1) if len(pieces) > 1 else pieces[0]


def unpacked_from_lanes(packed: Any, storage: Storage, join: Join) -> Any:
    """Returns codes, uint8 [row, element], from their bytes."""
    unit, bits = lane_elements(storage.packing, storage.length), storage.bits
    pieces, rows = [], packed.shape[0]
    for first, lanes, count in lane_blocks(storage.length, unit):
        part = packed[:, first * bits // 8 : (first + lanes * unit * count) * bits // 8]
        lines = part.reshape(rows, count, unit * bits // 8 // BYTES, lanes, BYTES)
        lines = lines.transpose(0, 1, 3, 2, 4)
        if bits == 4:
            halves = [lines[..., None, :] & 15, lines[..., None, :] >> 4]
            lines = join(halves, axis=-2)
        pieces.append(lines.reshape(rows, -1))
    return join(pieces, axis=1) if len(pieces) > 1 else pieces[0]
