"""GGUF's architectures: their metadata as Hugging Face's configs, and their names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.container import GgufFile
from flexgen_jax.models.gguf.keys import Keys, rope_of

PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
"""Parts of a layer, without ".weight"."""

POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OF_GEMMA = POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}


def _shared(block: str) -> dict[str, str]:
    """Returns the names of a block that all tokens pass through, next to the experts."""
    return {f"ffn_{x}_shexp": f"mlp.{block}.{x}_proj" for x in ("gate", "up", "down")}


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    # Hugging Face's name of the family, unless `config` has another.
    model_type: str
    # Fields of config.json that differ from the common ones.
    config: Callable[[Keys], dict[str, Any]]
    # Names of a layer's parts besides `PARTS`; where the key has an end such as ".scale", without
    # an end of their own.
    parts: Mapping[str, str] = field(default_factory=dict)
    # What the names of experts begin with, and their matrices.
    experts: tuple[str, Mapping[str, str]] = ("mlp.", {})
    # Whether the rows of queries and keys that turn together are neighbors.
    is_woven: bool = False
    # Whether norms are stored with 1 added.
    adds_one: bool = False
    # Values of metadata that `config` does not read, besides those of `config.NEUTRAL`.
    expects: Mapping[str, float] = field(default_factory=dict)


def layer_count(keys: Keys) -> int:
    """Returns the number of layers. The last blocks of some models predict further tokens, which
    inference does without."""
    return int(keys.need("block_count")) - int(keys.maybe("nextn_predict_layers") or 0)


def _types_of(keys: Keys, name: str, every: int, kinds: tuple[str, str]) -> list[str]:
    """Returns the type of each layer. Metadata `name` is an array, where true means `kinds[0]`, or
    a number n: every n-th layer is of `kinds[1]`. every: n, if there is no such metadata."""
    first, other = kinds
    layers, said = layer_count(keys), keys.maybe(name)
    if np.ndim(said):
        return [first if said[layer] else other for layer in range(layers)]
    every = every if said is None else int(said)
    return [other if every and layer % every == every - 1 else first for layer in range(layers)]


def _windows(keys: Keys, every: int) -> list[str]:
    """Returns which layers have a window; every `every`th one has none, unless the file says
    otherwise."""
    kinds = "sliding_attention", "full_attention"
    return _types_of(keys, "attention.sliding_window_pattern", every, kinds)


def _llama(keys: Keys) -> dict[str, Any]:
    size = keys.maybe("rope.dimension_count")
    extra_fields = {"head_dim": keys.maybe("attention.key_length") or size}
    extra_fields["mlp_bias"] = keys.has("blk.0.ffn_up.bias")
    extra_fields["attention_bias"] = keys.has("blk.0.attn_q.bias")
    if not keys.maybe("expert_count"):
        return extra_fields
    return extra_fields | _local_experts(keys) | {"model_type": "mixtral"}


def _qwen3(keys: Keys) -> dict[str, Any]:
    return {"head_dim": keys.need("attention.key_length")}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    sizes = _qwen3(keys) | _experts(keys)
    return sizes | {
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    """Layers with a window have frequencies of their own."""
    layers, size = layer_count(keys), keys.need("attention.key_length")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    rope = rope_of(keys)
    return {
        "head_dim": size,
        "sliding_window": keys.need("attention.sliding_window"),
        # The largest model alone scales queries by another number than the size of a head.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else size,
        "layer_types": _windows(keys, 6),
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": keys.maybe("rope.freq_base") or 1e6},
            "sliding_attention": _plain_rope(keys, 10000.0),
        },
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _plain_rope(keys: Keys, theta: float) -> dict[str, Any]:
    """Returns the rotary embeddings of layers with a window; theta: unless the file says it."""
    theta = float(keys.maybe("rope.freq_base_swa") or theta)
    return {"rope_type": "default", "rope_theta": theta}


def _gemma2(keys: Keys) -> dict[str, Any]:
    layers, size = layer_count(keys), keys.need("attention.key_length")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "attn_logit_softcapping": keys.maybe("attn_logit_softcapping"),
        "final_logit_softcapping": keys.maybe("final_logit_softcapping"),
        # The largest model alone scales queries by another number than the size of a head.
        "query_pre_attn_scalar": hidden // heads if layers == 46 else size,
        "layer_types": _windows(keys, 2),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma4(keys: Keys) -> dict[str, Any]:
    """Gemma 4: layers without a window have heads of a size of their own."""
    types, groups = _windows(keys, 0), keys.need("attention.head_count_kv")
    of_layers = dict(zip(types, groups if np.ndim(groups) else [groups] * len(types), strict=False))
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
        "num_key_value_heads": int(of_layers["sliding_attention"]),
        "num_global_key_value_heads": int(of_layers["full_attention"]),
        "attention_k_eq_v": not keys.has(f"blk.{full}.attn_v.weight"),
        "attention_bias": keys.has(f"blk.{windowed}.attn_q.bias"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": types,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": _plain_rope(keys, 10000.0),
        },
        "final_logit_softcapping": keys.maybe("final_logit_softcapping"),
        "hidden_size_per_layer_input": int(keys.maybe("embedding_length_per_layer_input") or 0),
        "num_kv_shared_layers": int(keys.maybe("attention.shared_kv_layers") or 0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi3(keys: Keys) -> dict[str, Any]:
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


def _olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 2; with windows, OLMo 3."""
    window = keys.maybe("attention.sliding_window")
    if not window:
        return {}
    plain = _plain_rope(keys, float(keys.need("rope.freq_base")))
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _windows(keys, 4),
        "rope_parameters": {"full_attention": rope_of(keys), "sliding_attention": plain},
    }


