"""Group-wise quantization: fine-grained, asymmetric (FlexGen, section 5).

Groups of consecutive elements along one axis share a minimum and a scale:

    x  ~  minimum + scale * code,   code in 0 ... 2^bits - 1

Codes are packed in planes along that axis: with 4 bits, byte j of n/2 holds the codes of
elements j (low half) and j + n/2 (high half). So each plane unpacks with one shift and one
mask into a contiguous half of the array, and a product takes the halves one after the other.
Interleaved neighbours would unpack much more slowly on XLA's CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.models.storage import GROUP_SIZE, Storage, parameter_dtype

PACKED_BITS = (2, 4, 8)


@dataclass(frozen=True)
class QuantizedArray:
    """An array in few bits per element; `storage` has its logical shape and dtype.

    packed: uint8, with the grouped axis 8 / bits times shorter than in the logical shape;
    scale, minimum: with the grouped axis `group_size` times shorter, in float16 for a float16
    array and in bfloat16 for others. Both lengths are rounded up.
    """

    storage: Storage
    packed: jax.Array
    scale: jax.Array
    minimum: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.storage.shape

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.storage.dtype)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes


jax.tree_util.register_dataclass(
    QuantizedArray, data_fields=("packed", "scale", "minimum"), meta_fields=("storage",)
)

Kept = jax.Array | QuantizedArray
"""A tensor as it is kept, moved and given to layers: plain or quantized."""


def assemble(storage: Storage, leaves: Sequence[Any]) -> Any:
    """Returns the array with these stored leaves: a `QuantizedArray`, or the only leaf itself."""
    return leaves[0] if storage.bits == 16 else QuantizedArray(storage, *leaves)


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
    storage = Storage(x.shape, str(x.dtype), bits, group_size, axis % x.ndim)
    found: QuantizedArray = quantize_as(x, storage)
    return found


@partial(jax.jit, static_argnames="storage")
def quantize_as(x: jax.Array, storage: Storage) -> QuantizedArray:
    """Quantizes x as `quantize` does, with bits, group size and axis from `storage`."""
    codes, scale, minimum = encode(x, storage)
    return QuantizedArray(storage, _pack(codes, storage), scale, minimum)


@partial(jax.jit, static_argnames="storage")
def encode(x: jax.Array, storage: Storage) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x's codes (uint8, in x's shape, not packed), scales and minima; see `quantize`."""
    group_size, axis = storage.group_size, storage.axis
    levels = (1 << storage.bits) - 1
    kept = jnp.dtype(parameter_dtype(storage.dtype))
    largest = largest_kept(x.dtype)
    low, high = (
        jnp.clip(_per_group(x, reduce, group_size, axis).astype(jnp.float32), -largest, largest)
        for reduce in (jnp.min, jnp.max)
    )
    minimum = _round_towards(low, kept, -jnp.inf)
    # A product, since XLA turns a division by a constant into one while NumPy does not.
    spread = (high - minimum.astype(jnp.float32)) * jnp.float32(1 / levels)
    scale = _round_towards(spread, kept, jnp.inf)
    each_minimum = _per_element(minimum, group_size, axis, 0, x.shape[axis])
    each_scale = _per_element(scale, group_size, axis, 0, x.shape[axis])
    wide = jnp.clip(x.astype(jnp.float32), -largest, largest)
    offset = (wide - each_minimum) / jnp.where(each_scale > 0, each_scale, 1.0)
    return jnp.clip(jnp.round(offset), 0, levels).astype(jnp.uint8), scale, minimum


def _pack(codes: jax.Array, storage: Storage) -> jax.Array:
    length, axis = storage.plane_length, storage.axis
    codes = _padded(codes, length * storage.planes, axis)
    packed = jax.lax.slice_in_dim(codes, 0, length, axis=axis)
    for index in range(1, storage.planes):
        part = jax.lax.slice_in_dim(codes, index * length, (index + 1) * length, axis=axis)
        packed = packed | (part << (storage.bits * index))
    return packed


@partial(jax.jit, static_argnames="has_barrier")
def dequantize(q: QuantizedArray, has_barrier: bool = False) -> jax.Array:
    """Returns the plain array that `q` stands for; has_barrier: see `Tuning.has_barriers`."""
    return jnp.concatenate(parts_of(q, has_barrier), axis=q.storage.axis)


