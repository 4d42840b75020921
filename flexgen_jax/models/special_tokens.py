"""A folder's special tokens, gathered from all files that may name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_jax.models.folder import read_object

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

LISTS = ("extra_special_tokens", "additional_special_tokens")
"""Fields with further special tokens: a list, or an object of tokens by name."""


@dataclass(frozen=True)
class SpecialToken:
    """A special token's text, and whether blanks at its sides belong to it."""

    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a folder.

    named: those with a role, such as "bos_token" and "eos_token"; others: those without.
    """

    named: Mapping[str, SpecialToken]
    others: tuple[SpecialToken, ...] = ()

    @property
    def all(self) -> tuple[SpecialToken, ...]:
        """Every token once."""
        by_text = {token.text: token for token in (*self.named.values(), *self.others)}
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
    """Reads tokenizer_config.json and special_tokens_map.json; raises `CheckpointError` for a file
    that is no JSON object.

    As in transformers, the map overrides the config, unless the config has "added_tokens_decoder";
    then the map only adds roles that the config does not have.
    """
    config, mapped = read_object(folder / CONFIG), read_object(folder / MAP)
    lists_added = "added_tokens_decoder" in config
    sources = (mapped, config) if lists_added else (config, mapped)  # the last one wins
    named: dict[str, SpecialToken] = {}
    others: list[SpecialToken] = []
    for source in sources:
        named |= _named(source)
        for field in LISTS:
            found = source.get(field)
            if isinstance(found, Mapping):
                named |= {name: t for name, raw in found.items() if (t := _token(raw)) is not None}
            else:
                others += _tokens(found)
    others += _tokens(_marked(config.get("added_tokens_decoder")))
    return SpecialTokens(named, tuple(dict.fromkeys(others)))


def _named(source: Mapping[str, Any]) -> dict[str, SpecialToken]:
    """Returns the tokens of the fields "bos_token", "eos_token" and the like, whatever the role."""
    tokens = {key: _token(raw) for key, raw in source.items() if key.endswith("_token")}
    return {key: token for key, token in tokens.items() if token is not None}


def _marked(decoder: Any) -> list[Any]:
    """Returns the entries of "added_tokens_decoder" that are marked as special."""
    entries = decoder.values() if isinstance(decoder, Mapping) else ()
    return [raw for raw in entries if isinstance(raw, Mapping) and raw.get("special")]


def _tokens(found: Any) -> Iterator[SpecialToken]:
    for raw in found if isinstance(found, list) else ():
        token = _token(raw)
        if token is not None:
            yield token


def _token(raw: Any) -> SpecialToken | None:
    """Returns a token that is a text, or an object with its "content"."""
    if isinstance(raw, Mapping) and isinstance(raw.get("content"), str):
        return SpecialToken(raw["content"], bool(raw.get("lstrip")), bool(raw.get("rstrip")))
    return SpecialToken(raw) if isinstance(raw, str) and raw else None
