"""Gemma 1 to 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.llama import LAYER, NAMES, full_every, read_llama, windows_of
from flexgen_jax.models.family import NORM, SEEING, Family, Fields, pairs, with_text
from flexgen_jax.models.parts import NormPlace, NormSpec


def _gemma(
    raw: Mapping[str, Any], attention: Mapping[str, Any], norm_place: NormPlace = "around"
) -> ModelConfig:
    fields = Fields(raw)
    hidden, scalar = fields.count("hidden_size"), fields.number("query_pre_attn_scalar", 256)
    mine = {
        "qkv_bias": bool(raw.get("attention_bias", False)),
        "out_bias": bool(raw.get("attention_bias", False)),
        "scale": scalar**-0.5,
        "softcap": raw.get("attn_logit_softcapping"),
    }
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    model = {
        "norm": NormSpec(is_rms=True, eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        "norm_place": norm_place,
        "embed_scale": hidden**0.5,
        "logit_softcap": raw.get("final_logit_softcapping"),
        "tied_head": bool(raw.get("tie_word_embeddings", True)),
    }
    ids = {"bos": 2, "eos": 1}
    return read_llama(raw, mine | dict(attention), {"activation": activation}, model, ids)


def _gemma1(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the first Gemma, whose first configs say "gelu" for its approximation."""
    raw = {"head_dim": 256, **raw}
    raw = {**raw, "query_pre_attn_scalar": Fields(raw).count("head_dim")}
    if (raw.get("hidden_activation") or raw.get("hidden_act")) == "gelu":
        raw["hidden_activation"] = "gelu_pytorch_tanh"
    return _gemma(raw, {}, norm_place="before")


def _gemma2(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"head_dim": 256, "sliding_window": 4096, **raw}
    raw = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}
    types = raw.get("layer_types") or full_every(2, Fields(raw).count("num_hidden_layers"))
    return _gemma(raw, {"windows": windows_of(raw, types)})


def _gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 3, of models that see, too, the part for text."""
    model_type, raw = raw["model_type"], with_text(raw)
    raw = {"head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 131072, **raw}
    raw = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, **raw}
    every = raw.get("sliding_window_pattern") or 6
    types = raw.get("layer_types") or full_every(every, Fields(raw).count("num_hidden_layers"))
    named = raw.get("rope_parameters") or {}
    scaling = raw.pop("rope_scaling", None) or {}  # from before transformers 5
    raw["rope_parameters"] = {
        "full_attention": {
            "rope_theta": raw.get("rope_theta", 1000000.0),
            **(named.get("full_attention") or {}),
            **scaling,
        },
        "sliding_attention": {
            "rope_theta": raw.get("rope_local_base_freq", 10000.0),
            **(named.get("sliding_attention") or {}),
        },
    }
    attention = {"qk_norm": "head", "windows": windows_of(raw, types), "layer_types": types}
    return _gemma({**raw, "model_type": model_type}, attention)


_GEMMA_NAMES = NAMES | {
    **pairs("decoder.{i}.attention_result_norm", f"{LAYER}.post_attention_layernorm", NORM),
    **pairs("decoder.{i}.mlp_norm", f"{LAYER}.pre_feedforward_layernorm", NORM),
    **pairs("decoder.{i}.mlp_result_norm", f"{LAYER}.post_feedforward_layernorm", NORM),
}

GEMMA = Family("gemma", _gemma1, NAMES)

GEMMA2 = Family("gemma2", _gemma2, _GEMMA_NAMES)

GEMMA3 = Family("gemma3_text", _gemma3, _GEMMA_NAMES)

GEMMA3_SEEING = Family(
    "gemma3",
    _gemma3,
    _GEMMA_NAMES,
    prefixes=SEEING,
)
