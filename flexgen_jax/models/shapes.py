"""Shapes of known models by name, for random weights and for planning, without any file.

Each is the part of the model's published config.json that says how large it is.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import family_of, quantization_of, read_config
from flexgen_jax.models.formats.expected import expected
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.spec_of_config import model_spec

Raw = Mapping[str, Any]

SHAPES: Mapping[str, Raw] = json.loads(
    resources.files("flexgen_jax").joinpath("data/shapes.json").read_text(encoding="utf-8")
)
"""The configs by Hub id, one per line of the file."""


def raw_shape(name: str) -> Raw:
    """Returns the config of a known model in Hugging Face's spelling, by its hub id or the part
    after the slash. Raises `ConfigError` for any other name."""
    names = {full.lower(): full for full in SHAPES}
    names |= {full.split("/")[1].lower(): full for full in SHAPES}
    full = names.get(name.lower())
    if full is None:
        close = difflib.get_close_matches(name.lower(), names, 1)
        hint = f"did you mean {names[close[0]]}? " if close else ""
        raise ConfigError(
            f"unknown shape {name!r}; {hint}`flexgen-jax models` lists the known shapes"
        )
    return SHAPES[full]


def known_shape(name: str) -> ModelConfig:
    """Returns the config of a known model in its published formats, without any file; see
    `raw_shape`."""
    raw = raw_shape(name)
    return with_formats(read_config(raw), quantization_of(raw))


def with_formats(config: ModelConfig, options: Mapping[str, Any]) -> ModelConfig:
    """Returns a config with the formats that its "quantization_config", `options`, promises."""
    family = family_of(config)
    published = expected(
        options, model_spec(config), lambda tensor: family.stored(tensor, config).name
    )
    return replace(config, published=published)
