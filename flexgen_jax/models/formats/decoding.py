"""Decoding of stored leaves in NumPy, for tensors that are not kept in few bits, and the order of
codes for a CPU. On the device, `layers/quantization.py` decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from flexgen_jax.models.formats.format import Factor, Format, plane_length
from flexgen_jax.models.formats.lanes import packed_in_lanes, unpacked_from_lanes
from flexgen_jax.models.formats.levels import E2M1, NF4
from flexgen_jax.models.formats.storage import Storage


def decoded(leaves: Sequence[np.ndarray], storage: Storage) -> np.ndarray:
    """Returns the matrix, fp32 [row, element], that is kept by leaves; storage: of a format that is
    grouped along the last axis."""
    packing, (rows, length) = storage.packing, storage.shape
    named = {leaf.name: array for leaf, array in zip(storage.leaves, leaves, strict=True)}
    numbers = _levels(_codes("packed", named, packing, length), packing)
    zero, scale, minimum = (
        None if factor is None else _spread(name, named, factor, rows, length)
        for name, factor in (
            ("zero", packing.zero),
            ("scale", packing.scale),
            ("minimum", packing.minimum),
        )
    )
    numbers -= np.float32(packing.center)
    if zero is not None:
        numbers -= zero
    numbers *= scale
    if minimum is not None:
        numbers += -minimum if packing.subtracts else minimum
    if packing.has_order:
        numbers = numbers[:, np.argsort(named["order"])]
    return numbers


def _codes(
    name: str, named: Mapping[str, np.ndarray], packing: Format, length: int, group: int = 0
) -> np.ndarray:
    """Returns codes, uint8 [row, length], from their parts."""
    if packing.in_lanes:
        packed = named["packed_lanes"]
        storage = Storage((len(packed), length), "float32", packing)
        codes: np.ndarray = unpacked_from_lanes(packed, storage, np.concatenate)
        return codes
    plane_size = plane_length(length, packing.planes, packing.group if name == "packed" else group)
    total, offset = None, 0
    for number, width in enumerate(packing.widths):
        plane = named[name + "_high" * number]
        planes = [(plane >> (width * n)) & ((1 << width) - 1) for n in range(8 // width)]
        codes = np.concatenate(planes, axis=1)[:, : plane_size * packing.planes]
        total = codes if total is None else total | (codes << offset)
        offset += width
    assert total is not None
    return total[:, :length]


def _levels(codes: np.ndarray, packing: Format) -> np.ndarray:
    if packing.levels == "integers":
        return codes.astype(np.float32)
    if packing.levels in ("e2m1", "nf4"):
        table: np.ndarray = np.array(E2M1 if packing.levels == "e2m1" else NF4, np.float32)
        level_values: np.ndarray = table[codes]
        return level_values
    float8 = ml_dtypes.float8_e4m3fn if packing.levels == "e4m3" else ml_dtypes.float8_e5m2
    floats: np.ndarray = codes.view(float8).astype(np.float32)
    return floats


def _spread(
    name: str, named: Mapping[str, np.ndarray], factor: Factor, rows: int, length: int
) -> np.ndarray:
    """Returns a factor of each element, fp32, of a shape that broadcasts to [rows, length]."""
    numbers = _numbers(name, named, factor, length)
    if factor.of is not None:
        unit = _spread(f"{name}_of", named, factor.of, rows, length)
        if factor.of.group:
            unit = unit[:, :: factor.group]
        numbers = numbers * unit
    if factor.rows > 1:
        numbers = np.repeat(numbers, factor.rows, axis=0)[:rows]
    return np.repeat(numbers, factor.group, axis=1)[:, :length] if factor.group else numbers


def _numbers(name: str, named: Mapping[str, np.ndarray], factor: Factor, length: int) -> np.ndarray:
    if factor.dtype == "codes":
        packing = Format(factor.bits, Factor("uint8", 0))
        numbers = _codes(name, named, packing, factor.count(length)).astype(np.float32)
    elif factor.dtype == "e8m0":
        numbers = np.ldexp(np.float32(1), named[name].astype(np.int32) - 127)
    elif factor.dtype == "e4m3":
        numbers = named[name].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        numbers = named[name].astype(np.float32)
    return numbers - np.float32(factor.center)


def planes_to_lanes(packed: np.ndarray, storage: Storage) -> np.ndarray:
    """Returns bytes in lanes from those in planes. storage: in lanes, of the same shape."""
    if storage.bits == 4:
        packed = np.concatenate([packed & 15, packed >> 4], axis=1)
    lanes: np.ndarray = packed_in_lanes(packed[:, : storage.length], storage, np.concatenate)
    return lanes


def leaves_in_lanes(leaves: Sequence[np.ndarray], storage: Storage) -> list[np.ndarray]:
    """Returns the leaves of a matrix for storage in lanes, from those in planes."""
    if not storage.packing.in_lanes:
        return [*leaves]
    return [planes_to_lanes(np.asarray(leaves[0]), storage), *leaves[1:]]
