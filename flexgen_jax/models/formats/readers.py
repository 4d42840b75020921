"""Which reader takes a tensor of few bits in safetensors, by the names of its stored arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.formats.float_readers import Float8, Mxfp4, MxfpBlocks, NormalFloat, Nvfp4
from flexgen_jax.models.formats.integer_readers import Awq, Gptq, Integers8, Mlx, PackQuantized
from flexgen_jax.models.formats.own_reader import METHOD as OWN
from flexgen_jax.models.formats.own_reader import Own
from flexgen_jax.models.formats.packed import PackedTensor, Parts, StoredArrays

ALWAYS_BESIDE = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".qscale_act",
    ".weight_shape",
    ".bias_scale",
    ".weight_format",
)
"""Ends of names of arrays that belong to a tensor in few bits and are not needed: activations are
not rounded here."""


def packed_tensors(
    arrays: StoredArrays, names: list[str], options: Mapping[str, Any]
) -> dict[str, PackedTensor]:
    """Returns the tensors in few bits among stored ones, by the names that they would have in 16
    bits. options: the config's "quantization_config". Raises `CheckpointError` for one that cannot
    be read."""
    method = str(options.get("quant_method", "")).lower()
    packed: dict[str, PackedTensor] = {}
    for name in names:
        base, _, end = name.rpartition(".")
        reader = None
        if end == "weight_packed":
            reader = _of_packed(arrays, base)
        elif end == "qweight":
            reader = Awq if _is_awq(arrays, base, method) else Gptq
        elif end == "weight" and method == "mlx":
            if arrays.dtype(name) == "U32":
                packed.update(Mlx.tensors(Parts(arrays, base, Mlx.METHOD, options)))
        elif end == "weight":
            reader = _of_weight(arrays, base)
        elif name.endswith("_blocks"):
            base, reader = name.removesuffix("_blocks"), MxfpBlocks
        elif end == "packed" and method == OWN:
            reader = Own
        if reader is None:
            continue
        plain = base if reader in (MxfpBlocks, Own) else f"{base}.weight"
        packed[plain] = reader(Parts(arrays, base, reader.METHOD, options))
    return packed


def _of_packed(arrays: StoredArrays, base: str) -> Any:
    """The reader of compressed-tensors' `weight_packed`."""
    if arrays.dtype(f"{base}.weight_packed") == "I32":
        return PackQuantized
    return Nvfp4 if f"{base}.weight_global_scale" in arrays else Mxfp4


def _is_awq(arrays: StoredArrays, base: str, method: str) -> bool:
    """Returns whether `qweight` is AWQ's, whose columns are packed, and not GPTQ's, whose rows
    are."""
    scales = f"{base}.scales"
    if method in ("awq", "gptq") or scales not in arrays:
        return method == "awq"
    return arrays.shape(f"{base}.qweight")[1] < arrays.shape(scales)[1]


def _of_weight(arrays: StoredArrays, base: str) -> Any:
    dtype = arrays.dtype(f"{base}.weight")
    if f"{base}.weight.absmax" in arrays:
        return NormalFloat
    if dtype.startswith("F8"):
        return Float8
    if dtype == "I8":
        return Integers8
    if dtype == "U8":
        return Nvfp4 if f"{base}.weight_scale_2" in arrays else NormalFloat
    return None
