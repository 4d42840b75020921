"""A folder's special tokens, gathered from all files that may name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexgen_jax.models.folder import read_object

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The usual roles, in transformers' order of adding tokens to a vocabulary."""

LISTS = ("extra_special_tokens", "additional_special_tokens")
"""Fields with further special tokens: a list, or an object of tokens by name."""


@dataclass(frozen=True)
class SpecialToken:
    """A token that is read as one, by its text, and whether blanks at its sides belong to it.

    is_special: whether it stands for no text; normalized: whether it is looked for in normalized
    text.
    """

    text: str
    lstrip: bool = False
    rstrip: bool = False
    is_special: bool = True
    normalized: bool = False


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a folder.

    named: those with a role, such as "bos_token" and "eos_token"; others: those without; added: all
    that were added to the vocabulary, by number, with their flags.
    """

    named: Mapping[str, SpecialToken]
    others: tuple[SpecialToken, ...] = ()
    added: tuple[SpecialToken, ...] = ()

    @property
    def all(self) -> tuple[SpecialToken, ...]:
        """Every token once, in the order of their numbers."""
        special = {token.text: token for token in (*self.named.values(), *self.others)}
        by_text = {token.text: token for token in self.added}
        for text, token in special.items():
            existing = by_text.get(text)
            by_text[text] = token if existing is None else replace(existing, is_special=True)
        return tuple(by_text.values())

    @property
    def texts(self) -> dict[str, str]:
        """The texts of those with a role, as chat templates name them."""
        return {name: token.text for name, token in self.named.items()}

    def text(self, name: str) -> str | None:
        """Returns the text of the token with a role, None without one."""
        token = self.named.get(name)
        return None if token is None else token.text


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Reads tokenizer_config.json, special_tokens_map.json and added_tokens.json; raises
    `CheckpointError` for a file that is no JSON object.

    As in transformers, the map overrides the config, and the second of `LISTS` counts where there
    is no first one. If the config has "added_tokens_decoder", the map only adds roles that the
    config does not have, which transformers leaves out.
    """
    config, mapped = read_object(folder / CONFIG), read_object(folder / MAP)
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        named, sources = {**_named(mapped), **_named(config)}, [config]
        added = _by_id({key: value for key, value in decoder.items() if isinstance(value, Mapping)})
    else:
        named, sources = {**_named(config), **_named(mapped)}, [config, mapped]
        words = read_object(folder / ADDED)
        added = _by_id({str(number): {"content": word} for word, number in words.items()})
    further_tokens: list[SpecialToken] = []
    for source in sources:
        listed = next((source[field] for field in LISTS if source.get(field)), None)
        if isinstance(listed, Mapping):
            named |= {name: t for name, raw in listed.items() if (t := _token(raw)) is not None}
        else:
            further_tokens = [*further_tokens, *_tokens(listed)]
    ordered = {role: named[role] for role in ROLES if role in named} | named
    return SpecialTokens(ordered, tuple(dict.fromkeys(further_tokens)), tuple(added))


def _named(source: Mapping[str, Any]) -> dict[str, SpecialToken]:
    """Returns the tokens of the fields "bos_token", "eos_token" and the like, whatever the role."""
    tokens = {key: _token(raw) for key, raw in source.items() if key.endswith("_token")}
    return {key: token for key, token in tokens.items() if token is not None}


def _by_id(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[SpecialToken]:
    """Yields the tokens of entries by id, in the order of these numbers."""
    numbers = sorted((int(key), raw) for key, raw in entries.items() if key.isdigit())
    for _, raw in numbers:
        token = _token(raw)
        if token is not None:
            yield replace(
                token,
                is_special=bool(raw.get("special")),
                normalized=bool(raw.get("normalized", not raw.get("special"))),
            )


def _tokens(listed: Any) -> Iterator[SpecialToken]:
    for raw in listed if isinstance(listed, list) else ():
        token = _token(raw)
        if token is not None:
            yield token


def _token(raw: Any) -> SpecialToken | None:
    """Returns a token that is a text, or an object with its "content"."""
    if isinstance(raw, Mapping) and isinstance(raw.get("content"), str):
        return SpecialToken(raw["content"], bool(raw.get("lstrip")), bool(raw.get("rstrip")))
    return SpecialToken(raw) if isinstance(raw, str) and raw else None
