"""How a folder turns texts into vectors: the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.models.folder import CheckpointError, read_json, read_object
from flexgen_jax.models.parts import Pooling

MODULES = "modules.json"

MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""Supported modes of pooling, by the names in `1_Pooling/config.json`."""

OLDER_MODES = {"mean_tokens": "mean", "cls_token": "cls"}
"""Older names of modes."""


@dataclass(frozen=True)
class PoolingDefaults:
    """How prompts become vectors where a request does not say; without files of
    sentence-transformers as in vLLM.

    normalizes: whether vectors have length 1; problem: why the folder's vectors cannot be made,
    None if they can.
    """

    pooling: Pooling = "last"
    normalizes: bool = True
    problem: str | None = None

    def check(self, dimensions: int | None, hidden_size: int) -> None:
        """Raises `UserError` for vectors that cannot be made."""
        if self.problem is not None:
            raise UserError(f"no embeddings: {self.problem}")
        if dimensions is not None and not 1 <= dimensions <= hidden_size:
            raise UserError(f"dimensions must be from 1 to {hidden_size}, not {dimensions}")

    def vector(
        self, states: np.ndarray, dimensions: int | None = None, normalize: bool | None = None
    ) -> np.ndarray:
        """Returns pooled hidden states, fp32 [hidden], as a vector, fp32 [dimensions].

        dimensions: how many of the first elements are kept, None for all; normalize: whether the
        vector has length 1, None for the folder's default.
        """
        vector = states[:dimensions]
        if self.normalizes if normalize is None else normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)


WITHOUT_FILES = PoolingDefaults()
"""For folders without files of sentence-transformers."""


def transformer_folder(folder: Path) -> Path:
    """Returns the folder with a model's weights: a sub-folder in some exports of
    sentence-transformers, such as 0_Transformer/."""
    if (folder / "config.json").is_file():
        return folder
    path = next((m.get("path") for m in _modules(folder) if _kind(m) == "Transformer"), None)
    inside = folder / str(path) if path else folder
    is_inside = inside.resolve().is_relative_to(folder.resolve())
    return inside if is_inside and inside.is_dir() else folder


def read_pooling(folder: Path) -> PoolingDefaults:
    """Returns how a folder's texts become vectors; raises `CheckpointError` for damaged files."""
    if not (folder / MODULES).is_file() and (folder.parent / MODULES).is_file():
        folder = folder.parent  # of 0_Transformer/
    modules = _modules(folder)
    if not modules:
        return WITHOUT_FILES
    kinds = [_kind(module) for module in modules]
    other_kinds = sorted({*kinds} - {"Transformer", "Pooling", "Normalize"})
    if other_kinds:
        return PoolingDefaults(problem=f"{folder / MODULES}: {other_kinds[0]} is not supported")
    path = next((m.get("path") for m in modules if _kind(m) == "Pooling"), None)
    file = folder / str(path) / "config.json"
    if path is None or not file.resolve().is_relative_to(folder.resolve()):
        return PoolingDefaults(problem=f"{folder / MODULES}: there is no module Pooling")
    mode = _mode(read_object(file))
    if mode not in MODES:
        problem = f"{file}: pooling by {mode} is not supported; use {', '.join(MODES)}"
        return PoolingDefaults(problem=problem)
    return PoolingDefaults(MODES[mode], normalizes="Normalize" in kinds)


def _mode(config: Mapping[str, Any]) -> str:
    """Returns the name of the mode of a pooling config; several modes are joined by "+"."""
    if "pooling_mode" in config:
        return str(config["pooling_mode"])
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    modes = [key.removeprefix("pooling_mode_") for key in flags]
    return "+".join(OLDER_MODES.get(mode, mode) for mode in modes) or "nothing"


def _modules(folder: Path) -> list[Mapping[str, Any]]:
    """Returns a folder's modules of sentence-transformers, none without their file."""
    path = folder / MODULES
    if not path.is_file():
        return []
    modules: Any = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise CheckpointError(f"{path} must be a list of objects")
    return modules


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]
