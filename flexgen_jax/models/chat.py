"""Chat templates: conversations as the text that a model was trained on, by its own folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from flexgen_jax.models.checkpoint import CheckpointError, digest, read_json

Message = Mapping[str, Any]
"""A message: {"role": "user", "content": "..."}."""


class ChatTemplate:
    """The template of a Hugging Face folder, from chat_template.jinja or tokenizer_config.json.

    It is a program by whoever made the folder, so it is rendered in Jinja's sandbox, which lets it
    neither call anything dangerous nor change what it is given.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source, self._tokens = _read(folder)

    @property
    def fingerprint(self) -> str:
        """Differs for templates that write conversations differently."""
        return digest(self._source, sorted(self._tokens.items()))

    def render(self, messages: Sequence[Message]) -> str:
        """Returns a conversation as text, up to where the assistant's next message begins.

        Raises `CheckpointError` if the folder has no template, or if it refuses the messages.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self._source is None:
            raise CheckpointError(
                f"{self._folder} has no chat template; give the whole prompt as a text instead"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            template = environment.from_string(self._source)
            made: str = template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self._folder}: the chat template says: {error}") from None
        return made


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _read(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Returns a folder's template, and the special tokens that it may name."""
    path, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    raw = read_json(path) if path.is_file() else {}
    raw = raw if isinstance(raw, dict) else {}
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        found = raw.get(name)
        text = found.get("content") if isinstance(found, dict) else found
        tokens[name] = text if isinstance(text, str) else ""
    source = own.read_text(encoding="utf-8") if own.is_file() else raw.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None, tokens
