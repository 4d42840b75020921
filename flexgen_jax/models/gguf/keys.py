"""The metadata of a GGUF file's architecture."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.container import GgufFile


class Keys:
    """Metadata of an architecture, whose names begin with its own."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.metadata, self._begin = file, file.metadata, architecture
        self._read = set[str]()

    def maybe(self, name: str) -> Any:
        self._read.add(name)
        return self.metadata.get(f"{self._begin}.{name}")

    def unread(self) -> dict[str, Any]:
        """Returns the metadata that nothing has read."""
        begin = f"{self._begin}."
        names = [name.removeprefix(begin) for name in self.metadata if name.startswith(begin)]
        return {name: self.metadata[begin + name] for name in names if name not in self._read}

    def need(self, name: str) -> Any:
        value = self.maybe(name)
        if value is None:
            raise CheckpointError(
                f"{self.file.path}: its metadata has no {self._begin}.{name}; convert it again"
            )
        return value

    def expect(self, name: str, value: float) -> None:
        """Raises `CheckpointError` if metadata is there and has another value."""
        found = self.maybe(name)
        if found is not None and float(found) != value:
            raise self.refused(name, found)

    def special(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}_token_id")

    def refused(self, name: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path}: {self._begin}.{name} is {value}, which is not supported; get the "
            "model as safetensors"
        )

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def floats(self, tensor: str) -> list[float]:
        """Returns the numbers of a small tensor in fp32."""
        entry = self.file.tensors[tensor]
        stored: np.ndarray = self.file.content(entry)[entry.begin : entry.begin + entry.nbytes]
        return [float(number) for number in stored.view("<f4")]


def rope_of(keys: Keys) -> dict[str, Any]:
    """Returns the rotary embeddings. Factors of frequencies, which files have for LLaMA 3, are
    those of "longrope" with one kind of length."""
    theta = float(keys.maybe("rope.freq_base") or 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    scaling_type, length = keys.maybe("rope.scaling.type"), keys.need("context_length")
    if keys.has("rope_freqs.weight"):
        factor_list = keys.floats("rope_freqs.weight")
        return rope | {
            "rope_type": "longrope",
            "short_factor": factor_list,
            "long_factor": factor_list,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    original = keys.maybe("rope.scaling.original_context_length")
    share = keys.maybe("rope.scaling.attn_factor")
    factor = keys.maybe("rope.scaling.factor") or keys.maybe("rope.scale_linear")
    if scaling_type is None and factor and float(factor) != 1.0:  # of older files
        scaling_type = "linear"
    if scaling_type in ("linear", "yarn"):
        if not factor:
            keys.need("rope.scaling.factor")
        rope |= {"rope_type": scaling_type, "factor": float(factor)}
        if scaling_type == "yarn":
            rope |= _yarn(keys, original, share)
    elif scaling_type == "longrope" and keys.has("rope_factors_long.weight"):
        pass  # the architecture reads the factors
    elif scaling_type not in (None, "none"):
        raise CheckpointError(f"{keys.file.path}: rope scaling {scaling_type!r} is not supported")
    return rope


def _yarn(keys: Keys, original: int | None, share: float | None) -> dict[str, Any]:
    """Returns YaRN's parameters other than the factor."""
    fields: dict[str, Any] = {"original_max_position_embeddings": original or None}
    for name in ("beta_fast", "beta_slow"):
        fields[name] = keys.maybe(f"rope.scaling.yarn_{name}")
    if share is not None:
        factor = float(keys.need("rope.scaling.factor"))
        fields["attention_factor"] = _yarn_attention(factor, float(share))
    return {name: value for name, value in fields.items() if value is not None}


def _yarn_attention(factor: float, share: float) -> float:
    """Returns the factor of attention of YaRN, whose own is 0.1 ln(factor) + 1, times a share."""
    return share * (0.1 * log(factor) + 1.0 if factor > 1 else 1.0)
