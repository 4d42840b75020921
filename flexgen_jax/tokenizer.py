"""Text to token ids and back, from a Hugging Face folder's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from tokenizers import Tokenizer as FastTokenizer

from flexgen_jax.checkpoint import CheckpointError, read_json


class Tokenizer:
    """Wraps `tokenizers`; a prompt gets the model's beginning token in front."""

    def __init__(self, folder: Path, bos_id: int | None) -> None:
        self._bos_id = bos_id
        self._tokenizer, self._special = _load(folder)

    def encode(self, text: str) -> list[int]:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return ids if self._bos_id is None else [self._bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        kept = [int(i) for i in ids if int(i) not in self._special]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))


def _load(folder: Path) -> tuple[FastTokenizer, set[int]]:
    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if whole.is_file():
            tokenizer = FastTokenizer.from_file(str(whole))
        elif vocab.is_file() and merges.is_file():
            # What OPT repositories ship: GPT-2's byte-level BPE, in two files.
            tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))._tokenizer
        else:
            raise CheckpointError(f"{folder} has neither tokenizer.json nor vocab.json, merges.txt")
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder}: cannot read the tokenizer: {error}") from None
    return tokenizer, _special_ids(folder, tokenizer)


def _special_ids(folder: Path, tokenizer: FastTokenizer) -> set[int]:
    """Ids that stand for no text: those the tokenizer marks, and those the folder names."""
    added = tokenizer.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    named = folder / "special_tokens_map.json"
    if named.is_file():
        entries = read_json(named)
        for entry in entries.values() if isinstance(entries, dict) else ():
            text = entry.get("content") if isinstance(entry, dict) else entry
            found = tokenizer.token_to_id(text) if isinstance(text, str) else None
            if found is not None:
                special.add(found)
    return special
