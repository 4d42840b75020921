"""What a folder's generation_config.json asks for: end tokens, and defaults of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_jax.models.checkpoint import CheckpointError, read_json

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults of sampling parameters that a request does not set; greedy where a folder has no
    wish."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


GREEDY = SamplingDefaults()


@dataclass(frozen=True)
class GenerationDefaults:
    """A folder's wishes; eos_ids: its end tokens, None if it names none."""

    sampling: SamplingDefaults = GREEDY
    eos_ids: tuple[int, ...] | None = None


def read_defaults(folder: Path) -> GenerationDefaults:
    """Reads a folder's generation_config.json; raises `CheckpointError` if it is not valid."""
    path = folder / FILE
    if not path.is_file():
        return GenerationDefaults()
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    eos = raw.get("eos_token_id")
    ends = None if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if ends is not None and not all(isinstance(end, int) and end >= 0 for end in ends):
        raise CheckpointError(f"{path}: eos_token_id must be token ids, not {eos!r}")
    if not raw.get("do_sample", False):
        return GenerationDefaults(eos_ids=ends)
    temperature = _number(path, raw, "temperature", 1.0, 0.0, 100.0)
    top_k = _number(path, raw, "top_k", 0, 0, 1 << 30)
    top_p = _number(path, raw, "top_p", 1.0, 1e-6, 1.0)
    return GenerationDefaults(SamplingDefaults(temperature, int(top_k), top_p), ends)


def _number(
    path: Path, raw: dict[str, Any], name: str, default: float, low: float, high: float
) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(f"{path}: {name} must be from {low:g} to {high:g}, not {value!r}")
    return value
