"""A GGUF file's metadata as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flexgen_jax.models.gguf.container import PART, GgufFile
from flexgen_jax.models.gguf.tokenizer import tokenizer_files

ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
        *("<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
"""Texts of tokens that end a generation whatever their type, as in llama.cpp."""

OF_HARMONY = frozenset(("<|return|>", "<|call|>", "<|end|>"))
"""Where a vocabulary has these three, the last one ends a message, not the generation."""


def files_of(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON of the folder's files by their names."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    ends = {config["eos_token_id"]} if config.get("eos_token_id") is not None else set()
    for name in ("eot", "eom"):
        number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        ends |= set() if number is None else {int(number)}
    texts = ENDS - ({"<|end|>"} if {*tokens} >= OF_HARMONY else set())
    ends |= {number for number, token in enumerate(tokens) if token in texts}
    return {
        "config.json": config,
        "generation_config.json": {"eos_token_id": sorted(ends)} if ends else {},
        **tokenizer_files(file),
    }


def only_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder that has no other model, the first part of a split one;
    None if there is none, or more than one."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    models: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        if not path.name.startswith("mmproj"):  # of pictures
            match = PART.fullmatch(path.name)
            models.setdefault(match[1] if match else path.name, path)
    return next(iter(models.values())) if len(models) == 1 else None


@contextmanager
def as_folder(file: GgufFile, config: dict[str, Any]) -> Iterator[Path]:
    """Yields a folder of these files, which is removed in the end."""
    with TemporaryDirectory(prefix="flexgen-gguf-") as root:
        folder = Path(root) / file.path.name
        folder.mkdir()
        for name, content in files_of(file, config).items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        yield folder
