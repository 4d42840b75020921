"""Peak bytes of every tier, computed from policy and shapes before anything is allocated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexgen_jax.models.config import DTYPES, ModelConfig
from flexgen_jax.models.spec import Formats, LayerSpec, ModelSpec, model_spec
from flexgen_jax.models.storage import Leaf
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.placement import (
    CachePlan,
    place_activations,
    place_cache,
    place_weights,
)
from flexgen_jax.policy.policy import (
    GREEDY,
    SCORE,
    TIERS,
    Ahead,
    Head,
    Policy,
    Tier,
    Workload,
    generated_blocks,
    prompt_blocks,
)

PENDING_WRITES = 3
"""Number of steps whose KV blocks, and of steps whose hidden states, may wait for the disk."""


@dataclass(frozen=True)
class BlockShape:
    """The batches of one block: rows and padded prompt length of each, and tokens to generate."""

    batch_sizes: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    gen_len: int
    head: Head = GREEDY

    @property
    def scores_prompts(self) -> bool:
        """Whether the head scores all tokens of the prompts, as in `Workload.scores_prompts`."""
        return self.head == SCORE and self.gen_len == 1

    @classmethod
    def of(cls, policy: Policy, workload: Workload) -> BlockShape:
        """Returns the largest block that the policy makes of a workload of equal prompts."""
        batches = min(policy.num_batches, -(-workload.num_sequences // policy.batch_size))
        rows = min(policy.batch_size, -(-workload.num_sequences // batches))
        prompts = (workload.prompt_len,) * batches
        return cls((rows,) * batches, prompts, workload.gen_len, workload.head)


def plan_cache(config: ModelConfig, policy: Policy, shape: BlockShape) -> CachePlan:
    """Returns where each KV block of a block of batches lives."""
    size = policy.kv_block_tokens
    prompt = [prompt_blocks(tokens, size) for tokens in shape.prompt_lens]
    generated = [generated_blocks(shape.gen_len, size) for _ in shape.prompt_lens]
    kv_sizes = [layer.attention.kv_size for layer in model_spec(config).decoders]
    return place_cache(kv_sizes, prompt, generated, policy)


class _Estimate:
    """Adds up the bytes that one plan needs in each tier."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        policy: Policy,
        shape: BlockShape,
        unified: bool,
        sizes: KernelSizes,
    ) -> None:
        self._config, self._policy, self._shape, self._unified = config, policy, shape, unified
        self._formats, self._sizes = policy.formats(dtype), sizes
        self._spec = model_spec(config)
        self._layers = self._spec.layers
        self._ahead = Ahead.of(policy)
        self._kv: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.bytes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self.buffers = 0

    def add_weights(self) -> None:
        tiers = place_weights(self._spec, self._formats.dtype, self._policy)
        for tensor in self._spec.tensors.values():
            self.bytes[tiers[tensor.key]] += self._formats.weight(tensor).nbytes
        ring = self._ring(tiers)
        self.bytes["host"] += ring
        self.buffers += ring
        if not self._unified:
            window = self._ahead.weight_copies + 1
            self.bytes["device"] += max(
                sum(
                    self._formats.weight(tensor).nbytes
                    for layer in layers
                    for tensor in layer.tensors
                    if tiers[tensor.key] != "device"
                )
                for layers in _windows(self._layers, window)
            )

    def _ring(self, tiers: Mapping[str, Tier]) -> int:
        """Returns the bytes of host buffers for reading weights from disk.

        Decoder layers need as many buffers of each shape as the look-ahead ever holds. The weights
        that are read of embedding and head stay while a block runs.
        """
        ends = {
            tensor.key: self._formats.weight(tensor).nbytes
            for layer in (self._spec.embedding, self._spec.head)
            for tensor in layer.tensors
            if tiers[tensor.key] == "disk"
        }
        most: Counter[Leaf] = Counter()
        for layers in _windows(self._spec.decoders, self._ahead.weight_reads + 1):
            tensors = (tensor for layer in layers for tensor in layer.tensors)
            on_disk = (t for t in tensors if tiers[t.key] == "disk")
            most |= Counter(leaf for t in on_disk for leaf in self._formats.weight(t).leaves)
        ring = sum(leaf.nbytes * count for leaf, count in most.items())
        return ring + sum(ends.values())

    def _kv_bytes(self, layer: int, batch: int, tokens: int) -> tuple[int, int]:
        """Returns the bytes of a KV block's keys and values when sealed, and when open."""
        rows, kind = self._shape.batch_sizes[batch], self._spec.alike[layer + 1]
        if (kind, rows, tokens) not in self._kv:
            shape = self._spec.layers[kind].attention.kv_shape(rows, tokens)
            sizes = (self._formats.kv_bytes(shape), self._formats.open_kv_bytes(shape))
            self._kv[kind, rows, tokens] = sizes
        return self._kv[kind, rows, tokens]

    def add_cache(self) -> None:
        if self._shape.gen_len < 2:
            return
        plan = plan_cache(self._config, self._policy, self._shape)
        away: Counter[tuple[int, int]] = Counter()
        read: defaultdict[tuple[int, int], Counter[tuple[int, int]]] = defaultdict(Counter)
        tails: dict[Tier, Counter[int]] = {tier: Counter() for tier in TIERS}
        pending: Counter[tuple[int, int]] = Counter()
        opened_most = copied = 0
        for key, home in plan.homes.items():
            length = plan.lengths(key.batch)[key.block]
            nbytes, opened_bytes = self._kv_bytes(key.layer, key.batch, length)
            where = (key.layer, key.batch)
            if not self._unified:
                away[where] += int(plan.moved(key) * nbytes)
            opened = key.block - len(plan.prompt[key.batch])
            is_apart = opened >= 0 and (home == "disk" or self._policy.cache_bits < 16)
            if is_apart:
                # While it is open, a block is on the host, or in full precision, or both.
                opened_most = max(opened_most, opened_bytes)
                tails["host" if home == "disk" else home][opened] += opened_bytes
            if is_apart and opened == len(plan.generated[key.batch]) - 1:
                continue  # a generation ends before its last block is full
            self.bytes[home] += nbytes
            if home == "host" and opened >= 0 and not is_apart and not self._unified:
                self.buffers += nbytes  # it begins as a pinned tail, which comes from the ring
            if home == "disk":
                rows = self._shape.batch_sizes[key.batch]
                read[where][rows, length] += nbytes
                if opened < 0:
                    pending[where] += nbytes
                    copied = max(copied, nbytes)
        largest: Counter[tuple[int, int]] = Counter()
        for counts in read.values():
            largest |= counts
        ring = self._ahead.cache_buffers * sum(largest.values())
        step = max(pending.values(), default=0)
        # Waiting data was copied from a step's results or, block by block, from pinned memory.
        waiting = (PENDING_WRITES + 1) * step + (step if self._unified else copied)
        # The prompts' blocks are written before the first of them is read back, unless batches come
        # one after the other. Without overlap, writes of generated blocks may wait beside the ring.
        in_turn = self._policy.order.prefills_first and self._policy.overlap
        self.bytes["host"] += max(ring, waiting) if in_turn else ring + waiting
        self.buffers += ring
        lengths = generated_blocks(self._shape.gen_len, self._policy.kv_block_tokens)
        for tier, opened_at in tails.items():
            # Pinned tails are ring buffers, which can be reused only for tails of equal length.
            is_ring = tier == "host" and not self._unified
            most: Counter[int] = Counter()
            for opened, nbytes in opened_at.items():
                most |= Counter({lengths[opened] if is_ring else 0: nbytes})
            self.bytes[tier] += sum(most.values())
            self.buffers += sum(most.values()) if is_ring else 0
        if not self._unified:
            copies = self._ahead.cache_copies + 1
            self.bytes["device"] += copies * (max(away.values(), default=0) + opened_most)

    def add_activations(self) -> None:
        batches = range(len(self._shape.batch_sizes))
        homes = place_activations(len(self._layers) - 1, len(batches), self._policy).homes
        dtype = self._formats.dtype
        sizes = [
            self._spec.hidden_bytes(rows, tokens, dtype)
            for rows, tokens in zip(self._shape.batch_sizes, self._shape.prompt_lens, strict=True)
        ]
        for tier in TIERS:
            at = [
                sum(sizes[k] for k in batches if tier in _either(homes, layer, k))
                for layer in range(len(self._layers) - 1)
            ]
            self.bytes[tier] += max(at)
        if "disk" in homes.values():
            count = self._ahead.hidden_reads + 1
            ring = sum(sorted(sizes)[-count:])
            self.bytes["host"] += ring + (PENDING_WRITES + 1) * max(sizes)
            self.buffers += ring
            # Hidden states of one token stay in RAM, beside buffers that held those of prompts.
            rows = sum(self._shape.batch_sizes)
            self.bytes["host"] += self._spec.hidden_bytes(rows, 1, dtype)
        if not self._unified and set(homes.values()) != {"device"}:
            self.bytes["device"] += (self._ahead.hidden_reads + 1) * max(sizes)

    def add_workspace(self) -> None:
        self.bytes["device"] += max(
            workspace_bytes(
                self._config, self._formats, self._sizes, rows, tokens, self._shape.head
            )
            for rows, tokens in zip(self._shape.batch_sizes, self._shape.prompt_lens, strict=True)
        )


