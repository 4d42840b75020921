"""Vocabularies as the tokenizer.json of a Hugging Face folder, for files that have them in another
form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""SentencePiece's types of tokens."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How LLaMA 3 splits text."""


def whole(parts: dict[str, Any], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a tokenizer.json of its parts and the tokens that are read as one."""
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def added(tokens: Iterable[tuple[int, str, bool]]) -> list[dict[str, Any]]:
    """Returns tokens that are read as one, from their numbers, texts, and whether they stand for no
    text."""
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": is_special,
        }
        for number, token, is_special in tokens
    ]


def added_by_type(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the tokens of a vocabulary that are read as one, by their types."""
    return added(
        (number, token, token_type != USER_DEFINED)
        for number, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in (CONTROL, USER_DEFINED) or (token_type == UNKNOWN and token)
    )


def of_bytes(
    tokens: Sequence[str],
    merges: Sequence[Sequence[str]],
    patterns: Sequence[str],
    repeats: bool,
) -> dict[str, Any]:
    """Returns the parts for a vocabulary of bytes.

    patterns: how text is split, one after another. repeats: whether a word that is a token is one,
    whatever its merges.
    """
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in patterns
    ]
    steps = [*splits, {**by_bytes, "use_regex": False}]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {**by_bytes, "use_regex": True},
        "decoder": {**by_bytes, "use_regex": True},
        "model": _bpe(
            {token: number for number, token in enumerate(tokens)}, merges, repeats=repeats
        ),
    }


def of_pieces(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], begins: bool
) -> dict[str, Any]:
    """Returns the parts for SentencePiece's vocabulary, as pairs that are joined: merges with
    higher scores first. begins: whether text gets a blank before it."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type not in (NORMAL, USER_DEFINED):
            continue
        pairs = [(token[:n], token[n:]) for n in range(1, len(token))]
        known_pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known_pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(float(scores[vocabulary[token]]), pair) for pair in known_pairs]
    merges.sort(key=lambda merge: -merge[0])
    return of_merged_pieces(tokens, types, [pair for _, pair in merges], begins)


def of_merged_pieces(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[Sequence[str]], begins: bool
) -> dict[str, Any]:
    """Returns the parts for a vocabulary of characters, and of bytes for all others; see
    `of_pieces`."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = [
        token for token, token_type in zip(tokens, types, strict=True) if token_type == UNKNOWN
    ]
    model = _bpe(vocabulary, merges, unknown[0] if unknown else None)
    return {**_with_blanks(begins), "model": {**model, "fuse_unk": True, "byte_fallback": True}}


def _bpe(
    vocabulary: dict[str, int],
    merges: Sequence[Sequence[str]],
    unknown: str | None = None,
    repeats: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": repeats,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in merges],
    }


def of_unigrams(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], begins: bool
) -> dict[str, Any]:
    """Returns the parts for SentencePiece's vocabulary of likely pieces; see `of_pieces`."""
    model = {
        "type": "Unigram",
        "unk_id": next((n for n, token_type in enumerate(types) if token_type == UNKNOWN), None),
        "vocab": [[token, float(score)] for token, score in zip(tokens, scores, strict=True)],
        "byte_fallback": BYTE in types,
    }
    return {**_with_blanks(begins), "model": model}


def _with_blanks(begins: bool) -> dict[str, Any]:
    """Returns the parts that write blanks as SentencePiece does."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, space] if begins else [space]
    back = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": back},
    }
