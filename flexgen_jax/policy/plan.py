"""The plan of a run: everything independent of the admitted batches.

A batch's state and its place are in `running.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import NamedTuple

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.formats.format import Leaf
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.parts import StateLeaf
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.parts import Divider, Layout, WeightsPart
from flexgen_jax.policy.placement import Homes, Placer, place_weights
from flexgen_jax.policy.policy import (
    TIERS,
    Ahead,
    Policy,
    Tier,
    generated_blocks,
    growing_blocks,
    prompt_blocks,
    prompt_chunks,
)
from flexgen_jax.policy.segments import Segment, segments_of
from flexgen_jax.policy.shapes import BatchShape, BlockShape, Setting


class Blocks(NamedTuple):
    """Token counts of a batch's KV blocks: those of its prompt, and of generated tokens."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return self.prompt + self.generated


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """A policy for a model on a machine, and what follows for everything but single batches."""

    setting: Setting
    policy: Policy
    # The largest group of batches, which a plan starts with.
    shape: BlockShape

    @property
    def config(self) -> ModelConfig:
        return self.setting.config

    @property
    def dtype(self) -> str:
        return self.setting.dtype

    @property
    def unified(self) -> bool:
        return self.setting.unified

    @cached_property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)

    @cached_property
    def formats(self) -> Formats:
        return self.policy.formats(self.dtype)

    @cached_property
    def ahead(self) -> Ahead:
        return Ahead.of(self.policy)

    # Batches

    def chunks(self, batch: BatchShape) -> tuple[int, ...]:
        """Returns the token counts of the chunks of a batch's prompts; prompts that are scored are
        not cut."""
        if batch.scores_prompt:
            return (batch.prompt_len,)
        return prompt_chunks(batch.prompt_len, self.policy.prefill_chunk)

    def blocks(self, batch: BatchShape) -> Blocks:
        """Returns the token counts of a batch's KV blocks."""
        size, chunks = self.policy.kv_block_tokens, self.chunks(batch)
        # In one RAM it makes no difference to memory how long the open block is.
        is_in_ram = self.unified and self.policy.cache_bits == 16 and not self.policy.cache.disk
        cut = growing_blocks if is_in_ram else generated_blocks
        # Large blocks suit the products of chunks, and long prompts then have few of them.
        is_whole = len(chunks) == 1 and not self.shape.prefix
        prompt = prompt_blocks(batch.prompt_len, size) if is_whole else chunks
        return Blocks(prompt, cut(batch.gen_len, size))

    def segments(self, batch: BatchShape, padding: Sequence[int]) -> tuple[Segment, ...]:
        """Returns the segments of a batch's prompts, () if computed as a whole, as chunks are;
        padding: the tokens before each row's prompt."""
        if len(self.chunks(batch)) > 1 or self.shape.prefix or not self.spec.all_attend:
            return ()
        sizes = self.setting.sizes
        multiplied = sum(layer.large_size for layer in self.spec.decoders if not layer.experts)
        worth = sizes.worth_compiling // max(1, multiplied)
        together = sizes.prefill_sequences(batch.rows, batch.prompt_len, self.formats.weight_bits)
        return segments_of(padding, worth, together)

    @cached_property
    def entries(self) -> tuple[tuple[tuple[BatchShape, ...], bool], ...]:
        """The batches of `shape` as they enter, and whether no others go on then: prefixes first,
        then all other batches together, or one by one if the schedule requires it."""
        order, prefixes = self.policy.order, self.shape.prefix_batches
        batches = self.shape.batches
        groups = [(batch,) for batch in batches] if order.a_wave == 1 else [batches]
        entries = [(group, not n or order.waits) for n, group in enumerate(groups)]
        return ((prefixes, True), *entries) if prefixes else tuple(entries)

    @cached_property
    def block_homes(self) -> tuple[Homes, ...]:
        """The homes of the batches of `entries`, in order."""
        placer, homes = Placer(self.spec, self.policy), list[Homes]()
        for batches, is_first in self.entries:
            homes += placer.enter([self.blocks(batch).all for batch in batches], is_first)
        return tuple(homes)

    def only_caches(self, token: int, layer: int) -> bool:
        """Returns whether only the layer's state of a step is needed: in the model's last
        decoder layer, of a chunk that others follow."""
        return token < 0 and layer == self.spec.last_decoder and self.config.has_head

    @property
    def unpacks(self) -> bool:
        """Whether a layer's weights are unpacked once for all batches."""
        is_dense = not self.config.has_experts  # of many experts, all would take too much memory
        sizes, batches = self.setting.sizes, len(self.shape.batch_sizes)
        return is_dense and self.policy.unpacks(sizes, batches)

    @cached_property
    def is_resident(self) -> bool:
        """Whether everything lies where it is computed with, so that nothing is ever loaded."""
        policy = self.policy
        if self.unified:
            return not policy.uses_disk
        return all(p.device == 1 for p in (policy.weights, policy.cache, policy.activations))

    # Weights

    @cached_property
    def host_experts(self) -> float:
        """The share of the chosen experts that the CPU computes; see `Policy.host_experts`."""
        return 0.0 if self.unified else self.policy.host_experts or 0.0

    @cached_property
    def expert_cache_bytes(self) -> int:
        """Bytes on the device for copied experts; see `Policy.expert_cache_bytes`."""
        return 0 if self.unified else self.policy.expert_cache_bytes

    @cached_property
    def tiers(self) -> dict[str, Tier]:
        """The home of every tensor, by key."""
        return place_weights(self.spec, self.dtype, self.policy)

    @cached_property
    def weights_held(self) -> dict[Tier, int]:
        """Bytes of all weights in their homes, by tier."""
        held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for tensor in self.spec.tensors.values():
            nbytes = self.formats.weight(tensor).nbytes
            held[self.tiers[tensor.key]] += nbytes
            held["host"] += nbytes * (tensor.has_host_copy and not self.unified)
        return held

    @cached_property
    def parts(self) -> tuple[tuple[WeightsPart, ...], ...]:
        """The parts of every layer's weights."""
        return tuple(self._divider.parts(layer) for layer in self.spec.layers)

    def experts(self, layer: int) -> dict[int, WeightsPart]:
        """Returns the experts of a layer that have to be loaded, each as a part, by number."""
        return self._divider.experts(self.spec.layers[layer])

    @cached_property
    def _divider(self) -> Divider:
        return Divider(self.formats, self.tiers, self.unified, self.layouts.buffer)

    @cached_property
    def layouts(self) -> Layouts:
        """Sizes of KV blocks, and layouts of host buffers."""
        return Layouts(self)


