"""Arrays in a few bits per element: decoding of all formats, and encoding of those that are written
here.

A format is data, see `models/formats/format.py`. The formats of FlexGen, section 5, of the KV cache
and of our own weights are affine: fine-grained, asymmetric groups of consecutive elements that
share a minimum and a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers.levels import level_of, number_of
from flexgen_jax.models.formats.format import Factor, Format, affine, with_own_rows
from flexgen_jax.models.formats.lanes import packed_in_lanes, unpacked_from_lanes
from flexgen_jax.models.formats.storage import GROUP_SIZE, Storage, parameter_dtype

PACKED_BITS = (2, 4, 8)


@dataclass(frozen=True)
class QuantizedArray:
    """An array in few bits per element.

    storage: its logical shape, dtype and format; leaves: the arrays of `Storage.leaves`.
    """

    storage: Storage
    leaves: tuple[jax.Array, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.storage.shape

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.storage.dtype)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def packed(self) -> jax.Array:
        """The codes, or the lowest part of their bits."""
        return self.leaves[0]

    @property
    def scale(self) -> jax.Array:
        return self.leaf("scale")

    @property
    def minimum(self) -> jax.Array:
        return self.leaf("minimum")

    def leaf(self, name: str) -> jax.Array:
        """Returns a stored array by its name."""
        return self.leaves[[leaf.name for leaf in self.storage.leaves].index(name)]

    def rows(self, start: int, stop: int) -> QuantizedArray:
        """Returns the rows [start, stop) of a matrix that is grouped along its last axis; start: a
        multiple of `Format.rows`."""
        leaves = [
            array[start // leaf.rows : -(-stop // leaf.rows)] if leaf.rows else array
            for array, leaf in zip(self.leaves, self.storage.leaves, strict=True)
        ]
        shape = (stop - start, *self.shape[1:])
        return QuantizedArray(replace(self.storage, shape=shape), tuple(leaves))


jax.tree_util.register_dataclass(QuantizedArray, data_fields=("leaves",), meta_fields=("storage",))

Kept = jax.Array | QuantizedArray
"""A tensor in stored form, for transfers and layers: plain or quantized."""


def assemble(storage: Storage, leaves: Sequence[Any]) -> Any:
    """Returns the array with these stored leaves: a `QuantizedArray`, or the only leaf itself."""
    return leaves[0] if storage.format is None else QuantizedArray(storage, tuple(leaves))


# Encoding


def quantize(
    x: jax.Array, bits: int = 4, group_size: int = GROUP_SIZE, axis: int = -1
) -> QuantizedArray:
    """Rounds every element to the nearest of 2^bits levels between its group's extremes.

    The error is at most half the group's stored scale. Minimum and scale are rounded outwards
    to their two bytes before the codes are computed, so their rounding adds none. Infinities
    become the largest numbers (`largest_kept`); the last group may be short. Raises `ValueError`
    for bits, a group size or an axis that cannot be used.
    """
    if bits not in PACKED_BITS:
        raise ValueError(f"bits must be one of {PACKED_BITS}, not {bits}")
    if group_size < 1 or x.ndim < 1 or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"cannot group axis {axis} of shape {x.shape} by {group_size}")
    packing = affine(bits, group_size, axis % x.ndim - x.ndim)
    quantized: QuantizedArray = quantize_as(x, Storage(x.shape, str(x.dtype), packing))
    return quantized


@partial(jax.jit, static_argnames="storage")
def quantize_as(x: jax.Array, storage: Storage) -> QuantizedArray:
    """Quantizes x as `quantize` does, into an affine format of scales and minima in two bytes."""
    codes, scale, minimum = encode(x, storage)
    return QuantizedArray(storage, (*pack(codes, storage), scale, minimum))


@partial(jax.jit, static_argnames="storage")
def encode(x: jax.Array, storage: Storage) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x's codes (uint8, in x's shape, not packed), scales and minima; see `quantize`."""
    group_size, axis = storage.group_size, storage.axis
    levels = (1 << storage.bits) - 1
    parameter_type = jnp.dtype(parameter_dtype(storage.dtype))
    largest = largest_kept(x.dtype)
    low, high = (
        jnp.clip(_per_group(x, reduce, group_size, axis).astype(jnp.float32), -largest, largest)
        for reduce in (jnp.min, jnp.max)
    )
    minimum = _round_towards(low, parameter_type, -jnp.inf)
    # A product, since XLA turns a division by a constant into one while NumPy does not.
    spread = (high - minimum.astype(jnp.float32)) * jnp.float32(1 / levels)
    scale = _round_towards(spread, parameter_type, jnp.inf)
    each_minimum = _per_element(minimum.astype(jnp.float32), group_size, axis, 0, x.shape[axis])
    each_scale = _per_element(scale.astype(jnp.float32), group_size, axis, 0, x.shape[axis])
    wide = jnp.clip(x.astype(jnp.float32), -largest, largest)
    offset = (wide - each_minimum) / jnp.where(each_scale > 0, each_scale, 1.0)
    return jnp.clip(jnp.round(offset), 0, levels).astype(jnp.uint8), scale, minimum


