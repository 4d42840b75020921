"""Texts in pieces: joined, they are what the whole text has, and no piece is half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.models.answer_stream import AnswerStream
from flexgen_jax.models.loading import shipped_model
from flexgen_jax.models.marks import HARMONY
from flexgen_jax.models.reasoning import split_reasoning
from flexgen_jax.models.text_reader import Piece
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.requests.stop_strings import Texts
from tests.helpers.cases import examples
from tests.helpers.models import tokenizer_with

SPECIAL = (*HARMONY, "<think>", "</think>", "<|channel>", "<channel|>")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One of bytes, some of whose marks are special tokens and others plain ones."""
    folder, plain = tmp_path_factory.mktemp("marks"), ("<think>", "</think>")
    return tokenizer_with(folder, SPECIAL, plain)


def joined(pieces: Sequence[Piece]) -> tuple[str, str]:
    """The reasoning and the answer."""
    both = {"reasoning": "", "content": ""}
    for piece in pieces:
        assert piece.text
        assert "\N{REPLACEMENT CHARACTER}" not in piece.text
        both[piece.kind] += piece.text
    return both["reasoning"], both["content"]


def streamed(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: str = "", stops: Sequence[str] = ()
) -> tuple[str, str]:
    stream = AnswerStream(tokenizer, tokenizer.encode(prompt, is_whole=True), stops)
    return joined([*(piece for token in ids for piece in stream.add(token)), *stream.end()])


PARTS = ["So", " it", "<think>", "</think>", "<thi", "</", "[THINK]", "[/THINK]", "[", "é", "Hi"]


@examples(200)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), begun=st.booleans())
def test_pieces_are_what_the_whole_text_has(
    tokenizer: Tokenizer, parts: list[str], begun: bool
) -> None:
    prompt = "ask<think>" if begun else "ask"
    ids = tokenizer.encode("".join(parts), is_whole=True)
    text = tokenizer.decode(ids)
    whole = split_reasoning(tokenizer, tokenizer.encode(prompt, is_whole=True), ids, text)
    wanted = ("", text) if whole is None else (whole.reasoning, whole.content or "")
    assert streamed(tokenizer, ids, prompt) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        "<|channel|>final<|message|>Hi<|return|>",
        "<|channel|>analysis<|message|>So",
        "<|channel>thought\nSo.<channel|>Hi",
        "<|channel>thought\nSo",
    ],
)
def test_channels_are_apart(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, is_whole=True)
    whole = split_reasoning(tokenizer, [], ids, tokenizer.decode(ids))
    assert whole is not None
    assert streamed(tokenizer, ids) == (whole.reasoning, whole.content or "")


@examples(40)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_characters_come_whole(text: str) -> None:
    """Of a vocabulary of bytes, where most characters take several tokens."""
    tokenizer = Tokenizer(shipped_model(), None)
    ids = tokenizer.encode(text, is_whole=True)
    wanted = tokenizer.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in wanted and not wanted.lstrip().startswith(("<", "[")):
        assert streamed(tokenizer, ids) == ("", wanted)


def test_what_may_be_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = AnswerStream(tokenizer, stops=["END"])
    made = []
    for token in tokenizer.encode("aEbENx", is_whole=True):
        made.append("".join(piece.text for piece in stream.add(token)))
    assert made == ["a", "", "Eb", "", "", "ENx"]


def test_nothing_comes_after_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a END b", is_whole=True)
    assert streamed(tokenizer, ids, stops=["END"]) == ("", "a ")
    assert streamed(tokenizer, ids, "<think>", stops=["END"]) == ("a END b", "")


@pytest.mark.parametrize("size", [1, 3, 99])
def test_the_name_of_reasoning_is_left_out_of_plain_marks(size: int) -> None:
    """Where marks are no tokens, and in whatever pieces they come."""
    text = "<|channel>thought\nSo.<channel|>Hi"
    stream = AnswerStream(Tokenizer(shipped_model(), None))
    made = [x for n in range(0, len(text), size) for x in stream.add_text(text[n : n + size])]
    assert joined([*made, *stream.end()]) == ("So.", "Hi")


def test_a_stop_string_may_be_a_special_token(tokenizer: Tokenizer) -> None:
    """Which texts do not have; plain tokens are found in the text."""
    texts = Texts(tokenizer)
    ids = tokenizer.encode("ab<|end|>", is_whole=True)
    assert texts.is_special_stop(ids, ["x", "<|end|>"])
    assert not texts.is_special_stop(ids, ["<|call|>"])
    assert not texts.is_special_stop(ids, [])
    assert not texts.is_special_stop(ids[:2], ["b"])
