"""Conversion of single tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax.errors import UserError
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.loading import shipped_model
from flexgen_jax.models.tokenizer import Tokenizer
from tests.helpers.models import byte_tokenizer


def test_pieces_of_bytes_join_to_the_text() -> None:
    tokenizer = Tokenizer(shipped_model(), bos_id=2)
    text = "The people -- na\u00efve, 1776! \u4e16\u754c"
    _, *ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()
    assert tokenizer.piece(2) == b"</s>"
    assert tokenizer.piece(10**6) == b""


def test_a_text_that_is_too_long_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(shipped_model(), bos_id=2)
    longest = max(map(len, tokenizer._tokenizer.get_vocab()))
    fits = "a" * (64 * longest)
    assert tokenizer.encode(fits, max_tokens=64) == tokenizer.encode(fits)
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    monkeypatch.setitem(tokenizer.__dict__, "_longest", longest)
    with pytest.raises(UserError, match=f"{len(fits) + 1} characters; .* context of 64 tok"):
        tokenizer.encode(fits + "a", max_tokens=64)


HOSTILE: dict[str, dict[str, Any]] = {
    "has id 1000000000": {"model": {"vocab": {"zzz": 10**9}}},
    "token 'yyy' has id 1000000001": {"added_tokens": [{"id": 10**9 + 1, "content": "yyy"}]},
    "lengthens text by more than a factor of 64": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20},
                {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 20},
            ],
        }
    },
}


@pytest.mark.parametrize("said", HOSTILE)
def test_tokenizers_that_would_take_all_memory_are_refused(tmp_path: Path, said: str) -> None:
    raw = byte_tokenizer()
    for name, value in HOSTILE[said].items():
        if isinstance(value, list):
            raw[name] += [{**raw[name][0], **each} for each in value]
        elif name == "model":
            raw["model"]["vocab"] |= value["vocab"]
        else:
            raw[name] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=said):
        Tokenizer(tmp_path, bos_id=None)


def test_a_large_number_in_a_token_is_no_id(tmp_path: Path) -> None:
    raw = byte_tokenizer()
    raw["model"]["vocab"] |= {'":1000000000': 96}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert Tokenizer(tmp_path, bos_id=None).piece(96) == b'":1000000000'


def test_a_pattern_that_backtracks_is_an_error(tmp_path: Path) -> None:
    raw = byte_tokenizer()
    raw["pre_tokenizer"]["pattern"] = {"Regex": "(a+)+$"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="cannot split the prompt"):
        Tokenizer(tmp_path, bos_id=None).encode("a" * 400 + "b")


def test_pieces_of_other_vocabularies(tmp_path: Path) -> None:
    raw = byte_tokenizer()
    raw["model"]["vocab"] |= {"\u2581is": 96, "<0xE4>": 97}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer(tmp_path, bos_id=None)
    assert [tokenizer.piece(n) for n in (96, 97, 69)] == [b" is", b"\xe4", b"a"]