def pack(codes: jax.Array, storage: Storage) -> list[jax.Array]:
    """Packs codes, uint8 in the array's shape, into the parts that are stored."""
    if storage.packing.in_lanes:
        return [packed_in_lanes(codes, storage, jnp.concatenate)]
    axis, parts, offset = storage.axis, [], 0
    for width, length in storage.parts(storage.length, storage.packing):
        planes = 8 // width
        part = (codes >> offset) & ((1 << width) - 1)
        part = _padded(part, length * planes, axis)
        packed = jax.lax.slice_in_dim(part, 0, length, axis=axis)
        for index in range(1, planes):
            plane = jax.lax.slice_in_dim(part, index * length, (index + 1) * length, axis=axis)
            packed = packed | (plane << (width * index))
        parts.append(packed)
        offset += width
    return parts


# Decoding


@partial(jax.jit, static_argnames="has_barrier")
def dequantize(q: QuantizedArray, has_barrier: bool = False) -> jax.Array:
    """Returns the plain array that `q` stands for; has_barrier: see `Tuning.has_barriers`."""
    plain = jnp.concatenate(parts_of(q, has_barrier), axis=q.storage.axis)
    if q.storage.packing.has_order:
        plain = jnp.take(plain, jnp.argsort(q.leaf("order")), axis=q.storage.axis)
    return plain


def plain(array: Kept) -> jax.Array:
    """Returns an array with its numbers unpacked."""
    return dequantize(array) if isinstance(array, QuantizedArray) else array


def in_stored_order(x: jax.Array, kernel: QuantizedArray) -> jax.Array:
    """Returns x, [..., in], with its elements in the order of a kernel's input axis, [out, in]."""
    if not kernel.storage.packing.has_order:
        return x
    return jnp.take(x, kernel.leaf("order"), axis=-1)


