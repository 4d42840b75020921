"""A model's shapes: one description that init, loading, placement, byte and FLOP counts share.

This module imports no JAX, so that policies can be computed without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from flexgen_jax.models.config import DTYPES, ModelConfig
from flexgen_jax.models.storage import FORMAT_VERSION, Storage, kv_storage

LayerKind = Literal["embedding", "decoder", "head"]
Role = Literal["query", "key", "value", "other"]
"""Result of a decoder layer's matrix: attention's queries, keys or values, or anything else."""


@dataclass(frozen=True)
class TensorSpec:
    """One weight: its path inside the layer ("attention.q.kernel"), its shape, the key that names
    it in the whole model, and what it is for. A tied head's table has the embedding table's key."""

    path: str
    shape: tuple[int, ...]
    key: str
    role: Role = "other"

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether this is a bias or norm; they are few bytes and always stay on the device."""
        return len(self.shape) == 1

    def storage(self, dtype: str, bits: int = 16) -> Storage:
        """Returns how the tensor is kept.

        Only large tensors are quantized, in groups along the output channels (the first axis).
        """
        return Storage(self.shape, dtype, 16 if self.is_small else bits)

    def nbytes(self, dtype: str, bits: int = 16) -> int:
        return self.storage(dtype, bits).nbytes


@dataclass(frozen=True)
class Formats:
    """Formats of a run's numbers: bits per element of weights, of sealed KV blocks, and of what
    decoder layers multiply; 16 stands for `dtype` itself."""

    dtype: str
    weight_bits: int = 16
    cache_bits: int = 16
    matmul_bits: int = 16

    def weight(self, tensor: TensorSpec) -> Storage:
        return tensor.storage(self.dtype, self.weight_bits)

    def kv(self, shape: tuple[int, ...]) -> Storage:
        """Returns how a sealed block's keys or values, [batch, head, token, head_dim], are kept."""
        return kv_storage(shape, self.dtype, self.cache_bits)

    def kv_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a sealed block's keys and values, each of this shape."""
        return 2 * self.kv(shape).nbytes

    def open_kv_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of an open block's keys and values, each of this shape, in `dtype`."""
        return 2 * prod(shape) * DTYPES[self.dtype]

    @property
    def suffix(self) -> str:
        """Suffix that tells stored weights of these formats from those of other formats."""
        return "" if self.weight_bits == 16 else f"-{self.weight_bits}bit-v{FORMAT_VERSION}"


@dataclass(frozen=True)
class AttentionSpec:
    """The shapes of a decoder layer's attention: numbers of heads, and elements in a head.

    Query heads share heads of keys and values if there are fewer of the latter.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        """Elements of a token's query, and of its attention result."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's key, and of its value."""
        return self.num_kv_heads * self.head_dim

    def query_shape(self, batch: int, tokens: int = 1) -> tuple[int, int, int, int]:
        """Returns the shape of some tokens' queries: [batch, head, token, head_dim]."""
        return batch, self.num_heads, tokens, self.head_dim

    def kv_shape(self, batch: int, tokens: int) -> tuple[int, int, int, int]:
        """Returns the shape of some tokens' keys or values: [batch, head, token, head_dim]."""
        return batch, self.num_kv_heads, tokens, self.head_dim

    def prefill_flops(self, batch: int, tokens: int, before: int = 0) -> float:
        """Returns the FLOPs of prompts' attention to themselves, and to `before` earlier tokens.

        They are two products, with 2 FLOPs per element and pair of tokens. Earlier tokens count
        twice, since kernels leave out most of the half of pairs in which a token would see later
        ones, which is counted.
        """
        return 4.0 * batch * tokens * (tokens + 2 * before) * self.query_size


