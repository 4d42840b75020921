"""Several tokens of a sequence a pass: draft tokens are computed together with known tokens, and a
draft token is accepted if it equals the model's own choice (Leviathan, Kalman and Matias 2023,
"Fast Inference from Transformers via Speculative Decoding").

With two guesses, a pass computes five tokens. Say that "a b" is known, and "c d" guessed:

    computed     a  b  c  d  -
    chosen       .  c  x  .  .     c was right: "c x" is accepted, and known in the next pass

Only tokens known at the beginning, here "a b", are cached: the KV cache never has a draft token,
and a recurrent layer, whose state cannot be rolled back, continues from a state without draft
tokens. The next pass computes accepted tokens again. Where weights have to come from the host or
the disk, computing a few tokens more costs little. The rows of a batch are cached up to the same
token: the row that finds the fewest says how far.

Tokens are drawn as they would be without guesses: by the text's own key and the token's number. A
guess is right if it is that token, so that sampled texts are the same as without guesses, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import numpy as np

from flexgen_jax.policy.drafts import DraftRates
from flexgen_jax.schedule.passes import Begun

PROBE = 32
"""After this number of passes, the opposite mode (with or without drafts) is tried to measure its
cost."""

REMEMBERED = 8
"""Passes of each way whose seconds are remembered. The least counts: one that compiles is slow."""


class Draws(NamedTuple):
    """The sampling arguments of a sequence's next token: the arguments of `layers.sampling.sample`
    for its one row but for the logits and the token, () for the likeliest; and the token's
    number."""

    sampling: tuple[np.ndarray, ...]
    token: int


class TextDraft(Protocol):
    """Drafts the continuation of one sequence."""

    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        """Returns up to `count` draft tokens. ids: the text so far, prompt and all,
        which begins with that of the call before."""

    def close(self) -> None:
        """Frees the draft's memory."""


class Drafter(Protocol):
    """Makes the drafts of texts."""

    def begin(self) -> TextDraft:
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
    """The number of draft tokens that pays, by the cost of earlier passes.

    Drafts without a cost of their own still cost their verification; those of a
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
        if rate is None or not self.guessing or not self.plain:
            return 0 if self._passes % PROBE == 0 else self.most
        guess_seconds = min(self.guess_s, default=0.0)
        speeds = {
            count: DraftRates(accepted=rate).tokens_a_pass(count)
            / (min(self.guessing) + count * guess_seconds)
            for count in range(1, self.most + 1)
        }
        best = max(speeds, key=lambda count: (speeds[count], -count))
        is_worth = speeds[best] > 1 / min(self.plain)
        if self._passes % PROBE == 0:
            is_worth = not is_worth
        return best if is_worth else 0


@dataclass(eq=False)
class DraftedText:
    """One row of a batch whose passes have guesses."""

    draft: TextDraft
    # All tokens so far, those of prefixes too, from the end of the prompt on; how many of them are
    # generated.
    ids: list[int] = field(default_factory=list)
    made: int = 0
    # How many of the last tokens are not cached, and, of the pass under way, how many of its first
    # tokens are no guesses, and the guesses.
    uncached: int = 0
    known: int = 1
    guesses: list[int] = field(default_factory=list)
    # Whether it has all its tokens, or is a row that fills up the batch.
    is_done: bool = False

    def begin_pass(self, count: int, pass_tokens: int, sampling: tuple[np.ndarray, ...]) -> None:
        """Guesses up to `count` tokens for the next pass."""
        self.known = self.uncached
        count = min(count, pass_tokens - self.known)
        self.guesses = []
        if count > 0:
            self.guesses = list(self.draft.guess(self.ids, count, Draws(sampling, self.made)))
            del self.guesses[count:]

    @property
    def first_place(self) -> int:
        """The number of the generated token that follows the pass's first token."""
        return self.made - self.known + 1

    def accepted(self, tokens: np.ndarray) -> range:
        """Returns the positions in the pass whose chosen tokens belong to the sequence: the
        last known one, and the guesses that are right. tokens: int32 [pass token]."""
        last = self.known - 1
        stop = last + 1
        for place, guess in enumerate(self.guesses, last):
            if tokens[place] != guess:
                break
            stop += 1
        return range(last, stop)

    def take(self, token: int) -> None:
        """Appends a token that was found."""
        self.ids.append(token)
        self.made += 1
        self.uncached += 1


