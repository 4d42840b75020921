"""Mixtures of experts of LLaMA's shape: Mixtral, GLM-4.5 to 4.7, Hunyuan 3, gpt-oss, MiniMax-M2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.llama import (
    EXPERT_NAMES,
    FUSED_EXPERTS,
    LAYER,
    NAMES,
    block_names,
    full_every,
    gated,
    one_window,
    read_llama,
    windows_of,
)
from flexgen_jax.models.family import LINEAR, Family, Fields, alternating, fused, in_one_row, pairs
from flexgen_jax.models.parts import ConfigError, ExpertsSpec, MLPSpec, Routing


def _mixtral(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"rope_theta": 1e6, **raw}
    attention = {"qkv_bias": False, "out_bias": False, "windows": one_window(raw)}
    return read_llama(raw, attention, ids={"bos": 1, "eos": 2})


def _glm4_moe(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4.5 to 4.7: the first layers have no experts, later layers also have a shared
    block."""
    raw = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **raw}
    fields = Fields(raw)
    experts = shared_experts(raw, corrected(fields, scale=1.0))
    dense = raw.get("first_k_dense_replace", 1)
    layers = range(fields.count("num_hidden_layers"))
    attention = {
        "qkv_bias": bool(raw.get("attention_bias", False)),
        "out_bias": False,
        "qk_norm": "head" if raw.get("use_qk_norm", False) else None,
        "rotates_part": True,
        "blocks": [gated(fields, "intermediate_size") if i < dense else experts for i in layers],
    }
    return read_llama(raw, attention)


def shared_experts(
    raw: Mapping[str, Any], routing: Routing, is_normalised: bool | None = None
) -> ExpertsSpec:
    """Returns the experts of DeepSeek and similar models, with a shared block for all tokens;
    is_normalised: by default as the config says."""
    fields = Fields({"norm_topk_prob": True, **raw})
    count = fields.maybe("num_local_experts") or fields.maybe("num_experts")
    expert_block, shared = gated(fields, "moe_intermediate_size"), fields.get("n_shared_experts", 1)
    return ExpertsSpec(
        fields.count("n_routed_experts", count or 128),
        fields.count("num_experts_per_tok", 8),
        expert_block,
        is_normalised=bool(fields.maybe("norm_topk_prob"))
        if is_normalised is None
        else is_normalised,
        shared=replace(expert_block, width=expert_block.width * shared) if shared else None,
        routing=routing,
    )


def corrected(own: Fields, scale: float, groups: int = 1, top_groups: int = 1) -> Routing:
    """Returns DeepSeek-V3's routing; further arguments are the family's defaults."""
    return Routing(
        scores="sigmoid",
        has_correction=True,
        groups=own.count("n_group", groups),
        top_groups=own.count("topk_group", top_groups),
        scale=own.number("routed_scaling_factor", scale),
        is_precise=True,
    )