def _smollm3(_keys: Keys) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _starcoder2(keys: Keys) -> dict[str, Any]:
    return {
        "norm_epsilon": keys.need("attention.layer_norm_epsilon"),
        "use_bias": keys.has("blk.0.attn_q.bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.maybe("attention.sliding_window"),
    }


def _experts(keys: Keys) -> dict[str, Any]:
    """The sizes that most mixtures of experts have."""
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.maybe("expert_feed_forward_length"),
    }


def _local_experts(keys: Keys) -> dict[str, Any]:
    """The sizes of mixtures of experts in the fields that Mixtral has."""
    return {
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
    }


def _partial_rope(keys: Keys) -> dict[str, Any]:
    """The rotation of a head's first elements alone."""
    share = keys.need("rope.dimension_count") / keys.need("attention.key_length")
    return {
        "partial_rotary_factor": share,
        "rope_parameters": rope_of(keys) | {"partial_rotary_factor": share},
    }


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    return _experts(keys) | {
        "shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    """GLM-4.5 to 4.7."""
    return _partial_rope(keys) | {
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "n_shared_experts": keys.maybe("expert_shared_count"),
        "first_k_dense_replace": keys.maybe("leading_dense_block_count") or 0,
        "routed_scaling_factor": float(keys.maybe("expert_weights_scale") or 1.0),
        "norm_topk_prob": bool(keys.maybe("expert_weights_norm")),
        "n_group": keys.maybe("expert_group_count"),
        "topk_group": keys.maybe("expert_group_used_count"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def _qwen3_next(keys: Keys) -> dict[str, Any]:
    width = keys.need("expert_shared_feed_forward_length")
    own = {"shared_expert_intermediate_size": width, "norm_topk_prob": True}
    return _qwen3(keys) | _experts(keys) | _partial_rope(keys) | _delta_net(keys) | own


def _delta_net(keys: Keys) -> dict[str, Any]:
    """The layers that keep a state."""
    return {
        "layer_types": _types_of(
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


def _qwen3_5(keys: Keys) -> dict[str, Any]:
    """Qwen3.5 and 3.6, with or without experts."""
    has_experts = bool(keys.maybe("expert_count"))
    experts = _experts(keys) if has_experts else {}
    width = keys.maybe("expert_shared_feed_forward_length")
    own = {
        "model_type": "qwen3_5_moe_text" if has_experts else "qwen3_5_text",
        "linear_heads_are_tiled": True,
        "shared_expert_intermediate_size": width,
    }
    return _qwen3(keys) | experts | _partial_rope(keys) | _delta_net(keys) | own


def _block_types(keys: Keys) -> list[str]:
    """Returns whether the block of each layer has experts ("sparse") or not ("dense")."""
    layers = range(layer_count(keys))
    return ["sparse" if keys.has(f"blk.{n}.ffn_gate_inp.weight") else "dense" for n in layers]


def _hy_v3(keys: Keys) -> dict[str, Any]:
    width = keys.need("expert_feed_forward_length")
    return _experts(keys) | {
        "num_shared_experts": keys.need("expert_shared_feed_forward_length") // width,
        "router_scaling_factor": float(keys.maybe("expert_weights_scale") or 1.0),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_layer_types": _block_types(keys),
    }


def _mistral3(keys: Keys) -> dict[str, Any]:
    """Ministral 3, and the part for text of Mistral Small 3."""
    rope, beta = rope_of(keys), keys.maybe("attention.temperature_scale")
    if rope["rope_type"] == "yarn":
        rope |= {"mscale": 1.0, "mscale_all_dim": keys.maybe("rope.scaling.yarn_log_multiplier")}
        rope["llama_4_scaling_beta"] = None if beta is None else float(beta)
    return {"sliding_window": None, "rope_parameters": rope}


def _deepseek2(keys: Keys) -> dict[str, Any]:
    """DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash: latent attention, and experts by softmax or by
    sigmoid. In files that do not say which, those by sigmoid have corrections."""
    rope, rotated = rope_of(keys), keys.need("rope.dimension_count")
    weight = keys.maybe("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and weight is not None:
        mscale_all = float(weight) / 0.1
        is_v2_lite = abs(mscale_all - 1.0) > 1e-3
        rope |= {"mscale_all_dim": mscale_all, "mscale": mscale_all if is_v2_lite else 1.0}
        rope.pop("attention_factor", None)
    kinds = _block_types(keys)
    keys.maybe("leading_dense_block_count")  # tensors say it, too
    is_corrected = any(keys.has(f"blk.{n}.exp_probs_b.bias") for n in range(len(kinds)))
    by_sigmoid = int(keys.maybe("expert_gating_func") or 1 + is_corrected) == 2
    groups = int(keys.maybe("expert_group_count") or 1)
    has_groups = groups > 1
    # Only newer files tell the sizes of heads from those of the cache.
    size, value = (
        keys.maybe(f"attention.{side}_length_mla") or keys.need(f"attention.{side}_length")
        for side in ("key", "value")
    )
    for side in ("key", "value"):
        keys.maybe(f"attention.{side}_length")
    return {
        "model_type": "deepseek_v3" if by_sigmoid else "deepseek_v2",
        "head_dim": None,
        "num_key_value_heads": keys.need("attention.head_count"),
        "rope_parameters": rope,
        "q_lora_rank": keys.maybe("attention.q_lora_rank"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": size - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "n_shared_experts": keys.maybe("expert_shared_count") or 0,
        "routed_scaling_factor": float(keys.maybe("expert_weights_scale") or 1.0),
        "norm_topk_prob": bool(keys.maybe("expert_weights_norm")),
        "n_group": groups,
        "topk_group": int(keys.maybe("expert_group_used_count") or 1),
        "first_k_dense_replace": kinds.index("sparse"),
        "topk_method": None if by_sigmoid else f"{'group_limited_' * has_groups}greedy",
    }


def _attention_biases(keys: Keys) -> dict[str, Any]:
    """Whether products have biases, in the fields of several families."""
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "attention_out_bias": keys.has("blk.0.attn_output.bias"),
        "use_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }


def _exaone4(keys: Keys) -> dict[str, Any]:
    """EXAONE 4, whose small models have no windows."""
    window = keys.maybe("attention.sliding_window") or None
    layers = layer_count(keys)
    return {
        "sliding_window": window,
        "layer_types": _windows(keys, 4) if window else ["full_attention"] * layers,
    }


def _glm4(keys: Keys) -> dict[str, Any]:
    return _partial_rope(keys) | _attention_biases(keys)


def _mistral4(keys: Keys) -> dict[str, Any]:
    """Mistral Small 4, which scales queries by position where the file says so."""
    config = _deepseek2(keys) | {"model_type": "mistral4"}
    beta = keys.maybe("attention.temperature_scale")
    if beta:
        rope = config["rope_parameters"]
        keys.expect("attention.temperature_length", rope["original_max_position_embeddings"])
        rope["llama_4_scaling_beta"] = float(beta)
    return config


def _indexed(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V3.2 and GLM-5, whose indexer has no effect in contexts of its `top_k` tokens."""
    for name in ("head_count", "key_length", "types"):
        keys.maybe(f"attention.indexer.{name}")
    config = _deepseek2(keys) | {"index_topk": keys.need("attention.indexer.top_k")}
    del config["model_type"]
    return config


def _lfm2(keys: Keys) -> dict[str, Any]:
    """LFM2, with or without experts. Layers without heads of keys have a short convolution."""
    groups = [int(n) for n in keys.need("attention.head_count_kv")]
    experts = _experts(keys) if keys.maybe("expert_count") else {}
    return experts | {
        "num_key_value_heads": max(groups),
        "layer_types": ["full_attention" if n else "conv" for n in groups],
        "norm_eps": keys.maybe("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "conv_bias": any(keys.has(f"blk.{n}.shortconv.in_proj.bias") for n in range(len(groups))),
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": int(keys.maybe("leading_dense_block_count") or 0),
        "use_expert_bias": any(keys.has(f"blk.{n}.exp_probs_b.bias") for n in range(len(groups))),
    }


def _ernie4_5_moe(keys: Keys) -> dict[str, Any]:
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


def _minimax_m2(keys: Keys) -> dict[str, Any]:
    return _local_experts(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "rotary_dim": keys.need("rope.dimension_count"),
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    rope = rope_of(keys)
    if rope["rope_type"] == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope, "truncate": False}
    return _local_experts(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": _windows(keys, 2),
        "rope_parameters": rope,
        "attention_bias": True,
    }


BY_SIGMOID = {"expert_gating_func": 2.0}
ROUTERS = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
W_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
MIXTRAL = ("block_sparse_moe.", W_MATRICES)
SPARSE_ROUTER = {"ffn_gate_inp": "block_sparse_moe.gate"}

OF_QWEN3_5 = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_shared("shared_expert"),
}

OF_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    **ROUTERS,
    **_shared("shared_experts"),
}

