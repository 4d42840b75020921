"""The plan of one block of batches: what lies where, and how many bytes it has there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec import Formats, LayerSpec, ModelSpec, TensorSpec, model_spec
from flexgen_jax.models.storage import Leaf, Storage
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.placement import (
    ActivationPlan,
    CacheKey,
    CachePlan,
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
    growing_blocks,
    prompt_blocks,
    prompt_chunks,
)
from flexgen_jax.policy.schedule import PREFIX, Step
from flexgen_jax.policy.segments import Segment, segments_of


@dataclass(frozen=True)
class BatchShape:
    """One batch: its rows, its padded prompt length, and the most tokens that a row generates.

    scores_prompt: whether the head scores all tokens of the prompts.
    """

    rows: int
    prompt_len: int
    gen_len: int
    scores_prompt: bool = False


@dataclass(frozen=True)
class BlockShape:
    """Batches that enter together: rows and padded prompt length of each, and tokens to generate.

    scored: the batches whose prompts the head scores; None for all, if it scores one token, as in
    `Workload.scores_prompts`. prefix: the number of tokens before all prompts, which they share.
    """

    batch_sizes: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    gen_len: int
    head: Head = GREEDY
    scored: tuple[int, ...] | None = None
    prefix: int = 0

    @property
    def batches(self) -> tuple[BatchShape, ...]:
        """The batches, one by one."""
        pairs = zip(self.batch_sizes, self.prompt_lens, strict=True)
        return tuple(
            BatchShape(rows, tokens, self.gen_len, self._scores_prompt(batch))
            for batch, (rows, tokens) in enumerate(pairs)
        )

    def _scores_prompt(self, batch: int) -> bool:
        if self.scored is None:
            return self.head == SCORE and self.gen_len == 1
        return batch in self.scored

    @classmethod
    def of(cls, policy: Policy, workload: Workload) -> BlockShape:
        """Returns the largest block that the policy makes of a workload of equal prompts."""
        batches = min(policy.num_batches, -(-workload.num_sequences // policy.batch_size))
        rows = min(policy.batch_size, -(-workload.num_sequences // batches))
        prompts = (workload.prompt_len,) * batches
        how = (workload.gen_len, workload.head, None, workload.prefix_len)
        return cls((rows,) * batches, prompts, *how)


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
    tensor of the embedding and the head is a part of its own, because both may have the same table;
    such a part `is_kept`: what is read of it stays in host buffers while the block runs.

    layer: the first layer that has the part; keys: of its tensors; layouts: of the host buffers
    into which it is read from disk; copied: bytes of the device that a copy of it takes; expert:
    the number of the expert that the part is, which need not be loaded if nobody chooses it.
    """

    layer: int
    keys: tuple[str, ...]
    is_kept: bool
    layouts: tuple[Layout, ...]
    copied: int
    expert: int | None = None


class CachedPart(NamedTuple):
    """The KV cache of one decoder layer and batch, as a step finds it.

    sealed: number of sealed KV blocks; layouts, copied: as in `WeightsPart`; asks_host: whether
    the CPU attends to some of the blocks; is_prompt: whether a chunk of the prompt attends to them,
    for which all go to the device and none is open.
    """

    layer: int
    batch: int
    sealed: int
    layouts: tuple[Layout, ...]
    copied: int
    asks_host: bool
    is_prompt: bool = False


class Span(NamedTuple):
    """The tokens of a step: the index of the first one in the batch's padded sequences, and their
    number."""

    start: int
    tokens: int


class BlockSizes(NamedTuple):
    """Bytes of a KV block when it is sealed and while it is open, in full precision, and the
    layouts of buffers for it in both states."""

    sealed: int
    open: int
    layout: Layout
    open_layout: Layout


class PromptPart(NamedTuple):
    """The KV blocks that a layer makes of a prompt, or of a chunk of it: their bytes by home, and
    those whose home is the disk."""

    keys: list[CacheKey]
    held: dict[Tier, int]
    on_disk: list[CacheKey]


