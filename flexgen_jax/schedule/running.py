"""Running batches, and their layers' states between tokens.

    prompt blocks          sealed blocks of generated tokens        open block
    [0 ... 127][128 ...]   [32 tokens][32 tokens]                   [x x x . . . .]

Growing arrays lie in KV blocks, each in its home tier. A sealed block
never changes, wherever it is. Recurrent states lie in a `ReplacedSlot`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.policy.parts import Layout
from flexgen_jax.policy.placement import home_of_hidden
from flexgen_jax.policy.plan import BlockPlan, Blocks, BlockSizes
from flexgen_jax.policy.policy import TIERS, Tier
from flexgen_jax.policy.shapes import BatchShape, Span
from flexgen_jax.policy.sharing import Shared
from flexgen_jax.schedule.passes import BlocksAt, Buffer, Handle, Passes


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
    # Whether a chunk of the prompt attends to them; then all go to the device and none is
    # open.
    is_prompt: bool = False


class ReplacedPart(NamedTuple):
    """A layer's result for a batch's latest tokens, replaced at the next tokens."""

    slot: ReplacedSlot
    # The layer that made it, counted with the embedding as 0.
    layer: int
    home: Tier
    nbytes: int
    # As in `CachedPart`.
    layouts: tuple[Layout, ...]
    copied: int


class PromptPart(NamedTuple):
    """A layer's KV blocks of a prompt or chunk."""

    state: LayerState
    blocks: range
    # Their bytes by home.
    held: dict[Tier, int]


class SealedPart(NamedTuple):
    """Some sealed KV blocks of a layer and batch whose home is the disk."""

    state: LayerState
    blocks: Sequence[int]


@dataclass(eq=False, repr=False, slots=True)
class ReplacedSlot:
    """Where an array is that a batch replaces with every token: its hidden states, or a layer's
    recurrent state."""

    running: Running
    content: Literal["activations", "cache"]
    part: ReplacedPart | None = None
    # The token that produced the content.
    token: int = 0
    is_on_disk: bool = False
    # A write to disk under way.
    write: Handle = None
    # The backend's.
    payload: Any = None


@dataclass(eq=False, repr=False, slots=True)
class LayerState:
    """The state of one decoder layer for one batch."""

    running: Running
    layer: LayerSpec
    # Of its KV blocks, in the order of their age.
    homes: tuple[Tier, ...]
    # Of its recurrent state.
    replaced_home: Tier
    slot: ReplacedSlot
    # Cached tokens, and sealed blocks.
    tokens: int = 0
    sealed: int = 0
    # The capacity of the open block in tokens.
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
        """The sizes of each KV block."""
        return self.running.sizes_of(self.layer)

    def forget_sizes(self) -> None:
        """Clears cached values that depend on the batch's rows, after shrinking."""
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
        cached_parts: list[CachedPart] = []
        layouts: list[Layout] = []
        number = copied = 0
        asks_host = False
        for number, (home, sizes) in enumerate(zip(self.homes, self.sizes, strict=True)):
            is_away = home != "device"
            asks_host = asks_host or self.stays_on_host(number)
            if number >= len(self.running.blocks.prompt):
                opened = copied + (sizes.open_moves if is_away else 0)
                cached_parts.append(CachedPart(self, number, tuple(layouts), opened, asks_host))
            copied += sizes.sealed_moves if is_away else 0
            if home == "disk":
                layouts.append(sizes.layout)
        cached_parts.append(CachedPart(self, number + 1, tuple(layouts), copied, asks_host))
        return cached_parts

    def earlier(self, sealed: int) -> CachedPart:
        """Returns the blocks for the next chunk of the prompt, `sealed` from those before it."""
        if self._prompting is None:
            self._prompting = self._prompt_parts()
        return self._prompting[sealed]

    def _prompt_parts(self) -> list[CachedPart]:
        """Returns the parts by the number of sealed blocks, for the chunks of the prompt."""
        cached_parts = [CachedPart(self, 0, (), 0, asks_host=False, is_prompt=True)]
        layouts: list[Layout] = []
        copied, unified = 0, self.running.plan.unified
        for block in range(len(self.running.blocks.prompt)):
            home, sizes = self.homes[block], self.sizes[block]
            copied += sizes.sealed if home != "device" and not unified else 0
            layouts += [sizes.layout] if home == "disk" else []
            cached_parts.append(
                CachedPart(self, block + 1, tuple(layouts), copied, asks_host=False, is_prompt=True)
            )
        return cached_parts

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
        """Returns the sizes of a prompt step's blocks."""
        blocks = self.running.prompt_blocks(token)
        held: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for block in blocks:
            held[self.homes[block]] += self.sizes[block].sealed
        return PromptPart(self, blocks, held)

    def places(self, sealed: int) -> tuple[BlocksAt, BlocksAt]:
        """Returns the blocks for decode attention on the device and on the host, with `sealed`
        sealed blocks and an open block."""
        if sealed not in self._places:
            self._places[sealed] = (self._at(sealed, False), self._at(sealed, True))
        return self._places[sealed]

    def _at(self, sealed: int, on_host: bool) -> BlocksAt:
        lengths = self.running.lengths
        starts = (0, *accumulate(lengths))
        blocks = [n for n in range(sealed + 1) if n < len(lengths)]
        matching = [block for block in blocks if self.stays_on_host(block) == on_host]
        return BlocksAt(
            lengths=tuple(lengths[block] for block in matching if block < sealed),
            tail=lengths[sealed] if sealed in matching else 0,
            starts=tuple(starts[block] for block in matching),
        )

    def may_overwrite(self, token: int) -> bool:
        """Returns whether a step's program may overwrite the layer's recurrent state: not a
        prefix's final state, not zeros, and not a disk read buffer, which is reused."""
        is_buffer = self.running.plan.unified and self.replaced_home == "disk"
        return token > 0 and not is_buffer

    def replaced(self) -> ReplacedPart:
        """Returns the size of the layer's recurrent state."""
        plan, rows = self.running.plan, self.running.shape.rows
        arrays = [plan.formats.plain(leaf, rows) for leaf in self.layer.replaced]
        return _replaced(plan, self.slot, self.layer.index, self.replaced_home, arrays)


