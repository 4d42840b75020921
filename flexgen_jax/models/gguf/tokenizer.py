"""A GGUF file's tokenizer as the tokenizer.json and tokenizer_config.json of a Hugging Face
folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.container import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITS: Mapping[str, str | None] = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "smaug-bpe": LLAMA3,
    "dbrx": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": TEKKEN,
    "tekken": TEKKEN,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "megrez": QWEN2,
    "gpt-2": None,
    "phi-2": None,
    "jina-en": None,
    "olmo": None,
    "dolma": None,
    "smollm": "",
    "starcoder": "",
    "refact": "",
    "command-r": "",
    "codeshell": "",
}
"""How text is split before its bytes are joined, by "tokenizer.ggml.pre": a pattern, GPT-2's own
(None), or that with each digit apart ("")."""

REPEATS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken", "pixtral"})
"""Those in which a word that is a token is one, whatever its merges."""


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """Returns the JSON of the files by their names; raises `CheckpointError` for a kind that is not
    read."""
    kind = file.metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _bpe, "llama": _pieces}
    if kind not in makers or "tokenizer.ggml.tokens" not in file.metadata:
        raise CheckpointError(
            f"{file.path}: its tokenizer is of the kind {kind!r}; read are {', '.join(makers)}"
        )
    tokens = file.metadata["tokenizer.ggml.tokens"]
    types = [int(kind) for kind in file.metadata.get("tokenizer.ggml.token_type", ())]
    types = types or [NORMAL] * len(tokens)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        **makers[kind](file, tokens, types),
    }
    _add_ends(file, tokens, whole)
    return {"tokenizer.json": whole, "tokenizer_config.json": _config(file, tokens)}


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED) or (kind == UNKNOWN and token)
    ]


def _bpe(file: GgufFile, tokens: Sequence[str], _types: Sequence[int]) -> dict[str, Any]:
    """A vocabulary of bytes."""
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in SPLITS:
        raise CheckpointError(
            f"{file.path}: its tokenizer splits text as {pre!r}, which is not known; get the model "
            "as safetensors, or add the pattern to `SPLITS`"
        )
    pattern = SPLITS[pre]
    merges = file.metadata.get("tokenizer.ggml.merges", [])
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [{**by_bytes, "use_regex": not pattern}]
    if pattern == "":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        steps.insert(0, {**split, "invert": False})
    return {
        "normalizer": {"type": "NFC"} if pattern == QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {**by_bytes, "use_regex": True},
        "decoder": {**by_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in REPEATS,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _pieces(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """SentencePiece's vocabulary, as pairs that are joined: those first whose result is likelier,
    which is what its scores say."""
    scores = file.metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, kind in zip(tokens, types, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        pairs = [(token[:n], token[n:]) for n in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(float(scores[vocabulary[token]]), pair) for pair in known]
    merges.sort(key=lambda merge: -merge[0])
    begins = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, space] if begins else [space]
    back = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown[0] if unknown else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for _, pair in merges],
        },
    }


def _special(file: GgufFile, name: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is None or not 0 <= number < len(tokens):
        return None
    return int(number), tokens[number]


def _add_ends(file: GgufFile, tokens: Sequence[str], whole: dict[str, Any]) -> None:
    """Adds what puts tokens at the beginning and the end of a prompt, where the file asks for
    it."""
    is_pieces = file.metadata["tokenizer.ggml.model"] == "llama"
    wants = {
        "bos": file.metadata.get("tokenizer.ggml.add_bos_token", is_pieces),
        "eos": file.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {name: _special(file, name, tokens) for name, is_wanted in wants.items() if is_wanted}
    if not any(ends.values()):
        return
    marks = {
        name: [{"SpecialToken": {"id": end[1], "type_id": 0}}] if end is not None else []
        for name, end in ends.items()
    }
    first, last = marks.get("bos", []), marks.get("eos", [])
    one, other = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [*first, one, *last],
        "pair": [*first, one, *last, *first, other, *last],
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
