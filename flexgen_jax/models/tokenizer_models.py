"""Vocabularies in the files of tiktoken and of SentencePiece, for folders without a
tokenizer.json."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexgen_jax.models import tokenizer_json
from flexgen_jax.models.folder import CheckpointError, read_object
from flexgen_jax.models.tokenizer_json import LLAMA3, NORMAL

TIKTOKEN, SENTENCEPIECE = "tiktoken.model", "tokenizer.model"
"""Names of the files."""

KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi K2 splits text, which its folder says in code only."""

PATTERNS = {"TikTokenTokenizer": KIMI}
"""How text is split, by the "tokenizer_class" of a folder; LLaMA 3's is usual."""

RESERVED = 256
"""Numbers after tiktoken's vocabulary that are read as one token each, named or not."""


def tiktoken_json(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer.json of a folder's tiktoken.model; config: its tokenizer_config.json.

    A pair is joined if its bytes are a token, and first the pair of the lowest number, so that
    every way to divide a token into two others is a merge.
    """
    ranks = _ranks(folder / TIKTOKEN)
    named = {int(n): token for n, token in (config.get("added_tokens_decoder") or {}).items()}
    merges = []
    for token, rank in ranks.items():
        pairs = [(token[:n], token[n:]) for n in range(1, len(token))]
        known_pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known_pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(rank, _text(left), _text(right)) for left, right in known_pairs]
    merges.sort(key=lambda merge: merge[0])
    first = len(ranks)
    special = []
    for number in range(first, max([first + RESERVED, *(n + 1 for n in named)])):
        token = named.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        special.append((number, str(token["content"]), bool(token.get("special", True))))
    model_parts = tokenizer_json.of_bytes(
        [_text(token) for token in sorted(ranks, key=lambda token: ranks[token])],
        [merge[1:] for merge in merges],
        (PATTERNS.get(str(config.get("tokenizer_class")), LLAMA3),),
        repeats=True,
    )
    return tokenizer_json.whole(model_parts, tokenizer_json.added(special))


def _ranks(path: Path) -> dict[bytes, int]:
    """Returns the numbers of tiktoken's tokens, by their bytes."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise CheckpointError(
                f"{path}, line {number + 1}: not a token in base64 and its number"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: its tokens are not numbered from 0")
    return ranks


def _text(token: bytes) -> str:
    """Returns bytes as the characters that stand for them in vocabularies of bytes."""
    return "".join(_CHARACTERS[byte] for byte in token)


def bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character in byte-level vocabularies: printable bytes map to
    themselves, other bytes to characters from 256 on, as in GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(unprintable)}


_CHARACTERS = {byte: char for char, byte in bytes_of_characters().items()}


# SentencePiece's file is a message of Protocol Buffers: fields with a number and a value each.

UNIGRAM, BPE = 1, 2
"""Its kinds of models."""


def sentencepiece_json(folder: Path) -> dict[str, Any]:
    """Returns the tokenizer.json of a folder's tokenizer.model."""
    path = folder / SENTENCEPIECE
    tokens, types, scores = list[str](), list[int](), list[float]()
    model_type, begins, trims, table = UNIGRAM, True, True, b""
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                tokens.append(piece.get(1, b"").decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                types.append(piece.get(3, NORMAL))
            elif number == 2:
                model_type = dict(_fields(value)).get(3, UNIGRAM)
            elif number == 3:
                normalizer = dict(_fields(value))
                begins, trims = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
                table = normalizer.get(2, b"")
    except (ValueError, LookupError, struct.error, AttributeError, TypeError):
        raise CheckpointError(f"{path} is not a SentencePiece model") from None
    if not tokens or model_type not in (UNIGRAM, BPE):
        raise CheckpointError(f"{path}: only SentencePiece's unigram and BPE models are supported")
    make = tokenizer_json.of_pieces if model_type == BPE else tokenizer_json.of_unigrams
    model_parts = make(tokens, types, scores, begins)
    steps = model_parts["normalizer"]["normalizers"]
    if trims:  # blanks at both ends, and all but one between words
        collapse = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        steps[:0] = [{"type": "Strip", "strip_left": True, "strip_right": True}, collapse]
    if table:
        folded = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
        steps.insert(0, folded)
    return tokenizer_json.whole(model_parts, tokenizer_json.added_by_type(tokens, types))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a message: integers as such, anything else as bytes."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, offset = _varint(data, offset)
            yield number, value
            continue
        size, offset = _varint(data, offset) if wire == 2 else ({1: 8, 5: 4}[wire], offset)
        if offset + size > len(data):
            raise ValueError("the message is cut off")
        yield number, data[offset : offset + size]
        offset += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an integer of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def folder_json(folder: Path) -> dict[str, Any] | None:
    """Returns the tokenizer.json of a folder with a tiktoken or SentencePiece file; None if it has
    none."""
    if (folder / TIKTOKEN).is_file():
        return tiktoken_json(folder, read_object(folder / "tokenizer_config.json"))
    return sentencepiece_json(folder) if (folder / SENTENCEPIECE).is_file() else None
