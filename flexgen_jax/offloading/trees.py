"""Pytrees as named tensors: each leaf's name and format."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.layers.quantization import Kept, QuantizedArray
from flexgen_jax.models.formats.format import ITEM_BYTES
from flexgen_jax.models.formats.storage import Storage


class FlatTree(NamedTuple):
    """A pytree's leaves by path, and its structure. A quantized array is one leaf."""

    leaves: dict[str, Kept]
    structure: Any

    def storages(self) -> dict[str, Storage]:
        """Returns how each leaf is kept."""
        return {path: storage_of(leaf) for path, leaf in self.leaves.items()}


def flattened(tree: Any, what: str) -> FlatTree:
    """Returns the leaves of a pytree as arrays; what: names it in errors. Raises `UserError` for a
    leaf that is not an array of numbers."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantized)
    leaves = {}
    for path, leaf in pairs:
        name = jax.tree_util.keystr(path)
        leaves[name] = _as_array(leaf, f"{what}{name}")
    return FlatTree(leaves, structure)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def _as_array(leaf: Any, name: str) -> Kept:
    if isinstance(leaf, QuantizedArray):
        return leaf
    array: Any = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if str(array.dtype) not in ITEM_BYTES:
        raise UserError(
            f"{name} is {type(leaf).__name__} of dtype {array.dtype}, but must be an array of "
            "numbers"
        )
    # As JAX would have it: without jax_enable_x64, float64 becomes float32.
    kept: jax.Array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    return kept


def storage_of(leaf: Kept) -> Storage:
    """Returns how a leaf is kept: unchanged, but a scalar has one element."""
    if isinstance(leaf, QuantizedArray):
        return leaf.storage
    return Storage(leaf.shape or (1,), str(leaf.dtype))


def parts_of(leaf: Kept) -> list[np.ndarray]:
    """Returns the arrays that are stored of a leaf, on the host; waits for them."""
    if isinstance(leaf, QuantizedArray):
        return [np.asarray(part) for part in leaf.leaves]
    array = np.asarray(leaf)
    return [array if array.ndim else array.reshape(1)]
