"""How a layer's weights are divided into parts that are moved together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexgen_jax.models.formats.format import Leaf
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.tensor_spec import Formats, TensorSpec
from flexgen_jax.policy.policy import Tier


@dataclass(frozen=True, eq=False)
class Layout:
    """The arrays of one host buffer. A plan has one `Layout` object for equal arrays."""

    leaves: tuple[Leaf, ...]
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class WeightsPart:
    """The tensors of a layer that are moved together, and what moving them takes.

    Of a decoder layer, each tensor that is copied to the device is a part, or those of an expert
    together, because the parts travel beside one step each, and the others are one part. Each
    tensor of the embedding and the head is a part of its own, because both may have the same table.
    """

    # The first layer that has the part.
    layer: int
    # Of its tensors.
    keys: tuple[str, ...]
    # Whether what is read of it stays in host buffers while the block runs.
    is_kept: bool
    # Of the host buffers into which it is read from disk.
    layouts: tuple[Layout, ...]
    # Bytes of the device that a copy of it takes.
    copied: int
    # The number of the expert that the part is, which need not be loaded if nobody chooses it.
    expert: int | None = None


def divided(
    spec: ModelSpec,
    formats: Formats,
    tiers: Mapping[str, Tier],
    unified: bool,
    layout: Callable[[Sequence[Storage]], Layout],
) -> tuple[tuple[WeightsPart, ...], ...]:
    """Returns the parts of every layer's weights.

    tiers: the home of every tensor, by key; layout: that of a buffer for some arrays. Layers that
    have the same tensors have the same parts.
    """
    known: dict[tuple[str, ...], WeightsPart] = {}

    def part(layer: LayerSpec, tensors: tuple[TensorSpec, ...]) -> WeightsPart:
        keys = tuple(tensor.key for tensor in tensors)
        if keys not in known:
            away = [tensor for tensor in tensors if tiers[tensor.key] != "device"]
            on_disk = [tensor for tensor in away if tiers[tensor.key] == "disk"]
            nbytes = sum(formats.weight(tensor).nbytes for tensor in away)
            known[keys] = WeightsPart(
                layer=layer.index,
                keys=keys,
                is_kept=layer.kind != "decoder",
                layouts=tuple(layout([formats.weight(tensor)]) for tensor in on_disk),
                copied=0 if unified else nbytes,
                expert=tensors[0].expert,
            )
        return known[keys]

    return tuple(
        tuple(part(layer, tensors) for tensors in _grouped(layer, tiers, unified))
        for layer in spec.layers
    )


def _grouped(
    layer: LayerSpec, tiers: Mapping[str, Tier], unified: bool
) -> Iterable[tuple[TensorSpec, ...]]:
    """Yields the tensors of each part of a layer."""
    away = {tensor.key for tensor in layer.tensors if tiers[tensor.key] != "device"}
    moves = set() if unified else away
    experts: dict[int, list[TensorSpec]] = {}
    together: list[TensorSpec] = []
    others: list[TensorSpec] = []
    for tensor in layer.tensors:
        if tensor.expert is not None and tensor.key in away:
            experts.setdefault(tensor.expert, []).append(tensor)
        elif layer.kind == "decoder" and tensor.key not in moves:
            together.append(tensor)
        else:
            others.append(tensor)
    if together:
        yield tuple(together)
    yield from ((tensor,) for tensor in others)
    yield from (tuple(tensors) for tensors in experts.values())
