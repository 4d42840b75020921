"""Batches under way: their shapes, phases and steps; what their layers keep is in
`layer_state.py`."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.policy.layer_state import (
    CachedPart,
    LayerState,
    ReplacedPart,
    ReplacedSlot,
    replaced_part,
)
from flexgen_jax.policy.placement import home_of_hidden
from flexgen_jax.policy.plan import BlockPlan, Blocks, BlockSizes
from flexgen_jax.policy.policy import Tier
from flexgen_jax.policy.shapes import BatchShape, Span
from flexgen_jax.policy.sharing import Shared


class Pass(NamedTuple):
    """A step after the prompt in all layers: its number, as in `Step`, the index of the first token
    that it computes, the number of these, and how many of them it caches."""

    token: int
    start: int
    computed: int
    cached: int


class Begun(NamedTuple):
    """What a pass computes of a sequence: `computed` tokens, the first `known` of which are no
    guesses."""

    known: int = 1
    computed: int = 1


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
    # Of the hidden states that each layer hands on.
    hidden_homes: tuple[Tier, ...]
    # Batches of one row to whose KV blocks some rows attend before their own, the longest ones
    # first of those that start at the same row.
    shared: tuple[Shared[Running], ...] = ()
    # Whether this is such a batch, which stays as long as it has users: batches that share it, and
    # requests that wait.
    is_prefix: bool = False
    users: int = 0
    # Whether what it keeps is loaded, and no step computes it.
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
    # The token from which on it has fewer rows, and how many.
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
        # The latest step after the prompt; before the first one, as if that was the prompt's last
        # token.
        self._pass = Pass(token=0, start=self.shape.prompt_len - 1, computed=1, cached=1)
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
        """Whether all layers have handed over what they keep of its prompts."""
        return self.layers_filled == len(self.layers)

    @property
    def tokens(self) -> range:
        """The tokens of its steps; see `Step`."""
        count = len(self.chunks)
        return range(-count, 0) if self.is_prefix else range(1 - count, self.shape.gen_len)

    def span(self, token: int) -> Span:
        """Returns what the step of a token computes of its sequences."""
        if token > 0:
            is_begun = token <= self._pass.token
            most = self.plan.policy.pass_tokens
            return Span(self._start_of(token), self._pass.computed if is_begun else most)
        index = token - self.tokens.start
        return Span(sum(self.chunks[:index]), self.chunks[index])

    def _start_of(self, token: int) -> int:
        """Returns the index of the first token that a step after the prompt computes; steps to come
        count as if they cached one token each."""
        latest = self._pass
        if token <= latest.token:
            return latest.start
        return latest.start + latest.cached + token - latest.token - 1

    def begin_pass(self, token: int, begun: Begun) -> None:
        """Begins a step after the prompt, whose known tokens are cached as far as the open KV block
        has room."""
        start, known = self._start_of(token), begun.known
        room = next((x for total in accumulate(self.lengths) if (x := total - start) > 0), known)
        self._pass = Pass(token, start, begun.computed, min(known, room))

    @property
    def cached_by_pass(self) -> int:
        """How many of its tokens the latest step after the prompt caches."""
        return self._pass.cached

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
        """Returns what each KV block of a layer takes; layers of equal shapes share the list."""
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
        """Leaves fewer rows; the homes of what the batch has stay."""
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
        """Returns what the output of `layer` for a step's token takes."""
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
        return replaced_part(plan, self.hidden, layer, home, [storage])
