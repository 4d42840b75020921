"""Texts that are JSON of a schema: the allowed next tokens, by the llguidance library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from flexgen_jax.errors import UserError, first_line
from flexgen_jax.models.marks import opened_by
from flexgen_jax.models.tokenizer import Tokenizer

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spelt: on one line, since small models may write blanks without end."""


MAX_DIGITS = 24
"""The most digits in a row of a JSON number, which a small model may write without end; integers of
64 bits have 20, and doubles 17."""

LEXER_FUEL = 200_000
"""Work that a schema's first mask may cost, in the library's units. With its default of 1,000,000,
the pattern ((a{100}){100}){100} takes a second, and each further token a third."""


class Matcher:
    """The text so far, and its allowed next tokens. It is done when nothing may.

    The library does not raise: with a text that breaks the rules, or a schema that is too complex
    for it, a matcher is in error from then on.

    vocabulary: bits of tokens that matter; made: the tokens of the text so far; opened: the mark
    that ends the reasoning before the JSON, None where there is none.
    """

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, generated: Sequence[int], opened: str | None
    ) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._opened = None if opened is None else opened.encode()
        self._reasoning = b""
        self._digits = Digits()
        for token in generated:
            self.take(token)

    def copy(self) -> Matcher:
        """Returns an independent copy of the matcher."""
        duplicate = copy(self)
        duplicate._matcher, duplicate._digits = self._matcher.deep_copy(), copy(self._digits)
        return duplicate

    @property
    def error(self) -> str | None:
        """What went wrong, if something did."""
        return _said(self._matcher) if self._matcher.is_error() else None

    @property
    def is_done(self) -> bool:
        return bool(self._matcher.is_stopped())

    def take(self, token: int) -> None:
        """Appends a token to the text."""
        piece = self._vocabulary.piece(token)
        if self._opened is None:
            self._matcher.consume_token(token)
            self._digits.take(piece)
            return
        self._reasoning = self._reasoning[-len(self._opened) :] + piece  # no more can be the mark's
        if self._opened in self._reasoning:
            self._opened = None

    def allowed(self) -> np.ndarray:
        """Returns the allowed next tokens: bits of uint32 [vocabulary / 32, rounded up], the
        lowest bit first; all after an error, and in reasoning all but the end tokens and those that
        would begin the JSON with the reasoning's mark."""
        words = self._vocabulary.words
        if self._opened is not None:
            forbidden: np.ndarray = self._vocabulary.ends | self._gluing(self._opened)
            return ~forbidden
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[:words]
        if self.error:
            return np.full(words, ~np.uint32(0))
        if self._digits.count < MAX_DIGITS:
            return mask
        shorter = mask & ~self._vocabulary.digits
        return shorter if shorter.any() else mask

    def _gluing(self, mark: bytes) -> np.ndarray:
        """Returns the tokens that would end the mark and go on: after "</think", one of ">{"."""
        rests = (mark[n:] for n in range(len(mark)) if self._reasoning.endswith(mark[:n]))
        bits = np.zeros(self._vocabulary.words, np.uint32)
        for remainder in rests:
            bits |= self._vocabulary.longer_than(remainder)
        return bits


class Digits:
    """Counts the digits at the end of a JSON text that are of a number, not of a string."""

    def __init__(self) -> None:
        self.count = 0
        self._in_string = self._is_escaped = False

    def take(self, piece: bytes) -> None:
        """Appends bytes to the text."""
        for byte in piece:
            if self._in_string:
                self._in_string = self._is_escaped or byte != ord('"')
                self._is_escaped = not self._is_escaped and byte == ord("\\")
            else:
                self._in_string = byte == ord('"')
                self.count = self.count + 1 if byte in b"0123456789" else 0


