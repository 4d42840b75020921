"""A batch's steps after its prompt, each a pass through all layers, and small parts of a batch's
state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from flexgen_jax.policy.parts import Layout
from flexgen_jax.policy.shapes import Span

Handle = Any
"""Any object of a backend; the loop only hands it back."""


class Buffer(NamedTuple):
    """A host buffer, and its backend's handle."""

    layout: Layout
    handle: Handle


class BlocksAt(NamedTuple):
    """The KV blocks of one layer and batch whose values are in one place, device or host."""

    # Token counts of the sealed blocks.
    lengths: tuple[int, ...]
    # Token count of the open block, 0 if it is elsewhere.
    tail: int
    # The index of the first token of each block.
    starts: tuple[int, ...]


class Begun(NamedTuple):
    """A pass's tokens of a sequence: `computed` tokens; the first `known` are not drafts."""

    known: int = 1
    computed: int = 1


class Passes:
    """The start positions of a batch's passes; a pass may compute several tokens.

    Passes that are still to come count as if they cached one token each; without guesses, all do.
    With a prompt of 10 tokens, pass 1 starts at 10. If it has 3 known tokens and 2 guesses, pass 2
    starts at 13.
    """

    def __init__(self, prompt_len: int) -> None:
        # The latest pass; before the first pass, the prompt's last token.
        self._token, self._start, self._computed = 0, prompt_len - 1, 1
        # How many of its tokens it caches.
        self.cached = 1

    def span(self, token: int, max_tokens: int) -> Span:
        """Returns the work of the pass of a token (as in `Step`); max_tokens: the tokens of a pass
        that is still to come."""
        if token <= self._token:
            return Span(self._start, self._computed)
        return Span(self._start + self.cached + token - self._token - 1, max_tokens)

    def begin(self, token: int, begun: Begun, lengths: Sequence[int]) -> None:
        """Begins a pass, whose known tokens are cached as far as the open KV block has room;
        lengths: of all KV blocks."""
        start, num_known = self.span(token, begun.computed).start, begun.known
        room = next((x for total in accumulate(lengths) if (x := total - start) > 0), num_known)
        self._token, self._start, self._computed = token, start, begun.computed
        self.cached = min(num_known, room)
