"""Abstract shapes of a model: one tree that init, loading, placement and byte counts share.

This module imports no JAX, so that policies can be computed without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.storage import FORMAT_VERSION, Storage, kv_storage

SCORE_BYTES = 16 << 20
"""Prefill forms the fp32 attention scores of as many heads at a time as fit in this."""

PREFILL_ROWS = {16: 1024, 8: 2048, 4: 2048}
"""Prefill takes as many sequences through a layer at a time as have so many tokens, by the bits of
the weights, which are unpacked anew each time: enough for products at full speed, and temporaries
so small that they stay in caches and in memory that the process already has."""

SCORED_ROWS = 256
"""Scoring forms the logits of this many positions at a time."""

PART_BYTES = 16 << 20
"""A quantized kernel is unpacked and multiplied in parts of this size, which stay in the cache."""

LayerKind = Literal["embedding", "decoder", "head"]


@dataclass(frozen=True)
class TensorSpec:
    """One weight: its path inside the layer ("attention.q.kernel"), its shape, and the key
    that names it in the whole model. A tied head's table has the embedding table's key."""

    path: str
    shape: tuple[int, ...]
    key: str

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Biases and norms: 0.1 % of the bytes, so they always stay on the device."""
        return len(self.shape) == 1

    def storage(self, dtype: str, bits: int = 16) -> Storage:
        """How it is kept: only what is large is quantized, in groups along the output channels
        (the first axis)."""
        return Storage(self.shape, dtype, 16 if self.is_small else bits)

    def nbytes(self, dtype: str, bits: int = 16) -> int:
        return self.storage(dtype, bits).nbytes


@dataclass(frozen=True)
class Formats:
    """How a run keeps weights and sealed KV blocks, and what decoder layers multiply: bits an
    element, 16 for `dtype` itself."""

    dtype: str
    weight_bits: int = 16
    cache_bits: int = 16
    matmul_bits: int = 16

    def weight(self, tensor: TensorSpec) -> Storage:
        return tensor.storage(self.dtype, self.weight_bits)

    def kv(self, shape: tuple[int, ...]) -> Storage:
        """Of a sealed block's keys, or values, [batch, head, token, head_dim]."""
        return kv_storage(shape, self.dtype, self.cache_bits)

    @property
    def suffix(self) -> str:
        """What tells these stored weights from those of other formats."""
        return "" if self.weight_bits == 16 else f"-{self.weight_bits}bit-v{FORMAT_VERSION}"


@dataclass(frozen=True)
class LayerSpec:
    """One step's weights."""

    kind: LayerKind
    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def name(self) -> str:
        return f"decoder layer {self.index - 1}" if self.kind == "decoder" else self.kind

    @property
    def large(self) -> tuple[TensorSpec, ...]:
        """The tensors that a policy places: matrices and tables."""
        return tuple(tensor for tensor in self.tensors if not tensor.is_small)

    @property
    def large_size(self) -> int:
        """Their elements together."""
        return sum(tensor.size for tensor in self.large)

    def nbytes(self, dtype: str, bits: int = 16) -> int:
        return sum(tensor.nbytes(dtype, bits) for tensor in self.tensors)


def _linear(path: str, out: int, into: int, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    tensors: list[tuple[str, tuple[int, ...]]] = [(f"{path}.kernel", (out, into))]
    return [*tensors, (f"{path}.bias", (out,))] if bias else tensors


def _norm(path: str, config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    if not config.norm_affine:
        return []
    return [(f"{path}.scale", (config.hidden_size,)), (f"{path}.bias", (config.hidden_size,))]


def _decoder(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    hidden, bias = config.hidden_size, config.use_bias
    shapes = []
    for name in ("q", "k", "v", "out"):
        shapes += _linear(f"attention.{name}", hidden, hidden, bias)
    shapes += _norm("attention_norm", config)
    shapes += _linear("mlp.fc1", config.ffn_size, hidden, bias)
    shapes += _linear("mlp.fc2", hidden, config.ffn_size, bias)
    return shapes + _norm("mlp_norm", config)


@lru_cache(maxsize=16)  # a policy search asks for the same one hundreds of times
def model_spec(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """The embedding, the decoder layers and the head, in the order in which they run."""
    table = (config.vocab_size, config.embed_size)
    rows = config.max_positions + config.position_offset
    embedding: list[tuple[str, tuple[int, ...]]] = [
        ("tokens", table),
        ("positions", (rows, config.hidden_size)),
    ]
    head: list[tuple[str, tuple[int, ...]]] = []
    if config.final_norm:
        head += _norm("norm", config)
    if config.projects_embeddings:
        embedding += _linear("project_in", config.hidden_size, config.embed_size, False)
        head += _linear("project_out", config.embed_size, config.hidden_size, False)
    head.append(("tokens", table))

    def tensors(prefix: str, shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(path, shape, f"{prefix}.{path}") for path, shape in shapes)

    head_tensors = tensors("head", head)
    if config.tied_head:
        head_tensors = (*head_tensors[:-1], TensorSpec("tokens", table, "embedding.tokens"))
    decoder = _decoder(config)
    return (
        LayerSpec("embedding", 0, tensors("embedding", embedding)),
        *(
            LayerSpec("decoder", i + 1, tensors(f"decoder.{i}", decoder))
            for i in range(config.num_layers)
        ),
        LayerSpec("head", config.num_layers + 1, head_tensors),
    )


def unique_tensors(layers: tuple[LayerSpec, ...]) -> dict[str, TensorSpec]:
    """Every stored tensor once, by key: a tied table counts for the embedding only."""
    found: dict[str, TensorSpec] = {}
    for layer in layers:
        for tensor in layer.tensors:
            found.setdefault(tensor.key, tensor)
    return found


def num_parameters(config: ModelConfig) -> int:
    return sum(tensor.size for tensor in unique_tensors(model_spec(config)).values())


def part_bytes(rows: int, out: int) -> int:
    """Of an unpacked part of a kernel; no smaller than the product, whose parts are joined."""
    return max(PART_BYTES, 4 * rows * out)


def prefilled(batch: int, tokens: int, weight_bits: int) -> int:
    """How many of a batch's sequences go through a layer together in prefill."""
    return max(1, min(batch, PREFILL_ROWS[weight_bits] // tokens))


def scored_heads(heads: int, tokens: int) -> int:
    """How many of a batch's heads have their scores in memory at the same time in prefill."""
    return max(1, min(heads, SCORE_BYTES // (4 * tokens * tokens)))
