"""Splits whole tensors exactly by the fractions of a policy.

Each tensor goes to the tier that is furthest behind its share of the bytes so far. So the
rounding error is carried over from tensor to tensor and layer to layer, and the realised split
over the whole model is within one tensor of the request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import gcd
from typing import NamedTuple

from flexgen_jax.models.spec import Formats, ModelSpec
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


class CachePlan:
    """The KV blocks of the batches that are there.

    prompt, generated: token counts of each batch's blocks; homes: where each block lives;
    values_stay, keys_stay: whether decoding leaves values, or keys, of blocks in the host and disk
    tiers on the host.
    """

    def __init__(self, kv_sizes: Sequence[int], policy: Policy) -> None:
        """kv_sizes: the elements of a token's key in each decoder layer."""
        self.prompt: dict[int, tuple[int, ...]] = {}
        self.generated: dict[int, tuple[int, ...]] = {}
        self.homes: dict[CacheKey, Tier] = {}
        self.values_stay, self.keys_stay = policy.values_stay, policy.attends_on_host
        unit = gcd(*kv_sizes)  # the split of equal layers depends on no size
        self._parts = [size // unit for size in kv_sizes]
        self._fractions = policy.cache
        self._splitter = Splitter(policy.cache)
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._known: dict[int, dict[tuple[int, int, bool], Part]] = {}

    def enter(
        self, blocks: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]], is_first: bool
    ) -> None:
        """Chooses the homes of the blocks of batches that enter together.

        blocks: token counts of each batch's blocks, the prompt's and those of generated tokens.
        They are split in the order of their age, so that the fractions hold at every moment of a
        generation. is_first: whether no others go on, whose rounding error carries over.
        """
        if is_first:
            self._splitter = Splitter(self._fractions)
        for batch, (prompt, generated) in blocks.items():
            self.prompt[batch], self.generated[batch] = prompt, generated
            self._lengths[batch] = prompt + generated
        most = max(len(self._lengths[batch]) for batch in blocks)
        keys = [
            CacheKey(layer, batch, block)
            for block in range(most)
            for layer in range(len(self._parts))
            for batch in blocks
            if block < len(self._lengths[batch])
        ]
        sizes = [self._parts[key.layer] * self._lengths[key.batch][key.block] for key in keys]
        self.homes.update(zip(keys, self._splitter.split(sizes), strict=True))

    def leave(self, batch: int) -> None:
        """Forgets a batch."""
        for layer in range(len(self._parts)):
            for block in range(len(self._lengths[batch])):
                del self.homes[CacheKey(layer, batch, block)]
        del self.prompt[batch], self.generated[batch], self._lengths[batch]
        self._known.pop(batch, None)

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
        known, what = self._known.setdefault(batch, {}), (layer, sealed, on_host)
        if what not in known:
            known[what] = self._part(layer, batch, sealed, on_host)
        return known[what]

    def _part(self, layer: int, batch: int, sealed: int, on_host: bool) -> Part:
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


SMALL_STATES = 4 << 20
"""Hidden states of one token of fewer bytes a batch stay on the device."""


def stays_on_device(tokens: int, nbytes: int) -> bool:
    """Returns whether a batch's hidden states of `nbytes` bytes are on the device, whatever the
    policy says."""
    return tokens == 1 and nbytes < SMALL_STATES


class ActivationPlan:
    """The tiers where the hidden states of (layer, batch) wait for the next layer."""

    def __init__(self, layers: int, policy: Policy) -> None:
        self.homes: dict[tuple[int, int], Tier] = {}
        self._layers, self._fractions = layers, policy.activations
        self._splitter = Splitter(policy.activations)

    def enter(self, batches: Collection[int], is_first: bool) -> None:
        """Splits the hidden states of batches that enter together, as the policy's fractions
        say; is_first: as in `CachePlan.enter`."""
        if is_first:
            self._splitter = Splitter(self._fractions)
        keys = [(layer, batch) for layer in range(self._layers) for batch in batches]
        self.homes.update(zip(keys, self._splitter.split([1] * len(keys)), strict=True))

    def leave(self, batch: int) -> None:
        """Forgets a batch."""
        for layer in range(self._layers):
            del self.homes[layer, batch]

    def home(self, tokens: int, layer: int, batch: int, nbytes: int) -> Tier:
        """Returns the tier of hidden states of `tokens` tokens per sequence, `nbytes` in all.

        Small ones of one token stay on the device: a copy would wait behind weights, and hold up
        the next layer, longer than the memory is worth. Larger ones of one token never go to disk.
        """
        home = self.homes[layer, batch]
        if stays_on_device(tokens, nbytes):
            return "device"
        return "host" if tokens == 1 and home == "disk" else home
