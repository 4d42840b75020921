"""Qwen3-Next, 3.5 and 3.6: of four layers, three have a state that is replaced with every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.delta_net import DeltaNetSpec
from flexgen_jax.models.families.llama import (
    EXPERT_NAMES,
    FUSED_EXPERTS,
    LAYER,
    NAMES,
    read_llama,
)
from flexgen_jax.models.family import (
    LINEAR,
    SEEING,
    Family,
    Fields,
    Find,
    Stored,
    by_mixer,
    joined,
    layer_types,
    pairs,
    with_mixer,
    with_text,
    woven,
)
from flexgen_jax.models.parts import ConfigError, LayerParts, NormSpec
from flexgen_jax.models.tensor_spec import TensorSpec

KINDS = ("linear_attention", "full_attention")


def _qwen3_next(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"head_dim": 256, "partial_rotary_factor": 0.25, "norm_topk_prob": True, **raw}
    for name, allowed in (("attn_output_gate", True), ("output_gate_type", "swish")):
        if raw.get(name) not in (None, allowed):
            raise ConfigError(f"{name} is {raw[name]!r}, which is not supported")
    fields, has_bias = Fields(raw), bool(raw.get("attention_bias", False))
    attention = {
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "qk_norm": "head",
        "is_gated": True,
        "rotates_part": True,
    }
    norm = NormSpec(is_rms=True, eps=fields.number("rms_norm_eps", 1e-6), offset=1.0)
    config = read_llama(raw, attention, model={"norm": norm})
    delta_net = DeltaNetSpec(
        key_heads=fields.count("linear_num_key_heads", 16),
        value_heads=fields.count("linear_num_value_heads", 32),
        key_size=fields.count("linear_key_head_dim", 128),
        value_size=fields.count("linear_value_head_dim", 128),
        width=fields.count("linear_conv_kernel_dim", 4),
        are_tiled=bool(raw.get("linear_heads_are_tiled", False)),
    )
    every = fields.count("full_attention_interval", 4)
    usual = [KINDS[(i + 1) % every == 0] for i in range(len(config.pattern))]
    types = layer_types(raw, usual, KINDS)
    return with_mixer(config, delta_net, [t == "linear_attention" for t in types])


def _qwen3_5(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the part for text of Qwen3.5: for text, its rotary embeddings are ordinary ones."""
    return _qwen3_next({"norm_topk_prob": True, **with_text(raw)})


def _delta_net(parts: LayerParts) -> DeltaNetSpec:
    assert isinstance(parts.mixer, DeltaNetSpec)
    return parts.mixer


def _by_key_head(name: str, index: int, sizes: Callable[[DeltaNetSpec], list[int]]) -> Find:
    """Returns how to find a tensor that is stored with others key head by key head.

    sizes: rows per key head in each tensor; index: which one it is.
    """

    def find(tensor: TensorSpec, parts: LayerParts) -> Stored:
        spec = _delta_net(parts)
        rows = sizes(spec)
        rows_per_head = sum(rows)
        return Stored(
            name, sum(rows[:index]), rows[index], rows_per_head, rows_per_head * spec.key_heads
        )

    return find


def _mixed(spec: DeltaNetSpec) -> list[int]:
    """Rows of a key head in Qwen3-Next's `in_proj_qkvz`."""
    values = spec.group * spec.value_size
    return [spec.key_size, spec.key_size, values, values]


def _gates(spec: DeltaNetSpec) -> list[int]:
    """Rows of a key head in Qwen3-Next's `in_proj_ba`."""
    return [spec.group, spec.group]


def _one_after_the_other(parts: LayerParts) -> list[int]:
    """Rows of queries, keys and values in Qwen3.5's `in_proj_qkv`."""
    spec = _delta_net(parts)
    return [spec.keys, spec.keys, spec.values]


STATE = f"{LAYER}.linear_attn"
ATTENTION = f"{LAYER}.self_attn"

