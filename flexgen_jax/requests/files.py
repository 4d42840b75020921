"""Reads prompts from files, and selects the fields of written results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from flexgen_jax.errors import UserError
from flexgen_jax.requests.outputs import RequestOutput


class Prompt(NamedTuple):
    """A prompt, and its place in the input, such as "prompts.txt, line 3"."""

    text: str
    where: str


def read_prompts(path: Path) -> list[Prompt]:
    """Reads the prompts of a file: one per line or, for a .jsonl file, the "prompt" of each line's
    object.

    Blank lines are skipped; "-" is standard input. Raises `UserError` that names the line.
    """
    name = "standard input" if str(path) == "-" else str(path)
    content, prompts = read_text(path, "--prompts-file"), list[Prompt]()
    # Not `splitlines`, which also splits at other characters that may be part of a text.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            place, line = f"{name}, line {number}", line.removesuffix("\r")
            is_json = path.suffix == ".jsonl"
            prompts.append(Prompt(_prompt_in(line, place) if is_json else line, place))
    if not prompts:
        raise UserError(f"{name} has no prompts; write one prompt per line")
    return prompts


def read_text(path: Path, flag: str) -> str:
    """Reads a file, or for "-" standard input; raises `UserError` that names the flag."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {flag} {path}: {error}") from None


def _prompt_in(line: str, place: str) -> str:
    try:
        value = json.loads(line)
        prompt = value["prompt"] if isinstance(value, dict) else None
        if isinstance(prompt, str):
            prompt.encode()  # fails for half of a pair of surrogates
    except (ValueError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{place} is not an object with a string "prompt": {{"prompt": "..."}}')
    return prompt


RESULT = ("prompt", "text", "token_ids", "finish_reason")


def as_json(result: RequestOutput) -> dict[str, Any]:
    """Returns the fields of a finished text that are written to a file, and of one that could not
    be made its error."""
    why = {} if result.error is None else {"error": result.error}
    return {name: getattr(result, name) for name in RESULT} | why
