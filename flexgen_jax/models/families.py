"""Model families as data: the spelling of their configs, and the names of their tensors.

This is the only place where Hugging Face's spelling is read. A new family is one more `Family`;
docs/adding_a_model.md shows how.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.family import (
    LINEAR,
    NORM,
    Family,
    Fields,
    Find,
    alternating,
    fused,
    joined,
    pairs,
    pattern_of,
    woven,
)
from flexgen_jax.models.parts import (
    AttentionSpec,
    ConfigError,
    ExpertsSpec,
    LayerParts,
    MLPSpec,
    NormSpec,
    Routing,
)

# OPT


def _read_opt(raw: Mapping[str, Any]) -> ModelConfig:
    own = Fields(raw)
    pre_norm = bool(raw.get("do_layer_norm_before", True))
    hidden, heads = own.count("hidden_size"), own.count("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    bias, pad = bool(raw.get("enable_bias", True)), raw.get("pad_token_id")
    attention = AttentionSpec(heads, heads, hidden // heads, qkv_bias=bias, out_bias=bias)
    mlp = MLPSpec(own.count("ffn_dim"), raw.get("activation_function", "relu"), bias=bias)
    ids = own.ids(bos=2, eos=2) | {"pad_id": 1 if pad is None else pad}
    return ModelConfig(
        model_type="opt",
        vocab_size=own.get("vocab_size"),
        hidden_size=hidden,
        max_positions=own.get("max_position_embeddings"),
        **pattern_of([LayerParts(attention, mlp)] * own.count("num_hidden_layers")),
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


DEFAULT_WINDOW = 4096
"""The window of configs that have windows and do not say how large they are."""


# LLaMA and models of its shape: Mistral, Qwen, Phi-3, Gemma, Mixtral, OLMo 2, StarCoder2


def _read_llama(
    raw: Mapping[str, Any],
    attention: Mapping[str, Any],
    mlp: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    ids: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Returns the config of a model of LLaMA's shape; the arguments after the first are what its
    family has of its own: fields of `AttentionSpec` (with "windows", the window of each layer,
    "layer_types", which name its rotary embeddings, "rotates", which layers have some,
    "rotates_part", and "blocks", the feed-forward block of each layer), `MLPSpec` and
    `ModelConfig`, and defaults of special tokens."""
    own = Fields(raw)
    hidden, heads = own.count("hidden_size"), own.count("num_attention_heads")
    layers = own.count("num_hidden_layers")
    head_dim = own.count("head_dim", hidden // heads)
    chosen = dict(attention)
    windows = chosen.pop("windows", [None] * layers)
    types = chosen.pop("layer_types", [None] * layers)
    rotates_part = chosen.pop("rotates_part", False)
    rotates = chosen.pop("rotates", [True] * layers)
    own_blocks = chosen.pop("blocks", None) or _experts(own, layers)
    blocks = own_blocks or [_gated(own, "intermediate_size", **(mlp or {}))] * layers
    kinds = [
        LayerParts(
            AttentionSpec(
                heads,
                own.count("num_key_value_heads", heads),
                head_dim,
                window=window,
                rotary=own.rotary(head_dim, layer_type, rotates_part) if is_rotated else None,
                **chosen,
            ),
            block,
        )
        for window, layer_type, is_rotated, block in zip(
            windows, types, rotates, blocks, strict=True
        )
    ]
    fields: dict[str, Any] = {
        "model_type": raw["model_type"],
        "vocab_size": own.get("vocab_size"),
        "hidden_size": hidden,
        "max_positions": own.max_positions,
        "embed_size": hidden,
        "norm": NormSpec(is_rms=True, eps=own.number("rms_norm_eps", 1e-6)),
        "tied_head": bool(raw.get("tie_word_embeddings", False)),
        **pattern_of(kinds),
        **own.ids(**(ids or {})),
    }
    return ModelConfig(**fields | dict(model or {}))


def _gated(own: Fields, width: str, **chosen: Any) -> MLPSpec:
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
        _gated(own, "intermediate_size" if is_mixtral else "moe_intermediate_size"),
        is_normalised=is_mixtral or bool(raw.get("norm_topk_prob", False)),
        shared=_gated(own, "shared_expert_intermediate_size") if shared else None,
        is_shared_gated=bool(shared),
    )
    plain, step = set(raw.get("mlp_only_layers") or ()), raw.get("decoder_sparse_step") or 1
    return [
        _gated(own, "intermediate_size") if i in plain or (i + 1) % step else experts
        for i in range(layers)
    ]


