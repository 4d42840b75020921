"""Vocabularies of tiktoken and SentencePiece are read as these libraries read them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.tokenizer_models import KIMI, bytes_of_characters

TEXTS = (
    "Once upon a time, there was a fox; it didn't jump 12345 times.",
    "  two  blanks, tabs\tand\n\nlines\r\n ",
    "Größe, naïve café — 東京 and 漢字かな交じり文 中文English混合",
    "emoji \N{FIRE}\N{SLICE OF PIZZA} and \u0301 combining",
    "WE'LL see: I'm you're HE'D x = y**2 // 3 != 4",
    "",
)
CORPUS = " ".join(TEXTS * 8) + " the quick brown fox jumps over the lazy dog. " * 40


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_sentencepiece(tmp_path: Path, kind: str, is_plain: bool) -> None:
    """With bytes for unknown characters, as LLaMA has it; with and without normalization."""
    spm: Any = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text(CORPUS)
    own = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=360,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.99,
        hard_vocab_limit=False,
        **(own if is_plain else {}),
    )
    theirs = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer(tmp_path, bos_id=1)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, is_whole=True) == ids
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids) == theirs.decode(ids)


def write_tiktoken(folder: Path, ranks: dict[bytes, int]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines))


def ranks_of_corpus(folder: Path) -> dict[bytes, int]:
    """Returns a vocabulary of bytes that was made from the corpus."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([CORPUS], vocab_size=600, min_frequency=2)
    of = bytes_of_characters()
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    return {bytes(of[char] for char in token): number for number, token in enumerate(tokens)}


@pytest.mark.parametrize("name", ["TikTokenTokenizer", "LlamaTokenizer"])
def test_tiktoken(tmp_path: Path, name: str) -> None:
    tiktoken: Any = pytest.importorskip("tiktoken")
    from flexgen_jax.models.tokenizer_json import LLAMA3

    ranks = ranks_of_corpus(tmp_path)
    write_tiktoken(tmp_path, ranks)
    first = len(ranks)
    named = {str(first + 2): {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": name, "added_tokens_decoder": named, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    pattern = KIMI if name == "TikTokenTokenizer" else LLAMA3
    theirs = tiktoken.Encoding(
        name="t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|im_end|>": first + 2}
    )
    ours = Tokenizer(tmp_path, bos_id=first)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == text
    assert ours.encode("a<|im_end|>b") == theirs.encode("a<|im_end|>b", allowed_special="all")
    assert ours.special_id("eos_token") == first + 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.model", b"not a model", "not a SentencePiece model"),
        ("tokenizer.model", b"", "only SentencePiece"),
        ("tiktoken.model", b"IQ== 0\n!! 1", "line 2"),
        ("tiktoken.model", b"IQ== 0\nIg== 2", "not numbered"),
    ],
)
def test_broken_files_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as refused:
        Tokenizer(tmp_path, bos_id=None)
    assert name in str(refused.value)
