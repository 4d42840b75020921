"""A model's tensors and their stored formats.

This module imports no JAX, so that policies can be computed without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from flexgen_jax.models.formats.format import Format
from flexgen_jax.models.formats.known import WeightFormat, own, paper
from flexgen_jax.models.formats.lanes import in_lanes
from flexgen_jax.models.formats.storage import FORMAT_VERSION, Storage, kv_storage
from flexgen_jax.models.parts import StateLeaf

Role = Literal["query", "key", "value", "router", "state", "expert", "adapter", "other"]
"""Result of a decoder layer's matrix: attention's queries, keys or values, the choice of experts,
how a recurrent state changes, one expert's, an adapter's, or anything else."""


@lru_cache(maxsize=4096)  # of a model's thousands of tensors few have different shapes
def _storage(shape: tuple[int, ...], dtype: str, packing: Format | None) -> Storage:
    return Storage(shape, dtype, packing)


@dataclass(frozen=True)
class TensorSpec:
    """One weight: its path inside the layer ("attention.q.kernel"), shape, key in the whole model,
    and role. A tied head's table has the embedding table's key. expert: the number of the expert
    that it belongs to, if it does. published: its format in the model's files, None for plain
    numbers; can_pack: whether a run may choose another format: not of a model that is published in
    few bits. dtype: of a small tensor with its own dtype, independent of the run's."""

    path: str
    shape: tuple[int, ...]
    key: str
    role: Role = "other"
    expert: int | None = None
    published: Format | None = None
    can_pack: bool = True
    dtype: str | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def own_path(self) -> str:
        """The path inside the layer, or inside the expert, without "experts.3."."""
        return self.path if self.expert is None else self.path.removeprefix(of_expert(self.expert))

    @property
    def is_small(self) -> bool:
        """Whether this is a bias, a norm, a router, an adapter, or says how a state changes; they
        are few bytes and always stay on the device."""
        return len(self.shape) == 1 or self.role in ("router", "state", "adapter")

    @property
    def has_host_copy(self) -> bool:
        """Whether the host has a copy, unless host and device are one: of an expert's biases and
        adapters, since the CPU may compute the expert."""
        return self.is_small and self.expert is not None

    def storage(self, dtype: str, bits: int = 16, is_papers: bool = False) -> Storage:
        """Returns how the tensor is kept.

        bits: 16 for plain numbers. With fewer, a tensor that is published in few bits keeps its
        format; of other models the large tensors are quantized. is_papers: in the paper's format.
        """
        if bits == 16 or self.is_small:
            return _storage(self.shape, self.dtype or dtype, None)
        if not self.can_pack:
            return _storage(self.shape, dtype, self.published)
        return _storage(self.shape, dtype, paper(bits) if is_papers else own(bits, self.is_table))

    @property
    def is_table(self) -> bool:
        """Whether this is a table of embeddings, or the head."""
        return self.key.startswith(("embedding.", "head."))

    def nbytes(self, dtype: str, bits: int = 16) -> int:
        return self.storage(dtype, bits).nbytes


@dataclass(frozen=True)
class Formats:
    """Formats of a run's numbers: bits per element of weights, of sealed KV blocks, and of matmul
    operands; 16 stands for `dtype`. weight_format: of weights that are quantized when they are
    loaded. Arrays that are replaced with every token are never quantized, since their errors would
    add up. has_lanes: codes of weights lie in the order in which a CPU multiplies bfloat16 by them;
    arrays have the same size in either order."""

    dtype: str
    weight_bits: int = 16
    cache_bits: int = 16
    matmul_bits: int = 16
    weight_format: WeightFormat = "own"
    has_lanes: bool = False

    def weight(self, tensor: TensorSpec) -> Storage:
        storage = tensor.storage(self.dtype, self.weight_bits, self.weight_format == "paper")
        return in_lanes(storage) if self.has_lanes else storage

    def sealed(self, leaf: StateLeaf, rows: int, tokens: int) -> Storage:
        """Returns how an array of a sealed block is kept."""
        return kv_storage(leaf.array_shape(rows, tokens), self.dtype, self.cache_bits)

    def plain(self, leaf: StateLeaf, rows: int, tokens: int = 1) -> Storage:
        """Returns how an array is kept that is still written to: of an open block, or one that is
        replaced."""
        return Storage(leaf.array_shape(rows, tokens), leaf.dtype or self.dtype)

    @property
    def suffix(self) -> str:
        """Suffix that tells stored weights of these formats from those of other formats."""
        if self.weight_bits == 16:
            return ""
        order = "-lanes" * self.has_lanes
        return f"-{self.weight_bits}bit-{self.weight_format}{order}-v{FORMAT_VERSION}"


def of_expert(number: int) -> str:
    """What the paths of an expert's tensors begin with."""
    return f"experts.{number}."