@dataclass(eq=False)
class DraftedTexts:
    """The rows of a batch whose passes have guesses.

    All rows of a batch are cached up to the same token. A text that is ahead of others has more
    known tokens in a pass, and fewer guesses: with two guesses, five known tokens at most.
    """

    # The most tokens of a row that a pass computes.
    pass_tokens: int
    pace: Pace
    rows: list[DraftedText]
    # What the rows are drawn by: the arguments of `layers.sampling.sample` but for the logits and
    # the token, () for the likeliest tokens.
    sampling: tuple[np.ndarray, ...]
    # How many tokens of a row the pass under way computes.
    computed: int = 1
    # On the device: the sampling arguments of a pass, without token numbers.
    draws: tuple[jax.Array, ...] = ()
    # When the latest pass began, and all guessing until then.
    _began: tuple[float, float] | None = None

    @property
    def going(self) -> list[DraftedText]:
        """The texts that need more tokens."""
        return [text for text in self.rows if not text.is_done]

    def begin_pass(self) -> Begun:
        """Guesses the tokens of the next pass."""
        acceptance, now = self.pace.acceptance, time.perf_counter()
        self._time(now)
        self._began = (now, acceptance.guess_s)
        count = self.pace.count()
        for row, text in enumerate(self.rows):
            if not text.is_done:
                sampling = tuple(array[row : row + 1] for array in self.sampling)
                text.begin_pass(count, self.pass_tokens, sampling)
        acceptance.guess_s += time.perf_counter() - now
        is_plain = all(text.known + len(text.guesses) == 1 for text in self.going)
        self.computed = 1 if is_plain else self.pass_tokens
        return Begun(min(text.known for text in self.going), self.computed)

    def _time(self, now: float) -> None:
        """Takes note of the seconds since the last pass began."""
        if self._began is None:
            return
        began, guessed_s = self._began
        guess_s = self.pace.acceptance.guess_s - guessed_s
        seconds = self.pace.guessing if self.computed > 1 else self.pace.plain
        seconds.append(now - began - guess_s)
        max_guesses = max((len(text.guesses) for text in self.rows), default=0)
        if max_guesses:
            self.pace.guess_s.append(guess_s / max_guesses)

    @property
    def pass_ids(self) -> np.ndarray:
        """The tokens that the pass computes, int32 [batch, token]; a row's last ones may be neither
        known nor guessed, and mean nothing."""
        ids = np.zeros((len(self.rows), self.computed), np.int32)
        for row, text in zip(ids, self.rows, strict=True):
            if not text.is_done:
                pass_tokens = [*text.ids[len(text.ids) - text.known :], *text.guesses]
                row[: len(pass_tokens)], row[len(pass_tokens) :] = pass_tokens, pass_tokens[-1]
        return ids

    def of_pass(self) -> list[np.ndarray]:
        """Returns the sampling arguments of a pass with draft tokens, [batch x token, ...], without
        token numbers."""
        return [np.repeat(array, self.pass_tokens, axis=0) for array in self.sampling[:-1]]

    @property
    def places(self) -> np.ndarray:
        """The numbers of the tokens that are chosen after those of the pass, among all of each
        text, int32 [batch x token]."""
        first = np.array([text.first_place for text in self.rows], np.int32) + self.sampling[-1]
        positions = first[:, None] + np.arange(self.computed, dtype=np.int32)
        numbers: np.ndarray = positions.reshape(-1)
        return numbers

    def spread(self, rows: np.ndarray) -> np.ndarray:
        """Returns the sampling arguments of the pass's tokens, [batch x token, ...], from those of
        the tokens after each row's last known token and after each draft token, [some, ...]."""
        index, start = [], 0
        for text in self.rows:
            places = np.arange(self.computed) - (text.known - 1)
            index.append(start + np.clip(places, 0, len(text.guesses)))
            start += 1 + len(text.guesses)
        return rows[np.concatenate(index)]

    @property
    def guesses(self) -> list[list[int]]:
        """The guesses of each row."""
        return [text.guesses for text in self.rows]

    def found(self, chosen: np.ndarray) -> list[range]:
        """Returns the places of each row's tokens that are those of its text, and counts them.
        chosen: int32 [batch, token]."""
        places = [
            range(0) if text.is_done else text.accepted(row)
            for text, row in zip(self.rows, chosen, strict=True)
        ]
        acceptance = self.pace.acceptance
        for text, those in zip(self.rows, places, strict=True):
            right = len(those) - 1
            acceptance.all_passes += not text.is_done
            acceptance.found += len(those)
            if text.guesses and not text.is_done:
                acceptance.passes += 1
                acceptance.guessed += len(text.guesses)
                acceptance.accepted += right
                acceptance.wrong += right < len(text.guesses)
        return places

    def end_pass(self, cached: int, unfinished: Container[int]) -> None:
        """Ends a pass that cached some tokens of each row; unfinished: the rows that need more."""
        for row, text in enumerate(self.rows):
            text.uncached -= cached
            if row not in unfinished:
                text.is_done, text.guesses, text.known = True, [], 1

    def shrink(self, rows: Sequence[int]) -> None:
        """Keeps the given rows, and frees the drafts of the other rows."""
        for row, text in enumerate(self.rows):
            if row not in rows:
                text.draft.close()
        self.rows = [self.rows[row] for row in rows]
        self.sampling = tuple(array[np.array(rows)] for array in self.sampling)

    def close(self) -> None:
        """Frees the drafts' memory."""
        for text in self.rows:
            text.draft.close()
