"""OPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.family import LINEAR, NORM, Family, Fields, pairs, pattern_of
from flexgen_jax.models.parts import AttentionSpec, ConfigError, LayerParts, MLPSpec, NormSpec


def _read_opt(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    pre_norm = bool(raw.get("do_layer_norm_before", True))
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    bias, pad = bool(raw.get("enable_bias", True)), raw.get("pad_token_id")
    attention = AttentionSpec(heads, heads, hidden // heads, qkv_bias=bias, out_bias=bias)
    mlp = MLPSpec(fields.count("ffn_dim"), raw.get("activation_function", "relu"), bias=bias)
    ids = fields.ids(bos=2, eos=2) | {"pad_id": 1 if pad is None else pad}
    return ModelConfig(
        model_type="opt",
        vocab_size=fields.get("vocab_size"),
        hidden_size=hidden,
        max_positions=fields.get("max_position_embeddings"),
        **pattern_of([LayerParts(attention, mlp)] * fields.count("num_hidden_layers")),
        embed_size=raw.get("word_embed_proj_dim") or hidden,
        norm=NormSpec(is_affine=bool(raw.get("layer_norm_elementwise_affine", True))),
        norm_place="before" if pre_norm else "after",
        position_offset=2,
        final_norm=pre_norm and not raw.get("_remove_final_layer_norm", False),
        tied_head=bool(raw.get("tie_word_embeddings", True)),
        **ids,
    )


_OPT_LAYER = "decoder.layers.{i}"

OPT = Family(
    model_type="opt",
    read_config=_read_opt,
    names={
        "embedding.tokens": "decoder.embed_tokens.weight",
        "embedding.positions": "decoder.embed_positions.weight",
        "embedding.project_in.kernel": "decoder.project_in.weight",
        "head.project_out.kernel": "decoder.project_out.weight",
        "head.tokens": "lm_head.weight",
        **pairs("head.norm", "decoder.final_layer_norm", NORM),
        **pairs("decoder.{i}.attention.q", f"{_OPT_LAYER}.self_attn.q_proj", LINEAR),
        **pairs("decoder.{i}.attention.k", f"{_OPT_LAYER}.self_attn.k_proj", LINEAR),
        **pairs("decoder.{i}.attention.v", f"{_OPT_LAYER}.self_attn.v_proj", LINEAR),
        **pairs("decoder.{i}.attention.out", f"{_OPT_LAYER}.self_attn.out_proj", LINEAR),
        **pairs("decoder.{i}.attention_norm", f"{_OPT_LAYER}.self_attn_layer_norm", NORM),
        **pairs("decoder.{i}.mlp.up", f"{_OPT_LAYER}.fc1", LINEAR),
        **pairs("decoder.{i}.mlp.down", f"{_OPT_LAYER}.fc2", LINEAR),
        **pairs("decoder.{i}.mlp_norm", f"{_OPT_LAYER}.final_layer_norm", NORM),
    },
    ignored=(r"decoder\.version", r"decoder\.embed_positions\._float_tensor"),
)
