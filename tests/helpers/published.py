"""Tiny models as hubs have them, in few bits, written from the formats' published formulas: random
codes and scales, and the plain weights that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers.families import Reference

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""96 columns are three groups of 32, which two planes of codes do not divide."""

STATES = {"qwen3_5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32}}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""AWQ's word holds these of eight columns, from the lowest bits on."""

Weights = dict[str, np.ndarray]
Random = np.random.Generator
Made = tuple[Weights, np.ndarray]
"""Stored arrays by the ends of their names, and the plain matrix."""


def words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Packs codes into int32 along an axis as one row of bits, the first code in the lowest."""
    codes = np.moveaxis(codes.astype(np.uint8), axis, -1)
    each = (codes[..., None] >> np.arange(bits) & 1).reshape(*codes.shape[:-1], -1)
    padded = np.pad(each, [(0, 0)] * (codes.ndim - 1) + [(0, -each.shape[-1] % 32)])
    packed = np.packbits(padded, axis=-1, bitorder="little").view("<i4")
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def spread(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.repeat(np.repeat(values, rows, 0), columns, 1)


def scales(rng: Random, *shape: int, dtype: Any = np.float32, size: float = 0.1) -> np.ndarray:
    return (size * (0.5 + rng.random(shape))).astype(dtype)


def float8(rng: Random, shape: tuple[int, int], kind: str) -> Made:
    codes = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    rows, columns = shape
    if kind == "block":
        scale = scales(rng, -(-rows // 32), -(-columns // 32))
        each = spread(scale, 32, 32)[:rows, :columns]
        return {"weight": codes, "weight_scale_inv": scale}, codes.astype(np.float32) * each
    if kind == "power":  # the exponents of powers of two
        power = rng.integers(123, 126, (-(-rows // 32), -(-columns // 32)), np.uint8)
        each = spread(2.0 ** (power.astype(np.float32) - 127), 32, 32)[:rows, :columns]
        return {"weight": codes, "scale": power}, codes.astype(np.float32) * each
    if kind == "micro":
        power = rng.integers(123, 126, (rows, columns // 32), np.uint8)
        each = np.repeat(2.0 ** (power.astype(np.float32) - 127), 32, 1)
        return {"weight": codes, "weight_scale": power}, codes.astype(np.float32) * each
    scale = scales(rng, rows, 1, dtype=ml_dtypes.bfloat16)
    scale = scale if kind == "row" else scale[:1, 0]
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * scale.astype("f4")


def integers(rng: Random, shape: tuple[int, int]) -> Made:
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    scale = scales(rng, shape[0], 1, dtype=np.float16, size=0.005)
    return {"weight": codes, "weight_scale": scale}, codes * scale.astype(np.float32)


def compressed(
    rng: Random, shape: tuple[int, int], zeros: str = "", has_order: bool = False, bits: int = 4
) -> Made:
    """zeros: "packed" or "plain" ones, or none."""
    rows, columns = shape
    most, groups = 1 << bits, columns // 32
    codes = rng.integers(0, most, shape)
    scale = scales(rng, rows, groups, dtype=ml_dtypes.bfloat16, size=0.8 / most)
    zero = rng.integers(0, most, (rows, groups)) if zeros else np.full((rows, groups), most // 2)
    group_of = np.arange(columns, dtype=np.int32) // 32
    stored = {
        "weight_packed": words(codes, bits, 1),
        "weight_scale": scale,
        "weight_shape": np.array(shape, np.int64),
    }
    if zeros == "packed":
        stored["weight_zero_point"] = words(zero, bits, 0)
    elif zeros:
        stored["weight_zero_point"] = (zero - most // 2).astype(np.int8)
    if has_order:
        group_of = rng.permutation(group_of)
        stored["weight_g_idx"] = group_of
    return stored, (codes - zero[:, group_of]) * scale.astype(np.float32)[:, group_of]


def gptq(
    rng: Random, shape: tuple[int, int], less: int, has_zero: bool, has_order: bool, bits: int = 4
) -> Made:
    """less: what the version of the format takes off zeros before it stores them."""
    rows, columns = shape
    most = 1 << bits
    codes, groups = rng.integers(0, most, (columns, rows)), columns // 32
    scale = scales(rng, groups, rows, dtype=np.float16, size=0.8 / most)
    zero = np.full((groups, rows), most // 2)
    if has_zero:
        zero = rng.integers(1, most, zero.shape)
    group_of = np.arange(columns, dtype=np.int32) // 32
    group_of = rng.permutation(group_of) if has_order else group_of
    stored = {
        "qweight": words(codes, bits, 0),
        "qzeros": words(zero - less, bits, 1),
        "scales": scale,
        "g_idx": group_of,
    }
    return stored, ((codes - zero[group_of]) * scale.astype(np.float32)[group_of]).T


def awq(rng: Random, shape: tuple[int, int], has_zero: bool) -> Made:
    rows, columns = shape
    codes, groups = rng.integers(0, 16, (columns, rows)), columns // 32
    scale = scales(rng, groups, rows, dtype=np.float16, size=0.05)
    zero = rng.integers(0, 16, (groups, rows)) if has_zero else np.full((groups, rows), 8)

    def packed(numbers: np.ndarray) -> np.ndarray:
        columns_of = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_COLUMNS]
        return words(columns_of.reshape(len(numbers), -1), 4, 1)

    stored = {"qweight": packed(codes), "qzeros": packed(zero), "scales": scale}
    each = np.repeat(scale.astype(np.float32), 32, 0)
    return stored, ((codes - np.repeat(zero, 32, 0)) * each).T


def mlx(rng: Random, shape: tuple[int, int], bits: int) -> Made:
    """A row of codes is one number, written as words from its lowest bits on."""
    rows, columns = shape
    codes = rng.integers(0, 1 << bits, shape)
    scale = scales(rng, rows, columns // 32, dtype=np.float32, size=0.8 / (1 << bits))
    minimum = (-scale * (1 << bits) / 2 * rng.random(scale.shape)).astype(np.float32)
    stream = [sum(int(code) << bits * n for n, code in enumerate(row)) for row in codes]
    stored = [np.frombuffer(x.to_bytes(columns * bits // 8, "little"), "<u4") for x in stream]
    matrix = codes * np.repeat(scale, 32, 1) + np.repeat(minimum, 32, 1)
    return {"weight": np.stack(stored), "scales": scale, "biases": minimum}, matrix


def microscaled(rng: Random, shape: tuple[int, int]) -> Made:
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    power = rng.integers(122, 125, (shape[0], shape[1] // 32), np.uint8)
    each = np.repeat(2.0 ** (power.astype(np.float32) - 127), 32, 1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": power}, E2M1[codes] * each


def nvidia(rng: Random, shape: tuple[int, int], divides: bool) -> Made:
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    scale = (20 + 80 * rng.random((shape[0], shape[1] // 16))).astype(ml_dtypes.float8_e4m3fn)
    overall = np.array([700.0 if divides else 1 / 700], np.float32)
    each = np.repeat(scale.astype(np.float32), 16, 1)
    if divides:
        stored = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": overall}
        return stored, E2M1[codes] * each / overall
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": overall[0]}
    return stored, E2M1[codes] * each * overall


def normal(rng: Random, shape: tuple[int, int], is_nested: bool, storage: str = "uint8") -> Made:
    """4-bit NormalFloat as bitsandbytes itself packs it."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = torch.tensor(rng.normal(size=shape) * 0.3, dtype=torch.float32)
    packed, state = quantize_4bit(
        weights,
        blocksize=32,
        quant_type="nf4",
        compress_statistics=is_nested,
        quant_storage=getattr(torch, storage),
    )
    plain = dequantize_4bit(packed, state).numpy()
    arrays = {"weight": packed.view(torch.uint8).numpy().view(storage)}
    for name, value in state.as_dict(packed=True).items():
        arrays[f"weight.{name}"] = value.numpy()
    return arrays, plain


Maker = Callable[[Random, tuple[int, int]], Made]

FORMATS: dict[str, tuple[Maker, dict[str, Any]]] = {
    "fp8-block": (
        lambda r, s: float8(r, s, "block"),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
    ),
    "fp8-power": (
        lambda r, s: float8(r, s, "power"),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
    ),
    "fp8-row": (lambda r, s: float8(r, s, "row"), {"quant_method": "compressed-tensors"}),
    "fp8-all": (
        lambda r, s: float8(r, s, "all"),
        {"quant_method": "fp8", "weight_block_size": None},
    ),
    "int8": (integers, {"quant_method": "compressed-tensors"}),
    "int4": (
        lambda r, s: compressed(r, s),
        {"quant_method": "compressed-tensors"},
    ),
    "int4-zero": (
        lambda r, s: compressed(r, s, "packed"),
        {"quant_method": "compressed-tensors"},
    ),
    "int4-plain-zero": (
        lambda r, s: compressed(r, s, "plain"),
        {"quant_method": "compressed-tensors"},
    ),
    "int3-zero": (
        lambda r, s: compressed(r, s, "packed", bits=3),
        {"quant_method": "compressed-tensors"},
    ),
    "int2": (lambda r, s: compressed(r, s, bits=2), {"quant_method": "compressed-tensors"}),
    "int4-order": (
        lambda r, s: compressed(r, s, has_order=True),
        {"quant_method": "compressed-tensors"},
    ),
    "gptq": (lambda r, s: gptq(r, s, 1, False, False), {"quant_method": "gptq", "bits": 4}),
    "gptq-zero": (lambda r, s: gptq(r, s, 1, True, False), {"quant_method": "gptq", "bits": 4}),
    "gptq-order": (lambda r, s: gptq(r, s, 1, True, True), {"quant_method": "gptq", "bits": 4}),
    "gptq-v2": (
        lambda r, s: gptq(r, s, 0, True, False),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-8": (
        lambda r, s: gptq(r, s, 1, False, False, 8),
        {"quant_method": "gptq", "bits": 8},
    ),
    "gptq-3": (
        lambda r, s: gptq(r, s, 1, True, True, 3),
        {"quant_method": "gptq", "bits": 3},
    ),
    "gptq-dynamic": (
        lambda r, s: gptq(r, s, 1, False, False, 8 if s[0] > s[1] else 4),
        {"quant_method": "gptq", "bits": 4, "dynamic": {".*(gate|up)_proj": {"bits": 8}}},
    ),
    "autoround": (
        lambda r, s: gptq(r, s, 1, True, False),
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
    ),
    "autoround-own": (
        lambda r, s: gptq(r, s, 0, True, False),
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
    ),
    "mlx-4": (lambda r, s: mlx(r, s, 4), {"group_size": 32, "bits": 4, "mode": "affine"}),
    "mlx-5": (lambda r, s: mlx(r, s, 5), {"group_size": 32, "bits": 5}),
    "awq": (lambda r, s: awq(r, s, False), {"quant_method": "awq", "bits": 4}),
    "awq-zero": (lambda r, s: awq(r, s, True), {"quant_method": "awq", "bits": 4}),
    "mxfp8": (
        lambda r, s: float8(r, s, "micro"),
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
    "mxfp4": (microscaled, {"quant_method": "compressed-tensors"}),
    "nvfp4": (lambda r, s: nvidia(r, s, True), {"quant_method": "compressed-tensors"}),
    "nvfp4-modelopt": (lambda r, s: nvidia(r, s, False), {"quant_method": "modelopt"}),
    "nf4": (lambda r, s: normal(r, s, False), {"quant_method": "bitsandbytes"}),
    "nf4-stored": (
        lambda r, s: normal(r, s, False, "float32"),
        {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "float32"},
    ),
    "nf4-nested": (lambda r, s: normal(r, s, True), {"quant_method": "bitsandbytes"}),
}

PACKED = re.compile(r"(.*(?:_proj|_proj_qkvz?|_proj_z|\.w[123]))\.weight")
"""Names of the matrices that are quantized: neither tables nor the choice of experts."""


def write_published(folder: Path, family: str, kind: str, seed: int = 0) -> Reference:
    """Writes a tiny model in a format; returns transformers' own, with the weights that the stored
    ones stand for."""
    import torch
    from safetensors.torch import load_file, save_file

    reference = Reference(folder, family, 0, **SIZES | STATES.get(family, {}))
    make, options = FORMATS[kind]
    rng, stored, plain = np.random.default_rng(seed), {}, {}
    path = folder / "model.safetensors"
    for name, tensor in load_file(path).items():
        match = PACKED.fullmatch(name)
        if match is None:
            stored[name] = plain[name] = tensor
            continue
        parts, matrix = make(rng, tuple(tensor.shape))  # type: ignore[arg-type]
        plain[name] = torch.tensor(np.ascontiguousarray(matrix, np.float32))
        for end, array in parts.items():
            stored[f"{match[1]}.{end}"] = as_torch(array)
    save_file(plain, path)
    reference.model = (
        type(reference.model)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization" if kind.startswith("mlx") else "quantization_config"] = options
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def write_gpt_oss(folder: Path) -> Reference:
    """Writes a tiny gpt-oss with experts in MXFP4, as it is published; returns transformers' own,
    with the weights that the stored ones stand for, which it has transposed."""
    import torch
    from safetensors.torch import load_file, save_file

    reference = Reference(folder, "gpt_oss", 0, hidden_size=64, intermediate_size=32)
    rng, stored = np.random.default_rng(0), {}
    path = folder / "model.safetensors"
    state = reference.model.state_dict()
    for name, tensor in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        parts, matrix = microscaled(rng, (experts * rows, columns))
        blocks = parts["weight_packed"].reshape(experts, rows, columns // 32, 16)
        stored[f"{name}_blocks"] = as_torch(blocks)
        stored[f"{name}_scales"] = as_torch(parts["weight_scale"].reshape(blocks.shape[:3]))
        each = np.float32(matrix).reshape(experts, rows, columns).swapaxes(1, 2)
        state[name].copy_(torch.tensor(np.ascontiguousarray(each)))
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def as_torch(array: np.ndarray) -> Any:
    import torch

    array = np.array(array)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.tensor(array.view(np.uint8)).view(torch.float8_e4m3fn)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)
