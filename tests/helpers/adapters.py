"""LoRA adapters in peft's files, and transformers' models with the same adapters merged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.helpers.families import Reference

PREFIX = "base_model.model."


SCALE = 2.0
"""Of all adapters that are written here."""

Pair = Mapping[str, np.ndarray]
"""Matrices B and A of a module, [rows, rank] and [rank, columns]."""


def write_adapter(path: Path, pairs: Mapping[str, Pair]) -> None:
    """Writes an adapter with the matrices of some modules."""
    path.mkdir(parents=True)
    tensors = {
        f"{PREFIX}{module}.lora_{side}.weight": matrix
        for module, pair in pairs.items()
        for side, matrix in pair.items()
    }
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "lora_alpha": SCALE * len(next(iter(pairs.values()))["A"])}
    (path / "adapter_config.json").write_text(json.dumps(config))


def random_pair(generator: np.random.Generator, rows: int, columns: int, rank: int) -> Pair:
    """Returns random matrices of a module."""
    shapes = {"B": (rows, rank), "A": (rank, columns)}
    return {side: generator.normal(0, 0.3, shape).astype("f4") for side, shape in shapes.items()}


class Adapted(Reference):
    """A reference model with an adapter; `path` is the adapter's folder.

    targets: a pattern of the names of its modules; experts are numbered as transformers did before
    version 5: "model.layers.0.mlp.experts.3.up_proj".
    """

    def __init__(
        self, base: Reference, path: Path, targets: str, seed: int = 0, rank: int = 3
    ) -> None:
        self.__dict__ |= copy(base).__dict__
        self.path, self.model = path, deepcopy(base.model)
        self._generator, self._rank = np.random.default_rng(seed), rank
        self._pairs: dict[str, Pair] = {}
        for name, parameter in self.model.named_parameters():
            for module, part in _modules(name, parameter):
                if re.fullmatch(targets, module):
                    part += self._added(module, *part.shape)
        assert self._pairs, "some modules are adapted"
        write_adapter(path, self._pairs)

    def _added(self, module: str, rows: int, columns: int) -> Any:
        """Makes an adapter of a module; returns what it adds to the module's matrix."""
        import torch

        pair = random_pair(self._generator, rows, columns, self._rank)
        self._pairs[module] = pair
        return torch.from_numpy(SCALE * pair["B"] @ pair["A"])


def _modules(name: str, parameter: Any) -> list[tuple[str, Any]]:
    """Returns the modules of a parameter, and their matrices."""
    values = parameter.data
    if values.ndim == 2 and name.endswith(".weight"):
        return [(name.removesuffix(".weight"), values)]
    experts = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if experts is None:
        return []
    found = []
    for number, matrix in enumerate(values):
        half = len(matrix) // 2
        parts = {"gate_proj": matrix[:half], "up_proj": matrix[half:]}
        parts = parts if experts[2] == "gate_up_proj" else {"down_proj": matrix}
        found += [(f"{experts[1]}.{number}.{part}", rows) for part, rows in parts.items()]
    return found


class ByPrompt:
    """The references of prompts that choose an adapter each."""

    def __init__(self, folder: Path, references: list[tuple[list[int], Reference]]) -> None:
        self.folder, self._references = folder, references

    def _of(self, ids: list[int]) -> Reference:
        return next(
            reference for prompt, reference in self._references if ids[: len(prompt)] == prompt
        )

    def greedy(self, ids: list[int], count: int) -> list[int]:
        return self._of(ids).greedy(ids, count)

    def logprobs(self, ids: list[int]) -> np.ndarray:
        return self._of(ids).logprobs(ids)
