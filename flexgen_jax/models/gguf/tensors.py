"""The tensors of a GGUF file by the names that Hugging Face gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    "token_embd_norm.weight": "model.embedding_norm.weight",
}

EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""Matrices of all experts in a tensor, [expert, row, column]; of two, rows follow each other."""

LATENT = ("attn_k_b", "attn_v_b")
"""Up-projections of latent attention: keys [head, rank, element], values [head, element, rank]."""

USELESS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config says already; see `gguf.keys`."""

ONE_ROW = ("moe_statics.e_score_correction_bias", "shared_expert_gate.weight")
"""Vectors that are matrices of one row in Hugging Face's files."""

CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
"""Weights of depthwise convolutions."""

WITHOUT_END = ("e_score_correction_bias", "self_attn.sinks", "A_log", "dt_bias")
"""Parameters whose names have no ".weight" or ".bias"."""


BLOCK = re.compile(r"blk\.(\d+)\.([a-z_0-9]+(?:\.[a-z_]+)??)(?:\.(weight|bias|scale))?")
"""The layer's number, the part's name, and "weight", "bias" or "scale"."""


@dataclass(frozen=True)
class _Part:
    """A tensor within a stored one.

    first: the first row; keys: for `kv_b_proj`, the projection of keys.
    """

    entry: Entry
    first: int
    shape: tuple[int, ...]
    keys: Entry | None = None


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
        self._parts: dict[str, _Part] = {}
        for name, entry in file.tensors.items():
            for full, part in self._named(name, entry):
                self._parts[full] = part
                if part.keys is None and BLOCKS[NAMES[entry.kind]].format is not None:
                    self.packed[full] = PackedRows(self, full)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def path(self, _name: str) -> Path:
        return self._file.path

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._parts[name].shape
        if name.endswith(CONVOLUTIONS):  # Hugging Face's have one channel in each group
            return shape[0], 1, shape[1]
        return (1, *shape) if len(shape) == 1 and name.endswith(ONE_ROW) else shape

    def dtype(self, name: str) -> str:
        return "F32" if self.is_joined(name) else PLAIN.get(self.kind(name), "F32")

    def is_joined(self, name: str) -> bool:
        """Returns whether a matrix is put together from two that are stored."""
        return self._parts[name].keys is not None

    def kind(self, name: str) -> str:
        """Returns the type of a tensor's blocks."""
        return NAMES[self._parts[name].entry.kind]

    def rows(self, name: str) -> Any:
        return _Rows(self, name)

    def blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns the bytes of rows [start, stop), in the order of Hugging Face."""
        part, shape = self._parts[name], self.shape(name)
        rows = shape[0] if len(shape) > 1 else 1
        whole = self._stored(part.entry, part.first, rows)
        order = self._order(name, rows) if len(shape) > 1 else None
        return np.ascontiguousarray(
            whole[start:stop] if order is None else whole[order[start:stop]]
        )

    def _stored(self, entry: Entry, first: int, rows: int) -> np.ndarray:
        """Returns the bytes of rows, from the first one on, as they are stored."""
        block = BLOCKS[NAMES[entry.kind]]
        pitch = entry.shape[-1] // block.elements * block.nbytes
        begin = entry.begin + first * pitch
        whole: np.ndarray = self._file.content(entry)[begin : begin + rows * pitch]
        return whole.reshape(rows, pitch)

    def latent(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns rows [start, stop) of `kv_b_proj` in fp32, head by head. Files store the
        projection of keys by itself, and transposed."""
        part, rank = self._parts[name], self.shape(name)[1]
        assert part.keys is not None
        (_, _, key_size), (_, value_size, _) = part.keys.shape, part.entry.shape
        size, heads = key_size + value_size, []
        for head in range(start // size, -(-stop // size)):
            sides = [(part.keys, head * rank, rank), (part.entry, head * value_size, value_size)]
            keys, values = (
                _plain(self._stored(*side), NAMES[side[0].kind], self._file.path)
                .astype(np.float32)
                .reshape(side[2], -1)
                for side in sides
            )
            heads += [keys.T, values]
        whole = np.concatenate(heads)
        return whole[start % size :][: stop - start]

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

    def _named(self, name: str, entry: Entry) -> Iterator[tuple[str, _Part]]:
        """Yields the names that Hugging Face's files have for a stored tensor, one for each expert,
        with the part that each name stands for."""
        match = BLOCK.fullmatch(name)
        if match is None:
            if name not in USELESS:
                yield TOP.get(name, name), _Part(entry, 0, entry.shape)
            return
        layer, tensor_name, end = match.groups()
        if int(layer) >= self._layers:
            return
        architecture, before = self._architecture, f"model.layers.{layer}."
        whole_name = architecture.parts.get(f"{tensor_name}.{end}")
        if whole_name is not None:
            yield before + whole_name, _Part(entry, 0, entry.shape)
            return
        if tensor_name in EXPERTS:
            block, matrices = architecture.experts
            for matrix, part, expert in _of_experts(EXPERTS[tensor_name], entry):
                matrix_name = matrices.get(matrix, matrix)
                yield f"{before}{block}experts.{expert}.{matrix_name}.{end}", part
            return
        if tensor_name in LATENT:
            keys, values = (self._file.tensors.get(f"blk.{layer}.{x}.{end}") for x in LATENT)
            if keys is not None and values is not None and _fit(keys, values):
                heads, size, rank = values.shape
                shape = heads * (keys.shape[2] + size), rank
                yield f"{before}self_attn.kv_b_proj.{end}", _Part(values, 0, shape, keys)
                return
        plain = architecture.parts.get(tensor_name, PARTS.get(tensor_name, tensor_name))
        name = before + (plain if plain.endswith(WITHOUT_END) else f"{plain}.{end}")
        yield name, _Part(entry, 0, entry.shape)


def _fit(keys: Entry, values: Entry) -> bool:
    """Returns whether the shapes of two up-projections, see `LATENT`, belong together."""
    if len(keys.shape) != 3 or len(values.shape) != 3:
        return False
    return keys.shape[:2] == (values.shape[0], values.shape[2])


def _of_experts(names: Sequence[str], entry: Entry) -> Iterator[tuple[str, _Part, int]]:
    """Yields the name, the part and the expert of each matrix, or vector, in a tensor of all
    experts. The matrices of an expert are neighbours."""
    count, *shape = entry.shape
    each = shape[0] // len(names) if len(shape) > 1 else 1
    for expert in range(count):
        for number, name in enumerate(names):
            first = (expert * len(names) + number) * each
            yield name, _Part(entry, first, (each, *shape[1:]) if shape[1:] else (*shape,)), expert


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
        if tensors.is_joined(name):
            return tensors.latent(name, start, stop)
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