def parts_of(x: Kept, has_barrier: bool = False) -> list[jax.Array]:
    """Returns plain arrays that make up x: x itself, or the unpacked planes of a quantized array.

    Planes are consecutive along the grouped axis, whose elements are in the stored order.
    """
    if not isinstance(x, QuantizedArray):
        return [x]
    count = -(-x.storage.length // x.storage.plane_length)
    factors = _factors(x)
    return [_plane(x, factors, index, has_barrier) for index in range(count)]


def row_parts(q: QuantizedArray, most_bytes: int, has_barrier: bool = False) -> list[jax.Array]:
    """Dequantizes a matrix that is grouped along its rows, in parts [plane, row, column].

    A part has at most `most_bytes` bytes, or one group of each plane. Joined along axis 1, the
    parts hold all rows, plane after plane; the last rows may be padding. A matmul part by part
    finds each part in the processor's cache.
    """
    storage, group = q.storage, q.storage.group_size
    planes, length, columns = storage.planes, storage.plane_length, storage.shape[1]
    if length % group:  # happens only if the matrix is small
        whole = dequantize(q)[None]
        return [jax.lax.optimization_barrier(whole) if has_barrier else whole]
    scale, minimum = (
        _padded(x.astype(jnp.float32), planes * length // group, 0).reshape(planes, -1, columns)
        for x in (q.scale, q.minimum)
    )
    shifts = storage.bits * jnp.arange(planes, dtype=jnp.uint8)[:, None, None]
    plain_rows = []
    step = max(1, most_bytes // (q.dtype.itemsize * columns * planes * group)) * group
    for start in range(0, length, step):
        stop = min(start + step, length)
        codes = (q.packed[None, start:stop] >> shifts) & ((1 << storage.bits) - 1)
        of_group = slice(start // group, stop // group)
        each_scale, each_minimum = (
            jnp.repeat(x[:, of_group], group, axis=1) for x in (scale, minimum)
        )
        wide = _wide(codes) * each_scale + each_minimum
        plain_rows.append(_finished(wide, q.dtype, has_barrier))
    return plain_rows


def ranges_of_rows(q: QuantizedArray, most_bytes: int) -> Iterator[QuantizedArray]:
    """Yields row ranges of a matrix that is grouped along its last axis. A range has at most
    `most_bytes` bytes when unpacked, or the minimum number of rows."""
    rows, (count, columns) = q.storage.packing.rows or q.shape[0], q.shape
    step = max(1, most_bytes // (q.dtype.itemsize * columns * rows)) * rows
    for start in range(0, count, step):
        yield q if step >= count else q.rows(start, min(start + step, count))


def _plane(
    q: QuantizedArray, factors: dict[str, jax.Array], index: int, has_barrier: bool
) -> jax.Array:
    """Unpacks a plane; factors: by name, fp32, one for each group."""
    storage, packing, start = q.storage, q.storage.packing, index * q.storage.plane_length
    length = min(storage.plane_length, storage.length - start)
    if packing.in_lanes:
        codes = unpacked_from_lanes(q.packed, storage, jnp.concatenate)
    else:
        parts = q.leaves[: len(packing.widths)]
        codes = _codes(parts, packing, storage.plane_length, index, length, storage.axis)
    each = {
        name: _per_element(factors[name], factor.group, storage.axis, start, length)
        for name, factor in packing.factors
        if name in factors
    }
    wide = level_of(codes, packing.levels)
    if packing.center:
        wide = wide - packing.center
    if "zero" in each:
        wide = wide - each["zero"]
    wide = wide * each["scale"]
    if "minimum" in each:
        wide = wide - each["minimum"] if packing.subtracts else wide + each["minimum"]
    return _finished(wide, q.dtype, has_barrier)


def _codes(
    parts: Sequence[jax.Array], packing: Format, each: int, index: int, length: int, axis: int
) -> jax.Array:
    """Returns the first `length` codes of a plane of `each` elements, uint8, from their parts."""
    total, offset = None, 0
    for part, width in zip(parts, packing.widths, strict=True):
        byte, begin = divmod(index, packing.planes * width // 8)
        stored = jax.lax.slice_in_dim(part, begin * each, begin * each + length, axis=axis)
        code = (stored >> (width * byte)) & ((1 << width) - 1)
        total = code if total is None else total | (code << offset)
        offset += width
    assert total is not None
    return total


def _factors(q: QuantizedArray) -> dict[str, jax.Array]:
    """Returns scales, minima and zeros by name, fp32, one per group, in absolute units."""
    packing = q.storage.packing
    named = {"scale": packing.scale, "minimum": packing.minimum, "zero": packing.zero}
    return {name: _factor(q, name, factor) for name, factor in named.items() if factor is not None}


def _factor(q: QuantizedArray, name: str, factor: Factor) -> jax.Array:
    storage, axis, count = q.storage, q.storage.axis, factor.count(q.storage.length)
    if factor.dtype == "codes":
        numbers = _unpacked_factor(q, name, factor, count)
    else:
        numbers = number_of(q.leaf(name), factor.dtype)
    if factor.center:
        numbers = numbers - factor.center
    if factor.rows > 1:
        numbers = jnp.repeat(numbers, factor.rows, axis=0)[: storage.shape[0]]
    if factor.of is not None:
        unit = _factor(q, f"{name}_of", factor.of)
        if factor.of.group:
            unit = _per_element(unit, factor.of.group // factor.group, axis, 0, count)
        numbers = numbers * unit
    return numbers


def _unpacked_factor(q: QuantizedArray, name: str, factor: Factor, count: int) -> jax.Array:
    axis, codes = q.storage.axis, Format(factor.bits, Factor("uint8", 0))
    parts = [q.leaf(name + "_high" * number) for number in range(len(codes.widths))]
    plane_length = -(-count // codes.planes)
    planes = [
        _codes(
            parts, codes, plane_length, index, min(plane_length, count - index * plane_length), axis
        )
        for index in range(-(-count // plane_length))
    ]
    return _wide(jnp.concatenate(planes, axis=axis))


def _wide(codes: jax.Array) -> jax.Array:
    # By way of int32, since XLA's CPU backend is slower in converting uint8 to float32 directly.
    return codes.astype(jnp.int32).astype(jnp.float32)


def _finished(wide: jax.Array, dtype: jnp.dtype, has_barrier: bool) -> jax.Array:
    """Rounds decoded numbers, fp32, to `dtype`."""
    numbers = _narrow(wide, dtype)
    if has_barrier:
        numbers = jax.lax.optimization_barrier(numbers)
    return numbers


def _narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds finite fp32 numbers to the nearest of `dtype`; bfloat16 ties go away from zero."""
    if dtype == jnp.float16:  # the top level may lie a little beyond the largest number
        x = jnp.clip(x, -largest_kept(dtype), largest_kept(dtype))
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    # XLA's own conversion also handles NaN, which makes unpacking on the CPU much slower.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(((bits + 0x8000) >> 16).astype(jnp.uint16), dtype)


def largest_kept(dtype: jnp.dtype) -> float:
    """Returns the clipping limit for quantizing an array.

    It is float16's largest number, or for other dtypes a quarter of float32's, so that no
    difference and no product overflows in float32.
    """
    largest = {"float16": float(np.finfo(np.float16).max)}
    return largest.get(str(dtype), float(np.finfo(np.float32).max) / 4)


# Rows of tables


def take_rows(table: Kept, rows: jax.Array) -> jax.Array:
    """Returns `table[rows]`, [*rows.shape, column], and unpacks only these rows.

    table: [row, column], grouped along either axis; rows: int32 of any shape.
    """
    if not isinstance(table, QuantizedArray):
        return table[rows]
    if table.storage.axis == 0:
        return _rows_of_groups(table, rows)
    flat = rows.reshape(-1)
    leaves = [
        array[flat // leaf.rows] if leaf.rows else array
        for array, leaf in zip(table.leaves, table.storage.leaves, strict=True)
    ]
    packing, shape = with_own_rows(table.storage.packing), (flat.size, table.shape[1])
    storage = Storage(shape, table.storage.dtype, packing)
    taken: jax.Array = dequantize(QuantizedArray(storage, tuple(leaves)))
    return taken.reshape(*rows.shape, -1)


def _rows_of_groups(table: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Returns rows of a table that is grouped along its rows."""
    storage = table.storage
    index, row = rows // storage.plane_length, rows % storage.plane_length
    codes = table.packed[row] >> (storage.bits * index[..., None]).astype(jnp.uint8)
    group = rows // storage.group_size
    scale, minimum = (x[group].astype(jnp.float32) for x in (table.scale, table.minimum))
    wide = _wide(codes & ((1 << storage.bits) - 1)) * scale + minimum
    return _finished(wide, table.dtype, has_barrier=False)


# Groups


def _padded(x: jax.Array, length: int, axis: int) -> jax.Array:
    """Returns `x` with zeros appended along `axis` up to `length`."""
    if x.shape[axis] == length:
        return x
    return jnp.pad(x, [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)])


def _per_group(
    x: jax.Array, reduce: Callable[..., jax.Array], group_size: int, axis: int
) -> jax.Array:
    """Returns the min or max (`reduce`) of every group along `axis`; the last may be short."""
    short = -x.shape[axis] % group_size
    if short:
        widths = [(0, short) if i == axis else (0, 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths, mode="edge")
    groups = x.shape[axis] // group_size
    x = x.reshape(*x.shape[:axis], groups, group_size, *x.shape[axis + 1 :])
    return reduce(x, axis=axis + 1)


def _per_element(
    values: jax.Array, group_size: int, axis: int, start: int, length: int
) -> jax.Array:
    """Returns the group value of each of `length` elements of `axis` from `start` on; one value for
    the whole axis if the group size is 0."""
    if group_size == 0:
        return values
    first, stop = start // group_size, -(-(start + length) // group_size)
    values = _padded(values, max(stop, values.shape[axis]), axis)
    values = jax.lax.slice_in_dim(values, first, stop, axis=axis)
    spread = jnp.repeat(values, group_size, axis=axis)
    start -= first * group_size
    return jax.lax.slice_in_dim(spread, start, start + length, axis=axis)


def _round_towards(x: jax.Array, dtype: jnp.dtype, direction: float) -> jax.Array:
    """Rounds fp32 numbers to `dtype`, up or down as `direction` (inf or -inf) says."""
    rounded = x.astype(dtype)
    beyond = rounded.astype(jnp.float32) < x if direction > 0 else rounded.astype(jnp.float32) > x
    return jnp.where(beyond, jnp.nextafter(rounded, jnp.asarray(direction, dtype)), rounded)
