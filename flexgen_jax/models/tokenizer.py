"""Conversion of text to token ids and back, with the files of a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, ByteLevelBPETokenizer
from tokenizers import Tokenizer as FastTokenizer

from flexgen_jax.errors import TooLongError
from flexgen_jax.models.folder import CheckpointError, read_object
from flexgen_jax.models.special_tokens import CONFIG, SpecialTokens, read_special_tokens
from flexgen_jax.models.tokenizer_models import (
    SENTENCEPIECE,
    TIKTOKEN,
    bytes_of_characters,
    folder_json,
)
from flexgen_jax.models.weight_source import digest

BEFORE = "\x02"
"""A prefix for encoding a text as the continuation of another."""

MIN_TOKEN_CHARACTERS = 8
"""A text with fewer characters for each token of the context is encoded without looking for the
longest token."""

MAX_GROWTH = 64
"""A normalizer or decoder may make a text this many times as long."""

LARGE_ID, MAX_ID = re.compile(rb"[:,\[]\s*\d{8,}"), 10**7
"""A pattern for token ids in tokenizer.json that may be too large; and ids below which all are."""

CONTEXT = 8
"""Tokens before a text that matter to how it is decoded."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library.

    A prompt gets the special tokens that the model's folder asks for: by the post-processor of
    tokenizer.json, or by `add_bos_token` for GPT-2's two files, as in transformers 5. special: the
    folder's special tokens; special_ids: those of tokens that stand for no text.
    """

    def __init__(self, folder: Path, bos_id: int | None) -> None:
        self._tokenizer = _load(folder)
        self.special = read_special_tokens(folder)
        _add(self._tokenizer, self.special)
        if read_object(folder / CONFIG).get("split_special_tokens"):
            self._tokenizer.encode_special_tokens = True
        marked = self._tokenizer.get_added_tokens_decoder().items()
        self.special_ids = {number for number, token in marked if token.special}
        self._bos_id = bos_id if _wants_bos(folder) else None

    def special_id(self, name: str) -> int | None:
        """Returns the id of the special token with a role, such as "eos_token"; None without
        one."""
        text = self.special.text(name)
        return None if text is None else self.token_id(text)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token of the vocabulary, None if it has none of this name."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    @property
    def fingerprint(self) -> str:
        """Name of this tokenizer, different from those of tokenizers that encode or decode
        differently."""
        return digest(self._tokenizer.to_str(), self._bos_id, sorted(self.special_ids))

    def encode(self, text: str, is_whole: bool = False, max_tokens: int | None = None) -> list[int]:
        """Returns the prompt's token ids; raises `CheckpointError` for text that is not Unicode.

        is_whole: whether the text has its special tokens already, as a chat template makes them. A
        text that begins with the beginning token gets no second one in any case. max_tokens: of the
        model's context; a text that has too many bytes for it is refused before it is encoded.
        """
        if max_tokens is not None and len(text) > MIN_TOKEN_CHARACTERS * max_tokens:
            longest = max_tokens * self._longest
            if len(text) > longest:
                message = f"the prompt has {len(text)} characters; the model's context of "
                message += f"{max_tokens} tokens holds at most {longest}"
                raise TooLongError(message, len(text) // self._longest, max_tokens)
        ids = self._encoded(text, adds_special=not is_whole)
        if is_whole:
            return ids
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        if len(ids) > 1 and ids[0] == ids[1] == self._begin_id:
            own_ids = self._encoded(text, adds_special=False)
            return ids[1:] if own_ids[:1] == [self._begin_id] else ids
        return ids

    def _encoded(self, text: str, adds_special: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=adds_special).ids)
        except TypeError:
            raise CheckpointError(f"the prompt {text[:50]!r} is not valid Unicode text") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which is no `Exception`
                raise
            raise CheckpointError(f"the tokenizer cannot split the prompt: {error}") from None

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @cached_property
    def _begin_id(self) -> int | None:
        """The special token that the tokenizer puts before every prompt, None without one."""
        ids = self._tokenizer.encode("", add_special_tokens=True).ids
        return ids[0] if ids and ids[0] in self.special_ids else None

    def encode_within(self, text: str) -> list[int]:
        """Returns the token ids of a text that follows on another: SentencePiece's vocabularies put
        a blank before one that does not."""
        before = self.encode(BEFORE, is_whole=True)
        ids = self.encode(BEFORE + text, is_whole=True)
        is_apart = ids[: len(before)] == before
        return ids[len(before) :] if is_apart else self.encode(text, is_whole=True)

    def decode(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text of token ids, without special tokens. before: the tokens that it follows
        on, which matter to SentencePiece's vocabularies: a text has no blank before its first
        word."""
        visible_ids = [int(i) for i in ids if int(i) not in self.special_ids]
        if not before or self._is_by_bytes:
            return str(self._tokenizer.decode(visible_ids, skip_special_tokens=True))
        context = [int(i) for i in before[-CONTEXT:] if int(i) not in self.special_ids]
        first, whole = (
            str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
            for token_ids in (context, [*context, *visible_ids])
        )
        if whole.startswith(first):
            return whole[len(first) :]
        return str(self._tokenizer.decode(visible_ids, skip_special_tokens=True))

    @cached_property
    def _is_by_bytes(self) -> bool:
        """Whether the vocabulary is of bytes; to find it takes long for a large one."""
        return '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for within a text, a part of a character
        perhaps."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_by_bytes and all(char in _BYTES for char in token):
            return bytes(_BYTES[char] for char in token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()


_BYTES = bytes_of_characters()


def _load(folder: Path) -> FastTokenizer:
    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if whole.is_file():
            _check_ids(whole)
            tokenizer = FastTokenizer.from_file(str(whole))
            for component in (tokenizer.normalizer, tokenizer.decoder):
                if (
                    component is not None
                    and _growth(json.loads(component.__getstate__())) > MAX_GROWTH
                ):
                    raise CheckpointError(
                        f"{whole}: {type(component).__name__} lengthens text by more than a factor "
                        f"of {MAX_GROWTH}"
                    )
            # The file may ask for truncation or padding, as in training; a prompt needs neither.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer
        if vocab.is_file() and merges.is_file():
            # What OPT repositories ship: GPT-2's byte-level BPE, in two files.
            config = read_object(folder / CONFIG)
            pair: FastTokenizer = ByteLevelBPETokenizer(
                str(vocab),
                str(merges),
                add_prefix_space=bool(config.get("add_prefix_space", False)),
            )._tokenizer
            return pair
        json_folder = folder_json(folder)
        if json_folder is not None:
            return FastTokenizer.from_str(json.dumps(json_folder))
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder}: cannot read the tokenizer: {error}") from None
    raise CheckpointError(
        f"{folder} has no tokenizer: add the model's tokenizer.json (or {TIKTOKEN}, "
        f"{SENTENCEPIECE}, or vocab.json and merges.txt)"
    )