def _windows(raw: Mapping[str, Any], types: list[str]) -> list[int | None]:
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    return [window if t == "sliding_attention" else None for t in types]


def _full_every(number: int, layers: int) -> list[str]:
    """Returns the types of layers of which every `number`th one sees all tokens, the others those
    of a window."""
    return ["sliding_attention" if (i + 1) % number else "full_attention" for i in range(layers)]


def _plain(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    attention = {"qkv_bias": bias, "out_bias": bias}
    return _read_llama(
        raw, attention, {"bias": bool(raw.get("mlp_bias", False))}, ids={"bos": 1, "eos": 2}
    )


def _one_window(raw: Mapping[str, Any]) -> list[int | None]:
    """Returns the window of every layer, where all have the one that the config names."""
    return [raw.get("sliding_window")] * Fields(raw).count("num_hidden_layers")


def _mistral(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Mistral; with `layer_types`, as in Ministral, some layers have windows."""
    raw = {"sliding_window": DEFAULT_WINDOW, **raw}
    types = raw.get("layer_types")
    windows = _windows(raw, types) if types else _one_window(raw)
    attention = {"qkv_bias": False, "out_bias": False, "windows": windows}
    return _read_llama(raw, attention, ids={"bos": 1, "eos": 2})


def _mixtral(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"rope_theta": 1e6, **raw}
    attention = {"qkv_bias": False, "out_bias": False, "windows": _one_window(raw)}
    return _read_llama(raw, attention, ids={"bos": 1, "eos": 2})


def _qwen_types(raw: Mapping[str, Any]) -> list[str]:
    """Returns which layers of Qwen2 and 3 have windows, where the config does not say: those from
    the one that `max_window_layers` names on; in Qwen2-MoE every other one before it; in Qwen3-MoE
    all."""
    most, kind = raw.get("max_window_layers", 28), raw["model_type"]
    layers = range(Fields(raw).count("num_hidden_layers"))
    if kind == "qwen2_moe":
        slide = [i % 2 == 0 and i < most for i in layers]
    else:
        slide = [kind == "qwen3_moe" or i >= most for i in layers]
    return ["sliding_attention" if each else "full_attention" for each in slide]


def _qwen(raw: Mapping[str, Any], has_bias: bool, norm: str | None = None) -> ModelConfig:
    layers = Fields(raw).count("num_hidden_layers")
    types = raw.get("layer_types") or _qwen_types(raw)
    if not raw.get("use_sliding_window", False):
        types = ["full_attention"] * layers
    attention = {"qkv_bias": has_bias, "out_bias": False, "windows": _windows(raw, types)}
    if norm is not None:
        is_biased = bool(raw.get("attention_bias", False))
        attention |= {"qk_norm": norm, "qkv_bias": is_biased, "out_bias": is_biased}
    return _read_llama(raw, attention)


def _qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    return _qwen(raw, has_bias=bool(raw.get("qkv_bias", True)))


def _qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    return _qwen({"head_dim": 128, **raw}, has_bias=False, norm="head")


def _gemma(raw: Mapping[str, Any], attention: Mapping[str, Any]) -> ModelConfig:
    own = Fields(raw)
    hidden, scalar = own.count("hidden_size"), own.number("query_pre_attn_scalar", 256)
    mine = {
        "qkv_bias": bool(raw.get("attention_bias", False)),
        "out_bias": bool(raw.get("attention_bias", False)),
        "scale": scalar**-0.5,
        "softcap": raw.get("attn_logit_softcapping"),
    }
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    model = {
        "norm": NormSpec(is_rms=True, eps=own.number("rms_norm_eps", 1e-6), offset=1.0),
        "norm_place": "around",
        "embed_scale": hidden**0.5,
        "logit_softcap": raw.get("final_logit_softcapping"),
        "tied_head": bool(raw.get("tie_word_embeddings", True)),
    }
    ids = {"bos": 2, "eos": 1}
    return _read_llama(raw, mine | dict(attention), {"activation": activation}, model, ids)


def _gemma2(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"head_dim": 256, "sliding_window": 4096, **raw}
    raw = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}
    types = raw.get("layer_types") or _full_every(2, Fields(raw).count("num_hidden_layers"))
    return _gemma(raw, {"windows": _windows(raw, types)})


def _gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Gemma 3, of models that see, too, the part for text."""
    whole, kind = raw, raw["model_type"]
    raw = {**raw, **raw.get("text_config", {})}
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    raw |= {name: whole[name] for name in ids if whole.get(name) is not None}
    raw = {"head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 131072, **raw}
    raw = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, **raw}
    every = raw.get("sliding_window_pattern") or 6
    types = raw.get("layer_types") or _full_every(every, Fields(raw).count("num_hidden_layers"))
    named = raw.get("rope_parameters") or {}
    scaling = raw.pop("rope_scaling", None) or {}  # from before transformers 5
    raw["rope_parameters"] = {
        "full_attention": {
            "rope_theta": raw.get("rope_theta", 1000000.0),
            **(named.get("full_attention") or {}),
            **scaling,
        },
        "sliding_attention": {
            "rope_theta": raw.get("rope_local_base_freq", 10000.0),
            **(named.get("sliding_attention") or {}),
        },
    }
    attention = {"qk_norm": "head", "windows": _windows(raw, types), "layer_types": types}
    return _gemma({**raw, "model_type": kind}, attention)


def _phi3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Phi-3, in whose first configs longrope has other names."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    names = ("rope_type", "type")
    if any(rope.get(name) in ("su", "yarn") for name in names):
        raw = {**raw, "rope_scaling": rope | dict.fromkeys(names, "longrope")}
    attention = {"qkv_bias": False, "out_bias": False, "windows": _one_window(raw)}
    attention["rotates_part"] = True
    return _read_llama(raw, attention, ids={"bos": 1, "eos": 32000})


def _olmo2(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    attention = {"qkv_bias": bias, "out_bias": bias, "qk_norm": "all"}
    return _read_llama(raw, attention, model={"norm_place": "result"}, ids={"eos": 50279})


def _olmo3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads OLMo 3: only layers that see all tokens have scaled rotary embeddings."""
    layers, theta = Fields(raw).count("num_hidden_layers"), 500000.0
    types = raw.get("layer_types") or _full_every(4, layers)
    named = raw.get("rope_parameters") or {}
    full = {**(named.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    rope = {
        "full_attention": {"rope_theta": raw.get("rope_theta", theta), **full},
        "sliding_attention": {"rope_theta": theta, **(named.get("sliding_attention") or {})},
    }
    raw = {"rms_norm_eps": 1e-5, **raw, "rope_scaling": None, "rope_parameters": rope}
    bias = bool(raw.get("attention_bias", False))
    attention = {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "all",
        "windows": _windows(raw, types),
        "layer_types": types,
    }
    return _read_llama(raw, attention, model={"norm_place": "result"}, ids={"eos": 50279})


def _smollm3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads SmolLM3, some of whose layers have no positions."""
    raw = {"rope_theta": 2000000.0, "tie_word_embeddings": True, **raw}
    layers, every = range(Fields(raw).count("num_hidden_layers")), raw.get("no_rope_layer_interval")
    rotates = raw.get("no_rope_layers") or [(i + 1) % (every or 4) != 0 for i in layers]
    slides = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    types = raw.get("layer_types") or [
        "full_attention" if is_rotated or not slides else "sliding_attention"
        for is_rotated in rotates
    ]
    windows = _windows(raw, types) if raw.get("use_sliding_window") else [None for _ in layers]
    bias = bool(raw.get("attention_bias", False))
    attention = {"qkv_bias": bias, "out_bias": bias, "windows": windows, "rotates": rotates}
    mlp = {"bias": bool(raw.get("mlp_bias", False))}
    return _read_llama(raw, attention, mlp, ids={"bos": 128000, "eos": 128001})


def _glm4_moe(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads GLM-4.5 to 4.7: the first layers have no experts, the others a shared block, too."""
    raw = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **raw}
    own = Fields(raw)
    width, shared = own.count("moe_intermediate_size"), own.count("n_shared_experts", 1)
    experts = ExpertsSpec(
        own.count("num_local_experts", own.count("n_routed_experts", 128)),
        own.count("num_experts_per_tok", 8),
        _gated(own, "moe_intermediate_size"),
        is_normalised=bool(raw.get("norm_topk_prob", True)),
        shared=replace(_gated(own, "moe_intermediate_size"), width=width * shared),
        routing=Routing(
            scores="sigmoid",
            has_correction=True,
            groups=own.count("n_group", 1),
            top_groups=own.count("topk_group", 1),
            scale=own.number("routed_scaling_factor", 1.0),
            is_precise=True,
        ),
    )
    dense = raw.get("first_k_dense_replace", 1)
    layers = range(own.count("num_hidden_layers"))
    attention = {
        "qkv_bias": bool(raw.get("attention_bias", False)),
        "out_bias": False,
        "qk_norm": "head" if raw.get("use_qk_norm", False) else None,
        "rotates_part": True,
        "blocks": [_gated(own, "intermediate_size") if i < dense else experts for i in layers],
    }
    return _read_llama(raw, attention)


def _hy_v3(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads Hunyuan 3: the first layer has no experts, unless the config says otherwise."""
    raw = {"head_dim": 128, "rms_norm_eps": 1e-5, **raw}
    own, bias = Fields(raw), bool(raw.get("attention_bias", False))
    layers, mlp_bias = own.count("num_hidden_layers"), bool(raw.get("mlp_bias", False))
    width, shared = own.count("moe_intermediate_size"), own.count("num_shared_experts", 1)
    experts = ExpertsSpec(
        own.count("num_experts", 192),
        own.count("num_experts_per_tok", 8),
        _gated(own, "moe_intermediate_size"),
        is_normalised=True,
        shared=replace(_gated(own, "moe_intermediate_size", bias=mlp_bias), width=width * shared),
        routing=Routing(
            scores="sigmoid",
            has_correction=True,
            scale=own.number("router_scaling_factor", 2.826),
            is_precise=True,
        ),
    )
    dense = _gated(own, "intermediate_size", bias=mlp_bias)
    types = raw.get("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
    attention = {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "head",
        "blocks": [dense if kind == "dense" else experts for kind in types],
    }
    return _read_llama(raw, attention)


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
    own = Fields(raw)
    layers, bias = own.count("num_hidden_layers"), bool(raw.get("attention_bias", True))
    types = raw.get("layer_types") or _full_every(2, layers)
    block = MLPSpec(
        own.count("intermediate_size"),
        "silu",
        is_gated=True,
        bias=True,
        limit=own.number("swiglu_limit", 7.0),
        swish=own.number("swiglu_alpha", 1.702),
    )
    experts = ExpertsSpec(
        own.count("num_local_experts"),
        own.count("num_experts_per_tok", raw.get("experts_per_token") or 4),
        block,
        is_normalised=True,
        routing=Routing(has_bias=True),
    )
    attention = {
        "qkv_bias": bias,
        "out_bias": bias,
        "has_sinks": True,
        "windows": _windows(raw, types),
        "blocks": [experts] * layers,
    }
    return _read_llama(raw, attention)


def _minimax_m2(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"rope_theta": 5000000.0, "head_dim": 128, **raw}
    own = Fields(raw)
    if raw.get("rotary_dim") is not None:
        share = own.number("rotary_dim") / own.count("head_dim")
        raw = {"partial_rotary_factor": share, **raw}
    experts = ExpertsSpec(
        own.count("num_local_experts", 256),
        own.count("num_experts_per_tok", 8),
        _gated(own, "intermediate_size"),
        is_normalised=True,
        routing=Routing(scores="sigmoid", has_correction=True),
    )
    attention = {
        "qkv_bias": False,
        "out_bias": False,
        "qk_norm": "all",
        "rotates_part": True,
        "blocks": [experts] * own.count("num_hidden_layers"),
    }
    return _read_llama(raw, attention, ids={"bos": 200034, "eos": 200020})


def _starcoder2(raw: Mapping[str, Any]) -> ModelConfig:
    own, bias = Fields(raw), bool(raw.get("use_bias", True))
    attention = {"qkv_bias": bias, "out_bias": bias, "windows": _one_window(raw)}
    activation = raw.get("hidden_act") or "gelu_pytorch_tanh"
    mlp = {"is_gated": False, "bias": bias, "activation": activation}
    norm = NormSpec(eps=own.number("norm_epsilon", 1e-5))
    model = {"norm": norm, "tied_head": bool(raw.get("tie_word_embeddings", True))}
    return _read_llama(raw, attention, mlp, model, ids={"bos": 50256, "eos": 50256})


_LAYER = "layers.{i}"

_ENDS = {
    "embedding.tokens": "embed_tokens.weight",
    "head.tokens": "lm_head.weight",
    **pairs("head.norm", "norm", NORM),
}
_ATTENTION = {
    **pairs("decoder.{i}.attention.q", f"{_LAYER}.self_attn.q_proj", LINEAR),
    **pairs("decoder.{i}.attention.k", f"{_LAYER}.self_attn.k_proj", LINEAR),
    **pairs("decoder.{i}.attention.v", f"{_LAYER}.self_attn.v_proj", LINEAR),
    **pairs("decoder.{i}.attention.out", f"{_LAYER}.self_attn.o_proj", LINEAR),
    **pairs("decoder.{i}.attention.q_norm", f"{_LAYER}.self_attn.q_norm", NORM),
    **pairs("decoder.{i}.attention.k_norm", f"{_LAYER}.self_attn.k_norm", NORM),
    **pairs("decoder.{i}.attention_norm", f"{_LAYER}.input_layernorm", NORM),
    **pairs("decoder.{i}.mlp_norm", f"{_LAYER}.post_attention_layernorm", NORM),
}


def _block(ours: str, theirs: str) -> dict[str, str]:
    """Returns the names of a gated block's tensors."""
    return {
        key: name
        for part in ("gate", "up", "down")
        for key, name in pairs(
            f"decoder.{{i}}.{ours}.{part}", f"{_LAYER}.mlp.{theirs}.{part}_proj", LINEAR
        ).items()
    }


_MLP = {
    **pairs("decoder.{i}.mlp.gate", f"{_LAYER}.mlp.gate_proj", LINEAR),
    **pairs("decoder.{i}.mlp.up", f"{_LAYER}.mlp.up_proj", LINEAR),
    **pairs("decoder.{i}.mlp.down", f"{_LAYER}.mlp.down_proj", LINEAR),
}
_NAMES: dict[str, str | Find] = {**_ENDS, **_ATTENTION, **_MLP}
_GEMMA_NAMES = _NAMES | {
    **pairs("decoder.{i}.attention_result_norm", f"{_LAYER}.post_attention_layernorm", NORM),
    **pairs("decoder.{i}.mlp_norm", f"{_LAYER}.pre_feedforward_layernorm", NORM),
    **pairs("decoder.{i}.mlp_result_norm", f"{_LAYER}.post_feedforward_layernorm", NORM),
}

LLAMA = Family("llama", _plain, _NAMES)
MISTRAL = Family("mistral", _mistral, _NAMES)
QWEN2 = Family("qwen2", _qwen2, _NAMES)
QWEN3 = Family("qwen3", _qwen3, _NAMES)
GEMMA2 = Family("gemma2", _gemma2, _GEMMA_NAMES)
GEMMA3 = Family("gemma3_text", _gemma3, _GEMMA_NAMES)
GEMMA3_SEEING = Family(
    "gemma3",
    _gemma3,
    _GEMMA_NAMES,
    prefixes=("language_model.model.", "model.language_model.", "language_model.", "model.", ""),
)


def _phi3_names() -> dict[str, str | Find]:
    def attention(parts: LayerParts) -> tuple[int, ...]:
        heads = parts.attention
        return heads.query_size, heads.kv_size, heads.kv_size

    def widths(parts: LayerParts) -> tuple[int, ...]:
        assert isinstance(parts.mlp, MLPSpec)
        return (parts.mlp.width,) * 2

    qkv, gate_up = f"{_LAYER}.self_attn.qkv_proj.weight", f"{_LAYER}.mlp.gate_up_proj.weight"
    return _NAMES | {
        "decoder.{i}.attention.q.kernel": joined(qkv, attention, 0),
        "decoder.{i}.attention.k.kernel": joined(qkv, attention, 1),
        "decoder.{i}.attention.v.kernel": joined(qkv, attention, 2),
        "decoder.{i}.mlp.gate.kernel": joined(gate_up, widths, 0),
        "decoder.{i}.mlp.up.kernel": joined(gate_up, widths, 1),
    }


PHI3 = Family("phi3", _phi3, _phi3_names())
OLMO2 = Family(
    "olmo2",
    _olmo2,
    _NAMES
    | {
        **pairs("decoder.{i}.attention_result_norm", f"{_LAYER}.post_attention_layernorm", NORM),
        **pairs("decoder.{i}.mlp_result_norm", f"{_LAYER}.post_feedforward_layernorm", NORM),
    },
)
OLMO3 = Family("olmo3", _olmo3, OLMO2.names)
SMOLLM3 = Family("smollm3", _smollm3, _NAMES)
STARCODER2 = Family(
    "starcoder2",
    _starcoder2,
    _NAMES
    | {
        **pairs("decoder.{i}.mlp.up", f"{_LAYER}.mlp.c_fc", LINEAR),
        **pairs("decoder.{i}.mlp.down", f"{_LAYER}.mlp.c_proj", LINEAR),
    },
)

_MIXTRAL_EXPERT = f"{_LAYER}.block_sparse_moe.experts.{{e}}"

_FUSED_EXPERTS: dict[str, str | Find] = {
    "decoder.{i}.router.kernel": f"{_LAYER}.mlp.gate.weight",
    "decoder.{i}.experts.{e}.gate.kernel": fused(f"{_LAYER}.mlp.experts.gate_up_proj", 0, 2),
    "decoder.{i}.experts.{e}.up.kernel": fused(f"{_LAYER}.mlp.experts.gate_up_proj", 1, 2),
    "decoder.{i}.experts.{e}.down.kernel": fused(f"{_LAYER}.mlp.experts.down_proj", 0, 1),
}
"""Experts that are stored together, as transformers 5 has them."""

MIXTRAL = Family(
    "mixtral",
    _mixtral,
    _NAMES
    | {
        "decoder.{i}.router.kernel": f"{_LAYER}.block_sparse_moe.gate.weight",
        "decoder.{i}.experts.{e}.gate.kernel": f"{_MIXTRAL_EXPERT}.w1.weight",
        "decoder.{i}.experts.{e}.up.kernel": f"{_MIXTRAL_EXPERT}.w3.weight",
        "decoder.{i}.experts.{e}.down.kernel": f"{_MIXTRAL_EXPERT}.w2.weight",
    },
    _FUSED_EXPERTS,
)

_QWEN_MOE_NAMES = _NAMES | {
    "decoder.{i}.router.kernel": f"{_LAYER}.mlp.gate.weight",
    "decoder.{i}.shared_gate.kernel": f"{_LAYER}.mlp.shared_expert_gate.weight",
    **_block("shared", "shared_expert"),
    **_block("experts.{e}", "experts.{e}"),
}

GLM4_MOE = Family(
    "glm4_moe",
    _glm4_moe,
    _QWEN_MOE_NAMES
    | {
        "decoder.{i}.router_correction": f"{_LAYER}.mlp.gate.e_score_correction_bias",
        **_block("shared", "shared_experts"),
    },
    _FUSED_EXPERTS,
)
HY_V3 = Family(
    "hy_v3",
    _hy_v3,
    _QWEN_MOE_NAMES
    | {
        "decoder.{i}.router.kernel": f"{_LAYER}.mlp.router.gate.weight",
        "decoder.{i}.router_correction": f"{_LAYER}.mlp.expert_bias",
        **_block("shared", "shared_mlp"),
    },
    _FUSED_EXPERTS
    | {
        "decoder.{i}.router_correction": f"{_LAYER}.mlp.e_score_correction_bias",
        **_block("shared", "shared_experts"),
    },
)
_GPT_OSS = f"{_LAYER}.mlp.experts"
GPT_OSS = Family(
    "gpt_oss",
    _gpt_oss,
    _NAMES
    | {
        "decoder.{i}.attention.sinks": f"{_LAYER}.self_attn.sinks",
        **pairs("decoder.{i}.router", f"{_LAYER}.mlp.router", LINEAR),
        "decoder.{i}.experts.{e}.gate.kernel": alternating(f"{_GPT_OSS}.gate_up_proj", 0, True),
        "decoder.{i}.experts.{e}.gate.bias": alternating(f"{_GPT_OSS}.gate_up_proj_bias", 0),
        "decoder.{i}.experts.{e}.up.kernel": alternating(f"{_GPT_OSS}.gate_up_proj", 1, True),
        "decoder.{i}.experts.{e}.up.bias": alternating(f"{_GPT_OSS}.gate_up_proj_bias", 1),
        "decoder.{i}.experts.{e}.down.kernel": fused(f"{_GPT_OSS}.down_proj", 0, 1, True),
        "decoder.{i}.experts.{e}.down.bias": fused(f"{_GPT_OSS}.down_proj_bias", 0, 1),
    },
)
MINIMAX_M2 = Family(
    "minimax_m2",
    _minimax_m2,
    {
        **MIXTRAL.names,
        "decoder.{i}.router_correction": f"{_LAYER}.block_sparse_moe.e_score_correction_bias",
    },
    _FUSED_EXPERTS | {"decoder.{i}.router_correction": f"{_LAYER}.mlp.e_score_correction_bias"},
)

QWEN2_MOE = Family("qwen2_moe", _qwen2, _QWEN_MOE_NAMES, _FUSED_EXPERTS)
QWEN3_MOE = Family("qwen3_moe", _qwen3, _QWEN_MOE_NAMES, _FUSED_EXPERTS)


# GPT-NeoX and Pythia


def _read_neox(raw: Mapping[str, Any]) -> ModelConfig:
    own = Fields(raw)
    hidden, heads = own.count("hidden_size"), own.count("num_attention_heads")
    bias, share = bool(raw.get("attention_bias", True)), raw.get("rotary_pct", 0.25)
    theta = raw.get("rotary_emb_base", 10000.0)
    rotary = own.rotary(
        hidden // heads, rotates_part=True, partial_rotary_factor=share, rope_theta=theta
    )
    attention = AttentionSpec(
        heads, heads, hidden // heads, qkv_bias=bias, out_bias=bias, rotary=rotary
    )
    mlp = MLPSpec(own.count("intermediate_size"), raw.get("hidden_act", "gelu"))
    return ModelConfig(
        model_type="gpt_neox",
        vocab_size=own.get("vocab_size"),
        hidden_size=hidden,
        max_positions=own.max_positions,
        **pattern_of([LayerParts(attention, mlp)] * own.count("num_hidden_layers")),
        embed_size=hidden,
        norm=NormSpec(eps=own.number("layer_norm_eps", 1e-5)),
        is_parallel=bool(raw.get("use_parallel_residual", True)),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        **own.ids(bos=0, eos=2),
    )


_QKV = f"{_LAYER}.attention.query_key_value"

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
        **pairs("decoder.{i}.attention.out", f"{_LAYER}.attention.dense", LINEAR),
        **pairs("decoder.{i}.attention_norm", f"{_LAYER}.input_layernorm", NORM),
        **pairs("decoder.{i}.mlp_norm", f"{_LAYER}.post_attention_layernorm", NORM),
        **pairs("decoder.{i}.mlp.up", f"{_LAYER}.mlp.dense_h_to_4h", LINEAR),
        **pairs("decoder.{i}.mlp.down", f"{_LAYER}.mlp.dense_4h_to_h", LINEAR),
    },
    prefixes=("gpt_neox.", ""),
)


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        OPT,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        PHI3,
        GEMMA2,
        GEMMA3,
        GEMMA3_SEEING,
        NEOX,
        OLMO2,
        OLMO3,
        SMOLLM3,
        STARCODER2,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        GLM4_MOE,
        MINIMAX_M2,
        HY_V3,
        GPT_OSS,
    )
}


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
"""Fields of configs that may have these values only, beside null: other models attend in another
way."""

QUANTIZED = "use the checkpoint in bf16, fp16 or fp32 that it was made from, and --weight-bits 4"


METHODS = (
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "gptq",
    "awq",
    "compressed-tensors",
    "modelopt",
    "bitsandbytes",
)
"""Methods of quantization whose files are read, as "quant_method" names them."""


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns how a config says that the weights are quantized, nothing if it does not; raises
    `ConfigError` for a method that is not known."""
    text = raw.get("text_config") or {}
    stored = raw.get("quantization_config") or text.get("quantization_config") or {}
    if not stored:
        return {}
    if not isinstance(stored, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {stored!r}")
    method = str(stored.get("quant_method", "")).lower().replace("_", "-")
    if method not in (name.replace("_", "-") for name in METHODS):
        raise ConfigError(
            f"the weights are quantized by {method.upper()}, which is not read: {QUANTIZED}"
        )
    return stored


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.model_type]


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Builds the config from a Hugging Face `config.json`.

    Raises `ConfigError` for a config that is incomplete or not supported.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        close = difflib.get_close_matches(str(model_type), FAMILIES, 1, 0.4)
        hint = f"; the closest is {close[0]}" if close else ""
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}{hint}"
        )
    quantization_of(raw)
    for part in (raw, raw.get("text_config") or {}):
        for name, allowed in REFUSED.items():
            if part.get(name) not in (None, *allowed):
                raise ConfigError(f"{name} is {part[name]!r}, which is not supported")
    return FAMILIES[model_type].read_config(raw)