class BlockSizes(NamedTuple):
    """Sizes of a layer's KV block when sealed, and when open (in full precision).

    Buffers have the leaves array by array, in the order of `LayerSpec.growing`.
    """

    sealed: int
    open: int
    # Bytes that go to the device for every token if the block's home is another tier.
    sealed_moves: int
    open_moves: int
    layout: Layout
    open_layout: Layout


class Layouts:
    """Sizes of a plan's KV blocks, and layouts of host buffers, each computed once."""

    def __init__(self, plan: BlockPlan) -> None:
        self._plan = plan
        self._blocks: dict[tuple[int, int, int], BlockSizes] = {}
        self._buffers: dict[tuple[Leaf, ...], Layout] = {}

    def moves(self, layer: LayerSpec, leaf: StateLeaf) -> bool:
        """Returns whether a layer's off-device cache moves to the device for every token:
        except keys and values, where a policy may leave both or the values on the host."""
        if not layer.attends:
            return True
        policy = self._plan.policy
        return not (policy.values_stay if leaf.name == "value" else policy.attends_on_host)

    def of_block(self, layer: LayerSpec, rows: int, tokens: int) -> BlockSizes:
        """Returns the sizes of a layer's KV block; layers of equal shapes share it."""
        key = (self._plan.spec.alike[layer.index], rows, tokens)
        sizes = self._blocks.get(key)
        if sizes is None:
            sizes = self._blocks[key] = self._sizes_of(layer, rows, tokens)
        return sizes

    def _sizes_of(self, layer: LayerSpec, rows: int, tokens: int) -> BlockSizes:
        sealed = [self._plan.formats.sealed(leaf, rows, tokens) for leaf in layer.growing]
        opened = [self._plan.formats.plain(leaf, rows, tokens) for leaf in layer.growing]
        moves = [not self._plan.unified and self.moves(layer, leaf) for leaf in layer.growing]
        return BlockSizes(
            sealed=sum(storage.nbytes for storage in sealed),
            open=sum(storage.nbytes for storage in opened),
            sealed_moves=sum(storage.nbytes for storage in compress(sealed, moves)),
            open_moves=sum(storage.nbytes for storage in compress(opened, moves)),
            layout=self.buffer(sealed),
            open_layout=self.buffer(opened),
        )

    def buffer(self, arrays: Sequence[Storage]) -> Layout:
        """Returns the layout of a buffer for some arrays; there is one object for equal arrays."""
        leaves = tuple(leaf for storage in arrays for leaf in storage.leaves)
        if leaves not in self._buffers:
            self._buffers[leaves] = Layout(leaves, sum(storage.nbytes for storage in arrays))
        return self._buffers[leaves]
