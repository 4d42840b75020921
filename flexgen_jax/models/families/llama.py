"""LLaMA, and what models of its shape share: the reader of their configs and the names of their
tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.family import LINEAR, NORM, Family, Fields, Find, fused, pairs, pattern_of
from flexgen_jax.models.parts import AttentionSpec, ExpertsSpec, LayerParts, MLPSpec, NormSpec

DEFAULT_WINDOW = 4096
"""The window of configs that have windows and do not say how large they are."""


def read_llama(
    raw: Mapping[str, Any],
    attention: Mapping[str, Any],
    mlp: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    ids: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Returns the config of a model of LLaMA's shape; the further arguments describe the family's
    differences: fields of `AttentionSpec` (with "windows", the window of each layer, "layer_types",
    which name its rotary embeddings, "rotates", which layers have some, "rotates_part", and
    "blocks", the feed-forward block of each layer), `MLPSpec` and `ModelConfig`, and defaults of
    special tokens."""
    fields = Fields(raw)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers")
    head_dim = fields.count("head_dim", hidden // heads)
    attention_options = dict(attention)
    windows = attention_options.pop("windows", [None] * layers)
    types = attention_options.pop("layer_types", [None] * layers)
    rotates_part = attention_options.pop("rotates_part", False)
    rotates = attention_options.pop("rotates", [True] * layers)
    is_interleaved = attention_options.pop("is_interleaved", False)
    own_blocks = attention_options.pop("blocks", None) or _experts(fields, layers)
    blocks = own_blocks or [gated(fields, "intermediate_size", **(mlp or {}))] * layers
    layer_kinds = [
        LayerParts(
            AttentionSpec(
                heads,
                fields.count("num_key_value_heads", heads),
                head_dim,
                window=window,
                rotary=fields.rotary(
                    head_dim, layer_type, rotates_part, is_interleaved=is_interleaved
                )
                if is_rotated
                else None,
                **attention_options,
            ),
            block,
        )
        for window, layer_type, is_rotated, block in zip(
            windows, types, rotates, blocks, strict=True
        )
    ]
    return model_of(raw, layer_kinds, model, ids)


def model_of(
    raw: Mapping[str, Any],
    kinds: list[LayerParts],
    model: Mapping[str, Any] | None = None,
    ids: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Returns the config of a model with LLaMA's embedding, norms and head, from the parts of its
    layers; model, ids: as in `read_llama`."""
    config_fields = Fields(raw)
    hidden = config_fields.count("hidden_size")
    fields: dict[str, Any] = {
        "model_type": raw["model_type"],
        "vocab_size": config_fields.get("vocab_size"),
        "hidden_size": hidden,
        "max_positions": config_fields.max_positions,
        "embed_size": hidden,
        "norm": NormSpec(is_rms=True, eps=config_fields.number("rms_norm_eps", 1e-6)),
        "tied_head": bool(raw.get("tie_word_embeddings", False)),
        **pattern_of(kinds),
        **config_fields.ids(**(ids or {})),
    }
    return ModelConfig(**fields | dict(model or {}))


def gated(own: Fields, width: str, **chosen: Any) -> MLPSpec:
    """Returns the gated block of a config, SiLU's unless it names another activation."""
    name = own.get("hidden_act", "silu")
    return MLPSpec(
        own.count(width), **{"activation": name, "is_gated": True, "bias": False} | chosen
    )


def _experts(own: Fields, layers: int) -> list[MLPSpec | ExpertsSpec] | None:
    """Returns the blocks of all layers of a model with experts, or None: of Mixtral, Qwen2-MoE and
    Qwen3-MoE."""
    raw = own.raw
    count = raw.get("num_experts") or raw.get("num_local_experts")
    if count is None:
        return None
    is_mixtral = raw["model_type"] == "mixtral"
    shared = raw.get("shared_expert_intermediate_size")
    experts = ExpertsSpec(
        count,
        own.count("num_experts_per_tok"),
        gated(own, "intermediate_size" if is_mixtral else "moe_intermediate_size"),
        is_normalised=is_mixtral or bool(raw.get("norm_topk_prob", False)),
        shared=gated(own, "shared_expert_intermediate_size") if shared else None,
        is_shared_gated=bool(shared),
    )
    plain, step = set(raw.get("mlp_only_layers") or ()), raw.get("decoder_sparse_step") or 1
    return [
        gated(own, "intermediate_size") if i in plain or (i + 1) % step else experts
        for i in range(layers)
    ]


def windows_of(raw: Mapping[str, Any], types: list[str]) -> list[int | None]:
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    return [window if t == "sliding_attention" else None for t in types]


def full_every(number: int, layers: int) -> list[str]:
    """Returns layer types where every `number`th layer has full attention and the rest a window."""
    return ["sliding_attention" if (i + 1) % number else "full_attention" for i in range(layers)]


def _plain(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    attention = {"qkv_bias": bias, "out_bias": bias}
    return read_llama(
        raw, attention, {"bias": bool(raw.get("mlp_bias", False))}, ids={"bos": 1, "eos": 2}
    )


def one_window(raw: Mapping[str, Any]) -> list[int | None]:
    """Returns the window of each layer, where all have the config's window."""
    return [raw.get("sliding_window")] * Fields(raw).count("num_hidden_layers")


LAYER = "layers.{i}"

ENDS = {
    "embedding.tokens": "embed_tokens.weight",
    "head.tokens": "lm_head.weight",
    **pairs("head.norm", "norm", NORM),
}

ATTENTION = {
    **pairs("decoder.{i}.attention.q", f"{LAYER}.self_attn.q_proj", LINEAR),
    **pairs("decoder.{i}.attention.k", f"{LAYER}.self_attn.k_proj", LINEAR),
    **pairs("decoder.{i}.attention.v", f"{LAYER}.self_attn.v_proj", LINEAR),
    **pairs("decoder.{i}.attention.out", f"{LAYER}.self_attn.o_proj", LINEAR),
    **pairs("decoder.{i}.attention.q_norm", f"{LAYER}.self_attn.q_norm", NORM),
    **pairs("decoder.{i}.attention.k_norm", f"{LAYER}.self_attn.k_norm", NORM),
    **pairs("decoder.{i}.attention_norm", f"{LAYER}.input_layernorm", NORM),
    **pairs("decoder.{i}.mlp_norm", f"{LAYER}.post_attention_layernorm", NORM),
}


def block_names(ours: str, theirs: str) -> dict[str, str]:
    """Returns the names of a gated block's tensors."""
    return {
        key: name
        for matrix in ("gate", "up", "down")
        for key, name in pairs(
            f"decoder.{{i}}.{ours}.{matrix}", f"{LAYER}.mlp.{theirs}.{matrix}_proj", LINEAR
        ).items()
    }


MLP = {
    **pairs("decoder.{i}.mlp.gate", f"{LAYER}.mlp.gate_proj", LINEAR),
    **pairs("decoder.{i}.mlp.up", f"{LAYER}.mlp.up_proj", LINEAR),
    **pairs("decoder.{i}.mlp.down", f"{LAYER}.mlp.down_proj", LINEAR),
}

NAMES: dict[str, str | Find] = {**ENDS, **ATTENTION, **MLP}

LLAMA = Family("llama", _plain, NAMES)

FUSED_EXPERTS: dict[str, str | Find] = {
    "decoder.{i}.router.kernel": f"{LAYER}.mlp.gate.weight",
    "decoder.{i}.experts.{e}.gate.kernel": fused(f"{LAYER}.mlp.experts.gate_up_proj", 0, 2),
    "decoder.{i}.experts.{e}.up.kernel": fused(f"{LAYER}.mlp.experts.gate_up_proj", 1, 2),
    "decoder.{i}.experts.{e}.down.kernel": fused(f"{LAYER}.mlp.experts.down_proj", 0, 1),
}
"""Experts that are stored together, as transformers 5 has them."""

EXPERT_NAMES = NAMES | {
    "decoder.{i}.router.kernel": f"{LAYER}.mlp.gate.weight",
    "decoder.{i}.shared_gate.kernel": f"{LAYER}.mlp.shared_expert_gate.weight",
    **block_names("shared", "shared_expert"),
    **block_names("experts.{e}", "experts.{e}"),
}