def parts_of(x: Kept, has_barrier: bool = False) -> list[jax.Array]:
    """Returns plain arrays that make up x: x itself, or the unpacked planes of a quantized array.

    Planes are consecutive along the grouped axis.
    """
    if not isinstance(x, QuantizedArray):
        return [x]
    count = -(-x.shape[x.storage.axis] // x.storage.plane_length)
    return [_plane(x, index, has_barrier) for index in range(count)]


def _plane(q: QuantizedArray, index: int, has_barrier: bool) -> jax.Array:
    storage, start = q.storage, index * q.storage.plane_length
    length = min(storage.plane_length, storage.shape[storage.axis] - start)
    packed = jax.lax.slice_in_dim(q.packed, 0, length, axis=storage.axis)
    codes = (packed >> (storage.bits * index)) & ((1 << storage.bits) - 1)
    where = (storage.group_size, storage.axis, start, length)
    scale, minimum = _per_element(q.scale, *where), _per_element(q.minimum, *where)
    return _levels(codes, scale, minimum, q.dtype, has_barrier)


def row_parts(q: QuantizedArray, most_bytes: int, has_barrier: bool = False) -> list[jax.Array]:
    """Dequantizes a matrix that is grouped along its rows, in parts [plane, row, column].

    A part has at most `most_bytes` bytes, or one group of each plane. Joined along axis 1, the
    parts hold all rows, plane after plane; the last rows may be padding. A product with one part
    after the other finds each of them in the processor's cache.
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
    parts = []
    step = max(1, most_bytes // (q.dtype.itemsize * columns * planes * group)) * group
    for start in range(0, length, step):
        stop = min(start + step, length)
        codes = (q.packed[None, start:stop] >> shifts) & ((1 << storage.bits) - 1)
        of_group = slice(start // group, stop // group)
        each_scale, each_minimum = (
            jnp.repeat(x[:, of_group], group, axis=1) for x in (scale, minimum)
        )
        parts.append(_levels(codes, each_scale, each_minimum, q.dtype, has_barrier))
    return parts


def _levels(
    codes: jax.Array, scale: jax.Array, minimum: jax.Array, dtype: jnp.dtype, has_barrier: bool
) -> jax.Array:
    """Returns the values of codes in `dtype`; scale, minimum: fp32, one for each code."""
    # By way of int32, since XLA's CPU backend is slower in converting uint8 to float32 directly.
    wide = codes.astype(jnp.int32).astype(jnp.float32) * scale + minimum
    found: jax.Array = _narrow(wide, dtype)
    if has_barrier:
        found = jax.lax.optimization_barrier(found)
    return found


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
    """Returns the number to which larger ones are clipped when an array is quantized.

    It is float16's largest number, or for other dtypes a quarter of float32's, so that no
    difference and no product overflows in float32.
    """
    largest = {"float16": float(np.finfo(np.float16).max)}
    return largest.get(str(dtype), float(np.finfo(np.float32).max) / 4)


def take_rows(table: Kept, rows: jax.Array) -> jax.Array:
    """Returns `table[rows]`, [*rows.shape, column], and unpacks only these rows.

    table: [row, column], which may be grouped along its rows; rows: int32 of any shape.
    """
    if not isinstance(table, QuantizedArray):
        return table[rows]
    storage = table.storage
    index, row = rows // storage.plane_length, rows % storage.plane_length
    codes = table.packed[row] >> (storage.bits * index[..., None]).astype(jnp.uint8)
    group = rows // storage.group_size
    one = Storage((*rows.shape, 1, storage.shape[1]), storage.dtype, 8, 1, rows.ndim)
    leaves = (codes & ((1 << storage.bits) - 1), table.scale[group], table.minimum[group])
    taken = QuantizedArray(one, *(leaf[..., None, :] for leaf in leaves))
    found: jax.Array = dequantize(taken)[..., 0, :]
    return found


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
    """Returns the group value, fp32, of each of `length` elements of `axis` from `start` on."""
    first, stop = start // group_size, -(-(start + length) // group_size)
    values = _padded(values.astype(jnp.float32), max(stop, values.shape[axis]), axis)
    values = jax.lax.slice_in_dim(values, first, stop, axis=axis)
    spread = jnp.repeat(values, group_size, axis=axis)
    start -= first * group_size
    return jax.lax.slice_in_dim(spread, start, start + length, axis=axis)


def _round_towards(x: jax.Array, dtype: jnp.dtype, direction: float) -> jax.Array:
    """Rounds fp32 numbers to `dtype`, up or down as `direction` (inf or -inf) says."""
    near = x.astype(dtype)
    beyond = near.astype(jnp.float32) < x if direction > 0 else near.astype(jnp.float32) > x
    return jnp.where(beyond, jnp.nextafter(near, jnp.asarray(direction, dtype)), near)
