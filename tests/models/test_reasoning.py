"""Texts of several channels, as gpt-oss and Gemma 4 write them."""

from __future__ import annotations

import pytest

from flexgen_jax.models.marks import HARMONY
from flexgen_jax.models.reasoning import Answer, split_reasoning
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.tool_calls import ToolCall
from tests.helpers.models import tokenizer_with

MARKS = (*HARMONY, "<|channel>", "<channel|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("harmony"), MARKS)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Hi<|return|>",
            Answer("So.", "Hi"),
        ),
        ("<|channel|>final<|message|>Hi", Answer("", "Hi")),
        ("<|channel|>analysis<|message|>So", Answer("So", None)),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.x <|constrain|>json<|message|>x<|call|>",
            Answer("a", None, (ToolCall("x", "x"),)),
        ),
        ("Hi", None),
        ("<|channel>thought\nSo.<channel|>Hi", Answer("So.", "Hi")),
        ("<|channel>thought\nSo", Answer("So", None)),
    ],
)
def test_channels_are_apart(tokenizer: Tokenizer, written: str, expected: Answer | None) -> None:
    ids = tokenizer.encode(written, is_whole=True)
    assert split_reasoning(tokenizer, [], ids, tokenizer.decode(ids)) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("model<|channel>thought", Answer("So.", "Hi")),
        ("model<|channel>thought<channel|>", None),
    ],
)
def test_a_prompt_may_begin_the_reasoning(
    tokenizer: Tokenizer, prompt: str, expected: Answer | None
) -> None:
    """Or end it, where the user asks for none."""
    given = tokenizer.encode(prompt, is_whole=True)
    ids = tokenizer.encode("So.<channel|>Hi" if expected else "Hi", is_whole=True)
    assert split_reasoning(tokenizer, given, ids, tokenizer.decode(ids)) == expected
