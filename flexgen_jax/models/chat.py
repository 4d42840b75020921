"""Chat templates: conversations as the text that a model was trained on, by its own folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import numpy as np

from flexgen_jax.models.folder import CheckpointError, read_object
from flexgen_jax.models.special_tokens import CONFIG, read_special_tokens
from flexgen_jax.models.weight_source import digest

if TYPE_CHECKING:
    from flexgen_jax.models.template_limits import LimitedEnvironment

Message = Mapping[str, Any]
"""A message: {"role": "user", "content": "..."}."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates where a folder has several; the second one is for conversations with tools."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages have an assistant's reasoning; templates read the first."""

MAX_INDENT = 100
"""Blanks of a level of JSON."""

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class ChatOptions:
    """Options for rendering a conversation, as in transformers' `apply_chat_template`.

    tools, documents: objects that the template may describe. variables: additional template
    variables, such as {"enable_thinking": False}. adds_generation_prompt: whether to open the
    assistant's message at the end. continues_final: whether to continue the last message instead of
    opening a new one, or the name of the field to continue. template: a template's text, or the
    name of one of the folder's templates, instead of the default. now: the time for `strftime_now`;
    None is the present.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues_final: bool | str = False
    template: str | None = None
    now: datetime | None = None


class ChatTemplate:
    """The templates of a Hugging Face folder, from chat_template.jinja, additional_chat_templates/
    or tokenizer_config.json.

    Templates are untrusted programs, so they run in Jinja's sandbox, which blocks dangerous calls
    and changes to the arguments. joins_parts: whether content parts were passed to a template as
    one text.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._tokens = folder, read_special_tokens(folder).texts
        self._sources = _read(folder)
        self.joins_parts = False

    @property
    def fingerprint(self) -> str:
        """Differs between templates that render conversations differently."""
        return digest(sorted(self._sources.items()), sorted(self._tokens.items()))

    @property
    def tells_time(self) -> bool:
        """Whether the text of a conversation may depend on the time."""
        return any("strftime_now" in source for source in self._sources.values())

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """Returns a conversation as text, up to where the assistant's next message begins.

        The template gets the messages unchanged, without fields that are None, as in transformers.
        If it would print a list of content parts, it gets one text instead, one line per part.
        Raises `CheckpointError` if the folder has no template, or if it refuses the messages.
        """
        from jinja2 import TemplateError

        options = options or ChatOptions()
        if not isinstance(options.now, datetime | None):
            raise CheckpointError(f"now must be a datetime, not {options.now!r}")
        source = self._source(options)
        try:
            chat = _normalized(messages)
            if "developer" not in source:
                chat = _with_system(chat)
            if not chat:
                raise ValueError("the conversation has no message")
            final = _mark_final(chat, options.continues_final) if options.continues_final else ""
            rendered = self._rendered(source, chat, options)
            return _unmarked(rendered, final) if options.continues_final else rendered
        except (
            TemplateError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
            ArithmeticError,
            LookupError,
        ) as error:
            raise CheckpointError(
                f"{self._folder}: cannot apply the chat template: {error}"
            ) from None

    def _source(self, options: ChatOptions) -> str:
        named = options.template
        if named is not None:
            if named not in self._sources and "{" not in named:
                raise CheckpointError(
                    f"{self._folder} has no chat template {named!r}; available: "
                    f"{', '.join(sorted(self._sources)) or 'none'}"
                )
            return self._sources.get(named, named)
        name = TOOL_USE if options.tools is not None and TOOL_USE in self._sources else DEFAULT
        if name in self._sources:
            return self._sources[name]
        if self._sources:
            raise CheckpointError(
                f"{self._folder} has several chat templates and no default; choose one of "
                f"{', '.join(sorted(self._sources))}"
            )
        raise CheckpointError(
            f"{self._folder} has no chat template; pass the whole prompt as text instead"
        )

    def _rendered(self, source: str, chat: list[dict[str, Any]], options: ChatOptions) -> str:
        from jinja2 import UndefinedError

        for name, objects in (("tools", options.tools), ("documents", options.documents)):
            if not all(isinstance(entry, Mapping) for entry in objects or ()):
                raise ValueError(f"{name} must be objects, such as JSON schemas of functions")
        moment = options.now or datetime.now()
        begins = options.adds_generation_prompt and not options.continues_final
        variables = {
            "strftime_now": moment.strftime,
            "tools": _plain(options.tools),
            "documents": _plain(options.documents),
            "add_generation_prompt": begins,
        }
        for name in (*variables, "messages"):
            if name in options.variables and name not in self._tokens:
                raise ValueError(f"{name!r} is reserved and cannot be a variable")
        variables |= self._tokens | _plain(options.variables)
        environment, template = _compiled(source)
        lists = [m for m in chat if isinstance(m.get("content"), _Parts)]
        try:
            rendered = environment.rendered(template, {"messages": chat, **variables})
            wrong = [m for m in lists if m["content"].is_written and not m["content"].is_walked]
        except (TypeError, UndefinedError):  # such as adding a list or None with "+"
            wrong = [m for m in lists if not m["content"].is_walked]
            empty = [m for m in chat if "content" not in m]
            if not wrong and not empty:
                raise
            for message in empty:
                message["content"] = ""
            whole = {"messages": chat, **variables}
            rendered = "" if wrong else environment.rendered(template, whole)
        if not wrong:
            return rendered
        for message in wrong:
            message["content"] = message["content"].joined()
        self.joins_parts = True
        return environment.rendered(template, {"messages": chat, **variables})


