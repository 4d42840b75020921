"""LFM2 and LFM2-MoE: short convolutions in most layers, attention in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.llama import LAYER, gated, read_llama
from flexgen_jax.models.family import (
    LINEAR,
    NORM,
    Family,
    Fields,
    Find,
    by_mixer,
    fused,
    layer_types,
    pairs,
    with_mixer,
)
from flexgen_jax.models.parts import ExpertsSpec, MLPSpec, NormSpec, Routing
from flexgen_jax.models.short_conv import ShortConvSpec

KINDS = ("conv", "full_attention")


def _width(raw: Mapping[str, Any]) -> int:
    """Returns the width of the dense blocks. LFM2's configs may state that of a block without
    gates, which has as many elements."""
    fields = Fields(raw)
    width = int(raw.get("block_ff_dim") or fields.count("intermediate_size", 12288))
    if raw["model_type"] == "lfm2_moe" or not raw.get("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    share = raw.get("block_ffn_dim_multiplier", 1.0)
    if share is None:
        return width
    multiple = fields.count("block_multiple_of", 256)
    return -(-int(share * width) // multiple) * multiple


def _blocks(fields: Fields, layers: int) -> list[MLPSpec | ExpertsSpec]:
    dense = gated(fields, "intermediate_size")
    if fields.raw["model_type"] == "lfm2":
        return [dense] * layers
    experts = ExpertsSpec(
        fields.count("num_experts", 32),
        fields.count("num_experts_per_tok", 4),
        gated(fields, "moe_intermediate_size"),
        is_normalised=bool(fields.get("norm_topk_prob", True)),
        routing=Routing(
            scores="sigmoid",
            has_correction=bool(fields.get("use_expert_bias", True)),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
    )
    num_dense = fields.get("num_dense_layers", 2)
    return [dense if i < num_dense else experts for i in range(layers)]


def _lfm2(raw: Mapping[str, Any]) -> ModelConfig:
    tied = raw.get("tie_embedding", raw.get("tie_word_embeddings", True))
    raw = {"rope_theta": 1000000.0, **raw, "tie_word_embeddings": tied}
    raw["intermediate_size"] = _width(raw)
    fields = Fields(raw)
    layers, hidden = fields.count("num_hidden_layers"), fields.count("hidden_size")
    attention = {
        "qkv_bias": False,
        "out_bias": False,
        "qk_norm": "head",
        "blocks": _blocks(fields, layers),
    }
    norm = NormSpec(is_rms=True, eps=fields.number("norm_eps", 1e-5))
    config = read_llama(raw, attention, model={"norm": norm}, ids={"bos": 1, "eos": 2})
    width, bias = fields.count("conv_L_cache", 3), bool(raw.get("conv_bias", False))
    conv = ShortConvSpec(hidden, width, bias)
    attending = raw.get("full_attn_idxs")  # of older configs
    usual = [KINDS[attending is None or i in attending] for i in range(layers)]
    types = layer_types(raw, usual, KINDS)
    return with_mixer(config, conv, [t == "conv" for t in types])


FEED_FORWARD = f"{LAYER}.feed_forward"
EXPERTS = f"{FEED_FORWARD}.experts"
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}

LFM2_NAMES: dict[str, str | Find] = {
    "embedding.tokens": "embed_tokens.weight",
    "head.tokens": "lm_head.weight",
    **pairs("head.norm", "embedding_norm", NORM),
    **pairs("decoder.{i}.attention_norm", f"{LAYER}.operator_norm", NORM),
    **pairs("decoder.{i}.mlp_norm", f"{LAYER}.ffn_norm", NORM),
    **{
        key: name
        for side in "qkv"
        for key, name in pairs(
            f"decoder.{{i}}.attention.{side}", f"{LAYER}.self_attn.{side}_proj", LINEAR
        ).items()
    },
    **pairs("decoder.{i}.attention.q_norm", f"{LAYER}.self_attn.q_layernorm", NORM),
    **pairs("decoder.{i}.attention.k_norm", f"{LAYER}.self_attn.k_layernorm", NORM),
    **pairs("decoder.{i}.attention.inputs", f"{LAYER}.conv.in_proj", LINEAR),
    "decoder.{i}.attention.weights": f"{LAYER}.conv.conv.weight",
    "decoder.{i}.attention.weights_bias": f"{LAYER}.conv.conv.bias",
    "decoder.{i}.attention.out.kernel": by_mixer(
        ShortConvSpec, f"{LAYER}.conv.out_proj.weight", f"{LAYER}.self_attn.out_proj.weight"
    ),
    "decoder.{i}.attention.out.bias": f"{LAYER}.conv.out_proj.bias",
    **{
        f"decoder.{{i}}.mlp.{ours}.kernel": f"{FEED_FORWARD}.{theirs}.weight"
        for ours, theirs in MATRICES.items()
    },
    "decoder.{i}.router.kernel": f"{FEED_FORWARD}.gate.weight",
    "decoder.{i}.router_correction": f"{FEED_FORWARD}.expert_bias",
    **{
        f"decoder.{{i}}.experts.{{e}}.{ours}.kernel": f"{EXPERTS}.{{e}}.{theirs}.weight"
        for ours, theirs in MATRICES.items()
    },
}

JOINED_EXPERTS: dict[str, str | Find] = {
    "decoder.{i}.experts.{e}.gate.kernel": fused(f"{EXPERTS}.gate_up_proj", 0, 2),
    "decoder.{i}.experts.{e}.up.kernel": fused(f"{EXPERTS}.gate_up_proj", 1, 2),
    "decoder.{i}.experts.{e}.down.kernel": fused(f"{EXPERTS}.down_proj", 0, 1),
}

LFM2 = Family("lfm2", _lfm2, LFM2_NAMES)
LFM2_MOE = Family("lfm2_moe", _lfm2, LFM2_NAMES, JOINED_EXPERTS)
