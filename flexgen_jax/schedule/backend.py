"""The loop's interface to its environment: a backend that carries out its decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from flexgen_jax.policy.parts import Layout, WeightsPart
from flexgen_jax.schedule.passes import Begun, Handle
from flexgen_jax.schedule.running import (
    CachedPart,
    LayerState,
    PromptPart,
    ReplacedPart,
    SealedPart,
)
from flexgen_jax.schedule.waves import Step

Part = WeightsPart | CachedPart | ReplacedPart
"""What a load brings to the device."""


class ExpertLoads(NamedTuple):
    """The loads of chosen experts that are not on the device."""

    # Of those that are computed on the device, with their copies under way.
    copied: Sequence[Handle]
    # Of those that the CPU computes where they lie, once they are read.
    on_host: Sequence[Handle]


class ChosenExperts(NamedTuple):
    """Experts that are loaded when it is known which are chosen."""

    # Starts loads of those with these numbers, those that most tokens chose first, then of those
    # that the next layer is guessed to choose; returns the loads of the former.
    load: Callable[[Sequence[int], Collection[int]], ExpertLoads]
    # Whether the next layer's are loaded so, too, from disk, so that a guess helps.
    guesses: bool
    # Whether the CPU computes some of them.
    uses_host: bool
    # Numbers of the experts that are not on the device, of this layer and, if it is guessed, of the
    # next.
    away: Collection[int]
    guessable: Collection[int]
    # How many the tokens of this visit can choose, up to this step's, and how many they are
    # expected to, of `total`.
    most: int
    expected: int
    total: int


class Inputs(NamedTuple):
    """The loads that a step computes with."""

    # One for each part of the layer.
    weights: Sequence[Handle]
    # The KV blocks of each prefix that the batch's rows share.
    prefixes: Sequence[Handle] = ()
    # None for the embedding.
    hidden: Handle = None
    # The KV blocks of earlier tokens, None if there are none, or the layer has no use for them.
    cache: Handle = None
    # The layer's recurrent state, None at the first token or without a state.
    replaced: Handle = None
    # The next step and its hidden states, whose query may be computed while the CPU attends for
    # this step, or None.
    early: tuple[Step, Handle] | None = None
    # None if all experts are among the weights.
    experts: ChosenExperts | None = None

    @property
    def of_visit(self) -> list[Handle]:
        """The loads that all batches of the visit use."""
        return [*self.weights, *self.prefixes]


class Backend(Protocol):
    """Moves and computes what a `BlockLoop` decides. Only `finish`, `wait`, `copy`, `wait_read`,
    `drop` and `quantize` wait for anything, and `compute` for the CPU's part of a step.

    `Running`, `LayerState` and `ReplacedSlot` have a payload for the backend's data of a batch;
    callbacks in `Running.closing` free it.
    """

    def begin(self, step: Step, times: int) -> Begun:
        """Marks the start of a step that represents `tokens` tokens. Of a pass with guesses, the
        answer counts that the embedding's step gets."""

    def allocate(self, layout: Layout) -> Handle:
        """Makes a host buffer."""

    def fetch(self, part: Part, buffers: Sequence[Handle], like: Handle = None) -> Handle:
        """Collects a part, reading its arrays on disk into `buffers`; like: an earlier load of
        the part, whose buffers have it already, or will when they are read."""

    def copy(self, load: Handle) -> None:
        """Waits for a load's reads, and starts its copy to the device."""

    def wait_read(self, load: Handle) -> None:
        """Waits for the reads of a load that is not copied: the CPU computes with it."""

    def detach(self, load: Handle) -> None:
        """Forgets the buffers of a load whose copy stays on the device."""

    def drop(self, load: Handle, is_used: bool) -> None:
        """Ends a load and frees its copy; if no step used it, waits for running transfers."""

    def compute(self, step: Step, inputs: Inputs) -> Handle:
        """Dispatches a step; returns its future results."""

    def finish(self, step: Step, computed: Handle) -> int | None:
        """Waits for a step; returns how many rows of its batch need more tokens, None for all."""

    def shrink(self, step: Step, rows: int) -> None:
        """Leaves a batch with as few rows as `rows`, from its step in the embedding on."""

    def shrink_state(self, state: LayerState, cache: Handle, replaced: Handle) -> None:
        """Reduces a layer's state, and its loads, to the given rows. KV blocks of the disk
        are then in memory, until they are written again."""

    def keep(self, made: ReplacedPart | PromptPart | LayerState, computed: Handle) -> None:
        """Stores a step's results in their home's memory (on the host for disk): a recurrent state,
        the sealed KV blocks of a prompt, or one token for a layer's open block.

        computed: None for the KV blocks of a prefix that is stored, which come from there."""

    def open_block(self, state: LayerState, buffer: Handle | None) -> None:
        """Makes an empty KV block, number `state.sealed`, in a host buffer if there is one."""

    def quantize(self, state: LayerState, block: int) -> None:
        """Quantizes a full block; its memory in full precision is then free. Waits where the CPU
        writes to that."""

    def write(self, part: ReplacedPart | SealedPart) -> Handle:
        """Starts writing to disk: a recurrent state, whose memory `wait` frees, or sealed blocks,
        from a separate copy whose memory is free."""

    def is_done(self, handle: Handle) -> bool:
        """Returns whether a load's reads, or a write, have finished."""

    def wait(self, write: Handle) -> None:
        """Waits for a write."""
