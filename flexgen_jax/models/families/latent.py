"""Models with latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Mistral Small 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.experts import GLM4_MOE, corrected, shared_experts
from flexgen_jax.models.families.llama import LAYER, gated, model_of
from flexgen_jax.models.family import LINEAR, NORM, SEEING, Family, Fields, pairs, with_text
from flexgen_jax.models.parts import (
    ConfigError,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerParts,
    MLPSpec,
    Routing,
)


def _attention(raw: Mapping[str, Any]) -> LatentAttentionSpec:
    """Reads latent attention. Exactly `qk_rope_head_dim` elements are rotated."""
    rope = {
        name: {key: x for key, x in raw[name].items() if key != "partial_rotary_factor"}
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(raw.get(name), Mapping)
    }
    fields = Fields({**raw, **rope, "partial_rotary_factor": None})
    plain, rotated = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
    rank, bias = fields.count("kv_lora_rank", 512), bool(raw.get("attention_bias", False))
    is_interleaved = bool(raw.get("rope_interleave", True))
    return LatentAttentionSpec(
        num_heads=fields.count("num_attention_heads"),
        num_kv_heads=1,
        head_dim=rank + rotated,
        scale=(plain + rotated) ** -0.5 * fields.score_scale,
        qkv_bias=bias,
        out_bias=bias,
        rotary=fields.rotary(rotated, is_interleaved=is_interleaved),
        position_scale=fields.position_scale,
        q_rank=fields.maybe("q_lora_rank"),
        kv_rank=rank,
        plain=plain,
        rotated=rotated,
        value=fields.count("v_head_dim", 128),
    )


def _read_latent(
    raw: Mapping[str, Any],
    experts: ExpertsSpec,
    dense: int,
    ids: Mapping[str, Any],
    types: list[str] | None = None,
) -> ModelConfig:
    """Returns the config of a model whose first `dense` layers have no experts, or those that
    `types` calls dense."""
    fields = Fields(raw)
    layers = fields.count("num_hidden_layers")
    types = types or ["dense" if i < dense else "sparse" for i in range(layers)]
    attention, plain = _attention(raw), gated(fields, "intermediate_size")
    blocks: list[MLPSpec | ExpertsSpec] = [plain if t == "dense" else experts for t in types]
    return model_of(raw, [LayerParts(attention, block) for block in blocks], ids=ids)


def _must_be(raw: Mapping[str, Any], name: str, *values: Any) -> None:
    """Raises `ConfigError` unless a field is absent, null, or has one of some values."""
    if raw.get(name) not in (None, *values):
        raise ConfigError(f"{name} is {raw[name]!r}, which is not supported; supported: {values}")


def _deepseek_v2(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads DeepSeek-V2, which chooses experts by softmax, perhaps of the groups with the best."""
    raw = {"q_lora_rank": 1536, "n_shared_experts": 2, "n_routed_experts": 64, **raw}
    fields = Fields(raw)
    _must_be(raw, "topk_method", "greedy", "group_limited_greedy")
    _must_be(raw, "scoring_func", "softmax")
    _must_be(raw, "moe_layer_freq", 1)
    has_groups = raw.get("topk_method") == "group_limited_greedy"
    routing = Routing(
        groups=fields.count("n_group") if has_groups else 1,
        top_groups=fields.count("topk_group") if has_groups else 1,
        group_best=1,
        scale=fields.number("routed_scaling_factor", 1.0),
        is_precise=True,
    )
    experts = shared_experts(raw, routing, is_normalised=False)
    dense = fields.get("first_k_dense_replace", 0)
    return _read_latent(raw, experts, dense, {"bos": 1, "eos": 2})


