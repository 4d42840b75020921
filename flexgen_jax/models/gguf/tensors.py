"""The tensors of a GGUF file by the names that Hugging Face gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.formats.packed import PackedTensor
from flexgen_jax.models.gguf.architectures import PARTS, architecture_of
from flexgen_jax.models.gguf.blocks import BLOCKS, NAMES, PLAIN, decoded_by_package, leaves_of
from flexgen_jax.models.gguf.container import Entry, GgufFile
from flexgen_jax.models.tensors import Files

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
}

EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Parts of all experts of a layer, [expert, row, column]."""

USELESS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config says already; see `gguf.keys`."""

ONE_ROW = ("moe_statics.e_score_correction_bias", "shared_expert_gate.weight")
"""Vectors that are matrices of one row in Hugging Face's files."""

WITHOUT_END = ("e_score_correction_bias", "self_attn.sinks", "A_log", "dt_bias")
"""Parameters whose names have no ".weight" or ".bias"."""


class GgufTensors:
    """The tensors of a GGUF file; see `models.tensors.Tensors`.

    heads: of queries and of keys, whose rows LLaMA's files have in another order; layers: how many
    the model has.
    """

    def __init__(self, file: GgufFile, heads: tuple[int, int], layers: int) -> None:
        self.packed: dict[str, PackedTensor] = {}
        self.notes: list[str] = []
        self.files = Files(file.paths)
        self._file, self._heads, self._layers = file, heads, layers
        self._architecture = architecture_of(file)
        self._parts: dict[str, tuple[Entry, int | None]] = {}
        for name, entry in file.tensors.items():
            for full, expert in self._names(name, entry):
                self._parts[full] = (entry, expert)
                if BLOCKS[NAMES[entry.kind]].format is not None:
                    self.packed[full] = PackedRows(self, full)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def path(self, _name: str) -> Path:
        return self._file.path

    def shape(self, name: str) -> tuple[int, ...]:
        entry, expert = self._parts[name]
        shape = entry.shape if expert is None else entry.shape[1:]
        if name.endswith("conv1d.weight"):  # Hugging Face's have one channel in each group
            return shape[0], 1, shape[1]
        return (1, *shape) if len(shape) == 1 and name.endswith(ONE_ROW) else shape

    def dtype(self, name: str) -> str:
        return PLAIN.get(self.kind(name), "F32")

    def kind(self, name: str) -> str:
        """Returns the type of a tensor's blocks."""
        return NAMES[self._parts[name][0].kind]

    def rows(self, name: str) -> Any:
        return _Rows(self, name)

    def blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns the bytes of rows [start, stop), in the order of Hugging Face."""
        entry, expert = self._parts[name]
        shape = self.shape(name)
        block = BLOCKS[NAMES[entry.kind]]
        pitch = shape[-1] // block.elements * block.nbytes
        rows = shape[0] if len(shape) > 1 else 1
        begin = entry.begin + (expert or 0) * rows * pitch
        whole: np.ndarray = self._file.content(entry)[begin : begin + rows * pitch].reshape(
            rows, pitch
        )
        order = self._order(name, rows) if len(shape) > 1 else None
        return np.ascontiguousarray(
            whole[start:stop] if order is None else whole[order[start:stop]]
        )

    def numbers(self, name: str) -> np.ndarray:
        """Returns a vector."""
        tensor_type = self.kind(name)
        vector: np.ndarray = _plain(self.blocks(name, 0, 1), tensor_type, self._file.path)[0]
        order = self._order(name, len(vector))
        vector = vector if order is None else vector[order]
        if name.endswith("A_log"):  # stored as -exp(A_log)
            vector = np.log(-vector)
        is_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        if self._architecture.adds_one and is_offset:
            vector = vector - np.float32(1)
        return vector

    def _order(self, name: str, rows: int) -> np.ndarray | None:
        """Returns which stored row each row is, where rows are in another order: the two halves of
        a head, which are turned together, are woven in the files of LLaMA's kind."""
        match = re.search(r"self_attn\.([qk])_proj\.(weight|bias)$", name)
        if match is None or not self._architecture.is_woven:
            return None
        heads = self._heads["qk".index(match[1])]
        order = np.arange(rows).reshape(heads, rows // heads // 2, 2)
        return order.swapaxes(1, 2).reshape(-1)

    def _names(self, name: str, entry: Entry) -> Iterator[tuple[str, int | None]]:
        """Yields the names that a tensor has in Hugging Face's files, one for each expert."""
        match = re.fullmatch(r"blk\.(\d+)\.([a-z_0-9]+)(?:\.(weight|bias))?", name)
        if match is None:
            if name not in USELESS:
                yield TOP.get(name, name), None
            return
        layer, tensor_name, end = match.groups()
        if int(layer) >= self._layers:
            return
        architecture, before = self._architecture, f"model.layers.{layer}."
        if tensor_name in EXPERTS:
            block, matrices = architecture.experts
            matrix = EXPERTS[tensor_name]
            matrix = matrices.get(matrix, matrix)
            for expert in range(entry.shape[0]):
                yield f"{before}{block}.experts.{expert}.{matrix}.{end}", expert
            return
        plain = architecture.parts.get(tensor_name, PARTS.get(tensor_name, tensor_name))
        yield before + (plain if plain.endswith(WITHOUT_END) else f"{plain}.{end}"), None


class _Rows:
    """A plain tensor whose rows can be taken by a slice."""

    def __init__(self, tensors: GgufTensors, name: str) -> None:
        self._tensors, self._name = tensors, name

    def __getitem__(self, rows: slice | tuple[int, slice]) -> np.ndarray:
        tensors, name = self._tensors, self._name
        if isinstance(rows, tuple):  # of a vector that is a matrix of one row
            return tensors.numbers(name)[rows[1]]
        shape = tensors.shape(name)
        start, stop, _ = rows.indices(shape[0])
        if len(shape) == 1:
            return tensors.numbers(name)[start:stop]
        blocks = tensors.blocks(name, start, stop)
        plain = _plain(blocks, tensors.kind(name), tensors.path(name))
        return plain.reshape(stop - start, *shape[1:])


def _plain(blocks: np.ndarray, kind: str, path: Path) -> np.ndarray:
    """Returns rows of plain numbers, or decoded ones."""
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    if kind in dtypes:
        return blocks.view(dtypes[kind])
    try:
        return decoded_by_package(blocks, kind)
    except ImportError:
        raise CheckpointError(
            f"{path}: weights of type {kind} need the package gguf: pip install gguf"
        ) from None


class PackedRows:
    """A matrix of blocks; see `formats.packed.PackedTensor`."""

    METHOD = "GGUF"

    def __init__(self, tensors: GgufTensors, name: str) -> None:
        self._tensors, self._name = tensors, name
        self.names: tuple[str, ...] = (name,)
        self.shape = tensors.shape(name)
        packing = BLOCKS[tensors.kind(name)].format
        assert packing is not None
        self.format = packing

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None, "each expert has its own name"
        blocks = self._tensors.blocks(self._name, start, stop)
        return leaves_of(blocks, self._tensors.kind(self._name))
