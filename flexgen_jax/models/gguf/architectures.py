"""GGUF's architectures: their metadata as Hugging Face's configs, and their names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    # Names of a layer's parts besides `PARTS`.
    parts: Mapping[str, str] = field(default_factory=dict)
    # The experts' block, and their matrices.
    experts: tuple[str, Mapping[str, str]] = ("mlp", {})
    # Whether the rows of queries and keys that turn together are neighbors.
    is_woven: bool = False
    # Whether norms are stored with 1 added.
    adds_one: bool = False
    # Metadata of `config.NEUTRAL` that the config does.
    done: frozenset[str] = frozenset()


def _llama(keys: Keys) -> dict[str, Any]:
    size = keys.maybe("rope.dimension_count")
    extra_fields = {"head_dim": keys.maybe("attention.key_length") or size, "mlp_bias": False}
    extra_fields["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
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
    """Five layers in six have a window, and the usual frequencies."""
    layers, size = keys.need("block_count"), keys.need("attention.key_length")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    rope = rope_of(keys)
    return {
        "head_dim": size,
        "sliding_window": keys.need("attention.sliding_window"),
        # The largest model alone scales queries by another number than the size of a head.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else size,
        "layer_types": [
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": keys.maybe("rope.freq_base") or 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    layers, size = keys.need("block_count"), keys.need("attention.key_length")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "attn_logit_softcapping": keys.maybe("attn_logit_softcapping"),
        "final_logit_softcapping": keys.maybe("final_logit_softcapping"),
        # The largest model alone scales queries by another number than the size of a head.
        "query_pre_attn_scalar": hidden // heads if layers == 46 else size,
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)
        ],
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
    layers, theta = range(keys.need("block_count")), float(keys.need("rope.freq_base"))
    types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in layers]
    plain = {"rope_type": "default", "rope_theta": theta}
    rope = {"full_attention": rope_of(keys), "sliding_attention": plain}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": types,
        "rope_parameters": rope,
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
    sizes = _qwen3(keys) | _experts(keys) | _partial_rope(keys)
    return sizes | {
        "shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "full_attention_interval": keys.maybe("full_attention_interval") or 4,
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": keys.need("ssm.time_step_rank"),
        "linear_value_head_dim": keys.need("ssm.inner_size") // keys.need("ssm.time_step_rank"),
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
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return _local_experts(keys) | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "sliding_window": keys.need("attention.sliding_window"),
        "rope_parameters": rope,
        "attention_bias": True,
    }


ROUTERS = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
MIXTRAL = ("block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
SPARSE_ROUTER = {"ffn_gate_inp": "block_sparse_moe.gate"}

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
    "gemma2": Architecture(
        "gemma2",
        _gemma2,
        OF_GEMMA,
        adds_one=True,
        done=frozenset(("attn_logit_softcapping", "final_logit_softcapping")),
    ),
    "gemma3": Architecture("gemma3_text", _gemma3, OF_GEMMA, adds_one=True),
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
        done=frozenset(("expert_weights_scale",)),
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
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _qwen3_next,
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_a": "linear_attn.A_log",
            "ssm_dt": "linear_attn.dt_bias",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **_shared("shared_expert"),
        },
        adds_one=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _gpt_oss,
        {**POST_NORMS, "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
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
