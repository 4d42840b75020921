"""Guesses that are right as often as a test wants."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_jax.offload.speculation import Draws


class Scripted:
    """Guesses how texts go on that are known, with every `wrong`-th guess wrong; see
    `offload.speculation.Drafter`. texts: prompts with what follows them."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: int) -> None:
        self._texts, self._wrong = [list(text) for text in texts], wrong
        self._guessed = 0
        self.begun = self.closed = 0

    def begin(self) -> Scripted:
        self.begun += 1
        return self

    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        size = len(ids)
        text = next((x for x in self._texts if x[:size] == list(ids)), [])
        guesses = []
        for token in text[size : size + count]:
            self._guessed += 1
            guesses.append(token ^ 1 if self._guessed % self._wrong == 0 else token)
        return guesses

    def close(self) -> None:
        self.closed += 1
