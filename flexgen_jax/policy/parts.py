"""How a layer's weights are divided into parts that are moved together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexgen_jax.models.formats.format import Leaf
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.tensor_spec import Formats, TensorSpec
from flexgen_jax.policy.policy import Tier

BUNDLES = 32
"""Number of parts of a layer's experts if all are loaded: a plan of a model with hundreds of
experts a layer would take long to compute with a part for each."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The arrays of one host buffer. A plan has one `Layout` object for equal arrays."""

    leaves: tuple[Leaf, ...]
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class WeightsPart:
    """Tensors of a layer that move together, and their transfer cost.

    In a decoder layer, each tensor that is copied to the device is a part (or several experts'
    tensors together), because each part travels during one step; all other tensors are one part.
    Each tensor of the embedding and the head is a part of its own, because both may have the same
    table.
    """

    # The first layer that has the part.
    layer: int
    # Of its tensors.
    keys: tuple[str, ...]
    # Whether its disk reads stay in host buffers during the batch group.
    is_kept: bool
    # Of the host buffers into which it is read from disk.
    layouts: tuple[Layout, ...]
    # Device bytes of its copy.
    copied: int
    # The number of the first expert of the part, if it is of experts.
    expert: int | None = None


class Divider:
    """Divides layers into parts.

    tiers: the home of every tensor, by key; layout: that of a buffer for some arrays.
    """

    def __init__(
        self,
        formats: Formats,
        tiers: Mapping[str, Tier],
        unified: bool,
        layout: Callable[[Sequence[Storage]], Layout],
    ) -> None:
        self._formats, self._tiers, self._unified = formats, tiers, unified
        self._layout = layout
        self._known: dict[tuple[str, ...], WeightsPart] = {}

    def parts(self, layer: LayerSpec) -> tuple[WeightsPart, ...]:
        """Returns the parts of all of a layer's weights. Layers that have the same tensors have the
        same parts."""
        size = max(1, layer.experts.count // BUNDLES) if layer.experts else 1
        groups = _grouped(layer, self._tiers, self._unified, size)
        return tuple(self._part(layer, tensors) for tensors in groups)

    def experts(self, layer: LayerSpec) -> dict[int, WeightsPart]:
        """Returns the experts of a layer that have to be loaded, each as a part, by number."""
        groups = _grouped(layer, self._tiers, self._unified, 1)
        parts = (self._part(layer, group) for group in groups if group[0].expert is not None)
        return {part.expert: part for part in parts if part.expert is not None}

    def _part(self, layer: LayerSpec, tensors: tuple[TensorSpec, ...]) -> WeightsPart:
        keys = tuple(tensor.key for tensor in tensors)
        if keys not in self._known:
            away = [tensor for tensor in tensors if self._tiers[tensor.key] != "device"]
            on_disk = [tensor for tensor in away if self._tiers[tensor.key] == "disk"]
            nbytes = sum(self._formats.weight(tensor).nbytes for tensor in away)
            self._known[keys] = WeightsPart(
                layer=layer.index,
                keys=keys,
                is_kept=layer.kind != "decoder",
                layouts=tuple(self._layout([self._formats.weight(t)]) for t in on_disk),
                copied=0 if self._unified else nbytes,
                expert=tensors[0].expert,
            )
        return self._known[keys]


def _grouped(
    layer: LayerSpec, tiers: Mapping[str, Tier], unified: bool, size: int
) -> Iterable[tuple[TensorSpec, ...]]:
    """Yields the tensors of each part of a layer; size: experts in a part."""
    there = ("device", "host") if unified else ("device",)
    loaded = {tensor.key for tensor in layer.tensors if tiers[tensor.key] not in there}
    moves = set() if unified else loaded
    experts: dict[int, list[TensorSpec]] = {}
    together: list[TensorSpec] = []
    others: list[TensorSpec] = []
    for tensor in layer.tensors:
        if tensor.expert is not None and tensor.key in loaded:
            experts.setdefault(tensor.expert // size, []).append(tensor)
        elif layer.kind == "decoder" and tensor.key not in moves:
            together.append(tensor)
        else:
            others.append(tensor)
    if together:
        yield tuple(together)
    yield from ((tensor,) for tensor in others)
    yield from (tuple(tensors) for tensors in experts.values())
