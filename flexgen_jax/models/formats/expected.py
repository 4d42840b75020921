"""The formats of a model's tensors as its config promises them, for plans without its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flexgen_jax.models.formats.format import WIDTHS, Factor, Format, affine, centered
from flexgen_jax.models.formats.known import own
from flexgen_jax.models.formats.published import Published, of_any_expert
from flexgen_jax.models.spec import ModelSpec
from flexgen_jax.models.tensor_spec import TensorSpec

MXFP8 = Format(8, Factor("e8m0", 32), levels="e4m3")
"""8-bit floats whose scale is a power of two for 32 elements."""

SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Fields that name the layers which stay in 16 bits."""


def expected(
    options: Mapping[str, Any], spec: ModelSpec, name_of: Callable[[TensorSpec], str]
) -> Published | None:
    """Returns the formats of all matrices of decoder layers that a config does not leave out; None
    if it does not say how they are quantized.

    options: its "quantization_config"; name_of: a tensor's usual name in the model's files.
    """
    packing = _format(options)
    if packing is None:
        return None
    skipped = [str(name) for field in SKIPPED for name in options.get(field) or ()]
    formats = {
        of_any_expert(tensor.key): packing
        for layer in spec.decoders
        for tensor in layer.large
        if not tensor.expert  # a layer's experts have equal shapes
        and not any(_is_meant(name, name_of(tensor)) for name in skipped)
    }
    method = str(options.get("quant_method", "")).upper()
    bits = 4 if packing.bits <= 4 else 8
    return Published(method, bits, tuple(sorted(formats.items()))) if formats else None


def _is_meant(skipped: str, name: str) -> bool:
    """Returns whether a name or pattern of a skip list means a tensor."""
    if skipped.startswith("re:"):
        return re.match(skipped[3:], name) is not None
    pattern = ".*".join(map(re.escape, skipped.removeprefix("model.").split("*")))
    return re.search(pattern, name) is not None


def _format(options: Mapping[str, Any]) -> Format | None:
    method = str(options.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return _of_groups(options)
    if method == "modelopt":
        algorithm = str(options.get("quant_algo", "")).upper()
        if algorithm == "MXFP8":
            return MXFP8
        is_fp4 = "FP4" in algorithm
        unit = Factor("float32", 0, rows=0)
        fp4 = Format(4, Factor("e4m3", 16, of=unit), levels="e2m1")
        return fp4 if is_fp4 else Format(8, unit, levels="e4m3")
    if method.replace("_", "-") in ("gptq", "awq", "auto-round"):
        bits, group = int(options.get("bits", 4)), int(options.get("group_size", 128))
        return centered(bits, max(group, 0), "float16")
    if method == "bitsandbytes":
        is_nf4 = options.get("load_in_4bit") or options.get("_load_in_4bit")
        nf4 = Format(4, Factor("float32", 64), levels="nf4")
        return nf4 if is_nf4 else centered(8, 0, "float32")
    if method == "mlx":
        return affine(int(options.get("bits", 4)), int(options.get("group_size", 64)))
    if method == "flexgen-jax":
        return own(int(options.get("bits", 4)))
    if method == "mxfp4":
        return Format(4, Factor("e8m0", 32), levels="e2m1")
    if method in ("fp8", "fbgemm_fp8"):
        block = options.get("weight_block_size")
        rows, columns = block or (0, 0)
        return Format(8, Factor("float32", int(columns), rows=int(rows)), levels="e4m3")
    return None


def of_group(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the weight settings of the first group in compressed-tensors' config, empty without a
    group."""
    groups = list((options.get("config_groups") or {}).values())
    weights: Mapping[str, Any] = (groups[0].get("weights") if groups else None) or {}
    return weights


def _of_groups(options: Mapping[str, Any]) -> Format | None:
    """Returns the format of the first group of compressed-tensors' config."""
    weights = of_group(options)
    bits, group = int(weights.get("num_bits", 4)), int(weights.get("group_size") or 0)
    if weights.get("type") == "float" and bits == 8 and group == 32:
        return MXFP8
    if weights.get("type") == "float" and bits == 8:
        rows, columns = weights.get("block_structure") or (1, 0)
        return Format(8, Factor("float32", int(columns), rows=int(rows)), levels="e4m3")
    if weights.get("type") == "float":
        unit = Factor("float32", 0, rows=0)
        return Format(4, Factor("e4m3", group or 16, of=unit), levels="e2m1")
    return centered(bits, max(group, 0), "bfloat16") if bits in WIDTHS else None