def _ernie4_5_moe(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads ERNIE 4.5, whose rotary embeddings turn neighbours."""
    raw = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **raw}
    if raw.get("use_bias"):
        raise ConfigError('"use_bias": true is not supported: it would add a bias to lm_head')
    fields = Fields(raw)
    layers, expert_block = fields.count("num_hidden_layers"), gated(fields, "moe_intermediate_size")
    shared = fields.get("moe_num_shared_experts", 2)
    experts = ExpertsSpec(
        fields.count("moe_num_experts", fields.maybe("num_experts") or 64),
        fields.count("moe_k", fields.maybe("num_experts_per_tok") or 6),
        gated(fields, "moe_intermediate_size"),
        is_normalised=True,
        shared=replace(expert_block, width=expert_block.width * shared) if shared else None,
        routing=Routing(
            has_correction=True,
            least_sum=fields.number("moe_norm_min", 1e-12),
            is_precise=True,
        ),
    )
    dense, every = gated(fields, "intermediate_size"), fields.count("moe_layer_interval", 1)
    first, last = fields.get("moe_layer_start_index", 1), fields.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    attention = {
        "qkv_bias": False,
        "out_bias": False,
        "is_interleaved": True,
        "blocks": [
            experts if first <= i <= last and (i + 1) % every == 0 else dense for i in range(layers)
        ],
    }
    return read_llama(raw, attention, ids={"bos": 1, "eos": 2})


def _hy_v3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Hunyuan 3: the first layer has no experts, unless the config says otherwise."""
    raw = {"head_dim": 128, "rms_norm_eps": 1e-5, **raw}
    fields, bias = Fields(raw), bool(raw.get("attention_bias", False))
    layers, mlp_bias = fields.count("num_hidden_layers"), bool(raw.get("mlp_bias", False))
    width, shared = fields.count("moe_intermediate_size"), fields.count("num_shared_experts", 1)
    experts = ExpertsSpec(
        fields.count("num_experts", 192),
        fields.count("num_experts_per_tok", 8),
        gated(fields, "moe_intermediate_size"),
        is_normalised=True,
        shared=replace(gated(fields, "moe_intermediate_size", bias=mlp_bias), width=width * shared),
        routing=Routing(
            scores="sigmoid",
            has_correction=True,
            scale=fields.number("router_scaling_factor", 2.826),
            is_precise=True,
        ),
    )
    dense = gated(fields, "intermediate_size", bias=mlp_bias)
    types = raw.get("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
    attention = {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "head",
        "blocks": [dense if block_type == "dense" else experts for block_type in types],
    }
    return read_llama(raw, attention)


YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128, **raw}
    raw = {"rope_theta": 150000.0, **raw}
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw["rope_parameters"] = YARN_OF_GPT_OSS
    fields = Fields(raw)
    layers, bias = fields.count("num_hidden_layers"), bool(raw.get("attention_bias", True))
    types = raw.get("layer_types") or full_every(2, layers)
    block = MLPSpec(
        fields.count("intermediate_size"),
        "silu",
        is_gated=True,
        bias=True,
        limit=fields.number("swiglu_limit", 7.0),
        swish=fields.number("swiglu_alpha", 1.702),
    )
    experts = ExpertsSpec(
        fields.count("num_local_experts"),
        fields.count("num_experts_per_tok", raw.get("experts_per_token") or 4),
        block,
        is_normalised=True,
        routing=Routing(has_bias=True),
    )
    attention = {
        "qkv_bias": bias,
        "out_bias": bias,
        "has_sinks": True,
        "windows": windows_of(raw, types),
        "blocks": [experts] * layers,
    }
    return read_llama(raw, attention)


def _minimax_m2(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"rope_theta": 5000000.0, "head_dim": 128, **raw}
    fields = Fields(raw)
    if raw.get("rotary_dim") is not None:
        share = fields.number("rotary_dim") / fields.count("head_dim")
        raw = {"partial_rotary_factor": share, **raw}
    experts = ExpertsSpec(
        fields.count("num_local_experts", 256),
        fields.count("num_experts_per_tok", 8),
        gated(fields, "intermediate_size"),
        is_normalised=True,
        routing=Routing(scores="sigmoid", has_correction=True),
    )
    attention = {
        "qkv_bias": False,
        "out_bias": False,
        "qk_norm": "all",
        "rotates_part": True,
        "blocks": [experts] * fields.count("num_hidden_layers"),
    }
    return read_llama(raw, attention, ids={"bos": 200034, "eos": 200020})


_MIXTRAL_EXPERT = f"{LAYER}.block_sparse_moe.experts.{{e}}"

MIXTRAL = Family(
    "mixtral",
    _mixtral,
    NAMES
    | {
        "decoder.{i}.router.kernel": f"{LAYER}.block_sparse_moe.gate.weight",
        "decoder.{i}.experts.{e}.gate.kernel": f"{_MIXTRAL_EXPERT}.w1.weight",
        "decoder.{i}.experts.{e}.up.kernel": f"{_MIXTRAL_EXPERT}.w3.weight",
        "decoder.{i}.experts.{e}.down.kernel": f"{_MIXTRAL_EXPERT}.w2.weight",
    },
    FUSED_EXPERTS,
)

GLM4_MOE = Family(
    "glm4_moe",
    _glm4_moe,
    EXPERT_NAMES
    | {
        "decoder.{i}.router_correction": f"{LAYER}.mlp.gate.e_score_correction_bias",
        **block_names("shared", "shared_experts"),
    },
    FUSED_EXPERTS,
)

ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    _ernie4_5_moe,
    EXPERT_NAMES
    | {
        "decoder.{i}.router_correction": in_one_row(
            f"{LAYER}.mlp.moe_statics.e_score_correction_bias"
        ),
        **block_names("shared", "shared_experts"),
    },
    FUSED_EXPERTS
    | {
        "decoder.{i}.router_correction": in_one_row(
            f"{LAYER}.mlp.gate.moe_statics.e_score_correction_bias"
        ),
    },
)

HY_V3 = Family(
    "hy_v3",
    _hy_v3,
    EXPERT_NAMES
    | {
        "decoder.{i}.router.kernel": f"{LAYER}.mlp.router.gate.weight",
        "decoder.{i}.router_correction": f"{LAYER}.mlp.expert_bias",
        **block_names("shared", "shared_mlp"),
    },
    FUSED_EXPERTS
    | {
        "decoder.{i}.router_correction": f"{LAYER}.mlp.e_score_correction_bias",
        **block_names("shared", "shared_experts"),
    },
)

_GPT_OSS = f"{LAYER}.mlp.experts"

GPT_OSS = Family(
    "gpt_oss",
    _gpt_oss,
    NAMES
    | {
        "decoder.{i}.attention.sinks": f"{LAYER}.self_attn.sinks",
        **pairs("decoder.{i}.router", f"{LAYER}.mlp.router", LINEAR),
        "decoder.{i}.experts.{e}.gate.kernel": alternating(f"{_GPT_OSS}.gate_up_proj", 0, True),
        "decoder.{i}.experts.{e}.gate.bias": alternating(f"{_GPT_OSS}.gate_up_proj_bias", 0),
        "decoder.{i}.experts.{e}.up.kernel": alternating(f"{_GPT_OSS}.gate_up_proj", 1, True),
        "decoder.{i}.experts.{e}.up.bias": alternating(f"{_GPT_OSS}.gate_up_proj_bias", 1),
        "decoder.{i}.experts.{e}.down.kernel": fused(f"{_GPT_OSS}.down_proj", 0, 1, True),
        "decoder.{i}.experts.{e}.down.bias": fused(f"{_GPT_OSS}.down_proj_bias", 0, 1),
    },
    block_names("experts.{e}", "experts.{e}"),  # of GGUF files
)

MINIMAX_M2 = Family(
    "minimax_m2",
    _minimax_m2,
    {
        **MIXTRAL.names,
        "decoder.{i}.router_correction": f"{LAYER}.block_sparse_moe.e_score_correction_bias",
    },
    FUSED_EXPERTS | {"decoder.{i}.router_correction": f"{LAYER}.mlp.e_score_correction_bias"},
)
