"""Model families as data: the spelling of their configs, and the names of their tensors.

This is the only place where Hugging Face's spelling is read. A new family is one more `Family`;
docs/adding_a_model.md shows how.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families.dense import (
    ERNIE4_5,
    EXAONE4,
    GLM4,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    SEED_OSS,
    SMOLLM3,
    STARCODER2,
)
from flexgen_jax.models.families.experts import (
    ERNIE4_5_MOE,
    GLM4_MOE,
    GPT_OSS,
    HY_V3,
    MINIMAX_M2,
    MIXTRAL,
)
from flexgen_jax.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_SEEING
from flexgen_jax.models.families.gemma4 import GEMMA4, GEMMA4_TEXT, GEMMA4_UNIFIED
from flexgen_jax.models.families.latent import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    KIMI_K2,
    KIMI_K25,
    MISTRAL4,
)
from flexgen_jax.models.families.lfm2 import LFM2, LFM2_MOE
from flexgen_jax.models.families.llama import LLAMA
from flexgen_jax.models.families.mistral3 import MINISTRAL3, MISTRAL3
from flexgen_jax.models.families.neox import NEOX
from flexgen_jax.models.families.opt import OPT
from flexgen_jax.models.families.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from flexgen_jax.models.families.qwen_next import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from flexgen_jax.models.family import Family
from flexgen_jax.models.parts import ConfigError

FAMILIES: dict[str, Family] = {
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
        ERNIE4_5_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K2,
        KIMI_K25,
        GLM4_MOE_LITE,
        MISTRAL4,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        MINISTRAL3,
        MISTRAL3,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN3_NEXT,
        ERNIE4_5,
        SEED_OSS,
        EXAONE4,
        GLM4,
        GEMMA,
        LFM2,
        LFM2_MOE,
        QWEN3_5,
        QWEN3_5_TEXT,
        QWEN3_5_MOE,
        QWEN3_5_MOE_TEXT,
        GEMMA4,
        GEMMA4_TEXT,
        GEMMA4_UNIFIED,
    )
}

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "use_bidirectional_attention": (False, "vision"),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
}
"""Config fields that must have one of these values, or null: other models attend in another
way. Tokens of pictures that see each other ("vision") do not occur in texts."""

QUANTIZED = "use the checkpoint in bf16, fp16 or fp32 that it was made from, and --weight-bits 4"

METHODS = (
    "fp8",
    "fbgemm_fp8",
    "mxfp4",
    "gptq",
    "awq",
    "auto-round",
    "compressed-tensors",
    "modelopt",
    "bitsandbytes",
    "mlx",
    "flexgen-jax",
)
"""Methods of quantization whose files are read, as "quant_method" names them."""


def quantization_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns how a config says that the weights are quantized, nothing if it does not; raises
    `ConfigError` for a method that is not known."""
    text = raw.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    stored = raw.get("quantization_config") or text.get("quantization_config") or {}
    if isinstance(raw.get("quantization"), Mapping) and "quant_method" not in stored:
        return {"quant_method": "mlx", **raw["quantization"]}
    if not stored:
        return {}
    if not isinstance(stored, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {stored!r}")
    method = str(stored.get("quant_method", "")).lower().replace("_", "-")
    if variant := _unread_variant(stored):
        raise ConfigError(f"quantization_config has {variant}, which is not supported: {QUANTIZED}")
    if method not in (name.replace("_", "-") for name in METHODS):
        raise ConfigError(
            f"the weights are quantized by {method.upper()}, which is not supported: {QUANTIZED}"
        )
    return stored


def _unread_variant(stored: Mapping[str, Any]) -> str:
    """Returns the entry of a quantization_config that asks for a variant of a known method which is
    not read, "" if there is none."""
    algorithm = str(stored.get("quant_algo", "")).upper()
    return f"quant_algo {algorithm}" if "AWQ" in algorithm or "SQ" in algorithm else ""


ENTRY_POINTS = "flexgen_jax.families"
"""The entry point group for families of other packages."""


def register_family(family: Family) -> None:
    """Makes a family known, so that its models can be opened; see docs/adding_a_model.md.

    A package that is installed may name the family as an entry point of the group
    "flexgen_jax.families" instead. Raises `ConfigError` for a model type that another family has.
    """
    existing = FAMILIES.get(family.model_type)
    if existing is not None and existing is not family:
        raise ConfigError(f"model_type {family.model_type!r} already has a family")
    FAMILIES[family.model_type] = family


def _from_entry_points(model_type: str) -> None:
    """Makes the family of a type known, if an installed package has it."""
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == model_type:
            register_family(point.load())


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.model_type]