class HiddenPart(NamedTuple):
    """The hidden states that a layer made of a batch's tokens.

    home, nbytes: their tier and bytes; layouts, copied: as in `WeightsPart`.
    """

    layer: int
    batch: int
    home: Tier
    nbytes: int
    layouts: tuple[Layout, ...]
    copied: int


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Homes and bytes of everything that the batches need which are there.

    shape: the largest batches that are there together, with which a plan begins; unified: host and
        device are one RAM, and nothing is copied between them; sizes: those of the kernels that
        will compute.
    """

    config: ModelConfig
    dtype: str
    policy: Policy
    shape: BlockShape
    unified: bool
    sizes: KernelSizes

    @cached_property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)

    @cached_property
    def formats(self) -> Formats:
        return self.policy.formats(self.dtype)

    @cached_property
    def ahead(self) -> Ahead:
        return Ahead.of(self.policy)

    @cached_property
    def batches(self) -> dict[int, BatchShape]:
        """The batches that are there, by number."""
        return self.prefix_batch | dict(enumerate(self.shape.batches))

    @property
    def prefix_batch(self) -> dict[int, BatchShape]:
        """The prefix as a batch of one row, if there is one."""
        tokens = self.shape.prefix
        return {PREFIX: BatchShape(1, tokens, gen_len=1)} if tokens else {}

    def emptied(self) -> BlockPlan:
        """Returns this plan without any batch."""
        found = replace(self)
        found.batches.clear()
        return found

    def enter(self, batches: Mapping[int, BatchShape], is_first: bool) -> None:
        """Adds batches that enter together, under new numbers; is_first: whether no others go
        on."""
        blocks = {number: self._blocks(batch) for number, batch in batches.items()}
        self.cache.enter(blocks, is_first)
        self.waiting.enter(batches, is_first)
        self.batches.update(batches)

    def shrink(self, batch: int, rows: int) -> None:
        """Leaves a batch with fewer rows; the homes of what it has stay."""
        self.batches[batch] = replace(self.batches[batch], rows=rows)
        self._forget(batch)

    def leave(self, batch: int) -> None:
        """Forgets a batch."""
        del self.batches[batch]
        self.cache.leave(batch)
        self.waiting.leave(batch)
        self._forget(batch)

    def _forget(self, batch: int) -> None:
        """Removes the sizes that are known of a batch."""
        known: tuple[dict[Any, Any], ...]
        known = (self._known_sizes, self._cached_parts, self._earlier_parts, self._hidden_parts)
        for found in known:
            _remove(found, batch)

    def chunks(self, batch: BatchShape) -> tuple[int, ...]:
        """Returns the token counts of the chunks of a batch's prompts; prompts that are scored are
        not cut."""
        if batch.scores_prompt:
            return (batch.prompt_len,)
        return prompt_chunks(batch.prompt_len, self.policy.prefill_chunk)

    def segments(self, batch: int, padding: Sequence[int]) -> tuple[Segment, ...]:
        """Returns the segments in which a batch's prompts are computed, () if as a whole, as chunks
        are; padding: the tokens before each row's prompt."""
        shape = self.batches[batch]
        if len(self.chunks(shape)) > 1 or self.shape.prefix:
            return ()
        multiplied = sum(layer.large_size for layer in self.spec.decoders if not layer.experts)
        worth = self.sizes.worth_compiling // max(1, multiplied)
        how = (shape.rows, shape.prompt_len, self.formats.weight_bits)
        return segments_of(padding, worth, self.sizes.prefill_sequences(*how))

    def tokens(self, batch: int) -> range:
        """Returns the tokens of a batch's steps; see `Step`."""
        shape = self.batches[batch]
        chunks = len(self.chunks(shape))
        return range(-chunks, 0) if batch == PREFIX else range(1 - chunks, shape.gen_len)

    def span(self, token: int, batch: int) -> Span:
        """Returns what a step computes of its batch's sequences."""
        shape = self.batches[batch]
        if token > 0:
            return Span(shape.prompt_len + token - 1, 1)
        chunks, index = self.chunks(shape), token - self.tokens(batch).start
        return Span(sum(chunks[:index]), chunks[index])

    def only_caches(self, token: int, layer: int) -> bool:
        """Returns whether of a step only keys and values are needed: in the model's last decoder
        layer, of a chunk that others follow."""
        return token < 0 and layer == len(self.spec.layers) - 2 and self.config.has_head

    def takes_cache(self, token: int, layer: int, batch: int) -> bool:
        """Returns whether a step attends to KV blocks that earlier ones have made."""
        if self.spec.layers[layer].kind != "decoder" or self.only_caches(token, layer):
            return False
        return self.span(token, batch).start > 0

    def prefix_part(self, step: Step) -> CachedPart | None:
        """Returns the prefix's KV cache, if a step's batch attends to it: it is moved once for all
        batches of a visit."""
        layer = step.layer - 1
        if PREFIX not in self.batches or step.batch == PREFIX:
            return None
        if self.spec.layers[step.layer].kind != "decoder":
            return None
        return self.earlier(layer, PREFIX, len(self.cache.prompt[PREFIX]))

    def loads_chosen(self, layer: int, rows: int) -> bool:
        """Returns whether of a layer's experts only the chosen ones are loaded, for one token of so
        many sequences."""
        return few_are_chosen(self.spec.layers[layer], rows)

    def _blocks(self, batch: BatchShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        size, chunks = self.policy.kv_block_tokens, self.chunks(batch)
        # In one RAM it makes no difference to memory how long the open block is.
        is_in_ram = self.unified and self.policy.cache_bits == 16 and not self.policy.cache.disk
        cut = growing_blocks if is_in_ram else generated_blocks
        # Large blocks suit the products of chunks, and long prompts then have few of them.
        is_whole = len(chunks) == 1 and not self.shape.prefix
        prompt = prompt_blocks(batch.prompt_len, size) if is_whole else chunks
        return prompt, cut(batch.gen_len, size)

    @property
    def unpacks(self) -> bool:
        """Whether a layer's weights are unpacked once for all batches."""
        is_dense = not self.config.has_experts  # of many experts, all would take too much memory
        return is_dense and self.policy.unpacks(self.sizes, len(self.shape.batch_sizes))

    @cached_property
    def is_resident(self) -> bool:
        """Whether everything lies where it is computed with, so that nothing is ever loaded."""
        policy = self.policy
        if self.unified:
            return not policy.uses_disk
        return all(p.device == 1 for p in (policy.weights, policy.cache, policy.activations))

    @cached_property
    def tiers(self) -> dict[str, Tier]:
        """The home of every tensor, by key."""
        return place_weights(self.spec, self.dtype, self.policy)

    @cached_property
    def cache(self) -> CachePlan:
        """The homes of all KV blocks."""
        kv_sizes = [layer.attention.kv_size for layer in self.spec.decoders]
        found = CachePlan(kv_sizes, self.policy)
        for batches, is_first in self._entering:
            blocks = {number: self._blocks(batch) for number, batch in batches.items()}
            found.enter(blocks, is_first)
        return found

    @cached_property
    def waiting(self) -> ActivationPlan:
        """The homes of hidden states."""
        found = ActivationPlan(len(self.spec.layers) - 1, self.policy)
        for batches, is_first in self._entering:
            found.enter(batches, is_first)
        return found

    @property
    def _entering(self) -> list[tuple[dict[int, BatchShape], bool]]:
        """The batches that a plan begins with, as they enter, and whether no others go on then: the
        prefix, then the others together, or one by one where the schedule says so."""
        order, prefix = self.policy.order, self.prefix_batch
        others = {number: batch for number, batch in self.batches.items() if number != PREFIX}
        groups = [{number: batch} for number, batch in others.items()]
        if order.a_wave != 1:
            groups = [others] if others else []
        found = [(batches, not n or order.waits) for n, batches in enumerate(groups)]
        return (
            [(prefix, True), *found] if prefix.keys() <= self.batches.keys() and prefix else found
        )

    # Weights

    @cached_property
    def weights_held(self) -> dict[Tier, int]:
        """Bytes of all weights in their homes, by tier."""
        held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for tensor in self.spec.tensors.values():
            held[self.tiers[tensor.key]] += self.formats.weight(tensor).nbytes
        return held

    @cached_property
    def parts(self) -> tuple[tuple[WeightsPart, ...], ...]:
        """The parts of every layer's weights."""
        found: dict[tuple[str, ...], WeightsPart] = {}
        return tuple(
            tuple(self._part(layer, tensors, found) for tensors in self._divided(layer))
            for layer in self.spec.layers
        )

    def _divided(self, layer: LayerSpec) -> Iterable[tuple[TensorSpec, ...]]:
        away = {t.key for t in layer.tensors if self.tiers[t.key] != "device"}
        moves = set() if self.unified else away
        is_decoder = layer.kind == "decoder"
        experts: dict[int, list[TensorSpec]] = {}
        together: list[TensorSpec] = []
        others: list[TensorSpec] = []
        for tensor in layer.tensors:
            if tensor.expert is not None and tensor.key in away:
                experts.setdefault(tensor.expert, []).append(tensor)
            else:
                (together if is_decoder and tensor.key not in moves else others).append(tensor)
        if together:
            yield tuple(together)
        yield from ((tensor,) for tensor in others)
        yield from (tuple(tensors) for tensors in experts.values())

    def _part(
        self,
        layer: LayerSpec,
        tensors: tuple[TensorSpec, ...],
        found: dict[tuple[str, ...], WeightsPart],
    ) -> WeightsPart:
        keys = tuple(tensor.key for tensor in tensors)
        if keys not in found:
            away = [tensor for tensor in tensors if self.tiers[tensor.key] != "device"]
            kept = [self.formats.weight(tensor) for tensor in away]
            on_disk = [
                self.layout(storage)
                for tensor, storage in zip(away, kept, strict=True)
                if self.tiers[tensor.key] == "disk"
            ]
            copied = 0 if self.unified else sum(storage.nbytes for storage in kept)
            is_kept = layer.kind != "decoder"
            found[keys] = WeightsPart(
                layer.index, keys, is_kept, tuple(on_disk), copied, tensors[0].expert
            )
        return found[keys]

    # The KV cache

    def kv_storage(self, key: CacheKey, rows: int) -> Storage:
        """Returns how a sealed block's keys, or its values, are kept, with so many rows."""
        attention = self.spec.decoders[key.layer].attention
        return self.formats.kv(attention.kv_shape(rows, self.block_tokens(key)))

    def kv_layout(self, key: CacheKey) -> Layout:
        """Returns the layout of a host buffer of a sealed block: its keys, then its values."""
        return self._block_sizes(key).layout

    def kv_bytes(self, key: CacheKey) -> int:
        """Returns the bytes of a sealed block's keys and values together."""
        return self._block_sizes(key).sealed

    def open_kv_bytes(self, key: CacheKey) -> int:
        """Returns the bytes of a block's keys and values while it is open, in full precision."""
        return self._block_sizes(key).open

    def open_layout(self, key: CacheKey) -> Layout:
        """Returns the layout of the host buffer of an open block: its keys, then its values."""
        return self._block_sizes(key).open_layout

    def first_buffers(self, batch: int) -> dict[int, Layout]:
        """Returns the buffers of a batch's first open blocks in pinned memory, by layer.

        They are made when the batch enters: new pinned memory, for each layer, would hold up the
        prefill.
        """
        first = len(self.cache.prompt[batch])
        layers = range(len(self.spec.decoders) if self.cache.generated[batch] else 0)
        keys = [CacheKey(layer, batch, first) for layer in layers if not self.unified]
        away = [key for key in keys if self.cache.homes[key] != "device"]
        return {key.layer: self.open_layout(key) for key in away}

    def appends(self, key: CacheKey) -> bool:
        """Returns whether the program of a decode step can write to an open block itself, if it
        has the whole cache: not to pinned memory, nor where the CPU writes faster."""
        return not self.unified and self.cache.homes[key] == "device"

    def block_tokens(self, key: CacheKey) -> int:
        return self.cache.lengths(key.batch)[key.block]

    def _block_sizes(self, key: CacheKey) -> BlockSizes:
        return self._sizes_of(key.layer, key.batch)[key.block]

    @cached_property
    def _known_sizes(self) -> dict[tuple[int, int], list[BlockSizes]]:
        return {}

    def _sizes_of(self, layer: int, batch: int) -> list[BlockSizes]:
        """Returns the sizes of a layer's and batch's blocks; layers of equal shapes share them."""
        what = (self.spec.alike[layer + 1], batch)
        found = self._known_sizes.get(what)
        if found is None:
            rows, attention = self.batches[batch].rows, self.spec.decoders[layer].attention
            by_length = {}
            for tokens in set(self.cache.lengths(batch)):
                shape = attention.kv_shape(rows, tokens)
                by_length[tokens] = BlockSizes(
                    self.formats.kv_bytes(shape),
                    self.formats.open_kv_bytes(shape),
                    self.layout(self.formats.kv(shape), 2),
                    self.layout(Storage(shape, self.dtype), 2),
                )
            found = [by_length[tokens] for tokens in self.cache.lengths(batch)]
            self._known_sizes[what] = found
        return found

    def sealed(self, batch: int, tokens: int) -> int:
        """Returns the number of a batch's blocks that are full when `tokens` tokens are cached."""
        sealed = total = 0
        for length in self.cache.lengths(batch):
            total += length
            if total > tokens:
                break
            sealed += 1
        return sealed

    @cached_property
    def _cached_parts(self) -> dict[tuple[int, int], list[CachedPart]]:
        return {}

    def cached(self, layer: int, batch: int, sealed: int) -> CachedPart:
        """Returns the cache of a decoder layer and batch with `sealed` sealed blocks and an open
        one."""
        found = self._cached_parts.get((layer, batch))
        if found is None:
            found = self._cached_parts[layer, batch] = self._cached(layer, batch)
        return found[sealed - len(self.cache.prompt[batch])]

    def _cached(self, layer: int, batch: int) -> list[CachedPart]:
        """Returns the cache of a decoder layer and batch by the number of sealed blocks, from the
        time when all of the prompt's blocks are."""
        prompt = len(self.cache.prompt[batch])
        homes, share = self.cache.homes, 0.0 if self.unified else self.policy.moved_share
        parts: list[CachedPart] = []
        layouts: list[Layout] = []
        block = copied = 0
        asks_host = False
        for block, sizes in enumerate(self._sizes_of(layer, batch)):
            home = homes[CacheKey(layer, batch, block)]
            is_away = home != "device"
            asks_host = asks_host or (is_away and self.policy.values_stay)
            if block >= prompt:
                opened = copied + int(share * sizes.open) if is_away else copied
                parts.append(CachedPart(layer, batch, block, tuple(layouts), opened, asks_host))
            if is_away:
                copied += int(share * sizes.sealed)
            if home == "disk":
                layouts.append(sizes.layout)
        parts.append(CachedPart(layer, batch, block + 1, tuple(layouts), copied, asks_host))
        return parts

    @cached_property
    def _earlier_parts(self) -> dict[tuple[int, int], list[CachedPart]]:
        return {}

    def earlier(self, layer: int, batch: int, sealed: int) -> CachedPart:
        """Returns the cache of a decoder layer and batch for the next chunk of the prompt, with
        `sealed` blocks from those before it."""
        found = self._earlier_parts.get((layer, batch))
        if found is None:
            found = self._earlier_parts[layer, batch] = self._earlier(layer, batch)
        return found[sealed]

    def _earlier(self, layer: int, batch: int) -> list[CachedPart]:
        parts: list[CachedPart] = []
        layouts: list[Layout] = []
        block = copied = 0
        for block, sizes in enumerate(self._sizes_of(layer, batch)):
            parts.append(
                CachedPart(layer, batch, block, tuple(layouts), copied, False, is_prompt=True)
            )
            home = self.cache.homes[CacheKey(layer, batch, block)]
            copied += sizes.sealed if home != "device" and not self.unified else 0
            layouts += [sizes.layout] if home == "disk" else []
            if block + 1 == len(self.cache.prompt[batch]):
                break
        whole = (layer, batch, block + 1, tuple(layouts), copied, False)
        return [*parts, CachedPart(*whole, is_prompt=True)]

    def held(self, layer: int, batch: int, sealed: int) -> dict[Tier, int]:
        """Returns the bytes of a layer's and batch's KV blocks by home, with `sealed` sealed blocks
        and an open one, which is never on disk."""
        held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for block, sizes in enumerate(self._sizes_of(layer, batch)[: sealed + 1]):
            home = self.cache.homes[CacheKey(layer, batch, block)]
            if block < sealed:
                held[home] += sizes.sealed
            else:
                held["host" if home == "disk" else home] += sizes.open
        return held

    def prompt_blocks(self, token: int, batch: int) -> range:
        """Returns the numbers of the KV blocks that a prompt's step makes."""
        tokens, blocks = self.tokens(batch), len(self.cache.prompt[batch])
        if len(self.chunks(self.batches[batch])) == 1:
            return range(blocks)
        return range(token - tokens.start, token - tokens.start + 1)

    def prompt(self, token: int, layer: int, batch: int) -> PromptPart:
        """Returns what the KV blocks of a prompt's step take in a layer."""
        keys = [CacheKey(layer, batch, block) for block in self.prompt_blocks(token, batch)]
        held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for key in keys:
            held[self.cache.homes[key]] += self.kv_bytes(key)
        return PromptPart(keys, held, [key for key in keys if self.cache.homes[key] == "disk"])

    # Hidden states

    @cached_property
    def _hidden_parts(self) -> dict[tuple[int, int, int], HiddenPart]:
        return {}

    def hidden(self, token: int, layer: int, batch: int) -> HiddenPart:
        """Returns what the output of `layer` for a step's token takes."""
        what = (min(token, 1), layer, batch)
        found = self._hidden_parts.get(what)
        if found is None:
            found = self._hidden_parts[what] = self._hidden(token, layer, batch)
        return found

    def _hidden(self, token: int, layer: int, batch: int) -> HiddenPart:
        rows, is_one = self.batches[batch].rows, token > 0 or self.only_last(layer, batch)
        tokens = 1 if is_one else self.span(token, batch).tokens
        nbytes = self.spec.hidden_bytes(rows, tokens, self.dtype)
        home = self.waiting.home(tokens, layer, batch, nbytes)
        copied = 0 if self.unified or home == "device" else nbytes
        layouts: tuple[Layout, ...] = ()
        if home == "disk":
            storage = Storage(self.spec.hidden_shape(rows, tokens), self.dtype)
            layouts = (self.layout(storage),)
        return HiddenPart(layer, batch, home, nbytes, layouts, copied)

    def only_last(self, layer: int, batch: int) -> bool:
        """Returns whether, of a prompt, a layer's output is needed for the last token only."""
        is_last = layer == len(self.spec.layers) - 2 and self.config.has_head
        return is_last and not self.batches[batch].scores_prompt

    @cached_property
    def _layouts(self) -> dict[tuple[Leaf, ...], Layout]:
        return {}

    def layout(self, storage: Storage, count: int = 1) -> Layout:
        """Returns the layout of a buffer for `count` arrays that are kept alike."""
        leaves = storage.leaves * count
        if leaves not in self._layouts:
            self._layouts[leaves] = Layout(leaves, count * storage.nbytes)
        return self._layouts[leaves]


FEW_CHOSEN = 0.75
"""Up to this share of a layer's experts, expected to be chosen, loads wait for the choice; more are
better loaded ahead."""


def few_are_chosen(layer: LayerSpec, rows: int) -> bool:
    """Returns whether few of a layer's experts are expected to be chosen by so many tokens."""
    experts = layer.experts
    return experts is not None and layer.chosen_experts(rows) <= FEW_CHOSEN * experts.count


def _remove(known: dict[Any, Any], batch: int) -> None:
    """Removes what is known of a batch, the last part of the keys."""
    for what in [what for what in known if what[-1] == batch]:
        del known[what]