W_EXPERTS = ("feed_forward.", W_MATRICES)
OF_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, SPARSE_ROUTER, MIXTRAL, is_woven=True),
    "qwen2": Architecture("qwen2", lambda _keys: {}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _qwen2_moe,
        {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_shared("shared_expert")},
    ),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "qwen3vl": Architecture("qwen3", _qwen3),
    "qwen3vlmoe": Architecture("qwen3_moe", _qwen3_moe),
    "gemma2": Architecture(
        "gemma2",
        _gemma2,
        OF_GEMMA,
        adds_one=True,
    ),
    "gemma3": Architecture("gemma3_text", _gemma3, OF_GEMMA, adds_one=True),
    "gemma4": Architecture(
        "gemma4_text",
        _gemma4,
        {
            **OF_GEMMA,
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
        },
        experts=("", {}),
    ),
    "phi3": Architecture("phi3", _phi3, {"ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Architecture("olmo2", _olmo2, POST_NORMS),
    "smollm3": Architecture("smollm3", _smollm3, is_woven=True),
    "starcoder2": Architecture(
        "starcoder2", _starcoder2, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        _glm4_moe,
        {**POST_NORMS, **ROUTERS, **_shared("shared_experts")},
        expects=BY_SIGMOID,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        _ernie4_5_moe,
        {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias", **_shared("shared_experts")},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        _minimax_m2,
        {**SPARSE_ROUTER, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        MIXTRAL,
        expects=BY_SIGMOID,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _qwen3_next,
        OF_QWEN3_5 | {"ssm_ba": "linear_attn.in_proj_ba"},
        adds_one=True,
    ),
    "qwen35": Architecture("qwen3_5_text", _qwen3_5, OF_QWEN3_5, adds_one=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", _qwen3_5, OF_QWEN3_5, adds_one=True),
    "hy_v3": Architecture(
        "hy_v3",
        _hy_v3,
        {
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.e_score_correction_bias",
            **_shared("shared_experts"),
        },
        expects=BY_SIGMOID | {"expert_weights_norm": 1.0},
    ),
    "mistral3": Architecture("ministral3", _mistral3, is_woven=True),
    "deepseek2": Architecture("deepseek_v3", _deepseek2, OF_LATENT),
    "lfm2": Architecture("lfm2", _lfm2, OF_LFM2),
    "lfm2moe": Architecture("lfm2_moe", _lfm2, OF_LFM2, W_EXPERTS, expects=BY_SIGMOID),
    "mistral4": Architecture("mistral4", _mistral4, OF_LATENT),
    "ernie4_5": Architecture("ernie4_5", _attention_biases),
    "seed_oss": Architecture(
        "seed_oss", _attention_biases, {"post_attention_norm": "post_attention_layernorm"}
    ),
    "exaone4": Architecture("exaone4", _exaone4, POST_NORMS),
    "glm4": Architecture(
        "glm4",
        _glm4,
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gemma": Architecture("gemma", _attention_biases, adds_one=True),
    "deepseek32": Architecture("deepseek_v32", _indexed, OF_LATENT),
    "glm-dsa": Architecture("glm_moe_dsa", _indexed, OF_LATENT),
    "gpt-oss": Architecture(
        "gpt_oss",
        _gpt_oss,
        {**POST_NORMS, "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        expects={"expert_gating_func": 3.0},
    ),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Returns a file's architecture; raises `CheckpointError` for one that is not read."""
    name = str(file.metadata.get("general.architecture", ""))
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {name!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}. Get the model as safetensors"
        )
    return ARCHITECTURES[name]