class Vocabulary:
    """The tokens of a model as bits of uint32 [vocabulary / 32, rounded up], the lowest bit first.

    ends: the end tokens; digits: those that begin with a digit.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self.words = -(-size // 32)
        self.piece = tokenizer.piece
        self._longer: dict[bytes, np.ndarray] = {}
        self.ends = self._bits(eos_ids)
        self._size = size

    @cached_property
    def digits(self) -> np.ndarray:
        return self._bits([n for n in range(self._size) if self.piece(n)[:1].isdigit()])

    def longer_than(self, begin: bytes) -> np.ndarray:
        """Returns the tokens that begin with some bytes, and have others than blanks after them."""
        if begin not in self._longer:
            size = len(begin)
            self._longer[begin] = self._bits(
                [
                    token
                    for token in range(self._size)
                    if (piece := self.piece(token)).startswith(begin) and piece[size:].strip()
                ]
            )
        return self._longer[begin]

    def _bits(self, tokens: Sequence[int]) -> np.ndarray:
        bits = np.zeros(self.words * 32, bool)
        bits[list(tokens)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)


def _said(matcher: Any) -> str:
    """Returns what went wrong with the library's matcher, without the state that follows."""
    return str(matcher.get_error()).partition("\n")[0]


class Grammars:
    """Makes the matchers of a model's texts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._compiled = lru_cache(maxsize=256)(self._compile)

    def check(self, schema: str) -> None:
        """Raises `UserError` for a schema that `matcher` refuses."""
        self._compiled(schema)

    def matcher(self, schema: str, prompt: Sequence[int], generated: Sequence[int]) -> Matcher:
        """Returns the matcher of a text that has the tokens `generated`. schema: a JSON schema,
        itself as JSON; prompt: the tokens before the text, which may begin reasoning. Raises
        `UserError` for an invalid or unsupported schema."""
        opened = opened_by(self._tokenizer, prompt)
        return Matcher(self._compiled(schema).deep_copy(), self._bits, generated, opened)

    def _compile(self, schema: str) -> Any:
        library = _library()
        if not self._eos_ids:
            raise UserError("json_schema needs an end token, and this model has none")
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(schema, COMPACT)
        except ValueError as error:
            raise UserError(f"this json_schema is not supported: {first_line(error)}") from None
        limits = library.LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
        matcher = library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # slow for large patterns: here no running text waits for it
        if matcher.is_error():
            raise UserError(f"this json_schema is not supported: {_said(matcher)}")
        return matcher

    @cached_property
    def _bits(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)

    @cached_property
    def _vocabulary(self) -> Any:
        library = _library()
        wrapper = library.TokenizerWrapper(
            _Pieces(self._tokenizer, self._vocab_size, self._eos_ids)
        )
        return library.LLTokenizer(
            wrapper, self._vocab_size, self._eos_ids, library.LLTokenizer.json_slices()
        )


class _Pieces:
    """A tokenizer as the library wants it: the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        pieces = [tokenizer.piece(token) for token in range(vocab_size)]
        special = {*tokenizer.special_ids, *eos_ids}
        self.tokens = [
            f"<|{token}|>".encode() if token in special or not piece else piece
            for token, piece in enumerate(pieces)
        ]
        self.special_token_ids = [t for t, piece in enumerate(pieces) if t in special or not piece]
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode_within(text)


def schema_text(schema: Mapping[str, Any] | str) -> str:
    """Returns a JSON schema as JSON text; raises `ValueError` unless it is a JSON object."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise ValueError(f"json_schema must be an object, not {schema!r}")
    large_number = next((n for n in _fixed_numbers(schema) if abs(n) >= 1 << 63), None)
    if large_number is not None:
        raise ValueError(f"json_schema has the number {large_number}, which exceeds 64 bits")
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"json_schema is not JSON: {error}") from None


def _fixed_numbers(schema: Any) -> Iterator[int]:
    """Yields the literal integers of a schema, in "const" and "enum"."""
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    while waiting:
        pattern, is_fixed = waiting.pop()
        if isinstance(pattern, Mapping):
            waiting += [(x, is_fixed or key in ("const", "enum")) for key, x in pattern.items()]
        elif isinstance(pattern, list | tuple):
            waiting += [(x, is_fixed) for x in pattern]
        elif is_fixed and isinstance(pattern, int):
            yield pattern


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError("json_schema needs llguidance: pip install llguidance") from None
    return llguidance