class _Parts(list[Any]):
    """The parts of a message's content, which notice whether a template walks through them, and
    whether it writes them as a whole."""

    is_walked = is_written = False

    def __str__(self) -> str:
        self.is_written = True
        return super().__str__()

    def __repr__(self) -> str:
        self.is_written = True
        return super().__repr__()

    def __reversed__(self) -> Iterator[Any]:
        self.is_walked = True
        return super().__reversed__()

    def __iter__(self) -> Iterator[Any]:
        self.is_walked = True  # when the first part is asked for
        yield from super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.is_walked = True
        return super().__getitem__(index)

    def joined(self) -> str:
        """The texts of all parts, a line each; raises `ValueError` for a part without a text."""
        texts = []
        for piece in list.__iter__(self):
            text = piece if isinstance(piece, str) else dict(piece).get("text")
            if not isinstance(text, str):
                part_type = piece.get("type") if isinstance(piece, Mapping) else piece
                raise ValueError(
                    f"it accepts only text, but a message has a part of type {part_type!r}; send "
                    "text parts only"
                )
            texts.append(text)
        return "\n".join(texts)


class Arguments(dict[str, Any]):
    """The arguments of a tool call. Templates expect an object, and OpenAI's API sends JSON text:
    this is the object, and printing it gives the JSON text."""

    def __init__(self, text: str) -> None:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("not an object")
        super().__init__(content)
        self._text = text

    def __str__(self) -> str:
        return self._text


class ArgumentText(str):
    """Arguments of a tool call that are no JSON object. A template writes them as the model did."""

    __slots__ = ()


def call_arguments(value: Any) -> Any:
    """Returns the arguments of a tool call in a message's history as templates expect them."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return Arguments("{}")
    if not isinstance(value, str):
        return value
    try:
        return Arguments(value)
    except (ValueError, RecursionError):
        return ArgumentText(value)


def _normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages of plain data, without fields that are None, and with the reasoning under
    each name that templates know."""
    chat = []
    for message in messages:
        plain = _plain(message)
        if not isinstance(plain, dict):
            raise TypeError(f"a message must be an object, not {message!r}")
        plain = {key: value for key, value in plain.items() if value is not None}
        reasoning = next((plain[key] for key in REASONING if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, REASONING[0]: reasoning}
        if isinstance(plain.get("content"), list | tuple):
            plain["content"] = _Parts(plain["content"])
        chat.append(plain)
    return chat


def _with_system(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation whose developer messages are system messages, which OpenAI's API had
    before. A second one at the beginning is joined with the first."""
    renamed: list[dict[str, Any]] = []
    for message in chat:
        if message.get("role") != "developer":
            renamed.append(message)
            continue
        message = {**message, "role": "system"}
        texts = [m.get("content") for m in (*renamed[-1:], message)]
        if len(renamed) == 1 and renamed[0].get("role") == "system" and _are_texts(texts):
            renamed[0] = {**renamed[0], "content": "\n\n".join(texts)}
        else:
            renamed.append(message)
    return renamed


def _are_texts(values: list[Any]) -> TypeGuard[list[str]]:
    return all(isinstance(value, str) for value in values)


def _plain(value: Any) -> Any:
    """Returns data in JSON's types: pydantic objects, such as those of OpenAI's library, and
    dataclasses become objects, NumPy's scalars become numbers."""
    if (
        value is None
        or isinstance(value, Arguments | ArgumentText)
        or type(value) in (str, int, float, bool)
    ):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum the text, not its name
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _mark_final(chat: list[dict[str, Any]], wanted: bool | str) -> str:
    """Puts a mark after the text of the last message, where the rendered text is cut; returns that
    text. wanted: the field that has it, or true for its content."""
    message, field_name = chat[-1], wanted if isinstance(wanted, str) else "content"
    content = message.get(field_name)
    if isinstance(content, str):
        names = REASONING if field_name in REASONING else (field_name,)
        for name in names:
            if message.get(name) == content:
                message[name] = content + CONTINUED
        return content
    pieces = list.__iter__(content) if isinstance(content, list) else ()
    texts = [p for p in pieces if isinstance(p, dict) and isinstance(p.get("text"), str)]
    if not texts:
        raise ValueError(f"the last message has no {field_name} to continue")
    final: str = texts[-1]["text"]
    texts[-1]["text"] += CONTINUED
    return final


def _unmarked(made: str, final: str) -> str:
    """Returns the text before the mark; blanks before it are as the template left them. final: the
    message's own text."""
    position = made.rfind(CONTINUED.strip())
    if position < 0 or final.strip() not in made:
        raise ValueError("it changes the last message, which can therefore not be continued")
    return made[:position] if made.startswith(CONTINUED, position) else made[:position].rstrip()


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[LimitedEnvironment, Any]:
    """Returns a template, with the filters and tags that transformers gives them, and the
    environment that renders it."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols

    from flexgen_jax.models.template_limits import LimitedEnvironment

    class Generation(Extension):
        """{% generation %} marks training targets; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012 - as the library has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment, environment.limited_template(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which is wrong in a prompt."""
    if isinstance(value, ArgumentText):
        return str(value)
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise ValueError(f"tojson has an indent of {indent}, but at most {MAX_INDENT} is allowed")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _read(folder: Path) -> dict[str, str]:
    """Returns a folder's templates by name; those in files of their own come first."""
    sources: dict[str, str] = {}
    main_file = folder / "chat_template.jinja"
    if main_file.is_file():
        sources[DEFAULT] = _text(main_file)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _text(path)
    if sources:
        return sources
    template = read_object(folder / CONFIG).get("chat_template")
    if template is None:  # as multimodal models' processors had it
        template = read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str):
        return {DEFAULT: template}
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    named = template if isinstance(template, list) else []
    pairs = [(e.get("name"), e.get("template")) for e in named if isinstance(e, Mapping)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None
