"""Models of LLaMA's shape without experts: Mistral, Phi-3, OLMo, SmolLM3, StarCoder2, ERNIE 4.5,
Seed-OSS, EXAONE 4, GLM-4."""

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


def _ernie4_5(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the dense models of ERNIE 4.5, whose rotary embeddings turn neighbours."""
    raw = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, **raw}
    raw = {"tie_word_embeddings": True, **raw}
    bias = bool(raw.get("use_bias", False))
    attention = {"qkv_bias": bias, "out_bias": bias, "is_interleaved": True}
    return read_llama(raw, attention, {"bias": bias}, ids={"bos": 1, "eos": 2})


def _seed_oss(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"head_dim": 128, **raw}
    attention = {
        "qkv_bias": bool(raw.get("attention_bias", True)),
        "out_bias": bool(raw.get("attention_out_bias", False)),
    }
    mlp = {"bias": bool(raw.get("mlp_bias", False))}
    return read_llama(raw, attention, mlp, ids={"bos": 0, "eos": 2})


def _exaone4(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads EXAONE 4: of a model with windows, layers that see all tokens have no positions."""
    raw = {"rms_norm_eps": 1e-5, "sliding_window": DEFAULT_WINDOW, **raw}
    layers, every = Fields(raw).count("num_hidden_layers"), raw.get("sliding_window_pattern") or 4
    has_windows = raw["sliding_window"] is not None
    if isinstance(every, str):  # such as "LLLG"
        every = len(every)
    types = raw.get("layer_types") or (
        full_every(every, layers) if has_windows else ["full_attention"] * layers
    )
    attention = {
        "qkv_bias": False,
        "out_bias": False,
        "qk_norm": "head",
        "windows": windows_of(raw, types),
        "rotates": [not has_windows or t == "sliding_attention" for t in types],
    }
    return read_llama(raw, attention, model={"norm_place": "result"}, ids={"bos": 0, "eos": 2})


def _glm4(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4-0414 and GLM-Z1."""
    raw = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, **raw}
    attention = {
        "qkv_bias": bool(raw.get("attention_bias", True)),
        "out_bias": False,
        "rotates_part": True,
        "is_interleaved": True,
    }
    ids = {"eos": [151329, 151336, 151338]}
    return read_llama(raw, attention, model={"norm_place": "around"}, ids=ids)


MISTRAL = Family("mistral", mistral, NAMES)

ERNIE4_5 = Family("ernie4_5", _ernie4_5, NAMES)

SEED_OSS = Family("seed_oss", _seed_oss, NAMES)


def _widths(parts: LayerParts) -> tuple[int, ...]:
    assert isinstance(parts.mlp, MLPSpec)
    return (parts.mlp.width,) * 2


GATE_UP: dict[str, str | Find] = {
    f"decoder.{{i}}.mlp.{side}.kernel": joined(f"{LAYER}.mlp.gate_up_proj.weight", _widths, n)
    for n, side in enumerate(("gate", "up"))
}
"""The two matrices of a gated block, stored as one."""


def _phi3_names() -> dict[str, str | Find]:
    def attention(parts: LayerParts) -> tuple[int, ...]:
        heads = parts.attention
        return heads.query_size, heads.kv_size, heads.kv_size

    qkv = f"{LAYER}.self_attn.qkv_proj.weight"
    return NAMES | {
        "decoder.{i}.attention.q.kernel": joined(qkv, attention, 0),
        "decoder.{i}.attention.k.kernel": joined(qkv, attention, 1),
        "decoder.{i}.attention.v.kernel": joined(qkv, attention, 2),
        **GATE_UP,
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

EXAONE4 = Family("exaone4", _exaone4, OLMO2.names)

GLM4 = Family(
    "glm4",
    _glm4,
    NAMES
    | {
        **GATE_UP,
        **pairs("decoder.{i}.attention_result_norm", f"{LAYER}.post_self_attn_layernorm", NORM),
        **pairs("decoder.{i}.mlp_result_norm", f"{LAYER}.post_mlp_layernorm", NORM),
    },
)

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
