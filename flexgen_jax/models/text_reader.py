"""Reads a text that comes in pieces: coroutines that wait for more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from math import inf
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A coroutine that yields where it needs more text."""

Kind = Literal["reasoning", "content", "call", "arguments"]

NONCHARACTERS = [chr(n) for n in range(0xFDD0, 0xFDF0)] + [
    chr(plane << 16 | low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF)
]
"""Code points that no text has: each stands for a special token."""


class Piece(NamedTuple):
    """Some characters of an answer. A "call" has a tool's name, and perhaps the model's id of the
    call; its "arguments" follow."""

    kind: Kind
    text: str
    call_id: str = ""


class TextReader:
    """A text, of which the beginning is read and the end is still to come.

    Marks that are special tokens, which texts do not have, are single characters here. Functions
    take marks by their names.

    buffer: the text that was not read yet; is_last: whether no more comes; pieces: the answer so
    far. special: the marks that are special tokens of the vocabulary. max_calls: further calls are
    left out.
    """

    def __init__(self, special: Iterable[str] = (), max_calls: int | None = None) -> None:
        self.buffer, self.is_last = "", False
        self.pieces: list[Piece] = []
        self._num_calls, self._max_calls = 0, max_calls
        self._atoms = dict(zip(sorted(special, key=len, reverse=True), NONCHARACTERS, strict=False))
        self._hidden = dict.fromkeys(map(ord, self._atoms.values()))
        self._patterns: dict[str, re.Pattern[str]] = {}
        # Text that was read since `begin_trial`, and that was put back before it.
        self._tried, self._put_back = "", ""
        # Blanks that `emit_until` left out before the latest mark.
        self.dropped_blanks = ""

    def key(self, mark: str) -> str:
        """Returns a mark as the buffer has it."""
        for name, atom in self._atoms.items():
            mark = mark.replace(name, atom)
        return mark

    def is_special(self, mark: str) -> bool:
        return mark in self._atoms

    # Writing

    def emit(self, kind: Kind, text: str, call_id: str = "") -> None:
        """Adds a piece, without special tokens."""
        text = text.translate(self._hidden)
        if kind in ("call", "arguments") and self._num_calls > (self._max_calls or inf):
            return
        if text:
            self.pieces.append(Piece(kind, text, call_id))

    def call(self, name: str, call_id: str = "") -> None:
        self._num_calls += 1
        self.emit("call", name, call_id)

    def arguments(self, text: str) -> None:
        self.emit("arguments", text)

    # Reading

    def take(self, size: int) -> str:
        """Returns the next characters, and removes them from the buffer."""
        text, self.buffer = self.buffer[:size], self.buffer[size:]
        self._tried += text
        return text

    def put_back(self, mark: str) -> None:
        """Puts a mark that was just read before the buffer again."""
        self._put_back = self.key(mark)
        self.buffer = self._put_back + self.buffer

    def begin_trial(self) -> None:
        """Begins to read text that `end_trial` may put back."""
        self._tried = self._put_back = ""

    def end_trial(self) -> None:
        """Puts back the text that was read since `begin_trial`."""
        self.buffer = (self._tried + self.buffer).removeprefix(self._put_back)
        self._tried = ""

    def take_mark(self, mark: str) -> None:
        self.take(len(self.key(mark)))

    def wait(self, is_ready: Callable[[], bool]) -> Reading[None]:
        """Waits until a condition holds, or for the text's end."""
        while not is_ready() and not self.is_last:
            yield

    def starts(self, *marks: str) -> bool:
        return self.buffer.startswith(tuple(map(self.key, marks)))

    def may_begin(self, *marks: str) -> bool:
        """Returns whether the buffer is the beginning of a mark, or begins with one."""
        keys = [self.key(mark) for mark in marks]
        return any(key.startswith(self.buffer) or self.buffer.startswith(key) for key in keys)

    def has_any(self, *marks: str) -> bool:
        return any(self.key(mark) in self.buffer for mark in marks)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return self._compiled(pattern).match(self.buffer)

    def find_last(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """Returns the match of a pattern at a text's end."""
        return re.search(f"(?:{self._compiled(pattern).pattern})$", text)

    def _compiled(self, pattern: re.Pattern[str]) -> re.Pattern[str]:
        """Returns a pattern with marks as the buffer has them."""
        if pattern.pattern not in self._patterns:
            self._patterns[pattern.pattern] = re.compile(self.key(pattern.pattern))
        return self._patterns[pattern.pattern]

    def peek(self, *marks: str) -> tuple[str, str | None, int]:
        """Returns the text before the first of the marks, that mark, and the size of both; all of
        the text and None without one."""
        places = [(self.buffer.find(self.key(mark)), -len(mark), mark) for mark in marks]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is None:
            return self.buffer, None, len(self.buffer)
        begin, _, mark = found
        return self.buffer[:begin], mark, begin + len(self.key(mark))

    def until(self, *marks: str) -> Reading[tuple[str, str | None]]:
        """Reads up to and past the first of the marks; returns the text before it, and the mark,
        None at the end."""
        yield from self.wait(lambda: self.has_any(*marks) and not self._may_grow(marks))
        text, mark, size = self.peek(*marks)
        self.take(size)
        return text, mark

    def _may_grow(self, marks: Sequence[str]) -> bool:
        """Returns whether the first mark may be the beginning of a longer one."""
        _, mark, size = self.peek(*marks)
        found = "" if mark is None else self.key(mark)
        rest = self.buffer[size - len(found) :]
        return not self.is_last and any(
            len(key) > len(rest) and key.startswith(rest) for key in map(self.key, marks)
        )

    def emit_until(
        self, kind: Kind, marks: Sequence[str], drops_blanks: bool = False
    ) -> Reading[str | None]:
        """Emits text up to the first of the marks, which is read; returns it, None at the end.

        Text that may be the beginning of a mark is held back. drops_blanks: whether the blanks
        before a mark are dropped.
        """
        keys = [self.key(mark) for mark in marks]
        while True:
            text, mark, size = self.peek(*marks)
            if mark is not None and not self._may_grow(marks):
                self.take(size)
                shown = text.rstrip() if drops_blanks else text
                self.dropped_blanks = text[len(shown) :]
                self.emit(kind, shown)
                return mark
            held = 0 if self.is_last else _beginning_of(self.buffer, keys)
            if mark is not None:
                held = len(self.buffer) - len(text)
            if drops_blanks and not self.is_last:
                sure = self.buffer[: len(self.buffer) - held]
                held += len(sure) - len(sure.rstrip())
            self.emit(kind, self.take(len(self.buffer) - held))
            if self.is_last:
                return None
            yield

    def skip(self, characters: str) -> Reading[None]:
        """Skips some characters; waits for another one."""
        while True:
            self.take(len(self.buffer) - len(self.buffer.lstrip(characters)))
            if self.buffer or self.is_last:
                return
            yield

    def skip_past(self, mark: str) -> Reading[None]:
        """Skips a mark that follows, perhaps after blanks."""
        yield from self.skip(" \n\r\t")
        yield from self.wait(lambda: self.starts(mark) or not self.may_begin(mark))
        if self.starts(mark):
            self.take_mark(mark)


def _beginning_of(text: str, strings: Sequence[str]) -> int:
    """Returns how many of a text's last characters may be the beginning of one of some strings."""
    longest = 0
    for string in strings:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
