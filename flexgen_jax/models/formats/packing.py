"""Codes of published files, unpacked and packed again as this package keeps them, in NumPy."""

from __future__ import annotations

import numpy as np

from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.storage import Storage


def unpack_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the codes, uint8 [row, element], of rows of words (32 bits), each row being one row
    of bits, the lowest first; so codes of 3, 5 and 6 bits cross the words' ends."""
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        shifted = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts
        codes: np.ndarray = (shifted & ((1 << bits) - 1)).astype(np.uint8)
        return codes.reshape(len(words), -1)
    stored = np.ascontiguousarray(words).view(np.uint8)
    columns = words.shape[1] * 32 // bits
    each = np.unpackbits(stored, axis=1, bitorder="little", count=columns * bits)
    padded = np.zeros((len(words), columns, 8), np.uint8)
    padded[:, :, :bits] = each.reshape(len(words), columns, bits)
    return np.packbits(padded, axis=2, bitorder="little")[:, :, 0]


def unpack_nibbles(stored: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Returns the codes of 4 bits, uint8 [..., 2 n], in bytes [..., n]."""
    halves = (stored & 15, stored >> 4)
    pairs = np.stack(halves[::-1] if high_first else halves, axis=-1)
    return pairs.reshape(*stored.shape[:-1], -1)


def packed_parts(codes: np.ndarray, packing: Format | Factor) -> list[np.ndarray]:
    """Returns the stored parts of codes, uint8 [row, element], of a format that is grouped along
    the last axis, or of a factor."""
    count = codes.shape[1]
    code_format = (
        packing if isinstance(packing, Format) else Format(packing.bits, Factor("uint8", 0))
    )
    packed_planes, offset = [], 0
    for width, length in Storage(codes.shape, "float32", code_format).parts(count, packing):
        planes = 8 // width
        bits = (codes >> offset) & ((1 << width) - 1) if width < 8 else codes
        padded = np.zeros((codes.shape[0], length * planes), np.uint8)
        padded[:, :count] = bits
        plane = padded[:, :length].copy()
        for index in range(1, planes):
            plane |= padded[:, index * length : (index + 1) * length] << (width * index)
        packed_planes.append(plane)
        offset += width
    return packed_planes


def order_of(group_of: np.ndarray, group: int) -> np.ndarray | None:
    """Returns the elements by their groups, int32 [element], if they are not in this order already.

    group_of: the number of each element's group. Raises `ValueError` if a group has too many.
    """
    count = group_of.size
    if np.array_equal(group_of, np.arange(count) // group):
        return None
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if not np.array_equal(group_of[order], np.arange(count) // group):
        raise ValueError(f"its g_idx does not have {group} elements per group")
    return order
