"""Models of LLaMA's shape without experts: Mistral, Phi-3, OLMo, SmolLM3, StarCoder2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.llama import (
    DEFAULT_WINDOW,
    LAYER,
    NAMES,
    full_every,
    one_window,
    read_llama,
    windows_of,
)
from flexgen_jax.models.family import LINEAR, NORM, Family, Fields, Find, joined, pairs
from flexgen_jax.models.parts import LayerParts, MLPSpec, NormSpec


def mistral(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Mistral; with `layer_types`, as in Ministral, some layers have windows."""
    raw = {"sliding_window": DEFAULT_WINDOW, **raw}
    types = raw.get("layer_types")
    windows = windows_of(raw, types) if types else one_window(raw)
    attention = {"qkv_bias": False, "out_bias": False, "windows": windows}
    return read_llama(raw, attention, ids={"bos": 1, "eos": 2})


def _phi3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Phi-3, in whose first configs longrope has other names."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    names = ("rope_type", "type")
    if any(rope.get(name) in ("su", "yarn") for name in names):
        raw = {**raw, "rope_scaling": rope | dict.fromkeys(names, "longrope")}
    attention = {"qkv_bias": False, "out_bias": False, "windows": one_window(raw)}
    attention["rotates_part"] = True
    return read_llama(raw, attention, ids={"bos": 1, "eos": 32000})


def _olmo2(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    attention = {"qkv_bias": bias, "out_bias": bias, "qk_norm": "all"}
    return read_llama(raw, attention, model={"norm_place": "result"}, ids={"eos": 50279})


def _olmo3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads OLMo 3: only layers that see all tokens have scaled rotary embeddings."""
    layers, theta = Fields(raw).count("num_hidden_layers"), 500000.0
    types = raw.get("layer_types") or full_every(4, layers)
    named = raw.get("rope_parameters") or {}
    full = {**(named.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    rope = {
        "full_attention": {"rope_theta": raw.get("rope_theta", theta), **full},
        "sliding_attention": {"rope_theta": theta, **(named.get("sliding_attention") or {})},
    }
    raw = {"rms_norm_eps": 1e-5, **raw, "rope_scaling": None, "rope_parameters": rope}
    bias = bool(raw.get("attention_bias", False))
    attention = {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "all",
        "windows": windows_of(raw, types),
        "layer_types": types,
    }
    return read_llama(raw, attention, model={"norm_place": "result"}, ids={"eos": 50279})


def _smollm3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads SmolLM3, some of whose layers have no positions."""
    raw = {"rope_theta": 2000000.0, "tie_word_embeddings": True, **raw}
    layers, every = range(Fields(raw).count("num_hidden_layers")), raw.get("no_rope_layer_interval")
    rotates = raw.get("no_rope_layers") or [(i + 1) % (every or 4) != 0 for i in layers]
    slides = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    types = raw.get("layer_types") or [
        "full_attention" if is_rotated or not slides else "sliding_attention"
        for is_rotated in rotates
    ]
    windows = windows_of(raw, types) if raw.get("use_sliding_window") else [None for _ in layers]
    bias = bool(raw.get("attention_bias", False))
    attention = {"qkv_bias": bias, "out_bias": bias, "windows": windows, "rotates": rotates}
    mlp = {"bias": bool(raw.get("mlp_bias", False))}
    return read_llama(raw, attention, mlp, ids={"bos": 128000, "eos": 128001})


def _starcoder2(raw: Mapping[str, Any]) -> ModelConfig:
    fields, bias = Fields(raw), bool(raw.get("use_bias", True))
    attention = {"qkv_bias": bias, "out_bias": bias, "windows": one_window(raw)}
    activation = raw.get("hidden_act") or "gelu_pytorch_tanh"
    mlp = {"is_gated": False, "bias": bias, "activation": activation}
    norm = NormSpec(eps=fields.number("norm_epsilon", 1e-5))
    model = {"norm": norm, "tied_head": bool(raw.get("tie_word_embeddings", True))}
    return read_llama(raw, attention, mlp, model, ids={"bos": 50256, "eos": 50256})


MISTRAL = Family("mistral", mistral, NAMES)


def _phi3_names() -> dict[str, str | Find]:
    def attention(parts: LayerParts) -> tuple[int, ...]:
        heads = parts.attention
        return heads.query_size, heads.kv_size, heads.kv_size

    def widths(parts: LayerParts) -> tuple[int, ...]:
        assert isinstance(parts.mlp, MLPSpec)
        return (parts.mlp.width,) * 2

    qkv, gate_up = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight"
    return NAMES | {
        "decoder.{i}.attention.q.kernel": joined(qkv, attention, 0),
        "decoder.{i}.attention.k.kernel": joined(qkv, attention, 1),
        "decoder.{i}.attention.v.kernel": joined(qkv, attention, 2),
        "decoder.{i}.mlp.gate.kernel": joined(gate_up, widths, 0),
        "decoder.{i}.mlp.up.kernel": joined(gate_up, widths, 1),
    }


PHI3 = Family("phi3", _phi3, _phi3_names())

OLMO2 = Family(
    "olmo2",
    _olmo2,
    NAMES
    | {
        **pairs("decoder.{i}.attention_result_norm", f"{LAYER}.post_attention_layernorm", NORM),
        **pairs("decoder.{i}.mlp_result_norm", f"{LAYER}.post_feedforward_layernorm", NORM),
    },
)

OLMO3 = Family("olmo3", _olmo3, OLMO2.names)

SMOLLM3 = Family("smollm3", _smollm3, NAMES)

STARCODER2 = Family(
    "starcoder2",
    _starcoder2,
    NAMES
    | {
        **pairs("decoder.{i}.mlp.up", f"{LAYER}.mlp.c_fc", LINEAR),
        **pairs("decoder.{i}.mlp.down", f"{LAYER}.mlp.c_proj", LINEAR),
    },
)