def _check_ids(path: Path) -> None:
    """Raises `CheckpointError` for token ids that would make the library allocate gigabytes."""
    content = path.read_bytes()
    if LARGE_ID.search(content) is None:
        return
    raw = read_object(path)
    model, added_tokens = raw.get("model"), raw.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocab.items()] if isinstance(vocab, dict) else []
    ids += [(x.get("content"), x.get("id")) for x in added_tokens or () if isinstance(x, dict)]
    for token, number in ids:
        if isinstance(number, int) and number > MAX_ID:
            raise CheckpointError(
                f"{path}: token {token!r} has id {number}, but at most {MAX_ID} is supported"
            )


def _growth(part: Mapping[str, Any]) -> float:
    """Returns how many times as long a normalizer or decoder may make a text."""
    growth = 1.0
    for step in part.get("normalizers") or part.get("decoders") or ():
        growth *= _growth(step)
    if part.get("type") == "Replace":
        pattern = part["pattern"].get("String")
        growth = max(1.0, len(part["content"]) / max(1, len(pattern or "a")))
    return growth


def _wants_bos(folder: Path) -> bool:
    """Returns whether a beginning token goes before prompts, where no tokenizer.json says so: it
    does by default, but with tiktoken's vocabularies. There transformers 5 ignores `add_bos_token`,
    too."""
    if (folder / "tokenizer.json").is_file():
        return False
    is_usual = not (folder / TIKTOKEN).is_file()
    return bool(read_object(folder / CONFIG).get("add_bos_token", is_usual))


def _add(tokenizer: FastTokenizer, special: SpecialTokens) -> None:
    """Makes the tokenizer know special tokens that its own file does not mark, so that they are
    read as one token each, and left out of texts."""
    is_special = {t.content: t.special for t in tokenizer.get_added_tokens_decoder().values()}
    for token in special.all:
        if token.text not in is_special or (token.is_special and not is_special[token.text]):
            added = AddedToken(
                token.text,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.is_special,
            )
            add = tokenizer.add_special_tokens if token.is_special else tokenizer.add_tokens
            add([added])
