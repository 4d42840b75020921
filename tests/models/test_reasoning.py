"""Texts of several channels, as gpt-oss writes them."""

from __future__ import annotations

import json

import pytest

from flexgen_jax.models.reasoning import HARMONY, Reasoning, split_reasoning
from flexgen_jax.models.tokenizer import Tokenizer
from tests.helpers.models import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder, content = tmp_path_factory.mktemp("harmony"), byte_tokenizer()
    content["added_tokens"] += [
        {
            "id": 1000 + number,
            "content": mark,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, mark in enumerate(HARMONY)
    ]
    content["model"]["vocab"] |= {mark: 1000 + n for n, mark in enumerate(HARMONY)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text("{}")
    return Tokenizer(folder, None)


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
    ],
)
def test_channels_are_apart(tokenizer: Tokenizer, written: str, expected: Reasoning | None) -> None:
    ids = tokenizer.encode(written, is_whole=True)
    assert split_reasoning(tokenizer, [], ids, tokenizer.decode(ids)) == expected
