"""A text that is made token by token, in pieces that can be shown at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from flexgen_jax.models.reasoning import FINAL, HARMONY, MARKS, NAMES, opened_by
from flexgen_jax.models.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The decoding of bytes that do not form a whole character yet."""

CONTEXT = 6
"""Tokens before a piece that are decoded with it, since a first word may lose its blank."""


class Piece(NamedTuple):
    """Some characters of a text, of its reasoning or of its answer."""

    kind: Literal["reasoning", "content"]
    text: str


class Pieces:
    """The characters of tokens, one token at a time, without special tokens.

    A token's text is returned once it is final, never half a character. before: preceding tokens;
    without them the first token may lose its leading blank.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before[-CONTEXT:])
        # The number of tokens already returned, and the first token to decode.
        self._shown, self._start = len(self._ids), 0

    def add(self, token: int) -> str:
        """Returns the characters that are sure now."""
        self._ids.append(token)
        return self._new(is_last=False)

    def end(self) -> str:
        """Returns the characters that were held back."""
        return self._new(is_last=True)

    def _new(self, is_last: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith(UNFINISHED) and not is_last:
            return ""
        new_text = text[len(before) :]
        if new_text or is_last:
            self._start = max(self._start, self._shown - CONTEXT)
            self._shown = len(self._ids)
            del self._ids[: self._start]
            self._shown, self._start = self._shown - self._start, 0
        return new_text


class AnswerStream:
    """The pieces of an answer, with its reasoning apart; see `models.reasoning`.

    prompt_ids: of the prompt, which may begin the reasoning; stops: strings at which the text will
    end. Characters that may be the beginning of a mark or a stop string are held back until it is
    known.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._latest = list(prompt_ids[-CONTEXT:])
        self._pieces = Pieces(tokenizer, self._latest)
        self._close = opened_by(tokenizer, prompt_ids)
        self._phase: Literal["start", "reasoning", "content", "harmony", "ended"] = "start"
        if self._close is not None:
            self._phase = "reasoning"
        self._held = ""
        # The rest of the line that names Gemma 4's reasoning.
        self._line = ""
        # Of Harmony's format: the tokens of a message's head, and its channel once that is known.
        self._head: list[int] = []
        self._channel: str | None = None
        self._harmony = {tokenizer.token_id(mark): mark for mark in HARMONY}
        self._marks = {tokenizer.token_id(mark): mark for mark in (*MARKS, *MARKS.values())}
        self._harmony.pop(None, None)
        self._marks.pop(None, None)

    def add(self, token: int) -> list[Piece]:
        """Returns the pieces that are sure with one more token."""
        self._latest = [*self._latest, token][-CONTEXT:]
        if self._phase == "start" and self._harmony.get(token) == "<|channel|>":
            self._phase = "harmony"
        if self._phase == "harmony":
            return list(self._of_harmony(token))
        mark = self._marks.get(token)
        if mark is not None and (pieces := self._at_mark(mark)) is not None:
            return pieces
        self._held += self._pieces.add(token)
        return list(self._sure(is_last=False))

    def end(self) -> list[Piece]:
        """Returns what was held back, at the end of the text."""
        self._held += self._pieces.end()
        if self._phase == "harmony":
            return list(self._of_channel(self._taken()))
        return list(self._sure(is_last=True))

    def _at_mark(self, mark: str) -> list[Piece] | None:
        """Returns the pieces before a mark that is a token, where it begins or ends reasoning."""
        if self._phase == "start" and mark in MARKS:
            self._held += self._pieces.end()
            if self._held.strip():
                return None
            self._begin(mark)
            return []
        if self._phase != "reasoning" or mark != self._close:
            return None
        self._held += self._pieces.end()
        pieces = list(self._sure(is_last=True))
        self._phase, self._pieces = "content", Pieces(self._tokenizer, self._latest)
        return pieces

    def _begin(self, mark: str) -> None:
        self._phase, self._close, self._held = "reasoning", MARKS[mark], ""
        name = NAMES.get(self._close)
        self._line = "" if name is None else "\n" if mark.endswith(name) else f"{name}\n"
        self._pieces = Pieces(self._tokenizer, self._latest)

    def _sure(self, is_last: bool) -> Iterator[Piece]:
        """Yields the pending characters that are final."""
        if self._phase == "start":
            text = self._held.lstrip()
            possible = [mark for mark in MARKS if mark.startswith(text)]
            open_mark = max(
                (mark for mark in MARKS if text.startswith(mark)), key=len, default=None
            )
            if open_mark is not None and not any(len(mark) > len(open_mark) for mark in possible):
                text_after = text.removeprefix(open_mark)
                self._begin(open_mark)
                self._held = text_after
            elif possible and not is_last:
                return
            else:
                self._phase = "content"
        if self._phase == "reasoning":
            yield from self._reasoned(is_last)
        if self._phase == "content" and self._held:
            yield from self._until_stop("content", is_last)

    def _reasoned(self, is_last: bool) -> Iterator[Piece]:
        """Yields reasoning, up to its end mark if present."""
        assert self._close is not None, "something ends it"
        if self._line and not self._named(is_last):
            return
        before, mark, after = self._held.partition(self._close)
        if not mark:
            yield from self._until_stop("reasoning", is_last, self._close)
            return
        if before:
            yield Piece("reasoning", before)
        self._phase, self._held = "content", after

    def _until_stop(
        self, kind: Literal["reasoning", "content"], is_last: bool, *marks: str
    ) -> Iterator[Piece]:
        """Yields the pending characters, up to a stop string, or up to a possible beginning of a
        stop string or mark."""
        places = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        num_pending = 0 if is_last else _beginning_of(self._held, (*marks, *self._stops))
        num_pending = len(self._held) - min(places) if places else num_pending
        shown, self._held = _cut(self._held, num_pending)
        if places:
            self._phase, self._held = "ended", ""
        if shown:
            yield Piece(kind, shown)

    def _named(self, is_last: bool) -> bool:
        """Takes the line that names the reasoning from the characters that are held; returns
        whether it has come."""
        if self._line.startswith(self._held) and self._held != self._line and not is_last:
            return False
        name = self._line.removesuffix("\n")
        self._held = self._held.removeprefix(name).removeprefix("\n")
        self._line = ""
        return True

    def _of_harmony(self, token: int) -> Iterator[Piece]:
        """Yields what a token of a text in Harmony's format adds."""
        mark = self._harmony.get(token)
        if mark is None and self._channel is None:
            self._head.append(token)
        elif mark is None:
            self._held += self._pieces.add(token)
            yield from self._of_channel(self._taken())
        elif mark == "<|message|>":
            self._channel = self._tokenizer.decode(self._head).split(" ")[0].strip()
            self._head, self._pieces = [], Pieces(self._tokenizer, self._latest)
        else:
            if self._channel is not None:
                self._held += self._pieces.end()
                yield from self._of_channel(self._taken())
            self._head, self._channel = [], None

    def _of_channel(self, text: str) -> Iterator[Piece]:
        if text:
            yield Piece("content" if self._channel == FINAL else "reasoning", text)

    def _taken(self) -> str:
        text, self._held = self._held, ""
        return text


class PlainStream(AnswerStream):
    """The pieces of a plain completion, without reasoning."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        super().__init__(tokenizer, prompt_ids, stops)
        self._phase, self._close = "content", None


def _cut(text: str, kept: int) -> tuple[str, str]:
    """Returns a text without its last characters, and these."""
    return text[: len(text) - kept], text[len(text) - kept :]


def _beginning_of(text: str, strings: Sequence[str]) -> int:
    """Returns how many of a text's last characters may be the beginning of one of some strings."""
    longest = 0
    for string in strings:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
