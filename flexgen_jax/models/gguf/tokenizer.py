"""A GGUF file's tokenizer as the tokenizer.json and tokenizer_config.json of a Hugging Face
folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexgen_jax.models import tokenizer_json
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.container import GgufFile
from flexgen_jax.models.gguf.pre_tokenizers import PRE_TOKENIZERS, Split
from flexgen_jax.models.tokenizer_json import NORMAL


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """Returns the JSON of the files by their names; raises `CheckpointError` for a kind that is not
    read."""
    model_type = file.metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _bpe, "llama": _pieces, "gemma4": _merged_pieces}
    if model_type not in makers or "tokenizer.ggml.tokens" not in file.metadata:
        raise CheckpointError(
            f"{file.path}: tokenizer {model_type!r} is not supported; supported: "
            f"{', '.join(makers)}"
        )
    tokens = file.metadata["tokenizer.ggml.tokens"]
    types = [int(model_type) for model_type in file.metadata.get("tokenizer.ggml.token_type", ())]
    types = types or [NORMAL] * len(tokens)
    model_parts = makers[model_type](file, tokens, types)
    whole = tokenizer_json.whole(model_parts, tokenizer_json.added_by_type(tokens, types))
    _add_ends(file, tokens, whole)
    return {"tokenizer.json": whole, "tokenizer_config.json": _config(file, tokens)}


def split_of(file: GgufFile) -> Split:
    """Returns how a vocabulary of bytes splits text; raises `CheckpointError` for an unknown
    name."""
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {name!r} is not supported; get the model as safetensors"
        )
    return PRE_TOKENIZERS[name]


def _bpe(file: GgufFile, tokens: Sequence[str], _types: Sequence[int]) -> dict[str, Any]:
    """A vocabulary of bytes."""
    split = split_of(file)
    return tokenizer_json.of_bytes(tokens, _merges(file), split.patterns, repeats=split.keeps_words)


def _pieces(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    scores = file.metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    begins = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return tokenizer_json.of_pieces(tokens, types, scores, begins)


def _merged_pieces(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    return tokenizer_json.of_merged_pieces(tokens, types, _merges(file), begins=False)


def _merges(file: GgufFile) -> list[list[str]]:
    return [merge.split(" ", 1) for merge in file.metadata.get("tokenizer.ggml.merges", [])]


def _special(file: GgufFile, name: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is None or not 0 <= number < len(tokens):
        return None
    return int(number), tokens[number]


def _add_ends(file: GgufFile, tokens: Sequence[str], whole: dict[str, Any]) -> None:
    """Adds what puts tokens at the beginning and the end of a prompt, where the file asks for
    it."""
    metadata = file.metadata
    model_type = metadata["tokenizer.ggml.model"]
    begins = model_type in ("llama", "gemma4") or split_of(file).begins
    wants = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", begins) or model_type == "gemma4",
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {name: _special(file, name, tokens) for name, is_wanted in wants.items() if is_wanted}
    if not any(ends.values()):
        return
    marks = {
        name: [{"SpecialToken": {"id": end[1], "type_id": 0}}] if end is not None else []
        for name, end in ends.items()
    }
    first, last = marks.get("bos", []), marks.get("eos", [])
    first_sequence, second_sequence = (
        {"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB")
    )
    template = {
        "type": "TemplateProcessing",
        "single": [*first, first_sequence, *last],
        "pair": [*first, first_sequence, *last, *first, second_sequence, *last],
        "special_tokens": {
            end[1]: {"id": end[1], "ids": [end[0]], "tokens": [end[1]]}
            for end in ends.values()
            if end is not None
        },
    }
    before = whole["post_processor"]
    steps = [template] if before is None else [before, template]
    whole["post_processor"] = {"type": "Sequence", "processors": steps}


def _config(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        end = _special(file, theirs, tokens)
        if end is not None:
            config[f"{ours}_token"] = end[1]
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
