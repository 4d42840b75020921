"""Pytrees in 4 or 8 bits, and products with their kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from flexgen_jax.cpu import is_cpu, kernels_of_device
from flexgen_jax.errors import UserError
from flexgen_jax.layers.encoding import encoded
from flexgen_jax.layers.matmul import precision_for
from flexgen_jax.layers.quantization import QuantizedArray, dequantize
from flexgen_jax.models.formats.known import OWN_GROUP, own
from flexgen_jax.models.formats.lanes import in_lanes
from flexgen_jax.models.formats.storage import Storage

MIN_QUANTIZED_ELEMENTS = 4096
"""Minimum elements of a quantized array, by default."""

Where = Callable[[str, Any], bool]
"""Returns whether a leaf is quantized, by its path, such as "['dense']['kernel']", and itself."""


@dataclass(frozen=True)
class QuantizedKernel:
    """A kernel of shape [in, ...] in few bits, for products that sum over `in`.

    packed: [out, in], the other axes as one, in groups of 32 along `in`; shape: of the kernel.
    """

    packed: QuantizedArray
    shape: tuple[int, ...]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the numbers that it stands for."""
        return self.packed.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays."""
        return self.packed.nbytes

    def dequantize(self) -> jax.Array:
        """Returns the plain kernel."""
        plain: jax.Array = dequantize(self.packed)
        return plain.T.reshape(self.shape)


jax.tree_util.register_dataclass(QuantizedKernel, data_fields=("packed",), meta_fields=("shape",))


def quantize_tree(params: Any, bits: int = 4, where: Where | None = None) -> Any:
    """Returns a pytree with its kernels in few bits, as `QuantizedKernel`.

    bits: 4 takes 4.5 bits an element, with a scale and a minimum for groups of 32 along the first
        axis, which are searched for the least error; 8 takes 8.5 bits, around zero.
    where: selects the leaves, which must be floating-point arrays with at least two axes; the first
        axis is summed over; by default all of 4,096 elements or more whose first axis has 32 or
        more, but those whose path has "embed".
    """
    if bits not in (4, 8):
        raise UserError(f"bits must be 4 or 8, not {bits}")
    chosen = where or _is_large

    def quantized(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if not chosen(name, leaf):
            return leaf
        if not _is_matrix(leaf):
            raise UserError(
                f"{name} ({getattr(leaf, 'dtype', type(leaf).__name__)}) cannot be quantized: it "
                "must be an array of floating-point numbers with two axes or more; `where` chooses "
                "leaves"
            )
        matrix = jnp.asarray(leaf).reshape(leaf.shape[0], -1).T
        storage = Storage(matrix.shape, str(matrix.dtype), own(bits))
        storage = in_lanes(storage) if is_cpu() else storage
        packed = encoded(matrix, storage)
        assert isinstance(packed, QuantizedArray), "it has a format"
        return QuantizedKernel(packed, tuple(leaf.shape))

    return jax.tree_util.tree_map_with_path(quantized, params)


def dequantize_tree(params: Any) -> Any:
    """Returns a pytree with plain arrays instead of quantized kernels; may be called under
    `jit`."""

    def plain(leaf: Any) -> Any:
        return leaf.dequantize() if isinstance(leaf, QuantizedKernel) else leaf

    return jax.tree.map(plain, params, is_leaf=_is_kernel)


def matmul(x: jax.Array, kernel: jax.Array | QuantizedKernel | QuantizedArray) -> jax.Array:
    """Returns the product of x, [..., in], and a kernel, [in, ...], summed in fp32, in x's dtype.

    kernel: plain, or from `quantize_tree`, which is unpacked during the matmul; a `QuantizedArray`
    of the engine is [out, in]. May be called under `jit`, and has no gradient where it is
    quantized.
    """
    if isinstance(kernel, QuantizedKernel):
        _check_product(x, kernel.shape[0])
        product = kernels_of_device().matmul(x, kernel.packed, None)
        return product.reshape(*x.shape[:-1], *kernel.shape[1:])
    if isinstance(kernel, QuantizedArray):
        _check_product(x, kernel.shape[1])
        return kernels_of_device().matmul(x, kernel, None)
    flat = kernel.reshape(kernel.shape[0], -1)
    out = jnp.matmul(x, flat, precision=precision_for(x.dtype), preferred_element_type=jnp.float32)
    return out.reshape(*x.shape[:-1], *kernel.shape[1:]).astype(x.dtype)


def _check_product(x: jax.Array, size: int) -> None:
    """Raises `UserError` for an `x` that a quantized kernel cannot multiply."""
    if x.shape[-1] != size or not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"x must have floating-point numbers and shape [..., {size}], not "
            f"{x.dtype}{list(x.shape)}"
        )


def _is_kernel(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedKernel)


def _is_matrix(leaf: Any) -> bool:
    return (
        hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and len(leaf.shape) > 1
    )


def _is_large(path: str, leaf: Any) -> bool:
    is_large = (
        _is_matrix(leaf)
        and math.prod(leaf.shape) >= MIN_QUANTIZED_ELEMENTS
        and leaf.shape[0] >= OWN_GROUP
    )
    return is_large and "embed" not in path.lower()
