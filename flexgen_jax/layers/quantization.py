"""Group-wise quantization: fine-grained, asymmetric (FlexGen, section 5).

Groups of consecutive elements along one axis share a minimum and a scale:

    x  ~  minimum + scale * code,   code in 0 ... 2^bits - 1

Codes are packed along the last axis in planes: with 4 bits, byte j of n/2 holds the codes of
elements j (low half) and j + n/2 (high half). So each plane unpacks with one shift and one
mask into a contiguous half of the array, and a product takes the halves one after the other;
interleaved neighbours unpack at a tenth of the speed on XLA's CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.layers.storage import GROUP_SIZE, Storage, parameter_dtype

PACKED_BITS = (2, 4, 8)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("packed", "scale", "minimum"),
    meta_fields=("storage",),
)
@dataclass(frozen=True)
class QuantizedArray:
    """An array in few bits an element; `storage` has its logical shape and dtype.

    packed: uint8, the logical shape with the last axis 8 / bits times shorter (rounded up);
    scale, minimum: the logical shape with the grouped axis `group_size` times shorter (rounded
    up), in float16 for a float16 array and bfloat16 for others.
    """

    packed: jax.Array
    scale: jax.Array
    minimum: jax.Array
    storage: Storage

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
    def planes(self) -> int:
        """How many codes a byte holds."""
        return 8 // self.storage.bits


Array = jax.Array | QuantizedArray
"""What a layer may be given for a tensor."""


def assemble(storage: Storage, leaves: Sequence[Any]) -> Any:
    """The array whose stored leaves these are: a `QuantizedArray`, or the only leaf itself."""
    return leaves[0] if storage.bits == 16 else QuantizedArray(*leaves, storage)


def quantize(
    x: jax.Array, bits: int = 4, group_size: int = GROUP_SIZE, axis: int = -1
) -> QuantizedArray:
    """Rounds every element to the nearest of 2^bits levels between its group's extremes.

    The error is at most half the group's stored scale. Minimum and scale are rounded outwards
    to their two bytes before the codes are computed, so their rounding adds none. Infinities
    become the largest numbers (`largest_kept`); the last group may be short. Raises `ValueError`
    for bits, group size or axis that make no sense.
    """
    if bits not in PACKED_BITS:
        raise ValueError(f"bits must be one of {PACKED_BITS}, not {bits}")
    if group_size < 1 or x.ndim < 1 or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"cannot group axis {axis} of shape {x.shape} by {group_size}")
    storage = Storage(x.shape, str(x.dtype), bits, group_size, axis % x.ndim)
    return quantize_as(x, storage)


@partial(jax.jit, static_argnames="storage")
def quantize_as(x: jax.Array, storage: Storage) -> QuantizedArray:
    """`quantize` with its arguments in one."""
    bits, group_size, axis = storage.bits, storage.group_size, storage.axis
    levels = (1 << bits) - 1
    kept = jnp.dtype(parameter_dtype(storage.dtype))
    largest = largest_kept(x.dtype)
    wide = jnp.clip(x.astype(jnp.float32), -largest, largest)
    low, high = (_per_group(wide, reduce, group_size, axis) for reduce in (jnp.min, jnp.max))
    minimum = _round_towards(low, kept, -jnp.inf)
    # XLA makes a division by a constant this product anyway; NumPy would not.
    spread = (high - minimum.astype(jnp.float32)) * jnp.float32(1 / levels)
    scale = _round_towards(spread, kept, jnp.inf)
    each_minimum = _per_element(minimum, x.shape, group_size, axis)
    each_scale = _per_element(scale, x.shape, group_size, axis)
    offset = (wide - each_minimum) / jnp.where(each_scale > 0, each_scale, 1.0)
    codes = jnp.clip(jnp.round(offset), 0, levels).astype(jnp.uint8)
    return QuantizedArray(pack(codes, bits), scale, minimum, storage)


@jax.jit
def dequantize(q: QuantizedArray) -> jax.Array:
    """The array that `q` stands for, in its dtype."""
    planes = [plane(q, index) for index in range(q.planes)]
    whole = planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=-1)
    return whole[..., : q.shape[-1]]


def plane(q: QuantizedArray, index: int) -> jax.Array:
    """The index-th contiguous part of the last axis, dequantized.

    Parts are as long as `packed`; the last one has meaningless elements where the axis does
    not divide.
    """
    bits, group_size, axis = q.storage.bits, q.storage.group_size, q.storage.axis
    length = q.packed.shape[-1]
    codes = (q.packed >> (bits * index)) & ((1 << bits) - 1)
    part = slice(index * length, (index + 1) * length)
    last = len(q.shape) - 1

    def spread(values: jax.Array) -> jax.Array:
        if axis != last:
            values = _padded(values, length * q.planes)[..., part]
            return _per_element(values, (*q.shape[:-1], length), group_size, axis)
        whole = (*q.shape[:-1], length * q.planes)
        values = _padded(values, -(-whole[-1] // group_size))
        return _per_element(values, whole, group_size, last)[..., part]

    wide = codes.astype(jnp.float32) * spread(q.scale) + spread(q.minimum)
    if q.dtype == jnp.float16:  # the top level may lie a little beyond the largest number
        wide = jnp.clip(wide, -largest_kept(q.dtype), largest_kept(q.dtype))
    return wide.astype(q.dtype)


def largest_kept(dtype: jnp.dtype) -> float:
    """Larger numbers are taken as this: the dtype's largest, or a quarter of float32's, so that
    no difference and no product overflows in float32."""
    return min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max) / 4)


def contract(
    x: jax.Array, q: Array, product: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """`product(x, q)`, which sums over the last axis of both; of a quantized array one part
    after the other is unpacked, so that no whole copy of it is made."""
    if not isinstance(q, QuantizedArray):
        return product(x, q)
    length = q.packed.shape[-1]
    x = _padded(x, length * q.planes)
    out = None
    for index in range(q.planes):
        # Without the barrier XLA unpacks inside the product's loop, again for every row.
        part = jax.lax.optimization_barrier(plane(q, index))
        term = product(x[..., index * length : (index + 1) * length], part)
        out = term if out is None else out + term
    assert out is not None
    return out


def expand(
    x: jax.Array, q: Array, product: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """`product(x, q)`, whose result has the last axis of `q`; unpacked like in `contract`."""
    if not isinstance(q, QuantizedArray):
        return product(x, q)
    parts = (jax.lax.optimization_barrier(plane(q, index)) for index in range(q.planes))
    whole = jnp.concatenate([product(x, part) for part in parts], axis=-1)
    return whole[..., : q.shape[-1]]


def take_rows(table: Array, rows: jax.Array) -> jax.Array:
    """table[rows] of a [row, column] table whose groups, if any, are along the rows; only what
    is taken is unpacked. rows: int32 of any shape; returns [*rows.shape, column]."""
    if not isinstance(table, QuantizedArray):
        return table[rows]
    group = rows // table.storage.group_size
    storage = Storage(
        (*rows.shape, 1, table.shape[1]), table.storage.dtype, table.storage.bits, 1, rows.ndim
    )
    taken = QuantizedArray(
        table.packed[rows][..., None, :],
        table.scale[group][..., None, :],
        table.minimum[group][..., None, :],
        storage,
    )
    return dequantize(taken)[..., 0, :]


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint8 codes to bytes, in planes along the last axis; missing ones are zero."""
    count = 8 // bits
    length = -(-codes.shape[-1] // count)
    codes = _padded(codes, length * count)
    packed = codes[..., :length]
    for index in range(1, count):
        packed = packed | (codes[..., index * length : (index + 1) * length] << (bits * index))
    return packed


def _padded(x: jax.Array, length: int) -> jax.Array:
    """`x` with its last axis filled up to `length` with zeros."""
    if x.shape[-1] == length:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


def _per_group(
    x: jax.Array, reduce: Callable[..., jax.Array], group_size: int, axis: int
) -> jax.Array:
    """min or max of every group along `axis`; the last group may be short."""
    short = -x.shape[axis] % group_size
    if short:
        widths = [(0, short) if i == axis else (0, 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths, mode="edge")
    groups = x.shape[axis] // group_size
    x = x.reshape(*x.shape[:axis], groups, group_size, *x.shape[axis + 1 :])
    return reduce(x, axis=axis + 1)


def _per_element(
    values: jax.Array, shape: tuple[int, ...], group_size: int, axis: int
) -> jax.Array:
    """Every element's group value, fp32 [shape]."""
    spread = jnp.repeat(values.astype(jnp.float32), group_size, axis=axis)
    return jax.lax.slice_in_dim(spread, 0, shape[axis], axis=axis)


def _round_towards(x: jax.Array, dtype: jnp.dtype, direction: float) -> jax.Array:
    """fp32 to `dtype`, never past `x` against `direction`."""
    near = x.astype(dtype)
    beyond = near.astype(jnp.float32) < x if direction > 0 else near.astype(jnp.float32) > x
    return jnp.where(beyond, jnp.nextafter(near, jnp.asarray(direction, dtype)), near)