def _replaced(
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


@dataclass(eq=False, repr=False)
class Running:
    """A batch under way."""

    # Names it in messages and files.
    number: int
    plan: BlockPlan
    shape: BatchShape
    # Token counts of the chunks of its prompts, and of its KV blocks.
    chunks: tuple[int, ...]
    blocks: Blocks
    lengths: tuple[int, ...]
    # Of each layer's output hidden states.
    hidden_homes: tuple[Tier, ...]
    # Batches of one row to whose KV blocks some rows attend before their own, the longest ones
    # first of those that start at the same row.
    shared: tuple[Shared[Running], ...] = ()
    # Whether this is such a batch, which stays as long as it has users: batches that share it, and
    # requests that wait.
    is_prefix: bool = False
    users: int = 0
    # Whether its state is loaded, not computed.
    is_stored: bool = False
    layers: list[LayerState] = field(default_factory=list)
    # Tokens whose steps are still to come.
    left: deque[int] = field(default_factory=deque)
    # Whether it has had its first step, and not left.
    is_going: bool = False
    # Whether it has had no step after its prompts yet, and whether a step has attended to its
    # cache.
    is_in_prompt: bool = True
    has_attended: bool = False
    # Number of layers that keep something of its prompts.
    layers_filled: int = 0
    # The token from which it has fewer rows, and their number.
    shrinking: tuple[int, int] | None = None
    # The backend's.
    payload: Any = None
    # Frees what the batch has, wherever it is: who takes something for it, says here how to give
    # it back.
    closing: ExitStack = field(default_factory=ExitStack)

    def __repr__(self) -> str:
        return f"{'prefix' if self.is_prefix else 'batch'} {self.number}"

    def __post_init__(self) -> None:
        self.hidden = ReplacedSlot(self, "activations")
        self.passes = Passes(self.shape.prompt_len)
        self._sizes: dict[int, list[BlockSizes]] = {}
        self._hidden_parts: dict[tuple[int, int, int], ReplacedPart] = {}

    def close(self) -> None:
        """Frees everything that the batch has."""
        self.is_going = False
        self.shrinking = None
        self.share(())
        self.closing.close()

    @property
    def prefixes(self) -> tuple[Running, ...]:
        """The prefixes of its rows, each once."""
        return tuple(dict.fromkeys(span.prefix for span in self.shared))

    @property
    def growing(self) -> list[LayerState]:
        """The layers that have KV blocks."""
        return [state for state in self.layers if state.homes]

    def prefixes_of(self, row: int) -> list[Running]:
        """Returns the prefixes of a row, the shortest first."""
        return [span.prefix for span in self.shared if span.start <= row < span.stop]

    def share(self, spans: tuple[Shared[Running], ...]) -> None:
        """Gives the rows other prefixes, or none."""
        before, self.shared = self.prefixes, spans
        for prefix in self.prefixes:
            prefix.users += 1
        for prefix in before:
            prefix.users -= 1

    @property
    def rows(self) -> int:
        return self.shape.rows

    @property
    def is_cached(self) -> bool:
        """Whether all layers have stored their state of its prompts."""
        return self.layers_filled == len(self.layers)

    @property
    def tokens(self) -> range:
        """The tokens of its steps; see `Step`."""
        count = len(self.chunks)
        return range(-count, 0) if self.is_prefix else range(1 - count, self.shape.gen_len)

    def span(self, token: int) -> Span:
        """Returns the work of a token's step."""
        if token > 0:
            return self.passes.span(token, self.plan.policy.pass_tokens)
        index = token - self.tokens.start
        return Span(sum(self.chunks[:index]), self.chunks[index])

    def prompt_blocks(self, token: int) -> range:
        """Returns the numbers of the KV blocks that a prompt's step makes."""
        if len(self.chunks) == 1:
            return range(len(self.blocks.prompt))
        index = token - self.tokens.start
        return range(index, index + 1)

    def sealed(self, tokens: int) -> int:
        """Returns the number of KV blocks that are full when `tokens` tokens are cached."""
        return sum(total <= tokens for total in accumulate(self.lengths))

    def sizes_of(self, layer: LayerSpec) -> list[BlockSizes]:
        """Returns the sizes of a layer's KV blocks; layers of equal shapes share the list."""
        kind = self.plan.spec.alike[layer.index]
        sizes = self._sizes.get(kind)
        if sizes is None:
            lengths = self.lengths if layer.growing else ()
            sizes = [self.plan.layouts.of_block(layer, self.rows, tokens) for tokens in lengths]
            self._sizes[kind] = sizes
        return sizes

    def shrinks_at(self, token: int) -> bool:
        """Returns whether the batch has fewer rows from a token on."""
        return self.shrinking is not None and self.shrinking[0] == token

    def shrink(self, rows: int) -> None:
        """Leaves fewer rows; the homes do not change."""
        self.shape = replace(self.shape, rows=rows)
        self._sizes.clear()
        self._hidden_parts.clear()
        for state in self.layers:
            state.forget_sizes()

    def shared_parts(self, layer: int) -> list[CachedPart]:
        """Returns the KV blocks of the prefixes in a layer, in their order: they are moved once for
        all batches of a visit."""
        spec = self.plan.spec.layers[layer]
        if not self.shared or spec.kind != "decoder" or not spec.growing:
            return []
        return [
            prefix.layers[layer - 1].earlier(len(prefix.blocks.prompt)) for prefix in self.prefixes
        ]

    def only_last(self, layer: int) -> bool:
        """Returns whether, of a prompt, a layer's output is needed for the last token only."""
        plan = self.plan
        is_last = layer == plan.spec.last_decoder and plan.config.has_head
        return is_last and not self.shape.scores_prompt

    def hidden_part(self, token: int, layer: int) -> ReplacedPart:
        """Returns the size of `layer`'s output for a step's token."""
        key = (min(token, 1), layer, self.span(token).tokens if token > 0 else 0)
        part = self._hidden_parts.get(key)
        if part is None:
            part = self._hidden_parts[key] = self._hidden_part(token, layer)
        return part

    def _hidden_part(self, token: int, layer: int) -> ReplacedPart:
        plan, rows = self.plan, self.rows
        is_last = token <= 0 and self.only_last(layer)
        tokens = 1 if is_last else self.span(token).tokens
        storage = Storage(plan.spec.hidden_shape(rows, tokens), plan.dtype)
        is_short = token > 0 or tokens == 1
        home = home_of_hidden(self.hidden_homes[layer], is_short, storage.nbytes)
        return _replaced(plan, self.hidden, layer, home, [storage])
