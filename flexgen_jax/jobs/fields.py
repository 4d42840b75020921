"""Fields of OpenAI's request bodies, and of vLLM's beyond them: supported, ignored and rejected
ones.

`docs/batch.md` lists them for users. Fields that are neither here nor read by `jobs.lines` are
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "stream_options",
        "verbosity",
        "priority",
        "request_id",
        "cache_salt",
    )
)
"""Fields without an effect on the output."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "web_search_options": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "return_token_ids": (False,),
    "detokenize": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "mm_processor_kwargs": (),
}
"""Fields that may be null or have these values, without an effect; other values are not
supported."""

OTHER_NAMES = {"repeat_penalty": "repetition_penalty"}
"""Fields of other servers, llama.cpp's, that have a name here."""

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts of messages that are texts, and the field that has the text."""


def without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a body's fields less those that are null or ask for nothing; raises `ValueError` that
    names an unsupported field."""
    values = {key: value for key, value in body.items() if value is not None}
    for key, name in OTHER_NAMES.items():
        if key in values:
            values.setdefault(name, values.pop(key))
    for key, variable in (("reasoning", "effort"), ("thinking", "type")):
        wish = values.get(key)
        value = values.pop(key).get(variable) if isinstance(wish, dict) else None
        if key == "reasoning" and isinstance(value, str):
            values.setdefault("reasoning_effort", value)
        elif value in ("enabled", "disabled"):
            values.setdefault("enable_thinking", value == "enabled")
    for key in IGNORED:
        values.pop(key, None)
    for key, allowed in NEUTRAL.items():
        if key in values and not _is_one_of(values.pop(key), allowed):
            alternatives = " or ".join(map(json.dumps, allowed))
            instead = f"leave it out{f', or set it to {alternatives}' if alternatives else ''}"
            raise ValueError(f'"{key}" is not supported by this engine; {instead}')
    return values


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Returns whether a value is among some, where true is not 1."""
    return any(isinstance(value, bool) == isinstance(x, bool) and value == x for x in allowed)
