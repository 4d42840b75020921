"""Several tokens of a sequence a pass: guesses are computed beside the tokens that are known, and
those that the model itself would have chosen are accepted (Leviathan, Kalman and Matias 2023, "Fast
Inference from Transformers via Speculative Decoding").

With two guesses, a pass computes five tokens. Say that "a b" is known, and "c d" guessed:

    computed     a  b  c  d  -
    chosen       .  c  x  .  .     c was right: "c x" is accepted, and known in the next pass

Only what is known at the beginning, here "a b", is cached: the KV cache never has a guess, and a
layer with a state, which nothing can be taken out of, goes on from a state that has seen no guess.
What is accepted is computed once more by the next pass. Where weights have to come from the host or
the disk, computing a few tokens more costs little.

Tokens are drawn as they would be without guesses: by the text's own key and the token's number. A
guess is right if it is that token, so that sampled texts are the same as without guesses, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np


class Draft(Protocol):
    """Guesses how one text goes on."""

    def guess(self, ids: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to `count` tokens that may come next. ids: the text so far, prompt and all,
        which begins with that of the call before."""

    def close(self) -> None:
        """Frees what the draft has."""


class Drafter(Protocol):
    """Makes the drafts of texts."""

    def begin(self) -> Draft:
        """Returns the draft of a new text."""


@dataclass
class Acceptance:
    """How many passes there were, tokens that were guessed, and of these accepted."""

    passes: int = 0
    guessed: int = 0
    accepted: int = 0

    @property
    def tokens_a_pass(self) -> float:
        """The mean of tokens that a pass finds: one, and the accepted guesses."""
        return 1 + self.accepted / self.passes if self.passes else 1.0


@dataclass(eq=False)
class DraftedText:
    """The text of a batch of one row whose passes have guesses."""

    draft: Draft
    # How many tokens are guessed for a pass, and how many a pass computes.
    draft_tokens: int
    pass_tokens: int
    # Those of the whole run.
    acceptance: Acceptance
    # All tokens so far, those of prefixes too; how many of them are generated.
    ids: list[int]
    made: int = 0
    # How many of the last tokens are not cached, and, of the pass under way, how many of its first
    # tokens are no guesses, and the guesses.
    uncached: int = 0
    known: int = 1
    guesses: list[int] = field(default_factory=list)
    # On the device, what the tokens of a pass are drawn by: of each, the arguments of
    # `layers.sampling.sample` but for the logits and the token.
    sampling: tuple[jax.Array, ...] = ()

    def begin_pass(self) -> int:
        """Guesses the tokens of the next pass; returns how many of its tokens are known."""
        self.known = self.uncached
        count = min(self.draft_tokens, self.pass_tokens - self.known)
        self.guesses = list(self.draft.guess(self.ids, count))[:count]
        return self.known

    @property
    def computed(self) -> np.ndarray:
        """The tokens that the pass computes, int32 [1, token]; its last ones may be neither known
        nor guessed, and mean nothing."""
        ids = [*self.ids[len(self.ids) - self.known :], *self.guesses]
        return np.array([ids + ids[-1:] * (self.pass_tokens - len(ids))], np.int32)

    @property
    def first_place(self) -> int:
        """The number, among the generated tokens, of the one that is chosen after the pass's first
        token."""
        return self.made - self.known + 1

    def of_pass(self, sampling: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what each token of a pass is drawn by, from what the text's are."""
        each = [np.repeat(array, self.pass_tokens, axis=0) for array in sampling]
        if each:
            each[-1] = each[-1] + np.arange(self.pass_tokens, dtype=np.int32)
        return each

    def spread(self, rows: np.ndarray) -> np.ndarray:
        """Returns what the pass's tokens are chosen by, [pass token, ...], of that after the last
        known one and after each guess, [1 + guess, ...]."""
        places = np.arange(self.pass_tokens) - (self.known - 1)
        return rows[np.clip(places, 0, len(rows) - 1)]

    def accepted(self, chosen: np.ndarray) -> range:
        """Returns the places in the pass after which the chosen tokens are those of the text: the
        last known one, and the guesses that are right. chosen: int32 [pass token]."""
        last = self.known - 1
        stop = last + 1
        for place, guess in enumerate(self.guesses, last):
            if chosen[place] != guess:
                break
            stop += 1
        return range(last, stop)

    def end_pass(self, cached: int, taken: Sequence[int]) -> None:
        """Ends a pass that cached some of its tokens, and found tokens of the text."""
        self.uncached += len(taken) - cached
        self.ids += taken
        self.made += len(taken)

    def count(self, accepted: int) -> None:
        """Counts the pass's guesses, so many of which were right."""
        self.acceptance.passes += 1
        self.acceptance.guessed += len(self.guesses)
        self.acceptance.accepted += accepted
