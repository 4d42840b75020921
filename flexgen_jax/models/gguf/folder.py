"""A GGUF file's metadata as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flexgen_jax.models.gguf.container import GgufFile
from flexgen_jax.models.gguf.tokenizer import tokenizer_files

ENDS_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")
"""End tokens in addition to the metadata's, as in llama.cpp."""


def files_of(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON of the folder's files by their names."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    ends = {config["eos_token_id"]} if config.get("eos_token_id") is not None else set()
    for name in ("eot", "eom"):
        number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        ends |= set() if number is None else {int(number)}
    types = file.metadata.get("tokenizer.ggml.token_type", ())
    control = {tokens[n]: n for n, token_type in enumerate(types) if token_type == 3}
    ends |= {control[token] for token in ENDS_OF_TURNS if token in control}
    return {
        "config.json": config,
        "generation_config.json": {"eos_token_id": sorted(ends)} if ends else {},
        **tokenizer_files(file),
    }


@contextmanager
def as_folder(file: GgufFile, config: dict[str, Any]) -> Iterator[Path]:
    """Yields a folder of these files, which is removed in the end."""
    with TemporaryDirectory(prefix="flexgen-gguf-") as root:
        folder = Path(root) / file.path.name
        folder.mkdir()
        for name, content in files_of(file, config).items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        yield folder
