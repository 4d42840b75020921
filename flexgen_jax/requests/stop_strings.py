"""The texts of token ids, and where stop strings end them."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_jax.models.marks import opened_by
from flexgen_jax.models.reasoning import split_reasoning
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.requests.requests import EncodedRequest

EXTRA = 8
"""Tokens before those that may have a stop string, which may be decoded otherwise at a text's
beginning."""

MAX_STOP_LISTS = 256
"""Number of stop string lists with cached sets of possible last tokens: a stream may have
another list in every request."""


class Texts:
    """Makes texts of token ids; without a tokenizer, they are empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ends: dict[tuple[str, ...], dict[int, bool]] = {}

    def is_special_stop(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Returns whether the last token is a special one, and a stop string names it: texts do not
        have special tokens."""
        token = ids[-1]
        if not stops or self._tokenizer is None or token not in self._tokenizer.special_ids:
            return False
        return self._tokenizer.piece(token).decode(errors="replace") in stops

    def until_stop(self, request: EncodedRequest, ids: Sequence[int]) -> str | None:
        """Returns the text before the first stop string, or None if there is none yet.

        A new stop string ends with the last token, so the whole text is decoded only if its end has
        one.
        """
        stops = request.params.stop
        if self._tokenizer is None or not self._may_end(ids[-1], stops):
            return None
        latest = self._latest(ids, max(len(stop.encode()) for stop in stops))
        if len(latest) < len(ids):
            end = self._tokenizer.decode(latest)
            if not any(stop in end for stop in stops):
                return None
        text, begin = self.decode(request, ids), self.content_begin(request, ids)
        if begin is None:
            return None
        places = [place for stop in stops if (place := text.find(stop, begin)) >= 0]
        return text[: min(places)] if places else None

    def content_begin(self, request: EncodedRequest, ids: Sequence[int]) -> int | None:
        """Returns the number of characters before the text that stop strings count in: the
        reasoning of an answer; None as long as it has not ended."""
        if not request.is_chat or self._tokenizer is None:
            return 0
        close = opened_by(self._tokenizer, request.given_ids)
        end_id = None if close is None else self._tokenizer.token_id(close)
        if end_id in self._tokenizer.special_ids and end_id not in ids:
            return None  # at once, since reasoning may be long
        answer = split_reasoning(
            self._tokenizer, request.given_ids, ids, text := self.decode(request, ids)
        )
        if answer is None:
            return 0
        if answer.content is None:
            return len(text) if answer.calls else None
        return len(text) - len(answer.content)

    def _may_end(self, token: int, stops: Sequence[str]) -> bool:
        """Returns whether a stop string may end within a token's text. Most tokens have no part of
        a stop string, so they need no decoding."""
        assert self._tokenizer is not None, "there is a text"
        if len(self._ends) >= MAX_STOP_LISTS:
            self._ends.clear()
        cached_answers = self._ends.setdefault(tuple(stops), {})
        if token not in cached_answers:
            piece = self._tokenizer.piece(token)
            cached_answers[token] = any(may_end(stop.encode(), piece) for stop in stops)
        return cached_answers[token]

    def _latest(self, ids: Sequence[int], size: int) -> Sequence[int]:
        """Returns the last tokens that have `size` bytes of the text or more, and some before."""
        assert self._tokenizer is not None, "there is a text"
        remaining = size + EXTRA
        for index in range(len(ids) - 1, -1, -1):
            remaining -= ids[index] not in self._tokenizer.special_ids
            if not remaining:
                return ids[index:]
        return ids

    def decode(self, request: EncodedRequest, ids: Sequence[int]) -> str:
        """Returns the text of a request's new tokens."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids, before=request.given_ids)


def may_end(stop: bytes, piece: bytes) -> bool:
    """Returns whether a stop string may end within a token's bytes: "one." may in " one. And", in
    "e." and in ".", but not in "on". A decoder may leave out blanks before a token, and writes
    U+FFFD for bytes that are no character."""
    if "\N{REPLACEMENT CHARACTER}".encode() in stop:
        return True
    return any(
        stop.endswith(text[:size]) or text[:size].endswith(stop)
        for text in (piece, piece.lstrip())
        for size in range(1, len(text) + 1)
    )
