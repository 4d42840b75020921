"""What a layer keeps of a batch between tokens, and the parts of it that are loaded and stored.

    prompt blocks          sealed blocks of generated tokens        open block
    [0 ... 127][128 ...]   [32 tokens][32 tokens]                   [x x x . . . .]

What grows with every token lies in KV blocks, each in the tier that is its home. A sealed block
never changes, wherever it is. What is replaced with every token lies in a `ReplacedSlot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.policy.parts import Layout
from flexgen_jax.policy.plan import BlockPlan, BlockSizes
from flexgen_jax.policy.policy import TIERS, Tier

if TYPE_CHECKING:
    from flexgen_jax.policy.running import Running

Handle = Any
"""Whatever a backend makes; the loop only hands it back."""


class Buffer(NamedTuple):
    """A host buffer, and its backend's handle."""

    layout: Layout
    handle: Handle


class CachedPart(NamedTuple):
    """The KV blocks of one layer and batch, as a step finds them."""

    state: LayerState
    # Number of sealed KV blocks.
    sealed: int
    # Of the host buffers into which blocks are read from disk.
    layouts: tuple[Layout, ...]
    # Bytes of the device that a copy takes.
    copied: int
    # Whether the CPU attends to some of the blocks.
    asks_host: bool
    # Whether a chunk of the prompt attends to them, for which all go to the device and none is
    # open.
    is_prompt: bool = False


class ReplacedPart(NamedTuple):
    """What a layer made of a batch's latest tokens, to be replaced with the next ones."""

    slot: ReplacedSlot
    # The layer that made it, counted with the embedding as 0.
    layer: int
    home: Tier
    nbytes: int
    # As in `CachedPart`.
    layouts: tuple[Layout, ...]
    copied: int


class PromptPart(NamedTuple):
    """The KV blocks that a layer makes of a prompt, or of a chunk of it."""

    state: LayerState
    blocks: range
    # Their bytes by home.
    held: dict[Tier, int]


class SealedPart(NamedTuple):
    """Some sealed KV blocks of a layer and batch whose home is the disk."""

    state: LayerState
    blocks: Sequence[int]


class BlocksAt(NamedTuple):
    """The KV blocks of one layer and batch whose values are in one place, device or host."""

    # Token counts of the sealed blocks.
    lengths: tuple[int, ...]
    # Token count of the open block, 0 if it is elsewhere.
    tail: int
    # The index of the first token of each of these blocks.
    starts: tuple[int, ...]


@dataclass(eq=False, repr=False, slots=True)
class ReplacedSlot:
    """Where an array is that a batch replaces with every token: its hidden states, or what a layer
    keeps."""

    running: Running
    content: Literal["activations", "cache"]
    part: ReplacedPart | None = None
    # The token that made what is there.
    token: int = 0
    is_on_disk: bool = False
    # A write to disk under way.
    write: Handle = None
    # The backend's.
    payload: Any = None


