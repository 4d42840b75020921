"""The expected gain of draft tokens; see `Policy.draft_tokens`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class DraftRates:
    """How good and how fast guesses are.

    name: of the drafter, as requested; accepted: the probability that a guess is right if those
    before it are; token_s: seconds of guessing a token of a sequence, while which nothing else is
    computed; device_bytes, token_bytes: the drafter's device memory, in total and per token of a
    sequence.
    """

    name: str = ""
    accepted: float = 0.0
    token_s: float = 0.0
    device_bytes: int = 0
    token_bytes: int = 0

    def tokens_a_pass(self, guesses: int, rows: int = 1) -> float:
        """Returns the expected number of tokens per sequence and pass with `guesses` drafts:
        one, and the guesses until the first wrong one (Leviathan et al. 2023, equation 1); rows:
        of the batch, which go on together."""
        alone = sum(self.accepted**count for count in range(guesses + 1))
        return alone if rows == 1 else min(alone, _together(self.accepted, guesses, rows))

    def held(self, tokens: int) -> int:
        """Returns the bytes of the device's memory that guessing for some tokens takes."""
        return self.device_bytes + self.token_bytes * tokens


PASSES = 400
"""Number of passes for estimating the progress of several rows."""


@lru_cache(maxsize=512)
def _together(accepted: float, guesses: int, rows: int) -> float:
    """Returns how many tokens a pass finds where the rows of a batch go on together: each row has
    at most 2 `guesses` + 1 tokens in a pass, and all rows are cached up to the slowest row's known
    tokens."""
    draw, largest = random.Random(0), 2 * guesses + 1  # noqa: S311
    counts, total = [1] * rows, 0
    for _ in range(PASSES):
        cached = min(counts)
        total += cached
        for row, count in enumerate(counts):
            right, room = 0, min(guesses, largest - count)
            while right < room and draw.random() < accepted:
                right += 1
            counts[row] = count - cached + 1 + right
    return total / PASSES
