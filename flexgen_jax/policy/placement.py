"""Splits whole tensors exactly by the fractions of a policy.

Each tensor goes to the tier that is furthest behind its share of the bytes so far. So the
rounding error is carried over from tensor to tensor and layer to layer, and the realised split
over the whole model is within one tensor of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from flexgen_jax.models.spec import Formats, ModelSpec
from flexgen_jax.policy.policy import TIERS, Placement, Policy, Tier


def split(sizes: Iterable[int], placement: Placement) -> list[Tier]:
    """Returns a tier for each size, in bytes, in the order of the sizes."""
    shares = [(tier, placement.fraction(tier)) for tier in TIERS]
    wanted = {tier: share for tier, share in shares if share > 0}
    behind = dict.fromkeys(wanted, 0.0)
    tiers: list[Tier] = []
    for size in sizes:
        for tier, share in wanted.items():
            behind[tier] += share * size
        chosen = max(behind, key=lambda tier: behind[tier])
        behind[chosen] -= size
        tiers.append(chosen)
    return tiers


def realised(sizes: Sequence[int], tiers: Sequence[Tier]) -> dict[Tier, float]:
    """Returns the fraction of the bytes that each tier got."""
    total = sum(sizes) or 1
    return {
        tier: sum(size for size, at in zip(sizes, tiers, strict=True) if at == tier) / total
        for tier in TIERS
    }


def place_weights(spec: ModelSpec, dtype: str, policy: Policy) -> dict[str, Tier]:
    """Returns a tier for every tensor, by key. Biases and norms stay on the device."""
    large = [tensor for tensor in spec.tensors.values() if not tensor.is_small]
    tiers = split([t.nbytes(dtype, policy.weight_bits) for t in large], policy.weights)
    small: dict[str, Tier] = {
        key: "device" for key, tensor in spec.tensors.items() if tensor.is_small
    }
    return small | {tensor.key: tier for tensor, tier in zip(large, tiers, strict=True)}


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
    chosen = split(large.values(), Placement(device=0.0, host=share))
    return frozenset(key for key, tier in zip(large, chosen, strict=True) if tier == "host")


class CacheKey(NamedTuple):
    """Key of one KV block: the indices of its decoder layer, its batch, and the block itself."""

    layer: int
    batch: int
    block: int


class Part(NamedTuple):
    """The KV blocks of one layer and batch whose values are in one place, device or host.

    lengths: token counts of the sealed blocks; tail: token count of the open block, 0 if it is
    elsewhere; starts: the index of the first token of each of these blocks.
    """

    lengths: tuple[int, ...]
    tail: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class CachePlan:
    """The KV blocks of one block of batches.

    prompt, generated: token counts of each batch's blocks; homes: where each block lives;
    values_stay, keys_stay: whether decoding leaves values, or keys, of blocks in the host and disk
    tiers on the host.
    """

    prompt: tuple[tuple[int, ...], ...]
    generated: tuple[tuple[int, ...], ...]
    homes: dict[CacheKey, Tier]
    values_stay: bool
    keys_stay: bool

    def stays_on_host(self, key: CacheKey) -> bool:
        """Returns whether a block's values stay on the host."""
        return self.values_stay and self.homes[key] != "device"

    def moved(self, key: CacheKey) -> float:
        """Returns the share of a block's bytes that moves to the device for every token."""
        if self.homes[key] == "device":
            return 0.0
        return (not self.values_stay) / 2 + (not self.keys_stay) / 2

    def part(self, layer: int, batch: int, sealed: int, on_host: bool) -> Part:
        """Returns the blocks of a layer whose values stay on the host (`on_host`), or the others.

        sealed: the number of sealed blocks; one more is open.
        """
        lengths = self.lengths(batch)
        starts = (0, *accumulate(lengths))
        keys = (CacheKey(layer, batch, block) for block in range(sealed + 1))
        found = [key.block for key in keys if self.stays_on_host(key) == on_host]
        return Part(
            lengths=tuple(lengths[block] for block in found if block < sealed),
            tail=lengths[sealed] if sealed in found else 0,
            starts=tuple(starts[block] for block in found),
        )

    def lengths(self, batch: int) -> tuple[int, ...]:
        return self._lengths[batch]

    @cached_property  # read once for every block, and there may be 100,000 blocks
    def _lengths(self) -> list[tuple[int, ...]]:
        return [prompt + new for prompt, new in zip(self.prompt, self.generated, strict=True)]


def place_cache(
    kv_sizes: Sequence[int],
    prompt: Sequence[tuple[int, ...]],
    generated: Sequence[tuple[int, ...]],
    policy: Policy,
) -> CachePlan:
    """Chooses the homes of all KV blocks of some decoder layers.

    kv_sizes: the elements of a token's key in each layer. Blocks are split in the order of their
    age, so that the fractions hold at every moment of a generation.
    """
    stay = (policy.values_stay, policy.attends_on_host)
    plan = CachePlan(tuple(prompt), tuple(generated), {}, *stay)
    most = max(len(plan.lengths(batch)) for batch in range(len(prompt)))
    keys = [
        CacheKey(layer, batch, block)
        for block in range(most)
        for layer in range(len(kv_sizes))
        for batch in range(len(prompt))
        if block < len(plan.lengths(batch))
    ]
    unit = gcd(*kv_sizes)  # the split of equal layers depends on no size
    parts = [size // unit for size in kv_sizes]
    sizes = [parts[key.layer] * plan.lengths(key.batch)[key.block] for key in keys]
    plan.homes.update(zip(keys, split(sizes, policy.cache), strict=True))
    return plan


SMALL_STATES = 4 << 20
"""Hidden states of one token of fewer bytes a batch stay on the device."""


def stays_on_device(tokens: int, nbytes: int) -> bool:
    """Returns whether a batch's hidden states of `nbytes` bytes are on the device, whatever the
    policy says."""
    return tokens == 1 and nbytes < SMALL_STATES


@dataclass(frozen=True)
class ActivationPlan:
    """The tiers where the hidden states of (layer, batch) wait for the next layer."""

    homes: dict[tuple[int, int], Tier]

    def home(self, tokens: int, layer: int, batch: int, nbytes: int) -> Tier:
        """Returns the tier of hidden states of `tokens` tokens per sequence, `nbytes` in all.

        Small ones of one token stay on the device: a copy would wait behind weights, and hold up
        the next layer, longer than the memory is worth. Larger ones of one token never go to disk.
        """
        home = self.homes[layer, batch]
        if stays_on_device(tokens, nbytes):
            return "device"
        return "host" if tokens == 1 and home == "disk" else home


def place_activations(layers: int, batches: int, policy: Policy) -> ActivationPlan:
    """Splits hidden states over the tiers by layer and batch, as the policy's fractions say."""
    keys = [(layer, batch) for layer in range(layers) for batch in range(batches)]
    return ActivationPlan(dict(zip(keys, split([1] * len(keys), policy.activations), strict=True)))
