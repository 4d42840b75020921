"""GGUF's architectures: who reads their metadata, and their names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf import dense, experts, fields, recurrent
from flexgen_jax.models.gguf.container import GgufFile
from flexgen_jax.models.gguf.keys import Keys

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
    # Names of a layer's parts besides `PARTS`. A key with an end, such as "ffn_gate_inp.scale", is
    # one tensor, whose name is complete.
    parts: Mapping[str, str] = field(default_factory=dict)
    # What the names of experts begin with, and their matrices.
    experts: tuple[str, Mapping[str, str]] = ("mlp.", {})
    # Whether the rows of queries and keys that turn together are neighbors.
    is_woven: bool = False
    # Whether norms are stored with 1 added.
    adds_one: bool = False
    # Values of metadata that `config` does not read, besides those of `config.NEUTRAL`.
    expects: Mapping[str, float] = field(default_factory=dict)


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
    **{f"indexer.{x}": f"self_attn.indexer.{x}" for x in ("attn_k", "attn_q_b", "k_norm", "proj")},
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
    "llama": Architecture("llama", dense.llama, SPARSE_ROUTER, MIXTRAL, is_woven=True),
    "qwen2": Architecture("qwen2", lambda _keys: {}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        experts.qwen2_moe,
        {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_shared("shared_expert")},
    ),
    "qwen3": Architecture("qwen3", dense.qwen3),
    "qwen3moe": Architecture("qwen3_moe", experts.qwen3_moe),
    "qwen3vl": Architecture("qwen3", dense.qwen3),
    "qwen3vlmoe": Architecture("qwen3_moe", experts.qwen3_moe),
    "gemma2": Architecture("gemma2", dense.gemma2, OF_GEMMA, adds_one=True),
    "gemma3": Architecture("gemma3_text", dense.gemma3, OF_GEMMA, adds_one=True),
    "gemma4": Architecture(
        "gemma4_text",
        dense.gemma4,
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
    "phi3": Architecture("phi3", dense.phi3, {"ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Architecture("olmo2", dense.olmo2, POST_NORMS),
    "smollm3": Architecture("smollm3", dense.smollm3, is_woven=True),
    "starcoder2": Architecture(
        "starcoder2", dense.starcoder2, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        experts.glm4_moe,
        {**POST_NORMS, **ROUTERS, **_shared("shared_experts")},
        expects=BY_SIGMOID,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        experts.ernie4_5_moe,
        {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias", **_shared("shared_experts")},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        experts.minimax_m2,
        {**SPARSE_ROUTER, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        MIXTRAL,
        expects=BY_SIGMOID,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        recurrent.qwen3_next,
        OF_QWEN3_5 | {"ssm_ba": "linear_attn.in_proj_ba"},
        adds_one=True,
    ),
    "qwen35": Architecture("qwen3_5_text", recurrent.qwen3_5, OF_QWEN3_5, adds_one=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", recurrent.qwen3_5, OF_QWEN3_5, adds_one=True),
    "hy_v3": Architecture(
        "hy_v3",
        experts.hy_v3,
        {
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.e_score_correction_bias",
            **_shared("shared_experts"),
        },
        expects=BY_SIGMOID | {"expert_weights_norm": 1.0},
    ),
    "mistral3": Architecture("ministral3", dense.mistral3, is_woven=True),
    "deepseek2": Architecture("deepseek_v3", experts.deepseek2, OF_LATENT),
    "lfm2": Architecture("lfm2", recurrent.lfm2, OF_LFM2),
    "lfm2moe": Architecture("lfm2_moe", recurrent.lfm2, OF_LFM2, W_EXPERTS, expects=BY_SIGMOID),
    "mistral4": Architecture("mistral4", experts.mistral4, OF_LATENT),
    "ernie4_5": Architecture("ernie4_5", fields.biases),
    "seed_oss": Architecture(
        "seed_oss", fields.biases, {"post_attention_norm": "post_attention_layernorm"}
    ),
    "exaone4": Architecture("exaone4", dense.exaone4, POST_NORMS),
    "glm4": Architecture(
        "glm4",
        dense.glm4,
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gemma": Architecture("gemma", fields.biases, adds_one=True),
    "deepseek32": Architecture("deepseek_v32", experts.indexed, OF_LATENT),
    "glm-dsa": Architecture("glm_moe_dsa", experts.indexed, OF_LATENT),
    "gpt-oss": Architecture(
        "gpt_oss",
        experts.gpt_oss,
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
