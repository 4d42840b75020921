"""What a loop needs of the world: a backend that carries out its decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from flexgen_jax.policy.placement import CacheKey
from flexgen_jax.policy.plan import CachedPart, HiddenPart, Layout, WeightsPart
from flexgen_jax.policy.schedule import Step

Handle = Any
"""Whatever a backend makes; the loop only hands it back."""

Part = WeightsPart | CachedPart | HiddenPart
"""What a load brings to the device."""


class ChosenExperts(NamedTuple):
    """Experts that are loaded when it is known which are chosen.

    load: starts loads of those with these numbers, then of those that the next layer is guessed to
    choose, and returns the loads of the former, as far as they are not on the device; guesses:
    whether the next layer's are loaded so, too; most, expected: how many the tokens of this visit
    can choose, up to this step's, and how many they are expected to, of `total`.
    """

    load: Callable[[Collection[int], Collection[int]], Sequence[Handle]]
    guesses: bool
    most: int
    expected: int
    total: int


class Inputs(NamedTuple):
    """The loads that a step computes with.

    weights: one for each part of the layer, then one for the prefix's KV cache, if the step attends
    to it; hidden: None for the embedding; cache: None unless the step attends to earlier tokens;
    early: the next step and its hidden states, whose query may be computed while the CPU attends
    for this step, or None; experts: None if all of them are among the weights.
    """

    weights: Sequence[Handle]
    hidden: Handle = None
    cache: Handle = None
    early: tuple[Step, Handle] | None = None
    experts: ChosenExperts | None = None


class Backend(Protocol):
    """Moves and computes what a `BlockLoop` decides. Only `finish`, `wait`, `copy`, `drop` and
    `quantize` wait for anything."""

    def begin(self, step: Step, times: int) -> None:
        """What follows is done for a step, which stands for `times` steps like it."""

    def allocate(self, layout: Layout) -> Handle:
        """Returns a host buffer, into which disk reads can go."""

    def free(self, buffer: Handle) -> None:
        """Frees a host buffer before the block ends."""

    def fetch(self, part: Part, buffers: Sequence[Handle]) -> Handle:
        """Starts a load: gathers a part, and reads what of it is on disk into `buffers`."""

    def again(self, load: Handle) -> Handle:
        """Returns another load of what an earlier one has in its buffers, or is reading."""

    def copy(self, load: Handle) -> None:
        """Waits for a load's reads, and starts its copy to the device."""

    def drop(self, load: Handle, is_used: bool) -> None:
        """Ends a load and frees its copy; if no step used it, waits for what is under way."""

    def compute(self, step: Step, inputs: Inputs) -> Handle:
        """Dispatches a step; returns what it will have computed."""

    def finish(self, step: Step, computed: Handle) -> int | None:
        """Waits for a step; returns how many rows of its batch need more tokens, None for all."""

    def shrink(self, step: Step, rows: int) -> None:
        """Leaves a batch with as few rows as `rows`, from its step in the embedding on."""

    def shrink_cache(self, part: CachedPart, load: Handle) -> None:
        """Leaves these rows in a layer's KV blocks, and in a load of them. Those of the disk are
        then in memory, until they are written again."""

    def leave(self, batch: int) -> None:
        """Frees what a batch has that is done; steps that were dispatched before may still run."""

    def keep_hidden(self, part: HiddenPart, computed: Handle) -> None:
        """Keeps a step's hidden states in the memory of their home, for disk on the host."""

    def write_hidden(self, part: HiddenPart) -> Handle:
        """Starts writing kept hidden states to disk; `wait` on the write frees their memory."""

    def keep_prompt(self, keys: Sequence[CacheKey], computed: Handle) -> None:
        """Keeps the sealed KV blocks that a prompt's step made, each in the memory of its home, for
        disk on the host."""

    def open_block(self, key: CacheKey, buffer: Handle | None) -> None:
        """Makes an empty KV block, in a host buffer if there is one."""

    def append(self, key: CacheKey, computed: Handle) -> None:
        """Writes one token's keys and values to the open block."""

    def quantize(self, key: CacheKey) -> None:
        """Quantizes a full block; its memory in full precision is then free. Waits where the CPU
        writes to that."""

    def write_blocks(self, keys: Sequence[CacheKey]) -> Handle:
        """Starts writing sealed blocks to disk, from a copy of their own; frees the blocks."""

    def is_done(self, handle: Handle) -> bool:
        """Returns whether a load's reads, or a write, are done."""

    def wait(self, write: Handle) -> None:
        """Waits for a write."""
