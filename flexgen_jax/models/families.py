"""Model families as data: the spelling of their configs, their tensor names, known shapes.

This is the only place where Hugging Face's spelling is read. A new family is one more `Family`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flexgen_jax.models.config import ConfigError, ModelConfig


@dataclass(frozen=True)
class Family:
    """How one `model_type` of Hugging Face maps to this package.

    names: Hugging Face's tensor names by this package's keys; "{i}" is the decoder layer's index.
    prefixes: strings that may precede every Hugging Face name.
    ignored: patterns of names of tensors in checkpoints that inference does not need.
    """

    model_type: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    names: Mapping[str, str]
    prefixes: tuple[str, ...]
    ignored: tuple[str, ...]

    def checkpoint_name(self, key: str) -> str:
        """Returns a tensor's Hugging Face name, without prefix: "decoder.layers.3.fc1.weight"."""
        layer = re.match(r"decoder\.(\d+)\.(.*)", key)
        if layer is None:
            return self.names[key]
        return self.names["decoder.{i}." + layer[2]].replace("{i}", layer[1])

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


def _read_opt(raw: Mapping[str, Any]) -> ModelConfig:
    def get(name: str, default: Any = None) -> Any:
        value = raw.get(name, default)
        if value is None:
            raise ConfigError(f"the config has no {name!r}")
        return value

    pre_norm = bool(raw.get("do_layer_norm_before", True))
    eos = raw.get("eos_token_id", 2)
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    pad_id = raw.get("pad_token_id")
    return ModelConfig(
        model_type="opt",
        vocab_size=get("vocab_size"),
        hidden_size=get("hidden_size"),
        num_layers=get("num_hidden_layers"),
        num_heads=get("num_attention_heads"),
        ffn_size=get("ffn_dim"),
        max_positions=get("max_position_embeddings"),
        embed_size=raw.get("word_embed_proj_dim") or get("hidden_size"),
        activation=raw.get("activation_function", "relu"),
        pre_norm=pre_norm,
        final_norm=pre_norm and not raw.get("_remove_final_layer_norm", False),
        norm_affine=bool(raw.get("layer_norm_elementwise_affine", True)),
        use_bias=bool(raw.get("enable_bias", True)),
        tied_head=bool(raw.get("tie_word_embeddings", True)),
        bos_id=raw.get("bos_token_id", 2),
        eos_ids=eos_ids,
        pad_id=1 if pad_id is None else pad_id,
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _write_opt(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.ffn_size,
        "max_position_embeddings": config.max_positions,
        "word_embed_proj_dim": config.embed_size,
        "activation_function": config.activation,
        "do_layer_norm_before": config.pre_norm,
        "_remove_final_layer_norm": config.pre_norm and not config.final_norm,
        "layer_norm_elementwise_affine": config.norm_affine,
        "enable_bias": config.use_bias,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids),
        "pad_token_id": config.pad_id,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "torch_dtype": config.dtype,
    }


def _pairs(ours: str, theirs: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {f"{ours}.{part}": f"{theirs}.{name}" for part, name in parts.items()}


_LINEAR = {"kernel": "weight", "bias": "bias"}
_NORM = {"scale": "weight", "bias": "bias"}
_OPT_LAYER = "decoder.layers.{i}"

OPT = Family(
    model_type="opt",
    read_config=_read_opt,
    write_config=_write_opt,
    names={
        "embedding.tokens": "decoder.embed_tokens.weight",
        "embedding.positions": "decoder.embed_positions.weight",
        "embedding.project_in.kernel": "decoder.project_in.weight",
        "head.project_out.kernel": "decoder.project_out.weight",
        "head.tokens": "lm_head.weight",
        **_pairs("head.norm", "decoder.final_layer_norm", _NORM),
        **_pairs("decoder.{i}.attention.q", f"{_OPT_LAYER}.self_attn.q_proj", _LINEAR),
        **_pairs("decoder.{i}.attention.k", f"{_OPT_LAYER}.self_attn.k_proj", _LINEAR),
        **_pairs("decoder.{i}.attention.v", f"{_OPT_LAYER}.self_attn.v_proj", _LINEAR),
        **_pairs("decoder.{i}.attention.out", f"{_OPT_LAYER}.self_attn.out_proj", _LINEAR),
        **_pairs("decoder.{i}.attention_norm", f"{_OPT_LAYER}.self_attn_layer_norm", _NORM),
        **_pairs("decoder.{i}.mlp.fc1", f"{_OPT_LAYER}.fc1", _LINEAR),
        **_pairs("decoder.{i}.mlp.fc2", f"{_OPT_LAYER}.fc2", _LINEAR),
        **_pairs("decoder.{i}.mlp_norm", f"{_OPT_LAYER}.final_layer_norm", _NORM),
    },
    prefixes=("model.", ""),
    ignored=(r"decoder\.version", r"decoder\.embed_positions\._float_tensor"),
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (OPT,)}


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.model_type]


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Builds the config from a Hugging Face `config.json`.

    Raises `ConfigError` for a config that is incomplete or not supported.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type].read_config(raw)


# name: (hidden size, layers, heads); Zhang et al. 2022, "OPT", table 1.
_OPT_SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "1.3b": (2048, 24, 32),
    "2.7b": (2560, 32, 32),
    "6.7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "66b": (9216, 64, 72),
    "175b": (12288, 96, 96),
}


def _opt_shape(size: str) -> ModelConfig:
    hidden, layers, heads = _OPT_SHAPES[size]
    is_350m = size == "350m"
    return ModelConfig(
        model_type="opt",
        vocab_size=50272,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        ffn_size=4 * hidden,
        max_positions=2048,
        embed_size=512 if is_350m else hidden,
        pre_norm=not is_350m,
        final_norm=not is_350m,
    )


def known_shape(name: str) -> ModelConfig:
    """Returns the config of "facebook/opt-125m" to "facebook/opt-175b", without any file.

    Raises `ConfigError` for any other name.
    """
    size = name.removeprefix("facebook/").removeprefix("opt-")
    if size not in _OPT_SHAPES or not name.startswith(("facebook/opt-", "opt-")):
        known = ", ".join(f"facebook/opt-{size}" for size in _OPT_SHAPES)
        raise ConfigError(f"unknown shape {name!r}; known shapes: {known}")
    return _opt_shape(size)
