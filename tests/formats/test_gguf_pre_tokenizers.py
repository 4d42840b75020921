"""Text is split as the patterns say, one after another, held to the package `regex`."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from flexgen_jax.models import tokenizer_json
from flexgen_jax.models.gguf.pre_tokenizers import PRE_TOKENIZERS

regex = pytest.importorskip("regex")

TEXTS = [
    "Hello, WORLD!! don't I'LL we've",
    "  two  spaces\t\ttabs \n\n line\r\n",
    "12345678 3.14 1,000,000 ½ ٣",
    "ÉCOLE école naïve straße e\u0301",
    "你好，世界！123 こんにちは 한국어",
    "Привет, мир! नमस्ते 🚀🌫️",
    "foo_bar(baz[1:2]) a+b=c; // </html> $100",
    "A.B.C. CamelCase HTTPServer x1y22z333 ''s",
    "\u3000wide\u00a0nbsp\u200b   trailing   ",
]


def pieces(text: str, patterns: tuple[str, ...]) -> list[str]:
    """The text, cut at the borders of each pattern's matches in turn."""
    parts = [text]
    for pattern in patterns:
        cut: list[str] = []
        for part in parts:
            end = 0
            for match in regex.finditer(pattern, part):
                cut += [part[end : match.start()], match.group()]
                end = match.end()
            cut.append(part[end:])
        parts = [part for part in cut if part]
    return parts


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_text_is_split_by_the_patterns(name: str) -> None:
    split = PRE_TOKENIZERS[name]
    whole = tokenizer_json.whole(
        tokenizer_json.of_bytes(["a"], [], split.patterns, split.keeps_words), []
    )
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    for text in TEXTS:
        found = [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert found == pieces(text, split.patterns)
