"""Metadata of GGUF files as Hugging Face's configs: models of LLaMA's and Gemma's kind, some of
which may have experts."""

from __future__ import annotations

from typing import Any

from flexgen_jax.models.gguf.fields import (
    biases,
    layer_count,
    local_expert_sizes,
    partial_rope,
    plain_rope,
    rope_of,
    windows_by_layer,
)
from flexgen_jax.models.gguf.keys import Keys


def llama(keys: Keys) -> dict[str, Any]:
    size = keys.maybe("rope.dimension_count")
    extra_fields = {"head_dim": keys.maybe("attention.key_length") or size}
    extra_fields["mlp_bias"] = keys.has("blk.0.ffn_up.bias")
    extra_fields["attention_bias"] = keys.has("blk.0.attn_q.bias")
    if not keys.maybe("expert_count"):
        return extra_fields
    return extra_fields | local_expert_sizes(keys) | {"model_type": "mixtral"}


def qwen3(keys: Keys) -> dict[str, Any]:
    return {"head_dim": keys.need("attention.key_length")}


def gemma2(keys: Keys) -> dict[str, Any]:
    layers, size = layer_count(keys), keys.need("attention.key_length")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "attn_logit_softcapping": keys.maybe("attn_logit_softcapping"),
        "final_logit_softcapping": keys.maybe("final_logit_softcapping"),
        # The largest model alone scales queries by another number than the size of a head.
        "query_pre_attn_scalar": hidden // heads if layers == 46 else size,
        "layer_types": windows_by_layer(keys, 2),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def gemma3(keys: Keys) -> dict[str, Any]:
    """Layers with a window have frequencies of their own."""
    layers, size = layer_count(keys), keys.need("attention.key_length")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    rope = rope_of(keys)
    return {
        "head_dim": size,
        "sliding_window": keys.need("attention.sliding_window"),
        # The largest model alone scales queries by another number than the size of a head.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else size,
        "layer_types": windows_by_layer(keys, 6),
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": keys.maybe("rope.freq_base") or 1e6},
            "sliding_attention": plain_rope(keys, 10000.0),
        },
        "hidden_activation": "gelu_pytorch_tanh",
    }


def gemma4(keys: Keys) -> dict[str, Any]:
    """Gemma 4: layers without a window have heads of a size of their own."""
    types = windows_by_layer(keys, 0)
    if len({*types}) == 1:
        raise keys.refused("attention.sliding_window_pattern", "the same for all layers")
    groups = dict(zip(types, keys.by_layer("attention.head_count_kv", len(types)), strict=True))
    full, windowed = types.index("full_attention"), types.index("sliding_attention")
    size, size_swa = keys.need("attention.key_length"), keys.need("attention.key_length_swa")
    for name in ("attention.value_length", "attention.value_length_swa"):
        keys.expect(name, size_swa if name.endswith("swa") else size)
    keys.expect("rope.dimension_count_swa", size_swa)
    factors = keys.floats("rope_freqs.weight") if keys.has("rope_freqs.weight") else [1.0]
    rope = {
        "rope_type": "proportional",
        "rope_theta": float(keys.maybe("rope.freq_base") or 1e6),
        "partial_rotary_factor": factors.count(1.0) / len(factors),
    }
    experts = {
        "enable_moe_block": bool(keys.maybe("expert_count")),
        "num_experts": keys.maybe("expert_count"),
        "top_k_experts": keys.maybe("expert_used_count"),
        "moe_intermediate_size": keys.maybe("expert_feed_forward_length"),
    }
    return experts | {
        "head_dim": size_swa,
        "global_head_dim": size,
        "num_key_value_heads": int(groups["sliding_attention"]),
        "num_global_key_value_heads": int(groups["full_attention"]),
        "attention_k_eq_v": not keys.has(f"blk.{full}.attn_v.weight"),
        "attention_bias": keys.has(f"blk.{windowed}.attn_q.bias"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": types,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": plain_rope(keys, 10000.0),
        },
        "final_logit_softcapping": keys.maybe("final_logit_softcapping"),
        "hidden_size_per_layer_input": int(keys.maybe("embedding_length_per_layer_input") or 0),
        "num_kv_shared_layers": int(keys.maybe("attention.shared_kv_layers") or 0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def phi3(keys: Keys) -> dict[str, Any]:
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    size = hidden // heads
    rope, share = rope_of(keys), keys.maybe("rope.scaling.attn_factor")
    if keys.has("rope_factors_long.weight"):
        rope = rope | {
            "rope_type": "longrope",
            "long_factor": keys.floats("rope_factors_long.weight"),
            "short_factor": keys.floats("rope_factors_short.weight"),
            "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
        }
        if share is not None:
            rope["attention_factor"] = float(share)
    rope["partial_rotary_factor"] = (keys.maybe("rope.dimension_count") or size) / size
    return {
        "head_dim": size,
        "sliding_window": keys.maybe("attention.sliding_window") or None,
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
    }


def olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 2; with windows, OLMo 3."""
    window = keys.maybe("attention.sliding_window")
    if not window:
        return {}
    plain = plain_rope(keys, float(keys.need("rope.freq_base")))
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": windows_by_layer(keys, 4),
        "rope_parameters": {"full_attention": rope_of(keys), "sliding_attention": plain},
    }


def smollm3(_keys: Keys) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4, "use_sliding_window": False}


def starcoder2(keys: Keys) -> dict[str, Any]:
    return {
        "norm_epsilon": keys.need("attention.layer_norm_epsilon"),
        "use_bias": keys.has("blk.0.attn_q.bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.maybe("attention.sliding_window"),
    }


def exaone4(keys: Keys) -> dict[str, Any]:
    """EXAONE 4, whose small models have no windows."""
    window = keys.maybe("attention.sliding_window") or None
    layers = layer_count(keys)
    return {
        "sliding_window": window,
        "layer_types": windows_by_layer(keys, 4) if window else ["full_attention"] * layers,
    }


def glm4(keys: Keys) -> dict[str, Any]:
    return partial_rope(keys) | biases(keys)


def mistral3(keys: Keys) -> dict[str, Any]:
    """Ministral 3, and the part for text of Mistral Small 3."""
    rope, beta = rope_of(keys), keys.maybe("attention.temperature_scale")
    if rope["rope_type"] == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": keys.maybe("rope.scaling.yarn_log_multiplier")}
        rope["llama_4_scaling_beta"] = None if beta is None else float(beta)
    return {"sliding_window": None, "rope_parameters": rope}
