"""An answer that is made token by token, in pieces: reasoning, text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from flexgen_jax.models.marks import HARMONY, REASONING_MARKS, opened_by
from flexgen_jax.models.text_reader import Kind, Piece, Reading, TextReader
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.tool_calls import SPECIAL_MARKS, CallReader, Tools

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The decoding of bytes that do not form a whole character yet."""

MAX_CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8: so many undecodable bytes at the end may become one."""

MAX_PENDING_TOKENS = 16
"""Tokens without a whole character at their end, after which their text is taken as it is."""

RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
"""The tool that a message in Harmony's format calls."""

CONTEXT = 6
"""Tokens before a piece that are decoded with it, since a first word may lose its blank."""


class Pieces:
    """The characters of tokens, one token at a time, without special tokens.

    A token's text is returned once it is final, never half a character. before: preceding tokens;
    without them the first token may lose its leading blank.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Tokens of the context and then of the text, and characters of the text that were returned.
        self._ids = list(before[-CONTEXT:])
        self._num_context, self._num_shown = len(self._ids), 0

    def add(self, token: int) -> str:
        """Returns the characters that are sure now."""
        self._ids.append(token)
        return self._new(is_last=False)

    def end(self) -> str:
        """Returns the characters that were held back."""
        return self._new(is_last=True)

    def _new(self, is_last: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_context])
        text = self._tokenizer.decode(self._ids)[len(before) :]
        num_pending = len(text) - len(text.rstrip(UNFINISHED))
        is_long = len(self._ids) - self._num_context > MAX_PENDING_TOKENS
        held = 0 if is_last or is_long else min(num_pending, MAX_CHARACTER_BYTES)
        new_text = text[self._num_shown : len(text) - held]
        self._num_shown += len(new_text)
        if not held and text:  # what was read is the context of what follows
            self._ids = self._ids[-CONTEXT:]
            self._num_context, self._num_shown = len(self._ids), 0
        return new_text


class AnswerStream:
    """The pieces of an answer, as its tokens come.

    prompt_ids: of the prompt, which may begin the reasoning; stops: strings at which the text after
    the reasoning ends; tools: those that it may call, None for none. Characters that may be the
    beginning of a mark or a stop string are held back until it is known. has_reasoning,
    has_content: whether the part has begun.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        tools: Tools | None = None,
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._has_tools = tools is not None
        self._latest = list(prompt_ids[-CONTEXT:])
        self._pieces = Pieces(tokenizer, self._latest)
        marks = {
            tokenizer.token_id(mark): mark
            for mark in (*REASONING_MARKS, *REASONING_MARKS.values(), *HARMONY, *SPECIAL_MARKS)
        }
        self._special = {n: marks[n] for n in marks if n is not None and n in tokenizer.special_ids}
        max_calls = None if tools is None else tools.max_calls
        self._text = TextReader(self._special.values(), max_calls)
        self._calls = CallReader(self._text, tools or Tools({}))
        self.has_reasoning = self.has_content = False
        self._close = opened_by(tokenizer, prompt_ids)
        self._reading = self._answer()

    def add(self, token: int) -> list[Piece]:
        """Returns the pieces that are sure with one more token."""
        self._latest = [*self._latest, token][-CONTEXT:]
        mark = self._special.get(token)
        if mark is None:
            return self.add_text(self._pieces.add(token))
        text = self._pieces.end()
        self._pieces = Pieces(self._tokenizer, self._latest)
        return self.add_text(text) + self.add_text(self._text.key(mark))

    def add_text(self, text: str) -> list[Piece]:
        """Returns the pieces that are sure with more characters."""
        self._text.buffer += text
        return self._advance()

    def end(self) -> list[Piece]:
        """Returns the pieces that were held back, at the end of the answer."""
        self._text.is_last = True
        return self.add_text(self._pieces.end())

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._text.pieces = self._text.pieces, []
        return pieces

    def _answer(self) -> Reading[None]:
        text = self._text
        if {"<|channel|>", "<|message|>"} <= {*self._special.values()}:
            yield from text.wait(lambda: not "to=".startswith(text.buffer.lstrip()))
            if self._is_marked or text.buffer.lstrip().startswith("to="):
                yield from self._harmony()
                return
        if self._close is None:
            self._close = yield from self._opening_mark()
        if self._close is not None:
            self.has_reasoning = True
            special = [mark for mark in self._openers if text.is_special(mark)]
            mark = yield from text.emit_until("reasoning", (self._close, *special))
            if mark is None:
                return
            if mark != self._close:  # the model forgot to end its reasoning
                yield from self._try(self._calls.openers[mark], mark)
        yield from self._content()

    @property
    def _is_marked(self) -> bool:
        return self._text.buffer.lstrip().startswith(
            (self._text.key("<|channel|>"), self._text.key("<|start|>"))
        )

    @property
    def _openers(self) -> tuple[str, ...]:
        return tuple(self._calls.openers) if self._has_tools else ()

    def _opening_mark(self) -> Reading[str | None]:
        """Reads the mark that begins reasoning; returns its end mark, None without one."""
        text = self._text

        def is_known() -> bool:
            begin = text.buffer.lstrip()
            longer = [key for key in map(text.key, REASONING_MARKS) if len(key) > len(begin)]
            return bool(begin) and not any(key.startswith(begin) for key in longer)

        yield from text.wait(is_known)
        begin = text.buffer.lstrip()
        marks = [mark for mark in REASONING_MARKS if begin.startswith(text.key(mark))]
        if not marks:
            return None
        mark = max(marks, key=len)
        text.take(len(text.buffer) - len(begin))
        text.take_mark(mark)
        if mark.endswith("thought"):
            yield from text.wait(lambda: bool(text.buffer))
            text.take(int(text.buffer.startswith("\n")))
        return REASONING_MARKS[mark]

    def _content(self) -> Reading[None]:
        """Reads text and calls up to the end."""
        self.has_content = True
        if self._has_tools:
            yield from self._try(self._calls.bare, "")
        while True:
            mark = yield from self._text.emit_until(
                "content", (*self._openers, *self._stops), drops_blanks=self._has_tools
            )
            if mark is None or mark in self._stops:
                return
            yield from self._try(self._calls.openers[mark], mark)

    def _try(self, read: Callable[[], Reading[bool]], mark: str) -> Reading[None]:
        """Reads calls after a mark; if there are none, the mark is text."""
        text = self._text
        text.begin_trial()
        blanks, text.dropped_blanks = text.dropped_blanks, ""
        if (yield from read()):
            yield from text.skip(" \n\r\t")
            return
        text.end_trial()
        text.emit("content", blanks + ("" if text.is_special(mark) else mark))

    def _harmony(self) -> Reading[None]:
        """Reads messages of Harmony's format: <|start|>assistant<|channel|>analysis<|message|>It
        asks ...<|end|>. A message to a tool is a call. The others are content on the channels
        "final" and "commentary", and reasoning on other ones."""
        text, ends = self._text, ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
        self.has_reasoning = True
        while True:
            header, mark = yield from text.until("<|message|>")
            if mark is None:
                return
            header = header.replace(text.key("<|constrain|>"), " ")
            recipient = RECIPIENT.search(header)
            channel = header.rpartition(text.key("<|channel|>"))[2].split()[:1]
            if recipient is not None:
                text.call(recipient[1])
                mark = yield from text.emit_until("arguments", ends)
            else:
                is_content = channel == ["final"] or (
                    channel == ["commentary"] and "to=" not in header
                )
                self.has_content |= is_content
                kind: Kind = "content" if is_content else "reasoning"
                stops = self._stops if is_content else ()
                mark = yield from text.emit_until(kind, (*ends, *stops))
            if mark is None or mark in self._stops:
                return
            if mark == "<|channel|>":
                text.put_back(mark)


class PlainStream(AnswerStream):
    """The pieces of a completion, without reasoning and calls."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        super().__init__(tokenizer, prompt_ids, stops)
        self._reading = self._content()
