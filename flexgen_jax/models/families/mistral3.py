"""Ministral 3, and the parts for text of Mistral's models that see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.dense import mistral
from flexgen_jax.models.families.latent import LATENT_NAMES, MISTRAL4, mistral4
from flexgen_jax.models.families.llama import NAMES, one_window, read_llama
from flexgen_jax.models.family import SEEING, Family, Fields, with_text
from flexgen_jax.models.parts import ConfigError

YARN_OF_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"head_dim": 128, "rms_norm_eps": 1e-5, **raw}
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw["rope_parameters"] = YARN_OF_MINISTRAL3
    attention = {
        "qkv_bias": False,
        "out_bias": False,
        "windows": one_window(raw),
        "position_scale": Fields(raw).position_scale,
    }
    return read_llama(raw, attention, ids={"bos": 1, "eos": 2})


_TEXT = {"mistral": mistral, "ministral3": _ministral3, "mistral4": mistral4}
"""Readers of the part for text, by its own type."""


def _mistral3(raw: Mapping[str, Any]) -> ModelConfig:
    text_type = (raw.get("text_config") or {}).get("model_type", "mistral")
    if text_type not in _TEXT:
        raise ConfigError(
            f"text_config has model_type {text_type!r}; supported: {', '.join(_TEXT)}"
        )
    return _TEXT[text_type](with_text({"sliding_window": None, **raw}))


MINISTRAL3 = Family("ministral3", _ministral3, NAMES)
MISTRAL3 = Family(
    "mistral3", _mistral3, LATENT_NAMES | NAMES, MISTRAL4.other_names, prefixes=SEEING
)
