"""A model's shapes: one description that init, loading, placement, byte and FLOP counts share.

This module imports no JAX, so that policies can be computed without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

from flexgen_jax.models.config import DTYPES, ModelConfig
from flexgen_jax.models.formats.format import Format
from flexgen_jax.models.formats.known import WeightFormat, own, paper
from flexgen_jax.models.formats.published import Published
from flexgen_jax.models.formats.storage import FORMAT_VERSION, Storage, kv_storage
from flexgen_jax.models.parts import (
    AttentionSpec,
    ExpertsSpec,
    LayerParts,
    Mixer,
    MLPSpec,
    NormSpec,
    StateLeaf,
    linear,
)

LayerKind = Literal["embedding", "decoder", "head"]
Role = Literal["query", "key", "value", "router", "expert", "other"]
"""Result of a decoder layer's matrix: attention's queries, keys or values, the choice of experts,
one expert's, or anything else."""


@dataclass(frozen=True)
class TensorSpec:
    """One weight: its path inside the layer ("attention.q.kernel"), its shape, the key that names
    it in the whole model, and what it is for. A tied head's table has the embedding table's key.
    expert: the number of the expert that it belongs to, if it does. published: the format in which
    the model's files have it, None if these are plain numbers; can_pack: whether a run may choose
    another format: not of a model that is published in few bits. dtype: of a small tensor that has
    its own, whatever the run's is."""

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
        return self.path if self.expert is None else self.path.removeprefix(_of_expert(self.expert))

    @property
    def is_small(self) -> bool:
        """Whether this is a bias, a norm or a router; they are few bytes and always stay on the
        device."""
        return len(self.shape) == 1 or self.role == "router"

    def storage(self, dtype: str, bits: int = 16, is_papers: bool = False) -> Storage:
        """Returns how the tensor is kept.

        bits: 16 for plain numbers. With fewer, a tensor that is published in few bits keeps its
        format; of other models the large tensors are quantized. is_papers: in the paper's format.
        """
        if bits == 16 or self.is_small:
            return Storage(self.shape, self.dtype or dtype)
        if not self.can_pack:
            return Storage(self.shape, dtype, self.published)
        return Storage(self.shape, dtype, paper(bits) if is_papers else own(bits, self.is_table))

    @property
    def is_table(self) -> bool:
        """Whether this is a table of embeddings, or the head."""
        return self.key.startswith(("embedding.", "head."))

    def nbytes(self, dtype: str, bits: int = 16) -> int:
        return self.storage(dtype, bits).nbytes


@dataclass(frozen=True)
class Formats:
    """Formats of a run's numbers: bits per element of weights, of sealed KV blocks, and of what
    decoder layers multiply; 16 stands for `dtype` itself. weight_format: of weights that are
    quantized when they are loaded. Arrays that are replaced with every token
    are never quantized, since their errors would add up."""

    dtype: str
    weight_bits: int = 16
    cache_bits: int = 16
    matmul_bits: int = 16
    weight_format: WeightFormat = "own"

    def weight(self, tensor: TensorSpec) -> Storage:
        return tensor.storage(self.dtype, self.weight_bits, self.weight_format == "paper")

    def sealed(self, leaf: StateLeaf, rows: int, tokens: int) -> Storage:
        """Returns how an array of a sealed block is kept."""
        return kv_storage(leaf.array_shape(rows, tokens), self.dtype, self.cache_bits)

    def plain(self, leaf: StateLeaf, rows: int, tokens: int = 1) -> Storage:
        """Returns how an array is kept that is still written to: of an open block, or one that is
        replaced."""
        return Storage(leaf.array_shape(rows, tokens), self.dtype)

    @property
    def suffix(self) -> str:
        """Suffix that tells stored weights of these formats from those of other formats."""
        if self.weight_bits == 16:
            return ""
        return f"-{self.weight_bits}bit-{self.weight_format}-v{FORMAT_VERSION}"


