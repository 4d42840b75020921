"""GPT-NeoX and Pythia."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.llama import LAYER
from flexgen_jax.models.family import LINEAR, NORM, Family, Fields, pairs, pattern_of, woven
from flexgen_jax.models.parts import AttentionSpec, LayerParts, MLPSpec, NormSpec


def _read_neox(raw: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(raw)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    bias, share = bool(raw.get("attention_bias", True)), raw.get("rotary_pct", 0.25)
    theta = raw.get("rotary_emb_base", 10000.0)
    rotary = fields.rotary(
        hidden // heads, rotates_part=True, partial_rotary_factor=share, rope_theta=theta
    )
    attention = AttentionSpec(
        heads, heads, hidden // heads, qkv_bias=bias, out_bias=bias, rotary=rotary
    )
    mlp = MLPSpec(fields.count("intermediate_size"), raw.get("hidden_act", "gelu"))
    return ModelConfig(
        model_type="gpt_neox",
        vocab_size=fields.get("vocab_size"),
        hidden_size=hidden,
        max_positions=fields.max_positions,
        **pattern_of([LayerParts(attention, mlp)] * fields.count("num_hidden_layers")),
        embed_size=hidden,
        norm=NormSpec(eps=fields.number("layer_norm_eps", 1e-5)),
        is_parallel=bool(raw.get("use_parallel_residual", True)),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        **fields.ids(bos=0, eos=2),
    )


_QKV = f"{LAYER}.attention.query_key_value"

NEOX = Family(
    model_type="gpt_neox",
    read_config=_read_neox,
    names={
        "embedding.tokens": "embed_in.weight",
        "head.tokens": "embed_out.weight",
        **pairs("head.norm", "final_layer_norm", NORM),
        **{
            f"decoder.{{i}}.attention.{part}.{ours}": woven(f"{_QKV}.{theirs}", index)
            for index, part in enumerate("qkv")
            for ours, theirs in LINEAR.items()
        },
        **pairs("decoder.{i}.attention.out", f"{LAYER}.attention.dense", LINEAR),
        **pairs("decoder.{i}.attention_norm", f"{LAYER}.input_layernorm", NORM),
        **pairs("decoder.{i}.mlp_norm", f"{LAYER}.post_attention_layernorm", NORM),
        **pairs("decoder.{i}.mlp.up", f"{LAYER}.mlp.dense_h_to_4h", LINEAR),
        **pairs("decoder.{i}.mlp.down", f"{LAYER}.mlp.dense_4h_to_h", LINEAR),
    },
    prefixes=("gpt_neox.", ""),
)
