"""Metadata of GGUF files as Hugging Face's configs: mixtures of experts."""

from __future__ import annotations

from typing import Any

from flexgen_jax.models.gguf.dense import qwen3
from flexgen_jax.models.gguf.fields import (
    block_types,
    expert_sizes,
    has_in_some_layer,
    local_expert_sizes,
    partial_rope,
    rope_of,
    windows_by_layer,
)
from flexgen_jax.models.gguf.keys import Keys


def qwen2_moe(keys: Keys) -> dict[str, Any]:
    return expert_sizes(keys) | {
        "shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def qwen3_moe(keys: Keys) -> dict[str, Any]:
    sizes = qwen3(keys) | expert_sizes(keys)
    return sizes | {
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def routed_experts(keys: Keys) -> dict[str, Any]:
    """The sizes and the routing of mixtures of experts in DeepSeek's fields."""
    return {
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "routed_scaling_factor": float(keys.maybe("expert_weights_scale") or 1.0),
        "norm_topk_prob": bool(keys.maybe("expert_weights_norm")),
        "n_group": int(keys.maybe("expert_group_count") or 1),
        "topk_group": int(keys.maybe("expert_group_used_count") or 1),
    }


def glm4_moe(keys: Keys) -> dict[str, Any]:
    """GLM-4.5 to 4.7."""
    return (
        partial_rope(keys)
        | routed_experts(keys)
        | {
            "n_shared_experts": keys.maybe("expert_shared_count"),
            "first_k_dense_replace": keys.maybe("leading_dense_block_count") or 0,
            "attention_bias": keys.has("blk.0.attn_q.bias"),
            "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        }
    )


def hy_v3(keys: Keys) -> dict[str, Any]:
    width = keys.need("expert_feed_forward_length")
    return expert_sizes(keys) | {
        "num_shared_experts": keys.need("expert_shared_feed_forward_length") // width,
        "router_scaling_factor": float(keys.maybe("expert_weights_scale") or 1.0),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_layer_types": block_types(keys),
    }


def ernie4_5_moe(keys: Keys) -> dict[str, Any]:
    width, shared = (
        keys.need("expert_feed_forward_length"),
        keys.maybe("expert_shared_feed_forward_length"),
    )
    return {
        "moe_num_experts": keys.need("expert_count"),
        "moe_k": keys.need("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": keys.maybe("expert_shared_count")
        or (shared // width if shared else 0),
        "moe_layer_start_index": keys.maybe("leading_dense_block_count") or 0,
        "moe_layer_interval": keys.maybe("interleave_moe_layer_step") or 1,
    }


def minimax_m2(keys: Keys) -> dict[str, Any]:
    return local_expert_sizes(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "rotary_dim": keys.need("rope.dimension_count"),
    }


def gpt_oss(keys: Keys) -> dict[str, Any]:
    rope = rope_of(keys)
    if rope["rope_type"] == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope, "truncate": False}
    return local_expert_sizes(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": windows_by_layer(keys, 2),
        "rope_parameters": rope,
        "attention_bias": True,
    }


def deepseek2(keys: Keys) -> dict[str, Any]:
    """DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash: latent attention, and experts by softmax or by
    sigmoid. In files that do not say which, those by sigmoid have corrections."""
    rope, rotated = rope_of(keys), keys.need("rope.dimension_count")
    weight = keys.maybe("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and weight is not None:
        mscale_all = float(weight) / 0.1
        is_v2_lite = abs(mscale_all - 1.0) > 1e-3
        rope |= {"mscale_all_dim": mscale_all, "mscale": mscale_all if is_v2_lite else 1.0}
        rope.pop("attention_factor", None)
    keys.skip("leading_dense_block_count")  # the tensors say it, too
    is_corrected = has_in_some_layer(keys, "exp_probs_b.bias")
    by_sigmoid = int(keys.maybe("expert_gating_func") or 1 + is_corrected) == 2
    sizes = routed_experts(keys)
    has_groups = sizes["n_group"] > 1
    # Only newer files tell the sizes of heads from those of the cache.
    lengths = [f"attention.{side}_length" for side in ("key", "value")]
    size, value = (keys.maybe(f"{length}_mla") or keys.need(length) for length in lengths)
    keys.skip(*lengths)
    return sizes | {
        "model_type": "deepseek_v3" if by_sigmoid else "deepseek_v2",
        "head_dim": None,
        "num_key_value_heads": keys.need("attention.head_count"),
        "rope_parameters": rope,
        "q_lora_rank": keys.maybe("attention.q_lora_rank"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": size - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "n_shared_experts": keys.maybe("expert_shared_count") or 0,
        "first_k_dense_replace": block_types(keys).count("dense"),
        "topk_method": None if by_sigmoid else f"{'group_limited_' * has_groups}greedy",
    }


def mistral4(keys: Keys) -> dict[str, Any]:
    """Mistral Small 4, which scales queries by position where the file says so."""
    config = deepseek2(keys) | {"model_type": "mistral4"}
    beta = keys.maybe("attention.temperature_scale")
    if beta:
        rope = config["rope_parameters"]
        keys.expect("attention.temperature_length", rope["original_max_position_embeddings"])
        rope["llama_4_scaling_beta"] = float(beta)
    return config


def indexed(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V3.2 and GLM-5, whose indexer has no effect in contexts of its `top_k` tokens."""
    keys.skip(*(f"attention.indexer.{name}" for name in ("head_count", "key_length", "types")))
    config = deepseek2(keys) | {"index_topk": keys.need("attention.indexer.top_k")}
    del config["model_type"]
    return config