@dataclass(frozen=True)
class LayerTensors:
    """The weights of one layer; kind: of the layer; index: its place in the spec."""

    kind: LayerKind
    index: int
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def large(self) -> tuple[TensorSpec, ...]:
        """The tensors that a policy places: matrices and tables."""
        return tuple(tensor for tensor in self.tensors if not tensor.is_small)

    @cached_property
    def large_shapes(self) -> tuple[tuple[TensorSpec, int], ...]:
        """One of the large tensors of each shape, an expert's apart, and how many are like it: a
        layer of experts has hundreds."""
        first: dict[tuple[Any, ...], list[TensorSpec]] = {}
        for tensor in self.large:
            kind = (tensor.shape, tensor.expert is not None, tensor.published)
            first.setdefault(kind, []).append(tensor)
        return tuple((tensors[0], len(tensors)) for tensors in first.values())

    @cached_property
    def large_size(self) -> int:
        """Elements of all large tensors."""
        return sum(tensor.size for tensor in self.large)

    @cached_property
    def routing(self) -> tuple[TensorSpec, ...]:
        """The tensors by which experts are chosen, which are on the device."""
        return tuple(t for t in self.tensors if t.path.startswith(("mlp_norm.", "router")))

    @cached_property
    def expert_size(self) -> int:
        """Elements of one expert's tensors."""
        return sum(tensor.size for tensor in self.large if tensor.expert == 0)

    def size_of(self, *roles: Role) -> int:
        """Elements of the matrices with these roles."""
        return sum(tensor.size for tensor in self.large if tensor.role in roles)

    @cached_property
    def by_path(self) -> dict[str, TensorSpec]:
        """The tensors by their paths."""
        return {tensor.path: tensor for tensor in self.tensors}

    def nbytes(self, dtype: str) -> int:
        """Bytes of all tensors as plain numbers."""
        return sum(tensor.storage(dtype).nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class LayerSpec(LayerTensors):
    """The weights and shapes of one layer.

    parts: what a decoder layer is made of; number: a decoder layer's in the whole model.
    """

    hidden_size: int
    parts: LayerParts | None = None
    number: int = 0

    @property
    def name(self) -> str:
        return f"decoder layer {self.number}" if self.kind == "decoder" else self.kind

    @property
    def decoder(self) -> LayerParts:
        """The parts of a decoder layer."""
        assert self.parts is not None, "only decoder layers have parts"
        return self.parts

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a decoder layer that attends."""
        return self.decoder.attention

    @cached_property
    def attends(self) -> bool:
        """Whether this is a decoder layer that attends to keys and values."""
        return self.parts is not None and isinstance(self.parts.mixer, AttentionSpec)

    @property
    def mixer(self) -> AttentionSpec | Mixer:
        """What a decoder layer mixes tokens by."""
        return self.decoder.mixer

    @cached_property
    def growing(self) -> tuple[StateLeaf, ...]:
        """What a decoder layer keeps of every token."""
        return tuple(leaf for leaf in self.mixer.leaves if leaf.grows)

    @cached_property
    def replaced(self) -> tuple[StateLeaf, ...]:
        """What a decoder layer replaces with every token."""
        return tuple(leaf for leaf in self.mixer.leaves if not leaf.grows)

    @cached_property
    def row_size(self) -> int:
        """Elements that a decoder layer keeps of a token."""
        return sum(leaf.size for leaf in self.growing)

    @cached_property
    def state_size(self) -> int:
        """Elements of a sequence that a decoder layer replaces with every token."""
        return sum(leaf.size for leaf in self.replaced)

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of a decoder layer that has some."""
        mlp = self.parts.mlp if self.parts is not None else None
        return mlp if isinstance(mlp, ExpertsSpec) else None

    @property
    def mlp_width(self) -> int:
        """Elements between the products of the feed-forward block that all tokens go through; 0 if
        there is none."""
        mlp = self.decoder.mlp
        block = mlp.shared if isinstance(mlp, ExpertsSpec) else mlp
        return 0 if block is None else block.width * (1 + block.is_gated)

    @cached_property
    def active_size(self) -> int:
        """Elements of the large tensors that one token is multiplied with."""
        if self.experts is None:
            return self.large_size
        return self.large_size - (self.experts.count - self.experts.top) * self.expert_size

    @cached_property
    def projected_share(self) -> float:
        """Share of the layer's products that makes queries, keys and values."""
        return self.size_of("query", "key", "value") / self.active_size

    @cached_property
    def kept_share(self) -> float:
        """Share of the layer's products that makes keys and values."""
        return self.size_of("key", "value") / self.active_size

    def flops(self, rows: float) -> float:
        """Returns the FLOPs of the layer's products with this number of tokens."""
        return 2.0 * rows * self.active_size

    def chosen_experts(self, rows: float) -> float:
        """Returns how many experts are expected to be chosen by at least one of some tokens, if all
        are chosen equally often; 0 without experts."""
        if self.experts is None:
            return 0.0
        missed: float = (1 - self.experts.top / self.experts.count) ** rows
        return self.experts.count * (1 - missed)

    @property
    def without_names(self) -> LayerSpec:
        """The shapes alone: equal for layers that can share compiled programs."""
        nameless = tuple(replace(tensor, key="") for tensor in self.tensors)
        return replace(self, index=0, number=0, tensors=nameless)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The layers of a model in the order in which they run: embedding, decoder layers, head. An
    embedding or a head that another stage has is there without tensors."""

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
    def all_attend(self) -> bool:
        """Whether every decoder layer attends, so that sequences can share a prefix, and padding
        can be left out."""
        return all(layer.attends for layer in self.decoders)

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


def _norm(path: str, norm: NormSpec, size: int) -> Shapes:
    if not norm.is_affine:
        return []
    bias: Shapes = [] if norm.is_rms else [(f"{path}.bias", (size,))]
    return [(f"{path}.scale", (size,)), *bias]


_ROLES: dict[str, Role] = {
    "attention.q.kernel": "query",
    "attention.k.kernel": "key",
    "attention.v.kernel": "value",
    "router.kernel": "router",
    "shared_gate.kernel": "router",
}


def _mixer(hidden: int, mixer: AttentionSpec | Mixer, norm: NormSpec) -> Shapes:
    shapes = [(f"attention.{path}", shape) for path, shape in mixer.tensors(hidden)]
    if isinstance(mixer, AttentionSpec) and mixer.qk_norm is not None:
        is_each = mixer.qk_norm == "head"
        for name, size in (("q_norm", mixer.query_size), ("k_norm", mixer.kv_size)):
            shapes += _norm(f"attention.{name}", norm, mixer.head_dim if is_each else size)
    return shapes


def _mlp(prefix: str, hidden: int, mlp: MLPSpec) -> Shapes:
    """A feed-forward block; prefix: what its paths begin with."""
    shapes: Shapes = []
    for name in ("gate", "up") if mlp.is_gated else ("up",):
        shapes += linear(f"{prefix}{name}", mlp.width, hidden, mlp.bias)
    return shapes + linear(f"{prefix}down", hidden, mlp.width, mlp.bias)


def _experts(hidden: int, experts: ExpertsSpec) -> Shapes:
    shapes = linear("router", experts.count, hidden, experts.routing.has_bias)
    if experts.routing.has_correction:
        shapes.append(("router_correction", (experts.count,)))
    if experts.shared is not None:
        shapes += _mlp("shared.", hidden, experts.shared)
        if experts.is_shared_gated:
            shapes += linear("shared_gate", 1, hidden, False)
    return shapes


def _decoder(config: ModelConfig, parts: LayerParts) -> Shapes:
    hidden, norm = config.hidden_size, config.norm
    before, after = config.norm_place != "result", config.norm_place in ("around", "result")
    shapes = _mixer(hidden, parts.mixer, norm)
    mlp = parts.mlp
    shapes += _experts(hidden, mlp) if isinstance(mlp, ExpertsSpec) else _mlp("mlp.", hidden, mlp)
    for block in ("attention", "mlp"):
        shapes += _norm(f"{block}_norm", norm, hidden) if before else []
        shapes += _norm(f"{block}_result_norm", norm, hidden) if after else []
    return shapes


def _tensors(
    prefix: str, shapes: Shapes, dtypes: Mapping[str, str] | None = None
) -> tuple[TensorSpec, ...]:
    """The tensors of some paths. dtypes: of those that have their own, by path."""
    own = dtypes or {}
    return tuple(
        TensorSpec(
            path=path,
            shape=shape,
            key=f"{prefix}.{path}",
            role=_ROLES.get(path, "other"),
            dtype=own.get(path),
        )
        for path, shape in shapes
    )


def _of_expert(number: int) -> str:
    """What the paths of an expert's tensors begin with."""
    return f"experts.{number}."


def _of_experts(prefix: str, config: ModelConfig, parts: LayerParts) -> tuple[TensorSpec, ...]:
    """The tensors of a layer's experts, one expert after the other."""
    if not isinstance(parts.mlp, ExpertsSpec):
        return ()
    return tuple(
        TensorSpec(
            path=f"{_of_expert(number)}{path}",
            shape=shape,
            key=f"{prefix}.{_of_expert(number)}{path}",
            role="expert",
            expert=number,
        )
        for number in range(parts.mlp.count)
        for path, shape in _mlp("", config.hidden_size, parts.mlp.expert)
    )


def _of_decoder(prefix: str, config: ModelConfig, parts: LayerParts) -> tuple[TensorSpec, ...]:
    """The tensors of a decoder layer."""
    tensors = _tensors(prefix, _decoder(config, parts), _own_dtypes(parts.mlp))
    return (*tensors, *_of_experts(prefix, config, parts))


def _own_dtypes(mlp: MLPSpec | ExpertsSpec) -> dict[str, str]:
    """Returns the dtypes of tensors that have their own: rounding them would change which experts
    are chosen."""
    if not isinstance(mlp, ExpertsSpec):
        return {}
    precise = {"router.kernel": "float32"} if mlp.routing.is_precise else {}
    return {"router_correction": "float32", **precise}


def _ends(config: ModelConfig) -> tuple[LayerSpec, LayerSpec]:
    """The embedding and the head; without tensors if another stage has them."""
    hidden, table = config.hidden_size, (config.vocab_size, config.embed_size)
    embedding: Shapes = [("tokens", table)]
    if config.position_offset is not None:
        rows = config.max_positions + config.position_offset
        embedding.append(("positions", (rows, hidden)))
    head: Shapes = []
    if config.final_norm:
        head += _norm("norm", config.norm, hidden)
    if config.projects_embeddings:
        embedding += linear("project_in", hidden, config.embed_size, False)
        head += linear("project_out", config.embed_size, hidden, False)
    output = TensorSpec("tokens", table, "embedding.tokens" if config.tied_head else "head.tokens")
    first = _tensors("embedding", embedding) if config.has_embedding else ()
    last = (*_tensors("head", head), output) if config.has_head else ()
    return (
        LayerSpec("embedding", 0, first, hidden),
        LayerSpec("head", config.num_layers + 1, last, hidden),
    )


@lru_cache(maxsize=16)  # a policy search asks for one model's spec hundreds of times
def model_spec(config: ModelConfig) -> ModelSpec:
    """Returns the shapes of the model that a config describes."""
    embedding, head = _ends(config)
    decoders = (
        LayerSpec(
            kind="decoder",
            index=i + 1,
            tensors=_of_decoder(f"decoder.{config.first_layer + i}", config, config.kinds[kind]),
            hidden_size=config.hidden_size,
            parts=config.kinds[kind],
            number=config.first_layer + i,
        )
        for i, kind in enumerate(config.pattern)
    )
    layers = (embedding, *decoders, head)
    if config.published is not None:
        layers = tuple(_as_published(layer, config.published) for layer in layers)
    return ModelSpec(config.hidden_size, layers)


def _as_published(layer: LayerSpec, published: Published) -> LayerSpec:
    """Returns a layer with the formats of its tensors in the model's files."""
    tensors = tuple(
        replace(tensor, published=published.format_of(tensor.key), can_pack=False)
        for tensor in layer.tensors
    )
    return replace(layer, tensors=tensors)