SHARED_NAMES: dict[str, str | Find] = {
    "decoder.{i}.attention.weights": f"{STATE}.conv1d.weight",
    "decoder.{i}.attention.fade_log": f"{STATE}.A_log",
    "decoder.{i}.attention.fade_bias": f"{STATE}.dt_bias",
    "decoder.{i}.attention.norm.scale": f"{STATE}.norm.weight",
    "decoder.{i}.attention.out.kernel": by_mixer(
        DeltaNetSpec, f"{STATE}.out_proj.weight", f"{ATTENTION}.o_proj.weight"
    ),
    "decoder.{i}.attention.q.bias": woven(f"{ATTENTION}.q_proj.bias", 0, 2),
    "decoder.{i}.attention.gate.kernel": woven(f"{ATTENTION}.q_proj.weight", 1, 2),
    "decoder.{i}.attention.gate.bias": woven(f"{ATTENTION}.q_proj.bias", 1, 2),
}


def _attention_names(of_state: list[Find]) -> dict[str, str | Find]:
    """Returns the names of queries, keys and values, which both types of layers have; of_state:
    those of layers with a state."""
    of_attention: list[str | Find] = [
        woven(f"{ATTENTION}.q_proj.weight", 0, 2),
        f"{ATTENTION}.k_proj.weight",
        f"{ATTENTION}.v_proj.weight",
    ]
    return {
        f"decoder.{{i}}.attention.{side}.kernel": by_mixer(DeltaNetSpec, ours, theirs)
        for side, ours, theirs in zip("qkv", of_state, of_attention, strict=True)
    }


QWEN3_NEXT_NAMES: dict[str, str | Find] = {
    **SHARED_NAMES,
    **_attention_names([_by_key_head(f"{STATE}.in_proj_qkvz.weight", n, _mixed) for n in range(3)]),
    "decoder.{i}.attention.z.kernel": _by_key_head(f"{STATE}.in_proj_qkvz.weight", 3, _mixed),
    "decoder.{i}.attention.write.kernel": _by_key_head(f"{STATE}.in_proj_ba.weight", 0, _gates),
    "decoder.{i}.attention.fade.kernel": _by_key_head(f"{STATE}.in_proj_ba.weight", 1, _gates),
}

QWEN3_5_NAMES: dict[str, str | Find] = {
    **SHARED_NAMES,
    **_attention_names(
        [joined(f"{STATE}.in_proj_qkv.weight", _one_after_the_other, n) for n in range(3)]
    ),
    **pairs("decoder.{i}.attention.z", f"{STATE}.in_proj_z", LINEAR),
    **pairs("decoder.{i}.attention.write", f"{STATE}.in_proj_b", LINEAR),
    **pairs("decoder.{i}.attention.fade", f"{STATE}.in_proj_a", LINEAR),
}

QWEN3_NEXT_IN_GGUF: dict[str, str | Find] = {
    **_attention_names(
        [joined(f"{STATE}.in_proj_qkv.weight", _one_after_the_other, n) for n in range(3)]
    ),
    "decoder.{i}.attention.z.kernel": f"{STATE}.in_proj_z.weight",
}
"""Names of tensors that llama.cpp's converter divides."""

QWEN3_NEXT = Family(
    "qwen3_next",
    _qwen3_next,
    EXPERT_NAMES | QWEN3_NEXT_NAMES,
    FUSED_EXPERTS | QWEN3_NEXT_IN_GGUF,
)

QWEN3_5 = Family("qwen3_5", _qwen3_5, NAMES | QWEN3_5_NAMES, prefixes=SEEING)
QWEN3_5_TEXT = replace(QWEN3_5, model_type="qwen3_5_text")

QWEN3_5_MOE = Family(
    "qwen3_5_moe", _qwen3_5, EXPERT_NAMES | QWEN3_5_NAMES, FUSED_EXPERTS, prefixes=SEEING
)
QWEN3_5_MOE_TEXT = replace(QWEN3_5_MOE, model_type="qwen3_5_moe_text")