LARGE_COUNTS, MAX_COUNT = re.compile("layers?$|experts$"), 10_000
"""Names of numbers of layers or experts, and the most of either."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Builds the config from a Hugging Face `config.json`.

    Raises `ConfigError` for a config that is incomplete or not supported.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type not in FAMILIES:
        _from_entry_points(model_type)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(_unsupported(str(model_type)))
    quantization_of(raw)
    text = raw.get("text_config")
    for section in (raw, text if isinstance(text, Mapping) else {}):
        for name, value in section.items():
            if LARGE_COUNTS.search(name) and isinstance(value, int) and value > MAX_COUNT:
                raise ConfigError(f"{name} is {value}, but at most {MAX_COUNT} is supported")
        for name, allowed in REFUSED.items():
            if section.get(name) not in (None, *allowed):
                raise ConfigError(f"{name} is {section[name]!r}, which is not supported")
    return FAMILIES[model_type].read_config(raw)


STATE = "layers with a recurrent state"
MISSING: Mapping[str, tuple[str, str]] = {
    "kimi_linear": ("kimi_k2", STATE),
    "mamba": ("llama", STATE),
    "mamba2": ("llama", STATE),
    "falcon_mamba": ("llama", STATE),
    "falcon_h1": ("llama", STATE),
    "jamba": ("mixtral", STATE),
    "nemotron_h": ("llama", STATE),
    "granitemoehybrid": ("mixtral", STATE),
    "minimax": ("minimax_m2", "layers of linear attention"),
    "gemma3n": ("gemma3_text", "embeddings of each layer, and layers that share keys and values"),
    "llama4": ("llama", "attention in chunks, and experts whose input is weighted"),
    "deepseek_v4": ("deepseek_v32", "compressed and hyper-connected attention"),
    "qwen2_vl": ("qwen2", "its prefixes and rotary sections"),
    "qwen2_5_vl": ("qwen2", "its prefixes and rotary sections"),
    "glm4v_moe": ("glm4_moe", "its prefixes and rotary sections"),
    "cohere2": ("llama", "a parallel block with interleaved rotary embeddings"),
    "gpt2": ("opt", "kernels that are stored transposed and joined"),
    "falcon": ("gpt_neox", "one head of keys and values joined with the queries"),
    "bloom": ("opt", "ALiBi"),
    "mpt": ("opt", "ALiBi"),
    "phi": ("gpt_neox", "rotary embeddings of a part in a parallel block with own names"),
    "phimoe": ("mixtral", "sparsemixer's routing"),
    "t5": ("llama", "an encoder and cross-attention"),
    "bert": ("llama", "generation: it is an encoder"),
}
"""Known types that are not supported: the closest family, and the feature that it lacks."""


def _unsupported(model_type: str) -> str:
    """Returns the error message for an unsupported type."""
    base_type = model_type.removesuffix("_text")
    message = f"model_type {model_type!r} is not supported"
    if base_type in MISSING:
        closest, missing = MISSING[base_type]
        message += f": the closest family, {closest}, lacks {missing}"
    else:
        close = difflib.get_close_matches(model_type, FAMILIES, 1, 0.4)
        message += f"; the closest is {close[0]}" if close else ""
    return f"{message}; supported: {', '.join(FAMILIES)}"
