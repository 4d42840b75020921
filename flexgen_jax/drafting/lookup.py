"""Guesses by looking up the last tokens in the text before them.

Documents, code and JSON repeat themselves: tokens that followed the same tokens last time are
likely to follow again (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_jax.offload.speculation import Draws

MAX_LOOKUP_TOKENS, MIN_LOOKUP_TOKENS = 5, 2
"""Most and least tokens that are looked up, the most first."""


class LookupDrafter:
    """Makes drafts that look up what followed; see `offload.speculation.Drafter`."""

    def begin(self) -> LookupDraft:
        return LookupDraft()

    def close(self) -> None:
        pass


class LookupDraft:
    """Knows where each sequence of a few tokens was last, and the time before that."""

    def __init__(self) -> None:
        # By the tokens: the index after their latest place, and after the place before that.
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}
        self._seen = 0

    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        """Returns what followed the longest sequence of last tokens that was there before.

        After 1 2 3 9 1 2 3, the last three tokens were there before, and 9 1 2 followed.
        """
        self._take(ids)
        for size in range(min(MAX_LOOKUP_TOKENS, len(ids)), MIN_LOOKUP_TOKENS - 1, -1):
            _, before = self._after.get(tuple(ids[-size:]), (0, 0))
            if before:
                return self._going_on(ids, before, count)
        return ()

    def _going_on(self, ids: Sequence[int], start: int, count: int) -> list[int]:
        """Returns `count` tokens from an index on; at the end of the text, the match is repeated: 7
        8 7 8 with 7 8 7 8 ..."""
        period = len(ids) - start
        return [ids[start + n % period] for n in range(count)]

    def _take(self, ids: Sequence[int]) -> None:
        """Notes the places of the tokens that have come."""
        for end in range(self._seen + 1, len(ids) + 1):
            for size in range(MIN_LOOKUP_TOKENS, min(MAX_LOOKUP_TOKENS, end) + 1):
                key = tuple(ids[end - size : end])
                latest, _ = self._after.get(key, (0, 0))
                self._after[key] = (end, latest)
        self._seen = len(ids)

    def close(self) -> None:
        self._after.clear()
