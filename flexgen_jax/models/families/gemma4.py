"""Gemma 4: heads of two sizes, values that are keys, and experts next to a dense block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.gemma import GEMMA3
from flexgen_jax.models.families.llama import LAYER, full_every, gated, model_of
from flexgen_jax.models.family import NORM, SEEING, Family, Fields, Find, fused, pairs, with_text
from flexgen_jax.models.parts import (
    AttentionSpec,
    ConfigError,
    ExpertsSpec,
    LayerParts,
    MLPSpec,
    NormSpec,
    Routing,
)

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    },
}
"""Defaults of transformers for fields that a config may omit."""

UNIFIED = {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
"""Defaults of Gemma 4 12B where they differ."""

SMALL_MODEL_FIELDS = {
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "use_double_wide_mlp": "feed-forward blocks of two widths",
}
"""Fields that only Gemma 4 E2B and E4B have set, and what they stand for."""


def _gemma4(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 4, of models that see, too, the part for text."""
    known_fields = {name: value for name, value in with_text(raw).items() if value is not None}
    own_defaults = UNIFIED if raw["model_type"].startswith("gemma4_unified") else {}
    raw = {**DEFAULTS, **own_defaults, **known_fields, "model_type": raw["model_type"]}
    for name, meaning in SMALL_MODEL_FIELDS.items():
        if raw.get(name):
            raise ConfigError(
                f"{name} is {raw[name]!r}: {meaning} (Gemma 4 E2B and E4B) are not supported; "
                "gemma-4-12B, 26B-A4B and 31B are"
            )
    fields = Fields(raw)
    layers = fields.count("num_hidden_layers")
    types = list(raw.get("layer_types") or full_every(6, layers))
    types[-1] = "full_attention"  # the config's value is ignored, as in transformers
    block = _block(fields)
    layer_kinds = [
        LayerParts(_attention(fields, layer_type, n), block) for n, layer_type in enumerate(types)
    ]
    model = {
        "norm": NormSpec(is_rms=True, eps=fields.number("rms_norm_eps", 1e-6)),
        "norm_place": "around",
        "embed_scale": fields.count("hidden_size") ** 0.5,
        "logit_softcap": raw.get("final_logit_softcapping"),
        "has_layer_scale": True,
    }
    return model_of(raw, layer_kinds, model, {"bos": 2, "eos": 1})


def _attention(own: Fields, layer_type: str, number: int) -> AttentionSpec:
    """Returns the attention of a layer: one that sees all tokens has heads of another size."""
    raw, is_full = own.raw, layer_type == "full_attention"
    head_dim, kv_heads = own.count("head_dim"), own.count("num_key_value_heads")
    values_are_keys = is_full and bool(raw.get("attention_k_eq_v", False))
    if is_full and "per_layer_config" in raw:  # as transformers 5 writes them
        ours = Fields(raw["per_layer_config"].get(str(number)) or {})
        head_dim = ours.count("head_dim", head_dim)
        kv_heads = ours.count("num_key_value_heads", kv_heads)
    elif is_full:
        head_dim = own.count("global_head_dim", 512)
        if values_are_keys:
            kv_heads = own.count("num_global_key_value_heads", kv_heads)
    has_bias = bool(raw.get("attention_bias", False))
    return AttentionSpec(
        own.count("num_attention_heads"),
        kv_heads,
        head_dim,
        scale=1.0,
        qkv_bias=has_bias,
        out_bias=has_bias,
        qk_norm="head",
        rotary=own.rotary(head_dim, layer_type),
        window=None if is_full else own.count("sliding_window"),
        has_value_norm=True,
        values_are_keys=values_are_keys,
    )


def _block(own: Fields) -> MLPSpec | ExpertsSpec:
    """Returns the feed-forward block of every layer."""
    activation = own.maybe("hidden_activation") or "gelu_pytorch_tanh"
    dense = gated(own, "intermediate_size", activation=activation)
    if not own.maybe("enable_moe_block"):
        return dense
    return ExpertsSpec(
        own.count("num_experts"),
        own.count("top_k_experts"),
        gated(own, "moe_intermediate_size", activation=activation),
        is_normalised=True,
        shared=dense,
        routing=Routing(is_beside=True),
    )


_EXPERTS = f"{LAYER}.experts"

GEMMA4_NAMES: dict[str, str | Find] = {
    **GEMMA3.names,
    "decoder.{i}.layer_scale": f"{LAYER}.layer_scalar",
    "decoder.{i}.router.kernel": f"{LAYER}.router.proj.weight",
    "decoder.{i}.router_scale": f"{LAYER}.router.scale",
    "decoder.{i}.router_expert_scale": f"{LAYER}.router.per_expert_scale",
    **{
        f"decoder.{{i}}.shared.{part}.kernel": f"{LAYER}.mlp.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
    **pairs("decoder.{i}.shared_result_norm", f"{LAYER}.post_feedforward_layernorm_1", NORM),
    **pairs("decoder.{i}.experts_norm", f"{LAYER}.pre_feedforward_layernorm_2", NORM),
    **pairs("decoder.{i}.experts_result_norm", f"{LAYER}.post_feedforward_layernorm_2", NORM),
    "decoder.{i}.experts.{e}.gate.kernel": fused(f"{_EXPERTS}.gate_up_proj", 0, 2),
    "decoder.{i}.experts.{e}.up.kernel": fused(f"{_EXPERTS}.gate_up_proj", 1, 2),
    "decoder.{i}.experts.{e}.down.kernel": fused(f"{_EXPERTS}.down_proj", 0, 1),
}

SINGLE_EXPERTS: dict[str, str | Find] = {
    f"decoder.{{i}}.experts.{{e}}.{part}.kernel": f"{_EXPERTS}.{{e}}.{part}_proj.weight"
    for part in ("gate", "up", "down")
}
"""Experts one by one, as quantized copies have them."""

GEMMA4 = Family(
    "gemma4",
    _gemma4,
    GEMMA4_NAMES,
    SINGLE_EXPERTS,
    prefixes=SEEING,
    ignored=(r"embed_(vision|audio)\..*",),
)
GEMMA4_TEXT = replace(GEMMA4, model_type="gemma4_text")
GEMMA4_UNIFIED = replace(GEMMA4, model_type="gemma4_unified")