@dataclass(frozen=True)
class LayerSpec:
    """The weights and shapes of one layer.

    mlp_width: elements between the two products of a decoder layer's MLP.
    """

    kind: LayerKind
    index: int
    tensors: tuple[TensorSpec, ...]
    hidden_size: int
    mlp_width: int = 0
    heads: AttentionSpec | None = None

    @property
    def name(self) -> str:
        return f"decoder layer {self.index - 1}" if self.kind == "decoder" else self.kind

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a decoder layer."""
        assert self.heads is not None, "only decoder layers attend"
        return self.heads

    @cached_property
    def large(self) -> tuple[TensorSpec, ...]:
        """The tensors that a policy places: matrices and tables."""
        return tuple(tensor for tensor in self.tensors if not tensor.is_small)

    @cached_property
    def large_size(self) -> int:
        """Elements of all large tensors; products of one token take two FLOPs for each."""
        return sum(tensor.size for tensor in self.large)

    @cached_property
    def projected_share(self) -> float:
        """Share of the layer's products that makes queries, keys and values."""
        return self._size_of("query", "key", "value") / self.large_size

    @cached_property
    def kept_share(self) -> float:
        """Share of the layer's products that makes keys and values."""
        return self._size_of("key", "value") / self.large_size

    def _size_of(self, *roles: Role) -> int:
        return sum(tensor.size for tensor in self.large if tensor.role in roles)

    def flops(self, rows: int) -> float:
        """Returns the FLOPs of the layer's products with this number of tokens."""
        return 2.0 * rows * self.large_size

    def nbytes(self, dtype: str, bits: int = 16) -> int:
        return sum(tensor.nbytes(dtype, bits) for tensor in self.tensors)

    @property
    def without_names(self) -> LayerSpec:
        """The shapes alone: equal for layers that can share compiled programs."""
        return replace(self, index=0, tensors=tuple(replace(t, key="") for t in self.tensors))


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The layers of a model in the order in which they run: embedding, decoder layers, head."""

    hidden_size: int
    layers: tuple[LayerSpec, ...]

    @property
    def embedding(self) -> LayerSpec:
        return self.layers[0]

    @property
    def head(self) -> LayerSpec:
        return self.layers[-1]

    @cached_property
    def decoders(self) -> tuple[LayerSpec, ...]:
        return self.layers[1:-1]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer the index of the first layer that has its shapes."""
        first: dict[LayerSpec, int] = {}
        return tuple(
            first.setdefault(layer.without_names, index) for index, layer in enumerate(self.layers)
        )

    @cached_property
    def decoder_kinds(self) -> tuple[tuple[LayerSpec, int], ...]:
        """One decoder layer of each shape, and the number of layers with that shape."""
        indices = [self.alike[layer.index] for layer in self.decoders]
        return tuple((self.layers[i], indices.count(i)) for i in dict.fromkeys(indices))

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Returns every stored tensor once, by key; a tied table counts for the embedding only."""
        found: dict[str, TensorSpec] = {}
        for layer in self.layers:
            for tensor in layer.tensors:
                found.setdefault(tensor.key, tensor)
        return found

    @property
    def num_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    def hidden_shape(self, batch: int, tokens: int) -> tuple[int, int, int]:
        """Returns the shape of the hidden states between two layers: [batch, token, hidden]."""
        return batch, tokens, self.hidden_size

    def hidden_bytes(self, batch: int, tokens: int, dtype: str) -> int:
        return prod(self.hidden_shape(batch, tokens)) * DTYPES[dtype]


Shapes = list[tuple[str, tuple[int, ...]]]
"""Paths of a layer's tensors and their shapes."""


def _linear(path: str, out: int, into: int, bias: bool) -> Shapes:
    tensors: Shapes = [(f"{path}.kernel", (out, into))]
    return [*tensors, (f"{path}.bias", (out,))] if bias else tensors


def _norm(path: str, config: ModelConfig) -> Shapes:
    if not config.norm_affine:
        return []
    return [(f"{path}.scale", (config.hidden_size,)), (f"{path}.bias", (config.hidden_size,))]


_ROLES: dict[str, Role] = {
    "attention.q.kernel": "query",
    "attention.k.kernel": "key",
    "attention.v.kernel": "value",
}


def _decoder(config: ModelConfig) -> Shapes:
    hidden, bias = config.hidden_size, config.use_bias
    shapes = []
    for name in ("q", "k", "v", "out"):
        shapes += _linear(f"attention.{name}", hidden, hidden, bias)
    shapes += _norm("attention_norm", config)
    shapes += _linear("mlp.fc1", config.ffn_size, hidden, bias)
    shapes += _linear("mlp.fc2", hidden, config.ffn_size, bias)
    return shapes + _norm("mlp_norm", config)


def _tensors(prefix: str, shapes: Shapes) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(path, shape, f"{prefix}.{path}", _ROLES.get(path, "other"))
        for path, shape in shapes
    )


def _ends(config: ModelConfig) -> tuple[LayerSpec, LayerSpec]:
    """The embedding and the head."""
    table = (config.vocab_size, config.embed_size)
    rows = config.max_positions + config.position_offset
    embedding: Shapes = [("tokens", table), ("positions", (rows, config.hidden_size))]
    head: Shapes = []
    if config.final_norm:
        head += _norm("norm", config)
    if config.projects_embeddings:
        embedding += _linear("project_in", config.hidden_size, config.embed_size, False)
        head += _linear("project_out", config.embed_size, config.hidden_size, False)
    output = TensorSpec("tokens", table, "embedding.tokens" if config.tied_head else "head.tokens")
    return (
        LayerSpec("embedding", 0, _tensors("embedding", embedding), config.hidden_size),
        LayerSpec(
            "head", config.num_layers + 1, (*_tensors("head", head), output), config.hidden_size
        ),
    )


@lru_cache(maxsize=16)  # a policy search asks for one model's spec hundreds of times
def model_spec(config: ModelConfig) -> ModelSpec:
    """Returns the shapes of the model that a config describes."""
    embedding, head = _ends(config)
    heads = AttentionSpec(config.num_heads, config.num_heads, config.head_dim)
    shapes = _decoder(config)
    decoders = (
        LayerSpec(
            kind="decoder",
            index=i + 1,
            tensors=_tensors(f"decoder.{i}", shapes),
            hidden_size=config.hidden_size,
            mlp_width=config.ffn_size,
            heads=heads,
        )
        for i in range(config.num_layers)
    )
    return ModelSpec(config.hidden_size, (embedding, *decoders, head))
