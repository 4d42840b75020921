"""Splits whole tensors exactly by the fractions of a policy.

Each tensor goes to the tier that is furthest behind its share of the bytes so far. So the
rounding error is carried over from tensor to tensor and layer to layer, and the realised split
over the whole model is within one tensor of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import NamedTuple

from flexgen_jax.models.spec import ModelSpec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.policy import TIERS, Placement, Policy, Tier


class Splitter:
    """Splits sizes by a placement's fractions, and carries the rounding error over from call to
    call."""

    def __init__(self, placement: Placement) -> None:
        shares = [(tier, placement.fraction(tier)) for tier in TIERS]
        self._wanted = {tier: share for tier, share in shares if share > 0}
        self._behind = dict.fromkeys(self._wanted, 0.0)

    def split(self, sizes: Iterable[int]) -> list[Tier]:
        """Returns a tier for each size, in bytes, in the order of the sizes."""
        behind, tiers = self._behind, list[Tier]()
        for size in sizes:
            for tier, share in self._wanted.items():
                behind[tier] += share * size
            chosen = max(behind, key=lambda tier: behind[tier])
            behind[chosen] -= size
            tiers.append(chosen)
        return tiers


def split(sizes: Iterable[int], placement: Placement) -> list[Tier]:
    """Returns a tier for each size, in bytes, in the order of the sizes."""
    return Splitter(placement).split(sizes)


def realised(sizes: Sequence[int], tiers: Sequence[Tier]) -> dict[Tier, float]:
    """Returns the fraction of the bytes that each tier got."""
    total = sum(sizes) or 1
    return {
        tier: sum(
            size for size, placed_tier in zip(sizes, tiers, strict=True) if placed_tier == tier
        )
        / total
        for tier in TIERS
    }


def place_weights(spec: ModelSpec, dtype: str, policy: Policy) -> dict[str, Tier]:
    """Returns a tier for every tensor, by key. Biases and norms stay on the device.

    In a mixture of experts, weights that every token uses go to the fast tiers first: a
    token chooses few of the experts. All tensors of an expert lie together.
    """
    formats = policy.formats(dtype)
    tiers: dict[str, Tier] = {key: "device" for key, t in spec.tensors.items() if t.is_small}
    groups = spec.placed_units
    sizes = [[sum(formats.weight(t).nbytes for t in unit) for unit in group] for group in groups]
    placements = in_order(policy.weights, [sum(each) for each in sizes])
    for group, each, placement in zip(groups, sizes, placements, strict=True):
        for unit, tier in zip(group, split(each, placement), strict=True):
            tiers |= {tensor.key: tier for tensor in unit}
    return tiers


def in_order(placement: Placement, sizes: Sequence[int]) -> list[Placement]:
    """Returns placements of groups with the given bytes that match `placement` in total, first
    groups in the fastest tiers.

    With 30 % on the device and 50 % on the host, of groups of 400 and 600 bytes the first has 300
    bytes on the device and 100 on the host, the second 400 on the host and 200 on disk.
    """
    remaining = {tier: placement.fraction(tier) * sum(sizes) for tier in ("device", "host")}
    placements = []
    for size in sizes:
        device = min(remaining["device"], size)
        host = min(remaining["host"], size - device)
        remaining["device"], remaining["host"] = (
            remaining["device"] - device,
            remaining["host"] - host,
        )
        on_device = min(1.0, device / (size or 1))
        placements.append(Placement(on_device, min(1.0 - on_device, host / (size or 1))))
    return placements


PROGRAM_PAGES = 100_000_000
"""Bytes of the page cache that are left to programs and libraries. If weights evict those, a run
nearly stops."""


def page_cached(
    spec: ModelSpec, formats: Formats, tiers: Mapping[str, Tier], spare: int
) -> frozenset[str]:
    """Returns the tensors on disk that the page cache has room for, even over decoder layers.

    spare: free bytes of RAM. The layers are read in a cycle: if the set were too large, the cache
    would evict every page before its next use.
    """
    large = {
        tensor.key: formats.weight(tensor).nbytes
        for layer in spec.decoders
        for tensor in layer.tensors
        if tiers[tensor.key] == "disk"
    }
    share = min(1.0, max(0, spare - PROGRAM_PAGES) / (sum(large.values()) or 1))
    cached = split(large.values(), Placement(device=0.0, host=share))
    return frozenset(key for key, tier in zip(large, cached, strict=True) if tier == "host")


class Homes(NamedTuple):
    """The homes of a batch's state."""

    # Of the KV blocks of each decoder layer, in the order of their age.
    blocks: tuple[tuple[Tier, ...], ...]
    # Of each decoder layer's recurrent state; the device without a state.
    replaced: tuple[Tier, ...]
    # Of each layer's output hidden states, from the embedding on.
    hidden: tuple[Tier, ...]