@dataclass(eq=False, repr=False, slots=True)
class LayerState:
    """What one decoder layer keeps of one batch."""

    running: Running
    layer: LayerSpec
    # Of its KV blocks, in the order of their age.
    homes: tuple[Tier, ...]
    # Of what it replaces with every token.
    replaced_home: Tier
    slot: ReplacedSlot
    # Cached tokens, and sealed blocks.
    tokens: int = 0
    sealed: int = 0
    # The number of tokens with which the open block is full.
    full_at: int = 0
    # The last token that is cached, as in `Step`; None before the prompt's first chunk is.
    until: int | None = None
    # What a step attends to.
    part: CachedPart | None = None
    # The host buffers of the first open block until it is opened, of the open block, and of sealed
    # blocks that stay in theirs.
    first: Buffer | None = None
    buffer: Buffer | None = None
    kept: list[Buffer] = field(default_factory=list)
    # A write of sealed blocks to disk under way, and the bytes of RAM that it reads.
    write: tuple[Handle, int] | None = None
    reserved: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    # The backend's.
    payload: Any = None
    _decoding: list[CachedPart] | None = None
    _prompting: list[CachedPart] | None = None
    _places: dict[int, tuple[BlocksAt, BlocksAt]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.layer.name} of {self.running}"

    @property
    def index(self) -> int:
        """The layer's index among the decoder layers, counted from 0."""
        return self.layer.index - 1

    @property
    def sizes(self) -> Sequence[BlockSizes]:
        """What each KV block takes."""
        return self.running.sizes_of(self.layer)

    def forget_sizes(self) -> None:
        """Forgets what follows from the batch's rows, which are fewer now."""
        self._decoding = self._prompting = None

    def stays_on_host(self, block: int) -> bool:
        """Returns whether decoding leaves a block's values on the host."""
        stays = self.layer.attends and self.running.plan.policy.values_stay
        return stays and self.homes[block] != "device"

    def appends(self, block: int) -> bool:
        """Returns whether the program of a decode step can write to an open block itself, if it
        has the whole cache: not to pinned memory, nor where the CPU writes faster."""
        return not self.running.plan.unified and self.homes[block] == "device"

    def cached(self, sealed: int) -> CachedPart:
        """Returns the blocks for a token after the prompt, `sealed` of them sealed and one open."""
        if self._decoding is None:
            self._decoding = self._decoding_parts()
        return self._decoding[sealed - len(self.running.blocks.prompt)]

    def _decoding_parts(self) -> list[CachedPart]:
        """Returns the parts by the number of sealed blocks, from the time when all of the prompt's
        blocks are."""
        parts: list[CachedPart] = []
        layouts: list[Layout] = []
        number = copied = 0
        asks_host = False
        for number, (home, sizes) in enumerate(zip(self.homes, self.sizes, strict=True)):
            is_away = home != "device"
            asks_host = asks_host or self.stays_on_host(number)
            if number >= len(self.running.blocks.prompt):
                opened = copied + (sizes.open_moves if is_away else 0)
                parts.append(CachedPart(self, number, tuple(layouts), opened, asks_host))
            copied += sizes.sealed_moves if is_away else 0
            if home == "disk":
                layouts.append(sizes.layout)
        parts.append(CachedPart(self, number + 1, tuple(layouts), copied, asks_host))
        return parts

    def earlier(self, sealed: int) -> CachedPart:
        """Returns the blocks for the next chunk of the prompt, `sealed` from those before it."""
        if self._prompting is None:
            self._prompting = self._prompt_parts()
        return self._prompting[sealed]

    def _prompt_parts(self) -> list[CachedPart]:
        """Returns the parts by the number of sealed blocks, for the chunks of the prompt."""
        parts = [CachedPart(self, 0, (), 0, asks_host=False, is_prompt=True)]
        layouts: list[Layout] = []
        copied, unified = 0, self.running.plan.unified
        for block in range(len(self.running.blocks.prompt)):
            home, sizes = self.homes[block], self.sizes[block]
            copied += sizes.sealed if home != "device" and not unified else 0
            layouts += [sizes.layout] if home == "disk" else []
            parts.append(
                CachedPart(self, block + 1, tuple(layouts), copied, asks_host=False, is_prompt=True)
            )
        return parts

    def held(self, sealed: int) -> dict[Tier, int]:
        """Returns the bytes of the blocks by home, with `sealed` sealed blocks and an open one,
        which is never on disk."""
        held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for block, sizes in enumerate(self.sizes[: sealed + 1]):
            home = self.homes[block]
            if block < sealed:
                held[home] += sizes.sealed
            else:
                held["host" if home == "disk" else home] += sizes.open
        return held

    def of_prompt(self, token: int) -> PromptPart:
        """Returns what the blocks of a prompt's step take."""
        blocks = self.running.prompt_blocks(token)
        held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for block in blocks:
            held[self.homes[block]] += self.sizes[block].sealed
        return PromptPart(self, blocks, held)

    def places(self, sealed: int) -> tuple[BlocksAt, BlocksAt]:
        """Returns the blocks to which decoding attends on the device, and those on the host, with
        `sealed` sealed blocks and an open one."""
        if sealed not in self._places:
            self._places[sealed] = (self._at(sealed, False), self._at(sealed, True))
        return self._places[sealed]

    def _at(self, sealed: int, on_host: bool) -> BlocksAt:
        lengths = self.running.lengths
        starts = (0, *accumulate(lengths))
        blocks = [n for n in range(sealed + 1) if n < len(lengths)]
        chosen = [block for block in blocks if self.stays_on_host(block) == on_host]
        return BlocksAt(
            lengths=tuple(lengths[block] for block in chosen if block < sealed),
            tail=lengths[sealed] if sealed in chosen else 0,
            starts=tuple(starts[block] for block in chosen),
        )

    def may_overwrite(self, token: int) -> bool:
        """Returns whether the program of a step may write to what the layer replaces: not to what a
        prefix left or to zeros, nor to a buffer that is read from disk, which others get later."""
        is_buffer = self.running.plan.unified and self.replaced_home == "disk"
        return token > 0 and not is_buffer

    def replaced(self) -> ReplacedPart:
        """Returns what the arrays take that the layer replaces with every token."""
        plan, rows = self.running.plan, self.running.shape.rows
        arrays = [plan.formats.plain(leaf, rows) for leaf in self.layer.replaced]
        return replaced_part(plan, self.slot, self.layer.index, self.replaced_home, arrays)


def replaced_part(
    plan: BlockPlan, slot: ReplacedSlot, layer: int, home: Tier, arrays: Sequence[Storage]
) -> ReplacedPart:
    nbytes = sum(storage.nbytes for storage in arrays)
    return ReplacedPart(
        slot=slot,
        layer=layer,
        home=home,
        nbytes=nbytes,
        layouts=(plan.layouts.buffer(arrays),) if home == "disk" else (),
        copied=0 if plan.unified or home == "device" else nbytes,
    )