def _windows(layers: Sequence[LayerSpec], count: int) -> list[list[LayerSpec]]:
    """Returns every run of `count` consecutive layers; the embedding follows the head."""
    return [
        [layers[(start + i) % len(layers)] for i in range(count)] for start in range(len(layers))
    ]


def _either(homes: Mapping[tuple[int, int], Tier], layer: int, batch: int) -> set[Tier]:
    """Returns the tiers where a batch's hidden states may be while its block is at a layer."""
    return {homes[layer, batch], homes[max(layer - 1, 0), batch]}


def workspace_bytes(
    config: ModelConfig,
    formats: Formats,
    sizes: KernelSizes,
    rows: int,
    tokens: int,
    head: Head = GREEDY,
) -> int:
    """Returns the bytes of temporaries and results of the largest computation.

    That is a layer's prefill of `rows` prompts of `tokens` tokens, or the head.
    """
    spec = model_spec(config)
    group = sizes.prefill_sequences(rows, tokens, formats.weight_bits)
    formed = min(sizes.scored_rows, group * tokens) if head == SCORE else rows
    logits = head.logit_copies * formed * config.vocab_size * 4
    return max(
        _unpacked_bytes(layer, formats, sizes, group * tokens)
        + max(_prefill_bytes(layer, spec, formats, sizes, rows, tokens), logits)
        for layer, _ in spec.decoder_kinds
    )