class Placer:
    """Assigns homes to the states of a run's batches at admission."""

    def __init__(self, spec: ModelSpec, policy: Policy) -> None:
        rows = [layer.row_size for layer in spec.decoders]
        states = [layer.state_size for layer in spec.decoders]
        unit = gcd(*rows, *states)  # the split of equal layers depends on no size
        self._rows = [size // unit for size in rows]
        self._states = [size // unit for size in states]
        self._outputs = len(spec.layers) - 1
        self._policy = policy
        self._begin()

    def _begin(self) -> None:
        self._cache = Splitter(self._policy.cache)
        self._hidden = Splitter(self._policy.activations)

    def enter(self, batches: Sequence[tuple[int, ...]], is_first: bool) -> list[Homes]:
        """Chooses the homes for batches that enter together.

        batches: of each, the token counts of its KV blocks. They are split in the order of their
        age, so that the fractions hold at every moment of a generation. is_first: whether no others
        go on, whose rounding error carries over.
        """
        if is_first:
            self._begin()
        numbers, layers = range(len(batches)), range(len(self._rows))
        replaced = [(layer, n) for layer in layers if self._states[layer] for n in numbers]
        states = self._cache.split([self._states[layer] for layer, _ in replaced])
        blocks = [
            (layer, n, block)
            for block in range(max(map(len, batches)))
            for layer in layers
            if self._rows[layer]
            for n in numbers
            if block < len(batches[n])
        ]
        sizes = [self._rows[layer] * batches[n][block] for layer, n, block in blocks]
        of_blocks = dict(zip(blocks, self._cache.split(sizes), strict=True))
        of_states = dict(zip(replaced, states, strict=True))
        outputs = [(layer, n) for layer in range(self._outputs) for n in numbers]
        hidden = dict(zip(outputs, self._hidden.split([1] * len(outputs)), strict=True))
        return [
            Homes(
                blocks=tuple(
                    tuple(of_blocks[layer, n, block] for block in range(len(batches[n])))
                    if self._rows[layer]
                    else ()
                    for layer in layers
                ),
                replaced=tuple(of_states.get((layer, n), "device") for layer in layers),
                hidden=tuple(hidden[layer, n] for layer in range(self._outputs)),
            )
            for n in numbers
        ]


MIN_OFFLOADED_STATE_BYTES = 4 << 20
"""Hidden states of one token of fewer bytes a batch stay on the device."""


def stays_on_device(nbytes: int) -> bool:
    """Returns whether a batch's hidden states after the prompt, of `nbytes` bytes, are on the
    device regardless of the policy."""
    return nbytes < MIN_OFFLOADED_STATE_BYTES


def home_of_hidden(home: Tier, is_short: bool, nbytes: int) -> Tier:
    """Returns the tier of hidden states of `nbytes` bytes whose policy home is `home`;
    is_short: whether they are of a step after the prompt, or of its last token alone.

    Small ones of that kind stay on the device: a copy would wait behind weights, and hold up the
    next layer, longer than the memory is worth. Larger ones never go to disk.
    """
    if is_short and stays_on_device(nbytes):
        return "device"
    return "host" if is_short and home == "disk" else home
