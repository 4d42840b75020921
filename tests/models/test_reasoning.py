"""Texts of several channels, as gpt-oss and Gemma 4 write them."""

from __future__ import annotations

import pytest

from flexgen_jax.models.reasoning import HARMONY, Reasoning, split_reasoning
from flexgen_jax.models.tokenizer import Tokenizer
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
            Reasoning("So.", "Hi"),
        ),
        ("<|channel|>final<|message|>Hi", Reasoning("", "Hi")),
        ("<|channel|>analysis<|message|>So", Reasoning("So", None)),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.x <|constrain|>json<|message|>x<|call|>",
            Reasoning("ax", None),
        ),
        ("Hi", None),
        ("<|channel>thought\nSo.<channel|>Hi", Reasoning("So.", "Hi")),
        ("<|channel>thought\nSo", Reasoning("So", None)),
    ],
)
def test_channels_are_apart(tokenizer: Tokenizer, written: str, expected: Reasoning | None) -> None:
    ids = tokenizer.encode(written, is_whole=True)
    assert split_reasoning(tokenizer, [], ids, tokenizer.decode(ids)) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("model<|channel>thought", Reasoning("So.", "Hi")),
        ("model<|channel>thought<channel|>", None),
    ],
)
def test_a_prompt_may_begin_the_reasoning(
    tokenizer: Tokenizer, prompt: str, expected: Reasoning | None
) -> None:
    """Or end it, where the user asks for none."""
    given = tokenizer.encode(prompt, is_whole=True)
    ids = tokenizer.encode("So.<channel|>Hi" if expected else "Hi", is_whole=True)
    assert split_reasoning(tokenizer, given, ids, tokenizer.decode(ids)) == expected
