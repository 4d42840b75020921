"""A model's shapes: one description that init, loading, placement, byte and FLOP counts share.

This module imports no JAX, so that policies can be computed without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from flexgen_jax.models.config import DTYPES
from flexgen_jax.models.parts import AttentionSpec, ExpertsSpec, LayerParts, Mixer, StateLeaf
from flexgen_jax.models.tensor_spec import Role, TensorSpec

LayerKind = Literal["embedding", "decoder", "head"]


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
            key = (tensor.shape, tensor.expert is not None, tensor.published)
            first.setdefault(key, []).append(tensor)
        return tuple((tensors[0], len(tensors)) for tensors in first.values())

    @cached_property
    def large_size(self) -> int:
        """Elements of all large tensors."""
        return sum(tensor.size for tensor in self.large)

    @cached_property
    def routing(self) -> tuple[TensorSpec, ...]:
        """The router's tensors, which stay on the device."""
        return tuple(t for t in self.tensors if t.path.startswith(("mlp_norm.", "router")))

    @cached_property
    def shared_paths(self) -> tuple[str, ...]:
        """Paths of the tensors that all tokens use."""
        return tuple(tensor.path for tensor in self.tensors if tensor.expert is None)

    @cached_property
    def expert_tensors(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """The tensors of each expert, by its number."""
        experts: dict[int, list[TensorSpec]] = {}
        for tensor in self.tensors:
            if tensor.expert is not None:
                experts.setdefault(tensor.expert, []).append(tensor)
        return tuple(tuple(experts[number]) for number in sorted(experts))

    @cached_property
    def large_of_expert(self) -> tuple[TensorSpec, ...]:
        """The large tensors of one expert, () without experts."""
        return tuple(tensor for tensor in self.large if tensor.expert == 0)

    @cached_property
    def expert_size(self) -> int:
        """Elements of one expert's tensors."""
        return sum(tensor.size for tensor in self.large_of_expert)

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

    parts: the parts of a decoder layer; number: a decoder layer's in the whole model.
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
        """A decoder layer's state per token."""
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

    def state_bytes(self, dtype: str) -> int:
        """Bytes of a sequence that a decoder layer replaces with every token."""
        return sum(leaf.size * DTYPES[leaf.dtype or dtype] for leaf in self.replaced)

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
        """Elements of the large tensors that multiply one token."""
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

    @property
    def without_names(self) -> LayerSpec:
        """The shapes alone: equal for layers that can share compiled programs."""
        nameless = tuple(replace(tensor, key="") for tensor in self.tensors)
        return replace(self, index=0, number=0, tensors=nameless)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The layers of a model in execution order: embedding, decoder layers, head. An
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

    @property
    def last_decoder(self) -> int:
        """The index of the last decoder layer."""
        return len(self.layers) - 2

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
        by_key: dict[str, TensorSpec] = {}
        for layer in self.layers:
            for tensor in layer.tensors:
                by_key.setdefault(tensor.key, tensor)
        return by_key

    @cached_property
    def placed_units(self) -> tuple[list[list[TensorSpec]], list[list[TensorSpec]]]:
        """The large tensors, each once, in units that lie together: a unit for each tensor that all
        tokens use, and a unit for each expert."""
        shared: dict[str, list[TensorSpec]] = {}
        experts: dict[tuple[int, int], list[TensorSpec]] = {}
        for layer in self.layers:
            for tensor in layer.large:
                if tensor.expert is None:
                    shared.setdefault(tensor.key, [tensor])
                else:
                    experts.setdefault((layer.index, tensor.expert), []).append(tensor)
        return list(shared.values()), list(experts.values())

    @property
    def num_parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    def hidden_shape(self, batch: int, tokens: int) -> tuple[int, int, int]:
        """Returns the shape of the hidden states between two layers: [batch, token, hidden]."""
        return batch, tokens, self.hidden_size

    def hidden_bytes(self, batch: int, tokens: int, dtype: str) -> int:
        return prod(self.hidden_shape(batch, tokens)) * DTYPES[dtype]