def _deepseek_v3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads DeepSeek-V3, R1 and Kimi K2, of models that see, too, the part for text."""
    raw = with_text({"q_lora_rank": 1536, "n_routed_experts": 256, **raw})
    fields = Fields(raw)
    _must_be(raw, "topk_method", "noaux_tc")
    _must_be(raw, "scoring_func", "sigmoid")
    _must_be(raw, "moe_layer_freq", 1)
    is_glm = raw["model_type"] == "glm_moe_dsa"
    groups, top_groups = (1, 1) if is_glm else (8, 4)
    routing = corrected(fields, scale=2.5, groups=groups, top_groups=top_groups)
    experts = shared_experts(raw, routing)
    dense, types = fields.get("first_k_dense_replace", 3), raw.get("mlp_layer_types")
    return _read_latent(raw, experts, dense, {"bos": 0, "eos": 1}, types)


def _indexed(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads DeepSeek-V3.2 and GLM-5: an indexer selects `index_topk` tokens to attend to; in a
    context of at most that length it selects all."""
    if raw["model_type"] == "glm_moe_dsa":
        raw = {"rms_norm_eps": 1e-5, "q_lora_rank": 2048, **raw}
        raw = {"qk_nope_head_dim": 192, "v_head_dim": 256, **raw}
    config = _deepseek_v3(raw)
    max_tokens = Fields(raw).count("index_topk", 2048)
    if config.max_positions <= max_tokens:
        return config
    limit = (
        f", index_topk: longer contexts need the sparse indexer of {raw['model_type']}, which is "
        "not supported"
    )
    return replace(config, max_positions=max_tokens, context_limit=limit)


def _glm4_moe_lite(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4.7-Flash: DeepSeek-V3's parts with GLM's defaults."""
    raw = {"rms_norm_eps": 1e-5, "q_lora_rank": 768, "n_routed_experts": 64, **raw}
    raw = {"qk_nope_head_dim": 192, "v_head_dim": 256, "num_experts_per_tok": 4, **raw}
    fields = Fields(raw)
    experts = shared_experts(raw, corrected(fields, scale=1.8))
    types = raw.get("mlp_layer_types")
    return _read_latent(raw, experts, 1, {"bos": 0, "eos": 1}, types)


YARN_OF_MISTRAL4 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral4(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Mistral Small 4."""
    raw = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, **raw}
    raw = {"n_routed_experts": 128, "num_experts_per_tok": 4, **raw}
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw["rope_parameters"] = YARN_OF_MISTRAL4
    fields = Fields(raw)
    routing = Routing(
        groups=fields.count("n_group", 1),
        top_groups=fields.count("topk_group", 1),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    dense = fields.get("first_k_dense_replace", 0)
    return _read_latent(raw, shared_experts(raw, routing), dense, {"bos": 1, "eos": 2})


_THEIRS = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_up": "kv_b_proj",
}
LATENT_NAMES = {
    **GLM4_MOE.names,
    **{
        key: name
        for ours, theirs in _THEIRS.items()
        for key, name in pairs(
            f"decoder.{{i}}.attention.{ours}", f"{LAYER}.self_attn.{theirs}", LINEAR
        ).items()
    },
    **pairs("decoder.{i}.attention.q_norm", f"{LAYER}.self_attn.q_a_layernorm", NORM),
    **pairs("decoder.{i}.attention.kv_norm", f"{LAYER}.self_attn.kv_a_layernorm", NORM),
}

_INDEXER = r"layers\.\d+\.self_attn\.indexer\..*"

DEEPSEEK_V2 = Family("deepseek_v2", _deepseek_v2, LATENT_NAMES, GLM4_MOE.other_names)
DEEPSEEK_V3 = Family("deepseek_v3", _deepseek_v3, LATENT_NAMES, GLM4_MOE.other_names)
KIMI_K2 = Family("kimi_k2", _deepseek_v3, LATENT_NAMES, GLM4_MOE.other_names)
KIMI_K25 = Family(
    "kimi_k25",
    _deepseek_v3,
    LATENT_NAMES,
    {
        key: name.replace("layers.", "blocks.")
        for key, name in LATENT_NAMES.items()
        if isinstance(name, str)
    },  # as transformers saves them
    prefixes=SEEING,
)
DEEPSEEK_V32 = Family(
    "deepseek_v32", _indexed, LATENT_NAMES, GLM4_MOE.other_names, ignored=(_INDEXER,)
)
GLM_MOE_DSA = Family(
    "glm_moe_dsa", _indexed, LATENT_NAMES, GLM4_MOE.other_names, ignored=(_INDEXER,)
)
GLM4_MOE_LITE = Family("glm4_moe_lite", _glm4_moe_lite, LATENT_NAMES, GLM4_MOE.other_names)
MISTRAL4 = Family("mistral4", mistral4, LATENT_NAMES, GLM4_MOE.other_names)
