"""Metadata of GGUF files as Hugging Face's configs: models with layers that do not attend."""

from __future__ import annotations

from typing import Any

from flexgen_jax.models.gguf.dense import qwen3
from flexgen_jax.models.gguf.fields import (
    expert_sizes,
    has_in_some_layer,
    layer_count,
    partial_rope,
    types_by_layer,
)
from flexgen_jax.models.gguf.keys import Keys


def qwen3_next(keys: Keys) -> dict[str, Any]:
    width = keys.need("expert_shared_feed_forward_length")
    own = {"shared_expert_intermediate_size": width, "norm_topk_prob": True}
    return qwen3(keys) | expert_sizes(keys) | partial_rope(keys) | delta_net(keys) | own


def delta_net(keys: Keys) -> dict[str, Any]:
    """The layers that keep a state."""
    return {
        "layer_types": types_by_layer(
            keys,
            "attention.recurrent_layers",
            int(keys.maybe("full_attention_interval") or 4),
            ("linear_attention", "full_attention"),
        ),
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": keys.need("ssm.time_step_rank"),
        "linear_value_head_dim": keys.need("ssm.inner_size") // keys.need("ssm.time_step_rank"),
    }


def qwen3_5(keys: Keys) -> dict[str, Any]:
    """Qwen3.5 and 3.6, with or without experts."""
    experts = expert_sizes(keys) if keys.maybe("expert_count") else {}
    width = keys.maybe("expert_shared_feed_forward_length")
    own = {"linear_heads_are_tiled": True, "shared_expert_intermediate_size": width}
    return qwen3(keys) | experts | partial_rope(keys) | delta_net(keys) | own


def lfm2(keys: Keys) -> dict[str, Any]:
    """LFM2, with or without experts. Layers without heads of keys have a short convolution."""
    groups = [int(n) for n in keys.by_layer("attention.head_count_kv", layer_count(keys))]
    experts = expert_sizes(keys) if keys.maybe("expert_count") else {}
    return experts | {
        "num_key_value_heads": max(groups),
        "layer_types": ["full_attention" if n else "conv" for n in groups],
        "norm_eps": keys.maybe("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "conv_bias": has_in_some_layer(keys, "shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": int(keys.maybe("leading_dense_block_count") or 0),
        "use_expert_bias": has_in_some_layer(keys, "exp_probs_b.bias"),
    }
