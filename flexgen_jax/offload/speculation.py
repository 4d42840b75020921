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

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import numpy as np

from flexgen_jax.policy.drafts import DraftRates
from flexgen_jax.policy.passes import Begun

PROBE = 32
"""Every so many passes, the other way is taken, with guesses or without, to see what it costs."""

REMEMBERED = 8
"""Passes of each way whose seconds are remembered. The least counts: one that compiles is slow."""


class Draws(NamedTuple):
    """What the next token of a text is drawn by: the arguments of `layers.sampling.sample` for its
    one row but for the logits and the token, () for the likeliest; and the token's number."""

    sampling: tuple[np.ndarray, ...]
    token: int


class Draft(Protocol):
    """Guesses how one text goes on."""

    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        """Returns up to `count` tokens that may come next. ids: the text so far, prompt and all,
        which begins with that of the call before."""

    def close(self) -> None:
        """Frees what the draft has."""


class Drafter(Protocol):
    """Makes the drafts of texts."""

    def begin(self) -> Draft:
        """Returns the draft of a new text."""

    def close(self) -> None:
        """Frees what all drafts share."""


@dataclass
class Acceptance:
    """The guesses of a run: passes that had some, tokens that were guessed, and of these accepted;
    wrong: how often a guess after right ones was wrong; guess_s: seconds of guessing."""

    passes: int = 0
    guessed: int = 0
    accepted: int = 0
    wrong: int = 0
    guess_s: float = 0.0
    # Passes of texts, with guesses or without, and the tokens that they found.
    all_passes: int = 0
    found: int = 0

    @property
    def tokens_a_pass(self) -> float:
        """The mean number of tokens of a text that a pass found."""
        return self.found / self.all_passes if self.all_passes else 1.0

    @property
    def rate(self) -> float | None:
        """The share of right ones among guesses after right ones; None before the first guess."""
        tried = self.accepted + self.wrong
        return self.accepted / tried if tried else None


@dataclass
class Pace:
    """How many tokens are worth guessing, by what passes have cost so far.

    Guesses that take no time cost what computing them takes beside the known tokens; those of a
    model its time, too.
    """

    most: int
    acceptance: Acceptance
    # Seconds of the latest passes of all texts between two of one text, without guessing: of those
    # with guesses, and of those without.
    guessing: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    # Of guessing one more token of each text.
    guess_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _passes: int = 0

    def count(self) -> int:
        """Returns how many tokens to guess for the next pass."""
        self._passes += 1
        rate = self.acceptance.rate
        is_known = rate is not None and self.guessing and self.plain
        if not is_known or rate is None:
            return 0 if self._passes % PROBE == 0 else self.most
        each = min(self.guess_s, default=0.0)
        speeds = {
            count: DraftRates(accepted=rate).tokens_a_pass(count)
            / (min(self.guessing) + count * each)
            for count in range(1, self.most + 1)
        }
        best = max(speeds, key=lambda count: (speeds[count], -count))
        is_worth = speeds[best] > 1 / min(self.plain)
        if self._passes % PROBE == 0:
            is_worth = not is_worth
        return best if is_worth else 0


@dataclass(eq=False)
class DraftedText:
    """The text of a batch of one row whose passes have guesses."""

    draft: Draft
    # The most tokens that a pass computes.
    pass_tokens: int
    # Those of the whole run.
    pace: Pace
    sampling: tuple[np.ndarray, ...]
    # All tokens so far, those of prefixes too, from the end of the prompt on; how many of them are
    # generated.
    ids: list[int] = field(default_factory=list)
    made: int = 0
    # How many of the last tokens are not cached, and, of the pass under way, how many of its first
    # tokens are no guesses, how many it computes, and the guesses.
    uncached: int = 0
    known: int = 1
    computed: int = 1
    guesses: list[int] = field(default_factory=list)
    # On the device, what the tokens of a pass are drawn by: of each, the arguments of
    # `layers.sampling.sample` but for the logits and the token.
    draws: tuple[jax.Array, ...] = ()
    # When the latest pass began, and all guessing until then.
    _began: tuple[float, float] | None = None

    def begin_pass(self) -> Begun:
        """Guesses the tokens of the next pass."""
        acceptance = self.pace.acceptance
        now = time.perf_counter()
        if self._began is not None:
            began, guessed_s = self._began
            seconds = now - began - (acceptance.guess_s - guessed_s)
            (self.pace.guessing if self.computed > 1 else self.pace.plain).append(seconds)
            if self.guesses:
                self.pace.guess_s.append((acceptance.guess_s - guessed_s) / len(self.guesses))
        self._began = (now, acceptance.guess_s)
        self.known = self.uncached
        count = min(self.pace.count(), self.pass_tokens - self.known)
        self.guesses = []
        if count > 0:
            draws = Draws(self.sampling, self.made)
            self.guesses = list(self.draft.guess(self.ids, count, draws))[:count]
            acceptance.guess_s += time.perf_counter() - now
        self.computed = 1 if self.known + len(self.guesses) == 1 else self.pass_tokens
        return Begun(self.known, self.computed)

    @property
    def pass_ids(self) -> np.ndarray:
        """The tokens that the pass computes, int32 [1, token]; its last ones may be neither known
        nor guessed, and mean nothing."""
        ids = [*self.ids[len(self.ids) - self.known :], *self.guesses]
        return np.array([ids + ids[-1:] * (self.computed - len(ids))], np.int32)

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
        places = np.arange(self.computed) - (self.known - 1)
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
        self._count(stop - last - 1)
        return range(last, stop)

    def _count(self, right: int) -> None:
        acceptance = self.pace.acceptance
        acceptance.all_passes += 1
        acceptance.found += 1 + right
        if self.guesses:
            acceptance.passes += 1
            acceptance.guessed += len(self.guesses)
            acceptance.accepted += right
            acceptance.wrong += right < len(self.guesses)

    def end_pass(self, cached: int, taken: Sequence[int]) -> None:
        """Ends a pass that cached some of its tokens, and found tokens of the text."""
        self.uncached += len(taken) - cached
        self.ids += taken
        self.made += len(taken)