def _prefill_bytes(
    layer: LayerSpec, spec: ModelSpec, formats: Formats, sizes: KernelSizes, rows: int, tokens: int
) -> int:
    """Returns the bytes of a decoder layer's prefill of the sequences that go through together."""
    item, attention = DTYPES[formats.dtype], layer.attention
    group = sizes.prefill_sequences(rows, tokens, formats.weight_bits)
    count = group * tokens
    heads = sizes.scored_heads(group * attention.num_heads, tokens)
    scores = 2 * heads * tokens * tokens * 4
    mlp = count * layer.mlp_width * (4 + item)
    projected = 2 * attention.query_size + 2 * attention.kv_size
    attending = count * (attention.query_size * 4 + projected * item) + scores
    kept = spec.hidden_size * (4 + 3 * item) + 2 * attention.kv_size * item
    prefill = max(mlp, attending) + count * kept
    # Hidden states, keys and values of finished groups, twice if they have to be joined, and the
    # keys and values of the previous step, which are passed on while this one runs.
    if group < rows:
        made, new = spec.hidden_size, 2 * attention.kv_size
        parts = made + 2 * new if rows % group == 0 else 2 * (made + new) + new
        prefill += rows * tokens * parts * item
    return prefill


def _unpacked_bytes(layer: LayerSpec, formats: Formats, sizes: KernelSizes, rows: int) -> int:
    """Returns the bytes that are unpacked of a decoder layer's kernels, for products of `rows`."""
    unpacked = 0
    largest = max(tensor.size for tensor in layer.large) * DTYPES[formats.dtype]
    if formats.weight_bits < 16:
        part = sizes.unpacked_bytes(rows, layer.mlp_width)
        unpacked = max(sizes.part_bytes, min(largest, part))
    if formats.matmul_bits == 8:  # a kernel's integers, and the product of outliers
        unpacked = max(unpacked, 2 * largest) + rows * layer.mlp_width * 4
    return unpacked


def _estimated(
    config: ModelConfig,
    dtype: str,
    policy: Policy,
    shape: BlockShape,
    unified: bool,
    sizes: KernelSizes,
) -> _Estimate:
    estimate = _Estimate(config, dtype, policy, shape, unified, sizes)
    estimate.add_weights()
    estimate.add_cache()
    estimate.add_activations()
    estimate.add_workspace()
    return estimate


def peak_bytes(
    config: ModelConfig,
    dtype: str,
    policy: Policy,
    shape: BlockShape,
    unified: bool,
    sizes: KernelSizes,
) -> dict[Tier, int]:
    """Returns the most bytes that a block of batches needs in each tier at any moment.

    unified: host and device are one RAM, and nothing is copied between them; sizes: those of the
        kernels that will compute.
    """
    return _estimated(config, dtype, policy, shape, unified, sizes).bytes


def buffer_bytes(
    config: ModelConfig,
    dtype: str,
    policy: Policy,
    shape: BlockShape,
    unified: bool,
    sizes: KernelSizes,
) -> int:
    """Returns the part of the host's `peak_bytes` that is for reusable buffers."""
    return _estimated(config, dtype, policy, shape, unified, sizes).buffers
