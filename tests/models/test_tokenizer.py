"""Conversion of single tokens."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_pieces_of_other_vocabularies(tmp_path: Path) -> None:
    raw = byte_tokenizer()
    raw["model"]["vocab"] |= {"\u2581is": 96, "<0xE4>": 97}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer(tmp_path, bos_id=None)
    assert [tokenizer.piece(n) for n in (96, 97, 69)] == [b" is", b"\xe4", b"a"]
