"""Qwen 2 and 3, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.llama import (
    EXPERT_NAMES,
    FUSED_EXPERTS,
    LAYER,
    NAMES,
    read_llama,
    windows_of,
)
from flexgen_jax.models.family import SEEING, Family, Fields, fused, with_text


def _qwen_types(raw: Mapping[str, Any]) -> list[str]:
    """Returns which layers of Qwen2 and 3 have windows, where the config does not say: the layers
    from `max_window_layers` on; in Qwen2-MoE every other one before it; in Qwen3-MoE all."""
    first_full, model_type = raw.get("max_window_layers", 28), raw["model_type"]
    layers = range(Fields(raw).count("num_hidden_layers"))
    if model_type == "qwen2_moe":
        slide = [i % 2 == 0 and i < first_full for i in layers]
    else:
        slide = [model_type == "qwen3_moe" or i >= first_full for i in layers]
    return ["sliding_attention" if has_window else "full_attention" for has_window in slide]


def _qwen(raw: Mapping[str, Any], has_bias: bool, norm: str | None = None) -> ModelConfig:
    layers = Fields(raw).count("num_hidden_layers")
    types = raw.get("layer_types") or _qwen_types(raw)
    if not raw.get("use_sliding_window", False):
        types = ["full_attention"] * layers
    attention = {"qkv_bias": has_bias, "out_bias": False, "windows": windows_of(raw, types)}
    if norm is not None:
        is_biased = bool(raw.get("attention_bias", False))
        attention |= {"qk_norm": norm, "qkv_bias": is_biased, "out_bias": is_biased}
    return read_llama(raw, attention)


def _qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    return _qwen(raw, has_bias=bool(raw.get("qkv_bias", True)))


def _qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    return _qwen({"head_dim": 128, **raw}, has_bias=False, norm="head")


def _qwen3_vl(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the part for text of Qwen3-VL: for text, its rotary embeddings are ordinary ones."""
    raw = {"rope_theta": 500000.0, **with_text(raw), "use_sliding_window": False}
    return _qwen({"norm_topk_prob": True, **raw}, has_bias=False, norm="head")


QWEN2 = Family("qwen2", _qwen2, NAMES)

QWEN3 = Family("qwen3", _qwen3, NAMES)

QWEN2_MOE = Family("qwen2_moe", _qwen2, EXPERT_NAMES, FUSED_EXPERTS)

QWEN3_MOE = Family("qwen3_moe", _qwen3, EXPERT_NAMES, FUSED_EXPERTS)
_FUSED = f"{LAYER}.mlp.experts"

QWEN3_VL = Family("qwen3_vl", _qwen3_vl, NAMES, prefixes=SEEING)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    _qwen3_vl,
    EXPERT_NAMES
    | {
        "decoder.{i}.experts.{e}.gate.kernel": fused(f"{_FUSED}.gate_up_proj", 0, 2, True),
        "decoder.{i}.experts.{e}.up.kernel": fused(f"{_FUSED}.gate_up_proj", 1, 2, True),
        "decoder.{i}.experts.{e}.down.kernel": fused(f"{_FUSED}.down_proj", 0, 1, True),
    },
    FUSED_EXPERTS,
    prefixes=SEEING,
)
